// A block of sequences' tokens of at most kPoints in shared memory, and its walk over its share of them. They come and
// leave in whole rows of the block's channels.
#pragma once

#include "flashgla/ops/long_convolution/cuda/spans.cuh"

namespace flashgla::ops::long_convolution::cuda {

using flashgla::cuda::Vector;

constexpr int kTeams = 4, kFusedThreads = kTeams * kTeam;

// A block's share of a call.
struct FusedShare {
  int chunk, channel;  // of its sequences; its first

  __device__ __forceinline__ FusedShare(std::int64_t channels, int across) {
    const int groups = static_cast<int>((channels + across - 1) / across);
    chunk = static_cast<int>(blockIdx.x) / groups;
    channel = (static_cast<int>(blockIdx.x) - chunk * groups) * across;
  }
};

// The first of a block's sequences from n on that goes by transforms.
template <class T>
__device__ __forceinline__ int sequence_from(const Call<T>& call, int n, int chunks) {
  while (n < call.sequences && !call.place_of(n).by_transforms()) n += chunks;
  return n;
}

__device__ __forceinline__ int spans_of(const Place& place) {
  return static_cast<int>(place.past + place.length + kSpan - 1) / kSpan;
}

// Bytes from global to shared memory, zeros where there are none: 8 or 16.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool there) {
  if constexpr (kBytes == 16) {
    ptx::copy_async_16(ptx::shared_address(shared), global, there ? 16 : 0);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(ptx::shared_address(shared)), "l"(global),
                 "r"(there ? 8 : 0)
                 : "memory");
  }
}

// A sequence's tokens of kAcross channels in shared memory: [kPoints,kAcross], with kTurned such that those that are 16
// apart are neighbours. The same thread takes the same elements whichever way they go, all of its own at once.
template <class T, int kAcross, bool kTurned = false>
struct Staged {
  static constexpr int kElements = kPoints * kAcross;
  static constexpr int kRow = kAcross * static_cast<int>(sizeof(T)), kPiece = kRow < 16 ? kRow : 16;
  static constexpr int kEach = kPiece / static_cast<int>(sizeof(T)), kPieces = kAcross / kEach;  // of a row
  static constexpr int kStride = kFusedThreads / kPieces, kOfThread = kPoints / kStride;         // rows; pieces
  using Piece = Vector<T, kEach>;
  T* rows;

  static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kPieces; }
  static __device__ __forceinline__ int own_channel() { return static_cast<int>(threadIdx.x) % kPieces * kEach; }
  __device__ __forceinline__ T* piece(int i) const {
    const int at = static_cast<int>(threadIdx.x) + kFusedThreads * i;
    if (!kTurned) return rows + at * kEach;
    const int row = at / kPieces, place = row % 16 * (kPoints / 16) + row / 16;
    return rows + (place * kPieces + at % kPieces) * kEach;
  }
  // Whether a tensor's rows can be taken in pieces.
  static __device__ __forceinline__ bool whole(const Lines<T>& lines, int channel, std::int64_t channels) {
    const std::int64_t at = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(lines.data + channel));
    const std::int64_t strides = (lines.line_stride | lines.token_stride) * static_cast<std::int64_t>(sizeof(T));
    return channel + kAcross <= channels && (at | strides) % kPiece == 0;
  }
  // Asks for a sequence of `from`, of a call's x with what is before it. Zeros behind its end.
  __device__ __forceinline__ void ask(const Lines<T>& from, const Place& place, int channel, std::int64_t channels,
                                      const Call<T>* inputs = nullptr) const {
    const int past = static_cast<int>(place.past), length = static_cast<int>(place.length);
    const int first = first_row() - past, d = channel + own_channel();
    if (whole(from, channel, channels) && (inputs == nullptr || past == 0)) {
      const T* at = from.at(place.line, place.begin + first, d);
      const std::int64_t step = kStride * from.token_stride;
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        const bool there = static_cast<unsigned>(first + kStride * i) < static_cast<unsigned>(length);
        copy_async<kPiece>(piece(i), there ? at + i * step : from.data, there);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kOfThread; ++i) {
      const int t = first + kStride * i;
#pragma unroll 1
      for (int e = 0; e < kEach; ++e) {
        float value = 0.0f;
        if (d + e < channels && inputs != nullptr) {
          value = inputs->token(place, t + past, d + e);
        } else if (d + e < channels && t >= 0 && t < length) {
          value = to_float(*from.at(place.line, place.begin + t, d + e));
        }
        piece(i)[e] = from_float<T>(value);
      }
    }
  }
  __device__ __forceinline__ void store(const Lines<T>& lines, const Place& place, int channel,
                                        std::int64_t channels) const {
    const int length = static_cast<int>(place.length), first = first_row() - static_cast<int>(place.past);
    const int d = channel + own_channel();
    T* at = lines.at(place.line, place.begin + first, d);
    const std::int64_t step = kStride * lines.token_stride;
    if (whole(lines, channel, channels)) {
      Piece pieces[kOfThread];
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) pieces[i] = Piece::load(piece(i));
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        if (static_cast<unsigned>(first + kStride * i) < static_cast<unsigned>(length)) pieces[i].store(at + i * step);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kOfThread; ++i) {
      if (static_cast<unsigned>(first + kStride * i) >= static_cast<unsigned>(length)) continue;
#pragma unroll 1
      for (int e = 0; e < kEach && d + e < channels; ++e) at[i * step + e] = piece(i)[e];
    }
  }
};

// Sequences of a block, one after the other: a sequence is asked for as soon as the one before is stored. ask(n),
// compute(n), store(n).
template <class T, class Ask, class Compute, class Store>
__device__ __forceinline__ void walk_sequences(const Call<T>& call, int first, int chunks, const Ask& ask,
                                               const Compute& compute, const Store& store) {
  for (int n = first; n < call.sequences;) {
    const int next = sequence_from(call, n + chunks, chunks);
    ptx::copy_async_wait<0>();
    __syncthreads();
    compute(n);
    __syncthreads();
    store(n);
    if (next < call.sequences) ask(next);
    ptx::copy_async_commit();
    n = next;
  }
  __syncthreads();
}

}  // namespace flashgla::ops::long_convolution::cuda

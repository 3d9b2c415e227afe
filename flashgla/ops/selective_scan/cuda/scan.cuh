// What the scan's kernels share. A block has 128 channels of one sequence, a warp 32 of them, and goes through the
// sequence in chunks of tokens. In the scan itself a thread has 4 channels x 4 states: lane l those of channels
// 4 (l / 4) ... and states 4 (l % 4) ...; everything that a channel has one of belongs to the lane of that number. The
// two meet in shared memory and in exchanges that leave each lane with its own channel's sum.
#pragma once

#include <cstdint>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/math.cuh"

namespace flashgla::ops::selective_scan::cuda {

using flashgla::cuda::from_float;
using flashgla::cuda::to_float;

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarp * kWarps;
constexpr int kBlockChannels = kThreads;
constexpr int kStates = 16;  // that a kernel has room for; fewer are filled up with zeros
constexpr int kChunk = 12;   // tokens between states that are kept: what two blocks' shared memory has room for
constexpr int kSide = 4;     // of a thread's square of channels and states
constexpr unsigned kAll = 0xffffffffu;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// A tensor [B,T,...], its last dimension contiguous.
template <class T>
struct Lines {
  T* data = nullptr;
  std::int64_t line_stride = 0, token_stride = 0;

  Lines() = default;
  explicit Lines(const TensorView& view)
      : data(static_cast<T*>(view.data)), line_stride(view.stride[0]), token_stride(view.stride[1]) {}
  __device__ __forceinline__ T* row(std::int64_t line, std::int64_t t) const {
    return data + line * line_stride + t * token_stride;
  }
};

// What every kernel of a call knows.
template <class T>
struct Call {
  Lines<T> x, raw, z, b, c;
  const float *dt_bias, *a_log, *skip;
  const float* h0;                 // [N,E,K]; null: zeros
  const std::int32_t* cu_seqlens;  // null: each line is a sequence
  std::int64_t length;             // of a line
  int channels, states;
  std::int64_t tiles;  // blocks of channels
  float4* kept;        // [slots,tiles,kWarps,kSide,kWarp]; null: not wanted
};

// A sequence: tokens [begin, begin + length) of its line.
struct Place {
  std::int64_t n, line, begin, length;

  template <class T>
  __device__ __forceinline__ Place(const Call<T>& call, std::int64_t sequence) : n(sequence), line(n), begin(0) {
    length = call.length;
    if (call.cu_seqlens == nullptr) return;
    line = 0;
    begin = call.cu_seqlens[n];
    length = call.cu_seqlens[n + 1] - begin;
  }
  __device__ __forceinline__ std::int64_t chunks() const { return (length + kChunk - 1) / kChunk; }
};

// Where a thread stands.
struct Where {
  int lane, warp, states, group;  // first of its states; first of its channels in the warp
  std::int64_t tile;
  int channel;  // its own

  __device__ __forceinline__ explicit Where(std::int64_t block_tile)
      : lane(threadIdx.x % kWarp),
        warp(threadIdx.x / kWarp),
        states(lane % kSide * kSide),
        group(lane / kSide * kSide),
        tile(block_tile),
        channel(static_cast<int>(block_tile) * kBlockChannels + static_cast<int>(threadIdx.x)) {}
  __device__ __forceinline__ int channel_of(int i) const { return channel - lane + group + i; }
};

template <class T>
__device__ __forceinline__ float4* kept_at(const Call<T>& call, const Where& where, const Place& place,
                                           std::int64_t chunk) {
  const std::int64_t first = call.cu_seqlens == nullptr ? place.line * call.length : place.begin;
  const std::int64_t slot = first / kChunk + place.n + chunk;
  return call.kept + (((slot * call.tiles + where.tile) * kWarps + where.warp) * kSide) * kWarp + where.lane;
}

// -exp(a_log) log2(e) of a thread's states; 0 where there are none.
template <class T>
__device__ __forceinline__ void load_rates(const Call<T>& call, const Where& where, float (&rates)[kSide][kSide]) {
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const int channel = where.channel_of(i), state = where.states + k;
      const bool there = channel < call.channels && state < call.states;
      rates[i][k] = there ? -expf(call.a_log[static_cast<std::int64_t>(channel) * call.states + state]) * kLog2E : 0.0f;
    }
  }
}

// What a thread reads of a chunk's b and c, on its way to shared memory: [token][b, c][state], by all of the block.
struct KeysAhead {
  static constexpr int kEach = kChunk * 2 * kStates / kThreads;
  float values[kEach];

  template <class T>
  __device__ __forceinline__ void load(const Call<T>& call, const Place& place, std::int64_t first) {
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const int item = r * kThreads + static_cast<int>(threadIdx.x), t = item / (2 * kStates);
      const int which = item / kStates % 2, state = item % kStates;
      values[r] = 0.0f;
      if (state < call.states && first + t < place.length) {
        values[r] = to_float(__ldg((which == 0 ? call.b : call.c).row(place.line, place.begin + first + t) + state));
      }
    }
  }
  __device__ __forceinline__ void store(float (*keys)[2][kStates]) const {
#pragma unroll
    for (int r = 0; r < kEach; ++r) (&keys[0][0][0])[r * kThreads + static_cast<int>(threadIdx.x)] = values[r];
  }
};

// A channel's elements of a chunk's tokens, all asked for at once; 0 where there are none.
template <class T>
__device__ __forceinline__ void load_channel(const Lines<T>& lines, const Place& place, std::int64_t first, int channel,
                                             bool there, float (&values)[kChunk]) {
#pragma unroll
  for (int t = 0; t < kChunk; ++t) {
    values[t] = there && first + t < place.length
                    ? to_float(__ldg(lines.row(place.line, place.begin + first + t) + channel))
                    : 0.0f;
  }
}

__device__ __forceinline__ void unpack(const float4& from, float (&to)[kSide]) {
  to[0] = from.x;
  to[1] = from.y;
  to[2] = from.z;
  to[3] = from.w;
}
__device__ __forceinline__ float4 packed(const float (&from)[kSide]) {
  return make_float4(from[0], from[1], from[2], from[3]);
}
__device__ __forceinline__ void load_four(const float* from, float (&to)[kSide]) {
  unpack(*reinterpret_cast<const float4*>(from), to);
}

// Of partial sums over a thread's states, for its channels: the whole sum of the lane's own channel.
__device__ __forceinline__ float sum_of_own_channel(const float (&part)[kSide], int lane) {
  const bool high = lane & 2, odd = lane & 1;
  const float first = (high ? part[2] : part[0]) + __shfl_xor_sync(kAll, high ? part[0] : part[2], 2);
  const float second = (high ? part[3] : part[1]) + __shfl_xor_sync(kAll, high ? part[1] : part[3], 2);
  return (odd ? second : first) + __shfl_xor_sync(kAll, odd ? first : second, 1);
}

// Of partial sums over a thread's channels, for its states of b and of c: the warp's sum of b (lanes below 16) or c,
// state `state_of_sum(lane)`.
__device__ __forceinline__ float sum_of_own_state(const float (&b)[kSide], const float (&c)[kSide], int lane) {
  const bool of_c = lane & 16, high = lane & 8, odd = lane & 4;
  float four[kSide];
#pragma unroll
  for (int k = 0; k < kSide; ++k) four[k] = (of_c ? c[k] : b[k]) + __shfl_xor_sync(kAll, of_c ? b[k] : c[k], 16);
  const float first = (high ? four[2] : four[0]) + __shfl_xor_sync(kAll, high ? four[0] : four[2], 8);
  const float second = (high ? four[3] : four[1]) + __shfl_xor_sync(kAll, high ? four[1] : four[3], 8);
  return (odd ? second : first) + __shfl_xor_sync(kAll, odd ? first : second, 4);
}
// Index into [b, c][state].
__device__ __forceinline__ int place_of_sum(int lane) {
  return (lane / 16) * kStates + lane % kSide * kSide + (lane / 8 % 2) * 2 + lane / 4 % 2;
}

// ln(1 + u), u in [0, 1]: 2 artanh(s), s = u / (2 + u) <= 1/3, by the polynomial of base/cpu/simd_math.h.
__device__ __forceinline__ float log1p_unit(float u) {
  const float s = __fdividef(u, u + 2.0f), square = s * s;
  float p = 0.12212455f;
  p = fmaf(p, square, 0.10694981f);
  p = fmaf(p, square, 0.14310521f);
  p = fmaf(p, square, 0.19999339f);
  p = fmaf(p, square, 0.33333340f);
  return fmaf(s + s, p * square, s + s);
}
__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1p_unit(ops::cuda::power_of_two(-kLog2E * fabsf(x)));
}

// h = decay h + driven b, for a thread's square.
__device__ __forceinline__ void advance(const float (&rates)[kSide][kSide], const float (&dt)[kSide],
                                        const float (&driven)[kSide], const float (&b)[kSide],
                                        float (&h)[kSide][kSide]) {
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      h[i][k] = fmaf(ops::cuda::power_of_two(dt[i] * rates[i][k]), h[i][k], driven[i] * b[k]);
    }
  }
}

}  // namespace flashgla::ops::selective_scan::cuda

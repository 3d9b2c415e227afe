// Sequences of at most kPoints tokens: nothing but x, y and the filter goes through memory. A block has neighbouring
// channels of every chunks-th sequence, each of its teams kForwardPair or one of them, and computes their filters'
// spectra first. A sequence's tokens come to shared memory in whole rows of the block's channels while the one before
// is being transformed, and what is to be written takes their place there.
#pragma once

#include "flashgla/base/cuda/tensor_map.h"
#include "flashgla/ops/long_convolution/cuda/spans.cuh"

namespace flashgla::ops::long_convolution::cuda {

using flashgla::cuda::Vector;

constexpr int kTeams = 4, kFusedThreads = kTeams * kTeam;
constexpr int kForwardPair = 2;                                                      // channels of a team
constexpr int kForwardChannels = kForwardPair * kTeams, kBackwardChannels = kTeams;  // of a block
constexpr int kTeamPoints = 2 * kChannelRoom;                                        // of two channels, or of x and dy
constexpr int kFusedPointBytes = kTeams * kTeamPoints * static_cast<int>(sizeof(float2));
constexpr int kStagedBytes = 64 << 10;
constexpr int kTurnBytes = SpanTransform::kTurns * static_cast<int>(sizeof(float2)), kBarrierBytes = 16;
constexpr int kFusedBytes = kFusedPointBytes + kStagedBytes + kTurnBytes + kBarrierBytes;

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

// A sequence's tokens of kAcross channels in shared memory: [kPoints,kAcross]. The same thread takes the same elements
// whichever way they go, all of its own at once.
template <class T, int kAcross>
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
    return rows + (static_cast<int>(threadIdx.x) + kFusedThreads * i) * kEach;
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

// Where a block keeps its filters' spectra, in global memory: [teams,kCount,kSpans,kSpan], which only the threads that
// wrote them read.
template <int kCount>
__device__ __forceinline__ float2* filters_of(float2* filters) {
  const int team = static_cast<int>(blockIdx.x) * kTeams + SpanTransform::team();
  return filters + std::int64_t{team} * kCount * kPoints;
}

// Writes them: of kSpan times less, the skip in the first row, each span's with what the one before it reaches over.
// The filter comes to `staged` first; all of the block's threads have read it there when ask() is called.
template <int kCount, class T, int kAcross, class Ask>
__device__ __forceinline__ void make_filters(const Call<T>& call, const SpanTransform& transform, int channel,
                                             const Staged<float, kAcross>& staged, float2* points, float2* own,
                                             const Ask& ask) {
  Lines<float> filter;
  filter.data = const_cast<float*>(call.filter);
  filter.token_stride = call.channels;
  staged.ask(filter, {0, 0, 0, call.rows, 0}, channel, call.channels);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncthreads();
  float2 v[kCount][kOwn];
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const int of_block = kCount * transform.team() + c, at = channel + of_block;
    const float skip = at < call.channels ? call.skip[at] : 0.0f;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int row = transform.token(j);
      float2 value{staged.rows[row * kAcross + of_block], 0.0f};
      if (row >= kSpan) value.y = -staged.rows[(row - kSpan) * kAcross + of_block];
      if (row == 0) value.x += skip;
      v[c][j] = product({value.x * (1.0f / kSpan), value.y * (1.0f / kSpan)}, shift(j));
    }
  }
  __syncthreads();
  ask();
  transform.forward(v, points);
  transform.meet();
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
#pragma unroll
    for (int a = 0; a < kSpans; ++a) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        own[c * kPoints + a * kSpan + transform.slot(i)] =
            points[c * kChannelRoom + a * kSpanRoom + transform.place_of_slot(i)];
      }
    }
  }
}

// A team's tokens of a sequence, times shift(j): v[c] of its channel c.
template <int kCount, class T, int kAcross>
__device__ __forceinline__ void load_staged(const Staged<T, kAcross>& staged, float2 (*v)[kOwn]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const auto values =
        Vector<T, kCount>::load(staged.rows + SpanTransform::token(j) * kAcross + kCount * SpanTransform::team());
    const float2 by = shift(j);
#pragma unroll
    for (int c = 0; c < kCount; ++c) v[c][j] = {values[c] * by.x, values[c] * by.y};
  }
}

template <int kCount, class T, int kAcross>
__device__ __forceinline__ void store_staged(const Staged<T, kAcross>& staged, const float (&values)[kCount][kOwn]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    T* to = staged.rows + SpanTransform::token(j) * kAcross + kCount * SpanTransform::team();
    if constexpr (kCount == 1) {
      *to = from_float<T>(values[0][j]);
    } else if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float2*>(to) = {values[0][j], values[1][j]};
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = ptx::pack_bf16(values[0][j], values[1][j]);
    }
  }
}

// Sequences of a block, two at a time in shared memory where there is room for them: what is asked for and what is
// stored goes through the place of the other one, or between two. ask(n, buffer), compute(n, buffer), store(n, buffer).
template <int kBuffers, class T, class Ask, class Compute, class Store>
__device__ __forceinline__ void walk_sequences(const Call<T>& call, int first, int chunks, const Ask& ask,
                                               const Compute& compute, const Store& store) {
  int last = -1, buffer = 0;
  for (int n = first; n < call.sequences;) {
    const int next = sequence_from(call, n + chunks, chunks), other = kBuffers - 1 - buffer;
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (kBuffers == 2) {
      if (last >= 0) store(last, other);
      if (next < call.sequences) ask(next, other);
      ptx::copy_async_commit();
    }
    compute(n, buffer);
    if (kBuffers == 1) {
      __syncthreads();
      store(n, 0);
      if (next < call.sequences) ask(next, 0);
      ptx::copy_async_commit();
    }
    last = n;
    n = next;
    buffer = other;
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  if (kBuffers == 2 && last >= 0) store(last, kBuffers - 1 - buffer);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The same where the copy engine takes tokens in and outputs out, for one thread of the block: ask(n, buffer) has it
// count down barrier `buffer`, and compute(n, buffer, half_way) calls half_way().
template <int kBuffers, class T, class Ask, class Compute, class Store>
__device__ __forceinline__ void walk_sequences_of_boxes(const Call<T>& call, int first, int chunks,
                                                        std::uint32_t barriers, const Ask& ask, const Compute& compute,
                                                        const Store& store) {
  int last = -1, buffer = 0;
  std::uint32_t turns = 0;  // of a buffer, a bit
  const bool leads = threadIdx.x == 0;
  for (int n = first; n < call.sequences;) {
    const int next = sequence_from(call, n + chunks, chunks), other = kBuffers - 1 - buffer;
    ptx::mbarrier_wait(barriers + 8 * buffer, turns >> buffer & 1);
    turns ^= 1u << buffer;
    __syncthreads();
    if (kBuffers == 2 && leads && last >= 0) store(last, other);
    compute(n, buffer, [&] {
      if (kBuffers == 1 || !leads || next >= call.sequences) return;
      ptx::store_bulk_wait_read();
      ask(next, other);
    });
    ptx::fence_async_proxy();
    if (kBuffers == 1) {
      __syncthreads();
      if (leads) {
        store(n, 0);
        ptx::store_bulk_wait_read();
        if (next < call.sequences) ask(next, 0);
      }
    }
    last = n;
    n = next;
    buffer = other;
  }
  __syncthreads();
  if (!leads) return;
  if (kBuffers == 2 && last >= 0) store(last, kBuffers - 1 - buffer);
  ptx::store_bulk_wait_read();
}
#endif

// x and y for the copy engine, in boxes of a block's channels and kSpan tokens.
struct BoxMaps {
  CUtensorMap x, y;
};

// filters: [blocks,kForwardChannels,kPoints]. kBoxes: by `maps`, which is for lines that are one sequence each;
// where it is not compiled for Hopper's own instructions, as without.
template <class T, bool kBoxes>
__global__ void __launch_bounds__(kFusedThreads, 1)
    fused_forward_kernel(Call<T> call, float2* filters, Lines<T> y, int chunks, const __grid_constant__ BoxMaps maps) {
  constexpr int kPair = kForwardPair, kAcross = kForwardChannels;
  using Tokens = Staged<T, kAcross>;
  constexpr int kBuffers = kStagedBytes / (Tokens::kElements * static_cast<int>(sizeof(T)));
  extern __shared__ __align__(128) unsigned char memory[];
  float2* points = reinterpret_cast<float2*>(memory) + SpanTransform::team() * kTeamPoints;
  const auto staged = [&](int buffer) {
    return Tokens{reinterpret_cast<T*>(memory + kFusedPointBytes) + buffer * Tokens::kElements};
  };
  const SpanTransform transform(reinterpret_cast<float2*>(memory + kFusedPointBytes + kStagedBytes));
  const FusedShare share(call.channels, kAcross);
  float2* own = filters_of<kPair>(filters);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const std::uint32_t barriers = ptx::shared_address(memory + kFusedPointBytes + kStagedBytes + kTurnBytes);
  if (kBoxes && threadIdx.x == 0) {
    ptx::mbarrier_init(barriers, 1);
    ptx::mbarrier_init(barriers + 8, 1);
    ptx::fence_barrier_init();
  }
  const auto ask_boxes = [&](int n, int buffer) {
    constexpr int kBytes = Tokens::kElements * static_cast<int>(sizeof(T));
    const std::uint32_t barrier = barriers + 8 * buffer, to = ptx::shared_address(staged(buffer).rows);
    ptx::mbarrier_arrive_expect(barrier, kBytes);
    for (int i = 0; i < kSpans; ++i) {
      ptx::copy_box(to + i * (kBytes / kSpans), &maps.x, share.channel, i * kSpan, n, 0, barrier);
    }
  };
  const auto store_boxes = [&](int n, int buffer) {
    constexpr int kBytes = Tokens::kElements * static_cast<int>(sizeof(T));
    const std::uint32_t from = ptx::shared_address(staged(buffer).rows);
    for (int i = 0; i < spans_of(call.place_of(n)); ++i) {
      ptx::store_box(&maps.y, share.channel, i * kSpan, n, 0, from + i * (kBytes / kSpans));
    }
    ptx::store_bulk_commit();
  };
#endif
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  const auto ask = [&](int n, int buffer) {
    staged(buffer).ask(call.x, call.place_of(n), share.channel, call.channels, &call);
  };
  const int first = sequence_from(call, share.chunk, chunks);
  const Staged<float, kAcross> filter{reinterpret_cast<float*>(memory + kFusedPointBytes)};
  make_filters<kPair>(call, transform, share.channel, filter, points, own, [&] {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (kBoxes) {
      if (threadIdx.x == 0 && first < call.sequences) ask_boxes(first, 0);
      return;
    }
#endif
    if (first < call.sequences) ask(first, 0);
    ptx::copy_async_commit();
  });
  const auto compute = [&](int n, int buffer, const auto& half_way) {
    const int spans = spans_of(call.place_of(n));
    const bool active = (transform.span() & ~1) < spans;  // of a warp
    if (active) {
      float2 v[kPair][kOwn];
      load_staged<kPair>(staged(buffer), v);
      transform.forward(v, points);
    }
    float2 g[kSpans];
    load_slot<kSpan>(own + transform.slot(0), kSpans, g);
    transform.meet();
#pragma unroll
    for (int i = 0; i < kPair * kSlots; ++i) {
      float2* at = points + i / kSlots * kChannelRoom + transform.place_of_slot(i % kSlots);
      float2 x[kSpans], next[kSpans];
      load_slot<kSpanRoom>(at, spans, x);
      if (i + 1 < kPair * kSlots) {
        load_slot<kSpan>(own + (i + 1) / kSlots * kPoints + transform.slot((i + 1) % kSlots), kSpans, next);
      }
      convolve(g, x, spans);
#pragma unroll
      for (int a = 0; a < kSpans; ++a) {
        at[a * kSpanRoom] = x[a];
        g[a] = next[a];
      }
    }
    half_way();
    transform.meet();
    if (active) {
      float values[kPair][kOwn];
      transform.back(points, values);
      store_staged(staged(buffer), values);
    }
  };
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (kBoxes) return walk_sequences_of_boxes<kBuffers>(call, first, chunks, barriers, ask_boxes, compute, store_boxes);
#endif
  walk_sequences<kBuffers>(
      call, first, chunks, ask, [&](int n, int buffer) { compute(n, buffer, [] {}); },
      [&](int n, int buffer) { staged(buffer).store(y, call.place_of(n), share.channel, call.channels); });
}

// filters: [blocks,kBackwardChannels,kPoints]; dfilter [chunks,rows,D].
template <class T>
__global__ void __launch_bounds__(kFusedThreads, 1)
    fused_backward_kernel(Call<T> call, float2* filters, Lines<T> dy, Lines<T> dx, float* dfilter, int chunks) {
  constexpr int kAcross = kBackwardChannels;
  using Tokens = Staged<T, kAcross>;
  constexpr int kBuffers = kStagedBytes / (2 * Tokens::kElements * static_cast<int>(sizeof(T)));
  extern __shared__ __align__(16) unsigned char memory[];
  float2* points = reinterpret_cast<float2*>(memory) + SpanTransform::team() * kTeamPoints;  // of x, of dy
  const auto staged = [&](int buffer, int tensor) {
    return Tokens{reinterpret_cast<T*>(memory + kFusedPointBytes) + (2 * buffer + tensor) * Tokens::kElements};
  };
  const SpanTransform transform(reinterpret_cast<float2*>(memory + kFusedPointBytes + kStagedBytes));
  const FusedShare share(call.channels, kAcross);
  float2* own = filters_of<1>(filters);
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  const auto ask = [&](int n, int buffer) {
    const Place place = call.place_of(n);
    staged(buffer, 0).ask(call.x, place, share.channel, call.channels, &call);
    staged(buffer, 1).ask(dy, place, share.channel, call.channels);
  };
  const int first = sequence_from(call, share.chunk, chunks);
  const Staged<float, kAcross> rows{reinterpret_cast<float*>(memory + kFusedPointBytes)};  // of the filter
  make_filters<1>(call, transform, share.channel, rows, points, own, [&] {
    if (first < call.sequences) ask(first, 0);
    ptx::copy_async_commit();
  });
  float2 sums[kSlots][kSpans] = {};
  const auto compute = [&](int n, int buffer) {
    const int spans = spans_of(call.place_of(n));
    const bool active = (transform.span() & ~1) < spans;  // of a warp
    if (active) {
      float2 v[2][kOwn];
      load_staged<1>(staged(buffer, 0), v);
      load_staged<1>(staged(buffer, 1), v + 1);
      transform.forward(v, points);
    }
    transform.meet();
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      float2 x[kSpans], w[kSpans];
      float2* at = points + transform.place_of_slot(i);
      load_slot<kSpanRoom>(at, spans, x);
      load_slot<kSpanRoom>(at + kChannelRoom, spans, w);
      add_correlation(x, w, spans, sums[i]);
      load_slot<kSpan>(own + transform.slot(i), kSpans, x);
      correlate(x, w, spans);
#pragma unroll
      for (int a = 0; a < kSpans; ++a) {
        at[kChannelRoom + a * kSpanRoom] = w[a];
      }
    }
    transform.meet();
    if (active) {
      float values[1][kOwn];
      transform.back(points + kChannelRoom, values);
      store_staged(staged(buffer, 1), values);
    }
  };
  walk_sequences<kBuffers>(call, first, chunks, ask, compute, [&](int n, int buffer) {
    staged(buffer, 1).store(dx, call.place_of(n), share.channel, call.channels);
  });
  // The filter's gradient: of span l E_l + i E_(l+1), E_l the sum of the conjugate of x's span a times dy's a + l.
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
#pragma unroll
    for (int l = 0; l < kSpans; ++l) {
      const float2 next = l + 1 < kSpans ? sums[i][l + 1] : float2{0.0f, 0.0f};
      points[l * kSpanRoom + transform.place_of_slot(i)] = {sums[i][l].x - next.y, sums[i][l].y + next.x};
    }
  }
  transform.meet();
  float values[1][kOwn];
  transform.back(points, values);
#pragma unroll
  for (float& value : values[0]) value *= 1.0f / kSpan;
  __syncthreads();
  store_staged(rows, values);
  __syncthreads();
  Lines<float> to;
  to.data = dfilter + std::int64_t{share.chunk} * call.rows * call.channels;
  to.token_stride = call.channels;
  rows.store(to, {0, 0, 0, call.rows, 0}, share.channel, call.channels);
  for (std::int64_t item = kPoints * kAcross + threadIdx.x; item < call.rows * kAcross; item += kFusedThreads) {
    const std::int64_t d = share.channel + item % kAcross;
    if (d < call.channels) *to.at(0, item / kAcross, d) = 0.0f;
  }
}

}  // namespace flashgla::ops::long_convolution::cuda

// Sequences of at most kPoints tokens in f32, outputs: nothing but x, y and the filter goes through memory. A block has
// neighbouring channels of every chunks-th sequence, each of its teams some of them, and computes their filters'
// spectra first.
#pragma once

#include "flashgla/base/cuda/tensor_map.h"
#include "flashgla/ops/long_convolution/cuda/staged.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kFusedSets = 2, kFusedChannels = kTeams * kFusedSets;  // of a team, of a block
constexpr int kFusedPointBytes = kTeams * kFusedSets * kChannelRoom * static_cast<int>(sizeof(float2));
constexpr int kFusedTokenBytes = kPoints * kFusedChannels * static_cast<int>(sizeof(float));
constexpr int kFusedTurnsAt = kFusedPointBytes + kFusedTokenBytes;
constexpr int kFusedBarrierAt = kFusedTurnsAt + SpanTransform::kTurns * static_cast<int>(sizeof(float2));
constexpr int kFusedBytes = kFusedBarrierAt + 16;
static_assert(kFusedTokenBytes <= kFusedPointBytes);  // where the filter's rows come

// Where a block keeps its filters' spectra, in global memory: [teams,kSets,kSpans,kSpan], which only the threads that
// wrote them read.
template <int kSets>
__device__ __forceinline__ float2* filters_of(float2* filters) {
  const int team = static_cast<int>(blockIdx.x) * kTeams + TeamPlace::team();
  return filters + std::int64_t{team} * kSets * kPoints;
}

// Writes them, kSpan times less: the skip in the first row, each span's with what the one before it reaches over. The
// filter comes to the beginning of shared memory, `rows`, while ask() asks for tokens, which must be one group of
// copies.
template <int kSets, int kAcross, class Ask>
__device__ __forceinline__ void make_filters(const Call<float>& call, const SpanTransform& transform, int channel,
                                             const Staged<float, kAcross>& rows, float2* points, float2* own,
                                             const Ask& ask) {
  Lines<float> filter;
  filter.data = const_cast<float*>(call.filter);
  filter.token_stride = call.channels;
  rows.ask(filter, {0, 0, 0, call.rows, 0}, channel, call.channels);
  ptx::copy_async_commit();
  ask();
  ptx::copy_async_commit();
  ptx::copy_async_wait<1>();
  __syncthreads();
  const int of_block = kSets * TeamPlace::team();
  float2 v[kSets][kOwn];
#pragma unroll
  for (int c = 0; c < kSets; ++c) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int row = TeamPlace::token(j), d = channel + of_block + c;
      const float* at = rows.rows + row * kAcross + of_block + c;
      float2 value{at[0], row >= kSpan ? -at[-kSpan * kAcross] : 0.0f};
      if (j == 0 && row == 0 && d < call.channels) value.x += call.skip[d];
      v[c][j] = product({value.x * (1.0f / kSpan), value.y * (1.0f / kSpan)}, shift(j));
    }
  }
  __syncthreads();
  transform.forward(v, points);
  TeamPlace::meet();
#pragma unroll
  for (int c = 0; c < kSets; ++c) {
#pragma unroll
    for (int a = 0; a < kSpans; ++a) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        own[c * kPoints + a * kSpan + TeamPlace::slot(i)] =
            points[c * kChannelRoom + a * kSpanRoom + TeamPlace::place_of_slot(i)];
      }
    }
  }
  TeamPlace::meet();  // the first sequence's spectra take these points' place
}

// A team's tokens of a sequence, times shift(j).
template <int kSets, int kAcross>
__device__ __forceinline__ void load_staged(const Staged<float, kAcross>& staged, float2 (&v)[kSets][kOwn]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const auto values =
        Vector<float, kSets>::load(staged.rows + TeamPlace::token(j) * kAcross + kSets * TeamPlace::team());
#pragma unroll
    for (int c = 0; c < kSets; ++c) v[c][j] = of_real(values[c], shift(j));
  }
}

template <int kSets, int kAcross>
__device__ __forceinline__ void store_staged(const Staged<float, kAcross>& staged, const float (&values)[kSets][kOwn]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    float* to = staged.rows + TeamPlace::token(j) * kAcross + kSets * TeamPlace::team();
#pragma unroll
    for (int c = 0; c < kSets; ++c) to[c] = values[c][j];
  }
}

// Tokens and outputs for TMA, in boxes of a block's channels and kSpan tokens.
struct BoxMaps {
  CUtensorMap from, to;
};

// y. filters: [blocks,kTeams,kFusedSets,kPoints]. kBoxes: by `maps`, which is for lines that are one sequence each;
// where it is not compiled for Hopper's own instructions, as without.
template <bool kBoxes>
__global__ void __launch_bounds__(kFusedThreads, 1)
    fused_kernel(Call<float> call, float2* filters, Lines<float> y, int chunks, const __grid_constant__ BoxMaps maps) {
  constexpr int kSets = kFusedSets;
  using Tokens = Staged<float, kFusedChannels>;
  extern __shared__ __align__(128) unsigned char memory[];
  float2* points = reinterpret_cast<float2*>(memory) + TeamPlace::team() * kSets * kChannelRoom;
  const Tokens staged{reinterpret_cast<float*>(memory + kFusedPointBytes)};
  const SpanTransform transform(reinterpret_cast<float2*>(memory + kFusedTurnsAt));
  const FusedShare share(call.channels, kFusedChannels);
  float2* own = filters_of<kSets>(filters);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const std::uint32_t barrier = ptx::shared_address(memory + kFusedBarrierAt);
  if (kBoxes && threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_barrier_init();
  }
  constexpr int kBoxBytes = kFusedTokenBytes / kSpans;
  const auto ask_boxes = [&](int n) {
    const std::uint32_t at = ptx::shared_address(staged.rows);
    ptx::mbarrier_arrive_expect(barrier, kFusedTokenBytes);
    for (int i = 0; i < kSpans; ++i) {
      ptx::copy_box(at + i * kBoxBytes, &maps.from, share.channel, i * kSpan, 0, n, barrier);
    }
  };
  const auto store_boxes = [&](int n) {
    const std::uint32_t at = ptx::shared_address(staged.rows);
    for (int i = 0; i < spans_of(call.place_of(n)); ++i) {
      ptx::store_box(&maps.to, share.channel, i * kSpan, 0, n, at + i * kBoxBytes);
    }
    ptx::store_bulk_commit();
  };
#endif
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  const auto ask = [&](int n) { staged.ask(call.x, call.place_of(n), share.channel, call.channels, &call); };
  const int first = sequence_from(call, share.chunk, chunks);
  const Tokens rows{reinterpret_cast<float*>(memory)};  // of the filter
  const auto ask_first = [&] {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (kBoxes) {
      if (threadIdx.x == 0 && first < call.sequences) ask_boxes(first);
      return;
    }
#endif
    if (first < call.sequences) ask(first);
  };
  make_filters<kSets>(call, transform, share.channel, rows, points, own, ask_first);
  // A sequence's tokens become its outputs.
  const auto compute = [&](int n) {
    const int spans = spans_of(call.place_of(n));
    const bool active = TeamPlace::span() < spans;
    if (active) {
      float2 v[kSets][kOwn];
      load_staged(staged, v);
      transform.forward(v, points);
    }
    float2 g[kSpans];
    load_slot<kSpan>(own + TeamPlace::slot(0), kSpans, g);
    TeamPlace::meet();
#pragma unroll
    for (int i = 0; i < kSets * kSlots; ++i) {
      float2* at = points + i / kSlots * kChannelRoom + TeamPlace::place_of_slot(i % kSlots);
      float2 x[kSpans], next[kSpans];
      load_slot<kSpanRoom>(at, spans, x);
      if (i + 1 < kSets * kSlots) {
        load_slot<kSpan>(own + (i + 1) / kSlots * kPoints + TeamPlace::slot((i + 1) % kSlots), kSpans, next);
      }
      convolve(g, x, spans);
#pragma unroll
      for (int a = 0; a < kSpans; ++a) {
        at[a * kSpanRoom] = x[a];
        g[a] = next[a];
      }
    }
    TeamPlace::meet();
    if (active) {
      float values[kSets][kOwn];
      transform.back(points, values);
      store_staged(staged, values);
    }
  };
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (kBoxes) {
    const bool leads = threadIdx.x == 0;
    std::uint32_t turn = 0;
    for (int n = first; n < call.sequences;) {
      const int next = sequence_from(call, n + chunks, chunks);
      ptx::mbarrier_wait(barrier, turn);
      turn ^= 1;
      compute(n);
      ptx::fence_async_proxy();
      __syncthreads();
      if (leads) {
        store_boxes(n);
        ptx::store_bulk_wait_read();
        if (next < call.sequences) ask_boxes(next);
      }
      n = next;
    }
    return;
  }
#endif
  walk_sequences(call, first, chunks, ask, compute,
                 [&](int n) { staged.store(y, call.place_of(n), share.channel, call.channels); });
}

}  // namespace flashgla::ops::long_convolution::cuda

// Sequences of at most kPoints tokens in f32, the filter's gradient and the inputs', which share dy's spectra. A block
// has neighbouring channels, one a team, of every chunks-th sequence, and the sums of the filter's in registers.
#pragma once

#include "flashgla/ops/long_convolution/cuda/fused.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kGradientChannels = kTeams;
constexpr int kGradientPointBytes = kTeams * 2 * kChannelRoom * static_cast<int>(sizeof(float2));
constexpr int kGradientTensorBytes = kPoints * kGradientChannels * static_cast<int>(sizeof(float));
constexpr int kGradientTokenBytes = 2 * kGradientTensorBytes;
constexpr int kGradientBarrierAt =
    kGradientPointBytes + kGradientTokenBytes + SpanTransform::kTurns * static_cast<int>(sizeof(float2));
constexpr int kGradientBytes = kGradientBarrierAt + 16;

// For TMA, in boxes of 16 bytes a row and kSpan tokens.
struct GradientMaps {
  CUtensorMap x, dy, dx;
};

// filters: [blocks,kGradientChannels,kPoints]; dfilter [chunks,rows,D]. kBoxes as fused_kernel's: then the next
// sequence comes as soon as all of the block's threads have this one's tokens, and what is to be written goes through
// the points of x.
template <bool kBoxes>
__global__ void __launch_bounds__(kFusedThreads, 1)
    fused_gradient_kernel(Call<float> call, float2* filters, Lines<float> dy, Lines<float> dx, float* dfilter,
                          int chunks, const __grid_constant__ GradientMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kByBoxes = kBoxes;
#else
  constexpr bool kByBoxes = false;
#endif
  using Tokens = Staged<float, kGradientChannels>;
  extern __shared__ __align__(128) unsigned char memory[];
  const auto room_of = [&](int team) { return reinterpret_cast<float2*>(memory) + team * (2 * kChannelRoom); };
  float2* points = room_of(TeamPlace::team());  // of x, of dy
  const SpanTransform transform(reinterpret_cast<float2*>(memory + kGradientPointBytes + kGradientTokenBytes));
  const FusedShare share(call.channels, kGradientChannels);
  const auto staged = [&](int tensor) {
    return Tokens{reinterpret_cast<float*>(memory + kGradientPointBytes + tensor * kGradientTensorBytes)};
  };
  float2* own = filters_of<1>(filters);
  const int first = sequence_from(call, share.chunk, chunks);
  const auto ask = [&](int n) {
    const Place place = call.place_of(n);
    staged(0).ask(call.x, place, share.channel, call.channels, &call);
    staged(1).ask(dy, place, share.channel, call.channels);
  };
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const std::uint32_t barrier = ptx::shared_address(memory + kGradientBarrierAt);
  if (kBoxes && threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_barrier_init();
  }
  constexpr int kBoxBytes = kGradientTensorBytes / kSpans;
  const auto ask_boxes = [&](int n) {
    ptx::mbarrier_arrive_expect(barrier, 2 * kGradientTensorBytes);
    const std::uint32_t at = ptx::shared_address(memory + kGradientPointBytes);
    for (int i = 0; i < kSpans; ++i) {
      ptx::copy_box(at + i * kBoxBytes, &maps.x, share.channel, i * kSpan, 0, n, barrier);
      ptx::copy_box(at + kGradientTensorBytes + i * kBoxBytes, &maps.dy, share.channel, i * kSpan, 0, n, barrier);
    }
  };
#endif
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  const auto ask_first = [&] {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (kBoxes) {
      if (threadIdx.x == 0 && first < call.sequences) ask_boxes(first);
      return;
    }
#endif
    if (first < call.sequences) ask(first);
  };
  const Staged<float, kGradientChannels> rows{reinterpret_cast<float*>(memory)};  // of the filter
  make_filters<1>(call, transform, share.channel, rows, points, own, ask_first);
  float2 sums[kSlots][kSpans] = {};
  const auto is_active = [&](int spans) { return TeamPlace::span() < spans; };  // of a warp
  const auto make_spectrum = [&](int spans, int tensor) {
    if (!is_active(spans)) return;
    float2 v[1][kOwn];
    load_staged(staged(tensor), v);
    transform.forward(v, points + tensor * kChannelRoom);
  };
  const auto multiply = [&](int spans) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      float2 x[kSpans], w[kSpans], g[kSpans];
      float2* at = points + TeamPlace::place_of_slot(i);
      load_slot<kSpan>(own + TeamPlace::slot(i), kSpans, g);
      load_slot<kSpanRoom>(at, spans, x);
      load_slot<kSpanRoom>(at + kChannelRoom, spans, w);
      add_correlation(x, w, spans, sums[i]);
      correlate(g, w, spans);
#pragma unroll
      for (int a = 0; a < kSpans; ++a) at[kChannelRoom + a * kSpanRoom] = w[a];
    }
  };
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (kByBoxes) {
    // Span i of what is to be written, in the points of x.
    const auto box_of = [&](int i) {
      return reinterpret_cast<float*>(room_of(i / 2)) + i % 2 * (kSpan * kGradientChannels);
    };
    std::uint32_t turn = 0;
    for (int n = first; n < call.sequences;) {
      const int next = sequence_from(call, n + chunks, chunks), spans = spans_of(call.place_of(n));
      ptx::mbarrier_wait(barrier, turn);
      turn ^= 1;
      // Of dy first, beside what is still being written of the points of x.
      make_spectrum(spans, 1);
      if (threadIdx.x == 0) ptx::store_bulk_wait_read();
      __syncthreads();
      make_spectrum(spans, 0);
      __syncthreads();
      if (threadIdx.x == 0 && next < call.sequences) ask_boxes(next);
      multiply(spans);
      __syncthreads();
      if (is_active(spans)) {
        float values[1][kOwn];
        transform.back(points + kChannelRoom, values);
        float* box = box_of(TeamPlace::span()) + TeamPlace::lane() * kGradientChannels + TeamPlace::team();
#pragma unroll
        for (int j = 0; j < kOwn; ++j) box[16 * kGradientChannels * j] = values[0][j];
      }
      ptx::fence_async_proxy();
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int i = 0; i < spans; ++i) {
          ptx::store_box(&maps.dx, share.channel, i * kSpan, 0, n, ptx::shared_address(box_of(i)));
        }
        ptx::store_bulk_commit();
      }
      n = next;
    }
    if (threadIdx.x == 0) ptx::store_bulk_wait_read();
    __syncthreads();
  }
#endif
  if constexpr (!kByBoxes) {
    const auto compute = [&](int n) {
      const int spans = spans_of(call.place_of(n));
      make_spectrum(spans, 0);
      make_spectrum(spans, 1);
      TeamPlace::meet();
      multiply(spans);
      TeamPlace::meet();
      if (is_active(spans)) {
        float values[1][kOwn];
        transform.back(points + kChannelRoom, values);
        store_staged(staged(1), values);
      }
    };
    walk_sequences(call, first, chunks, ask, compute,
                   [&](int n) { staged(1).store(dx, call.place_of(n), share.channel, call.channels); });
  }
  // The filter's gradient: of span l E_l + i E_(l+1), E_l the sum of the conjugate of x's span a times dy's a + l.
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
#pragma unroll
    for (int l = 0; l < kSpans; ++l) {
      const float2 next = l + 1 < kSpans ? sums[i][l + 1] : float2{0.0f, 0.0f};
      points[l * kSpanRoom + TeamPlace::place_of_slot(i)] = {sums[i][l].x - next.y, sums[i][l].y + next.x};
    }
  }
  TeamPlace::meet();
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
  constexpr int kEach = kGradientChannels;
  for (std::int64_t item = kPoints * kEach + threadIdx.x; item < call.rows * kEach; item += kFusedThreads) {
    const std::int64_t d = share.channel + item % kEach;
    if (d < call.channels) *to.at(0, item / kEach, d) = 0.0f;
  }
}

}  // namespace flashgla::ops::long_convolution::cuda

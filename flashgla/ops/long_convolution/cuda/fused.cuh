// Sequences of at most kPoints tokens, outputs (or inputs' gradients, which are sums of gradients from each token on):
// nothing but x, y and the filter goes through memory. A block has neighbouring channels of every chunks-th sequence,
// each of its teams kSets numbers' of them, and computes their filters' spectra first.
#pragma once

#include "flashgla/base/cuda/tensor_map.h"
#include "flashgla/ops/long_convolution/cuda/staged.cuh"

namespace flashgla::ops::long_convolution::cuda {

// How calls of a dtype go: with numbers P, of which a team has kSets, and kBuffers sequences in shared memory.
template <class T_, class P_, int kSets_, int kBuffers_>
struct FusedForm {
  using T = T_;
  using P = P_;
  static constexpr int kSets = kSets_, kBuffers = kBuffers_;
  static constexpr int kWide = Numbers<P>::kWide, kOfTeam = kSets * kWide, kAcross = kTeams * kOfTeam;  // channels
  static constexpr int kTeamPoints = kSets * kChannelRoom;
  static constexpr int kPointBytes = kTeams * kTeamPoints * static_cast<int>(sizeof(P));
  static constexpr int kTokenBytes = kPoints * kAcross * static_cast<int>(sizeof(T));
  static constexpr int kTurnsAt = kPointBytes + kBuffers * kTokenBytes;
  static constexpr int kFiltersAt = kTurnsAt + SpanTransform<P>::kTurns * static_cast<int>(sizeof(P));
  static constexpr int kFilterBytes = kTeams * kSets * kPoints * static_cast<int>(sizeof(P));
  // The filters' spectra stay in shared memory where there is room for them.
  static constexpr bool kInside = kFiltersAt + kFilterBytes <= (200 << 10);
  static constexpr int kRoomAt = kFiltersAt + (kInside ? kFilterBytes : 0);
  static constexpr int kBarrierAt = kRoomAt + kSpans * kTeams * kOfTeam * 4;
  static constexpr int kBytes = kBarrierAt + 16;
  static_assert(kPoints * kAcross * static_cast<int>(sizeof(float)) <= kPointBytes);  // where the filter's rows come
};
using WideForm = FusedForm<float, float2, 2, 1>;
using NarrowForm = FusedForm<__nv_bfloat16, Pair, 1, 2>;

// Of a team's threads' values; `room` is the block's [spans,teams,kCount]. All of the team must come here.
template <int kCount, class V, class Combine>
__device__ __forceinline__ void combine_in_team(V (&values)[kCount], std::uint32_t* room, const Combine& combine) {
  static_assert(sizeof(V) == 4);
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) {
      values[c] = combine(values[c], __shfl_xor_sync(0xffffffffu, values[c], apart));
    }
  }
  V* own = reinterpret_cast<V*>(room) + TeamPlace::team() * kCount;
  if (TeamPlace::lane() == 0) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) own[TeamPlace::span() * kTeams * kCount + c] = values[c];
  }
  TeamPlace::meet();
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    values[c] = own[c];
#pragma unroll
    for (int span = 1; span < kSpans; ++span) values[c] = combine(values[c], own[span * kTeams * kCount + c]);
  }
}

// What takes a thread's results back, by its filters' and its tokens' scales. Of f32 nothing.
template <class P, int kSets>
struct Scales {};
template <int kSets>
struct Scales<Pair, kSets> {
  float filter[2 * kSets], token[2 * kSets];
};

// Where a block keeps its filters' spectra, in global memory: [teams,kCount,kSpans,kSpan], which only the threads that
// wrote them read.
template <int kCount, class P>
__device__ __forceinline__ P* filters_of(P* filters) {
  const int team = static_cast<int>(blockIdx.x) * kTeams + TeamPlace::team();
  return filters + std::int64_t{team} * kCount * kPoints;
}

// Writes them: the skip in the first row, each span's with what the one before it reaches over; of float2 kSpan times
// less. The filter comes to the beginning of shared memory, `rows`, while ask() asks for tokens, which must be one
// group of copies.
template <int kSets, class P, class T, int kAcross, class Ask>
__device__ __forceinline__ void make_filters(const Call<T>& call, const SpanTransform<P>& transform, int channel,
                                             const Staged<float, kAcross>& rows, P* points, P* own, std::uint32_t* room,
                                             Scales<P, kSets>& scales, const Ask& ask) {
  constexpr int kWide = Numbers<P>::kWide, kOfTeam = kSets * kWide;
  Lines<float> filter;
  filter.data = const_cast<float*>(call.filter);
  filter.token_stride = call.channels;
  rows.ask(filter, {0, 0, 0, call.rows, 0}, channel, call.channels);
  ptx::copy_async_commit();
  ask();
  ptx::copy_async_commit();
  ptx::copy_async_wait<1>();
  __syncthreads();
  const int of_block = kOfTeam * TeamPlace::team();
  const auto value_of = [&](int j, int c) {
    const int row = TeamPlace::token(j), d = channel + of_block + c;
    const float* at = rows.rows + row * kAcross + of_block + c;
    float2 value{at[0], row >= kSpan ? -at[-kSpan * kAcross] : 0.0f};
    if (j == 0 && row == 0 && d < call.channels) value.x += call.skip[d];
    return value;
  };
  P v[kSets][kOwn];
  if constexpr (kWide == 1) {
#pragma unroll
    for (int c = 0; c < kSets; ++c) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const float2 value = value_of(j, c);
        v[c][j] = product({value.x * (1.0f / kSpan), value.y * (1.0f / kSpan)}, shift(j));
      }
    }
  } else {
    float sums[kOfTeam] = {};
#pragma unroll
    for (int c = 0; c < kOfTeam; ++c) {
#pragma unroll 4
      for (int j = 0; j < kOwn; ++j) sums[c] += fabsf(value_of(j, c).x);
    }
    combine_in_team(sums, room, [](float a, float b) { return a + b; });
#pragma unroll
    for (int c = 0; c < kSets; ++c) {
      const Scale low = Scale::below(Scale::field_of(sums[2 * c]), 0);
      const Scale high = Scale::below(Scale::field_of(sums[2 * c + 1]), 0);
      scales.filter[2 * c] = low.from * (1.0f / kSpan);
      scales.filter[2 * c + 1] = high.from * (1.0f / kSpan);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const float2 a = value_of(j, 2 * c), b = value_of(j, 2 * c + 1);
        v[c][j] = product(
            Pair{__floats2half2_rn(a.x * low.to, b.x * high.to), __floats2half2_rn(a.y * low.to, b.y * high.to)},
            Numbers<Pair>::of(shift(j)));
      }
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

// A team's tokens of a sequence, times shift(j), Pairs' by the largest of each channel, below 2^kTop. All of the team
// must come here.
constexpr int kTop = 6;
template <int kSets, class T, int kAcross>
__device__ __forceinline__ void load_scaled(const Staged<T, kAcross>& staged, std::uint32_t* /*room*/,
                                            Scales<float2, kSets>& /*scales*/, float2 (*v)[kOwn]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const auto values = Vector<T, kSets>::load(staged.rows + TeamPlace::token(j) * kAcross + kSets * TeamPlace::team());
#pragma unroll
    for (int c = 0; c < kSets; ++c) v[c][j] = of_real(values[c], shift(j));
  }
}
template <int kSets, int kAcross>
__device__ __forceinline__ void load_scaled(const Staged<__nv_bfloat16, kAcross>& staged, std::uint32_t* room,
                                            Scales<Pair, kSets>& scales, Pair (*v)[kOwn]) {
  using Row = Vector<__nv_bfloat16, 2 * kSets>;
  Row rows[kOwn];
  std::uint32_t most[kSets] = {};
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    rows[j] = Row::load(staged.rows + TeamPlace::token(j) * kAcross + 2 * kSets * TeamPlace::team());
#pragma unroll
    for (int c = 0; c < kSets; ++c) most[c] = __vmaxu2(most[c], rows[j].words[c] & 0x7fff7fffu);
  }
  combine_in_team(most, room, [](std::uint32_t a, std::uint32_t b) { return __vmaxu2(a, b); });
#pragma unroll
  for (int c = 0; c < kSets; ++c) {
    const Scale low = Scale::below(most[c] >> 7 & 0xff, kTop), high = Scale::below(most[c] >> 23, kTop);
    scales.token[2 * c] = low.from;
    scales.token[2 * c + 1] = high.from;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      v[c][j] = of_real(__floats2half2_rn(rows[j][2 * c] * low.to, rows[j][2 * c + 1] * high.to), shift(j));
    }
  }
}

template <int kSets, class T, int kAcross>
__device__ __forceinline__ void store_staged(const Staged<T, kAcross>& staged, const Scales<float2, kSets>& /*scales*/,
                                             const float (&values)[kSets][kOwn]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    T* to = staged.rows + TeamPlace::token(j) * kAcross + kSets * TeamPlace::team();
#pragma unroll
    for (int c = 0; c < kSets; ++c) to[c] = from_float<T>(values[c][j]);
  }
}
template <int kSets, int kAcross>
__device__ __forceinline__ void store_staged(const Staged<__nv_bfloat16, kAcross>& staged,
                                             const Scales<Pair, kSets>& scales, const __half2 (&values)[kSets][kOwn]) {
  float by[2 * kSets];
#pragma unroll
  for (int c = 0; c < 2 * kSets; ++c) by[c] = scales.filter[c] * scales.token[c];
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    std::uint32_t words[kSets];
#pragma unroll
    for (int c = 0; c < kSets; ++c) {
      const float2 value = __half22float2(values[c][j]);
      words[c] = ptx::pack_bf16(value.x * by[2 * c], value.y * by[2 * c + 1]);
    }
    auto* to =
        reinterpret_cast<std::uint32_t*>(staged.rows + TeamPlace::token(j) * kAcross + 2 * kSets * TeamPlace::team());
    if constexpr (kSets == 1) {
      *to = words[0];
    } else {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    }
  }
}

// Tokens and outputs for TMA, in boxes of a block's channels and kSpan tokens.
struct BoxMaps {
  CUtensorMap from, to;
};

// `to`: the convolution of x, or with kBack `from`'s, dy's, sums from each token on. filters: [blocks,kTeams,kSets,
// kPoints]. kBoxes: by `maps`, which is for lines that are one sequence each; where it is not compiled for Hopper's own
// instructions, as without.
template <class Form, bool kBack, bool kBoxes>
__global__ void __launch_bounds__(kFusedThreads, 1)
    fused_kernel(Call<typename Form::T> call, typename Form::P* filters, Lines<typename Form::T> from,
                 Lines<typename Form::T> to, int chunks, const __grid_constant__ BoxMaps maps) {
  using T = typename Form::T;
  using P = typename Form::P;
  constexpr int kSets = Form::kSets, kAcross = Form::kAcross, kBuffers = Form::kBuffers;
  using Tokens = Staged<T, kAcross>;
  extern __shared__ __align__(128) unsigned char memory[];
  P* points = reinterpret_cast<P*>(memory) + TeamPlace::team() * Form::kTeamPoints;
  auto* room = reinterpret_cast<std::uint32_t*>(memory + Form::kRoomAt);
  const auto staged = [&](int buffer) {
    return Tokens{reinterpret_cast<T*>(memory + Form::kPointBytes + buffer * Form::kTokenBytes)};
  };
  const SpanTransform<P> transform(reinterpret_cast<P*>(memory + Form::kTurnsAt));
  const FusedShare share(call.channels, kAcross);
  P* own = Form::kInside ? reinterpret_cast<P*>(memory + Form::kFiltersAt) + TeamPlace::team() * kSets * kPoints
                         : filters_of<kSets>(filters);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const std::uint32_t barrier = ptx::shared_address(memory + Form::kBarrierAt);
  if (kBoxes && threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_barrier_init();
  }
  constexpr int kBoxBytes = Form::kTokenBytes / kSpans;
  const auto ask_boxes = [&](int n) {
    const std::uint32_t at = ptx::shared_address(staged(0).rows);
    ptx::mbarrier_arrive_expect(barrier, Form::kTokenBytes);
    for (int i = 0; i < kSpans; ++i) {
      ptx::copy_box(at + i * kBoxBytes, &maps.from, share.channel, i * kSpan, n, 0, barrier);
    }
  };
  const auto store_boxes = [&](int n, int buffer) {
    const std::uint32_t at = ptx::shared_address(staged(buffer).rows);
    for (int i = 0; i < spans_of(call.place_of(n)); ++i) {
      ptx::store_box(&maps.to, share.channel, i * kSpan, n, 0, at + i * kBoxBytes);
    }
    ptx::store_bulk_commit();
  };
#endif
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  const auto ask = [&](int n, int buffer) {
    staged(buffer).ask(from, call.place_of(n), share.channel, call.channels, kBack ? nullptr : &call);
  };
  const int first = sequence_from(call, share.chunk, chunks);
  const Staged<float, kAcross> rows{reinterpret_cast<float*>(memory)};
  const auto ask_first = [&] {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (kBoxes) {
      if (threadIdx.x == 0 && first < call.sequences) ask_boxes(first);
      return;
    }
#endif
    if (first < call.sequences) ask(first, 0);
  };
  Scales<P, kSets> scales;
  make_filters<kSets>(call, transform, share.channel, rows, points, own, room, scales, ask_first);
  // Of a sequence's tokens in a buffer, its spectra; of those, the outputs'; and those in a buffer.
  const auto take = [&](int spans, int buffer) {
    P v[kSets][kOwn];
    load_scaled<kSets>(staged(buffer), room, scales, v);
    if (TeamPlace::span() < spans) transform.forward(v, points);
  };
  const auto multiply = [&](int spans, const auto& meet) {
    P g[kSpans];
    load_slot<kSpan>(own + TeamPlace::slot(0), kSpans, g);
    meet();
#pragma unroll
    for (int i = 0; i < kSets * kSlots; ++i) {
      P* at = points + i / kSlots * kChannelRoom + TeamPlace::place_of_slot(i % kSlots);
      P x[kSpans], next[kSpans];
      load_slot<kSpanRoom>(at, spans, x);
      if (i + 1 < kSets * kSlots) {
        load_slot<kSpan>(own + (i + 1) / kSlots * kPoints + TeamPlace::slot((i + 1) % kSlots), kSpans, next);
      }
      kBack ? correlate(g, x, spans) : convolve(g, x, spans);
#pragma unroll
      for (int a = 0; a < kSpans; ++a) {
        at[a * kSpanRoom] = x[a];
        g[a] = next[a];
      }
    }
    TeamPlace::meet();
  };
  const auto give = [&](int spans, int buffer) {
    if (TeamPlace::span() >= spans) return;
    typename Numbers<P>::Real values[kSets][kOwn];
    transform.back(points, values);
    store_staged(staged(buffer), scales, values);
  };
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (kBoxes) {
    // Of two buffers one is the tokens', asked for as soon as all have read the ones before, one the outputs'.
    const bool leads = threadIdx.x == 0;
    std::uint32_t turn = 0;
    for (int n = first; n < call.sequences;) {
      const int next = sequence_from(call, n + chunks, chunks), spans = spans_of(call.place_of(n));
      ptx::mbarrier_wait(barrier, turn);
      turn ^= 1;
      take(spans, 0);
      multiply(spans, [&] {
        if (kBuffers == 1) return TeamPlace::meet();
        if (leads) ptx::store_bulk_wait_read();
        __syncthreads();
        if (leads && next < call.sequences) ask_boxes(next);
      });
      give(spans, kBuffers - 1);
      ptx::fence_async_proxy();
      __syncthreads();
      if (leads) {
        store_boxes(n, kBuffers - 1);
        if (kBuffers == 1) ptx::store_bulk_wait_read();
        if (kBuffers == 1 && next < call.sequences) ask_boxes(next);
      }
      n = next;
    }
    if (leads) ptx::store_bulk_wait_read();
    return;
  }
#endif
  walk_sequences<kBuffers>(
      call, first, chunks, ask,
      [&](int n, int buffer) {
        const int spans = spans_of(call.place_of(n));
        take(spans, buffer);
        multiply(spans, [] { TeamPlace::meet(); });
        give(spans, buffer);
      },
      [&](int n, int buffer) { staged(buffer).store(to, call.place_of(n), share.channel, call.channels); });
}

}  // namespace flashgla::ops::long_convolution::cuda

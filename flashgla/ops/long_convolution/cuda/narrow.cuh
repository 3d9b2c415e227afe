// Sequences of at most kPoints tokens in bf16, by tensor cores (narrow_transform.cuh): outputs, or with kGradients the
// inputs' gradients and the filter's. A block has eight neighbouring channels of every chunks-th sequence, all of whose
// transforms are in step.
//
// f16's range: a channel's tokens come below 2^0 (x's beside dy's below 2^-1) by their largest, a filter's magnitudes
// add up to less than 4. The second product is divided by 4 both ways. So dy's spectrum stays below 2^6, x's 2^5, the
// filter's, of two spans each, 2, their products' sums over spans 2^14, and no sum of 16 of these, which are bounded by
// the squares' sum, leaves the range.
#pragma once

#include "flashgla/base/cuda/tensor_map.h"
#include "flashgla/ops/long_convolution/cuda/narrow_transform.cuh"

namespace flashgla::ops::long_convolution::cuda {

// For TMA, in boxes of a block's channels and kPoints tokens, of which those that are 16 apart are neighbours.
struct NarrowMaps {
  CUtensorMap x, dy, to;
};

// A word to another block's shared memory, counted down on an mbarrier there.
__device__ __forceinline__ void send(std::uint32_t there, std::uint32_t word, std::uint32_t barrier) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(word),
               "r"(barrier)
               : "memory");
#endif
}

// The largest magnitudes of a thread's tokens: of the first tensor in the low half of the word, of the second above.
template <int kTensors, int kAll>
__device__ __forceinline__ std::uint32_t largest_of(const std::uint32_t (&raw)[kTensors][kAll][2]) {
  std::uint32_t most[2] = {};
#pragma unroll
  for (int tensor = 0; tensor < kTensors; ++tensor) {
#pragma unroll
    for (int s = 0; s < kAll; ++s) {
      most[tensor] = __vmaxu2(most[tensor], raw[tensor][s][0] & 0x7fff7fffu);
      most[tensor] = __vmaxu2(most[tensor], raw[tensor][s][1] & 0x7fff7fffu);
    }
  }
  return __vmaxu2(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
}

// Of `both` and what the block's warps have put into row `channel` of the room.
__device__ __forceinline__ std::uint32_t largest_in_room(const std::uint32_t* room, int channel, std::uint32_t both) {
#pragma unroll
  for (int w = 0; w < kNarrowWarps / 4; ++w) {
    const uint4 four = reinterpret_cast<const uint4*>(room + channel * kNarrowWarps)[w];
    both = __vmaxu2(__vmaxu2(both, __vmaxu2(four.x, four.y)), __vmaxu2(four.z, four.w));
  }
  return both;
}

// Tokens of bf16 to f16, by a factor for each tensor; to `skip` are added products of both tensors' tokens.
template <int kTensors, int kAll>
__device__ __forceinline__ void scale_tokens(std::uint32_t (&raw)[kTensors][kAll][2], const float (&by)[2],
                                             float& skip) {
#pragma unroll
  for (int s = 0; s < kAll; ++s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 value[kTensors];
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        value[tensor] = ptx::unpack_bf16(raw[tensor][s][i]);
        raw[tensor][s][i] = ptx::pack_f16(value[tensor].x * by[tensor], value[tensor].y * by[tensor]);
      }
      if (kTensors == 2) skip = fmaf(value[0].x, value[1].x, fmaf(value[0].y, value[1].y, skip));
    }
  }
}

// Makes the block's filters' spectra, of which a thread keeps its own eight pieces `to`, 32 apart: the skip in the
// first row, each span's with what the one before it reaches over. Gives what takes numbers of row()'s channel back.
// All of the block must come here.
template <int kTop, class Columns>
__device__ __forceinline__ float make_narrow_filters(const Call<__nv_bfloat16>& call, const NarrowTransform& transform,
                                                     const Columns& columns, int channel, float* room, uint4* to) {
  const int row = transform.row(), warp = transform.warp();
  const bool is_channel = channel + row < call.channels;
  float values[kSpans][4], sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t t = columns.token(s, i / 2 * 8 + 2 * transform.pair() + i % 2, warp);
      values[s][i] = Columns::load_if(is_channel && t < call.rows, call.filter + t * call.channels + channel + row);
    }
  }
  const bool begins = transform.pair() == 0 && columns.token(0, 0, warp) == 0;
  if (begins && is_channel) values[0][0] += call.skip[channel + row];
  columns.exchange_filters(values);
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += fabsf(values[s][i]);
  }
  sum = Columns::over_pairs(sum, [](float a, float b) { return a + b; });
  const int own = Columns::channel(row);
  if (transform.pair() == 0 && Columns::is_first(row)) room[own * kNarrowWarps + warp] = sum;
  __syncthreads();
  float all = 0.0f;
#pragma unroll
  for (int w = 0; w < kNarrowWarps; ++w) all += room[own * kNarrowWarps + w];
  const Scale scale = Scale::below(Scale::field_of(all), kTop);
  const float by = Columns::with_sign(scale.to, row, warp);
  std::uint32_t tokens[kSpans][2];
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) tokens[s][i] = ptx::pack_f16(values[s][2 * i] * by, values[s][2 * i + 1] * by);
  }
  transform.columns(0, tokens);
  __syncthreads();
  Pair spectrum[2][kSpans];
  columns.rows(transform, 0, spectrum);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int s = kSpans - 1; s > 0; --s) {
      spectrum[h][s] = difference_turned(spectrum[h][s], spectrum[h][s - 1]);
    }
#pragma unroll
    for (int q = 0; q < kSpans / 2; ++q) {
      const Pair a = spectrum[h][2 * q], b = spectrum[h][2 * q + 1];
      to[(h * 4 + q) * 32] = make_uint4(as_word(a.x), as_word(a.y), as_word(b.x), as_word(b.y));
    }
  }
  return scale.from;
}

// Writes a block's sums of the filter's gradient, [span][t1 row(), eight on][columns 2 pair(), the next], to its
// chunk's rows [rows,D] from `channel` on, in the first row `skip`, a thread's part of row()'s channel, which
// is the skip's gradient too and has f32's digits. All of the block must come here.
__device__ __forceinline__ void store_narrow_sums(const Call<__nv_bfloat16>& call, const NarrowTransform& transform,
                                                  int channel, float* room, float skip, float (&sums)[kSpans][4],
                                                  float* to) {
  const int row = transform.row(), pair = transform.pair(), warp = transform.warp(), own = 2 * pair;
  skip = NarrowColumns::over_pairs(skip, [](float a, float b) { return a + b; });
  __syncthreads();
  if (pair == 0) room[row * kNarrowWarps + warp] = skip;
  __syncthreads();
  if (warp == 0 && row == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float all = 0.0f;
      for (int w = 0; w < kNarrowWarps; ++w) all += room[(own + i) * kNarrowWarps + w];
      sums[0][i] = all;
    }
  }
  constexpr int kEach = kNarrowChannels;
  const bool whole = call.channels % 2 == 0 && channel + kEach <= call.channels;
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t t = NarrowColumns::token(s, row + 8 * half, warp);
      float* at = to + t * call.channels + 2 * pair;
      if (t >= call.rows) continue;
      if (whole) {
        *reinterpret_cast<float2*>(at) = {sums[s][2 * half], sums[s][2 * half + 1]};
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (channel + 2 * pair + i < call.channels) at[i] = sums[s][2 * half + i];
        }
      }
    }
  }
  for (std::int64_t item = NarrowColumns::kTokens * kEach + threadIdx.x; item < call.rows * kEach;
       item += kNarrowThreads) {
    if (channel + item % kEach < call.channels) to[item / kEach * call.channels + item % kEach] = 0.0f;
  }
}

// y, or with kGradients dx and dfilter [chunks,rows,D]: `to` is y or dx. filters [blocks,kNarrowFilterWords], of
// gradients. kBoxes: by `maps`, which is for lines that are one sequence each, and outputs by pairs of neighbouring
// blocks, clusters, each of which stores half of both's tokens, in rows twice as long; where it is not compiled for
// Hopper's own instructions, as without.
template <bool kGradients, bool kBoxes>
__global__ void __launch_bounds__(kNarrowThreads, 1)
    narrow_kernel(Call<__nv_bfloat16> call, uint4* filters, Lines<__nv_bfloat16> dy, Lines<__nv_bfloat16> to,
                  float* dfilter, int chunks, const __grid_constant__ NarrowMaps maps) {
  using T = __nv_bfloat16;
  using Tokens = Staged<T, kNarrowChannels, true>;
  constexpr int kTensors = kGradients ? 2 : 1, kSource = kTensors - 1;  // of the outputs
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kByBoxes = kBoxes;
#else
  constexpr bool kByBoxes = false;
#endif
  constexpr bool kPairs = kByBoxes && !kGradients;
  constexpr int kFilterTop = 2, kTops[2] = {kGradients ? -1 : 0, 0};
  extern __shared__ __align__(128) unsigned char memory[];
  const NarrowTransform transform(memory);
  const int lane = transform.lane(), warp = transform.warp(), row = transform.row(), pair = transform.pair();
  const FusedShare share(call.channels, kNarrowChannels);
  const int rank = static_cast<int>(blockIdx.x % 2);  // in a pair
  auto* room = reinterpret_cast<std::uint32_t*>(memory + kNarrowRoomAt);
  const auto staged = [&](int tensor) { return Tokens{reinterpret_cast<T*>(memory + tensor * kNarrowTokenBytes)}; };
  const Tokens out{reinterpret_cast<T*>(memory + kNarrowOutAt)};
  const int first = sequence_from(call, share.chunk, chunks);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const std::uint32_t barrier = ptx::shared_address(memory + kNarrowBarrierAt), came = barrier + 8,
                      room_there = barrier + 16;
  const bool leads = threadIdx.x == 0;
  if (kByBoxes && leads) {
    for (int i = 0; i < 3; ++i) ptx::mbarrier_init(barrier + 8 * i, 1);
    ptx::fence_barrier_init();
  }
  const auto ask_boxes = [&](int n) {
    ptx::mbarrier_arrive_expect(barrier, kTensors * kNarrowTokenBytes);
    const std::uint32_t at = ptx::shared_address(memory);
    ptx::copy_box(at, &maps.x, share.channel, 0, 0, n, barrier);
    if (kGradients) ptx::copy_box(at + kNarrowTokenBytes, &maps.dy, share.channel, 0, 0, n, barrier);
  };
  const auto store_boxes = [&](int n) {
    ptx::store_box(&maps.to, share.channel - (kPairs ? kNarrowChannels * rank : 0), 0, kPairs ? 8 * rank : 0, n,
                   ptx::shared_address(memory + kNarrowOutAt));
    ptx::store_bulk_commit();
  };
  if constexpr (kPairs) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
#endif
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  const auto ask = [&](int n) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kByBoxes) {
      if (leads) ask_boxes(n);
      return;
    }
#endif
    const Place place = call.place_of(n);
    staged(0).ask(call.x, place, share.channel, call.channels, &call);
    if (kGradients) staged(1).ask(dy, place, share.channel, call.channels);
    ptx::copy_async_commit();
  };
  if (first < call.sequences) ask(first);

  // Where the filters' spectra wait and where they are read from, which gradients' blocks copy for each sequence.
  uint4* const near_filters =
      reinterpret_cast<uint4*>(memory + kNarrowPointsAt + (kGradients ? 0 : kNarrowPointBytes)) + warp * 256 + lane;
  uint4* const own_filters =
      kGradients ? filters + (std::int64_t{blockIdx.x} * kNarrowWarps + warp) * 256 + lane : near_filters;
  const float filter_from = 0.25f * make_narrow_filters<kFilterTop>(call, transform, NarrowColumns(), share.channel,
                                                                    reinterpret_cast<float*>(room), own_filters);
  const float filter_scales[2] = {__shfl_sync(0xffffffffu, filter_from, 8 * pair),
                                  __shfl_sync(0xffffffffu, filter_from, 8 * pair + 4)};

  // ---- sequences ----
  float sums[kGradients ? kSpans : 1][4] = {}, skip = 0.0f;
  [[maybe_unused]] std::uint32_t turn = 0;
  int last = -1;
  // Of a pair's outputs a block has those of eight t2, [t2][t1][both blocks' channels].
  constexpr int kOutRow = kPairs ? 32 : 16;
  const bool stays = !kPairs || warp / 8 == rank;
  const std::uint32_t out_at = ptx::shared_address(memory + kNarrowOutAt) +
                               (kPairs ? warp % 8 : warp) * (kPoints / 16 * kOutRow) + (kPairs ? rank * 16 : 0),
                      here_at = out_at + lane * kOutRow;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const std::uint32_t there_at = ptx::cluster_address(out_at + row * kOutRow + pair * 4, rank ^ 1),
                      came_there = ptx::cluster_address(came, rank ^ 1),
                      room_at = ptx::cluster_address(room_there, rank ^ 1);
  std::uint32_t sent = 0;
#endif
  const auto store = [&](int n) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kByBoxes) {
      if (!leads) return;
      if constexpr (kPairs) {
        ptx::mbarrier_arrive_expect(came, kNarrowTokenBytes / (spans_of(call.place_of(n)) > kSpans / 2 ? 2 : 4));
        ptx::mbarrier_wait(came, sent & 1 ^ 1);
        ptx::fence_async_proxy();
      }
      store_boxes(n);
      return;
    }
#endif
    out.store(to, call.place_of(n), share.channel, call.channels);
  };
  // Once all have read a sequence's tokens and written the outputs before.
  const auto hand_over = [&](int next) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (kByBoxes) ptx::fence_async_proxy();
#endif
    __syncthreads();
    if (last >= 0) store(last);
    if (next < call.sequences) ask(next);
  };
  const auto take = [&](int next, auto all) {
    constexpr int kAll = decltype(all)::value;
    std::uint32_t raw[kTensors][kAll][2];
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) transform.load_tokens(tensor, raw[tensor]);
    std::uint32_t both = largest_of(raw);
    both = NarrowColumns::over_pairs(both, [](std::uint32_t a, std::uint32_t b) { return __vmaxu2(a, b); });
    if (pair == 0) room[row * kNarrowWarps + warp] = both;
    hand_over(next);
    both = largest_in_room(room, row, both);
    {
      const float by[2] = {Scale::below(both >> 7 & 0xff, kTops[0]).to, Scale::below(both >> 23, kTops[1]).to};
      scale_tokens(raw, by, skip);
    }
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) transform.columns(tensor, raw[tensor]);
    __syncthreads();
    {
      Pair x[2][kAll], w[2][kAll];
      transform.rows(0, x);
      if constexpr (kGradients) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          ptx::copy_async_16(ptx::shared_address(near_filters + 32 * j), own_filters + 32 * j);
        }
        ptx::copy_async_commit();
        transform.rows(1, w);
#pragma unroll
        for (int h = 0; h < 2; ++h) correlate_spans(x[h], w[h]);
        __syncwarp();
        transform.rows_back(1, x);
        ptx::copy_async_wait<0>();
      }
      auto& source = kGradients ? w : x;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Pair g[kAll];
#pragma unroll
        for (int q = 0; q < kAll / 2; ++q) {
          const uint4 four = near_filters[(4 * h + q) * 32];
          g[2 * q] = {as_pair(four.x), as_pair(four.y)};
          g[2 * q + 1] = {as_pair(four.z), as_pair(four.w)};
        }
        kGradients ? correlate(g, source[h], kAll) : convolve(g, source[h], kAll);
      }
      __syncwarp();
      transform.rows_back(0, source);
    }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (kByBoxes && leads && last >= 0) {
      ptx::store_bulk_wait_read();  // of the outputs before
      if (kPairs) ptx::mbarrier_arrive_cluster(room_at);
    }
#endif
    __syncthreads();
    // What takes results of channels 2 pair() and the next back.
    const auto from_of = [&](int tensor, int i) {
      const std::uint32_t of = __shfl_sync(0xffffffffu, both, 8 * pair + 4 * i);
      return Scale::below(tensor == 0 ? of >> 7 & 0xff : of >> 23, kTops[tensor]).from;
    };
    const float of_source[2] = {from_of(kSource, 0), from_of(kSource, 1)};
    if constexpr (kGradients) {
      const float by[2] = {0.25f * of_source[0] * from_of(0, 0), 0.25f * of_source[1] * from_of(0, 1)};
      transform.columns_back<kAll>(1, [&](int s, const float(&values)[4][4]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          sums[s + i / 4][i % 4] = fmaf(values[i / 4][i % 4], by[i % 2], sums[s + i / 4][i % 4]);
        }
      });
    }
    const float by[2] = {of_source[0] * filter_scales[0], of_source[1] * filter_scales[1]};
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (kPairs && !stays && sent > 0) ptx::mbarrier_wait(room_there, sent & 1 ^ 1);
    ++sent;
#endif
    transform.columns_back<kAll>(0, [&](int s, const float(&values)[4][4]) {
      std::uint32_t words[4][2];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float* two = values[i / 2] + i % 2 * 2;
        words[i / 2][i % 2] = ptx::pack_bf16(two[0] * by[0], two[1] * by[1]);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        if (!stays) continue;
        store_matrices(here_at + (s + i) * 16 * kOutRow, words[i][0], words[i][1], words[i + 1][0], words[i + 1][1]);
      }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (kPairs && !stays) {
          send(there_at + (s + i / 2) * 16 * kOutRow + i % 2 * 8 * kOutRow, words[i / 2][i % 2], came_there);
        }
      }
#endif
    });
  };
  for (int n = first; n < call.sequences;) {
    const int next = sequence_from(call, n + chunks, chunks);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (kByBoxes) {
      ptx::mbarrier_wait(barrier, turn);
      turn ^= 1;
    }
#endif
    if (!kByBoxes) {
      ptx::copy_async_wait<0>();
      __syncthreads();
    }
    if (spans_of(call.place_of(n)) > kSpans / 2) {
      take(next, std::integral_constant<int, kSpans>());
    } else {
      take(next, std::integral_constant<int, kSpans / 2>());
    }
    last = n;
    n = next;
  }
  if (last >= 0) hand_over(static_cast<int>(call.sequences));
  if constexpr (kGradients) {
    store_narrow_sums(call, transform, share.channel, reinterpret_cast<float*>(room), skip, sums,
                      dfilter + std::int64_t{share.chunk} * call.rows * call.channels + share.channel);
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (kByBoxes && leads) ptx::store_bulk_wait_read();
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

// The forward on warpgroups: one group brings tiles by TMA, two or three others have 64 queries each and
// walk over tiles of 128 keys with an online softmax. The scores of a tile are made while the tile before is still
// multiplied with its values.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/softmax_attention/cuda/hopper/maps.h"
#include "flashgla/ops/softmax_attention/cuda/hopper/tiles.cuh"
#include "flashgla/ops/softmax_attention/cuda/online_softmax.cuh"
#include "flashgla/ops/softmax_attention/cuda/schedule.cuh"

namespace flashgla::ops::softmax_attention::cuda::hopper {

struct ForwardMaps {
  CUtensorMap q, k, v, past_k, past_v;
};

template <int D>
struct ForwardPlan {
  static constexpr int groups = D == 64 ? 3 : 2, threads = (1 + groups) * kGroup;
  static constexpr int registers = D == 64 ? 160 : 240, registers_to_bring = D == 64 ? 32 : 24;
  static constexpr int rows = 64 * groups, keys = 128, tiles = D / kTileChannels;
  static constexpr int stages = 2, query_stages = 2;
  static constexpr int tile = keys * kRowBytes, query_tile = rows * kRowBytes;  // bytes
  static constexpr int q = 0, k = q + query_stages * tiles * query_tile, v = k + stages * tiles * tile;
  static constexpr int barriers = v + stages * tiles * tile;
  // of each stage q full, q empty, then of each stage k full, k empty, v full, v empty
  static constexpr int bytes = barriers + 8 * (2 * query_stages + 4 * stages) + 1024;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int D>
struct ForwardBlock {
  using Plan = ForwardPlan<D>;
  std::uint32_t shared;

  __device__ __forceinline__ std::uint32_t barrier(int i) const { return shared + Plan::barriers + 8 * i; }
  __device__ __forceinline__ std::uint32_t q_full(int stage) const { return barrier(2 * stage); }
  __device__ __forceinline__ std::uint32_t q_empty(int stage) const { return barrier(2 * stage + 1); }
  __device__ __forceinline__ std::uint32_t full(bool values, int stage) const {
    return barrier(2 * Plan::query_stages + 4 * stage + 2 * values);
  }
  __device__ __forceinline__ std::uint32_t empty(bool values, int stage) const { return full(values, stage) + 8; }
  __device__ __forceinline__ std::uint32_t q_tile(int stage) const {
    return shared + Plan::q + stage * Plan::tiles * Plan::query_tile;
  }
  __device__ __forceinline__ std::uint32_t k_tile(int stage) const {
    return shared + Plan::k + stage * Plan::tiles * Plan::tile;
  }
  __device__ __forceinline__ std::uint32_t v_tile(int stage) const {
    return shared + Plan::v + stage * Plan::tiles * Plan::tile;
  }
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < Plan::query_stages; ++stage) {
      ptx::mbarrier_init(q_full(stage), 1);
      ptx::mbarrier_init(q_empty(stage), Plan::groups * 4);
    }
    for (int stage = 0; stage < Plan::stages; ++stage) {
      for (const bool values : {false, true}) {
        ptx::mbarrier_init(full(values, stage), 1);
        ptx::mbarrier_init(empty(values, stage), Plan::groups * 4);
      }
    }
    ptx::fence_barrier_init();
  }
};

// One thread.
template <int D>
__device__ __forceinline__ void bring_forward(const ForwardBlock<D>& block, const Call& call, const Schedule& schedule,
                                              const ForwardMaps& maps) {
  using Plan = ForwardPlan<D>;
  Ring<Plan::stages> ring;
  Ring<Plan::query_stages> queries;
  const auto copy = [&](std::uint32_t to, int bytes, const CUtensorMap& map, int token, int head, int batch,
                        std::uint32_t full) {
    ptx::mbarrier_arrive_expect(full, Plan::tiles * bytes);
    copy_tiles<Plan::tiles>(to, bytes, map, token, head, batch, full);
  };
  for (std::int64_t index = blockIdx.x; index < schedule.count(); index += gridDim.x) {
    const Schedule::Work work = schedule.at(index);
    if (work.n < 0) continue;
    const SequenceOfCall s = call.sequence(work.n);
    const int query = work.tile * Plan::rows, g = work.head / call.group(), begin = static_cast<int>(s.begin);
    if (query >= s.length) continue;
    const KeyTiles<Plan::rows, Plan::keys> keys(call, s, query);
    ptx::mbarrier_wait(block.q_empty(queries.stage), queries.parity ^ 1);
    copy(block.q_tile(queries.stage), Plan::query_tile, maps.q, begin + query, work.head, s.batch,
         block.q_full(queries.stage));
    queries.next();
    for (int i = 0; i < keys.count(); ++i, ring.next()) {
      const auto tile = keys.at(i);
      const int token = tile.past ? tile.begin : begin + tile.begin, batch = tile.past ? work.n : s.batch;
      ptx::mbarrier_wait(block.empty(false, ring.stage), ring.parity ^ 1);
      copy(block.k_tile(ring.stage), Plan::tile, tile.past ? maps.past_k : maps.k, token, g, batch,
           block.full(false, ring.stage));
      ptx::mbarrier_wait(block.empty(true, ring.stage), ring.parity ^ 1);
      copy(block.v_tile(ring.stage), Plan::tile, tile.past ? maps.past_v : maps.v, token, g, batch,
           block.full(true, ring.stage));
    }
  }
}

template <int D>
__device__ __forceinline__ void answer(const ForwardBlock<D>& block, const Call& call, const Schedule& schedule,
                                       const Strided& o, float* lse) {
  using Plan = ForwardPlan<D>;
  constexpr int E = Plan::keys / 2;
  const int group = static_cast<int>(threadIdx.x) / kGroup - 1, thread = threadIdx.x % kGroup;
  const int lane = thread % 32;
  const float scale = call.scale * kLog2E;
  Ring<Plan::stages> ring;  // of the scores; values are one tile behind
  Ring<Plan::query_stages> queries;
  const auto arrive = [&](std::uint32_t barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  for (std::int64_t index = blockIdx.x; index < schedule.count(); index += gridDim.x) {
    const Schedule::Work work = schedule.at(index);
    if (work.n < 0) continue;
    const SequenceOfCall sequence = call.sequence(work.n);
    const int query = work.tile * Plan::rows;
    if (query >= sequence.length) continue;
    const KeyTiles<Plan::rows, Plan::keys> keys(call, sequence, query);
    const int first = query + group * 64, row = first + thread / 32 * 16 + lane / 4;  // and row + 8

    // Scores that are not to be seen become -inf.
    const auto select = [&](float(&s)[E], int i) {
      const auto tile = keys.at(i);
      if (!tile.past && tile.begin + Plan::keys - 1 <= first &&
          (call.window == 0 || tile.begin > first + 63 - call.window)) {
        return;
      }
      Sight sight[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sight[half] = tile.past ? Sight::of_past(call, sequence, row + 8 * half, tile.begin)
                                : Sight::of_call(call, row + 8 * half, tile.begin);
        sight[half].shift(2 * (lane % 4));
      }
      if (tile.past && sequence.position > call.rows) {
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const int key = 8 * (e / 4) + e % 2;
          if (!sight[e / 2 % 2].sees(key) && !sight[e / 2 % 2].sees_older(key)) s[e] = -INFINITY;
        }
        return;
      }
#pragma unroll
      for (int e = 0; e < E; ++e) {
        if (!sight[e / 2 % 2].sees(8 * (e / 4) + e % 2)) s[e] = -INFINITY;
      }
    };
    // Values whose weight is zero may be anything in memory, and must not be.
    const auto clear_values = [&](std::uint32_t v, int i) {
      const auto tile = keys.at(i);
      Filled filled{0, Plan::keys};
      if (tile.past) {
        filled = filled_rows<Plan::keys>(call, sequence, query, tile.begin);
      } else if (call.bounds != nullptr) {
        filled.end = min(Plan::keys, sequence.length - tile.begin);
      }
      if (filled.begin <= 0 && filled.end >= Plan::keys) return;
#pragma unroll
      for (int half = 0; half < Plan::tiles; ++half) {
        zero_other_rows(v + half * Plan::tile, Plan::keys, filled.begin, filled.end, thread);
      }
      publish_zeros(kOwnBarrier + group);
    };

    OnlineSoftmax softmax;
    float factor[2], s[E], sums[Plan::tiles][32];
    std::uint32_t p[E / 2];
#pragma unroll
    for (int i = 0; i < Plan::tiles; ++i) {
#pragma unroll
      for (int e = 0; e < 32; ++e) sums[i][e] = 0.0f;
    }
    const std::uint32_t q = block.q_tile(queries.stage) + group * 64 * kRowBytes;
    ptx::mbarrier_wait(block.q_full(queries.stage), queries.parity);
    ptx::mbarrier_wait(block.full(false, ring.stage), ring.parity);
    ptx::wgmma_fence();
    scores<D>(s, q, Plan::query_tile, block.k_tile(ring.stage), Plan::tile);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    pin(s);
    arrive(block.empty(false, ring.stage));
    select(s, 0);
    softmax.step(s, scale, factor);
    round_rows(p, s);
    for (int i = 1; i < keys.count(); ++i) {
      const Ring<Plan::stages> values = ring;
      ring.next();
      ptx::mbarrier_wait(block.full(false, ring.stage), ring.parity);
      ptx::mbarrier_wait(block.full(true, values.stage), values.parity);
      clear_values(block.v_tile(values.stage), i - 1);
      pin(sums);
      pin(p);
      ptx::wgmma_fence();
      scores<D>(s, q, Plan::query_tile, block.k_tile(ring.stage), Plan::tile);
      ptx::wgmma_commit();
      combine<Plan::keys>(sums, p, block.v_tile(values.stage), Plan::tile);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      pin(s);
      arrive(block.empty(false, ring.stage));
      select(s, i);
      softmax.step(s, scale, factor);
      ptx::wgmma_wait<0>();
      pin(sums);
      pin(p);
      arrive(block.empty(true, values.stage));
#pragma unroll
      for (int t = 0; t < Plan::tiles; ++t) {
#pragma unroll
        for (int e = 0; e < 32; ++e) sums[t][e] *= factor[e / 2 % 2];
      }
      round_rows(p, s);
    }
    ptx::mbarrier_wait(block.full(true, ring.stage), ring.parity);
    clear_values(block.v_tile(ring.stage), keys.count() - 1);
    arrive(block.q_empty(queries.stage));
    queries.next();
    pin(sums);
    pin(p);
    ptx::wgmma_fence();
    combine<Plan::keys>(sums, p, block.v_tile(ring.stage), Plan::tile);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    pin(sums);
    pin(p);
    arrive(block.empty(true, ring.stage));
    ring.next();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = softmax.sum[half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const int token = row + 8 * half;
      if (token >= sequence.length) continue;
      const float inverse = 1.0f / total;
      __nv_bfloat16* to = o.at<__nv_bfloat16>(sequence.batch, sequence.begin + token, work.head) + 2 * (lane % 4);
#pragma unroll
      for (int t = 0; t < Plan::tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          *reinterpret_cast<std::uint32_t*>(to + 64 * t + 8 * i) =
              ptx::pack_bf16(sums[t][4 * i + 2 * half] * inverse, sums[t][4 * i + 2 * half + 1] * inverse);
        }
      }
      if (lse != nullptr && lane % 4 == 0) {
        const std::int64_t at = static_cast<std::int64_t>(sequence.batch) * call.length + sequence.begin + token;
        lse[at * call.heads + work.head] = kLn2 * (softmax.largest[half] + log2f(total));
      }
    }
  }
}

#endif

template <int D>
__global__ void __launch_bounds__(ForwardPlan<D>::threads, 1)
    forward_kernel(const __grid_constant__ Call call, const __grid_constant__ Schedule schedule,
                   const __grid_constant__ ForwardMaps maps, const __grid_constant__ Strided o, float* lse) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  const ForwardBlock<D> block{(ptx::shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) block.init();
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  if (threadIdx.x < kGroup) {
    ptx::give_registers<ForwardPlan<D>::registers_to_bring>();
    if (threadIdx.x == 0) bring_forward(block, call, schedule, maps);
  } else {
    ptx::take_registers<ForwardPlan<D>::registers>();
    answer<D>(block, call, schedule, o, lse);
  }
#endif
}

}  // namespace flashgla::ops::softmax_attention::cuda::hopper

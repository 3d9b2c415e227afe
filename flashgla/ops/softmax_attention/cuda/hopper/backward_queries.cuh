// The gradient of the queries on warpgroups: one group brings tiles, two others have 64 queries each and walk over
// tiles of keys: scores and d_o v^T, the slopes of the scores from both in registers, and their product with the keys.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/softmax_attention/cuda/hopper/maps.h"
#include "flashgla/ops/softmax_attention/cuda/hopper/tiles.cuh"
#include "flashgla/ops/softmax_attention/cuda/schedule.cuh"

namespace flashgla::ops::softmax_attention::cuda::hopper {

struct QueryMaps {
  CUtensorMap q, d_o, k, v, past_k, past_v;
};

template <int D>
struct QueryPlan {
  static constexpr int groups = 2, rows = 64 * groups, threads = (1 + groups) * kGroup;
  static constexpr int keys = D == 64 ? 128 : 64;  // of a tile: scores and products are in registers side by side
  static constexpr int tiles = D / kTileChannels, stages = 2;
  static constexpr int tile = keys * kRowBytes, query_tile = rows * kRowBytes;  // bytes
  static constexpr int q = 0, d_o = q + tiles * query_tile, k = d_o + tiles * query_tile;
  static constexpr int v = k + stages * tiles * tile, barriers = v + stages * tiles * tile;
  // queries full, queries empty, then of each stage full, empty
  static constexpr int bytes = barriers + 8 * (2 + 2 * stages) + 1024;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int D>
struct QueryBlock : GradientBarriers<QueryPlan<D>> {
  using Plan = QueryPlan<D>;
  __device__ __forceinline__ std::uint32_t k_tile(int stage) const { return this->tiles_at(Plan::k, stage); }
  __device__ __forceinline__ std::uint32_t v_tile(int stage) const { return this->tiles_at(Plan::v, stage); }
};

// One thread.
template <int D>
__device__ __forceinline__ void bring_for_queries(const QueryBlock<D>& block, const Call& call,
                                                  const Schedule& schedule, const QueryMaps& maps) {
  using Plan = QueryPlan<D>;
  constexpr auto copy = copy_tiles<Plan::tiles>;
  Ring<Plan::stages> ring;
  int parity = 1;
  for (std::int64_t index = blockIdx.x; index < schedule.count(); index += gridDim.x) {
    const Schedule::Work work = schedule.at(index);
    if (work.n < 0) continue;
    const SequenceOfCall s = call.sequence(work.n);
    const int query = work.tile * Plan::rows, g = work.head / call.group(), begin = static_cast<int>(s.begin);
    if (query >= s.length) continue;
    const KeyTiles<Plan::rows, Plan::keys> keys(call, s, query);
    ptx::mbarrier_wait(block.kept_empty(), parity);
    parity ^= 1;
    ptx::mbarrier_arrive_expect(block.kept_full(), 2 * Plan::tiles * Plan::query_tile);
    copy(block.shared + Plan::q, Plan::query_tile, maps.q, begin + query, work.head, s.batch, block.kept_full());
    copy(block.shared + Plan::d_o, Plan::query_tile, maps.d_o, begin + query, work.head, s.batch, block.kept_full());
    for (int i = 0; i < keys.count(); ++i, ring.next()) {
      const auto tile = keys.at(i);
      const int token = tile.past ? tile.begin : begin + tile.begin, batch = tile.past ? work.n : s.batch;
      const std::uint32_t full = block.full(ring.stage);
      ptx::mbarrier_wait(block.empty(ring.stage), ring.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, 2 * Plan::tiles * Plan::tile);
      copy(block.k_tile(ring.stage), Plan::tile, tile.past ? maps.past_k : maps.k, token, g, batch, full);
      copy(block.v_tile(ring.stage), Plan::tile, tile.past ? maps.past_v : maps.v, token, g, batch, full);
    }
  }
}

template <int D>
__device__ __forceinline__ void query_gradients(const QueryBlock<D>& block, const Call& call, const Schedule& schedule,
                                                const RowSums& rows, const Strided& dq) {
  using Plan = QueryPlan<D>;
  constexpr int E = Plan::keys / 2;
  const int group = static_cast<int>(threadIdx.x) / kGroup - 1, thread = threadIdx.x % kGroup;
  const int lane = thread % 32;
  const float scale = call.scale * kLog2E;
  const std::uint32_t q = block.shared + Plan::q + group * 64 * kRowBytes;
  const std::uint32_t d_o = block.shared + Plan::d_o + group * 64 * kRowBytes;
  Ring<Plan::stages> ring;
  int parity = 0;
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
    float lse2[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = min(row + 8 * half, sequence.length - 1);
      const std::int64_t at = rows.at(sequence.batch, work.head, sequence.begin + token);
      lse2[half] = rows.lse2[at];
      delta[half] = rows.delta[at];
    }
    float p[E], slope[E], sums[Plan::tiles][32];
    std::uint32_t rounded[E / 2] = {};
#pragma unroll
    for (int i = 0; i < Plan::tiles; ++i) {
#pragma unroll
      for (int e = 0; e < 32; ++e) sums[i][e] = 0.0f;
    }
    ptx::mbarrier_wait(block.kept_full(), parity);
    parity ^= 1;
    int before = -1;  // the stage whose products are under way
    for (int i = 0; i < keys.count(); ++i, ring.next()) {
      ptx::mbarrier_wait(block.full(ring.stage), ring.parity);
      const auto tile = keys.at(i);
      Filled filled{0, Plan::keys};
      if (tile.past) {
        filled = filled_rows<Plan::keys>(call, sequence, query, tile.begin);
      } else if (call.bounds != nullptr) {
        filled.end = min(Plan::keys, sequence.length - tile.begin);
      }
      if (filled.begin > 0 || filled.end < Plan::keys) {
#pragma unroll
        for (int t = 0; t < Plan::tiles; ++t) {
          zero_other_rows(block.k_tile(ring.stage) + t * Plan::tile, Plan::keys, filled.begin, filled.end, thread);
        }
        publish_zeros(kOwnBarrier + group);
      }
      ptx::wgmma_fence();
      scores<D>(p, q, Plan::query_tile, block.k_tile(ring.stage), Plan::tile);
      ptx::wgmma_commit();
      scores<D>(slope, d_o, Plan::query_tile, block.v_tile(ring.stage), Plan::tile);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // and the products of the tile before
      pin(p);
      pin(rounded);
      if (before >= 0) arrive(block.empty(before));
      const bool whole = !tile.past && tile.begin + Plan::keys - 1 <= first &&
                         (call.window == 0 || tile.begin > first + 63 - call.window);
#pragma unroll
      for (int e = 0; e < E; ++e) p[e] = ptx::exp2(p[e] * scale - lse2[e / 2 % 2]);
      ptx::wgmma_wait<0>();
      pin(slope);
#pragma unroll
      for (int e = 0; e < E; ++e) slope[e] = p[e] * (slope[e] - delta[e / 2 % 2]);
      if (!whole) {
        Sight sight[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sight[half] = tile.past ? Sight::of_past(call, sequence, row + 8 * half, tile.begin)
                                  : Sight::of_call(call, row + 8 * half, tile.begin);
          sight[half].shift(2 * (lane % 4));
        }
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const int key = 8 * (e / 4) + e % 2;
          if (!sight[e / 2 % 2].sees(key) && !sight[e / 2 % 2].sees_older(key)) slope[e] = 0.0f;
        }
      }
      round_rows(rounded, slope);
      pin(sums);
      pin(rounded);
      ptx::wgmma_fence();
      combine<Plan::keys>(sums, rounded, block.k_tile(ring.stage), Plan::tile);
      ptx::wgmma_commit();
      before = ring.stage;
    }
    arrive(block.kept_empty());
    ptx::wgmma_wait<0>();
    pin(sums);
    pin(rounded);
    arrive(block.empty(before));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = row + 8 * half;
      if (token >= sequence.length) continue;
      __nv_bfloat16* to = dq.at<__nv_bfloat16>(sequence.batch, sequence.begin + token, work.head) + 2 * (lane % 4);
#pragma unroll
      for (int t = 0; t < Plan::tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          *reinterpret_cast<std::uint32_t*>(to + 64 * t + 8 * i) =
              ptx::pack_bf16(sums[t][4 * i + 2 * half] * call.scale, sums[t][4 * i + 2 * half + 1] * call.scale);
        }
      }
    }
  }
}

#endif

template <int D>
__global__ void __launch_bounds__(QueryPlan<D>::threads, 1)
    query_gradients_kernel(const __grid_constant__ Call call, const __grid_constant__ Schedule schedule,
                           const __grid_constant__ QueryMaps maps, const __grid_constant__ RowSums rows,
                           const __grid_constant__ Strided dq) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  const QueryBlock<D> block{(ptx::shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) block.init(1);
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  if (threadIdx.x < kGroup) {
    ptx::give_registers<24>();
    if (threadIdx.x == 0) bring_for_queries(block, call, schedule, maps);
  } else {
    ptx::take_registers<240>();
    query_gradients(block, call, schedule, rows, dq);
  }
#endif
}

}  // namespace flashgla::ops::softmax_attention::cuda::hopper

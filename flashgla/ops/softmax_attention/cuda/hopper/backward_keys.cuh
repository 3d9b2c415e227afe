// The gradients of keys and values on warpgroups: one group brings tiles, two others have 64 keys each and walk over
// tiles of queries of every head that shares them. Scores and v d_o^T are transposed (a row a key), so that weights
// and slopes are the left side of the products that add to dv and dk, and never leave the registers.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/softmax_attention/cuda/hopper/maps.h"
#include "flashgla/ops/softmax_attention/cuda/hopper/tiles.cuh"
#include "flashgla/ops/softmax_attention/cuda/schedule.cuh"

namespace flashgla::ops::softmax_attention::cuda::hopper {

struct KeyMaps {
  CUtensorMap q, d_o, k, v;
};

template <int D>
struct KeyPlan {
  static constexpr int groups = 2, keys = 64 * groups, threads = (1 + groups) * kGroup;
  static constexpr int queries = D == 64 ? 128 : 64, tiles = D / kTileChannels;
  static constexpr int stages = D == 64 ? 2 : 3;
  static constexpr int tile = queries * kRowBytes, key_tile = keys * kRowBytes;  // bytes
  static constexpr int sums = queries * 4;                                       // of one kind
  static constexpr int k = 0, v = k + tiles * key_tile, q = v + tiles * key_tile;
  static constexpr int d_o = q + stages * tiles * tile, rows = d_o + stages * tiles * tile;
  static constexpr int barriers = rows + stages * 2 * sums;
  // keys full, keys empty, then of each stage full, empty
  static constexpr int bytes = barriers + 8 * (2 + 2 * stages) + 1024;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int D>
struct KeyBlock : GradientBarriers<KeyPlan<D>> {
  using Plan = KeyPlan<D>;
  __device__ __forceinline__ std::uint32_t q_tile(int stage) const { return this->tiles_at(Plan::q, stage); }
  __device__ __forceinline__ std::uint32_t d_o_tile(int stage) const { return this->tiles_at(Plan::d_o, stage); }
  // lse2 of the stage's queries, then delta.
  __device__ __forceinline__ std::uint32_t row_sums(int stage) const {
    return this->shared + Plan::rows + stage * 2 * Plan::sums;
  }
};

// Calls for_key_tile(work, sequence, key, queries) for the block's tiles of keys.
template <int kKeys, int N, class Body>
__device__ __forceinline__ void for_each_key_tile(const Call& call, const Schedule& schedule, const Body& body) {
  for (std::int64_t index = blockIdx.x; index < schedule.count(); index += gridDim.x) {
    const Schedule::Work work = schedule.at(index);
    if (work.n < 0) continue;
    const SequenceOfCall s = call.sequence(work.n);
    const int key = work.tile * kKeys;
    if (key < s.length) body(work, s, key, QueryTiles<kKeys, N>(call, s, key));
  }
}

// One warp: lane 0 tells TMA, all bring the queries' sums.
template <int D>
__device__ __forceinline__ void bring_for_keys(const KeyBlock<D>& block, const Call& call, const Schedule& schedule,
                                               const KeyMaps& maps, const RowSums& rows) {
  using Plan = KeyPlan<D>;
  constexpr auto copy = copy_tiles<Plan::tiles>;
  Ring<Plan::stages> ring;
  int parity = 1;
  const int lane = threadIdx.x;
  for_each_key_tile<Plan::keys, Plan::queries>(
      call, schedule,
      [&](const Schedule::Work& work, const SequenceOfCall& s, int key,
          const QueryTiles<Plan::keys, Plan::queries>& tiles) {
        ptx::mbarrier_wait(block.kept_empty(), parity);
        parity ^= 1;
        if (lane == 0) {
          ptx::mbarrier_arrive_expect(block.kept_full(), 2 * Plan::tiles * Plan::key_tile);
          copy(block.shared + Plan::k, Plan::key_tile, maps.k, s.begin + key, work.head, s.batch, block.kept_full());
          copy(block.shared + Plan::v, Plan::key_tile, maps.v, s.begin + key, work.head, s.batch, block.kept_full());
        }
        for (int member = 0; member < call.group(); ++member) {
          const int head = work.head * call.group() + member;
          for (int i = 0; i < tiles.count; ++i, ring.next()) {
            const int query = (tiles.first + i) * Plan::queries;
            const std::uint32_t full = block.full(ring.stage);
            ptx::mbarrier_wait(block.empty(ring.stage), ring.parity ^ 1);
            if (lane == 0) {
              ptx::mbarrier_arrive_expect(full, 2 * Plan::tiles * Plan::tile);
              copy(block.q_tile(ring.stage), Plan::tile, maps.q, s.begin + query, head, s.batch, full);
              copy(block.d_o_tile(ring.stage), Plan::tile, maps.d_o, s.begin + query, head, s.batch, full);
            }
            const std::int64_t at = rows.at(s.batch, head, s.begin + query);
#pragma unroll
            for (int j = lane; j < Plan::queries; j += 32) {
              const bool there = query + j < s.length;
              const std::uint32_t to = block.row_sums(ring.stage) + 4 * j;
              copy_sum(to, rows.lse2 + (there ? at + j : 0), there);
              copy_sum(to + Plan::sums, rows.delta + (there ? at + j : 0), there);
            }
            ptx::mbarrier_arrive_after_copies(full);
          }
        }
      });
}

template <int D>
__device__ __forceinline__ void key_gradients(const KeyBlock<D>& block, const Call& call, const Schedule& schedule,
                                              const Strided& dk, const Strided& dv) {
  using Plan = KeyPlan<D>;
  constexpr int E = Plan::queries / 2;
  const int group = static_cast<int>(threadIdx.x) / kGroup - 1, thread = threadIdx.x % kGroup;
  const int lane = thread % 32;
  const float scale = call.scale * kLog2E;
  const std::uint32_t k = block.shared + Plan::k + group * 64 * kRowBytes;
  const std::uint32_t v = block.shared + Plan::v + group * 64 * kRowBytes;
  Ring<Plan::stages> ring;
  int parity = 0;
  const auto arrive = [&](std::uint32_t barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  for_each_key_tile<Plan::keys, Plan::queries>(
      call, schedule,
      [&](const Schedule::Work& work, const SequenceOfCall& s, int key,
          const QueryTiles<Plan::keys, Plan::queries>& tiles) {
        const int first = key + group * 64, row = first + thread / 32 * 16 + lane / 4;  // and row + 8
        float p[E], slope[E], sums_k[Plan::tiles][32], sums_v[Plan::tiles][32];
        std::uint32_t weights[E / 2] = {}, slopes[E / 2] = {};
#pragma unroll
        for (int i = 0; i < Plan::tiles; ++i) {
#pragma unroll
          for (int e = 0; e < 32; ++e) sums_k[i][e] = sums_v[i][e] = 0.0f;
        }
        ptx::mbarrier_wait(block.kept_full(), parity);
        parity ^= 1;
        for (int i = 0; i < tiles.count * call.group(); ++i, ring.next()) {
          const int query = (tiles.first + i % tiles.count) * Plan::queries;
          const std::uint32_t q = block.q_tile(ring.stage), d_o = block.d_o_tile(ring.stage);
          ptx::mbarrier_wait(block.full(ring.stage), ring.parity);
          if (call.bounds != nullptr && query + Plan::queries > s.length) {
#pragma unroll
            for (int t = 0; t < Plan::tiles; ++t) {
              zero_other_rows(q + t * Plan::tile, Plan::queries, 0, s.length - query, thread);
              zero_other_rows(d_o + t * Plan::tile, Plan::queries, 0, s.length - query, thread);
            }
            publish_zeros(kOwnBarrier + group);
          }
          ptx::wgmma_fence();
          scores<D>(p, k, Plan::key_tile, q, Plan::tile);
          scores<D>(slope, v, Plan::key_tile, d_o, Plan::tile);
          ptx::wgmma_commit();
          ptx::wgmma_wait<0>();
          pin(p);
          pin(slope);
          // A column is a query: its sums come from shared memory.
          const auto sum_of = [&](int kind, int column) {
            float2 two;
            asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                         : "=f"(two.x), "=f"(two.y)
                         : "r"(block.row_sums(ring.stage) + kind * Plan::sums + 4 * column));
            return two;
          };
          // Whether all the group's keys are seen by all of the tile's queries.
          const bool whole = first + 63 <= query && query + Plan::queries <= s.length &&
                             (call.window == 0 || first > query + Plan::queries - 1 - call.window);
          if (!whole) {  // a row's key is seen from the columns [first_column, end)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int own = row + 8 * half, first_column = own - query - 2 * (lane % 4);
              const int end = (call.window > 0 ? min(own + call.window, s.length) : s.length) - query - 2 * (lane % 4);
#pragma unroll
              for (int j = 0; j < E / 4; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const int column = 8 * j + e;
                  if (column < first_column || column >= end) p[4 * j + 2 * half + e] = -INFINITY;
                }
              }
            }
          }
          // Of columns 8j..8j+7: weights, and slopes, rounded as they come, for which there are no registers otherwise.
          const auto weigh = [&](int j) {
            const float2 lse2 = sum_of(0, 8 * j + 2 * (lane % 4));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float& x = p[4 * j + e];
              x = ptx::exp2(x * scale - (e % 2 ? lse2.y : lse2.x));
            }
            weights[2 * j] = ptx::pack_bf16(p[4 * j], p[4 * j + 1]);
            weights[2 * j + 1] = ptx::pack_bf16(p[4 * j + 2], p[4 * j + 3]);
          };
          const auto slope_of = [&](int j) {
            const float2 delta = sum_of(1, 8 * j + 2 * (lane % 4));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float& x = slope[4 * j + e];
              x = p[4 * j + e] * (x - (e % 2 ? delta.y : delta.x));
            }
            slopes[2 * j] = ptx::pack_bf16(slope[4 * j], slope[4 * j + 1]);
            slopes[2 * j + 1] = ptx::pack_bf16(slope[4 * j + 2], slope[4 * j + 3]);
          };
#pragma unroll
          for (int j = 0; j < E / 4; ++j) {
            weigh(j);
            slope_of(j);
          }
          pin(sums_v);
          pin(sums_k);
          pin(weights);
          pin(slopes);
          ptx::wgmma_fence();
          combine<Plan::queries>(sums_v, weights, d_o, Plan::tile);
          combine<Plan::queries>(sums_k, slopes, q, Plan::tile);
          ptx::wgmma_commit();
          ptx::wgmma_wait<0>();
          pin(sums_v);
          pin(sums_k);
          pin(weights);
          pin(slopes);
          arrive(block.empty(ring.stage));
        }
        arrive(block.kept_empty());
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = row + 8 * half;
          if (token >= s.length) continue;
          __nv_bfloat16* to_k = dk.at<__nv_bfloat16>(s.batch, s.begin + token, work.head) + 2 * (lane % 4);
          __nv_bfloat16* to_v = dv.at<__nv_bfloat16>(s.batch, s.begin + token, work.head) + 2 * (lane % 4);
#pragma unroll
          for (int t = 0; t < Plan::tiles; ++t) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const int e = 4 * i + 2 * half;
              *reinterpret_cast<std::uint32_t*>(to_k + 64 * t + 8 * i) =
                  ptx::pack_bf16(sums_k[t][e] * call.scale, sums_k[t][e + 1] * call.scale);
              *reinterpret_cast<std::uint32_t*>(to_v + 64 * t + 8 * i) = ptx::pack_bf16(sums_v[t][e], sums_v[t][e + 1]);
            }
          }
        }
      });
}

#endif

template <int D>
__global__ void __launch_bounds__(KeyPlan<D>::threads, 1)
    key_gradients_kernel(const __grid_constant__ Call call, const __grid_constant__ Schedule schedule,
                         const __grid_constant__ KeyMaps maps, const __grid_constant__ RowSums rows,
                         const __grid_constant__ Strided dk, const __grid_constant__ Strided dv) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  const KeyBlock<D> block{(ptx::shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) block.init(1 + 32);  // TMA, and each lane of the warp that brings sums
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  if (threadIdx.x < kGroup) {
    ptx::give_registers<24>();
    if (threadIdx.x < 32) bring_for_keys(block, call, schedule, maps, rows);
  } else {
    ptx::take_registers<240>();
    key_gradients(block, call, schedule, dk, dv);
  }
#endif
}

}  // namespace flashgla::ops::softmax_attention::cuda::hopper

// The forward by warps: a block has 64 queries of a head and walks over tiles of 64 keys with an online softmax, the
// next tile on its way.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/softmax_attention/cuda/online_softmax.cuh"
#include "flashgla/ops/softmax_attention/cuda/tensor_cores/dropped_tiles.cuh"
#include "flashgla/ops/softmax_attention/cuda/tensor_cores/tiles.cuh"

namespace flashgla::ops::softmax_attention::cuda::tensor_cores {

template <int D>
struct ForwardPlan {
  static constexpr int keys = 64, blocks = D > 64 ? 2 : 3;  // of a tile; of a multiprocessor
  static constexpr int tile = keys * kPitch<D>;             // bytes
  static constexpr int q = 0, k = kBlockRows * kPitch<D>, v = k + 2 * tile, bytes = v + 2 * tile;
};

template <int D, class Drop>
__global__ void __launch_bounds__(kThreads, ForwardPlan<D>::blocks)
    forward_kernel(const __grid_constant__ Call call, const __grid_constant__ Schedule schedule,
                   const __grid_constant__ Strided o, float* lse, const __grid_constant__ Drop dropped) {
  using Plan = ForwardPlan<D>;
  constexpr int E = Plan::keys / 2;
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(16) char memory[];
  const std::uint32_t shared = ptx::shared_address(memory);
  const Schedule::Work work = schedule.at(blockIdx.x);
  if (work.n < 0) return;
  const SequenceOfCall s = call.sequence(work.n);
  const int query = work.tile * kBlockRows, g = work.head / call.group();
  if (query >= s.length) return;
  const KeyTiles<kBlockRows, Plan::keys> keys(call, s, query);
  const auto copy_keys = [&](int i) {
    const auto tile = keys.at(i);
    const auto rows = [&](const Strided& now, const Strided& past) {
      return rows_of_keys<kBlockRows, Plan::keys>(call, s, work.n, g, query, tile, now, past);
    };
    copy_tile<D, Plan::keys>(shared + Plan::k + i % 2 * Plan::tile, rows(call.k, call.past_k), call.key_dim);
    copy_tile<D, Plan::keys>(shared + Plan::v + i % 2 * Plan::tile, rows(call.v, call.past_v), call.value_dim);
    ptx::copy_async_commit();
  };
  copy_tile<D, kBlockRows>(shared + Plan::q, rows_of_call(call.q, s, query, work.head), call.key_dim);
  copy_keys(0);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int first = query + 16 * warp, row = first + lane / 4;  // and row + 8
  const float scale = call.scale * kLog2E;
  OnlineSoftmax softmax;
  float weights[E], sums[D / 2] = {}, factor[2];
  std::uint32_t rounded[E / 2];
  for (int i = 0; i < keys.count(); ++i) {
    if (i + 1 < keys.count()) {
      copy_keys(i + 1);
      ptx::copy_async_wait<1>();
    } else {
      ptx::copy_async_wait<0>();
    }
    __syncthreads();
    scores<D>(weights, shared + Plan::q + warp * kWarpBytes<D>, shared + Plan::k + i % 2 * Plan::tile);
    const auto tile = keys.at(i);
    hide<kBlockRows>(weights, call, s, tile, first, row);
    softmax.step(weights, scale, factor);
    if constexpr (std::is_same_v<Drop, Dropped>) {
      const DroppedTiles mask(dropped, call, s, work.head);
      const std::uint32_t kept = mask.kept_keys<E>(row, column_of(call, s, tile));
#pragma unroll
      for (int e = 0; e < E; ++e) weights[e] = kept >> e & 1 ? weights[e] * dropped.kept : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < D / 2; ++e) sums[e] *= factor[e / 2 % 2];
    round_rows(rounded, weights);
    combine<D>(sums, rounded, shared + Plan::v + i % 2 * Plan::tile);
    __syncthreads();
  }

  float total[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] = softmax.sum[half];
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
    const int token = row + 8 * half;
    if (lse == nullptr || lane % 4 != 0 || token >= s.length) continue;
    const std::int64_t at = static_cast<std::int64_t>(s.batch) * call.length + s.begin + token;
    lse[at * call.heads + work.head] = kLn2 * (softmax.largest[half] + log2f(total[half]));
  }
  store_rows<D>(sums, o, s, row, work.head, call.value_dim, 1.0f / total[0], 1.0f / total[1]);
}

}  // namespace flashgla::ops::softmax_attention::cuda::tensor_cores

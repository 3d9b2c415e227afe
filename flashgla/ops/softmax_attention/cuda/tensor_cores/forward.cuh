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
  const Place place(call, schedule);
  const SequenceOfCall& s = place.s;
  if (place.begin >= s.length) return;
  copy_tile<D, kBlockRows>(shared + Plan::q, rows_of_call(call.q, s, place.begin, place.head), call.key_dim);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int first = place.begin + 16 * warp, row = first + lane / 4;  // and row + 8
  const float scale = call.scale * kLog2E;
  OnlineSoftmax softmax;
  float sums[D / 2] = {};
  const KeyTiles<kBlockRows, Plan::keys> keys(call, s, place.begin);
  const auto copy = [&](int i) {
    const int stage = i % 2 * Plan::tile;
    copy_keys_and_values<D, Plan::keys>(call, place, keys.at(i), shared + Plan::k + stage, shared + Plan::v + stage);
  };
  walk(keys.count(), copy, [&](int i) {
    float weights[E], factor[2];
    std::uint32_t rounded[E / 2];
    scores<D>(weights, shared + Plan::q + warp * kWarpBytes<D>, shared + Plan::k + i % 2 * Plan::tile);
    const auto tile = keys.at(i);
    hide(weights, call, s, tile.past, tile.begin, first, row);
    softmax.step(weights, scale, factor);
    if constexpr (std::is_same_v<Drop, Dropped>) {
      const DroppedTiles mask(dropped, call, s, place.head);
      const std::uint32_t kept = mask.kept_keys<E>(row, column_of(call, s, tile));
#pragma unroll
      for (int e = 0; e < E; ++e) weights[e] = kept >> e & 1 ? weights[e] * dropped.kept : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < D / 2; ++e) sums[e] *= factor[e / 2 % 2];
    round_rows(rounded, weights);
    combine<D>(sums, rounded, shared + Plan::v + i % 2 * Plan::tile);
  });

  float total[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] = softmax.sum[half];
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
    const int token = row + 8 * half;
    if (lse == nullptr || lane % 4 != 0 || token >= s.length) continue;
    const std::int64_t at = static_cast<std::int64_t>(s.batch) * call.length + s.begin + token;
    lse[at * call.heads + place.head] = kLn2 * (softmax.largest[half] + log2f(total[half]));
  }
  store_rows<D>(sums, o, s, row, place.head, call.value_dim, 1.0f / total[0], 1.0f / total[1]);
}

}  // namespace flashgla::ops::softmax_attention::cuda::tensor_cores

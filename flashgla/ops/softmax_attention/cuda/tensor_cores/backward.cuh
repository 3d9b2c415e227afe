// The gradients by warps. A block of the first kernel has 64 queries of a head and walks over tiles of keys: scores and
// d_o v^T, the slopes of the scores from both in registers, and their product with the keys. A block of the second has
// 64 keys and walks over tiles of queries of every head that shares them, with scores transposed (a row a key), so that
// weights and slopes are the left side of the products that add to dv and dk.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/softmax_attention/cuda/tensor_cores/dropped_tiles.cuh"
#include "flashgla/ops/softmax_attention/cuda/tensor_cores/tiles.cuh"

namespace flashgla::ops::softmax_attention::cuda::tensor_cores {

template <int D>
struct BackwardPlan {
  static constexpr int others = D > 64 ? 32 : 64;  // rows of a tile that a block walks over
  static constexpr int kept = kBlockRows * kPitch<D>, tile = others * kPitch<D>;  // bytes
  static constexpr int first_kept = 0, second_kept = kept, first = 2 * kept, second = first + 2 * tile;
  static constexpr int row_sums = second + 2 * tile, bytes = row_sums + 2 * 2 * 4 * others;
};

template <int D, class Drop>
__global__ void __launch_bounds__(kThreads, 2)
    query_gradients_kernel(const __grid_constant__ Call call, const __grid_constant__ Schedule schedule,
                           const __grid_constant__ Strided d_o, const __grid_constant__ RowSums rows,
                           const __grid_constant__ Strided dq, const __grid_constant__ Drop dropped) {
  using Plan = BackwardPlan<D>;
  constexpr int E = Plan::others / 2;
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(16) char memory[];
  const std::uint32_t shared = ptx::shared_address(memory);
  const Place place(call, schedule);
  const SequenceOfCall& s = place.s;
  if (place.begin >= s.length) return;
  copy_tile<D, kBlockRows>(shared + Plan::first_kept, rows_of_call(call.q, s, place.begin, place.head), call.key_dim);
  copy_tile<D, kBlockRows>(shared + Plan::second_kept, rows_of_call(d_o, s, place.begin, place.head), call.value_dim);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int first = place.begin + 16 * warp, row = first + lane / 4;  // and row + 8
  const float scale = call.scale * kLog2E;
  float lse2[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t at = rows.at(s.batch, place.head, s.begin + min(row + 8 * half, s.length - 1));
    lse2[half] = rows.lse2[at];
    delta[half] = rows.delta[at];
  }
  float sums[D / 2] = {};
  const KeyTiles<kBlockRows, Plan::others> keys(call, s, place.begin);
  const auto copy = [&](int i) {
    const int stage = i % 2 * Plan::tile;
    copy_keys_and_values<D, Plan::others>(call, place, keys.at(i), shared + Plan::first + stage,
                                          shared + Plan::second + stage);
  };
  walk(keys.count(), copy, [&](int i) {
    float weights[E], slopes[E];
    std::uint32_t rounded[E / 2];
    const std::uint32_t k = shared + Plan::first + i % 2 * Plan::tile;
    scores<D>(weights, shared + Plan::first_kept + warp * kWarpBytes<D>, k);
    scores<D>(slopes, shared + Plan::second_kept + warp * kWarpBytes<D>, shared + Plan::second + i % 2 * Plan::tile);
    const auto tile = keys.at(i);
    hide(weights, call, s, tile.past, tile.begin, first, row);
    if constexpr (std::is_same_v<Drop, Dropped>) {
      const DroppedTiles mask(dropped, call, s, place.head);
      const std::uint32_t kept = mask.kept_keys<E>(row, column_of(call, s, tile));
#pragma unroll
      for (int e = 0; e < E; ++e) slopes[e] = kept >> e & 1 ? slopes[e] * dropped.kept : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < E; ++e) {
      slopes[e] = ptx::exp2(weights[e] * scale - lse2[e / 2 % 2]) * (slopes[e] - delta[e / 2 % 2]);
    }
    round_rows(rounded, slopes);
    combine<D>(sums, rounded, k);
  });
  store_rows<D>(sums, dq, s, row, place.head, call.key_dim, call.scale, call.scale);
}

template <int D, class Drop>
__global__ void __launch_bounds__(kThreads, 2)
    key_gradients_kernel(const __grid_constant__ Call call, const __grid_constant__ Schedule schedule,
                         const __grid_constant__ Strided d_o, const __grid_constant__ RowSums rows,
                         const __grid_constant__ Strided dk, const __grid_constant__ Strided dv,
                         const __grid_constant__ Drop dropped) {
  using Plan = BackwardPlan<D>;
  constexpr int E = Plan::others / 2;
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(16) char memory[];
  const std::uint32_t shared = ptx::shared_address(memory);
  const Place place(call, schedule);
  const SequenceOfCall& s = place.s;
  if (place.begin >= s.length) return;
  copy_tile<D, kBlockRows>(shared + Plan::first_kept, rows_of_call(call.k, s, place.begin, place.head), call.key_dim);
  copy_tile<D, kBlockRows>(shared + Plan::second_kept, rows_of_call(call.v, s, place.begin, place.head),
                           call.value_dim);

  const QueryTiles<kBlockRows, Plan::others> tiles(call, s, place.begin);
  const auto head_of = [&](int i) { return place.head * call.group() + i / tiles.count; };
  const auto query_of = [&](int i) { return (tiles.first + i % tiles.count) * Plan::others; };
  const auto copy = [&](int i) {
    const int head = head_of(i), query = query_of(i), stage = i % 2;
    copy_tile<D, Plan::others>(shared + Plan::first + stage * Plan::tile, rows_of_call(call.q, s, query, head),
                               call.key_dim);
    copy_tile<D, Plan::others>(shared + Plan::second + stage * Plan::tile, rows_of_call(d_o, s, query, head),
                               call.value_dim);
    if (threadIdx.x < 2 * Plan::others) {  // lse2 of the stage's queries, then delta
      const int token = static_cast<int>(threadIdx.x) % Plan::others;
      const bool there = query + token < s.length;
      const float* from = threadIdx.x < Plan::others ? rows.lse2 : rows.delta;
      copy_sum(shared + Plan::row_sums + (2 * Plan::others * stage + threadIdx.x) * 4,
               from + (there ? rows.at(s.batch, head, s.begin + query + token) : 0), there);
    }
  };
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int first = place.begin + 16 * warp, row = first + lane / 4;  // and row + 8
  const float scale = call.scale * kLog2E;
  float sums_k[D / 2] = {}, sums_v[D / 2] = {};
  walk(tiles.count * call.group(), copy, [&](int i) {
    float weights[E], slopes[E];
    std::uint32_t rounded[E / 2];
    const int query = query_of(i), stage = i % 2;
    const std::uint32_t q = shared + Plan::first + stage * Plan::tile, g = shared + Plan::second + stage * Plan::tile;
    scores<D>(weights, shared + Plan::first_kept + warp * kWarpBytes<D>, q);
    scores<D>(slopes, shared + Plan::second_kept + warp * kWarpBytes<D>, g);
    // A row's key is seen by its own token and those behind it, within the window.
    if (first + 15 > query || query + Plan::others > s.length ||
        (call.window > 0 && first <= query + Plan::others - 1 - call.window)) {
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const int own = row + 8 * (e / 2 % 2), token = query + 8 * (e / 4) + 2 * (lane % 4) + e % 2;
        const int end = call.window > 0 ? min(own + call.window, s.length) : s.length;
        if (token < own || token >= end) weights[e] = -INFINITY;
      }
    }
    std::uint32_t kept = 0;
    if constexpr (std::is_same_v<Drop, Dropped>) {
      const DroppedTiles mask(dropped, call, s, head_of(i));
      kept = mask.kept_queries<E>(query, static_cast<int>(s.begin) + row);
    }
    const auto* sums = reinterpret_cast<const float*>(memory + Plan::row_sums) + 2 * Plan::others * stage;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int column = 8 * (e / 4) + 2 * (lane % 4) + e % 2;
      float weight = ptx::exp2(weights[e] * scale - sums[column]), gradient = slopes[e];
      if constexpr (std::is_same_v<Drop, Dropped>) {
        const float factor = kept >> e & 1 ? dropped.kept : 0.0f;
        weights[e] = weight * factor;
        gradient *= factor;
      } else {
        weights[e] = weight;
      }
      slopes[e] = weight * (gradient - sums[Plan::others + column]);
    }
    round_rows(rounded, weights);
    combine<D>(sums_v, rounded, g);
    round_rows(rounded, slopes);
    combine<D>(sums_k, rounded, q);
  });
  store_rows<D>(sums_k, dk, s, row, place.head, call.key_dim, call.scale, call.scale);
  store_rows<D>(sums_v, dv, s, row, place.head, call.value_dim, 1.0f, 1.0f);
}

}  // namespace flashgla::ops::softmax_attention::cuda::tensor_cores

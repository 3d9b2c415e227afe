// Outputs of one chunk, head after head: scores q k^T are worked out once for all of them.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/parts.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

// Shared memory: q; two stages of v and the state, k in the second's place at first; gates a warp.
template <int kTiles>
struct OutputsPlan {
  static constexpr int stage_bytes = (1 + kTiles) * kTileBytes;
  static constexpr int first = kTiles * kTileBytes;
  static constexpr int second = first + stage_bytes;
  static constexpr int gates = second + stage_bytes;
  static constexpr int bytes = gates + 4 * kChunk * static_cast<int>(sizeof(float));
};

template <int kTiles>
__global__ void __launch_bounds__(kGroupThreads, 3)
    outputs_kernel(const __grid_constant__ Params p, const int heads_each) {
  using Plan = OutputsPlan<kTiles>;
  using Core = TensorCore80;
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t base = ptx::shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const std::int64_t chunk = blockIdx.x, n = sequence_of_chunk(p.sequences, chunk);
  if (n < 0) return;
  const Span span = span_of(p.sequences, n);
  const ChunkPlace place(span, (chunk - span.chunk_begin) * kChunk);
  int head = static_cast<int>(blockIdx.y) * heads_each;
  const int end = head + heads_each;
  const auto load = [&](std::uint32_t to, int of) {
    load_tile(to, rows_of(p.v, place, of), thread);
    const char* state = static_cast<const char*>(p.states) + p.state_tile(blockIdx.x, of, 0, 0);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      copy_image(to + (1 + tile) * kTileBytes, state + tile * kImageBytes, thread);
    }
    ptx::copy_async_commit();
  };

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    load_tile(base + tile * kTileBytes, rows_of(p.q, place, 0, tile * kTile), thread);
    load_tile(base + Plan::second + tile * kTileBytes, rows_of(p.k, place, 0, tile * kTile), thread);
  }
  ptx::copy_async_commit();
  std::uint32_t stage = base + Plan::first;
  const auto other = [&](std::uint32_t one) { return 2 * base + Plan::first + Plan::second - one; };
  load(stage, head);
  float2 gates = load_gates(p, place, head);
  ptx::copy_async_wait<1>();
  __syncthreads();
  Accumulator scores;
  clear(scores);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    Core::product<Stored::k_inner, Stored::k_inner>(scores, base + tile * kTileBytes,
                                                    base + Plan::second + tile * kTileBytes, thread);
  }

  const int row = 16 * warp + lane / 4;  // and 8 further
  const std::uint32_t sums_of_warp = base + Plan::gates + warp * kChunk * 4;
#pragma unroll 1
  for (; head < end; ++head, stage = other(stage)) {
    const GateSums sums = sum_gates(gates, lane);
    __syncwarp();
    store_shared_float2(sums_of_warp + 8 * lane, make_float2(sums.first, sums.second));
    __syncwarp();
    if (head + 1 < end) gates = load_gates(p, place, head + 1);
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (head + 1 < end) load(other(stage), head + 1);
    const std::uint32_t values = stage, state = values + kTileBytes;
    const float upper = float_at(sums_of_warp, row), lower = float_at(sums_of_warp, row + 8);
    Accumulator o;
    clear(o);
#pragma unroll
    for (int k16 = 0; k16 < 4 * kTiles; ++k16) {
      std::uint32_t q[4];
      Core::load_a<Stored::k_inner>(q, base + k16 / 4 * kTileBytes, k16 % 4, thread);
      Core::add_step<Stored::k_outer>(o, q, state + k16 / 4 * kTileBytes, k16 % 4, thread);
    }
    scale_rows(o, ptx::exp2(upper) * p.scale, ptx::exp2(lower) * p.scale);
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      if (k16 > warp) break;  // keys behind all of the warp's queries
      std::uint32_t a[4];
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const int column = 16 * k16 + 8 * block + 2 * (lane & 3);
        const float2 there = load_shared_float2(sums_of_warp + 4 * column);
        const float* s = scores + 4 * (2 * k16 + block);
        const auto weighed = [&](float score, float query, float key, bool sees) {
          return sees ? score * ptx::exp2(query - key) * p.scale : 0.0f;
        };
        a[2 * block] = ptx::pack_bf16(weighed(s[0], upper, there.x, column <= row),
                                      weighed(s[1], upper, there.y, column + 1 <= row));
        a[2 * block + 1] = ptx::pack_bf16(weighed(s[2], lower, there.x, column <= row + 8),
                                          weighed(s[3], lower, there.y, column + 1 <= row + 8));
      }
      Core::add_step<Stored::k_outer>(o, a, values, k16, thread);
    }
    const Rows to = rows_of(p.o, place, head);
    store_pieces(o, lane, [&](int r, int piece, uint4 x) { store_row_piece(to, 16 * warp + r, piece, x); });
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys

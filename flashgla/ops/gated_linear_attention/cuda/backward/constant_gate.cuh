// dg of a constant gate by chunks: one number a head, summed over all tokens with both signs.
//
// With g the gate, dg = sum over pairs i > j of (i - j) e^{g (i - j)} scale (q_i k_j)(do_i v_j), and with the initial
// and the final state's part. By token it would come as sums of q~ x dq - k~ x dk, whose terms carry the rounding of
// q~, k~ and a to bf16: 2^-9 of the terms' root sum of squares, however small their sum is. Pairs inside a chunk are
// most of it where the gate is strong, and there the inputs are exact operands: this kernel multiplies q k^T and do v^T
// without any gate and sums their products in f32; so it does between the two chunks of a pair (backward/keys.cuh).
// What crosses a pair's bounds goes through its start state h and the gradient dh of its end (make_dq_dk_dg): token i
// of L is i + 1 steps from the start and L - 1 - i from the end, so
//     sum_i (i + 1) q~_i (h do_i) + sum_j (L - 1 - j) k~_j (dh v_j) + L sum h dh,
// decays from the pair's start and to its end in q~, k~ and the last sum.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/tile.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kPairsShared = 4 * kTileBytes;  // two stages of two tiles

// Grid: chunks x H. Writes rows [key tiles + query head of the group] of w.gate_parts.
template <class Core>
__device__ __forceinline__ void constant_gate_pairs(const Params& p, const BackwardWorkspace& w, const Strided& d_o,
                                                    char* shared) {
  __shared__ float shared_sums[32];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const std::int64_t chunk = blockIdx.x;
  const int head = blockIdx.y, kv_head = head / p.group;
  const int key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  float* part = w.gate_parts + ((key_tiles + head % p.group) * p.sequences.most_chunks + chunk) * p.heads + kv_head;
  const std::int64_t n = sequence_of_chunk(p.sequences, chunk);
  if (n < 0) {
    if (thread == 0) *part = 0.0f;
    return;
  }
  const Span span = span_of(p.sequences, n);
  const std::int64_t index = chunk - span.chunk_begin;
  const Chunk c = chunk_of(span, index);
  const float gate = key_gate(p, 0, 0, kv_head, 0);
  float sum = 0.0f;
#pragma unroll 1
  for (int back = 0; back <= index % 2; ++back) {  // keys of this chunk, of a late one also of the early one
    const Chunk keys_of = chunk_of(span, index - back);
    const auto load = [&](int step) {
      if (step < key_tiles + value_tiles) {
        const std::uint32_t stage = ptx::shared_address(shared) + step % 2 * 2 * kTileBytes;
        const bool keys = step < key_tiles;
        const int channel = (keys ? step : step - key_tiles) * kTile,
                  inside = (keys ? p.key_dim : p.value_dim) - channel;
        const Strided &a = keys ? p.q : d_o, &b = keys ? p.k : p.v;
        copy_tile(stage, row_of<__nv_bfloat16>(a, c, head) + channel, static_cast<int>(a.token), c.rows, inside,
                  thread);
        copy_tile(stage + kTileBytes, row_of<__nv_bfloat16>(b, keys_of, kv_head) + channel, static_cast<int>(b.token),
                  keys_of.rows, inside, thread);
      }
      ptx::copy_async_commit();
    };
    Accumulator scores, gradients;
    clear(scores);
    clear(gradients);
    load(0);
    const auto add = [&](Accumulator& sum, int step) {
      load(step + 1);
      ptx::copy_async_wait<1>();
      Core::publish();
      __syncthreads();
      const std::uint32_t stage = ptx::shared_address(shared) + step % 2 * 2 * kTileBytes;
      Core::begin(sum);
      Core::template product<Stored::k_inner, Stored::k_inner>(sum, stage, stage + kTileBytes, thread);
      Core::finish(sum);
      __syncthreads();
    };
    for (int step = 0; step < key_tiles; ++step) add(scores, step);
    for (int step = key_tiles; step < key_tiles + value_tiles; ++step) add(gradients, step);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int query = 16 * warp + (lane >> 2) + 8 * ((i >> 1) & 1), key = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
      const auto steps = static_cast<float>(query - key + back * kChunk);
      if (steps > 0.0f) sum += steps * ptx::exp2(gate * steps) * scores[i] * gradients[i];
    }
  }
  sum = flashgla::cuda::block_sum(sum, shared_sums);
  if (thread == 0) *part = p.scale * sum;
}

template <class Core>
__global__ void __launch_bounds__(kGroupThreads)
    constant_gate_pairs_kernel(const __grid_constant__ Params p, const __grid_constant__ BackwardWorkspace w,
                               const __grid_constant__ Strided d_o) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) constant_gate_pairs<Core>(p, w, d_o, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

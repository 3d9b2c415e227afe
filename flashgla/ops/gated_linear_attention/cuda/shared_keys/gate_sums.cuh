// Sums of a chunk's gates from its first token through each, for every head: once, for the kernels of this folder's
// forms for Hopper, whose copies bring them as they lie, [chunks, heads, kChunk] in base 2.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/parts.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

constexpr int kGateHeads = 32, kGateThreads = 256;  // of a block
constexpr int kGateBytes = kChunk * 4;              // of a head's chunk
__device__ __forceinline__ std::int64_t gate_sums_at(const Params& p, std::int64_t chunk, int head) {
  return (chunk * p.heads + head) * kChunk;
}

// A block has a chunk of some heads: gates come by tokens, a warp sums a head's.
__global__ void __launch_bounds__(kGateThreads) gate_sums_kernel(const __grid_constant__ Params p, float* sums) {
  flashgla::cuda::wait_for_previous();
  constexpr int kWarps = kGateThreads / 32, kEach = kChunk * kGateHeads / kGateThreads;
  __shared__ float gates[kGateHeads][kChunk + 1];
  const std::int64_t chunk = blockIdx.x, n = sequence_of_chunk(p.sequences, chunk);
  if (n < 0) return;
  const Span span = span_of(p.sequences, n);
  const ChunkPlace place(span, (chunk - span.chunk_begin) * kChunk);
  const int first = static_cast<int>(blockIdx.y) * kGateHeads, lane = static_cast<int>(threadIdx.x) & 31,
            warp = static_cast<int>(threadIdx.x) >> 5;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = warp + kWarps * i, head = first + lane;
    x[i] = head < p.heads && row < place.rows ? gate_at(p, place.offset(p.g, row, head)) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) gates[lane][warp + kWarps * i] = x[i];
  __syncthreads();
  for (int of = warp; of < kGateHeads && first + of < p.heads; of += kWarps) {
    const GateSums all = sum_gates(make_float2(gates[of][2 * lane], gates[of][2 * lane + 1]), lane);
    *reinterpret_cast<float2*>(sums + gate_sums_at(p, chunk, first + of) + 2 * lane) =
        make_float2(all.first, all.second);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys

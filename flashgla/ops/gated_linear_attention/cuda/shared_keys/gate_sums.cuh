// Sums of a chunk's gates from its first token through each, for every head: once, for the kernels of this folder's
// forms for Hopper, whose copies bring them as they lie, [chunks, heads, kChunk] in base 2.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/parts.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

constexpr int kGateThreads = 64;        // a head each
constexpr int kGateBytes = kChunk * 4;  // of a head's chunk
__device__ __forceinline__ std::int64_t gate_sums_at(const Params& p, std::int64_t chunk, int head) {
  return (chunk * p.heads + head) * kChunk;
}

__global__ void __launch_bounds__(kGateThreads) gate_sums_kernel(const __grid_constant__ Params p, float* sums) {
  constexpr int kAtOnce = 16;
  const std::int64_t chunk = blockIdx.x, n = sequence_of_chunk(p.sequences, chunk);
  const int head = static_cast<int>(blockIdx.y) * kGateThreads + static_cast<int>(threadIdx.x);
  if (n < 0 || head >= p.heads) return;
  const Span span = span_of(p.sequences, n);
  const ChunkPlace place(span, (chunk - span.chunk_begin) * kChunk);
  float* const to = sums + gate_sums_at(p, chunk, head);
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < kChunk; first += kAtOnce) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = load_gate(p, place, first + i, head);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = sum += x[i];
#pragma unroll
    for (int i = 0; i < kAtOnce; i += 4) {
      *reinterpret_cast<float4*>(to + first + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys

// First of the two passes that serve K up to 256 and any split of V and of time: everything of a chunk that depends on
// gates, once, chunk-parallel, whatever the gate's kind. For chunk and query head: q 2^G, the scores P (no scale), and,
// once a key-value head, k 2^(sum of later gates) and the chunk's decay 2^(sum of all). No exponent is positive
// outside the scores, and those go by the ladder (forward_gates.cuh). The pass after it (recurrence.cuh) is then
// gate-free:
//     o = scale ((q 2^G) h + P v),   h' = 2^sum h + (k 2^later)^T v.
// Operands are written as images of the shared-memory tiles, which the second pass copies as they lie.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/forward_gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// What the first pass leaves: [chunks, heads, blocks of 64 key channels] tiles, [chunks, H] tiles of P, and
// [chunks, G, 64 * blocks] floats.
struct Prepared {
  char* q;
  char* k;
  char* scores;
  float* decay;
  int blocks;  // ceil(K / 64)
};

// Eight gates of a row, base 2, zeros outside. kind key only; T is bf16 or f32.
__device__ __forceinline__ void fetch_gates(float (&g)[8], const Params& p, const Rows& r, bool in_pieces, int row,
                                            int piece) {
#pragma unroll
  for (int e = 0; e < 8; ++e) g[e] = 0.0f;
  if (row >= r.rows || piece * 8 >= r.channels) return;
  const char* at = r.data + static_cast<std::int64_t>(row) * r.stride;
  if (p.gate_dtype == DType::f32) {
    const float* x = reinterpret_cast<const float*>(at) + piece * 8;
    if (in_pieces) {
      const float4 low = *reinterpret_cast<const float4*>(x), high = *reinterpret_cast<const float4*>(x + 4);
      const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) g[e] = base_2_gate(all[e]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (piece * 8 + e < r.channels) g[e] = base_2_gate(x[e]);
      }
    }
    return;
  }
  unpack_gates(g, in_pieces ? *reinterpret_cast<const uint4*>(at + piece * 16) : gather_piece(r, row, piece * 8));
}

constexpr int kPrepareBytes = 3 * kTileBytes + 64 * 66 * 4;

template <class Core>
__device__ __forceinline__ void prepare_chunk(const Params& p, const Prepared& out, char* shared) {
  const std::uint32_t q_tile = ptx::shared_address(shared), k_tile = q_tile + kTileBytes, totals = k_tile + kTileBytes;
  float* gates = reinterpret_cast<float*>(shared + 3 * kTileBytes);  // [64][66], only for the ladder
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, piece = thread % 8;
  const int heads = p.heads * p.group;
  const std::int64_t chunk = blockIdx.x / heads;
  const int query_head = blockIdx.x % heads, head = query_head / p.group;
  const std::int64_t n = sequence_of_chunk(p.sequences, chunk);
  if (n < 0) return;
  const Span span = span_of(p.sequences, n);
  const std::int64_t first = (chunk - span.chunk_begin) * kChunk;
  const bool leads = query_head % p.group == 0;
  const bool over_keys = p.gate == GateKind::key;

  Accumulator s;
  clear(s);
#pragma unroll 1
  for (int kb = 0; kb < out.blocks; ++kb) {
    const Rows q_rows = rows_of(p.q, 2, span, first, query_head, 64 * kb, p.key_dim),
               k_rows = rows_of(p.k, 2, span, first, head, 64 * kb, p.key_dim);
    load_tile(q_tile, q_rows, aligned(q_rows), thread);
    load_tile(k_tile, k_rows, aligned(k_rows), thread);
    ptx::copy_async_commit();
    const auto fetch = [&](Gates& g) {
      if (over_keys) {
        const Rows g_rows = rows_of(p.g, p.gate_dtype == DType::f32 ? 4 : 2, span, first, head, 64 * kb, p.key_dim);
        const bool g_pieces = aligned(g_rows);
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) fetch_gates(g[i], p, g_rows, g_pieces, kRowsEach * (thread / 8) + i, piece);
      } else {
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          const int row = kRowsEach * (thread / 8) + i;
          const float gate = row < q_rows.rows ? key_gate(p, span.batch, span.begin + first + row, head, 0) : 0.0f;
#pragma unroll
          for (int e = 0; e < 8; ++e) g[i][e] = gate;
        }
      }
    };
    Gates g;
    fetch(g);
    float before[8], all[8];
    scan_gates(g, before, totals, thread);
    ptx::copy_async_wait<0>();
    __syncthreads();
    finish_scan(before, all, totals, thread);

    char* q_image = out.q + ((chunk * heads + query_head) * out.blocks + kb) * kTileBytes;
    char* k_image = out.k + ((chunk * p.heads + head) * out.blocks + kb) * kTileBytes;
    if (leads && thread < 8) {
      float* decay = out.decay + ((chunk * p.heads + head) * out.blocks + kb) * 64 + 8 * piece;
#pragma unroll
      for (int e = 0; e < 8; ++e) decay[e] = ptx::exp2(all[e]);
    }
    if (in_range(all)) {
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const std::uint32_t at = tile_piece(kRowsEach * (thread / 8) + i, piece);
        float x[8], y[8];
        unpack_8(load_shared_16(q_tile + at), x);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] *= ptx::exp2(before[e] + g[i][e]);
        const uint4 gated = pack_8(x);
        store_shared_16(q_tile + at, gated);
        *reinterpret_cast<uint4*>(q_image + at) = gated;
        unpack_8(load_shared_16(k_tile + at), x);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float sum = before[e] + g[i][e];
          y[e] = x[e] * ptx::exp2(-sum);
          x[e] *= ptx::exp2(all[e] - sum);
        }
        store_shared_16(k_tile + at, pack_8(y));
        if (leads) *reinterpret_cast<uint4*>(k_image + at) = pack_8(x);
      }
      Core::publish();
      __syncthreads();
      Core::begin();
      Core::template product<Stored::k_inner, Stored::k_inner>(s, q_tile, k_tile, thread);
      Core::finish();
    } else {
      float after[8];
      sum_later_warps(after, totals, thread);
      Gates later;
      fetch(later);
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) gates[66 * (kRowsEach * (thread / 8) + i) + 8 * piece + e] = later[i][e];
      }
      suffix_gates(later, after, thread);
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const std::uint32_t at = tile_piece(kRowsEach * (thread / 8) + i, piece);
        float x[8], y[8];
        unpack_8(load_shared_16(q_tile + at), x);
        unpack_8(load_shared_16(k_tile + at), y);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          x[e] *= ptx::exp2(before[e] + g[i][e]);
          y[e] *= ptx::exp2(later[i][e]);
        }
        *reinterpret_cast<uint4*>(q_image + at) = pack_8(x);
        if (leads) *reinterpret_cast<uint4*>(k_image + at) = pack_8(y);
      }
      __syncthreads();
      Accumulator exact;
      clear(exact);
      add_scores_by_sub_chunks(
          exact, q_tile, k_tile,
          [&](int token, int channel) { return *reinterpret_cast<const float2*>(gates + 66 * token + channel); }, warp,
          lane);
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] += exact[i];
    }
    __syncthreads();
  }
  std::uint32_t packed[16];
  select_scores(packed, s, thread);
  char* image = out.scores + (chunk * heads + query_head) * kTileBytes;
  const int row = 16 * warp + lane / 4;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    store_shared_4(q_tile + tile_piece(row + (i & 1) * 8, i / 2) + 4 * (lane % 4), packed[i]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const std::uint32_t at = tile_piece(kRowsEach * (thread / 8) + i, piece);
    *reinterpret_cast<uint4*>(image + at) = load_shared_16(q_tile + at);
  }
}

// grid: most_chunks * H, heads fastest.
template <class Core>
__global__ void __launch_bounds__(kGroupThreads, 4)
    forward_prepare_kernel(const __grid_constant__ Params p, const __grid_constant__ Prepared out) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) prepare_chunk<Core>(p, out, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

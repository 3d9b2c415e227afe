// Forward in one pass for K <= 64: a group of 128 threads walks through one (sequence, query head, slice of 64 value
// channels) with the state in registers; q, k, v, the gates and o each cross device memory once a slice. bf16, key
// gates in bf16.
//
//     q~ = q 2^G, k~ = k 2^-G;  o = scale (select(q~ k~^T) v + q~ h);  h' = 2^G_last (h + k~^T v)
//
// and where the chunk's gates are out of one anchor's range (forward_gates.cuh), with k 2^(G_last - G) instead of k~
// and the decay before the product.
//
// Shared memory is what lets four blocks, 512 sequence-heads on the card, live at once: seven tiles, 56 KiB. q and k
// have two slots each; with a key gate v and g have one, refilled as soon as they are read, else v has two. One slot
// holds h as the operand of q~ h. o leaves through the slot of q; the scan's totals lie in pieces of g already read.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/forward_gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

enum class FusedGate { none, row, key };  // row: one gate per token, scalar or constant

constexpr int kFusedTiles = 7;

// The pieces of q and k that this thread loaded times 2^at_q and 2^at_k (tokens, channels), in place.
template <class Exponents>
__device__ __forceinline__ void gate_operands(std::uint32_t q, std::uint32_t k, int thread, Exponents exponents) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const std::uint32_t at = tile_piece(kRowsEach * (thread / 8) + i, thread % 8);
    float x[8], y[8];
    unpack_8(load_shared_16(q + at), x);
    unpack_8(load_shared_16(k + at), y);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float2 factor = exponents(i, e);
      x[e] *= factor.x;
      y[e] *= factor.y;
    }
    store_shared_16(q + at, pack_8(x));
    store_shared_16(k + at, pack_8(y));
  }
}

// grid: N * H * ceil(V / 64), value slices fastest.
template <class Core, FusedGate gate>
__device__ __forceinline__ void fused(const Params& p, char* shared) {
  const std::uint32_t base = ptx::shared_address(shared);
  constexpr bool key = gate == FusedGate::key;
  int thread = threadIdx.x;
  const int slices = (p.value_dim + 63) / 64;
  const int v0 = blockIdx.x % slices * 64;
  const int heads = p.heads * p.group;
  const std::int64_t n = blockIdx.x / slices / heads;
  const int query_head = static_cast<int>(blockIdx.x / slices % heads), head = query_head / p.group;
  const int K = p.key_dim, V = p.value_dim;
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const bool leads = query_head % p.group == 0;
  const std::int64_t cell = (n * p.heads + head) * static_cast<std::int64_t>(K) * V;

  const auto slot = [&](int i) { return static_cast<std::uint32_t>(i) * kTileBytes; };
  const auto q_slot = [&](int c) { return slot(c & 1); };
  const auto k_slot = [&](int c) { return slot(2 + (c & 1)); };
  const auto v_slot = [&](int c) { return slot(key ? 4 : 4 + (c & 1)); };
  const std::uint32_t g_slot = slot(5), h_slot = slot(6);

  const auto rows = [&](const Strided& s, int c, int h, int channel, int channels) {
    return rows_of(s, 2, span, static_cast<std::int64_t>(c) * kChunk, h, channel, channels);
  };
  const auto load = [&](std::uint32_t at, const Strided& s, int c, int h, int channel, int channels) {
    if (c >= chunks) return;
    const Rows r = rows(s, c, h, channel, channels);
    load_tile(base + at, r, aligned(r), thread);
  };
  const auto row_gate = [&](std::int64_t t) {
    return t < span.length ? key_gate(p, span.batch, span.begin + t, head, 0) : 0.0f;
  };
  const auto write_states = [&](int c) {
    const std::int64_t offset = ((span.chunk_begin + c) * p.heads + head) * static_cast<std::int64_t>(K) * V + v0;
    const Rows target{static_cast<const char*>(p.states) + offset * 2, V * 2, K, V - v0};
    store_tile(target, base + h_slot, aligned(target), thread);
  };

  Accumulator h;
  read_state(h, p.h0 != nullptr ? static_cast<const float*>(p.h0) + cell : nullptr, K, V, 0, v0, thread);
  put_tile(shared + h_slot, h, thread);
  const bool keeps_states = p.states != nullptr && leads;
  __syncwarp();
  if (keeps_states && chunks > 0) write_states(0);

  load(q_slot(0), p.q, 0, query_head, 0, K);
  load(k_slot(0), p.k, 0, head, 0, K);
  if constexpr (key) {
    load(g_slot, p.g, 0, head, 0, K);
    ptx::copy_async_commit();
  }
  load(v_slot(0), p.v, 0, head, v0, V);
  ptx::copy_async_commit();
  float2 next_gates = make_float2(0.0f, 0.0f);  // row: tokens 2 lane and 2 lane + 1
  if constexpr (gate == FusedGate::row)
    next_gates = make_float2(row_gate(2 * (thread % 32)), row_gate(2 * (thread % 32) + 1));

#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    asm volatile("" : "+r"(thread));  // addresses are worked out anew in each round: registers are scarcer
    const int lane = thread % 32, warp = thread / 32;
    const std::uint32_t q = base + q_slot(c), k = base + k_slot(c), v = base + v_slot(c);
    load(q_slot(c + 1), p.q, c + 1, query_head, 0, K);
    load(k_slot(c + 1), p.k, c + 1, head, 0, K);
    if constexpr (!key) load(v_slot(c + 1), p.v, c + 1, head, v0, V);
    ptx::copy_async_commit();
    ptx::copy_async_wait<key ? 2 : 1>();

    Accumulator s;
    clear(s);
    bool one_anchor = true;
    float2 decay = make_float2(1.0f, 1.0f);
    if constexpr (key) {
      const std::uint32_t g_tile = base + g_slot;
      Gates g;
      float before[8], all[8];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i)
        unpack_gates(g[i], load_shared_16(g_tile + tile_piece(kRowsEach * (thread / 8) + i, thread % 8)));
      scan_gates(g, before, g_tile, thread);
      __syncthreads();
      finish_scan(before, all, g_tile, thread);
      one_anchor = in_range(all);
      decay = row_decays(all, thread);
      if (one_anchor) {
        gate_operands(q, k, thread, [&](int i, int e) {
          const float sum = before[e] + g[i][e];
          return make_float2(ptx::exp2(sum), ptx::exp2(-sum));
        });
      } else {
        float after[8];
        sum_later_warps(after, g_tile, thread);
        __syncthreads();
        load(g_slot, p.g, c, head, 0, K);  // the scan wrote over a part
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        __syncthreads();
        Accumulator exact;
        clear(exact);
        add_scores_by_sub_chunks(
            exact, q, k,
            [&](int token, int channel) {
              const float2 x = tile_pair(g_tile, token, channel);
              return make_float2(base_2_gate(x.x), base_2_gate(x.y));
            },
            warp, lane);
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = exact[i];
        __syncthreads();
        Gates later;
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i)
          unpack_gates(later[i], load_shared_16(g_tile + tile_piece(kRowsEach * (thread / 8) + i, thread % 8)));
        suffix_gates(later, after, thread);
        gate_operands(q, k, thread, [&](int i, int e) {
          return make_float2(ptx::exp2(before[e] + g[i][e]), ptx::exp2(later[i][e]));
        });
      }
      ptx::copy_async_wait<1>();
    }
    if constexpr (gate == FusedGate::row) {
      // Sums in double: differences of them are then good for any gates.
      const double own = next_gates.y;
      double high = static_cast<double>(next_gates.x) + own;  // up to token 2 lane + 1
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, high, step);
        if (lane >= step) high += other;
      }
      const double low = high - own, last = __shfl_sync(0xffffffffu, high, 31);
      const std::int64_t t = static_cast<std::int64_t>(c + 1) * kChunk + 2 * lane;
      next_gates = make_float2(row_gate(t), row_gate(t + 1));
      decay.x = decay.y = ptx::exp2(static_cast<float>(last));
      one_anchor = last >= -kRange;
      if (!one_anchor) {
        Core::publish();
        __syncthreads();
        Core::begin();
        Core::template product<Stored::k_inner, Stored::k_inner>(s, q, k, thread);
        Core::finish();
        const int row = 16 * warp + lane / 4;
        const double even[2] = {__shfl_sync(0xffffffffu, low, row / 2), __shfl_sync(0xffffffffu, low, row / 2 + 4)};
        const double odd[2] = {__shfl_sync(0xffffffffu, high, row / 2), __shfl_sync(0xffffffffu, high, row / 2 + 4)};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const double x[2] = {__shfl_sync(0xffffffffu, low, 4 * j + lane % 4),
                               __shfl_sync(0xffffffffu, high, 4 * j + lane % 4)};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const double sum = row & 1 ? odd[e / 2] : even[e / 2];
            s[4 * j + e] *= ptx::exp2(fminf(static_cast<float>(sum - x[e % 2]), 0.0f));
          }
        }
        __syncthreads();
      }
      float2 factors[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const int source = 8 * warp + 2 * (lane / 8) + i / 2;
        const double sum = __shfl_sync(0xffffffffu, i & 1 ? high : low, source);
        factors[i] = make_float2(ptx::exp2(static_cast<float>(sum)),
                                 ptx::exp2(static_cast<float>(one_anchor ? -sum : last - sum)));
      }
      gate_operands(q, k, thread, [&](int i, int) { return factors[i]; });
    }
    Core::publish();
    __syncthreads();  // the operands are there
    if constexpr (key) {
      load(g_slot, p.g, c + 1, head, 0, K);
      ptx::copy_async_commit();
    }

    if (one_anchor) {
      Core::begin();
      Core::template product<Stored::k_inner, Stored::k_inner>(s, q, k, thread);
      Core::finish();
    } else {
      scale_rows(h, decay.x, decay.y);
    }
    std::uint32_t scores[16];
    select_scores(scores, s, thread);
    Accumulator o;
    clear(o);
    Core::begin();
    Core::template product<Stored::k_inner, Stored::k_outer>(o, q, base + h_slot, thread);
    Core::template product<Stored::k_outer>(o, scores, v, thread);
    Core::template product<Stored::k_outer, Stored::k_outer>(h, k, v, thread);
    Core::finish();
    __syncthreads();  // the operands have been read
    if constexpr (key) {
      load(v_slot(c + 1), p.v, c + 1, head, v0, V);
      ptx::copy_async_commit();
    }
    if (one_anchor) scale_rows(h, decay.x, decay.y);
    put_tile(shared + h_slot, h, thread);
    scale_rows(o, p.scale, p.scale);
    put_tile(shared + q_slot(c), o, thread);
    __syncwarp();
    const Rows o_rows = rows(p.o, c, query_head, v0, V);
    store_tile(o_rows, q, aligned(o_rows), thread);
    if (keeps_states && c + 1 < chunks) write_states(c + 1);
  }
  if (p.ht != nullptr && leads) write_state(static_cast<float*>(p.ht) + cell, h, K, V, 0, v0, thread);
}

template <class Core, FusedGate gate>
__global__ void __launch_bounds__(kGroupThreads, 4) fused_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) fused<Core, gate>(p, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

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
    const std::uint32_t at = own_piece(thread, i);
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

__device__ __forceinline__ void scale_piece(std::uint32_t at, float factor) {
  float x[8];
  unpack_8(load_shared_16(at), x);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= factor;
  store_shared_16(at, pack_8(x));
}

// What a chunk beyond one anchor's reach takes: the scores by the ladder, left as operands in pieces of the tile of g,
// 64 bytes a thread; and q 2^G, k 2^(sum of later gates) in place. A function of its own, so that its registers are
// not the common path's.
static __device__ __noinline__ void gate_steep_chunk(std::uint32_t q, std::uint32_t k, std::uint32_t g_tile,
                                                     Rows g_rows, int thread) {
  __syncthreads();
  load_tile(g_tile, g_rows, aligned(g_rows), thread);  // the scan wrote over a part
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncthreads();
  std::uint32_t scores[16];
  {
    Accumulator s;
    clear(s);
    const auto gate = [g_tile](int token, int channel) {
      const float2 x = tile_pair(g_tile, token, channel);
      return make_float2(base_2_gate(x.x), base_2_gate(x.y));
    };
    add_scores_by_sub_chunks(s, q, k, gate, thread);
    select_scores(scores, s, thread);
  }
  Gates later, g;
  float before[8], after[8], all[8];
  read_gates(later, g_tile, thread);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e) g[i][e] = later[i][e];
  }
  __syncthreads();
  scan_gates(g, before, g_tile, thread);
  __syncthreads();
  finish_scan(g, before, all, g_tile, thread);
  sum_later_warps(after, g_tile, thread);
  suffix_gates(later, after, thread);
  gate_operands(q, k, thread, [&](int i, int e) { return make_float2(ptx::exp2(g[i][e]), ptx::exp2(later[i][e])); });
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 16; ++i) store_shared_4(g_tile + 64 * thread + 4 * i, scores[i]);
}

// threadIdx.x as the compiler does not know it: addresses that depend on it are worked out anew instead of being kept,
// for registers are scarcer than instructions here.
__device__ __forceinline__ int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// grid: N * H * ceil(V / 64), value slices fastest.
template <class Core, FusedGate gate>
__device__ __forceinline__ void fused(const Params& p, char* shared) {
  const std::uint32_t base = ptx::shared_address(shared);
  constexpr bool key = gate == FusedGate::key;
  const int first_thread = threadIdx.x;
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
  const auto load = [&](std::uint32_t at, const Strided& s, int c, int h, int channel, int channels, int thread) {
    if (c >= chunks) return;
    const Rows r = rows(s, c, h, channel, channels);
    load_tile(base + at, r, aligned(r), thread);
  };
  const auto row_gate = [&](std::int64_t t) {
    return t < span.length ? key_gate(p, span.batch, span.begin + t, head, 0) : 0.0f;
  };
  const auto write_states = [&](int c, int thread) {
    const std::int64_t offset = ((span.chunk_begin + c) * p.heads + head) * static_cast<std::int64_t>(K) * V + v0;
    const Rows target{static_cast<const char*>(p.states) + offset * 2, V * 2, K, V - v0};
    store_tile(target, base + h_slot, aligned(target), thread);
  };

  Accumulator h;
  read_state(h, p.h0 != nullptr ? static_cast<const float*>(p.h0) + cell : nullptr, K, V, 0, v0, first_thread);
  put_tile(shared + h_slot, h, first_thread);
  const bool keeps_states = p.states != nullptr && leads;
  __syncwarp();
  if (keeps_states && chunks > 0) write_states(0, first_thread);

  load(q_slot(0), p.q, 0, query_head, 0, K, first_thread);
  load(k_slot(0), p.k, 0, head, 0, K, first_thread);
  if constexpr (key) {
    load(g_slot, p.g, 0, head, 0, K, first_thread);
    ptx::copy_async_commit();
  }
  load(v_slot(0), p.v, 0, head, v0, V, first_thread);
  ptx::copy_async_commit();
  float2 next_gates = make_float2(0.0f, 0.0f);  // row: tokens 2 lane and 2 lane + 1
  if constexpr (gate == FusedGate::row)
    next_gates = make_float2(row_gate(2 * (first_thread % 32)), row_gate(2 * (first_thread % 32) + 1));

#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int thread = fresh_thread();
    const int lane = thread % 32, warp = thread / 32;
    const std::uint32_t q = base + q_slot(c), k = base + k_slot(c), v = base + v_slot(c);
    load(q_slot(c + 1), p.q, c + 1, query_head, 0, K, thread);
    load(k_slot(c + 1), p.k, c + 1, head, 0, K, thread);
    if constexpr (!key) load(v_slot(c + 1), p.v, c + 1, head, v0, V, thread);
    ptx::copy_async_commit();
    ptx::copy_async_wait<key ? 2 : 1>();

    std::uint32_t scores[16] = {};
    bool one_anchor = true;
    float2 decay = make_float2(1.0f, 1.0f);  // of the state's rows, over the chunk
    if constexpr (key) {
      const std::uint32_t g_tile = base + g_slot;
      Gates g;
      {
        float before[8], all[8];
        read_gates(g, g_tile, thread);
        scan_gates(g, before, g_tile, thread);
        __syncthreads();
        finish_scan(g, before, all, g_tile, thread);
        one_anchor = in_range(all);
        decay = row_decays(all, thread);
      }
      if (one_anchor) {
        gate_operands(q, k, thread, [&](int i, int e) { return make_float2(ptx::exp2(g[i][e]), ptx::exp2(-g[i][e])); });
      } else {
        gate_steep_chunk(q, k, g_tile, rows(p.g, c, head, 0, K), thread);
#pragma unroll
        for (int i = 0; i < 16; ++i) scores[i] = load_shared_4(g_tile + 64 * thread + 4 * i);
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
      decay.x = decay.y = ptx::exp2(static_cast<float>(last));
      one_anchor = last >= -kRange;
      if (one_anchor) {
        // In range, floats will do.
        const float x = static_cast<float>(low), y = static_cast<float>(high);
        float2 factors[kRowsEach];
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          const float sum = __shfl_sync(0xffffffffu, i & 1 ? y : x, 8 * warp + 2 * (lane / 8) + i / 2);
          factors[i] = make_float2(ptx::exp2(sum), ptx::exp2(-sum));
        }
        gate_operands(q, k, thread, [&](int i, int) { return factors[i]; });
      } else {
        // Pair by pair from the sums in double, whatever their size.
        const auto row_sum = [&](int lane_with) {
          const double x = __shfl_sync(0xffffffffu, low, lane_with), y = __shfl_sync(0xffffffffu, high, lane_with);
          return lane & 4 ? y : x;
        };
        const double sums[2] = {row_sum(8 * warp + lane / 8), row_sum(8 * warp + lane / 8 + 4)};
        Core::publish();
        __syncthreads();
        Accumulator s;
        clear(s);
        Core::begin();
        Core::template product<Stored::k_inner, Stored::k_inner>(s, q, k, thread);
        Core::finish();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const double x[2] = {__shfl_sync(0xffffffffu, low, 4 * j + lane % 4),
                               __shfl_sync(0xffffffffu, high, 4 * j + lane % 4)};
#pragma unroll
          for (int e = 0; e < 4; ++e)
            s[4 * j + e] *= ptx::exp2(fminf(static_cast<float>(sums[e / 2] - x[e % 2]), 0.0f));
        }
        select_scores(scores, s, thread);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          const double sum = __shfl_sync(0xffffffffu, i & 1 ? high : low, 8 * warp + 2 * (lane / 8) + i / 2);
          scale_piece(q + own_piece(thread, i), ptx::exp2(static_cast<float>(sum)));
          scale_piece(k + own_piece(thread, i), ptx::exp2(static_cast<float>(last - sum)));
        }
      }
    }
    Core::publish();
    __syncthreads();  // the operands are there
    if constexpr (key) {
      load(g_slot, p.g, c + 1, head, 0, K, thread);
      ptx::copy_async_commit();
    }

    if (one_anchor) {
      Accumulator s;
      clear(s);
      Core::begin();
      Core::template product<Stored::k_inner, Stored::k_inner>(s, q, k, thread);
      Core::finish();
      select_scores(scores, s, thread);
    } else {
      scale_rows(h, decay.x, decay.y);
    }
    Accumulator o;
    clear(o);
    Core::begin();
    Core::template product<Stored::k_inner, Stored::k_outer>(o, q, base + h_slot, thread);
    Core::template product<Stored::k_outer>(o, scores, v, thread);
    Core::template product<Stored::k_outer, Stored::k_outer>(h, k, v, thread);
    Core::finish();
    __syncthreads();  // the operands have been read
    const int mover = fresh_thread();
    if constexpr (gate == FusedGate::row) {
      const std::int64_t t = static_cast<std::int64_t>(c + 1) * kChunk + 2 * (mover % 32);
      next_gates = make_float2(row_gate(t), row_gate(t + 1));
    }
    if constexpr (key) {
      load(v_slot(c + 1), p.v, c + 1, head, v0, V, mover);
      ptx::copy_async_commit();
    }
    if (one_anchor) scale_rows(h, decay.x, decay.y);
    put_tile(shared + h_slot, h, mover);
    scale_rows(o, p.scale, p.scale);
    put_tile(shared + q_slot(c), o, mover);
    __syncwarp();
    const Rows o_rows = rows(p.o, c, query_head, v0, V);
    store_tile(o_rows, q, aligned(o_rows), mover);
    if (keeps_states && c + 1 < chunks) write_states(c + 1, mover);
  }
  if (p.ht != nullptr && leads)
    write_state(static_cast<float*>(p.ht) + cell, h, K, V, 0, v0, static_cast<int>(threadIdx.x));
}

template <class Core, FusedGate gate>
__global__ void __launch_bounds__(kGroupThreads, 4) fused_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) fused<Core, gate>(p, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

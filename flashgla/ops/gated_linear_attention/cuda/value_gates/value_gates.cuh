// Gates over values, alone or beside gates over keys: chunk by chunk, both sides alike. Design: value_gates/README.md.
//
// For a chunk with start state h and end-state gradient dh, and for either side (keys: q, k, g, with do, v, gv as the
// other; values: do, v, gv, with q, k, g as the other), b the running sum of the side's base-2 gates and b_C its last:
//     up_i = x_i 2^b_i of what queries (q, do), later_j = y_j 2^(b_C - b_j) of what is asked (k, v); never amplified
//     s_ij = the other side's pairs with their gates (q.k: P, do.v: A), i >= j, else 0
//     d query_i = 2^b_i ((other up)_i h) + sum_j 2^(b_i - b_j) s_ij y_j            (keys: dq; values: o)
//     d key_j   = 2^(b_C - b_j) ((other later)_j dh) + sum_i 2^(b_i - b_j) s_ij x_i   (keys: dk; values: dv)
//     h after the chunk = 2^(b_C + B_C) h + later_k^T later_v,   dh before it = 2^(b_C + B_C) dh + up_q^T up_do
//     d gate_t  = sum_{i>=t} (x_i d query_i - y_i d key_i) + sum over the other channels of h dh at the chunk's end
// all times the scale, where dh stands for the gradient over the scale.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/exact.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kDumpRow = kTile + 8;  // floats of a row: no bank conflicts for accumulator writes and row reads

struct SideShared {  // offsets; the epilogue overlays the stages, and its first operands come while the last one is
                     // read
  static constexpr int stages = 8 * kTileBytes;
  static constexpr int q = 0, k = kTileBytes, a = 2 * kTileBytes, raw_gates = 3 * kTileBytes, dump = raw_gates;
  static constexpr int gates = dump + kTile * kDumpRow * 4;
  static constexpr int small = stages;
  // Quarters, inner sums, suffix sums, through; the chunk's decays of own channels; decays of two stages.
  static constexpr int total = small + 4 * sizeof(ColumnParts) + 3 * kTile * 4;
  static_assert(small >= gates + kTile * kTile * 4);
};

// A group of 128 threads walks a chunk by columns: warp w takes tokens 16w..16w+15, lane l of it channels 2l and 2l+1.

// Base-2 log gates of a token, two channels, from 64 rows of f32.
__device__ __forceinline__ float2 gate_at(const char* gates, int row, int lane) {
  const float2 g = *reinterpret_cast<const float2*>(gates + row * 256 + lane * 8);
  return make_float2(ptx::larger_or_nan(g.x * kLog2E, kStrongest), ptx::larger_or_nan(g.y * kLog2E, kStrongest));
}

// Sums of the four quarters of the chunk. Barrier before use.
__device__ __forceinline__ void sum_quarters(ColumnParts& parts, const char* gates, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 g = gate_at(gates, 16 * warp + i, lane);
    sum.x += g.x;
    sum.y += g.y;
  }
  *reinterpret_cast<float2*>(&parts[warp][2 * lane]) = sum;
}
// b before the warp's first token; with warp 4, of the whole chunk.
__device__ __forceinline__ float2 sum_before(const ColumnParts& parts, int warp, int lane) {
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 part = *reinterpret_cast<const float2*>(&parts[w][2 * lane]);
    if (w < warp) {
      sum.x += part.x;
      sum.y += part.y;
    }
  }
  return sum;
}

__device__ __forceinline__ void put_rows(float* dump, const Accumulator& a, int thread) {
  const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float* at = dump + row * kDumpRow + 8 * j + 2 * (lane & 3);
    *reinterpret_cast<float2*>(at) = make_float2(a[4 * j], a[4 * j + 1]);
    *reinterpret_cast<float2*>(at + 8 * kDumpRow) = make_float2(a[4 * j + 2], a[4 * j + 3]);
  }
}

// A row of the gates of a chunk, f32 rows of 64.
__device__ __forceinline__ void put_gates(float* row, const float (&g)[8]) {
  reinterpret_cast<float4*>(row)[0] = make_float4(g[0], g[1], g[2], g[3]);
  reinterpret_cast<float4*>(row)[1] = make_float4(g[4], g[5], g[6], g[7]);
}

// A steep tile, as a call: what dq and dk, 32 floats a thread, have from beyond the chunk gets its factors (dk's only
// when `first`), and the pairs inside come to it one by one. q, k: as loaded, which the call waits for; a:
// [query][key], zero above the diagonal; gates: as put_gates leaves them, which become what they multiply by; rows:
// room for a tile of floats. dq and dk stay in memory: a call saves what registers it takes beyond those that are free.
static __device__ __noinline__ void finish_steep(float* dq, float* dk, std::uint32_t q, std::uint32_t k,
                                                 std::uint32_t a, float* rows, float* gates, bool first, int thread) {
  float decays[kRowsEach][8];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      decays[i][e] = ptx::exp2(base_2_gate(gates[(kRowsEach * (thread / 8) + i) * kTile + 8 * (thread % 8) + e]));
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  put_floats(gates, decays, thread);
  by_rows(reinterpret_cast<Accumulator&>(*dq), rows, thread, [&] { finish_exact_dq<1>(rows, a, k, gates); });
  by_rows(reinterpret_cast<Accumulator&>(*dk), rows, thread, [&] {
    if (first) scale_exact_dk(rows, gates);
    add_exact_dk_pairs<1>(rows, a, q, gates);
  });
}

// Rows of a result by a warp, from `row` on: two channels a lane.
template <class T>
struct PairWalk {
  T* place;
  int stride, rows;  // of the warp that exist; none where nothing is wanted or the lane's channels are beyond
  __device__ __forceinline__ PairWalk(const Strided& x, const Chunk& c, int head, int channel, int channels, int row)
      : place(row_of<T>(x, c, head) + channel),
        stride(anew(static_cast<int>(x.token))),
        rows(x.data == nullptr || channel >= channels ? 0 : c.rows - row) {
    place += row * stride;
  }
  __device__ __forceinline__ void store(int i, float2 x) const {
    if (i < rows) store_two(place + i * stride, x);
  }
};

// d gate of a chunk's tokens. parts: quarters, inner sums, suffix sums, through. d_gate: the terms of the warp's 16
// rows, sum: theirs, total: of the chunk's gates; all of channels 2 lane and the next.
template <bool kOverValues>
__device__ __forceinline__ void put_gate_gradient(const Params& p, const Strided& dg, const Chunk& c, int kv_head,
                                                  int channel, ColumnParts* parts, const float2 (&d_gate)[16],
                                                  float2 sum, float2 total, bool steep) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  // Sums from the chunk's end back; those of accumulators lack 2^-b_C.
  *reinterpret_cast<float2*>(&parts[2][warp][2 * lane]) = sum;
  __syncthreads();
  const float2 fold =
      steep ? make_float2(p.scale, p.scale) : make_float2(p.scale * ptx::exp2(-total.x), p.scale * ptx::exp2(-total.y));
  const float2 all = make_float2(p.scale * ptx::exp2(total.x), p.scale * ptx::exp2(total.y));
  float2 run = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 3; w >= 0; --w) {
    const float2 x = *reinterpret_cast<const float2*>(&parts[1][w][2 * lane]);
    run.x += p.scale * x.x;
    run.y += p.scale * x.y;
    if (kOverValues || w == 0) {
      const float2 y = *reinterpret_cast<const float2*>(&parts[3][w][2 * lane]);
      run.x += all.x * y.x;
      run.y += all.y * y.y;
    }
    if (w > warp) {
      const float2 z = *reinterpret_cast<const float2*>(&parts[2][w][2 * lane]);
      run.x += fold.x * z.x;
      run.y += fold.y * z.y;
    }
  }
  const auto finish = [&](const auto& walk) {
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      run.x += fold.x * d_gate[i].x;
      run.y += fold.y * d_gate[i].y;
      walk.store(i, run);
    }
  };
  if (p.gate_dtype == DType::f32) {
    finish(PairWalk<float>(dg, c, kv_head, channel + 2 * lane, p.key_dim, 16 * warp));
  } else {
    finish(PairWalk<__nv_bfloat16>(dg, c, kv_head, channel + 2 * lane, p.key_dim, 16 * warp));
  }
}

// p: the side, queries, keys and gates as given (gates without data: none). work: d query, d key and d gate as dq, dk
// and dg; images of up and later as q and k, and s as the other side's scores. Grid: chunks x G x own tiles, innermost
// last, so that what neighbours share is in the cache.
template <class Core, bool kOverValues>
__device__ void make_side(const Params& p, const SplitGradients& work, char* shared) {
  using Layout = SideShared;
  constexpr Loads kLoads = Loads::in_turn;
  constexpr Stored kState = kOverValues ? Stored::k_outer : Stored::k_inner;
  constexpr int kStages = 2, kStageBytes = Layout::stages / kStages;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int own_tiles = tiles_of(p.key_dim), other_tiles = tiles_of(p.value_dim);
  const int own_tile = static_cast<int>(blockIdx.x % own_tiles), channel = own_tile * kTile;
  // Tiles are counted in 31 bits: of 8 KiB each there is no memory for more.
  const int kv_at = static_cast<int>(blockIdx.x / own_tiles);  // chunk and key-value head
  const int kv_head = kv_at % p.heads;
  const Chunk c = locate(p.sequences, kv_at / p.heads);
  if (c.rows == 0) return;
  char *q = shared + Layout::q, *k = shared + Layout::k, *a = shared + Layout::a, *gates = shared + Layout::gates;
  float* dump = reinterpret_cast<float*>(shared + Layout::dump);
  ColumnParts* parts = reinterpret_cast<ColumnParts*>(shared + Layout::small);
  ColumnParts &quarters = parts[0], &inner = parts[1], &crossing = parts[3];
  float *factors = reinterpret_cast<float*>(parts + 4), *weights = factors + kTile;

  const auto image = [](const char* images, int tile) {
    return images + static_cast<std::int64_t>(anew(tile)) * kTileBytes;
  };
  const auto state_tile = [&](const char* images, int other) {
    const int key = kOverValues ? other : own_tile, value = kOverValues ? own_tile : other;
    return image(
        images,
        (kv_at * (kOverValues ? other_tiles : own_tiles) + key) * (kOverValues ? own_tiles : other_tiles) + value);
  };
  int head = kv_head * p.group;
  int query_at = kv_at * p.group;  // chunk and query head
  bool first = true;
  const bool gated = p.g.data != nullptr, narrow_gates = gated && p.gate_dtype != DType::f32;
  // Of the chunk; with mma.sync its addresses are worked out where they are used.
  const auto here = [&] { return again<Core>(c, [&] { return Chunk{anew(c.batch), anew(c.token), c.rows}; }); };
  // The tiles, in slots such that the one after the last is slot 0, and what the epilogue begins with.
  const auto slot_of = [&](int tile) { return (tile + kStages - other_tiles % kStages) % kStages; };
  auto load = [&](int tile) {
    if (tile < other_tiles) {
      const int slot = slot_of(tile);
      const std::uint32_t stage = ptx::shared_address(shared) + slot * kStageBytes;
      copy_image(stage, image(work.other.q, query_at * other_tiles + tile), thread);
      copy_image(stage + kTileBytes, state_tile(work.states, tile), thread);
      if (first) {
        const int at = kv_at * other_tiles + tile;
        copy_image(stage + 2 * kTileBytes, image(work.other.k, at), thread);
        copy_image(stage + 3 * kTileBytes, state_tile(work.state_gradients, tile), thread);
        if (thread < 16) {
          ptx::copy_async_16(ptx::shared_address(weights + slot * kTile + 4 * thread),
                             work.other.decay + static_cast<std::int64_t>(at) * kTile + 4 * thread);
        }
      }
    }
    if (tile == other_tiles) {
      copy_image(ptx::shared_address(q), image(work.own.q, query_at * own_tiles + own_tile), thread);
      copy_image(ptx::shared_address(k), image(work.own.k, kv_at * own_tiles + own_tile), thread);
      copy_image(ptx::shared_address(a), image(work.other.scores, query_at), thread);
      if (narrow_gates) {
        const Rows rows = rows_of(p.g, 2, here(), kv_head, channel, p.key_dim);
        load_tile(ptx::shared_address(shared + Layout::raw_gates), rows, thread);
      }
    }
    ptx::copy_async_commit();
  };

  Accumulator d_key;
  clear(d_key);
  float2 d_gate[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) d_gate[i] = make_float2(0.0f, 0.0f);
  // Sum over the other channels of h dh with their decays: of rows 4 (thread / 8) + i, or columns 8 (thread % 8) + i.
  float through[kOverValues ? 8 : 4] = {};
  bool steep = false;

  // Rows of d query or d key, which lie in `dump`, with their factors; and their part of d gate, from the side's tile.
  float2 sum = make_float2(0.0f, 0.0f);
  const auto leave = [&](auto of_keys, const char* tile, const PairWalk<__nv_bfloat16>& out) {
    constexpr bool kKeys = decltype(of_keys)::value;
    float2 b = sum_before(quarters, warp, lane);
    const float2 total = sum_before(quarters, 4, lane);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = 16 * warp + i;
      const float2 g = gate_at(gates, r, lane);
      b.x += g.x;
      b.y += g.y;
      const float2 x = *reinterpret_cast<const float2*>(dump + r * kDumpRow + 2 * lane);
      const float2 y = ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(tile + element_offset(r, 2 * lane)));
      d_gate[i].x += kKeys ? -y.x * x.x : y.x * x.x;
      d_gate[i].y += kKeys ? -y.y * x.y : y.y * x.y;
      if constexpr (kKeys) {
        sum.x += d_gate[i].x;
        sum.y += d_gate[i].y;
      }
      const float2 exponent = kKeys ? make_float2(-b.x, -b.y) : make_float2(b.x - total.x, b.y - total.y);
      const float2 factor = steep ? make_float2(p.scale, p.scale)
                                  : make_float2(p.scale * ptx::exp2(exponent.x), p.scale * ptx::exp2(exponent.y));
      out.store(i, make_float2(x.x * factor.x, x.y * factor.y));
    }
  };

  for (int h = 0; h < p.group; ++h, ++head, ++query_at) {
    first = h == 0;
    Accumulator d_query;
    clear(d_query);
    load(0);
    for (int tile = 0; tile < other_tiles; ++tile) {
      ptx::copy_async_wait<0>();
      Core::publish();
      __syncthreads();
      load(tile + 1);
      const int slot = slot_of(tile);
      const std::uint32_t stage = ptx::shared_address(shared) + slot * kStageBytes;
      if (first) {
        Core::begin(d_query, d_key);
        Core::template product<Stored::k_inner, kState, false, kLoads>(d_query, stage, stage + kTileBytes, thread);
        Core::template product<Stored::k_inner, kState, false, kLoads>(d_key, stage + 2 * kTileBytes,
                                                                       stage + 3 * kTileBytes, thread);
        Core::commit();
        const float* weight = weights + slot * kTile + (kOverValues ? kRowsEach * (thread / 8) : 8 * (thread % 8));
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          const std::uint32_t piece = own_piece(thread, i);
          float x[8], y[8];
          unpack_8(load_shared_16(stage + kTileBytes + piece), x);
          unpack_8(load_shared_16(stage + 3 * kTileBytes + piece), y);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            float& sum = through[kOverValues ? e : i];
            sum = fmaf(x[e] * y[e], weight[kOverValues ? i : e], sum);
          }
        }
        Core::finish(d_query, d_key);
      } else {
        Core::begin(d_query);
        Core::template product<Stored::k_inner, kState, false, kLoads>(d_query, stage, stage + kTileBytes, thread);
        Core::finish(d_query);
      }
    }
    ptx::copy_async_wait<0>();
    __syncthreads();

    // The pairs inside the chunk.
    // Its gates, natural logarithms, zeros outside.
    float* row = reinterpret_cast<float*>(gates) + kRowsEach * (thread / 8) * kTile + 8 * (thread % 8);
    if (narrow_gates) {  // from a tile that this thread's loads have filled
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        float g[8];
        unpack_8(load_shared_16(ptx::shared_address(shared + Layout::raw_gates) + own_piece(thread, i)), g);
        put_gates(row + i * kTile, g);
      }
    } else {
      Place<float> from(p.g, here(), kv_head, channel, p.key_dim);
      if (!gated) from.rows = 0;
      Loaded<float> loaded;
      cuda::load(loaded, from, thread);
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        float g[8];
        elements_of(g, loaded, i);
        put_gates(row + i * kTile, g);
      }
    }
    Core::publish();
    __syncthreads();
    sum_quarters(quarters, gates, thread);
    if (first) {
      sum_beyond(inner, k, d_key, thread);
      if constexpr (kOverValues) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          through[e] += __shfl_xor_sync(0xffffffffu, through[e], 8);
          through[e] += __shfl_xor_sync(0xffffffffu, through[e], 16);
          if (lane < 8) crossing[warp][8 * lane + e] = through[e];
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
          for (int distance = 1; distance < 8; distance *= 2)
            through[i] += __shfl_xor_sync(0xffffffffu, through[i], distance);
          if (lane % 8 == 0) crossing[0][kRowsEach * (thread / 8) + i] = through[i];
        }
      }
    }
    __syncthreads();
    float fall = 0.0f;
    if (thread < kTile) {
      fall = quarters[0][thread] + quarters[1][thread] + quarters[2][thread] + quarters[3][thread];
      factors[thread] = ptx::exp2(fall);
    }
    steep = __syncthreads_or(fall < -kSteep);
    if (!steep) {
      // With the chunk's end as anchor: accumulators without 2^(b_i - b_C), without 2^-b_j.
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float factor = factors[column_of_element(thread, i)];
        d_query[i] *= factor;
        if (first) d_key[i] *= factor;
      }
      Core::begin(d_query, d_key);
      Core::template product<Stored::k_inner, Stored::k_outer, false, kLoads>(d_query, ptx::shared_address(a),
                                                                              ptx::shared_address(k), thread);
      Core::template product<Stored::k_outer, Stored::k_outer, false, kLoads>(d_key, ptx::shared_address(a),
                                                                              ptx::shared_address(q), thread);
      Core::finish(d_query, d_key);
    } else {
      const auto raw = [&](char* tile, const Strided& from, int of) {
        const Rows rows = rows_of(from, 2, here(), of, channel, p.key_dim);
        load_tile(ptx::shared_address(tile), rows, thread);
      };
      raw(q, p.q, head);
      raw(k, p.k, kv_head);
      ptx::copy_async_commit();
      Aside queries(d_query), keys(d_key);
      const Aside gate_parts(d_gate);
      finish_steep(queries.kept, keys.kept, ptx::shared_address(q), ptx::shared_address(k), ptx::shared_address(a),
                   dump, reinterpret_cast<float*>(gates), first, thread);
      keys.restore(d_key);
      gate_parts.restore(d_gate);
      queries.restore(d_query);
    }

    put_rows(dump, d_query, thread);
    __syncthreads();
    leave(std::false_type(), q, PairWalk<__nv_bfloat16>(work.dq, c, head, channel + 2 * lane, p.key_dim, 16 * warp));
    __syncthreads();
  }

  put_rows(dump, d_key, thread);
  __syncthreads();
  leave(std::true_type(), k, PairWalk<__nv_bfloat16>(work.dk, c, kv_head, channel + 2 * lane, p.key_dim, 16 * warp));
  if (work.dg.data == nullptr) return;

  put_gate_gradient<kOverValues>(p, work.dg, c, kv_head, channel, parts, d_gate, sum, sum_before(quarters, 4, lane),
                                 steep);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

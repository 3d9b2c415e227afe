// Gradients of one chunk, head after head, on Hopper: what gradients.cuh does on mma.sync, by groups of 128 threads
// with a role each. Between heads dq and dk stay in the products' registers, for d_o and v come to them decayed.
//     group 0   ds = (v d_o^T) L;   dq += (scale e^(G_i) d_o_i) h^T;   a_i = scale e^(G_i) d_o_i . (q h)_i
//     group 1   dk += (e^(G_C - G_j) v_j) dh^T;   dv_j = e^(G_C - G_j) (k dh)_j + sum_i P_ij d_o_i;   b_j = v_j . the
//               first of dv's terms
//     group 2   a warp brings v, d_o, h and dh of the heads ahead and sums gates; three: <h, dh>, and one of them dg
// README.md has the equations.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/gate_sums.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/ring.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

// What groups tell each other of one head.
struct alignas(16) HeadSums {
  float gates[kChunk];    // sums
  float queries[kChunk];  // a_i
  float keys[kChunk];     // b_j
  float rows[4][kChunk];  // sums over a warp's 16 keys of scores times their gradients, for each query
  float columns[kChunk];  // sums over queries, for each key
  float states[3];        // parts of <h, dh>
  __device__ __forceinline__ float total() const { return gates[kChunk - 1]; }  // of all gates
};

template <int kTiles>
struct GradientsByRole {
  static constexpr int groups = 3, threads = groups * kGroupThreads, stages = 3;
  // Of a head sums are read when its stage may be another's already: by the warp that makes dg, which is through with a
  // head before it leaves the second one behind it.
  static constexpr int sum_stages = stages + 2, emptying = 2 * kGroupThreads / 32 + 3;
  // Of a thread: what the compiler has for each, and what the queries' group has of the helpers'.
  static constexpr int registers = 168, query_registers = 240, helping_registers = 96;
  static_assert(registers + query_registers + helping_registers <= groups * registers);
  // Shared memory. q and k; scores as each working group's threads have them; stages of v, d_o, h and dh.
  static constexpr int q = 0, k = kTiles * kTileBytes, scores = 2 * kTiles * kTileBytes;
  static constexpr int first_stage = scores + kChunk * kChunk * 4;
  static constexpr int v = 0, d_o = kTileBytes, h = 2 * kTileBytes, dh = h + kTiles * kTileBytes;
  static constexpr int stage = dh + kTiles * kTileBytes;
  static constexpr int sums = first_stage + stages * stage;
  static constexpr int barriers = sums + sum_stages * static_cast<int>(sizeof(HeadSums));
  static constexpr int total = barriers + 2 * stages * 8;
  static_assert(total <= 227 * 1024);
};
static_assert(kImageBytes == kTileBytes);  // TMA brings a state's tiles at once

// dg of tokens 2 lane and the next: what reaches from before a token to it or beyond. By one warp.
__device__ __forceinline__ float2 gate_gradients(const HeadSums& s, int lane) {
  const auto pair = [lane](const float(&x)[kChunk]) { return *reinterpret_cast<const float2*>(x + 2 * lane); };
  const float2 queries = pair(s.queries), keys = pair(s.keys), columns = pair(s.columns);
  float behind[2] = {queries.x - columns.x, queries.y - columns.y}, states = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 rows = pair(s.rows[i]);
    behind[0] += rows.x;
    behind[1] += rows.y;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) states += s.states[i];
  states *= ptx::exp2(s.total());
  const float later = sum_of_lanes_behind(behind[0] + behind[1], lane) + behind[1];
  const float earlier = sum_of_lanes_before(keys.x + keys.y, lane);
  return make_float2(states + (later + behind[0]) + earlier, states + later + (earlier + keys.x));
}

// Pairs of bf16, of rows lane / 4 and that plus 8 as an operand has them, times a factor a row.
__device__ __forceinline__ void scale_operand(std::uint32_t (&to)[16], const std::uint32_t (&x)[16], float upper,
                                              float lower) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = ptx::unpack_bf16(x[i]);
    const float factor = i & 1 ? lower : upper;
    to[i] = ptx::pack_bf16(pair.x * factor, pair.y * factor);
  }
}

struct GradientsMaps {
  RowMap q, k, v, d_o;
};

template <class CoreIn, int kTiles>
struct GradientsView {
  using Core = CoreIn;
  using Layout = GradientsByRole<kTiles>;
  const Params& p;
  const ChunkGradients& d;
  const GradientsMaps& maps;
  const float* gate_sums;
  std::int64_t chunk;
  ChunkPlace place;
  int begin, heads;  // the block's first head, and how many it has
  char* memory;
  std::uint32_t base;
  Ring<Core, Layout::stages> ring;

  __device__ __forceinline__ std::uint32_t stage(int i) const {
    return base + Layout::first_stage + i % Layout::stages * Layout::stage;
  }
  __device__ __forceinline__ int place_of_sums(int i) const {
    return Layout::sums + i % Layout::sum_stages * static_cast<int>(sizeof(HeadSums));
  }
  __device__ __forceinline__ HeadSums& sums(int i) const {
    return *reinterpret_cast<HeadSums*>(memory + place_of_sums(i));
  }
};

// f32 parts of dq or dk, as accumulators have them.
template <int kTiles, class View>
__device__ __forceinline__ void store_parts(const View& view, float* to, const Accumulator (&x)[kTiles], int thread) {
  const int row = row_of_element(thread, 0);
  const std::int64_t token = view.place.batch * view.p.sequences.length + view.place.token + row;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    if (row + 8 * lower >= view.place.rows) continue;
    float* const at = to + (blockIdx.y * view.d.tokens + token + 8 * lower) * view.p.key_dim + 2 * (thread & 3);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int e = 4 * j + 2 * lower;
        *reinterpret_cast<float2*>(at + kTile * tile + 8 * j) = make_float2(x[tile][e], x[tile][e + 1]);
      }
    }
  }
}

// Both working groups. In the scores' place: scores as accumulators have them, transposed (rows keys, columns queries);
// behind all heads, a tile of their gradients.
__device__ __forceinline__ void sync_workers() { ptx::barrier(4, 2 * kGroupThreads); }
template <class View>
__device__ __forceinline__ std::uint32_t scores_place(const View& view) {
  return view.base + View::Layout::scores;
}
template <class View>
__device__ __forceinline__ std::uint32_t own_scores(const View& view, int thread, int j) {
  return scores_place(view) + 16 * (thread + kGroupThreads * j);
}

// What a head's pairs of a thread share: their decays, and the scores times these, of columns 8 j + 2 (lane % 4) and
// the next of the thread's two rows. A query sees its key and what is before it.
struct DecayedPairs {
  float reach[4], scores[4];
  bool diagonal;
  int ahead[4];  // of its key the query is
};
template <class View>
__device__ __forceinline__ DecayedPairs decayed_pairs(const View& view, const HeadSums& sums, float upper, float lower,
                                                      int j, int thread) {
  const int warp = thread >> 5, row = row_of_element(thread, 0), column = 8 * j + 2 * (thread & 3);
  const float2 there = *reinterpret_cast<const float2*>(sums.gates + column);
  const uint4 bits = load_shared_16(own_scores(view, thread, j));
  const float scores[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                           __uint_as_float(bits.w)};
  DecayedPairs pairs;
  pairs.diagonal = j <= 2 * warp + 1;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    pairs.ahead[e] = column + (e & 1) - (row + 8 * (e >> 1));
    const float reach = ptx::exp2((e & 1 ? there.y : there.x) - (e & 2 ? lower : upper));
    pairs.reach[e] = pairs.diagonal && pairs.ahead[e] < 0 ? 0.0f : reach;
    pairs.scores[e] = scores[e] * pairs.reach[e];
  }
  return pairs;
}

// From v d_o^T: d_scores gains its part of this head, but for the scale; and what pairs give to dg.
template <class View>
__device__ __forceinline__ void add_score_gradients(const View& view, HeadSums& sums, const Accumulator& made,
                                                    float (&d_scores)[32], int thread) {
  const int lane = thread & 31, warp = thread >> 5, row = row_of_element(thread, 0);
  const float upper = sums.gates[row], lower = sums.gates[row + 8];
  float of_queries[16];  // over the warp's keys, of queries 8 j + 2 (lane % 4) and the next
  float2 of_keys = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    of_queries[2 * j] = of_queries[2 * j + 1] = 0.0f;
    if (j < 2 * warp) continue;  // queries before all of the warp's keys
    const DecayedPairs pairs = decayed_pairs(view, sums, upper, lower, j, thread);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      d_scores[4 * j + e] = fmaf(made[4 * j + e], pairs.reach[e], d_scores[4 * j + e]);
      const float common = pairs.diagonal && pairs.ahead[e] <= 0 ? 0.0f : pairs.scores[e] * made[4 * j + e];
      (e & 2 ? of_keys.y : of_keys.x) += common;
      of_queries[2 * j + (e & 1)] += common;
    }
  }
  const float2 rows = sum_over_lanes(of_queries, lane);
  *reinterpret_cast<float2*>(sums.rows[warp] + 2 * lane) = rows;
  const float2 columns = sum_of_quad(of_keys);
  if ((lane & 3) == 0) {
    sums.columns[row] = columns.x;
    sums.columns[row + 8] = columns.y;
  }
}

template <int kTiles, class View>
__device__ __forceinline__ void queries_group(const View& view) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const int thread = static_cast<int>(threadIdx.x) & (kGroupThreads - 1), lane = thread & 31;
  const int row = row_of_element(thread, 0);
  const std::uint32_t q = view.base + Layout::q, k = view.base + Layout::k;
  Accumulator dq[kTiles], d_scores;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) clear(dq[tile]);
  clear(d_scores);
  sync_workers();  // scores are there
#pragma unroll 1
  for (int i = 0; i < view.heads; ++i) {
    view.ring.wait_full(i);
    HeadSums& sums = view.sums(i);
    const std::uint32_t stage = view.stage(i), h = stage + Layout::h;
    const float upper = ptx::exp2(sums.gates[row]) * view.p.scale,
                lower = ptx::exp2(sums.gates[row + 8]) * view.p.scale;
    std::uint32_t d_o[16], decayed[16];
    load_operand<Stored::k_inner>(d_o, stage + Layout::d_o, thread);
    scale_operand(decayed, d_o, upper, lower);
    Accumulator made, o;
    Core::begin(made, o, decayed, dq[0], dq[kTiles - 1]);
    Core::template product<Stored::k_inner, Stored::k_inner, true>(made, stage + Layout::v, stage + Layout::d_o,
                                                                   thread);
    Core::commit();
    product_over_keys<Core, kTiles, Stored::k_outer>(o, q, h, thread);
    Core::commit();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      Core::template product<Stored::k_inner>(dq[tile], decayed, h + tile * kTileBytes, thread);
    }
    Core::commit();
    Core::template wait<2>(made);
    add_score_gradients(view, sums, made, d_scores, thread);
    Core::template wait<1>(o);
    const float2 common = sum_of_quad(dot_rows(o, two_of_operand(d_o)));
    if ((lane & 3) == 0) {
      sums.queries[row] = common.x * upper;
      sums.queries[row + 8] = common.y * lower;
    }
    Core::template wait<0>(decayed, dq[0], dq[kTiles - 1]);
    view.ring.leave(i, lane);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) d_scores[i] *= view.p.scale;
  sync_workers();  // scores have been read
  put_rounded<Core>(scores_place(view), d_scores, thread);
  Core::publish();
  sync_workers();
  Core::begin(dq[0], dq[kTiles - 1]);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    Core::template product<Stored::k_outer, Stored::k_outer>(dq[tile], scores_place(view), k + tile * kTileBytes,
                                                             thread);
  }
  Core::finish(dq[0], dq[kTiles - 1]);
  store_parts<kTiles>(view, view.d.dq, dq, thread);
}

template <int kTiles, class View>
__device__ __forceinline__ void keys_group(const View& view) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const int thread = static_cast<int>(threadIdx.x) & (kGroupThreads - 1), lane = thread & 31, warp = thread >> 5;
  const int row = row_of_element(thread, 0);
  const std::uint32_t q = view.base + Layout::q, k = view.base + Layout::k;
  Accumulator dk[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) clear(dk[tile]);
  view.ring.wait_full(0);  // q and k come with the first head
  {
    Accumulator scores;
    Core::begin(scores);
    product_over_keys<Core, kTiles, Stored::k_inner>(scores, k, q, thread);
    Core::finish(scores);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const auto word = [&](int e) { return __float_as_uint(scores[4 * j + e] * view.p.scale); };
      store_shared_16(own_scores(view, thread, j), make_uint4(word(0), word(1), word(2), word(3)));
    }
  }
  sync_workers();
#pragma unroll 1
  for (int i = 0; i < view.heads; ++i) {
    view.ring.wait_full(i);
    HeadSums& sums = view.sums(i);
    const std::uint32_t stage = view.stage(i), v = stage + Layout::v, dh = stage + Layout::dh;
    const float gates[2] = {sums.gates[row], sums.gates[row + 8]};
    const float upper = ptx::exp2(sums.total() - gates[0]), lower = ptx::exp2(sums.total() - gates[1]);
    Accumulator dv;
    std::uint32_t decayed[16], weights[16];
    {
      std::uint32_t plain[16];
      load_operand<Stored::k_inner>(plain, v, thread);
      scale_operand(decayed, plain, upper, lower);
    }
    Core::begin(dv, decayed, dk[0], dk[kTiles - 1]);
    product_over_keys<Core, kTiles, Stored::k_outer>(dv, k, dh, thread);
    Core::commit();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      Core::template product<Stored::k_inner>(dk[tile], decayed, dh + tile * kTileBytes, thread);
    }
    Core::commit();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      weights[2 * j] = weights[2 * j + 1] = 0u;
      if (j < 2 * warp) continue;  // queries before all of the warp's keys
      const DecayedPairs pairs = decayed_pairs(view, sums, gates[0], gates[1], j, thread);
      weights[2 * j] = ptx::pack_bf16(pairs.scores[0], pairs.scores[1]);
      weights[2 * j + 1] = ptx::pack_bf16(pairs.scores[2], pairs.scores[3]);
    }
    Core::template wait<1>(dv);
    scale_rows(dv, upper, lower);
    {
      std::uint32_t plain[16];
      load_operand<Stored::k_inner>(plain, v, thread);
      const float2 common = sum_of_quad(dot_rows(dv, two_of_operand(plain)));
      if ((lane & 3) == 0) {
        sums.keys[row] = common.x;
        sums.keys[row + 8] = common.y;
      }
    }
    Core::begin(dv, weights);
    Core::template product<Stored::k_outer>(dv, weights, stage + Layout::d_o, thread);
    Core::finish(dv, weights, decayed, dk[0], dk[kTiles - 1]);
    view.ring.leave(i, lane);
    if (view.d.dv.data == nullptr) continue;
    const Rows to = rows_of(view.d.dv, view.place, view.begin + i);
    store_pieces(dv, lane, [&](int r, int piece, uint4 words) { store_row_piece(to, 16 * warp + r, piece, words); });
  }
  sync_workers();
  sync_workers();
  Core::begin(dk[0], dk[kTiles - 1]);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    Core::template product<Stored::k_inner, Stored::k_outer>(dk[tile], scores_place(view), q + tile * kTileBytes,
                                                             thread);
  }
  Core::finish(dk[0], dk[kTiles - 1]);
  store_parts<kTiles>(view, view.d.dk, dk, thread);
}

// Heads are brought as far ahead as there are stages.
template <int kTiles, class View>
__device__ __forceinline__ void gradients_producer(const View& view, int lane) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr int kBytes = kTiles * kTileBytes;
  const Params& p = view.p;
#pragma unroll 1
  for (int i = 0; i < view.heads; ++i) {
    if (i >= Layout::stages) view.ring.wait_empty(i - Layout::stages);
    const int head = view.begin + i;
    const std::uint32_t stage = view.stage(i);
    const std::int64_t state = p.state_tile(view.chunk, head, 0, 0);
    const Producer<Core> producer(p, view.place, view.ring.full(i), lane);
    producer.expect(i == 0 ? 2 + 2 * kTiles : 2, 2 * kBytes + kGateBytes);
    if (i == 0) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        producer.copy(view.base + Layout::k + tile * kTileBytes, p.k, view.maps.k, 0, tile * kTile);
        producer.copy(view.base + Layout::q + tile * kTileBytes, p.q, view.maps.q, 0, tile * kTile);
      }
    }
    producer.copy(stage + Layout::v, p.v, view.maps.v, head);
    producer.copy(stage + Layout::d_o, view.d.d_o, view.maps.d_o, head);
    producer.copy_image(stage + Layout::dh, view.d.state_gradients + state, kBytes);
    producer.copy_image(stage + Layout::h, static_cast<const char*>(p.states) + state, kBytes);
    producer.copy_image(view.base + view.place_of_sums(i) + static_cast<int>(offsetof(HeadSums, gates)),
                        view.gate_sums + gate_sums_at(p, view.chunk, head), kGateBytes);
    producer.finish();
  }
}

// Part `part` of <h, dh> of each head; the first warp of the three makes dg of the head before.
template <int kTiles, class View>
__device__ __forceinline__ void states_warp(const View& view, int part, int lane) {
  using Layout = typename View::Layout;
  const auto make_dg = [&](int i) {
    if (part != 0 || view.d.dg.data == nullptr) return;
    view.ring.wait_empty(i);
    const float2 dg = gate_gradients(view.sums(i), lane);
    const std::int64_t at = view.place.offset(view.d.dg, 2 * lane, view.begin + i);
    if (2 * lane < view.place.rows) store_as(view.p.gate_dtype, view.d.dg.data, at, dg.x);
    if (2 * lane + 1 < view.place.rows) store_as(view.p.gate_dtype, view.d.dg.data, at + view.d.dg.token, dg.y);
  };
#pragma unroll 1
  for (int i = 0; i < view.heads; ++i) {
    view.ring.wait_full(i);
    const std::uint32_t h = view.stage(i) + Layout::h, dh = view.stage(i) + Layout::dh;
    float common = 0.0f;
#pragma unroll 2
    for (int at = 16 * (32 * part + lane); at < kTiles * kTileBytes; at += 16 * 32 * 3) {
      float x[8], y[8];
      unpack_8(load_shared_16(h + at), x);
      unpack_8(load_shared_16(dh + at), y);
#pragma unroll
      for (int e = 0; e < 8; ++e) common = fmaf(x[e], y[e], common);
    }
    common = flashgla::cuda::warp_sum(common);
    if (lane == 0) view.sums(i).states[part] = common;
    view.ring.leave(i, lane);
    if (i > 0) make_dg(i - 1);
  }
  make_dg(view.heads - 1);
}

template <class Core, int kTiles>
__global__ void __launch_bounds__(GradientsByRole<kTiles>::threads, 1)
    gradients_by_role_kernel(const __grid_constant__ Params p, const __grid_constant__ ChunkGradients d,
                             const __grid_constant__ GradientsMaps maps, const float* gate_sums, const int heads_each) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char memory[];
  if constexpr (Core::available) {
    using Layout = GradientsByRole<kTiles>;
    const std::int64_t chunk = blockIdx.x, n = sequence_of_chunk(p.sequences, chunk);
    if (n < 0) return;
    const Span span = span_of(p.sequences, n);
    const ChunkPlace place(span, (chunk - span.chunk_begin) * kChunk);
    const int begin = static_cast<int>(blockIdx.y) * heads_each;
    const std::uint32_t base = ptx::shared_address(memory);
    const Ring<Core, Layout::stages> ring{base + Layout::barriers};
    const GradientsView<Core, kTiles> view{p, d, maps, gate_sums, chunk, place, begin, heads_each, memory, base, ring};
    if (threadIdx.x == 0) view.ring.init(Layout::emptying);
    __syncthreads();
    const int group = own_group();
    if (group == 0) {
      Core::template take<Layout::query_registers>();
      queries_group<kTiles>(view);
    } else if (group == 1) {
      keys_group<kTiles>(view);
    } else {
      Core::template give<Layout::helping_registers>();
      const int warp = __shfl_sync(kWarp, static_cast<int>(threadIdx.x) / 32, 0) % 4;
      const int lane = static_cast<int>(threadIdx.x) & 31;
      warp == 0 ? gradients_producer<kTiles>(view, lane) : states_warp<kTiles>(view, warp - 1, lane);
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys

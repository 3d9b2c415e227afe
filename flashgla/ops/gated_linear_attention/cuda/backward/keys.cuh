// dq, dk and dg of two chunks, for one tile of 64 key channels, pair by pair in parallel. Design, bytes and FLOPs:
// backward/README.md.
//
// Chunks go in pairs, an early one and a late one: h is the state before the pair, dh the gradient of the state after
// it, and what passes between the two is a product of its own, so that states move once for 128 tokens. For each chunk
// b is the running sum of its gates, B the whole sum, q~ = scale q 2^b, k~ = k 2^(B - b) (forward/prepare.cuh), a_ij =
// do_i . v_j where i sees j, else 0; a prime marks the other chunk of the pair:
//     from beyond the chunk   x_i = h do_i (early)               x_i = 2^B' h do_i + sum_j' a_ij' k~'_j' (late)
//                             y_j = 2^B' dh v_j + sum_i' a_i'j q~'_i' (early)                y_j = dh v_j (late)
//     dq_i = scale 2^(b_i - B) (2^B x_i + sum_j a_ij k~_j)       dk_j = 2^-b_j (2^B y_j + sum_i a_ij q~_i)
//     dg_t = sum_{i>=t} (q_i dq_i - k_i dk_i) + r
//     r = sum_V 2^(B + B') h dh + sum_j k~_j y_j + 2^B sum_i' q~'_i' (h do_i') (early), 2^B sum_j' k~'_j' (dh v_j')
//     (late)
// r is what dg has from beyond the chunk: no sum runs over the whole sequence. q_i dq_i and k_i dk_i are taken as 2^-B
// times q~ and k~ with what stands in brackets: both hold the same rounded products, so that what must cancel does so
// to f32 accuracy. Tiles of channels that fall by more than kSteep go by blocks (tiles/ladder.cuh).
//
// Of a block's two groups of 128 threads one has the early chunk, one the late. They mirror each other in time: what q,
// do, h and dq are to the late one, k, v, dh and dk are to the early one, so that both run one code, and each holds
// what crosses between the chunks with its own tokens as rows. h do and dh v of either are also what the other's r
// wants. Where there is TMA, blocks stay: they walk over pairs, and tiles of values run ahead of the products
// by a few stages, through the epilogue into the next pair.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/keys_gradients.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// The products over tiles of values, one after the other, from the stage on whose turn it is.
template <class View>
__device__ __forceinline__ void multiply_values(const View& view, unsigned unit, bool first, Turn& turn,
                                                Accumulator& across, Accumulator& within, Accumulator& pairs,
                                                Accumulator& between, float& through) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const PairPlace& at = view.place_of(unit);
  // Late: do times v', h and v, which lie side by side; v times dh. Early: v times do', dh and do; do times h.
  if constexpr (!View::kBulk) view.load_values(at, 0);
  Core::begin(across, within, pairs, between);
#pragma unroll 1
  for (int tile = 0; tile * kTile < view.p.value_dim; ++tile) {
    if constexpr (View::kBulk) {
      Core::wait_at(view.base + Layout::full + 8 * turn.slot, turn.parity);
    } else {
      ptx::copy_async_wait<0>();
      View::meet();
      if ((tile + 1) * kTile < view.p.value_dim) view.load_values(view.place_of(unit), tile + 1);
    }
    const int at_stage = (View::kBulk ? turn.slot : tile % Layout::stages) * Layout::stage;
    const std::uint32_t stage = view.base + at_stage;
    Core::begin();
    Core::products_side_by_side(stage + (view.late ? Layout::d_o_late : Layout::v_early),
                                stage + (view.late ? Layout::v_early : Layout::d_o_late), fresh_thread(), between,
                                across, pairs);
    Core::template product<View::k_inner, View::k_inner>(within,
                                                         stage + (view.late ? Layout::v_late : Layout::d_o_early),
                                                         stage + (view.late ? Layout::dh : Layout::h), fresh_thread());
    Core::commit();
    if (View::kGated && !view.late && first) {
      through += dot_of_rows(view.shared + at_stage + Layout::h, view.shared + at_stage + Layout::dh, fresh_thread());
    }
    if (View::kBulk && View::kTileOfGates && (first || View::kGate == GatesAs::f32) &&
        (tile + 1) * kTile >= view.p.value_dim) {
      ptx::copy_async_wait<0>();
      view.turn_gates(at);
    }
    Core::template wait<0>(across, within, pairs, between);
    if constexpr (View::kBulk) {
      Core::arrive(view.base + Layout::empty + 8 * turn.slot);  // at once: copies are what the products wait for
      turn.step(view.depth());
    }
  }
}

// Tokens beyond the chunks' may be another sequence's. Where products go on right into across and within, these are not
// changed in a branch, nor after it: the compiler would make every wgmma wait.
template <class View>
__device__ __forceinline__ void clear_beyond(const View& view, const PairPlace& at, int rows, Accumulator& across,
                                             Accumulator& within, Accumulator& pairs, Accumulator& between,
                                             int thread) {
  const bool late = view.late;
  const auto clear_rows_beyond = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const bool inside = row_of_element(thread, i) < rows;
      across[i] = inside ? across[i] : 0.0f;
      within[i] = inside ? within[i] : 0.0f;
    }
  };
  if constexpr (!View::kGated) clear_rows_beyond();
  if (View::alike(at.rows_late < kTile)) {
    if constexpr (View::kGated) clear_rows_beyond();
    const int columns_of_pairs = late ? kTile : at.rows_early, columns_between = late ? kTile : at.rows_late;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int of_column = column_of_element(thread, i);
      const bool inside = row_of_element(thread, i) < rows;
      pairs[i] = inside && of_column < columns_of_pairs ? pairs[i] : 0.0f;
      between[i] = inside && of_column < columns_between ? between[i] : 0.0f;
    }
  }
}

// This thread's part of dg of a constant gate: what crosses each token, by how many of them it has crossed.
template <class View>
__device__ __forceinline__ float crossing_by_steps(const View& view, const PairPlace& at, int rows, int across_tile,
                                                   int within_tile, const Accumulator& across,
                                                   const Accumulator& within, int thread) {
  const bool late = view.late;
  const auto steps_of_query = [&](int r) { return static_cast<float>(r + 1 + (late ? kChunk : 0)); };
  const auto steps_of_key = [&](int r) { return static_cast<float>(rows - 1 - r + (late ? 0 : at.rows_late)); };
  float crossing = weighted_dot(view.shared + across_tile, across, thread,
                                [&](int r) { return late ? steps_of_query(r) : steps_of_key(r); });
  crossing += weighted_dot(view.shared + within_tile, within, thread,
                           [&](int r) { return late ? steps_of_key(r) : steps_of_query(r); });
  return crossing;
}

__device__ __forceinline__ void scale_columns(Accumulator& a, const float* factors, int thread, bool wanted = true) {
  scale_columns(a, [&](int j) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * (thread & 3));
    return wanted ? factor : make_float2(1.0f, 1.0f);
  });
}

// The pairs within the chunk and between the two, to what is from beyond: across and within as they stand in brackets
// above. Beside them the running sums of gates, where these are a tile of bf16.
template <class View>
__device__ __forceinline__ void multiply_pairs(const View& view, Accumulator& across, Accumulator& within,
                                               Accumulator& b, std::uint32_t (&crossed)[16], std::uint32_t crossed_tile,
                                               int across_tile, int within_tile, const float* decays,
                                               ColumnParts& by_keys, int thread) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr Stored k_inner = View::k_inner, k_outer = View::k_outer;
  const std::uint32_t base = view.base, own_a = view.own_tile(Layout::a), own_gates = view.own_tile(Layout::gates);
  if constexpr (View::kGated) {
    Accumulator inside_across, inside_within;
    if constexpr (View::kGate == GatesAs::bf16) {
      std::uint32_t triangle[16];
      triangle_of_ones<Triangle::lower>(triangle, thread);
      Core::begin(across, crossed, triangle);
      Core::template product<k_outer, true>(b, triangle, own_gates, thread);
      Core::template product<k_outer>(across, crossed, crossed_tile, thread);
      Core::template product<k_inner, k_outer, true>(inside_across, own_a, base + within_tile, thread);
      Core::template product<k_outer, k_outer, true>(inside_within, own_a, base + across_tile, thread);
      Core::finish(across, inside_across, inside_within, b);
    } else {
      Core::begin(across, crossed);
      Core::template product<k_outer>(across, crossed, crossed_tile, thread);
      Core::template product<k_inner, k_outer, true>(inside_across, own_a, base + within_tile, thread);
      Core::template product<k_outer, k_outer, true>(inside_within, own_a, base + across_tile, thread);
      Core::finish(across, inside_across, inside_within);
    }
    if (!view.late) sum_beyond(by_keys, view.shared + across_tile, across, thread);
    scale_columns(across, decays, thread);
    scale_columns(within, decays, thread);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      across[i] += inside_across[i];
      within[i] += inside_within[i];
    }
  } else {
    Core::begin(across, within, crossed);
    Core::template product<k_outer>(across, crossed, crossed_tile, thread);
    Core::template product<k_inner, k_outer>(across, own_a, base + within_tile, thread);
    Core::template product<k_outer, k_outer>(within, own_a, base + across_tile, thread);
    Core::finish(across, within);
  }
}

// What is left of a pair when its tiles of values have been multiplied: dq, dk and dg. steep: the group's tile falls by
// more than kSteep.
template <class View, bool kGrouped>
struct PairEnd {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  static constexpr Stored k_outer = View::k_outer, k_inner = View::k_inner;
  static constexpr GatesAs kGate = View::kGate;
  static constexpr bool kBulk = View::kBulk, kGated = View::kGated;
  const View& view;
  const Params& p = view.p;
  const BackwardWorkspace& w = view.w;
  char* const shared = view.shared;
  const std::uint32_t base = view.base;
  const bool late = view.late;
  const int part = view.part();
  const PairPlace& at;
  const int thread = fresh_thread(), warp = thread >> 5, lane = thread & 31, rows = late ? at.rows_late : at.rows_early,
            channel = at.key_tile * kTile, query_head = at.kv_head * p.group + at.in_group;
  const bool first = !kGrouped || View::alike(at.in_group == 0), both = View::alike(at.rows_late > 0),
             last = !kGrouped || View::alike(at.in_group + 1 == p.group);
  const std::uint32_t own_k = view.own_tile(Layout::k), own_a = view.own_tile(Layout::a),
                      own_gates = view.own_tile(Layout::gates);
  // Tiles that across and within are multiplied by for dg, of which the other one's pairs are made: q~ and k~.
  const int across_tile = view.own(late ? Layout::q : Layout::k), within_tile = view.own(late ? Layout::k : Layout::q);
  const float* const decays = view.floats(Layout::decays) + part * kTile;
  const float* const other_decays = view.floats(Layout::decays) + (1 - part) * kTile;
  float *const beyond = view.floats(Layout::beyond), *const run = view.floats(Layout::run) + part * kTile,
               *const row_sums = view.floats(Layout::row_sums) + part * kTile,
               *const crossings = view.floats(Layout::crossings) + part * 4;
  ColumnParts& by_keys = view.parts(part);
  // Of its columns: what the exponents of dq's and dk's factors begin with; 2^-B, with the sign of q dq - k dk in
  // terms of across and within.
  float *const starts = view.floats(Layout::columns) + part * 3 * kTile, *const signs = starts + 2 * kTile;

  __device__ __forceinline__ PairEnd(const View& of, unsigned unit) : view(of), at(of.place_of(unit)) {}

  // The tile that `crossed` is multiplied by: the other chunk's k~ or q~. Of an early chunk that is alone a, which
  // stays where it is: q~ may be written over meanwhile (finish_steep).
  __device__ __forceinline__ std::uint32_t crossed_tile() const {
    return base + Layout::epilogue + (late == both ? 0 : 1) * Layout::group +
           (late   ? Layout::k
            : both ? Layout::q
                   : Layout::a);
  }
  // crossed: what crosses between the chunks, an operand; a, inside the chunk, to its tile. b: running sums of gates of
  // f32.
  __device__ __forceinline__ void begin(bool steep, Accumulator& across, Accumulator& within, const Accumulator& pairs,
                                        const Accumulator& between, float through, std::uint32_t (&crossed)[16],
                                        Accumulator& b) const {
    if (kGated && thread < kTile) {
      const float decay = decays[thread], inverse = steep ? 1.0f : __fdividef(1.0f, decay);
      starts[thread] = __log2f(fabsf(p.scale)) - (steep ? 0.0f : __log2f(decay));
      starts[thread + kTile] = 0.0f;
      signs[thread] = late ? inverse : -inverse;
    }
    std::uint32_t operand[16];
    // By a branch with a third of the instructions, for which these have no registers.
    if constexpr (kGate == GatesAs::f32 || !kBulk) {
      select_pairs(operand, pairs, !late, thread);
    } else if (late) {
      select_pairs<false>(operand, pairs, thread);
    } else {
      select_pairs<true>(operand, pairs, thread);
    }
    if constexpr (kGate == GatesAs::f32) sum_wide_gates(view, b, again<Core>(thread, fresh_thread));
    put_operand<Core>(own_a, operand, thread);
    // Nothing crosses into a chunk that is alone: none times tiles that are there.
    to_operand(crossed, between);
#pragma unroll
    for (int i = 0; i < 16; ++i) crossed[i] = both ? crossed[i] : 0;
    if constexpr (kGated) {
      if (both) sum_beyond(view.parts(3 - part), shared + across_tile, across, thread);
      // Not in the branch: it changes an accumulator, after which the compiler would make every wgmma wait.
      scale_columns(across, other_decays, thread, both);
    }
    float crossing = 0.0f;  // constant gates: this thread's part of dg, see backward/constant_gate.cuh
    if constexpr (kGate == GatesAs::tokens) {
      if (p.gate == GateKind::constant) {
        crossing = crossing_by_steps(view, at, rows, across_tile, within_tile, across, within, thread);
      }
    }
    if (kGated && !late && first) {
      through += __shfl_xor_sync(0xffffffffu, through, 1);
      if ((thread & 1) == 0) {
        const float sum = through * decays[thread >> 1] * (both ? other_decays[thread >> 1] : 1.0f);
        beyond[thread >> 1] = sum;
        crossing += static_cast<float>(at.rows_early + at.rows_late) * sum;
      }
    }
    if constexpr (kGate == GatesAs::tokens) {
      crossing = flashgla::cuda::warp_sum(crossing);
      if (lane == 0) crossings[warp] = first ? crossing : crossings[warp] + crossing;
    }
    if (kGated && late && first) sum_beyond(by_keys, shared + within_tile, within, thread);
    Core::publish();
    View::meet_group();
  }
  __device__ __forceinline__ void finish_near(Accumulator& across, Accumulator& within, Accumulator& b,
                                              std::uint32_t (&crossed)[16]) const {
    multiply_pairs(view, across, within, b, crossed, crossed_tile(), across_tile, within_tile, decays, by_keys, thread);
    View::meet();
    if constexpr (kGate == GatesAs::tokens) clear(b);  // found later: not what is left of a steep tile's
  }
  // e: q dq - k dk, of the early chunk k dk - q dq.
  template <template <class, int> class Kept>
  __device__ __forceinline__ void finish_steep(Accumulator& across, Accumulator& within, Accumulator& b,
                                               std::uint32_t (&crossed)[16], Kept<float, 32>& e) const {
    if constexpr (kGated) {
      if (late) {  // what the other group does not read
        load_again<false>(view, at, thread);
      } else {
        load_again<true>(view, at, thread);
      }
      Core::begin(across, crossed);
      Core::template product<k_outer>(across, crossed, crossed_tile(), thread);
      Core::finish(across);
      finish_steep_pair<kGrouped && kBulk>(view, at, rows, across, within, b, e, thread);
    }
  }
  // Adds q dq - k dk, of the early chunk k dk - q dq, of a tile in one anchor's reach.
  __device__ __forceinline__ void add_near(Accumulator& e, const Accumulator& across, const Accumulator& within) const {
    const auto add = [&](int tile, const Accumulator& a, float sign) {
      std::uint32_t of_tile[16];
      load_operand<k_inner>(of_tile, base + tile, thread);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 t = ptx::unpack_bf16(of_tile[i]);
        e[2 * i] += sign * t.x * a[2 * i];
        e[2 * i + 1] += sign * t.y * a[2 * i + 1];
      }
    };
    if (late || last) add(across_tile, across, 1.0f);
    if (!late || last) add(within_tile, within, -1.0f);
  }
  // What dg is made of e from: tiles, where a and q~ were, or of one gate a token sums over the thread's rows.
  __device__ __forceinline__ void put_e(Accumulator& e, float2& rows_of_e) const {
    if constexpr (kGate == GatesAs::tokens) {
      float sums[2] = {};
#pragma unroll
      for (int i = 0; i < 32; ++i) sums[(i >> 1) & 1] += e[i] * signs[column_of_element(thread, i)];
      rows_of_e = sum_of_quad(make_float2(sums[0], sums[1]));
    } else {
      const std::uint32_t tiles[3] = {own_a, view.own_tile(Layout::q), own_gates};
      put_parts<Core, kPartsOfE<kGate>>(tiles, e, thread);
    }
  }
  // Of several query heads: dk of those done, and e of all.
  __device__ __forceinline__ void join_heads(bool steep, Accumulator& across, Accumulator& within,
                                             const Local<float, 32>& steep_e, float2& rows_of_e,
                                             Aside<float, 32>& dk_so_far, Aside<float, 32>& dg_so_far) const {
    if (!first) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        across[i] += late ? 0.0f : dk_so_far.kept[i];
        within[i] += late ? dk_so_far.kept[i] : 0.0f;
      }
    }
    if (!last) {
      if (late) {
        dk_so_far.put(within);
      } else {
        dk_so_far.put(across);
      }
    }
    if constexpr (kGated) {
      Accumulator e;
      if (first) {
        clear(e);
      } else {
        dg_so_far.restore(e);
      }
      if (steep) {  // of this query head's dk, not of all of them
#pragma unroll
        for (int i = 0; i < 32; ++i) e[i] += steep_e.x[i];
      } else {
        add_near(e, across, within);
      }
      if (last) {
        put_e(e, rows_of_e);
      } else {
        dg_so_far.put(e);
      }
    }
  }
  // From across and within as they stand in brackets above, but for powers of b, and e as put_e has left it.
  __device__ __forceinline__ void leave(bool steep, Accumulator& across, Accumulator& within, Accumulator& b,
                                        float2 rows_of_e) const {
    if constexpr (kGate == GatesAs::tokens) sum_token_gates(view, b, row_sums, steep, thread);

    if constexpr (kGated) {  // r
      if (thread < kTile && (!late || first)) {
        const int own_part = again<Core>(part, fresh_group);
        float* own_run = view.floats(Layout::run) + own_part * kTile;
        float sum = first ? beyond[thread] : own_run[thread], by_pairs = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum += view.parts(own_part)[i][thread];
          if (both) by_pairs += view.parts(2 + own_part)[i][thread];
        }
        own_run[thread] = sum + view.floats(Layout::decays)[own_part * kTile + thread] * by_pairs;
      }
    }
    if (kGated && p.scale < 0.0f) {  // what follows takes its logarithm
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        across[i] = late ? -across[i] : across[i];
        within[i] = late ? within[i] : -within[i];
      }
    }
    const auto find_starts = [&] { return view.floats(Layout::columns) + fresh_group() * 3 * kTile; };
    const PairGradients<View> gradients{.view = view,
                                        .at = at,
                                        .b = b,
                                        .starts = again<Core>(starts, find_starts),
                                        .own_k = own_k,
                                        .own_gates = own_gates,
                                        .channel = channel,
                                        .query_head = query_head,
                                        .thread = thread,
                                        .steep = steep,
                                        .of_dq = steep ? 1.0f : p.scale,
                                        .of_dk = w.prepared.plain ? p.scale : 1.0f};
    if (!last) {
      if (late) {
        gradients.store_gradient(true, across);
      } else {
        gradients.store_gradient(true, within);
      }
    } else if constexpr (kGate == GatesAs::none) {
      gradients.store_gradient(late, across);
      gradients.store_gradient(!late, within);
    } else if constexpr (kGate == GatesAs::tokens) {
      gradients.store_gradient(late, across);
      gradients.store_gradient(!late, within);
      if (p.gate == GateKind::constant) {
        if (thread == 0 && rows > 0) {
          w.gate_parts[(at.key_tile * p.sequences.most_chunks + at.chunk + part) * p.heads + at.kv_head] =
              crossings[0] + crossings[1] + crossings[2] + crossings[3];
        }
      } else {
        store_token_gates(view, at, rows, rows_of_e, run, row_sums, thread);
      }
    } else {
      gradients.store_with_gates(across, within, signs, run);
    }
    Core::publish();  // TMA writes next where threads have written
    if constexpr (kBulk) Core::arrive(base + Layout::inputs_empty);
  }
};

// Grid: blocks that walk over pairs x G x key tiles, innermost last, so that what neighbours share is in the cache.
// `items` of them. kGrouped: several query heads a key-value head.
template <class Core, GatesAs kGate, bool kGrouped>
__device__ __forceinline__ void make_dq_dk_dg(const Params& p, const BackwardWorkspace& w, const Gradients& d,
                                              const RowMaps& maps, unsigned items, char* shared) {
  using Layout = PairShared<Core>;
  constexpr bool kBulk = Layout::in_bulk, kGated = kGate != GatesAs::none;
  // The way of steep tiles lies behind the loop, and goes back to its end, since code that is jumped over is waited for
  // where it is in no cache. Not with several query heads, for which registers are too few.
  constexpr bool kApart = kBulk && kGated && !kGrouped;
  using View = PairView<Core, kGate>;
  const View view{p, w, d, maps, items, shared, ptx::shared_address(shared), own_group() == 1};
  const std::uint32_t base = view.base;
  const bool late = view.late;
  const std::uint32_t inputs_full = base + Layout::inputs_full, places_full = base + Layout::places_full;
  view.clear_missing_gates();
  if constexpr (kBulk) {
    if (threadIdx.x == 0) view.init_barriers();
    __syncthreads();
    if (threadIdx.x >= kPairThreads) {
      Core::template give<Layout::producer_registers>();
      return view.produce();
    }
    Core::template take<Layout::consumer_registers>();
    flashgla::cuda::wait_for_previous();
  } else {
    if (threadIdx.x == 0) view.place_of(0) = view.find_first();
    __syncthreads();
  }

  // The gradient that has pairs across the chunks too, dq of the late one and dk of the early one, and the one with
  // those within the chunk alone. The late group holds pairs as [query][key], the early one as [key][query].
  Accumulator across, within, pairs, between;
  float through;  // early: sum over values of h dh, half of key channel thread / 2
  Turn turn;
  Aside<float, 32> dk_so_far, dg_so_far;  // of the query heads done
  std::uint32_t crossed[16];
  Accumulator b;
  float2 rows_of_e = make_float2(0.0f, 0.0f);
  Local<float, 32> steep_e;
  const auto step = [&](unsigned& unit) {  // whether there is more
    const PairPlace& at = view.place_of(unit);
    unit = at.unit + 1;  // no register through the epilogue
    if constexpr (!kBulk) {
      if (unit == static_cast<unsigned>(p.group)) return false;  // a block has one pair
      __syncthreads();
      if (threadIdx.x == 0) find_next(view.place_of(unit), at, p, items);
      __syncthreads();
    }
    return true;
  };
  unsigned unit = 0;
  bool done_steeply = false;
#pragma unroll 1
  for (;;) {
    if constexpr (kApart) unit = __shfl_sync(0xffffffffu, unit, 0);  // or the compiler makes one loop of the two
#pragma unroll 1
    for (;;) {
      if (!kApart || !View::alike(done_steeply)) {
        const PairPlace& at = view.place_of(unit);
        if constexpr (kBulk) {
          Core::wait_at(places_full + 8 * (unit % Layout::kept_places), (unit / Layout::kept_places) & 1);
        }
        if (View::alike(at.rows_early == 0)) return;
        const bool first = !kGrouped || View::alike(at.in_group == 0);
        clear(across);
        clear(within);
        clear(pairs);
        clear(between);
        through = 0.0f;
        // They stay for the other query heads; those of f32 lie where a is put.
        if constexpr (kBulk && kGate == GatesAs::f32) {
          View::meet_group();  // what was there has been read
          view.load_gates(at);
        } else if (kBulk && first) {
          view.load_gates(at);
        }

        multiply_values(view, unit, first, turn, across, within, pairs, between, through);

        // The pairs inside the chunk, and between the two.
        const int thread = fresh_thread(), lane = thread & 31, rows = late ? at.rows_late : at.rows_early;
        if constexpr (kBulk) {
          Core::wait_at(inputs_full, unit & 1);
        } else {
          View::meet();
          view.load_gates(at);
          view.load_inputs(at);
          ptx::copy_async_commit();
          ptx::copy_async_wait<0>();
          view.turn_gates(at);
          View::meet();
        }
        clear_beyond(view, at, rows, across, within, pairs, between, thread);
#pragma unroll
        for (int i = 0; i < 32 && kGrouped; ++i) {  // dh v counts once
          across[i] = first || late ? across[i] : 0.0f;
          within[i] = first || !late ? within[i] : 0.0f;
        }
        const float* decays = view.floats(Layout::decays) + view.part() * kTile;
        const bool steep =  // alike in all warps of the group
            kGated && __any_sync(0xffffffffu, rows > 0 && fminf(decays[lane], decays[lane + 32]) < ptx::exp2(-kSteep));
        const PairEnd<View, kGrouped> pair(view, unit);
        pair.begin(steep, across, within, pairs, between, through, crossed, b);
        done_steeply = steep;
        if constexpr (kApart) {
          if (steep) break;
          pair.finish_near(across, within, b, crossed);
          if constexpr (kGated) {
            Accumulator e;
            clear(e);
            pair.add_near(e, across, within);
            pair.put_e(e, rows_of_e);
          }
        } else {
          steep ? pair.finish_steep(across, within, b, crossed, steep_e) : pair.finish_near(across, within, b, crossed);
          pair.join_heads(steep, across, within, steep_e, rows_of_e, dk_so_far, dg_so_far);
          pair.leave(steep, across, within, b, rows_of_e);
        }
      }
      if constexpr (kApart) {
        PairEnd<View, kGrouped>(view, unit).leave(View::alike(done_steeply), across, within, b, rows_of_e);
        done_steeply = false;
      }
      if (!step(unit)) return;
    }
    if constexpr (kApart) {
      const PairEnd<View, kGrouped> pair(view, unit);
      Held<float, 32> e;
      pair.finish_steep(across, within, b, crossed, e);
      pair.put_e(e.x, rows_of_e);
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// dq, dk and dg of a pair in make_dq_dk_dg (backward/keys.cuh), from the products over values on.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/keys_view.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// This thread's part of sum of weight(row) * tile[row][column] * a[row][column].
template <class Weight>
__device__ __forceinline__ float weighted_dot(const char* tile, const Accumulator& a, int thread, Weight weight) {
  std::uint32_t x[16];
  load_operand<Stored::k_inner>(x, ptx::shared_address(tile), thread);
  const float2 sums = dot_rows(a, two_of_operand(x));
  const int row = row_of_element(thread, 0);
  return weight(row) * sums.x + weight(row + 8) * sums.y;
}

// Half of the dot product of row thread / 2 of two tiles.
__device__ __forceinline__ float dot_of_rows(const char* a, const char* b, int thread) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t at = tile_piece(thread >> 1, i + 4 * (thread & 1));
    float x[8], y[8];
    unpack_8(*reinterpret_cast<const uint4*>(a + at), x);
    unpack_8(*reinterpret_cast<const uint4*>(b + at), y);
#pragma unroll
    for (int e = 0; e < 8; e += 2) sum += x[e] * y[e] + x[e + 1] * y[e + 1];
  }
  return sum;
}

// store_tile of rows that fit pieces, without branches: products may be under way, which the compiler would end first.
__device__ __forceinline__ void store_pieces(const Rows& r, std::uint32_t tile, int thread) {
  const int row = kRowsEach * (thread / 8), left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
  const char* to = r.data + row * r.stride + thread % 8 * 16;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const uint4 x = load_shared_16(tile + own_piece(thread, i));
    asm volatile(
        "{\n.reg .pred there;\nsetp.gt.s32 there, %5, %6;\n@there st.global.v4.b32 [%0], {%1,%2,%3,%4};\n}" ::"l"(
            to + i * r.stride),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(left), "r"(i)
        : "memory");
  }
}

__device__ __forceinline__ void scale_columns(Accumulator& a, const float* factors, int thread, bool wanted = true) {
  scale_columns(a, [&](int j) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * (thread & 3));
    return wanted ? factor : make_float2(1.0f, 1.0f);
  });
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
  // As so many numbers of bf16 e is summed, where gates are a tile.
  static constexpr int kPartsOfE = kGate == GatesAs::f32 ? 3 : 2;
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

  // This thread's part of dg of a constant gate: what crosses each token, by how many of them it has crossed.
  __device__ __forceinline__ float crossing_by_steps(const Accumulator& across, const Accumulator& within) const {
    const auto steps_of_query = [&](int r) { return static_cast<float>(r + 1 + (late ? kChunk : 0)); };
    const auto steps_of_key = [&](int r) { return static_cast<float>(rows - 1 - r + (late ? 0 : at.rows_late)); };
    float crossing = weighted_dot(shared + across_tile, across, thread,
                                  [&](int r) { return late ? steps_of_query(r) : steps_of_key(r); });
    crossing += weighted_dot(shared + within_tile, within, thread,
                             [&](int r) { return late ? steps_of_key(r) : steps_of_query(r); });
    return crossing;
  }

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
    if constexpr (kGate == GatesAs::f32) sum_wide_gates(b, again<Core>(thread, fresh_thread));
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
        crossing = crossing_by_steps(across, within);
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
    sync_fresh_group();
  }
  // The pairs within the chunk and between the two, to what is from beyond: across and within as they stand in brackets
  // in keys.cuh. Beside them the running sums of gates, where these are a tile of bf16.
  __device__ __forceinline__ void finish_near(Accumulator& across, Accumulator& within, Accumulator& b,
                                              std::uint32_t (&crossed)[16]) const {
    if constexpr (kGated) {
      Accumulator inside_across, inside_within;
      if constexpr (kGate == GatesAs::bf16) {
        std::uint32_t triangle[16];
        triangle_of_ones<Triangle::lower>(triangle, thread);
        Core::begin(across, crossed, triangle);
        Core::template product<k_outer, true>(b, triangle, own_gates, thread);
        Core::template product<k_outer>(across, crossed, crossed_tile(), thread);
        Core::template product<k_inner, k_outer, true>(inside_across, own_a, base + within_tile, thread);
        Core::template product<k_outer, k_outer, true>(inside_within, own_a, base + across_tile, thread);
        Core::finish(across, inside_across, inside_within, b);
      } else {
        Core::begin(across, crossed);
        Core::template product<k_outer>(across, crossed, crossed_tile(), thread);
        Core::template product<k_inner, k_outer, true>(inside_across, own_a, base + within_tile, thread);
        Core::template product<k_outer, k_outer, true>(inside_within, own_a, base + across_tile, thread);
        Core::finish(across, inside_across, inside_within);
      }
      if (!late) sum_beyond(by_keys, shared + across_tile, across, thread);
      scale_columns(across, decays, thread);
      scale_columns(within, decays, thread);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        across[i] += inside_across[i];
        within[i] += inside_within[i];
      }
    } else {
      Core::begin(across, within, crossed);
      Core::template product<k_outer>(across, crossed, crossed_tile(), thread);
      Core::template product<k_inner, k_outer>(across, own_a, base + within_tile, thread);
      Core::template product<k_outer, k_outer>(within, own_a, base + across_tile, thread);
      Core::finish(across, within);
    }
    View::meet();
    if constexpr (kGate == GatesAs::tokens) clear(b);  // found later: not what is left of a steep tile's
  }
  // Running sums of gates of f32, where an accumulator has its elements: before a is put where what is left of the
  // gates lies.
  __device__ __forceinline__ void sum_wide_gates(Accumulator& b, int thread) const {
    std::uint32_t triangle[16];
    triangle_of_ones<Triangle::lower>(triangle, thread);
    Core::publish();
    sync_fresh_group();
    Core::begin(triangle);
    Core::template product<k_outer, true>(b, triangle, own_gates, thread);
    Core::template product<k_outer>(b, triangle, own_a, thread);
    Core::finish(b);
    sync_fresh_group();
  }

  // Rows of q or k as they are, to where q~ or k~ was.
  __device__ __forceinline__ void load_again(bool queries) const {
    const Rows rows = view.rows_at(at, queries ? p.q : p.k, 2, queries ? query_head : at.kv_head, channel, p.key_dim);
    load_tile(view.own_tile(queries ? Layout::q : Layout::k), rows, thread);
    ptx::copy_async_commit();
  }
  // Of a steep tile: gates over each warp's block in sums.
  __device__ __forceinline__ void sum_blocks(Accumulator& sums, int thread) const {
    if constexpr (kGate == GatesAs::bf16) {
      sum_block(sums, own_gates, thread);
    } else if constexpr (kGate == GatesAs::f32) {
      const Rows gates = view.rows_at(at, p.g, 4, at.kv_head, channel, p.key_dim);
      sum_block_of(sums, thread, [&](int row, int column) { return f32_gates_at(gates, row, column); });
    } else {
      const char* from = view.token_gates(at);
      sum_block_of(sums, thread, [&](int row, int) {
        const float g = row < rows ? load_as(p.gate_dtype, from, row * p.g.token) * kLog2E : 0.0f;
        return make_float2(g, g);
      });
    }
  }
  // dk from beyond the chunk times k', beside which it lies, and what is from the keys' anchor to the chunk's end.
  __device__ __forceinline__ void sum_steep_keys(const Accumulator& beyond, float2 exponents_to_end) const {
    const float2 to_end = power_of(exponents_to_end);
    const int own = fresh_thread();
    sum_beyond(by_keys, shared + view.own(Layout::k), beyond, own);
    by_keys[own / 32][2 * (own % 32)] *= to_end.x;
    by_keys[own / 32][2 * (own % 32) + 1] *= to_end.y;
  }
  // Of a steep tile, by blocks, with time mirrored of the early chunk (by_blocks.cuh): across and within, from beyond
  // the chunk, to dq over the scale and dk, but for the powers of b, to base 2, that they leave with. e: scale q dq - k
  // dk, of the early chunk k dk - q dq. Kept: where what waits lies, Local or Held.
  template <template <class, int> class Kept>
  __device__ __forceinline__ void add_by_blocks(Accumulator& across, Accumulator& within, Accumulator& b,
                                                Kept<float, 32>& e) const {
    const int own = fresh_thread(), own_warp = own / 32, own_lane = own % 32;
    const bool mirrored = !late;
    const std::uint32_t room = own_gates, first_tile = base + across_tile, second_tile = base + within_tile;
    Kept<float, 32> other;
    other.put(within);
    Kept<std::uint32_t, 16> first_rows, second_rows;
    std::uint32_t loaded[16];
    Accumulator& sums = b;
    sum_blocks(sums, own);
    __syncwarp();
    const bool near = is_near(sums, own_lane);
    publish_block(room, sums, near, own);
    ptx::copy_async_wait<0>();
    __syncwarp();  // a warp reads what it has loaded
    exponents_from_anchor(sums, room, near, mirrored, own);
    // Exponents of the same tokens as keys (mirrored: queries), which have the same anchor in a near block, and else
    // the other end of it.
    const auto other_exponent = [&](int k16, int i) {
      float2 total = make_float2(0.0f, 0.0f);
      if (!near) total = of_columns(block_total(room, own_warp), k16, i, own);
      return make_float2(total.x - sums[8 * k16 + 2 * i], total.y - sums[8 * k16 + 2 * i + 1]);
    };
    const auto unseen = [](int, float2) {};
    load_operand<k_inner>(loaded, first_tile, own);
    first_rows.put(loaded);
    put_gated<Core>(first_tile, loaded, mirrored ? 1.0f : p.scale, own, two_of(sums), unseen);
    load_operand<k_inner>(loaded, second_tile, own);
    second_rows.put(loaded);
    put_gated<Core>(second_tile, loaded, mirrored ? p.scale : 1.0f, own, other_exponent, unseen);
    sync_fresh_group();
    float2 to_end = put_factors(room, mirrored, own_warp, own_lane);
    __syncwarp();
    if (mirrored) sum_steep_keys(across, to_end);
    const auto rows_of_a = [&](std::uint32_t(&a)[4], int k16) { TensorCore80::load_a<k_inner>(a, own_a, k16, own); };
    add_blocks(across, rows_of_a, second_tile, room, near, mirrored, own);
    sum_products<false>(e, 1.0f, across, first_tile, own);
    if (!near) scale_by_powers(across, two_of(sums));
    __syncwarp();
    to_end = put_factors(room, !mirrored, own_warp, own_lane);
    __syncwarp();
    other.get(within);
    other.put(across);
    if (!mirrored) sum_steep_keys(within, to_end);
    __syncwarp();
    const auto columns_of_a = [&](std::uint32_t(&a)[4], int k16) { TensorCore80::load_a<k_outer>(a, own_a, k16, own); };
    add_blocks(within, columns_of_a, first_tile, room, near, !mirrored, own);
    sum_products<true>(e, -1.0f, within, second_tile, own);
    if (!near) {
      scale_by_powers(within, other_exponent);
      std::uint32_t block[4];
      TensorCore80::load_a<k_outer>(block, own_a, own_warp, fresh_thread());
      Kept<float, 32> aside;
      aside.put(within);
      add_halves<true, true>(other.x, aside.x, e, -1.0f, block, operand_of(first_rows.x), operand_of(second_rows.x),
                             sums, p.scale, fresh_thread(), nullptr, mirrored);
      aside.get(within);
      clear(b);
    }
    other.get(across);
    sync_fresh_group();  // q', k' and a have been read
  }
  template <template <class, int> class Kept>
  __device__ __forceinline__ void finish_steep(Accumulator& across, Accumulator& within, Accumulator& b,
                                               std::uint32_t (&crossed)[16], Kept<float, 32>& e) const {
    if constexpr (kGated) {
      load_again(!late);  // what the other group does not read
      Core::begin(across, crossed);
      Core::template product<k_outer>(across, crossed, crossed_tile(), thread);
      Core::finish(across);
      View::meet();
      load_again(late);
      if constexpr (kGrouped && kBulk && kGate == GatesAs::bf16) {  // another query head has had the gates' place
        view.load_gates(at);
        ptx::copy_async_wait<0>();
        view.turn_gates(at);
        __syncwarp();
      }
      add_by_blocks(across, within, b, e);
#pragma unroll
      for (int i = 0; i < 32; ++i) b[i] *= (late ? 1.0f : -1.0f) / (View::kTileOfGates ? kLog2E : 1.0f);
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
  // What dg is made of e from: numbers of bf16, where a, q~ and gates were, or of one gate a token sums over the
  // thread's rows.
  __device__ __forceinline__ void put_e(Accumulator& e, float2& rows_of_e) const {
    if constexpr (kGate == GatesAs::tokens) {
      float sums[2] = {};
#pragma unroll
      for (int i = 0; i < 32; ++i) sums[(i >> 1) & 1] += e[i] * signs[column_of_element(thread, i)];
      rows_of_e = sum_of_quad(make_float2(sums[0], sums[1]));
    } else {
      const std::uint32_t tiles[3] = {own_a, view.own_tile(Layout::q), own_gates};
#pragma unroll
      for (int part_of = 0; part_of < kPartsOfE; ++part_of) {
#pragma unroll
        for (int k16 = 0; k16 < 4; ++k16) {
          std::uint32_t r[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) r[i] = take_bf16(e[8 * k16 + 2 * i], e[8 * k16 + 2 * i + 1]);
          Core::put_fragment(tiles[part_of], r, k16, thread_shuffled<Core>(thread));
        }
      }
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
    if constexpr (kGate == GatesAs::tokens) sum_token_gates(b, steep);
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
    if (!last) {
      if (late) {
        store_gradient(true, across, b);
      } else {
        store_gradient(true, within, b);
      }
    } else if constexpr (View::kTileOfGates) {
      store_with_gates(steep, across, within, b);
    } else {
      store_gradient(late, across, b);
      store_gradient(!late, within, b);
      if constexpr (kGate == GatesAs::tokens) store_token_gates(rows_of_e);
    }
    Core::publish();  // TMA writes next where threads have written
    if constexpr (kBulk) Core::arrive(base + Layout::inputs_empty);
  }

  // ---- on their way out ----

  // Running sums of gates of one a token, where an accumulator has its elements; of a steep tile b is there.
  __device__ __forceinline__ void sum_token_gates(Accumulator& b, bool steep) const {
    if (thread < kTile) {
      row_sums[thread] = ptx::larger_or_nan(view.floats(view.own(Layout::gates))[thread] * kLog2E, kStrongest);
    }
    sync_fresh_group();
    const float2 of_rows = token_sums(ptx::shared_address(row_sums), thread);
#pragma unroll
    for (int i = 0; i < 32; ++i) b[i] = steep ? b[i] : i & 2 ? of_rows.y : of_rows.x;
  }
  // dg of one gate a token, this key tile's part, from sums of e over a thread's rows, and what it has from beyond the
  // chunk; of a constant gate what crosses tokens.
  __device__ __forceinline__ void store_token_gates(float2 rows_of_e) const {
    if (p.gate == GateKind::constant) {
      if (thread == 0 && rows > 0) {
        w.gate_parts[(at.key_tile * p.sequences.most_chunks + at.chunk + part) * p.heads + at.kv_head] =
            crossings[0] + crossings[1] + crossings[2] + crossings[3];
      }
      return;
    }
    sync_fresh_group();  // the gates in row_sums have been read
    if ((lane & 3) == 0) {
      row_sums[row_of_element(thread, 0)] = rows_of_e.x;
      row_sums[row_of_element(thread, 2)] = rows_of_e.y;
    }
    sync_fresh_group();
    if (warp == 0) {
      const float even = row_sums[2 * lane], odd = row_sums[2 * lane + 1];
      const float from_beyond = flashgla::cuda::warp_sum(run[lane] + run[lane + 32]);
      float after = __shfl_down_sync(0xffffffffu, sum_to_come(even + odd, lane), 1);
      after = from_beyond + (lane < 31 ? after : 0.0f);
      const Sequences& s = p.sequences;
      const std::int64_t tokens = s.cu_seqlens ? s.length : s.count * s.length;
      const std::int64_t token = (s.cu_seqlens ? 0 : at.batch * s.length) + at.token + part * kChunk;
      float* to = w.gate_parts + (at.key_tile * tokens + token + 2 * lane) * p.heads + at.kv_head;
      if (2 * lane < rows) to[0] = after + odd + even;
      if (2 * lane + 1 < rows) to[p.heads] = after + odd;
    }
  }

  __device__ __forceinline__ int channel_again() const {
    return again<Core>(channel, [&] { return at.key_tile * kTile; });
  }
  __device__ __forceinline__ int column(int j) const { return 8 * j + 2 * (thread & 3); }
  // To the tile that k~ was in, each warp's rows by themselves; the rows where they belong. Without a branch: products
  // are under way.
  template <class Factor>
  __device__ __forceinline__ Rows put(const Strided& to, int head, const Accumulator& a, Factor factor) const {
    __syncwarp();
    put_pairs<Core>(own_k, thread, [&](int i) {
      const float2 f = factor(2 * i);
      return ptx::pack_bf16(a[2 * i] * f.x, a[2 * i + 1] * f.y);
    });
    __syncwarp();
    Rows rows_of = view.rows_at(at, to, 2, head, channel_again(), p.key_dim);
    if (to.data == nullptr) rows_of.rows = 0;
    return rows_of;
  }
  // b: running sums of gates, of steep tiles none.
  __device__ __forceinline__ void store_gradient(bool of_queries, const Accumulator& a, const Accumulator& b) const {
    constexpr float kBase = View::kTileOfGates ? kLog2E : 1.0f;  // b is times this to base 2
    const auto find_starts = [&] { return view.floats(Layout::columns) + fresh_group() * 3 * kTile; };
    const float* exponents = again<Core>(starts, find_starts) + (of_queries ? 0 : kTile);
    const float base_of = of_queries ? kBase : -kBase, of_dk = w.prepared.plain ? p.scale : 1.0f,
                scale = of_queries ? p.scale : of_dk;  // without gates
    const Rows to = put(of_queries ? view.d.dq : view.d.dk, of_queries ? query_head : at.kv_head, a, [&](int i) {
      if constexpr (kGated) {
        const float2 start = *reinterpret_cast<const float2*>(exponents + column(i / 4));
        return make_float2(ptx::exp2(b[i] * base_of + start.x), ptx::exp2(b[i + 1] * base_of + start.y));
      } else {
        return make_float2(scale, scale);
      }
    });
    store_pieces(to, own_k, thread);
  }
  // dg of a tile of gates: sums from the chunk's end back, of e as put_e has left it, while dq and dk leave.
  __device__ __forceinline__ void store_with_gates(bool steep, const Accumulator& across, const Accumulator& within,
                                                   const Accumulator& b) const {
    const std::uint32_t tiles[3] = {view.own_tile(Layout::a), view.own_tile(Layout::q), own_gates};
    std::uint32_t triangle[16];
    triangle_of_ones<Triangle::upper>(triangle, thread);
    Core::publish();
    sync_fresh_group();
    Accumulator dg;
    Core::begin(triangle);
    Core::template product<k_outer, true>(dg, triangle, tiles[0], thread);
#pragma unroll
    for (int i = 1; i < kPartsOfE; ++i) Core::template product<k_outer>(dg, triangle, tiles[i], thread);
    Core::commit();
    store_gradient(late, across, b);
    store_gradient(!late, within, b);
    Core::template wait<0>(dg);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 more = *reinterpret_cast<const float2*>(run + column(j)),
                   sign = *reinterpret_cast<const float2*>(signs + column(j));
      dg[4 * j] = dg[4 * j] * sign.x + more.x;
      dg[4 * j + 1] = dg[4 * j + 1] * sign.y + more.y;
      dg[4 * j + 2] = dg[4 * j + 2] * sign.x + more.x;
      dg[4 * j + 3] = dg[4 * j + 3] * sign.y + more.y;
    }
    if constexpr (kGate == GatesAs::bf16) {
      const Rows to = put(view.d.dg, at.kv_head, dg, [](int) { return make_float2(1.0f, 1.0f); });
      if (p.logit_scale != 0.0f) {
        if (steep) {  // the gates' place was another's
          const Rows logits = view.rows_at(at, p.g, 2, at.kv_head, channel_again(), p.key_dim);
          return store_tile_by_logits(to, logits, own_k, p, fresh_thread());
        }
        return store_tile_by_gates(to, own_gates, own_k, p, fresh_thread());
      }
      store_pieces(to, own_k, thread);
    } else if (view.d.dg.data != nullptr) {
      const Rows to = view.rows_at(at, view.d.dg, 4, at.kv_head, channel_again(), p.key_dim);
      const int own = thread_shuffled<Core>(thread);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = row_of_element(own, 2 * i), c = column_of_element(own, 2 * i);
        if (r < to.rows && c < to.channels) {
          store_two(reinterpret_cast<float*>(const_cast<char*>(to.data) + r * static_cast<std::int64_t>(to.stride)) + c,
                    make_float2(dg[2 * i], dg[2 * i + 1]));
        }
      }
    }
  }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda

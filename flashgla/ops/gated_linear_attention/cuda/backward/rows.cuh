// The backward of heads of up to 64 x 64 in one kernel on mma.sync, without gates or with one a token: a block walks a
// sequence and head back in time with the state's gradient in registers; each input is read once and each gradient
// leaves once. Decays then belong to tokens alone, and q and k stay as they are. With f_i = 2^b_i, b the running sum of
// the chunk's gates and B its last, do~_i = scale f_i do_i, v~_j = v_j / f_j, dh^ = 2^B dh, a_ij = do~_i . v~_j for i
// >= j:
//     dq_i = h do~_i + sum_j a_ij k_j         dk_j = dh^ v~_j + sum_i a_ij q_i
//     dv_j = (sum_i (q_i . k_j) do~_i + dh^^T k_j) / f_j      dh before the chunk = dh^ + sum_i q_i do~_i^T
//     dg_t = sum_{i>=t} (q_i . dq_i - k_i . dk_i) + sum of dh^ h + sum_j k_j . (dh^ v~_j)
// q_i . dq_i and k_i . dk_i hold the same rounded a, so that what must cancel does so to f32. A chunk that falls by
// more than kSteep keeps do, v and dh as they are and takes f_i / f_j pair by pair. Roles: backward/README.md.
// What the two thread groups do alike is one piece of code for both, for the instruction cache's sake; which group it
// is is the same for a warp, and told so that the compiler can see it: what is equal in all lanes takes no registers.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/one_kernel.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

struct RowsShared : InputTiles {
  static constexpr int stage = inputs_end;
  static constexpr int x = 2 * stage, out = x + kTileBytes;    // dh^; a tile a group, through which gradients leave
  static constexpr int sums = out + 2 * kTileBytes;            // [parity of the chunk][b: 64, 1 / f: 64]
  static constexpr int dots = sums + 2 * 2 * kTile * 4;        // q . dq [64], k . dk [64]
  static constexpr int beyond = dots + 2 * kTile * 4;          // [4 warps]: what dg has from beyond the chunk
  static constexpr int places = beyond + 4 * 4;                // see Places
  static constexpr int rows = places + 3 * Places::count * 8;  // [parity of the chunk]: its tokens
  static constexpr int total = rows + 2 * 4;
};

// The pairs that count times factor(query, key), rounded, as an operand.
template <bool kTransposed, class Factor>
__device__ __forceinline__ void select_scaled(std::uint32_t (&operand)[16], const Accumulator& a, int thread,
                                              Factor factor) {
  Accumulator scaled;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = row_of_element(thread, i), column = column_of_element(thread, i);
    scaled[i] = a[i] * (kTransposed ? factor(column, row) : factor(row, column));
  }
  select_pairs<kTransposed>(operand, scaled, thread);
}

// Rows of a tile, as copy_tile gave them to this thread, times factor(row), rounded once, to the same or another tile.
template <class Factor>
__device__ __forceinline__ void scale_rows_of_tile(std::uint32_t to, std::uint32_t tile, int thread, Factor factor) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t at = tile_piece(thread >> 3, thread & 7) + 16 * 128 * i;
    store_shared_16(to + at, times_split(load_shared_16(tile + at), factor((thread >> 3) + 16 * i)));
  }
}

// Grid: N x G. One query head a kv head; states kept.
template <bool kGated>
__device__ __forceinline__ void backward_rows(const Params& p, const FusedBackward& f, char* shared) {
  using Layout = RowsShared;
  using Core = TensorCore80;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  const bool first_group = in_first_group();
  const OwnSequence own(p, static_cast<int>(blockIdx.x));
  const int last = own.chunks() - 1, rows_of_last = own.rows(last);
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t x_tile = base + Layout::x, out_tile = base + Layout::out + (first_group ? 0 : kTileBytes);
  const std::uint32_t dots = base + Layout::dots, beyond = base + Layout::beyond;
  const auto stage_of = [&](int index) { return base + (index & 1) * Layout::stage; };
  const auto sums_of = [&](int index) { return base + Layout::sums + (index & 1) * 2 * kTile * 4; };
  const auto rows_place = [&](int index) { return base + Layout::rows + (index & 1) * 4; };
  const auto rows_in = [&](int index) { return static_cast<int>(load_shared_4(rows_place(index))); };

  const int gate_bytes = static_cast<int>(size_of(p.gate_dtype));
  const Places places{base + Layout::places};
  if (threadIdx.x == 0) {
    own.start(places, f.gradients, last, gate_bytes, 2);
    store_shared_4(rows_place(last), rows_of_last);
  }
  const auto store = [&](int index, Places::Tensor tensor, const Strided& s, const Accumulator& a, int rows,
                         int columns) {
    if (auto* to = places.template get<__nv_bfloat16>(index, tensor)) {
      store_through<Core, !kGated>(out_tile, to, static_cast<int>(s.token), a, rows, columns);
    }
  };

  // Gates: the block's last warp is a chunk ahead with the sums and two with the gates.
  const auto sums_gates = [&] { return kGated && !first_group && fresh_thread() / 32 == 3; };
  float2 gates = make_float2(0.0f, 0.0f);  // of tokens 2 lane and 2 lane + 1, as given
  const auto fetch_gates = [&](int rows, const char* from) {
    const int lane = fresh_thread() % 32;
    const std::int64_t at = 2 * lane * p.g.token;
    gates.x = 2 * lane < rows ? load_as(p.gate_dtype, from, at) : 0.0f;
    gates.y = 2 * lane + 1 < rows ? load_as(p.gate_dtype, from, at + p.g.token) : 0.0f;
  };
  const auto put_sums = [&](int index) {
    const int lane = fresh_thread() % 32;
    const float low = ptx::larger_or_nan(gates.x * kLog2E, kStrongest),
                high = ptx::larger_or_nan(gates.y * kLog2E, kStrongest);
    const float b = sum_so_far(low + high, lane);  // at the end of token 2 lane + 1
    const std::uint32_t sums = sums_of(index);
    put_float(sums, 2 * lane, b - high);
    put_float(sums, 2 * lane + 1, b);
    put_float(sums, kTile + 2 * lane, ptx::exp2(high - b));
    put_float(sums, kTile + 2 * lane + 1, ptx::exp2(-b));
  };

  Accumulator held;  // of the first group dv, of the second dh
  const auto put_beyond = [&](float sum) {
    sum = flashgla::cuda::warp_sum(sum);
    const int thread = fresh_thread();
    if (thread % 32 == 0) put_float(beyond, thread / 32, sum);
  };
  if (last >= 0) {
    copy_inputs(stage_of(last), p, f.gradients, first_group, rows_of_last, own.place(first_group ? p.q : p.k, last),
                own.place(first_group ? f.gradients.d_o : p.v, last), own.state(last));
    ptx::copy_async_commit();
  }
  if (first_group) {
    clear(held);
  } else {
    const int thread = fresh_thread();
    read_state(held, state_of(f.d_ht, p, fresh_block()), p.key_dim, p.value_dim, 0, 0, thread);
  }
  if (sums_gates() && last >= 0) {
    fetch_gates(rows_of_last, own.place(p.g, last, gate_bytes));
    put_sums(last);
    if (last > 0) fetch_gates(kChunk, own.place(p.g, last - 1, gate_bytes));
  }
  float constant_gate = 0.0f;  // the first warp's, of constant gates
  __syncthreads();

#pragma unroll 1
  for (int index = last; index >= 0; --index) {
    const std::uint32_t stage = stage_of(index), sums = sums_of(index);
    const std::uint32_t q = stage + Layout::q, k = stage + Layout::k, d_o = stage + Layout::d_o, v = stage + Layout::v,
                        h = stage + Layout::h;
    const auto b = [&](int token) { return float_at(sums, token); };
    const auto inverse = [&](int token) { return float_at(sums, kTile + token); };  // 1 / f
    const float total = kGated ? b(kTile - 1) : 0.0f;
    const bool steep = kGated && __any_sync(0xffffffffu, total < -kSteep);
    {
      const int mover = fresh_thread();
      if (!first_group) {
        const float decay = kGated ? ptx::exp2(total) : 1.0f;
        if (kGated && !steep) scale_rows(held, decay, decay);
        put_rounded<Core>(x_tile, held, mover);
        if (steep) scale_rows(held, decay, decay);
      }
      ptx::copy_async_wait<0>();
      if (!steep && (kGated || first_group)) {
        const std::uint32_t tile = first_group ? d_o : v;
        scale_rows_of_tile(tile, tile, mover, [&](int row) {
          if constexpr (!kGated) return p.scale;
          return first_group ? p.scale * ptx::exp2(b(row)) : inverse(row);
        });
      }
    }
    __syncthreads();  // the operands are there
    if (index > 0) {
      copy_inputs(stage_of(index - 1), p, f.gradients, first_group, kChunk,
                  places.get<char>(index, first_group ? Places::q : Places::k),
                  places.get<char>(index, first_group ? Places::d_o : Places::v),
                  first_group ? nullptr : places.get<char>(index, Places::states));
      ptx::copy_async_commit();
      if (sums_gates()) {
        put_sums(index - 1);
        if (index > 1) fetch_gates(kChunk, places.get<char>(index, Places::g));
      }
    }

    const int rows = rows_in(index), thread = fresh_thread();
    Accumulator d;  // of the first group dq, of the second dk
    // A steep chunk: the pairs inside it before do and v get their factors, which are what decays from its start and to
    // its end.
    const auto between = [&](int query, int key) { return p.scale * ptx::exp2(fminf(b(query) - b(key), 0.0f)); };
    const auto since = [&](int token) { return p.scale * ptx::exp2(b(token)); };
    const auto until = [&](int token) { return ptx::exp2(b(kTile - 1) - b(token)); };
    std::uint32_t pairs[16] = {};  // [query][key] in the first group, [key][query] in the second
    if constexpr (!kGated) {
      // One product at a time, in a loop, for unrolled ptxas has both under way, and one code for both groups. The
      // first group's scores come before its pairs.
      std::uint32_t scores[16];
      const std::uint32_t own_tile = first_group ? d_o : v, other_tile = first_group ? v : d_o;
#pragma unroll 1
      for (bool of_scores = first_group;; of_scores = false) {
#pragma unroll
        for (int i = 0; i < 16; ++i) scores[i] = pairs[i];
        Accumulator a;
        Core::product<k_inner, k_inner, true>(a, of_scores ? k : own_tile, of_scores ? q : other_tile,
                                              thread_shuffled<Core>(thread));
        select_pairs(pairs, a, of_scores || !first_group, thread);
        if (!of_scores) break;
      }
      if (first_group) {
        Core::product<k_outer, true>(held, scores, d_o, thread);
        Core::product<k_inner, k_outer>(held, k, x_tile, thread);
        store(index, Places::dv, f.gradients.dv, held, rows, p.value_dim);
      } else {
        Core::product<k_outer, k_outer>(held, q, d_o, thread);
      }
      Core::product<k_inner, k_inner, true>(d, own_tile, first_group ? h : x_tile, thread);
      Core::product<k_outer>(d, pairs, first_group ? k : q, thread);
    } else if (first_group) {
      std::uint32_t scores[16];
      {
        Accumulator s, a;  // [key][query], [query][key]
        Core::product<k_inner, k_inner, true>(s, k, q, thread_shuffled<Core>(thread));
        Core::product<k_inner, k_inner, true>(a, d_o, v, thread_shuffled<Core>(thread));
        if (!steep) {
          select_pairs<true>(scores, s, thread);
          select_pairs<false>(pairs, a, thread);
        } else {
          select_scaled<true>(scores, s, thread, between);
          select_scaled<false>(pairs, a, thread, between);
        }
      }
      if (!steep) {
        Core::product<k_inner, k_outer, true, Loads::in_turn>(held, k, x_tile, fresh_thread());
        Core::product<k_outer>(held, scores, d_o, fresh_thread());
      } else {
        Core::product<k_outer, true>(held, scores, d_o, fresh_thread());
        __syncthreads();
        scale_rows_of_tile(d_o, d_o, fresh_thread(), since);
        scale_rows_of_tile(out_tile, k, fresh_thread(), until);
        __syncthreads();
        Core::product<k_inner, k_outer, false, Loads::in_turn>(held, out_tile, x_tile, fresh_thread());
        ptx::barrier(1, kGroupThreads);  // the tile is free again
      }
      Core::product<k_inner, k_inner, true, Loads::in_turn>(d, d_o, h, fresh_thread());
      Core::product<k_outer>(d, pairs, k, fresh_thread());
      if (kGated && !steep) {
        const int row = row_of_element(thread, 0);
        scale_rows(held, inverse(row), inverse(row + 8));
      }
      store(index, Places::dv, f.gradients.dv, held, rows, p.value_dim);
    } else {
      {
        Accumulator a;
        Core::product<k_inner, k_inner, true>(a, v, d_o, fresh_thread());
        if (!steep) {
          select_pairs<true>(pairs, a, thread);
        } else {
          select_scaled<true>(pairs, a, thread, between);
        }
      }
      if (steep) {
        __syncthreads();
        scale_rows_of_tile(v, v, fresh_thread(), until);
        __syncthreads();
      }
      Core::product<k_inner, k_inner, true>(d, v, x_tile, fresh_thread());
      {  // dg from beyond the chunk: h through it, and what its keys have of dh, which dg's sums take away again and
         // which is therefore the same numbers
        const float2 of_keys = dot_rows(k, d, fresh_thread()), of_h = dot_rows(h, held, fresh_thread());
        put_beyond(of_keys.x + of_keys.y + of_h.x + of_h.y);
      }
      Core::product<k_outer>(d, pairs, q, fresh_thread());
      Core::product<k_outer, k_outer>(held, q, d_o, fresh_thread());
    }
    if constexpr (kGated) {
      put_rows(dots + (first_group ? 0 : 4 * kTile), sum_of_quad(dot_rows(first_group ? q : k, d, thread)), thread);
    }
    store(index, first_group ? Places::dq : Places::dk, first_group ? f.gradients.dq : f.gradients.dk, d, rows,
          p.key_dim);
    if (first_group && fresh_thread() < 32) {
      places.step_back(index, fresh_thread());
      if (fresh_thread() == 0) store_shared_4(rows_place(index - 1), kChunk);
    }
    __syncthreads();  // the operands have been read; sums of the rows are there

    if (kGated && first_group && fresh_thread() < 32) {
      const int lane = fresh_thread();
      float run = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) run += float_at(beyond, w);
      const auto difference = [&](int token) { return float_at(dots, token) - float_at(dots, kTile + token); };
      const float high = difference(2 * lane + 1), both = high + difference(2 * lane), after = sum_to_come(both, lane);
      const float low_dg = run + after, high_dg = run + (after - both + high);
      if (p.gate == GateKind::constant) {
        constant_gate += (2 * lane < rows ? low_dg : 0.0f) + (2 * lane + 1 < rows ? high_dg : 0.0f);
      } else if (f.gradients.dg.data) {
        const std::int64_t at = 2 * lane * f.gradients.dg.token;
        char* to = places.get<char>(index, Places::dg);
        if (2 * lane < rows) store_as(p.gate_dtype, to, at, low_dg);
        if (2 * lane + 1 < rows) store_as(p.gate_dtype, to, at + f.gradients.dg.token, high_dg);
      }
    }
    __syncwarp();
  }

  if (kGated && first_group && fresh_thread() < 32 && p.gate == GateKind::constant) {
    constant_gate = flashgla::cuda::warp_sum(constant_gate);
    if (fresh_thread() == 0) f.gate_parts[fresh_block()] = constant_gate;
  }
  if (!first_group && f.dh0 != nullptr) {
    write_state(state_of(f.dh0, p, fresh_block()), held, p.key_dim, p.value_dim, 0, 0, fresh_thread());
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

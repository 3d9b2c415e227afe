// The backward of heads of up to 64 x 64 in one kernel on Hopper, without gates or with one a token, from states kept
// at every fourth chunk: a block a multiprocessor walks over sequences and heads, each back in time, and its groups of
// 128 threads have a role each. With b the running sum of a chunk's gates, B its last, h the state before the chunk and
// dh the gradient of the state after it, w_ij = scale 2^(b_i - b_j) for i >= j, else 0, and a_ij = w_ij do_i . v_j:
//     dq_i = scale 2^b_i h do_i + sum_j a_ij k_j                    (group 0)
//     dv_j = 2^(B - b_j) dh^T k_j + sum_i w_ij (q_i . k_j) do_i     (group 1)
//     dk_j = 2^(B - b_j) dh v_j + sum_i a_ij q_i                    (group 2)
//     dh before the chunk = 2^B dh + sum_i scale 2^b_i q_i do_i^T   (group 3)
//     h after a chunk = 2^B h + sum_j 2^(B - b_j) k_j v_j^T         (group 4), ahead of the others by a segment
//     dg_t = sum of dh h before the chunk - sum_{i<t} (q_i . dq_i - k_i . dk_i)
// No exponent is positive, whatever the gates are: nothing tells steep chunks from others. a_ij is rounded alike where
// it makes dq and where it makes dk, so that what must cancel in dg does so to f32. Group 5 is four warps: one brings
// k, v and kept states, one q and do, one sums gates, one makes dg. Who waits for whom: backward/BY_ROLE.md.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/by_role_rows.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// dh, back in time.
template <class View>
__device__ __forceinline__ void make_state_gradients(const View& view, const FusedBackward& f) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr bool kGated = View::kGated;
  const Params& p = view.p;
  Accumulator dh;
  ChunkWalk<View> at;
  const uint2 scale = split_factors(p.scale, p.scale);
#pragma unroll 1
  for (SegmentWalk walk(view); walk.there(view); walk.next(view)) {
    if (walk.is_last) {
      const int thread = fresh_thread();
      read_state(dh, state_of(f.d_ht, p, walk.unit), p.key_dim, p.value_dim, 0, 0, thread);
    }
#pragma unroll 1
    for (int i = walk.count - 1; i >= 0; --i) {
      const int rows = walk.rows(i), thread = fresh_thread();
      at.begin(walk, i);
      std::uint32_t rounded[16];
      to_operand(rounded, dh);
      Core::wait_at(view.base + Layout::dh_empty, (at.gone_through - 1) & 1);
      put_operand<Core>(view.base + Layout::dh, rounded, thread);
      put_operand<Core, true>(view.base + Layout::dh_transposed, rounded, thread);
      Core::publish();
      Core::arrive(view.base + Layout::dh_full);
      at.wait(view);
      const std::uint32_t q = at.stage + Layout::q, v = at.tiles + Layout::v;
      if (p.sequences.cu_seqlens != nullptr && rows < kChunk) at.clear_rows(v, rows);
      std::uint32_t queries[16];
      if constexpr (kGated) {
        const float decay = ptx::exp2(float_at(at.sums, kTile - 1));
        const auto factors = [&](int k8) {
          return load_shared_uint2(at.sums + Layout::query_factors + 8 * (4 * k8 + (thread & 3)));
        };
        load_weighed(queries, q, thread, factors);
        scale_rows(dh, decay, decay);
        Core::begin(queries, dh);
        Core::template product<Stored::k_outer>(dh, queries, at.stage + Layout::d_o, thread);
        Core::finish(dh);
        load_weighed<true>(queries, q, fresh_thread(), factors);
        Core::begin(queries, dh);
        Core::template product<Stored::k_outer>(dh, queries, at.stage + Layout::d_o, thread);
        Core::finish(dh);
        view.wait_ringed(Layout::h_full, at.number);
        const float2 with_h = dot_rows(at.tiles + Layout::h, dh, thread);
        at.leave(view);
        const float sum = flashgla::cuda::warp_sum(with_h.x + with_h.y);
        Core::wait_at(view.base + Layout::dots_empty, (at.gone_through - 1) & 1);
        if (thread % 32 == 0) put_float(view.base + Layout::beyond, thread / 32, sum);
        __syncwarp();
        Core::arrive(view.base + Layout::dots_full);
      } else {
        load_weighed(queries, q, thread, [&](int) { return scale; });
        Core::begin(queries, dh);
        Core::template product<Stored::k_outer>(dh, queries, at.stage + Layout::d_o, thread);
        Core::finish(dh);
        at.leave(view);
      }
      at.step();
    }
    if (walk.first == 0 && f.dh0 != nullptr) {
      write_state(state_of(f.dh0, p, walk.unit), dh, p.key_dim, p.value_dim, 0, 0, fresh_thread());
    }
  }
}

// h before each chunk of a segment, from the one that was kept.
template <class View>
__device__ __forceinline__ void find_states_between(const View& view) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  Accumulator h;
#pragma unroll 1
  for (SegmentWalk walk(view); walk.there(view); walk.next(view)) {
    if (walk.count == 0) continue;
    int number = walk.before;
    view.wait_ringed(Layout::keys_full, number);
    std::uint32_t tiles = view.tiles_of(view.slot_of(number));
    std::uint32_t kept[16];
    load_operand<Stored::k_inner>(kept, tiles + Layout::h, fresh_thread());
    unpack_operand(h, kept);
    Core::arrive(view.ringed(Layout::h_full, number));
#pragma unroll 1
    for (const int end = number + walk.count - 1; number < end;) {
      const int thread = fresh_thread();
      if constexpr (View::kGated) {
        const std::uint32_t sums = view.sums_of(number);
        std::uint32_t keys[16];
        const float decay = ptx::exp2(float_at(sums, kTile - 1));
        load_weighed(keys, tiles + Layout::k, thread, [&](int k8) {
          return load_shared_uint2(sums + Layout::key_factors + 8 * (4 * k8 + (thread & 3)));
        });
        scale_rows(h, decay, decay);
        Core::begin(keys, h);
        Core::template product<Stored::k_outer>(h, keys, tiles + Layout::v, thread);
      } else {
        Core::begin(h);
        Core::template product<Stored::k_outer, Stored::k_outer>(h, tiles + Layout::k, tiles + Layout::v, thread);
      }
      Core::finish(h);
      ++number;
      view.wait_ringed(Layout::keys_full, number);
      tiles = view.tiles_of(view.slot_of(number));
      put_rounded<Core>(tiles + Layout::h, h, thread);
      Core::publish();
      Core::arrive(view.ringed(Layout::h_full, number));
    }
  }
}

// The rows of chunk i of a segment to a tile.
template <class Core>
__device__ __forceinline__ void copy_rows(std::uint32_t tile, const RowMap& rows, const SegmentWalk& segment, int i,
                                          std::uint32_t barrier) {
  Core::copy_box(tile, &rows.map, 0, segment.token(segment.first + i), segment.head * rows.head_step,
                 segment.batch * rows.batch_step, barrier);
}

// One lane: k, v and the kept states.
template <class View>
__device__ __forceinline__ void produce_keys(const View& view, const RoleMaps& maps) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
#pragma unroll 1
  for (SegmentWalk walk(view); walk.there(view); walk.next(view)) {
    if (walk.count == 0) continue;
    const Span span = span_of(p.sequences, walk.unit / p.heads);
    const std::int64_t slot_of_state = p.state_slot(span.chunk_begin, walk.unit / p.heads, walk.first);
    const char* state = static_cast<const char*>(p.states) + p.state_tile(slot_of_state, walk.head, 0, 0);
#pragma unroll 1
    for (int i = 0; i < walk.count; ++i) {
      const int number = walk.before + i, free = number - Layout::slots;
      int slot = number;
      if (free >= 0) {
        view.wait_ringed(Layout::keys_empty, free);
        slot = static_cast<int>(load_shared_4(view.base + (Layout::slot_freed + free % Layout::ring * 4)));
      }
      view.in_step(Layout::keys_in_step, number);
      store_shared_4(view.base + (Layout::slot_of + number % Layout::ring * 4), slot);
      store_shared_4(view.base + (Layout::slot_freed + (walk.before + walk.count - 1 - i) % Layout::ring * 4), slot);
      const std::uint32_t barrier = view.ringed(Layout::keys_full, number), tiles = view.tiles_of(slot);
      Core::expect_bytes(barrier, (i == 0 ? 3 : 2) * kTileBytes);
      const auto copy = [&](std::uint32_t to, const RowMap& rows) { copy_rows<Core>(to, rows, walk, i, barrier); };
      if (i == 0) Core::copy_in(tiles + Layout::h, state, kTileBytes, barrier);
      copy(tiles + Layout::k, maps.k);
      copy(tiles + Layout::v, maps.v);
    }
  }
}

// One lane: q and do.
template <class View>
__device__ __forceinline__ void produce_queries(const View& view, const RoleMaps& maps) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  Turn turn;
  int time = 0;
#pragma unroll 1
  for (SegmentWalk walk(view); walk.there(view); walk.next(view)) {
#pragma unroll 1
    for (int i = walk.count - 1; i >= 0; --i) {
      const std::uint32_t barrier = view.base + Layout::queries_full + turn.slot * 8,
                          stage = view.base + Layout::first_stage + turn.slot * Layout::stage;
      Core::wait_at(view.base + Layout::queries_empty + turn.slot * 8, turn.parity ^ 1);
      view.in_step(Layout::queries_in_step, time++);
      Core::expect_bytes(barrier, 2 * kTileBytes);
      const auto copy = [&](std::uint32_t to, const RowMap& rows) { copy_rows<Core>(to, rows, walk, i, barrier); };
      copy(stage + Layout::d_o, maps.d_o);
      copy(stage + Layout::q, maps.q);
      turn.step(Layout::stages);
    }
  }
}

// One warp: running sums of the gates, and the factors made of them.
template <class View>
__device__ __forceinline__ void sum_gates(const View& view) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  const int lane = fresh_thread() % 32, element = static_cast<int>(size_of(p.gate_dtype));
  SegmentWalk walk(view);
  int i = 0;
  uint2 bits = make_uint2(0, 0);  // of tokens 2 lane and 2 lane + 1 of chunk `number`, as they lie in memory
#pragma unroll 1
  for (int number = -1;; ++number) {
    // Those of the next chunk, so that what waits for memory comes a chunk later.
    while (walk.there(view) && i == walk.count) {
      walk.next(view);
      i = 0;
    }
    const bool there = walk.there(view);
    uint2 next = make_uint2(0, 0);
    if (there) {
      const int rows = walk.rows(i);
      const char* from = walk.place(p.g, walk.first + i, element);
      const auto bits_of = [&](int token) {
        return token < rows ? load_gate_bits(p.gate_dtype, from, token * p.g.token) : 0u;
      };
      next = make_uint2(bits_of(2 * lane), bits_of(2 * lane + 1));
    }
    if (number >= 0) {
      const float low = ptx::larger_or_nan(gate_from_bits(p.gate_dtype, bits.x) * kLog2E, kStrongest),
                  high = ptx::larger_or_nan(gate_from_bits(p.gate_dtype, bits.y) * kLog2E, kStrongest);
      const float b = sum_so_far(low + high, lane);  // at the end of token 2 lane + 1
      const float total = __shfl_sync(0xffffffffu, b, 31);
      const int written_over = number - Layout::sum_ring, gone = written_over + Layout::segment - 1;  // at the latest
      if (written_over >= 0) view.wait_ringed(Layout::keys_empty, gone);
      const std::uint32_t sums = view.sums_of(number);
      put_float(sums, 2 * lane, b - high);
      put_float(sums, 2 * lane + 1, b);
      store_shared_uint2(sums + Layout::query_factors + 8 * lane,
                         split_factors(p.scale * ptx::exp2(b - high), p.scale * ptx::exp2(b)));
      store_shared_uint2(sums + Layout::key_factors + 8 * lane,
                         split_factors(ptx::exp2(total - (b - high)), ptx::exp2(total - b)));
      Core::arrive(view.ringed(Layout::keys_full, number));
    }
    if (!there) return;
    bits = next;
    ++i;
  }
}

// One warp: dg, from the chunk's start. What is taken away again has to be in dh h in the same numbers: therefore dh
// is made of scale 2^b q to 16 bits. From the chunk's end on it would be k dk, of which h there has another rounding,
// and no gate has let through the last of it.
template <class View>
__device__ __forceinline__ void make_gate_gradients(const View& view, const FusedBackward& f) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  const Strided& dg = f.gradients.dg;
  const std::uint32_t dots = view.base + Layout::dots, beyond = view.base + Layout::beyond;
  const int lane = fresh_thread() % 32, element = static_cast<int>(size_of(p.gate_dtype));
  int gone_through = 0;
  float constant_gate = 0.0f;
#pragma unroll 1
  for (SegmentWalk walk(view); walk.there(view); walk.next(view)) {
#pragma unroll 1
    for (int i = walk.count - 1; i >= 0; --i) {
      const int rows = walk.rows(i);
      Core::wait_at(view.base + Layout::dots_full, gone_through & 1);
      float run = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) run += float_at(beyond, w);
      const auto difference = [&](int token) { return float_at(dots, token) - float_at(dots, kTile + token); };
      const float low = difference(2 * lane);
      const float so_far = sum_so_far(low + difference(2 * lane + 1), lane);
      const float before = __shfl_up_sync(0xffffffffu, so_far, 1);
      const float low_dg = lane > 0 ? run - before : run, high_dg = low_dg - low;
      Core::arrive(view.base + Layout::dots_empty);
      ++gone_through;
      if (p.gate == GateKind::constant) {
        constant_gate += (2 * lane < rows ? low_dg : 0.0f) + (2 * lane + 1 < rows ? high_dg : 0.0f);
      } else if (dg.data != nullptr) {
        char* to = walk.place(dg, walk.first + i, element);
        if (2 * lane < rows) store_as(p.gate_dtype, to, 2 * lane * dg.token, low_dg);
        if (2 * lane + 1 < rows) store_as(p.gate_dtype, to, (2 * lane + 1) * dg.token, high_dg);
      }
    }
    if (walk.first == 0 && p.gate == GateKind::constant) {
      constant_gate = flashgla::cuda::warp_sum(constant_gate);
      if (lane == 0) f.gate_parts[walk.unit] = constant_gate;
      constant_gate = 0.0f;
    }
  }
}

// Grid: blocks that walk over N x G. One query head a kv head; states kept at every fourth chunk.
template <class Core, bool kGated>
__device__ __forceinline__ void backward_by_role(const Params& p, const FusedBackward& f, const RoleMaps& maps,
                                                 bool in_pairs, char* shared) {
  using Layout = ByRole<kGated>;
  const RoleView<Core, kGated> view{p, maps.units, ptx::shared_address(shared), in_pairs};
  if (threadIdx.x == 0) {
    const auto init = [&](int offset, int count, int arrivals) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) Core::init_barrier(view.base + offset + 8 * i, arrivals);
    };
    init(Layout::keys_full, Layout::ring, kGated ? 1 + 32 : 1);  // TMA's thread, and a warp that sums
    init(Layout::h_full, Layout::ring, kGroupThreads);
    init(Layout::keys_empty, Layout::ring, Layout::chunk_readers);
    init(Layout::queries_full, Layout::stages, 1);
    init(Layout::queries_empty, Layout::stages, Layout::chunk_readers);
    init(Layout::dh_full, 1, kGroupThreads);
    init(Layout::dh_empty, 1, 2 * kGroupThreads);
    init(Layout::dots_full, 1, 3 * kGroupThreads);
    init(Layout::dots_empty, 1, 32);
    init(Layout::keys_in_step, 2, 2);
    Core::publish_barriers();
  }
  __syncthreads();
  if (in_pairs) {
    Core::arrive_at_cluster();
    Core::wait_for_cluster();
  }
  flashgla::cuda::wait_for_previous();
  release_other_way(view.p.sequences);
  const int group = own_group();
  if (group == Layout::working_groups) {
    Core::template give<Layout::producer_registers>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) produce_keys(view, maps);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) produce_queries(view, maps);
    } else if constexpr (kGated) {
      warp == 2 ? sum_gates(view) : make_gate_gradients(view, f);
    }
  } else if (group < Layout::row_groups) {
    Core::template take<Layout::row_registers>();
    make_rows(view, maps, static_cast<Role>(group));
  } else if (group == Layout::row_groups) {
    make_state_gradients(view, f);
  } else {
    find_states_between(view);
  }
  __syncwarp();
  if (in_pairs) {
    Core::arrive_at_cluster();
    Core::wait_for_cluster();
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

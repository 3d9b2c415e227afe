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
// to f32 accuracy. Tiles of channels that fall by more than kSteep go by halving.
//
// Of a block's two groups of 128 threads one has the early chunk, one the late. h do and dh v of either are also what
// the other's r wants. Where there is a copy engine, blocks stay: they walk over pairs, and tiles of values run ahead
// of the products by a few stages, through the epilogue into the next pair.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/pairs.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/row_maps.h"
#include "flashgla/ops/gated_linear_attention/cuda/backward/steep.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// This thread's part of sum of weight(row) * tile[row][column] * a[row][column].
template <class Weight>
__device__ __forceinline__ float weighted_dot(const char* tile, const Accumulator& a, int thread, Weight weight) {
  std::uint32_t x[16];
  load_operand<Stored::k_inner>(x, ptx::shared_address(tile), thread);
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = ptx::unpack_bf16(x[i]);
    sums[i & 1] += pair.x * a[2 * i] + pair.y * a[2 * i + 1];
  }
  const int row = row_of_element(thread, 0);
  return weight(row) * sums[0] + weight(row + 8) * sums[1];
}

// Running sums of base-2 gates where an accumulator has its elements, from gates in memory of f32. parts: the group's,
// with barrier `barrier`.
__device__ __forceinline__ void sum_wide_gates(Accumulator& b, const float* rows, std::int64_t stride, int count,
                                               int channels, ColumnParts& parts, int barrier, int thread) {
  const int warp = thread >> 5, lane = thread & 31, row = row_of_element(thread, 0), column = 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int r = row + 8 * (i & 1), c = 8 * (i / 2) + column;
    float2 g = make_float2(0.0f, 0.0f);
    if (r < count && c < channels) g = *reinterpret_cast<const float2*>(rows + r * stride + c);
    b[2 * i] = ptx::larger_or_nan(g.x * kLog2E, kStrongest);
    b[2 * i + 1] = ptx::larger_or_nan(g.y * kLog2E, kStrongest);
  }
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float before = __shfl_up_sync(0xffffffffu, b[i], distance);
      if (lane >= distance) b[i] += before;
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i & 2) b[i] += __shfl_sync(0xffffffffu, b[i ^ 2], 28 + (lane & 3));
  }
  if (lane >= 28) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<float2*>(&parts[warp][8 * j + column]) = make_float2(b[4 * j + 2], b[4 * j + 3]);
    }
  }
  ptx::barrier(barrier, kGroupThreads);
#pragma unroll
  for (int w = 0; w < 3; ++w) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // without branches, between which so many registers would have to agree
      float2 sum = *reinterpret_cast<const float2*>(&parts[w][8 * j + column]);
      sum = w < warp ? sum : make_float2(0.0f, 0.0f);
      b[4 * j] += sum.x;
      b[4 * j + 1] += sum.y;
      b[4 * j + 2] += sum.x;
      b[4 * j + 3] += sum.y;
    }
  }
}

// Grid: blocks that walk over pairs x G x key tiles, innermost last, so that what neighbours share is in the cache.
// `items` of them.
template <class Core, GateTile kGate>
__device__ __forceinline__ void make_dq_dk_dg(const Params& p, const BackwardWorkspace& w, const Gradients& d,
                                              const RowMaps& maps, unsigned items, char* shared) {
  using Layout = PairShared<Core>;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr bool kBulk = Layout::in_bulk, kGated = kGate != GateTile::none;
  const std::uint32_t base = ptx::shared_address(shared);
  const bool late = own_group() == 1;
  const int part = late ? 1 : 0, group_barrier = 1 + part;
  const int value_tiles = tiles_of(p.value_dim), depth = min(Layout::stages, value_tiles);
  const std::uint32_t full = base + Layout::full, inputs = base + Layout::inputs, empty = base + Layout::empty,
                      inputs_free = base + Layout::inputs_free, known = base + Layout::known;
  PairPlace* const places = reinterpret_cast<PairPlace*>(shared + Layout::places);
  const auto place_of = [&](unsigned unit) -> PairPlace& { return places[unit % Layout::kept_places]; };
  // What is the same in all threads, so that the compiler knows it of a warp's.
  const auto alike = [](bool x) { return __any_sync(0xffffffffu, x) != 0; };
  const auto meet = [] { ptx::barrier(3, kPairThreads); };
  const auto meet_group = [&] { ptx::barrier(group_barrier, kGroupThreads); };
  const auto parts = [&](int which) -> ColumnParts& {
    return reinterpret_cast<ColumnParts*>(shared + Layout::parts)[which];
  };
  const auto floats = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  const auto own = [&](int offset) { return Layout::epilogue + part * Layout::group + offset; };
  const std::uint32_t own_q = base + own(Layout::q), own_k = base + own(Layout::k), own_a = base + own(Layout::a),
                      own_gates = base + own(Layout::gates);

  // A tile of values: by the copy engine, one thread tells it.
  const auto order_values = [&](const PairPlace& at, int tile, int slot) {
    if constexpr (kBulk) {
      const std::uint32_t barrier = full + 8 * slot, stage = base + slot * Layout::stage;
      const int value = tile * kTile, token = static_cast<int>(at.token);
      const bool both = at.rows_late > 0;
      Core::expect_bytes(barrier, (both ? 6 : 4) * kTileBytes);
      const auto rows = [&](int to, const RowMap& of, int first, int head) {
        Core::copy_box(stage + to, &of.map, value, first, head * of.head_step,
                       static_cast<int>(at.batch) * of.batch_step, barrier);
      };
      const int head = at.kv_head * p.group + at.in_group;
      rows(Layout::d_o_early, maps.d_o, token, head);
      rows(Layout::v_early, maps.v, token, at.kv_head);
      Core::copy_in(stage + Layout::h, static_cast<const char*>(p.states) + at.state + tile * kImageBytes, kTileBytes,
                    barrier);
      if (both) {
        rows(Layout::v_late, maps.v, token + kChunk, at.kv_head);
        rows(Layout::d_o_late, maps.d_o, token + kChunk, head);
      }
      Core::copy_in(stage + Layout::dh, w.state_gradients + at.gradient + tile * kImageBytes, kTileBytes, barrier);
    }
  };
  const auto rows_at = [&](const PairPlace& at, const Strided& x, int element, int head, int channel, int channels) {
    const std::int64_t token = at.token + (late ? kChunk : 0);
    return Rows{
        static_cast<const char*>(x.data) + (at.batch * x.batch + token * x.token + head * x.head + channel) * element,
        static_cast<int>(x.token * element), late ? at.rows_late : at.rows_early, channels - channel};
  };
  // The same by all threads, each group its own chunk's rows.
  const auto load_values = [&](const PairPlace& at, int tile) {
    const int thread = fresh_thread(), value = tile * kTile;
    const std::uint32_t stage = base + tile % Layout::stages * Layout::stage;
    const int head = at.kv_head * p.group + at.in_group;
    load_tile(stage + (late ? Layout::d_o_late : Layout::d_o_early), rows_at(at, d.d_o, 2, head, value, p.value_dim),
              true, thread);
    load_tile(stage + (late ? Layout::v_late : Layout::v_early), rows_at(at, p.v, 2, at.kv_head, value, p.value_dim),
              true, thread);
    const char* state = late ? w.state_gradients + at.gradient : static_cast<const char*>(p.states) + at.state;
    copy_image(stage + (late ? Layout::dh : Layout::h), state + tile * kImageBytes, thread);
    ptx::copy_async_commit();
  };
  // q~, k~ and decays.
  const auto q_image = [&](const PairPlace& at, int of) {
    const std::int64_t head = at.kv_head * p.group + at.in_group;
    return w.prepared.q +
           (((at.chunk + of) * p.heads * p.group + head) * tiles_of(p.key_dim) + at.key_tile) * kImageBytes;
  };
  const auto kv_at = [&](const PairPlace& at, int of) {
    return ((at.chunk + of) * p.heads + at.kv_head) * tiles_of(p.key_dim) + at.key_tile;
  };
  const auto order_inputs = [&](const PairPlace& at) {
    if constexpr (kBulk) {
      constexpr int of_decays = kGated ? kTile * 4 : 0;
      const int chunks = at.rows_late > 0 ? 2 : 1;
      Core::expect_bytes(inputs, chunks * (2 * kTileBytes + of_decays));
      for (int of = 0; of < chunks; ++of) {
        const std::uint32_t to = base + Layout::epilogue + of * Layout::group;
        Core::copy_in(to + Layout::q, q_image(at, of), kTileBytes, inputs);
        Core::copy_in(to + Layout::k, w.prepared.k + kv_at(at, of) * kImageBytes, kTileBytes, inputs);
        if constexpr (kGated) {
          Core::copy_in(base + Layout::decays + of * of_decays, w.prepared.decay + kv_at(at, of) * kTile, of_decays,
                        inputs);
        }
      }
    }
  };
  const auto load_inputs = [&](const PairPlace& at) {
    const int thread = fresh_thread();
    if (!late || at.rows_late > 0) {
      copy_image(own_q, q_image(at, part), thread);
      copy_image(own_k, w.prepared.k + kv_at(at, part) * kImageBytes, thread);
      if (kGated && thread < kTile) {
        floats(Layout::decays)[part * kTile + thread] = w.prepared.decay[kv_at(at, part) * kTile + thread];
      }
    }
  };
  // Gates of its chunk by each group, those of f32 when they are summed.
  const auto gates_from = [&](const PairPlace& at, int channel, int element) {
    const std::int64_t token = at.token + (late ? kChunk : 0);
    return static_cast<const char*>(p.g.data) +
           (at.batch * p.g.batch + token * p.g.token + at.kv_head * p.g.head + channel) * element;
  };
  const auto load_gates = [&](const PairPlace& at) {
    const int thread = fresh_thread(), channel = at.key_tile * kTile, rows = late ? at.rows_late : at.rows_early;
    if constexpr (kGate == GateTile::narrow) {
      load_tile(own_gates, rows_at(at, p.g, 2, at.kv_head, channel, p.key_dim), true, thread);
      ptx::copy_async_commit();
    } else if constexpr (kGate == GateTile::token) {
      const int element = p.gate_dtype == DType::f32 ? 4 : 2;
      if (thread < kTile) {  // read again by the same thread
        floats(own(Layout::gates))[thread] =
            thread < rows ? load_as(p.gate_dtype, gates_from(at, 0, element), thread * p.g.token) : 0.0f;
      }
    }
  };

  // What a constant gate has for chunks that the call might have had.
  if constexpr (kGate == GateTile::token) {
    if (p.gate == GateKind::constant && p.sequences.cu_seqlens != nullptr) {
      const std::int64_t rows = p.sequences.most_chunks * p.heads,
                         there = p.sequences.chunk_begin[p.sequences.count] * p.heads;
      for (int tile = 0; tile < tiles_of(p.key_dim); ++tile) {
        for (std::int64_t i = there + blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += gridDim.x * blockDim.x) {
          w.gate_parts[tile * rows + i] = 0.0f;
        }
      }
    }
  }

  const auto find_first = [&] {
    PairPlace at{};
    at.item = blockIdx.x;
    if (!find_pair(at, p)) {
      at.in_group = p.group;
      find_next(at, at, p, items);
    }
    return at;
  };
  if constexpr (kBulk) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Layout::stages; ++i) {
        Core::init_barrier(full + 8 * i, 1);
        Core::init_barrier(empty + 8 * i, kPairThreads);
      }
      Core::init_barrier(inputs, 1);
      Core::init_barrier(inputs_free, kPairThreads);
      for (int i = 0; i < Layout::kept_places; ++i) Core::init_barrier(known + 8 * i, 1);
      Core::publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= kPairThreads) {
      Core::template give<Layout::copying_registers>();
      if (threadIdx.x >= kPairThreads + 32) return;
      const int lane = fresh_thread();
      if (lane == 0) place_of(0) = find_first();
      int slot = 0, phase = 0;
#pragma unroll 1
      for (unsigned unit = 0;; ++unit) {
        __syncwarp();
        const PairPlace& at = place_of(unit);
        if (lane == 0) Core::arrive(known + 8 * (unit % Layout::kept_places));
        if (at.rows_early == 0) return;
#pragma unroll 1
        for (int tile = 0; tile < value_tiles; ++tile) {
          Core::wait_at(empty + 8 * slot, phase ^ 1);
          if (lane == 0) order_values(at, tile, slot);
          if (tile + 1 == depth) {
            Core::wait_at(inputs_free, (unit & 1) ^ 1);
            if (lane == 0) order_inputs(at);
          }
          __syncwarp();
          if (++slot == depth) {
            slot = 0;
            phase ^= 1;
          }
        }
        if (lane == 0) find_next(place_of(unit + 1), at, p, items);
      }
    }
    Core::template take<Layout::working_registers>();
  } else {
    if (threadIdx.x == 0) place_of(0) = find_first();
    __syncthreads();
  }

  int slot = 0, phase = 0;
  float crossing = 0.0f;                  // constant gates: this thread's part of dg, see backward/constant_gate.cuh
  Aside<float, 32> dk_so_far, dg_so_far;  // of the query heads done
#pragma unroll 1
  for (unsigned unit = 0;; ++unit) {
    const PairPlace& at = place_of(unit);
    if constexpr (kBulk) {
      Core::wait_at(known + 8 * (unit % Layout::kept_places), (unit / Layout::kept_places) & 1);
    }
    if (alike(at.rows_early == 0)) break;
    const bool first = alike(at.in_group == 0);
    Accumulator dq, dk, pairs, between;
    clear(dq);
    clear(dk);
    clear(pairs);
    clear(between);
    float through = 0.0f;                // early: sum over values of h dh, half of key channel thread / 2
    if (kBulk && first) load_gates(at);  // they stay for the other query heads

    // This thread has done with a stage. The products of a tile are asked for before those of the one before are waited
    // for.
    const auto release = [&](int of_slot) {
      if constexpr (kBulk) Core::arrive(empty + 8 * of_slot);
    };
    // do times what lies side by side: of the late group with v' for what passes between the chunks, with h and with v;
    // of the early one with v, h and, so that the groups have one code, v'. Then v with dh.
    if constexpr (!kBulk) load_values(at, 0);
    Core::begin(dq, dk, pairs, between);
#pragma unroll 1
    for (int tile = 0; tile * kTile < p.value_dim; ++tile) {
      if constexpr (kBulk) {
        Core::wait_at(full + 8 * slot, phase);
      } else {
        ptx::copy_async_wait<0>();
        meet();
        if ((tile + 1) * kTile < p.value_dim) load_values(place_of(unit), tile + 1);
      }
      const int at_stage = (kBulk ? slot : tile % Layout::stages) * Layout::stage;
      const std::uint32_t stage = base + at_stage;
      Core::begin();
      Core::products_side_by_side(stage + (late ? Layout::d_o_late : Layout::d_o_early), stage + Layout::v_early,
                                  fresh_thread(), between, dq, pairs);
      Core::template product<k_inner, k_inner>(dk, stage + (late ? Layout::v_late : Layout::v_early),
                                               stage + Layout::dh, fresh_thread());
      Core::commit();
      Core::template wait<1>();
      if constexpr (kBulk) {
        if (tile > 0) release(slot > 0 ? slot - 1 : depth - 1);
      }
      if (kGated && !late && first) {
        through += dot_of_rows(shared + at_stage + Layout::h, shared + at_stage + Layout::dh, fresh_thread());
      }
      if constexpr (kBulk) {
        if (++slot == depth) {
          slot = 0;
          phase ^= 1;
        }
      }
    }
    Core::finish(dq, dk, pairs, between);
    release(slot > 0 ? slot - 1 : depth - 1);

    // The pairs inside the chunk, and between the two.
    const int thread = fresh_thread(), warp = thread >> 5, lane = thread & 31;
    const int rows = late ? at.rows_late : at.rows_early, channel = at.key_tile * kTile;
    const int query_head = at.kv_head * p.group + at.in_group;
    const bool both = alike(at.rows_late > 0), last = alike(at.in_group + 1 == p.group);
    if constexpr (kBulk) {
      Core::wait_at(inputs, unit & 1);
      ptx::copy_async_wait<0>();
    } else {
      meet();
      load_gates(at);
      load_inputs(at);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      meet();
    }
    if (!late) {
#pragma unroll
      for (int i = 0; i < 32; ++i) pairs[i] = between[i];
    }
    // Rows beyond the chunk's may be another sequence's. (Without gates always: else the compiler makes wgmma wait.)
    if (!kGated || rows < kTile) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const bool inside = row_of_element(thread, i) < rows;
        dq[i] = inside ? dq[i] : 0.0f;
        dk[i] = inside ? dk[i] : 0.0f;
        pairs[i] = inside ? pairs[i] : 0.0f;
        between[i] = inside ? between[i] : 0.0f;
      }
    }
    const float *decays = floats(Layout::decays) + part * kTile,
                *other_decays = floats(Layout::decays) + (1 - part) * kTile;
    float *beyond = floats(Layout::beyond), *run = floats(Layout::run) + part * kTile,
          *row_sums = floats(Layout::row_sums) + part * kTile;
    ColumnParts &by_keys = parts(part), &by_other = parts(2 + part), &quarters = parts(4 + part);
    const auto column = [&](int j) { return 8 * j + 2 * (thread & 3); };
    const auto scale_columns = [&](Accumulator& x, const float* factors) {
      if constexpr (!kGated) return;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 factor = *reinterpret_cast<const float2*>(factors + column(j));
        x[4 * j] *= factor.x;
        x[4 * j + 1] *= factor.y;
        x[4 * j + 2] *= factor.x;
        x[4 * j + 3] *= factor.y;
      }
    };
    bool steep = false;  // alike in all warps of the group
    if constexpr (kGated) {
      steep = __any_sync(0xffffffffu, rows > 0 && fminf(decays[lane], decays[lane + 32]) < ptx::exp2(-kSteep));
    }

    float2* columns = reinterpret_cast<float2*>(shared + Layout::columns) + part * kTile;
    if (kGated && thread < kTile) {
      const float decay = decays[thread];
      columns[thread] = steep ? make_float2(0.0f, 1.0f) : make_float2(-__log2f(decay), __fdividef(1.0f, decay));
    }

    std::uint32_t operand[16], crossed[16];  // a inside the chunk, and between the chunks
    select_pairs<false>(operand, pairs, thread);
    to_operand(crossed, between);
    put_operand<Core>(own_a, operand, thread);
    if (late) put_operand<Core>(base + Layout::between, crossed, thread);
    if (!first) clear(dk);  // dh v is there already
    if (both) {
      if constexpr (kGated) {
        if (late) {
          sum_beyond(parts(2), shared + own(Layout::q), dq, thread);
        } else if (first) {
          sum_beyond(parts(3), shared + own(Layout::k), dk, thread);
        }
      }
      late ? scale_columns(dq, other_decays) : scale_columns(dk, other_decays);
    }
    if constexpr (kGate == GateTile::token) {
      if (p.gate == GateKind::constant) {
        if (first) crossing = 0.0f;
        const auto steps = [](int x) { return static_cast<float>(x); };
        crossing += weighted_dot(shared + own(Layout::q), dq, thread,
                                 [&](int r) { return steps(r + 1 + (late ? kChunk : 0)); });
        if (first) {
          crossing += weighted_dot(shared + own(Layout::k), dk, thread,
                                   [&](int r) { return steps(rows - 1 - r + (late ? 0 : at.rows_late)); });
        }
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
    Core::publish();
    meet();
    if (both) {
      const std::uint32_t other = base + Layout::epilogue + (1 - part) * Layout::group;
      if (!late) load_operand<k_outer>(crossed, base + Layout::between, thread);
      Accumulator sum;  // dq of the late chunk, dk of the early one: one code, without a branch around the product
#pragma unroll
      for (int i = 0; i < 32; ++i) sum[i] = late ? dq[i] : dk[i];
      Core::begin(crossed, sum);
      Core::template product<k_outer>(sum, crossed, other + (late ? Layout::k : Layout::q), thread);
      Core::finish(sum);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        dq[i] = late ? sum[i] : dq[i];
        dk[i] = late ? dk[i] : sum[i];
      }
    }
    if (kGated && (!late || first)) sum_beyond(by_keys, shared + own(Layout::k), dk, thread);
    if (!steep) {
      scale_columns(dq, decays);
      scale_columns(dk, decays);
      Core::begin(operand, dq, dk);
      Core::template product<k_outer>(dq, operand, own_k, thread);
      Core::template product<k_outer, k_outer>(dk, own_a, own_q, thread);
      Core::finish(dq, dk);
      meet();
    } else {
      meet();
      if constexpr (kGated) {
        load_tile(own_q, rows_at(at, p.q, 2, query_head, channel, p.key_dim), true, thread);
        load_tile(own_k, rows_at(at, p.k, 2, at.kv_head, channel, p.key_dim), true, thread);
        ptx::copy_async_commit();
        const int element = kGate == GateTile::wide || (kGate == GateTile::token && p.gate_dtype == DType::f32) ? 4 : 2;
        const int gate_channel = kGate == GateTile::token ? 0 : channel + 2 * lane;
        const GatesInMemory<kGate> gates{gates_from(at, gate_channel, element),
                                         p.g.token * element,
                                         channel + 2 * lane < p.key_dim ? rows : 0,
                                         &quarters,
                                         warp,
                                         lane,
                                         p.gate_dtype};
        float2 sum = make_float2(0.0f, 0.0f);
        for (int i = 0; i < 16; ++i) {
          const float2 g = gates.gate(i);
          sum.x += g.x;
          sum.y += g.y;
        }
        *reinterpret_cast<float2*>(&quarters[warp][2 * lane]) = sum;
        ptx::copy_async_wait<0>();
        finish_by_halving(dq, dk, own_q, own_k, shared + own(Layout::a), own_gates,
                          floats(Layout::between) + part * (kTileBytes / 8), gates, p.scale, group_barrier, thread);
#pragma unroll
        for (int i = 0; i < 32; ++i) dq[i] *= p.scale;
      }
    }
    if (!first) {
#pragma unroll
      for (int i = 0; i < 32; ++i) dk[i] += dk_so_far.kept[i];
    }
    if (!last) dk_so_far.put(dk);

    Accumulator b;  // running sums of gates, times kBase to base 2; not of steep tiles
    constexpr float kBase = kGate == GateTile::narrow ? kLog2E : 1.0f;
    if constexpr (kGate == GateTile::narrow) {
      std::uint32_t triangle[16];
      triangle_of_ones<false>(triangle, thread);
      Core::begin(triangle);
      Core::template product<k_outer, true>(b, triangle, own_gates, thread);
      Core::finish(b);
    } else if constexpr (kGate == GateTile::token) {
      // b of this thread's two rows.
      if (thread < kTile) {
        row_sums[thread] = ptx::larger_or_nan(floats(own(Layout::gates))[thread] * kLog2E, kStrongest);
      }
      meet_group();
      float even = row_sums[2 * lane], odd = row_sums[2 * lane + 1], sum = even + odd;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float before = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += before;
      }
      even = sum - odd;
      odd = sum;
      const int row = row_of_element(thread, 0);
      const auto at_row = [&](int r) {
        const float x = __shfl_sync(0xffffffffu, even, r / 2), y = __shfl_sync(0xffffffffu, odd, r / 2);
        return r % 2 != 0 ? y : x;
      };
      const float low = at_row(row), high = at_row(row + 8);
#pragma unroll
      for (int i = 0; i < 32; ++i) b[i] = i & 2 ? high : low;
    } else if constexpr (kGate == GateTile::wide) {
      // Of steep tiles none: a branch around it would spill what both ways have to agree on.
      sum_wide_gates(b, reinterpret_cast<const float*>(gates_from(at, channel, 4)), p.g.token, steep ? 0 : rows,
                     p.key_dim - channel, quarters, group_barrier, thread);
    }

    std::uint32_t queries[16];  // q~, of steep tiles q
    load_operand<k_inner>(queries, own_q, thread);
    // q dq - k dk, and r.
    Accumulator e;
    if constexpr (kGated) {
      if (thread < kTile && (!late || first)) {
        float sum = first ? beyond[thread] : run[thread], by_pairs = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum += by_keys[i][thread];
          if (both) by_pairs += by_other[i][thread];
        }
        run[thread] = sum + decays[thread] * by_pairs;
      }
      if (first) {
        clear(e);
      } else {
        dg_so_far.restore(e);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 q = ptx::unpack_bf16(queries[i]);
        e[2 * i] += q.x * dq[2 * i];
        e[2 * i + 1] += q.y * dq[2 * i + 1];
      }
      if (!last) dg_so_far.put(e);
    }
    // dq leaves through the tile that q~ was in, dk and dg through that of k~, each warp's rows by themselves.
    const auto store = [&](const Strided& to, int head, std::uint32_t tile, const Accumulator& x, auto factor) {
      __syncwarp();
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        std::uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int element = 8 * k16 + 2 * i;
          const float2 f = factor(element);
          r[i] = ptx::pack_bf16(x[element] * f.x, x[element + 1] * f.y);
        }
        Core::put_fragment(tile, r, k16, thread);
      }
      __syncwarp();
      if (to.data != nullptr) store_tile(rows_at(at, to, 2, head, channel, p.key_dim), tile, true, thread);
    };
    // -B and 2^-B of the element's column and the next.
    const auto column_of = [&](int element) { return *reinterpret_cast<const float4*>(columns + column(element / 4)); };
    if (steep) clear(b);  // its factors are there
    const float scale = steep ? 1.0f : p.scale;
    store(d.dq, query_head, own_q, dq, [&](int i) {
      if constexpr (!kGated) return make_float2(scale, scale);
      const float4 c = column_of(i);
      return make_float2(scale * ptx::exp2(b[i] * kBase + c.x), scale * ptx::exp2(b[i + 1] * kBase + c.z));
    });
    if (last) {
      std::uint32_t keys[16];  // k~, of steep tiles k
      load_operand<k_inner>(keys, own_k, thread);
      store(d.dk, at.kv_head, own_k, dk, [&](int i) {
        if constexpr (!kGated) return make_float2(1.0f, 1.0f);
        return make_float2(ptx::exp2(b[i] * -kBase), ptx::exp2(b[i + 1] * -kBase));
      });
      if constexpr (kGated) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float2 k = ptx::unpack_bf16(keys[i]);
          const float4 c = column_of(2 * i);
          e[2 * i] = (e[2 * i] - k.x * dk[2 * i]) * c.y;
          e[2 * i + 1] = (e[2 * i + 1] - k.y * dk[2 * i + 1]) * c.w;
        }
      }
      if constexpr (kGate == GateTile::token) {
        if (p.gate == GateKind::constant) {
#pragma unroll
          for (int distance = 1; distance < 32; distance *= 2) {
            crossing += __shfl_xor_sync(0xffffffffu, crossing, distance);
          }
          meet_group();  // the gates in row_sums have been read
          if (lane == 0) row_sums[warp] = crossing;
          meet_group();
          if (thread == 0 && rows > 0) {
            w.gate_parts[(at.key_tile * p.sequences.most_chunks + at.chunk + part) * p.heads + at.kv_head] =
                row_sums[0] + row_sums[1] + row_sums[2] + row_sums[3];
          }
        } else {
          float sums[2] = {};
#pragma unroll
          for (int i = 0; i < 32; ++i) sums[(i >> 1) & 1] += e[i];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
            sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
          }
          meet_group();  // the gates in row_sums have been read
          if ((lane & 3) == 0) {
            row_sums[row_of_element(thread, 0)] = sums[0];
            row_sums[row_of_element(thread, 2)] = sums[1];
          }
          meet_group();
          if (warp == 0) {
            const float even = row_sums[2 * lane], odd = row_sums[2 * lane + 1];
            float from_beyond = run[lane] + run[lane + 32], sum = even + odd;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
              from_beyond += __shfl_xor_sync(0xffffffffu, from_beyond, distance);
              const float after = __shfl_down_sync(0xffffffffu, sum, distance);
              if (lane + distance < 32) sum += after;
            }
            float after = __shfl_down_sync(0xffffffffu, sum, 1);
            after = from_beyond + (lane < 31 ? after : 0.0f);
            const Sequences& s = p.sequences;
            const std::int64_t tokens = s.cu_seqlens ? s.length : s.count * s.length;
            const std::int64_t token = (s.cu_seqlens ? 0 : at.batch * s.length) + at.token + part * kChunk;
            float* to = w.gate_parts + (at.key_tile * tokens + token + 2 * lane) * p.heads + at.kv_head;
            if (2 * lane < rows) to[0] = after + odd + even;
            if (2 * lane + 1 < rows) to[p.heads] = after + odd;
          }
        }
      } else if constexpr (kGated) {
        // dg: sums from the chunk's end back, of e as two or three numbers of bf16.
        constexpr int kParts = kGate == GateTile::wide ? 3 : 2;
        const std::uint32_t tiles[3] = {own_a, own_q, own_gates};
#pragma unroll
        for (int part_of = 0; part_of < kParts; ++part_of) {
#pragma unroll
          for (int k16 = 0; k16 < 4; ++k16) {
            std::uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float &x = e[8 * k16 + 2 * i], &y = e[8 * k16 + 2 * i + 1];
              r[i] = ptx::pack_bf16(x, y);
              const float2 rounded = ptx::unpack_bf16(r[i]);
              x -= rounded.x;
              y -= rounded.y;
            }
            Core::put_fragment(tiles[part_of], r, k16, thread);
          }
        }
        std::uint32_t triangle[16];
        triangle_of_ones<true>(triangle, thread);
        Core::publish();
        meet_group();
        Accumulator dg;
        Core::begin(triangle);
        Core::template product<k_outer, true>(dg, triangle, tiles[0], thread);
#pragma unroll
        for (int i = 1; i < kParts; ++i) Core::template product<k_outer>(dg, triangle, tiles[i], thread);
        Core::finish(dg);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 more = *reinterpret_cast<const float2*>(run + column(j));
          dg[4 * j] += more.x;
          dg[4 * j + 1] += more.y;
          dg[4 * j + 2] += more.x;
          dg[4 * j + 3] += more.y;
        }
        if constexpr (kGate == GateTile::narrow) {
          store(d.dg, at.kv_head, own_k, dg, [](int) { return make_float2(1.0f, 1.0f); });
        } else if (d.dg.data != nullptr) {
          const Rows to = rows_at(at, d.dg, 4, at.kv_head, channel, p.key_dim);
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const int r = row_of_element(thread, 2 * i), c = column(i / 2);
            if (r < to.rows && c < to.channels) {
              store_two(
                  reinterpret_cast<float*>(const_cast<char*>(to.data) + r * static_cast<std::int64_t>(to.stride)) + c,
                  make_float2(dg[2 * i], dg[2 * i + 1]));
            }
          }
        }
      }
    }
    Core::publish();  // the copy engine writes next where threads have written
    if constexpr (kBulk) {
      Core::arrive(inputs_free);
    } else {
      meet();
      if (threadIdx.x == 0) find_next(place_of(unit + 1), place_of(unit), p, items);
      meet();
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

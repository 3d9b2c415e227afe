// dq, dk, dv and dg of a chunk: the equations are in backward_chunk.cuh.
//
// A group of 128 threads holds a tile of 64 key channels; a block, of one or two groups, walks over the value tiles.
// Where it holds all key tiles of the head it makes dv on the way, with two groups a value tile's dv by one and its do
// v^T by the other; else make_dv does.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward_chunk.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kDumpRow = kTile + 8;  // floats of a row: no bank conflicts for accumulator writes and row reads

// Groups of a block, one a key tile, and whether these are all key tiles of the head.
template <int kGroups, bool kMakesDv>
struct GradientsPlan {
  static constexpr bool makes_dv = kMakesDv;
  static constexpr int groups = kGroups, threads = groups * kGroupThreads;
  static constexpr int blocks = groups == 2 ? 1 : makes_dv ? 2 : 3;  // of a multiprocessor
};

template <class Plan, GateTile kGate>
struct GradientsShared {  // offsets in bytes
  static constexpr int align(int bytes) { return (bytes + 1023) / 1024 * 1024; }
  static constexpr int larger(int x, int y) { return x > y ? x : y; }
  static constexpr int groups = Plan::groups, parts = static_cast<int>(sizeof(ColumnParts));
  // A value tile, in stages; h and dh^ of each group.
  static constexpr int d_o = 0, v = kTileBytes, h = 2 * kTileBytes, dh = h + groups * kTileBytes,
                       stage = dh + groups * kTileBytes, stages = groups == 2 ? 3 : 2;
  // What follows the walk, of a group, overlays the stages; x: of steep tiles. k~ does so where dv does not need it.
  static constexpr int q = 0, a = kTileBytes, dump = 2 * kTileBytes, x = dump + kTile * kDumpRow * 4,
                       gates = x + kTileBytes, overlaid_k = align(gates + gate_bytes(kGate)),
                       group = overlaid_k + (Plan::makes_dv ? 0 : kTileBytes);
  static constexpr int walk = larger(stages * stage, groups* group);
  static constexpr int k = Plan::makes_dv ? walk : overlaid_k;  // [groups]
  static constexpr int scores = walk + (Plan::makes_dv ? groups * kTileBytes : 0);
  static constexpr int out = scores + (Plan::makes_dv ? kTileBytes : 0);             // [groups]
  static constexpr int quarters = out + (Plan::makes_dv ? groups * kTileBytes : 0);  // [groups], as the rest
  static constexpr int inner = quarters + groups * parts, suffix = inner + groups * parts,
                       beyond = suffix + groups * parts, row_sums = beyond + groups * kTile * 4;
  static constexpr int total = row_sums + groups * kTile * 4;
  static_assert(Plan::makes_dv || groups == 1);
};

__device__ __forceinline__ void put_rows(float* dump, const Accumulator& a, int thread) {
  const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float* at = dump + row * kDumpRow + 8 * j + 2 * (lane & 3);
    *reinterpret_cast<float2*>(at) = make_float2(a[4 * j], a[4 * j + 1]);
    *reinterpret_cast<float2*>(at + 8 * kDumpRow) = make_float2(a[4 * j + 2], a[4 * j + 3]);
  }
}

// An accumulator that put_rows has left, added to this one.
__device__ __forceinline__ void add_rows(Accumulator& a, const float* dump, int thread) {
  const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float* at = dump + row * kDumpRow + 8 * j + 2 * (lane & 3);
    const float2 x = *reinterpret_cast<const float2*>(at), y = *reinterpret_cast<const float2*>(at + 8 * kDumpRow);
    a[4 * j] += x.x;
    a[4 * j + 1] += x.y;
    a[4 * j + 2] += y.x;
    a[4 * j + 3] += y.y;
  }
}

// Columns' sums over the chunk of k~ * (part of dk through dh), by warp.
__device__ __forceinline__ void sum_beyond(ColumnParts& parts, const char* k, const Accumulator& dk, int thread) {
  const int warp = thread >> 5, lane = thread & 31, row = 16 * warp + (lane >> 2), in_block = 2 * (lane & 3);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 k0 =
        ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(k + element_offset(row, 8 * j + in_block)));
    const float2 k1 =
        ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(k + element_offset(row + 8, 8 * j + in_block)));
    float x = k0.x * dk[4 * j] + k1.x * dk[4 * j + 2], y = k0.y * dk[4 * j + 1] + k1.y * dk[4 * j + 3];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      x += __shfl_xor_sync(0xffffffffu, x, distance);
      y += __shfl_xor_sync(0xffffffffu, y, distance);
    }
    if (lane < 4) *reinterpret_cast<float2*>(&parts[warp][8 * j + in_block]) = make_float2(x, y);
  }
}

// This thread's part of sum of weight(row) * tile[row][column] * a[row][column].
template <class Weight>
__device__ __forceinline__ float weighted_dot(const char* tile, const Accumulator& a, int thread, Weight weight) {
  const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2), in_block = 2 * (lane & 3);
  float sum = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float of_row = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 x = ptx::unpack_bf16(
          *reinterpret_cast<const std::uint32_t*>(tile + element_offset(row + 8 * half, 8 * j + in_block)));
      of_row += x.x * a[4 * j + 2 * half] + x.y * a[4 * j + 2 * half + 1];
    }
    sum += weight(row + 8 * half) * of_row;
  }
  return sum;
}

// Half of the dot product of row thread / 2 of two tiles.
__device__ __forceinline__ float dot_of_rows(const char* a, const char* b, int thread) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t at = tile_piece(thread >> 1, i + 4 * (thread & 1));
    const uint4 x = *reinterpret_cast<const uint4*>(a + at), y = *reinterpret_cast<const uint4*>(b + at);
    const std::uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 s = ptx::unpack_bf16(xs[e]), t = ptx::unpack_bf16(ys[e]);
      sum += s.x * t.x + s.y * t.y;
    }
  }
  return sum;
}

// A tile as the a operand of a product.
__device__ __forceinline__ void load_operand(std::uint32_t (&operand)[16], std::uint32_t tile, int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t r[4];
    TensorCore80::load_a<Stored::k_inner>(r, tile, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[4 * k16 + i] = r[i];
  }
}

// Of a group's 128 threads.
__device__ __forceinline__ void group_barrier(int group) { ptx::barrier(1 + group, kGroupThreads); }

// A steep tile: what dq and dk, 32 floats a thread, have from beyond the chunk gets its factors (dk's when `first`),
// and the pairs inside come to it. q, k: as loaded; a: [query][key], zero above the diagonal before and after; factors:
// [64][kDumpRow].
template <GateTile kGate>
static __device__ __noinline__ void finish_steep(float* dq_kept, float* dk_kept, std::uint32_t q, std::uint32_t k,
                                                 char* a, std::uint32_t x, float* factors, const char* gates,
                                                 const ColumnParts& quarters, float scale, bool first, int group,
                                                 int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const GateColumns<kGate, 4> columns{gates, &quarters[0][0], warp, lane};
  Accumulator dq, dk;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    dq[i] = dq_kept[i];
    dk[i] = dk_kept[i];
  }
  const auto factor = [&](int i) {
    return factors[row_of_element(thread, i) * kDumpRow + column_of_element(thread, i)];
  };
  const auto put_factor = [&](int row, float2 x) {
    *reinterpret_cast<float2*>(factors + row * kDumpRow + 2 * lane) = x;
  };
  const auto place = [&](int r, int c) { return reinterpret_cast<std::uint16_t*>(a + element_offset(r, c)); };
  const auto power = [](float2 sum) { return make_float2(ptx::exp2(sum.x), ptx::exp2(sum.y)); };
  group_barrier(group);
  walk_up(columns, kTile, warp, [&](int row, float2 sum) { put_factor(row, power(sum)); });
  // a on both sides of the diagonal: a token is a query at some levels and a key at others.
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int query = row_of_element(thread, i), key = column_of_element(thread, i);
    if (query > key) *place(key, query) = *place(query, key);
  }
  group_barrier(group);
#pragma unroll
  for (int i = 0; i < 32; ++i) dq[i] *= factor(i);
  group_barrier(group);
  walk_down(columns, kTile, warp, [&](int row, float2 sum) { put_factor(row, power(sum)); });
  group_barrier(group);
  if (first) {
#pragma unroll
    for (int i = 0; i < 32; ++i) dk[i] *= factor(i);
  }
  std::uint32_t operand[16];
  load_operand(operand, ptx::shared_address(a), thread);
  const auto itself = [](int row, int column) { return row == column; };
  Accumulator d;
  add_masked_product(dq, operand, k, thread, itself);
  clear(d);
  add_masked_product(d, operand, q, thread, itself);
#pragma unroll
  for (int i = 0; i < 32; ++i) dk[i] += scale * d[i];
#pragma unroll 1
  for (int size = kTile / 2; size > 0; size /= 2) {
    group_barrier(group);
    put_level(x, q, k, columns, size, warp, lane, put_factor);
    group_barrier(group);
    clear(d);
    add_masked_product(d, operand, x, thread, [size](int row, int column) { return ((row ^ column) & -size) == size; });
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float sum = factor(i) * d[i];
      const bool query = (row_of_element(thread, i) & size) != 0;
      dq[i] += query ? sum : 0.0f;
      dk[i] += query ? 0.0f : scale * sum;
    }
  }
  group_barrier(group);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int query = row_of_element(thread, i), key = column_of_element(thread, i);
    if (query > key) *place(key, query) = 0;
    dq_kept[i] = dq[i];
    dk_kept[i] = dk[i];
  }
}

// Grid: chunks x G x (key tiles / groups of a block), innermost last, so that what neighbours share is in the cache.
template <class Core, GateTile kGate, class Plan>
__device__ void make_gradients(const Params& p, const BackwardWorkspace& w, const Gradients& d, char* shared) {
  using Layout = GradientsShared<Plan, kGate>;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr int kGroups = Plan::groups, kStages = Layout::stages;
  constexpr bool kTwoGroups = kGroups == 2;
  const int thread = threadIdx.x % kGroupThreads, group = threadIdx.x / kGroupThreads, warp = thread >> 5,
            lane = thread & 31;
  const int key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const unsigned blocks = key_tiles / kGroups;
  const int first_tile = static_cast<int>(blockIdx.x % blocks) * kGroups,
            kv_head = static_cast<int>(blockIdx.x / blocks % p.heads);
  const std::int64_t chunk = blockIdx.x / blocks / p.heads;
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) {
    const int of_thread = first_tile + static_cast<int>(threadIdx.x);
    if (kGate == GateTile::token && p.gate == GateKind::constant && threadIdx.x < kGroups && of_thread < key_tiles) {
      w.gate_parts[(of_thread * p.sequences.most_chunks + chunk) * p.heads + kv_head] = 0.0f;
    }
    return;
  }
  const std::int64_t kv_at = chunk * p.heads + kv_head;
  const int tile = first_tile + group, channel = tile * kTile;
  const std::int64_t kv_tile = kv_at * key_tiles + tile;
  const std::uint32_t base = ptx::shared_address(shared), k_tiles = base + Layout::k;

  const __nv_bfloat16* do_rows = nullptr;
  bool first = true;  // query head of the group
  const auto load = [&](int value_tile) {
    if (value_tile < value_tiles) {
      const std::uint32_t stage = base + value_tile % kStages * Layout::stage;
      const int value = value_tile * kTile, columns = p.value_dim - value;
      if (!kTwoGroups || group == 0) {
        copy_tile(stage + Layout::d_o, do_rows + value, d.d_o.token, c.rows, columns, thread);
      }
      if (!kTwoGroups || group == 1) {
        copy_tile(stage + Layout::v, row_of<__nv_bfloat16>(p.v, c, kv_head) + value, p.v.token, c.rows, columns,
                  thread);
      }
      const __nv_bfloat16* states =
          static_cast<const __nv_bfloat16*>(p.states) + (kv_at * p.key_dim + channel) * p.value_dim;
      copy_tile(stage + Layout::h + group * kTileBytes, states + value, p.value_dim, p.key_dim - channel, columns,
                thread);
      if (first) {
        copy_image(stage + Layout::dh + group * kTileBytes,
                   w.state_gradients + (kv_tile * value_tiles + value_tile) * kTileBytes, thread);
      }
    }
    ptx::copy_async_commit();
  };
  const auto load_k = [&] { copy_image(k_tiles + group * kTileBytes, w.gated_k + kv_tile * kTileBytes, thread); };
  if constexpr (Plan::makes_dv) {
    load_k();
    if (group == 0) copy_image(base + Layout::scores, w.scores + kv_at * p.group * kTileBytes, thread);
  }

  Accumulator dq, dk, pairs;
  clear(dk);
  float2 dg[16];                // of rows 16 warp + i; not held while products run
  Aside<float2, 16> dg_so_far;  // of the query heads done
  float crossing = 0.0f;        // constant gates: this thread's part of dg, see constant_gate.cuh
  float through = 0.0f;         // sum over values of h dh^: half of key channel thread / 2

  // A value tile's part of all sums: of dq and, with kKeys, dk; of the pairs; and its dv.
  const auto add_value_tile = [&]<bool kKeys, bool kDv, bool kPairs>(int value_tile) {
    char* stage_memory = shared + value_tile % kStages * Layout::stage;
    const std::uint32_t stage = ptx::shared_address(stage_memory), d_o = stage + Layout::d_o, v = stage + Layout::v;
    Accumulator dv;
    Core::begin(dq, dk, pairs);
    const int own_tile = group * kTileBytes;
    Core::template product<k_inner, k_inner>(dq, d_o, stage + Layout::h + own_tile, thread);
    if constexpr (kKeys) Core::template product<k_inner, k_inner>(dk, v, stage + Layout::dh + own_tile, thread);
    if constexpr (kPairs) Core::template product<k_inner, k_inner>(pairs, d_o, v, thread);
    if constexpr (kDv) {
      Core::template product<k_inner, k_outer, true>(dv, base + Layout::scores, d_o, thread);
#pragma unroll
      for (int t = 0; t < kGroups; ++t) {
        Core::template product<k_inner, k_outer>(dv, k_tiles + t * kTileBytes, stage + Layout::dh + t * kTileBytes,
                                                 thread);
      }
    }
    if constexpr (kKeys) {
      through += dot_of_rows(stage_memory + Layout::h + own_tile, stage_memory + Layout::dh + own_tile, thread);
    }
    if constexpr (kDv) {
      Core::finish(dq, dk, pairs, dv);
      const int value = value_tile * kTile, columns = p.value_dim - value;
      char* out = shared + Layout::out + group * kTileBytes;
      for (int h = 1; h < p.group; ++h) {  // of the other query heads: scores from memory, do through `out`
        const int head = kv_head * p.group + h;
        const char* image = w.scores + (chunk * p.heads * p.group + head) * kTileBytes;
        std::uint32_t scores[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          scores[i] = *reinterpret_cast<const std::uint32_t*>(
              image + element_offset(row_of_element(thread, 2 * i), column_of_element(thread, 2 * i)));
        }
        copy_tile(ptx::shared_address(out), row_of<__nv_bfloat16>(d.d_o, c, head) + value, d.d_o.token, c.rows, columns,
                  thread);
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        Core::publish();
        group_barrier(group);
        Core::begin(dv, scores);
        Core::template product<k_outer>(dv, scores, ptx::shared_address(out), thread);
        Core::finish(dv);
        group_barrier(group);
      }
      if (d.dv.data != nullptr) {
        store_matrix(row_of<__nv_bfloat16>(d.dv, c, kv_head) + value, d.dv.token, c.rows, columns, out, dv, thread);
      }
    } else {
      Core::finish(dq, dk, pairs);
    }
  };

  const bool steep = w.steep[kv_tile];
  char* k = shared + Layout::k + group * kTileBytes;
  char *q = shared + group * Layout::group + Layout::q, *a = q - Layout::q + Layout::a,
       *gates = a - Layout::a + Layout::gates;
  float* dump = reinterpret_cast<float*>(shared + group * Layout::group + Layout::dump);
  const auto parts_at = [&](int offset) -> ColumnParts& {
    return *reinterpret_cast<ColumnParts*>(shared + offset + group * static_cast<int>(sizeof(ColumnParts)));
  };
  ColumnParts &quarters = parts_at(Layout::quarters), &inner = parts_at(Layout::inner),
              &suffix = parts_at(Layout::suffix);
  float* beyond = reinterpret_cast<float*>(shared + Layout::beyond) + group * kTile;
  float* row_sums = reinterpret_cast<float*>(shared + Layout::row_sums) + group * kTile;

#pragma unroll 1
  for (int h = 0; h < p.group; ++h) {
    const int head = kv_head * p.group + h;
    first = h == 0;
    do_rows = row_of<__nv_bfloat16>(d.d_o, c, head);
    clear(dq);
    clear(pairs);
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) load(i);
#pragma unroll 1
    for (int value_tile = 0; value_tile < value_tiles; ++value_tile) {
      ptx::copy_async_wait<kStages - 2>();
      Core::publish();
      __syncthreads();
      load(value_tile + kStages - 1);
      // Of two groups one makes dv and the other the pairs.
      const bool one_of_two = (value_tile & 1) == group;
      if constexpr (!kTwoGroups) {
        first ? add_value_tile.template operator()<true, Plan::makes_dv, true>(value_tile)
              : add_value_tile.template operator()<false, false, true>(value_tile);
      } else if (one_of_two) {
        first ? add_value_tile.template operator()<true, true, false>(value_tile)
              : add_value_tile.template operator()<false, false, false>(value_tile);
      } else {
        first ? add_value_tile.template operator()<true, false, true>(value_tile)
              : add_value_tile.template operator()<false, false, true>(value_tile);
      }
    }
    __syncthreads();

    // The pairs inside the chunk: [query][key].
    if constexpr (kTwoGroups) {
      put_rows(dump, pairs, thread);
      __syncthreads();
      add_rows(pairs, reinterpret_cast<const float*>(shared + (1 - group) * Layout::group + Layout::dump), thread);
      __syncthreads();
    }
    copy_image(ptx::shared_address(q), w.gated_q + ((chunk * p.heads * p.group + head) * key_tiles + tile) * kTileBytes,
               thread);
    if (!Plan::makes_dv) load_k();
    copy_gates<kGate>(gates, p, c, kv_head, channel, thread);
    ptx::copy_async_commit();
#pragma unroll
    for (int i = 0; i < 32; ++i) pairs[i] = row_of_element(thread, i) >= column_of_element(thread, i) ? pairs[i] : 0.0f;
    put_tile(a, pairs, thread);
    ptx::copy_async_wait<0>();
    Core::publish();
    group_barrier(group);
    sum_quarters<kGate>(quarters, gates, thread);
    if (first) {
      sum_beyond(inner, k, dk, thread);
      through += __shfl_xor_sync(0xffffffffu, through, 1);
      if ((thread & 1) == 0) {
        const float factor = steep ? ptx::exp2(w.decay[kv_tile * kTile + (thread >> 1)]) : 1.0f;
        beyond[thread >> 1] = through * factor;
        if constexpr (kGate == GateTile::token) crossing += static_cast<float>(c.rows) * through * factor;
      }
    }
    if constexpr (kGate == GateTile::token) {
      if (p.gate == GateKind::constant) {
        crossing += weighted_dot(q, dq, thread, [](int r) { return static_cast<float>(r + 1); });
        if (first) {
          crossing += weighted_dot(k, dk, thread, [&](int r) { return static_cast<float>(c.rows - 1 - r); });
        }
      }
    }
    if (!steep) {
      std::uint32_t operand[16];
      load_operand(operand, ptx::shared_address(a), thread);
      Core::begin(operand, dq, dk);
      Core::template product<k_outer>(dq, operand, ptx::shared_address(k), thread);
      Core::template product<k_outer, k_outer>(dk, ptx::shared_address(a), ptx::shared_address(q), thread);
      Core::finish(dq, dk);
      group_barrier(group);
    } else {
      group_barrier(group);
      copy_tile(ptx::shared_address(q), row_of<__nv_bfloat16>(p.q, c, head) + channel, p.q.token, c.rows,
                p.key_dim - channel, thread);
      copy_tile(ptx::shared_address(k), row_of<__nv_bfloat16>(p.k, c, kv_head) + channel, p.k.token, c.rows,
                p.key_dim - channel, thread);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      group_barrier(group);
      Aside queries(dq), keys(dk);
      finish_steep<kGate>(queries.kept, keys.kept, ptx::shared_address(q), ptx::shared_address(k), a,
                          ptx::shared_address(a) - Layout::a + Layout::x, dump, gates, quarters, p.scale, first, group,
                          thread);
      queries.restore(dq);
      keys.restore(dk);
    }

    // dq, and its part of dg.
    if (first) {
#pragma unroll
      for (int i = 0; i < 16; ++i) dg[i] = make_float2(0.0f, 0.0f);
    } else {
      dg_so_far.restore(dg);
    }
    put_rows(dump, dq, thread);
    group_barrier(group);
    const float2 before = sum_before(quarters, warp, lane);
    float2 b = before;
    RowWalk<__nv_bfloat16> dq_walk(d.dq, c, head, channel + 2 * lane, 16 * warp);
    const int rows_inside = channel + 2 * lane < p.key_dim ? c.rows - 16 * warp : 0,
              dq_inside = d.dq.data ? rows_inside : 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = 16 * warp + i;
      const float2 g = gate_at<kGate>(gates, r, lane);
      b.x += g.x;
      b.y += g.y;
      const float2 x = *reinterpret_cast<const float2*>(dump + r * kDumpRow + 2 * lane);
      const float2 y = ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(q + element_offset(r, 2 * lane)));
      const float q_scale = steep ? p.scale : 1.0f;
      dg[i].x += y.x * q_scale * x.x;
      dg[i].y += y.y * q_scale * x.y;
      const float2 factor =
          steep ? make_float2(p.scale, p.scale) : make_float2(p.scale * ptx::exp2(b.x), p.scale * ptx::exp2(b.y));
      if (i < dq_inside) store_two(dq_walk.place, make_float2(x.x * factor.x, x.y * factor.y));
      dq_walk.step(1);
    }
    group_barrier(group);
    if (h + 1 < p.group) {
      dg_so_far.put(dg);
    } else {
      // dk, and its part of dg.
      put_rows(dump, dk, thread);
      group_barrier(group);
      float2 sum = make_float2(0.0f, 0.0f);
      b = before;
      RowWalk<__nv_bfloat16> dk_walk(d.dk, c, kv_head, channel + 2 * lane, 16 * warp);
      const int dk_inside = d.dk.data ? rows_inside : 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = 16 * warp + i;
        const float2 g = gate_at<kGate>(gates, r, lane);
        b.x += g.x;
        b.y += g.y;
        const float2 x = *reinterpret_cast<const float2*>(dump + r * kDumpRow + 2 * lane);
        const float2 y = ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(k + element_offset(r, 2 * lane)));
        dg[i].x -= y.x * x.x;
        dg[i].y -= y.y * x.y;
        sum.x += dg[i].x;
        sum.y += dg[i].y;
        const float2 factor = steep ? make_float2(1.0f, 1.0f) : make_float2(ptx::exp2(-b.x), ptx::exp2(-b.y));
        if (i < dk_inside) store_two(dk_walk.place, make_float2(x.x * factor.x, x.y * factor.y));
        dk_walk.step(1);
      }
      if (kGate == GateTile::token && p.gate == GateKind::constant) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          crossing += __shfl_xor_sync(0xffffffffu, crossing, distance);
        }
        if (lane == 0) row_sums[warp] = crossing;
        group_barrier(group);
        if (thread == 0) {
          w.gate_parts[(tile * p.sequences.most_chunks + chunk) * p.heads + kv_head] =
              row_sums[0] + row_sums[1] + row_sums[2] + row_sums[3];
        }
      } else if constexpr (kGate != GateTile::none) {
        // dg: sums from the chunk's end back.
        *reinterpret_cast<float2*>(&suffix[warp][2 * lane]) = sum;
        group_barrier(group);
        float2 run = *reinterpret_cast<const float2*>(beyond + 2 * lane);
#pragma unroll
        for (int other = 3; other >= 0; --other) {
          const float2 x = *reinterpret_cast<const float2*>(&inner[other][2 * lane]);
          const float2 y = *reinterpret_cast<const float2*>(&suffix[other][2 * lane]);
          run.x += x.x + (other > warp ? y.x : 0.0f);
          run.y += x.y + (other > warp ? y.y : 0.0f);
        }
        using Gate = std::conditional_t<kGate == GateTile::wide, float, __nv_bfloat16>;
        RowWalk<Gate> dg_walk(d.dg, c, kv_head, channel + 2 * lane, 16 * warp + 15);
        const int dg_inside = d.dg.data ? rows_inside : 0;
#pragma unroll
        for (int i = 15; i >= 0; --i) {
          const int r = 16 * warp + i;
          run.x += dg[i].x;
          run.y += dg[i].y;
          if constexpr (kGate == GateTile::token) {
            float x = run.x + run.y;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
            if (lane == 0) row_sums[r] = x;
          } else {
            if (i < dg_inside) store_two(dg_walk.place, run);
            dg_walk.step(-1);
          }
        }
        if constexpr (kGate == GateTile::token) {
          group_barrier(group);
          const std::int64_t tokens =
              p.sequences.cu_seqlens ? p.sequences.length : p.sequences.count * p.sequences.length;
          const std::int64_t token = (p.sequences.cu_seqlens ? 0 : c.batch * p.sequences.length) + c.token;
          if (thread < c.rows) {
            w.gate_parts[(tile * tokens + token + thread) * p.heads + kv_head] = row_sums[thread];
          }
        }
      }
      group_barrier(group);
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

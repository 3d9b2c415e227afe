// dq, dk and dg of a chunk, for one tile of 64 key channels, chunk by chunk in parallel. Design, bytes and FLOPs:
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
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kDumpRow = kTile + 8;  // floats of a row: no bank conflicts for accumulator writes and row reads

template <class Core>
struct KeysShared {  // offsets; the epilogue overlays the stages
  // Rows of both chunks are asked for a step ahead; states, which no other block has brought to the L2, two where the
  // block has the memory for it. On mma.sync one, so that it stays below the 99 KiB of capability 8.6 and 8.9.
  static constexpr int states_ahead = std::is_same_v<Core, TensorCore90> ? 2 : 1;
  static constexpr int d_o = 0, v = kTileBytes, other = 2 * kTileBytes, rows = 3 * kTileBytes, rows_stages = 2;
  static constexpr int h = 0, dh = kTileBytes, states = 2 * kTileBytes, states_stages = states_ahead + 1;
  static constexpr int stages = rows_stages * rows + states_stages * states;
  static constexpr int rows_of(int tile) { return tile % rows_stages * rows; }
  static constexpr int states_of(int tile) { return rows_stages * rows + tile % states_stages * states; }
  static constexpr int q = 0, k = kTileBytes, a = 2 * kTileBytes, other_image = 3 * kTileBytes, dump = 4 * kTileBytes;
  static constexpr int x = dump + kTile * kDumpRow * 4;  // of steep tiles
  static constexpr int gates = x + kTileBytes;
  static constexpr int small(GateTile gate) {
    return stages > gates + gate_bytes(gate) ? stages : gates + gate_bytes(gate);
  }
  // quarters, sums from beyond by keys and by the other chunk, suffix sums; row sums, beyond, decays of both chunks
  static constexpr int total(GateTile gate) { return small(gate) + 4 * sizeof(ColumnParts) + 4 * kTile * 4; }
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

// Columns' sums over the chunk of a tile times an accumulator, by warp; added to what stands there where `adds`.
__device__ __forceinline__ void sum_beyond(ColumnParts& parts, const char* k, const Accumulator& dk, int thread,
                                           bool adds = false) {
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
    if (lane < 4) {
      float2& sum = *reinterpret_cast<float2*>(&parts[warp][8 * j + in_block]);
      sum = adds ? make_float2(sum.x + x, sum.y + y) : make_float2(x, y);
    }
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

// A steep tile: what dq and dk, 32 floats a thread, have from beyond the chunk gets its factors (dk's when `first`),
// and the pairs inside come to it. q, k: as loaded; a: [query][key], zero above the diagonal; factors: [64][kDumpRow].
template <GateTile kGate>
static __device__ __noinline__ void finish_steep(float* dq_kept, float* dk_kept, std::uint32_t q, std::uint32_t k,
                                                 char* a, std::uint32_t x, float* factors, const char* gates,
                                                 const ColumnParts& quarters, float scale, bool first, int thread) {
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
  const auto power = [](float2 sum) { return make_float2(ptx::exp2(sum.x), ptx::exp2(sum.y)); };
  __syncthreads();
  walk_up(columns, kTile, warp, [&](int row, float2 sum) { put_factor(row, power(sum)); });
  // a on both sides of the diagonal: a token is a query at some levels and a key at others.
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int query = row_of_element(thread, i), key = column_of_element(thread, i);
    const auto place = [&](int r, int c) { return reinterpret_cast<std::uint16_t*>(a + element_offset(r, c)); };
    if (query > key) *place(key, query) = *place(query, key);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 32; ++i) dq[i] *= factor(i);
  __syncthreads();
  walk_down(columns, kTile, warp, [&](int row, float2 sum) { put_factor(row, power(sum)); });
  __syncthreads();
  if (first) {
#pragma unroll
    for (int i = 0; i < 32; ++i) dk[i] *= factor(i);
  }
  std::uint32_t operand[16];
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t r[4];
    TensorCore80::load_a<Stored::k_inner>(r, ptx::shared_address(a), k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[4 * k16 + i] = r[i];
  }
  const auto itself = [](int row, int column) { return row == column; };
  Accumulator d;
  add_masked_product(dq, operand, k, thread, itself);
  clear(d);
  add_masked_product(d, operand, q, thread, itself);
#pragma unroll
  for (int i = 0; i < 32; ++i) dk[i] += scale * d[i];
#pragma unroll 1
  for (int size = kTile / 2; size > 0; size /= 2) {
    __syncthreads();
    put_level(x, q, k, columns, size, warp, lane, put_factor);
    __syncthreads();
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
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    dq_kept[i] = dq[i];
    dk_kept[i] = dk[i];
  }
}

// Grid: chunks x G x key tiles, innermost last, so that what neighbours share is in the cache.
template <class Core, GateTile kGate>
__device__ void make_dq_dk_dg(const Params& p, const BackwardWorkspace& w, const Gradients& d, char* shared) {
  using Layout = KeysShared<Core>;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  const int key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const int kv_head = static_cast<int>(blockIdx.x / key_tiles % p.heads),
            key_tile = static_cast<int>(blockIdx.x % key_tiles);
  const int channel = key_tile * kTile;
  const std::int64_t chunk = blockIdx.x / key_tiles / p.heads;
  const std::int64_t n = sequence_of_chunk(p.sequences, chunk);
  if (n < 0) {
    if (kGate == GateTile::token && p.gate == GateKind::constant && threadIdx.x == 0) {
      w.gate_parts[(key_tile * p.sequences.most_chunks + chunk) * p.heads + kv_head] = 0.0f;
    }
    return;
  }
  const Span span = span_of(p.sequences, n);
  const int index = static_cast<int>(chunk - span.chunk_begin);
  const bool late = index % 2 == 1;
  const Chunk c = chunk_of(span, index),
              o = chunk_of(span, index ^ 1);  // o: the other, without rows where there is none
  const int other_rows = max(o.rows, 0);
  // Numbers of this chunk and the other, worked out anew: registers are too few to hold them while products run.
  const auto own_chunk = [&] { return static_cast<std::int64_t>(fresh_block() / key_tiles / p.heads); };
  const auto other_chunk = [&] { return own_chunk() + (late ? -1 : 1); };
  const auto image_at = [&](std::int64_t of_chunk) { return (of_chunk * p.heads + kv_head) * key_tiles + key_tile; };
  char *q = shared + Layout::q, *k = shared + Layout::k, *a = shared + Layout::a, *gates = shared + Layout::gates;
  char* other_image = shared + Layout::other_image;
  float* dump = reinterpret_cast<float*>(shared + Layout::dump);
  ColumnParts* parts = reinterpret_cast<ColumnParts*>(shared + Layout::small(kGate));
  ColumnParts &quarters = parts[0], &by_keys = parts[1], &by_other = parts[2], &suffix = parts[3];
  float *beyond = reinterpret_cast<float*>(parts + 4), *row_sums = beyond + kTile, *decays = row_sums + kTile,
        *other_decays = decays + kTile;
  float decay = 1.0f;
  if (const int thread = fresh_thread(); thread < kTile) {
    decays[thread] = decay = w.prepared.decay[image_at(own_chunk()) * kTile + thread];
    other_decays[thread] = other_rows > 0 ? w.prepared.decay[image_at(other_chunk()) * kTile + thread] : 1.0f;
  }
  const bool steep = __syncthreads_or(decay < ptx::exp2(-kSteep));
  const auto scale_columns = [&](Accumulator& x, const float* factors) {
    if constexpr (kGate == GateTile::none) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] *= factors[column_of_element(fresh_thread(), i)];
  };

  const char *states, *state_gradients;
  {
    const auto tile_of = [&](int of_index) {
      return p.state_tile(p.state_slot(span.chunk_begin, n, of_index), kv_head, key_tile, 0);
    };
    states = static_cast<const char*>(p.states) + tile_of(index & ~1);
    state_gradients = w.state_gradients + tile_of(other_rows > 0 ? index | 1 : index);
  }
  const __nv_bfloat16* v_rows = row_of<__nv_bfloat16>(p.v, c, kv_head);
  const __nv_bfloat16 *do_rows = nullptr, *their_rows = nullptr;  // theirs: v of the early chunk, or do of the late one
  const int their_stride = static_cast<int>(late ? p.v.token : d.d_o.token);
  bool first = true;
  const auto load_rows = [&](int tile) {
    if (tile < value_tiles) {
      const int thread = fresh_thread(), value = tile * kTile, inside = p.value_dim - value;
      const std::uint32_t stage = ptx::shared_address(shared) + Layout::rows_of(tile);
      copy_tile(stage + Layout::d_o, do_rows + value, d.d_o.token, c.rows, inside, thread);
      copy_tile(stage + Layout::v, v_rows + value, p.v.token, c.rows, inside, thread);
      copy_tile(stage + Layout::other, their_rows + value, their_stride, other_rows, inside, thread);
    }
    ptx::copy_async_commit();
  };
  const auto load_states = [&](int tile) {
    if (tile < value_tiles) {
      const int thread = fresh_thread();
      const std::uint32_t stage = ptx::shared_address(shared) + Layout::states_of(tile);
      copy_image(stage + Layout::h, states + tile * kImageBytes, thread);
      copy_image(stage + Layout::dh, state_gradients + tile * kImageBytes, thread);
    }
    ptx::copy_async_commit();
  };

  Accumulator dk;
  float2 dg[16];                // of rows 16 warp + i; not held while products run
  Aside<float2, 16> dg_so_far;  // of the query heads done
  Aside<float, 32> dk_so_far;
  float crossing = 0.0f;  // constant gates: this thread's part of dg, see backward/constant_gate.cuh
  float through = 0.0f;   // sum over values of h dh: half of key channel thread / 2

  for (int h = 0; h < p.group; ++h) {
    const int head = kv_head * p.group + h;
    first = h == 0;
    do_rows = row_of<__nv_bfloat16>(d.d_o, c, head);
    their_rows = late ? row_of<__nv_bfloat16>(p.v, o, kv_head) : row_of<__nv_bfloat16>(d.d_o, o, head);
    // theirs_through: late dh v', early h do'
    Accumulator dq, pairs, between, theirs_through;
    clear(dq);
    clear(dk);
    clear(pairs);
    clear(between);
    clear(theirs_through);
    load_states(0);
    load_rows(0);
#pragma unroll
    for (int tile = 1; tile < Layout::states_ahead; ++tile) load_states(tile);
    for (int tile = 0; tile < value_tiles; ++tile) {
      ptx::copy_async_wait<Layout::states_ahead - 1>();
      Core::publish();
      __syncthreads();
      load_rows(tile + 1);
      load_states(tile + Layout::states_ahead);
      const std::uint32_t rows = ptx::shared_address(shared) + Layout::rows_of(tile),
                          at_states = ptx::shared_address(shared) + Layout::states_of(tile);
      const std::uint32_t own_d_o = rows + Layout::d_o, own_v = rows + Layout::v, theirs = rows + Layout::other,
                          state = at_states + Layout::h, gradient = at_states + Layout::dh;
      Core::begin(dq, dk, pairs, between, theirs_through);
      Core::template product<k_inner, k_inner>(dq, own_d_o, state, fresh_thread());
      Core::template product<k_inner, k_inner>(pairs, own_d_o, own_v, fresh_thread());
      Core::template product<k_inner, k_inner>(dk, own_v, gradient, fresh_thread());
      Core::template product<k_inner, k_inner>(between, late ? own_d_o : own_v, theirs, fresh_thread());
      if constexpr (kGate != GateTile::none) {
        Core::template product<k_inner, k_inner>(theirs_through, theirs, late ? gradient : state, fresh_thread());
        if (first) {
          const char* at = shared + Layout::states_of(tile);
          through += dot_of_rows(at + Layout::h, at + Layout::dh, fresh_thread());
        }
      }
      Core::finish(dq, dk, pairs, between, theirs_through);
    }
    __syncthreads();

    // The pairs inside the chunk, and between the two.
    const int thread = fresh_thread(), warp = thread >> 5, lane = thread & 31;
    const std::int64_t query_image = (own_chunk() * p.heads * p.group + head) * key_tiles + key_tile;
    copy_image(ptx::shared_address(q), w.prepared.q + query_image * kImageBytes, thread);
    copy_image(ptx::shared_address(k), w.prepared.k + image_at(own_chunk()) * kImageBytes, thread);
    if (other_rows > 0) {
      const char* their_image = late ? w.prepared.k + image_at(other_chunk()) * kImageBytes
                                     : w.prepared.q + (query_image + p.heads * p.group * key_tiles) * kImageBytes;
      copy_image(ptx::shared_address(other_image), their_image, thread);
    }
    copy_gates<kGate>(gates, p, c, kv_head, channel, thread);
    ptx::copy_async_commit();
    const int row = 16 * warp + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int query = row + 8 * ((i >> 1) & 1), key = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
      pairs[i] = query >= key ? pairs[i] : 0.0f;
    }
    put_tile(a, pairs, thread);
    ptx::copy_async_wait<0>();
    Core::publish();
    __syncthreads();
    sum_quarters<kGate>(quarters, gates, thread);
    if (!first) clear(dk);  // dh v is there already
    late ? scale_columns(dq, other_decays) : scale_columns(dk, other_decays);
    if constexpr (kGate == GateTile::token) {
      if (p.gate == GateKind::constant) {
        const auto steps = [](int x) { return static_cast<float>(x); };
        crossing += weighted_dot(q, dq, thread, [&](int r) { return steps(r + 1 + (late ? other_rows : 0)); });
        if (first) {
          crossing +=
              weighted_dot(k, dk, thread, [&](int r) { return steps(c.rows - 1 - r + (late ? 0 : other_rows)); });
        }
      }
    }
    if (other_rows > 0) {
      if constexpr (kGate != GateTile::none) {
        if (!late || first) sum_beyond(by_other, other_image, theirs_through, thread, !first);
      }
      const auto add_between = [&](Accumulator& target) {
        std::uint32_t operand[16];
        to_operand(operand, between);
        Core::begin(operand, target);
        Core::template product<k_outer>(target, operand, ptx::shared_address(other_image), thread);
        Core::finish(target);
      };
      late ? add_between(dq) : add_between(dk);
    }
    if constexpr (kGate != GateTile::none) {
      if (!late || first) sum_beyond(by_keys, k, dk, thread, !first);
      if (first) {
        through += __shfl_xor_sync(0xffffffffu, through, 1);
        if ((thread & 1) == 0) {
          beyond[thread >> 1] = through * decays[thread >> 1] * other_decays[thread >> 1];
          if (late || other_rows == 0) crossing += static_cast<float>(c.rows + other_rows) * beyond[thread >> 1];
        }
      }
    }
    if (!steep) {
      scale_columns(dq, decays);
      scale_columns(dk, decays);
      std::uint32_t operand[16];
      to_operand(operand, pairs);
      Core::begin(operand, dq, dk);
      Core::template product<k_outer>(dq, operand, ptx::shared_address(k), thread);
      Core::template product<k_outer, k_outer>(dk, ptx::shared_address(a), ptx::shared_address(q), thread);
      Core::finish(dq, dk);
      __syncthreads();
    } else {
      __syncthreads();
      copy_tile(ptx::shared_address(q), row_of<__nv_bfloat16>(p.q, c, head) + channel, p.q.token, c.rows,
                p.key_dim - channel, thread);
      copy_tile(ptx::shared_address(k), row_of<__nv_bfloat16>(p.k, c, kv_head) + channel, p.k.token, c.rows,
                p.key_dim - channel, thread);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      __syncthreads();
      Aside queries(dq), keys(dk);
      finish_steep<kGate>(queries.kept, keys.kept, ptx::shared_address(q), ptx::shared_address(k), a,
                          ptx::shared_address(shared + Layout::x), dump, gates, quarters, p.scale, true, thread);
      queries.restore(dq);
      keys.restore(dk);
    }
    if (!first) {
#pragma unroll
      for (int i = 0; i < 32; ++i) dk[i] += dk_so_far.kept[i];
    }
    if (h + 1 < p.group) dk_so_far.put(dk);

    // dq, and its part of dg.
    if (first) {
#pragma unroll
      for (int i = 0; i < 16; ++i) dg[i] = make_float2(0.0f, 0.0f);
    } else {
      dg_so_far.restore(dg);
    }
    put_rows(dump, dq, thread);
    __syncthreads();
    float2 b = sum_before(quarters, warp, lane);
    const float2 all = sum_before(quarters, 4, lane);
    RowWalk<__nv_bfloat16> dq_walk(d.dq, c, head, channel + 2 * lane, 16 * warp);
    const int dq_inside = d.dq.data && channel + 2 * lane < p.key_dim ? c.rows - 16 * warp : 0;
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
      const float2 factor = steep ? make_float2(p.scale, p.scale)
                                  : make_float2(p.scale * ptx::exp2(b.x - all.x), p.scale * ptx::exp2(b.y - all.y));
      if (i < dq_inside) store_two(dq_walk.place, make_float2(x.x * factor.x, x.y * factor.y));
      dq_walk.step(1);
    }
    if (h + 1 < p.group) dg_so_far.put(dg);
    __syncthreads();
  }

  // dk, and its part of dg.
  const int thread = fresh_thread(), warp = thread >> 5, lane = thread & 31;
  put_rows(dump, dk, thread);
  __syncthreads();
  float2 b = sum_before(quarters, warp, lane), sum = make_float2(0.0f, 0.0f);
  const float2 all = sum_before(quarters, 4, lane);
  const float2 grown = steep ? make_float2(1.0f, 1.0f) : make_float2(ptx::exp2(-all.x), ptx::exp2(-all.y));
  RowWalk<__nv_bfloat16> dk_walk(d.dk, c, kv_head, channel + 2 * lane, 16 * warp);
  const int rows_inside = channel + 2 * lane < p.key_dim ? c.rows - 16 * warp : 0,
            dk_inside = d.dk.data ? rows_inside : 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int r = 16 * warp + i;
    const float2 g = gate_at<kGate>(gates, r, lane);
    b.x += g.x;
    b.y += g.y;
    const float2 x = *reinterpret_cast<const float2*>(dump + r * kDumpRow + 2 * lane);
    const float2 y = ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(k + element_offset(r, 2 * lane)));
    dg[i].x = (dg[i].x - y.x * x.x) * grown.x;
    dg[i].y = (dg[i].y - y.y * x.y) * grown.y;
    sum.x += dg[i].x;
    sum.y += dg[i].y;
    const float2 factor = steep ? make_float2(1.0f, 1.0f) : make_float2(ptx::exp2(-b.x), ptx::exp2(-b.y));
    if (i < dk_inside) store_two(dk_walk.place, make_float2(x.x * factor.x, x.y * factor.y));
    dk_walk.step(1);
  }
  if constexpr (kGate == GateTile::none) return;
  if constexpr (kGate == GateTile::token) {
    if (p.gate == GateKind::constant) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) crossing += __shfl_xor_sync(0xffffffffu, crossing, distance);
      if (lane == 0) row_sums[warp] = crossing;
      __syncthreads();
      if (thread == 0) {
        w.gate_parts[(key_tile * p.sequences.most_chunks + own_chunk()) * p.heads + kv_head] =
            row_sums[0] + row_sums[1] + row_sums[2] + row_sums[3];
      }
      return;
    }
  }

  // dg: sums from the chunk's end back.
  *reinterpret_cast<float2*>(&suffix[warp][2 * lane]) = sum;
  __syncthreads();
  float2 run = *reinterpret_cast<const float2*>(beyond + 2 * lane);
  const float2 own_decay = *reinterpret_cast<const float2*>(decays + 2 * lane);
#pragma unroll
  for (int other = 3; other >= 0; --other) {
    const float2 x = *reinterpret_cast<const float2*>(&by_keys[other][2 * lane]);
    const float2 y = *reinterpret_cast<const float2*>(&suffix[other][2 * lane]);
    run.x += x.x + (other > warp ? y.x : 0.0f);
    run.y += x.y + (other > warp ? y.y : 0.0f);
    if (other_rows > 0) {
      const float2 z = *reinterpret_cast<const float2*>(&by_other[other][2 * lane]);
      run.x += own_decay.x * z.x;
      run.y += own_decay.y * z.y;
    }
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
    __syncthreads();
    const std::int64_t tokens = p.sequences.cu_seqlens ? p.sequences.length : p.sequences.count * p.sequences.length;
    const std::int64_t token = (p.sequences.cu_seqlens ? 0 : c.batch * p.sequences.length) + c.token;
    if (thread < c.rows) w.gate_parts[(key_tile * tokens + token + thread) * p.heads + kv_head] = row_sums[thread];
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

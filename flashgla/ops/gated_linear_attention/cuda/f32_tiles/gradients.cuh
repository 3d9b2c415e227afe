// dq, dk and dg in f32 tiles: a chunk and 64 key channels a block. With h the state before the chunk, dh the gradient
// after it, b and B = the sum of all as in f32_tiles/outputs.cuh, a_ij = do_i v_j for i >= j, else 0:
//     dq_i = scale 2^b_i (h do_i + sum_j a_ij k~_j)       dk_j = 2^-b_j (2^B dh v_j + sum_i a_ij q~_i)
//     dg_t = sum_{i>=t} (q_i dq_i - k_i dk_i) + 2^B sum_V h dh + sum_j k_j (dk_j's part through dh)
// As in backward/keys.cuh nothing is summed over more than the chunk, and q dq, k dk are q~ and k~ times what was
// multiplied with them. dg of a constant gate: backward/constant_gate.cuh, here in the same kernel.
//
// With gates over values what comes through the other side comes as images: do 2^(its gates), v 2^(later ones), a; and
// dg's part through both states has the other side's decay too. The same kernel then finds from the values' side, with
// q~, k^, p and both states transposed, o (for dg alone), dv and dgv.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/exact.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <int kParts, bool kGrouped>
struct GradientsShared {  // offsets; q, k, a and dq overlay the operands of the first products, dk overlays a
  static constexpr int d_o = 0, v = kSplitBytes<kParts>, h = 2 * v, dh = 3 * v;
  static constexpr int q = 0, k = v, a = 2 * v, dk = a, dq = 3 * v;
  static constexpr int sums = dq + kFloatTileBytes;  // of gates, or in steep tiles decays
  static_assert(sums + kFloatTileBytes >= 4 * v);
  // q dq - k dk: in dq's place where there is one query head.
  static constexpr int terms = kGrouped ? sums + kFloatTileBytes : dq;
  // totals, inner sums, suffix sums [4][64]; beyond, decay, row sums [64]
  static constexpr int parts = sums + (kGrouped ? 2 : 1) * kFloatTileBytes, total = parts + (3 * 4 + 3) * kTile * 4;
  static_assert(total == split_gradients_shared(kParts, kGrouped));
};

// What an accumulator's elements are multiplied by, of a split tile.
template <int kParts>
__device__ __forceinline__ auto two_of_split(std::uint32_t tile, int thread) {
  return [=](int i) { return two_of<kParts>(tile, row_of_element(thread, i), column_of_element(thread, i)); };
}
// Sums over the warp's rows of tile * a, by columns.
template <int kParts>
__device__ __forceinline__ void sum_columns(float* parts, std::uint32_t tile, const Accumulator& a, int thread) {
  const int lane = thread & 31;
  *reinterpret_cast<float2*>(parts + thread / 32 * kTile + 2 * lane) =
      sum_over_rows(a, lane, two_of_split<kParts>(tile, thread));
}
// Half of the product of rows thread / 2 of two tiles, times weight(column).
template <int kParts, class Weight>
__device__ __forceinline__ float half_dot(std::uint32_t a, std::uint32_t b, int thread, Weight weight) {
  float sum = 0.0f;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int piece = i + 4 * (thread & 1);
    const std::uint32_t at = tile_piece(thread >> 1, piece);
    float x[8], y[8];
    piece_of<kParts>(x, a, at);
    piece_of<kParts>(y, b, at);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += x[e] * y[e] * weight(8 * piece + e);
  }
  return sum;
}
// Of columns 2 lane and the next, over the warp's 16 rows, times weight(row).
template <int kParts, class Weight>
__device__ __forceinline__ float2 column_dots(std::uint32_t a, std::uint32_t b, int thread, Weight weight) {
  const int warp = thread >> 5, lane = thread & 31;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 4
  for (int row = 16 * warp; row < 16 * warp + 16; ++row) {
    const float2 x = two_of<kParts>(a, row, 2 * lane), y = two_of<kParts>(b, row, 2 * lane);
    sum.x += x.x * y.x * weight(row);
    sum.y += x.y * y.y * weight(row);
  }
  return sum;
}

// dg of constant gates: of tokens i and j every gate from j + 1 to i has the pair's part; see
// backward/constant_gate.cuh. dq and dk as they come through h and dh. Adds this thread's part.
template <class Kernel>
__device__ __forceinline__ void add_constant_gate(float& part, std::uint32_t q, std::uint32_t k, std::uint32_t a,
                                                  const Accumulator& dq, const Accumulator& dk, bool first, bool steep,
                                                  float gate, int rows, int thread) {
  using Core = typename Kernel::Core;
  constexpr int kParts = Kernel::parts;
  const int row = row_of_element(thread, 0);
  if (first) {
    const float2 of_rows = dot_rows(dk, two_of_split<kParts>(k, thread));
    part += static_cast<float>(rows - 1 - row) * of_rows.x + static_cast<float>(rows - 9 - row) * of_rows.y;
  }
  const auto weight = [&](int tokens) {
    return static_cast<float>(tokens) * (steep ? ptx::exp2(static_cast<float>(tokens) * gate) : 1.0f);
  };
  const float2 of_rows = dot_rows(dq, two_of_split<kParts>(q, thread));
  part += weight(row + 1) * of_rows.x + weight(row + 9) * of_rows.y;
  Accumulator scores;
  clear(scores);
  Core::begin(scores);
  add_product<Core, kParts, Stored::k_inner, Stored::k_inner, false, Loads::in_turn>(scores, q, k, thread);
  Core::finish(scores);
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int query = row_of_element(thread, i), key = column_of_element(thread, i);
    const float2 pair = two_of<kParts>(a, query, key);
    const float apart[2] = {static_cast<float>(query - key), static_cast<float>(query - key - 1)};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float score = steep ? scores[i + e] * ptx::exp2(apart[e] * gate) : scores[i + e];
      part += apart[e] > 0.0f ? apart[e] * (e == 0 ? pair.x : pair.y) * score : 0.0f;
    }
  }
}

// Tiles of floats and sums in shared memory.
template <class Layout>
struct GradientTiles {
  char* shared;
  float *dq = floats(Layout::dq), *dk = floats(Layout::dk), *terms = floats(Layout::terms),
        *sums = floats(Layout::sums);
  float *totals = floats(Layout::parts), *inner = totals + 4 * kTile, *suffix = inner + 4 * kTile;
  float *beyond = suffix + 4 * kTile, *decay = beyond + kTile, *row_sums = decay + kTile;
  __device__ __forceinline__ float* floats(int at) const { return reinterpret_cast<float*>(shared + at); }
};

// dg of a chunk's tokens from the terms, where it is wanted. term_sum: of the warp's rows, channels 2 lane and the
// next.
template <class Kernel, GatedSide kSide, class Layout>
__device__ __forceinline__ void put_gate_gradient(const Params& p, const SplitGradients& work,
                                                  const GradientTiles<Layout>& tiles, const Chunk& c, int kv_head,
                                                  int key_tile, float2 term_sum, bool steep) {
  using T = typename Kernel::Element;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, channel = key_tile * kTile;
  const bool by_token = kSide == GatedSide::only_keys && p.gate == GateKind::scalar;
  if (by_token ? work.gate_parts == nullptr : work.dg.data == nullptr) return;

  // dg: sums from the chunk's end back; nothing where the gate is shut.
  *reinterpret_cast<float2*>(tiles.suffix + warp * kTile + 2 * lane) = term_sum;
  __syncthreads();
  float2 run =
      kSide == GatedSide::values ? make_float2(0.0f, 0.0f) : *reinterpret_cast<const float2*>(tiles.beyond + 2 * lane);
#pragma unroll
  for (int w = 3; w >= 0; --w) {
    const float2 x = *reinterpret_cast<const float2*>(tiles.inner + w * kTile + 2 * lane);
    const float2 y = *reinterpret_cast<const float2*>(tiles.suffix + w * kTile + 2 * lane);
    run.x += x.x + (w > warp ? y.x : 0.0f);
    run.y += x.y + (w > warp ? y.y : 0.0f);
  }
  // put(row, dg)
  const auto run_back = [&](auto put) {
#pragma unroll 8
    for (int i = 15; i >= 0; --i) {
      const int r = 16 * warp + i;
      const float2 term = two_at(tiles.terms, r, 2 * lane);
      run.x += term.x;
      run.y += term.y;
      float2 open = run;
      if (steep) {
        const float2 decay = two_at(tiles.sums, r, 2 * lane);
        open = make_float2(decay.x == 0.0f ? 0.0f : run.x, decay.y == 0.0f ? 0.0f : run.y);
      }
      put(r, open);
    }
  };
  const auto store_rows_back = [&](auto type) {
    using Gate = typename decltype(type)::type;
    const Place<Gate> to(work.dg, c, kv_head, channel, p.key_dim);
    char* row = const_cast<char*>(to.data) + (16 * warp + 15) * to.stride;
    run_back([&](int r, float2 x) {
      if (r < c.rows) store_channels(to, row, 2 * lane, x);
      row -= to.stride;
    });
  };
  if (by_token) {
    run_back([&](int r, float2 open) {
      const float x = flashgla::cuda::warp_sum(open.x + open.y);
      if (lane == 0) tiles.row_sums[r] = x;
    });
  } else if (p.gate_dtype == DType::f32) {
    store_rows_back(std::type_identity<float>());
  } else {
    store_rows_back(std::type_identity<T>());
  }
  if (by_token) {
    __syncthreads();
    const std::int64_t token = key_tile * p.sequences.tokens() + c.batch * p.sequences.length + c.token + thread;
    if (thread < c.rows) work.gate_parts[token * p.heads + kv_head] = tiles.row_sums[thread];
  }
}

// Grid: chunks x G x key tiles, innermost last. p: the side's own (K: its channels, V: the other's).
template <class Kernel, bool kGrouped, GatedSide kSide>
__device__ __forceinline__ void make_split_gradients(const Params& p, const SplitGradients& work, char* shared) {
  using Core = typename Kernel::Core;
  using T = typename Kernel::Element;
  constexpr int kParts = Kernel::parts;
  using Layout = GradientsShared<kParts, kGrouped>;
  constexpr bool kLoop = kGrouped && (kParts == 3 || kSide == GatedSide::only_keys);  // of parts
  constexpr bool kAhead = !std::is_same_v<Core, TensorCore80>;  // q comes while the gates are summed
  constexpr bool kBoth = kSide != GatedSide::only_keys, kOverValues = kSide == GatedSide::values;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const int key_tile = static_cast<int>(blockIdx.x % key_tiles),
            kv_head = static_cast<int>(blockIdx.x / key_tiles % p.heads);
  const std::int64_t chunk = blockIdx.x / key_tiles / p.heads;
  const int channel = key_tile * kTile;
  const bool constant = !kBoth && p.gate == GateKind::constant;
  const auto put_chunk_part = [&](float part) {  // of constant gates
    const unsigned block = fresh_block();
    if (thread == 0) work.gate_parts[block % key_tiles * p.sequences.most_chunks * p.heads + block / key_tiles] = part;
  };
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) {
    if (constant && work.gate_parts != nullptr) put_chunk_part(0.0f);
    return;
  }
  const std::uint32_t base = ptx::shared_address(shared), q = base + Layout::q, k = base + Layout::k,
                      a = base + Layout::a;
  const GradientTiles<Layout> tiles{shared};
  float* other_decay = tiles.row_sums;
  // Worked out where they are used, with mma.sync.
  const auto chunk_now = [&] {
    return again<Core>(chunk, [&] { return static_cast<std::int64_t>(fresh_block() / key_tiles / p.heads); });
  };
  const auto here = [&] { return again<Core>(c, [&] { return Chunk{c.batch, anew(c.token), c.rows}; }); };

  Accumulator dk;
  clear(dk);
  float crossing = 0.0f;  // constant gates: this thread's part of dg
  // Found anew by each query head, the last one's count.
  bool steep;
  float2 term_sum;  // of the warp's rows, channels 2 lane and the next

  const int heads = kGrouped ? p.group : 1;
  for (int head_in_group = 0;; ++head_in_group) {
    const int head = kv_head * p.group + head_in_group;
    const bool first = head_in_group == 0, last = head_in_group + 1 == heads;
    float through = 0.0f;  // sum over values of h dh: half of key channel thread / 2
    float2 values_through =
        make_float2(0.0f, 0.0f);  // over values: sum over 16 keys, of value channels 2 lane and the next
    Accumulator dq, pairs;
    clear(dq);
    clear(pairs);
    const auto q_place = [&] { return Place<T>(p.q, here(), head, channel, p.key_dim); };
    const auto k_place = [&] { return Place<T>(p.k, here(), kv_head, channel, p.key_dim); };
    LoadedGates<T> loaded_gates;
    const auto scores = [&] {
      return work.other.scores + (chunk_now() * p.heads * p.group + head) * kSplitBytes<kParts>;
    };
#pragma unroll 1
    for (int tile = 0; tile < value_tiles; ++tile) {
      const std::int64_t kv_at = chunk_now() * p.heads + kv_head;
      const int own_tile =
          kBoth ? again<Core>(key_tile, [&] { return static_cast<int>(fresh_block() % key_tiles); }) : key_tile;
      const std::int64_t state = kOverValues ? (kv_at * value_tiles + tile) * key_tiles + own_tile
                                             : (kv_at * key_tiles + own_tile) * value_tiles + tile;
      const std::int64_t image = state * kSplitBytes<kParts>;
      Loaded<T> x, y;
      if constexpr (!kBoth) {
        load(x, Place<T>(work.d_o, c, head, tile * kTile, p.value_dim), thread);
        load(y, Place<T>(p.v, c, kv_head, tile * kTile, p.value_dim), thread);
      }
      if (tile + head_in_group > 0) __syncthreads();  // what lies there has been read
      copy_split<kParts>(base + Layout::h, work.states + image, thread);
      if (first) copy_split<kParts>(base + Layout::dh, work.state_gradients + image, thread);
      if constexpr (kBoth) {
        const std::int64_t query_at = (chunk_now() * p.heads * p.group + head) * value_tiles + tile,
                           key_at = kv_at * value_tiles + tile;
        copy_split<kParts>(base + Layout::d_o, work.other.q + query_at * kSplitBytes<kParts>, thread);
        if (first) {
          copy_split<kParts>(base + Layout::v, work.other.k + key_at * kSplitBytes<kParts>, thread);
          if (thread < 16) {
            ptx::copy_async_16(ptx::shared_address(other_decay + 4 * thread),
                               work.other.decay + key_at * kTile + 4 * thread);
          }
        }
      }
      ptx::copy_async_commit();
      if constexpr (!kBoth) {
        put_loaded<kParts>(base + Layout::d_o, x, thread);
        put_loaded<kParts>(base + Layout::v, y, thread);
      }
      if (tile + 1 == value_tiles) {
        fetch_ahead(q_place(), thread);
        fetch_ahead(k_place(), thread);
        loaded_gates.fetch_ahead(p, here(), kv_head, channel, thread);
        if constexpr (kBoth) fetch_split_ahead<kParts>(scores(), thread);
      } else {
        const std::int64_t next = image + (kOverValues ? key_tiles : 1) * kSplitBytes<kParts>;
        fetch_split_ahead<kParts>(work.states + next, thread);
        if (first) fetch_split_ahead<kParts>(work.state_gradients + next, thread);
      }
      ptx::copy_async_wait<0>();
      Core::publish();
      __syncthreads();
      constexpr Stored inner_k = Stored::k_inner, state_k = kOverValues ? Stored::k_outer : Stored::k_inner;
      const std::uint32_t d_o = base + Layout::d_o, v = base + Layout::v, h = base + Layout::h, dh = base + Layout::dh;
      const auto add_products = [&](auto with_dk, auto&... sums_of_products) {
        Core::begin(sums_of_products...);
        add_product<Core, kParts, inner_k, state_k, kLoop, Loads::in_turn>(dq, d_o, h, thread);
        if constexpr (!kBoth) add_product<Core, kParts, inner_k, inner_k, kLoop, Loads::in_turn>(pairs, d_o, v, thread);
        if constexpr (decltype(with_dk)::value) {
          add_product<Core, kParts, inner_k, state_k, kLoop, Loads::in_turn>(dk, v, dh, thread);
          const auto weight = [&](int of_other) { return kBoth ? other_decay[of_other] : 1.0f; };
          if constexpr (kOverValues) {
            const float2 dots = column_dots<kParts>(h, dh, thread, weight);
            values_through = make_float2(values_through.x + dots.x, values_through.y + dots.y);
          } else {
            through += half_dot<kParts>(h, dh, thread, weight);
          }
        }
        Core::finish(sums_of_products...);
      };
      if constexpr (kBoth) {
        first ? add_products(std::true_type(), dq, dk) : add_products(std::false_type(), dq);
      } else {
        first ? add_products(std::true_type(), dq, pairs, dk) : add_products(std::false_type(), dq, pairs);
      }
    }

    // The pairs inside the chunk.
    loaded_gates.load(p, here(), kv_head, channel, thread_again<Core>(thread));
    __syncthreads();  // the first products' operands have been read
    if constexpr (kBoth) {
      copy_split<kParts>(a, scores(), thread_again<Core>(thread));
      ptx::copy_async_commit();
    } else {
      keep_pairs(pairs, false, thread);
      put_split<Core, kParts>(a, pairs, thread);
    }
    {
      const int own = fresh_thread();
      Loaded<T> loaded_q, loaded_k;
      load(loaded_k, k_place(), own);
      float g[kRowsEach][8], all[8];
      loaded_gates.take(g, p);
      if constexpr (kAhead) load(loaded_q, q_place(), own);
      sum_gates<false>(g, all, tiles.totals, own);
      if constexpr (!kAhead) load(loaded_q, q_place(), own);
      steep = is_steep(all);
      put_decays(tiles.decay, all, own);
      put_loaded<kParts>(k, loaded_k, own, [&](int i, int e) { return steep ? 1.0f : ptx::exp2(-g[i][e]); });
      put_loaded<kParts>(q, loaded_q, own,
                         [&](int i, int e) { return steep ? p.scale : p.scale * ptx::exp2(g[i][e]); });
      if (steep) {
        loaded_gates.load(p, c, kv_head, channel, own);
        loaded_gates.take_decays(g, p);
      }
      put_floats(tiles.sums, g, own);
    }
    if constexpr (kBoth) ptx::copy_async_wait<0>();
    Core::publish();
    __syncthreads();
    if (first) {
      if (steep) {
        const Aside aside(dq);
        by_rows(dk, tiles.dq, thread, [&] { scale_exact_dk(tiles.dq, tiles.sums); });
        aside.restore(dq);
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) dk[i] *= tiles.decay[column_of_element(thread, i)];
      }
      if (!constant) sum_columns<kParts>(tiles.inner, k, dk, fresh_thread());
      if constexpr (kOverValues) {
        __syncwarp();
        const int column = 2 * (thread_shuffled<Core>(fresh_thread()) & 31);
        float2& sum = *reinterpret_cast<float2*>(tiles.inner + warp * kTile + column);
        sum = make_float2(sum.x + values_through.x * tiles.decay[column],
                          sum.y + values_through.y * tiles.decay[column + 1]);
      } else {
        through += __shfl_xor_sync(0xffffffffu, through, 1);
        if ((thread & 1) == 0) {
          tiles.beyond[thread >> 1] = through * tiles.decay[thread >> 1];
          crossing = static_cast<float>(c.rows) * tiles.beyond[thread >> 1];
        }
      }
    }
    if (constant) {
      add_constant_gate<Kernel>(crossing, q, k, a, dq, dk, first, steep, key_gate(p, c.batch, c.token, kv_head, 0),
                                c.rows, thread_again<Core>(thread));
    }
    if (!steep) {
      Core::begin(dq, dk);
      add_product<Core, kParts, Stored::k_inner, Stored::k_outer, kLoop, Loads::in_turn>(dq, a, k, thread);
      add_product<Core, kParts, Stored::k_outer, Stored::k_outer, kLoop, Loads::in_turn>(dk, a, q, thread);
      Core::finish(dq, dk);
    } else {
      __syncthreads();
      const Aside aside(dq);
      by_rows(dk, tiles.dq, thread, [&] { add_exact_dk_pairs<kParts>(tiles.dq, a, q, tiles.sums); });
      aside.restore(dq);
    }
    put_floats(tiles.dq, dq, thread);
    __syncthreads();  // and a has been read
    if (steep) {
      Aside aside(dk);
      finish_exact_dq<kParts>(tiles.dq, a, k, tiles.sums);
      aside.restore(dk);
      __syncthreads();
    }
    if (last) {
      put_floats(tiles.dk, dk, thread);
      __syncthreads();
    }

    // Out by rows: a warp goes down its 16, two channels a lane.
    const Place<T> dq_place(work.dq, here(), head, channel, p.key_dim),
        dk_place(work.dk, here(), kv_head, channel, p.key_dim);
    term_sum = make_float2(0.0f, 0.0f);
    char *dq_row = const_cast<char*>(dq_place.data) + 16 * warp * dq_place.stride,
         *dk_row = const_cast<char*>(dk_place.data) + 16 * warp * dk_place.stride;
#pragma unroll 8
    for (int i = 0; i < 16; ++i) {
      const int r = 16 * warp + i;
      const float2 b = two_at(tiles.sums, r, 2 * lane), x = two_at(tiles.dq, r, 2 * lane),
                   y = two_of<kParts>(q, r, 2 * lane);
      float2 term = make_float2(y.x * x.x, y.y * x.y);
      const float2 up =
          steep ? make_float2(p.scale, p.scale) : make_float2(p.scale * ptx::exp2(b.x), p.scale * ptx::exp2(b.y));
      if (work.dq.data != nullptr && r < c.rows)
        store_channels(dq_place, dq_row, 2 * lane, make_float2(x.x * up.x, x.y * up.y));
      dq_row += dq_place.stride;
      if (kGrouped && !first) {
        const float2 before = two_at(tiles.terms, r, 2 * lane);
        term = make_float2(term.x + before.x, term.y + before.y);
      }
      if (last) {
        const float2 z = two_at(tiles.dk, r, 2 * lane), w = two_of<kParts>(k, r, 2 * lane);
        term = make_float2(term.x - w.x * z.x, term.y - w.y * z.y);
        const float2 down = steep ? make_float2(1.0f, 1.0f) : make_float2(ptx::exp2(-b.x), ptx::exp2(-b.y));
        if (work.dk.data != nullptr && r < c.rows)
          store_channels(dk_place, dk_row, 2 * lane, make_float2(z.x * down.x, z.y * down.y));
        dk_row += dk_place.stride;
        term_sum.x += term.x;
        term_sum.y += term.y;
      }
      two_at(tiles.terms, r, 2 * lane) = term;
    }
    if (last) break;
  }

  if (constant) {
    if (work.gate_parts == nullptr) return;
    const float part = flashgla::cuda::warp_sum(crossing);
    if (lane == 0) tiles.row_sums[warp] = part;
    __syncthreads();
    put_chunk_part(tiles.row_sums[0] + tiles.row_sums[1] + tiles.row_sums[2] + tiles.row_sums[3]);
    return;
  }
  put_gate_gradient<Kernel, kSide>(p, work, tiles, c, kv_head, key_tile, term_sum, steep);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

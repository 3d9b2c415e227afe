// The backward of heads of up to 64 x 64 with key gates of bf16 in one kernel; equations: backward/keys.cuh, roles:
// backward/README.md. As in backward/rows.cuh a block walks a sequence and head back in time with dh in registers.
// Gates are summed on tensor cores: running sums are a triangle of ones times the tile of gates, and dg, a sum over
// later tokens, is one times E = q dq - k dk. E goes in as two bf16 numbers, 16 bits of mantissa; the sums are f32.
// What the two thread groups do alike is one piece of code for both, for the instruction cache's sake. Chunks out of
// one anchor's reach go by blocks of 16 tokens (tiles/ladder.cuh).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/fused.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/one_kernel.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/anchors.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Both triangles of ones as operands of wgmma, in shared memory: 176 rows by 16 columns, 48 of zeros, the lower
// triangle, 48 of ones, the upper triangle, 48 of zeros; columns 0..7 of all rows, then columns 8..15. K-step k16 of
// the lower triangle is the 64 rows from 48 - 16 k16 on, of the upper one those from 112 - 16 k16 on.
struct Triangles {
  static constexpr int rows = 176, bytes = 2 * rows * 16;
  static __device__ __forceinline__ void put(std::uint32_t at) {
    for (int piece = threadIdx.x; piece < 2 * rows; piece += kFusedThreads) {
      const int row = piece % rows, first = piece / rows * 8;
      const auto one = [&](int column) {
        return row < 64 ? column <= row - 48 : row < 112 || (row < 128 && column >= row - 112);
      };
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = (one(first + 2 * w) ? 0x3f80u : 0u) | (one(first + 2 * w + 1) ? 0x3f800000u : 0u);
      }
      store_shared_16(at + 16 * piece, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
  // Distance of groups of 8 columns: all rows; of groups of 8 rows: 128 bytes; no swizzle.
  template <bool kUpper>
  static __device__ __forceinline__ std::uint64_t descriptor(std::uint32_t at, int k16) {
    const std::uint32_t start = at + 16 * ((kUpper ? 112 : 48) - 16 * k16);
    return (std::uint64_t{128 / 16} << 32) | (((start & 0x3ffff) >> 4) | (rows << 16));
  }
};

struct ChannelsShared {
  // Of steep chunks what blocks tell each other takes g in the first group, which then has its scores there, and v in
  // the second. E: of q in d_o and q, of k in v and k.
  static constexpr int q = 0, k = kTileBytes, d_o = 2 * kTileBytes, v = 3 * kTileBytes, h = 4 * kTileBytes,
                       g = 5 * kTileBytes;
  static constexpr int stage = 6 * kTileBytes;
  static constexpr int x = 2 * stage;  // dh^
  static constexpr int triangles = x + kTileBytes;
  static constexpr int beyond = triangles + Triangles::bytes;  // [parity of the chunk][64]: dh h at its end
  static constexpr int places = beyond + 2 * kTile * 4;
  static constexpr int rows = places + 3 * Places::count * 8;   // [parity of the chunk]: its tokens
  static constexpr int index = rows + 2 * 4, last = index + 4;  // with mma.sync: of the chunk under way, of the last
  static constexpr int anchors = last + 4;                      // of 256 bytes each
  static constexpr int rung = anchors + Anchors::bytes;         // [the chunk's number % 4]
  static constexpr int total = rung + 4 * 4;
};

// The rung that a chunk is tried on: that of the one after it, as that one's gates would have it.
enum class Rung { one_anchor, anchors, blocks };
constexpr float kLongest = 4096.0f;  // bits over a chunk, beyond which it goes by blocks

// E = the tile's elements times the accumulator's, of this warp's rows: high halves to a tile, low ones in place.
template <class Core>
__device__ __forceinline__ void put_products(std::uint32_t high, std::uint32_t tile, const Accumulator& d, int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t x[4], y[4];
    TensorCore80::load_a<Stored::k_inner>(x, tile, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = ptx::unpack_bf16(x[i]);
      const float first = pair.x * d[8 * k16 + 2 * i], second = pair.y * d[8 * k16 + 2 * i + 1];
      x[i] = ptx::pack_bf16(first, second);
      const float2 rounded = ptx::unpack_bf16(x[i]);
      y[i] = ptx::pack_bf16(first - rounded.x, second - rounded.y);
    }
    Core::put_fragment(high, x, k16, thread);
    Core::put_fragment(tile, y, k16, thread);
  }
}

// The same of E as it is: high halves to one tile, low ones to another.
template <class Core>
__device__ __forceinline__ void put_halves(std::uint32_t high, std::uint32_t low, const Local<float, 32>& e,
                                           int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t x[4], y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = e.x[8 * k16 + 2 * i], second = e.x[8 * k16 + 2 * i + 1];
      x[i] = ptx::pack_bf16(first, second);
      const float2 rounded = ptx::unpack_bf16(x[i]);
      y[i] = ptx::pack_bf16(first - rounded.x, second - rounded.y);
    }
    Core::put_fragment(high, x, k16, thread);
    Core::put_fragment(low, y, k16, thread);
  }
}

// Running sums over the tokens of the sum of the first kAdded tiles less the others, up to this warp's rows (kLater:
// from the last token back to them). wgmma is under way from start to wait.
template <class Core, bool kLater, int kAdded, int kTiles>
__device__ __forceinline__ void start_sums(Accumulator& sums, const std::uint32_t (&tiles)[kTiles],
                                           std::uint32_t triangles) {
  if constexpr (std::is_same_v<Core, TensorCore90>) {
    const auto triangle = [&](int k16) { return Triangles::descriptor<kLater>(triangles, k16); };
    Core::begin();
    Core::template product_of<true, false>(sums, triangle, tiles[0]);
    if constexpr (kAdded > 1) Core::template product_of<false, false>(sums, triangle, tiles[1]);
#pragma unroll
    for (int i = kAdded; i < kTiles; ++i) Core::template product_of<false, true>(sums, triangle, tiles[i]);
    Core::commit();
  }
}
template <class Core>
__device__ __forceinline__ void wait_for_sums(Accumulator& sums) {
  if constexpr (std::is_same_v<Core, TensorCore90>) Core::template wait<0>(sums);
}
// 16 channels at a time: visit(t, sums) with those of elements 8 t .. 8 t + 7 of an accumulator.
template <class Core, bool kLater, int kAdded, int kTiles, class Visit>
__device__ __forceinline__ void visit_sums(Accumulator& sums, const std::uint32_t (&tiles)[kTiles], int thread,
                                           Visit visit) {
  if constexpr (std::is_same_v<Core, TensorCore90>) {
#pragma unroll
    for (int t = 0; t < 4; ++t) visit(t, reinterpret_cast<const float(&)[8]>(sums[8 * t]));
  } else {
    constexpr std::uint32_t signs = 0x80008000;
    std::uint32_t triangle[16];
    triangle_of_ones<kLater>(triangle, thread);
    const int warp = thread / 32;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float part[8] = {};
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        if (kLater ? k16 < warp : k16 > warp) continue;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          std::uint32_t a[4], b[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = triangle[4 * k16 + e] ^ (i < kAdded ? 0 : signs);
          TensorCore80::load_b<Stored::k_outer>(b, tiles[i], k16, 2 * t, thread);
          TensorCore80::multiply(part, a, b[0], b[1]);
          TensorCore80::multiply(part + 4, a, b[2], b[3]);
        }
      }
      visit(t, part);
    }
  }
}

// Grid: N x G. One query head a kv head; states kept; ht given where dht is.
template <class Core>
__device__ __forceinline__ void backward_channels(const Params& p, const FusedBackward& f, char* shared) {
  using Layout = ChannelsShared;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr Loads kLoads = Loads::in_turn;
  const bool first_group = in_first_group();
  const int head = blockIdx.x % p.heads;
  const std::int64_t n = blockIdx.x / p.heads;
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk), last = chunks - 1;
  const std::uint32_t base = ptx::shared_address(shared);
  const auto rows_place = [&](int index) { return base + Layout::rows + (index & 1) * 4; };
  // With mma.sync there are no registers for where the walk is: it lies in shared memory too.
  const auto last_chunk = [&] {
    return again<Core>(last, [&] { return static_cast<int>(load_shared_4(base + Layout::last)); });
  };
  const auto put_index = [&](int index) {
    if constexpr (std::is_same_v<Core, TensorCore80>) store_shared_4(base + Layout::index, index);
  };
  const auto rows_in = [&](int index) { return static_cast<int>(load_shared_4(rows_place(index))); };
  const std::uint32_t x_tile = base + Layout::x, beyond = base + Layout::beyond, triangles = base + Layout::triangles;
  const auto stage_of = [&](int index) { return base + (index & 1) * Layout::stage; };
  const auto float_at = [](std::uint32_t address, int i) { return __uint_as_float(load_shared_4(address + 4 * i)); };
  const auto put_float = [](std::uint32_t address, int i, float x) {
    store_shared_4(address + 4 * i, __float_as_uint(x));
  };
  const auto state_at = [&] { return fresh_block() * (static_cast<std::int64_t>(p.key_dim) * p.value_dim); };
  const auto state_of = [&](const float* states) { return states == nullptr ? nullptr : states + state_at(); };

  const Places places{base + Layout::places};
  const std::int64_t states_step = p.heads * kImageBytes;
  const auto states_at = [&](int index) {
    return static_cast<const char*>(p.states) + (span.chunk_begin + index) * states_step + head * kImageBytes;
  };
  const int rows_of_last = static_cast<int>(span.length - static_cast<std::int64_t>(last) * kChunk);
  if (threadIdx.x == 0) {  // what is read is asked for a chunk ahead
    const auto start = [&](Places::Tensor tensor, const Strided& s, int index) {
      places.start(last, tensor, chunk_place(s, span, index, head, 2), s.token * kChunk * 2);
    };
    start(Places::q, p.q, last - 1);
    start(Places::d_o, f.gradients.d_o, last - 1);
    start(Places::k, p.k, last - 1);
    start(Places::v, p.v, last - 1);
    places.start(last, Places::states, states_at(last - 1), states_step);
    start(Places::g, p.g, last - 1);
    start(Places::dq, f.gradients.dq, last);
    start(Places::dk, f.gradients.dk, last);
    start(Places::dv, f.gradients.dv, last);
    start(Places::dg, f.gradients.dg, last);
    store_shared_4(rows_place(last), rows_of_last);
    put_index(last);
    if constexpr (std::is_same_v<Core, TensorCore80>) store_shared_4(base + Layout::last, last);
  }
  if constexpr (std::is_same_v<Core, TensorCore80>) __syncthreads();

  // The first group copies q, do and g, the second k, v and h.
  const auto load_from = [&](int index, int rows, const char* first, const char* second, const char* third) {
    const int thread = fresh_thread();
    const std::uint32_t stage = stage_of(index), group = first_group ? 0 : kTileBytes;
    const auto elements = [](const char* x) { return reinterpret_cast<const __nv_bfloat16*>(x); };
    copy_tile(stage + Layout::q + group, elements(first), static_cast<int>(first_group ? p.q.token : p.k.token), rows,
              p.key_dim, thread);
    copy_tile(stage + Layout::d_o + group, elements(second),
              static_cast<int>(first_group ? f.gradients.d_o.token : p.v.token), rows, p.value_dim, thread);
    if (first_group) {
      copy_tile(stage + Layout::g, elements(third), static_cast<int>(p.g.token), rows, p.key_dim, thread);
    } else {
      copy_image(stage + Layout::h, third, thread);
    }
    ptx::copy_async_commit();
  };
  // q or k of the chunk under way once more, as they are.
  const auto reload = [&](int index) {
    const bool queries = again<Core>(first_group, in_first_group);
    const Places::Tensor tensor = queries ? Places::q : Places::k;
    const auto step = static_cast<std::int64_t>(Places::load(places.at(0, 2 * Places::count + tensor)));  // bytes
    copy_tile(stage_of(index) + (queries ? Layout::q : Layout::k),
              reinterpret_cast<const __nv_bfloat16*>(places.get<char>(index, tensor) + step),
              static_cast<int>(step / (kChunk * 2)), rows_in(index), p.key_dim, fresh_thread());
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
  };

  // Of the first group dv, of the second dh, and what dg of the chunk before has from beyond it, by key channel.
  Accumulator held;
  const auto put_beyond = [&](int index, float2 sums) {
    const int thread = fresh_thread(), row = row_of_element(thread, 0);
    sums.x += __shfl_xor_sync(0xffffffffu, sums.x, 1);
    sums.y += __shfl_xor_sync(0xffffffffu, sums.y, 1);
    sums.x += __shfl_xor_sync(0xffffffffu, sums.x, 2);
    sums.y += __shfl_xor_sync(0xffffffffu, sums.y, 2);
    if (thread % 4 == 0) {
      put_float(beyond, (index & 1) * kTile + row, sums.x);
      put_float(beyond, (index & 1) * kTile + row + 8, sums.y);
    }
  };
  if (std::is_same_v<Core, TensorCore90>) Triangles::put(triangles);
  if (chunks > 0) {
    load_from(last, rows_of_last, chunk_place(first_group ? p.q : p.k, span, last, head, 2),
              chunk_place(first_group ? f.gradients.d_o : p.v, span, last, head, 2),
              first_group ? chunk_place(p.g, span, last, head, 2) : states_at(last));
  }
  if (!first_group) {
    const int thread = fresh_thread();
    read_state(held, state_of(f.d_ht), p.key_dim, p.value_dim, 0, 0, thread);
    float sums[2] = {0.0f, 0.0f};
    if (f.d_ht != nullptr) {
      Accumulator ht;
      read_state(ht, state_of(static_cast<const float*>(p.ht)), p.key_dim, p.value_dim, 0, 0, thread);
#pragma unroll
      for (int i = 0; i < 32; ++i) sums[(i >> 1) & 1] += held[i] * ht[i];
    }
    put_beyond(last_chunk(), make_float2(sums[0], sums[1]));
  } else {
    clear(held);
  }

  // q~ = q 2^(b + log2 scale) and k~ = k 2^-b, dq and dk alike. The scale's sign is put where it is negative.
  struct Exponent {
    float slope, offset;
    __device__ __forceinline__ float operator()(float b) const { return fmaf(b, slope, offset); }
  };
  const auto exponents = [&] {
    float log;
    asm volatile("lg2.approx.f32 %0, %1;" : "=f"(log) : "f"(fabsf(p.scale)));
    return Exponent{first_group ? kLog2E : -kLog2E, first_group ? log : 0.0f};
  };
  const auto negated = [&] { return p.scale < 0.0f && first_group; };

  const Anchors anchors{base + Layout::anchors};
  constexpr bool kAnchors = std::is_same_v<Core, TensorCore90>;
  if (kAnchors) anchors.put_ones();
  // In shared memory, [the chunk's number % 4], where there is no register for it: chunks not said otherwise are tried
  // on one anchor.
  Rung only_rung = Rung::one_anchor;
  const auto rung_place = [&](int index) { return base + Layout::rung + (index & 3) * 4; };
  const auto rung = [&](int index) {
    if constexpr (!kAnchors) return only_rung;
    return static_cast<Rung>(__shfl_sync(0xffffffffu, static_cast<int>(load_shared_4(rung_place(index))), 0));
  };
  const auto put_rung = [&](int index, Rung next) {
    only_rung = next;
    if (kAnchors && threadIdx.x == 0) store_shared_4(rung_place(index), static_cast<std::uint32_t>(next));
    __syncwarp();
  };
  for (int i = 0; i < 4; ++i) put_rung(i, Rung::one_anchor);
#pragma unroll 1
  for (int index = last_chunk();; --index) {
    ptx::copy_async_wait<0>();
    if (std::is_same_v<Core, TensorCore90> && p.logit_scale != 0.0f && first_group &&
        index >= 0) {  // rows as copy_tile gives them to threads
      // rows_in is not there before the barrier.
      const int thread = fresh_thread(), rows = index == last ? rows_of_last : kChunk;
#pragma unroll 1
      for (int row = thread / 8; row < rows; row += kGroupThreads / 8) {
        turn_logits(stage_of(index) + Layout::g + tile_piece(row, thread % 8), p.logit_scale, p.gate_min);
      }
    }
    Core::publish();
    __syncthreads();  // all tiles are there, and E of the chunk after

    if (index < last_chunk()) {  // dv and dg of the chunk after
      const int after = index + 1, rows = rows_in(after);
      const std::uint32_t stage = stage_of(after);
      if (first_group) {
        if (f.gradients.dv.data != nullptr) {
          store_through<Core>(stage + Layout::h, places.get<__nv_bfloat16>(after, Places::dv),
                              static_cast<int>(f.gradients.dv.token), held, rows, p.value_dim);
        }
      } else if (f.gradients.dg.data != nullptr) {
        const std::uint32_t parts[4] = {stage + Layout::d_o, stage + Layout::q, stage + Layout::v, stage + Layout::k};
        const std::uint32_t from_beyond = beyond + (after & 1) * kTile * 4;
        Accumulator later;
        start_sums<Core, true, 2>(later, parts, triangles);
        wait_for_sums<Core>(later);
        visit_sums<Core, true, 2>(later, parts, fresh_thread(), [&](int t, const float(&part)[8]) {
          const int thread = fresh_thread();
          std::uint32_t r[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = column_of_element(thread, 8 * t + 2 * i);
            r[i] = ptx::pack_bf16(part[2 * i] + float_at(from_beyond, column),
                                  part[2 * i + 1] + float_at(from_beyond, column + 1));
          }
          Core::put_fragment(stage + Layout::g, r, t, thread);
        });
        __syncwarp();
        if (std::is_same_v<Core, TensorCore90> && p.logit_scale != 0.0f) {
          const auto step = static_cast<std::int64_t>(Places::load(places.at(0, 2 * Places::count + Places::g)));
          const auto stride = [](const Strided& s) { return static_cast<int>(s.token) * 2; };
          store_tile_by_logits(Rows{places.get<char>(after, Places::dg), stride(f.gradients.dg), rows, p.key_dim},
                               Rows{places.get<char>(after, Places::g) + step, stride(p.g), rows, p.key_dim},
                               stage + Layout::g, p, fresh_thread());
        } else {
          store_tile_rows(stage + Layout::g, places.get<__nv_bfloat16>(after, Places::dg),
                          static_cast<int>(f.gradients.dg.token), rows, p.key_dim,
                          thread_shuffled<Core>(fresh_thread()));
        }
      }
    }
    if (index < 0) break;

    // q~ and k~ in place, and dh^, as if the rung served.
    bool in_range = false;
    float2 decay = make_float2(1.0f, 1.0f);  // of dh's rows
    if (rung(index) != Rung::blocks) {
      const std::uint32_t g[1] = {stage_of(index) + Layout::g};
      const int thread = fresh_thread();
      const std::uint32_t own_tile = stage_of(index) + (first_group ? Layout::q : Layout::k);
      const Exponent exponent = exponents();
      Accumulator sums;
      start_sums<Core, false, 1>(sums, g, triangles);
      const float2 totals = sum_rows_of_tile(g[0], thread);
      const float low = totals.x * kLog2E, high = totals.y * kLog2E;
      in_range = low >= -kSteep && high >= -kSteep;
      decay = make_float2(ptx::exp2(low), ptx::exp2(high));
      wait_for_sums<Core>(sums);
      if (kAnchors && rung(index) == Rung::anchors) {
        // Where the running sums are long f32 would not hold what is left of them.
        in_range = low >= -kLongest && high >= -kLongest;
        sums_from_anchor(sums, 1.0f, thread);
        in_range = in_range && anchors_reach(sums);
        if (!first_group) decay = anchors.put_factors(g[0], thread);
      }
      visit_sums<Core, false, 1>(sums, g, thread, [&](int t, const float(&b)[8]) {
        std::uint32_t x[4];
        TensorCore80::load_a<k_inner>(x, own_tile, t, thread);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = ptx::unpack_bf16(x[i]);
          x[i] = ptx::pack_bf16(pair.x * ptx::exp2(exponent(b[2 * i])), pair.y * ptx::exp2(exponent(b[2 * i + 1])));
        }
        if (negated()) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] ^= 0x80008000u;
        }
        Core::put_fragment(own_tile, x, t, thread);
      });
      if (!first_group) {
        Accumulator decayed;
#pragma unroll
        for (int i = 0; i < 32; ++i) decayed[i] = held[i] * (i & 2 ? decay.y : decay.x);
        put_rounded<Core>(x_tile, decayed, thread);
      }
    }
    Core::publish();
    const bool steep = __syncthreads_or(!in_range);  // the operands are there
    if (index > 0) {
      load_from(index - 1, kChunk, places.get<char>(index, first_group ? Places::q : Places::k),
                places.get<char>(index, first_group ? Places::d_o : Places::v),
                places.get<char>(index, first_group ? Places::g : Places::states));
    }

    const auto index_now = [&] {
      return again<Core>(index, [&] { return static_cast<int>(load_shared_4(base + Layout::index)); });
    };
    Accumulator d;  // of the first group dq, of the second dk
    {
      const int thread = thread_shuffled<Core>(fresh_thread());
      const std::uint32_t stage = stage_of(index_now());
      const std::uint32_t q = stage + Layout::q, k = stage + Layout::k, d_o = stage + Layout::d_o,
                          v = stage + Layout::v, h = stage + Layout::h;
      if (!steep) {
        std::uint32_t pairs[16] = {};  // [query][key] in the first group, and [key][query] in the second
        if constexpr (std::is_same_v<Core, TensorCore80>) {
          // One product at a time, in a loop, for unrolled ptxas has both under way, and one code for both groups. The
          // first group's scores come before its pairs.
          std::uint32_t scores[16];
          const std::uint32_t own = first_group ? d_o : v, other = first_group ? v : d_o;
#pragma unroll 1
          for (bool of_scores = first_group;; of_scores = false) {
#pragma unroll
            for (int i = 0; i < 16; ++i) scores[i] = pairs[i];
            Accumulator a;
            Core::template product<k_inner, k_inner, true, kLoads>(a, of_scores ? k : own, of_scores ? q : other,
                                                                   thread_shuffled<Core>(thread));
            select_pairs(pairs, a, of_scores || !first_group, thread_shuffled<Core>(thread));
            if (!of_scores) break;
          }
          if (first_group) {
            Core::template product<k_inner, k_outer, true, kLoads>(held, k, x_tile, thread_shuffled<Core>(thread));
            Core::template product<k_outer, false, kLoads>(held, scores, d_o, thread_shuffled<Core>(thread));
          } else {
            scale_rows(held, decay.x, decay.y);
            Core::template product<k_outer, k_outer, false, kLoads>(held, q, d_o, thread_shuffled<Core>(thread));
          }
          Core::template product<k_inner, k_inner, true, kLoads>(d, own, first_group ? h : x_tile,
                                                                 thread_shuffled<Core>(thread));
          Core::template product<k_outer, false, kLoads>(d, pairs, first_group ? k : q, thread_shuffled<Core>(thread));
          if (!first_group) put_beyond(index_now() - 1, dot_rows(h, held, thread_shuffled<Core>(thread)));
        } else if (rung(index) == Rung::anchors) {
          if (!anchors.one_would_reach(kSteep, thread)) put_rung(index - 1, Rung::anchors);
          if (first_group) {
            std::uint32_t scores[16], keys[16];
            {
              Accumulator s;  // [key][query]
              anchored_scores<Core>(s, keys, q, k, anchors, thread);
              select_pairs<true>(scores, s, thread);
            }
            Core::begin(scores, keys);
            Core::template product<k_outer, true>(held, keys, x_tile, thread);
            Core::template product<k_outer>(held, scores, d_o, thread);
            Core::finish(held);
            {
              Accumulator a;  // [query][key]
              Core::begin();
              Core::template product<k_inner, k_inner, true>(a, d_o, v, thread);
              Core::finish(a);
              select_pairs<false>(pairs, a, thread);
            }
            Core::begin();
            Core::template product<k_inner, k_inner, true>(d, d_o, h, thread);
            Core::finish(d);
            add_anchored_keys<Core>(d, pairs, k, anchors, thread);
          } else {
            {
              const float2 of_rows = anchors.of_rows(kBlocks, thread);
              scale_rows(held, of_rows.x, of_rows.y);
            }
            {  // dg of this chunk from beyond it: h through it, and what its keys have of dh, which dg's sums take away
              float2 sums = dot_rows(h, held, thread);
#pragma unroll
              for (int t = 0; t < kBlocks; ++t) {
                const float2 of_rows = anchors.of_rows(t, thread);
                sums = make_float2(sums.x * of_rows.x, sums.y * of_rows.y);
              }
              put_beyond(index, sums);
            }
            add_anchored_outer<Core>(held, q, d_o, anchors, thread);
            put_beyond(index - 1, dot_rows(h, held, thread));
            {
              Accumulator a;  // [key][query]
              Core::begin();
              Core::template product<k_inner, k_inner, true>(a, v, d_o, thread);
              Core::finish(a);
              select_pairs<true>(pairs, a, thread);
            }
            Core::begin();
            Core::template product<k_inner, k_inner, true>(d, v, x_tile, thread);
            Core::finish(d);
            anchors.put_partial(k, d, thread);
            add_anchored_queries<Core>(d, pairs, q, anchors, thread);
            sync_group();
            if (thread < 32) anchors.add_partial(beyond + (index & 1) * kTile * 4, thread);
            __syncwarp();
          }
        } else {
          if (first_group) {
            std::uint32_t scores[16];
            {
              Accumulator s, a;  // [key][query], [query][key]
              Core::begin();
              Core::template product<k_inner, k_inner, true>(s, k, q, thread);
              Core::template product<k_inner, k_inner, true>(a, d_o, v, thread);
              Core::finish(s, a);
              select_pairs<true>(scores, s, thread);
              select_pairs<false>(pairs, a, thread);
            }
            Core::begin(scores);
            Core::template product<k_inner, k_outer, true>(held, k, x_tile, thread);
            Core::template product<k_outer>(held, scores, d_o, thread);
            Core::finish(held);
            Core::begin(pairs);
            Core::template product<k_inner, k_inner, true>(d, d_o, h, thread);
            Core::template product<k_outer>(d, pairs, k, thread);
            Core::finish(d);
          } else {
            scale_rows(held, decay.x, decay.y);
            {
              Accumulator a;
              Core::begin();
              Core::template product<k_inner, k_inner, true>(a, v, d_o, thread);
              Core::finish(a);
              select_pairs<true>(pairs, a, thread);
            }
            Core::begin(pairs, held);
            Core::template product<k_inner, k_inner, true>(d, v, x_tile, thread);
            Core::template product<k_outer>(d, pairs, q, thread);
            Core::template product<k_outer, k_outer>(held, q, d_o, thread);
            Core::finish(d, held);
            put_beyond(index - 1, dot_rows(h, held, thread));
          }
        }
      } else {
        // Operands as in tiles/ladder.cuh instead, and dh before its decay.
        if (rung(index_now()) != Rung::blocks) reload(index_now());
        if (rung(index_now()) != Rung::one_anchor && !first_group) {
          const float2 totals = sum_rows_of_tile(stage + Layout::g, thread);
          decay = make_float2(ptx::exp2(totals.x * kLog2E), ptx::exp2(totals.y * kLog2E));
        }
        Local<std::uint32_t, 16> found_pairs, found_scores, outer, others;  // others: k (q) where a block is not near
        Local<float, 32> gradient;                                          // of the state, in the second group
        if (!first_group) {
          put_rounded<Core>(x_tile, held, thread);
          scale_rows(held, decay.x, decay.y);
          gradient.put(held);
        }
        Core::publish();
        __syncthreads();
        Local<std::uint32_t, 16> own;  // q (k), this warp's rows
        Accumulator sums;
        bool near;
        {
          const std::uint32_t from = stage_of(index_now());
          std::uint32_t operand[16];
          {
            Accumulator a;
            Core::begin();
            Core::template product<k_inner, k_inner, true, kLoads>(a, from + (first_group ? Layout::d_o : Layout::v),
                                                                   from + (first_group ? Layout::v : Layout::d_o),
                                                                   thread_shuffled<Core>(fresh_thread()));
            Core::finish(a);
            select_pairs(operand, a, !first_group, fresh_thread());
            found_pairs.put(operand);
          }
          __syncwarp();
          const int thread = fresh_thread();
          load_operand<k_inner>(operand, from + (first_group ? Layout::q : Layout::k), thread);
          own.put(operand);
          sum_block(sums, from + Layout::g, thread);
          near = is_near(sums, thread % 32);
          if (!near) {
            load_operand<k_inner>(operand, from + (first_group ? Layout::k : Layout::q), thread);
            others.put(operand);
          }
        }
        const auto find_beyond = [&] {  // dq's and dk's part from beyond the chunk
          const std::uint32_t from = stage_of(index_now());
          Core::begin();
          Core::template product<k_inner, k_inner, true, kLoads>(d, from + (first_group ? Layout::d_o : Layout::v),
                                                                 first_group ? from + Layout::h : x_tile,
                                                                 thread_shuffled<Core>(fresh_thread()));
          Core::finish(d);
        };
        if (!first_group) find_beyond();
        __syncthreads();  // gates, q, k and v have been read: the groups go on by themselves
        // Where blocks tell each other their sums, and the tile of k' or q'.
        const auto room = [&] { return stage_of(index_now()) + (first_group ? Layout::g : Layout::v); };
        const auto gated_tile = [&] { return stage_of(index_now()) + (first_group ? Layout::k : Layout::q); };
        publish_block(room(), sums, near, fresh_thread());
        sync_group();
        {
          const int warp = fresh_thread() / 32, lane = fresh_thread() % 32;
          const BlockSums blocks = read_blocks(room(), lane);
          if (first_group) {
            put_query_factors(room(), blocks, warp, lane);
          } else {
            put_key_factors(room(), blocks, warp, lane);
          }
          store_shared_float2(block_factor(room(), warp, kOuterFactor) + 8 * lane,
                              first_group ? factor_to_end(blocks, warp) : factor_from_start(blocks, warp));
          if (!first_group) {
            store_shared_float2(block_factor(room(), warp, kKeySums) + 8 * lane, factor_to_end(blocks, warp));
          }
          const float2 all = sum_of_blocks(blocks);
          const auto each_near = [&] {
            bool each = true;
#pragma unroll
            for (int t = 0; t < kBlocks; ++t) each = each && float_at(block_half(room(), t), 0) <= 0.0f;
            return each;
          };
          const bool one = __all_sync(0xffffffffu, all.x >= -kSteep && all.y >= -kSteep) != 0;
          put_rung(index_now() - 1, one ? Rung::one_anchor : kAnchors && each_near() ? Rung::anchors : Rung::blocks);
        }
        __syncwarp();
        if (!first_group) {
          sum_keys(block_factor(room(), fresh_thread() / 32, kKeySums), d, operand_of(own.x), sums, room(), near,
                   fresh_thread());
        }
        if (first_group) {
          gate_tile<Core, false>(outer, gated_tile(), sums, room(), near, p.scale, fresh_thread());
          sync_group();
          std::uint32_t operand[16];
          find_scores(operand, operand_of(own.x), operand_of(others.x), sums, gated_tile(), room(), near, p.scale,
                      fresh_thread());
          found_scores.put(operand);
          find_beyond();
        } else {
          gate_tile<Core, true>(outer, gated_tile(), sums, room(), near, p.scale, fresh_thread());
          sync_group();
        }
        Local<float, 32> e;  // scale q dq, or k dk
        {
          std::uint32_t pairs[16];
          found_pairs.get(pairs);
          if (first_group) {
            add_blocks<true>(d, pairs, gated_tile(), room(), near, fresh_thread());
            finish_rows<true, false>(d, e, 1.0f, operand_of(own.x), sums, room(), near, p.scale, fresh_thread());
          } else {
            add_blocks<false>(d, pairs, gated_tile(), room(), near, fresh_thread());
            finish_rows<false, false>(d, e, 1.0f, operand_of(own.x), sums, room(), near, p.scale, fresh_thread());
          }
        }
        if (!near) {
          Local<float, 32> d_aside;
          d_aside.put(d);
          std::uint32_t block[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) block[i] = found_pairs.x[4 * (fresh_thread() / 32) + i];
          if (first_group) {
            add_halves<true, false>(d_aside.x, d_aside.x, e.x, 1.0f, block, operand_of(own.x), operand_of(others.x),
                                    sums, p.scale, fresh_thread());
          } else {
            add_halves<false, true>(d_aside.x, d_aside.x, e.x, 1.0f, block, operand_of(others.x), operand_of(own.x),
                                    sums, p.scale, fresh_thread());
          }
          d_aside.get(d);
        }
        sync_group();  // k' or q' and the sums have been read
        {
          std::uint32_t operand[16];
          if (first_group) {
            found_scores.get(operand);
            put_operand<Core, true>(room(), operand, fresh_thread());  // [key][query]
          }
          outer.get(operand);
          put_operand<Core>(gated_tile(), operand, fresh_thread());
        }
        Core::publish();
        sync_group();
        if (first_group) {
          Core::begin();
          Core::template product<k_inner, k_outer, true, kLoads>(held, gated_tile(), x_tile,
                                                                 thread_shuffled<Core>(fresh_thread()));
          Core::template product<k_inner, k_outer, false, kLoads>(held, room(), stage_of(index_now()) + Layout::d_o,
                                                                  thread_shuffled<Core>(fresh_thread()));
          Core::finish(held);
          scale_rows(d, p.scale, p.scale);
        } else {
          gradient.get(held);
          {  // dg of this chunk from beyond it, instead of dh h at its end
            const int thread = fresh_thread();
            float2 sums = dot_rows(stage_of(index_now()) + Layout::h, held, thread);
            if (thread % 4 == 0) {
#pragma unroll
              for (int w = 0; w < kBlocks; ++w) {
                const std::uint32_t by_keys = block_factor(room(), w, kKeySums);
                sums.x += float_at(by_keys, row_of_element(thread, 0));
                sums.y += float_at(by_keys, row_of_element(thread, 2));
              }
            }
            put_beyond(index_now(), sums);
          }
          Core::begin(held);
          Core::template product<k_outer, k_outer, false, kLoads>(
              held, gated_tile(), stage_of(index_now()) + Layout::d_o, thread_shuffled<Core>(fresh_thread()));
          Core::finish(held);
          put_beyond(index_now() - 1, dot_rows(stage_of(index_now()) + Layout::h, held, fresh_thread()));
        }
        __syncthreads();  // all operands have been read
        put_halves<Core>(stage_of(index_now()) + Layout::d_o + (first_group ? 0 : kTileBytes),
                         stage_of(index_now()) + (first_group ? Layout::q : Layout::k), e, fresh_thread());
      }
    }
    index = index_now();
    __syncthreads();  // the operands have been read

    {
      const int rows = rows_in(index), thread = thread_shuffled<Core>(fresh_thread());
      const std::uint32_t stage = stage_of(index), group = first_group ? 0 : kTileBytes;
      const std::uint32_t tile = stage + Layout::q + group, room = first_group ? stage + Layout::h : x_tile;
      const std::uint32_t gates[1] = {stage + Layout::g};
      const Exponent exponent = exponents();
      Accumulator again;
      start_sums<Core, false, 1>(again, gates, triangles);
      if (!steep) put_products<Core>(stage + Layout::d_o + group, tile, d, thread);
      wait_for_sums<Core>(again);
      if constexpr (kAnchors) sums_from_anchor(again, rung(index) == Rung::anchors ? 1.0f : 0.0f, thread);
      visit_sums<Core, false, 1>(again, gates, thread, [&](int t, const float(&b)[8]) {
        if (steep) return;
#pragma unroll
        for (int i = 0; i < 8; ++i) d[8 * t + i] *= ptx::exp2(exponent(b[i]));
      });
      if (negated() && !steep) scale_rows(d, -1.0f, -1.0f);
      const Strided& out = first_group ? f.gradients.dq : f.gradients.dk;
      if (out.data != nullptr) {
        store_through<Core>(room, places.get<__nv_bfloat16>(index, first_group ? Places::dq : Places::dk),
                            static_cast<int>(out.token), d, rows, p.key_dim);
      }
      if (first_group && thread < 32) {
        places.step_back(index, thread);
        if (thread == 0) {
          store_shared_4(rows_place(index - 1), kChunk);
          store_shared_4(rung_place(index - 2), static_cast<std::uint32_t>(Rung::one_anchor));
          put_index(index - 1);
        }
      }
    }
  }
  if (!first_group && f.dh0 != nullptr) {
    write_state(f.dh0 + state_at(), held, p.key_dim, p.value_dim, 0, 0, fresh_thread());
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// What the steps of backward/channels.cuh share: where things lie, copies, sums over a chunk's tokens, and gradients on
// their way out.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/one_kernel.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/half_blocks.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/logits.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Triangles of ones as operands of wgmma, in shared memory: a band of rows of 16 columns, 49 of zeros, the lower
// triangle, 48 of ones, columns 0..7 of all rows, then columns 8..15. K-step k16 is the 64 rows from 49 - 16 k16 on,
// and from a row earlier for sums that do not count a token's own row.
struct Triangles {
  static constexpr int rows = 113, bytes = 2 * rows * 16;
  static __device__ __forceinline__ void put(std::uint32_t at) {
    for (int piece = threadIdx.x; piece < 2 * rows; piece += kFusedThreads) {
      const int first = piece / rows * 8, end = piece % rows - 48;  // ones before it
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int column = first + 2 * w;
        words[w] = (column < end ? 0x3f80u : 0u) | (column + 1 < end ? 0x3f800000u : 0u);
      }
      store_shared_16(at + 16 * piece, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
  // Distance of groups of 8 columns: all rows; of groups of 8 rows: 128 bytes; no swizzle.
  template <bool kBefore>
  static __device__ __forceinline__ std::uint64_t descriptor(std::uint32_t at, int k16) {
    const std::uint32_t start = at + 16 * ((kBefore ? 48 : 49) - 16 * k16);
    return (std::uint64_t{128 / 16} << 32) | (((start & 0x3ffff) >> 4) | (rows << 16));
  }
};

struct ChannelsShared : InputTiles {
  // Where a chunk goes by blocks what they tell each other takes g in the first group, which then has its scores there,
  // and v in the second. E: of q in d_o and q, of k in v and k.
  static constexpr int g = inputs_end, stage = g + kTileBytes;
  static constexpr int x = 2 * stage;  // dh^
  static constexpr int triangles = x + kTileBytes;
  static constexpr int beyond = triangles + Triangles::bytes;  // [64]: dh h at the chunk's start
  static constexpr int places = beyond + kTile * 4;
  // The last chunk and its tokens, and the chunk under way; and its rung, which has been read where the next one's is
  // written.
  static constexpr int last = places + 3 * Places::count * 8, last_rows = last + 4, index = last_rows + 4,
                       rung = index + 4;
  static constexpr int gates_held = rung + 4;    // whether the chunk under way went by half blocks
  static constexpr int wanted = gates_held + 4;  // a bit of each gradient that is
  // Of 256 bytes each; by blocks, where there are none, the first four are what each warp's queries add to dh h.
  static constexpr int anchors = gates_held + 16, by_queries = anchors;
  static constexpr int diagonal = anchors + Anchors::bytes;  // [64] of each group: what tokens have with themselves
  // Whether a chunk has logits of weak gates, a word of each warp that has turned them; of two chunks.
  static constexpr int weak = diagonal + 2 * kTile * 4;
  static_assert(weak % 16 == 0);
  static constexpr int total = weak + 2 * 16;
};

// E of this warp's rows, a k-step at a time by products(e, k16): high halves to one tile, low ones to another.
template <class Core, class Products>
__device__ __forceinline__ void put_halves(std::uint32_t high, std::uint32_t low, int thread, Products products) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t x[4], y[4];
    float e[8];
    products(e, k16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = take_bf16(e[2 * i], e[2 * i + 1]);
      y[i] = ptx::pack_bf16(e[2 * i], e[2 * i + 1]);
    }
    Core::put_fragment(high, x, k16, thread);
    Core::put_fragment(low, y, k16, thread);
  }
}
// E = the tile's elements times the accumulator's, low halves in place.
template <class Core>
__device__ __forceinline__ void put_products(std::uint32_t high, std::uint32_t tile, const Accumulator& d, int thread) {
  put_halves<Core>(high, tile, thread, [&](float(&e)[8], int k16) { multiply_rows(e, tile, d, k16, thread); });
}

// Running sums over the tokens of the sum of the first kAdded tiles less the others, up to this warp's rows (kBefore:
// up to those before them). wgmma is under way from start to wait.
template <class Core, bool kBefore, int kAdded, int kTiles>
__device__ __forceinline__ void start_sums(Accumulator& sums, const std::uint32_t (&tiles)[kTiles],
                                           std::uint32_t triangles) {
  if constexpr (std::is_same_v<Core, TensorCore90>) {
    const auto triangle = [&](int k16) { return Triangles::descriptor<kBefore>(triangles, k16); };
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
template <class Core, bool kBefore, int kAdded, int kTiles, class Visit>
__device__ __forceinline__ void visit_sums(Accumulator& sums, const std::uint32_t (&tiles)[kTiles], int thread,
                                           Visit visit) {
  if constexpr (std::is_same_v<Core, TensorCore90>) {
#pragma unroll
    for (int t = 0; t < 4; ++t) visit(t, reinterpret_cast<const float(&)[8]>(sums[8 * t]));
  } else {
    constexpr std::uint32_t signs = 0x80008000;
    std::uint32_t triangle[16];
    triangle_of_ones<kBefore ? Triangle::below : Triangle::lower>(triangle, thread);
    const int warp = thread / 32;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float part[8] = {};
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        if (k16 > warp) continue;
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

// q~ = q 2^(b + log2 scale) and k~ = k 2^-b, dq and dk alike.
struct Exponent {
  float slope, offset;
  __device__ __forceinline__ float operator()(float b) const { return fmaf(b, slope, offset); }
};

// A block's walk over the chunks of a sequence and head, back in time. Of the first group: q, do, dq, dv; of the
// second: k, v, dh, dk, dg. Registers are too few for where the walk began, and with mma.sync for where it is: that
// lies in shared memory.
template <class CoreIn, GatesAs kGates>
struct ChannelsView {
  using Core = CoreIn;
  using Layout = ChannelsShared;
  static constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  static constexpr bool kAnchors = std::is_same_v<Core, TensorCore90>;  // has the rung of that name
  static constexpr bool kInF32 = kGates == GatesAs::f32, kByLogits = kGates == GatesAs::logits;
  static constexpr int kGateBytes = kInF32 ? 4 : 2;
  const Params& p;
  const FusedBackward& f;
  std::uint32_t base;
  bool first_group;

  __device__ __forceinline__ Places places() const { return Places{base + Layout::places}; }
  __device__ __forceinline__ Anchors anchors() const { return Anchors{base + Layout::anchors}; }
  __device__ __forceinline__ std::uint32_t x_tile() const { return base + Layout::x; }
  __device__ __forceinline__ std::uint32_t triangles() const { return base + Layout::triangles; }
  __device__ __forceinline__ std::uint32_t stage_of(int index) const { return base + (index & 1) * Layout::stage; }
  __device__ __forceinline__ int last_chunk() const { return static_cast<int>(load_shared_4(base + Layout::last)); }
  __device__ __forceinline__ int rows_in(int index) const {
    return index == last_chunk() ? static_cast<int>(load_shared_4(base + Layout::last_rows)) : kChunk;
  }
  // By a bit: asked by its address the backward takes 1% longer.
  __device__ __forceinline__ bool is_wanted(Places::Tensor gradient) const {
    return (load_shared_4(base + Layout::wanted) >> gradient & 1) != 0;
  }
  __device__ __forceinline__ int index_there() const { return static_cast<int>(load_shared_4(base + Layout::index)); }
  __device__ __forceinline__ int index_now(int index) const {
    return again<Core>(index, [&] { return index_there(); });
  }
  // Behind a barrier that the chunk before is left by.
  __device__ __forceinline__ void put_index(int index) const {
    if (threadIdx.x == 0) store_shared_4(base + Layout::index, index);
  }
  // Whether gates of logits have a least value.
  __device__ __forceinline__ bool cut_off() const { return p.gate_min > -std::numeric_limits<float>::infinity(); }

  // The rung of the chunk to come, in shared memory, for there is no register for it. Once a chunk, by all, behind the
  // barrier after which all have read its own; one anchor is followed by one anchor without a word.
  __device__ __forceinline__ Rung rung() const {
    return static_cast<Rung>(__shfl_sync(0xffffffffu, static_cast<int>(load_shared_4(base + Layout::rung)), 0));
  }
  __device__ __forceinline__ void put_rung(Rung next) const {
    if (threadIdx.x == 0) store_shared_4(base + Layout::rung, static_cast<std::uint32_t>(next));
    __syncwarp();
  }
  __device__ __forceinline__ std::uint32_t diagonal() const {
    return base + Layout::diagonal + (first_group ? 0 : 4 * kTile);
  }
  // Whether the chunk's gates were held at the least: dg of it is found with the next one.
  __device__ __forceinline__ void put_gates_held(bool held) const {
    if (threadIdx.x == 0) store_shared_4(base + Layout::gates_held, held ? 1 : 0);
    __syncwarp();
  }
  __device__ __forceinline__ bool gates_held() const {
    return __shfl_sync(0xffffffffu, static_cast<int>(load_shared_4(base + Layout::gates_held)), 0) != 0;
  }

  // ---- copies ----

  // Rows of a tile of gates that a group brings, and turns if they are logits.
  __device__ __forceinline__ int own_half() const { return first_group ? 0 : kTile / 2; }
  __device__ __forceinline__ void load_half_of_gates(int index, int rows, const char* from) const {
    const int thread = fresh_thread(), stride = anew(static_cast<int>(p.g.token)) * kGateBytes;
    const std::uint32_t tile = stage_of(index) + Layout::g;
    if constexpr (kInF32) {
      const Rows gates{from, stride, rows, p.key_dim};
      if constexpr (kAnchors) {
        load_f32_gates<kTile / 2>(tile, gates, own_half(), thread);
      } else {  // in two turns: mma.sync has fewer registers to spare
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
          load_f32_gates<kTile / 4>(tile, gates, own_half() + turn * (kTile / 4), thread);
        }
      }
    } else {
      const int first = own_half() + thread / 8, inside = thread % 8 * 8 < p.key_dim ? rows : 0;
#pragma unroll
      for (int row = first; row < first + kTile / 2; row += kGroupThreads / 8) {
        ptx::copy_async_16(tile + tile_piece(row, thread % 8), from + row * stride + thread % 8 * 16,
                           row < inside ? 16 : 0);
      }
    }
  }
  // The first group copies q and do, the second k, v and h, each half of g.
  __device__ __forceinline__ void load_from(int index, int rows, const char* first, const char* second,
                                            const char* gates, const char* state) const {
    const bool queries = in_first_group();  // anew, as in store_rows
    copy_inputs(stage_of(index), p, f.gradients, queries, rows, first, second, state);
    load_half_of_gates(index, rows, gates);
    ptx::copy_async_commit();
  }
  // The chunk before the one under way.
  __device__ __forceinline__ void load_before(int index) const {
    if (index == 0) return;
    const Places at = places();
    const char* gates = at.get<char>(index, Places::g);
    load_from(index - 1, kChunk, at.get<char>(index, first_group ? Places::q : Places::k),
              at.get<char>(index, first_group ? Places::d_o : Places::v), gates, at.get<char>(index, Places::states));
    if (kInF32 && first_group && index > 1) {  // the chunk before that
      const std::int64_t step = at.step(Places::g);
      ask_for_f32_gates(Rows{gates - step, static_cast<int>(step / kChunk), kChunk, p.key_dim}, fresh_thread());
    }
  }
  // The chunk under way in a tensor that is asked for a chunk ahead.
  __device__ __forceinline__ const char* own_rows(int index, Places::Tensor tensor) const {
    return places().template get<char>(index, tensor) + places().step(tensor);
  }
  // q or k of the chunk under way once more, as they are.
  __device__ __forceinline__ void reload(int index) const {
    const bool queries = again<Core>(first_group, in_first_group);
    const Places::Tensor tensor = queries ? Places::q : Places::k;
    copy_tile(stage_of(index) + (queries ? Layout::q : Layout::k),
              reinterpret_cast<const __nv_bfloat16*>(own_rows(index, tensor)),
              static_cast<int>(places().step(tensor) / (kChunk * 2)), rows_in(index), p.key_dim, fresh_thread());
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
  }
  // The first group turns a tile of logits, which both have brought, while the second one is still at dg of the chunk
  // after; each goes on with the gates.
  __device__ __forceinline__ void turn_gates(int index) const {
    constexpr int kOwnBarrier = 1, kTurned = 3;
    if (in_first_group()) {  // anew, as in store_rows
      const int thread = fresh_thread(), row = thread / 8, rows = rows_in(index);
      const std::uint32_t tile = stage_of(index) + Layout::g + tile_piece(row, thread % 8);
      const GatesOfLogits gates_of(p.logit_scale, p.gate_min);
      __nv_bfloat162 most = __float2bfloat162_rn(0.0f);
#pragma unroll
      for (int i = 0; i < kTile; i += kGroupThreads / 8) {
        const std::uint32_t at = tile + 128 * i;
        const uint4 logits = load_shared_16(at), gates = gates_of(logits);
        most = larger_logits(most, logits);
        if (row + i < rows) store_shared_16(at, gates);
      }
      const bool weak = fmaxf(__low2float(most), __high2float(most)) > kWeakLogit;
      store_shared_4(weak_at(index) + thread / 32 * 4, __any_sync(0xffffffffu, weak));
      Core::publish();
      ptx::barrier(kOwnBarrier, kGroupThreads);
      asm volatile("bar.arrive %0, %1;" ::"n"(kTurned), "n"(kFusedThreads) : "memory");
    } else {
      ptx::barrier(kTurned, kFusedThreads);
    }
  }
  __device__ __forceinline__ std::uint32_t weak_at(int index) const { return base + Layout::weak + (index & 1) * 16; }
  __device__ __forceinline__ bool has_weak_gates(int index) const {
    const uint4 of_warps = load_shared_16(weak_at(index));
    return __any_sync(0xffffffffu, (of_warps.x | of_warps.y | of_warps.z | of_warps.w) != 0) != 0;
  }

  // ---- sums and powers of gates ----

  __device__ __forceinline__ Exponent exponent() const {
    float log;
    asm volatile("lg2.approx.f32 %0, %1;" : "=f"(log) : "f"(fabsf(p.scale)));
    return Exponent{first_group ? kLog2E : -kLog2E, first_group ? log : 0.0f};
  }
  // The scale's sign is put where it is negative.
  __device__ __forceinline__ bool negated() const { return anew(p.scale) < 0.0f && first_group; }

  // Of k-step t q~ or k~ in place; b: running sums of gates.
  __device__ __forceinline__ void gate_step(std::uint32_t own_tile, int t, const float (&b)[8], const Exponent& of_sums,
                                            int thread) const {
    std::uint32_t x[4];
    TensorCore80::load_a<k_inner>(x, own_tile, t, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = ptx::unpack_bf16(x[i]);
      x[i] = ptx::pack_bf16(pair.x * ptx::exp2(of_sums(b[2 * i])), pair.y * ptx::exp2(of_sums(b[2 * i + 1])));
    }
    if (negated()) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] ^= 0x80008000u;
    }
    Core::put_fragment(own_tile, x, t, thread);
  }
  // dh^ to its tile.
  __device__ __forceinline__ void put_decayed(const Accumulator& held, float2 decay, int thread) const {
    put_pairs<Core>(x_tile(), thread, [&](int i) {
      const float of_row = i & 1 ? decay.y : decay.x;
      return ptx::pack_bf16(held[2 * i] * of_row, held[2 * i + 1] * of_row);
    });
  }
  // q~ and k~ in place, and dh^ to its tile, as if the rung served; whether it does for what this thread has seen.
  // decay: of dh's rows.
  template <bool kByAnchors>
  __device__ __forceinline__ bool gate_in_place(int index, const Accumulator& held, float2& decay) const {
    const std::uint32_t g[1] = {stage_of(index) + Layout::g};
    const int thread = fresh_thread();
    bool in_range = true;
    if (kByAnchors && !first_group) {
      const Anchors to = anchors();
      in_range = Anchors::find_factors<true>(g[0], thread, [&](int t, float2 of_rows) {
        to.put_factor(t, of_rows, thread);
        decay = of_rows;  // the last
      });
    }
    Accumulator sums;
    start_sums<Core, false, 1>(sums, g, triangles());
    const float2 totals = sum_rows_of_tile(g[0], thread);
    const float low = totals.x * kLog2E, high = totals.y * kLog2E;
    // Where the running sums are long f32 would not hold what is left of them from an anchor.
    constexpr float reach = kByAnchors ? kLongest : kSteep;
    in_range = in_range && low >= -reach && high >= -reach;
    if (!kByAnchors) decay = make_float2(ptx::exp2(low), ptx::exp2(high));
    wait_for_sums<Core>(sums);
    if constexpr (kByAnchors) {
      sums_from_anchor(sums, thread);
      in_range = in_range && anchors_reach(sums);
    }
    const std::uint32_t own_tile = stage_of(index) + (first_group ? Layout::q : Layout::k);
    const Exponent of_sums = exponent();
    visit_sums<Core, false, 1>(sums, g, thread,
                               [&](int t, const float(&b)[8]) { gate_step(own_tile, t, b, of_sums, thread); });
    if (!first_group) put_decayed(held, decay, thread);
    return in_range;
  }

  // ---- gradients ----

  // What dg has from beyond the chunk, by key channel: the state before the chunk times its gradient. q dq of earlier
  // tokens is taken away from it and k dk added (finish_after), so the queries' part of the gradient holds the very
  // products that are in dq: what is left is made of products that both have, for gates of any strength.
  __device__ __forceinline__ void put_beyond(float2 sums) const {
    put_rows(base + Layout::beyond, sum_of_quad(sums), fresh_thread());
  }

  // dv and dg of the chunk after. held: dv, in the first group.
  template <bool kMayBeHeld>
  __device__ __forceinline__ void finish_after(int index, const Accumulator& held) const {
    const int after = index + 1, rows = rows_in(after);
    const std::uint32_t stage = stage_of(after);
    if (first_group) {
      if (is_wanted(Places::dv)) {
        store_through<Core>(stage + Layout::h, places().template get<__nv_bfloat16>(after, Places::dv),
                            static_cast<int>(f.gradients.dv.token), held, rows, p.value_dim);
      }
      return;
    }
    if (!is_wanted(Places::dg)) return;
    const std::uint32_t parts[4] = {stage + Layout::v, stage + Layout::k, stage + Layout::d_o, stage + Layout::q};
    const std::uint32_t from_beyond = base + Layout::beyond;
    float weight = 1.0f;  // of what is from beyond: 0 where it has been added
    Accumulator earlier;
    start_sums<Core, true, 2>(earlier, parts, triangles());
    wait_for_sums<Core>(earlier);
    // What few chunks want is done to the sums before all else: branches among what follows would cost every chunk.
    const auto times = [&](auto factors) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float(&sums)[8] = reinterpret_cast<float(&)[8]>(earlier[8 * t]);
        const int thread = fresh_thread();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[i] = fmaf(weight, float_at(from_beyond, column_of_element(thread, 8 * t + i)), sums[i]);
        }
        factors(sums, t, thread);
      }
      weight = 0.0f;
    };
    if (kMayBeHeld && gates_held()) {
      times([&](float(&sums)[8], int t, int thread) { times_held(sums, stage + Layout::g, t, thread); });
    }
    float slope = 0.0f, offset = 1.0f;
    if constexpr (kByLogits) {
      if (!cut_off()) {
        if (has_weak_gates(after)) {
          times([&](float(&sums)[8], int t, int thread) {
            times_slopes(sums, stage + Layout::g, t, slope_of_gate(p.logit_scale), thread);
          });
        } else {
          slope = -p.logit_scale;
          offset = p.logit_scale;
        }
      }
    }
    const auto from_all = [&](float part, int column) {
      return kMayBeHeld || kByLogits ? fmaf(weight, float_at(from_beyond, column), part)
                                     : part + float_at(from_beyond, column);
    };
    if constexpr (kInF32) {
      auto* to = places().template get<float>(after, Places::dg);
      const int stride = static_cast<int>(f.gradients.dg.token);
      visit_sums<Core, true, 2>(earlier, parts, fresh_thread(), [&](int t, const float(&part)[8]) {
        const int thread = fresh_thread();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = row_of_element(thread, 8 * t + 2 * i), column = column_of_element(thread, 8 * t + 2 * i);
          if (row >= rows || column >= p.key_dim) continue;
          *reinterpret_cast<float2*>(to + row * stride + column) =
              make_float2(from_all(part[2 * i], column), from_all(part[2 * i + 1], column + 1));
        }
      });
      return;
    }
    visit_sums<Core, true, 2>(earlier, parts, fresh_thread(), [&](int t, const float(&part)[8]) {
      const int thread = fresh_thread();
      float sums[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] = from_all(part[i], column_of_element(thread, 8 * t + i));
      if (kByLogits) {
        const float log2_of = __fdividef(kLog2E, p.logit_scale);
        times_slopes(
            sums, stage + Layout::g, t, [&](float gate) { return fmaf(slope, ptx::exp2(gate * log2_of), offset); },
            thread);
      }
      std::uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = ptx::pack_bf16(sums[2 * i], sums[2 * i + 1]);
      Core::put_fragment(stage + Layout::g, r, t, thread);
    });
    __syncwarp();
    if (kByLogits && cut_off()) {
      const auto stride = [](const Strided& s) { return static_cast<int>(s.token) * 2; };
      store_tile_by_logits(
          Rows{places().template get<char>(after, Places::dg), stride(f.gradients.dg), rows, p.key_dim},
          Rows{own_rows(after, Places::g), stride(p.g), rows, p.key_dim}, stage + Layout::g, p, fresh_thread());
    } else {
      store_tile_rows(stage + Layout::g, places().template get<__nv_bfloat16>(after, Places::dg),
                      static_cast<int>(f.gradients.dg.token), rows, p.key_dim, thread_shuffled<Core>(fresh_thread()));
    }
  }

  // dq or dk, with its factors, to memory; and the walk goes a chunk back.
  __device__ __forceinline__ void store_rows(int index, const Accumulator& d) const {
    const int thread = thread_shuffled<Core>(fresh_thread());
    const bool queries = in_first_group();  // anew: what hangs on it would be held through the walk
    const Strided& out = queries ? f.gradients.dq : f.gradients.dk;
    if (is_wanted(queries ? Places::dq : Places::dk)) {
      store_through<Core>(queries ? stage_of(index) + Layout::h : x_tile(),
                          places().template get<__nv_bfloat16>(index, queries ? Places::dq : Places::dk),
                          static_cast<int>(out.token), d, rows_in(index), p.key_dim);
    }
    if (first_group && thread < 32) places().step_back(index_there(), thread);  // read again: no register holds it
  }
  // After a rung that gates in place: E to its tiles, and dq or dk from its rows' units.
  template <bool kByAnchors>
  __device__ __forceinline__ void leave(int index, Accumulator& d) const {
    const int thread = thread_shuffled<Core>(fresh_thread());
    const std::uint32_t stage = stage_of(index), group = first_group ? 0 : kTileBytes;
    const std::uint32_t gates[1] = {stage + Layout::g};
    const Exponent of_sums = exponent();
    Accumulator sums;
    start_sums<Core, false, 1>(sums, gates, triangles());
    put_products<Core>(stage + Layout::d_o + group, stage + Layout::q + group, d, thread);
    wait_for_sums<Core>(sums);
    if constexpr (kByAnchors) sums_from_anchor(sums, thread);
    visit_sums<Core, false, 1>(sums, gates, thread, [&](int t, const float(&b)[8]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) d[8 * t + i] *= ptx::exp2(of_sums(b[i]));
    });
    if (negated()) scale_rows(d, -1.0f, -1.0f);
    store_rows(index, d);
  }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda

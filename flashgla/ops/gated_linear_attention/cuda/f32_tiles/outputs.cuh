// o and dv in f32 tiles, chunk by chunk in parallel, from the states before the chunks or the gradients after them.
// With one tile a head gates are worked out here, and the second is the first with time reversed:
//     o_i = q~_i h + sum_{j<=i} (q~_i k~_j) v_j           q~ = scale q 2^b, k~ = k 2^-b
//     dv_j = k^_j dh + sum_{i>=j} (k^_j q^_i) do_i        k^ = k 2^later, q^ = scale q 2^-later
// b: sum of the chunk's gates up to the token; later: of those after it. Else from what is prepared (prepared.cuh), the
// scores p_ij among it, with gates over values (their sums are B, over the chunk B_C) from v^ as well:
//     o_i = q~_i h + sum_{j<=i} p_ij v_j,                 dv_j = k^_j dh + sum_{i>=j} p_ij do_i
//     o_i = 2^(B_i - B_C) (2^B_C q~_i h + sum_{j<=i} p_ij v^_j)
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/exact.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <int kParts>
struct OutputsShared {  // offsets; decays and scores of steep tiles lie where the state and x come to afterwards
  static constexpr int own = 0, other = kSplitBytes<kParts>, state = 2 * other, x = 3 * other, decays = state,
                       scores = decays + kFloatTileBytes, totals = 4 * other, total = totals + 4 * 64 * 4;
};

// K and V up to 64, G = H. Grid: chunks x H. x: v, or do; images: of h, or dh.
template <class Kernel, bool kValueGradient>
__device__ __forceinline__ void make_own_outputs(const Params& p, const SplitOutputs& outputs, char* shared) {
  using Core = typename Kernel::Core;
  using T = typename Kernel::Element;
  constexpr int kParts = Kernel::parts;
  using Layout = OutputsShared<kParts>;
  const int thread = threadIdx.x, head = static_cast<int>(blockIdx.x % p.heads);
  const std::int64_t chunk = blockIdx.x / p.heads;
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) return;
  const std::uint32_t base = ptx::shared_address(shared), own = base + Layout::own, other = base + Layout::other,
                      state = base + Layout::state, x = base + Layout::x;
  float *decays = reinterpret_cast<float*>(shared + Layout::decays),
        *exact = reinterpret_cast<float*>(shared + Layout::scores),
        *totals = reinterpret_cast<float*>(shared + Layout::totals);
  const auto copy_state = [&] {
    copy_split<kParts>(state, outputs.images + (chunk * p.heads + head) * kSplitBytes<kParts>, thread);
    ptx::copy_async_commit();
  };

  const Place<T> own_place(kValueGradient ? p.k : p.q, c, head, 0, p.key_dim),
      other_place(kValueGradient ? p.q : p.k, c, head, 0, p.key_dim), x_place(outputs.x, c, head, 0, p.value_dim);
  Loaded<T> loaded_own, loaded_other, loaded_x;
  LoadedGates<T> loaded_gates;
  loaded_gates.load(p, c, head, 0, thread);
  load(loaded_own, own_place, thread);
  fetch_ahead(other_place, thread);
  fetch_ahead(x_place, thread);
  copy_state();
  float sums[kRowsEach][8], all[8];
  loaded_gates.take(sums, p);
  load(loaded_other, other_place, thread);
  sum_gates<kValueGradient>(sums, all, totals, thread);
  const bool steep = is_steep(all);
  // q brings the scale.
  const float own_scale = kValueGradient ? 1.0f : p.scale, other_scale = kValueGradient ? p.scale : 1.0f;
  Accumulator out, scores;
  clear(out);
  clear(scores);
  if (!steep) {
    put_loaded<kParts>(own, loaded_own, thread, [&](int i, int e) { return own_scale * ptx::exp2(sums[i][e]); });
    load(loaded_x, x_place, thread);
    put_loaded<kParts>(other, loaded_other, thread, [&](int i, int e) { return other_scale * ptx::exp2(-sums[i][e]); });
  } else {
    put_loaded<kParts>(own, loaded_own, thread, [&](int, int) { return own_scale; });
    put_loaded<kParts>(other, loaded_other, thread, [&](int, int) { return other_scale; });
    loaded_gates.load(p, c, head, 0, thread);
    loaded_gates.take_decays(sums, p);
    ptx::copy_async_wait<0>();
    __syncthreads();
    put_floats(decays, sums, thread);
    __syncthreads();
    exact_scores<kParts>(exact, kValueGradient ? other : own, kValueGradient ? own : other, decays);
    __syncthreads();
    gate_rows_exactly<kParts, kValueGradient>(own, decays);
    add_exact(scores, exact, kValueGradient, thread);
    load(loaded_x, x_place, thread);
    __syncthreads();  // the scores have been read
    copy_state();
  }
  put_loaded<kParts>(x, loaded_x, thread);
  ptx::copy_async_wait<0>();
  Core::publish();
  __syncthreads();
  constexpr Stored inner = Stored::k_inner, outer = Stored::k_outer;
  // f16 in two parts and f32 in three have the registers.
  constexpr Loads kLoads = sizeof(T) == (kParts == 2 ? 2 : 4) ? Loads::ahead : Loads::in_turn;
  if (!steep) {
    Core::begin(scores, out);
    add_product<Core, kParts, inner, inner, false, kLoads>(scores, own, other, thread);
    add_product<Core, kParts, inner, outer, false, kLoads>(out, own, state, thread);
    Core::finish(scores, out);
  } else {
    Core::begin(out);
    add_product<Core, kParts, inner, outer, false, kLoads>(out, own, state, thread);
    Core::finish(out);
  }
  keep_pairs(scores, kValueGradient, thread);
  SplitOperand<kParts> operand(scores);
  add_product<Core, kParts, outer>(out, operand, x, thread);
  const Chunk to = again<Core>(c, [&] { return locate(p.sequences, fresh_block() / p.heads); });
  const int of = again<Core>(head, [&] { return static_cast<int>(fresh_block() % p.heads); });
  store_rows(Place<T>(outputs.out, to, of, 0, p.value_dim), out, thread_again<Core>(thread));
}

template <int kParts>
constexpr int kPreparedOutputsShared = 4 * kSplitBytes<kParts>;  // two stages of two operands

// From what is prepared. Grid: chunks x (H, or for dv G) x value tiles, innermost last. x: v, or do; images: of h, or
// dh.
template <class Kernel, bool kValueGradient>
__device__ __forceinline__ void make_prepared_outputs(const Params& p, const SplitOutputs& outputs, char* shared) {
  using Core = typename Kernel::Core;
  using T = typename Kernel::Element;
  constexpr int kParts = Kernel::parts;
  constexpr std::int64_t kBytes = kSplitBytes<kParts>;
  const int thread = threadIdx.x, key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const int value_tile = static_cast<int>(blockIdx.x % value_tiles), value = value_tile * kTile;
  const int query_heads = p.heads * p.group, heads = kValueGradient ? p.heads : query_heads;
  const int head = static_cast<int>(blockIdx.x / value_tiles % heads), kv_head = kValueGradient ? head : head / p.group;
  const std::int64_t chunk = blockIdx.x / value_tiles / heads;
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) return;
  const char* own =
      (kValueGradient ? outputs.prepared.k : outputs.prepared.q) + (chunk * heads + head) * key_tiles * kBytes;
  const char* states = outputs.images + ((chunk * p.heads + kv_head) * key_tiles * value_tiles + value_tile) * kBytes;
  const std::uint32_t base = ptx::shared_address(shared);
  const auto stage = [&](int step) { return base + step % 2 * 2 * kSplitBytes<kParts>; };

  // Steps: the key tiles, then the scores of the query head, for dv of each in the group.
  const int steps = key_tiles + (kValueGradient ? p.group : 1);
  Loaded<T> x;
  const auto start = [&](int step) {
    if (step < key_tiles) {
      copy_split<kParts>(stage(step), own + step * kBytes, thread);
      copy_split<kParts>(stage(step) + kSplitBytes<kParts>, states + step * value_tiles * kBytes, thread);
    } else if (step < steps) {
      const int query_head = kValueGradient ? kv_head * p.group + step - key_tiles : head;
      copy_split<kParts>(stage(step), outputs.prepared.scores + (chunk * query_heads + query_head) * kBytes, thread);
      load(x, Place<T>(outputs.x, c, kValueGradient ? query_head : kv_head, value, p.value_dim), thread);
    }
    ptx::copy_async_commit();
  };
  Accumulator out;
  clear(out);
  start(0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const std::uint32_t a = stage(step), b = a + kSplitBytes<kParts>;
    const bool of_pairs = step >= key_tiles;
    if (of_pairs) put_loaded<kParts>(b, x, thread);
    ptx::copy_async_wait<0>();
    Core::publish();
    __syncthreads();
    start(step + 1);
    constexpr Stored inner = Stored::k_inner, outer = Stored::k_outer;
    if (kValueGradient && of_pairs) {
      Core::begin(out);
      add_product<Core, kParts, outer, outer, false, Loads::in_turn>(out, a, b, thread);
      Core::finish(out);
    } else {
      Core::begin(out);
      add_product<Core, kParts, inner, outer, false, Loads::in_turn>(out, a, b, thread);
      Core::finish(out);
    }
  }
  store_rows(Place<T>(outputs.out, c, head, value, p.value_dim), out, thread);
}

// Stages of two operands; totals, and the chunk's decays.
template <int kParts>
struct GatedOutputsShared {
  static constexpr int stages = kParts == 1 ? 4 : 2, stage = 2 * kSplitBytes<kParts>;
  static constexpr int totals = stages * stage, decay = totals + 4 * kTile * 4, total = decay + kTile * 4;
};

// o with gates over values. p: the values' side. x: v; images: of h; prepared: of the keys; later: v^. Grid: chunks x H
// x value tiles, innermost last.
template <class Kernel>
__device__ __forceinline__ void make_gated_outputs(const Params& p, const SplitOutputs& outputs, char* shared) {
  using Core = typename Kernel::Core;
  using T = typename Kernel::Element;
  constexpr int kParts = Kernel::parts;
  constexpr std::int64_t kBytes = kSplitBytes<kParts>;
  const int thread = threadIdx.x, key_tiles = tiles_of(p.value_dim), value_tiles = tiles_of(p.key_dim);
  const int value_tile = static_cast<int>(blockIdx.x % value_tiles), channel = value_tile * kTile;
  const int heads = p.heads * p.group, head = static_cast<int>(blockIdx.x / value_tiles % heads),
            kv_head = head / p.group;
  const std::int64_t chunk = blockIdx.x / value_tiles / heads;
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) return;
  const char* own = outputs.prepared.q + (chunk * heads + head) * key_tiles * kBytes;
  const char* states = outputs.images + ((chunk * p.heads + kv_head) * key_tiles * value_tiles + value_tile) * kBytes;
  using Layout = GatedOutputsShared<kParts>;
  const std::uint32_t base = ptx::shared_address(shared);
  const auto stage = [&](int step) { return base + step % Layout::stages * Layout::stage; };

  LoadedGates<T> gates;  // with mma.sync, whose operands want the registers, behind the last tile's products
  constexpr bool kAhead = !std::is_same_v<Core, TensorCore80>;
  const auto start = [&](int step) {
    if (step < key_tiles) {
      copy_split<kParts>(stage(step), own + step * kBytes, thread);
      copy_split<kParts>(stage(step) + kSplitBytes<kParts>, states + step * value_tiles * kBytes, thread);
    } else if (step == key_tiles) {
      copy_split<kParts>(stage(step), outputs.prepared.scores + (chunk * heads + head) * kBytes, thread);
      copy_split<kParts>(stage(step) + kSplitBytes<kParts>,
                         outputs.later + ((chunk * p.heads + kv_head) * value_tiles + value_tile) * kBytes, thread);
      kAhead ? gates.load(p, c, kv_head, channel, thread) : gates.fetch_ahead(p, c, kv_head, channel, thread);
    }
    ptx::copy_async_commit();
  };
  Accumulator out;
  clear(out);
#pragma unroll 1
  for (int step = 0; step + 1 < Layout::stages; ++step) start(step);
#pragma unroll 1
  for (int step = 0; step < key_tiles; ++step) {
    ptx::copy_async_wait<Layout::stages - 2>();
    Core::publish();
    __syncthreads();
    start(step + Layout::stages - 1);
    Core::begin(out);
    add_product<Core, kParts, Stored::k_inner, Stored::k_outer>(out, stage(step), stage(step) + kSplitBytes<kParts>,
                                                                thread_again<Core>(thread));
    Core::finish(out);
  }
  if constexpr (!kAhead) gates.load(p, c, kv_head, channel, thread_again<Core>(thread));
  // The pairs, with the chunk's end as anchor. Stages that are free take sums of later gates, or in steep tiles decays,
  // and o.
  const std::uint32_t scores = stage(key_tiles), v = scores + kSplitBytes<kParts>;
  const auto floats = [&](int step) { return reinterpret_cast<float*>(shared + (stage(step) - base)); };
  float *sums = floats(key_tiles + 1), *o = kParts == 1 ? floats(key_tiles + 2) : sums + kTile * kTile,
        *decay = reinterpret_cast<float*>(shared + Layout::decay);
  float b[kRowsEach][8], all[8];
  gates.take(b, p);
  sum_gates<true>(b, all, reinterpret_cast<float*>(shared + Layout::totals), thread);
  const bool steep = is_steep(all);
  ptx::copy_async_wait<0>();
  if (steep) {
    gates.take_decays(b, p);
    Loaded<T> x;
    load(x, Place<T>(outputs.x, c, kv_head, channel, p.key_dim), thread);
    __syncthreads();  // v^ is there, which nobody wants
    put_loaded<kParts>(v, x, thread);
  }
  put_floats(sums, b, thread);  // the last products there lie before the barrier of sum_gates
  put_decays(decay, all, thread);
  Core::publish();
  __syncthreads();
  if (steep) {
    by_rows(out, o, thread, [&] { finish_exact_dq<kParts>(o, scores, v, sums); });
  } else {
    scale_columns(out, [&](int j) { return *reinterpret_cast<const float2*>(decay + 8 * j + 2 * (thread & 3)); });
    Core::begin(out);
    add_product<Core, kParts, Stored::k_inner, Stored::k_outer>(out, scores, v, thread);
    Core::finish(out);
    for_floats(sums, thread, [&](int i, float later) { out[i] *= ptx::exp2(-later); });
  }
  const unsigned block = again<Core>(blockIdx.x, fresh_block);
  const Chunk to = again<Core>(c, [&] { return locate(p.sequences, block / value_tiles / heads); });
  const int to_head = static_cast<int>(block / value_tiles % heads),
            to_channel = static_cast<int>(block % value_tiles) * kTile, mover = thread_again<Core>(thread);
  if constexpr (kParts == 1) {  // bf16: in pieces of 16 bytes, through the tile of o
    const std::uint32_t tile = stage(key_tiles + 2);
    put_rounded<Core>(tile, out, mover);
    __syncwarp();
    store_tile(rows_of(outputs.out, 2, to, to_head, to_channel, p.key_dim), tile, mover);
  } else {
    store_rows(Place<T>(outputs.out, to, to_head, to_channel, p.key_dim), out, mover);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Gates over values in f32 tiles, alone or beside gates over keys. The operator is the same from both sides
// (value_gates/README.md): what f32_tiles/prepared.cuh makes of q, k, g it also makes of do, v, gv, and
// f32_tiles/gradients.cuh finds dq, dk, dg, or o, dv, dgv, from either. Here: what only the values have.
//     h after a chunk = 2^(b_C + B_C) h + sum_j k^_j v^_j,    dh before it = 2^(b_C + B_C) dh + sum_i q~_i do~_i
//     o_i = 2^(B_i - B_C) (2^B_C q~_i h + sum_{j<=i} p_ij v^_j)
// b, B: running sums of a key's and of a value's gates, b_C, B_C their last; v^ = v 2^(B_C - B), do~ = do 2^B.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/gradients.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/prepared.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Stages of two operands; totals, and the chunk's decays.
template <int kParts>
struct GatedOutputsShared {
  static constexpr int stages = kParts == 1 ? 4 : 2, stage = 2 * kSplitBytes<kParts>;
  static constexpr int totals = stages * stage, decay = totals + 4 * kTile * 4, total = decay + kTile * 4;
};

// o. p: the values' side. outputs.x: v; images: of h; prepared: of the keys; later: v^. Grid: chunks x H x value tiles,
// innermost last.
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
    store_tile(rows_of(p.o, 2, to, to_head, to_channel, p.key_dim), tile, mover);
  } else {
    store_rows(Place<T>(p.o, to, to_head, to_channel, p.key_dim), out, mover);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

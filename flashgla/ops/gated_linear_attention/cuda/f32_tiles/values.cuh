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

// Slots of the keys' operand, the values', and their decays.
template <int kParts>
struct GatedStatesShared {
  static constexpr int slots = kParts == 1 ? 3 : 2, slot = 2 * kSplitBytes<kParts>;
  static constexpr int decays = slots * slot, slot_decays = 2 * kTile;
  static constexpr int total = decays + slots * slot_decays * 4;
};

// The states, as pass_split_states (f32_tiles/states.cuh), both operands as images. Grid: (N x G x key tiles x value
// tiles, innermost last) x segments.
template <class Kernel, bool kBackwards>
__device__ __forceinline__ void pass_gated_states(const Params& p, const SplitPass& pass, char* shared) {
  using Core = typename Kernel::Core;
  constexpr int kParts = Kernel::parts;
  using Layout = GatedStatesShared<kParts>;
  constexpr std::int64_t kBytes = kSplitBytes<kParts>;
  const int thread = threadIdx.x, key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const int value_tile = static_cast<int>(blockIdx.x % value_tiles),
            key_tile = static_cast<int>(blockIdx.x / value_tiles % key_tiles);
  const unsigned cell = blockIdx.x / value_tiles / key_tiles;
  const int kv_head = static_cast<int>(cell % p.heads), heads_each = kBackwards ? p.group : 1;
  const Span span = span_of(p.sequences, cell / p.heads);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk), segment = blockIdx.y;
  const int first = static_cast<int>(static_cast<std::int64_t>(chunks) * segment / pass.segments),
            last = static_cast<int>(static_cast<std::int64_t>(chunks) * (segment + 1) / pass.segments);
  const std::uint32_t slots = ptx::shared_address(shared);
  float* slot_decays = reinterpret_cast<float*>(shared + Layout::decays);  // of keys, then of values
  const int row = row_of_element(thread, 0), column = column_of_element(thread, 0);
  const auto chunk_at = [&](int i) {  // and kv head
    return (span.chunk_begin + (kBackwards ? chunks - 1 - i : i)) * p.heads + kv_head;
  };

  // Steps: the query heads of a chunk (forwards one), chunk after chunk in the order of the walk. Copies what is so
  // many steps after (i, h), if there is that, to a slot.
  const auto copy_ahead = [&](int steps, int i, int h, int to_slot) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const bool ends_chunk = h + 1 == heads_each;
      i = ends_chunk ? i + 1 : i;
      h = ends_chunk ? 0 : h + 1;
    }
    if (i < last) {
      const std::int64_t kv_at = chunk_at(i), at = kv_at * heads_each + h;
      const std::uint32_t to = slots + to_slot * Layout::slot;
      copy_split<kParts>(to, (kBackwards ? pass.prepared.q : pass.prepared.k) + (at * key_tiles + key_tile) * kBytes,
                         thread);
      copy_split<kParts>(to + kSplitBytes<kParts>,
                         (kBackwards ? pass.values.q : pass.values.k) + (at * value_tiles + value_tile) * kBytes,
                         thread);
      if (thread < 32) {
        const float* decays = thread < 16 ? pass.prepared.decay + (kv_at * key_tiles + key_tile) * kTile
                                          : pass.values.decay + (kv_at * value_tiles + value_tile) * kTile;
        ptx::copy_async_16(ptx::shared_address(slot_decays + to_slot * Layout::slot_decays + 4 * thread),
                           decays + 4 * (thread % 16));
      }
    }
    ptx::copy_async_commit();
  };
#pragma unroll
  for (int step = 0; step + 1 < Layout::slots; ++step) copy_ahead(step, first, 0, step);
  int slot = 0;
  const auto free_slot = [&] {  // that of the step before
    return Layout::slots == 2 ? slot ^ 1 : slot == 0 ? Layout::slots - 1 : slot - 1;
  };

  const std::int64_t state_at = static_cast<std::int64_t>(cell) * p.key_dim * p.value_dim;
  Accumulator state;
  read_state(state, pass.start != nullptr && segment == 0 ? pass.start + state_at : nullptr, p.key_dim, p.value_dim,
             key_tile * kTile, value_tile * kTile, thread);
  if constexpr (kParts == 1) {  // a sequence without tokens hands its state on to the bit
    if (chunks > 0) scale_rows(state, pass.start_factor, pass.start_factor);
  }
  // state = state * decays + f(element).
  const auto decay_and_add = [&](const float* decays, const float* of_values, auto f) {
    const float of_row[2] = {decays[row], decays[row + 8]};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 of_column = *reinterpret_cast<const float2*>(of_values + 8 * j + column);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        state[4 * j + e] = fmaf(state[4 * j + e], of_row[e >> 1] * (e & 1 ? of_column.y : of_column.x), f(4 * j + e));
    }
  };
  const std::int64_t tile_at = blockIdx.x, tiles = gridDim.x;
  const auto segment_end = [&](int s) { return pass.segment_ends + (s * tiles + tile_at) * (kTile * kTile); };
  if (!pass.ends_only) {
    for (int s = 0; s < segment; ++s) {
      const float* decays = pass.segment_decays + (s * tiles + tile_at) * 2 * kTile;
      decay_and_add(decays, decays + kTile, [](int) { return 0.0f; });
      add_part(state, segment_end(s), thread);
    }
  }

  float product = 1.0f;  // over the segment, of decay number `thread`
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    if (!pass.ends_only) {
      __syncthreads();  // the free slot has been read: what goes out passes through it
      store_split_image<Core, kParts>(
          pass.images + ((chunk_at(i) * key_tiles + key_tile) * value_tiles + value_tile) * kBytes,
          slots + free_slot() * Layout::slot, state, thread);
    }
#pragma unroll 1
    for (int h = 0; h < heads_each; ++h) {
      const std::uint32_t a = slots + slot * Layout::slot;
      const float *decays = slot_decays + slot * Layout::slot_decays, *of_values = decays + kTile;
      ptx::copy_async_wait<Layout::slots - 2>();
      Core::publish();
      __syncthreads();
      copy_ahead(Layout::slots - 1, i, h, free_slot());
      slot = Layout::slots == 2 ? slot ^ 1 : slot + 1 == Layout::slots ? 0 : slot + 1;
      // Apart, so that the state is rounded to the nearest: sums inside the tensor cores cut off.
      Accumulator update;
      clear(update);
      Core::begin(update);
      add_product<Core, kParts, Stored::k_outer, Stored::k_outer>(update, a, a + kSplitBytes<kParts>, thread);
      Core::finish(update);
      if (h == 0) {
        product *= decays[thread];
        decay_and_add(decays, of_values, [&](int e) { return update[e]; });
      } else {
#pragma unroll
        for (int e = 0; e < 32; ++e) state[e] += update[e];
      }
    }
  }
  if (pass.ends_only) {
    write_part(segment_end(segment), state, thread);
    pass.segment_decays[(segment * tiles + tile_at) * 2 * kTile + thread] = product;
  } else if (pass.end != nullptr && segment == pass.segments - 1) {
    if constexpr (kParts == 1) {
      if (chunks > 0) scale_rows(state, pass.end_factor, pass.end_factor);
    }
    write_state(pass.end + state_at, state, p.key_dim, p.value_dim, key_tile * kTile, value_tile * kTile, thread);
  }
}

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

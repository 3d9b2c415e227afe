// The states of f32 tiles: one pass over the chunks of each sequence, a tile of 64 key by 64 value channels a block.
//     h after a chunk = 2^(b_C + B_C) h + sum_j k^_j v^_j,    dh before it = 2^(b_C + B_C) dh + sum_i q~_i do~_i
// b, B: running sums of a key's and of a value's gates, b_C, B_C their last; k^ = k 2^(b_C - b), q~ = scale q 2^b, v^ =
// v 2^(B_C - B), do~ = do 2^B, without gates over values v and do. No exponent is positive, whatever the gates.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/tiles.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// The gated operand (prepared: two slots), the other one and what goes out; totals and decay.
template <int kParts, bool kPrepared>
constexpr int kStatesShared = (kPrepared ? 4 : 3) * kSplitBytes<kParts> + (kPrepared ? 0 : (4 * 64 + 64) * 4);

// Without gates over values. kPrepared: k^ and q~ come as images, else K and V are at most 64 and G = H. Grid: (N x G x
// key tiles x value tiles, innermost last) x segments.
template <class Kernel, bool kBackwards, bool kPrepared>
__device__ __forceinline__ void pass_split_states(const Params& p, const SplitPass& pass, char* shared) {
  using Core = typename Kernel::Core;
  using T = typename Kernel::Element;
  constexpr int kParts = Kernel::parts;
  constexpr std::int64_t kBytes = kSplitBytes<kParts>;
  const int thread = threadIdx.x, row = row_of_element(thread, 0);
  const int key_tiles = kPrepared ? tiles_of(p.key_dim) : 1, value_tiles = kPrepared ? tiles_of(p.value_dim) : 1;
  const int value_tile = static_cast<int>(blockIdx.x % value_tiles),
            key_tile = static_cast<int>(blockIdx.x / value_tiles % key_tiles);
  const unsigned cell = blockIdx.x / value_tiles / key_tiles;
  const int kv_head = static_cast<int>(cell % p.heads), heads_each = kBackwards && kPrepared ? p.group : 1;
  const Span span = span_of(p.sequences, cell / p.heads);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const int segment = blockIdx.y, channel = key_tile * kTile, value = value_tile * kTile;
  const int first = static_cast<int>(static_cast<std::int64_t>(chunks) * segment / pass.segments),
            last = static_cast<int>(static_cast<std::int64_t>(chunks) * (segment + 1) / pass.segments);
  constexpr int kSlots = kPrepared ? 2 : 1;
  const std::uint32_t a_slots = ptx::shared_address(shared), b = a_slots + kSlots * kSplitBytes<kParts>,
                      out = b + kSplitBytes<kParts>;
  float *totals = reinterpret_cast<float*>(shared + 3 * kSplitBytes<kParts>), *decay = totals + 4 * 64;

  const auto index_of = [&](int i) { return kBackwards ? chunks - 1 - i : i; };
  const auto chunk_at = [&](int i) { return (span.chunk_begin + index_of(i)) * p.heads + kv_head; };  // and kv head

  // Steps: the query heads of a chunk (forwards one), chunk after chunk in the order of the walk. Registers hold what
  // the next step needs, but for images, which go to the free slot.
  Loaded<T> loaded_a, loaded_b;
  LoadedGates<T> loaded_gates;
  float next_factor[2];
  int slot = 0;
  const auto load_step = [&](int i, int h) {
    Chunk c = chunk_of(span, index_of(i));
    c.batch = anew(c.batch);
    const int head = anew(kv_head * heads_each + h);
    const int own = fresh_thread();
    load(loaded_b, Place<T>(pass.b, c, head, value, p.value_dim), own);
    if constexpr (kPrepared) {
      const float* factors = pass.prepared.decay + (chunk_at(i) * key_tiles + key_tile) * kTile;
      next_factor[0] = factors[row];
      next_factor[1] = factors[row + 8];
    } else {
      load(loaded_a, Place<T>(kBackwards ? p.q : p.k, c, head, channel, p.key_dim), own);
      loaded_gates.load(p, c, anew(kv_head), channel, own);
    }
  };
  const auto copy_image_of_step = [&](int i, int h) {
    if constexpr (kPrepared) {
      const std::int64_t at = chunk_at(i) * heads_each + h;
      copy_split<kParts>(a_slots + slot * kSplitBytes<kParts>,
                         (kBackwards ? pass.prepared.q : pass.prepared.k) + (at * key_tiles + key_tile) * kBytes,
                         thread);
      ptx::copy_async_commit();
    }
  };
  if (first < last) {
    load_step(first, 0);
    copy_image_of_step(first, 0);
  }

  // In a [N,G,K,V] tensor: worked out where it is asked for.
  const auto state_at = [&] { return anew(static_cast<std::int64_t>(cell)) * p.key_dim * p.value_dim; };
  Accumulator state;
  read_state(state, pass.start != nullptr && segment == 0 ? pass.start + state_at() : nullptr, p.key_dim, p.value_dim,
             channel, value, thread);
  const std::int64_t tile_at = blockIdx.x, tiles = gridDim.x;
  const auto segment_end = [&](int s) { return pass.segment_ends + (s * tiles + tile_at) * (kTile * kTile); };
  const auto segment_decays = [&](int s) { return pass.segment_decays + (s * tiles + tile_at) * kTile; };
  if (!pass.ends_only) {
    for (int s = 0; s < segment; ++s) {
      scale_rows(state, segment_decays(s)[row], segment_decays(s)[row + 8]);
      add_part(state, segment_end(s), thread);
    }
  }

  float product[2] = {1.0f, 1.0f};
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    if (!pass.ends_only) {
      store_split_image<Core, kParts>(
          pass.images + ((chunk_at(i) * key_tiles + key_tile) * value_tiles + value_tile) * kBytes, out, state, thread);
    }
#pragma unroll 1
    for (int h = 0; h < heads_each; ++h) {
      const std::uint32_t a = a_slots + slot * kSplitBytes<kParts>;
      const bool ends_chunk = h + 1 == heads_each, ends = ends_chunk && i + 1 == last;
      float factor[2] = {1.0f, 1.0f};
      // The first barrier: the last step's operands have been read.
      if constexpr (kPrepared) {
        if (h == 0) {
          factor[0] = next_factor[0];
          factor[1] = next_factor[1];
        }
        __syncthreads();
      } else {
        float sums[kRowsEach][8], all[8];
        loaded_gates.take(sums, p);
        sum_gates<!kBackwards>(sums, all, totals, thread);
        const float scale = kBackwards ? p.scale : 1.0f;
        put_loaded<kParts>(a, loaded_a, fresh_thread(), [&](int i, int e) { return scale * ptx::exp2(sums[i][e]); });
        put_decays(decay, all, thread);
      }
      put_loaded<kParts>(b, loaded_b, fresh_thread());
      if (!ends) load_step(ends_chunk ? i + 1 : i, ends_chunk ? 0 : h + 1);
      ptx::copy_async_wait<0>();
      Core::publish();
      __syncthreads();
      if constexpr (kPrepared) {
        slot ^= 1;
        if (!ends) copy_image_of_step(ends_chunk ? i + 1 : i, ends_chunk ? 0 : h + 1);
      } else {
        factor[0] = decay[row];
        factor[1] = decay[row + 8];
      }
      product[0] *= factor[0];
      product[1] *= factor[1];
      constexpr Stored outer = Stored::k_outer;
      constexpr Loads kLoads = kPrepared ? Loads::in_turn : Loads::ahead;
      if constexpr (kParts == 2) {
        scale_rows(state, factor[0], factor[1]);
        Core::begin(state);
        add_product<Core, kParts, outer, outer, false, kLoads>(state, a, b, thread);
        Core::finish(state);
      } else {
        // f32: the chunk's part apart, so that the state is rounded once a chunk. A long sequence would else show what
        // the tensor cores cut off their sums.
        Accumulator update;
        clear(update);
        Core::begin(update);
        add_product<Core, kParts, outer, outer, true, kLoads>(update, a, b, thread);
        Core::finish(update);
#pragma unroll
        for (int e = 0; e < 32; ++e) state[e] = fmaf(state[e], factor[(e >> 1) & 1], update[e]);
      }
    }
  }
  if (pass.ends_only) {
    write_part(segment_end(segment), state, thread);
    if (column_of_element(thread, 0) == 0) {
      segment_decays(segment)[row] = product[0];
      segment_decays(segment)[row + 8] = product[1];
    }
  } else if (pass.end != nullptr && segment == pass.segments - 1) {
    write_state(pass.end + state_at(), state, p.key_dim, p.value_dim, channel, value, thread);
  }
}

// Slots of the keys' operand, the values', and their decays.
template <int kParts>
struct GatedStatesShared {
  static constexpr int slots = kParts == 1 ? 3 : 2, slot = 2 * kSplitBytes<kParts>;
  static constexpr int decays = slots * slot, slot_decays = 2 * kTile;
  static constexpr int total = decays + slots * slot_decays * 4;
};

// With gates over values: both operands come as images. Grid as above.
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

}  // namespace flashgla::ops::gated_linear_attention::cuda

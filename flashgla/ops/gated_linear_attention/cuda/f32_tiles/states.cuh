// The states of f32 tiles: one pass over the chunks of each sequence, a tile of 64 key by 64 value channels a block.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/tiles.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// The gated operand (prepared: two slots), the other one and what goes out; totals and decay.
template <int kParts, bool kPrepared>
constexpr int kStatesShared = (kPrepared ? 4 : 3) * kSplitBytes<kParts> + (kPrepared ? 0 : (4 * 64 + 64) * 4);

// Forwards h, from k 2^(later gates) and v; backwards dh, from scale q 2^(gates up to it) and do. No exponent is
// positive, whatever the gates. kPrepared: they come as images, else K and V are at most 64 and G = H. Grid: (N x G x
// key tiles x value tiles, innermost last) x segments.
template <class Kernel, bool kBackwards, bool kPrepared>
__device__ __forceinline__ void pass_split_states(const Params& p, const SplitPass& pass, char* shared) {
  using Core = typename Kernel::Core;
  using T = typename Kernel::Element;
  constexpr int kParts = Kernel::parts;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const int value_tile = static_cast<int>(blockIdx.x % value_tiles),
            key_tile = static_cast<int>(blockIdx.x / value_tiles % key_tiles);
  const unsigned cell = blockIdx.x / value_tiles / key_tiles;
  const int kv_head = static_cast<int>(cell % p.heads), heads_each = kBackwards && kPrepared ? p.group : 1;
  const std::int64_t n = cell / p.heads;
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const int segment = blockIdx.y, channel = key_tile * kTile, value = value_tile * kTile;
  const int first = static_cast<int>(static_cast<std::int64_t>(chunks) * segment / pass.segments),
            last = static_cast<int>(static_cast<std::int64_t>(chunks) * (segment + 1) / pass.segments);
  constexpr int kSlots = kPrepared ? 2 : 1;
  const std::uint32_t a_slots = ptx::shared_address(shared), b = a_slots + kSlots * kSplitBytes<kParts>,
                      out = b + kSplitBytes<kParts>;
  float *totals = reinterpret_cast<float*>(shared + 3 * kSplitBytes<kParts>), *decay = totals + 4 * 64;
  const int row = 16 * warp + (lane >> 2);

  // Steps: the query heads of a chunk (forwards one), chunk after chunk in the order of the walk. Registers hold what
  // the next step needs, but for images, which go to the free slot.
  Loaded<T> loaded_a, loaded_b;
  LoadedGates<T> loaded_gates;
  float next_factor[2];
  int slot = 0;
  const auto load_step = [&](int i, int h) {
    const int index = kBackwards ? chunks - 1 - i : i;
    Chunk c = chunk_of(span, index);
    c.batch = anew(c.batch);
    const int head = anew(kv_head * heads_each + h);
    const int own = fresh_thread();
    load(loaded_b, Place<T>(pass.b, c, head, value, p.value_dim), own);
    if constexpr (kPrepared) {
      const float* factors =
          pass.prepared.decay + (((span.chunk_begin + index) * p.heads + kv_head) * key_tiles + key_tile) * kTile;
      next_factor[0] = factors[row];
      next_factor[1] = factors[row + 8];
    } else {
      load(loaded_a, Place<T>(kBackwards ? p.q : p.k, c, head, channel, p.key_dim), own);
      loaded_gates.load(p, c, anew(kv_head), channel, own);
    }
  };
  const auto copy_image_of_step = [&](int i, int h) {
    if constexpr (kPrepared) {
      const std::int64_t at =
          ((span.chunk_begin + (kBackwards ? chunks - 1 - i : i)) * p.heads + kv_head) * heads_each + h;
      copy_split<kParts>(
          a_slots + slot * kSplitBytes<kParts>,
          (kBackwards ? pass.prepared.q : pass.prepared.k) + (at * key_tiles + key_tile) * kSplitBytes<kParts>, thread);
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
  if (!pass.ends_only) {
    for (int s = 0; s < segment; ++s) {
      const float* decays = pass.segment_decays + (s * tiles + tile_at) * kTile;
      scale_rows(state, decays[row], decays[row + 8]);
      add_part(state, segment_end(s), thread);
    }
  }

  float product[2] = {1.0f, 1.0f};
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    const int index = kBackwards ? chunks - 1 - i : i;
    const Chunk c = chunk_of(span, index);
    if (!pass.ends_only) {
      const std::int64_t at = (span.chunk_begin + index) * p.heads + kv_head;
      store_split_image<Core, kParts>(
          pass.images + ((at * key_tiles + key_tile) * value_tiles + value_tile) * kSplitBytes<kParts>, out, state,
          thread);
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
    if ((lane & 3) == 0) {
      float* decays = pass.segment_decays + (segment * tiles + tile_at) * kTile;
      decays[row] = product[0];
      decays[row + 8] = product[1];
    }
  } else if (pass.end != nullptr && segment == pass.segments - 1) {
    write_state(pass.end + state_at(), state, p.key_dim, p.value_dim, channel, value, thread);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

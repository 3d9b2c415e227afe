// One walk through time on Hopper: states at the start of every chunk and outputs (kOutputs), or states alone, as
// walk.cuh makes them. A block has two heads of a sequence, whose states stay in the registers of groups of 128
// threads, one a head where there are outputs, else one for each 64 key channels; and a warp that brings chunks.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/gate_sums.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/ring.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

template <int kTiles, bool kOutputsIn>
struct WalkByRole {
  static constexpr bool outputs = kOutputsIn;
  static constexpr int heads = 2, tiles = kTiles, own_tiles = outputs ? tiles : 1;  // of a group
  static constexpr int groups_each = tiles / own_tiles, groups = heads * groups_each;
  static constexpr int threads = groups * kGroupThreads + (outputs ? kGroupThreads : 32), stages = outputs ? 3 : 4;
  // Of a thread with outputs: what the compiler has for each, and what a head's group has of the third's.
  static constexpr int registers = 168, head_registers = 232, producer_registers = 40;
  static_assert(heads * head_registers + producer_registers <= (heads + 1) * registers);
  // Shared memory: stages of q, keys and each head's values and sums of gates; each group's state as the products read
  // it and as it leaves.
  static constexpr int keys = outputs ? tiles * kTileBytes : 0, values = keys + tiles * kTileBytes;
  static constexpr int gates = values + heads * kTileBytes;
  static constexpr int stage = (gates + heads * kGateBytes + 1023) / 1024 * 1024;
  static constexpr int states = stages * stage, barriers = states + heads * tiles * kTileBytes;
  static constexpr int total = barriers + 2 * stages * 8;
  static_assert(total <= 227 * 1024);
};

struct WalkMaps {
  RowMap queries, keys, values;  // queries: with outputs
};

template <class CoreIn, int kTiles, bool kOutputs, bool kBackwardsIn>
struct WalkView {
  using Core = CoreIn;
  using Layout = WalkByRole<kTiles, kOutputs>;
  static constexpr bool kBackwards = kBackwardsIn;
  const Params& p;
  const Walk& walk;
  const WalkMaps& maps;
  const float* gate_sums;
  Span span;
  int chunks, n, first_head;
  char* memory;
  std::uint32_t base;
  Ring<Core, Layout::stages> ring;

  __device__ __forceinline__ int stage(int step) const { return step % Layout::stages * Layout::stage; }
  __device__ __forceinline__ int index(int step) const { return kBackwards ? chunks - 1 - step : step; }
  __device__ __forceinline__ ChunkPlace place(int step) const {
    return ChunkPlace(span, static_cast<std::int64_t>(index(step)) * kChunk);
  }
};

// Scores of a chunk's pairs times their decay, as an operand; 0 where a key is behind its query.
__device__ __forceinline__ void decay_scores(std::uint32_t (&weights)[16], const Accumulator& scores,
                                             const float* gates, float upper, float lower, float scale, int thread) {
  const int lane = thread & 31, warp = thread >> 5, row = row_of_element(thread, 0);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    weights[2 * j] = weights[2 * j + 1] = 0u;
    if (j > 2 * warp + 1) continue;  // keys behind all of the warp's queries
    const int column = 8 * j + 2 * (lane & 3);
    const float2 there = *reinterpret_cast<const float2*>(gates + column);
    const bool diagonal = j >= 2 * warp;
    float decayed[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float reach = ptx::exp2((e & 2 ? lower : upper) - (e & 1 ? there.y : there.x)) * scale;
      const bool sees = !diagonal || column + (e & 1) <= row + 8 * (e >> 1);
      decayed[e] = sees ? scores[4 * j + e] * reach : 0.0f;
    }
    weights[2 * j] = ptx::pack_bf16(decayed[0], decayed[1]);
    weights[2 * j + 1] = ptx::pack_bf16(decayed[2], decayed[3]);
  }
}

// Keys of a tile, transposed (rows channels, columns tokens), times what their values have left at the chunk's end, or,
// backwards, what queries see of its start.
template <bool kBackwards>
__device__ __forceinline__ void load_decayed_keys(std::uint32_t (&keys)[16], std::uint32_t tile, const float* gates,
                                                  float scale, int thread) {
  const float total = gates[kChunk - 1];
  load_operand<Stored::k_outer>(keys, tile, thread);
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const float2 there = *reinterpret_cast<const float2*>(gates + 8 * (i / 2) + 2 * (thread & 3));
    const float2 left = kBackwards ? make_float2(ptx::exp2(there.x) * scale, ptx::exp2(there.y) * scale)
                                   : make_float2(ptx::exp2(total - there.x), ptx::exp2(total - there.y));
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float2 pair = ptx::unpack_bf16(keys[i + row]);
      keys[i + row] = ptx::pack_bf16(pair.x * left.x, pair.y * left.y);
    }
  }
}

// A head, or 64 key channels of one.
template <class View>
__device__ __forceinline__ void walking_group(const View& view, int group) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr int kTiles = Layout::own_tiles;
  const Params& p = view.p;
  const int thread = static_cast<int>(threadIdx.x) & (kGroupThreads - 1), lane = thread & 31, warp = thread >> 5;
  const int row = row_of_element(thread, 0), of = group / Layout::groups_each, first = group % Layout::groups_each;
  const int head = view.first_head + of;
  const bool there = head < p.heads;
  const std::int64_t state = (static_cast<std::int64_t>(view.n) * p.heads + head) * p.key_dim * kTile;
  const std::uint32_t image = view.base + Layout::states + group * kTiles * kTileBytes;
  Accumulator h[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    read_state(h[tile], there && view.walk.start != nullptr ? view.walk.start + state : nullptr, p.key_dim, kTile,
               (first + tile) * kTile, 0, thread);
  }
#pragma unroll 1
  for (int step = 0; step < view.chunks; ++step) {
    if (thread == 0) Core::wait_for_copies_out();
    sync_group();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) put_rounded<Core>(image + tile * kTileBytes, h[tile], thread);
    Core::publish();
    sync_group();
    if (thread == 0 && there && view.walk.images != nullptr) {
      Core::copy_out(view.walk.images + p.state_tile(view.span.chunk_begin + view.index(step), head, first, 0), image,
                     kTiles * kTileBytes);
      Core::commit_copies_out();
    }
    view.ring.wait_full(step);
    const std::uint32_t stage = view.base + view.stage(step), k = stage + Layout::keys + first * kTileBytes;
    const auto* const gates =
        reinterpret_cast<const float*>(view.memory + view.stage(step) + Layout::gates + of * kGateBytes);
    const float decay = ptx::exp2(gates[kChunk - 1]);
    const std::uint32_t v = stage + Layout::values + of * kTileBytes;
    std::uint32_t keys[kTiles][16];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      load_decayed_keys<View::kBackwards>(keys[tile], k + tile * kTileBytes, gates, p.scale, thread);
      scale_rows(h[tile], decay, decay);
    }
    const auto step_state = [&] {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        Core::template product<Stored::k_outer>(h[tile], keys[tile], v, thread);
      }
    };
    if constexpr (Layout::outputs) {
      const float upper = gates[row], lower = gates[row + 8];
      Accumulator scores, o;
      std::uint32_t weights[16];
      Core::begin(scores, o, h[0], h[kTiles - 1], keys[0], keys[kTiles - 1]);
      product_over_keys<Core, kTiles, Stored::k_inner>(scores, stage, k, thread);
      Core::commit();
      product_over_keys<Core, kTiles, Stored::k_outer>(o, stage, image, thread);
      Core::commit();
      step_state();
      Core::commit();
      Core::template wait<2>(scores);
      decay_scores(weights, scores, gates, upper, lower, p.scale, thread);
      Core::template wait<1>(o);
      scale_rows(o, ptx::exp2(upper) * p.scale, ptx::exp2(lower) * p.scale);
      Core::begin(o, weights);
      Core::template product<Stored::k_outer>(o, weights, v, thread);
      Core::finish(o, weights, h[0], h[kTiles - 1], keys[0], keys[kTiles - 1]);
      view.ring.leave(step, lane);
      if (!there) continue;
      const Rows to = rows_of(p.o, view.place(step), head);
      store_pieces(o, lane, [&](int r, int piece, uint4 x) { store_row_piece(to, 16 * warp + r, piece, x); });
    } else {
      Core::begin(h[0], keys[0]);
      step_state();
      Core::finish(h[0], keys[0]);
      view.ring.leave(step, lane);
    }
  }
  if (thread == 0) Core::wait_for_copies_out();  // shared memory is there until they have been read
  if (!there || view.walk.end == nullptr) return;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
    write_state(view.walk.end + state, h[tile], p.key_dim, kTile, (first + tile) * kTile, 0, thread);
}

// Chunks are brought as far ahead as there are stages.
template <class View>
__device__ __forceinline__ void walk_producer(const View& view) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll 1
  for (int step = 0; step < view.chunks; ++step) {
    if (step >= Layout::stages) view.ring.wait_empty(step - Layout::stages);
    const ChunkPlace at = view.place(step);
    const std::uint32_t stage = view.base + view.stage(step);
    const Producer<Core> producer(p, at, view.ring.full(step), lane);
    producer.expect((Layout::outputs ? 2 : 1) * Layout::tiles + Layout::heads, Layout::heads * kGateBytes);
#pragma unroll
    for (int tile = 0; tile < Layout::tiles; ++tile) {
      const int channel = tile * kTile;
      if (Layout::outputs) producer.copy(stage + tile * kTileBytes, p.q, view.maps.queries, 0, channel);
      producer.copy(stage + Layout::keys + tile * kTileBytes, view.walk.keys, view.maps.keys, 0, channel);
    }
#pragma unroll
    for (int of = 0; of < Layout::heads; ++of) {
      // The last in place of a head that is not there.
      const int head = view.first_head + of < p.heads ? view.first_head + of : p.heads - 1;
      producer.copy(stage + Layout::values + of * kTileBytes, view.walk.values, view.maps.values, head);
      producer.copy_image(stage + Layout::gates + of * kGateBytes,
                          view.gate_sums + gate_sums_at(p, view.span.chunk_begin + view.index(step), head), kGateBytes);
    }
    producer.finish();
  }
}

template <class Core, int kTiles, bool kOutputs, bool kBackwards>
__global__ void __launch_bounds__((WalkByRole<kTiles, kOutputs>::threads), 1)
    walk_by_role_kernel(const __grid_constant__ Params p, const __grid_constant__ Walk walk,
                        const __grid_constant__ WalkMaps maps, const float* gate_sums) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char memory[];
  if constexpr (Core::available) {
    using Layout = WalkByRole<kTiles, kOutputs>;
    using View = WalkView<Core, kTiles, kOutputs, kBackwards>;
    const int n = static_cast<int>(blockIdx.y);
    const Span span = span_of(p.sequences, n);
    const std::uint32_t base = ptx::shared_address(memory);
    const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk),
              head = static_cast<int>(blockIdx.x) * Layout::heads;
    const Ring<Core, Layout::stages> ring{base + Layout::barriers};
    const View view{p, walk, maps, gate_sums, span, chunks, n, head, memory, base, ring};
    if (threadIdx.x == 0) view.ring.init(Layout::groups * kGroupThreads / 32);
    __syncthreads();
    const int group = own_group();
    if (group < Layout::groups) {
      if constexpr (kOutputs) Core::template take<Layout::head_registers>();
      walking_group(view, group);
    } else {
      if constexpr (kOutputs) Core::template give<Layout::producer_registers>();
      if (threadIdx.x / 32 == Layout::groups * kGroupThreads / 32) walk_producer(view);
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys

// walk.cuh on Hopper: a block has two heads of a sequence, whose states stay in the registers of a group of 128 threads
// each 64 key channels, and a warp that brings chunks and sums their gates.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/gate_sums.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/ring.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

// Of a head's tokens: what their values have left at the chunk's end (backwards: what queries see of its start), and
// what a state has.
struct alignas(16) WalkFactors {
  float tokens[kChunk];
  float state;
};

template <int kTiles>
struct WalkByRole {
  static constexpr int heads = 2, groups = heads * kTiles, threads = groups * kGroupThreads + 32, stages = 4;
  // Shared memory: stages of keys and both heads' values; a tile a group through which states leave.
  static constexpr int values = kTiles * kTileBytes, stage = values + heads * kTileBytes, out = stages * stage;
  static constexpr int factors = out + groups * kTileBytes;
  static constexpr int barriers = factors + stages * heads * static_cast<int>(sizeof(WalkFactors));
  static constexpr int total = barriers + 2 * stages * 8;
  static_assert(total <= 227 * 1024);
};

struct WalkMaps {
  RowMap keys, values;
};

template <class CoreIn, int kTiles, bool kBackwards>
struct WalkView {
  using Core = CoreIn;
  using Layout = WalkByRole<kTiles>;
  const Params& p;
  const Walk& walk;
  const WalkMaps& maps;
  const float* gate_sums;
  Span span;
  int chunks, n, first_head;
  char* memory;
  std::uint32_t base;
  Ring<Core, Layout::stages> ring;

  __device__ __forceinline__ std::int64_t first_token(int step) const {
    return static_cast<std::int64_t>(kBackwards ? chunks - 1 - step : step) * kChunk;
  }
  __device__ __forceinline__ std::uint32_t stage(int step) const {
    return base + step % Layout::stages * Layout::stage;
  }
  __device__ __forceinline__ WalkFactors& factors(int step, int of) const {
    return reinterpret_cast<WalkFactors*>(memory + Layout::factors)[step % Layout::stages * Layout::heads + of];
  }
};

// 64 key channels of a head.
template <class View>
__device__ __forceinline__ void walking_group(const View& view, int group) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr int kTiles = Layout::groups / Layout::heads;
  const int thread = static_cast<int>(threadIdx.x) & (kGroupThreads - 1), lane = thread & 31;
  const int of = group / kTiles, tile = group % kTiles, head = view.first_head + of;
  const bool there = head < view.p.heads;
  const std::int64_t state = (static_cast<std::int64_t>(view.n) * view.p.heads + head) * view.p.key_dim * kTile;
  const std::uint32_t out = view.base + Layout::out + group * kTileBytes;
  Accumulator h;
  read_state(h, there && view.walk.start != nullptr ? view.walk.start + state : nullptr, view.p.key_dim, kTile,
             tile * kTile, 0, thread);
#pragma unroll 1
  for (int step = 0; step < view.chunks; ++step) {
    if (thread == 0) Core::wait_for_copies_out();
    sync_group();
    put_rounded<Core>(out, h, thread);
    Core::publish();
    sync_group();
    if (thread == 0 && there) {
      const std::int64_t chunk = view.span.chunk_begin + view.first_token(step) / kChunk;
      Core::copy_out(view.walk.images + view.p.state_tile(chunk, head, tile, 0), out, kTileBytes);
      Core::commit_copies_out();
    }
    view.ring.wait_full(step);
    const WalkFactors& factors = view.factors(step, of);
    scale_rows(h, factors.state, factors.state);
    std::uint32_t keys[16];  // transposed: rows channels, columns tokens
    load_operand<Stored::k_outer>(keys, view.stage(step) + tile * kTileBytes, thread);
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const float2 factor = *reinterpret_cast<const float2*>(factors.tokens + 8 * (i / 2) + 2 * (lane & 3));
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float2 pair = ptx::unpack_bf16(keys[i + row]);
        keys[i + row] = ptx::pack_bf16(pair.x * factor.x, pair.y * factor.y);
      }
    }
    Core::begin(h, keys);
    Core::template product<Stored::k_outer>(h, keys, view.stage(step) + Layout::values + of * kTileBytes, thread);
    Core::finish(h, keys);
    view.ring.leave(step, lane);
  }
  if (thread == 0) Core::wait_for_copies_out();  // shared memory is there until they have been read
  if (there && view.walk.end != nullptr)
    write_state(view.walk.end + state, h, view.p.key_dim, kTile, tile * kTile, 0, thread);
}

// Chunks are brought as far ahead as there are stages.
template <bool kBackwards, class View>
__device__ __forceinline__ void walk_producer(const View& view) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr int kTiles = Layout::groups / Layout::heads;
  const Params& p = view.p;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int last = p.heads - 1;  // in place of a head that is not there
  const auto head_of = [&](int of) { return view.first_head + of < last ? view.first_head + of : last; };
  float2 gates[Layout::heads];  // sums through tokens 2 lane and the next
  const auto ask_for_gates = [&](int step) {
    const std::int64_t chunk = view.span.chunk_begin + view.first_token(step) / kChunk;
#pragma unroll
    for (int of = 0; of < Layout::heads; ++of) {
      const float* const from = view.gate_sums + gate_sums_at(p, chunk, head_of(of)) + 2 * lane;
      if (step < view.chunks) gates[of] = *reinterpret_cast<const float2*>(from);
    }
  };
  ask_for_gates(0);
#pragma unroll 1
  for (int step = 0; step < view.chunks; ++step) {
    if (step >= Layout::stages) view.ring.wait_empty(step - Layout::stages);
    const ChunkPlace at(view.span, view.first_token(step));
    const std::uint32_t stage = view.stage(step);
    const Producer<Core> producer(p, at, view.ring.full(step), lane);
    producer.expect(kTiles + Layout::heads, 0);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      producer.copy(stage + t * kTileBytes, view.walk.keys, view.maps.keys, 0, t * kTile);
    }
#pragma unroll
    for (int of = 0; of < Layout::heads; ++of) {
      producer.copy(stage + Layout::values + of * kTileBytes, view.walk.values, view.maps.values, head_of(of));
    }
#pragma unroll
    for (int of = 0; of < Layout::heads; ++of) {
      const float total = __shfl_sync(kWarp, gates[of].y, 31), scale = kBackwards ? p.scale : 1.0f;
      WalkFactors& factors = view.factors(step, of);
      *reinterpret_cast<float2*>(factors.tokens + 2 * lane) =
          make_float2(ptx::exp2(kBackwards ? gates[of].x : total - gates[of].x) * scale,
                      ptx::exp2(kBackwards ? gates[of].y : total - gates[of].y) * scale);
      if (lane == 0) factors.state = ptx::exp2(total);
    }
    producer.finish();
    ask_for_gates(step + 1);
  }
}

template <class Core, int kTiles, bool kBackwards>
__device__ __forceinline__ void walk_by_role(const Params& p, const Walk& walk, const WalkMaps& maps,
                                             const float* gate_sums, char* memory) {
  using Layout = WalkByRole<kTiles>;
  const int n = static_cast<int>(blockIdx.y);
  const Span span = span_of(p.sequences, n);
  const WalkView<Core, kTiles, kBackwards> view{p,
                                                walk,
                                                maps,
                                                gate_sums,
                                                span,
                                                static_cast<int>((span.length + kChunk - 1) / kChunk),
                                                n,
                                                static_cast<int>(blockIdx.x) * Layout::heads,
                                                memory,
                                                ptx::shared_address(memory),
                                                {ptx::shared_address(memory) + Layout::barriers}};
  if (threadIdx.x == 0) view.ring.init(Layout::groups * kGroupThreads / 32);
  __syncthreads();
  const int group = own_group();
  if (group == Layout::groups) {
    walk_producer<kBackwards>(view);
  } else {
    walking_group(view, group);
  }
}

template <class Core, int kTiles, bool kBackwards>
__global__ void __launch_bounds__(WalkByRole<kTiles>::threads, 1)
    walk_by_role_kernel(const __grid_constant__ Params p, const __grid_constant__ Walk walk,
                        const __grid_constant__ WalkMaps maps, const float* gate_sums) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char memory[];
  if constexpr (Core::available) walk_by_role<Core, kTiles, kBackwards>(p, walk, maps, gate_sums, memory);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys

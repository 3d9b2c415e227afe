// outputs.cuh on Hopper: two groups of 128 threads take a chunk's heads in turn, a warp brings what they read.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/gate_sums.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/ring.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

template <int kTiles>
struct OutputsByRole {
  static constexpr int working_groups = 2, threads = working_groups * kGroupThreads + 32, stages = 6;
  // Shared memory. q and k; stages of v and h; a head's sums of gates.
  static constexpr int q = 0, k = kTiles * kTileBytes, first_stage = 2 * kTiles * kTileBytes;
  static constexpr int v = 0, h = kTileBytes, stage = (1 + kTiles) * kTileBytes;
  static constexpr int gates = first_stage + stages * stage, barriers = gates + stages * kGateBytes;
  static constexpr int total = barriers + 2 * stages * 8;
  static_assert(total <= 227 * 1024);
};

struct OutputsMaps {
  RowMap q, k, v;
};

template <class CoreIn, int kTiles>
struct OutputsView {
  using Core = CoreIn;
  using Layout = OutputsByRole<kTiles>;
  const Params& p;
  const OutputsMaps& maps;
  const float* gate_sums;
  std::int64_t chunk;
  ChunkPlace place;
  int begin, heads;  // the block's first head, and how many it has
  char* memory;
  std::uint32_t base;
  Ring<Core, Layout::stages> ring;

  __device__ __forceinline__ std::uint32_t stage(int i) const {
    return base + Layout::first_stage + i % Layout::stages * Layout::stage;
  }
  __device__ __forceinline__ int gates(int i) const { return Layout::gates + i % Layout::stages * kGateBytes; }
};

template <int kTiles, class View>
__device__ __forceinline__ void outputs_group(const View& view, int group) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const int thread = static_cast<int>(threadIdx.x) & (kGroupThreads - 1), lane = thread & 31, warp = thread >> 5;
  const int row = row_of_element(thread, 0);
  const std::uint32_t q = view.base + Layout::q, k = view.base + Layout::k;
  view.ring.wait_filled(0);  // q and k come with the first head
  Accumulator scores;
  Core::begin(scores);
  Core::template product<Stored::k_inner, Stored::k_inner, true>(scores, q, k, thread);
  if constexpr (kTiles == 2) {
    Core::template product<Stored::k_inner, Stored::k_inner>(scores, q + kTileBytes, k + kTileBytes, thread);
  }
  Core::finish(scores);
#pragma unroll
  for (int i = 0; i < 32; ++i) scores[i] *= view.p.scale;
#pragma unroll 1
  for (int i = group; i < view.heads; i += Layout::working_groups) {
    view.ring.wait_filled(i);
    const auto* const gates = reinterpret_cast<const float*>(view.memory + view.gates(i));
    const std::uint32_t v = view.stage(i) + Layout::v, h = view.stage(i) + Layout::h;
    Accumulator o;
    Core::begin(o);
    Core::template product<Stored::k_inner, Stored::k_outer, true>(o, q, h, thread);
    if constexpr (kTiles == 2) {
      Core::template product<Stored::k_inner, Stored::k_outer>(o, q + kTileBytes, h + kTileBytes, thread);
    }
    Core::commit();
    const float upper = gates[row], lower = gates[row + 8];
    std::uint32_t weights[16];
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
        const float reach = ptx::exp2((e & 2 ? lower : upper) - (e & 1 ? there.y : there.x));
        const bool sees = !diagonal || column + (e & 1) <= row + 8 * (e >> 1);
        decayed[e] = sees ? scores[4 * j + e] * reach : 0.0f;
      }
      weights[2 * j] = ptx::pack_bf16(decayed[0], decayed[1]);
      weights[2 * j + 1] = ptx::pack_bf16(decayed[2], decayed[3]);
    }
    Core::template wait<0>(o);
    scale_rows(o, ptx::exp2(upper) * view.p.scale, ptx::exp2(lower) * view.p.scale);
    Core::begin(o, weights);
    Core::template product<Stored::k_outer>(o, weights, v, thread);
    Core::finish(o, weights);
    view.ring.leave(i, lane);
    const Rows to = rows_of(view.p.o, view.place, view.begin + i);
    store_pieces(o, lane, [&](int r, int piece, uint4 x) { store_row_piece(to, 16 * warp + r, piece, x); });
  }
}

// Heads are brought as far ahead as there are stages.
template <int kTiles, class View>
__device__ __forceinline__ void outputs_bringer(const View& view) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr int kBytes = kTiles * kTileBytes;
  const Params& p = view.p;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll 1
  for (int i = 0; i < view.heads; ++i) {
    if (i >= Layout::stages) view.ring.wait_emptied(i - Layout::stages);
    const int head = view.begin + i;
    const std::uint32_t stage = view.stage(i);
    const Bringer<Core> bringer(p, view.place, view.ring.filled(i), lane);
    bringer.expect(i == 0 ? 1 + 2 * kTiles : 1, kBytes + kGateBytes);
    if (i == 0) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        bringer.bring(view.base + Layout::q + tile * kTileBytes, p.q, view.maps.q, 0, tile * kTile);
        bringer.bring(view.base + Layout::k + tile * kTileBytes, p.k, view.maps.k, 0, tile * kTile);
      }
    }
    bringer.bring_image(stage + Layout::h, static_cast<const char*>(p.states) + p.state_tile(view.chunk, head, 0, 0),
                        kBytes);
    bringer.bring(stage + Layout::v, p.v, view.maps.v, head);
    bringer.bring_image(view.base + view.gates(i), view.gate_sums + gate_sums_at(p, view.chunk, head), kGateBytes);
    bringer.finish();
  }
}

template <class Core, int kTiles>
__device__ __forceinline__ void outputs_by_role(const Params& p, const OutputsMaps& maps, const float* gate_sums,
                                                int heads_each, char* memory) {
  using Layout = OutputsByRole<kTiles>;
  const std::int64_t chunk = blockIdx.x, n = sequence_of_chunk(p.sequences, chunk);
  if (n < 0) return;
  const Span span = span_of(p.sequences, n);
  const std::uint32_t base = ptx::shared_address(memory);
  const OutputsView<Core, kTiles> view{p,
                                       maps,
                                       gate_sums,
                                       chunk,
                                       ChunkPlace(span, (chunk - span.chunk_begin) * kChunk),
                                       static_cast<int>(blockIdx.y) * heads_each,
                                       heads_each,
                                       memory,
                                       base,
                                       {base + Layout::barriers}};
  if (threadIdx.x == 0) view.ring.init(kGroupThreads / 32);
  __syncthreads();
  const int group = own_group();
  group < Layout::working_groups ? outputs_group<kTiles>(view, group) : outputs_bringer<kTiles>(view);
}

template <class Core, int kTiles>
__global__ void __launch_bounds__(OutputsByRole<kTiles>::threads, 1)
    outputs_by_role_kernel(const __grid_constant__ Params p, const __grid_constant__ OutputsMaps maps,
                           const float* gate_sums, const int heads_each) {
  extern __shared__ __align__(1024) char memory[];
  if constexpr (Core::available) outputs_by_role<Core, kTiles>(p, maps, gate_sums, heads_each, memory);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys

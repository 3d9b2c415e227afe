// The view that make_dq_dk_dg (backward/keys.cuh) has of a pair of chunks: where things lie, and what is brought there.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/pairs.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/logits.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"

namespace flashgla::ops::gated_linear_attention::cuda {

template <class CoreIn, GatesAs kGateIn>
struct PairView {
  using Core = CoreIn;
  using Layout = PairShared<Core>;
  static constexpr GatesAs kGate = kGateIn;
  static constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  static constexpr bool kBulk = Layout::in_bulk, kGated = kGate != GatesAs::none,
                        kTileOfGates = kGate == GatesAs::bf16 || kGate == GatesAs::f32;
  const Params& p;
  const BackwardWorkspace& w;
  const Gradients& d;
  const RowMaps& maps;
  const unsigned& items;
  char* const shared;
  const std::uint32_t base;
  const bool late;  // which group this thread is of

  __device__ __forceinline__ int part() const { return late ? 1 : 0; }
  __device__ __forceinline__ int depth() const { return min(Layout::stages, tiles_of(p.value_dim)); }
  __device__ __forceinline__ PairPlace& place_of(unsigned unit) const {
    return reinterpret_cast<PairPlace*>(shared + Layout::places)[unit % Layout::kept_places];
  }
  // What is the same in all threads, so that the compiler knows it of a warp's.
  static __device__ __forceinline__ bool alike(bool x) { return __any_sync(0xffffffffu, x) != 0; }
  static __device__ __forceinline__ void meet() { ptx::barrier(3, kPairThreads); }
  __device__ __forceinline__ ColumnParts& parts(int which) const {
    return reinterpret_cast<ColumnParts*>(shared + Layout::parts)[which];
  }
  __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }
  // Of this group's epilogue.
  __device__ __forceinline__ int own(int offset) const { return Layout::epilogue + part() * Layout::group + offset; }
  __device__ __forceinline__ std::uint32_t own_tile(int offset) const { return base + own(offset); }

  __device__ __forceinline__ Rows rows_at(const PairPlace& at, const Strided& x, int element, int head, int channel,
                                          int channels) const {
    const Chunk own{at.batch, at.token + (late ? kChunk : 0), late ? at.rows_late : at.rows_early};
    return rows_of(x, element, own, head, channel, channels);
  }
  // A tile of values by all threads, each group its own chunk's rows.
  __device__ __forceinline__ void load_values(const PairPlace& at, int tile) const {
    const int thread = fresh_thread(), value = tile * kTile;
    const std::uint32_t stage = base + tile % Layout::stages * Layout::stage;
    const int head = at.kv_head * p.group + at.in_group;
    load_tile(stage + (late ? Layout::d_o_late : Layout::d_o_early), rows_at(at, d.d_o, 2, head, value, p.value_dim),
              thread);
    load_tile(stage + (late ? Layout::v_late : Layout::v_early), rows_at(at, p.v, 2, at.kv_head, value, p.value_dim),
              thread);
    const char* state = late ? w.state_gradients + at.gradient : static_cast<const char*>(p.states) + at.state;
    copy_image(stage + (late ? Layout::dh : Layout::h), state + tile * kImageBytes, thread);
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ const char* q_image(const PairPlace& at, int of) const {
    const std::int64_t head = at.kv_head * p.group + at.in_group;
    return w.prepared.q +
           (((at.chunk + of) * p.heads * p.group + head) * tiles_of(p.key_dim) + at.key_tile) * kImageBytes;
  }
  __device__ __forceinline__ std::int64_t kv_at(const PairPlace& at, int of) const {
    return ((at.chunk + of) * p.heads + at.kv_head) * tiles_of(p.key_dim) + at.key_tile;
  }
  __device__ __forceinline__ void produce_inputs(const PairPlace& at) const {
    if constexpr (kBulk) {
      constexpr int of_decays = kGated ? kTile * 4 : 0;
      const int chunks = at.rows_late > 0 ? 2 : 1;
      Core::expect_bytes(base + Layout::inputs_full, chunks * (2 * kTileBytes + of_decays));
      for (int of = 0; of < chunks; ++of) {
        const std::uint32_t to = base + Layout::epilogue + of * Layout::group;
        if (kGate == GatesAs::none && w.prepared.plain) {
          const auto copy = [&](std::uint32_t to, const RowMap& rows, int head) {
            Core::copy_box(to, &rows.map, at.key_tile * kTile, static_cast<int>(at.token) + of * kChunk,
                           head * rows.head_step, static_cast<int>(at.batch) * rows.batch_step,
                           base + Layout::inputs_full);
          };
          copy(to + Layout::q, maps.q, at.kv_head * p.group + at.in_group);
          copy(to + Layout::k, maps.k, at.kv_head);
          continue;
        }
        Core::copy_in(to + Layout::q, q_image(at, of), kTileBytes, base + Layout::inputs_full);
        Core::copy_in(to + Layout::k, w.prepared.k + kv_at(at, of) * kImageBytes, kTileBytes,
                      base + Layout::inputs_full);
        if constexpr (kGated) {
          Core::copy_in(base + Layout::decays + of * of_decays, w.prepared.decay + kv_at(at, of) * kTile, of_decays,
                        base + Layout::inputs_full);
        }
      }
    }
  }
  __device__ __forceinline__ void load_inputs(const PairPlace& at) const {
    const int thread = fresh_thread();
    if (!late || at.rows_late > 0) {
      copy_image(own_tile(Layout::q), q_image(at, part()), thread);
      copy_image(own_tile(Layout::k), w.prepared.k + kv_at(at, part()) * kImageBytes, thread);
      if (kGated && thread < kTile) {
        floats(Layout::decays)[part() * kTile + thread] = w.prepared.decay[kv_at(at, part()) * kTile + thread];
      }
    }
  }
  // One a token, of the group's chunk.
  __device__ __forceinline__ const char* token_gates(const PairPlace& at) const {
    const std::int64_t token = at.token + (late ? kChunk : 0);
    return static_cast<const char*>(p.g.data) +
           (at.batch * p.g.batch + token * p.g.token + at.kv_head * p.g.head) * (p.gate_dtype == DType::f32 ? 4 : 2);
  }
  // Gates of its chunk by each group; those of f32 to the place of a too.
  __device__ __forceinline__ void load_gates(const PairPlace& at) const {
    const int thread = fresh_thread(), channel = at.key_tile * kTile, rows = late ? at.rows_late : at.rows_early;
    if constexpr (kGate == GatesAs::bf16) {
      load_tile(own_tile(Layout::gates), rows_at(at, p.g, 2, at.kv_head, channel, p.key_dim), thread);
      ptx::copy_async_commit();
    } else if constexpr (kGate == GatesAs::f32) {
      load_f32_tile(own_tile(Layout::gates), own_tile(Layout::a), rows_at(at, p.g, 4, at.kv_head, channel, p.key_dim),
                    thread);
      ptx::copy_async_commit();
    } else if constexpr (kGate == GatesAs::tokens) {
      if (thread < kTile) {  // read again by the same thread
        floats(own(Layout::gates))[thread] =
            thread < rows ? load_as(p.gate_dtype, token_gates(at), thread * p.g.token) : 0.0f;
      }
    }
  }

  // Logits become gates where they lie, gates of f32 two tiles.
  __device__ __forceinline__ void turn_gates(const PairPlace& at) const {
    if constexpr (kGate == GatesAs::bf16) {
      if (p.logit_scale != 0.0f) {
        turn_tile_of_logits(own_tile(Layout::gates), late ? at.rows_late : at.rows_early, p, fresh_thread());
      }
    } else if constexpr (kGate == GatesAs::f32) {
      split_f32_tile(own_tile(Layout::gates), own_tile(Layout::a), fresh_thread());
    }
  }
  // What a constant gate has for chunks that the call might have had.
  __device__ __forceinline__ void clear_missing_gates() const {
    if constexpr (kGate == GatesAs::tokens) {
      if (p.gate == GateKind::constant && p.sequences.cu_seqlens != nullptr) {
        const std::int64_t rows = p.sequences.most_chunks * p.heads,
                           there = p.sequences.chunk_begin[p.sequences.count] * p.heads;
        for (int tile = 0; tile < tiles_of(p.key_dim); ++tile) {
          for (std::int64_t i = there + blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += gridDim.x * blockDim.x) {
            w.gate_parts[tile * rows + i] = 0.0f;
          }
        }
      }
      __syncwarp();  // so that the compiler knows warps to be together again
    }
  }
  __device__ __forceinline__ PairPlace find_first() const {
    PairPlace at{};
    at.item = blockIdx.x;
    if (!find_pair(at, p)) {
      at.in_group = p.group;
      find_next(at, at, p, items);
      at.unit = 0;
    }
    return at;
  }
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < Layout::stages; ++i) {
      Core::init_barrier(base + Layout::full + 8 * i, Layout::producer_warps);
      Core::init_barrier(base + Layout::empty + 8 * i, kPairThreads);
    }
    Core::init_barrier(base + Layout::inputs_full, 1);
    Core::init_barrier(base + Layout::inputs_empty, kPairThreads);
    for (int i = 0; i < Layout::kept_places; ++i) Core::init_barrier(base + Layout::places_full + 8 * i, 1);
    Core::publish_barriers();
  }
  // The third group, where there is TMA.
  __device__ __forceinline__ void produce() const {
    // One thread of each warp tells TMA of one part: h, and the walk; dh, and what the epilogue wants;
    // rows of do and of v. One thread for all of it would be what the products wait for.
    const int producer = (static_cast<int>(threadIdx.x) - kPairThreads) / 32;
    if (threadIdx.x % 32 != 0) return;
    if (producer == 0) place_of(0) = find_first();
    flashgla::cuda::wait_for_previous();
    if (producer == 0) Core::arrive(base + Layout::places_full);
    Turn turn;
#pragma unroll 1
    for (unsigned unit = 0;; ++unit) {
      Core::wait_at(base + Layout::places_full + 8 * (unit % Layout::kept_places), (unit / Layout::kept_places) & 1);
      const PairPlace& at = place_of(unit);
      if (at.rows_early == 0) return;
      const bool both = at.rows_late > 0;
      if (producer < 2) {
        const char* from = producer == 0 ? static_cast<const char*>(p.states) + at.state
                                         : static_cast<const char*>(w.state_gradients) + at.gradient;
        const std::uint32_t to = base + (producer == 0 ? Layout::h : Layout::dh);
#pragma unroll 1
        for (int tile = 0; tile < tiles_of(p.value_dim); ++tile) {
          const std::uint32_t barrier = base + Layout::full + 8 * turn.slot;
          Core::wait_at(base + Layout::empty + 8 * turn.slot, turn.parity ^ 1);
          Core::expect_bytes(barrier, kTileBytes);
          Core::copy_in(to + turn.slot * Layout::stage, from, kTileBytes, barrier);
          from += kImageBytes;
          if (producer == 1 && tile + 1 == depth()) {
            Core::wait_at(base + Layout::inputs_empty, (unit & 1) ^ 1);
            produce_inputs(at);
          }
          turn.step(depth());
        }
        if (producer == 0) {
          find_next(place_of(unit + 1), at, p, items);
          Core::arrive(base + Layout::places_full + 8 * ((unit + 1) % Layout::kept_places));
        }
      } else {
        const RowMap& of = producer == 2 ? maps.d_o : maps.v;
        const int head = (producer == 2 ? at.kv_head * p.group + at.in_group : at.kv_head) * of.head_step;
        const int batch = static_cast<int>(at.batch) * of.batch_step, token = static_cast<int>(at.token);
        const std::uint32_t to_early = base + (producer == 2 ? Layout::d_o_early : Layout::v_early),
                            to_late = base + (producer == 2 ? Layout::d_o_late : Layout::v_late);
#pragma unroll 1
        for (int tile = 0; tile < tiles_of(p.value_dim); ++tile) {
          const std::uint32_t barrier = base + Layout::full + 8 * turn.slot, at_stage = turn.slot * Layout::stage;
          Core::wait_at(base + Layout::empty + 8 * turn.slot, turn.parity ^ 1);
          Core::expect_bytes(barrier, (both ? 2 : 1) * kTileBytes);
          Core::copy_box(to_early + at_stage, &of.map, tile * kTile, token, head, batch, barrier);
          if (both) Core::copy_box(to_late + at_stage, &of.map, tile * kTile, token + kChunk, head, batch, barrier);
          turn.step(depth());
        }
      }
    }
  }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda

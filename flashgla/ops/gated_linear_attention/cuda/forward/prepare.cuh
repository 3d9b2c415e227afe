// First of the passes that serve any K, any split of V and of time, forwards and backwards: everything of a chunk that
// depends on gates, once, chunk-parallel, whatever the gate's kind. For chunk and query head: q~ = scale q 2^G, the
// scores P = q~ k^T with the decays between, and, once a key-value head, k~ = k 2^(sum of later gates) and the chunk's
// decay 2^(sum of all); or, where q and k go on as they are (Plan::plain), P = q k^T alone. No exponent is positive
// outside the scores, and those go by the ladder (forward/gates.cuh). Operands are written as images of the
// shared-memory tiles, which the next kernels copy as they lie.
#pragma once

#include <algorithm>

#include "flashgla/base/context.h"
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Shared memory of a group: tiles of q, k and gates, another for what is left of f32 gates (tiles/pieces.cuh), the sums
// of the chunk's gates as 64 floats and their powers. What the groups' scores are summed up in, 16 KiB, lies over the
// last tiles, as do the scores of a steep chunk.
constexpr int kTotalsAt = 4 * kTileBytes, kPrepareBytes = kTotalsAt + 1024;

// One chunk and 64 key channels.
struct PrepareBlock {
  Span span;
  std::int64_t index;  // of the chunk in the sequence
  int query_head, head, channel;
  std::uint32_t q_tile, k_tile, g_tile, rest_tile, totals, powers;

  __device__ __forceinline__ Chunk chunk() const { return chunk_of(span, index); }
  __device__ __forceinline__ Rows rows(const Params& p, const Strided& x, int element, int of) const {
    return rows_of(x, element, chunk(), of, channel, p.key_dim);
  }
};

// Starts the copy of gates, those of one a token without.
template <GatesAs kGates>
__device__ __forceinline__ void load_gates(const Params& p, const PrepareBlock& b, int thread) {
  if constexpr (kGates == GatesAs::f32) {
    load_f32_tile(b.g_tile, b.rest_tile, b.rows(p, p.g, 4, b.head), thread);
  } else if constexpr (kGates != GatesAs::tokens) {
    load_tile(b.g_tile, b.rows(p, p.g, 2, b.head), thread);
  } else if (p.gate != GateKind::none && thread < kTile) {
    const std::int64_t token = anew(b.index) * kChunk + thread;
    const float gate = token < b.span.length ? key_gate(p, b.span.batch, b.span.begin + token, b.head, 0) : 0.0f;
    put_float(b.g_tile, thread, gate);
  }
}
// Their running sums, base 2, when they are there.
template <class Core, GatesAs kGates>
__device__ __forceinline__ void sum_gates(Accumulator& sums, const Params& p, const PrepareBlock& b, int thread) {
  if constexpr (kGates == GatesAs::tokens) {
    if (p.gate == GateKind::none) return clear(sums);
    sync_group();
    return sum_tokens(sums, b.g_tile, thread);
  }
  if constexpr (kGates == GatesAs::f32) split_f32_tile(b.g_tile, b.rest_tile, thread);
  if constexpr (kGates == GatesAs::logits) turn_tile_of_logits(b.g_tile, b.chunk().rows, p, thread);
  Core::publish();
  sync_group();
  std::uint32_t ones[16];
  triangle_of_ones<Triangle::lower>(ones, thread);
  Core::begin(ones);
  Core::template product<Stored::k_outer, true>(sums, ones, b.g_tile, thread);
  Core::finish(sums);
  if constexpr (kGates == GatesAs::f32) {
    Core::begin(ones, sums);
    Core::template product<Stored::k_outer>(sums, ones, b.rest_tile, thread);
    Core::finish(sums);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i] *= kLog2E;
}

// In place of q, k and gates: q~, k 2^-G and k~, each warp its own rows. Within one anchor's reach.
template <class Core>
__device__ __forceinline__ void gate_operands(const Accumulator& sums, const PrepareBlock& b, float scale, int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t q[4], k[4], later[4];
    TensorCore80::load_a<Stored::k_inner>(q, b.q_tile, k16, thread);
    TensorCore80::load_a<Stored::k_inner>(k, b.k_tile, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = sums[8 * k16 + 2 * i], second = sums[8 * k16 + 2 * i + 1];
      const float2 query = ptx::unpack_bf16(q[i]), whole = of_columns(b.powers, k16, i, thread);
      float2 key = ptx::unpack_bf16(k[i]);
      q[i] = ptx::pack_bf16(query.x * (scale * ptx::exp2(first)), query.y * (scale * ptx::exp2(second)));
      key = make_float2(key.x * ptx::exp2(-first), key.y * ptx::exp2(-second));
      k[i] = ptx::pack_bf16(key.x, key.y);
      later[i] = ptx::pack_bf16(key.x * whole.x, key.y * whole.y);
    }
    Core::put_fragment(b.q_tile, q, k16, thread);
    Core::put_fragment(b.k_tile, k, k16, thread);
    Core::put_fragment(b.g_tile, later, k16, thread);
  }
}

// The same beyond one anchor's reach, k~ in place of k, and its part of the scores to where the gates were, 32 floats a
// thread. Called, so that it lies apart. gates: rows of f32, if they are such.
template <class Core, GatesAs kGates>
__device__ __noinline__ void gate_steep_operands(std::uint32_t q_tile, std::uint32_t k_tile, std::uint32_t g_tile,
                                                 Rows gates, float scale) {
  Accumulator s;
  clear(s);
  __syncwarp();  // a warp reads what it has loaded
  gate_by_blocks<Core, false, true>(
      s, q_tile, k_tile, g_tile, scale,
      [&](Accumulator& sums, int thread) {
        if constexpr (kGates == GatesAs::bf16 || kGates == GatesAs::logits) {
          sum_block(sums, g_tile, thread);
        } else {
          sum_block_of(sums, thread, [&](int row, int column) {
            if constexpr (kGates == GatesAs::f32) return f32_gates_at(gates, row, column);
            const float g = float_at(g_tile, row);
            return make_float2(g, g);
          });
        }
      },
      [](float2, bool) {});
  sync_group();
  const std::uint32_t at = g_tile + 4 * (fresh_thread() % kGroupThreads);
#pragma unroll
  for (int i = 0; i < 32; ++i) put_float(at, kGroupThreads * i, s[i]);
}

// kPlain: the scores alone (Plan::plain).
template <class Core, GatesAs kGates, bool kPlain>
__device__ __forceinline__ void prepare_chunk(const Params& p, const Prepared& out, char* shared) {
  PrepareBlock b;
  const int group = own_group(), groups = blockDim.x / kGroupThreads;
  shared += group * kPrepareBytes;
  b.q_tile = ptx::shared_address(shared);
  b.k_tile = b.q_tile + kTileBytes;
  b.g_tile = b.k_tile + kTileBytes;
  b.rest_tile = b.g_tile + kTileBytes;
  b.totals = b.q_tile + kTotalsAt;
  b.powers = b.totals + 4 * kTile;
  float* const sums_of_scores = reinterpret_cast<float*>(shared + 2 * kTileBytes);
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  const int heads = p.heads * p.group;
  const std::int64_t chunk = blockIdx.x / heads;
  b.query_head = blockIdx.x % heads;
  b.head = b.query_head / p.group;
  const std::int64_t n = sequence_of_chunk(p.sequences, chunk);
  if (n < 0) return;
  b.span = span_of(p.sequences, n);
  b.index = chunk - b.span.chunk_begin;
  const auto leads = [&] { return !kPlain && anew(b.query_head) % p.group == 0; };  // others leave k~ and decays to it

  Accumulator s;
  clear(s);
#pragma unroll 1
  for (int kb = group; kb < out.blocks; kb += groups) {
    b.channel = 64 * kb;
    load_gates<kGates>(p, b, thread);
    ptx::copy_async_commit();
    load_tile(b.q_tile, b.rows(p, p.q, 2, b.query_head), thread);
    load_tile(b.k_tile, b.rows(p, p.k, 2, b.head), thread);
    ptx::copy_async_commit();
    ptx::copy_async_wait<1>();
    Accumulator sums;
    sum_gates<Core, kGates>(sums, p, b, thread);
    if (!kPlain && thread >= kGroupThreads - 4) {  // they have the chunk's last token
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 all = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
        store_shared_float2(b.totals + 4 * (8 * j + 2 * (thread % 4)), all);
        store_shared_float2(b.powers + 4 * (8 * j + 2 * (thread % 4)), power_of(all));
      }
    }
    ptx::copy_async_wait<0>();
    sync_group();
    const float2 total = load_shared_float2(b.totals + 8 * lane);
    const bool one_anchor = kPlain || one_anchor_reaches(total);
    const auto kv_block = [&] { return (chunk * p.heads + b.head) * out.blocks + anew(kb); };
    if (leads() && thread < 32)
      *reinterpret_cast<float2*>(out.decay + kv_block() * 64 + 2 * lane) = load_shared_float2(b.powers + 8 * lane);
    if (one_anchor) {
      if constexpr (!kPlain) gate_operands<Core>(sums, b, out.scale, thread);
      Core::publish();
    } else {
      Aside so_far(s);
      Local<std::int64_t, 5> aside;  // or what is called spills on mma.sync
      std::int64_t held[] = {b.span.batch, b.span.begin, b.span.length, b.span.chunk_begin, b.index};
      aside.put(held);
      gate_steep_operands<Core, kGates>(b.q_tile, b.k_tile, b.g_tile, b.rows(p, p.g, 4, b.head), out.scale);
      aside.get(held);
      b.span = {held[0], held[1], held[2], held[3]};
      b.index = held[4];
      so_far.restore(s);
      const std::uint32_t part = b.g_tile + 4 * (fresh_thread() % kGroupThreads);
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] += float_at(part, kGroupThreads * i);
    }
    __syncwarp();
    const int mover = fresh_thread();
    if constexpr (!kPlain) {
      store_tile_image(out.q + ((chunk * heads + b.query_head) * out.blocks + anew(kb)) * kTileBytes, b.q_tile, mover);
    }
    if (leads()) store_tile_image(out.k + kv_block() * kTileBytes, one_anchor ? b.g_tile : b.k_tile, mover);
    if (one_anchor) {
      sync_group();
      Core::begin();
      Core::template product<Stored::k_inner, Stored::k_inner>(s, b.q_tile, b.k_tile, fresh_thread());
      Core::finish();
    }
    sync_group();
  }
  flashgla::cuda::release_next();
  if (groups > 1) {  // the scores are the sum over all channels
    if (group > 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sums_of_scores[kGroupThreads * i + thread] = s[i];
    }
    __syncthreads();
    if (group > 0) return;
#pragma unroll 1
    for (int other = 1; other < groups; ++other) {
      const float* theirs = sums_of_scores + other * (kPrepareBytes / 4);
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] += theirs[kGroupThreads * i + thread];
    }
  }
  std::uint32_t pairs[16];
  select_pairs<false>(pairs, s, thread);
  const std::int64_t image = (chunk * heads + b.query_head) * kTileBytes;
  if (out.scores != nullptr) {
    put_operand<Core>(b.q_tile, pairs, thread);
    __syncwarp();
    store_tile_image(out.scores + image, b.q_tile, thread);
  }
  if (out.transposed_scores != nullptr) {
    put_operand<Core, true>(b.k_tile, pairs, thread);
    sync_group();
    store_tile_image(out.transposed_scores + image, b.k_tile, thread);
  }
}

// grid: most_chunks * H, heads fastest; a block has up to kPrepareGroups groups, which share its key tiles.
constexpr int kPrepareGroups = 4;
template <class Core, GatesAs kGates, bool kPlain>
__global__ void __launch_bounds__(kPrepareGroups* kGroupThreads, 1)
    forward_prepare_kernel(const __grid_constant__ Params p, const __grid_constant__ Prepared out) {
  if (ends_idle(p.sequences)) return;
  flashgla::cuda::wait_for_previous();
  if (out.blocks <= 2) flashgla::cuda::release_next_of_waves();  // of wider heads at the end: README.md
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) prepare_chunk<Core, kGates, kPlain>(p, out, shared);
}

template <class Core>
void launch_forward_prepare(Context& context, const Params& p, const Prepared& prepared) {
  const std::int64_t blocks = p.sequences.most_chunks * p.heads * p.group;
  if (blocks == 0) return;
  // Key tiles at once where there are few blocks. Where a multiprocessor has several, those of one tile after the other
  // are faster: they do not wait for one another.
  const Architecture& device = context.architecture();
  const std::int64_t fit = device.shared_memory / kPrepareBytes,
                     room = kPrepareGroups * device.multiprocessors / blocks;
  const int groups =
      static_cast<int>(std::min<std::int64_t>({prepared.blocks, kPrepareGroups, fit, std::max<std::int64_t>(room, 1)}));
  const auto launch = [&](auto kernel) {
    flashgla::cuda::launch("gated_linear_attention forward prepare", kernel, dim3(static_cast<unsigned>(blocks)),
                           groups * kGroupThreads, groups * kPrepareBytes, static_cast<cudaStream_t>(context.stream()),
                           kNext<Core>, p, prepared);
  };
  if constexpr (std::is_same_v<Core, TensorCore90>) {
    if (prepared.plain) return launch(forward_prepare_kernel<Core, GatesAs::tokens, true>);
  }
  with_gates_as<Core>(p, [&]<GatesAs gates>() { launch(forward_prepare_kernel<Core, gates, false>); });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

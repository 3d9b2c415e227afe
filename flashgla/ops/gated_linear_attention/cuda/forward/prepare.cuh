// First of the passes that serve any K, any split of V and of time, forwards and backwards: everything of a chunk that
// depends on gates, once, chunk-parallel, whatever the gate's kind. For chunk and query head: q~ = scale q 2^G, the
// scores P = q~ k^T with the decays between, and, once a key-value head, k~ = k 2^(sum of later gates) and the chunk's
// decay 2^(sum of all). No exponent is positive outside the scores, and those go by the ladder (forward/gates.cuh). The
// recurrence after it (forward/recurrence.cuh) is then gate-free. Operands are written as images of the shared-memory
// tiles, which the next kernels copy as they lie.
#pragma once

#include <type_traits>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Shared memory of a group: tiles of q, k and gates, and gates in f32: [64][kGatePitch]. The scan's totals lie in
// whichever of the latter two the gates do not.
constexpr int kGatePitch = 68;
constexpr int kPrepareBytes = 3 * kTileBytes + 64 * kGatePitch * 4;

// One chunk and 64 key channels.
struct PrepareBlock {
  Span span;
  std::int64_t first;  // token of the sequence
  int query_head, head, channel;
  std::uint32_t q_tile, k_tile, g_tile;
  float* gates;
  char* q_image;
  char* k_image;  // null: another query head of the group writes it
};

// Starts the copy of key gates.
__device__ __forceinline__ void load_gates(const Params& p, const PrepareBlock& b, int thread) {
  if (p.gate_dtype != DType::f32) {
    const Rows r = rows_of(p.g, 2, b.span, b.first, b.head, b.channel, p.key_dim);
    load_tile(b.g_tile, r, thread);
    return;
  }
  const Rows r = rows_of(p.g, 4, b.span, b.first, b.head, b.channel, p.key_dim);
  const int channel = 8 * (thread % 8);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = kRowsEach * (thread / 8) + i;
    float* to = b.gates + kGatePitch * row + channel;
    const auto* from = reinterpret_cast<const float*>(r.data + static_cast<std::int64_t>(row) * r.stride) + channel;
    const bool inside = row < r.rows && channel < r.channels;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::copy_async_16(ptx::shared_address(to + 4 * half),
                         inside ? from + 4 * half : static_cast<const void*>(r.data), inside ? 16 : 0);
    }
  }
}
// This thread's gates, key gates after the copy has arrived.
__device__ __forceinline__ void fetch_gates(Gates& g, const Params& p, const PrepareBlock& b, int thread) {
  if (p.gate == GateKind::key && p.gate_dtype != DType::f32) return read_gates(g, b.g_tile, thread);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = kRowsEach * (thread / 8) + i;
    if (p.gate == GateKind::key) {
      const float4* from = reinterpret_cast<const float4*>(b.gates + kGatePitch * row + 8 * (thread % 8));
      const float4 low = from[0], high = from[1];
      const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) g[i][e] = base_2_gate(all[e]);
    } else {
      const std::int64_t token = anew(b.first) + row;
      const float gate = token < b.span.length ? key_gate(p, b.span.batch, b.span.begin + token, b.head, 0) : 0.0f;
#pragma unroll
      for (int e = 0; e < 8; ++e) g[i][e] = gate;
    }
  }
}

// A block beyond one anchor's reach: the images, and its part of the scores to s.
template <class Core>
static __device__ __forceinline__ void prepare_by_blocks(Accumulator& s, const Params& p, const Prepared& out,
                                                         const PrepareBlock& b) {
  __syncwarp();  // a warp reads what it has loaded
  gate_by_blocks<Core>(
      s, b.q_tile, b.k_tile, b.g_tile, out.scale,
      [&](Accumulator& sums, int thread) {
        if (p.gate == GateKind::key && p.gate_dtype != DType::f32) return sum_block(sums, b.g_tile, thread);
        sum_block_of(sums, thread, [&](int row, int column) {
          if (p.gate == GateKind::key) {
            const float2 g = *reinterpret_cast<const float2*>(b.gates + kGatePitch * row + column);
            return make_float2(g.x * kLog2E, g.y * kLog2E);
          }
          const std::int64_t token = b.first + row;
          const float g = token < b.span.length ? key_gate(p, b.span.batch, b.span.begin + token, b.head, 0) : 0.0f;
          return make_float2(g, g);
        });
      },
      [](float2, bool) {});
  __syncwarp();
  const int thread = fresh_thread();
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const std::uint32_t at = own_piece(thread, i);
    *reinterpret_cast<uint4*>(b.q_image + at) = load_shared_16(b.q_tile + at);
    if (b.k_image != nullptr) *reinterpret_cast<uint4*>(b.k_image + at) = load_shared_16(b.k_tile + at);
  }
}

template <class Core>
__device__ __forceinline__ void prepare_chunk(const Params& p, const Prepared& out, char* shared) {
  PrepareBlock b;
  const int group = own_group(), groups = blockDim.x / kGroupThreads;
  shared += group * kPrepareBytes;
  b.q_tile = ptx::shared_address(shared);
  b.k_tile = b.q_tile + kTileBytes;
  b.g_tile = b.k_tile + kTileBytes;
  b.gates = reinterpret_cast<float*>(shared + 3 * kTileBytes);
  const int thread = threadIdx.x % kGroupThreads, piece = thread % 8;
  const int heads = p.heads * p.group;
  const std::int64_t chunk = blockIdx.x / heads;
  b.query_head = blockIdx.x % heads;
  b.head = b.query_head / p.group;
  const std::int64_t n = sequence_of_chunk(p.sequences, chunk);
  if (n < 0) return;
  b.span = span_of(p.sequences, n);
  b.first = (chunk - b.span.chunk_begin) * kChunk;
  const bool leads = b.query_head % p.group == 0;

  Accumulator s;
  clear(s);
#pragma unroll 1
  for (int kb = group; kb < out.blocks; kb += groups) {
    b.channel = 64 * kb;
    b.q_image = out.q + ((chunk * heads + b.query_head) * out.blocks + kb) * kTileBytes;
    char* k_image = out.k + ((chunk * p.heads + b.head) * out.blocks + kb) * kTileBytes;
    b.k_image = leads ? k_image : nullptr;
    const Rows q_rows = rows_of(p.q, 2, b.span, b.first, b.query_head, b.channel, p.key_dim);
    const Rows k_rows = rows_of(p.k, 2, b.span, b.first, b.head, b.channel, p.key_dim);
    if (p.gate == GateKind::key) load_gates(p, b, thread);
    ptx::copy_async_commit();
    load_tile(b.q_tile, q_rows, thread);
    load_tile(b.k_tile, k_rows, thread);
    ptx::copy_async_commit();
    ptx::copy_async_wait<1>();
    if constexpr (!std::is_same_v<Core, TensorCore80>) {  // which is given log gates (forward.cu)
      if (p.logit_scale != 0.0f) {
        turn_tile_of_logits(b.g_tile, static_cast<int>(min(b.span.length - b.first, std::int64_t{kChunk})), p, thread);
      }
    }
    Gates g;
    bool one_anchor;
    {
      float before[8], all[8];
      fetch_gates(g, p, b, thread);
      // Totals where the gates are not.
      const std::uint32_t totals =
          p.gate == GateKind::key && p.gate_dtype == DType::f32 ? b.g_tile : b.g_tile + kTileBytes;
      scan_gates(g, before, totals, thread);
      sync_group();
      finish_scan(g, before, all, totals, thread);
      one_anchor = in_range(all);
      if (leads && thread < 8) {
        float* decay = out.decay + ((chunk * p.heads + b.head) * out.blocks + kb) * 64 + 8 * piece;
#pragma unroll
        for (int e = 0; e < 8; ++e) decay[e] = ptx::exp2(all[e]);
      }
      ptx::copy_async_wait<0>();
      if (one_anchor) {
        float whole[8];  // decays of the chunk
#pragma unroll
        for (int e = 0; e < 8; ++e) whole[e] = ptx::exp2(all[e]);
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          const std::uint32_t at = own_piece(thread, i);
          float x[8], y[8];
          unpack_8(load_shared_16(b.q_tile + at), x);
#pragma unroll
          for (int e = 0; e < 8; ++e) x[e] *= out.scale * ptx::exp2(g[i][e]);
          const uint4 gated = pack_8(x);
          store_shared_16(b.q_tile + at, gated);
          *reinterpret_cast<uint4*>(b.q_image + at) = gated;
          unpack_8(load_shared_16(b.k_tile + at), x);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            y[e] = x[e] * ptx::exp2(-g[i][e]);
            x[e] = y[e] * whole[e];
          }
          store_shared_16(b.k_tile + at, pack_8(y));
          if (leads) *reinterpret_cast<uint4*>(k_image + at) = pack_8(x);
        }
      }
    }
    if (one_anchor) {
      Core::publish();
      sync_group();
      Core::begin();
      Core::template product<Stored::k_inner, Stored::k_inner>(s, b.q_tile, b.k_tile, thread);
      Core::finish();
    } else {
      prepare_by_blocks<Core>(s, p, out, b);
    }
    sync_group();
  }
  flashgla::cuda::release_next();
  if (groups > 1) {  // the scores are the sum over all channels
    if (group > 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) b.gates[kGroupThreads * i + thread] = s[i];
    }
    __syncthreads();
    if (group > 0) return;
#pragma unroll 1
    for (int other = 1; other < groups; ++other) {
      const float* theirs = b.gates + other * (kPrepareBytes / 4);
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
template <class Core>
__global__ void __launch_bounds__(kPrepareGroups* kGroupThreads, 1)
    forward_prepare_kernel(const __grid_constant__ Params p, const __grid_constant__ Prepared out) {
  flashgla::cuda::wait_for_previous();
  if (out.blocks <= 2) flashgla::cuda::release_next_of_waves();  // of wider heads at the end: README.md
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) prepare_chunk<Core>(p, out, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

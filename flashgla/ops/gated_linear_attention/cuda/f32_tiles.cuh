// Forward in chunks on tensor cores for operands that bf16 would round: f16 and f32 inputs, and bf16 with more than 256
// key channels. Tiles are f32 in shared memory; a product is one tf32 product (f16 and bf16 are tf32 numbers; f32 where
// the caller allows tf32), or three that leave f32's error: x = hi + lo, both tf32, and all but lo lo.
//
// A block of 256 threads walks through one (sequence, query head, slice of kValues value channels) with the state in
// shared memory. Of each chunk it takes the key channels by tiles of 64:
//     S += q~ k~^T, o += q~ h, h' = 2^G_last (h + k~^T v);  q~ = q 2^G, k~ = k 2^-G  (G: the chunk's sums of gates)
// and in the end o += select(S) v. A tile out of one anchor's range ("steep") takes its scores pair by pair from sums
// that run from the query back to the key, and k 2^(sum of later gates) into the state: exact for any gates.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kWideThreads = 256;
constexpr float kWideRange = 60.0f;  // bits a channel may fall within a chunk under one anchor
// Floats of a row: fragments of 8 rows x 4 columns, or of 4 rows x 8 columns, meet 32 banks.
constexpr int kKeyRow = 64 + 4;
template <int kValues>
constexpr int kValueRow = kValues + 8;

// Offsets in floats.
template <int kValues>
struct WidePlan {
  static constexpr int q = 0, k = q + 64 * kKeyRow, g = k + 64 * kKeyRow, scores = g + 64 * kKeyRow,
                       totals = scores + 64 * kKeyRow,  // [4][64]: sums of gates of 16 tokens
      decay = totals + 4 * 64, v = decay + 64, h = v + 64 * kValueRow<kValues>;
  static constexpr int bytes(int key_tiles) { return (h + key_tiles * 64 * kValueRow<kValues>)*4; }
};

// The a operand of a product of 16 x 8: elements (l/4, l%4), (l/4+8, l%4), (l/4, l%4+4), (l/4+8, l%4+4).
template <bool kSplit>
struct WideFragment {
  std::uint32_t high[4], low[4];

  __device__ __forceinline__ void set(int i, float x) {
    high[i] = ptx::to_tf32(x);
    if constexpr (kSplit) low[i] = ptx::to_tf32(x - __uint_as_float(high[i]));
  }
};

// d (16 x 8 blocks, kBlocks side by side) += a b over `kDepth` of depth; a(row, depth), b(depth, column) give elements.
template <bool kSplit, int kDepth, int kBlocks, class A, class B>
__device__ __forceinline__ void multiply_wide(float (&d)[kBlocks][4], int lane, A a, B b) {
  const int row = lane >> 2, in_four = lane & 3;
#pragma unroll 2
  for (int depth = 0; depth < kDepth; depth += 8) {
    WideFragment<kSplit> left;
    left.set(0, a(row, depth + in_four));
    left.set(1, a(row + 8, depth + in_four));
    left.set(2, a(row, depth + in_four + 4));
    left.set(3, a(row + 8, depth + in_four + 4));
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float x = b(depth + in_four, 8 * j + row), y = b(depth + in_four + 4, 8 * j + row);
      const std::uint32_t x_high = ptx::to_tf32(x), y_high = ptx::to_tf32(y);
      if constexpr (kSplit) {
        ptx::mma_tf32(d[j], left.low, x_high, y_high);
        ptx::mma_tf32(d[j], left.high, ptx::to_tf32(x - __uint_as_float(x_high)),
                      ptx::to_tf32(y - __uint_as_float(y_high)));
      }
      ptx::mma_tf32(d[j], left.high, x_high, y_high);
    }
  }
}

// 64 tokens x `columns` of a matrix to rows of shared memory, zeros beyond `tokens` and `inside` columns.
template <int columns, int row_floats>
__device__ __forceinline__ void load_wide(float* to, DType dtype, const Strided& s, std::int64_t at, int tokens,
                                          int inside) {
  constexpr int kRowsAtOnce = kWideThreads / columns;
  const int column = threadIdx.x % columns, first = threadIdx.x / columns;
  at += first * s.token + column;
#pragma unroll 8
  for (int row = first; row < 64; row += kRowsAtOnce, at += kRowsAtOnce * s.token)
    to[row * row_floats + column] = row < tokens && column < inside ? load_as(dtype, s.data, at) : 0.0f;
}

// Scores of a steep tile, added to `scores`. Thread: query threadIdx.x / 4, channels threadIdx.x % 4 and every fourth
// from there; it walks from the query back with the running sum of gates of each.
static __device__ __noinline__ void add_exact_scores(float* scores, const float* q_tile, const float* k_tile,
                                                     const float* g_tile) {
  const int query = threadIdx.x >> 2, part = threadIdx.x & 3;
  float q[16], sums[16];
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    q[c] = q_tile[query * kKeyRow + 4 * c + part];
    sums[c] = 0.0f;
  }
  for (int step = 0; step < 64; ++step) {
    const int key = max(query - step, 0);
    float p = 0.0f;
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const int at = key * kKeyRow + 4 * c + part;
      p += q[c] * k_tile[at] * ptx::exp2(sums[c]);
      sums[c] += g_tile[at];
    }
    p += __shfl_xor_sync(0xffffffffu, p, 1);
    p += __shfl_xor_sync(0xffffffffu, p, 2);
    if (part == 0 && step <= query) scores[query * kKeyRow + key] += p;
  }
}

// Grid: N * H * ceil(V / kValues), value slices fastest.
template <bool kSplit, int kValues>
__device__ __forceinline__ void forward_in_f32_tiles(const Params& p, float* shared) {
  using Plan = WidePlan<kValues>;
  constexpr int kBlocks = kValues / 16;  // of 8 columns, a warp's half of the slice
  float *q_tile = shared + Plan::q, *k_tile = shared + Plan::k, *g_tile = shared + Plan::g,
        *scores = shared + Plan::scores, *totals = shared + Plan::totals, *decay = shared + Plan::decay,
        *v_tile = shared + Plan::v;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int row0 = warp % 4 * 16, column0 = warp / 4 * (kValues / 2), score_column0 = warp / 4 * 32;
  const int K = p.key_dim, V = p.value_dim, key_tiles = (K + 63) / 64, slices = (V + kValues - 1) / kValues;
  const int heads = p.heads * p.group, query_head = static_cast<int>(blockIdx.x / slices % heads);
  const int head = query_head / p.group, v0 = static_cast<int>(blockIdx.x % slices) * kValues;
  const std::int64_t n = blockIdx.x / slices / heads;
  const bool leads = query_head % p.group == 0;
  const Span span = span_of(p.sequences, n);
  const std::int64_t cell = (n * p.heads + head) * static_cast<std::int64_t>(K) * V;
  const auto h_tile = [&](int tile) { return shared + Plan::h + tile * 64 * kValueRow<kValues>; };
  const auto for_state = [&](auto visit) {  // visit(place in shared memory, offset in a [K,V] matrix)
    const int column = thread % kValues;
    for (int row = thread / kValues; row < key_tiles * 64; row += kWideThreads / kValues)
      visit(h_tile(0) + row * kValueRow<kValues> + column, row < K && v0 + column < V,
            static_cast<std::int64_t>(row) * V + v0 + column);
  };
  const auto* h0 = static_cast<const float*>(p.h0);
  for_state([&](float* h, bool inside, std::int64_t at) { *h = h0 != nullptr && inside ? h0[cell + at] : 0.0f; });

  for (std::int64_t t0 = 0; t0 < span.length; t0 += kChunk) {
    const int tokens = static_cast<int>(min(static_cast<std::int64_t>(kChunk), span.length - t0));
    const std::int64_t token = span.begin + t0;
    const auto place = [&](const Strided& s, int of_head) {
      return span.batch * s.batch + token * s.token + of_head * s.head;
    };
    __syncthreads();  // the chunk before has been read
    if (p.states != nullptr && leads) {
      const std::int64_t start = ((span.chunk_begin + t0 / kChunk) * p.heads + head) * static_cast<std::int64_t>(K) * V;
      for_state([&](const float* h, bool inside, std::int64_t at) {
        if (inside) store_as(DType::bf16, p.states, start + at, *h);
      });
    }
    load_wide<kValues, kValueRow<kValues>>(v_tile, p.dtype, p.v, place(p.v, head) + v0, tokens, V - v0);
    for (int i = thread; i < 64 * kKeyRow; i += kWideThreads) scores[i] = 0.0f;
    float s[4][4] = {}, o[kBlocks][4] = {};
    for (int tile = 0; tile < key_tiles; ++tile) {
      const int channel0 = tile * 64;
      if (tile > 0) __syncthreads();
      load_wide<64, kKeyRow>(q_tile, p.dtype, p.q, place(p.q, query_head) + channel0, tokens, K - channel0);
      load_wide<64, kKeyRow>(k_tile, p.dtype, p.k, place(p.k, head) + channel0, tokens, K - channel0);
      // Thread: a channel, and 16 tokens of it.
      const int channel = thread % 64, quarter = thread / 64;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int t = 16 * quarter + i;
        const float g =
            t < tokens && channel0 + channel < K ? key_gate(p, span.batch, token + t, head, channel0 + channel) : 0.0f;
        g_tile[t * kKeyRow + channel] = g;
        sum += g;
      }
      totals[quarter * 64 + channel] = sum;
      __syncthreads();
      float before = 0.0f, after = 0.0f, total = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float part = totals[i * 64 + channel];
        total += part;
        before += i < quarter ? part : 0.0f;
        after += i > quarter ? part : 0.0f;
      }
      const bool steep = __syncthreads_or(!(total >= -kWideRange));
      if (steep) {
        add_exact_scores(scores, q_tile, k_tile, g_tile);
        __syncthreads();
      }
      if (quarter == 0) decay[channel] = ptx::exp2(total);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int at = (16 * quarter + i) * kKeyRow + channel;
        before += g_tile[at];
        q_tile[at] *= ptx::exp2(before);
        if (!steep) k_tile[at] *= ptx::exp2(-before);
      }
      if (steep) {
#pragma unroll
        for (int i = 15; i >= 0; --i) {
          const int at = (16 * quarter + i) * kKeyRow + channel;
          k_tile[at] *= ptx::exp2(after);
          after += g_tile[at];
        }
      }
      __syncthreads();
      float* h = h_tile(tile);
      const auto gated_q = [&](int row, int depth) { return q_tile[(row0 + row) * kKeyRow + depth]; };
      if (!steep) {
        multiply_wide<kSplit, 64>(s, lane, gated_q, [&](int depth, int column) {
          return k_tile[(score_column0 + column) * kKeyRow + depth];
        });
      }
      multiply_wide<kSplit, 64>(
          o, lane, gated_q, [&](int depth, int column) { return h[depth * kValueRow<kValues> + column0 + column]; });
      __syncthreads();  // h has been read
      float state[kBlocks][4];
      const int row = row0 + (lane >> 2);
      const float first[2] = {steep ? decay[row] : 1.0f, steep ? decay[row + 8] : 1.0f};
      const float last[2] = {steep ? 1.0f : decay[row], steep ? 1.0f : decay[row + 8]};
      const auto state_place = [&](int j, int half) {
        return reinterpret_cast<float2*>(h + (row + 8 * half) * kValueRow<kValues> + column0 + 8 * j + 2 * (lane & 3));
      };
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 x = *state_place(j, half);
          state[j][2 * half] = x.x * first[half];
          state[j][2 * half + 1] = x.y * first[half];
        }
      }
      multiply_wide<kSplit, 64>(
          state, lane, [&](int of_row, int depth) { return k_tile[depth * kKeyRow + row0 + of_row]; },
          [&](int depth, int column) { return v_tile[depth * kValueRow<kValues> + column0 + column]; });
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *state_place(j, half) = make_float2(state[j][2 * half] * last[half], state[j][2 * half + 1] * last[half]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = row0 + (lane >> 2) + 8 * (e / 2), key = score_column0 + 8 * j + 2 * (lane & 3) + e % 2;
        float& x = scores[query * kKeyRow + key];
        x = query >= key ? x + s[j][e] : 0.0f;
      }
    }
    __syncthreads();
    multiply_wide<kSplit, 64>(
        o, lane, [&](int row, int depth) { return scores[(row0 + row) * kKeyRow + depth]; },
        [&](int depth, int column) { return v_tile[depth * kValueRow<kValues> + column0 + column]; });
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int t = row0 + (lane >> 2) + 8 * (e / 2), column = v0 + column0 + 8 * j + 2 * (lane & 3) + e % 2;
        if (t < tokens && column < V)
          store_as(p.dtype, p.o.data, place(p.o, query_head) + t * p.o.token + column, p.scale * o[j][e]);
      }
    }
  }
  if (p.ht == nullptr || !leads) return;
  __syncthreads();
  auto* ht = static_cast<float*>(p.ht);
  for_state([&](const float* h, bool inside, std::int64_t at) {
    if (inside) ht[cell + at] = *h;
  });
}

template <bool kSplit, int kValues>
__global__ void __launch_bounds__(kWideThreads, 2) f32_tiles_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) float wide_shared[];
  forward_in_f32_tiles<kSplit, kValues>(p, wide_shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// The forward in parallel form: pairs of tokens, no state between them. README.md has the way of it.
//
// A state is K more tokens: before a sequence, row c with key e_c and value h0[c]; after it, row c with query e_c,
// whose output is ht[c]. Their gates are 1. So a sequence is `before` + length + `after` rows, and nothing else knows
// of states. Each query head runs for itself; of a group the first alone has the rows after.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kRows = 64;      // of a tile
constexpr int kThreads = 256;  // 16 x 16 of four rows each
constexpr int kWarps = kThreads / 32;
constexpr int kSlice = 32;        // channels that scores are summed over at once
constexpr int kMostKeys = 512;    // K
constexpr int kSliceStride = 36;  // floats from row to row: a quarter of a warp reads 16 bytes each, no conflicts
constexpr int kScoreStride = 68;

struct Call {
  Params p;
  int before = 0, after = 0;  // rows beside a sequence's tokens
  std::int64_t rows = 0;      // of all sequences
  float* queries = nullptr;   // [H, rows, K], decayed from their tile's start
  float* keys = nullptr;      // [H, rows, K], decayed to their tile's end
  float* decays = nullptr;    // [tiles, H, K] of whole tiles
};

enum class Side { query, key, value };
// A sequence of one query head.
struct HeadRows {
  std::int64_t n, base, first_tile;  // base: its first among all rows
  std::int64_t batch, begin;         // as of Span
  int query_head, head, length, count;
  bool first_of_group;
};
__device__ __forceinline__ HeadRows rows_of(const Call& c, std::int64_t n, int query_head) {
  HeadRows s;
  s.n = n;
  const Span span = span_of(c.p.sequences, n);
  s.batch = span.batch;
  s.begin = span.begin;
  const std::int64_t token = c.p.sequences.cu_seqlens ? s.begin : n * c.p.sequences.length;
  s.base = token + n * (c.before + c.after);
  s.first_tile = s.base / kRows + n;
  s.query_head = query_head;
  s.head = query_head / c.p.group;
  s.length = static_cast<int>(span.length);
  s.count = c.before + s.length + c.after;
  s.first_of_group = s.head * c.p.group == query_head;
  return s;
}

__device__ __forceinline__ float gate_of(const Call& c, const HeadRows& s, int row, int channel) {
  const int t = row - c.before;
  if (t < 0 || t >= s.length || channel >= c.p.key_dim) return 1.0f;
  return exp2f(key_gate(c.p, s.batch, s.begin + t, s.head, channel));
}

// Queries have the scale. Tiles are loaded from values: by predicated loads, several under way together.
template <Side side>
__device__ __forceinline__ float element(const Call& c, const HeadRows& s, int row, int channel) {
  constexpr bool of_keys = side != Side::value, ahead = side != Side::query;
  const Params& p = c.p;
  const int t = row - c.before, width = of_keys ? p.key_dim : p.value_dim;
  const bool token = t >= 0 && t < s.length;
  const int key = t < 0 ? row : t - s.length;  // of a state
  const bool of_state = !token && row < s.count && (t < 0) == ahead && (ahead || s.first_of_group);
  if (channel >= width) return 0.0f;
  const Strided& x = side == Side::query ? p.q : side == Side::key ? p.k : p.v;
  const std::int64_t offset =
      s.batch * x.batch + (s.begin + t) * x.token + (ahead ? s.head : s.query_head) * x.head + channel;
  if constexpr (of_keys) {
    if (!token) return of_state && channel == key ? 1.0f : 0.0f;
    const float loaded = feature(p.feature_map, load_as(p.dtype, x.data, offset));
    return side == Side::query ? p.scale * loaded : loaded;
  } else {
    const auto* state = static_cast<const float*>(p.h0);
    const std::int64_t at = ((s.n * p.heads + s.head) * p.key_dim + key) * width + channel;
    const DType dtype = token ? p.dtype : DType::f32;
    const void* from = token ? x.data : state;
    return Bits(dtype, from, token ? offset : at, token || (of_state && state != nullptr)).as_float(dtype);
  }
}

// Grid: (N H, tiles). A thread walks a tile's rows of one channel, forth for queries and back for keys.
__global__ void __launch_bounds__(kThreads) parallel_prepare_kernel(const __grid_constant__ Call c) {
  const int heads = c.p.heads * c.p.group, K = c.p.key_dim, tile = blockIdx.y;
  const HeadRows s = rows_of(c, blockIdx.x / heads, static_cast<int>(blockIdx.x % heads));
  const int first = tile * kRows, end = min(first + kRows, s.count);
  const std::int64_t place = (s.query_head * c.rows + s.base) * K;
  for (int channel = threadIdx.x; first < end && channel < K; channel += kThreads) {
    float decay = 1.0f;
#pragma unroll 1
    for (int row = first; row < end; ++row) {
      decay *= gate_of(c, s, row, channel);
      c.queries[place + static_cast<std::int64_t>(row) * K + channel] =
          decay * element<Side::query>(c, s, row, channel);
    }
    c.decays[((s.first_tile + tile) * heads + s.query_head) * K + channel] = decay;
    decay = 1.0f;
#pragma unroll 1
    for (int row = end - 1; row >= first; --row) {
      c.keys[place + static_cast<std::int64_t>(row) * K + channel] = decay * element<Side::key>(c, s, row, channel);
      decay *= gate_of(c, s, row, channel);
    }
  }
}

// o_i = sum_{j <= i} (q_i W_ij k_j) v_j. Grid: (N H, tiles, column slices); a block makes a tile's rows of o.
template <int kColumns>
__global__ void __launch_bounds__(kThreads, 2) parallel_form_kernel(const __grid_constant__ Call c) {
  constexpr int kStage = 4096 / kColumns, kQuads = kColumns / 64;
  constexpr int kFlight = kQuads == 2 ? 4 : 2;  // elements of a thread under way, as far as there are registers
  __shared__ float4 slices[2 * kRows * kSliceStride / 4];  // of both sides; or kStage rows of v
  __shared__ float4 score_tile[kRows * kScoreStride / 4];
  __shared__ float between[kMostKeys];  // decay from the other tile to this one
  __shared__ HeadRows s;                // not held in registers
  float *left = reinterpret_cast<float*>(slices), *right = left + kRows * kSliceStride, *vs = left;
  float* scores = reinterpret_cast<float*>(score_tile);

  const Params& p = c.p;
  const int heads = p.heads * p.group, K = p.key_dim, V = p.value_dim;
  if (threadIdx.x == 0) s = rows_of(c, blockIdx.x / heads, static_cast<int>(blockIdx.x % heads));
  __syncthreads();
  const int tiles = (s.count + kRows - 1) / kRows;
  if (blockIdx.y >= tiles) return;
  const int tile = tiles - 1 - blockIdx.y;  // those with the most others first
  const int first = tile * kRows, first_column = blockIdx.z * kColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const std::int64_t place = s.query_head * c.rows + s.base;
  const float *own_rows = c.queries + place * K, *other_rows = c.keys + place * K;
  const auto decayed = [&](const float* rows, int row, int channel) {
    return row < s.count && channel < K ? rows[static_cast<std::int64_t>(row) * K + channel] : 0.0f;
  };

  // S of this tile with that which begins at row `begin`.
  const auto make_scores = [&](int begin) {
    float sum[4][4] = {};
    for (int x0 = 0; x0 < K; x0 += kSlice) {
#pragma unroll kFlight
      for (int i = threadIdx.x; i < kRows * kSlice; i += kThreads) {
        const int row = i / kSlice, x = x0 + i % kSlice, at = row * kSliceStride + i % kSlice;
        left[at] = decayed(own_rows, first + row, x);
        right[at] = x < K ? between[x] * decayed(other_rows, begin + row, x) : 0.0f;
      }
      __syncthreads();
#pragma unroll 1
      for (int x = 0; x < kSlice; x += 4) {
        float4 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<float4*>(left + (ty * 4 + i) * kSliceStride + x);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4 b = *reinterpret_cast<float4*>(right + (tx + 16 * j) * kSliceStride + x);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[i][j] = fmaf(a[i].x, b.x, sum[i][j]);
            sum[i][j] = fmaf(a[i].y, b.y, sum[i][j]);
            sum[i][j] = fmaf(a[i].z, b.z, sum[i][j]);
            sum[i][j] = fmaf(a[i].w, b.w, sum[i][j]);
          }
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[(ty * 4 + i) * kScoreStride + tx + 16 * j] = sum[i][j];
    }
    __syncthreads();
  };

  float out[4][kQuads][4] = {};  // rows ty * 4 + i, columns 64 j + 4 tx + e
  const auto add_products = [&](int begin) {
    for (int s0 = 0; s0 < kRows; s0 += kStage) {
#pragma unroll kFlight
      for (int i = threadIdx.x; i < kStage * kColumns; i += kThreads) {
        vs[i] = element<Side::value>(c, s, begin + s0 + i / kColumns, first_column + i % kColumns);
      }
      __syncthreads();
#pragma unroll 2
      for (int t = 0; t < kStage; ++t) {
        float4 v[kQuads];
#pragma unroll
        for (int j = 0; j < kQuads; ++j) v[j] = *reinterpret_cast<float4*>(vs + t * kColumns + 64 * j + 4 * tx);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float score = scores[(ty * 4 + i) * kScoreStride + s0 + t];
#pragma unroll
          for (int j = 0; j < kQuads; ++j) {
            out[i][j][0] = fmaf(score, v[j].x, out[i][j][0]);
            out[i][j][1] = fmaf(score, v[j].y, out[i][j][1]);
            out[i][j][2] = fmaf(score, v[j].z, out[i][j][2]);
            out[i][j][3] = fmaf(score, v[j].w, out[i][j][3]);
          }
        }
      }
      __syncthreads();
    }
  };

#pragma unroll 1
  for (int x = threadIdx.x; x < K; x += kThreads) between[x] = 1.0f;
  __syncthreads();
  for (int at = tile - 1; at >= 0; --at) {
    make_scores(at * kRows);
    add_products(at * kRows);
    const float* decays = c.decays + ((s.first_tile + at) * heads + s.query_head) * K;
#pragma unroll 1
    for (int x = threadIdx.x; x < K; x += kThreads) between[x] *= decays[x];
    __syncthreads();
  }

  // What a row sees of its own tile goes from token to token, away from it: decays are running products of gates.
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kScoreStride; i += kThreads) scores[i] = 0.0f;
  for (int x0 = 0; x0 < K; x0 += kSlice) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kSlice; i += kThreads) {
      const int row = i / kSlice, x = x0 + i % kSlice, at = row * kSliceStride + i % kSlice;
      left[at] = element<Side::key>(c, s, first + row, x);
      right[at] = gate_of(c, s, first + row, x);
    }
    __syncthreads();
    for (int row = warp; row < kRows; row += kWarps) {
      const float mine = element<Side::query>(c, s, first + row, x0 + lane);
      float decay = 1.0f;
#pragma unroll 2
      for (int t = row; t >= 0; --t) {
        const float sum = flashgla::cuda::warp_sum(mine * decay * left[t * kSliceStride + lane]);
        if (lane == 0) scores[row * kScoreStride + t] += sum;
        decay *= right[t * kSliceStride + lane];
      }
    }
    __syncthreads();
  }
  add_products(first);

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + ty * 4 + i, t = row - c.before;
    if (row >= s.count) continue;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = first_column + 64 * j + 4 * tx + e;
        if (column >= V) continue;
        if (t >= s.length) {
          if (s.first_of_group && p.ht) {
            const std::int64_t key = (s.n * p.heads + s.head) * K + t - s.length;
            static_cast<float*>(p.ht)[key * V + column] = out[i][j][e];
          }
        } else if (t >= 0) {
          store_as(p.dtype, p.o.data,
                   s.batch * p.o.batch + (s.begin + t) * p.o.token + s.query_head * p.o.head + column, out[i][j][e]);
        }
      }
    }
  }
}

}  // namespace

void parallel_forward(Context& context, const Params& p) {
  const ArenaScope scope(context.scratch());
  // With rows beside the tokens for states that are given or wanted.
  Call c{.p = p, .before = p.h0 != nullptr ? p.key_dim : 0, .after = p.ht != nullptr ? p.key_dim : 0};
  const Sequences& s = p.sequences;
  const std::int64_t heads = p.heads * p.group;
  c.rows = s.tokens() + s.count * (c.before + c.after);
  c.queries = take<float>(context, heads * c.rows * p.key_dim * 4, "gla parallel: decayed queries");
  c.keys = take<float>(context, heads * c.rows * p.key_dim * 4, "gla parallel: decayed keys");
  c.decays = take<float>(context, (c.rows / kRows + s.count) * heads * p.key_dim * 4, "gla parallel: decays");
  // Heads of all sequences, and tiles of their rows: packed ones may all be as long as their sum.
  const std::int64_t rows = c.before + s.length + c.after;
  dim3 blocks(static_cast<unsigned>(s.count * heads), static_cast<unsigned>((rows + kRows - 1) / kRows));
  if (context.planning() || blocks.x == 0 || blocks.y == 0) return;
  const auto run = [&](void (*kernel)(Call)) {
    flashgla::cuda::launch("gated_linear_attention in parallel form", kernel, blocks, kThreads, 0,
                           static_cast<cudaStream_t>(context.stream()), flashgla::cuda::Begin::after_previous, c);
  };
  run(parallel_prepare_kernel);
  const int columns = p.value_dim > 128 ? 256 : 128;
  blocks.z = static_cast<unsigned>((p.value_dim + columns - 1) / columns);
  run(columns == 256 ? parallel_form_kernel<256> : parallel_form_kernel<128>);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

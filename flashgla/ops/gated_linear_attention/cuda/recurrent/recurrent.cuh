// The recurrence token by token in f32, for every gate kind, dtype, feature map, stride and size up to 512: what no
// chunked form takes, very short sequences, Algorithm::recurrent.
//
// The forward and all gradients are one recurrence with other operands:
//     M_t = a_t c_t^T * M_{t-1} + x_t y_t^T,   out_t = M_t z_t          (backwards: the gates of token t+1)
//     rows V: o  from x, y, z = v, k, q         dv, backwards, from do, q, k
//     rows K: dq from x, y, z = k, v, do        dk, backwards, from q, do, v
// With a normaliser v has one more channel, always 1, whose row (or column) of the state is z (of dh: dz); do then is
// the gradient of numerator and denominator. Each query head runs for itself; grouped heads are added at the end.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// A vector per token and head, as the recurrence reads it.
struct Operand {
  Strided view;  // without data: `beyond` everywhere
  DType dtype = DType::f32;
  int width = 0;  // channels in memory; those past them read `beyond`
  float beyond = 0.0f;
  bool of_queries = false;  // it has query heads, else key-value heads
  int channel_step = 1;     // 0: one value for all channels
  FeatureMap map = FeatureMap::identity;
  float scale = 1.0f;
  bool gate = false;  // read 2^x of the base-2 gate

  __device__ __forceinline__ bool holds(int channel) const { return view.data != nullptr && channel < width; }
  // An element as it lies, and what is read of it.
  __device__ __forceinline__ Bits load(std::int64_t batch, std::int64_t token, int query_head, int kv_head, int channel,
                                       bool wanted = true) const {
    const int head = of_queries ? query_head : kv_head;
    return Bits(dtype, view.data, batch * view.batch + token * view.token + head * view.head + channel * channel_step,
                wanted && holds(channel));
  }
  __device__ __forceinline__ float value(const Bits& bits, int channel) const {
    if (!holds(channel)) return beyond;
    const float x = bits.as_float(dtype);
    return gate ? exp2f(base_2_gate(x)) : scale * feature(map, x);
  }
};

// The gates' gradients are sums over time; they start anew every so many tokens from states kept there, so that a long
// sequence's rounding does not pile up.
constexpr int kCheckpoint = 128;

// Checkpoint j of a sequence is number checkpoint_begin + j and lies at the end of its j-th kCheckpoint tokens, or of
// it.
__device__ __forceinline__ std::int64_t checkpoint_begin(const Sequences& s, std::int64_t n) {
  if (s.cu_seqlens == nullptr) return n * ((s.length + kCheckpoint - 1) / kCheckpoint);
  return sequence_start(s, n) / kCheckpoint + n;
}

struct RecurrentPass {
  Operand x, row_gate;        // rows
  Operand y, z, column_gate;  // columns
  int rows, columns;
  // M at the beginning: element (r, c) of a [K,V] state; the extra channel from its own vector [K]; null: zeros.
  const float* start;
  const float* start_extra;
  bool rows_are_values = false;      // of the state
  bool start_in_first_head = false;  // of a group only (what all heads' gradients add up to)
  bool is_forward = false;           // the call's: leaves ht, zt and kept states
  float* out = nullptr;              // [tokens, H, rows]; null: o
  float* end = nullptr;              // [N, H, columns, rows] or null
  float* checkpoints = nullptr;      // [checkpoints, H, columns, rows] or null: M there; backwards before the token's
                                     // own part
};

constexpr int kPassWarps = 8, kPassRows = 32, kPassThreads = kPassWarps * kPassRows;  // a lane has a row
constexpr int kPassTokens = kPassWarps;                                               // of a tile

template <int R>
constexpr int pass_shared_bytes() {
  return kPassTokens * (3 * kPassWarps * R + (2 + kPassWarps) * kPassRows) * 4;
}

// Grid: (N H, ceil(rows / 32)). Lane = row of the block's 32, warp w has columns [w R, (w + 1) R) of M in registers.
// Tokens come in tiles through shared memory as f32, gates exponentiated; each warp leaves its part of M z for the
// tile, and the block adds the eight parts.
template <int R, bool backwards>
__global__ void __launch_bounds__(kPassThreads, R <= 8    ? 3
                                                : R <= 64 ? 2
                                                          : 1)
    recurrent_kernel(const __grid_constant__ Params p, const __grid_constant__ RecurrentPass pass) {
  constexpr int kColumns = kPassWarps * R, kTile = kPassTokens, kThreads = kPassThreads;
  constexpr int kAtOnce = R <= 16 ? R / 4 : 2;  // elements of a thread whose loads are under way together
  static_assert(kTile * kColumns % (kAtOnce * kThreads) == 0);
  extern __shared__ float4 shared[];
  float* y_tile = reinterpret_cast<float*>(shared);  // [kTile][kColumns]
  float *z_tile = y_tile + kTile * kColumns, *c_tile = z_tile + kTile * kColumns;
  float* x_tile = c_tile + kTile * kColumns;  // [kTile][32]
  float* a_tile = x_tile + kTile * kPassRows;
  float* parts = a_tile + kTile * kPassRows;  // [kTile][warps][32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, query_heads = p.heads * p.group;
  const std::int64_t n = blockIdx.x / query_heads;
  const int query_head = static_cast<int>(blockIdx.x % query_heads), kv_head = query_head / p.group;
  const int row = blockIdx.y * kPassRows + lane;
  const bool there = row < pass.rows;
  const Span span = span_of(p.sequences, n);
  const int begin = static_cast<int>(span.begin), length = static_cast<int>(span.length);  // registers are few
  const auto leads = [&] { return anew(kv_head) * p.group == query_head; };  // of a group's heads the first
  const auto cell = [&] { return n * p.heads + anew(kv_head); };

  float m[R];
  const bool starts = there && (!pass.start_in_first_head || leads());
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int column = warp * R + r;
    const int key = pass.rows_are_values ? column : row, value = pass.rows_are_values ? row : column;
    const std::int64_t at = cell() * p.key_dim + key;
    m[r] = 0.0f;
    if (starts && column < pass.columns) {
      if (value < p.value_dim) {
        if (pass.start != nullptr) m[r] = pass.start[at * p.value_dim + value];
      } else if (pass.start_extra != nullptr) {
        m[r] = pass.start_extra[at];
      }
    }
  }

  // visit(column, M's element): one place at a time, not R kept through the loop.
  const auto for_columns = [&](auto visit) {
    const int first = anew(warp * R);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (there && first + r < pass.columns) visit(first + r, m[r]);
    }
  };
  const auto store = [&](float* matrices, std::int64_t number) {
    float* const to = matrices + (number * query_heads + query_head) * pass.columns * pass.rows + row;
    for_columns([&](int column, float x) { to[static_cast<std::int64_t>(column) * pass.rows] = x; });
  };
  const auto checkpoint = [&](int t) {  // of the sequence
    if (pass.checkpoints == nullptr || ((t + 1) % kCheckpoint != 0 && t + 1 != length)) return;
    store(pass.checkpoints, checkpoint_begin(p.sequences, n) + t / kCheckpoint);
  };

  for (int done = 0; done < length; done += kTile) {
    if (!backwards && pass.is_forward && p.states != nullptr && done % kChunk == 0 && p.keeps_state(done / kChunk) &&
        row < p.value_dim && leads()) {
      const std::int64_t slot = p.state_slot(span.chunk_begin, n, done / kChunk);
      for_columns([&](int k, float x) {
        store_as(DType::bf16,
                 static_cast<char*>(p.states) + p.state_tile(slot, kv_head, k / kChunk, row / kChunk) +
                     tile_piece(k % kChunk, row % kChunk / 8) + row % 8 * 2,
                 0, x);
      });
    }
    const int tokens = min(kTile, length - done);
    const std::int64_t batch = anew(span.batch);
    const auto token_of = [&](int t) { return begin + (backwards ? length - 1 - done - t : done + t); };
    // What hangs on heads is not held through the loop.
    const auto load = [&, own = anew(query_head), shared = anew(kv_head)](const Operand& x, int t, int channel,
                                                                          bool wanted) {
      return x.load(batch, token_of(t), own, shared, channel, wanted && t < tokens);
    };
    const Bits x = load(pass.x, warp, row, there), a = load(pass.row_gate, warp, row, there);
    for (int first = threadIdx.x; first < tokens * kColumns; first += kAtOnce * kThreads) {
      Bits y[kAtOnce], z[kAtOnce], c[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kThreads, t = at / kColumns, column = at % kColumns;
        const bool inside = column < pass.columns;
        y[i] = load(pass.y, t, column, inside);
        z[i] = load(pass.z, t, column, inside);
        c[i] = load(pass.column_gate, t, column, inside);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kThreads, column = at % kColumns;
        const bool inside = column < pass.columns;
        y_tile[at] = inside ? pass.y.value(y[i], column) : 0.0f;
        z_tile[at] = inside ? pass.z.value(z[i], column) : 0.0f;
        c_tile[at] = inside ? pass.column_gate.value(c[i], column) : 1.0f;
      }
    }
    x_tile[threadIdx.x] = there ? pass.x.value(x, row) : 0.0f;
    a_tile[threadIdx.x] = there ? pass.row_gate.value(a, row) : 1.0f;
    __syncthreads();
    for (int t = 0; t < tokens; ++t) {
      const float x = x_tile[t * kPassRows + lane], a = a_tile[t * kPassRows + lane];
      const auto four_of = [&](const float* tile, int r) {
        return reinterpret_cast<const float4*>(tile + t * kColumns + warp * R)[r / 4];
      };
      // Fours are added up first: a constant gate's dg is one sum of what roundings of one long chain would leave.
      float sum = 0.0f;
      const auto step = [&](float& element, float y, float z, float c, float before) {
        element = backwards ? fmaf(x, y, element) : fmaf(a * c, element, x * y);
        const float sum = fmaf(z, element, before);
        if (backwards) element *= a * c;
        return sum;
      };
      if (backwards) checkpoint(length - 1 - done - t);
#pragma unroll
      for (int r = 0; r < R; r += 4) {
        const float4 y = four_of(y_tile, r), z = four_of(z_tile, r), c = four_of(c_tile, r);
        float four = step(m[r], y.x, z.x, c.x, 0.0f);
        four = step(m[r + 1], y.y, z.y, c.y, four);
        four = step(m[r + 2], y.z, z.z, c.z, four);
        sum += step(m[r + 3], y.w, z.w, c.w, four);
      }
      if (!backwards) checkpoint(done + t);
      parts[(t * kPassWarps + warp) * kPassRows + lane] = sum;
    }
    __syncthreads();
    if (warp < tokens && there) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kPassWarps; ++w) sum += parts[(warp * kPassWarps + w) * kPassRows + lane];
      const std::int64_t token = token_of(warp);
      if (pass.out == nullptr) {
        store_as(p.dtype, p.o.data, batch * p.o.batch + token * p.o.token + query_head * p.o.head + row, sum);
      } else {
        const std::int64_t of = (p.sequences.cu_seqlens ? 0 : batch * p.sequences.length) + token;
        pass.out[(of * query_heads + query_head) * pass.rows + row] = sum;
      }
    }
    // The next tile overwrites what all warps have read; parts are only written after its barrier.
  }

  if (pass.end != nullptr) store(pass.end, n);
  if (backwards || !pass.is_forward || !leads()) return;
  float* const to = static_cast<float*>(row < p.value_dim ? p.ht : p.zt);
  if (to == nullptr) return;
  for_columns([&](int k, float x) {
    const std::int64_t at = cell() * p.key_dim + k;
    to[row < p.value_dim ? at * p.value_dim + row : at] = x;
  });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

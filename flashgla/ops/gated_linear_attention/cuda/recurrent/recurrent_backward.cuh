// The gradient token by token in f32, for every gate kind, dtype, feature map, stride and size up to 512: what no
// chunked form takes.
//
// All of it is one recurrence, run two to four times with other operands:
//     M_t = a_t c_t^T * M_{t-1} + x_t y_t^T,   out_t = M_t z_t          (backwards: the gates of token t+1)
//     rows K: dq from x, y, z = k, v, do        dk, backwards, from q, do, v
//     rows V: o  from x, y, z = v, k, q         dv, backwards, from do, q, k
// With a normaliser v has one more channel, always 1, whose column of the state is z (and of dh: dz); do then is the
// gradient of numerator and denominator. Each query head runs for itself; grouped heads are added at the end.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// A vector per token and head, as the recurrence reads it.
struct Operand {
  Strided view;  // without data: `beyond` everywhere
  DType dtype = DType::f32;
  int width = 0;  // channels in memory; those past them read `beyond`
  float beyond = 0.0f;
  int heads_each = 1;    // query heads that share one of its heads
  int channel_step = 1;  // 0: one value for all channels
  FeatureMap map = FeatureMap::identity;
  float scale = 1.0f;
  bool gate = false;  // read 2^x of the base-2 gate
};

__device__ __forceinline__ float load_operand(const Operand& x, std::int64_t batch, std::int64_t token, int query_head,
                                              int channel) {
  if (x.view.data == nullptr || channel >= x.width) return x.beyond;
  const float value = load_as(
      x.dtype, x.view.data,
      batch * x.view.batch + token * x.view.token + query_head / x.heads_each * x.view.head + channel * x.channel_step);
  if (x.gate) return exp2f(base_2_gate(value));
  return x.scale * feature(x.map, value);
}

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
  bool backwards;
  // M at the beginning: element (r, c) of a [K,V] state; the extra channel from its own vector [K]; null: zeros.
  const float* start;
  const float* start_extra;
  bool rows_are_values;      // the state is read transposed
  bool start_in_first_head;  // of a group only (what all heads' gradients add up to)
  float* out;                // [tokens, H, rows]
  float* end;                // [N, H, rows, columns] or null
  float* checkpoints;        // [checkpoints, H, rows, columns] or null: M there; backwards before the token's own part
};

constexpr int kPassWarps = 8, kPassRows = 4, kPassTokens = 8;  // rows of a warp; tokens of a tile

template <int kColumns>
constexpr int pass_shared_bytes() {
  return kPassTokens * (3 * 32 * kColumns + 2 * kPassWarps * kPassRows) * 4;
}

// Grid: (N H, ceil(rows / 32)). Lane l of a warp holds columns l + 32 j, j < kColumns, of the warp's four rows.
template <int kColumns>
__global__ void __launch_bounds__(kPassWarps * 32)
    recurrent_pass_kernel(const __grid_constant__ Params p, const __grid_constant__ RecurrentPass pass) {
  constexpr int kWidth = 32 * kColumns, kBlockRows = kPassWarps * kPassRows;
  extern __shared__ float tile[];
  float *y_tile = tile, *z_tile = y_tile + kPassTokens * kWidth, *c_tile = z_tile + kPassTokens * kWidth;
  float *x_tile = c_tile + kPassTokens * kWidth, *a_tile = x_tile + kPassTokens * kBlockRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, query_heads = p.heads * p.group;
  const std::int64_t n = blockIdx.x / query_heads;
  const int query_head = static_cast<int>(blockIdx.x % query_heads), kv_head = query_head / p.group;
  const int first_row = blockIdx.y * kBlockRows;
  const Span span = span_of(p.sequences, n);
  const std::int64_t token_base = p.sequences.cu_seqlens ? 0 : span.batch * p.sequences.length;

  float m[kPassRows][kColumns];
  const bool starts = !pass.start_in_first_head || query_head % p.group == 0;
#pragma unroll
  for (int i = 0; i < kPassRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int r = first_row + warp * kPassRows + i, c = lane + 32 * j;
      const int key = pass.rows_are_values ? c : r, value = pass.rows_are_values ? r : c;
      float x = 0.0f;
      if (starts && r < pass.rows && c < pass.columns) {
        const std::int64_t row = (n * p.heads + kv_head) * p.key_dim + key;
        if (value < p.value_dim) {
          if (pass.start) x = pass.start[row * p.value_dim + value];
        } else if (pass.start_extra) {
          x = pass.start_extra[row];
        }
      }
      m[i][j] = x;
    }
  }

  auto store = [&](float* matrices, std::int64_t number) {
#pragma unroll
    for (int i = 0; i < kPassRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int r = first_row + warp * kPassRows + i, c = lane + 32 * j;
        if (r < pass.rows && c < pass.columns) {
          matrices[((number * query_heads + query_head) * pass.rows + r) * pass.columns + c] = m[i][j];
        }
      }
    }
  };
  auto checkpoint = [&](std::int64_t t) {  // of the sequence
    if (pass.checkpoints == nullptr || ((t + 1) % kCheckpoint != 0 && t + 1 != span.length)) return;
    store(pass.checkpoints, checkpoint_begin(p.sequences, n) + t / kCheckpoint);
  };

  for (std::int64_t done = 0; done < span.length; done += kPassTokens) {
    const int tokens = static_cast<int>(min(static_cast<std::int64_t>(kPassTokens), span.length - done));
    auto token_of = [&](int t) { return span.begin + (pass.backwards ? span.length - 1 - done - t : done + t); };
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * kWidth; i += blockDim.x) {
      const int t = i / kWidth, c = i % kWidth;
      const bool inside = c < pass.columns;
      y_tile[i] = inside ? load_operand(pass.y, span.batch, token_of(t), query_head, c) : 0.0f;
      z_tile[i] = inside ? load_operand(pass.z, span.batch, token_of(t), query_head, c) : 0.0f;
      c_tile[i] = inside ? load_operand(pass.column_gate, span.batch, token_of(t), query_head, c) : 1.0f;
    }
    for (int i = threadIdx.x; i < tokens * kBlockRows; i += blockDim.x) {
      const int t = i / kBlockRows, r = first_row + i % kBlockRows;
      const bool inside = r < pass.rows;
      x_tile[i] = inside ? load_operand(pass.x, span.batch, token_of(t), query_head, r) : 0.0f;
      a_tile[i] = inside ? load_operand(pass.row_gate, span.batch, token_of(t), query_head, r) : 1.0f;
    }
    __syncthreads();
    for (int t = 0; t < tokens; ++t) {
      const float* x = x_tile + t * kBlockRows + warp * kPassRows;
      const float* a = a_tile + t * kBlockRows + warp * kPassRows;
      float sum[kPassRows] = {};
      if (pass.backwards) checkpoint(span.length - 1 - done - t);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int at = t * kWidth + lane + 32 * j;
        const float y = y_tile[at], z = z_tile[at], c = c_tile[at];
#pragma unroll
        for (int i = 0; i < kPassRows; ++i) {
          if (!pass.backwards) m[i][j] *= a[i] * c;
          m[i][j] = fmaf(x[i], y, m[i][j]);
          sum[i] = fmaf(m[i][j], z, sum[i]);
          if (pass.backwards) m[i][j] *= a[i] * c;
        }
      }
      if (!pass.backwards) checkpoint(done + t);
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
        for (int i = 0; i < kPassRows; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], distance);
      }
      const int r = first_row + warp * kPassRows + lane;
      if (lane < kPassRows && r < pass.rows) {
        const float mine = lane == 0 ? sum[0] : lane == 1 ? sum[1] : lane == 2 ? sum[2] : sum[3];
        pass.out[((token_base + token_of(t)) * query_heads + query_head) * pass.rows + r] = mine;
      }
    }
  }

  if (pass.end) store(pass.end, n);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

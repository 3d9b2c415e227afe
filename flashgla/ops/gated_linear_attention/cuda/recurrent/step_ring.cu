// One decoding token beside a ring: o = scale q^T h_t, where h_t is the state h before the ring's r inputs and this
// token's,
//
//     h_t = diag(d_0 ... d_r) h + sum_j diag(d_{j+1} ... d_r) k_j v_j^T,      d_j = exp(g_j) <= 1
//
// so that h is read, but written only when the ring is full. The sums over keys of q (d_{j+1} ... d_r) k_j are a score
// an input, and o = (q d_0 ... d_r)^T h + sum_j score_j v_j. Products of decays are products, from the newest input
// back: none is ever divided by another.
//
// A block walks over neighbouring slices of 128 value channels, so that it works out scores once for most of a head's.
#include <algorithm>

#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/recurrent/step.cuh"
#include "flashgla/ops/gated_linear_attention/ring.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

using ops::cuda::queue_kernel;

constexpr int kInputs = static_cast<int>(kRing);
constexpr int kSlice = 128;  // value channels of a block
constexpr int kRows = 16;    // of the state, that a thread has in flight
constexpr int kBlocks = 2;   // a multiprocessor

struct RingParams {
  float* inputs;                  // [B,G,kRing,2K+V]: k, log gate, v of each
  const std::int32_t* positions;  // [B]
};

// A block's shared memory, in floats: keys and gates [kRing][2K] and values [kRing][128] of the ring; q and decays by
// key channel; the warps' parts of q h, and of the scores.
struct Shared {
  int key_dim;
  int values = kInputs * 2 * key_dim, queries = values + kInputs * kSlice, decays = queries + key_dim;
  int parts = decays + key_dim, scores = parts + kWarps * kSlice, all = scores + kWarps * kInputs;
};

// Sums of x[0..15] over the lanes of a warp: that of x[lane / 2] in each lane.
__device__ __forceinline__ float sums_of_16(const float (&x)[16]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto halve = [&](float low, float high, int distance) {
    const bool upper = (lane & distance) != 0;
    return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
  };
  float eight[8], four[4], two[2];
#pragma unroll
  for (int i = 0; i < 8; ++i) eight[i] = halve(x[i], x[i + 8], 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = halve(eight[i], eight[i + 4], 8);
#pragma unroll
  for (int i = 0; i < 2; ++i) two[i] = halve(four[i], four[i + 2], 4);
  const float one = halve(two[0], two[1], 2);
  return one + __shfl_xor_sync(0xffffffffu, one, 1);
}

// What one token brings to a block: of a cell, a (batch element, head), and of a slice of value channels.
template <int kEach>  // key channels a thread
struct Token {
  Bits key[kEach], gate[kEach], query[kEach], projected, value;

  __device__ __forceinline__ void load_cell(const StepParams& p, unsigned cell) {
    const std::int64_t b = cell / p.heads;
    const int head = static_cast<int>(cell % p.heads);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int k = threadIdx.x + j * kWarps * 32;
      const bool there = k < p.key_dim;
      key[j] = Bits(p.dtype, p.k.data, b * p.k.batch + head * p.k.head + k, there);
      query[j] = Bits(p.dtype, p.q.data, b * p.q.batch + head * p.q.head + k, there);
      gate[j] = Bits(p.gate_dtype, p.g.data, b * p.g.batch + head * p.g.head + (p.gate == GateKind::key ? k : 0),
                     there && p.gated_keys() && !p.projects());
    }
    const int own = static_cast<int>(threadIdx.x) % 32;
    projected = Bits(p.dtype, p.g.data, b * p.g.batch + own, p.projects() && own < p.rank);
  }
  __device__ __forceinline__ void load_value(const StepParams& p, unsigned cell, unsigned slice) {
    const std::int64_t b = cell / p.heads;
    const int head = static_cast<int>(cell % p.heads), channel = static_cast<int>(slice) * kSlice + threadIdx.x;
    value = Bits(p.dtype, p.v.data, b * p.v.batch + head * p.v.head + channel,
                 threadIdx.x < kSlice && channel < p.value_dim);
  }
};

// Grid: at most kBlocks a multiprocessor. K, at most 256 kEach, and V are multiples of 4, query heads have keys of
// their own, the state is f32.
template <int kEach>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    ring_step_kernel(const __grid_constant__ StepParams p, const __grid_constant__ RingParams ring) {
  constexpr int kRound = kRows * kWarps;
  extern __shared__ float4 ring_shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int K = p.key_dim, V = p.value_dim, width = 2 * K + V;
  const Shared place{K};
  float* const keys = reinterpret_cast<float*>(ring_shared);
  float4* const values = reinterpret_cast<float4*>(keys + place.values);  // [kRing][32]
  float* const q_shared = keys + place.queries;
  float* const decays = keys + place.decays;
  float4* const parts = reinterpret_cast<float4*>(keys + place.parts);    // [kWarps][32]
  float4* const scores = reinterpret_cast<float4*>(keys + place.scores);  // [kRing][kWarps / 4], the newest input first
  const unsigned slices = (V + kSlice - 1) / kSlice;
  const auto first_of = [&](unsigned block) {
    return static_cast<unsigned>(std::uint64_t{p.units} * block / gridDim.x);
  };
  unsigned units = first_of(blockIdx.x + 1) - first_of(blockIdx.x);  // that are left, this one among them
  unsigned cell = first_of(blockIdx.x) / slices, slice = first_of(blockIdx.x) % slices;

  // This lane's channels of its rows, kWarps apart: the first one's place, and how far down they go.
  const auto channel_of = [&](unsigned slice) { return static_cast<int>(slice) * kSlice + lane * 4; };
  const auto place_of = [&](unsigned cell, unsigned slice) {
    return static_cast<float*>(p.h) + (static_cast<std::int64_t>(cell) * K + warp) * V + channel_of(slice);
  };
  const auto rows_of = [&](unsigned slice) { return channel_of(slice) < V ? K - warp : 0; };
  const std::int64_t down = static_cast<std::int64_t>(kWarps) * V;
  float4 rows[kRows];
  const auto load_rows = [&](const float* from, int left) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (u * kWarps < left) rows[u] = Four<float>::load(from + u * down);
    }
  };
  const auto inputs_of = [&](unsigned cell) { return ring.inputs + static_cast<std::int64_t>(cell) * kInputs * width; };
  // Copies `filled` inputs' part of a unit to shared memory; of the keys where the cell is a new one.
  const auto ask_for = [&](unsigned cell, unsigned slice, int filled, bool fresh) {
    const float* inputs = inputs_of(cell);
    const int channel = channel_of(slice);
    for (int row = warp; row < filled; row += kWarps) {
      const float* from = inputs + row * width;
      if (fresh) {
        for (int i = lane; i < K / 2; i += 32) {
          ptx::copy_async_16(ptx::shared_address(ring_shared + row * (K / 2) + i), from + 4 * i);
        }
      }
      ptx::copy_async_16(ptx::shared_address(values + row * 32 + lane), channel < V ? from + 2 * K + channel : from,
                         channel < V ? 16 : 0);
    }
    ptx::copy_async_commit();
  };
  const auto filled_of = [&](unsigned cell) { return ring.positions[cell / p.heads] % kInputs; };

  float* h = place_of(cell, slice);
  int left = rows_of(slice);
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (u * kWarps < left) ptx::prefetch_l2(h + u * down);
  }
  flashgla::cuda::release_next();
  flashgla::cuda::wait_for_previous();
  load_rows(h, left);
  int filled = filled_of(cell);
  Token<kEach> token;
  token.load_cell(p, cell);
  token.load_value(p, cell, slice);
  ask_for(cell, slice, filled, true);
  bool fresh = true;
  while (true) {
    const bool full = filled == kInputs - 1;  // with this token's: then the state is written
    const bool last = units == 1, next_fresh = !last && slice + 1 == slices;
    const unsigned next_cell = cell + next_fresh, next_slice = next_fresh ? 0 : slice + 1;
    const int next_filled = next_fresh ? filled_of(next_cell) : filled;
    float* const input = inputs_of(cell) + filled * width;  // this token's
    if (threadIdx.x < kSlice) {
      const int channel = static_cast<int>(slice) * kSlice + threadIdx.x;
      const float value = token.value.as_float(p.dtype);
      reinterpret_cast<float*>(values + filled * 32)[threadIdx.x] = value;
      if (!full && channel < V) input[2 * K + channel] = value;
    }
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (fresh) {
      const int head = static_cast<int>(cell % p.heads);
      float parts_of_scores[kInputs] = {};
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int c = threadIdx.x + j * kWarps * 32;
        float gate = p.gated_keys() ? token.gate[j].as_float(p.gate_dtype) : 0.0f;
        if (p.projects()) {
          GateRow<4> row;
          row.load(p, head, c);
          gate = row.log_gate(p, head, c, token.projected.as_float(p.dtype));
        }
        if (c >= K) continue;
        const float q = feature(p.feature_map, token.query[j].as_float(p.dtype));
        float key = feature(p.feature_map, token.key[j].as_float(p.dtype));
        if (slice == 0 && !full) {
          input[c] = key;
          input[K + c] = gate;
        }
        float product = 1.0f;
        float* own = keys + filled * 2 * K + c;
#pragma unroll
        for (int i = 0; i < kInputs; ++i, own -= 2 * K) {  // the newest first
          if (i <= filled) {
            if (i > 0) key = own[0], gate = own[K];
            key *= product;
            parts_of_scores[i] = fmaf(q, key, parts_of_scores[i]);
            if (full) own[0] = key;
            product *= exp2f(base_2_gate(gate));
          }
        }
        q_shared[c] = full ? q : q * product;
        decays[c] = product;
      }
      const float sum = sums_of_16(parts_of_scores);
      if (lane % 2 == 0) reinterpret_cast<float*>(scores)[lane / 2 * kWarps + warp] = sum;
      __syncthreads();
    }

    float4 sums = make_float4(0, 0, 0, 0);
    const auto add = [](float4& to, float a, float4 x) {
      to = make_float4(fmaf(a, x.x, to.x), fmaf(a, x.y, to.y), fmaf(a, x.z, to.z), fmaf(a, x.w, to.w));
    };
    if (!full) {
      for (int i = warp; i <= filled; i += kWarps) {
        const float4 low = scores[2 * i], high = scores[2 * i + 1];
        add(sums, low.x + low.y + low.z + low.w + high.x + high.y + high.z + high.w, values[(filled - i) * 32 + lane]);
      }
    }
    for (int first = 0;; first += kRound) {
      const float* q_row = q_shared + first + warp;
      if (full) {
        const float* a_row = decays + first + warp;
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (u * kWarps < left) {
            const float a = a_row[u * kWarps];
            rows[u] = make_float4(a * rows[u].x, a * rows[u].y, a * rows[u].z, a * rows[u].w);
          }
        }
#pragma unroll 1
        for (int row = 0; row < kInputs; ++row) {
          const float4 value = values[row * 32 + lane];
          const float* k_row = keys + row * 2 * K + first + warp;
#pragma unroll
          for (int u = 0; u < kRows; ++u) {
            if (u * kWarps < left) add(rows[u], k_row[u * kWarps], value);
          }
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (u * kWarps < left) Four<float>::store(h + u * down, rows[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (u * kWarps < left) add(sums, q_row[u * kWarps], rows[u]);
      }
      const bool done = first + kRound >= K;
      h = done ? place_of(next_cell, next_slice) : h + kRows * down;
      left = !done ? left - kRound : last ? 0 : rows_of(next_slice);
      load_rows(h, left);
      if (done) break;
    }
    if (!last) {
      if (next_fresh) token.load_cell(p, next_cell);
      token.load_value(p, next_cell, next_slice);
    }
    parts[warp * 32 + lane] = sums;
    __syncthreads();
    if (!last) ask_for(next_cell, next_slice, next_filled, next_fresh);
    if (const int channel = static_cast<int>(slice) * kSlice + static_cast<int>(threadIdx.x);
        threadIdx.x < kSlice && channel < V) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += reinterpret_cast<const float*>(parts)[w * kSlice + threadIdx.x];
      store_as(p.dtype, p.o.data,
               static_cast<std::int64_t>(cell / p.heads) * p.o.batch + (cell % p.heads) * p.o.head + channel,
               sum * p.scale);
    }
    if (last) break;
    --units;
    cell = next_cell;
    slice = next_slice;
    filled = next_filled;
    fresh = next_fresh;
  }
}

constexpr int kFoldRows = 8, kFoldThreads = 128;
constexpr int fold_groups(int key_dim) { return (key_dim + kFoldRows - 1) / kFoldRows; }

// to = h with the inputs of the ring folded in. A block has kFoldRows key rows of a cell; grid: B * G * K / kFoldRows.
__global__ void __launch_bounds__(kFoldThreads)
    fold_kernel(RingParams ring, const float* h, float* to, int heads, int key_dim, int value_dim) {
  __shared__ float keys[kInputs][kFoldRows], decays[kFoldRows];
  flashgla::cuda::wait_for_previous();
  const int groups = fold_groups(key_dim), first = static_cast<int>(blockIdx.x) % groups * kFoldRows;
  const std::int64_t cell = blockIdx.x / groups;
  const int filled = ring.positions[cell / heads] % kInputs, width = 2 * key_dim + value_dim;
  const float* inputs = ring.inputs + cell * kInputs * width;
  const int rows = min(kFoldRows, key_dim - first);
  if (static_cast<int>(threadIdx.x) < rows) {
    const int k = first + threadIdx.x;
    float product = 1.0f;
    for (int row = filled - 1; row >= 0; --row) {
      keys[row][threadIdx.x] = inputs[row * width + k] * product;
      product *= exp2f(base_2_gate(inputs[row * width + key_dim + k]));
    }
    decays[threadIdx.x] = product;
  }
  __syncthreads();
  const std::int64_t place = (cell * key_dim + first) * value_dim;
  for (int v = threadIdx.x; v < value_dim; v += kFoldThreads) {
    float sums[kFoldRows];
#pragma unroll
    for (int i = 0; i < kFoldRows; ++i) {
      if (i < rows) sums[i] = decays[i] * h[place + static_cast<std::int64_t>(i) * value_dim + v];
    }
    for (int row = 0; row < filled; ++row) {
      const float value = inputs[row * width + 2 * key_dim + v];
#pragma unroll
      for (int i = 0; i < kFoldRows; ++i) sums[i] = fmaf(keys[row][i], value, sums[i]);
    }
#pragma unroll
    for (int i = 0; i < kFoldRows; ++i) {
      if (i < rows) to[place + static_cast<std::int64_t>(i) * value_dim + v] = sums[i];
    }
  }
}

RingParams ring_params(const Ring& ring) { return {ring.inputs.as<float>(), ring.positions.as<std::int32_t>()}; }

}  // namespace

bool takes_ring(const Problem& p) {
  return p.group() == 1 && p.gate != GateKind::key_value && !p.normalize && p.key_dim % 4 == 0 &&
         p.value_dim % 4 == 0 && p.key_dim <= kMostKeys;
}

void step_with_ring(Context& context, const Problem& problem, const StepInputs& inputs, const Ring& ring,
                    const TensorView& h, const TensorView& o) {
  if (context.planning()) return;
  StepParams p = step_params(problem, inputs, h, {}, o);
  const auto slices = (problem.value_dim + kSlice - 1) / kSlice;
  p.units = static_cast<unsigned>(problem.batch * problem.heads * slices);
  const auto multiprocessors = static_cast<unsigned>(context.architecture().multiprocessors);
  const auto kernel = p.key_dim > kMostKeys / 2 ? ring_step_kernel<2> : ring_step_kernel<1>;
  queue_kernel(context, "gated_linear_attention step", kernel, std::min(p.units, kBlocks * multiprocessors),
               kWarps * 32, Shared{p.key_dim}.all * 4, p, ring_params(ring));
}

void fold(Context& context, const Ring& ring, const TensorView& h, const TensorView& to) {
  if (context.planning()) return;
  const int heads = static_cast<int>(h.size(1)), key_dim = static_cast<int>(h.size(2));
  queue_kernel(context, "gated_linear_attention fold", fold_kernel, h.size(0) * heads * fold_groups(key_dim),
               kFoldThreads, 0, ring_params(ring), static_cast<const float*>(h.data), static_cast<float*>(to.data),
               heads, key_dim, static_cast<int>(h.size(3)));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

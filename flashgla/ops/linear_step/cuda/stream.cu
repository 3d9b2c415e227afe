// Few rows, f32 in and out, weights in bf16 or f32: each weight is read from memory once, by 16-byte vectors of which
// the first are under way before the kernel ahead has ended (they are nobody's output), so that the memory does not
// rest between kernels of a token.
//
// A tile is eight rows of the weights (with swiglu four of the gate and the four of up that belong to them), two for
// each of a block's four warps. A block walks over tiles gridDim.x apart; lane l has vectors l, l + 32, ... of its
// warp's two rows, kStage of each row in one of two register buffers, and the next but one stage is asked for as soon
// as one is used, across the ends of tiles. u lies in shared memory in f32, in planes of four consecutive elements of
// each vector, so that lanes beside each other read without bank conflicts. Every block makes u once, from L2.
#include <cuda_bf16.h>

#include <algorithm>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/linear_step/implementations.h"

namespace flashgla::ops::linear_step {

namespace {

using flashgla::cuda::Begin;

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kStage = 4;        // vectors of a weight row in one buffer of a lane
constexpr int kMostRows = 4;     // of x
constexpr int kMostHeads = 256;  // of head_norm
constexpr int kBlocksEach = 3;   // of a multiprocessor: enough to keep memory busy, and room for the next kernel's

struct LayerParams {
  const void* weight;
  const void* bias;
  float* y;
  std::int64_t y_stride;
  int out;  // columns of y
  int bias_is_f32;
};

struct Params {
  const float* x;
  const float* gate;
  const void* norm_weight;
  std::int64_t x_stride, gate_stride;
  int in, head_size;  // head_size: channels normalised together
  int rows;           // of x in this pass
  int norm_is_f32;
  Prologue prologue;
  Epilogue epilogue;
  float epsilon, inverse_normalizer, clamp_min;
  LayerParams layers[2];
  int tiles_of_first;  // tiles of layers[0]; the rest are layers[1]'s
  int tiles;
};

__device__ __forceinline__ float load_parameter(const void* data, int is_f32, int i) {
  return is_f32 ? static_cast<const float*>(data)[i] : __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// A 16-byte vector of weights: 8 of bf16, or 4 of f32.
template <class W>
struct Vector;
template <>
struct Vector<__nv_bfloat16> {
  static constexpr int kElements = 8;
  static __device__ __forceinline__ void unpack(uint4 raw, float (&w)[8]) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = ptx::unpack_bf16(words[i]);
      w[2 * i] = pair.x;
      w[2 * i + 1] = pair.y;
    }
  }
};
template <>
struct Vector<float> {
  static constexpr int kElements = 4;
  static __device__ __forceinline__ void unpack(uint4 raw, float (&w)[4]) {
    w[0] = __uint_as_float(raw.x), w[1] = __uint_as_float(raw.y);
    w[2] = __uint_as_float(raw.z), w[3] = __uint_as_float(raw.w);
  }
};

// Where element i of a row of u lies: plane (i / 4) % planes, place i / (4 planes), in fours.
template <int kPlanes>
__device__ __forceinline__ int place_of(int i, int in) {
  const int four = i / 4;
  return (four % kPlanes * (in / (4 * kPlanes)) + four / kPlanes) * 4 + i % 4;
}

// A thread's part of the sum of squares of `size` elements, of `count` threads of which this is `rank`.
template <int count>
__device__ __forceinline__ float squares_of(const float* x, int size, int rank) {
  float squares = 0.0f;
  if (size % 4 == 0) {
#pragma unroll 4
    for (int i = 4 * rank; i < size; i += 4 * count) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(x + i));
      squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
  } else {
    for (int i = rank; i < size; i += count) {
      const float v = __ldcg(x + i);
      squares += v * v;
    }
  }
  return squares;
}

// u of all rows, in shared memory. x and gate are read past the first-level cache, which may hold what they were.
template <int kPlanes>
__device__ void make_inputs(const Params& p, float* u) {
  __shared__ float deviations[kMostRows * kMostHeads];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = p.in / p.head_size;
  const bool normalize = p.prologue != Prologue::none;
  if (normalize && heads == 1) {
    // All warps on each row; a row's sums and their order are the same however many rows there are.
    __shared__ float partial[kMostRows][kWarps];
    float squares[kMostRows];
#pragma unroll
    for (int n = 0; n < kMostRows; ++n) {
      squares[n] = n < p.rows ? squares_of<kThreads>(p.x + n * p.x_stride, p.in, static_cast<int>(threadIdx.x)) : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kMostRows; ++n) {
      const float sum = warp_sum(squares[n]);
      if (lane == 0) partial[n][warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x < kMostRows) {
      const float* parts = partial[threadIdx.x];
      const float total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
      deviations[threadIdx.x] = rsqrtf(total / static_cast<float>(p.in) + p.epsilon);
    }
  } else if (normalize) {
    for (int unit = warp; unit < p.rows * heads; unit += kWarps) {
      const float* x = p.x + unit / heads * p.x_stride + unit % heads * p.head_size;
      const float squares = warp_sum(squares_of<32>(x, p.head_size, lane));
      if (lane == 0) deviations[unit] = rsqrtf(squares / static_cast<float>(p.head_size) + p.epsilon);
    }
  }
  if (normalize) __syncthreads();
  const int fours = p.in / 4;
  for (int item = threadIdx.x; item < p.rows * fours; item += kThreads) {
    const int n = item / fours, i = 4 * (item - n * fours);
    const float4 four = __ldcg(reinterpret_cast<const float4*>(p.x + n * p.x_stride + i));
    float v[4] = {four.x, four.y, four.z, four.w};
    if (normalize) {
      float gate[4];
      if (p.gate) {
        const float4 raw = __ldcg(reinterpret_cast<const float4*>(p.gate + n * p.gate_stride + i));
        gate[0] = raw.x, gate[1] = raw.y, gate[2] = raw.z, gate[3] = raw.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int head = heads == 1 ? 0 : (i + j) / p.head_size;
        v[j] *= deviations[n * heads + head];
        if (p.norm_weight) v[j] *= load_parameter(p.norm_weight, p.norm_is_f32, i + j - head * p.head_size);
        if (p.gate) v[j] *= gate[j] / (1.0f + __expf(-gate[j]));
      }
    }
    *reinterpret_cast<float4*>(u + n * p.in + place_of<kPlanes>(i, p.in)) = make_float4(v[0], v[1], v[2], v[3]);
  }
  __syncthreads();
}

__device__ __forceinline__ float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(__expf(-fabsf(x))); }

// The two rows of the weights that a warp has of a tile: o and o + 1, or with swiglu o of the gate and o of up.
struct RowsOfTile {
  __device__ __forceinline__ RowsOfTile(const Params& p, int tile, int warp)
      : layer(&p.layers[tile >= p.tiles_of_first ? 1 : 0]) {
    const int place = (tile >= p.tiles_of_first ? tile - p.tiles_of_first : tile) * kWarps + warp;
    const bool paired = p.epilogue == Epilogue::swiglu;
    first = paired ? place : 2 * place;
    other = paired ? first + layer->out : first + 1;
    wanted[0] = tile < p.tiles && first < layer->out;
    wanted[1] = wanted[0] && (paired || other < layer->out);
  }
  const LayerParams* layer;
  int first, other;
  bool wanted[2];
};

template <class W, int kRows>
__global__ void __launch_bounds__(kThreads) stream_kernel(const __grid_constant__ Params p) {
  extern __shared__ float4 shared[];
  float* u = reinterpret_cast<float*>(shared);
  using V = Vector<W>;
  constexpr int kPlanes = V::kElements / 4;
  constexpr int kStep = 32 * kStage;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int vectors = p.in / V::kElements;
  const int stages = (vectors + kStep - 1) / kStep;  // of a tile

  uint4 buffers[2][2][kStage];  // [buffer][row][vector]
  const auto load = [&](uint4(&buffer)[2][kStage], int tile, int stage) {
    const RowsOfTile rows(p, tile, warp);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t row = r == 0 ? rows.first : rows.other;
      const auto* weights = reinterpret_cast<const uint4*>(static_cast<const W*>(rows.layer->weight) + row * p.in);
#pragma unroll
      for (int s = 0; s < kStage; ++s) {
        const int at = stage * kStep + 32 * s + lane;
        buffer[r][s] = at < vectors && rows.wanted[r] ? __ldcs(weights + at) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  // The stage after (tile, stage) in the order of this block's work.
  const auto advance = [&](int& tile, int& stage) {
    if (++stage == stages) stage = 0, tile += static_cast<int>(gridDim.x);
  };
  int next_tile = static_cast<int>(blockIdx.x), next_stage = 0;
  load(buffers[0], next_tile, next_stage);
  advance(next_tile, next_stage);
  load(buffers[1], next_tile, next_stage);
  advance(next_tile, next_stage);

  flashgla::cuda::release_next();
  flashgla::cuda::wait_for_previous();
  make_inputs<kPlanes>(p, u);

  float sums[2][kRows] = {};
  const auto add_products = [&](const uint4(&buffer)[2][kStage], int stage) {
#pragma unroll
    for (int s = 0; s < kStage; ++s) {
      const int at = stage * kStep + 32 * s + lane;
      if (at >= vectors) break;
      float w[2][V::kElements];
      V::unpack(buffer[0][s], w[0]);
      V::unpack(buffer[1][s], w[1]);
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) {
          const float4 four = *reinterpret_cast<const float4*>(u + n * p.in + 4 * (plane * vectors + at));
          const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sums[0][n] = fmaf(v[j], w[0][4 * plane + j], sums[0][n]);
            sums[1][n] = fmaf(v[j], w[1][4 * plane + j], sums[1][n]);
          }
        }
      }
    }
  };
  const auto finish = [&](int tile) {
    const RowsOfTile rows(p, tile, warp);
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      float a[2] = {warp_sum(sums[0][n]), warp_sum(sums[1][n])};
      sums[0][n] = sums[1][n] = 0.0f;
      if (lane != 0 || n >= p.rows) continue;
      float* y = rows.layer->y + n * rows.layer->y_stride;
      if (p.epilogue == Epilogue::swiglu) {
        if (rows.wanted[0]) y[rows.first] = a[0] / (1.0f + __expf(-a[0])) * a[1];
        continue;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!rows.wanted[r]) continue;
        const int o = rows.first + r;
        if (rows.layer->bias) a[r] += load_parameter(rows.layer->bias, rows.layer->bias_is_f32, o);
        switch (p.epilogue) {
          case Epilogue::add:
            y[o] = __ldcg(y + o) + a[r];
            break;
          case Epilogue::log_sigmoid:
            y[o] = fmaxf(log_sigmoid(a[r]) * p.inverse_normalizer, p.clamp_min);
            break;
          default:
            y[o] = a[r];
        }
      }
    }
  };
  // Takes one stage from a buffer, refills it, and ends the tile after its last stage.
  int tile = static_cast<int>(blockIdx.x), stage = 0;
  const auto take = [&](uint4(&buffer)[2][kStage]) {
    add_products(buffer, stage);
    load(buffer, next_tile, next_stage);
    advance(next_tile, next_stage);
    if (stage + 1 == stages) finish(tile);
    advance(tile, stage);
  };
  while (tile < p.tiles) {
    take(buffers[0]);
    if (tile >= p.tiles) break;
    take(buffers[1]);
  }
}

template <class W, int kRows>
void launch(Context& context, const Params& p) {
  const bool beside = context.architecture().cuda_capability >= 90;
  const int blocks = std::min(p.tiles, kBlocksEach * context.architecture().multiprocessors);
  flashgla::cuda::launch("linear_step", stream_kernel<W, kRows>, dim3(static_cast<unsigned>(blocks)), kThreads,
                         kRows * p.in * static_cast<int>(sizeof(float)), static_cast<cudaStream_t>(context.stream()),
                         beside ? Begin::beside_previous : Begin::after_previous, p);
}

template <class W>
void launch_rows(Context& context, const Params& p) {
  p.rows == 1 ? launch<W, 1>(context, p) : p.rows == 2 ? launch<W, 2>(context, p) : launch<W, kMostRows>(context, p);
}

void run_stream(Context& context, const Inputs& inputs, std::span<const Layer> layers, const Options& options) {
  if (context.planning()) return;
  const TensorView& x = inputs.x;
  Params p{};
  p.in = static_cast<int>(x.size(1));
  p.head_size = inputs.prologue == Prologue::head_norm ? static_cast<int>(inputs.head_size) : p.in;
  p.x_stride = x.stride[0];
  p.gate_stride = inputs.gate ? inputs.gate.stride[0] : 0;
  p.norm_weight = inputs.norm_weight.data;
  p.norm_is_f32 = inputs.norm_weight.dtype == DType::f32;
  p.prologue = inputs.prologue;
  p.epilogue = options.epilogue;
  p.epsilon = static_cast<float>(inputs.epsilon);
  p.inverse_normalizer = static_cast<float>(1.0 / options.normalizer);
  p.clamp_min = static_cast<float>(options.clamp_min);
  const bool bf16 = layers[0].weight.dtype == DType::bf16;
  const int rows_of_tile = options.epilogue == Epilogue::swiglu ? kWarps : 2 * kWarps;
  p.rows = static_cast<int>(x.size(0));
  p.x = x.as<float>();
  p.gate = inputs.gate ? inputs.gate.as<float>() : nullptr;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    LayerParams& to = p.layers[i];
    to.weight = layers[i].weight.data;
    to.bias = layers[i].bias.data;
    to.bias_is_f32 = layers[i].bias.dtype == DType::f32;
    to.y_stride = layers[i].y.stride[0];
    to.y = layers[i].y.as<float>();
    to.out = static_cast<int>(layers[i].y.size(1));
    p.tiles += (to.out + rows_of_tile - 1) / rows_of_tile;
    if (i == 0) p.tiles_of_first = p.tiles;
  }
  if (p.tiles == 0) return;
  bf16 ? launch_rows<__nv_bfloat16>(context, p) : launch_rows<float>(context, p);
}

Support supports(const Problem& problem, const Architecture& architecture) {
  if (problem.dtype != DType::f32) return Support::no("f32 activations only");
  if (!problem.aligned) return Support::no("rows of whole 16-byte vectors only");
  if (problem.rows > kMostRows) return Support::no("at most 4 rows: more are faster as a matrix product");
  const std::int64_t shared = (problem.rows > 2 ? kMostRows : problem.rows) * problem.in * 4;
  if (shared + 8192 > architecture.shared_memory) return Support::no("the rows do not fit into shared memory");
  if (problem.heads > kMostHeads) return Support::no("at most 256 heads");
  return Support::yes();
}

}  // namespace

const Implementation kStreamCuda{"cuda_stream", Device::Kind::cuda, supports, run_stream};

}  // namespace flashgla::ops::linear_step

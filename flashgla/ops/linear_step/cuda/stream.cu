// Few rows, f32 in and out, weights in bf16 or f32: each weight is read from memory once, by 16-byte vectors that are
// under way before the kernel ahead has ended (they are nobody's output), so that the memory does not rest between
// kernels of a token.
//
// A block of four warps has eight rows of the weights (with swiglu four of the gate and the four of up that belong to
// them), a warp two of them at a time over all of I: lane l has vectors l, l + 32, ... of a row, kStage of each row in
// one of two register buffers. u lies in shared memory in f32, in planes of four consecutive elements of each vector,
// so that lanes beside each other read without bank conflicts. Every block makes u by itself: a few kilobytes from L2.
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
constexpr int kMostRows = 4;     // of x in one pass over the weights
constexpr int kMostHeads = 256;  // of head_norm

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
  int blocks_of_first;  // blocks of layers[0]; the rest are layers[1]'s
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

// u of all rows, in shared memory. x and gate are read past the first-level cache, which may hold what they were.
template <int kPlanes>
__device__ void make_inputs(const Params& p, float* u) {
  __shared__ float deviations[kMostHeads];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int n = 0; n < p.rows; ++n, u += p.in) {
    const float* x = p.x + n * p.x_stride;
    if (p.prologue != Prologue::none) {
      const int heads = p.in / p.head_size;
      if (heads == 1) {  // all warps together
        __shared__ float partial[kWarps];
        float squares = 0.0f;
        for (int i = 4 * threadIdx.x; i < p.in; i += 4 * kThreads) {
          const float4 v = __ldcg(reinterpret_cast<const float4*>(x + i));
          squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        squares = warp_sum(squares);
        if (lane == 0) partial[warp] = squares;
        __syncthreads();
        if (threadIdx.x == 0) {
          const float total = (partial[0] + partial[1]) + (partial[2] + partial[3]);
          deviations[0] = rsqrtf(total / static_cast<float>(p.in) + p.epsilon);
        }
      } else {
        for (int head = warp; head < heads; head += kWarps) {
          float squares = 0.0f;
          for (int i = lane; i < p.head_size; i += 32) {
            const float v = __ldcg(x + head * p.head_size + i);
            squares += v * v;
          }
          squares = warp_sum(squares);
          if (lane == 0) deviations[head] = rsqrtf(squares / static_cast<float>(p.head_size) + p.epsilon);
        }
      }
      __syncthreads();
    }
    for (int i = 4 * threadIdx.x; i < p.in; i += 4 * kThreads) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(x + i));
      float v[4] = {four.x, four.y, four.z, four.w};
      if (p.prologue != Prologue::none) {
        float gate[4];
        if (p.gate) {
          const float4 raw = __ldcg(reinterpret_cast<const float4*>(p.gate + n * p.gate_stride + i));
          gate[0] = raw.x, gate[1] = raw.y, gate[2] = raw.z, gate[3] = raw.w;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int head = (i + j) / p.head_size;
          v[j] *= deviations[head];
          if (p.norm_weight) v[j] *= load_parameter(p.norm_weight, p.norm_is_f32, i + j - head * p.head_size);
          if (p.gate) v[j] *= gate[j] / (1.0f + __expf(-gate[j]));
        }
      }
      *reinterpret_cast<float4*>(u + place_of<kPlanes>(i, p.in)) = make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();  // deviations are the next row's from here on; after the last, u is whole
  }
}

__device__ __forceinline__ float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(__expf(-fabsf(x))); }

// Two rows of a layer's weights: o and o + 1, or with swiglu o of the gate and o of up.
template <class W, int kRows>
__global__ void __launch_bounds__(kThreads) stream_kernel(Params p) {
  extern __shared__ float4 shared[];
  float* u = reinterpret_cast<float*>(shared);
  using V = Vector<W>;
  constexpr int kPlanes = V::kElements / 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool second = static_cast<int>(blockIdx.x) >= p.blocks_of_first;
  const LayerParams& layer = p.layers[second];
  const int block = blockIdx.x - (second ? p.blocks_of_first : 0);
  const bool paired = p.epilogue == Epilogue::swiglu;
  const int first = paired ? block * kWarps + warp : 2 * (block * kWarps + warp);
  const int other = paired ? first + layer.out : first + 1;
  const bool wanted[2] = {first < layer.out, paired ? first < layer.out : other < layer.out};
  const int vectors = p.in / V::kElements;
  const uint4* weights[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = wanted[r] ? (r == 0 ? first : other) : 0;
    weights[r] =
        reinterpret_cast<const uint4*>(static_cast<const W*>(layer.weight) + static_cast<std::int64_t>(row) * p.in);
  }
  uint4 buffers[2][2][kStage];  // [buffer][row][vector]
  const auto load = [&](uint4(&buffer)[2][kStage], int from) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < kStage; ++s) {
        const int at = from + 32 * s + lane;
        buffer[r][s] = at < vectors && wanted[r] ? __ldcs(weights[r] + at) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  load(buffers[0], 0);
  load(buffers[1], 32 * kStage);

  flashgla::cuda::release_next();
  flashgla::cuda::wait_for_previous();
  make_inputs<kPlanes>(p, u);

  float sums[2][kRows] = {};
  const auto add_products = [&](const uint4(&buffer)[2][kStage], int from) {
#pragma unroll
    for (int s = 0; s < kStage; ++s) {
      const int at = from + 32 * s + lane;
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
  constexpr int kStep = 32 * kStage;
  for (int from = 0; from < vectors; from += 2 * kStep) {
    add_products(buffers[0], from);
    load(buffers[0], from + 2 * kStep);
    add_products(buffers[1], from + kStep);
    load(buffers[1], from + 3 * kStep);
  }

#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    float a[2] = {warp_sum(sums[0][n]), warp_sum(sums[1][n])};
    if (lane != 0 || n >= p.rows) continue;
    float* y = layer.y + n * layer.y_stride;
    if (paired) {
      if (wanted[0]) y[first] = a[0] / (1.0f + __expf(-a[0])) * a[1];
      continue;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!wanted[r]) continue;
      const int o = first + r;
      if (layer.bias) a[r] += load_parameter(layer.bias, layer.bias_is_f32, o);
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
}

template <class W, int kRows>
void launch(Context& context, const Params& p, int blocks) {
  const bool beside = context.architecture().cuda_capability >= 90;
  flashgla::cuda::launch("linear_step", stream_kernel<W, kRows>, dim3(static_cast<unsigned>(blocks)), kThreads,
                         kRows * p.in * static_cast<int>(sizeof(float)), static_cast<cudaStream_t>(context.stream()),
                         beside ? Begin::beside_previous : Begin::after_previous, p);
}

template <class W>
void launch_rows(Context& context, const Params& p, int blocks) {
  p.rows == 1   ? launch<W, 1>(context, p, blocks)
  : p.rows == 2 ? launch<W, 2>(context, p, blocks)
                : launch<W, kMostRows>(context, p, blocks);
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
  const int rows_of_block = options.epilogue == Epilogue::swiglu ? kWarps : 2 * kWarps;
  for (std::int64_t begin = 0; begin < x.size(0); begin += kMostRows) {
    p.rows = static_cast<int>(std::min<std::int64_t>(kMostRows, x.size(0) - begin));
    p.x = x.as<float>() + begin * p.x_stride;
    p.gate = inputs.gate ? inputs.gate.as<float>() + begin * p.gate_stride : nullptr;
    int blocks = 0;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      LayerParams& to = p.layers[i];
      to.weight = layers[i].weight.data;
      to.bias = layers[i].bias.data;
      to.bias_is_f32 = layers[i].bias.dtype == DType::f32;
      to.y_stride = layers[i].y.stride[0];
      to.y = layers[i].y.as<float>() + begin * to.y_stride;
      to.out = static_cast<int>(layers[i].y.size(1));
      blocks += (to.out + rows_of_block - 1) / rows_of_block;
      if (i == 0) p.blocks_of_first = blocks;
    }
    bf16 ? launch_rows<__nv_bfloat16>(context, p, blocks) : launch_rows<float>(context, p, blocks);
  }
}

Support supports(const Problem& problem, const Architecture& architecture) {
  if (problem.dtype != DType::f32) return Support::no("f32 activations only");
  if (!problem.aligned) return Support::no("rows of whole 16-byte vectors only");
  if (problem.rows > 2 * kMostRows) return Support::no("at most 8 rows: more are faster as a matrix product");
  const std::int64_t shared = (problem.rows > 2 ? kMostRows : problem.rows) * problem.in * 4;
  if (shared + 2048 > architecture.shared_memory) return Support::no("the rows do not fit into shared memory");
  if (problem.heads > kMostHeads) return Support::no("at most 256 heads");
  return Support::yes();
}

}  // namespace

const Implementation kStreamCuda{"cuda_stream", Device::Kind::cuda, supports, run_stream};

}  // namespace flashgla::ops::linear_step

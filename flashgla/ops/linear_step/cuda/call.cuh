// A call as kernels see it, and what they share of its prologues and epilogues.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/linear_step/implementations.h"

namespace flashgla::ops::linear_step::cuda {

struct LayerParams {
  const void* weight;
  const void* bias;
  float* y;
  std::int64_t y_stride;
  int out;     // columns of y
  int turned;  // the first of these, heads that are turned
  int bias_is_f32;
};

struct Params {
  const float* x;
  const float* gate;
  const void* norm_weight;
  std::int64_t x_stride, gate_stride;
  int in, head_size;  // head_size: channels normalised together
  int rows;           // of x
  int norm_is_f32;
  Prologue prologue;
  Epilogue epilogue;
  float inverse_in, epsilon, inverse_normalizer, clamp_min;
  LayerParams layers[2];
  const std::int32_t* positions;  // of what is turned; null: zeros
  int half;                       // K/2 of its heads; 0: nothing is turned
  double log2_base;
};

// `turns`: the kernel turns heads itself.
inline Params params_of(const Inputs& inputs, std::span<const Layer> layers, const Options& options, bool turns) {
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
  p.inverse_in = 1.0f / static_cast<float>(p.in);
  p.epsilon = static_cast<float>(inputs.epsilon);
  p.inverse_normalizer = static_cast<float>(1.0 / options.normalizer);
  p.clamp_min = static_cast<float>(options.clamp_min);
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
    to.turned = turns ? static_cast<int>(layers[i].turned) : 0;
    if (to.turned > 0) p.half = static_cast<int>(options.rotary.head_size) / 2;
  }
  if (p.half > 0) {
    p.positions = options.rotary.positions ? options.rotary.positions.as<std::int32_t>() : nullptr;
    p.log2_base = std::log2(options.rotary.base);
  }
  return p;
}

__device__ __forceinline__ float load_parameter(const void* data, int is_f32, int i) {
  return is_f32 ? static_cast<const float*>(data)[i] : __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}

// x sigmoid(x); by a quotient of two ulp.
__device__ __forceinline__ float swish(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(__expf(-fabsf(x))); }

// A lane's part of the sum of squares of `size` elements. x is read past the first-level cache, here and below: that
// may hold what x was.
__device__ __forceinline__ float squares_of(const float* x, int size, int lane) {
  float squares = 0.0f;
  if (size % 4 == 0) {
#pragma unroll 4
    for (int i = 4 * lane; i < size; i += 128) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(x + i));
      squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
  } else {
    for (int i = lane; i < size; i += 32) {
      const float v = __ldcg(x + i);
      squares += v * v;
    }
  }
  return squares;
}

// The factor of each head of each row, to deviations [rows,heads]: a warp a head. Ends with a barrier.
template <int kWarps>
__device__ __forceinline__ void find_deviations(const Params& p, float* deviations) {
  const int heads = p.in / p.head_size;
  for (int unit = static_cast<int>(threadIdx.x) / 32; unit < p.rows * heads; unit += kWarps) {
    const float* x = p.x + unit / heads * p.x_stride + unit % heads * p.head_size;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float squares = flashgla::cuda::warp_sum(squares_of(x, p.head_size, lane));
    if (lane == 0) deviations[unit] = rsqrtf(squares / static_cast<float>(p.head_size) + p.epsilon);
  }
  __syncthreads();
}

// The factor of rms_norm, which multiplies a row's sums, from the warps' sums of squares [rows,kWarps]; else 1.
template <int kWarps>
__device__ __forceinline__ float factor_of(const Params& p, const float* squares, int row) {
  if (p.prologue != Prologue::rms_norm) return 1.0f;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += squares[row * kWarps + w];
  return rsqrtf(total * p.inverse_in + p.epsilon);
}

// How many turns a token is of channel `channel` of a head's first half. Whole turns go in f64.
__device__ __forceinline__ double turns_of_token(const Params& p, int channel) {
  constexpr double kInverseTurn = 0.15915494309189533577;  // 1 / (2 pi)
  const double share = static_cast<double>(channel) / static_cast<double>(p.half);
  return kInverseTurn * exp2(-p.log2_base * share);
}
// Cosine and sine at a position.
__device__ __forceinline__ float2 angle_at(int position, double turns_of_one) {
  const double turn = position * turns_of_one;
  float sine, cosine;
  sincospif(2.0f * static_cast<float>(turn - rint(turn)), &sine, &cosine);  // what is left is exact enough in f32
  return make_float2(cosine, sine);
}

}  // namespace flashgla::ops::linear_step::cuda

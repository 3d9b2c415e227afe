// Functions of one f32 that several operators' kernels share.
#pragma once

#include <cuda_runtime.h>

namespace flashgla::ops::cuda {

// 2^x to two units in the last place; 0 below 2^-126.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + e^-x): 0 and 1 at the limits, NaN of NaN. Four instructions; the rounding of x log2(e) makes the relative
// error 2^-24 |x| where x is far below zero.
__device__ __forceinline__ float sigmoid(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + power_of_two(-1.44269504f * x)));
  return y;
}

// d/dx of x sigmoid(x), given s = sigmoid(x).
__device__ __forceinline__ float silu_slope(float x, float s) { return s + x * s * (1.0f - s); }

// log(sigmoid(x)) = min(x, 0) - log(1 + e^-|x|): -inf and 0 at the limits, NaN of NaN.
__device__ __forceinline__ float log_sigmoid(float x) {
  return fminf(x, 0.0f) - log1pf(power_of_two(-1.44269504f * fabsf(x)));
}

}  // namespace flashgla::ops::cuda

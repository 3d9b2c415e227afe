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

// 1 / x to one ulp or two; subnormal numbers are zeros.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + e^-x): 0 and 1 at the limits, NaN of NaN. Four instructions; the rounding of x log2(e) makes the relative
// error 2^-24 |x| where x is far below zero.
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + power_of_two(-1.44269504f * x)); }

// d/dx of x sigmoid(x), given s = sigmoid(x).
__device__ __forceinline__ float silu_slope(float x, float s) { return s + x * s * (1.0f - s); }

// log(1 + e) for e in [0, 1] to 2e-7 of it, by a polynomial fitted to that range: half the instructions of log1pf.
__device__ __forceinline__ float log_of_one_and(float e) {
  float q = 0.0052326946f;
  q = fmaf(q, e, -0.02950524f);
  q = fmaf(q, e, 0.078225955f);
  q = fmaf(q, e, -0.13663246f);
  q = fmaf(q, e, 0.19106007f);
  q = fmaf(q, e, -0.24842982f);
  q = fmaf(q, e, 0.33319098f);
  q = fmaf(q, e, -0.49999493f);
  q = fmaf(q, e, 0.99999994f);
  return q * e;
}

// The same for any y >= 0: behind 1 the logarithm itself has no digits to lose.
__device__ __forceinline__ float log_of_one_and_more(float y) {
  return y <= 1.0f ? log_of_one_and(y) : __log2f(1.0f + y) * 0.69314718f;
}

// 1 - e^x for x <= 0 to 3e-7 of it: near 0 by the first terms of its series.
__device__ __forceinline__ float one_less_exp(float x) {
  float q = 1.98412698e-4f;  // 1 / 7!
  q = fmaf(q, x, 1.38888889e-3f);
  q = fmaf(q, x, 8.33333333e-3f);
  q = fmaf(q, x, 4.16666667e-2f);
  q = fmaf(q, x, 1.66666667e-1f);
  q = fmaf(q, x, 0.5f);
  q = fmaf(q, x, 1.0f);
  return x > -0.5f ? -x * q : 1.0f - power_of_two(1.44269504f * x);
}

// log(sigmoid(x)) = min(x, 0) - log(1 + e^-|x|): -inf and 0 at the limits, NaN of NaN.
__device__ __forceinline__ float log_sigmoid(float x) {
  return fminf(x, 0.0f) - log_of_one_and(power_of_two(-1.44269504f * fabsf(x)));
}

}  // namespace flashgla::ops::cuda

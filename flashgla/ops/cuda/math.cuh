// Functions of one f32 that several operators' kernels share; their errors are a few units in the last place.
#pragma once

#include <cuda_runtime.h>

namespace flashgla::ops::cuda {

// 1 / (1 + e^-x): 0 and 1 at the limits, NaN of NaN.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// d/dx of x sigmoid(x), given s = sigmoid(x).
__device__ __forceinline__ float silu_slope(float x, float s) { return s + x * s * (1.0f - s); }

// log(sigmoid(x)) = min(x, 0) - log(1 + e^-|x|): -inf and 0 at the limits, NaN of NaN.
__device__ __forceinline__ float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))); }

}  // namespace flashgla::ops::cuda

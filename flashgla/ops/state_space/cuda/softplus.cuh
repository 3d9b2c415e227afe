#pragma once

namespace flashgla::ops::state_space {

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

}  // namespace flashgla::ops::state_space

// The decoding step beside a ring: launches, and the kernel that folds a ring in.
#include <algorithm>

#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/recurrent/step_ring.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

using namespace one_token;
using ops::cuda::queue_kernel;

constexpr int kFoldRows = 8, kFoldThreads = 128;
constexpr int fold_groups(int key_dim) { return (key_dim + kFoldRows - 1) / kFoldRows; }

// A block has kFoldRows key rows of a cell; grid: B * G * K / kFoldRows.
__global__ void __launch_bounds__(kFoldThreads)
    fold_kernel(RingParams ring, const float* h, float* to, int heads, int key_dim, int value_dim) {
  constexpr int kInputs = static_cast<int>(kRing);
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
  const auto slices = (problem.value_dim + kRingSlice - 1) / kRingSlice;
  p.units = static_cast<unsigned>(problem.batch * problem.heads * slices);
  const auto multiprocessors = static_cast<unsigned>(context.architecture().multiprocessors);
  const auto kernel = p.key_dim > kMostKeys / 2 ? ring_step_kernel<2> : ring_step_kernel<1>;
  queue_kernel(context, "gated_linear_attention step", kernel, std::min(p.units, kRingBlocks * multiprocessors),
               kWarps * 32, RingShared{p.key_dim}.all * 4, p, ring_params(ring));
}

void fold(Context& context, const Ring& ring, const TensorView& h, const TensorView& to) {
  if (context.planning()) return;
  const int heads = static_cast<int>(h.size(1)), key_dim = static_cast<int>(h.size(2));
  queue_kernel(context, "gated_linear_attention fold", fold_kernel, h.size(0) * heads * fold_groups(key_dim),
               kFoldThreads, 0, ring_params(ring), static_cast<const float*>(h.data), static_cast<float*>(to.data),
               heads, key_dim, static_cast<int>(h.size(3)));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

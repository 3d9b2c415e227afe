// Conversions around products: f32 in three bf16 parts, and noise that timing multiplies.
#include <algorithm>

#include "flashgla/base/cuda/check.h"
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/matmul/cuda/kernels.h"

namespace flashgla::ops::matmul::cuda {

namespace {

using flashgla::cuda::Begin;

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = std::int64_t{1} << 20;

unsigned blocks_for(std::int64_t items) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((items + kThreads - 1) / kThreads, 1, kMostBlocks));
}

__global__ void __launch_bounds__(kThreads) noise_kernel(std::uint32_t* words, std::int64_t count) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    std::uint64_t x = (static_cast<std::uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    // Each half: any sign and mantissa, exponent of 1/4 to 2.
    const auto bits = static_cast<std::uint32_t>(x >> 16);
    words[i] = 0x3e803e80u + (bits & 0x81ff81ffu);
  }
}

// The leading 8 bits of the mantissa, by cutting the rest off.
__device__ __forceinline__ float cut(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* x, std::int64_t row_stride, std::int64_t column_stride, std::int64_t rows,
                 std::int64_t columns, __nv_bfloat16* high, __nv_bfloat16* middle, __nv_bfloat16* low) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * columns; i += stride) {
    const float value = x[i / columns * row_stride + i % columns * column_stride];
    float first = cut(value), second = 0.0f, third = 0.0f;
    if (isfinite(value)) {
      second = cut(value - first);
      third = value - first - second;
    } else if (isnan(value)) {
      first = __uint_as_float(0x7fc00000u);
    }
    high[i] = __float2bfloat16_rn(first);
    middle[i] = __float2bfloat16_rn(second);
    low[i] = __float2bfloat16_rn(third);
  }
}

}  // namespace

void fill_with_noise(Queue& queue, void* memory, std::size_t bytes) {
  const auto words = static_cast<std::int64_t>(bytes / 4);
  flashgla::cuda::launch("matmul: noise", noise_kernel, dim3(blocks_for(words)), kThreads, 0,
                         static_cast<cudaStream_t>(queue.stream()), Begin::after_previous,
                         static_cast<std::uint32_t*>(memory), words);
}

void split(Queue& queue, const TensorView& x, const TensorView& high, const TensorView& middle, const TensorView& low) {
  if (x.numel() == 0) return;
  auto part = [](const TensorView& view) { return reinterpret_cast<__nv_bfloat16*>(view.as<BFloat16>()); };
  flashgla::cuda::launch("matmul: split", split_kernel, dim3(blocks_for(x.numel())), kThreads, 0,
                         static_cast<cudaStream_t>(queue.stream()), Begin::after_previous, x.as<float>(), x.stride[0],
                         x.stride[1], x.size(0), x.size(1), part(high), part(middle), part(low));
}

}  // namespace flashgla::ops::matmul::cuda

#include "flashgla/base/cuda/check.h"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/base/error.h"
#include "flashgla/nn/cuda/normals.h"

namespace flashgla::nn::cuda {

namespace {

using flashgla::cuda::from_float;

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    draw_normals_kernel(random::Stream stream, double deviation, std::int64_t count, T* values) {
  const std::int64_t pair = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (2 * pair >= count) return;
  const random::Normals both = stream.normals(static_cast<std::uint64_t>(pair));
  values[2 * pair] = from_float<T>(static_cast<float>(deviation * both.first));
  if (2 * pair + 1 < count) values[2 * pair + 1] = from_float<T>(static_cast<float>(deviation * both.second));
}

template <class T>
void draw(const Context& context, const TensorView& values, const random::Stream& stream, double deviation) {
  const std::int64_t count = values.numel(), blocks = (count + 2 * kThreads - 1) / (2 * kThreads);
  if (blocks == 0) return;
  if (blocks > 0x7fffffff) throw Error("initial values: too many for one launch");
  draw_normals_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(context.stream())>>>(
      stream, deviation, count, static_cast<T*>(values.data));
  flashgla::cuda::check_launch("initial values");
}

}  // namespace

void draw_normals(const Context& context, const TensorView& values, const random::Stream& stream, double deviation) {
  (values.dtype == DType::f32 ? draw<float> : draw<__nv_bfloat16>)(context, values, stream, deviation);
}

}  // namespace flashgla::nn::cuda

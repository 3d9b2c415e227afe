// A thread has a channel: its column is read from the cache once more for each pass.
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/lower_bounds/column.h"
#include "flashgla/ops/lower_bounds/cuda/lower_bounds.h"

namespace flashgla::ops::lower_bounds::cuda {

namespace {

constexpr int kThreads = 128;

template <class T>
struct Reader {
  const T* w;
  std::int64_t channels;
  __device__ __forceinline__ float operator()(std::int64_t j) const {
    return flashgla::cuda::to_float(w[j * channels]);
  }
};

// bound: written. With dbound, dw is added to instead.
template <class T>
__global__ void __launch_bounds__(kThreads)
    bounds_kernel(const T* w, std::int64_t layers, std::int64_t channels, std::int64_t layer, float* bound,
                  const float* dbound, float* dw) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t d = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (d >= channels) return;
  const Reader<T> read{w + d, channels};
  const Column<float> column(read, layers, layer);
  if (bound) bound[d] = column.bound;
  if (!dbound) return;
  for (std::int64_t j = 0; j < layers; ++j) dw[j * channels + d] += dbound[d] * column.gradient(read(j), j, layer);
}

void run(Context& context, const TensorView& w, std::int64_t layer, float* bound, const float* dbound, float* dw) {
  const std::int64_t layers = w.size(0), channels = w.size(1), blocks = (channels + kThreads - 1) / kThreads;
  const auto queue = [&](auto zero) {
    using T = decltype(zero);
    ops::cuda::queue_kernel(context, "lower_bounds", bounds_kernel<T>, blocks, kThreads, 0,
                            static_cast<const T*>(w.data), layers, channels, layer, bound, dbound, dw);
  };
  if (w.dtype == DType::f32) return queue(float());
  if (w.dtype == DType::bf16) return queue(__nv_bfloat16());
  throw Error("lower_bounds", "w", std::string("has dtype ") + name_of(w.dtype), "f32 or bf16 on cuda");
}

}  // namespace

void forward(Context& context, const TensorView& w, std::int64_t layer, const TensorView& bound) {
  run(context, w, layer, bound.as<float>(), nullptr, nullptr);
}
void backward(Context& context, const TensorView& w, std::int64_t layer, const TensorView& dbound,
              const TensorView& dw) {
  run(context, w, layer, nullptr, dbound.as<float>(), dw.as<float>());
}

}  // namespace flashgla::ops::lower_bounds::cuda

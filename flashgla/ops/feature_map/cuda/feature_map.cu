// Rows that a team of lanes holds (held_rows.cuh), or else a warp a row, which it reads again from the cache for each
// feature.
#include "flashgla/ops/feature_map/cuda/held_rows.cuh"
#include "flashgla/ops/feature_map/implementations.h"
#include "flashgla/ops/feature_map/row.h"

namespace flashgla::ops::feature_map {

namespace {

using flashgla::cuda::from_float;
using flashgla::cuda::to_float;
using ops::cuda::Operand;

constexpr int kThreads = 256, kLanes = 32;

struct Warp {
  __device__ __forceinline__ int rank() const { return static_cast<int>(threadIdx.x % kLanes); }
  __device__ __forceinline__ int count() const { return kLanes; }
  __device__ __forceinline__ float sum(float x) const {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  }
  __device__ __forceinline__ float largest(float x) const {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    return x;
  }
};

__device__ __forceinline__ std::int64_t own_row() {
  return (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
}
template <class T>
struct Reader {
  const T* from;
  __device__ __forceinline__ float operator()(int i) const { return to_float(from[i]); }
};
template <class T>
struct Writer {
  T* to;
  __device__ __forceinline__ void operator()(int i, float value) const { to[i] = from_float<T>(value); }
};

template <class T, Map kMap>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Operand<T> x, Operand<T> y, std::int64_t rows, int channels, bool divide) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t row = own_row();
  if (row >= rows) return;  // whole warps
  forward_row<kMap>(Warp(), channels, divide, Reader<T>{x.at(row, 0)}, Writer<T>{y.at(row, 0)});
}

template <class T, Map kMap>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Operand<T> x, Operand<T> dy, Operand<T> dx, std::int64_t rows, int channels, bool divide) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t row = own_row();
  if (row >= rows) return;
  backward_row<kMap>(Warp(), channels, divide, Reader<T>{x.at(row, 0)}, Reader<T>{dy.at(row, 0)},
                     Writer<T>{dx.at(row, 0)});
}

// Queues kernels that take `operands`, x's first: which(map, held, divide) is the one for rows that a thread has `held`
// vectors of, which(map) the one for any rows.
template <class T, class Which, class... Operands>
void queue(Context& context, const Options& options, std::initializer_list<const TensorView*> tensors,
           const Which& which, const Operands&... operands) {
  const TensorView& x = **tensors.begin();
  const std::int64_t rows = rows_of(x.shape);
  const int channels = static_cast<int>(x.size(-1));
  constexpr int N = flashgla::cuda::kVectorOf<T>;
  const cuda::HeldGrid grid(rows, channels, N);
  const bool whole = channels % N == 0 && ops::cuda::are_aligned(tensors, N);
  with_map(options.map, [&](auto map) {
    const auto queue_held = [&](auto held) {
      constexpr int kTogether = decltype(map)::value == Map::dpfp ? 1 : cuda::rows_together(held);
      ops::cuda::queue_kernel(context, "feature_map",
                              options.divide ? which(map, held, std::true_type()) : which(map, held, std::false_type()),
                              grid.blocks(kTogether), cuda::HeldGrid::kThreads, 0, operands..., grid);
    };
    if (whole && grid.held() == 1) return queue_held(std::integral_constant<int, 1>());
    if constexpr (decltype(map)::value != Map::dpfp) {
      if (whole && grid.held() == 2) return queue_held(std::integral_constant<int, 2>());
      if (whole && grid.held() <= cuda::HeldGrid::kMost) return queue_held(std::integral_constant<int, 4>());
    }
    ops::cuda::queue_kernel(context, "feature_map", which(map), (rows * kLanes + kThreads - 1) / kThreads, kThreads, 0,
                            operands..., rows, channels, options.divide);
  });
}

template <class T>
struct Forward {
  template <class M>
  auto* operator()(M) const {
    return forward_kernel<T, M::value>;
  }
  template <class M, class Held, class Divide>
  auto* operator()(M, Held, Divide) const {
    if constexpr (M::value == Map::dpfp) {
      return cuda::dpfp_forward_kernel<T, Divide::value>;
    } else {
      return cuda::held_forward_kernel<T, M::value, Held::value, Divide::value>;
    }
  }
};

template <class T>
struct Backward {
  template <class M>
  auto* operator()(M) const {
    return backward_kernel<T, M::value>;
  }
  template <class M, class Held, class Divide>
  auto* operator()(M, Held, Divide) const {
    if constexpr (M::value == Map::dpfp) {
      return cuda::dpfp_backward_kernel<T, Divide::value>;
    } else {
      return cuda::held_backward_kernel<T, M::value, Held::value, Divide::value>;
    }
  }
};

template <class T>
void forward_of(Context& context, const TensorView& x, const TensorView& y, const Options& options) {
  queue<T>(context, options, {&x, &y}, Forward<T>(), Operand<T>(x), Operand<T>(y));
}
template <class T>
void backward_of(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx,
                 const Options& options) {
  queue<T>(context, options, {&x, &dy, &dx}, Backward<T>(), Operand<T>(x), Operand<T>(dy), Operand<T>(dx));
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    [](Context& context, const TensorView& x, const TensorView& y, const Options& options) {
      (x.dtype == DType::f32 ? forward_of<float> : forward_of<__nv_bfloat16>)(context, x, y, options);
    },
    [](Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx, const Options& options) {
      (x.dtype == DType::f32 ? backward_of<float> : backward_of<__nv_bfloat16>)(context, x, dy, dx, options);
    }};

}  // namespace flashgla::ops::feature_map

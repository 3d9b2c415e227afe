// One pass over memory; a thread updates four elements, for which it draws once. The same bits as on a CPU with FMA.
#include "flashgla/base/cuda/check.h"
#include "flashgla/ops/adamw/implementations.h"
#include "flashgla/ops/adamw/rounding.h"
#include "flashgla/ops/cuda/each_element.cuh"

namespace flashgla::ops::adamw {

namespace {

using ops::cuda::Vector;

__global__ void prepare_kernel(const double* sum_of_squares, const void* loss, bool wide_loss, StepScalars* scalars,
                               Settings settings) {
  flashgla::cuda::wait_for_previous();
  double value = 0.0;
  if (loss)
    value = wide_loss ? *static_cast<const double*>(loss) : static_cast<double>(*static_cast<const float*>(loss));
  *scalars = prepared(*scalars, *sum_of_squares, value, settings);
}

struct Pointers {
  void *parameter, *master, *first_moment, *second_moment;
  const float* gradient;
  const std::int64_t* boundaries;
  int segments;  // boundaries
  const StepScalars* scalars;
  std::int64_t count;
};

// How many boundaries are at or before an element.
__device__ __forceinline__ int segment_of(const Pointers& p, std::int64_t element) {
  int low = 0, high = p.segments;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (p.boundaries[middle] <= element) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

enum class Master { none, f32, split };

// N elements of everything, as they lie in memory. P: the parameter's type; M: the moments'.
template <int N, class P, class M, Master kMaster>
struct Elements {
  Vector<float, N> gradient, master32;
  Vector<P, N> parameter;
  Vector<M, N> first_moment, second_moment;
  Vector<__nv_bfloat16, N> low;  // 16 bits each, not numbers

  __device__ __forceinline__ void load(const Pointers& p, std::int64_t at) {
    gradient = Vector<float, N>::load(p.gradient + at);
    first_moment = Vector<M, N>::load(static_cast<const M*>(p.first_moment) + at);
    second_moment = Vector<M, N>::load(static_cast<const M*>(p.second_moment) + at);
    if constexpr (kMaster != Master::f32) parameter = Vector<P, N>::load(static_cast<const P*>(p.parameter) + at);
    if constexpr (kMaster == Master::f32) {
      master32 = Vector<float, N>::load(static_cast<const float*>(p.master) + at);
    }
    if constexpr (kMaster == Master::split) {
      low = Vector<__nv_bfloat16, N>::load(static_cast<const __nv_bfloat16*>(p.master) + at);
    }
  }

  __device__ __forceinline__ float value(int i) const {
    if constexpr (kMaster == Master::none) return parameter[i];
    if constexpr (kMaster == Master::f32) return master32[i];
    return join(static_cast<std::uint16_t>(__float_as_uint(parameter[i]) >> 16),
                static_cast<std::uint16_t>(__float_as_uint(low[i]) >> 16));
  }
};

// N numbers of 16 bits as a vector of them.
template <int N>
__device__ __forceinline__ Vector<__nv_bfloat16, N> packed(const std::uint16_t (&halves)[N]) {
  Vector<__nv_bfloat16, N> result;
  if constexpr (N == 1) {
    result.words[0] = halves[0];
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      result.words[i] = halves[2 * i] | static_cast<std::uint32_t>(halves[2 * i + 1]) << 16;
    }
  }
  return result;
}

constexpr int kThreads = 256;

template <int N, class P, class M, Master kMaster>
__device__ __forceinline__ void update(const Pointers& p, const StepScalars& s, const Settings& settings,
                                       std::int64_t at) {
  Elements<N, P, M, kMaster> in;
  in.load(p, at);
  int segment = segment_of(p, at);
  const float beta1 = static_cast<float>(settings.beta1), beta2 = static_cast<float>(settings.beta2);
  const float factor = static_cast<float>(s.gradient_factor), rate = static_cast<float>(s.rate);
  const float floor = static_cast<float>(s.floor);
  const float keep = static_cast<float>(1.0 - s.learning_rate * settings.weight_decay);
  float values[N], first_moments[N], second_moments[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i > 0) {
      while (segment < p.segments && p.boundaries[segment] <= at + i) ++segment;
    }
    const float g = __fmul_rn(in.gradient[i], factor), squared = __fmul_rn(g, g);
    first_moments[i] = __fmaf_rn(beta1, __fsub_rn(in.first_moment[i], g), g);  // beta1 m + (1 - beta1) g
    second_moments[i] = __fmaf_rn(beta2, __fsub_rn(in.second_moment[i], squared), squared);
    const float direction =
        __fdiv_rn(__fmul_rn(rate, first_moments[i]), __fadd_rn(__fsqrt_rn(second_moments[i]), floor));
    values[i] = __fmaf_rn(segment % 2 == 0 ? keep : 1.0f, in.value(i), -direction);
  }
  if constexpr (kMaster == Master::none) {
    Vector<P, N>::of(values).store(static_cast<P*>(p.parameter) + at);
  } else {
    std::uint16_t high[N], low[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const SplitFloat parts = split(values[i]);
      high[i] = parts.high;
      low[i] = parts.low;
    }
    packed<N>(high).store(static_cast<__nv_bfloat16*>(p.parameter) + at);
    if constexpr (kMaster == Master::f32) Vector<float, N>::of(values).store(static_cast<float*>(p.master) + at);
    if constexpr (kMaster == Master::split) packed<N>(low).store(static_cast<__nv_bfloat16*>(p.master) + at);
  }
  if constexpr (sizeof(M) == 2) {
    const random::Words random =
        rounding_bits(settings.seed, static_cast<std::uint64_t>(s.updates), static_cast<std::uint64_t>(at) / 4);
    std::uint16_t m[N], v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const std::uint32_t bits = random.part(N == 4 ? i : static_cast<int>(at % 4));
      m[i] = round_stochastically(first_moments[i], bits);
      v[i] = round_stochastically(second_moments[i], bits >> 16);
    }
    packed<N>(m).store(static_cast<__nv_bfloat16*>(p.first_moment) + at);
    packed<N>(v).store(static_cast<__nv_bfloat16*>(p.second_moment) + at);
  } else {
    Vector<M, N>::of(first_moments).store(static_cast<M*>(p.first_moment) + at);
    Vector<M, N>::of(second_moments).store(static_cast<M*>(p.second_moment) + at);
  }
}

template <int N, class P, class M, Master kMaster>
__global__ void __launch_bounds__(kThreads) step_kernel(Pointers p, Settings settings) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  const StepScalars s = *p.scalars;
  if (s.made == 0.0) return;
  if (at + N <= p.count) return update<N, P, M, kMaster>(p, s, settings, at);
  for (std::int64_t i = at; i < p.count; ++i) update<1, P, M, kMaster>(p, s, settings, i);
}

template <class P, class M, Master kMaster>
void step_of(Context& context, const Tensors& tensors, const Settings& settings) {
  const Pointers pointers{tensors.parameter.data,
                          tensors.master.data,
                          tensors.first_moment.data,
                          tensors.second_moment.data,
                          tensors.gradient.as<float>(),
                          tensors.boundaries ? tensors.boundaries.as<std::int64_t>() : nullptr,
                          tensors.boundaries ? static_cast<int>(tensors.boundaries.numel()) : 0,
                          reinterpret_cast<const StepScalars*>(tensors.scalars.data),
                          tensors.parameter.numel()};
  // All are one row.
  auto starts_aligned = [](const TensorView& view) {
    return reinterpret_cast<std::uintptr_t>(view.data) % (4 * size_of(view.dtype)) == 0;
  };
  const bool aligned = starts_aligned(tensors.parameter) && starts_aligned(tensors.master) &&
                       starts_aligned(tensors.gradient) && starts_aligned(tensors.first_moment) &&
                       starts_aligned(tensors.second_moment);
  const int each = aligned ? 4 : 1;
  const std::int64_t blocks = (pointers.count + std::int64_t{kThreads} * each - 1) / (std::int64_t{kThreads} * each);
  ops::cuda::queue_kernel(context, "adamw", aligned ? step_kernel<4, P, M, kMaster> : step_kernel<1, P, M, kMaster>,
                          blocks, kThreads, 0, pointers, settings);
}

template <class M>
void step_of_moments(Context& context, const Tensors& tensors, const Settings& settings) {
  const auto run = !tensors.master                      ? step_of<float, M, Master::none>
                   : tensors.master.dtype == DType::f32 ? step_of<__nv_bfloat16, M, Master::f32>
                                                        : step_of<__nv_bfloat16, M, Master::split>;
  run(context, tensors, settings);
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    [](Context& context, const TensorView& sum_of_squares, const TensorView& loss, const TensorView& scalars,
       const Settings& settings) {
      ops::cuda::queue_kernel(context, "adamw", prepare_kernel, 1, 1, 0, sum_of_squares.as<double>(),
                              static_cast<const void*>(loss.data), loss.dtype == DType::f64,
                              reinterpret_cast<StepScalars*>(scalars.data), settings);
    },
    [](Context& context, const Tensors& tensors, const Settings& settings) {
      const bool half = tensors.first_moment.dtype == DType::bf16;
      (half ? step_of_moments<__nv_bfloat16> : step_of_moments<float>)(context, tensors, settings);
    }};

}  // namespace flashgla::ops::adamw

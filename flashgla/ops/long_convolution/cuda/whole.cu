#include <algorithm>

#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/long_convolution/cuda/halves.cuh"
#include "flashgla/ops/long_convolution/cuda/whole.cuh"
#include "flashgla/ops/long_convolution/cuda/whole.h"

namespace flashgla::ops::long_convolution {

namespace {

using bf16 = __nv_bfloat16;

constexpr const char* kName = "long_convolution";

template <int R>
std::int64_t blocks_at_once(const Context& context) {
  return std::int64_t{cuda::kWholeBlocks<R>} * context.architecture().multiprocessors;
}

template <int R, class... Parameters, class... Arguments>
void queue_blocks(const Context& context, void (*kernel)(Parameters...), const cuda::WholeCall& whole,
                  const Arguments&... arguments) {
  ops::cuda::queue_kernel(context, kName, kernel, std::min(blocks_at_once<R>(context), whole.call.channels),
                          cuda::kWholeThreads<R>, cuda::WholeMemory<R>::kBytes, whole, arguments...);
}

template <int R, bool kBack>
void queue_transforms(const Context& context, const cuda::WholeCall& whole, uint4* spectra) {
  if constexpr (R < 8 && kBack) {
    queue_blocks<R>(context, cuda::halves_gradients_kernel<R>, whole, spectra);
  } else if constexpr (R < 8) {
    queue_blocks<R>(context, cuda::halves_kernel<R>, whole);
  } else {
    const auto kernel = !kBack                  ? cuda::whole_kernel
                        : whole.call.lines == 1 ? cuda::whole_gradient_kernel
                                                : cuda::whole_gradients_kernel;
    queue_blocks<R>(context, kernel, whole, spectra);
  }
}

template <int R, bool kPlain, bool kBack>
void queue_kernels(const Context& context, const cuda::WholeCall& whole, uint4* spectra) {
  using cuda::UnitsOf;
  const auto queue_units = [&](auto of) {
    constexpr UnitsOf kOf = decltype(of)::value;
    const std::int64_t groups = whole.x.channels / cuda::kUnitChannels;
    ops::cuda::queue_kernel(context, kName, cuda::units_kernel<R, kPlain, kOf>, groups * cuda::unit_rows<R>(whole, kOf),
                            cuda::kUnitThreads, cuda::kUnitsMemory<kOf>, whole);
  };
  constexpr UnitsOf kTokens = kBack ? UnitsOf::pairs : UnitsOf::tokens;
  queue_units(std::integral_constant<UnitsOf, UnitsOf::filter>());
  queue_units(std::integral_constant<UnitsOf, kTokens>());
  queue_transforms<R, kBack>(context, whole, spectra);
  queue_units(std::integral_constant<UnitsOf, UnitsOf::results>());
  if constexpr (kBack) queue_units(std::integral_constant<UnitsOf, UnitsOf::sums>());
}

cuda::Units units_of(Context& context, std::int64_t lines, std::int64_t channels, std::int64_t points) {
  const auto take = [&](std::int64_t floats) {
    return context.scratch().tensor(Shape({lines, channels, floats}), DType::f32, "long_convolution: units").data;
  };
  return {static_cast<uint4*>(take(points / 2)), static_cast<float*>(take(points / 256)), channels};
}

template <int R>
void queue_shape(Context& context, const cuda::Call<bf16>& call, const WholeViews& views) {
  constexpr std::int64_t kAcross = cuda::kUnitChannels, kPoints = cuda::WholeShape<R>::kPoints;
  const bool backward = static_cast<bool>(views.dy);
  const std::int64_t channels = (call.channels + kAcross - 1) / kAcross * kAcross;
  const std::int64_t chunks = backward ? (call.lines + cuda::kMostSummed - 1) / cuda::kMostSummed : 0;
  const cuda::Units filter = units_of(context, std::max<std::int64_t>(chunks, 1), channels, kPoints),
                    x = units_of(context, call.lines, channels, kPoints),
                    gradients = backward ? units_of(context, call.lines, channels, kPoints) : cuda::Units();
  const auto floats = [&](const Shape& shape, const char* label) {
    return context.scratch().tensor(shape, DType::f32, label);
  };
  const std::int64_t waiting = R == 8     ? (backward && call.lines > 1 ? 3 : 1) * cuda::kWholeSpectrum
                               : backward ? cuda::kPartSpectrum<R>
                                          : 0;
  auto* spectra =
      static_cast<uint4*>(floats(Shape({blocks_at_once<R>(context), 4 * waiting}), "long_convolution: filters").data);
  auto* turns = static_cast<uint4*>(
      floats(Shape({R < 8 ? cuda::WholeShape<R>::kTiles : 0, 4 * cuda::TileTurns::kOfTile}), "long_convolution: turns")
          .data);
  auto* done = static_cast<int*>(floats(Shape({channels / kAcross}), "long_convolution: done").data);
  const Shape sums({backward ? call.lines * cuda::WholeShape<R>::kTiles : 0, call.channels});
  const TensorView products = floats(sums, "long_convolution: sums");
  if (!context.planning()) {
    const TensorView &from = backward ? views.dy : views.x, &to = backward ? views.dx : views.y;
    const cuda::WholeCall whole{call,
                                ops::cuda::Lines<bf16>(from),
                                ops::cuda::Lines<bf16>(to),
                                filter,
                                x,
                                gradients,
                                static_cast<int>(chunks),
                                views.skip.data,
                                views.skip.dtype == DType::f32,
                                views.dfilter,
                                backward ? views.dskip.as<float>() : nullptr,
                                products.as<float>(),
                                turns,
                                done};
    const auto aligned = [](const float* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 == 0; };
    const bool plain = call.channels % 8 == 0 && call.positions == nullptr && aligned(call.filter) &&
                       aligned(views.dfilter) && ops::cuda::are_aligned({&views.x, &from, &to}, 8);
    const auto queue = [&](auto back) {
      constexpr bool kBack = decltype(back)::value;
      plain ? queue_kernels<R, true, kBack>(context, whole, spectra)
            : queue_kernels<R, false, kBack>(context, whole, spectra);
    };
    backward ? queue(std::true_type()) : queue(std::false_type());
  }
}

}  // namespace

void queue_whole(Context& context, const cuda::Call<bf16>& call, std::int64_t longest, const WholeViews& views) {
  const ArenaScope scope(context.scratch());
  if (longest <= 4096) return queue_shape<1>(context, call, views);
  if (longest <= 8192) return queue_shape<2>(context, call, views);
  if (longest <= 16384) return queue_shape<4>(context, call, views);
  queue_shape<8>(context, call, views);
}

}  // namespace flashgla::ops::long_convolution

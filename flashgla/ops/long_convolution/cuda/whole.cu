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
  if (!whole.kept) {
    queue_units(std::integral_constant<UnitsOf, UnitsOf::filter>());
    queue_units(std::integral_constant<UnitsOf, UnitsOf::tokens>());
  }
  if constexpr (kBack) queue_units(std::integral_constant<UnitsOf, UnitsOf::gradients>());
  queue_transforms<R, kBack>(context, whole, spectra);
  queue_units(std::integral_constant<UnitsOf, UnitsOf::results>());
  if constexpr (kBack) queue_units(std::integral_constant<UnitsOf, UnitsOf::sums>());
}

// Sizes of a call's units, of channels in whole groups.
template <int R>
struct Sizes {
  std::int64_t lines, channels;

  Sizes(std::int64_t lines, std::int64_t channels)
      : lines(lines), channels((channels + cuda::kUnitChannels - 1) / cuda::kUnitChannels * cuda::kUnitChannels) {}
  std::int64_t of_units(std::int64_t count) const {
    return count * channels * (cuda::WholeShape<R>::kPoints / 2 + cuda::WholeShape<R>::kTiles);
  }
  // What backward needs again: the filter's units, x's and tiles' turns.
  std::int64_t kept() const { return of_units(1 + lines) + kTurns; }
  // Units of `count` lines there.
  cuda::Units units(float* memory, std::int64_t count) const {
    return {reinterpret_cast<uint4*>(memory), memory + count * channels * cuda::WholeShape<R>::kPoints / 2, channels};
  }
  static constexpr std::int64_t kTurns = R < 8 ? 4 * cuda::WholeShape<R>::kTiles * cuda::TileTurns::kOfTile : 0;
};

template <int R>
void queue_shape(Context& context, const cuda::Call<bf16>& call, const WholeViews& views) {
  const bool backward = static_cast<bool>(views.dy);
  const std::int64_t chunks = backward ? (call.lines + cuda::kMostSummed - 1) / cuda::kMostSummed : 0;
  const Sizes<R> sizes(call.lines, call.channels);
  const auto floats = [&](std::int64_t count, const char* label) {
    return context.scratch().tensor(Shape({count}), DType::f32, label).as<float>();
  };
  const auto units = [&](std::int64_t count) {
    return sizes.units(floats(sizes.of_units(count), "long_convolution: units"), count);
  };
  float* memory = views.kept ? static_cast<float*>(views.kept.data) : floats(sizes.kept(), "long_convolution: units");
  const cuda::Units filter = sizes.units(memory, 1), x = sizes.units(memory + sizes.of_units(1), call.lines),
                    gradients = backward ? units(call.lines) : cuda::Units(),
                    results = backward     ? gradients
                              : views.kept ? units(call.lines)
                                           : x,
                    sums = backward ? units(chunks) : cuda::Units();
  const std::int64_t waiting = R == 8     ? (backward && call.lines > 1 ? 3 : 1) * cuda::kWholeSpectrum
                               : backward ? cuda::kPartSpectrum<R>
                                          : 0;
  auto* spectra =
      reinterpret_cast<uint4*>(floats(blocks_at_once<R>(context) * 4 * waiting, "long_convolution: filters"));
  auto* done = reinterpret_cast<int*>(floats(sizes.channels / cuda::kUnitChannels, "long_convolution: done"));
  float* products = floats(backward ? cuda::kWholeWarps<R> * call.channels : 0, "long_convolution: sums");
  if (context.planning()) return;
  const TensorView &from = backward ? views.dy : views.x, &to = backward ? views.dx : views.y;
  const cuda::WholeCall whole{call,
                              ops::cuda::Lines<bf16>(from),
                              ops::cuda::Lines<bf16>(to),
                              filter,
                              x,
                              gradients,
                              results,
                              sums,
                              backward && views.kept,
                              static_cast<int>(chunks),
                              views.skip.data,
                              views.skip.dtype == DType::f32,
                              views.dfilter,
                              backward ? views.dskip.as<float>() : nullptr,
                              products,
                              reinterpret_cast<uint4*>(memory + sizes.of_units(1 + call.lines)),
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

// Calls run(R), of which transforms have room for `longest` tokens.
template <class Run>
auto with_shape(std::int64_t longest, const Run& run) {
  if (longest <= 4096) return run(std::integral_constant<int, 1>());
  if (longest <= 8192) return run(std::integral_constant<int, 2>());
  if (longest <= 16384) return run(std::integral_constant<int, 4>());
  return run(std::integral_constant<int, 8>());
}

}  // namespace

std::size_t kept_of_whole(std::int64_t lines, std::int64_t channels, std::int64_t longest) {
  return with_shape(longest, [&](auto shape) {
    return static_cast<std::size_t>(Sizes<decltype(shape)::value>(lines, channels).kept()) * sizeof(float);
  });
}

void queue_whole(Context& context, const cuda::Call<bf16>& call, std::int64_t longest, const WholeViews& views) {
  const ArenaScope scope(context.scratch());
  with_shape(longest, [&](auto shape) { queue_shape<decltype(shape)::value>(context, call, views); });
}

}  // namespace flashgla::ops::long_convolution

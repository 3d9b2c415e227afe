// One pass over memory each.
#include "flashgla/ops/hyena_filter/decay.h"
#include "flashgla/ops/hyena_filter/implementations.h"
#include "flashgla/ops/partial_sums.h"
#include "flashgla/ops/rows.h"
#include "flashgla/ops/weight_in_f32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/hyena_filter/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
#include "hwy/contrib/math/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::hyena_filter {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

template <class T>
void sine_of(Context& context, const TensorView& x_view, const float* frequency, const TensorView& y_view) {
  const simd::F32 d;
  const TypedRows<T> x(x_view), y(y_view);
  parallel_for_blocks(context, x.count(), rows_per_task(x.length()), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      simd::map([&](VF32 value, VF32 factor) { return hn::CallSin(d, hn::Mul(factor, value)); }, x.length(), y[row],
                x[row], frequency);
    }
  });
}

template <class T>
void sine_backward_of(Context& context, const TensorView& x_view, const float* frequency, const TensorView& dy_view,
                      const TensorView& dx_view, const PartialSums& sums) {
  const simd::F32 d;
  const TypedRows<T> x(x_view), dy(dy_view), dx(dx_view);
  parallel_for(context, sums.blocks(), [&](std::int64_t block) {
    float* total = sums[block];
    std::fill_n(total, x.length(), 0.0f);
    for (std::int64_t row = sums.begin(block); row < sums.end(block); ++row) {
      simd::map2(
          [&](VF32& to_x, VF32& sum, VF32 value, VF32 factor, VF32 gradient, VF32 before) {
            const VF32 slope = hn::Mul(gradient, hn::CallCos(d, hn::Mul(factor, value)));
            to_x = hn::Mul(slope, factor);
            sum = hn::MulAdd(slope, value, before);
          },
          x.length(), dx[row], total, x[row], frequency, dy[row], total);
    }
  });
}

// rates [D]: of the decay, by row.
template <class From, class To>
void window_of(Context& context, const TensorView& x_view, const float* rates, float shift, const TensorView& y_view) {
  const simd::F32 d;
  const TypedRows<From> x(x_view);
  const TypedRows<To> y(y_view);
  parallel_for_blocks(context, x.count(), rows_per_task(x.length()), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const VF32 back = hn::Set(d, -static_cast<float>(row)), always = hn::Set(d, shift);
      simd::map(
          [&](VF32 value, VF32 rate) { return hn::Mul(value, hn::Add(simd::exp(d, hn::Mul(back, rate)), always)); },
          x.length(), y[row], x[row], rates);
    }
  });
}

void Sine(Context& context, const TensorView& x, const float* frequency, const TensorView& y) {
  (x.dtype == DType::f32 ? sine_of<float> : sine_of<BFloat16>)(context, x, frequency, y);
}
void SineBackward(Context& context, const TensorView& x, const float* frequency, const TensorView& dy,
                  const TensorView& dx, const PartialSums& sums) {
  (x.dtype == DType::f32 ? sine_backward_of<float> : sine_backward_of<BFloat16>)(context, x, frequency, dy, dx, sums);
}
void WindowAll(Context& context, const TensorView& x, const float* rates, float shift, const TensorView& y) {
  if (x.dtype == DType::f32) {
    return (y.dtype == DType::f32 ? window_of<float, float> : window_of<float, BFloat16>)(context, x, rates, shift, y);
  }
  (y.dtype == DType::f32 ? window_of<BFloat16, float> : window_of<BFloat16, BFloat16>)(context, x, rates, shift, y);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::hyena_filter
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::hyena_filter {

HWY_EXPORT(Sine);
HWY_EXPORT(SineBackward);
HWY_EXPORT(WindowAll);

namespace {

void simd_sine_forward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& y) {
  const ArenaScope scope(context.scratch());
  const float* wide = weight_in_f32(context, frequency, frequency.size(0));
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Sine)(context, x, wide, y);
}

void simd_sine_backward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& dy,
                        const TensorView& dx, const TensorView& dfrequency) {
  const ArenaScope scope(context.scratch());
  const float* wide = weight_in_f32(context, frequency, frequency.size(0));
  const PartialSums sums(context, x.size(0), x.size(1), "hyena_filter: sums");
  if (context.planning()) return;
  HWY_DYNAMIC_DISPATCH(SineBackward)(context, x, wide, dy, dx, sums);
  sums.reduce(context, dfrequency.as<float>(), true);
}

void simd_window(Context& context, const TensorView& x, const Window& window, const TensorView& y) {
  const ArenaScope scope(context.scratch());
  const TensorView rates = context.scratch().tensor(Shape({x.size(1)}), DType::f32, "hyena_filter: rates");
  if (context.planning()) return;
  const Decays decays(x.size(1));
  for (std::int64_t d = 0; d < x.size(1); ++d) {
    rates.as<float>()[d] = static_cast<float>((decays.first + decays.step * static_cast<double>(d)) /
                                              static_cast<double>(window.length - 1));
  }
  HWY_DYNAMIC_DISPATCH(WindowAll)(context, x, rates.as<float>(), static_cast<float>(window.shift), y);
}

}  // namespace

const Implementation kSimd{"simd",
                           Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.out});
                           },
                           simd_sine_forward,
                           simd_sine_backward,
                           simd_window};

}  // namespace flashgla::ops::hyena_filter
#endif

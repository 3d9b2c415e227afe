// A row is read into the first-level cache once and passed over twice there.
#include <cmath>

#include "flashgla/ops/partial_sums.h"
#include "flashgla/ops/rms_norm/implementations.h"
#include "flashgla/ops/rows.h"
#include "flashgla/ops/weight_in_f32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/rms_norm/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::rms_norm {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

template <class T>
void forward(Context& context, const Inputs& inputs, const Outputs& outputs, const float* weight, double epsilon) {
  const TypedRows<T> x(inputs.x), y(outputs.y);
  const std::int64_t length = x.length();
  const simd::F32 d;
  parallel_for_blocks(context, x.count(), rows_per_task(length), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float squares = simd::sum([](VF32 a) { return hn::Mul(a, a); }, length, x[row]);
      const float r = 1.0f / std::sqrt(squares / static_cast<float>(length) + static_cast<float>(epsilon));
      simd::map([&](VF32 a, VF32 w) { return hn::Mul(hn::Mul(a, hn::Set(d, r)), w); }, length, y[row], x[row], weight);
      if (outputs.rstd) outputs.rstd.as<float>()[row] = r;
    }
  });
}

template <class T>
void backward(Context& context, const TensorView& x_view, const float* weight, const float* rstd,
              const TensorView& dy_view, const TensorView& dx_view, bool accumulate_dx, const PartialSums& dweight) {
  const TypedRows<T> x(x_view), dy(dy_view), dx(dx_view);
  const std::int64_t length = x.length();
  const simd::F32 d;
  parallel_for(context, dweight.blocks(), [&](std::int64_t block) {
    float* sums = dweight[block];
    std::fill_n(sums, length, 0.0f);
    for (std::int64_t row = dweight.begin(block); row < dweight.end(block); ++row) {
      const float r = rstd[row];
      const float dot =
          simd::sum([](VF32 a, VF32 g, VF32 w) { return hn::Mul(hn::Mul(g, w), a); }, length, x[row], dy[row], weight);
      simd::map([&](VF32 total, VF32 a, VF32 g) { return hn::MulAdd(hn::Mul(g, a), hn::Set(d, r), total); }, length,
                sums, sums, x[row], dy[row]);
      const VF32 scale = hn::Set(d, r);
      const VF32 pull = hn::Set(d, r * r * r * dot / static_cast<float>(length));
      auto gradient = [&](VF32 a, VF32 g, VF32 w) { return hn::NegMulAdd(a, pull, hn::Mul(hn::Mul(g, w), scale)); };
      if (accumulate_dx) {
        simd::map([&](VF32 before, VF32 a, VF32 g, VF32 w) { return hn::Add(before, gradient(a, g, w)); }, length,
                  dx[row], dx[row], x[row], dy[row], weight);
      } else {
        simd::map(gradient, length, dx[row], x[row], dy[row], weight);
      }
    }
  });
}

void Forward(Context& context, const Inputs& inputs, const Outputs& outputs, const float* weight, double epsilon) {
  if (inputs.x.dtype == DType::f32) return forward<float>(context, inputs, outputs, weight, epsilon);
  forward<BFloat16>(context, inputs, outputs, weight, epsilon);
}

void Backward(Context& context, const TensorView& x, const float* weight, const float* rstd, const TensorView& dy,
              const TensorView& dx, bool accumulate_dx, const PartialSums& dweight) {
  if (x.dtype == DType::f32) return backward<float>(context, x, weight, rstd, dy, dx, accumulate_dx, dweight);
  backward<BFloat16>(context, x, weight, rstd, dy, dx, accumulate_dx, dweight);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::rms_norm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::rms_norm {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

namespace {

void simd_forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  ArenaScope scope(context.scratch());
  const float* weight = weight_in_f32(context, inputs.weight, inputs.x.size(-1));
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Forward)(context, inputs, outputs, weight, epsilon);
}

void simd_backward(Context& context, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                   const TensorView& dy, const TensorView& dx, bool accumulate_dx, const TensorView& dweight) {
  ArenaScope scope(context.scratch());
  const std::int64_t length = x.size(-1);
  const float* weight32 = weight_in_f32(context, weight, length);
  const PartialSums sums(context, rows_of(x.shape), length, "rms_norm: dweight");
  if (context.planning()) return;
  HWY_DYNAMIC_DISPATCH(Backward)(context, x, weight32, rstd.as<float>(), dy, dx, accumulate_dx, sums);
  if (dweight) sums.reduce(context, dweight.as<float>(), true);
}

}  // namespace

const Implementation kSimd{"simd", Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           simd_forward, simd_backward};

}  // namespace flashgla::ops::rms_norm
#endif

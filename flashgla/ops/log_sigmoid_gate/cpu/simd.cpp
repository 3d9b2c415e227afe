// Both directions in one pass over memory.
#include "flashgla/ops/log_sigmoid_gate/implementations.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/log_sigmoid_gate/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::log_sigmoid_gate {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

template <class X, class G>
void forward(Context& context, const TypedRows<X>& x, const TypedRows<G>& g, float scale, float clamp_min) {
  for_each_piece(context, {&x, &g}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    const simd::F32 d;
    simd::map(
        [&](VF32 value) {
          return hn::Max(hn::Mul(simd::log_sigmoid(d, value), hn::Set(d, scale)), hn::Set(d, clamp_min));
        },
        count, g[row] + begin, x[row] + begin);
  });
}

template <class X, class G>
void backward(Context& context, const TypedRows<X>& x, const TypedRows<G>& dg, const TypedRows<X>& dx, float scale,
              float clamp_min) {
  const bool clamped = clamp_min > -std::numeric_limits<float>::infinity();
  for_each_piece(context, {&x, &dg, &dx}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    const simd::F32 d;
    simd::map(
        [&](VF32 value, VF32 gradient) {
          const VF32 slope = hn::Mul(simd::sigmoid(d, hn::Neg(value)), hn::Set(d, scale));
          const VF32 result = hn::Mul(gradient, slope);
          if (!clamped) return result;
          const VF32 gate = hn::Mul(simd::log_sigmoid(d, value), hn::Set(d, scale));
          return hn::IfThenElseZero(hn::Ge(gate, hn::Set(d, clamp_min)), result);
        },
        count, dx[row] + begin, x[row] + begin, dg[row] + begin);
  });
}

template <class T>
using R = TypedRows<T>;

void Forward(Context& context, const TensorView& x, const TensorView& g, double normalizer, double clamp_min) {
  const auto scale = static_cast<float>(1.0 / normalizer);
  const auto least = static_cast<float>(clamp_min);
  if (x.dtype == DType::f32) return forward(context, R<float>(x), R<float>(g), scale, least);
  if (g.dtype == DType::f32) return forward(context, R<BFloat16>(x), R<float>(g), scale, least);
  forward(context, R<BFloat16>(x), R<BFloat16>(g), scale, least);
}

void Backward(Context& context, const TensorView& x, const TensorView& dg, const TensorView& dx, double normalizer,
              double clamp_min) {
  const auto scale = static_cast<float>(1.0 / normalizer);
  const auto least = static_cast<float>(clamp_min);
  if (x.dtype == DType::f32) return backward(context, R<float>(x), R<float>(dg), R<float>(dx), scale, least);
  if (dg.dtype == DType::f32) return backward(context, R<BFloat16>(x), R<float>(dg), R<BFloat16>(dx), scale, least);
  backward(context, R<BFloat16>(x), R<BFloat16>(dg), R<BFloat16>(dx), scale, least);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::log_sigmoid_gate
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::log_sigmoid_gate {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

const Implementation kSimd{
    "simd", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) {
      return supports_f32_and_bf16({problem.dtype, problem.gate_dtype});
    },
    [](Context& context, const TensorView& x, const TensorView& g, double normalizer, double clamp_min) {
      HWY_DYNAMIC_DISPATCH(Forward)(context, x, g, normalizer, clamp_min);
    },
    [](Context& context, const TensorView& x, const TensorView& dg, const TensorView& dx, double normalizer,
       double clamp_min) {
      HWY_DYNAMIC_DISPATCH(Backward)
      (context, x, dg, dx, normalizer, clamp_min);
    }};

}  // namespace flashgla::ops::log_sigmoid_gate
#endif

// One pass over memory.
#include <cmath>

#include "flashgla/ops/adamw/implementations.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/adamw/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::adamw {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

// The update with everything that is the same for all elements folded into four factors:
// p = keep p - rate m / (sqrt(v) + floor), where rate = lr sqrt(c2) / c1, floor = epsilon sqrt(c2), keep = 1 - lr
// decay, c_i = 1 - beta_i^step.
struct Factors {
  float beta1, beta2, gradient_scale, rate, floor, keep;

  explicit Factors(const Settings& s)
      : beta1(static_cast<float>(s.beta1)),
        beta2(static_cast<float>(s.beta2)),
        gradient_scale(static_cast<float>(s.gradient_scale)) {
    const double correction1 = 1.0 - std::pow(s.beta1, static_cast<double>(s.step));
    const double correction2 = std::sqrt(1.0 - std::pow(s.beta2, static_cast<double>(s.step)));
    rate = static_cast<float>(s.learning_rate * correction2 / correction1);
    floor = static_cast<float>(s.epsilon * correction2);
    keep = static_cast<float>(1.0 - s.learning_rate * s.weight_decay);
  }
};

struct State {
  VF32 p, m, v;
};

HWY_INLINE State update(const Factors& f, VF32 g, State s) {
  const simd::F32 d;
  g = hn::Mul(g, hn::Set(d, f.gradient_scale));
  s.m = hn::MulAdd(hn::Set(d, f.beta1), hn::Sub(s.m, g), g);  // beta1 m + (1 - beta1) g
  const VF32 squared = hn::Mul(g, g);
  s.v = hn::MulAdd(hn::Set(d, f.beta2), hn::Sub(s.v, squared), squared);
  const VF32 direction = hn::Div(hn::Mul(hn::Set(d, f.rate), s.m), hn::Add(hn::Sqrt(s.v), hn::Set(d, f.floor)));
  s.p = hn::MulSub(hn::Set(d, f.keep), s.p, direction);
  return s;
}

void step_span(const Factors& factors, std::int64_t count, const float* g, float* p, float* m, float* v,
               BFloat16* rounded) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const State s =
        update(factors, simd::load(d, g + i), {simd::load(d, p + i), simd::load(d, m + i), simd::load(d, v + i)});
    simd::store(d, s.p, p + i);
    simd::store(d, s.m, m + i);
    simd::store(d, s.v, v + i);
    if (rounded) simd::store(d, s.p, rounded + i);
  }
  if (const std::int64_t rest = count - i; rest > 0) {
    const State s =
        update(factors, simd::load_part(d, g + i, rest),
               {simd::load_part(d, p + i, rest), simd::load_part(d, m + i, rest), simd::load_part(d, v + i, rest)});
    simd::store_part(d, s.p, p + i, rest);
    simd::store_part(d, s.m, m + i, rest);
    simd::store_part(d, s.v, v + i, rest);
    if (rounded) simd::store_part(d, s.p, rounded + i, rest);
  }
}

void Step(Context& context, const Tensors& tensors, const Settings& settings) {
  const Factors factors(settings);
  const auto* g = tensors.gradient.as<float>();
  auto* p = (tensors.master ? tensors.master : tensors.parameter).as<float>();
  auto* m = tensors.first_moment.as<float>();
  auto* v = tensors.second_moment.as<float>();
  auto* rounded = tensors.master ? tensors.parameter.as<BFloat16>() : nullptr;
  parallel_for_blocks(context, tensors.parameter.numel(), kElementsPerTask, [&](std::int64_t begin, std::int64_t end) {
    step_span(factors, end - begin, g + begin, p + begin, m + begin, v + begin, rounded ? rounded + begin : nullptr);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::adamw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::adamw {

HWY_EXPORT(Step);

const Implementation kSimd{
    "simd", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    [](Context& context, const Tensors& tensors, const Settings& settings) {
      HWY_DYNAMIC_DISPATCH(Step)(context, tensors, settings);
    }};

}  // namespace flashgla::ops::adamw
#endif

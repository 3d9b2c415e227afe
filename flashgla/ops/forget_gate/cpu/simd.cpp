// Both directions in one pass over memory.
#include "flashgla/ops/forget_gate/implementations.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/forget_gate/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
#include "hwy/contrib/math/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::forget_gate {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

// What of a bounded gate is of x alone, or of x and b.
struct Bounded {
  VF32 open;      // 1 - sigmoid(x)
  VF32 of_bound;  // the gate's logarithm's derivative by b
  VF32 share;     // what of a plain gate's derivative by x is left
  VF32 log_gate;
};

HWY_INLINE Bounded bounded(simd::F32 d, VF32 x, VF32 b) {
  const VF32 one = hn::Set(d, 1.0f), rest = hn::Sub(one, b);
  const auto positive = hn::Ge(x, hn::Zero(d));
  const VF32 u = simd::exp(d, hn::Neg(hn::Abs(x)));
  const VF32 below = hn::IfThenElse(positive, hn::MulAdd(b, u, one), hn::Add(b, u));
  Bounded gate;
  gate.of_bound = hn::Div(hn::IfThenElse(positive, u, one), below);
  gate.share = hn::Mul(rest, hn::Div(hn::IfThenElse(positive, one, u), below));
  gate.open = hn::Div(hn::IfThenElse(positive, u, one), hn::Add(one, u));
  gate.log_gate = hn::Neg(hn::CallLog1p(d, hn::Mul(rest, gate.of_bound)));
  return gate;
}

template <class T>
void forward(Context& context, const TypedRows<T>& x, const TensorView& bound, const TypedRows<T>& g,
             const TypedRows<T>& k, float scale) {
  const simd::F32 d;
  const VF32 by = hn::Set(d, scale);
  const auto finish = [&](VF32& gate, VF32& key, VF32 log_gate) {
    gate = hn::Mul(log_gate, by);
    key = hn::Neg(hn::CallExpm1(d, gate));
  };
  if (!bound) {
    return for_each_piece(context, {&x, &g, &k}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
      simd::map2([&](VF32& gate, VF32& key, VF32 value) { finish(gate, key, simd::log_sigmoid(d, value)); }, count,
                 g[row] + begin, k[row] + begin, x[row] + begin);
    });
  }
  const TypedRows<float> b(bound);
  for_each_piece(context, {&x, &b, &g, &k}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    simd::map2(
        [&](VF32& gate, VF32& key, VF32 value, VF32 least) { finish(gate, key, bounded(d, value, least).log_gate); },
        count, g[row] + begin, k[row] + begin, x[row] + begin, b[row] + begin);
  });
}

template <class T>
void backward(Context& context, const TypedRows<T>& x, const TensorView& bound, const TypedRows<T>& dg,
              const TypedRows<T>& dk, const TypedRows<T>& dx, const TensorView& dbound, float scale) {
  const simd::F32 d;
  const VF32 by = hn::Set(d, scale);
  // The gradient of the gate's logarithm before the normalizer.
  const auto of_gate = [&](VF32 log_gate, VF32 to_g, VF32 to_k) {
    return hn::Mul(hn::NegMulAdd(simd::exp(d, hn::Mul(log_gate, by)), to_k, to_g), by);
  };
  if (!bound) {
    return for_each_piece(context, {&x, &dg, &dk, &dx}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
      simd::map(
          [&](VF32 value, VF32 to_g, VF32 to_k) {
            return hn::Mul(of_gate(simd::log_sigmoid(d, value), to_g, to_k), simd::sigmoid(d, hn::Neg(value)));
          },
          count, dx[row] + begin, x[row] + begin, dg[row] + begin, dk[row] + begin);
    });
  }
  const TypedRows<float> b(bound), db(dbound);
  for_each_piece(context, {&x, &b, &dg, &dk, &dx, &db}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    simd::map2(
        [&](VF32& to_x, VF32& to_bound, VF32 value, VF32 least, VF32 to_g, VF32 to_k) {
          const Bounded gate = bounded(d, value, least);
          const VF32 gradient = of_gate(gate.log_gate, to_g, to_k);
          to_x = hn::Mul(gradient, hn::Mul(gate.open, gate.share));
          to_bound = hn::Mul(gradient, gate.of_bound);
        },
        count, dx[row] + begin, db[row] + begin, x[row] + begin, b[row] + begin, dg[row] + begin, dk[row] + begin);
  });
}

template <class T>
using R = TypedRows<T>;

void Forward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& g, const TensorView& k,
             double normalizer) {
  const auto scale = static_cast<float>(1.0 / normalizer);
  if (x.dtype == DType::f32) return forward(context, R<float>(x), bound, R<float>(g), R<float>(k), scale);
  forward(context, R<BFloat16>(x), bound, R<BFloat16>(g), R<BFloat16>(k), scale);
}

void Backward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& dg,
              const TensorView& dk, const TensorView& dx, const TensorView& dbound, double normalizer) {
  const auto scale = static_cast<float>(1.0 / normalizer);
  if (x.dtype == DType::f32) {
    return backward(context, R<float>(x), bound, R<float>(dg), R<float>(dk), R<float>(dx), dbound, scale);
  }
  backward(context, R<BFloat16>(x), bound, R<BFloat16>(dg), R<BFloat16>(dk), R<BFloat16>(dx), dbound, scale);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::forget_gate
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::forget_gate {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

namespace {

void simd_forward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& g,
                  const TensorView& k, double normalizer) {
  HWY_DYNAMIC_DISPATCH(Forward)(context, x, bound, g, k, normalizer);
}

void simd_backward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& dg,
                   const TensorView& dk, const TensorView& dx, const TensorView& dbound, double normalizer) {
  HWY_DYNAMIC_DISPATCH(Backward)(context, x, bound, dg, dk, dx, dbound, normalizer);
}

}  // namespace

const Implementation kSimd{
    "simd", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, simd_forward,
    simd_backward};

}  // namespace flashgla::ops::forget_gate
#endif

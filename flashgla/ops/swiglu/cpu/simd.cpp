// Both directions in one pass over memory.
#include "flashgla/ops/rows.h"
#include "flashgla/ops/swiglu/implementations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/swiglu/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::swiglu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

template <class T, class Y>
void forward(Context& context, const TypedRows<T>& gate, const TypedRows<T>& up, const TypedRows<Y>& y) {
  for_each_piece(context, {&gate, &up, &y}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    simd::map([](VF32 g, VF32 u) { return hn::Mul(hn::Mul(g, simd::sigmoid(simd::F32(), g)), u); }, count,
              y[row] + begin, gate[row] + begin, up[row] + begin);
  });
}

// Returns the swish.
HWY_INLINE VF32 gradients(VF32& to_gate, VF32& to_up, VF32 g, VF32 u, VF32 gradient) {
  const VF32 s = simd::sigmoid(simd::F32(), g);
  const VF32 swish = hn::Mul(g, s);
  // s + g s (1 - s) = s + swish - swish s
  const VF32 slope = hn::NegMulAdd(swish, s, hn::Add(s, swish));
  to_gate = hn::Mul(hn::Mul(gradient, u), slope);
  to_up = hn::Mul(gradient, swish);
  return swish;
}

template <class T>
void backward(Context& context, const TypedRows<T>& gate, const TypedRows<T>& up, const TypedRows<T>& dy,
              const TypedRows<T>& dgate, const TypedRows<T>& dup) {
  for_each_piece(
      context, {&gate, &up, &dy, &dgate, &dup}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
        simd::map2([](VF32& to_gate, VF32& to_up, VF32 g, VF32 u,
                      VF32 gradient) { gradients(to_gate, to_up, g, u, gradient); },
                   count, dgate[row] + begin, dup[row] + begin, gate[row] + begin, up[row] + begin, dy[row] + begin);
      });
}

template <class T>
void backward_and_forward(Context& context, const TypedRows<T>& gate, const TypedRows<T>& up, const TypedRows<T>& dy,
                          const TypedRows<T>& dgate, const TypedRows<T>& dup, const TypedRows<T>& y) {
  for_each_piece(context, {&gate, &up, &dy, &dgate, &dup, &y},
                 [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
                   simd::map3([](VF32& to_gate, VF32& to_up, VF32& out, VF32 g, VF32 u,
                                 VF32 gradient) { out = hn::Mul(gradients(to_gate, to_up, g, u, gradient), u); },
                              count, dgate[row] + begin, dup[row] + begin, y[row] + begin, gate[row] + begin,
                              up[row] + begin, dy[row] + begin);
                 });
}

template <class T>
using R = TypedRows<T>;

void Forward(Context& context, const TensorView& gate, const TensorView& up, const TensorView& y) {
  if (gate.dtype != DType::f32) return forward(context, R<BFloat16>(gate), R<BFloat16>(up), R<BFloat16>(y));
  if (y.dtype != DType::f32) return forward(context, R<float>(gate), R<float>(up), R<BFloat16>(y));
  forward(context, R<float>(gate), R<float>(up), R<float>(y));
}

template <class T>
void backward_of(Context& context, const TensorView& gate, const TensorView& up, const TensorView& dy,
                 const TensorView& dgate, const TensorView& dup, const TensorView& y) {
  const R<T> gates(gate), ups(up), gradients(dy), to_gate(dgate), to_up(dup);
  if (!y) return backward<T>(context, gates, ups, gradients, to_gate, to_up);
  backward_and_forward<T>(context, gates, ups, gradients, to_gate, to_up, R<T>(y));
}

void Backward(Context& context, const TensorView& gate, const TensorView& up, const TensorView& dy,
              const TensorView& dgate, const TensorView& dup, const TensorView& y) {
  (gate.dtype == DType::f32 ? backward_of<float> : backward_of<BFloat16>)(context, gate, up, dy, dgate, dup, y);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::swiglu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::swiglu {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

const Implementation kSimd{"simd", Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.y_dtype});
                           },
                           [](Context& context, const TensorView& gate, const TensorView& up, const TensorView& y) {
                             HWY_DYNAMIC_DISPATCH(Forward)(context, gate, up, y);
                           },
                           [](Context& context, const TensorView& gate, const TensorView& up, const TensorView& dy,
                              const TensorView& dgate, const TensorView& dup, const TensorView& y) {
                             HWY_DYNAMIC_DISPATCH(Backward)
                             (context, gate, up, dy, dgate, dup, y);
                           }};

}  // namespace flashgla::ops::swiglu
#endif

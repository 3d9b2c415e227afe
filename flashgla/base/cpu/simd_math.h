// Vectors of f32 from f32 or bf16 memory, and the functions of mathematics on them. For sources that Highway compiles
// once per instruction set: include after hwy/foreach_target.h, use inside HWY_BEFORE_NAMESPACE.
//
//     namespace flashgla::ops::x { namespace HWY_NAMESPACE {
//     namespace simd = flashgla::simd::HWY_NAMESPACE;
//
// Accuracy (tested against f64): exp 2 ulp on [-87.3, 88.3], 0 below -87.7, infinity above 88.4; sigmoid 3 ulp;
// log_sigmoid 3 ulp, and 0 above 87.7. NaN in, NaN out; -inf and inf give the limits.

#if defined(FLASHGLA_BASE_CPU_SIMD_MATH_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHGLA_BASE_CPU_SIMD_MATH_H_
#undef FLASHGLA_BASE_CPU_SIMD_MATH_H_
#else
#define FLASHGLA_BASE_CPU_SIMD_MATH_H_
#endif

#include <cstdint>
#include <cstring>

#include "flashgla/base/float16.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace flashgla::simd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using VF32 = hn::Vec<F32>;

// Lanes of F32 from unaligned memory.
HWY_INLINE VF32 load(F32 d, const float* from) { return hn::LoadU(d, from); }
HWY_INLINE VF32 load(F32 d, const BFloat16* from) {
  const hn::Rebind<std::uint16_t, F32> d16;
  const hn::Rebind<std::uint32_t, F32> d32;
  const auto half = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, half)));
}

HWY_INLINE void store(F32 d, VF32 value, float* to) { hn::StoreU(value, d, to); }
// Rounds to nearest even; NaN stays a NaN. The same bits as BFloat16(float).
HWY_INLINE void store(F32, VF32 value, BFloat16* to) {
  const hn::Rebind<std::uint16_t, F32> d16;
  const hn::Rebind<std::uint32_t, F32> d32;
  const hn::Rebind<std::int32_t, F32> di32;
  const auto bits = hn::BitCast(d32, value);
  const auto high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fff))));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
  const auto result = hn::IfThenElse(is_nan, hn::Or(high, hn::Set(d32, 0x40)), rounded);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di32, result)), d16, reinterpret_cast<std::uint16_t*>(to));
}

// The first `count` < lanes elements; the rest are zero and are not read.
template <class T>
HWY_INLINE VF32 load_part(F32 d, const T* from, std::int64_t count) {
  T lanes[HWY_MAX_BYTES / sizeof(float)] = {};
  std::memcpy(static_cast<void*>(lanes), from, static_cast<std::size_t>(count) * sizeof(T));
  return load(d, lanes);
}
template <class T>
HWY_INLINE void store_part(F32 d, VF32 value, T* to, std::int64_t count) {
  T lanes[HWY_MAX_BYTES / sizeof(float)];
  store(d, value, lanes);
  std::memcpy(static_cast<void*>(to), lanes, static_cast<std::size_t>(count) * sizeof(T));
}

// out[i] = f(in0[i], in1[i], ...) for i in [0, count), on vectors. out may be one of the inputs.
template <class F, class Out, class... In>
HWY_INLINE void map(const F& f, std::int64_t count, Out* out, const In*... in) {
  const F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(d, f(load(d, in + i)...), out + i);
  if (i < count) store_part(d, f(load_part(d, in + i, count - i)...), out + i, count - i);
}

// As map, for two results: f(out0, out1, in...) sets the first two.
template <class F, class Out0, class Out1, class... In>
HWY_INLINE void map2(const F& f, std::int64_t count, Out0* out0, Out1* out1, const In*... in) {
  const F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VF32 first = hn::Zero(d);
  VF32 second = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    f(first, second, load(d, in + i)...);
    store(d, first, out0 + i);
    store(d, second, out1 + i);
  }
  if (i < count) {
    f(first, second, load_part(d, in + i, count - i)...);
    store_part(d, first, out0 + i, count - i);
    store_part(d, second, out1 + i, count - i);
  }
}

// And for three.
template <class F, class Out0, class Out1, class Out2, class... In>
HWY_INLINE void map3(const F& f, std::int64_t count, Out0* out0, Out1* out1, Out2* out2, const In*... in) {
  const F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VF32 first = hn::Zero(d), second = hn::Zero(d), third = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    f(first, second, third, load(d, in + i)...);
    store(d, first, out0 + i);
    store(d, second, out1 + i);
    store(d, third, out2 + i);
  }
  if (i < count) {
    f(first, second, third, load_part(d, in + i, count - i)...);
    store_part(d, first, out0 + i, count - i);
    store_part(d, second, out1 + i, count - i);
    store_part(d, third, out2 + i, count - i);
  }
}

// Sum over i of f(in0[i], in1[i], ...), in a fixed order; f of zeros must be zero. Four sums hide the latency.
template <class F, class... In>
HWY_INLINE float sum(const F& f, std::int64_t count, const In*... in) {
  const F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VF32 s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    s0 = hn::Add(s0, f(load(d, in + i)...));
    s1 = hn::Add(s1, f(load(d, in + i + lanes)...));
    s2 = hn::Add(s2, f(load(d, in + i + 2 * lanes)...));
    s3 = hn::Add(s3, f(load(d, in + i + 3 * lanes)...));
  }
  for (; i + lanes <= count; i += lanes) s0 = hn::Add(s0, f(load(d, in + i)...));
  if (i < count) s1 = hn::Add(s1, f(load_part(d, in + i, count - i)...));
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln(2) / 2, and e^r = 1 + r + r^2 p(r), p fitted for the least largest
// relative error (3e-9).
HWY_INLINE VF32 exp(F32 d, VF32 x) {
  const hn::Rebind<std::int32_t, F32> di;
  // The bounds keep n within the exponent field: 2^-127 becomes 0 and 2^128 infinity. x is the second operand, which
  // x86 returns when one is NaN; Arm returns NaN; plain C++ loses it.
  VF32 bounded = hn::Min(hn::Set(d, 88.5f), hn::Max(hn::Set(d, -88.0f), x));
  constexpr bool kPlain = HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128;
  if constexpr (kPlain) bounded = hn::IfThenElse(hn::IsNaN(x), x, bounded);
  const VF32 n = hn::Round(hn::Mul(bounded, hn::Set(d, 1.44269504f)));
  VF32 r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), bounded);  // exact: ln 2 in two parts
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  VF32 p = hn::Set(d, 1.3814613e-3f);
  p = hn::MulAdd(p, r, hn::Set(d, 8.3687101e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1668389e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666521e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.49999994f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  VF32 power = n;
  if constexpr (kPlain) power = hn::IfThenElse(hn::IsNaN(n), hn::Zero(d), n);  // no integer is NaN; p is
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, power), hn::Set(di, 127)));
  return hn::Mul(p, hn::BitCast(d, exponent));
}

HWY_INLINE VF32 sigmoid(F32 d, VF32 x) {
  const VF32 one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp(d, hn::Neg(x))));
}

// log(1 + u) for u in [0, 1]: 2 atanh(s) with s = u / (2 + u) <= 1/3, atanh(s) = s p(s^2), p fitted (1e-10).
HWY_INLINE VF32 log1p_unit(F32 d, VF32 u) {
  const VF32 s = hn::Div(u, hn::Add(u, hn::Set(d, 2.0f)));
  const VF32 z = hn::Mul(s, s);
  VF32 p = hn::Set(d, 0.12212455f);
  p = hn::MulAdd(p, z, hn::Set(d, 0.10694981f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.14310521f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.19999339f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.33333340f));
  p = hn::Mul(p, z);
  const VF32 twice = hn::Add(s, s);
  return hn::MulAdd(twice, p, twice);
}

// log(sigmoid(x)) = min(x, 0) - log(1 + e^-|x|).
HWY_INLINE VF32 log_sigmoid(F32 d, VF32 x) {
  const VF32 tail = log1p_unit(d, exp(d, hn::Neg(hn::Abs(x))));
  return hn::Sub(hn::Min(hn::Zero(d), x), tail);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::simd
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

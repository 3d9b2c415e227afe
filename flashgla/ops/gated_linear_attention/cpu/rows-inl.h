// Rows of any dtype as floats and back, 2^x, feature maps: what the CPU implementations have in common. Included once
// per SIMD target.
#if defined(FLASHGLA_GLA_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHGLA_GLA_ROWS_INL_H_
#undef FLASHGLA_GLA_ROWS_INL_H_
#else
#define FLASHGLA_GLA_ROWS_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "flashgla/base/float16.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gated_linear_attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;
using Vec = hn::Vec<D>;

// Without F16C, fp16 is converted element by element.
constexpr bool kHalfInstructions = HWY_TARGET <= HWY_AVX2 || HWY_TARGET == HWY_NEON;

HWY_INLINE std::int64_t Lanes() { return static_cast<std::int64_t>(hn::Lanes(D())); }

template <class DF>
HWY_INLINE hn::Vec<DF> LoadBFloat16(DF d, const std::uint16_t* p) {
  const hn::Rebind<std::uint16_t, DF> dh;
  const hn::RebindToUnsigned<DF> du;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(dh, p))));
}

// Rounds to nearest even; NaN stays NaN.
template <class DF>
HWY_INLINE void StoreBFloat16(DF, hn::Vec<DF> x, std::uint16_t* p) {
  const hn::RebindToUnsigned<DF> du;
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<std::uint16_t, DF> dh;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff))));
  rounded = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), hn::Set(du, 0x7fc0), rounded);
  hn::StoreU(hn::DemoteTo(dh, hn::BitCast(di, rounded)), dh, p);
}

// Reads n elements (not f64) as floats and fills up to `width` with zeros.
HWY_INLINE void LoadRow(DType dtype, const void* source, std::int64_t n, std::int64_t width,
                        float* HWY_RESTRICT target) {
  const D d;
  const std::int64_t lanes = Lanes();
  std::int64_t i = 0;
  if (dtype == DType::f32) {
    std::memcpy(target, source, static_cast<std::size_t>(n) * sizeof(float));
    i = n;
  } else if (dtype == DType::bf16) {
    const auto* s = static_cast<const std::uint16_t*>(source);
    for (; i + lanes <= n; i += lanes) hn::StoreU(LoadBFloat16(d, s + i), d, target + i);
    for (; i < n; ++i) target[i] = static_cast<const BFloat16*>(source)[i];
  } else {
    if constexpr (kHalfInstructions) {
      const hn::Rebind<hwy::float16_t, D> dh;
      const auto* s = static_cast<const hwy::float16_t*>(source);
      for (; i + lanes <= n; i += lanes) hn::StoreU(hn::PromoteTo(d, hn::LoadU(dh, s + i)), d, target + i);
    }
    for (; i < n; ++i) target[i] = static_cast<const Float16*>(source)[i];
  }
  for (; i < width; ++i) target[i] = 0.0f;
}

HWY_INLINE void StoreRow(DType dtype, const float* HWY_RESTRICT source, std::int64_t n, void* target) {
  const D d;
  const std::int64_t lanes = Lanes();
  std::int64_t i = 0;
  if (dtype == DType::f32) {
    std::memcpy(target, source, static_cast<std::size_t>(n) * sizeof(float));
  } else if (dtype == DType::bf16) {
    auto* t = static_cast<std::uint16_t*>(target);
    for (; i + lanes <= n; i += lanes) StoreBFloat16(d, hn::LoadU(d, source + i), t + i);
    for (; i < n; ++i) static_cast<BFloat16*>(target)[i] = BFloat16(source[i]);
  } else {
    if constexpr (kHalfInstructions) {
      const hn::Rebind<hwy::float16_t, D> dh;
      auto* t = static_cast<hwy::float16_t*>(target);
      for (; i + lanes <= n; i += lanes) hn::StoreU(hn::DemoteTo(dh, hn::LoadU(d, source + i)), dh, t + i);
    }
    for (; i < n; ++i) static_cast<Float16*>(target)[i] = Float16(source[i]);
  }
}

// 2^x to 1e-7 relative for x <= 127; below -126 zero, so that no denormal appears and 2^-inf = 0. NaN gives NaN.
HWY_INLINE Vec Exp2(Vec exponent) {
  const D d;
  const hn::RebindToSigned<D> di;
  const Vec magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const auto tiny = hn::Lt(exponent, hn::Set(d, -126.0f));
  const Vec x = hn::Max(exponent, hn::Set(d, -126.0f));
  const Vec shifted = hn::Add(x, magic);
  const Vec r = hn::Sub(x, hn::Sub(shifted, magic));
  // Chebyshev fit of (2^r - 1) / r on [-1/2, 1/2]; relative error of 2^r 5e-9 before rounding.
  Vec y = hn::Set(d, 0.0001545316294214853f);
  y = hn::MulAdd(y, r, hn::Set(d, 0.001339086336464892f));
  y = hn::MulAdd(y, r, hn::Set(d, 0.009618082557285924f));
  y = hn::MulAdd(y, r, hn::Set(d, 0.05550357114219124f));
  y = hn::MulAdd(y, r, hn::Set(d, 0.24022650760568087f));
  y = hn::MulAdd(y, r, hn::Set(d, 0.6931471880262288f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f));
  const auto bits = hn::Add(hn::BitCast(di, y), hn::ShiftLeft<23>(hn::BitCast(di, shifted)));
  const Vec power = hn::IfThenZeroElse(tiny, hn::BitCast(d, bits));
  return hn::IfThenElse(hn::IsNaN(exponent), exponent, power);
}

HWY_INLINE Vec Exp(Vec x) { return Exp2(hn::Mul(x, hn::Set(D(), 1.44269504088896f))); }

// phi(x) in place over whole vectors; what lies past n is set to zero up to `width`.
HWY_INLINE void ApplyFeatureMap(FeatureMap map, std::int64_t n, std::int64_t width, float* HWY_RESTRICT x) {
  if (map == FeatureMap::identity) return;
  const D d;
  const Vec zero = hn::Zero(d);
  for (std::int64_t i = 0; i < width; i += Lanes()) {
    const Vec value = hn::LoadU(d, x + i);
    Vec result = hn::Max(value, zero);
    if (map == FeatureMap::elu_plus_one) {
      result = hn::IfThenElse(hn::Gt(value, zero), hn::Add(value, hn::Set(d, 1.0f)), Exp(hn::Min(value, zero)));
    }
    hn::StoreU(result, d, x + i);
  }
  for (std::int64_t i = n; i < width; ++i) x[i] = 0.0f;
}

// x times phi'(raw), in place over whole vectors.
HWY_INLINE void MultiplyFeatureDerivative(FeatureMap map, std::int64_t width, const float* HWY_RESTRICT raw,
                                          float* HWY_RESTRICT x) {
  if (map == FeatureMap::identity) return;
  const D d;
  const Vec zero = hn::Zero(d);
  for (std::int64_t i = 0; i < width; i += Lanes()) {
    const Vec value = hn::LoadU(d, raw + i);
    const Vec below = map == FeatureMap::elu_plus_one ? Exp(hn::Min(value, zero)) : zero;
    const Vec factor = hn::IfThenElse(hn::Gt(value, zero), hn::Set(d, 1.0f), below);
    hn::StoreU(hn::Mul(factor, hn::LoadU(d, x + i)), d, x + i);
  }
}

// Over whole vectors, in place or not.
HWY_INLINE void ScaleRow(float factor, std::int64_t width, const float* source, float* target) {
  const D d;
  for (std::int64_t i = 0; i < width; i += Lanes()) {
    hn::StoreU(hn::Mul(hn::LoadU(d, source + i), hn::Set(d, factor)), d, target + i);
  }
}

// Sum of products over whole vectors.
HWY_INLINE float Dot(std::int64_t width, const float* a, const float* b) {
  const D d;
  Vec sum = hn::Zero(d);
  for (std::int64_t i = 0; i < width; i += Lanes()) sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

HWY_INLINE float Sum(std::int64_t width, const float* a) {
  const D d;
  Vec sum = hn::Zero(d);
  for (std::int64_t i = 0; i < width; i += Lanes()) sum = hn::Add(hn::LoadU(d, a + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Lane i of the result: the sum of row i of a [lanes][lanes] matrix. A tree over all rows at once costs a quarter of as
// many sums over the lanes of one vector.
HWY_INLINE Vec SumOfRows(const float* HWY_RESTRICT rows) {
  const D d;
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  Vec sums[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) sums[i] = hn::LoadU(d, rows + i * kLanes);
#if HWY_TARGET != HWY_SCALAR
  for (std::size_t left = kLanes / 2; left >= 1; left /= 2) {
    for (std::size_t i = 0; i < left; ++i) {
      const Vec low = sums[2 * i];
      const Vec high = sums[2 * i + 1];
      sums[i] = hn::Add(hn::ConcatEven(d, high, low), hn::ConcatOdd(d, high, low));
    }
  }
#endif
  return sums[0];
}

}  // namespace flashgla::ops::gated_linear_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

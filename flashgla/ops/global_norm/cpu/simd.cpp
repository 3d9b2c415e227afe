// One pass over memory; fixed blocks, whose sums are added in their order.
#include <cmath>
#include <numeric>

#include "flashgla/ops/global_norm/implementations.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/global_norm/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::global_norm {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

using F64 = hn::ScalableTag<double>;
using VF64 = hn::Vec<F64>;

// Lanes of f64 from f32 or bf16.
HWY_INLINE VF64 load_f64(F64 d, const float* from) {
  const hn::Rebind<float, F64> d32;
  return hn::PromoteTo(d, hn::LoadU(d32, from));
}
HWY_INLINE VF64 load_f64(F64 d, const BFloat16* from) {
  const hn::Rebind<std::uint16_t, F64> d16;
  const hn::Rebind<std::uint32_t, F64> d32;
  const hn::Rebind<float, F64> df;
  const auto half = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from));
  return hn::PromoteTo(d, hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(d32, half))));
}

template <class T>
double squares(const T* x, std::int64_t count) {
  const F64 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  constexpr int kSums = 4;
  VF64 sums[kSums];
  for (VF64& sum : sums) sum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + kSums * lanes <= count; i += kSums * lanes) {
    for (int j = 0; j < kSums; ++j) {
      const VF64 value = load_f64(d, x + i + j * lanes);
      sums[j] = hn::MulAdd(value, value, sums[j]);
    }
  }
  double rest = 0.0;
  for (; i < count; ++i) rest += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return rest + hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]))));
}

// x * 0 is NaN exactly where x is not finite.
template <class T>
bool non_finite(const T* x, std::int64_t count) {
  return std::isnan(simd::sum([](VF32 value) { return hn::Mul(value, hn::Zero(simd::F32())); }, count, x));
}

double Squares(const TensorView& x, std::int64_t begin, std::int64_t end) {
  if (x.dtype == DType::f32) return squares(x.as<float>() + begin, end - begin);
  return squares(x.as<BFloat16>() + begin, end - begin);
}

bool NonFinite(const TensorView& x, std::int64_t begin, std::int64_t end) {
  if (x.dtype == DType::f32) return non_finite(x.as<float>() + begin, end - begin);
  return non_finite(x.as<BFloat16>() + begin, end - begin);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::global_norm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::global_norm {

HWY_EXPORT(Squares);
HWY_EXPORT(NonFinite);

namespace {

// Sum over fixed blocks of what f gives for each.
template <class F>
double sum_of_blocks(Context& context, const TensorView& x, const F& f) {
  constexpr std::int64_t kBlock = 65536;
  const std::int64_t blocks = (x.numel() + kBlock - 1) / kBlock;
  ArenaScope scope(context.scratch());
  const TensorView sums = context.scratch().tensor(Shape({blocks}), DType::f64, "global_norm: sums of blocks");
  if (context.planning()) return 0.0;
  parallel_for_blocks(context, x.numel(), kBlock, [&](std::int64_t begin, std::int64_t end) {
    sums.as<double>()[begin / kBlock] = f(x, begin, end);
  });
  return std::accumulate(sums.as<double>(), sums.as<double>() + blocks, 0.0);
}

}  // namespace

const Implementation kSimd{
    "simd", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    [](Context& context, const TensorView& x, const TensorView& sum) {
      const double total = sum_of_blocks(context, x, [](const TensorView& view, std::int64_t begin, std::int64_t end) {
        return HWY_DYNAMIC_DISPATCH(Squares)(view, begin, end);
      });
      if (!context.planning()) *sum.as<double>() = total;
    },
    [](Context& context, const TensorView& x) {
      return sum_of_blocks(context, x, [](const TensorView& view, std::int64_t begin, std::int64_t end) {
               return HWY_DYNAMIC_DISPATCH(NonFinite)(view, begin, end) ? 1.0 : 0.0;
             }) > 0.0;
    }};

}  // namespace flashgla::ops::global_norm
#endif

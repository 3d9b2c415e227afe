#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/base/tests/simd_math_test.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla {
namespace HWY_NAMESPACE {
namespace simd = flashgla::simd::HWY_NAMESPACE;
namespace hn = hwy::HWY_NAMESPACE;

void Exp(const float* in, float* out, std::int64_t count) {
  simd::map([](simd::VF32 x) { return simd::exp(simd::F32(), x); }, count, out, in);
}
void Sigmoid(const float* in, float* out, std::int64_t count) {
  simd::map([](simd::VF32 x) { return simd::sigmoid(simd::F32(), x); }, count, out, in);
}
void LogSigmoid(const float* in, float* out, std::int64_t count) {
  simd::map([](simd::VF32 x) { return simd::log_sigmoid(simd::F32(), x); }, count, out, in);
}
void Round(const float* in, BFloat16* out, std::int64_t count) {
  simd::map([](simd::VF32 x) { return x; }, count, out, in);
}
float Dot(const float* a, const BFloat16* b, std::int64_t count) {
  return simd::sum([](simd::VF32 x, simd::VF32 y) { return hn::Mul(x, y); }, count, a, b);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace flashgla {
HWY_EXPORT(Exp);
HWY_EXPORT(Sigmoid);
HWY_EXPORT(LogSigmoid);
HWY_EXPORT(Round);
HWY_EXPORT(Dot);

namespace {

using Function = void (*)(const float*, float*, std::int64_t);

// Largest error in units in the last place of the exact result, over a grid of [low, high].
double largest_ulp(Function f, double (*exact)(double), float low, float high) {
  constexpr std::int64_t kCount = 200001;
  std::vector<float> in(kCount), out(kCount);
  for (std::int64_t i = 0; i < kCount; ++i) {
    in[i] = low + (high - low) * static_cast<float>(i) / static_cast<float>(kCount - 1);
  }
  f(in.data(), out.data(), kCount);
  double worst = 0.0;
  for (std::int64_t i = 0; i < kCount; ++i) {
    const double expected = exact(static_cast<double>(in[i]));
    const auto rounded = static_cast<float>(std::abs(expected));
    const double ulp = static_cast<double>(std::nextafter(rounded, std::numeric_limits<float>::infinity())) -
                       static_cast<double>(rounded);
    worst = std::max(worst, std::abs(static_cast<double>(out[i]) - expected) / ulp);
  }
  return worst;
}

float at(Function f, float x) {
  float y;
  f(&x, &y, 1);
  return y;
}

// Every instruction set that this machine can run.
class SimdMath : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

INSTANTIATE_TEST_SUITE_P(, SimdMath, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return std::string(hwy::TargetName(target.param)); });

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST_P(SimdMath, Exp) {
  const Function f = HWY_DYNAMIC_DISPATCH(Exp);
  EXPECT_LE(largest_ulp(f, std::exp, -87.3f, 88.3f), 2.0);
  EXPECT_LE(largest_ulp(f, std::exp, -1.0f, 1.0f), 2.0);
  EXPECT_EQ(at(f, 0.0f), 1.0f);
  EXPECT_EQ(at(f, -kInfinity), 0.0f);
  EXPECT_EQ(at(f, -1e30f), 0.0f);
  EXPECT_EQ(at(f, kInfinity), kInfinity);
  EXPECT_EQ(at(f, 100.0f), kInfinity);
  EXPECT_TRUE(std::isnan(at(f, kNaN)));
}

TEST_P(SimdMath, Sigmoid) {
  const Function f = HWY_DYNAMIC_DISPATCH(Sigmoid);
  auto exact = [](double x) { return 1.0 / (1.0 + std::exp(-x)); };
  EXPECT_LE(largest_ulp(f, exact, -86.0f, 30.0f), 3.0);
  EXPECT_EQ(at(f, -kInfinity), 0.0f);
  EXPECT_EQ(at(f, kInfinity), 1.0f);
  EXPECT_TRUE(std::isnan(at(f, kNaN)));
}

TEST_P(SimdMath, LogSigmoid) {
  const Function f = HWY_DYNAMIC_DISPATCH(LogSigmoid);
  auto exact = [](double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); };
  EXPECT_LE(largest_ulp(f, exact, -1e4f, 80.0f), 3.0);
  EXPECT_LE(largest_ulp(f, exact, -5.0f, 80.0f), 3.0);
  EXPECT_EQ(at(f, -kInfinity), -kInfinity);
  EXPECT_EQ(at(f, kInfinity), 0.0f);
  EXPECT_TRUE(std::isnan(at(f, kNaN)));
}

TEST_P(SimdMath, RoundsToBFloat16AsTheScalarType) {
  std::vector<float> in;
  for (std::uint32_t high = 0; high < 0x10000u; high += 7) {
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      in.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  std::vector<BFloat16> out(in.size());
  HWY_DYNAMIC_DISPATCH(Round)(in.data(), out.data(), static_cast<std::int64_t>(in.size()));
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_EQ(out[i].bits, BFloat16(in[i]).bits) << in[i];
}

TEST_P(SimdMath, SumTakesEveryElementOnce) {
  for (std::int64_t count = 0; count < 150; ++count) {
    std::vector<float> a(count);
    std::vector<BFloat16> b(count, BFloat16(1.0f));
    for (std::int64_t i = 0; i < count; ++i) a[i] = static_cast<float>(i + 1);
    EXPECT_EQ(HWY_DYNAMIC_DISPATCH(Dot)(a.data(), b.data(), count), static_cast<float>(count * (count + 1)) / 2.0f);
  }
}

}  // namespace
}  // namespace flashgla
#endif

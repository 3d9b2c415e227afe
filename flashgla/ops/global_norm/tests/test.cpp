#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "flashgla/ops/global_norm/implementations.h"
#include "flashgla/ops/global_norm/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::ops::global_norm {
namespace {

TEST(GlobalNorm, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Shape& shape : {Shape({0}), Shape({1}), Shape({7, 65}), Shape({200001})}) {
    EXPECT_EQ(testing::check_conformance(sum_case(shape), coverage), "");
  }
  EXPECT_EQ(coverage.missing(), "");
}

// What the host reads of the sum.
double sum_of(Context& context, const TensorView& x) {
  const Tensor sum = Tensor::empty({1}, DType::f64, context.device());
  sum_of_squares(context, x, sum);
  context.queue().synchronize();
  return *testing::copied_to(sum, Device::cpu()).as<double>();
}

TEST(GlobalNorm, LargeValuesDoNotOverflow) {
  const Tensor x = Tensor::empty({100}, DType::f32);
  fill(x, 1e30);
  for (const Device device : testing::test_devices()) {
    Context context(device);
    const Tensor there = testing::copied_to(x, device);
    EXPECT_NEAR(sum_of(context, there) / 1e62, 1.0, 1e-6);
    EXPECT_FALSE(find_non_finite(context, there));
  }
}

TEST(GlobalNorm, DevicesFindNonFiniteElements) {
  for (const Device device : testing::test_devices()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Context context(device);
      const std::int64_t count = 70001;
      const Tensor x = testing::random_normal({count}, dtype, 1);
      EXPECT_FALSE(find_non_finite(context, testing::copied_to(x, device)));
      for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        for (const std::int64_t at : {std::int64_t{0}, std::int64_t{4095}, std::int64_t{4096}, count - 1}) {
          store_element(x, std::array{at}, bad);
          const Tensor there = testing::copied_to(x, device);
          EXPECT_TRUE(find_non_finite(context, there)) << name_of(dtype) << " " << at;
          EXPECT_FALSE(std::isfinite(sum_of(context, there)));
          store_element(x, std::array{at}, 1.0);
        }
      }
    }
  }
}

TEST(GlobalNorm, FindsEveryNonFiniteElementWhereverItIs) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const char* implementation : {"simd", "reference"}) {
      Context context(Device::cpu(), 2);
      const std::int64_t count = 70001;
      const Tensor x = testing::random_normal({count}, dtype, 1);
      if (dtype == DType::f32 || dtype == DType::bf16) context.force_implementation(implementation);
      EXPECT_FALSE(find_non_finite(context, x));
      for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                               -std::numeric_limits<double>::infinity()}) {
        for (const std::int64_t at : {std::int64_t{0}, std::int64_t{65535}, std::int64_t{65536}, count - 1}) {
          store_element(x, std::array{at}, bad);
          EXPECT_TRUE(find_non_finite(context, x)) << name_of(dtype) << " " << at;
          EXPECT_FALSE(std::isfinite(sum_of(context, x)));
          store_element(x, std::array{at}, 1.0);
        }
      }
    }
  }
}

TEST(GlobalNorm, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({4, 6}, DType::f32), tokens = Tensor::zeros({4}, DType::i32);
  const Tensor sum = Tensor::zeros({1}, DType::f64);
  EXPECT_EQ(testing::error_of([&] { sum_of_squares(context, x.view().slice(1, 0, 3), sum); }),
            "global_norm: x of shape [4,3] is not contiguous; expected contiguous memory");
  EXPECT_EQ(testing::error_of([&] { find_non_finite(context, tokens); }),
            "global_norm: x has dtype i32; expected f64 or f32 or bf16 or f16");
  EXPECT_EQ(testing::error_of([&] { sum_of_squares(context, x, x); }),
            "global_norm: sum has shape [4,6]; expected [1] (as one sum)");
}

}  // namespace
}  // namespace flashgla::ops::global_norm

#include <gtest/gtest.h>

#include <cmath>

#include "flashgla/ops/hyena_filter/implementations.h"
#include "flashgla/ops/hyena_filter/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::hyena_filter {
namespace {

TEST(HyenaFilter, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Shape& shape : {Shape({1, 1}), Shape({7, 3}), Shape({150, 64}), Shape({33, 200})}) {
    EXPECT_EQ(testing::check_conformance(sine_case(shape), coverage), "");
    EXPECT_EQ(testing::check_conformance(sine_backward_case(shape), coverage), "");
    EXPECT_EQ(testing::check_conformance(window_case(shape), coverage), "");
    EXPECT_EQ(testing::check_conformance(window_case(shape, Kind::activation), coverage), "");
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(HyenaFilter, SineGradientsAgreeWithFiniteDifferencesAndAreAdded) {
  Context context;
  const Shape shape({5, 4});
  const Tensor x = testing::random_normal(shape, DType::f64, 1), dy = testing::random_normal(shape, DType::f64, 2),
               frequency = testing::random_normal(Shape({4}), DType::f64, 3, 1.0, 2.0);
  const Tensor y = Tensor::empty(shape, DType::f64), dx = Tensor::empty(shape, DType::f64);
  const Tensor dfrequency = Tensor::zeros({4}, DType::f64);
  sine_backward(context, x, frequency, dy, dx, dfrequency);
  const auto loss = [&] {
    sine_forward(context, x, frequency, y);
    return testing::dot(y, dy);
  };
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
  EXPECT_EQ(testing::check_gradient("dfrequency", frequency, dfrequency, loss), "");
  const double once = dfrequency.as<double>()[2];
  sine_backward(context, x, frequency, dy, dx, dfrequency);
  EXPECT_DOUBLE_EQ(dfrequency.as<double>()[2], 2.0 * once);
}

TEST(HyenaFilter, TheWindowIsAsInItsAuthorsCode) {
  Context context;
  const Tensor x = Tensor::empty({3, 3}, DType::f64), y = Tensor::empty({3, 3}, DType::f32);
  fill(x, 2.0);
  window(context, x, {5, 0.25}, y);
  const double deltas[] = {3.0701134573, 9.2103403720, 15.3505672866};  // linspace(ln(1e-2) / 1.5, ln(1e-2) / 0.3, 3)
  for (int row = 0; row < 3; ++row) {
    for (int d = 0; d < 3; ++d) {
      EXPECT_NEAR(y.as<float>()[3 * row + d], 2.0 * (std::exp(-row / 4.0 * deltas[d]) + 0.25), 1e-6);
    }
  }
}

TEST(HyenaFilter, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({3, 4}, DType::f32), e = Tensor::zeros({3}, DType::f32);
  EXPECT_EQ(testing::error_of([&] { sine_forward(context, x, e, x); }),
            "hyena_filter: frequency has shape [3]; expected [4] (as x's channels)");
  EXPECT_EQ(testing::error_of([&] {
              window(context, x, {2, 0.0}, x);
            }),
            "hyena_filter: length is 2; expected at least 2 and x's 3 rows");
}

}  // namespace
}  // namespace flashgla::ops::hyena_filter

#include <gtest/gtest.h>

#include "flashgla/ops/softmax/implementations.h"
#include "flashgla/ops/softmax/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::softmax {
namespace {

TEST(Softmax, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Shape& shape : {Shape({1, 1}), Shape({7, 65}), Shape({2, 3, 33}), Shape({0, 8}), Shape({2, 20000})}) {
    EXPECT_EQ(testing::check_conformance(case_of(shape, false), coverage), "");
    EXPECT_EQ(testing::check_conformance(case_of(shape, true), coverage), "");
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(Softmax, GradientAgreesWithFiniteDifferences) {
  Context context;
  const Shape shape({3, 8});
  const Tensor x = testing::random_normal(shape, DType::f64, 1, 3.0), dy = testing::random_normal(shape, DType::f64, 2);
  const Tensor y = Tensor::empty(shape, DType::f64), dx = Tensor::empty(shape, DType::f64);
  forward(context, x, y);
  backward(context, y, dy, dx);
  const auto loss = [&] {
    forward(context, x, y);
    return testing::dot(y, dy);
  };
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
}

TEST(Softmax, LargeInputsDoNotOverflow) {
  Context context;
  float in[] = {1000.0f, 999.0f, -1e30f}, out[3];
  forward(context, TensorView(in, Shape({3})), TensorView(out, Shape({3})));
  EXPECT_NEAR(out[0], 0.7310586f, 1e-6f);
  EXPECT_NEAR(out[1], 0.2689414f, 1e-6f);
  EXPECT_EQ(out[2], 0.0f);
}

TEST(Softmax, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({4, 6}, DType::f32), wrong = Tensor::zeros({4, 7}, DType::f32);
  EXPECT_EQ(testing::error_of([&] { forward(context, x, wrong); }),
            "softmax: y has shape [4,7]; expected [4,6] (as x)");
  EXPECT_EQ(testing::error_of([&] { backward(context, x, wrong, x); }),
            "softmax: dy has shape [4,7]; expected [4,6] (as y)");
}

}  // namespace
}  // namespace flashgla::ops::softmax

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "flashgla/ops/forget_gate/implementations.h"
#include "flashgla/ops/forget_gate/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::forget_gate {
namespace {

TEST(ForgetGate, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const bool bounded : {false, true}) {
    for (const double normalizer : {1.0, 8.0}) {
      for (const Shape& shape : {Shape({1, 1}), Shape({7, 65}), Shape({2, 3, 33}), Shape({2, 20000})}) {
        EXPECT_EQ(testing::check_conformance(forward_case(shape, bounded, normalizer), coverage), "");
        EXPECT_EQ(testing::check_conformance(backward_case(shape, bounded, normalizer), coverage), "");
      }
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(ForgetGate, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Shape shape({3, 8});
  const Tensor x = testing::random_normal(shape, DType::f64, 1, 3.0), bound = Tensor::empty(shape, DType::f64);
  for (int i = 0; i < 24; ++i) bound.as<double>()[i] = 0.04 * (i + 0.5);
  const Tensor dg = testing::random_normal(shape, DType::f64, 2), dk = testing::random_normal(shape, DType::f64, 3);
  const Tensor g = Tensor::empty(shape, DType::f64), k = Tensor::empty(shape, DType::f64);
  const Tensor dx = Tensor::empty(shape, DType::f64), dbound = Tensor::empty(shape, DType::f64);
  for (const double normalizer : {1.0, 8.0}) {
    for (const TensorView& least : {TensorView(), bound.view()}) {
      backward(context, x, least, dg, dk, dx, least ? dbound.view() : TensorView(), normalizer);
      const auto loss = [&] {
        forward(context, x, least, g, k, normalizer);
        return testing::dot(g, dg) + testing::dot(k, dk);
      };
      EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
      if (least) {
        EXPECT_EQ(testing::check_gradient("dbound", bound, dbound, loss), "");
      }
    }
  }
}

TEST(ForgetGate, ExtremeInputsGiveTheLimits) {
  Context context;
  float in[] = {-200.0f, -40.0f, 40.0f, 200.0f}, gates[4], keys[4], least[] = {0.25f, 0.25f, 0.25f, 0.25f};
  const TensorView x(in, Shape({4})), g(gates, Shape({4})), k(keys, Shape({4})), bound(least, Shape({4}));
  forward(context, x, bound, g, k, 1.0);
  for (int i = 0; i < 2; ++i) {
    EXPECT_FLOAT_EQ(gates[i], std::log(0.25f));
    EXPECT_FLOAT_EQ(keys[i], 0.75f);
  }
  EXPECT_FLOAT_EQ(gates[2], -0.75f * std::exp(-40.0f));  // no digits are lost beside 1
  EXPECT_FLOAT_EQ(keys[2], 0.75f * std::exp(-40.0f));
  forward(context, x, {}, g, k, 2.0);
  EXPECT_EQ(gates[0], -100.0f);
  EXPECT_EQ(keys[0], 1.0f);
  EXPECT_FLOAT_EQ(keys[2], 0.5f * std::exp(-40.0f));
  EXPECT_EQ(gates[3], 0.0f);
}

TEST(ForgetGate, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({4, 6}, DType::f32), wrong = Tensor::zeros({4, 7}, DType::f32);
  const auto error = [&](const TensorView& bound, const TensorView& g, double normalizer) {
    return testing::error_of([&] { forward(context, x, bound, g, x, normalizer); });
  };
  EXPECT_EQ(error({}, x, 1.0), "no error");
  EXPECT_EQ(error(wrong, x, 1.0), "forget_gate: bound has shape [4,7]; expected [4,6] (as x)");
  EXPECT_EQ(error({}, wrong, 1.0), "forget_gate: g has shape [4,7]; expected [4,6] (as x)");
  EXPECT_EQ(error({}, x, 0.0), "forget_gate: normalizer is 0.000000; expected more than 0");
  EXPECT_EQ(testing::error_of([&] { backward(context, x, {}, x, x, x, x, 1.0); }),
            "forget_gate: dbound is present; expected none without bound");
}

}  // namespace
}  // namespace flashgla::ops::forget_gate

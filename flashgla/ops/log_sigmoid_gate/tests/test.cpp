#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "flashgla/ops/log_sigmoid_gate/implementations.h"
#include "flashgla/ops/log_sigmoid_gate/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::log_sigmoid_gate {
namespace {

TEST(LogSigmoidGate, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const double clamp_min : {kNoClamp, -0.1}) {
    for (const Kind gate : {Kind::activation, Kind::accumulator}) {
      for (const Shape& shape : {Shape({1, 1}), Shape({7, 65}), Shape({2, 3, 33}), Shape({2, 20000})}) {
        EXPECT_EQ(testing::check_conformance(forward_case(shape, gate, clamp_min), coverage), "");
        EXPECT_EQ(testing::check_conformance(backward_case(shape, gate, clamp_min), coverage), "");
      }
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(LogSigmoidGate, GradientAgreesWithFiniteDifferences) {
  Context context;
  const Shape shape({3, 8});
  for (const double clamp_min : {kNoClamp, -0.1}) {
    const Tensor x = testing::random_normal(shape, DType::f64, 1, 3.0),
                 dg = testing::random_normal(shape, DType::f64, 2);
    const Tensor g = Tensor::empty(shape, DType::f64), dx = Tensor::empty(shape, DType::f64);
    backward(context, x, dg, dx, 16.0, clamp_min);
    auto loss = [&] {
      forward(context, x, g, 16.0, clamp_min);
      return testing::dot(g, dg);
    };
    EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
  }
}

TEST(LogSigmoidGate, ExtremeInputsGiveTheLimits) {
  Context context;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float in[] = {-kInfinity, -1e30f, -200.0f, 200.0f, kInfinity}, out[5], ones[] = {1, 1, 1, 1, 1};
  const TensorView x(in, Shape({5})), g(out, Shape({5})), dg(ones, Shape({5}));
  forward(context, x, g, 2.0);
  EXPECT_EQ(out[0], -kInfinity);
  EXPECT_EQ(out[1], -0.5e30f);
  EXPECT_EQ(out[2], -100.0f);
  EXPECT_EQ(out[3], 0.0f);
  EXPECT_EQ(out[4], 0.0f);
  backward(context, x, dg, g, 2.0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(out[i], 0.5f);
  for (int i = 3; i < 5; ++i) EXPECT_EQ(out[i], 0.0f);
  forward(context, x, g, 2.0, -3.0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(out[i], -3.0f);
}

TEST(LogSigmoidGate, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({4, 6}, DType::bf16), g = Tensor::zeros({4, 6}, DType::f32);
  const Tensor wrong = Tensor::zeros({4, 7}, DType::f32);
  auto error = [&](const TensorView& in, const TensorView& out, double normalizer, double clamp_min) {
    return testing::error_of([&] { forward(context, in, out, normalizer, clamp_min); });
  };
  EXPECT_EQ(error(x, g, 16.0, kNoClamp), "no error");
  EXPECT_EQ(error(x, wrong, 16.0, kNoClamp), "log_sigmoid_gate: g has shape [4,7]; expected [4,6] (as x)");
  EXPECT_EQ(error(g, x, 16.0, kNoClamp), "log_sigmoid_gate: g has dtype bf16; expected f32");
  EXPECT_EQ(error(x, g, 0.0, kNoClamp), "log_sigmoid_gate: normalizer is 0.000000; expected more than 0");
  EXPECT_EQ(error(x, g, 16.0, 1.0), "log_sigmoid_gate: clamp_min is 1.000000; expected at most 0");
}

}  // namespace
}  // namespace flashgla::ops::log_sigmoid_gate

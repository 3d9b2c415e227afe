#include <gtest/gtest.h>

#include <cmath>

#include "flashgla/ops/adamw/implementations.h"
#include "flashgla/ops/adamw/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::adamw {
namespace {

TEST(AdamW, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Shape& shape : {Shape({1}), Shape({7, 65}), Shape({40000})}) {
    for (const bool half : {false, true}) {
      EXPECT_EQ(testing::check_conformance(step_case(shape, half), coverage), "");
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

// Worked by hand: the first step moves by the learning rate against the gradient's sign, whatever its size.
TEST(AdamW, FirstStepMovesByTheLearningRate) {
  Context context;
  double p[] = {1.0, -2.0}, g[] = {1e-3, -50.0}, m[] = {0.0, 0.0}, v[] = {0.0, 0.0};
  const Shape shape({2});
  Settings settings;
  settings.learning_rate = 0.1;
  settings.epsilon = 0.0;
  settings.weight_decay = 0.5;
  step(context, {{p, shape}, {g, shape}, {m, shape}, {v, shape}, {}}, settings);
  EXPECT_NEAR(p[0], 1.0 - 0.1 * (1.0 + 0.5 * 1.0), 1e-12);
  EXPECT_NEAR(p[1], -2.0 - 0.1 * (-1.0 + 0.5 * -2.0), 1e-12);
  EXPECT_NEAR(m[0], 0.1 * 1e-3, 1e-18);
  EXPECT_NEAR(v[1], 0.05 * 2500.0, 1e-10);
}

TEST(AdamW, HalfParameterIsTheRoundedMaster) {
  Context context;
  const Shape shape({1000});
  const Tensor p = Tensor::empty(shape, DType::bf16), master = testing::random_normal(shape, DType::f32, 1);
  const Tensor g = testing::random_normal(shape, DType::f32, 2), m = Tensor::zeros(shape, DType::f32);
  const Tensor v = Tensor::zeros(shape, DType::f32);
  step(context, {p, g, m, v, master}, {});
  EXPECT_TRUE(testing::same_bits(p, testing::converted(master, DType::bf16)));
}

TEST(AdamW, RefusesBadArgumentsByName) {
  Context context;
  const Tensor p = Tensor::zeros({4}, DType::f32), half = Tensor::zeros({4}, DType::bf16);
  const Tensor other = Tensor::zeros({5}, DType::f32);
  auto error = [&](const Tensors& tensors, const Settings& settings = {}) {
    return testing::error_of([&] { step(context, tensors, settings); });
  };
  EXPECT_EQ(error({p, p, p, p, {}}), "no error");
  EXPECT_EQ(error({p, other, p, p, {}}), "adamw: gradient has shape [5]; expected [4] (as parameter)");
  EXPECT_EQ(error({p, half, p, p, {}}), "adamw: gradient has dtype bf16; expected f32");
  EXPECT_EQ(error({half, p, p, p, {}}), "adamw: master is absent; expected a tensor");
  EXPECT_EQ(error({p, p, p, p, p}), "adamw: master is present; expected none beside a parameter that is not bf16");
  Settings settings;
  settings.step = 0;
  EXPECT_EQ(error({p, p, p, p, {}}, settings), "adamw: step is 0; expected 1 or more");
  settings.step = 1;
  settings.beta2 = 1.0;
  EXPECT_EQ(error({p, p, p, p, {}}, settings), "adamw: beta2 is 1.000000; expected in [0, 1)");
}

}  // namespace
}  // namespace flashgla::ops::adamw

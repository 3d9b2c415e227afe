#include <gtest/gtest.h>

#include "flashgla/ops/layer_norm/implementations.h"
#include "flashgla/ops/layer_norm/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::layer_norm {
namespace {

TEST(LayerNorm, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  // With rows of one, two and four vectors a thread on a GPU, rows too long to be held, and a row's end inside a
  // vector. A row of one element would be its own mean.
  for (const Shape& shape :
       {Shape({3, 65}), Shape({2, 5, 128}), Shape({700, 33}), Shape({0, 8}), Shape({1, 1003}), Shape({9, 2048}),
        Shape({33, 64}), Shape({5, 512}), Shape({3, 4096}), Shape({2, 8192}), Shape({5, 4104}), Shape({3, 20000})}) {
    for (const bool optional : {false, true}) {
      for (testing::OperatorCase one : {forward_case(shape, optional), backward_case(shape, optional)}) {
        one.dtypes = {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};
        EXPECT_EQ(testing::check_conformance(one, coverage), "");
      }
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(LayerNorm, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Shape shape({4, 9});
  const Tensor x = testing::random_normal(shape, DType::f64, 1), dy = testing::random_normal(shape, DType::f64, 4);
  const Tensor weight = testing::random_normal({9}, DType::f64, 3), bias = testing::random_normal({9}, DType::f64, 5);
  const Tensor y = Tensor::empty(shape, DType::f64), dx = Tensor::empty(shape, DType::f64);
  const Tensor mean = Tensor::empty({4}, DType::f64), rstd = Tensor::empty({4}, DType::f64);
  const Tensor dweight = Tensor::zeros({9}, DType::f64);
  const auto loss = [&] {
    forward(context, {x, weight, bias}, {y, mean, rstd}, kEpsilon);
    return testing::dot(y, dy);
  };
  loss();
  backward(context, x, weight, mean, rstd, dy, dx, false, dweight);
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
  EXPECT_EQ(testing::check_gradient("dweight", weight, dweight, loss), "");
}

TEST(LayerNorm, AMeanFarFromZeroCostsNoDigits) {
  Context context;
  const Shape shape({3, 77});
  const Tensor x = testing::random_normal(shape, DType::f32, 1, 1.0, 1000.0);
  const Tensor weight = testing::random_normal({77}, DType::f32, 2), bias = testing::random_normal({77}, DType::f32, 3);
  const Tensor y = Tensor::empty(shape, DType::f32), expected = Tensor::empty(shape, DType::f32);
  forward(context, {x, weight, bias}, {y, {}, {}}, kEpsilon);
  context.force_implementation("reference");
  forward(context, {x, weight, bias}, {expected, {}, {}}, kEpsilon);
  // The mean of 1000 is rounded to 2^-15: what is left has 15 bits behind the point.
  EXPECT_EQ(testing::check_close("y", y, expected, 0x1p-13), "");
}

TEST(LayerNorm, WorksInPlace) {
  Context context;
  const Shape shape({5, 70});
  const Tensor x = testing::random_normal(shape, DType::f32, 1), dy = testing::random_normal(shape, DType::f32, 3);
  const Tensor weight = testing::random_normal({70}, DType::f32, 2), bias = testing::random_normal({70}, DType::f32, 3);
  const Tensor y = Tensor::empty(shape, DType::f32), dx = Tensor::empty(shape, DType::f32);
  const Tensor mean = Tensor::empty({5}, DType::f32), rstd = Tensor::empty({5}, DType::f32);
  const Tensor dweight = Tensor::zeros({70}, DType::f32);
  forward(context, {x, weight, bias}, {y, mean, rstd}, kEpsilon);
  backward(context, x, weight, mean, rstd, dy, dx, false, dweight);
  backward(context, x, weight, mean, rstd, dy, dy, false, dweight);
  EXPECT_TRUE(testing::same_bits(dy, dx));
  forward(context, {x, weight, bias}, {x, mean, rstd}, kEpsilon);
  EXPECT_TRUE(testing::same_bits(x, y));
}

TEST(LayerNorm, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({4, 6}, DType::f32), y = Tensor::zeros({4, 6}, DType::f32);
  const Tensor weight = Tensor::zeros({6}, DType::f32), wrong = Tensor::zeros({5}, DType::f32);
  const auto error = [&](const Inputs& inputs, const Outputs& outputs) {
    return testing::error_of([&] { forward(context, inputs, outputs, kEpsilon); });
  };
  EXPECT_EQ(error({x, weight, weight}, {y, {}, {}}), "no error");
  EXPECT_EQ(error({x, wrong, weight}, {y, {}, {}}),
            "layer_norm: weight has shape [5]; expected [6] (as x's last dimension)");
  EXPECT_EQ(error({x, weight, {}}, {y, {}, {}}), "layer_norm: bias is absent; expected a tensor");
  EXPECT_EQ(error({x, weight, weight}, {y, wrong, {}}), "layer_norm: mean is present; expected none without rstd");
  EXPECT_EQ(testing::error_of([&] { backward(context, x, weight, wrong, wrong, y, y, false, weight); }),
            "layer_norm: mean has shape [5]; expected [4] (as x's rows)");
}

}  // namespace
}  // namespace flashgla::ops::layer_norm

#include <gtest/gtest.h>

#include "flashgla/ops/rms_norm/implementations.h"
#include "flashgla/ops/rms_norm/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::rms_norm {
namespace {

TEST(RmsNorm, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  // With rows of one, two and four vectors a thread on a GPU, rows too long to be held, and a row's end inside a
  // vector.
  for (const Shape& shape : {Shape({1, 1}), Shape({3, 65}), Shape({2, 5, 128}), Shape({700, 33}), Shape({0, 8}),
                             Shape({1, 1003}), Shape({9, 2048}), Shape({33, 64}), Shape({5, 512}), Shape({3, 4096}),
                             Shape({2, 8192}), Shape({5, 4104}), Shape({3, 20000})}) {
    for (const bool optional : {false, true}) {
      for (testing::OperatorCase one : {forward_case(shape, optional), backward_case(shape, optional)}) {
        one.dtypes = {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};
        EXPECT_EQ(testing::check_conformance(one, coverage), "");
      }
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(RmsNorm, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Shape shape({4, 9});
  const Tensor x = testing::random_normal(shape, DType::f64, 1);
  const Tensor weight = testing::random_normal({9}, DType::f64, 3), dy = testing::random_normal(shape, DType::f64, 4);
  const Tensor y = Tensor::empty(shape, DType::f64), dx = Tensor::empty(shape, DType::f64);
  const Tensor rstd = Tensor::empty({4}, DType::f64);
  const Tensor dweight = Tensor::zeros({9}, DType::f64);
  auto loss = [&] {
    forward(context, {x, weight}, {y, rstd}, kEpsilon);
    return testing::dot(y, dy);
  };
  loss();
  backward(context, x, weight, rstd, dy, dx, false, dweight);
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
  EXPECT_EQ(testing::check_gradient("dweight", weight, dweight, loss), "");
}

TEST(RmsNorm, WorksInPlace) {
  Context context;
  const Shape shape({5, 70});
  const Tensor x = testing::random_normal(shape, DType::f32, 1), dy = testing::random_normal(shape, DType::f32, 3);
  const Tensor y = Tensor::empty(shape, DType::f32), dx = Tensor::empty(shape, DType::f32);
  const Tensor rstd = Tensor::empty({5}, DType::f32);
  forward(context, {x, {}}, {y, rstd}, kEpsilon);
  backward(context, x, {}, rstd, dy, dx, false, {});
  backward(context, x, {}, rstd, dy, dy, false, {});
  EXPECT_TRUE(testing::same_bits(dy, dx));
  forward(context, {x, {}}, {x, rstd}, kEpsilon);
  EXPECT_TRUE(testing::same_bits(x, y));
}

TEST(RmsNorm, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({4, 6}, DType::f32), y = Tensor::zeros({4, 6}, DType::f32);
  const Tensor wrong = Tensor::zeros({5}, DType::f32);
  auto error = [&](const Inputs& inputs, const Outputs& outputs) {
    return testing::error_of([&] { forward(context, inputs, outputs, kEpsilon); });
  };
  EXPECT_EQ(error({x, {}}, {y, {}}), "no error");
  EXPECT_EQ(error({x, wrong}, {y, {}}), "rms_norm: weight has shape [5]; expected [6] (as x's last dimension)");
  EXPECT_EQ(error({x, {}}, {y, wrong}), "rms_norm: rstd has shape [5]; expected [4] (as x's rows)");
  EXPECT_EQ(testing::error_of([&] { backward(context, x, {}, {}, y, y, false, {}); }),
            "rms_norm: rstd is absent; expected forward's");
}

}  // namespace
}  // namespace flashgla::ops::rms_norm

#include <gtest/gtest.h>

#include "flashgla/ops/rms_norm_swish_gate/implementations.h"
#include "flashgla/ops/rms_norm_swish_gate/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::rms_norm_swish_gate {
namespace {

TEST(RmsNormSwishGate, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  // As for rms_norm.
  for (const Shape& shape : {Shape({1, 1}), Shape({3, 65}), Shape({2, 5, 3, 128}), Shape({700, 33}), Shape({0, 8}),
                             Shape({1, 1003}), Shape({9, 2048}), Shape({33, 64}), Shape({5, 512}), Shape({3, 4096}),
                             Shape({2, 8192}), Shape({5, 4104}), Shape({3, 20000})}) {
    for (const bool weighted : {false, true}) {
      for (testing::OperatorCase one : {forward_case(shape, weighted), backward_case(shape, weighted)}) {
        one.dtypes = {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};
        EXPECT_EQ(testing::check_conformance(one, coverage), "");
      }
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(RmsNormSwishGate, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Shape shape({2, 3, 7});
  const Tensor x = testing::random_normal(shape, DType::f64, 1), gate = testing::random_normal(shape, DType::f64, 2);
  const Tensor weight = testing::random_normal({7}, DType::f64, 3), dy = testing::random_normal(shape, DType::f64, 4);
  const Tensor y = Tensor::empty(shape, DType::f64), rstd = Tensor::empty({6}, DType::f64);
  const Tensor dx = Tensor::empty(shape, DType::f64), dgate = Tensor::empty(shape, DType::f64);
  const Tensor dweight = Tensor::zeros({7}, DType::f64);
  auto loss = [&] {
    forward(context, x, gate, weight, y, rstd, kEpsilon);
    return testing::dot(y, dy);
  };
  loss();
  backward(context, x, gate, weight, rstd, dy, dx, dgate, dweight);
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
  EXPECT_EQ(testing::check_gradient("dgate", gate, dgate, loss), "");
  EXPECT_EQ(testing::check_gradient("dweight", weight, dweight, loss), "");
}

TEST(RmsNormSwishGate, HeadsOfAPackedProjectionAndInPlace) {
  Context context;
  const Tensor packed = testing::random_normal({2, 5, 3 * 64 * 2}, DType::f32, 1);
  const TensorView gate = packed.view().slice(2, 192, 384).split_last(3);  // [2,5,3,64], strided
  const Tensor x = testing::random_normal({2, 5, 3, 64}, DType::f32, 2),
               dy = testing::random_normal(x->shape, DType::f32, 3);
  const Tensor y = Tensor::empty(x->shape, DType::f32), expected = Tensor::empty(x->shape, DType::f32);
  const Tensor rstd = Tensor::empty({30}, DType::f32), dense = testing::converted(gate, DType::f32);
  forward(context, x, gate, {}, y, rstd, kEpsilon);
  forward(context, x, dense, {}, expected, rstd, kEpsilon);
  EXPECT_TRUE(testing::same_bits(y, expected));
  const Tensor dx = Tensor::empty(x->shape, DType::f32), dgate = Tensor::empty(x->shape, DType::f32);
  backward(context, x, gate, {}, rstd, dy, dx, dgate, {});
  backward(context, x, gate, {}, rstd, dy, dy, gate, {});
  EXPECT_TRUE(testing::same_bits(dy, dx));
  EXPECT_TRUE(testing::same_bits(gate, dgate));
}

TEST(RmsNormSwishGate, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({4, 6}, DType::f32), wrong = Tensor::zeros({4, 5}, DType::f32);
  auto error = [&](const TensorView& gate, const TensorView& weight, const TensorView& rstd) {
    return testing::error_of([&] { forward(context, x, gate, weight, x, rstd, kEpsilon); });
  };
  EXPECT_EQ(error(x, {}, {}), "no error");
  EXPECT_EQ(error(wrong, {}, {}), "rms_norm_swish_gate: gate has shape [4,5]; expected [4,6] (as x)");
  EXPECT_EQ(error(x, x, {}), "rms_norm_swish_gate: weight has shape [4,6]; expected [6] (as x's last dimension)");
  EXPECT_EQ(error(x, {}, x), "rms_norm_swish_gate: rstd has shape [4,6]; expected [4] (as x's rows)");
}

}  // namespace
}  // namespace flashgla::ops::rms_norm_swish_gate

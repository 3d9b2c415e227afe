#include <gtest/gtest.h>

#include "flashgla/ops/elementwise/implementations.h"
#include "flashgla/ops/elementwise/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::elementwise {
namespace {

TEST(Elementwise, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Shape& shape :
       {Shape({1, 1}), Shape({7, 65}), Shape({2, 3, 33}), Shape({700, 30}), Shape({2, 20000}), Shape({0, 4})}) {
    for (const bool narrow : {false, true}) {
      for (const testing::OperatorCase& one : cases_of(shape, narrow)) {
        EXPECT_EQ(testing::check_conformance(one, coverage), "");
      }
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(Elementwise, ZeroReachesEveryByteOfAnyDtypeAndNoOther) {
  Context context;
  const Tensor tokens = Tensor::empty({3, 8}, DType::i32);
  testing::poison(tokens);
  zero(context, tokens.view().slice(1, 0, 5));
  for (int i = 0; i < 24; ++i) EXPECT_EQ(tokens.as<std::int32_t>()[i] == 0, i % 8 < 5) << i;
}

TEST(Elementwise, SiluGradientAgreesWithFiniteDifferences) {
  Context context;
  const Shape shape({3, 8});
  const Tensor x = testing::random_normal(shape, DType::f64, 1, 2.0), dy = testing::random_normal(shape, DType::f64, 2);
  const Tensor y = Tensor::empty(shape, DType::f64), dx = Tensor::empty(shape, DType::f64);
  silu_backward(context, x, dy, dx);
  auto loss = [&] {
    silu_forward(context, x, y);
    return testing::dot(y, dy);
  };
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
}

TEST(Elementwise, GradientsOfSquaredReluAndSigmoidGateAgreeWithFiniteDifferences) {
  Context context;
  const Shape shape({3, 8});
  const Tensor x = testing::random_normal(shape, DType::f64, 1), dy = testing::random_normal(shape, DType::f64, 2),
               gate = testing::random_normal(shape, DType::f64, 3, 2.0);
  const Tensor y = Tensor::empty(shape, DType::f64), dx = Tensor::empty(shape, DType::f64),
               dgate = Tensor::empty(shape, DType::f64);
  squared_relu_backward(context, x, dy, dx);
  EXPECT_EQ(testing::check_gradient("dx", x, dx,
                                    [&] {
                                      squared_relu_forward(context, x, y);
                                      return testing::dot(y, dy);
                                    }),
            "");
  sigmoid_gate_backward(context, gate, x, dy, dgate, dx);
  const auto gated = [&] {
    sigmoid_gate_forward(context, gate, x, y);
    return testing::dot(y, dy);
  };
  EXPECT_EQ(testing::check_gradient("dx", x, dx, gated), "");
  EXPECT_EQ(testing::check_gradient("dgate", gate, dgate, gated), "");
}

TEST(Elementwise, RefusesBadArgumentsByName) {
  Context context;
  const Tensor a = Tensor::zeros({4, 6}, DType::f32), b = Tensor::zeros({4, 5}, DType::f32);
  const Tensor half = Tensor::zeros({4, 6}, DType::bf16), tokens = Tensor::zeros({4, 6}, DType::i32);
  EXPECT_EQ(testing::error_of([&] { add(context, half, a); }), "no error");
  EXPECT_EQ(testing::error_of([&] { add(context, a, half); }), "add: y has dtype bf16; expected f32");
  EXPECT_EQ(testing::error_of([&] { add_to(context, a, b, a); }), "add_to: b has shape [4,5]; expected [4,6] (as a)");
  EXPECT_EQ(testing::error_of([&] { scale(context, tokens, 2.0); }),
            "scale: x has dtype i32; expected f64 or f32 or bf16 or f16");
  EXPECT_EQ(testing::error_of([&] { column_sum(context, a, b, true); }),
            "column_sum: db has shape [4,5]; expected [6] (as dy's last dimension)");
}

}  // namespace
}  // namespace flashgla::ops::elementwise

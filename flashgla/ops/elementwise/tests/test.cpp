#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

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

// As many rows as make the CUDA kernel announce its sums, which it marks by a NaN; small whole numbers, so that no sum
// is rounded.
TEST(Elementwise, ColumnSumOfManyRowsIsExactAndKeepsNaN) {
  constexpr int kRows = 16640, kColumns = 1040, kNoNumber = 5;
  const Tensor wide = Tensor::empty({kRows, kColumns}, DType::f32),
               narrow = Tensor::empty({kRows, kColumns}, DType::bf16);
  std::vector<float> expected(kColumns);
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      const float value = static_cast<float>((7 * row + 3 * column) % 9 - 4);
      wide.as<float>()[row * kColumns + column] = value;
      expected[static_cast<std::size_t>(column)] += value;
    }
  }
  constexpr std::uint32_t kSignalling = 0x7f800001u;
  std::memcpy(wide.as<float>() + kNoNumber, &kSignalling, sizeof(kSignalling));
  Context host;
  convert(host, wide, narrow);
  for (const Device device : testing::test_devices()) {
    for (const Tensor& dy : {wide, narrow}) {
      const Tensor on_device = testing::copied_to(dy, device), db = Tensor::empty({kColumns}, DType::f32, device);
      Context context(device);
      context.scratch().begin_planning();
      column_sum(context, on_device, db, false);
      context.scratch().commit_plan();
      column_sum(context, on_device, db, false);
      column_sum(context, on_device, db, true);
      context.queue().synchronize();
      const Tensor sums = testing::copied_to(db, Device::cpu());
      for (int column = 0; column < kColumns; ++column) {
        const float sum = sums.as<float>()[column];
        if (column == kNoNumber) {
          EXPECT_TRUE(std::isnan(sum));
        } else {
          EXPECT_EQ(sum, 2.0f * expected[static_cast<std::size_t>(column)]) << column;
        }
      }
    }
  }
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

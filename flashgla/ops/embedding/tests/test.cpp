#include <gtest/gtest.h>

#include "flashgla/ops/embedding/implementations.h"
#include "flashgla/ops/embedding/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::embedding {
namespace {

constexpr std::int64_t kWords = 11;

TEST(Embedding, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Shape& shape : {Shape({1, 1}), Shape({40, 65}), Shape({2, 13, 200}), Shape({0, 8})}) {
    testing::OperatorCase lookup = forward_case(shape, kWords);
    lookup.dtypes = {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::f32, DType::bf16}};
    EXPECT_EQ(testing::check_conformance(lookup, coverage), "");
    EXPECT_EQ(testing::check_conformance(backward_case(shape, kWords), coverage), "");
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(Embedding, GradientAgreesWithFiniteDifferences) {
  Context context;
  const Tensor tokens = Tensor::empty({30}, DType::i32), table = testing::random_normal({kWords, 3}, DType::f64, 1);
  fill_tokens(tokens, kWords);
  const Tensor dy = testing::random_normal({30, 3}, DType::f64, 2), y = Tensor::empty({30, 3}, DType::f64);
  const Tensor dtable = Tensor::zeros({kWords, 3}, DType::f64);
  backward(context, tokens, dy, dtable);
  auto loss = [&] {
    forward(context, tokens, table, y);
    return testing::dot(y, dy);
  };
  EXPECT_EQ(testing::check_gradient("dtable", table, dtable, loss), "");
}

TEST(Embedding, RefusesBadArgumentsByName) {
  Context context;
  const Tensor tokens = Tensor::zeros({2, 3}, DType::i32), table = Tensor::zeros({5, 4}, DType::f32);
  const Tensor y = Tensor::zeros({2, 3, 4}, DType::f32), narrow = Tensor::zeros({2, 3, 2}, DType::f32);
  auto error = [&](const TensorView& out) { return testing::error_of([&] { forward(context, tokens, table, out); }); };
  EXPECT_EQ(error(y), "no error");
  EXPECT_EQ(error(narrow), "embedding: y has shape [2,3,2]; expected 6 rows (as tokens) of 4 (as the table)");
  tokens.as<std::int32_t>()[4] = 5;
  EXPECT_EQ(error(y), "embedding: tokens holds 5 at position 4; expected 0 to 4");
  tokens.as<std::int32_t>()[4] = -1;
  EXPECT_EQ(error(y), "embedding: tokens holds -1 at position 4; expected 0 to 4");
}

}  // namespace
}  // namespace flashgla::ops::embedding

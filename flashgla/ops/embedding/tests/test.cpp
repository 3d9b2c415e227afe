#include <gtest/gtest.h>

#include <cmath>

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

TEST(Embedding, AgreesWithTheReferenceWhereOneTokenFillsManyRows) {
  testing::Coverage coverage(implementations());
  for (const std::int64_t words : {1, 3, 90}) {  // of 1000 rows: segments of all lengths, within blocks and over them
    testing::OperatorCase one = backward_case({1000, 72}, words);
    one.arguments[0].fill = [=](const TensorView& view) {
      for (std::int64_t i = 0; i < view.numel(); ++i) {
        view.as<std::int32_t>()[i] = static_cast<std::int32_t>(i % 3 == 0 ? i * i % words : (i / 70) % words);
      }
    };
    EXPECT_EQ(testing::check_conformance(one, coverage), "");
  }
}

TEST(Embedding, AgreesWithTheReferenceForLongListsAndVocabularies) {
  testing::Coverage coverage(implementations());
  EXPECT_EQ(testing::check_conformance(backward_case({20000, 4}, 300), coverage), "");
  EXPECT_EQ(testing::check_conformance(backward_case({9001, 3}, 40000), coverage), "");
  EXPECT_EQ(testing::check_conformance(backward_case({700, 5}, 140001), coverage), "");
  EXPECT_EQ(testing::check_conformance(backward_case({40000, 4}, 2), coverage), "");  // a token over 1250 blocks
}

TEST(Embedding, BadTokensOnCudaAreNotedAndTouchNothing) {
  for (const Device device : testing::test_devices()) {
    if (device.kind == Device::Kind::cpu) continue;
    Context context(device);
    const Tensor tokens = Tensor::zeros({200}, DType::i32), flag = Tensor::zeros({1}, DType::i32, device);
    tokens.as<std::int32_t>()[170] = kWords;
    tokens.as<std::int32_t>()[55] = -7;
    const Tensor there = testing::copied_to(tokens, device), y = Tensor::zeros({200, 24}, DType::f32, device);
    const Tensor table = testing::copied_to(testing::random_normal({kWords, 24}, DType::f32, 1), device);
    const Tensor dtable = Tensor::zeros({kWords, 24}, DType::f32, device);
    auto noted = [&] {
      context.queue().synchronize();
      return testing::copied_to(flag, Device::cpu()).as<std::int32_t>()[0];
    };
    forward(context, there, table, y, flag);
    EXPECT_EQ(noted(), 56);
    forward(context, there, table, y);  // no flag, no harm
    const Tensor rows = testing::copied_to(y, Device::cpu());
    EXPECT_TRUE(std::isnan(rows.as<float>()[55 * 24]) && std::isnan(rows.as<float>()[170 * 24 + 23]));
    EXPECT_FALSE(std::isnan(rows.as<float>()[54 * 24 + 23]) || std::isnan(rows.as<float>()[56 * 24]));
    context.queue().zero(flag->data, flag->bytes());
    const Tensor ones = Tensor::empty({200, 24}, DType::f32);
    fill(ones, 1.0);
    backward(context, there, testing::copied_to(ones, device), dtable, flag);
    EXPECT_EQ(noted(), 56);
    const Tensor sums = testing::copied_to(dtable, Device::cpu());
    EXPECT_EQ(sums.as<float>()[0], 198.0f);
    EXPECT_EQ(sums.as<float>()[24], 0.0f);
  }
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

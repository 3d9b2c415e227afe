#include <gtest/gtest.h>

#include "flashgla/ops/token_shift/implementations.h"
#include "flashgla/ops/token_shift/tests/cases.h"
#include "testing/compare.h"
#include "testing/random.h"

namespace flashgla::ops::token_shift {
namespace {

TEST(TokenShift, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  const std::vector<Form> forms = {
      {1, 1, 1, 1},
      {2, 7, 3},
      {3, 50, 40, 2},
      {2, 16, 128, 3, {}, false},
      {1, 70, 136, 3, {0, 1, 17, 33, 33, 70}},
      {1, 45, 31, 2, {16, 45, 45}, false},
      {2, 300, 264},
      {4, 500, 2},
  };
  for (const Form& form : forms) {
    EXPECT_EQ(testing::check_conformance(forward_case(form), coverage), "");
    EXPECT_EQ(testing::check_conformance(backward_case(form), coverage), "");
  }
  for (const auto& [sequences, channels, mixes] : {std::array{1, 1, 1}, {3, 70, 3}, {2, 200, 2}}) {
    EXPECT_EQ(testing::check_conformance(step_case(sequences, channels, mixes), coverage), "");
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(TokenShift, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Form form{1, 6, 3, 2, {2, 2, 6}};
  const Tensor x = testing::random_normal(form.wide(), DType::f64, 1),
               mu = testing::random_normal(Shape({2, 3}), DType::f64, 2),
               state = testing::random_normal(Shape({3, 3}), DType::f64, 3),
               dy = testing::random_normal(form.mixed(), DType::f64, 4);
  const Tensor bounds = Tensor::zeros({4}, DType::i32), y = Tensor::empty(form.mixed(), DType::f64);
  std::copy(form.ends.begin(), form.ends.end(), bounds.as<std::int32_t>() + 1);
  const Inputs inputs{x, mu, state, bounds};
  const auto loss = [&] {
    forward(context, inputs, {y, {}});
    return testing::dot(y, dy);
  };
  const Tensor dx = Tensor::zeros(form.wide(), DType::f64), dmu = Tensor::zeros({2, 3}, DType::f64);
  backward(context, inputs, dy, {dx, dmu});
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
  EXPECT_EQ(testing::check_gradient("dmu", mu, dmu, loss), "");
}

TEST(TokenShift, RefusesBadArgumentsByName) {
  Context context;
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor x = zeros({2, 3, 8}), mu = zeros({3, 8}), y = zeros({3, 2, 3, 8}), state = zeros({2, 8});
  const auto error = [&](const Inputs& inputs, const Outputs& outputs) {
    return testing::error_of([&] { forward(context, inputs, outputs); });
  };
  EXPECT_EQ(error({x, mu, {}, {}}, {y, {}}), "no error");
  EXPECT_EQ(error({x, zeros({5, 8}), {}, {}}, {y, {}}), "token_shift: mu has shape [5,8]; expected [1 to 3,8]");
  EXPECT_EQ(error({x, mu, {}, {}}, {x, {}}),
            "token_shift: y has shape [2,3,8]; expected [3,2,3,8] (as mu's mixes, then x)");
  EXPECT_EQ(error({x, mu, mu, {}}, {y, {}}),
            "token_shift: initial_state has shape [3,8]; expected [2,8] (as sequences, channels)");
  EXPECT_EQ(error({x, mu, {}, Tensor::zeros({3}, DType::i32)}, {y, {}}),
            "token_shift: x has shape [2,3,8]; expected a batch of 1 with cu_seqlens");
}

}  // namespace
}  // namespace flashgla::ops::token_shift

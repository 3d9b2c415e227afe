#include <gtest/gtest.h>

#include "flashgla/ops/short_convolution/implementations.h"
#include "flashgla/ops/short_convolution/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::short_convolution {
namespace {

const std::vector<testing::DTypePair> kDTypes{
    {DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};

TEST(ShortConvolution, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  std::vector<Form> forms;
  for (const std::int64_t width : {2, 3, 4}) {
    forms.push_back({Shape({2, 9, 33}), width});
    forms.push_back({Shape({1, 1, 5}), width});  // shorter than the state
    forms.push_back({Shape({1, 14, 130}), width, {0, 1, 3, 3, 14}});
    forms.push_back({Shape({1, 150, 136}), width, {0, 2, 66, 67, 130, 150}});
    // Several of the CUDA kernel's chunks, the last as long as the state or one longer.
    forms.push_back({Shape({2, 259, 12}), width});
    forms.push_back({Shape({1, 644, 136}), width});
  }
  forms.push_back({Shape({3, 8, 256}), 4, {}, false});
  forms.push_back({Shape({2, 9, 33}), 4, {}, true, Activation::none});
  forms.push_back({Shape({2, 0, 7}), 4});
  for (const Form& form : std::vector<Form>(forms)) {  // of each width, both activations, packed, whole vectors
    Form biased = form;
    biased.bias = true;
    forms.push_back(biased);
  }
  for (const Form& form : forms) {
    for (testing::OperatorCase one : {forward_case(form), backward_case(form)}) {
      one.dtypes = kDTypes;
      EXPECT_EQ(testing::check_conformance(one, coverage), "");
    }
  }
  for (const std::int64_t width : {2, 3, 4}) {
    for (const Activation activation : {Activation::none, Activation::silu}) {
      testing::OperatorCase one = step_case(3, 65, width, activation, width == 4);
      one.dtypes = kDTypes;
      EXPECT_EQ(testing::check_conformance(one, coverage), "");
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(ShortConvolution, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Shape shape({1, 7, 3}), states({3, 3, 3});
  std::int32_t ends[] = {0, 4, 4, 7};
  for (const Activation activation : {Activation::none, Activation::silu}) {
    const Tensor x = testing::random_normal(shape, DType::f64, 1),
                 weight = testing::random_normal({3, 4}, DType::f64, 2);
    const Tensor initial = testing::random_normal(states, DType::f64, 3),
                 dy = testing::random_normal(shape, DType::f64, 4);
    const Tensor d_final = testing::random_normal(states, DType::f64, 5), y = Tensor::empty(shape, DType::f64);
    const Tensor final_state = Tensor::empty(states, DType::f64), dx = Tensor::empty(shape, DType::f64);
    const Tensor dweight = Tensor::zeros({3, 4}, DType::f64), d_initial = Tensor::empty(states, DType::f64);
    const Tensor bias = testing::random_normal({3}, DType::f64, 6), dbias = Tensor::zeros({3}, DType::f64);
    const Inputs inputs{x, weight, initial, {ends, Shape({4})}, bias};
    backward(context, inputs, {dy, d_final}, {dx, dweight, d_initial, dbias}, activation);
    auto loss = [&] {
      forward(context, inputs, {y, final_state}, activation);
      return testing::dot(y, dy) + testing::dot(final_state, d_final);
    };
    EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
    EXPECT_EQ(testing::check_gradient("dweight", weight, dweight, loss), "");
    EXPECT_EQ(testing::check_gradient("d_initial_state", initial, d_initial, loss), "");
    EXPECT_EQ(testing::check_gradient("dbias", bias, dbias, loss), "");
  }
}

TEST(ShortConvolution, SplitAndStepsGiveWhatTheWholeGives) {
  Context context;
  constexpr std::int64_t kLength = 11, kChannels = 40;
  const Tensor x = testing::random_normal({2, kLength, kChannels}, DType::f32, 1);
  const Tensor weight = testing::random_normal({kChannels, 4}, DType::f32, 2);
  const Tensor y = Tensor::empty(x->shape, DType::f32), state = Tensor::zeros({2, kChannels, 3}, DType::f32);
  const Tensor final_state = Tensor::empty(state->shape, DType::f32);
  forward(context, {x, weight, {}, {}}, {y, final_state}, Activation::silu);
  for (const std::int64_t split : {0, 1, 2, 7, 11}) {
    const Tensor again = Tensor::empty(x->shape, DType::f32), carried = Tensor::empty(state->shape, DType::f32);
    const Tensor last = Tensor::empty(state->shape, DType::f32);
    forward(context, {x.view().slice(1, 0, split), weight, {}, {}}, {again.view().slice(1, 0, split), carried},
            Activation::silu);
    forward(context, {x.view().slice(1, split, kLength), weight, carried, {}},
            {again.view().slice(1, split, kLength), last}, Activation::silu);
    EXPECT_TRUE(testing::same_bits(again, y)) << split;
    EXPECT_TRUE(testing::same_bits(last, final_state)) << split;
  }
  for (std::int64_t t = 0; t < kLength; ++t) {
    const Tensor out = Tensor::empty({2, kChannels}, DType::f32);
    step(context, x.view().select(1, t), weight, state, out, Activation::silu);
    EXPECT_EQ(testing::check_close("step", out, y.view().select(1, t), 1e-6), "");
  }
  EXPECT_TRUE(testing::same_bits(state, final_state));
}

TEST(ShortConvolution, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({1, 5, 6}, DType::f32), y = Tensor::zeros({1, 5, 6}, DType::f32);
  const Tensor weight = Tensor::zeros({6, 4}, DType::f32), wide = Tensor::zeros({6, 5}, DType::f32);
  std::int32_t good[] = {0, 2, 5}, falling[] = {0, 4, 2, 5}, short_one[] = {0, 2, 4};
  auto error = [&](const TensorView& w, const TensorView& state, const TensorView& cu_seqlens) {
    return testing::error_of([&] { forward(context, {x, w, state, cu_seqlens}, {y, {}}, Activation::none); });
  };
  EXPECT_EQ(error(weight, {}, {good, Shape({3})}), "no error");
  EXPECT_EQ(error(wide, {}, {}),
            "short_convolution: weight has shape [6,5]; expected [6,W] (as x's last dimension), W from 2 to 4");
  EXPECT_EQ(error(weight, weight, {}),
            "short_convolution: initial_state has shape [6,4]; expected [1,6,3] (as sequences, channels, width - 1)");
  EXPECT_EQ(error(weight, {}, {falling, Shape({4})}),
            "short_convolution: cu_seqlens holds 2 at position 2; expected no less than the one before");
  EXPECT_EQ(error(weight, {}, {short_one, Shape({3})}),
            "short_convolution: cu_seqlens holds 4 at position 2; expected 5 (x's length)");
  const Tensor dweight = Tensor::zeros({6, 4}, DType::f32), bias = Tensor::zeros({6}, DType::f32);
  const auto gradients = [&](const TensorView& of, const TensorView& dbias) {
    const Inputs inputs{x, weight, {}, {}, of};
    return testing::error_of([&] { backward(context, inputs, {x, {}}, {y, dweight, {}, dbias}, Activation::none); });
  };
  EXPECT_EQ(gradients(bias, bias), "no error");
  EXPECT_EQ(gradients(weight, bias), "short_convolution: bias has shape [6,4]; expected [6] (as x's channels)");
  EXPECT_EQ(gradients(bias, {}), "short_convolution: dbias is absent; expected a tensor");
  EXPECT_EQ(gradients({}, bias), "short_convolution: dbias is present; expected none without a bias");
}

}  // namespace
}  // namespace flashgla::ops::short_convolution

#include <gtest/gtest.h>

#include "flashgla/base/memory.h"
#include "flashgla/ops/long_convolution/implementations.h"
#include "flashgla/ops/long_convolution/tests/cases.h"
#include "testing/compare.h"
#include "testing/random.h"

namespace flashgla::ops::long_convolution {
namespace {

TEST(LongConvolution, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  std::vector<Form> forms = {
      {1, 1, 1},
      {2, 7, 3},
      {3, 50, 40},
      {2, 400, 17},  // by transforms from here on
      {1, 700, 5},
      {2, 300, 9, {500, 0}},
      {1, 800, 10, {}, {0, 350, 367, 367, 800}},
      {1, 600, 18, {5, 300, 0, 8}, {300, 300, 310, 600}},
      {2, 9, 21, {200, 3}},
      {1, 1400, 10, {}, {0, 350, 367, 367, 1400}},  // on a GPU, sequences of both ways in a call
      {3, 1100, 6},
      {2, 300, 5, {3000, 20}},
      {33, 2100, 1},  // 69,300 products in the skip's gradient, which cancel to 3e-4 of their magnitudes' sum
      {1, 9000, 3},
  };
  if (cuda_device_count() > 0) {
    // On a GPU: in whole rows, with several sequences a block; more than its transform, up to 4, 16 or more blocks.
    forms.insert(forms.end(),
                 {{3, 1100, 16}, {18, 520, 8}, {2, 2048, 35}, {3, 1104, 24}, {18, 528, 16}, {2, 2048, 16}});
    forms.insert(forms.end(), {{1, 4500, 3}, {2, 2300, 24}, {1, 2300, 72}, {1, 33000, 1}});
    // Whole sequences of each size, one or several, in whole pieces and not, of more than are summed at once, behind
    // tokens.
    forms.insert(forms.end(), {{3, 4200, 8}, {1, 8300, 8}, {3, 8300, 1}, {1, 16400, 1}, {2, 16400, 1}});
    forms.insert(forms.end(), {{1, 2100, 330}});  // more groups of channels than leave at once
    // Those that two blocks share: channels of half a cluster, a tail of a span, all tokens, several sequences a block.
    forms.insert(forms.end(), {{3, 2080, 24}, {3, 3008, 8}, {3, 4096, 16}, {35, 2080, 8}});
    forms.insert(forms.end(), {{2, 300, 5, {9000, 8500}}, {2, 500, 3, {16100, 100}}});
  }
  for (const Form& form : forms) {
    EXPECT_EQ(testing::check_conformance(forward_case(form), coverage), "");
    for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
      EXPECT_EQ(testing::check_conformance(backward_case(form, dtypes), coverage), "");
    }
    if (cuda_device_count() > 0 && form.narrow_spectra()) {  // may keep what backward reads
      EXPECT_EQ(testing::check_conformance(backward_case(form, {DType::bf16, DType::bf16}, true), coverage), "");
    }
  }
  EXPECT_EQ(testing::check_conformance(step_case(1, {0}), coverage), "");
  EXPECT_EQ(testing::check_conformance(step_case(37, {30, 0, 1000}), coverage), "");
  EXPECT_EQ(coverage.missing(), "");
}

// bf16 on a GPU is computed in f16, by scales of its own.
TEST(LongConvolution, NumbersBeyondTheRangeOfF16) {
  testing::Coverage coverage(implementations());
  for (const double size : {1e-9, 1e12}) {
    for (const Form& form : {Form{2, 600, 24}, Form{2, 608, 32}, Form{1, 2500, 5}, Form{1, 2100, 32}, Form{2, 2100, 16},
                             Form{3, 2528, 16}}) {
      std::vector<testing::OperatorCase> cases = {forward_case(form), backward_case(form, {DType::f32, DType::f32}),
                                                  backward_case(form, {DType::bf16, DType::bf16})};
      if (cuda_device_count() > 0) cases.push_back(backward_case(form, {DType::bf16, DType::bf16}, true));
      for (testing::OperatorCase& each : cases) {
        for (testing::Argument& argument : each.arguments) {
          if (argument.name == "x" || argument.name == "dy") argument.deviation *= size;
          if (argument.name == "filter") argument.deviation *= 1e-7;
          if (argument.name == "skip") argument.deviation = 1e-7;
        }
        EXPECT_EQ(testing::check_conformance(each, coverage), "");
      }
    }
  }
}

TEST(LongConvolution, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Form form{1, 6, 3, {4, 0, 1}, {2, 2, 6}};
  const auto random = [](const Shape& shape, std::uint64_t seed) {
    return testing::random_normal(shape, DType::f64, seed);
  };
  const Tensor x = random(form.wide(), 1), filter = random(form.filter(), 2), skip = random(Shape({3}), 3),
               past = random(Shape({3, 6, 3}), 4), dy = random(form.wide(), 5);
  const Tensor bounds = Tensor::zeros({4}, DType::i32), positions = Tensor::zeros({3}, DType::i32);
  std::copy(form.ends.begin(), form.ends.end(), bounds.as<std::int32_t>() + 1);
  std::copy(form.past.begin(), form.past.end(), positions.as<std::int32_t>());
  const Tensor y = Tensor::empty(form.wide(), DType::f64);
  const Inputs inputs{x, filter, skip, past, positions, bounds};
  const auto loss = [&] {
    forward(context, inputs, {y, {}});
    return testing::dot(y, dy);
  };
  const Tensor dx = Tensor::zeros(form.wide(), DType::f64), dfilter = Tensor::zeros(form.filter(), DType::f64),
               dskip = Tensor::zeros({3}, DType::f64);
  backward(context, inputs, {}, dy, {dx, dfilter, dskip});
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
  EXPECT_EQ(testing::check_gradient("dfilter", filter, dfilter, loss), "");
  EXPECT_EQ(testing::check_gradient("dskip", skip, dskip, loss), "");
}

TEST(LongConvolution, RefusesBadArgumentsByName) {
  Context context;
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor x = zeros({2, 3, 8}), filter = zeros({3, 8}), skip = zeros({8}), y = zeros({2, 3, 8});
  const auto error = [&](const Inputs& inputs) {
    return testing::error_of([&] { forward(context, inputs, {y, {}}); });
  };
  EXPECT_EQ(error({x, filter, skip, {}, {}, {}}), "no error");
  EXPECT_EQ(error({x, zeros({2, 8}), skip, {}, {}, {}}),
            "long_convolution: filter has 2 rows; expected at least the 3 tokens of sequence 0");
  EXPECT_EQ(error({x, skip, skip, {}, {}, {}}), "long_convolution: filter has shape [8]; expected [L,8]");
  EXPECT_EQ(error({x, filter, filter, {}, {}, {}}),
            "long_convolution: skip has shape [3,8]; expected [8] (as x's channels)");
  EXPECT_EQ(error({x, filter, skip, y, {}, {}}).substr(0, 32), "long_convolution: positions is a");
  const auto kept = [&] { forward(context, {x, filter, skip, {}, {}, {}}, {y, Tensor::zeros({3}, DType::u8)}); };
  EXPECT_EQ(testing::error_of(kept), "long_convolution: kept has shape [3]; expected [0] (as kept_bytes)");
}

}  // namespace
}  // namespace flashgla::ops::long_convolution

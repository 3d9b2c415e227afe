#include <gtest/gtest.h>

#include <cmath>

#include "flashgla/base/names.h"
#include "flashgla/ops/cross_entropy/implementations.h"
#include "flashgla/ops/cross_entropy/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::ops::cross_entropy {
namespace {

TEST(CrossEntropy, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  struct Size {
    std::int64_t rows, length, words;
  };
  for (const Size size : {Size{1, 3, 1}, Size{7, 16, 65}, Size{40, 33, 256}, Size{5, 8, 2003}, Size{0, 4, 9}}) {
    for (const bool backward : {false, true}) {
      for (const testing::DTypePair dtypes :
           {testing::DTypePair{DType::f32, DType::f32}, testing::DTypePair{DType::bf16, DType::bf16},
            testing::DTypePair{DType::f32, DType::bf16}}) {
        EXPECT_EQ(testing::check_conformance(head_case(size.rows, size.length, size.words, backward, dtypes), coverage),
                  "");
      }
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(CrossEntropy, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Tensor x = testing::random_normal({6, 5}, DType::f64, 1),
               weight = testing::random_normal({9, 5}, DType::f64, 2);
  const Tensor targets = Tensor::empty({6}, DType::i32), losses = Tensor::empty({6}, DType::f64);
  targets_of(6, 9).fill(targets);
  const Tensor dx = Tensor::empty({6, 5}, DType::f64), dweight = Tensor::zeros({9, 5}, DType::f64);
  const Tensor ones = Tensor::empty({6}, DType::f64);
  fill(ones, 1.0);
  const Inputs inputs{x, weight, targets};
  forward_backward(context, inputs, losses, dx, dweight, 1.0);
  auto loss = [&] {
    forward(context, inputs, losses);
    return testing::dot(losses, ones);
  };
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
  EXPECT_EQ(testing::check_gradient("dweight", weight, dweight, loss), "");
}

TEST(CrossEntropy, PiecesOfRowsGiveWhatTheWholeGives) {
  constexpr std::int64_t kRows = 1300, kLength = 4, kWords = 40000;  // pieces of 384 rows
  Context context;
  const Tensor x = testing::random_normal({kRows, kLength}, DType::f32, 1);
  const Tensor weight = testing::random_normal({kWords, kLength}, DType::f32, 2);
  const Tensor targets = Tensor::empty({kRows}, DType::i32), losses = Tensor::empty({kRows}, DType::f32);
  targets_of(kRows, kWords).fill(targets);
  testing::poison(losses);
  const Tensor dx = Tensor::empty({kRows, kLength}, DType::f32), dweight = Tensor::zeros({kWords, kLength}, DType::f32);
  testing::poison(dx);
  forward_backward(context, {x, weight, targets}, losses, dx, dweight, 1.0);
  // No more than 64 MiB of logits, and little beside them.
  EXPECT_LE(context.scratch().peak(), std::size_t{80} << 20);
  const Tensor x64 = testing::converted(x, DType::f64), weight64 = testing::converted(weight, DType::f64);
  const double relative = std::sqrt(static_cast<double>(kWords)) * epsilon(DType::f32);  // dx sums over the words
  for (const std::int64_t row : {0, 3, 383, 384, 1299}) {                                // rows 3 and 383 are ignored
    const Tensor one = Tensor::empty({1}, DType::f64), one_dx = Tensor::empty({1, kLength}, DType::f64);
    forward_backward(context, {x64.view().slice(0, row, row + 1), weight64, targets.view().slice(0, row, row + 1)}, one,
                     one_dx, {}, 1.0);
    EXPECT_EQ(testing::check_close("loss", losses.view().slice(0, row, row + 1), one, 1e-5), "");
    EXPECT_EQ(testing::check_close("dx", dx.view().slice(0, row, row + 1), one_dx, relative), "");
  }
  EXPECT_TRUE(std::isfinite(testing::dot(dweight, dweight)));
  EXPECT_GT(testing::dot(dweight, dweight), 0.0);
}

TEST(CrossEntropy, LargeLogitsStayFinite) {
  Context context;
  float x[] = {1e4f}, w[] = {1.0f, -1.0f, 0.0f}, loss[1], dx[1];
  std::int32_t target[] = {1};
  forward_backward(context, {{x, {1, 1}}, {w, {3, 1}}, {target, Shape({1})}}, {loss, Shape({1})}, {dx, {1, 1}}, {},
                   1.0);
  EXPECT_EQ(loss[0], 2e4f);
  EXPECT_EQ(dx[0], 2.0f);
}

TEST(CrossEntropy, RowsOfAnyLength) {
  testing::Coverage coverage(implementations());
  // Kernels that keep 1, 2, 4 and 8 vectors a thread, and none.
  for (const std::int64_t words : {1000, 2055, 4096, 9001, 33000, 70001}) {
    for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
      EXPECT_EQ(testing::check_conformance(head_case(9, 8, words, true, dtypes), coverage), "");
    }
  }
}

// Weights of whole numbers, so that every device has the same logits: row r's are those of the words' weights times 1.
TEST(CrossEntropy, HitsAreTargetsAboveAllOthers) {
  for (const Device device : testing::test_devices()) {
    for (const auto& [dtype, words] : {std::pair{DType::f32, 7},
                                       {DType::f32, 9001},
                                       {DType::f32, 70001},
                                       {DType::bf16, 7},
                                       {DType::bf16, 33000},
                                       {DType::f64, 40}}) {
      if (dtype == DType::f64 && device.kind == Device::Kind::cuda) continue;
      SCOPED_TRACE(name_of(device) + " " + name_of(dtype) + " " + std::to_string(words));
      Context context(device);
      const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
      const Tensor x = Tensor::zeros({5, 8}, DType::f32), weight = Tensor::zeros({words, 8}, DType::f32);
      const Tensor targets = Tensor::zeros({5}, DType::i32);
      for (std::int64_t r = 0; r < 4; ++r) x.as<float>()[r * 8] = r == 3 ? -1.0f : 1.0f;
      for (std::int64_t v = 0; v < words; ++v) weight.as<float>()[v * 8] = static_cast<float>(v % 5);
      weight.as<float>()[(words - 2) * 8] = 9.0f;  // the only one
      // The largest, the second, ignored, smallest by far (as the row is negated); the last row has equal logits.
      const std::int32_t wanted[] = {words - 2, 4, -1, words - 2, 0};
      std::copy_n(wanted, 5, targets.as<std::int32_t>());
      const Tensor hits = Tensor::empty({5}, wide, device), losses = Tensor::empty({5}, wide, device);
      testing::fill_with_nan(hits->data, hits->bytes(), device);
      const Tensor x_there = testing::copied_to(testing::converted(x, dtype), device),
                   weight_there = testing::copied_to(testing::converted(weight, dtype), device),
                   targets_there = testing::copied_to(targets, device);
      forward(context, {x_there, weight_there, targets_there}, losses, hits);
      context.queue().synchronize();
      const Tensor found = testing::converted(testing::copied_to(hits, Device::cpu()), DType::f32);
      const float expected[] = {1.0f, 0.0f, 0.0f, 0.0f, 0.0f};
      for (int r = 0; r < 5; ++r) EXPECT_EQ(found.as<float>()[r], expected[r]) << "row " << r;
    }
  }
}

TEST(CrossEntropy, BadTargetsOnCudaAreNotedAndTouchNothing) {
  for (const Device device : testing::test_devices()) {
    if (device.kind == Device::Kind::cpu) continue;
    Context context(device);
    const Tensor x = testing::copied_to(testing::random_normal({300, 16}, DType::bf16, 1), device);
    const Tensor weight = testing::copied_to(testing::random_normal({50, 16}, DType::bf16, 2), device);
    const Tensor targets = Tensor::zeros({300}, DType::i32), flag = Tensor::zeros({1}, DType::i32, device);
    targets.as<std::int32_t>()[250] = 50;
    targets.as<std::int32_t>()[99] = -2;
    targets.as<std::int32_t>()[98] = -1;
    const Tensor there = testing::copied_to(targets, device), losses = Tensor::empty({300}, DType::f32, device);
    const Tensor dx = Tensor::empty({300, 16}, DType::bf16, device);
    forward_backward(context, {x, weight, there}, losses, dx, {}, 1.0);  // no flag, no harm
    forward_backward(context, {x, weight, there, flag}, losses, dx, {}, 1.0);
    context.queue().synchronize();
    EXPECT_EQ(testing::copied_to(flag, Device::cpu()).as<std::int32_t>()[0], 100);
    const Tensor host = testing::copied_to(losses, Device::cpu()), gradient = testing::copied_to(dx, Device::cpu());
    EXPECT_TRUE(std::isnan(host.as<float>()[99]) && std::isnan(host.as<float>()[250]));
    EXPECT_EQ(host.as<float>()[98], 0.0f);
    EXPECT_GT(host.as<float>()[97], 0.0f);
    EXPECT_EQ(static_cast<float>(gradient.as<BFloat16>()[99 * 16]), 0.0f);
    EXPECT_NE(static_cast<float>(gradient.as<BFloat16>()[97 * 16]), 0.0f);
  }
}

TEST(CrossEntropy, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({4, 6}, DType::f32), weight = Tensor::zeros({5, 6}, DType::f32);
  const Tensor targets = Tensor::zeros({4}, DType::i32), losses = Tensor::zeros({4}, DType::f32);
  auto error = [&](const Inputs& inputs, const TensorView& out) {
    return testing::error_of([&] { forward(context, inputs, out); });
  };
  EXPECT_EQ(error({x, weight, targets}, losses), "no error");
  EXPECT_EQ(error({x, targets, targets}, losses), "cross_entropy: weight has dtype i32; expected f32 or bf16");
  EXPECT_EQ(error({x, losses, targets}, losses),
            "cross_entropy: weight has shape [4]; expected [V,6] (x's last dimension)");
  EXPECT_EQ(error({x, weight, targets}, weight), "cross_entropy: losses has shape [5,6]; expected [4] (as x's rows)");
  EXPECT_EQ(testing::error_of([&] {
              forward(context, {x, weight, targets}, losses, x);
            }),
            "cross_entropy: hits has shape [4,6]; expected [4] (as losses)");
  targets.as<std::int32_t>()[2] = 5;
  EXPECT_EQ(error({x, weight, targets}, losses), "cross_entropy: targets holds 5 at row 2; expected -1 to 4");
}

}  // namespace
}  // namespace flashgla::ops::cross_entropy

#include <gtest/gtest.h>

#include <cmath>

#include "flashgla/ops/selective_scan/implementations.h"
#include "flashgla/ops/selective_scan/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::selective_scan {
namespace {

TEST(SelectiveScan, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  const std::vector<Form> forms = {
      {1, 1, 1},
      {2, 7, 3, 5},
      {3, 50, 40},
      {2, 16, 128, 16, {}, false, false},
      {1, 129, 264, 16, {}, true, false},
      {2, 530, 40, 16, {}, false},  // in segments, where a device cuts sequences
      {1, 70, 136, 16, {0, 1, 17, 33, 33, 70}},
      {1, 600, 40, 16, {0, 3, 430, 600}},  // in segments, where a device cuts sequences
      {1, 45, 31, 7, {16, 45}, false},
      {2, 5, 300, 1},
  };
  for (const Form& form : forms) {
    EXPECT_EQ(testing::check_conformance(forward_case(form), coverage), "");
    EXPECT_EQ(testing::check_conformance(backward_case(form), coverage), "");
  }
  for (const auto& [sequences, channels, states] : {std::array{1, 1, 1}, {3, 70, 16}, {2, 200, 5}}) {
    EXPECT_EQ(testing::check_conformance(step_case(sequences, channels, states), coverage), "");
    EXPECT_EQ(testing::check_conformance(projected_step_case(sequences, channels, states, 40), coverage), "");
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(SelectiveScan, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Form form{1, 6, 3, 4, {2, 2, 6}};
  std::uint64_t seed = 0;
  const auto random = [&](const Shape& shape, double deviation = 1.0, double mean = 0.0) {
    return testing::random_normal(shape, DType::f64, ++seed, deviation, mean);
  };
  const Shape channels({3});
  const Tensor x = random(form.wide()), raw = random(form.wide()), z = random(form.wide()), b = random(form.narrow()),
               c = random(form.narrow()), dt_bias = random(channels), a_log = random(Shape({3, 4}), 0.5),
               skip = random(channels), h0 = random(Shape({3, 3, 4})), dy = random(form.wide());
  const Tensor bounds = Tensor::zeros({4}, DType::i32), y = Tensor::empty({1, 6, 3}, DType::f64);
  std::copy(form.ends.begin(), form.ends.end(), bounds.as<std::int32_t>() + 1);
  const Inputs inputs{x, raw, z, b, c, dt_bias, a_log, skip, h0, bounds};
  const auto loss = [&] {
    forward(context, inputs, {y, {}, {}});
    return testing::dot(y, dy);
  };
  const auto like = [](const Tensor& tensor) { return Tensor::zeros(tensor->shape, DType::f64); };
  const Tensor dx = like(x), draw = like(x), dz = like(x), db = like(b), dc = like(b), da_log = like(a_log),
               dskip = like(skip), ddt_bias = like(dt_bias);
  backward(context, inputs, {}, dy, {dx, draw, dz, db, dc, da_log, dskip});
  for (std::int64_t i = 0; i < draw->numel(); ++i) ddt_bias.as<double>()[i % 3] += draw.as<double>()[i];
  EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "");
  EXPECT_EQ(testing::check_gradient("draw", raw, draw, loss), "");
  EXPECT_EQ(testing::check_gradient("dz", z, dz, loss), "");
  EXPECT_EQ(testing::check_gradient("db", b, db, loss), "");
  EXPECT_EQ(testing::check_gradient("dc", c, dc, loss), "");
  EXPECT_EQ(testing::check_gradient("da_log", a_log, da_log, loss), "");
  EXPECT_EQ(testing::check_gradient("dskip", skip, dskip, loss), "");
  EXPECT_EQ(testing::check_gradient("ddt_bias", dt_bias, ddt_bias, loss), "");
}

// Steps of some hundreds forget everything, and none is infinite.
TEST(SelectiveScan, LargeStepsStayFinite) {
  for (const Device device : testing::test_devices()) {
    Context context(device);
    const Form form{1, 40, 130};
    const auto filled = [&](const Shape& shape, double deviation, double mean) {
      return testing::copied_to(testing::random_normal(shape, DType::f32, 7, deviation, mean), device);
    };
    const Tensor x = filled(form.wide(), 1.0, 0.0), raw = filled(form.wide(), 200.0, 0.0),
                 z = filled(form.wide(), 200.0, 0.0), b = filled(form.narrow(), 1.0, 0.0),
                 c = filled(form.narrow(), 1.0, 0.0), bias = filled(Shape({130}), 1.0, 0.0),
                 a_log = filled(Shape({130, 16}), 3.0, 0.0), dy = filled(form.wide(), 1.0, 0.0);
    const auto empty = [&](const Shape& shape) { return Tensor::zeros(shape, DType::f32, device); };
    const Tensor y = empty(form.wide()), dx = empty(form.wide()), draw = empty(form.wide()), dz = empty(form.wide()),
                 db = empty(form.narrow()), dc = empty(form.narrow()), da = empty(Shape({130, 16})),
                 dskip = empty(Shape({130}));
    const Inputs inputs{x, raw, z, b, c, bias, a_log, bias, {}, {}};
    forward(context, inputs, {y, {}, {}});
    backward(context, inputs, {}, dy, {dx, draw, dz, db, dc, da, dskip});
    context.queue().synchronize();
    for (const Tensor* tensor : {&y, &dx, &draw, &dz, &db, &dc, &da, &dskip}) {
      const Tensor host = testing::copied_to(*tensor, Device::cpu());
      EXPECT_TRUE(std::isfinite(testing::dot(host, host)));
    }
  }
}

TEST(SelectiveScan, RefusesBadArgumentsByName) {
  Context context;
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor x = zeros({2, 3, 8}), b = zeros({2, 3, 4}), e = zeros({8}), a_log = zeros({8, 4}), y = zeros({2, 3, 8});
  const auto error = [&](const Inputs& inputs, const Outputs& outputs) {
    return testing::error_of([&] { forward(context, inputs, outputs); });
  };
  const Inputs good{x, x, x, b, b, e, a_log, e, {}, {}};
  EXPECT_EQ(error(good, {y, {}, {}}), "no error");
  Inputs bad = good;
  bad.raw = b;
  EXPECT_EQ(error(bad, {y, {}, {}}), "selective_scan: raw has shape [2,3,4]; expected [2,3,8] (as x)");
  bad = good;
  bad.a_log = e;
  EXPECT_EQ(error(bad, {y, {}, {}}), "selective_scan: a_log has shape [8]; expected [8,K]");
  bad = good;
  bad.c = x;
  EXPECT_EQ(error(bad, {y, {}, {}}),
            "selective_scan: c has shape [2,3,8]; expected [2,3,4] (as x's tokens and a_log's states)");
  EXPECT_EQ(error(good, {y, e, {}}),
            "selective_scan: ht has shape [8]; expected [2,8,4] (as sequences, channels, states)");
  EXPECT_EQ(error(good, {y, {}, Tensor::zeros({3}, DType::u8)}).substr(0, 36), "selective_scan: kept has shape [3]; ");
  bad = good;
  bad.cu_seqlens = Tensor::zeros({3}, DType::i32);
  EXPECT_EQ(error(bad, {y, {}, {}}), "selective_scan: x has shape [2,3,8]; expected a batch of 1 with cu_seqlens");
}

}  // namespace
}  // namespace flashgla::ops::selective_scan

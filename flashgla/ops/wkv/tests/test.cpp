#include <gtest/gtest.h>

#include <cmath>

#include "flashgla/base/memory.h"
#include "flashgla/ops/wkv/implementations.h"
#include "flashgla/ops/wkv/tests/cases.h"
#include "testing/compare.h"

namespace flashgla::ops::wkv {
namespace {

TEST(Wkv, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  std::vector<Form> forms = {
      {1, 1, 1},
      {2, 7, 3},
      {3, 50, 40},
      {2, 16, 128, {}, false, false},
      {1, 129, 264, {}, true, false},
      {1, 70, 136, {0, 1, 17, 33, 33, 70}},
      {1, 45, 31, {16, 45}, false},
      {2, 5, 300},
      {1, 700, 66},                      // several segments of time
      {1, 650, 32, {5, 300, 301, 650}},  // and sequences within and across them
      {2, 300, 70, {}, true, true, 5.0, -6.0},
      {15, 4700, 32},  // slow decays, many tokens; on Hopper by tiles, lines in parts
  };
  // On Hopper by tiles: lines in one and in parts, with keys that leave all tiles calm, some, or none; elsewhere
  // nothing that the forms before do not have.
  if (cuda_device_count() > 0) {
    forms.insert(forms.end(), {{16, 530, 128, {}, true, true, 2.0, 1.0},
                               {33, 130, 128, {}, true, false},
                               {32, 70, 112, {}, true, true, 12.0, 2.5},
                               {33, 400, 128, {}, true, true, 7.0, 1.0},
                               {4, 2100, 264, {}, false, false},
                               {4, 1600, 256, {}, true, true, 7.0, -1.0}});
  }
  for (const Form& form : forms) {
    EXPECT_EQ(testing::check_conformance(forward_case(form), coverage), "");
    EXPECT_EQ(testing::check_conformance(backward_case(form), coverage), "");
  }
  for (const auto& [sequences, channels] : {std::array{1, 1}, {3, 70}, {2, 200}}) {
    EXPECT_EQ(testing::check_conformance(step_case(sequences, channels), coverage), "");
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(Wkv, GradientsAgreeWithFiniteDifferences) {
  Context context;
  for (const bool carried : {false, true}) {
    const Form form{1, 7, 3, {2, 2, 7}};
    std::uint64_t seed = 0;
    const auto random = [&](const Shape& shape, double deviation = 1.0, double mean = 0.0) {
      return testing::random_normal(shape, DType::f64, ++seed, deviation, mean);
    };
    const Tensor k = random(form.wide(), 2.0), v = random(form.wide()), r = random(form.wide()),
                 time_decay = random(Shape({3}), 0.7, -0.5), time_first = random(Shape({3})), dy = random(form.wide());
    const Tensor bounds = Tensor::zeros({4}, DType::i32), y = Tensor::empty({1, 7, 3}, DType::f64),
                 h0 = Tensor::empty({3, 3, 3}, DType::f64);
    std::copy(form.ends.begin(), form.ends.end(), bounds.as<std::int32_t>() + 1);
    state_of("h0", 3, 3, testing::Role::input).fill(h0);
    const Inputs inputs{k, v, r, time_decay, time_first, carried ? h0.view() : TensorView(), bounds};
    const auto loss = [&] {
      forward(context, inputs, {y, {}, {}});
      return testing::dot(y, dy);
    };
    const auto like = [](const Tensor& tensor) { return Tensor::zeros(tensor->shape, DType::f64); };
    const Tensor dk = like(k), dv = like(v), dr = like(r), ddecay = like(time_decay), dfirst = like(time_first);
    backward(context, inputs, {}, dy, {dk, dv, dr, ddecay, dfirst});
    EXPECT_EQ(testing::check_gradient("dk", k, dk, loss), "");
    EXPECT_EQ(testing::check_gradient("dv", v, dv, loss), "");
    EXPECT_EQ(testing::check_gradient("dr", r, dr, loss), "");
    EXPECT_EQ(testing::check_gradient("dtime_decay", time_decay, ddecay, loss), "");
    EXPECT_EQ(testing::check_gradient("dtime_first", time_first, dfirst, loss), "");
  }
}

// The plain sums, where they do not overflow, are what the running maximum computes.
TEST(Wkv, TheRunningMaximumChangesNothing) {
  Context context;
  constexpr std::int64_t kLength = 40;
  const Shape shape({1, kLength, 1}), one({1});
  const Tensor k = testing::random_normal(shape, DType::f64, 1), v = testing::random_normal(shape, DType::f64, 2),
               r = testing::random_normal(shape, DType::f64, 3), decay = testing::random_normal(one, DType::f64, 4),
               first = testing::random_normal(one, DType::f64, 5), y = Tensor::empty(shape, DType::f64);
  forward(context, {k, v, r, decay, first, {}, {}}, {y, {}, {}});
  const double w = -std::exp(decay.as<double>()[0]), u = first.as<double>()[0];
  for (std::int64_t t = 0; t < kLength; ++t) {
    double sum = std::exp(u + k.as<double>()[t]) * v.as<double>()[t], total = std::exp(u + k.as<double>()[t]);
    for (std::int64_t i = 0; i < t; ++i) {
      const double weight = std::exp(static_cast<double>(t - 1 - i) * w + k.as<double>()[i]);
      sum += weight * v.as<double>()[i];
      total += weight;
    }
    EXPECT_NEAR(y.as<double>()[t], sum / total / (1.0 + std::exp(-r.as<double>()[t])), 1e-14) << t;
  }
}

// Keys of some thousands leave one token's value, and none is infinite.
TEST(Wkv, LargeKeysStayFinite) {
  const auto check = [](const Device device, const Form& form) {
    Context context(device);
    const auto filled = [&](const Shape& shape, double deviation, double mean) {
      return testing::copied_to(testing::random_normal(shape, DType::f32, 7, deviation, mean), device);
    };
    const Shape channels({form.channels});
    const Tensor k = filled(form.wide(), 3000.0, 0.0), v = filled(form.wide(), 1.0, 0.0),
                 r = filled(form.wide(), 200.0, 0.0), decay = filled(channels, 4.0, 0.0),
                 first = filled(channels, 100.0, 0.0), dy = filled(form.wide(), 1.0, 0.0);
    const auto empty = [&](const Shape& shape) { return Tensor::zeros(shape, DType::f32, device); };
    const Tensor y = empty(form.wide()), dk = empty(form.wide()), dv = empty(form.wide()), dr = empty(form.wide()),
                 ddecay = empty(channels), dfirst = empty(channels), ht = empty(Shape({form.batch, 3, form.channels}));
    const Inputs inputs{k, v, r, decay, first, {}, {}};
    forward(context, inputs, {y, ht, {}});
    backward(context, inputs, {}, dy, {dk, dv, dr, ddecay, dfirst});
    context.queue().synchronize();
    for (const Tensor* tensor : {&y, &dk, &dv, &dr, &ddecay, &dfirst, &ht}) {
      const Tensor host = testing::copied_to(*tensor, Device::cpu());
      EXPECT_TRUE(std::isfinite(testing::dot(host, host)));
    }
  };
  for (const Device device : testing::test_devices()) {
    check(device, {1, 300, 130});
    check(device, {33, 130, 128});  // on Hopper by tiles
  }
}

TEST(Wkv, RefusesBadArgumentsByName) {
  Context context;
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor k = zeros({2, 3, 8}), narrow = zeros({2, 3, 4}), e = zeros({8}), y = zeros({2, 3, 8});
  const auto error = [&](const Inputs& inputs, const Outputs& outputs) {
    return testing::error_of([&] { forward(context, inputs, outputs); });
  };
  const Inputs good{k, k, k, e, e, {}, {}};
  EXPECT_EQ(error(good, {y, {}, {}}), "no error");
  Inputs bad = good;
  bad.v = narrow;
  EXPECT_EQ(error(bad, {y, {}, {}}), "wkv: v has shape [2,3,4]; expected [2,3,8] (as k)");
  bad = good;
  bad.time_decay = narrow;
  EXPECT_EQ(error(bad, {y, {}, {}}), "wkv: time_decay has shape [2,3,4]; expected [8] (as k's channels)");
  EXPECT_EQ(error(good, {y, e, {}}), "wkv: ht has shape [8]; expected [2,3,8] (as sequences, channels)");
  EXPECT_EQ(error(good, {y, {}, Tensor::zeros({3}, DType::u8)}).substr(0, 25), "wkv: kept has shape [3]; ");
  bad = good;
  bad.cu_seqlens = Tensor::zeros({3}, DType::i32);
  EXPECT_EQ(error(bad, {y, {}, {}}), "wkv: k has shape [2,3,8]; expected a batch of 1 with cu_seqlens");
}

}  // namespace
}  // namespace flashgla::ops::wkv

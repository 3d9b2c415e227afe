#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "flashgla/ops/adamw/implementations.h"
#include "flashgla/ops/adamw/rounding.h"
#include "flashgla/ops/adamw/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::ops::adamw {
namespace {

Tensor to(Device device, const StepScalars& scalars) {
  const Tensor host = Tensor::zeros({kStepScalars}, DType::f64);
  *reinterpret_cast<StepScalars*>(host.as<double>()) = scalars;
  return testing::copied_to(host, device);
}

StepScalars from(Context& context, const TensorView& scalars) {
  context.queue().synchronize();
  const Tensor host = testing::copied_to(scalars, Device::cpu());
  return *reinterpret_cast<const StepScalars*>(host.as<double>());
}

// Prepared scalars of an update with this learning rate.
StepScalars update_at(double learning_rate, double updates_before, const Settings& settings) {
  StepScalars scalars;
  scalars.learning_rate = learning_rate;
  scalars.updates = updates_before;
  return prepared(scalars, 1.0, 0.0, settings);
}

TEST(AdamW, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const std::int64_t count : {8, 455, 40001}) {
    for (const Form& form : kForms) EXPECT_EQ(testing::check_conformance(step_case(count, form), coverage), "");
  }
  EXPECT_EQ(coverage.missing(), "");
}

// Worked by hand: the first step moves by the learning rate against the gradient's sign, whatever its size.
TEST(AdamW, FirstStepMovesByTheLearningRate) {
  Context context;
  double p[] = {1.0, -2.0, 1.0}, g[] = {1e-3, -50.0, 2.0}, m[3] = {}, v[3] = {};
  std::int64_t decay_ends = 2;
  const Shape shape({3});
  Settings settings;
  settings.epsilon = 0.0;
  settings.weight_decay = 0.5;
  const Tensor scalars = to(Device::cpu(), update_at(0.1, 0, settings));
  step(context, {{p, shape}, {g, shape}, {m, shape}, {v, shape}, {}, {&decay_ends, Shape({1})}, scalars}, settings);
  EXPECT_NEAR(p[0], 1.0 - 0.1 * (1.0 + 0.5 * 1.0), 1e-12);
  EXPECT_NEAR(p[1], -2.0 - 0.1 * (-1.0 + 0.5 * -2.0), 1e-12);
  EXPECT_NEAR(p[2], 1.0 - 0.1, 1e-12);
  EXPECT_NEAR(m[0], 0.1 * 1e-3, 1e-18);
  EXPECT_NEAR(v[1], 0.05 * 2500.0, 1e-10);
}

TEST(AdamW, PreparesOnEveryDevice) {
  Settings settings;
  settings.clip_norm = 2.0;
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Device device : testing::test_devices()) {
    Context context(device);
    auto after = [&](double sum, double loss) {
      StepScalars start;
      start.learning_rate = 0.25;
      start.gradient_scale = 0.5;
      start.updates = 4.0;
      const Tensor scalars = to(device, start), host = Tensor::empty({1}, DType::f64);
      fill(host, sum);
      const Tensor sums = testing::copied_to(host, device);
      fill(host, loss);
      prepare(context, sums, testing::copied_to(host, device), scalars, settings);
      return from(context, scalars);
    };
    const StepScalars calm = after(4.0, 3.0);
    EXPECT_EQ(calm.gradient_norm, 1.0);
    EXPECT_EQ(calm.gradient_factor, 0.5);
    EXPECT_EQ(calm.updates, 5.0);
    EXPECT_EQ(calm.made, 1.0);
    EXPECT_NEAR(calm.rate, 0.25 * std::sqrt(1.0 - std::pow(0.95, 5)) / (1.0 - std::pow(0.9, 5)), 1e-15);
    EXPECT_NEAR(calm.floor, 1e-8 * std::sqrt(1.0 - std::pow(0.95, 5)), 1e-22);
    EXPECT_EQ(after(64.0, 3.0).gradient_factor, 0.25);
    for (const StepScalars& skipped : {after(infinity, 3.0), after(std::nan(""), 3.0), after(4.0, infinity)}) {
      EXPECT_EQ(skipped.made, 0.0);
      EXPECT_EQ(skipped.updates, 4.0);
      EXPECT_TRUE(std::isnan(skipped.gradient_norm));
    }
  }
}

// A model's tensors on a device.
struct State {
  Form form;
  Tensor parameter, master, first_moment, second_moment, boundaries;

  State(const Form& of, Device device, const Tensor& start) : form(of) {
    parameter = testing::copied_to(testing::converted(start, form.parameter), device);
    if (form.parameter == DType::bf16 && form.master == DType::f32) {
      master = testing::copied_to(testing::converted(testing::converted(start, DType::bf16), DType::f32), device);
    } else if (form.parameter == DType::bf16) {
      master = Tensor::zeros(start->shape, DType::u16, device);
    }
    first_moment = Tensor::zeros(start->shape, form.moments, device);
    second_moment = Tensor::zeros(start->shape, form.moments, device);
    const Tensor ends = Tensor::empty({3}, DType::i64);
    const std::vector<std::int64_t> values = case_boundaries(start->numel());
    std::copy(values.begin(), values.end(), ends.as<std::int64_t>());
    boundaries = testing::copied_to(ends, device);
  }

  void update(Context& context, const TensorView& gradient, const TensorView& scalars) {
    step(context, {parameter, gradient, first_moment, second_moment, master, boundaries, scalars}, case_settings());
  }
};

bool same(const Tensor& a, const Tensor& b) {
  return testing::same_bits(testing::copied_to(a, Device::cpu()), testing::copied_to(b, Device::cpu()));
}

TEST(AdamW, SkippedUpdateTouchesNothing) {
  for (const Device device : testing::test_devices()) {
    Context context(device);
    for (const Form& form : kForms) {
      const Tensor start = testing::random_normal({4097}, DType::f32, 1);
      const Tensor gradient = testing::copied_to(testing::random_normal({4097}, DType::f32, 2), device);
      State state(form, device, start), untouched(form, device, start);
      state.update(context, gradient, to(device, StepScalars()));
      context.queue().synchronize();
      EXPECT_TRUE(same(state.parameter, untouched.parameter)) << form.name;
      EXPECT_TRUE(same(state.first_moment, untouched.first_moment)) << form.name;
      EXPECT_TRUE(same(state.second_moment, untouched.second_moment)) << form.name;
    }
  }
}

TEST(AdamW, SplitMasterGivesTheBitsOfTheFullOne) {
  constexpr std::int64_t kCount = 4099, kUpdates = 1000;
  for (const Device device : testing::test_devices()) {
    Context context(device);
    const Tensor start = testing::random_normal({kCount}, DType::f32, 1);
    State full(kForms[2], device, start), halves(kForms[3], device, start);
    for (std::int64_t i = 0; i < kUpdates; ++i) {
      const Tensor gradient =
          testing::copied_to(testing::random_normal({kCount}, DType::f32, static_cast<std::uint64_t>(i + 2)), device);
      const Tensor scalars = to(device, update_at(1e-3, static_cast<double>(i), case_settings()));
      full.update(context, gradient, scalars);
      halves.update(context, gradient, scalars);
      context.queue().synchronize();
      if (i % 50 != 0 && i + 1 != kUpdates) continue;
      ASSERT_TRUE(same(full.parameter, halves.parameter)) << "update " << i;
      ASSERT_TRUE(same(full.first_moment, halves.first_moment)) << "update " << i;
      const Tensor high = testing::copied_to(halves.parameter, Device::cpu());
      const Tensor low = testing::copied_to(halves.master, Device::cpu());
      const Tensor master = testing::copied_to(full.master, Device::cpu());
      for (std::int64_t j = 0; j < kCount; ++j) {
        ASSERT_EQ(join(high.as<BFloat16>()[j].bits, low.as<std::uint16_t>()[j]), master.as<float>()[j]) << j;
      }
    }
  }
}

TEST(AdamW, DevicesGiveTheSameBits) {
  constexpr std::int64_t kCount = 4099;
  for (const Form& form : kForms) {
    const Tensor start = testing::random_normal({kCount}, DType::f32, 1);
    std::vector<State> states;
    for (const Device device : testing::test_devices()) {
      Context context(device);
      states.emplace_back(form, device, start);
      for (int i = 0; i < 5; ++i) {
        const Tensor gradient = testing::random_normal({kCount}, DType::f32, static_cast<std::uint64_t>(i + 2));
        const Tensor scalars = to(device, update_at(1e-3, i, case_settings()));
        states.back().update(context, testing::copied_to(gradient, device), scalars);
        context.queue().synchronize();
      }
      EXPECT_TRUE(same(states.front().parameter, states.back().parameter)) << form.name;
      EXPECT_TRUE(same(states.front().first_moment, states.back().first_moment)) << form.name;
      EXPECT_TRUE(same(states.front().second_moment, states.back().second_moment)) << form.name;
    }
  }
}

TEST(AdamW, SplitAndJoinAreInverses) {
  for (std::uint64_t i = 0; i < 200000; ++i) {
    auto bits = static_cast<std::uint32_t>(testing::uniform(1, i) * 0x1p32);
    if (i % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000u;  // halfway between two bf16
    if ((bits & 0x7fffffffu) > 0x7f800000u) continue;       // NaN
    const auto value = std::bit_cast<float>(bits);
    const SplitFloat parts = split(value);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(join(parts.high, parts.low)), bits);
    BFloat16 high;
    high.bits = parts.high;
    const double error = std::abs(static_cast<double>(static_cast<float>(high)) - static_cast<double>(value));
    const double nearest =
        std::abs(static_cast<double>(static_cast<float>(BFloat16(value))) - static_cast<double>(value));
    if (std::isfinite(static_cast<float>(high))) {
      ASSERT_EQ(error, nearest) << bits;
    }
  }
  const SplitFloat nan = split(std::bit_cast<float>(0x7fffffffu));
  EXPECT_TRUE(std::isnan(join(nan.high, nan.low)));
  EXPECT_TRUE(std::isnan(std::bit_cast<float>(static_cast<std::uint32_t>(nan.high) << 16)));
}

TEST(AdamW, StochasticRoundingHasTheValueAsItsMean) {
  for (const float value : {1.0f, 1.001f, -3.7e-5f, 1e20f}) {
    double total = 0.0;
    constexpr int kDraws = 40000;
    for (int i = 0; i < kDraws; ++i) {
      BFloat16 rounded;
      rounded.bits = round_stochastically(value, rounding_bits(1, 2, static_cast<std::uint64_t>(i)).part(0));
      ASSERT_LT(std::abs(static_cast<float>(rounded) - value), std::abs(value) * 0x1p-7f);
      total += static_cast<double>(static_cast<float>(rounded));
    }
    // Three deviations of a mean of draws that lie a unit of 2^-7 apart.
    EXPECT_NEAR(total / kDraws / static_cast<double>(value), 1.0, 3.0 * 0x1p-8 / std::sqrt(kDraws));
  }
  BFloat16 largest;
  largest.bits = round_stochastically(std::numeric_limits<float>::max(), 0xffffu);
  EXPECT_TRUE(std::isfinite(static_cast<float>(largest)));
}

TEST(AdamW, HalfParameterIsTheRoundedMaster) {
  Context context;
  const Shape shape({1000});
  const Tensor p = Tensor::empty(shape, DType::bf16), master = testing::random_normal(shape, DType::f32, 1);
  const Tensor g = testing::random_normal(shape, DType::f32, 2), m = Tensor::zeros(shape, DType::f32);
  const Tensor v = Tensor::zeros(shape, DType::f32);
  step(context, {p, g, m, v, master, {}, to(Device::cpu(), update_at(3e-4, 0, {}))}, {});
  EXPECT_TRUE(testing::same_bits(p, testing::converted(master, DType::bf16)));
}

TEST(AdamW, RefusesBadArgumentsByName) {
  Context context;
  const Tensor p = Tensor::zeros({4}, DType::f32), half = Tensor::zeros({4}, DType::bf16);
  const Tensor other = Tensor::zeros({5}, DType::f32), scalars = Tensor::zeros({kStepScalars}, DType::f64);
  auto error = [&](const Tensors& tensors, const Settings& settings = {}) {
    return testing::error_of([&] { step(context, tensors, settings); });
  };
  EXPECT_EQ(error({p, p, p, p, {}, {}, scalars}), "no error");
  EXPECT_EQ(error({p, other, p, p, {}, {}, scalars}), "adamw: gradient has shape [5]; expected [4] (as parameter)");
  EXPECT_EQ(error({p, half, p, p, {}, {}, scalars}), "adamw: gradient has dtype bf16; expected f32");
  EXPECT_EQ(error({p, p, p, half, {}, {}, scalars}), "adamw: second_moment has dtype bf16; expected f32");
  EXPECT_EQ(error({half, p, p, p, {}, {}, scalars}), "adamw: master is absent; expected a tensor");
  EXPECT_EQ(error({p, p, p, p, p, {}, scalars}),
            "adamw: master is present; expected none beside a parameter that is not bf16");
  EXPECT_EQ(error({p, p, p, p, {}, p, scalars}), "adamw: boundaries has dtype f32; expected i64");
  EXPECT_EQ(error({p, p, p, p, {}, {}, p}), "adamw: scalars has shape [4]; expected [8] (as StepScalars)");
  Settings settings;
  settings.beta2 = 1.0;
  EXPECT_EQ(error({p, p, p, p, {}, {}, scalars}, settings), "adamw: beta2 is 1.000000; expected in [0, 1)");
}

}  // namespace
}  // namespace flashgla::ops::adamw

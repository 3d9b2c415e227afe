#include "flashgla/train/optimizer.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "testing/compare.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::train {
namespace {

// Three parameters, of which the one in the middle does not decay.
struct Model {
  nn::Parameter first{"first", Shape({7, 33})};
  nn::Parameter norm{.name = "norm", .shape = Shape({33}), .initialization = nn::Initialization::ones, .decay = false};
  nn::Parameter last{"last", Shape({33, 5})};
  Context context;
  nn::ParameterStore store;
  Optimizer optimizer;

  Model(Device device, DType dtype, OptimizerState state)
      : context(device),
        store([&](const nn::ParameterVisitor& visit) { visit_all(visit); }, dtype, device, true),
        optimizer((store.initialize(1), context), store, settings_with(state)) {}

  void visit_all(const nn::ParameterVisitor& visit) {
    visit(first);
    visit(norm);
    visit(last);
  }
  static OptimizerSettings settings_with(OptimizerState state) {
    OptimizerSettings settings;
    settings.weight_decay = 0.1;
    settings.state = state;
    settings.seed = 3;
    return settings;
  }

  void set_gradients(std::uint64_t seed, double bad = 0.0) {
    const TensorView& all = store.all_gradients();
    const Tensor values = testing::random_normal(all.shape, all.dtype, seed);
    if (bad != 0.0) store_element(values, std::array{first.shape.numel() + 2}, bad);
    context.queue().synchronize();
    const Tensor there = testing::copied_to(values, all.device);
    context.queue().copy(all.data, there->data, all.bytes());
    context.queue().synchronize();
  }
  Tensor values() {
    context.queue().synchronize();
    return testing::copied_to(store.all_values(), Device::cpu());
  }
};

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TEST(OptimizerTest, SplitMasterGivesTheParametersOfTheFullOne) {
  for (const Device device : testing::test_devices()) {
    Model full(device, DType::bf16, OptimizerState::full), parts(device, DType::bf16, OptimizerState::split_master);
    for (std::uint64_t i = 1; i <= 60; ++i) {
      for (Model* model : {&full, &parts}) {
        model->set_gradients(i);
        ASSERT_TRUE(model->optimizer.step(1e-3, 0.5).done);
      }
    }
    EXPECT_TRUE(testing::same_bits(full.values(), parts.values()));
    EXPECT_EQ(parts.optimizer.master_bytes() * 2, full.optimizer.master_bytes());
  }
}

TEST(OptimizerTest, HalfMomentsStayCloseToFullOnes) {
  for (const Device device : testing::test_devices()) {
    Model full(device, DType::f32, OptimizerState::full), half(device, DType::f32, OptimizerState::half);
    for (std::uint64_t i = 1; i <= 60; ++i) {
      for (Model* model : {&full, &half}) {
        model->set_gradients(i);
        model->optimizer.step(1e-3, 0.5);
      }
    }
    const testing::Difference difference = testing::difference(half.values(), full.values());
    EXPECT_GT(difference.relative, 0.0);
    // What 60 updates move, 60 * 1e-3 at most beside values of 0.02, is right to some parts in a thousand.
    EXPECT_LT(difference.largest, 60 * 1e-3 * 0x1p-7);
    EXPECT_EQ(half.optimizer.moment_bytes() * 2, full.optimizer.moment_bytes());
  }
}

// Clipping at 1; a parameter that does not decay is not pulled to zero.
TEST(OptimizerTest, UpdatesAreClippedAndReported) {
  for (const Device device : testing::test_devices()) {
    Model model(device, DType::f32, OptimizerState::full);
    model.set_gradients(1);
    const Tensor gradients = testing::copied_to(model.store.all_gradients(), Device::cpu());
    double squares = 0.0;
    for (std::int64_t i = 0; i < gradients->numel(); ++i) squares += std::pow(gradients.as<float>()[i], 2);
    const UpdateReport report = model.optimizer.step(1e-3, 0.25);
    EXPECT_TRUE(report.done);
    EXPECT_NEAR(report.gradient_norm, 0.25 * std::sqrt(squares), 1e-9);
    EXPECT_EQ(model.optimizer.updates(), 1);
    const Tensor moment = testing::copied_to(model.optimizer.tensors().front().tensor, Device::cpu());
    const double clipped = static_cast<double>(gradients.as<float>()[0]) / std::sqrt(squares);  // to norm 1
    EXPECT_NEAR(moment.as<float>()[0], 0.1 * clipped, 1e-7);
  }
}

TEST(OptimizerTest, NonFiniteGradientsChangeNothingAndAreNamed) {
  for (const Device device : testing::test_devices()) {
    Model model(device, DType::bf16, OptimizerState::split_master);
    model.set_gradients(1);
    model.optimizer.step(1e-3, 1.0);
    const Tensor before = model.values();
    model.set_gradients(2, kNaN);
    const UpdateReport report = model.optimizer.step(1e-3, 1.0);
    EXPECT_FALSE(report.done);
    EXPECT_EQ(report.culprit, "norm");
    EXPECT_TRUE(std::isnan(report.gradient_norm));
    EXPECT_TRUE(testing::same_bits(model.values(), before));
    EXPECT_EQ(model.optimizer.updates(), 1);
  }
}

// Two updates in flight, one of them with a loss that is not finite, and what came of them afterwards.
TEST(OptimizerTest, ReportsMayComeLate) {
  for (const Device device : testing::test_devices()) {
    Model late(device, DType::f32, OptimizerState::full), now(device, DType::f32, OptimizerState::full);
    const Tensor loss = Tensor::empty({1}, DType::f32);
    fill(loss, 2.5);
    const Tensor good = testing::copied_to(loss, device);
    fill(loss, kNaN);
    const Tensor bad = testing::copied_to(loss, device);
    late.set_gradients(1);
    now.set_gradients(1);
    int queued = 0;
    for (const Tensor* value : {&good, &bad, &good}) {
      late.optimizer.set_scalars(1e-3 * ++queued, 1.0);
      late.optimizer.queue_update(*value);
      late.optimizer.queue_report();
    }
    EXPECT_TRUE(late.optimizer.next_report().done);
    EXPECT_FALSE(late.optimizer.next_report().done);
    EXPECT_TRUE(late.optimizer.next_report().done);
    EXPECT_EQ(late.optimizer.updates(), 2);
    now.optimizer.step(1e-3, 1.0);
    now.optimizer.step(3e-3, 1.0);
    EXPECT_TRUE(testing::same_bits(late.values(), now.values()));
    EXPECT_THROW(late.optimizer.next_report(), Error);
  }
}

}  // namespace
}  // namespace flashgla::train

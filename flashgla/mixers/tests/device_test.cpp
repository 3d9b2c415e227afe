// Every mixer in the dtypes and on the devices that models run in, against the CPU's f64 on the same values.
#include <gtest/gtest.h>

#include "flashgla/base/names.h"
#include "flashgla/mixers/tests/trial.h"
#include "testing/devices.h"

namespace flashgla::mixers {
namespace {

constexpr std::int64_t kBatch = 2, kLength = 70;  // more than a chunk

// What a mixer makes of the same input, on the CPU in f64.
struct Outcome {
  Tensor y, dx, gradients, steps;
  std::vector<Tensor> state;
};

Tensor in_f64(const TensorView& view) {
  return testing::converted(testing::copied_to(view, Device::cpu()), DType::f64);
}

// Inputs are rounded to `rounding`; sequences start from noise.
Outcome outcome_of(const Variant& variant, DType dtype, Device device, DType rounding, nn::Recompute recompute) {
  const Trial trial(variant, dtype, device, rounding);
  const auto random = [&](const Shape& shape, DType wanted, std::uint64_t seed, double deviation) {
    const Tensor values = testing::random_normal(shape, rounding, seed, deviation);
    return testing::copied_to(testing::converted(values, wanted), device);
  };
  const Shape shape({kBatch, kLength, kHidden});
  const Tensor x = random(shape, dtype, 7, 1.0), dy = random(shape, dtype, 8, 1.0);
  const Tensor y = Tensor::empty(shape, dtype, device), dx = Tensor::empty(shape, dtype, device);
  std::vector<Tensor> memory;
  LayerState before, after;
  // Growing entries need room for what is appended, and are appended to in place.
  for (const StateEntry& entry : trial.mixer->state_layout(kBatch, kCapacity + kLength, dtype)) {
    memory.push_back(random(entry.shape, entry.dtype, memory.size() + 31, 0.5));
    before.push_back(memory.back());
    if (!entry.growing) memory.push_back(Tensor::empty(entry.shape, entry.dtype, device));
    after.push_back(memory.back());
  }
  const Tensor positions = testing::copied_to(positions_of(kBatch), device);
  Context context(device);
  Arena saved(device);
  nn::Pass pass{context, &saved, recompute};
  pass.positions = positions;
  trial.mixer->forward(pass, x, {y, {}}, before, after);
  trial.mixer->backward(pass, x, dy, dx);
  Outcome outcome;
  context.queue().synchronize();
  outcome.y = in_f64(y);
  outcome.dx = in_f64(dx);
  outcome.gradients = in_f64(trial.store->all_gradients());
  const auto layout = trial.mixer->state_layout(kBatch, kCapacity + kLength, dtype);
  for (std::size_t i = 0; i < layout.size(); ++i) {
    if (!layout[i].growing) outcome.state.push_back(in_f64(after[i]));  // what grows is seen in the steps
  }

  // Three tokens behind the call, in recurrent form.
  nn::Norm norm("norm", kHidden, 1e-6);
  const nn::ParameterStore store([&](const nn::ParameterVisitor& visit) { norm.for_each_parameter(visit); }, dtype,
                                 device, false);
  const Tensor weight = testing::converted(testing::random_normal(Shape({kHidden}), rounding, 9, 0.2, 1.0), dtype);
  copy_memory(store.parameters().front()->value.data, device, weight->data, Device::cpu(), weight->bytes());
  nn::Pass step{context};
  trial.mixer->prepare_steps(context, dtype);
  outcome.steps = Tensor::empty({3, kBatch, kHidden}, DType::f64);
  for (std::int64_t t = 0; t < 3; ++t) {
    const Tensor host = Tensor::empty({kBatch}, DType::i32);
    for (std::int64_t n = 0; n < kBatch; ++n) {
      host.as<std::int32_t>()[n] = kPositions[n] + static_cast<std::int32_t>(kLength + t);
    }
    const Tensor at = testing::copied_to(host, device);
    step.positions = at;
    const Tensor token = random(Shape({kBatch, kHidden}), dtype == DType::f64 ? DType::f64 : DType::f32,
                                40 + static_cast<std::uint64_t>(t), 1.0);
    trial.mixer->step(step, norm, token, after);
    context.queue().synchronize();
    copy(in_f64(token), outcome.steps->select(0, t));
  }
  return outcome;
}

class EveryMixerOnDevices : public ::testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(Registry, EveryMixerOnDevices, ::testing::ValuesIn(all_variants()),
                         [](const auto& variant) { return std::string(variant.param.row) + "_" + variant.param.name; });

// An operator is within 1e-5 in f32 and 5e-3 in bf16 (testing/conformance.h); a layer is some ten of them. Where a norm
// divides by a small number rounding is magnified, the same in both dtypes: the CPU's gradients in bf16 may be off by
// as much as its gradients in f32 are, times the ratio of their units, 2^16, and twice that; another device's by three
// times what the CPU's in bf16 are.
TEST_P(EveryMixerOnDevices, FollowsTheCpuInF64) {
  double in_f32 = 0.0;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Outcome expected = outcome_of(GetParam(), DType::f64, Device::cpu(), dtype, nn::Recompute::nothing);
    const double tolerance = dtype == DType::f32 ? 1e-4 : 5e-2;
    const Outcome cpu = outcome_of(GetParam(), dtype, Device::cpu(), dtype, nn::Recompute::nothing);
    const double on_cpu = std::max(testing::difference(cpu.dx, expected.dx).relative,
                                   testing::difference(cpu.gradients, expected.gradients).relative);
    if (dtype == DType::f32) in_f32 = on_cpu;
    for (const Device device : testing::test_devices()) {
      const double magnified = device == Device::cpu() ? 0x1p17 * in_f32 : 3.0 * on_cpu;
      const double of_gradients = dtype == DType::f32 ? tolerance : std::max(tolerance, magnified);
      for (const nn::Recompute recompute : {nn::Recompute::nothing, nn::Recompute::activations}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + name_of(device) + " " + nn::name_of(recompute));
        const Outcome own = outcome_of(GetParam(), dtype, device, dtype, recompute);
        EXPECT_EQ(testing::check_close("y", own.y, expected.y, tolerance), "");
        EXPECT_EQ(testing::check_close("dx", own.dx, expected.dx, of_gradients), "");
        EXPECT_EQ(testing::check_close("gradients", own.gradients, expected.gradients, of_gradients), "");
        EXPECT_EQ(testing::check_close("steps", own.steps, expected.steps, tolerance), "");
        for (std::size_t i = 0; i < own.state.size(); ++i) {
          EXPECT_EQ(testing::check_close("state", own.state[i], expected.state[i], tolerance), "");
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashgla::mixers

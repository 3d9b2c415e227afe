// Models on GPUs beside the CPU: losses and gradients, decoding, and the same bits from every form of the same work.
#include <gtest/gtest.h>

#include "flashgla/base/graph.h"
#include "flashgla/model/tests/cases.h"
#include "testing/conformance.h"
#include "testing/devices.h"

namespace flashgla::model {
namespace {

using testing::copied_to;

// Largest relative difference from f64. Each operator is held to 1e-5 on its own; behind one another in a model they
// are not, because the norms magnify the rounding of small sums.
constexpr double kTolerance = 5e-3;
constexpr std::int64_t kBatch = 2, kLength = 70;

// The small models, and one with heads of a width that matrix units have kernels for.
std::vector<SmallModel> models() {
  std::vector<SmallModel> all = small_models();
  all.push_back({"softmax_wide_heads",
                 parse_config(R"({"model_type": "transformer", "num_hidden_layers": 2, "intermediate_size": 72,
                                  "vocab_size": 40, "hidden_size": 128, "num_heads": 2, "num_kv_heads": 1})",
                              "wide")});
  return all;
}

std::vector<Device> gpus() {
  std::vector<Device> devices = testing::test_devices();
  std::erase(devices, Device::cpu());
  return devices;
}

std::unique_ptr<LanguageModel> on(Device device, const LanguageModel& model, DType dtype) {
  auto result = std::make_unique<LanguageModel>(model.config(), dtype, device, model.training());
  const Tensor values = testing::converted(model.parameters().all_values(), dtype);
  copy_memory(result->parameters().all_values().data, device, values->data, Device::cpu(), values->bytes());
  return result;
}

class EveryModelOnGpus : public ::testing::TestWithParam<SmallModel> {};
INSTANTIATE_TEST_SUITE_P(Models, EveryModelOnGpus, ::testing::ValuesIn(models()),
                         [](const auto& parameter) { return parameter.param.name; });

// Gradients, then losses, in f64 on the CPU.
Tensor training_step(LanguageModel& model, nn::Recompute recompute, bool graph) {
  const Device device = model.device();
  Context context(device, 1);
  Arena saved(device);
  const Shape shape({kBatch, kLength});
  const Tensor tokens = copied_to(random_tokens(shape, model.config().vocab_size, 1), device);
  const Tensor targets = copied_to(random_tokens(shape, model.config().vocab_size, 2), device);
  const DType wide = model.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Tensor losses = Tensor::empty(Shape({shape.numel()}), wide, device);
  const auto work = [&] {
    nn::Pass pass{context, &saved};
    pass.recompute = recompute;
    model.parameters().renew_gradients(context);
    model.forward_backward(pass, tokens, targets, losses, 1.0 / static_cast<double>(shape.numel()));
  };
  context.scratch().begin_planning();
  saved.begin_planning();
  work();
  context.scratch().commit_plan();
  saved.commit_plan();
  work();
  if (graph) Graph(context.queue(), work).launch();
  context.queue().synchronize();
  const TensorView gradients = model.parameters().all_gradients();
  const Tensor result = Tensor::empty(Shape({gradients.numel() + losses->numel()}), DType::f64);
  copy(testing::converted(copied_to(gradients, Device::cpu()), DType::f64), result->slice(0, 0, gradients.numel()));
  copy(testing::converted(copied_to(losses, Device::cpu()), DType::f64),
       result->slice(0, gradients.numel(), result->numel()));
  return testing::converted(result, DType::f64);
}

TEST_P(EveryModelOnGpus, GradientsAreTheCpusAndTheSameBitsInEveryForm) {
  for (const Device device : gpus()) {
    const auto exact = make_small(GetParam().config, DType::f64, true);
    const Tensor truth = training_step(*exact, nn::Recompute::nothing, false);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto model = on(device, *exact, dtype);
      const Tensor first = training_step(*model, nn::Recompute::nothing, false);
      if (dtype == DType::f32) {
        EXPECT_EQ(testing::check_close("gradients", first, truth, kTolerance), "");
      }
      EXPECT_TRUE(testing::same_bits(first, training_step(*model, nn::Recompute::nothing, true))) << "as a graph";
      for (const nn::Recompute recompute : {nn::Recompute::activations, nn::Recompute::block}) {
        EXPECT_TRUE(testing::same_bits(first, training_step(*model, recompute, false))) << nn::name_of(recompute);
      }
    }
  }
}

// Prompts in two pieces, then a few tokens one by one: the logits after each, in f64 on the CPU.
Tensor decoded(LanguageModel& model, bool graph) {
  const Device device = model.device();
  const DType wide = model.dtype() == DType::f64 ? DType::f64 : DType::f32;
  constexpr std::int64_t kSteps = 3;
  Context context(device, 1);
  DecodeState state = model.make_state(2, kCapacity);
  const Tensor logits = Tensor::empty(Shape({2, model.config().vocab_size}), wide, device);
  const Tensor result = Tensor::empty(Shape({2 + kSteps, logits->numel()}), DType::f64);
  std::int64_t row = 0;
  const auto keep = [&] {
    context.queue().synchronize();
    copy(testing::converted(copied_to(logits, Device::cpu()), DType::f64)->reshape(Shape({logits->numel()})),
         result->select(0, row++));
  };
  std::int32_t had = 0;
  for (const std::vector<std::int32_t>& bounds : {std::vector<std::int32_t>{0, 9, 40}, {0, 21, 22}}) {
    const Tensor host = int_tensor(bounds), there = copied_to(host, device);
    const Tensor tokens = copied_to(random_tokens(Shape({bounds.back()}), model.config().vocab_size, ++had), device);
    model.prefill(context, tokens, {there, host, 40}, state, logits);
    for (std::size_t n = 0; n < 2; ++n) state.history[n].tokens += bounds[n + 1] - bounds[n];
    keep();
  }
  const Tensor tokens = copied_to(int_tensor({3, 11}), device);
  const auto step = [&] { model.step(context, tokens, state, logits); };
  context.scratch().plan(step);
  std::unique_ptr<Graph> recorded;
  if (graph) recorded = std::make_unique<Graph>(context.queue(), step);
  for (std::int64_t t = 0; t < kSteps; ++t) {
    graph ? recorded->launch() : step();
    keep();
  }
  return testing::converted(result, DType::f64);
}

TEST_P(EveryModelOnGpus, DecodingIsTheCpusAndTheSameBitsAsAGraph) {
  for (const Device device : gpus()) {
    const auto exact = make_small(GetParam().config, DType::f64, false);
    const Tensor truth = decoded(*exact, false);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto model = on(device, *exact, dtype);
      const Tensor eager = decoded(*model, false);
      if (dtype == DType::f32) {
        EXPECT_EQ(testing::check_close("logits", eager, truth, kTolerance), "");
      }
      EXPECT_TRUE(testing::same_bits(eager, decoded(*model, true)));
    }
  }
}

}  // namespace
}  // namespace flashgla::model

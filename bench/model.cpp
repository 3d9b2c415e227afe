// The benches of the whole model, beside the operators'.
#include <algorithm>
#include <cmath>

#include "bench/benches.h"
#include "flashgla/base/names.h"
#include "flashgla/model/cost.h"
#include "flashgla/model/language_model.h"
#include "flashgla/ops/adamw/adamw.h"
#include "flashgla/ops/global_norm/global_norm.h"
#include "testing/compare.h"
#include "testing/random.h"

namespace flashgla::bench {

namespace {

using model::LanguageModel;

// Largest relative difference from the reference implementations. Each operator is held to 1e-5 on its own; behind one
// another in a model they are not, because a first token's output is (q . k) v and the norm behind it magnifies the
// rounding of a small q . k. The references themselves, run in f32, are 3e-5 away from f64.
constexpr double kTolerance = 5e-3;

Tensor random_tokens(const Shape& shape, std::int64_t vocabulary, std::uint64_t seed) {
  Tensor tokens = Tensor::empty(shape, DType::i32);
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    tokens.as<std::int32_t>()[i] = static_cast<std::int32_t>(testing::uniform(seed, static_cast<std::uint64_t>(i)) *
                                                             static_cast<double>(vocabulary));
  }
  return tokens;
}

// Gradients of a short batch, which `name` (empty: automatic) computes.
Tensor gradients_by(LanguageModel& model, const std::string& name) {
  Context context(model.device());
  context.force_implementation(name);
  Arena saved(model.device());
  nn::Pass pass{context, &saved};
  const Tensor tokens = random_tokens(Shape({1, 130}), model.config().vocab_size, 1);
  const Tensor targets = random_tokens(tokens->shape, model.config().vocab_size, 2);
  const Tensor losses = Tensor::empty(Shape({tokens->numel()}), DType::f32);
  model.parameters().zero_gradients();
  model.forward_backward(pass, tokens, targets, losses, 1.0);
  return testing::converted(model.parameters().all_gradients(), DType::f32);
}

}  // namespace

// One optimizer step of a byte-level model: forward, backward, gradient norm, AdamW.
void bench_training_step(const testing::BenchOptions& options) {
  model::ModelConfig config = model::preset("gla-small");
  config.set("use_short_conv", "false");  // the paper's layer
  constexpr std::int64_t kBatch = 8;
  constexpr std::int64_t kLength = 512;
  testing::BenchRow row;
  row.operation = "model_training_step";
  row.implementation = "all";
  row.problem = "d256 8 layers 8x512 tokens f32";
  if (!options.wants(row.problem) || !options.wants_implementation(row.implementation)) return;
  if (options.device != Device::cpu()) {
    row.refused = "not yet on " + name_of(options.device);
    return options.report(row);
  }
  LanguageModel model(config, DType::f32, options.device, true);
  model.parameters().initialize(1);
  row.error = testing::difference(gradients_by(model, ""), gradients_by(model, "reference")).relative;
  if (!(row.error <= kTolerance)) {
    row.refused = "gradients differ from the reference's by " + std::to_string(row.error);
    return options.report(row);
  }
  Context context(options.device, options.threads);
  Arena saved(options.device);
  nn::Pass pass{context, &saved};
  const Tensor tokens = random_tokens(Shape({kBatch, kLength}), config.vocab_size, 1);
  const Tensor targets = random_tokens(tokens->shape, config.vocab_size, 2);
  const Tensor losses = Tensor::empty(Shape({tokens->numel()}), DType::f32);
  const Tensor first_moment = Tensor::zeros(Shape({model.parameters().count()}), DType::f32);
  const Tensor second_moment = Tensor::zeros(first_moment->shape, DType::f32);
  const Tensor scalars = Tensor::zeros({ops::adamw::kStepScalars}, DType::f64), sum = Tensor::zeros({1}, DType::f64);
  ops::adamw::StepScalars sent;
  sent.learning_rate = 1e-6;
  context.queue().copy(scalars->data, &sent, sizeof(sent));
  ops::adamw::Settings settings;
  settings.clip_norm = 1.0;
  row.milliseconds = testing::median_milliseconds(
      context,
      [&] {
        model.parameters().zero_gradients();
        model.forward_backward(pass, tokens, targets, losses, 1.0 / static_cast<double>(tokens->numel()));
        const nn::ParameterStore& parameters = model.parameters();
        ops::global_norm::sum_of_squares(context, parameters.all_gradients(), sum);
        ops::adamw::prepare(context, sum, {}, scalars, settings);
        ops::adamw::step(
            context,
            {parameters.all_values(), parameters.all_gradients(), first_moment, second_moment, {}, {}, scalars},
            settings);
      },
      options.seconds);
  row.flops = static_cast<double>(tokens->numel()) * model::cost(config, kLength).training_flops;
  options.report(row);
}

}  // namespace flashgla::bench

// The benches of the whole model, beside the operators'.
#include <algorithm>
#include <cmath>
#include <memory>

#include "bench/benches.h"
#include "bench/kernel_times.h"
#include "bench/noise_model.h"
#include "flashgla/base/graph.h"
#include "flashgla/base/names.h"
#include "flashgla/model/cost.h"
#include "flashgla/model/language_model.h"
#include "flashgla/ops/matmul/plans.h"
#include "flashgla/train/optimizer.h"
#include "testing/compare.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::bench {

namespace {

using model::LanguageModel;

// Largest relative difference from the reference implementations. Each operator is held to 1e-5 on its own; behind one
// another in a model they are not, because a first token's output is (q . k) v and the norm behind it magnifies the
// rounding of a small q . k. The references themselves, run in f32, are 3e-5 away from f64.
constexpr double kModelTolerance = 5e-3;

Tensor random_tokens(const Shape& shape, std::int64_t vocabulary, std::uint64_t seed) {
  Tensor tokens = Tensor::empty(shape, DType::i32);
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    tokens.as<std::int32_t>()[i] = static_cast<std::int32_t>(testing::uniform(seed, static_cast<std::uint64_t>(i)) *
                                                             static_cast<double>(vocabulary));
  }
  return tokens;
}

// Gradients of a short batch, which `name` (empty: automatic) computes; `draw`: of tokens.
Tensor gradients_by(LanguageModel& model, const std::string& name, std::uint64_t draw = 1) {
  const Device device = model.device();
  Context context(device);
  context.force_implementation(name);
  Arena saved(device);
  nn::Pass pass{context, &saved};
  const Shape shape({1, 130});
  const Tensor tokens = testing::copied_to(random_tokens(shape, model.config().vocab_size, 2 * draw - 1), device);
  const Tensor targets = testing::copied_to(random_tokens(shape, model.config().vocab_size, 2 * draw), device);
  const Tensor losses = Tensor::empty(Shape({tokens->numel()}), DType::f32, device);
  model.parameters().zero_gradients();
  model.forward_backward(pass, tokens, targets, losses, 1.0);
  context.queue().synchronize();
  return testing::converted(testing::copied_to(model.parameters().all_gradients(), Device::cpu()), DType::f32);
}

// The gradients' relative error on the CPU, against the reference implementations. Throws Error when it is too large.
double checked_error(const model::ModelConfig& config, DType dtype) {
  LanguageModel model(config, dtype, Device::cpu(), true);
  model.parameters().initialize(1);
  const double error = testing::difference(gradients_by(model, ""), gradients_by(model, "reference")).relative;
  if (!(error <= kModelTolerance)) throw Error("gradients differ from the reference's by " + std::to_string(error));
  return error;
}

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The same on a device, for two layers of the model's width: against the CPU's f32 model with the same weights, from
// which the CPU's model of this dtype may be hardly less far away. The two round apart, so that one draw of weights and
// tokens says little of which is better: the bound is for the median, and a draw alone may be twice as far.
double checked_error(model::ModelConfig config, DType dtype, Device device) {
  constexpr double kBesideCpu = 1.5, kOfOneDraw = 3.0;
  constexpr std::uint64_t kDraws = 5;
  config.num_hidden_layers = 2;
  config.vocab_size = 1000;
  LanguageModel here(config, dtype, device, true), cpu(config, dtype, Device::cpu(), true);
  LanguageModel exact(config, DType::f32, Device::cpu(), true);
  std::vector<double> errors, ratios;
  for (std::uint64_t draw = 1; draw <= kDraws; ++draw) {
    here.parameters().initialize(draw);
    cpu.parameters().initialize(draw);
    copy(cpu.parameters().all_values(), exact.parameters().all_values());
    const Tensor truth = gradients_by(exact, "", draw);
    errors.push_back(testing::difference(gradients_by(here, "", draw), truth).relative);
    ratios.push_back(errors.back() / testing::difference(gradients_by(cpu, "", draw), truth).relative);
  }
  const double ratio = median_of(ratios), largest = *std::max_element(ratios.begin(), ratios.end());
  if (!(ratio <= kBesideCpu && largest <= kOfOneDraw)) {
    throw Error("gradients are " + std::to_string(ratio) + " times as far from the CPU's in f32 as the CPU's own, " +
                std::to_string(largest) + " times for one of " + std::to_string(kDraws) + " draws; allowed are " +
                std::to_string(kBesideCpu) + " and " + std::to_string(kOfOneDraw));
  }
  return median_of(errors);
}

}  // namespace

namespace {

struct TrainingProblem {
  const char* name;
  const char* preset;
  std::int64_t batch, length;
  DType dtype;
  Device::Kind device;
};
constexpr TrainingProblem kTrainingProblems[] = {
    {"d256 8 layers 8x512 tokens f32", "gla-small", 8, 512, DType::f32, Device::Kind::cpu},
    {"transformer d256 8 layers 8x512 tokens f32", "transformer-small", 8, 512, DType::f32, Device::Kind::cpu},
    {"gla-small 8x512 bf16", "gla-small", 8, 512, DType::bf16, Device::Kind::cuda},
    {"gla-340m 16x2048 bf16", "gla-340m", 16, 2048, DType::bf16, Device::Kind::cuda},
    {"gla-1.3b 8x2048 bf16", "gla-1.3b", 8, 2048, DType::bf16, Device::Kind::cuda},
    {"gla-1.3b 1x16384 bf16", "gla-1.3b", 1, 16384, DType::bf16, Device::Kind::cuda},
    {"retnet-1.3b 8x2048 bf16", "retnet-1.3b", 8, 2048, DType::bf16, Device::Kind::cuda},
    {"linear-attention-1.3b 8x2048 bf16", "linear-attention-1.3b", 8, 2048, DType::bf16, Device::Kind::cuda},
    {"mamba-1.3b 8x2048 bf16", "mamba-1.3b", 8, 2048, DType::bf16, Device::Kind::cuda},
    {"mamba2-1.3b 8x2048 bf16", "mamba2-1.3b", 8, 2048, DType::bf16, Device::Kind::cuda},
    {"rwkv-1b5 8x2048 bf16", "rwkv-1b5", 8, 2048, DType::bf16, Device::Kind::cuda},
    {"hyena-340m 16x2048 bf16", "hyena-340m", 16, 2048, DType::bf16, Device::Kind::cuda},
    {"transformer-1.3b 8x2048 bf16", "transformer-1.3b", 8, 2048, DType::bf16, Device::Kind::cuda},
    {"transformer-1.3b 1x16384 bf16", "transformer-1.3b", 1, 16384, DType::bf16, Device::Kind::cuda},
};
// The paper's Figure 6, and models that are not in it: 1.3B models by length, 16,384 tokens a step as sequences of 2K
// to 16K, and by the number of sequences of 2K. What says most comes first, in case there is no time for all.
constexpr const char* kFigure6Models[] = {"gla-1.3b",    "transformer-1.3b", "mamba-1.3b",
                                          "retnet-1.3b", "mamba2-1.3b",      "linear-attention-1.3b"};
constexpr std::int64_t kFigure6Tokens = 16384, kFigure6Length = 2048;
constexpr std::int64_t kFigure6Lengths[] = {2048, 16384, 4096, 8192}, kFigure6Batches[] = {1, 4, 2, 16};

struct TrainingCase {
  std::string name, preset;
  std::int64_t batch, length;
  DType dtype;
  Device::Kind device;
  nn::Recompute recompute = nn::Recompute::nothing;
};

// Those of one preset lie together.
std::vector<TrainingCase> headline_cases() {
  std::vector<TrainingCase> cases;
  for (const TrainingProblem& p : kTrainingProblems) {
    cases.push_back({p.name, p.preset, p.batch, p.length, p.dtype, p.device});
  }
  return cases;
}
std::vector<TrainingCase> figure6_cases() {
  std::vector<TrainingCase> cases;
  const auto add = [&](const char* by, std::string_view preset, std::int64_t batch, std::int64_t length) {
    const std::string name = std::string(by) + " " + std::string(preset) + " " + std::to_string(batch) + "x" +
                             std::to_string(length) + " bf16";
    cases.push_back({name, std::string(preset), batch, length, DType::bf16, Device::Kind::cuda});
    if (preset != "gla-1.3b") return;
    cases.push_back(cases.back());
    cases.back().name += " recomputed";
    cases.back().recompute = nn::Recompute::activations;
  };
  for (const char* preset : kFigure6Models) {
    for (const std::int64_t length : kFigure6Lengths) add("by length:", preset, kFigure6Tokens / length, length);
  }
  for (const char* preset : kFigure6Models) {
    for (const std::int64_t batch : kFigure6Batches) add("by batch:", preset, batch, kFigure6Length);
  }
  return cases;
}

// A model's optimizer and everything that a step needs, all of it taken beforehand; a step is recorded as a graph and
// its gradients write over the last one's, as in the trainer.
class TrainingStep {
 public:
  TrainingStep(const TrainingCase& problem, LanguageModel& model, const testing::BenchOptions& options)
      : model_(model),
        recompute_(problem.recompute),
        context_(options.device, options.threads),
        saved_(options.device) {
    const Shape shape({problem.batch, problem.length});
    const std::int64_t words = model.config().vocab_size;
    tokens_ = testing::copied_to(random_tokens(shape, words, 1), options.device);
    targets_ = testing::copied_to(random_tokens(shape, words, 2), options.device);
    losses_ = Tensor::empty(Shape({shape.numel()}), DType::f32, options.device);
    train::OptimizerSettings settings;
    settings.clip_norm = 1.0;
    optimizer_ = std::make_unique<train::Optimizer>(context_, model_.parameters(), settings);
    optimizer_->set_scalars(1e-6, 1.0);
    context_.scratch().begin_planning();
    saved_.begin_planning();
    work();
    context_.scratch().commit_plan();
    saved_.commit_plan();
    const std::string cache = ops::matmul::plan_cache_folder();
    ops::matmul::load_plan_cache(context_, cache);
    ops::matmul::time_plans(context_);
    ops::matmul::save_plan_cache(context_, cache);
    work();  // libraries prepare themselves
    graph_ = std::make_unique<Graph>(context_.queue(), [this] { work(); });
  }

  Context& context() { return context_; }
  void run() { graph_->launch(); }
  double memory() {
    return static_cast<double>(model_.parameters().value_bytes() + model_.parameters().gradient_bytes() +
                               optimizer_->moment_bytes() + optimizer_->master_bytes() + saved_.peak() +
                               context_.scratch().peak());
  }

 private:
  void work() {
    nn::Pass pass{context_, &saved_, recompute_};
    model_.parameters().renew_gradients(context_);
    model_.forward_backward(pass, tokens_, targets_, losses_, 1.0 / static_cast<double>(tokens_->numel()));
    optimizer_->queue_update();
  }

  LanguageModel& model_;
  nn::Recompute recompute_;
  Context context_;
  Arena saved_;
  Tensor tokens_, targets_, losses_;
  std::unique_ptr<train::Optimizer> optimizer_;
  std::unique_ptr<Graph> graph_;
};

}  // namespace

namespace {

// A preset's model and what its gradients are off by, for all of its cases.
struct Checked {
  std::string preset;
  std::unique_ptr<LanguageModel> model;
  double error = 0.0;  // 0: not checked
};

Checked make_model(const TrainingCase& problem, Device device, bool check) {
  model::ModelConfig config = model::preset(problem.preset);
  if (config.model_type == "gla") config.set("use_short_conv", "false");  // the paper's layer
  Checked made{problem.preset, nullptr, 0.0};
  if (check) {
    made.error =
        device == Device::cpu() ? checked_error(config, problem.dtype) : checked_error(config, problem.dtype, device);
  }
  made.model = std::make_unique<LanguageModel>(config, problem.dtype, device, true);
  made.model->parameters().initialize(1);
  return made;
}

}  // namespace

// Steps of the optimizer: forward, backward, gradient norm, AdamW. Of the sweep, whose models are those of the headline
// cases, gradients are not checked again. Where --only is the whole name of a case, those are left out whose names go
// on behind it.
void bench_training_step(const testing::BenchOptions& options) {
  Checked checked;
  const std::vector<TrainingCase> cases = options.sweep ? figure6_cases() : headline_cases();
  const bool is_whole_name = std::any_of(cases.begin(), cases.end(),
                                         [&](const TrainingCase& problem) { return problem.name == options.only; });
  for (const TrainingCase& problem : cases) {
    testing::BenchRow row;
    row.operation = "model_training_step";
    row.implementation = "all";
    row.problem = problem.name;
    if (problem.device != options.device.kind || !options.wants(row.problem) ||
        (is_whole_name && problem.name != options.only) || !options.wants_implementation(row.implementation)) {
      continue;
    }
    try {
      if (checked.preset != problem.preset) {
        checked = {};  // its memory
        checked = make_model(problem, options.device, !options.sweep);
      }
      row.error = checked.error;
      TrainingStep step(problem, *checked.model, options);
      row.milliseconds = testing::median_milliseconds(
          step.context(), [&] { step.run(); }, options.seconds);
      row.memory = step.memory();
      if (options.kernels) {
        constexpr int kSteps = 3;
        row.operators = operator_times(
            step.context(),
            [&] {
              for (int i = 0; i < kSteps; ++i) step.run();
            },
            kSteps);
        add_floors(row.operators, checked.model->config(), Step::training, problem.batch * problem.length);
      }
      row.flops = static_cast<double>(problem.batch * problem.length) *
                  model::cost(checked.model->config(), problem.length).training_flops;
    } catch (const Error& error) {
      row.refused = error.what();
    }
    options.report(row);
  }
}

namespace {

struct PrefillProblem {
  const char* preset;
  std::int64_t length;
  DType dtype;
  Device::Kind device;
  const char* quantised;
};
constexpr PrefillProblem kPrefillProblems[] = {
    {"gla-small", 512, DType::f32, Device::Kind::cpu, ""},
    {"gla-340m", 512, DType::bf16, Device::Kind::cpu, ""},
    {"gla-340m", 512, DType::f32, Device::Kind::cpu, ""},
    {"gla-340m", 512, DType::bf16, Device::Kind::cpu, "q8"},
    {"gla-340m", 512, DType::bf16, Device::Kind::cpu, "q4"},
    {"gla-1.3b", 2048, DType::bf16, Device::Kind::cuda, ""},
    {"gla-1.3b", 2048, DType::bf16, Device::Kind::cuda, "q8"},
    {"gla-1.3b", 2048, DType::bf16, Device::Kind::cuda, "q4"},
    {"retnet-1.3b", 2048, DType::bf16, Device::Kind::cuda, ""},
    {"transformer-1.3b", 2048, DType::bf16, Device::Kind::cuda, ""},
};

}  // namespace

// Logits after a prompt of one sequence; the bytes are those of the weights.
void bench_prefill(const testing::BenchOptions& options) {
  for (const PrefillProblem& problem : kPrefillProblems) {
    const std::int64_t length = problem.length;
    testing::BenchRow row;
    row.operation = "model_prefill";
    row.implementation = "all";
    row.problem = std::string(problem.preset) + " 1x" + std::to_string(length) + " " + name_of(problem.dtype) +
                  (*problem.quantised == '\0' ? "" : std::string(" ") + problem.quantised);
    if (problem.device != options.device.kind || !options.wants(row.problem) ||
        !options.wants_implementation(row.implementation)) {
      continue;
    }
    try {
      const auto made = noise_model(problem.preset, problem.dtype, options.device, problem.quantised);
      LanguageModel& model = *made;
      Context context(options.device, options.threads);
      if (context.architecture().matrix_units && problem.dtype == DType::bf16) model.set_inference_dtype(DType::bf16);
      const Tensor tokens =
          testing::copied_to(random_tokens(Shape({length}), model.config().vocab_size, 1), options.device);
      const Tensor host = Tensor::zeros(Shape({2}), DType::i32);
      host.as<std::int32_t>()[1] = static_cast<std::int32_t>(length);
      const Tensor bounds = testing::copied_to(host, options.device);
      const Tensor logits = Tensor::empty(Shape({1, model.config().vocab_size}), DType::f32, options.device);
      model::DecodeState state = model.make_state(1, length);
      const auto run = [&] {
        if (state.grows()) state.queue_reset(context.queue());  // else there is no room behind the run before
        model.prefill(context, tokens, {bounds, host, length}, state, logits);
      };
      run();
      row.milliseconds = testing::median_milliseconds(context, run, options.seconds);
      if (options.kernels) {
        row.operators = operator_times(context, run, 1);
        add_floors(row.operators, model.config(), Step::prompt, length);
      }
      row.bytes = static_cast<double>(model.parameters().value_bytes());
      row.flops = static_cast<double>(length) * model::cost(model.config(), length).training_flops / 3.0;
    } catch (const Error& error) {
      row.refused = error.what();
    }
    options.report(row);
  }
}

}  // namespace flashgla::bench

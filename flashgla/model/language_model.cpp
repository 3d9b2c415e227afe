#include "flashgla/model/language_model.h"

#include "flashgla/base/names.h"
#include "flashgla/model/block.h"
#include "flashgla/model/cost.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/cross_entropy/cross_entropy.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/embedding/embedding.h"
#include "flashgla/ops/gated_linear_attention/ring.h"
#include "flashgla/ops/positions/positions.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::model {

Layers::Layers(const ModelConfig& config)
    : final_norm("model.norm", config.hidden_size, config.norm_eps, nn::norm_kind_from_name(config.norm_type)) {
  embedding.name = "model.embeddings.weight";
  embedding.shape = Shape({config.vocab_size, config.hidden_size});
  embedding.deviation = config.initializer_range;
  // As in RWKV-LM: a normalised row's direction then changes at once.
  if (config.embedding_norm && !config.tie_word_embeddings) embedding.deviation = 1e-4;
  embedding.multiplied = config.tie_word_embeddings;
  if (config.tie_word_embeddings) embedding.quantisation = nn::Quantisation::sensitive;
  if (config.learned_positions) {
    positions.push_back(embedding);
    positions.front().name = "model.position_embeddings.weight";
    positions.front().shape = Shape({config.max_position_embeddings, config.hidden_size});
    positions.front().multiplied = false;
    positions.front().quantisation = nn::Quantisation::none;
  }
  if (config.embedding_norm) {
    embedding_norm.emplace_back("model.embedding_norm", config.hidden_size, config.norm_eps,
                                nn::norm_kind_from_name(config.norm_type));
  }
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    blocks.push_back(std::make_unique<Block>(config, layer));
    blocks.back()->share(shared);
  }
  if (!config.tie_word_embeddings) {
    head.push_back(embedding);
    head.front().name = "lm_head.weight";
    head.front().deviation = config.initializer_range;
    head.front().multiplied = true;
    head.front().quantisation = nn::Quantisation::sensitive;
  }
}

Layers::~Layers() = default;

void Layers::for_each_parameter(const nn::ParameterVisitor& visit) {
  visit(embedding);
  for (nn::Parameter& table : positions) visit(table);
  for (nn::Norm& norm : embedding_norm) norm.for_each_parameter(visit);
  shared.for_each_parameter(visit);
  for (const auto& block : blocks) block->for_each_parameter(visit);
  final_norm.for_each_parameter(visit);
  for (nn::Parameter& weight : head) visit(weight);
}

std::vector<nn::Parameter> describe_parameters(const ModelConfig& config) {
  config.validate();
  Layers layers(config);
  std::vector<nn::Parameter> parameters;
  layers.for_each_parameter([&](nn::Parameter& parameter) { parameters.push_back(parameter); });
  return parameters;
}

std::int64_t parameter_count(const ModelConfig& config) {
  std::int64_t count = 0;
  for (const nn::Parameter& parameter : describe_parameters(config)) count += parameter.shape.numel();
  return count;
}

std::vector<mixers::StateEntry> describe_state(const ModelConfig& config, DType parameters) {
  config.validate();
  std::vector<mixers::StateEntry> all;
  for (const auto& block : Layers(config).blocks) {
    const auto entries = block->state_layout(1, 1, parameters);
    all.insert(all.end(), entries.begin(), entries.end());
  }
  return all;
}

mixers::Cost cost(const ModelConfig& config, std::int64_t length) {
  config.validate();
  Layers layers(config);
  mixers::Cost sum;
  layers.for_each_parameter([&](nn::Parameter& parameter) {
    if (parameter.shape.rank() != 2 || !parameter.multiplied) return;
    sum.forward_flops += 2.0 * static_cast<double>(parameter.shape.numel());
    sum.training_flops += 6.0 * static_cast<double>(parameter.shape.numel());
  });
  for (const auto& block : layers.blocks) sum += block->cost(length);
  return sum;
}

namespace {
// Up to here steps keep f32 activations.
constexpr std::int64_t kFewSequences = 8;

// Tokens of the longest sequence, as far as the host knows: else all of them.
std::int64_t longest_of(const nn::Sequences& sequences, std::int64_t length) {
  if (!sequences) return length;
  if (!sequences.host) return sequences.max_seqlen > 0 ? sequences.max_seqlen : 0;
  std::int64_t longest = 0;
  const auto* bounds = sequences.host.as<std::int32_t>();
  for (std::int64_t i = 0; i + 1 < sequences.host.size(0); ++i) {
    longest = std::max<std::int64_t>(longest, bounds[i + 1] - bounds[i]);
  }
  return longest;
}

// Rows of x [B,T,D] as [B*T,D], or those at some places as [R,D], in scratch.
TensorView rows_of(Context& context, const TensorView& x, const TensorView& places) {
  if (!places) return x.as_rows();
  const TensorView rows = context.scratch().tensor(Shape({places.size(0), x.size(2)}), x.dtype, "norms: inputs");
  ops::embedding::forward(context, places, x.as_rows(), rows);
  return rows;
}

// Rows [R,D] to their places in x [B,T,D], zeros elsewhere.
void spread_rows(Context& context, const TensorView& rows, const TensorView& places, const TensorView& x) {
  const ArenaScope scope(context.scratch());
  const DType wide = ops::accumulator_of(x.dtype);  // what rows are added to
  const TensorView sum = x.dtype == wide ? x : context.scratch().tensor(x.shape, wide, "blocks: gradient");
  ops::elementwise::zero(context, sum);
  ops::embedding::backward(context, places, rows, sum.as_rows());
  if (x.dtype != wide) ops::elementwise::convert(context, sum, x);
}

// x, what enters the first block or its gradient, with what falls out of it.
void drop_embeddings(const nn::Pass& pass, const TensorView& x) {
  if (pass.dropout.embeddings > 0.0) ops::dropout::run(pass.context, x, {}, x, pass.dropout.embedding_mask());
}

const ModelConfig& validated(const ModelConfig& config) {
  config.validate();
  return config;
}
}  // namespace

LanguageModel::LanguageModel(const ModelConfig& config, DType dtype, Device device, bool training,
                             const nn::Placements& placements, std::shared_ptr<const void> keeps, int threads)
    : config_(validated(config)),
      dtype_(dtype),
      device_(device),
      training_(training),
      inference_dtype_(dtype == DType::f64 ? DType::f64 : DType::f32),
      layers_(config),
      keeps_(std::move(keeps)) {
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f64) {
    throw Error("model", "dtype", std::string("is ") + name_of(dtype), "f32, bf16 or f64");
  }
  store_ = std::make_unique<nn::ParameterStore>(
      [this](const nn::ParameterVisitor& visit) { layers_.for_each_parameter(visit); }, dtype, device, training,
      placements, threads);
  if (!store_->packed()) return;
  if (training) throw Error("model", "weights", "are of 8 or 4 bits", "floats for training");
  if (dtype == DType::f64) throw Error("model", "dtype", "is f64", "f32 or bf16 beside weights of 8 or 4 bits");
}

void LanguageModel::set_inference_dtype(DType dtype) {
  const DType narrowest = dtype_ == DType::f64 ? DType::f64 : DType::f32;
  const bool wide = dtype_ == DType::bf16 && (device_.kind == Device::Kind::cuda || !store_->packed());
  if (dtype != narrowest && !(dtype == DType::bf16 && wide)) {
    throw Error("model", "inference dtype", std::string("is ") + name_of(dtype),
                wide ? "f32 or bf16" : name_of(narrowest));
  }
  inference_dtype_ = dtype;
}

bool LanguageModel::ring_pays(std::int64_t sequences) const {
  return ops::gated_linear_attention::ring_pays(device_, sequences);
}

void LanguageModel::fold_rings(const DecodeState& state) const {
  Context context(device_);
  for (std::size_t i = 0; i < layers_.blocks.size(); ++i) {
    layers_.blocks[i]->fold_ring(context, state.layer(i), state.positions());
  }
  context.queue().synchronize();
}

DecodeState LanguageModel::make_state(std::int64_t sequences, std::int64_t capacity, bool ring) const {
  const auto layouts_of = [this, ring](std::int64_t count, std::int64_t tokens) {
    DecodeState::Layouts layouts;
    for (const auto& block : layers_.blocks) layouts.push_back(block->state_layout(count, tokens, dtype_, ring));
    return layouts;
  };
  const auto& blocks = layers_.blocks;
  if (std::any_of(blocks.begin(), blocks.end(), [](const auto& block) { return block->prepares_steps(); })) {
    Context context(device_);
    for (const auto& block : blocks) block->prepare_steps(context, activation_dtype());
    context.queue().synchronize();
  }
  return DecodeState(layouts_of, sequences, capacity, device_, config_.most_tokens());
}

void LanguageModel::check_positions(const char* operation, std::int64_t tokens) const {
  const mixers::MostTokens most = config_.most_tokens();
  if (tokens <= most.count) return;
  throw Error(operation, "tokens", "reach position " + std::to_string(tokens) + " of a sequence",
              "at most the " + std::to_string(most.count) + " " + most.what);
}

void LanguageModel::check_capacity(const char* operation, const DecodeState& state, const nn::Sequences& sequences,
                                   std::int64_t length) const {
  if (!state.grows() && config_.most_tokens().count == mixers::MostTokens().count) return;
  for (std::int64_t i = 0; i < state.sequences(); ++i) {
    std::int64_t tokens = length;
    if (sequences.host) tokens = sequences.host.as<std::int32_t>()[i + 1] - sequences.host.as<std::int32_t>()[i];
    const std::int64_t needed = state.history[static_cast<std::size_t>(i)].tokens + tokens;
    check_positions(operation, needed);
    if (state.grows() && needed > state.capacity()) {
      throw Error(operation, "state", "has a capacity of " + std::to_string(state.capacity()) + " tokens a sequence",
                  "at least " + std::to_string(needed) + ", which sequence " + std::to_string(i) + " then has");
    }
  }
}

void LanguageModel::check_batch(const char* operation, const nn::Pass& pass, const TensorView& tokens,
                                const TensorView& targets, const TensorView& losses, const DecodeState* state,
                                const Scored& scored) const {
  const auto require = [&](bool ok, const char* argument, const TensorView& view, const std::string& expected) {
    if (!ok) {
      throw Error(operation, argument, std::string("is ") + name_of(view.dtype) + " " + to_string(view.shape),
                  expected);
    }
  };
  require(tokens.rank() == 2 && tokens.dtype == DType::i32, "tokens", tokens, "i32 [B,T]");
  const TensorView& asked = scored.places ? scored.places : tokens;
  require(asked.dtype == DType::i32 && (asked.rank() == 1 || !scored.places), "places", asked, "i32 [R]");
  require(targets.shape == asked.shape && targets.dtype == DType::i32, "targets", targets,
          "i32 " + to_string(asked.shape) + (scored.places ? " (as places)" : " (as tokens)"));
  const DType wide = ops::accumulator_of(dtype_);
  require(losses.rank() == 1 && losses.size(0) == asked.numel() && losses.dtype == wide, "losses", losses,
          std::string(name_of(wide)) + " [" + std::to_string(asked.numel()) + "]");
  require(!pass.sequences || tokens.size(0) == 1, "tokens", tokens, "batch 1 with packed sequences");
  const std::int64_t sequences = pass.sequences.count(tokens.size(0));
  if (!state) return check_positions(operation, longest_of(pass.sequences, tokens.size(1)));
  if (state->sequences() != sequences) {
    throw Error(operation, "state", "is of " + std::to_string(state->sequences()) + " sequences",
                std::to_string(sequences) + " (as in the batch)");
  }
  check_capacity(operation, *state, pass.sequences, tokens.size(1));
}

TensorView LanguageModel::positions_of(const nn::Pass& pass, const TensorView& tokens) const {
  const std::int64_t length = tokens.rank() == 2 ? tokens.size(1) : 1;
  const TensorView positions =
      pass.context.scratch().tensor(Shape({tokens.numel() / length, length}), DType::i32, "positions of tokens");
  ops::positions::of_tokens(pass.context, pass.positions, pass.sequences.bounds, positions);
  return positions;
}

void LanguageModel::embed(const nn::Pass& pass, const TensorView& tokens, const TensorView& x) const {
  look_up(pass, tokens, x);
  for (const nn::Norm& norm : layers_.embedding_norm) norm.forward(pass.context, x, x, {});
}

void LanguageModel::look_up(const nn::Pass& pass, const TensorView& tokens, const TensorView& x) const {
  Context& context = pass.context;
  const nn::Parameter& words = layers_.embedding;
  if (ops::quantised_linear::is_packed(words.value)) {
    ops::quantised_linear::look_up(context, tokens, words.value, words.shape[0], x);
  } else {
    ops::embedding::forward(context, tokens, words.value, x);
  }
  for (const nn::Parameter& table : layers_.positions) {
    const ArenaScope scope(context.scratch());
    const TensorView rows = context.scratch().tensor(x.shape, x.dtype, "positions of tokens");
    ops::embedding::forward(context, positions_of(pass, tokens).reshape(tokens.shape), table.value, rows);
    ops::elementwise::add(context, rows, x);
  }
}

TensorView LanguageModel::snapshot(Context& context, Arena& arena, const DecodeState* state) const {
  if (!state) return {};
  const TensorView& constant = state->constant();
  const TensorView copy = arena.tensor(constant.shape, constant.dtype, "states");
  if (!context.planning()) context.queue().copy(copy.data, constant.data, constant.bytes());
  return copy;
}

void LanguageModel::run_blocks(nn::Pass& pass, const TensorView& x, DecodeState* state) {
  const ArenaScope scope(pass.context.scratch());
  const TensorView start = snapshot(pass.context, pass.context.scratch(), state);
  pass.positions = state ? state->positions() : TensorView();
  for (std::size_t i = 0; i < layers_.blocks.size(); ++i) {
    layers_.blocks[i]->forward(pass, x, x, state ? state->layer_of(start, i) : mixers::LayerState(),
                               state ? state->layer(i) : mixers::LayerState());
  }
  if (state) ops::positions::advance(pass.context, state->positions(), pass.sequences.bounds, x.size(1));
}

void LanguageModel::evaluate(nn::Pass& pass, const TensorView& tokens, const TensorView& targets,
                             const TensorView& losses, DecodeState* state, const Scored& scored) {
  check_batch("evaluate", pass, tokens, targets, losses, state, scored);
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  nn::Pass inference = pass.without_keeping();
  inference.dropout = {};
  const TensorView x = context.scratch().tensor(Shape({tokens.size(0), tokens.size(1), config_.hidden_size}),
                                                activation_dtype(), "blocks: residual");
  inference.positions = state ? state->positions() : TensorView();
  embed(inference, tokens, x);
  run_blocks(inference, x, state);
  const TensorView rows = rows_of(context, x, scored.places);
  layers_.final_norm.forward(context, rows, rows, {});
  TensorView classes = head().value;
  if (ops::quantised_linear::is_packed(classes)) {
    classes = context.scratch().tensor(head().shape, activation_dtype(), "head in floats");
    ops::quantised_linear::decode(context, head().value, 0, classes);
  }
  ops::cross_entropy::forward(context, {rows, classes, targets.reshape(losses.shape)}, losses, scored.hits);
}

void LanguageModel::forward_backward(nn::Pass& pass, const TensorView& tokens, const TensorView& targets,
                                     const TensorView& losses, double gradient_scale, DecodeState* state,
                                     const Scored& scored) {
  check_batch("forward_backward", pass, tokens, targets, losses, state, scored);
  if (!training_) throw Error("forward_backward: the model was made for inference; make it with training = true");
  if (!pass.saved) throw Error("forward_backward: pass.saved is absent");
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const ArenaScope saved_scope(*pass.saved);
  const Shape shape({tokens.size(0), tokens.size(1), config_.hidden_size});

  const TensorView start = snapshot(context, *pass.saved, state);
  pass.positions = state ? state->positions() : TensorView();
  std::vector<TensorView> inputs;  // of each block, then of the final norm
  std::vector<Arena::Mark> marks;
  inputs.push_back(pass.saved->tensor(shape, dtype_, "blocks: residual"));
  look_up(pass, tokens, inputs.back());
  TensorView embedded, embedded_statistics;  // what is normalised
  for (const nn::Norm& norm : layers_.embedding_norm) {
    embedded = inputs.back();
    embedded_statistics = norm.take_statistics(*pass.saved, embedded);
    inputs.back() = pass.saved->tensor(shape, dtype_, "blocks: residual");
    norm.forward(context, embedded, inputs.back(), embedded_statistics);
  }
  drop_embeddings(pass, inputs.back());
  for (std::size_t i = 0; i < layers_.blocks.size(); ++i) {
    inputs.push_back(pass.saved->tensor(shape, dtype_, "blocks: residual"));
    marks.push_back(pass.saved->mark());
    layers_.blocks[i]->forward(pass, inputs[i], inputs[i + 1], state ? state->layer_of(start, i) : mixers::LayerState(),
                               state ? state->layer(i) : mixers::LayerState());
  }

  const TensorView d = scratch.tensor(shape, dtype_, "blocks: gradient");
  {
    const ArenaScope head_scope(scratch);
    const TensorView rows = rows_of(context, inputs.back(), scored.places);
    const TensorView drows = scored.places ? scratch.tensor(rows.shape, dtype_, "blocks: gradient") : d.as_rows();
    const TensorView normalized = scratch.tensor(rows.shape, dtype_, "norms: outputs");
    const TensorView statistics = layers_.final_norm.take_statistics(scratch, rows);
    layers_.final_norm.forward(context, rows, normalized, statistics);
    ops::cross_entropy::forward_backward(context, {normalized, head().value, targets.reshape(losses.shape)}, losses,
                                         drows, head().gradient, gradient_scale);
    layers_.final_norm.backward(context, rows, statistics, drows, drows, false);
    if (scored.places) spread_rows(context, drows, scored.places, d);
  }
  for (std::size_t i = layers_.blocks.size(); i-- > 0;) {
    layers_.blocks[i]->backward(pass, inputs[i], d);
    pass.saved->release(marks[i]);
  }
  drop_embeddings(pass, d);
  for (const nn::Norm& norm : layers_.embedding_norm) {
    norm.backward(context, embedded, embedded_statistics, d, d, false);
  }
  ops::embedding::backward(context, tokens, d, layers_.embedding.gradient);
  for (const nn::Parameter& table : layers_.positions) {
    ops::embedding::backward(context, positions_of(pass, tokens), d, table.gradient);
  }
  if (state) ops::positions::advance(context, state->positions(), pass.sequences.bounds, tokens.size(1));
}

void LanguageModel::prefill(Context& context, const TensorView& tokens, const nn::Sequences& sequences,
                            DecodeState& state, const TensorView& logits) {
  const std::int64_t count = state.sequences();
  if (tokens.rank() != 1 || tokens.dtype != DType::i32) {
    throw Error("prefill", "tokens", std::string("is ") + name_of(tokens.dtype) + " " + to_string(tokens.shape),
                "i32 [total]");
  }
  if (!(sequences.bounds.shape == Shape({count + 1})) || !(sequences.host.shape == Shape({count + 1})) ||
      sequences.host.dtype != DType::i32 || sequences.host.device != Device::cpu()) {
    throw Error("prefill", "sequences",
                std::string("have bounds ") + name_of(sequences.bounds.dtype) + " " + to_string(sequences.bounds.shape),
                "i32 [" + std::to_string(count + 1) + "] on the device and on the cpu (the state's sequences + 1)");
  }
  const auto* bounds = sequences.host.as<std::int32_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    if (bounds[i + 1] <= bounds[i]) throw Error("prefill: sequence " + std::to_string(i) + " has no token");
  }
  check_capacity("prefill", state, sequences, 0);
  const ArenaScope scope(context.scratch());
  nn::Pass pass{context};
  pass.sequences = sequences;
  const TensorView x =
      context.scratch().tensor(Shape({1, tokens.size(0), config_.hidden_size}), activation_dtype(), "blocks: residual");
  const TensorView last =
      context.scratch().tensor(Shape({count, config_.hidden_size}), activation_dtype(), "blocks: residual");
  pass.positions = state.positions();
  embed(pass, tokens.reshape(Shape({1, tokens.size(0)})), x);
  run_blocks(pass, x, &state);
  for (std::int64_t i = 0; i < count; ++i) {
    ops::elementwise::convert(context, x.as_rows().slice(0, bounds[i + 1] - 1, bounds[i + 1]), last.slice(0, i, i + 1));
  }
  layers_.final_norm.forward(context, last, last, {});
  ops::quantised_linear::multiply(context, last, head().value, logits);
}

void LanguageModel::hidden_states(nn::Pass& pass, const TensorView& tokens, const TensorView& hidden,
                                  DecodeState* state) {
  const std::int64_t total = tokens.rank() == 2 ? tokens.size(1) : 0;
  if (tokens.rank() != 2 || tokens.size(0) != 1 || total == 0 || tokens.dtype != DType::i32) {
    throw Error("hidden_states", "tokens", std::string("is ") + name_of(tokens.dtype) + " " + to_string(tokens.shape),
                "i32 [1, total]");
  }
  if (!(hidden.shape == Shape({total, config_.hidden_size})) || hidden.dtype != activation_dtype()) {
    throw Error("hidden_states", "hidden", std::string("is ") + name_of(hidden.dtype) + " " + to_string(hidden.shape),
                std::string(name_of(activation_dtype())) + " [" + std::to_string(total) + "," +
                    std::to_string(config_.hidden_size) + "]");
  }
  if (!state) check_positions("hidden_states", longest_of(pass.sequences, total));
  nn::Pass inference = pass.without_keeping();
  inference.dropout = {};
  inference.positions = state ? state->positions() : TensorView();
  embed(inference, tokens, hidden.reshape(Shape({1, total, config_.hidden_size})));
  run_blocks(inference, hidden.reshape(Shape({1, total, config_.hidden_size})), state);
  layers_.final_norm.forward(pass.context, hidden, hidden, {});
}

void LanguageModel::logits(Context& context, const TensorView& hidden, const TensorView& logits) {
  ops::quantised_linear::multiply(context, hidden, head().value, logits);
}

void LanguageModel::step(Context& context, const TensorView& tokens, DecodeState& state, const TensorView& logits) {
  const std::int64_t sequences = state.sequences();
  if (!(tokens.shape == Shape({sequences})) || tokens.dtype != DType::i32) {
    throw Error("step", "tokens", std::string("is ") + name_of(tokens.dtype) + " " + to_string(tokens.shape),
                "i32 [" + std::to_string(sequences) + "] (the state's sequences)");
  }
  check_capacity("step", state, {}, 1);
  const ArenaScope scope(context.scratch());
  nn::Pass pass{context};
  pass.positions = state.positions();
  // A few sequences' products are bound by the weights' bytes, not by the rate of multiplication.
  const DType few = dtype_ == DType::f64 ? DType::f64 : DType::f32;
  const TensorView x =
      context.scratch().tensor(Shape({sequences, config_.hidden_size}),
                               sequences <= kFewSequences ? few : activation_dtype(), "blocks: residual");
  embed(pass, tokens, x);
  for (std::size_t i = 0; i < layers_.blocks.size(); ++i) layers_.blocks[i]->step(pass, x, state.layer(i));
  const ops::linear_step::Layer output{head().value, {}, logits};
  ops::linear_step::run(context, layers_.final_norm.before_step(context, x), {&output, 1});
  ops::positions::advance(context, state.positions(), {}, 1);
}

}  // namespace flashgla::model

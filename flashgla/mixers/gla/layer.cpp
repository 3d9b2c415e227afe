// The layer of gla.h.

#include <array>
#include <cmath>

#include "flashgla/mixers/gla/config.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/mixers/scan_cost.h"
#include "flashgla/nn/linear.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"
#include "flashgla/ops/log_sigmoid_gate/log_sigmoid_gate.h"
#include "flashgla/ops/rms_norm/rms_norm.h"
#include "flashgla/ops/rms_norm_swish_gate/rms_norm_swish_gate.h"
#include "flashgla/ops/short_convolution/short_convolution.h"

namespace flashgla::mixers {

namespace {

namespace attention = ops::gated_linear_attention;
namespace convolution = ops::short_convolution;

// dtype of states and reciprocal deviations.
DType accumulation_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

std::vector<nn::Linear::Part> input_parts(const GlaConfig& config, const Common& common, const std::string& name) {
  const std::int64_t group = config.num_heads / config.kv_heads();
  return {{name + ".q_proj", config.key_dim(common)},
          {name + ".k_proj", config.key_dim(common) / group},
          {name + ".v_proj", config.value_dim(common) / group},
          {name + ".gk_proj.0", config.gate_low_rank_dim}};
}
enum Part : std::size_t { kQ, kK, kV, kLowRank };  // in the order of input_parts

class GatedLinearAttention : public Mixer {
 public:
  GatedLinearAttention(const GlaConfig& config, const Common& common, const std::string& name);

  void for_each_parameter(const nn::ParameterVisitor& visit) override;
  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t capacity, DType parameters) const override;
  void forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  Cost cost(std::int64_t length) const override;
  void step(nn::Pass& pass, const nn::RMSNorm& norm, const TensorView& x, const LayerState& state) override;

 private:
  // q, k and v [B,T,channels] of a forward, after the convolution where there is one.
  using Channels = std::array<TensorView, 3>;

  std::int64_t heads_of(std::size_t part) const { return part == kQ ? config_.num_heads : config_.kv_heads(); }
  TensorView convolution_weight(std::size_t i, const TensorView& of) const {
    return of.reshape(Shape({convolutions_[i].shape[0], config_.conv_size}));
  }
  static TensorView entry(const LayerState& state, std::size_t i) { return state.empty() ? TensorView() : state[i]; }

  void convolve(const nn::Pass& pass, const Channels& out, const LayerState& before, const LayerState& after);
  void gate(Context& context, const TensorView& logits, const TensorView& g);
  attention::Inputs attention_inputs(const nn::Sequences& sequences) const;
  attention::Options attention_options(const nn::Sequences& sequences) const;
  void normalize(Context& context, const TensorView& o, const TensorView& output_gate, const TensorView& y,
                 const TensorView& rstd);

  GlaConfig config_;
  double norm_eps_;
  std::int64_t key_dim_;       // query channels of all heads together
  std::int64_t value_dim_;     // value channels of the outputs of all heads together
  std::int64_t kv_key_dim_;    // key channels of all key-value heads together
  std::int64_t kv_value_dim_;  // value channels of the same
  nn::Linear input_;           // q, k, v and the low-rank gate: one matrix product
  nn::Linear gate_up_;
  std::vector<nn::Parameter> convolutions_;  // none, or those of q, k, v
  std::vector<nn::Parameter> norm_;          // none, or one
  std::vector<nn::Linear> output_gate_;      // none, or one
  nn::Linear output_;
  attention::Options options_;

  struct Saved {
    TensorView projected;    // [B,T,input_.out()]
    TensorView output_gate;  // [B,T,value_dim], before the swish; absent without it
    Channels channels;       // of convolution: recomputed in class activations
    TensorView logits;       // [B,T,kv_key_dim] of the gate: recomputed
    TensorView g;            // the log gate itself: recomputed
    TensorView o;            // [B,T,H,V]
    TensorView states;       // the operator's own: recomputed
    TensorView rstd;         // [B*T*H]
    TensorView normalized;   // [B,T,value_dim]: recomputed
    LayerState before;
  } saved_;
};

GatedLinearAttention::GatedLinearAttention(const GlaConfig& config, const Common& common, const std::string& name)
    : config_(config),
      norm_eps_(common.norm_eps),
      key_dim_(config.key_dim(common)),
      value_dim_(config.value_dim(common)),
      kv_key_dim_(config.key_dim(common) / config.num_heads * config.kv_heads()),
      kv_value_dim_(config.value_dim(common) / config.num_heads * config.kv_heads()),
      input_(input_parts(config, common, name), common.hidden_size, common.initializer_range),
      gate_up_({{name + ".gk_proj.1", kv_key_dim_}}, config.gate_low_rank_dim, common.initializer_range, true),
      output_({{name + ".o_proj", common.hidden_size}}, config.value_dim(common), common.initializer_range) {
  if (config.feature_map) options_.feature_map = attention::feature_map_from_name(*config.feature_map);
  if (config.use_output_gate) {
    output_gate_.push_back(nn::Linear({{name + ".g_proj", config.value_dim(common)}}, common.hidden_size,
                                      common.initializer_range, config.output_gate_bias));
  }
  if (config.use_short_conv) {
    const std::array<const char*, 3> names = {".q_conv1d", ".k_conv1d", ".v_conv1d"};
    const std::array<std::int64_t, 3> channels = {config.key_dim(common), kv_key_dim_, kv_value_dim_};
    for (std::size_t i = 0; i < 3; ++i) {
      nn::Parameter weight;
      weight.name = name + names[i] + ".weight";
      weight.shape = Shape({channels[i], 1, config.conv_size});
      // That of PyTorch's Conv1d. initializer_range would leave q, k and v so small that their product, cubic in
      // them, drowns in the epsilon of the norm behind the operator.
      weight.deviation = 1.0 / std::sqrt(3.0 * static_cast<double>(config.conv_size));
      weight.decay = false;
      convolutions_.push_back(std::move(weight));
    }
  }
  if (config.elementwise_affine) {
    nn::Parameter weight;
    weight.name = name + (config.use_output_gate ? ".g_norm_swish_gate.weight" : ".g_norm.weight");
    weight.shape = Shape({config.value_dim(common) / config.num_heads});
    weight.initialization = nn::Initialization::ones;
    weight.decay = false;
    norm_.push_back(std::move(weight));
  }
}

void GatedLinearAttention::for_each_parameter(const nn::ParameterVisitor& visit) {
  input_.for_each_parameter(visit);
  for (nn::Linear& gate : output_gate_) gate.for_each_parameter(visit);
  gate_up_.for_each_parameter(visit);
  for (nn::Parameter& weight : convolutions_) visit(weight);
  for (nn::Parameter& weight : norm_) visit(weight);
  output_.for_each_parameter(visit);
}

std::vector<StateEntry> GatedLinearAttention::state_layout(std::int64_t sequences, std::int64_t,
                                                           DType parameters) const {
  const DType dtype = accumulation_dtype(parameters);
  std::vector<StateEntry> layout = {
      {"h", Shape({sequences, config_.kv_heads(), key_dim_ / config_.num_heads, value_dim_ / config_.num_heads}),
       dtype}};
  const std::array<const char*, 3> names = {"conv_q", "conv_k", "conv_v"};
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    layout.push_back({names[i], Shape({sequences, convolutions_[i].shape[0], config_.conv_size - 1}), dtype});
  }
  return layout;
}

Cost GatedLinearAttention::cost(std::int64_t) const {
  return scan_cost(config_.num_heads, config_.kv_heads(), key_dim_ / config_.num_heads, value_dim_ / config_.num_heads);
}

void GatedLinearAttention::convolve(const nn::Pass& pass, const Channels& out, const LayerState& before,
                                    const LayerState& after) {
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    convolution::Inputs inputs;
    inputs.x = input_.part(saved_.projected, i);
    inputs.weight = convolution_weight(i, convolutions_[i].value);
    inputs.initial_state = entry(before, i + 1);
    inputs.cu_seqlens = pass.sequences.bounds;
    convolution::Outputs outputs;
    outputs.y = out[i];
    outputs.final_state = entry(after, i + 1);
    convolution::forward(pass.context, inputs, outputs, convolution::Activation::silu);
  }
}

void GatedLinearAttention::gate(Context& context, const TensorView& logits, const TensorView& g) {
  gate_up_.forward(context, input_.part(saved_.projected, kLowRank), logits);
  ops::log_sigmoid_gate::forward(context, logits, g, config_.gate_logit_normalizer,
                                 config_.clamp_min.value_or(ops::log_sigmoid_gate::kNoClamp));
}

attention::Inputs GatedLinearAttention::attention_inputs(const nn::Sequences& sequences) const {
  attention::Inputs inputs;
  inputs.q = saved_.channels[kQ].split_last(heads_of(kQ));
  inputs.k = saved_.channels[kK].split_last(heads_of(kK));
  inputs.v = saved_.channels[kV].split_last(heads_of(kV));
  inputs.g = saved_.g.split_last(config_.kv_heads());
  inputs.h0 = entry(saved_.before, 0);
  inputs.cu_seqlens = sequences.bounds;
  return inputs;
}

attention::Options GatedLinearAttention::attention_options(const nn::Sequences& sequences) const {
  attention::Options options = options_;
  options.max_seqlen = sequences.max_seqlen;
  return options;
}

void GatedLinearAttention::normalize(Context& context, const TensorView& o, const TensorView& output_gate,
                                     const TensorView& y, const TensorView& rstd) {
  const TensorView weight = norm_.empty() ? TensorView() : norm_.front().value;
  if (output_gate) {
    ops::rms_norm_swish_gate::forward(context, o, output_gate.split_last(config_.num_heads), weight, y, rstd,
                                      norm_eps_);
  } else {
    ops::rms_norm::Inputs inputs;
    inputs.x = o;
    inputs.weight = weight;
    ops::rms_norm::Outputs outputs;
    outputs.y = y;
    outputs.rstd = rstd;
    ops::rms_norm::forward(context, inputs, outputs, norm_eps_);
  }
}

void GatedLinearAttention::forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const LayerState& before,
                                   const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const std::int64_t batch = x.size(0);
  const std::int64_t length = x.size(1);
  const DType wide = accumulation_dtype(x.dtype);
  const auto sized = [&](std::int64_t channels) { return Shape({batch, length, channels}); };

  saved_.before = before;
  saved_.projected = pass.keep().tensor(sized(input_.out()), x.dtype, "gla: projections");
  input_.forward(context, x, saved_.projected);
  saved_.output_gate = {};
  for (const nn::Linear& gate : output_gate_) {
    saved_.output_gate = pass.keep().tensor(sized(gate.out()), x.dtype, "gla: projections");
    gate.forward(context, x, saved_.output_gate);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const TensorView channels = input_.part(saved_.projected, i);
    saved_.channels[i] = convolutions_.empty()
                             ? channels
                             : pass.keep_or_recompute().tensor(channels.shape, x.dtype, "gla: convolutions");
  }
  convolve(pass, saved_.channels, before, after);
  saved_.logits = pass.keep_or_recompute().tensor(sized(kv_key_dim_), x.dtype, "gla: gates");
  saved_.g = pass.keep_or_recompute().tensor(sized(kv_key_dim_), x.dtype, "gla: gates");
  gate(context, saved_.logits, saved_.g);

  saved_.o = pass.keep().tensor(sized(value_dim_), x.dtype, "gla: outputs").split_last(config_.num_heads);
  const attention::Inputs inputs = attention_inputs(pass.sequences);
  const attention::Options options = attention_options(pass.sequences);
  attention::Outputs outputs;
  outputs.o = saved_.o;
  outputs.ht = entry(after, 0);
  if (pass.training() && pass.recompute == nn::Recompute::nothing) {
    const std::size_t bytes = attention::states_bytes(context, attention::describe(inputs, options));
    if (bytes > 0) {
      outputs.states = pass.saved->tensor(Shape({static_cast<std::int64_t>(bytes)}), DType::u8, "gla: chunk states");
    }
  }
  saved_.states = outputs.states;
  attention::forward(context, inputs, outputs, options);

  saved_.rstd = pass.training()
                    ? pass.saved->tensor(Shape({batch * length * config_.num_heads}), wide, "norms: deviations")
                    : TensorView();
  saved_.normalized = pass.keep_or_recompute().tensor(saved_.o.shape, x.dtype, "gla: normalised outputs");
  normalize(context, saved_.o, saved_.output_gate, saved_.normalized, saved_.rstd);
  if (y) output_.forward(context, saved_.normalized.reshape(sized(value_dim_)), y);
}

void GatedLinearAttention::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const TensorView& projected = saved_.projected;
  const auto like = [&](const TensorView& view, DType dtype) {
    return scratch.tensor(view.shape, dtype, "gla: gradients");
  };

  if (pass.recompute == nn::Recompute::activations) {
    if (!convolutions_.empty()) {
      for (TensorView& channels : saved_.channels) channels = like(channels, x.dtype);
      convolve(pass, saved_.channels, saved_.before, {});
    }
    saved_.logits = like(saved_.logits, x.dtype);
    saved_.g = like(saved_.g, saved_.g.dtype);
    gate(context, saved_.logits, saved_.g);
    saved_.normalized = like(saved_.o, x.dtype);
    normalize(context, saved_.o, saved_.output_gate, saved_.normalized, {});
  }

  const TensorView dprojected = like(projected, x.dtype);
  const TensorView d_o = like(saved_.o, x.dtype);
  const Shape rows({x.size(0), x.size(1), value_dim_});
  output_.backward(context, saved_.normalized.reshape(rows), dy, d_o.reshape(rows));
  const TensorView weight = norm_.empty() ? TensorView() : norm_.front().value;
  const TensorView dweight = norm_.empty() ? TensorView() : norm_.front().gradient;
  TensorView doutput_gate;
  if (saved_.output_gate) {
    doutput_gate = like(saved_.output_gate, x.dtype);
    ops::rms_norm_swish_gate::backward(context, saved_.o, saved_.output_gate.split_last(config_.num_heads), weight,
                                       saved_.rstd, d_o, d_o, doutput_gate.split_last(config_.num_heads), dweight);
  } else {
    ops::rms_norm::backward(context, saved_.o, weight, saved_.rstd, d_o, d_o, false, dweight);
  }

  Channels dchannels;
  for (std::size_t i = 0; i < 3; ++i) {
    dchannels[i] = convolutions_.empty() ? input_.part(dprojected, i) : like(saved_.channels[i], x.dtype);
  }
  const TensorView dg = like(saved_.g, saved_.g.dtype);
  attention::Outputs outputs;
  outputs.o = saved_.o;
  outputs.states = saved_.states;
  attention::OutputGradients output_gradients;
  output_gradients.d_o = d_o;
  attention::InputGradients input_gradients;
  input_gradients.dq = dchannels[kQ].split_last(heads_of(kQ));
  input_gradients.dk = dchannels[kK].split_last(heads_of(kK));
  input_gradients.dv = dchannels[kV].split_last(heads_of(kV));
  input_gradients.dg = dg.split_last(config_.kv_heads());
  attention::backward(context, attention_inputs(pass.sequences), outputs, output_gradients, input_gradients,
                      attention_options(pass.sequences));

  const TensorView dlogits = like(saved_.logits, x.dtype);
  ops::log_sigmoid_gate::backward(context, saved_.logits, dg, dlogits, config_.gate_logit_normalizer,
                                  config_.clamp_min.value_or(ops::log_sigmoid_gate::kNoClamp));
  gate_up_.backward(context, input_.part(projected, kLowRank), dlogits, input_.part(dprojected, kLowRank));
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    convolution::Inputs inputs;
    inputs.x = input_.part(projected, i);
    inputs.weight = convolution_weight(i, convolutions_[i].value);
    inputs.initial_state = entry(saved_.before, i + 1);
    inputs.cu_seqlens = pass.sequences.bounds;
    convolution::OutputGradients gradients;
    gradients.dy = dchannels[i];
    convolution::InputGradients wanted;
    wanted.dx = input_.part(dprojected, i);
    wanted.dweight = convolution_weight(i, convolutions_[i].gradient);
    convolution::backward(context, inputs, gradients, wanted, convolution::Activation::silu);
  }
  input_.backward(context, x, dprojected, dx);
  for (const nn::Linear& gate : output_gate_) gate.backward(context, x, doutput_gate, dx, true);
}

void GatedLinearAttention::step(nn::Pass& pass, const nn::RMSNorm& norm, const TensorView& x, const LayerState& state) {
  namespace linear_step = ops::linear_step;
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const std::int64_t batch = x.size(0);
  const TensorView projected = scratch.tensor(Shape({batch, input_.out()}), x.dtype, "gla: projections");
  TensorView output_gate;
  std::vector<linear_step::Layer> inputs_of_mixer = {input_.step_layer(projected)};
  for (const nn::Linear& gate : output_gate_) {
    output_gate = scratch.tensor(Shape({batch, gate.out()}), x.dtype, "gla: projections");
    inputs_of_mixer.push_back(gate.step_layer(output_gate));
  }
  linear_step::run(context, norm.before_step(x), inputs_of_mixer);
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    const TensorView channels = input_.part(projected, i);
    convolution::step(context, channels, convolution_weight(i, convolutions_[i].value), state[i + 1], channels,
                      convolution::Activation::silu);
  }
  const TensorView g = scratch.tensor(Shape({batch, kv_key_dim_}), x.dtype, "gla: gates");
  const linear_step::Layer gate_up = gate_up_.step_layer(g);
  linear_step::run(context, {input_.part(projected, kLowRank)}, {&gate_up, 1},
                   {linear_step::Epilogue::log_sigmoid, config_.gate_logit_normalizer,
                    config_.clamp_min.value_or(ops::log_sigmoid_gate::kNoClamp)});
  attention::StepInputs inputs;
  inputs.q = input_.part(projected, kQ).split_last(heads_of(kQ));
  inputs.k = input_.part(projected, kK).split_last(heads_of(kK));
  inputs.v = input_.part(projected, kV).split_last(heads_of(kV));
  inputs.g = g.split_last(config_.kv_heads());
  const TensorView o = scratch.tensor(Shape({batch, value_dim_}), x.dtype, "gla: outputs");
  attention::step(context, inputs, state[0], {}, o.split_last(config_.num_heads), options_);
  linear_step::Inputs normalized{
      o,         linear_step::Prologue::head_norm, norm_.empty() ? TensorView() : norm_.front().value,
      norm_eps_, value_dim_ / config_.num_heads,   output_gate};
  const linear_step::Layer output = output_.step_layer(x);
  linear_step::run(context, normalized, {&output, 1}, {linear_step::Epilogue::add});
}

}  // namespace

std::unique_ptr<Mixer> GlaConfig::create(const Common& common, std::int64_t layer) const {
  return std::make_unique<GatedLinearAttention>(*this, common, layer_prefix(layer) + ".attn");
}

}  // namespace flashgla::mixers

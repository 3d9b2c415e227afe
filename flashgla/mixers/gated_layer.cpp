#include "flashgla/mixers/gated_layer.h"

#include <array>
#include <cmath>

#include "flashgla/base/memory.h"
#include "flashgla/mixers/scan_cost.h"
#include "flashgla/nn/linear.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/gated_linear_attention/ring.h"
#include "flashgla/ops/rms_norm/rms_norm.h"
#include "flashgla/ops/rms_norm_swish_gate/rms_norm_swish_gate.h"
#include "flashgla/ops/rotary/rotary.h"
#include "flashgla/ops/short_convolution/short_convolution.h"

namespace flashgla::mixers {

namespace {

namespace attention = ops::gated_linear_attention;
namespace convolution = ops::short_convolution;

using Gate = GatedLayerSettings::Gate;

// Names of the gates by channel, behind the layer's: that over keys, that over values.
std::vector<const char*> low_rank_sides(Gate gate) {
  if (gate == Gate::key) return {".gk_proj"};
  if (gate == Gate::value) return {".gv_proj"};
  if (gate == Gate::key_value) return {".gk_proj", ".gv_proj"};
  return {};
}

std::vector<nn::Linear::Part> input_parts(const GatedLayerSettings& settings) {
  const std::int64_t group = settings.num_heads / settings.kv_heads;
  std::vector<nn::Linear::Part> parts = {{settings.name + ".q_proj", settings.key_dim},
                                         {settings.name + ".k_proj", settings.key_dim / group},
                                         {settings.name + ".v_proj", settings.value_dim / group}};
  for (const char* side : low_rank_sides(settings.gate)) {
    parts.push_back({settings.name + side + ".0", settings.gate_low_rank_dim, nn::Quantisation::none});
  }
  return parts;
}
enum Part : std::size_t { kQ, kK, kV, kLowRank };  // in the order of input_parts; kLowRank and on: those of gates

class GatedLayer : public Mixer {
 public:
  explicit GatedLayer(const GatedLayerSettings& settings);

  void for_each_parameter(const nn::ParameterVisitor& visit) override;
  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t capacity, DType parameters) const override;
  std::vector<StateEntry> ring_layout(std::int64_t sequences, DType parameters) const override;
  void fold_ring(Context& context, const LayerState& state, const TensorView& positions) const override {
    if (const TensorView inputs = ring_of(state)) attention::fold(context, {inputs, positions}, state[0], state[0]);
  }
  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  Cost cost(std::int64_t length) const override;
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) override;

 private:
  // q, k and v [B,T,channels] of a forward, after the convolution where there
  // is one.
  using Channels = std::array<TensorView, 3>;

  std::int64_t heads_of(std::size_t part) const { return part == kQ ? settings_.num_heads : settings_.kv_heads; }
  TensorView convolution_weight(std::size_t i, const TensorView& of) const {
    return of.reshape(Shape({convolutions_[i].shape[0], settings_.conv_size}));
  }
  static TensorView entry(const LayerState& state, std::size_t i) { return state.empty() ? TensorView() : state[i]; }
  // Of the normaliser, and of the ring: absent where there is none.
  TensorView z_of(const LayerState& state) const {
    return settings_.normalize ? entry(state, 1 + convolutions_.size()) : TensorView();
  }
  TensorView ring_of(const LayerState& state) const {
    const std::size_t ring = 1 + convolutions_.size() + (settings_.normalize ? 1 : 0);
    return ring < state.size() ? state[ring] : TensorView();
  }

  // q, k and v from the projections: convolved and turned.
  void prepare(const nn::Pass& pass, const Channels& out, const LayerState& before, const LayerState& after);
  void rotate(const nn::Pass& pass, const Channels& of, ops::rotary::Direction direction) const;
  // One gate that is computed: what gives its logits, and what that reads.
  struct GateSide {
    nn::Linear projection;
    std::size_t part;  // of the projections; 0: x itself
    bool values;       // over the state's value channels
  };
  TensorView gate_input(const GateSide& side, const TensorView& x, const TensorView& projected) const {
    return side.part > 0 ? input_.part(projected, side.part) : x;
  }
  // Of a head as the operator sees it.
  std::int64_t key_features() const {
    return maps_.empty() ? settings_.key_dim / settings_.num_heads : maps_.front().features();
  }
  const HeadMap& map_of(std::size_t part) const { return maps_[part == kQ ? 0 : maps_.size() - 1]; }
  bool divides(std::size_t part) const {
    return part == kQ ? settings_.head_map->divide_q : settings_.head_map->divide_k;
  }
  // Features of q and k from saved_.channels.
  void map_heads(Context& context, const TensorView& q, const TensorView& k) const;
  double clamp() const { return settings_.clamp_min.value_or(attention::kNoClamp); }
  void compute_gates(Context& context, const TensorView& x);
  const TensorView& constant_gate(const Context& context, DType dtype);
  // A gate as the operator takes it: by channel, or one a head.
  TensorView gate_of(const GateSide& side, const TensorView& g) const {
    return side.part > 0 ? g.split_last(settings_.kv_heads) : g;
  }
  attention::Inputs attention_inputs(const nn::Sequences& sequences) const;
  attention::Options attention_options(const nn::Sequences& sequences) const;
  void normalize(Context& context, const TensorView& o, const TensorView& output_gate, const TensorView& y,
                 const TensorView& rstd);

  GatedLayerSettings settings_;
  std::int64_t kv_key_dim_;                  // key channels of all key-value heads together
  std::int64_t kv_value_dim_;                // value channels of the same
  nn::Linear input_;                         // q, k, v and a low-rank gate: one matrix product
  std::vector<HeadMap> maps_;                // none, that of q and k, or one each
  std::vector<GateSide> gates_;              // at most two
  Tensor constant_gate_;                     // [heads], on the device of the first call
  std::vector<nn::Parameter> convolutions_;  // none, or those of q, k, v
  std::vector<nn::Parameter> norm_;          // none, or one
  std::vector<nn::Linear> output_gate_;      // none, or one
  nn::Linear output_;
  attention::Options options_;

  struct Saved {
    TensorView projected;    // [B,T,input_.out()]
    TensorView output_gate;  // [B,T,value_dim], before the swish; absent without it
    Channels channels;       // of convolution: recomputed in class activations
    TensorView features[2];  // of q and k where there are maps [B,T,heads,features]: recomputed
    TensorView logits[2];    // of gates_, [B,T,channels]: recomputed
    TensorView constant;     // a constant gate
    TensorView o;            // [B,T,H,V]
    TensorView states;       // the operator's own: recomputed
    TensorView rstd;         // [B*T*H]
    TensorView normalized;   // [B,T,value_dim]: recomputed
    LayerState before;
  } saved_;
};

GatedLayer::GatedLayer(const GatedLayerSettings& settings)
    : settings_(settings),
      kv_key_dim_(settings.key_dim / settings.num_heads * settings.kv_heads),
      kv_value_dim_(settings.value_dim / settings.num_heads * settings.kv_heads),
      input_(input_parts(settings), settings.common.hidden_size, settings.common.initializer_range),
      output_({{settings.name + ".o_proj", settings.common.hidden_size, nn::Quantisation::sensitive}},
              settings.value_dim, settings.common.initializer_range) {
  const std::string& name = settings.name;
  const double deviation = settings.common.initializer_range;
  options_.feature_map = settings.feature_map;
  options_.normalize = settings.normalize;
  if (settings.head_map) {
    const auto add = [&](const char* of) {
      maps_.emplace_back(settings.head_map->kind, name + of, settings.key_dim / settings.num_heads, deviation);
    };
    add(".feature_map_q");
    if (!settings.head_map->tied) add(".feature_map_k");
  }
  for (const char* side : low_rank_sides(settings.gate)) {
    const bool values = std::string_view(side) == ".gv_proj";
    gates_.push_back({nn::Linear({{name + side + ".1", values ? kv_value_dim_ : kv_key_dim_, nn::Quantisation::none}},
                                 settings.gate_low_rank_dim, deviation, true),
                      kLowRank + gates_.size(), values});
  }
  if (settings.gate == Gate::scalar) {
    gates_.push_back({nn::Linear({{name + ".gk_proj", settings.kv_heads, nn::Quantisation::none}},
                                 settings.common.hidden_size, deviation, true),
                      0, false});
  }
  if (settings.output_gate) {
    output_gate_.push_back(nn::Linear({{name + ".g_proj", settings.value_dim}}, settings.common.hidden_size, deviation,
                                      settings.output_gate_bias));
  }
  if (settings.conv_size > 0) {
    const std::array<const char*, 3> names = {".q_conv1d", ".k_conv1d", ".v_conv1d"};
    const std::array<std::int64_t, 3> channels = {settings.key_dim, kv_key_dim_, kv_value_dim_};
    for (std::size_t i = 0; i < 3; ++i) {
      convolutions_.push_back(nn::convolution_filter(name + names[i] + ".weight", channels[i], settings.conv_size));
    }
  }
  if (!settings.norm_name.empty()) {
    nn::Parameter weight;
    weight.name = name + settings.norm_name;
    weight.shape = Shape({settings.value_dim / settings.num_heads});
    weight.initialization = nn::Initialization::ones;
    weight.decay = false;
    norm_.push_back(std::move(weight));
  }
}

void GatedLayer::for_each_parameter(const nn::ParameterVisitor& visit) {
  input_.for_each_parameter(visit);
  for (HeadMap& map : maps_) map.for_each_parameter(visit);
  for (nn::Linear& gate : output_gate_) gate.for_each_parameter(visit);
  for (GateSide& side : gates_) side.projection.for_each_parameter(visit);
  for (nn::Parameter& weight : convolutions_) visit(weight);
  for (nn::Parameter& weight : norm_) visit(weight);
  output_.for_each_parameter(visit);
}

std::vector<StateEntry> GatedLayer::state_layout(std::int64_t sequences, std::int64_t, DType parameters) const {
  const DType dtype = ops::accumulator_of(parameters);
  std::vector<StateEntry> layout = {
      {"h", Shape({sequences, settings_.kv_heads, key_features(), settings_.value_dim / settings_.num_heads}), dtype}};
  const std::array<const char*, 3> names = {"conv_q", "conv_k", "conv_v"};
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    layout.push_back({names[i], Shape({sequences, convolutions_[i].shape[0], settings_.conv_size - 1}), dtype});
  }
  if (settings_.normalize) {
    layout.push_back({"z", Shape({sequences, settings_.kv_heads, key_features()}), dtype});
  }
  return layout;
}

std::vector<StateEntry> GatedLayer::ring_layout(std::int64_t sequences, DType parameters) const {
  const bool over_values = settings_.gate == Gate::value || settings_.gate == Gate::key_value;
  if (over_values || settings_.normalize || settings_.kv_heads != settings_.num_heads) return {};
  const std::int64_t K = key_features(), V = settings_.value_dim / settings_.num_heads;
  StateEntry entry{"ring", Shape({sequences, settings_.kv_heads, attention::kRing, 2 * K + V}),
                   ops::accumulator_of(parameters)};
  entry.ring = true;
  return {entry};
}

Cost GatedLayer::cost(std::int64_t) const {
  Cost cost =
      scan_cost(settings_.num_heads, settings_.kv_heads, key_features(), settings_.value_dim / settings_.num_heads);
  if (!maps_.empty()) {
    const double flops = maps_.front().flops() * static_cast<double>(settings_.num_heads + settings_.kv_heads);
    cost.forward_flops += flops;
    cost.training_flops += 3.0 * flops;
  }
  return cost;
}

void GatedLayer::rotate(const nn::Pass& pass, const Channels& of, ops::rotary::Direction direction) const {
  if (settings_.rope_base == 0.0) return;
  const auto turn = [&](const TensorView& heads) {
    ops::rotary::run(pass.context, heads, pass.positions, pass.sequences.bounds, settings_.rope_base, direction, heads);
  };
  if (convolutions_.empty()) {  // q and k lie side by side: one call turns all their heads
    TensorView both = of[kQ];
    both.shape[-1] += of[kK].size(-1);
    return turn(both.split_last(settings_.num_heads + settings_.kv_heads));
  }
  for (const std::size_t part : {kQ, kK}) turn(of[part].split_last(heads_of(part)));
}

void GatedLayer::prepare(const nn::Pass& pass, const Channels& out, const LayerState& before, const LayerState& after) {
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
  rotate(pass, out, ops::rotary::Direction::forward);
}

void GatedLayer::map_heads(Context& context, const TensorView& q, const TensorView& k) const {
  map_of(kQ).forward(context, saved_.channels[kQ].split_last(heads_of(kQ)), q, divides(kQ));
  map_of(kK).forward(context, saved_.channels[kK].split_last(heads_of(kK)), k, divides(kK));
}

void GatedLayer::compute_gates(Context& context, const TensorView& x) {
  for (std::size_t i = 0; i < gates_.size(); ++i) {
    gates_[i].projection.forward(context, gate_input(gates_[i], x, saved_.projected), saved_.logits[i]);
  }
}

const TensorView& GatedLayer::constant_gate(const Context& context, DType dtype) {
  // Made at the first call, which is one that plans where anything is planned.
  if (!constant_gate_ || constant_gate_->device != context.device() || constant_gate_->dtype != dtype) {
    const Tensor host = Tensor::empty(Shape({settings_.kv_heads}), dtype);
    for (std::int64_t head = 0; head < settings_.kv_heads; ++head) {
      store_element(host, std::array{head}, settings_.constant_gate[static_cast<std::size_t>(head)]);
    }
    constant_gate_ = Tensor::empty(host->shape, dtype, context.device());
    copy_memory(constant_gate_->data, context.device(), host->data, Device::cpu(), host->bytes());
  }
  return constant_gate_.view();
}

attention::Inputs GatedLayer::attention_inputs(const nn::Sequences& sequences) const {
  attention::Inputs inputs;
  inputs.q = maps_.empty() ? saved_.channels[kQ].split_last(heads_of(kQ)) : saved_.features[kQ];
  inputs.k = maps_.empty() ? saved_.channels[kK].split_last(heads_of(kK)) : saved_.features[kK];
  inputs.v = saved_.channels[kV].split_last(heads_of(kV));
  inputs.g = saved_.constant;
  for (std::size_t i = 0; i < gates_.size(); ++i) {
    (gates_[i].values ? inputs.gv : inputs.g) = gate_of(gates_[i], saved_.logits[i]);
  }
  inputs.h0 = entry(saved_.before, 0);
  inputs.z0 = z_of(saved_.before);
  inputs.cu_seqlens = sequences.bounds;
  return inputs;
}

attention::Options GatedLayer::attention_options(const nn::Sequences& sequences) const {
  attention::Options options = options_;
  options.max_seqlen = sequences.max_seqlen;
  if (!gates_.empty()) {
    options.gate_logit_normalizer = settings_.gate_logit_normalizer;
    options.gate_clamp_min = clamp();
  }
  return options;
}

void GatedLayer::normalize(Context& context, const TensorView& o, const TensorView& output_gate, const TensorView& y,
                           const TensorView& rstd) {
  const TensorView weight = norm_.empty() ? TensorView() : norm_.front().value;
  if (output_gate) {
    ops::rms_norm_swish_gate::forward(context, o, output_gate.split_last(settings_.num_heads), weight, y, rstd,
                                      settings_.common.norm_eps);
  } else {
    ops::rms_norm::Inputs inputs;
    inputs.x = o;
    inputs.weight = weight;
    ops::rms_norm::Outputs outputs;
    outputs.y = y;
    outputs.rstd = rstd;
    ops::rms_norm::forward(context, inputs, outputs, settings_.common.norm_eps);
  }
}

void GatedLayer::forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                         const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const std::int64_t batch = x.size(0);
  const std::int64_t length = x.size(1);
  const DType wide = ops::accumulator_of(x.dtype);
  const auto sized = [&](std::int64_t channels) { return Shape({batch, length, channels}); };

  saved_.before = before;
  if (const TensorView inputs = ring_of(before)) {
    saved_.before[0] = pass.keep().tensor(before[0].shape, before[0].dtype, "states");
    attention::fold(context, {inputs, pass.positions}, before[0], saved_.before[0]);
  }
  if (const TensorView inputs = ring_of(after); inputs && !context.planning()) {
    context.queue().zero(inputs.data, inputs.bytes());
  }
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
  prepare(pass, saved_.channels, before, after);
  if (!maps_.empty()) {
    for (const std::size_t part : {kQ, kK}) {
      saved_.features[part] = pass.keep_or_recompute().tensor(Shape({batch, length, heads_of(part), key_features()}),
                                                              x.dtype, "gla: feature maps");
    }
    map_heads(context, saved_.features[kQ], saved_.features[kK]);
  }
  for (std::size_t i = 0; i < gates_.size(); ++i) {
    saved_.logits[i] = pass.keep_or_recompute().tensor(sized(gates_[i].projection.out()), x.dtype, "gla: gates");
  }
  compute_gates(context, x);
  if (settings_.gate == Gate::constant) saved_.constant = constant_gate(context, wide);

  saved_.o = pass.keep().tensor(sized(settings_.value_dim), x.dtype, "gla: outputs").split_last(settings_.num_heads);
  const attention::Inputs inputs = attention_inputs(pass.sequences);
  const attention::Options options = attention_options(pass.sequences);
  attention::Outputs outputs;
  outputs.o = saved_.o;
  outputs.ht = entry(after, 0);
  outputs.zt = z_of(after);
  outputs.states = pass.keep_states(
      [&] { return attention::states_bytes(context, attention::describe(inputs, options)); }, "gla: chunk states");
  saved_.states = outputs.states;
  attention::forward(context, inputs, outputs, options);

  saved_.rstd = pass.training()
                    ? pass.saved->tensor(Shape({batch * length * settings_.num_heads}), wide, "norms: statistics")
                    : TensorView();
  saved_.normalized = pass.keep_or_recompute().tensor(saved_.o.shape, x.dtype, "gla: normalised outputs");
  normalize(context, saved_.o, saved_.output_gate, saved_.normalized, saved_.rstd);
  if (y) output_.forward(context, saved_.normalized.reshape(sized(settings_.value_dim)), y);
}

void GatedLayer::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
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
      prepare(pass, saved_.channels, saved_.before, {});
    }
    if (!maps_.empty()) {
      for (TensorView& features : saved_.features) features = like(features, x.dtype);
      map_heads(context, saved_.features[kQ], saved_.features[kK]);
    }
    for (std::size_t i = 0; i < gates_.size(); ++i) {
      saved_.logits[i] = like(saved_.logits[i], x.dtype);
    }
    compute_gates(context, x);
    saved_.normalized = like(saved_.o, x.dtype);
    normalize(context, saved_.o, saved_.output_gate, saved_.normalized, {});
  }

  const TensorView dprojected = like(projected, x.dtype);
  const TensorView d_o = like(saved_.o, x.dtype);
  const Shape rows({x.size(0), x.size(1), settings_.value_dim});
  output_.backward(context, saved_.normalized.reshape(rows), dy, d_o.reshape(rows));
  const TensorView weight = norm_.empty() ? TensorView() : norm_.front().value;
  const TensorView dweight = norm_.empty() ? TensorView() : norm_.front().gradient;
  TensorView doutput_gate;
  if (saved_.output_gate) {
    doutput_gate = like(saved_.output_gate, x.dtype);
    ops::rms_norm_swish_gate::backward(context, saved_.o, saved_.output_gate.split_last(settings_.num_heads), weight,
                                       saved_.rstd, d_o, d_o, doutput_gate.split_last(settings_.num_heads), dweight);
  } else {
    ops::rms_norm::backward(context, saved_.o, weight, saved_.rstd, d_o, d_o, false, dweight);
  }

  Channels dchannels;
  for (std::size_t i = 0; i < 3; ++i) {
    dchannels[i] = convolutions_.empty() ? input_.part(dprojected, i) : like(saved_.channels[i], x.dtype);
  }
  TensorView dlogits[2];
  for (std::size_t i = 0; i < gates_.size(); ++i) dlogits[i] = like(saved_.logits[i], x.dtype);
  attention::Outputs outputs;
  outputs.o = saved_.o;
  outputs.states = saved_.states;
  attention::OutputGradients output_gradients;
  output_gradients.d_o = d_o;
  attention::InputGradients input_gradients;
  const auto gradient_of = [&](std::size_t part) {
    return maps_.empty() ? dchannels[part].split_last(heads_of(part)) : like(saved_.features[part], x.dtype);
  };
  input_gradients.dq = gradient_of(kQ);
  input_gradients.dk = gradient_of(kK);
  input_gradients.dv = dchannels[kV].split_last(heads_of(kV));
  for (std::size_t i = 0; i < gates_.size(); ++i) {
    (gates_[i].values ? input_gradients.dgv : input_gradients.dg) = gate_of(gates_[i], dlogits[i]);
  }
  attention::backward(context, attention_inputs(pass.sequences), outputs, output_gradients, input_gradients,
                      attention_options(pass.sequences));
  if (!maps_.empty()) {
    for (const std::size_t part : {kQ, kK}) {
      map_of(part).backward(context, saved_.channels[part].split_last(heads_of(part)),
                            part == kQ ? input_gradients.dq : input_gradients.dk,
                            dchannels[part].split_last(heads_of(part)), divides(part));
    }
  }
  rotate(pass, dchannels, ops::rotary::Direction::inverse);

  for (std::size_t i = 0; i < gates_.size(); ++i) {
    if (gates_[i].part == 0) continue;
    gates_[i].projection.backward(context, input_.part(projected, gates_[i].part), dlogits[i],
                                  input_.part(dprojected, gates_[i].part));
  }
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
  for (std::size_t i = 0; i < gates_.size(); ++i) {
    if (gates_[i].part == 0) gates_[i].projection.backward(context, x, dlogits[i], dx, true);
  }
}

void GatedLayer::step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) {
  namespace linear_step = ops::linear_step;
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const std::int64_t batch = x.size(0);
  const TensorView projected = scratch.tensor(Shape({batch, input_.out()}), x.dtype, "gla: projections");
  TensorView output_gate;
  std::vector<linear_step::Layer> inputs_of_mixer = input_.step_layers(projected);
  linear_step::Options turning;
  const bool turns_at_once = settings_.rope_base > 0.0 && convolutions_.empty();
  if (turns_at_once) {
    turning.rotary = {settings_.rope_base, settings_.key_dim / settings_.num_heads, pass.positions};
    linear_step::turn_first(inputs_of_mixer, settings_.key_dim + kv_key_dim_);
  }
  for (const nn::Linear& gate : output_gate_) {
    output_gate = scratch.tensor(Shape({batch, gate.out()}), x.dtype, "gla: projections");
    inputs_of_mixer.push_back(gate.step_layer(output_gate));
  }
  linear_step::run(context, norm.before_step(context, x), inputs_of_mixer, turning);
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    const TensorView channels = input_.part(projected, i);
    convolution::step(context, channels, convolution_weight(i, convolutions_[i].value), state[i + 1], channels,
                      convolution::Activation::silu);
  }
  if (settings_.rope_base > 0.0 && !turns_at_once) {
    const TensorView tokens = projected.reshape(Shape({batch, 1, input_.out()}));
    rotate(pass, {input_.part(tokens, kQ), input_.part(tokens, kK), input_.part(tokens, kV)},
           ops::rotary::Direction::forward);
  }
  attention::StepInputs inputs;
  attention::Options options = options_;
  inputs.q = input_.part(projected, kQ).split_last(heads_of(kQ));
  inputs.k = input_.part(projected, kK).split_last(heads_of(kK));
  inputs.v = input_.part(projected, kV).split_last(heads_of(kV));
  if (!maps_.empty()) {
    const auto map = [&](std::size_t part, TensorView& heads) {
      const TensorView features =
          scratch.tensor(Shape({batch, heads_of(part), key_features()}), x.dtype, "gla: feature maps");
      map_of(part).forward(context, heads, features, divides(part));
      heads = features;
    };
    map(kQ, inputs.q);
    map(kK, inputs.k);
  }
  bool has_gates = false;
  if (gates_.size() == 1 && gates_.front().part > 0 && !gates_.front().values) {  // the step may compute it itself
    const linear_step::Layer gate = gates_.front().projection.step_layer({});
    inputs.projection = {input_.part(projected, gates_.front().part), gate.weight, gate.bias};
    options.gate_logit_normalizer = settings_.gate_logit_normalizer;
    options.gate_clamp_min = clamp();
    has_gates = attention::step_projects(context, inputs, state[0], options);
  }
  if (!has_gates) {
    inputs.projection = {};
    options = options_;
    for (const GateSide& side : gates_) {
      const TensorView g = scratch.tensor(Shape({batch, side.projection.out()}), x.dtype, "gla: gates");
      side.projection.step(
          context,
          side.part > 0 ? linear_step::Inputs{input_.part(projected, side.part)} : norm.before_step(context, x), g,
          {linear_step::Epilogue::log_sigmoid, settings_.gate_logit_normalizer, clamp()});
      (side.values ? inputs.gv : inputs.g) = gate_of(side, g);
    }
  }
  if (settings_.gate == Gate::constant) inputs.g = constant_gate(context, ops::accumulator_of(x.dtype));
  const TensorView o = scratch.tensor(Shape({batch, settings_.value_dim}), x.dtype, "gla: outputs");
  const TensorView heads = o.split_last(settings_.num_heads);
  if (const TensorView ring = ring_of(state)) {
    attention::step(context, inputs, {ring, pass.positions}, state[0], heads, options);
  } else {
    attention::step(context, inputs, state[0], z_of(state), heads, options);
  }
  linear_step::Inputs normalized{o,
                                 linear_step::Prologue::head_norm,
                                 norm_.empty() ? TensorView() : norm_.front().value,
                                 settings_.common.norm_eps,
                                 settings_.value_dim / settings_.num_heads,
                                 output_gate};
  output_.step(context, normalized, x, {linear_step::Epilogue::add});
}

}  // namespace

std::vector<double> retention_decays(std::int64_t heads) {
  std::vector<double> decays;
  for (std::int64_t h = 0; h < heads; ++h) decays.push_back(std::log1p(-std::exp2(-5.0 - static_cast<double>(h))));
  return decays;
}

void require_heads(const Common& common, std::int64_t num_heads, double expand_k, double expand_v) {
  require_size("num_heads", num_heads, common.hidden_size);
  const auto whole = [&](const char* field, double ratio) {
    require(ratio > 0.0 && ratio <= 64.0, field, std::to_string(ratio), "more than 0 and at most 64");
    const std::int64_t channels = expanded(common, ratio);
    require(
        channels > 0 && channels % num_heads == 0, field, std::to_string(ratio),
        std::string("hidden_size * ") + field + " to be a positive multiple of num_heads " + std::to_string(num_heads));
  };
  whole("expand_k", expand_k);
  whole("expand_v", expand_v);
}

std::unique_ptr<Mixer> make_gated_layer(const GatedLayerSettings& settings) {
  return std::make_unique<GatedLayer>(settings);
}

}  // namespace flashgla::mixers

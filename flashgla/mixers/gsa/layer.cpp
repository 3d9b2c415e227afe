// The layer of gsa.h.
#include <array>

#include "flashgla/mixers/gated_layer.h"
#include "flashgla/mixers/gsa/config.h"
#include "flashgla/mixers/inner_norm.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/mixers/scan_cost.h"
#include "flashgla/nn/linear.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/forget_gate/forget_gate.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"
#include "flashgla/ops/short_convolution/short_convolution.h"
#include "flashgla/ops/softmax/softmax.h"

namespace flashgla::mixers {

namespace {

namespace attention = ops::gated_linear_attention;
namespace convolution = ops::short_convolution;

class Gsa : public Mixer {
  enum Part : std::size_t { kQ, kK, kV, kF };  // of the projections; the first three are convolved
  static constexpr std::array kConvolved = {kQ, kK, kV};
  enum Call : std::size_t { kKeys, kValues };  // which of the slots' halves a call of the operator updates and reads

 public:
  Gsa(const GsaConfig& config, const Common& common, const std::string& name)
      : config_(config),
        key_dim_(expanded(common, config.expand_k) / config.num_heads),
        value_dim_(common.hidden_size / config.num_heads),
        sizes_{config.num_heads * key_dim_, config.kv_heads() * key_dim_, config.kv_heads() * value_dim_},
        input_({{name + ".q_proj", sizes_[kQ]},
                {name + ".k_proj", sizes_[kK]},
                {name + ".v_proj", sizes_[kV]},
                {name + ".f_proj", config.kv_heads() * config.num_slots}},
               common.hidden_size, common.initializer_range),
        norm_(name + ".g_norm", common.hidden_size, kInnerEpsilon),
        output_({{name + ".o_proj", common.hidden_size}}, common.hidden_size, common.initializer_range) {
    const std::array<const char*, 3> names = {".q_conv1d", ".k_conv1d", ".v_conv1d"};
    for (const std::size_t part : kConvolved) {
      if (!config.use_short_conv) break;
      convolutions_.push_back(nn::convolution_filter(name + names[part] + ".weight", sizes_[part], config.conv_size));
    }
  }

  void for_each_parameter(const nn::ParameterVisitor& visit) override {
    input_.for_each_parameter(visit);
    for (nn::Parameter& weight : convolutions_) visit(weight);
    norm_.for_each_parameter(visit);
    output_.for_each_parameter(visit);
  }

  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t, DType parameters) const override {
    const DType dtype = ops::accumulator_of(parameters);
    std::vector<StateEntry> layout = {
        {"keys", Shape({sequences, config_.kv_heads(), key_dim_, config_.num_slots}), dtype},
        {"values", Shape({sequences, config_.kv_heads(), config_.num_slots, value_dim_}), dtype}};
    for (std::size_t i = 0; i < convolutions_.size(); ++i) {
      layout.push_back(
          {std::array{"conv_q", "conv_k", "conv_v"}[i], Shape({sequences, sizes_[i], config_.conv_size - 1}), dtype});
    }
    return layout;
  }

  Cost cost(std::int64_t) const override {
    Cost cost = scan_cost(config_.num_heads, config_.kv_heads(), key_dim_, config_.num_slots);
    return cost += scan_cost(config_.num_heads, config_.kv_heads(), config_.num_slots, value_dim_);
  }

  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) override;

 private:
  static constexpr std::size_t kFirstConvolution = 2;  // of the state's entries
  TensorView of_heads(const TensorView& channels) const { return channels.split_last(config_.num_heads); }
  TensorView of_groups(const TensorView& channels) const { return channels.split_last(config_.kv_heads()); }
  TensorView weight_of(std::size_t i, const TensorView& of) const {
    return of.reshape(Shape({sizes_[i], config_.conv_size}));
  }
  static TensorView entry(const LayerState& state, std::size_t i) { return state.empty() ? TensorView() : state[i]; }

  convolution::Inputs convolution_inputs(const nn::Pass& pass, std::size_t i) const {
    convolution::Inputs inputs;
    inputs.x = input_.part(saved_.projected, i);
    inputs.weight = weight_of(i, convolutions_[i].value);
    inputs.initial_state = entry(saved_.before, kFirstConvolution + i);
    inputs.cu_seqlens = pass.sequences.bounds;
    return inputs;
  }
  attention::Inputs attention_inputs(const nn::Pass& pass, Call call) const {
    attention::Inputs inputs;
    const bool keys = call == kKeys;
    inputs.q = of_heads(keys ? saved_.active[kQ] : saved_.read);
    inputs.k = of_groups(keys ? saved_.active[kK] : saved_.written);
    inputs.v = of_groups(keys ? saved_.written : saved_.active[kV]);
    (keys ? inputs.gv : inputs.g) = of_groups(saved_.gates);
    inputs.h0 = entry(saved_.before, call);
    inputs.cu_seqlens = pass.sequences.bounds;
    return inputs;
  }
  static attention::Options options_of(const nn::Pass& pass) {
    attention::Options options;
    options.scale = 1.0;
    options.max_seqlen = pass.sequences.max_seqlen;
    return options;
  }
  // Everything in front of the first call, from the projections.
  void prepare(const nn::Pass& pass, const LayerState& after) const;
  void scan(nn::Pass& pass, Call call, const LayerState& after);
  // normalized from o.
  void normalize(Context& context, const TensorView& statistics) const;

  GsaConfig config_;
  std::int64_t key_dim_, value_dim_;  // of a head
  std::array<std::int64_t, 3> sizes_;
  nn::Linear input_;
  std::vector<nn::Parameter> convolutions_;  // none, or those of q, k, v
  nn::Norm norm_;
  nn::Linear output_;

  struct Saved {
    TensorView projected;       // [B,T,input_.out()]
    TensorView channels[3];     // of convolution: recomputed in class activations, as those below
    TensorView active[3];       // SiLU of them: q, k, v
    TensorView gates, written;  // [B,T,G M]: g and s
    TensorView o[2];            // of the calls [B,T,H M], [B,T,H V]: kept
    TensorView states[2];       // the operator's own
    TensorView read;            // [B,T,H M]: p
    TensorView activated;       // [B,T,D]: SiLU of the second's
    TensorView normalized;      // [B,T,D]
    TensorView statistics;      // the norm's: kept
    LayerState before;
  } saved_;
};

void Gsa::prepare(const nn::Pass& pass, const LayerState& after) const {
  Context& context = pass.context;
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    convolution::forward(context, convolution_inputs(pass, i),
                         {saved_.channels[i], entry(after, kFirstConvolution + i)}, convolution::Activation::silu);
  }
  for (const std::size_t part : kConvolved) {
    ops::elementwise::silu_forward(context, saved_.channels[part], saved_.active[part]);
  }
  ops::forget_gate::forward(context, input_.part(saved_.projected, kF), {}, saved_.gates, saved_.written,
                            config_.gate_logit_normalizer);
}

void Gsa::scan(nn::Pass& pass, Call call, const LayerState& after) {
  Context& context = pass.context;
  const attention::Inputs inputs = attention_inputs(pass, call);
  attention::Outputs outputs;
  outputs.o = of_heads(saved_.o[call]);
  outputs.ht = entry(after, call);
  outputs.states =
      pass.keep_states([&] { return attention::states_bytes(context, attention::describe(inputs, options_of(pass))); },
                       "gsa: chunk states");
  saved_.states[call] = outputs.states;
  attention::forward(context, inputs, outputs, options_of(pass));
}

void Gsa::normalize(Context& context, const TensorView& statistics) const {
  ops::elementwise::silu_forward(context, saved_.o[kValues], saved_.activated);
  norm_.forward(context, saved_.activated, saved_.normalized, statistics);
}

void Gsa::forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                  const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const auto sized = [&](std::int64_t channels) { return Shape({x.size(0), x.size(1), channels}); };
  const auto again = [&](std::int64_t channels, const char* label) {
    return pass.keep_or_recompute().tensor(sized(channels), x.dtype, label);
  };
  const std::int64_t of_slots = config_.kv_heads() * config_.num_slots, slots = config_.num_heads * config_.num_slots;
  saved_.before = before;
  saved_.projected = pass.keep().tensor(sized(input_.out()), x.dtype, "gsa: projections");
  input_.forward(context, x, saved_.projected);
  for (const std::size_t part : kConvolved) {
    saved_.channels[part] =
        convolutions_.empty() ? input_.part(saved_.projected, part) : again(sizes_[part], "gsa: convolutions");
    saved_.active[part] = again(sizes_[part], "gsa: activations");
  }
  saved_.gates = again(of_slots, "gsa: gates");
  saved_.written = again(of_slots, "gsa: gates");
  prepare(pass, after);

  saved_.o[kKeys] = pass.keep().tensor(sized(slots), x.dtype, "gsa: outputs");
  saved_.o[kValues] = pass.keep().tensor(x.shape, x.dtype, "gsa: outputs");
  saved_.read = again(slots, "gsa: slots read");
  scan(pass, kKeys, after);
  ops::softmax::forward(context, of_heads(saved_.o[kKeys]), of_heads(saved_.read));
  scan(pass, kValues, after);

  saved_.statistics = pass.training() ? norm_.take_statistics(*pass.saved, x) : TensorView();
  saved_.activated = again(x.size(2), "gsa: normalised outputs");
  saved_.normalized = again(x.size(2), "gsa: normalised outputs");
  normalize(context, saved_.statistics);
  if (y) output_.forward(context, saved_.normalized, y);
}

void Gsa::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const auto like = [&](const TensorView& view) { return scratch.tensor(view.shape, view.dtype, "gsa: gradients"); };
  if (pass.recompute == nn::Recompute::activations) {
    for (const std::size_t part : kConvolved) {
      if (!convolutions_.empty()) saved_.channels[part] = like(saved_.channels[part]);
      saved_.active[part] = like(saved_.active[part]);
    }
    for (TensorView* view : {&saved_.gates, &saved_.written, &saved_.read, &saved_.activated, &saved_.normalized}) {
      *view = like(*view);
    }
    prepare(pass, {});
    ops::softmax::forward(context, of_heads(saved_.o[kKeys]), of_heads(saved_.read));
    normalize(context, {});
  }
  const TensorView d_o = like(saved_.o[kValues]);
  output_.backward(context, saved_.normalized, dy, d_o);
  norm_.backward(context, saved_.activated, saved_.statistics, d_o, d_o, false);
  ops::elementwise::silu_backward(context, saved_.o[kValues], d_o, d_o);

  TensorView d_active[3];
  for (const std::size_t part : kConvolved) d_active[part] = like(saved_.active[part]);
  const TensorView d_read = like(saved_.read), d_written = like(saved_.written), d_gates = like(saved_.gates);
  const TensorView d_written_too = like(saved_.written), d_gates_too = like(saved_.gates);
  const auto outputs_of = [&](Call call) {
    attention::Outputs outputs;
    outputs.o = of_heads(saved_.o[call]);
    outputs.states = saved_.states[call];
    return outputs;
  };
  attention::InputGradients to;
  to.dq = of_heads(d_read);
  to.dk = of_groups(d_written);
  to.dv = of_groups(d_active[kV]);
  to.dg = of_groups(d_gates);
  attention::backward(context, attention_inputs(pass, kValues), outputs_of(kValues), {of_heads(d_o), {}, {}}, to,
                      options_of(pass));
  ops::softmax::backward(context, of_heads(saved_.read), of_heads(d_read), of_heads(d_read));
  to = {};
  to.dq = of_heads(d_active[kQ]);
  to.dk = of_groups(d_active[kK]);
  to.dv = of_groups(d_written_too);
  to.dgv = of_groups(d_gates_too);
  attention::backward(context, attention_inputs(pass, kKeys), outputs_of(kKeys), {of_heads(d_read), {}, {}}, to,
                      options_of(pass));
  ops::elementwise::add(context, d_written_too, d_written);
  ops::elementwise::add(context, d_gates_too, d_gates);

  const TensorView dprojected = like(saved_.projected);
  ops::forget_gate::backward(context, input_.part(saved_.projected, kF), {}, d_gates, d_written,
                             input_.part(dprojected, kF), {}, config_.gate_logit_normalizer);
  for (const std::size_t part : kConvolved) {
    const bool convolved = !convolutions_.empty();
    const TensorView d_channels = convolved ? d_active[part] : input_.part(dprojected, part);
    ops::elementwise::silu_backward(context, saved_.channels[part], d_active[part], d_channels);
    if (!convolved) continue;
    convolution::backward(context, convolution_inputs(pass, part), {d_channels, {}},
                          {input_.part(dprojected, part), weight_of(part, convolutions_[part].gradient), {}},
                          convolution::Activation::silu);
  }
  input_.backward(context, x, dprojected, dx);
}

void Gsa::step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) {
  namespace linear_step = ops::linear_step;
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const auto sized = [&](std::int64_t channels, const char* label) {
    return scratch.tensor(Shape({x.size(0), channels}), x.dtype, label);
  };
  const TensorView projected = sized(input_.out(), "gsa: projections");
  linear_step::run(context, norm.before_step(context, x), input_.step_layers(projected));
  for (const std::size_t part : kConvolved) {
    const TensorView channels = input_.part(projected, part);
    if (!convolutions_.empty()) {
      convolution::step(context, channels, weight_of(part, convolutions_[part].value), state[kFirstConvolution + part],
                        channels, convolution::Activation::silu);
    }
    ops::elementwise::silu_forward(context, channels, channels);
  }
  const std::int64_t of_slots = config_.kv_heads() * config_.num_slots;
  const TensorView gates = sized(of_slots, "gsa: gates"), written = sized(of_slots, "gsa: gates");
  const TensorView read = sized(config_.num_heads * config_.num_slots, "gsa: slots read");
  const TensorView o = sized(x.size(1), "gsa: outputs");
  ops::forget_gate::forward(context, input_.part(projected, kF), {}, gates, written, config_.gate_logit_normalizer);
  attention::step(context,
                  {of_heads(input_.part(projected, kQ)), of_groups(input_.part(projected, kK)), of_groups(written),
                   TensorView(), of_groups(gates)},
                  state[kKeys], {}, of_heads(read), options_of(pass));
  ops::softmax::forward(context, of_heads(read), of_heads(read));
  attention::step(context,
                  {of_heads(read), of_groups(written), of_groups(input_.part(projected, kV)), of_groups(gates), {}},
                  state[kValues], {}, of_heads(o), options_of(pass));
  ops::elementwise::silu_forward(context, o, o);
  linear_step::run(context, norm_.before_step(context, o), output_.step_layers(x), {linear_step::Epilogue::add});
}

}  // namespace

std::unique_ptr<Mixer> GsaConfig::create(const Common& common, std::int64_t layer) const {
  return std::make_unique<Gsa>(*this, common, layer_prefix(layer) + ".attn");
}

}  // namespace flashgla::mixers

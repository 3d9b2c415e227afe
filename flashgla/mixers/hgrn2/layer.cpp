// The layer of hgrn2.h.
#include <array>

#include "flashgla/mixers/hgrn2/config.h"
#include "flashgla/mixers/inner_norm.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/mixers/scan_cost.h"
#include "flashgla/nn/linear.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/forget_gate/forget_gate.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"
#include "flashgla/ops/lower_bounds/lower_bounds.h"
#include "flashgla/ops/short_convolution/short_convolution.h"

namespace flashgla::mixers {

namespace {

namespace attention = ops::gated_linear_attention;
namespace convolution = ops::short_convolution;

class Hgrn2 : public Mixer {
  enum Part : std::size_t { kQ, kF, kI };  // of the projections
  static constexpr std::array kParts = {kQ, kF, kI};

 public:
  Hgrn2(const Hgrn2Config& config, const Common& common, std::int64_t layer, const std::string& name)
      : layer_(layer),
        channels_(common.hidden_size),
        heads_(config.heads(common)),
        width_(config.use_short_conv ? config.conv_size : 0),
        input_({{name + ".q_proj", channels_}, {name + ".f_proj", channels_}, {name + ".i_proj", channels_}}, channels_,
               common.initializer_range),
        norm_(name + ".g_norm", channels_, kInnerEpsilon),
        output_({{name + ".o_proj", channels_}}, channels_, common.initializer_range) {
    for (const char* part : {".q_conv1d", ".f_conv1d", ".i_conv1d"}) {
      if (width_ == 0) break;
      convolutions_.push_back(nn::convolution_filter(name + part + ".weight", channels_, width_));
    }
    if (config.use_lower_bound) {
      described_bounds_.name = "model.lower_bounds";
      described_bounds_.shape = Shape({common.num_hidden_layers, channels_});
      described_bounds_.initialization = nn::Initialization::zeros;
      described_bounds_.decay = described_bounds_.multiplied = false;
    }
  }

  void share(SharedParameters& shared) override {
    if (!described_bounds_.name.empty()) bounds_ = &shared.get(described_bounds_);
  }

  void for_each_parameter(const nn::ParameterVisitor& visit) override {
    input_.for_each_parameter(visit);
    for (nn::Parameter& weight : convolutions_) visit(weight);
    norm_.for_each_parameter(visit);
    output_.for_each_parameter(visit);
  }

  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t, DType parameters) const override {
    const std::int64_t of_head = channels_ / heads_;
    std::vector<StateEntry> layout = {
        {"h", Shape({sequences, heads_, of_head, of_head}), ops::accumulator_of(parameters)}};
    for (std::size_t i = 0; i < convolutions_.size(); ++i) {
      layout.push_back({std::array{"conv_q", "conv_f", "conv_i"}[i], Shape({sequences, channels_, width_ - 1}),
                        ops::accumulator_of(parameters)});
    }
    return layout;
  }

  Cost cost(std::int64_t) const override { return scan_cost(heads_, heads_, channels_ / heads_, channels_ / heads_); }

  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) override;

 private:
  TensorView heads_of(const TensorView& channels) const { return channels.split_last(heads_); }
  TensorView weight_of(const TensorView& of) const { return of.reshape(Shape({channels_, width_})); }
  // Layer 0's bound is 0.
  bool bounded() const { return bounds_ != nullptr && layer_ > 0; }
  // The layer's bounds in scratch [D], and as every row of x reads them; absent without.
  TensorView own_bounds(Context& context, DType dtype) const;
  TensorView for_rows(const TensorView& bounds, const TensorView& x) const;

  convolution::Inputs convolution_inputs(const nn::Pass& pass, std::size_t i) const {
    convolution::Inputs inputs;
    inputs.x = input_.part(saved_.projected, i);
    inputs.weight = weight_of(convolutions_[i].value);
    inputs.initial_state = saved_.before.empty() ? TensorView() : saved_.before[i + 1];
    inputs.cu_seqlens = pass.sequences.bounds;
    return inputs;
  }
  attention::Inputs attention_inputs(const nn::Pass& pass) const {
    attention::Inputs inputs;
    inputs.q = heads_of(saved_.q);
    inputs.k = heads_of(saved_.k);
    inputs.v = heads_of(saved_.channels[kI]);
    inputs.g = heads_of(saved_.g);
    inputs.h0 = saved_.before.empty() ? TensorView() : saved_.before[0];
    inputs.cu_seqlens = pass.sequences.bounds;
    return inputs;
  }
  static attention::Options options_of(const nn::Pass& pass) {
    attention::Options options;
    options.max_seqlen = pass.sequences.max_seqlen;
    return options;
  }
  // Channels, q, k and g from the projections.
  void prepare(const nn::Pass& pass, const LayerState& after) const;

  std::int64_t layer_, channels_, heads_, width_;  // width 0: no convolutions
  nn::Linear input_;
  std::vector<nn::Parameter> convolutions_;  // none, or those of q, f, i
  nn::Norm norm_;
  nn::Linear output_;
  nn::Parameter described_bounds_;  // without a name: none
  nn::Parameter* bounds_ = nullptr;

  struct Saved {
    TensorView projected;    // [B,T,3D]
    TensorView channels[3];  // of convolution: recomputed in class activations, as those below
    TensorView q, k, g;      // [B,T,D]
    TensorView o;            // [B,T,D]: kept
    TensorView states;       // the operator's own
    TensorView normalized;   // [B,T,D]
    TensorView statistics;   // the norm's: kept
    LayerState before;
  } saved_;
};

TensorView Hgrn2::own_bounds(Context& context, DType dtype) const {
  if (!bounded()) return {};
  const TensorView bounds =
      context.scratch().tensor(Shape({channels_}), ops::accumulator_of(dtype), "hgrn2: lower bounds");
  ops::lower_bounds::forward(context, bounds_->value, layer_, bounds);
  return bounds;
}

TensorView Hgrn2::for_rows(const TensorView& bounds, const TensorView& x) const {
  if (!bounds) return {};
  TensorView rows(bounds.data, bounds.dtype, x.shape, bounds.device);
  for (int dim = 0; dim + 1 < rows.rank(); ++dim) rows.stride[dim] = 0;
  return rows;
}

void Hgrn2::prepare(const nn::Pass& pass, const LayerState& after) const {
  Context& context = pass.context;
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    convolution::forward(context, convolution_inputs(pass, i),
                         {saved_.channels[i], after.empty() ? TensorView() : after[i + 1]},
                         convolution::Activation::none);
  }
  const ArenaScope scope(context.scratch());
  const TensorView& f = saved_.channels[kF];
  ops::elementwise::silu_forward(context, saved_.channels[kQ], saved_.q);
  ops::forget_gate::forward(context, f, for_rows(own_bounds(context, f.dtype), f), saved_.g, saved_.k, 1.0);
}

void Hgrn2::forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                    const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const auto again = [&](const char* label) { return pass.keep_or_recompute().tensor(x.shape, x.dtype, label); };
  saved_.before = before;
  saved_.projected = pass.keep().tensor(Shape({x.size(0), x.size(1), input_.out()}), x.dtype, "hgrn2: projections");
  input_.forward(context, x, saved_.projected);
  for (const std::size_t part : kParts) {
    saved_.channels[part] = convolutions_.empty() ? input_.part(saved_.projected, part) : again("hgrn2: convolutions");
  }
  saved_.q = again("hgrn2: queries");
  saved_.k = again("hgrn2: gates");
  saved_.g = again("hgrn2: gates");
  prepare(pass, after);

  saved_.o = pass.keep().tensor(x.shape, x.dtype, "hgrn2: outputs");
  const attention::Inputs inputs = attention_inputs(pass);
  attention::Outputs outputs;
  outputs.o = heads_of(saved_.o);
  outputs.ht = after.empty() ? TensorView() : after[0];
  outputs.states =
      pass.keep_states([&] { return attention::states_bytes(context, attention::describe(inputs, options_of(pass))); },
                       "hgrn2: chunk states");
  saved_.states = outputs.states;
  attention::forward(context, inputs, outputs, options_of(pass));

  saved_.statistics = pass.training() ? norm_.take_statistics(*pass.saved, x) : TensorView();
  saved_.normalized = again("hgrn2: normalised outputs");
  norm_.forward(context, saved_.o, saved_.normalized, saved_.statistics);
  if (y) output_.forward(context, saved_.normalized, y);
}

void Hgrn2::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const auto like = [&](const TensorView& view) { return scratch.tensor(view.shape, view.dtype, "hgrn2: gradients"); };
  if (pass.recompute == nn::Recompute::activations) {
    for (TensorView* view : {&saved_.q, &saved_.k, &saved_.g, &saved_.normalized}) *view = like(*view);
    if (!convolutions_.empty()) {
      for (TensorView& view : saved_.channels) view = like(view);
    }
    prepare(pass, {});
    norm_.forward(context, saved_.o, saved_.normalized, {});
  }
  const TensorView dprojected = like(saved_.projected), d_o = like(saved_.o);
  output_.backward(context, saved_.normalized, dy, d_o);
  norm_.backward(context, saved_.o, saved_.statistics, d_o, d_o, false);

  TensorView dchannels[3];
  for (const std::size_t part : kParts) {
    dchannels[part] = convolutions_.empty() ? input_.part(dprojected, part) : like(saved_.channels[part]);
  }
  const TensorView dk = like(saved_.k), dg = like(saved_.g);
  attention::Outputs outputs;
  outputs.o = heads_of(saved_.o);
  outputs.states = saved_.states;
  attention::backward(context, attention_inputs(pass), outputs, {heads_of(d_o), {}, {}},
                      {heads_of(dchannels[kQ]), heads_of(dk), heads_of(dchannels[kI]), heads_of(dg), {}, {}, {}},
                      options_of(pass));
  ops::elementwise::silu_backward(context, saved_.channels[kQ], dchannels[kQ], dchannels[kQ]);
  const TensorView bounds = own_bounds(context, x.dtype);
  const TensorView of_rows =
      bounds ? scratch.tensor(x.shape, bounds.dtype, "hgrn2: gradients of bounds") : TensorView();
  ops::forget_gate::backward(context, saved_.channels[kF], for_rows(bounds, x), dg, dk, dchannels[kF], of_rows, 1.0);
  if (bounds) {
    ops::elementwise::column_sum(context, of_rows, bounds, false);
    ops::lower_bounds::backward(context, bounds_->value, layer_, bounds, bounds_->gradient);
  }
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    convolution::backward(context, convolution_inputs(pass, i), {dchannels[i], {}},
                          {input_.part(dprojected, i), weight_of(convolutions_[i].gradient), {}},
                          convolution::Activation::none);
  }
  input_.backward(context, x, dprojected, dx);
}

void Hgrn2::step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) {
  namespace linear_step = ops::linear_step;
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const TensorView projected = scratch.tensor(Shape({x.size(0), input_.out()}), x.dtype, "hgrn2: projections");
  linear_step::run(context, norm.before_step(context, x), input_.step_layers(projected));
  for (std::size_t i = 0; i < convolutions_.size(); ++i) {
    const TensorView channels = input_.part(projected, i);
    convolution::step(context, channels, weight_of(convolutions_[i].value), state[i + 1], channels,
                      convolution::Activation::none);
  }
  const TensorView q = input_.part(projected, kQ), f = input_.part(projected, kF);
  const auto sized = [&](const char* label) { return scratch.tensor(x.shape, x.dtype, label); };
  const TensorView g = sized("hgrn2: gates"), k = sized("hgrn2: gates"), o = sized("hgrn2: outputs");
  ops::elementwise::silu_forward(context, q, q);
  ops::forget_gate::forward(context, f, for_rows(own_bounds(context, x.dtype), f), g, k, 1.0);
  attention::step(context, {heads_of(q), heads_of(k), heads_of(input_.part(projected, kI)), heads_of(g), {}}, state[0],
                  {}, heads_of(o), {});
  linear_step::run(context, norm_.before_step(context, o), output_.step_layers(x), {linear_step::Epilogue::add});
}

}  // namespace

std::unique_ptr<Mixer> Hgrn2Config::create(const Common& common, std::int64_t layer) const {
  return std::make_unique<Hgrn2>(*this, common, layer, layer_prefix(layer) + ".attn");
}

}  // namespace flashgla::mixers

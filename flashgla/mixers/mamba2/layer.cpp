// The layer of mamba2.h.
#include <cmath>

#include "flashgla/mixers/mamba2/config.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/mixers/scan_cost.h"
#include "flashgla/nn/linear.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"
#include "flashgla/ops/short_convolution/short_convolution.h"
#include "flashgla/ops/state_space/state_space.h"

namespace flashgla::mixers {

namespace {

namespace attention = ops::gated_linear_attention;
namespace convolution = ops::short_convolution;
namespace state_space = ops::state_space;

// A_log: ln of U(1, 16). dt_bias: what the softplus makes a step of exp(U(ln 1e-3, ln 0.1)) of, at least 1e-4.
double initial_a_log(double uniform) { return std::log(1.0 + 15.0 * uniform); }
double initial_dt_bias(double uniform) {
  const double step = std::max(std::exp(std::log(1e-3) + uniform * (std::log(0.1) - std::log(1e-3))), 1e-4);
  return step + std::log(-std::expm1(-step));
}

nn::Parameter vector_of(const std::string& name, std::int64_t size) {
  nn::Parameter vector;
  vector.name = name;
  vector.shape = Shape({size});
  vector.initialization = nn::Initialization::ones;
  vector.decay = false;
  return vector;
}
nn::Parameter drawn(nn::Parameter vector, double (*transform)(double)) {
  vector.initialization = nn::Initialization::transformed;
  vector.transform = transform;
  return vector;
}

class Mamba2 : public Mixer {
 public:
  Mamba2(const Mamba2Config& config, const Common& common, const std::string& name)
      : heads_(config.heads(common)),
        groups_(config.n_groups),
        key_dim_(config.state_size),
        width_(config.conv_kernel),
        inner_(config.inner(common)),
        channels_(inner_ + 2 * groups_ * key_dim_),
        norm_eps_(common.norm_eps),
        input_({{name + ".in_proj", inner_ + channels_ + heads_, nn::Quantisation::sensitive}}, common.hidden_size,
               common.initializer_range, config.use_bias),
        convolution_(nn::convolution_filter(name + ".conv1d.weight", channels_, width_)),
        dt_bias_(drawn(vector_of(name + ".dt_bias", heads_), initial_dt_bias)),
        a_log_(drawn(vector_of(name + ".A_log", heads_), initial_a_log)),
        skip_(vector_of(name + ".D", heads_)),
        norm_(vector_of(name + ".norm.weight", inner_)),
        output_({{name + ".out_proj", common.hidden_size, nn::Quantisation::sensitive}}, inner_,
                common.initializer_range, config.use_bias) {
    if (config.use_conv_bias) {
      convolution_bias_.push_back(vector_of(name + ".conv1d.bias", channels_));
      convolution_bias_.front().initialization = nn::Initialization::zeros;
    }
    options_.scale = 1.0;
  }

  void for_each_parameter(const nn::ParameterVisitor& visit) override {
    input_.for_each_parameter(visit);
    visit(convolution_);
    for (nn::Parameter& bias : convolution_bias_) visit(bias);
    for (nn::Parameter* vector : {&dt_bias_, &a_log_, &skip_, &norm_}) visit(*vector);
    output_.for_each_parameter(visit);
  }

  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t, DType parameters) const override {
    const DType dtype = ops::accumulator_of(parameters);
    return {{"h", Shape({sequences, heads_, key_dim_, inner_ / heads_}), dtype},
            {"conv", Shape({sequences, channels_, width_ - 1}), dtype}};
  }

  Cost cost(std::int64_t) const override { return scan_cost(heads_, heads_, key_dim_, inner_ / heads_); }

  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) override;

 private:
  // Columns of the projections: z, c, raw.
  TensorView gate_of(const TensorView& projected) const { return projected.slice(-1, 0, inner_); }
  TensorView channels_of(const TensorView& projected) const { return projected.slice(-1, inner_, inner_ + channels_); }
  TensorView times_of(const TensorView& projected) const {
    return projected.slice(-1, inner_ + channels_, inner_ + channels_ + heads_);
  }
  // x, and B (0) or C (1), of the convolved channels.
  TensorView inputs_of(const TensorView& u) const { return u.slice(-1, 0, inner_); }
  TensorView states_of(const TensorView& u, std::int64_t which) const {
    const std::int64_t size = groups_ * key_dim_, begin = inner_ + which * size;
    return u.slice(-1, begin, begin + size).split_last(groups_);
  }
  // [...,1,K] as all heads share it.
  TensorView of_all_heads(const TensorView& one) const {
    TensorView view = one;
    view.shape[-2] = heads_;
    view.stride[view.rank() - 2] = 0;
    return view;
  }
  // B or C as every head reads it [...,H,K]: a view where there is one group, else a copy in scratch.
  TensorView for_heads(Context& context, const TensorView& states) const;

  state_space::Convolution convolution_inputs(const nn::Pass& pass) const {
    return {channels_of(saved_.projected), convolution_.value.reshape(Shape({channels_, width_})),
            saved_.before.empty() ? TensorView() : saved_.before[1], pass.sequences.bounds};
  }
  state_space::Inputs state_space_inputs(const TensorView& convolved, const TensorView& projected) const {
    return {convolved, convolution_bias_.empty() ? TensorView() : convolution_bias_.front().value, times_of(projected),
            dt_bias_.value, a_log_.value};
  }
  attention::Inputs attention_inputs(Context& context, const nn::Pass& pass) const {
    attention::Inputs inputs;
    inputs.q = for_heads(context, states_of(saved_.u, 1));
    inputs.k = for_heads(context, states_of(saved_.u, 0));
    inputs.v = saved_.v.split_last(heads_);
    inputs.g = saved_.g;
    inputs.h0 = saved_.before.empty() ? TensorView() : saved_.before[0];
    inputs.cu_seqlens = pass.sequences.bounds;
    return inputs;
  }
  // With one group its B and C are all heads', whose gradients the operator adds up where it can.
  attention::Options attention_options(const nn::Pass& pass, const attention::Inputs& inputs) const {
    attention::Options options = options_;
    options.max_seqlen = pass.sequences.max_seqlen;
    options.sums_over_heads = groups_ == 1 && attention::sums_over_heads(pass.context, inputs, options);
    return options;
  }
  // u, v and g from the projections.
  void prepare(const nn::Pass& pass, const LayerState& after) const;
  // normalized from o.
  void normalize(Context& context, bool deviations) const;
  // The columns of group i, and its part of a vector.
  TensorView group_of(const TensorView& x, std::int64_t i) const {
    return x.slice(-1, i * (inner_ / groups_), (i + 1) * (inner_ / groups_));
  }
  // What is normalised together: o, gated by z.
  state_space::Gate gate_inputs(const TensorView& o, const TensorView& u, const TensorView& projected,
                                std::int64_t i) const {
    const std::int64_t heads = heads_ / groups_;
    return {group_of(o, i), group_of(inputs_of(u), i), skip_.value.slice(0, i * heads, (i + 1) * heads),
            group_of(gate_of(projected), i)};
  }

  std::int64_t heads_, groups_, key_dim_, width_;
  std::int64_t inner_;     // E
  std::int64_t channels_;  // of the convolution: x, B, C
  double norm_eps_;
  nn::Linear input_;
  nn::Parameter convolution_;
  std::vector<nn::Parameter> convolution_bias_;  // none, or one
  nn::Parameter dt_bias_, a_log_, skip_, norm_;
  nn::Linear output_;
  attention::Options options_;

  struct Saved {
    TensorView projected;   // [B,T,input_.out()]
    TensorView u;           // [B,T,channels_]: recomputed in class activations, as those below
    TensorView v;           // [B,T,E]
    TensorView g;           // [B,T,H]
    TensorView o;           // [B,T,E]: kept
    TensorView states;      // the operator's own
    TensorView normalized;  // [B,T,E]
    TensorView rstd;        // [groups, B*T]: kept
    LayerState before;
  } saved_;
};

TensorView Mamba2::for_heads(Context& context, const TensorView& states) const {
  TensorView view = states;  // [...,groups,K]
  const int at = view.rank() - 2;
  if (groups_ == 1) return of_all_heads(view);
  if (groups_ == heads_) return view;
  // [rows,groups,heads of a group,K]
  const std::int64_t rows = states.numel() / (groups_ * key_dim_), each = heads_ / groups_;
  Shape shape = states.shape;
  shape[at] = heads_;
  const TensorView copy = context.scratch().tensor(shape, states.dtype, "mamba2: B and C of heads");
  TensorView repeated(states.data, states.dtype, Shape({rows, groups_, each, key_dim_}), states.device);
  repeated.stride[0] = states.stride[at - 1];
  repeated.stride[1] = states.stride[at];
  repeated.stride[2] = 0;
  ops::elementwise::convert(context, repeated, copy.reshape(repeated.shape));
  return copy;
}

void Mamba2::prepare(const nn::Pass& pass, const LayerState& after) const {
  state_space::forward(pass.context, convolution_inputs(pass), state_space_inputs({}, saved_.projected),
                       {saved_.u, saved_.v, saved_.g}, after.empty() ? TensorView() : after[1]);
}

void Mamba2::normalize(Context& context, bool deviations) const {
  for (std::int64_t i = 0; i < groups_; ++i) {
    state_space::gate_norm(context, gate_inputs(saved_.o, saved_.u, saved_.projected, i), group_of(norm_.value, i),
                           norm_eps_, group_of(saved_.normalized, i),
                           deviations ? saved_.rstd.select(0, i) : TensorView());
  }
}

void Mamba2::forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                     const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const std::int64_t batch = x.size(0), length = x.size(1);
  const auto sized = [&](std::int64_t channels) { return Shape({batch, length, channels}); };
  const auto again = [&](std::int64_t channels, const char* label) {
    return pass.keep_or_recompute().tensor(sized(channels), x.dtype, label);
  };
  saved_.before = before;
  saved_.projected = pass.keep().tensor(sized(input_.out()), x.dtype, "mamba2: projections");
  input_.forward(context, x, saved_.projected);
  saved_.u = again(channels_, "mamba2: convolutions");
  saved_.v = again(inner_, "mamba2: values");
  saved_.g = pass.keep_or_recompute().tensor(sized(heads_), ops::accumulator_of(x.dtype), "mamba2: gates");
  prepare(pass, after);

  saved_.o = pass.keep().tensor(sized(inner_), x.dtype, "mamba2: outputs");
  const attention::Inputs inputs = attention_inputs(context, pass);
  const attention::Options options = attention_options(pass, inputs);
  attention::Outputs outputs;
  outputs.o = saved_.o.split_last(heads_);
  outputs.ht = after.empty() ? TensorView() : after[0];
  outputs.states = pass.keep_states(
      [&] { return attention::states_bytes(context, attention::describe(inputs, options)); }, "mamba2: chunk states");
  saved_.states = outputs.states;
  attention::forward(context, inputs, outputs, options);

  saved_.normalized = again(inner_, "mamba2: normalised outputs");
  saved_.rstd = pass.training() ? pass.saved->tensor(Shape({groups_, batch * length}), ops::accumulator_of(x.dtype),
                                                     "norms: statistics")
                                : TensorView();
  normalize(context, pass.training());
  if (y) output_.forward(context, saved_.normalized, y);
}

void Mamba2::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const auto like = [&](const TensorView& view) { return scratch.tensor(view.shape, view.dtype, "mamba2: gradients"); };
  if (pass.recompute == nn::Recompute::activations) {
    for (TensorView* view : {&saved_.u, &saved_.v, &saved_.g, &saved_.normalized}) {
      *view = like(*view);
    }
    prepare(pass, {});
    normalize(context, false);
  }
  const TensorView dprojected = like(saved_.projected), d_o = like(saved_.o);
  output_.backward(context, saved_.normalized, dy, d_o);
  for (std::int64_t i = 0; i < groups_; ++i) {
    state_space::gate_norm_backward(context, gate_inputs(saved_.o, saved_.u, saved_.projected, i),
                                    group_of(norm_.value, i), saved_.rstd.select(0, i), group_of(d_o, i),
                                    group_of(d_o, i), group_of(gate_of(dprojected), i), group_of(norm_.gradient, i));
  }

  const attention::Inputs inputs = attention_inputs(context, pass);
  const attention::Options options = attention_options(pass, inputs);
  Shape keys = saved_.v.split_last(heads_).shape;
  keys[-2] = options.sums_over_heads ? 1 : heads_;
  keys[-1] = key_dim_;
  const TensorView dq = scratch.tensor(keys, x.dtype, "mamba2: gradients of B and C of heads");
  const TensorView dk = scratch.tensor(keys, x.dtype, "mamba2: gradients of B and C of heads");
  const auto of_heads = [&](const TensorView& gradient) {
    return options.sums_over_heads ? of_all_heads(gradient) : gradient;
  };
  const TensorView dv = like(saved_.v), dg = like(saved_.g);
  attention::Outputs outputs;
  outputs.o = saved_.o.split_last(heads_);
  outputs.states = saved_.states;
  attention::backward(context, inputs, outputs, {d_o.split_last(heads_), {}, {}},
                      {of_heads(dq), of_heads(dk), dv.split_last(heads_), dg, {}, {}, {}}, options);

  state_space::backward(context, convolution_inputs(pass), state_space_inputs({}, saved_.projected), skip_.value,
                        {dv, d_o, dk, dq, dg},
                        {channels_of(dprojected), times_of(dprojected),
                         convolution_bias_.empty() ? TensorView() : convolution_bias_.front().gradient,
                         dt_bias_.gradient, a_log_.gradient, skip_.gradient},
                        convolution_.gradient.reshape(Shape({channels_, width_})));
  input_.backward(context, x, dprojected, dx);
}

void Mamba2::step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const std::int64_t batch = x.size(0);
  const auto sized = [&](std::int64_t channels, const char* label) {
    return scratch.tensor(Shape({batch, channels}), x.dtype, label);
  };
  const TensorView projected = sized(input_.out(), "mamba2: projections");
  input_.step(context, norm.before_step(context, x), projected);
  const TensorView convolved = channels_of(projected);
  convolution::step(context, convolved, convolution_.value.reshape(Shape({channels_, width_})), state[1], convolved,
                    convolution::Activation::none);
  const TensorView u = sized(channels_, "mamba2: convolutions"), v = sized(inner_, "mamba2: values");
  const TensorView g = scratch.tensor(Shape({batch, heads_}), ops::accumulator_of(x.dtype), "mamba2: gates");
  state_space::forward(context, state_space_inputs(convolved, projected), {u, v, g});
  attention::StepInputs inputs;
  inputs.q = for_heads(context, states_of(u, 1));
  inputs.k = for_heads(context, states_of(u, 0));
  inputs.v = v.split_last(heads_);
  inputs.g = g;
  const TensorView o = sized(inner_, "mamba2: outputs");
  attention::step(context, inputs, state[0], {}, o.split_last(heads_), options_);
  for (std::int64_t i = 0; i < groups_; ++i) {
    state_space::gate_norm(context, gate_inputs(o, u, projected, i), group_of(norm_.value, i), norm_eps_,
                           group_of(o, i), {});
  }
  output_.step(context, {o}, x, {ops::linear_step::Epilogue::add});
}

}  // namespace

std::unique_ptr<Mixer> Mamba2Config::create(const Common& common, std::int64_t layer) const {
  return std::make_unique<Mamba2>(*this, common, layer_prefix(layer) + ".attn");
}

}  // namespace flashgla::mixers

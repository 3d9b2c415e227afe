// The layer of mamba.h.
#include <cmath>

#include "flashgla/mixers/mamba/config.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/nn/linear.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/selective_scan/selective_scan.h"
#include "flashgla/ops/short_convolution/short_convolution.h"

namespace flashgla::mixers {

namespace {

namespace scan = ops::selective_scan;

// A_log: ln(k + 1) of state k. dt_proj.bias: what the softplus makes a step of exp(U(ln 1e-3, ln 0.1)) of, at least
// 1e-4.
double log_of_state(std::int64_t state) { return std::log(static_cast<double>(state + 1)); }
double initial_step_bias(double uniform) {
  const double step = std::max(std::exp(std::log(1e-3) + uniform * (std::log(0.1) - std::log(1e-3))), 1e-4);
  return step + std::log(-std::expm1(-step));
}

nn::Parameter parameter_of_ones(const std::string& name, const Shape& shape) {
  nn::Parameter parameter;
  parameter.name = name;
  parameter.shape = shape;
  parameter.initialization = nn::Initialization::ones;
  parameter.decay = false;
  parameter.multiplied = false;
  return parameter;
}

class Mamba : public Mixer {
 public:
  Mamba(const MambaConfig& config, const Common& common, const std::string& name)
      : states_(config.state_size),
        width_(config.conv_kernel),
        rank_(config.rank(common)),
        inner_(config.inner(common)),
        input_({{name + ".in_proj", 2 * inner_}}, common.hidden_size, common.initializer_range, config.use_bias),
        convolution_(nn::convolution_filter(name + ".conv1d.weight", inner_, width_)),
        narrow_({{name + ".x_proj", rank_ + 2 * states_}}, inner_, common.initializer_range),
        // Of the deviation that the uniform draw from +-R^-1/2 has.
        steps_({{name + ".dt_proj", inner_}}, rank_, 1.0 / std::sqrt(3.0 * static_cast<double>(rank_))),
        dt_bias_(parameter_of_ones(name + ".dt_proj.bias", Shape({inner_}))),
        a_log_(parameter_of_ones(name + ".A_log", Shape({inner_, states_}))),
        skip_(parameter_of_ones(name + ".D", Shape({inner_}))),
        output_({{name + ".out_proj", common.hidden_size, nn::Quantisation::sensitive}}, inner_,
                common.initializer_range, config.use_bias) {
    if (config.use_conv_bias) {
      convolution_bias_.push_back(parameter_of_ones(name + ".conv1d.bias", Shape({inner_})));
      convolution_bias_.front().initialization = nn::Initialization::zeros;
    }
    dt_bias_.initialization = nn::Initialization::transformed;
    dt_bias_.transform = initial_step_bias;
    a_log_.initialization = nn::Initialization::by_column;
    a_log_.column = log_of_state;
  }

  void for_each_parameter(const nn::ParameterVisitor& visit) override {
    input_.for_each_parameter(visit);
    visit(convolution_);
    for (nn::Parameter& bias : convolution_bias_) visit(bias);
    narrow_.for_each_parameter(visit);
    steps_.for_each_parameter(visit);
    for (nn::Parameter* parameter : {&dt_bias_, &a_log_, &skip_}) visit(*parameter);
    output_.for_each_parameter(visit);
  }

  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t, DType parameters) const override {
    const DType dtype = ops::accumulator_of(parameters);
    return {{"h", Shape({sequences, inner_, states_}), dtype}, {"conv", Shape({sequences, inner_, width_ - 1}), dtype}};
  }

  // Six operations of a state and token forward; backward computes the states again and takes twice that beside.
  Cost cost(std::int64_t) const override {
    const auto states = static_cast<double>(inner_ * states_);
    return {6.0 * states, 24.0 * states, 2.0 * 4.0 * (states + static_cast<double>(inner_ * (width_ - 1)))};
  }

  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) override;

 private:
  TensorView filter() const { return convolution_.value.reshape(Shape({inner_, width_})); }
  // Of the projections: what is convolved, and the gate.
  TensorView channels_of(const TensorView& projected) const { return projected.slice(-1, 0, inner_); }
  TensorView gate_of(const TensorView& projected) const { return projected.slice(-1, inner_, 2 * inner_); }
  // Of what x_proj makes: r, and B (0) or C (1).
  TensorView ranks_of(const TensorView& narrow) const { return narrow.slice(-1, 0, rank_); }
  TensorView states_of(const TensorView& narrow, std::int64_t which) const {
    return narrow.slice(-1, rank_ + which * states_, rank_ + (which + 1) * states_);
  }
  TensorView convolution_bias() const {
    return convolution_bias_.empty() ? TensorView() : convolution_bias_.front().value;
  }
  ops::short_convolution::Inputs convolution_inputs(const nn::Pass& pass) const {
    ops::short_convolution::Inputs inputs;
    inputs.x = channels_of(saved_.projected);
    inputs.weight = filter();
    inputs.initial_state = saved_.before.empty() ? TensorView() : saved_.before[1];
    inputs.cu_seqlens = pass.sequences.bounds;
    inputs.bias = convolution_bias();
    return inputs;
  }
  scan::Inputs scan_inputs(const TensorView& u, const TensorView& raw, const TensorView& projected,
                           const TensorView& narrow) const {
    return {u,
            raw,
            gate_of(projected),
            states_of(narrow, 0),
            states_of(narrow, 1),
            dt_bias_.value,
            a_log_.value,
            skip_.value,
            {},
            {}};
  }
  scan::Inputs scan_inputs(const nn::Pass& pass) const {
    scan::Inputs inputs = scan_inputs(saved_.u, saved_.raw, saved_.projected, saved_.narrow);
    inputs.h0 = saved_.before.empty() ? TensorView() : saved_.before[0];
    inputs.cu_seqlens = pass.sequences.bounds;
    return inputs;
  }
  // u from the projections.
  void convolve(const nn::Pass& pass, const LayerState& after) const;

  std::int64_t states_, width_, rank_;
  std::int64_t inner_;  // E
  nn::Linear input_;
  nn::Parameter convolution_;
  std::vector<nn::Parameter> convolution_bias_;  // none, or one
  nn::Linear narrow_, steps_;
  nn::Parameter dt_bias_, a_log_, skip_;
  nn::Linear output_;

  struct Saved {
    TensorView projected;  // [B,T,2E]
    TensorView u;          // [B,T,E]: recomputed in class activations
    TensorView narrow;     // [B,T,R+2K]
    TensorView raw;        // [B,T,E]
    TensorView y;          // [B,T,E]
    TensorView kept;       // the operator's own; absent: it computes its states again
    LayerState before;
  } saved_;
};

void Mamba::convolve(const nn::Pass& pass, const LayerState& after) const {
  ops::short_convolution::forward(pass.context, convolution_inputs(pass),
                                  {saved_.u, after.empty() ? TensorView() : after[1]},
                                  ops::short_convolution::Activation::silu);
}

void Mamba::forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                    const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const auto sized = [&](Arena& arena, std::int64_t channels, const char* label) {
    return arena.tensor(Shape({x.size(0), x.size(1), channels}), x.dtype, label);
  };
  saved_.before = before;
  saved_.projected = sized(pass.keep(), input_.out(), "mamba: projections");
  input_.forward(context, x, saved_.projected);
  saved_.u = sized(pass.keep_or_recompute(), inner_, "mamba: convolutions");
  convolve(pass, after);
  saved_.narrow = sized(pass.keep(), narrow_.out(), "mamba: steps, B, C");
  narrow_.forward(context, saved_.u, saved_.narrow);
  saved_.raw = sized(pass.keep(), inner_, "mamba: steps, B, C");
  steps_.forward(context, ranks_of(saved_.narrow), saved_.raw);

  saved_.y = sized(pass.keep(), inner_, "mamba: outputs");
  const scan::Inputs inputs = scan_inputs(pass);
  saved_.kept = pass.keep_states([&] { return scan::kept_bytes(context, inputs); }, "mamba: chunk states");
  scan::forward(context, inputs, {saved_.y, after.empty() ? TensorView() : after[0], saved_.kept});
  if (y) output_.forward(context, saved_.y, y);
}

void Mamba::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const auto like = [&](const TensorView& view) { return scratch.tensor(view.shape, view.dtype, "mamba: gradients"); };
  if (pass.recompute == nn::Recompute::activations) {
    saved_.u = like(saved_.u);
    convolve(pass, {});
  }
  const TensorView dprojected = like(saved_.projected), dnarrow = like(saved_.narrow);
  const TensorView du = like(saved_.u), draw = like(saved_.raw), d_y = like(saved_.y);
  output_.backward(context, saved_.y, dy, d_y);
  scan::backward(
      context, scan_inputs(pass), saved_.kept, d_y,
      {du, draw, gate_of(dprojected), states_of(dnarrow, 0), states_of(dnarrow, 1), a_log_.gradient, skip_.gradient});
  ops::elementwise::column_sum(context, draw, dt_bias_.gradient, true);
  steps_.backward(context, ranks_of(saved_.narrow), draw, ranks_of(dnarrow));
  narrow_.backward(context, saved_.u, dnarrow, du, true);
  const TensorView dbias = convolution_bias_.empty() ? TensorView() : convolution_bias_.front().gradient;
  ops::short_convolution::backward(
      context, convolution_inputs(pass), {du, {}},
      {channels_of(dprojected), convolution_.gradient.reshape(Shape({inner_, width_})), {}, dbias},
      ops::short_convolution::Activation::silu);
  input_.backward(context, x, dprojected, dx);
}

void Mamba::step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const auto sized = [&](std::int64_t channels, const char* label) {
    return scratch.tensor(Shape({x.size(0), channels}), x.dtype, label);
  };
  const TensorView projected = sized(input_.out(), "mamba: projections"), u = sized(inner_, "mamba: convolutions");
  input_.step(context, norm.before_step(context, x), projected);
  ops::short_convolution::step(context, channels_of(projected), filter(), state[1], u,
                               ops::short_convolution::Activation::silu, convolution_bias());
  const TensorView narrow = sized(narrow_.out(), "mamba: steps, B, C");
  narrow_.step(context, {u}, narrow);
  scan::Inputs inputs = scan_inputs(u, {}, projected, narrow);
  scan::StepProjection projection{ranks_of(narrow), steps_.step_layer({}).weight};
  if (!scan::step_projects(context, inputs, projection)) {
    projection = {};
    inputs.raw = sized(inner_, "mamba: steps, B, C");
    steps_.step(context, {ranks_of(narrow)}, inputs.raw);
  }
  scan::step(context, inputs, state[0], u, projection);
  output_.step(context, {u}, x, {ops::linear_step::Epilogue::add});
}

}  // namespace

std::unique_ptr<Mixer> MambaConfig::create(const Common& common, std::int64_t layer) const {
  return std::make_unique<Mamba>(*this, common, layer_prefix(layer) + ".attn");
}

}  // namespace flashgla::mixers

// The layer of hyena.h.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "flashgla/mixers/hyena/config.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/nn/linear.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/hyena_filter/hyena_filter.h"
#include "flashgla/ops/long_convolution/long_convolution.h"
#include "flashgla/ops/short_convolution/short_convolution.h"
#include "flashgla/ops/softmax_attention/softmax_attention.h"

namespace flashgla::mixers {

namespace {

namespace elementwise = ops::elementwise;
namespace hyena_filter = ops::hyena_filter;
namespace long_convolution = ops::long_convolution;
namespace short_convolution = ops::short_convolution;

constexpr std::int64_t kWidth = 3;  // of the short convolution

nn::Parameter parameter_of(const std::string& name, const Shape& shape) {
  nn::Parameter parameter;
  parameter.name = name;
  parameter.shape = shape;
  parameter.decay = false;
  parameter.multiplied = false;
  return parameter;
}

// PyTorch's initial values of a depthwise convolution.
double of_convolution(double uniform) { return (2.0 * uniform - 1.0) / std::sqrt(static_cast<double>(kWidth)); }

// Channel i of the position j.
double position_at(const HyenaConfig& config, std::int64_t j, std::int64_t i) {
  if (i == 0) return static_cast<double>(j) / static_cast<double>(config.l_max - 1);
  const std::int64_t bands = (config.emb_dim - 1) / 2, band = (i - 1) % bands;
  const double steps = static_cast<double>(std::max<std::int64_t>(bands - 1, 1));
  const double nu = 1e-4 + (static_cast<double>(bands) - 1.0 - 1e-4) * static_cast<double>(band) / steps;
  const double angle = nu * 2.0 * std::numbers::pi * static_cast<double>(j) / static_cast<double>(config.l_max);
  return i <= bands ? std::cos(angle) : -std::sin(angle);
}

class Hyena : public Mixer {
 public:
  Hyena(const HyenaConfig& config, const Common& common, const std::string& name)
      : config_(config),
        hidden_(common.hidden_size),
        input_({{name + ".in_proj", 3 * hidden_}}, hidden_, common.initializer_range, true),
        convolution_(parameter_of(name + ".short_filter.weight", Shape({3 * hidden_, 1, kWidth}))),
        convolution_bias_(parameter_of(name + ".short_filter.bias", Shape({3 * hidden_}))),
        skip_(parameter_of(name + ".filter_fn.bias", Shape({hidden_}))),
        positions_(parameter_of(name + ".filter_fn.pos_emb.z", Shape({config.l_max * config.emb_dim}))),
        frequency_(parameter_of(name + ".filter_fn.freq", Shape({config.filter_order}))),
        output_({{name + ".out_proj", hidden_, nn::Quantisation::sensitive}}, hidden_,
                common.initializer_range / std::sqrt(2.0 * static_cast<double>(common.num_hidden_layers)), true) {
    for (nn::Parameter* parameter : {&convolution_, &convolution_bias_}) {
      parameter->initialization = nn::Initialization::transformed;
      parameter->transform = of_convolution;
    }
    skip_.deviation = 1.0;
    positions_.initialization = nn::Initialization::by_column;
    positions_.column = [config](std::int64_t i) {
      return position_at(config, i / config.emb_dim, i % config.emb_dim);
    };
    frequency_.initialization = config.w == 1.0 ? nn::Initialization::ones : nn::Initialization::by_column;
    frequency_.column = [w = config.w](std::int64_t) { return w; };
    const auto layer = [&](int index, std::int64_t in, std::int64_t out, bool bias) {
      filter_.emplace_back(std::vector<nn::Linear::Part>{{name + ".filter_fn.implicit_filter." + std::to_string(index),
                                                          out, nn::Quantisation::none}},
                           in, common.initializer_range, bias);
    };
    layer(0, config.emb_dim, config.filter_order, true);
    layer(2, config.filter_order, config.filter_order, true);
    layer(4, config.filter_order, config.filter_order, true);
    layer(6, config.filter_order, hidden_, false);
  }

  // The filter's matrices are multiplied once a call, not by each token.
  void for_each_parameter(const nn::ParameterVisitor& visit) override {
    input_.for_each_parameter(visit);
    for (nn::Parameter* parameter : {&convolution_, &convolution_bias_, &skip_, &positions_}) visit(*parameter);
    for (nn::Linear& layer : filter_) {
      layer.for_each_parameter([&](nn::Parameter& parameter) {
        parameter.multiplied = false;
        visit(parameter);
      });
    }
    visit(frequency_);
    output_.for_each_parameter(visit);
  }

  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t capacity, DType parameters) const override {
    return {{"c", Shape({sequences, capacity, 1, hidden_}), parameters, true},
            {"conv", Shape({sequences, 3 * hidden_, kWidth - 1}), ops::accumulator_of(parameters)}};
  }

  // Of the sums over the past, as direct ones or by transforms; a step reads c and the filter.
  Cost cost(std::int64_t length) const override {
    const auto tokens = static_cast<double>(length), channels = static_cast<double>(hidden_);
    const double sums = channels * std::min(tokens, 20.0 * std::log2(2.0 * tokens));
    return {sums, 3.0 * sums, 2.0 * 4.0 * tokens * channels};
  }

  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  bool prepares_steps() const override { return true; }
  void prepare_steps(Context& context, DType activations) override;
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) override;

 private:
  static constexpr std::size_t kSines = 3;

  TensorView short_filter() const { return convolution_.value.reshape(Shape({3 * hidden_, kWidth})); }
  // x1 (0), x2 (1) or v (2).
  TensorView part_of(const TensorView& convolved, std::int64_t part) const {
    return convolved.slice(-1, part * hidden_, (part + 1) * hidden_);
  }
  TensorView past_of(const TensorView& grown) const {
    return grown.reshape(Shape({grown.size(0), grown.size(1), hidden_}));
  }
  short_convolution::Inputs short_inputs(const nn::Pass& pass) const {
    return {saved_.projected, short_filter(), saved_.before.empty() ? TensorView() : saved_.before[1],
            pass.sequences.bounds, convolution_bias_.value};
  }
  long_convolution::Inputs long_inputs(const nn::Pass& pass) const {
    long_convolution::Inputs inputs{saved_.c, saved_.filter, skip_.value, {}, {}, pass.sequences.bounds};
    if (!saved_.before.empty() && pass.positions) {
      inputs.past = past_of(saved_.before[0]);
      inputs.positions = pass.positions;
    }
    return inputs;
  }
  void convolve(const nn::Pass& pass, const LayerState& after) const;
  // z in a dtype, in scratch.
  TensorView positions_in(Context& context, DType dtype) const;
  // The filter [l_max,D], f32 (f64 with f64), into `filter`; what its sines are of into `of_sines`.
  void make_filter(Context& context, DType dtype, const TensorView (&of_sines)[kSines], const TensorView& filter) const;
  void filter_backward(Context& context, DType dtype, const TensorView& dfilter) const;

  HyenaConfig config_;
  std::int64_t hidden_;
  nn::Linear input_;
  nn::Parameter convolution_, convolution_bias_;
  nn::Parameter skip_, positions_;
  std::vector<nn::Linear> filter_;
  nn::Parameter frequency_;
  nn::Linear output_;
  Tensor step_filter_;  // [l_max,D]; absent until a state was made

  struct Saved {
    TensorView projected;         // [B,T,3D]
    TensorView convolved;         // [B,T,3D]: recomputed in class activations, as c and y
    TensorView c;                 // [B,T,D]: in scratch where there is `kept`
    TensorView s;                 // [B,T,D]
    TensorView kept;              // the long convolution's own of c and the filter; absent: it makes that again
    TensorView y;                 // [B,T,D]
    TensorView filter;            // [l_max,D]: as c
    TensorView of_sines[kSines];  // [l_max,filter_order]
    LayerState before;
  } saved_;
};

void Hyena::convolve(const nn::Pass& pass, const LayerState& after) const {
  short_convolution::forward(pass.context, short_inputs(pass),
                             {saved_.convolved, after.empty() ? TensorView() : after[1]},
                             short_convolution::Activation::none);
  elementwise::multiply(pass.context, part_of(saved_.convolved, 0), part_of(saved_.convolved, 2), saved_.c);
}

TensorView Hyena::positions_in(Context& context, DType dtype) const {
  const Shape rows({config_.l_max, config_.emb_dim});
  const TensorView positions = context.scratch().tensor(rows, dtype, "hyena: positions");
  elementwise::convert(context, positions_.value.reshape(rows), positions);
  return positions;
}

void Hyena::make_filter(Context& context, DType dtype, const TensorView (&of_sines)[kSines],
                        const TensorView& filter) const {
  const ArenaScope scope(context.scratch());
  const TensorView hidden =
      context.scratch().tensor(Shape({config_.l_max, config_.filter_order}), dtype, "hyena: filter");
  TensorView in = positions_in(context, dtype);
  for (std::size_t i = 0; i < kSines; ++i) {
    filter_[i].forward(context, in, of_sines[i]);
    hyena_filter::sine_forward(context, of_sines[i], frequency_.value, hidden);
    in = hidden;
  }
  const TensorView values = context.scratch().tensor(filter.shape, dtype, "hyena: filter");
  filter_[kSines].forward(context, in, values);
  hyena_filter::window(context, values, {config_.l_max, config_.shift}, filter);
}

void Hyena::filter_backward(Context& context, DType dtype, const TensorView& dfilter) const {
  const ArenaScope scope(context.scratch());
  const Shape inner({config_.l_max, config_.filter_order});
  const auto sized = [&](const Shape& shape) { return context.scratch().tensor(shape, dtype, "hyena: filter"); };
  const TensorView dvalues = sized(dfilter.shape), hidden = sized(inner), dhidden = sized(inner);
  hyena_filter::window(context, dfilter, {config_.l_max, config_.shift}, dvalues);
  const auto sine = [&](std::size_t i) {
    hyena_filter::sine_forward(context, saved_.of_sines[i], frequency_.value, hidden);
    return hidden;
  };
  filter_[kSines].backward(context, sine(kSines - 1), dvalues, dhidden);
  const TensorView positions = positions_in(context, dtype), dpositions = sized(positions.shape);
  const TensorView dbefore = sized(inner);
  for (std::size_t i = kSines; i-- > 0;) {
    hyena_filter::sine_backward(context, saved_.of_sines[i], frequency_.value, dhidden, dbefore, frequency_.gradient);
    if (i == 0) {
      filter_[i].backward(context, positions, dbefore, dpositions);
    } else {
      filter_[i].backward(context, sine(i - 1), dbefore, dhidden);
    }
  }
  elementwise::add(context, dpositions, positions_.gradient.reshape(positions.shape));
}

void Hyena::forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                    const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const DType wide = ops::accumulator_of(x.dtype);
  const auto sized = [&](Arena& arena, std::int64_t channels, const char* label) {
    return arena.tensor(Shape({x.size(0), x.size(1), channels}), x.dtype, label);
  };
  saved_.before = before;
  saved_.projected = sized(pass.keep(), input_.out(), "hyena: projections");
  input_.forward(context, x, saved_.projected);
  saved_.convolved = sized(pass.keep_or_recompute(), 3 * hidden_, "hyena: convolutions");
  // How much the long convolution keeps follows from shapes. Its backward reads no values of c and the filter then.
  const Shape filter({config_.l_max, hidden_});
  saved_.c = TensorView(nullptr, x.dtype, Shape({x.size(0), x.size(1), hidden_}), x.device);
  saved_.filter = TensorView(nullptr, wide, filter, x.device);
  saved_.kept = pass.keep_states([&] { return long_convolution::kept_bytes(context, long_inputs(pass)); },
                                 "hyena: tokens and filter of the long convolution");
  saved_.c = sized(saved_.kept ? context.scratch() : pass.keep_or_recompute(), hidden_, "hyena: convolutions");
  convolve(pass, after);
  for (TensorView& each : saved_.of_sines) {
    each = pass.keep().tensor(Shape({config_.l_max, config_.filter_order}), x.dtype, "hyena: filter");
  }
  saved_.filter = (saved_.kept ? context.scratch() : pass.keep()).tensor(filter, wide, "hyena: filter");
  make_filter(context, x.dtype, saved_.of_sines, saved_.filter);
  saved_.s = sized(pass.keep(), hidden_, "hyena: long convolutions");
  long_convolution::forward(context, long_inputs(pass), {saved_.s, saved_.kept});
  if (!after.empty()) {
    const ops::softmax_attention::Appended appended[] = {
        {saved_.c.split_last(1), before.empty() ? TensorView() : before[0], after[0]}};
    ops::softmax_attention::append(context, appended, pass.positions, pass.sequences.bounds);
  }
  saved_.y = sized(pass.keep_or_recompute(), hidden_, "hyena: outputs");
  elementwise::multiply(context, part_of(saved_.convolved, 1), saved_.s, saved_.y);
  if (y) output_.forward(context, saved_.y, y);
}

void Hyena::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const auto like = [&](const TensorView& view) { return scratch.tensor(view.shape, view.dtype, "hyena: gradients"); };
  if (pass.recompute == nn::Recompute::activations) {
    for (TensorView* each : {&saved_.convolved, &saved_.c, &saved_.y}) *each = like(*each);
    convolve(pass, {});
    elementwise::multiply(context, part_of(saved_.convolved, 1), saved_.s, saved_.y);
  }
  const TensorView d_y = like(saved_.y), ds = like(saved_.s), dc = like(saved_.c);
  const TensorView dconvolved = like(saved_.convolved), dprojected = like(saved_.projected);
  const TensorView dfilter = like(saved_.filter);
  output_.backward(context, saved_.y, dy, d_y);
  elementwise::multiply(context, d_y, saved_.s, part_of(dconvolved, 1));
  elementwise::multiply(context, d_y, part_of(saved_.convolved, 1), ds);
  long_convolution::backward(context, long_inputs(pass), saved_.kept, ds, {dc, dfilter, skip_.gradient});
  elementwise::multiply(context, dc, part_of(saved_.convolved, 2), part_of(dconvolved, 0));
  elementwise::multiply(context, dc, part_of(saved_.convolved, 0), part_of(dconvolved, 2));
  short_convolution::backward(
      context, short_inputs(pass), {dconvolved, {}},
      {dprojected, convolution_.gradient.reshape(Shape({3 * hidden_, kWidth})), {}, convolution_bias_.gradient},
      short_convolution::Activation::none);
  input_.backward(context, x, dprojected, dx);
  filter_backward(context, x.dtype, dfilter);
}

void Hyena::prepare_steps(Context& context, DType activations) {
  const ArenaScope scope(context.scratch());
  const Shape shape({config_.l_max, hidden_});
  if (!step_filter_) {
    step_filter_ = Tensor::empty(shape, ops::accumulator_of(activations), context.device());
  }
  TensorView of_sines[kSines];
  for (TensorView& each : of_sines) {
    each = context.scratch().tensor(Shape({config_.l_max, config_.filter_order}), activations, "hyena: filter");
  }
  make_filter(context, activations, of_sines, step_filter_);
}

void Hyena::step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const std::int64_t batch = x.size(0);
  const auto sized = [&](std::int64_t channels, const char* label) {
    return scratch.tensor(Shape({batch, channels}), x.dtype, label);
  };
  const TensorView projected = sized(3 * hidden_, "hyena: projections"), c = sized(hidden_, "hyena: convolutions");
  input_.step(context, norm.before_step(context, x), projected);
  short_convolution::step(context, projected, short_filter(), state[1], projected, short_convolution::Activation::none,
                          convolution_bias_.value);
  elementwise::multiply(context, part_of(projected, 0), part_of(projected, 2), c);
  const ops::softmax_attention::Appended appended[] = {{c.reshape(Shape({batch, 1, 1, hidden_})), {}, state[0]}};
  ops::softmax_attention::append(context, appended, pass.positions, {});
  const TensorView s = sized(hidden_, "hyena: long convolutions");
  long_convolution::step(context, {c, step_filter_, skip_.value, past_of(state[0]), pass.positions, {}}, s);
  elementwise::multiply(context, part_of(projected, 1), s, s);
  output_.step(context, {s}, x, {ops::linear_step::Epilogue::add});
}

}  // namespace

std::unique_ptr<Mixer> HyenaConfig::create(const Common& common, std::int64_t layer) const {
  return std::make_unique<Hyena>(*this, common, layer_prefix(layer) + ".attn");
}

}  // namespace flashgla::mixers

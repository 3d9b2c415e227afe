// The time mix of rwkv.h.
#include <cmath>

#include "flashgla/mixers/mixer.h"
#include "flashgla/mixers/rwkv/config.h"
#include "flashgla/nn/linear.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/token_shift/token_shift.h"
#include "flashgla/ops/wkv/wkv.h"

namespace flashgla::mixers {

namespace {

namespace wkv = ops::wkv;
namespace token_shift = ops::token_shift;

nn::Parameter by_channel(const std::string& name, std::int64_t channels,
                         const std::function<double(std::int64_t)>& value) {
  nn::Parameter parameter;
  parameter.name = name;
  parameter.shape = Shape({channels});
  parameter.initialization = nn::Initialization::by_column;
  parameter.column = value;
  parameter.decay = false;
  parameter.multiplied = false;
  return parameter;
}

class TimeMix : public Mixer {
 public:
  TimeMix(const RwkvConfig& config, const Common& common, const RwkvDepth& depth, const std::string& name)
      : hidden_(common.hidden_size),
        inner_(config.inner(common)),
        decay_(by_channel(
            name + ".time_decay", inner_,
            [last = static_cast<double>(std::max<std::int64_t>(inner_ - 1, 1)), power = 0.7 + 1.3 * depth.up](
                std::int64_t i) { return -5.0 + 8.0 * std::pow(static_cast<double>(i) / last, power); })),
        first_(by_channel(name + ".time_first", inner_,
                          [](std::int64_t i) { return std::log(0.3) + 0.5 * static_cast<double>((i + 1) % 3 - 1); })),
        mix_key_(rwkv_mix(name + ".time_mix_key", hidden_, depth.down, 0.0)),
        mix_value_(rwkv_mix(name + ".time_mix_value", hidden_, depth.down, 0.3 * depth.up)),
        mix_receptance_(rwkv_mix(name + ".time_mix_receptance", hidden_, 0.5 * depth.down, 0.0)),
        key_({{name + ".key", inner_}}, hidden_, config.zero_deviation(common)),
        value_({{name + ".value", inner_}}, hidden_, config.deviation(common)),
        receptance_({{name + ".receptance", inner_}}, hidden_, config.zero_deviation(common)),
        output_({{name + ".output", hidden_, nn::Quantisation::sensitive}}, inner_, config.zero_deviation(common)) {}

  void for_each_parameter(const nn::ParameterVisitor& visit) override {
    for (nn::Parameter* parameter : {&decay_, &first_, &mix_key_, &mix_value_, &mix_receptance_}) visit(*parameter);
    for (nn::Linear* layer : {&key_, &value_, &receptance_, &output_}) layer->for_each_parameter(visit);
  }

  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t, DType parameters) const override {
    const DType dtype = ops::accumulator_of(parameters);
    return {{"wkv", Shape({sequences, 3, inner_}), dtype}, {"shift", Shape({sequences, hidden_}), dtype}};
  }

  // Of ops/wkv/README.md and ops/token_shift/README.md.
  Cost cost(std::int64_t) const override {
    const auto inner = static_cast<double>(inner_), hidden = static_cast<double>(hidden_);
    return {18.0 * inner + 9.0 * hidden, 70.0 * inner + 30.0 * hidden, 2.0 * 4.0 * (3.0 * inner + hidden)};
  }

  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) override;

 private:
  // [3,D]: of keys, values, receptances.
  TensorView mixes(bool gradients = false) const {
    return rwkv_mixes({&mix_key_, &mix_value_, &mix_receptance_}, gradients);
  }
  token_shift::Inputs shift_inputs(const nn::Pass& pass, const TensorView& x) const {
    return {x, mixes(), saved_.before.empty() ? TensorView() : saved_.before[1], pass.sequences.bounds};
  }
  wkv::Inputs wkv_inputs(const nn::Pass& pass) const {
    return {saved_.k,
            saved_.v,
            saved_.r,
            decay_.value,
            first_.value,
            saved_.before.empty() ? TensorView() : saved_.before[0],
            pass.sequences.bounds};
  }

  std::int64_t hidden_, inner_;
  nn::Parameter decay_, first_;
  nn::Parameter mix_key_, mix_value_, mix_receptance_;
  nn::Linear key_, value_, receptance_, output_;

  struct Saved {
    TensorView mixed;    // [3,B,T,D]: recomputed in class activations
    TensorView k, v, r;  // [B,T,E]
    TensorView y;        // [B,T,E]
    TensorView kept;     // the operator's own; absent: it computes its states again
    LayerState before;
  } saved_;
};

void TimeMix::forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                      const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  saved_.before = before;
  saved_.mixed =
      pass.keep_or_recompute().tensor(Shape({3, x.size(0), x.size(1), hidden_}), x.dtype, "rwkv: shifted tokens");
  token_shift::forward(context, shift_inputs(pass, x), {saved_.mixed, after.empty() ? TensorView() : after[1]});
  const Shape inner({x.size(0), x.size(1), inner_});
  saved_.k = pass.keep().tensor(inner, x.dtype, "rwkv: keys, values, receptances");
  saved_.v = pass.keep().tensor(inner, x.dtype, "rwkv: keys, values, receptances");
  saved_.r = pass.keep().tensor(inner, x.dtype, "rwkv: keys, values, receptances");
  key_.forward(context, saved_.mixed.select(0, 0), saved_.k);
  value_.forward(context, saved_.mixed.select(0, 1), saved_.v);
  receptance_.forward(context, saved_.mixed.select(0, 2), saved_.r);

  saved_.y = pass.keep().tensor(inner, x.dtype, "rwkv: outputs");
  const wkv::Inputs inputs = wkv_inputs(pass);
  saved_.kept = pass.keep_states([&] { return wkv::kept_bytes(context, inputs); }, "rwkv: chunk states");
  wkv::forward(context, inputs, {saved_.y, after.empty() ? TensorView() : after[0], saved_.kept});
  if (y) output_.forward(context, saved_.y, y);
}

void TimeMix::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const auto like = [&](const TensorView& view) { return scratch.tensor(view.shape, view.dtype, "rwkv: gradients"); };
  if (pass.recompute == nn::Recompute::activations) {
    saved_.mixed = like(saved_.mixed);
    token_shift::forward(context, shift_inputs(pass, x), {saved_.mixed, {}});
  }
  const TensorView dmixed = like(saved_.mixed), d_y = like(saved_.y);
  const TensorView dk = like(saved_.k), dv = like(saved_.v), dr = like(saved_.r);
  output_.backward(context, saved_.y, dy, d_y);
  wkv::backward(context, wkv_inputs(pass), saved_.kept, d_y, {dk, dv, dr, decay_.gradient, first_.gradient});
  key_.backward(context, saved_.mixed.select(0, 0), dk, dmixed.select(0, 0));
  value_.backward(context, saved_.mixed.select(0, 1), dv, dmixed.select(0, 1));
  receptance_.backward(context, saved_.mixed.select(0, 2), dr, dmixed.select(0, 2));
  token_shift::backward(context, shift_inputs(pass, x), dmixed, {dx, mixes(true)});
}

void TimeMix::step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const TensorView normalized = scratch.tensor(x.shape, x.dtype, "norms: outputs");
  norm.forward(context, x, normalized, {});
  const TensorView mixed = scratch.tensor(Shape({3, x.size(0), hidden_}), x.dtype, "rwkv: shifted tokens");
  token_shift::step(context, normalized, mixes(), state[1], mixed);
  const TensorView inner = scratch.tensor(Shape({3, x.size(0), inner_}), x.dtype, "rwkv: keys, values, receptances");
  key_.step(context, {mixed.select(0, 0)}, inner.select(0, 0));
  value_.step(context, {mixed.select(0, 1)}, inner.select(0, 1));
  receptance_.step(context, {mixed.select(0, 2)}, inner.select(0, 2));
  const TensorView y = inner.select(0, 0);
  wkv::step(context, {y, inner.select(0, 1), inner.select(0, 2), decay_.value, first_.value, {}, {}}, state[0], y);
  output_.step(context, {y}, x, {ops::linear_step::Epilogue::add});
}

}  // namespace

std::unique_ptr<Mixer> RwkvConfig::create(const Common& common, std::int64_t layer) const {
  return std::make_unique<TimeMix>(*this, common, RwkvDepth(common, layer), layer_prefix(layer) + ".attn");
}

}  // namespace flashgla::mixers

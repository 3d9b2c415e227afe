// The channel mix of rwkv.h.
#include "flashgla/mixers/mixer.h"
#include "flashgla/mixers/rwkv/config.h"
#include "flashgla/nn/linear.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/token_shift/token_shift.h"

namespace flashgla::mixers {

namespace {

namespace elementwise = ops::elementwise;
namespace token_shift = ops::token_shift;

class ChannelMix : public Mixer {
 public:
  ChannelMix(const RwkvConfig& config, const Common& common, const RwkvDepth& depth, const std::string& name,
             std::int64_t width)
      : hidden_(common.hidden_size),
        width_(width),
        mix_key_(rwkv_mix(name + ".time_mix_key", hidden_, depth.down, 0.0)),
        mix_receptance_(rwkv_mix(name + ".time_mix_receptance", hidden_, depth.down, 0.0)),
        key_({{name + ".key", width, nn::Quantisation::mlp}}, hidden_, config.deviation(common)),
        receptance_({{name + ".receptance", hidden_, nn::Quantisation::mlp}}, hidden_, config.zero_deviation(common)),
        value_({{name + ".value", hidden_, nn::Quantisation::mlp}}, width, config.zero_deviation(common)) {}

  void for_each_parameter(const nn::ParameterVisitor& visit) override {
    for (nn::Parameter* parameter : {&mix_key_, &mix_receptance_}) visit(*parameter);
    for (nn::Linear* layer : {&key_, &receptance_, &value_}) layer->for_each_parameter(visit);
  }

  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t, DType parameters) const override {
    return {{"mlp_shift", Shape({sequences, hidden_}), ops::accumulator_of(parameters)}};
  }

  // Of ops/token_shift/README.md, and a square and a gate.
  Cost cost(std::int64_t) const override {
    const auto hidden = static_cast<double>(hidden_), width = static_cast<double>(width_);
    return {11.0 * hidden + 2.0 * width, 36.0 * hidden + 7.0 * width, 2.0 * 4.0 * hidden};
  }

  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) override;

 private:
  // [2,D]: of keys and receptances.
  TensorView mixes(bool gradients = false) const { return rwkv_mixes({&mix_key_, &mix_receptance_}, gradients); }
  token_shift::Inputs shift_inputs(const nn::Pass& pass, const TensorView& x) const {
    return {x, mixes(), saved_.before.empty() ? TensorView() : saved_.before[0], pass.sequences.bounds};
  }

  std::int64_t hidden_, width_;
  nn::Parameter mix_key_, mix_receptance_;
  nn::Linear key_, receptance_, value_;

  struct Saved {
    TensorView mixed;  // [2,B,T,D]: recomputed in class activations
    TensorView k;      // [B,T,width]
    TensorView r, v;   // [B,T,D]
    LayerState before;
  } saved_;
};

void ChannelMix::forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                         const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  saved_.before = before;
  saved_.mixed =
      pass.keep_or_recompute().tensor(Shape({2, x.size(0), x.size(1), hidden_}), x.dtype, "mlp: shifted tokens");
  token_shift::forward(context, shift_inputs(pass, x), {saved_.mixed, after.empty() ? TensorView() : after[0]});
  const Shape wide({x.size(0), x.size(1), width_});
  saved_.k = pass.keep().tensor(wide, x.dtype, "mlp: keys");
  saved_.r = pass.keep().tensor(x.shape, x.dtype, "mlp: receptances, values");
  saved_.v = pass.keep().tensor(x.shape, x.dtype, "mlp: receptances, values");
  key_.forward(context, saved_.mixed.select(0, 0), saved_.k);
  receptance_.forward(context, saved_.mixed.select(0, 1), saved_.r);
  if (!y && !pass.training()) return;
  const TensorView hidden = context.scratch().tensor(wide, x.dtype, "mlp: hidden");
  elementwise::squared_relu_forward(context, saved_.k, hidden);
  value_.forward(context, hidden, saved_.v);
  if (!y) return;
  const TensorView gated = y.residual ? context.scratch().tensor(x.shape, x.dtype, "mlp: outputs") : y.to;
  elementwise::sigmoid_gate_forward(context, saved_.r, saved_.v, gated);
  if (y.residual) elementwise::add_to(context, gated, y.residual, y.to);
}

void ChannelMix::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const auto like = [&](const TensorView& view) { return scratch.tensor(view.shape, view.dtype, "mlp: gradients"); };
  if (pass.recompute == nn::Recompute::activations) {
    saved_.mixed = like(saved_.mixed);
    token_shift::forward(context, shift_inputs(pass, x), {saved_.mixed, {}});
  }
  const TensorView dmixed = like(saved_.mixed), hidden = like(saved_.k), dk = like(saved_.k);
  const TensorView dr = like(saved_.r), dv = like(saved_.v);
  elementwise::sigmoid_gate_backward(context, saved_.r, saved_.v, dy, dr, dv);
  elementwise::squared_relu_forward(context, saved_.k, hidden);
  value_.backward(context, hidden, dv, dk);
  elementwise::squared_relu_backward(context, saved_.k, dk, dk);
  key_.backward(context, saved_.mixed.select(0, 0), dk, dmixed.select(0, 0));
  receptance_.backward(context, saved_.mixed.select(0, 1), dr, dmixed.select(0, 1));
  token_shift::backward(context, shift_inputs(pass, x), dmixed, {dx, mixes(true)});
}

void ChannelMix::step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const TensorView normalized = scratch.tensor(x.shape, x.dtype, "norms: outputs");
  norm.forward(context, x, normalized, {});
  const TensorView mixed = scratch.tensor(Shape({2, x.size(0), hidden_}), x.dtype, "mlp: shifted tokens");
  token_shift::step(context, normalized, mixes(), state[0], mixed);
  const TensorView k = scratch.tensor(Shape({x.size(0), width_}), x.dtype, "mlp: keys");
  const TensorView r = scratch.tensor(x.shape, x.dtype, "mlp: receptances, values");
  const TensorView v = scratch.tensor(x.shape, x.dtype, "mlp: receptances, values");
  key_.step(context, {mixed.select(0, 0)}, k);
  receptance_.step(context, {mixed.select(0, 1)}, r);
  elementwise::squared_relu_forward(context, k, k);
  value_.step(context, {k}, v);
  elementwise::sigmoid_gate_forward(context, r, v, v);
  elementwise::add(context, v, x);
}

}  // namespace

std::unique_ptr<Mixer> RwkvConfig::create_mlp(const Common& common, std::int64_t layer, std::int64_t width) const {
  return std::make_unique<ChannelMix>(*this, common, RwkvDepth(common, layer), layer_prefix(layer) + ".mlp", width);
}

}  // namespace flashgla::mixers

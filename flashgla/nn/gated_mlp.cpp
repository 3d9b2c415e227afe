#include "flashgla/nn/gated_mlp.h"

#include "flashgla/ops/swiglu/swiglu.h"

namespace flashgla::nn {

GatedMLP::GatedMLP(const std::string& name, std::int64_t hidden, std::int64_t intermediate, double deviation)
    : gate_up_({{name + ".gate_proj", intermediate}, {name + ".up_proj", intermediate}}, hidden, deviation),
      down_({{name + ".down_proj", hidden}}, intermediate, deviation) {}

void GatedMLP::for_each_parameter(const ParameterVisitor& visit) {
  gate_up_.for_each_parameter(visit);
  down_.for_each_parameter(visit);
}

void GatedMLP::forward(Pass& pass, const TensorView& x, const TensorView& y) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const std::int64_t rows = x.as_rows().size(0);
  saved_.gate_up = pass.keep().tensor(Shape({rows, gate_up_.out()}), x.dtype, "mlp: gate, up");
  saved_.hidden = pass.keep_or_recompute().tensor(Shape({rows, down_.in()}), x.dtype, "mlp: hidden");
  gate_up_.forward(context, x, saved_.gate_up);
  ops::swiglu::forward(context, gate_up_.part(saved_.gate_up, 0), gate_up_.part(saved_.gate_up, 1), saved_.hidden);
  if (y) down_.forward(context, saved_.hidden, y);
}

void GatedMLP::step(Pass& pass, const RMSNorm& norm, const TensorView& x) const {
  namespace linear_step = ops::linear_step;
  const ArenaScope scope(pass.context.scratch());
  const TensorView hidden = pass.context.scratch().tensor(Shape({x.size(0), down_.in()}), x.dtype, "mlp: hidden");
  const linear_step::Layer gate_up = gate_up_.step_layer(hidden), down = down_.step_layer(x);
  linear_step::run(pass.context, norm.before_step(x), {&gate_up, 1}, {linear_step::Epilogue::swiglu});
  linear_step::run(pass.context, {hidden}, {&down, 1}, {linear_step::Epilogue::add});
}

void GatedMLP::backward(Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const TensorView gate = gate_up_.part(saved_.gate_up, 0);
  const TensorView up = gate_up_.part(saved_.gate_up, 1);
  TensorView hidden = saved_.hidden;
  if (pass.recompute == Recompute::activations) {
    hidden = scratch.tensor(hidden.shape, hidden.dtype, "mlp: hidden");
    ops::swiglu::forward(context, gate, up, hidden);
  }
  const TensorView dhidden = scratch.tensor(hidden.shape, x.dtype, "mlp: gradients");
  down_.backward(context, hidden, dy, dhidden);
  const TensorView dgate_up = scratch.tensor(saved_.gate_up.shape, x.dtype, "mlp: gradients");
  ops::swiglu::backward(context, gate, up, dhidden, gate_up_.part(dgate_up, 0), gate_up_.part(dgate_up, 1));
  gate_up_.backward(context, x, dgate_up, dx);
}

}  // namespace flashgla::nn

#include "flashgla/nn/gated_mlp.h"

#include "flashgla/ops/swiglu/swiglu.h"

namespace flashgla::nn {

GatedMLP::GatedMLP(const std::string& name, std::int64_t hidden, std::int64_t intermediate, double deviation)
    : gate_up_({{name + ".gate_proj", intermediate, Quantisation::mlp},
                {name + ".up_proj", intermediate, Quantisation::mlp, Streamed::beside}},
               hidden, deviation),
      down_({{name + ".down_proj", hidden, Quantisation::mlp}}, intermediate, deviation) {}

void GatedMLP::for_each_parameter(const ParameterVisitor& visit) {
  gate_up_.for_each_parameter(visit);
  down_.for_each_parameter(visit);
}

void GatedMLP::forward(Pass& pass, const TensorView& x, const Output& y) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const std::int64_t rows = x.as_rows().size(0);
  gate_up_values_ = pass.keep().tensor(Shape({rows, gate_up_.out()}), x.dtype, "mlp: gate, up");
  gate_up_.forward(context, x, gate_up_values_);
  if (!y) return;
  const TensorView hidden = context.scratch().tensor(Shape({rows, down_.in()}), x.dtype, "mlp: hidden");
  ops::swiglu::forward(context, gate_up_.part(gate_up_values_, 0), gate_up_.part(gate_up_values_, 1), hidden);
  down_.forward(context, hidden, y);
}

void GatedMLP::step(Pass& pass, const Norm& norm, const TensorView& x) const {
  namespace linear_step = ops::linear_step;
  const ArenaScope scope(pass.context.scratch());
  const TensorView hidden = pass.context.scratch().tensor(Shape({x.size(0), down_.in()}), x.dtype, "mlp: hidden");
  gate_up_.step(pass.context, norm.before_step(pass.context, x), hidden, {linear_step::Epilogue::swiglu});
  down_.step(pass.context, {hidden}, x, {linear_step::Epilogue::add});
}

void GatedMLP::backward(Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const TensorView gate = gate_up_.part(gate_up_values_, 0), up = gate_up_.part(gate_up_values_, 1);
  const TensorView dhidden = scratch.tensor(gate.shape, x.dtype, "mlp: gradients");
  down_.backward_input(context, dy, dhidden);
  // One pass puts the gradients in the values' places and computes the hidden values again in their gradients': to have
  // kept those takes memory and saves no time.
  ops::swiglu::backward(context, gate, up, dhidden, gate, up, dhidden);
  down_.backward_parameters(context, dhidden, dy);
  gate_up_.backward(context, x, gate_up_values_, dx);
}

}  // namespace flashgla::nn

#include "flashgla/ops/gated_linear_attention/logits.h"

#include <string>

#include "flashgla/ops/log_sigmoid_gate/log_sigmoid_gate.h"

namespace flashgla::ops::gated_linear_attention {

namespace {

// While another operator runs no implementation of this one is forced.
class Unforced {
 public:
  explicit Unforced(Context& context) : context_(context), forced_(context.forced_implementation()) {
    context_.force_implementation("");
  }
  ~Unforced() { context_.force_implementation(forced_); }
  Unforced(const Unforced&) = delete;
  Unforced& operator=(const Unforced&) = delete;

 private:
  Context& context_;
  std::string forced_;
};

// Gates of tokens and heads need not lie side by side; rows of channels do.
TensorView as_rows(const TensorView& gate) {
  if (gate.stride[gate.rank() - 1] == 1 || gate.size(-1) == 1) return gate;
  return gate.split_last(gate.size(-1));
}

// Inputs, or a step's, with gates in workspace for logits.
template <class AnyInputs>
AnyInputs gated(Context& context, const Problem& p, DType dtype, AnyInputs inputs) {
  const Unforced unforced(context);
  for (TensorView* gate : {&inputs.g, &inputs.gv}) {
    if (!*gate) continue;
    const TensorView logits = as_rows(*gate);
    *gate = context.scratch().tensor(gate->shape, dtype, "gates of logits");
    log_sigmoid_gate::forward(context, logits, gate->reshape(logits.shape), p.gate_logit_normalizer, p.gate_clamp_min);
  }
  return inputs;
}

}  // namespace

Problem with_gates(const Problem& problem, DType dtype) {
  Problem p = problem;
  p.gate_logit_normalizer = 0.0;
  p.gate_clamp_min = kNoClamp;
  p.gate_dtype = dtype;
  return p;
}
Problem with_gates(const Problem& problem) {
  return with_gates(problem, problem.dtype == DType::f64 ? DType::f64 : DType::f32);
}

void forward_with_gates(Context& context, const Problem& problem, const Problem& with_gates, const Inputs& inputs,
                        const Outputs& outputs, const RunForward& run) {
  const ArenaScope scope(context.scratch());
  run(with_gates, gated(context, problem, with_gates.gate_dtype, inputs), outputs);
}

void backward_with_gates(Context& context, const Problem& problem, const Problem& with_gates, const Inputs& inputs,
                         const Outputs& outputs, const OutputGradients& output_gradients,
                         const InputGradients& input_gradients, const RunBackward& run) {
  const ArenaScope scope(context.scratch());
  const Inputs with = gated(context, problem, with_gates.gate_dtype, inputs);
  InputGradients of_gates = input_gradients;
  for (TensorView* gradient : {&of_gates.dg, &of_gates.dgv}) {
    if (*gradient) *gradient = context.scratch().tensor(gradient->shape, with_gates.gate_dtype, "gradients of gates");
  }
  run(with_gates, with, outputs, output_gradients, of_gates);
  const Unforced unforced(context);
  const auto turn = [&](const TensorView& logits, const TensorView& of_gate, const TensorView& of_logits) {
    if (!of_logits) return;
    const bool in_place = as_rows(of_logits).rank() == as_rows(logits).rank();
    const TensorView x = in_place ? as_rows(logits) : logits.split_last(logits.size(-1)),
                     dx = in_place ? as_rows(of_logits) : of_logits.split_last(of_logits.size(-1));
    log_sigmoid_gate::backward(context, x, of_gate.reshape(x.shape), dx, problem.gate_logit_normalizer,
                               problem.gate_clamp_min);
  };
  turn(inputs.g, of_gates.dg, input_gradients.dg);
  turn(inputs.gv, of_gates.dgv, input_gradients.dgv);
}

void step_with_gates(Context& context, const Problem& problem, const Problem& with_gates, const StepInputs& inputs,
                     const RunStep& run) {
  const ArenaScope scope(context.scratch());
  run(with_gates, gated(context, problem, with_gates.gate_dtype, inputs));
}

}  // namespace flashgla::ops::gated_linear_attention

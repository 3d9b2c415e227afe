#include "flashgla/ops/gated_linear_attention/logits.h"

#include <string>
#include <utility>

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

struct Gates {
  TensorView g, gv;
};

Gates gates_of(Context& context, const Problem& p, DType dtype, const TensorView& g, const TensorView& gv) {
  Gates gates;
  if (g) gates.g = context.scratch().tensor(g.shape, dtype, "gates of logits");
  if (gv) gates.gv = context.scratch().tensor(gv.shape, dtype, "gates of logits");
  const Unforced unforced(context);
  for (const auto& [logits, gate] : {std::pair(g, gates.g), {gv, gates.gv}}) {
    if (!logits) continue;
    log_sigmoid_gate::forward(context, as_rows(logits), gate.reshape(as_rows(logits).shape), p.gate_logit_normalizer,
                              p.gate_clamp_min);
  }
  return gates;
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
  const Gates gates = gates_of(context, problem, with_gates.gate_dtype, inputs.g, inputs.gv);
  Inputs gated = inputs;
  gated.g = gates.g;
  gated.gv = gates.gv;
  run(with_gates, gated, outputs);
}

void backward_with_gates(Context& context, const Problem& problem, const Problem& with_gates, const Inputs& inputs,
                         const Outputs& outputs, const OutputGradients& output_gradients,
                         const InputGradients& input_gradients, const RunBackward& run) {
  const ArenaScope scope(context.scratch());
  const Gates gates = gates_of(context, problem, with_gates.gate_dtype, inputs.g, inputs.gv);
  Inputs gated = inputs;
  gated.g = gates.g;
  gated.gv = gates.gv;
  InputGradients of_gates = input_gradients;
  for (TensorView* gradient : {&of_gates.dg, &of_gates.dgv}) {
    if (*gradient) *gradient = context.scratch().tensor(gradient->shape, with_gates.gate_dtype, "gradients of gates");
  }
  run(with_gates, gated, outputs, output_gradients, of_gates);
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
  const Gates gates = gates_of(context, problem, with_gates.gate_dtype, inputs.g, inputs.gv);
  StepInputs gated = inputs;
  gated.g = gates.g;
  gated.gv = gates.gv;
  run(with_gates, gated);
}

}  // namespace flashgla::ops::gated_linear_attention

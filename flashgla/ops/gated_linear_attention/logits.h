// Calls whose gates are logits, for implementations and kernels that take log gates: these lie in workspace, and dg is
// turned into the gradient of the logits (ops/log_sigmoid_gate).
#pragma once

#include <functional>
#include <string>

#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

namespace flashgla::ops::gated_linear_attention {

// The same problem with log gates: in f32 (f64 with f64), or in `dtype`.
Problem with_gates(const Problem& problem);
Problem with_gates(const Problem& problem, DType dtype);

// Calls run(problem, ...) with the gates that the problem of with_gates() has.
using RunForward = std::function<void(const Problem&, const Inputs&, const Outputs&)>;
using RunBackward =
    std::function<void(const Problem&, const Inputs&, const Outputs&, const OutputGradients&, const InputGradients&)>;
using RunStep = std::function<void(const Problem&, const StepInputs&)>;
void forward_with_gates(Context& context, const Problem& problem, const Problem& with_gates, const Inputs& inputs,
                        const Outputs& outputs, const RunForward& run);
void backward_with_gates(Context& context, const Problem& problem, const Problem& with_gates, const Inputs& inputs,
                         const Outputs& outputs, const OutputGradients& output_gradients,
                         const InputGradients& input_gradients, const RunBackward& run);
void step_with_gates(Context& context, const Problem& problem, const Problem& with_gates, const StepInputs& inputs,
                     const RunStep& run);

}  // namespace flashgla::ops::gated_linear_attention

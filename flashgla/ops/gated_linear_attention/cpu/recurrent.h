// Token by token on CPU (section 2.1 of the paper): the state stays in the first-level cache, a slice of value channels
// at a time. Exact for any gate, no workspace that grows with T in forward; also the decoding step.
#pragma once

#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::recurrent {

Support supports(const Problem& problem, const Architecture& architecture);
// Forward keeps nothing: backward recomputes the states from checkpoints of its own.
std::size_t states_bytes(const Problem& problem);
void forward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out);
void backward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out,
              const OutputGradients& d_out, const InputGradients& d_in);
// A key gate of any rank.
bool takes_projection(const Context& context, const Problem& problem, const GateProjection& gate, DType state);
void step(Context& context, const Problem& problem, const StepInputs& in, const TensorView& h, const TensorView& z,
          const TensorView& o);

}  // namespace flashgla::ops::gated_linear_attention::recurrent

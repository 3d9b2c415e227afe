// The CPU implementations' functions, as the rows of the operator's table call them.
#pragma once

#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention {

// The chunk form: small matrix products in SIMD, exact for any gate (README.md). Yang et al. 2024, section 4.2-4.3 and
// Algorithms 3-6.
namespace chunk {
Support supports(const Problem& problem, const Architecture& architecture);
std::size_t states_bytes(const Problem& problem);
void forward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out);
void backward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out,
              const OutputGradients& d_out, const InputGradients& d_in);
}  // namespace chunk

// Token by token. Forward keeps nothing: backward recomputes the states from checkpoints of its own.
namespace recurrent {
Support supports(const Problem& problem, const Architecture& architecture);
std::size_t states_bytes(const Problem& problem);
void forward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out);
void backward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out,
              const OutputGradients& d_out, const InputGradients& d_in);
// A key gate of any rank.
bool takes_projection(const Context& context, const Problem& problem, const GateProjection& gate, DType state);
void step(Context& context, const Problem& problem, const StepInputs& in, const TensorView& h, const TensorView& z,
          const TensorView& o);
}  // namespace recurrent

// The quadratic form.
namespace parallel {
Support supports(const Problem& problem, const Architecture& architecture);
std::size_t states_bytes(const Problem& problem);
void forward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out);
void backward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out,
              const OutputGradients& d_out, const InputGradients& d_in);
}  // namespace parallel

}  // namespace flashgla::ops::gated_linear_attention

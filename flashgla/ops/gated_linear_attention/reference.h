// The definition, in float64 arithmetic for every dtype: read reference.cpp beside the equations of README.md.
#pragma once

#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::reference {

Support supports(const Problem& problem, const Architecture& architecture);
std::size_t states_bytes(const Problem& problem);
void forward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out);
void backward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out,
              const OutputGradients& d_out, const InputGradients& d_in);
void step(Context& context, const Problem& problem, const StepInputs& in, const TensorView& h, const TensorView& z,
          const TensorView& o);
void fold(Context& context, const Ring& ring, const TensorView& h, const TensorView& to);

}  // namespace flashgla::ops::gated_linear_attention::reference

// The chunk form on CPU: small matrix products in SIMD, exact for any gate. Design and performance log: README.md.
// Yang et al. 2024, section 4.2-4.3 and Algorithms 3-6.
#pragma once

#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::chunk {

Support supports(const Problem& problem, const Architecture& architecture);
std::size_t states_bytes(const Problem& problem);
void forward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out);
void backward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out,
              const OutputGradients& d_out, const InputGradients& d_in);

}  // namespace flashgla::ops::gated_linear_attention::chunk

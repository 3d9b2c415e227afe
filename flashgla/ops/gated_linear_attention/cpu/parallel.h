// The quadratic form on CPU (section 4.2 of the paper, "parallel form"), for short sequences:
//     P_ij = scale * sum_k q_ik k_jk W_ijk,  W_ij = alpha_{j+1} * ... * alpha_i,  o_i = sum_{j<=i} P_ij v_j + from h0.
// W is built as a running product, never as a quotient, so any gate is exact; gates over values run along in the same
// way. It keeps no state between tokens: a second, independent way to every result of the recurrence.
#pragma once

#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::parallel {

Support supports(const Problem& problem, const Architecture& architecture);
std::size_t states_bytes(const Problem& problem);
void forward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out);
void backward(Context& context, const Problem& problem, const Inputs& in, const Outputs& out,
              const OutputGradients& d_out, const InputGradients& d_in);

}  // namespace flashgla::ops::gated_linear_attention::parallel

// Runs the operator from an installed FlashGLA: with no gate, one head and K = V = 1, o_t is the sum of q_t k_i v_i.
#include <cstdio>

#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

int main() {
  using flashgla::TensorView;
  float q[3] = {1, 2, 3}, k[3] = {1, 1, 2}, v[3] = {5, 7, 11}, o[3];
  const flashgla::Shape shape{1, 3, 1, 1};
  flashgla::Context context;
  flashgla::ops::gated_linear_attention::forward(
      context, {.q = TensorView(q, shape), .k = TensorView(k, shape), .v = TensorView(v, shape)},
      {.o = TensorView(o, shape)});
  const bool right = o[0] == 5 && o[1] == 24 && o[2] == 102;
  std::printf("%g %g %g %s\n", o[0], o[1], o[2], right ? "right" : "wrong");
  return right ? 0 : 1;
}

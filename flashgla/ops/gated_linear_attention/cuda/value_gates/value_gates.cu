// The two sides of a call.
#include <utility>

#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"

namespace flashgla::ops::gated_linear_attention::cuda {

Params keys_of(const Params& params) {
  Params p = params;
  p.gate = p.g.data == nullptr ? GateKind::none : GateKind::key;
  return p;
}
Params values_of(const Params& params, const Strided& d_o) {
  Params p = params;
  p.q = d_o;
  p.k = p.v;
  p.g = p.gv;
  p.gate = GateKind::key;
  std::swap(p.key_dim, p.value_dim);
  return p;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

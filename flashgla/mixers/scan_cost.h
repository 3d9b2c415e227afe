// What the operator gated_linear_attention costs, for the mixers that use it.
#pragma once

#include "flashgla/mixers/mixer.h"
#include "flashgla/ops/gated_linear_attention/flops.h"

namespace flashgla::mixers {

// Query heads on states of K x V in f32. A decoded token reads and writes every state.
inline Cost scan_cost(std::int64_t query_heads, std::int64_t states, std::int64_t key_dim, std::int64_t value_dim) {
  const auto heads = static_cast<double>(query_heads);
  const auto k = static_cast<double>(key_dim);
  const auto v = static_cast<double>(value_dim);
  Cost cost;
  cost.forward_flops = heads * ops::gated_linear_attention::forward_flops(k, v);
  cost.training_flops = heads * ops::gated_linear_attention::training_flops(k, v);
  cost.decode_bytes = 2.0 * 4.0 * static_cast<double>(states) * k * v;
  return cost;
}

}  // namespace flashgla::mixers

#include "flashgla/ops/benches.h"

#include "flashgla/ops/gated_linear_attention/bench.h"

namespace flashgla::ops {

const std::vector<Bench>& benches() {
  static const std::vector<Bench> rows = {
      {"gated_linear_attention", gated_linear_attention::bench},
  };
  return rows;
}

}  // namespace flashgla::ops

#include "flashgla/ops/benches.h"

#include "flashgla/ops/gated_linear_attention/bench.h"
#include "flashgla/ops/adamw/bench.h"
#include "flashgla/ops/cross_entropy/bench.h"
#include "flashgla/ops/elementwise/bench.h"
#include "flashgla/ops/embedding/bench.h"
#include "flashgla/ops/global_norm/bench.h"
#include "flashgla/ops/log_sigmoid_gate/bench.h"
#include "flashgla/ops/matmul/bench.h"
#include "flashgla/ops/rms_norm/bench.h"
#include "flashgla/ops/rms_norm_swish_gate/bench.h"
#include "flashgla/ops/short_convolution/bench.h"
#include "flashgla/ops/swiglu/bench.h"

namespace flashgla::ops {

const std::vector<Bench>& benches() {
  static const std::vector<Bench> rows = {
      {"gated_linear_attention", gated_linear_attention::bench},
      {"matmul", matmul::bench},
      {"adamw", adamw::bench},
      {"cross_entropy", cross_entropy::bench},
      {"elementwise", elementwise::bench},
      {"embedding", embedding::bench},
      {"global_norm", global_norm::bench},
      {"log_sigmoid_gate", log_sigmoid_gate::bench},
      {"rms_norm", rms_norm::bench},
      {"rms_norm_swish_gate", rms_norm_swish_gate::bench},
      {"short_convolution", short_convolution::bench},
      {"swiglu", swiglu::bench},
  };
  return rows;
}

}  // namespace flashgla::ops

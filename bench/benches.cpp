#include "bench/benches.h"

// The operators that have a bench, in the order of the table: the one list of them.
#define FLASHGLA_OPERATORS(row)                                                                                        \
  row(gated_linear_attention) row(matmul) row(adamw) row(cross_entropy) row(dropout) row(elementwise) row(embedding)   \
      row(feature_map) row(forget_gate) row(global_norm) row(hyena_filter) row(layer_norm) row(linear_step)            \
          row(long_convolution) row(log_sigmoid_gate) row(quantised_linear) row(rms_norm) row(rms_norm_swish_gate)     \
              row(rotary) row(sampling) row(selective_scan) row(short_convolution) row(softmax) row(softmax_attention) \
                  row(state_space) row(swiglu) row(token_shift) row(wkv)

#define FLASHGLA_DECLARE(name)                      \
  namespace flashgla::ops::name {                   \
  void bench(const testing::BenchOptions& options); \
  }
FLASHGLA_OPERATORS(FLASHGLA_DECLARE)

namespace flashgla::bench {

const std::vector<Bench>& benches() {
#define FLASHGLA_ROW(name) {#name, ops::name::bench},
  static const std::vector<Bench> rows = {FLASHGLA_OPERATORS(FLASHGLA_ROW)  //
                                          {"model_training_step", bench_training_step},
                                          {"model_prefill", bench_prefill},
                                          {"model_decoding", bench_decoding},
                                          {"model_load", bench_load}};
  return rows;
}

}  // namespace flashgla::bench

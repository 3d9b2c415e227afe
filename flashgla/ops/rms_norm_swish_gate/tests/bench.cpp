#include "flashgla/ops/rms_norm_swish_gate/implementations.h"
#include "flashgla/ops/rms_norm_swish_gate/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::rms_norm_swish_gate {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 4, 512}) : Shape({4096, 4, 256});
    const Shape small({9, 130});
    const std::string problem = to_string(shape) + " " + name_of(dtypes.activation);
    benches.push_back(testing::bytes_bound("rms_norm_swish_gate forward", problem, dtypes, forward_case(shape, true),
                                           forward_case(small, true)));
    benches.push_back(testing::bytes_bound("rms_norm_swish_gate backward", problem, dtypes, backward_case(shape, true),
                                           backward_case(small, true)));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::rms_norm_swish_gate

#include "flashgla/ops/forget_gate/implementations.h"
#include "flashgla/ops/forget_gate/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::forget_gate {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 2048}) : Shape({4096, 512});
    const Shape small({9, 130});
    const std::string problem = to_string(shape) + " " + name_of(dtypes.activation);
    benches.push_back(testing::bytes_bound("forget_gate forward", problem, dtypes, forward_case(shape, true, 1.0),
                                           forward_case(small, true, 1.0)));
    benches.push_back(testing::bytes_bound("forget_gate backward", problem, dtypes, backward_case(shape, true, 1.0),
                                           backward_case(small, true, 1.0)));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::forget_gate

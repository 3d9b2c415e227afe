#include "flashgla/ops/layer_norm/implementations.h"
#include "flashgla/ops/layer_norm/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::layer_norm {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 2048}) : Shape({4096, 1024});
    const Shape small({9, 130});
    const std::string problem = to_string(shape) + " " + name_of(dtypes.activation);
    benches.push_back(testing::bytes_bound("layer_norm forward", problem, dtypes, forward_case(shape, true),
                                           forward_case(small, true)));
    benches.push_back(testing::bytes_bound("layer_norm backward", problem, dtypes, backward_case(shape, true),
                                           backward_case(small, true)));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::layer_norm

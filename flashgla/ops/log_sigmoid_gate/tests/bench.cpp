#include "flashgla/ops/log_sigmoid_gate/implementations.h"
#include "flashgla/ops/log_sigmoid_gate/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::log_sigmoid_gate {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 1024}) : Shape({4096, 512});
    const Shape small({9, 130});
    const std::string problem = to_string(shape) + " " + name_of(dtypes.activation);
    benches.push_back(testing::bytes_bound("log_sigmoid_gate forward", problem, dtypes,
                                           forward_case(shape, Kind::accumulator, kNoClamp),
                                           forward_case(small, Kind::accumulator, kNoClamp)));
    benches.push_back(testing::bytes_bound("log_sigmoid_gate backward", problem, dtypes,
                                           backward_case(shape, Kind::accumulator, kNoClamp),
                                           backward_case(small, Kind::accumulator, kNoClamp)));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::log_sigmoid_gate

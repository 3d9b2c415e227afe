#include "flashgla/ops/elementwise/implementations.h"
#include "flashgla/ops/elementwise/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::elementwise {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 2048}) : Shape({4096, 1024});
    const std::string problem = to_string(shape) + " " + name_of(dtypes.activation);
    const std::vector<testing::OperatorCase> timed = cases_of(shape, false);
    const std::vector<testing::OperatorCase> checked = cases_of(Shape({9, 130}), false);
    for (std::size_t i = 0; i < timed.size(); ++i) {
      const std::string name = timed[i].name.substr(0, timed[i].name.rfind(' '));
      benches.push_back(testing::bytes_bound(name, problem, dtypes, timed[i], checked[i]));
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::elementwise

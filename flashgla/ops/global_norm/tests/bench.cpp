#include "flashgla/ops/global_norm/implementations.h"
#include "flashgla/ops/global_norm/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::global_norm {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const bool on_cpu = options.device.kind == Device::Kind::cpu;
    const std::string problem = (on_cpu ? "16M " : "256M ") + std::string(name_of(dtypes.activation));
    const Shape shape({on_cpu ? 16 << 20 : 256 << 20}), small({1001});
    benches.push_back(testing::bytes_bound("sum of squares", problem, dtypes, sum_case(shape), sum_case(small)));
    benches.push_back(
        testing::bytes_bound("non-finite", problem, dtypes, non_finite_case(shape), non_finite_case(small)));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::global_norm

#include "flashgla/ops/swiglu/implementations.h"
#include "flashgla/ops/swiglu/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::swiglu {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape shape({4096, 2816}), small({9, 130});
    const std::string problem = "4096x2816 " + std::string(name_of(dtypes.activation));
    benches.push_back(
        testing::bytes_bound("swiglu forward", problem, dtypes, forward_case(shape), forward_case(small)));
    benches.push_back(
        testing::bytes_bound("swiglu backward", problem, dtypes, backward_case(shape), backward_case(small)));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::swiglu

#include "flashgla/ops/adamw/implementations.h"
#include "flashgla/ops/adamw/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::adamw {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const bool half : {false, true}) {
    const testing::OperatorCase timed = step_case(Shape({4 << 20}), half), checked = step_case(Shape({1001}), half);
    benches.push_back(testing::bytes_bound("adamw step", half ? "4M bf16 with f32 master" : "4M f32",
                                           timed.dtypes.front(), timed, checked));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::adamw

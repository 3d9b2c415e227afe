#include "flashgla/ops/rotary/implementations.h"
#include "flashgla/ops/rotary/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::rotary {

// Queries and keys of transformer-1.3b, of a step of 8 x 2048 tokens on a GPU.
void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({8, 2048, 64, 64}) : Shape({8, 512, 16, 64});
    const std::string problem = to_string(shape) + " " + name_of(dtypes.activation);
    benches.push_back(testing::bytes_bound("rotary", problem, dtypes, one_case(shape, Direction::forward, {}, {}),
                                           one_case(Shape({2, 9, 3, 64}), Direction::forward, {}, {})));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::rotary

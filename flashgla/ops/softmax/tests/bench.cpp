#include "flashgla/base/names.h"
#include "flashgla/ops/softmax/implementations.h"
#include "flashgla/ops/softmax/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::softmax {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    // The slots of GSA's heads: tokens of a 1.3B model's step on a GPU, fewer on a CPU.
    const Shape shape({options.device.kind == Device::Kind::cuda ? 16384 : 2048, 4, 64}), small({9, 2, 40});
    const std::string problem = to_string(shape) + " " + name_of(dtypes.activation);
    for (const bool backward : {false, true}) {
      benches.push_back(testing::bytes_bound(backward ? "softmax backward" : "softmax forward", problem, dtypes,
                                             case_of(shape, backward), case_of(small, backward)));
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::softmax

#include "flashgla/ops/swiglu/implementations.h"
#include "flashgla/ops/swiglu/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::swiglu {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    // On a GPU the tensors of a 1.3B model's step, and on a CPU some that do not stay in its caches.
    const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 5632}) : Shape({4096, 2816});
    const Shape small({9, 130});
    const std::string problem = to_string(shape) + " " + name_of(dtypes.activation);
    benches.push_back(
        testing::bytes_bound("swiglu forward", problem, dtypes, forward_case(shape), forward_case(small)));
    for (const bool again : {false, true}) {
      benches.push_back(testing::bytes_bound(again ? "swiglu backward and forward" : "swiglu backward", problem, dtypes,
                                             backward_case(shape, again), backward_case(small, again)));
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::swiglu

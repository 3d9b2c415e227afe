#include "flashgla/ops/dropout/implementations.h"
#include "flashgla/ops/dropout/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::dropout {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 2048}) : Shape({4096, 1024});
    const Shape small({9, 130});
    for (const bool sum : {false, true}) {
      benches.push_back(testing::bytes_bound(sum ? "dropout with a sum" : "dropout",
                                             to_string(shape) + " " + name_of(dtypes.activation), dtypes,
                                             case_of(shape, 0.1, sum), case_of(small, 0.1, sum)));
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::dropout

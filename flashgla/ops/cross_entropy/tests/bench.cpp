#include "flashgla/ops/cross_entropy/implementations.h"
#include "flashgla/ops/cross_entropy/tests/cases.h"
#include "flashgla/ops/matmul/plans.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::cross_entropy {

void bench(const testing::BenchOptions& options) {
  struct Size {
    std::int64_t rows, length, words;
  };
  std::vector<testing::OperatorBench> benches;
  std::vector<Size> sizes = {{4096, 256, 256}, {1024, 1024, 32000}};
  if (options.device.kind == Device::Kind::cuda) sizes = {{16384, 2048, 32000}, {16384, 384, 65}};
  for (const Size size : sizes) {
    for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
      for (const bool backward : {false, true}) {
        testing::OperatorBench bench;
        bench.operation = backward ? "cross_entropy forward_backward" : "cross_entropy forward";
        bench.problem = std::to_string(size.rows) + " rows of " + std::to_string(size.length) + ", " +
                        std::to_string(size.words) + " words " + name_of(dtypes.activation);
        bench.timed = head_case(size.rows, size.length, size.words, backward, dtypes);
        bench.checked = head_case(20, 33, 300, backward, dtypes);
        bench.prepare = [](Context& context) { matmul::time_plans(context); };
        bench.flops = (backward ? 6.0 : 2.0) * static_cast<double>(size.rows * size.length * size.words);
        benches.push_back(bench);
      }
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::cross_entropy

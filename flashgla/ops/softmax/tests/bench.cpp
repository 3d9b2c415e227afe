#include "flashgla/ops/softmax/implementations.h"
#include "flashgla/ops/softmax/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::softmax {

void bench(const testing::BenchOptions& options) {
  // The slots of GSA's heads: tokens of a 1.3B model's step on a GPU, fewer on a CPU.
  const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 4, 64}) : Shape({2048, 4, 64});
  const std::vector<testing::ShapedOperation> operations = {
      {"softmax forward", [](const Shape& of) { return case_of(of, false); }},
      {"softmax backward", [](const Shape& of) { return case_of(of, true); }}};
  testing::run_benches(testing::bytes_bound(operations, shape, Shape({9, 2, 40})), testing::names_of(implementations()),
                       options);
}

}  // namespace flashgla::ops::softmax

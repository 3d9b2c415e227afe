#include "flashgla/ops/dropout/implementations.h"
#include "flashgla/ops/dropout/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::dropout {

void bench(const testing::BenchOptions& options) {
  const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 2048}) : Shape({4096, 1024});
  const std::vector<testing::ShapedOperation> operations = {
      {"dropout", [](const Shape& of) { return case_of(of, 0.1, false); }},
      {"dropout with a sum", [](const Shape& of) { return case_of(of, 0.1, true); }}};
  testing::run_benches(testing::bytes_bound(operations, shape, Shape({9, 130})), testing::names_of(implementations()),
                       options);
}

}  // namespace flashgla::ops::dropout

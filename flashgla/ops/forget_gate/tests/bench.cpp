#include "flashgla/ops/forget_gate/implementations.h"
#include "flashgla/ops/forget_gate/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::forget_gate {

void bench(const testing::BenchOptions& options) {
  const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 2048}) : Shape({4096, 512});
  const std::vector<testing::ShapedOperation> operations = {
      {"forget_gate forward", [](const Shape& of) { return forward_case(of, true, 1.0); }},
      {"forget_gate backward", [](const Shape& of) { return backward_case(of, true, 1.0); }}};
  testing::run_benches(testing::bytes_bound(operations, shape, Shape({9, 130})), testing::names_of(implementations()),
                       options);
}

}  // namespace flashgla::ops::forget_gate

#include "flashgla/ops/layer_norm/implementations.h"
#include "flashgla/ops/layer_norm/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::layer_norm {

void bench(const testing::BenchOptions& options) {
  const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 2048}) : Shape({4096, 1024});
  const std::vector<testing::ShapedOperation> operations = {
      {"layer_norm forward", [](const Shape& of) { return forward_case(of, true); }},
      {"layer_norm backward", [](const Shape& of) { return backward_case(of, true); }}};
  testing::run_benches(testing::bytes_bound(operations, shape, Shape({9, 130})), testing::names_of(implementations()),
                       options);
}

}  // namespace flashgla::ops::layer_norm

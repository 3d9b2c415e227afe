#include "flashgla/ops/rms_norm_swish_gate/implementations.h"
#include "flashgla/ops/rms_norm_swish_gate/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::rms_norm_swish_gate {

void bench(const testing::BenchOptions& options) {
  const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 4, 512}) : Shape({4096, 4, 256});
  const std::vector<testing::ShapedOperation> operations = {
      {"rms_norm_swish_gate forward", [](const Shape& of) { return forward_case(of, true); }},
      {"rms_norm_swish_gate backward", [](const Shape& of) { return backward_case(of, true); }}};
  testing::run_benches(testing::bytes_bound(operations, shape, Shape({9, 130})), testing::names_of(implementations()),
                       options);
}

}  // namespace flashgla::ops::rms_norm_swish_gate

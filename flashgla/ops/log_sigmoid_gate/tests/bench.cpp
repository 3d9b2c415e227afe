#include "flashgla/ops/log_sigmoid_gate/implementations.h"
#include "flashgla/ops/log_sigmoid_gate/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::log_sigmoid_gate {

void bench(const testing::BenchOptions& options) {
  const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 1024}) : Shape({4096, 512});
  const std::vector<testing::ShapedOperation> operations = {
      {"log_sigmoid_gate forward", [](const Shape& of) { return forward_case(of, Kind::accumulator, kNoClamp); }},
      {"log_sigmoid_gate backward", [](const Shape& of) { return backward_case(of, Kind::accumulator, kNoClamp); }}};
  testing::run_benches(testing::bytes_bound(operations, shape, Shape({9, 130})), testing::names_of(implementations()),
                       options);
}

}  // namespace flashgla::ops::log_sigmoid_gate

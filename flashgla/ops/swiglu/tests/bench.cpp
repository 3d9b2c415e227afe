#include "flashgla/ops/swiglu/implementations.h"
#include "flashgla/ops/swiglu/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::swiglu {

void bench(const testing::BenchOptions& options) {
  // On a GPU the tensors of a 1.3B model's step, and on a CPU some that do not stay in its caches.
  const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 5632}) : Shape({4096, 2816});
  const std::vector<testing::ShapedOperation> operations = {
      {"swiglu forward", [](const Shape& of) { return forward_case(of); }},
      {"swiglu backward", [](const Shape& of) { return backward_case(of, false); }},
      {"swiglu backward and forward", [](const Shape& of) { return backward_case(of, true); }}};
  testing::run_benches(testing::bytes_bound(operations, shape, Shape({9, 130})), testing::names_of(implementations()),
                       options);
}

}  // namespace flashgla::ops::swiglu

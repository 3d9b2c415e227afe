#include "flashgla/ops/hyena_filter/implementations.h"
#include "flashgla/ops/hyena_filter/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::hyena_filter {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape inner({2048, 64}), wide({2048, 1024}), small({33, 70});
    const auto add = [&](const char* operation, const Shape& shape, const auto& of) {
      benches.push_back(testing::bytes_bound(operation, to_string(shape) + " " + name_of(dtypes.activation), dtypes,
                                             of(shape), of(small)));
    };
    add("hyena_filter sine forward", inner, sine_case);
    add("hyena_filter sine backward", inner, sine_backward_case);
    add("hyena_filter window", wide, [](const Shape& shape) { return window_case(shape); });
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::hyena_filter

#include "flashgla/ops/embedding/implementations.h"
#include "flashgla/ops/embedding/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::embedding {

void bench(const testing::BenchOptions& options) {
  const bool on_cpu = options.device.kind == Device::Kind::cpu;
  constexpr std::int64_t kWords = 32000;
  const std::int64_t length = on_cpu ? 1024 : 2048, rows = on_cpu ? 4096 : 16384;
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const Shape shape({rows, length}), small({40, 130});
    const std::string problem =
        std::to_string(rows) + " tokens of 32000, " + std::to_string(length) + " " + name_of(dtypes.activation);
    const auto moved = static_cast<double>(rows * length);
    const auto size = static_cast<double>(size_of(dtypes.activation));
    benches.push_back(testing::bytes_bound("embedding forward", problem, dtypes, forward_case(shape, kWords),
                                           forward_case(small, 11)));
    benches.back().bytes = 2.0 * moved * size;  // of the table only the tokens' rows
    benches.push_back(testing::bytes_bound("embedding backward", problem, dtypes, backward_case(shape, kWords),
                                           backward_case(small, 11)));
    benches.back().bytes = moved * (size + 2.0 * sizeof(float));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::embedding

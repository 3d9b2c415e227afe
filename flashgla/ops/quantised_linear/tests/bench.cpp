#include "flashgla/base/names.h"
#include "flashgla/ops/quantised_linear/implementations.h"
#include "flashgla/ops/quantised_linear/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::quantised_linear {

// The products of a token of gla-340m, and some of a prompt.
void bench(const testing::BenchOptions& options) {
  struct Row {
    std::int64_t rows, in, out;
  };
  const Row rows[] = {{1, 1024, 1024},  {1, 1024, 2048}, {1, 1024, 5632},  {1, 2816, 1024},
                      {1, 1024, 32000}, {4, 1024, 5632}, {16, 1024, 5632}, {512, 1024, 5632}};
  std::vector<testing::OperatorBench> benches;
  for (const Format format : {Format::q8, Format::q4}) {
    for (const Row& row : rows) {
      const testing::DTypePair dtypes{DType::f32, DType::f32};
      testing::OperatorBench one = testing::bytes_bound(
          "quantised_linear",
          std::string(name_of(format)) + " M" + std::to_string(row.rows) + " " + std::to_string(row.in) + " " +
              std::to_string(row.out),
          dtypes, linear_case(format, row.rows, row.in, row.out), linear_case(format, row.rows, 96, 40));
      one.flops = 2.0 * static_cast<double>(row.rows * row.in * row.out);
      benches.push_back(one);
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::quantised_linear

#include "flashgla/ops/matmul/implementations.h"
#include "flashgla/ops/matmul/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::matmul {

namespace {

struct Size {
  std::int64_t m, n, k;
};

testing::OperatorBench product_bench(Size size, Form form, testing::DTypePair dtypes) {
  testing::OperatorBench bench;
  const Kind c_kind = form.a_transposed ? Kind::accumulator : Kind::activation;
  bench.operation = size.m <= 16 ? "matmul, few rows" : "matmul";
  bench.problem = std::to_string(size.m) + "x" + std::to_string(size.n) + "x" + std::to_string(size.k) + " " +
                  (form.a_transposed ? "T" : "N") + (form.b_transposed ? "T " : "N ") + name_of(dtypes.activation);
  if (dtypes.parameter != dtypes.activation) bench.problem += std::string(" x ") + name_of(dtypes.parameter);
  bench.timed = product_case(size.m, size.n, size.k, form, c_kind);
  bench.checked = product_case(std::min<std::int64_t>(size.m, 70), 90, 130, form, c_kind);
  bench.timed.dtypes = bench.checked.dtypes = {dtypes};
  bench.flops = 2.0 * static_cast<double>(size.m * size.n * size.k);
  const auto a_size = static_cast<double>(size_of(dtypes.activation));
  const auto b_bytes = static_cast<double>(size.n * size.k) * static_cast<double>(size_of(dtypes.parameter));
  bench.bytes = static_cast<double>(size.m * size.k + size.m * size.n) * a_size + b_bytes;
  if (size.m <= 16) bench.copies = testing::copies_beyond_cache(b_bytes);  // as in decoding: no weight is still cached
  return bench;
}

}  // namespace

void bench(const testing::BenchOptions& options) {
  constexpr testing::DTypePair kF32{DType::f32, DType::f32}, kBf16{DType::bf16, DType::bf16};
  constexpr testing::DTypePair kMixed{DType::f32, DType::bf16};
  constexpr Form kLinear{false, true, false, false, false}, kToInput{}, kToWeight{true, false, false, true, false};
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : {kF32, kBf16}) {
    for (const Form form : {kToInput, kLinear, kToWeight}) {
      benches.push_back(product_bench({1024, 1024, 1024}, form, dtypes));
    }
  }
  for (const Size size : {Size{4096, 256, 256}, Size{4096, 768, 256}, Size{4096, 256, 768}}) {
    benches.push_back(product_bench(size, kLinear, kF32));
  }
  benches.push_back(product_bench({4096, 256, 256}, kToInput, kF32));
  benches.push_back(product_bench({256, 256, 4096}, kToWeight, kF32));
  for (const Size size : {Size{1, 1024, 1024}, Size{1, 2816, 1024}, Size{1, 1024, 2816}, Size{1, 32000, 1024}}) {
    benches.push_back(product_bench(size, kLinear, kMixed));
  }
  benches.push_back(product_bench({1, 2816, 1024}, kLinear, kF32));
  for (const std::int64_t m : {2, 4, 8, 16}) benches.push_back(product_bench({m, 2816, 1024}, kLinear, kMixed));
  if (options.sweep) {
    for (const std::int64_t size : {256, 512, 2048, 4096}) {
      for (const testing::DTypePair dtypes : {kF32, kBf16}) {
        for (const Form form : {kToInput, kLinear, kToWeight}) {
          benches.push_back(product_bench({size, size, size}, form, dtypes));
        }
      }
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::matmul

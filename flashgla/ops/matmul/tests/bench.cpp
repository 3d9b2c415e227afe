#include <algorithm>
#include <iterator>
#include <map>

#include "flashgla/ops/matmul/implementations.h"
#include "flashgla/ops/matmul/plans.h"
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
  if (form.addend) bench.problem += " + residual";
  bench.timed = product_case(size.m, size.n, size.k, form, c_kind);
  bench.checked = product_case(std::min<std::int64_t>(size.m, 70), 90, 130, form, c_kind);
  bench.timed.dtypes = bench.checked.dtypes = {dtypes};
  bench.prepare = [](Context& context) { time_plans(context); };
  bench.flops = 2.0 * static_cast<double>(size.m * size.n * size.k);
  const auto a_size = static_cast<double>(size_of(dtypes.activation));
  const auto b_bytes = static_cast<double>(size.n * size.k) * static_cast<double>(size_of(dtypes.parameter));
  const double c_size = form.accumulate ? 2.0 * sizeof(float) : form.addend ? 2.0 * a_size : a_size;
  bench.bytes = static_cast<double>(size.m * size.k) * a_size + static_cast<double>(size.m * size.n) * c_size + b_bytes;
  if (size.m <= 16) bench.copies = testing::copies_beyond_cache(b_bytes);  // as in decoding: no weight is still cached
  return bench;
}

constexpr testing::DTypePair kF32{DType::f32, DType::f32}, kBf16{DType::bf16, DType::bf16};
constexpr testing::DTypePair kMixed{DType::f32, DType::bf16};
constexpr Form kLinear{false, true, false, false, false}, kToInput{}, kToWeight{true, false, false, true, false};
constexpr Form kToStream{false, true, false, false, false, true};  // of what adds to the residual stream

// A weight [out,in] of the 1.3B model (d 2048, MLP 5632, vocabulary 32,000), and how many layers have one.
struct Weight {
  std::int64_t out, in, count;
};
// q, k, v, g and the gate's low rank in one; o; gate and up; down; head.
constexpr Weight kWeights[] = {
    {6160, 2048, 24}, {2048, 2048, 24}, {11264, 2048, 24}, {2048, 5632, 24}, {32000, 2048, 1}};

// The 15 products of a training step of 16,384 tokens, and a row that adds them up as often as the step has them.
void bench_training_step(const testing::BenchOptions& options) {
  constexpr std::int64_t kTokens = 16384;
  const std::string problem = "1.3B, 16384 tokens, bf16";
  std::map<std::string, testing::BenchRow> sums;  // by implementation
  std::map<std::string, int> counted;
  for (const Weight& weight : kWeights) {
    for (const auto& [size, form] : {std::pair{Size{kTokens, weight.out, weight.in}, kLinear},
                                     std::pair{Size{kTokens, weight.in, weight.out}, kToInput},
                                     std::pair{Size{weight.out, weight.in, kTokens}, kToWeight}}) {
      testing::BenchOptions each = options;
      each.report = [&](const testing::BenchRow& row) {
        options.report(row);
        if (!row.refused.empty()) return;
        testing::BenchRow& sum = sums[row.implementation];
        const auto count = static_cast<double>(weight.count);
        sum.milliseconds += count * row.milliseconds;
        sum.flops += count * row.flops;
        sum.error = std::max(sum.error, row.error);
        ++counted[row.implementation];
      };
      testing::run_benches({product_bench(size, form, kBf16)}, {"cublaslt"}, each);
    }
  }
  for (auto& [implementation, sum] : sums) {
    if (counted[implementation] != 3 * static_cast<int>(std::size(kWeights))) continue;
    sum.operation = "matmul, all of a training step";
    sum.problem = problem;
    sum.implementation = implementation;
    options.report(sum);
  }
}

// What ends a part of a block, beside the same products of that step: o, down, and an output of twice the width.
void bench_sums(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const std::int64_t in : {2048, 4096, 5632}) {
    for (const Form form : {kLinear, kToStream}) benches.push_back(product_bench({16384, 2048, in}, form, kBf16));
  }
  testing::run_benches(benches, {"cublaslt"}, options);
}

// Decoding with the same weights.
void bench_decoding(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const Weight& weight : kWeights) {
    for (const testing::DTypePair dtypes : {kMixed, kBf16}) {
      benches.push_back(product_bench({1, weight.out, weight.in}, kLinear, dtypes));
    }
  }
  for (const std::int64_t m : {2, 4, 8, 16}) {
    for (const testing::DTypePair dtypes : {kMixed, kBf16}) {
      benches.push_back(product_bench({m, 11264, 2048}, kLinear, dtypes));
    }
  }
  testing::run_benches(benches, {"cuda_few_rows", "cublaslt", "cublaslt_in_parts"}, options);
}

}  // namespace

void bench(const testing::BenchOptions& options) {
  if (options.device.kind == Device::Kind::cuda) {
    bench_training_step(options);
    bench_sums(options);
    bench_decoding(options);
  }
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : {kF32, kBf16}) {
    for (const Form form : {kToInput, kLinear, kToWeight}) {
      benches.push_back(product_bench({1024, 1024, 1024}, form, dtypes));
    }
  }
  for (const Size size : {Size{4096, 256, 256}, Size{4096, 768, 256}, Size{4096, 256, 768}}) {
    benches.push_back(product_bench(size, kLinear, kF32));
  }
  for (const Size size : {Size{512, 5632, 1024}, Size{512, 1024, 2816}, Size{32, 1024, 1024}, Size{512, 32, 1024}}) {
    for (const testing::DTypePair dtypes : {kF32, kMixed}) benches.push_back(product_bench(size, kLinear, dtypes));
  }
  benches.push_back(product_bench({4096, 256, 256}, kToInput, kF32));
  benches.push_back(product_bench({256, 256, 4096}, kToWeight, kF32));
  for (const Size size : {Size{1, 1024, 1024}, Size{1, 2816, 1024}, Size{1, 1024, 2816}, Size{1, 32000, 1024}}) {
    benches.push_back(product_bench(size, kLinear, kMixed));
  }
  benches.push_back(product_bench({1, 2816, 1024}, kLinear, kF32));
  for (const std::int64_t m : {2, 4, 8, 16}) benches.push_back(product_bench({m, 2816, 1024}, kLinear, kMixed));
  if (options.device.kind == Device::Kind::cuda && !options.sweep) benches.clear();  // sizes of a CPU's
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

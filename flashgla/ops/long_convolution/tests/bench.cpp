#include "flashgla/ops/long_convolution/implementations.h"
#include "flashgla/ops/long_convolution/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::long_convolution {

namespace {

// Bytes that forward and backward read each: x, the filter and the skip.
double read_again(const Form& form, testing::DTypePair dtypes) {
  return static_cast<double>(form.wide().numel()) * static_cast<double>(size_of(dtypes.activation)) +
         static_cast<double>(form.filter().numel()) * sizeof(float) +
         static_cast<double>(form.channels) * static_cast<double>(size_of(dtypes.parameter));
}

}  // namespace

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  const bool gpu = options.device.kind == Device::Kind::cuda;
  struct Row {
    Form form, small;  // the latter by the same kernels, with a reference
  };
  const std::vector<Row> rows = gpu ? std::vector<Row>{{{8, 2048, 1024}, {2, 608, 48}},
                                                       {{8, 4096, 1024}, {3, 2528, 16}},
                                                       {{4, 8192, 1024}, {2, 4200, 8}},
                                                       {{2, 16384, 1024}, {2, 8300, 2}},
                                                       {{1, 32768, 1024}, {1, 16400, 1}}}
                                    : std::vector<Row>{{{1, 2048, 256}, {2, 608, 48}}};
  for (const auto& [form, small] : rows) {
    for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
      const std::string problem = name_of_form("B T D", form) + " " + name_of(dtypes.activation);
      benches.push_back(
          testing::bytes_bound("long_convolution forward", problem, dtypes, forward_case(form), forward_case(small)));
      benches.push_back(testing::bytes_bound("long_convolution backward", problem, dtypes, backward_case(form, dtypes),
                                             backward_case(small, dtypes)));
      if (!gpu) continue;  // nothing is kept
      testing::OperatorBench both =
          testing::bytes_bound("long_convolution forward and backward", problem, dtypes,
                               backward_case(form, dtypes, true), backward_case(small, dtypes, true));
      both.bytes += read_again(form, dtypes);
      benches.push_back(both);
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::long_convolution

#include "flashgla/ops/short_convolution/implementations.h"
#include "flashgla/ops/short_convolution/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::short_convolution {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    for (const bool bias : {false, true}) {
      Form form{options.device.kind == Device::Kind::cuda ? Shape({8, 2048, 2048}) : Shape({8, 512, 1024})};
      Form small{Shape({2, 9, 136})};  // whole vectors, as the large one has
      form.bias = small.bias = bias;
      const std::string problem =
          to_string(form.shape) + ", width 4, silu" + (bias ? ", bias " : " ") + name_of(dtypes.activation);
      benches.push_back(
          testing::bytes_bound("short_convolution forward", problem, dtypes, forward_case(form), forward_case(small)));
      benches.push_back(testing::bytes_bound("short_convolution backward", problem, dtypes, backward_case(form),
                                             backward_case(small)));
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::short_convolution

#include "flashgla/ops/long_convolution/implementations.h"
#include "flashgla/ops/long_convolution/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::long_convolution {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  const bool gpu = options.device.kind == Device::Kind::cuda;
  const std::vector<Form> forms =
      gpu ? std::vector<Form>{{8, 2048, 1024}, {1, 32768, 1024}} : std::vector<Form>{{1, 2048, 256}};
  for (const Form& form : forms) {
    const Form small = form.length > 2048 ? Form{1, 2500, 6} : Form{2, 608, 48};  // by the same kernels
    for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
      const std::string problem = name_of_form("B T D", form) + " " + name_of(dtypes.activation);
      benches.push_back(
          testing::bytes_bound("long_convolution forward", problem, dtypes, forward_case(form), forward_case(small)));
      benches.push_back(testing::bytes_bound("long_convolution backward", problem, dtypes, backward_case(form, dtypes),
                                             backward_case(small, dtypes)));
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::long_convolution

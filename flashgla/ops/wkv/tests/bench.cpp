#include "flashgla/ops/wkv/implementations.h"
#include "flashgla/ops/wkv/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::wkv {

namespace {

// `each` of a channel and token (README).
double over(const Form& form, double each) {
  return each * static_cast<double>(form.batch * form.length * form.channels);
}

}  // namespace

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  const bool gpu = options.device.kind == Device::Kind::cuda;
  const std::vector<Form> forms = gpu ? std::vector<Form>{{8, 2048, 2048, {}, false}, {1, 32768, 2048, {}, false}}
                                      : std::vector<Form>{{1, 2048, 1024, {}, false}};
  for (const Form& form : forms) {
    for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
      const Form small = gpu ? Form{32, 130, 128, {}, false} : Form{2, 33, 136, {}, false};  // by the same kernels
      const std::string problem = name_of_form("B T E", form) + " " + name_of(dtypes.activation);
      testing::OperatorBench forward =
          testing::bytes_bound("wkv forward", problem, dtypes, forward_case(form), forward_case(small));
      forward.flops = over(form, 18.0);
      testing::OperatorBench both =
          testing::bytes_bound("wkv forward and backward", problem, dtypes, backward_case(form), backward_case(small));
      both.flops = over(form, 70.0);
      both.bytes += over(form, 3.0 * static_cast<double>(size_of(dtypes.activation)));  // k, v, r: by each of the two
      benches.push_back(forward);
      benches.push_back(both);
    }
  }
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    benches.push_back(testing::bytes_bound("wkv step", "N1 E2048 " + std::string(name_of(dtypes.activation)), dtypes,
                                           step_case(1, 2048), step_case(2, 40)));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::wkv

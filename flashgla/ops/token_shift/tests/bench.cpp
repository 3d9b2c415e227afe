#include "flashgla/ops/token_shift/implementations.h"
#include "flashgla/ops/token_shift/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::token_shift {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    const bool gpu = options.device.kind == Device::Kind::cuda;
    const Form form{gpu ? 8 : 1, 2048, gpu ? 2048 : 1024, 3, {}, false}, small{2, 33, 136, 3, {}, false};
    const std::string problem = name_of_form("", form) + " " + name_of(dtypes.activation);
    benches.push_back(
        testing::bytes_bound("token_shift forward", problem, dtypes, forward_case(form), forward_case(small)));
    benches.push_back(
        testing::bytes_bound("token_shift backward", problem, dtypes, backward_case(form), backward_case(small)));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::token_shift

#include "flashgla/ops/selective_scan/implementations.h"
#include "flashgla/ops/selective_scan/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::selective_scan {

namespace {

// Multiply-adds and exponentials of a state and token: forward 6 and 1; backward as many again and 16 (README).
double flops_of(const Form& form, double each) { return each * static_cast<double>(form.wide().numel() * form.states); }

}  // namespace

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    // Of Mamba 1.3B on a GPU; on a CPU of an eighth of its width.
    const bool gpu = options.device.kind == Device::Kind::cuda;
    const std::int64_t channels = gpu ? 4096 : 512;
    const Form small{2, 33, 136, 16, {}, false};
    for (const std::int64_t batch : gpu ? std::vector<std::int64_t>{8, 1} : std::vector<std::int64_t>{1}) {
      const Form form{batch, 2048, channels, 16, {}, false};
      const std::string problem = name_of_form("B T E", form) + " " + name_of(dtypes.activation);
      testing::OperatorBench forward =
          testing::bytes_bound("selective_scan forward", problem, dtypes, forward_case(form), forward_case(small));
      testing::OperatorBench both = testing::bytes_bound("selective_scan forward and backward", problem, dtypes,
                                                         backward_case(form), backward_case(small));
      // In each direction a decay of each state and token, and softplus's and the gate's of each channel.
      forward.flops = flops_of(form, 7.0);
      both.flops = flops_of(form, 30.0);
      forward.exponentials = static_cast<double>(form.wide().numel() * (form.states + 2));
      both.exponentials = 2.0 * forward.exponentials;
      benches.push_back(forward);
      benches.push_back(both);
    }
    benches.push_back(testing::bytes_bound("selective_scan step",
                                           "N1 E" + std::to_string(channels) + " K16 " + name_of(dtypes.activation),
                                           dtypes, step_case(1, channels, 16), step_case(2, 40, 16)));
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::selective_scan

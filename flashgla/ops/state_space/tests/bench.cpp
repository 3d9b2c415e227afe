#include "flashgla/ops/state_space/implementations.h"
#include "flashgla/ops/state_space/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::state_space {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    // Of Mamba-2 1.3B on a GPU; on a CPU of a fourth of its width.
    const bool gpu = options.device.kind == Device::Kind::cuda;
    const Form form{gpu ? 16384 : 2048, gpu ? 64 : 16, 64, 1, 128}, small{5, 2, 20, 1, 12};
    const std::string problem =
        std::to_string(form.rows) + " tokens, " + std::to_string(form.heads) + " heads " + name_of(dtypes.activation);
    benches.push_back(
        testing::bytes_bound("state_space forward", problem, dtypes, forward_case(form), forward_case(small)));
    benches.push_back(testing::bytes_bound("state_space backward", problem, dtypes,
                                           backward_case(form, dtypes.activation, true),
                                           backward_case(small, dtypes.activation, true)));
    const ConvolvedForm behind{form, gpu ? 8 : 1}, small_behind{small};
    benches.push_back(testing::bytes_bound("state_space convolved", problem, dtypes, convolved_forward_case(behind),
                                           convolved_forward_case(small_behind)));
    benches.push_back(testing::bytes_bound("state_space convolved backward", problem, dtypes,
                                           convolved_backward_case(behind, dtypes.activation),
                                           convolved_backward_case(small_behind, dtypes.activation)));
    for (const bool backward : {false, true}) {
      benches.push_back(testing::bytes_bound(backward ? "state_space gate, norm backward" : "state_space gate, norm",
                                             problem, dtypes, gate_case(form, backward, dtypes.activation),
                                             gate_case(small, backward, dtypes.activation)));
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::state_space

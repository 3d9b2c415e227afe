// Packed sequences whose longest is not told: a call goes one of two ways, and the kernels of the other one end at
// once.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/ops/gated_linear_attention/tests/test_support.h"

namespace flashgla::ops::gated_linear_attention {
namespace {

// Calls alike but for the lengths, by turns in one workspace and without a wait between: each finds what it has alone,
// whichever way the calls around it go.
TEST(Cuda, TwoWaysByTurns) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  constexpr int kTimes = 200;
  std::vector<std::int64_t> alike(40, 100), skewed(40, 25);
  skewed[17] = 3025;
  for (const auto& [key_dim, value_dim] : {std::pair{64, 64}, {128, 256}}) {
    for (const GateKind gate : {GateKind::none, GateKind::scalar, GateKind::key}) {
      for (const bool states : {false, true}) {
        SCOPED_TRACE(std::string(name_of(gate)) + " gate, " + std::to_string(key_dim) + " channels, states " +
                     std::to_string(states));
        std::vector<CaseData> calls;
        for (const auto& lengths : {alike, skewed}) {
          calls.push_back(on_device(make_data({.query_heads = 2,
                                               .heads = 2,
                                               .key_dim = key_dim,
                                               .value_dim = value_dim,
                                               .gate = gate,
                                               .dtype = DType::bf16,
                                               .gate_dtype = DType::bf16,
                                               .lengths = lengths,
                                               .states = states}),
                                    Device::cuda(0)));
        }
        for_each_implementation(describe(calls[0].in, calls[0].options), [&](Device device, const Implementation& row) {
          if (device.kind != Device::Kind::cuda) return;
          Context context(device);
          context.force_implementation(row.name);
          std::vector<Results> results, alone;
          const auto call = [&](std::size_t i) {
            const CaseData& data = calls[i];
            Outputs without_states = results[i].out;
            without_states.states = {};
            forward(context, data.in, without_states, data.options);
            forward(context, data.in, results[i].out, data.options);
            backward(context, data.in, results[i].out, data.d_out, results[i].d_in, data.options);
          };
          for (std::size_t i = 0; i < calls.size(); ++i) {
            results.push_back(
                make_results(calls[i], states, row.states_bytes(describe(calls[i].in, calls[i].options))));
            call(i);
            alone.push_back(on_cpu(results[i]));
          }
          for (int i = 0; i < kTimes; ++i) {
            for (std::size_t j = 0; j < calls.size(); ++j) call(j);
          }
          for (std::size_t i = 0; i < calls.size(); ++i) {
            const Results by_turns = on_cpu(results[i]);
            expect_same_bits(outputs_of(by_turns), outputs_of(alone[i]));
            expect_same_bits(gradients_of(by_turns), gradients_of(alone[i]));
          }
        });
      }
    }
  }
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention

#include "flashgla/ops/softmax_attention/implementations.h"
#include "flashgla/ops/softmax_attention/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::softmax_attention {

namespace {

double bytes_of(const testing::OperatorCase& of, testing::DTypePair dtypes) {
  double bytes = 0.0;
  for (const testing::Argument& argument : of.arguments) {
    bytes +=
        static_cast<double>(argument.shape.numel()) * static_cast<double>(size_of(testing::dtype_of(argument, dtypes)));
  }
  return bytes;
}

void add(std::vector<testing::OperatorBench>& benches, const Form& form, testing::DTypePair dtypes) {
  Form small = form;
  small.q = Shape({1, 150, form.q[2] / form.groups, form.q[3]});
  small.groups = 1;
  if (small.window > 0) small.window = 40;
  const std::string problem = "B" + std::to_string(form.q[0]) + " T" + std::to_string(form.q[1]) + " H" +
                              std::to_string(form.q[2]) + " G" + std::to_string(form.groups) + " K" +
                              std::to_string(form.q[3]) +
                              (form.window > 0 ? " W" + std::to_string(form.window) : std::string()) + " " +
                              name_of(dtypes.activation) + (form.dropout > 0.0 ? " dropout" : "");
  const double rows = static_cast<double>(form.q[0] * form.q[1] * form.q[2]);
  const auto width = static_cast<double>(form.q[3]), length = static_cast<double>(form.q[1]);
  const auto window = static_cast<double>(form.window);
  for (const bool training : {false, true}) {
    testing::OperatorBench bench;
    bench.operation = training ? "softmax_attention fwd+bwd" : "softmax_attention forward";
    bench.problem = problem;
    bench.timed = training ? backward_case(form) : forward_case(form);
    bench.checked = training ? backward_case(small) : forward_case(small);
    bench.timed.dtypes = bench.checked.dtypes = {dtypes};
    bench.flops =
        rows * (training ? training_flops(width, width, length, window) : forward_flops(width, width, length, window));
    bench.bytes = bytes_of(bench.timed, dtypes);
    benches.push_back(bench);
  }
}

}  // namespace

// The paper's heads (1.3B: 32 of 64 channels) in a step of 16384 tokens, wider and narrower ones, shared keys, a
// window, dropout; decoding.
void bench(const testing::BenchOptions& options) {
  const bool cuda = options.device.kind == Device::Kind::cuda;
  const testing::DTypePair bf16{DType::bf16, DType::bf16}, f32{DType::f32, DType::f32};
  std::vector<testing::OperatorBench> benches;
  if (cuda) {
    for (const std::int64_t length : {2048, 4096, 16384}) {
      add(benches, {Shape({16384 / length, length, 32, 64}), 32}, bf16);
      add(benches, {Shape({16384 / length, length, 16, 128}), 16}, bf16);
    }
    add(benches, {Shape({2, 8192, 32, 128}), 8}, bf16);
    add(benches, {Shape({1, 16384, 32, 64}), 32, 0, 1024}, bf16);
    add(benches, {Shape({8, 2048, 64, 32}), 64}, bf16);
    Form dropped{Shape({8, 2048, 32, 64}), 32};
    dropped.dropout = 0.1;
    add(benches, dropped, bf16);
  } else {
    add(benches, {Shape({8, 512, 4, 64}), 4}, f32);
    add(benches, {Shape({1, 2048, 4, 64}), 4}, f32);
  }
  // Not the general kernels on problems that the others take: seconds a call.
  std::vector<std::string> names = testing::names_of(implementations());
  if (cuda) std::erase(names, "cuda_general");
  testing::run_benches(benches, names, options);
  benches.clear();
  if (cuda) add(benches, {Shape({1, 512, 4, 64}), 4}, f32);
  for (const std::int64_t batch : {1, 16}) {
    const std::vector<std::int32_t> positions(static_cast<std::size_t>(batch), 2047);
    const Form form{Shape({batch, 1, 32, 64}), 32, 0, 0, {}, positions, 2048};
    const Form small{Shape({1, 1, 2, 64}), 2, 0, 0, {}, {99}, 100};
    testing::OperatorBench bench =
        testing::bytes_bound("softmax_attention step", "N" + std::to_string(batch) + " H32 K64, 2048 tokens, bf16",
                             bf16, step_case(form), step_case(small));
    bench.flops = static_cast<double>(batch) * 32.0 * 4.0 * 64.0 * 2048.0;
    benches.push_back(bench);
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::softmax_attention

#include "flashgla/ops/gated_linear_attention/tests/test_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "flashgla/base/error.h"
#include "flashgla/base/names.h"
#include "testing/compare.h"

namespace flashgla::ops::gated_linear_attention {

using testing::check_close;
using testing::same_bits;

void run_planned(Device device, const char* implementation, const std::function<void(Context&)>& call, int threads) {
  Context context(device, threads);
  context.force_implementation(implementation);
  Arena& scratch = context.scratch();
  scratch.begin_planning();
  call(context);
  const std::size_t bytes = scratch.peak();
  scratch.commit_plan();
  if (bytes > 0) {
    ArenaScope scope(scratch);
    fill_with_nan(scratch.allocate(bytes), bytes, device);
  }
  call(context);
}

std::size_t states_bytes_of(Device device, const char* implementation, const Problem& problem) {
  Context context(device);
  context.force_implementation(implementation);
  return states_bytes(context, problem);
}

void expect_all_close(const std::vector<NamedView>& actual, const std::vector<NamedView>& expected, DType dtype) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_STREQ(actual[i].name, expected[i].name);
    EXPECT_EQ(check_close(actual[i].name, actual[i].view, expected[i].view, tolerance(dtype, actual[i].gradient)), "");
  }
}

void expect_same_bits(const std::vector<NamedView>& actual, const std::vector<NamedView>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i].view, expected[i].view)) << actual[i].name;
  }
}

void for_each_implementation(const Problem& problem, const std::function<void(Device, const Implementation&)>& visit) {
  for (const Device device : test_devices()) {
    const Context context(device);
    for (const Implementation& row : implementations()) {
      if (row.device != device.kind || !row.supports(problem, context.architecture())) continue;
      SCOPED_TRACE(std::string(row.name) + " on " + name_of(device));
      visit(device, row);
    }
  }
}

Results run(Device device, const char* implementation, const CaseData& host, bool final_state, bool keep_states,
            bool gradients, int threads) {
  const CaseData data = device.kind == Device::Kind::cpu ? host : on_device(host, device);
  const Problem problem = describe(data.in, data.options);
  Results results = make_results(data, final_state, keep_states ? states_bytes_of(device, implementation, problem) : 0);
  run_planned(
      device, implementation, [&](Context& c) { forward(c, data.in, results.out, data.options); }, threads);
  if (gradients) {
    run_planned(
        device, implementation,
        [&](Context& c) { backward(c, data.in, results.out, data.d_out, results.d_in, data.options); }, threads);
  }
  return on_cpu(results);
}

void expect_reference_results(const CaseData& host, bool final_state, const std::vector<std::string>& left_out) {
  const Problem problem = describe(host.in, host.options);
  const Results expected = reference_results(host, final_state, true);
  const auto wanted = [&](std::vector<NamedView> views) {
    std::erase_if(views, [&](const NamedView& v) { return std::ranges::find(left_out, v.name) != left_out.end(); });
    return views;
  };
  for_each_implementation(problem, [&](Device device, const Implementation& row) {
    for (const bool keep : {false, true}) {
      if (keep && row.states_bytes(problem) == 0) continue;
      SCOPED_TRACE(keep ? "states kept" : "no states");
      const Results actual = run(device, row.name, host, final_state, keep, true);
      expect_all_close(wanted(outputs_of(actual)), wanted(outputs_of(expected)), problem.dtype);
      expect_all_close(wanted(gradients_of(actual)), wanted(gradients_of(expected)), problem.dtype);
    }
  });
}

std::vector<Case> law_cases(DType dtype) {
  std::vector<Case> cases;
  for (const GateKind gate :
       {GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key, GateKind::key_value}) {
    for (const GateValues values : {GateValues::trained, GateValues::extreme}) {
      cases.push_back({.name = std::string(name_of(gate)) + (values == GateValues::trained ? " trained" : " extreme"),
                       .batch = 2,
                       .length = 70,
                       .query_heads = 4,
                       .heads = 2,
                       .key_dim = 20,
                       .value_dim = 24,
                       .gate = gate,
                       .gate_values = values,
                       .dtype = dtype});
    }
  }
  cases.push_back({.name = "normalized",
                   .batch = 2,
                   .length = 70,
                   .query_heads = 4,
                   .heads = 2,
                   .key_dim = 20,
                   .value_dim = 24,
                   .gate = GateKind::none,
                   .dtype = dtype,
                   .feature_map = FeatureMap::elu_plus_one,
                   .normalize = true});
  return cases;
}

StepData slice_token(const Inputs& in, const TensorView& o, std::int64_t t) {
  StepData step;
  step.in = {.q = in.q.select(1, t), .k = in.k.select(1, t), .v = in.v.select(1, t)};
  if (in.g) step.in.g = in.g.rank() == 1 ? in.g : in.g.select(1, t);
  if (in.gv) step.in.gv = in.gv.select(1, t);
  step.o = o.select(1, t);
  return step;
}

void PrintTo(const Case& c, std::ostream* out) { *out << describe_case(c); }

}  // namespace flashgla::ops::gated_linear_attention

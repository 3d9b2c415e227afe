#include "flashgla/ops/gated_linear_attention/tests/test_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <utility>

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

namespace {
struct Sizes {
  double norm = 0.0, largest = 0.0;
  explicit Sizes(const TensorView& view) {
    const Tensor values = testing::converted(view, DType::f64);
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      const double x = std::abs(values->as<double>()[i]);
      norm = std::hypot(norm, x);
      largest = std::max(largest, x);
    }
  }
};

// check_close, in proportion to the terms where these are larger than their sums.
std::string check_close_to_terms(const NamedView& actual, const TensorView& expected, const TensorView& terms,
                                 const TensorView& closed_form, DType dtype) {
  constexpr double kLargestFactor = 8.0;
  const testing::Difference d = testing::difference(actual.view, expected);
  const Sizes result(expected), of_terms(terms);
  const double relative = tolerance(dtype, actual.gradient), of_f32 = tolerance(DType::f32, true);
  double norm = relative * std::max(result.norm, of_terms.norm),
         largest = relative * kLargestFactor * std::max(result.largest, of_terms.largest);
  if (closed_form && dtype != DType::f64) {
    const Sizes cancelling(closed_form);
    norm += of_f32 * cancelling.norm;
    largest += of_f32 * kLargestFactor * cancelling.largest;
  }
  // What f32 flushes to zero.
  constexpr double kSmallest = 1.2e-38;
  norm += kSmallest * std::sqrt(static_cast<double>(expected.numel()));
  largest += kSmallest;
  const double error = d.relative * (result.norm > 0.0 ? result.norm : 1.0);
  if (d.finite && error <= norm && d.largest <= largest) return "";
  std::ostringstream text;
  text << actual.name << ": error " << error << ", largest " << d.largest << "; norm " << result.norm << ", largest "
       << result.largest << ", terms' root sum of squares " << of_terms.norm << ", largest " << of_terms.largest
       << "; allowed " << norm << ", largest " << largest;
  return text.str();
}
}  // namespace

ExpectedResults::ExpectedResults(const CaseData& host, bool final_state)
    : host_(host),
      final_state_(final_state),
      problem_(describe(host.in, host.options)),
      values_(reference_results(host, final_state, true)) {}

void ExpectedResults::expect_close(const Results& actual) {
  const auto compare = [&](auto list_of) {
    const std::vector<NamedView> views = list_of(actual), expected = list_of(values_);
    ASSERT_EQ(views.size(), expected.size());
    for (std::size_t i = 0; i < views.size(); ++i) {
      ASSERT_STREQ(views[i].name, expected[i].name);
      const double relative = tolerance(problem_.dtype, views[i].gradient);
      std::string wrong = check_close(views[i].name, views[i].view, expected[i].view, relative);
      if (!wrong.empty() && !problem_.normalize) {
        if (!sizes_) sizes_ = term_sizes(host_, final_state_);
        const TensorView& closed_form = views[i].name == std::string("dg")    ? sizes_->closed_form.d_in.dg
                                        : views[i].name == std::string("dgv") ? sizes_->closed_form.d_in.dgv
                                                                              : TensorView();
        wrong = check_close_to_terms(views[i], expected[i].view, list_of(sizes_->terms)[i].view, closed_form,
                                     problem_.dtype);
      }
      EXPECT_EQ(wrong, "");
    }
  };
  compare(outputs_of);
  compare(gradients_of);
}

void expect_reference_results(const CaseData& host, bool final_state) {
  const Problem problem = describe(host.in, host.options);
  ExpectedResults expected(host, final_state);
  // The reference itself, in the case's dtype: of large problems it only takes time, since small ones take all its
  // ways.
  constexpr std::int64_t kLarge = 1 << 20;
  const bool large = problem.batch * problem.length * problem.heads * problem.key_dim * problem.value_dim > kLarge;
  for_each_implementation(problem, [&](Device device, const Implementation& row) {
    if (large && std::string_view(row.name) == "reference") return;
    for (const bool keep : {false, true}) {
      if (keep && row.states_bytes(problem) == 0) continue;
      SCOPED_TRACE(keep ? "states kept" : "no states");
      expected.expect_close(run(device, row.name, host, final_state, keep, true));
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

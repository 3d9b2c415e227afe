// What the operator's tests share: calls in exactly the planned workspace, comparisons, the walk over the table.
#pragma once

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "flashgla/ops/gated_linear_attention/implementations.h"
#include "flashgla/ops/gated_linear_attention/tests/cases.h"
#include "testing/devices.h"

namespace flashgla::ops::gated_linear_attention {

using testing::test_devices;

// Runs the call with the implementation of that name in exactly the workspace that a dry run planned, filled with NaN.
void run_planned(Device device, const char* implementation, const std::function<void(Context&)>& call, int threads = 2);

std::size_t states_bytes_of(Device device, const char* implementation, const Problem& problem);

void expect_all_close(const std::vector<NamedView>& actual, const std::vector<NamedView>& expected, DType dtype);
void expect_same_bits(const std::vector<NamedView>& actual, const std::vector<NamedView>& expected);

// Calls visit(device, implementation) for the rows that support the problem.
void for_each_implementation(const Problem& problem, const std::function<void(Device, const Implementation&)>& visit);

// Forward and, if wanted, backward of the case's data on the device; results on the CPU.
Results run(Device device, const char* implementation, const CaseData& host, bool final_state, bool keep_states,
            bool gradients, int threads = 2);

// What the reference answers to a case's data, which has to live as long, and what is close enough to it: tolerance().
class ExpectedResults {
 public:
  ExpectedResults(const CaseData& host, bool final_state);
  // Of a run of the case on any device, results on the CPU.
  void expect_close(const Results& actual);

 private:
  const CaseData& host_;
  bool final_state_;
  Problem problem_;
  Results values_;
  std::optional<TermSizes> sizes_;  // once something has needed them
};

// Expects of every row that supports the problem, with states kept where it keeps any and recomputed, what the
// reference answers.
void expect_reference_results(const CaseData& host, bool final_state);

// One small case per gate kind and gate values, and one with the normaliser: what laws between calls are tested on.
std::vector<Case> law_cases(DType dtype);

// Token t of every sequence: what a step is given, and where its output goes.
struct StepData {
  StepInputs in;
  TensorView o;
};
StepData slice_token(const Inputs& in, const TensorView& o, std::int64_t t);

// Failing cases are named by their problem.
void PrintTo(const Case& c, std::ostream* out);

}  // namespace flashgla::ops::gated_linear_attention

// What forward and backward launch is what their plan says: by a runtime that only writes launches down, so without a
// GPU. On a GPU cuda_test.cpp has the plans themselves compared.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "flashgla/ops/gated_linear_attention/cuda/tests/cuda_paths.h"
#include "flashgla/ops/gated_linear_attention/cuda/tests/path_plans.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"
#include "testing/cuda/recording_runtime.h"

namespace flashgla::ops::gated_linear_attention {
namespace {

// The kernel that no other form of the direction launches.
std::string kernel_of(const cuda::Plan& plan) {
  switch (plan.forward) {
    case cuda::ForwardForm::tokens:
      return "recurrent_kernel";
    case cuda::ForwardForm::parallel:
      return "parallel_form_kernel";
    case cuda::ForwardForm::one_pass:
      return "fused_kernel";
    case cuda::ForwardForm::one_wide_pass:
      return "wide_forward_kernel";
    case cuda::ForwardForm::two_passes:
      return "recurrence_kernel";
    case cuda::ForwardForm::f32_tiles:
      return "split_outputs_kernel";
    case cuda::ForwardForm::value_gates:
      return "split_outputs_kernel";
    case cuda::ForwardForm::shared_keys:
      return plan.hopper ? "walk_by_role_kernel" : "outputs_kernel";
  }
  return "";
}
std::string backward_kernel_of(const cuda::Plan& plan) {
  switch (plan.backward) {
    case cuda::BackwardForm::tokens:
      return "recurrent_kernel";
    case cuda::BackwardForm::token_gates:
      return plan.hopper ? "backward_by_role_kernel" : "backward_rows_kernel";
    case cuda::BackwardForm::key_gates:
      return "backward_channels_kernel";
    case cuda::BackwardForm::chunks:
      return "make_dq_dk_dg_kernel";
    case cuda::BackwardForm::f32_tiles:
      return "split_gradients_kernel";
    case cuda::BackwardForm::value_gates:
      return "make_side_kernel";
    case cuda::BackwardForm::shared_keys:
      return plan.hopper ? "gradients_by_role_kernel" : "gradients_kernel";
  }
  return "";
}

// Of both forms where the device chooses.
std::set<std::string> kernels_of(const cuda::Plan& plan) {
  std::set<std::string> kernels = {kernel_of(plan)};
  if (plan.forward_up_to > 0) kernels.insert(kernel_of(cuda::of_long_sequences(plan)));
  return kernels;
}
std::set<std::string> backward_kernels_of(const cuda::Plan& plan) {
  std::set<std::string> kernels = {backward_kernel_of(plan)};
  if (plan.backward_up_to > 0) kernels.insert(backward_kernel_of(cuda::of_long_sequences(plan)));
  return kernels;
}

const std::set<std::string> kForwardKernels = {"recurrent_kernel",    "fused_kernel",         "wide_forward_kernel",
                                               "recurrence_kernel",   "split_outputs_kernel", "outputs_kernel",
                                               "walk_by_role_kernel", "parallel_form_kernel"};
const std::set<std::string> kBackwardKernels = {
    "recurrent_kernel",         "backward_by_role_kernel", "backward_rows_kernel",
    "backward_channels_kernel", "make_dq_dk_dg_kernel",    "split_gradients_kernel",
    "make_side_kernel",         "gradients_kernel",        "gradients_by_role_kernel"};

// Those of the names that are among the kernels launched, without namespaces and template arguments.
std::set<std::string> launched(const std::set<std::string>& among) {
  std::set<std::string> found;
  for (const std::string& kernel : testing::take_recorded_kernels()) {
    const std::string name = kernel.substr(0, kernel.find('<'));
    for (const std::string& one : among) {
      if (name == one || name.ends_with(":" + one) || name.ends_with(" " + one)) found.insert(one);
    }
  }
  return found;
}

void expect_launches_of_plan(const Described& described, const std::string& name) {
  for (const bool hopper : {true, false}) {
    for (const bool keep : {true, false}) {
      SCOPED_TRACE(name + (hopper ? " on cuda_sm90" : " on cuda_portable") + (keep ? ", states kept" : ""));
      Described d = described;
      Context context(Device::cuda(0));
      context.force_implementation(hopper ? "cuda_sm90" : "cuda_portable");
      const std::size_t bytes = keep ? states_bytes(context, d.problem) : 0;
      if (bytes > 0) d.outputs.states = without_memory({static_cast<std::int64_t>(bytes)}, DType::u8);
      const cuda::Plan plan =
          cuda::make_plan(d.problem, cuda::layout_of(d.problem, d.inputs, d.outputs), context.architecture(), hopper);
      testing::take_recorded_kernels();
      forward(context, d.inputs, d.outputs, d.options);
      EXPECT_EQ(launched(kForwardKernels), kernels_of(plan)) << cuda::to_string(plan);
      const InputGradients gradients{
          .dq = d.inputs.q,
          .dk = d.inputs.k,
          .dv = d.inputs.v,
          .dg = d.problem.gate == GateKind::constant ? without_memory({d.problem.heads}, DType::f32) : d.inputs.g,
          .dgv = d.inputs.gv};
      backward(context, d.inputs, d.outputs, {.d_o = d.outputs.o}, gradients, d.options);
      EXPECT_EQ(launched(kBackwardKernels), backward_kernels_of(plan)) << cuda::to_string(plan);
    }
  }
}

TEST(Launches, AreThoseOfThePlan) {
  for (const Case& c : path_cases()) expect_launches_of_plan(described(c), c.name);
}

TEST(Launches, OfSumsOverHeadsAreThoseOfThePlan) {
  for (const std::int64_t key_dim : {64, 128}) {
    Described d = described({.batch = 2,
                             .length = 203,
                             .query_heads = 6,
                             .heads = 6,
                             .key_dim = key_dim,
                             .value_dim = 64,
                             .gate = GateKind::scalar,
                             .dtype = DType::bf16});
    d.inputs.q.stride[2] = d.inputs.k.stride[2] = 0;
    d.inputs.q.stride[1] = d.inputs.k.stride[1] = key_dim;
    d.options.sums_over_heads = d.problem.sums_over_heads = true;
    expect_launches_of_plan(d, "sums over heads");
  }
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention

// Rows of the table: what they take, and the forward as its plan has it.
#include "flashgla/base/cuda/check.h"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/logits.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr std::int64_t kMostKeys = 512;
constexpr std::int64_t kMostParallel = 32768;             // tokens
constexpr std::int64_t kTooLong = std::int64_t{1} << 31;  // tokens: TMA counts them in 32 bits

// Token by token; what a backward by chunks reads of short sequences is left for it.
void forward_by_tokens(Context& context, const Plan& plan, const Params& params) {
  if (params.states != nullptr && !context.planning()) {  // these kernels write what lies within K and V
    flashgla::cuda::check(cudaMemsetAsync(params.states, 0, static_cast<std::size_t>(params.states_bytes()),
                                          static_cast<cudaStream_t>(context.stream())),
                          "gated_linear_attention states");
  }
  recurrent_forward(context, params);
  if (params.states == nullptr || !plan.states.has_prepared() || context.planning()) return;
  const Prepared kept = kept_prepared(params, plan);
  with_core(plan.hopper, [&]<class Core>() { launch_forward_prepare<Core>(context, params, kept); });
}

void run_form(Context& context, const Plan& plan, const Params& params, const Outputs& outputs) {
  switch (plan.forward) {
    case ForwardForm::tokens:
      return forward_by_tokens(context, plan, params);
    case ForwardForm::parallel:
      return parallel_forward(context, params);
    case ForwardForm::one_pass:
      if (context.planning()) return;
      return with_core(plan.hopper, [&]<class Core>() {
        launch_fused<Core>(context, params, {plan.groups, plan.pairs, plan.features});
      });
    case ForwardForm::one_wide_pass:
      if (!context.planning()) launch_wide_forward(context.stream(), params);
      return;
    case ForwardForm::two_passes:
      return forward_in_two_passes(context, params, plan);
    case ForwardForm::f32_tiles:
    case ForwardForm::value_gates:
      return forward_in_f32_tiles(context, plan, params);
    case ForwardForm::shared_keys:
      return forward_with_shared_keys(context, plan, params, outputs);
  }
}

void run_kernels(Context& context, const Plan& plan, const Inputs& inputs, const Outputs& outputs) {
  Params params = make_params(plan, inputs, outputs);
  if (plan.forward_up_to == 0) {
    plan_chunks(context, params);
    return run_form(context, plan, params, outputs);
  }
  ByLength by_length = plan_chunks_by_length(context, params, plan.forward_up_to);
  if (params.ht != nullptr) {
    by_length.up_to.ht = take_states(context, plan.problem, "gla: states passed on");
    by_length.longer.h0 = by_length.up_to.ht;
  }
  run_form(context, of_short_sequences(plan), by_length.up_to, outputs);
  run_form(context, of_long_sequences(plan), by_length.longer, outputs);
}

}  // namespace

Support supports(const Problem& p, const Architecture& architecture, bool hopper) {
  const int capability = architecture.cuda_capability;
  if (hopper && capability != 90) return Support::no("needs compute capability 9.0 exactly");
  if (capability < 80) {
    return Support::no("needs compute capability 8.0, not " + std::to_string(capability / 10) + "." +
                       std::to_string(capability % 10));
  }
  if (p.dtype != DType::f32 && p.dtype != DType::bf16 && p.dtype != DType::f16) {
    return Support::no(std::string("takes f32, bf16 and f16, not ") + name_of(p.dtype));
  }
  if (p.key_dim > kMostKeys || p.value_dim > kMostKeys) {
    return Support::no("takes K and V up to 512, not K " + std::to_string(p.key_dim) + ", V " +
                       std::to_string(p.value_dim));
  }
  if (p.sums_over_heads && !takes_shared_keys(p)) {
    return Support::no("sums over heads in bf16, with one gate a token, K 64 or 128 and V 64, not K " +
                       std::to_string(p.key_dim) + ", V " + std::to_string(p.value_dim));
  }
  if (p.length >= kTooLong) return Support::no("takes less than 2^31 tokens, not " + std::to_string(p.length));
  if (p.algorithm == Algorithm::parallel && p.gate == GateKind::key_value) {
    return Support::no("has no gates over values in the parallel form");
  }
  if (p.algorithm == Algorithm::parallel && p.normalize) return Support::no("has no normaliser in the parallel form");
  if (p.algorithm == Algorithm::parallel && p.length > kMostParallel) {
    return Support::no("is quadratic in the parallel form, and stops at " + std::to_string(kMostParallel) + " tokens");
  }
  if (p.has_logits() && p.gate_dtype == DType::f16) return Support::no("takes logits in f32 and bf16, not f16");
  return Support::yes();
}

void forward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs, bool hopper) {
  const Plan plan = plan_of_call(problem, layout_of(problem, inputs, outputs), context.architecture(), hopper);
  const auto kernels = [&](const Tensors& t) { run_kernels(context, plan, t.in, t.out); };
  const auto rows = [&](const Problem& p, const Tensors& t) {
    plan.pieces ? run_with_aligned_rows(context, p, t, kernels) : kernels(t);
  };
  const auto features = [&](const Problem& p, const Inputs& in, const Outputs& out) {
    if (!plan.features) return rows(p, {in, out});
    forward_through_features(context, p, in, out, [&](const Tensors& t) { rows(without_features(p), t); });
  };
  plan.gates ? forward_with_gates(context, problem, without_logits(problem), inputs, outputs, features)
             : features(problem, inputs, outputs);
  write_states_tag(context, plan, outputs.states);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

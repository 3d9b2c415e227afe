// Launchers of this folder's kernels: each queues its kernels on the stream and returns. Workspace comes in.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla {
class Context;
}

namespace flashgla::ops::gated_linear_attention::cuda {

struct Plan;          // plan.h
struct TensorCore80;  // mma.sync
struct TensorCore90;  // wgmma

// f<Core>() with the tensor core of a plan.
template <class F>
void with_core(bool hopper, F f) {
  hopper ? f.template operator()<TensorCore90>() : f.template operator()<TensorCore80>();
}

// f<GatesAs>() with how gates of a call come: logits as bf16, a constant gate, unless kConstant, as one a token.
template <bool kConstant, class F>
void with_gates_of(const Params& p, F f) {
  if (p.gate == GateKind::none) return f.template operator()<GatesAs::none>();
  if constexpr (kConstant) {
    if (p.gate == GateKind::constant) return f.template operator()<GatesAs::constant>();
  }
  if (p.gate != GateKind::key) return f.template operator()<GatesAs::tokens>();
  p.gate_dtype == DType::f32 ? f.template operator()<GatesAs::f32>() : f.template operator()<GatesAs::bf16>();
}

// Forms of the plan.
struct OnePass {
  int groups;            // warpgroups of a block
  bool pairs;            // these have neighbouring heads; on Hopper
  bool behind_features;  // kernels of feature maps are queued right before
};
template <class Core>
void launch_fused(Context& context, const Params& params, const OnePass& form);
// On Hopper: one wide pass.
void launch_wide_forward(void* stream, const Params& params);
// Takes its workspace from context.scratch().
void forward_in_two_passes(Context& context, const Params& params, const Plan& plan);

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Launchers of the gates over values: workspace, order of kernels. One source a core, core80_* and core90_*.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/kernels.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/value_gates/value_gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace over_values {

using flashgla::cuda::launch;

// scale: of q~ and the scores.
inline Prepared take_both(Context& context, const Params& side, float scale) {
  Prepared out = take_prepared(context, side);
  out.scale = scale;
  out.scores = take(context, side.sequences.most_chunks * side.heads * side.group * kImageBytes, "gla: scores");
  return out;
}

inline SplitImages images_of(const Prepared& prepared) {
  return {.q = prepared.q, .k = prepared.k, .scores = prepared.scores, .decay = prepared.decay};
}

inline std::int64_t tiles_of_states(const Params& p) {
  return static_cast<std::int64_t>(p.heads) * tiles_of(p.key_dim) * tiles_of(p.value_dim);
}

// A pass over the states, forwards; with workspace of segments of time where the plan has several.
inline SplitPass take_pass(Context& context, const Plan& plan, const Params& p, char* states) {
  SplitPass pass{.start = static_cast<const float*>(p.h0), .images = states, .segments = plan.forward_cut.segments};
  if (pass.segments == 1) return pass;
  const std::int64_t tiles = (pass.segments - 1) * p.sequences.count * tiles_of_states(p);
  pass.segment_ends = take<float>(context, tiles * kTile * kTile * 4, "gla: segments");
  pass.segment_decays = take<float>(context, tiles * 2 * kTile * 4, "gla: segments");
  return pass;
}

template <class Core>
void pass_states(const Plan& plan, const Params& p, const SplitPass& pass, bool backwards, cudaStream_t stream) {
  using Kernel = SplitKernel<Core, __nv_bfloat16, 1>;
  in_segments(pass, [&](const SplitPass& each) {
    if (backwards) return launch_gated_states<Kernel, true, 1>(p, each, stream);
    plan.groups == 2 ? launch_gated_states<Kernel, false, 2>(p, each, stream)
                     : launch_gated_states<Kernel, false, 1>(p, each, stream);
  });
}

template <class Core, bool kOverValues>
void launch_side(const Params& p, const Side& side, cudaStream_t stream) {
  const std::int64_t blocks = p.sequences.most_chunks * p.heads * tiles_of(side.own);
  launch("gated_linear_attention side", make_side_kernel<Core, kOverValues>, dim3(static_cast<unsigned>(blocks)),
         kGroupThreads, SideShared::total, stream, kNext<Core>, p, side);
}

}  // namespace over_values

template <class Core>
void ValueGates<Core>::forward(Context& context, const Plan& plan, const Params& p) {
  using Launch = SplitLaunch<SplitKernel<Core, __nv_bfloat16, 1>>;
  const Params keys = keys_of(p), values = values_of(p, {});
  const Prepared prepared = over_values::take_both(context, keys, p.scale);
  const std::int64_t cells = p.sequences.most_chunks * p.heads, value_tiles = tiles_of(p.value_dim);
  char* later = take(context, cells * value_tiles * kImageBytes, "gla: gated v");
  auto* decays = take<float>(context, cells * value_tiles * kTile * 4, "gla: chunk decays");
  auto* states = static_cast<char*>(p.states);
  if (states == nullptr)
    states = take(context, p.sequences.most_chunks * over_values::tiles_of_states(p) * kImageBytes, "gla: states");
  SplitPass pass = over_values::take_pass(context, plan, p, states);
  pass.values = {.k = later, .decay = decays};
  if (context.planning()) return;

  const auto stream = static_cast<cudaStream_t>(context.stream());
  launch_forward_prepare<Core>(context, keys, prepared);
  Launch::later(values, pass.values, stream);
  pass.prepared = over_values::images_of(prepared);
  pass.end = static_cast<float*>(p.ht);
  over_values::pass_states<Core>(plan, p, pass, false, stream);
  Launch::gated_outputs(values, {p.v, p.o, states, pass.prepared, later}, stream);
}

template <class Core>
void ValueGates<Core>::backward(Context& context, const Plan& plan, const Params& p, const OutputGradients& d_out,
                                const InputGradients& d_in) {
  const Strided d_o = strided(d_out.d_o);
  const Params keys = keys_of(p), values = values_of(p, d_o);
  const Prepared of_keys = over_values::take_both(context, keys, 1.0f),
                 of_values = over_values::take_both(context, values, 1.0f);
  const std::int64_t state_bytes = p.sequences.most_chunks * over_values::tiles_of_states(p) * kImageBytes;
  char* states = plan.finds_states ? take(context, state_bytes, "gla: states") : static_cast<char*>(p.states);
  char* gradients = take(context, state_bytes, "gla: state gradients");
  SplitPass pass = over_values::take_pass(context, plan, p, states);
  pass.prepared = over_values::images_of(of_keys);
  pass.values = over_values::images_of(of_values);
  if (context.planning()) return;

  const auto stream = static_cast<cudaStream_t>(context.stream());
  launch_forward_prepare<Core>(context, keys, of_keys);
  launch_forward_prepare<Core>(context, values, of_values);
  if (plan.finds_states) over_values::pass_states<Core>(plan, p, pass, false, stream);
  pass.start = static_cast<const float*>(d_out.d_ht.data);
  pass.end = static_cast<float*>(d_in.dh0.data);
  pass.images = gradients;
  pass.start_factor = 1.0f / p.scale;
  pass.end_factor = p.scale;
  over_values::pass_states<Core>(plan, p, pass, true, stream);
  const auto side = [&](const Params& own, const Prepared& of_own, const Prepared& of_other) {
    return Side{.query = own.q,
                .key = own.k,
                .gate = own.g,
                .own_up = of_own.q,
                .own_later = of_own.k,
                .other_up = of_other.q,
                .other_later = of_other.k,
                .scores = of_other.scores,
                .other_decays = of_other.decay,
                .states = states,
                .state_gradients = gradients,
                .own = own.key_dim,
                .other = own.value_dim};
  };
  if (d_in.dq || d_in.dk || d_in.dg) {
    Side s = side(keys, of_keys, of_values);
    s.d_query = strided(d_in.dq);
    s.d_key = strided(d_in.dk);
    s.d_gate = strided(d_in.dg);
    over_values::launch_side<Core, false>(p, s, stream);
  }
  if (d_in.dv || d_in.dgv) {
    Side s = side(values, of_values, of_keys);
    s.d_key = strided(d_in.dv);
    s.d_gate = strided(d_in.dgv);
    over_values::launch_side<Core, true>(p, s, stream);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

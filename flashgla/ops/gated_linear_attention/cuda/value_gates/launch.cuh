// Launchers of the gates over values: workspace, order of kernels. One source a core, core80_* and core90_*.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/value_gates/value_gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace over_values {

using flashgla::cuda::launch;

inline Prepared take_both(Context& context, const Params& side) {
  Prepared out = take_prepared(context, side);
  out.scores = take(context, side.sequences.most_chunks * side.heads * side.group * kImageBytes, "gla: scores");
  return out;
}

inline std::int64_t tiles_of_states(const Params& p) {
  return static_cast<std::int64_t>(p.heads) * tiles_of(p.key_dim) * tiles_of(p.value_dim);
}

// Workspace of segments of time, where the plan has several.
struct PassSegments {
  int groups, segments;
  float *ends = nullptr, *decays = nullptr;

  PassSegments(Context& context, const Plan& plan, const Params& p)
      : groups(plan.groups), segments(plan.forward_cut.segments) {
    if (segments == 1) return;
    const std::int64_t tiles = (segments - 1) * p.sequences.count * tiles_of_states(p);
    ends = take<float>(context, tiles * kTile * kTile * 4, "gla: segments");
    decays = take<float>(context, tiles * 2 * kTile * 4, "gla: segments");
  }
};

template <class Core, int kGroups>
void launch_pass(const Params& p, const GatedPass& pass, cudaStream_t stream) {
  const std::int64_t blocks = tiles_of(p.key_dim) * ((tiles_of(p.value_dim) + kGroups - 1) / kGroups);
  const dim3 grid(static_cast<unsigned>(blocks * p.heads * p.sequences.count),
                  static_cast<unsigned>(pass.segments - pass.ends_only));
  launch("gated_linear_attention states", pass_gated_state_kernel<Core, kGroups>, grid, kGroupThreads * kGroups,
         gated_pass_shared(kGroups), stream, kNext<Core>, p, pass);
}

template <class Core>
void pass_states(const Params& p, GatedPass pass, const PassSegments& time, cudaStream_t stream) {
  const auto run = [&] {
    time.groups == 2 ? launch_pass<Core, 2>(p, pass, stream) : launch_pass<Core, 1>(p, pass, stream);
  };
  pass.segments = time.segments;
  pass.segment_ends = time.ends;
  pass.segment_decays = time.decays;
  if (time.segments > 1) {
    pass.ends_only = true;
    run();
    pass.ends_only = false;
  }
  run();
}

template <class Core, bool kOverValues, bool kBackward>
void launch_side(const Params& p, const Side& side, cudaStream_t stream) {
  const std::int64_t blocks = p.sequences.most_chunks * p.heads * tiles_of(side.own);
  launch("gated_linear_attention side", make_side_kernel<Core, kOverValues, kBackward>,
         dim3(static_cast<unsigned>(blocks)), kGroupThreads, SideShared::total, stream, kNext<Core>, p, side);
}

}  // namespace over_values

template <class Core>
void forward_with_value_gates(Context& context, const Plan& plan, const Params& p) {
  const Params keys = keys_of(p), values = values_of(p, {});
  const Prepared prepared = over_values::take_both(context, keys);
  const std::int64_t cells = p.sequences.most_chunks * p.heads, value_tiles = tiles_of(p.value_dim);
  char* later = take(context, cells * value_tiles * kImageBytes, "gla: gated v");
  auto* decays = take<float>(context, cells * value_tiles * kTile * 4, "gla: chunk decays");
  auto* states = static_cast<char*>(p.states);
  if (states == nullptr)
    states = take(context, p.sequences.most_chunks * over_values::tiles_of_states(p) * kImageBytes, "gla: states");
  const over_values::PassSegments time(context, plan, p);
  if (context.planning()) return;

  const auto stream = static_cast<cudaStream_t>(context.stream());
  launch_forward_prepare<Core>(context, keys, prepared);
  flashgla::cuda::launch("gated_linear_attention gated values", gate_later_kernel,
                         dim3(static_cast<unsigned>(cells * value_tiles)), kGroupThreads, kGateLaterShared, stream,
                         kNext<Core>, values, SplitImages{.k = later, .decay = decays});
  GatedPass pass{
      prepared.k, later, prepared.decay, decays, states, static_cast<const float*>(p.h0), static_cast<float*>(p.ht)};
  over_values::pass_states<Core>(p, pass, time, stream);
  const Side output{.key = p.v,
                    .gate = p.gv,
                    .own_later = later,
                    .other_up = prepared.q,
                    .scores = prepared.scores,
                    .states = states,
                    .own = p.value_dim,
                    .other = p.key_dim,
                    .d_query = p.o};
  over_values::launch_side<Core, true, false>(p, output, stream);
}

template <class Core>
void backward_with_value_gates(Context& context, const Plan& plan, const Params& p, const OutputGradients& d_out,
                               const InputGradients& d_in) {
  const Strided d_o = strided(d_out.d_o);
  const Params keys = keys_of(p), values = values_of(p, d_o);
  const Prepared of_keys = over_values::take_both(context, keys), of_values = over_values::take_both(context, values);
  const std::int64_t state_bytes = p.sequences.most_chunks * over_values::tiles_of_states(p) * kImageBytes;
  char* states = plan.finds_states ? take(context, state_bytes, "gla: states") : static_cast<char*>(p.states);
  char* gradients = take(context, state_bytes, "gla: state gradients");
  const over_values::PassSegments time(context, plan, p);
  if (context.planning()) return;

  const auto stream = static_cast<cudaStream_t>(context.stream());
  launch_forward_prepare<Core>(context, keys, of_keys);
  launch_forward_prepare<Core>(context, values, of_values);
  if (plan.finds_states) {
    over_values::pass_states<Core>(
        p, {of_keys.k, of_values.k, of_keys.decay, of_values.decay, states, static_cast<const float*>(p.h0), nullptr},
        time, stream);
  }
  GatedPass back{of_keys.q,
                 of_values.q,
                 of_keys.decay,
                 of_values.decay,
                 gradients,
                 static_cast<const float*>(d_out.d_ht.data),
                 static_cast<float*>(d_in.dh0.data)};
  back.start_factor = 1.0f / p.scale;
  back.end_factor = p.scale;
  back.backwards = true;
  back.heads_each = p.group;
  over_values::pass_states<Core>(p, back, time, stream);
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
    over_values::launch_side<Core, false, true>(p, s, stream);
  }
  if (d_in.dv || d_in.dgv) {
    Side s = side(values, of_values, of_keys);
    s.d_key = strided(d_in.dv);
    s.d_gate = strided(d_in.dgv);
    over_values::launch_side<Core, true, true>(p, s, stream);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

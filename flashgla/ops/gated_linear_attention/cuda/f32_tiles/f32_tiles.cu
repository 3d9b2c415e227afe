// Forward and backward in f32 tiles: workspace, order of launches.
#include <cuda_fp16.h>

#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/f32_tiles.h"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/value_gates/value_gates.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

template <class T>
T* take(Context& context, std::int64_t bytes, const char* label) {
  return static_cast<T*>(context.scratch().allocate(static_cast<std::size_t>(bytes), label));
}

std::int64_t tiles_of_a_state(const Params& p) { return tiles_of(p.key_dim) * tiles_of(p.value_dim); }

std::int64_t states_bytes(const Plan& plan, const Params& p) {
  return p.sequences.most_chunks * p.heads * tiles_of_a_state(p) * parts_of(plan.problem) * kImageBytes;
}

// Workspace of segments of time, where the plan has several.
void take_segments(Context& context, const Plan& plan, const Params& p, SplitPass& pass) {
  pass.segments = plan.forward_cut.segments;
  if (pass.segments == 1) return;
  const std::int64_t ends = (pass.segments - 1) * p.sequences.count * p.heads * tiles_of_a_state(p);
  pass.segment_ends = take<float>(context, ends * kTile * kTile * 4, "gla f32 tiles: segments");
  const int sides = plan.problem.gate == GateKind::key_value ? 2 : 1;
  pass.segment_decays = take<float>(context, ends * sides * kTile * 4, "gla f32 tiles: segments");
}

// Workspace of what is prepared.
SplitImages take_images(Context& context, const Params& p, std::int64_t image_bytes) {
  const std::int64_t chunks = p.sequences.most_chunks, key_tiles = tiles_of(p.key_dim), heads = p.heads * p.group;
  return {.q = take<char>(context, chunks * heads * key_tiles * image_bytes, "gla f32 tiles: gated q"),
          .k = take<char>(context, chunks * p.heads * key_tiles * image_bytes, "gla f32 tiles: gated k"),
          .scores = take<char>(context, chunks * heads * image_bytes, "gla f32 tiles: scores"),
          .decay = take<float>(context, chunks * p.heads * key_tiles * kTile * 4, "gla f32 tiles: decay")};
}
// With gates over keys alone only where a head has several tiles or a state several query heads.
SplitImages take_images_of_several(Context& context, const Params& p, std::int64_t image_bytes) {
  if (tiles_of_a_state(p) == 1 && p.group == 1) return {};
  return take_images(context, p, image_bytes);
}

// launch(pass)
template <class Launch>
void pass_in_segments(SplitPass pass, Launch launch) {
  if (pass.segments > 1) {
    pass.ends_only = true;
    launch(pass);
    pass.ends_only = false;
  }
  launch(pass);
}
template <class Kernel, bool kBackwards>
void pass_states(const Params& p, const SplitPass& pass, cudaStream_t stream) {
  pass_in_segments(pass, [&](const SplitPass& x) { launch_split_states<Kernel, kBackwards>(p, x, stream); });
}
template <class Kernel, bool kBackwards>
void pass_gated_states(const Params& p, const SplitPass& pass, cudaStream_t stream) {
  pass_in_segments(pass, [&](const SplitPass& x) { launch_gated_states<Kernel, kBackwards>(p, x, stream); });
}

SplitPass states_pass(const Params& p, char* images) {
  return {.b = p.v, .start = static_cast<const float*>(p.h0), .end = nullptr, .images = images};
}

template <class Kernel>
void forward(Context& context, const Plan& plan, const Params& p) {
  const ArenaScope scope(context.scratch());
  char* images = p.states != nullptr ? static_cast<char*>(p.states)
                                     : take<char>(context, states_bytes(plan, p), "gla f32 tiles: states");
  SplitPass pass = states_pass(p, images);
  pass.end = static_cast<float*>(p.ht);
  pass.prepared = take_images_of_several(context, p, Kernel::parts * kImageBytes);
  take_segments(context, plan, p, pass);
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  if (pass.prepared.q != nullptr) launch_split_prepare<Kernel>(p, pass.prepared, stream);
  pass_states<Kernel, false>(p, pass, stream);
  launch_split_outputs<Kernel, false>(p, {p.v, p.o, images, pass.prepared}, stream);
}

template <class Kernel>
void backward(Context& context, const Plan& plan, const Params& p, const OutputGradients& d_out,
              const InputGradients& d_in) {
  const ArenaScope scope(context.scratch());
  const Problem& problem = plan.problem;
  const std::int64_t bytes = states_bytes(plan, p);
  char* states =
      !plan.finds_states ? static_cast<char*>(p.states) : take<char>(context, bytes, "gla f32 tiles: states");
  char* state_gradients = take<char>(context, bytes, "gla f32 tiles: state gradients");
  const bool constant = problem.gate == GateKind::constant;
  const std::int64_t tokens = problem.packed ? problem.length : problem.batch * problem.length;
  const std::int64_t gate_rows = constant ? p.sequences.most_chunks : tokens;
  const int key_tiles = tiles_of(p.key_dim);
  const bool sums_gates = d_in.dg && (constant || problem.gate == GateKind::scalar);
  const Gradients d = gradients_of(problem, d_out, d_in);
  SplitGradients gradients{d.d_o, d.dq, d.dk, d.dg, states, state_gradients, nullptr};
  if (sums_gates)
    gradients.gate_parts = take<float>(context, key_tiles * gate_rows * problem.heads * 4, "gla f32 tiles: gate parts");
  SplitPass forwards = states_pass(p, states);
  forwards.prepared = take_images_of_several(context, p, Kernel::parts * kImageBytes);
  take_segments(context, plan, p, forwards);
  SplitPass backwards = forwards;
  backwards.b = d.d_o;
  backwards.start = static_cast<const float*>(d_out.d_ht.data);
  backwards.end = static_cast<float*>(d_in.dh0.data);
  backwards.images = state_gradients;
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  if (forwards.prepared.q != nullptr) launch_split_prepare<Kernel>(p, forwards.prepared, stream);
  if (plan.finds_states) pass_states<Kernel, false>(p, forwards, stream);
  pass_states<Kernel, true>(p, backwards, stream);
  if (d_in.dv) launch_split_outputs<Kernel, true>(p, {d.d_o, d.dv, state_gradients, forwards.prepared}, stream);
  if (d_in.dq || d_in.dk || d_in.dg) launch_split_gradients<Kernel>(p, gradients, stream);
  if (sums_gates) launch_gate_sums(p, gradients.gate_parts, gate_rows, key_tiles, d.dg, stream);
}

// The values' side as kernels of f32 tiles know it: the scale is in q~.
Params unscaled_values_of(const Params& p, const Strided& d_o) {
  Params values = values_of(p, d_o);
  values.scale = 1.0f;
  return values;
}

template <class Kernel>
void forward_with_gated_values(Context& context, const Plan& plan, const Params& p) {
  const ArenaScope scope(context.scratch());
  constexpr std::int64_t kBytes = Kernel::parts * kImageBytes;
  const Params keys = keys_of(p), values = unscaled_values_of(p, {});
  char* states = p.states != nullptr ? static_cast<char*>(p.states)
                                     : take<char>(context, states_bytes(plan, p), "gla f32 tiles: states");
  SplitPass pass = states_pass(p, states);
  pass.end = static_cast<float*>(p.ht);
  pass.prepared = take_images(context, keys, kBytes);
  const std::int64_t value_tiles = p.sequences.most_chunks * p.heads * tiles_of(p.value_dim);
  pass.values.k = take<char>(context, value_tiles * kBytes, "gla f32 tiles: gated v");
  pass.values.decay = take<float>(context, value_tiles * kTile * 4, "gla f32 tiles: decay");
  take_segments(context, plan, p, pass);
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  launch_split_prepare<Kernel>(keys, pass.prepared, stream);
  launch_split_later<Kernel>(values, pass.values, stream);
  pass_gated_states<Kernel, false>(p, pass, stream);
  launch_gated_outputs<Kernel>(values, {p.v, p.o, states, pass.prepared}, stream);
}

template <class Kernel>
void backward_with_gated_values(Context& context, const Plan& plan, const Params& p, const OutputGradients& d_out,
                                const InputGradients& d_in) {
  const ArenaScope scope(context.scratch());
  const Problem& problem = plan.problem;
  constexpr std::int64_t kBytes = Kernel::parts * kImageBytes;
  const Params keys = keys_of(p), values = unscaled_values_of(p, strided(d_out.d_o));
  const std::int64_t state_bytes = states_bytes(plan, p);
  char* states =
      !plan.finds_states ? static_cast<char*>(p.states) : take<char>(context, state_bytes, "gla f32 tiles: states");
  char* state_gradients = take<char>(context, state_bytes, "gla f32 tiles: state gradients");
  SplitPass forwards = states_pass(p, states);
  forwards.prepared = take_images(context, keys, kBytes);
  forwards.values = take_images(context, values, kBytes);
  take_segments(context, plan, p, forwards);
  SplitPass backwards = forwards;
  backwards.start = static_cast<const float*>(d_out.d_ht.data);
  backwards.end = static_cast<float*>(d_in.dh0.data);
  backwards.images = state_gradients;
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  launch_split_prepare<Kernel>(keys, forwards.prepared, stream);
  launch_split_prepare<Kernel>(values, forwards.values, stream);
  if (plan.finds_states) pass_gated_states<Kernel, false>(p, forwards, stream);
  pass_gated_states<Kernel, true>(p, backwards, stream);
  SplitGradients gradients{.d_o = {},
                           .dq = strided(d_in.dq),
                           .dk = strided(d_in.dk),
                           .dg = strided(d_in.dg),
                           .states = states,
                           .state_gradients = state_gradients,
                           .gate_parts = nullptr,
                           .other = forwards.values};
  if (d_in.dq || d_in.dk || d_in.dg) launch_gated_gradients<Kernel, false>(keys, gradients, stream);
  gradients.dq = {};
  gradients.dk = strided(d_in.dv);
  gradients.dg = strided(d_in.dgv);
  gradients.other = forwards.prepared;
  if (d_in.dv || d_in.dgv) launch_gated_gradients<Kernel, true>(values, gradients, stream);
}

// call(kernel): a SplitKernel.
template <class Core, class Call>
void with_kernel_of(const Problem& problem, Call call) {
  if (problem.dtype == DType::f16) return call(SplitKernel<Core, __half, 2>());
  parts_of(problem) == 3 ? call(SplitKernel<Core, float, 3>()) : call(SplitKernel<Core, float, 2>());
}
template <class Call>
void with_kernel(const Problem& problem, bool hopper, Call call) {
  hopper ? with_kernel_of<TensorCore90>(problem, call) : with_kernel_of<TensorCore80>(problem, call);
}

}  // namespace

void forward_in_f32_tiles(Context& context, const Plan& plan, const Params& params) {
  with_kernel(plan.problem, plan.hopper, [&](auto kernel) {
    using Kernel = decltype(kernel);
    plan.problem.gate == GateKind::key_value ? forward_with_gated_values<Kernel>(context, plan, params)
                                             : forward<Kernel>(context, plan, params);
  });
}

void backward_in_f32_tiles(Context& context, const Plan& plan, const Params& params, const OutputGradients& d_out,
                           const InputGradients& d_in) {
  with_kernel(plan.problem, plan.hopper, [&](auto kernel) {
    using Kernel = decltype(kernel);
    plan.problem.gate == GateKind::key_value ? backward_with_gated_values<Kernel>(context, plan, params, d_out, d_in)
                                             : backward<Kernel>(context, plan, params, d_out, d_in);
  });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

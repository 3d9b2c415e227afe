// Forward and backward in f32 tiles, and of bf16 with gates over values: workspace, order of launches.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

std::int64_t tiles_of_a_state(const Params& p) { return tiles_of(p.key_dim) * tiles_of(p.value_dim); }

// Workspace of what is prepared.
Prepared take_images(Context& context, const Params& p, std::int64_t image_bytes) {
  const std::int64_t chunks = p.sequences.most_chunks, key_tiles = tiles_of(p.key_dim), heads = p.heads * p.group;
  return {.q = take(context, chunks * heads * key_tiles * image_bytes, "gla f32 tiles: gated q"),
          .k = take(context, chunks * p.heads * key_tiles * image_bytes, "gla f32 tiles: gated k"),
          .scores = take(context, chunks * heads * image_bytes, "gla f32 tiles: scores"),
          .decay = take<float>(context, chunks * p.heads * key_tiles * kTile * 4, "gla f32 tiles: decay"),
          .blocks = static_cast<int>(key_tiles),
          .scale = p.scale};
}

// A call's two sides, q, k, g and do, v, gv, as problems of gates over keys; without gates over values the keys' is the
// call. The scale is in what is prepared of the keys, but for backwards of bf16 (value_gates/README.md).
struct Sides {
  bool gated_values;
  Params keys, values;

  Sides(const Plan& plan, const Params& p, const Strided& d_o)
      : gated_values(plan.problem.gate == GateKind::key_value), keys(p), values(p) {
    if (!gated_values) return;
    keys.gate = p.g.data == nullptr ? GateKind::none : GateKind::key;
    values.gate = GateKind::key;
    values.q = d_o;
    values.k = p.v;
    values.g = p.gv;
    std::swap(values.key_dim, values.value_dim);
    if (p.dtype != DType::bf16) values.scale = 1.0f;
  }
};

// The pass forwards over a call's states, with its workspace. What is prepared of the keys: always beside gates over
// values, else only where a head has several tiles or a state several query heads. Segments of time where the plan has
// several.
SplitPass forwards_pass(Context& context, const Plan& plan, const Params& p, const Sides& sides, char* states,
                        std::int64_t image_bytes) {
  SplitPass pass{.b = p.v, .start = static_cast<const float*>(p.h0), .end = nullptr, .images = states};
  if (sides.gated_values || tiles_of_a_state(p) > 1 || p.group > 1) {
    pass.prepared = take_images(context, sides.keys, image_bytes);
  }
  pass.segments = plan.forward_cut.segments;
  if (pass.segments > 1) {
    const std::int64_t ends = (pass.segments - 1) * p.sequences.count * p.heads * tiles_of_a_state(p);
    pass.segment_ends = take<float>(context, ends * kTile * kTile * 4, "gla f32 tiles: segments");
    pass.segment_decays = take<float>(context, ends * (1 + sides.gated_values) * kTile * 4, "gla f32 tiles: segments");
  }
  return pass;
}

template <class Kernel>
void forward(Context& context, const Plan& plan, const Params& p) {
  using Launch = SplitLaunch<Kernel>;
  const ArenaScope scope(context.scratch());
  constexpr std::int64_t kBytes = Kernel::parts * kImageBytes;
  const Sides sides(plan, p, {});
  const std::int64_t bytes = p.sequences.most_chunks * p.heads * tiles_of_a_state(p) * kBytes;
  char* states = p.states != nullptr ? static_cast<char*>(p.states) : take(context, bytes, "gla f32 tiles: states");
  SplitPass pass = forwards_pass(context, plan, p, sides, states, kBytes);
  pass.end = static_cast<float*>(p.ht);
  if (sides.gated_values) {
    const std::int64_t tiles = p.sequences.most_chunks * p.heads * tiles_of(p.value_dim);
    pass.values.k = take(context, tiles * kBytes, "gla f32 tiles: gated v");
    pass.values.decay = take<float>(context, tiles * kTile * 4, "gla f32 tiles: decay");
  }
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  if (pass.prepared.q != nullptr) Launch::prepare(context, sides.keys, pass.prepared, stream);
  if (sides.gated_values) Launch::later(sides.values, pass.values, stream);
  Launch::states(p, pass, false, stream);
  const SplitOutputs outputs{p.v, p.o, states, pass.prepared, pass.values.k};
  sides.gated_values ? Launch::gated_outputs(sides.values, outputs, stream)
                     : Launch::outputs(p, outputs, false, stream);
}

template <class Kernel>
void backward(Context& context, const Plan& plan, const Params& p, const OutputGradients& d_out,
              const InputGradients& d_in) {
  using Launch = SplitLaunch<Kernel>;
  const ArenaScope scope(context.scratch());
  constexpr std::int64_t kBytes = Kernel::parts * kImageBytes;
  const Problem& problem = plan.problem;
  const Gradients d = gradients_of(problem, d_out, d_in);
  const Sides sides(plan, p, d.d_o);
  const std::int64_t bytes = p.sequences.most_chunks * p.heads * tiles_of_a_state(p) * kBytes;
  char* states = !plan.finds_states ? static_cast<char*>(p.states) : take(context, bytes, "gla f32 tiles: states");
  char* state_gradients = take(context, bytes, "gla f32 tiles: state gradients");
  SplitGradients gradients{d.d_o, d.dq, d.dk, d.dg, states, state_gradients, nullptr};
  const bool constant = problem.gate == GateKind::constant;
  const std::int64_t gate_rows = constant ? p.sequences.most_chunks : p.sequences.tokens();
  const int key_tiles = tiles_of(p.key_dim);
  if (d_in.dg && (constant || problem.gate == GateKind::scalar)) {
    gradients.gate_parts = take<float>(context, key_tiles * gate_rows * problem.heads * 4, "gla f32 tiles: gate parts");
  }
  SplitPass forwards = forwards_pass(context, plan, p, sides, states, kBytes);
  if (sides.gated_values) forwards.values = take_images(context, sides.values, kBytes);
  if (Kernel::parts == 1) forwards.prepared.scale = forwards.values.scale = 1.0f;
  SplitPass backwards = forwards;
  backwards.b = d.d_o;
  backwards.start = static_cast<const float*>(d_out.d_ht.data);
  backwards.end = static_cast<float*>(d_in.dh0.data);
  backwards.images = state_gradients;
  backwards.start_factor = 1.0f / p.scale;
  backwards.end_factor = p.scale;
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  if (forwards.prepared.q != nullptr) Launch::prepare(context, sides.keys, forwards.prepared, stream);
  if (sides.gated_values) Launch::prepare(context, sides.values, forwards.values, stream);
  if (plan.finds_states) Launch::states(p, forwards, false, stream);
  Launch::states(p, backwards, true, stream);
  const bool of_keys = d_in.dq || d_in.dk || d_in.dg;
  if (!sides.gated_values) {
    if (d_in.dv) Launch::outputs(p, {d.d_o, d.dv, state_gradients, forwards.prepared}, true, stream);
    if (of_keys) Launch::gradients(p, gradients, GatedSide::only_keys, stream);
    if (gradients.gate_parts) launch_gate_sums(p, gradients.gate_parts, gate_rows, key_tiles, d.dg, stream);
    return;
  }
  gradients.own = forwards.prepared;
  gradients.other = forwards.values;
  if (of_keys) Launch::gradients(sides.keys, gradients, GatedSide::keys, stream);
  gradients.dq = {};
  gradients.dk = d.dv;
  gradients.dg = strided(d_in.dgv);
  std::swap(gradients.own, gradients.other);
  if (d_in.dv || d_in.dgv) Launch::gradients(sides.values, gradients, GatedSide::values, stream);
}

// call(kernel): a SplitKernel.
template <class Call>
void with_kernel(const Problem& problem, bool hopper, Call call) {
  with_core(hopper, [&]<class Core>() {
    if (problem.dtype == DType::f16) return call(SplitKernel<Core, __half, 2>());
    if (problem.dtype == DType::bf16) return call(SplitKernel<Core, __nv_bfloat16, 1>());
    parts_of(problem) == 3 ? call(SplitKernel<Core, float, 3>()) : call(SplitKernel<Core, float, 2>());
  });
}

}  // namespace

void forward_in_f32_tiles(Context& context, const Plan& plan, const Params& params) {
  with_kernel(plan.problem, plan.hopper, [&](auto kernel) { forward<decltype(kernel)>(context, plan, params); });
}

void backward_in_f32_tiles(Context& context, const Plan& plan, const Params& params, const OutputGradients& d_out,
                           const InputGradients& d_in) {
  with_kernel(plan.problem, plan.hopper,
              [&](auto kernel) { backward<decltype(kernel)>(context, plan, params, d_out, d_in); });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

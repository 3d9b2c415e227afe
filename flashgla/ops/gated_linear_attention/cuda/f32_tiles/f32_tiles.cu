// Forward and backward in f32 tiles: workspace, segments, order of launches.
#include <algorithm>
#include <type_traits>

#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/f32_tiles.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

template <class T>
T* take(Context& context, std::int64_t bytes, const char* label) {
  return static_cast<T*>(context.scratch().allocate(static_cast<std::size_t>(bytes), label));
}

std::int64_t tiles_of_a_state(const Problem& problem) {
  return tiles_of(static_cast<int>(problem.key_dim)) * tiles_of(static_cast<int>(problem.value_dim));
}

// Segments of time, where states are so few that cutting time into them makes up for walking it twice. Two blocks share
// a multiprocessor.
void plan_segments(Context& context, const Problem& problem, const Params& p, SplitPass& pass) {
  const std::int64_t tiles = problem.sequences * problem.heads * tiles_of_a_state(problem);
  const std::int64_t room = 2 * context.architecture().multiprocessors / tiles;
  const std::int64_t chunks = p.sequences.most_chunks / p.sequences.count;
  pass.segments = static_cast<int>(std::min<std::int64_t>({room, chunks / 8, 16}));
  if (pass.segments <= 2) {
    pass.segments = 1;
    return;
  }
  const std::int64_t ends = (pass.segments - 1) * tiles;
  pass.segment_ends = take<float>(context, ends * kTile * kTile * 4, "gla f32 tiles: segments");
  pass.segment_decays = take<float>(context, ends * kTile * 4, "gla f32 tiles: segments");
}

// Workspace of what is prepared, where a head has several tiles or a state several query heads.
SplitImages plan_images(Context& context, const Problem& problem, const Params& p, std::int64_t image_bytes) {
  if (tiles_of_a_state(problem) == 1 && p.group == 1) return {};
  const std::int64_t chunks = p.sequences.most_chunks, key_tiles = tiles_of(p.key_dim), heads = problem.query_heads;
  return {.q = take<char>(context, chunks * heads * key_tiles * image_bytes, "gla f32 tiles: gated q"),
          .k = take<char>(context, chunks * p.heads * key_tiles * image_bytes, "gla f32 tiles: gated k"),
          .scores = take<char>(context, chunks * heads * image_bytes, "gla f32 tiles: scores"),
          .decay = take<float>(context, chunks * p.heads * key_tiles * kTile * 4, "gla f32 tiles: decay")};
}

template <class Kernel, bool kBackwards>
void pass_states(const Params& p, SplitPass pass, cudaStream_t stream) {
  if (pass.segments > 1) {
    pass.ends_only = true;
    launch_split_states<Kernel, kBackwards>(p, pass, stream);
    pass.ends_only = false;
  }
  launch_split_states<Kernel, kBackwards>(p, pass, stream);
}

SplitPass states_pass(const Params& p, char* images) {
  return {.b = p.v, .start = static_cast<const float*>(p.h0), .end = nullptr, .images = images, .states = nullptr};
}

template <class Kernel>
void forward(Context& context, const Problem& problem, const Params& p) {
  const ArenaScope scope(context.scratch());
  const bool keeps_split = p.states != nullptr && !backward_in_chunks(problem);
  char* images = keeps_split ? static_cast<char*>(p.states)
                             : take<char>(context, static_cast<std::int64_t>(split_states_bytes(problem)),
                                          "gla f32 tiles: states");
  SplitPass pass = states_pass(p, images);
  pass.end = static_cast<float*>(p.ht);
  pass.states = keeps_split ? nullptr : static_cast<char*>(p.states);
  pass.prepared = plan_images(context, problem, p, Kernel::parts * kImageBytes);
  plan_segments(context, problem, p, pass);
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  if (pass.prepared.q != nullptr) launch_split_prepare<Kernel>(p, pass.prepared, stream);
  pass_states<Kernel, false>(p, pass, stream);
  launch_split_outputs<Kernel, false>(p, {p.v, p.o, images, pass.prepared}, stream);
}

template <class Kernel>
void backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
              const OutputGradients& d_out, const InputGradients& d_in) {
  const ArenaScope scope(context.scratch());
  Params p = make_params(problem, inputs, outputs);
  plan_chunks(context, p);
  const auto bytes = static_cast<std::int64_t>(split_states_bytes(problem));
  // bf16 keeps its states as bf16, where it keeps them.
  const bool kept = outputs.states && problem.dtype != DType::bf16;
  char* states = kept ? static_cast<char*>(p.states) : take<char>(context, bytes, "gla f32 tiles: states");
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
  forwards.prepared = plan_images(context, problem, p, Kernel::parts * kImageBytes);
  plan_segments(context, problem, p, forwards);
  SplitPass backwards = forwards;
  backwards.b = d.d_o;
  backwards.start = static_cast<const float*>(d_out.d_ht.data);
  backwards.end = static_cast<float*>(d_in.dh0.data);
  backwards.images = state_gradients;
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  if (forwards.prepared.q != nullptr) launch_split_prepare<Kernel>(p, forwards.prepared, stream);
  if (!kept) pass_states<Kernel, false>(p, forwards, stream);
  pass_states<Kernel, true>(p, backwards, stream);
  if (d_in.dv) launch_split_outputs<Kernel, true>(p, {d.d_o, d.dv, state_gradients, forwards.prepared}, stream);
  if (d_in.dq || d_in.dk || d_in.dg) launch_split_gradients<Kernel>(p, gradients, stream);
  if (sums_gates) launch_gate_sums(p, gradients.gate_parts, gate_rows, key_tiles, d.dg, stream);
}

// How many bf16 numbers a number is: f32's own precision, unless the caller allows tf32's.
int parts_of(const Problem& problem) {
  return problem.dtype == DType::f32 && problem.float32_math == Float32Math::ieee ? 3 : 2;
}

// Whether 16 bytes of each row can be read at once.
bool in_pieces(const Strided& s, DType dtype, std::int64_t width) {
  const std::int64_t elements = 16 / static_cast<std::int64_t>(size_of(dtype));
  return s.data == nullptr || (reinterpret_cast<std::uintptr_t>(s.data) % 16 == 0 && s.batch % elements == 0 &&
                               s.token % elements == 0 && s.head % elements == 0 && width % elements == 0);
}
bool key_gates_in_pieces(const Problem& problem, const Strided& g) {
  return problem.gate != GateKind::key || in_pieces(g, problem.gate_dtype, problem.key_dim);
}
bool in_pieces(const Problem& problem, const Params& p) {
  const auto keys = [&](const Strided& s) { return in_pieces(s, problem.dtype, problem.key_dim); };
  const auto values = [&](const Strided& s) { return in_pieces(s, problem.dtype, problem.value_dim); };
  return keys(p.q) && keys(p.k) && values(p.v) && values(p.o) && key_gates_in_pieces(problem, p.g);
}
bool in_pieces(const Problem& problem, const Gradients& d) {
  const auto keys = [&](const Strided& s) { return in_pieces(s, problem.dtype, problem.key_dim); };
  const auto values = [&](const Strided& s) { return in_pieces(s, problem.dtype, problem.value_dim); };
  return keys(d.dq) && keys(d.dk) && values(d.dv) && values(d.d_o) && key_gates_in_pieces(problem, d.dg);
}

// call(kernel): a SplitKernel. Of those that take elements one by one there are no others than on mma.sync.
template <class Core, class Call>
void with_typed_kernel(const Problem& problem, Call call) {
  if (problem.dtype == DType::f16) return call(SplitKernel<Core, __half, 2>());
  parts_of(problem) == 3 ? call(SplitKernel<Core, float, 3>()) : call(SplitKernel<Core, float, 2>());
}
template <class Call>
void with_kernel(const Problem& problem, bool in_pieces, bool hopper, Call call) {
  if (in_pieces)
    return hopper ? with_typed_kernel<TensorCore90>(problem, call) : with_typed_kernel<TensorCore80>(problem, call);
  parts_of(problem) == 3 ? call(SplitKernel<TensorCore80, AnyElement, 3>())
                         : call(SplitKernel<TensorCore80, AnyElement, 2>());
}

}  // namespace

std::size_t split_states_bytes(const Problem& problem) {
  return static_cast<std::size_t>(most_chunks(problem) * problem.heads * tiles_of_a_state(problem) * parts_of(problem) *
                                  kImageBytes);
}

bool backward_fits_f32_tiles(const Problem& problem, const Architecture& architecture) {
  return goes_by_chunks(problem) &&
         architecture.shared_memory >= split_gradients_shared(parts_of(problem), problem.group() > 1);
}

void forward_in_f32_tiles(Context& context, const Problem& problem, const Params& params, bool hopper) {
  const bool pieces = in_pieces(problem, params);
  const auto run = [&](auto kernel) { forward<decltype(kernel)>(context, problem, params); };
  if (problem.dtype != DType::bf16 || !pieces) return with_kernel(problem, pieces, hopper, run);
  hopper ? run(SplitKernel<TensorCore90, __nv_bfloat16, 2>()) : run(SplitKernel<TensorCore80, __nv_bfloat16, 2>());
}

void backward_in_f32_tiles(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                           const OutputGradients& d_out, const InputGradients& d_in, bool hopper) {
  const bool pieces = problem.dtype != DType::bf16 && in_pieces(problem, make_params(problem, inputs, outputs)) &&
                      in_pieces(problem, gradients_of(problem, d_out, d_in));
  with_kernel(problem, pieces, hopper,
              [&](auto kernel) { backward<decltype(kernel)>(context, problem, inputs, outputs, d_out, d_in); });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

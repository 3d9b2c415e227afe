#include "flashgla/ops/gated_linear_attention/cpu/chunk.h"

#include <vector>

#include "flashgla/ops/gated_linear_attention/cpu/chunk_problem.h"
#include "flashgla/ops/gated_linear_attention/sequences.h"
#include "flashgla/ops/gated_linear_attention/workers.h"

namespace flashgla::ops::gated_linear_attention::chunk {

namespace {

// Rows of a sequence's first token at one head of [B,T,heads,channels], [B,T,heads] or [heads].
Rows rows_of(const TensorView& view, const Sequence& sequence, std::int64_t head) {
  if (!view) return {};
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  auto* data = static_cast<std::byte*>(view.data);
  if (view.rank() == 1) return {data + head * view.stride[0] * size, 0, 0, view.dtype};
  data += (sequence.batch * view.stride[0] + sequence.begin * view.stride[1] + head * view.stride[2]) * size;
  return {data, view.stride[1] * size, view.stride[2] * size, view.dtype};
}

// The state of one sequence and head: [N,G,K,V] or [N,G,K].
float* state_of(const TensorView& view, std::int64_t n, std::int64_t head) {
  return view ? view.as<float>() + n * view.stride[0] + head * view.stride[1] : nullptr;
}

std::int64_t segments(std::int64_t length) { return (length + kSegment - 1) / kSegment; }

// No fewer segments than the sequences have, however the tokens are shared between them.
std::int64_t most_segments(const Problem& p) {
  return p.packed ? p.length / kSegment + p.sequences : p.sequences * segments(p.length);
}

std::size_t kept_bytes(const Problem& p) {
  return static_cast<std::size_t>(most_segments(p) * p.heads * Shapes(p).state_floats()) * sizeof(float);
}

// A problem's sequences, and for each of them and each head the place of its kept states.
struct Layout {
  std::vector<Sequence> sequences;
  std::vector<std::int64_t> first_segment;

  Layout(const Problem& p, const TensorView& cu_seqlens) {
    std::int64_t segment = 0;
    for (std::int64_t n = 0; n < p.sequences; ++n) {
      sequences.push_back(sequence_of(p, cu_seqlens, n));
      first_segment.push_back(segment);
      segment += segments(sequences.back().length());
    }
  }
  float* states(float* memory, const Problem& p, const Shapes& s, std::int64_t n, std::int64_t head) const {
    if (memory == nullptr) return nullptr;
    return memory + (first_segment[n] * p.heads + head * segments(sequences[n].length())) * s.state_floats();
  }
};

ForwardTask forward_task_of(const Problem& p, const Inputs& in, const Layout& layout, std::int64_t item) {
  const std::int64_t n = item / p.heads;
  const std::int64_t head = item % p.heads;
  const Sequence& sequence = layout.sequences[n];
  ForwardTask task;
  task.length = sequence.length();
  task.q = rows_of(in.q, sequence, head * p.group());
  task.k = rows_of(in.k, sequence, head);
  task.v = rows_of(in.v, sequence, head);
  task.g = rows_of(in.g, sequence, head);
  task.gv = rows_of(in.gv, sequence, head);
  task.h0 = state_of(in.h0, n, head);
  task.z0 = state_of(in.z0, n, head);
  return task;
}

void run_forward(const Problem& p, const Inputs& in, const Outputs& out, const Layout& layout, const Workers& workers,
                 float* states) {
  const Shapes shapes(p);
  workers.run([&](std::int64_t item, std::byte* memory) {
    const std::int64_t n = item / p.heads;
    const std::int64_t head = item % p.heads;
    ForwardTask task = forward_task_of(p, in, layout, item);
    task.o = rows_of(out.o, layout.sequences[n], head * p.group());
    task.ht = state_of(out.ht, n, head);
    task.zt = state_of(out.zt, n, head);
    task.states = layout.states(states, p, shapes, n, head);
    forward_task(shapes, task, reinterpret_cast<float*>(memory));
  });
}

}  // namespace

Support supports(const Problem& p, const Architecture&) {
  if (p.dtype == DType::f64) return Support::no("computes in f32; not for f64");
  if (p.algorithm == Algorithm::recurrent || p.algorithm == Algorithm::parallel) {
    return Support::no(std::string("is the chunk form, not the ") + name_of(p.algorithm) + " one");
  }
  return Support::yes();
}

std::size_t states_bytes(const Problem& p) { return p.algorithm == Algorithm::chunk_recomputed ? 0 : kept_bytes(p); }

void forward(Context& context, const Problem& p, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  const Workers workers(context, p.sequences * p.heads,
                        static_cast<std::size_t>(forward_workspace(Shapes(p))) * sizeof(float));
  if (context.planning()) return;
  run_forward(p, in, out, Layout(p, in.cu_seqlens), workers, static_cast<float*>(out.states.data));
}

void backward(Context& context, const Problem& p, const Inputs& in, const Outputs& out, const OutputGradients& d_out,
              const InputGradients& d_in) {
  const Shapes shapes(p);
  const ArenaScope scope(context.scratch());
  Arena& scratch = context.scratch();
  const std::int64_t items = p.sequences * p.heads;
  auto* states =
      static_cast<float*>(out.states ? out.states.data : scratch.allocate(kept_bytes(p), "recomputed states"));
  auto* dg_sums =
      static_cast<double*>(scratch.allocate(static_cast<std::size_t>(items) * sizeof(double), "gate gradients"));
  const std::int64_t workspace = std::max(forward_workspace(shapes), backward_workspace(shapes));
  const Workers workers(context, items, static_cast<std::size_t>(workspace) * sizeof(float));
  if (context.planning()) return;
  const Layout layout(p, in.cu_seqlens);
  if (!out.states) run_forward(p, in, Outputs{}, layout, workers, states);

  const bool constant = p.gate == GateKind::constant && d_in.dg;
  workers.run([&](std::int64_t item, std::byte* memory) {
    const std::int64_t n = item / p.heads;
    const std::int64_t head = item % p.heads;
    const Sequence& sequence = layout.sequences[n];
    const ForwardTask inputs = forward_task_of(p, in, layout, item);
    BackwardTask task;
    task.length = inputs.length;
    task.q = inputs.q;
    task.k = inputs.k;
    task.v = inputs.v;
    task.g = inputs.g;
    task.gv = inputs.gv;
    task.o = rows_of(out.o, sequence, head * p.group());
    task.d_o = rows_of(d_out.d_o, sequence, head * p.group());
    task.dq = rows_of(d_in.dq, sequence, head * p.group());
    task.dk = rows_of(d_in.dk, sequence, head);
    task.dv = rows_of(d_in.dv, sequence, head);
    if (!constant) task.dg = rows_of(d_in.dg, sequence, head);
    task.dgv = rows_of(d_in.dgv, sequence, head);
    task.d_ht = state_of(d_out.d_ht, n, head);
    task.d_zt = state_of(d_out.d_zt, n, head);
    task.dh0 = state_of(d_in.dh0, n, head);
    task.dz0 = state_of(d_in.dz0, n, head);
    if (constant) task.dg_sum = dg_sums + item;
    task.states = layout.states(states, p, shapes, n, head);
    backward_task(shapes, task, reinterpret_cast<float*>(memory));
  });
  if (constant) {
    for (std::int64_t head = 0; head < p.heads; ++head) {
      double sum = 0.0;
      for (std::int64_t n = 0; n < p.sequences; ++n) sum += dg_sums[n * p.heads + head];
      d_in.dg.as<float>()[head * d_in.dg.stride[0]] = static_cast<float>(sum);
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::chunk

#include <vector>

#include "flashgla/ops/gated_linear_attention/cpu/chunk_problem.h"
#include "flashgla/ops/gated_linear_attention/cpu/cpu.h"

namespace flashgla::ops::gated_linear_attention::chunk {

namespace {

std::int64_t segments(std::int64_t length) { return (length + kSegment - 1) / kSegment; }

// No fewer segments than the sequences have, however the tokens are shared between them.
std::int64_t most_segments(const Problem& p) {
  return p.packed ? p.length / kSegment + p.sequences : p.sequences * segments(p.length);
}

std::size_t kept_bytes(const Problem& p) {
  return static_cast<std::size_t>(most_segments(p) * p.heads * Shapes(p).state_floats()) * sizeof(float);
}

// A problem's sequences and segments, and the place of their kept states: [segments of n][...] for each n and head.
struct Layout {
  std::vector<Sequence> sequences;
  std::vector<std::int64_t> first_segment;
  std::vector<std::int64_t> sequence_of_segment;

  Layout(const Problem& p, const TensorView& cu_seqlens) {
    for (std::int64_t n = 0; n < p.sequences; ++n) {
      sequences.push_back(sequence_of(p, cu_seqlens, n));
      first_segment.push_back(static_cast<std::int64_t>(sequence_of_segment.size()));
      sequence_of_segment.resize(sequence_of_segment.size() + segments(sequences.back().length()), n);
    }
  }
  std::int64_t kept_index(const Problem& p, std::int64_t n, std::int64_t head) const {
    return first_segment[n] * p.heads + head * segments(sequences[n].length());
  }
};

// One call's problem, data and ways to share it between threads.
struct Job {
  Context& context;
  const Problem& p;
  const Inputs& in;
  const Shapes shapes;
  const std::int64_t items;  // sequences times heads
  // When the items are fewer than the threads: first the states, whose recurrence runs over time but shares the value
  // channels between tasks, then all segments at once from their true states. What is computed is the same, bit by bit.
  const bool by_segments;
  const std::int64_t slices;

  Job(Context& c, const Problem& problem, const Inputs& inputs, bool segments_possible)
      : context(c),
        p(problem),
        in(inputs),
        shapes(problem),
        items(problem.sequences * problem.heads),
        by_segments(segments_possible && items < c.threads() && most_segments(problem) > problem.sequences),
        slices(!by_segments || shapes.normalize || shapes.gate_values
                   ? 1
                   : std::min((c.threads() + items - 1) / items, padded(shapes.V) / kLane)) {}

  Workers workers(std::int64_t tasks, std::int64_t floats) const {
    return {context, tasks, static_cast<std::size_t>(floats) * sizeof(float)};
  }
  std::int64_t segment_tasks() const { return most_segments(p) * p.heads; }
  // Value channels [first, first + count) of a slice.
  std::pair<std::int64_t, std::int64_t> slice(std::int64_t index) const {
    if (slices == 1) return {0, shapes.V};
    const std::int64_t width = padded((shapes.V + slices - 1) / slices);
    const std::int64_t first = std::min(index * width, shapes.V);
    return {first, std::min(width, shapes.V - first)};
  }
};

// Rows [..][V] from value channel `first` on.
Rows from_channel(Rows rows, std::int64_t first) {
  if (rows) rows.data += first * static_cast<std::int64_t>(size_of(rows.dtype));
  return rows;
}

// body(task index within the segments' tasks, n, head, segment of n).
template <class Body>
void for_each_segment(const Job& job, const Layout& layout, const Workers& workers, Body&& body) {
  workers.run([&](std::int64_t task, std::byte* memory) {
    const std::int64_t index = task / job.p.heads;
    if (index >= static_cast<std::int64_t>(layout.sequence_of_segment.size())) return;
    const std::int64_t n = layout.sequence_of_segment[index];
    body(n, task % job.p.heads, index - layout.first_segment[n], reinterpret_cast<float*>(memory));
  });
}

// Passes over the sequences' time: outputs where out.o is given, final states, kept states.
void run_forward(const Job& job, const Layout& layout, const Workers& workers, const Outputs& out, float* states) {
  workers.run([&](std::int64_t index, std::byte* memory) {
    const std::int64_t item = index / job.slices;
    const std::int64_t n = item / job.p.heads;
    const std::int64_t head = item % job.p.heads;
    const auto [first, count] = job.slice(index % job.slices);
    if (count == 0 && job.slices > 1) return;
    ForwardTask task{{job.p, job.in, out, n, head}};
    task.in.v = from_channel(task.in.v, first);
    if (task.h0 != nullptr) task.h0 += first;
    if (task.ht != nullptr) task.ht += first;
    if (states != nullptr) {
      task.states = states + layout.kept_index(job.p, n, head) * job.shapes.kept_floats + first * job.shapes.ldk;
    }
    forward_task(job.slices == 1 ? job.shapes : job.shapes.slice(count), task, reinterpret_cast<float*>(memory));
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
  const Job job(context, p, in, true);
  const std::int64_t workspace = forward_workspace(job.shapes);
  auto* states = static_cast<float*>(out.states.data);
  if (job.by_segments && states == nullptr) {
    states = static_cast<float*>(context.scratch().allocate(kept_bytes(p), "states"));
  }
  const Workers over_time = job.workers(job.items * job.slices, workspace);
  const Workers over_segments = job.workers(job.by_segments ? job.segment_tasks() : 0, workspace);
  if (context.planning()) return;
  const Layout layout(p, in.cu_seqlens);
  Outputs now = out;
  if (job.by_segments) now.o = {};
  run_forward(job, layout, over_time, now, states);
  if (!job.by_segments) return;
  for_each_segment(job, layout, over_segments,
                   [&](std::int64_t n, std::int64_t head, std::int64_t segment, float* memory) {
                     ForwardTask task{{p, in, {.o = out.o}, n, head}};
                     const std::int64_t begin = segment * kSegment;
                     task.in.advance(begin);
                     task.o.advance(begin);
                     task.length = std::min(kSegment, task.length - begin);
                     task.start = states + (layout.kept_index(p, n, head) + segment) * job.shapes.kept_floats;
                     forward_task(job.shapes, task, memory);
                   });
}

void backward(Context& context, const Problem& p, const Inputs& in, const Outputs& out, const OutputGradients& d_out,
              const InputGradients& d_in) {
  const ArenaScope scope(context.scratch());
  Arena& scratch = context.scratch();
  const Job job(context, p, in, !p.normalize);
  const Shapes& shapes = job.shapes;
  auto* states = static_cast<float*>(out.states ? out.states.data : scratch.allocate(kept_bytes(p), "states"));
  auto* d_states =
      job.by_segments ? static_cast<float*>(scratch.allocate(kept_bytes(p), "gradients of states")) : nullptr;
  auto* dg_sums = static_cast<double*>(
      scratch.allocate(static_cast<std::size_t>(job.segment_tasks()) * sizeof(double), "gate gradients"));
  const std::int64_t workspace = std::max(forward_workspace(shapes), backward_workspace(shapes));
  const Workers over_time = job.workers(job.items * job.slices, workspace);
  const Workers over_segments = job.workers(job.by_segments ? job.segment_tasks() : 0, workspace);
  if (context.planning()) return;
  const Layout layout(p, in.cu_seqlens);
  if (!out.states) run_forward(job, layout, over_time, Outputs{}, states);

  const bool constant = p.gate == GateKind::constant && d_in.dg;
  auto task_of = [&](std::int64_t n, std::int64_t head) {
    const std::int64_t kept = layout.kept_index(p, n, head);
    BackwardTask task{{p, in, out, d_out, d_in, n, head, constant ? dg_sums : nullptr}};
    if (constant) task.dg_sum = dg_sums + kept;
    task.states = states + kept * shapes.kept_floats;
    return task;
  };
  if (!job.by_segments) {
    over_time.run([&](std::int64_t item, std::byte* memory) {
      backward_task(shapes, task_of(item / p.heads, item % p.heads), reinterpret_cast<float*>(memory));
    });
  } else {
    over_time.run([&](std::int64_t index, std::byte* memory) {
      const std::int64_t item = index / job.slices;
      const std::int64_t n = item / p.heads;
      const std::int64_t head = item % p.heads;
      const auto [first, count] = job.slice(index % job.slices);
      if (count == 0 && job.slices > 1) return;
      BackwardTask task = task_of(n, head);
      task.d_o = from_channel(task.d_o, first);
      if (task.d_ht != nullptr) task.d_ht += first;
      if (task.dh0 != nullptr) task.dh0 += first;
      task.d_states = d_states + layout.kept_index(p, n, head) * shapes.kept_floats + first * shapes.ldk;
      backward_states_task(job.slices == 1 ? shapes : shapes.slice(count), task, reinterpret_cast<float*>(memory));
    });
    for_each_segment(job, layout, over_segments,
                     [&](std::int64_t n, std::int64_t head, std::int64_t segment, float* memory) {
                       BackwardTask task = task_of(n, head);
                       const std::int64_t begin = segment * kSegment;
                       task.in.advance(begin);
                       for (Rows* rows : {&task.o, &task.d_o, &task.dq, &task.dk, &task.dv, &task.dg, &task.dgv}) {
                         rows->advance(begin);
                       }
                       task.length = std::min(kSegment, task.length - begin);
                       task.d_end = d_states + (layout.kept_index(p, n, head) + segment) * shapes.kept_floats;
                       task.dh0 = nullptr;
                       task.states += segment * shapes.kept_floats;
                       if (constant) task.dg_sum += segment;
                       backward_task(shapes, task, memory);
                     });
  }
  if (constant) {
    for (std::int64_t head = 0; head < p.heads; ++head) {
      double sum = 0.0;
      for (std::int64_t n = 0; n < p.sequences; ++n) {
        const double* terms = dg_sums + layout.kept_index(p, n, head);
        for (std::int64_t segment = 0; segment < segments(layout.sequences[n].length()); ++segment) {
          sum += terms[segment];
        }
      }
      d_in.dg.as<float>()[head * d_in.dg.stride[0]] = static_cast<float>(sum);
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::chunk

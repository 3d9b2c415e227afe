// The decoding step, beside a ring or not: validate -> select -> run.
#include <algorithm>
#include <span>

#include "flashgla/ops/gated_linear_attention/checks.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"
#include "flashgla/ops/gated_linear_attention/logits.h"
#include "flashgla/ops/gated_linear_attention/reference.h"
#include "flashgla/ops/gated_linear_attention/ring.h"

namespace flashgla::ops::gated_linear_attention {

namespace {

// Of what a step reads or writes beside the tokens, which may be of another dtype than they.
void check_kept(const char* name, const TensorView& view, const Shape& shape, const char* symbols, const Problem& p,
                Device device) {
  check_present(name, view);
  check_device(name, view, device);
  check_shape(name, view, shape, symbols);
  const bool good =
      p.dtype == DType::f64 ? view.dtype == DType::f64 : view.dtype == DType::f32 || view.dtype == DType::bf16;
  if (!good) {
    refuse(name, std::string("has dtype ") + name_of(view.dtype), p.dtype == DType::f64 ? "f64 (as q)" : "f32 or bf16");
  }
  check_contiguous(name, view);
}

void check_projection(const Problem& p, const StepInputs& in) {
  const GateProjection& gate = in.projection;
  check_absent("g", in.g, "only without a gate's projection");
  check_absent("gv", in.gv, "only without a gate's projection");
  if (!p.has_logits()) refuse("projection", "is present", "none without gate_logit_normalizer");
  check_present("projection.x", gate.x);
  if (gate.x.rank() != 2 || gate.x.size(1) < 1) {
    refuse("projection.x", "has shape " + to_string(gate.x.shape), "[B,R] with R of at least 1");
  }
  check_device("projection.x", gate.x, in.q.device);
  check_dtype("projection.x", gate.x, p.dtype, "as q");
  check_shape("projection.x", gate.x, Shape({p.batch, gate.x.size(1)}), "B,R");
  if (gate.x.stride[1] != 1) refuse("projection.x", "is strided along R", "contiguous rows");
  check_kept("projection.weight", gate.weight, Shape({p.heads * p.key_dim, gate.x.size(1)}), "G K,R", p, in.q.device);
  if (gate.bias) check_kept("projection.bias", gate.bias, Shape({p.heads * p.key_dim}), "G K", p, in.q.device);
}

// Rows with a step, best first, and the one of them for a problem.
const Implementation& choose_step(const Context& context, const Problem& p) {
  static const auto rows = implementations_with([](const Implementation& row) { return row.step != nullptr; });
  return select(kOperation, std::span<const Implementation>(rows), p, context.architecture(),
                context.forced_implementation());
}

Problem describe_step(const StepInputs& in, const Options& options) {
  // A gate that is projected has k's shape and dtype.
  Problem p = describe_tokens(in.q, in.k, in.v, in.projection.weight ? in.k : in.g, in.gv, options, false);
  p.algorithm = Algorithm::automatic;  // one token has one algorithm
  return p;
}

bool projects(const Context& context, const Implementation& row, const Problem& p, const StepInputs& in, DType state) {
  return row.takes_projection != nullptr && row.takes_projection(context, p, in.projection, state);
}

}  // namespace

bool step_projects(const Context& context, const StepInputs& in, const TensorView& h, const Options& options) {
  const Problem p = describe_step(in, options);
  check_projection(p, in);
  return projects(context, choose_step(context, p), p, in, h.dtype);
}

namespace {

void check_positions_of(const Ring& ring, std::int64_t sequences, Device device) {
  check_present("ring.positions", ring.positions);
  check_device("ring.positions", ring.positions, device);
  check_shape("ring.positions", ring.positions, Shape({sequences}), "B");
  if (ring.positions.dtype != DType::i32) {
    refuse("ring.positions", std::string("has dtype ") + name_of(ring.positions.dtype), "i32");
  }
  check_contiguous("ring.positions", ring.positions);
}

// Of states h [B,G,K,V].
void check_ring(const Ring& ring, const TensorView& h) {
  check_present("ring.inputs", ring.inputs);
  check_device("ring.inputs", ring.inputs, h.device);
  check_shape("ring.inputs", ring.inputs, Shape({h.size(0), h.size(1), kRing, 2 * h.size(2) + h.size(3)}),
              "B,G,16,2K+V");
  if (h.dtype != DType::f32 && h.dtype != DType::f64) {
    refuse("h", std::string("has dtype ") + name_of(h.dtype), "f32 or f64 beside a ring");
  }
  check_dtype("ring.inputs", ring.inputs, h.dtype, "as h");
  check_contiguous("ring.inputs", ring.inputs);
  check_positions_of(ring, h.size(0), h.device);
}

void run_step(Context& context, const StepInputs& in, const Ring& ring, const TensorView& h, const TensorView& z,
              const TensorView& o, const Options& options) {
  const Problem p = describe_step(in, options);
  if (in.projection.weight) check_projection(p, in);
  const Device device = in.q.device;
  const Shapes shapes{p, false};
  check_context(context, in.q);
  check_tokens("o", o, shapes.tokens(p.query_heads, p.value_dim), "q's with v's channels", p.dtype, device);
  check_not_broadcast("o", o);
  if (ring && p.normalize) refuse("normalize", "is true", "false beside a ring");
  check_kept("h", h, shapes.h(), "B,G,K,V", p, device);
  if (p.normalize) {
    check_kept("z", z, shapes.z(), "B,G,K", p, device);
    if (z.dtype != h.dtype) check_dtype("z", z, h.dtype, "as h");
  } else {
    check_absent("z", z, "only with normalize");
  }
  if (ring) {
    check_ring(ring, h);
    check_absent("gv", in.gv, "none beside a ring");
  }
  const Implementation& row = choose_step(context, p);
  if (in.projection.weight && !projects(context, row, p, in, h.dtype)) {
    refuse("projection", std::string("is one that ") + row.name + " does not compute", "log gates (step_projects)");
  }
  ArenaScope scope(context.scratch());
  const auto run = [&](const Problem& problem, const StepInputs& inputs) {
    if (ring && row.takes_ring != nullptr && row.takes_ring(problem)) {
      return row.step_with_ring(context, problem, inputs, ring, h, o);
    }
    if (ring) {
      fold(context, ring, h, h);
      if (!context.planning()) context.queue().zero(ring.inputs.data, ring.inputs.bytes());
    }
    row.step(context, problem, inputs, h, z, o);
  };
  if (in.projection.weight || !p.has_logits() || row.step == reference::step) return run(p, in);
  step_with_gates(context, p, with_gates(p), in, run);
}

}  // namespace

void step(Context& context, const StepInputs& in, const TensorView& h, const TensorView& z, const TensorView& o,
          const Options& options) {
  run_step(context, in, {}, h, z, o, options);
}

void step(Context& context, const StepInputs& in, const Ring& ring, const TensorView& h, const TensorView& o,
          const Options& options) {
  if (!ring) refuse("ring.inputs", "is absent", "a tensor");
  run_step(context, in, ring, h, {}, o, options);
}

bool ring_pays(Device device, std::int64_t batch) {
  constexpr std::int64_t kLeast = 16;  // cuda/recurrent/LOG.md
  return device.kind == Device::Kind::cuda && batch >= kLeast;
}

void fold(Context& context, const Ring& ring, const TensorView& h, const TensorView& to) {
  check_present("h", h);
  if (h.rank() != 4) refuse("h", "has shape " + to_string(h.shape), "rank 4 [B,G,K,V]");
  check_contiguous("h", h);
  check_ring(ring, h);
  check_present("to", to);
  check_device("to", to, h.device);
  check_shape("to", to, h.shape, "as h");
  check_dtype("to", to, h.dtype, "as h");
  check_contiguous("to", to);
  check_context(context, h);
  const auto rows = implementations();
  const auto row = std::ranges::find_if(
      rows, [&](const Implementation& each) { return each.device == h.device.kind && each.fold != nullptr; });
  row->fold(context, ring, h, to);
}

}  // namespace flashgla::ops::gated_linear_attention

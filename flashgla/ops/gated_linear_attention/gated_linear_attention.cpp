// validate -> select -> run. Everything behind this file may rely on its
// arguments.
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "flashgla/base/names.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"
#include "flashgla/ops/gated_linear_attention/logits.h"
#include "flashgla/ops/gated_linear_attention/reference.h"

namespace flashgla::ops::gated_linear_attention {

namespace {

constexpr const char* kOperation = "gated_linear_attention";

constexpr std::array<const char*, 5> kGateNames = {"none", "constant", "scalar", "key", "key_value"};
constexpr std::array<const char*, 5> kAlgorithmNames = {"automatic", "recurrent", "parallel", "chunk_materialized",
                                                        "chunk_recomputed"};
constexpr std::array<const char*, 3> kFeatureMapNames = {"identity", "elu_plus_one", "relu"};

template <class E, std::size_t N>
E from_name(const char* argument, std::string_view name, const std::array<const char*, N>& names) {
  std::string known;
  for (std::size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<E>(i);
    known += std::string(i == 0 ? "" : ", ") + names[i];
  }
  throw Error(kOperation, argument, "is '" + std::string(name) + "'", "one of " + known);
}

[[noreturn]] void refuse(const char* argument, const std::string& actual, const std::string& expected) {
  throw Error(kOperation, argument, actual, expected);
}

void check_present(const char* name, const TensorView& view) {
  if (!view) refuse(name, "is absent", "a tensor");
}

void check_absent(const char* name, const TensorView& view, const char* reason) {
  if (view) refuse(name, "is given", std::string("absent: ") + reason);
}

void check_shape(const char* name, const TensorView& view, const Shape& expected, const char* symbols) {
  if (!(view.shape == expected)) {
    refuse(name, "has shape " + to_string(view.shape), to_string(expected) + " (" + symbols + ")");
  }
}

void check_dtype(const char* name, const TensorView& view, DType expected, const char* why) {
  if (view.dtype != expected) {
    refuse(name, std::string("has dtype ") + name_of(view.dtype), std::string(name_of(expected)) + " (" + why + ")");
  }
}

void check_device(const char* name, const TensorView& view, Device device) {
  if (view.device != device) refuse(name, "is on " + name_of(view.device), name_of(device));
}

void check_last_contiguous(const char* name, const TensorView& view) {
  if (view.size(-1) > 1 && view.stride[view.rank() - 1] != 1) {
    refuse(name, "has stride " + std::to_string(view.stride[view.rank() - 1]) + " in its last dimension", "1");
  }
}

void check_contiguous(const char* name, const TensorView& view) {
  if (!view.is_contiguous()) refuse(name, "is strided", "a contiguous tensor");
}

// Every element of something written needs an address of its own.
void check_not_broadcast(const char* name, const TensorView& view) {
  for (int i = 0; i < view.rank(); ++i) {
    if (view.size(i) > 1 && view.stride[i] == 0) {
      refuse(name, "has stride 0 in dimension " + std::to_string(i), "distinct elements, as it is written");
    }
  }
}

void check_shared_by_heads(const char* name, const TensorView& view) {
  if (view.size(-2) > 1 && view.stride[view.rank() - 2] != 0) {
    refuse(name, "has stride " + std::to_string(view.stride[view.rank() - 2]) + " over its heads",
           "0 with sums_over_heads");
  }
}

DType state_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// Shapes of one call: tokens are [B,T,...] for forward and backward and [B,...]
// for step.
struct Shapes {
  const Problem& p;
  bool has_time;

  Shape tokens(std::int64_t heads) const {
    return has_time ? Shape({p.batch, p.length, heads}) : Shape({p.batch, heads});
  }
  Shape tokens(std::int64_t heads, std::int64_t channels) const {
    return has_time ? Shape({p.batch, p.length, heads, channels}) : Shape({p.batch, heads, channels});
  }
  Shape g() const {
    switch (p.gate) {
      case GateKind::none:
        return Shape();
      case GateKind::constant:
        return Shape({p.heads});
      case GateKind::scalar:
        return tokens(p.heads);
      case GateKind::key:
      case GateKind::key_value:
        return tokens(p.heads, p.key_dim);
    }
    return Shape();
  }
  Shape h() const { return Shape({p.sequences, p.heads, p.key_dim, p.value_dim}); }
  Shape z() const { return Shape({p.sequences, p.heads, p.key_dim}); }
};

// An operand of the token kind in the inputs' dtype.
void check_tokens(const char* name, const TensorView& view, const Shape& shape, const char* symbols, DType dtype,
                  Device device) {
  check_present(name, view);
  check_device(name, view, device);
  check_shape(name, view, shape, symbols);
  check_dtype(name, view, dtype, "as q");
  check_last_contiguous(name, view);
}

void check_state(const char* name, const TensorView& view, const Shape& shape, const char* symbols, const Problem& p,
                 Device device) {
  check_device(name, view, device);
  check_shape(name, view, shape, symbols);
  check_dtype(name, view, state_dtype(p.dtype), "states are f32, f64 with f64");
  check_contiguous(name, view);
}

// What forward, backward and step have in common: q, k, v, g, gv and the
// options.
Problem describe_tokens(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                        const TensorView& gv, const Options& options, bool has_time) {
  const int rank = has_time ? 4 : 3;
  check_present("q", q);
  check_present("k", k);
  check_present("v", v);
  const char* ranks[2] = {"[B,H,K]", "[B,T,H,K]"};
  const std::pair<const char*, const TensorView*> operands[] = {{"q", &q}, {"k", &k}, {"v", &v}};
  for (const auto& [name, view] : operands) {
    if (view->rank() != rank) {
      refuse(name, "has shape " + to_string(view->shape),
             std::string("rank ") + std::to_string(rank) + ", as q " + ranks[has_time]);
    }
    for (int i = 0; i < rank; ++i) {
      if (view->size(i) < 1) refuse(name, "has shape " + to_string(view->shape), "sizes of at least 1");
    }
  }
  if (!is_floating(q.dtype)) refuse("q", std::string("has dtype ") + name_of(q.dtype), "f64, f32, bf16 or f16");

  Problem p;
  p.batch = q.size(0);
  p.length = has_time ? q.size(1) : 1;
  p.query_heads = q.size(-2);
  p.heads = k.size(-2);
  p.key_dim = q.size(-1);
  p.value_dim = v.size(-1);
  p.sequences = p.batch;
  p.dtype = q.dtype;
  if (p.query_heads % p.heads != 0) {
    refuse("k", "has " + std::to_string(p.heads) + " heads", "a divisor of q's " + std::to_string(p.query_heads));
  }
  const Shapes shapes{p, has_time};
  check_tokens("q", q, shapes.tokens(p.query_heads, p.key_dim), "q", p.dtype, q.device);
  check_tokens("k", k, shapes.tokens(p.heads, p.key_dim), "q's but for the heads", p.dtype, q.device);
  check_tokens("v", v, shapes.tokens(p.heads, p.value_dim), "k's but for the channels", p.dtype, q.device);

  p.gate_dtype = state_dtype(p.dtype);
  auto check_gate_dtype = [&](const char* name, const TensorView& view) {
    if (view.dtype != p.dtype && view.dtype != state_dtype(p.dtype)) {
      refuse(name, std::string("has dtype ") + name_of(view.dtype),
             std::string(name_of(p.dtype)) + " (as q)" + (p.dtype == DType::f64 ? "" : " or f32"));
    }
  };
  if (g) {
    if (g.rank() == 1) {
      p.gate = GateKind::constant;
    } else if (g.rank() == rank - 1) {
      p.gate = GateKind::scalar;
    } else if (g.rank() == rank) {
      p.gate = GateKind::key;
    } else {
      refuse("g", "has shape " + to_string(g.shape),
             has_time ? "rank 1 [G], 3 [B,T,G] or 4 [B,T,G,K]" : "rank 1 [G], 2 [B,G] or 3 [B,G,K]");
    }
    check_device("g", g, q.device);
    check_shape("g", g, shapes.g(), "as k");
    check_gate_dtype("g", g);
    if (p.gate == GateKind::key) check_last_contiguous("g", g);
    p.gate_dtype = g.dtype;
  }
  if (gv) {
    if (p.gate != GateKind::none && p.gate != GateKind::key) {
      refuse("g", "has shape " + to_string(g.shape), "a key gate or none beside gv");
    }
    p.gate = GateKind::key_value;
    check_device("gv", gv, q.device);
    check_shape("gv", gv, shapes.tokens(p.heads, p.value_dim), "as v");
    check_gate_dtype("gv", gv);
    if (g) check_dtype("gv", gv, g.dtype, "as g");
    check_last_contiguous("gv", gv);
    p.gate_dtype = gv.dtype;
  }

  if (!std::isfinite(options.scale)) refuse("scale", "is not finite", "a finite number, or 0 for K^-1/2");
  if (options.normalize && p.gate != GateKind::none) {
    refuse("normalize", std::string("is set with a ") + name_of(p.gate) + " gate", "no gate");
  }
  p.scale = options.scale == 0.0 ? 1.0 / std::sqrt(static_cast<double>(p.key_dim)) : options.scale;
  p.algorithm = options.algorithm;
  p.feature_map = options.feature_map;
  p.normalize = options.normalize;
  p.float32_math = options.float32_math;
  if (!(options.gate_logit_normalizer >= 0.0) || !std::isfinite(options.gate_logit_normalizer)) {
    refuse("gate_logit_normalizer", "is " + std::to_string(options.gate_logit_normalizer),
           "a finite number above 0, or 0 where g and gv are log gates");
  }
  if (!(options.gate_clamp_min <= 0.0)) {
    refuse("gate_clamp_min", "is " + std::to_string(options.gate_clamp_min), "a log gate: at most 0");
  }
  if (options.gate_logit_normalizer == 0.0 && options.gate_clamp_min != kNoClamp) {
    refuse("gate_clamp_min", "is given", "absent: only with gate_logit_normalizer");
  }
  if (options.gate_logit_normalizer > 0.0 && (p.gate == GateKind::none || p.gate == GateKind::constant)) {
    refuse("gate_logit_normalizer",
           std::string("is set with ") + (p.gate == GateKind::none ? "no" : "a constant") + " gate", "gates of tokens");
  }
  p.gate_logit_normalizer = options.gate_logit_normalizer;
  p.gate_clamp_min = options.gate_clamp_min;
  return p;
}

void check_context(const Context& context, const TensorView& q) {
  if (q.device != context.device())
    refuse("q", "is on " + name_of(q.device), name_of(context.device()) + " (the context's device)");
}

// The values of cu_seqlens: only where the CPU can read them.
void check_cu_seqlens(const Context& context, const Problem& p, const TensorView& cu_seqlens) {
  if (!p.packed || context.planning() || cu_seqlens.device.kind != Device::Kind::cpu) return;
  auto at = [&](std::int64_t n) { return static_cast<std::int64_t>(load_element(cu_seqlens, std::array{n})); };
  if (at(0) != 0) refuse("cu_seqlens", "begins with " + std::to_string(at(0)), "0");
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    if (at(n + 1) < at(n)) {
      refuse(
          "cu_seqlens",
          "falls from " + std::to_string(at(n)) + " to " + std::to_string(at(n + 1)) + " at " + std::to_string(n + 1),
          "values that do not decrease");
    }
  }
  for (std::int64_t n = 0; p.max_seqlen > 0 && n < p.sequences; ++n) {
    const std::int64_t length = at(n + 1) - at(n);
    if (length > p.max_seqlen) {
      refuse("max_seqlen", "is " + std::to_string(p.max_seqlen),
             "at least " + std::to_string(length) + ", the tokens of sequence " + std::to_string(n));
    }
  }
  if (at(p.sequences) != p.length) {
    refuse("cu_seqlens", "ends at " + std::to_string(at(p.sequences)), std::to_string(p.length) + " (T)");
  }
}

// Short sequences are better off without chunks; measured, see README.md.
constexpr std::int64_t kShortSequence = 8;

// As an implementation is asked: without logits where it does not take them.
Problem as_asked(const Implementation& row, const Problem& p) {
  return p.has_logits() && !row.takes_logits ? with_gates(p) : p;
}

// Rows that sum over heads, best first.
std::span<const Implementation> rows_that_sum() {
  static const std::vector<Implementation> rows = [] {
    std::vector<Implementation> some;
    for (const Implementation& row : implementations()) {
      if (row.sums_over_heads) some.push_back(row);
    }
    return some;
  }();
  return rows;
}

const Implementation& choose(const Context& context, const Problem& problem) {
  const Architecture& architecture = context.architecture();
  const std::string& forced = context.forced_implementation();
  if (problem.sums_over_heads) return select(kOperation, rows_that_sum(), problem, architecture, forced);
  if (problem.algorithm == Algorithm::automatic && forced.empty() && architecture.device == Device::Kind::cpu &&
      problem.length <= kShortSequence * problem.sequences) {
    Problem recurrent = problem;
    recurrent.algorithm = Algorithm::recurrent;
    return select(kOperation, implementations(), recurrent, architecture, forced);
  }
  return select(kOperation, implementations(), problem, architecture, forced);
}

void check_outputs(const Problem& p, const Outputs& outputs, Device device, bool o_needed) {
  const Shapes shapes{p, true};
  if (o_needed || outputs.o) {
    check_tokens("o", outputs.o, shapes.tokens(p.query_heads, p.value_dim), "q's with v's channels", p.dtype, device);
    check_not_broadcast("o", outputs.o);
  }
  if (outputs.ht) check_state("ht", outputs.ht, shapes.h(), "N,G,K,V", p, device);
  if (!p.normalize) check_absent("zt", outputs.zt, "only with normalize");
  if (outputs.zt) check_state("zt", outputs.zt, shapes.z(), "N,G,K", p, device);
}

void check_states(const Implementation& row, const Problem& p, const TensorView& states, Device device) {
  if (!states) return;
  check_device("states", states, device);
  check_dtype("states", states, DType::u8, "opaque bytes");
  check_shape("states", states, Shape({static_cast<std::int64_t>(row.states_bytes(as_asked(row, p)))}),
              "states_bytes(problem)");
  check_contiguous("states", states);
}

}  // namespace

const char* name_of(GateKind gate) { return kGateNames[static_cast<std::size_t>(gate)]; }
const char* name_of(Algorithm algorithm) { return kAlgorithmNames[static_cast<std::size_t>(algorithm)]; }
const char* name_of(FeatureMap feature_map) { return kFeatureMapNames[static_cast<std::size_t>(feature_map)]; }

GateKind gate_kind_from_name(std::string_view name) { return from_name<GateKind>("gate", name, kGateNames); }
Algorithm algorithm_from_name(std::string_view name) {
  return from_name<Algorithm>("algorithm", name, kAlgorithmNames);
}
FeatureMap feature_map_from_name(std::string_view name) {
  return from_name<FeatureMap>("feature_map", name, kFeatureMapNames);
}

Problem describe(const Inputs& in, const Options& options) {
  Problem p = describe_tokens(in.q, in.k, in.v, in.g, in.gv, options, true);
  const Device device = in.q.device;
  if (in.cu_seqlens) {
    const TensorView& c = in.cu_seqlens;
    if (c.rank() != 1 || c.size(0) < 2)
      refuse("cu_seqlens", "has shape " + to_string(c.shape), "[N+1] with N of at least 1");
    if (c.dtype != DType::i32 && c.dtype != DType::i64) {
      refuse("cu_seqlens", std::string("has dtype ") + name_of(c.dtype), "i32 or i64");
    }
    check_device("cu_seqlens", c, device);
    check_contiguous("cu_seqlens", c);
    if (p.batch != 1) refuse("q", "has shape " + to_string(in.q.shape), "batch 1, as cu_seqlens packs the sequences");
    p.packed = true;
    p.sequences = c.size(0) - 1;
  }
  const std::string given = "is " + std::to_string(options.max_seqlen);
  if (options.max_seqlen < 0) refuse("max_seqlen", given, "a number of tokens, or 0 for unknown");
  if (options.max_seqlen > 0 && !p.packed) refuse("max_seqlen", given, "0 without cu_seqlens");
  p.max_seqlen = std::min(options.max_seqlen, p.length);
  p.sums_over_heads = options.sums_over_heads;
  if (p.sums_over_heads) {
    check_shared_by_heads("q", in.q);
    check_shared_by_heads("k", in.k);
  }
  const Shapes shapes{p, true};
  if (in.h0) check_state("h0", in.h0, shapes.h(), "N,G,K,V", p, device);
  if (!p.normalize) check_absent("z0", in.z0, "only with normalize");
  if (in.z0) check_state("z0", in.z0, shapes.z(), "N,G,K", p, device);
  return p;
}

bool sums_over_heads(const Context& context, const Inputs& inputs, const Options& options) {
  Options summing = options;
  summing.sums_over_heads = true;
  const Problem problem = describe(inputs, summing);
  return std::ranges::any_of(rows_that_sum(), [&](const Implementation& row) {
    const std::string& forced = context.forced_implementation();
    return row.device == context.architecture().device && (forced.empty() || forced == row.name) &&
           row.supports(problem, context.architecture());
  });
}

std::size_t states_bytes(const Context& context, const Problem& problem) {
  const Implementation& row = choose(context, problem);
  return row.states_bytes(as_asked(row, problem));
}

void forward(Context& context, const Inputs& in, const Outputs& out, const Options& options) {
  const Problem p = describe(in, options);
  check_context(context, in.q);
  check_cu_seqlens(context, p, in.cu_seqlens);
  check_outputs(p, out, in.q.device, true);
  const Implementation& row = choose(context, p);
  check_states(row, p, out.states, in.q.device);
  ArenaScope scope(context.scratch());
  if (!p.has_logits() || row.takes_logits) return row.forward(context, p, in, out);
  forward_with_gates(
      context, p, with_gates(p), in, out,
      [&](const Problem& problem, const Inputs& i, const Outputs& o) { row.forward(context, problem, i, o); });
}

void backward(Context& context, const Inputs& in, const Outputs& out, const OutputGradients& d_out,
              const InputGradients& d_in, const Options& options) {
  const Problem p = describe(in, options);
  const Device device = in.q.device;
  const Shapes shapes{p, true};
  check_context(context, in.q);
  check_cu_seqlens(context, p, in.cu_seqlens);
  check_outputs(p, out, device, p.normalize || in.gv);
  check_tokens("d_o", d_out.d_o, shapes.tokens(p.query_heads, p.value_dim), "as o", p.dtype, device);
  if (d_out.d_ht) check_state("d_ht", d_out.d_ht, shapes.h(), "N,G,K,V", p, device);
  if (!p.normalize) {
    check_absent("d_zt", d_out.d_zt, "only with normalize");
    check_absent("dz0", d_in.dz0, "only with normalize");
  }
  if (d_out.d_zt) check_state("d_zt", d_out.d_zt, shapes.z(), "N,G,K", p, device);

  const std::pair<const char*, std::pair<const TensorView*, const TensorView*>> like_inputs[] = {
      {"dq", {&d_in.dq, &in.q}}, {"dk", {&d_in.dk, &in.k}}, {"dv", {&d_in.dv, &in.v}}};
  for (const auto& [name, pair] : like_inputs) {
    if (!*pair.first) continue;
    check_tokens(name, *pair.first, pair.second->shape, "as the input", p.dtype, device);
    if (p.sums_over_heads && pair.first != &d_in.dv) {
      check_shared_by_heads(name, *pair.first);
      check_not_broadcast(name, pair.first->slice(2, 0, 1));
    } else {
      check_not_broadcast(name, *pair.first);
    }
  }
  const std::pair<const char*, std::pair<const TensorView*, const TensorView*>> like_gates[] = {
      {"dg", {&d_in.dg, &in.g}}, {"dgv", {&d_in.dgv, &in.gv}}};
  for (const auto& [name, pair] : like_gates) {
    const TensorView& gradient = *pair.first;
    if (!gradient) continue;
    if (!*pair.second) check_absent(name, gradient, "the input has no such gate");
    check_device(name, gradient, device);
    check_shape(name, gradient, pair.second->shape, "as the gate");
    check_dtype(name, gradient, p.gate == GateKind::constant ? state_dtype(p.dtype) : p.gate_dtype,
                p.gate == GateKind::constant ? "a constant gate's gradient is f32, f64 with f64" : "as the gate");
    if (p.gate != GateKind::constant && p.gate != GateKind::scalar) check_last_contiguous(name, gradient);
    check_not_broadcast(name, gradient);
  }
  if (d_in.dh0) check_state("dh0", d_in.dh0, shapes.h(), "N,G,K,V", p, device);
  if (d_in.dz0) check_state("dz0", d_in.dz0, shapes.z(), "N,G,K", p, device);

  const Implementation& row = choose(context, p);
  check_states(row, p, out.states, device);
  ArenaScope scope(context.scratch());
  if (!p.has_logits() || row.takes_logits) return row.backward(context, p, in, out, d_out, d_in);
  backward_with_gates(context, p, with_gates(p), in, out, d_out, d_in,
                      [&](const Problem& problem, const Inputs& i, const Outputs& o, const OutputGradients& d,
                          const InputGradients& to) { row.backward(context, problem, i, o, d, to); });
}

namespace {

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
  const auto check_parameter = [&](const char* name, const TensorView& view, const Shape& shape, const char* symbols) {
    check_device(name, view, in.q.device);
    check_shape(name, view, shape, symbols);
    check_contiguous(name, view);
    const bool good =
        p.dtype == DType::f64 ? view.dtype == DType::f64 : view.dtype == DType::f32 || view.dtype == DType::bf16;
    if (!good) {
      refuse(name, std::string("has dtype ") + name_of(view.dtype),
             p.dtype == DType::f64 ? "f64 (as q)" : "f32 or bf16");
    }
  };
  check_parameter("projection.weight", gate.weight, Shape({p.heads * p.key_dim, gate.x.size(1)}), "G K,R");
  if (gate.bias) check_parameter("projection.bias", gate.bias, Shape({p.heads * p.key_dim}), "G K");
}

// Rows with a step, best first, and the one of them for a problem.
const Implementation& choose_step(const Context& context, const Problem& p) {
  static const std::vector<Implementation> rows = [] {
    std::vector<Implementation> with_step;
    for (const Implementation& row : implementations()) {
      if (row.step != nullptr) with_step.push_back(row);
    }
    return with_step;
  }();
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

void step(Context& context, const StepInputs& in, const TensorView& h, const TensorView& z, const TensorView& o,
          const Options& options) {
  const Problem p = describe_step(in, options);
  if (in.projection.weight) check_projection(p, in);
  const Device device = in.q.device;
  const Shapes shapes{p, false};
  check_context(context, in.q);
  check_tokens("o", o, shapes.tokens(p.query_heads, p.value_dim), "q's with v's channels", p.dtype, device);
  check_not_broadcast("o", o);
  auto check_step_state = [&](const char* name, const TensorView& view, const Shape& shape, const char* symbols) {
    check_present(name, view);
    check_device(name, view, device);
    check_shape(name, view, shape, symbols);
    const bool good =
        p.dtype == DType::f64 ? view.dtype == DType::f64 : view.dtype == DType::f32 || view.dtype == DType::bf16;
    if (!good) {
      refuse(name, std::string("has dtype ") + name_of(view.dtype),
             p.dtype == DType::f64 ? "f64 (as q)" : "f32 or bf16");
    }
    check_contiguous(name, view);
  };
  check_step_state("h", h, shapes.h(), "B,G,K,V");
  if (p.normalize) {
    check_step_state("z", z, shapes.z(), "B,G,K");
    if (z.dtype != h.dtype) check_dtype("z", z, h.dtype, "as h");
  } else {
    check_absent("z", z, "only with normalize");
  }
  const Implementation& row = choose_step(context, p);
  if (in.projection.weight && !projects(context, row, p, in, h.dtype)) {
    refuse("projection", std::string("is one that ") + row.name + " does not compute", "log gates (step_projects)");
  }
  ArenaScope scope(context.scratch());
  if (in.projection.weight || !p.has_logits() || row.step == reference::step) {
    return row.step(context, p, in, h, z, o);
  }
  step_with_gates(context, p, with_gates(p), in,
                  [&](const Problem& problem, const StepInputs& i) { row.step(context, problem, i, h, z, o); });
}

}  // namespace flashgla::ops::gated_linear_attention

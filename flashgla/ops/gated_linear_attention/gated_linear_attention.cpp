// validate -> select -> run. Everything behind this file may rely on its arguments.
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>

#include "flashgla/ops/gated_linear_attention/checks.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"
#include "flashgla/ops/gated_linear_attention/logits.h"

namespace flashgla::ops::gated_linear_attention {

namespace {

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
  static const auto rows = implementations_with([](const Implementation& row) { return row.sums_over_heads; });
  return rows;
}

const Implementation& choose(const Architecture& architecture, const Problem& problem, const std::string& forced) {
  if (problem.sums_over_heads) return select(kOperation, rows_that_sum(), problem, architecture, forced);
  if (problem.algorithm == Algorithm::automatic && forced.empty() && architecture.device == Device::Kind::cpu &&
      problem.batch * problem.length <= kShortSequence * problem.sequences) {
    Problem recurrent = problem;
    recurrent.algorithm = Algorithm::recurrent;
    return select(kOperation, implementations(), recurrent, architecture, forced);
  }
  return select(kOperation, implementations(), problem, architecture, forced);
}
const Implementation& choose(const Context& context, const Problem& problem) {
  return choose(context.architecture(), problem, context.forced_implementation());
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
std::size_t states_bytes(const Architecture& architecture, const Problem& problem) {
  const Implementation& row = choose(architecture, problem, {});
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

}  // namespace flashgla::ops::gated_linear_attention

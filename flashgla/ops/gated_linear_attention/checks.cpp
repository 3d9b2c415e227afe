#include "flashgla/ops/gated_linear_attention/checks.h"

#include <cmath>
#include <utility>

#include "flashgla/base/names.h"

namespace flashgla::ops::gated_linear_attention {

void refuse(const char* argument, const std::string& actual, const std::string& expected) {
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

}  // namespace flashgla::ops::gated_linear_attention

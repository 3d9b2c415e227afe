// What the operator's entries ask of their arguments; each throws Error that names the argument.
#pragma once

#include <cstdint>
#include <string>

#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

namespace flashgla::ops::gated_linear_attention {

constexpr const char* kOperation = "gated_linear_attention";

[[noreturn]] void refuse(const char* argument, const std::string& actual, const std::string& expected);
void check_present(const char* name, const TensorView& view);
void check_absent(const char* name, const TensorView& view, const char* reason);
void check_shape(const char* name, const TensorView& view, const Shape& expected, const char* symbols);
void check_dtype(const char* name, const TensorView& view, DType expected, const char* why);
void check_device(const char* name, const TensorView& view, Device device);
void check_last_contiguous(const char* name, const TensorView& view);
void check_contiguous(const char* name, const TensorView& view);
// Every element of something written needs an address of its own.
void check_not_broadcast(const char* name, const TensorView& view);
void check_shared_by_heads(const char* name, const TensorView& view);
void check_context(const Context& context, const TensorView& q);

DType state_dtype(DType dtype);

// Shapes of one call: tokens are [B,T,...] for forward and backward and [B,...] for step.
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
                  Device device);
void check_state(const char* name, const TensorView& view, const Shape& shape, const char* symbols, const Problem& p,
                 Device device);

// What forward, backward and step have in common: q, k, v, g, gv and the options.
Problem describe_tokens(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                        const TensorView& gv, const Options& options, bool has_time);

}  // namespace flashgla::ops::gated_linear_attention

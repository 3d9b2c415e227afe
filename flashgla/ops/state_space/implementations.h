// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/state_space/state_space.h"

namespace flashgla::ops::state_space {

struct Problem {
  DType dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // All take their workspace before they look whether the context is planning.
  void (*forward)(Context&, const Inputs&, const Outputs&);
  void (*backward)(Context&, const Inputs&, const TensorView& skip, const OutputGradients&, const InputGradients&);
  void (*gate_norm)(Context&, const Gate&, const TensorView& weight, double epsilon, const TensorView& y,
                    const TensorView& rstd);
  void (*gate_norm_backward)(Context&, const Gate&, const TensorView& weight, const TensorView& rstd,
                             const TensorView& dy, const TensorView& ds, const TensorView& dz,
                             const TensorView& dweight);
  // With the convolution in front, in one pass; null, or false: not such a call, which is then done in two.
  bool (*convolved_forward)(Context&, const Convolution&, const Inputs&, const Outputs&,
                            const TensorView& final_state) = nullptr;
  bool (*convolved_backward)(Context&, const Convolution&, const Inputs&, const TensorView& skip,
                             const OutputGradients&, const InputGradients&, const TensorView& dweight) = nullptr;
};

// The gate alone, y = (o + skip x) silu(z), and its gradients from dy: of implementations that have rms_norm behind it.
using GateAlone = void (*)(Context&, const Gate&, const TensorView& y);
using GateAloneBackward = void (*)(Context&, const Gate&, const TensorView& dy, const TensorView& ds,
                                   const TensorView& dz);
void gate_then_norm(Context& context, GateAlone gate, const Gate& inputs, const TensorView& weight, double epsilon,
                    const TensorView& y, const TensorView& rstd);
void norm_then_gate_backward(Context& context, GateAlone gate, GateAloneBackward backward, const Gate& inputs,
                             const TensorView& weight, const TensorView& rstd, const TensorView& dy,
                             const TensorView& ds, const TensorView& dz, const TensorView& dweight);

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

// Of one call: E, V, H, S.
struct Sizes {
  std::int64_t inner, value_dim, heads, states;
  std::int64_t channels() const { return inner + 2 * states; }
  Sizes(const TensorView& v, const TensorView& c, std::int64_t head_count)
      : inner(v.size(-1)), value_dim(inner / head_count), heads(head_count), states((c.size(-1) - inner) / 2) {}
};
// Of dk and dq [...,H,K] or [...,G,K]: so many neighbouring rows of K are a group's, and are added up.
struct KeyGradients {
  std::int64_t rows, key_dim, rows_a_group;
  KeyGradients(const TensorView& dk, const Sizes& sizes)
      : rows(dk.size(-2)), key_dim(dk.size(-1)), rows_a_group(rows / (sizes.states / key_dim)) {}
};

// For implementations that leave sums over the tokens to column_sum: what they sum of each token and head, [...,H] f32
// in scratch, and dc.
struct HeadTerms {
  TensorView ddt_bias, da_log, dskip;
  HeadTerms(Context& context, const TensorView& raw);
};
void add_up(Context& context, const HeadTerms& terms, const InputGradients& to);

}  // namespace flashgla::ops::state_space

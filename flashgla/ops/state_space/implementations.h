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
  void (*gate)(Context&, const TensorView& o, const TensorView& x, const TensorView& skip, const TensorView& z,
               const TensorView& y);
  void (*gate_backward)(Context&, const TensorView& o, const TensorView& x, const TensorView& skip, const TensorView& z,
                        const TensorView& dy, const TensorView& ds, const TensorView& dz);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

// Of one call: E, V, H, S, K.
struct Sizes {
  std::int64_t inner, value_dim, heads, states, key_dim;
  Sizes(const TensorView& v, const TensorView& c, std::int64_t head_count, std::int64_t key_channels)
      : inner(v.size(-1)),
        value_dim(inner / head_count),
        heads(head_count),
        states((c.size(-1) - inner) / 2),
        key_dim(key_channels) {}
  // The heads that share a group's B and C are consecutive.
  constexpr std::int64_t heads_a_group() const { return heads / (states / key_dim); }
};

}  // namespace flashgla::ops::state_space

// The table behind the operator. Arguments are validated already.
#pragma once

#include <algorithm>
#include <span>

#include "flashgla/ops/cu_seqlens.h"
#include "flashgla/ops/token_shift/token_shift.h"

namespace flashgla::ops::token_shift {

struct Problem {
  DType dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Both take their workspace before they look whether the context is planning. A step is a forward of one token a
  // sequence whose final state is its initial one: that is read first.
  void (*forward)(Context&, const Inputs&, const Outputs&);
  void (*backward)(Context&, const Inputs&, const TensorView& dy, const InputGradients&);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

// The sequence that a row belongs to.
inline std::int64_t sequence_of(const Inputs& in, std::int64_t row) {
  if (!in.cu_seqlens) return row / in.x.size(1);
  const auto* bounds = in.cu_seqlens.as<std::int32_t>();
  return std::upper_bound(bounds, bounds + in.cu_seqlens.size(0), row) - bounds - 1;
}

}  // namespace flashgla::ops::token_shift

// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/forget_gate/forget_gate.h"

namespace flashgla::ops::forget_gate {

struct Problem {
  DType dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*forward)(Context&, const TensorView& x, const TensorView& bound, const TensorView& g, const TensorView& k,
                  double normalizer);
  void (*backward)(Context&, const TensorView& x, const TensorView& bound, const TensorView& dg, const TensorView& dk,
                   const TensorView& dx, const TensorView& dbound, double normalizer);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

}  // namespace flashgla::ops::forget_gate

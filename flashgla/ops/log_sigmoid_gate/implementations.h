// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/log_sigmoid_gate/log_sigmoid_gate.h"

namespace flashgla::ops::log_sigmoid_gate {

struct Problem {
  DType dtype;       // of x and dx
  DType gate_dtype;  // of g and dg
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*forward)(Context&, const TensorView& x, const TensorView& g, double normalizer, double clamp_min);
  void (*backward)(Context&, const TensorView& x, const TensorView& dg, const TensorView& dx, double normalizer,
                   double clamp_min);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

}  // namespace flashgla::ops::log_sigmoid_gate

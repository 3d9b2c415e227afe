// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/layer_norm/layer_norm.h"

namespace flashgla::ops::layer_norm {

struct Problem {
  DType dtype;
  DType weight_dtype;
};

struct Gradients {
  TensorView x, weight, mean, rstd, dy, dx;
  bool accumulate_dx;
  TensorView dweight;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Both take their workspace before they look whether the context is planning.
  void (*forward)(Context&, const Inputs&, const Outputs&, double epsilon);
  void (*backward)(Context&, const Gradients&);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

}  // namespace flashgla::ops::layer_norm

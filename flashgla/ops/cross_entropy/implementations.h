// The table behind the operator. Arguments are validated already, on the CPU targets too.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/cross_entropy/cross_entropy.h"

namespace flashgla::ops::cross_entropy {

struct Problem {
  DType dtype;         // of x and dx
  DType weight_dtype;  // of the weight
};

// Of each row.
struct Scores {
  TensorView losses;
  TensorView hits;  // of forward; absent: not computed
};

// Gradients wanted by forward_backward; for forward alone dx is absent.
struct Gradients {
  TensorView dx;
  TensorView dweight;
  double scale = 1.0;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Takes its workspace before it looks whether the context is planning.
  void (*run)(Context&, const Inputs&, const Scores&, const Gradients&);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kSimd, kReference;
extern const Implementation kCuda;  // in builds with CUDA

}  // namespace flashgla::ops::cross_entropy

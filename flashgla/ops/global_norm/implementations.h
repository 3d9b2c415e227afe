// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/global_norm/global_norm.h"

namespace flashgla::ops::global_norm {

struct Problem {
  DType dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Both take their workspace before they look whether the context is planning.
  void (*sum_of_squares)(Context&, const TensorView& x, const TensorView& sum);
  bool (*find_non_finite)(Context&, const TensorView& x);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

}  // namespace flashgla::ops::global_norm

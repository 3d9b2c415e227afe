// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/rms_norm/rms_norm.h"

namespace flashgla::ops::rms_norm {

struct Problem {
  DType dtype;
  DType weight_dtype;  // the dtype when there is no weight
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Both take their workspace before they look whether the context is planning.
  void (*forward)(Context&, const Inputs&, const Outputs&, double epsilon);
  void (*backward)(Context&, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                   const TensorView& dy, const TensorView& dx, bool accumulate_dx, const TensorView& dweight);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

}  // namespace flashgla::ops::rms_norm

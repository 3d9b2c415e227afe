// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/swiglu/swiglu.h"

namespace flashgla::ops::swiglu {

struct Problem {
  DType dtype, y_dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*forward)(Context&, const TensorView& gate, const TensorView& up, const TensorView& y);
  void (*backward)(Context&, const TensorView& gate, const TensorView& up, const TensorView& dy,
                   const TensorView& dgate, const TensorView& dup, const TensorView& y);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

}  // namespace flashgla::ops::swiglu

// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/hyena_filter/hyena_filter.h"

namespace flashgla::ops::hyena_filter {

struct Problem {
  DType dtype, out;  // out: of a window's y
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // All take their workspace before they look whether the context is planning.
  void (*sine_forward)(Context&, const TensorView& x, const TensorView& frequency, const TensorView& y);
  void (*sine_backward)(Context&, const TensorView& x, const TensorView& frequency, const TensorView& dy,
                        const TensorView& dx, const TensorView& dfrequency);
  void (*window)(Context&, const TensorView& x, const Window&, const TensorView& y);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

}  // namespace flashgla::ops::hyena_filter

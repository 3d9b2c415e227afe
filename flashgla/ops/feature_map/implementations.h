// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/feature_map/feature_map.h"

namespace flashgla::ops::feature_map {

struct Problem {
  DType dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*forward)(Context&, const TensorView& x, const TensorView& y, const Options&);
  void (*backward)(Context&, const TensorView& x, const TensorView& dy, const TensorView& dx, const Options&);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kRows, kReference;

}  // namespace flashgla::ops::feature_map

// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/adamw/adamw.h"
#include "flashgla/ops/arguments.h"

namespace flashgla::ops::adamw {

struct Problem {
  DType dtype;  // of the parameter
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*step)(Context&, const Tensors&, const Settings&);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kSimd, kReference;

}  // namespace flashgla::ops::adamw

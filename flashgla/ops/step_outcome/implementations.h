// The table behind the operators. Arguments are validated already, and nothing is planned.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/step_outcome/step_outcome.h"

namespace flashgla::ops::step_outcome {

struct Problem {};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*sum)(Context&, const TensorView& x, const TensorView& total, bool accumulate);
  void (*clear_unless)(Context&, const TensorView& made, const TensorView& view);
  void (*find_unless)(Context&, const TensorView& made, const TensorView& x, const TensorView& first);
};

std::span<const Implementation> implementations();

extern const Implementation kCuda, kReference;

}  // namespace flashgla::ops::step_outcome

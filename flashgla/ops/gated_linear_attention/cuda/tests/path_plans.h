// The plans of path_cases() on a device of 132 multiprocessors, as they are meant to be.
#pragma once

#include <map>
#include <string>

#include "flashgla/ops/gated_linear_attention/cuda/plan.h"
#include "flashgla/ops/gated_linear_attention/tests/cases.h"

namespace flashgla::ops::gated_linear_attention {

// Of cuda_sm90 and cuda_portable, each with states kept and without.
struct PathPlans {
  std::string hopper, hopper_without_states, portable, portable_without_states;
  const std::string& of(bool on_hopper, bool states) const {
    return on_hopper ? (states ? hopper : hopper_without_states) : (states ? portable : portable_without_states);
  }
};

// Four plans, as forward; backward; states: cuda_sm90 with states kept and without, cuda_portable likewise. Then, each
// line indented, the cases that take them.
extern const char* const kPathPlansText;
// By case.
std::map<std::string, PathPlans> path_plans();
std::string written(const std::map<std::string, PathPlans>& plans);

// A case's problem and tensors as they lie, without their memory.
struct Described {
  Inputs inputs;
  Outputs outputs;
  Options options;
  Problem problem;
  cuda::Layout layout;
};
TensorView without_memory(const Shape& shape, DType dtype);
Described described(const Case& c);

}  // namespace flashgla::ops::gated_linear_attention

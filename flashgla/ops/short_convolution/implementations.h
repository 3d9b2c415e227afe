// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/cu_seqlens.h"
#include "flashgla/ops/short_convolution/short_convolution.h"

namespace flashgla::ops::short_convolution {

struct Problem {
  DType dtype;
  DType weight_dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Both take their workspace before they look whether the context is planning.
  void (*forward)(Context&, const Inputs&, const Outputs&, Activation);
  void (*backward)(Context&, const Inputs&, const OutputGradients&, const InputGradients&, Activation);
  void (*step)(Context&, const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& state,
               const TensorView& y, Activation);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

inline std::int64_t sequences_of(const Inputs& inputs) { return ops::sequences_of(inputs.x, inputs.cu_seqlens); }

}  // namespace flashgla::ops::short_convolution

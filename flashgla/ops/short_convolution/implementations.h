// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
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

// Rows of x, as [B * T, D], that are one sequence.
struct Sequence {
  std::int64_t begin, length;
};

inline std::int64_t sequences_of(const Inputs& inputs) {
  return inputs.cu_seqlens ? inputs.cu_seqlens.size(0) - 1 : inputs.x.size(0);
}

inline std::int64_t boundary(const TensorView& cu_seqlens, std::int64_t n) {
  return cu_seqlens.dtype == DType::i32 ? cu_seqlens.as<std::int32_t>()[n] : cu_seqlens.as<std::int64_t>()[n];
}

inline Sequence sequence_at(const Inputs& inputs, std::int64_t n) {
  if (!inputs.cu_seqlens) return {n * inputs.x.size(1), inputs.x.size(1)};
  const std::int64_t begin = boundary(inputs.cu_seqlens, n);
  return {begin, boundary(inputs.cu_seqlens, n + 1) - begin};
}

}  // namespace flashgla::ops::short_convolution

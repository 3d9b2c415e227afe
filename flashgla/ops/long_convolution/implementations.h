// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/long_convolution/long_convolution.h"

namespace flashgla::ops::long_convolution {

struct Problem {
  DType dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // All take their workspace before they look whether the context is planning. A step's x and y are [N,1,D]: a call of
  // one token a sequence.
  void (*forward)(Context&, const Inputs&, const TensorView& y);
  void (*backward)(Context&, const Inputs&, const TensorView& dy, const InputGradients&);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

// A sequence: rows [begin, end) of a call, and the tokens before them.
struct Sequence {
  std::int64_t begin, end, past;
  std::int64_t length() const { return end - begin; }
};
inline std::int64_t sequences_of(const Inputs& in) { return in.cu_seqlens ? in.cu_seqlens.size(0) - 1 : in.x.size(0); }
inline Sequence sequence_at(const Inputs& in, std::int64_t n) {
  const std::int64_t past = in.positions ? in.positions.as<std::int32_t>()[n] : 0;
  if (!in.cu_seqlens) return {n * in.x.size(1), (n + 1) * in.x.size(1), past};
  const auto* bounds = in.cu_seqlens.as<std::int32_t>();
  return {bounds[n], bounds[n + 1], past};
}

}  // namespace flashgla::ops::long_convolution

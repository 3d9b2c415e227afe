// The table behind the operator. Arguments are validated already.
#pragma once

#include <cstddef>
#include <span>

#include "flashgla/ops/cu_seqlens.h"
#include "flashgla/ops/long_convolution/long_convolution.h"

namespace flashgla::ops::long_convolution {

struct Problem {
  DType dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  std::size_t (*kept_bytes)(const Architecture&, const Inputs&);
  // All take their workspace before they look whether the context is planning. A step's x and y are [N,1,D]: a call of
  // one token a sequence.
  void (*forward)(Context&, const Inputs&, const Outputs&);
  void (*backward)(Context&, const Inputs&, const TensorView& kept, const TensorView& dy, const InputGradients&);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

// Of implementations whose backward needs nothing but its inputs.
inline std::size_t keeps_nothing(const Architecture& /*architecture*/, const Inputs& /*in*/) { return 0; }

// A sequence of a call, and the tokens before it.
struct Sequence : ops::Sequence {
  std::int64_t past;
};
inline std::int64_t sequences_of(const Inputs& in) { return ops::sequences_of(in.x, in.cu_seqlens); }
inline Sequence sequence_at(const Inputs& in, std::int64_t n) {
  return {ops::sequence_at(in.x, in.cu_seqlens, n), in.positions ? in.positions.as<std::int32_t>()[n] : 0};
}

}  // namespace flashgla::ops::long_convolution

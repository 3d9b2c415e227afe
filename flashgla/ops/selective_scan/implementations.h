// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/cu_seqlens.h"
#include "flashgla/ops/selective_scan/selective_scan.h"

namespace flashgla::ops::selective_scan {

struct Problem {
  DType dtype;
  std::int64_t states;  // K
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  std::size_t (*kept_bytes)(const Inputs&);
  // All take their workspace before they look whether the context is planning.
  void (*forward)(Context&, const Inputs&, const Outputs&);
  void (*backward)(Context&, const Inputs&, const TensorView& kept, const TensorView& dy, const InputGradients&);
  void (*step)(Context&, const Inputs&, const TensorView& state, const TensorView& y, const StepProjection&);
  bool (*projects)(const Inputs&, const StepProjection&);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

// B T tokens as rows, cut into N sequences.
struct Sizes {
  std::int64_t rows, length, sequences, channels, states;
  explicit Sizes(const Inputs& in)
      : rows(in.x.size(0) * in.x.size(1)),
        length(in.x.size(1)),
        sequences(sequences_of(in.x, in.cu_seqlens)),
        channels(in.x.size(2)),
        states(in.b.size(2)) {}
};

}  // namespace flashgla::ops::selective_scan

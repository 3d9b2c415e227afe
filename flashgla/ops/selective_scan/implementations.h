// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
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
        sequences(in.cu_seqlens ? in.cu_seqlens.size(0) - 1 : in.x.size(0)),
        channels(in.x.size(2)),
        states(in.b.size(2)) {}
};

struct Sequence {
  std::int64_t begin, end;  // rows
};
inline Sequence sequence_at(const Inputs& in, std::int64_t n) {
  if (!in.cu_seqlens) return {n * in.x.size(1), (n + 1) * in.x.size(1)};
  const auto* bounds = in.cu_seqlens.as<std::int32_t>();
  return {bounds[n], bounds[n + 1]};
}

}  // namespace flashgla::ops::selective_scan

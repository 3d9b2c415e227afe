// The table behind the operator. Arguments are validated already.
#pragma once

#include <algorithm>
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
  void (*prepare)(Context&, const TensorView& sum_of_squares, const TensorView& loss, const TensorView& scalars,
                  const Settings&);
  void (*step)(Context&, const Tensors&, const Settings&);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

// Of CPU implementations.
void prepare_on_cpu(Context& context, const TensorView& sum_of_squares, const TensorView& loss,
                    const TensorView& scalars, const Settings& settings);

inline StepScalars& scalars_in(const TensorView& scalars) {
  return *reinterpret_cast<StepScalars*>(scalars.as<double>());
}

// Calls body(begin, end, decays) for the pieces of [begin, end) that lie within one segment. On the CPU.
template <class Body>
void for_each_segment(const TensorView& boundaries, std::int64_t begin, std::int64_t end, const Body& body) {
  const std::int64_t count = boundaries ? boundaries.numel() : 0;
  const auto* positions = boundaries ? boundaries.as<std::int64_t>() : nullptr;
  std::int64_t segment = std::upper_bound(positions, positions + count, begin) - positions;
  while (begin < end) {
    const std::int64_t last = segment < count ? std::min(end, positions[segment]) : end;
    if (begin < last) body(begin, last, segment % 2 == 0);
    begin = std::max(begin, last);
    ++segment;
  }
}

}  // namespace flashgla::ops::adamw

// The table behind the operator. Arguments are validated already.
#pragma once

#include <cstdint>
#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::ops::quantised_linear {

struct Problem {
  std::int64_t m, n, k;
  DType dtype;  // of x
  Format format;
  bool aligned = true;  // x: rows of whole 16-byte vectors
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Takes its workspace before it looks whether the context is planning.
  void (*run)(Context&, const TensorView& x, const TensorView& weight, const TensorView& y, const Options&);
  bool (*available)();  // on this processor
};

// Best first, reference last; those that this processor has.
std::span<const Implementation> implementations();

extern const Implementation kVnni, kAvx512, kAvx2;  // on x86-64
extern const Implementation kPortable, kDecoded, kReference;
#ifdef FLASHGLA_CUDA
extern const Implementation kFewRowsCuda, kDecodedCuda;
#endif

}  // namespace flashgla::ops::quantised_linear

// The table behind the operator. Arguments are validated already, on the CPU tokens too.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/embedding/embedding.h"

namespace flashgla::ops::embedding {

struct Problem {
  DType dtype;        // of y and dy
  DType table_dtype;  // of the table, or of dtable
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Take their workspace before they look whether the context is planning.
  void (*forward)(Context&, const TensorView& tokens, const TensorView& table, const TensorView& y,
                  const TensorView& bad_token);
  void (*backward)(Context&, const TensorView& tokens, const TensorView& dy, const TensorView& dtable,
                   const TensorView& bad_token);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kSimd, kReference;
extern const Implementation kCuda;  // in builds with CUDA

}  // namespace flashgla::ops::embedding

// The table behind the operator. Arguments, tokens included, are validated already.
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
  void (*forward)(Context&, const TensorView& tokens, const TensorView& table, const TensorView& y);
  void (*backward)(Context&, const TensorView& tokens, const TensorView& dy, const TensorView& dtable);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kSimd, kReference;

}  // namespace flashgla::ops::embedding

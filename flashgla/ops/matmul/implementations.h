// The table behind the operator. Arguments are validated already.
#pragma once

#include <cstdint>
#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/matmul/matmul.h"

namespace flashgla::ops::matmul {

struct Problem {
  std::int64_t m, n, k;
  DType a, b, c;
  bool a_rows_contiguous;     // stride 1 along k
  bool b_columns_contiguous;  // stride 1 along k: b is the transpose of a row-major matrix
  bool c_rows_contiguous;     // stride 1 along n
  bool has_bias;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Takes its workspace before it looks whether the context is planning.
  void (*run)(Context&, const TensorView& a, const TensorView& b, const TensorView& c, const Options&);
  bool adds_elsewhere = false;  // takes Options.addend, which others find in c, with accumulate
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kStream, kPanels, kOneDNN, kConverted, kReference;
extern const Implementation kCudaFewRows, kCublasLt, kCublasLtInParts, kCudaTiles;  // in builds with CUDA

}  // namespace flashgla::ops::matmul

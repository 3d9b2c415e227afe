// The table behind the operator. Arguments are validated already.
#pragma once

#include <cstdint>
#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/linear_step/linear_step.h"

namespace flashgla::ops::linear_step {

struct Problem {
  std::int64_t rows, in, heads;  // heads: that are normalised apart
  DType dtype;                   // of x and y
  DType weight_dtype;            // of all weights; u8: of some that are packed
  std::size_t layers;
  std::int64_t columns;  // of all y, where some are turned; else 0
  bool aligned;          // every row of x, gate and the weights begins at a multiple of 16 bytes and has whole ones
  bool whole_panels;     // of packed weights with swiglu: rows of up begin with a panel
  DType beside_packed = DType::u8;  // the widest of layers in floats beside packed ones; u8: there are none
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // Takes its workspace before it looks whether the context is planning.
  void (*run)(Context&, const Inputs&, std::span<const Layer>, const Options&);
  std::int64_t turns = 0;  // heads of a multiple of so many channels; others are turned behind it. 0: none
};

// Best first, reference last.
std::span<const Implementation> implementations();

// u, in scratch memory where it is not x.
TensorView run_prologue(Context& context, const Inputs& inputs);

extern const Implementation kStream, kComposed, kReference;
#ifdef FLASHGLA_CUDA
extern const Implementation kStreamCuda, kTensorCoresCuda, kPackedCuda, kComposedCuda;
#endif

}  // namespace flashgla::ops::linear_step

// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/sampling/sampling.h"

namespace flashgla::ops::sampling {

struct Problem {
  std::int64_t sequences, vocabulary;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*run)(Context&, const TensorView& logits, const TensorView& seen, const TensorView& positions,
              const TensorView& tokens, const Options&, std::int64_t first_sequence);
  void (*mark_seen)(Context&, const TensorView& tokens, const TensorView& bounds, const TensorView& seen);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kSelect, kReference;
#ifdef FLASHGLA_CUDA
extern const Implementation kCuda;
#endif

}  // namespace flashgla::ops::sampling

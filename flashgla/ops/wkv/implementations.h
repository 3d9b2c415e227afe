// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/cu_seqlens.h"
#include "flashgla/ops/wkv/wkv.h"

namespace flashgla::ops::wkv {

struct Problem {
  DType dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  std::size_t (*kept_bytes)(const Inputs&);
  // All take their workspace before they look whether the context is planning.
  void (*forward)(Context&, const Inputs&, const Outputs&);
  void (*backward)(Context&, const Inputs&, const TensorView& kept, const TensorView& dy, const InputGradients&);
  void (*step)(Context&, const Inputs&, const TensorView& state, const TensorView& y);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

// The exponent of a state that holds nothing: e to it is 0 whatever is added.
constexpr double kNothing = -1e30;

// B T tokens as rows, cut into N sequences.
struct Sizes {
  std::int64_t rows, length, sequences, channels;
  explicit Sizes(const Inputs& in)
      : rows(in.k.size(0) * in.k.size(1)),
        length(in.k.size(1)),
        sequences(sequences_of(in.k, in.cu_seqlens)),
        channels(in.k.size(2)) {}
};

// A step's inputs as sequences of one token each: [N,E] as [N,1,E].
inline TensorView as_batch(const TensorView& view) {
  TensorView batch(view.data, view.dtype, Shape({view.size(0), 1, view.size(1)}), view.device);
  batch.stride = {view.stride[0], view.stride[0], view.stride[1]};
  return batch;
}
inline Inputs as_batch(const Inputs& inputs) {
  Inputs batch = inputs;
  for (TensorView* view : {&batch.k, &batch.v, &batch.r}) *view = as_batch(*view);
  return batch;
}

}  // namespace flashgla::ops::wkv

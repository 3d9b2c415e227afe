// What the CPU implementations share outside SIMD code: a sequence and key-value head as rows of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "flashgla/ops/gated_linear_attention/sequences.h"

namespace flashgla::ops::gated_linear_attention {

constexpr std::int64_t kLane = 16;  // rows are padded to multiples of this: the widest vector used
constexpr std::int64_t padded(std::int64_t n) { return (n + kLane - 1) / kLane * kLane; }

// Rows [K] or [V] of one sequence in a tensor [B,T,heads,channels], from a first head on.
struct Rows {
  std::byte* data = nullptr;
  std::int64_t token = 0;  // strides in bytes; token 0: one row for all (constant gates)
  std::int64_t head = 0;
  DType dtype = DType::f32;

  Rows() = default;
  // Of a view with or without time: [B,T,heads(,channels)] or, for step, [B,heads(,channels)]; or a gate [G].
  Rows(const TensorView& view, bool has_time, std::int64_t batch, std::int64_t begin, std::int64_t first_head)
      : dtype(view.dtype) {
    if (!view) return;
    const auto size = static_cast<std::int64_t>(size_of(view.dtype));
    data = static_cast<std::byte*>(view.data);
    if (view.rank() == 1) {
      data += first_head * view.stride[0] * size;
      return;
    }
    const int heads = has_time ? 2 : 1;
    head = view.stride[heads] * size;
    token = has_time ? view.stride[1] * size : 0;
    data += batch * view.stride[0] * size + begin * token + first_head * head;
  }

  explicit operator bool() const { return data != nullptr; }
  std::byte* row(std::int64_t t, std::int64_t h = 0) const { return data + t * token + h * head; }
};

// The inputs of tokens [0, length) of one sequence and key-value head; q starts at the group's first head.
struct TaskInputs {
  Rows q, k, v, g, gv;

  TaskInputs() = default;
  TaskInputs(const Problem& p, const Inputs& in, const Sequence& s, std::int64_t head)
      : q(in.q, true, s.batch, s.begin, head * p.group()),
        k(in.k, true, s.batch, s.begin, head),
        v(in.v, true, s.batch, s.begin, head),
        g(in.g, true, s.batch, s.begin, head),
        gv(in.gv, true, s.batch, s.begin, head) {}
  TaskInputs(const Problem& p, const StepInputs& in, std::int64_t batch, std::int64_t head)
      : q(in.q, false, batch, 0, head * p.group()),
        k(in.k, false, batch, 0, head),
        v(in.v, false, batch, 0, head),
        g(in.g, false, batch, 0, head),
        gv(in.gv, false, batch, 0, head) {}
};

// A state's slab of one sequence and head, or null.
template <class T>
T* state_of(const TensorView& view, const Problem& p, std::int64_t n, std::int64_t head, std::int64_t count) {
  return view ? static_cast<T*>(view.data) + (n * p.heads + head) * count : nullptr;
}

}  // namespace flashgla::ops::gated_linear_attention

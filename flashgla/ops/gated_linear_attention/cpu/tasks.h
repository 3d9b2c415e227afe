// What the CPU implementations share outside SIMD code: a sequence and key-value head as rows of memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/ops/cpu/workers.h"
#include "flashgla/ops/gated_linear_attention/cpu/sequences.h"

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
  // From token t on.
  void advance(std::int64_t t) {
    if (data != nullptr) data = row(t);
  }
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

  // From token t on.
  void advance(std::int64_t t) {
    for (Rows* rows : {&q, &k, &v, &g, &gv}) rows->advance(t);
  }
};

// A state's slab of one sequence and head, or null.
template <class T>
T* state_of(const TensorView& view, const Problem& p, std::int64_t n, std::int64_t head, std::int64_t count) {
  return view ? static_cast<T*>(view.data) + (n * p.heads + head) * count : nullptr;
}

// One sequence and key-value head forwards; rows of q's kind start at the group's first head.
struct ForwardTask {
  TaskInputs in;
  Rows o;
  std::int64_t length = 0;
  const float* h0 = nullptr;  // [K,V]
  const float* z0 = nullptr;  // [K]
  float* ht = nullptr;
  float* zt = nullptr;

  ForwardTask() = default;
  ForwardTask(const Problem& p, const Inputs& inputs, const Outputs& out, std::int64_t n, std::int64_t head) {
    const Sequence s = sequence_of(p, inputs.cu_seqlens, n);
    in = TaskInputs(p, inputs, s, head);
    o = Rows(out.o, true, s.batch, s.begin, head * p.group());
    length = s.length();
    const std::int64_t state = p.key_dim * p.value_dim;
    h0 = state_of<const float>(inputs.h0, p, n, head, state);
    ht = state_of<float>(out.ht, p, n, head, state);
    z0 = state_of<const float>(inputs.z0, p, n, head, p.key_dim);
    zt = state_of<float>(out.zt, p, n, head, p.key_dim);
  }
};

// The gradient's operands of one sequence and key-value head; rows of q's kind start at the group's first head.
struct BackwardTask {
  TaskInputs in;
  Rows o, d_o, dq, dk, dv, dg, dgv;
  std::int64_t length = 0;
  const float* h0 = nullptr;  // [K,V]
  const float* z0 = nullptr;  // [K]
  const float* d_ht = nullptr;
  const float* d_zt = nullptr;
  float* dh0 = nullptr;
  float* dz0 = nullptr;
  double* dg_sum = nullptr;  // a constant gate's gradient: this task's term; then dg is absent

  BackwardTask(const Problem& p, const Inputs& inputs, const Outputs& out, const OutputGradients& d_out,
               const InputGradients& d_in, std::int64_t n, std::int64_t head, double* dg_terms) {
    const Sequence s = sequence_of(p, inputs.cu_seqlens, n);
    auto rows = [&](const TensorView& view, std::int64_t first_head) {
      return Rows(view, true, s.batch, s.begin, first_head);
    };
    in = TaskInputs(p, inputs, s, head);
    length = s.length();
    o = rows(out.o, head * p.group());
    d_o = rows(d_out.d_o, head * p.group());
    dq = rows(d_in.dq, head * p.group());
    dk = rows(d_in.dk, head);
    dv = rows(d_in.dv, head);
    dgv = rows(d_in.dgv, head);
    if (dg_terms != nullptr)
      dg_sum = dg_terms + n * p.heads + head;
    else
      dg = rows(d_in.dg, head);
    const std::int64_t state = p.key_dim * p.value_dim;
    h0 = state_of<const float>(inputs.h0, p, n, head, state);
    d_ht = state_of<const float>(d_out.d_ht, p, n, head, state);
    dh0 = state_of<float>(d_in.dh0, p, n, head, state);
    z0 = state_of<const float>(inputs.z0, p, n, head, p.key_dim);
    d_zt = state_of<const float>(d_out.d_zt, p, n, head, p.key_dim);
    dz0 = state_of<float>(d_in.dz0, p, n, head, p.key_dim);
  }
};

// A backward by sequences and key-value heads: body(task, memory), where memory is a Memory(of, carver) of the
// worker's. A constant gate's gradient sums over sequences: one term each, added in order at the end.
template <class Memory, class Of, class Body>
void backward_by_heads(Context& context, const Problem& p, const Of& of, const Inputs& in, const Outputs& out,
                       const OutputGradients& d_out, const InputGradients& d_in, Body&& body) {
  double* terms = nullptr;
  if (p.gate == GateKind::constant && d_in.dg) {
    const auto bytes = static_cast<std::size_t>(p.sequences * p.heads) * sizeof(double);
    terms = static_cast<double*>(context.scratch().allocate(bytes, "workspace"));
  }
  Carver counter(nullptr);
  Memory(of, counter);
  const Workers workers(context, p.sequences * p.heads, counter.used());
  if (context.planning()) return;
  workers.run([&](std::int64_t item, std::byte* memory) {
    Carver carver(memory);
    const Memory m(of, carver);
    body(BackwardTask(p, in, out, d_out, d_in, item / p.heads, item % p.heads, terms), m);
  });
  for (std::int64_t head = 0; terms != nullptr && head < p.heads; ++head) {
    double sum = 0.0;
    for (std::int64_t n = 0; n < p.sequences; ++n) sum += terms[n * p.heads + head];
    store_element(d_in.dg, std::array{head}, sum);
  }
}

}  // namespace flashgla::ops::gated_linear_attention

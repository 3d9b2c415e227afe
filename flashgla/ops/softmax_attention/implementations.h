// The table behind the operator. Arguments are validated already; Options::scale is set.
#pragma once

#include <algorithm>
#include <span>

#include "flashgla/ops/cu_seqlens.h"
#include "flashgla/ops/softmax_attention/softmax_attention.h"

namespace flashgla::ops::softmax_attention {

enum class Direction : std::uint8_t { forward, backward, cache };

struct Problem {
  DType dtype;
  DType past;  // dtype without a past
  std::int64_t key_dim, value_dim;
  // Every row begins at a multiple of 16 bytes and the scale is positive: what kernels for matrix units ask for.
  bool regular = false;
  bool dropout = false;
  // Each batch row is a sequence that begins with the call, and each of its tokens sees all before it.
  bool whole = false;
  Direction direction = Direction::cache;
  bool training = false;
  std::int64_t batch = 0, length = 0, heads = 0, groups = 0;  // of a whole one
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  // All take their workspace before they look whether the context is planning.
  void (*forward)(Context&, const Inputs&, const Outputs&, const Options&);
  void (*backward)(Context&, const Inputs&, const Outputs&, const TensorView& d_o, const InputGradients&,
                   const Options&);
  void (*append)(Context&, std::span<const Appended>, const TensorView& positions, const TensorView& cu_seqlens);
  void (*step)(Context&, const TensorView& q, const Token&, const TensorView& k_cache, const TensorView& v_cache,
               const TensorView& positions, const TensorView& o, const Options&);
  bool step_appends = false;  // else step is given no token: append has put it into the caches
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kTiles, kReference;
#ifdef FLASHGLA_CUDA
extern const Implementation kCudnn, kCudaHopper, kCudaTensorCores, kCudaGeneral;
#endif

// One sequence's tokens in a call on the CPU.
struct Sequence {
  std::int64_t batch, begin, length;  // rows of [B,T]
  std::int64_t position;              // tokens before
};

inline Sequence sequence_at(const TensorView& x, const TensorView& positions, const TensorView& cu_seqlens,
                            std::int64_t n) {
  const std::int64_t position = positions ? positions.as<std::int32_t>()[n] : 0;
  if (!cu_seqlens) return {n, 0, x.size(1), position};
  const auto rows = ops::sequence_at(x, cu_seqlens, n);
  return {0, rows.begin, rows.length(), position};
}
inline Sequence sequence_at(const Inputs& in, std::int64_t n) {
  return sequence_at(in.q, in.past_k ? in.positions : TensorView(), in.cu_seqlens, n);
}

// The first token that token `i` sees, of those that are there: the cache's last P, and all since `position`.
inline std::int64_t first_key(std::int64_t i, std::int64_t position, std::int64_t cached, std::int64_t window) {
  const std::int64_t kept = std::max<std::int64_t>(0, position - cached);
  return window > 0 ? std::max(kept, i - window + 1) : kept;
}

}  // namespace flashgla::ops::softmax_attention

// Where the sequences of a problem lie: rows of the batch, or stretches of the one packed row. CPU only.
#pragma once

#include <array>
#include <cstdint>

#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

namespace flashgla::ops::gated_linear_attention {

struct Sequence {
  std::int64_t batch;  // row of q, k, v
  std::int64_t begin;  // first token in the row
  std::int64_t end;    // past the last token; equal to begin when the sequence is empty
  std::int64_t length() const { return end - begin; }
};

inline Sequence sequence_of(const Problem& p, const TensorView& cu_seqlens, std::int64_t n) {
  if (!p.packed) return {n, 0, p.length};
  auto at = [&](std::int64_t i) { return static_cast<std::int64_t>(load_element(cu_seqlens, std::array{i})); };
  return {0, at(n), at(n + 1)};
}

}  // namespace flashgla::ops::gated_linear_attention

// Sequences of the tokens of x [B,T,...]: its B rows, or with cu_seqlens N that lie in its one row.
#pragma once

#include "flashgla/ops/arguments.h"

namespace flashgla::ops {

// cu_seqlens [N+1] says where each of N sequences that lie in the one row of x [1,T,...] begins and where the last
// ends. Throws Error unless x, an argument of the name `of`, has one row and, where the CPU can read them, the values
// rise from 0 to T; equal neighbours are an empty sequence.
void check_cu_seqlens(const Arguments& arguments, const Context& context, const TensorView& cu_seqlens, const char* of,
                      const TensorView& x, DTypes dtypes = DType::i32);

inline std::int64_t sequences_of(const TensorView& x, const TensorView& cu_seqlens) {
  return cu_seqlens ? cu_seqlens.size(0) - 1 : x.size(0);
}

// Below, cu_seqlens lies where the CPU reads it.
inline std::int64_t boundary(const TensorView& cu_seqlens, std::int64_t n) {
  return cu_seqlens.dtype == DType::i64 ? cu_seqlens.as<std::int64_t>()[n] : cu_seqlens.as<std::int32_t>()[n];
}

struct Sequence {
  std::int64_t begin, end;  // rows of x as [B * T, ...]
  std::int64_t length() const { return end - begin; }
};
inline Sequence sequence_at(const TensorView& x, const TensorView& cu_seqlens, std::int64_t n) {
  if (!cu_seqlens) return {n * x.size(1), (n + 1) * x.size(1)};
  return {boundary(cu_seqlens, n), boundary(cu_seqlens, n + 1)};
}

}  // namespace flashgla::ops

// The check of cu_seqlens, which operators over packed sequences share.
#pragma once

#include "flashgla/ops/arguments.h"

namespace flashgla::ops {

// cu_seqlens [N+1] says where each of N sequences that lie in the one row of x [1,T,...] begins and where the last
// ends. Throws Error unless x, an argument of the name `of`, has one row and, where the CPU can read them, the values
// rise from 0 to T; equal neighbours are an empty sequence.
void check_cu_seqlens(const Arguments& arguments, const Context& context, const TensorView& cu_seqlens, const char* of,
                      const TensorView& x, DTypes dtypes = DType::i32);

}  // namespace flashgla::ops

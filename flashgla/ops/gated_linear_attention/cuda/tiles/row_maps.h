// Rows of tensors as the copy engine takes them: tensor maps, made on the host for each call.
#pragma once

#include <cuda.h>

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// [B, T, heads, channels] of bf16 in boxes of 64 tokens by 64 channels, which come as tiles; zeros beyond T and the
// channels.
struct RowMap {
  CUtensorMap map;
  int head_step, batch_step;  // of the map's coordinates: 0 where the tensor repeats one head or sequence
};
// Of a tensor with so many heads and channels, laid out as p.q is in batch and time. Strides are multiples of 16 bytes,
// those of tokens not 0 where there are several.
RowMap row_map_of(const Params& p, const Strided& x, int heads, int channels);

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Rows of tensors as the copy engine takes them: tensor maps, made on the host for each call.
#pragma once

#include <cuda.h>

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// [B, T, heads, channels] of bf16 in boxes of 64 tokens by 64 channels, which come as tiles; zeros beyond T and the
// channels. Or of fewer tokens: as many of a tile's rows.
struct RowMap {
  CUtensorMap map;
  int head_step, batch_step;  // of the map's coordinates: 0 where the tensor repeats one head or sequence
};
// What the backward has brought so.
struct RowMaps {
  RowMap v, d_o;
  RowMap q, k;  // where they are read as they are
};
// Whether there can be a map: data and strides are multiples of 16 bytes, tokens are apart where there are several, and
// 31 bits count them.
bool has_row_map(const Params& p, const Strided& x);
// Of a tensor with so many heads and channels, a multiple of 8, laid out as p.q is in batch and time. Throws Error
// where the driver refuses it.
RowMap row_map_of(const Params& p, const Strided& x, int heads, int channels, int tokens = kTile);

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Rows of tensors as TMA takes them: tensor maps, made on the host for each call.
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
// Of a tensor with so many heads and channels, aligned (plan.h), laid out as p.q is in batch and time. Throws
// Error where the driver refuses it.
RowMap row_map_of(const Params& p, const Strided& x, int heads, int channels, int tokens = kTile);

}  // namespace flashgla::ops::gated_linear_attention::cuda

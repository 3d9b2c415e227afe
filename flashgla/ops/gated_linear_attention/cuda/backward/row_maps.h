// Rows of v and do as the copy engine takes them: tensor maps, made on the host for each call.
#pragma once

#include <cuda.h>

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// [B, T, heads, V] of bf16 in boxes of 64 tokens by 64 channels, which come as tiles; zeros beyond T and V.
struct RowMap {
  CUtensorMap map;
  int head_step, batch_step;  // of the map's coordinates: 0 where the tensor repeats one head or sequence
};
struct RowMaps {
  RowMap v, d_o;
};

// Of the operator's v and of do, laid out as p.q is in batch and time. Strides are multiples of 16 bytes, those of
// tokens not 0 where there are several.
RowMaps row_maps_of(const Params& p, const Strided& d_o);

}  // namespace flashgla::ops::gated_linear_attention::cuda

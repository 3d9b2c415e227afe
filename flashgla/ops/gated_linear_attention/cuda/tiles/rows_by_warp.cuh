// Tiles filled from rows and written to them by one warp.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Starts the copy of so many tiles side by side, their rows together; the pieces outside become zeros.
template <int tiles_wide>
__device__ __forceinline__ void load_tiles_by_warp(std::uint32_t tiles, const Rows& r, int lane) {
  constexpr int kPieces = 8 * tiles_wide, kRows = 32 / kPieces, kPeriod = 8 / kRows;
  const int piece = lane % kPieces, first = lane / kPieces;
  std::uint32_t to[kPeriod];
#pragma unroll
  for (int i = 0; i < kPeriod; ++i) to[i] = tiles + piece / 8 * kTileBytes + tile_piece(first + kRows * i, piece % 8);
  const char* from = r.data + first * r.stride + 16 * piece;
  const int step = kRows * r.stride;
  if (r.rows == kTile && r.channels >= 64 * tiles_wide) {
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      ptx::copy_async_16(to[i % kPeriod] + 1024 * (i / kPeriod), from);
      from += step;
    }
  } else {
    const int rows = 8 * piece < r.channels ? r.rows : 0;
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      const bool inside = first + kRows * i < rows;
      ptx::copy_async_16(to[i % kPeriod] + 1024 * (i / kPeriod), inside ? from : r.data, inside ? 16 : 0);
      from += step;
    }
  }
}
// Writes a tile to rows.
__device__ __forceinline__ void store_tile_by_warp(const Rows& r, std::uint32_t tile, int lane) {
  const int piece = lane % 8, first = lane / 8, rows = 8 * piece < r.channels ? r.rows : 0, step = 4 * r.stride;
  char* to = const_cast<char*>(r.data) + first * r.stride + 16 * piece;
  const std::uint32_t even = tile + tile_piece(first, piece), odd = tile + tile_piece(first + 4, piece);
#pragma unroll
  for (int i = 0; i < 16; i += 8) {
    uint4 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = load_shared_16((j % 2 == 0 ? even : odd) + 1024 * ((i + j) / 2));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (first + 4 * (i + j) < rows) *reinterpret_cast<uint4*>(to) = x[j];
      to += step;
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

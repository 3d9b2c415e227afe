// Chunks as swizzled tiles, filled and emptied in 16-byte pieces by a group of 128 threads. Thread t moves piece t % 8
// of rows 4 (t / 8) + {0..3} of each tile, both ways: a thread may overwrite or read without a barrier what it has
// itself loaded, and a warp what its own 16 rows of an accumulator put there.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/tile.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kRowsEach = 4;  // rows of a tile a thread moves

// The rows of one chunk in a tensor: bf16, or a gate of bf16 or f32. Aligned, and 64 strides fit (aligned_rows.h).
struct Rows {
  const char* data;  // channel 0 of the chunk's first token
  int stride;        // bytes from token to token
  int rows;          // tokens of the chunk, at most 64
  int channels;      // beyond them zeros are read
};

__device__ __forceinline__ Rows rows_of(const Strided& s, int element, const Span& span, std::int64_t first, int head,
                                        int channel, int channels) {
  const std::int64_t offset = span.batch * s.batch + (span.begin + first) * s.token + head * s.head + channel;
  const std::int64_t left = span.length - first;
  return {static_cast<const char*>(s.data) + offset * element, static_cast<int>(s.token * element),
          static_cast<int>(left < kChunk ? left : kChunk), channels - channel};
}

// Where the piece of this thread's row i lies in a tile.
__device__ __forceinline__ std::uint32_t own_piece(int thread, int i) {
  return (tile_piece(kRowsEach * (thread / 8), thread % 8) ^ static_cast<std::uint32_t>(i << 4)) + 128 * i;
}

// Starts the copy of a 64-channel tile; the pieces outside become zeros.
__device__ __forceinline__ void load_tile(std::uint32_t tile, const Rows& r, int thread) {
  const int row = kRowsEach * (thread / 8), left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
  const char* from = r.data + (left > 0 ? row * r.stride + thread % 8 * 16 : 0);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    ptx::copy_async_16(tile + own_piece(thread, i), i < left ? from + i * r.stride : r.data, i < left ? 16 : 0);
  }
}

// Writes a tile to the rows of a tensor of 16-bit elements.
__device__ __forceinline__ void store_tile(const Rows& r, std::uint32_t tile, int thread) {
  const int row = kRowsEach * (thread / 8), left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
  char* to = const_cast<char*>(r.data) + row * r.stride + thread % 8 * 16;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    if (i < left) *reinterpret_cast<uint4*>(to + i * r.stride) = load_shared_16(tile + own_piece(thread, i));
  }
}

// Writes a tile to memory as it lies.
__device__ __forceinline__ void store_tile_image(char* image, std::uint32_t tile, int thread) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const std::uint32_t at = own_piece(thread, i);
    *reinterpret_cast<uint4*>(image + at) = load_shared_16(tile + at);
  }
}

// Eight bf16 elements to floats and back.
__device__ __forceinline__ void unpack_8(const uint4& x, float (&f)[8]) {
  const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = ptx::unpack_bf16(words[i]);
    f[2 * i] = pair.x;
    f[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ uint4 pack_8(const float (&f)[8]) {
  return make_uint4(ptx::pack_bf16(f[0], f[1]), ptx::pack_bf16(f[2], f[3]), ptx::pack_bf16(f[4], f[5]),
                    ptx::pack_bf16(f[6], f[7]));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

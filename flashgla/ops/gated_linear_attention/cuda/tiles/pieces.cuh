// Chunks as swizzled tiles, filled and emptied in 16-byte pieces by a group of 128 threads. Thread t moves piece t % 8
// of rows 4 (t / 8) + {0..3} of each tile, both ways: a thread may overwrite or read without a barrier what it has
// itself loaded, and a warp what its own 16 rows of an accumulator put there.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/tile.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kRowsEach = 4;  // rows of a tile a thread moves

// The rows of one chunk in a tensor: bf16, or a gate of bf16 or f32. Aligned, and 64 strides fit (plan.h).
struct Rows {
  const char* data;  // channel 0 of the chunk's first token
  int stride;        // bytes from token to token
  int rows;          // tokens of the chunk, at most 64
  int channels;      // beyond them zeros are read
};

// From `channel` on, of a tensor that has so many; elements of so many bytes.
__device__ __forceinline__ Rows rows_of(const Strided& s, int element, const Chunk& c, int head, int channel,
                                        int channels) {
  const std::int64_t offset = c.batch * s.batch + c.token * s.token + head * s.head + channel;
  return {static_cast<const char*>(s.data) + offset * element, static_cast<int>(s.token * element), c.rows,
          channels - channel};
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

// ---- by one warp ----

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

// ---- key gates in f32 ----
// A tile of them is rounded to bf16 as it comes, through registers: a chunk's 16 KiB have no place in shared memory.
// Rounded, a sum of gates x is off by at most 2^-9 x, and a term that it makes decay by 2^-9 x e^-x, at most 0.37 of
// what rounding q, k or v does.

// Two of them, as they lie in memory.
__device__ __forceinline__ std::uint32_t round_two(std::uint32_t x, std::uint32_t y) {
  return ptx::pack_bf16(__uint_as_float(x), __uint_as_float(y));
}

// By a group: kRows / 4 of each thread's pieces, from row `first` on; rows are of f32.
template <int kRows>
__device__ __forceinline__ void load_f32_gates(std::uint32_t tile, const Rows& r, int first, int thread) {
  constexpr int kEach = kRows / 16;
  const int row = first + thread / 8, left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
  const char* from = r.data + row * r.stride + thread % 8 * 32;
  uint4 raw[kEach][2] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (16 * i < left) {
      raw[i][0] = *reinterpret_cast<const uint4*>(from);
      raw[i][1] = *reinterpret_cast<const uint4*>(from + 16);
    }
    from += 16 * r.stride;
  }
  const std::uint32_t to = tile + tile_piece(row, thread % 8);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint4 low = raw[i][0], high = raw[i][1];
    store_shared_16(to + 16 * 128 * i, make_uint4(round_two(low.x, low.y), round_two(low.z, low.w),
                                                  round_two(high.x, high.y), round_two(high.z, high.w)));
  }
}
// The same of a whole tile, in registers between reading and writing; neighbours read what lies side by side.
struct F32Gates {
  static constexpr int kEach = kTile / 8;
  uint4 raw[kEach];

  __device__ __forceinline__ void load(const Rows& r, int thread) {
    const int row = thread / 16, left = thread % 16 * 4 < r.channels ? r.rows - row : 0;
    const char* from = r.data + row * r.stride + thread % 16 * 16;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      raw[i] = make_uint4(0, 0, 0, 0);
      if (8 * i < left) raw[i] = *reinterpret_cast<const uint4*>(from);
      from += 8 * r.stride;
    }
  }
  __device__ __forceinline__ void put(std::uint32_t tile, int thread) const {
    const std::uint32_t to = tile + tile_piece(thread / 16, thread % 16 / 2) + thread % 2 * 8;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      store_shared_uint2(to + 8 * 128 * i, make_uint2(round_two(raw[i].x, raw[i].y), round_two(raw[i].z, raw[i].w)));
    }
  }
};
// Such rows to the L2, by a group.
__device__ __forceinline__ void ask_for_f32_gates(const Rows& r, int thread) {
  if (thread / 2 >= r.rows || thread % 2 * 32 >= r.channels) return;
  ptx::prefetch_l2(r.data + thread / 2 * r.stride + thread % 2 * 128);
}

// Where numbers of f32 stay as exact as f32 sums want them: starts the copy of a tile of them to two tiles' places,
// channels 32 and on to the second; a thread's piece is four channels of each half.
__device__ __forceinline__ void load_f32_tile(std::uint32_t low, std::uint32_t high, const Rows& r, int thread) {
  const int row = kRowsEach * (thread / 8), channel = thread % 8 * 4;
  const char* from = r.data + row * r.stride + channel * 4;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const std::uint32_t at = own_piece(thread, i);
    const int left = row + i < r.rows ? r.channels - channel : 0;
    ptx::copy_async_16(low + at, left > 0 ? from : r.data, left > 0 ? 16 : 0);
    ptx::copy_async_16(high + at, left > 32 ? from + 128 : r.data, left > 32 ? 16 : 0);
    from += r.stride;
  }
}
// Starts the copy of a tile of them to two tiles' places, channels 32 and on to the second; neighbours copy what lies
// side by side, 256 bytes of a row.
__device__ __forceinline__ void stage_f32_gates(std::uint32_t low, std::uint32_t high, const Rows& r, int thread) {
  const int row = thread / 16, piece = thread % 16, left = piece * 4 < r.channels ? r.rows - row : 0;
  const char* from = r.data + row * r.stride + piece * 16;
  const std::uint32_t to = (piece < 8 ? low : high) + tile_piece(row, piece % 8);
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i) {
    ptx::copy_async_16(to + 8 * 128 * i, 8 * i < left ? from + 8 * i * r.stride : r.data, 8 * i < left ? 16 : 0);
  }
}
// What this thread has staged, rounded to bf16, in the first of the two places. A row is one warp's.
__device__ __forceinline__ void round_staged_gates(std::uint32_t low, std::uint32_t high, int thread) {
  const int row = thread / 16, piece = thread % 16;
  const std::uint32_t from = (piece < 8 ? low : high) + tile_piece(row, piece % 8),
                      to = low + tile_piece(row, piece / 2) + piece % 2 * 8;
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i) {
    const uint4 x = load_shared_16(from + 8 * 128 * i);
    __syncwarp();
    store_shared_uint2(to + 8 * 128 * i, make_uint2(ptx::pack_bf16(__uint_as_float(x.x), __uint_as_float(x.y)),
                                                    ptx::pack_bf16(__uint_as_float(x.z), __uint_as_float(x.w))));
  }
}
// What load_f32_tile has brought becomes two tiles of bf16 in the same places, the numbers rounded and what is left of
// them, -inf as a number of which sums stay numbers. Each warp its own rows; all lanes take part.
__device__ __forceinline__ void split_f32_tile(std::uint32_t rounded, std::uint32_t rest, int thread) {
  const auto put = [&](std::uint32_t at, const uint4& x) {
    const auto finite = [](std::uint32_t bits) { return ptx::larger_or_nan(__uint_as_float(bits), -1e30f); };
    float f[4] = {finite(x.x), finite(x.y), finite(x.z), finite(x.w)};
    store_shared_uint2(rounded + at, make_uint2(take_bf16(f[0], f[1]), take_bf16(f[2], f[3])));
    store_shared_uint2(rest + at, make_uint2(ptx::pack_bf16(f[0], f[1]), ptx::pack_bf16(f[2], f[3])));
  };
#pragma unroll 1
  for (int i = 0; i < kRowsEach; ++i) {
    const uint4 low = load_shared_16(rounded + own_piece(thread, i)),
                high = load_shared_16(rest + own_piece(thread, i));
    const int row = kRowsEach * (thread / 8) + i, piece = thread % 8 / 2, half = thread % 2 * 8;
    __syncwarp();  // a row's pieces are one warp's
    put(tile_piece(row, piece) + half, low);
    put(tile_piece(row, piece + 4) + half, high);
  }
}

// Of rows of f32 gates in memory two channels', base 2; outside 0.
__device__ __forceinline__ float2 f32_gates_at(const Rows& r, int row, int column) {
  if (row >= r.rows || column >= r.channels) return make_float2(0.0f, 0.0f);
  const float2 g = *reinterpret_cast<const float2*>(r.data + static_cast<std::int64_t>(row) * r.stride + column * 4);
  return make_float2(g.x * kLog2E, g.y * kLog2E);
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

// Tiles of f32 on bf16 tensor cores, for operands that bf16 would round: f16 and f32 inputs. A number is the sum of
// kParts bf16 numbers, each what the ones before it leave of it, rounded: two are 16 bits (all of an f16), three 24
// (all of an f32), with f32's exponents. A product of tiles is the sum of those of their parts i and j with i + j <
// kParts: three products, or six. Design, equations: f32_tiles/README.md.
//
// A split tile is kParts 64x64 tiles (tiles/tile.cuh), one after the other. Groups of 128 threads; thread t moves
// channels 8 (t % 8) .. + 7 of tokens 4 (t / 8) + {0..3} of each tile.
#pragma once

#include <type_traits>

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <int kParts>
constexpr int kSplitBytes = kParts* kTileBytes;
constexpr float kSplitRange = 60.0f;  // bits a channel may fall within a chunk under one anchor

// ---- from memory and to it ----

// 64 tokens by 64 channels of a tensor. Outside its rows and channels zeros are read and nothing is written.
template <class T>
struct Place : Rows {
  __device__ __forceinline__ Place(const Strided& s, const Chunk& c, int head, int channel, int width)
      : Rows(rows_of(s, sizeof(T), c, head, channel, width)) {}
};

// A thread's elements of a tile on their way, as in memory.
template <class T>
struct Loaded {
  static constexpr int words = sizeof(T) == 2 ? 1 : 2;
  uint4 raw[kRowsEach][words];
};

// Starts the loads; nothing waits for them here.
template <class T>
__device__ __forceinline__ void load(Loaded<T>& x, const Place<T>& s, int thread) {
  const int row = kRowsEach * (thread / 8), channel = 8 * (thread % 8), left = s.channels - channel;
  const int rows = left > 0 ? s.rows - row : 0;
  const std::int64_t stride = s.stride;  // widened once, not at each row
  const char* from = s.data + row * stride + channel * static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int word = 0; word < Loaded<T>::words; ++word) {
      const bool inside = i < rows && (word == 0 || left > 4);
      x.raw[i][word] = inside ? *reinterpret_cast<const uint4*>(from + 16 * word) : make_uint4(0, 0, 0, 0);
    }
    from += stride;
  }
}
// Brings what will be loaded later into the L2.
template <class T>
__device__ __forceinline__ void fetch_ahead(const Place<T>& s, int thread) {
  const int row = thread / 2, each = 128 / static_cast<int>(sizeof(T)), channel = thread % 2 * each;
  if (row < s.rows && channel < s.channels && channel < kTile)
    ptx::prefetch_l2(s.data + row * s.stride + thread % 2 * 128);
}
// Row i of what was loaded.
template <class T>
__device__ __forceinline__ void elements_of(float (&f)[8], const Loaded<T>& x, int i) {
  if constexpr (Loaded<T>::words == 2) {
    const std::uint32_t bits[8] = {x.raw[i][0].x, x.raw[i][0].y, x.raw[i][0].z, x.raw[i][0].w,
                                   x.raw[i][1].x, x.raw[i][1].y, x.raw[i][1].z, x.raw[i][1].w};
#pragma unroll
    for (int e = 0; e < 8; ++e) f[e] = __uint_as_float(bits[e]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    unpack_8(x.raw[i][0], f);
  } else {
    const std::uint32_t words[4] = {x.raw[i][0].x, x.raw[i][0].y, x.raw[i][0].z, x.raw[i][0].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 two = ptx::unpack_f16(words[e]);
      f[2 * e] = two.x;
      f[2 * e + 1] = two.y;
    }
  }
}

// Channels `channel` (even) and the next of a row.
template <class T>
__device__ __forceinline__ void store_channels(const Place<T>& to, char* row, int channel, float2 x) {
  if (channel >= to.channels) return;
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(row + 4 * channel) = x;
  } else {
    *reinterpret_cast<std::uint32_t*>(row + 2 * channel) = ptx::pack_f16(x.x, x.y);
  }
}
template <class T>
__device__ __forceinline__ void store_rows(const Place<T>& to, const Accumulator& a, int thread) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of_element(thread, 2 * half);
    if (row >= to.rows) continue;
    char* at = const_cast<char*>(to.data) + row * to.stride;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      store_channels(to, at, 8 * j + 2 * (thread & 3), make_float2(a[4 * j + 2 * half], a[4 * j + 2 * half + 1]));
  }
}

// ---- split tiles ----

template <int kParts>
__device__ __forceinline__ void piece_of(float (&f)[8], std::uint32_t tile, std::uint32_t at) {
#pragma unroll
  for (int part = kParts - 1; part >= 0; --part) {
    float x[8];
    unpack_8(load_shared_16(tile + part * kTileBytes + at), x);
#pragma unroll
    for (int e = 0; e < 8; ++e) f[e] = part + 1 == kParts ? x[e] : x[e] + f[e];
  }
}
// Columns `column` (even) and the next of a row.
template <int kParts>
__device__ __forceinline__ float2 two_of(std::uint32_t tile, int row, int column) {
  const std::uint32_t at = tile + element_offset(row, column);
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int part = kParts - 1; part >= 0; --part) {
    const float2 x = ptx::unpack_bf16(load_shared_4(at + part * kTileBytes));
    sum = make_float2(sum.x + x.x, sum.y + x.y);
  }
  return sum;
}

// What was loaded, times factor(i, e) of row i, channel e of this thread, in parts: put(part, where in
// its tile, 16 bytes).
template <int kParts, class T, class Factor, class Put>
__device__ __forceinline__ void split_loaded(const Loaded<T>& x, int thread, Factor factor, Put put) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    float f[8];
    elements_of(f, x, i);
#pragma unroll
    for (int e = 0; e < 8; ++e) f[e] *= factor(i, e);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint4 packed = pack_8(f);
      put(part, own_piece(thread, i), packed);
      if (part + 1 == kParts) break;
      float rounded[8];
      unpack_8(packed, rounded);
#pragma unroll
      for (int e = 0; e < 8; ++e) f[e] -= rounded[e];
    }
  }
}
// Into a tile.
template <int kParts, class T, class Factor>
__device__ __forceinline__ void put_loaded(std::uint32_t tile, const Loaded<T>& x, int thread, Factor factor) {
  split_loaded<kParts>(x, thread, factor, [&](int part, std::uint32_t at, const uint4& packed) {
    store_shared_16(tile + part * kTileBytes + at, packed);
  });
}
template <int kParts, class T>
__device__ __forceinline__ void put_loaded(std::uint32_t tile, const Loaded<T>& x, int thread) {
  put_loaded<kParts>(tile, x, thread, [](int, int) { return 1.0f; });
}
// put(part, what is left for it): an accumulator part by part.
template <int kParts, class Put>
__device__ __forceinline__ void split_accumulator(const Accumulator& a, Put put) {
  Accumulator rest;
#pragma unroll
  for (int i = 0; i < 32; ++i) rest[i] = a[i];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    put(part, rest);
    if (part + 1 == kParts) break;
#pragma unroll
    for (int i = 0; i < 32; i += 2) take_bf16(rest[i], rest[i + 1]);
  }
}
// Each warp writes its own 16 rows.
template <class Core, int kParts>
__device__ __forceinline__ void put_split(std::uint32_t tile, const Accumulator& a, int thread) {
  split_accumulator<kParts>(
      a, [&](int part, const Accumulator& x) { put_rounded<Core>(tile + part * kTileBytes, x, thread); });
}
// The same to memory, as it lies in the tile.
template <class Core, int kParts>
__device__ __forceinline__ void store_split_image(char* image, std::uint32_t tile, const Accumulator& a, int thread) {
  put_split<Core, kParts>(tile, a, thread);
  __syncwarp();
  const int begin = thread / 32 * 2048 + thread % 32 * 16;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = part * kTileBytes + begin + 512 * i;
      *reinterpret_cast<uint4*>(image + at) = load_shared_16(tile + at);
    }
  }
  __syncwarp();
}
template <int kParts>
__device__ __forceinline__ void copy_split(std::uint32_t tile, const char* image, int thread) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) copy_image(tile + part * kTileBytes, image + part * kTileBytes, thread);
}

// Brings an image that will be copied later into the L2.
template <int kParts>
__device__ __forceinline__ void fetch_split_ahead(const char* image, int thread) {
#pragma unroll
  for (int at = 128 * thread; at < kSplitBytes<kParts>; at += 128 * kGroupThreads) ptx::prefetch_l2(image + at);
}

// multiply(i, j) for the parts whose products count, the smallest first.
template <int kParts, class Multiply>
__device__ __forceinline__ void for_parts(Multiply multiply) {
#pragma unroll
  for (int sum = kParts - 1; sum >= 0; --sum) {
#pragma unroll
    for (int i = 0; i <= sum; ++i) multiply(i, sum - i);
  }
}
// d += a b. kLoop: with mma.sync the products of parts one after the other in a loop, where in one piece their loads
// from shared memory would be spread over more registers than the kernel has.
template <class Core, int kParts, Stored a_stored, Stored b_stored, bool kLoop = false, Loads kLoads = Loads::ahead>
__device__ __forceinline__ void add_product(Accumulator& d, std::uint32_t a, std::uint32_t b, int thread) {
  const auto multiply = [&](int i, int j) {
    Core::template product<a_stored, b_stored, false, kLoads>(d, a + i * kTileBytes, b + j * kTileBytes, thread);
  };
  if constexpr (kLoop && std::is_same_v<Core, TensorCore80>) {
#pragma unroll 1
    for (int sum = kParts - 1; sum >= 0; --sum) {
#pragma unroll 1
      for (int i = 0; i <= sum; ++i) multiply(i, sum - i);
    }
  } else {
    for_parts<kParts>(multiply);
  }
}
// a: an accumulator.
template <int kParts>
struct SplitOperand {
  std::uint32_t parts[kParts][16];
  __device__ __forceinline__ explicit SplitOperand(const Accumulator& a) {
    split_accumulator<kParts>(a, [&](int part, const Accumulator& x) { to_operand(parts[part], x); });
  }
};
template <class Core, int kParts, Stored b_stored>
__device__ __forceinline__ void add_product(Accumulator& d, SplitOperand<kParts>& a, std::uint32_t b, int thread) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) Core::begin(a.parts[part]);
  Core::begin(d);
  for_parts<kParts>([&](int i, int j) { Core::template product<b_stored>(d, a.parts[i], b + j * kTileBytes, thread); });
  Core::finish(d);
}

// ---- gates ----

// Gates of a chunk and 64 key channels, on their way. Key gates are of type T or f32; others one a token.
template <class T>
struct LoadedGates {
  static constexpr bool may_be_narrow = sizeof(T) == 2;
  Loaded<float> wide;

  __device__ __forceinline__ void load(const Params& p, const Chunk& c, int kv_head, int channel, int thread) {
    if (p.gate != GateKind::key) {
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const int row = kRowsEach * (thread / 8) + i;
        const std::int64_t at = c.batch * p.g.batch + (c.token + row) * p.g.token + kv_head * p.g.head;
        const bool inside = p.gate != GateKind::none && row < c.rows;
        wide.raw[i][0].x = inside ? __float_as_uint(load_as(p.gate_dtype, p.g.data, at)) : 0;
      }
    } else if (p.gate_dtype == DType::f32) {
      cuda::load(wide, Place<float>(p.g, c, kv_head, channel, p.key_dim), thread);
    } else if constexpr (may_be_narrow) {
      Loaded<T> narrow;
      cuda::load(narrow, Place<T>(p.g, c, kv_head, channel, p.key_dim), thread);
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) wide.raw[i][0] = narrow.raw[i][0];
    }
  }
  __device__ __forceinline__ void fetch_ahead(const Params& p, const Chunk& c, int kv_head, int channel, int thread) {
    if (p.gate != GateKind::key) return;
    if (may_be_narrow && p.gate_dtype != DType::f32) {
      cuda::fetch_ahead(Place<T>(p.g, c, kv_head, channel, p.key_dim), thread);
    } else {
      cuda::fetch_ahead(Place<float>(p.g, c, kv_head, channel, p.key_dim), thread);
    }
  }
  // Base 2.
  __device__ __forceinline__ void take(float (&gates)[kRowsEach][8], const Params& p) const {
    const bool narrow = may_be_narrow && p.gate_dtype != DType::f32;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (p.gate != GateKind::key) {
        const float gate = base_2_gate(__uint_as_float(wide.raw[i][0].x));
#pragma unroll
        for (int e = 0; e < 8; ++e) gates[i][e] = gate;
        continue;
      }
      if (narrow) {
        Loaded<T> x;
        x.raw[0][0] = wide.raw[i][0];
        elements_of(gates[i], x, 0);
      } else {
        elements_of(gates[i], wide, i);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) gates[i][e] = base_2_gate(gates[i][e]);
    }
  }
  // What they multiply by.
  __device__ __forceinline__ void take_decays(float (&decays)[kRowsEach][8], const Params& p) const {
    take(decays, p);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) decays[i][e] = ptx::exp2(decays[i][e]);
    }
  }
};

// In place of the gates: their sums from the chunk's start up to and with the token, or (kLater) of the tokens after
// it; none is a difference of sums. all: the sums over the chunk. totals: [4][64] floats; one barrier, after which they
// are read.
template <bool kLater>
__device__ __forceinline__ void sum_gates(float (&g)[kRowsEach][8], float (&all)[8], float* totals, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  // In the order of the sums: this thread's rows, whether one and two of the warp's threads with its channels come
  // before it, and whether it is the last of these.
  const auto row = [](int i) { return kLater ? kRowsEach - 1 - i : i; };
  const bool one_before = kLater ? lane < 24 : lane >= 8, two_before = kLater ? lane < 16 : lane >= 16,
             is_last = kLater ? lane < 8 : lane >= 24;
  const auto from_before = [](float x, int lanes) {
    return kLater ? __shfl_down_sync(0xffffffffu, x, lanes) : __shfl_up_sync(0xffffffffu, x, lanes);
  };
  float others[8];  // of the warp's tokens before or after this thread's
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float sum = g[row(0)][e];
    if (kLater) g[row(0)][e] = 0.0f;
#pragma unroll
    for (int i = 1; i < kRowsEach; ++i) {
      const float before = sum;
      sum += g[row(i)][e];
      g[row(i)][e] = kLater ? before : sum;
    }
    float other = from_before(sum, 8);
    sum += one_before ? other : 0.0f;
    other = from_before(sum, 16);
    sum += two_before ? other : 0.0f;
    other = from_before(sum, 8);
    others[e] = one_before ? other : 0.0f;
    if (is_last) totals[warp * 64 + 8 * (lane % 8) + e] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < 8; ++e) all[e] = 0.0f;
#pragma unroll
  for (int w = 0; w < kGroupThreads / 32; ++w) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float total = totals[w * 64 + 8 * (lane % 8) + e];
      all[e] += total;
      others[e] += (kLater ? w > warp : w < warp) ? total : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e) g[i][e] += others[e];
  }
}

// Whether one anchor does not reach; the same for all threads, since every warp sees all channels.
__device__ __forceinline__ bool is_steep(const float (&all)[8]) {
  bool good = true;
#pragma unroll
  for (int e = 0; e < 8; ++e) good &= all[e] >= -kSplitRange;
  return !__all_sync(0xffffffffu, good);
}

// The chunk's decays of 64 channels.
__device__ __forceinline__ void put_decays(float* decays, const float (&all)[8], int thread) {
  if (thread >= 8) return;
#pragma unroll
  for (int e = 0; e < 8; ++e) decays[8 * thread + e] = ptx::exp2(all[e]);
}

// ---- tiles of f32 proper ----
// 64 rows of 64 floats, columns permuted by the row in blocks of 8 against bank conflicts.
constexpr int kFloatTileBytes = 64 * 64 * 4;
__device__ __forceinline__ int float_place(int row, int column) {
  return row * 64 + (column ^ (((row ^ (row >> 2)) & 7) << 3));
}
__device__ __forceinline__ float2& two_at(float* tile, int row, int column) {
  return *reinterpret_cast<float2*>(tile + float_place(row, column));
}
__device__ __forceinline__ float2 two_at(const float* tile, int row, int column) {
  return *reinterpret_cast<const float2*>(tile + float_place(row, column));
}
__device__ __forceinline__ void put_floats(float* tile, const float (&g)[kRowsEach][8], int thread) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    float4* to = reinterpret_cast<float4*>(tile + float_place(kRowsEach * (thread / 8) + i, 8 * (thread % 8)));
    to[0] = make_float4(g[i][0], g[i][1], g[i][2], g[i][3]);
    to[1] = make_float4(g[i][4], g[i][5], g[i][6], g[i][7]);
  }
}
__device__ __forceinline__ void put_floats(float* tile, const Accumulator& a, int thread) {
#pragma unroll
  for (int i = 0; i < 32; i += 2)
    two_at(tile, row_of_element(thread, i), column_of_element(thread, i)) = make_float2(a[i], a[i + 1]);
}
// f(i, element i of the accumulator's place).
template <class F>
__device__ __forceinline__ void for_floats(const float* tile, int thread, F f) {
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const float2 x = two_at(tile, row_of_element(thread, i), column_of_element(thread, i));
    f(i, x.x);
    f(i + 1, x.y);
  }
}

// ---- scores ----

// Zeros where the key comes after the query.
__device__ __forceinline__ void keep_pairs(Accumulator& scores, bool transposed, int thread) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = row_of_element(thread, i), column = column_of_element(thread, i);
    scores[i] = (transposed ? column >= row : row >= column) ? scores[i] : 0.0f;
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

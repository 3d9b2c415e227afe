// Tiles of f32 on bf16 tensor cores, for operands that bf16 would round: f16 and f32 inputs, and bf16 with more than
// 256 key channels. A number is the sum of kParts bf16 numbers, each what the ones before it leave of it, rounded: two
// are 16 bits (all of an f16), three 24 (all of an f32), with f32's exponents. A product of tiles is the sum of those
// of their parts i and j with i + j < kParts: three products, or six. Design, equations: f32_tiles.md.
//
// A split tile is kParts 64x64 tiles (backward_tile.cuh), one after the other. Groups of 128 threads; thread t moves
// channels 8 (t % 8) .. + 7 of tokens 4 (t / 8) + {0..3} of each tile.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles.h"
#include "flashgla/ops/gated_linear_attention/cuda/forward_tiles.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <int kParts>
constexpr int kSplitBytes = kParts * kTileBytes;
constexpr float kSplitRange = 60.0f;  // bits a channel may fall within a chunk under one anchor

// ---- from memory ----

// 64 tokens by 64 channels of a tensor; zeros outside.
struct Source {
  const char* data;     // the first token's first channel
  std::int64_t stride;  // bytes
  int rows, channels;
  DType dtype;
};

__device__ __forceinline__ Source source_of(const Strided& s, DType dtype, const Chunk& c, int head, int channel,
                                            int channels) {
  const int bytes = dtype == DType::f32 ? 4 : 2;
  return {static_cast<const char*>(s.data) + (c.batch * s.batch + c.token * s.token + head * s.head + channel) * bytes,
          s.token * bytes, c.rows, channels - channel, dtype};
}

// A thread's elements of a tile on their way: as in memory, or f32 where they do not come in pieces.
struct Loaded {
  uint4 raw[kRowsEach][2];
};

// Starts the loads; nothing waits for them here.
template <bool kInPieces>
__device__ __forceinline__ void load(Loaded& x, const Source& s, int thread) {
  const int row = kRowsEach * (thread / 8), channel = 8 * (thread % 8), left = s.channels - channel;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  if constexpr (!kInPieces) {
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      std::uint32_t bits[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const bool inside = row + i < s.rows && e < left;
        bits[e] = inside ? __float_as_uint(load_as(s.dtype, s.data + (row + i) * s.stride, channel + e)) : 0;
      }
      x.raw[i][0] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
      x.raw[i][1] = make_uint4(bits[4], bits[5], bits[6], bits[7]);
    }
  } else if (s.dtype == DType::f32) {
    const char* from = s.data + row * s.stride + channel * 4;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const auto* place = reinterpret_cast<const uint4*>(from + i * s.stride);
      x.raw[i][0] = row + i < s.rows && left > 0 ? place[0] : zeros;
      x.raw[i][1] = row + i < s.rows && left > 4 ? place[1] : zeros;
    }
  } else {
    const char* from = s.data + row * s.stride + channel * 2;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i)
      x.raw[i][0] = row + i < s.rows && left > 0 ? *reinterpret_cast<const uint4*>(from + i * s.stride) : zeros;
  }
}
// Brings what will be loaded later into the L2.
__device__ __forceinline__ void fetch_ahead(const Source& s, int thread) {
  const int row = thread / 2, each = s.dtype == DType::f32 ? 32 : 64, channel = thread % 2 * each;
  if (row < s.rows && channel < s.channels && channel < kTile)
    ptx::prefetch_l2(s.data + row * s.stride + thread % 2 * 128);
}
// Row i of what was loaded.
template <bool kInPieces>
__device__ __forceinline__ void elements_of(float (&f)[8], const Loaded& x, int i, const Source& s) {
  if (s.dtype == DType::f32 || !kInPieces) {
    const std::uint32_t bits[8] = {x.raw[i][0].x, x.raw[i][0].y, x.raw[i][0].z, x.raw[i][0].w,
                                   x.raw[i][1].x, x.raw[i][1].y, x.raw[i][1].z, x.raw[i][1].w};
#pragma unroll
    for (int e = 0; e < 8; ++e) f[e] = __uint_as_float(bits[e]);
  } else if (s.dtype == DType::bf16) {
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

// ---- to memory ----

// One or two neighbouring channels, as many as are left.
__device__ __forceinline__ void store_pair(DType dtype, char* at, float2 x, int left, bool in_pairs) {
  if (left <= 0) return;
  if (in_pairs && left > 1) {
    if (dtype == DType::f32) {
      *reinterpret_cast<float2*>(at) = x;
    } else {
      *reinterpret_cast<std::uint32_t*>(at) = dtype == DType::f16 ? ptx::pack_f16(x.x, x.y) : ptx::pack_bf16(x.x, x.y);
    }
  } else {
    store_as(dtype, at, 0, x.x);
    if (left > 1) store_as(dtype, at, 1, x.y);
  }
}
__device__ __forceinline__ void store_channels(const Strided& to, DType dtype, const Chunk& c, int head, int row,
                                               int channel, int channels, float2 x) {
  const int bytes = dtype == DType::f32 ? 4 : 2;
  char* at = static_cast<char*>(to.data) +
             (c.batch * to.batch + (c.token + row) * to.token + head * to.head + channel) * bytes;
  store_pair(dtype, at, x, channels - channel, reinterpret_cast<std::uintptr_t>(at) % (2 * bytes) == 0);
}

// ---- split tiles ----

// Eight elements into a split tile, at the byte offset of a 16-byte piece.
template <int kParts>
__device__ __forceinline__ void put_piece(std::uint32_t tile, std::uint32_t at, float (&f)[8]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint4 packed = pack_8(f);
    store_shared_16(tile + part * kTileBytes + at, packed);
    if (part + 1 == kParts) break;
    float rounded[8];
    unpack_8(packed, rounded);
#pragma unroll
    for (int e = 0; e < 8; ++e) f[e] -= rounded[e];
  }
}
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

// factor(i, e): of row i, channel e of this thread.
template <class Kernel, class Factor>
__device__ __forceinline__ void put_loaded(std::uint32_t tile, const Loaded& x, const Source& s, int thread,
                                           Factor factor) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    float f[8];
    elements_of<Kernel::in_pieces>(f, x, i, s);
#pragma unroll
    for (int e = 0; e < 8; ++e) f[e] *= factor(i, e);
    put_piece<Kernel::parts>(tile, own_piece(thread, i), f);
  }
}
template <class Kernel>
__device__ __forceinline__ void put_loaded(std::uint32_t tile, const Loaded& x, const Source& s, int thread) {
  put_loaded<Kernel>(tile, x, s, thread, [](int, int) { return 1.0f; });
}
// What an accumulator loses when rounded to bf16, in its place.
__device__ __forceinline__ void keep_rest(Accumulator& a) {
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const float2 rounded = ptx::unpack_bf16(ptx::pack_bf16(a[i], a[i + 1]));
    a[i] -= rounded.x;
    a[i + 1] -= rounded.y;
  }
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
    if (part + 1 < kParts) keep_rest(rest);
  }
}
// Each warp writes its own 16 rows.
template <int kParts>
__device__ __forceinline__ void put_split(char* tile, const Accumulator& a, int thread) {
  split_accumulator<kParts>(
      a, [&](int part, const Accumulator& x) { put_tile(tile + part * kTileBytes, x, thread); });
}
template <int kParts>
__device__ __forceinline__ void store_split_image(char* image, char* tile, const Accumulator& a, int thread) {
  split_accumulator<kParts>(a, [&](int part, const Accumulator& x) {
    store_image(image + part * kTileBytes, tile + part * kTileBytes, x, thread);
  });
}
template <int kParts>
__device__ __forceinline__ void copy_split(std::uint32_t tile, const char* image, int thread) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    copy_image(tile + part * kTileBytes, image + part * kTileBytes, thread);
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
// d += a b.
template <class Core, int kParts, Stored a_stored, Stored b_stored>
__device__ __forceinline__ void add_product(Accumulator& d, std::uint32_t a, std::uint32_t b, int thread) {
  for_parts<kParts>([&](int i, int j) {
    Core::template product<a_stored, b_stored>(d, a + i * kTileBytes, b + j * kTileBytes, thread);
  });
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

// This thread's gates of a tile, base 2; key gates as loaded from g.
template <bool kInPieces>
__device__ __forceinline__ void gates_of(float (&gates)[kRowsEach][8], const Params& p, const Loaded& g,
                                         const Source& s, const Chunk& c, int kv_head, int thread) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    if (p.gate == GateKind::key) {
      elements_of<kInPieces>(gates[i], g, i, s);
#pragma unroll
      for (int e = 0; e < 8; ++e) gates[i][e] = base_2_gate(gates[i][e]);
    } else {
      const int row = kRowsEach * (thread / 8) + i;
      const float gate = row < c.rows ? key_gate(p, c.batch, c.token + row, kv_head, 0) : 0.0f;
#pragma unroll
      for (int e = 0; e < 8; ++e) gates[i][e] = gate;
    }
  }
}

// In place of the gates: their sums from the chunk's start up to and with the token, or (kLater) of the tokens after
// it; none is a difference of sums. all: the sums over the chunk. totals: [4][64] floats; one barrier, after which they
// are read.
template <bool kLater>
__device__ __forceinline__ void sum_gates(float (&g)[kRowsEach][8], float (&all)[8], float* totals, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  float others[8];  // of the warp's tokens before or after this thread's
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float sum;
    if constexpr (kLater) {
      const float last = g[3][e], two = last + g[2][e], three = two + g[1][e];
      sum = three + g[0][e];
      g[0][e] = three;
      g[1][e] = two;
      g[2][e] = last;
      g[3][e] = 0.0f;
      float other = __shfl_down_sync(0xffffffffu, sum, 8);
      sum += lane < 24 ? other : 0.0f;
      other = __shfl_down_sync(0xffffffffu, sum, 16);
      sum += lane < 16 ? other : 0.0f;
      other = __shfl_down_sync(0xffffffffu, sum, 8);
      others[e] = lane < 24 ? other : 0.0f;
    } else {
#pragma unroll
      for (int i = 1; i < kRowsEach; ++i) g[i][e] += g[i - 1][e];
      sum = g[kRowsEach - 1][e];
      float other = __shfl_up_sync(0xffffffffu, sum, 8);
      sum += lane >= 8 ? other : 0.0f;
      other = __shfl_up_sync(0xffffffffu, sum, 16);
      sum += lane >= 16 ? other : 0.0f;
      other = __shfl_up_sync(0xffffffffu, sum, 8);
      others[e] = lane >= 8 ? other : 0.0f;
    }
    if (kLater ? lane < 8 : lane >= 24) totals[warp * 64 + 8 * (lane % 8) + e] = sum;
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

// ---- steep tiles: pairs of tokens one by one ----
// Exact for any gates: the sum of the gates between two tokens is run up from one to the other. Thread: token
// threadIdx.x / 2, and every second pair of neighbouring channels. gates: base 2, f32 [64][kGateRow].
constexpr int kGateRow = 68;
constexpr int kGateTileBytes = 64 * kGateRow * 4;

__device__ __forceinline__ void put_gates(float* tile, const float (&g)[kRowsEach][8], int thread) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    float4* to = reinterpret_cast<float4*>(tile + (kRowsEach * (thread / 8) + i) * kGateRow + 8 * (thread % 8));
    to[0] = make_float4(g[i][0], g[i][1], g[i][2], g[i][3]);
    to[1] = make_float4(g[i][4], g[i][5], g[i][6], g[i][7]);
  }
}

struct ExactSums {
  float2 gates[16];
  __device__ __forceinline__ ExactSums() {
#pragma unroll
    for (int m = 0; m < 16; ++m) gates[m] = make_float2(0.0f, 0.0f);
  }
  static __device__ __forceinline__ int channel(int m) { return 4 * m + 2 * (static_cast<int>(threadIdx.x) & 1); }
  __device__ __forceinline__ void add(const float* tile, int row) {
#pragma unroll
    for (int m = 0; m < 16; ++m) {
      const float2 g = *reinterpret_cast<const float2*>(tile + row * kGateRow + channel(m));
      gates[m].x += g.x;
      gates[m].y += g.y;
    }
  }
  __device__ __forceinline__ float2 factor(int m) const {
    return make_float2(ptx::exp2(gates[m].x), ptx::exp2(gates[m].y));
  }
};

constexpr int kExactRow = 65;  // floats

// scores[query][key], query >= key, rows of kExactRow floats, from q and k without gates.
template <int kParts>
__device__ __noinline__ void exact_scores(float* scores, std::uint32_t q, std::uint32_t k, const float* gates) {
  const int query = static_cast<int>(threadIdx.x) >> 1;
  ExactSums sums;
  for (int step = 0; step < 64; ++step) {
    const int key = query - step;
    float score = 0.0f;
    if (key >= 0) {
#pragma unroll
      for (int m = 0; m < 16; ++m) {
        const int channel = ExactSums::channel(m);
        const float2 x = two_of<kParts>(q, query, channel), y = two_of<kParts>(k, key, channel), factor = sums.factor(m);
        score += x.x * y.x * factor.x + x.y * y.y * factor.y;
      }
      sums.add(gates, key);
    }
    score += __shfl_xor_sync(0xffffffffu, score, 1);
    if (key >= 0 && (threadIdx.x & 1) == 0) scores[query * kExactRow + key] = score;
  }
}

// A tile's rows times 2^(gates up to and with the row), or with kLater 2^(gates after it).
template <int kParts, bool kLater>
__device__ __noinline__ void gate_rows_exactly(std::uint32_t tile, const float* gates) {
  const int row = static_cast<int>(threadIdx.x) >> 1;
  ExactSums sums;
  for (int r = kLater ? row + 1 : 0; r < (kLater ? 64 : row + 1); ++r) sums.add(gates, r);
#pragma unroll
  for (int m = 0; m < 16; ++m) {
    const float2 x = two_of<kParts>(tile, row, ExactSums::channel(m)), factor = sums.factor(m);
    float rest[2] = {x.x * factor.x, x.y * factor.y};
    const std::uint32_t at = tile + element_offset(row, ExactSums::channel(m));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::uint32_t packed = ptx::pack_bf16(rest[0], rest[1]);
      store_shared_4(at + part * kTileBytes, packed);
      const float2 rounded = ptx::unpack_bf16(packed);
      rest[0] -= rounded.x;
      rest[1] -= rounded.y;
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

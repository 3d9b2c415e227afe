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

// ---- key gates in f32 ----
// A tile of them is rounded to bf16 as it comes, through registers: a chunk's 16 KiB have no place in shared memory.
// Rounded, a sum of gates x is off by at most 2^-9 x, and a term that it makes decay by 2^-9 x e^-x, at most 0.37 of
// what rounding q, k or v does.

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
  const auto pack = [](std::uint32_t x, std::uint32_t y) {
    return ptx::pack_bf16(__uint_as_float(x), __uint_as_float(y));
  };
  const std::uint32_t to = tile + tile_piece(row, thread % 8);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint4 low = raw[i][0], high = raw[i][1];
    store_shared_16(to + 16 * 128 * i,
                    make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w)));
  }
}
// Such rows to the L2, by a group.
__device__ __forceinline__ void ask_for_f32_gates(const Rows& r, int thread) {
  if (thread / 2 >= r.rows || thread % 2 * 32 >= r.channels) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(r.data + thread / 2 * r.stride + thread % 2 * 128));
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

// ---- key gates given as logits (Params::logit_scale) ----
// A kernel turns a tile of logits into log gates where it lies, as soon as it has come: worked out in f32, and rounded
// to bf16 as gates in memory would be. dg, on its way to memory, is multiplied by the slope, at the logits, read again,
// or, if gates have no least value, from the gates.

// log(sigmoid(x)) = min(x, 0) - log(1 + e), with e = e^-|x|; log(1 + e) / e is a polynomial of degree 3, 2^-11 of
// itself off at most, the gates' own rounding 2^-9: a logarithm would be the special functions' second instruction.
constexpr float kLogRatio0 = 0.99960651f, kLogRatio1 = -0.48641106f, kLogRatio2 = 0.254021f, kLogRatio3 = -0.07434202f;
__device__ __forceinline__ float log_sigmoid(float x) {
  const float e = ptx::exp2(-fabsf(x) * kLog2E);
  const float ratio = fmaf(fmaf(fmaf(kLogRatio3, e, kLogRatio2), e, kLogRatio1), e, kLogRatio0);
  return fmaf(-ratio, e, fminf(x, 0.0f));
}
// Log gates of eight logits at once. What a negative logit adds to the rest is one operation on bf16, a pair at a time:
// the scale is rounded for it, which moves a term as little as rounding a gate does; and the least is met by what has
// been rounded, since rounding keeps the order.
struct GatesOfLogits {
  float ratio0, ratio1, ratio2, ratio3;  // times the scale, negative
  __nv_bfloat162 scale, least;

  __device__ __forceinline__ GatesOfLogits(float of_scale, float of_least) {
    // Anew: no register holds what comes of them from chunk to chunk.
    of_scale = __int_as_float(anew(__float_as_int(of_scale)));
    of_least = __int_as_float(anew(__float_as_int(of_least)));
    scale = __float2bfloat162_rn(of_scale);
    least = __float2bfloat162_rn(of_least);
    ratio0 = -of_scale * kLogRatio0;
    ratio1 = -of_scale * kLogRatio1;
    ratio2 = -of_scale * kLogRatio2;
    ratio3 = -of_scale * kLogRatio3;
  }
  __device__ __forceinline__ float beyond_zero(float x) const {
    const float e = ptx::exp2(-fabsf(x) * kLog2E);
    return fmaf(fmaf(fmaf(ratio3, e, ratio2), e, ratio1), e, ratio0) * e;
  }
  __device__ __forceinline__ uint4 operator()(const uint4& logits) const {
    const std::uint32_t words[4] = {logits.x, logits.y, logits.z, logits.w};
    std::uint32_t gates[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = ptx::unpack_bf16(words[i]);
      const __nv_bfloat162 rest = __floats2bfloat162_rn(beyond_zero(x.x), beyond_zero(x.y)),
                           negative =
                               __hmin2(reinterpret_cast<const __nv_bfloat162&>(words[i]), __float2bfloat162_rn(0.0f));
      const __nv_bfloat162 gate = __hmax2_nan(__hfma2(negative, scale, rest), least);
      gates[i] = reinterpret_cast<const std::uint32_t&>(gate);
    }
    return make_uint4(gates[0], gates[1], gates[2], gates[3]);
  }
};
__device__ __forceinline__ float slope_of_logit(float x, float scale, float least) {
  const float e = ptx::exp2(-fabsf(x) * kLog2E), inverse = __fdividef(1.0f, 1.0f + e);
  const float slope = scale * (x > 0.0f ? e * inverse : inverse);  // sigmoid of -x
  if (least == -std::numeric_limits<float>::infinity()) return slope;
  return log_sigmoid(x) * scale < least ? 0.0f : slope;
}
// The slope from the gate that a logit has become, where no least one cuts it off: 1 - sigmoid(x) times the scale, to
// the gate's own relative rounding.
struct SlopeOfGate {
  static constexpr float kWeak = -0.01f;
  float scale, log2_of, linear, square;
  __device__ __forceinline__ float operator()(float gate) const {
    const float y = gate * log2_of, small = y * fmaf(square, y, linear);  // 1 - 2^y = -y ln 2 - (y ln 2)^2 / 2 - ..
    return y > kWeak ? small : fmaf(-scale, ptx::exp2(y), scale);
  }
};
__device__ __forceinline__ SlopeOfGate slope_of_gate(float scale) {
  return {scale, __fdividef(kLog2E, scale), -0.69314718f * scale, -0.24022651f * scale};
}
// Logits above it may have gates above kWeak: where 1 - 2^y would lose digits.
constexpr float kWeakLogit = 4.75f;
// The larger of each half of `most` and of eight logits.
__device__ __forceinline__ __nv_bfloat162 larger_logits(__nv_bfloat162 most, const uint4& logits) {
  for (const std::uint32_t word : {logits.x, logits.y, logits.z, logits.w}) {
    most = __hmax2(most, reinterpret_cast<const __nv_bfloat162&>(word));
  }
  return most;
}
// Eight elements of an accumulator of dg, those of k-step t of a tile of gates, times the slopes.
template <class Slope>
__device__ __forceinline__ void times_slopes(float (&dg)[8], std::uint32_t g_tile, int t, const Slope& slope,
                                             int thread) {
  std::uint32_t gates[4];
  TensorCore80::load_a<Stored::k_inner>(gates, g_tile, t, thread);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 gate = ptx::unpack_bf16(gates[i]);
    dg[2 * i] *= slope(gate.x);
    dg[2 * i + 1] *= slope(gate.y);
  }
}
// The pieces that this thread has loaded.
__device__ __forceinline__ void turn_tile_of_logits(std::uint32_t tile, int rows, const Params& p, int thread) {
  const GatesOfLogits gates_of(p.logit_scale, p.gate_min);
#pragma unroll 1
  for (int i = 0; i < kRowsEach && kRowsEach * (thread / 8) + i < rows; ++i) {
    const std::uint32_t at = tile + own_piece(thread, i);
    store_shared_16(at, gates_of(load_shared_16(at)));
  }
}
__device__ __forceinline__ uint4 times_slope(const uint4& gradients, const uint4& logits, const Params& p) {
  float d[8], x[8];
  unpack_8(gradients, d);
  unpack_8(logits, x);
#pragma unroll
  for (int e = 0; e < 8; ++e) d[e] *= slope_of_logit(x[e], p.logit_scale, p.gate_min);
  return pack_8(d);
}
// dg to the rows of a tensor, from a tile, times the slopes from one of gates.
__device__ __forceinline__ void store_tile_by_gates(const Rows& r, std::uint32_t gates, std::uint32_t tile, float scale,
                                                    int thread) {
  const SlopeOfGate slope = slope_of_gate(scale);
  const int row = kRowsEach * (thread / 8), left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
#pragma unroll 1
  for (int i = 0; i < kRowsEach && i < left; ++i) {
    float d[8], g[8];
    unpack_8(load_shared_16(tile + own_piece(thread, i)), d);
    unpack_8(load_shared_16(gates + own_piece(thread, i)), g);
#pragma unroll
    for (int e = 0; e < 8; ++e) d[e] *= slope(g[e]);
    *reinterpret_cast<uint4*>(const_cast<char*>(r.data) + (row + i) * r.stride + thread % 8 * 16) = pack_8(d);
  }
}
// The same; `logits` are rows of the same shape.
__device__ __forceinline__ void store_tile_by_logits(const Rows& r, const Rows& logits, std::uint32_t tile,
                                                     const Params& p, int thread) {
  const int row = kRowsEach * (thread / 8), left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
#pragma unroll 1
  for (int i = 0; i < kRowsEach && i < left; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(logits.data + (row + i) * logits.stride + thread % 8 * 16);
    *reinterpret_cast<uint4*>(const_cast<char*>(r.data) + (row + i) * r.stride + thread % 8 * 16) =
        times_slope(load_shared_16(tile + own_piece(thread, i)), x, p);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

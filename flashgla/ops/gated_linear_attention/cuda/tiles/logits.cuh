// Key gates given as logits (Params::logit_scale; README.md, "Logits"): turned into log gates in their tile, and dg
// multiplied by the slope, from the gates; in narrow heads, if gates have a least value, and by blocks at the logits,
// read again.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

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
                           negative = __hmin2(as_pair(words[i]), __float2bfloat162_rn(0.0f));
      gates[i] = as_word(__hmax2_nan(__hfma2(negative, scale, rest), least));
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
    most = __hmax2(most, as_pair(word));
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
// The pieces that this thread has loaded. Gates that the least one has cut off can be told from the others.
__device__ __forceinline__ void turn_tile_of_logits(std::uint32_t tile, int rows, const Params& p, int thread) {
  GatesOfLogits gates_of(p.logit_scale, 0.0f);
  gates_of.least = as_pair(p.kept_gates);
#pragma unroll 1
  for (int i = 0; i < kRowsEach && kRowsEach * (thread / 8) + i < rows; ++i) {
    const std::uint32_t at = tile + own_piece(thread, i);
    const uint4 logits = load_shared_16(at), gates = gates_of(logits);
    const auto cut = [&](std::uint32_t logit, std::uint32_t gate) {
      const unsigned below = __hlt2_mask(as_pair(logit), as_pair(p.cut_logits));
      return (below & p.cut_gates) | (~below & gate);
    };
    store_shared_16(
        at, make_uint4(cut(logits.x, gates.x), cut(logits.y, gates.y), cut(logits.z, gates.z), cut(logits.w, gates.w)));
  }
}
// dg to the rows of a tensor, from a tile, times the slopes from one of gates that turn_tile_of_logits has made.
__device__ __forceinline__ void store_tile_by_gates(const Rows& r, std::uint32_t gates, std::uint32_t tile,
                                                    const Params& p, int thread) {
  const SlopeOfGate slope = slope_of_gate(p.logit_scale);
  const int row = kRowsEach * (thread / 8), left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
#pragma unroll 1
  for (int i = 0; i < kRowsEach && i < left; ++i) {
    float d[8], g[8];
    const uint4 own_gates = load_shared_16(gates + own_piece(thread, i));
    unpack_8(load_shared_16(tile + own_piece(thread, i)), d);
    unpack_8(own_gates, g);
#pragma unroll
    for (int e = 0; e < 8; ++e) d[e] *= slope(g[e]);
    const auto kept = [&](std::uint32_t gradients, std::uint32_t of_gates) {
      return gradients & ~__heq2_mask(as_pair(of_gates), as_pair(p.cut_gates));
    };
    const uint4 all = pack_8(d);
    *reinterpret_cast<uint4*>(const_cast<char*>(r.data) + (row + i) * r.stride + thread % 8 * 16) = make_uint4(
        kept(all.x, own_gates.x), kept(all.y, own_gates.y), kept(all.z, own_gates.z), kept(all.w, own_gates.w));
  }
}
// The same; `logits` are rows of the same shape.
__device__ __forceinline__ void store_tile_by_logits(const Rows& r, const Rows& logits, std::uint32_t tile,
                                                     const Params& p, int thread) {
  const int row = kRowsEach * (thread / 8), left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
#pragma unroll 1
  for (int i = 0; i < kRowsEach && i < left; ++i) {
    float d[8], x[8];
    unpack_8(*reinterpret_cast<const uint4*>(logits.data + (row + i) * logits.stride + thread % 8 * 16), x);
    unpack_8(load_shared_16(tile + own_piece(thread, i)), d);
#pragma unroll
    for (int e = 0; e < 8; ++e) d[e] *= slope_of_logit(x[e], p.logit_scale, p.gate_min);
    *reinterpret_cast<uint4*>(const_cast<char*>(r.data) + (row + i) * r.stride + thread % 8 * 16) = pack_8(d);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

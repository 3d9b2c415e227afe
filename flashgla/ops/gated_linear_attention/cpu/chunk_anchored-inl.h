// Inside a chunk whose gates are too strong for one anchor: P_ij = sum over k of q_ik k_jk exp(G_ik - G_jk), and what
// the gradients make of it. The chunk is cut where its range is spent; tokens i of a piece take the piece's first
// token as anchor a, q_i exp(G_i - a) and k_j exp(a - G_j): bounded for j of the same piece, at most 1 before it. A
// piece of one token is the exact element-wise form. Included once per SIMD target.
#if defined(FLASHGLA_CHUNK_ANCHORED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHGLA_CHUNK_ANCHORED_INL_H_
#undef FLASHGLA_CHUNK_ANCHORED_INL_H_
#else
#define FLASHGLA_CHUNK_ANCHORED_INL_H_
#endif

#include "flashgla/ops/gated_linear_attention/cpu/chunk_operands-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gated_linear_attention::chunk::HWY_NAMESPACE {

struct Anchored {
  float* k;    // [kBlock][ldk]
  float* k_t;  // [ldk][kBlock]
  float* q;    // [kBlock][ldk]
  float* v;    // [kBlock][ldv]
  float* v_t;  // [ldv][kBlock]
  float* d_o;  // [kBlock][ldv]
  float* p;    // [kBlock][kBlock]
  float* dp;
  float* keys;    // [kBlock][ldk] products
  float* values;  // [kBlock][ldv]

  static std::int64_t floats(const Shapes& s) { return 4 * kBlock * (s.ldk + s.ldv) + 2 * kBlock * kBlock; }
  static Anchored take(float*& memory, const Shapes& s) {
    Anchored a;
    for (float** x : {&a.k, &a.k_t, &a.q, &a.keys}) {
      *x = memory;
      memory += kBlock * s.ldk;
    }
    for (float** x : {&a.v, &a.v_t, &a.d_o, &a.values}) {
      *x = memory;
      memory += kBlock * s.ldv;
    }
    for (float** x : {&a.p, &a.dp}) {
      *x = memory;
      memory += kBlock * kBlock;
    }
    return a;
  }
};

// The first token whose decay since `begin` is out of range in some channel.
inline HWY_NOINLINE std::int64_t PieceEnd(const Gates& g, std::int64_t begin, std::int64_t count) {
  const D d;
  std::int64_t end = count;
  for (std::int64_t i = 0; i < g.width; i += Lanes()) {
    Vec sum = hn::Zero(d);
    for (std::int64_t t = begin + 1; t < end; ++t) {
      sum = hn::Add(sum, hn::LoadU(d, g.log2.row(t) + i));
      if (!hn::AllTrue(d, hn::Ge(sum, hn::Set(d, -kRange)))) end = t;
    }
  }
  return end;
}

// For the piece [begin, end): `queries` of its tokens = exp(G_t - a), `keys` of all tokens before end = exp(a - G_t),
// in sums of consecutive gates. They take the place of g.after and g.inverse.
inline HWY_NOINLINE void AnchorFactors(Gates& g, std::int64_t begin, std::int64_t end) {
  const D d;
  for (std::int64_t i = 0; i < g.width; i += Lanes()) {
    Vec sum = hn::Zero(d);
    for (std::int64_t t = begin; t < end; ++t) {
      if (t > begin) sum = hn::Add(sum, hn::LoadU(d, g.log2.row(t) + i));
      hn::StoreU(Exp2(sum), d, g.after.row(t) + i);
      hn::StoreU(Exp2(hn::Neg(sum)), d, g.inverse.row(t) + i);
    }
    sum = hn::Zero(d);
    for (std::int64_t t = begin; t-- > 0;) {
      sum = hn::Add(sum, hn::LoadU(d, g.log2.row(t + 1) + i));
      hn::StoreU(Exp2(sum), d, g.inverse.row(t) + i);
    }
  }
}

// The next piece's end, with its operands q, k (and its transpose), v and rows [begin, end) of P. `q` [kBlock][ldk]
// holds scale * phi(q).
inline HWY_NOINLINE std::int64_t NextPiece(const Shapes& s, Keys& keys, const float* q, std::int64_t begin,
                                           std::int64_t count, Anchored& a) {
  std::int64_t end = PieceEnd(keys.gates, begin, count);
  if (s.gate_values) end = PieceEnd(keys.gates_values, begin, end);
  AnchorFactors(keys.gates, begin, end);
  MultiplyRows(keys.gates.inverse, 0, end, s.ldk, s.ldk, keys.k, a.k);
  FillZero(a.k + end * s.ldk, (padded(end) - end) * s.ldk);
  MultiplyRows(keys.gates.after, begin, end, s.ldk, s.ldk, q, a.q);
  Transpose(padded(end), padded(s.K), a.k, s.ldk, a.k_t, kBlock);
  Gemm<Start::zero>(end - begin, padded(end), s.K, {a.q + begin * s.ldk, s.ldk, 1}, a.k_t, kBlock, a.p + begin * kBlock,
                    kBlock);
  MaskAbove(begin, end, padded(end), a.p);
  if (s.gate_values) {
    AnchorFactors(keys.gates_values, begin, end);
    MultiplyRows(keys.gates_values.inverse, 0, end, s.ldv, s.ldv, keys.v, a.v);
  } else {
    std::memcpy(a.v, keys.v, static_cast<std::size_t>(end * s.ldv) * sizeof(float));
  }
  FillZero(a.v + end * s.ldv, (padded(end) - end) * s.ldv);
  return end;
}

// o [kBlock][ldv] += P v.
inline HWY_NOINLINE void AnchoredForward(const Shapes& s, Keys& keys, const float* q, std::int64_t count, Anchored& a,
                                         float* o) {
  for (std::int64_t begin = 0; begin < count;) {
    const std::int64_t end = NextPiece(s, keys, q, begin, count, a);
    float* rows = o + begin * s.ldv;
    if (s.gate_values) {
      Gemm<Start::zero>(end - begin, padded(s.values), end, {a.p + begin * kBlock, kBlock, 1}, a.v, s.ldv, a.values,
                        s.ldv);
      for (std::int64_t t = begin; t < end; ++t) {
        MultiplyAddRow(keys.gates_values.after, t, padded(s.values), a.values + (t - begin) * s.ldv, o + t * s.ldv);
      }
    } else {
      Gemm<Start::add>(end - begin, padded(s.values), end, {a.p + begin * kBlock, kBlock, 1}, a.v, s.ldv, rows, s.ldv);
    }
    begin = end;
  }
}

// dq, dk [kBlock][ldk] and dv [kBlock][ldv] += the chunk's own part, as gradients of scale * phi(q), phi(k) and v.
inline HWY_NOINLINE void AnchoredBackward(const Shapes& s, Keys& keys, const float* q, const float* d_o,
                                          std::int64_t count, Anchored& a, float* dq, float* dk, float* dv) {
  const std::int64_t wide_k = padded(s.K);
  const std::int64_t wide_v = padded(s.values);
  for (std::int64_t begin = 0; begin < count;) {
    const std::int64_t end = NextPiece(s, keys, q, begin, count, a);
    if (s.gate_values) {
      MultiplyRows(keys.gates_values.after, begin, end, s.ldv, s.ldv, d_o, a.d_o);
    } else {
      std::memcpy(a.d_o + begin * s.ldv, d_o + begin * s.ldv,
                  static_cast<std::size_t>((end - begin) * s.ldv) * sizeof(float));
    }
    Transpose(padded(end), wide_v, a.v, s.ldv, a.v_t, kBlock);
    Gemm<Start::zero>(end - begin, padded(end), s.values, {a.d_o + begin * s.ldv, s.ldv, 1}, a.v_t, kBlock,
                      a.dp + begin * kBlock, kBlock);
    MaskAbove(begin, end, padded(end), a.dp);

    Gemm<Start::zero>(end - begin, wide_k, end, {a.dp + begin * kBlock, kBlock, 1}, a.k, s.ldk, a.keys, s.ldk);
    for (std::int64_t t = begin; t < end; ++t) {
      MultiplyAddRow(keys.gates.after, t, wide_k, a.keys + (t - begin) * s.ldk, dq + t * s.ldk);
    }
    Gemm<Start::zero>(end, wide_k, end - begin, {a.dp + begin * kBlock, 1, kBlock}, a.q + begin * s.ldk, s.ldk, a.keys,
                      s.ldk);
    for (std::int64_t t = 0; t < end; ++t) {
      MultiplyAddRow(keys.gates.inverse, t, wide_k, a.keys + t * s.ldk, dk + t * s.ldk);
    }
    if (s.gate_values) {
      Gemm<Start::zero>(end, wide_v, end - begin, {a.p + begin * kBlock, 1, kBlock}, a.d_o + begin * s.ldv, s.ldv,
                        a.values, s.ldv);
      for (std::int64_t t = 0; t < end; ++t) {
        MultiplyAddRow(keys.gates_values.inverse, t, wide_v, a.values + t * s.ldv, dv + t * s.ldv);
      }
    } else {
      Gemm<Start::add>(end, wide_v, end - begin, {a.p + begin * kBlock, 1, kBlock}, a.d_o + begin * s.ldv, s.ldv, dv,
                       s.ldv);
    }
    begin = end;
  }
}

}  // namespace flashgla::ops::gated_linear_attention::chunk::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

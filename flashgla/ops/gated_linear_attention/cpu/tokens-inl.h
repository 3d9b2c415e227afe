// Tokens as the recurrent and the parallel form read them: floats, feature maps applied, gates exponentiated.
// Included once per SIMD target.
#if defined(FLASHGLA_GLA_TOKENS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHGLA_GLA_TOKENS_INL_H_
#undef FLASHGLA_GLA_TOKENS_INL_H_
#else
#define FLASHGLA_GLA_TOKENS_INL_H_
#endif

#include "flashgla/ops/gated_linear_attention/cpu/rows-inl.h"
#include "flashgla/ops/gated_linear_attention/cpu/tasks.h"

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gated_linear_attention::HWY_NAMESPACE {

// alpha = exp(g) [width]: one value per channel, or one for all.
HWY_INLINE void LoadGate(const Rows& g, std::int64_t t, bool per_channel, std::int64_t n, std::int64_t width,
                         float* HWY_RESTRICT alpha) {
  const D d;
  if (!g) {
    for (std::int64_t i = 0; i < width; i += Lanes()) hn::StoreU(hn::Set(d, 1.0f), d, alpha + i);
    return;
  }
  if (per_channel) {
    LoadRow(g.dtype, g.row(t), n, width, alpha);
    for (std::int64_t i = 0; i < width; i += Lanes()) hn::StoreU(Exp(hn::LoadU(d, alpha + i)), d, alpha + i);
    return;
  }
  float log_gate;
  LoadRow(g.dtype, g.row(t), 1, 1, &log_gate);
  const Vec value = Exp(hn::Set(d, log_gate));
  for (std::int64_t i = 0; i < width; i += Lanes()) hn::StoreU(value, d, alpha + i);
}

// phi(x) [width], zeros past n.
HWY_INLINE void LoadFeatures(FeatureMap map, const Rows& rows, std::int64_t t, std::int64_t head, std::int64_t n,
                             std::int64_t width, float* HWY_RESTRICT x) {
  LoadRow(rows.dtype, rows.row(t, head), n, width, x);
  ApplyFeatureMap(map, n, width, x);
}

// What the recurrence reads of tokens [begin, begin + count) but for queries, as rows of ldk and ldv: gates, phi(k),
// and v, which with a normaliser has one more channel, 1. beta is left alone without gates over values.
HWY_INLINE void LoadTokens(const Problem& p, const TaskInputs& in, std::int64_t begin, std::int64_t count,
                           std::int64_t ldk, std::int64_t ldv, float* alpha, float* k, float* v, float* beta) {
  const bool per_channel = p.gate == GateKind::key || p.gate == GateKind::key_value;
  for (std::int64_t t = 0; t < count; ++t) {
    LoadGate(in.g, begin + t, per_channel, p.key_dim, ldk, alpha + t * ldk);
    LoadFeatures(p.feature_map, in.k, begin + t, 0, p.key_dim, ldk, k + t * ldk);
    LoadRow(in.v.dtype, in.v.row(begin + t), p.value_dim, ldv, v + t * ldv);
    if (p.normalize) v[t * ldv + p.value_dim] = 1.0f;
    if (in.gv) LoadGate(in.gv, begin + t, true, p.value_dim, ldv, beta + t * ldv);
  }
}

// Channels [first, first + n) of a row.
HWY_INLINE void LoadChannels(const Rows& rows, std::int64_t t, std::int64_t head, std::int64_t first, std::int64_t n,
                             std::int64_t width, float* HWY_RESTRICT x) {
  LoadRow(rows.dtype, rows.row(t, head) + first * static_cast<std::int64_t>(size_of(rows.dtype)), n, width, x);
}

HWY_INLINE void StoreChannels(const Rows& rows, std::int64_t t, std::int64_t head, std::int64_t first, std::int64_t n,
                              const float* HWY_RESTRICT x) {
  StoreRow(rows.dtype, x, n, rows.row(t, head) + first * static_cast<std::int64_t>(size_of(rows.dtype)));
}

// dx = dphi * phi'(x) in place, to the row of dq or dk if that is wanted; `raw` is room for a row.
HWY_INLINE void StoreFeatures(FeatureMap map, const Rows& rows, const Rows& original, std::int64_t t, std::int64_t head,
                              std::int64_t n, std::int64_t width, float* raw, float* dphi) {
  if (!rows) return;
  if (map != FeatureMap::identity) {
    LoadRow(original.dtype, original.row(t, head), n, width, raw);
    MultiplyFeatureDerivative(map, width, raw, dphi);
  }
  StoreRow(rows.dtype, dphi, n, rows.row(t, head));
}

// The gradients of token t's key-value side, as far as they are wanted: dk, dg [ldk], dv, dgv [V].
HWY_INLINE void StoreToken(const Problem& p, const BackwardTask& task, std::int64_t t, std::int64_t ldk, float* dk,
                           const float* dg, const float* dv, const float* dgv, float* raw) {
  StoreFeatures(p.feature_map, task.dk, task.in.k, t, 0, p.key_dim, ldk, raw, dk);
  if (task.dv) StoreRow(task.dv.dtype, dv, p.value_dim, task.dv.row(t));
  if (task.dgv) StoreRow(task.dgv.dtype, dgv, p.value_dim, task.dgv.row(t));
  if (task.dg && (p.gate == GateKind::key || p.gate == GateKind::key_value)) {
    StoreRow(task.dg.dtype, dg, p.key_dim, task.dg.row(t));
  } else if (task.dg || task.dg_sum != nullptr) {
    const float sum = Sum(ldk, dg);
    if (task.dg_sum != nullptr)
      *task.dg_sum += static_cast<double>(sum);
    else
      StoreRow(task.dg.dtype, &sum, 1, task.dg.row(t));
  }
}

// What do is to phi(q)^T h, [V and, with normalize, the divisor's channel]: do / divisor. z is the normaliser's state
// after the token, o a row of room.
HWY_INLINE void LoadOutputGradient(const Problem& p, const BackwardTask& task, std::int64_t t, std::int64_t head,
                                   std::int64_t ldk, std::int64_t ldv, const float* q, const float* z, float* o,
                                   float* dn) {
  LoadRow(task.d_o.dtype, task.d_o.row(t, head), p.value_dim, ldv, dn);
  if (!p.normalize) return ScaleRow(static_cast<float>(p.scale), ldv, dn, dn);
  LoadRow(task.o.dtype, task.o.row(t, head), p.value_dim, ldv, o);
  const float inverse = 1.0f / (Dot(ldk, q, z) + static_cast<float>(kNormalizerEpsilon));
  const float d_divisor = -Dot(ldv, dn, o) * inverse;
  ScaleRow(inverse, ldv, dn, dn);
  dn[p.value_dim] = d_divisor;
}

}  // namespace flashgla::ops::gated_linear_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

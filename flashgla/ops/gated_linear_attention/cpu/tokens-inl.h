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

// Channels [first, first + n) of a row.
HWY_INLINE void LoadChannels(const Rows& rows, std::int64_t t, std::int64_t head, std::int64_t first, std::int64_t n,
                             std::int64_t width, float* HWY_RESTRICT x) {
  LoadRow(rows.dtype, rows.row(t, head) + first * static_cast<std::int64_t>(size_of(rows.dtype)), n, width, x);
}

HWY_INLINE void StoreChannels(const Rows& rows, std::int64_t t, std::int64_t head, std::int64_t first, std::int64_t n,
                              const float* HWY_RESTRICT x) {
  StoreRow(rows.dtype, x, n, rows.row(t, head) + first * static_cast<std::int64_t>(size_of(rows.dtype)));
}

}  // namespace flashgla::ops::gated_linear_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

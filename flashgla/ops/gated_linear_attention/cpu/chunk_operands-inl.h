// From tensors to the operands of a chunk's products and back: rows in any dtype, feature maps, gate factors.
// Included once per SIMD target.
#if defined(FLASHGLA_CHUNK_OPERANDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHGLA_CHUNK_OPERANDS_INL_H_
#undef FLASHGLA_CHUNK_OPERANDS_INL_H_
#else
#define FLASHGLA_CHUNK_OPERANDS_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "flashgla/ops/cpu/gemm-inl.h"
#include "flashgla/ops/gated_linear_attention/cpu/chunk_problem.h"
#include "flashgla/ops/gated_linear_attention/cpu/rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gated_linear_attention::chunk::HWY_NAMESPACE {
using namespace flashgla::ops::gemm::HWY_NAMESPACE;

namespace rows_of = flashgla::ops::gated_linear_attention::HWY_NAMESPACE;
using rows_of::Exp2;

// Calls, where the recurrence has the code in its loops: a row is long, and there are many places.
inline HWY_NOINLINE void LoadRow(DType dtype, const void* source, std::int64_t n, std::int64_t width,
                                 float* HWY_RESTRICT target) {
  rows_of::LoadRow(dtype, source, n, width, target);
}
inline HWY_NOINLINE void StoreRow(DType dtype, const float* HWY_RESTRICT source, std::int64_t n, void* target) {
  rows_of::StoreRow(dtype, source, n, target);
}
inline HWY_NOINLINE void ApplyFeatureMap(FeatureMap map, std::int64_t n, std::int64_t width, float* HWY_RESTRICT x) {
  rows_of::ApplyFeatureMap(map, n, width, x);
}
inline HWY_NOINLINE void MultiplyFeatureDerivative(FeatureMap map, std::int64_t n, const float* HWY_RESTRICT raw,
                                                   float* HWY_RESTRICT x) {
  rows_of::MultiplyFeatureDerivative(map, n, raw, x);
}

HWY_INLINE void FillZero(float* p, std::int64_t n) { std::memset(p, 0, static_cast<std::size_t>(n) * sizeof(float)); }

// Row [K] of q or k as floats, feature map applied, zeros up to ldk.
HWY_INLINE void LoadFeatures(const Shapes& s, const Rows& rows, std::int64_t t, std::int64_t head, float* target) {
  LoadRow(rows.dtype, rows.row(t, head), s.K, s.ldk, target);
  if (s.feature_map != FeatureMap::identity) ApplyFeatureMap(s.feature_map, s.K, s.ldk, target);
}

// Row [values] of v: with a normaliser the last channel is 1.
HWY_INLINE void LoadValues(const Shapes& s, const Rows& rows, std::int64_t t, float* target) {
  LoadRow(rows.dtype, rows.row(t), s.V, s.ldv, target);
  if (s.normalize) target[s.V] = 1.0f;
}

// A matrix [tokens][channels] of factors; gates that are one number per token have a row of one vector of it.
struct Factors {
  float* data;
  std::int64_t ld;
  std::int64_t step;  // 1 per channel; 0: one number per token

  HWY_INLINE float* row(std::int64_t token) const { return data + token * ld; }
  HWY_INLINE Vec at(std::int64_t token, std::int64_t channel) const {
    return hn::LoadU(D(), data + token * ld + channel * step);
  }
};

// target = source * factor over `n` channels of one token; target may be source.
HWY_INLINE void MultiplyRow(const Factors& f, std::int64_t token, std::int64_t n, const float* source, float* target) {
  const D d;
  for (std::int64_t i = 0; i < n; i += Lanes()) {
    hn::StoreU(hn::Mul(hn::LoadU(d, source + i), f.at(token, i)), d, target + i);
  }
}

// target += source * factor.
HWY_INLINE void MultiplyAddRow(const Factors& f, std::int64_t token, std::int64_t n, const float* source,
                               float* target) {
  const D d;
  for (std::int64_t i = 0; i < n; i += Lanes()) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, source + i), f.at(token, i), hn::LoadU(d, target + i)), d, target + i);
  }
}

// The rows of tokens [begin, end) of matrices [tokens][ld].
HWY_INLINE void MultiplyRows(const Factors& f, std::int64_t begin, std::int64_t end, std::int64_t n, std::int64_t ld,
                             const float* source, float* target) {
  for (std::int64_t t = begin; t < end; ++t) MultiplyRow(f, t, n, source + t * ld, target + t * ld);
}

// The gates of one chunk, over keys or over values. With a_t the log gate of its t-th token:
struct Gates {
  Factors log2;     // a_t in base 2
  Factors before;   // exp(a_0 + ... + a_t): from the state before the chunk to token t
  Factors inverse;  // 1 / before, while in_range
  Factors after;    // exp(a_{t+1} + ... + a_last): from token t to the state after the chunk; only when not in_range
  float* total;     // [channels], always one per channel: exp(sum of all)
  std::int64_t channels;  // padded, as the matrices that the factors multiply
  std::int64_t width;     // of a row of factors
  bool in_range;

  static constexpr std::int64_t floats(std::int64_t channels, bool per_channel) {
    return 4 * kBlock * (per_channel ? channels : kLane) + channels;
  }
  static Gates take(float*& memory, std::int64_t channels, bool per_channel) {
    Gates g;
    g.channels = channels;
    g.width = per_channel ? channels : kLane;
    for (Factors* f : {&g.log2, &g.before, &g.inverse, &g.after}) {
      *f = {memory, g.width, per_channel ? 1 : 0};
      memory += kBlock * g.width;
    }
    g.total = memory;
    memory += channels;
    g.in_range = false;
    return g;
  }
};

// Loads the gates of tokens [begin, begin + count); absent rows are gates of zero.
inline HWY_NOINLINE void LoadGates(const Rows& rows, std::int64_t begin, std::int64_t count, std::int64_t channels,
                                   Gates& g) {
  const D d;
  const std::int64_t lanes = Lanes();
  const Vec log2_e = hn::Set(d, 1.44269504088896f);
  for (std::int64_t t = 0; t < count; ++t) {
    float* row = g.log2.row(t);
    if (!rows) {
      FillZero(row, g.width);
    } else if (g.log2.step == 1) {
      LoadRow(rows.dtype, rows.row(begin + t), channels, g.width, row);
      for (std::int64_t i = 0; i < g.width; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, row + i), log2_e), d, row + i);
    } else {
      LoadRow(rows.dtype, rows.row(begin + t), 1, 1, row);
      const Vec value = hn::Mul(hn::Set(d, row[0]), log2_e);
      for (std::int64_t i = 0; i < g.width; i += lanes) hn::StoreU(value, d, row + i);
    }
  }
}

// Fills the factors from g.log2. Exponents are sums of consecutive gates, never differences of sums, so that infinite
// gates meet no other infinity and strong ones cost no digits.
inline HWY_NOINLINE void ComputeFactors(std::int64_t count, Gates& g) {
  const D d;
  const std::int64_t lanes = Lanes();
  Vec least = hn::Zero(d);
  for (std::int64_t i = 0; i < g.width; i += lanes) {
    Vec sum = hn::Zero(d);
    for (std::int64_t t = 0; t < count; ++t) {
      sum = hn::Add(sum, hn::LoadU(d, g.log2.row(t) + i));
      hn::StoreU(Exp2(sum), d, g.before.row(t) + i);
      // Beyond the range this is not read; the clamp keeps it finite.
      hn::StoreU(Exp2(hn::Min(hn::Neg(sum), hn::Set(d, kRange))), d, g.inverse.row(t) + i);
    }
    least = hn::Min(least, sum);
    const Vec total = Exp2(sum);
    if (g.width == g.channels) {
      hn::StoreU(total, d, g.total + i);
    } else if (i == 0) {
      for (std::int64_t j = 0; j < g.channels; j += lanes) hn::StoreU(total, d, g.total + j);
    }
  }
  g.in_range = hn::GetLane(hn::MinOfLanes(d, least)) >= -kRange;
}

inline HWY_NOINLINE void ComputeAfter(std::int64_t count, Gates& g) {
  const D d;
  for (std::int64_t i = 0; i < g.width; i += Lanes()) {
    Vec sum = hn::Zero(d);
    for (std::int64_t t = count; t-- > 0;) {
      hn::StoreU(Exp2(sum), d, g.after.row(t) + i);
      sum = hn::Add(sum, hn::LoadU(d, g.log2.row(t) + i));
    }
  }
}

// Zeroes P[i][j] for j > i, j < width. The columns before i's block of kLane are left alone.
inline HWY_NOINLINE void MaskAbove(std::int64_t begin, std::int64_t end, std::int64_t width, float* p) {
  const D d;
  for (std::int64_t i = begin; i < end; ++i) {
    const Vec row = hn::Set(d, static_cast<float>(i));
    for (std::int64_t j = i / kLane * kLane; j < width; j += Lanes()) {
      float* x = p + i * kBlock + j;
      hn::StoreU(hn::IfThenZeroElse(hn::Gt(hn::Iota(d, static_cast<float>(j)), row), hn::LoadU(d, x)), d, x);
    }
  }
}

// Zeroes P[i][j] for j < i, j in i's block of kLane.
inline HWY_NOINLINE void MaskBelow(std::int64_t count, float* p) {
  const D d;
  for (std::int64_t i = 0; i < count; ++i) {
    const Vec row = hn::Set(d, static_cast<float>(i));
    const std::int64_t block = i / kLane * kLane;
    for (std::int64_t j = block; j < block + kLane; j += Lanes()) {
      float* x = p + i * kBlock + j;
      hn::StoreU(hn::IfThenZeroElse(hn::Lt(hn::Iota(d, static_cast<float>(j)), row), hn::LoadU(d, x)), d, x);
    }
  }
}

// Keys, values and gates of one chunk as its products want them.
struct Keys {
  Gates gates;         // over keys
  Gates gates_values;  // over values; only with gv
  bool in_range;       // one anchor serves the whole chunk
  float* k;            // [kBlock][ldk] phi(k) / before when in_range, else phi(k)
  float* k_update;     // phi(k) * after
  float* v;            // [kBlock][ldv] v, or with gv as k
  float* v_update;     // v itself without gv

  static std::int64_t floats(const Shapes& s) {
    return Gates::floats(s.ldk, s.key_gates()) + 2 * kBlock * s.ldk + kBlock * s.ldv +
           (s.gate_values ? Gates::floats(s.ldv, true) + kBlock * s.ldv : 0);
  }
  static Keys take(float*& memory, const Shapes& s) {
    Keys keys;
    keys.gates = Gates::take(memory, s.ldk, s.key_gates());
    if (s.gate_values) keys.gates_values = Gates::take(memory, s.ldv, true);
    for (float** matrix : {&keys.k, &keys.k_update}) {
      *matrix = memory;
      memory += kBlock * s.ldk;
    }
    keys.v = memory;
    memory += kBlock * s.ldv;
    keys.v_update = keys.v;
    if (s.gate_values) {
      keys.v_update = memory;
      memory += kBlock * s.ldv;
    }
    return keys;
  }
};

// Divides out, or multiplies up to the chunk's end, the gates of `count` rows x [.][ld] = x_intra; rows up to a
// multiple of kLane are zeroed.
inline HWY_NOINLINE void GateRows(const Gates& g, bool in_range, std::int64_t count, std::int64_t ld, float* x,
                                  float* update) {
  const Factors totals = {g.total, 0, 1};
  for (std::int64_t t = 0; t < count; ++t) {
    if (in_range) MultiplyRow(g.inverse, t, ld, x + t * ld, x + t * ld);
    MultiplyRow(in_range ? totals : g.after, t, ld, x + t * ld, update + t * ld);
  }
}

template <class Task>
inline HWY_NOINLINE void PrepareKeys(const Shapes& s, const Task& task, std::int64_t begin, std::int64_t count,
                                     Keys& keys) {
  LoadGates(task.in.g, begin, count, s.K, keys.gates);
  ComputeFactors(count, keys.gates);
  keys.in_range = keys.gates.in_range;
  if (s.gate_values) {
    LoadGates(task.in.gv, begin, count, s.V, keys.gates_values);
    ComputeFactors(count, keys.gates_values);
    keys.in_range = keys.in_range && keys.gates_values.in_range;
  }
  if (!keys.in_range) {
    ComputeAfter(count, keys.gates);
    if (s.gate_values) ComputeAfter(count, keys.gates_values);
  }
  for (std::int64_t t = 0; t < count; ++t) {
    LoadFeatures(s, task.in.k, begin + t, 0, keys.k + t * s.ldk);
    LoadValues(s, task.in.v, begin + t, keys.v + t * s.ldv);
  }
  GateRows(keys.gates, keys.in_range, count, s.ldk, keys.k, keys.k_update);
  if (s.gate_values) GateRows(keys.gates_values, keys.in_range, count, s.ldv, keys.v, keys.v_update);
  const std::int64_t rest = padded(count) - count;
  for (float* matrix : {keys.k, keys.k_update}) FillZero(matrix + count * s.ldk, rest * s.ldk);
  for (float* matrix : {keys.v, keys.v_update}) FillZero(matrix + count * s.ldv, rest * s.ldv);
}

// phi(q) * scale for one query head, times `before` unless it is null; zero rows up to a multiple of kLane.
template <class Task>
inline HWY_NOINLINE void PrepareQueries(const Shapes& s, const Task& task, std::int64_t begin, std::int64_t count,
                                        std::int64_t head, const Factors* before, float* q) {
  const D d;
  const Vec scale = hn::Set(d, s.scale);
  for (std::int64_t t = 0; t < count; ++t) {
    float* row = q + t * s.ldk;
    LoadFeatures(s, task.in.q, begin + t, head, row);
    for (std::int64_t i = 0; i < s.ldk; i += Lanes()) {
      const Vec scaled = hn::Mul(hn::LoadU(d, row + i), scale);
      hn::StoreU(before != nullptr ? hn::Mul(scaled, before->at(t, i)) : scaled, d, row + i);
    }
  }
  FillZero(q + count * s.ldk, (padded(count) - count) * s.ldk);
}

// `count` rows of `channels` elements from token `begin`, of every head that `heads` counts.
HWY_INLINE void AddRows(Ahead& ahead, const Rows& rows, std::int64_t begin, std::int64_t count, std::int64_t channels,
                        std::int64_t heads = 1) {
  if (!rows || rows.token == 0) return;
  const auto bytes = channels * static_cast<std::int64_t>(size_of(rows.dtype));
  for (std::int64_t head = 0; head < heads; ++head) ahead.Add(rows.row(begin, head), count, rows.token, bytes);
}

// after = total * before + v^T k: the state past the chunk. May be in place.
inline HWY_NOINLINE void AdvanceState(const Shapes& s, const Keys& keys, std::int64_t count, const float* before,
                                      float* after, Ahead* ahead) {
  const D d;
  if (s.gate_values) {
    for (std::int64_t v = 0; v < s.values; ++v) {
      const Vec total = hn::Set(d, keys.gates_values.total[v]);
      for (std::int64_t k = 0; k < s.ldk; k += Lanes()) {
        hn::StoreU(hn::Mul(total, hn::LoadU(d, before + v * s.ldk + k)), d, after + v * s.ldk + k);
      }
    }
    before = after;
  }
  Gemm<Start::scale>(s.values, padded(s.K), count, {keys.v_update, 1, s.ldv}, keys.k_update, s.ldk, after, s.ldk,
                     before, keys.gates.total, ahead);
}

// The state between [K][V] (z [K]) and its transpose [values][ldk].
inline HWY_NOINLINE void LoadState(const Shapes& s, const float* h, const float* z, float* state) {
  FillZero(state, s.state_floats());
  if (h != nullptr) {
    for (std::int64_t k = 0; k < s.K; ++k) {
      for (std::int64_t v = 0; v < s.V; ++v) state[v * s.ldk + k] = h[k * s.columns + v];
    }
  }
  if (s.normalize && z != nullptr) std::memcpy(state + s.V * s.ldk, z, static_cast<std::size_t>(s.K) * sizeof(float));
}

HWY_INLINE void CopyState(const Shapes& s, const float* from, float* to) {
  std::memcpy(to, from, static_cast<std::size_t>(s.state_floats()) * sizeof(float));
}

inline HWY_NOINLINE void StoreState(const Shapes& s, const float* state, float* h, float* z) {
  if (h != nullptr) {
    for (std::int64_t k = 0; k < s.K; ++k) {
      for (std::int64_t v = 0; v < s.V; ++v) h[k * s.columns + v] = state[v * s.ldk + k];
    }
  }
  if (s.normalize && z != nullptr) std::memcpy(z, state + s.V * s.ldk, static_cast<std::size_t>(s.K) * sizeof(float));
}

}  // namespace flashgla::ops::gated_linear_attention::chunk::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// The gradient token by token, as the definition has it: dg from dh_t * alpha_t * h_{t-1} itself, not from the closed
// form that cancels. The states come from checkpoints at the starts of segments and one segment's recomputation.
#include <cmath>

#include "flashgla/ops/gated_linear_attention/cpu/cpu.h"
#include "flashgla/ops/gated_linear_attention/cpu/tasks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/gated_linear_attention/cpu/recurrent_backward.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h:
#include "flashgla/ops/gated_linear_attention/cpu/tokens-inl.h"

#ifndef FLASHGLA_GLA_RECURRENT_BACKWARD_TASKS
#define FLASHGLA_GLA_RECURRENT_BACKWARD_TASKS
namespace flashgla::ops::gated_linear_attention::recurrent {

// States are kept as tiles of key channels, transposed: [tiles][values][kTile] with zeros behind K, so that sums over
// values (dq, dk, dg) stay in vector lanes. With normalize the last value channel is 1 in v, and its state is z.
constexpr std::int64_t kTile = 32;
constexpr std::int64_t kHistoryBytes = 512 * 1024;     // one segment's states of a tile: within the second-level cache
constexpr std::int64_t kCheckpointBytes = 64ll << 20;  // of a worker, where longer segments can hold it there

struct BackwardShape {
  std::int64_t K, V, values, group, tiles, ldk, ldv, segment, segments;

  explicit BackwardShape(const Problem& p)
      : K(p.key_dim),
        V(p.value_dim),
        values(V + (p.normalize ? 1 : 0)),
        group(p.group()),
        tiles((K + kTile - 1) / kTile),
        ldk(tiles * kTile),
        ldv(padded(values)) {
    const std::int64_t state_bytes = values * ldk * static_cast<std::int64_t>(sizeof(float));
    const auto root = static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(p.length))));
    const std::int64_t by_history = std::clamp<std::int64_t>(kHistoryBytes / (values * kTile * 4), 4, 64);
    segment = std::max(by_history, std::min(root, p.length * state_bytes / kCheckpointBytes));
    segments = (p.length + segment - 1) / segment;
  }
  std::int64_t state() const { return values * ldk; }
  std::int64_t tile() const { return values * kTile; }
};

struct BackwardMemory {
  float *starts, *gradient, *state, *history;
  float *alpha, *k, *q, *v, *beta, *dn;  // of one segment; dn: what do is to q^T h
  float *dq, *dk, *dg, *dv, *dgv, *raw;

  BackwardMemory(const BackwardShape& s, Carver& carver) {
    starts = carver.take<float>(s.segments * s.state());
    gradient = carver.take<float>(s.state());
    state = carver.take<float>(s.state());
    history = carver.take<float>(s.segment * s.tile());
    for (float** rows : {&alpha, &k, &dk, &dg}) *rows = carver.take<float>(s.segment * s.ldk);
    for (float** rows : {&q, &dq}) *rows = carver.take<float>(s.segment * s.group * s.ldk);
    for (float** rows : {&v, &beta, &dv, &dgv}) *rows = carver.take<float>(s.segment * s.ldv);
    dn = carver.take<float>(s.segment * s.group * s.ldv);
    raw = carver.take<float>(std::max(s.ldk, s.ldv));
  }
};

}  // namespace flashgla::ops::gated_linear_attention::recurrent
#endif  // FLASHGLA_GLA_RECURRENT_BACKWARD_TASKS

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gated_linear_attention::recurrent::HWY_NAMESPACE {
using namespace gated_linear_attention::HWY_NAMESPACE;

// Calls body<kVectors>(column) over the first `columns` of a tile in blocks of as many vectors as registers allow.
template <class Body>
HWY_INLINE void ForColumns(std::int64_t columns, Body&& body) {
  constexpr int kMost = 2;  // registers: six rows of a token a vector, in AVX2 of sixteen
  const std::int64_t lanes = Lanes();
  std::int64_t c = 0;
  for (; c + kMost * lanes <= columns; c += kMost * lanes) body.template operator()<kMost>(c);
  for (; c < columns; c += lanes) body.template operator()<1>(c);
}

// after = alpha beta^T * before + k v^T, in place or not.
template <bool kGateValues>
HWY_INLINE void AdvanceTile(std::int64_t values, std::int64_t columns, const float* before, float* after,
                            const float* alpha, const float* k, const float* v, const float* beta) {
  const D d;
  ForColumns(columns, [&]<int kVectors>(std::int64_t c) HWY_ATTR {
    Vec alphas[kVectors], ks[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      alphas[j] = hn::LoadU(d, alpha + c + j * Lanes());
      ks[j] = hn::LoadU(d, k + c + j * Lanes());
    }
    for (std::int64_t i = 0; i < values; ++i) {
      const Vec v_i = hn::Set(d, v[i]);
      for (int j = 0; j < kVectors; ++j) {
        const std::int64_t at = i * kTile + c + j * Lanes();
        Vec h = hn::LoadU(d, before + at);
        if constexpr (kGateValues) h = hn::Mul(h, hn::Set(d, beta[i]));
        hn::StoreU(hn::MulAdd(alphas[j], h, hn::Mul(ks[j], v_i)), d, after + at);
      }
    }
  });
}

// A query head's share: dh += q dn^T, dq = h_t dn, by way of the state before the token:
// h_t dn = alpha * (h_{t-1} (beta * dn)) + k (v . dn), so that one state is read instead of two.
template <bool kGateValues>
HWY_INLINE void ReverseHead(std::int64_t values, std::int64_t columns, float* HWY_RESTRICT dh,
                            const float* HWY_RESTRICT before, const float* HWY_RESTRICT alpha,
                            const float* HWY_RESTRICT k, const float* HWY_RESTRICT q, const float* HWY_RESTRICT beta,
                            const float* HWY_RESTRICT dn, float v_dn, float* HWY_RESTRICT dq) {
  const D d;
  ForColumns(columns, [&]<int kVectors>(std::int64_t c) HWY_ATTR {
    Vec qs[kVectors], dqs[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      qs[j] = hn::LoadU(d, q + c + j * Lanes());
      dqs[j] = hn::Zero(d);
    }
    for (std::int64_t i = 0; i < values; ++i) {
      const Vec dn_i = hn::Set(d, dn[i]);
      const Vec read_i = kGateValues ? hn::Set(d, beta[i] * dn[i]) : dn_i;
      for (int j = 0; j < kVectors; ++j) {
        const std::int64_t at = i * kTile + c + j * Lanes();
        hn::StoreU(hn::MulAdd(qs[j], dn_i, hn::LoadU(d, dh + at)), d, dh + at);
        dqs[j] = hn::MulAdd(hn::LoadU(d, before + at), read_i, dqs[j]);
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = c + j * Lanes();
      const Vec written = hn::Mul(hn::LoadU(d, k + at), hn::Set(d, v_dn));
      hn::StoreU(hn::MulAdd(hn::LoadU(d, alpha + at), dqs[j], written), d, dq + at);
    }
  });
}

// One token backwards, the group's first head fused with what all heads share:
// dh += q dn^T, dq = h_t dn (as above), dk = dh v, dv += dh^T k, dh = alpha beta^T * dh, dg = sum over values of
// dh * h_{t-1}, dgv += the sum over keys.
template <bool kGate, bool kGateValues>
HWY_INLINE void ReverseTile(std::int64_t values, std::int64_t columns, float* HWY_RESTRICT dh,
                            const float* HWY_RESTRICT before, const float* HWY_RESTRICT alpha,
                            const float* HWY_RESTRICT k, const float* HWY_RESTRICT q, const float* HWY_RESTRICT v,
                            const float* HWY_RESTRICT beta, const float* HWY_RESTRICT dn, float v_dn,
                            float* HWY_RESTRICT dq, float* HWY_RESTRICT dk, float* HWY_RESTRICT dg,
                            float* HWY_RESTRICT dv, float* HWY_RESTRICT dgv) {
  const D d;
  constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  // The terms of as many dv and dgv as a vector has lanes, to be summed together.
  HWY_ALIGN float dv_terms[kLanes * kLanes] = {};
  HWY_ALIGN float dgv_terms[kGateValues ? kLanes * kLanes : 1] = {};
  ForColumns(columns, [&]<int kVectors>(std::int64_t c) HWY_ATTR {
    Vec alphas[kVectors], ks[kVectors], qs[kVectors], dqs[kVectors], dks[kVectors], dgs[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      alphas[j] = hn::LoadU(d, alpha + c + j * kLanes);
      ks[j] = hn::LoadU(d, k + c + j * kLanes);
      qs[j] = hn::LoadU(d, q + c + j * kLanes);
      dqs[j] = dks[j] = dgs[j] = hn::Zero(d);
    }
    for (std::int64_t begin = 0; begin < values; begin += kLanes) {
      const std::int64_t count = std::min(kLanes, values - begin);
      for (std::int64_t row = 0; row < count; ++row) {
        const std::int64_t i = begin + row;
        const Vec v_i = hn::Set(d, v[i]);
        const Vec dn_i = hn::Set(d, dn[i]);
        const Vec read_i = kGateValues ? hn::Set(d, beta[i] * dn[i]) : dn_i;
        Vec dv_i = hn::Zero(d);
        Vec dgv_i = hn::Zero(d);
        for (int j = 0; j < kVectors; ++j) {
          const std::int64_t at = i * kTile + c + j * kLanes;
          const Vec h = hn::LoadU(d, before + at);
          Vec x = hn::MulAdd(qs[j], dn_i, hn::LoadU(d, dh + at));
          dqs[j] = hn::MulAdd(h, read_i, dqs[j]);
          dks[j] = hn::MulAdd(x, v_i, dks[j]);
          dv_i = hn::MulAdd(x, ks[j], dv_i);
          if constexpr (kGate) {
            x = hn::Mul(x, alphas[j]);
            if constexpr (kGateValues) x = hn::Mul(x, hn::Set(d, beta[i]));
            dgs[j] = hn::MulAdd(x, h, dgs[j]);
            if constexpr (kGateValues) dgv_i = hn::MulAdd(x, h, dgv_i);
          }
          hn::StoreU(x, d, dh + at);
        }
        hn::StoreU(dv_i, d, dv_terms + row * kLanes);
        if constexpr (kGateValues) hn::StoreU(dgv_i, d, dgv_terms + row * kLanes);
      }
      // Rows past `count` are left from before: they end in the padding behind the values.
      hn::StoreU(hn::Add(hn::LoadU(d, dv + begin), SumOfRows(dv_terms)), d, dv + begin);
      if constexpr (kGateValues) {
        hn::StoreU(hn::Add(hn::LoadU(d, dgv + begin), SumOfRows(dgv_terms)), d, dgv + begin);
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = c + j * kLanes;
      hn::StoreU(hn::MulAdd(alphas[j], dqs[j], hn::Mul(ks[j], hn::Set(d, v_dn))), d, dq + at);
      hn::StoreU(dks[j], d, dk + at);
      hn::StoreU(dgs[j], d, dg + at);
    }
  });
}

HWY_INLINE void Clear(float* p, std::int64_t n) { std::memset(p, 0, static_cast<std::size_t>(n) * sizeof(float)); }

// [K,V] and [K] to tiles and back.
void LoadTiles(const BackwardShape& s, const float* h, const float* z, float* tiles) {
  Clear(tiles, s.state());
  for (std::int64_t k = 0; k < s.K; ++k) {
    float* column = tiles + k / kTile * s.tile() + k % kTile;
    for (std::int64_t i = 0; h != nullptr && i < s.V; ++i) column[i * kTile] = h[k * s.V + i];
    if (z != nullptr) column[s.V * kTile] = z[k];
  }
}

void StoreTiles(const BackwardShape& s, const float* tiles, float* h, float* z) {
  for (std::int64_t k = 0; k < s.K; ++k) {
    const float* column = tiles + k / kTile * s.tile() + k % kTile;
    for (std::int64_t i = 0; h != nullptr && i < s.V; ++i) h[k * s.V + i] = column[i * kTile];
    if (z != nullptr) z[k] = column[s.V * kTile];
  }
}

// phi(q), and dn of every head.
void LoadSegmentOutputs(const Problem& p, const BackwardShape& s, const BackwardTask& task, std::int64_t begin,
                        std::int64_t count, const float* start, const BackwardMemory& m) {
  float* z = m.raw;
  float* o = m.dv;  // free until the segment's gradients begin
  for (std::int64_t tile = 0; p.normalize && tile < s.tiles; ++tile) {
    std::memcpy(z + tile * kTile, start + tile * s.tile() + s.V * kTile, kTile * sizeof(float));
  }
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t i = 0; p.normalize && i < s.ldk; ++i) z[i] += m.k[t * s.ldk + i];
    for (std::int64_t head = 0; head < s.group; ++head) {
      float* q = m.q + (t * s.group + head) * s.ldk;
      LoadFeatures(p.feature_map, task.in.q, begin + t, head, s.K, s.ldk, q);
      LoadOutputGradient(p, task, begin + t, head, s.ldk, s.ldv, q, z, o, m.dn + (t * s.group + head) * s.ldv);
    }
  }
}

void StoreSegment(const Problem& p, const BackwardShape& s, const BackwardTask& task, std::int64_t begin,
                  std::int64_t count, const BackwardMemory& m) {
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t head = 0; head < s.group; ++head) {
      StoreFeatures(p.feature_map, task.dq, task.in.q, begin + t, head, s.K, s.ldk, m.raw,
                    m.dq + (t * s.group + head) * s.ldk);
    }
    StoreToken(p, task, begin + t, s.ldk, m.dk + t * s.ldk, m.dg + t * s.ldk, m.dv + t * s.ldv, m.dgv + t * s.ldv,
               m.raw);
  }
}

template <bool kGate, bool kGateValues>
void RunTask(const Problem& p, const BackwardShape& s, const BackwardTask& task, const BackwardMemory& m) {
  auto columns_of = [&](std::int64_t tile) { return std::min(kTile, padded(s.K - tile * kTile)); };
  const std::int64_t segments = (task.length + s.segment - 1) / s.segment;

  LoadTiles(s, task.h0, task.z0, m.state);
  for (std::int64_t segment = 0; segment < segments; ++segment) {
    std::memcpy(m.starts + segment * s.state(), m.state, static_cast<std::size_t>(s.state()) * sizeof(float));
    if (segment + 1 == segments) break;
    const std::int64_t begin = segment * s.segment;
    LoadTokens(p, task.in, begin, s.segment, s.ldk, s.ldv, m.alpha, m.k, m.v, m.beta);
    for (std::int64_t tile = 0; tile < s.tiles; ++tile) {
      float* state = m.state + tile * s.tile();
      for (std::int64_t t = 0; t < s.segment; ++t) {
        const std::int64_t k = t * s.ldk + tile * kTile;
        AdvanceTile<kGateValues>(s.values, columns_of(tile), state, state, m.alpha + k, m.k + k, m.v + t * s.ldv,
                                 m.beta + t * s.ldv);
      }
    }
  }

  LoadTiles(s, task.d_ht, task.d_zt, m.gradient);
  if (task.dg_sum != nullptr) *task.dg_sum = 0.0;
  for (std::int64_t segment = segments - 1; segment >= 0; --segment) {
    const std::int64_t begin = segment * s.segment;
    const std::int64_t count = std::min(s.segment, task.length - begin);
    const float* start = m.starts + segment * s.state();
    LoadTokens(p, task.in, begin, count, s.ldk, s.ldv, m.alpha, m.k, m.v, m.beta);
    LoadSegmentOutputs(p, s, task, begin, count, start, m);
    Clear(m.dv, s.segment * s.ldv);
    Clear(m.dgv, s.segment * s.ldv);
    for (std::int64_t tile = 0; tile < s.tiles; ++tile) {
      const std::int64_t columns = columns_of(tile);
      std::memcpy(m.history, start + tile * s.tile(), static_cast<std::size_t>(s.tile()) * sizeof(float));
      for (std::int64_t t = 0; t + 1 < count; ++t) {
        const std::int64_t k = t * s.ldk + tile * kTile;
        float* before = m.history + t * s.tile();
        AdvanceTile<kGateValues>(s.values, columns, before, before + s.tile(), m.alpha + k, m.k + k, m.v + t * s.ldv,
                                 m.beta + t * s.ldv);
      }
      float* dh = m.gradient + tile * s.tile();
      for (std::int64_t t = count - 1; t >= 0; --t) {
        const std::int64_t k = t * s.ldk + tile * kTile;
        const float* before = m.history + t * s.tile();
        const float* v = m.v + t * s.ldv;
        const float* beta = m.beta + t * s.ldv;
        for (std::int64_t head = s.group - 1; head > 0; --head) {
          const std::int64_t q = (t * s.group + head) * s.ldk + tile * kTile;
          const float* dn = m.dn + (t * s.group + head) * s.ldv;
          ReverseHead<kGateValues>(s.values, columns, dh, before, m.alpha + k, m.k + k, m.q + q, beta, dn,
                                   Dot(s.ldv, v, dn), m.dq + q);
        }
        const std::int64_t q = t * s.group * s.ldk + tile * kTile;
        const float* dn = m.dn + t * s.group * s.ldv;
        ReverseTile<kGate, kGateValues>(s.values, columns, dh, before, m.alpha + k, m.k + k, m.q + q, v, beta, dn,
                                        Dot(s.ldv, v, dn), m.dq + q, m.dk + k, m.dg + k, m.dv + t * s.ldv,
                                        m.dgv + t * s.ldv);
      }
    }
    StoreSegment(p, s, task, begin, count, m);
  }
  StoreTiles(s, m.gradient, task.dh0, task.dz0);
}

void Backward(const Problem& p, const BackwardShape& s, const BackwardTask& task, const BackwardMemory& m) {
  // Columns between padded(K) and the tile's end are never computed; sums over whole rows read them.
  for (float* rows : {m.dk, m.dg}) Clear(rows, s.segment * s.ldk);
  switch (p.gate) {
    case GateKind::none:
      return RunTask<false, false>(p, s, task, m);
    case GateKind::key_value:
      return RunTask<true, true>(p, s, task, m);
    default:
      return RunTask<true, false>(p, s, task, m);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::recurrent::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::gated_linear_attention::recurrent {

HWY_EXPORT(Backward);

void backward(Context& context, const Problem& p, const Inputs& in, const Outputs& out, const OutputGradients& d_out,
              const InputGradients& d_in) {
  const BackwardShape shape(p);
  backward_by_heads<BackwardMemory>(context, p, shape, in, out, d_out, d_in,
                                    [&](const BackwardTask& task, const BackwardMemory& m) {
                                      HWY_DYNAMIC_DISPATCH(Backward)(p, shape, task, m);
                                    });
}

}  // namespace flashgla::ops::gated_linear_attention::recurrent
#endif  // HWY_ONCE

// Token by token on CPU (section 2.1 of the paper): the state stays in the first-level cache, a slice of value channels
// at a time. Exact for any gate, no workspace that grows with T in forward; also the decoding step.
#include "flashgla/ops/gated_linear_attention/cpu/cpu.h"
#include "flashgla/ops/gated_linear_attention/cpu/tasks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/gated_linear_attention/cpu/recurrent.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h:
#include "flashgla/base/cpu/simd_math.h"
#include "flashgla/ops/gated_linear_attention/cpu/tokens-inl.h"

#ifndef FLASHGLA_GLA_RECURRENT_TASKS
#define FLASHGLA_GLA_RECURRENT_TASKS
namespace flashgla::ops::gated_linear_attention::recurrent {

constexpr std::int64_t kColumns = 32;  // value channels of a slice in forward: K = 128 of them take 16 KiB
constexpr std::int64_t kBlock = 4;     // tokens that are converted at a time
// Of a slice in step, where memory wants longer rows, but not where threads would be left without a slice.
constexpr std::int64_t kMostStepColumns = 128, kLeastStepColumns = 32;

// A slice of value channels [first, first + count) of one sequence and head.
struct Slice : ForwardTask {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// With normalize the slice has one more channel, whose v is 1 and whose state therefore is z.
struct ForwardMemory {
  float *state, *alpha, *k, *q, *v, *beta, *o;

  ForwardMemory(const Problem& p, Carver& carver) {
    const std::int64_t K = padded(p.key_dim);
    state = carver.take<float>(K * kColumns);
    alpha = carver.take<float>(kBlock * K);
    k = carver.take<float>(kBlock * K);
    q = carver.take<float>(kBlock * p.group() * K);
    v = carver.take<float>(kBlock * kColumns);
    beta = carver.take<float>(kBlock * kColumns);
    o = carver.take<float>(kBlock * p.group() * kColumns);
  }
};

// A gate that the step computes: rows of the projection that belong to one head.
struct GateRows {
  Rows x, weight, bias;  // weight: a row for each key channel
  std::int64_t rank = 0;

  GateRows() = default;
  GateRows(const Problem& p, const GateProjection& gate, std::int64_t batch, std::int64_t head) {
    if (!gate.weight) return;
    rank = gate.x.size(1);
    const auto at = [](const TensorView& view, std::int64_t element, std::int64_t row) {
      const auto size = static_cast<std::int64_t>(size_of(view.dtype));
      Rows rows;
      rows.dtype = view.dtype;
      rows.data = static_cast<std::byte*>(view.data) + element * size;
      rows.token = row * size;
      return rows;
    };
    x = at(gate.x, batch * gate.x.stride[0], 0);
    weight = at(gate.weight, head * p.key_dim * rank, rank);
    if (gate.bias) bias = at(gate.bias, head * p.key_dim, 0);
  }
};

struct StepSlice {
  TaskInputs in;
  GateRows gate;  // with rank 0: none, the gate is in.g
  Rows o;
  std::int64_t first = 0;
  std::int64_t count = 0;
  void* h = nullptr;  // [K,V] of this sequence and head
  void* z = nullptr;  // [K]
  bool bf16 = false;
};

struct StepMemory {
  float *alpha, *k, *q, *v, *beta, *o, *gate_x, *gate_row;

  StepMemory(const Problem& p, std::int64_t columns, std::int64_t rank, Carver& carver) {
    const std::int64_t K = padded(p.key_dim);
    const std::int64_t C = padded(columns);
    gate_x = carver.take<float>(padded(rank));
    gate_row = carver.take<float>(padded(rank));
    alpha = carver.take<float>(K);
    k = carver.take<float>(K);
    q = carver.take<float>(p.group() * K);
    v = carver.take<float>(C);
    beta = carver.take<float>(C);
    o = carver.take<float>(p.group() * C);
  }
};

}  // namespace flashgla::ops::gated_linear_attention::recurrent
#endif  // FLASHGLA_GLA_RECURRENT_TASKS

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gated_linear_attention::recurrent::HWY_NAMESPACE {
using namespace gated_linear_attention::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;

// alpha * beta * h + k v
template <bool kGate, bool kGateValues, class V>
HWY_INLINE V Advance(V h, V alpha, V beta, V k, V v) {
  if constexpr (kGateValues) h = hn::Mul(h, beta);
  if constexpr (kGate) return hn::MulAdd(alpha, h, hn::Mul(k, v));
  return hn::MulAdd(k, v, h);
}

// One token of a slice whose state is in cache: state [K,kColumns] = alpha beta^T * state + k v^T, o = q^T state.
template <bool kGate, bool kGateValues>
HWY_INLINE void Token(std::int64_t K, float* HWY_RESTRICT state, const float* HWY_RESTRICT alpha,
                      const float* HWY_RESTRICT k, const float* HWY_RESTRICT q, const float* HWY_RESTRICT v,
                      const float* HWY_RESTRICT beta, float* HWY_RESTRICT o) {
  const D d;
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  constexpr std::size_t kVectors = kColumns / kLanes;
  Vec vs[kVectors], betas[kVectors], sum[kVectors];
  for (std::size_t c = 0; c < kVectors; ++c) {
    vs[c] = hn::LoadU(d, v + c * kLanes);
    betas[c] = kGateValues ? hn::LoadU(d, beta + c * kLanes) : vs[c];
    sum[c] = hn::Zero(d);
  }
  for (std::int64_t i = 0; i < K; ++i) {
    const Vec alpha_i = hn::Set(d, alpha[i]);
    const Vec k_i = hn::Set(d, k[i]);
    const Vec q_i = hn::Set(d, q[i]);
    float* HWY_RESTRICT row = state + i * kColumns;
    for (std::size_t c = 0; c < kVectors; ++c) {
      const Vec h = Advance<kGate, kGateValues>(hn::LoadU(d, row + c * kLanes), alpha_i, betas[c], k_i, vs[c]);
      hn::StoreU(h, d, row + c * kLanes);
      sum[c] = hn::MulAdd(q_i, h, sum[c]);
    }
  }
  for (std::size_t c = 0; c < kVectors; ++c) hn::StoreU(sum[c], d, o + c * kLanes);
}

// o = q^T state: the group's other heads.
HWY_INLINE void ReadOut(std::int64_t K, const float* HWY_RESTRICT state, const float* HWY_RESTRICT q,
                        float* HWY_RESTRICT o) {
  const D d;
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  constexpr std::size_t kVectors = kColumns / kLanes;
  Vec sum[kVectors];
  for (std::size_t c = 0; c < kVectors; ++c) sum[c] = hn::Zero(d);
  for (std::int64_t i = 0; i < K; ++i) {
    const Vec q_i = hn::Set(d, q[i]);
    for (std::size_t c = 0; c < kVectors; ++c) {
      sum[c] = hn::MulAdd(q_i, hn::LoadU(d, state + i * kColumns + c * kLanes), sum[c]);
    }
  }
  for (std::size_t c = 0; c < kVectors; ++c) hn::StoreU(sum[c], d, o + c * kLanes);
}

template <bool kGate, bool kGateValues>
void RunSlice(const Problem& p, const Slice& s, const ForwardMemory& m) {
  const std::int64_t K = p.key_dim;
  const std::int64_t V = p.value_dim;
  const std::int64_t ldk = padded(K);
  const std::int64_t group = p.group();
  const bool per_channel = p.gate == GateKind::key || p.gate == GateKind::key_value;
  const float scale = p.normalize ? 1.0f : static_cast<float>(p.scale);

  std::memset(m.state, 0, static_cast<std::size_t>(ldk * kColumns) * sizeof(float));
  for (std::int64_t i = 0; i < K; ++i) {
    float* row = m.state + i * kColumns;
    if (s.h0 != nullptr) std::memcpy(row, s.h0 + i * V + s.first, static_cast<std::size_t>(s.count) * sizeof(float));
    if (s.z0 != nullptr) row[s.count] = s.z0[i];
  }
  for (std::int64_t begin = 0; begin < s.length; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, s.length - begin);
    for (std::int64_t t = 0; t < count; ++t) {
      if constexpr (kGate) LoadGate(s.in.g, begin + t, per_channel, K, ldk, m.alpha + t * ldk);
      if constexpr (kGateValues) {
        LoadChannels(s.in.gv, begin + t, 0, s.first, s.count, kColumns, m.beta + t * kColumns);
        for (std::int64_t c = 0; c < kColumns; c += Lanes()) {
          float* beta = m.beta + t * kColumns + c;
          hn::StoreU(Exp(hn::LoadU(D(), beta)), D(), beta);
        }
      }
      LoadFeatures(p.feature_map, s.in.k, begin + t, 0, K, ldk, m.k + t * ldk);
      LoadChannels(s.in.v, begin + t, 0, s.first, s.count, kColumns, m.v + t * kColumns);
      if (p.normalize) m.v[t * kColumns + s.count] = 1.0f;
      for (std::int64_t head = 0; head < group; ++head) {
        float* q = m.q + (t * group + head) * ldk;
        LoadFeatures(p.feature_map, s.in.q, begin + t, head, K, ldk, q);
        ScaleRow(scale, ldk, q, q);
      }
    }
    for (std::int64_t t = 0; t < count; ++t) {
      const float* q = m.q + t * group * ldk;
      float* o = m.o + t * group * kColumns;
      Token<kGate, kGateValues>(K, m.state, m.alpha + t * ldk, m.k + t * ldk, q, m.v + t * kColumns,
                                m.beta + t * kColumns, o);
      for (std::int64_t head = 1; head < group; ++head) ReadOut(K, m.state, q + head * ldk, o + head * kColumns);
    }
    for (std::int64_t t = 0; t < count; ++t) {
      for (std::int64_t head = 0; head < group; ++head) {
        float* o = m.o + (t * group + head) * kColumns;
        if (p.normalize) ScaleRow(1.0f / (o[s.count] + static_cast<float>(kNormalizerEpsilon)), kColumns, o, o);
        StoreChannels(s.o, begin + t, head, s.first, s.count, o);
      }
    }
  }
  for (std::int64_t i = 0; i < K; ++i) {
    const float* row = m.state + i * kColumns;
    if (s.ht != nullptr) std::memcpy(s.ht + i * V + s.first, row, static_cast<std::size_t>(s.count) * sizeof(float));
    if (s.zt != nullptr) s.zt[i] = row[s.count];
  }
}

void ForwardSlice(const Problem& p, const Slice& s, const ForwardMemory& m) {
  switch (p.gate) {
    case GateKind::none:
      return RunSlice<false, false>(p, s, m);
    case GateKind::key_value:
      return RunSlice<true, true>(p, s, m);
    default:
      return RunSlice<true, false>(p, s, m);
  }
}

template <class DF>
HWY_INLINE hn::Vec<DF> LoadState(DF d, const float* h) {
  return hn::LoadU(d, h);
}
template <class DF>
HWY_INLINE hn::Vec<DF> LoadState(DF d, const std::uint16_t* h) {
  return LoadBFloat16(d, h);
}
template <class DF>
HWY_INLINE void StoreState(DF d, hn::Vec<DF> x, float* h) {
  hn::StoreU(x, d, h);
}
template <class DF>
HWY_INLINE void StoreState(DF d, hn::Vec<DF> x, std::uint16_t* h) {
  StoreBFloat16(d, x, h);
}

// kRows rows of a state in memory, columns [begin, end): updated in place, read by every head of the group.
template <int kRows, bool kGateValues, class DF, class State>
HWY_INLINE void StepRows(DF d, std::int64_t begin, std::int64_t end, std::int64_t group, State* HWY_RESTRICT h,
                         std::int64_t ldh, const float* HWY_RESTRICT alpha, const float* HWY_RESTRICT k,
                         const float* HWY_RESTRICT q, std::int64_t ldq, const float* HWY_RESTRICT v,
                         const float* HWY_RESTRICT beta, float* HWY_RESTRICT o, std::int64_t ldo) {
  using V = hn::Vec<DF>;
  V alphas[kRows], ks[kRows];
  for (int i = 0; i < kRows; ++i) {
    alphas[i] = hn::Set(d, alpha[i]);
    ks[i] = hn::Set(d, k[i]);
  }
  for (std::int64_t c = begin; c < end; c += static_cast<std::int64_t>(hn::Lanes(d))) {
    const V v_c = hn::LoadU(d, v + c);
    const V beta_c = kGateValues ? hn::LoadU(d, beta + c) : v_c;
    V rows[kRows];
    for (int i = 0; i < kRows; ++i) {
      rows[i] = Advance<true, kGateValues>(LoadState(d, h + i * ldh + c), alphas[i], beta_c, ks[i], v_c);
      StoreState(d, rows[i], h + i * ldh + c);
    }
    for (std::int64_t head = 0; head < group; ++head) {
      V sum = hn::LoadU(d, o + head * ldo + c);
      for (int i = 0; i < kRows; ++i) sum = hn::MulAdd(hn::Set(d, q[head * ldq + i]), rows[i], sum);
      hn::StoreU(sum, d, o + head * ldo + c);
    }
  }
}

template <bool kGateValues, class State>
void StepColumns(const Problem& p, const StepSlice& s, const StepMemory& m) {
  const std::int64_t ldk = padded(p.key_dim);
  const std::int64_t ldo = padded(s.count);
  auto* h = static_cast<State*>(s.h) + s.first;
  auto rows = [&]<int kRows>(std::int64_t i) {
    const std::int64_t whole = s.count / Lanes() * Lanes();
    StepRows<kRows, kGateValues>(D(), 0, whole, p.group(), h + i * p.value_dim, p.value_dim, m.alpha + i, m.k + i,
                                 m.q + i, ldk, m.v, m.beta, m.o, ldo);
    StepRows<kRows, kGateValues>(hn::CappedTag<float, 1>(), whole, s.count, p.group(), h + i * p.value_dim, p.value_dim,
                                 m.alpha + i, m.k + i, m.q + i, ldk, m.v, m.beta, m.o, ldo);
  };
  std::int64_t i = 0;
  for (; i + 4 <= p.key_dim; i += 4) rows.template operator()<4>(i);
  for (; i < p.key_dim; ++i) rows.template operator()<1>(i);
}

// z += phi(k); returns phi(q) . z + epsilon for each head of the group in `divisors`.
template <class State>
void StepNormalizer(const Problem& p, State* z, const StepMemory& m, float* divisors) {
  for (std::int64_t head = 0; head < p.group(); ++head) divisors[head] = static_cast<float>(kNormalizerEpsilon);
  const hn::CappedTag<float, 1> d;
  for (std::int64_t i = 0; i < p.key_dim; ++i) {
    const auto sum = hn::Add(LoadState(d, z + i), hn::Set(d, m.k[i]));
    StoreState(d, sum, z + i);
    for (std::int64_t head = 0; head < p.group(); ++head) {
      divisors[head] += m.q[head * padded(p.key_dim) + i] * hn::GetLane(sum);
    }
  }
}

// alpha = exp(max(log sigmoid(weight x + bias) / normalizer, clamp)), padded; uses m.k.
void ProjectGate(const Problem& p, const GateRows& gate, const StepMemory& m) {
  const D d;
  const std::int64_t K = p.key_dim, ldk = padded(K), ldr = padded(gate.rank);
  LoadRow(gate.x.dtype, gate.x.row(0), gate.rank, ldr, m.gate_x);
  for (std::int64_t i = 0; i < K; ++i) {
    LoadRow(gate.weight.dtype, gate.weight.row(i), gate.rank, ldr, m.gate_row);
    m.alpha[i] = Dot(ldr, m.gate_row, m.gate_x);
  }
  std::fill(m.alpha + K, m.alpha + ldk, 0.0f);
  std::fill(m.k, m.k + ldk, 0.0f);
  if (gate.bias) LoadRow(gate.bias.dtype, gate.bias.row(0), K, ldk, m.k);
  const Vec scale = hn::Set(d, static_cast<float>(1.0 / p.gate_logit_normalizer));
  const Vec least = hn::Set(d, static_cast<float>(p.gate_clamp_min));
  for (std::int64_t i = 0; i < ldk; i += Lanes()) {
    const Vec logit = hn::Add(hn::LoadU(d, m.alpha + i), hn::LoadU(d, m.k + i));
    hn::StoreU(Exp(hn::Max(hn::Mul(simd::log_sigmoid(d, logit), scale), least)), d, m.alpha + i);
  }
}

void Step(const Problem& p, const StepSlice& s, const StepMemory& m, float* divisors) {
  const std::int64_t K = p.key_dim;
  const std::int64_t ldk = padded(K);
  const std::int64_t ldo = padded(s.count);
  const bool per_channel = p.gate == GateKind::key || p.gate == GateKind::key_value;
  if (s.gate.rank > 0) {
    ProjectGate(p, s.gate, m);
  } else {
    LoadGate(s.in.g, 0, per_channel, K, ldk, m.alpha);
  }
  LoadFeatures(p.feature_map, s.in.k, 0, 0, K, ldk, m.k);
  LoadChannels(s.in.v, 0, 0, s.first, s.count, ldo, m.v);
  if (s.in.gv) {
    LoadChannels(s.in.gv, 0, 0, s.first, s.count, ldo, m.beta);
    for (std::int64_t c = 0; c < ldo; c += Lanes()) hn::StoreU(Exp(hn::LoadU(D(), m.beta + c)), D(), m.beta + c);
  }
  const float scale = p.normalize ? 1.0f : static_cast<float>(p.scale);
  for (std::int64_t head = 0; head < p.group(); ++head) {
    LoadFeatures(p.feature_map, s.in.q, 0, head, K, ldk, m.q + head * ldk);
    ScaleRow(scale, ldk, m.q + head * ldk, m.q + head * ldk);
  }
  std::memset(m.o, 0, static_cast<std::size_t>(p.group() * ldo) * sizeof(float));
  if (s.bf16) {
    s.in.gv ? StepColumns<true, std::uint16_t>(p, s, m) : StepColumns<false, std::uint16_t>(p, s, m);
  } else {
    s.in.gv ? StepColumns<true, float>(p, s, m) : StepColumns<false, float>(p, s, m);
  }
  if (p.normalize) {
    if (s.bf16)
      StepNormalizer(p, static_cast<std::uint16_t*>(s.z), m, divisors);
    else
      StepNormalizer(p, static_cast<float*>(s.z), m, divisors);
  }
  for (std::int64_t head = 0; head < p.group(); ++head) {
    float* o = m.o + head * ldo;
    if (p.normalize) ScaleRow(1.0f / divisors[head], ldo, o, o);
    StoreChannels(s.o, 0, head, s.first, s.count, o);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::recurrent::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::gated_linear_attention::recurrent {

HWY_EXPORT(ForwardSlice);
HWY_EXPORT(Step);

Support supports(const Problem& p, const Architecture&) {
  if (p.algorithm != Algorithm::automatic && p.algorithm != Algorithm::recurrent) {
    return Support::no(std::string("is recurrent, not ") + name_of(p.algorithm));
  }
  if (p.dtype == DType::f64) return Support::no("computes in f32");
  return Support::yes();
}

std::size_t states_bytes(const Problem&) { return 0; }

void forward(Context& context, const Problem& p, const Inputs& in, const Outputs& out) {
  const std::int64_t columns = kColumns - (p.normalize ? 1 : 0);
  const std::int64_t slices = (p.value_dim + columns - 1) / columns;
  Carver counter(nullptr);
  ForwardMemory(p, counter);
  const Workers workers(context, p.sequences * p.heads * slices, counter.used());
  if (context.planning()) return;
  workers.run([&](std::int64_t item, std::byte* memory) {
    const std::int64_t slice = item % slices;
    const std::int64_t head = item / slices % p.heads;
    const std::int64_t n = item / slices / p.heads;
    Slice s{ForwardTask(p, in, out, n, head)};
    s.first = slice * columns;
    s.count = std::min(columns, p.value_dim - s.first);
    if (slice != 0) s.zt = nullptr;
    Carver carver(memory);
    HWY_DYNAMIC_DISPATCH(ForwardSlice)(p, s, ForwardMemory(p, carver));
  });
}

bool takes_projection(const Context&, const Problem&, const GateProjection&, DType) { return true; }

void step(Context& context, const Problem& p, const StepInputs& in, const TensorView& h, const TensorView& z,
          const TensorView& o) {
  // The normaliser's state belongs to all channels: then there is one slice.
  std::int64_t columns = p.normalize ? p.value_dim : std::min(p.value_dim, kMostStepColumns);
  const auto slices_of = [&] { return (p.value_dim + columns - 1) / columns; };
  while (!p.normalize && columns > kLeastStepColumns && p.batch * p.heads * slices_of() < context.threads()) {
    columns = std::max(kLeastStepColumns, padded(columns / 2));
  }
  const std::int64_t slices = slices_of();
  const std::int64_t rank = in.projection.weight ? in.projection.x.size(1) : 0;
  Carver counter(nullptr);
  StepMemory(p, columns, rank, counter);
  counter.take<float>(p.group());
  const Workers workers(context, p.batch * p.heads * slices, counter.used());
  if (context.planning()) return;
  workers.run([&](std::int64_t item, std::byte* memory) {
    const std::int64_t head = item / slices % p.heads;
    const std::int64_t batch = item / slices / p.heads;
    StepSlice s;
    s.in = TaskInputs(p, in, batch, head);
    s.gate = GateRows(p, in.projection, batch, head);
    s.o = Rows(o, false, batch, 0, head * p.group());
    s.first = item % slices * columns;
    s.count = std::min(columns, p.value_dim - s.first);
    s.bf16 = h.dtype == DType::bf16;
    const auto size = static_cast<std::int64_t>(size_of(h.dtype));
    s.h = state_of<std::byte>(h, p, batch, head, p.key_dim * p.value_dim * size);
    s.z = state_of<std::byte>(z, p, batch, head, p.key_dim * size);
    Carver carver(memory);
    const StepMemory m(p, columns, rank, carver);
    HWY_DYNAMIC_DISPATCH(Step)(p, s, m, carver.take<float>(p.group()));
  });
}

}  // namespace flashgla::ops::gated_linear_attention::recurrent
#endif  // HWY_ONCE

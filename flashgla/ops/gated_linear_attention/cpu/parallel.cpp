// The quadratic form on CPU (section 4.2 of the paper, "parallel form"), for short sequences:
//     P_ij = scale * sum_k q_ik k_jk W_ijk,  W_ij = alpha_{j+1} * ... * alpha_i,  o_i = sum_{j<=i} P_ij v_j + from h0.
// W is built as a running product, never as a quotient, so any gate is exact; gates over values run along in the same
// way. It keeps no state between tokens: a second, independent way to every result of the recurrence.
#include "flashgla/ops/gated_linear_attention/cpu/cpu.h"
#include "flashgla/ops/gated_linear_attention/cpu/tasks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/gated_linear_attention/cpu/parallel.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h:
#include "flashgla/ops/gated_linear_attention/cpu/tokens-inl.h"

#ifndef FLASHGLA_GLA_PARALLEL_TASKS
#define FLASHGLA_GLA_PARALLEL_TASKS
namespace flashgla::ops::gated_linear_attention::parallel {

constexpr std::int64_t kLongest = 1024;  // tokens: beyond, the work is hopeless beside the linear forms
constexpr std::int64_t kQueries = 32;    // tokens of one item in forward

// With normalize v has one more channel, which is 1, and states one more column, which is z.
struct Widths {
  std::int64_t K, V, ldk, ldv, group;
  explicit Widths(const Problem& p)
      : K(p.key_dim), V(p.value_dim), ldk(padded(K)), ldv(padded(V + (p.normalize ? 1 : 0))), group(p.group()) {}
  std::int64_t state() const { return K * ldv; }
};

struct ForwardMemory {
  float *alpha, *beta, *k, *v;  // [length] rows
  float *w, *bw, *o, *h;

  ForwardMemory(const Problem& p, Carver& carver) {
    const Widths s(p);
    for (float** rows : {&alpha, &k}) *rows = carver.take<float>(p.length * s.ldk);
    for (float** rows : {&beta, &v}) *rows = carver.take<float>(p.length * s.ldv);
    w = carver.take<float>(s.ldk);
    for (float** row : {&bw, &o}) *row = carver.take<float>(s.ldv);
    h = carver.take<float>(s.state());
  }
};

struct BackwardMemory {
  ForwardMemory inputs;
  float *dk, *dg, *c;    // [length] rows over keys; c: one query's terms of dg
  float *dv, *dgv, *cv;  // over values
  float *q, *dq, *s, *z, *raw, *c0;
  float *dn, *cv0, *vw;
  float *h0, *d_ht, *dh0;  // [K] rows over values

  BackwardMemory(const Problem& p, Carver& carver) : inputs(p, carver) {
    const Widths w(p);
    for (float** rows : {&dk, &dg, &c}) *rows = carver.take<float>(p.length * w.ldk);
    for (float** rows : {&dv, &dgv, &cv}) *rows = carver.take<float>(p.length * w.ldv);
    for (float** row : {&q, &dq, &s, &z, &raw, &c0}) *row = carver.take<float>(w.ldk);
    for (float** row : {&dn, &cv0, &vw}) *row = carver.take<float>(w.ldv);
    for (float** state : {&h0, &d_ht, &dh0}) *state = carver.take<float>(w.state());
  }
};

}  // namespace flashgla::ops::gated_linear_attention::parallel
#endif  // FLASHGLA_GLA_PARALLEL_TASKS

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gated_linear_attention::parallel::HWY_NAMESPACE {
using namespace gated_linear_attention::HWY_NAMESPACE;

HWY_INLINE void Fill(std::int64_t n, float value, float* x) {
  for (std::int64_t i = 0; i < n; i += Lanes()) hn::StoreU(hn::Set(D(), value), D(), x + i);
}
// y *= x
HWY_INLINE void MultiplyBy(std::int64_t n, const float* x, float* y) {
  for (std::int64_t i = 0; i < n; i += Lanes())
    hn::StoreU(hn::Mul(hn::LoadU(D(), x + i), hn::LoadU(D(), y + i)), D(), y + i);
}
// y += x
HWY_INLINE void AddTo(std::int64_t n, const float* x, float* y) {
  for (std::int64_t i = 0; i < n; i += Lanes())
    hn::StoreU(hn::Add(hn::LoadU(D(), x + i), hn::LoadU(D(), y + i)), D(), y + i);
}
// y += a x
HWY_INLINE void AddScaled(std::int64_t n, float a, const float* x, float* y) {
  const D d;
  for (std::int64_t i = 0; i < n; i += Lanes()) {
    hn::StoreU(hn::MulAdd(hn::Set(d, a), hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, y + i);
  }
}
// z += a x * y
HWY_INLINE void AddProduct(std::int64_t n, float a, const float* x, const float* y, float* z) {
  const D d;
  for (std::int64_t i = 0; i < n; i += Lanes()) {
    const Vec product = hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, y + i));
    hn::StoreU(hn::MulAdd(hn::Set(d, a), product, hn::LoadU(d, z + i)), d, z + i);
  }
}
// z = x * y
HWY_INLINE void Product(std::int64_t n, const float* x, const float* y, float* z) {
  const D d;
  for (std::int64_t i = 0; i < n; i += Lanes()) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, z + i);
  }
}
// sum of x y z
HWY_INLINE float Dot3(std::int64_t n, const float* x, const float* y, const float* z) {
  const D d;
  Vec sum = hn::Zero(d);
  for (std::int64_t i = 0; i < n; i += Lanes()) {
    sum = hn::MulAdd(hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), hn::LoadU(d, z + i), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// [K,V] and [K] as rows of ldv with z behind the values; zeros where absent.
void LoadState(const Widths& s, const float* h, const float* z, float* state) {
  std::memset(state, 0, static_cast<std::size_t>(s.state()) * sizeof(float));
  for (std::int64_t i = 0; i < s.K; ++i) {
    if (h != nullptr) std::memcpy(state + i * s.ldv, h + i * s.V, static_cast<std::size_t>(s.V) * sizeof(float));
    if (z != nullptr) state[i * s.ldv + s.V] = z[i];
  }
}
void StoreState(const Widths& s, const float* state, float* h, float* z) {
  for (std::int64_t i = 0; i < s.K; ++i) {
    if (h != nullptr) std::memcpy(h + i * s.V, state + i * s.ldv, static_cast<std::size_t>(s.V) * sizeof(float));
    if (z != nullptr) z[i] = state[i * s.ldv + s.V];
  }
}

// Queries [begin, end); with `last` the final state too.
template <bool kGateValues>
void RunForward(const Problem& p, const ForwardTask& task, std::int64_t begin, std::int64_t end, bool last,
                const ForwardMemory& m) {
  const Widths s(p);
  const float scale = p.normalize ? 1.0f : static_cast<float>(p.scale);
  LoadTokens(p, task.in, 0, task.length, s.ldk, s.ldv, m.alpha, m.k, m.v, m.beta);
  LoadState(s, task.h0, task.z0, m.h);
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t head = 0; head < s.group; ++head) {
      LoadFeatures(p.feature_map, task.in.q, i, head, s.K, s.ldk, m.w);
      ScaleRow(scale, s.ldk, m.w, m.w);
      Fill(s.ldv, 1.0f, m.bw);
      Fill(s.ldv, 0.0f, m.o);
      for (std::int64_t j = i; j >= 0; --j) {
        const float p_ij = Dot(s.ldk, m.w, m.k + j * s.ldk);
        if constexpr (kGateValues)
          AddProduct(s.ldv, p_ij, m.bw, m.v + j * s.ldv, m.o);
        else
          AddScaled(s.ldv, p_ij, m.v + j * s.ldv, m.o);
        MultiplyBy(s.ldk, m.alpha + j * s.ldk, m.w);
        if constexpr (kGateValues) MultiplyBy(s.ldv, m.beta + j * s.ldv, m.bw);
      }
      for (std::int64_t k = 0; k < s.K; ++k) AddProduct(s.ldv, m.w[k], m.bw, m.h + k * s.ldv, m.o);
      if (p.normalize) ScaleRow(1.0f / (m.o[s.V] + static_cast<float>(kNormalizerEpsilon)), s.ldv, m.o, m.o);
      StoreRow(task.o.dtype, m.o, s.V, task.o.row(i, head));
    }
  }
  if (!last || (task.ht == nullptr && task.zt == nullptr)) return;
  // ht = sum_j (W_j k_j) (BW_j v_j)^T + (W h0) BW, W_j from token j to the end: h0's own decay is known last.
  float* ht = m.h;
  float* w = m.w;
  Fill(s.ldk, 1.0f, w);
  Fill(s.ldv, 1.0f, m.bw);
  for (std::int64_t j = task.length - 1; j >= 0; --j) {
    MultiplyBy(s.ldk, m.alpha + j * s.ldk, w);
    if constexpr (kGateValues) MultiplyBy(s.ldv, m.beta + j * s.ldv, m.bw);
  }
  for (std::int64_t k = 0; k < s.K; ++k) {
    MultiplyBy(s.ldv, m.bw, ht + k * s.ldv);
    ScaleRow(w[k], s.ldv, ht + k * s.ldv, ht + k * s.ldv);
  }
  Fill(s.ldk, 1.0f, w);
  Fill(s.ldv, 1.0f, m.bw);
  for (std::int64_t j = task.length - 1; j >= 0; --j) {
    Product(s.ldv, m.bw, m.v + j * s.ldv, m.o);
    for (std::int64_t k = 0; k < s.K; ++k) AddScaled(s.ldv, w[k] * m.k[j * s.ldk + k], m.o, ht + k * s.ldv);
    MultiplyBy(s.ldk, m.alpha + j * s.ldk, w);
    if constexpr (kGateValues) MultiplyBy(s.ldv, m.beta + j * s.ldv, m.bw);
  }
  StoreState(s, ht, task.ht, task.zt);
}

void Forward(const Problem& p, const ForwardTask& task, std::int64_t begin, std::int64_t end, bool last,
             const ForwardMemory& m) {
  if (p.gate == GateKind::key_value)
    RunForward<true>(p, task, begin, end, last, m);
  else
    RunForward<false>(p, task, begin, end, last, m);
}

// A term c_j passes through the gates of tokens j + 1 to i, c0 through those of 0 to i: dg_m += c0 + sum_{j<m} c_j.
HWY_INLINE void AddThroughGates(std::int64_t i, std::int64_t width, const float* c, float* c0, float* dg) {
  for (std::int64_t m = 0; m <= i; ++m) {
    AddTo(width, c0, dg + m * width);
    AddTo(width, c + m * width, c0);
  }
}

// Query i of one head, whose phi(q) and dn (what do is to q^T h) are loaded: adds its share of dk, dv, dg, dgv and dh0,
// and leaves dq. With W_ij as above and qw = q * W_ij, and BW_ij the same over values:
//   P_ij = qw . k_j                   dP_ij = (BW_ij dn) . v_j
//   dq += dP_ij W_ij k_j              dk_j += dP_ij qw                  dv_j += P_ij BW_ij dn
//   terms of dg: dP_ij qw k_j         of dgv: P_ij BW_ij dn v_j
template <bool kGateValues>
HWY_INLINE void ReverseQuery(const Widths& s, std::int64_t i, const BackwardMemory& m) {
  const D d;
  const ForwardMemory& x = m.inputs;
  float* w = x.w;
  float* bdn = m.vw;  // BW dn
  Fill(s.ldk, 1.0f, w);
  Fill(s.ldk, 0.0f, m.dq);
  std::memcpy(bdn, m.dn, static_cast<std::size_t>(s.ldv) * sizeof(float));
  for (std::int64_t j = i; j >= 0; --j) {
    const float* k = x.k + j * s.ldk;
    const float* v = x.v + j * s.ldv;
    const float p_ij = Dot3(s.ldk, m.q, w, k);
    const Vec dp = hn::Set(d, Dot(s.ldv, bdn, v));
    for (std::int64_t c = 0; c < s.ldk; c += Lanes()) {
      const Vec w_c = hn::LoadU(d, w + c);
      const Vec k_c = hn::LoadU(d, k + c);
      const Vec dpqw = hn::Mul(dp, hn::Mul(w_c, hn::LoadU(d, m.q + c)));
      hn::StoreU(hn::MulAdd(hn::Mul(dp, w_c), k_c, hn::LoadU(d, m.dq + c)), d, m.dq + c);
      hn::StoreU(hn::Add(dpqw, hn::LoadU(d, m.dk + j * s.ldk + c)), d, m.dk + j * s.ldk + c);
      hn::StoreU(hn::Mul(dpqw, k_c), d, m.c + j * s.ldk + c);
      hn::StoreU(hn::Mul(w_c, hn::LoadU(d, x.alpha + j * s.ldk + c)), d, w + c);
    }
    AddScaled(s.ldv, p_ij, bdn, m.dv + j * s.ldv);
    if constexpr (kGateValues) {
      Product(s.ldv, bdn, v, m.cv + j * s.ldv);
      ScaleRow(p_ij, s.ldv, m.cv + j * s.ldv, m.cv + j * s.ldv);
      MultiplyBy(s.ldv, x.beta + j * s.ldv, bdn);
    }
  }
  // From h0, through all gates of 0 to i.
  for (std::int64_t k = 0; k < s.ldk; ++k) {
    const float s_k = k < s.K ? Dot(s.ldv, m.h0 + k * s.ldv, bdn) : 0.0f;
    m.s[k] = s_k;
    m.c0[k] = m.q[k] * w[k] * s_k;
  }
  AddProduct(s.ldk, 1.0f, w, m.s, m.dq);
  Fill(s.ldv, 0.0f, m.cv0);
  for (std::int64_t k = 0; k < s.K; ++k) {
    const float qw = m.q[k] * w[k];
    AddScaled(s.ldv, qw, bdn, m.dh0 + k * s.ldv);
    if constexpr (kGateValues) AddProduct(s.ldv, qw, bdn, m.h0 + k * s.ldv, m.cv0);
  }
  AddThroughGates(i, s.ldk, m.c, m.c0, m.dg);
  if constexpr (kGateValues) AddThroughGates(i, s.ldv, m.cv, m.cv0, m.dgv);
}

// The gradient that enters through the final state, as if every state channel were read after the last token.
template <bool kGateValues>
HWY_INLINE void ReverseFinalState(const Widths& s, std::int64_t length, const BackwardMemory& m) {
  const ForwardMemory& x = m.inputs;
  float* w = x.w;
  float* bw = x.bw;
  Fill(s.ldk, 1.0f, w);
  Fill(s.ldv, 1.0f, bw);
  for (std::int64_t j = length - 1; j >= 0; --j) {
    const float* k = x.k + j * s.ldk;
    const float* v = x.v + j * s.ldv;
    Product(s.ldv, bw, v, m.vw);
    float* dv_sum = x.o;
    Fill(s.ldv, 0.0f, dv_sum);
    Fill(s.ldk, 0.0f, m.s);
    for (std::int64_t i = 0; i < s.K; ++i) {
      m.s[i] = w[i] * Dot(s.ldv, m.d_ht + i * s.ldv, m.vw);
      AddScaled(s.ldv, w[i] * k[i], m.d_ht + i * s.ldv, dv_sum);
    }
    AddTo(s.ldk, m.s, m.dk + j * s.ldk);
    Product(s.ldk, m.s, k, m.c + j * s.ldk);
    AddProduct(s.ldv, 1.0f, bw, dv_sum, m.dv + j * s.ldv);
    if constexpr (kGateValues) {
      Product(s.ldv, m.vw, dv_sum, m.cv + j * s.ldv);
      MultiplyBy(s.ldv, x.beta + j * s.ldv, bw);
    }
    MultiplyBy(s.ldk, x.alpha + j * s.ldk, w);
  }
  Fill(s.ldk, 0.0f, m.c0);
  Fill(s.ldv, 0.0f, m.cv0);
  for (std::int64_t i = 0; i < s.K; ++i) {
    float* through = x.o;  // w_i bw d_ht
    Product(s.ldv, bw, m.d_ht + i * s.ldv, through);
    ScaleRow(w[i], s.ldv, through, through);
    AddTo(s.ldv, through, m.dh0 + i * s.ldv);
    m.c0[i] = Dot(s.ldv, through, m.h0 + i * s.ldv);
    AddProduct(s.ldv, 1.0f, through, m.h0 + i * s.ldv, m.cv0);
  }
  AddThroughGates(length - 1, s.ldk, m.c, m.c0, m.dg);
  if constexpr (kGateValues) AddThroughGates(length - 1, s.ldv, m.cv, m.cv0, m.dgv);
}

template <bool kGateValues>
void RunBackward(const Problem& p, const BackwardTask& task, const BackwardMemory& m) {
  const Widths s(p);
  const ForwardMemory& x = m.inputs;
  LoadTokens(p, task.in, 0, task.length, s.ldk, s.ldv, x.alpha, x.k, x.v, x.beta);
  LoadState(s, task.h0, task.z0, m.h0);
  LoadState(s, task.d_ht, task.d_zt, m.d_ht);
  std::memset(m.dh0, 0, static_cast<std::size_t>(s.state()) * sizeof(float));
  for (float* rows : {m.dk, m.dg}) Fill(task.length * s.ldk, 0.0f, rows);
  for (float* rows : {m.dv, m.dgv}) Fill(task.length * s.ldv, 0.0f, rows);
  for (std::int64_t k = 0; k < s.ldk; ++k) m.z[k] = k < s.K && p.normalize ? m.h0[k * s.ldv + s.V] : 0.0f;

  for (std::int64_t i = 0; i < task.length; ++i) {
    AddTo(s.ldk, x.k + i * s.ldk, m.z);
    for (std::int64_t head = 0; head < s.group; ++head) {
      LoadFeatures(p.feature_map, task.in.q, i, head, s.K, s.ldk, m.q);
      LoadOutputGradient(p, task, i, head, s.ldk, s.ldv, m.q, m.z, x.o, m.dn);
      ReverseQuery<kGateValues>(s, i, m);
      StoreFeatures(p.feature_map, task.dq, task.in.q, i, head, s.K, s.ldk, m.raw, m.dq);
    }
  }
  ReverseFinalState<kGateValues>(s, task.length, m);
  if (task.dg_sum != nullptr) *task.dg_sum = 0.0;
  for (std::int64_t t = 0; t < task.length; ++t) {
    StoreToken(p, task, t, s.ldk, m.dk + t * s.ldk, m.dg + t * s.ldk, m.dv + t * s.ldv, m.dgv + t * s.ldv, m.raw);
  }
  StoreState(s, m.dh0, task.dh0, task.dz0);
}

void Backward(const Problem& p, const BackwardTask& task, const BackwardMemory& m) {
  if (p.gate == GateKind::key_value)
    RunBackward<true>(p, task, m);
  else
    RunBackward<false>(p, task, m);
}

}  // namespace flashgla::ops::gated_linear_attention::parallel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::gated_linear_attention::parallel {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

Support supports(const Problem& p, const Architecture&) {
  if (p.algorithm != Algorithm::automatic && p.algorithm != Algorithm::parallel) {
    return Support::no(std::string("is parallel, not ") + name_of(p.algorithm));
  }
  if (p.dtype == DType::f64) return Support::no("computes in f32");
  if (p.length > kLongest) return Support::no("is quadratic, and stops at " + std::to_string(kLongest) + " tokens");
  return Support::yes();
}

std::size_t states_bytes(const Problem&) { return 0; }

void forward(Context& context, const Problem& p, const Inputs& in, const Outputs& out) {
  const std::int64_t blocks = (p.length + kQueries - 1) / kQueries;
  Carver counter(nullptr);
  ForwardMemory(p, counter);
  const Workers workers(context, p.sequences * p.heads * blocks, counter.used());
  if (context.planning()) return;
  workers.run([&](std::int64_t item, std::byte* memory) {
    const std::int64_t head = item / blocks % p.heads;
    const std::int64_t n = item / blocks / p.heads;
    const std::int64_t begin = item % blocks * kQueries;
    const ForwardTask task(p, in, out, n, head);
    // A packed sequence is shorter than the whole; an empty one still has a final state.
    const std::int64_t last = std::max<std::int64_t>(task.length - 1, 0);
    if (begin > last) return;
    const std::int64_t end = std::min(begin + kQueries, task.length);
    Carver carver(memory);
    const ForwardMemory m(p, carver);
    HWY_DYNAMIC_DISPATCH(Forward)(p, task, begin, end, begin + kQueries > last, m);
  });
}

void backward(Context& context, const Problem& p, const Inputs& in, const Outputs& out, const OutputGradients& d_out,
              const InputGradients& d_in) {
  backward_by_heads<BackwardMemory>(context, p, p, in, out, d_out, d_in,
                                    [&](const BackwardTask& task, const BackwardMemory& m) {
                                      HWY_DYNAMIC_DISPATCH(Backward)(p, task, m);
                                    });
}

}  // namespace flashgla::ops::gated_linear_attention::parallel
#endif  // HWY_ONCE

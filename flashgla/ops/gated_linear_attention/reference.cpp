#include "flashgla/ops/gated_linear_attention/reference.h"

#include <algorithm>
#include <cmath>

#include "flashgla/ops/cpu/workers.h"
#include "flashgla/ops/gated_linear_attention/cpu/sequences.h"

namespace flashgla::ops::gated_linear_attention::reference {

namespace {

double feature(FeatureMap map, double x) {
  switch (map) {
    case FeatureMap::identity:
      return x;
    case FeatureMap::elu_plus_one:
      return x > 0.0 ? x + 1.0 : std::exp(x);
    case FeatureMap::relu:
      return x > 0.0 ? x : 0.0;
  }
  return x;
}

double feature_derivative(FeatureMap map, double x) {
  switch (map) {
    case FeatureMap::identity:
      return 1.0;
    case FeatureMap::elu_plus_one:
      return x > 0.0 ? 1.0 : std::exp(x);
    case FeatureMap::relu:
      return x > 0.0 ? 1.0 : 0.0;
  }
  return 1.0;
}

// A contiguous float64 stand-in for a tensor of any dtype and strides, with a row per token and head.
struct Rows {
  TensorView original;
  TensorView values;

  Rows(Context& context, const TensorView& view) : original(view) {
    if (view) values = context.scratch().tensor(view.shape, DType::f64, "float64 copies");
  }
  explicit operator bool() const { return static_cast<bool>(values); }
  void read() const {
    if (values) copy(original, values);
  }
  void write() const {
    if (values) copy(values, original);
  }
  double* row(std::int64_t batch, std::int64_t token, std::int64_t head) const {
    return values.as<double>() + batch * values.stride[0] + token * values.stride[1] + head * values.stride[2];
  }
  // For states [N,G,...].
  double* row(std::int64_t sequence, std::int64_t head) const {
    return values.as<double>() + sequence * values.stride[0] + head * values.stride[1];
  }
};

// The state of one sequence and key-value head: h [K,V], z [K].
struct State {
  double* h;
  double* z;

  static State take(Carver& carver, const Problem& p) {
    double* h = carver.take<double>(p.key_dim * p.value_dim);
    return {h, carver.take<double>(p.key_dim)};
  }
  void copy_from(const State& other, const Problem& p) const {
    std::copy_n(other.h, p.key_dim * p.value_dim, h);
    std::copy_n(other.z, p.key_dim, z);
  }
  // Zeros where the initial value is absent.
  void start(const Problem& p, const Rows& h0, const Rows& z0, std::int64_t n, std::int64_t head) const {
    if (h0)
      std::copy_n(h0.row(n, head), p.key_dim * p.value_dim, h);
    else
      std::fill_n(h, p.key_dim * p.value_dim, 0.0);
    if (z0)
      std::copy_n(z0.row(n, head), p.key_dim, z);
    else
      std::fill_n(z, p.key_dim, 0.0);
  }
};

// What the recurrence reads of a token: alpha [K], beta [V], phi(k) [K], v [V].
struct Token {
  double* alpha;
  double* beta;
  double* k;
  const double* v;
};

struct Operands {
  const Problem& p;
  Rows q, k, v, g, gv;

  Operands(Context& context, const Problem& problem, const Inputs& in)
      : p(problem), q(context, in.q), k(context, in.k), v(context, in.v), g(context, in.g), gv(context, in.gv) {}
  void read() const {
    for (const Rows* rows : {&q, &k, &v, &g, &gv}) rows->read();
  }

  Token take_token(Carver& carver) const {
    double* alpha = carver.take<double>(p.key_dim);
    double* beta = carver.take<double>(p.value_dim);
    return {alpha, beta, carver.take<double>(p.key_dim), nullptr};
  }

  // The log gate that x is, or is the logit of, and its derivative by x.
  double log_gate_of(double x) const {
    if (!p.has_logits()) return x;
    const double log_sigmoid = std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x)));
    return std::max(log_sigmoid / p.gate_logit_normalizer, p.gate_clamp_min);
  }
  double gate_slope(double x) const {
    if (!p.has_logits()) return 1.0;
    const double sigmoid = x > 0.0 ? std::exp(-x) / (1.0 + std::exp(-x)) : 1.0 / (1.0 + std::exp(x));  // of -x
    const double log_sigmoid = std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x)));
    return log_sigmoid / p.gate_logit_normalizer < p.gate_clamp_min ? 0.0 : sigmoid / p.gate_logit_normalizer;
  }
  double gate_over_keys(std::int64_t b, std::int64_t t, std::int64_t head, std::int64_t i) const {
    switch (p.gate) {
      case GateKind::none:
        return 0.0;
      case GateKind::constant:
        return g.values.as<double>()[head];
      case GateKind::scalar:
        return *g.row(b, t, head);
      case GateKind::key:
      case GateKind::key_value:
        return g.row(b, t, head)[i];
    }
    return 0.0;
  }

  void load(Token& token, std::int64_t b, std::int64_t t, std::int64_t head) const {
    for (std::int64_t i = 0; i < p.key_dim; ++i) {
      token.alpha[i] = g ? std::exp(log_gate_of(gate_over_keys(b, t, head, i))) : 1.0;
      token.k[i] = feature(p.feature_map, k.row(b, t, head)[i]);
    }
    for (std::int64_t j = 0; j < p.value_dim; ++j) {
      token.beta[j] = gv ? std::exp(log_gate_of(gv.row(b, t, head)[j])) : 1.0;
    }
    token.v = v.row(b, t, head);
  }

  // h = (alpha beta^T) * h + phi(k) v^T;  z = z + phi(k)
  void advance(const State& state, const Token& token) const {
    for (std::int64_t i = 0; i < p.key_dim; ++i) {
      double* h = state.h + i * p.value_dim;
      for (std::int64_t j = 0; j < p.value_dim; ++j) {
        h[j] = token.alpha[i] * token.beta[j] * h[j] + token.k[i] * token.v[j];
      }
      state.z[i] += token.k[i];
    }
  }

  // phi(q) . z + epsilon, or 1 / scale without normalize: what phi(q)^T h is divided by.
  double divisor(const State& state, const double* q_row) const {
    if (!p.normalize) return 1.0 / p.scale;
    double sum = kNormalizerEpsilon;
    for (std::int64_t i = 0; i < p.key_dim; ++i) sum += feature(p.feature_map, q_row[i]) * state.z[i];
    return sum;
  }

  // o = phi(q)^T h / divisor
  void read_out(const State& state, const double* q_row, double* o) const {
    std::fill_n(o, p.value_dim, 0.0);
    for (std::int64_t i = 0; i < p.key_dim; ++i) {
      const double q_i = feature(p.feature_map, q_row[i]);
      for (std::int64_t j = 0; j < p.value_dim; ++j) o[j] += q_i * state.h[i * p.value_dim + j];
    }
    const double inverse = 1.0 / divisor(state, q_row);
    for (std::int64_t j = 0; j < p.value_dim; ++j) o[j] *= inverse;
  }
};

std::size_t forward_workspace(const Operands& x) {
  Carver carver(nullptr);
  State::take(carver, x.p);
  x.take_token(carver);
  return carver.used();
}

// Backward keeps the states of one segment of the sequence and, from an earlier pass, the state at each segment's
// start.
std::int64_t segment_length(const Problem& p) {
  return static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(p.length))));
}

struct BackwardWorkspace {
  State current, gradient;
  State* starts;  // before each segment's first token
  State* states;  // of one segment: [0] before its first token, [i] after its i-th
  Token token;

  static std::size_t bytes(const Operands& x) {
    const std::int64_t states = 2 + 2 * (segment_length(x.p) + 1);
    Carver one(nullptr);
    State::take(one, x.p);
    Carver rest(nullptr);
    x.take_token(rest);
    rest.take<State>(segment_length(x.p) + 1);
    rest.take<State>(segment_length(x.p) + 1);
    return one.used() * static_cast<std::size_t>(states) + rest.used();
  }
  BackwardWorkspace(const Operands& x, std::byte* memory) {
    Carver carver(memory);
    const std::int64_t count = segment_length(x.p) + 1;
    current = State::take(carver, x.p);
    gradient = State::take(carver, x.p);
    starts = carver.take<State>(count);
    states = carver.take<State>(count);
    for (std::int64_t i = 0; i < count; ++i) starts[i] = State::take(carver, x.p);
    for (std::int64_t i = 0; i < count; ++i) states[i] = State::take(carver, x.p);
    token = x.take_token(carver);
  }
};

}  // namespace

Support supports(const Problem&, const Architecture&) { return Support::yes(); }
std::size_t states_bytes(const Problem&) { return 0; }

void forward(Context& context, const Problem& p, const Inputs& in, const Outputs& out) {
  const Operands x(context, p, in);
  const Rows h0(context, in.h0), z0(context, in.z0), o(context, out.o), ht(context, out.ht), zt(context, out.zt);
  const Workers workers(context, p.sequences * p.heads, forward_workspace(x));
  if (context.planning()) return;
  x.read();
  h0.read();
  z0.read();
  workers.run([&](std::int64_t item, std::byte* memory) {
    const std::int64_t n = item / p.heads;
    const std::int64_t head = item % p.heads;
    const Sequence sequence = sequence_of(p, in.cu_seqlens, n);
    Carver carver(memory);
    const State state = State::take(carver, p);
    Token token = x.take_token(carver);
    state.start(p, h0, z0, n, head);
    for (std::int64_t t = sequence.begin; t < sequence.end; ++t) {
      x.load(token, sequence.batch, t, head);
      x.advance(state, token);
      for (std::int64_t query = head * p.group(); query < (head + 1) * p.group(); ++query) {
        x.read_out(state, x.q.row(sequence.batch, t, query), o.row(sequence.batch, t, query));
      }
    }
    if (ht) std::copy_n(state.h, p.key_dim * p.value_dim, ht.row(n, head));
    if (zt) std::copy_n(state.z, p.key_dim, zt.row(n, head));
  });
  o.write();
  ht.write();
  zt.write();
}

// With n = phi(q)^T h and d the divisor, o = n / d, and w_t = alpha_t beta_t^T:
//     dn_t = do_t / d_t                              dd_t = -(do_t . o_t) / d_t (normalize only)
//     dh_t = w_{t+1} * dh_{t+1} + phi(q_t) dn_t^T    dz_t = dz_{t+1} + phi(q_t) dd_t    dh_{T+1} = d_ht
//     dphi(q_t) = h_t dn_t + z_t dd_t                dphi(k_t) = dh_t v_t + dz_t        dv_t = dh_t^T phi(k_t)
//     dg_t = sum over V of dh_t * w_t * h_{t-1}      dgv_t = sum over K of the same
//     dh0 = w_1 * dh_1                               dz0 = dz_1
void backward(Context& context, const Problem& p, const Inputs& in, const Outputs&, const OutputGradients& d_out,
              const InputGradients& d_in) {
  const std::int64_t K = p.key_dim;
  const std::int64_t V = p.value_dim;
  const Operands x(context, p, in);
  const Rows h0(context, in.h0), z0(context, in.z0);
  const Rows d_o(context, d_out.d_o), d_ht(context, d_out.d_ht), d_zt(context, d_out.d_zt);
  const Rows dq(context, d_in.dq), dk(context, d_in.dk), dv(context, d_in.dv), dg(context, d_in.dg),
      dgv(context, d_in.dgv), dh0(context, d_in.dh0), dz0(context, d_in.dz0);
  const bool constant = p.gate == GateKind::constant;
  // A constant gate's gradient sums over sequences: one term each, added in order at the end.
  const TensorView dg_terms = context.scratch().tensor(Shape({p.sequences, p.heads}), DType::f64, "float64 copies");
  const Workers workers(context, p.sequences * p.heads, BackwardWorkspace::bytes(x));
  if (context.planning()) return;
  x.read();
  for (const Rows* rows : {&h0, &z0, &d_o, &d_ht, &d_zt}) rows->read();

  workers.run([&](std::int64_t item, std::byte* memory) {
    const std::int64_t n = item / p.heads;
    const std::int64_t head = item % p.heads;
    const Sequence sequence = sequence_of(p, in.cu_seqlens, n);
    const std::int64_t b = sequence.batch;
    BackwardWorkspace work(x, memory);
    Token& token = work.token;
    const std::int64_t segment = segment_length(p);

    work.current.start(p, h0, z0, n, head);
    for (std::int64_t t = sequence.begin; t < sequence.end; ++t) {
      if ((t - sequence.begin) % segment == 0) work.starts[(t - sequence.begin) / segment].copy_from(work.current, p);
      x.load(token, b, t, head);
      x.advance(work.current, token);
    }

    const State& d = work.gradient;
    d.start(p, d_ht, d_zt, n, head);
    double constant_gradient = 0.0;
    for (std::int64_t s = (sequence.length() + segment - 1) / segment - 1; s >= 0; --s) {
      const std::int64_t begin = sequence.begin + s * segment;
      const std::int64_t end = std::min(begin + segment, sequence.end);
      work.states[0].copy_from(work.starts[s], p);
      for (std::int64_t t = begin; t < end; ++t) {
        work.states[t - begin + 1].copy_from(work.states[t - begin], p);
        x.load(token, b, t, head);
        x.advance(work.states[t - begin + 1], token);
      }
      for (std::int64_t t = end - 1; t >= begin; --t) {
        const State& before = work.states[t - begin];
        const State& after = work.states[t - begin + 1];
        x.load(token, b, t, head);

        for (std::int64_t query = head * p.group(); query < (head + 1) * p.group(); ++query) {
          const double* q_row = x.q.row(b, t, query);
          const double* do_row = d_o.row(b, t, query);
          const double divisor = x.divisor(after, q_row);
          double d_divisor = 0.0;
          if (p.normalize) {
            for (std::int64_t i = 0; i < K; ++i) {
              const double q_i = feature(p.feature_map, q_row[i]);
              for (std::int64_t j = 0; j < V; ++j) d_divisor -= do_row[j] * q_i * after.h[i * V + j];
            }
            d_divisor /= divisor * divisor;
          }
          for (std::int64_t i = 0; i < K; ++i) {
            const double q_i = feature(p.feature_map, q_row[i]);
            double sum = after.z[i] * d_divisor;
            d.z[i] += q_i * d_divisor;
            for (std::int64_t j = 0; j < V; ++j) {
              const double dn = do_row[j] / divisor;
              sum += after.h[i * V + j] * dn;
              d.h[i * V + j] += q_i * dn;
            }
            if (dq) dq.row(b, t, query)[i] = sum * feature_derivative(p.feature_map, q_row[i]);
          }
        }

        double* dv_row = dv ? dv.row(b, t, head) : nullptr;
        double* dgv_row = dgv ? dgv.row(b, t, head) : nullptr;
        if (dv_row != nullptr) std::fill_n(dv_row, V, 0.0);
        if (dgv_row != nullptr) std::fill_n(dgv_row, V, 0.0);
        double gate_gradient = 0.0;
        for (std::int64_t i = 0; i < K; ++i) {
          double dk_i = d.z[i];
          double dg_i = 0.0;
          for (std::int64_t j = 0; j < V; ++j) {
            double& dh = d.h[i * V + j];
            dk_i += dh * token.v[j];
            if (dv_row != nullptr) dv_row[j] += dh * token.k[i];
            dh *= token.alpha[i] * token.beta[j];
            const double through_gate = dh * before.h[i * V + j];
            dg_i += through_gate;
            if (dgv_row != nullptr) dgv_row[j] += through_gate;
          }
          if (dk) dk.row(b, t, head)[i] = dk_i * feature_derivative(p.feature_map, x.k.row(b, t, head)[i]);
          if (dg && (p.gate == GateKind::key || p.gate == GateKind::key_value)) {
            dg.row(b, t, head)[i] = dg_i * x.gate_slope(x.gate_over_keys(b, t, head, i));
          }
          gate_gradient += dg_i;
        }
        for (std::int64_t j = 0; dgv_row != nullptr && j < V; ++j) dgv_row[j] *= x.gate_slope(x.gv.row(b, t, head)[j]);
        if (dg && p.gate == GateKind::scalar) {
          *dg.row(b, t, head) = gate_gradient * x.gate_slope(*x.g.row(b, t, head));
        }
        constant_gradient += gate_gradient;
      }
    }
    if (dh0) std::copy_n(d.h, K * V, dh0.row(n, head));
    if (dz0) std::copy_n(d.z, K, dz0.row(n, head));
    dg_terms.as<double>()[item] = constant_gradient;
  });

  if (dg && constant) {
    for (std::int64_t head = 0; head < p.heads; ++head) {
      double sum = 0.0;
      for (std::int64_t n = 0; n < p.sequences; ++n) sum += dg_terms.as<double>()[n * p.heads + head];
      dg.values.as<double>()[head] = sum;
    }
  }
  for (const Rows* rows : {&dq, &dk, &dv, &dg, &dgv, &dh0, &dz0}) rows->write();
}

void step(Context& context, const Problem& p, const StepInputs& in, const TensorView& h, const TensorView& z,
          const TensorView& o) {
  // One token is a sequence of length 1: [B,...] read as [B,1,...].
  auto with_time = [](TensorView view) {
    if (!view || view.rank() == 1) return view;
    TensorView result = view;
    result.shape = view.rank() == 2 ? Shape({view.size(0), 1, view.size(1)})
                                    : Shape({view.size(0), 1, view.size(1), view.size(2)});
    result.stride = {view.stride[0], 0, view.stride[1], view.stride[2]};
    return result;
  };
  Inputs inputs{.q = with_time(in.q),
                .k = with_time(in.k),
                .v = with_time(in.v),
                .g = with_time(in.g),
                .gv = with_time(in.gv),
                .h0 = h,
                .z0 = z};
  forward(context, p, inputs, Outputs{.o = with_time(o), .ht = h, .zt = z});
}

namespace {

// One cell, [K,V]; the first `filled` rows of `inputs` are k, log gate and v of the tokens behind h.
template <class T>
void fold_cell(std::int64_t K, std::int64_t V, const T* inputs, std::int64_t filled, const T* h, T* to, double* keys) {
  const std::int64_t width = 2 * K + V;
  // Steps that always fold leave zeros.
  const bool neutral = std::all_of(inputs, inputs + filled * width, [](T x) { return x == T{0}; });
  if (neutral) {
    if (to != h) std::copy_n(h, K * V, to);
    return;
  }
  for (std::int64_t i = 0; i < K; ++i) {
    double product = 1.0;
    for (std::int64_t row = filled - 1; row >= 0; --row) {
      keys[row] = static_cast<double>(inputs[row * width + i]) * product;
      product *= std::exp(static_cast<double>(inputs[row * width + K + i]));
    }
    for (std::int64_t j = 0; j < V; ++j) {
      double sum = static_cast<double>(h[i * V + j]) * product;
      for (std::int64_t row = 0; row < filled; ++row) {
        sum += keys[row] * static_cast<double>(inputs[row * width + 2 * K + j]);
      }
      to[i * V + j] = static_cast<T>(sum);
    }
  }
}

}  // namespace

void fold(Context& context, const Ring& ring, const TensorView& h, const TensorView& to) {
  const std::int64_t heads = h.size(1), K = h.size(2), V = h.size(3);
  const Workers workers(context, h.size(0) * heads, kRing * sizeof(double));
  if (context.planning()) return;
  workers.run([&](std::int64_t cell, std::byte* memory) {
    const std::int64_t filled = ring.positions.as<std::int32_t>()[cell / heads] % kRing;
    const std::int64_t inputs = cell * kRing * (2 * K + V), state = cell * K * V;
    auto* keys = reinterpret_cast<double*>(memory);
    if (h.dtype == DType::f64) {
      fold_cell(K, V, ring.inputs.as<double>() + inputs, filled, h.as<double>() + state, to.as<double>() + state, keys);
    } else {
      fold_cell(K, V, ring.inputs.as<float>() + inputs, filled, h.as<float>() + state, to.as<float>() + state, keys);
    }
  });
}

}  // namespace flashgla::ops::gated_linear_attention::reference

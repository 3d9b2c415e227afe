// How large the terms of each result are: what a tolerance is relative to (cases.h).
#include <algorithm>
#include <cmath>
#include <utility>

#include "flashgla/ops/gated_linear_attention/tests/cases.h"

namespace flashgla::ops::gated_linear_attention {

namespace {
// phi or its derivative, squared, for every element.
void square(const TensorView& view, FeatureMap map, bool derivative) {
  double* x = view.as<double>();
  for (std::int64_t i = 0; view && i < view.numel(); ++i) {
    double y = derivative ? 1.0 : x[i];
    if (map == FeatureMap::elu_plus_one) y = x[i] <= 0.0 ? std::exp(x[i]) : derivative ? 1.0 : x[i] + 1.0;
    if (map == FeatureMap::relu) y = x[i] <= 0.0 ? 0.0 : derivative ? 1.0 : x[i];
    x[i] = y * y;
  }
}

// The sum over later tokens of x a + y b at each token, and of h c at the sequence's end over what is not a channel of
// the gate's; all squares. Contiguous: gate, y, b [B,T,G,channels] (a scalar gate without), x, a the same of more
// heads.
void add_closed_form(const CaseData& data, const TensorView& gate, const TensorView& x, const TensorView& a,
                     const TensorView& y, const TensorView& b, const TensorView& h, const TensorView& c,
                     bool over_keys) {
  const std::int64_t G = y.size(2), channels = y.size(3), group = x.size(2) / G, T = y.size(1),
                     N = data.in.cu_seqlens ? data.in.cu_seqlens.size(0) - 1 : y.size(0);
  const bool scalar = gate.rank() == 3;
  for (std::int64_t n = 0; n < N; ++n) {
    const TokenRange tokens = tokens_of(data, n);
    for (std::int64_t head = 0; head < G; ++head) {
      double of_head = 0.0;
      for (std::int64_t i = 0; i < channels; ++i) {
        double sum = 0.0;
        if (h && c) {
          const std::int64_t K = h.size(2), V = h.size(3), from = (n * G + head) * K * V;
          for (std::int64_t j = 0; j < (over_keys ? V : K); ++j) {
            const std::int64_t at = from + (over_keys ? i * V + j : j * V + i);
            sum += h.as<double>()[at] * c.as<double>()[at];
          }
        }
        of_head += sum;
        for (std::int64_t t = tokens.end - 1; t >= tokens.begin; --t) {
          const std::int64_t token = tokens.batch * T + t, at = (token * G + head) * channels + i;
          double more = y.as<double>()[at] * b.as<double>()[at];
          for (std::int64_t q = 0; q < group; ++q) {
            const std::int64_t query = ((token * G + head) * group + q) * channels + i;
            more += x.as<double>()[query] * a.as<double>()[query];
          }
          sum += more;
          if (scalar) {
            gate.as<double>()[token * G + head] += more;
          } else {
            gate.as<double>()[at] = sum;
          }
        }
      }
      for (std::int64_t t = tokens.end - 1; scalar && t >= tokens.begin; --t) {
        of_head += std::exchange(gate.as<double>()[(tokens.batch * T + t) * G + head], 0.0);
        gate.as<double>()[(tokens.batch * T + t) * G + head] = of_head;
      }
    }
  }
}
}  // namespace

TermSizes term_sizes(const CaseData& data, bool final_state) {
  // The operator is linear in each of its inputs but the gates, of which a term has the power of a sum: its terms'
  // squares are those of the squared inputs and twice the gates.
  const Problem p = describe(data.in, data.options);
  CaseData squared = as_float64(data);
  const CaseData exact = as_float64(data);
  squared.options.scale = p.scale * p.scale;
  squared.options.feature_map = FeatureMap::identity;
  squared.options.gate_logit_normalizer = 0.0;
  squared.options.gate_clamp_min = kNoClamp;
  for (TensorView* view : views_of(squared)) {
    if (!*view || view->dtype != DType::f64) continue;
    if (view == &squared.in.g || view == &squared.in.gv) {
      for (std::int64_t i = 0; i < view->numel(); ++i) {
        double& x = view->as<double>()[i];
        if (p.has_logits()) x = std::max(-std::log1p(std::exp(-x)) / p.gate_logit_normalizer, p.gate_clamp_min);
        x *= 2.0;
      }
    } else {
      const bool mapped = view == &squared.in.q || view == &squared.in.k;
      square(*view, mapped ? p.feature_map : FeatureMap::identity, false);
    }
  }
  TermSizes sizes{reference_results(squared, final_state, true), make_results(squared, false, 0)};
  Results &terms = sizes.terms, &closed = sizes.closed_form;
  for (const TensorView* view : {&closed.d_in.dg, &closed.d_in.dgv}) {
    for (std::int64_t i = 0; *view && i < view->numel(); ++i) view->as<double>()[i] = 0.0;
  }
  if (closed.d_in.dg && p.gate != GateKind::constant) {
    add_closed_form(data, closed.d_in.dg, squared.in.q, terms.d_in.dq, squared.in.k, terms.d_in.dk, terms.out.ht,
                    squared.d_out.d_ht, true);
  }
  if (closed.d_in.dgv) {
    add_closed_form(data, closed.d_in.dgv, squared.d_out.d_o, terms.out.o, squared.in.v, terms.d_in.dv, terms.out.ht,
                    squared.d_out.d_ht, false);
  }
  if (p.gate == GateKind::constant) {
    // A term T with n gates adds n T to dg: the sum of (n T)^2 is the second derivative of the sum of T^2.
    constexpr double step = 1e-6;
    const auto dg_after = [&](double by) {
      for (std::int64_t i = 0; i < p.heads; ++i) squared.in.g.as<double>()[i] += by;
      return reference_results(squared, false, true);
    };
    const Results above = dg_after(step), below = dg_after(-2.0 * step);
    for (std::int64_t i = 0; i < p.heads; ++i) {
      const double slope = above.d_in.dg.as<double>()[i] - below.d_in.dg.as<double>()[i];
      terms.d_in.dg.as<double>()[i] = std::max(0.0, slope / (2.0 * step));
    }
  }
  const std::pair<const TensorView*, const TensorView*> mapped[] = {{&terms.d_in.dq, &exact.in.q},
                                                                    {&terms.d_in.dk, &exact.in.k}};
  for (const auto& [gradient, input] : mapped) {
    square(*input, p.feature_map, true);
    for (std::int64_t i = 0; p.feature_map != FeatureMap::identity && i < input->numel(); ++i) {
      gradient->as<double>()[i] *= input->as<double>()[i];
    }
  }
  // By a logit at most 1 / normalizer of that by its gate.
  for (const TensorView* view : {&terms.d_in.dg, &terms.d_in.dgv, &closed.d_in.dg, &closed.d_in.dgv}) {
    for (std::int64_t i = 0; p.has_logits() && *view && i < view->numel(); ++i) {
      view->as<double>()[i] /= p.gate_logit_normalizer * p.gate_logit_normalizer;
    }
  }
  for (Results* results : {&terms, &closed}) {
    for (TensorView* view : views_of(*results)) {
      for (std::int64_t i = 0; *view && i < view->numel(); ++i) {
        view->as<double>()[i] = std::sqrt(view->as<double>()[i]);
      }
    }
  }
  return sizes;
}

}  // namespace flashgla::ops::gated_linear_attention

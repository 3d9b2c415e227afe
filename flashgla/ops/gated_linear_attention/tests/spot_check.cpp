#include "flashgla/ops/gated_linear_attention/tests/spot_check.h"

#include <algorithm>
#include <utility>

#include "testing/compare.h"

namespace flashgla::ops::gated_linear_attention {

namespace {

constexpr std::int64_t kFewestTokens = 300;

// By how much the gates have forgotten what lies `tokens` back: -log of the weakest channel of a part.
double forgotten(const CaseData& part, std::int64_t tokens) {
  if (!part.in.g || part.in.g.rank() < 3) return 0.0;
  const Tensor g = testing::converted(part.in.g.slice(1, 0, tokens), DType::f64);
  const std::int64_t channels = g->numel() / tokens;
  std::vector<double> sums(static_cast<std::size_t>(channels), 0.0);
  for (std::int64_t i = 0; i < g->numel(); ++i) sums[static_cast<std::size_t>(i % channels)] -= g.as<double>()[i];
  return *std::min_element(sums.begin(), sums.end());
}

}  // namespace

SpotCheck::SpotCheck(const CaseData& host, bool gradients, std::int64_t part_elements)
    : problem_(describe(host.in, host.options)) {
  const Problem& p = problem_;
  const std::int64_t most = std::max(part_elements / (p.key_dim * p.value_dim), kFewestTokens);
  const auto length_of = [&](std::int64_t n) {
    const TokenRange tokens = tokens_of(host, n);
    return tokens.end - tokens.begin;
  };
  std::vector<std::pair<std::int64_t, std::int64_t>> heads = {{0, 0}};
  if (p.sequences * p.heads > 1) heads.emplace_back(p.sequences - 1, p.heads - 1);
  if (p.packed) {
    std::int64_t longest = 0;
    for (std::int64_t n = 1; n < p.sequences; ++n) longest = length_of(n) > length_of(longest) ? n : longest;
    heads.emplace_back(longest, 0);
  }
  for (const auto& [n, head] : heads) {
    const std::int64_t T = length_of(n);
    const TokenRange tokens = tokens_of(host, n);
    if (T == 0) continue;
    if (T <= most) {
      parts_.push_back({n, head, tokens, 0, T, true, true, 0, {}});
    } else {
      parts_.push_back({n, head, tokens, 0, most, true, false, most, {}});
      if (gradients) parts_.push_back({n, head, tokens, T - most, T, false, true, most, {}});
    }
  }
  parallel_for(Context(), static_cast<std::int64_t>(parts_.size()), [&](std::int64_t i) {
    constexpr double kForgotten = 16.0;  // e^-16 is far below every tolerance
    Part& part = parts_[static_cast<std::size_t>(i)];
    const CaseData whole = one_head(host, part.n, part.head);
    CaseData data = slice_tokens(whole, part.begin, part.end);
    Results before;
    if (!part.past) {
      // With a normaliser all of the past is in every quotient; else only in what is not compared.
      if (p.normalize) before = reference_results(slice_tokens(whole, 0, part.begin), true, false);
      data.in.h0 = before.out.ht;
      data.in.z0 = before.out.zt;
    }
    if (!part.future) data.d_out.d_ht = data.d_out.d_zt = {};
    const std::int64_t half = (part.end - part.begin) / 2;
    if (!part.past && forgotten(data, half) > kForgotten) part.dg_begin = half;
    part.expected = reference_results(data, part.past && part.future, gradients);
  });
}

std::string SpotCheck::compare(const Results& results, bool gradients, double* error) const {
  *error = 0.0;
  std::string wrong;
  for (const Part& part : parts_) {
    const Results actual =
        on_cpu(slice_tokens(one_head(results, part.tokens, part.n, part.head, problem_.group()), part.begin, part.end));
    auto compare_one = [&](const char* name, bool gradient, const TensorView& x, const TensorView& reference) {
      if (!x || !reference || x.numel() == 0) return;
      *error = std::max(*error, testing::difference(x, reference).relative);
      const std::string text = testing::check_close(name, x, reference, tolerance(problem_.dtype, gradient));
      if (!text.empty()) wrong = text;
    };
    const Results& expected = part.expected;
    if (part.past) compare_one("o", false, actual.out.o, expected.out.o);
    if (part.past && part.future) compare_one("ht", false, actual.out.ht, expected.out.ht);
    if (!gradients) continue;
    const InputGradients &x = actual.d_in, &y = expected.d_in;
    if (part.past) compare_one("dq", true, x.dq, y.dq);
    if (part.future) {
      compare_one("dk", true, x.dk, y.dk);
      compare_one("dv", true, x.dv, y.dv);
      const std::int64_t tokens = part.end - part.begin;
      if (x.dg && x.dg.rank() >= 3 && part.dg_begin < tokens)
        compare_one("dg", true, x.dg.slice(1, part.dg_begin, tokens), y.dg.slice(1, part.dg_begin, tokens));
      if (part.past) {
        compare_one("dgv", true, x.dgv, y.dgv);
        compare_one("dh0", true, x.dh0, y.dh0);
      }
    }
  }
  return wrong;
}

}  // namespace flashgla::ops::gated_linear_attention

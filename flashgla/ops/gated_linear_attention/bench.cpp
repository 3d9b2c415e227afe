#include "flashgla/ops/gated_linear_attention/bench.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "flashgla/ops/gated_linear_attention/cases.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"
#include "testing/compare.h"

namespace flashgla::ops::gated_linear_attention {

namespace {

using testing::BenchOptions;
using testing::BenchRow;

// Chunk of the formulas, whatever an implementation uses, so that figures compare.
constexpr double kFormulaChunk = 64.0;

double tokens_and_heads(const Problem& p) { return static_cast<double>(p.batch * p.length * p.query_heads); }

double forward_flops(const Problem& p) {
  const auto K = static_cast<double>(p.key_dim);
  const auto V = static_cast<double>(p.value_dim);
  return tokens_and_heads(p) * (4.0 * K * V + 2.0 * kFormulaChunk * (K + V));
}

double training_flops(const Problem& p) {
  const auto K = static_cast<double>(p.key_dim);
  const auto V = static_cast<double>(p.value_dim);
  return tokens_and_heads(p) * (12.0 * K * V + 2.0 * kFormulaChunk * (4.0 * K + 3.0 * V));
}

double step_flops(const Problem& p) {
  return tokens_and_heads(p) * 4.0 * static_cast<double>(p.key_dim) * static_cast<double>(p.value_dim);
}

double input_bytes(const Inputs& in) {
  return static_cast<double>(in.q.bytes() + in.k.bytes() + in.v.bytes() +
                             in.g.numel() * (in.g ? size_of(in.g.dtype) : 0) + (in.gv ? in.gv.bytes() : 0));
}

// The largest relative error over the results of the first and the last sequence and head; what exceeds its tolerance
// is described in `wrong`.
double check(const CaseData& data, const Results& results, bool gradients, std::string& wrong) {
  const Problem p = describe(data.in, data.options);
  const Results host = on_cpu(results);
  double largest = 0.0;
  for (const auto& [batch, head] : {std::pair<std::int64_t, std::int64_t>{0, 0}, {p.batch - 1, p.heads - 1}}) {
    const CaseData part = one_head(data, batch, head);
    const Results actual = one_head(host, batch, head, p.group());
    const Results expected = reference_results(part, static_cast<bool>(results.out.ht), gradients);
    auto compare = [&](const std::vector<NamedView>& views, const std::vector<NamedView>& references) {
      for (const NamedView& view : views) {
        for (const NamedView& reference : references) {
          if (std::strcmp(view.name, reference.name) != 0) continue;
          largest = std::max(largest, testing::difference(view.view, reference.view).relative);
          const std::string text =
              testing::check_close(view.name, view.view, reference.view, tolerance(p.dtype, view.gradient));
          if (!text.empty()) wrong = text;
        }
      }
    };
    compare(outputs_of(actual), outputs_of(expected));
    if (gradients) compare(gradients_of(actual), gradients_of(expected));
  }
  return largest;
}

struct Bench {
  const BenchOptions& options;
  std::vector<BenchRow> rows;

  bool wanted(const Implementation& row, const Problem& p, const Architecture& architecture) const {
    if (row.device != options.device.kind) return false;
    // The reference defines, and is not meant to be fast: only when asked for by name.
    const bool named =
        options.implementation.empty() ? std::strcmp(row.name, "reference") != 0 : options.implementation == row.name;
    return named && row.supports(p, architecture);
  }

  void add(BenchRow row, Context& context, const std::string& wrong, const std::function<void()>& run) {
    row.refused = wrong;
    if (wrong.empty()) row.milliseconds = testing::median_milliseconds(context, run, options.seconds);
    rows.push_back(std::move(row));
  }

  void time_case(const Case& c) {
    const CaseData host = make_data(c);
    const CaseData data = on_device(host, options.device);
    const Problem p = describe(data.in, data.options);
    for (const Implementation& implementation : implementations()) {
      Context context(options.device, options.threads);
      if (!wanted(implementation, p, context.architecture())) continue;
      context.force_implementation(implementation.name);
      const Results results = make_results(data, c.states, states_bytes(context, p));
      Outputs inference = results.out;
      inference.states = {};
      auto run_forward = [&] { forward(context, data.in, inference, data.options); };
      auto run_both = [&] {
        forward(context, data.in, results.out, data.options);
        backward(context, data.in, results.out, data.d_out, results.d_in, data.options);
      };
      BenchRow row{.implementation = implementation.name, .problem = describe_case(c)};
      const double in = input_bytes(data.in);
      const auto o = static_cast<double>(results.out.o.bytes());
      std::string wrong;

      run_forward();
      row.operation = "gated_linear_attention forward";
      row.flops = forward_flops(p);
      row.bytes = in + o;
      row.error = check(host, results, false, wrong);
      add(row, context, wrong, run_forward);

      wrong.clear();
      run_both();
      row.operation = "gated_linear_attention fwd+bwd";
      row.flops = training_flops(p);
      row.bytes = 3.0 * in + 2.0 * o;
      row.error = check(host, results, true, wrong);
      add(row, context, wrong, run_both);
    }
  }

  void time_step(Case c) {
    c.states = true;
    const CaseData host = make_data(c);
    const CaseData data = on_device(host, options.device);
    const Problem p = describe(data.in, data.options);
    for (const Implementation& implementation : implementations()) {
      Context context(options.device, options.threads);
      if (implementation.step == nullptr || !wanted(implementation, p, context.architecture())) continue;
      context.force_implementation(implementation.name);
      const Results results = make_results(data, true, 0);
      std::vector<Tensor> storage;
      // The state is updated in place: a copy of h0 that becomes ht.
      Results stepped;
      stepped.out = results.out;
      stepped.out.ht = mirrored(data.in.h0, options.device, storage);
      const StepInputs token{.q = data.in.q.select(1, 0),
                             .k = data.in.k.select(1, 0),
                             .v = data.in.v.select(1, 0),
                             .g = data.in.g.rank() == 1 || !data.in.g ? data.in.g : data.in.g.select(1, 0),
                             .gv = data.in.gv ? data.in.gv.select(1, 0) : TensorView()};
      const TensorView o = stepped.out.o.select(1, 0);
      auto run = [&] { step(context, token, stepped.out.ht, {}, o, data.options); };
      run();
      std::string wrong;
      BenchRow row{.operation = "gated_linear_attention step",
                   .implementation = implementation.name,
                   .problem = describe_case(c)};
      row.flops = step_flops(p);
      row.bytes = input_bytes(data.in) + static_cast<double>(o.bytes() + 2 * stepped.out.ht.bytes());
      row.error = check(host, stepped, false, wrong);
      add(row, context, wrong, run);
    }
  }
};

}  // namespace

std::vector<BenchRow> bench(const BenchOptions& options) {
  Bench bench{options, {}};
  for (const Case& c : bench_cases(options.device, options.sweep)) bench.time_case(c);
  for (const Case& c : step_cases(options.device, options.sweep)) bench.time_step(c);
  return std::move(bench.rows);
}

}  // namespace flashgla::ops::gated_linear_attention

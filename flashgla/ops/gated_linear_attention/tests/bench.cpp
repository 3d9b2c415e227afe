#include "testing/bench.h"

#include <future>
#include <memory>

#include "flashgla/base/memory.h"
#include "flashgla/ops/gated_linear_attention/flops.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"
#include "flashgla/ops/gated_linear_attention/tests/spot_check.h"
#include "testing/compare.h"

namespace flashgla::ops::gated_linear_attention {

namespace {

using testing::BenchOptions;
using testing::BenchRow;

double tokens_and_heads(const Problem& p) { return static_cast<double>(p.batch * p.length * p.query_heads); }

// Of the whole problem: flops(K, V) for each token and head (flops.h).
double flops_of(const Problem& p, double (*flops)(double, double)) {
  return tokens_and_heads(p) * flops(static_cast<double>(p.key_dim), static_cast<double>(p.value_dim));
}

double input_bytes(const Inputs& in) {
  return static_cast<double>(in.q.bytes() + in.k.bytes() + in.v.bytes() +
                             in.g.numel() * (in.g ? size_of(in.g.dtype) : 0) + (in.gv ? in.gv.bytes() : 0));
}

// Bytes that a call holds beyond its inputs: what it writes and the most workspace it took.
double held_bytes(const Results& results, const Outputs& out, bool gradients, Context& context) {
  std::size_t bytes = out.o.bytes() + context.scratch().peak();
  for (const TensorView& view : {out.ht, out.zt, out.states}) bytes += view ? view.bytes() : 0;
  if (gradients) {
    for (const NamedView& gradient : gradients_of(results)) bytes += gradient.view.bytes();
  }
  return static_cast<double>(bytes);
}

// A case's inputs, and what the reference makes of parts of them: seconds of the processor's time where it is large.
struct Prepared {
  static constexpr std::int64_t kPartElements = std::int64_t{1} << 27;
  const Case& c;
  CaseData host;
  SpotCheck check;
  Prepared(const Case& of, bool sweep)
      : c(of), host(make_data(of)), check(host, true, kPartElements / (sweep ? 8 : 1)) {}
};

struct Bench {
  const BenchOptions& options;

  bool wanted(const Implementation& row, const Problem& p, const Architecture& architecture) const {
    return row.device == options.device.kind && options.wants_implementation(row.name) && row.supports(p, architecture);
  }

  // Runs once, checks, and times what is right.
  void add(const char* operation, BenchRow row, const CaseData& data, const SpotCheck& check, const Results& results,
           const Outputs& out, bool gradients) {
    Context context(options.device, options.threads);
    context.force_implementation(row.implementation);
    auto run = [&] {
      forward(context, data.in, out, data.options);
      if (gradients) backward(context, data.in, out, data.d_out, results.d_in, data.options);
    };
    run();
    row.operation = operation;
    row.refused = check.compare(results, gradients, &row.error);
    row.memory = held_bytes(results, out, gradients, context);
    if (row.refused.empty()) row.milliseconds = testing::median_milliseconds(context, run, options.seconds);
    options.report(row);
  }

  void time_case(const Prepared& prepared) {
    const Case& c = prepared.c;
    const SpotCheck& check = prepared.check;
    const CaseData data = on_device(prepared.host, options.device);
    const Problem p = describe(data.in, data.options);
    for (const Implementation& implementation : implementations()) {
      const Context context(options.device, options.threads);
      if (!wanted(implementation, p, context.architecture())) continue;
      const std::size_t kept = implementation.states_bytes(p);
      const Results results = make_results(data, c.states, kept);
      Outputs without_states = results.out;
      without_states.states = {};
      BenchRow row{.implementation = implementation.name, .problem = describe_case(c)};
      const auto plan = [&](const Outputs& out) {
        return implementation.plan ? implementation.plan(p, data.in, out, context.architecture()) : std::string();
      };
      const double in = input_bytes(data.in);
      const auto o = static_cast<double>(results.out.o.bytes());
      row.flops = flops_of(p, forward_flops);
      row.bytes = in + o;
      row.plan = plan(without_states);
      row.plan = row.plan.substr(0, row.plan.find(';'));
      add("gated_linear_attention forward", row, data, check, results, without_states, false);
      row.flops = flops_of(p, training_flops);
      row.bytes = 3.0 * in + 2.0 * o;
      row.plan = plan(results.out);
      add("gated_linear_attention fwd+bwd", row, data, check, results, results.out, true);
      if (kept > 0 && !options.sweep) {
        row.plan = plan(without_states);
        add("gated_linear_attention fwd+bwd, states recomputed", row, data, check, results, without_states, true);
      }
    }
  }

  // Beside a ring: a token's mean of kRing, of which the last writes the state.
  void time_ring(const Implementation& implementation, const Case& c, const CaseData& host, const CaseData& data,
                 const StepInputs& token, const SpotCheck& check) {
    Context context(options.device, options.threads);
    context.force_implementation(implementation.name);
    const Results results = make_results(data, true, 0);
    const TensorView& h = results.out.ht;
    const TensorView o = results.out.o.select(1, 0);
    copy_memory(h.data, options.device, data.in.h0.data, options.device, h.bytes());
    const Tensor inputs =
        Tensor::zeros(Shape({c.batch, c.heads, kRing, 2 * c.key_dim + c.value_dim}), DType::f32, options.device);
    std::vector<Tensor> positions;
    for (std::int32_t at = 0; at < kRing; ++at) {
      const Tensor same = Tensor::empty(Shape({c.batch}), DType::i32);
      std::fill_n(same.as<std::int32_t>(), c.batch, at);
      positions.push_back(testing::copied_to(same, options.device));
    }
    step(context, token, {inputs, positions[0]}, h, o, data.options);
    fold(context, {inputs, positions[1]}, h, h);
    BenchRow row{.operation = "gated_linear_attention step, ring",
                 .implementation = implementation.name,
                 .problem = describe_case(c)};
    row.flops = flops_of(describe(data.in, data.options), step_flops);
    constexpr double kTokens = kRing;
    const double ring = static_cast<double>(inputs->bytes()) / kTokens;  // of a token
    row.bytes = input_bytes(host.in) + static_cast<double>(o.bytes()) +
                static_cast<double>(h.bytes()) * (1.0 + 1.0 / kTokens) + ring * (kTokens - 1.0) * (0.5 + 1.0 / kTokens);
    row.refused = check.compare(results, false, &row.error);
    const auto run = [&] {
      for (const Tensor& at : positions) step(context, token, {inputs, at}, h, o, data.options);
    };
    if (row.refused.empty()) row.milliseconds = testing::median_milliseconds(context, run, options.seconds) / kTokens;
    options.report(row);
  }

  // States in f32, and where inputs are bf16 also states in bf16.
  void time_step(Case c) {
    c.states = true;
    const CaseData host = make_data(c);
    const SpotCheck check(host, false);
    const CaseData data = on_device(host, options.device);
    const Problem p = describe(data.in, data.options);
    const StepInputs token{.q = data.in.q.select(1, 0),
                           .k = data.in.k.select(1, 0),
                           .v = data.in.v.select(1, 0),
                           .g = data.in.g.rank() == 1 || !data.in.g ? data.in.g : data.in.g.select(1, 0),
                           .gv = data.in.gv ? data.in.gv.select(1, 0) : TensorView()};
    for (const Implementation& implementation : implementations()) {
      Context context(options.device, options.threads);
      if (implementation.step == nullptr || !wanted(implementation, p, context.architecture())) continue;
      context.force_implementation(implementation.name);
      for (const DType dtype : {DType::f32, DType::bf16}) {
        if (dtype == DType::bf16 && p.dtype != DType::bf16) continue;
        const Results results = make_results(data, true, 0);
        std::vector<Tensor> storage;
        // The state is updated in place: a copy of h0 that becomes ht.
        Results stepped;
        stepped.out = results.out;
        const Tensor start = testing::converted(host.in.h0, dtype);
        stepped.out.ht = mirrored(start, options.device, storage);
        const TensorView o = stepped.out.o.select(1, 0);
        auto run = [&] { step(context, token, stepped.out.ht, {}, o, data.options); };
        run();
        BenchRow row{.operation = "gated_linear_attention step",
                     .implementation = implementation.name,
                     .problem = describe_case(c) + (dtype == DType::bf16 ? ", bf16 states" : "")};
        row.flops = flops_of(p, step_flops);
        row.bytes = input_bytes(data.in) + static_cast<double>(o.bytes() + 2 * stepped.out.ht.bytes());
        row.refused = check.compare(stepped, false, &row.error);
        if (row.refused.empty()) row.milliseconds = testing::median_milliseconds(context, run, options.seconds);
        options.report(row);
      }
      if (implementation.step_with_ring != nullptr) time_ring(implementation, c, host, data, token, check);
    }
  }
};

}  // namespace

void bench(const BenchOptions& options) {
  Bench bench{options};
  const auto wanted = [&](const Case& c) { return options.wants(describe_case(c)); };
  std::vector<Case> cases;
  for (const Case& c : bench_cases(options.device, options.sweep)) {
    if (wanted(c)) cases.push_back(c);
  }
  // While a GPU is timed the processor may prepare the next case.
  const auto policy = options.device.kind == Device::Kind::cpu ? std::launch::deferred : std::launch::async;
  std::future<std::unique_ptr<Prepared>> next;
  const auto prepare = [&](std::size_t i) {
    if (i < cases.size())
      next = std::async(policy, [&c = cases[i], &options] { return std::make_unique<Prepared>(c, options.sweep); });
  };
  prepare(0);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::unique_ptr<Prepared> prepared = next.get();
    prepare(i + 1);
    bench.time_case(*prepared);
  }
  for (const Case& c : step_cases(options.device, options.sweep)) {
    if (wanted(c)) bench.time_step(c);
  }
}

}  // namespace flashgla::ops::gated_linear_attention

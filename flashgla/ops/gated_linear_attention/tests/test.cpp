// Conformance: every implementation of the table, on every device there is,
// against the float64 reference over the shared cases; and the laws that hold
// between calls. A new row of the table is tested here without being named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/ops/gated_linear_attention/tests/test_support.h"
#include "testing/compare.h"
#include "testing/instruction_sets.h"
#include "testing/random.h"

namespace flashgla::ops::gated_linear_attention {
namespace {

using testing::check_close;
using testing::check_gradient;
using testing::converted;
using testing::same_bits;

class Conformance : public ::testing::TestWithParam<Case> {};

TEST_P(Conformance, ForwardAndBackward) { expect_reference_results(make_data(GetParam()), GetParam().states); }

INSTANTIATE_TEST_SUITE_P(Cases, Conformance, ::testing::ValuesIn(conformance_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

double dot(const TensorView& a, const TensorView& b) {
  const Tensor x = converted(a, DType::f64);
  const Tensor y = converted(b, DType::f64);
  double sum = 0.0;
  for (std::int64_t i = 0; i < x->numel(); ++i) sum += x.as<double>()[i] * y.as<double>()[i];
  return sum;
}

TEST(Reference, GradientsAgreeWithFiniteDifferences) {
  for (Case c : law_cases(DType::f64)) {
    // The loss is smooth in a gate only where moving it by the step keeps it in
    // the domain: trained gates.
    if (c.gate_values == GateValues::extreme) continue;
    c.length = 7;
    c.key_dim = 5;
    c.value_dim = 6;
    SCOPED_TRACE(c.name);
    const CaseData data = make_data(c);
    Results results = make_results(data, true, 0);
    Context context(Device::cpu(), 1);  // thousands of tiny calls
    context.force_implementation("reference");
    auto loss = [&] {
      forward(context, data.in, results.out, data.options);
      double sum = dot(results.out.o, data.d_out.d_o) + dot(results.out.ht, data.d_out.d_ht);
      if (results.out.zt) sum += dot(results.out.zt, data.d_out.d_zt);
      return sum;
    };
    loss();
    backward(context, data.in, results.out, data.d_out, results.d_in, data.options);
    const std::pair<const TensorView*, const TensorView*> pairs[] = {
        {&data.in.q, &results.d_in.dq},  {&data.in.k, &results.d_in.dk},   {&data.in.v, &results.d_in.dv},
        {&data.in.g, &results.d_in.dg},  {&data.in.gv, &results.d_in.dgv}, {&data.in.h0, &results.d_in.dh0},
        {&data.in.z0, &results.d_in.dz0}};
    const char* names[] = {"dq", "dk", "dv", "dg", "dgv", "dh0", "dz0"};
    for (std::size_t i = 0; i < std::size(pairs); ++i) {
      if (!*pairs[i].first) continue;
      EXPECT_EQ(check_gradient(names[i], *pairs[i].first, *pairs[i].second, loss, 24, 1e-5, 1e-7), "");
    }
  }
}

// Inputs of tokens [begin, end) of every sequence of the batch.
Inputs slice_time(const Inputs& in, std::int64_t begin, std::int64_t end) {
  Inputs part = in;
  for (TensorView* view : {&part.q, &part.k, &part.v, &part.g, &part.gv}) {
    if (*view && view->rank() >= 3) *view = view->slice(1, begin, end);
  }
  return part;
}

TEST(Laws, SplitEqualsWhole) {
  for (const Case& c : law_cases(DType::f32)) {
    SCOPED_TRACE(c.name);
    const CaseData host = make_data(c);
    for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
      const CaseData data = on_device(host, device);
      const Results whole = on_cpu([&] {
        Results r = make_results(data, true, 0);
        run_planned(device, row.name, [&](Context& x) { forward(x, data.in, r.out, data.options); });
        return r;
      }());
      for (const std::int64_t s : {1, 16, 31, 64, 69}) {
        SCOPED_TRACE(s);
        Results parts = make_results(data, true, 0);
        Results middle = make_results(data, true, 0);
        Inputs first = slice_time(data.in, 0, s);
        Inputs second = slice_time(data.in, s, c.length);
        second.h0 = middle.out.ht;
        second.z0 = middle.out.zt;
        const Outputs first_out{.o = parts.out.o.slice(1, 0, s), .ht = middle.out.ht, .zt = middle.out.zt};
        const Outputs second_out{.o = parts.out.o.slice(1, s, c.length), .ht = parts.out.ht, .zt = parts.out.zt};
        run_planned(device, row.name, [&](Context& x) { forward(x, first, first_out, data.options); });
        run_planned(device, row.name, [&](Context& x) { forward(x, second, second_out, data.options); });
        expect_all_close(outputs_of(on_cpu(parts)), outputs_of(whole), c.dtype);
      }
    });
  }
}

TEST(Laws, PackedEqualsApart) {
  for (Case c : law_cases(DType::f32)) {
    SCOPED_TRACE(c.name);
    c.lengths = {3, 0, 40, 1, 65};
    const CaseData host = make_data(c);
    for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
      const Results packed = run(device, row.name, host, true, false, true);
      std::int64_t begin = 0;
      for (std::size_t n = 0; n < c.lengths.size(); ++n) {
        const auto sequence = static_cast<std::int64_t>(n);
        const std::int64_t end = begin + c.lengths[n];
        auto state = [&](const TensorView& view) { return view ? view.slice(0, sequence, sequence + 1) : view; };
        if (begin == end) {
          EXPECT_TRUE(same_bits(state(packed.out.ht), state(host.in.h0)));
          EXPECT_TRUE(same_bits(state(packed.d_in.dh0), state(host.d_out.d_ht)));
          continue;
        }
        CaseData alone;
        alone.in = slice_time(host.in, begin, end);
        alone.in.cu_seqlens = {};
        alone.in.h0 = state(host.in.h0);
        alone.in.z0 = state(host.in.z0);
        alone.d_out = {
            .d_o = host.d_out.d_o.slice(1, begin, end), .d_ht = state(host.d_out.d_ht), .d_zt = state(host.d_out.d_zt)};
        alone.options = host.options;
        const Results apart = run(device, row.name, alone, true, false, true);
        const std::vector<NamedView> views = outputs_of(apart);
        for (const NamedView& view : views) {
          const TensorView part = std::strcmp(view.name, "o") == 0    ? packed.out.o.slice(1, begin, end)
                                  : std::strcmp(view.name, "ht") == 0 ? state(packed.out.ht)
                                                                      : state(packed.out.zt);
          EXPECT_EQ(check_close(view.name, part, view.view, tolerance(c.dtype, false)), "");
        }
        auto gradient = [&](const char* name, const TensorView& part, const TensorView& expected) {
          EXPECT_EQ(check_close(name, part, expected, tolerance(c.dtype, true)), "");
        };
        gradient("dq", packed.d_in.dq.slice(1, begin, end), apart.d_in.dq);
        gradient("dk", packed.d_in.dk.slice(1, begin, end), apart.d_in.dk);
        gradient("dv", packed.d_in.dv.slice(1, begin, end), apart.d_in.dv);
        gradient("dh0", state(packed.d_in.dh0), apart.d_in.dh0);
        begin = end;
      }
    });
  }
}

TEST(Laws, StepsEqualForward) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (Case c : law_cases(dtype)) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + c.name);
      c.length = 20;
      const CaseData host = make_data(c);
      const Results expected = reference_results(host, true, false);
      for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
        if (row.step == nullptr) return;
        const CaseData data = on_device(host, device);
        Results actual = make_results(data, true, 0);
        copy_memory(actual.out.ht.data, device, data.in.h0.data, device, data.in.h0.bytes());
        if (data.in.z0) copy_memory(actual.out.zt.data, device, data.in.z0.data, device, data.in.z0.bytes());
        for (std::int64_t t = 0; t < c.length; ++t) {
          const StepData token = slice_token(data.in, actual.out.o, t);
          run_planned(device, row.name, [&](Context& x) {
            // The dry run must leave the state alone; it does, as it
            // touches no memory.
            step(x, token.in, actual.out.ht, actual.out.zt, token.o, data.options);
          });
        }
        expect_all_close(outputs_of(on_cpu(actual)), outputs_of(expected), dtype);
      });
    }
  }
}

// A bf16 state rounds once a token: 20 tokens of a decaying state stay within a
// few units.
TEST(Laws, StepWithABf16State) {
  for (Case c : law_cases(DType::f32)) {
    SCOPED_TRACE(c.name);
    c.length = 1;
    const CaseData host = make_data(c);
    const Tensor h0 = converted(host.in.h0, DType::bf16);
    const Tensor z0 = host.in.z0 ? converted(host.in.z0, DType::bf16) : Tensor();
    CaseData rounded = host;
    const Tensor h0_rounded = converted(h0, DType::f32);
    const Tensor z0_rounded = z0 ? converted(z0, DType::f32) : Tensor();
    rounded.in.h0 = h0_rounded;
    rounded.in.z0 = z0_rounded;
    const Results expected = reference_results(rounded, true, false);
    for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
      if (row.step == nullptr) return;
      const CaseData data = on_device(host, device);
      std::vector<Tensor> storage;
      const TensorView h = mirrored(h0, device, storage);
      const TensorView z = mirrored(z0, device, storage);
      Results actual = make_results(data, true, 0);
      const StepData token = slice_token(data.in, actual.out.o, 0);
      run_planned(device, row.name, [&](Context& x) { step(x, token.in, h, z, token.o, data.options); });
      const TensorView h_host = mirrored(h, Device::cpu(), storage);
      EXPECT_EQ(check_close("h", h_host, expected.out.ht, tolerance(DType::bf16, false)), "");
      // o comes from the state before it is rounded.
      EXPECT_EQ(check_close("o", on_cpu(actual).out.o, expected.out.o, tolerance(DType::f32, false)), "");
    });
  }
}

// A key gate that the step computes from a projection's input is the one whose log gates are given: of rows that
// kernels take as vectors and of others, with few slices of channels and with many.
TEST(Laws, StepWithAProjectedGate) {
  constexpr double kNormalizer = 16.0, kClamp = -0.3;
  int computed = 0;
  for (const auto& dtypes : {std::pair{DType::f64, DType::f64},
                             {DType::f32, DType::f32},
                             {DType::f32, DType::bf16},
                             {DType::bf16, DType::bf16}}) {
    const DType dtype = dtypes.first, weight_dtype = dtypes.second;
    for (const std::int64_t rank : {16, 32, 5, 40}) {
      for (const std::int64_t batch : {3, 70}) {
        Case c = law_cases(dtype)[6];
        c.name = "projected";
        c.batch = batch;
        c.length = 1;
        c.value_dim = 136;
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + name_of(weight_dtype) + " rank " + std::to_string(rank) +
                     " batch " + std::to_string(batch));
        CaseData host = make_data(c);
        const std::int64_t channels = c.heads * c.key_dim;
        const Tensor x = testing::random_normal({batch, rank + 8}, dtype, 11);
        const TensorView input = x.view().slice(1, 8, 8 + rank);
        const Tensor weight = testing::random_normal({channels, rank}, weight_dtype, 12);
        const Tensor bias = testing::random_normal({channels}, weight_dtype, 13);
        Tensor gates = Tensor::empty({batch, 1, c.heads, c.key_dim}, dtype == DType::f64 ? DType::f64 : DType::f32);
        for (std::int64_t b = 0; b < batch; ++b) {
          for (std::int64_t k = 0; k < channels; ++k) {
            double logit = load_element(bias, std::array{k});
            for (std::int64_t r = 0; r < rank; ++r) {
              logit += load_element(input, std::array{b, r}) * load_element(weight, std::array{k, r});
            }
            const double gate = -std::log1p(std::exp(-logit)) / kNormalizer;
            store_element(gates, std::array{b, std::int64_t{0}, k / c.key_dim, k % c.key_dim}, std::max(gate, kClamp));
          }
        }
        host.in.g = gates;
        const Results expected = reference_results(host, true, false);
        for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
          if (row.step == nullptr) return;
          SCOPED_TRACE(row.name);
          const CaseData data = on_device(host, device);
          std::vector<Tensor> storage;
          Results actual = make_results(data, true, 0);
          copy_memory(actual.out.ht.data, device, data.in.h0.data, device, data.in.h0.bytes());
          StepData token = slice_token(data.in, actual.out.o, 0);
          token.in.g = {};
          token.in.projection = {mirrored(input, device, storage), mirrored(weight, device, storage),
                                 mirrored(bias, device, storage)};
          Options options = data.options;
          options.gate_logit_normalizer = kNormalizer;
          options.gate_clamp_min = kClamp;
          Context asked(device);
          asked.force_implementation(row.name);
          if (!step_projects(asked, token.in, actual.out.ht, options)) {
            EXPECT_THAT([&] { step(asked, token.in, actual.out.ht, {}, token.o, options); },
                        ::testing::ThrowsMessage<Error>(::testing::HasSubstr("projection is one that")));
            return;
          }
          ++computed;
          run_planned(device, row.name,
                      [&](Context& context) { step(context, token.in, actual.out.ht, {}, token.o, options); });
          expect_all_close(outputs_of(on_cpu(actual)), outputs_of(expected), dtype);
        });
      }
    }
  }
  EXPECT_GT(computed, 0);
}

TEST(Laws, SameBitsForAnyNumberOfThreadsAndEveryRun) {
  for (Case c : law_cases(DType::f32)) {
    SCOPED_TRACE(c.name);
    c.length = 130;
    c.value_dim = 70;
    // One sequence with one head, and packed sequences with one head: fewer
    // than threads, so shared out over time.
    Case few = c;
    few.batch = few.heads = 1;
    few.query_heads = 2;
    few.length = 300;
    Case few_packed = few;
    few_packed.lengths = {0, 270, 30, 0};
    for (const Case& shape : {c, few, few_packed}) {
      SCOPED_TRACE(describe_case(shape));
      const CaseData host = make_data(shape);
      for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
        const Results one = run(device, row.name, host, true, true, true, 1);
        const bool reference = std::string(row.name) == "reference";  // slow, and it never keeps states
        for (const int threads : reference ? std::vector<int>{9} : std::vector<int>{2, 2, 3, 9}) {
          for (const bool keep_states : reference ? std::vector<bool>{true} : std::vector<bool>{true, false}) {
            const Results other = run(device, row.name, host, true, keep_states, true, threads);
            expect_same_bits(outputs_of(other), outputs_of(one));
            expect_same_bits(gradients_of(other), gradients_of(one));
          }
        }
      });
    }
  }
}

// SIMD sources are compiled several times; each of those that this machine runs
// is right.
TEST(Laws, EveryInstructionSet) {
  std::vector<Case> cases = law_cases(DType::f32);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (Case c : law_cases(dtype)) {
      c.gate_dtype = dtype;
      cases.push_back(c);
    }
  }
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name + " " + name_of(c.dtype));
    const CaseData data = make_data(c);
    const Results expected = reference_results(data, true, true);
    for_each_implementation(describe(data.in, data.options), [&](Device device, const Implementation& row) {
      if (device.kind != Device::Kind::cpu || std::string(row.name) == "reference") return;
      for (const testing::InstructionSet& set : testing::instruction_sets()) {
        SCOPED_TRACE(set.name);
        const testing::UseInstructionSet use(set);
        const Results actual = run(device, row.name, data, true, true, true);
        expect_all_close(outputs_of(actual), outputs_of(expected), c.dtype);
        expect_all_close(gradients_of(actual), gradients_of(expected), c.dtype);
      }
    });
  }
}

// Each algorithm by name gives what the reference gives, through whatever row
// serves it on the CPU.
TEST(Laws, EveryAlgorithmEqualsEveryOther) {
  for (const Algorithm algorithm : {Algorithm::automatic, Algorithm::recurrent, Algorithm::parallel,
                                    Algorithm::chunk_materialized, Algorithm::chunk_recomputed}) {
    SCOPED_TRACE(name_of(algorithm));
    for (const Case& c : law_cases(DType::f32)) {
      SCOPED_TRACE(c.name);
      CaseData data = make_data(c);
      const Results expected = reference_results(data, true, true);
      data.options.algorithm = algorithm;
      Context context;
      Results actual = make_results(data, true, states_bytes(context, describe(data.in, data.options)));
      forward(context, data.in, actual.out, data.options);
      backward(context, data.in, actual.out, data.d_out, actual.d_in, data.options);
      expect_all_close(outputs_of(actual), outputs_of(expected), c.dtype);
      expect_all_close(gradients_of(actual), gradients_of(expected), c.dtype);
    }
  }
}

// Gates given as logits are the gates they stand for, in gradients too.
CaseData with_logits(Case c, double normalizer, double clamp_min) {
  CaseData data = make_data(c);
  for (const auto& [gate, seed] : {std::pair(data.in.g, 700), {data.in.gv, 701}}) {
    if (!gate) continue;
    // Between resets and hardly any decay: logits as they come, strong ones and
    // infinities.
    testing::fill_by_index(gate, [&, seed = seed](std::uint64_t i) {
      const double x = testing::normal(seed, i), u = testing::uniform(seed + 10, i);
      return c.gate_values == GateValues::trained ? x
             : u < 0.1                            ? 40.0 * x
             : u < 0.12                           ? std::copysign(std::numeric_limits<double>::infinity(), x)
                                                  : 3.0 * x;
    });
  }
  data.options.gate_logit_normalizer = normalizer;
  data.options.gate_clamp_min = clamp_min;
  return data;
}

// Those that are short keep no states: whatever else is in the batch, and packed as apart.
TEST(Laws, SequencesAreShortByTheirOwnLength) {
  const Context context(Device::cpu());
  for (const std::int64_t sequences : {1, 40, 1000}) {
    for (const std::int64_t length : {8, 9, 300}) {
      Problem apart;
      apart.batch = apart.sequences = sequences;
      apart.length = length;
      EXPECT_EQ(states_bytes(context, apart) > 0, length > 8) << sequences << " sequences of " << length;
      Problem packed = apart;
      packed.packed = true;
      packed.batch = 1;
      packed.length = sequences * length;
      EXPECT_EQ(states_bytes(context, packed) > 0, length > 8) << sequences << " packed sequences of " << length;
    }
  }
}

TEST(Laws, LogitsAreTheirGates) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (Case c : law_cases(dtype)) {
      if (c.gate == GateKind::none || c.gate == GateKind::constant) continue;
      c.gate_dtype = dtype;
      for (const auto& [normalizer, clamp_min] : {std::pair(16.0, kNoClamp), {1.0, kNoClamp}, {2.0, -0.3}}) {
        // Strong gates over values lose dgv's digits in 16 bits (README.md, "Gates of other strengths").
        if (normalizer < 16.0 && size_of(dtype) == 2 && c.gate == GateKind::key_value) continue;
        SCOPED_TRACE(c.name + " " + name_of(dtype) + " normalizer " + std::to_string(normalizer));
        expect_reference_results(with_logits(c, normalizer, clamp_min), true);
      }
    }
  }
}

TEST(Reference, LogitsAreTheirGates) {
  for (Case c : law_cases(DType::f64)) {
    if (c.gate == GateKind::none || c.gate == GateKind::constant || c.gate_values == GateValues::extreme) continue;
    SCOPED_TRACE(c.name);
    c.length = 7;
    c.key_dim = 5;
    c.value_dim = 6;
    const CaseData logits = with_logits(c, 3.0, -0.4);
    CaseData gates = as_float64(logits);
    gates.options.gate_logit_normalizer = 0.0;
    gates.options.gate_clamp_min = kNoClamp;
    for (const TensorView& gate : {gates.in.g, gates.in.gv}) {
      for (std::int64_t i = 0; gate && i < gate.numel(); ++i) {
        double& x = gate.as<double>()[i];
        x = std::max(-std::log1p(std::exp(-x)) / 3.0, -0.4);
      }
    }
    const Results expected = reference_results(gates, true, true);
    const Results actual = reference_results(logits, true, true);
    expect_all_close(outputs_of(actual), outputs_of(expected), DType::f64);
    Context context(Device::cpu(), 1);
    context.force_implementation("reference");
    Results results = make_results(logits, true, 0);
    const auto loss = [&] {
      forward(context, logits.in, results.out, logits.options);
      return dot(results.out.o, logits.d_out.d_o) + dot(results.out.ht, logits.d_out.d_ht);
    };
    EXPECT_EQ(check_gradient("dg", logits.in.g, actual.d_in.dg, loss, 24, 1e-5, 1e-7), "");
    if (logits.in.gv) {
      EXPECT_EQ(check_gradient("dgv", logits.in.gv, actual.d_in.dgv, loss, 24, 1e-5, 1e-7), "");
    }
  }
}

TEST(Laws, GradientsNotAskedForAreNotNeeded) {
  for (const Case& c : law_cases(DType::f32)) {
    SCOPED_TRACE(c.name);
    const CaseData host = make_data(c);
    for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
      const Results all = run(device, row.name, host, true, false, true);
      const CaseData data = on_device(host, device);
      const Results forward_only = make_results(data, true, 0);
      run_planned(device, row.name, [&](Context& x) { forward(x, data.in, forward_only.out, data.options); });
      for (std::size_t wanted = 0; wanted < gradients_of(all).size(); ++wanted) {
        Results one = make_results(data, false, 0);
        InputGradients only;
        TensorView* to[] = {&only.dq, &only.dk, &only.dv, &only.dg, &only.dgv, &only.dh0, &only.dz0};
        const TensorView from[] = {one.d_in.dq,  one.d_in.dk,  one.d_in.dv, one.d_in.dg,
                                   one.d_in.dgv, one.d_in.dh0, one.d_in.dz0};
        std::size_t present = 0;
        for (std::size_t i = 0; i < std::size(to); ++i) {
          if (from[i] && present++ == wanted) *to[i] = from[i];
        }
        one.d_in = only;
        // Neither is the final state.
        const Outputs out{.o = forward_only.out.o};
        run_planned(device, row.name,
                    [&](Context& x) { backward(x, data.in, out, data.d_out, one.d_in, data.options); });
        const Results host_one = on_cpu(one);
        const std::vector<NamedView> actual = gradients_of(host_one);
        ASSERT_EQ(actual.size(), 1u);
        EXPECT_EQ(check_close(actual[0].name, actual[0].view, gradients_of(all)[wanted].view, tolerance(c.dtype, true)),
                  "");
      }
    });
  }
}

// What no gate has let through is in no dg, however much larger than the rest it is: the last tokens' keys with a large
// gradient of the final state, the first ones' queries with a large initial state. A last chunk of a few tokens;
// sequences and heads enough for a block each.
TEST(Laws, LargeStatesLeaveGateGradientsExact) {
  const std::pair<GateKind, GateValues> kinds[] = {{GateKind::constant, GateValues::trained},
                                                   {GateKind::scalar, GateValues::times_1},
                                                   {GateKind::scalar, GateValues::times_4},
                                                   {GateKind::key, GateValues::times_1}};
  for (const auto& [gate, values] : kinds) {
    for (const bool at_end : {true, false}) {
      const Case c{.name = name_of(gate),
                   .batch = 34,
                   .length = 75,
                   .query_heads = 4,
                   .heads = 4,
                   .key_dim = 32,
                   .value_dim = 32,
                   .gate = gate,
                   .gate_values = values,
                   .dtype = DType::bf16,
                   .gate_dtype = DType::bf16};
      SCOPED_TRACE(describe_case(c) + (at_end ? ", dht large" : ", h0 large"));
      CaseData data = make_data(c);
      data.options.scale = at_end ? 0.01 : 1.0;
      const TensorView& large = at_end ? data.d_out.d_ht : data.in.h0;
      for (std::int64_t i = 0; i < large.numel(); ++i) large.as<float>()[i] *= 20.0f;
      expect_reference_results(data, true);
    }
  }
}

// Absent h0, d_ht and a g left out beside gv mean zeros.
TEST(Laws, AbsentMeansZero) {
  for (const Case& c : law_cases(DType::f32)) {
    SCOPED_TRACE(c.name);
    CaseData zeros = make_data(c);
    CaseData absent = zeros;
    fill(zeros.in.h0, 0.0);
    fill(zeros.d_out.d_ht, 0.0);
    absent.in.h0 = {};
    absent.d_out.d_ht = {};
    if (zeros.in.z0) {
      fill(zeros.in.z0, 0.0);
      fill(zeros.d_out.d_zt, 0.0);
      absent.in.z0 = {};
      absent.d_out.d_zt = {};
    }
    if (c.gate == GateKind::key_value) {
      fill(zeros.in.g, 0.0);
      absent.in.g = {};
    }
    for_each_implementation(describe(zeros.in, zeros.options), [&](Device device, const Implementation& row) {
      const Results a = run(device, row.name, zeros, true, false, true);
      const Results b = run(device, row.name, absent, true, false, true);
      expect_all_close(outputs_of(b), outputs_of(a), c.dtype);
      for (const auto& [x, y] : {std::pair{b.d_in.dq, a.d_in.dq}, {b.d_in.dk, a.d_in.dk}, {b.d_in.dv, a.d_in.dv}}) {
        EXPECT_EQ(check_close("gradient", x, y, tolerance(c.dtype, true)), "");
      }
    });
  }
}

// A gate that is not a number is not taken for a reset: all outputs from its
// token on are NaN, in its head alone.
TEST(Laws, NanGatesGiveNan) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const GateKind gate : {GateKind::constant, GateKind::scalar, GateKind::key, GateKind::key_value}) {
      const Case c{.name = name_of(gate), .length = 90, .gate = gate, .dtype = dtype, .gate_dtype = dtype};
      SCOPED_TRACE(describe_case(c));
      constexpr std::int64_t kToken = 37;
      const CaseData clean = make_data(c);
      CaseData data = make_data(c);
      const TensorView at = gate == GateKind::constant ? data.in.g.slice(0, 1, 2)
                            : gate == GateKind::scalar
                                ? data.in.g.slice(0, 0, 1).slice(1, kToken, kToken + 1).slice(2, 1, 2)
                                : data.in.g.slice(0, 0, 1).slice(1, kToken, kToken + 1).slice(2, 1, 2).slice(3, 5, 6);
      testing::poison(at);
      for_each_implementation(describe(data.in, data.options), [&](Device device, const Implementation& row) {
        const Results good = run(device, row.name, clean, true, false, false);
        const Results bad = run(device, row.name, data, true, false, false);
        const std::int64_t first = gate == GateKind::constant ? 0 : kToken;
        const Tensor o = converted(bad.out.o.slice(0, 0, 1).slice(1, first, c.length).slice(2, 1, 2), DType::f64);
        std::int64_t numbers = 0;
        for (std::int64_t i = 0; i < o->numel(); ++i) numbers += !std::isnan(o.as<double>()[i]);
        EXPECT_EQ(numbers, 0) << "of " << o->numel() << " outputs from the token on are numbers";
        EXPECT_TRUE(same_bits(bad.out.o.slice(2, 0, 1), good.out.o.slice(2, 0, 1))) << "another head changed";
        EXPECT_TRUE(same_bits(bad.out.ht.slice(1, 0, 1), good.out.ht.slice(1, 0, 1))) << "another head's state changed";
      });
    }
  }
}

// Three tokens, 2^31 elements between the first and the last: offsets do not
// fit 32 bits. The memory is only reserved.
TEST(Laws, OffsetsBeyond32Bits) {
  const Case c{.name = "far apart",
               .batch = 1,
               .length = 3,
               .query_heads = 1,
               .heads = 1,
               .key_dim = 16,
               .value_dim = 16,
               .dtype = DType::bf16,
               .gate_dtype = DType::bf16};
  const CaseData near = make_data(c);
  const Results expected = reference_results(near, true, true);
  constexpr std::int64_t kApart = (std::int64_t{1} << 30) + 64;
  const std::size_t bytes = static_cast<std::size_t>(2 * kApart + 1024) * size_of(c.dtype);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "cannot reserve " << bytes << " bytes of address space";
  std::int64_t used = 0;
  auto far = [&](const TensorView& view) {
    TensorView result = view;
    result.data = static_cast<BFloat16*>(memory) + used;
    result.stride[1] = kApart;
    used += view.size(3);
    return result;
  };
  CaseData data = near;
  for (TensorView* view : {&data.in.q, &data.in.k, &data.in.v, &data.in.g, &data.d_out.d_o}) {
    const TensorView original = *view;
    *view = far(original);
    copy(original, *view);
  }
  const Results results = make_results(near, true, 0);
  Results spread = results;
  for (TensorView* view : {&spread.out.o, &spread.d_in.dq, &spread.d_in.dk, &spread.d_in.dv, &spread.d_in.dg})
    *view = far(*view);
  const Context context(Device::cpu());
  for (const Implementation& row : implementations()) {
    if (row.device != Device::Kind::cpu || !row.supports(describe(data.in, data.options), context.architecture()))
      continue;
    SCOPED_TRACE(row.name);
    for (const NamedView& view : outputs_of(spread)) testing::poison(view.view);
    for (const NamedView& view : gradients_of(spread)) testing::poison(view.view);
    run_planned(Device::cpu(), row.name, [&](Context& x) { forward(x, data.in, spread.out, data.options); });
    run_planned(Device::cpu(), row.name,
                [&](Context& x) { backward(x, data.in, spread.out, data.d_out, spread.d_in, data.options); });
    expect_all_close(outputs_of(spread), outputs_of(expected), c.dtype);
    expect_all_close(gradients_of(spread), gradients_of(expected), c.dtype);
  }
  munmap(memory, bytes);
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention

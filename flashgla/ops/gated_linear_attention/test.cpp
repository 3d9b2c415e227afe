// Conformance: every implementation of the table, on every device there is, against the float64 reference over the
// shared cases; and the laws that hold between calls. A new row of the table is tested here without being named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/ops/gated_linear_attention/cases.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"
#include "testing/compare.h"
#include "testing/instruction_sets.h"
#include "testing/random.h"

namespace flashgla::ops::gated_linear_attention {
namespace {

using testing::check_close;
using testing::check_gradient;
using testing::converted;
using testing::random_normal;
using testing::same_bits;

std::vector<Device> devices() {
  std::vector<Device> list = {Device::cpu()};
  if (cuda_device_count() > 0) list.push_back(Device::cuda(0));
  return list;
}

// Runs the call with the implementation of that name in exactly the workspace that a dry run planned, filled with NaN.
void run_planned(Device device, const char* implementation, const std::function<void(Context&)>& call,
                 int threads = 2) {
  Context context(device, threads);
  context.force_implementation(implementation);
  Arena& scratch = context.scratch();
  scratch.begin_planning();
  call(context);
  const std::size_t bytes = scratch.peak();
  scratch.commit_plan();
  if (bytes > 0) {
    ArenaScope scope(scratch);
    const std::vector<unsigned char> nan(bytes, 0xff);
    copy_memory(scratch.allocate(bytes), device, nan.data(), Device::cpu(), bytes);
  }
  call(context);
}

std::size_t states_bytes_of(Device device, const char* implementation, const Problem& problem) {
  Context context(device);
  context.force_implementation(implementation);
  return states_bytes(context, problem);
}

void expect_all_close(const std::vector<NamedView>& actual, const std::vector<NamedView>& expected, DType dtype,
                      double slack = 1.0) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_STREQ(actual[i].name, expected[i].name);
    EXPECT_EQ(
        check_close(actual[i].name, actual[i].view, expected[i].view, slack * tolerance(dtype, actual[i].gradient)),
        "");
  }
}

void expect_same_bits(const std::vector<NamedView>& actual, const std::vector<NamedView>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i].view, expected[i].view)) << actual[i].name;
  }
}

// Calls visit(device, implementation) for the rows that support the problem.
template <class Visit>
void for_each_implementation(const Problem& problem, Visit&& visit) {
  for (const Device device : devices()) {
    const Context context(device);
    for (const Implementation& row : implementations()) {
      if (row.device != device.kind || !row.supports(problem, context.architecture())) continue;
      SCOPED_TRACE(std::string(row.name) + " on " + name_of(device));
      visit(device, row);
    }
  }
}

Results run(Device device, const char* implementation, const CaseData& host, bool final_state, bool keep_states,
            bool gradients, int threads = 2) {
  const CaseData data = device.kind == Device::Kind::cpu ? host : on_device(host, device);
  const Problem problem = describe(data.in, data.options);
  Results results = make_results(data, final_state, keep_states ? states_bytes_of(device, implementation, problem) : 0);
  run_planned(
      device, implementation, [&](Context& c) { forward(c, data.in, results.out, data.options); }, threads);
  if (gradients) {
    run_planned(
        device, implementation,
        [&](Context& c) { backward(c, data.in, results.out, data.d_out, results.d_in, data.options); }, threads);
  }
  return on_cpu(results);
}

}  // namespace

// Failing cases are named by their problem.
void PrintTo(const Case& c, std::ostream* out) { *out << describe_case(c); }

namespace {

class Conformance : public ::testing::TestWithParam<Case> {};

TEST_P(Conformance, ForwardAndBackward) {
  const Case& c = GetParam();
  const CaseData data = make_data(c);
  const Problem problem = describe(data.in, data.options);
  const Results expected = reference_results(data, c.states, true);
  for_each_implementation(problem, [&](Device device, const Implementation& row) {
    const bool keeps_states = row.states_bytes(problem) > 0;
    for (const bool keep : {false, true}) {
      if (keep && !keeps_states) continue;
      SCOPED_TRACE(keep ? "states kept" : "no states");
      const Results actual = run(device, row.name, data, c.states, keep, true);
      expect_all_close(outputs_of(actual), outputs_of(expected), c.dtype);
      expect_all_close(gradients_of(actual), gradients_of(expected), c.dtype);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, Conformance, ::testing::ValuesIn(conformance_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

// Laws run over one case per gate kind; f64 where only the definition is asked.
std::vector<Case> law_cases(DType dtype) {
  std::vector<Case> cases;
  for (const GateKind gate :
       {GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key, GateKind::key_value}) {
    for (const GateValues values : {GateValues::trained, GateValues::extreme}) {
      cases.push_back({.name = std::string(name_of(gate)) + (values == GateValues::trained ? " trained" : " extreme"),
                       .batch = 2,
                       .length = 70,
                       .query_heads = 4,
                       .heads = 2,
                       .key_dim = 20,
                       .value_dim = 24,
                       .gate = gate,
                       .gate_values = values,
                       .dtype = dtype});
    }
  }
  cases.push_back({.name = "normalized",
                   .batch = 2,
                   .length = 70,
                   .query_heads = 4,
                   .heads = 2,
                   .key_dim = 20,
                   .value_dim = 24,
                   .gate = GateKind::none,
                   .dtype = dtype,
                   .feature_map = FeatureMap::elu_plus_one,
                   .normalize = true});
  return cases;
}

double dot(const TensorView& a, const TensorView& b) {
  const Tensor x = converted(a, DType::f64);
  const Tensor y = converted(b, DType::f64);
  double sum = 0.0;
  for (std::int64_t i = 0; i < x->numel(); ++i) sum += x.as<double>()[i] * y.as<double>()[i];
  return sum;
}

TEST(Reference, GradientsAgreeWithFiniteDifferences) {
  for (Case c : law_cases(DType::f64)) {
    // The loss is smooth in a gate only where moving it by the step keeps it in the domain: trained gates.
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

struct StepData {
  StepInputs in;
  TensorView o;
};

// Token t of every sequence.
StepData slice_token(const Inputs& in, const TensorView& o, std::int64_t t) {
  StepData step;
  step.in = {.q = in.q.select(1, t), .k = in.k.select(1, t), .v = in.v.select(1, t)};
  if (in.g) step.in.g = in.g.rank() == 1 ? in.g : in.g.select(1, t);
  if (in.gv) step.in.gv = in.gv.select(1, t);
  step.o = o.select(1, t);
  return step;
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
            // The dry run must leave the state alone; it does, as it touches no memory.
            step(x, token.in, actual.out.ht, actual.out.zt, token.o, data.options);
          });
        }
        expect_all_close(outputs_of(on_cpu(actual)), outputs_of(expected), dtype);
      });
    }
  }
}

// A bf16 state rounds once a token: 20 tokens of a decaying state stay within a few units.
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

TEST(Laws, SameBitsForAnyNumberOfThreadsAndEveryRun) {
  for (Case c : law_cases(DType::f32)) {
    SCOPED_TRACE(c.name);
    c.length = 130;
    c.value_dim = 70;
    // One sequence with one head, and packed sequences with one head: fewer than threads, so shared out over time.
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
        for (const int threads : {2, 2, 3, 9}) {
          for (const bool keep_states : {true, false}) {
            const Results other = run(device, row.name, host, true, keep_states, true, threads);
            expect_same_bits(outputs_of(other), outputs_of(one));
            expect_same_bits(gradients_of(other), gradients_of(one));
          }
        }
      });
    }
  }
}

// SIMD sources are compiled several times; each of those that this machine runs is right.
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

// Each algorithm by name gives what the reference gives, through whatever row serves it on the CPU.
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
        // Neither is the final state: what backward needs of it, it recomputes.
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

// Three tokens, 2^31 elements between the first and the last: offsets do not fit 32 bits. The memory is only reserved.
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

TEST(Cuda, DevicePresent) {
  if (cuda_device_count() == 0)
    GTEST_SKIP() << "no CUDA device (or a build without CUDA): the CUDA rows are not tested here";
}

// Bad input: each is refused with the argument's name.
struct Bad {
  const char* argument;
  std::function<void(CaseData&, Results&)> spoil;
};

class Refusals : public ::testing::Test {
 protected:
  // Spoils one argument of a good call, and expects forward or backward to name it.
  void expect_refused(const Case& c, const Bad& bad) {
    SCOPED_TRACE(bad.argument);
    CaseData data = make_data(c);
    Results results = make_results(data, true, 0);
    Context context;
    context.force_implementation("reference");
    forward(context, data.in, results.out, data.options);
    bad.spoil(data, results);
    try {
      forward(context, data.in, results.out, data.options);
      backward(context, data.in, results.out, data.d_out, results.d_in, data.options);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), bad.argument) << error.what();
      EXPECT_THAT(error.what(), ::testing::StartsWith("gated_linear_attention: " + std::string(bad.argument) + " "));
    }
  }
  TensorView other(const Shape& shape, DType dtype = DType::f32) {
    storage_.push_back(Tensor::zeros(shape, dtype));
    return storage_.back();
  }
  TensorView offsets(std::vector<std::int32_t> values) {
    storage_.push_back(Tensor::empty(Shape({static_cast<std::int64_t>(values.size())}), DType::i32));
    std::memcpy(storage_.back()->data, values.data(), values.size() * sizeof(std::int32_t));
    return storage_.back();
  }
  std::vector<Tensor> storage_;
};

TEST_F(Refusals, NameTheArgument) {
  const Case key{.name = "key", .batch = 2, .length = 9, .query_heads = 4, .heads = 2, .key_dim = 3, .value_dim = 5};
  const Bad bads[] = {
      {"q", [&](CaseData& d, Results&) { d.in.q = {}; }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q = other(Shape({2, 9, 4}));
       }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q = other(Shape({2, 0, 4, 3}));
       }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q = other(Shape({2, 9, 4, 3}), DType::i32);
       }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q.device = Device::cuda(0);
         d.in.k.device = d.in.v.device = d.in.g.device = d.in.h0.device = Device::cuda(0);
       }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q = other(Shape({2, 9, 3, 4})).transpose(2, 3);
       }},
      {"k", [&](CaseData& d, Results&) { d.in.k = {}; }},
      {"k",
       [&](CaseData& d, Results&) {
         d.in.k = other(Shape({2, 9, 3, 3}));
       }},
      {"k",
       [&](CaseData& d, Results&) {
         d.in.k = other(Shape({2, 9, 2, 4}));
       }},
      {"k",
       [&](CaseData& d, Results&) {
         d.in.k = other(Shape({2, 9, 2, 3}), DType::bf16);
       }},
      {"k",
       [&](CaseData& d, Results&) {
         d.in.k = other(Shape({2, 8, 2, 3}));
       }},
      {"v",
       [&](CaseData& d, Results&) {
         d.in.v = other(Shape({2, 9, 4, 5}));
       }},
      {"v", [&](CaseData& d, Results&) { d.in.v.device = Device::cuda(0); }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9, 2, 5}));
       }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9}));
       }},
      {"g", [&](CaseData& d, Results&) { d.in.g = other(Shape({4})); }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9, 2, 3}), DType::bf16);
       }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9, 3, 2})).transpose(2, 3);
       }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9, 2}));
         d.in.gv = other(Shape({2, 9, 2, 5}));
       }},
      {"gv",
       [&](CaseData& d, Results&) {
         d.in.gv = other(Shape({2, 9, 2, 3}));
       }},
      {"h0",
       [&](CaseData& d, Results&) {
         d.in.h0 = other(Shape({2, 4, 3, 5}));
       }},
      {"h0",
       [&](CaseData& d, Results&) {
         d.in.h0 = other(Shape({2, 2, 3, 5}), DType::bf16);
       }},
      {"h0",
       [&](CaseData& d, Results&) {
         d.in.h0 = other(Shape({2, 2, 5, 3})).transpose(2, 3);
       }},
      {"z0",
       [&](CaseData& d, Results&) {
         d.in.z0 = other(Shape({2, 2, 3}));
       }},
      {"scale", [&](CaseData& d, Results&) { d.options.scale = std::numeric_limits<double>::quiet_NaN(); }},
      {"normalize", [&](CaseData& d, Results&) { d.options.normalize = true; }},
      {"o", [&](CaseData&, Results& r) { r.out.o = {}; }},
      {"o",
       [&](CaseData&, Results& r) {
         r.out.o = other(Shape({2, 9, 2, 5}));
       }},
      {"o", [&](CaseData&, Results& r) { r.out.o.stride[1] = 0; }},
      {"ht",
       [&](CaseData&, Results& r) {
         r.out.ht = other(Shape({2, 2, 5, 3}));
       }},
      {"zt",
       [&](CaseData&, Results& r) {
         r.out.zt = other(Shape({2, 2, 3}));
       }},
      {"states", [&](CaseData&, Results& r) { r.out.states = other(Shape({7}), DType::u8); }},
      {"d_o", [&](CaseData& d, Results&) { d.d_out.d_o = {}; }},
      {"d_o",
       [&](CaseData& d, Results&) {
         d.d_out.d_o = other(Shape({2, 9, 4, 5}), DType::f64);
       }},
      {"d_ht",
       [&](CaseData& d, Results&) {
         d.d_out.d_ht = other(Shape({1, 2, 3, 5}));
       }},
      {"d_zt",
       [&](CaseData& d, Results&) {
         d.d_out.d_zt = other(Shape({2, 2, 3}));
       }},
      {"dq",
       [&](CaseData&, Results& r) {
         r.d_in.dq = other(Shape({2, 9, 2, 3}));
       }},
      {"dk", [&](CaseData&, Results& r) { r.d_in.dk.stride[0] = 0; }},
      {"dv",
       [&](CaseData&, Results& r) {
         r.d_in.dv = other(Shape({2, 9, 2, 5}), DType::f16);
       }},
      {"dg",
       [&](CaseData&, Results& r) {
         r.d_in.dg = other(Shape({2, 9, 2, 3}), DType::bf16);
       }},
      {"dgv",
       [&](CaseData&, Results& r) {
         r.d_in.dgv = other(Shape({2, 9, 2, 5}));
       }},
      {"dh0",
       [&](CaseData&, Results& r) {
         r.d_in.dh0 = other(Shape({2, 2, 3, 4}));
       }},
      {"dz0",
       [&](CaseData&, Results& r) {
         r.d_in.dz0 = other(Shape({2, 2, 3}));
       }},
      {"cu_seqlens",
       [&](CaseData& d, Results&) {
         d.in.cu_seqlens = other(Shape({2, 1}), DType::i32);
       }},
      {"cu_seqlens", [&](CaseData& d, Results&) { d.in.cu_seqlens = other(Shape({3}), DType::f32); }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.cu_seqlens = offsets({0, 4, 9});
       }},
  };
  for (const Bad& bad : bads) expect_refused(key, bad);
}

TEST_F(Refusals, NameBadPacking) {
  const Case packed{.name = "packed", .heads = 2, .key_dim = 3, .value_dim = 5, .lengths = {4, 5}};
  for (const std::vector<std::int32_t>& values :
       {std::vector<std::int32_t>{1, 4, 9}, {0, 10, 9}, {0, 4, 8}, {0, -1, 9}}) {
    expect_refused(packed, {"cu_seqlens", [&](CaseData& d, Results&) { d.in.cu_seqlens = offsets(values); }});
  }
}

TEST_F(Refusals, Steps) {
  Context context;
  const TensorView q = other(Shape({2, 4, 3})), k = other(Shape({2, 2, 3})), v = other(Shape({2, 2, 5}));
  const TensorView h = other(Shape({2, 2, 3, 5})), o = other(Shape({2, 4, 5}));
  step(context, {.q = q, .k = k, .v = v}, h, {}, o);
  auto expect = [&](const char* argument, const StepInputs& in, const TensorView& state, const TensorView& z,
                    const TensorView& out) {
    SCOPED_TRACE(argument);
    try {
      step(context, in, state, z, out);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
    }
  };
  expect("h", {.q = q, .k = k, .v = v}, {}, {}, o);
  expect("h", {.q = q, .k = k, .v = v}, other(Shape({2, 4, 3, 5})), {}, o);
  expect("h", {.q = q, .k = k, .v = v}, other(Shape({2, 2, 3, 5}), DType::f16), {}, o);
  expect("z", {.q = q, .k = k, .v = v}, h, other(Shape({2, 2, 3})), o);
  expect("o", {.q = q, .k = k, .v = v}, h, {}, other(Shape({2, 2, 5})));
  expect("g", {.q = q, .k = k, .v = v, .g = other(Shape({2, 4}))}, h, {}, o);
  expect("k", {.q = q, .k = other(Shape({2, 2, 4})), .v = v}, h, {}, o);
}

TEST(Names, RoundTripAndRefuse) {
  EXPECT_EQ(gate_kind_from_name(name_of(GateKind::key_value)), GateKind::key_value);
  EXPECT_EQ(algorithm_from_name(name_of(Algorithm::chunk_recomputed)), Algorithm::chunk_recomputed);
  EXPECT_EQ(feature_map_from_name(name_of(FeatureMap::relu)), FeatureMap::relu);
  try {
    gate_kind_from_name("vector");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "gated_linear_attention: gate is 'vector'; expected one of none, constant, scalar, key, key_value");
  }
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention

// Steps beside a ring: the same outputs and states as forward's, at every place of a token in the ring.
#include "flashgla/ops/gated_linear_attention/ring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/ops/gated_linear_attention/tests/test_support.h"
#include "testing/compare.h"
#include "testing/random.h"

namespace flashgla::ops::gated_linear_attention {
namespace {

// Every gate that a ring takes, and sizes: of one slice of channels and of several with an odd end, more keys than a
// block has threads, grouped heads and channels that no vector takes, of which a ring is folded in.
std::vector<Case> cases(DType dtype) {
  std::vector<Case> all = {
      {.name = "key", .gate = GateKind::key},
      {.name = "resets", .gate = GateKind::key, .gate_values = GateValues::extreme},
      {.name = "scalar", .gate = GateKind::scalar},
      {.name = "constant", .gate = GateKind::constant},
      {.name = "none, relu", .gate = GateKind::none, .feature_map = FeatureMap::relu},
      {.name = "wide", .query_heads = 1, .heads = 1, .key_dim = 36, .value_dim = 260},
      {.name = "many keys", .query_heads = 1, .heads = 1, .key_dim = 260, .value_dim = 20},
      {.name = "grouped", .query_heads = 4, .heads = 2, .gate = GateKind::key},
      {.name = "odd", .query_heads = 1, .heads = 1, .key_dim = 7, .value_dim = 5},
      {.name = "logits", .gate = GateKind::key, .logits = true},
  };
  for (Case& c : all) {
    c.dtype = dtype;
    c.states = true;
  }
  return all;
}

Tensor positions_on(Device device, const std::vector<std::int32_t>& positions) {
  const Tensor host = Tensor::empty(Shape({static_cast<std::int64_t>(positions.size())}), DType::i32);
  std::copy(positions.begin(), positions.end(), host.as<std::int32_t>());
  return testing::copied_to(host, device);
}

Shape ring_shape(const Case& c) { return Shape({c.batch, c.heads, kRing, 2 * c.key_dim + c.value_dim}); }

// Sixteen sequences, of which number n begins at position n.
TEST(Ring, StepsEqualForwardFromEveryPhaseToEveryPhase) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (Case c : cases(dtype)) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + c.name);
      c.batch = kRing;
      c.length = kRing + 3;
      const CaseData host = make_data(c);
      const Results expected = reference_results(host, true, false);
      for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
        if (row.step == nullptr) return;
        SCOPED_TRACE(row.name);
        const CaseData data = on_device(host, device);
        Results actual = make_results(data, true, 0);
        const TensorView h = actual.out.ht;
        copy_memory(h.data, device, data.in.h0.data, device, h.bytes());
        const Tensor inputs = Tensor::zeros(ring_shape(c), h.dtype, device);
        std::vector<std::int32_t> positions(static_cast<std::size_t>(c.batch));
        for (std::int64_t t = 0; t <= c.length; ++t) {
          for (std::size_t n = 0; n < positions.size(); ++n)
            positions[n] = static_cast<std::int32_t>(static_cast<std::int64_t>(n) + t);
          const Tensor at = positions_on(device, positions);
          const Ring ring{inputs, at};
          if (t == c.length) {
            run_planned(device, row.name, [&](Context& x) { fold(x, ring, h, h); });
            break;
          }
          const StepData token = slice_token(data.in, actual.out.o, t);
          run_planned(device, row.name, [&](Context& x) { step(x, token.in, ring, h, token.o, data.options); });
        }
        expect_all_close(outputs_of(on_cpu(actual)), outputs_of(expected), dtype);
      });
    }
  }
}

// The token behind inputs that another device left in the ring.
TEST(Ring, InputsThatWaitAreTakenInAtEveryPhase) {
  for (Case c : cases(DType::f32)) {
    if (c.logits || c.feature_map != FeatureMap::identity) continue;  // a ring has log gates and phi(k)
    for (std::int64_t filled = 0; filled < kRing; ++filled) {
      if (c.name != "key" && filled % 7 != 1) continue;  // 1, 8 and 15 of the others
      SCOPED_TRACE(c.name + ", " + std::to_string(filled) + " inputs");
      c.batch = 2;
      c.length = filled + 1;
      const CaseData host = make_data(c);
      const Results expected = reference_results(host, true, false);
      const Tensor waiting = Tensor::empty(ring_shape(c), DType::f32);
      testing::poison(waiting);  // rows that nothing waits in are not read
      const auto put = [&](std::int64_t b, std::int64_t head, std::int64_t t, std::int64_t i, double x) {
        store_element(waiting, std::array{b, head, t, i}, x);
      };
      for (std::int64_t b = 0; b < c.batch; ++b) {
        for (std::int64_t head = 0; head < c.heads; ++head) {
          for (std::int64_t t = 0; t < filled; ++t) {
            for (std::int64_t i = 0; i < c.key_dim; ++i) {
              const TensorView& g = host.in.g;
              put(b, head, t, i, load_element(host.in.k, std::array{b, t, head, i}));
              put(b, head, t, c.key_dim + i,
                  !g              ? 0.0
                  : g.rank() == 1 ? load_element(g, std::array{head})
                  : g.rank() == 3 ? load_element(g, std::array{b, t, head})
                                  : load_element(g, std::array{b, t, head, i}));
            }
            for (std::int64_t j = 0; j < c.value_dim; ++j) {
              put(b, head, t, 2 * c.key_dim + j, load_element(host.in.v, std::array{b, t, head, j}));
            }
          }
        }
      }
      for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
        if (row.step == nullptr) return;
        SCOPED_TRACE(row.name);
        const CaseData data = on_device(host, device);
        Results actual = make_results(data, true, 0);
        const TensorView h = actual.out.ht;
        copy_memory(h.data, device, data.in.h0.data, device, h.bytes());
        const Tensor inputs = testing::copied_to(waiting, device);
        const auto behind = static_cast<std::int32_t>(3 * kRing + filled);
        const Tensor before = positions_on(device, {behind, behind}),
                     after = positions_on(device, {behind + 1, behind + 1});
        const StepData token = slice_token(data.in, actual.out.o, filled);
        run_planned(device, row.name, [&](Context& x) {
          step(x, token.in, {inputs, before}, h, token.o, data.options);
        });
        run_planned(device, row.name, [&](Context& x) { fold(x, {inputs, after}, h, h); });
        const Results own = on_cpu(actual);
        EXPECT_EQ(testing::check_close("o", own.out.o.select(1, filled), expected.out.o.select(1, filled),
                                       tolerance(DType::f32, false)),
                  "");
        EXPECT_EQ(testing::check_close("ht", own.out.ht, expected.out.ht, tolerance(DType::f32, false)), "");
      });
    }
  }
}

// A gate that the step computes is the one whose log gates are given, in outputs and in what stays in the ring.
TEST(Ring, TakesAProjectedGate) {
  constexpr double kNormalizer = 16.0, kClamp = -0.3;
  Case c = cases(DType::f32).front();
  c.key_dim = 36;
  c.value_dim = 132;
  c.length = 1;
  int computed = 0;
  for (const DType weight_dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t rank : {16, 32}) {
      SCOPED_TRACE(std::string(name_of(weight_dtype)) + " rank " + std::to_string(rank));
      CaseData host = make_data(c);
      const std::int64_t channels = c.heads * c.key_dim;
      const Tensor x = testing::random_normal({c.batch, rank}, DType::f32, 11);
      const Tensor weight = testing::random_normal({channels, rank}, weight_dtype, 12);
      const Tensor bias = testing::random_normal({channels}, weight_dtype, 13);
      const Tensor gates = Tensor::empty({c.batch, 1, c.heads, c.key_dim}, DType::f32);
      for (std::int64_t b = 0; b < c.batch; ++b) {
        for (std::int64_t k = 0; k < channels; ++k) {
          double logit = load_element(bias, std::array{k});
          for (std::int64_t r = 0; r < rank; ++r) {
            logit += load_element(x, std::array{b, r}) * load_element(weight, std::array{k, r});
          }
          gates.as<float>()[b * channels + k] =
              static_cast<float>(std::max(-std::log1p(std::exp(-logit)) / kNormalizer, kClamp));
        }
      }
      host.in.g = gates;
      for_each_implementation(describe(host.in, host.options), [&](Device device, const Implementation& row) {
        if (row.step == nullptr) return;
        SCOPED_TRACE(row.name);
        const CaseData data = on_device(host, device);
        const Results given = make_results(data, true, 0), own = make_results(data, true, 0);
        StepData token = slice_token(data.in, given.out.o, 0);
        StepInputs projecting = token.in;
        projecting.g = {};
        const Tensor on_device_x = testing::copied_to(x, device), on_device_weight = testing::copied_to(weight, device),
                     on_device_bias = testing::copied_to(bias, device);
        projecting.projection = {on_device_x, on_device_weight, on_device_bias};
        Options options = data.options;
        options.gate_logit_normalizer = kNormalizer;
        options.gate_clamp_min = kClamp;
        Context asked(device);
        asked.force_implementation(row.name);
        if (!step_projects(asked, projecting, own.out.ht, options)) return;
        ++computed;
        for (const Results* results : {&given, &own}) {
          copy_memory(results->out.ht.data, device, data.in.h0.data, device, data.in.h0.bytes());
        }
        const Tensor ring_given = Tensor::zeros(ring_shape(c), DType::f32, device);
        const Tensor ring_own = Tensor::zeros(ring_shape(c), DType::f32, device);
        for (std::int32_t t = 0; t < 2 * kRing + 5; ++t) {
          const Tensor at = positions_on(device, {t, t + 7});
          run_planned(device, row.name, [&](Context& context) {
            step(context, token.in, {ring_given, at}, given.out.ht, given.out.o.select(1, 0), data.options);
          });
          run_planned(device, row.name, [&](Context& context) {
            step(context, projecting, {ring_own, at}, own.out.ht, own.out.o.select(1, 0), options);
          });
          const Results a = on_cpu(own), b = on_cpu(given);
          EXPECT_EQ(testing::check_close("o", a.out.o, b.out.o, tolerance(DType::f32, false)), "") << t;
          EXPECT_EQ(testing::check_close("h", a.out.ht, b.out.ht, tolerance(DType::f32, false)), "") << t;
        }
      });
    }
  }
  EXPECT_GT(computed, 0);
}

TEST(Ring, BadArgumentsAreRefusedByName) {
  Context context;
  const auto f32 = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor q = f32({2, 2, 3}), v = f32({2, 2, 5}), h = f32({2, 2, 3, 5}), inputs = f32({2, 2, kRing, 11});
  const Tensor positions = positions_on(Device::cpu(), {0, 5}), one = positions_on(Device::cpu(), {0});
  const Tensor rounded = Tensor::zeros({2, 2, 3, 5}, DType::bf16), short_of = f32({2, 2, kRing, 10});
  const Tensor o = f32({2, 2, 5});
  const StepInputs token{.q = q, .k = q, .v = v};
  step(context, token, {inputs, positions}, h, o);
  const auto refused = [&](const char* argument, const StepInputs& in, const Ring& ring, const TensorView& state,
                           const Options& options) {
    SCOPED_TRACE(argument);
    try {
      step(context, in, ring, state, o, options);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
    }
  };
  refused("ring.inputs", token, {}, h, {});
  refused("ring.inputs", token, {short_of, positions}, h, {});
  refused("ring.positions", token, {inputs, {}}, h, {});
  refused("ring.positions", token, {inputs, one}, h, {});
  refused("ring.positions", token, {inputs, q}, h, {});
  refused("h", token, {inputs, positions}, rounded, {});
  refused("gv", {.q = q, .k = q, .v = v, .gv = v}, {inputs, positions}, h, {});
  refused("normalize", token, {inputs, positions}, h, {.normalize = true});
  EXPECT_THAT([&] { fold(context, {inputs, positions}, h, v); }, ::testing::Throws<Error>());
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention

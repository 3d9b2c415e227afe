// The plan by itself, which is plain C++: what each case of cuda_paths.h takes, and what forward and backward have to
// agree on. Needs no GPU.
#include "flashgla/ops/gated_linear_attention/cuda/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "flashgla/ops/gated_linear_attention/cuda/tests/cuda_paths.h"
#include "flashgla/ops/gated_linear_attention/cuda/tests/path_plans.h"
#include "testing/random.h"

namespace flashgla::ops::gated_linear_attention::cuda {
namespace {

constexpr Architecture kH200{
    .device = Device::Kind::cuda, .cuda_capability = 90, .shared_memory = 227 * 1024, .multiprocessors = 132};

Plan plan_of(const Case& c, bool hopper, bool states, const Architecture& device = kH200) {
  Described d = described(c);
  d.layout.states = states && d.problem.algorithm != Algorithm::chunk_recomputed;
  return make_plan(d.problem, d.layout, device, hopper);
}

TEST(Plan, EveryPathIsTheOneThatItsCaseIsFor) {
  std::map<std::string, PathPlans> plans;
  for (const Case& c : path_cases()) {
    const auto name = [&](bool hopper, bool states) { return to_string(plan_of(c, hopper, states)); };
    plans[c.name] = {name(true, true), name(true, false), name(false, true), name(false, false)};
  }
  // Where another plan is meant: what this prints is what path_plans_text.cpp is to have.
  EXPECT_EQ(written(plans), written(path_plans()));
}

// Each form, in segments of time and uncut where it has them, with and without what may stand around it.
TEST(Plan, PathCasesTakeEveryForm) {
  std::set<std::string> forward, backward, states;
  std::set<std::string> around;
  for (const Case& c : path_cases()) {
    for (const bool hopper : {true, false}) {
      for (const bool kept : {true, false}) {
        const Plan plan = plan_of(c, hopper, kept);
        const std::string row = hopper ? "sm90 " : "sm80 ";
        forward.insert(row + name_of(plan.forward) + (plan.forward_cut.segments > 1 ? " cut" : ""));
        backward.insert(row + name_of(plan.backward) + (plan.backward_cut.segments > 1 ? " cut" : "") +
                        (plan.finds_states ? " found" : ""));
        states.insert(row + name_of(plan.states.kind) + std::to_string(plan.states.every_log2));
        for (const auto& [has, name] : {std::tuple{plan.gates, "gates"},
                                        {plan.in_f32, "in f32"},
                                        {plan.features, "features"},
                                        {plan.rows, "rows"},
                                        {plan.pairs, "pairs"},
                                        {plan.groups == 2, "two"},
                                        {plan.plain, "plain"}}) {
          if (has) around.insert(name);
        }
      }
    }
  }
  for (const std::string row : {"sm90 ", "sm80 "}) {
    for (const char* form : {"tokens", "parallel", "one_pass", "two_passes", "two_passes cut", "f32_tiles",
                             "f32_tiles cut", "value_gates", "value_gates cut"}) {
      EXPECT_EQ(forward.count(row + form), 1u) << row + form;
    }
    for (const char* form : {"token_gates", "token_gates found", "key_gates", "key_gates found", "chunks",
                             "chunks found", "chunks cut", "chunks cut found", "f32_tiles", "f32_tiles found",
                             "f32_tiles cut", "value_gates", "value_gates found", "value_gates cut", "tokens"}) {
      EXPECT_EQ(backward.count(row + form), 1u) << row + form;
    }
    for (const char* kind : {"none0", "images0", "images1", "prepared1", "split0", "gated0"}) {
      EXPECT_EQ(states.count(row + kind), 1u) << row + kind;
    }
  }
  EXPECT_EQ(forward.count("sm90 one_wide_pass"), 1u);
  EXPECT_EQ(states.count("sm90 images2"), 1u);
  EXPECT_EQ(states.count("sm90 scores1"), 1u);
  EXPECT_EQ(around.size(), 7u);
}

// Problems of all kinds, drawn.
class Drawn {
 public:
  explicit Drawn(std::uint64_t number) : number_(number) {
    Problem& p = problem;
    p.dtype = pick({DType::bf16, DType::bf16, DType::bf16, DType::f16, DType::f32});
    p.heads = pick<std::int64_t>({1, 2, 4, 16});
    p.query_heads = p.heads * pick<std::int64_t>({1, 1, 2});
    p.key_dim = pick<std::int64_t>({6, 33, 40, 64, 64, 128, 192, 256, 512});
    p.value_dim = pick<std::int64_t>({4, 51, 64, 64, 128, 256, 512});
    p.length = pick<std::int64_t>({1, 16, 64, 203, 2048, 32768});
    p.packed = pick({true, false, false});
    p.batch = p.packed ? 1 : pick<std::int64_t>({1, 2, 34, 100});
    p.sequences = p.packed ? pick<std::int64_t>({1, 5, 64}) : p.batch;
    p.max_seqlen = p.packed ? pick<std::int64_t>({0, p.length}) : 0;
    p.gate =
        pick({GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key, GateKind::key, GateKind::key_value});
    p.gate_dtype = pick({p.dtype, DType::f32});
    p.scale = pick({0.125, -0.3, 1e12});
    p.feature_map = pick({FeatureMap::identity, FeatureMap::identity, FeatureMap::relu});
    p.normalize = p.gate == GateKind::none && pick({true, false});
    p.algorithm = pick({Algorithm::automatic, Algorithm::automatic, Algorithm::chunk_recomputed, Algorithm::recurrent,
                        Algorithm::parallel});
    if (p.gate == GateKind::key && pick({true, false})) p.gate_logit_normalizer = 16.0;
    layout = contiguous_layout(p);
    layout.states = pick({true, false});
  }
  template <class T>
  T pick(std::initializer_list<T> from) {
    return from
        .begin()[static_cast<std::size_t>(testing::uniform(number_, ++draws_) * static_cast<double>(from.size()))];
  }
  Problem problem;
  Layout layout;

 private:
  std::uint64_t number_, draws_ = 0;
};

bool same_states(const States& a, const States& b) {
  return a.kind == b.kind && a.every_log2 == b.every_log2 && a.bytes == b.bytes && a.tag() == b.tag();
}

// A backward knows neither o nor, before it, whether states were kept; the bytes that a caller reserves are told
// without a device.
TEST(Plan, ForwardAndBackwardAgreeOnStates) {
  for (std::uint64_t number = 0; number < 20000; ++number) {
    Drawn drawn(number);
    for (const int multiprocessors : {20, 108, 132}) {
      for (const bool hopper : {true, false}) {
        Architecture device = kH200;
        device.multiprocessors = multiprocessors;
        const Plan forward = make_plan(drawn.problem, drawn.layout, device, hopper);
        ASSERT_LE(forward.states.bytes, states_bytes(drawn.problem, hopper)) << to_string(forward);
        ASSERT_EQ(forward.states.bytes == 0, forward.states.kind == StatesKind::none);
        Layout other = drawn.layout;
        other.o = {};
        other.q.on_piece = other.o.on_piece = false;
        const Plan backward = make_plan(drawn.problem, other, device, hopper);
        ASSERT_TRUE(same_states(forward.states, backward.states)) << to_string(forward) << "\n" << to_string(backward);
        Layout without = drawn.layout;
        without.states = !without.states;
        ASSERT_TRUE(same_states(forward.states, make_plan(drawn.problem, without, device, hopper).states));
      }
    }
  }
}

// What a thread has planned before it finds again, and takes for no other call.
TEST(Plan, CallsFindTheirOwnPlanAgain) {
  const auto expect_own = [](const Drawn& drawn, const Architecture& device, bool hopper) {
    const Plan found = plan_of_call(drawn.problem, drawn.layout, device, hopper),
               made = make_plan(drawn.problem, drawn.layout, device, hopper);
    ASSERT_EQ(to_string(found), to_string(made));
    ASSERT_TRUE(found.problem == made.problem && same_states(found.states, made.states));
  };
  Architecture small = kH200;
  small.multiprocessors = 20;
  for (std::uint64_t first = 0; first < 2000; first += 5) {
    for (int round = 0; round < 2; ++round) {  // more than are kept, then as many again
      for (std::uint64_t number = first; number < first + 5; ++number) {
        Drawn drawn(number);
        for (const bool hopper : {true, false}) expect_own(drawn, round == 0 ? kH200 : small, hopper);
        drawn.layout.states = !drawn.layout.states;
        expect_own(drawn, kH200, true);
      }
    }
  }
}

TEST(Plan, TagsTellStatesApart) {
  std::set<std::uint64_t> tags;
  for (const StatesKind kind : {StatesKind::images, StatesKind::prepared, StatesKind::scores, StatesKind::split}) {
    for (const int every : {0, 1, 2}) {
      for (const std::size_t bytes : {8192u, 16384u, 24576u}) {
        tags.insert(States{.kind = kind, .every_log2 = every, .bytes = bytes}.tag());
      }
    }
  }
  EXPECT_EQ(tags.size(), 36u);
}

// What lies in the way of TMA is copied; gates of logits, which kernels turn themselves, are then made before.
TEST(Plan, RowsThatLieOtherwiseAreCopied) {
  const Case c{.batch = 34,
               .length = 203,
               .query_heads = 4,
               .heads = 4,
               .key_dim = 64,
               .value_dim = 64,
               .dtype = DType::bf16,
               .gate_dtype = DType::bf16,
               .logits = true};
  Described d = described(c);
  const auto name = [&] { return forward_name(make_plan(d.problem, d.layout, kH200, true)); };
  EXPECT_EQ(name(), "one_pass of pairs");
  EXPECT_EQ(forward_name(make_plan(d.problem, d.layout, kH200, false)), "gates: one_pass of two");
  d.layout.o.on_piece = false;  // copied, but that is not the plan's to tell
  EXPECT_EQ(name(), "one_pass of pairs");
  d.layout.k.token += 1;
  EXPECT_EQ(name(), "gates, rows: one_pass of pairs");
  d.layout.k.token = 0;  // one row for all tokens
  EXPECT_EQ(name(), "gates, rows: one_pass of pairs");
}

// Sums over heads have kernels of their own on both rows, whatever else the problem would take.
TEST(Plan, SumsOverHeadsShareKeys) {
  Described d = described({.batch = 2,
                           .length = 203,
                           .query_heads = 6,
                           .heads = 6,
                           .key_dim = 128,
                           .value_dim = 64,
                           .gate = GateKind::scalar,
                           .dtype = DType::bf16});
  Problem& p = d.problem;
  p.sums_over_heads = true;
  d.layout.q.head = d.layout.k.head = 0;
  const std::size_t states = 2 * 4 * 6 * 2 * kImageBytes;  // sequences, chunks, heads, key tiles
  for (const bool hopper : {true, false}) {
    const auto plan = [&] { return make_plan(p, d.layout, kH200, hopper); };
    d.layout.states = true;
    EXPECT_EQ(to_string(plan()), "shared_keys; shared_keys; images");
    EXPECT_EQ(plan().states.bytes, states);
    EXPECT_EQ(states_bytes(p, hopper), states + states_tag_bytes());
    d.layout.states = false;
    EXPECT_EQ(to_string(plan()), "shared_keys; shared_keys, states found; images");
    EXPECT_EQ(plan().states.bytes, states);
    Problem recomputed = p;
    recomputed.algorithm = Algorithm::chunk_recomputed;
    EXPECT_EQ(to_string(make_plan(recomputed, d.layout, kH200, hopper)),
              "shared_keys; shared_keys, states found; none");
    EXPECT_EQ(states_bytes(recomputed, hopper), 0u);
  }
  const auto takes = [&](auto change) {
    Problem other = p;
    change(other);
    return takes_shared_keys(other);
  };
  EXPECT_TRUE(takes([](Problem& o) { o.key_dim = 64; }));
  EXPECT_FALSE(takes([](Problem& o) { o.sums_over_heads = false; }));
  EXPECT_FALSE(takes([](Problem& o) { o.key_dim = 192; }));
  EXPECT_FALSE(takes([](Problem& o) { o.value_dim = 128; }));
  EXPECT_FALSE(takes([](Problem& o) { o.gate = GateKind::constant; }));
  EXPECT_FALSE(takes([](Problem& o) { o.dtype = DType::f32; }));
  EXPECT_FALSE(takes([](Problem& o) { o.query_heads = 12; }));
}

// Offsets that 31 bits do not count: not in one pass.
TEST(Plan, FarRowsGoInTwoPasses) {
  Described d = described({.batch = 34,
                           .length = 203,
                           .query_heads = 4,
                           .heads = 4,
                           .key_dim = 64,
                           .value_dim = 64,
                           .dtype = DType::bf16,
                           .gate_dtype = DType::bf16});
  d.layout.states = true;
  d.layout.q.batch = std::int64_t{1} << 30;
  EXPECT_EQ(make_plan(d.problem, d.layout, kH200, true).forward, ForwardForm::two_passes);
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention::cuda

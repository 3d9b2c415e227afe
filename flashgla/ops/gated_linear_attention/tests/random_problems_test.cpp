// Problems drawn at random: every implementation of the table, on every device there is, against the float64 reference.
// The lists of cases (cases.cpp, cuda_paths.cpp) hold what was thought of; this is for what was not. A problem is
// its number's alone; FLASHGLA_RANDOM_PROBLEMS=first:count in the environment draws others than the first few
// and those that once failed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "flashgla/base/error.h"
#include "flashgla/ops/gated_linear_attention/tests/test_support.h"
#include "testing/random.h"

namespace flashgla::ops::gated_linear_attention {
namespace {

constexpr std::uint64_t kProblems = 40;
// Those that an implementation once failed (cuda/LOG.md).
constexpr std::uint64_t kOnceFailed[] = {714, 938, 13013, 31186};
constexpr std::int64_t kMostProducts = std::int64_t{1} << 25;  // tokens x query heads x K x V: some tenths of a second

// Draws of one problem, one after the other.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : seed_(seed) {}
  bool chance(double probability) { return testing::uniform(seed_, next_++) < probability; }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    const double u = testing::uniform(seed_, next_++);
    return std::min(high, low + static_cast<std::int64_t>(u * static_cast<double>(high - low + 1)));
  }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<std::int64_t>(values.size()) - 1)];
  }

 private:
  std::uint64_t seed_, next_ = 0;
};

struct RandomProblem {
  std::uint64_t number = 0;
  Case c;
  Algorithm algorithm = Algorithm::automatic;
  double scale = 0.0;
  // Dimensions along which a tensor repeats its first element, -1: none.
  int q_repeats = -1, k_repeats = -1, v_repeats = -1, d_o_repeats = -1;
};

// Few channels, a multiple of 8, whole tiles of 64, and anything.
std::int64_t draw_channels(Draws& draw) {
  switch (draw.between(0, 5)) {
    case 0:
      return draw.between(1, 16);
    case 1:
      return draw.between(17, 130);
    case 2:
      return draw.between(131, 512);
    case 3:
      return 8 * draw.between(1, 40);
    default:
      return 64 * draw.one_of<std::int64_t>({1, 1, 1, 2, 2, 3, 4, 5, 8});
  }
}

// Around whole chunks of 64, short, and anything.
std::int64_t draw_length(Draws& draw) {
  switch (draw.between(0, 3)) {
    case 0:
      return draw.between(1, 40);
    case 1:
      return std::max<std::int64_t>(1, 64 * draw.between(1, 6) + draw.between(-1, 1));
    default:
      return draw.between(41, 500);
  }
}

RandomProblem draw_problem(std::uint64_t number) {
  Draws draw(1000003 * number + 17);
  RandomProblem p;
  p.number = number;
  Case& c = p.c;
  c.dtype = draw.one_of({DType::bf16, DType::bf16, DType::bf16, DType::f16, DType::f32, DType::f32, DType::f64});
  c.gate = draw.one_of(
      {GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key, GateKind::key, GateKind::key_value});
  c.gates_over_keys = c.gate != GateKind::key_value || draw.chance(0.7);
  using enum GateValues;
  c.gate_values = draw.one_of({trained, trained, trained, extreme, extreme, times_1, times_2, times_4, times_16,
                               times_64, fast_channels, resets, mixed, mixed});
  c.gate_dtype = draw.chance(0.5) ? c.dtype : DType::f32;
  c.key_dim = draw_channels(draw);
  c.value_dim = draw_channels(draw);
  c.heads = draw.between(1, 4);
  c.query_heads = c.heads * draw.one_of<std::int64_t>({1, 1, 1, 2, 3});
  c.batch = draw.between(1, 4);
  c.length = draw_length(draw);
  if (draw.chance(0.15)) {  // sequences enough for a block each
    c.batch = draw.between(30, 40);
    c.heads = c.query_heads = 4;
    c.length = draw.between(1, 200);
    c.key_dim = draw.between(1, 64);
    c.value_dim = draw.between(1, 128);
    if (draw.chance(0.7)) c.key_dim = c.value_dim = 64;
  }
  const auto products = [&] { return c.batch * c.length * c.query_heads * c.key_dim * c.value_dim; };
  while (products() > kMostProducts && c.batch > 4) --c.batch;
  while (products() > kMostProducts && c.length > 70) c.length -= c.length / 4;
  while (products() > kMostProducts && c.batch > 1) --c.batch;
  while (products() > kMostProducts && c.heads > 1) {
    c.query_heads -= c.query_heads / c.heads;
    --c.heads;
  }
  // Where strong gates lose dg's digits (README.md, "Gates of other strengths"): in 16 bits over values.
  if (size_of(c.dtype) == 2 && c.gate == GateKind::key_value && c.gate_values != extreme) c.gate_values = trained;
  // Tokens enough for the roundings of 16 bits to average.
  if (size_of(c.dtype) == 2) c.batch = std::max(c.batch, 40 / (c.length * c.query_heads) + 1);
  if (draw.chance(0.3)) {  // the same tokens as sequences of other lengths, some of them empty
    for (std::int64_t left = c.batch * c.length; left > 0;) {
      const std::int64_t length = draw.chance(0.2) ? 0 : std::min(left, draw_length(draw));
      c.lengths.push_back(length);
      left -= length;
    }
  }
  c.strided = draw.chance(0.3);
  c.states = draw.chance(0.7);
  if (draw.chance(0.15)) {
    c.feature_map = draw.one_of({FeatureMap::elu_plus_one, FeatureMap::relu});
    // With relu what is divided by can be as small as chance will have it; with one channel q cancels.
    c.normalize = c.gate == GateKind::none && c.feature_map == FeatureMap::elu_plus_one && c.key_dim > 1;
  }
  p.algorithm = draw.one_of({Algorithm::automatic, Algorithm::automatic, Algorithm::automatic,
                             Algorithm::chunk_recomputed, Algorithm::recurrent});
  p.scale = draw.one_of({0.0, 0.0, 0.0, 1.0, -0.3, 3e-6});
  // f16's range ends there.
  if (c.dtype == DType::f16) p.scale = p.scale == 3e-6 ? 3.0 : c.feature_map == FeatureMap::identity ? p.scale : 0.0;
  // What a reset cuts off from the final state is the difference of terms a million times larger.
  if (p.scale == 3e-6 && c.gate_values != GateValues::trained) p.scale = 0.01;
  const auto draw_repeats = [&] { return draw.chance(0.1) ? static_cast<int>(draw.between(0, 2)) : -1; };
  p.q_repeats = draw_repeats();
  p.k_repeats = draw_repeats();
  p.v_repeats = draw_repeats();
  p.d_o_repeats = draw_repeats();
  // What a normalised output is divided by then cancels, and roundings that are all the same do not average.
  if (c.normalize) p.q_repeats = p.k_repeats = p.v_repeats = -1;
  if (p.k_repeats >= 0) p.q_repeats = -1;
  // Nor do they where strong gates leave but a few tokens to average over, or a constant gate's dg is one sum.
  if (c.gate_values != trained || c.gate == GateKind::constant)
    p.q_repeats = p.k_repeats = p.v_repeats = p.d_o_repeats = -1;
  const bool of_tokens = c.gate == GateKind::scalar || c.gate == GateKind::key || c.gate == GateKind::key_value;
  c.logits = of_tokens && c.gate_values == trained && draw.chance(0.4);
  return p;
}

std::vector<RandomProblem> problems() {
  std::vector<RandomProblem> list;
  unsigned long long first = 0, count = kProblems;
  if (const char* wanted = std::getenv("FLASHGLA_RANDOM_PROBLEMS")) {
    if (std::sscanf(wanted, "%llu:%llu", &first, &count) != 2) {
      throw Error(std::string("FLASHGLA_RANDOM_PROBLEMS is '") + wanted + "'; expected first:count");
    }
  } else {
    for (const std::uint64_t number : kOnceFailed) list.push_back(draw_problem(number));
  }
  for (std::uint64_t i = 0; i < count; ++i) list.push_back(draw_problem(first + i));
  return list;
}

void PrintTo(const RandomProblem& p, std::ostream* out) {
  *out << describe_case(p.c) << ", " << name_of(p.c.gate_values) << " gates in " << name_of(p.c.gate_dtype)
       << (p.c.strided ? ", strided" : "") << (p.c.states ? ", states" : "") << ", " << name_of(p.algorithm)
       << ", scale " << p.scale << ", repeats q " << p.q_repeats << " k " << p.k_repeats << " v " << p.v_repeats
       << " d_o " << p.d_o_repeats;
  for (std::size_t i = 0; i < p.c.lengths.size(); ++i) *out << (i == 0 ? ", lengths " : " ") << p.c.lengths[i];
}

class RandomProblems : public ::testing::TestWithParam<RandomProblem> {};

TEST_P(RandomProblems, AgreeWithTheReference) {
  const RandomProblem& p = GetParam();
  const Case& c = p.c;
  CaseData data = make_data(c, 1 + p.number);
  data.options.algorithm = p.algorithm;
  data.options.scale = p.scale;
  const auto repeat = [](TensorView& view, int dimension) {
    if (dimension >= 0) view.stride[dimension] = 0;
  };
  repeat(data.in.q, p.q_repeats);
  repeat(data.in.k, p.k_repeats);
  repeat(data.in.v, p.v_repeats);
  repeat(data.d_out.d_o, p.d_o_repeats);
  expect_reference_results(data, c.states);
}

INSTANTIATE_TEST_SUITE_P(Drawn, RandomProblems, ::testing::ValuesIn(problems()),
                         [](const auto& parameter) { return "number_" + std::to_string(parameter.param.number); });

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention

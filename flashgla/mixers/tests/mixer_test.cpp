// What every mixer of the registry must do, whatever it computes.
#include "flashgla/mixers/mixer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "flashgla/mixers/registry.h"
#include "flashgla/mixers/tests/variants.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::mixers {
namespace {

constexpr std::int64_t kHidden = 16;

Common small_common() {
  Common common;
  common.hidden_size = kHidden;
  common.num_hidden_layers = 3;
  return common;
}

// Tokens that sequences have had before, as far as a mixer looks at it; and room for those and what a test adds.
constexpr std::int32_t kPositions[] = {3, 0, 7, 1};
constexpr std::int64_t kCapacity = 24;

// A mixer with parameters large enough that every part of it matters.
struct Trial {
  std::unique_ptr<Mixer> mixer;
  std::unique_ptr<nn::ParameterStore> store;
  DType dtype;

  Trial(const Variant& variant, DType dtype) : dtype(dtype) {
    const auto config = find_mixer(variant.row).make_config();
    for (const Field& field : config->fields()) {
      make_small(field);
      for (const auto& [name, text] : variant.fields) {
        if (std::string(name) == field.name) set(field, text);
      }
    }
    config->validate(small_common());
    mixer = config->create(small_common(), 1);
    store = std::make_unique<nn::ParameterStore>(
        [this](const nn::ParameterVisitor& visit) { mixer->for_each_parameter(visit); }, dtype, Device::cpu(), true);
    std::uint64_t seed = 1;
    for (const nn::Parameter* parameter : store->parameters()) {
      const bool ones = parameter->initialization == nn::Initialization::ones;
      testing::fill_normal(parameter->value, seed++, ones ? 0.1 : 0.4, ones ? 1.0 : 0.0);
    }
  }

  // Sizes that suit kHidden, for fields that mixers have in common.
  static void make_small(const Field& field) {
    const std::map<std::string, std::int64_t> sizes = {{"num_heads", 2}, {"conv_size", 3}, {"gate_low_rank_dim", 5}};
    if (const auto row = sizes.find(field.name); row != sizes.end())
      *std::get<std::int64_t*>(field.value) = row->second;
    if (std::string(field.name) == "use_short_conv") *std::get<bool*>(field.value) = true;
  }

  static void set(const Field& field, const std::string& text) {
    std::visit(
        [&](auto* value) {
          using T = std::decay_t<decltype(*value)>;
          if constexpr (std::is_same_v<T, bool>) {
            *value = text == "true";
          } else if constexpr (std::is_assignable_v<T&, std::string>) {
            *value = text;
          } else {
            *value =
                static_cast<std::conditional_t<std::is_assignable_v<T&, double> && !std::is_same_v<T, std::int64_t>,
                                               double, std::int64_t>>(std::stod(text));
          }
        },
        field.value);
  }

  // Views of a fresh state for so many sequences, filled with noise of this deviation.
  LayerState make_state(std::int64_t sequences, double deviation, std::vector<Tensor>& memory) const {
    LayerState state;
    for (const StateEntry& entry : mixer->state_layout(sequences, kCapacity, dtype)) {
      EXPECT_EQ(entry.shape[0], sequences) << entry.name;
      EXPECT_TRUE(!entry.growing || entry.shape[1] == kCapacity) << entry.name;
      memory.push_back(testing::random_normal(entry.shape, entry.dtype, memory.size() + 31, deviation));
      state.push_back(memory.back());
    }
    return state;
  }

  // Where a call's end state goes: growing entries in place, others into noise that must be overwritten.
  LayerState after(const LayerState& before, std::vector<Tensor>& memory) const {
    const auto layout = mixer->state_layout(before.front().size(0), kCapacity, dtype);
    LayerState state;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      if (layout[i].growing) {
        state.push_back(before[i]);
        continue;
      }
      memory.push_back(Tensor::empty(layout[i].shape, layout[i].dtype));
      testing::poison(memory.back());
      state.push_back(memory.back());
    }
    return state;
  }

  // "" when the states agree; of growing entries the rows before each sequence's position.
  std::string compare(const LayerState& state, const LayerState& reference,
                      const std::vector<std::int64_t>& tokens) const {
    const auto layout = mixer->state_layout(reference.front().size(0), kCapacity, dtype);
    std::string failures;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      for (std::size_t n = 0; n < tokens.size(); ++n) {
        TensorView own = state[i].select(0, static_cast<std::int64_t>(n));
        TensorView other = reference[i].select(0, static_cast<std::int64_t>(n));
        if (layout[i].growing) own = own.slice(0, 0, tokens[n]), other = other.slice(0, 0, tokens[n]);
        failures += testing::check_close(layout[i].name.c_str(), own, other, 1e-12);
      }
    }
    return failures;
  }
};

Tensor positions_of(std::int64_t sequences) {
  Tensor positions = Tensor::empty(Shape({sequences}), DType::i32);
  std::copy(kPositions, kPositions + sequences, positions.as<std::int32_t>());
  return positions;
}

class EveryMixer : public ::testing::TestWithParam<Variant> {};

// Each row's plain configuration, and those of variants.h.
std::vector<Variant> all_variants() {
  std::vector<Variant> all;
  for (const Registration* row : registry()) all.push_back({row->name, "plain", {}});
  const std::vector<Variant> more = variants();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}
INSTANTIATE_TEST_SUITE_P(Registry, EveryMixer, ::testing::ValuesIn(all_variants()),
                         [](const auto& variant) { return std::string(variant.param.row) + "_" + variant.param.name; });

TEST_P(EveryMixer, NamesItsParametersByLayerAndOnce) {
  const Trial trial(GetParam(), DType::f32);
  std::set<std::string> names;
  for (const nn::Parameter* parameter : trial.store->parameters()) {
    EXPECT_THAT(parameter->name, ::testing::StartsWith("model.layers.1."));
    EXPECT_TRUE(names.insert(parameter->name).second);
    EXPECT_TRUE(!parameter->decay || parameter->shape.rank() == 2) << parameter->name << ": decay is for matrices only";
  }
  EXPECT_FALSE(std::string(find_mixer(GetParam().row).summary).empty());
}

TEST_P(EveryMixer, GradientsAgreeWithFiniteDifferences) {
  Trial trial(GetParam(), DType::f64);
  const Shape shape({2, 6, kHidden});
  const Tensor x = testing::random_normal(shape, DType::f64, 7);
  const Tensor dy = testing::random_normal(shape, DType::f64, 8);
  const Tensor y = Tensor::empty(shape, DType::f64);
  std::vector<Tensor> memory;
  const LayerState before = trial.make_state(2, 0.5, memory);
  const Tensor positions = positions_of(2);
  Context context(Device::cpu(), 1);
  for (const nn::Recompute recompute : {nn::Recompute::nothing, nn::Recompute::activations}) {
    Arena saved;
    nn::Pass pass{context, &saved, recompute};
    pass.positions = positions;
    const Tensor dx = Tensor::empty(shape, DType::f64);
    testing::poison(dx);
    testing::poison(y);
    trial.store->zero_gradients();
    trial.mixer->forward(pass, x, y, before, {});
    trial.mixer->backward(pass, x, dy, dx);
    const auto loss = [&] {
      nn::Pass inference{context};
      inference.positions = positions;
      trial.mixer->forward(inference, x, y, before, {});
      return testing::dot(y, dy);
    };
    EXPECT_EQ(testing::check_gradient("x", x, dx, loss, 24, 1e-6), "");
    for (const nn::Parameter* parameter : trial.store->parameters()) {
      EXPECT_EQ(testing::check_gradient(parameter->name.c_str(), parameter->value, parameter->gradient, loss, 8, 1e-6),
                "");
    }
  }
}

TEST_P(EveryMixer, ParametersGradientsAreAddedTo) {
  Trial trial(GetParam(), DType::f64);
  const Shape shape({1, 5, kHidden});
  const Tensor x = testing::random_normal(shape, DType::f64, 7);
  const Tensor dy = testing::random_normal(shape, DType::f64, 8);
  const Tensor y = Tensor::empty(shape, DType::f64);
  const Tensor dx = Tensor::empty(shape, DType::f64);
  Context context(Device::cpu(), 1);
  Tensor once;
  trial.store->zero_gradients();
  for (int run = 0; run < 2; ++run) {
    Arena saved;
    nn::Pass pass{context, &saved};
    trial.mixer->forward(pass, x, y, {}, {});
    trial.mixer->backward(pass, x, dy, dx);
    if (run == 0) once = testing::converted(trial.store->all_gradients(), DType::f64);
  }
  for (std::int64_t i = 0; i < once->numel(); ++i) once.as<double>()[i] *= 2.0;
  EXPECT_EQ(testing::check_close("gradients", trial.store->all_gradients(), once, 1e-12), "");
}

TEST_P(EveryMixer, StepByStepEqualsTheWhole) {
  Trial trial(GetParam(), DType::f64);
  constexpr std::int64_t kBatch = 3, kLength = 8;
  const Shape shape({kBatch, kLength, kHidden});
  const Tensor x = testing::random_normal(shape, DType::f64, 7);
  const Tensor y = Tensor::empty(shape, DType::f64);
  std::vector<Tensor> memory;
  const LayerState before = trial.make_state(kBatch, 0.5, memory);
  const LayerState stepped = trial.make_state(kBatch, 0.0, memory);
  for (std::size_t i = 0; i < before.size(); ++i) copy(before[i], stepped[i]);
  const LayerState after = trial.after(before, memory);
  const Tensor positions = positions_of(kBatch);
  Context context(Device::cpu(), 1);
  nn::Pass pass{context};
  pass.positions = positions;
  testing::poison(y);
  nn::RMSNorm norm("norm", kHidden, 1e-6);
  const nn::ParameterStore norm_store([&](const nn::ParameterVisitor& visit) { norm.for_each_parameter(visit); },
                                      DType::f64, Device::cpu(), false);
  testing::fill_normal(norm_store.parameters().front()->value, 9, 0.2, 1.0);
  const Tensor normalized = Tensor::empty(shape, DType::f64);
  norm.forward(context, x, {}, normalized, {}, {});
  trial.mixer->forward(pass, normalized, y, before, after);
  const Tensor token = Tensor::empty(Shape({kBatch, kHidden}), DType::f64);
  const Tensor expected = Tensor::empty(token->shape, DType::f64);
  for (std::int64_t t = 0; t < kLength; ++t) {
    copy(x->select(1, t), token);
    copy(x->select(1, t), expected);
    ops::elementwise::add(context, testing::converted(y->select(1, t), DType::f64), expected);
    trial.mixer->step(pass, norm, token, stepped);
    EXPECT_EQ(testing::check_close("x + y", token, expected, 1e-12), "") << t;
    for (std::int64_t n = 0; n < kBatch; ++n) ++positions.as<std::int32_t>()[n];
  }
  std::vector<std::int64_t> tokens;
  for (std::int64_t n = 0; n < kBatch; ++n) tokens.push_back(kPositions[n] + kLength);
  EXPECT_EQ(trial.compare(stepped, after, tokens), "");
}

TEST_P(EveryMixer, PiecesEqualTheWhole) {
  Trial trial(GetParam(), DType::f64);
  constexpr std::int64_t kBatch = 2, kLength = 11;
  const Tensor x = testing::random_normal(Shape({kBatch, kLength, kHidden}), DType::f64, 7);
  const Tensor y = Tensor::empty(x->shape, DType::f64);
  std::vector<Tensor> memory;
  Context context(Device::cpu(), 1);
  const Tensor whole_positions = positions_of(kBatch);
  nn::Pass pass{context};
  pass.positions = whole_positions;
  const LayerState start = trial.make_state(kBatch, 0.5, memory);
  const auto copy_of_start = [&] {
    const LayerState copied = trial.make_state(kBatch, 0.0, memory);
    for (std::size_t i = 0; i < start.size(); ++i) copy(start[i], copied[i]);
    return copied;
  };
  const LayerState before = copy_of_start();
  const LayerState end = trial.after(before, memory);
  trial.mixer->forward(pass, x, y, before, end);
  for (const std::int64_t cut : {1, 4, 10}) {
    const Tensor positions = positions_of(kBatch);
    pass.positions = positions;
    LayerState state = copy_of_start();
    for (const auto& [begin, stop] : {std::pair(std::int64_t{0}, cut), std::pair(cut, kLength)}) {
      const Tensor piece = testing::converted(x->slice(1, begin, stop), DType::f64);
      const Tensor out = Tensor::empty(piece->shape, DType::f64);
      const LayerState next = trial.after(state, memory);
      trial.mixer->forward(pass, piece, out, state, next);
      EXPECT_EQ(testing::check_close("y", out, y->slice(1, begin, stop), 1e-12), "") << cut;
      state = next;
      for (std::int64_t n = 0; n < kBatch; ++n)
        positions.as<std::int32_t>()[n] += static_cast<std::int32_t>(stop - begin);
    }
    EXPECT_EQ(trial.compare(state, end, {kPositions[0] + kLength, kPositions[1] + kLength}), "") << cut;
  }
}

TEST_P(EveryMixer, PackedSequencesEqualSeparateOnes) {
  Trial trial(GetParam(), DType::f64);
  const std::vector<std::int32_t> bounds = {0, 4, 4, 5, 11};
  const Tensor x = testing::random_normal(Shape({1, bounds.back(), kHidden}), DType::f64, 7);
  const Tensor y = Tensor::empty(x->shape, DType::f64);
  const Tensor cu_seqlens = Tensor::empty(Shape({5}), DType::i32);
  std::copy(bounds.begin(), bounds.end(), cu_seqlens.as<std::int32_t>());
  std::vector<Tensor> memory;
  const LayerState before = trial.make_state(4, 0.5, memory);
  const LayerState own_before = trial.make_state(4, 0.0, memory);
  for (std::size_t i = 0; i < before.size(); ++i) copy(before[i], own_before[i]);
  const LayerState after = trial.after(before, memory);
  const Tensor positions = positions_of(4);
  Context context(Device::cpu(), 1);
  nn::Pass packed{context};
  packed.sequences.bounds = packed.sequences.host = cu_seqlens;
  packed.positions = positions;
  testing::poison(y);
  trial.mixer->forward(packed, x, y, before, after);
  nn::Pass separate{context};
  for (std::int64_t n = 0; n < 4; ++n) {
    const std::int64_t begin = bounds[static_cast<std::size_t>(n)];
    const std::int64_t end = bounds[static_cast<std::size_t>(n) + 1];
    const auto own = [&](const LayerState& state) {
      LayerState part;
      for (const TensorView& entry : state) part.push_back(entry.slice(0, n, n + 1));
      return part;
    };
    separate.positions = positions->slice(0, n, n + 1);
    const LayerState start = own(own_before);
    const LayerState end_state = begin < end ? trial.after(start, memory) : start;
    const Tensor out = Tensor::empty(Shape({1, end - begin, kHidden}), DType::f64);
    if (begin < end) {
      trial.mixer->forward(separate, x->slice(1, begin, end), out, start, end_state);
      EXPECT_EQ(testing::check_close("y", y->slice(1, begin, end), out, 1e-12), "");
    }
    EXPECT_EQ(trial.compare(own(after), end_state, {kPositions[n] + end - begin}), "") << n;
  }
}

TEST(Registry, UnknownNamesAreRefusedWithTheKnownOnes) {
  EXPECT_THAT(testing::error_of([] { find_mixer("rnn"); }),
              ::testing::StartsWith("model_type: unknown 'rnn'; known: gla"));
}

}  // namespace
}  // namespace flashgla::mixers

// What every mixer of the registry must do, whatever it computes.
#include "flashgla/mixers/mixer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::mixers {
namespace {

constexpr std::int64_t kHidden = 16;

MixerConfig small_config() {
  MixerConfig config;
  config.hidden_size = kHidden;
  config.num_hidden_layers = 3;
  config.num_heads = 2;
  config.use_short_conv = true;
  config.conv_size = 3;
  config.gate_low_rank_dim = 5;
  return config;
}

// A mixer with parameters large enough that every part of it matters.
struct Trial {
  std::unique_ptr<Mixer> mixer;
  std::unique_ptr<nn::ParameterStore> store;

  Trial(const Registration& row, DType dtype) : mixer(row.create(small_config(), 1)) {
    store = std::make_unique<nn::ParameterStore>(
        [this](const nn::ParameterVisitor& visit) { mixer->for_each_parameter(visit); }, dtype, Device::cpu(), true);
    std::uint64_t seed = 1;
    for (const nn::Parameter* parameter : store->parameters()) {
      const bool ones = parameter->initialization == nn::Initialization::ones;
      testing::fill_normal(parameter->value, seed++, ones ? 0.1 : 0.4, ones ? 1.0 : 0.0);
    }
  }

  // Views of a fresh state for so many sequences, filled with noise of this deviation.
  LayerState make_state(std::int64_t sequences, double deviation, std::vector<Tensor>& memory) const {
    LayerState state;
    for (const StateEntry& entry : mixer->state_layout(sequences, 0)) {
      EXPECT_EQ(entry.shape[0], sequences) << entry.name;
      memory.push_back(testing::random_normal(entry.shape, entry.dtype, memory.size() + 31, deviation));
      state.push_back(memory.back());
    }
    return state;
  }
};

class EveryMixer : public ::testing::TestWithParam<const Registration*> {};

std::vector<const Registration*> rows() {
  std::vector<const Registration*> all;
  for (const Registration& row : registry()) all.push_back(&row);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Registry, EveryMixer, ::testing::ValuesIn(rows()),
                         [](const auto& row) { return std::string(row.param->name); });

TEST_P(EveryMixer, NamesItsParametersByLayerAndOnce) {
  const Trial trial(*GetParam(), DType::f32);
  std::set<std::string> names;
  for (const nn::Parameter* parameter : trial.store->parameters()) {
    EXPECT_THAT(parameter->name, ::testing::StartsWith("model.layers.1."));
    EXPECT_TRUE(names.insert(parameter->name).second);
    EXPECT_EQ(parameter->decay, parameter->shape.rank() == 2) << parameter->name << ": decay is for matrices only";
  }
  EXPECT_EQ(&find_mixer(GetParam()->name), GetParam());
  EXPECT_FALSE(std::string(GetParam()->summary).empty());
}

TEST_P(EveryMixer, GradientsAgreeWithFiniteDifferences) {
  Trial trial(*GetParam(), DType::f64);
  const Shape shape({2, 6, kHidden});
  const Tensor x = testing::random_normal(shape, DType::f64, 7);
  const Tensor dy = testing::random_normal(shape, DType::f64, 8);
  const Tensor y = Tensor::empty(shape, DType::f64);
  std::vector<Tensor> memory;
  const LayerState before = trial.make_state(2, 0.5, memory);
  Context context(Device::cpu(), 1);
  for (const nn::Recompute recompute : {nn::Recompute::nothing, nn::Recompute::activations}) {
    Arena saved;
    nn::Pass pass{context, &saved, recompute};
    const Tensor dx = Tensor::empty(shape, DType::f64);
    testing::poison(dx);
    testing::poison(y);
    trial.store->zero_gradients();
    trial.mixer->forward(pass, x, y, before, {});
    trial.mixer->backward(pass, x, dy, dx);
    const auto loss = [&] {
      nn::Pass inference{context};
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
  Trial trial(*GetParam(), DType::f64);
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
  Trial trial(*GetParam(), DType::f64);
  constexpr std::int64_t kBatch = 3, kLength = 8;
  const Shape shape({kBatch, kLength, kHidden});
  const Tensor x = testing::random_normal(shape, DType::f64, 7);
  const Tensor y = Tensor::empty(shape, DType::f64);
  std::vector<Tensor> memory;
  const LayerState before = trial.make_state(kBatch, 0.5, memory);
  const LayerState after = trial.make_state(kBatch, 0.0, memory);
  const LayerState stepped = trial.make_state(kBatch, 0.0, memory);
  for (std::size_t i = 0; i < before.size(); ++i) {
    copy(before[i], stepped[i]);
    testing::poison(after[i]);
  }
  Context context(Device::cpu(), 1);
  nn::Pass pass{context};
  trial.mixer->forward(pass, x, y, before, after);
  const Tensor token = Tensor::empty(Shape({kBatch, kHidden}), DType::f64);
  const Tensor out = Tensor::empty(token->shape, DType::f64);
  for (std::int64_t t = 0; t < kLength; ++t) {
    copy(x->select(1, t), token);
    testing::poison(out);
    trial.mixer->step(pass, token, out, stepped);
    EXPECT_EQ(testing::check_close("y", out, y->select(1, t), 1e-12), "") << t;
  }
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(testing::check_close("state", stepped[i], after[i], 1e-12), "") << i;
  }
}

TEST_P(EveryMixer, PackedSequencesEqualSeparateOnes) {
  Trial trial(*GetParam(), DType::f64);
  const std::vector<std::int32_t> bounds = {0, 4, 4, 5, 11};
  const Tensor x = testing::random_normal(Shape({1, bounds.back(), kHidden}), DType::f64, 7);
  const Tensor y = Tensor::empty(x->shape, DType::f64);
  const Tensor cu_seqlens = Tensor::empty(Shape({5}), DType::i32);
  std::copy(bounds.begin(), bounds.end(), cu_seqlens.as<std::int32_t>());
  std::vector<Tensor> memory;
  const LayerState before = trial.make_state(4, 0.5, memory);
  const LayerState after = trial.make_state(4, 0.0, memory);
  Context context(Device::cpu(), 1);
  nn::Pass packed{context};
  packed.sequences.bounds = packed.sequences.host = cu_seqlens;
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
    const LayerState end_state = trial.make_state(1, 0.0, memory);
    const Tensor out = Tensor::empty(Shape({1, end - begin, kHidden}), DType::f64);
    if (begin < end) {
      trial.mixer->forward(separate, x->slice(1, begin, end), out, own(before), end_state);
      EXPECT_EQ(testing::check_close("y", y->slice(1, begin, end), out, 1e-12), "");
    }
    for (std::size_t i = 0; i < after.size(); ++i) {
      EXPECT_EQ(testing::check_close("state", own(after)[i], begin < end ? end_state[i] : own(before)[i], 1e-12), "");
    }
  }
}

TEST(Registry, UnknownNamesAreRefusedWithTheKnownOnes) {
  EXPECT_EQ(testing::error_of([] { find_mixer("rnn"); }), "model_type: unknown 'rnn'; known: gla");
}

}  // namespace
}  // namespace flashgla::mixers

// What every mixer of the registry must do, whatever it computes.
#include "flashgla/mixers/mixer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "flashgla/mixers/registry.h"
#include "flashgla/mixers/tests/trial.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::mixers {
namespace {

class EveryMixer : public ::testing::TestWithParam<Variant> {};

INSTANTIATE_TEST_SUITE_P(Registry, EveryMixer, ::testing::ValuesIn(all_variants()),
                         [](const auto& variant) { return std::string(variant.param.row) + "_" + variant.param.name; });

TEST_P(EveryMixer, NamesItsParametersByLayerAndOnce) {
  Trial trial(GetParam(), DType::f32);
  std::set<std::string> names;
  std::set<std::string> of_model;
  trial.shared.for_each_parameter([&](const nn::Parameter& parameter) { of_model.insert(parameter.name); });
  for (const nn::Parameter* parameter : trial.store->parameters()) {
    EXPECT_THAT(parameter->name,
                ::testing::StartsWith(of_model.count(parameter->name) == 0 ? "model.layers.1." : "model."));
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
    trial.mixer->forward(pass, x, {y, {}}, before, {});
    trial.mixer->backward(pass, x, dy, dx);
    const auto loss = [&] {
      nn::Pass inference{context};
      inference.positions = positions;
      trial.mixer->forward(inference, x, {y, {}}, before, {});
      return testing::dot(y, dy);
    };
    EXPECT_EQ(testing::check_gradient("x", x, dx, loss, 24, 1e-6), "");
    for (const nn::Parameter* parameter : trial.store->parameters()) {
      EXPECT_EQ(testing::check_gradient(parameter->name.c_str(), parameter->value, parameter->gradient, loss, 8, 1e-6),
                "");
    }
  }
}

TEST_P(EveryMixer, AddsItsOutputToTheResidual) {
  Trial trial(GetParam(), DType::f64);
  const Shape shape({2, 6, kHidden});
  const Tensor x = testing::random_normal(shape, DType::f64, 7),
               residual = testing::random_normal(shape, DType::f64, 8);
  const Tensor expected = Tensor::empty(shape, DType::f64), sum = Tensor::empty(shape, DType::f64);
  const Tensor in_place = testing::converted(residual, DType::f64);
  Context context;
  nn::Pass pass{context};
  trial.mixer->forward(pass, x, {expected, {}}, {}, {});
  trial.mixer->forward(pass, x, {sum, residual}, {}, {});
  trial.mixer->forward(pass, x, {in_place, in_place}, {}, {});
  ops::elementwise::add(context, residual, expected);
  EXPECT_EQ(testing::check_close("residual + y", sum, expected, 1e-12), "");
  EXPECT_TRUE(testing::same_bits(in_place, sum));
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
    trial.mixer->forward(pass, x, {y, {}}, {}, {});
    trial.mixer->backward(pass, x, dy, dx);
    if (run == 0) once = testing::converted(trial.store->all_gradients(), DType::f64);
  }
  for (std::int64_t i = 0; i < once->numel(); ++i) once.as<double>()[i] *= 2.0;
  EXPECT_EQ(testing::check_close("gradients", trial.store->all_gradients(), once, 1e-12), "");
}

// A whole sequence of a few and its tokens one by one, behind a norm, as a block has it.
struct WholeAndSteps {
  static constexpr std::int64_t kBatch = 3;

  WholeAndSteps(Trial& of, std::int64_t length) : trial(of), shape({kBatch, length, kHidden}) {
    pass.positions = positions;
    testing::fill_normal(norm_store.parameters().front()->value, 9, 0.2, 1.0);
    testing::poison(y);
  }
  void forward(const LayerState& before, const LayerState& after) {
    const Tensor normalized = Tensor::empty(shape, DType::f64);
    norm.forward(context, x, normalized, {});
    trial.mixer->forward(pass, normalized, {y, {}}, before, after);
    trial.mixer->prepare_steps(context, DType::f64);
  }
  // Each token's step makes x + y of it.
  void expect_steps(const LayerState& state) {
    const Tensor token = Tensor::empty(Shape({kBatch, kHidden}), DType::f64);
    const Tensor expected = Tensor::empty(token->shape, DType::f64);
    for (std::int64_t t = 0; t < shape[1]; ++t) {
      copy(x->select(1, t), token);
      copy(x->select(1, t), expected);
      ops::elementwise::add(context, testing::converted(y->select(1, t), DType::f64), expected);
      trial.mixer->step(pass, norm, token, state);
      EXPECT_EQ(testing::check_close("x + y", token, expected, 1e-12), "") << t;
      for (std::int64_t n = 0; n < kBatch; ++n) ++positions.as<std::int32_t>()[n];
    }
  }

  Trial& trial;
  const Shape shape;
  const Tensor x = testing::random_normal(shape, DType::f64, 7), y = Tensor::empty(shape, DType::f64);
  const Tensor positions = positions_of(kBatch);
  Context context{Device::cpu(), 1};
  nn::Pass pass{context};
  nn::Norm norm{"norm", kHidden, 1e-6};
  const nn::ParameterStore norm_store{[this](const nn::ParameterVisitor& visit) { norm.for_each_parameter(visit); },
                                      DType::f64, Device::cpu(), false};
};

TEST_P(EveryMixer, StepByStepEqualsTheWhole) {
  Trial trial(GetParam(), DType::f64);
  constexpr std::int64_t kBatch = WholeAndSteps::kBatch, kLength = 8;
  std::vector<Tensor> memory;
  const LayerState before = trial.make_state(kBatch, 0.5, memory);
  const LayerState stepped = trial.make_state(kBatch, 0.0, memory);
  for (std::size_t i = 0; i < before.size(); ++i) copy(before[i], stepped[i]);
  const LayerState after = trial.after(before, memory);
  WholeAndSteps both(trial, kLength);
  both.forward(before, after);
  both.expect_steps(stepped);
  std::vector<std::int64_t> tokens;
  for (std::int64_t n = 0; n < kBatch; ++n) tokens.push_back(kPositions[n] + kLength);
  EXPECT_EQ(trial.compare(stepped, after, tokens), "");
}

// Of mixers whose steps can append to a ring: forward and steps go on from the same, and forward leaves zeros.
TEST_P(EveryMixer, WhatWaitsInARingIsPartOfTheState) {
  Trial trial(GetParam(), DType::f64);
  constexpr std::int64_t kBatch = WholeAndSteps::kBatch;
  const std::vector<StateEntry> rings = trial.mixer->ring_layout(kBatch, DType::f64);
  if (rings.empty()) return;
  std::vector<Tensor> memory;
  LayerState before = trial.make_state(kBatch, 0.5, memory), stepped = trial.make_state(kBatch, 0.0, memory);
  LayerState after = trial.after(before, memory);
  for (const StateEntry& entry : rings) {
    EXPECT_TRUE(entry.ring && !entry.growing && entry.shape[0] == kBatch) << entry.name;
    for (LayerState* state : {&before, &stepped, &after}) {
      memory.push_back(testing::random_normal(entry.shape, entry.dtype, 77, 0.3));
      state->push_back(memory.back());
    }
    testing::poison(after.back());
  }
  for (std::size_t i = 0; i < before.size(); ++i) copy(before[i], stepped[i]);
  WholeAndSteps both(trial, 20);
  both.forward(before, after);
  for (std::size_t i = after.size() - rings.size(); i < after.size(); ++i) {
    EXPECT_EQ(testing::check_close("ring", after[i], Tensor::zeros(after[i].shape, DType::f64), 0.0), "");
  }
  both.expect_steps(stepped);
  const Tensor token = Tensor::empty(Shape({kBatch, kHidden}), DType::f64);
  const Tensor expected = Tensor::empty(token->shape, DType::f64);
  copy(both.x->select(1, 0), token);
  copy(both.x->select(1, 0), expected);
  trial.mixer->step(both.pass, both.norm, token, stepped);
  trial.mixer->step(both.pass, both.norm, expected, after);
  EXPECT_EQ(testing::check_close("the next", token, expected, 1e-12), "");
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
  trial.mixer->forward(pass, x, {y, {}}, before, end);
  for (const std::int64_t cut : {1, 4, 10}) {
    const Tensor positions = positions_of(kBatch);
    pass.positions = positions;
    LayerState state = copy_of_start();
    for (const auto& [begin, stop] : {std::pair(std::int64_t{0}, cut), std::pair(cut, kLength)}) {
      const Tensor piece = testing::converted(x->slice(1, begin, stop), DType::f64);
      const Tensor out = Tensor::empty(piece->shape, DType::f64);
      const LayerState next = trial.after(state, memory);
      trial.mixer->forward(pass, piece, {out, {}}, state, next);
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
  trial.mixer->forward(packed, x, {y, {}}, before, after);
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
      trial.mixer->forward(separate, x->slice(1, begin, end), {out, {}}, start, end_state);
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

#include "flashgla/model/language_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "flashgla/base/names.h"
#include "flashgla/model/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"

namespace flashgla::model {
namespace {

class EverySmallModel : public ::testing::TestWithParam<SmallModel> {};
INSTANTIATE_TEST_SUITE_P(Models, EverySmallModel, ::testing::ValuesIn(small_models()),
                         [](const auto& row) { return row.param.name; });

struct Batch {
  Tensor tokens;
  Tensor targets;
  Tensor losses;
  std::int64_t count;

  Batch(std::int64_t batch, std::int64_t length, const ModelConfig& config, DType dtype)
      : tokens(random_tokens(Shape({batch, length}), config.vocab_size, 11)),
        targets(random_tokens(Shape({batch, length}), config.vocab_size, 12)),
        losses(Tensor::empty(Shape({batch * length}), dtype == DType::f64 ? DType::f64 : DType::f32)),
        count(batch * length) {
    testing::poison(losses);
  }
};

// Of finite differences: the norm of the heads' small outputs bends so much that 1e-5 leaves an error of some 1e-6.
constexpr double kStep = 1e-6;

double sum(const Tensor& losses) {
  const Tensor wide = testing::converted(losses, DType::f64);
  return std::accumulate(wide.as<double>(), wide.as<double>() + wide->numel(), 0.0);
}

TEST_P(EverySmallModel, GradientsAgreeWithFiniteDifferences) {
  const ModelConfig& config = GetParam().config;
  const auto model = make_small(config, DType::f64, true);
  Batch batch(2, 7, config, DType::f64);
  batch.targets.as<std::int32_t>()[3] = -1;
  Context context(Device::cpu(), 1);
  Arena saved;
  nn::Pass pass{context, &saved};
  model->parameters().zero_gradients();
  const double scale = 0.37;
  model->forward_backward(pass, batch.tokens, batch.targets, batch.losses, scale);
  EXPECT_EQ(batch.losses.as<double>()[3], 0.0);
  EXPECT_EQ(saved.used(), 0u);
  const auto loss = [&] {
    nn::Pass evaluation{context};
    model->evaluate(evaluation, batch.tokens, batch.targets, batch.losses);
    return scale * sum(batch.losses);
  };
  for (const nn::Parameter* parameter : model->parameters().parameters()) {
    EXPECT_EQ(testing::check_gradient(parameter->name.c_str(), parameter->value, parameter->gradient, loss, 8, kStep),
              "");
  }
}

TEST_P(EverySmallModel, PackedSequencesEqualSeparateOnes) {
  const ModelConfig& config = GetParam().config;
  const auto model = make_small(config, DType::f64, true);
  const std::vector<std::int32_t> bounds = {0, 5, 5, 6, 13};  // one is empty
  Batch packed(1, bounds.back(), config, DType::f64);
  Context context(Device::cpu(), 1);
  Arena saved;
  const Tensor cu_seqlens = int_tensor(bounds);
  nn::Pass pass{context, &saved};
  pass.sequences.bounds = pass.sequences.host = cu_seqlens;
  DecodeState state = model->make_state(4, kCapacity);
  model->parameters().zero_gradients();
  model->forward_backward(pass, packed.tokens, packed.targets, packed.losses, 1.0, &state);
  const Tensor gradients = testing::converted(model->parameters().all_gradients(), DType::f64);

  model->parameters().zero_gradients();
  nn::Pass separate{context, &saved};
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    const std::int64_t begin = bounds[i];
    const std::int64_t end = bounds[i + 1];
    if (begin == end) continue;
    DecodeState own = model->make_state(1, kCapacity);
    const Tensor losses = Tensor::empty(Shape({end - begin}), DType::f64);
    model->forward_backward(separate, packed.tokens->slice(1, begin, end), packed.targets->slice(1, begin, end), losses,
                            1.0, &own);
    EXPECT_EQ(testing::check_close("losses", packed.losses->slice(0, begin, end), losses, 1e-12), "");
    for (std::size_t layer = 0; layer < own.layer_count(); ++layer) {
      for (std::size_t entry = 0; entry < own.layer(layer).size(); ++entry) {
        EXPECT_EQ(testing::check_close("state",
                                       state.layer(layer)[entry].slice(0, static_cast<std::int64_t>(i),
                                                                       static_cast<std::int64_t>(i) + 1),
                                       own.layer(layer)[entry], 1e-12),
                  "");
      }
    }
  }
  EXPECT_EQ(testing::check_close("gradients", gradients, model->parameters().all_gradients(), 1e-12), "");
}

TEST_P(EverySmallModel, StateCarriedOverSegmentsEqualsTheWhole) {
  const ModelConfig& config = GetParam().config;
  const auto model = make_small(config, DType::f64, true);
  const std::int64_t length = 9;
  Batch whole(2, length, config, DType::f64);
  Context context(Device::cpu(), 1);
  nn::Pass pass{context};
  DecodeState end = model->make_state(2, kCapacity);
  model->evaluate(pass, whole.tokens, whole.targets, whole.losses, &end);
  for (std::int64_t cut = 1; cut < length; ++cut) {
    DecodeState state = model->make_state(2, kCapacity);
    for (const auto& [begin, stop] : {std::pair(std::int64_t{0}, cut), std::pair(cut, length)}) {
      const Tensor tokens = testing::converted(whole.tokens->slice(1, begin, stop), DType::i32);
      const Tensor targets = testing::converted(whole.targets->slice(1, begin, stop), DType::i32);
      const Tensor losses = Tensor::empty(Shape({2 * (stop - begin)}), DType::f64);
      model->evaluate(pass, tokens, targets, losses, &state);
      EXPECT_EQ(testing::check_close("losses", losses->reshape(tokens->shape),
                                     whole.losses->reshape(Shape({2, length})).slice(1, begin, stop), 1e-12),
                "");
    }
    EXPECT_EQ(compare_states(state, end, 1e-12), "");
  }
}

TEST_P(EverySmallModel, TrainingStartsFromTheStateAndLeavesItsEnd) {
  const ModelConfig& config = GetParam().config;
  const auto model = make_small(config, DType::f64, true);
  Batch batch(2, 6, config, DType::f64);
  Context context(Device::cpu(), 1);
  Arena saved;
  nn::Pass evaluation{context};
  DecodeState start = model->make_state(2, kCapacity);
  fill_state(start, 5, 0.5);
  DecodeState evaluated = model->make_state(2, kCapacity);
  copy_state(start, evaluated);
  model->evaluate(evaluation, batch.tokens, batch.targets, batch.losses, &evaluated);
  Tensor gradients;  // of the first class, whose bits the others have
  for (const nn::Recompute recompute : {nn::Recompute::nothing, nn::Recompute::activations, nn::Recompute::block}) {
    nn::Pass pass{context, &saved, recompute};
    DecodeState state = model->make_state(2, kCapacity);
    copy_state(start, state);
    model->parameters().zero_gradients();
    const Tensor losses = Tensor::empty(batch.losses->shape, DType::f64);
    model->forward_backward(pass, batch.tokens, batch.targets, losses, 1.0, &state);
    EXPECT_EQ(testing::check_close("losses", losses, batch.losses, 1e-12), "");
    EXPECT_EQ(compare_states(state, evaluated, 1e-12), "");
    if (recompute != nn::Recompute::nothing) {
      EXPECT_TRUE(testing::same_bits(model->parameters().all_gradients(), gradients));
      continue;
    }
    gradients = testing::converted(model->parameters().all_gradients(), DType::f64);
    const auto loss = [&] {
      DecodeState again = model->make_state(2, kCapacity);
      copy_state(start, again);
      model->evaluate(evaluation, batch.tokens, batch.targets, losses, &again);
      return sum(losses);
    };
    for (const nn::Parameter* parameter : model->parameters().parameters()) {
      EXPECT_EQ(testing::check_gradient(parameter->name.c_str(), parameter->value, parameter->gradient, loss, 2, kStep),
                "");
    }
  }
}

TEST_P(EverySmallModel, StepEqualsPrefillEqualsEvaluate) {
  const ModelConfig& config = GetParam().config;
  const auto model = make_small(config, DType::f64, false);
  const std::int64_t length = 9;
  const std::int64_t sequences = 3;
  const Tensor tokens = random_tokens(Shape({sequences, length}), config.vocab_size, 21);
  Context context(Device::cpu(), 1);
  DecodeState stepped = model->make_state(sequences, kCapacity);
  const Tensor logits = Tensor::empty(Shape({sequences, config.vocab_size}), DType::f64);
  const Tensor column = Tensor::empty(Shape({sequences}), DType::i32);
  double stepped_loss = 0.0;
  for (std::int64_t t = 0; t < length; ++t) {
    for (std::int64_t i = 0; i < sequences; ++i) {
      column.as<std::int32_t>()[i] = tokens.as<std::int32_t>()[i * length + t];
    }
    testing::poison(logits);
    model->step(context, column, stepped, logits);
    for (std::int64_t i = 0; i < sequences && t + 1 < length; ++i) {
      const double* row = logits.as<double>() + i * config.vocab_size;
      double total = 0.0;
      for (std::int64_t v = 0; v < config.vocab_size; ++v) total += std::exp(row[v]);
      stepped_loss += std::log(total) - row[tokens.as<std::int32_t>()[i * length + t + 1]];
    }
  }

  DecodeState filled = model->make_state(sequences, kCapacity);
  const Tensor prefilled = Tensor::empty(logits->shape, DType::f64);
  testing::poison(prefilled);
  const Tensor bounds = int_tensor({0, static_cast<std::int32_t>(length), static_cast<std::int32_t>(2 * length),
                                    static_cast<std::int32_t>(3 * length)});
  model->prefill(context, tokens->reshape(Shape({sequences * length})), {bounds, bounds}, filled, prefilled);
  EXPECT_EQ(testing::check_close("logits", logits, prefilled, 1e-12), "");
  EXPECT_EQ(compare_states(stepped, filled, 1e-12), "");

  Batch batch(sequences, length, config, DType::f64);
  for (std::int64_t i = 0; i < sequences * length; ++i) {
    batch.tokens.as<std::int32_t>()[i] = tokens.as<std::int32_t>()[i];
    batch.targets.as<std::int32_t>()[i] = i % length + 1 < length ? tokens.as<std::int32_t>()[i + 1] : -1;
  }
  nn::Pass pass{context};
  model->evaluate(pass, batch.tokens, batch.targets, batch.losses);
  EXPECT_NEAR(sum(batch.losses), stepped_loss, 1e-9);
}

TEST_P(EverySmallModel, ScoredPlacesGiveWhatTheWholeGivesThere) {
  const ModelConfig& config = GetParam().config;
  for (const DType dtype : {DType::f64, DType::bf16}) {
    const auto model = make_small(config, dtype, true);
    Batch batch(2, 9, config, dtype);
    const std::vector<std::int32_t> places = {1, 4, 8, 9, 17};  // the third is ignored
    const Tensor asked = Tensor::empty({5}, DType::i32), targets = Tensor::empty({5}, DType::i32);
    const Tensor losses = Tensor::empty({5}, batch.losses->dtype), hits = Tensor::empty({5}, batch.losses->dtype);
    for (std::int64_t i = 0; i < 5; ++i) {
      asked.as<std::int32_t>()[i] = places[static_cast<std::size_t>(i)];
      targets.as<std::int32_t>()[i] = i == 2 ? -1 : batch.targets.as<std::int32_t>()[asked.as<std::int32_t>()[i]];
    }
    std::vector<std::int32_t> all(18, -1);
    for (std::int64_t i = 0; i < 5; ++i) {
      all[static_cast<std::size_t>(asked.as<std::int32_t>()[i])] = targets.as<std::int32_t>()[i];
    }
    std::copy_n(all.data(), 18, batch.targets.as<std::int32_t>());
    Context context(Device::cpu(), 1);
    Arena saved;
    nn::Pass pass{context, &saved};
    model->parameters().zero_gradients();
    model->forward_backward(pass, batch.tokens, batch.targets, batch.losses, 0.5);
    const Tensor gradients = testing::converted(model->parameters().all_gradients(), DType::f64);
    const Tensor whole = testing::converted(batch.losses, DType::f64);
    model->parameters().zero_gradients();
    model->forward_backward(pass, batch.tokens, targets, losses, 0.5, nullptr, {asked, {}});
    EXPECT_EQ(saved.used(), 0u);
    // The head's sums run over other numbers of rows.
    const double tolerance = 64.0 * epsilon(dtype);
    EXPECT_EQ(testing::check_close("gradients", model->parameters().all_gradients(), gradients, tolerance), "");
    nn::Pass evaluation{context};
    const Tensor evaluated = Tensor::empty({5}, losses->dtype);
    model->evaluate(evaluation, batch.tokens, targets, evaluated, nullptr, {asked, hits});
    const Tensor some = testing::converted(losses, DType::f64), same = testing::converted(evaluated, DType::f64);
    const Tensor right = testing::converted(hits, DType::f64);
    for (std::int64_t i = 0; i < 5; ++i) {
      const double expected = whole.as<double>()[asked.as<std::int32_t>()[i]];
      EXPECT_NEAR(some.as<double>()[i], expected, 8.0 * epsilon(dtype) * (1.0 + expected));
      EXPECT_NEAR(same.as<double>()[i], expected, 8.0 * epsilon(dtype) * (1.0 + expected));
      EXPECT_TRUE(right.as<double>()[i] == 0.0 || right.as<double>()[i] == 1.0);
    }
    EXPECT_EQ(some.as<double>()[2], 0.0);
    EXPECT_EQ(right.as<double>()[2], 0.0);
  }
}

TEST_P(EverySmallModel, BitsAreTheSameInEveryRecomputeClassAndForAnyThreads) {
  const ModelConfig& config = GetParam().config;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto model = make_small(config, dtype, true);
    Tensor gradients;
    Tensor losses;
    std::size_t bytes = 0;
    for (const nn::Recompute recompute : {nn::Recompute::nothing, nn::Recompute::activations, nn::Recompute::block}) {
      for (const int threads : {1, 2}) {
        Batch batch(2, 70, config, dtype);
        Context context(Device::cpu(), threads);
        Arena saved;
        nn::Pass pass{context, &saved, recompute};
        model->parameters().zero_gradients();
        model->forward_backward(pass, batch.tokens, batch.targets, batch.losses, 1.0);
        if (!gradients) {
          gradients = testing::converted(model->parameters().all_gradients(), DType::f32);
          losses = testing::converted(batch.losses, DType::f32);
        }
        EXPECT_TRUE(testing::same_bits(gradients, model->parameters().all_gradients()))
            << name_of(dtype) << " " << name_of(recompute) << " " << threads << " threads";
        EXPECT_TRUE(testing::same_bits(losses, batch.losses));
        if (threads == 1) {
          EXPECT_TRUE(bytes == 0 || saved.peak() < bytes) << name_of(recompute) << " keeps no less";
          bytes = saved.peak();
        }
      }
    }
    EXPECT_TRUE(testing::difference(gradients, gradients).finite);
  }
}

// A dropout whose numbers lie in memory of its own.
struct SmallDropout {
  Tensor step = Tensor::zeros({1}, DType::f64), micro_batch = Tensor::zeros({1}, DType::i32);
  nn::Dropout of(double probability) const { return {probability, probability, probability, 5, step, micro_batch}; }
};

TEST_P(EverySmallModel, GradientsWithDropoutAgreeWithFiniteDifferences) {
  const ModelConfig& config = GetParam().config;
  const auto model = make_small(config, DType::f64, true);
  Batch batch(2, 7, config, DType::f64);
  Context context(Device::cpu(), 1);
  const SmallDropout numbers;
  Tensor gradients;  // of the first class, whose bits the others have
  for (const nn::Recompute recompute : {nn::Recompute::nothing, nn::Recompute::activations, nn::Recompute::block}) {
    Arena saved;
    nn::Pass pass{context, &saved, recompute};
    pass.dropout = numbers.of(0.25);
    model->parameters().zero_gradients();
    model->forward_backward(pass, batch.tokens, batch.targets, batch.losses, 1.0);
    if (recompute != nn::Recompute::nothing) {
      EXPECT_TRUE(testing::same_bits(model->parameters().all_gradients(), gradients));
      continue;
    }
    gradients = testing::converted(model->parameters().all_gradients(), DType::f64);
    const auto loss = [&] {
      model->forward_backward(pass, batch.tokens, batch.targets, batch.losses, 1.0);
      return sum(batch.losses);
    };
    std::int64_t begin = 0;
    for (const nn::Parameter* parameter : model->parameters().parameters()) {
      const std::int64_t end = begin + parameter->shape.numel();
      EXPECT_EQ(testing::check_gradient(parameter->name.c_str(), parameter->value,
                                        gradients->slice(0, begin, end).reshape(parameter->shape), loss, 2, kStep),
                "");
      begin = end;
    }
  }
}

TEST_P(EverySmallModel, BitsWithDropoutAreTheSameInEveryRecomputeClassAndOtherAtAnotherStep) {
  const ModelConfig& config = GetParam().config;
  const auto model = make_small(config, DType::bf16, true);
  const SmallDropout numbers;
  const auto gradients_in = [&](nn::Recompute recompute, int threads) {
    Batch batch(2, 70, config, DType::bf16);
    Context context(Device::cpu(), threads);
    Arena saved;
    nn::Pass pass{context, &saved, recompute};
    pass.dropout = numbers.of(0.1);
    model->parameters().zero_gradients();
    model->forward_backward(pass, batch.tokens, batch.targets, batch.losses, 1.0);
    return testing::converted(model->parameters().all_gradients(), DType::f32);
  };
  const Tensor first = gradients_in(nn::Recompute::nothing, 1);
  EXPECT_TRUE(testing::same_bits(first, gradients_in(nn::Recompute::activations, 2)));
  EXPECT_TRUE(testing::same_bits(first, gradients_in(nn::Recompute::block, 1)));
  numbers.step.as<double>()[0] = 1.0;
  EXPECT_FALSE(testing::same_bits(first, gradients_in(nn::Recompute::nothing, 1)));
  numbers.step.as<double>()[0] = 0.0;
  numbers.micro_batch.as<std::int32_t>()[0] = 1;
  EXPECT_FALSE(testing::same_bits(first, gradients_in(nn::Recompute::nothing, 1)));
}

TEST_P(EverySmallModel, PlannedMemoryIsWhatTheStepTakes) {
  const ModelConfig& config = GetParam().config;
  const auto model = make_small(config, DType::f32, true);
  Batch batch(2, 40, config, DType::f32);
  for (const nn::Recompute recompute : {nn::Recompute::nothing, nn::Recompute::activations, nn::Recompute::block}) {
    Context context(Device::cpu(), 1);
    Arena saved;
    nn::Pass pass{context, &saved, recompute};
    DecodeState state = model->make_state(2, kCapacity);
    saved.begin_planning();
    context.scratch().begin_planning();
    model->forward_backward(pass, batch.tokens, batch.targets, batch.losses, 1.0, &state);
    EXPECT_GT(saved.peak(), 0u);
    saved.commit_plan();
    context.scratch().commit_plan();
    model->forward_backward(pass, batch.tokens, batch.targets, batch.losses, 1.0, &state);
    EXPECT_TRUE(testing::difference(batch.losses, batch.losses).finite);
  }
}

TEST(LanguageModel, Bf16AndF32AgreeWithF64) {
  ModelConfig config = small_models().front().config;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_hidden_layers = 4;
  Batch exact(2, 65, config, DType::f64);
  LanguageModel reference(config, DType::f64, Device::cpu(), true);
  Context context(Device::cpu(), 1);
  Arena saved;
  nn::Pass pass{context, &saved};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    LanguageModel model(config, dtype, Device::cpu(), true);
    model.parameters().initialize(3);
    for (std::size_t i = 0; i < model.parameters().parameters().size(); ++i) {
      copy(model.parameters().parameters()[i]->value, reference.parameters().parameters()[i]->value);
    }
    reference.parameters().zero_gradients();
    model.parameters().zero_gradients();
    reference.forward_backward(pass, exact.tokens, exact.targets, exact.losses, 1.0);
    Batch batch(2, 65, config, dtype);
    model.forward_backward(pass, batch.tokens, batch.targets, batch.losses, 1.0);
    // What each operator is held to, and for gradients eight times it: they went through every layer twice.
    const double allowed = testing::tolerance(dtype);
    EXPECT_EQ(testing::check_close("losses", batch.losses, exact.losses, allowed), "");
    EXPECT_EQ(testing::check_close("gradients", model.parameters().all_gradients(),
                                   reference.parameters().all_gradients(), 8 * allowed),
              "");
  }
}

TEST(LanguageModel, GradientDescentLowersTheLoss) {
  const ModelConfig config = small_models().front().config;
  LanguageModel model(config, DType::f32, Device::cpu(), true);
  model.parameters().initialize(7);
  Batch batch(2, 16, config, DType::f32);
  Context context(Device::cpu(), 1);
  Arena saved;
  nn::Pass pass{context, &saved};
  std::vector<double> losses;
  for (int step = 0; step < 300; ++step) {
    model.parameters().zero_gradients();
    model.forward_backward(pass, batch.tokens, batch.targets, batch.losses, 1.0 / static_cast<double>(batch.count));
    losses.push_back(sum(batch.losses) / static_cast<double>(batch.count));
    for (const nn::Parameter* parameter : model.parameters().parameters()) {
      for (std::int64_t i = 0; i < parameter->value.numel(); ++i) {
        parameter->value.as<float>()[i] -= 0.1f * parameter->gradient.as<float>()[i];
      }
    }
  }
  EXPECT_NEAR(losses.front(), std::log(17.0), 0.1);
  EXPECT_LT(losses.back(), 0.2 * losses.front()) << "32 random targets can be learnt by heart";
}

TEST(LanguageModel, InitialValuesAreTheSameOnEveryDevice) {
  for (const ModelConfig& config : {small_models().front().config, small_models().back().config}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      LanguageModel cpu(config, dtype, Device::cpu(), false);
      cpu.parameters().initialize(5);
      for (const Device device : testing::test_devices()) {
        LanguageModel here(config, dtype, device, false);
        here.parameters().initialize(5);
        const Tensor values = testing::copied_to(here.parameters().all_values(), Device::cpu());
        EXPECT_TRUE(testing::same_bits(values, cpu.parameters().all_values())) << flashgla::name_of(device);
      }
    }
  }
}

TEST(LanguageModel, InitialisationDependsOnSeedAndNameAlone) {
  const ModelConfig config = small_models().front().config;
  ModelConfig deeper = config;
  deeper.num_hidden_layers = 3;
  LanguageModel a(config, DType::f32, Device::cpu(), false);
  LanguageModel b(deeper, DType::f32, Device::cpu(), true);
  LanguageModel c(config, DType::f32, Device::cpu(), false);
  a.parameters().initialize(1);
  b.parameters().initialize(1);
  c.parameters().initialize(2);
  double squares = 0.0;
  std::int64_t count = 0;
  for (const nn::Parameter* parameter : a.parameters().parameters()) {
    for (const nn::Parameter* other : b.parameters().parameters()) {
      if (other->name != parameter->name) continue;
      EXPECT_TRUE(testing::same_bits(parameter->value, other->value)) << parameter->name;
    }
    for (const nn::Parameter* other : c.parameters().parameters()) {
      if (other->name != parameter->name) continue;
      EXPECT_EQ(testing::same_bits(parameter->value, other->value),
                parameter->initialization == nn::Initialization::zeros ||
                    parameter->initialization == nn::Initialization::ones);
    }
    if (parameter->initialization != nn::Initialization::normal) continue;
    for (std::int64_t i = 0; i < parameter->value.numel(); ++i, ++count) {
      squares += std::pow(parameter->value.as<float>()[i] / parameter->deviation, 2.0);
    }
  }
  EXPECT_NEAR(squares / static_cast<double>(count), 1.0, 0.05);
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(LanguageModel, BadCallsAreRefusedWithTheArgumentNamed) {
  const ModelConfig config = small_models().front().config;
  const auto model = make_small(config, DType::f32, false);
  Batch batch(2, 5, config, DType::f32);
  Context context(Device::cpu(), 1);
  nn::Pass pass{context};
  EXPECT_EQ(message_of([&] { model->evaluate(pass, batch.tokens, batch.targets->slice(1, 0, 4), batch.losses); }),
            "evaluate: targets is i32 [2,4]; expected i32 [2,5] (as tokens)");
  EXPECT_EQ(message_of([&] { model->forward_backward(pass, batch.tokens, batch.targets, batch.losses, 1.0); }),
            "forward_backward: the model was made for inference; make it with training = true");
  DecodeState state = model->make_state(3);
  EXPECT_EQ(message_of([&] { model->evaluate(pass, batch.tokens, batch.targets, batch.losses, &state); }),
            "evaluate: state is of 3 sequences; expected 2 (as in the batch)");
  const Tensor logits = Tensor::empty(Shape({3, config.vocab_size}), DType::f32);
  const Tensor bounds = int_tensor({0, 1, 1, 3});
  EXPECT_EQ(message_of([&] {
              model->prefill(context, int_tensor({1, 2, 3}), {bounds, bounds}, state, logits);
            }),
            "prefill: sequence 1 has no token");
  batch.tokens.as<std::int32_t>()[4] = 17;
  EXPECT_THAT(message_of([&] { model->evaluate(pass, batch.tokens, batch.targets, batch.losses); }),
              ::testing::HasSubstr("17"));
}

TEST(LanguageModel, TokensBehindHyenasFilterAreRefused) {
  const auto model = make_small(
      parse_config(R"({"model_type": "hyena", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9, "l_max": 4})",
                   "hyena"),
      DType::f32, false);
  EXPECT_EQ(message_of([&] { model->make_state(1, 5); }),
            "decode state: tokens are to be 5 a sequence; expected at most the 4 tokens of its filter (l_max)");
}

TEST(LanguageModel, TokensBehindTheLearnedPositionsAreRefused) {
  ModelConfig config = small_models().front().config;
  config.learned_positions = true;
  config.max_position_embeddings = 4;
  const auto model = make_small(config, DType::f32, true);
  Batch batch(2, 5, config, DType::f32);
  Context context(Device::cpu(), 1);
  nn::Pass pass{context};
  const std::string behind = " positions that the model has learned (max_position_embeddings)";
  EXPECT_EQ(message_of([&] { model->evaluate(pass, batch.tokens, batch.targets, batch.losses); }),
            "evaluate: tokens reach position 5 of a sequence; expected at most the 4" + behind);
  EXPECT_EQ(message_of([&] { model->make_state(1, 5); }),
            "decode state: tokens are to be 5 a sequence; expected at most the 4" + behind);
  // Packed, each sequence is short enough; behind a history it is not.
  Batch packed(1, 6, config, DType::f32);
  const Tensor bounds = int_tensor({0, 2, 6});
  pass.sequences.bounds = pass.sequences.host = bounds;
  EXPECT_EQ(message_of([&] { model->evaluate(pass, packed.tokens, packed.targets, packed.losses); }), "no error");
  DecodeState state = model->make_state(2);
  state.history[1].tokens = 1;
  EXPECT_EQ(message_of([&] { model->evaluate(pass, packed.tokens, packed.targets, packed.losses, &state); }),
            "evaluate: tokens reach position 5 of a sequence; expected at most the 4" + behind);
}

}  // namespace
}  // namespace flashgla::model

// Whole runs: accumulation, carried states, non-finite gradients, odd sizes, the memory plan, refusals.
#include "flashgla/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/data/dataset.h"
#include "flashgla/train/tests/trainer_runs.h"
#include "testing/devices.h"

namespace flashgla::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using TrainerTest = TrainerRuns;

TEST_F(TrainerTest, ARunEndsWhenValidationSaysSo) {
  std::string why;
  Events events;
  events.notice = [&](const std::string& line) { why += line; };
  TrainConfig reached = task_config("reached");
  reached.stop_accuracy = 1e-9;  // that of any right answer
  reached.train_tokens = 400 * 256;
  reached.evaluate_every = 20;
  reached.learning_rate = 1e-2;
  EXPECT_EQ(Trainer(reached, events, false).run(), Outcome::finished);
  EXPECT_THAT(why, HasSubstr("reached stop_accuracy"));
  EXPECT_LT(rows(reached, "eval").back().step, 400);
  EXPECT_GT(rows(reached, "eval").back().accuracy, 0.0);

  TrainConfig flat = task_config("flat");
  flat.learning_rate = flat.initial_learning_rate = flat.final_learning_rate = 1e-30;  // weights stay
  flat.evaluate_every = 2;
  flat.patience = 3;
  why.clear();
  int seen = 0;
  events.stop_requested = [&] { return ++seen == 5; };
  EXPECT_EQ(Trainer(flat, events, false).run(), Outcome::interrupted);
  EXPECT_EQ(Trainer(flat, events, true).run(), Outcome::finished);  // goes on counting
  EXPECT_THAT(why, HasSubstr("3 evaluations in a row"));
  EXPECT_EQ(rows(flat, "eval").back().step, 8);
  why.clear();
  EXPECT_EQ(Trainer(flat, events, true).run(), Outcome::finished);  // nothing is left to do
  EXPECT_EQ(rows(flat).back().step, 8);

  TrainConfig text = config("text");
  text.stop_accuracy = 0.5;
  EXPECT_THAT([&] { Trainer(text, {}, false); }, ThrowsMessage<Error>(HasSubstr("stop_accuracy")));
}

TEST_F(TrainerTest, DropoutIsOfTrainingAlone) {
  TrainConfig plain = config("plain");
  plain.learning_rate = plain.initial_learning_rate = plain.final_learning_rate = 1e-30;  // weights stay
  TrainConfig dropping = plain;
  dropping.out = config("dropping").out;
  dropping.dropout = 0.3;
  Trainer without(plain, {}, false), with(dropping, {}, false);
  EXPECT_EQ(without.evaluate(0).loss, with.evaluate(0).loss);
  EXPECT_NE(without.step().loss, with.step().loss);
  EXPECT_EQ(without.evaluate(0).loss, with.evaluate(0).loss);
}

TEST_F(TrainerTest, AccumulatedMicroBatchesAreTheLargeBatch) {
  for (const char* order : {"windows", "segments"}) {
    SCOPED_TRACE(order);
    TrainConfig large = config("large", order);
    train(large);
    for (std::int64_t micro : {1, 2}) {
      TrainConfig small = config("small", order);
      small.micro_batch = micro;
      train(small);
      const auto a = rows(large);
      const auto b = rows(small);
      ASSERT_EQ(a.size(), b.size());
      // Rounding differs, and grows over the steps.
      for (std::size_t i = 0; i < a.size(); ++i) {
        EXPECT_NEAR(a[i].loss, b[i].loss, 1e-4 * a[i].loss);
        EXPECT_NEAR(a[i].gradient_norm, b[i].gradient_norm, (i == 0 ? 1e-5 : 5e-3) * a[i].gradient_norm);
      }
      EXPECT_NEAR(a[0].loss, b[0].loss, 1e-6 * a[0].loss);
      fs::remove_all(small.out);
    }
    TearDown();
  }
}

TEST_F(TrainerTest, LossFalls) {
  for (const char* dtype : {"f32", "bf16"}) {
    for (const char* order : {"windows", "segments", "packed"}) {
      TrainConfig run = config(std::string("falls_") + dtype + order, order);
      run.dtype = dtype;
      run.train_tokens = 60 * 256;
      train(run);
      const auto result = rows(run);
      EXPECT_NEAR(result.front().loss, std::log(258.0), 0.3) << dtype << " " << order;
      EXPECT_LT(result.back().loss, 2.6) << dtype << " " << order;
      const auto evaluations = rows(run, "eval");
      EXPECT_LT(evaluations.back().loss, 2.6);
      // A byte a token, and one target fewer than a document has tokens: bos and eos are no bytes.
      const double bytes_per_target = data::open_dataset(run.data).validation_bytes_per_target;
      EXPECT_LE(bytes_per_target, 1.0);
      EXPECT_GT(bytes_per_target, 0.95);
      EXPECT_DOUBLE_EQ(evaluations.back().bits_per_byte, evaluations.back().loss / std::log(2.0) / bytes_per_target);
    }
  }
}

// With the state carried from segment to segment, the cut of the sequence does not matter to the loss.
TEST_F(TrainerTest, WhatIsEvaluatedDoesNotDependOnTheMicroBatch) {
  for (const char* order : {"windows", "segments", "packed", "labelled"}) {
    const bool task = order == std::string("labelled");
    for (const std::int64_t tokens : {0, 100, 1000}) {
      SCOPED_TRACE(std::string(order) + " " + std::to_string(tokens));
      std::optional<Evaluation> whole;
      for (const std::int64_t micro_batch : {4, 2, 1}) {
        TrainConfig run = task ? task_config("evaluated") : config("evaluated", order);
        run.micro_batch = micro_batch;
        const Evaluation evaluation = Trainer(run, {}, false).evaluate(tokens);
        if (!whole) whole = evaluation;
        EXPECT_EQ(evaluation.targets, whole->targets);
        // Packed documents are cut where a micro-batch ends.
        EXPECT_NEAR(evaluation.loss, whole->loss, order == std::string("packed") ? 0.05 : 1e-6);
      }
      if (tokens > 0) EXPECT_EQ(whole->targets, task ? std::min<std::int64_t>(tokens / 32, 21) * 4 : tokens);
    }
  }
}

TEST_F(TrainerTest, CarriedStatesMakeOneLongSequence) {
  TrainConfig run = config("carried", "segments");
  run.segments = 0;
  train(run);
  const auto evaluate = [&](std::int64_t length, const char* order, std::int64_t segments) {
    TrainConfig other = config("other", order);
    other.initial_weights = run.out;
    other.sequence_length = length;
    other.batch_tokens = 2 * length;
    other.segments = segments;
    const double loss = Trainer(other, {}, false).evaluate(0).loss;
    fs::remove_all(other.out);
    return loss;
  };
  const double whole = evaluate(64, "segments", 0);
  EXPECT_NEAR(evaluate(32, "segments", 0), whole, 2e-5 * whole);
  EXPECT_GT(std::abs(evaluate(32, "windows", 1) - whole), 1e-3 * whole);  // where it is not carried
}

TEST_F(TrainerTest, NonFiniteGradientsNeverReachTheWeights) {
  TrainConfig run = config("poison");
  run.max_skipped_updates = 3;
  Trainer trainer(run, {}, false);
  trainer.step();
  nn::Parameter& victim = *trainer.model().parameters().parameters()[3];
  const float before = element(victim.value, 1);
  set_element(victim.value, 1, std::numeric_limits<float>::quiet_NaN());
  const auto snapshot = [&] {
    std::string bytes;
    for (const nn::Parameter* parameter : trainer.model().parameters().parameters()) {
      bytes += bytes_of(parameter->value);
    }
    for (const model::NamedTensor& state : trainer.state_tensors()) {
      bytes += bytes_of(state.tensor);
    }
    return bytes;
  };
  const std::string untouched = snapshot();
  const MetricsRow skipped = trainer.step();
  EXPECT_EQ(skipped.kind, "skipped");
  EXPECT_THAT(skipped.message, HasSubstr("no update, weights as before"));
  EXPECT_THAT(skipped.message, HasSubstr("model."));
  EXPECT_TRUE(snapshot() == untouched);

  set_element(victim.value, 1, before);  // the cause is gone: training goes on
  EXPECT_EQ(trainer.step().kind, "train");

  set_element(victim.value, 1, std::numeric_limits<float>::infinity());
  EXPECT_THAT(
      [&] { trainer.run(); },
      ThrowsMessage<Error>(AllOf(HasSubstr("3 updates in a row were not made"), HasSubstr("there is no checkpoint"),
                                 HasSubstr("Try a lower learning_rate"), HasSubstr("of step 3"))));
  const auto reported = rows(run, "skipped");
  ASSERT_EQ(reported.size(), 3u);
  EXPECT_EQ(reported.front().step, 4);
}

// The states that a step which was not made would have carried on are zeros, and every device says what the CPU says.
TEST_F(TrainerTest, CarriedStatesOfAStepThatWasNotMadeAreForgotten) {
  const auto rows_of = [&](const std::string& on) {
    TrainConfig run = config("forgotten_" + on.substr(0, 3), "segments");
    run.device = on;
    Trainer trainer(run, {}, false);
    const auto carries = [&] {  // anything but zeros
      const std::vector<model::NamedTensor> states = trainer.state_tensors();
      return std::any_of(states.begin(), states.end(), [&](const model::NamedTensor& state) {
        return state.name.starts_with("carried_state") &&
               bytes_of(state.tensor).find_first_not_of('\0') != std::string::npos;
      });
    };
    std::vector<MetricsRow> seen = {trainer.step()};
    EXPECT_TRUE(carries());
    nn::Parameter& victim = *trainer.model().parameters().parameters()[3];
    const float before = element(victim.value, 1);
    set_element(victim.value, 1, std::numeric_limits<float>::quiet_NaN());
    seen.push_back(trainer.step());
    EXPECT_FALSE(carries());
    set_element(victim.value, 1, before);
    seen.push_back(trainer.step());
    EXPECT_TRUE(carries());
    fs::remove_all(run.out);
    return seen;
  };
  const auto here = rows_of(name_of(device())), cpu = rows_of("cpu");
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    EXPECT_EQ(here[i].kind, i == 1 ? "skipped" : "train");
    EXPECT_EQ(here[i].kind, cpu[i].kind);
    EXPECT_EQ(here[i].step, cpu[i].step);
    EXPECT_EQ(here[i].message, cpu[i].message);
    if (i != 1) {
      EXPECT_NEAR(here[i].loss, cpu[i].loss, 1e-4);
    }
  }
}

TEST_F(TrainerTest, NothingIsAllocatedInTheLoop) {
  for (const char* order : {"windows", "segments", "packed"}) {
    for (const char* recompute : {"nothing", "block"}) {
      SCOPED_TRACE(std::string(order) + " " + recompute);
      TrainConfig run = config("plan", order);
      run.recompute = recompute;
      Trainer trainer(run, {}, false);
      std::size_t scratch = 0;
      std::size_t activations = 0;
      for (const MemoryPlan::Row& row : trainer.plan().rows) {
        if (row.group == "scratch") scratch += row.bytes;
        if (row.group == "activations") activations += row.bytes;
      }
      EXPECT_GT(scratch, 0u);
      EXPECT_GT(activations, 0u);
      for (int i = 0; i < 30; ++i) trainer.step();  // until what is recorded has been
      trainer.evaluate(1024);
      trainer.evaluate(1024);
      // The arenas are frozen: a byte more than planned would have been an Error. Nor does anything else grow.
      const struct mallinfo2 before = ::mallinfo2();
      for (int i = 0; i < 10; ++i) trainer.step();
      trainer.evaluate(1024);
      const struct mallinfo2 after = ::mallinfo2();
      const auto in_use = [](const struct mallinfo2& info) { return info.uordblks + info.hblkhd; };
      EXPECT_LE(in_use(after), in_use(before) + 4096);
      EXPECT_EQ(trainer.context().scratch().used(), 0u);
      EXPECT_EQ(trainer.context().scratch().peak(), scratch);
      fs::remove_all(run.out);
    }
  }
}

// Rows and a vocabulary that are no multiple of 8, one sequence, one token: nothing is read that was not written, and
// the CPU's losses come out.
TEST_F(TrainerTest, OddSizes) {
  struct Size {
    std::int64_t sequences, length;
  };
  for (const Size size : {Size{3, 130}, Size{1, 13}, Size{1, 1}}) {
    for (const char* dtype : {"f32", "bf16"}) {
      SCOPED_TRACE(std::to_string(size.sequences) + " x " + std::to_string(size.length) + " " + dtype);
      TrainConfig run = config("odd");
      run.dtype = dtype;
      run.sequence_length = size.length;
      run.batch_tokens = size.sequences * size.length;
      run.train_tokens = 5 * run.batch_tokens;
      run.warmup_tokens = 0;
      run.evaluate_every = 0;
      train(run);
      TrainConfig poisoned = run;
      poisoned.out = config("poisoned").out;
      expect_same(rows(run), rows_from_poisoned_memory(poisoned));
      TrainConfig cpu = run;
      cpu.out = config("cpu").out;
      cpu.device = "cpu";
      cpu.dtype = "f32";
      train(cpu);
      for (std::size_t i = 0; i < rows(cpu).size(); ++i) {
        EXPECT_NEAR(rows(run)[i].loss, rows(cpu)[i].loss, run.dtype == "f32" ? 1e-5 : 3e-2) << i;
      }
      TearDown();
    }
  }
}

// Beside the CPU's f32: within 1e-3 nats at each of 200 steps. With the rate of the other tests (3e-3) training of this
// model is unstable: the loss rises and falls, and what differs in rounding alone parts by 0.06 nats. At 1e-3, reached
// slowly, two of the CPU's own forms stay within 2e-7, so that what a device computes shows.
TEST_F(TrainerTest, EveryDeviceFollowsTheCpu) {
  if (device() == Device::cpu()) GTEST_SKIP() << "no GPU";
  for (const std::string order : {"windows", "segments", "packed"}) {
    const auto losses = [&](const std::string& name, const std::string& on, std::int64_t micro_batch) {
      TrainConfig run = config(name + order, order);
      run.train_tokens = 200 * 256;
      run.learning_rate = 1e-3;
      run.warmup_tokens = 20 * 256;
      run.evaluate_every = 0;
      run.device = on;
      run.micro_batch = micro_batch;
      train(run);
      return rows(run);
    };
    const auto apart = [](const std::vector<MetricsRow>& a, const std::vector<MetricsRow>& b) {
      EXPECT_EQ(a.size(), 200u);
      double largest = 0.0;
      for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i].loss - b[i].loss));
      return largest;
    };
    const auto cpu = losses("cpu_", "cpu", 0);
    EXPECT_LT(cpu.back().loss, 2.0);  // from 5.5
    EXPECT_LT(apart(losses("here_", name_of(device()), 0), cpu), 1e-3) << order;
    // Packed batches have no second form: another micro-batch packs other documents.
    if (order != "packed") {
      EXPECT_LT(apart(losses("form_", "cpu", 1), cpu), 1e-5) << order;
    }
  }
}

TEST_F(TrainerTest, MemoryLimitChoosesTheForm) {
  const auto activations = [](const MemoryPlan& plan) {
    std::size_t bytes = 0;
    for (const MemoryPlan::Row& row : plan.rows) bytes += row.group == "activations" ? row.bytes : 0;
    return bytes;
  };
  TrainConfig run = config("limit");
  run.batch_tokens = 16 * 64;
  std::size_t model = 0;  // without any step
  const std::size_t free = [&] {
    const Trainer trainer(run, {}, false);
    EXPECT_EQ(trainer.config().recompute, "nothing");
    EXPECT_EQ(trainer.config().micro_batch, 16);
    for (std::size_t i = 0; i < 3; ++i) model += trainer.plan().rows[i].bytes;  // parameters, gradients, moments
    return trainer.plan().total();
  }();
  std::size_t previous = free + 1;
  for (const double share : {0.8, 0.6, 0.5}) {
    fs::remove_all(run.out);
    const auto limit = static_cast<std::size_t>(share * static_cast<double>(free));
    run.memory_limit = std::to_string(limit);
    const Trainer trainer(run, {}, false);
    EXPECT_LE(trainer.plan().total(), limit);
    EXPECT_LE(activations(trainer.plan()), previous);
    previous = activations(trainer.plan());
  }
  run.memory_limit = "100KB";
  EXPECT_THAT([&] { Trainer(run, {}, false); },
              ThrowsMessage<Error>(HasSubstr("are allowed; remedies: optimizer_state half, a smaller model")));
  run.memory_limit = std::to_string(model + 1000);
  EXPECT_THAT([&] { Trainer(run, {}, false); },
              ThrowsMessage<Error>(HasSubstr("are allowed; remedies: optimizer_state half, a smaller batch_tokens")));
  run.recompute = "nothing";
  run.micro_batch = 4;
  EXPECT_THAT([&] { Trainer(run, {}, false); },
              ThrowsMessage<Error>(HasSubstr("remedies: micro_batch 0, recompute automatic, optimizer_state half, ")));
  run.memory_limit = "much";
  EXPECT_THAT([&] { Trainer(run, {}, false); },
              ThrowsMessage<Error>(HasSubstr("memory_limit: 'much' is not a number")));
}

// A model that does not name its vocabulary's size takes the data's, in the configuration and in a file of its own.
// What has room nowhere is refused before it is taken.
TEST_F(TrainerTest, AModelThatIsTooLargeIsRefusedByItsShape) {
  TrainConfig run = config("huge");
  run.model = R"({"hidden_size": 65536, "num_hidden_layers": 96, "num_heads": 64})";
  EXPECT_THAT(
      [&] { Trainer(run, {}, false); },
      ThrowsMessage<Error>(::testing::MatchesRegex(
          "training: [0-9.]+ GiB of memory are needed on .*; remedies: optimizer_state half, a smaller model")));
  for (const std::string dtype : {"f32", "bf16"}) {
    for (const std::string state : {"full", "split_master", "half"}) {
      TrainConfig small = config("shape");
      small.dtype = dtype;
      small.optimizer_state = state;
      Trainer trainer(small, {}, false, /*plan_only=*/true);
      std::size_t planned = 0;
      for (const MemoryPlan::Row& row : trainer.plan().rows) planned += row.group == "optimizer" ? row.bytes : 0;
      std::size_t taken = 0;
      for (const model::NamedTensor& tensor : trainer.state_tensors()) taken += tensor.tensor.bytes();
      EXPECT_EQ(planned, taken) << dtype << " " << state;
      EXPECT_EQ(trainer.plan().rows[0].bytes, trainer.model().parameters().value_bytes());
      EXPECT_EQ(trainer.plan().rows[1].bytes, trainer.model().parameters().gradient_bytes());
    }
  }
}

TEST_F(TrainerTest, InitialWeightsAndTheModelOfTheConfigurationAgree) {
  const TrainConfig first = config("first");
  train(first);
  TrainConfig second = config("second");
  second.initial_weights = first.out;
  EXPECT_NO_THROW(Trainer(second, {}, false));
  second.model = R"({"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2})";
  EXPECT_THAT([&] { Trainer(second, {}, false); },
              ThrowsMessage<Error>(HasSubstr("model: num_hidden_layers is 1; expected 2 as in ")));
}

TEST_F(TrainerTest, ModelWithoutAVocabularyTakesTheDatas) {
  const std::string shape = R"({"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2)";
  TrainConfig run = config("vocabulary");
  const std::int64_t words = data::open_dataset(run.data).vocab_size;
  const std::string path = (root_ / "model.json").string();
  for (const std::int64_t named : {std::int64_t{0}, std::int64_t{1000}}) {
    const std::string json = shape + (named ? ", \"vocab_size\": 1000}" : "}");
    std::ofstream(path) << json;
    for (const std::string& model : {json, path}) {
      run.model = model;
      EXPECT_EQ(Trainer(run, {}, false).model().config().vocab_size, named ? named : words) << model;
      fs::remove_all(run.out);
    }
  }
}

// One token, one sequence, sizes that no tile divides.
TEST_F(TrainerTest, OddSizesTrain) {
  for (const std::int64_t length : {1, 7, 61}) {
    for (const char* dtype : {"f32", "bf16"}) {
      TrainConfig run = config("odd");
      run.model = R"({"hidden_size": 24, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 34,
                      "vocab_size": 259})";
      run.sequence_length = run.batch_tokens = length;
      run.train_tokens = 5 * length;
      run.warmup_tokens = 0;
      run.dtype = dtype;
      train(run);
      for (const MetricsRow& row : rows(run)) EXPECT_NEAR(row.loss, std::log(259.0), 0.5) << length << " " << dtype;
      fs::remove_all(run.out);
    }
  }
}

TEST_F(TrainerTest, RecomputeSavesActivations) {
  std::size_t previous = std::numeric_limits<std::size_t>::max();
  for (const char* recompute : {"nothing", "activations", "block"}) {
    TrainConfig run = config("less");
    run.model = R"({"hidden_size": 32, "num_hidden_layers": 8, "num_heads": 2, "intermediate_size": 64})";
    run.recompute = recompute;
    const Trainer trainer(run, {}, false);
    std::size_t activations = 0;
    for (const MemoryPlan::Row& row : trainer.plan().rows) activations += row.group == "activations" ? row.bytes : 0;
    EXPECT_LT(activations, previous) << recompute;
    previous = activations;
    fs::remove_all(run.out);
  }
}

TEST_F(TrainerTest, RefusalsNameTheThingAndTheRemedy) {
  TrainConfig run = config("refusals");
  train(run);
  EXPECT_THAT([&] { Trainer(run, {}, false); }, ThrowsMessage<Error>(HasSubstr("go on with --resume")));
  TrainConfig other = config("refusals2");
  other.model = R"({"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 100,
                    "bos_token_id": 1, "eos_token_id": 2})";
  EXPECT_THAT([&] { Trainer(other, {}, false); }, ThrowsMessage<Error>(HasSubstr("vocab_size is 100")));
  other = config("refusals3");
  other.batch_tokens = 100;
  EXPECT_THAT([&] { Trainer(other, {}, false); },
              ThrowsMessage<Error>(HasSubstr("batch_tokens is 100; expected a multiple of sequence_length (64)")));
  data::PrepareOptions pieces;
  pieces.inputs = {(root_ / "one.txt").string()};
  pieces.out = (root_ / "run_pieces_data").string();
  pieces.tokenizer = "train:300";
  data::prepare(pieces);
  other = config("refusals5");
  other.data = pieces.out;
  other.initial_weights = run.out;
  EXPECT_THAT([&] { Trainer(other, {}, false); }, ThrowsMessage<Error>(HasSubstr("tokenizer")));
  other = config("refusals4");
  other.data = (root_ / "nowhere").string();
  EXPECT_THAT([&] { Trainer(other, {}, false); }, ThrowsMessage<Error>(HasSubstr("nowhere")));
}

}  // namespace
}  // namespace flashgla::train

// What must not change a run's numbers by a bit: an interruption, threads, recomputation, graphs, other programs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/data/dataset.h"
#include "flashgla/train/tests/trainer_runs.h"
#include "flashgla/train/trainer.h"
#include "testing/devices.h"

namespace flashgla::train {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

using SameBitsTest = TrainerRuns;

TEST_F(SameBitsTest, ResumedRunIsTheUninterruptedOneToTheLastBit) {
  for (const char* order : {"windows", "segments", "packed"}) {
    for (const char* dtype : {"f32", "bf16"}) {
      SCOPED_TRACE(std::string(order) + " " + dtype);
      TrainConfig whole = config("whole", order);
      whole.dtype = dtype;
      whole.dropout = dtype == std::string("bf16") ? 0.1 : 0.0;
      train(whole);

      TrainConfig broken = config("broken", order);
      broken.dtype = dtype;
      broken.dropout = whole.dropout;
      for (const std::int64_t step : {5, 10}) {
        std::unique_ptr<Trainer> trainer;
        Events events;
        events.stop_requested = [&] { return trainer->steps_done() == step; };
        trainer = std::make_unique<Trainer>(broken, events, step > 5);
        EXPECT_EQ(trainer->run(), Outcome::interrupted);
      }
      Trainer last(broken, {}, true);
      EXPECT_EQ(last.steps_done(), 10);
      EXPECT_EQ(last.run(), Outcome::finished);

      expect_same(rows(whole), rows(broken));
      expect_same(rows(whole, "eval"), rows(broken, "eval"));
      EXPECT_EQ(weights(whole), weights(broken));
      TearDown();
    }
  }
}

// Who stops does not wait for an evaluation; the run that goes on begins with it.
TEST_F(SameBitsTest, AnEvaluationThatAStopCameBeforeIsMadeUpFor) {
  TrainConfig whole = config("whole");
  whole.checkpoint_every = 8;
  train(whole);
  ASSERT_EQ(rows(whole, "eval").size(), 3u);

  TrainConfig broken = whole;
  broken.out = config("broken").out;
  int seen = 0;
  Events stop_at_4;
  stop_at_4.stop_requested = [&] { return ++seen == 4; };
  EXPECT_EQ(Trainer(broken, stop_at_4, false).run(), Outcome::interrupted);
  EXPECT_TRUE(rows(broken, "eval").empty());
  Events killed;  // behind the evaluation, before anything else is kept
  killed.evaluation = [](const MetricsRow&) { throw Error("killed"); };
  EXPECT_THROW(Trainer(broken, killed, true).run(), Error);
  EXPECT_EQ(rows(broken, "eval").size(), 1u);
  seen = 0;  // at step 8, whose checkpoint is the best one so far
  EXPECT_EQ(Trainer(broken, stop_at_4, true).run(), Outcome::interrupted);
  EXPECT_EQ(Trainer(broken, {}, true).run(), Outcome::finished);
  expect_same(rows(whole), rows(broken));
  expect_same(rows(whole, "eval"), rows(broken, "eval"));
  EXPECT_EQ(weights(whole), weights(broken));
  EXPECT_EQ(find_model_folder(whole.out, "best").substr(whole.out.size()),
            find_model_folder(broken.out, "best").substr(broken.out.size()));
}

// It counts for the end of a run, and for what is best, as if there had been no stop.
// Nothing of an evaluation that is broken off is kept; it is made when the run goes on.
TEST_F(SameBitsTest, AStopDuringAnEvaluationDoesNotWaitForItsEnd) {
  for (const std::int64_t at : {4, 8, 12}) {  // the last is the end of the run
    SCOPED_TRACE(at);
    TrainConfig whole = config("whole" + std::to_string(at));
    whole.keep_checkpoints = 10;
    whole.checkpoint_every = 8;
    train(whole);
    TrainConfig stopped = whole;
    stopped.out = config("stopped" + std::to_string(at)).out;
    std::int64_t batches = 0;
    bool evaluating = false;
    Events events;
    events.step = [&](const MetricsRow& row) { evaluating = row.step == at; };
    events.stop_requested = [&] { return evaluating && ++batches >= 2; };  // 4 batches of an evaluation
    {
      Trainer trainer(stopped, events, false);
      EXPECT_EQ(trainer.run(), Outcome::interrupted);
      EXPECT_EQ(trainer.steps_done(), at);
      EXPECT_EQ(batches, 2);
    }
    EXPECT_EQ(rows(stopped, "eval").size(), static_cast<std::size_t>(at / 4 - 1));
    EXPECT_EQ(RunFolder(stopped.out).checkpoints().front().step, at);
    batches = 0;
    evaluating = true;
    EXPECT_EQ(Trainer(stopped, events, true).run(), Outcome::interrupted);
    EXPECT_EQ(rows(stopped, "eval").size(), static_cast<std::size_t>(at / 4 - 1));
    EXPECT_EQ(Trainer(stopped, {}, true).run(), Outcome::finished);
    expect_same(rows(whole), rows(stopped));
    expect_same(rows(whole, "eval"), rows(stopped, "eval"));
    EXPECT_EQ(fs::path(find_model_folder(stopped.out, "best")).filename(),
              fs::path(find_model_folder(whole.out, "best")).filename());
    EXPECT_EQ(weights(whole), weights(stopped));
  }
}

TEST_F(SameBitsTest, AStopBeforeAnEvaluationDoesNotPutOffTheEnd) {
  TrainConfig whole = config("whole");
  whole.learning_rate = whole.initial_learning_rate = whole.final_learning_rate = 1e-30;  // weights stay
  whole.evaluate_every = 2;
  whole.checkpoint_every = 2;
  whole.patience = 3;
  train(whole);
  TrainConfig broken = whole;
  broken.out = config("broken").out;
  int seen = 0;
  Events stop_at_2;
  stop_at_2.stop_requested = [&] { return ++seen == 2; };
  EXPECT_EQ(Trainer(broken, stop_at_2, false).run(), Outcome::interrupted);
  seen = 0;
  EXPECT_EQ(Trainer(broken, stop_at_2, true).run(), Outcome::interrupted);
  EXPECT_EQ(Trainer(broken, {}, true).run(), Outcome::finished);
  expect_same(rows(whole), rows(broken));
  expect_same(rows(whole, "eval"), rows(broken, "eval"));
  EXPECT_EQ(rows(broken, "eval").back().step, 8);
  EXPECT_THAT(find_model_folder(broken.out, "best"), ::testing::EndsWith("step-00000002"));
  EXPECT_THAT(find_model_folder(whole.out, "best"), ::testing::EndsWith("step-00000002"));
}

TEST_F(SameBitsTest, ATaskIsScoredWhereItAsksAndResumes) {
  TrainConfig whole = task_config("whole");
  train(whole);
  const std::vector<MetricsRow> evaluations = rows(whole, "eval");
  ASSERT_FALSE(evaluations.empty());
  for (const MetricsRow& row : evaluations) {
    EXPECT_TRUE(row.accuracy >= 0.0 && row.accuracy <= 1.0);
    EXPECT_EQ(row.accuracy * 84.0, std::round(row.accuracy * 84.0));  // 21 sequences of 4 labels
  }
  EXPECT_NEAR(rows(whole).front().loss, std::log(80.0), 0.1);

  TrainConfig pieces = task_config("pieces");  // the rows' places are those of their micro-batch
  pieces.micro_batch = 2;
  train(pieces);
  for (std::size_t i = 0; i < rows(whole).size(); ++i) {
    EXPECT_NEAR(rows(whole)[i].loss, rows(pieces)[i].loss, 1e-4 * rows(whole)[i].loss);
  }

  TrainConfig broken = task_config("broken");
  int seen = 0;
  Events stop_at_5;
  stop_at_5.stop_requested = [&] { return ++seen == 5; };
  EXPECT_EQ(Trainer(broken, stop_at_5, false).run(), Outcome::interrupted);
  EXPECT_EQ(Trainer(broken, {}, true).run(), Outcome::finished);
  expect_same(rows(whole), rows(broken));
  expect_same(rows(whole, "eval"), rows(broken, "eval"));
  EXPECT_EQ(weights(whole), weights(broken));
}

TEST_F(SameBitsTest, ThreadsDoNotChangeTheBits) {
  TrainConfig one = config("one_thread");
  one.dropout = 0.1;
  one.threads = 1;
  train(one);
  TrainConfig two = config("two_threads");
  two.dropout = 0.1;
  two.threads = 2;
  train(two);
  expect_same(rows(one), rows(two));
  EXPECT_EQ(weights(one), weights(two));
}

TEST_F(SameBitsTest, RecomputeDoesNotChangeTheBits) {
  for (const double dropout : {0.0, 0.2}) {
    TrainConfig keep = config("keep");
    keep.dropout = dropout;
    train(keep);
    for (const char* recompute : {"activations", "block"}) {
      TrainConfig again = config(std::string("recompute_") + recompute);
      again.dropout = dropout;
      again.recompute = recompute;
      train(again);
      expect_same(rows(keep), rows(again));
    }
    TearDown();
  }
}

// Programs that start at once, with no products chosen yet, time them beside each other and keep them in one file. What
// one has chosen must stay its choice: else its next run, which looks there, has other bits.
TEST_F(SameBitsTest, ProgramsBesideEachOtherKeepTheirBits) {
  if (device().kind == Device::Kind::cpu) GTEST_SKIP() << "products are chosen by timing on GPUs alone";
  const std::string program = fs::read_symlink("/proc/self/exe").string();
  const std::string command = "XDG_CACHE_HOME='" + (root_ / "run_cache").string() + "' '" + program +
                              "' --gtest_brief=1 --gtest_filter=SameBitsTest.RecomputeDoesNotChangeTheBits >&2";
  std::vector<int> status(4, -1);
  std::vector<std::thread> programs;
  programs.reserve(status.size());
  for (int& each : status) programs.emplace_back([&each, &command] { each = std::system(command.c_str()); });
  for (std::thread& each : programs) each.join();
  EXPECT_EQ(status, std::vector<int>(4, 0));
}

// What a checkpoint brings of the products' choices is enough: the cache that they came from may be gone.
TEST_F(SameBitsTest, AResumeNeedsNoCacheOfProducts) {
  const fs::path cache = root_ / "run_cache";
  const char* held = std::getenv("XDG_CACHE_HOME");
  const std::string before = held ? held : "";
  ::setenv("XDG_CACHE_HOME", cache.c_str(), 1);
  TrainConfig whole = config("whole");
  whole.dtype = "bf16";
  train(whole);  // chooses
  TrainConfig halves = whole;
  halves.out = config("halves").out;
  int seen = 0;
  Events stop_at_5;
  stop_at_5.stop_requested = [&] { return ++seen == 5; };
  EXPECT_EQ(Trainer(halves, stop_at_5, false).run(), Outcome::interrupted);
  EXPECT_EQ(fs::exists(cache), device().kind != Device::Kind::cpu);
  fs::remove_all(cache);
  EXPECT_EQ(Trainer(halves, {}, true).run(), Outcome::finished);
  expect_same(rows(whole), rows(halves));
  EXPECT_EQ(weights(whole), weights(halves));
  held ? ::setenv("XDG_CACHE_HOME", before.c_str(), 1) : ::unsetenv("XDG_CACHE_HOME");
}

// Where the device is another one the run goes on, and says in one line what that means.
TEST_F(SameBitsTest, AResumeOnAnotherDeviceSaysThatBitsMayDiffer) {
  const bool gpu = device().kind != Device::Kind::cpu;
  for (const bool moved : {false, true}) {
    TrainConfig run = config("moved");
    if (moved && gpu) run.device = "cpu";
    int seen = 0;
    Events events;
    events.stop_requested = [&] { return ++seen == 3; };
    EXPECT_EQ(Trainer(run, events, false).run(), Outcome::interrupted);
    // Where there is no GPU a checkpoint of one is what has this file.
    if (moved && !gpu) write_file(find_model_folder(run.out) + "/products.txt", "of a GPU");
    run.device = name_of(device());
    std::vector<std::string> notices;
    events.stop_requested = {};
    events.notice = [&](const std::string& line) {
      if (line.find("may differ in their last bits") != std::string::npos) notices.push_back(line);
    };
    EXPECT_EQ(Trainer(run, events, true).run(), Outcome::finished);
    ASSERT_EQ(notices.size(), moved ? 1u : 0u);
    if (moved) {
      EXPECT_THAT(notices.front(), HasSubstr(gpu ? "of a run on the CPU" : "of a run on a GPU"));
    }
    TearDown();
  }
}

TEST_F(SameBitsTest, AResumeWithAnotherLibraryOfAttentionSaysThatBitsMayDiffer) {
  if (device().kind == Device::Kind::cpu) GTEST_SKIP() << "attention is computed by libraries on GPUs alone";
  TrainConfig run = config("library");
  int seen = 0;
  Events events;
  events.stop_requested = [&] { return ++seen == 3; };
  EXPECT_EQ(Trainer(run, events, false).run(), Outcome::interrupted);
  for (const std::string& folder : {find_model_folder(run.out), run.out}) {
    write_file(folder + "/attention.txt", "cuDNN 8.0.0");
  }
  std::vector<std::string> notices;
  events.stop_requested = {};
  events.notice = [&](const std::string& line) { notices.push_back(line); };
  EXPECT_EQ(Trainer(run, events, true).run(), Outcome::finished);
  EXPECT_THAT(notices, Contains(HasSubstr("was computed by cuDNN 8.0.0, and here it is by FlashGLA's kernels")));
  EXPECT_FALSE(fs::exists(run.out + "/attention.txt"));
}

// What is recorded as graphs is what is done operation by operation; and what the arenas hold before a step does not
// matter to it.
TEST_F(SameBitsTest, GraphsAndOldContentsDoNotChangeTheBits) {
  for (const char* order : {"windows", "segments", "packed"}) {
    for (const char* dtype : {"f32", "bf16"}) {
      SCOPED_TRACE(std::string(order) + " " + dtype);
      TrainConfig plain = config("plain", order);
      plain.dtype = dtype;
      plain.dropout = dtype == std::string("bf16") ? 0.1 : 0.0;
      plain.micro_batch = 2;
      plain.graphs = "off";
      train(plain);
      TrainConfig recorded = plain;
      recorded.out = config("recorded").out;
      recorded.graphs = "on";
      train(recorded);
      expect_same(rows(plain), rows(recorded));
      expect_same(rows(plain, "eval"), rows(recorded, "eval"));
      EXPECT_EQ(weights(plain), weights(recorded));

      TrainConfig poisoned = recorded;
      poisoned.out = config("poisoned").out;
      expect_same(rows(plain), rows_from_poisoned_memory(poisoned));
      TearDown();
    }
  }
}

}  // namespace
}  // namespace flashgla::train

// Checkpoints: written meanwhile, damaged, of other random numbers, on a full disk, and which are kept.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "flashgla/base/file.h"
#include "flashgla/base/memory.h"
#include "flashgla/train/tests/trainer_runs.h"
#include "flashgla/train/trainer.h"

namespace flashgla::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using CheckpointsTest = TrainerRuns;

// With memory for a copy, a checkpoint is written while training goes on: it is the one that would have been written
// while training waits.
TEST_F(CheckpointsTest, CheckpointsWrittenMeanwhileAreThoseOfTheirStep) {
  TrainConfig waiting = config("waiting", "segments");
  waiting.checkpoint_every = 3;
  waiting.keep_checkpoints = 10;
  waiting.memory_limit = "1GiB";
  TrainConfig meanwhile = waiting;
  meanwhile.out = config("meanwhile").out;
  Trainer whole(waiting, {}, false);
  while (whole.steps_done() < whole.total_steps()) {
    whole.step();
    if (whole.steps_done() % 3 == 0) whole.save();
  }
  train(meanwhile);
  const auto a = RunFolder(waiting.out).checkpoints(), b = RunFolder(meanwhile.out).checkpoints();
  ASSERT_EQ(a.size(), 4u);
  ASSERT_EQ(b.size(), 4u);
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (const char* file : {"/model.safetensors", "/optimizer.safetensors"}) {
      EXPECT_TRUE(read_file(a[i].path + file) == read_file(b[i].path + file)) << a[i].path << file;
    }
    EXPECT_NO_THROW(verify_checkpoint(b[i].path));
  }
}

TEST_F(CheckpointsTest, RunsWithOtherRandomNumbersAreRefused) {
  const TrainConfig run = config("older");
  train(run);
  const std::string newest = RunFolder(run.out).checkpoints().front().path;
  // A run of the first version, which said nothing of its random numbers.
  std::string progress = verify_checkpoint(newest);
  const std::string version = "\"random_version\":2,";
  ASSERT_THAT(progress, HasSubstr(version));
  progress.erase(progress.find(version), version.size());
  RunFolder(run.out).save(
      12,
      [&](const std::string& folder) {
        for (const char* name : {"model.safetensors", "optimizer.safetensors", "config.json"}) {
          std::ofstream(folder + "/" + name, std::ios::binary) << read_file(newest + "/" + name);
        }
      },
      progress);
  EXPECT_THAT([&] { Trainer(run, {}, true); }, ThrowsMessage<Error>(AllOf(HasSubstr("random numbers are of version 1"),
                                                                          HasSubstr("--initial-weights"))));
}

TEST_F(CheckpointsTest, DamagedCheckpointsArePassedOverAloud) {
  TrainConfig run = config("damaged");
  run.checkpoint_every = 4;
  run.keep_checkpoints = 10;
  train(run);
  const TrainConfig clean = run;
  const auto uninterrupted = rows(run);
  const auto names = {"model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"};
  for (const std::string name : names) {
    for (const char* damage : {"truncated", "flipped", "missing"}) {
      SCOPED_TRACE(name + " " + damage);
      const auto checkpoints = RunFolder(run.out).checkpoints();
      ASSERT_EQ(checkpoints.size(), 3u);
      const std::string file = checkpoints.front().path + "/" + name;
      const std::string content = read_file(file);
      if (std::strcmp(damage, "truncated") == 0) {
        fs::resize_file(file, content.size() * 2 / 3);
      } else if (std::strcmp(damage, "flipped") == 0) {
        std::string changed = content;
        changed[changed.size() / 2] = static_cast<char>(changed[changed.size() / 2] ^ 4);
        std::ofstream(file, std::ios::binary) << changed;
      } else {
        fs::remove(file);
      }
      std::vector<std::string> notices;
      Events events;
      events.notice = [&](const std::string& line) { notices.push_back(line); };
      {
        Trainer trainer(run, events, true);
        EXPECT_EQ(trainer.steps_done(), 8);
        ASSERT_EQ(notices.size(), 1u);
        EXPECT_THAT(notices[0], HasSubstr(name));
        EXPECT_EQ(trainer.run(), Outcome::finished);  // replaces the damaged one
      }
      expect_same(uninterrupted, rows(run));
    }
  }
  for (const CheckpointInfo& checkpoint : RunFolder(run.out).checkpoints())
    fs::remove(checkpoint.path + "/config.json");
  EXPECT_THAT([&] { Trainer(run, {}, true); }, ThrowsMessage<Error>(HasSubstr("none of its checkpoints is whole")));
}

// Of later steps than what is saved next: it neither counts among the newest nor is found again.
TEST_F(CheckpointsTest, DamagedCheckpointsAreKeptInPlaceOfNoOther) {
  TrainConfig run = config("aside");
  run.checkpoint_every = 4;
  run.keep_checkpoints = 10;
  train(run);
  const std::string damaged = RunFolder(run.out).checkpoints().front().path;
  fs::resize_file(damaged + "/optimizer.safetensors", 100);
  run.keep_checkpoints = 1;
  {
    Trainer trainer(run, {}, true);
    ASSERT_EQ(trainer.steps_done(), 8);
    trainer.step();
    const std::string saved = trainer.save();
    EXPECT_NO_THROW(verify_checkpoint(saved));
    EXPECT_EQ(find_model_folder(run.out), saved);
    EXPECT_TRUE(fs::exists(find_model_folder(run.out, "best")));
  }
  EXPECT_EQ(RunFolder(run.out).checkpoints().front().step, 9);
  EXPECT_TRUE(fs::exists(damaged + ".damaged/model.safetensors"));
  std::vector<std::string> notices;
  Events events;
  events.notice = [&](const std::string& line) { notices.push_back(line); };
  EXPECT_EQ(Trainer(run, events, true).steps_done(), 9);
  EXPECT_THAT(notices, ::testing::IsEmpty());
  RunFolder(run.out).save(
      12, [](const std::string&) {}, "{}");
  RunFolder(run.out).prune(1, 9);
  EXPECT_THAT(RunFolder(run.out).checkpoints(), ::testing::SizeIs(::testing::Ge(2u)));
}

// As a program that is ended between a checkpoint and the files that name it leaves them.
TEST_F(CheckpointsTest, NamesTheNewestAndTheBestAgainWhenItGoesOn) {
  TrainConfig run = config("named");
  run.checkpoint_every = 2;
  train(run);
  const std::string newest = find_model_folder(run.out), best = find_model_folder(run.out, "best");
  const std::string older = fs::path(RunFolder(run.out).checkpoints().back().path).filename();
  for (const char* name : {"latest", "best"}) write_file(run.out + "/checkpoints/" + name, older + "\n");
  ASSERT_NE(find_model_folder(run.out), newest);
  EXPECT_EQ(Trainer(run, {}, true).run(), Outcome::finished);
  EXPECT_EQ(find_model_folder(run.out), newest);
  EXPECT_EQ(find_model_folder(run.out, "best"), best);
}

TEST_F(CheckpointsTest, KeepsTheNewestAndTheBest) {
  TrainConfig run = config("keep_best");
  run.checkpoint_every = 2;
  run.keep_checkpoints = 2;
  train(run);
  const auto kept = RunFolder(run.out).checkpoints();
  ASSERT_GE(kept.size(), 2u);
  EXPECT_LE(kept.size(), 3u);
  EXPECT_EQ(kept[0].step, 12);
  EXPECT_EQ(kept[1].step, 10);
  EXPECT_EQ(find_model_folder(run.out), kept[0].path);
  EXPECT_TRUE(fs::exists(find_model_folder(run.out, "best") + "/tokenizer.flashgla.json"));
  EXPECT_THAT([&] { find_model_folder(run.out, "step-7"); }, ThrowsMessage<Error>(HasSubstr("no checkpoint 'step-7'")));
}

// Bytes of private memory that the process may write to, which RLIMIT_DATA bounds.
std::size_t private_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmData:")) return std::stoull(line.substr(7)) << 10;
  }
  return 0;
}

// Where there is no room for a copy, a checkpoint goes out in pieces: a third of its bytes is memory enough to write
// it.
TEST_F(CheckpointsTest, TakeLessMemoryThanTheyHold) {
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
  GTEST_SKIP() << "the address sanitizer ends a program whose memory is bounded";
#endif
#endif
  TrainConfig run = config("memory");
  run.model = R"({"hidden_size": 512, "num_hidden_layers": 3, "num_heads": 2})";
  run.micro_batch = 1;
  run.recompute = "nothing";
  run.memory_limit = "4GiB";
  const std::size_t limit = [&] {
    const Trainer trainer(run, {}, false);
    std::size_t sum = 0;
    for (const MemoryPlan::Row& row : trainer.plan().rows) sum += row.group == "checkpoints" ? 0 : row.bytes;
    EXPECT_LT(sum, trainer.plan().total());
    return sum;
  }();
  fs::remove_all(run.out);
  run.memory_limit = std::to_string(limit);
  Trainer trainer(run, {}, false);
  trainer.step();
  std::size_t written = 0;
  for (const auto& entry : fs::directory_iterator(trainer.save())) written += fs::file_size(entry.path());
  trainer.step();
  struct rlimit before {};
  ::getrlimit(RLIMIT_DATA, &before);
  struct rlimit small = before;
  small.rlim_cur = private_memory() + written / 3;
  ::setrlimit(RLIMIT_DATA, &small);
  bool bounded = false;
  try {
    EXPECT_EQ(std::string(written / 2, '.').back(), '.');
  } catch (const std::bad_alloc&) {
    bounded = true;
  }
  std::string path, message;
  try {
    path = trainer.save();
  } catch (const std::exception& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_DATA, &before);
  if (!bounded) GTEST_SKIP() << "this system does not bound a process's memory";
  ASSERT_EQ(message, "");
  EXPECT_NO_THROW(verify_checkpoint(path));
}

// A write that fails half-way, as on a full disk: files may not grow past a limit.
TEST_F(CheckpointsTest, FullDiskLeavesThePreviousCheckpoint) {
  TrainConfig run = config("full");
  Trainer trainer(run, {}, false);
  trainer.step();
  const std::string good = trainer.save();
  trainer.step();
  ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit before {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  struct rlimit small = before;
  small.rlim_cur = 20000;
  ::setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    trainer.save();
  } catch (const Error& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(message, HasSubstr("checkpoint of step 2 was not saved"));
  EXPECT_THAT(message, HasSubstr("File too large"));
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_NO_THROW(verify_checkpoint(good));
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(run.out + "/checkpoints")) left.push_back(entry.path().filename());
  std::sort(left.begin(), left.end());
  EXPECT_THAT(left, ::testing::ElementsAre("latest", "step-00000001"));
  EXPECT_EQ(Trainer(run, {}, true).steps_done(), 1);
}

TEST_F(CheckpointsTest, WhatARunCannotChangeIsRefusedByName) {
  TrainConfig run = config("settled", "packed");
  run.micro_batch = 2;
  train(run);
  const auto refusal = [&](auto change) {
    TrainConfig other = run;
    change(other);
    return [other] { Trainer(other, {}, true); };
  };
  const auto names = [](const std::string& what) { return ThrowsMessage<Error>(HasSubstr(what)); };
  EXPECT_THAT(refusal([](TrainConfig& c) { c.order = "windows"; }), names("order is 'windows'; expected 'packed'"));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.batch_tokens *= 2; }), names("batch_tokens is 512; expected 256"));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.sequence_length = 32; }), names("sequence_length is 32; expected 64"));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.micro_batch = 1; }), names("micro_batch is 1; expected 2"));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.seed = 2; }), names("seed is 2; expected 1"));
  for (const std::string state : {"half", "split_master"}) {
    EXPECT_THAT(refusal([&](TrainConfig& c) { c.optimizer_state = state; }),
                names("optimizer_state is '" + state + "'; expected 'full'"));
  }
  const std::string data = (root_ / "one").string();
  EXPECT_THAT(refusal([&](TrainConfig& c) { c.data = data; }),
              ThrowsMessage<Error>(AllOf(HasSubstr("data is '" + data), HasSubstr("begun with ('" + run.data))));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.memory_limit = "1MB"; }),
              names("remedies: a higher memory_limit, a device with more memory"));
  run.micro_batch = 0;
  EXPECT_EQ(Trainer(run, {}, true).config().micro_batch, 2);

  // What the run settled of itself stands in no flag's way.
  TrainConfig free = config("unsettled");
  train(free);
  load_config(free, RunFolder(free.out).config_file());
  free.batch_tokens = 128;
  EXPECT_THAT([&] { Trainer(free, {}, true); }, names("batch_tokens is 128; expected 256"));
}

TEST_F(CheckpointsTest, RemovesNothingThatItDidNotMake) {
  const TrainConfig run = config("own_files");
  const std::string checkpoints = run.out + "/checkpoints";
  fs::create_directories(run.out + "/notes.partial");
  fs::create_directories(checkpoints + "/step-best.partial");
  fs::create_directories(checkpoints + "/step-00000003.partial");
  for (const std::string file : {"/thesis.partial", "/book.partial-1", "/notes.partial/a", "/train.json.partial-x"}) {
    std::ofstream(run.out + file) << "mine";
  }
  for (const std::string file : {"/train.json.partial-7", "/checkpoints/latest.partial-7"}) {
    std::ofstream(run.out + file) << "unfinished";
  }
  RunFolder(run.out).create();
  std::vector<std::string> left;
  for (const auto& entry : fs::recursive_directory_iterator(run.out)) left.push_back(entry.path().filename());
  EXPECT_THAT(
      left, ::testing::UnorderedElementsAre("thesis.partial", "book.partial-1", "notes.partial", "a",
                                            "train.json.partial-x", "checkpoints", "step-best.partial", "train.lock"));
}

TEST_F(CheckpointsTest, OneTrainerAtATimeWritesARun) {
  const TrainConfig run = config("held");
  Trainer other(run, {}, false);
  {
    Trainer trainer(run, {}, false);
    EXPECT_FALSE(fs::exists(run.out));  // planning writes nothing
    trainer.begin();
    EXPECT_THAT([&] { other.run(); }, ThrowsMessage<Error>(HasSubstr("held: another process trains in this folder")));
    EXPECT_EQ(trainer.run(), Outcome::finished);
  }
  EXPECT_NO_THROW(Trainer(run, {}, true).begin());
}

}  // namespace
}  // namespace flashgla::train

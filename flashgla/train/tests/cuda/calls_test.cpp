// What the training loop may not ask of CUDA.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "flashgla/base/memory.h"
#include "flashgla/data/prepare.h"
#include "flashgla/train/trainer.h"
#include "testing/cuda/counted_calls.h"
#include "testing/temporary_folder.h"

namespace flashgla::train {
namespace {

namespace fs = std::filesystem;

TEST(CudaCalls, TheLoopAllocatesNothingAndWaitsForNothing) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  const flashgla::testing::TemporaryFolder folder;
  const fs::path root = folder.path();
  std::ofstream text(root / "text.txt");
  for (int i = 0; i < 4000; ++i) text << "line " << i * 7919 % 1000 << (i % 13 == 0 ? "\n\n" : "\n");
  text.close();
  data::PrepareOptions prepare;
  prepare.inputs = {(root / "text.txt").string()};
  prepare.out = (root / "data").string();
  prepare.separator = "\n\n";
  data::prepare(prepare);
  for (const char* order : {"windows", "segments", "packed"}) {
    for (const char* graphs : {"on", "off"}) {
      SCOPED_TRACE(std::string(order) + " " + graphs);
      TrainConfig config;
      config.model = R"({"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2})";
      config.data = prepare.out;
      config.out = (root / "run").string();
      config.device = "cuda";
      config.order = order;
      config.segments = config.order == "segments" ? 4 : 1;
      config.graphs = graphs;
      config.sequence_length = 64;
      config.batch_tokens = 512;
      config.micro_batch = 4;
      config.train_tokens = 100 * config.batch_tokens;
      config.evaluate_every = 0;
      config.checkpoint_every = 0;
      int before = 0, after = -1;
      Events events;
      events.step = [&](const MetricsRow& row) {
        if (row.step == 40) before = testing::cuda_calls;
        if (row.step == 90) after = testing::cuda_calls;
      };
      Trainer(config, events, false).run();
      EXPECT_EQ(after - before, 0);
      fs::remove_all(config.out);
    }
  }
}

}  // namespace
}  // namespace flashgla::train

// What the training loop may not ask of CUDA.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/base/queue.h"
#include "flashgla/data/prepare.h"
#include "flashgla/model/tests/cases.h"
#include "flashgla/train/trainer.h"
#include "testing/cuda/counted_calls.h"
#include "testing/temporary_folder.h"

namespace flashgla::train {
namespace {

namespace fs = std::filesystem;

class CudaCalls : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    std::ofstream text(root_ / "text.txt");
    for (int i = 0; i < 4000; ++i) text << "line " << i * 7919 % 1000 << (i % 13 == 0 ? "\n\n" : "\n");
    text.close();
    data::PrepareOptions prepare;
    prepare.inputs = {(root_ / "text.txt").string()};
    prepare.out = (root_ / "data").string();
    prepare.separator = "\n\n";
    data::prepare(prepare);
  }

  TrainConfig config(std::int64_t steps) const {
    TrainConfig result;
    result.model = R"({"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2})";
    result.data = (root_ / "data").string();
    result.out = (root_ / "run").string();
    result.device = "cuda";
    result.order = "windows";
    result.sequence_length = 64;
    result.batch_tokens = 512;
    result.micro_batch = 4;
    result.train_tokens = steps * result.batch_tokens;
    result.evaluate_every = 0;
    result.checkpoint_every = 0;
    return result;
  }

  // Calls from the first of these steps to the second.
  int calls_between(const TrainConfig& run, std::int64_t first, std::int64_t second) const {
    int before = 0, after = -1;
    Events events;
    events.step = [&](const MetricsRow& row) {
      if (row.step == first) before = testing::cuda_calls;
      if (row.step == second) after = testing::cuda_calls;
    };
    Trainer(run, events, false).run();
    fs::remove_all(run.out);
    return after - before;
  }

  const flashgla::testing::TemporaryFolder folder_;
  const fs::path root_ = folder_.path();
};

TEST_F(CudaCalls, AreCounted) {
  const auto calls = [](const std::function<void()>& work) {
    const int before = testing::cuda_calls;
    work();
    return testing::cuda_calls - before;
  };
  EXPECT_EQ(calls([] { allocate_memory(16, Device::cuda()); }), 2);  // and given back
  EXPECT_EQ(calls([] { allocate_pinned_memory(16); }), 2);
  const Queue queue(Device::cuda());
  queue.stream();
  EXPECT_EQ(calls([&] { queue.synchronize(); }), 1);
  const std::shared_ptr<void> memory = allocate_memory(16, Device::cuda());
  EXPECT_GE(calls([&] { zero_memory(memory.get(), 16, Device::cuda()); }), 1);
}

TEST_F(CudaCalls, TheLoopAllocatesNothingAndWaitsForNothing) {
  for (const char* order : {"windows", "segments", "packed"}) {
    for (const char* graphs : {"on", "off"}) {
      SCOPED_TRACE(std::string(order) + " " + graphs);
      TrainConfig run = config(100);
      run.order = order;
      run.segments = run.order == "segments" ? 4 : 1;
      run.graphs = graphs;
      EXPECT_EQ(calls_between(run, 40, 90), 0);
    }
  }
}

// Of every mixer: operation by operation, so that what each asks of CUDA is asked in every step.
class CudaCallsOf : public CudaCalls, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Mixers, CudaCallsOf,
                         ::testing::Values("softmax_everything", "hybrid", "retnet", "scalar_gate", "hedgehog", "mamba",
                                           "mamba2", "hgrn2", "gsa", "rwkv", "hyena", "layer_norm"),
                         [](const auto& name) { return std::string(name.param); });

TEST_P(CudaCallsOf, AMixerInTheLoopAreNone) {
  const std::vector<model::SmallModel> models = model::small_models();
  const auto small = std::find_if(models.begin(), models.end(), [](const auto& row) { return row.name == GetParam(); });
  ASSERT_NE(small, models.end());
  model::ModelConfig shape = small->config;
  shape.vocab_size = 258;
  TrainConfig run = config(16);
  run.model = model::to_json(shape);
  run.graphs = "off";
  run.dropout = 0.1;
  EXPECT_EQ(calls_between(run, 6, 14), 0);
}

// Of sequences and heads that cuDNN is given where it is there: operation by operation, and recorded.
TEST_F(CudaCalls, OfLongAttentionInTheLoopAreNone) {
  for (const char* graphs : {"on", "off"}) {
    TrainConfig run = config(16);
    run.model = R"({"model_type": "transformer", "hidden_size": 2048, "num_hidden_layers": 1, "num_heads": 16})";
    run.sequence_length = 4096;
    run.batch_tokens = 16384;
    run.micro_batch = 4;
    run.train_tokens = 16 * run.batch_tokens;
    run.graphs = graphs;
    EXPECT_EQ(calls_between(run, 6, 14), 0) << graphs;
  }
}

}  // namespace
}  // namespace flashgla::train

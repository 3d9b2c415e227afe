// Runs of a very small model for the tests of training, on the GPU where there is one (FLASHGLA_TEST_DEVICE=cpu: on the
// CPU).
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "flashgla/base/file.h"
#include "flashgla/base/names.h"
#include "flashgla/data/prepare.h"
#include "flashgla/data/recall.h"
#include "flashgla/train/trainer.h"
#include "testing/devices.h"
#include "testing/temporary_folder.h"

namespace flashgla::train {

namespace fs = std::filesystem;

constexpr const char* kModel = R"({"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 64,
  "tie_word_embeddings": true, "use_short_conv": true})";

class TrainerRuns : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<flashgla::testing::TemporaryFolder>();
    root_ = folder_->path();
    prepare("one", "");
    prepare("many", "\n\n");
    data::RecallOptions task;
    task.vocabulary = 80;
    task.length = 32;
    task.pairs = 4;
    task.train = 300;
    task.validation = 21;  // the last batch is not full
    task.out = (root_ / "task").string();
    data::write_recall(task);
  }
  static void TearDownTestSuite() { folder_.reset(); }

  // Text with something to learn: words of a small vocabulary, in paragraphs.
  static void prepare(const std::string& name, const std::string& separator) {
    const std::vector<std::string> words = {"the ",  "cat ", "sat ",  "on ", "a ",
                                            "mat, ", "and ", "then ", "it ", "ran. "};
    std::string text;
    std::uint32_t random = 12345;
    for (int i = 0; i < 6000; ++i) {
      random = random * 1664525u + 1013904223u;
      text += words[(random >> 16) % words.size()];
      if ((random >> 8) % 17 == 0) text += "\n\n";
    }
    std::ofstream(root_ / (name + ".txt")) << text;
    data::PrepareOptions options;
    options.inputs = {(root_ / (name + ".txt")).string()};
    options.out = (root_ / name).string();
    options.separator = separator;
    options.validation = 0.1;
    data::prepare(options);
  }

  void TearDown() override {
    for (const auto& entry : fs::directory_iterator(root_)) {
      if (entry.path().filename().string().starts_with("run")) fs::remove_all(entry.path());
    }
  }

  static TrainConfig config(const std::string& run, const std::string& order = "windows") {
    TrainConfig result;
    result.model = kModel;
    result.data = (root_ / (order == "packed" ? "many" : "one")).string();
    result.out = (root_ / ("run_" + run)).string();
    result.device = name_of(device());
    result.dtype = "f32";
    result.threads = 1;  // small steps; and the machine may be busy
    result.train_tokens = 12 * 256;
    result.batch_tokens = 256;
    result.sequence_length = 64;
    result.order = order;
    result.segments = order == "segments" ? 3 : 1;
    result.learning_rate = 3e-3;
    result.warmup_tokens = 512;
    result.evaluate_every = 4;
    result.evaluation_tokens = 1024;
    result.checkpoint_every = 0;
    return result;
  }

  static TrainConfig task_config(const std::string& run) {
    TrainConfig result = config(run, "labelled");
    result.data = (root_ / "task").string();
    result.sequence_length = 32;
    return result;
  }

  static Device device() { return testing::test_devices().back(); }

  // An element of a tensor on any device.
  static float element(const TensorView& tensor, std::int64_t i) {
    float value = 0.0f;
    copy_memory(&value, Device::cpu(), tensor.as<float>() + i, tensor.device, sizeof(value));
    return value;
  }
  static void set_element(const TensorView& tensor, std::int64_t i, float value) {
    copy_memory(tensor.as<float>() + i, tensor.device, &value, Device::cpu(), sizeof(value));
  }
  static std::string bytes_of(const TensorView& tensor) {
    std::string bytes(tensor.bytes(), '\0');
    copy_memory(bytes.data(), Device::cpu(), tensor.data, tensor.device, bytes.size());
    return bytes;
  }

  static std::vector<MetricsRow> rows(const TrainConfig& config, const std::string& kind = "train") {
    std::vector<MetricsRow> result;
    for (const MetricsRow& row : read_metrics(config.out + "/metrics.jsonl")) {
      if (row.kind == kind) result.push_back(row);
    }
    return result;
  }

  static std::string weights(const TrainConfig& config) {
    return read_file(find_model_folder(config.out) + "/model.safetensors");
  }

  // Of a run before each step of which the arenas are filled with NaN.
  static std::vector<MetricsRow> rows_from_poisoned_memory(const TrainConfig& config) {
    Trainer trainer(config, {}, false);
    std::vector<MetricsRow> seen;
    while (trainer.steps_done() < trainer.total_steps()) {
      for (Arena* arena : {&trainer.context().scratch(), &trainer.activations()}) {
        const ArenaScope scope(*arena);
        testing::fill_with_nan(arena->allocate(arena->peak()), arena->peak(), device());
      }
      seen.push_back(trainer.step());
    }
    return seen;
  }

  static void train(const TrainConfig& config) { EXPECT_EQ(Trainer(config, {}, false).run(), Outcome::finished); }

  static inline std::unique_ptr<flashgla::testing::TemporaryFolder> folder_;
  static inline fs::path root_;
};

inline void expect_same(const std::vector<MetricsRow>& a, const std::vector<MetricsRow>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].step, b[i].step);
    EXPECT_EQ(a[i].loss, b[i].loss) << "step " << a[i].step;  // to the last bit
    EXPECT_TRUE(a[i].gradient_norm == b[i].gradient_norm || (a[i].kind == "eval")) << "step " << a[i].step;
    EXPECT_TRUE(a[i].learning_rate == b[i].learning_rate || (a[i].kind == "eval")) << "step " << a[i].step;
  }
}

}  // namespace flashgla::train

// What the training loop may not ask of CUDA: memory, a wait for everything, a copy that waits. The calls that this
// program makes are counted by the linker's --wrap.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "flashgla/base/memory.h"
#include "flashgla/data/prepare.h"
#include "flashgla/train/trainer.h"

namespace {
std::atomic<int> calls{0};
}

#define FLASHGLA_COUNT(name, parameters, arguments) \
  cudaError_t __real_##name parameters;             \
  cudaError_t __wrap_##name parameters {            \
    ++calls;                                        \
    return __real_##name arguments;                 \
  }

extern "C" {
FLASHGLA_COUNT(cudaMalloc, (void** memory, size_t bytes), (memory, bytes))
FLASHGLA_COUNT(cudaFree, (void* memory), (memory))
FLASHGLA_COUNT(cudaMallocAsync, (void** memory, size_t bytes, cudaStream_t stream), (memory, bytes, stream))
FLASHGLA_COUNT(cudaMallocHost, (void** memory, size_t bytes), (memory, bytes))
FLASHGLA_COUNT(cudaFreeHost, (void* memory), (memory))
FLASHGLA_COUNT(cudaMemcpy, (void* to, const void* from, size_t bytes, cudaMemcpyKind kind), (to, from, bytes, kind))
FLASHGLA_COUNT(cudaMemset, (void* memory, int value, size_t bytes), (memory, value, bytes))
FLASHGLA_COUNT(cudaDeviceSynchronize, (void), ())
FLASHGLA_COUNT(cudaStreamSynchronize, (cudaStream_t stream), (stream))
FLASHGLA_COUNT(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags), (stream, flags))
}

namespace flashgla::train {
namespace {

namespace fs = std::filesystem;

TEST(CudaCalls, TheLoopAllocatesNothingAndWaitsForNothing) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  const fs::path root = fs::temp_directory_path() / ("flashgla_calls_" + std::to_string(::getpid()));
  fs::create_directories(root);
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
        if (row.step == 40) before = calls;
        if (row.step == 90) after = calls;
      };
      Trainer(config, events, false).run();
      EXPECT_EQ(after - before, 0);
      fs::remove_all(config.out);
    }
  }
  fs::remove_all(root);
}

}  // namespace
}  // namespace flashgla::train

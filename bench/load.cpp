// The bench of reading a checkpoint: from the file, which the system's cache may hold, to a model on the device.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "bench/benches.h"
#include "flashgla/model/checkpoint.h"
#include "testing/bench.h"
#include "testing/temporary_folder.h"

namespace flashgla::bench {

void bench_load(const testing::BenchOptions& options) {
  using Clock = std::chrono::steady_clock;
  const char* preset = options.device == Device::cpu() ? "gla-small" : "gla-1.3b";
  testing::BenchRow row;
  row.operation = "model_load";
  row.implementation = "all";
  row.problem = std::string(preset) + " bf16";
  if (!options.wants(row.problem) || !options.wants_implementation(row.implementation)) return;
  const testing::TemporaryFolder folder;
  {
    model::LanguageModel model(model::preset(preset), DType::bf16, options.device, false);
    model.parameters().initialize(1);
    model::save_model(model, folder.path());
    row.bytes = static_cast<double>(model.parameters().value_bytes());
  }
  std::vector<double> times;
  const auto begin = Clock::now();
  do {
    const auto start = Clock::now();
    model::load_model(folder.path(), {.device = options.device});
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  } while (times.size() < 3 || std::chrono::duration<double>(Clock::now() - begin).count() < options.seconds);
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  row.milliseconds = *middle;
  options.report(row);
}

}  // namespace flashgla::bench

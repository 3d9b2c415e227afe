// Trains a small model on a text, byte by byte: train TEXT_FILE RUN_FOLDER [STEPS]
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "flashgla/data/prepare.h"
#include "flashgla/train/trainer.h"

int main(int argc, char** argv) try {
  using namespace flashgla;
  if (argc < 3) return std::puts("train TEXT_FILE RUN_FOLDER [STEPS]"), 1;
  const std::string run = argv[2];
  data::PrepareOptions text;  // bytes as tokens, the last twentieth for validation
  text.inputs = {argv[1]};
  text.out = run + "/tokens";
  data::prepare(text);

  train::TrainConfig config;  // the fields of `flashgla train`, with their defaults
  config.data = text.out;
  config.out = run;
  config.model = "gla-tiny";
  config.batch_tokens = 1024;
  config.sequence_length = 128;
  config.train_tokens = (argc > 3 ? std::atoll(argv[3]) : 200) * config.batch_tokens;
  config.learning_rate = 3e-3;

  train::Events events;
  events.step = [](const train::MetricsRow& row) {
    std::printf("step %lld: loss %.4f\n", static_cast<long long>(row.step), row.loss);
  };
  train::Trainer trainer(config, events, /*resume=*/true);
  trainer.run();
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

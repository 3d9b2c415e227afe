// A training configuration: what is read says the same when it is written and read again; validated, it has a schedule.
#include "flashgla/train/config.h"
#include "testing/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashgla;
  return fuzz::attempt(size, [&] {
    train::TrainConfig config, again;
    train::parse_config(config, {reinterpret_cast<const char*>(data), size}, "train.json");
    const std::string written = train::to_json(config);
    train::parse_config(again, written, "written");
    fuzz::require(train::to_json(again) == written, "another configuration is read back");
    config.data = config.out = "somewhere";
    config.validate();
    config.schedule().learning_rate(0);
  });
}

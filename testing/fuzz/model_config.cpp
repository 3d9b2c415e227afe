// config.json of a model: what is read says the same when it is written and read again.
#include "flashgla/model/config.h"
#include "testing/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashgla;
  return fuzz::attempt(size, [&] {
    const model::ModelConfig config = model::parse_config({reinterpret_cast<const char*>(data), size}, "config.json");
    const std::string written = model::to_json(config);
    fuzz::require(model::to_json(model::parse_config(written, "written")) == written,
                  "another configuration is read back");
  });
}

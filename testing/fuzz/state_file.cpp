// A saved state of generation, loaded into a session of a small model. Files name the model by its fingerprint: sixteen
// times 'f' stands for it.
#include <algorithm>
#include <string_view>
#include <vector>

#include "flashgla/generate/generator.h"
#include "flashgla/model/checkpoint.h"
#include "testing/fuzz/fuzz.h"

namespace {

using namespace flashgla;

struct Subject {
  Subject()
      : model(model::parse_config(R"({"hidden_size": 8, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 5,
          "gate_low_rank_dim": 4, "intermediate_size": 8, "use_short_conv": true})",
                                  "model"),
              DType::f32, Device::cpu(), false),
        session((model.parameters().initialize(1), model), 1),
        fingerprint(model::fingerprint(model)) {}
  model::LanguageModel model;
  generate::Session session;
  std::string fingerprint;
};

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Subject subject;
  constexpr std::string_view kPlaceholder = "ffffffffffffffff";
  std::vector<std::uint8_t> bytes(data, data + size);
  const auto place = std::search(bytes.begin(), bytes.end(), kPlaceholder.begin(), kPlaceholder.end());
  if (place != bytes.end()) std::copy(subject.fingerprint.begin(), subject.fingerprint.end(), place);
  const std::string path = fuzz::file_of("left.state", bytes);
  return fuzz::attempt(size, [&] {
    subject.session.load(subject.model, path);
    fuzz::require(subject.session.state.history.front().tokens >= 0, "a sequence has fewer than no tokens");
  });
}

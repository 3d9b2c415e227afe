// A saved state of generation, loaded into a session of a small model. An input that begins with 'S' is a list of
// changes to a state as it is saved: three bytes each, two for the place and one for the value. Every other input is
// the file; sixteen times 'f' in it stand for the model's fingerprint.
#include <algorithm>
#include <string_view>
#include <vector>

#include "flashgla/base/file.h"
#include "flashgla/generate/session.h"
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
        fingerprint(model::fingerprint(model)) {
    const std::string path = fuzz::file_of("saved.state", {});
    session.save(model, path);
    saved = read_file(path);
  }
  model::LanguageModel model;
  generate::Session session;
  std::string fingerprint, saved;
};

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Subject subject;
  constexpr std::string_view kPlaceholder = "ffffffffffffffff";
  std::vector<std::uint8_t> bytes(data, data + size);
  if (size > 0 && data[0] == 'S') {
    bytes.assign(subject.saved.begin(), subject.saved.end());
    for (std::size_t i = 1; i + 2 < size; i += 3) bytes[(data[i] | data[i + 1] << 8) % bytes.size()] = data[i + 2];
  }
  const auto place = std::search(bytes.begin(), bytes.end(), kPlaceholder.begin(), kPlaceholder.end());
  if (place != bytes.end()) std::copy(subject.fingerprint.begin(), subject.fingerprint.end(), place);
  const std::string path = fuzz::file_of("left.state", bytes);
  return fuzz::attempt(bytes.size(), [&] {
    subject.session.load(subject.model, path);
    fuzz::require(subject.session.state.history.front().tokens >= 0, "a sequence has fewer than no tokens");
  });
}

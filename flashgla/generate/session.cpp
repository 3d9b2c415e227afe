#include "flashgla/generate/session.h"

#include <algorithm>

#include "flashgla/base/memory.h"

namespace flashgla::generate {

Session::Session(const model::LanguageModel& model, std::int64_t sequences)
    : state(model.make_state(sequences, 0, model.ring_pays(sequences))),
      logits(Tensor::zeros({sequences, model.config().vocab_size}, DType::f32, model.device())),
      seen(Tensor::zeros({sequences, model.config().vocab_size}, DType::u8, model.device())) {}

void Session::reset() {
  state.reset();
  zero_memory(logits->data, logits->bytes(), logits->device);
  zero_memory(seen->data, seen->bytes(), seen->device);
}

std::vector<model::NamedTensor> Session::beside_state() const { return {{"logits", logits}, {"seen", seen}}; }

void Session::save(const model::LanguageModel& model, const std::string& path) const {
  model::save_state(model, state, path, beside_state());
}

void Session::load(const model::LanguageModel& model, const std::string& path) {
  model::DecodeState loaded = model::load_state(model, path, beside_state());
  if (loaded.sequences() != sequences()) {
    throw Error(path + ": holds " + std::to_string(loaded.sequences()) + " sequences; expected " +
                std::to_string(sequences()));
  }
  state = std::move(loaded);
}

bool Session::fresh() const { return longest() == 0; }

std::int64_t Session::longest() const {
  std::int64_t longest = 0;
  for (const model::DecodeState::History& history : state.history) longest = std::max(longest, history.tokens);
  return longest;
}

}  // namespace flashgla::generate

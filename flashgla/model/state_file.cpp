#include <xxhash.h>

#include <cstdio>

#include "flashgla/base/memory.h"
#include "flashgla/model/checkpoint.h"

namespace flashgla::model {

namespace {

constexpr const char* kKind = "flashgla decode state";

// The state's tensors under the names that they have in the file, the histories, and what the caller keeps beside them.
std::vector<NamedTensor> state_tensors(const DecodeState& state, const Tensor& tokens, const Tensor& hashes,
                                       const std::vector<NamedTensor>& beside) {
  std::vector<NamedTensor> tensors;
  for (std::size_t layer = 0; layer < state.layer_count(); ++layer) {
    for (std::size_t i = 0; i < state.layer(layer).size(); ++i) {
      tensors.push_back({"layers." + std::to_string(layer) + "." + state.layout(layer)[i].name, state.layer(layer)[i]});
    }
  }
  tensors.push_back({"history.tokens", tokens});
  tensors.push_back({"history.hash", hashes});
  tensors.insert(tensors.end(), beside.begin(), beside.end());
  return tensors;
}

}  // namespace

std::string fingerprint(const LanguageModel& model) {
  XXH3_state_t* hash = XXH3_createState();
  XXH3_64bits_reset(hash);
  const std::string config = to_json(model.config());
  XXH3_64bits_update(hash, config.data(), config.size());
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    const TensorView& value = parameter->value;
    if (value.device == Device::cpu()) {
      XXH3_64bits_update(hash, value.data, value.bytes());
    } else {
      const Tensor host = Tensor::empty(value.shape, value.dtype);
      copy_memory(host->data, Device::cpu(), value.data, value.device, value.bytes());
      XXH3_64bits_update(hash, host->data, host->bytes());
    }
  }
  const std::uint64_t digest = XXH3_64bits_digest(hash);
  XXH3_freeState(hash);
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(digest));
  return text;
}

void save_state(const LanguageModel& model, const DecodeState& state, const std::string& path,
                const std::vector<NamedTensor>& beside) {
  const Tensor tokens = Tensor::empty(Shape({state.sequences()}), DType::i64);
  const Tensor hashes = Tensor::empty(Shape({state.sequences()}), DType::i64);
  for (std::int64_t i = 0; i < state.sequences(); ++i) {
    const DecodeState::History& history = state.history[static_cast<std::size_t>(i)];
    tokens.as<std::int64_t>()[i] = history.tokens;
    hashes.as<std::int64_t>()[i] = static_cast<std::int64_t>(history.hash);
  }
  write_safetensors(path, state_tensors(state, tokens, hashes, beside),
                    {{"kind", kKind},
                     {"sequences", std::to_string(state.sequences())},
                     {"model_dtype", name_of(model.dtype())},
                     {"model_fingerprint", fingerprint(model)}});
}

DecodeState load_state(const LanguageModel& model, const std::string& path, const std::vector<NamedTensor>& beside) {
  const SafetensorsReader file(path);
  const auto stated = [&](const char* key) {
    const auto row = file.metadata().find(key);
    return row == file.metadata().end() ? std::string() : row->second;
  };
  if (stated("kind") != kKind) throw Error(path + ": not a state file; --save-state writes one");
  if (stated("model_dtype") != name_of(model.dtype())) {
    throw Error(path + ": belongs to a model loaded as " + stated("model_dtype") + ", but this one is " +
                name_of(model.dtype()) + "; load the model with --dtype " + stated("model_dtype"));
  }
  const std::string own = fingerprint(model);
  if (stated("model_fingerprint") != own) {
    throw Error(path + ": belongs to another model (fingerprint " + stated("model_fingerprint") + "; this one's is " +
                own + "); run the prompt again with --save-state");
  }
  const StoredTensor* history = file.find("history.tokens");
  if (history == nullptr || history->shape.size() != 1 || history->shape[0] < 1 || history->shape[0] > (1 << 20)) {
    throw Error(path + ": corrupt (no usable history.tokens); run the prompt again with --save-state");
  }
  // Before memory is taken for a number of sequences that a damaged file may make up.
  if (static_cast<std::uint64_t>(history->shape[0]) * model.make_state(1).bytes() > file.tensors().back().end) {
    throw Error(path + ": corrupt (smaller than the states of " + std::to_string(history->shape[0]) + " sequences)");
  }
  DecodeState state = model.make_state(history->shape[0]);
  const Tensor tokens = Tensor::empty(Shape({state.sequences()}), DType::i64);
  const Tensor hashes = Tensor::empty(Shape({state.sequences()}), DType::i64);
  file.read(state_tensors(state, tokens, hashes, beside));
  for (std::int64_t i = 0; i < state.sequences(); ++i) {
    state.history[static_cast<std::size_t>(i)] = {tokens.as<std::int64_t>()[i],
                                                  static_cast<std::uint64_t>(hashes.as<std::int64_t>()[i])};
  }
  return state;
}

}  // namespace flashgla::model

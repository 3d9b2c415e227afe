#include <algorithm>

#include "flashgla/base/memory.h"
#include "flashgla/base/random.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/model/checksum.h"

namespace flashgla::model {

namespace {

constexpr const char* kKind = "flashgla decode state";

// The state's tensors under the names that they have in the file (of growing ones the first `filled` rows of each
// sequence, gathered in `rows`), those of rings where asked for, the histories, and what the caller keeps beside them.
std::vector<NamedTensor> state_tensors(const DecodeState& state, bool rings, const std::vector<Tensor>& rows,
                                       const Tensor& tokens, const Tensor& hashes,
                                       const std::vector<NamedTensor>& beside) {
  std::vector<NamedTensor> tensors;
  std::size_t growing = 0;
  for (std::size_t layer = 0; layer < state.layer_count(); ++layer) {
    for (std::size_t i = 0; i < state.layer(layer).size(); ++i) {
      const bool grows = state.layout(layer)[i].growing;
      const TensorView entry = grows ? rows[growing++].view() : state.layer(layer)[i];
      if (!rings && state.layout(layer)[i].ring) continue;
      tensors.push_back({"layers." + std::to_string(layer) + "." + state.layout(layer)[i].name, entry});
    }
  }
  tensors.push_back({"history.tokens", tokens});
  tensors.push_back({"history.hash", hashes});
  tensors.insert(tensors.end(), beside.begin(), beside.end());
  return tensors;
}

// Memory for the filled rows of each growing entry: [sum over sequences of their tokens, ...], on the CPU.
std::vector<Tensor> filled_rows(const DecodeState& state, const std::vector<std::int64_t>& filled) {
  std::int64_t total = 0;
  for (const std::int64_t tokens : filled) total += tokens;
  std::vector<Tensor> rows;
  for (std::size_t layer = 0; layer < state.layer_count(); ++layer) {
    for (const mixers::StateEntry& entry : state.layout(layer)) {
      if (!entry.growing) continue;
      std::vector<std::int64_t> sizes(entry.shape.begin() + 1, entry.shape.end());
      sizes.front() = total;
      rows.push_back(Tensor::empty(Shape(sizes), entry.dtype));
    }
  }
  return rows;
}

// Between a state's growing entries and such rows.
void copy_rows(const DecodeState& state, const std::vector<std::int64_t>& filled, const std::vector<Tensor>& rows,
               bool into_state) {
  std::size_t growing = 0;
  for (std::size_t layer = 0; layer < state.layer_count(); ++layer) {
    for (std::size_t i = 0; i < state.layer(layer).size(); ++i) {
      if (!state.layout(layer)[i].growing) continue;
      const TensorView all = rows[growing++];
      std::int64_t begin = 0;
      for (std::size_t n = 0; n < filled.size(); ++n) {
        const TensorView own = all.slice(0, begin, begin + filled[n]);
        begin += filled[n];
        if (filled[n] == 0) continue;
        const TensorView cached = state.layer(layer)[i].select(0, static_cast<std::int64_t>(n)).slice(0, 0, filled[n]);
        const TensorView& from = into_state ? own : cached;
        const TensorView& to = into_state ? cached : own;
        copy_memory(to.data, to.device, from.data, from.device, own.bytes());
      }
    }
  }
}

// The same state without its rings, folded into what they lie beside.
DecodeState without_rings(const LanguageModel& model, const DecodeState& from, std::int64_t capacity) {
  model.fold_rings(from);
  DecodeState to = model.make_state(from.sequences(), capacity);
  for (std::size_t layer = 0; layer < to.layer_count(); ++layer) {
    for (std::size_t i = 0; i < to.layer(layer).size(); ++i) {
      const TensorView &source = from.layer(layer)[i], &own = to.layer(layer)[i];
      copy_memory(own.data, own.device, source.data, source.device, source.bytes());
    }
  }
  copy_memory(to.positions().data, to.positions().device, from.positions().data, from.positions().device,
              from.positions().bytes());
  to.history = from.history;
  return to;
}

}  // namespace

std::string fingerprint(const LanguageModel& model) {
  Checksum hash;
  ModelConfig native = model.config();  // the same in every layout
  native.layout = mixers::find_mixer(native.model_type).layouts.front().name;
  const std::string config = to_json(native);
  hash.add(config.data(), config.size());
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    const TensorView& value = parameter->value;
    if (value.device == Device::cpu()) {
      hash.add(value.data, value.bytes());
    } else {
      const Tensor host = Tensor::empty(value.shape, value.dtype);
      copy_memory(host->data, Device::cpu(), value.data, value.device, value.bytes());
      hash.add(host->data, host->bytes());
    }
  }
  return hash.text();
}

void save_state(const LanguageModel& model, const DecodeState& state, const std::string& path,
                const std::vector<NamedTensor>& beside) {
  const Tensor tokens = Tensor::empty(Shape({state.sequences()}), DType::i64);
  const Tensor hashes = Tensor::empty(Shape({state.sequences()}), DType::i64);
  std::vector<std::int64_t> filled;
  for (const DecodeState::History& history : state.history) filled.push_back(history.tokens);
  const std::vector<Tensor> rows = filled_rows(state, filled);
  copy_rows(state, filled, rows, false);
  for (std::int64_t i = 0; i < state.sequences(); ++i) {
    const DecodeState::History& history = state.history[static_cast<std::size_t>(i)];
    tokens.as<std::int64_t>()[i] = history.tokens;
    hashes.as<std::int64_t>()[i] = static_cast<std::int64_t>(history.hash);
  }
  write_safetensors(path, state_tensors(state, true, rows, tokens, hashes, beside),
                    {{"kind", kKind},
                     {"version", std::to_string(random::kVersion)},
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
  if (const std::string version = std::to_string(random::kVersion); stated("version") != version) {
    throw Error(path + ": a state of version " + (stated("version").empty() ? "1" : stated("version")) +
                ", after which this program (version " + version +
                ") would draw other tokens; run the prompt again with --save-state");
  }
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
  std::uint64_t constant_bytes = 0;
  std::uint64_t bytes_per_token = 0;
  for (const mixers::StateEntry& entry : describe_state(model.config(), model.dtype())) {
    (entry.growing ? bytes_per_token : constant_bytes) +=
        static_cast<std::uint64_t>(entry.shape.numel()) * size_of(entry.dtype);
  }
  if (static_cast<std::uint64_t>(history->shape[0]) * constant_bytes > file.tensors().back().end) {
    throw Error(path + ": corrupt (smaller than the states of " + std::to_string(history->shape[0]) + " sequences)");
  }
  const Tensor tokens = Tensor::empty(Shape({history->shape[0]}), DType::i64);
  file.read([&](const StoredTensor& stored) { return &stored == history ? tokens.view() : TensorView(); });
  const std::vector<std::int64_t> filled(tokens.as<std::int64_t>(), tokens.as<std::int64_t>() + tokens->numel());
  const std::int64_t longest = *std::max_element(filled.begin(), filled.end());
  for (const std::int64_t count : filled) {
    if (count < 0 ||
        (bytes_per_token > 0 && static_cast<std::uint64_t>(count) > file.tensors().back().end / bytes_per_token)) {
      throw Error(path + ": corrupt (a history of " + std::to_string(count) + " tokens)");
    }
  }
  const bool has_rings = std::any_of(file.tensors().begin(), file.tensors().end(),
                                     [](const StoredTensor& stored) { return stored.name.ends_with(".ring"); });
  // Without rings in the file nothing waits: those of the state stay zeros.
  DecodeState state = model.make_state(history->shape[0], longest, has_rings || model.ring_pays(history->shape[0]));
  const Tensor hashes = Tensor::empty(Shape({state.sequences()}), DType::i64);
  const std::vector<Tensor> rows = filled_rows(state, filled);
  file.read(state_tensors(state, has_rings, rows, tokens, hashes, beside));
  copy_rows(state, filled, rows, true);
  const Tensor positions = Tensor::empty(state.positions().shape, DType::i32);
  for (std::int64_t i = 0; i < state.sequences(); ++i) {
    if (tokens.as<std::int64_t>()[i] < 0) {
      throw Error(path + ": corrupt (a sequence of " + std::to_string(tokens.as<std::int64_t>()[i]) +
                  " tokens); run the prompt again with --save-state");
    }
    state.history[static_cast<std::size_t>(i)] = {tokens.as<std::int64_t>()[i],
                                                  static_cast<std::uint64_t>(hashes.as<std::int64_t>()[i])};
    positions.as<std::int32_t>()[i] = static_cast<std::int32_t>(tokens.as<std::int64_t>()[i]);
  }
  copy_memory(state.positions().data, state.positions().device, positions->data, Device::cpu(), positions->bytes());
  if (has_rings && !model.ring_pays(state.sequences())) return without_rings(model, state, longest);
  return state;
}

}  // namespace flashgla::model

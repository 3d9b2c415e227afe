#include "flashgla/model/checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "flashgla/base/file.h"
#include "flashgla/base/json.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/model/checksum.h"
#include "flashgla/model/quantise.h"

namespace flashgla::model {

namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kConfig = "config.json";
constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

std::string path_in(const std::string& folder, const std::string& name) { return (fs::path(folder) / name).string(); }

bool ends_with(std::string_view text, std::string_view end) { return text.ends_with(end); }

// The index's tensor -> file map.
std::map<std::string, std::string> read_index(const std::string& path) {
  std::map<std::string, std::string> map;
  try {
    const auto index = parse_json<ordered_json>(read_file(path), path);
    for (const auto& [tensor, file] : index.at("weight_map").items()) {
      const std::string name = file.get<std::string>();
      // Names only: an index must not make us read anywhere else.
      if (name.empty() || name.find('/') != std::string::npos) {
        throw Error(path + ": '" + tensor + "' is in '" + name + "'; expected the name of a file in the same folder");
      }
      map[tensor] = name;
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(path + ": not an index of shards (" + json_reason(error) + ")");
  }
  if (map.empty()) throw Error(path + ": names no tensors");
  return map;
}

using mixers::Layout;
using mixers::Renaming;

// `name` with each row's part replaced where it occurs.
std::string renamed(std::string name, std::span<const Renaming> rows) {
  for (const Renaming& row : rows) {
    const std::string_view ours = row.ours;
    if (const std::size_t at = name.find(ours); at != std::string::npos) name.replace(at, ours.size(), row.theirs);
  }
  return name;
}

// The names under which a parameter's tensor is accepted, its own in the layout first.
std::vector<std::string> names_of(const std::string& name, const Layout& layout) {
  std::vector<std::string> names = {renamed(name, layout.names)};
  for (const Renaming& row : layout.older_names) {
    if (name.find(row.ours) != std::string::npos) names.push_back(renamed(renamed(name, {&row, 1}), layout.names));
  }
  return names;
}

bool is_ignored(const std::string& name, const Layout& layout) {
  return std::any_of(layout.ignored.begin(), layout.ignored.end(),
                     [&](const char* end) { return name.ends_with(end); });
}

constexpr std::string_view kGateProjection = ".mlp.gate_proj.weight";
std::string up_projection_of(const std::string& gate_projection) {
  return gate_projection.substr(0, gate_projection.size() - kGateProjection.size()) + ".mlp.up_proj.weight";
}

// Whether this parameter is the gate's half of a fused projection [2I, D] in the file.
bool is_fused(const nn::Parameter& parameter, const StoredTensor& stored) {
  return ends_with(parameter.name, kGateProjection) && stored.shape.size() == 2 &&
         stored.shape[0] == 2 * parameter.shape[0] && stored.shape[1] == parameter.shape[1];
}

// config.json's quantization_config, as save_model writes it: whether the weights are of 8 or 4 bits.
constexpr const char* kQuantisation = "quantization_config";
constexpr int kQuantisationVersion = 1;
bool is_quantised(const std::string& folder) {
  const std::string path = path_in(folder, kConfig);
  const auto config = parse_json<ordered_json>(read_file(path), path);
  if (!config.contains(kQuantisation) || config[kQuantisation].is_null()) return false;
  const auto& row = config[kQuantisation];
  const auto text = [&](const char* key) {
    return row.is_object() && row.contains(key) ? row[key].dump() : std::string("absent");
  };
  if (text("quant_method") != "\"flashgla\"") {
    throw Error(path + ": quantization_config: quant_method is " + text("quant_method") +
                "; expected \"flashgla\" (flashgla convert --quantise makes it from weights in floats)");
  }
  if (text("version") != std::to_string(kQuantisationVersion)) {
    throw Error(path + ": quantization_config: version is " + text("version") + "; this program reads " +
                std::to_string(kQuantisationVersion) + ": quantise the model in floats again");
  }
  return true;
}

// The format of a matrix that the file holds in 8 or 4 bits.
std::optional<Format> packed_format(const nn::Parameter& parameter, const StoredTensor& stored) {
  if (stored.dtype != "U8" || parameter.shape.rank() != 2) return std::nullopt;
  for (const Format format : {Format::q8, Format::q4}) {
    const Shape shape = ops::quantised_linear::packed_shape(format, parameter.shape[0], parameter.shape[1]);
    if (stored.shape_text() == to_string(shape)) return format;
  }
  return std::nullopt;
}

// Checks names and shapes of the weights against the parameters, before memory is taken for a model that a wrong
// config may make absurdly large. Returns the stored name of each parameter; "" for one within a fused projection.
std::vector<std::string> match(const std::string& folder, const Weights& weights,
                               const std::vector<nn::Parameter>& parameters, const Layout& layout, bool tied,
                               bool quantised) {
  const std::string remedy = "; correct " + path_in(folder, kConfig) + " or use the weights that belong to it";
  std::vector<std::string> stored_names;
  std::set<std::string> used;
  if (tied) used.insert(renamed("lm_head.weight", layout.names));  // a copy of the embeddings
  for (const nn::Parameter& parameter : parameters) {
    const StoredTensor* stored = nullptr;
    const std::vector<std::string> names = names_of(parameter.name, layout);
    for (const std::string& name : names) {
      if (stored == nullptr) stored = weights.find(name);
    }
    if (stored == nullptr) {
      if (used.contains(parameter.name)) {  // within a fused projection
        stored_names.emplace_back();
        continue;
      }
      throw Error(folder + ": the weights have no tensor '" + names.front() + "' " + to_string(parameter.shape) +
                  ", which the config asks for" + remedy);
    }
    if (is_fused(parameter, *stored)) {
      used.insert(up_projection_of(parameter.name));
    } else if (!(quantised && packed_format(parameter, *stored)) &&
               stored->shape_text() != to_string(parameter.shape)) {
      throw Error(folder + ": tensor '" + stored->name + "' has shape " + stored->shape_text() +
                  ", but by the config it is " + to_string(parameter.shape) + remedy);
    }
    used.insert(stored->name);
    stored_names.push_back(stored->name);
  }
  for (const SafetensorsReader& file : weights.files) {
    for (const StoredTensor& stored : file.tensors()) {
      if (!used.contains(stored.name) && !is_ignored(stored.name, layout)) {
        throw Error(file.path() + ": tensor '" + stored.name + "' " + stored.shape_text() +
                    " has no place in the model that the config describes" + remedy);
      }
    }
  }
  return stored_names;
}

// Of the first that is in floats.
DType dtype_as_stored(const Weights& weights, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const StoredTensor* stored = weights.find(name);
    if (stored == nullptr || stored->dtype == "U8") continue;
    return stored->dtype == "BF16" ? DType::bf16 : stored->dtype == "F64" ? DType::f64 : DType::f32;
  }
  return DType::f32;
}

// Where the model's matrices lie in the mapped file. Throws Error when they cannot be used there.
void place_in_file(const Weights& weights, const std::vector<nn::Parameter>& parameters,
                   const std::vector<std::string>& stored_names, DType dtype,
                   std::map<std::string, nn::Placement>& places) {
  const SafetensorsReader& file = weights.files.front();
  const std::string remedy = "; flashgla convert writes a folder that can be mapped";
  if (weights.files.size() != 1) throw Error(file.path() + ": one of several files cannot be mapped" + remedy);
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const StoredTensor* stored = file.find(stored_names[i]);
    if (stored == nullptr || stored->begin < end) {
      throw Error(file.path() + ": is not in the model's order from " + parameters[i].name + " on" + remedy);
    }
    end = stored->end;
    if (parameters[i].shape.rank() != 2) continue;
    nn::Placement& place = places[parameters[i].name];
    const std::byte* bytes = file.bytes(*stored).data();
    const auto address = reinterpret_cast<std::uintptr_t>(bytes);
    const bool as_is = stored->dtype == (dtype == DType::bf16 ? "BF16" : dtype == DType::f64 ? "F64" : "F32");
    if (!place.format && (!as_is || address % size_of(dtype) != 0)) {
      throw Error(file.path() + ": " + stored->name + " is " + stored->dtype + " and would have to be copied as " +
                  name_of(dtype) + remedy);
    }
    place.memory = const_cast<std::byte*>(bytes);  // mapped read-only; inference only reads weights
  }
}

std::vector<NamedTensor> tensors_to_save(const LanguageModel& model, const Layout& layout, MlpLayout mlp_layout) {
  std::vector<NamedTensor> tensors;
  const auto& parameters = model.parameters().parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (mlp_layout == MlpLayout::fused && ends_with(parameters[i]->name, kGateProjection)) {
      // The up projection follows: together they are the fused matrix.
      tensors.push_back({renamed(parameters[i]->name, layout.names),
                         nn::adjacent_rows({parameters[i]->value, parameters[i + 1]->value})});
      ++i;
    } else {
      tensors.push_back({renamed(parameters[i]->name, layout.names), parameters[i]->value});
    }
  }
  return tensors;
}

std::vector<std::vector<NamedTensor>> split(std::vector<NamedTensor> tensors, std::size_t shard_bytes) {
  std::vector<std::vector<NamedTensor>> shards(1);
  std::size_t bytes = 0;
  for (NamedTensor& row : tensors) {
    if (shard_bytes > 0 && bytes > 0 && bytes + row.tensor.bytes() > shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += row.tensor.bytes();
    shards.back().push_back(std::move(row));
  }
  return shards;
}

std::string shard_name(std::size_t index, std::size_t count) {
  if (count == 1) return kWeights;
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

// Weights of an earlier save that the new one does not overwrite and that would be read instead of it.
void remove_stale(const std::string& folder, const std::set<std::string>& written) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool weights =
        name == kWeights || name == kIndex || (name.starts_with("model-") && name.ends_with(".safetensors"));
    if (weights && !written.contains(name)) fs::remove(entry.path(), error);
  }
}

// The tensors as a layout that stores others than ours has them, in memory of their own on the CPU.
std::vector<Tensor> convert_back(const LanguageModel& model, const Layout& layout, std::vector<NamedTensor>& tensors) {
  const ModelConfig& config = model.config();
  std::vector<Tensor> converted;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorView from = tensors[i].tensor;
    const Tensor stored = Tensor::empty(from.shape, from.dtype), exact = Tensor::empty(from.shape, DType::f32);
    copy_memory(stored->data, Device::cpu(), from.data, from.device, from.bytes());
    copy(stored, exact);
    layout.convert_back(config, *config.mixer.operator->(), model.parameters().parameters()[i]->name, exact);
    copy(exact, stored);
    tensors[i].tensor = stored;
    converted.push_back(stored);
  }
  return converted;
}

// Fills the parameters of a layout that stores others than ours: each is read in f32, converted and rounded.
void read_converted(const Weights& weights, const Layout& layout, LanguageModel& model,
                    const std::map<std::string, const nn::Parameter*>& destinations) {
  ModelConfig config = model.config();
  for (const SafetensorsReader& file : weights.files) {
    std::map<std::string, Tensor> tensors;  // of this file, by their names in it
    file.read([&](const StoredTensor& stored) -> TensorView {
      const auto row = destinations.find(stored.name);
      if (row == destinations.end()) return {};
      return tensors.emplace(stored.name, Tensor::empty(row->second->shape, DType::f32)).first->second;
    });
    for (const auto& [name, tensor] : tensors) {
      const nn::Parameter& parameter = *destinations.at(name);
      layout.convert(config, *config.mixer.operator->(), parameter.name, tensor);
      const Tensor rounded = Tensor::empty(parameter.shape, parameter.value.dtype);
      copy(tensor, rounded);
      copy_memory(parameter.value.data, parameter.value.device, rounded->data, Device::cpu(), rounded->bytes());
    }
  }
}

}  // namespace

const StoredTensor* Weights::find(std::string_view name) const {
  for (const SafetensorsReader& file : files) {
    if (const StoredTensor* stored = file.find(name)) return stored;
  }
  return nullptr;
}

Weights open_weights(const std::string& folder) {
  Weights weights;
  const std::string index_path = path_in(folder, kIndex);
  weights.sharded = fs::exists(index_path);
  if (!weights.sharded) {
    if (!fs::exists(path_in(folder, kWeights))) {
      throw Error(folder + ": has neither " + kWeights + " nor " + kIndex + "; a model folder has one of them");
    }
    weights.files.emplace_back(path_in(folder, kWeights));
    return weights;
  }
  const std::map<std::string, std::string> map = read_index(index_path);
  std::set<std::string> names;
  for (const auto& [tensor, file] : map) names.insert(file);
  std::set<std::string> seen;
  for (const std::string& name : names) {
    weights.files.emplace_back(path_in(folder, name));
    for (const StoredTensor& stored : weights.files.back().tensors()) {
      const auto row = map.find(stored.name);
      if (row == map.end() || row->second != name) {
        throw Error(path_in(folder, name) + ": holds tensor '" + stored.name + "', which " + kIndex + " says is " +
                    (row == map.end() ? "nowhere" : "in " + row->second));
      }
      seen.insert(stored.name);
    }
  }
  for (const auto& [tensor, file] : map) {
    if (!seen.contains(tensor)) {
      throw Error(path_in(folder, file) + ": has no tensor '" + tensor + "', which " + kIndex + " says is there");
    }
  }
  return weights;
}

std::string stored_fingerprint(const std::string& folder) {
  std::string facts = read_file(path_in(folder, kConfig));
  for (const SafetensorsReader& file : open_weights(folder).files) {
    for (const StoredTensor& tensor : file.tensors()) facts += tensor.name + tensor.dtype + tensor.shape_text();
    facts += file.checksum();
  }
  Checksum hash;
  hash.add(facts.data(), facts.size());
  return hash.text();
}

std::unique_ptr<LanguageModel> load_model(const std::string& folder, const LoadOptions& options) {
  const ModelConfig config = load_config(path_in(folder, kConfig));
  const Layout& layout = find_layout(config, config.layout);
  const bool quantised = is_quantised(folder);
  if (quantised && options.training) {
    throw Error(folder + ": its weights are of 8 or 4 bits; train the model in floats that it was made of");
  }
  if (quantised && options.dtype && options.map) {
    throw Error(folder + ": its weights are of 8 or 4 bits and would have to be decoded as " + name_of(*options.dtype) +
                "; leave out the dtype, or do not map them");
  }
  if (quantised && options.dtype) {
    LoadOptions own = options;
    own.dtype.reset();
    own.device = Device::cpu();
    return dequantise(*load_model(folder, own), *options.dtype, options.device, options.threads);
  }
  const auto weights_read = std::make_shared<Weights>(open_weights(folder));
  const Weights& weights = *weights_read;
  const std::vector<nn::Parameter> described = describe_parameters(config);
  const std::vector<std::string> stored_names =
      match(folder, weights, described, layout, config.tie_word_embeddings, quantised);

  // Beside packed weights a GPU's steps want what is not packed in bf16 (ops/linear_step).
  const bool on_gpu = options.device.kind == Device::Kind::cuda;
  const DType as_stored = quantised && on_gpu ? DType::bf16 : dtype_as_stored(weights, stored_names);
  const DType dtype = options.dtype.value_or(as_stored);
  std::map<std::string, nn::Placement> places;
  for (std::size_t i = 0; quantised && i < described.size(); ++i) {
    if (const StoredTensor* stored = weights.find(stored_names[i])) {
      places[described[i].name].format = packed_format(described[i], *stored);
    }
  }
  if (options.map) {
    if (layout.convert != nullptr || options.training || options.device != Device::cpu()) {
      throw Error(folder + ": only a model for inference on the CPU, in a layout that is not converted, can be mapped");
    }
    place_in_file(weights, described, stored_names, dtype, places);
  }
  const auto place = [&](const nn::Parameter& parameter) { return places[parameter.name]; };
  auto model = std::make_unique<LanguageModel>(config, dtype, options.device, options.training, place,
                                               options.map ? weights_read : nullptr, options.threads);
  const auto& parameters = model->parameters().parameters();
  if (layout.convert != nullptr) {
    if (quantised) throw Error(folder + ": weights of 8 or 4 bits are not read in the layout " + config.layout);
    std::map<std::string, const nn::Parameter*> destinations;
    for (std::size_t i = 0; i < parameters.size(); ++i) destinations[stored_names[i]] = parameters[i];
    read_converted(weights, layout, *model, destinations);
    return model;
  }
  std::map<std::string, TensorView> destinations;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (stored_names[i].empty() || places[parameters[i]->name].memory != nullptr) continue;
    const bool fused = i + 1 < parameters.size() && stored_names[i + 1].empty();
    destinations[stored_names[i]] =
        fused ? nn::adjacent_rows({parameters[i]->value, parameters[i + 1]->value}) : parameters[i]->value;
  }
  for (const SafetensorsReader& file : weights.files) {
    file.read([&](const StoredTensor& stored) {
      const auto row = destinations.find(stored.name);
      return row == destinations.end() ? TensorView() : row->second;
    });
  }
  return model;
}

void save_model(const LanguageModel& model, const std::string& folder, const SaveOptions& options) {
  make_folder(folder);
  const Layout& layout =
      options.layout.empty() ? written_layout(model.config()) : find_layout(model.config(), options.layout);
  const bool quantised = model.parameters().packed();
  if (quantised && options.mlp_layout == MlpLayout::fused) {
    throw Error("layout fused-mlp: is not written with weights of 8 or 4 bits");
  }
  if (quantised && layout.convert_back != nullptr) {
    throw Error(std::string("layout ") + layout.name + ": is not written with weights of 8 or 4 bits");
  }
  const std::string config_text = to_json(model.config(), layout);
  std::vector<NamedTensor> tensors = tensors_to_save(model, layout, options.mlp_layout);
  if (options.copy_of) {
    for (NamedTensor& row : tensors) row.tensor = options.copy_of(row.tensor);
  }
  std::vector<Tensor> converted;
  if (layout.convert_back != nullptr) converted = convert_back(model, layout, tensors);
  const auto shards = split(std::move(tensors), options.shard_bytes);
  std::deque<AtomicFile> files;
  std::set<std::string> written;
  ordered_json weight_map;
  std::size_t total = 0;
  const auto add_text = [&](const char* name, const std::string& text) {
    files.emplace_back(path_in(folder, name));
    files.back().write(text);
    files.back().close();
    written.insert(name);
  };
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    files.emplace_back(path_in(folder, name));
    write_safetensors(files.back(), shards[i], options.metadata, options.transfer);
    files.back().close();
    written.insert(name);
    for (const NamedTensor& row : shards[i]) {
      weight_map[row.name] = name;
      total += row.tensor.bytes();
    }
  }
  if (shards.size() > 1) {
    const ordered_json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    add_text(kIndex, index.dump(2) + "\n");
  }
  ordered_json config = ordered_json::parse(config_text);
  const std::map<DType, const char*> torch_names = {
      {DType::f32, "float32"}, {DType::bf16, "bfloat16"}, {DType::f64, "float64"}};
  config["torch_dtype"] = torch_names.at(model.dtype());
  if (quantised) {
    config[kQuantisation] = {{"quant_method", "flashgla"},
                             {"version", kQuantisationVersion},
                             {"group_size", ops::quantised_linear::kGroup},
                             {"panel_rows", ops::quantised_linear::kPanelRows}};
  }
  add_text(kConfig, config.dump(2) + "\n");
  for (AtomicFile& file : files) file.finish();
  remove_stale(folder, written);
}

}  // namespace flashgla::model

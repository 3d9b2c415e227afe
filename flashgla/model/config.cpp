#include "flashgla/model/config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <type_traits>

#include "flashgla/base/error.h"
#include "flashgla/base/json.h"
#include "flashgla/base/names.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/model/foreign_keys.h"
#include "flashgla/nn/norm.h"

namespace flashgla::model {

namespace {

using mixers::Field;
using mixers::Layout;
using nlohmann::ordered_json;

// The one list of the common fields; model_type stands before it and the mixer's fields behind it.
std::vector<Field> common_fields(ModelConfig& config) {
  return {{"hidden_size", &config.hidden_size},
          {"num_hidden_layers", &config.num_hidden_layers},
          {"hidden_ratio", &config.hidden_ratio},
          {"intermediate_size", &config.intermediate_size},
          {"hidden_act", &config.hidden_act},
          {"use_mlp", &config.use_mlp},
          {"identity_mlp", &config.identity_mlp},
          {"norm_type", &config.norm_type},
          {"embedding_norm", &config.embedding_norm},
          {"learned_positions", &config.learned_positions},
          {"norm_eps", &config.norm_eps},
          {"tie_word_embeddings", &config.tie_word_embeddings},
          {"initializer_range", &config.initializer_range},
          {"vocab_size", &config.vocab_size},
          {"bos_token_id", &config.bos_token_id},
          {"eos_token_id", &config.eos_token_id},
          {"max_position_embeddings", &config.max_position_embeddings}};
}

std::vector<Field> all_fields(ModelConfig& config) {
  std::vector<Field> fields = common_fields(config);
  const std::vector<Field> own = config.mixer->fields();
  fields.insert(fields.end(), own.begin(), own.end());
  return fields;
}

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

[[noreturn]] void refuse(const std::string& source, const std::string& field, const ordered_json& value,
                         const std::string& expected) {
  throw Error(source, field, "is " + json_text(value), expected);
}

template <class T>
void read_value(const std::string& source, const std::string& field, const ordered_json& value, T& out) {
  if constexpr (IsOptional<T>::value) {
    if (value.is_null()) {
      out.reset();
    } else {
      read_value(source, field, value, out.emplace());
    }
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!value.is_boolean()) refuse(source, field, value, "true or false");
    out = value.get<bool>();
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() &&
         value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))) {
      refuse(source, field, value, "an integer");
    }
    out = value.get<std::int64_t>();
  } else if constexpr (std::is_same_v<T, double>) {
    if (!value.is_number()) refuse(source, field, value, "a number");
    out = value.get<double>();
  } else {
    if (!value.is_string()) refuse(source, field, value, "a string");
    out = value.get<std::string>();
  }
}

void read_field(const std::string& source, const std::string& name, const ordered_json& value, const Field& field) {
  std::visit([&](auto* out) { read_value(source, name, value, *out); }, field.value);
}

ordered_json value_of(const Field& field) {
  return std::visit(
      [](const auto* value) -> ordered_json {
        if constexpr (IsOptional<std::decay_t<decltype(*value)>>::value) {
          return *value ? ordered_json(**value) : ordered_json(nullptr);
        } else {
          return *value;
        }
      },
      field.value);
}

// The value at "a.b" (key b of the object a), or null when there is none.
const ordered_json* find(const ordered_json& object, std::string_view path) {
  const std::size_t dot = path.find('.');
  const auto at = object.find(std::string(path.substr(0, dot)));
  if (at == object.end()) return nullptr;
  if (dot == std::string_view::npos) return &*at;
  return at->is_object() ? find(*at, path.substr(dot + 1)) : nullptr;
}

void put(ordered_json& object, std::string_view path, const ordered_json& value) {
  const std::size_t dot = path.find('.');
  ordered_json& at = object[std::string(path.substr(0, dot))];
  if (dot == std::string_view::npos) {
    at = value;
  } else {
    put(at, path.substr(dot + 1), value);
  }
}

// Keys under which a layout may hold a field of ours, the one that is written first.
std::vector<std::string> keys_of(const Layout& layout, const std::string& ours) {
  std::vector<std::string> keys;
  for (const mixers::Renaming& row : layout.keys) {
    if (ours == row.ours) keys.emplace_back(row.theirs);
  }
  if (!layout.closed) keys.push_back(ours);
  for (const mixers::Renaming& row : layout.older_keys) {
    if (ours == row.ours) keys.emplace_back(row.theirs);
  }
  return keys;
}

void refuse_unsupported(const Layout& layout, const ordered_json& object, const std::string& source) {
  for (const mixers::Refusal& row : layout.refused) {
    const ordered_json* value = find(object, row.key);
    if (value == nullptr || value->is_null()) continue;
    std::istringstream accepted(row.accepted);
    std::string text;
    std::string expected;
    bool found = false;
    while (std::getline(accepted, text, '|')) {
      found = found || *value == ordered_json::parse(text);
      expected += (expected.empty() ? "" : " or ") + text;
    }
    if (!found) refuse(source, row.key, *value, expected.empty() ? "null" : expected);
  }
}

[[noreturn]] void refuse_key(const std::string& source, const std::string& key, const std::set<std::string>& known,
                             const std::string& of) {
  const std::string nearest = nearest_name(key, {known.begin(), known.end()});
  const std::string shown = json_text(ordered_json(key));
  throw Error(source + ": " + of + " has no field " + shown +
              (nearest.empty() ? "" : "; did you mean \"" + nearest + "\"?") +
              " (where it says nothing of what the model computes, take it out)");
}

// Refuses a key that nothing here reads. Null asks for nothing, and what begins with '_' is a note. `known` may have
// paths ("a.b"): then the object a is looked into, too.
void refuse_unknown(const ordered_json& object, const std::set<std::string>& known, const std::string& source,
                    const std::string& of, const std::string& prefix = {}) {
  for (const auto& [name, value] : object.items()) {
    const std::string key = prefix + name;
    if (value.is_null() || name.starts_with('_') || known.contains(key)) continue;
    if (prefix.empty() && std::ranges::find(kForeignKeys, name) != std::end(kForeignKeys)) continue;
    const auto below = known.lower_bound(key + ".");
    if (value.is_object() && below != known.end() && below->starts_with(key + ".")) {
      refuse_unknown(value, known, source, of, key + ".");
    } else {
      refuse_key(source, key, known, of);
    }
  }
}

// The keys that a layout has for these fields, those that it refuses where they ask for something, and those that it
// passes over.
std::set<std::string> known_keys(const Layout& layout, const std::vector<Field>& fields) {
  std::set<std::string> known;
  for (const Field& field : fields) {
    for (const std::string& key : keys_of(layout, field.name)) known.insert(key);
  }
  for (const mixers::Refusal& row : layout.refused) known.insert(row.key);
  for (const char* key : layout.without_effect) known.insert(key);
  return known;
}

// Fields of one struct from an object in a layout.
void read_fields(const std::vector<Field>& fields, const Layout& layout, const ordered_json& object,
                 const std::string& source) {
  const ordered_json defaults = ordered_json::parse(layout.defaults);
  for (const Field& field : fields) {
    const std::vector<std::string> keys = keys_of(layout, field.name);
    bool done = false;
    for (const std::string& key : keys) {
      const ordered_json* value = done ? nullptr : find(object, key);
      if (value == nullptr) continue;
      read_field(source, key, *value, field);
      done = true;
    }
    if (done) continue;
    // A layout's defaults may also speak of fields of ours for which it has no key.
    if (const auto own = defaults.find(field.name); own != defaults.end()) read_field(source, field.name, *own, field);
    for (const std::string& key : keys) {
      if (const ordered_json* value = find(defaults, key)) read_field(source, key, *value, field);
    }
  }
}

constexpr const char* kLayerMixers = "layer_mixers";

OtherLayers read_other(const mixers::Registration& row, const ordered_json& object, const std::string& source) {
  OtherLayers other{{}, &row, row.make_config()};
  if (!object.is_object()) refuse(source, "", object, "an object with layers");
  const auto layers = object.find("layers");
  if (layers == object.end() || !layers->is_array()) {
    throw Error(source, "layers", layers == object.end() ? "is absent" : "is " + layers->dump(), "a list of layers");
  }
  for (const ordered_json& layer : *layers) read_value(source, "layers", layer, other.layers.emplace_back());
  const Layout& layout = row.layouts.front();
  refuse_unsupported(layout, object, source);
  std::set<std::string> known = known_keys(layout, other.mixer->fields());
  known.insert({"layers", "model_type"});
  refuse_unknown(object, known, source, std::string("a layer of ") + row.name);
  read_fields(other.mixer->fields(), layout, object, source);
  return other;
}

void read_others(ModelConfig& config, const ordered_json& object, const std::string& source) {
  const auto read_list = [&](const char* key,
                             const std::function<const mixers::Registration&(const ordered_json&)>& row) {
    const auto list = object.find(key);
    if (list == object.end() || list->is_null()) return;
    const std::string inner = source + ": " + key;
    for (const ordered_json& one : list->is_array() ? *list : ordered_json::array({*list})) {
      if (!one.is_object()) refuse(source, key, *list, "an object, or a list of objects");
      config.others.push_back(read_other(row(one), one, inner));
    }
  };
  for (const mixers::Registration* row : mixers::registry()) {
    if (*row->hybrid_key != '\0')
      read_list(
          row->hybrid_key, [&](const ordered_json&) -> auto& { return *row; });
  }
  read_list(kLayerMixers, [&](const ordered_json& one) -> const mixers::Registration& {
    std::string type;
    const auto value = one.find("model_type");
    if (value == one.end()) throw Error(source, kLayerMixers, "has no model_type", "a mixer's");
    read_value(source, "model_type", *value, type);
    return mixers::find_mixer(type);
  });
}

void write_others(const ModelConfig& config, ordered_json& object) {
  for (const OtherLayers& other : config.others) {
    const bool keyed = *other.row->hybrid_key != '\0';
    ordered_json one = {{"layers", other.layers}};
    if (!keyed) one["model_type"] = other.row->name;
    for (const Field& field : other.mixer->fields()) one[field.name] = value_of(field);
    object[keyed ? other.row->hybrid_key : kLayerMixers].push_back(one);
  }
  // As flash-linear-attention writes a single one.
  for (const OtherLayers& other : config.others) {
    if (*other.row->hybrid_key == '\0') continue;
    ordered_json& list = object[other.row->hybrid_key];
    if (list.is_array() && list.size() == 1) list = ordered_json(list.front());
  }
}

struct Found {
  const mixers::Registration* row;
  const Layout* layout;
};

// Whose config.json this is: by model_type, and where several have it, by the key that only one of them has.
Found find_layout(const ordered_json& object, const std::string& source) {
  std::string type = mixers::registry().front()->name;
  const auto stated = object.find("model_type");
  if (stated != object.end()) read_value(source, "model_type", *stated, type);
  Found found{};
  for (const mixers::Registration* row : mixers::registry()) {
    for (const Layout& layout : row->layouts) {
      const bool signed_by_key = *layout.sign != '\0';
      if (type != layout.model_type && (stated != object.end() || !signed_by_key)) continue;
      if (signed_by_key && find(object, layout.sign) != nullptr) return {row, &layout};
      if (!signed_by_key && found.row == nullptr) found = {row, &layout};
    }
  }
  if (found.row == nullptr) {
    std::set<std::string> types;
    for (const mixers::Registration* row : mixers::registry()) {
      for (const Layout& layout : row->layouts) types.insert(layout.model_type);
    }
    std::string known;
    for (const std::string& one : types) known += (known.empty() ? "" : ", ") + one;
    throw Error(source + ": model_type: unknown '" + type + "'; known: " + known);
  }
  return found;
}

}  // namespace

ModelConfig::ModelConfig() : ModelConfig(mixers::registry().front()->name) {}

ModelConfig::ModelConfig(const std::string& type) : model_type(type), mixer(mixers::find_mixer(type).make_config()) {
  const Layout& native = mixers::find_mixer(type).layouts.front();
  layout = native.name;
  read_fields(all_fields(*this), native, ordered_json::object(), "defaults");
}

std::int64_t ModelConfig::mlp_dim() const {
  if (intermediate_size) return *intermediate_size;
  if (const std::int64_t own = mixer->own_mlp_width(*this); own > 0) return own;
  const auto width = static_cast<std::int64_t>(static_cast<double>(hidden_size * hidden_ratio) * 2.0 / 3.0);
  return (width + 255) / 256 * 256;
}

mixers::MostTokens ModelConfig::most_tokens() const {
  mixers::MostTokens least = mixer->most_tokens();
  const auto take = [&](const mixers::MostTokens& other) {
    if (other.count < least.count) least = other;
  };
  for (const OtherLayers& other : others) take(other.mixer->most_tokens());
  if (learned_positions)
    take({max_position_embeddings, "positions that the model has learned (max_position_embeddings)"});
  return least;
}

const mixers::AnyConfig& ModelConfig::mixer_of(std::int64_t layer) const {
  for (const OtherLayers& other : others) {
    if (std::find(other.layers.begin(), other.layers.end(), layer) != other.layers.end()) return other.mixer;
  }
  return mixer;
}

void ModelConfig::set(const std::string& name, const std::string& json) {
  for (const Field& field : all_fields(*this)) {
    if (name == field.name) return read_field("config", name, ordered_json::parse(json), field);
  }
  throw Error("config: a " + model_type + " has no field '" + name + "'");
}

void ModelConfig::validate() const {
  using mixers::require;
  constexpr std::int64_t kLargest = 1 << 20;  // keeps every product of two sizes far from overflow
  const auto positive = mixers::require_size;
  positive("hidden_size", hidden_size, kLargest);
  positive("num_hidden_layers", num_hidden_layers, 4096);
  positive("hidden_ratio", hidden_ratio, 1024);
  if (intermediate_size) positive("intermediate_size", *intermediate_size, 64 * kLargest);
  positive("vocab_size", vocab_size, 64 * kLargest);
  require(norm_eps > 0.0 && norm_eps < 1.0, "norm_eps", std::to_string(norm_eps), "between 0 and 1");
  require(std::isfinite(initializer_range) && initializer_range > 0.0, "initializer_range",
          std::to_string(initializer_range), "a positive number");
  require(hidden_act == "swish" || hidden_act == "silu", "hidden_act", "'" + hidden_act + "'", "'swish' or 'silu'");
  require(bos_token_id >= 0 && bos_token_id < vocab_size, "bos_token_id", std::to_string(bos_token_id),
          "0 to vocab_size - 1");
  require(eos_token_id >= 0 && eos_token_id < vocab_size, "eos_token_id", std::to_string(eos_token_id),
          "0 to vocab_size - 1");
  nn::norm_kind_from_name(norm_type);
  require(!identity_mlp || use_mlp, "identity_mlp", "true", "false, or use_mlp to be true");
  if (learned_positions) positive("max_position_embeddings", max_position_embeddings, 64 * kLargest);
  mixer->validate(*this);
  std::set<std::int64_t> named;
  for (const OtherLayers& other : others) {
    for (const std::int64_t layer : other.layers) {
      require(layer >= 0 && layer < num_hidden_layers, "layers", std::to_string(layer), "0 to num_hidden_layers - 1");
      require(named.insert(layer).second, "layers", std::to_string(layer) + " twice", "each layer once");
    }
    other.mixer->validate(*this);
  }
}

namespace {
// Python's JSON has infinities, which JSON has not: as strings.
std::string with_quoted_infinities(std::string json) {
  constexpr std::string_view kWord = "Infinity";
  bool inside = false;  // a string
  for (std::size_t i = 0; i < json.size(); ++i) {
    if (json[i] == '\\' && inside) {
      ++i;
    } else if (json[i] == '"') {
      inside = !inside;
    } else if (!inside && json.compare(i, kWord.size(), kWord) == 0) {
      json.insert(i + kWord.size(), "\"");
      json.insert(i, "\"");
      i += kWord.size() + 1;
    }
  }
  return json;
}
}  // namespace

ModelConfig parse_config(const std::string& json, const std::string& source) {
  const auto object = parse_json<ordered_json>(with_quoted_infinities(json), source);
  if (!object.is_object()) throw Error(source + ": not a JSON object");
  const Found found = find_layout(object, source);
  refuse_unsupported(*found.layout, object, source);
  ModelConfig config(found.row->name);
  config.layout = found.layout->name;
  std::set<std::string> known = known_keys(*found.layout, all_fields(config));
  if (!found.layout->closed) {
    known.insert(kLayerMixers);
    for (const mixers::Registration* row : mixers::registry()) known.insert(row->hybrid_key);
  }
  refuse_unknown(object, known, source, std::string("a ") + found.row->name);
  read_fields(all_fields(config), *found.layout, object, source);
  if (!found.layout->closed) read_others(config, object, source);
  try {
    config.validate();
  } catch (const Error& error) {
    throw Error(source + ": " + error.what());
  }
  return config;
}

ModelConfig load_config(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error(path + ": cannot be read; a model folder has config.json and model.safetensors");
  std::ostringstream text;
  text << file.rdbuf();
  return parse_config(text.str(), path);
}

const Layout& find_layout(const ModelConfig& config, const std::string& name) {
  std::string known;
  for (const Layout& layout : mixers::find_mixer(config.model_type).layouts) {
    if (name == layout.name) return layout;
    known += (known.empty() ? "" : ", ") + std::string(layout.name);
  }
  throw Error("layout: a " + config.model_type + " has no layout '" + name + "'; it has: " + known);
}

const Layout& written_layout(const ModelConfig& config) {
  const Layout& own = find_layout(config, config.layout);
  return own.convert == nullptr ? own : mixers::find_mixer(config.model_type).layouts.front();
}

std::string to_json(const ModelConfig& config) { return to_json(config, written_layout(config)); }

std::string to_json(const ModelConfig& config, const Layout& layout) {
  ModelConfig copy = config;
  copy.mixer->settle(copy);
  for (OtherLayers& other : copy.others) other.mixer->settle(copy);
  // Of a width that follows from a ratio other libraries know nothing.
  const bool says_width = keys_of(layout, "hidden_ratio").empty() && !keys_of(layout, "intermediate_size").empty();
  if (says_width && config.use_mlp) copy.intermediate_size = config.mlp_dim();
  ordered_json object;
  if (*layout.architecture != '\0') object["architectures"] = {layout.architecture};
  object["model_type"] = layout.model_type;
  object.update(ordered_json::parse(layout.constants));
  if (layout.closed && !config.others.empty()) {
    throw Error(std::string("layout ") + layout.name + ": has no layers of different kinds, which the model has");
  }
  ModelConfig defaults(config.model_type);
  read_fields(all_fields(defaults), layout, ordered_json::object(), "defaults");
  const std::vector<Field> fields = all_fields(copy);
  const std::vector<Field> otherwise = all_fields(defaults);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const ordered_json value = value_of(fields[i]);
    const std::vector<std::string> keys = keys_of(layout, fields[i].name);
    const std::string_view name = fields[i].name;
    const bool of_no_mlp = !config.use_mlp && (name == "intermediate_size" || name == "hidden_ratio");
    if (keys.empty()) {
      if (of_no_mlp || (says_width && name == "hidden_ratio") || value == value_of(otherwise[i])) continue;
      throw Error(std::string("layout ") + layout.name + ": has no place for " + fields[i].name + " " + value.dump());
    }
    if (const ordered_json* same = find(object, keys.front()); same != nullptr && *same != value) {
      throw Error(std::string("layout ") + layout.name + ": " + fields[i].name + " is " + value.dump() +
                  " where another field of its key " + keys.front() + " is " + same->dump());
    }
    put(object, keys.front(), value);
  }
  write_others(copy, object);
  return object.dump(2) + "\n";
}

ModelConfig preset(const std::string& name) {
  std::string known;
  std::vector<std::string> names;
  for (const mixers::Registration* row : mixers::registry()) {
    for (const mixers::PresetRow& one : row->presets) {
      if (name == one.name) {
        ordered_json object = ordered_json::parse(one.json);
        object["model_type"] = row->name;
        return parse_config(object.dump(), name);
      }
      known += (known.empty() ? "" : ", ") + std::string(one.name);
      names.emplace_back(one.name);
    }
  }
  throw Error("preset: unknown '" + name + "'" + did_you_mean(name, names) + "; known: " + known);
}

std::vector<Preset> presets() {
  std::vector<Preset> all;
  for (const mixers::Registration* row : mixers::registry()) {
    for (const mixers::PresetRow& one : row->presets) all.push_back({one.name, one.summary});
  }
  return all;
}

}  // namespace flashgla::model

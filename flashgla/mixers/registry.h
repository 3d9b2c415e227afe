// The mixers there are. Everything outside a mixer's folder that depends on which mixer it is, is in its row.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "flashgla/base/tensor.h"
#include "flashgla/mixers/config.h"

namespace flashgla::mixers {

// A key of config.json that a layout calls otherwise, or a part of a parameter's name.
struct Renaming {
  const char* ours;
  const char* theirs;  // of a key: "a.b" is key b of the object a
};

// Lists one behind the other.
template <std::size_t... N>
constexpr auto joined(const Renaming (&... lists)[N]) {
  std::array<Renaming, (N + ...)> all{};
  auto at = all.begin();
  ((at = std::copy(lists, lists + N, at)), ...);
  return all;
}

// A key that must be absent, null or one of these values (JSON texts, separated by '|'), because anything else would
// change what the model computes in a way that is not implemented.
struct Refusal {
  const char* key;
  const char* accepted;
};

// How models with this mixer are written down by a library: keys of config.json and names of parameters. The first of a
// row is flash-linear-attention's, or our own where that has none: its names are the ones used everywhere here.
struct Layout {
  const char* name;          // of `flashgla convert --layout`: "fla", "hf", "authors"
  const char* model_type;    // in config.json
  const char* architecture;  // in config.json
  const char* sign = "";     // a key that tells it from another layout of the same model_type; "": none
  // A JSON object, in the layout's own keys: what an absent key stands for, where that is not our default.
  const char* defaults = "{}";
  std::span<const Renaming> keys = {};        // those that are called otherwise there
  std::span<const Renaming> older_keys = {};  // accepted in reading beside ours
  std::span<const Refusal> refused = {};
  // Keys that say nothing of what the model computes (initial values, kernels): passed over. Any other that is unknown
  // is refused by name.
  std::span<const char* const> without_effect = {};
  // The parts of a parameter's name that differ, each replaced where it occurs, in order.
  std::span<const Renaming> names = {};
  // Other names of the same, accepted in reading; theirs is tried when ours is not there.
  std::span<const Renaming> older_names = {};
  // Ends of names of tensors that are passed over.
  std::span<const char* const> ignored = {};
  // Only keys of `keys` exist there: a field without one is written only as its default.
  bool closed = false;
  const char* constants = "{}";  // a JSON object of keys that are written beside the fields'
  // Applied to each parameter read from such a checkpoint: name as here, value f32 on the CPU. Null: nothing. A layout
  // that has it is written only where it is asked for by name, since not every model fits it.
  void (*convert)(const Common& common, const Config& config, const std::string& name,
                  const TensorView& value) = nullptr;
  // The other way, beside `convert`. Throws Error where the layout cannot say what the model computes.
  void (*convert_back)(const Common& common, const Config& config, const std::string& name,
                       const TensorView& value) = nullptr;
};

// A configuration with a name, as JSON in the first layout's keys without model_type.
struct PresetRow {
  const char* name;
  const char* summary;
  const char* json;
};

struct Registration {
  const char* name;  // the first layout's model_type
  const char* summary;
  std::unique_ptr<Config> (*make_config)();
  std::span<const Layout> layouts;
  std::span<const PresetRow> presets;
  // Key of config.json under which some layers of another model may have this mixer ("attn" for softmax attention in
  // flash-linear-attention's hybrids); "": "layer_mixers", which names the model_type.
  const char* hybrid_key = "";
};

std::span<const Registration* const> registry();
const Registration& find_mixer(std::string_view name);  // throws Error that lists the names

}  // namespace flashgla::mixers

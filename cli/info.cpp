// flashgla info: what a model is, from a folder or a preset.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "cli/progress.h"
#include "cli/say.h"
#include "cli/state_size.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/base/json.h"
#include "flashgla/base/names.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/model/cost.h"
#include "flashgla/text/tokenizer.h"
#include "flashgla/train/run_folder.h"

namespace flashgla::cli {

namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;
namespace quantised_linear = ops::quantised_linear;

struct InfoArguments {
  std::string what;
  bool json = false;
};

struct Files {
  std::vector<std::string> weights;
  std::uint64_t bytes = 0;
  std::string dtype;  // of the embeddings; where matrices are of 8 or 4 bits, their formats
  std::string layout;
  std::vector<std::string> tokenizer;
  // Matrices of 8 or 4 bits: how many tensors in each format, how many bytes. Empty: all in floats.
  std::map<std::string, std::pair<std::int64_t, std::uint64_t>> formats;
};

struct Model {
  std::string source;
  model::ModelConfig config;
  std::optional<Files> files;  // absent: a preset or a config.json alone
};

Files describe_files(const std::string& folder, const model::ModelConfig& config) {
  const model::Weights weights = model::open_weights(folder);
  Files files;
  for (const model::SafetensorsReader& file : weights.files) {
    files.weights.push_back(fs::path(file.path()).filename().string());
    files.bytes += fs::file_size(file.path());
  }
  const model::StoredTensor* embeddings = weights.find("model.embeddings.weight");
  files.dtype = embeddings == nullptr ? "?" : embeddings->dtype;
  std::map<std::string, std::pair<std::int64_t, std::uint64_t>> formats;
  std::set<std::string> packed;
  for (const model::SafetensorsReader& file : weights.files) {
    for (const model::StoredTensor& tensor : file.tensors()) {
      std::string format = tensor.dtype;
      for (const auto row : {quantised_linear::Format::q8, quantised_linear::Format::q4}) {
        if (tensor.dtype == "U8" && tensor.shape.size() == 3 && tensor.shape[2] == quantised_linear::block_bytes(row)) {
          format = quantised_linear::name_of(row);
          packed.insert(format);
        }
      }
      auto& [tensors, bytes] = formats[format];
      ++tensors;
      bytes += tensor.end - tensor.begin;
    }
  }
  if (!packed.empty()) {
    files.formats = std::move(formats);
    files.dtype = packed.size() == 1 ? *packed.begin() : "q4 and q8";
  }
  const model::StoredTensor* gate = weights.find("model.layers.0.mlp.gate_proj.weight");
  const bool fused = gate != nullptr && !gate->shape.empty() && gate->shape[0] == 2 * config.mlp_dim();
  files.layout = config.layout + (fused ? ", MLP gate and up projections fused (before 2025-02)" : "");
  for (const char* name : text::tokenizer_files()) {
    if (fs::exists(fs::path(folder) / name)) files.tokenizer.emplace_back(name);
  }
  return files;
}

Model find_model(const std::string& what) {
  if (fs::is_directory(what)) {
    const std::string folder = train::find_model_folder(what);
    const model::ModelConfig config = model::load_config((fs::path(folder) / "config.json").string());
    return {folder, config, describe_files(folder, config)};
  }
  if (fs::is_regular_file(what)) return {what, model::load_config(what), std::nullopt};
  for (const model::Preset& preset : model::presets()) {
    if (preset.name == what) return {preset.name + ": " + preset.summary, model::preset(what), std::nullopt};
  }
  std::string listed;
  std::vector<std::string> names;
  for (const model::Preset& preset : model::presets()) {
    names.push_back(preset.name);
    listed += (listed.empty() ? "" : ", ") + preset.name;
  }
  throw Error("info: '" + what + "' is neither a model folder, a config.json nor a preset" + did_you_mean(what, names) +
              "; presets: " + listed);
}

// Parameters of the same name but for the layer's number, and of the same shape.
struct ParameterGroup {
  std::string name;  // "model.layers.*.attn.q_proj.weight"
  Shape shape;
  std::int64_t tensors = 0;
  std::int64_t count() const { return tensors * shape.numel(); }
};

std::vector<ParameterGroup> group_parameters(const model::ModelConfig& config) {
  constexpr std::string_view kLayers = "model.layers.";
  std::vector<ParameterGroup> groups;
  for (const nn::Parameter& parameter : model::describe_parameters(config)) {
    std::string name = parameter.name;
    if (name.starts_with(kLayers)) name.replace(kLayers.size(), name.find('.', kLayers.size()) - kLayers.size(), "*");
    auto group =
        std::find_if(groups.begin(), groups.end(), [&](const ParameterGroup& row) { return row.name == name; });
    if (group == groups.end()) group = groups.insert(groups.end(), {name, parameter.shape, 0});
    ++group->tensors;
  }
  return groups;
}

struct Memory {
  double weights_bf16, weights_f32, training_f32, training_bf16;
  StateSize state;
};

Memory describe_memory(const model::ModelConfig& config) {
  const auto count = static_cast<double>(model::parameter_count(config));
  Memory memory{};
  memory.weights_bf16 = 2 * count;
  memory.weights_f32 = 4 * count;
  memory.training_f32 = (4 + 4 + 8) * count;       // weights, gradients, two moments
  memory.training_bf16 = (2 + 4 + 8 + 4) * count;  // and the f32 master
  memory.state = state_size(config);
  return memory;
}

// Of all tensors, where some are of 8 or 4 bits.
double bytes_of_formats(const Files& files) {
  std::uint64_t bytes = 0;
  for (const auto& [format, row] : files.formats) bytes += row.second;
  return static_cast<double>(bytes);
}

void print_json(const Model& model) {
  Json object = {{"source", model.source}, {"config", Json::parse(model::to_json(model.config))}};
  object["parameters"] = model::parameter_count(model.config);
  for (const ParameterGroup& group : group_parameters(model.config)) {
    object["parameter_groups"].push_back({{"name", group.name},
                                          {"shape", std::vector<std::int64_t>(group.shape.begin(), group.shape.end())},
                                          {"tensors", group.tensors},
                                          {"parameters", group.count()}});
  }
  const Memory memory = describe_memory(model.config);
  object["memory_bytes"] = {{"weights_bf16", memory.weights_bf16},
                            {"weights_f32", memory.weights_f32},
                            {"training_f32_without_activations", memory.training_f32},
                            {"training_bf16_without_activations", memory.training_bf16},
                            {"decode_state_per_sequence", memory.state.constant},
                            {"decode_state_per_token", memory.state.per_token}};
  if (model.files && !model.files->formats.empty()) {
    object["memory_bytes"]["weights_as_stored"] = bytes_of_formats(*model.files);
  }
  if (model.files) {
    object["files"] = {{"weights", model.files->weights},
                       {"bytes", model.files->bytes},
                       {"dtype", model.files->dtype},
                       {"layout", model.files->layout},
                       {"tokenizer", model.files->tokenizer}};
    for (const auto& [format, row] : model.files->formats) {
      object["files"]["quantised"][format] = {{"tensors", row.first}, {"bytes", row.second}};
    }
  }
  print("{}\n", json_text(object, 2));
}

std::string with_commas(std::int64_t count) {
  std::string digits = std::to_string(count);
  for (std::int64_t at = static_cast<std::int64_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<std::size_t>(at), ",");
  }
  return digits;
}

std::string joined(const std::vector<std::string>& names) {
  if (names.size() > 3) return names.front() + " ... " + names.back() + " (" + std::to_string(names.size()) + " files)";
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

void print_text(const Model& model) {
  print("{}\n\nConfig\n", model.source);
  const Json config = Json::parse(model::to_json(model.config));
  for (const auto& [key, value] : config.items()) {
    if (key != "architectures") print("  {:<26} {}\n", key, value.is_null() ? "-" : value.dump());
  }
  if (model.config.use_mlp) print("  {:<26} {}\n", "MLP channels", model.config.mlp_dim());
  print("\nParameters\n");
  for (const ParameterGroup& group : group_parameters(model.config)) {
    print("  {:<46} {:<14} {:>3} x  {:>15}\n", group.name, to_string(group.shape), group.tensors,
          with_commas(group.count()));
  }
  const std::int64_t count = model::parameter_count(model.config);
  print("  {:<46} {:<14} {:>3}    {:>15}  ({})\n", "total", "", "", with_commas(count),
        format_count(static_cast<double>(count)));
  const Memory memory = describe_memory(model.config);
  print("\nMemory\n");
  const bool packed = model.files && !model.files->formats.empty();
  const std::string stored =
      packed ? fmt::format("{} as stored; decoded ", format_bytes(bytes_of_formats(*model.files))) : "";
  print("  {:<46} {}{} as bf16, {} as f32\n", "weights", stored, format_bytes(memory.weights_bf16),
        format_bytes(memory.weights_f32));
  print("  {:<46} {} as f32, {} as bf16; activations depend on the batch, `flashgla train` plans them\n",
        "training: weights, gradients, optimizer", format_bytes(memory.training_f32),
        format_bytes(memory.training_bf16));
  print("  {:<46} {}\n", "decoding: state of each sequence", text_of(memory.state));
  constexpr std::int64_t kLength = 2048;
  const mixers::Cost cost = model::cost(model.config, kLength);
  print("  {:<46} {} forward, {} in training\n", fmt::format("FLOPs of a token, length {}", kLength),
        format_count(cost.forward_flops), format_count(cost.training_flops));
  if (!model.files) return;
  print("\nFiles\n");
  print("  {:<46} {} ({}, {})\n", "weights", joined(model.files->weights),
        format_bytes(static_cast<double>(model.files->bytes)), model.files->dtype);
  std::string formats;
  for (const auto& [format, row] : model.files->formats) {
    formats += fmt::format("{}{}: {} tensors, {}", formats.empty() ? "" : "; ", format, row.first,
                           format_bytes(static_cast<double>(row.second)));
  }
  if (!formats.empty()) print("  {:<46} {}\n", "quantised", formats);
  print("  {:<46} {}\n", "layout", model.files->layout);
  print("  {:<46} {}\n", "tokenizer", model.files->tokenizer.empty() ? "none" : joined(model.files->tokenizer));
}

}  // namespace

void add_info(CLI::App& app) {
  auto arguments = std::make_shared<InfoArguments>();
  std::string presets;
  for (const model::Preset& preset : model::presets()) {
    presets += fmt::format("\n  {:<21} {}", preset.name, preset.summary);
  }
  CLI::App* verb = app.add_subcommand(
      "info", "Shows a model: its configuration, parameters, memory and files; or a preset (info --help lists them)");
  verb->footer("Presets:" + presets);
  verb->add_option("model", arguments->what,
                   "A model folder (config.json, model.safetensors), a config.json alone, or the name of a preset")
      ->required();
  verb->add_flag("--json", arguments->json, "Print JSON");
  verb->callback([arguments] {
    const Model model = find_model(arguments->what);
    if (arguments->json) {
      print_json(model);
    } else {
      print_text(model);
    }
  });
}

}  // namespace flashgla::cli

// flashgla convert: a model folder in another dtype, cut into other files, or in another layout.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "cli/checks.h"
#include "cli/progress.h"
#include "cli/say.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/base/names.h"
#include "flashgla/base/quantities.h"
#include "flashgla/data/dataset.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/model/quantise.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"
#include "flashgla/text/tokenizer.h"
#include "flashgla/train/run_folder.h"

namespace flashgla::cli {

namespace {

namespace fs = std::filesystem;

struct ConvertArguments {
  std::string in;
  std::string out;
  std::string dtype;
  std::string shard_size;
  std::string layout = "current";
  std::string quantise;
  std::string only;
  std::string calibrate;
  std::string method = "search";
  std::int64_t calibration_tokens = 65536;
  bool quiet = false;
};

std::size_t shard_bytes(const std::string& text) {
  try {
    if (const std::size_t bytes = parse_bytes(text); bytes > 0) return bytes;
  } catch (const Error&) {
  }
  throw Error("convert: --shard-size is '" + text + "'; expected a size such as 2GB or 500MB");
}

// Everything beside the weights and the config that belongs to a model: its tokenizer, above all.
void copy_companions(const std::string& in, const std::string& out) {
  std::vector<std::string> names = {"generation_config.json"};
  for (const char* name : text::tokenizer_files()) names.emplace_back(name);
  for (const std::string& name : names) {
    if (!fs::exists(fs::path(in) / name)) continue;
    write_file((fs::path(out) / name).string(), read_file((fs::path(in) / name).string()));
  }
}

// "f32", or "q4, q8 and f32": how a model's weights are stored.
std::string name_of_weights(const model::LanguageModel& model) {
  std::set<std::string> formats;
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    if (!ops::quantised_linear::is_packed(parameter->value)) continue;
    formats.insert(ops::quantised_linear::name_of(ops::quantised_linear::format_of(parameter->value)));
  }
  std::string names;
  for (const std::string& format : formats) names += (names.empty() ? "" : ", ") + format;
  return names + (names.empty() ? "" : " and ") + name_of(model.dtype());
}

template <class T>
std::int64_t count_not_finite(const TensorView& values) {
  return std::count_if(values.as<T>(), values.as<T>() + values.numel(),
                       [](T value) { return !std::isfinite(static_cast<float>(value)); });
}

// Quantisation refuses weights that are NaN or infinite; elsewhere they are kept, since another layout mends nothing.
void tell_of_damage(const model::LanguageModel& model, const std::string& in) {
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    if (ops::quantised_linear::is_packed(parameter->value)) continue;
    const std::int64_t count = parameter->value.dtype == DType::bf16 ? count_not_finite<BFloat16>(parameter->value)
                                                                     : count_not_finite<float>(parameter->value);
    if (count == 0) continue;
    say("flashgla: {}: {} of the {} weights of {} are NaN or infinite; the model is damaged, and written as it is\n",
        in, count, parameter->value.numel(), parameter->name);
    return;
  }
}

void run_convert(const ConvertArguments& arguments) {
  if (arguments.out.empty()) throw Error("convert: the output is empty; expected a folder");
  const std::string in = train::find_model_folder(arguments.in);
  model::LoadOptions load;
  if (!arguments.dtype.empty()) load.dtype = dtype_from_name(arguments.dtype);
  model::SaveOptions save;
  if (!arguments.shard_size.empty()) save.shard_bytes = shard_bytes(arguments.shard_size);
  if (arguments.layout == "fused-mlp") {
    save.mlp_layout = model::MlpLayout::fused;
  } else if (arguments.layout != "current") {
    save.layout = arguments.layout;
  }
  std::error_code ignored;
  if (fs::equivalent(in, arguments.out, ignored)) {
    throw Error("convert: the output is the input, " + in + "; name another folder");
  }
  if (fs::is_directory(fs::path(arguments.out) / "checkpoints", ignored)) {
    throw Error("convert: the output is a run's folder, " + arguments.out + "; name another folder");
  }
  if (fs::exists(fs::path(arguments.out) / data::kDatasetFile, ignored)) {
    throw Error("convert: the output, " + arguments.out + ", is a folder of prepared data; name another folder");
  }
  std::optional<model::QuantiseOptions> quantise;
  std::optional<model::Calibration> calibration;
  if (!arguments.quantise.empty()) {
    quantise.emplace();
    quantise->preset = model::find_quantisation_preset(arguments.quantise);
    const auto& [name, mlp, mixer, sensitive] = quantise->preset;
    constexpr auto kFew = ops::quantised_linear::Format::q4;
    if (arguments.method == "gptq" && mlp != kFew && mixer != kFew && sensitive != kFew) {
      throw Error("convert: --method gptq is for matrices of 4 bits, and " + arguments.quantise + " has none");
    }
    quantise->only = arguments.only;
    save.metadata["quantisation"] = arguments.quantise + (arguments.only.empty() ? "" : " of " + arguments.only);
  }
  auto model = model::load_model(in, load);
  if (quantise && !arguments.calibrate.empty()) {
    const auto tokenizer = text::load_tokenizer(in);
    text::TokenIds tokens = tokenizer->encode(read_file(arguments.calibrate));
    tokens.resize(std::min(tokens.size(), static_cast<std::size_t>(arguments.calibration_tokens)));
    if (tokens.empty()) throw Error("convert: --calibrate " + arguments.calibrate + ": there is no text in it");
    Context context;
    quantise->gptq = arguments.method == "gptq";
    calibration.emplace(context, *model, tokens, model->config().max_position_embeddings, quantise->gptq);
    quantise->calibration = &*calibration;
    save.metadata["quantisation"] += ", " + arguments.method + " on " + std::to_string(tokens.size()) + " tokens";
  }
  if (quantise) {
    Progress bar("quantise", model->parameters().count(), arguments.quiet);
    quantise->monitor = [&](std::int64_t done, std::int64_t) { bar.update(done); };
    model = model::quantise(*model, *quantise);
  }
  tell_of_damage(*model, in);
  model::save_model(*model, arguments.out, save);
  copy_companions(in, arguments.out);
  print("{}: {} parameters as {}, {}\n", arguments.out, format_count(static_cast<double>(model->parameters().count())),
        quantise ? arguments.quantise + " and " + name_of(model->dtype()) : name_of_weights(*model),
        format_bytes(static_cast<double>(model->parameters().value_bytes())));
}

}  // namespace

void add_convert(CLI::App& app) {
  auto arguments = std::make_shared<ConvertArguments>();
  CLI::App* verb = app.add_subcommand(
      "convert",
      "Rewrites a model folder: in another dtype, cut into shards, or in another layout. Reads every layout that\n"
      "flash-linear-attention has written, and those of other libraries that a kind of model has.\n"
      "  flashgla convert runs/first out --dtype bf16 --shard-size 2GB\n"
      "  flashgla convert M M-q4 --quantise q4");
  verb->add_option("in", arguments->in, "The model folder to read, or a run folder: its latest checkpoint")->required();
  verb->add_option("out", arguments->out, "The folder to write; made when it does not exist")->required();
  verb->add_option("--dtype", arguments->dtype, "bf16 or f32 (default: as stored)")->check(floating_dtype());
  verb->add_option("--shard-size", arguments->shard_size,
                   "Cut the weights into files of at most this size, such as 2GB");
  verb->add_option(
          "--layout", arguments->layout,
          "Names of tensors and keys: fla (flash-linear-attention), hf or mistral (transformers), own or authors, for "
          "models that have several; current: as they are; fused-mlp: gate and up projections in one matrix, as before "
          "2025-02")
      ->capture_default_str();
  auto* quantise = verb->add_option(
      "--quantise", arguments->quantise,
      "Weights in 8 or 4 bits, for generation and evaluation: q8 (all matrices 8 bits), q4 (mixers and MLP 4 bits,\n"
      "output projections and the head 8), q4-safe (MLP 4 bits, the rest 8), q4-all. docs/QUANTISATION.md has what\n"
      "they cost");
  verb->add_option("--quantise-only", arguments->only, "Only matrices whose name contains this, such as o_proj")
      ->needs(quantise);
  auto* calibrate =
      verb->add_option("--calibrate", arguments->calibrate,
                       "A text such as the model is for: errors are weighted by the inputs that it gives the matrices")
          ->check(CLI::ExistingFile)
          ->needs(quantise);
  verb->add_option(
          "--method", arguments->method,
          "With --calibrate: search (the best scale of each group), or gptq (and columns of 4 bits make up for "
          "the errors of others; minutes)")
      ->check(CLI::IsMember({"search", "gptq"}))
      ->capture_default_str()
      ->needs(calibrate);
  verb->add_option("--calibration-tokens", arguments->calibration_tokens, "So many of the text, at most")
      ->transform(positive_count())
      ->capture_default_str()
      ->needs(calibrate);
  verb->add_flag("--quiet", arguments->quiet, "No progress");
  verb->callback([arguments] { run_convert(*arguments); });
}

}  // namespace flashgla::cli

#include "flashgla/data/dataset.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"

namespace flashgla::data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRemedy = "; prepare the data again";

struct Part {
  TokenSpan span;
  double bytes_per_target = 0.0;
  double entropy_bits_per_byte = 0.0;
};

// One part of a prepared folder, checked against what data.json says of it.
Part open_part(const fs::path& folder, const char* stem, const nlohmann::json& json) {
  const std::string bin = folder / (std::string(stem) + ".bin");
  Part part;
  part.span = whole(TokenFile::open(bin, TokenFormat::megatron));
  const auto check = [&](const char* key, std::int64_t actual) {
    if (json.value(key, std::int64_t{-1}) != actual) {
      throw Error(bin + " holds " + std::to_string(actual) + " " + key + ", but " + kDatasetFile + " says " +
                  json.value(key, nlohmann::json()).dump() + kRemedy);
    }
  };
  check("tokens", part.span.size());
  check("documents", part.span.file->documents());
  if (json.contains("labels")) {
    const std::string labels = folder / (std::string(stem) + kLabelsEnding + ".bin");
    part.span.labels = TokenFile::open(labels, TokenFormat::megatron);
    if (part.span.labels->documents() != part.span.file->documents() ||
        2 * json.value("labels", std::int64_t{-1}) != part.span.labels->tokens()) {
      throw Error(labels + " holds " + std::to_string(part.span.labels->tokens() / 2) + " labels of " +
                  std::to_string(part.span.labels->documents()) + " documents, but " + kDatasetFile + " says " +
                  json.value("labels", nlohmann::json()).dump() + kRemedy);
    }
  }
  const double bytes = json.value("text_bytes", 0.0);
  const double targets = static_cast<double>(part.span.size() - part.span.file->documents());
  if (targets > 0) part.bytes_per_target = bytes / targets;
  if (bytes > 0) part.entropy_bits_per_byte = json.value("source_bits", 0.0) / bytes;
  return part;
}

// Null where the file is not one of ours.
nlohmann::json read_description(const std::string& file) {
  auto json = nlohmann::json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
  const bool ours = json.is_object() && json.contains("train") && (json.contains("tokenizer") || json.contains("task"));
  return ours ? json : nlohmann::json();
}

Dataset open_folder(const fs::path& folder) {
  const std::string file = folder / kDatasetFile;
  const nlohmann::json json = read_description(file);
  if (json.is_null()) throw Error(file + " is damaged" + kRemedy);
  Dataset dataset;
  try {
    const Part train = open_part(folder, kTrainStem, json["train"]);
    dataset.train = train.span;
    dataset.train_bytes_per_target = train.bytes_per_target;
    dataset.train_entropy_bits_per_byte = train.entropy_bits_per_byte;
    if (json.contains("validation")) {
      const Part validation = open_part(folder, kValidationStem, json["validation"]);
      dataset.validation = validation.span;
      dataset.validation_bytes_per_target = validation.bytes_per_target;
      dataset.validation_entropy_bits_per_byte = validation.entropy_bits_per_byte;
    }
    if (json.contains("task")) {
      dataset.vocab_size = json.at("task").at("vocabulary").get<std::int64_t>();
      return dataset;
    }
    dataset.tokenizer = text::load_tokenizer(folder);
    const auto fingerprint = json["tokenizer"].value("fingerprint", std::string());
    if (dataset.tokenizer->fingerprint() != fingerprint) {
      throw Error("the tokenizer in " + folder.string() + " (" + dataset.tokenizer->fingerprint() +
                  ") is not the one that made its tokens (" + fingerprint + ")" + kRemedy);
    }
  } catch (const nlohmann::json::exception&) {
    throw Error(file + " is damaged" + kRemedy);
  }
  dataset.vocab_size = dataset.tokenizer->vocab_size();
  return dataset;
}

}  // namespace

Dataset open_dataset(const std::string& path, const OpenOptions& options) {
  Dataset dataset;
  if (fs::is_directory(path)) {
    if (!fs::exists(fs::path(path) / kDatasetFile)) {
      throw Error(path + " holds no prepared data (no " + kDatasetFile + "); `flashgla data prepare TEXT --out " +
                  path + "` makes it");
    }
    if (!options.tokenizer.empty()) throw Error(path + " has its own tokenizer; give none");
    dataset = open_folder(path);
  } else {
    dataset.train = whole(TokenFile::open(path, options.format));
    // One file of a prepared folder has its tokenizer beside it.
    const fs::path folder = fs::absolute(dataset.train.file->path()).parent_path();
    const bool prepared = options.tokenizer.empty() && fs::exists(folder / kDatasetFile);
    if (prepared || !options.tokenizer.empty()) {
      dataset.tokenizer = text::load_tokenizer(prepared ? folder.string() : options.tokenizer);
    }
    const std::int64_t needed = static_cast<std::int64_t>(dataset.train.file->largest_token()) + 1;
    dataset.vocab_size = dataset.tokenizer ? dataset.tokenizer->vocab_size() : needed;
    if (needed > dataset.vocab_size) {
      throw Error(path + " holds the token " + std::to_string(needed - 1) + ", which its tokenizer (" +
                  std::to_string(dataset.vocab_size) + " words) does not have");
    }
  }
  if (!dataset.validation.file && options.validation > 0.0) {
    std::tie(dataset.train, dataset.validation) = split(dataset.train, options.validation);
    dataset.validation_bytes_per_target = dataset.train_bytes_per_target;
    dataset.train_entropy_bits_per_byte = 0.0;  // known of the whole only
  }
  return dataset;
}

bool is_prepared(const std::string& folder) {
  const fs::path file = fs::path(folder) / kDatasetFile;
  std::error_code unreadable;
  return fs::is_regular_file(file, unreadable) && !read_description(file).is_null();
}

std::vector<std::string> prepared_files() {
  std::vector<std::string> names = {kDatasetFile};
  for (const char* stem : {kTrainStem, kValidationStem}) {
    for (const char* ending : {".bin", ".idx"}) names.push_back(std::string(stem) + ending);
  }
  const auto tokenizer = text::tokenizer_files();
  names.insert(names.end(), tokenizer.begin(), tokenizer.end());
  return names;
}

void require_same_tokenizer(const Dataset& dataset, const text::Tokenizer& tokenizer, const std::string& path) {
  if (dataset.tokenizer) {
    if (dataset.tokenizer->fingerprint() == tokenizer.fingerprint()) return;
    const auto describe = [](const text::Tokenizer& which) {
      return std::string(which.kind()) + ", " + std::to_string(which.vocab_size()) + " words, " + which.fingerprint();
    };
    throw Error("the data in " + path + " was made with another tokenizer (" + describe(*dataset.tokenizer) +
                ") than the model's (" + describe(tokenizer) +
                "); prepare it with `--tokenizer` and the model's folder");
  }
  if (dataset.vocab_size > tokenizer.vocab_size()) {
    throw Error("the data in " + path + " holds the token " + std::to_string(dataset.vocab_size - 1) +
                ", but the model's tokenizer has " + std::to_string(tokenizer.vocab_size()) + " words");
  }
}

}  // namespace flashgla::data

#include "flashgla/eval/tasks.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/data/dataset.h"

namespace flashgla::eval {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// What Python's str.rstrip takes off, of ASCII.
constexpr std::string_view kSpaces = " \t\n\r\v\f\x1c\x1d\x1e\x1f";

std::int64_t characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

// Calls `take(line as an object, its name)` for every line that is not empty.
template <class Take>
void for_each_line(const std::string& path, Take&& take) {
  std::ifstream file(path);
  if (!file) throw Error("cannot read " + path + ": " + std::strerror(errno));
  std::string line;
  for (std::int64_t number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string name = path + ", line " + std::to_string(number);
    const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!object.is_object()) throw Error(name + ": is not a JSON object");
    if (!take(object, name)) return;
  }
}

std::string text_of(const json& object, const char* key, const std::string& name) {
  if (!object.contains(key)) throw Error(name + ": there is no \"" + key + "\"");
  if (!object[key].is_string()) throw Error(name + ": \"" + key + "\" is not a string");
  return object[key].get<std::string>();
}

Example example_of(const json& object, const std::string& name) {
  Example example;
  example.name = name;
  example.context = text_of(object, "context", name);
  if (!object.contains("choices")) {
    example.choices = {text_of(object, "continuation", name)};
  } else {
    const json& choices = object["choices"];
    if (!choices.is_array() || choices.size() < 2) throw Error(name + ": \"choices\" is not a list of two or more");
    for (const json& choice : choices) {
      if (!choice.is_string()) throw Error(name + ": one of the choices is not a string");
      example.choices.push_back(choice.get<std::string>());
    }
    example.delimiter = object.contains("delimiter") ? text_of(object, "delimiter", name) : " ";
    if (!object.contains("answer")) throw Error(name + ": there is no \"answer\"");
    const json& answer = object["answer"];
    if (!answer.is_number_integer() || answer.get<std::int64_t>() < 0 ||
        answer.get<std::int64_t>() >= static_cast<std::int64_t>(choices.size())) {
      throw Error(name + ": \"answer\" is " + answer.dump() + "; expected a number from 0 to " +
                  std::to_string(choices.size() - 1));
    }
    example.answer = answer.get<std::int64_t>();
  }
  for (const std::string& choice : example.choices) {
    if (choice.empty()) throw Error(name + ": a continuation is empty");
  }
  return example;
}

}  // namespace

std::int32_t prefix_token(const text::Tokenizer& tokenizer) {
  if (tokenizer.bos_id() >= 0) return tokenizer.bos_id();
  if (tokenizer.eos_id() >= 0) return tokenizer.eos_id();
  throw Error("evaluate: the tokenizer has neither a begin- nor an end-of-text token, which stands before a text");
}

std::int64_t count_words(std::string_view text) {
  std::int64_t words = 0;
  bool inside = false;
  for (const char c : text) {
    const bool space = kSpaces.find(c) != std::string_view::npos;
    words += !space && !inside ? 1 : 0;
    inside = !space;
  }
  return words;
}

Document document_of(const text::Tokenizer& tokenizer, std::string_view text) {
  Document document{{prefix_token(tokenizer)}, static_cast<std::int64_t>(text.size()), count_words(text)};
  const text::TokenIds ids = tokenizer.encode(text);
  document.tokens.insert(document.tokens.end(), ids.begin(), ids.end());
  return document;
}

Request encode_pair(const text::Tokenizer& tokenizer, std::string_view context, std::string_view continuation,
                    std::int64_t longest) {
  Request request;
  if (context.empty()) {
    request.continuation = tokenizer.encode(continuation);
    const std::int32_t prefix = prefix_token(tokenizer);
    if (!request.continuation.empty() && request.continuation.front() == prefix) {
      request.continuation.erase(request.continuation.begin());
    }
    request.context = {prefix};
  } else {
    const std::size_t last = context.find_last_not_of(kSpaces);
    const std::string_view spaces = context.substr(last == std::string_view::npos ? 0 : last + 1);
    context.remove_suffix(spaces.size());
    const auto encode = [&](const std::string& text) {
      text::TokenIds ids = tokenizer.encode(text);
      // A text that spells the begin-of-text token has it.
      const bool begins = !ids.empty() && ids.front() == tokenizer.bos_id();
      if (tokenizer.adds_bos() && !begins) ids.insert(ids.begin(), tokenizer.bos_id());
      return ids;
    };
    request.context = encode(std::string(context));
    request.continuation = encode(std::string(context) + std::string(spaces) + std::string(continuation));
    const std::size_t cut = std::min(request.context.size(), request.continuation.size());
    request.continuation.erase(request.continuation.begin(),
                               request.continuation.begin() + static_cast<std::ptrdiff_t>(cut));
    if (request.context.empty()) request.context = {prefix_token(tokenizer)};
  }
  const auto predicted = static_cast<std::int64_t>(request.continuation.size());
  if (predicted == 0) throw Error("the continuation has no tokens of its own");
  if (longest > 0) {
    if (predicted > longest) {
      throw Error("the continuation has " + std::to_string(predicted) + " tokens; the window is " +
                  std::to_string(longest));
    }
    const std::int64_t room = longest + 1 - predicted;
    const auto size = static_cast<std::int64_t>(request.context.size());
    if (size > room) request.context.erase(request.context.begin(), request.context.begin() + (size - room));
  }
  return request;
}

DataKind kind_of(const std::string& path) {
  const fs::path file(path);
  if (!fs::exists(file)) throw Error(path + ": no such file or folder");
  if (fs::is_directory(file)) {
    if (!fs::exists(file / data::kDatasetFile)) {
      throw Error(path + ": no prepared data there (" + data::kDatasetFile + "); `flashgla data prepare` makes it");
    }
    return DataKind::tokens;
  }
  if (file.extension() == ".bin") return DataKind::tokens;
  if (file.extension() != ".jsonl" && file.extension() != ".json") return DataKind::text;
  std::optional<DataKind> kind;
  for_each_line(path, [&](const json& object, const std::string& name) {
    if (object.contains("context") || object.contains("choices") || object.contains("continuation")) {
      kind = DataKind::examples;
    } else if (object.is_object()) {
      kind = DataKind::documents;
    }
    (void)name;
    return false;
  });
  if (!kind) throw Error(path + ": there is nothing in it");
  return *kind;
}

std::vector<Example> read_examples(const std::string& path) {
  std::vector<Example> examples;
  bool choices = false;
  for_each_line(path, [&](const json& object, const std::string& name) {
    examples.push_back(example_of(object, name));
    if (examples.size() == 1) choices = examples.back().answer.has_value();
    if (choices != examples.back().answer.has_value()) {
      throw Error(name + ": examples with choices and without are in one file");
    }
    return true;
  });
  if (examples.empty()) throw Error(path + ": there is nothing in it");
  return examples;
}

std::vector<std::string> read_documents(const std::string& path, const std::string& text_field) {
  std::vector<std::string> documents;
  for_each_line(path, [&](const json& object, const std::string& name) {
    documents.push_back(text_of(object, text_field.c_str(), name));
    return true;
  });
  return documents;
}

Verdict judge(const Example& example, std::span<const Score> scores) {
  const auto best = [&](auto&& length_of) {
    std::size_t most = 0;
    double top = 0.0;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const double value = scores[i].log_likelihood / static_cast<double>(length_of(example.choices[i]));
      if (i == 0 || value > top) top = value, most = i;
    }
    return static_cast<std::int64_t>(most) == *example.answer;
  };
  return {best([](const std::string&) { return 1; }),
          best([](const std::string& choice) { return characters(choice); }),
          best([](const std::string& choice) { return choice.size(); })};
}

}  // namespace flashgla::eval

// One place in a tokenizer.json, so that every complaint names it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace flashgla::text::huggingface {

class Part {
 public:
  // `place` is how messages name it: "runs/m/tokenizer.json: model". The JSON is the caller's and must outlive this.
  Part(const nlohmann::json& value, std::string place) : value_(&value), place_(std::move(place)) {}

  const nlohmann::json& json() const { return *value_; }
  const std::string& place() const { return place_; }

  bool is_null() const;
  bool is_object() const;
  bool is_array() const;
  bool has(const char* key) const;  // there, and not null
  Part at(const char* key) const;   // Throws Error when it is missing.
  std::vector<Part> elements(const char* key) const;

  std::string type() const;  // of an object: its "type"
  std::string text(const char* key) const;
  std::string text(const char* key, const std::string& otherwise) const;  // null or missing: otherwise
  std::optional<std::string> optional_text(const char* key) const;
  bool flag(const char* key, bool otherwise) const;
  std::int64_t integer(const char* key) const;

  // Throws an Error that names this place.
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  const nlohmann::json* value_;
  std::string place_;
};

}  // namespace flashgla::text::huggingface

#include "flashgla/text/huggingface/part.h"

#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"

namespace flashgla::text::huggingface {

void Part::refuse(const std::string& why) const { throw Error(place_ + ": " + why); }

bool Part::is_null() const { return value_->is_null(); }
bool Part::is_object() const { return value_->is_object(); }
bool Part::is_array() const { return value_->is_array(); }

bool Part::has(const char* key) const {
  if (!value_->is_object()) refuse("expected an object");
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

Part Part::at(const char* key) const {
  if (!has(key)) refuse(std::string("there is no \"") + key + "\"");
  return {(*value_)[key], place_ + ": " + key};
}

std::vector<Part> Part::elements(const char* key) const {
  const Part list = at(key);
  if (!list.is_array()) list.refuse("expected a list");
  std::vector<Part> parts;
  for (std::size_t i = 0; i < list.value_->size(); ++i) {
    parts.emplace_back((*list.value_)[i], list.place_ + "[" + std::to_string(i) + "]");
  }
  return parts;
}

std::string Part::type() const { return text("type"); }

std::string Part::text(const char* key) const {
  const Part part = at(key);
  if (!part.value_->is_string()) part.refuse("expected a string");
  return part.value_->get<std::string>();
}

std::string Part::text(const char* key, const std::string& otherwise) const { return has(key) ? text(key) : otherwise; }

std::optional<std::string> Part::optional_text(const char* key) const {
  return has(key) ? std::optional(text(key)) : std::nullopt;
}

bool Part::flag(const char* key, bool otherwise) const {
  if (!has(key)) return otherwise;
  const Part part = at(key);
  if (!part.value_->is_boolean()) part.refuse("expected true or false");
  return part.value_->get<bool>();
}

std::int64_t Part::integer(const char* key) const {
  const Part part = at(key);
  if (!part.value_->is_number_integer()) part.refuse("expected an integer");
  return part.value_->get<std::int64_t>();
}

}  // namespace flashgla::text::huggingface

#include "flashgla/text/huggingface/added_tokens.h"

#include <algorithm>
#include <map>

#include "flashgla/text/huggingface/unicode.h"

namespace flashgla::text::huggingface {
namespace {

std::size_t without_spaces_at_end(std::string_view text) {
  while (!text.empty()) {
    const Character character = last_character(text);
    if (!is_whitespace(character.code)) break;
    text.remove_suffix(character.length);
  }
  return text.size();
}

std::size_t spaces_at_start(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Character character = character_at(text, at);
    if (!is_whitespace(character.code)) break;
    at += character.length;
  }
  return at;
}

}  // namespace

void TokenFinder::add(const AddedToken* token) {
  std::size_t node = 0;
  for (const char c : token->shown) {
    const auto byte = static_cast<unsigned char>(c);
    const auto [child, fresh] = nodes_[node].children.try_emplace(byte, nodes_.size());
    node = child->second;
    if (fresh) nodes_.emplace_back();
  }
  if (node == 0) return;
  begins_[static_cast<unsigned char>(token->shown.front())] = true;
  nodes_[node].token = token;
}

const AddedToken* TokenFinder::at(std::string_view text) const {
  const AddedToken* longest = nullptr;
  std::size_t node = 0;
  for (const char c : text) {
    const auto child = nodes_[node].children.find(static_cast<unsigned char>(c));
    if (child == nodes_[node].children.end()) break;
    node = child->second;
    if (nodes_[node].token != nullptr) longest = nodes_[node].token;
  }
  return longest;
}

void TokenFinder::cut(std::string_view text, std::vector<Section>& sections) const {
  std::size_t done = 0;
  for (std::size_t i = 0; i < text.size();) {
    const AddedToken* token = begins_[static_cast<unsigned char>(text[i])] ? at(text.substr(i)) : nullptr;
    if (token == nullptr) {
      ++i;
      continue;
    }
    std::size_t begin = i, end = i + token->shown.size();
    i = end;
    if (token->single_word) {
      const bool word_before = begin > 0 && is_word(last_character(text.substr(0, begin)).code);
      const bool word_after = end < text.size() && is_word(character_at(text, end).code);
      if (word_before || word_after) continue;
    }
    if (token->strips_left) begin = std::max(without_spaces_at_end(text.substr(0, begin)), done);
    if (token->strips_right) end += spaces_at_start(text.substr(end));
    if (done < begin) sections.push_back({text.substr(done, begin - done), nullptr});
    sections.push_back({text.substr(begin, end - begin), token});
    done = end;
  }
  if (done < text.size()) sections.push_back({text.substr(done), nullptr});
}

AddedTokens::AddedTokens(const std::vector<Part>& parts, const Model& model,
                         const std::vector<std::unique_ptr<Normalizer>>& normalizers) {
  MatchMemory memory;
  std::map<std::string, std::size_t> by_content;
  std::int64_t next_id = model.vocabulary();
  for (const Part& part : parts) {
    AddedToken token;
    token.content = part.text("content");
    if (token.content.empty()) continue;
    token.single_word = part.flag("single_word", false);
    token.strips_left = part.flag("lstrip", false);
    token.strips_right = part.flag("rstrip", false);
    token.special = part.flag("special", false);
    token.normalized = part.flag("normalized", !token.special);
    const auto known = by_content.find(token.content);
    std::int64_t id = model.find(token.content);
    if (known != by_content.end()) id = tokens_[known->second].id;
    if (id < 0) id = next_id++;
    if (part.has("id") && part.integer("id") != id) {
      part.refuse("\"" + token.content + "\" has the id " + std::to_string(part.integer("id")) +
                  " here, but the library gives it " + std::to_string(id));
    }
    token.id = static_cast<std::int32_t>(id);
    token.shown = token.content;
    if (token.normalized) {
      for (const auto& normalizer : normalizers) normalizer->apply(token.shown, memory);
    }
    if (known != by_content.end()) {
      tokens_[known->second] = token;
    } else {
      by_content.emplace(token.content, tokens_.size());
      tokens_.push_back(std::move(token));
    }
  }
  for (const AddedToken& token : tokens_) (token.normalized ? in_normalized_ : in_text_).add(&token);
}

}  // namespace flashgla::text::huggingface

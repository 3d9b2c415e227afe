// Added tokens: texts that become one token wherever they stand, special ones among them.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "flashgla/text/huggingface/model.h"
#include "flashgla/text/huggingface/normalizer.h"
#include "flashgla/text/huggingface/part.h"

namespace flashgla::text::huggingface {

struct AddedToken {
  std::int32_t id = -1;
  std::string content;
  std::string shown;  // what it is found as and decoded from: normalised where that is asked for
  bool single_word = false, strips_left = false, strips_right = false, normalized = false, special = false;
};

// A text cut at added tokens.
struct Section {
  std::string_view text;
  const AddedToken* token = nullptr;  // null: text for the model
};

// Finds added tokens, of those that begin at the first place the longest.
class TokenFinder {
 public:
  void add(const AddedToken* token);
  void cut(std::string_view text, std::vector<Section>& sections) const;

 private:
  // The token at the beginning of the text, null: none.
  const AddedToken* at(std::string_view text) const;

  struct Node {
    std::unordered_map<unsigned char, std::size_t> children;
    const AddedToken* token = nullptr;
  };
  std::vector<Node> nodes_{1};
  std::array<bool, 256> begins_{};  // bytes that a token begins with
};

class AddedTokens {
 public:
  AddedTokens() = default;
  // `normalizers` change the content of tokens that ask for it. Throws Error when an id is not the one that the library
  // gives the token.
  AddedTokens(const std::vector<Part>& parts, const Model& model,
              const std::vector<std::unique_ptr<Normalizer>>& normalizers);

  const std::vector<AddedToken>& tokens() const { return tokens_; }
  const TokenFinder& in_text() const { return in_text_; }              // those found before normalising
  const TokenFinder& in_normalized() const { return in_normalized_; }  // and those found after it

 private:
  std::vector<AddedToken> tokens_;
  TokenFinder in_text_, in_normalized_;
};

}  // namespace flashgla::text::huggingface

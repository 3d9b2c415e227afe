// The tokenizer of a tokenizer.json: added tokens are taken out of the text, what lies between them is normalised, cut
// into pieces, and given to the model.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/text/fingerprint.h"
#include "flashgla/text/huggingface.h"
#include "flashgla/text/huggingface/added_tokens.h"
#include "flashgla/text/huggingface/decoder.h"
#include "flashgla/text/huggingface/model.h"
#include "flashgla/text/huggingface/normalizer.h"
#include "flashgla/text/huggingface/post_processor.h"
#include "flashgla/text/huggingface/pre_tokenizer.h"
#include "flashgla/text/huggingface/unicode.h"
#include "flashgla/text/huggingface/word_cache.h"

namespace flashgla::text {
namespace huggingface {

std::uint64_t WordCache::hash_of(std::string_view word) { return XXH3_64bits(word.data(), word.size()); }

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kFile = "tokenizer.json";
constexpr const char* kConfigFile = "tokenizer_config.json";
constexpr const char* kSpecialsFile = "special_tokens_map.json";

// What one call of encode works with; calls at the same time have one each.
struct Workspace {
  std::string valid;
  CutMemory cut;
  ModelMemory model;
  WordCache words;
  std::vector<Section> sections, inner;
  std::vector<Piece> pieces, next;
};

class WorkspacePool {
 public:
  std::unique_ptr<Workspace> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<Workspace>();
    std::unique_ptr<Workspace> workspace = std::move(free_.back());
    free_.pop_back();
    return workspace;
  }
  void give_back(std::unique_ptr<Workspace> workspace) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(workspace));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> free_;
};

// Everything that the file says besides the model.
struct Definition {
  std::string text;                 // the file's bytes
  std::string beside_name, beside;  // the file beside it that says what begins and ends a text, if there is one
  std::vector<std::unique_ptr<Normalizer>> normalizers;
  std::vector<std::unique_ptr<PreTokenizer>> pre_tokenizers;
  std::unique_ptr<Model> model;
  AddedTokens added;
  Decoder decoder;
  Frame frame;
  std::int32_t bos = -1, eos = -1;
  bool adds_bos = false, adds_eos = false;
};

class JsonTokenizer final : public Tokenizer {
 public:
  explicit JsonTokenizer(Definition definition) : is_(std::move(definition)) {
    std::int64_t size = is_.model->size();
    for (const AddedToken& token : is_.added.tokens()) size = std::max<std::int64_t>(size, token.id + 1);
    added_.assign(static_cast<std::size_t>(size), nullptr);
    for (const AddedToken& token : is_.added.tokens()) added_[static_cast<std::size_t>(token.id)] = &token;
    fingerprint_ = fingerprint_of(is_.text + "\n" + std::to_string(is_.bos) + " " + std::to_string(is_.eos) +
                                  (is_.adds_bos ? " bos" : "") + (is_.adds_eos ? " eos" : ""));
  }

  std::string_view kind() const override { return "huggingface"; }
  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(added_.size()); }
  std::int32_t bos_id() const override { return is_.bos; }
  std::int32_t eos_id() const override { return is_.eos; }
  bool adds_bos() const override { return is_.adds_bos; }
  bool adds_eos() const override { return is_.adds_eos; }
  bool lossless() const override { return false; }
  bool splits_at_newlines() const override { return false; }
  std::string fingerprint() const override { return fingerprint_; }

  void save(const std::string& folder) const override {
    write_file(fs::path(folder) / kFile, is_.text);
    if (!is_.beside_name.empty()) write_file(fs::path(folder) / is_.beside_name, is_.beside);
  }

  bool is_special(std::int32_t id) const override {
    const AddedToken* token = added_[checked(id)];
    return token != nullptr && token->special;
  }

  std::string token_bytes(std::int32_t id, bool first) const override {
    const AddedToken* token = added_[checked(id)];
    if (token != nullptr) return token->special ? std::string() : is_.decoder.text_of(token->shown, first);
    return id < is_.model->size() ? is_.decoder.text_of(is_.model->token(id), first) : std::string();
  }

  TokenIds encode(std::string_view text) const override {
    TokenIds ids;
    std::unique_ptr<Workspace> work = pool_.take();
    const std::string_view valid = valid_utf8(text, work->valid);
    work->sections.clear();
    is_.added.in_text().cut(valid, work->sections);
    for (const Section& section : work->sections) {
      if (section.token != nullptr) {
        ids.push_back(section.token->id);
      } else {
        encode_section(section.text, section.text.data() == valid.data(), *work, ids);
      }
    }
    pool_.give_back(std::move(work));
    return ids;
  }

 private:
  std::size_t checked(std::int32_t id) const {
    if (id < 0 || id >= vocab_size()) {
      throw Error("tokenizer", "token", "is " + std::to_string(id), "0 .. " + std::to_string(vocab_size() - 1));
    }
    return static_cast<std::size_t>(id);
  }

  // Text between added tokens that are looked for in the text as it came.
  void encode_section(std::string_view text, bool at_start, Workspace& work, TokenIds& ids) const {
    std::string normalized;
    if (!is_.normalizers.empty()) {
      normalized = text;
      for (const auto& normalizer : is_.normalizers)
        at_start = normalizer->apply(normalized, work.cut.match) && at_start;
      text = normalized;
    }
    work.inner.clear();
    is_.added.in_normalized().cut(text, work.inner);
    for (const Section& section : work.inner) {
      if (section.token != nullptr) {
        ids.push_back(section.token->id);
      } else {
        encode_text({section.text, at_start && section.text.data() == text.data()}, work, ids);
      }
    }
  }

  void encode_text(const Piece& text, Workspace& work, TokenIds& ids) const {
    work.cut.storage.clear();
    work.pieces.assign(1, text);
    for (const auto& stage : is_.pre_tokenizers) {
      work.next.clear();
      for (const Piece& piece : work.pieces) stage->apply(piece, work.cut, work.next);
      std::swap(work.pieces, work.next);
    }
    const std::string_view mark = is_.model->cut_before();
    for (const Piece& piece : work.pieces) {
      if (mark.empty()) {
        encode_word(piece.text, work, ids);
      } else {
        encode_words(piece.text, mark, work, ids);
      }
    }
  }

  void encode_words(std::string_view text, std::string_view mark, Workspace& work, TokenIds& ids) const {
    std::size_t begin = 0;
    for (std::size_t at = text.find(mark); at != std::string_view::npos; at = text.find(mark, at)) {
      if (at > begin) {
        encode_word(text.substr(begin, at - begin), work, ids);
        begin = at;
      }
      while (text.substr(at).starts_with(mark)) at += mark.size();
    }
    if (begin < text.size()) encode_word(text.substr(begin), work, ids);
  }

  void encode_word(std::string_view word, Workspace& work, TokenIds& ids) const {
    if (word.size() > WordCache::kLongestWord) {
      is_.model->encode(word, work.model, ids);
      return;
    }
    const std::uint64_t hash = WordCache::hash_of(word);
    if (work.words.find(word, hash, ids)) return;
    const std::size_t before = ids.size();
    is_.model->encode(word, work.model, ids);
    work.words.remember(word, hash, ids.data() + before, ids.size() - before);
  }

  Definition is_;
  std::vector<const AddedToken*> added_;  // by id; null: the model's
  std::string fingerprint_;
  mutable WorkspacePool pool_;
};

// "<s>", or {"content": "<s>", ...}; empty: none.
std::string token_text(const json& config, const char* key) {
  if (!config.is_object() || !config.contains(key)) return {};
  const json& value = config[key];
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.contains("content") && value["content"].is_string()) {
    return value["content"].get<std::string>();
  }
  return {};
}

std::int32_t id_of(const Definition& definition, const std::string& token) {
  for (const AddedToken& added : definition.added.tokens()) {
    if (added.content == token) return added.id;
  }
  return definition.model->find(token);
}

std::int32_t first_special_of(const Definition& definition, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    for (const AddedToken& added : definition.added.tokens()) {
      if (added.special && added.content == name) return added.id;
    }
  }
  return -1;
}

// What begins and ends a text: the template says what is added, the file beside it which tokens they are; without
// either the names decide that are usual.
void read_ends(const Part& root, const fs::path& file, Definition& definition) {
  json config;
  for (const char* name : {kConfigFile, kSpecialsFile}) {
    const fs::path beside = file.parent_path() / name;
    if (!fs::exists(beside)) continue;
    definition.beside_name = name;
    definition.beside = read_file(beside);
    config = json::parse(definition.beside, nullptr, /*allow_exceptions=*/false);
    if (!config.is_object()) throw Error(beside.string() + " is not a JSON object");
    break;
  }
  const auto named = [&](const char* key) {
    const std::string token = token_text(config, key);
    if (token.empty()) return -1;
    const std::int32_t id = id_of(definition, token);
    if (id < 0) {
      throw Error((file.parent_path() / definition.beside_name).string() + ": " + key + " is \"" + token +
                  "\", which " + file.filename().string() + " does not have");
    }
    return id;
  };
  definition.bos = named("bos_token");
  definition.eos = named("eos_token");
  const Frame& frame = definition.frame;
  if (frame.before.size() > 1 || frame.after.size() > 1) {
    root.at("post_processor").refuse("more than one token before or after a text is not supported");
  }
  definition.adds_bos = !frame.before.empty();
  definition.adds_eos = !frame.after.empty();
  if (definition.adds_bos) definition.bos = frame.before[0];
  if (definition.adds_eos) definition.eos = frame.after[0];
  if (definition.beside_name.empty()) {
    if (definition.bos < 0) definition.bos = first_special_of(definition, {"<s>", "<|begin_of_text|>", "<bos>"});
    if (definition.eos < 0) {
      definition.eos = first_special_of(definition, {"</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"});
    }
  }
  // The library's own classes rebuild the template from these, where they are given.
  const auto flag = [&](const char* key, std::int32_t token, bool& adds) {
    if (!config.is_object() || !config.contains(key) || !config[key].is_boolean()) return;
    adds = config[key].get<bool>() && token >= 0;
  };
  flag("add_bos_token", definition.bos, definition.adds_bos);
  flag("add_eos_token", definition.eos, definition.adds_eos);
  for (const std::int32_t id : {definition.bos, definition.eos}) {
    bool exists = id < definition.model->size();
    for (const AddedToken& token : definition.added.tokens()) exists = exists || token.id == id;
    if (!exists) root.refuse("post_processor: there is no token " + std::to_string(id));
  }
}

std::unique_ptr<Model> read_model(const Part& part, bool raw_bytes) {
  std::string type = part.text("type", "");
  if (type.empty()) type = part.has("merges") ? "BPE" : part.at("vocab").is_array() ? "Unigram" : "without a type";
  if (type == "BPE") return read_bpe(part, raw_bytes);
  if (type == "Unigram") return read_unigram(part);
  part.refuse("the model " + type + " is not supported");
}

}  // namespace
}  // namespace huggingface

std::unique_ptr<Tokenizer> load_huggingface(const std::string& file) {
  using namespace huggingface;
  Definition definition;
  definition.text = read_file(file);
  const json root_json = json::parse(definition.text, nullptr, /*allow_exceptions=*/false);
  const Part root(root_json, file);
  if (!root.is_object() || !root.has("model")) {
    root.refuse("is damaged, or no tokenizer.json of the Hugging Face library");
  }
  if (root.text("version", "1.0") != "1.0") root.refuse("version " + root.text("version") + " is not supported");
  if (root.has("normalizer")) read_normalizers(root.at("normalizer"), definition.normalizers);
  if (root.has("pre_tokenizer")) read_pre_tokenizers(root.at("pre_tokenizer"), definition.pre_tokenizers);
  // Bytes that only become characters to be looked up need not become any.
  const Part model = root.at("model");
  const bool raw_bytes = !definition.pre_tokenizers.empty() && definition.pre_tokenizers.back()->maps_bytes() &&
                         (model.text("type", "") == "BPE" || model.has("merges"));
  if (raw_bytes) definition.pre_tokenizers.pop_back();
  definition.model = read_model(model, raw_bytes);
  if (root.has("added_tokens")) {
    definition.added = AddedTokens(root.elements("added_tokens"), *definition.model, definition.normalizers);
  }
  if (root.has("decoder")) definition.decoder = Decoder(root.at("decoder"));
  if (root.has("post_processor")) read_post_processor(root.at("post_processor"), definition.frame);
  read_ends(root, file, definition);
  return std::make_unique<JsonTokenizer>(std::move(definition));
}

}  // namespace flashgla::text

#include "flashgla/data/prepare.h"

#include <charconv>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "flashgla/base/context.h"
#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/base/random.h"
#include "flashgla/data/dataset.h"
#include "flashgla/data/documents.h"
#include "flashgla/data/token_file.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::data {
namespace {

namespace fs = std::filesystem;

// Text encoded at once, shared out among the threads: enough to keep them busy, little enough to keep in memory.
constexpr std::size_t kBatchBytes = std::size_t{16} << 20;
constexpr std::size_t kBatchTasks = 4096;

struct Task {
  std::string text;
  bool begins = false, ends = false;  // the document, with its specials
  bool closes = false;                // the document's share of this part, at a cut
  bool validation = false;
  double bits = -1.0;
  text::TokenIds ids;
};

// Whether a document is validation when there are many: one at a seeded place of every 1/fraction.
class Chooser {
 public:
  Chooser(double fraction, std::uint64_t seed) : fraction_(fraction), seed_(seed) { begin_block(0); }

  bool next() {
    const std::int64_t document = document_++;
    if (fraction_ <= 0.0) return false;
    if (document == end_) begin_block(block_ + 1);
    return document == chosen_;
  }

 private:
  void begin_block(std::int64_t block) {
    if (fraction_ <= 0.0) return;
    block_ = block;
    const auto begin = static_cast<std::int64_t>(static_cast<double>(block) / fraction_);
    end_ = static_cast<std::int64_t>(static_cast<double>(block + 1) / fraction_);
    chosen_ = begin + static_cast<std::int64_t>(
                          random::Stream(seed_, random::Use::validation)
                              .below(static_cast<std::uint64_t>(block), static_cast<std::uint64_t>(end_ - begin)));
  }

  double fraction_;
  std::uint64_t seed_;
  std::int64_t document_ = 0, block_ = 0, end_ = 0, chosen_ = -1;
};

// Where to cut a text near `target`: after the next newline if one is near, else before the next whole character.
std::size_t cut_near(std::string_view text, std::size_t target) {
  const std::size_t newline = text.substr(0, target + 4096).find('\n', target);
  if (newline != std::string_view::npos) return newline + 1;
  while (target < text.size() && (static_cast<unsigned char>(text[target]) & 0xC0) == 0x80) ++target;
  return target;
}

std::shared_ptr<const text::Tokenizer> make_tokenizer(const PrepareOptions& options, const DocumentOptions& documents,
                                                      int threads) {
  const std::string& name = options.tokenizer;
  if (name == "byte") return text::make_byte_tokenizer();
  const bool unigram = name.starts_with("train-unigram:");
  if (!unigram && !name.starts_with("train:")) return text::load_tokenizer(name);
  const std::string size = name.substr(name.find(':') + 1);
  text::SentencePieceTraining training;
  training.model_type = unigram ? "unigram" : "bpe";
  training.threads = threads;
  const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), training.vocab_size);
  if (error != std::errc() || end != size.data() + size.size()) {
    throw Error("prepare", "tokenizer", "is " + name, "train: and the vocabulary's size, as train:8192");
  }
  DocumentReader reader(documents);
  if (reader.reads_standard_input()) {
    throw Error(
        "a tokenizer cannot be trained on standard input, which can be read only once; write it to a file first");
  }
  DocumentPart part;
  try {
    return text::train_sentencepiece(
        [&](std::string& text) {
          if (!reader.next(part)) return false;
          text = std::move(part.text);
          return true;
        },
        training);
  } catch (const text::VocabularyError& refused) {
    const bool too_large = refused.possible < refused.asked;
    throw Error("prepare: --tokenizer " + name + ": a vocabulary of " + size +
                (too_large ? " is too large for this text" : " is too small for the characters of this text") +
                "; --tokenizer " + name.substr(0, name.find(':') + 1) + std::to_string(refused.possible) +
                (too_large ? " or less" : " or more"));
  }
}

class Preparation {
 public:
  Preparation(const PrepareOptions& options)
      : options_(options),
        context_(Device::cpu(), options.threads),
        documents_{.inputs = options.inputs,
                   .text_field = options.text_field,
                   .json_lines = options.json_lines,
                   .separator = options.separator,
                   .out = options.out},
        chooser_(options.validation, options.seed) {
    if (!(options.validation >= 0.0 && options.validation <= 0.5)) {
      throw Error("prepare", "validation", "is " + std::to_string(options.validation), "0 .. 0.5");
    }
    if (options.out.empty()) throw Error("prepare: no folder to write to was given");
    if (fs::exists(options.out) && !fs::is_directory(options.out)) throw Error(options.out + " is not a folder");
    for (const char* stem : {kTrainStem, kValidationStem}) {
      const fs::path tokens = fs::path(options.out) / (std::string(stem) + ".bin");
      if (fs::exists(tokens) && !is_prepared(options.out)) {
        throw Error("prepare: " + tokens.string() + " is there already, and no " + kDatasetFile +
                    " that says that `flashgla data prepare` made it; name another folder, or remove it");
      }
    }
    tokenizer_ = make_tokenizer(options, documents_, context_.threads());
    reader_ = std::make_unique<DocumentReader>(documents_);  // what is written below is none of its files
    make_folder(options.out);
    for (const char* stem : {kTrainStem, kValidationStem}) {
      parts_.emplace_back().writer =
          std::make_unique<TokenFileWriter>((fs::path(options.out) / stem).string(), tokenizer_->vocab_size());
    }
  }

  PrepareReport run() {
    DocumentReader& reader = *reader_;
    // With fewer than two validation documents to be expected, each document gives its end instead.
    if (options_.validation > 0.0) {
      const auto many = static_cast<std::int64_t>(std::ceil(2.0 / options_.validation));
      const std::int64_t count = reader.count_documents(many);
      const bool unknown_but_many = count < 0 && (options_.json_lines || !options_.separator.empty());
      cuts_documents_ = count < many && !unknown_but_many;
    }
    DocumentPart part, whole;
    while (reader.next(part)) {
      const bool needs_whole = !tokenizer_->splits_at_newlines() || (cuts_documents_ && part.document_bytes < 0);
      if (needs_whole && !(part.ends_document && whole.text.empty())) {
        whole.text += part.text;
        if (!part.ends_document) continue;
        part.text = std::exchange(whole.text, {});
      }
      if (needs_whole) part.document_bytes = static_cast<std::int64_t>(part.text.size());
      add(part);
      if (pending_bytes_ >= kBatchBytes || tasks_.size() >= kBatchTasks) encode_and_write();
      if (options_.progress) options_.progress(reader.done_bytes(), reader.total_bytes());
    }
    encode_and_write();
    if (options_.progress) options_.progress(reader.done_bytes(), reader.total_bytes());
    if (part_of(false).counts.tokens == 0) throw Error("prepare: there is no text in the input");

    PrepareReport report;
    report.passed_over = reader.passed_over();
    report.vocab_size = tokenizer_->vocab_size();
    report.tokenizer_kind = tokenizer_->kind();
    publish();
    report.train = part_of(false).counts;
    report.validation = part_of(true).counts;
    return report;
  }

 private:
  struct Part {
    std::unique_ptr<TokenFileWriter> writer;
    PreparedPart counts;
    double bits = 0.0;  // negative: not known of every document
  };

  Part& part_of(bool validation) { return parts_[validation ? 1 : 0]; }

  void add_task(std::string text, bool begins, bool ends, bool closes, double bits) {
    if (text.empty() && begins) return;
    pending_bytes_ += text.size();
    tasks_.push_back({std::move(text), begins, ends, closes, in_validation_, bits, {}});
  }

  void add(DocumentPart& part) {
    const bool begins = document_position_ == 0;
    if (begins) in_validation_ = !cuts_documents_ && chooser_.next();
    const auto size = static_cast<std::int64_t>(part.text.size());
    const std::int64_t target =
        cuts_documents_ && !in_validation_
            ? std::llround((1.0 - options_.validation) * static_cast<double>(part.document_bytes))
            : -1;
    if (target >= document_position_ && target < document_position_ + size) {
      const std::size_t cut = cut_near(part.text, static_cast<std::size_t>(target - document_position_));
      const bool anything_follows = cut < part.text.size() || !part.ends_document;
      add_task(part.text.substr(0, cut), begins, !anything_follows, anything_follows, -1.0);
      if (anything_follows) {
        in_validation_ = true;
        if (cut < part.text.size())
          add_task(part.text.substr(cut), false, part.ends_document, part.ends_document, -1.0);
      }
    } else {
      add_task(std::move(part.text), begins, part.ends_document, part.ends_document, part.bits);
    }
    document_position_ = part.ends_document ? 0 : document_position_ + size;
  }

  void encode_and_write() {
    parallel_for(context_, static_cast<std::int64_t>(tasks_.size()), [&](std::int64_t i) {
      Task& task = tasks_[static_cast<std::size_t>(i)];
      if (task.begins && tokenizer_->adds_bos()) task.ids.push_back(tokenizer_->bos_id());
      const text::TokenIds ids = tokenizer_->encode(task.text);
      task.ids.insert(task.ids.end(), ids.begin(), ids.end());
      if (task.ends && tokenizer_->eos_id() >= 0) task.ids.push_back(tokenizer_->eos_id());
    });
    for (const Task& task : tasks_) {
      Part& part = part_of(task.validation);
      part.writer->append(task.ids);
      if (task.closes || task.ends) part.writer->end_document();
      part.counts.text_bytes += static_cast<std::int64_t>(task.text.size());
      part.counts.tokens = part.writer->tokens();
      part.counts.documents = part.writer->documents();
      part.bits = task.bits < 0.0 || part.bits < 0.0 ? -1.0 : part.bits + task.bits;
    }
    tasks_.clear();
    pending_bytes_ = 0;
  }

  void publish() {
    const fs::path folder = options_.out;
    for (Part& part : parts_) part.writer->close();
    // data.json goes first and comes last: a folder that is not whole is not taken for one that is.
    fs::remove(folder / kDatasetFile);
    for (const char* stale : {"validation.bin", "validation.idx"}) fs::remove(folder / stale);
    for (const char* stale : text::tokenizer_files()) fs::remove(folder / stale);
    nlohmann::ordered_json json = {{"version", 1},
                                   {"tokenizer",
                                    {{"kind", tokenizer_->kind()},
                                     {"fingerprint", tokenizer_->fingerprint()},
                                     {"vocab_size", tokenizer_->vocab_size()},
                                     {"bos_id", tokenizer_->bos_id()},
                                     {"eos_id", tokenizer_->eos_id()}}},
                                   {"seed", options_.seed}};
    for (const bool validation : {false, true}) {
      Part& part = part_of(validation);
      if (part.counts.tokens == 0) continue;  // its files vanish with the writer
      part.writer->publish();
      auto& entry = json[validation ? kValidationStem : kTrainStem];
      entry = {
          {"tokens", part.counts.tokens}, {"documents", part.counts.documents}, {"text_bytes", part.counts.text_bytes}};
      if (part.bits > 0.0) entry["source_bits"] = part.bits;
    }
    tokenizer_->save(options_.out);
    write_file((folder / kDatasetFile).string(), json.dump(2) + "\n");
  }

  const PrepareOptions& options_;
  Context context_;
  DocumentOptions documents_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::unique_ptr<DocumentReader> reader_;
  std::vector<Part> parts_;  // train, validation
  Chooser chooser_;
  bool cuts_documents_ = false;
  std::vector<Task> tasks_;
  std::size_t pending_bytes_ = 0;
  std::int64_t document_position_ = 0;  // bytes of the open document already added
  bool in_validation_ = false;
};

}  // namespace

PrepareReport prepare(const PrepareOptions& options) { return Preparation(options).run(); }

}  // namespace flashgla::data

#include "flashgla/data/recall.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>
#include <vector>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/base/random.h"
#include "flashgla/data/dataset.h"
#include "flashgla/data/token_file.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::data {
namespace {

namespace fs = std::filesystem;

// The draws of one sequence, one after the other.
class Draws {
 public:
  Draws(std::uint64_t seed, std::uint64_t sequence) : stream_(seed, random::Use::stories, sequence) {}
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(stream_.below(next_++, static_cast<std::uint64_t>(count)));
  }
  double uniform() { return stream_.uniform(next_++); }

 private:
  random::Stream stream_;
  std::uint64_t next_ = 0;
};

// `count` of [begin, begin + size) without repetition, in the order drawn: the beginning of a shuffle of `all`, which
// holds those numbers in any order.
std::vector<std::int32_t> choose(Draws& draws, std::vector<std::int32_t>& all, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t j = i + draws.below(static_cast<std::int64_t>(all.size()) - i);
    std::swap(all[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(j)]);
  }
  return {all.begin(), all.begin() + count};
}

struct Sequence {
  std::vector<std::int32_t> tokens;  // [T]
  std::vector<std::int32_t> labels;  // [2n]: places in growing order, each with its token
};

class Generator {
 public:
  explicit Generator(const RecallOptions& options) : options_(options) {
    const auto half = static_cast<std::int32_t>(options.vocabulary / 2);
    keys_.resize(static_cast<std::size_t>(half - 1));
    values_.resize(static_cast<std::size_t>(options.vocabulary - half));
    rates_.resize(static_cast<std::size_t>((options.length - 2 * options.pairs) / 2));
    for (std::size_t slot = 0; slot < rates_.size(); ++slot) {
      rates_[slot] = std::pow(static_cast<double>(slot + 1), options.power - 1.0);
    }
  }

  Sequence make(std::uint64_t stream) {
    Draws draws(options_.seed, stream);
    const std::int64_t pairs = options_.pairs;
    // A sequence is a function of its number: it does not begin with the last one's order.
    std::iota(keys_.begin(), keys_.end(), 1);
    std::iota(values_.begin(), values_.end(), static_cast<std::int32_t>(options_.vocabulary / 2));
    const std::vector<std::int32_t> keys = choose(draws, keys_, pairs);
    const std::vector<std::int32_t> values = choose(draws, values_, pairs);
    // Each slot waits for an exponential time of its rate: the first n to end are such a draw without repetition, in
    // its order.
    std::vector<std::pair<double, std::int64_t>> times(rates_.size());
    for (std::size_t slot = 0; slot < times.size(); ++slot) {
      times[slot] = {random::minus_two_log(draws.uniform()) / rates_[slot], static_cast<std::int64_t>(slot)};
    }
    std::partial_sort(times.begin(), times.begin() + pairs, times.end());

    Sequence sequence;
    sequence.tokens.assign(static_cast<std::size_t>(options_.length), 0);
    for (std::int64_t t = 2 * pairs; options_.random_fillers && t < options_.length; ++t) {
      sequence.tokens[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(draws.below(options_.vocabulary));
    }
    std::vector<std::pair<std::int64_t, std::int32_t>> labels;
    for (std::int64_t i = 0; i < pairs; ++i) {
      const auto pair = static_cast<std::size_t>(i);
      const std::int64_t place = 2 * pairs + 2 * times[pair].second;
      sequence.tokens[2 * pair] = keys[pair];
      sequence.tokens[2 * pair + 1] = values[pair];
      sequence.tokens[static_cast<std::size_t>(place)] = keys[pair];
      labels.emplace_back(place, values[pair]);
    }
    std::sort(labels.begin(), labels.end());
    for (const auto& [place, value] : labels) {
      sequence.labels.push_back(static_cast<std::int32_t>(place));
      sequence.labels.push_back(value);
    }
    return sequence;
  }

 private:
  const RecallOptions& options_;
  std::vector<std::int32_t> keys_, values_;
  std::vector<double> rates_;  // of slots
};

struct RecallPart {
  RecallPart(const fs::path& folder, const char* stem, const RecallOptions& options)
      : tokens(folder / stem, options.vocabulary),
        labels(folder / (std::string(stem) + kLabelsEnding), std::max(options.vocabulary, options.length)) {}
  TokenFileWriter tokens, labels;
};

}  // namespace

void RecallOptions::validate() const {
  const auto require = [](bool ok, const char* option, std::int64_t value, const std::string& expected) {
    if (!ok) throw Error("recall", option, "is " + std::to_string(value), expected);
  };
  require(pairs >= 1, "pairs", pairs, "at least 1");
  require(length >= 4 * pairs, "length", length,
          "at least " + std::to_string(4 * pairs) + ": four times the " + std::to_string(pairs) + " pairs");
  require(length % 2 == 0, "length", length, "an even number");
  require(length < std::int64_t{1} << 24, "length", length, "less than 2^24");
  require(vocabulary > length, "vocabulary", vocabulary, "more than the length (" + std::to_string(length) + ")");
  require(vocabulary < std::int64_t{1} << 31, "vocabulary", vocabulary, "less than 2^31");
  require(train >= 1, "train", train, "at least 1 sequence");
  require(validation >= 0, "validation", validation, "0 or more");
  if (!(power > 0.0 && std::isfinite(power))) {
    throw Error("recall", "power", "is " + std::to_string(power), "a positive number");
  }
  if (out.empty()) throw Error("recall", "out", "is empty", "a folder");
}

void write_recall(const RecallOptions& options) {
  options.validate();
  make_folder(options.out);
  const fs::path folder = options.out;
  Generator generator(options);
  const std::int64_t total = options.train + options.validation;
  std::vector<std::unique_ptr<RecallPart>> parts;
  nlohmann::ordered_json json = {{"version", 1},
                                 {"task",
                                  {{"kind", "recall"},
                                   {"vocabulary", options.vocabulary},
                                   {"length", options.length},
                                   {"pairs", options.pairs},
                                   {"power", options.power},
                                   {"random_fillers", options.random_fillers}}},
                                 {"seed", options.seed}};
  for (const bool validation : {false, true}) {
    const std::int64_t count = validation ? options.validation : options.train;
    if (count == 0) continue;
    const char* stem = validation ? kValidationStem : kTrainStem;
    RecallPart& part = *parts.emplace_back(std::make_unique<RecallPart>(folder, stem, options));
    for (std::int64_t i = 0; i < count; ++i) {
      const Sequence sequence = generator.make(2 * static_cast<std::uint64_t>(i) + (validation ? 1 : 0));
      part.tokens.append(sequence.tokens);
      part.tokens.end_document();
      part.labels.append(sequence.labels);
      part.labels.end_document();
      if (options.progress && i % 1024 == 0) options.progress(i + (validation ? options.train : 0), total);
    }
    json[stem] = {{"tokens", part.tokens.tokens()}, {"documents", count}, {"labels", count * options.pairs}};
    part.tokens.close();
    part.labels.close();
  }
  if (options.progress) options.progress(total, total);
  // data.json goes first and comes last, as in prepare.
  fs::remove(folder / kDatasetFile);
  for (const char* stale : {"validation.bin", "validation.idx", "validation-labels.bin", "validation-labels.idx"}) {
    fs::remove(folder / stale);
  }
  for (const char* stale : text::tokenizer_files()) fs::remove(folder / stale);
  for (const auto& part : parts) {
    part->tokens.publish();
    part->labels.publish();
  }
  write_file((folder / kDatasetFile).string(), json.dump(2) + "\n");
}

}  // namespace flashgla::data

#include "flashgla/data/loader.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/base/random.h"
#include "flashgla/text/fingerprint.h"

namespace flashgla::data {
namespace {

// Each epoch's permutation of [0, count), without a table: a balanced Feistel network of six rounds over the next even
// power of two, walked until it lands inside (at most four steps on average).
std::int64_t permute(std::int64_t index, std::int64_t count, std::uint64_t seed, std::uint64_t epoch) {
  constexpr std::uint64_t kRounds = 6;
  if (count <= 1) return index;
  const int half = (std::bit_width(static_cast<std::uint64_t>(count - 1)) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  auto value = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = value >> half, right = value & mask;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::uint64_t next =
          left ^ (random::Stream(seed, random::Use::data_order, epoch * kRounds + round).words(right).first & mask);
      left = right;
      right = next;
    }
    value = (left << half) | right;
  } while (value >= static_cast<std::uint64_t>(count));
  return static_cast<std::int64_t>(value);
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void require_positive(const char* argument, std::int64_t value, std::int64_t least) {
  if (value < least) {
    throw Error("loader", argument, "is " + std::to_string(value), std::to_string(least) + " or more");
  }
}

}  // namespace

const char* name_of(LoaderMode mode) {
  switch (mode) {
    case LoaderMode::packed:
      return "packed";
    case LoaderMode::windows:
      return "windows";
    case LoaderMode::segments:
      return "segments";
    case LoaderMode::labelled:
      return "labelled";
  }
  return "";
}

LoaderMode loader_mode_from_name(std::string_view name) {
  for (const LoaderMode mode : {LoaderMode::packed, LoaderMode::windows, LoaderMode::segments, LoaderMode::labelled}) {
    if (name == name_of(mode)) return mode;
  }
  throw Error("loader", "mode", "is " + std::string(name), "packed, windows, segments or labelled");
}

Loader::Loader(TokenSpan span, const LoaderConfig& config) : span_(std::move(span)), config_(config) {
  require_positive("batch", config.batch, 1);
  require_positive("length", config.length, 1);
  require_positive("segments", config.segments, 0);
  if (config.batch > std::numeric_limits<std::int32_t>::max() / config.length) {
    throw Error("loader", "batch * length", "is past 2147483647", "a smaller batch or length");
  }
  if (!span_.file || span_.size() < 2) throw Error("loader: there is no data: at least two tokens are needed");
  if ((config.mode == LoaderMode::labelled) != (span_.labels != nullptr)) {
    throw Error("loader", "mode", std::string("is ") + name_of(config.mode),
                span_.labels ? "labelled, since the data say what is to be predicted"
                             : "another: the data have no labels (`flashgla data mqar` makes some that do)");
  }
  if (config.mode == LoaderMode::packed) {
    plan_packed();
  } else if (config.mode == LoaderMode::labelled) {
    plan_labelled();
  } else {
    plan_rows();
  }
  const std::int64_t rows = config.mode == LoaderMode::packed ? 1 : config.batch;
  const std::int64_t columns = config.batch * config.length / rows;
  tokens_ = Tensor::zeros({rows, columns}, DType::i32);
  targets_ = Tensor::zeros(labels_ > 0 ? Shape({rows * labels_}) : Shape({rows, columns}), DType::i32);
  if (labels_ > 0) places_ = Tensor::zeros({rows * labels_}, DType::i32);
  if (config.mode == LoaderMode::packed) cu_seqlens_ = Tensor::zeros({max_sequences_ + 1}, DType::i32);
  data_fingerprint_ = data_fingerprint();
  buffer_.resize(static_cast<std::size_t>(std::min(columns, config.length)) + 1);
}

void Loader::plan_packed() {
  document_begins_ = span_.document_begins();
  units_ = static_cast<std::int64_t>(document_begins_.size()) - 1;
  tokens_per_epoch_ = span_.size() - units_;  // the last token of a document is no input
  if (tokens_per_epoch_ == 0) throw Error(span_.file->path() + " holds no document of two tokens or more");
  // The most sequences: the shortest pieces of all documents, each as often as a batch can come past it, and the piece
  // before, the one cut off at the end and the padding, of which a single pass may end in as much as a batch.
  const std::int64_t length = config_.length;
  const std::int64_t capacity = config_.batch * length;
  std::vector<std::int64_t> pieces(static_cast<std::size_t>(length) + 1, 0);
  for (std::int64_t i = 0; i < units_; ++i) {
    const std::int64_t inputs = document_begins_[i + 1] - document_begins_[i] - 1;
    pieces[static_cast<std::size_t>(length)] += inputs / length;
    pieces[static_cast<std::size_t>(inputs % length)] += 1;
  }
  const std::int64_t passes = 1 + divide_up(capacity, tokens_per_epoch_);
  std::int64_t left = capacity, most = 2 + (config_.single_pass ? config_.batch : 1);
  for (std::int64_t size = 1; size <= length && left >= size; ++size) {
    const std::int64_t fitting = std::min(pieces[static_cast<std::size_t>(size)] * passes, left / size);
    most += fitting;
    left -= fitting * size;
  }
  max_sequences_ = std::min(most, capacity);
}

void Loader::plan_rows() {
  const std::int64_t inputs = span_.size() - 1;
  const std::int64_t row = config_.length;
  const bool endless_stretch = config_.mode == LoaderMode::segments && config_.segments == 0;
  if (config_.mode == LoaderMode::windows) config_.segments = 1;
  if (endless_stretch) {
    const std::int64_t group = config_.batch * row;
    config_.segments = config_.single_pass ? divide_up(inputs, group) : inputs / group;
  }
  unit_ = row * config_.segments;
  units_ = config_.single_pass ? divide_up(inputs, unit_) : unit_ == 0 ? 0 : inputs / unit_;
  if (units_ == 0) {
    const std::int64_t needed = 1 + (endless_stretch ? config_.batch * row : unit_);
    throw Error(span_.file->path() + " is too short: " + std::to_string(span_.size()) + " tokens, but " +
                std::to_string(needed) + " are needed; give a smaller length" +
                (config_.mode == LoaderMode::segments ? ", batch or number of segments" : "") + ", or more data");
  }
  if (config_.shuffle && !config_.single_pass) {
    // One unit less than would fit leaves room for an epoch's offset; with few units that would be too much to lose.
    if (!endless_stretch && units_ >= 8) --units_;
    slack_ = std::min(inputs - units_ * unit_, unit_ - 1);
  }
  tokens_per_epoch_ = config_.single_pass ? inputs : units_ * unit_;
  max_sequences_ = config_.batch;
}

void Loader::plan_labelled() {
  const std::vector<std::int64_t>& begins = span_.file->document_begins();
  const std::vector<std::int64_t>& label_begins = span_.labels->document_begins();
  const auto refuse = [](const TokenFile& file, std::size_t document, std::int64_t actual, const char* what,
                         std::int64_t expected) {
    throw Error(file.path() + ": document " + std::to_string(document) + " has " + std::to_string(actual) + what +
                "; expected " + std::to_string(expected));
  };
  config_.segments = 1;
  units_ = span_.file->documents();
  labels_ = label_begins[1] / 2;
  for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
    const std::int64_t tokens = begins[i + 1] - begins[i], numbers = label_begins[i + 1] - label_begins[i];
    if (tokens != config_.length) {
      throw Error("loader", "length", "is " + std::to_string(config_.length),
                  std::to_string(tokens) + ", as long as the sequences of " + span_.file->path() + " are");
    }
    if (numbers != 2 * labels_ || numbers == 0) {
      refuse(*span_.labels, i, numbers, " numbers", std::max<std::int64_t>(2 * labels_, 2));
    }
  }
  if (labels_ > config_.length) refuse(*span_.labels, 0, labels_, " labels", config_.length);
  tokens_per_epoch_ = span_.size();
  max_sequences_ = config_.batch;
}

std::int64_t Loader::unit_at(std::int64_t counter) const {
  const std::int64_t index = counter % units_;
  if (!config_.shuffle) return index;
  return permute(index, units_, config_.seed, static_cast<std::uint64_t>(counter / units_));
}

std::int64_t Loader::offset_of_epoch(std::int64_t epoch) const {
  if (slack_ == 0) return 0;
  return static_cast<std::int64_t>(
      random::Stream(config_.seed, random::Use::data_offset)
          .below(static_cast<std::uint64_t>(epoch), static_cast<std::uint64_t>(slack_ + 1)));
}

// Inputs [begin, begin + count) of the span and the tokens after them, to element `to` of the batch.
void Loader::read(std::int64_t begin, std::int64_t count, std::int64_t to) {
  span_.file->read(span_.begin + begin, count + 1, buffer_.data());
  require_known(buffer_.data(), count + 1, *span_.file);
  std::copy_n(buffer_.begin(), count, tokens_.as<std::int32_t>() + to);
  std::copy_n(buffer_.begin() + 1, count, targets_.as<std::int32_t>() + to);
}

void Loader::require_known(const std::int32_t* tokens, std::int64_t count, const TokenFile& file) const {
  if (config_.vocabulary == 0) return;
  const std::int32_t largest = *std::max_element(tokens, tokens + count);
  if (largest < config_.vocabulary) return;
  throw Error(file.path() + " holds the token " + std::to_string(largest) + "; expected tokens below " +
              std::to_string(config_.vocabulary) +
              ", the vocabulary's size: the file is damaged, prepare the data again or copy it anew");
}

bool Loader::next(Batch& batch) {
  batch.places = {};
  if (config_.mode == LoaderMode::labelled) return next_labelled(batch);
  return config_.mode == LoaderMode::packed ? next_packed(batch) : next_rows(batch);
}

bool Loader::next_labelled(Batch& batch) {
  if (config_.single_pass && cursor_ >= units_) return false;
  const std::int64_t length = config_.length;
  std::vector<std::int32_t> pairs(static_cast<std::size_t>(2 * labels_));
  auto* targets = targets_.as<std::int32_t>();
  auto* places = places_.as<std::int32_t>();
  batch.target_count = 0;
  for (std::int64_t row = 0; row < config_.batch; ++row, ++cursor_) {
    auto* tokens = tokens_.as<std::int32_t>() + row * length;
    const bool padding = config_.single_pass && cursor_ >= units_;
    if (padding) {
      std::fill_n(tokens, length, 0);
    } else {
      const std::int64_t document = unit_at(cursor_);
      span_.file->read(document * length, length, tokens);
      require_known(tokens, length, *span_.file);
      span_.labels->read(document * 2 * labels_, 2 * labels_, pairs.data());
      for (std::size_t i = 1; i < pairs.size(); i += 2) require_known(&pairs[i], 1, *span_.labels);
      batch.target_count += labels_;
    }
    for (std::int64_t i = 0; i < labels_; ++i, ++places, ++targets) {
      const std::int64_t place = padding ? i : pairs[static_cast<std::size_t>(2 * i)];
      if (place >= length || (i > 0 && row * length + place <= places[-1])) {
        throw Error(span_.labels->path() + " is damaged: a label at place " + std::to_string(place) +
                    " of a sequence of " + std::to_string(length) + " tokens, behind place " +
                    std::to_string(i > 0 ? places[-1] - row * length : -1));
      }
      *places = static_cast<std::int32_t>(row * length + place);
      *targets = padding ? -1 : pairs[static_cast<std::size_t>(2 * i + 1)];
    }
  }
  batch.tokens = tokens_;
  batch.targets = targets_;
  batch.places = places_;
  batch.cu_seqlens = {};
  batch.continues.assign(static_cast<std::size_t>(config_.batch), 0);
  return true;
}

bool Loader::next_packed(Batch& batch) {
  const std::int64_t capacity = config_.batch * config_.length;
  auto* cu_seqlens = cu_seqlens_.as<std::int32_t>();
  std::int64_t filled = 0, sequences = 0;
  while (filled < capacity && !(config_.single_pass && cursor_ >= units_)) {
    const auto document = static_cast<std::size_t>(unit_at(cursor_));
    const std::int64_t begin = document_begins_[document] + position_;
    const std::int64_t left = document_begins_[document + 1] - 1 - begin;
    const std::int64_t count = std::min({left, config_.length, capacity - filled});
    if (count > 0) {
      read(begin, count, filled);
      filled += count;
      cu_seqlens[++sequences] = static_cast<std::int32_t>(filled);
    }
    position_ += count;
    if (count == left) {
      ++cursor_;
      position_ = 0;
    }
  }
  if (filled == 0) return false;
  std::fill_n(tokens_.as<std::int32_t>() + filled, capacity - filled, 0);
  std::fill_n(targets_.as<std::int32_t>() + filled, capacity - filled, -1);
  for (std::int64_t end = filled; end < capacity;) {  // padding is no longer than a sequence may be
    end = std::min(end + config_.length, capacity);
    cu_seqlens[++sequences] = static_cast<std::int32_t>(end);
  }
  batch.tokens = tokens_;
  batch.targets = targets_;
  batch.cu_seqlens = cu_seqlens_.view().slice(0, 0, sequences + 1);
  batch.continues.assign(1, 0);
  batch.target_count = filled;
  return true;
}

bool Loader::next_rows(Batch& batch) {
  const std::int64_t length = config_.length;
  const std::int64_t inputs = span_.size() - 1;
  std::int64_t given = 0;
  std::uint8_t continues = 0;
  while (given == 0) {  // of a single pass, the end of the last stretches may hold nothing
    if (config_.single_pass && cursor_ >= units_) return false;
    for (std::int64_t row = 0; row < config_.batch; ++row) {
      const std::int64_t counter = cursor_ + row;
      std::int64_t count = 0;
      if (!config_.single_pass || counter < units_) {
        const std::int64_t begin = offset_of_epoch(counter / units_) + unit_at(counter) * unit_ + position_ * length;
        count = std::clamp<std::int64_t>(inputs - begin, 0, length);
        if (count > 0) read(begin, count, row * length);
      }
      std::fill_n(tokens_.as<std::int32_t>() + row * length + count, length - count, 0);
      std::fill_n(targets_.as<std::int32_t>() + row * length + count, length - count, -1);
      given += count;
    }
    continues = position_ > 0;
    if (++position_ == config_.segments) {
      position_ = 0;
      cursor_ += config_.batch;
    }
  }
  batch.tokens = tokens_;
  batch.targets = targets_;
  batch.cu_seqlens = {};
  batch.continues.assign(static_cast<std::size_t>(config_.batch), continues);
  batch.target_count = given;
  return true;
}

void Loader::rewind() { cursor_ = position_ = 0; }

// Of the first tokens and, where they matter, the documents' lengths: enough to notice other data.
std::string Loader::data_fingerprint() const {
  std::vector<std::int32_t> head(static_cast<std::size_t>(std::min<std::int64_t>(span_.size(), 4096)));
  span_.file->read(span_.begin, static_cast<std::int64_t>(head.size()), head.data());
  const auto hash = [](const auto& values) {
    return text::fingerprint_of({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0])});
  };
  std::string all = document_begins_.empty() ? hash(head) : hash(head) + hash(document_begins_);
  if (span_.labels) {
    head.resize(static_cast<std::size_t>(std::min<std::int64_t>(span_.labels->tokens(), 4096)));
    span_.labels->read(0, static_cast<std::int64_t>(head.size()), head.data());
    all += hash(head);
  }
  return all;
}

std::string Loader::save_state() const {
  const nlohmann::ordered_json json = {{"version", random::kVersion},  {"mode", name_of(config_.mode)},
                                       {"batch", config_.batch},       {"length", config_.length},
                                       {"segments", config_.segments}, {"shuffle", config_.shuffle},
                                       {"seed", config_.seed},         {"single_pass", config_.single_pass},
                                       {"tokens", span_.size()},       {"units", units_},
                                       {"data", data_fingerprint_},    {"cursor", cursor_},
                                       {"position", position_}};
  return json.dump();
}

void Loader::restore(const std::string& state) {
  const auto json = nlohmann::ordered_json::parse(state, nullptr, /*allow_exceptions=*/false);
  if (json.is_object() && json.contains("cursor") &&
      json.value("version", nlohmann::ordered_json(1)) != random::kVersion) {
    throw Error("loader: the saved state is of version " + json.value("version", nlohmann::ordered_json(1)).dump() +
                ", whose data come in another order than this program's (version " + std::to_string(random::kVersion) +
                "); it cannot go on with them");
  }
  const auto mine = nlohmann::ordered_json::parse(save_state());  // version first, data last
  if (!json.is_object() || json.size() != mine.size()) {
    throw Error("loader: what should be its saved state is damaged or of another version");
  }
  for (const auto& [key, value] : mine.items()) {
    if (!json.contains(key)) throw Error("loader: its saved state has no " + key);
    if (key != "cursor" && key != "position" && json[key] != value) {
      throw Error("loader: the saved state was made with another " +
                  (key == "units" || key == "tokens" ? "data" : key) + ": " + json[key].dump() + "; now " +
                  value.dump());
    }
  }
  const auto counter = [&](const char* key) {
    if (!json[key].is_number_integer() || json[key].get<std::int64_t>() < 0) {
      throw Error("loader: its saved state is damaged: " + std::string(key) + " is " + json[key].dump());
    }
    return json[key].get<std::int64_t>();
  };
  const std::int64_t cursor = counter("cursor"), position = counter("position");
  std::int64_t positions = config_.segments;
  if (config_.mode == LoaderMode::packed) {
    const auto document = static_cast<std::size_t>(unit_at(cursor));
    positions = document_begins_[document + 1] - document_begins_[document];
  }
  if (position >= positions) throw Error("loader: its saved state is damaged: position is " + std::to_string(position));
  cursor_ = cursor;
  position_ = position;
}

}  // namespace flashgla::data

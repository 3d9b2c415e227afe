#include "flashgla/train/feed.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "flashgla/base/memory.h"

namespace flashgla::train {

namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

std::int64_t power_of_two(std::int64_t least, std::int64_t most) {
  return std::min(most, static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(least))));
}

std::vector<std::int64_t> powers_of_two(std::int64_t most) {
  std::vector<std::int64_t> powers;
  for (std::int64_t power = 1; power < most; power *= 2) powers.push_back(power);
  powers.push_back(most);
  return powers;
}

}  // namespace

std::vector<Bucket> buckets(std::int64_t tokens, std::int64_t most_sequences, std::int64_t length) {
  std::vector<Bucket> result;
  std::vector<std::int64_t> lengths = powers_of_two(length);
  for (const std::int64_t padding : powers_of_two(tokens)) {  // what fills up the last batch may be longer than any
    if (padding > length) lengths.push_back(padding);
  }
  for (const std::int64_t count : powers_of_two(most_sequences)) {
    for (const std::int64_t longest : lengths) {
      if (count * longest >= tokens) result.push_back({count, longest});
    }
  }
  return result;
}

nn::Sequences sequences_of(const Bucket& bucket, const TensorView& bounds) {
  if (bucket.sequences == 0) return {};
  nn::Sequences sequences;
  sequences.bounds = bounds.slice(0, 0, bucket.sequences + 1);
  if (bounds.device == Device::cpu()) sequences.host = sequences.bounds;
  sequences.max_seqlen = bucket.max_seqlen;
  return sequences;
}

Feed::Slot::Slot(const Queue& queue, std::size_t bytes) : memory(allocate_pinned_memory(bytes)), copied(queue) {}

Feed::Feed(Context& context, data::Loader& loader, std::int64_t rows)
    : context_(context), loader_(loader), rows_(rows), columns_(loader.config().length), left_(kNoLimit) {
  if (loader.config().mode == data::LoaderMode::packed) {
    rows_ = 1;
    columns_ *= loader.config().batch;
    bounds_ = loader.max_sequences() + 1;
  } else if (loader.config().batch % rows != 0) {
    throw Error("feed", "rows", "is " + std::to_string(rows),
                "a divisor of the loader's batch " + std::to_string(loader.config().batch));
  }
  labels_ = loader.labels();
  memory_ =
      Tensor::zeros({rows_ * columns_ + count_targets() + 1 + bounds_ + rows_ * labels_}, DType::i32, context.device());
  for (int i = 0; i < 2; ++i) slots_.push_back(std::make_unique<Slot>(context.queue(), memory_->bytes()));
}

std::vector<Bucket> Feed::all_buckets() const {
  if (bounds_ == 0) return {Bucket()};
  return buckets(columns_, bounds_ - 1, loader_.config().length);
}

MicroBatch Feed::planned(const Bucket& bucket) const {
  const std::int64_t tokens = rows_ * columns_, targets = tokens + count_targets();
  const Shape shape({rows_, columns_});
  MicroBatch batch;
  batch.tokens = memory_->slice(0, 0, tokens).reshape(shape);
  batch.targets = memory_->slice(0, tokens, targets);
  batch.bucket = bucket;
  batch.number = memory_->slice(0, targets, targets + 1);
  batch.sequences = sequences_of(bucket, memory_->slice(0, targets + 1, targets + 1 + bounds_));
  if (labels_ == 0) {
    batch.targets = batch.targets.reshape(shape);
  } else {
    batch.places = memory_->slice(0, targets + 1, targets + 1 + rows_ * labels_);
  }
  return batch;
}

void Feed::forget() { given_ = held_ = 0; }

void Feed::restart(std::int64_t tokens) {
  loader_.rewind();
  forget();
  left_ = tokens == 0 ? kNoLimit : labels_ == 0 ? tokens : std::max<std::int64_t>(tokens / columns_, 1) * columns_;
}

bool Feed::next(MicroBatch& batch, std::int64_t number) {
  if (left_ == 0) return false;
  if (given_ == held_) {
    if (!loader_.next(batch_)) return false;
    given_ = 0;
    held_ = batch_.tokens.size(0);
  }
  Bucket bucket;
  const std::int64_t count = rows_ * columns_, targets = count_targets();
  Slot& slot = *slots_[slot_++ % slots_.size()];
  slot.copied.synchronize();  // of two micro-batches ago
  auto* host = static_cast<std::int32_t*>(slot.memory.get());
  std::memcpy(host, batch_.tokens.as<std::int32_t>() + given_ * columns_, static_cast<std::size_t>(count) * 4);
  std::memcpy(host + count, batch_.targets.as<std::int32_t>() + given_ * (targets / rows_),
              static_cast<std::size_t>(targets) * 4);
  const std::int64_t scored =
      std::min(count, left_) / (labels_ > 0 ? columns_ : 1) * std::max<std::int64_t>(labels_, 1);
  std::fill(host + count + scored, host + count + targets, -1);
  if (left_ != kNoLimit) left_ -= std::min(count, left_);
  host[count + targets] = static_cast<std::int32_t>(number);
  std::int64_t elements = count + targets + 1;
  if (batch_.places) {
    const auto* places = batch_.places.as<std::int32_t>() + given_ * labels_;
    for (std::int64_t i = 0; i < targets; ++i) {  // of this micro-batch's rows
      host[elements++] = places[i] - static_cast<std::int32_t>(given_ * columns_);
    }
  }
  if (batch_.cu_seqlens) {
    const auto* bounds = batch_.cu_seqlens.as<std::int32_t>();
    const std::int64_t sequences = batch_.cu_seqlens.size(0) - 1;
    std::int64_t longest = 1;
    for (std::int64_t i = 0; i < sequences; ++i) longest = std::max<std::int64_t>(longest, bounds[i + 1] - bounds[i]);
    const std::int64_t length = loader_.config().length;
    bucket = {power_of_two(sequences, bounds_ - 1), power_of_two(longest, longest <= length ? length : columns_)};
    for (std::int64_t i = 0; i <= bucket.sequences; ++i) host[elements + i] = bounds[std::min(i, sequences)];
    elements += bucket.sequences + 1;
  }
  context_.queue().copy(memory_->data, host, static_cast<std::size_t>(elements) * sizeof(std::int32_t));
  slot.copied.record();
  batch = planned(bucket);
  batch.continues.assign(batch_.continues.begin() + given_, batch_.continues.begin() + given_ + rows_);
  batch.target_count = targets - std::count(host + count, host + count + targets, -1);
  batch.place = given_ / rows_;
  given_ += rows_;
  return true;
}

}  // namespace flashgla::train

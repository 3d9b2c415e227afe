// Feed: a loader's batches on the device, one micro-batch after the other, at addresses that never change.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/data/loader.h"
#include "flashgla/nn/pass.h"

namespace flashgla::train {

// What a step depends on beside its data: operators choose by it, and so does the memory that they take. Both figures
// are powers of two, or the most that there can be; 0 and 0 when no sequences are packed.
struct Bucket {
  std::int64_t sequences = 0;  // of a packed batch, empty ones added at its end
  std::int64_t max_seqlen = 0;

  friend auto operator<=>(const Bucket&, const Bucket&) = default;  // NOLINT(modernize-use-nullptr): the check is wrong
};

// All buckets that packed batches of `tokens` tokens can be of, with at most so many sequences of at most `length`
// tokens, but for what fills up a batch at the end of the data.
std::vector<Bucket> buckets(std::int64_t tokens, std::int64_t most_sequences, std::int64_t length);

// Sequences that begin at the same place, of a bucket, over bounds i32 [at least sequences + 1].
nn::Sequences sequences_of(const Bucket& bucket, const TensorView& bounds);

struct MicroBatch {
  TensorView tokens, targets;  // i32 [B,T] on the device; targets [R] with places
  TensorView places;           // i32 [R] on the device: what is asked of a task; else absent
  nn::Sequences sequences;
  TensorView number;  // i32 [1] on the device
  Bucket bucket;
  std::vector<std::uint8_t> continues;  // [B] 1: the row goes on from where the last batch's row ended
  std::int64_t target_count = 0;        // targets that are not -1
  std::int64_t place = 0;               // among the micro-batches of the loader's batch
};

class Feed {
 public:
  // rows: sequences of a micro-batch, a divisor of the loader's batch; with packed sequences, each of the loader's
  // batches is a micro-batch.
  Feed(Context& context, data::Loader& loader, std::int64_t rows);

  // Queues the copy of the next micro-batch, and of its number in its step; what has been queued with the one before it
  // may still be under way. False at the end of a single pass, or of what restart allows.
  bool next(MicroBatch& batch, std::int64_t number = 0);
  // A batch of zeros in a bucket, for planning: no data is read.
  MicroBatch planned(const Bucket& bucket) const;
  std::vector<Bucket> all_buckets() const;

  data::Loader& loader() { return loader_; }
  std::size_t device_bytes() const { return memory_->bytes(); }
  void forget();  // the micro-batches left of a batch: the loader was set to another place
  // From the data's beginning, and no more than `tokens` tokens of it, however they are cut into micro-batches: targets
  // behind them are -1. Of a task whole rows, at least one. 0: all.
  void restart(std::int64_t tokens);

 private:
  // Host memory that a copy reads. Two, so that one is filled while the other is read.
  struct Slot {
    explicit Slot(const Queue& queue, std::size_t bytes);
    std::shared_ptr<void> memory;
    Event copied;
  };

  Context& context_;
  data::Loader& loader_;
  std::int64_t rows_;  // of a micro-batch's tensors
  std::int64_t columns_;
  std::int64_t count_targets() const { return rows_ * (labels_ > 0 ? labels_ : columns_); }

  std::int64_t labels_ = 0;  // of a row; 0: all tokens have a target
  std::int64_t bounds_ = 0;  // elements
  Tensor memory_;            // i32: tokens, targets, number, bounds or places
  std::vector<std::unique_ptr<Slot>> slots_;
  std::size_t slot_ = 0;
  data::Batch batch_;
  std::int64_t given_ = 0;  // rows of batch_ that went out
  std::int64_t held_ = 0;   // rows of batch_
  std::int64_t left_;       // tokens that may still go out with their targets
};

}  // namespace flashgla::train

// StepGraphs: the pieces of a training step, each recorded as a graph when it comes for the second time.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "flashgla/base/graph.h"
#include "flashgla/train/feed.h"

namespace flashgla::train {

class StepGraphs {
 public:
  // What a piece's work is a function of.
  struct Key {
    enum class Piece : std::uint8_t { micro_batch, evaluation, update };
    Piece piece = Piece::update;
    bool first = true;       // micro_batch: its gradients and losses are the batch's first
    std::int64_t state = 0;  // which of the carried states it goes on from
    Bucket bucket;

    friend auto operator<=>(const Key&, const Key&) = default;  // NOLINT(modernize-use-nullptr): the check is wrong
  };

  // Not enabled: everything is done operation by operation.
  StepGraphs(const Queue& queue, bool enabled) : queue_(queue), enabled_(enabled) {}

  // Does work, the same for every call with this key. The first time operation by operation, because libraries prepare
  // themselves then, and rare buckets are not worth a recording; at most kMost are kept.
  void run(const Key& key, const std::function<void()>& work);

  std::size_t recorded() const { return recorded_; }
  // Recorded graphs hold addresses: to be called before these change.
  void forget() { graphs_.clear(), recorded_ = 0; }

 private:
  static constexpr std::size_t kMost = 64;

  const Queue& queue_;
  bool enabled_;
  std::map<Key, std::unique_ptr<Graph>> graphs_;  // null: came once
  std::size_t recorded_ = 0;
};

}  // namespace flashgla::train

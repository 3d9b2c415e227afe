// Where regions over weights read, so that idle threads can bring near what the next one reads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "flashgla/base/team.h"
#include "flashgla/ops/linear_step/linear_step.h"

namespace flashgla::ops::linear_step {

// The weights of a region's layers, by the rule that says who reads which rows of them. They may be gone when streams
// is asked: addresses are only computed.
class Walk {
 public:
  // Rows of the weight, or its panels; with swiglu those of gate, beside which as many of up are read.
  void add(const linear_step::Layer& layer, std::int64_t rows, std::int64_t at_once) {
    const std::int64_t row_bytes = static_cast<std::int64_t>(layer.weight.bytes()) / layer.weight.size(0);
    one_stream_ = layer.weight.dtype == DType::u8 && layer.y.size(0) > 2;
    parts_[cut_.matrices()] = {static_cast<const std::byte*>(layer.weight.data), row_bytes};
    cut_.add(rows, at_once);
  }
  void share_out(int threads) { cut_.share_out(threads); }

  const Cut& cut() const { return cut_; }
  const std::byte* begin() const { return parts_[0].weight; }

  // What the kernels read first for these tasks: four streams, a quarter of the rows apart.
  Streams streams(std::int64_t begin, std::int64_t end) const {
    Streams found;
    cut_.for_each(begin, end, [&](std::size_t matrix, std::int64_t from, std::int64_t to) {
      if (found.bytes > 0) return;
      const Part& part = parts_[matrix];
      const std::int64_t count = one_stream_ || to - from < Streams::kMost ? 1 : Streams::kMost;
      const std::int64_t each = (to - from) / count;
      found.bytes = each * part.row_bytes;
      for (std::int64_t s = 0; s < count; ++s) {
        found.begin[static_cast<std::size_t>(s)] = part.weight + (from + s * each) * part.row_bytes;
      }
    });
    return found;
  }

 private:
  struct Part {
    const std::byte* weight = nullptr;
    std::int64_t row_bytes = 0;
  };

  Cut cut_;
  std::array<Part, Cut::kMostMatrices> parts_{};
  bool one_stream_ = false;
};
static_assert(kMostLayers <= Cut::kMostMatrices);

// A token's regions follow each other as the last token's did.
class Order {
 public:
  static Order& of_this_thread() {
    thread_local Order order;
    return order;
  }

  // The region that came after this one the last time, which may be wrong now; nullptr: none is known.
  const NextRegion* after(const Walk& now) {
    constexpr std::size_t kMost = 4096;  // models come and go
    if (followers_.size() > kMost) followers_.clear();
    Follower& of_last = followers_[last_];
    const Cut& known = of_last.walk.cut();
    if (of_last.walk.begin() != now.begin() || known.tasks() != now.cut().tasks() ||
        known.shares() != now.cut().shares()) {
      of_last.walk = now;
      const Walk* walk = &of_last.walk;
      of_last.region = {&walk->cut(),
                        [walk](std::int64_t begin, std::int64_t end) { return walk->streams(begin, end); }};
    }
    last_ = now.begin();
    const auto found = followers_.find(last_);
    return found == followers_.end() ? nullptr : &found->second.region;
  }

 private:
  struct Follower {
    Walk walk;
    NextRegion region;
  };
  std::unordered_map<const std::byte*, Follower> followers_;  // by the first weight of the region before
  const std::byte* last_ = nullptr;
};

}  // namespace flashgla::ops::linear_step

// Where regions over weights read, so that idle threads can bring near what the next one reads.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "flashgla/base/team.h"
#include "flashgla/ops/linear_step/linear_step.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::ops::linear_step {

// The weights of a region's layers in the order of its tasks. They may be gone when this is asked: addresses are only
// computed.
class Walk {
 public:
  void add(const linear_step::Layer& layer, std::int64_t columns_a_task, std::int64_t tasks) {
    const bool packed = layer.weight.dtype == DType::u8;
    const std::int64_t unit = packed ? quantised_linear::kPanelRows : 1;
    one_stream_ = packed && layer.y.size(0) > 2;
    parts_[count_++] = {static_cast<const std::byte*>(layer.weight.data),
                        static_cast<std::int64_t>(layer.weight.bytes()) / layer.weight.size(0), tasks,
                        columns_a_task / unit, (layer.y.size(1) + unit - 1) / unit};
    tasks_ += tasks;
  }

  std::int64_t tasks() const { return tasks_; }
  const std::byte* begin() const { return parts_[0].weight; }

  // What the kernels read first for these tasks: four streams, a quarter of the rows apart.
  Streams streams(std::int64_t begin, std::int64_t end) const {
    std::int64_t before = 0;
    for (std::size_t i = 0; i < count_; before += parts_[i++].tasks) {
      const Part& part = parts_[i];
      const std::int64_t first = begin - before, last = std::min(end - before, part.tasks);
      if (first >= last) continue;
      const std::int64_t from = first * part.rows_a_task, to = std::min(last * part.rows_a_task, part.rows);
      const std::int64_t count = one_stream_ || to - from < Streams::kMost ? 1 : Streams::kMost;
      const std::int64_t each = (to - from) / count;
      Streams found;
      found.bytes = each * part.row_bytes;
      for (std::int64_t s = 0; s < count; ++s) {
        found.begin[static_cast<std::size_t>(s)] = part.weight + (from + s * each) * part.row_bytes;
      }
      return found;
    }
    return {};
  }

 private:
  // Rows are those of the weight, or its panels.
  struct Part {
    const std::byte* weight = nullptr;
    std::int64_t row_bytes = 0, tasks = 0, rows_a_task = 0, rows = 0;
  };

  std::array<Part, kMostLayers> parts_{};
  std::size_t count_ = 0;
  std::int64_t tasks_ = 0;
  bool one_stream_ = false;
};

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
    if (of_last.walk.begin() != now.begin() || of_last.walk.tasks() != now.tasks()) {
      of_last.walk = now;
      const Walk* walk = &of_last.walk;
      of_last.region = {now.tasks(),
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

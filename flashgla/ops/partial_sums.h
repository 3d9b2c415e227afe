// Sums over rows, such as the gradients of biases and norm weights, without a dependence on the number of threads:
// fixed blocks of rows are summed apart, then the blocks' sums in their order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flashgla/base/context.h"

namespace flashgla::ops {

class PartialSums {
 public:
  // [blocks, columns] f32 from scratch, not yet written; lives as long as the caller's ArenaScope.
  PartialSums(Context& context, std::int64_t rows, std::int64_t columns, const char* label)
      : rows_(rows), rows_per_block_(std::max<std::int64_t>(8, (rows + kMostBlocks - 1) / kMostBlocks)) {
    sums_ = context.scratch().tensor(Shape({blocks(), columns}), DType::f32, label);
  }

  std::int64_t blocks() const { return (rows_ + rows_per_block_ - 1) / rows_per_block_; }
  std::int64_t begin(std::int64_t block) const { return block * rows_per_block_; }
  std::int64_t end(std::int64_t block) const { return std::min(rows_, begin(block) + rows_per_block_); }
  float* operator[](std::int64_t block) const { return sums_.as<float>() + block * sums_.size(1); }

  // out[column] (+)= sum over blocks.
  void reduce(Context& context, float* out, bool accumulate) const {
    parallel_for_blocks(context, sums_.size(1), 256, [&](std::int64_t first, std::int64_t last) {
      if (!accumulate) std::fill(out + first, out + last, 0.0f);
      for (std::int64_t block = 0; block < blocks(); ++block) {
        const float* sums = (*this)[block];
        for (std::int64_t column = first; column < last; ++column) out[column] += sums[column];
      }
    });
  }

 private:
  static constexpr std::int64_t kMostBlocks = 64;
  std::int64_t rows_;
  std::int64_t rows_per_block_;
  TensorView sums_;
};

}  // namespace flashgla::ops

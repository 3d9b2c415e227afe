// Which elements of a warp's tile stay (../dropped.cuh's, drawn eight at a time): each lane draws for some, and lanes
// give each other what they have drawn. A lane's mask has bit e for its element e.
#pragma once

#include "flashgla/ops/softmax_attention/cuda/dropped.cuh"

namespace flashgla::ops::softmax_attention::cuda::tensor_cores {

// Of one head's probabilities. Keys are counted by columns of the mask (probability_mask.h).
class DroppedTiles {
 public:
  __device__ DroppedTiles(const Dropped& dropped, const Call& call, const SequenceOfCall& s, int head)
      : dropped_(dropped),
        stream_(dropped.rule.stream()),
        first_draw_(((static_cast<std::int64_t>(s.batch) * call.length + s.begin) * call.heads + head) *
                    dropped.draws_a_row),
        draws_a_token_(call.heads * dropped.draws_a_row) {}

  // Rows are tokens `row` and row + 8 of the sequence, columns 2 E keys from `column` on.
  template <int E>
  __device__ __forceinline__ std::uint32_t kept_keys(int row, int column) const {
    std::uint32_t mask = 0;
#pragma unroll
    for (int e = 0; e < E; e += 16) {
      const int lane = threadIdx.x % 32, own = column + 2 * e + 8 * (lane % 4);
      const std::uint32_t drawn = kept_of<8>(row, own) | kept_of<8>(row + 8, own) << 8;
#pragma unroll
      for (int other = 0; other < 4; ++other) {
        const std::uint32_t two = __shfl_sync(0xffffffffu, drawn, (lane & 28) | other) >> 2 * (lane % 4);
        mask |= ((two & 3) | (two >> 8 & 3) << 2) << (e + 4 * other);
      }
    }
    return mask;
  }

  // Rows are keys: columns `column` and column + 8 of the mask of this lane, columns 2 E tokens from `query` on.
  template <int E>
  __device__ __forceinline__ std::uint32_t kept_queries(int query, int column) const {
    std::uint32_t mask = 0;
    const int lane = threadIdx.x % 32, first = column - lane / 4;
#pragma unroll
    for (int e = 0; e < E; e += 16) {
      const std::uint32_t drawn = kept_of<16>(query + 2 * e + lane, first);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int from = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
        const std::uint32_t its = __shfl_sync(0xffffffffu, drawn, from) >> lane / 4;
        mask |= ((its & 1) | (its >> 8 & 1) << 2) << (e + 4 * (i / 2) + i % 2);
      }
    }
    return mask;
  }

 private:
  // Bit i: whether column + i of a token's row stays.
  template <int kColumns>
  __device__ __forceinline__ std::uint32_t kept_of(int token, int column) const {
    constexpr int kDraw = dropout::kElementsPerDraw;
    const std::int64_t draw = first_draw_ + token * draws_a_token_ + column / kDraw;
    const int apart = column % kDraw;
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kColumns / kDraw; ++i) bits |= kept_of_draw(draw + i) << kDraw * i;
    if (apart != 0) bits = (bits | kept_of_draw(draw + kColumns / kDraw) << kColumns) >> apart;
    return bits & ((1u << kColumns) - 1);
  }
  __device__ __forceinline__ std::uint32_t kept_of_draw(std::int64_t draw) const {
    const random::Words words = stream_.words(static_cast<std::uint64_t>(draw));
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < dropout::kElementsPerDraw; ++i) {
      bits |= (dropout::bits_of(words, i) >= dropped_.rule.threshold ? 1u : 0u) << i;
    }
    return bits;
  }

  const Dropped& dropped_;
  random::Stream stream_;
  std::int64_t first_draw_, draws_a_token_;
};

// The mask's column of a tile's first key.
template <class Tile>
__device__ __forceinline__ int column_of(const Call& call, const SequenceOfCall& s, const Tile& tile) {
  return (tile.past ? call.length : static_cast<int>(s.begin)) + tile.begin;
}

}  // namespace flashgla::ops::softmax_attention::cuda::tensor_cores

// Backward by sorted segments: positions are put in an order (by_token.cuh) in which one token's rows stand together,
// as they came. The list is cut into blocks of 16; within a block the rows of one token are a part. A block of threads
// sums its parts in order, some rows of dy and of dtable on their way at a time, and adds a part to dtable where it is
// all there is of its token; sums of tokens that reach over several blocks are kept, and added in order by the block
// that is the last of a token's to have kept its own.
#include <algorithm>

#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/embedding/cuda/by_token.cuh"
#include "flashgla/ops/embedding/cuda/cuda.h"

namespace flashgla::ops::embedding::cuda {

namespace {

using flashgla::cuda::kWarp;
using flashgla::cuda::Vector;

constexpr int kThreads = 512;  // at most
constexpr int kBlock = 16;     // sorted positions
constexpr int kRowsAhead = 4;  // rows read before they are added; with 8 in bf16 ptxas spills
constexpr int kWide = 4;       // columns of a thread: 16 bytes of dtable

template <class T>
struct Segments {
  const std::uint32_t* keys;      // sorted
  const std::int32_t* positions;  // of the rows, in that order
  std::int64_t count, words, length;
  ops::cuda::Operand<const T> dy;
  float* dtable;
  std::int64_t dtable_row;
  // Per block two sums of `length`: of the part that goes on from the block before, and of the one that only begins.
  float* sums;
  std::int32_t* arrived;  // of the blocks that have parts of the token that begins in a block and goes on; zeros before

  __device__ std::uint32_t key(std::int64_t i) const { return i >= 0 && i < count ? keys[i] : kNone; }
  __device__ float* sum(std::int64_t block, bool begins_here) const {
    return sums + (2 * block + (begins_here ? 1 : 0)) * length;
  }
  __device__ float* row(std::uint32_t token) const { return dtable + token * dtable_row; }
};

// A sorted position of a block. A bad token's is skipped.
template <class T>
struct Place {
  const T* from;  // null: skipped
  float* out;     // null: its part goes on
  bool begins;    // a part
  bool whole;     // the part that ends here is all there is of its token: out is dtable's row
};

// Place i of those that begin at `first`; neighbours are those of other blocks too. For the first kBlock threads of a
// warp together, which all ask for what they need at once. goes_on: whether a token comes from the block before, and
// whether one that begins in this block goes on into the next.
template <class T>
__device__ Place<T> place_at(const Segments<T>& p, std::int64_t first, int i, bool (&goes_on)[2]) {
  const std::int64_t at = first + i;
  const std::uint32_t token = p.key(at), before = p.key(at - 1), next = p.key(at + 1);
  const std::int32_t position = at < p.count ? p.positions[at] : 0;
  const std::uint32_t starts = __ballot_sync((1u << kBlock) - 1, token != before);
  const bool is_first = (starts & ((2u << i) - 1)) != 0;  // else the part goes on from the block before
  const bool ends = next != token, whole = is_first && ends;
  if (i == 0) goes_on[0] = token < p.words && !is_first;
  if (i == kBlock - 1) goes_on[1] = token < p.words && is_first && !ends;
  if (token >= p.words) return {nullptr, nullptr, false, false};
  float* out = whole ? p.row(token) : ends || i == kBlock - 1 ? p.sum(first / kBlock, is_first) : nullptr;
  return {p.dy.at(position, 0), out, i == 0 || token != before, whole};
}

// How many steps from 1 on, at most `most`, a predicate holds for that is true up to some step and false beyond: a warp
// asks for 32 at a time.
template <class Holds>
__device__ __forceinline__ int steps_while(int most, const Holds& holds) {
  int low = 0, high = most, width = 1;  // the answer is from low to high; probes are `width` apart
  while (low < high) {
    const int probe = low + (static_cast<int>(threadIdx.x % kWarp) + 1) * width;
    const int good = __popc(__ballot_sync(0xffffffffu, probe <= high && holds(probe)));
    low += good * width;
    if (good < kWarp) high = min(high, low + width - 1);
    width = max((high - low + kWarp - 1) / kWarp, 1);
  }
  return low;
}

// The blocks from `first` to `last` that have parts of one token.
struct Run {
  int first, last;
};

// Of the token that reaches into `block` from the one before (begins_here false), or out of it. By a warp.
template <class T>
__device__ Run run_of(const Segments<T>& p, int block, bool begins_here, int blocks) {
  const std::uint32_t token = p.key(std::int64_t{block} * kBlock + (begins_here ? kBlock - 1 : 0));
  const auto has = [&](std::int64_t i) { return p.key(i) == token; };
  Run run{block, block};
  // A block before it has the token last; it begins in the first of them, where it may be the first position's, too.
  if (!begins_here) {
    run.first -= steps_while(block, [&](int i) { return has((std::int64_t{block} - i + 1) * kBlock - 1); });
  }
  if (begins_here || has(std::int64_t{block} * kBlock + kBlock - 1)) {
    run.last += steps_while(blocks - 1 - block, [&](int i) { return has((std::int64_t{block} + i) * kBlock); });
  }
  return run;
}

// After a block has kept a sum of a token that reaches over several: the last of them to come here adds all to dtable,
// in their order. By all threads of the block.
template <int N, class T>
__device__ void add_up_if_last(const Segments<T>& p, int block, bool begins_here, int blocks) {
  __shared__ Run shared;
  __shared__ bool is_last;
  __syncthreads();  // of the block's stores, and of the last call's readers
  if (threadIdx.x < kWarp) {
    const Run run = run_of(p, block, begins_here, blocks);
    if (threadIdx.x == 0) {
      __threadfence();
      shared = run;
      is_last = atomicAdd(&p.arrived[run.first], 1) == run.last - run.first;
      __threadfence();
    }
  }
  __syncthreads();
  if (!is_last) return;
  const Run run = shared;
  float* to = p.row(p.key(std::int64_t{run.last} * kBlock));
  for (std::int64_t column = std::int64_t{threadIdx.x} * N; column < p.length; column += std::int64_t{blockDim.x} * N) {
    const auto own = Vector<float, N>::load(to + column);
    float total[N] = {};
#pragma unroll 4
    for (int i = run.first; i <= run.last; ++i) {
      const auto part = Vector<float, N>::load(p.sum(i, i == run.first) + column);
#pragma unroll
      for (int j = 0; j < N; ++j) total[j] += part[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] += own[j];
    Vector<float, N>::of(total).store(to + column);
  }
}

template <int N, class T>
__global__ void __launch_bounds__(kThreads, 2) parts_kernel(const Segments<T> p, int blocks) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  __shared__ Place<T> places[kBlock];
  __shared__ bool goes_on[2];
  const std::int64_t first = std::int64_t{blockIdx.x} * kBlock;
  if (threadIdx.x < kBlock) places[threadIdx.x] = place_at(p, first, static_cast<int>(threadIdx.x), goes_on);
  __syncthreads();
  for (std::int64_t column = std::int64_t{threadIdx.x} * N; column < p.length; column += std::int64_t{blockDim.x} * N) {
    float total[N] = {};
    for (int i = 0; i < kBlock; i += kRowsAhead) {
      Vector<T, N> read[kRowsAhead];
      Vector<float, N> before[kRowsAhead];
#pragma unroll
      for (int k = 0; k < kRowsAhead; ++k) {
        const Place<T>& place = places[i + k];
        if (!place.from) continue;
        read[k] = Vector<T, N>::load(place.from + column);
        if (place.whole) before[k] = Vector<float, N>::load(place.out + column);
      }
#pragma unroll
      for (int k = 0; k < kRowsAhead; ++k) {
        const Place<T>& place = places[i + k];
        if (!place.from) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] = (place.begins ? 0.0f : total[j]) + read[k][j];
        if (!place.out) continue;
        float out[N];
#pragma unroll
        for (int j = 0; j < N; ++j) out[j] = place.whole ? total[j] + before[k][j] : total[j];
        Vector<float, N>::of(out).store(place.out + column);
      }
    }
  }
  if (goes_on[0]) add_up_if_last<N>(p, static_cast<int>(blockIdx.x), false, blocks);
  if (goes_on[1]) add_up_if_last<N>(p, static_cast<int>(blockIdx.x), true, blocks);
}

}  // namespace

void backward(Context& context, const TensorView& tokens, const TensorView& dy, const TensorView& dtable,
              const TensorView& bad) {
  const std::int64_t count = tokens.numel(), words = dtable.size(0), length = dtable.size(1);
  if (count == 0 || length == 0) return;
  ArenaScope scope(context.scratch());
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  const TensorView sums = context.scratch().tensor(Shape({2 * blocks, length}), DType::f32, "embedding: sums of parts");
  const TensorView arrived = context.scratch().tensor(Shape({blocks}), DType::i32, "embedding: blocks that are done");
  const TensorView keys = context.scratch().tensor(Shape({count}), DType::i32, "embedding: tokens in order");
  const TensorView positions = context.scratch().tensor(Shape({count}), DType::i32, "embedding: their positions");
  if (context.planning()) return;
  const ByToken by_token{tokens.as<std::int32_t>(),
                         count,
                         words,
                         ByToken::block_bits_of(words),
                         static_cast<std::uint32_t*>(keys.data),
                         positions.as<std::int32_t>(),
                         static_cast<std::int32_t*>(bad.data),
                         arrived.as<std::int32_t>(),
                         blocks};
  ops::cuda::queue_kernel(context, "embedding: positions by token", by_token_kernel,
                          std::int64_t{1} << by_token.block_bits, ByToken::kThreads, 0, by_token);
  ops::cuda::with_element(dy.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Segments<T> p{by_token.keys,
                        by_token.positions,
                        count,
                        words,
                        length,
                        ops::cuda::Operand<const T>(dy),
                        dtable.as<float>(),
                        dtable.stride[0],
                        sums.as<float>(),
                        by_token.zeroed};
    const bool aligned =
        ops::cuda::is_aligned(dy, kWide) && ops::cuda::is_aligned(dtable, kWide) && length % kWide == 0;
    const std::int64_t vectors = aligned ? length / kWide : length;
    const int threads = static_cast<int>(std::clamp<std::int64_t>((vectors + 31) / 32 * 32, 32, kThreads));
    ops::cuda::queue_kernel(context, "embedding: sums of parts", aligned ? parts_kernel<kWide, T> : parts_kernel<1, T>,
                            blocks, threads, 0, p, static_cast<int>(blocks));
  });
}

}  // namespace flashgla::ops::embedding::cuda

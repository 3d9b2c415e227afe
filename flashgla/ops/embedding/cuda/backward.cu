// Backward by sorted segments: positions are put in an order (by_token.cuh) in which one token's rows stand together,
// as they came. The list is cut into blocks of 16; within a block the rows of one token are a part. A block of threads
// sums its parts in order, some rows of dy and of dtable on their way at a time, and adds a part to dtable where it is
// all there is of its token; sums of tokens that reach over several blocks are kept, and added in order by a second
// kernel.
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

constexpr int kThreads = 256;
constexpr int kPartThreads = 512;  // at most
constexpr int kBlock = 16;         // sorted positions
constexpr int kRowsAhead = 4;      // rows read before they are added; with 8 in bf16 ptxas spills
constexpr int kWide = 4;           // columns of a thread: 16 bytes of dtable

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
// warp together, which all ask for what they need at once.
template <class T>
__device__ Place<T> place_at(const Segments<T>& p, std::int64_t first, int i) {
  const std::int64_t at = first + i;
  const std::uint32_t token = p.key(at), before = p.key(at - 1), next = p.key(at + 1);
  const std::int32_t position = at < p.count ? p.positions[at] : 0;
  const std::uint32_t starts = __ballot_sync((1u << kBlock) - 1, token != before);
  if (token >= p.words) return {nullptr, nullptr, false, false};
  const bool is_first = (starts & ((2u << i) - 1)) != 0;  // else the part goes on from the block before
  const bool ends = next != token, whole = is_first && ends;
  float* out = whole ? p.row(token) : ends || i == kBlock - 1 ? p.sum(first / kBlock, is_first) : nullptr;
  return {p.dy.at(position, 0), out, i == 0 || token != before, whole};
}

template <int N, class T>
__global__ void __launch_bounds__(kPartThreads, 2) parts_kernel(const Segments<T> p) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  __shared__ Place<T> places[kBlock];
  const std::int64_t first = std::int64_t{blockIdx.x} * kBlock;
  if (threadIdx.x < kBlock) places[threadIdx.x] = place_at(p, first, static_cast<int>(threadIdx.x));
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
}

// One block of threads for each block of positions: adds up the parts of the token that begins in it and goes on.
template <class T>
__global__ void __launch_bounds__(kThreads) long_segments_kernel(const Segments<T> p) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  const std::int64_t block = blockIdx.x, last = block * kBlock + kBlock - 1;
  const std::uint32_t token = p.key(last);
  if (token >= p.words || p.key(last + 1) != token) return;
  // Where it goes through the whole block, an earlier block adds it up.
  if (p.key(block * kBlock) == token && p.key(block * kBlock - 1) == token) return;
  std::int64_t end = block + 1;  // of the blocks that have parts of it
  for (int more = kWarp; more == kWarp; end += more) {
    const std::uint32_t others = __ballot_sync(0xffffffffu, p.key((end + threadIdx.x % kWarp) * kBlock) != token);
    more = others == 0 ? kWarp : __ffs(static_cast<int>(others)) - 1;
  }
  for (std::int64_t column = threadIdx.x; column < p.length; column += kThreads) {
    float total = p.sum(block, true)[column];
#pragma unroll 8
    for (std::int64_t next = block + 1; next < end; ++next) total += p.sum(next, false)[column];
    p.row(token)[column] += total;
  }
}

}  // namespace

void backward(Context& context, const TensorView& tokens, const TensorView& dy, const TensorView& dtable,
              const TensorView& bad) {
  const std::int64_t count = tokens.numel(), words = dtable.size(0), length = dtable.size(1);
  if (count == 0 || length == 0) return;
  ArenaScope scope(context.scratch());
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  const TensorView sums = context.scratch().tensor(Shape({2 * blocks, length}), DType::f32, "embedding: sums of parts");
  const TensorView keys = context.scratch().tensor(Shape({count}), DType::i32, "embedding: tokens in order");
  const TensorView positions = context.scratch().tensor(Shape({count}), DType::i32, "embedding: their positions");
  if (context.planning()) return;
  const ByToken by_token{tokens.as<std::int32_t>(),
                         count,
                         words,
                         ByToken::block_bits_of(words),
                         static_cast<std::uint32_t*>(keys.data),
                         positions.as<std::int32_t>(),
                         static_cast<std::int32_t*>(bad.data)};
  ops::cuda::queue_kernel(context, "embedding: positions by token", by_token_kernel,
                          std::int64_t{1} << by_token.block_bits, ByToken::kThreads, 0, by_token);
  ops::cuda::with_element(dy.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Segments<T> p{
        by_token.keys,      by_token.positions, count,           words, length, ops::cuda::Operand<const T>(dy),
        dtable.as<float>(), dtable.stride[0],   sums.as<float>()};
    const bool aligned =
        ops::cuda::is_aligned(dy, kWide) && ops::cuda::is_aligned(dtable, kWide) && length % kWide == 0;
    const std::int64_t vectors = aligned ? length / kWide : length;
    const int threads = static_cast<int>(std::clamp<std::int64_t>((vectors + 31) / 32 * 32, 32, kPartThreads));
    ops::cuda::queue_kernel(context, "embedding: sums of parts", aligned ? parts_kernel<kWide, T> : parts_kernel<1, T>,
                            blocks, threads, 0, p);
    ops::cuda::queue_kernel(context, "embedding: long segments", long_segments_kernel<T>, blocks, kThreads, 0, p);
  });
}

}  // namespace flashgla::ops::embedding::cuda

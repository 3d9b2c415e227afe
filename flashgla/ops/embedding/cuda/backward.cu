// Backward by sorted segments: positions are sorted by token, stably, so that one token's rows stand together in their
// order. The sorted list is cut into blocks of 64; within a block the rows of one token are a part. Each part is summed
// in order by one block of threads, which adds it to dtable where the part is all there is of its token; sums of tokens
// that reach over several blocks are kept, and added in order by a second kernel.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "flashgla/base/cuda/check.h"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/first_bad.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/embedding/cuda/cuda.h"
#include "flashgla/ops/rows.h"

namespace flashgla::ops::embedding::cuda {

namespace {

using flashgla::cuda::Vector;

constexpr int kThreads = 256;
constexpr int kBlock = 64;     // sorted positions
constexpr int kRowsAhead = 4;  // rows read before they are added

// keys[i] = tokens[i], or `words` for a bad one; values[i] = i.
__global__ void __launch_bounds__(kThreads)
    keys_kernel(const std::int32_t* tokens, std::int64_t count, std::int64_t words, std::uint32_t* keys,
                std::int32_t* values, std::int32_t* bad) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const std::int64_t token = tokens[i];
  const bool good = token >= 0 && token < words;
  keys[i] = static_cast<std::uint32_t>(good ? token : words);
  values[i] = static_cast<std::int32_t>(i);
  if (!good) flashgla::ops::cuda::note_bad(bad, i);
}

template <class T>
struct Segments {
  const std::uint32_t* keys;      // sorted
  const std::int32_t* positions;  // of the rows, in that order
  std::int64_t count, words;
  const T* dy;
  Rows dy_rows;
  float* dtable;
  std::int64_t dtable_row;
  // Per block two sums of `length`: of the part that goes on from the block before, and of the one that only begins.
  float* sums;

  __device__ std::int64_t length() const { return dy_rows.length(); }
  __device__ bool begins(std::int64_t i) const { return i == 0 || keys[i - 1] != keys[i]; }
  __device__ bool ends_after(std::int64_t i) const { return i + 1 == count || keys[i + 1] != keys[i]; }
  __device__ float* sum(std::int64_t block, bool begins_here) const {
    return sums + (2 * block + (begins_here ? 1 : 0)) * length();
  }
  __device__ float* row(std::uint32_t token) const { return dtable + token * dtable_row; }
};

// One block of threads for each sorted position; those where no part begins have nothing to do.
template <int N, class T>
__global__ void __launch_bounds__(kThreads) parts_kernel(const Segments<T> p) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t begin = blockIdx.x;
  const bool is_first = p.begins(begin);
  if (!is_first && begin % kBlock != 0) return;
  const std::uint32_t token = p.keys[begin];
  if (token >= p.words) return;
  std::int64_t end = begin + 1;
  while (end % kBlock != 0 && end < p.count && p.keys[end] == token) ++end;
  const bool whole = is_first && p.ends_after(end - 1);
  float* out = whole ? p.row(token) : p.sum(begin / kBlock, is_first);
  for (std::int64_t column = std::int64_t{threadIdx.x} * N; column < p.length();
       column += std::int64_t{blockDim.x} * N) {
    // Known of dtable before dy is there; a part's sum begins with zeros.
    const auto before = whole ? Vector<float, N>::load(out + column) : Vector<float, N>::zero();
    float total[N] = {};
    for (std::int64_t i = begin; i < end; i += kRowsAhead) {
      Vector<T, N> read[kRowsAhead];
#pragma unroll
      for (int ahead = 0; ahead < kRowsAhead; ++ahead) {
        if (i + ahead >= end) break;
        read[ahead] = Vector<T, N>::load(p.dy + p.dy_rows.offset(p.positions[i + ahead]) + column);
      }
#pragma unroll
      for (int ahead = 0; ahead < kRowsAhead; ++ahead) {
        if (i + ahead >= end) break;
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] += read[ahead][j];
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] += before[j];
    Vector<float, N>::of(total).store(out + column);
  }
}

// One block of threads for each block of positions: adds up the parts of the token that begins in it and goes on.
template <class T>
__global__ void __launch_bounds__(kThreads) long_segments_kernel(const Segments<T> p) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t block = blockIdx.x, last = block * kBlock + kBlock - 1;
  if (last + 1 >= p.count || p.ends_after(last)) return;
  const std::uint32_t token = p.keys[last];
  if (token >= p.words) return;
  // Where it goes through the whole block, an earlier block adds it up.
  if (p.keys[block * kBlock] == token && !p.begins(block * kBlock)) return;
  for (std::int64_t column = threadIdx.x; column < p.length(); column += kThreads) {
    float total = p.sum(block, true)[column];
    for (std::int64_t next = block + 1; next * kBlock < p.count && p.keys[next * kBlock] == token; ++next) {
      total += p.sum(next, false)[column];
    }
    p.row(token)[column] += total;
  }
}

struct Sorting {
  std::uint32_t *keys, *sorted_keys;
  std::int32_t *values, *sorted_values;
  void* temporary;
  std::size_t temporary_bytes = 0;
  int bits;

  Sorting(Context& context, std::int64_t count, std::int64_t words)
      : bits(std::bit_width(static_cast<std::uint64_t>(words))) {
    const Shape shape({count});
    auto take = [&] { return context.scratch().tensor(shape, DType::i32, "embedding: sorted tokens").data; };
    keys = static_cast<std::uint32_t*>(take());
    sorted_keys = static_cast<std::uint32_t*>(take());
    values = static_cast<std::int32_t*>(take());
    sorted_values = static_cast<std::int32_t*>(take());
    temporary = nullptr;
    sort(context, count);  // says how much it needs
    temporary = context.scratch().allocate(temporary_bytes, "embedding: sorting");
  }

  void sort(Context& context, std::int64_t count) {
    flashgla::cuda::check(
        cub::DeviceRadixSort::SortPairs(temporary, temporary_bytes, keys, sorted_keys, values, sorted_values, count, 0,
                                        bits, static_cast<cudaStream_t>(context.stream())),
        "embedding: sorting");
  }
};

}  // namespace

void backward(Context& context, const TensorView& tokens, const TensorView& dy, const TensorView& dtable,
              const TensorView& bad) {
  const std::int64_t count = tokens.numel(), words = dtable.size(0), length = dtable.size(1);
  if (count == 0 || length == 0) return;
  ArenaScope scope(context.scratch());
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  const TensorView sums = context.scratch().tensor(Shape({2 * blocks, length}), DType::f32, "embedding: sums of parts");
  Sorting sorting(context, count, words);
  if (context.planning()) return;
  ops::cuda::queue_kernel(context, "embedding: keys", keys_kernel, (count + kThreads - 1) / kThreads, kThreads, 0,
                          tokens.as<std::int32_t>(), count, words, sorting.keys, sorting.values,
                          static_cast<std::int32_t*>(bad.data));
  sorting.sort(context, count);
  ops::cuda::with_element(dy.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Segments<T> p{
        sorting.sorted_keys, sorting.sorted_values, count,           words, static_cast<const T*>(dy.data), Rows(dy),
        dtable.as<float>(),  dtable.stride[0],      sums.as<float>()};
    constexpr int kWide = flashgla::cuda::kVectorOf<T>;
    const bool aligned =
        ops::cuda::is_aligned(dy, kWide) && ops::cuda::is_aligned(dtable, kWide) && length % kWide == 0;
    const std::int64_t vectors = aligned ? length / kWide : length;
    const int threads = static_cast<int>(std::clamp<std::int64_t>((vectors + 31) / 32 * 32, 32, kThreads));
    ops::cuda::queue_kernel(context, "embedding: sums of parts", aligned ? parts_kernel<kWide, T> : parts_kernel<1, T>,
                            count, threads, 0, p);
    ops::cuda::queue_kernel(context, "embedding: long segments", long_segments_kernel<T>, blocks, kThreads, 0, p);
  });
}

}  // namespace flashgla::ops::embedding::cuda

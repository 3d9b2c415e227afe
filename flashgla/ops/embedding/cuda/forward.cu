// Forward: neighbouring threads copy a row's columns, several vectors of 16 bytes each.
#include <algorithm>

#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/first_bad.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/embedding/cuda/cuda.h"

namespace flashgla::ops::embedding::cuda {

namespace {

using flashgla::cuda::Vector;

constexpr int kThreads = 256;
constexpr int kRowsEach = 4;  // rows a thread copies from, all read before the first is written

template <class Table, class Y>
struct Lookup {
  const std::int32_t* tokens;
  ops::cuda::Operand<const Table> table;
  ops::cuda::Operand<Y> y;
  std::int64_t words, count, length;  // rows of the table, of y; columns
  std::int32_t* bad;
  int across;  // neighbouring threads on one row
};

template <int N, class Table, class Y>
__global__ void __launch_bounds__(kThreads) lookup_kernel(const Lookup<Table, Y> p) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  const int down = kThreads / p.across, lane = threadIdx.x % p.across;
  const std::int64_t first = std::int64_t{blockIdx.x} * down * kRowsEach + threadIdx.x / p.across;
  const Table* from[kRowsEach];  // null: no row
  Y* to[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const std::int64_t row = first + i * down;
    const std::int64_t token = row < p.count ? p.tokens[row] : -1;
    const bool good = token >= 0 && token < p.words;
    from[i] = good ? p.table.at(token, 0) : nullptr;
    to[i] = row < p.count ? p.y.at(row, 0) : nullptr;
    if (!good && to[i] && lane == 0) flashgla::ops::cuda::note_bad(p.bad, row);
  }
  for (std::int64_t column = std::int64_t{lane} * N; column < p.length; column += std::int64_t{p.across} * N) {
    Vector<Table, N> read[kRowsEach];
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (from[i]) read[i] = Vector<Table, N>::load(from[i] + column);
    }
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (!to[i]) continue;
      float values[N];
#pragma unroll
      for (int j = 0; j < N; ++j) values[j] = from[i] ? read[i][j] : __uint_as_float(0x7fc00000u);
      Vector<Y, N>::of(values).store(to[i] + column);
    }
  }
}

template <int N, class Table, class Y>
void queue(Context& context, Lookup<Table, Y> p) {
  p.across = kThreads;
  while (p.across > 1 && p.across / 2 * std::int64_t{N} >= p.length) p.across /= 2;
  const std::int64_t each = kThreads / p.across * kRowsEach;
  ops::cuda::queue_kernel(context, "embedding: forward", lookup_kernel<N, Table, Y>, (p.count + each - 1) / each,
                          kThreads, 0, p);
}

}  // namespace

void forward(Context& context, const TensorView& tokens, const TensorView& table, const TensorView& y,
             const TensorView& bad) {
  if (context.planning() || y.numel() == 0) return;
  ops::cuda::with_element(table.dtype, [&](auto table_zero) {
    ops::cuda::with_element(y.dtype, [&](auto y_zero) {
      using Table = decltype(table_zero);
      using Y = decltype(y_zero);
      const Lookup<Table, Y> p{tokens.as<std::int32_t>(),
                               ops::cuda::Operand<const Table>(table),
                               ops::cuda::Operand<Y>(y),
                               table.size(0),
                               tokens.numel(),
                               y.size(-1),
                               static_cast<std::int32_t*>(bad.data),
                               0};
      constexpr int kWide = flashgla::cuda::kVectorOf<Table>;
      const bool aligned =
          ops::cuda::is_aligned(table, kWide) && ops::cuda::is_aligned(y, kWide) && y.size(-1) % kWide == 0;
      aligned ? queue<kWide>(context, p) : queue<1>(context, p);
    });
  });
}

}  // namespace flashgla::ops::embedding::cuda

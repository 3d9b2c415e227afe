// Forward: neighbouring threads copy a row's columns, several vectors of 16 bytes each.
#include <algorithm>

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
constexpr int kRowsEach = 4;  // rows a thread copies from, all read before the first is written

template <class Table, class Y>
struct Lookup {
  const std::int32_t* tokens;
  const Table* table;
  Y* y;
  Rows table_rows, y_rows;
  std::int32_t* bad;
  int across;  // neighbouring threads on one row
};

template <int N, class Table, class Y>
__global__ void __launch_bounds__(kThreads) lookup_kernel(const Lookup<Table, Y> p) {
  flashgla::cuda::wait_for_previous();
  const int down = kThreads / p.across, lane = threadIdx.x % p.across;
  const std::int64_t length = p.y_rows.length(), words = p.table_rows.count();
  const std::int64_t first = std::int64_t{blockIdx.x} * down * kRowsEach + threadIdx.x / p.across;
  std::int64_t row[kRowsEach], token[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    row[i] = first + i * down;
    token[i] = row[i] < p.y_rows.count() ? p.tokens[row[i]] : -1;
    if (row[i] < p.y_rows.count() && lane == 0 && (token[i] < 0 || token[i] >= words)) {
      flashgla::ops::cuda::note_bad(p.bad, row[i]);
    }
  }
  for (std::int64_t column = std::int64_t{lane} * N; column < length; column += std::int64_t{p.across} * N) {
    Vector<Table, N> read[kRowsEach];
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (token[i] < 0 || token[i] >= words) continue;
      read[i] = Vector<Table, N>::load(p.table + p.table_rows.offset(token[i]) + column);
    }
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (row[i] >= p.y_rows.count()) continue;
      float values[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = token[i] < 0 || token[i] >= words ? __uint_as_float(0x7fc00000u) : read[i][j];
      }
      Vector<Y, N>::of(values).store(p.y + p.y_rows.offset(row[i]) + column);
    }
  }
}

template <int N, class Table, class Y>
void queue(Context& context, Lookup<Table, Y> p) {
  p.across = kThreads;
  while (p.across > 1 && p.across / 2 * std::int64_t{N} >= p.y_rows.length()) p.across /= 2;
  const std::int64_t each = kThreads / p.across * kRowsEach;
  ops::cuda::queue_kernel(context, "embedding: forward", lookup_kernel<N, Table, Y>,
                          (p.y_rows.count() + each - 1) / each, kThreads, 0, p);
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
                               static_cast<const Table*>(table.data),
                               static_cast<Y*>(y.data),
                               Rows(table),
                               Rows(y),
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

// Products with few rows, M <= 16, by a row-major weight [N,K]: decoding. Bound by the bytes of the weight, so each of
// its elements is read from memory once, widened in registers, and used for all M rows from the first-level cache.
#include "flashgla/ops/matmul/cpu/stream.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "flashgla/base/cut.h"
#include "flashgla/ops/matmul/implementations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/matmul/cpu/stream.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "hwy/cache_control.h"
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::matmul {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

constexpr int kColumns = 4;  // weight rows at once
constexpr int kRows = 4;     // rows of a at once: 16 accumulators

// Two vectors of weights from memory. bf16 comes as pairs in 32-bit lanes, widened by a shift and a mask: the first
// vector then holds the even elements and the second the odd ones, and `arrange` puts the rows of a in the same order.
HWY_INLINE void load_two(simd::F32 d, const float* w, VF32& first, VF32& second) {
  first = hn::LoadU(d, w);
  second = hn::LoadU(d, w + hn::Lanes(d));
}
HWY_INLINE void load_two(simd::F32 d, const BFloat16* w, VF32& even, VF32& odd) {
  const hn::Rebind<std::uint32_t, simd::F32> d32;
#if HWY_TARGET == HWY_SCALAR
  std::uint32_t one_pair;
  std::memcpy(&one_pair, w, sizeof(one_pair));
  const auto pairs = hn::Set(d32, one_pair);
#else
  const hn::Repartition<std::uint16_t, simd::F32> d16;
  const auto pairs = hn::BitCast(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(w)));
#endif
  even = hn::BitCast(d, hn::ShiftLeft<16>(pairs));
  odd = hn::BitCast(d, hn::And(pairs, hn::Set(d32, 0xffff0000u)));
}

// Rows of a in f32, in the order in which load_two gives weights, with zeros up to the row's padded length.
template <class W, class A>
void arrange(const TensorView& from, float* to, std::int64_t padded) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t k_size = from.size(1);
  for (std::int64_t m = 0; m < from.size(0); ++m, to += padded) {
    const A* row = from.as<A>() + m * from.stride[0];
    std::int64_t k = 0;
    for (; k + 2 * lanes <= k_size; k += 2 * lanes) {
      VF32 first, second;
      if constexpr (std::is_same_v<W, float>) {
        first = simd::load(d, row + k);
        second = simd::load(d, row + k + lanes);
      } else if constexpr (std::is_same_v<A, float>) {
        hn::LoadInterleaved2(d, row + k, first, second);
      } else {
        load_two(d, row + k, first, second);
      }
      hn::StoreU(first, d, to + k);
      hn::StoreU(second, d, to + k + lanes);
    }
    std::fill(to + k, to + padded, 0.0f);
    for (std::int64_t i = 0; k + i < k_size; ++i) {
      to[k + (std::is_same_v<W, float> ? i : i % 2 * lanes + i / 2)] = static_cast<float>(row[k + i]);
    }
  }
}

// totals[i][j] = sum_k a[i * a_stride + k] w[j * w_stride + k], a arranged for W. next_row: from a row to the one that
// is read next.
template <int Rows, int Columns, class W>
HWY_INLINE void dot_block(const float* a, std::int64_t a_stride, const W* w, std::int64_t w_stride,
                          std::int64_t next_row, std::int64_t k_size, float (&totals)[kRows][kColumns]) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VF32 sums[Rows][Columns];
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Columns; ++j) sums[i][j] = hn::Zero(d);
  }
  auto add_products = [&](const W* const(&weights)[Columns], std::int64_t k) HWY_ATTR {
    VF32 first[Columns], second[Columns];
    for (int j = 0; j < Columns; ++j) load_two(d, weights[j], first[j], second[j]);
    for (int i = 0; i < Rows; ++i) {
      const VF32 a_first = hn::LoadU(d, a + i * a_stride + k);
      const VF32 a_second = hn::LoadU(d, a + i * a_stride + k + lanes);
      for (int j = 0; j < Columns; ++j) {
        sums[i][j] = hn::MulAdd(a_first, first[j], sums[i][j]);
        sums[i][j] = hn::MulAdd(a_second, second[j], sums[i][j]);
      }
    }
  };
  const W* weights[Columns];
  std::int64_t k = 0;
  for (; k + 2 * lanes <= k_size; k += 2 * lanes) {
    for (int j = 0; j < Columns; ++j) {
      weights[j] = w + j * w_stride + k;
      hwy::Prefetch(weights[j] + next_row);
    }
    add_products(weights, k);
  }
  if (k < k_size) {
    W rest[Columns][2 * HWY_MAX_BYTES / sizeof(float)] = {};
    for (int j = 0; j < Columns; ++j) {
      std::copy_n(w + j * w_stride + k, k_size - k, rest[j]);
      weights[j] = rest[j];
    }
    add_products(weights, k);
  }
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Columns; ++j) totals[i][j] = hn::GetLane(hn::SumOfLanes(d, sums[i][j]));
  }
}

template <int Columns, class W>
HWY_INLINE void dot_rows(int rows, const float* a, std::int64_t a_stride, const W* w, std::int64_t w_stride,
                         std::int64_t next_row, std::int64_t k_size, float (&totals)[kRows][kColumns]) {
  switch (rows) {
    case 1:
      return dot_block<1, Columns>(a, a_stride, w, w_stride, next_row, k_size, totals);
    case 2:
      return dot_block<2, Columns>(a, a_stride, w, w_stride, next_row, k_size, totals);
    case 3:
      return dot_block<3, Columns>(a, a_stride, w, w_stride, next_row, k_size, totals);
    default:
      return dot_block<4, Columns>(a, a_stride, w, w_stride, next_row, k_size, totals);
  }
}

template <class W, class C>
void stream_columns(const float* a, std::int64_t a_stride, const TensorView& b, const TensorView& c,
                    const Options& options, std::int64_t begin, std::int64_t end) {
  const std::int64_t rows = c.size(0), k_size = b.size(0), w_stride = b.stride[1];
  const W* w = b.as<W>();
  float totals[kRows][kColumns];
  // Columns n, n + spacing, ...
  auto take = [&](std::int64_t n, std::int64_t spacing, bool whole) {
    const std::int64_t columns = whole ? kColumns : 1;
    for (std::int64_t m = 0; m < rows; m += kRows) {
      const auto block = static_cast<int>(std::min<std::int64_t>(kRows, rows - m));
      const float* a_block = a + m * a_stride;
      if (whole) {
        dot_rows<kColumns>(block, a_block, a_stride, w + n * w_stride, spacing * w_stride, w_stride, k_size, totals);
      } else {
        dot_rows<1>(block, a_block, a_stride, w + n * w_stride, spacing * w_stride, w_stride, k_size, totals);
      }
      for (int i = 0; i < block; ++i) {
        C* out = c.as<C>() + (m + i) * c.stride[0];
        for (std::int64_t j = 0; j < columns; ++j) {
          const std::int64_t column = n + j * spacing;
          float value = totals[i][j];
          if (options.accumulate) value += static_cast<float>(out[column]);
          if (options.bias) {
            value += options.bias.dtype == DType::f32 ? options.bias.as<float>()[column]
                                                      : static_cast<float>(options.bias.as<BFloat16>()[column]);
          }
          out[column] = static_cast<C>(value);
        }
      }
    }
  };
  // The columns at once lie a quarter of the task apart, so that each walks through memory without a jump.
  const std::int64_t quarter = (end - begin) / kColumns;
  for (std::int64_t r = 0; r < quarter; ++r) take(begin + r, quarter, true);
  for (std::int64_t n = begin + quarter * kColumns; n < end; ++n) take(n, 1, false);
}

void Arrange(const TensorView& a, DType weight, const TensorView& arranged) {
  auto* to = arranged.as<float>();
  if (weight == DType::f32) return arrange<float, float>(a, to, arranged.size(1));
  if (a.dtype == DType::f32) return arrange<BFloat16, float>(a, to, arranged.size(1));
  arrange<BFloat16, BFloat16>(a, to, arranged.size(1));
}

void StreamColumns(const TensorView& arranged, const TensorView& b, const TensorView& c, const Options& options,
                   std::int64_t begin, std::int64_t end) {
  const auto* a = arranged.as<float>();
  const std::int64_t stride = arranged.size(1);
  if (b.dtype == DType::f32) return stream_columns<float, float>(a, stride, b, c, options, begin, end);
  if (c.dtype == DType::f32) return stream_columns<BFloat16, float>(a, stride, b, c, options, begin, end);
  stream_columns<BFloat16, BFloat16>(a, stride, b, c, options, begin, end);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::matmul
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::matmul {

HWY_EXPORT(Arrange);
HWY_EXPORT(StreamColumns);

Shape arranged_shape(const TensorView& a) {
  constexpr std::int64_t kMultiple = 64;  // twice the lanes of any vector
  return Shape({a.size(0), (a.size(1) + kMultiple - 1) / kMultiple * kMultiple});
}

void arrange(const TensorView& a, DType weight, const TensorView& arranged) {
  HWY_DYNAMIC_DISPATCH(Arrange)(a, weight, arranged);
}

void stream_columns(const TensorView& arranged, const TensorView& b, const TensorView& c, const Options& options,
                    std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(StreamColumns)(arranged, b, c, options, begin, end);
}

namespace {

void run_stream(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                const Options& options) {
  ArenaScope scope(context.scratch());
  const TensorView arranged = context.scratch().tensor(arranged_shape(a), DType::f32, "matmul: rows in f32");
  if (context.planning()) return;
  arrange(a, b.dtype, arranged);
  const std::int64_t grain = rows_at_once(a.size(1) * static_cast<std::int64_t>(size_of(b.dtype)));
  parallel_for_ranges(context, c.size(1), grain, [&](std::int64_t begin, std::int64_t end) {
    stream_columns(arranged, b, c, options, begin, end);
  });
}

}  // namespace

const Implementation kStream{"stream", Device::Kind::cpu,
                             [](const Problem& problem, const Architecture&) {
                               if (problem.m > kMostStreamedRows) return Support::no("M is more than 16");
                               if (!problem.b_columns_contiguous) {
                                 return Support::no("b is not the transpose of a row-major matrix");
                               }
                               if (!problem.a_rows_contiguous) return Support::no("a's rows are not contiguous");
                               if (!problem.c_rows_contiguous) return Support::no("c's rows are not contiguous");
                               return supports_f32_and_bf16({problem.a, problem.b, problem.c});
                             },
                             run_stream};

}  // namespace flashgla::ops::matmul
#endif

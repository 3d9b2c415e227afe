// Products with few rows, M <= 16, by a row-major weight [N,K]: decoding. Bound by the bytes of the weight, so each of
// its elements is read from memory once, converted in registers, and used for all M rows from the first-level cache.
#include "flashgla/ops/matmul/implementations.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/matmul/cpu/stream.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::matmul {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;

constexpr int kColumns = 4;  // weight rows at once
constexpr int kRows = 4;     // rows of a at once: 16 accumulators

// totals[i][j] = sum_k a[i * a_stride + k] w[j * w_stride + k].
template <int Rows, int Columns, class W>
HWY_INLINE void dot_block(const float* a, std::int64_t a_stride, const W* w, std::int64_t w_stride, std::int64_t k_size,
                          float (&totals)[kRows][kColumns]) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  simd::VF32 sums[Rows][Columns];
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Columns; ++j) sums[i][j] = hn::Zero(d);
  }
  std::int64_t k = 0;
  for (; k + lanes <= k_size; k += lanes) {
    simd::VF32 weights[Columns];
    for (int j = 0; j < Columns; ++j) weights[j] = simd::load(d, w + j * w_stride + k);
    for (int i = 0; i < Rows; ++i) {
      const simd::VF32 value = hn::LoadU(d, a + i * a_stride + k);
      for (int j = 0; j < Columns; ++j) sums[i][j] = hn::MulAdd(value, weights[j], sums[i][j]);
    }
  }
  if (k < k_size) {
    for (int j = 0; j < Columns; ++j) {
      const simd::VF32 weight = simd::load_part(d, w + j * w_stride + k, k_size - k);
      for (int i = 0; i < Rows; ++i) {
        const simd::VF32 value = simd::load_part(d, a + i * a_stride + k, k_size - k);
        sums[i][j] = hn::MulAdd(value, weight, sums[i][j]);
      }
    }
  }
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Columns; ++j) totals[i][j] = hn::GetLane(hn::SumOfLanes(d, sums[i][j]));
  }
}

template <int Columns, class W>
HWY_INLINE void dot_rows(int rows, const float* a, std::int64_t a_stride, const W* w, std::int64_t w_stride,
                         std::int64_t k_size, float (&totals)[kRows][kColumns]) {
  switch (rows) {
    case 1:
      return dot_block<1, Columns>(a, a_stride, w, w_stride, k_size, totals);
    case 2:
      return dot_block<2, Columns>(a, a_stride, w, w_stride, k_size, totals);
    case 3:
      return dot_block<3, Columns>(a, a_stride, w, w_stride, k_size, totals);
    default:
      return dot_block<4, Columns>(a, a_stride, w, w_stride, k_size, totals);
  }
}

template <class W, class C>
void stream_columns(const TensorView& a, const W* w, std::int64_t w_stride, const TensorView& c, const Options& options,
                    std::int64_t begin, std::int64_t end) {
  const std::int64_t rows = a.size(0), k_size = a.size(1);
  const float* a_data = a.as<float>();
  float totals[kRows][kColumns];
  for (std::int64_t n = begin; n < end;) {
    const bool whole = end - n >= kColumns;
    const std::int64_t columns = whole ? kColumns : 1;
    for (std::int64_t m = 0; m < rows; m += kRows) {
      const auto block = static_cast<int>(std::min<std::int64_t>(kRows, rows - m));
      const float* a_block = a_data + m * a.stride[0];
      if (whole) {
        dot_rows<kColumns>(block, a_block, a.stride[0], w + n * w_stride, w_stride, k_size, totals);
      } else {
        dot_rows<1>(block, a_block, a.stride[0], w + n * w_stride, w_stride, k_size, totals);
      }
      for (int i = 0; i < block; ++i) {
        C* out = c.as<C>() + (m + i) * c.stride[0] + n;
        for (std::int64_t j = 0; j < columns; ++j) {
          float value = totals[i][j];
          if (options.accumulate) value += static_cast<float>(out[j]);
          if (options.bias) {
            value += options.bias.dtype == DType::f32 ? options.bias.as<float>()[n + j]
                                                      : static_cast<float>(options.bias.as<BFloat16>()[n + j]);
          }
          out[j] = static_cast<C>(value);
        }
      }
    }
    n += columns;
  }
}

void Convert(const TensorView& from, const TensorView& to) {
  for (std::int64_t m = 0; m < from.size(0); ++m) {
    simd::map([](simd::VF32 x) { return x; }, from.size(1), to.as<float>() + m * to.stride[0],
              from.as<BFloat16>() + m * from.stride[0]);
  }
}

template <class W, class C>
void stream(Context& context, const TensorView& a, const TensorView& b, const TensorView& c, const Options& options) {
  constexpr std::int64_t kBytesPerTask = 128 * 1024;
  const std::int64_t row_bytes = std::max<std::int64_t>(1, a.size(1) * static_cast<std::int64_t>(sizeof(W)));
  const std::int64_t grain = std::max<std::int64_t>(1, kBytesPerTask / (row_bytes * kColumns)) * kColumns;
  parallel_for_blocks(context, c.size(1), grain, [&](std::int64_t begin, std::int64_t end) {
    stream_columns<W, C>(a, b.as<W>(), b.stride[1], c, options, begin, end);
  });
}

void Stream(Context& context, const TensorView& a, const TensorView& b, const TensorView& c, const Options& options) {
  if (b.dtype == DType::f32) return stream<float, float>(context, a, b, c, options);
  if (c.dtype == DType::f32) return stream<BFloat16, float>(context, a, b, c, options);
  stream<BFloat16, BFloat16>(context, a, b, c, options);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::matmul
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::matmul {

HWY_EXPORT(Convert);
HWY_EXPORT(Stream);

namespace {

constexpr std::int64_t kMostRows = 16;

void run_stream(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                const Options& options) {
  ArenaScope scope(context.scratch());
  TensorView rows = a;
  if (a.dtype == DType::bf16) rows = context.scratch().tensor(a.shape, DType::f32, "matmul: rows in f32");
  if (context.planning()) return;
  if (a.dtype == DType::bf16) HWY_DYNAMIC_DISPATCH(Convert)(a, rows);
  HWY_DYNAMIC_DISPATCH(Stream)(context, rows, b, c, options);
}

}  // namespace

const Implementation kStream{"stream", Device::Kind::cpu,
                             [](const Problem& problem, const Architecture&) {
                               if (problem.m > kMostRows) return Support::no("M is more than 16");
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

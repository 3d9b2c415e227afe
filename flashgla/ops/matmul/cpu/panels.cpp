// Products with many rows in f32, up to a thousand, by the transpose of a row-major matrix w [N,K] in bf16: layers over
// a prompt. Computed the other way round, c^T = w a^T: w is read element by element and needs no transposing, only
// widening, and a is transposed once for all of w. An element's sum over k runs in order whatever is cut how, so that
// the bits depend on neither threads nor pieces.
#include <algorithm>

#include "flashgla/ops/cpu/workers.h"
#include "flashgla/ops/matmul/implementations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/matmul/cpu/panels.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
#include "flashgla/ops/cpu/gemm-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::matmul {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
namespace gemm = flashgla::ops::gemm::HWY_NAMESPACE;
using gemm::Start;
using simd::VF32;

constexpr std::int64_t kPanelColumns = 64;   // rows of w at once, in f32 in the second-level cache
constexpr std::int64_t kPanelBytes = 24576;  // of a panel's piece of K, in the first-level cache
constexpr std::int64_t kApart = 16;          // elements between those rows, so that they share no set of a cache

// Rows of a in a panel, side by side.
std::int64_t PanelRows() { return 2 * gemm::Lanes(); }

// Rows [first, first + PanelRows()) of a as a panel [K,PanelRows()], zeros behind the last row.
void ArrangePanel(const TensorView& a, std::int64_t first, float* to) {
  constexpr std::int64_t kFew = 64, kFour = 4;  // of k, so that what is written is near
  constexpr std::int64_t kLine = 16;
  const std::int64_t width = PanelRows(), k_size = a.size(1), stride = a.stride[0];
  const std::int64_t rows = std::min(width, a.size(0) - first), whole = rows / kFour * kFour;
  const float* from = a.as<float>() + first * stride;
  const std::int64_t whole_k = k_size / kFour * kFour;
  for (std::int64_t k = 0; k < whole_k; k += kFew) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < kFew; j += kLine) hwy::Prefetch(from + i * stride + k + kFew + j);
    }
    gemm::Transpose(whole, std::min(kFew, whole_k - k), from + k, stride, to + k * width, width);
  }
  for (std::int64_t k = whole < width ? 0 : whole_k; k < k_size; ++k) {
    for (std::int64_t i = k < whole_k ? whole : 0; i < rows; ++i) to[k * width + i] = from[i * stride + k];
    std::fill(to + k * width + rows, to + (k + 1) * width, 0.0f);
  }
}

// `count` rows of w in f32, and rows of zeros up to `padded`.
void widen(const BFloat16* w, std::int64_t stride, std::int64_t count, std::int64_t padded, std::int64_t k_count,
           float* to, std::int64_t to_stride) {
  for (std::int64_t i = 0; i < count; ++i) {
    simd::map([](VF32 x) { return x; }, k_count, to + i * to_stride, w + i * stride);
  }
  for (std::int64_t i = count; i < padded; ++i) std::fill_n(to + i * to_stride, k_count, 0.0f);
}

// A panel's columns of c from the sums [columns,PanelRows()].
void put(const float* sums, std::int64_t padded, std::int64_t count, float* turned, const TensorView& c,
         std::int64_t first_row, std::int64_t first_column, const Options& options) {
  const std::int64_t width = PanelRows(), rows = std::min(width, c.size(0) - first_row);
  gemm::Transpose(padded, width, sums, width, turned, kPanelColumns);
  const auto sum = [](VF32 x, VF32 y) { return hn::Add(x, y); };
  for (std::int64_t i = 0; i < rows; ++i) {
    float* out = c.as<float>() + (first_row + i) * c.stride[0] + first_column;
    const float* row = turned + i * kPanelColumns;
    if (options.accumulate) {
      simd::map(sum, count, out, out, row);
    } else {
      std::copy_n(row, count, out);
    }
    if (!options.bias) continue;
    if (options.bias.dtype == DType::f32) {
      simd::map(sum, count, out, out, options.bias.as<float>() + first_column);
    } else {
      simd::map(sum, count, out, out, options.bias.as<BFloat16>() + first_column);
    }
  }
}

// Columns [column, column + kPanelColumns) of rows [row, row + rows) of c; without memory: only the bytes that it
// needs.
std::size_t Multiply(const TensorView& panels, const TensorView& b, const TensorView& c, const Options& options,
                     std::int64_t row, std::int64_t rows, std::int64_t column, std::byte* memory) {
  Carver carver(memory);
  const std::int64_t width = PanelRows(), k_size = b.size(0), stride = b.stride[1];
  const std::int64_t most = kPanelBytes / static_cast<std::int64_t>(sizeof(float)) / width;
  const std::int64_t pieces = (k_size + most - 1) / most, piece = (k_size + pieces - 1) / pieces;
  const std::int64_t panel_count = (rows + width - 1) / width, apart = piece + kApart;
  float* weights = carver.take<float>(kPanelColumns * apart);
  float* sums = carver.take<float>(panel_count * kPanelColumns * width);
  float* turned = carver.take<float>(width * kPanelColumns);
  if (memory == nullptr) return carver.used();
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(BFloat16)),
                 kFloat = static_cast<std::int64_t>(sizeof(float));
  const std::int64_t count = std::min(kPanelColumns, b.size(1) - column), padded = (count + 3) / 4 * 4;
  const BFloat16* w = b.as<BFloat16>() + column * stride;
  gemm::Ahead ahead;
  for (std::int64_t begin = 0; begin < k_size; begin += piece) {
    const std::int64_t end = std::min(k_size, begin + piece);
    widen(w + begin, stride, count, padded, end - begin, weights, apart);
    ahead.Restart(padded * panel_count * width * (end - begin));
    if (end < k_size) {
      ahead.Add(w + end, count, stride * kBytes, std::min(piece, k_size - end) * kBytes);
    } else {
      ahead.Add(c.as<float>() + row * c.stride[0] + column, rows, c.stride[0] * kFloat, count * kFloat);
    }
    for (std::int64_t p = 0; p < panel_count; ++p) {
      const float* panel = panels.as<float>() + ((row / width + p) * k_size + begin) * width;
      float* to = sums + p * kPanelColumns * width;
      const gemm::Strided from{weights, apart, 1};
      if (begin == 0) {
        gemm::Gemm<Start::zero>(padded, width, end - begin, from, panel, width, to, width, nullptr, nullptr, &ahead);
      } else {
        gemm::Gemm<Start::add>(padded, width, end - begin, from, panel, width, to, width, nullptr, nullptr, &ahead);
      }
    }
  }
  for (std::int64_t p = 0; p < panel_count; ++p) {
    put(sums + p * kPanelColumns * width, padded, count, turned, c, row + p * width, column, options);
  }
  return carver.used();
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::matmul
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::matmul {

HWY_EXPORT(PanelRows);
HWY_EXPORT(ArrangePanel);
HWY_EXPORT(Multiply);

namespace {

constexpr std::int64_t kColumnsOfTask = HWY_NAMESPACE::kPanelColumns;
// oneDNN was as fast or faster beyond these, where turning the rows round costs more beside the products.
constexpr std::int64_t kMostRows = 1024, kLeastSide = 1024;

// Rows of a task: many, for which a piece of w is widened once, but so few that each thread has some tasks.
std::int64_t rows_of_task(std::int64_t m, std::int64_t columns, std::int64_t threads) {
  constexpr std::int64_t kMost = 512, kLeast = 128, kTasksOfThread = 4;
  std::int64_t rows = kMost;
  while (rows > kLeast && (m + rows - 1) / rows * columns < kTasksOfThread * threads) rows /= 2;
  return std::min(rows, m);
}

void run_panels(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                const Options& options) {
  const ArenaScope scope(context.scratch());
  const std::int64_t width = HWY_DYNAMIC_DISPATCH(PanelRows)(), count = (c.size(0) + width - 1) / width;
  const TensorView panels =
      context.scratch().tensor(Shape({count, a.size(1), width}), DType::f32, "matmul: panels of rows");
  const std::int64_t across = (c.size(1) + kColumnsOfTask - 1) / kColumnsOfTask;
  const std::int64_t rows = rows_of_task(c.size(0), across, context.threads()), down = (c.size(0) + rows - 1) / rows;
  const Workers workers(context, down * across,
                        HWY_DYNAMIC_DISPATCH(Multiply)(panels, b, c, options, 0, rows, 0, nullptr));
  if (context.planning()) return;
  parallel_for(context, count, [&](std::int64_t panel) {
    HWY_DYNAMIC_DISPATCH(ArrangePanel)(a, panel * width, panels.as<float>() + panel * a.size(1) * width);
  });
  workers.run([&](std::int64_t item, std::byte* memory) {
    const std::int64_t row = item % down * rows;
    HWY_DYNAMIC_DISPATCH(Multiply)
    (panels, b, c, options, row, std::min(rows, c.size(0) - row), item / down * kColumnsOfTask, memory);
  });
}

}  // namespace

const Implementation kPanels{"panels", Device::Kind::cpu,
                             [](const Problem& problem, const Architecture&) {
                               if (problem.a != DType::f32 || problem.b != DType::bf16 || problem.c != DType::f32) {
                                 return Support::no("a and c are not f32, or b is not bf16");
                               }
                               if (!problem.b_columns_contiguous) {
                                 return Support::no("b is not the transpose of a row-major matrix");
                               }
                               if (!problem.a_rows_contiguous) return Support::no("a's rows are not contiguous");
                               if (!problem.c_rows_contiguous) return Support::no("c's rows are not contiguous");
                               if (problem.m > kMostRows) return Support::no("M is more than 1024");
                               if (problem.n < kLeastSide || problem.k < kLeastSide) {
                                 return Support::no("N or K is less than 1024");
                               }
                               return Support::yes();
                             },
                             run_panels};

}  // namespace flashgla::ops::matmul
#endif

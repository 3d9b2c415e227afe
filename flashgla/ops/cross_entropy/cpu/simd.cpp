// Pieces of rows: logits by one product, turned in place into losses and the logits' gradients, which two more
// products take to dx and dweight. The two products that read all of the weight (or all of dweight) do so once a
// piece, so pieces are as many rows as 64 MiB of logits hold.
#include <algorithm>
#include <cmath>

#include "flashgla/ops/cross_entropy/implementations.h"
#include "flashgla/ops/matmul/matmul.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/cross_entropy/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::cross_entropy {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

// The largest of row[0..count).
float largest_of(const float* row, std::int64_t count) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VF32 largest = hn::Set(d, row[0]);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) largest = hn::Max(largest, hn::LoadU(d, row + i));
  float result = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < count; ++i) result = std::max(result, row[i]);
  return result;
}

// log(sum_v exp(row[v])). The sum runs in blocks, so that its rounding does not grow with the count.
double log_sum_exp(const float* row, std::int64_t count) {
  const simd::F32 d;
  const float largest = largest_of(row, count);
  constexpr std::int64_t kBlock = 4096;
  double total = 0.0;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t size = std::min(kBlock, count - begin);
    const std::int64_t whole = size - size % static_cast<std::int64_t>(hn::Lanes(d));
    total += static_cast<double>(
        simd::sum([&](VF32 z) { return simd::exp(d, hn::Sub(z, hn::Set(d, largest))); }, whole, row + begin));
    for (std::int64_t i = begin + whole; i < begin + size; ++i)
      total += static_cast<double>(std::exp(row[i] - largest));
  }
  return static_cast<double>(largest) + std::log(total);
}

// row[v] = scale (exp(row[v] - log_total) - [v == target]) where the row lies: in f32, or packed to bf16 at its start.
// Elements are read before the place they are written to.
template <class Gradient>
void to_gradient(const float* row, std::int64_t count, float log_total, std::int64_t target, float scale,
                 Gradient* out) {
  const simd::F32 d;
  const float at_target = scale * (std::exp(row[target] - log_total) - 1.0f);
  simd::map([&](VF32 z) { return hn::Mul(simd::exp(d, hn::Sub(z, hn::Set(d, log_total))), hn::Set(d, scale)); }, count,
            out, row);
  out[target] = static_cast<Gradient>(at_target);
}

// Losses of a piece of rows and, with `gradient`, the logits' gradients in their place: rows of f32, or bf16 rows that
// start where the f32 rows do. hits may be null.
void Losses(Context& context, const TensorView& logits, const std::int32_t* targets, float* losses, float* hits,
            bool gradient, bool as_bf16, double scale) {
  const std::int64_t words = logits.size(1);
  parallel_for_blocks(context, logits.size(0), rows_per_task(words), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      float* row = logits.as<float>() + r * words;
      const std::int64_t target = targets[r];
      if (target < 0) {
        losses[r] = 0.0f;
        if (hits != nullptr) hits[r] = 0.0f;
        if (gradient) std::fill_n(row, words, 0.0f);
        continue;
      }
      if (hits != nullptr) {
        const float own = row[target];
        hits[r] = std::count_if(row, row + words, [own](float z) { return z >= own; }) == 1 ? 1.0f : 0.0f;
      }
      const double exact = log_sum_exp(row, words);
      losses[r] = static_cast<float>(exact - static_cast<double>(row[target]));
      if (!gradient) continue;
      const auto log_total = static_cast<float>(exact);
      if (as_bf16) {
        to_gradient(row, words, log_total, target, static_cast<float>(scale), reinterpret_cast<BFloat16*>(row));
      } else {
        to_gradient(row, words, log_total, target, static_cast<float>(scale), row);
      }
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::cross_entropy
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::cross_entropy {

HWY_EXPORT(Losses);

namespace {

// A function of the shape alone.
std::int64_t rows_per_piece(std::int64_t rows, std::int64_t words) {
  constexpr std::int64_t kElements = std::int64_t{16} << 20;
  constexpr std::int64_t kMultiple = 64;
  return std::min(rows, std::max(kMultiple, kElements / words / kMultiple * kMultiple));
}

void simd_run(Context& context, const Inputs& inputs, const Scores& scores, const Gradients& gradients) {
  const std::int64_t rows = inputs.x.size(0), words = inputs.weight.size(0);
  const bool as_bf16 = inputs.x.dtype == DType::bf16;
  const std::int64_t piece = rows_per_piece(rows, words);
  ArenaScope scope(context.scratch());
  const TensorView buffer = context.scratch().tensor({piece, words}, DType::f32, "cross_entropy: logits");
  for (std::int64_t begin = 0; begin < rows; begin += piece) {
    const std::int64_t end = std::min(rows, begin + piece);
    const TensorView logits = buffer.slice(0, 0, end - begin);
    const TensorView x = inputs.x.slice(0, begin, end);
    matmul::run(context, x, inputs.weight.transpose(0, 1), logits);
    if (!context.planning()) {
      const auto take_losses = HWY_DYNAMIC_DISPATCH(Losses);
      take_losses(context, logits, inputs.targets.as<std::int32_t>() + begin, scores.losses.as<float>() + begin,
                  scores.hits ? scores.hits.as<float>() + begin : nullptr, static_cast<bool>(gradients.dx), as_bf16,
                  gradients.scale);
    }
    if (!gradients.dx) continue;
    TensorView dlogits = logits;
    if (as_bf16) {
      dlogits = TensorView(logits.data, DType::bf16, logits.shape);
      dlogits.stride[0] = 2 * words;
    }
    matmul::run(context, dlogits, inputs.weight, gradients.dx.slice(0, begin, end));
    if (!gradients.dweight) continue;
    matmul::Options accumulate;
    accumulate.accumulate = true;
    matmul::run(context, dlogits.transpose(0, 1), x, gradients.dweight, accumulate);
  }
}

}  // namespace

const Implementation kSimd{"simd", Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           simd_run};

}  // namespace flashgla::ops::cross_entropy
#endif

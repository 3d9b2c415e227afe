// Forward copies rows. Backward gives each task a slice of columns, in which it takes all tokens in their order.
#include "flashgla/ops/embedding/implementations.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/embedding/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::embedding {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

template <class Table, class Y>
void forward(Context& context, const std::int32_t* tokens, const TypedRows<Table>& table, const TypedRows<Y>& y) {
  parallel_for_blocks(context, y.count(), rows_per_task(y.length()), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      simd::map([](VF32 value) { return value; }, y.length(), y[row], table[tokens[row]]);
    }
  });
}

template <class T>
void backward(Context& context, const std::int32_t* tokens, const TypedRows<T>& dy, const TypedRows<float>& dtable) {
  constexpr std::int64_t kColumns = 64;
  parallel_for_blocks(context, dy.length(), kColumns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = 0; row < dy.count(); ++row) {
      float* sums = dtable[tokens[row]] + begin;
      simd::map([](VF32 total, VF32 value) { return hn::Add(total, value); }, end - begin, sums, sums, dy[row] + begin);
    }
  });
}

template <class T>
using R = TypedRows<T>;

void Forward(Context& context, const TensorView& tokens, const TensorView& table, const TensorView& y) {
  const auto* token = tokens.as<std::int32_t>();
  if (table.dtype == DType::f32) return forward(context, token, R<float>(table), R<float>(y));
  if (y.dtype == DType::f32) return forward(context, token, R<BFloat16>(table), R<float>(y));
  forward(context, token, R<BFloat16>(table), R<BFloat16>(y));
}

void Backward(Context& context, const TensorView& tokens, const TensorView& dy, const TensorView& dtable) {
  const auto* token = tokens.as<std::int32_t>();
  if (dy.dtype == DType::f32) return backward(context, token, R<float>(dy), R<float>(dtable));
  backward(context, token, R<BFloat16>(dy), R<float>(dtable));
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::embedding
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::embedding {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

const Implementation kSimd{
    "simd", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) {
      return supports_f32_and_bf16({problem.dtype, problem.table_dtype});
    },
    [](Context& context, const TensorView& tokens, const TensorView& table, const TensorView& y, const TensorView&) {
      if (context.planning()) return;
      HWY_DYNAMIC_DISPATCH(Forward)(context, tokens, table, y);
    },
    [](Context& context, const TensorView& tokens, const TensorView& dy, const TensorView& dtable, const TensorView&) {
      if (context.planning()) return;
      HWY_DYNAMIC_DISPATCH(Backward)(context, tokens, dy, dtable);
    }};

}  // namespace flashgla::ops::embedding
#endif

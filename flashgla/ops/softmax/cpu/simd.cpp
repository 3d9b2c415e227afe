// A row is read into the first-level cache once and passed over there.
#include <algorithm>

#include "flashgla/ops/rows.h"
#include "flashgla/ops/softmax/implementations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/softmax/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::softmax {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

// In all lanes; of at least one element.
template <class T>
VF32 largest_of(const T* x, std::int64_t length) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VF32 largest = hn::Set(d, static_cast<float>(x[0]));
  std::int64_t i = 0;
  for (; i + lanes <= length; i += lanes) largest = hn::Max(largest, simd::load(d, x + i));
  float rest = static_cast<float>(x[0]);
  for (; i < length; ++i) rest = std::max(rest, static_cast<float>(x[i]));
  return hn::Max(hn::MaxOfLanes(d, largest), hn::Set(d, rest));
}

// Of e^(x - largest). Blocks are summed apart in f32, then in f64: a long row costs no digits. (simd::sum takes zeros
// behind the row's end, of which the exponentials are not 0.)
template <class T>
float sum_of_exponentials(const T* x, std::int64_t length, VF32 largest) {
  constexpr std::int64_t kBlock = 64;  // vectors
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  double total = 0.0;
  std::int64_t i = 0;
  while (i + lanes <= length) {
    VF32 sums = hn::Zero(d);
    for (const std::int64_t end = std::min(length, i + kBlock * lanes); i + lanes <= end; i += lanes) {
      sums = hn::Add(sums, simd::exp(d, hn::Sub(simd::load(d, x + i), largest)));
    }
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sums)));
  }
  if (i < length) {
    float rest[HWY_MAX_BYTES / sizeof(float)];
    hn::StoreU(simd::exp(d, hn::Sub(simd::load_part(d, x + i, length - i), largest)), d, rest);
    for (std::int64_t j = 0; j < length - i; ++j) total += static_cast<double>(rest[j]);
  }
  return static_cast<float>(total);
}

template <class T>
void forward(Context& context, const TensorView& x_view, const TensorView& y_view) {
  const TypedRows<T> x(x_view), y(y_view);
  const std::int64_t length = x.length();
  const simd::F32 d;
  parallel_for_blocks(context, x.count(), rows_per_task(length), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* from = x[row];
      const VF32 largest = largest_of(from, length);
      const VF32 scale = hn::Set(d, 1.0f / sum_of_exponentials(from, length, largest));
      simd::map([&](VF32 a) { return hn::Mul(simd::exp(d, hn::Sub(a, largest)), scale); }, length, y[row], from);
    }
  });
}

template <class T>
void backward(Context& context, const TensorView& y_view, const TensorView& dy_view, const TensorView& dx_view) {
  const TypedRows<T> y(y_view), dy(dy_view), dx(dx_view);
  const std::int64_t length = y.length();
  const simd::F32 d;
  parallel_for_blocks(context, y.count(), rows_per_task(length), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const VF32 dot = hn::Set(d, simd::sum([](VF32 a, VF32 g) { return hn::Mul(a, g); }, length, y[row], dy[row]));
      simd::map([&](VF32 a, VF32 g) { return hn::Mul(a, hn::Sub(g, dot)); }, length, dx[row], y[row], dy[row]);
    }
  });
}

void Forward(Context& context, const TensorView& x, const TensorView& y) {
  if (x.dtype == DType::f32) return forward<float>(context, x, y);
  forward<BFloat16>(context, x, y);
}
void Backward(Context& context, const TensorView& y, const TensorView& dy, const TensorView& dx) {
  if (y.dtype == DType::f32) return backward<float>(context, y, dy, dx);
  backward<BFloat16>(context, y, dy, dx);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::softmax
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::softmax {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

namespace {

void simd_forward(Context& context, const TensorView& x, const TensorView& y) {
  HWY_DYNAMIC_DISPATCH(Forward)(context, x, y);
}

void simd_backward(Context& context, const TensorView& y, const TensorView& dy, const TensorView& dx) {
  HWY_DYNAMIC_DISPATCH(Backward)(context, y, dy, dx);
}

}  // namespace

const Implementation kSimd{
    "simd", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, simd_forward,
    simd_backward};

}  // namespace flashgla::ops::softmax
#endif

// A row is read into the first-level cache once and passed over twice there; the gate's sigmoid is computed again
// rather than kept.
#include <cmath>

#include "flashgla/ops/partial_sums.h"
#include "flashgla/ops/rms_norm_swish_gate/implementations.h"
#include "flashgla/ops/rows.h"
#include "flashgla/ops/weight_in_f32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/rms_norm_swish_gate/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::rms_norm_swish_gate {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

HWY_INLINE VF32 swish(VF32 z) { return hn::Mul(z, simd::sigmoid(simd::F32(), z)); }

template <class T>
void forward(Context& context, const TensorView& x_view, const TensorView& gate_view, const float* weight,
             const TensorView& y_view, float* rstd, double epsilon) {
  const TypedRows<T> x(x_view), gate(gate_view), y(y_view);
  const std::int64_t length = x.length();
  const simd::F32 d;
  parallel_for_blocks(context, x.count(), rows_per_task(length), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float squares = simd::sum([](VF32 a) { return hn::Mul(a, a); }, length, x[row]);
      const float r = 1.0f / std::sqrt(squares / static_cast<float>(length) + static_cast<float>(epsilon));
      simd::map([&](VF32 a, VF32 z, VF32 w) { return hn::Mul(hn::Mul(hn::Mul(a, hn::Set(d, r)), w), swish(z)); },
                length, y[row], x[row], gate[row], weight);
      if (rstd) rstd[row] = r;
    }
  });
}

template <class T>
void backward(Context& context, const TensorView& x_view, const TensorView& gate_view, const float* weight,
              const float* rstd, const TensorView& dy_view, const TensorView& dx_view, const TensorView& dgate_view,
              const PartialSums& dweight) {
  const TypedRows<T> x(x_view), gate(gate_view), dy(dy_view), dx(dx_view), dgate(dgate_view);
  const std::int64_t length = x.length();
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  parallel_for(context, dweight.blocks(), [&](std::int64_t block) {
    float* sums = dweight[block];
    std::fill_n(sums, length, 0.0f);
    for (std::int64_t row = dweight.begin(block); row < dweight.end(block); ++row) {
      const VF32 r = hn::Set(d, rstd[row]);
      const T *x_row = x[row], *gate_row = gate[row], *dy_row = dy[row];
      VF32 dots = hn::Zero(d);  // of x with dy swish weight
      std::int64_t i = 0;
      for (; i + lanes <= length; i += lanes) {
        const VF32 a = simd::load(d, x_row + i);
        const VF32 through = hn::Mul(hn::Mul(simd::load(d, dy_row + i), swish(simd::load(d, gate_row + i))), a);
        dots = hn::MulAdd(through, simd::load(d, weight + i), dots);
        simd::store(d, hn::MulAdd(through, r, simd::load(d, sums + i)), sums + i);
      }
      if (const std::int64_t rest = length - i; rest > 0) {
        const VF32 a = simd::load_part(d, x_row + i, rest);
        const VF32 z = simd::load_part(d, gate_row + i, rest);
        const VF32 through = hn::Mul(hn::Mul(simd::load_part(d, dy_row + i, rest), swish(z)), a);
        dots = hn::MulAdd(through, simd::load_part(d, weight + i, rest), dots);
        simd::store_part(d, hn::MulAdd(through, r, simd::load_part(d, sums + i, rest)), sums + i, rest);
      }
      const float dot = hn::GetLane(hn::SumOfLanes(d, dots));
      const VF32 pull = hn::Mul(hn::Mul(hn::Mul(r, r), r), hn::Set(d, dot / static_cast<float>(length)));
      simd::map2(
          [&](VF32& to_x, VF32& to_gate, VF32 a, VF32 z, VF32 g, VF32 w) {
            const VF32 s = simd::sigmoid(d, z);
            const VF32 swished = hn::Mul(z, s);
            const VF32 scaled = hn::Mul(hn::Mul(g, w), r);
            to_x = hn::NegMulAdd(a, pull, hn::Mul(scaled, swished));
            to_gate = hn::Mul(hn::Mul(scaled, a), hn::NegMulAdd(swished, s, hn::Add(s, swished)));
          },
          length, dx[row], dgate[row], x_row, gate_row, dy_row, weight);
    }
  });
}

void Forward(Context& context, const TensorView& x, const TensorView& gate, const float* weight, const TensorView& y,
             float* rstd, double epsilon) {
  if (x.dtype == DType::f32) return forward<float>(context, x, gate, weight, y, rstd, epsilon);
  forward<BFloat16>(context, x, gate, weight, y, rstd, epsilon);
}

void Backward(Context& context, const TensorView& x, const TensorView& gate, const float* weight, const float* rstd,
              const TensorView& dy, const TensorView& dx, const TensorView& dgate, const PartialSums& dweight) {
  if (x.dtype == DType::f32) return backward<float>(context, x, gate, weight, rstd, dy, dx, dgate, dweight);
  backward<BFloat16>(context, x, gate, weight, rstd, dy, dx, dgate, dweight);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::rms_norm_swish_gate
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::rms_norm_swish_gate {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

namespace {

void simd_forward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
                  const TensorView& y, const TensorView& rstd, double epsilon) {
  ArenaScope scope(context.scratch());
  const float* weight32 = weight_in_f32(context, weight, x.size(-1));
  if (context.planning()) return;
  HWY_DYNAMIC_DISPATCH(Forward)(context, x, gate, weight32, y, rstd ? rstd.as<float>() : nullptr, epsilon);
}

void simd_backward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
                   const TensorView& rstd, const TensorView& dy, const TensorView& dx, const TensorView& dgate,
                   const TensorView& dweight) {
  ArenaScope scope(context.scratch());
  const std::int64_t length = x.size(-1);
  const float* weight32 = weight_in_f32(context, weight, length);
  const PartialSums sums(context, rows_of(x.shape), length, "rms_norm_swish_gate: dweight");
  if (context.planning()) return;
  HWY_DYNAMIC_DISPATCH(Backward)(context, x, gate, weight32, rstd.as<float>(), dy, dx, dgate, sums);
  if (dweight) sums.reduce(context, dweight.as<float>(), true);
}

}  // namespace

const Implementation kSimd{"simd", Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           simd_forward, simd_backward};

}  // namespace flashgla::ops::rms_norm_swish_gate
#endif

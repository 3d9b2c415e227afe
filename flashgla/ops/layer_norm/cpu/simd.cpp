// A row is read into the first-level cache once and passed over three times there.
#include <cmath>

#include "flashgla/ops/layer_norm/implementations.h"
#include "flashgla/ops/partial_sums.h"
#include "flashgla/ops/rows.h"
#include "flashgla/ops/weight_in_f32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/layer_norm/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::layer_norm {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

template <class T>
void forward(Context& context, const Inputs& inputs, const Outputs& outputs, const float* ones, const float* weight,
             const float* bias, double epsilon) {
  const TypedRows<T> x(inputs.x), y(outputs.y);
  const std::int64_t length = x.length();
  const simd::F32 d;
  parallel_for_blocks(context, x.count(), rows_per_task(length), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float m = simd::sum([](VF32 a) { return a; }, length, x[row]) / static_cast<float>(length);
      const VF32 mean = hn::Set(d, m);
      // What sum() takes behind the row's end is zeros, which are not 0 when centred; their `ones` are.
      const float squares = simd::sum(
          [&](VF32 a, VF32 one) {
            const VF32 centred = hn::Mul(hn::Sub(a, mean), one);
            return hn::Mul(centred, centred);
          },
          length, x[row], ones);
      const float r = 1.0f / std::sqrt(squares / static_cast<float>(length) + static_cast<float>(epsilon));
      const VF32 scale = hn::Set(d, r);
      simd::map([&](VF32 a, VF32 w, VF32 b) { return hn::MulAdd(hn::Mul(hn::Sub(a, mean), scale), w, b); }, length,
                y[row], x[row], weight, bias);
      if (!outputs.rstd) continue;
      outputs.mean.as<float>()[row] = m;
      outputs.rstd.as<float>()[row] = r;
    }
  });
}

template <class T>
void backward(Context& context, const Gradients& g, const float* weight, const PartialSums& dweight) {
  const TypedRows<T> x(g.x), dy(g.dy), dx(g.dx);
  const std::int64_t length = x.length();
  const simd::F32 d;
  parallel_for(context, dweight.blocks(), [&](std::int64_t block) {
    float* sums = dweight[block];
    std::fill_n(sums, length, 0.0f);
    for (std::int64_t row = dweight.begin(block); row < dweight.end(block); ++row) {
      const float r = g.rstd.as<float>()[row];
      const VF32 mean = hn::Set(d, g.mean.as<float>()[row]), scale = hn::Set(d, r);
      const float total_u = simd::sum([](VF32 dyd, VF32 w) { return hn::Mul(dyd, w); }, length, dy[row], weight);
      const float dot = simd::sum([&](VF32 a, VF32 dyd, VF32 w) { return hn::Mul(hn::Mul(dyd, w), hn::Sub(a, mean)); },
                                  length, x[row], dy[row], weight);
      simd::map([&](VF32 total, VF32 a, VF32 dyd) { return hn::MulAdd(hn::Mul(dyd, hn::Sub(a, mean)), scale, total); },
                length, sums, sums, x[row], dy[row]);
      const VF32 mean_u = hn::Set(d, total_u / static_cast<float>(length));
      const VF32 pull = hn::Set(d, r * r * r * dot / static_cast<float>(length));
      const auto gradient = [&](VF32 a, VF32 dyd, VF32 w) {
        return hn::NegMulAdd(hn::Sub(a, mean), pull, hn::Mul(hn::MulSub(dyd, w, mean_u), scale));
      };
      if (g.accumulate_dx) {
        simd::map([&](VF32 before, VF32 a, VF32 dyd, VF32 w) { return hn::Add(before, gradient(a, dyd, w)); }, length,
                  dx[row], dx[row], x[row], dy[row], weight);
      } else {
        simd::map(gradient, length, dx[row], x[row], dy[row], weight);
      }
    }
  });
}

void Forward(Context& context, const Inputs& inputs, const Outputs& outputs, const float* ones, const float* weight,
             const float* bias, double epsilon) {
  if (inputs.x.dtype == DType::f32) return forward<float>(context, inputs, outputs, ones, weight, bias, epsilon);
  forward<BFloat16>(context, inputs, outputs, ones, weight, bias, epsilon);
}

void Backward(Context& context, const Gradients& gradients, const float* weight, const PartialSums& dweight) {
  if (gradients.x.dtype == DType::f32) return backward<float>(context, gradients, weight, dweight);
  backward<BFloat16>(context, gradients, weight, dweight);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::layer_norm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::layer_norm {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

namespace {

void simd_forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  const ArenaScope scope(context.scratch());
  const std::int64_t length = inputs.x.size(-1);
  const float* ones = weight_in_f32(context, {}, length);
  const float* weight = weight_in_f32(context, inputs.weight, length);
  const float* bias = weight_in_f32(context, inputs.bias, length);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Forward)(context, inputs, outputs, ones, weight, bias, epsilon);
}

void simd_backward(Context& context, const Gradients& gradients) {
  const ArenaScope scope(context.scratch());
  const std::int64_t length = gradients.x.size(-1);
  const float* weight = weight_in_f32(context, gradients.weight, length);
  const PartialSums sums(context, rows_of(gradients.x.shape), length, "layer_norm: dweight");
  if (context.planning()) return;
  HWY_DYNAMIC_DISPATCH(Backward)(context, gradients, weight, sums);
  sums.reduce(context, gradients.dweight.as<float>(), true);
}

}  // namespace

const Implementation kSimd{"simd", Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           simd_forward, simd_backward};

}  // namespace flashgla::ops::layer_norm
#endif

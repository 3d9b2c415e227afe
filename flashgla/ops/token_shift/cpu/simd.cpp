// One pass over memory each, by blocks of rows.
#include "flashgla/ops/partial_sums.h"
#include "flashgla/ops/rows.h"
#include "flashgla/ops/token_shift/implementations.h"
#include "flashgla/ops/weight_in_f32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/token_shift/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::token_shift {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

// Calls body(row, n, sequence) for rows [begin, end) in order.
template <class Body>
HWY_INLINE void for_each_row(const Inputs& in, std::int64_t begin, std::int64_t end, const Body& body) {
  if (begin >= end) return;
  std::int64_t n = sequence_of(in, begin);
  Sequence sequence = sequence_at(in.x, in.cu_seqlens, n);
  for (std::int64_t row = begin; row < end; ++row) {
    while (row >= sequence.end) sequence = sequence_at(in.x, in.cu_seqlens, ++n);
    body(row, n, sequence);
  }
}

template <class T>
HWY_INLINE VF32 load(const T* from, std::int64_t i, std::int64_t length) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  return i + lanes <= length ? simd::load(d, from + i) : simd::load_part(d, from + i, length - i);
}
template <class T>
HWY_INLINE void store(VF32 value, T* to, std::int64_t i, std::int64_t length) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  i + lanes <= length ? simd::store(d, value, to + i) : simd::store_part(d, value, to + i, length - i);
}

template <class T>
void forward_of(Context& context, const Inputs& in, const float* mu, const Outputs& out) {
  const TypedRows<T> x(in.x), y(out.y);
  const std::int64_t length = x.length(), rows = x.count(), mixes = in.mu.size(0);
  const auto* states = static_cast<const float*>(in.initial_state.data);
  auto* after = static_cast<float*>(out.final_state.data);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(simd::F32()));
  const auto mix = [&](std::int64_t row, const auto* before) {
    const T* own = x[row];
    for (std::int64_t i = 0; i < length; i += lanes) {
      const VF32 past = before ? load(before, i, length) : hn::Zero(simd::F32());
      const VF32 step = hn::Sub(load(own, i, length), past);
      for (std::int64_t m = 0; m < mixes; ++m) {
        store(hn::MulAdd(load(mu + m * length, i, length), step, past), y[m * rows + row], i, length);
      }
    }
  };
  parallel_for_blocks(context, rows, rows_per_task(length * (mixes + 1)), [&](std::int64_t begin, std::int64_t end) {
    for_each_row(in, begin, end, [&](std::int64_t row, std::int64_t n, const Sequence& sequence) {
      row > sequence.begin ? mix(row, x[row - 1]) : mix(row, states ? states + n * length : nullptr);
      if (after && row + 1 == sequence.end) {
        simd::map([](VF32 value) { return value; }, length, after + n * length, x[row]);
      }
    });
  });
  for (std::int64_t n = 0; after && n < sequences_of(in.x, in.cu_seqlens); ++n) {
    const Sequence sequence = sequence_at(in.x, in.cu_seqlens, n);
    if (sequence.begin < sequence.end || (states && states == after)) continue;
    states ? std::copy_n(states + n * length, length, after + n * length)
           : std::fill_n(after + n * length, length, 0.0f);
  }
}

template <class T>
void backward_of(Context& context, const Inputs& in, const float* mu, const TensorView& dy_view,
                 const TensorView& dx_view, const PartialSums& sums) {
  const TypedRows<T> x(in.x), dy(dy_view), dx(dx_view);
  const std::int64_t length = x.length(), rows = x.count(), mixes = in.mu.size(0);
  const auto* states = static_cast<const float*>(in.initial_state.data);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(simd::F32()));
  parallel_for(context, sums.blocks(), [&](std::int64_t block) {
    float* dmu = sums[block];
    std::fill_n(dmu, mixes * length, 0.0f);
    const auto run = [&](std::int64_t row, const auto* before, bool last) {
      const simd::F32 d;
      const T* own = x[row];
      for (std::int64_t i = 0; i < length; i += lanes) {
        const VF32 past = before ? load(before, i, length) : hn::Zero(d);
        const VF32 step = hn::Sub(load(own, i, length), past);
        VF32 sum = hn::Zero(d);
        for (std::int64_t m = 0; m < mixes; ++m) {
          const VF32 factor = load(mu + m * length, i, length), gradient = load(dy[m * rows + row], i, length);
          sum = hn::MulAdd(factor, gradient, sum);
          float* to = dmu + m * length;
          store(hn::MulAdd(gradient, step, load(to, i, length)), to, i, length);
          if (last) continue;
          sum = hn::MulAdd(hn::Sub(hn::Set(d, 1.0f), factor), load(dy[m * rows + row + 1], i, length), sum);
        }
        store(sum, dx[row], i, length);
      }
    };
    for_each_row(
        in, sums.begin(block), sums.end(block), [&](std::int64_t row, std::int64_t n, const Sequence& sequence) {
          const bool last = row + 1 == sequence.end;
          row > sequence.begin ? run(row, x[row - 1], last) : run(row, states ? states + n * length : nullptr, last);
        });
  });
}

void Forward(Context& context, const Inputs& in, const float* mu, const Outputs& out) {
  (in.x.dtype == DType::f32 ? forward_of<float> : forward_of<BFloat16>)(context, in, mu, out);
}
void BackwardAll(Context& context, const Inputs& in, const float* mu, const TensorView& dy, const TensorView& dx,
                 const PartialSums& sums) {
  (in.x.dtype == DType::f32 ? backward_of<float> : backward_of<BFloat16>)(context, in, mu, dy, dx, sums);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::token_shift
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::token_shift {

HWY_EXPORT(Forward);
HWY_EXPORT(BackwardAll);

namespace {

const float* mixes_in_f32(Context& context, const TensorView& mu) {
  return weight_in_f32(context, mu.reshape(Shape({mu.numel()})), mu.numel());
}

void simd_forward(Context& context, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  const float* mu = mixes_in_f32(context, in.mu);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Forward)(context, in, mu, out);
}

void simd_backward(Context& context, const Inputs& in, const TensorView& dy, const InputGradients& to) {
  const ArenaScope scope(context.scratch());
  const float* mu = mixes_in_f32(context, in.mu);
  const PartialSums sums(context, in.x.size(0) * in.x.size(1), in.mu.numel(), "token_shift");
  if (context.planning()) return;
  HWY_DYNAMIC_DISPATCH(BackwardAll)(context, in, mu, dy, to.dx, sums);
  sums.reduce(context, to.dmu.as<float>(), true);
}

}  // namespace

const Implementation kSimd{
    "simd", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, simd_forward,
    simd_backward};

}  // namespace flashgla::ops::token_shift
#endif

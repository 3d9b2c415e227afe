// One pass over memory each.
#include "flashgla/ops/elementwise/implementations.h"
#include "flashgla/ops/partial_sums.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/elementwise/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::elementwise {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

// out[row] = f(in[row]...) for rows of any dtypes.
template <class F, class Out, class... In>
void map_rows(Context& context, const F& f, const TypedRows<Out>& out, const TypedRows<In>&... in) {
  for_each_piece(context, {&out, &in...}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    simd::map(f, count, out[row] + begin, in[row] + begin...);
  });
}

template <class T>
using R = TypedRows<T>;

void AddTo(Context& context, const TensorView& a, const TensorView& b, const TensorView& out) {
  auto add = [](VF32 x, VF32 y) { return hn::Add(x, y); };
  if (a.dtype == DType::f32) return map_rows(context, add, R<float>(out), R<float>(a), R<float>(b));
  if (out.dtype == DType::f32) return map_rows(context, add, R<float>(out), R<BFloat16>(a), R<float>(b));
  map_rows(context, add, R<BFloat16>(out), R<BFloat16>(a), R<BFloat16>(b));
}

void Multiply(Context& context, const TensorView& a, const TensorView& b, const TensorView& out) {
  auto multiply = [](VF32 x, VF32 y) { return hn::Mul(x, y); };
  if (a.dtype == DType::f32) return map_rows(context, multiply, R<float>(out), R<float>(a), R<float>(b));
  map_rows(context, multiply, R<BFloat16>(out), R<BFloat16>(a), R<BFloat16>(b));
}

void Scale(Context& context, const TensorView& x, double factor) {
  auto scale = [=](VF32 value) { return hn::Mul(value, hn::Set(simd::F32(), static_cast<float>(factor))); };
  if (x.dtype == DType::f32) return map_rows(context, scale, R<float>(x), R<float>(x));
  map_rows(context, scale, R<BFloat16>(x), R<BFloat16>(x));
}

void Convert(Context& context, const TensorView& src, const TensorView& dst) {
  auto same = [](VF32 value) { return value; };
  if (src.dtype == DType::f32 && dst.dtype == DType::f32) return map_rows(context, same, R<float>(dst), R<float>(src));
  if (src.dtype == DType::f32) return map_rows(context, same, R<BFloat16>(dst), R<float>(src));
  if (dst.dtype == DType::f32) return map_rows(context, same, R<float>(dst), R<BFloat16>(src));
  map_rows(context, same, R<BFloat16>(dst), R<BFloat16>(src));
}

template <class T>
void column_sums(Context& context, const TypedRows<T>& dy, const PartialSums& sums) {
  parallel_for(context, sums.blocks(), [&](std::int64_t block) {
    std::fill_n(sums[block], dy.length(), 0.0f);
    for (std::int64_t row = sums.begin(block); row < sums.end(block); ++row) {
      simd::map([](VF32 total, VF32 value) { return hn::Add(total, value); }, dy.length(), sums[block], sums[block],
                dy[row]);
    }
  });
}

void ColumnSums(Context& context, const TensorView& dy, const PartialSums& sums) {
  if (dy.dtype == DType::f32) return column_sums(context, R<float>(dy), sums);
  column_sums(context, R<BFloat16>(dy), sums);
}

void SiluForward(Context& context, const TensorView& x, const TensorView& y) {
  auto silu = [](VF32 value) { return hn::Mul(value, simd::sigmoid(simd::F32(), value)); };
  if (x.dtype == DType::f32) return map_rows(context, silu, R<float>(y), R<float>(x));
  map_rows(context, silu, R<BFloat16>(y), R<BFloat16>(x));
}

void SiluBackward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  auto slope = [](VF32 value, VF32 gradient) {
    const VF32 s = simd::sigmoid(simd::F32(), value);
    const VF32 y = hn::Mul(value, s);
    return hn::Mul(gradient, hn::NegMulAdd(y, s, hn::Add(s, y)));
  };
  if (x.dtype == DType::f32) return map_rows(context, slope, R<float>(dx), R<float>(x), R<float>(dy));
  map_rows(context, slope, R<BFloat16>(dx), R<BFloat16>(x), R<BFloat16>(dy));
}

void SquaredReluForward(Context& context, const TensorView& x, const TensorView& y) {
  auto square = [](VF32 value) {
    const VF32 positive = hn::Max(value, hn::Zero(simd::F32()));
    return hn::Mul(positive, positive);
  };
  if (x.dtype == DType::f32) return map_rows(context, square, R<float>(y), R<float>(x));
  map_rows(context, square, R<BFloat16>(y), R<BFloat16>(x));
}

void SquaredReluBackward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  auto slope = [](VF32 value, VF32 gradient) {
    const VF32 positive = hn::Max(value, hn::Zero(simd::F32()));
    return hn::Mul(hn::Add(positive, positive), gradient);
  };
  if (x.dtype == DType::f32) return map_rows(context, slope, R<float>(dx), R<float>(x), R<float>(dy));
  map_rows(context, slope, R<BFloat16>(dx), R<BFloat16>(x), R<BFloat16>(dy));
}

void SigmoidGateForward(Context& context, const TensorView& gate, const TensorView& x, const TensorView& y) {
  auto gated = [](VF32 open, VF32 value) { return hn::Mul(simd::sigmoid(simd::F32(), open), value); };
  if (x.dtype == DType::f32) return map_rows(context, gated, R<float>(y), R<float>(gate), R<float>(x));
  map_rows(context, gated, R<BFloat16>(y), R<BFloat16>(gate), R<BFloat16>(x));
}

template <class T>
void sigmoid_gate_backward_of(Context& context, const R<T>& gate, const R<T>& x, const R<T>& dy, const R<T>& dgate,
                              const R<T>& dx) {
  auto slopes = [](VF32& to_gate, VF32& to_x, VF32 open, VF32 value, VF32 gradient) {
    const VF32 s = simd::sigmoid(simd::F32(), open);
    to_x = hn::Mul(gradient, s);
    to_gate = hn::Mul(hn::Mul(to_x, value), hn::Sub(hn::Set(simd::F32(), 1.0f), s));
  };
  for_each_piece(context, {&gate, &x, &dy, &dgate, &dx}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    simd::map2(slopes, count, dgate[row] + begin, dx[row] + begin, gate[row] + begin, x[row] + begin, dy[row] + begin);
  });
}

void SigmoidGateBackward(Context& context, const TensorView& gate, const TensorView& x, const TensorView& dy,
                         const TensorView& dgate, const TensorView& dx) {
  if (x.dtype == DType::f32) {
    return sigmoid_gate_backward_of<float>(context, R<float>(gate), R<float>(x), R<float>(dy), R<float>(dgate),
                                           R<float>(dx));
  }
  sigmoid_gate_backward_of<BFloat16>(context, R<BFloat16>(gate), R<BFloat16>(x), R<BFloat16>(dy), R<BFloat16>(dgate),
                                     R<BFloat16>(dx));
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::elementwise
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::elementwise {

HWY_EXPORT(AddTo);
HWY_EXPORT(Multiply);
HWY_EXPORT(Scale);
HWY_EXPORT(Convert);
HWY_EXPORT(ColumnSums);
HWY_EXPORT(SiluForward);
HWY_EXPORT(SiluBackward);
HWY_EXPORT(SquaredReluForward);
HWY_EXPORT(SquaredReluBackward);
HWY_EXPORT(SigmoidGateForward);
HWY_EXPORT(SigmoidGateBackward);

namespace {

void simd_column_sum(Context& context, const TensorView& dy, const TensorView& db, bool accumulate) {
  ArenaScope scope(context.scratch());
  const PartialSums sums(context, rows_of(dy.shape), dy.size(-1), "column_sum");
  if (context.planning()) return;
  HWY_DYNAMIC_DISPATCH(ColumnSums)(context, dy, sums);
  sums.reduce(context, db.as<float>(), accumulate);
}

}  // namespace

const Implementation kSimd{"simd",
                           Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.in, problem.out});
                           },
                           [](Context& context, const TensorView& a, const TensorView& b, const TensorView& out) {
                             HWY_DYNAMIC_DISPATCH(AddTo)(context, a, b, out);
                           },
                           [](Context& context, const TensorView& x, double factor) {
                             HWY_DYNAMIC_DISPATCH(Scale)
                             (context, x, factor);
                           },
                           [](Context& context, const TensorView& src, const TensorView& dst) {
                             HWY_DYNAMIC_DISPATCH(Convert)(context, src, dst);
                           },
                           simd_column_sum,
                           [](Context& context, const TensorView& x, const TensorView& y) {
                             HWY_DYNAMIC_DISPATCH(SiluForward)(context, x, y);
                           },
                           [](Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx) {
                             HWY_DYNAMIC_DISPATCH(SiluBackward)(context, x, dy, dx);
                           },
                           [](Context& context, const TensorView& x, const TensorView& y) {
                             HWY_DYNAMIC_DISPATCH(SquaredReluForward)(context, x, y);
                           },
                           [](Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx) {
                             HWY_DYNAMIC_DISPATCH(SquaredReluBackward)(context, x, dy, dx);
                           },
                           [](Context& context, const TensorView& gate, const TensorView& x, const TensorView& y) {
                             HWY_DYNAMIC_DISPATCH(SigmoidGateForward)(context, gate, x, y);
                           },
                           [](Context& context, const TensorView& gate, const TensorView& x, const TensorView& dy,
                              const TensorView& dgate, const TensorView& dx) {
                             HWY_DYNAMIC_DISPATCH(SigmoidGateBackward)
                             (context, gate, x, dy, dgate, dx);
                           },
                           [](Context& context, const TensorView& a, const TensorView& b, const TensorView& out) {
                             HWY_DYNAMIC_DISPATCH(Multiply)(context, a, b, out);
                           }};

}  // namespace flashgla::ops::elementwise
#endif

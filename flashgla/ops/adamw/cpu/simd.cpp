// One pass over memory, in tiles that are updated in f32: where they lie, or in copies of what is kept in 16 bits.
#include <cmath>

#include "flashgla/ops/adamw/implementations.h"
#include "flashgla/ops/adamw/rounding.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/adamw/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::adamw {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

// The update with everything that is the same for all elements folded into factors:
// p = keep p - rate m / (sqrt(v) + floor), where keep = 1 - lr decay.
struct Factors {
  float beta1, beta2, gradient_factor, rate, floor, keep;

  Factors(const StepScalars& s, const Settings& settings, bool decays)
      : beta1(static_cast<float>(settings.beta1)),
        beta2(static_cast<float>(settings.beta2)),
        gradient_factor(static_cast<float>(s.gradient_factor)),
        rate(static_cast<float>(s.rate)),
        floor(static_cast<float>(s.floor)),
        keep(static_cast<float>(1.0 - (decays ? s.learning_rate * settings.weight_decay : 0.0))) {}
};

struct State {
  VF32 p, m, v;
};

HWY_INLINE State update(const Factors& f, VF32 g, State s) {
  const simd::F32 d;
  g = hn::Mul(g, hn::Set(d, f.gradient_factor));
  s.m = hn::MulAdd(hn::Set(d, f.beta1), hn::Sub(s.m, g), g);  // beta1 m + (1 - beta1) g
  const VF32 squared = hn::Mul(g, g);
  s.v = hn::MulAdd(hn::Set(d, f.beta2), hn::Sub(s.v, squared), squared);
  const VF32 direction = hn::Div(hn::Mul(hn::Set(d, f.rate), s.m), hn::Add(hn::Sqrt(s.v), hn::Set(d, f.floor)));
  s.p = hn::MulSub(hn::Set(d, f.keep), s.p, direction);
  return s;
}

void update_span(const Factors& factors, std::int64_t count, const float* g, float* p, float* m, float* v) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const State s =
        update(factors, simd::load(d, g + i), {simd::load(d, p + i), simd::load(d, m + i), simd::load(d, v + i)});
    simd::store(d, s.p, p + i);
    simd::store(d, s.m, m + i);
    simd::store(d, s.v, v + i);
  }
  if (const std::int64_t rest = count - i; rest > 0) {
    const State s =
        update(factors, simd::load_part(d, g + i, rest),
               {simd::load_part(d, p + i, rest), simd::load_part(d, m + i, rest), simd::load_part(d, v + i, rest)});
    simd::store_part(d, s.p, p + i, rest);
    simd::store_part(d, s.m, m + i, rest);
    simd::store_part(d, s.v, v + i, rest);
  }
}

constexpr std::int64_t kTile = 512;

void widen(const BFloat16* from, float* to, std::int64_t count) {
  simd::map([](VF32 value) { return value; }, count, to, from);
}

// Elements `first` and on, at most kTile.
void update_tile(const Tensors& tensors, const Settings& settings, const Factors& factors, std::uint64_t update,
                 std::int64_t first, std::int64_t count) {
  float p_tile[kTile], m_tile[kTile], v_tile[kTile];
  auto* parameter16 = tensors.master ? tensors.parameter.as<BFloat16>() + first : nullptr;
  auto* low =
      tensors.master && tensors.master.dtype == DType::u16 ? tensors.master.as<std::uint16_t>() + first : nullptr;
  const bool half_moments = tensors.first_moment.dtype == DType::bf16;
  auto* m16 = half_moments ? tensors.first_moment.as<BFloat16>() + first : nullptr;
  auto* v16 = half_moments ? tensors.second_moment.as<BFloat16>() + first : nullptr;
  float* p = low ? p_tile : (tensors.master ? tensors.master : tensors.parameter).as<float>() + first;
  float* m = half_moments ? m_tile : tensors.first_moment.as<float>() + first;
  float* v = half_moments ? v_tile : tensors.second_moment.as<float>() + first;
  if (half_moments) {
    widen(m16, m, count);
    widen(v16, v, count);
  }
  for (std::int64_t i = 0; low && i < count; ++i) p[i] = join(parameter16[i].bits, low[i]);
  update_span(factors, count, tensors.gradient.as<float>() + first, p, m, v);
  for (std::int64_t i = 0; parameter16 && i < count; ++i) {
    const SplitFloat parts = split(p[i]);
    parameter16[i].bits = parts.high;
    if (low) low[i] = parts.low;
  }
  random::Words random{};
  for (std::int64_t i = 0; half_moments && i < count; ++i) {
    const auto element = static_cast<std::uint64_t>(first + i);
    if (i == 0 || element % 4 == 0) random = rounding_bits(settings.seed, update, element / 4);
    const std::uint32_t bits = random.part(static_cast<int>(element % 4));
    m16[i].bits = round_stochastically(m[i], bits);
    v16[i].bits = round_stochastically(v[i], bits >> 16);
  }
}

void Step(Context& context, const Tensors& tensors, const Settings& settings) {
  const StepScalars& s = scalars_in(tensors.scalars);
  const Factors decaying(s, settings, true), kept(s, settings, false);
  parallel_for_blocks(context, tensors.parameter.numel(), kElementsPerTask, [&](std::int64_t first, std::int64_t last) {
    for_each_segment(tensors.boundaries, first, last, [&](std::int64_t begin, std::int64_t end, bool decays) {
      for (std::int64_t i = begin; i < end; i += kTile) {
        update_tile(tensors, settings, decays ? decaying : kept, static_cast<std::uint64_t>(s.updates), i,
                    std::min(kTile, end - i));
      }
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::adamw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::adamw {

HWY_EXPORT(Step);

const Implementation kSimd{
    "simd", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, prepare_on_cpu,
    [](Context& context, const Tensors& tensors, const Settings& settings) {
      if (scalars_in(tensors.scalars).made != 0.0) HWY_DYNAMIC_DISPATCH(Step)(context, tensors, settings);
    }};

}  // namespace flashgla::ops::adamw
#endif

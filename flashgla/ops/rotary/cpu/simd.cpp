// A task takes some tokens: the angles of the first by sine and cosine, those of the next by turning them one step
// further in f64, which for so few steps changes nothing in f32.
#include <algorithm>
#include <array>
#include <cmath>

#include "flashgla/ops/rotary/implementations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/rotary/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::rotary {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

template <class T>
void turn_heads(const TensorView& x, const TensorView& y, std::int64_t b, std::int64_t t, const float* cosine,
                const float* sine) {
  const std::int64_t half = x.size(3) / 2;
  for (std::int64_t head = 0; head < x.size(2); ++head) {
    const T* in = x.as<T>() + b * x.stride[0] + t * x.stride[1] + head * x.stride[2];
    T* out = y.as<T>() + b * y.stride[0] + t * y.stride[1] + head * y.stride[2];
    simd::map2(
        [](VF32& low, VF32& high, VF32 a, VF32 c, VF32 co, VF32 si) {
          low = hn::NegMulAdd(c, si, hn::Mul(a, co));
          high = hn::MulAdd(a, si, hn::Mul(c, co));
        },
        half, out, out + half, in, in + half, cosine, sine);
  }
}

void TurnHeads(const TensorView& x, const TensorView& y, std::int64_t b, std::int64_t t, const float* cosine,
               const float* sine) {
  if (x.dtype == DType::f32) return turn_heads<float>(x, y, b, t, cosine, sine);
  turn_heads<BFloat16>(x, y, b, t, cosine, sine);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::rotary
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::rotary {

namespace {

HWY_EXPORT(TurnHeads);

constexpr std::int64_t kTokens = 32;     // of a task
constexpr std::int64_t kMostHalf = 512;  // K/2

void run_simd(Context& context, const TensorView& x, const TensorView& positions, const TensorView& cu_seqlens,
              double base, Direction direction, const TensorView& y) {
  const std::int64_t length = x.size(1), blocks = (length + kTokens - 1) / kTokens;
  const auto half = static_cast<std::size_t>(x.size(3) / 2);
  const double sign = direction == Direction::forward ? 1.0 : -1.0;
  parallel_for(context, x.size(0) * blocks, [&](std::int64_t task) {
    const std::int64_t b = task / blocks, begin = task % blocks * kTokens;
    std::array<double, kMostHalf> frequency, step_cosine, step_sine, cosine, sine;
    std::array<float, kMostHalf> narrow_cosine, narrow_sine;
    for (std::size_t j = 0; j < half; ++j) {
      frequency[j] = sign * std::pow(base, -static_cast<double>(j) / static_cast<double>(half));
      step_cosine[j] = std::cos(frequency[j]);
      step_sine[j] = std::sin(frequency[j]);
    }
    std::int64_t sequence_end = begin;
    for (std::int64_t t = begin; t < std::min(begin + kTokens, length); ++t) {
      const bool fresh = t >= sequence_end;  // another sequence's first token, or the task's
      const double p =
          fresh ? static_cast<double>(position_at(positions, cu_seqlens, b, t, length, sequence_end)) : 0.0;
      for (std::size_t j = 0; j < half; ++j) {
        if (fresh) {
          cosine[j] = std::cos(p * frequency[j]);
          sine[j] = std::sin(p * frequency[j]);
        } else {
          const double before = cosine[j];
          cosine[j] = before * step_cosine[j] - sine[j] * step_sine[j];
          sine[j] = before * step_sine[j] + sine[j] * step_cosine[j];
        }
        narrow_cosine[j] = static_cast<float>(cosine[j]);
        narrow_sine[j] = static_cast<float>(sine[j]);
      }
      HWY_DYNAMIC_DISPATCH(TurnHeads)(x, y, b, t, narrow_cosine.data(), narrow_sine.data());
    }
  });
}

}  // namespace

const Implementation kSimd{"simd", Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             if (problem.channels > 2 * kMostHalf) return Support::no("takes at most 1024 channels");
                             return supports_f32_and_bf16({problem.dtype});
                           },
                           run_simd};

}  // namespace flashgla::ops::rotary
#endif

// One pass over memory. Draws are made some hundred elements at a time, with a counter in each lane.
#include "flashgla/ops/dropout/implementations.h"
#include "flashgla/ops/dropout/mask.h"
#include "flashgla/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/dropout/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::dropout {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

#if HWY_TARGET == HWY_SCALAR
// The bits of `draws` draws from `first` on, in the elements' order.
HWY_INLINE void fill_bits(const random::Stream& stream, std::uint64_t first, std::size_t draws, std::uint16_t* out) {
  for (std::size_t i = 0; i < draws; ++i) {
    const random::Words words = stream.words(first + i);
    for (int j = 0; j < kElementsPerDraw; ++j) *out++ = static_cast<std::uint16_t>(bits_of(words, j));
  }
}
#else
using U32 = hn::ScalableTag<std::uint32_t>;
using VU32 = hn::Vec<U32>;

// a times m: the high and the low halves of the 64 bits of each lane.
HWY_INLINE void multiply(U32 d, VU32 a, VU32 m, VU32& high, VU32& low) {
  const hn::RepartitionToWide<U32> wide;
  const auto even = hn::MulEven(a, m);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, a))), m);
  high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
}

// The bits of `draws` draws from `first` on, in the elements' order. Philox4x32 with 10 rounds, as base/random.h has it
// (whose library computes one counter at a time).
HWY_INLINE void fill_bits(const random::Stream& stream, std::uint64_t first, std::size_t draws, std::uint16_t* out) {
  const U32 d;
  const std::size_t lanes = hn::Lanes(d);
  const random::Stream::Parts parts = stream.parts(first);
  auto* words = reinterpret_cast<std::uint32_t*>(out);
  const VU32 m0 = hn::Set(d, 0xd2511f53u), m1 = hn::Set(d, 0xcd9e8d57u);
  for (std::size_t i = 0; i < draws; i += lanes) {
    VU32 c0 = hn::Add(hn::Iota(d, 0), hn::Set(d, parts.counter[0] + static_cast<std::uint32_t>(i)));
    VU32 c1 = hn::Set(d, parts.counter[1]), c2 = hn::Set(d, parts.counter[2]), c3 = hn::Set(d, parts.counter[3]);
    std::uint32_t k0 = parts.key[0], k1 = parts.key[1];
    for (int round = 0; round < 10; ++round) {
      VU32 high0, low0, high1, low1;
      multiply(d, c0, m0, high0, low0);
      multiply(d, c2, m1, high1, low1);
      c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(d, k0));
      c1 = low1;
      c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(d, k1));
      c3 = low0;
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
    hn::StoreInterleaved4(c0, c1, c2, c3, d, words + 4 * i);
  }
}
#endif

// Divides kElementsPerTask and 2^35, so that a block's counters differ in their low 32 bits alone; a multiple of what
// any vector holds.
constexpr std::int64_t kBlock = 2048;
static_assert(kElementsPerTask % kBlock == 0);

template <class T, bool kSum>
void run_of(Context& context, const TypedRows<T>& x, const TypedRows<T>& residual, const TypedRows<T>& out,
            const Rule& rule) {
  const random::Stream stream = rule.stream();
  const simd::F32 d;
  const hn::Rebind<std::uint16_t, simd::F32> narrow;
  const hn::Rebind<std::int32_t, simd::F32> words;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto threshold = hn::Set(words, static_cast<std::int32_t>(rule.threshold));
  const VF32 factor = hn::Set(d, static_cast<float>(rule.factor()));
  for_each_piece(context, {&x, &residual, &out}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    HWY_ALIGN std::uint16_t bits[kBlock];
    for (std::int64_t block = 0; block < count; block += kBlock) {
      const std::int64_t size = std::min(kBlock, count - block);
      const T* from = x[row] + begin + block;
      const T* beside = residual[row] + begin + block;
      T* to = out[row] + begin + block;
      fill_bits(stream, static_cast<std::uint64_t>((begin + block) / kElementsPerDraw),
                static_cast<std::size_t>((size + kElementsPerDraw - 1) / kElementsPerDraw), bits);
      auto dropped = [&](std::int64_t i, VF32 value) {
        const auto falls_out = hn::Lt(hn::PromoteTo(words, hn::LoadU(narrow, bits + i)), threshold);
        return hn::IfThenZeroElse(hn::RebindMask(d, falls_out), hn::Mul(value, factor));
      };
      std::int64_t i = 0;
      for (; i + lanes <= size; i += lanes) {
        VF32 value = dropped(i, simd::load(d, from + i));
        if constexpr (kSum) value = hn::Add(simd::load(d, beside + i), value);
        simd::store(d, value, to + i);
      }
      if (i == size) continue;
      VF32 value = dropped(i, simd::load_part(d, from + i, size - i));
      if constexpr (kSum) value = hn::Add(simd::load_part(d, beside + i, size - i), value);
      simd::store_part(d, value, to + i, size - i);
    }
  });
}

template <class T>
void run_in(Context& context, const TensorView& x, const TensorView& residual, const TensorView& out,
            const Rule& rule) {
  const TypedRows<T> from(x), beside(residual ? residual : x), to(out);
  (residual ? run_of<T, true> : run_of<T, false>)(context, from, beside, to, rule);
}

void Run(Context& context, const TensorView& x, const TensorView& residual, const TensorView& out, const Mask& mask) {
  (x.dtype == DType::f32 ? run_in<float> : run_in<BFloat16>)(context, x, residual, out, Rule(mask));
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::dropout
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::dropout {

HWY_EXPORT(Run);

const Implementation kSimd{
    "simd", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    [](Context& context, const TensorView& x, const TensorView& residual, const TensorView& out, const Mask& mask) {
      HWY_DYNAMIC_DISPATCH(Run)(context, x, residual, out, mask);
    }};

}  // namespace flashgla::ops::dropout
#endif

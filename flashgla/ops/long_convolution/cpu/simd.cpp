// A vector holds neighbouring channels; a task is one vector of channels of all sequences, so that the filter is
// transformed once for all sequences of a length. Short calls are summed directly; others go through a real FFT of a
// power of two, each lane its own channel: the product of spectra forward, of one spectrum with the other's conjugate
// backward.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <vector>

#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/long_convolution/implementations.h"
#include "flashgla/ops/rows.h"
#include "flashgla/ops/weight_in_f32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/long_convolution/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

#ifndef FLASHGLA_LONG_CONVOLUTION_CALL
#define FLASHGLA_LONG_CONVOLUTION_CALL
namespace flashgla::ops::long_convolution {

constexpr std::int64_t kLeastTransform = 16;

// Of a circular convolution in which a sequence's outputs (and its gradients) do not meet what wraps around; 0: the
// direct sum costs less.
inline std::int64_t transform_length(const Sequence& sequence) {
  const std::int64_t length = sequence.length(), needed = sequence.past + 2 * length - 1;
  const auto size =
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max(needed, kLeastTransform))));
  const std::int64_t passes = std::bit_width(static_cast<std::uint64_t>(size)) - 1;
  const std::int64_t direct = length * (sequence.past + (length + 1) / 2);
  return direct <= 6 * size * passes ? 0 : size;
}

// What the loops know of a call.
struct Call {
  const Inputs* in;
  const float *filter, *skip;
  std::vector<float> turns;  // cos and -sin of 2 pi i / the longest transform, in pairs, half a turn

  Call(const Inputs& inputs, const float* skip_in_f32)
      : in(&inputs), filter(inputs.filter.as<float>()), skip(skip_in_f32) {
    std::int64_t longest = 0;
    for (std::int64_t n = 0; n < sequences_of(inputs); ++n) {
      longest = std::max(longest, transform_length(sequence_at(inputs, n)));
    }
    turns.resize(static_cast<std::size_t>(longest));
    for (std::int64_t i = 0; i < longest / 2; ++i) {
      const double angle = 2.0 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(longest);
      turns[static_cast<std::size_t>(2 * i)] = static_cast<float>(std::cos(angle));
      turns[static_cast<std::size_t>(2 * i + 1)] = static_cast<float>(-std::sin(angle));
    }
  }
  // exp(-2 pi i index / size), index below size / 2.
  const float* turn(std::int64_t index, std::int64_t size) const {
    return turns.data() + 2 * index * (static_cast<std::int64_t>(turns.size()) / size);
  }
};

}  // namespace flashgla::ops::long_convolution
#endif

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::long_convolution {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

constexpr std::int64_t kMostLanes = HWY_MAX_BYTES / sizeof(float);
HWY_INLINE std::int64_t lanes() { return static_cast<std::int64_t>(hn::Lanes(simd::F32())); }

struct Complex {
  VF32 re, im;
};
HWY_INLINE Complex plus(Complex a, Complex b) { return {hn::Add(a.re, b.re), hn::Add(a.im, b.im)}; }
HWY_INLINE Complex minus(Complex a, Complex b) { return {hn::Sub(a.re, b.re), hn::Sub(a.im, b.im)}; }
HWY_INLINE Complex times(Complex a, Complex b) {
  return {hn::NegMulAdd(a.im, b.im, hn::Mul(a.re, b.re)), hn::MulAdd(a.im, b.re, hn::Mul(a.re, b.im))};
}
HWY_INLINE Complex conjugate(Complex a) { return {a.re, hn::Neg(a.im)}; }
HWY_INLINE Complex halved(Complex a) {
  const VF32 half = hn::Set(simd::F32(), 0.5f);
  return {hn::Mul(a.re, half), hn::Mul(a.im, half)};
}
HWY_INLINE Complex turn_of(const Call& call, std::int64_t index, std::int64_t size) {
  const simd::F32 d;
  const float* turn = call.turn(index, size);
  return {hn::Set(d, turn[0]), hn::Set(d, turn[1])};
}

// Complex numbers, a vector of real and one of imaginary parts each. As memory of real numbers, a vector each, it holds
// the even ones in the real and the odd ones in the imaginary parts.
class Numbers {
 public:
  void resize(std::int64_t count) { memory_.resize(static_cast<std::size_t>(2 * count * lanes())); }
  HWY_INLINE Complex get(std::int64_t i) const {
    const simd::F32 d;
    const float* at = memory_.data() + 2 * i * lanes();
    return {hn::LoadU(d, at), hn::LoadU(d, at + lanes())};
  }
  HWY_INLINE void set(std::int64_t i, Complex value) {
    const simd::F32 d;
    float* at = memory_.data() + 2 * i * lanes();
    hn::StoreU(value.re, d, at);
    hn::StoreU(value.im, d, at + lanes());
  }
  HWY_INLINE float* real(std::int64_t i) { return memory_.data() + i * lanes(); }
  void clear(std::int64_t count) { std::fill_n(memory_.begin(), 2 * count * lanes(), 0.0f); }
  void swap(Numbers& other) { memory_.swap(other.memory_); }

 private:
  std::vector<float> memory_;
};

// Of `count` numbers, a power of two, from `x` into `x`; `other` is as large. Stockham's: no reordering.
template <bool kInverse>
void transform(const Call& call, std::int64_t count, Numbers& x, Numbers& other) {
  std::int64_t stride = 1;
  for (std::int64_t n = count; n > 1; n /= 2, stride *= 2) {
    const std::int64_t half = n / 2;
    for (std::int64_t p = 0; p < half; ++p) {
      Complex turn = turn_of(call, p, n);
      if (kInverse) turn = conjugate(turn);
      for (std::int64_t q = 0; q < stride; ++q) {
        const Complex a = x.get(q + stride * p), b = x.get(q + stride * (p + half));
        other.set(q + stride * 2 * p, plus(a, b));
        other.set(q + stride * (2 * p + 1), times(minus(a, b), turn));
      }
    }
    x.swap(other);
  }
}

// The spectrum of `size` real numbers that lie in x as pairs: entry k of size / 2 + 1.
HWY_INLINE Complex spectrum_at(const Call& call, const Numbers& x, std::int64_t size, std::int64_t k) {
  const std::int64_t half = size / 2;
  if (k == 0 || k == half) {
    const Complex z = x.get(0);
    const VF32 zero = hn::Zero(simd::F32());
    return {k == 0 ? hn::Add(z.re, z.im) : hn::Sub(z.re, z.im), zero};
  }
  const Complex a = x.get(k), b = conjugate(x.get(half - k));
  const Complex even = halved(plus(a, b)), difference = halved(minus(a, b));
  const Complex odd = {difference.im, hn::Neg(difference.re)};  // by 1/i
  return plus(even, times(odd, turn_of(call, k, size)));
}

// From a spectrum `at(k)` of `size` real numbers those pairs' spectrum into x, unscaled: what `transform` turns back.
template <class At>
void pairs_of_spectrum(const Call& call, std::int64_t size, Numbers& x, const At& at) {
  const std::int64_t half = size / 2;
  for (std::int64_t k = 0; 2 * k <= half; ++k) {
    const Complex a = at(k), b = at(half - k);
    const auto pair = [&](Complex own, Complex mirrored, Complex turn) {
      const Complex even = plus(own, conjugate(mirrored)), odd = times(minus(own, conjugate(mirrored)), turn);
      return Complex{hn::Sub(even.re, odd.im), hn::Add(even.im, odd.re)};
    };
    const Complex turn = conjugate(turn_of(call, k, size));
    x.set(k, pair(a, b, turn));
    // exp(2 pi i (half - k) / size) = -conjugate(exp(2 pi i k / size))
    const Complex mirrored = {hn::Neg(turn.re), turn.im};
    if (k > 0) x.set(half - k, pair(b, a, mirrored));
  }
}

// The channels of a task.
struct Channels {
  std::int64_t first, count;

  template <class T>
  HWY_INLINE VF32 load(const T* row) const {
    const simd::F32 d;
    return count == lanes() ? simd::load(d, row + first) : simd::load_part(d, row + first, count);
  }
  template <class T>
  HWY_INLINE void store(VF32 value, T* row) const {
    const simd::F32 d;
    count == lanes() ? simd::store(d, value, row + first) : simd::store_part(d, value, row + first, count);
  }
};

// A task's channels of a call whose tokens are T.
template <class T>
struct Task {
  const Call& call;
  Channels channels;
  TypedRows<T> x;
  std::int64_t width;  // of filter and past
  Numbers spectrum{}, data{}, other{};
  std::int64_t transformed = 0;  // tokens of the filter whose spectrum is there, and its size
  std::int64_t size = 0;

  Task(const Call& the_call, const Channels& of)
      : call(the_call), channels(of), x(the_call.in->x), width(the_call.in->x.size(2)) {}

  // x of sequence n by index from its first token on, those in the past included.
  HWY_INLINE VF32 token(std::int64_t n, const Sequence& sequence, std::int64_t index) const {
    if (index >= sequence.past) return channels.load(x[sequence.begin + index - sequence.past]);
    const TensorView& past = call.in->past;
    const std::int64_t row = (n * past.size(1) + index) * width;
    return past.dtype == DType::f32 ? channels.load(past.as<float>() + row) : channels.load(past.as<BFloat16>() + row);
  }
  HWY_INLINE VF32 filter(std::int64_t j) const { return channels.load(call.filter + j * width); }

  // The transform of at(i) for i in [begin, end), zeros elsewhere, in `data`.
  template <class At>
  void transform_of(std::int64_t begin, std::int64_t end, const At& at) {
    data.clear(size / 2);
    for (std::int64_t i = begin; i < end; ++i) hn::StoreU(at(i), simd::F32(), data.real(i));
    transform<false>(call, size / 2, data, other);
  }
  void resize(std::int64_t wanted) {
    if (wanted == size) return;
    size = wanted;
    transformed = 0;
    for (Numbers* numbers : {&spectrum, &data, &other}) numbers->resize(size / 2 + 1);
  }
  // Of the filter's first `tokens` rows into `spectrum`.
  void transform_filter(std::int64_t tokens) {
    if (tokens == transformed) return;
    transform_of(0, tokens, [&](std::int64_t j) { return filter(j); });
    for (std::int64_t k = 0; k <= size / 2; ++k) spectrum.set(k, spectrum_at(call, data, size, k));
    transformed = tokens;
  }
};

template <class T>
struct Forward : Task<T> {
  TypedRows<T> y;
  using Base = Task<T>;

  Forward(const Call& call, const Channels& channels, const TensorView& to) : Base(call, channels), y(to) {}

  void direct(std::int64_t n, const Sequence& sequence) const {
    const VF32 skip = this->channels.load(this->call.skip);
    for (std::int64_t t = 0; t < sequence.length(); ++t) {
      const std::int64_t index = sequence.past + t;
      VF32 sum = hn::Mul(skip, this->token(n, sequence, index));
      for (std::int64_t j = 0; j <= index; ++j) {
        sum = hn::MulAdd(this->filter(j), this->token(n, sequence, index - j), sum);
      }
      this->channels.store(sum, y[sequence.begin + t]);
    }
  }
  void by_transform(std::int64_t n, const Sequence& sequence) {
    const simd::F32 d;
    const std::int64_t tokens = sequence.past + sequence.length(), size = this->size;
    this->transform_filter(tokens);
    this->transform_of(0, tokens, [&](std::int64_t i) { return this->token(n, sequence, i); });
    pairs_of_spectrum(this->call, size, this->other, [&](std::int64_t k) {
      return times(spectrum_at(this->call, this->data, size, k), this->spectrum.get(k));
    });
    this->data.swap(this->other);
    transform<true>(this->call, size / 2, this->data, this->other);
    const VF32 scale = hn::Set(d, 1.0f / static_cast<float>(size)), skip = this->channels.load(this->call.skip);
    for (std::int64_t t = 0; t < sequence.length(); ++t) {
      const std::int64_t index = sequence.past + t;
      const VF32 sum = hn::Mul(scale, hn::LoadU(d, this->data.real(index)));
      this->channels.store(hn::MulAdd(skip, this->token(n, sequence, index), sum), y[sequence.begin + t]);
    }
  }
};

template <class T>
struct Backward : Task<T> {
  TypedRows<T> dy, dx;
  float *dfilter, *dskip;
  Numbers gradient{}, sums{};  // spectra: of dy, and of what the filter's gradient is the sum of
  std::int64_t summed = 0;     // tokens of the longest sequence in `sums`
  double skip_sums[kMostLanes] = {};

  Backward(const Call& call, const Channels& channels, const TensorView& from, const InputGradients& to)
      : Task<T>(call, channels), dy(from), dx(to.dx), dfilter(to.dfilter.as<float>()), dskip(to.dskip.as<float>()) {}

  HWY_INLINE void add_to_filter(std::int64_t j, VF32 value) const {
    float* row = dfilter + j * this->width;
    this->channels.store(hn::Add(this->channels.load(row), value), row);
  }
  HWY_INLINE VF32 dy_at(const Sequence& sequence, std::int64_t t) const {
    return this->channels.load(dy[sequence.begin + t]);
  }

  void direct(std::int64_t n, const Sequence& sequence) const {
    const simd::F32 d;
    const VF32 skip = this->channels.load(this->call.skip);
    for (std::int64_t t = 0; t < sequence.length(); ++t) {
      VF32 sum = hn::Mul(skip, dy_at(sequence, t));
      for (std::int64_t j = t; j < sequence.length(); ++j) {
        sum = hn::MulAdd(this->filter(j - t), dy_at(sequence, j), sum);
      }
      this->channels.store(sum, dx[sequence.begin + t]);
    }
    for (std::int64_t j = 0; j < sequence.past + sequence.length(); ++j) {
      VF32 sum = hn::Zero(d);
      for (std::int64_t t = std::max<std::int64_t>(j - sequence.past, 0); t < sequence.length(); ++t) {
        sum = hn::MulAdd(dy_at(sequence, t), this->token(n, sequence, sequence.past + t - j), sum);
      }
      add_to_filter(j, sum);
    }
  }
  // The filter's gradient from `sums`.
  void flush() {
    if (summed == 0) return;
    const simd::F32 d;
    pairs_of_spectrum(this->call, this->size, this->data, [&](std::int64_t k) { return sums.get(k); });
    transform<true>(this->call, this->size / 2, this->data, this->other);
    const VF32 scale = hn::Set(d, 1.0f / static_cast<float>(this->size));
    for (std::int64_t j = 0; j < summed; ++j) {
      add_to_filter(j, hn::Mul(scale, hn::LoadU(d, this->data.real(j))));
    }
    summed = 0;
  }
  void by_transform(std::int64_t n, const Sequence& sequence) {
    const simd::F32 d;
    const std::int64_t tokens = sequence.past + sequence.length(), size = this->size;
    if (summed == 0) {
      gradient.resize(size / 2 + 1);
      sums.resize(size / 2 + 1);
      sums.clear(size / 2 + 1);
    }
    this->transform_filter(tokens);
    this->transform_of(sequence.past, tokens, [&](std::int64_t i) { return dy_at(sequence, i - sequence.past); });
    for (std::int64_t k = 0; k <= size / 2; ++k) gradient.set(k, spectrum_at(this->call, this->data, size, k));
    this->transform_of(0, tokens, [&](std::int64_t i) { return this->token(n, sequence, i); });
    for (std::int64_t k = 0; k <= size / 2; ++k) {
      const Complex own = conjugate(spectrum_at(this->call, this->data, size, k));
      sums.set(k, plus(sums.get(k), times(own, gradient.get(k))));
    }
    summed = std::max(summed, tokens);
    pairs_of_spectrum(this->call, size, this->data,
                      [&](std::int64_t k) { return times(conjugate(this->spectrum.get(k)), gradient.get(k)); });
    transform<true>(this->call, size / 2, this->data, this->other);
    const VF32 scale = hn::Set(d, 1.0f / static_cast<float>(size)), skip = this->channels.load(this->call.skip);
    for (std::int64_t t = 0; t < sequence.length(); ++t) {
      const VF32 sum = hn::Mul(scale, hn::LoadU(d, this->data.real(sequence.past + t)));
      this->channels.store(hn::MulAdd(skip, dy_at(sequence, t), sum), dx[sequence.begin + t]);
    }
  }
  // A sequence's share of the skip's gradient. Blocks of tokens are summed apart in f32, then in f64: products of all
  // sequences' tokens may cancel to little of what they add up to on the way.
  void skips(std::int64_t n, const Sequence& sequence) {
    constexpr std::int64_t kBlock = 16;
    const simd::F32 d;
    for (std::int64_t begin = 0; begin < sequence.length(); begin += kBlock) {
      VF32 sum = hn::Zero(d);
      for (std::int64_t t = begin; t < std::min(sequence.length(), begin + kBlock); ++t) {
        sum = hn::MulAdd(dy_at(sequence, t), this->token(n, sequence, sequence.past + t), sum);
      }
      float sums[kMostLanes];
      hn::StoreU(sum, d, sums);
      for (std::int64_t i = 0; i < lanes(); ++i) skip_sums[i] += static_cast<double>(sums[i]);
    }
  }
  void store_skips() const {
    float* to = dskip + this->channels.first;
    for (std::int64_t i = 0; i < this->channels.count; ++i) {
      to[i] = static_cast<float>(static_cast<double>(to[i]) + skip_sums[i]);
    }
  }
};

std::int64_t tasks_of(const Call& call) { return (call.in->x.size(2) + lanes() - 1) / lanes(); }
Channels channels_of(const Call& call, std::int64_t task) {
  const std::int64_t first = task * lanes();
  return {first, std::min(lanes(), call.in->x.size(2) - first)};
}

template <class T>
void forward_of(Context& context, const Call& call, const TensorView& y) {
  parallel_for(context, tasks_of(call), [&](std::int64_t item) {
    Forward<T> task(call, channels_of(call, item), y);
    for (std::int64_t n = 0; n < sequences_of(*call.in); ++n) {
      const Sequence sequence = sequence_at(*call.in, n);
      const std::int64_t size = transform_length(sequence);
      if (size == 0) {
        task.direct(n, sequence);
      } else {
        task.resize(size);
        task.by_transform(n, sequence);
      }
    }
  });
}

template <class T>
void backward_of(Context& context, const Call& call, const TensorView& dy, const InputGradients& to) {
  parallel_for(context, tasks_of(call), [&](std::int64_t item) {
    Backward<T> task(call, channels_of(call, item), dy, to);
    for (std::int64_t n = 0; n < sequences_of(*call.in); ++n) {
      const Sequence sequence = sequence_at(*call.in, n);
      const std::int64_t size = transform_length(sequence);
      task.skips(n, sequence);
      if (size == 0) {
        task.direct(n, sequence);
      } else {
        if (size != task.size) task.flush();
        task.resize(size);
        task.by_transform(n, sequence);
      }
    }
    task.flush();
    task.store_skips();
  });
}

void ForwardAll(Context& context, const Call& call, const TensorView& y) {
  (call.in->x.dtype == DType::f32 ? forward_of<float> : forward_of<BFloat16>)(context, call, y);
}
void BackwardAll(Context& context, const Call& call, const TensorView& dy, const InputGradients& to) {
  (call.in->x.dtype == DType::f32 ? backward_of<float> : backward_of<BFloat16>)(context, call, dy, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::long_convolution
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::long_convolution {

HWY_EXPORT(ForwardAll);
HWY_EXPORT(BackwardAll);

namespace {

void simd_forward(Context& context, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  const float* skip = weight_in_f32(context, in.skip, in.skip.size(0));
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(ForwardAll)(context, Call(in, skip), out.y);
}

void simd_backward(Context& context, const Inputs& in, const TensorView& /*kept*/, const TensorView& dy,
                   const InputGradients& to) {
  const ArenaScope scope(context.scratch());
  const float* skip = weight_in_f32(context, in.skip, in.skip.size(0));
  elementwise::zero(context, to.dfilter);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(BackwardAll)(context, Call(in, skip), dy, to);
}

}  // namespace

const Implementation kSimd{
    "simd",
    Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    keeps_nothing,
    simd_forward,
    simd_backward};

}  // namespace flashgla::ops::long_convolution
#endif

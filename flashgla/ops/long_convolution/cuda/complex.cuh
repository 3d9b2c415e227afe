// Complex numbers and transforms of a few of them in a thread. A number is a float2, of one channel, or a Pair, of two
// neighbouring channels in f16: as many instructions, registers and bytes as a float2. A Pair has a bf16 call's digits
// (of 16 stages some 2e-3 of the norm, 1.65e-3 is the output's own rounding), but f16's range: tokens and filters are
// scaled by powers of two, so that no sum can leave it (Scale).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "flashgla/base/cuda/ptx.cuh"

namespace flashgla::ops::long_convolution::cuda {

struct alignas(8) Pair {
  __half2 x, y;  // real and imaginary parts
};

// What a dtype's calls compute with: the numbers, and how many channels one has.
template <class P>
struct Numbers;
template <>
struct Numbers<float2> {
  static constexpr int kWide = 1;
  using Real = float;
  static __device__ __forceinline__ float2 of(float2 turn) { return turn; }
};
template <>
struct Numbers<Pair> {
  static constexpr int kWide = 2;
  using Real = __half2;
  static __device__ __forceinline__ Pair of(float2 turn) {
    return {__float2half2_rn(turn.x), __float2half2_rn(turn.y)};
  }
};

__device__ __forceinline__ float2 product(float2 a, float2 b) {
  return {fmaf(a.x, b.x, -(a.y * b.y)), fmaf(a.x, b.y, a.y * b.x)};
}
__device__ __forceinline__ float2 conjugate(float2 a) { return {a.x, -a.y}; }
__device__ __forceinline__ float2 sum(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ float2 difference(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
__device__ __forceinline__ float2 add_product(float2 to, float2 a, float2 b) {
  return {fmaf(-a.y, b.y, fmaf(a.x, b.x, to.x)), fmaf(a.y, b.x, fmaf(a.x, b.y, to.y))};
}
// a + i b, a - i b.
__device__ __forceinline__ float2 sum_turned(float2 a, float2 b) { return {a.x - b.y, a.y + b.x}; }
__device__ __forceinline__ float2 difference_turned(float2 a, float2 b) { return {a.x + b.y, a.y - b.x}; }
__device__ __forceinline__ float2 quarter(float2 a) { return {-a.y, a.x}; }  // i a
__device__ __forceinline__ float2 of_real(float a, float2 by) { return {a * by.x, a * by.y}; }
// The real part of a times the conjugate of `by`.
__device__ __forceinline__ float real_part(float2 a, float2 by) { return fmaf(a.x, by.x, a.y * by.y); }

__device__ __forceinline__ Pair product(Pair a, Pair b) {
  return {__hfma2(a.x, b.x, __hneg2(__hmul2(a.y, b.y))), __hfma2(a.x, b.y, __hmul2(a.y, b.x))};
}
__device__ __forceinline__ Pair conjugate(Pair a) { return {a.x, __hneg2(a.y)}; }
__device__ __forceinline__ Pair sum(Pair a, Pair b) { return {__hadd2(a.x, b.x), __hadd2(a.y, b.y)}; }
__device__ __forceinline__ Pair difference(Pair a, Pair b) { return {__hsub2(a.x, b.x), __hsub2(a.y, b.y)}; }
__device__ __forceinline__ Pair add_product(Pair to, Pair a, Pair b) {
  return {__hfma2(__hneg2(a.y), b.y, __hfma2(a.x, b.x, to.x)), __hfma2(a.y, b.x, __hfma2(a.x, b.y, to.y))};
}
__device__ __forceinline__ Pair sum_turned(Pair a, Pair b) { return {__hsub2(a.x, b.y), __hadd2(a.y, b.x)}; }
__device__ __forceinline__ Pair difference_turned(Pair a, Pair b) { return {__hadd2(a.x, b.y), __hsub2(a.y, b.x)}; }
__device__ __forceinline__ Pair quarter(Pair a) { return {__hneg2(a.y), a.x}; }
__device__ __forceinline__ Pair of_real(__half2 a, float2 by) {
  const Pair turn = Numbers<Pair>::of(by);
  return {__hmul2(a, turn.x), __hmul2(a, turn.y)};
}
__device__ __forceinline__ __half2 real_part(Pair a, float2 by) {
  const Pair turn = Numbers<Pair>::of(by);
  return __hfma2(a.x, turn.x, __hmul2(a.y, turn.y));
}

// e^(-i angle) forward, e^(i angle) back, as a factor of a.
template <bool kBack, class P>
__device__ __forceinline__ P turned(P a, P by) {
  return product(a, kBack ? conjugate(by) : by);
}

// Four points of a transform, in natural order.
template <bool kBack, class P>
__device__ __forceinline__ void four(P& a, P& b, P& c, P& d) {
  const P even = sum(a, c), odd = difference(a, c), other = sum(b, d), turn = difference(b, d);
  a = sum(even, other);
  b = kBack ? sum_turned(odd, turn) : difference_turned(odd, turn);
  c = difference(even, other);
  d = kBack ? difference_turned(odd, turn) : sum_turned(odd, turn);
}

// a e^(-2 pi i M / 16) forward, its inverse back.
template <bool kBack, int M, class P>
__device__ __forceinline__ P sixteenths(P a) {
  constexpr float kCos[] = {1.0f, 0.923879533f,  0.707106781f, 0.382683432f, 0.0f,
                            0.0f, -0.707106781f, 0.0f,         0.0f,         -0.923879533f};
  constexpr float kSin[] = {0.0f, 0.382683432f, 0.707106781f, 0.923879533f, 1.0f,
                            0.0f, 0.707106781f, 0.0f,         0.0f,         -0.382683432f};
  if constexpr (M == 4) return kBack ? quarter(a) : P{a.y, quarter(P{a.x, a.x}).x};
  return turned<kBack>(a, Numbers<P>::of({kCos[M], -kSin[M]}));
}

// Where value k of sixteen() and of eight() lies.
constexpr __host__ __device__ int of_sixteen(int k) { return 4 * (k & 3) + (k >> 2); }
constexpr __host__ __device__ int of_eight(int k) { return 2 * (k & 3) + (k >> 2); }

template <bool kBack, class P>
__device__ __forceinline__ void sixteen(P (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) four<kBack>(v[i], v[4 + i], v[8 + i], v[12 + i]);
  v[5] = sixteenths<kBack, 1>(v[5]);
  v[6] = sixteenths<kBack, 2>(v[6]);
  v[7] = sixteenths<kBack, 3>(v[7]);
  v[9] = sixteenths<kBack, 2>(v[9]);
  v[10] = sixteenths<kBack, 4>(v[10]);
  v[11] = sixteenths<kBack, 6>(v[11]);
  v[13] = sixteenths<kBack, 3>(v[13]);
  v[14] = sixteenths<kBack, 6>(v[14]);
  v[15] = sixteenths<kBack, 9>(v[15]);
#pragma unroll
  for (int i = 0; i < 4; ++i) four<kBack>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
}

template <bool kBack, class P>
__device__ __forceinline__ void eight(P (&v)[8]) {
  four<kBack>(v[0], v[2], v[4], v[6]);
  four<kBack>(v[1], v[3], v[5], v[7]);
  v[3] = sixteenths<kBack, 2>(v[3]);
  v[5] = sixteenths<kBack, 4>(v[5]);
  v[7] = sixteenths<kBack, 6>(v[7]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const P a = v[2 * i], b = v[2 * i + 1];
    v[2 * i] = sum(a, b);
    v[2 * i + 1] = difference(a, b);
  }
}

// e^(pi i j / 32): what the quarter of a frequency makes of a thread's token j.
__device__ __forceinline__ float2 shift(int j) {
  constexpr float kCos[] = {1.0f,         0.995184727f, 0.98078528f,  0.956940336f, 0.923879533f, 0.881921264f,
                            0.831469612f, 0.773010453f, 0.707106781f, 0.634393284f, 0.555570233f, 0.471396737f,
                            0.382683432f, 0.290284677f, 0.195090322f, 0.0980171403f};
  constexpr float kSin[] = {0.0f,         0.0980171403f, 0.195090322f, 0.290284677f, 0.382683432f, 0.471396737f,
                            0.555570233f, 0.634393284f,  0.707106781f, 0.773010453f, 0.831469612f, 0.881921264f,
                            0.923879533f, 0.956940336f,  0.98078528f,  0.995184727f};
  return {kCos[j], kSin[j]};
}

// Products of a frequency's spectra over spans or blocks, of which `count` are not zeros. The two functions below leave
// out the upper half where all of it is zeros; more branches would keep sums from running beside each other.

// Span m becomes the sum over a <= m of g[m - a] x[a].
template <int N, class P>
__device__ __forceinline__ void convolve(const P (&g)[N], P (&x)[N], int count) {
  const auto sums = [&](auto from) {
    constexpr int kFrom = decltype(from)::value;
#pragma unroll
    for (int m = kFrom + N / 2 - 1; m >= kFrom; --m) {
      P y = product(g[0], x[m]);
#pragma unroll
      for (int a = 0; a < m; ++a) y = add_product(y, g[m - a], x[a]);
      x[m] = y;
    }
  };
  if (count > N / 2) sums(std::integral_constant<int, N / 2>());
  sums(std::integral_constant<int, 0>());
}

// Span m becomes the sum over a >= m of the conjugate of g[a - m] times x[a].
template <int N, class P>
__device__ __forceinline__ void correlate(const P (&g)[N], P (&x)[N], int count) {
  const auto sums = [&](auto to) {
    constexpr int kTo = decltype(to)::value;
#pragma unroll
    for (int m = 0; m < kTo; ++m) {
      P y = product(conjugate(g[0]), x[m]);
#pragma unroll
      for (int a = m + 1; a < kTo; ++a) y = add_product(y, conjugate(g[a - m]), x[a]);
      x[m] = y;
    }
  };
  count > N / 2 ? sums(std::integral_constant<int, N>()) : sums(std::integral_constant<int, N / 2>());
}

// Powers of two that keep transforms in f16 within its range: tokens come below some power of two by their largest one,
// so that spectra of `points` tokens stay below `points` times that, and a filter's magnitudes add up to less than
// another (its spectra, of two spans or blocks each, to less than twice that).
struct Scale {
  float to, from;  // factors; each the other's inverse

  // For numbers of a binary exponent field that come below 2^top.
  static __device__ __forceinline__ Scale below(std::uint32_t field, int top) {
    const int of = min(max(static_cast<int>(field), 1 + top), min(252 + top, 254));
    return {__uint_as_float(static_cast<std::uint32_t>(253 + top - of) << 23),
            __uint_as_float(static_cast<std::uint32_t>(of + 1 - top) << 23)};
  }
  static __device__ __forceinline__ std::uint32_t field_of(float magnitude) {
    return __float_as_uint(magnitude) >> 23 & 0xff;
  }
};

}  // namespace flashgla::ops::long_convolution::cuda

// Random numbers: one counter-based generator for parameters, sampling, the order of data and tests. A draw is a
// function of (seed, use, stream, index) alone, whatever was drawn before, and has the same bits on the CPU and in CUDA
// kernels, normals too: their arithmetic is fixed here (exact integers, and sums, products, quotients, square roots and
// fma of IEEE doubles; no function of a mathematical library, and no product that a compiler could fuse into a sum).
//
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

// Nothing here uses its forms for SSE, whose headers take a third of a second to read.
#ifndef R123_USE_SSE
#define R123_USE_SSE 0
#endif
#include <Random123/philox.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FLASHGLA_HOST_DEVICE __host__ __device__
#else
#define FLASHGLA_HOST_DEVICE
#endif

namespace flashgla::random {

// Part of every file that goes on with draws begun elsewhere. Raised when any draw changes its bits.
constexpr int kVersion = 2;

// What draws are for: those of two uses are unrelated, though seed, stream and index are the same.
enum class Use : std::uint32_t {
  rounding,
  tests,
  parameters,
  sampling,
  data_order,
  data_offset,
  validation,
  stories,
  dropout
};

// Two unrelated draws of 64 bits.
struct Words {
  std::uint64_t first, second;

  // One of its four parts of 32 bits, the low half of `first` being part 0.
  FLASHGLA_HOST_DEVICE std::uint32_t part(int k) const {
    return static_cast<std::uint32_t>((k < 2 ? first : second) >> (k % 2 * 32));
  }
};

// Two unrelated standard normals.
struct Normals {
  double first, second;
};

// 52 bits as the middle of one of 2^52 intervals of (0, 1): never 0, never 1, exact.
FLASHGLA_HOST_DEVICE inline double to_uniform(std::uint64_t word) {
  return (static_cast<double>(word >> 12) + 0.5) * 0x1p-52;
}

// -2 ln(u) for a normal double u in (0, 1), with a relative error of a few units of the last place.
// u = 2^e m with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.1716.
FLASHGLA_HOST_DEVICE inline double minus_two_log(double u) {
  std::uint64_t bits;
  memcpy(&bits, &u, sizeof bits);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  std::uint64_t fraction = bits & 0xfffffffffffffull;
  if (fraction >= 0x6a09e667f3bcdull) ++exponent;  // sqrt(2) and above: halved
  fraction |= static_cast<std::uint64_t>(fraction >= 0x6a09e667f3bcdull ? 1022 : 1023) << 52;
  double m;
  memcpy(&m, &fraction, sizeof m);
  const double s = (m - 1.0) / (m + 1.0);
  const double square = s * s;
  double sum = 1.0 / 23.0;  // artanh(s) / s - 1 = s^2 / 3 + s^4 / 5 + ...
  for (int k = 21; k >= 3; k -= 2) sum = std::fma(sum, square, 1.0 / k);
  const double log_m = std::fma(2.0 * s * square, sum, 2.0 * s);
  constexpr double kLn2 = 0.69314718055994530942;
  return -2.0 * std::fma(static_cast<double>(exponent), kLn2, log_m);
}

// sin and cos of pi/2 f for f in (-1/2, 1/2): Taylor's series, whose next terms are below 2^-54.
FLASHGLA_HOST_DEVICE inline double sin_half_pi(double f) {
  const double x = 1.57079632679489661923 * f;
  const double square = x * x;
  double sum = -1.0 / 1307674368000.0;  // 1 / 15!
  sum = std::fma(sum, square, 1.0 / 6227020800.0);
  sum = std::fma(sum, square, -1.0 / 39916800.0);
  sum = std::fma(sum, square, 1.0 / 362880.0);
  sum = std::fma(sum, square, -1.0 / 5040.0);
  sum = std::fma(sum, square, 1.0 / 120.0);
  sum = std::fma(sum, square, -1.0 / 6.0);
  return std::fma(x * square, sum, x);
}

FLASHGLA_HOST_DEVICE inline double cos_half_pi(double f) {
  const double x = 1.57079632679489661923 * f;
  const double square = x * x;
  double sum = 1.0 / 20922789888000.0;  // 1 / 16!
  sum = std::fma(sum, square, -1.0 / 87178291200.0);
  sum = std::fma(sum, square, 1.0 / 479001600.0);
  sum = std::fma(sum, square, -1.0 / 3628800.0);
  sum = std::fma(sum, square, 1.0 / 40320.0);
  sum = std::fma(sum, square, -1.0 / 720.0);
  sum = std::fma(sum, square, 1.0 / 24.0);
  sum = std::fma(sum, square, -1.0 / 2.0);
  return std::fma(sum, square, 1.0);
}

// Box and Muller 1958: a radius of one word and an angle of the other. The angle is pi/2 (quadrant + f), quadrant its
// first two bits and f in (-1/2, 1/2), so that no reduction rounds.
FLASHGLA_HOST_DEVICE inline Normals to_normals(const Words& words) {
  const double radius = std::sqrt(minus_two_log(to_uniform(words.first)));
  const double f = to_uniform(words.second << 2) - 0.5;
  const double sine = sin_half_pi(f), cosine = cos_half_pi(f);
  switch (words.second >> 62) {
    case 0:
      return {radius * cosine, radius * sine};
    case 1:
      return {radius * -sine, radius * cosine};
    case 2:
      return {radius * -cosine, radius * -sine};
    default:
      return {radius * sine, radius * -cosine};
  }
}

// The draws of one (seed, use, stream), by index below 2^56.
class Stream {
 public:
  FLASHGLA_HOST_DEVICE Stream(std::uint64_t seed, Use use, std::uint64_t stream = 0)
      : seed_(seed), stream_(stream), use_(static_cast<std::uint32_t>(use) << 24) {}

  // What Philox4x32-10 is given for an index, for those that compute many at a time.
  struct Parts {
    std::uint32_t counter[4];
    std::uint32_t key[2];
  };
  FLASHGLA_HOST_DEVICE Parts parts(std::uint64_t index) const {
    return {{low(index), high(index) | use_, low(stream_), high(stream_)}, {low(seed_), high(seed_)}};
  }

  FLASHGLA_HOST_DEVICE Words words(std::uint64_t index) const {
    const Parts p = parts(index);
    const r123::Philox4x32::ctr_type counter = {{p.counter[0], p.counter[1], p.counter[2], p.counter[3]}};
    const r123::Philox4x32::key_type key = {{p.key[0], p.key[1]}};
    const r123::Philox4x32::ctr_type bits = philox4x32(counter, key);
    return {bits.v[0] | static_cast<std::uint64_t>(bits.v[1]) << 32, bits.v[2] | static_cast<std::uint64_t>(bits.v[3])
                                                                                     << 32};
  }

  FLASHGLA_HOST_DEVICE double uniform(std::uint64_t index) const { return to_uniform(words(index).first); }

  // In [0, count), count > 0; the bias is below count / 2^64.
  FLASHGLA_HOST_DEVICE std::uint64_t below(std::uint64_t index, std::uint64_t count) const {
    const std::uint64_t word = words(index).first;
#ifdef __CUDA_ARCH__
    return __umul64hi(word, count);
#else
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(word) * count) >> 64);
#endif
  }

  // Standard normals 2 pair and 2 pair + 1; drawn together they take half the time.
  FLASHGLA_HOST_DEVICE Normals normals(std::uint64_t pair) const { return to_normals(words(pair)); }
  FLASHGLA_HOST_DEVICE double normal(std::uint64_t index) const {
    const Normals both = normals(index / 2);
    return index % 2 == 0 ? both.first : both.second;
  }

 private:
  FLASHGLA_HOST_DEVICE static std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
  FLASHGLA_HOST_DEVICE static std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

  std::uint64_t seed_, stream_;
  std::uint32_t use_;
};

// Normals begin .. begin + count - 1 of a stream; begin is even. On the CPU, by one thread.
void fill_normals(const Stream& stream, std::uint64_t begin, std::int64_t count, double* out);

}  // namespace flashgla::random

// The exponential of the draw, by IEEE additions and multiplications alone, each rounded once: the same bits on the CPU
// and on a GPU, whatever their mathematical libraries do.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FLASHGLA_BOTH __host__ __device__ __forceinline__
#else
#define FLASHGLA_BOTH inline
#endif

namespace flashgla::ops::sampling {

constexpr int kWeightBits = 43;  // of the largest weight, so that 2^20 of them add up in 64 bits

// Products and sums that no compiler contracts to a fused one (the CPU's source, cpu/rows.cpp, is compiled with
// -ffp-contract=off).
FLASHGLA_BOTH double times(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
FLASHGLA_BOTH double plus(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

// floor(2^43 exp(x)) for x <= 0, to 1e-13 of its value; 0 below x = -30.5 or so.
FLASHGLA_BOTH std::uint64_t weight_of(double x) {
  if (!(x > -31.0)) return 0;
  // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts, the first short enough for n times it to be exact.
  const double n = rint(times(x, 1.4426950408889634));
  const double r = plus(plus(x, times(n, -0x1.62e42fefa0000p-1)), times(n, -0x1.cf79abc9e3b3ap-40));
  // Taylor's polynomial of degree 12: |r|^13 / 13! < 2e-16.
  double e = 1.0 / 479001600.0;
  e = plus(times(e, r), 1.0 / 39916800.0);
  e = plus(times(e, r), 1.0 / 3628800.0);
  e = plus(times(e, r), 1.0 / 362880.0);
  e = plus(times(e, r), 1.0 / 40320.0);
  e = plus(times(e, r), 1.0 / 5040.0);
  e = plus(times(e, r), 1.0 / 720.0);
  e = plus(times(e, r), 1.0 / 120.0);
  e = plus(times(e, r), 1.0 / 24.0);
  e = plus(times(e, r), 1.0 / 6.0);
  e = plus(times(e, r), 0.5);
  e = plus(times(e, r), 1.0);
  e = plus(times(e, r), 1.0);
  // times 2^(43 + n), 43 + n in [-2, 43].
  const std::uint64_t bits = static_cast<std::uint64_t>(1023 + kWeightBits + static_cast<int>(n)) << 52;
  double power;
  memcpy(&power, &bits, sizeof(power));
  return static_cast<std::uint64_t>(times(e, power));
}

// A logit after the repetition penalty, in f64.
FLASHGLA_BOTH double penalized(float logit, bool seen, double penalty) {
  const double l = static_cast<double>(logit);
  return !seen ? l : l > 0.0 ? l / penalty : times(l, penalty);
}

// Which weights are kept: those above `least`, and of those equal to it the first `equals` in the token's order.
struct Cut {
  std::uint64_t least = 0;
  std::uint64_t equals = 0;  // with least 0: none, since weights of 0 are never drawn
};

}  // namespace flashgla::ops::sampling

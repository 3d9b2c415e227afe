// AVX-512 with VNNI: bytes of the weight by the high and low bytes of x, four products and sums an instruction.
#include "flashgla/ops/quantised_linear/cpu/kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "hwy/base.h"

namespace flashgla::ops::quantised_linear {

bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

HWY_PUSH_ATTRIBUTES("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
namespace {

#include "flashgla/ops/quantised_linear/cpu/avx512_inl.h"

struct Isa : Avx512 {
  struct Sum {
    __m512i high, low;
  };

  static void place(const std::int32_t* values, std::uint8_t* to) {
    for (int j = 0; j < 4; ++j) {
      const auto low = static_cast<std::int8_t>(values[j]);
      to[j] = static_cast<std::uint8_t>((values[j] - low) >> 8);
      to[4 + j] = static_cast<std::uint8_t>(low);
    }
  }
  static Sum begin(std::int32_t offset) { return {_mm512_setzero_si512(), _mm512_set1_epi32(offset)}; }
  static void add_products(Sum& sum, Bytes w, const std::uint8_t* x) {
    sum.high = _mm512_dpbusd_epi32(sum.high, w, four_of(x));
    sum.low = _mm512_dpbusd_epi32(sum.low, w, four_of(x + 4));
  }
  static Floats total(const Sum& sum) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sum.high, 8), sum.low));
  }
};

#include "flashgla/ops/quantised_linear/cpu/kernel_inl.h"

}  // namespace
HWY_POP_ATTRIBUTES

const Kernel kVnniKernel = kKernel;

}  // namespace flashgla::ops::quantised_linear
#endif

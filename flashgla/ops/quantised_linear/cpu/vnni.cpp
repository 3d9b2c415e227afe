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

  // Of each four columns the high bytes, rounded for what the signed low bytes are, and then these.
  static void place(const std::int32_t* values, std::uint8_t* to) {
    for (int i = 0; i < kGroup; i += kLanes) {
      const __m512i four = _mm512_loadu_si512(values + i);
      const __m512i rounded = _mm512_add_epi32(four, _mm512_set1_epi32(128));
      const __m128i low = _mm512_cvtepi32_epi8(four), high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(rounded, 8));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), _mm_unpacklo_epi32(high, low));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i + kLanes), _mm_unpackhi_epi32(high, low));
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

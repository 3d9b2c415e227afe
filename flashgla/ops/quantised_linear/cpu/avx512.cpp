// AVX-512 without VNNI: pairs of 16-bit products, weights' bytes widened by a mask and a shift.
#include "flashgla/ops/quantised_linear/cpu/kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "flashgla/ops/quantised_linear/cpu/pairs.h"
#include "hwy/base.h"

namespace flashgla::ops::quantised_linear {

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

HWY_PUSH_ATTRIBUTES("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace {

#include "flashgla/ops/quantised_linear/cpu/avx512_inl.h"

struct Isa : Avx512 {
  using Sum = __m512i;

  static void place(const std::int32_t* values, std::uint8_t* to) { place_pairs(values, to); }
  static Sum begin(std::int32_t offset) { return _mm512_set1_epi32(offset); }
  static void add_products(Sum& sum, Bytes w, const std::uint8_t* x) {
    const __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w, 8);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, four_of(x)));
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(odd, four_of(x + 4)));
  }
  static Floats total(Sum sum) { return _mm512_cvtepi32_ps(sum); }
};

#include "flashgla/ops/quantised_linear/cpu/kernel_inl.h"

}  // namespace
HWY_POP_ATTRIBUTES

const Kernel kAvx512Kernel = kKernel;

}  // namespace flashgla::ops::quantised_linear
#endif

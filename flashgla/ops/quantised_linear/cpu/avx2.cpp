// AVX2: as AVX-512 without VNNI, half a panel at a time.
#include "flashgla/ops/quantised_linear/cpu/kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "flashgla/ops/quantised_linear/cpu/pairs.h"
#include "hwy/base.h"

namespace flashgla::ops::quantised_linear {

// Every processor with AVX2 has F16C.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

HWY_PUSH_ATTRIBUTES("avx2,fma,f16c")
namespace {

struct Isa {
  static constexpr int kLanes = 8;
  using Bytes = __m256i;
  using Floats = __m256;
  using Sum = __m256i;

  static Bytes load(const std::uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static Floats load_f16(const std::uint8_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Bytes table() {
    alignas(16) static constexpr std::uint8_t kTable[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                            129, 141, 153, 166, 181, 197, 217, 241};
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kTable)));
  }
  static Bytes halves() { return _mm256_set1_epi8(15); }
  static Bytes values_of_low(Bytes both) { return _mm256_shuffle_epi8(table(), _mm256_and_si256(both, halves())); }
  static Bytes values_of_high(Bytes both) {
    return _mm256_shuffle_epi8(table(), _mm256_and_si256(_mm256_srli_epi16(both, 4), halves()));
  }
  static Floats value(Bytes w, int j) {
    const __m256i byte = _mm256_and_si256(_mm256_srli_epi32(w, 8 * j), _mm256_set1_epi32(255));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(byte, _mm256_set1_epi32(128)));
  }
  static Bytes four_of(const std::uint8_t* from) {
    std::int32_t four;
    std::memcpy(&four, from, sizeof(four));
    return _mm256_set1_epi32(four);
  }
  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats all(float value) { return _mm256_set1_ps(value); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static void store(Floats value, float* to) { _mm256_storeu_ps(to, value); }

  static void place(const std::int32_t* values, std::uint8_t* to) { place_pairs(values, to); }
  static Sum begin(std::int32_t offset) { return _mm256_set1_epi32(offset); }
  static void add_products(Sum& sum, Bytes w, const std::uint8_t* x) {
    const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, four_of(x)));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(odd, four_of(x + 4)));
  }
  static Floats total(Sum sum) { return _mm256_cvtepi32_ps(sum); }
};

#include "flashgla/ops/quantised_linear/cpu/kernel_inl.h"

}  // namespace
HWY_POP_ATTRIBUTES

const Kernel kAvx2Kernel = kKernel;

}  // namespace flashgla::ops::quantised_linear
#endif

// What the two AVX-512 kernels have in common; included where AVX-512 may be used.

struct Avx512 {
  static constexpr int kLanes = 16;
  using Bytes = __m512i;
  using Floats = __m512;

  static Bytes load(const std::uint8_t* from) { return _mm512_loadu_si512(from); }
  static Floats load_f16(const std::uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Bytes table() {
    alignas(16) static constexpr std::uint8_t kTable[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                            129, 141, 153, 166, 181, 197, 217, 241};
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kTable)));
  }
  static Bytes halves() { return _mm512_set1_epi8(15); }
  static Bytes values_of_low(Bytes both) { return _mm512_shuffle_epi8(table(), _mm512_and_si512(both, halves())); }
  static Bytes values_of_high(Bytes both) {
    return _mm512_shuffle_epi8(table(), _mm512_and_si512(_mm512_srli_epi16(both, 4), halves()));
  }
  // Byte j of each lane, less 128.
  static Floats value(Bytes w, int j) {
    const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(w, static_cast<unsigned>(8 * j)), _mm512_set1_epi32(255));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(byte, _mm512_set1_epi32(128)));
  }
  static Bytes four_of(const std::uint8_t* from) {
    std::int32_t four;
    std::memcpy(&four, from, sizeof(four));
    return _mm512_set1_epi32(four);
  }
  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats all(float value) { return _mm512_set1_ps(value); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static void store(Floats value, float* to) { _mm512_storeu_ps(to, value); }
};

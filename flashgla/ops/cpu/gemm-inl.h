// Small matrix products: C[m][n] = start + A[m][p] B[p][n]. A is read element by element (any strides), B and C in
// vectors, n padded to whole vectors. Per element the sum over p runs in order, whatever the tile: how rows are shared
// between threads changes no bit. Included once per SIMD target.
#if defined(FLASHGLA_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHGLA_GEMM_INL_H_
#undef FLASHGLA_GEMM_INL_H_
#else
#define FLASHGLA_GEMM_INL_H_
#endif

#include <cstdint>

#include "flashgla/base/cpu/simd_math.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::gemm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace simd = flashgla::simd::HWY_NAMESPACE;

using D = simd::F32;
using Vec = simd::VF32;
HWY_INLINE std::int64_t Lanes() { return static_cast<std::int64_t>(hn::Lanes(D())); }

// What the sum starts from; C may be `from` itself.
enum class Start {
  zero,
  add,    // from [m][n]
  scale,  // from [m][n] times scale [n]
};

// Element (i, j) at data[i * row + j * column].
struct Strided {
  const float* data;
  std::int64_t row;
  std::int64_t column;
};

template <int kRows, int kVectors, Start kStart>
HWY_INLINE void Tile(std::int64_t p, Strided a, const float* HWY_RESTRICT b, std::int64_t ldb, float* c,
                     std::int64_t ldc, const float* from, const float* scale) {
  const D d;
  const std::int64_t lanes = Lanes();
  Vec sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kStart == Start::zero) sum[i][j] = hn::Zero(d);
      if constexpr (kStart == Start::add) sum[i][j] = hn::LoadU(d, from + i * ldc + j * lanes);
      if constexpr (kStart == Start::scale) {
        sum[i][j] = hn::Mul(hn::LoadU(d, from + i * ldc + j * lanes), hn::LoadU(d, scale + j * lanes));
      }
    }
  }
  const float* HWY_RESTRICT pa = a.data;
  const std::int64_t row = a.row;
  for (std::int64_t l = 0; l < p; ++l) {
    Vec y[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) y[j] = hn::LoadU(d, b + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec x = hn::Set(d, pa[i * row]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(x, y[j], sum[i][j]);
    }
    pa += a.column;
    b += ldb;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[i][j], d, c + i * ldc + j * lanes);
  }
}

// Memory that the next chunk reads, or this one writes, brought near while products are computed: the rows of a head
// lie a token apart, which the hardware does not foresee. A few lines at a time, so that no product waits.
class Ahead {
 public:
  // `work` in multiply-adds that will be reported before the memory is wanted.
  void Restart(std::int64_t work) {
    count_ = current_ = 0;
    offset_ = lines_ = credit_ = 0;
    work_ = work;
  }
  // `rows` stretches of `bytes`, `stride` bytes apart.
  void Add(const void* data, std::int64_t rows, std::int64_t stride, std::int64_t bytes) {
    if (data == nullptr || rows <= 0 || bytes <= 0 || count_ == kMost) return;
    stretches_[count_++] = {static_cast<const char*>(data), rows, stride, bytes};
    lines_ += rows * ((bytes + 63) / 64);
  }
  void Work(std::int64_t work) {
    if (current_ == count_) return;
    credit_ += work * lines_;
    while (credit_ > 0 && current_ < count_) {
      credit_ -= work_;
      Stretch& s = stretches_[current_];
      hwy::Prefetch(s.data + offset_);
      offset_ += 64;
      if (offset_ < s.bytes) continue;
      offset_ = 0;
      s.data += s.stride;
      if (--s.rows == 0) ++current_;
    }
  }

 private:
  struct Stretch {
    const char* data;
    std::int64_t rows, stride, bytes;
  };
  static constexpr int kMost = 24;
  Stretch stretches_[kMost];
  int count_ = 0;
  int current_ = 0;
  std::int64_t offset_ = 0;
  std::int64_t lines_ = 0;
  std::int64_t credit_ = 0;
  std::int64_t work_ = 1;
};

// Columns [begin, end) of kRows rows.
template <int kRows, Start kStart>
HWY_INLINE void Columns(std::int64_t begin, std::int64_t end, std::int64_t p, Strided a, const float* b,
                        std::int64_t ldb, float* c, std::int64_t ldc, const float* from, const float* scale) {
  const std::int64_t lanes = Lanes();
  std::int64_t j = begin;
  for (; j + 2 * lanes <= end; j += 2 * lanes) {
    Tile<kRows, 2, kStart>(p, a, b + j, ldb, c + j, ldc, from + j, scale + j);
  }
  for (; j < end; j += lanes) Tile<kRows, 1, kStart>(p, a, b + j, ldb, c + j, ldc, from + j, scale + j);
}

// from: as C laid out; absent: C itself.
template <Start kStart>
inline HWY_NOINLINE void Gemm(std::int64_t m, std::int64_t n, std::int64_t p, Strided a, const float* b,
                              std::int64_t ldb, float* c, std::int64_t ldc, const float* from = nullptr,
                              const float* scale = nullptr, Ahead* ahead = nullptr) {
  if (from == nullptr) from = c;
  if constexpr (kStart != Start::scale) scale = c;  // never read
  const std::int64_t lanes = Lanes();
  constexpr int kRows = HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON ? 8 : 4;  // 32 or 16 vector registers
  // B within the first-level cache: keep it there and pass over it for each stripe of rows. Else go over all rows for
  // each stripe of B.
  const std::int64_t stripe = p * n <= 4096 ? n : 2 * lanes;
  for (std::int64_t j = 0; j < n; j += stripe) {
    const std::int64_t end = HWY_MIN(n, j + stripe);
    std::int64_t i = 0;
    const auto rows = [&](std::int64_t first) { return Strided{a.data + first * a.row, a.row, a.column}; };
    for (; i + kRows <= m; i += kRows) {
      Columns<kRows, kStart>(j, end, p, rows(i), b, ldb, c + i * ldc, ldc, from + i * ldc, scale);
      if (ahead != nullptr) ahead->Work(kRows * (end - j) * p);
    }
    for (; i + 2 <= m; i += 2) {
      Columns<2, kStart>(j, end, p, rows(i), b, ldb, c + i * ldc, ldc, from + i * ldc, scale);
    }
    if (i < m) Columns<1, kStart>(j, end, p, rows(i), b, ldb, c + i * ldc, ldc, from + i * ldc, scale);
  }
}

// target[j][i] = source[i][j]; rows and columns in whole blocks of four.
inline HWY_NOINLINE void Transpose(std::int64_t rows, std::int64_t columns, const float* HWY_RESTRICT source,
                                   std::int64_t lds, float* HWY_RESTRICT target, std::int64_t ldt) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) target[j * ldt + i] = source[i * lds + j];
  }
#else
  const hn::FixedTag<float, 4> d4;
  const hn::Repartition<double, decltype(d4)> d2;
  for (std::int64_t i = 0; i < rows; i += 4) {
    for (std::int64_t j = 0; j < columns; j += 4) {
      const float* HWY_RESTRICT s = source + i * lds + j;
      float* HWY_RESTRICT t = target + j * ldt + i;
      const auto a = hn::LoadU(d4, s);
      const auto b = hn::LoadU(d4, s + lds);
      const auto c = hn::LoadU(d4, s + 2 * lds);
      const auto e = hn::LoadU(d4, s + 3 * lds);
      const auto ab_low = hn::BitCast(d2, hn::InterleaveLower(d4, a, b));
      const auto ab_high = hn::BitCast(d2, hn::InterleaveUpper(d4, a, b));
      const auto ce_low = hn::BitCast(d2, hn::InterleaveLower(d4, c, e));
      const auto ce_high = hn::BitCast(d2, hn::InterleaveUpper(d4, c, e));
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, ab_low, ce_low)), d4, t);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, ab_low, ce_low)), d4, t + ldt);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, ab_high, ce_high)), d4, t + 2 * ldt);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, ab_high, ce_high)), d4, t + 3 * ldt);
    }
  }
#endif
}

}  // namespace flashgla::ops::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// Transforms of 256 points as in transform.cuh, of eight spans of eight channels' tokens, by tensor cores: two products
// of f16 with constant matrices, of token and frequency
//
//     t = 16 t1 + t2,    k = k1 + 16 k2
//
// first over t1, of real numbers and with the turns by t2 in it, so that its matrix differs by t2: a warp has one t2 of
// all spans and of the block's eight channels. Behind one exchange through shared memory a warp has one k1, and the
// second product, over t2, leaves each thread one channel's frequencies, two side by side in a word, of all spans: so
// sums of products over spans (complex.cuh) stay in registers, and their results lie there as the left side of the
// product back does.
#pragma once

#include "flashgla/ops/long_convolution/cuda/matrices.cuh"
#include "flashgla/ops/long_convolution/cuda/staged.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kNarrowChannels = 8, kNarrowWarps = 16, kNarrowThreads = 32 * kNarrowWarps;
constexpr int kNarrowFold = 16;                              // tokens that far apart are neighbours in shared memory
constexpr int kNarrowFilterWords = kNarrowThreads * kSpans;  // of a block's filters' spectra, uint4
static_assert(kNarrowThreads == kFusedThreads && kSpan == 16 * kNarrowWarps);
constexpr int kNarrowTokenBytes = 2 * kPoints * kNarrowChannels, kNarrowPointBytes = 2 * kNarrowTokenBytes;
// Shared memory: tokens of two tensors, points of two, outputs.
constexpr int kNarrowPointsAt = 2 * kNarrowTokenBytes, kNarrowOutAt = kNarrowPointsAt + 2 * kNarrowPointBytes;
constexpr int kNarrowStepsAt = kNarrowOutAt + kNarrowTokenBytes;  // [3][lane] uint4
constexpr int kNarrowRoomAt = kNarrowStepsAt + 3 * 512;           // [channel][warp] words
constexpr int kNarrowBarrierAt = kNarrowRoomAt + 4 * kNarrowChannels * kNarrowWarps;
constexpr int kNarrowBytes = kNarrowBarrierAt + 32;
static_assert(kNarrowBytes <= 227 << 10);

// Four matrices of 8 x 8 in f16 to shared memory: lane 8 i + j has the address of row j, or column, of number i.
__device__ __forceinline__ void store_matrices(std::uint32_t shared, std::uint32_t r0, std::uint32_t r1,
                                               std::uint32_t r2, std::uint32_t r3) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::store_matrix_4(shared, r0, r1, r2, r3);
#else
  const std::uint32_t words[4] = {r0, r1, r2, r3};
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t at = __shfl_sync(0xffffffffu, shared, 8 * i + lane / 4) + lane % 4 * 4;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(words[i]) : "memory");
  }
#endif
}
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t shared, std::uint32_t r0, std::uint32_t r1,
                                                          std::uint32_t r2, std::uint32_t r3) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::store_matrix_4_transposed(shared, r0, r1, r2, r3);
#else
  const std::uint32_t words[4] = {r0, r1, r2, r3};
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const std::uint32_t at = __shfl_sync(0xffffffffu, shared, 8 * i + lane % 4 * 2 + j) + lane / 4 * 2;
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(static_cast<std::uint16_t>(words[i] >> 16 * j)) : "memory");
    }
  }
#endif
}

// A thread's part in its warp's transforms.
class NarrowTransform {
 public:
  // All threads of the block must come here, and meet before they use it.
  __device__ __forceinline__ explicit NarrowTransform(unsigned char* memory)
      : lane_(static_cast<int>(threadIdx.x) % 32), warp_(static_cast<int>(threadIdx.x) / 32) {
    const int low = lane_ % 8, matrix = lane_ / 8;
    const std::uint32_t at = ptx::shared_address(memory);
    tokens_ = at + (warp_ * (kPoints / 16) + lane_) * 16;
    // [k1][part][span][t2 with its low bits changed over]
    columns_ = at + kNarrowPointsAt + ((matrix % 2 * 8 + low) * 256 + matrix / 2 * 128 + (warp_ ^ low)) * 16;
    rows_ = at + kNarrowPointsAt + (warp_ * 256 + matrix % 2 * 16 + matrix / 2 * 8 + (low ^ (warp_ & 7))) * 16;
    steps_ = at + kNarrowStepsAt + 16 * lane_;
    const int row = lane_ / 4, pair = lane_ % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k1 = row + 8 * (i % 2), t1 = 2 * pair + 8 * (i / 2);
      const Words turn = words_of(1.0f, [&](int j) {
        return (static_cast<float>(k1) - 0.25f) * static_cast<float>(16 * (t1 + j) + warp_) * (1.0f / kSpan);
      });
      column_[0][i] = turn.x;
      column_[1][i] = turn.y;
    }
    if (warp_ == 0) {
      std::uint32_t words[3][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // [k2 half][t2 half]
        const int k2 = row + i / 2 * 8, t2 = 2 * pair + i % 2 * 8;
        const Words turn = words_of(0.25f, [&](int j) { return static_cast<float>(k2 * (t2 + j)) * (1.0f / 16); });
        words[0][i] = turn.x;
        words[2][i] = turn.y;
        words[1][i] = negative(turn.y);
      }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        reinterpret_cast<uint4*>(memory + kNarrowStepsAt)[32 * i + lane_] =
            make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
      }
    }
  }

  __device__ __forceinline__ int lane() const { return lane_; }
  __device__ __forceinline__ int warp() const { return warp_; }
  __device__ __forceinline__ int row() const { return lane_ / 4; }
  __device__ __forceinline__ int pair() const { return lane_ % 4; }

  // The functions below are of the first kAll spans: branches would keep products from running beside each other.

  // A warp's tokens of a tensor, [span][t1 half]: of channel row(), t1 2 pair() and the next.
  template <int kAll>
  __device__ __forceinline__ void load_tokens(int tensor, std::uint32_t (&to)[kAll][2]) const {
    load_tokens<512>(tokens_ + tensor * kNarrowTokenBytes, to);
  }
  // The same of rows of which the lane has one of the first two spans' at `at`, the others kStep bytes on.
  template <int kStep, int kAll>
  static __device__ __forceinline__ void load_tokens(std::uint32_t at, std::uint32_t (&to)[kAll][2]) {
#pragma unroll
    for (int i = 0; i < kAll / 2; ++i) {
      std::uint32_t words[4];
      ptx::load_matrix_4_transposed(words, at + i * kStep);
      to[2 * i][0] = words[0];
      to[2 * i][1] = words[1];
      to[2 * i + 1][0] = words[2];
      to[2 * i + 1][1] = words[3];
    }
  }

  // Tokens in f16 to points of one k1.
  template <int kAll>
  __device__ __forceinline__ void columns(int tensor, const std::uint32_t (&from)[kAll][2]) const {
#pragma unroll
    for (int s = 0; s < kAll; ++s) {
      std::uint32_t real[2], imaginary[2];
      set_matrix(real[0], real[1], column_[0], from[s][0], from[s][1]);
      set_matrix(imaginary[0], imaginary[1], column_[1], from[s][0], from[s][1]);
      store_matrices(columns_ + tensor * kNarrowPointBytes + s * 256, real[0], real[1], imaginary[0], imaginary[1]);
    }
  }

  // Points of the warp's k1 to its frequencies.
  template <int kAll>
  __device__ __forceinline__ void rows(int tensor, Pair (&to)[2][kAll]) const {
    std::uint32_t steps[3][4];
    load_steps(steps);
#pragma unroll
    for (int i = 0; i < kAll / 2; ++i) {
      std::uint32_t a[2][4], d[2][2][2];
      ptx::load_matrix_4_transposed(a[0], rows_ + tensor * kNarrowPointBytes + i * 512);
      ptx::load_matrix_4_transposed(a[1], rows_ + tensor * kNarrowPointBytes + 128 * 16 + i * 512);
      multiply<false>(a, steps, d);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < 2; ++r) to[h][2 * i + r] = {as_pair(d[0][h][r]), as_pair(d[1][h][r])};
      }
    }
  }

  // The way back, into the same points.
  template <int kAll>
  __device__ __forceinline__ void rows_back(int tensor, const Pair (&from)[2][kAll]) const {
    std::uint32_t steps[3][4];
    load_steps(steps);
#pragma unroll
    for (int i = 0; i < kAll / 2; ++i) {
      std::uint32_t a[2][4], d[2][2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          a[0][2 * h + r] = as_word(from[h][2 * i + r].x);
          a[1][2 * h + r] = as_word(from[h][2 * i + r].y);
        }
      }
      multiply<true>(a, steps, d);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        store_matrices_transposed(rows_ + tensor * kNarrowPointBytes + c * 128 * 16 + i * 512, d[c][0][0], d[c][0][1],
                                  d[c][1][0], d[c][1][1]);
      }
    }
  }

  // The matrix of the way back to tokens.
  __device__ __forceinline__ void transpose_columns(std::uint32_t (&to)[2][4]) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[c][i] = ptx::transpose_matrix(column_[c][i % 2 * 2 + i / 2]);
    }
  }
  // Where the lane reads a tensor's points in columns_back.
  __device__ __forceinline__ std::uint32_t points(int tensor) const { return columns_ + tensor * kNarrowPointBytes; }

  // Calls use(span, values) of four spans at a time: of t1 row() and eight on, of channels 2 pair() and the next.
  template <int kAll, class Use>
  __device__ __forceinline__ void columns_back(int tensor, const Use& use) const {
    std::uint32_t column[2][4];
    transpose_columns(column);
    columns_back<kAll>(column, points(tensor), use);
  }
  template <int kAll, class Use>
  static __device__ __forceinline__ void columns_back(const std::uint32_t (&column)[2][4], std::uint32_t from,
                                                      const Use& use) {
#pragma unroll
    for (int first = 0; first < kAll; first += 4) {
      std::uint32_t points[4][4];
      float values[4][4];
#pragma unroll
      for (int s = 0; s < 4; ++s) ptx::load_matrix_4_transposed(points[s], from + (first + s) * 256);
#pragma unroll
      for (int s = 0; s < 4; ++s) set_matrix(values[s], column[0], points[s][0], points[s][1]);
#pragma unroll
      for (int s = 0; s < 4; ++s) add_matrix(values[s], column[1], points[s][2], points[s][3]);
      use(first, values);
    }
  }

 private:
  __device__ __forceinline__ void load_steps(std::uint32_t (&to)[3][4]) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(to[i][0]), "=r"(to[i][1]), "=r"(to[i][2]), "=r"(to[i][3])
                   : "r"(steps_ + 512 * i));
    }
  }
  // d [part][half of what comes][rows]; a [part].
  template <bool kBack>
  static __device__ __forceinline__ void multiply(const std::uint32_t (&a)[2][4], const std::uint32_t (&steps)[3][4],
                                                  std::uint32_t (&d)[2][2][2]) {
    constexpr int kOfImaginary = kBack ? 2 : 1, kOfReal = kBack ? 1 : 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      set_matrix(d[0][h][0], d[0][h][1], a[0], steps[0][2 * h], steps[0][2 * h + 1]);
      set_matrix(d[1][h][0], d[1][h][1], a[1], steps[0][2 * h], steps[0][2 * h + 1]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      add_matrix(d[0][h], a[1], steps[kOfImaginary][2 * h], steps[kOfImaginary][2 * h + 1]);
      add_matrix(d[1][h], a[0], steps[kOfReal][2 * h], steps[kOfReal][2 * h + 1]);
    }
  }

  int lane_, warp_;
  std::uint32_t tokens_, columns_, rows_, steps_;
  std::uint32_t column_[2][4];  // e^(-2 pi i (16 t1 + t2) (k1 - 1/4) / 256)
};

// What the eight columns of a block's first product are: a channel each, of kPoints tokens.
struct NarrowColumns {
  static constexpr int kTokens = kPoints;

  static __device__ __forceinline__ int channel(int column) { return column; }
  static __device__ __forceinline__ bool is_first(int) { return true; }  // of its channel
  static __device__ __forceinline__ int token(int span, int t1, int t2) { return span * kSpan + t1 * 16 + t2; }
  // By `both` over the threads whose row() has the same channel. All of the warp must come here.
  template <class Value, class Both>
  static __device__ __forceinline__ Value over_pairs(Value value, const Both& both) {
    value = both(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return both(value, __shfl_xor_sync(0xffffffffu, value, 2));
  }
  static __device__ __forceinline__ float with_sign(float value, int, int) { return value; }
  static __device__ __forceinline__ void rows(const NarrowTransform& transform, int tensor, Pair (&to)[2][kSpans]) {
    transform.rows(tensor, to);
  }
  // A number of memory, or 0.
  static __device__ __forceinline__ float load_if(bool there, const float* at) { return there ? *at : 0.0f; }
  // From threads that have eight channels' numbers to those of columns.
  static __device__ __forceinline__ void exchange_filters(float (&)[kSpans][4]) {}
};

// x becomes the correlation with w: of span l E_l + i E_(l+1), E_l the sum over a of the conjugate of x[a] times
// w[a + l].
template <int kAll>
__device__ __forceinline__ void correlate_spans(Pair (&x)[kAll], const Pair (&w)[kAll]) {
#pragma unroll
  for (int l = 0; l < kAll; ++l) {  // of which x[kAll - 1 - l] is the last use
    Pair one = product(conjugate(x[0]), w[l]);
#pragma unroll
    for (int a = 1; a < kAll - l; ++a) one = add_product(one, conjugate(x[a]), w[a + l]);
    x[kAll - 1 - l] = one;
  }
#pragma unroll
  for (int l = 0; l < kAll / 2; ++l) {
    const Pair other = x[l];
    x[l] = x[kAll - 1 - l];
    x[kAll - 1 - l] = other;
  }
#pragma unroll
  for (int l = 0; l + 1 < kAll; ++l) x[l] = sum_turned(x[l], x[l + 1]);
}

}  // namespace flashgla::ops::long_convolution::cuda

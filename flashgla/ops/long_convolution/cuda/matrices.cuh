// Transforms as in transform.cuh of a whole sequence at once, as products of f16 with constant matrices on tensor
// cores. Of kPoints = 4,096 R points, token and frequency are
//
//     t = 256 R t1 + 256 t2 + 16 s1 + s2,    k = k1 + 16 k2 + 16 R k3 + 256 R k4    (t2, k2 < R, the others < 16)
//
// and four products, over t1, t2, s1 and s2 in turn, give k1 to k4, with turns between them. A warp makes two of them
// without leaving its registers: a product's left side is the constant first, which takes the data's columns, then the
// data, whose sums lie as a left side does, which takes its rows. So columns (t1, t2) -> (k1, k2) and, behind one
// exchange through shared memory, tiles (s1, s2) -> (k3, k4), of which each has 256 points. Back, a tile begins with
// k4, its last, whose sums lie as a right side transposed.
//
// The eight columns of a product are R values of t2 and 8 / R of s2. The R x R matrices over t2 stand along the
// diagonal then.
//
// Points in shared memory: [channel][k1 + 16 k2] tiles of 64 chunks of 16 bytes, [s2][p], in which s1 is 2 p, 2 p + 1,
// 2 p + 8 and 2 p + 9: pairs of them, real parts first. These are a lane's parts of a product's right side.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "flashgla/base/cuda/ptx.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kWholePoints = 32768;  // of the longest sequence
constexpr int kWholeTiles = kWholePoints / 256, kWholeQuads = kWholePoints / 512;

template <int R>
struct WholeShape {
  static_assert(R == 1 || R == 2 || R == 4 || R == 8);
  static constexpr int kPoints = 4096 * R, kTogether = 8 / R;  // the latter of s2 in a product
  static constexpr int kTiles = kWholeTiles / kTogether, kQuads = kWholeQuads / kTogether;  // of a channel

  // A chunk's place in its tile, such that neither lanes that have one chunk of many tiles nor those that have one
  // tile's meet in a bank.
  static constexpr __host__ __device__ int placed(int chunk, int tile) {
    constexpr int kOdd = R == 8 ? 2 : R == 4 ? 1 : R == 2 ? 1 : 2;
    return chunk ^ (chunk >> 3 & 3) ^ (tile >> 5 & (R == 8 ? 3 : R == 4 ? 1 : 0)) ^ (tile & 1) << kOdd;
  }
};

// ---- pairs of complex numbers in f16, a word of real and one of imaginary parts ----

__device__ __forceinline__ __half2 as_pair(std::uint32_t word) { return *reinterpret_cast<__half2*>(&word); }
__device__ __forceinline__ std::uint32_t as_word(__half2 pair) { return *reinterpret_cast<std::uint32_t*>(&pair); }

struct Words {
  std::uint32_t x, y;

  // Times `by`, or its conjugate; kFlip: and the conjugate of all that.
  template <bool kConjugate, bool kFlip = false>
  __device__ __forceinline__ void turn(const Words& by) {
    const __half2 a = as_pair(x), b = as_pair(y), c = as_pair(by.x), d = as_pair(by.y);
    x = as_word(__hfma2(kConjugate ? b : __hneg2(b), d, __hmul2(a, c)));
    if constexpr (kFlip) {
      y = as_word(__hfma2(kConjugate ? a : __hneg2(a), d, __hmul2(__hneg2(b), c)));
    } else {
      y = as_word(__hfma2(kConjugate ? __hneg2(a) : a, d, __hmul2(b, c)));
    }
  }
};
__device__ __forceinline__ Words sum(Words a, Words b) {
  return {as_word(__hadd2(as_pair(a.x), as_pair(b.x))), as_word(__hadd2(as_pair(a.y), as_pair(b.y)))};
}
__device__ __forceinline__ Words difference(Words a, Words b) {
  return {as_word(__hsub2(as_pair(a.x), as_pair(b.x))), as_word(__hsub2(as_pair(a.y), as_pair(b.y)))};
}

// e^(2 pi i turns).
__device__ __forceinline__ float2 circle(float turns) {
  const float angle = 6.28318531f * (turns - rintf(turns));
  return {__cosf(angle), __sinf(angle)};
}
__device__ __forceinline__ std::uint32_t pack(float2 both) { return ptx::pack_f16(both.x, both.y); }

// Real and imaginary parts of scale e^(-2 pi i turns(j)) at j = 0 and 1.
template <class Turns>
__device__ __forceinline__ Words words_of(float scale, const Turns& turns) {
  const float2 a = circle(turns(0)), b = circle(turns(1));
  return {pack({scale * a.x, scale * b.x}), pack({-scale * a.y, -scale * b.y})};
}
__device__ __forceinline__ std::uint32_t negative(std::uint32_t pair) { return pair ^ 0x80008000u; }

// d = a b + c, a [16,16], b [16,8] in f16; which lane has what as of ptx::mma_bf16.
__device__ __forceinline__ void add_matrix(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                           std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void set_matrix(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                           std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// The same with sums that leave as pairs of f16: of rows, and of rows eight on.
__device__ __forceinline__ void set_matrix(std::uint32_t& low, std::uint32_t& high, const std::uint32_t (&a)[4],
                                           std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%8};"
      : "=r"(low), "=r"(high)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}
__device__ __forceinline__ void add_matrix(std::uint32_t (&d)[2], const std::uint32_t (&a)[4], std::uint32_t b0,
                                           std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- what lanes keep of the constants; `row` and `pair` of a lane are its place in a matrix ----

// The products of columns, whose matrices are in shared memory, 8 x 8 at a time, and go to lanes transposed on the way
// back. The first, over t1 or k1, is of real numbers in or out.
struct ColumnSteps {
  static constexpr int kBytes = 1024;  // real and imaginary parts of e^(-2 pi i (k - 1/4) t / 16), [k half][t half]
  std::uint32_t real[4], imaginary[4];

  // All of the block must come here.
  static __device__ void fill(unsigned char* memory, int thread, int threads) {
    auto* to = reinterpret_cast<__half*>(memory);
    for (int item = thread; item < 256; item += threads) {
      const int k = item / 16, t = item % 16, at = (k / 8 * 2 + t / 8) * 64 + k % 8 * 8 + t % 8;
      const float2 turn = circle((static_cast<float>(k) - 0.25f) * static_cast<float>(t) / 16.0f);
      to[at] = __float2half_rn(turn.x);
      to[at + 256] = __float2half_rn(-turn.y);
    }
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  template <bool kBack>
  static __device__ __forceinline__ ColumnSteps get(const unsigned char* memory, int lane) {
    const int part = lane / 8, block = kBack ? part : part % 2 * 2 + part / 2;
    const std::uint32_t at = ptx::shared_address(memory) + static_cast<std::uint32_t>(block * 128 + lane % 8 * 16);
    ColumnSteps result;
    if constexpr (kBack) {
      ptx::load_matrix_4_transposed(result.real, at);
      ptx::load_matrix_4_transposed(result.imaginary, at + 512);
    } else {
      ptx::load_matrix_4(result.real, at);
      ptx::load_matrix_4(result.imaginary, at + 512);
    }
    return result;
  }
#endif
};
// The second, over t2 or k2, has R x R times a real and an imaginary part, and differs by s1, as the turns between the
// two do: together they make e^(-2 pi i (k1 + 16 k2 - 1/4) s1 / (256 R)) too. Of R up to 2 its lanes' words are kept
// without the zeros.
struct ColumnTurns {
  static constexpr int kBetweenBytes = 16 * 512;  // [s1][real, imaginary][k1][column]
  // [forward, back][s1][k2 or column % R], Words; or [s1][cosine, sine][k2][column]
  template <int R>
  static constexpr int kBytes = kBetweenBytes + (R <= 2 ? 2 * 16 * R * 8 : 16 * 256);
  Words between[4][2];  // [s1 of a quad]
  Words second[4];      // cosine and sine

  template <int R>
  static __device__ void fill(unsigned char* memory, int thread, int threads) {
    auto* between = reinterpret_cast<__half*>(memory);
    for (int item = thread; item < 16 * 128; item += threads) {
      const int s1 = item / 128, k = item / 8 % 16, t = item % 8 % R, at = s1 * 256 + item % 128;
      const float2 turn = circle((static_cast<float>(k) - 0.25f) * static_cast<float>(16 * t + s1) / (256.0f * R));
      between[at] = __float2half_rn(turn.x);
      between[at + 128] = __float2half_rn(-turn.y);
    }
    if constexpr (R <= 2) {
      auto* second = reinterpret_cast<Words*>(memory + kBetweenBytes);
      for (int item = thread; item < 2 * 16 * R; item += threads) {
        const int s1 = item / R % 16, own = item % R;
        const bool back = item >= 16 * R;
        const auto of = [&](int other) {
          const int k2 = back ? other : own, column = back ? own : other;
          if (other >= R) return make_float2(0.0f, 0.0f);
          const float2 turn = circle(static_cast<float>(k2 * (16 * column + s1)) / (16.0f * R));
          return make_float2(turn.x / (back ? R : 1), turn.y / (back ? R : 1));
        };
        const float2 a = of(0), b = of(1);
        second[item] = {pack({a.x, b.x}), pack({a.y, b.y})};
      }
    } else {
      auto* second = reinterpret_cast<__half*>(memory + kBetweenBytes);
      for (int item = thread; item < 16 * 64; item += threads) {
        const int s1 = item / 64, row = item / 8 % 8, column = item % 8, at = s1 * 128 + item % 64;
        const float2 turn = circle(static_cast<float>(row % R * (16 * (column % R) + s1)) / (16.0f * R));
        second[at] = __float2half_rn(row / R == column / R ? turn.x : 0.0f);
        second[at + 64] = __float2half_rn(row / R == column / R ? turn.y : 0.0f);
      }
    }
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Of a quad's s1: 2 p, 2 p + 1, and eight on. Back the second are 1 / R of it, so that nothing leaves f16's range.
  template <int R, bool kBack>
  static __device__ __forceinline__ ColumnTurns get(const unsigned char* memory, int p, int lane) {
    const auto load = [&](std::uint32_t(&words)[4], int at) {
      const std::uint32_t from = ptx::shared_address(memory) + static_cast<std::uint32_t>(at + lane * 16);
      if constexpr (kBack) {
        ptx::load_matrix_4_transposed(words, from);
      } else {
        ptx::load_matrix_4(words, from);
      }
    };
    ColumnTurns result;
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load(words, 512 * (2 * p + i % 2 + i / 2 * 8));
      result.between[i][0] = {words[0], words[2]};
      result.between[i][1] = {words[1], words[3]};
    }
    if constexpr (R <= 2) {
      const int row = lane / 4, pair = lane % 4;
      const auto* from = reinterpret_cast<const Words*>(memory + kBetweenBytes) + (kBack ? 16 : 0) * R + row % R;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Words own = from[(2 * p + i % 2 + i / 2 * 8) * R];
        if constexpr (R == 1) own = {own.x << row % 2 * 16, own.y << row % 2 * 16};
        result.second[i] = row / 2 == pair ? own : Words{0, 0};
      }
    } else {
      const __half2 scale = __float2half2_rn(kBack ? 1.0f / R : 1.0f);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        load(words, kBetweenBytes + 256 * (2 * p + i * 4));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          result.second[i + j] = {as_word(__hmul2(as_pair(words[2 * j]), scale)),
                                  as_word(__hmul2(as_pair(words[2 * j + 1]), scale))};
        }
      }
    }
    return result;
  }
#endif
};

// The products of tiles. Sixteen points are halved first, sums and differences of points eight apart, of which the even
// and the odd of sixteen frequencies are 8 x 8 products of complex numbers: a left side of 16 x 16 or two right sides
// (real parts' and imaginary parts'), which are the conjugate then. Back, products of even and odd ones are halves of
// sums and differences.
struct alignas(16) TileSteps {
  std::uint32_t even[4], odd[4];

  static __device__ void set(std::uint32_t (&to)[4], float scale, float first, float second) {
    const float2 a = circle(first), b = circle(second);
    to[0] = to[3] = pack({scale * a.x, scale * b.x});
    to[2] = pack({scale * a.y, scale * b.y});
    to[1] = negative(to[2]);
  }
  // kBack: of odd ones, the point down and the frequency along.
  template <bool kBack>
  static __device__ TileSteps of(int row, int pair, float scale) {
    const auto turns = [&](int odd, int j) {
      const int along = 2 * pair + j;
      return static_cast<float>(kBack ? row * (2 * along + odd) : (2 * row + odd) * along) / 16.0f;
    };
    TileSteps result;
    set(result.even, scale, turns(0, 0), turns(0, 1));
    set(result.odd, scale, turns(1, 0), turns(1, 1));
    return result;
  }
};
// The turns between them, e^(-2 pi i s2 k3 / 256): forward of s2 = 2 pair and the next, and 8 on, and k3 = 2 row and
// the next; back of s2 = row and 8 on, and k3 = 4 pair and 2 on, and the next of both.
struct alignas(16) TileTurns {
  Words by[2][2];  // [s2][k3]

  template <bool kBack>
  static __device__ TileTurns of(int row, int pair) {
    TileTurns result;
    for (int i = 0; i < 4; ++i) {
      result.by[i / 2][i % 2] = words_of(1.0f, [&](int j) {
        const int s2 = 8 * (i / 2) + (kBack ? row : 2 * pair + j), k3 = i % 2 + 2 * (kBack ? 2 * pair + j : row);
        return static_cast<float>(s2 * k3) / 256.0f;
      });
    }
    return result;
  }
  // Those of a tile, with e^(-2 pi i s2 (k1 + 16 k2 - 1/4) / kPoints) for a lane's s2 or pairs of them.
  __device__ __forceinline__ TileTurns of_tile(Words low, Words high) const {
    TileTurns result = *this;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      result.by[0][r].turn<false>(low);
      result.by[1][r].turn<false>(high);
    }
    return result;
  }
};

// A warp's lanes' constants in shared memory.
template <class S>
constexpr int kLanesBytes = 32 * static_cast<int>(sizeof(S));
template <class S>
__device__ __forceinline__ void put(unsigned char* at, int lane, const S& value) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(S) / 16); ++i) {
    reinterpret_cast<uint4*>(at)[32 * i + lane] = reinterpret_cast<const uint4*>(&value)[i];
  }
}
template <class S>
__device__ __forceinline__ S get(const unsigned char* at, int lane) {
  S value;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(S) / 16); ++i) {
    reinterpret_cast<uint4*>(&value)[i] = reinterpret_cast<const uint4*>(at)[32 * i + lane];
  }
  return value;
}

// ---- columns ----

// Pairs of f16 times others.
__device__ __forceinline__ uint4 times(uint4 words, __half2 by) {
  const auto one = [&](std::uint32_t word) { return as_word(__hmul2(as_pair(word), by)); };
  return {one(words.x), one(words.y), one(words.z), one(words.w)};
}

// Of a quad's tokens, [half][s1][t1 half] pairs of t1: a lane's four points' chunks.
__device__ __forceinline__ void make_columns(const ColumnSteps& steps, const ColumnTurns& turns,
                                             const uint4 (&tokens)[2], uint4 (&chunks)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t own[4] = {tokens[half].x, tokens[half].y, tokens[half].z, tokens[half].w};
    Words all[2][2];  // [s1][row half], pairs of columns
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int s1 = 2 * half + i;
      Words low, high;
      set_matrix(low.x, high.x, steps.real, own[2 * i], own[2 * i + 1]);
      set_matrix(low.y, high.y, steps.imaginary, own[2 * i], own[2 * i + 1]);
      low.turn<false>(turns.between[s1][0]);
      high.turn<false>(turns.between[s1][1]);
      const std::uint32_t left[4] = {low.x, high.x, low.y, high.y};
      const Words second = turns.second[s1];
      set_matrix(all[i][0].x, all[i][1].x, left, second.x, second.y);
      set_matrix(all[i][0].y, all[i][1].y, left, negative(second.y), second.x);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned part = i % 2 == 0 ? 0x5410 : 0x7632;
      (half == 0 ? chunks[i].x : chunks[i].y) = __byte_perm(all[0][i / 2].x, all[1][i / 2].x, part);
      (half == 0 ? chunks[i].z : chunks[i].w) = __byte_perm(all[0][i / 2].y, all[1][i / 2].y, part);
    }
  }
}

// Back: a quad's results, [half][s1][t1 half] pairs of columns, in bf16 times a power of two, `scale`, or, kHalf, in
// f16 as they are.
template <bool kHalf>
__device__ __forceinline__ void take_columns(const ColumnSteps& steps, const ColumnTurns& turns,
                                             const uint4 (&chunks)[4], float scale, uint4 (&to)[2]) {
  const std::uint32_t scales = ptx::pack_bf16(scale, scale);
  const auto packed = [&](float a, float b) {
    return kHalf ? ptx::pack_f16(a, b) : ptx::fma_bf16(ptx::pack_bf16(a, b), scales, 0x80008000u);
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int s1 = 2 * half + i;
      const unsigned part = i == 0 ? 0x5410 : 0x7632;  // from pairs of s1 to pairs of k2
      const Words second = turns.second[s1];
      const std::uint32_t left[4] = {second.x, second.y, negative(second.y), second.x};
      Words turned[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 &a = chunks[2 * r], &b = chunks[2 * r + 1];
        set_matrix(turned[r].x, turned[r].y, left, __byte_perm(half == 0 ? a.x : a.y, half == 0 ? b.x : b.y, part),
                   __byte_perm(half == 0 ? a.z : a.w, half == 0 ? b.z : b.w, part));
        turned[r].turn<true>(turns.between[s1][r]);
      }
      float y[4];
      set_matrix(y, steps.real, turned[0].x, turned[1].x);
      add_matrix(y, steps.imaginary, turned[0].y, turned[1].y);
      out[2 * i] = packed(y[0], y[1]);
      out[2 * i + 1] = packed(y[2], y[3]);
    }
    to[half] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// ---- tiles ----

// A lane's points of a tile.
using Tile = Words[2][2];

// The step times a right side, of points of a column each: real and imaginary parts of a row's.
__device__ __forceinline__ Words left_product(const std::uint32_t (&step)[4], Words right) {
  Words result;
  set_matrix(result.x, result.y, step, right.x, right.y);
  return result;
}
// A left side, points of rows and rows eight on, times the step's conjugate.
__device__ __forceinline__ void right_product(Words low, Words high, const std::uint32_t (&step)[4], Words (&to)[2]) {
  const std::uint32_t left[4] = {low.x, high.x, low.y, high.y};
  set_matrix(to[0].x, to[1].x, left, step[0], step[1]);
  set_matrix(to[0].y, to[1].y, left, step[2], step[3]);
}

// The conjugate of a tile's spectrum, [k4 odd][k3 odd], of chunks at `from` and half a tile behind it.
__device__ __forceinline__ void make_tile(const TileSteps& steps, const TileSteps& right, const TileTurns& between,
                                          const unsigned char* from, Tile& tile) {
  Tile first;  // [s2][k3 odd]
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(from + 512 * n);
    const Words low{chunk.x, chunk.z}, high{chunk.y, chunk.w};
    first[n][0] = left_product(steps.even, sum(low, high));
    first[n][1] = left_product(steps.odd, difference(low, high));
#pragma unroll
    for (int r = 0; r < 2; ++r) first[n][r].turn<false, true>(between.by[n][r]);
  }
  right_product(sum(first[0][0], first[1][0]), sum(first[0][1], first[1][1]), right.even, tile[0]);
  right_product(difference(first[0][0], first[1][0]), difference(first[0][1], first[1][1]), right.odd, tile[1]);
}
// Back to where it came from.
__device__ __forceinline__ void take_tile(const TileSteps& steps, const TileTurns& between, const Tile& tile,
                                          unsigned char* to) {
  Tile last;  // [k3 odd][s2]
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Words even = left_product(steps.even, tile[0][r]), odd = left_product(steps.odd, tile[1][r]);
    last[r][0] = sum(even, odd);
    last[r][1] = difference(even, odd);
#pragma unroll
    for (int n = 0; n < 2; ++n) last[r][n].turn<false, true>(between.by[n][r]);
  }
  Words even[2], odd[2];
  right_product(last[0][0], last[0][1], steps.even, even);
  right_product(last[1][0], last[1][1], steps.odd, odd);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const Words low = sum(even[n], odd[n]), high = difference(even[n], odd[n]);
    *reinterpret_cast<uint4*>(to + 512 * n) = make_uint4(low.x, high.x, low.y, high.y);
  }
}

}  // namespace flashgla::ops::long_convolution::cuda

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
// The eight columns of a product are two of s1, so that sums are pairs of these, R values of t2 and 4 / R of s2; of
// R = 8 those of t2 alone. The R x R matrices over t2 stand along the diagonal then.
//
// Points in shared memory: [channel][k1 + 16 k2] tiles of 64 chunks of 16 bytes, [s2][p], in which s1 is 2 p, 2 p + 1,
// 2 p + 8 and 2 p + 9: pairs of them, each real and imaginary parts. These are a lane's parts of a product's right
// side.
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
  static constexpr int kPoints = 4096 * R, kTogether = 8 / R;  // the latter of s2 in a quad
  static constexpr int kTiles = kWholeTiles / kTogether, kQuads = kWholeQuads / kTogether;  // of a channel

  // A chunk's place in its tile, such that neither lanes that have one chunk of many tiles nor those that have one
  // tile's meet in a bank.
  static constexpr __host__ __device__ int placed(int chunk, int tile) {
    if constexpr (R == 8) return chunk ^ (chunk >> 3 & 3) ^ (tile >> 5 & 3) ^ (tile & 1) << 2;
    if constexpr (R == 1) return chunk ^ (chunk >> 3 & 1) ^ (tile & 1) << 1;
    return chunk ^ (tile >> 4 & 1) ^ (tile & 1) << 1 ^ (tile >> 5 & 1) << 2;
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

// Constants that threads keep in registers. Volatile, since the compiler would read them anew in each round of a loop.
__device__ __forceinline__ uint4 load_kept(const uint4* from) {
  uint4 words;
  asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(ptx::shared_address(from)));
  return words;
}
__device__ __forceinline__ uint2 load_kept(const uint2* from) {
  uint2 words;
  asm volatile("ld.volatile.shared.v2.u32 {%0,%1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(ptx::shared_address(from)));
  return words;
}

// The products of columns. The first, over t1 or k1, is of real numbers in or out: its lanes' parts of the real and the
// imaginary parts of e^(-2 pi i (k - 1/4) t / 16), back transposed.
struct ColumnSteps {
  static constexpr int kBytes = 2 * 2 * 32 * 16;  // forward, back; real, imaginary parts
  std::uint32_t real[4], imaginary[4];

  // All of the block must come here.
  static __device__ void fill(unsigned char* memory, int thread, int threads) {
    for (int item = thread; item < 2 * 2 * 32 * 4; item += threads) {
      const int word = item % 4, lane = item / 4 % 32, imaginary = item / 128 % 2, back = item / 256,
                down = lane / 4 + word % 2 * 8, along = 2 * (lane % 4) + word / 2 * 8;
      float values[2];
      for (int j = 0; j < 2; ++j) {
        const int k = back ? along + j : down, t = back ? down : along + j;
        const float2 turn = circle((static_cast<float>(k) - 0.25f) * static_cast<float>(t) / 16.0f);
        values[j] = imaginary ? -turn.y : turn.x;
      }
      reinterpret_cast<std::uint32_t*>(memory)[item] = pack({values[0], values[1]});
    }
  }
  template <bool kBack>
  static __device__ __forceinline__ ColumnSteps get(const unsigned char* memory, int lane) {
    const auto* from = reinterpret_cast<const uint4*>(memory) + (kBack ? 64 : 0) + lane;
    const uint4 real = load_kept(from), imaginary = load_kept(from + 32);
    return {{real.x, real.y, real.z, real.w}, {imaginary.x, imaginary.y, imaginary.z, imaginary.w}};
  }
};
// The turns between the two, of one s1 (R = 8) or a pair of them, and the second product, over t2 or k2. That one has
// R x R times a real and an imaginary part, and differs by s1: together they make e^(-2 pi i (k1 + 16 k2 - 1/4) s1 /
// (256 R)) too. Back the second's are 1 / R of it, so that nothing leaves f16's range.
template <int R>
struct ColumnTurns {
  static constexpr int kHalf = 4 * 2 * R * 8 * 16;  // forward or back
  // [p][s1 half][t2][row] and, back, [p][s1 half][s1 of a pair][t2][lane % 4] of words of k1 and k1 + 8, of which lanes
  // that read at once have banks of their own, then the second product's [p][s1 half][s1 of a pair][k2][t2], in the
  // word's half of that s1
  static constexpr int kBytes = 2 * kHalf + 4 * 2 * 2 * R * R * static_cast<int>(sizeof(Words));
  Words between[2][2];  // [s1 half][k1 half]
  Words second[2];      // cosine and sine

  // Where a part's lie.
  static __device__ __forceinline__ int forward_at(int t2, int row) { return t2 * 8 + (row ^ (2 * t2)); }
  static __device__ __forceinline__ int back_at(int odd, int t2, int other) {
    const int at = (odd * R + t2) * 4 + other;
    return R == 1 ? at : at ^ (odd * 4);
  }
  static __device__ __forceinline__ int second_at(int odd, int k2, int t2) {
    const int at = (odd * R + k2) * R + t2;
    return R == 4 ? at ^ (odd * 10) : at;
  }
  // e^(-2 pi i (k1 - 1/4) (16 t2 + s1) / (256 R)) of two, two(j) of which gives k1 and s1.
  template <class Two>
  static __device__ Words between_of(int t2, const Two& two) {
    return words_of(1.0f, [&](int j) {
      const int2 at = two(j);
      return (static_cast<float>(at.x) - 0.25f) * static_cast<float>(16 * t2 + at.y) / (256.0f * R);
    });
  }
  // All of the block must come here.
  static __device__ void fill(unsigned char* memory, int thread, int threads) {
    for (int item = thread; item < 2 * kHalf / 16; item += threads) {
      const bool back = item >= kHalf / 16;
      const int own = back ? item - kHalf / 16 : item, part = own / (8 * R), rest = own % (8 * R),
                s1 = 2 * (part / 2) + 8 * (part % 2), t2 = back ? rest / 4 % R : rest / 8;
      const auto of = [&](int half) {
        return between_of(t2, [&](int j) {
          return back ? make_int2(8 * half + 2 * (rest % 4) + j, s1 + rest / (4 * R))
                      : make_int2(8 * half + rest % 8, s1 + j);
        });
      };
      const Words low = of(0), high = of(1);
      const int at = back ? back_at(rest / (4 * R), t2, rest % 4) : forward_at(t2, rest % 8);
      reinterpret_cast<uint4*>(memory)[item - rest + at] = make_uint4(low.x, low.y, high.x, high.y);
    }
    auto* second = reinterpret_cast<Words*>(memory + 2 * kHalf);
    for (int item = thread; item < 4 * 2 * 2 * R * R; item += threads) {
      const int t2 = item % R, k2 = item / R % R, odd = item / (R * R) % 2, part = item / (2 * R * R),
                s1 = 2 * (part / 2) + 8 * (part % 2) + odd;
      const float2 turn = circle(static_cast<float>(k2 * (16 * t2 + s1)) / (16.0f * R));
      second[part * 2 * R * R + second_at(odd, k2, t2)] = {pack({odd ? 0.0f : turn.x, odd ? turn.x : 0.0f}),
                                                           pack({odd ? 0.0f : turn.y, odd ? turn.y : 0.0f})};
    }
  }
  template <bool kBack>
  static __device__ __forceinline__ ColumnTurns get(const unsigned char* memory, int p, int lane) {
    // Of the second: its columns (k2 or t2, and s2), the pair of rows, and which s1 of a pair a column is.
    const int column = lane / 8, other = lane % 4, odd = lane / 4 % 2;
    ColumnTurns result;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int part = 2 * p + half;
      const int at = kBack ? back_at(odd, column % R, other) : forward_at(other % R, lane / 4);
      const uint4 words = load_kept(reinterpret_cast<const uint4*>(memory + (kBack ? kHalf : 0)) + part * 8 * R + at);
      result.between[half][0] = {words.x, words.y};
      result.between[half][1] = {words.z, words.w};
      const int k2 = (kBack ? other : column) % R, t2 = (kBack ? column : other) % R;
      const uint2 turn =
          load_kept(reinterpret_cast<const uint2*>(memory + 2 * kHalf) + part * 2 * R * R + second_at(odd, k2, t2));
      Words own{turn.x, turn.y};
      if constexpr (kBack && R > 1) {
        const __half2 scale = __float2half2_rn(1.0f / R);
        own = {as_word(__hmul2(as_pair(own.x), scale)), as_word(__hmul2(as_pair(own.y), scale))};
      }
      result.second[half] = column / R == other / R ? own : Words{0, 0};
    }
    return result;
  }
};
// Of R = 8 matrices of 8 x 8, [s1][real, imaginary][k1][t2] and [s1][cosine, sine][k2][t2].
template <>
struct ColumnTurns<8> {
  static constexpr int R = 8, kBetweenBytes = 16 * 512, kBytes = kBetweenBytes + 16 * 256;
  Words between[4][2];  // [s1 of a quad]
  Words second[4];      // cosine and sine

  static __device__ void fill(unsigned char* memory, int thread, int threads) {
    auto* between = reinterpret_cast<__half*>(memory);
    for (int item = thread; item < 16 * 128; item += threads) {
      const int s1 = item / 128, k = item / 8 % 16, t = item % 8, at = s1 * 256 + item % 128;
      const float2 turn = circle((static_cast<float>(k) - 0.25f) * static_cast<float>(16 * t + s1) / (256.0f * R));
      between[at] = __float2half_rn(turn.x);
      between[at + 128] = __float2half_rn(-turn.y);
    }
    auto* second = reinterpret_cast<__half*>(memory + kBetweenBytes);
    for (int item = thread; item < 16 * 64; item += threads) {
      const int s1 = item / 64, row = item / 8 % 8, column = item % 8, at = s1 * 128 + item % 64;
      const float2 turn = circle(static_cast<float>(row * (16 * column + s1)) / (16.0f * R));
      second[at] = __float2half_rn(turn.x);
      second[at + 64] = __float2half_rn(turn.y);
    }
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Of a quad's s1: 2 p, 2 p + 1, and eight on.
  template <bool kBack>
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
// The turns between them, e^(-2 pi i s2 k3 / 256), and those by s2, e^(-2 pi i s2 (k1 + 16 k2 - 1/4) / kPoints), which
// are of a tile: forward of s2 = 2 pair and the next, and 8 on, and k3 = 2 row and the next. Back they are of s2 = row
// and 8 on, and k3 = 4 pair and 2 on, and the next of both: the same matrices with rows and columns changed over. Both
// together lie in memory, [tile][s2 half][lane] uint4, or, of R = 8, a tile's are made of these, since one sequence's
// tiles do not pay for what they read.
struct alignas(16) TileTurns {
  static constexpr int kOfTile = 2 * 32;
  Words by[2][2];  // [s2 half][k3]

  // A lane's of one s2 half, of a tile that is turned by s2 times `along`.
  static __device__ uint4 half_of(int lane, int half, float along) {
    const int row = lane / 4, pair = lane % 4;
    const auto one = [&](int odd) {
      return words_of(1.0f, [&](int j) {
        const int s2 = 8 * half + 2 * pair + j, k3 = odd + 2 * row;
        return static_cast<float>(s2 * k3) / 256.0f + static_cast<float>(s2) * along;
      });
    };
    const Words a = one(0), b = one(1);
    return {a.x, a.y, b.x, b.y};
  }
  static __device__ __forceinline__ TileTurns of(uint4 low, uint4 high) {
    return {{{{low.x, low.y}, {low.z, low.w}}, {{high.x, high.y}, {high.z, high.w}}}};
  }
  static __device__ TileTurns between(int lane) { return of(half_of(lane, 0, 0.0f), half_of(lane, 1, 0.0f)); }
  static __device__ __forceinline__ TileTurns get(const uint4* table, int tile, int lane) {
    const uint4* from = table + tile * kOfTile + lane;
    return of(__ldg(from), __ldg(from + 32));
  }
  // Those back.
  __device__ __forceinline__ TileTurns transposed() const {
    TileTurns result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result.by[i / 2][i % 2] = {ptx::transpose_matrix(by[i / 2][i % 2].x), ptx::transpose_matrix(by[i / 2][i % 2].y)};
    }
    return result;
  }
  // With those of a tile for a lane's s2 or pairs of them.
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
// What turns a tile by s2, of one: e^(-2 pi i turns).
template <int R>
__device__ __forceinline__ float turns_of_tile(int tile) {
  return (static_cast<float>(tile) - 0.25f) / static_cast<float>(WholeShape<R>::kPoints);
}
// A pair of s2, and the pair eight on.
template <int R>
__device__ uint4 turns_by_s2(int tile, int pair) {
  const auto of = [&](int half) {
    return words_of(1.0f, [&](int j) { return turns_of_tile<R>(tile) * static_cast<float>(2 * pair + 8 * half + j); });
  };
  const Words low = of(0), high = of(1);
  return {low.x, low.y, high.x, high.y};
}

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
// kKept: to registers, to stay there.
template <class S, bool kKept = false>
__device__ __forceinline__ S get(const unsigned char* at, int lane) {
  S value;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(S) / 16); ++i) {
    const auto* from = reinterpret_cast<const uint4*>(at) + 32 * i + lane;
    reinterpret_cast<uint4*>(&value)[i] = kKept ? load_kept(from) : *from;
  }
  return value;
}

// ---- columns ----

// Pairs of f16 times others.
__device__ __forceinline__ uint4 times(uint4 words, __half2 by) {
  const auto one = [&](std::uint32_t word) { return as_word(__hmul2(as_pair(word), by)); };
  return {one(words.x), one(words.y), one(words.z), one(words.w)};
}

// Of a quad's tokens, [s1 half][s2 half, of R = 8 s1][t1 half] pairs of t1: a lane's four points' chunks, [k1 half][s2
// half], of R = 8 [k1 half][k2].
template <int R>
__device__ __forceinline__ void make_columns(const ColumnSteps& steps, const ColumnTurns<R>& turns,
                                             const uint4 (&tokens)[2], uint4 (&chunks)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t own[4] = {tokens[half].x, tokens[half].y, tokens[half].z, tokens[half].w};
    Words all[2][2];  // [i][k1 half], pairs of columns
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int kind = R == 8 ? 2 * half + i : half;
      Words low, high;
      set_matrix(low.x, high.x, steps.real, own[2 * i], own[2 * i + 1]);
      set_matrix(low.y, high.y, steps.imaginary, own[2 * i], own[2 * i + 1]);
      low.turn<false>(turns.between[kind][0]);
      high.turn<false>(turns.between[kind][1]);
      const std::uint32_t left[4] = {low.x, high.x, low.y, high.y};
      const Words second = turns.second[kind];
      set_matrix(all[i][0].x, all[i][1].x, left, second.x, second.y);
      set_matrix(all[i][0].y, all[i][1].y, left, negative(second.y), second.x);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Words own_chunk = all[i % 2][i / 2];
      if constexpr (R == 8) {
        const unsigned part = i % 2 == 0 ? 0x5410 : 0x7632;  // from pairs of k2 to pairs of s1
        own_chunk = {__byte_perm(all[0][i / 2].x, all[1][i / 2].x, part),
                     __byte_perm(all[0][i / 2].y, all[1][i / 2].y, part)};
      }
      (half == 0 ? chunks[i].x : chunks[i].z) = own_chunk.x;
      (half == 0 ? chunks[i].y : chunks[i].w) = own_chunk.y;
    }
  }
}

// Back: a quad's results, [s1 half][s2 half, of R = 8 s1][t1 half] pairs of columns, in bf16 times a power of two,
// `scale`, or, kHalf, in f16 as they are.
template <bool kHalf, int R>
__device__ __forceinline__ void take_columns(const ColumnSteps& steps, const ColumnTurns<R>& turns,
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
      const int kind = R == 8 ? 2 * half + i : half;
      const Words second = turns.second[kind];
      const std::uint32_t left[4] = {second.x, second.y, negative(second.y), second.x};
      Words turned[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto words = [&](int of) {
          const uint4& chunk = chunks[2 * r + of];
          return half == 0 ? Words{chunk.x, chunk.y} : Words{chunk.z, chunk.w};
        };
        Words own = words(i);
        if constexpr (R == 8) {
          const unsigned part = i == 0 ? 0x5410 : 0x7632;  // from pairs of s1 to pairs of k2
          const Words a = words(0), b = words(1);
          own = {__byte_perm(a.x, b.x, part), __byte_perm(a.y, b.y, part)};
        }
        set_matrix(turned[r].x, turned[r].y, left, own.x, own.y);
        turned[r].template turn<true>(turns.between[kind][r]);
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
    const Words low{chunk.x, chunk.y}, high{chunk.z, chunk.w};
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
    *reinterpret_cast<uint4*>(to + 512 * n) = make_uint4(low.x, low.y, high.x, high.y);
  }
}

}  // namespace flashgla::ops::long_convolution::cuda

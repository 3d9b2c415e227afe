// Operands of products, states and rows of chunks: what kernels make of 64x64 tiles (tiles/layout.cuh) and their
// products (tiles/tensor_cores.cuh).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/tensor_cores.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// What is known already; with mma.sync, whose operands go through registers, find(), so that it is not held until then.
template <class Core, class T, class Find>
__device__ __forceinline__ T again(const T& known, Find find) {
  if constexpr (std::is_same_v<Core, TensorCore80>) {
    return find();
  } else {
    return known;
  }
}
template <class Core>
__device__ __forceinline__ int thread_again(int thread) {
  return again<Core>(thread, fresh_thread);
}
// Likewise the thread within its group, and what is the same in all lanes; a whole warp asks for them together. ptxas
// sees that arithmetic on special registers and parameters is the same again, and holds or spills what comes of it, but
// not through a shuffle.
template <class Core>
__device__ __forceinline__ int thread_shuffled(int thread) {
  return again<Core>(thread, [] {
    int same;
    asm volatile("shfl.sync.bfly.b32 %0, %1, 0, 31, -1;" : "=r"(same) : "r"(threadIdx.x));
    return same & (kGroupThreads - 1);
  });
}
__device__ __forceinline__ int fresh_shuffled() { return thread_shuffled<TensorCore80>(0); }
template <class Core, class T>
__device__ __forceinline__ T alike_shuffled(T x) {
  return again<Core>(x, [x] { return __shfl_sync(0xffffffffu, x, 0); });
}

// How the kernels of a call after its first are launched.
template <class Core>
constexpr flashgla::cuda::Begin kNext =
    std::is_same_v<Core, TensorCore90> ? flashgla::cuda::Begin::beside_previous : flashgla::cuda::Begin::after_previous;

// Two bf16 numbers as such, and back.
__device__ __forceinline__ const __nv_bfloat162& as_pair(const std::uint32_t& x) {
  return reinterpret_cast<const __nv_bfloat162&>(x);
}
__device__ __forceinline__ std::uint32_t as_word(const __nv_bfloat162& x) {
  return reinterpret_cast<const std::uint32_t&>(x);
}
// Two numbers as bf16; they become what rounding has left of them.
__device__ __forceinline__ std::uint32_t take_bf16(float& x, float& y) {
  const std::uint32_t packed = ptx::pack_bf16(x, y);
  const float2 rounded = ptx::unpack_bf16(packed);
  x -= rounded.x;
  y -= rounded.y;
  return packed;
}
// Pairs of bf16 times factors that are the sums of two, rounded once.
__device__ __forceinline__ std::uint32_t times_split(std::uint32_t x, std::uint32_t high, std::uint32_t low) {
  constexpr std::uint32_t negative_zeros = 0x80008000;
  return ptx::fma_bf16(x, high, ptx::fma_bf16(x, low, negative_zeros));
}
// Eight of bf16 times a factor, likewise.
__device__ __forceinline__ uint4 times_split(const uint4& x, float factor) {
  const std::uint32_t high = ptx::pack_bf16(factor, factor);
  const float rest = factor - __uint_as_float(high << 16);
  const std::uint32_t low = ptx::pack_bf16(rest, rest);
  return make_uint4(times_split(x.x, high, low), times_split(x.y, high, low), times_split(x.z, high, low),
                    times_split(x.w, high, low));
}

// An accumulator as the a operand of a product: in k-steps of 16, the four registers of each.
__device__ __forceinline__ void to_operand(std::uint32_t (&operand)[16], const Accumulator& a) {
#pragma unroll
  for (int i = 0; i < 16; ++i) operand[i] = ptx::pack_bf16(a[2 * i], a[2 * i + 1]);
}

__device__ __forceinline__ void unpack_operand(Accumulator& a, const std::uint32_t (&operand)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = ptx::unpack_bf16(operand[i]);
    a[2 * i] = pair.x;
    a[2 * i + 1] = pair.y;
  }
}

// A tile as an operand, the warp's own 16 rows: pairs of elements where an accumulator has them.
template <Stored stored>
__device__ __forceinline__ void load_operand(std::uint32_t (&operand)[16], std::uint32_t tile, int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t r[4];
    TensorCore80::load_a<stored>(r, tile, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[4 * k16 + i] = r[i];
  }
}
// And back; kTransposed: rows become columns.
template <class Core, bool kTransposed = false>
__device__ __forceinline__ void put_operand(std::uint32_t tile, const std::uint32_t (&operand)[16], int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    const std::uint32_t r[4] = {operand[4 * k16], operand[4 * k16 + 1], operand[4 * k16 + 2], operand[4 * k16 + 3]};
    if constexpr (kTransposed) {
      Core::put_fragment_transposed(tile, r, k16, thread);
    } else {
      Core::put_fragment(tile, r, k16, thread);
    }
  }
}

// The pairs that count of columns 16 k16 .. of an accumulator [query][key] (transposed: [key][query]), rounded, as a
// k-step of an operand: queries at or after their key.
__device__ __forceinline__ void select_block(std::uint32_t (&operand)[16], const float (&a)[8], int k16,
                                             bool transposed, int thread) {
  const int warp = thread / 32, row = thread % 32 / 4, column = 2 * (thread % 4);
  // Of an 8x8 block on the diagonal.
  const std::uint32_t low = (transposed ? column >= row : row >= column) ? 0xffffu : 0u,
                      high = (transposed ? column + 1 >= row : row >= column + 1) ? 0xffff0000u : 0u;
  const bool all = transposed ? k16 > warp : k16 < warp, some = all || k16 == warp;
  const std::uint32_t mask = all ? ~0u : some ? low | high : 0u;
  std::uint32_t x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = ptx::pack_bf16(a[2 * i], a[2 * i + 1]);
  operand[4 * k16] = x[0] & mask;
  operand[4 * k16 + 1] = (transposed ? all : some) ? x[1] : 0u;
  operand[4 * k16 + 2] = (transposed ? some : all) ? x[2] : 0u;
  operand[4 * k16 + 3] = x[3] & mask;
}
// Of all columns.
__device__ __forceinline__ void select_pairs(std::uint32_t (&operand)[16], const Accumulator& a, bool transposed,
                                             int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    select_block(operand, reinterpret_cast<const float(&)[8]>(a[8 * k16]), k16, transposed, thread);
  }
}
template <bool kTransposed>
__device__ __forceinline__ void select_pairs(std::uint32_t (&operand)[16], const Accumulator& a, int thread) {
  select_pairs(operand, a, kTransposed, thread);
}

// An operand's registers, pair(i), to a tile; each warp writes its own 16 rows.
template <class Core, class Pair>
__device__ __forceinline__ void put_pairs(std::uint32_t tile, int thread, Pair pair) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = pair(4 * k16 + i);
    Core::put_fragment(tile, r, k16, thread);
  }
}
// An accumulator, rounded.
template <class Core>
__device__ __forceinline__ void put_rounded(std::uint32_t tile, const Accumulator& a, int thread) {
  put_pairs<Core>(tile, thread, [&](int i) { return ptx::pack_bf16(a[2 * i], a[2 * i + 1]); });
}

// Ones at [row][column] where column <= row (upper: column >= row; below: column < row), as an operand: its product
// with a tile of [token][channel] is the running sum over tokens, from the first one (upper: from the last).
enum class Triangle { lower, upper, below };
template <Triangle kTriangle>
__device__ __forceinline__ void triangle_of_ones(std::uint32_t (&operand)[16], int thread) {
  constexpr std::uint32_t ones = 0x3f803f80, low_one = 0x00003f80, high_one = 0x3f800000;
  constexpr bool kUpper = kTriangle == Triangle::upper;
  const int warp = thread / 32, row = thread % 32 / 4, column = 2 * (thread % 4);
  // Of an 8x8 block on the diagonal.
  const std::uint32_t upper = column > row ? ones : column + 1 == row ? high_one : column == row ? ones : 0;
  const int end = kTriangle == Triangle::below ? row : row + 1;  // columns before it
  const std::uint32_t lower = column + 1 < end ? ones : column < end ? low_one : 0;
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    const bool before = kUpper ? k16 > warp : k16 < warp, on = k16 == warp;
    operand[4 * k16] = operand[4 * k16 + 3] = before ? ones : on ? (kUpper ? upper : lower) : 0;
    operand[4 * k16 + (kUpper ? 2 : 1)] = before || on ? ones : 0;
    operand[4 * k16 + (kUpper ? 1 : 2)] = before ? ones : 0;
  }
}
// Sums over the rows of a tile of the columns that are this thread's rows in an accumulator.
__device__ __forceinline__ float2 sum_rows_of_tile(std::uint32_t tile, int thread) {
  constexpr std::uint32_t ones = 0x3f803f80;
  float sums[4] = {};
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t a[4];
    TensorCore80::load_a<Stored::k_outer>(a, tile, k16, thread);
    TensorCore80::multiply(sums, a, ones, ones);
  }
  return make_float2(sums[0], sums[2]);
}

// ---- sums of products with an accumulator; two(i): what its elements i and i + 1 are multiplied by ----

// Of an operand's registers.
template <class Words>
__device__ __forceinline__ auto two_of_operand(const Words& x) {
  return [&x](int i) { return ptx::unpack_bf16(x[i / 2]); };
}
// Over this thread's columns: of its two rows.
template <class Two>
__device__ __forceinline__ float2 dot_rows(const Accumulator& a, Two two) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = two(2 * i);
    sums[i & 1] = fmaf(pair.x, a[2 * i], fmaf(pair.y, a[2 * i + 1], sums[i & 1]));
  }
  return make_float2(sums[0], sums[1]);
}
// Sums over the eight lanes of a warp that have the same columns, of columns 8 (i / 2) + 2 (lane % 4) + i % 2: lane l
// gets those of columns 2 l and the next.
__device__ __forceinline__ float2 sum_over_lanes(float (&sums)[16], int lane) {
  // Lanes 16, 8 and 4 apart give each other the half of the columns that is not theirs.
  const auto halve = [&](auto of_half) {
    constexpr int half = decltype(of_half)::value, distance = 2 * half;
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? sums[i + half] : sums[i], give = upper ? sums[i] : sums[i + half];
      sums[i] = keep + __shfl_xor_sync(0xffffffffu, give, distance);
    }
  };
  halve(std::integral_constant<int, 8>{});
  halve(std::integral_constant<int, 4>{});
  halve(std::integral_constant<int, 2>{});
  return make_float2(sums[0], sums[1]);
}
// Over a warp's 16 rows: of columns 2 lane and the next.
template <class Two>
__device__ __forceinline__ float2 sum_over_rows(const Accumulator& a, int lane, Two two) {
  float sums[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 low = two(4 * j), high = two(4 * j + 2);
    sums[2 * j] = low.x * a[4 * j] + high.x * a[4 * j + 2];
    sums[2 * j + 1] = low.y * a[4 * j + 1] + high.y * a[4 * j + 3];
  }
  return sum_over_lanes(sums, lane);
}

// ---- the state of 64 key channels by 64 value channels: an accumulator whose rows are key channels ----

// Two neighbours 4 * kAt bytes after a place, from memory or to it: both at once where `in_pairs` exceeds kAt, else
// each where `alone` exceeds kAt and kAt + 1. Predicates, not branches: a state has hundreds.
template <bool store, int kAt>
__device__ __forceinline__ void move_two(float& x, float& y, float* place, int in_pairs, int alone) {
  if constexpr (store) {
    asm volatile(
        "{\n"
        ".reg .pred both, first, second;\n"
        "setp.gt.s32 both, %3, %5;\n"
        "setp.gt.s32 first, %4, %5;\n"
        "setp.gt.s32 second, %4, %6;\n"
        "@both st.global.v2.f32 [%2 + %7], {%0, %1};\n"
        "@first st.global.f32 [%2 + %7], %0;\n"
        "@second st.global.f32 [%2 + %8], %1;\n"
        "}" ::"f"(x),
        "f"(y), "l"(place), "r"(in_pairs), "r"(alone), "n"(kAt), "n"(kAt + 1), "n"(4 * kAt), "n"(4 * kAt + 4)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred both, first, second;\n"
        "setp.gt.s32 both, %3, %5;\n"
        "setp.gt.s32 first, %4, %5;\n"
        "setp.gt.s32 second, %4, %6;\n"
        "@both ld.global.v2.f32 {%0, %1}, [%2 + %7];\n"
        "@first ld.global.f32 %0, [%2 + %7];\n"
        "@second ld.global.f32 %1, [%2 + %8];\n"
        "}"
        : "+f"(x), "+f"(y)
        : "l"(place), "r"(in_pairs), "r"(alone), "n"(kAt), "n"(kAt + 1), "n"(4 * kAt), "n"(4 * kAt + 4));
  }
}
// From and to an f32 state [K,V]; `key` and `value` are the tile's first channels. Pairs of neighbours at once where
// V is even and the state aligned.
template <bool store>
__device__ __forceinline__ void move_state(Accumulator& h, float* state, int K, int V, int key, int value, int thread) {
  const int lane = thread % 32, row = key + thread / 32 * 16 + lane / 4, column = value + 2 * (lane % 4);
  const bool in_pairs = V % 2 == 0 && reinterpret_cast<std::uintptr_t>(state) % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* at = state + static_cast<std::int64_t>(row + 8 * half) * V + column;
    const int left = row + 8 * half < K ? V - column : 0, of_pairs = in_pairs ? left : 0, alone = left - of_pairs;
    const auto move = [&]<int... j>(std::integer_sequence<int, j...>) {
      (move_two<store, 8 * j>(h[4 * j + 2 * half], h[4 * j + 2 * half + 1], at, of_pairs, alone), ...);
    };
    move(std::make_integer_sequence<int, 8>());
  }
}
__device__ __forceinline__ void read_state(Accumulator& h, const float* state, int K, int V, int key, int value,
                                           int thread) {
  clear(h);
  if (state != nullptr) move_state<false>(h, const_cast<float*>(state), K, V, key, value, thread);
}
__device__ __forceinline__ void write_state(float* state, Accumulator& h, int K, int V, int key, int value,
                                            int thread) {
  move_state<true>(h, state, K, V, key, value, thread);
}
// The same where the accumulator's rows are value channels. A warp's access is four rows of eight neighbours, whole
// sectors of memory.
template <bool store>
__device__ __forceinline__ void move_transposed_state(Accumulator& h, float* state, int K, int V, int key, int value,
                                                      int thread) {
  const int lane = thread % 32, row = value + thread / 32 * 16 + lane / 4, column = key + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= V) continue;
    float* at = state + static_cast<std::int64_t>(column) * V + row + 8 * half;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float &x = h[4 * j + 2 * half], &y = h[4 * j + 2 * half + 1];
      if (column + 8 * j < K) store ? * at = x : x = *at;
      if (column + 8 * j + 1 < K) store ? at[V] = y : y = at[V];
      at += 8 * V;
    }
  }
}

// Segments' states and parts of outputs: as an accumulator of a group lies in its threads, 16 KiB, four elements of a
// thread beside its neighbours': [8][thread][4]. Adds one, and writes one.
__device__ __forceinline__ void add_part(Accumulator& a, const float* from, int thread) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 x = reinterpret_cast<const float4*>(from)[j * kGroupThreads + thread];
    a[4 * j] += x.x;
    a[4 * j + 1] += x.y;
    a[4 * j + 2] += x.z;
    a[4 * j + 3] += x.w;
  }
}
__device__ __forceinline__ void write_part(float* to, const Accumulator& a, int thread) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    reinterpret_cast<float4*>(to)[j * kGroupThreads + thread] =
        make_float4(a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3]);
  }
}

// ---- where a chunk lies ----

struct Chunk {
  std::int64_t batch;  // row of the batch
  std::int64_t token;  // of its first token in the row
  int rows;            // tokens, 1..64
};

__device__ __forceinline__ Chunk chunk_of(const Span& span, std::int64_t index) {
  const std::int64_t left = span.length - index * kChunk;
  return {span.batch, span.begin + index * kChunk, static_cast<int>(left < kChunk ? left : kChunk)};
}
// Chunk number `chunk` of the call; without rows beyond the last.
__device__ __forceinline__ Chunk locate(const Sequences& s, std::int64_t chunk) {
  const std::int64_t n = sequence_of_chunk(s, chunk);
  if (n < 0) return {0, 0, 0};
  const Span span = span_of(s, n);
  return chunk_of(span, chunk - span.chunk_begin);
}

// Of a head, from the chunk's first token.
template <class T>
__device__ __forceinline__ T* row_of(const Strided& x, const Chunk& c, int head) {
  return static_cast<T*>(x.data) + anew(c.batch) * x.batch + c.token * x.token + anew(head) * x.head;
}

__device__ __forceinline__ void store_two(__nv_bfloat16* place, float2 x) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(place), "r"(ptx::pack_bf16(x.x, x.y)) : "memory");
}
__device__ __forceinline__ void store_two(float* place, float2 x) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(place), "f"(x.x), "f"(x.y) : "memory");
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

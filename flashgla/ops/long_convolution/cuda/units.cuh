// Rows of channels as they lie in memory to what tensor cores take of a channel (matrices.cuh), and back. A unit is
// half of a quad: 256 tokens of a channel, 32 lanes' words of four pairs. Tokens and filters go to f16, scaled by
// powers of two such that nothing leaves its range: a unit's tokens come below 2^-4, the magnitudes of a unit of a
// filter add up to less than 2^8, and a channel's units are brought to one scale later.
#pragma once

#include "flashgla/ops/long_convolution/cuda/call.cuh"
#include "flashgla/ops/long_convolution/cuda/complex.cuh"
#include "flashgla/ops/long_convolution/cuda/matrices.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kUnitTokens = 256, kUnitChannels = 64, kUnitThreads = 512, kUnitWarps = kUnitThreads / 32;
constexpr int kUnitColumns = 8;  // of a unit, 32 tokens each
// In shared memory rows of a block's channels, apart such that eight rows' pieces of 16 bytes are in banks of their
// own, and in their place units of 512 bytes, apart such that four lanes' pieces of two are.
constexpr int kUnitRow = 144, kStagedUnit = 576, kUnitBytes = kUnitTokens * kUnitRow;
static_assert(kUnitBytes == kUnitChannels * kStagedUnit);
constexpr int kUnitScalesAt = kUnitWarps * kUnitChannels, kUnitRoom = kUnitScalesAt + kUnitChannels;  // floats

// Units in memory: [line][channels, a multiple of kUnitChannels][unit][lane], and what takes each back to what it was
// (of a filter more than the sum of the magnitudes), 0 where all are zeros.
struct Units {
  uint4* data;
  float* scales;
  std::int64_t channels;

  template <int R>
  __device__ __forceinline__ std::int64_t number(std::int64_t line, std::int64_t channel) const {
    return (line * channels + channel) * WholeShape<R>::kTiles;
  }
};

// Token of a row in shared memory: [s2 half, of 32,768 points s1][t1 half][column][t1], of results [..][t1][column].
// Sums of rows that have no bit in common are rows of sums.
template <int R, bool kResults>
__device__ __forceinline__ constexpr int token_of_row(int row) {
  const int low = row % 8, high = row / 8 % 8, t1 = row / 64 % 2 * 8 + (kResults ? high : low),
            column = kResults ? low : high, first = 256 * R * t1;
  if constexpr (R == 8) return first + 256 * column + row / 128 * 16;
  return first + 256 * (column / 2 % R) + column / 2 / R + column % 2 * 16 + row / 128 * (4 / R);
}
template <int R>
__device__ __forceinline__ int token_of_unit(int unit) {
  const int quad = unit / 2;
  return 16 * (2 * (quad % 4) + unit % 2 * 8) + quad / 4 * WholeShape<R>::kTogether;
}

// The order in which blocks take a channel's units: those that come together have tokens beside each other.
template <int R>
__device__ __forceinline__ int unit_in_turn(int turn) {
  constexpr int kNeighbours = WholeShape<R>::kTiles / 8;  // quads whose s2 alone differ
  return 2 * (turn / kNeighbours % 4 + 4 * (turn % kNeighbours)) + turn / (4 * kNeighbours);
}

// Of a unit's channels their magnitudes' largest, or of a filter their sum, and what scales them: `room` gets warps' of
// these, of a filter each warp's, else of warps that have tokens of their own, then the factors, a filter's in f32 and
// tokens' in bf16; memory what takes numbers back.
template <bool kFilter>
struct UnitScales {
  static constexpr int kWarps = kFilter ? kUnitWarps : kUnitColumns;
  float* room;

  // A warp's, of channel c.
  __device__ __forceinline__ float& of_warp(int warp, int c) const { return room[warp * kUnitChannels + c]; }
  // A thread a channel combines them; `to` is the channel's.
  __device__ __forceinline__ void finish(int c, float* to) const {
    float all = of_warp(0, c);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) all = kFilter ? all + of_warp(w, c) : fmaxf(all, of_warp(w, c));
    const Scale both = Scale::below(Scale::field_of(all), kFilter ? 8 : -4);
    *to = all == 0.0f ? 0.0f : both.from * (kFilter ? 256.0f : 1.0f);
    if (kFilter) {
      room[kUnitScalesAt + c] = both.to;
    } else {
      factors()[c] = __float2bfloat16_rn(both.to);
    }
  }
  // Of tokens.
  __device__ __forceinline__ __nv_bfloat16* factors() const {
    return reinterpret_cast<__nv_bfloat16*>(room + kUnitScalesAt);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ __nv_bfloat162 as_two(std::uint32_t word) {
  return *reinterpret_cast<const __nv_bfloat162*>(&word);
}
__device__ __forceinline__ std::uint32_t of_two(__nv_bfloat162 two) {
  return *reinterpret_cast<const std::uint32_t*>(&two);
}

// A block's units in shared memory, of which a warp turns a column of half of the channels, eight at a time.
struct Turned {
  static constexpr int kPieces = kUnitChannels / 16;
  uint4 words[kPieces];  // a lane's [s1][t1 half], of its channel of a piece

  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int channel(int piece) {
    return (warp() / kUnitColumns * kPieces + piece) * 8 + lane() / 4;
  }
  // Where rows' pieces that a lane names lie, and its words of units.
  static __device__ __forceinline__ std::uint32_t rows(const unsigned char* memory) {
    return ptx::shared_address(memory) +
           static_cast<std::uint32_t>(((lane() / 8 * 8 + warp() % kUnitColumns) * 8 + lane() % 8) * kUnitRow +
                                      warp() / kUnitColumns * 16 * kPieces);
  }
  template <class Byte>
  static __device__ __forceinline__ Byte* units(Byte* memory) {
    return memory + channel(0) * kStagedUnit + (warp() % kUnitColumns * 4 + lane() % 4) * 16;
  }

  __device__ __forceinline__ void read_rows(const unsigned char* memory) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      std::uint32_t four[4];
      ptx::load_matrix_4_transposed(four, rows(memory) + 16 * i);
      words[i] = make_uint4(four[0], four[1], four[2], four[3]);
    }
  }
  __device__ __forceinline__ void write_rows(unsigned char* memory) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      ptx::store_matrix_4_transposed(rows(memory) + 16 * i, words[i].x, words[i].y, words[i].z, words[i].w);
    }
  }
  __device__ __forceinline__ void read_units(const unsigned char* memory) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) words[i] = *reinterpret_cast<const uint4*>(units(memory) + 8 * i * kStagedUnit);
  }
  __device__ __forceinline__ void write_units(unsigned char* memory) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) *reinterpret_cast<uint4*>(units(memory) + 8 * i * kStagedUnit) = words[i];
    ptx::fence_async_proxy();
  }

  // Of tokens in bf16: a warp's largest magnitudes.
  __device__ __forceinline__ void find_largest(const UnitScales<false>& scales) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 own = words[i];
      __nv_bfloat162 all = __hmax2(__hmax2(__habs2(as_two(own.x)), __habs2(as_two(own.y))),
                                   __hmax2(__habs2(as_two(own.z)), __habs2(as_two(own.w))));
#pragma unroll
      for (int apart = 2; apart > 0; apart /= 2) {
        all = __hmax2(all, as_two(__shfl_xor_sync(0xffffffffu, of_two(all), apart)));
      }
      if (lane() % 4 == 0) {
        scales.of_warp(warp() % kUnitColumns, channel(i)) = fmaxf(__low2float(all), __high2float(all));
      }
    }
  }
  // Tokens times the factors that finish() left, in f16.
  __device__ __forceinline__ void scale(const UnitScales<false>& scales) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const __nv_bfloat162 by = __bfloat162bfloat162(scales.factors()[channel(i)]);
      const auto one = [&](std::uint32_t word) {
        const float2 both = ptx::unpack_bf16(of_two(__hmul2(as_two(word), by)));
        return ptx::pack_f16(both.x, both.y);
      };
      words[i] = make_uint4(one(words[i].x), one(words[i].y), one(words[i].z), one(words[i].w));
    }
  }
};
// The channel whose units a thread moves by bulk copies, or none: few lanes of every warp have one, since a warp issues
// them one after the other.
constexpr int kUnitMovers = kUnitChannels / kUnitWarps;
__device__ __forceinline__ bool moves_units() { return threadIdx.x % 32 < kUnitMovers; }
__device__ __forceinline__ int moved_channel() {
  return static_cast<int>(threadIdx.x / 32 * kUnitMovers + threadIdx.x % 32);
}
// The units are written to memory; `to` is the first channel's.
template <int R>
__device__ __forceinline__ void store_units(const unsigned char* memory, uint4* to) {
  if (!moves_units()) return;
  const int c = moved_channel();
  ptx::store_bulk(to + c * 32 * WholeShape<R>::kTiles, ptx::shared_address(memory + c * kStagedUnit), 512);
  ptx::store_bulk_commit();
}
// load(more) is 16 bytes of the channels of the thread's first token and `more`. All threads must come here.
template <int R, class Load>
__device__ __forceinline__ void filter_in(const Load& load, const Units& to, int channel, int unit,
                                          unsigned char* memory, float* room) {
  constexpr int kParts = kUnitChannels / 4, kRows = kUnitThreads / kParts, kSteps = kUnitTokens / kRows;
  const int thread = static_cast<int>(threadIdx.x), part = thread % kParts, lane = thread % 32;
  const UnitScales<true> scales{room};
  uint4 raw[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) raw[i] = load(token_of_row<R, false>(kRows * i));
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) own += fabsf(__uint_as_float((&raw[i].x)[c]));
    own += __shfl_xor_sync(0xffffffffu, own, 16);
    if (lane < kParts) scales.of_warp(thread / 32, part * 4 + c) = own;
  }
  __syncthreads();
  const std::int64_t first = to.number<R>(0, channel);
  if (thread < kUnitChannels) scales.finish(thread, to.scales + first + thread * WholeShape<R>::kTiles + unit);
  __syncthreads();
  const float4 by = reinterpret_cast<const float4*>(room + kUnitScalesAt)[part];
  unsigned char* rows = memory + thread / kParts * kUnitRow + part * 8;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    *reinterpret_cast<uint2*>(rows + kRows * i * kUnitRow) =
        make_uint2(ptx::pack_f16(__uint_as_float(raw[i].x) * by.x, __uint_as_float(raw[i].y) * by.y),
                   ptx::pack_f16(__uint_as_float(raw[i].z) * by.z, __uint_as_float(raw[i].w) * by.w));
  }
  Turned turned;
  __syncthreads();
  turned.read_rows(memory);
  __syncthreads();
  turned.write_units(memory);
  __syncthreads();
  store_units<R>(memory, to.data + (first + unit) * 32);
}

// A thread's share of the rows of a unit of tokens to shared memory: put(more, to) puts 16 bytes of the channels of the
// thread's first token and `more` there, or asks for them by copy_async.
template <int R, class Put>
__device__ __forceinline__ void put_rows(const Put& put, unsigned char* memory) {
  constexpr int kParts = kUnitChannels / 8, kRows = kUnitThreads / kParts;
  const int thread = static_cast<int>(threadIdx.x);
  unsigned char* own = memory + thread / kParts * kUnitRow + thread % kParts * 16;
#pragma unroll
  for (int i = 0; i < kUnitTokens / kRows; ++i) put(token_of_row<R, false>(kRows * i), own + kRows * i * kUnitRow);
}

// All threads must come here.
template <int R, class Put>
__device__ __forceinline__ void tokens_in(const Put& put, const Units& to, int line, int channel, int unit,
                                          unsigned char* memory, float* room) {
  put_rows<R>(put, memory);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncthreads();
  const UnitScales<false> scales{room};
  Turned turned;
  turned.read_rows(memory);
  turned.find_largest(scales);
  __syncthreads();
  const std::int64_t first = to.number<R>(line, channel);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kUnitChannels) scales.finish(thread, to.scales + first + thread * WholeShape<R>::kTiles + unit);
  __syncthreads();
  turned.scale(scales);
  turned.write_units(memory);
  __syncthreads();
  store_units<R>(memory, to.data + (first + unit) * 32);
}

// Back, of results in 16 bits, `from` the first channel's, to rows in shared memory. All threads must come here;
// `phase` counts how often they did. The mbarrier waits for one thread.
template <int R>
__device__ __forceinline__ void units_to_rows(const uint4* from, unsigned char* memory, std::uint64_t* barrier,
                                              int phase) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint32_t waited = ptx::shared_address(barrier);
  if (thread == 0) ptx::mbarrier_arrive_expect(waited, 512 * kUnitChannels);
  if (moves_units()) {
    const int c = moved_channel();
    ptx::copy_bulk(ptx::shared_address(memory + c * kStagedUnit), from + c * 32 * WholeShape<R>::kTiles, 512, waited);
  }
  ptx::mbarrier_wait(waited, static_cast<std::uint32_t>(phase % 2));
  Turned turned;
  turned.read_units(memory);
  __syncthreads();
  turned.write_rows(memory);
  __syncthreads();
}
// store(more, values) gets 16 bytes of bf16.
template <int R, class Store>
__device__ __forceinline__ void results_out(const Store& store, const unsigned char* memory) {
  constexpr int kParts = kUnitChannels / 8, kRows = kUnitThreads / kParts;
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned char* own = memory + thread / kParts * kUnitRow + thread % kParts * 16;
#pragma unroll
  for (int i = 0; i < kUnitTokens / kRows; ++i) {
    store(token_of_row<R, true>(kRows * i), *reinterpret_cast<const uint4*>(own + kRows * i * kUnitRow));
  }
}
// The filter's gradient, of f16: `by` are factors of a thread's four channels, and store() gets these.
template <int R, class Store>
__device__ __forceinline__ void sums_out(float4 by, const Store& store, const unsigned char* memory) {
  constexpr int kParts = kUnitChannels / 4, kRows = kUnitThreads / kParts;
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned char* own = memory + thread / kParts * kUnitRow + thread % kParts * 8;
#pragma unroll 2
  for (int i = 0; i < kUnitTokens / kRows; ++i) {
    const uint2 words = *reinterpret_cast<const uint2*>(own + kRows * i * kUnitRow);
    const float2 low = ptx::unpack_f16(words.x), high = ptx::unpack_f16(words.y);
    store(token_of_row<R, true>(kRows * i), make_float4(low.x * by.x, low.y * by.y, high.x * by.z, high.y * by.w));
  }
}

#endif

}  // namespace flashgla::ops::long_convolution::cuda

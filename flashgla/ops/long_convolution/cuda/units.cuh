// Rows of channels as they lie in memory to what tensor cores take of a channel (matrices.cuh), and back. A unit is
// half of a quad: 256 tokens of a channel, 32 lanes' words of four pairs. Tokens and filters go to f16, scaled by
// powers of two such that nothing leaves its range: a unit's tokens come below 2^-4, the magnitudes of a unit of a
// filter add up to less than 2^8, and a channel's units are brought to one scale later.
#pragma once

#include "flashgla/ops/long_convolution/cuda/call.cuh"
#include "flashgla/ops/long_convolution/cuda/complex.cuh"
#include "flashgla/ops/long_convolution/cuda/matrices.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kUnitTokens = 256, kUnitChannels = 32, kUnitThreads = 256, kUnitWarps = kUnitThreads / 32;
// In shared memory rows of 32 channels, apart such that eight rows' pieces of 16 bytes are in banks of their own.
constexpr int kUnitRow = 80, kUnitBytes = kUnitTokens * kUnitRow;
constexpr int kUnitScalesAt = kUnitWarps * kUnitChannels, kUnitRoomBytes = (kUnitScalesAt + kUnitChannels) * 4;

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

// Token of a row in shared memory: [s1][t1 half][column][t1], of results [s1][t1 half][t1][column]. Sums of rows that
// have no bit in common are rows of sums.
template <int R, bool kResults>
__device__ __forceinline__ constexpr int token_of_row(int row) {
  const int low = row % 8, high = row / 8 % 8, t1 = row / 64 % 2 * 8 + (kResults ? high : low),
            column = kResults ? low : high;
  return 256 * R * t1 + 256 * (column % R) + column / R + row / 128 * 16;
}
template <int R>
__device__ __forceinline__ int token_of_unit(int unit) {
  const int quad = unit / 2;
  return 16 * (2 * (quad % 4) + unit % 2 * 8) + quad / 4 * WholeShape<R>::kTogether;
}

// Of a unit's channels their magnitudes' largest, or of a filter their sum, and what scales them: `room` gets the
// warps' of these, then the factors, a filter's in f32 and tokens' in bf16; memory what takes numbers back.
template <bool kFilter>
struct UnitScales {
  float* room;

  // A warp's, of channel c.
  __device__ __forceinline__ float& of_warp(int warp, int c) const { return room[warp * kUnitChannels + c]; }
  // One warp's lanes combine them. `to` is the lane's channel's.
  __device__ __forceinline__ void finish(int lane, float* to) const {
    float all = of_warp(0, lane);
#pragma unroll
    for (int w = 1; w < kUnitWarps; ++w) all = kFilter ? all + of_warp(w, lane) : fmaxf(all, of_warp(w, lane));
    const Scale both = Scale::below(Scale::field_of(all), kFilter ? 8 : -4);
    *to = all == 0.0f ? 0.0f : both.from * (kFilter ? 256.0f : 1.0f);
    if (kFilter) {
      room[kUnitScalesAt + lane] = both.to;
    } else {
      reinterpret_cast<__nv_bfloat16*>(room + kUnitScalesAt)[lane] = __float2bfloat16_rn(both.to);
    }
  }
};

// From rows in shared memory to lanes' words in `to`, the first channel's.
template <int R>
__device__ __forceinline__ void write_unit(std::uint32_t rows, uint4* to) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  rows += static_cast<std::uint32_t>(((lane / 8 * 8 + warp) * 8 + lane % 8) * kUnitRow);
  to += (lane / 4) * 32 * WholeShape<R>::kTiles + warp * 4 + lane % 4;
#pragma unroll
  for (int i = 0; i < kUnitChannels / 8; ++i) {
    std::uint32_t words[4];  // [s1][t1 half]
    ptx::load_matrix_4_transposed(words, rows + 16 * i);
    to[i * 8 * 32 * WholeShape<R>::kTiles] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// load(more) is 16 bytes of the channels of the thread's first token and `more`. All threads must come here.
template <int R, class Load>
__device__ __forceinline__ void filter_in(const Load& load, const Units& to, int channel, int unit,
                                          unsigned char* memory, float* room) {
  constexpr int kRows = kUnitThreads / 8, kSteps = kUnitTokens / kRows;
  const int thread = static_cast<int>(threadIdx.x), part = thread % 8, lane = thread % 32;
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
    own += __shfl_xor_sync(0xffffffffu, own, 8);
    if (lane < 8) scales.of_warp(thread / 32, part * 4 + c) = own;
  }
  __syncthreads();
  const std::int64_t first = to.number<R>(0, channel);
  if (thread < 32) scales.finish(thread, to.scales + first + thread * WholeShape<R>::kTiles + unit);
  __syncthreads();
  const float4 by = reinterpret_cast<const float4*>(room + kUnitScalesAt)[part];
  unsigned char* rows = memory + thread / 8 * kUnitRow + part * 8;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    *reinterpret_cast<uint2*>(rows + kRows * i * kUnitRow) =
        make_uint2(ptx::pack_f16(__uint_as_float(raw[i].x) * by.x, __uint_as_float(raw[i].y) * by.y),
                   ptx::pack_f16(__uint_as_float(raw[i].z) * by.z, __uint_as_float(raw[i].w) * by.w));
  }
  __syncthreads();
  write_unit<R>(ptx::shared_address(memory), to.data + (first + unit) * 32);
}

template <int R, class Load>
__device__ __forceinline__ void tokens_in(const Load& load, const Units& to, int line, int channel, int unit,
                                          unsigned char* memory, float* room) {
  constexpr int kRows = kUnitThreads / 4, kSteps = kUnitTokens / kRows;
  const auto as_two = [](std::uint32_t word) { return *reinterpret_cast<const __nv_bfloat162*>(&word); };
  const auto of_two = [](__nv_bfloat162 two) { return *reinterpret_cast<const std::uint32_t*>(&two); };
  const int thread = static_cast<int>(threadIdx.x), part = thread % 4, lane = thread % 32;
  const UnitScales<false> scales{room};
  uint4 raw[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) raw[i] = load(token_of_row<R, false>(kRows * i));
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    __nv_bfloat162 own = __habs2(as_two((&raw[0].x)[c]));
#pragma unroll
    for (int i = 1; i < kSteps; ++i) own = __hmax2(own, __habs2(as_two((&raw[i].x)[c])));
#pragma unroll
    for (int apart = 16; apart >= 4; apart /= 2) {
      own = __hmax2(own, as_two(__shfl_xor_sync(0xffffffffu, of_two(own), apart)));
    }
    if (lane < 4) {
      scales.of_warp(thread / 32, part * 8 + 2 * c) = __low2float(own);
      scales.of_warp(thread / 32, part * 8 + 2 * c + 1) = __high2float(own);
    }
  }
  __syncthreads();
  const std::int64_t first = to.number<R>(line, channel);
  if (thread < 32) scales.finish(thread, to.scales + first + thread * WholeShape<R>::kTiles + unit);
  __syncthreads();
  const uint4 by = reinterpret_cast<const uint4*>(room + kUnitScalesAt)[part];
  unsigned char* rows = memory + thread / 4 * kUnitRow + part * 16;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    uint4 row;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 both = ptx::unpack_bf16(of_two(__hmul2(as_two((&raw[i].x)[c]), as_two((&by.x)[c]))));
      (&row.x)[c] = ptx::pack_f16(both.x, both.y);
    }
    *reinterpret_cast<uint4*>(rows + kRows * i * kUnitRow) = row;
  }
  __syncthreads();
  write_unit<R>(ptx::shared_address(memory), to.data + (first + unit) * 32);
}

// Back, of results in bf16: load(i) is a lane's words of its channel of eight channels, and store(more, values) gets 16
// bytes. All threads must come here.
template <int R, class Load, class Store>
__device__ __forceinline__ void results_out(const Load& load, const Store& store, unsigned char* memory) {
  constexpr int kPieces = kUnitChannels / 8, kRows = kUnitThreads / 4;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const std::uint32_t rows =
      ptx::shared_address(memory) + static_cast<std::uint32_t>(((lane / 8 * 8 + warp) * 8 + lane % 8) * kUnitRow);
  uint4 raw[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) raw[i] = load(i);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    // [s1][t1 half], pairs of columns
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::store_matrix_4_transposed(rows + 16 * i, raw[i].x, raw[i].y, raw[i].z, raw[i].w);
#endif
  }
  __syncthreads();
  const unsigned char* own = memory + thread / 4 * kUnitRow + thread % 4 * 16;
#pragma unroll
  for (int i = 0; i < kUnitTokens / kRows; ++i) {
    store(token_of_row<R, true>(kRows * i), *reinterpret_cast<const uint4*>(own + kRows * i * kUnitRow));
  }
}

// What kernels know of a call. `x` gets tokens of `from`, x's or, of gradients, dy's, and in their place results for
// `to`.
struct WholeCall {
  Call<__nv_bfloat16> call;
  Lines<__nv_bfloat16> from, to;
  Units filter, x;
  bool gradients;
};

// Units of a group that come, the filter's first, or those that leave.
template <int R, bool kResults>
int unit_rows(const WholeCall& whole) {
  return static_cast<int>(whole.call.lines + (kResults ? 0 : 1)) * WholeShape<R>::kTiles;
}

// Row number `row` of a group's units that come or, kResults, of those that leave. kPlain: rows are whole pieces of 16
// bytes of one tensor; else channels are read and written one by one, and there may be tokens before the call's.
template <int R, bool kPlain, bool kResults>
class UnitTask {
 public:
  __device__ __forceinline__ UnitTask(const WholeCall& whole, int row, int group)
      : whole_(whole), thread_(static_cast<int>(threadIdx.x)), channel_(group * kUnitChannels) {
    constexpr int kUnits = WholeShape<R>::kTiles;
    of_filter_ = !kResults && row < kUnits;
    unit_ = row % kUnits;
    line_ = row / kUnits - (kResults ? 0 : 1);
    token_ = token_of_unit<R>(unit_) + token_of_row<R, kResults>(thread_ / (of_filter_ ? 8 : 4));
    own_channel_ = channel_ + (of_filter_ ? thread_ % 8 * 4 : thread_ % 4 * 8);
  }

  __device__ __forceinline__ void run(unsigned char* memory, float* room) const {
    if constexpr (kResults) {
      results_out<R>([&](int i) { return __ldcg(result(i)); }, [&](int more, uint4 values) { store_row(more, values); },
                     memory);
    } else if (of_filter_) {
      filter_in<R>([&](int more) { return filter_row(more); }, whole_.filter, channel_, unit_, memory, room);
    } else {
      tokens_in<R>([&](int more) { return token_row(more); }, whole_.x, line_, channel_, unit_, memory, room);
    }
  }

 private:
  __device__ __forceinline__ const uint4* result(int i) const {
    const int lane = thread_ % 32, channel = channel_ + 8 * i + lane / 4;
    return whole_.x.data + (whole_.x.number<R>(line_, channel) + unit_) * 32 + thread_ / 32 * 4 + lane % 4;
  }
  __device__ __forceinline__ uint4 filter_row(int more) const {
    const auto& call = whole_.call;
    const int row = token_ + more, d = own_channel_;
    uint4 raw{};
    if (kPlain && row < call.rows) {
      raw = __ldcs(reinterpret_cast<const uint4*>(call.filter + row * call.channels + d));
    }
    auto* words = &raw.x;
    if (!kPlain && row < call.rows) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (d + c < call.channels) words[c] = __float_as_uint(call.filter[row * call.channels + d + c]);
      }
    }
    if (more == 0 && token_ == 0) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (kPlain || d + c < call.channels) words[c] = __float_as_uint(__uint_as_float(words[c]) + call.skip[d + c]);
      }
    }
    return raw;
  }
  __device__ __forceinline__ uint4 token_row(int more) const {
    const auto& call = whole_.call;
    if constexpr (kPlain) {
      if (token_ + more >= call.length) return {};
      return __ldcs(reinterpret_cast<const uint4*>(whole_.from.at(line_, token_ + more, own_channel_)));
    } else {
      const Place place = call.place_of(line_);
      const std::int64_t t = token_ + more - place.past;
      uint4 all;
#pragma unroll
      for (int c = 0; c < 8; c += 2) {
        float values[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int d = own_channel_ + c + i;
          if (d >= call.channels) continue;
          if (!whole_.gradients) values[i] = call.token(place, token_ + more, d);
          if (whole_.gradients && t >= 0 && t < place.length) values[i] = to_float(*whole_.from.at(line_, t, d));
        }
        (&all.x)[c / 2] = ptx::pack_bf16(values[0], values[1]);
      }
      return all;
    }
  }
  __device__ __forceinline__ void store_row(int more, uint4 values) const {
    const auto& call = whole_.call;
    if constexpr (kPlain) {
      if (token_ + more < call.length) {
        __stcs(reinterpret_cast<uint4*>(whole_.to.at(line_, token_ + more, own_channel_)), values);
      }
    } else {
      const Place place = call.place_of(line_);
      const std::int64_t t = token_ + more - place.past;
      if (t < 0 || t >= place.length || !place.by_transforms()) return;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (own_channel_ + c >= call.channels) continue;
        const std::uint32_t both = (&values.x)[c / 2];
        *whole_.to.at(line_, t, own_channel_ + c) =
            __ushort_as_bfloat16(static_cast<unsigned short>(c % 2 == 0 ? both : both >> 16));
      }
    }
  }

  const WholeCall& whole_;
  int thread_, channel_, line_, own_channel_, unit_, token_;  // own: the thread's first in rows
  bool of_filter_;
};

template <int R, bool kPlain, bool kResults>
__global__ void __launch_bounds__(kUnitThreads) units_kernel(const __grid_constant__ WholeCall whole) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(16) unsigned char memory[kUnitBytes];
  __shared__ __align__(16) float room[kUnitRoomBytes / 4];
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next();
  const int number = static_cast<int>(blockIdx.x), groups = static_cast<int>(whole.x.channels) / kUnitChannels,
            row = number / groups;
  UnitTask<R, kPlain, kResults>(whole, row, number - row * groups).run(memory, room);
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

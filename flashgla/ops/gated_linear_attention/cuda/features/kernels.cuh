// Kernels before and after the operator without features, and what those of the normaliser (normaliser.cuh) share with
// them. Equations: features/README.md.
// A block of 256 threads has one chunk, one head and, by turns, tiles of 64 channels: warp w tokens 8w .. 8w + 7, lane
// l channels 2l and 2l + 1.
#pragma once

#include <type_traits>

#include "flashgla/ops/gated_linear_attention/cuda/tiles/tile.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::features {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = kChunk / kWarps, kWidth = 64;

// [B,T,heads,channels]
struct Tokens {
  Strided view;
  int channels = 0;
};

__device__ __forceinline__ float2 unpack_two(const float* at) { return *reinterpret_cast<const float2*>(at); }
__device__ __forceinline__ float2 unpack_two(const __nv_bfloat16* at) {
  return ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(at));
}
__device__ __forceinline__ float2 unpack_two(const __half* at) {
  return ptx::unpack_f16(*reinterpret_cast<const std::uint32_t*>(at));
}
__device__ __forceinline__ void pack_two(float* at, float2 x) { *reinterpret_cast<float2*>(at) = x; }
__device__ __forceinline__ void pack_two(__nv_bfloat16* at, float2 x) {
  *reinterpret_cast<std::uint32_t*>(at) = ptx::pack_bf16(x.x, x.y);
}
__device__ __forceinline__ void pack_two(__half* at, float2 x) {
  *reinterpret_cast<std::uint32_t*>(at) = ptx::pack_f16(x.x, x.y);
}

__device__ __forceinline__ void begin_kernel() {
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next_of_waves();
}

// Where a block is, and kRows tokens of a warp of it.
struct Place {
  std::int64_t chunk, batch, token;  // token: the warp's first, in the row of the batch
  int rows;                          // tokens of the warp, 0 .. 8
  int chunk_rows;                    // of the chunk; 0 beyond the last
  int last_row;                      // the chunk's last token, counted from the warp's first: may be negative
  int head, tile;

  // With the rows that are `count` behind these.
  __device__ __forceinline__ Place behind(int count) const {
    Place later = *this;
    later.token += count;
    later.last_row -= count;
    later.rows = max(0, min(kRows, later.last_row + 1));
    return later;
  }
};
// row: the chunk's that is the warp's first.
__device__ __forceinline__ Place place_of(const Sequences& s, int heads, int tiles, int row) {
  Place at{};
  at.tile = static_cast<int>(blockIdx.x % tiles);
  at.head = static_cast<int>(blockIdx.x / tiles % heads);
  at.chunk = blockIdx.x / tiles / heads;
  if (at.chunk >= s.most_chunks) return at;
  const std::int64_t n = sequence_of_chunk(s, at.chunk);
  if (n < 0) return at;
  const Span span = span_of(s, n);
  const std::int64_t first = (at.chunk - span.chunk_begin) * kChunk, left = span.length - first;
  at.chunk_rows = static_cast<int>(min(static_cast<std::int64_t>(kChunk), left));
  at.rows = max(0, min(kRows, at.chunk_rows - row));
  at.last_row = at.chunk_rows - 1 - row;
  at.batch = span.batch;
  at.token = span.begin + first + row;
  return at;
}
__device__ __forceinline__ Place place_of(const Sequences& s, int heads, int tiles) {
  return place_of(s, heads, tiles, kRows * (static_cast<int>(threadIdx.x) / 32));
}

// Two channels of each of the warp's tokens as they lie in memory: loaded before they are wanted, so that a thread's
// loads are under way together. Tokens beyond the chunk hold what its last one holds, channels beyond the last pair
// what that holds; only the channel after an odd last one is zero. kPairs: pairs lie in one aligned piece each.
template <class T, bool kPairs>
struct Loaded {
  using Pair = std::conditional_t<sizeof(T) == 4, float2, std::uint32_t>;
  Pair pairs[kRows];

  __device__ __forceinline__ void load(const Tokens& from, const Place& at, int head, int channel) {
    const T* row = static_cast<const T*>(from.view.data) + at.batch * from.view.batch +
                   (at.token + min(0, at.last_row)) * from.view.token + head * from.view.head +
                   min(channel, from.channels - (kPairs ? 2 : 1));
    const int to_second = channel + 1 < from.channels ? 1 : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kPairs) {
        pairs[i] = *reinterpret_cast<const Pair*>(row);
      } else {
        pack_two(reinterpret_cast<T*>(&pairs[i]),
                 make_float2(Element<T>::load(row), Element<T>::load(row + to_second)));
      }
      row = anew(i < at.last_row ? row + from.view.token : row);  // one address at a time: not eight kept
      __builtin_assume(__isGlobal(row));                          // which `anew` hides
    }
    if (!kPairs && channel + 1 == from.channels) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) pack_two(reinterpret_cast<T*>(&pairs[i]), make_float2((*this)[i].x, 0.0f));
    }
  }
  __device__ __forceinline__ float2 operator[](int i) const {
    return unpack_two(reinterpret_cast<const T*>(&pairs[i]));
  }
};

// Where the warp's rows of a result go; those that do not exist are not written.
template <class T, bool kPairs>
struct Out {
  T* place;
  std::int64_t step;
  int rows, left;
  __device__ __forceinline__ Out(const Tokens& to, const Place& at, int head, int channel)
      : place(static_cast<T*>(to.view.data) + at.batch * to.view.batch + at.token * to.view.token +
              head * to.view.head + channel),
        step(anew(to.view.token)),  // not eight offsets kept through the loop of the caller
        rows(to.view.data == nullptr || channel >= to.channels ? 0 : at.rows),
        left(to.channels - channel) {}
  __device__ __forceinline__ void put(int i, float2 x) const {
    if (i >= rows) return;
    if constexpr (kPairs) {
      pack_two(place + i * step, x);
    } else {
      Element<T>::store(place + i * step, x.x);
      if (left > 1) Element<T>::store(place + i * step + 1, x.y);
    }
  }
};

// The value as T holds it.
__device__ __forceinline__ float2 as_stored(float2 x, float) { return x; }
__device__ __forceinline__ float2 as_stored(float2 x, __nv_bfloat16) {
  return ptx::unpack_bf16(ptx::pack_bf16(x.x, x.y));
}
__device__ __forceinline__ float2 as_stored(float2 x, __half) { return ptx::unpack_f16(ptx::pack_f16(x.x, x.y)); }

__device__ __forceinline__ float2 plus(float2 x, float2 y) { return make_float2(x.x + y.x, x.y + y.y); }
__device__ __forceinline__ float2 times(float2 x, float2 y) { return make_float2(x.x * y.x, x.y * y.y); }
__device__ __forceinline__ float2 times(float2 x, float factor) { return make_float2(x.x * factor, x.y * factor); }
// x factor + y
__device__ __forceinline__ float2 fma_both(float2 x, float factor, float2 y) {
  return make_float2(fmaf(x.x, factor, y.x), fmaf(x.y, factor, y.y));
}

// phi(x) = max(x, lower) + weight e^min(x, 0): identity -inf, 0; relu 0, 0; elu + 1 0, 1. NaN stays NaN.
struct Map {
  float lower, weight;
};
// e^x of x <= 0, as precisely as T asks for.
__device__ __forceinline__ float power(float x, float) { return expf(x); }
template <class T>
__device__ __forceinline__ float power(float x, T) {
  return ptx::exp2(x * kLog2E);
}
template <class T>
__device__ __forceinline__ float phi(const Map& map, float x, float& slope) {
  const float e = power(fminf(x, 0.0f), T{});
  slope = map.weight != 0.0f ? e : x > map.lower ? 1.0f : 0.0f;
  return fmaf(map.weight, e, ptx::larger_or_nan(x, map.lower));
}
template <class T>
__device__ __forceinline__ float2 phi(const Map& map, float2 x, float2& slope) {
  return make_float2(phi<T>(map, x.x, slope.x), phi<T>(map, x.y, slope.y));
}
template <class T>
__device__ __forceinline__ float2 phi(const Map& map, float2 x) {
  float2 unused;
  return phi<T>(map, x, unused);
}

__device__ __forceinline__ float2 two_floats(const float* row, int channel, int channels) {
  return make_float2(channel < channels ? row[channel] : 0.0f, channel + 1 < channels ? row[channel + 1] : 0.0f);
}
__device__ __forceinline__ void store_two_floats(float* row, int channel, int channels, float2 x) {
  if (channel < channels) row[channel] = x.x;
  if (channel + 1 < channels) row[channel + 1] = x.y;
}

// One value a warp and channel of a tile.
using WarpSums = float2[kWarps][32];

// Sums over all warps. One barrier.
__device__ __forceinline__ float2 sum_of_warps(WarpSums& sums, float2 mine) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  sums[warp][lane] = mine;
  __syncthreads();
  float2 all = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all = plus(all, sums[w][lane]);
  return all;
}

// What a kernel that takes q and k in one launch does with each of them.
struct Mapped {
  Tokens x, y;
  int heads;
  float* sums;  // over each chunk [chunks, heads, channels]; null: not wanted
};
struct MappedPair {
  Mapped of[2];
};

// y = phi(x) (without data: not wanted), which may be of another type, and its sums. Grid: chunks x heads x tiles, of
// each.
template <class T, class To, bool kPairs>
__global__ void __launch_bounds__(kThreads)
    map_kernel(const __grid_constant__ Sequences s, const __grid_constant__ MappedPair pair, Map map) {
  begin_kernel();
  __shared__ WarpSums warp_sums;
  const Mapped& m = pair.of[blockIdx.y];
  const Place at = place_of(s, m.heads, (m.x.channels + kWidth - 1) / kWidth);
  if (at.chunk_rows == 0) return;
  const int warp = threadIdx.x / 32, channel = kWidth * at.tile + 2 * static_cast<int>(threadIdx.x % 32);
  Loaded<T, kPairs> x;
  x.load(m.x, at, at.head, channel);
  const Out<To, kPairs> out(m.y, at, at.head, channel);
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float2 y = as_stored(phi<T>(map, x[i]), To{});
    out.put(i, y);
    if (i < at.rows) sum = plus(sum, y);
  }
  if (m.sums == nullptr) return;
  const float2 all = sum_of_warps(warp_sums, sum);
  if (warp == 0) store_two_floats(m.sums + (at.chunk * m.heads + at.head) * m.x.channels, channel, m.x.channels, all);
}

// y *= the map's slope at x. Grid as above; without y: not wanted.
template <class T, bool kPairs>
__global__ void __launch_bounds__(kThreads)
    slope_kernel(const __grid_constant__ Sequences s, const __grid_constant__ MappedPair pair, Map map) {
  begin_kernel();
  const Mapped& m = pair.of[blockIdx.y];
  const Place at = place_of(s, m.heads, (m.x.channels + kWidth - 1) / kWidth);
  if (at.chunk_rows == 0 || m.y.view.data == nullptr) return;
  const int channel = kWidth * at.tile + 2 * static_cast<int>(threadIdx.x % 32);
  Loaded<T, kPairs> x, dy;
  x.load(m.x, at, at.head, channel);
  dy.load(m.y, at, at.head, channel);
  const Out<T, kPairs> out(m.y, at, at.head, channel);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float2 slope;
    phi<T>(map, x[i], slope);
    out.put(i, times(dy[i], slope));
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::features

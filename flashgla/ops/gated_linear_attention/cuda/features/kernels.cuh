// Kernels before and after the operator without features. Equations: features/README.md.
// A block of 256 threads has one chunk, one head and, by turns, tiles of 64 channels: warp w tokens 8w .. 8w + 7, lane
// l channels 2l and 2l + 1.
#pragma once

#include <limits>
#include <type_traits>
#include <utility>

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

// Where a block and a warp of it are.
struct Place {
  std::int64_t chunk, batch, token;  // token: the warp's first, in the row of the batch
  int rows;                          // tokens of the warp, 0 .. 8
  int chunk_rows;                    // of the chunk; 0 beyond the last
  int last_row;                      // the chunk's last token, counted from the warp's first: may be negative
  int head, tile;
};
__device__ __forceinline__ Place place_of(const Sequences& s, int heads, int tiles) {
  Place at{};
  at.tile = static_cast<int>(blockIdx.x % tiles);
  at.head = static_cast<int>(blockIdx.x / tiles % heads);
  at.chunk = blockIdx.x / tiles / heads;
  if (at.chunk >= s.most_chunks) return at;
  const std::int64_t n = sequence_of_chunk(s, at.chunk);
  if (n < 0) return at;
  const Span span = span_of(s, n);
  const std::int64_t first = (at.chunk - span.chunk_begin) * kChunk, left = span.length - first;
  const int row = kRows * (static_cast<int>(threadIdx.x) / 32);
  at.chunk_rows = static_cast<int>(min(static_cast<std::int64_t>(kChunk), left));
  at.rows = max(0, min(kRows, at.chunk_rows - row));
  at.last_row = at.chunk_rows - 1 - row;
  at.batch = span.batch;
  at.token = span.begin + first + row;
  return at;
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

// Sums over the warps before this one (kLater: after it) and, in `all`, over all of them. Two barriers.
template <bool kLater = false>
__device__ __forceinline__ float2 sum_of_others(WarpSums& sums, float2 mine, float2& all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
  sums[warp][lane] = mine;
  __syncthreads();
  float2 others = make_float2(0.0f, 0.0f);
  all = others;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float2 x = sums[w][lane];
    if (kLater ? w > warp : w < warp) others = plus(others, x);
    all = plus(all, x);
  }
  return others;
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

// y = phi(x) (without data: not wanted), and its sums. Grid: chunks x heads x tiles, of each.
template <class T, bool kPairs>
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
  const Out<T, kPairs> out(m.y, at, at.head, channel);
  float2 sum = make_float2(0.0f, 0.0f), all;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float2 y = as_stored(phi<T>(map, x[i]), T{});
    out.put(i, y);
    if (i < at.rows) sum = plus(sum, y);
  }
  if (m.sums == nullptr) return;
  sum_of_others(warp_sums, sum, all);
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

// y = x in another type. Grid: chunks x heads x tiles.
template <class From, class To, bool kPairs>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ Sequences s, const __grid_constant__ Tokens x,
                   const __grid_constant__ Tokens y, int heads) {
  begin_kernel();
  const Place at = place_of(s, heads, (x.channels + kWidth - 1) / kWidth);
  if (at.chunk_rows == 0) return;
  const int channel = kWidth * at.tile + 2 * static_cast<int>(threadIdx.x % 32);
  Loaded<From, kPairs> from;
  from.load(x, at, at.head, channel);
  const Out<To, kPairs> out(y, at, at.head, channel);
#pragma unroll
  for (int i = 0; i < kRows; ++i) out.put(i, from[i]);
}

// ---- the normaliser ----

constexpr int kScanLanes = 32;  // channels of a block, and parts that it cuts the chunks into

// In place: sums over chunks become sums before the chunk (backwards: after it), beginning with `start`. sums: [chunks,
// G, group, K], added over `group`; the result goes to its first entry. start, end: [N,G,K] or null (zeros; not
// wanted). Grid: N x G x ceil(K / 32); threads: parts x channels.
template <bool kBackwards>
__global__ void __launch_bounds__(kScanLanes* kScanLanes)
    scan_chunks_kernel(const __grid_constant__ Sequences s, float* sums, int heads, int group, int channels,
                       const float* start, float* end) {
  begin_kernel();
  __shared__ float totals[kScanLanes][kScanLanes];
  const int tiles = (channels + kScanLanes - 1) / kScanLanes;
  const int part = static_cast<int>(threadIdx.x) / kScanLanes, lane = static_cast<int>(threadIdx.x) % kScanLanes;
  const int channel = static_cast<int>(blockIdx.x % tiles) * kScanLanes + lane;
  const std::int64_t cell = blockIdx.x / tiles, head = cell % heads, n = cell / heads;
  const Span span = span_of(s, n);
  const std::int64_t chunks = (span.length + kChunk - 1) / kChunk, each = (chunks + kScanLanes - 1) / kScanLanes;
  const std::int64_t first = min(each * part, chunks), last = min(first + each, chunks);
  const bool inside = channel < channels;
  const auto place = [&](std::int64_t i) {
    const std::int64_t chunk = span.chunk_begin + (kBackwards ? chunks - 1 - i : i);
    return sums + (chunk * heads + head) * group * channels + channel;
  };
  const auto sum_at = [&](std::int64_t i) {
    float sum = 0.0f;
    for (int g = 0; g < group; ++g) sum += place(i)[static_cast<std::int64_t>(g) * channels];
    return sum;
  };
  float total = 0.0f;
  if (inside) {
    for (std::int64_t i = first; i < last; ++i) total += sum_at(i);
  }
  totals[part][lane] = total;
  __syncthreads();
  if (!inside) return;
  float run = start == nullptr ? 0.0f : start[cell * channels + channel];
  for (int before = 0; before < part; ++before) run += totals[before][lane];
  if (end != nullptr && part == kScanLanes - 1) end[cell * channels + channel] = run + total;
  for (std::int64_t i = first; i < last; ++i) {
    const float sum = sum_at(i);
    *place(i) = run;
    run += sum;
  }
}

// Between the normaliser's kernels. Per token and query head: [chunks, H, 64].
struct Normaliser {
  const float* z_starts;            // [chunks, G, K]: z before the chunk
  float* inverses = nullptr;        // 1 / (phi(q) . z + epsilon)
  float* d_denominators = nullptr;  // dd; 0 beyond the chunk's tokens
  float* dz_sums = nullptr;  // [chunks, H, K]: sum over the chunk of phi(q) dd; then, per kv head, what follows it
};

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}
// One value of each of the warp's tokens, `place` that of the first: each in one lane's register.
struct RowValues {
  float mine;
  __device__ __forceinline__ void load(const float* place) { mine = place[threadIdx.x % kRows]; }
  __device__ __forceinline__ float operator[](int i) const { return __shfl_sync(0xffffffffu, mine, i); }
};

// phi(q) / d of every token to `out`, phi(k) read from `features`. kBackward: also what the backward needs. Grid:
// chunks x H.
template <class T, bool kPairs, bool kBackward>
__global__ void __launch_bounds__(kThreads, kPairs ? 3 : 2)
    divide_kernel(const __grid_constant__ Sequences s, const __grid_constant__ Tokens q,
                  const __grid_constant__ Tokens features, const __grid_constant__ Tokens out,
                  const __grid_constant__ Tokens o, const __grid_constant__ Tokens d_o,
                  const __grid_constant__ Normaliser w, Map map, int heads, int group) {
  begin_kernel();
  __shared__ WarpSums warp_sums;
  const int query_heads = heads * group, K = q.channels;
  const Place at = place_of(s, query_heads, 1);
  if (at.chunk_rows == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = at.head / group;
  const float* starts = w.z_starts + (at.chunk * heads + head) * K;
  Loaded<T, kPairs> x, y;
  float d[kRows] = {}, dd[kRows] = {};
  float2 all;
  if constexpr (kBackward) {
#pragma unroll 1
    for (int channel = 2 * lane; channel < o.channels; channel += kWidth) {
      x.load(o, at, at.head, channel);
      y.load(d_o, at, at.head, channel);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float2 a = x[i], b = y[i];
        dd[i] = fmaf(a.x, b.x, fmaf(a.y, b.y, dd[i]));
      }
    }
  }
  // x is q's tile from here on: the last one of this loop is the first of the next.
#pragma unroll 1
  for (int channel = 2 * lane; channel < K + 2 * lane; channel += kWidth) {
    y.load(features, at, head, channel);
    x.load(q, at, at.head, channel);
    const float2 start = two_floats(starts, channel, K);
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum = plus(sum, y[i]);
    float2 z = plus(sum_of_others(warp_sums, sum, all), start);
    if (channel >= K) continue;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      z = plus(z, y[i]);
      const float2 feature = phi<T>(map, x[i]);
      d[i] = fmaf(feature.x, z.x, fmaf(feature.y, z.y, d[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) d[i] = 1.0f / (sum_of_lanes(d[i]) + static_cast<float>(kNormalizerEpsilon));
  if constexpr (kBackward) {
    const std::int64_t token = (at.chunk * query_heads + at.head) * kChunk + kRows * warp;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      dd[i] = i < at.rows ? -sum_of_lanes(dd[i]) * d[i] : 0.0f;
      if (lane == 0) {
        w.inverses[token + i] = d[i];
        w.d_denominators[token + i] = dd[i];
      }
    }
  }
#pragma unroll 1
  for (int tile = (K + kWidth - 1) / kWidth - 1; tile >= 0; --tile) {
    const int channel = kWidth * tile + 2 * lane;
    const Out<T, kPairs> to(out, at, at.head, channel);
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float2 feature = phi<T>(map, x[i]);
      to.put(i, times(feature, d[i]));
      if constexpr (kBackward) sum = fma_both(feature, dd[i], sum);
    }
    if (tile > 0) x.load(q, at, at.head, channel - kWidth);
    if constexpr (kBackward) {
      sum_of_others(warp_sums, sum, all);
      if (warp == 0) store_two_floats(w.dz_sums + (at.chunk * query_heads + at.head) * K, channel, K, all);
    }
  }
}

// In place: dq from the gradient of phi(q) / d, dk from that through the numerators. Grid: chunks x G x tiles.
template <class T, bool kPairs>
__global__ void __launch_bounds__(kThreads, 2)
    join_kernel(const __grid_constant__ Sequences s, const __grid_constant__ Tokens q, const __grid_constant__ Tokens k,
                const __grid_constant__ Tokens dq, const __grid_constant__ Tokens dk,
                const __grid_constant__ Normaliser w, Map map, int heads, int group) {
  begin_kernel();
  __shared__ WarpSums warp_sums;
  const int query_heads = heads * group, K = q.channels;
  const Place at = place_of(s, heads, (K + kWidth - 1) / kWidth);
  if (at.chunk_rows == 0) return;
  const int warp = threadIdx.x / 32, channel = kWidth * at.tile + 2 * static_cast<int>(threadIdx.x % 32);
  // Everything of the first query head and of k is under way before anything is waited for.
  Loaded<T, kPairs> of_k, d_of_k, of_q, d_of_q;
  RowValues inverse, dd;
  const auto load_query = [&](int head) {
    of_q.load(q, at, head, channel);
    if (dq.view.data != nullptr) d_of_q.load(dq, at, head, channel);
    const std::int64_t token = (at.chunk * query_heads + head) * kChunk + kRows * warp;
    inverse.load(w.inverses + token);
    dd.load(w.d_denominators + token);
  };
  of_k.load(k, at, at.head, channel);
  load_query(at.head * group);
  const float2 start = two_floats(w.z_starts + (at.chunk * heads + at.head) * K, channel, K);

  float2 dz[kRows], sum = make_float2(0.0f, 0.0f), all;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    sum = plus(sum, as_stored(phi<T>(map, of_k[i]), T{}));
    dz[i] = make_float2(0.0f, 0.0f);
  }
  const float2 before = plus(sum_of_others(warp_sums, sum, all), start);
  for (int h = 0; h < group; ++h) {
    const int head = at.head * group + h;
    const Out<T, kPairs> out(dq, at, head, channel);
    float2 z = before;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      z = plus(z, as_stored(phi<T>(map, of_k[i]), T{}));
      float2 slope;
      const float d_denominator = dd[i];
      dz[i] = fma_both(phi<T>(map, of_q[i], slope), d_denominator, dz[i]);
      out.put(i, times(fma_both(d_of_q[i], inverse[i], times(z, d_denominator)), slope));
    }
    if (h + 1 < group) load_query(head + 1);
  }
  if (dk.view.data == nullptr) return;
  of_k.load(k, at, at.head, channel);  // again: what was worked out from it would be kept through the loop
  d_of_k.load(dk, at, at.head, channel);
#pragma unroll
  for (int i = kRows - 2; i >= 0; --i) dz[i] = plus(dz[i], dz[i + 1]);
  const float2 beyond = two_floats(w.dz_sums + (at.chunk * query_heads + at.head * group) * K, channel, K);
  const float2 after = plus(sum_of_others<true>(warp_sums, dz[0], all), beyond);
  const Out<T, kPairs> out(dk, at, at.head, channel);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float2 slope;
    phi<T>(map, of_k[i], slope);
    out.put(i, times(plus(d_of_k[i], plus(dz[i], after)), slope));
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::features

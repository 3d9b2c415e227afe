// Kernels before and after the operator without features, and the host's order of them. Equations: features.md.
//
// A block of 256 threads has one chunk, one head and, by turns, tiles of 64 channels: warp w tokens 8w .. 8w + 7, lane
// l channels 2l and 2l + 1.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "flashgla/base/cuda/device.h"
#include "flashgla/ops/gated_linear_attention/cuda/backward_tile.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/features.h"
#include "flashgla/ops/gated_linear_attention/cuda/value_gates.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = kChunk / kWarps, kWidth = 64;
constexpr unsigned kAll = 0xffffffffu;

// [B,T,heads,channels] for access by neighbouring channels.
struct Tokens {
  Strided view;
  int channels = 0;
  bool in_pairs = false;  // every pair (2i, 2i + 1) lies in one aligned piece
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
// loads are under way together. What lies outside is loaded from the chunk's last token or the last channels, and reads
// as zero.
template <class T>
struct Loaded {
  using Pair = std::conditional_t<sizeof(T) == 4, float2, std::uint32_t>;
  Pair pairs[kRows];
  int rows = 0, left = 0;

  __device__ __forceinline__ void load(const Tokens& from, const Place& at, int head, int channel) {
    rows = at.rows;
    left = from.channels - channel;
    const T* place = static_cast<const T*>(from.view.data) + at.batch * from.view.batch + at.token * from.view.token +
                     head * from.view.head;
    const std::int64_t step = anew(from.view.token);  // not eight offsets kept through the caller's loops
    if (from.in_pairs) {
      place += min(channel, from.channels - 2);
#pragma unroll
      for (int i = 0; i < kRows; ++i) pairs[i] = *reinterpret_cast<const Pair*>(place + min(i, at.last_row) * step);
    } else {
      const int x = min(channel, from.channels - 1), y = min(channel + 1, from.channels - 1);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const T* row = place + min(i, at.last_row) * step;
        pack_two(reinterpret_cast<T*>(&pairs[i]), make_float2(Element<T>::load(row + x), Element<T>::load(row + y)));
      }
    }
  }
  __device__ __forceinline__ float2 operator[](int i) const {
    const float2 both = unpack_two(reinterpret_cast<const T*>(&pairs[i]));
    return make_float2(i < rows && left > 0 ? both.x : 0.0f, i < rows && left > 1 ? both.y : 0.0f);
  }
};
// value(i): two channels of the warp's token i.
template <class T, class Value>
__device__ __forceinline__ void store(const Tokens& to, const Place& at, int head, int channel, Value value) {
  T* place = static_cast<T*>(to.view.data) + at.batch * to.view.batch + at.token * to.view.token + head * to.view.head +
             channel;
  const std::int64_t step = anew(to.view.token);
  const int left = to.channels - channel;
  if (left <= 0) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    T* row = place + i * step;
    if (i >= at.rows) return;
    const float2 x = value(i);
    if (to.in_pairs) {
      pack_two(row, x);
    } else {
      Element<T>::store(row, x.x);
      if (left > 1) Element<T>::store(row + 1, x.y);
    }
  }
}

// The value as T holds it.
__device__ __forceinline__ float2 as_stored(float2 x, float) { return x; }
__device__ __forceinline__ float2 as_stored(float2 x, __nv_bfloat16) {
  return ptx::unpack_bf16(ptx::pack_bf16(x.x, x.y));
}
__device__ __forceinline__ float2 as_stored(float2 x, __half) { return ptx::unpack_f16(ptx::pack_f16(x.x, x.y)); }

__device__ __forceinline__ float2 plus(float2 x, float2 y) { return make_float2(x.x + y.x, x.y + y.y); }
__device__ __forceinline__ float2 times(float2 x, float2 y) { return make_float2(x.x * y.x, x.y * y.y); }
// x factor + y
__device__ __forceinline__ float2 fma_both(float2 x, float factor, float2 y) {
  return make_float2(fmaf(x.x, factor, y.x), fmaf(x.y, factor, y.y));
}

// e^x of x <= 0, as precisely as T asks for.
__device__ __forceinline__ float power(float x, float) { return expf(x); }
template <class T>
__device__ __forceinline__ float power(float x, T) {
  return ptx::exp2(x * kLog2E);
}
// phi and its derivative; NaN stays NaN.
template <class T>
__device__ __forceinline__ float phi(FeatureMap map, float x) {
  if (map == FeatureMap::identity) return x;
  const float positive = ptx::larger_or_nan(x, 0.0f);
  return map == FeatureMap::relu ? positive : positive + power(fminf(x, 0.0f), T{});
}
template <class T>
__device__ __forceinline__ float slope(FeatureMap map, float x) {
  if (map == FeatureMap::identity) return 1.0f;
  return map == FeatureMap::relu ? (x > 0.0f ? 1.0f : 0.0f) : power(fminf(x, 0.0f), T{});
}
template <class T>
__device__ __forceinline__ float2 phi(FeatureMap map, float2 x) {
  return make_float2(phi<T>(map, x.x), phi<T>(map, x.y));
}
template <class T>
__device__ __forceinline__ float2 slope(FeatureMap map, float2 x) {
  return make_float2(slope<T>(map, x.x), slope<T>(map, x.y));
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
    if (kLater ? w > warp : w < warp) {
      others.x += x.x;
      others.y += x.y;
    }
    all.x += x.x;
    all.y += x.y;
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
template <class T>
__global__ void __launch_bounds__(kThreads)
    map_kernel(const __grid_constant__ Sequences s, const __grid_constant__ MappedPair pair, FeatureMap map) {
  __shared__ WarpSums warp_sums;
  const Mapped& m = pair.of[blockIdx.y];
  const Place at = place_of(s, m.heads, (m.x.channels + kWidth - 1) / kWidth);
  if (at.chunk_rows == 0) return;
  const int warp = threadIdx.x / 32, channel = kWidth * at.tile + 2 * static_cast<int>(threadIdx.x % 32);
  Loaded<T> x;
  float2 y[kRows], sum = make_float2(0.0f, 0.0f), all;
  x.load(m.x, at, at.head, channel);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    y[i] = as_stored(phi<T>(map, x[i]), T{});
    if (i < at.rows) {
      sum.x += y[i].x;
      sum.y += y[i].y;
    }
  }
  if (m.y.view.data != nullptr) store<T>(m.y, at, at.head, channel, [&](int i) { return y[i]; });
  if (m.sums == nullptr) return;
  sum_of_others(warp_sums, sum, all);
  if (warp == 0) store_two_floats(m.sums + (at.chunk * m.heads + at.head) * m.x.channels, channel, m.x.channels, all);
}

// y *= the map's slope at x. Grid as above; without y: not wanted.
template <class T>
__global__ void __launch_bounds__(kThreads)
    slope_kernel(const __grid_constant__ Sequences s, const __grid_constant__ MappedPair pair, FeatureMap map) {
  const Mapped& m = pair.of[blockIdx.y];
  const Place at = place_of(s, m.heads, (m.x.channels + kWidth - 1) / kWidth);
  if (at.chunk_rows == 0 || m.y.view.data == nullptr) return;
  const int channel = kWidth * at.tile + 2 * static_cast<int>(threadIdx.x % 32);
  Loaded<T> x, dy;
  x.load(m.x, at, at.head, channel);
  dy.load(m.y, at, at.head, channel);
  store<T>(m.y, at, at.head, channel, [&](int i) { return times(dy[i], slope<T>(map, x[i])); });
}

// y = x in another type. Grid: chunks x heads x tiles.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ Sequences s, const __grid_constant__ Tokens x,
                   const __grid_constant__ Tokens y, int heads) {
  const Place at = place_of(s, heads, (x.channels + kWidth - 1) / kWidth);
  if (at.chunk_rows == 0) return;
  const int channel = kWidth * at.tile + 2 * static_cast<int>(threadIdx.x % 32);
  Loaded<From> from;
  from.load(x, at, at.head, channel);
  store<To>(y, at, at.head, channel, [&](int i) { return from[i]; });
}

// ---- the normaliser ----

constexpr int kScanLanes = 32;  // channels of a block, and parts that it cuts the chunks into

// In place: sums over chunks become sums before the chunk (backwards: after it), beginning with `start`. sums: [chunks,
// G, group, K], added over `group`; the result goes to its first entry. start, end: [N,G,K] or null (zeros; not
// wanted). Grid: N x G x ceil(K / 32); threads: channels x parts.
template <bool kBackwards>
__global__ void __launch_bounds__(kScanLanes* kScanLanes)
    scan_chunks_kernel(const __grid_constant__ Sequences s, float* sums, int heads, int group, int channels,
                       const float* start, float* end) {
  __shared__ float totals[kScanLanes][kScanLanes];
  const int tiles = (channels + kScanLanes - 1) / kScanLanes, part = threadIdx.y;
  const int channel = static_cast<int>(blockIdx.x % tiles) * kScanLanes + threadIdx.x;
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
  totals[part][threadIdx.x] = total;
  __syncthreads();
  if (!inside) return;
  float run = start == nullptr ? 0.0f : start[cell * channels + channel];
  for (int before = 0; before < part; ++before) run += totals[before][threadIdx.x];
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
  float* d_denominators = nullptr;  // dd
  float* dz_sums = nullptr;  // [chunks, H, K]: sum over the chunk of phi(q) dd; then, per kv head, what follows it
};

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAll, x, distance);
  return x;
}

// phi(q) / d of every token to `out`, phi(k) read from `features`. With d_o: also what the backward needs. Grid: chunks
// x H.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    divide_kernel(const __grid_constant__ Sequences s, const __grid_constant__ Tokens q,
                  const __grid_constant__ Tokens features, const __grid_constant__ Tokens out,
                  const __grid_constant__ Tokens o, const __grid_constant__ Tokens d_o,
                  const __grid_constant__ Normaliser w, FeatureMap map, int heads, int group) {
  __shared__ WarpSums warp_sums;
  const int query_heads = heads * group, K = q.channels;
  const Place at = place_of(s, query_heads, 1);
  if (at.chunk_rows == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = at.head / group;
  const int tiles = (K + kWidth - 1) / kWidth;
  const bool backward = d_o.view.data != nullptr;
  const float* starts = w.z_starts + (at.chunk * heads + head) * K;
  // Each loop's next tile is under way while one is worked on, and the next loop's first.
  Loaded<T> x, y, next_x, next_y;
  y.load(features, at, head, 2 * lane);
  x.load(q, at, at.head, 2 * lane);
  float2 start = two_floats(starts, 2 * lane, K), all;
  float d[kRows] = {};
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int channel = kWidth * tile + 2 * lane;
    if (tile + 1 < tiles) {
      next_y.load(features, at, head, channel + kWidth);
      next_x.load(q, at, at.head, channel + kWidth);
    }
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum = plus(sum, y[i]);
    float2 z = plus(sum_of_others(warp_sums, sum, all), start);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      z = plus(z, y[i]);
      const float2 feature = phi<T>(map, x[i]);
      d[i] = fmaf(feature.x, channel < K ? z.x : 0.0f, d[i]);
      d[i] = fmaf(feature.y, channel + 1 < K ? z.y : 0.0f, d[i]);
    }
    if (tile + 1 < tiles) {
      x = next_x;
      y = next_y;
      start = two_floats(starts, channel + kWidth, K);
    }
  }
  // x is the last tile of q from here on.
  if (backward) {
    next_x.load(o, at, at.head, 2 * lane);
    next_y.load(d_o, at, at.head, 2 * lane);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) d[i] = 1.0f / (sum_of_lanes(d[i]) + static_cast<float>(kNormalizerEpsilon));

  float dd[kRows] = {};
  if (backward) {
    for (int channel = 2 * lane; channel < o.channels + 2 * lane; channel += kWidth) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float2 a = next_x[i], b = next_y[i];
        dd[i] = fmaf(a.x, b.x, fmaf(a.y, b.y, dd[i]));
      }
      if (channel + kWidth < o.channels + 2 * lane) {
        next_x.load(o, at, at.head, channel + kWidth);
        next_y.load(d_o, at, at.head, channel + kWidth);
      }
    }
    const std::int64_t token = (at.chunk * query_heads + at.head) * kChunk + kRows * warp;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      dd[i] = -sum_of_lanes(dd[i]) * d[i];
      if (i >= at.rows) dd[i] = 0.0f;
      if (lane == 0) {
        w.inverses[token + i] = d[i];
        w.d_denominators[token + i] = dd[i];
      }
    }
  }
#pragma unroll 1
  for (int tile = tiles - 1; tile >= 0; --tile) {
    const int channel = kWidth * tile + 2 * lane;
    if (tile > 0) next_x.load(q, at, at.head, channel - kWidth);
    float2 sum = make_float2(0.0f, 0.0f);
    store<T>(out, at, at.head, channel, [&](int i) {
      const float2 feature = phi<T>(map, x[i]);
      sum = fma_both(feature, dd[i], sum);
      return make_float2(feature.x * d[i], feature.y * d[i]);
    });
    if (tile > 0) x = next_x;
    if (!backward) continue;
    sum_of_others(warp_sums, sum, all);
    if (warp == 0) store_two_floats(w.dz_sums + (at.chunk * query_heads + at.head) * K, channel, K, all);
  }
}

// In place: dq from the gradient of phi(q) / d, dk from that through the numerators. Grid: chunks x G x tiles.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    join_kernel(const __grid_constant__ Sequences s, const __grid_constant__ Tokens q, const __grid_constant__ Tokens k,
                const __grid_constant__ Tokens dq, const __grid_constant__ Tokens dk,
                const __grid_constant__ Normaliser w, FeatureMap map, int heads, int group) {
  __shared__ WarpSums warp_sums;
  const int query_heads = heads * group, K = q.channels;
  const Place at = place_of(s, heads, (K + kWidth - 1) / kWidth);
  if (at.chunk_rows == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = kWidth * at.tile + 2 * lane;
  const bool wants_dq = dq.view.data != nullptr, wants_dk = dk.view.data != nullptr;
  // Everything of the first query head and of k is under way before anything is waited for.
  Loaded<T> of_k, d_of_k, of_q, d_of_q;
  float factors = 0.0f;  // lanes below 8: the inverses of the warp's tokens; from 8 on: dd
  const auto load_query = [&](int head) {
    of_q.load(q, at, head, channel);
    if (wants_dq) d_of_q.load(dq, at, head, channel);
    const std::int64_t token = (at.chunk * query_heads + head) * kChunk + kRows * warp;
    if (lane < 2 * kRows) factors = (lane < kRows ? w.inverses : w.d_denominators)[token + lane % kRows];
  };
  of_k.load(k, at, at.head, channel);
  load_query(at.head * group);
  if (wants_dk) d_of_k.load(dk, at, at.head, channel);
  const float2 start = two_floats(w.z_starts + (at.chunk * heads + at.head) * K, channel, K);
  const float2 beyond = two_floats(w.dz_sums + (at.chunk * query_heads + at.head * group) * K, channel, K);

  float2 z[kRows], dz[kRows], sum = make_float2(0.0f, 0.0f), all;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i < at.rows) sum = plus(sum, as_stored(phi<T>(map, of_k[i]), T{}));
    z[i] = sum;
    dz[i] = make_float2(0.0f, 0.0f);
  }
  const float2 before = plus(sum_of_others(warp_sums, sum, all), start);
  for (int h = 0; h < group; ++h) {
    const int head = at.head * group + h;
    float inverses[kRows], d_denominators[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      inverses[i] = __shfl_sync(kAll, factors, i);
      d_denominators[i] = __shfl_sync(kAll, factors, kRows + i);
      if (i < at.rows) dz[i] = fma_both(phi<T>(map, of_q[i]), d_denominators[i], dz[i]);
    }
    if (wants_dq) {
      store<T>(dq, at, head, channel, [&](int i) {
        const float2 here = plus(before, z[i]);
        const float2 through = make_float2(here.x * d_denominators[i], here.y * d_denominators[i]);
        return times(fma_both(d_of_q[i], inverses[i], through), slope<T>(map, of_q[i]));
      });
    }
    if (h + 1 < group) load_query(head + 1);
  }
  if (!wants_dk) return;
#pragma unroll
  for (int i = kRows - 2; i >= 0; --i) dz[i] = plus(dz[i], dz[i + 1]);
  const float2 after = plus(sum_of_others<true>(warp_sums, dz[0], all), beyond);
  store<T>(dk, at, at.head, channel,
           [&](int i) { return times(plus(d_of_k[i], plus(dz[i], after)), slope<T>(map, of_k[i])); });
}

// ---- host ----

Tokens tokens(const TensorView& view) {
  if (!view) return {};
  Tokens t{{view.data, view.stride[0], view.stride[1], view.stride[2]}, static_cast<int>(view.size(3)), false};
  t.in_pairs = view.size(3) % 2 == 0 && reinterpret_cast<std::uintptr_t>(view.data) % (2 * size_of(view.dtype)) == 0;
  for (int i = 0; i < 3; ++i) t.in_pairs = t.in_pairs && view.stride[i] % 2 == 0;
  return t;
}

// What both directions share: workspace and the kernels before the plain operator.
struct Call {
  Context& context;
  const Problem& problem;
  Params p;  // sequences
  Inputs plain;
  Normaliser normaliser{};
  float* z_sums = nullptr;

  Call(Context& c, const Problem& of, const Inputs& inputs, const Outputs& outputs)
      : context(c), problem(of), p(make_params(of, inputs, outputs)), plain(inputs) {
    plan_chunks(context, p);
    Arena& scratch = context.scratch();
    plain.z0 = {};
    plain.q = scratch.tensor(inputs.q.shape, problem.dtype, "gla: features of q");
    if (problem.feature_map != FeatureMap::identity)
      plain.k = scratch.tensor(inputs.k.shape, problem.dtype, "gla: features of k");
    if (problem.normalize) normaliser.z_starts = z_sums = floats(problem.heads * problem.key_dim);
  }
  // Of every chunk.
  float* floats(std::int64_t each) {
    const auto bytes = static_cast<std::size_t>(p.sequences.most_chunks * each) * sizeof(float);
    return static_cast<float*>(context.scratch().allocate(bytes, "gla: normaliser"));
  }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(context.stream()); }
  unsigned blocks(std::int64_t heads, std::int64_t channels) const {
    return static_cast<unsigned>(p.sequences.most_chunks * heads * ((channels + kWidth - 1) / kWidth));
  }
  // f(an element of the call's dtype)
  template <class F>
  void with_element(F f) const {
    switch (problem.dtype) {
      case DType::bf16:
        return f(__nv_bfloat16{});
      case DType::f16:
        return f(__half{});
      default:
        return f(float{});
    }
  }
  void map(const MappedPair& pair, int count) const {
    with_element([&](auto element) {
      map_kernel<decltype(element)>
          <<<dim3(blocks(problem.query_heads, problem.key_dim), count), kThreads, 0, stream()>>>(p.sequences, pair,
                                                                                                 problem.feature_map);
    });
    flashgla::cuda::check_launch("gated_linear_attention features");
  }
  template <bool kBackwards>
  void scan(float* sums, int group, const TensorView& start, const TensorView& end) const {
    const std::int64_t tiles = (problem.key_dim + kScanLanes - 1) / kScanLanes;
    scan_chunks_kernel<kBackwards>
        <<<static_cast<unsigned>(problem.sequences * problem.heads * tiles), dim3(kScanLanes, kScanLanes), 0,
           stream()>>>(p.sequences, sums, p.heads, group, p.key_dim, static_cast<const float*>(start.data),
                       static_cast<float*>(end.data));
    flashgla::cuda::check_launch("gated_linear_attention normaliser states");
  }
  void prepare(const Inputs& inputs, const TensorView& zt, const TensorView& o, const TensorView& d_o) const {
    if (problem.length == 0) return;
    const bool mapped = problem.feature_map != FeatureMap::identity;
    const Mapped k{tokens(inputs.k), mapped ? tokens(plain.k) : Tokens(), p.heads, z_sums};
    if (!problem.normalize) return map({{k, {tokens(inputs.q), tokens(plain.q), p.heads * p.group, nullptr}}}, 2);
    map({{k}}, 1);
    scan<false>(z_sums, 1, inputs.z0, zt);
    with_element([&](auto element) {
      divide_kernel<decltype(element)>
          <<<static_cast<unsigned>(p.sequences.most_chunks * problem.query_heads), kThreads, 0, stream()>>>(
              p.sequences, tokens(inputs.q), tokens(plain.k), tokens(plain.q), tokens(o), tokens(d_o), normaliser,
              problem.feature_map, p.heads, p.group);
    });
    flashgla::cuda::check_launch("gated_linear_attention denominators");
  }
};

// f16 has not the range of phi(q) / d: with a normaliser such calls go through f32.
bool through_f32(const Problem& problem) { return problem.normalize && problem.dtype == DType::f16; }
Problem in_f32(const Problem& problem) {
  Problem wide = problem;
  wide.dtype = wide.gate_dtype = DType::f32;
  return wide;
}

void convert(const Context& context, const TensorView& from, const TensorView& to) {
  if (context.planning()) return;
  Sequences s;
  s.count = from.size(0);
  s.length = from.size(1);
  s.most_chunks = s.count * s.chunks_each();
  const auto heads = static_cast<int>(from.size(2));
  const std::int64_t blocks = s.most_chunks * heads * ((from.size(3) + kWidth - 1) / kWidth);
  const auto launch = [&](auto* kernel) {
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(context.stream())>>>(
        s, tokens(from), tokens(to), heads);
  };
  to.dtype == DType::f32 ? launch(convert_kernel<__half, float>) : launch(convert_kernel<float, __half>);
  flashgla::cuda::check_launch("gated_linear_attention conversion");
}
// The same shape in f32, in workspace; nothing for nothing.
TensorView wide_like(Context& context, const TensorView& view) {
  return view ? context.scratch().tensor(view.shape, DType::f32, "gla: in f32") : TensorView();
}
TensorView widened(Context& context, const TensorView& view) {
  const TensorView wide = wide_like(context, view);
  convert(context, view, wide);
  return wide;
}
Inputs widened(Context& context, Inputs inputs) {
  for (TensorView* view : {&inputs.q, &inputs.k, &inputs.v}) *view = widened(context, *view);
  return inputs;
}

}  // namespace

Problem without_features(const Problem& problem) {
  Problem plain = through_f32(problem) ? in_f32(problem) : problem;
  plain.feature_map = FeatureMap::identity;
  plain.normalize = false;
  if (problem.normalize) plain.scale = 1.0;
  return plain;
}

bool goes_through_features(const Problem& problem) {
  if (!problem.normalize && problem.feature_map == FeatureMap::identity) return false;
  const Problem plain = without_features(problem);
  return goes_by_chunks(plain) || gates_values_by_chunks(plain);
}

void forward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                              const PlainForward& plain) {
  const ArenaScope scope(context.scratch());
  if (through_f32(problem)) {
    Outputs wide = outputs;
    wide.o = wide_like(context, outputs.o);
    forward_through_features(context, in_f32(problem), widened(context, inputs), wide, plain);
    return convert(context, wide.o, outputs.o);
  }
  const Call call(context, problem, inputs, outputs);
  if (!context.planning()) call.prepare(inputs, outputs.zt, {}, {});
  Outputs rest = outputs;
  rest.zt = {};
  plain(without_features(problem), call.plain, rest);
}

void backward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                               const OutputGradients& d_out, const InputGradients& d_in, const PlainBackward& plain) {
  const ArenaScope scope(context.scratch());
  if (through_f32(problem)) {
    Outputs wide = outputs;
    wide.o = widened(context, outputs.o);
    OutputGradients d_wide = d_out;
    d_wide.d_o = widened(context, d_out.d_o);
    InputGradients d_in_wide = d_in;
    const std::pair<const TensorView*, TensorView*> gradients[] = {
        {&d_in.dq, &d_in_wide.dq}, {&d_in.dk, &d_in_wide.dk}, {&d_in.dv, &d_in_wide.dv}};
    for (const auto& [narrow, to] : gradients) *to = wide_like(context, *narrow);
    backward_through_features(context, in_f32(problem), widened(context, inputs), wide, d_wide, d_in_wide, plain);
    for (const auto& [narrow, from] : gradients) {
      if (*narrow) convert(context, *from, *narrow);
    }
    return;
  }
  Call call(context, problem, inputs, outputs);
  Normaliser& w = call.normaliser;
  if (problem.normalize) {
    w.inverses = call.floats(problem.query_heads * kChunk);
    w.d_denominators = call.floats(problem.query_heads * kChunk);
    w.dz_sums = call.floats(problem.query_heads * problem.key_dim);
  }
  if (!context.planning()) {
    call.prepare(inputs, {}, outputs.o, problem.normalize ? d_out.d_o : TensorView());
    if (problem.normalize) call.scan<true>(w.dz_sums, call.p.group, d_out.d_zt, d_in.dz0);
  }
  Outputs rest = outputs;
  rest.zt = {};
  OutputGradients d_rest = d_out;
  d_rest.d_zt = {};
  InputGradients d_plain = d_in;
  d_plain.dz0 = {};
  plain(without_features(problem), call.plain, rest, d_rest, d_plain);
  if (context.planning() || problem.length == 0) return;

  call.with_element([&](auto element) {
    using T = decltype(element);
    if (problem.normalize) {
      if (!d_in.dq && !d_in.dk) return;
      join_kernel<T><<<call.blocks(problem.heads, problem.key_dim), kThreads, 0, call.stream()>>>(
          call.p.sequences, tokens(inputs.q), tokens(inputs.k), tokens(d_in.dq), tokens(d_in.dk), w,
          problem.feature_map, call.p.heads, call.p.group);
    } else {
      const MappedPair pair{{{tokens(inputs.k), tokens(d_in.dk), call.p.heads, nullptr},
                             {tokens(inputs.q), tokens(d_in.dq), call.p.heads * call.p.group, nullptr}}};
      slope_kernel<T><<<dim3(call.blocks(problem.query_heads, problem.key_dim), 2), kThreads, 0, call.stream()>>>(
          call.p.sequences, pair, problem.feature_map);
    }
    flashgla::cuda::check_launch("gated_linear_attention gradients of features");
  });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// The normaliser's kernels. Equations: features/README.md.
// In divide and join a warp has a tile of 64 channels, lane l those of kernels.cuh, and walks through a chunk's tokens,
// eight at a time, so that z and dz are running sums in registers. Where a call has few tiles, several warps share the
// tokens of each, and first sum over theirs what those before (dz: behind) them begin with.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/features/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::features {

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
  float* z_starts = nullptr;        // [chunks, G, K]: z before the chunk
  float* inverses = nullptr;        // 1 / (phi(q) . z + epsilon); in the forward, where they are kept
  bool finds_inverses = false;      // in the backward: they are there
  float* d_denominators = nullptr;  // dd; 0 beyond the chunk's tokens
  float* dz_sums = nullptr;  // [chunks, H, K]: sum over the chunk of phi(q) dd; then, per kv head, what follows it
};

// How many warps share the tokens of each tile, 1, 2, 4 or 8, and a warp's part of a chunk's tokens.
struct Parts {
  static constexpr int kMostLog = 3;
  static_assert(kWarps == 1 << kMostLog);
  int log;

  // For a call's `tiles` the fewest that give a multiprocessor kEnoughWarps, since what they sum first is read once
  // more, but not above `most`.
  static Parts of(std::int64_t tiles, int multiprocessors, int most) {
    constexpr std::int64_t kEnoughWarps = 12;
    int log = kMostLog;
    while (log > 0 && (1 << log > most || tiles << (log - 1) >= kEnoughWarps * multiprocessors)) --log;
    return {log};
  }
  __host__ __device__ __forceinline__ int count() const { return 1 << log; }
  __device__ __forceinline__ int rows() const { return kChunk >> log; }  // of each part
  __device__ __forceinline__ int of_row(int row) const { return row / kRows >> (kMostLog - log); }
  __device__ __forceinline__ int own() const { return static_cast<int>(threadIdx.x / 32) & (count() - 1); }
  __device__ __forceinline__ int first() const { return own() * rows(); }
};

// Lane i has the sum over all lanes of value i % kRows.
__device__ __forceinline__ float sums_of_lanes(const float (&x)[kRows]) {
  static_assert(kRows == 8);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto exchange = [lane](float low, float high, int distance) {
    const bool second = (lane & distance) != 0;
    return (second ? high : low) + __shfl_xor_sync(0xffffffffu, second ? low : high, distance);
  };
  const float pairs[4] = {exchange(x[0], x[1], 1), exchange(x[2], x[3], 1), exchange(x[4], x[5], 1),
                          exchange(x[6], x[7], 1)};
  float sum = exchange(exchange(pairs[0], pairs[1], 2), exchange(pairs[2], pairs[3], 2), 4);
  sum += __shfl_xor_sync(0xffffffffu, sum, 8);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 16);
}

// Sums over the parts of a warp's tile that are before its own (kLater: behind it), and over all of them in `all`. Two
// barriers.
template <bool kLater = false>
__device__ __forceinline__ float2 sum_of_parts(WarpSums& sums, const Parts& parts, float2 mine, float2& all) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  float2 others = make_float2(0.0f, 0.0f);
  all = mine;
  if (parts.count() == 1) return others;
  __syncthreads();
  sums[warp][lane] = mine;
  __syncthreads();
  all = others;
  for (int i = 0; i < parts.count(); ++i) {
    const float2 x = sums[warp - parts.own() + i][lane];
    if (kLater ? i > parts.own() : i < parts.own()) others = plus(others, x);
    all = plus(all, x);
  }
  return others;
}

// Calls work(first, batch) for a part's rows by eight, which load(first, batch) reads.
template <class Batch, class Load, class Work>
__device__ __forceinline__ void for_batches(const Parts& parts, const Load& load, const Work& work) {
  Batch batch;
  load(0, batch);
#pragma unroll 1
  for (int first = 0; first < parts.rows(); first += kRows) {
    work(first, batch);
    if (first + kRows < parts.rows()) load(first + kRows, batch);
  }
}

// Blocks of kThreads that a multiprocessor holds.
template <class T, bool kPairs, bool kBackward>
constexpr int kDivideBlocks = kPairs && !kBackward && sizeof(T) == 2 ? 4 : 2;
constexpr int kJoinBlocks = 2;

// phi(q) / d of every token to `out`, phi(k) read from `features`. kBackward: also what the backward needs. Grid:
// chunks x H; threads: a warp a tile and part, at most kWarps, which then have tiles by turns.
template <class T, bool kPairs, bool kBackward>
__global__ void __launch_bounds__(kThreads, kDivideBlocks<T, kPairs, kBackward>)
    divide_kernel(const __grid_constant__ Sequences s, const __grid_constant__ Tokens q,
                  const __grid_constant__ Tokens features, const __grid_constant__ Tokens out,
                  const __grid_constant__ Tokens o, const __grid_constant__ Tokens d_o,
                  const __grid_constant__ Normaliser w, Map map, int heads, int group, Parts parts) {
  begin_kernel();
  __shared__ WarpSums warp_sums;
  __shared__ float sums[kBackward ? 2 : 1][kWarps][kChunk];  // a warp's, of d and of do . o
  __shared__ float inverses[kChunk], d_denominators[kChunk];
  const int query_heads = heads * group, K = q.channels, tiles = (K + kWidth - 1) / kWidth;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            warps = static_cast<int>(blockDim.x) / 32;
  const Place at = place_of(s, query_heads, 1, parts.first());
  if (at.chunk_rows == 0) return;
  const int head = at.head / group, first_tile = warp >> parts.log, step = warps >> parts.log;
  const float* starts = w.z_starts + (at.chunk * heads + head) * K;
  // Of a batch of rows, from row `first` of the part's on: what this warp's tile gives to each.
  const auto add_up = [&](int which, bool begins, int first, const float(&x)[kRows]) {
    const float sum = sums_of_lanes(x);
    float& place = sums[which][warp][parts.first() + first + lane % kRows];
    if (lane < kRows) place = begins ? sum : place + sum;
  };
  struct Two {
    Loaded<T, kPairs> x, y;
  };
  if constexpr (kBackward) {
    for (int tile = first_tile; tile * kWidth < o.channels || tile == first_tile; tile += step) {
      const int channel = kWidth * tile + 2 * lane;
      const auto load = [&](int first, Two& two) {
        two.x.load(o, at.behind(first), at.head, channel);
        two.y.load(d_o, at.behind(first), at.head, channel);
      };
      for_batches<Two>(parts, load, [&](int first, const Two& two) {
        float products[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float2 a = two.x[i], b = two.y[i];
          products[i] = channel < o.channels ? fmaf(a.x, b.x, a.y * b.y) : 0.0f;
        }
        add_up(kBackward ? 1 : 0, tile == first_tile, first, products);
      });
    }
  }
  for (int tile = first_tile; tile < tiles && !w.finds_inverses; tile += step) {
    const int channel = kWidth * tile + 2 * lane;
    float2 z = two_floats(starts, channel, K);
    if (parts.count() > 1) {
      float2 sum = make_float2(0.0f, 0.0f), all;
#pragma unroll 1
      for (int first = 0; first < parts.rows(); first += kRows) {
        Loaded<T, kPairs> y;
        y.load(features, at.behind(first), head, channel);
#pragma unroll
        for (int i = 0; i < kRows; ++i) sum = plus(sum, y[i]);
      }
      z = plus(sum_of_parts(warp_sums, parts, sum, all), z);
    }
    const auto load = [&](int first, Two& two) {
      two.y.load(features, at.behind(first), head, channel);
      two.x.load(q, at.behind(first), at.head, channel);
    };
    for_batches<Two>(parts, load, [&](int first, const Two& two) {
      float d[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        z = plus(z, two.y[i]);
        const float2 feature = phi<T>(map, two.x[i]);
        d[i] = channel < K ? fmaf(feature.x, z.x, feature.y * z.y) : 0.0f;
      }
      add_up(0, tile == first_tile, first, d);
    });
  }
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x); row < kChunk; row += static_cast<int>(blockDim.x)) {
    const auto total = [&](int which) {  // over the warps that have this row
      float sum = 0.0f;
      for (int of = parts.of_row(row); of < warps; of += parts.count()) sum += sums[which][of][row];
      return sum;
    };
    const std::int64_t token = (at.chunk * query_heads + at.head) * kChunk + row;
    const float inverse =
        w.finds_inverses ? w.inverses[token] : 1.0f / (total(0) + static_cast<float>(kNormalizerEpsilon));
    inverses[row] = inverse;
    if (w.inverses != nullptr && !w.finds_inverses) w.inverses[token] = inverse;
    if constexpr (kBackward) {
      const float dd = row < at.chunk_rows ? -total(1) * inverse : 0.0f;
      d_denominators[row] = dd;
      w.d_denominators[token] = dd;
    }
  }
  __syncthreads();
  for (int tile = first_tile; tile < tiles; tile += step) {
    const int channel = kWidth * tile + 2 * lane;
    float2 sum = make_float2(0.0f, 0.0f), all;
    const auto load = [&](int first, Loaded<T, kPairs>& x) { x.load(q, at.behind(first), at.head, channel); };
    for_batches<Loaded<T, kPairs>>(parts, load, [&](int first, const Loaded<T, kPairs>& x) {
      const int row = parts.first() + first;
      const Out<T, kPairs> to(out, at.behind(first), at.head, channel);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float2 feature = phi<T>(map, x[i]);
        to.put(i, times(feature, inverses[row + i]));
        if constexpr (kBackward) sum = fma_both(feature, d_denominators[row + i], sum);
      }
    });
    if constexpr (kBackward) {
      sum_of_parts(warp_sums, parts, sum, all);
      if (parts.own() == 0) {
        store_two_floats(w.dz_sums + (at.chunk * query_heads + at.head) * K, channel, K, all);
      }
    }
  }
}

// Eight tokens' values, one a lane.
struct RowValues {
  float mine;
  __device__ __forceinline__ void load(const float* place) { mine = place[threadIdx.x % kRows]; }
  __device__ __forceinline__ float operator[](int i) const { return __shfl_sync(0xffffffffu, mine, i); }
};

// In place: dq from the gradient of phi(q) / d, dk from that through the numerators. Grid: chunks x G x tiles; threads:
// a warp a part.
template <class T, bool kPairs>
__global__ void __launch_bounds__(kThreads, kJoinBlocks)
    join_kernel(const __grid_constant__ Sequences s, const __grid_constant__ Tokens q, const __grid_constant__ Tokens k,
                const __grid_constant__ Tokens dq, const __grid_constant__ Tokens dk,
                const __grid_constant__ Normaliser w, Map map, int heads, int group, Parts parts) {
  begin_kernel();
  __shared__ WarpSums warp_sums;
  const int query_heads = heads * group, K = q.channels, tiles = (K + kWidth - 1) / kWidth;
  const Place at = place_of(s, heads, tiles, parts.first());
  if (at.chunk_rows == 0) return;
  const int channel = kWidth * at.tile + 2 * static_cast<int>(threadIdx.x % 32);
  const auto values_at = [&](const float* values, int head, int first) {
    RowValues of;
    of.load(values + (at.chunk * query_heads + head) * kChunk + parts.first() + first);
    return of;
  };
  float2 before = two_floats(w.z_starts + (at.chunk * heads + at.head) * K, channel, K);
  float2 after = two_floats(w.dz_sums + (at.chunk * query_heads + at.head * group) * K, channel, K);
  if (parts.count() > 1) {
    float2 of_k = make_float2(0.0f, 0.0f), of_q = of_k, all;
#pragma unroll 1
    for (int first = 0; first < parts.rows(); first += kRows) {
      Loaded<T, kPairs> x;
      x.load(k, at.behind(first), at.head, channel);
#pragma unroll
      for (int i = 0; i < kRows; ++i) of_k = plus(of_k, as_stored(phi<T>(map, x[i]), T{}));
      for (int head = at.head * group; head < (at.head + 1) * group; ++head) {
        x.load(q, at.behind(first), head, channel);
        const RowValues dd = values_at(w.d_denominators, head, first);
#pragma unroll
        for (int i = 0; i < kRows; ++i) of_q = fma_both(phi<T>(map, x[i]), dd[i], of_q);
      }
    }
    before = plus(before, sum_of_parts(warp_sums, parts, of_k, all));
    after = plus(after, sum_of_parts<true>(warp_sums, parts, of_q, all));
  }
  if (dq.view.data != nullptr) {
    for (int head = at.head * group; head < (at.head + 1) * group; ++head) {
      float2 z = before;
      struct Batch {
        Loaded<T, kPairs> k, q, dq;
        RowValues inverse, dd;
      };
      const auto load = [&](int first, Batch& of) {
        const Place rows = at.behind(first);
        of.k.load(k, rows, at.head, channel);
        of.q.load(q, rows, head, channel);
        of.dq.load(dq, rows, head, channel);
        of.inverse = values_at(w.inverses, head, first);
        of.dd = values_at(w.d_denominators, head, first);
      };
      for_batches<Batch>(parts, load, [&](int first, const Batch& of) {
        const Out<T, kPairs> out(dq, at.behind(first), head, channel);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          z = plus(z, as_stored(phi<T>(map, of.k[i]), T{}));
          float2 slope;
          phi<T>(map, of.q[i], slope);
          out.put(i, times(fma_both(of.dq[i], of.inverse[i], times(z, of.dd[i])), slope));
        }
      });
    }
  }
  if (dk.view.data == nullptr) return;
  float2 dz = after;
  struct Batch {
    Loaded<T, kPairs> k, dk, q;  // q of the first head
    RowValues dd;
  };
  const auto from_end = [&](int first) { return parts.rows() - kRows - first; };
  const auto load = [&](int first, Batch& of) {
    const Place rows = at.behind(from_end(first));
    of.k.load(k, rows, at.head, channel);
    of.dk.load(dk, rows, at.head, channel);
    of.q.load(q, rows, at.head * group, channel);
    of.dd = values_at(w.d_denominators, at.head * group, from_end(first));
  };
  for_batches<Batch>(parts, load, [&](int first, const Batch& of) {
    const Place rows = at.behind(from_end(first));
    float2 of_rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) of_rows[i] = times(phi<T>(map, of.q[i]), of.dd[i]);
    for (int head = at.head * group + 1; head < (at.head + 1) * group; ++head) {
      Loaded<T, kPairs> other;
      other.load(q, rows, head, channel);
      const RowValues dd = values_at(w.d_denominators, head, from_end(first));
#pragma unroll
      for (int i = 0; i < kRows; ++i) of_rows[i] = fma_both(phi<T>(map, other[i]), dd[i], of_rows[i]);
    }
    const Out<T, kPairs> out(dk, rows, at.head, channel);
#pragma unroll
    for (int i = kRows - 1; i >= 0; --i) {
      dz = plus(dz, of_rows[i]);
      float2 slope;
      phi<T>(map, of.k[i], slope);
      out.put(i, times(plus(of.dk[i], dz), slope));
    }
  });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::features

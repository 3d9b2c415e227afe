// Forward of unpacked sequences with every input read once, and what backward (tile_backward.cuh) shares with it. A
// block has some channels of one line, a lane V of them, and walks the line in tiles that lie in shared memory, whose
// tokens its warps share out. What a warp's tokens begin from follows from the state at the tile's begin and from what
// the tokens of the warps before it sum up to alone.
#pragma once

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/wkv/cuda/scan.cuh"

namespace flashgla::ops::wkv::cuda {

using flashgla::cuda::from_float;
using flashgla::cuda::to_float;

constexpr int kForwardWarps = 16, kBackwardWarps = 8;    // of a block
constexpr int kForwardTokens = 16, kBackwardTokens = 8;  // of a warp in a tile
constexpr int kForwardThreads = 32 * kForwardWarps, kBackwardThreads = 32 * kBackwardWarps;
// Forward keeps the state before so many tokens.
constexpr std::int64_t kTileSegment = kBackwardTokens * kBackwardWarps;
constexpr std::int64_t kLeastTileBlocks = 128;  // of 32 channels: fewer leave too much of a GPU idle
constexpr std::int64_t kPartTokens = kForwardTokens * kForwardWarps;  // a part has a multiple of so many

// Where lines and channels give too few blocks, each line is cut into parts. Those meet as segments do (scan.cuh): what
// each sums up to alone, joined, is what the next one starts from; backward what the one before it receives.
struct Parts {
  std::int64_t tokens = 0, count = 1;  // of a part, a line
  float* ends = nullptr;               // [lines,count,3,E]; null with one part

  __device__ __forceinline__ float* end_of(std::int64_t line, std::int64_t part, std::int64_t channels) const {
    return ends + (line * count + part) * 3 * channels;
  }
};

// Where a warp's few tokens have keys within so many powers of two of one of them, its sums are in units of e to that:
// a token then costs one exponential and products with e^w. Where that does not hold, and in everything that joins
// sums, the running maximum is carried from token to token.
constexpr float kCalm = 58.0f;

// How many channels a lane has: a word of them.
template <class T>
constexpr int kForwardChannels = 4 / static_cast<int>(sizeof(T));

// 1 / x to its last bit or two.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// How many of `most` tokens from `first` on there are.
template <class T>
__device__ __forceinline__ int tokens_from(const Call<T>& call, std::int64_t first, int most) {
  const std::int64_t rest = call.length - first;
  return rest <= 0 ? 0 : rest < most ? static_cast<int>(rest) : most;
}

// [kTensors][tokens][channels] of a tile of so many warps' tokens.
template <class T, int kWarps, int kOfWarp, int V, int kTensors>
struct Tile {
  static constexpr int kTokens = kWarps * kOfWarp;
  static constexpr int kAcross = 32 * V;
  static constexpr int kBytes = kTensors * kTokens * kAcross * static_cast<int>(sizeof(T));
  T* data;

  // Asks for a tensor's tokens from `first` on; zeros behind the line's and the tensor's end.
  __device__ __forceinline__ void copy(int tensor, const Lines<T>& from, const Call<T>& call, std::int64_t line,
                                       std::int64_t first, int channel) const {
    constexpr int kEach = 16 / static_cast<int>(sizeof(T)), kPieces = kAcross / kEach;
    constexpr int kRows = 32 * kWarps / kPieces, kTimes = kTokens / kRows;
    static_assert(kRows * kTimes == kTokens);
    const int row = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces * kEach;
    const T* source = from.at(line, first + row, channel + piece);
    const std::int64_t step = kRows * from.token_stride;
    const int rest = channel + piece < call.channels ? tokens_from(call, first + row, kTokens) : 0;
    const std::uint32_t to = ptx::shared_address(at(tensor, row, piece));
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const bool there = kRows * i < rest;
      ptx::copy_async_16(to + i * kRows * kAcross * static_cast<int>(sizeof(T)), there ? source + i * step : from.data,
                         there ? 16 : 0);
    }
  }
  __device__ __forceinline__ T* at(int tensor, int row, int channel) const {
    return data + (tensor * kTokens + row) * kAcross + channel;
  }
  __device__ __forceinline__ void get(int tensor, int row, int lane, float (&to)[V]) const {
    const Vector<T, V> values = Vector<T, V>::load(at(tensor, row, V * lane));
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = values[i];
  }
};

// What the warps' tokens sum up to alone, and behind them what a tile hands on: [kWarps + 1][3][32 V].
template <int V, int kWarps>
struct Sums {
  static constexpr int kBytes = (kWarps + 1) * 3 * 32 * V * static_cast<int>(sizeof(float));
  float* data;

  __device__ __forceinline__ void store(int warp, int lane, const State<V>& state) const {
    state.store(data + warp * 3 * 32 * V + V * lane, 32 * V);
  }
  __device__ __forceinline__ State<V> load(int warp, int lane) const {
    State<V> state;
    state.load(data + warp * 3 * 32 * V + V * lane, 32 * V);
    return state;
  }
};

// state, `tokens` on, and what those sum up to alone.
template <int V>
__device__ __forceinline__ void join(State<V>& state, const State<V>& alone, float tokens,
                                     const Parameters<V>& parameters) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const Weights weights(fmaf(tokens, parameters.w[i], state.p[i]), alone.p[i]);
    state.a[i] = weights.of(state.a[i], alone.a[i]);
    state.b[i] = weights.of(state.b[i], alone.b[i]);
    state.p[i] = weights.largest;
  }
}

// A lane's tokens of forward: row .. row + count of a tile, kLog2E times the first key of each channel their unit.
template <class T>
struct ForwardTokens {
  static constexpr int V = kForwardChannels<T>;
  Tile<T, kForwardWarps, kForwardTokens, V, 3> tile;
  const Parameters<V>& parameters;
  int row, lane, count;
  float unit[V] = {};
  bool calm = true;

  // kLog2E times what is known of a token's key, in units of `unit`.
  __device__ __forceinline__ float beyond(float key, int i) const { return fmaf(key, kLog2E, -unit[i]); }

  // What they sum up to alone.
  __device__ __forceinline__ State<V> alone() {
    State<V> state;
    state.clear();
    if (count == 0) return state;
    float decay[V], far = 0.0f, k[V], v[V];
    tile.get(0, row, lane, k);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      unit[i] = kLog2E * k[i];
      decay[i] = exponential(parameters.w[i]);
      far = fmaxf(far, fabsf(kLog2E * parameters.u[i]));
    }
    float keys = 0.0f;
#pragma unroll 4
    for (int t = 0; t < count; ++t) {
      tile.get(0, row + t, lane, k);
      tile.get(1, row + t, lane, v);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float above = beyond(k[i], i), key = ops::cuda::power_of_two(above);
        keys = fmaxf(keys, fabsf(above));
        state.a[i] = fmaf(decay[i], state.a[i], key * v[i]);
        state.b[i] = fmaf(decay[i], state.b[i], key);
        state.p[i] = fmaxf(state.p[i] + parameters.w[i], k[i]);
      }
    }
    calm = __all_sync(~0u, keys + far <= kCalm) != 0;
    if (calm) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float scale = ops::cuda::power_of_two(-beyond(state.p[i], i));
        state.a[i] *= scale;
        state.b[i] *= scale;
      }
      return state;
    }
    state.clear();
    for (int t = 0; t < count; ++t) {
      tile.get(0, row + t, lane, k);
      tile.get(1, row + t, lane, v);
      state.advance(parameters, k, v);
    }
    return state;
  }

  // Calls use(t, y) for each; `state`, what is before them, becomes what is behind them. exponents(i): of alone().
  template <class Use, class Exponents>
  __device__ __forceinline__ void outputs(State<V>& state, const Use& use, const Exponents& exponents) const {
    float decay[V], bonus[V], above = -kCalm;
#pragma unroll
    for (int i = 0; i < V; ++i) above = fmaxf(above, beyond(state.p[i], i));
    if (!calm || __any_sync(~0u, above > kCalm) != 0) return outputs_by_maximum(state, use);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float scale = ops::cuda::power_of_two(beyond(state.p[i], i));
      state.a[i] *= scale;
      state.b[i] *= scale;
      decay[i] = exponential(parameters.w[i]);
      bonus[i] = exponential(parameters.u[i]);
    }
#pragma unroll 4
    for (int t = 0; t < count; ++t) {
      float k[V], v[V], r[V], y[V];
      tile.get(0, row + t, lane, k);
      tile.get(1, row + t, lane, v);
      tile.get(2, row + t, lane, r);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float key = ops::cuda::power_of_two(beyond(k[i], i)), first = bonus[i] * key;
        const float closed = 1.0f + exponential(-r[i]);
        y[i] = fmaf(first, v[i], state.a[i]) * reciprocal((state.b[i] + first) * closed);
        state.a[i] = fmaf(decay[i], state.a[i], key * v[i]);
        state.b[i] = fmaf(decay[i], state.b[i], key);
      }
      use(t, y);
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      state.p[i] = fmaxf(fmaf(static_cast<float>(count), parameters.w[i], state.p[i]), exponents(i));
      const float scale = ops::cuda::power_of_two(-beyond(state.p[i], i));
      state.a[i] *= scale;
      state.b[i] *= scale;
    }
  }

 private:
  template <class Use>
  __device__ __forceinline__ void outputs_by_maximum(State<V>& state, const Use& use) const {
    for (int t = 0; t < count; ++t) {
      float k[V], v[V], r[V], y[V];
      tile.get(0, row + t, lane, k);
      tile.get(1, row + t, lane, v);
      tile.get(2, row + t, lane, r);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const Weights weights(state.p[i], parameters.u[i] + k[i]);
        const float closed = 1.0f + exponential(-r[i]);
        y[i] = __fdividef(weights.of(state.a[i], v[i]), weights.with_one(state.b[i]) * closed);
      }
      use(t, y);
      state.advance(parameters, k, v);
    }
  }
};

template <class T>
using ForwardTile = Tile<T, kForwardWarps, kForwardTokens, kForwardChannels<T>, 3>;
template <class T>
using ForwardSums = Sums<kForwardChannels<T>, kForwardWarps>;
template <class T>
constexpr int kForwardTileBytes = ForwardTile<T>::kBytes + ForwardSums<T>::kBytes;

// y, ht and call.prefixes may be absent. kSums: only what parts sum up to alone, the first one with what is before it.
template <class T, bool kSums>
__global__ void __launch_bounds__(kForwardThreads, 2)
    tile_forward_kernel(Call<T> call, Parts parts, Lines<T> y, float* ht) {
  constexpr int V = kForwardChannels<T>, kTokens = kForwardTokens, kWarps = kForwardWarps;
  extern __shared__ __align__(16) unsigned char memory[];
  const ForwardTile<T> tile{reinterpret_cast<T*>(memory)};
  const ForwardSums<T> sums{reinterpret_cast<float*>(memory + ForwardTile<T>::kBytes)};
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int across = (call.channels + 32 * V - 1) / (32 * V);
  const std::int64_t above = blockIdx.x / across, line = above / parts.count, part = above - line * parts.count;
  const int first_channel = static_cast<int>(blockIdx.x - above * across) * 32 * V, channel = first_channel + V * lane;
  const std::int64_t from = part * parts.tokens, to = part + 1 == parts.count ? call.length : from + parts.tokens;
  const bool there = channel < call.channels;
  flashgla::cuda::wait_for_previous();
  if (kSums && part + 1 == parts.count) return;
  const auto ask = [&](std::int64_t first) {
    tile.copy(0, call.k, call, line, first, first_channel);
    tile.copy(1, call.v, call, line, first, first_channel);
    if (!kSums && y.data != nullptr) tile.copy(2, call.r, call, line, first, first_channel);
    ptx::copy_async_commit();
  };
  ask(from);
  const Parameters<V> parameters(call, there ? channel : 0);
  State<V> state;
  state.clear();
  if (there && part == 0) {
    state.begin(call, line, channel);
  } else if (there && !kSums) {
    state.load(parts.end_of(line, part, call.channels) + channel, call.channels);
  }
  if (warp == 0) sums.store(kWarps, lane, state);
  for (std::int64_t begin = from; begin < to; begin += kTokens * kWarps) {
    const std::int64_t first = begin + warp * kTokens;
    const int count = tokens_from(call, first, kTokens), row = warp * kTokens;
    ptx::copy_async_wait<0>();
    __syncthreads();
    ForwardTokens<T> tokens{tile, parameters, row, lane, count};
    sums.store(warp, lane, tokens.alone());
    __syncthreads();
    state = sums.load(kWarps, lane);
    // Only warps with all of their tokens have others behind them.
#pragma unroll 4
    for (int other = 0; other < (count > 0 ? warp : 0); ++other) {
      join(state, sums.load(other, lane), kTokens, parameters);
    }
    if (!kSums && call.prefixes != nullptr && there && count > 0 && first % kTileSegment == 0) {
      state.store(call.prefixes + (line * call.segments + first / kTileSegment) * 3 * call.channels + channel,
                  call.channels);
    }
    const auto store = [&](int t, const float(&out)[V]) {
      if (there) Vector<T, V>::of(out).store(y.at(line, first + t, channel));
    };
    if (kSums || y.data == nullptr) {
      join(state, sums.load(warp, lane), static_cast<float>(count), parameters);
    } else if (count > 0) {
      tokens.outputs(state, store, [&](int i) { return sums.load(warp, lane).p[i]; });
    }
    __syncthreads();
    if (begin + kTokens * kWarps < to) ask(begin + kTokens * kWarps);
    if (warp == kWarps - 1) sums.store(kWarps, lane, state);
    if (!kSums && ht != nullptr && there && count > 0 && first + count == call.length) {
      state.store(ht + line * 3 * call.channels + channel, call.channels);
    }
  }
  if (kSums && there && warp == kWarps - 1) {
    state.store(parts.end_of(line, part, call.channels) + channel, call.channels);
  }
}

}  // namespace flashgla::ops::wkv::cuda

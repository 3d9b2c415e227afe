// Forward by tiles (tiles.cuh).
#pragma once

#include "flashgla/ops/wkv/cuda/tiles.cuh"

namespace flashgla::ops::wkv::cuda {

// k, v and r; in the last one's place then y.
template <class T>
using ForwardTile = Tile<T, kForwardWarps, kForwardTokens, kForwardChannels<T>, 3>;
template <class T>
using ForwardSums = Sums<kForwardChannels<T>, kForwardWarps>;
template <class T>
constexpr int kForwardTileBytes = 2 * ForwardTile<T>::kBytes + ForwardSums<T>::kBytes;

// A warp's tokens of a tile, `count` of them there.
template <class T>
struct ForwardTokens {
  static constexpr int V = kForwardChannels<T>, kTokens = kForwardTokens;
  const ForwardTile<T>& tile;
  int row, lane, count;

  // All of them in units of 2^unit: key receives e to the keys, a and b what they sum up to alone. How far the keys are
  // from the unit.
  __device__ __forceinline__ float sum_up(const float (&unit)[V], const float (&decay)[V], float (&key)[kTokens][V],
                                          float (&a)[V], float (&b)[V]) const {
    float far = 0.0f;
#pragma unroll
    for (int i = 0; i < V; ++i) a[i] = b[i] = 0.0f;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float k[V], v[V];
      tile.get(0, row + t, lane, k);
      tile.get(1, row + t, lane, v);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float above = fmaf(k[i], kLog2E, -unit[i]);
        far = fmaxf(far, fabsf(above));
        key[t][i] = ops::cuda::power_of_two(above);
        a[i] = fmaf(decay[i], a[i], key[t][i] * v[i]);
        b[i] = fmaf(decay[i], b[i], key[t][i]);
      }
    }
    return far;
  }
  // From the sums before them to outputs, in r's place.
  __device__ __forceinline__ void outputs(const float (&decay)[V], const float (&bonus)[V],
                                          const float (&key)[kTokens][V], float (&a)[V], float (&b)[V]) const {
    constexpr int kAtOnce = 4;  // tokens that are read before any of theirs is written: no read may move over a write
#pragma unroll
    for (int first = 0; first < kTokens; first += kAtOnce) {
      Vector<T, V> values[kAtOnce], receptances[kAtOnce];
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        values[t] = Vector<T, V>::load(tile.at(1, row + first + t, V * lane));
        receptances[t] = Vector<T, V>::load(tile.at(2, row + first + t, V * lane));
      }
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        const float(&keys)[V] = key[first + t];
        float y[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float value = keys[i] * values[t][i], closed = 1.0f + exponential(-receptances[t][i]);
          y[i] = fmaf(bonus[i], value, a[i]) * reciprocal(fmaf(bonus[i], keys[i], b[i]) * closed);
          a[i] = fmaf(decay[i], a[i], value);
          b[i] = fmaf(decay[i], b[i], keys[i]);
        }
        tile.set(2, row + first + t, lane, y);
      }
    }
  }
  // The largest exponent in what they sum up to.
  __device__ __forceinline__ void maximum(const Parameters<V>& parameters, float (&largest)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) largest[i] = kEmpty;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float k[V];
      tile.get(0, row + t, lane, k);
#pragma unroll
      for (int i = 0; i < V; ++i) largest[i] = fmaxf(largest[i] + parameters.w[i], k[i]);
    }
  }

  // With the running maximum: what they sum up to alone.
  __device__ __forceinline__ State<V> sum_up_by_maximum(const Parameters<V>& parameters) const {
    State<V> state;
    state.clear();
    for (int t = 0; t < count; ++t) {
      float k[V], v[V];
      tile.get(0, row + t, lane, k);
      tile.get(1, row + t, lane, v);
      state.advance(parameters, k, v);
    }
    return state;
  }
  // `state`, what is before them, becomes what is behind them.
  __device__ __forceinline__ void outputs_by_maximum(const Parameters<V>& parameters, State<V>& state) const {
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
      tile.set(2, row + t, lane, y);
      state.advance(parameters, k, v);
    }
  }
};

// state in units of e^to; empty where it is.
template <int V>
__device__ __forceinline__ void settle(State<V>& state, const float (&to)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const bool empty = !(state.b[i] > 0.0f);
    const float scale = exponential(state.p[i] - to[i]);
    state.a[i] = empty ? 0.0f : state.a[i] * scale;
    state.b[i] = empty ? 0.0f : state.b[i] * scale;
    state.p[i] = empty ? kEmpty : to[i];
  }
}

// The exponents that make b 1.
template <int V>
__device__ __forceinline__ void exponents_of(const State<V>& state, float (&to)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) to[i] = fmaf(log2_of(state.b[i]), 1.0f / kLog2E, state.p[i]);
}

// What a block does with a tile once it is there.
template <class T, bool kSums>
struct TileForward {
  static constexpr int V = kForwardChannels<T>, kWarps = kForwardWarps, kTokens = kForwardTokens;
  const ForwardSums<T> sums;
  const int lane, warp;
  const bool exact;          // whether exponents are to be the largest ones
  float decay[V], bonus[V];  // e^w, e^u
  // kSums: what a warp's tokens of all tiles so far sum up to.
  State<V> own;

  __device__ __forceinline__ TileForward(const Parameters<V>& of, const ForwardSums<T>& warps_sums,
                                         bool exact_exponents)
      : sums(warps_sums),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        exact(exact_exponents) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      decay[i] = exponential(of.w[i]);
      bonus[i] = exponential(of.u[i]);
    }
    own.clear();
  }

  // Adds a tile to `own`.
  __device__ __forceinline__ void add(const ForwardTile<T>& tile) {
    constexpr auto kInTile = static_cast<float>(kTokens * kWarps);
    const Parameters<V> parameters = sums.parameters(lane);
    const ForwardTokens<T> tokens{tile, warp * kTokens, lane, kTokens};
    float unit[V], beyond = -kCalm, key[kTokens][V];
    State<V> alone;
    tile.get(0, warp * kTokens, lane, alone.p);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      unit[i] = kLog2E * alone.p[i];
      beyond = fmaxf(beyond, fmaf(kLog2E, own.p[i], -unit[i]));
    }
    const float far = tokens.sum_up(unit, decay, key, alone.a, alone.b);
    if (__all_sync(~0u, far <= kCalm && beyond <= kCalm) == 0) {
      return join(own, tokens.sum_up_by_maximum(parameters), kInTile, parameters);
    }
    float to[V];
    if (exact) tokens.maximum(parameters, to);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float scale = exponential(fmaf(kInTile, parameters.w[i], own.p[i] - alone.p[i]));
      alone.a[i] = fmaf(scale, own.a[i], alone.a[i]);
      alone.b[i] = fmaf(scale, own.b[i], alone.b[i]);
      if (exact) to[i] = fmaxf(fmaf(kInTile, parameters.w[i], own.p[i]), to[i]);
    }
    own = alone;
    if (!exact) exponents_of(own, to);
    settle(own, to);
  }

  // tokens: how many the tile has; turn: which place has what is before it, the other one is for what is behind it.
  // keep(first token of a warp, state before it), finish(state behind the tile): by the warps that know.
  template <class Keep, class Finish>
  __device__ __forceinline__ void run(const ForwardTile<T>& tile, int tokens, int turn, const Keep& keep,
                                      const Finish& finish) {
    State<V> state = sums.load(kWarps + turn, lane);
    const int row = warp * kTokens;
    const ForwardTokens<T> all{tile, row, lane, kTokens};
    float unit[V], key[kTokens][V], a[V], b[V], far = 0.0f;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (!(state.b[i] > 0.0f)) state.a[i] = state.b[i] = state.p[i] = 0.0f;
      unit[i] = kLog2E * state.p[i];
      far = fmaxf(far, kLog2E * fabsf(sums.parameters(lane).u[i]));
    }
    far += all.sum_up(unit, decay, key, a, b);
    sums.store_sums(warp, lane, a, b);
    if (exact) {
      all.maximum(sums.parameters(lane), a);
#pragma unroll
      for (int i = 0; i < V; ++i) sums.of(warp, lane)[64 * V + i] = a[i];
    }
    if (__syncthreads_and(tokens == kTokens * kWarps && far <= kCalm) == 0) {
      return run_by_maximum(tile, tokens, turn, keep, finish);
    }
    {
      float warp_decay[V];
#pragma unroll
      for (int i = 0; i < V; ++i) warp_decay[i] = exponential(kTokens * sums.parameters(lane).w[i]);
#pragma unroll
      for (int other = 0; other < kWarps - 1; ++other) {
        if (other >= warp) break;
        sums.join_sums(other, lane, warp_decay, state.a, state.b);
      }
    }
    if (row % kTileSegment == 0) keep(row, state);
    all.outputs(decay, bonus, key, state.a, state.b);
    if (warp < kWarps - 1) return;
    if (exact) {
      const State<V> start = sums.load(kWarps + turn, lane);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        float largest = start.b[i] > 0.0f ? start.p[i] : kEmpty;
        for (int other = 0; other < kWarps; ++other) {
          largest = fmaxf(fmaf(kTokens, sums.parameters(lane).w[i], largest), sums.of(other, lane)[64 * V + i]);
        }
        a[i] = largest;
      }
    }
    if (!exact) exponents_of(state, a);
    settle(state, a);
    sums.store(kWarps + 1 - turn, lane, state);
    finish(state);
  }

 private:
  template <class Keep, class Finish>
  __device__ __forceinline__ void run_by_maximum(const ForwardTile<T>& tile, int tokens, int turn, const Keep& keep,
                                                 const Finish& finish) const {
    const int row = warp * kTokens, count = max(0, min(tokens - row, kTokens));
    const ForwardTokens<T> some{tile, row, lane, count};
    const Parameters<V> parameters = sums.parameters(lane);
    sums.store(warp, lane, some.sum_up_by_maximum(parameters));
    __syncthreads();
    if (count == 0) return;
    State<V> state = sums.load(kWarps + turn, lane);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (!(state.b[i] > 0.0f)) state.p[i] = kEmpty;
    }
    // Only warps with all of their tokens have others behind them.
#pragma unroll 1
    for (int other = 0; other < warp; ++other) join(state, sums.load(other, lane), kTokens, parameters);
    if (row % kTileSegment == 0) keep(row, state);
    some.outputs_by_maximum(parameters, state);
    if (row + count < tokens) return;
    sums.store(kWarps + 1 - turn, lane, state);
    finish(state);
  }
};

// y, ht and call.prefixes may be absent; without y, r is not read. kSums: only what parts but the last sum up to alone.
template <class T, bool kSums>
__global__ void __launch_bounds__(kForwardThreads, 2)
    tile_forward_kernel(Call<T> call, Parts parts, Lines<T> y, float* ht) {
  using OfTile = ForwardTile<T>;
  constexpr int V = kForwardChannels<T>, kWarps = kForwardWarps, kInTile = OfTile::kTokens;
  extern __shared__ __align__(16) unsigned char memory[];
  const ForwardSums<T> sums{reinterpret_cast<float*>(memory + 2 * OfTile::kBytes)};
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int across = (call.channels + 32 * V - 1) / (32 * V);
  const int above = static_cast<int>(blockIdx.x) / across, line = above / parts.count,
            part = above - line * parts.count;
  const int all_tiles = (static_cast<int>(call.length) + kInTile - 1) / kInTile;
  const int first_tile = part * (parts.tokens / kInTile);
  const int tiles_end = part + 1 == parts.count ? all_tiles : first_tile + parts.tokens / kInTile;
  const int first_channel = (static_cast<int>(blockIdx.x) - above * across) * 32 * V,
            channel = first_channel + V * lane;
  const bool there = channel < call.channels, outputs = !kSums && y.data != nullptr;
  flashgla::cuda::wait_for_previous();
  if (kSums && part + 1 == parts.count) return;

  // A thread's pieces of the tile that is asked for next and of the one that goes out next.
  const int piece = first_channel + OfTile::thread_channel();
  const std::int64_t row = std::int64_t{first_tile} * kInTile + OfTile::thread_row();
  const T* sources[3] = {call.k.at(line, row, piece), call.v.at(line, row, piece), call.r.at(line, row, piece)};
  T* target = y.at(line, row, piece);
  const auto tokens_in = [&](int index) { return min(static_cast<int>(call.length) - index * kInTile, kInTile); };
  const auto rows_in = [&](int index) { return piece < call.channels ? tokens_in(index) - OfTile::thread_row() : 0; };
  const auto tile_of = [&](int index) { return OfTile{reinterpret_cast<T*>(memory + (index & 1) * OfTile::kBytes)}; };
  const auto ask = [&](int index) {
    const Lines<T>* tensors[3] = {&call.k, &call.v, &call.r};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i == 2 && !outputs) break;
      tile_of(index).copy(i, sources[i], tensors[i]->token_stride, rows_in(index));
      sources[i] += kInTile * tensors[i]->token_stride;
    }
    ptx::copy_async_commit();
  };
  const auto put_out = [&](int index) {
    tile_of(index).put_out(2, target, y.token_stride, rows_in(index));
    target += kInTile * y.token_stride;
  };

  ask(first_tile);
  const Parameters<V> parameters(call, there ? channel : 0);
  if (warp == 0) sums.store(lane, parameters);
  TileForward<T, kSums> work(parameters, sums, ht != nullptr);
  if (!kSums && warp == 0) {
    State<V> start;
    start.clear();
    if (there) start.begin(call, line, channel);
#pragma unroll 4
    for (int other = 0; other < (there ? part : 0); ++other) {
      State<V> alone;
      alone.load(parts.end_of(line, other, call.channels) + channel, call.channels);
      join(start, alone, static_cast<float>(parts.tokens), parameters);
    }
    sums.store(kWarps + (first_tile & 1), lane, start);
  }
  for (int index = first_tile; index < tiles_end; ++index) {
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (outputs && index > first_tile) put_out(index - 1);
    if (index + 1 < tiles_end) ask(index + 1);
    if (kSums) {
      work.add(tile_of(index));
      continue;
    }
    const auto keep = [&](int of_tile, const State<V>& state) {
      if (call.prefixes == nullptr || !there) return;
      const int segment = line * static_cast<int>(call.segments) + (index * kInTile + of_tile) / kTileSegment;
      state.store(call.prefixes + std::int64_t{segment} * (3 * call.channels) + channel, call.channels);
    };
    const auto finish = [&](const State<V>& state) {
      if (ht == nullptr || !there || (index + 1) * kInTile < call.length) return;
      state.store(ht + std::int64_t{line} * 3 * call.channels + channel, call.channels);
    };
    work.run(tile_of(index), tokens_in(index), (index & 1), keep, finish);
  }
  if (kSums) {
    sums.store(warp, lane, work.own);
    __syncthreads();
    if (!there || warp > 0) return;
    State<V> alone = sums.load(0, lane);
    const Parameters<V> of = sums.parameters(lane);
    for (int other = 1; other < kWarps; ++other) join(alone, sums.load(other, lane), kForwardTokens, of);
    alone.store(parts.end_of(line, part, call.channels) + channel, call.channels);
    return;
  }
  if (outputs) {
    __syncthreads();
    put_out(tiles_end - 1);
  }
}

}  // namespace flashgla::ops::wkv::cuda

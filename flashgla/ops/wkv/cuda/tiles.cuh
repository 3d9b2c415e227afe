// Forward and backward of unpacked sequences with every input read once. A block has some channels of one line, a lane
// V of them, and walks the line in tiles that lie in shared memory, whose tokens its warps share out. What a warp's
// tokens begin from follows from the state at the tile's begin and from what the tokens of the warps before it sum up
// to alone.
#pragma once

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/wkv/cuda/backward.cuh"

namespace flashgla::ops::wkv::cuda {

using flashgla::cuda::from_float;
using flashgla::cuda::to_float;

constexpr int kForwardWarps = 16, kBackwardWarps = 8;    // of a block
constexpr int kForwardTokens = 16, kBackwardTokens = 8;  // of a warp in a tile
constexpr int kForwardThreads = 32 * kForwardWarps, kBackwardThreads = 32 * kBackwardWarps;
// Forward keeps the state before so many tokens.
constexpr std::int64_t kTileSegment = kBackwardTokens * kBackwardWarps;
constexpr std::int64_t kLeastTileBlocks = 128;  // of 32 channels: fewer leave too much of a GPU idle

// How many channels a lane has: a word of them.
template <class T>
constexpr int kForwardChannels = 4 / static_cast<int>(sizeof(T));

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
    for (int item = static_cast<int>(threadIdx.x); item < kTokens * kPieces; item += 32 * kWarps) {
      const int row = item / kPieces, piece = item % kPieces * kEach;
      const bool there = first + row < call.length && channel + piece < call.channels;
      ptx::copy_async_16(ptx::shared_address(at(tensor, row, piece)),
                         there ? from.at(line, first + row, channel + piece) : from.data, there ? 16 : 0);
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

// How many of a warp's tokens there are.
template <class T>
__device__ __forceinline__ int tokens_from(const Call<T>& call, std::int64_t first, int most) {
  const std::int64_t rest = call.length - first;
  return rest <= 0 ? 0 : rest < most ? static_cast<int>(rest) : most;
}

template <class T>
using ForwardTile = Tile<T, kForwardWarps, kForwardTokens, kForwardChannels<T>, 3>;
template <class T>
using ForwardSums = Sums<kForwardChannels<T>, kForwardWarps>;
template <class T>
constexpr int kForwardTileBytes = ForwardTile<T>::kBytes + ForwardSums<T>::kBytes;

// y, ht and call.prefixes may be absent.
template <class T>
__global__ void __launch_bounds__(kForwardThreads, 2) tile_forward_kernel(Call<T> call, Lines<T> y, float* ht) {
  constexpr int V = kForwardChannels<T>, kTokens = kForwardTokens, kWarps = kForwardWarps;
  extern __shared__ __align__(16) unsigned char memory[];
  const ForwardTile<T> tile{reinterpret_cast<T*>(memory)};
  const ForwardSums<T> sums{reinterpret_cast<float*>(memory + ForwardTile<T>::kBytes)};
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int across = (call.channels + 32 * V - 1) / (32 * V);
  const std::int64_t line = blockIdx.x / across;
  const int first_channel = static_cast<int>(blockIdx.x - line * across) * 32 * V, channel = first_channel + V * lane;
  const bool there = channel < call.channels;
  flashgla::cuda::wait_for_previous();
  const auto ask = [&](std::int64_t first) {
    tile.copy(0, call.k, call, line, first, first_channel);
    tile.copy(1, call.v, call, line, first, first_channel);
    if (y.data != nullptr) tile.copy(2, call.r, call, line, first, first_channel);
    ptx::copy_async_commit();
  };
  ask(0);
  const Parameters<V> parameters(call, there ? channel : 0);
  State<V> state;
  state.clear();
  if (there) state.begin(call, line, channel);
  if (warp == 0) sums.store(kWarps, lane, state);
  for (std::int64_t begin = 0; begin < call.length; begin += kTokens * kWarps) {
    const std::int64_t first = begin + warp * kTokens;
    const int count = tokens_from(call, first, kTokens), row = warp * kTokens;
    ptx::copy_async_wait<0>();
    __syncthreads();
    State<V> alone;
    alone.clear();
#pragma unroll 4
    for (int t = 0; t < count; ++t) {
      float k[V], v[V];
      tile.get(0, row + t, lane, k);
      tile.get(1, row + t, lane, v);
      alone.advance(parameters, k, v);
    }
    sums.store(warp, lane, alone);
    __syncthreads();
    state = sums.load(kWarps, lane);
    // Only warps with all of their tokens have others behind them.
#pragma unroll 4
    for (int other = 0; other < (count > 0 ? warp : 0); ++other) {
      join(state, sums.load(other, lane), kTokens, parameters);
    }
    if (call.prefixes != nullptr && there && count > 0 && first % kTileSegment == 0) {
      state.store(call.prefixes + (line * call.segments + first / kTileSegment) * 3 * call.channels + channel,
                  call.channels);
    }
    if (y.data != nullptr) {
#pragma unroll 4
      for (int t = 0; t < count; ++t) {
        float k[V], v[V], r[V], out[V];
        tile.get(0, row + t, lane, k);
        tile.get(1, row + t, lane, v);
        tile.get(2, row + t, lane, r);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const Weights weights(state.p[i], parameters.u[i] + k[i]);
          const float closed = 1.0f + exponential(-r[i]);
          out[i] = __fdividef(weights.of(state.a[i], v[i]), weights.with_one(state.b[i]) * closed);
        }
        if (there) Vector<T, V>::of(out).store(y.at(line, first + t, channel));
        state.advance(parameters, k, v);
      }
    } else {
      join(state, alone, static_cast<float>(count), parameters);
    }
    __syncthreads();
    ask(begin + kTokens * kWarps);
    if (warp == kWarps - 1) sums.store(kWarps, lane, state);
    if (ht != nullptr && there && count > 0 && first + count == call.length) {
      state.store(ht + line * 3 * call.channels + channel, call.channels);
    }
  }
  ptx::copy_async_wait<0>();
}

template <class T>
using BackwardTile = Tile<T, kBackwardWarps, kBackwardTokens, 1, 4>;
using BackwardSums = Sums<1, kBackwardWarps>;
template <class T>
constexpr int kBackwardTileBytes = 2 * BackwardTile<T>::kBytes + 2 * BackwardSums::kBytes;

// What backward is told beside its call; gradients of parameters by line: [lines,E].
template <class T>
struct TileGradients {
  Lines<T> dy, dk, dv, dr;
  float *dtime_decay, *dtime_first;
};

template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 2) tile_backward_kernel(Call<T> call, TileGradients<T> to) {
  constexpr int kTokens = kBackwardTokens, kWarps = kBackwardWarps, kInTile = kTokens * kWarps;
  extern __shared__ __align__(16) unsigned char memory[];
  const BackwardSums before{reinterpret_cast<float*>(memory + 2 * BackwardTile<T>::kBytes)};
  const BackwardSums behind{before.data + BackwardSums::kBytes / static_cast<int>(sizeof(float))};
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int across = (call.channels + 31) / 32;
  const std::int64_t line = blockIdx.x / across, tiles = (call.length + kInTile - 1) / kInTile;
  const int first_channel = static_cast<int>(blockIdx.x - line * across) * 32, channel = first_channel + lane;
  const bool there = channel < call.channels;
  const auto tile_of = [&](std::int64_t index) {
    return BackwardTile<T>{reinterpret_cast<T*>(memory + index % 2 * BackwardTile<T>::kBytes)};
  };
  flashgla::cuda::wait_for_previous();
  const auto ask = [&](std::int64_t index) {
    if (index >= 0) {
      const BackwardTile<T> tile = tile_of(index);
      tile.copy(0, call.k, call, line, index * kInTile, first_channel);
      tile.copy(1, call.v, call, line, index * kInTile, first_channel);
      tile.copy(2, call.r, call, line, index * kInTile, first_channel);
      tile.copy(3, to.dy, call, line, index * kInTile, first_channel);
    }
    ptx::copy_async_commit();
  };
  ask(tiles - 1);
  const Parameters<1> parameters(call, there ? channel : 0);
  const float w = parameters.w[0], u = parameters.u[0];
  State<1> back;  // P, Q and m
  back.clear();
  if (warp == 0) behind.store(kWarps, lane, back);
  float dw = 0.0f, du = 0.0f;
  for (std::int64_t index = tiles - 1; index >= 0; --index) {
    ask(index - 1);
    const BackwardTile<T> tile = tile_of(index);
    const std::int64_t begin = index * kInTile, first = begin + warp * kTokens;
    const int count = tokens_from(call, first, kTokens), row = warp * kTokens;
    State<1> start;
    start.clear();
    if (there) {
      if (index == 0) {
        start.begin(call, line, channel);
      } else {
        start.load(call.prefixes + (line * call.segments + index) * 3 * call.channels + channel, call.channels);
      }
    }
    ptx::copy_async_wait<1>();
    __syncthreads();
    float k[kTokens], v[kTokens];
    State<1> state;
    state.clear();
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      k[t] = to_float(*tile.at(0, row + t, lane));
      v[t] = to_float(*tile.at(1, row + t, lane));
      if (t < count) state.advance(parameters, {k[t]}, {v[t]});
    }
    before.store(warp, lane, state);
    __syncthreads();
#pragma unroll 4
    for (int other = 0; other < (count > 0 ? warp : 0); ++other) {
      join(start, before.load(other, lane), kTokens, parameters);
    }
    // Back over the tokens with nothing behind them: what each reads, and the sums for what is before the warp's.
    State<1> states[kTokens];
    states[0] = start;
#pragma unroll
    for (int t = 1; t < kTokens; ++t) {
      states[t] = states[t - 1];
      states[t].advance(parameters, {k[t - 1]}, {v[t - 1]});
    }
    float q[kTokens], y[kTokens], own[kTokens], largest[kTokens];
    back.clear();
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      if (t >= count) continue;
      const float gradient = to_float(*tile.at(3, row + t, lane));
      const Return token(states[t].a[0], states[t].b[0], states[t].p[0], u + k[t], v[t],
                         to_float(*tile.at(2, row + t, lane)), gradient);
      if (there) {
        *to.dr.at(line, first + t, channel) = from_float<T>(gradient * token.open * token.y * (1.0f - token.open));
      }
      q[t] = token.q;
      y[t] = token.y;
      own[t] = token.second * token.q;
      largest[t] = token.largest;
      const Weights past(back.p[0] + w, -token.largest);
      back.a[0] = past.of(back.a[0], token.q);
      back.b[0] = past.of(back.b[0], token.q * token.y);
      back.p[0] = past.largest;
    }
    behind.store(warp, lane, back);
    __syncthreads();
    back = behind.load(kWarps, lane);
#pragma unroll 4
    for (int other = kWarps - 1; other > warp; --other) {
      join(back, behind.load(other, lane), static_cast<float>(tokens_from(call, begin + other * kTokens, kTokens)),
           parameters);
    }
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      if (t >= count) continue;
      const float through = exponential(k[t] + back.p[0]), to_first = own[t] * (v[t] - y[t]);
      du += to_first;
      dw = fmaf(exponential(w + states[t].p[0] + back.p[0]),
                fmaf(back.a[0], states[t].a[0], -back.b[0] * states[t].b[0]), dw);
      if (there) {
        *to.dv.at(line, first + t, channel) = from_float<T>(fmaf(through, back.a[0], own[t]));
        *to.dk.at(line, first + t, channel) = from_float<T>(fmaf(through, fmaf(v[t], back.a[0], -back.b[0]), to_first));
      }
      const Weights past(back.p[0] + w, -largest[t]);
      back.a[0] = past.of(back.a[0], q[t]);
      back.b[0] = past.of(back.b[0], q[t] * y[t]);
      back.p[0] = past.largest;
    }
    __syncthreads();
    if (warp == 0) behind.store(kWarps, lane, back);
  }
  ptx::copy_async_wait<0>();
  float* totals = before.data;  // [kWarps][2][32]
  totals[(2 * warp) * 32 + lane] = dw;
  totals[(2 * warp + 1) * 32 + lane] = du;
  __syncthreads();
  if (warp > 0 || !there) return;
  for (int other = 1; other < kWarps; ++other) {
    dw += totals[(2 * other) * 32 + lane];
    du += totals[(2 * other + 1) * 32 + lane];
  }
  to.dtime_decay[line * call.channels + channel] = w * dw;
  to.dtime_first[line * call.channels + channel] = du;
}

}  // namespace flashgla::ops::wkv::cuda

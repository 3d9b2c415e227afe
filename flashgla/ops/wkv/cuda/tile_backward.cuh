// Backward by tiles (tiles.cuh): the tiles from the last, each with its states computed again, and sums and joins of
// (P, Q, m) in the other direction.
//
// A warp's unit M is the largest of its keys and of the state's exponent before them, so that no divisor is below
// 2^-kCalm; what comes from behind must not be larger than 2^kCalm in units of e^-M.
#pragma once

#include "flashgla/ops/wkv/cuda/tiles.cuh"

namespace flashgla::ops::wkv::cuda {

template <class T>
using BackwardTile = Tile<T, kBackwardWarps, kBackwardTokens, 1, 4>;
using BackwardSums = Sums<1, kBackwardWarps>;
template <class T>
constexpr int kBackwardTileBytes = 2 * BackwardTile<T>::kBytes + 2 * BackwardSums::kBytes;

// What backward is told beside its call; gradients of parameters by part: [lines * parts,E].
template <class T>
struct TileGradients {
  Lines<T> dy, dk, dv, dr;
  float *dtime_decay, *dtime_first;
};

// A warp's tokens of a tile, `count` of them there, of one channel a lane. kSums: nothing is written.
template <class T, bool kSums>
struct WarpTokens {
  static constexpr int kTokens = kBackwardTokens;
  const TileGradients<T>& to;
  const Parameters<1>& parameters;
  BackwardTile<T> tile;
  std::int64_t line, first;
  int row, lane, channel, count;
  bool there;
  float w, u, decay, bonus;  // the latter two: e to them
  float k[kTokens], v[kTokens], largest_key, least_key;
  float a[kTokens], b[kTokens], p[kTokens];  // what each token reads
  float q[kTokens], y[kTokens];

  __device__ __forceinline__ void load() {
    largest_key = kEmpty;
    least_key = -kEmpty;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      k[t] = to_float(*tile.at(0, row + t, lane));
      v[t] = to_float(*tile.at(1, row + t, lane));
      largest_key = fmaxf(largest_key, k[t]);
      least_key = fminf(least_key, k[t]);
    }
  }
  // Whether all lanes have all tokens, and their keys' and bonuses' weights in units of e^-M are above 2^-kCalm.
  __device__ __forceinline__ bool calm(float M) const {
    return __all_sync(~0u, there && count == kTokens && M - least_key + fabsf(u) <= kCalm / kLog2E) != 0;
  }
  // What they sum up to alone.
  __device__ __forceinline__ State<1> alone() const {
    State<1> state;
    state.clear();
    if (calm(largest_key)) {
      state.p[0] = largest_key;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const float key = exponential(k[t] - largest_key);
        state.a[0] = fmaf(decay, state.a[0], key * v[t]);
        state.b[0] = fmaf(decay, state.b[0], key);
      }
      return state;
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < count) state.advance(parameters, {k[t]}, {v[t]});
    }
    return state;
  }

  // From the state before them to (P, Q, m) of what they give to what is before them; with one unit.
  __device__ __forceinline__ State<1> states(const State<1>& start, float M, float (&key)[kTokens]) {
    const float scale = exponential(start.p[0] - M);
    float A = start.a[0] * scale, B = start.b[0] * scale;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      key[t] = exponential(k[t] - M);
      a[t] = A;
      b[t] = B;
      A = fmaf(decay, A, key[t] * v[t]);
      B = fmaf(decay, B, key[t]);
    }
    State<1> back;
    back.clear();
    back.p[0] = -M;
    T* dr = to.dr.at(line, first + kTokens - 1, channel);
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      const float with = bonus * key[t], gradient = receive(t, fmaf(with, v[t], a[t]), b[t] + with);
      if (!kSums) *dr = from_float<T>(gradient);
      dr -= to.dr.token_stride;
      back.a[0] = fmaf(decay, back.a[0], q[t]);
      back.b[0] = fmaf(decay, back.b[0], q[t] * y[t]);
    }
    return back;
  }
  __device__ __forceinline__ State<1> states(const State<1>& start) {
    State<1> state = start;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      a[t] = state.a[0];
      b[t] = state.b[0];
      p[t] = state.p[0];
      state.advance(parameters, {k[t]}, {v[t]});
    }
    State<1> back;
    back.clear();
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      if (t >= count) continue;
      const Weights weights(p[t], u + k[t]);
      const float gradient = receive(t, weights.of(a[t], v[t]), weights.with_one(b[t]));
      if (there && !kSums) *to.dr.at(line, first + t, channel) = from_float<T>(gradient);
      add_back(back, t);
    }
    return back;
  }
  // `back`, (P, Q, m) behind them, becomes what is before them; with one unit.
  __device__ __forceinline__ void gradients(State<1>& back, float M, const float (&key)[kTokens], float& dw,
                                            float& du) const {
    const float scale = exponential(back.p[0] + M);
    float P = back.a[0] * scale, Q = back.b[0] * scale;
    T *dk = to.dk.at(line, first + kTokens - 1, channel), *dv = to.dv.at(line, first + kTokens - 1, channel);
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      const float own = bonus * key[t] * q[t], to_first = own * (v[t] - y[t]);
      du += to_first;
      dw = fmaf(decay, fmaf(P, a[t], -Q * b[t]), dw);
      *dk = from_float<T>(fmaf(key[t], fmaf(v[t], P, -Q), to_first));
      *dv = from_float<T>(fmaf(key[t], P, own));
      dk -= to.dk.token_stride;
      dv -= to.dv.token_stride;
      P = fmaf(decay, P, q[t]);
      Q = fmaf(decay, Q, q[t] * y[t]);
    }
    back.a[0] = P;
    back.b[0] = Q;
    back.p[0] = -M;
  }
  __device__ __forceinline__ void gradients(State<1>& back, float& dw, float& du) const {
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      if (t >= count) continue;
      const float own = exponential(u + k[t] - largest(t)) * q[t], to_first = own * (v[t] - y[t]);
      const float through = exponential(k[t] + back.p[0]);
      du += to_first;
      dw = fmaf(exponential(w + p[t] + back.p[0]), fmaf(back.a[0], a[t], -back.b[0] * b[t]), dw);
      if (there) {
        *to.dk.at(line, first + t, channel) = from_float<T>(fmaf(through, fmaf(v[t], back.a[0], -back.b[0]), to_first));
        *to.dv.at(line, first + t, channel) = from_float<T>(fmaf(through, back.a[0], own));
      }
      add_back(back, t);
    }
  }

 private:
  // q and y of a token; its gradient of r.
  __device__ __forceinline__ float receive(int t, float numerator, float divisor) {
    const float inverse = reciprocal(divisor), open = ops::cuda::sigmoid(to_float(*tile.at(2, row + t, lane)));
    const float through = to_float(*tile.at(3, row + t, lane)) * open;
    y[t] = numerator * inverse;
    q[t] = through * inverse;
    return through * y[t] * (1.0f - open);
  }
  // The exponent that a token's divisor is in units of.
  __device__ __forceinline__ float largest(int t) const { return fmaxf(p[t], u + k[t]); }
  __device__ __forceinline__ void add_back(State<1>& back, int t) const {
    const Weights past(back.p[0] + w, -largest(t));
    back.a[0] = past.of(back.a[0], q[t]);
    back.b[0] = past.of(back.b[0], q[t] * y[t]);
    back.p[0] = past.largest;
  }
};

// kSums: only what parts but the first give to what is before them, with nothing behind them.
template <class T, bool kSums>
__global__ void __launch_bounds__(kBackwardThreads, 2)
    tile_backward_kernel(Call<T> call, Parts parts, TileGradients<T> to) {
  constexpr int kTokens = kBackwardTokens, kWarps = kBackwardWarps, kInTile = kTokens * kWarps;
  extern __shared__ __align__(16) unsigned char memory[];
  const BackwardSums before{reinterpret_cast<float*>(memory + 2 * BackwardTile<T>::kBytes)};
  const BackwardSums behind{before.data + BackwardSums::kBytes / static_cast<int>(sizeof(float))};
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int across = (call.channels + 31) / 32;
  const std::int64_t above = blockIdx.x / across, line = above / parts.count, part = above - line * parts.count;
  const std::int64_t first_tile = part * parts.tokens / kInTile;
  const std::int64_t tiles =
      part + 1 == parts.count ? (call.length + kInTile - 1) / kInTile : first_tile + parts.tokens / kInTile;
  const int first_channel = static_cast<int>(blockIdx.x - above * across) * 32, channel = first_channel + lane;
  const bool there = channel < call.channels;
  const auto tile_of = [&](std::int64_t index) {
    return BackwardTile<T>{reinterpret_cast<T*>(memory + index % 2 * BackwardTile<T>::kBytes)};
  };
  flashgla::cuda::wait_for_previous();
  if (kSums && part == 0) return;
  const auto ask = [&](std::int64_t index) {
    if (index >= first_tile) {
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
  float* end = parts.count == 1 ? nullptr : parts.end_of(line, part, call.channels) + channel;
  if (!kSums && there && part + 1 < parts.count) back.load(end, call.channels);
  if (warp == 0) behind.store(kWarps, lane, back);
  float dw = 0.0f, du = 0.0f;
  WarpTokens<T, kSums> tokens{to, parameters};
  tokens.line = line;
  tokens.row = warp * kTokens;
  tokens.lane = lane;
  tokens.channel = channel;
  tokens.there = there;
  tokens.w = w;
  tokens.u = u;
  tokens.decay = exponential(w);
  tokens.bonus = exponential(u);
  for (std::int64_t index = tiles - 1; index >= first_tile; --index) {
    ask(index - 1);
    const std::int64_t begin = index * kInTile, first = begin + warp * kTokens;
    const int count = tokens_from(call, first, kTokens);
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
    tokens.tile = tile_of(index);
    tokens.first = first;
    tokens.count = count;
    tokens.load();
    before.store(warp, lane, tokens.alone());
    __syncthreads();
#pragma unroll 4
    for (int other = 0; other < (count > 0 ? warp : 0); ++other) {
      join(start, before.load(other, lane), kTokens, parameters);
    }
    const float M = fmaxf(tokens.largest_key, start.p[0]);
    const bool calm = tokens.calm(M);
    float key[kTokens];
    back = calm ? tokens.states(start, M, key) : tokens.states(start);
    behind.store(warp, lane, back);
    __syncthreads();
    back = behind.load(kWarps, lane);
#pragma unroll 4
    for (int other = kWarps - 1; other > warp; --other) {
      join(back, behind.load(other, lane), static_cast<float>(tokens_from(call, begin + other * kTokens, kTokens)),
           parameters);
    }
    if (kSums) {
      if (warp == 0) join(back, behind.load(0, lane), static_cast<float>(count), parameters);
      __syncthreads();
      if (warp == 0) behind.store(kWarps, lane, back);
      continue;
    }
    const bool stays = calm && __all_sync(~0u, back.p[0] + M <= kCalm / kLog2E) != 0;
    if (stays) {
      tokens.gradients(back, M, key, dw, du);
    } else {
      if (calm) tokens.states(start);
      tokens.gradients(back, dw, du);
    }
    __syncthreads();
    if (warp == 0) behind.store(kWarps, lane, back);
  }
  ptx::copy_async_wait<0>();
  if (kSums) {
    if (there && warp == 0) back.store(end, call.channels);
    return;
  }
  float* totals = before.data;  // [kWarps][2][32]
  totals[(2 * warp) * 32 + lane] = dw;
  totals[(2 * warp + 1) * 32 + lane] = du;
  __syncthreads();
  if (warp > 0 || !there) return;
  for (int other = 1; other < kWarps; ++other) {
    dw += totals[(2 * other) * 32 + lane];
    du += totals[(2 * other + 1) * 32 + lane];
  }
  to.dtime_decay[above * call.channels + channel] = w * dw;
  to.dtime_first[above * call.channels + channel] = du;
}

}  // namespace flashgla::ops::wkv::cuda

// Backward by tiles (tiles.cuh): the tiles from the last, each with its states computed again, and sums and joins of
// (P, Q, m) in the other direction.
#pragma once

#include "flashgla/ops/wkv/cuda/tiles.cuh"

namespace flashgla::ops::wkv::cuda {

// k, v, r and dy; in the places of the first three then dk, dv and dr.
template <class T>
using BackwardTile = Tile<T, kBackwardWarps, kBackwardTokens, 1, 4>;
using BackwardSums = Sums<1, kBackwardWarps>;
constexpr int kStartFloats = 3 * 32;  // of the state before a tile
template <class T>
constexpr int kBackwardTileBytes = 2 * (BackwardTile<T>::kBytes + kStartFloats * static_cast<int>(sizeof(float)) +
                                        BackwardSums::kBytes);

// What backward is told beside its call; gradients of parameters by part: [lines * parts,E].
template <class T>
struct TileGradients {
  Lines<T> dy, dk, dv, dr;
  float *dtime_decay, *dtime_first;
};

// A warp's tokens of a calm tile, one channel a lane. P and Q are in units of e^-R where A and B are in those of e^R.
template <class T>
struct CalmTokens {
  static constexpr int kTokens = kBackwardTokens;
  const BackwardTile<T>& tile;
  int row, lane;
  float decay, bonus;              // e^w, e^u
  float key[kTokens], v[kTokens];  // e^(k - R)
  float a[kTokens], b[kTokens];    // what each token reads
  float q[kTokens], y[kTokens];

  // What they sum up to alone, in units of 2^unit; how far their keys are from that.
  __device__ __forceinline__ float sum_up(float unit, float& A, float& B) {
    float far = 0.0f;
    A = B = 0.0f;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float above = fmaf(at(0, t), kLog2E, -unit);
      far = fmaxf(far, fabsf(above));
      key[t] = ops::cuda::power_of_two(above);
      v[t] = at(1, t);
      A = fmaf(decay, A, key[t] * v[t]);
      B = fmaf(decay, B, key[t]);
    }
    return far;
  }
  // From the sums before them to what they alone give to those. kOut: with dr.
  template <bool kOut>
  __device__ __forceinline__ void states(float A, float B, float& P, float& Q) {
    // All reads first: none of them may move over a write.
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      y[t] = at(2, t);
      q[t] = at(3, t);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float value = key[t] * v[t], inverse = reciprocal(fmaf(bonus, key[t], B));
      const float open = ops::cuda::sigmoid(y[t]), through = q[t] * open;
      y[t] = fmaf(bonus, value, A) * inverse;
      q[t] = through * inverse;
      if (kOut) tile.set(2, row + t, lane, {through * y[t] * (1.0f - open)});
      a[t] = A;
      b[t] = B;
      A = fmaf(decay, A, value);
      B = fmaf(decay, B, key[t]);
    }
    P = Q = 0.0f;
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      P = fmaf(decay, P, q[t]);
      Q = fmaf(decay, Q, q[t] * y[t]);
    }
  }
  // P and Q behind them become those before them.
  __device__ __forceinline__ void gradients(float& P, float& Q, float& dw, float& du) const {
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      const float own = bonus * key[t] * q[t], to_first = own * (v[t] - y[t]);
      du += to_first;
      dw = fmaf(decay, fmaf(P, a[t], -Q * b[t]), dw);
      tile.set(0, row + t, lane, {fmaf(key[t], fmaf(v[t], P, -Q), to_first)});
      tile.set(1, row + t, lane, {fmaf(key[t], P, own)});
      P = fmaf(decay, P, q[t]);
      Q = fmaf(decay, Q, q[t] * y[t]);
    }
  }

 private:
  __device__ __forceinline__ float at(int tensor, int t) const {
    float value[1];
    tile.get(tensor, row + t, lane, value);
    return value[0];
  }
};

// The same of any tile, `count` of them there.
template <class T>
struct WarpTokens {
  static constexpr int kTokens = kBackwardTokens;
  const Parameters<1>& parameters;
  const BackwardTile<T>& tile;
  int row, lane, count;
  float k[kTokens], v[kTokens];
  float a[kTokens], b[kTokens], p[kTokens];  // what each token reads
  float q[kTokens], y[kTokens];

  // What they sum up to alone.
  __device__ __forceinline__ State<1> sum_up() {
    State<1> state;
    state.clear();
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      k[t] = at(0, t);
      v[t] = at(1, t);
      if (t < count) state.advance(parameters, {k[t]}, {v[t]});
    }
    return state;
  }
  // From the state before them to (P, Q, m) of what they alone give to what is before them. kOut: with dr.
  template <bool kOut>
  __device__ __forceinline__ State<1> states(State<1> state) {
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
      const Weights weights(p[t], parameters.u[0] + k[t]);
      const float inverse = reciprocal(weights.with_one(b[t]));
      const float open = ops::cuda::sigmoid(at(2, t)), through = at(3, t) * open;
      y[t] = weights.of(a[t], v[t]) * inverse;
      q[t] = through * inverse;
      if (kOut) tile.set(2, row + t, lane, {through * y[t] * (1.0f - open)});
      add_back(back, t);
    }
    return back;
  }
  // `back`, (P, Q, m) behind them, becomes what is before them.
  __device__ __forceinline__ void gradients(State<1>& back, float& dw, float& du) const {
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      if (t >= count) continue;
      const float own = exponential(parameters.u[0] + k[t] - largest(t)) * q[t], to_first = own * (v[t] - y[t]);
      const float through = exponential(k[t] + back.p[0]);
      du += to_first;
      dw = fmaf(exponential(parameters.w[0] + p[t] + back.p[0]), fmaf(back.a[0], a[t], -back.b[0] * b[t]), dw);
      tile.set(0, row + t, lane, {fmaf(through, fmaf(v[t], back.a[0], -back.b[0]), to_first)});
      tile.set(1, row + t, lane, {fmaf(through, back.a[0], own)});
      add_back(back, t);
    }
  }

 private:
  __device__ __forceinline__ float at(int tensor, int t) const {
    float value[1];
    tile.get(tensor, row + t, lane, value);
    return value[0];
  }
  // The exponent that a token's divisor is in units of.
  __device__ __forceinline__ float largest(int t) const { return fmaxf(p[t], parameters.u[0] + k[t]); }
  __device__ __forceinline__ void add_back(State<1>& back, int t) const {
    const Weights past(back.p[0] + parameters.w[0], -largest(t));
    back.a[0] = past.of(back.a[0], q[t]);
    back.b[0] = past.of(back.b[0], q[t] * y[t]);
    back.p[0] = past.largest;
  }
};

// What a block does with a tile once it is there.
template <class T, bool kSums>
struct TileBackward {
  static constexpr int kWarps = kBackwardWarps, kTokens = kBackwardTokens;
  const BackwardSums before, behind;  // with the parameters in the first
  const int lane, warp;
  const float decay, warp_decay, tile_decay, bonus;  // e^w, also of a warp's and a tile's tokens, and e^u
  float dw = 0.0f, du = 0.0f;
  // kSums: what a warp's tokens of all tiles so far give to what is before its first one.
  State<1> own;

  __device__ __forceinline__ TileBackward(const Parameters<1>& of, const BackwardSums& sums_before,
                                          const BackwardSums& sums_behind)
      : before(sums_before),
        behind(sums_behind),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        decay(exponential(of.w[0])),
        warp_decay(exponential(kTokens * of.w[0])),
        tile_decay(exponential(kTokens * kWarps * of.w[0])),
        bonus(exponential(of.u[0])) {
    own.clear();
  }

  // tokens: how many the tile has; turn: which place has what is behind it, the other one is for what is before it.
  __device__ __forceinline__ void run(const BackwardTile<T>& tile, const State<1>& start, int tokens, int turn) {
    const State<1> back = kSums ? own : behind.load(kWarps + turn, lane);
    const float unit = start.b[0] > 0.0f ? start.p[0] : 0.0f;
    const float above = kLog2E * (back.p[0] + unit);  // what is behind, in units of e^-unit
    CalmTokens<T> calm{tile, warp * kTokens, lane, decay, bonus};
    float a[1], b[1];
    const float far = calm.sum_up(kLog2E * unit, a[0], b[0]) + kLog2E * fabsf(before.parameters(lane).u[0]);
    before.store_sums(warp, lane, a, b);
    if (__syncthreads_and(tokens == kTokens * kWarps && far <= kCalm && above <= kCalm) == 0) {
      return run_by_maximum(tile, start, back, tokens, turn);
    }
    a[0] = start.a[0];
    b[0] = start.b[0];
#pragma unroll 4
    for (int other = 0; other < warp; ++other) before.join_sums(other, lane, {warp_decay}, a, b);
    float P[1], Q[1];
    calm.template states<!kSums>(a[0], b[0], P[0], Q[0]);
    const float scale = ops::cuda::power_of_two(above);
    if (kSums) {
      own.a[0] = fmaf(tile_decay, own.a[0] * scale, P[0]);
      own.b[0] = fmaf(tile_decay, own.b[0] * scale, Q[0]);
      own.p[0] = -unit;
      return;
    }
    behind.store_sums(warp, lane, P, Q);
    __syncthreads();
    P[0] = back.a[0] * scale;
    Q[0] = back.b[0] * scale;
#pragma unroll 4
    for (int other = kWarps - 1; other > warp; --other) behind.join_sums(other, lane, {warp_decay}, P, Q);
    calm.gradients(P[0], Q[0], dw, du);
    if (warp == 0) behind.store(kWarps + 1 - turn, lane, {{P[0]}, {Q[0]}, {-unit}});
  }

 private:
  __device__ __forceinline__ void run_by_maximum(const BackwardTile<T>& tile, State<1> start, State<1> back, int tokens,
                                                 int turn) {
    const auto tokens_of = [&](int other) { return max(0, min(tokens - other * kTokens, kTokens)); };
    const int count = tokens_of(warp);
    const Parameters<1> parameters = before.parameters(lane);
    WarpTokens<T> any{parameters, tile, warp * kTokens, lane, count};
    before.store(warp, lane, any.sum_up());
    __syncthreads();
#pragma unroll 1
    for (int other = 0; other < (count > 0 ? warp : 0); ++other) {
      join(start, before.load(other, lane), kTokens, parameters);
    }
    const State<1> alone = any.template states<!kSums>(start);
    if (kSums) return join(own, alone, kTokens * kWarps, parameters);
    behind.store(warp, lane, alone);
    __syncthreads();
#pragma unroll 1
    for (int other = kWarps - 1; other > warp; --other) {
      join(back, behind.load(other, lane), static_cast<float>(tokens_of(other)), parameters);
    }
    any.gradients(back, dw, du);
    if (warp == 0) behind.store(kWarps + 1 - turn, lane, back);
  }
};

// kSums: only what parts but the first give to what is before them, with nothing behind them.
template <class T, bool kSums>
__global__ void __launch_bounds__(kBackwardThreads, 2)
    tile_backward_kernel(Call<T> call, Parts parts, TileGradients<T> to) {
  using OfTile = BackwardTile<T>;
  constexpr int kWarps = kBackwardWarps, kInTile = OfTile::kTokens;
  extern __shared__ __align__(16) unsigned char memory[];
  float* const starts = reinterpret_cast<float*>(memory + 2 * OfTile::kBytes);
  const BackwardSums before{starts + 2 * kStartFloats};
  const BackwardSums behind{before.data + BackwardSums::kFloats};
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int across = (call.channels + 31) / 32;
  const int above = static_cast<int>(blockIdx.x) / across, line = above / parts.count,
            part = above - line * parts.count;
  const int all_tiles = (static_cast<int>(call.length) + kInTile - 1) / kInTile;
  const int first_tile = part * (parts.tokens / kInTile);
  const int last_tile = part + 1 == parts.count ? all_tiles - 1 : first_tile + parts.tokens / kInTile - 1;
  const int first_channel = (static_cast<int>(blockIdx.x) - above * across) * 32, channel = first_channel + lane;
  const bool there = channel < call.channels;
  flashgla::cuda::wait_for_previous();
  if (kSums && part == 0) return;

  // A thread's pieces of the tile that is asked for next and of the one that goes out next.
  const int piece = first_channel + OfTile::thread_channel();
  const std::int64_t row = std::int64_t{last_tile} * kInTile + OfTile::thread_row();
  const T* sources[4] = {call.k.at(line, row, piece), call.v.at(line, row, piece), call.r.at(line, row, piece),
                         to.dy.at(line, row, piece)};
  T* targets[3] = {to.dk.at(line, row, piece), to.dv.at(line, row, piece), to.dr.at(line, row, piece)};
  const int start_row = static_cast<int>(threadIdx.x) / 8, start_piece = static_cast<int>(threadIdx.x) % 8 * 4;
  const float* start_source = call.prefixes + ((line * call.segments + last_tile) * 3 + start_row) * call.channels +
                              first_channel + start_piece;
  const auto tokens_in = [&](int index) { return min(static_cast<int>(call.length) - index * kInTile, kInTile); };
  const auto rows_in = [&](int index) { return piece < call.channels ? tokens_in(index) - OfTile::thread_row() : 0; };
  const auto tile_of = [&](int index) { return OfTile{reinterpret_cast<T*>(memory + (index & 1) * OfTile::kBytes)}; };
  const auto ask = [&](int index) {
    const Lines<T>* tensors[4] = {&call.k, &call.v, &call.r, &to.dy};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tile_of(index).copy(i, sources[i], tensors[i]->token_stride, rows_in(index));
      sources[i] -= kInTile * tensors[i]->token_stride;
    }
    if (start_row < 3 && index > 0) {
      ptx::copy_async_16(ptx::shared_address(starts + (index & 1) * kStartFloats + start_row * 32 + start_piece),
                         start_source, first_channel + start_piece < call.channels ? 16 : 0);
    }
    start_source -= 3 * call.channels;
    ptx::copy_async_commit();
  };
  const auto put_out = [&](int index) {
    const Lines<T>* tensors[3] = {&to.dk, &to.dv, &to.dr};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      tile_of(index).put_out(i, targets[i], tensors[i]->token_stride, rows_in(index));
      targets[i] -= kInTile * tensors[i]->token_stride;
    }
  };

  ask(last_tile);
  const Parameters<1> parameters(call, there ? channel : 0);
  if (warp == 0) before.store(lane, parameters);
  TileBackward<T, kSums> work(parameters, before, behind);
  if (!kSums && warp == 0) {
    State<1> back;  // P, Q and m
    back.clear();
#pragma unroll 4
    for (int other = parts.count - 1; other > (there ? part : parts.count); --other) {
      State<1> alone;
      alone.load(parts.end_of(line, other, call.channels) + channel, call.channels);
      join(back, alone, static_cast<float>(parts.tokens), parameters);
    }
    behind.store(kWarps + (last_tile & 1), lane, back);
  }
  for (int index = last_tile; index >= first_tile; --index) {
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (!kSums && index < last_tile) put_out(index + 1);
    if (index > first_tile) ask(index - 1);
    State<1> start;
    if (index > 0) {
      start.load(starts + (index & 1) * kStartFloats + lane, 32);
    } else if (there) {
      start.begin(call, line, channel);
    }
    if (!there) start.clear();
    work.run(tile_of(index), start, tokens_in(index), (index & 1));
  }
  if (kSums) {
    behind.store(warp, lane, work.own);
    __syncthreads();
    if (!there || warp > 0) return;
    State<1> back = behind.load(kWarps - 1, lane);
    for (int other = kWarps - 2; other >= 0; --other) {
      join(back, behind.load(other, lane), kBackwardTokens, before.parameters(lane));
    }
    back.store(parts.end_of(line, part, call.channels) + channel, call.channels);
    return;
  }
  float* totals = before.data;  // [kWarps][2][32]
  __syncthreads();
  put_out(first_tile);
  totals[(2 * warp) * 32 + lane] = work.dw;
  totals[(2 * warp + 1) * 32 + lane] = work.du;
  __syncthreads();
  if (warp > 0 || !there) return;
  float dw = work.dw, du = work.du;
  for (int other = 1; other < kWarps; ++other) {
    dw += totals[(2 * other) * 32 + lane];
    du += totals[(2 * other + 1) * 32 + lane];
  }
  const std::int64_t place = std::int64_t{above} * call.channels + channel;
  to.dtime_decay[place] = before.parameters(lane).w[0] * dw;
  to.dtime_first[place] = du;
}

}  // namespace flashgla::ops::wkv::cuda

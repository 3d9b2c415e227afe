// Forward: one pass over the tokens, the states before every chunk kept where backward wants them. A chunk's inputs are
// asked for while the one before is walked through. A warp needs no other.
#pragma once

#include "flashgla/ops/selective_scan/cuda/scan.cuh"

namespace flashgla::ops::selective_scan::cuda {

// Of a warp.
struct ForwardShared {
  float keys[kChunk][2][kStates];
  float dt[kChunk][kRow];
  float driven[kChunk][kRow];  // dt x
  float sums[kChunk][kRow];    // over the states, of c h
  float bias[kWarp], skip[kWarp];
};

// y null: only ht and what is kept.
template <class T>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(Call<T> call, Lines<T> y, float* ht) {
  flashgla::cuda::wait_for_previous();
  __shared__ __align__(16) ForwardShared of_warps[kWarps];
  const Where where(blockIdx.x % call.tiles);
  const Place place(call, blockIdx.x / call.tiles);
  ForwardShared& shared = of_warps[where.warp];
  const std::int64_t state = place.n * call.channels * call.states;
  float rates[kPair][kHalf], h[kPair][kHalf];
  load_rates(call, where, rates);
  load_states(call, where, call.h0 == nullptr ? nullptr : call.h0 + state, h);
  load_parameter(call, where, call.dt_bias, shared.bias);
  load_parameter(call, where, call.skip, shared.skip);
  __syncwarp();

  Vector<T, kWide> x = load_wide(call, call.x, where, place, 0), raw = load_wide(call, call.raw, where, place, 0);
  Vector<T, kWide> z = load_wide(call, call.z, where, place, 0);
  Vector<T, kHalf> keys = load_keys(call, where, place, 0);
  for (int chunk = 0; chunk < place.chunks(); ++chunk) {
    {
      float bias[kWide], dt[kWide], driven[kWide];
      load_floats(&shared.bias[where.wide], bias);
      const bool real = chunk * kChunk + where.token < place.length;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        dt[i] = real ? softplus(raw[i] + bias[i]) : 0.0f;
        driven[i] = dt[i] * x[i];
      }
      store_floats(dt, &shared.dt[where.token][where.wide]);
      store_floats(driven, &shared.driven[where.token][where.wide]);
    }
    store_keys(keys, where, shared.keys);
    if (call.kept != nullptr) store_square(h, kept_at(call, where, place, chunk), kWarp);
    const Vector<T, kWide> own_x = x, own_z = z;
    x = load_wide(call, call.x, where, place, chunk + 1);
    raw = load_wide(call, call.raw, where, place, chunk + 1);
    z = load_wide(call, call.z, where, place, chunk + 1);
    keys = load_keys(call, where, place, chunk + 1);
    __syncwarp();
#pragma unroll 4
    for (int t = 0; t < kChunk; ++t) {
      float dt[kPair], driven[kPair], b[kHalf], c[kHalf], sums[kPair];
      load_floats(&shared.dt[t][where.pair], dt);
      load_floats(&shared.driven[t][where.pair], driven);
      load_floats(&shared.keys[t][0][where.states], b);
      load_floats(&shared.keys[t][1][where.states], c);
      advance(rates, dt, driven, b, h);
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        float odd = c[1] * h[i][1];
        sums[i] = c[0] * h[i][0];
#pragma unroll
        for (int k = 2; k < kHalf; k += 2) {
          sums[i] = fmaf(c[k], h[i][k], sums[i]);
          odd = fmaf(c[k + 1], h[i][k + 1], odd);
        }
        sums[i] += odd;
      }
      shared.sums[t][where.lane] = sum_of_own_channel(sums, where.lane);
    }
    __syncwarp();
    const int t = chunk * kChunk + where.token, channel = where.first + where.wide;
    if (y.data == nullptr || t >= place.length) continue;
    float sums[kWide], skip[kWide];
    load_floats(&shared.sums[where.token][where.wide], sums);
    load_floats(&shared.skip[where.wide], skip);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      sums[i] = fmaf(skip[i], own_x[i], sums[i]) * own_z[i] * ops::cuda::sigmoid(own_z[i]);
    }
    store_eight(sums, y.row(place.line, place.begin + t) + channel, call.channels - channel, call.vectors);
  }
  if (ht != nullptr) store_states(call, where, h, ht + state);
}

}  // namespace flashgla::ops::selective_scan::cuda

// Forward: one pass over the tokens, the states of every chunk's beginning kept where backward wants them. A chunk's
// inputs are asked for while the one before is walked through.
#pragma once

#include "flashgla/ops/selective_scan/cuda/scan.cuh"

namespace flashgla::ops::selective_scan::cuda {

template <class T>
struct ForwardShared {
  float keys[2][kChunk][2][kStates];  // of this chunk and the one before
  float dt[kWarps][kChunk][kWarp];
  float driven[kWarps][kChunk][kWarp];  // dt x
};

// y null: only ht and what is kept.
template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(Call<T> call, Lines<T> y, float* ht) {
  flashgla::cuda::wait_for_previous();
  __shared__ ForwardShared<T> shared;
  const Where where(blockIdx.x % call.tiles);
  const Place place(call, blockIdx.x / call.tiles);
  const bool there = where.channel < call.channels;
  const std::int64_t channels = call.channels;
  float rates[kSide][kSide], h[kSide][kSide];
  load_rates(call, where, rates);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const int channel = where.channel_of(i), state = where.states + k;
      const bool given = call.h0 != nullptr && channel < call.channels && state < call.states;
      h[i][k] = given ? call.h0[(place.n * channels + channel) * call.states + state] : 0.0f;
    }
  }
  const float bias = there ? call.dt_bias[where.channel] : 0.0f, skip = there ? call.skip[where.channel] : 0.0f;
  float(*dt)[kWarp] = shared.dt[where.warp];
  float(*driven)[kWarp] = shared.driven[where.warp];

  float x_ahead[kChunk], raw_ahead[kChunk], z_ahead[kChunk];
  KeysAhead keys_ahead;
  const auto ask_for = [&](std::int64_t first) {
    load_channel(call.x, place, first, where.channel, there, x_ahead);
    load_channel(call.raw, place, first, where.channel, there, raw_ahead);
    load_channel(call.z, place, first, where.channel, there, z_ahead);
    keys_ahead.load(call, place, first);
  };
  ask_for(0);
  for (std::int64_t chunk = 0; chunk < place.chunks(); ++chunk) {
    const std::int64_t first = chunk * kChunk, token = place.begin + first;
    float(*keys)[2][kStates] = shared.keys[chunk % 2];
    keys_ahead.store(keys);
    float x[kChunk], z[kChunk];
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      const bool real = there && first + t < place.length;
      const float step = real ? softplus(raw_ahead[t] + bias) : 0.0f;
      x[t] = x_ahead[t];
      z[t] = z_ahead[t];
      dt[t][where.lane] = step;
      driven[t][where.lane] = step * x[t];
    }
    if (call.kept != nullptr) {
      float4* kept = kept_at(call, where, place, chunk);
#pragma unroll
      for (int i = 0; i < kSide; ++i) kept[i * kWarp] = packed(h[i]);
    }
    __syncthreads();
    ask_for(first + kChunk);
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      float steps[kSide], inputs[kSide], b[kSide], c[kSide], sums[kSide];
      load_four(&dt[t][where.group], steps);
      load_four(&driven[t][where.group], inputs);
      load_four(&keys[t][0][where.states], b);
      load_four(&keys[t][1][where.states], c);
      advance(rates, steps, inputs, b, h);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        sums[i] = 0.0f;
#pragma unroll
        for (int k = 0; k < kSide; ++k) sums[i] = fmaf(c[k], h[i][k], sums[i]);
      }
      const float sum = fmaf(skip, x[t], sum_of_own_channel(sums, where.lane));
      if (y.data != nullptr && there && first + t < place.length) {
        y.row(place.line, token + t)[where.channel] = from_float<T>(sum * z[t] * ops::cuda::sigmoid(z[t]));
      }
    }
    __syncwarp();  // all lanes have read dt and driven
  }
  if (ht == nullptr) return;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const int channel = where.channel_of(i), state = where.states + k;
      if (channel < call.channels && state < call.states) {
        ht[(place.n * channels + channel) * call.states + state] = h[i][k];
      }
    }
  }
}

}  // namespace flashgla::ops::selective_scan::cuda

// Forward: one pass over the tokens, the states of every chunk's beginning kept where backward wants them.
#pragma once

#include "flashgla/ops/selective_scan/cuda/scan.cuh"

namespace flashgla::ops::selective_scan::cuda {

template <class T>
struct ForwardShared {
  float keys[2][kChunk][2][kStates];  // of this chunk and the one before
  float dt[kWarps][kChunk][kWarp];
  float driven[kWarps][kChunk][kWarp];  // dt x; then the sums over the states
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

  for (std::int64_t chunk = 0; chunk < place.chunks(); ++chunk) {
    const std::int64_t first = chunk * kChunk, token = place.begin + first;
    float(*keys)[2][kStates] = shared.keys[chunk % 2];
    load_keys(call, place, first, keys);
    float x[kChunk], step[kChunk];
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      const bool loaded = there && first + t < place.length;
      x[t] = loaded ? to_float(call.x.row(place.line, token + t)[where.channel]) : 0.0f;
      step[t] = loaded ? to_float(call.raw.row(place.line, token + t)[where.channel]) : 0.0f;
    }
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      const bool real = there && first + t < place.length;
      step[t] = real ? softplus(step[t] + bias) : 0.0f;
      dt[t][where.lane] = step[t];
      driven[t][where.lane] = step[t] * x[t];
    }
    if (call.kept != nullptr) {
      float4* kept = kept_at(call, where, place, chunk);
#pragma unroll
      for (int i = 0; i < kSide; ++i) kept[i * kWarp] = packed(h[i]);
    }
    __syncthreads();
#pragma unroll 4
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
      const float sum = sum_of_own_channel(sums, where.lane);
      __syncwarp();
      driven[t][where.lane] = sum;
    }
    __syncwarp();
    if (y.data != nullptr && there) {
#pragma unroll
      for (int t = 0; t < kChunk; ++t) {
        if (first + t >= place.length) continue;
        const float z = to_float(call.z.row(place.line, token + t)[where.channel]);
        const float sum = fmaf(skip, x[t], driven[t][where.lane]);
        y.row(place.line, token + t)[where.channel] = from_float<T>(sum * z * ops::cuda::sigmoid(z));
      }
    }
    __syncwarp();
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

// Forward: one pass over the tokens, the states before every chunk kept where backward wants them. A chunk's inputs are
// asked for while the one before is walked through. A warp needs no other. Where sequences are cut into segments, a
// pass before that finds what each but the last carries on.
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

// The sum of c h over the states of channel `lane` of the warp.
__device__ __forceinline__ float output_of_own_channel(const float (&c)[kHalf], const float (&h)[kPair][kHalf],
                                                       int lane) {
  float sums[kPair];
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
  return sum_of_own_channel(sums, lane);
}

// kCarry: the pass before, of all segments but the last. y null: only ht and what is kept.
template <class T, bool kCarry>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(Call<T> call, Lines<T> y, float* ht) {
  flashgla::cuda::wait_for_previous();
  __shared__ __align__(16) ForwardShared of_warps[kWarps];
  const Where where(call.tiles, kCarry ? call.segments - 1 : call.segments);
  const Place place(call, where.sequence);
  const Chunks chunks(place, where.segment, call.segments);
  ForwardShared& shared = of_warps[where.warp];
  const std::int64_t state = place.n * call.channels * call.states;
  float rates[kPair][kHalf], h[kPair][kHalf], steps[kWide] = {};
  load_rates(call, where, rates);
  load_states(call, where, call.h0 == nullptr || where.segment > 0 ? nullptr : call.h0 + state, h);
  if constexpr (!kCarry) {
    for (int segment = 0; segment < where.segment; ++segment) through_segment(call, where, segment, rates, h);
  }
  load_parameter(call, where, call.dt_bias, shared.bias);
  load_parameter(call, where, call.skip, shared.skip);
  __syncwarp();

  Vector<T, kWide> x = load_wide(call, call.x, where, place, chunks.begin);
  Vector<T, kWide> raw = load_wide(call, call.raw, where, place, chunks.begin), z = x;
  if constexpr (!kCarry) z = load_wide(call, call.z, where, place, chunks.begin);
  Vector<T, kHalf> keys = load_keys(call, where, place, chunks.begin);
  for (int chunk = chunks.begin; chunk < chunks.end; ++chunk) {
    {
      float bias[kWide], dt[kWide], driven[kWide];
      load_floats(&shared.bias[where.wide], bias);
      steps_of(raw, bias, chunk * kChunk + where.token < place.length, dt);
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        driven[i] = dt[i] * x[i];
        if constexpr (kCarry) steps[i] += dt[i];
      }
      store_floats(dt, &shared.dt[where.token][where.wide]);
      store_floats(driven, &shared.driven[where.token][where.wide]);
    }
    store_keys(keys, where, shared.keys);
    if (!kCarry && call.kept != nullptr) store_square(h, kept_at(call, where, place, chunk), kWarp);
    const Vector<T, kWide> own_x = x, own_z = z;
    x = load_wide(call, call.x, where, place, chunk + 1);
    raw = load_wide(call, call.raw, where, place, chunk + 1);
    if constexpr (!kCarry) z = load_wide(call, call.z, where, place, chunk + 1);
    keys = load_keys(call, where, place, chunk + 1);
    __syncwarp();
#pragma unroll 1
    for (int four = 0; four < kChunk; four += 4) {
      float own[4];  // stored behind all four, so that no load of the next token waits for a store
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float dt[kPair], driven[kPair], b[kHalf], c[kHalf];
        load_floats(&shared.dt[four + t][where.pair], dt);
        load_floats(&shared.driven[four + t][where.pair], driven);
        load_floats(&shared.keys[four + t][0][where.states], b);
        advance(rates, dt, driven, b, h);
        if constexpr (kCarry) continue;
        load_floats(&shared.keys[four + t][1][where.states], c);
        own[t] = output_of_own_channel(c, h, where.lane);
      }
      if constexpr (kCarry) continue;
#pragma unroll
      for (int t = 0; t < 4; ++t) shared.sums[four + t][where.lane] = own[t];
    }
    __syncwarp();
    if constexpr (kCarry) continue;
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
  if constexpr (kCarry) {
    store_carried(call, where, where.segment, h, steps);
  } else if (ht != nullptr && where.segment == call.segments - 1) {
    store_states(call, where, h, ht + state);
  }
}

}  // namespace flashgla::ops::selective_scan::cuda

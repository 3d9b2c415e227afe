// Backward: the chunks from the last to the first. Each chunk's states are computed again from the one kept at its
// beginning and wait in shared memory, but for the last, which the threads have. Then the tokens are walked back, the
// gradient of the state in registers.
#pragma once

#include "flashgla/ops/selective_scan/cuda/scan.cuh"

namespace flashgla::ops::selective_scan::cuda {

constexpr int kStored = kChunk - 1;  // tokens whose states wait in shared memory

template <class T>
struct Gradients {
  Lines<T> dy, dx, draw, dz;
  float* partial;  // [tiles,rows,2 kStates]: db and dc of a block's channels
  float* da_log;   // [N,E,K]
  float* dskip;    // [N,E]
  std::int64_t rows;
};

struct BackwardShared {
  // Of a token: each thread's states behind it, and when it has been walked over what Sums says.
  float4 states[kWarps][kStored][kSide][kWarp];
  float4 last[kWarps][kWarp];  // the last token's sums
  float keys[kChunk][2][kStates];
  float dt[kWarps][kChunk][kWarp];
  float driven[kWarps][kChunk][kWarp];  // dt x
  float dsum[kWarps][kChunk][kWarp];    // dy silu(z)
};

// What walking over a token leaves to lane l: of its channel the sums over the states of dh b (x), of the rates' part
// of d(dt) (y) and of c h (z); of the warp's channels what they add to db or dc of state place_of_sum(l) (w). It lies
// in the lane's own first four states of that token, which nobody else reads.
__device__ __forceinline__ float4& sums_at(BackwardShared& shared, int warp, int t, int lane) {
  return t < kStored ? shared.states[warp][t][0][lane] : shared.last[warp][lane];
}

// A channel's own elements of a chunk's tokens.
struct Own {
  float x[kChunk], s[kChunk], z[kChunk], dy[kChunk];

  template <class T>
  __device__ __forceinline__ Own(const Call<T>& call, const Gradients<T>& gradients, const Place& place,
                                 std::int64_t first, int channel, float bias, bool there) {
    load_channel(call.x, place, first, channel, there, x);
    load_channel(call.raw, place, first, channel, there, s);
    load_channel(call.z, place, first, channel, there, z);
    load_channel(gradients.dy, place, first, channel, there, dy);
#pragma unroll
    for (int t = 0; t < kChunk; ++t) s[t] += bias;
  }
};

struct Walk {
  const Where& where;
  const float (&rates)[kSide][kSide];
  float (&dh)[kSide][kSide];
  float (&da)[kSide][kSide];
  float (*keys)[2][kStates];
  float (*dt)[kWarp];
  float (*driven)[kWarp];
  float (*dsum)[kWarp];

  // Back over token t, behind which the states were h. Returns the sums of sums_at.
  __device__ __forceinline__ float4 back(int t, const float (&h)[kSide][kSide]) const {
    float steps[kSide], inputs[kSide], gradients[kSide], b[kSide], c[kSide];
    load_four(&dt[t][where.group], steps);
    load_four(&driven[t][where.group], inputs);
    load_four(&dsum[t][where.group], gradients);
    load_four(&keys[t][0][where.states], b);
    load_four(&keys[t][1][where.states], c);
    float to_driven[kSide], to_dt[kSide], outputs[kSide], to_b[kSide], to_c[kSide];
#pragma unroll
    for (int k = 0; k < kSide; ++k) to_b[k] = to_c[k] = 0.0f;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      to_driven[i] = to_dt[i] = outputs[i] = 0.0f;
#pragma unroll
      for (int k = 0; k < kSide; ++k) {
        const float decay = ops::cuda::power_of_two(steps[i] * rates[i][k]);
        const float decayed = fmaf(-inputs[i], b[k], h[i][k]);  // the old state's part of h
        const float d = fmaf(c[k], gradients[i], dh[i][k]);
        outputs[i] = fmaf(c[k], h[i][k], outputs[i]);
        to_driven[i] = fmaf(d, b[k], to_driven[i]);
        const float through = d * decayed;
        to_dt[i] = fmaf(rates[i][k], through, to_dt[i]);
        da[i][k] = fmaf(steps[i], through, da[i][k]);
        to_b[k] = fmaf(d, inputs[i], to_b[k]);
        to_c[k] = fmaf(gradients[i], h[i][k], to_c[k]);
        dh[i][k] = d * decay;
      }
    }
    return make_float4(sum_of_own_channel(to_driven, where.lane), sum_of_own_channel(to_dt, where.lane),
                       sum_of_own_channel(outputs, where.lane), sum_of_own_state(to_b, to_c, where.lane));
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2) backward_kernel(Call<T> call, Gradients<T> gradients) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(16) unsigned char memory[];
  BackwardShared& shared = *reinterpret_cast<BackwardShared*>(memory);
  const Where where(blockIdx.x % call.tiles);
  const Place place(call, blockIdx.x / call.tiles);
  const bool there = where.channel < call.channels;
  float rates[kSide][kSide], dh[kSide][kSide] = {}, da[kSide][kSide] = {}, dskip = 0.0f;
  load_rates(call, where, rates);
  const float bias = there ? call.dt_bias[where.channel] : 0.0f, skip = there ? call.skip[where.channel] : 0.0f;
  const Walk walk{
      where, rates, dh, da, shared.keys, shared.dt[where.warp], shared.driven[where.warp], shared.dsum[where.warp]};
  float4(*stored)[kSide][kWarp] = shared.states[where.warp];

  for (std::int64_t chunk = place.chunks() - 1; chunk >= 0; --chunk) {
    const std::int64_t first = chunk * kChunk, token = place.begin + first;
    KeysAhead keys;
    keys.load(call, place, first);
    {
      const Own own(call, gradients, place, first, where.channel, bias, there);
#pragma unroll
      for (int t = 0; t < kChunk; ++t) {
        const float step = there && first + t < place.length ? softplus(own.s[t]) : 0.0f;
        shared.dt[where.warp][t][where.lane] = step;
        shared.driven[where.warp][t][where.lane] = step * own.x[t];
        shared.dsum[where.warp][t][where.lane] = own.dy[t] * own.z[t] * ops::cuda::sigmoid(own.z[t]);
      }
    }
    keys.store(shared.keys);
    float h[kSide][kSide];
    const float4* kept = kept_at(call, where, place, chunk);
#pragma unroll
    for (int i = 0; i < kSide; ++i) unpack(kept[i * kWarp], h[i]);
    __syncthreads();  // the keys are there, and nobody adds up the last chunk's sums any more

    const auto forth = [&](int t) {
      float steps[kSide], inputs[kSide], b[kSide];
      load_four(&walk.dt[t][where.group], steps);
      load_four(&walk.driven[t][where.group], inputs);
      load_four(&shared.keys[t][0][where.states], b);
      advance(rates, steps, inputs, b, h);
    };
#pragma unroll 2
    for (int t = 0; t < kStored; ++t) {
      forth(t);
#pragma unroll
      for (int i = 0; i < kSide; ++i) stored[t][i][where.lane] = packed(h[i]);
    }
    forth(kStored);
    sums_at(shared, where.warp, kStored, where.lane) = walk.back(kStored, h);
#pragma unroll 2
    for (int t = kStored - 1; t >= 0; --t) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) unpack(stored[t][i][where.lane], h[i]);
      sums_at(shared, where.warp, t, where.lane) = walk.back(t, h);
    }

    const Own own(call, gradients, place, first, where.channel, bias, there);  // again: there is no room to keep it
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      if (!there || first + t >= place.length) continue;
      const std::int64_t at = token + t;
      const float4 sums = sums_at(shared, where.warp, t, where.lane);
      const float open = ops::cuda::sigmoid(own.z[t]), dsum = own.dy[t] * own.z[t] * open, step = softplus(own.s[t]);
      gradients.dx.row(place.line, at)[where.channel] = from_float<T>(fmaf(sums.x, step, skip * dsum));
      gradients.draw.row(place.line, at)[where.channel] =
          from_float<T>(fmaf(sums.x, own.x[t], kLn2 * sums.y) * ops::cuda::sigmoid(own.s[t]));
      gradients.dz.row(place.line, at)[where.channel] =
          from_float<T>(own.dy[t] * fmaf(skip, own.x[t], sums.z) * ops::cuda::silu_slope(own.z[t], open));
      dskip = fmaf(dsum, own.x[t], dskip);
    }
    __syncthreads();  // all warps' sums are there
    const std::int64_t row = place.line * (call.cu_seqlens == nullptr ? call.length : 0) + token;
#pragma unroll
    for (int t = where.warp; t < kChunk; t += kWarps) {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) total += sums_at(shared, warp, t, where.lane).w;
      if (first + t < place.length) {
        gradients.partial[(where.tile * gradients.rows + row + t) * 2 * kStates + place_of_sum(where.lane)] = total;
      }
    }
  }
  if (there) gradients.dskip[place.n * call.channels + where.channel] = dskip;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const int channel = where.channel_of(i), state = where.states + k;
      if (channel < call.channels && state < call.states) {
        gradients.da_log[(place.n * call.channels + channel) * call.states + state] = kLn2 * rates[i][k] * da[i][k];
      }
    }
  }
}

// db and dc of a token and state: the blocks' sums, one after the other.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const float* partial, std::int64_t tiles, std::int64_t rows,
                                                       std::int64_t length, int states, Lines<T> db, Lines<T> dc) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, row = item / (2 * kStates);
  const int which = static_cast<int>(item / kStates % 2), state = static_cast<int>(item % kStates);
  if (row >= rows || state >= states) return;
  float total = 0.0f;
#pragma unroll 4
  for (std::int64_t tile = 0; tile < tiles; ++tile) total += partial[tile * rows * 2 * kStates + item];
  (which == 0 ? db : dc).row(row / length, row % length)[state] = from_float<T>(total);
}

}  // namespace flashgla::ops::selective_scan::cuda

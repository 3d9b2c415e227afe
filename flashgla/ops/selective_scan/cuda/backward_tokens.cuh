// Backward, a token: what a lane does to its states ahead and back over it, and sums over lanes, channels and states.
#pragma once

#include "flashgla/ops/selective_scan/cuda/backward_lines.cuh"

namespace flashgla::ops::selective_scan::cuda {

// d = a b + d in the matrix units: a [16,8], b [8,8], d [16,8]; the low 13 bits of the operands are not looked at.
__device__ __forceinline__ void multiply_tf32(const float (&a)[4], float b0, float b1, float (&d)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// What the matrix units see of a number, so that the rest can be added by a second product.
__device__ __forceinline__ float seen(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// Four values of each lane as rows of a matrix product: those of lane l are in rows l / 4 and l / 4 + 8, columns l % 4
// and l % 4 + 4. The other operand, [8,8], says which of a row's eight are added up into which of its results.
template <bool kExact>
__device__ __forceinline__ void add_up(const float (&own)[kQuad], const float (&by)[2], float (&sums)[kQuad]) {
  if constexpr (kExact) {
    const float rest[kQuad] = {own[0] - seen(own[0]), own[2] - seen(own[2]), own[1] - seen(own[1]),
                               own[3] - seen(own[3])};
    multiply_tf32(rest, by[0], by[1], sums);
  }
  const float rows[kQuad] = {own[0], own[2], own[1], own[3]};
  multiply_tf32(rows, by[0], by[1], sums);
}

// Sums over neighbouring lanes: by matrix products, to 2^-10 of each addend, or (kExact) by exchanges and to 2^-21.
struct SumOfLanes {
  float over_states[2][2];  // over the last bit of a lane's number: the first of two kinds of values and the second
  float over_channels[2];   // over the one before

  bool odd;  // lane

  __device__ __forceinline__ explicit SumOfLanes(int lane) : odd(lane % 2 != 0) {
    const int column = lane / 4, row = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
        over_states[kind][i] = column / 4 == row / 2 && column % 4 == 2 * kind + i ? 1.0f : 0.0f;
      }
      over_channels[i] = column / 2 % 2 == row % 2 && column % 2 == i ? 1.0f : 0.0f;
    }
  }

  // Lanes with even numbers get the sums of the first kind, with odd ones those of the second.
  template <bool kExact>
  __device__ __forceinline__ void of_states(const float (&first)[kQuad], const float (&second)[kQuad],
                                            float (&sums)[kQuad]) const {
    if constexpr (kExact) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        sums[k] = (odd ? second[k] : first[k]) + __shfl_xor_sync(kAll, odd ? first[k] : second[k], 1);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) sums[k] = 0.0f;
      add_up<false>(first, over_states[0], sums);
      add_up<false>(second, over_states[1], sums);
    }
  }
  template <bool kExact>
  __device__ __forceinline__ void of_channels(const float (&own)[kQuad], float (&sums)[kQuad]) const {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) sums[k] = 0.0f;
    add_up<kExact>(own, over_channels, sums);
  }
};

// A token's db or dc over the channels of a part of the warp, those of two lanes: sums, for a lane's states, of values
// times a factor of the channel.
template <bool kExact>
__device__ __forceinline__ void sum_over_channels(const float (&values)[kQuad][kQuad], const float (&by)[kQuad],
                                                  const SumOfLanes& sum, float (&sums)[kQuad]) {
  float own[kQuad];
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    own[k] = values[0][k] * by[0];
#pragma unroll
    for (int i = 1; i < kQuad; ++i) own[k] = fmaf(values[i][k], by[i], own[k]);
  }
  sum.template of_channels<kExact>(own, sums);
}

// What the walk ahead needs of a token.
struct TokenAhead {
  float dt[kQuad], driven[kQuad], dsum[kQuad], b[kQuad];  // of a lane's channels, of its states

  template <class OfWarp>
  __device__ __forceinline__ void load(const OfWarp& shared, const Square<kQuad>& square, int parity, int t) {
    load_floats(&shared.dt[parity][t][square.channel], dt);
    load_floats(&shared.driven[OfWarp::room_of(parity)][t][square.channel], driven);
    load_floats(&shared.dsum[parity][t][square.channel], dsum);
    load_floats(&shared.keys[OfWarp::room_of(parity)][t][0][square.state], b);
  }
};

// What the walk back needs of it besides.
struct TokenBack {
  float driven[kQuad], dsum[kQuad], b[kQuad], c[kQuad];

  template <class OfWarp>
  __device__ __forceinline__ void load(const OfWarp& shared, const Square<kQuad>& square, int parity, int t) {
    load_floats(&shared.dsum[parity][t][square.channel], dsum);
    load_floats(&shared.keys[OfWarp::room_of(parity)][t][0][square.state], b);
    load_floats(&shared.keys[OfWarp::room_of(parity)][t][1][square.state], c);
    load_floats(&shared.driven[OfWarp::room_of(parity)][t][square.channel], driven);
  }
  // Of the token that was walked over last: what is there of it is not loaded again.
  template <class OfWarp>
  __device__ __forceinline__ void load(const OfWarp& shared, const Square<kQuad>& square, int parity, int t,
                                       const TokenAhead& token) {
    load_floats(&shared.keys[OfWarp::room_of(parity)][t][1][square.state], c);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      driven[k] = token.driven[k];
      dsum[k] = token.dsum[k];
      b[k] = token.b[k];
    }
  }
};

// What a token does to the states: their decays, and what is left of those before it times the decay's exponent. The
// latter times the state's gradient, summed over a channel's states, is d(dt) dt, and summed over the tokens da_log.
struct Passed {
  float decay[kQuad][kQuad], response[kQuad][kQuad];
};

// Forward over a token.
__device__ __forceinline__ void ahead(const TokenAhead& token, const float (&rates)[kQuad][kQuad],
                                      float (&h)[kQuad][kQuad], Passed& passed) {
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      const float exponent = token.dt[i] * rates[i][k];
      passed.decay[i][k] = ops::cuda::power_of_two(exponent);
      const float left = passed.decay[i][k] * h[i][k];
      h[i][k] = fmaf(token.driven[i], token.b[k], left);
      passed.response[i][k] = exponent * left;
    }
  }
}

// Back over a token. to_b: its db. to_channels: sums over eight states, as `LaneSums` has them.
template <bool kExact>
__device__ __forceinline__ void back(const TokenBack& token, const Passed& passed, const SumOfLanes& sum,
                                     float (&dh)[kQuad][kQuad], float (&da)[kQuad][kQuad], float (&to_b)[kQuad],
                                     float (&to_channels)[kQuad]) {
  float to_driven[kQuad], to_dt[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    to_driven[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      dh[i][k] = fmaf(token.c[k], token.dsum[i], dh[i][k]);
      to_driven[i] = fmaf(dh[i][k], token.b[k], to_driven[i]);
    }
  }
  sum_over_channels<kExact>(dh, token.driven, sum, to_b);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    to_dt[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      to_dt[i] = fmaf(dh[i][k], passed.response[i][k], to_dt[i]);
      da[i][k] = fmaf(dh[i][k], passed.response[i][k], da[i][k]);
      dh[i][k] *= passed.decay[i][k];
    }
  }
  sum.template of_states<kExact>(to_driven, to_dt, to_channels);
}

}  // namespace flashgla::ops::selective_scan::cuda

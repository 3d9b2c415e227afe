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
  __device__ __forceinline__ void of_channels(const float (&own)[kQuad], float (&sums)[kQuad]) const {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) sums[k] = 0.0f;
    add_up<true>(own, over_channels, sums);
  }
};

// Sums over the eight channels of two lanes, for a lane's states, of values times a factor of the channel.
__device__ __forceinline__ void sum_over_channels(const float (&values)[kQuad][kQuad], const float (&by)[kQuad],
                                                  const SumOfLanes& sum, float (&sums)[kQuad]) {
  float own[kQuad];
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    own[k] = values[0][k] * by[0];
#pragma unroll
    for (int i = 1; i < kQuad; ++i) own[k] = fmaf(values[i][k], by[i], own[k]);
  }
  sum.of_channels(own, sums);
}

// The same as matrix products of the values themselves, to 2^-10 of each: of two states and two channels of a lane, the
// states are in rows l / 4 and l / 4 + 8, the channels in columns l % 4 and l % 4 + 4. The other operand's column n has
// the factors of those channels that rows r with r % 4 = n / 2 have, where state / 8 = n % 2, and zeros. So lanes with
// l / 4 % 4 = l % 4 get sums that mean something, of states 4 (l / 16) + 2 p + (0, 0, 1, 1) + (0, 8, 0, 8) by products
// p = 0, 1.
__device__ __forceinline__ void multiply_states(const float (&values)[kQuad][kQuad], const float (&by)[kQuad],
                                                float (&sums)[2][kQuad]) {
#pragma unroll
  for (int p = 0; p < 2; ++p) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) sums[p][k] = 0.0f;
#pragma unroll
    for (int i = 0; i < kQuad; i += 2) {
      const float rows[kQuad] = {values[i][2 * p], values[i][2 * p + 1], values[i + 1][2 * p],
                                 values[i + 1][2 * p + 1]};
      multiply_tf32(rows, by[i], by[i + 1], sums[p]);
    }
  }
}
// Where a lane finds these factors in a token's row of channels: zeros are behind it.
__device__ __forceinline__ int factors_of(int lane) {
  return lane % 2 == lane / 4 % 2 ? kQuad * (lane / 2 % 2 + lane / 8 * 2) : kWarp;
}

// What the walk ahead needs of a token.
struct TokenAhead {
  float dt[kQuad], driven[kQuad], b[kQuad];  // of a lane's channels, of its states

  template <class OfWarp>
  __device__ __forceinline__ void load(const OfWarp& shared, const Square<kQuad>& square, int parity, int t) {
    load_floats(&shared.dt[parity][t][square.channel], dt);
    load_floats(&shared.driven[OfWarp::room_of(parity)][t][square.channel], driven);
    load_floats(&shared.keys[OfWarp::room_of(parity)][t][0][square.state], b);
  }
};

// What the walk back needs of it.
struct TokenBack {
  float dt[kQuad], driven[kQuad], dsum[kQuad], b[kQuad], c[kQuad];

  // factors: where in the row those are with which dh is added up over channels.
  template <class OfWarp>
  __device__ __forceinline__ void load(const OfWarp& shared, const Square<kQuad>& square, int factors, int parity,
                                       int t) {
    load_floats(&shared.dt[parity][t][square.channel], dt);
    load_floats(&shared.dsum[parity][t][square.channel], dsum);
    load_floats(&shared.keys[OfWarp::room_of(parity)][t][0][square.state], b);
    load_floats(&shared.keys[OfWarp::room_of(parity)][t][1][square.state], c);
    load_floats(&shared.driven[OfWarp::room_of(parity)][t][factors], driven);
  }
  // Of the token that was walked over last: what is there of it, and of dsum from `factors` on, is not loaded again.
  template <class OfWarp>
  __device__ __forceinline__ void load(const OfWarp& shared, const Square<kQuad>& square, int factors, int parity,
                                       int t, const TokenAhead& token, const float (&dsum_there)[kQuad]) {
    load_floats(&shared.keys[OfWarp::room_of(parity)][t][1][square.state], c);
    if constexpr (OfWarp::kExact) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        dsum[k] = dsum_there[k];
        driven[k] = token.driven[k];
      }
    } else {
      load_floats(&shared.dsum[parity][t][square.channel], dsum);
      load_floats(&shared.driven[OfWarp::room_of(parity)][t][factors], driven);
    }
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      dt[k] = token.dt[k];
      b[k] = token.b[k];
    }
  }
};

// What a token does to the states: their decays, and what is left of those before it.
struct Passed {
  float decay[kQuad][kQuad], left[kQuad][kQuad];
};

// A token's db or dc over the channels of a part of the warp: values times a factor of each channel, which is one of
// the lane's channels or (not kExact) lies at factors_of().
template <bool kExact>
struct KeyOfPart {
  float sums[kExact ? 1 : 2][kQuad];

  __device__ __forceinline__ KeyOfPart(const float (&values)[kQuad][kQuad], const float (&by)[kQuad],
                                       const SumOfLanes& sum) {
    if constexpr (kExact) {
      sum_over_channels(values, by, sum, sums[0]);
    } else {
      multiply_states(values, by, sums);
    }
  }
};

// Forward over a token.
__device__ __forceinline__ void ahead(const TokenAhead& token, const float (&rates)[kQuad][kQuad],
                                      float (&h)[kQuad][kQuad], Passed& passed) {
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      passed.decay[i][k] = ops::cuda::power_of_two(token.dt[i] * rates[i][k]);
      passed.left[i][k] = passed.decay[i][k] * h[i][k];
      h[i][k] = fmaf(token.driven[i], token.b[k], passed.left[i][k]);
    }
  }
}

// Back over a token. to_channels: sums over eight states, as `LaneSums` has them. Returns the token's db.
template <bool kExact>
__device__ __forceinline__ KeyOfPart<kExact> back(const TokenBack& token, const Passed& passed, const SumOfLanes& sum,
                                                  const float (&rates)[kQuad][kQuad], float (&dh)[kQuad][kQuad],
                                                  float (&da)[kQuad][kQuad], float (&to_channels)[kQuad]) {
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
  const KeyOfPart<kExact> to_b(dh, token.driven, sum);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    to_dt[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      const float through = dh[i][k] * passed.left[i][k];
      dh[i][k] *= passed.decay[i][k];
      to_dt[i] = fmaf(rates[i][k], through, to_dt[i]);
      da[i][k] = fmaf(token.dt[i], through, da[i][k]);
    }
  }
  sum.template of_states<kExact>(to_driven, to_dt, to_channels);
  return to_b;
}

}  // namespace flashgla::ops::selective_scan::cuda

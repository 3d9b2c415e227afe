// What the scan's kernels share. A warp has 32 channels of one sequence, or of a segment of it, and goes through the
// tokens in chunks of eight. In the scan itself lane l has 2 channels x 8 states: channels 2 (l / 2) and the next,
// states 8 (l % 2) and the next seven. Outside it, where a channel has one of everything, lane l has token l / 4 of the
// chunk and channels 8 (l % 4) to 8 (l % 4) + 7: 16 bytes of bf16. The two meet in the warp's own shared memory.
#pragma once

#include <cstdint>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/lines.cuh"
#include "flashgla/ops/cuda/math.cuh"

namespace flashgla::ops::selective_scan::cuda {

using flashgla::cuda::Vector;
using ops::cuda::Lines;

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarp * kWarps;
constexpr int kBlockChannels = kThreads;
constexpr int kStates = 16;      // that a kernel has room for; fewer are filled up with zeros
constexpr int kChunk = 8;        // tokens between states that are kept
constexpr int kPair = 2;         // channels of a lane in the scan
constexpr int kHalf = 8;         // states of a lane in the scan
constexpr int kWide = 8;         // channels of a lane outside the scan
constexpr int kRow = kWarp + 4;  // floats of a token's row of the warp's channels: rows begin in other banks
constexpr unsigned kAll = 0xffffffffu;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// Whether eight elements at a multiple of eight of each row lie at a multiple of 16 bytes.
template <class T>
bool aligned(const Lines<T>& lines) {
  const std::int64_t bytes = sizeof(T);
  return lines.data == nullptr || (reinterpret_cast<std::uintptr_t>(lines.data) % 16 == 0 &&
                                   lines.line_stride * bytes % 16 == 0 && lines.token_stride * bytes % 16 == 0);
}

// What every kernel of a call knows.
template <class T>
struct Call {
  Lines<T> x, raw, z, b, c;
  const float *dt_bias, *a_log, *skip;
  const float* h0;                 // [N,E,K]; null: zeros
  const std::int32_t* cu_seqlens;  // null: each line is a sequence
  std::int64_t length;             // of a line
  int channels, states;
  std::int64_t tiles;  // blocks of channels
  float4* kept;        // [slots,tiles,kWarps,4,kWarp]; null: not wanted
  int segments;        // that each sequence is cut into
  float4* carried;     // [N,segments,tiles,kWarps,4,kWarp]: what a segment makes of nothing (the first: of h0)
  float* steps;        // [N,segments,tiles,kBlockChannels]: sums of dt over a segment
  bool vectors;        // every row of what has channels may be read and written 16 bytes at a time
  bool key_vectors;    // the same of b and c
};

// A sequence: tokens [begin, begin + length) of its line.
struct Place {
  std::int64_t n, line, begin;
  int length;

  template <class T>
  __device__ __forceinline__ Place(const Call<T>& call, std::int64_t sequence) : n(sequence), line(n), begin(0) {
    length = static_cast<int>(call.length);
    if (call.cu_seqlens == nullptr) return;
    line = 0;
    begin = call.cu_seqlens[n];
    length = call.cu_seqlens[n + 1] - call.cu_seqlens[n];
  }
  __device__ __forceinline__ int chunks() const { return (length + kChunk - 1) / kChunk; }
};

// Where a lane stands. Blocks are tiles, of segments, of sequences; `segments` of each sequence have blocks.
struct Where {
  int lane, warp;
  int states, pair;  // in the scan: first of its states; first of its channels in the warp
  int token, wide;   // outside: its token of the chunk; first of its channels in the warp
  std::int64_t tile, sequence;
  int segment;  // counted from the first that has blocks
  int first;    // channel of the warp

  __device__ __forceinline__ Where(std::int64_t tiles, int segments)
      : lane(static_cast<int>(threadIdx.x) % kWarp),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        states(lane % 2 * kHalf),
        pair(lane / 2 * kPair),
        token(lane / 4),
        wide(lane % 4 * kWide),
        tile(blockIdx.x % tiles),
        sequence(blockIdx.x / tiles / segments),
        segment(static_cast<int>(blockIdx.x / tiles % segments)),
        first(static_cast<int>(tile) * kBlockChannels + warp * kWarp) {}
};

// Chunks of a segment.
struct Chunks {
  int begin, end;

  __device__ __forceinline__ Chunks(const Place& place, int segment, int segments) {
    const int each = (place.chunks() + segments - 1) / segments;
    begin = segment * each;
    end = min(begin + each, place.chunks());
  }
};

// Of the states before a chunk: four float4 of a lane, kWarp apart.
template <class T>
__device__ __forceinline__ float4* kept_at(const Call<T>& call, const Where& where, const Place& place, int chunk) {
  const std::int64_t first = call.cu_seqlens == nullptr ? place.line * call.length : place.begin;
  const std::int64_t slot = first / kChunk + place.n + chunk;
  return call.kept + (((slot * call.tiles + where.tile) * kWarps + where.warp) * 4) * kWarp + where.lane;
}

// A lane's channels and states of an f32 tensor [E,K], 0 where there are none.
template <class T>
__device__ __forceinline__ void load_states(const Call<T>& call, const Where& where, const float* from,
                                            float (&to)[kPair][kHalf]) {
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const int channel = where.first + where.pair + i, state = where.states + k;
      const bool there = from != nullptr && channel < call.channels && state < call.states;
      to[i][k] = there ? from[static_cast<std::int64_t>(channel) * call.states + state] : 0.0f;
    }
  }
}
template <class T>
__device__ __forceinline__ void store_states(const Call<T>& call, const Where& where, const float (&from)[kPair][kHalf],
                                             float* to) {
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const int channel = where.first + where.pair + i, state = where.states + k;
      if (channel < call.channels && state < call.states) {
        to[static_cast<std::int64_t>(channel) * call.states + state] = from[i][k];
      }
    }
  }
}

// -exp(a_log) log2(e): decays are powers of two. 0 where there is no such state.
template <class T>
__device__ __forceinline__ void load_rates(const Call<T>& call, const Where& where, float (&rates)[kPair][kHalf]) {
  load_states(call, where, call.a_log, rates);
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const bool there = where.first + where.pair + i < call.channels && where.states + k < call.states;
      rates[i][k] = there ? -expf(rates[i][k]) * kLog2E : 0.0f;
    }
  }
}

// A parameter [E] of the warp's channels, into shared memory; 0 where there are none.
template <class T>
__device__ __forceinline__ void load_parameter(const Call<T>& call, const Where& where, const float* from, float* to) {
  const int channel = where.first + where.lane;
  to[where.lane] = channel < call.channels ? from[channel] : 0.0f;
}

// Eight neighbouring elements from a row on, of which `count` (perhaps none, or less than none) are there; 0 for the
// others. `vector`: the row allows 16 bytes at a time.
template <class T>
__device__ __forceinline__ Vector<T, kWide> load_eight(const T* from, int count, bool vector) {
  if (vector && count >= kWide) return Vector<T, kWide>::load(from);
  float values[kWide];
#pragma unroll
  for (int i = 0; i < kWide; ++i) values[i] = i < count ? flashgla::cuda::to_float(from[i]) : 0.0f;
  return Vector<T, kWide>::of(values);
}
template <class T>
__device__ __forceinline__ void store_eight(const float (&values)[kWide], T* to, int count, bool vector) {
  if (vector && count >= kWide) {
    Vector<T, kWide>::of(values).store(to);
    return;
  }
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    if (i < count) to[i] = flashgla::cuda::from_float<T>(values[i]);
  }
}

// A lane's eight channels of its token of a chunk.
template <class T>
__device__ __forceinline__ Vector<T, kWide> load_wide(const Call<T>& call, const Lines<T>& lines, const Where& where,
                                                      const Place& place, int chunk) {
  const int t = chunk * kChunk + where.token;
  if (t >= place.length) return Vector<T, kWide>::zero();
  const int channel = where.first + where.wide;
  return load_eight<T>(lines.at(place.line, place.begin + t, channel), call.channels - channel, call.vectors);
}

// Of a chunk's b and c what a lane brings to shared memory, [token][b, c][state]: eight states of one of the two.
template <class T>
__device__ __forceinline__ Vector<T, kHalf> load_keys(const Call<T>& call, const Where& where, const Place& place,
                                                      int chunk) {
  const int t = chunk * kChunk + where.lane / 4, state = where.lane % 2 * kHalf;
  if (t >= place.length) return Vector<T, kHalf>::zero();
  const Lines<T>& lines = where.lane / 2 % 2 == 0 ? call.b : call.c;
  return load_eight<T>(lines.at(place.line, place.begin + t, state), call.states - state, call.key_vectors);
}

__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0f) + ops::cuda::log_of_one_and(ops::cuda::power_of_two(-kLog2E * fabsf(x)));
}

// A step of a channel; 0 behind a sequence's end, where a state stays what it is. Without a branch, so that the
// channels' chains of instructions fill each other's gaps.
__device__ __forceinline__ float step_of(float biased, bool real) { return softplus(biased) * (real ? 1.0f : 0.0f); }
template <class T>
__device__ __forceinline__ void steps_of(const Vector<T, kWide>& raw, const float (&bias)[kWide], bool real,
                                         float (&dt)[kWide]) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) dt[i] = step_of(raw[i] + bias[i], real);
}

__device__ __forceinline__ void store_floats(const float (&from)[8], float* to) {
  reinterpret_cast<float4*>(to)[0] = make_float4(from[0], from[1], from[2], from[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(from[4], from[5], from[6], from[7]);
}
__device__ __forceinline__ void load_floats(const float* from, float (&to)[8]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  to[0] = low.x;
  to[1] = low.y;
  to[2] = low.z;
  to[3] = low.w;
  to[4] = high.x;
  to[5] = high.y;
  to[6] = high.z;
  to[7] = high.w;
}
__device__ __forceinline__ void load_floats(const float* from, float (&to)[2]) {
  const float2 both = *reinterpret_cast<const float2*>(from);
  to[0] = both.x;
  to[1] = both.y;
}
template <class T>
__device__ __forceinline__ void store_keys(const Vector<T, kHalf>& from, const Where& where,
                                           float (&to)[kChunk][2][kStates]) {
  float values[kHalf];
#pragma unroll
  for (int k = 0; k < kHalf; ++k) values[k] = from[k];
  store_floats(values, &to[0][0][0] + where.lane * kHalf);
}

// A lane's states, four float4 that lie `stride` apart.
__device__ __forceinline__ void load_square(const float4* from, int stride, float (&h)[kPair][kHalf]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 four = from[i * stride];
    float* to = &h[i / 2][i % 2 * 4];
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }
}
__device__ __forceinline__ void store_square(const float (&h)[kPair][kHalf], float4* to, int stride) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* from = &h[i / 2][i % 2 * 4];
    to[i * stride] = make_float4(from[0], from[1], from[2], from[3]);
  }
}

// Of partial sums over a lane's states, for its two channels: the whole sum of channel `lane` of the warp.
__device__ __forceinline__ float sum_of_own_channel(const float (&part)[kPair], int lane) {
  const bool odd = lane & 1;
  return (odd ? part[1] : part[0]) + __shfl_xor_sync(kAll, odd ? part[0] : part[1], 1);
}

template <class T>
__device__ __forceinline__ float4* carried_at(const Call<T>& call, const Where& where, int segment) {
  const std::int64_t slot = where.sequence * call.segments + segment;
  return call.carried + (((slot * call.tiles + where.tile) * kWarps + where.warp) * 4) * kWarp + where.lane;
}
template <class T>
__device__ __forceinline__ float* steps_at(const Call<T>& call, const Where& where, int segment) {
  const std::int64_t slot = where.sequence * call.segments + segment;
  return call.steps + (slot * call.tiles + where.tile) * kBlockChannels + where.warp * kWarp;
}

// What a segment carries on, and its steps' sums from those that each lane has of its channels and token.
template <class T>
__device__ __forceinline__ void store_carried(const Call<T>& call, const Where& where, int segment,
                                              const float (&h)[kPair][kHalf], float (&steps)[kWide]) {
  store_square(h, carried_at(call, where, segment), kWarp);
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
#pragma unroll
    for (int distance = 4; distance < kWarp; distance *= 2) steps[i] += __shfl_xor_sync(kAll, steps[i], distance);
  }
  if (where.token == 0) store_floats(steps, steps_at(call, where, segment) + where.wide);
}

// carried = what `segment` makes of it: its decays are those of the sum of its steps.
template <class T>
__device__ __forceinline__ void through_segment(const Call<T>& call, const Where& where, int segment,
                                                const float (&rates)[kPair][kHalf], float (&carried)[kPair][kHalf]) {
  float own[kPair][kHalf], steps[kPair];
  load_square(carried_at(call, where, segment), kWarp, own);
  load_floats(steps_at(call, where, segment) + where.pair, steps);
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      carried[i][k] = fmaf(ops::cuda::power_of_two(steps[i] * rates[i][k]), carried[i][k], own[i][k]);
    }
  }
}

// h = decay h + driven b, for a lane's channels and states.
__device__ __forceinline__ void advance(const float (&rates)[kPair][kHalf], const float (&dt)[kPair],
                                        const float (&driven)[kPair], const float (&b)[kHalf],
                                        float (&h)[kPair][kHalf]) {
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      h[i][k] = fmaf(ops::cuda::power_of_two(dt[i] * rates[i][k]), h[i][k], driven[i] * b[k]);
    }
  }
}

}  // namespace flashgla::ops::selective_scan::cuda

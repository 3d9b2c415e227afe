// What the scan's kernels share. A warp has 32 channels of one sequence, or of a segment of it, and goes through the
// tokens in chunks of eight. In the scan itself a lane has 16 states, of 2 channels x 8 (forward) or of 4 x 4
// (backward): `Square`. Outside it, where a channel has one of everything, lane l has token l / 4 of the chunk and
// channels 8 (l % 4) to 8 (l % 4) + 7: 16 bytes of bf16. The two meet in the warp's own shared memory.
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
constexpr int kStates = 16;                   // that a kernel has room for; fewer are filled up with zeros
constexpr int kChunk = 8;                     // tokens between states that are kept
constexpr int kSquare = kWarp * kStates / 4;  // float4 of a warp's states
constexpr int kHalf = 8;                      // states that a lane brings of b or c
constexpr int kWide = 8;                      // channels of a lane outside the scan
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
  float4* kept;        // [slots,tiles,kWarps,kSquare]: states; null: not wanted
  T* outputs;          // [rows,tiles,kBlockChannels]: y before its gate, wanted with `kept`
  int segments;        // that each sequence is cut into
  float4* carried;     // [N,segments,tiles,kWarps,kSquare]: what a segment makes of nothing (the first: of h0)
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
  int token, wide;  // outside the scan: its token of the chunk; first of its channels in the warp
  std::int64_t tile, sequence;
  int segment;  // counted from the first that has blocks
  int first;    // channel of the warp

  __device__ __forceinline__ Where(std::int64_t tiles, int segments)
      : Where(tiles, segments, static_cast<int>(threadIdx.x) % kWarp, static_cast<int>(threadIdx.x) / kWarp,
              static_cast<int>(threadIdx.x) % kWarp / 4, static_cast<int>(threadIdx.x) % 4 * kWide) {}

  // With the lane's number in a register of its own and the warp's known to be all lanes': the compiler does not
  // compute them, and what follows from them, from the thread's number again for every chunk.
  static __device__ __forceinline__ Where held(std::int64_t tiles, int segments) {
    unsigned lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    const int warp = __shfl_sync(kAll, static_cast<int>(threadIdx.x / kWarp), 0);
    return {
        tiles, segments, static_cast<int>(lane), warp, static_cast<int>(lane / 4), static_cast<int>(lane % 4 * kWide)};
  }

 private:
  __device__ __forceinline__ Where(std::int64_t tiles, int segments, int own_lane, int own_warp, int own_token,
                                   int own_wide)
      : lane(own_lane),
        warp(own_warp),
        token(own_token),
        wide(own_wide),
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

// A lane's part of the warp's states: C channels and S states from its first ones on.
template <int C>
struct Square {
  static constexpr int S = kStates / C;
  static_assert(C == 2 || C == 4);
  int channel, state;  // the first; channels count in the warp

  // Lanes whose numbers differ in the last bit have the same channels, and where they differ in the one before, the
  // same states: shared memory gives a load's 16 bytes to both at once.
  __device__ __forceinline__ explicit Square(int lane)
      : channel(C == 2 ? lane / 2 * 2 : lane / 2 % 8 * 4),
        state(C == 2 ? lane % 2 * 8 : lane % 2 * 8 + lane / 16 * 4) {}
};

// The warp's states before a chunk.
template <class T>
__device__ __forceinline__ float4* kept_at(const Call<T>& call, const Where& where, const Place& place, int chunk) {
  const std::int64_t first = call.cu_seqlens == nullptr ? place.line * call.length : place.begin;
  const std::int64_t slot = first / kChunk + 2 * place.n + chunk;
  return call.kept + ((slot * call.tiles + where.tile) * kWarps + where.warp) * kSquare;
}

// A lane's eight channels of y before its gate, of its token of a chunk.
template <class T>
__device__ __forceinline__ T* outputs_at(const Call<T>& call, const Where& where, const Place& place, int chunk) {
  const std::int64_t first = call.cu_seqlens == nullptr ? place.line * call.length : place.begin;
  const std::int64_t row = first + chunk * kChunk + where.token;
  return call.outputs + (row * call.tiles + where.tile) * kBlockChannels + where.warp * kWarp + where.wide;
}

// A lane's channels and states of an f32 tensor [E,K], 0 where there are none.
template <class T, int C, int S>
__device__ __forceinline__ void load_states(const Call<T>& call, const Where& where, const float* from,
                                            float (&to)[C][S]) {
  const Square<C> square(where.lane);
#pragma unroll
  for (int i = 0; i < C; ++i) {
#pragma unroll
    for (int k = 0; k < S; ++k) {
      const int channel = where.first + square.channel + i, state = square.state + k;
      const bool there = from != nullptr && channel < call.channels && state < call.states;
      to[i][k] = there ? from[static_cast<std::int64_t>(channel) * call.states + state] : 0.0f;
    }
  }
}
template <class T, int C, int S>
__device__ __forceinline__ void store_states(const Call<T>& call, const Where& where, const float (&from)[C][S],
                                             float* to) {
  const Square<C> square(where.lane);
#pragma unroll
  for (int i = 0; i < C; ++i) {
#pragma unroll
    for (int k = 0; k < S; ++k) {
      const int channel = where.first + square.channel + i, state = square.state + k;
      if (channel < call.channels && state < call.states) {
        to[static_cast<std::int64_t>(channel) * call.states + state] = from[i][k];
      }
    }
  }
}

// -exp(a_log) log2(e): decays are powers of two. 0 where there is no such state.
template <class T, int C, int S>
__device__ __forceinline__ void load_rates(const Call<T>& call, const Where& where, float (&rates)[C][S]) {
  const Square<C> square(where.lane);
  load_states(call, where, call.a_log, rates);
#pragma unroll
  for (int i = 0; i < C; ++i) {
#pragma unroll
    for (int k = 0; k < S; ++k) {
      const bool there = where.first + square.channel + i < call.channels && square.state + k < call.states;
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
__device__ __forceinline__ float step_of(float raw, float bias, bool real) {
  return softplus(raw + (real ? 0.0f : -INFINITY) + bias);
}
template <class T>
__device__ __forceinline__ void steps_of(const Vector<T, kWide>& raw, const float (&bias)[kWide], bool real,
                                         float (&dt)[kWide]) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) dt[i] = step_of(raw[i], bias[i], real);
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
__device__ __forceinline__ void load_floats(const float* from, float (&to)[4]) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
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

// A warp's states in device memory, in pieces of two states of two channels: those of a lane of 4 x 4 lie a warp's
// width apart, and lanes of 2 x 8 write whole sectors. Each piece is four registers of an operand of matrix products.
template <int C>
__device__ __forceinline__ int place_of_piece(const Square<C>& square, int i, int k) {
  const int channel = square.channel + i, state = square.state + k;
  return (channel % 4 / 2 * 2 + state % 4 / 2) * kWarp + state / 4 % 2 * 16 + channel / 4 * 2 + state / 8;
}
template <int C, int S>
__device__ __forceinline__ void load_square(const float4* from, int lane, float (&h)[C][S]) {
  const Square<C> square(lane);
#pragma unroll
  for (int i = 0; i < C; i += 2) {
#pragma unroll
    for (int k = 0; k < S; k += 2) {
      const float4 four = from[place_of_piece(square, i, k)];
      h[i][k] = four.x;
      h[i][k + 1] = four.y;
      h[i + 1][k] = four.z;
      h[i + 1][k + 1] = four.w;
    }
  }
}
template <int C, int S>
__device__ __forceinline__ void store_square(const float (&h)[C][S], float4* to, int lane) {
  const Square<C> square(lane);
#pragma unroll
  for (int i = 0; i < C; i += 2) {
#pragma unroll
    for (int k = 0; k < S; k += 2) {
      to[place_of_piece(square, i, k)] = make_float4(h[i][k], h[i][k + 1], h[i + 1][k], h[i + 1][k + 1]);
    }
  }
}

template <class T>
__device__ __forceinline__ float4* carried_at(const Call<T>& call, const Where& where, int segment) {
  const std::int64_t slot = where.sequence * call.segments + segment;
  return call.carried + ((slot * call.tiles + where.tile) * kWarps + where.warp) * kSquare;
}
template <class T>
__device__ __forceinline__ float* steps_at(const Call<T>& call, const Where& where, int segment) {
  const std::int64_t slot = where.sequence * call.segments + segment;
  return call.steps + (slot * call.tiles + where.tile) * kBlockChannels + where.warp * kWarp;
}

// What a segment carries on, and its steps' sums from those that each lane has of its channels and token.
template <class T, int C, int S>
__device__ __forceinline__ void store_carried(const Call<T>& call, const Where& where, int segment,
                                              const float (&h)[C][S], float (&steps)[kWide]) {
  store_square(h, carried_at(call, where, segment), where.lane);
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
#pragma unroll
    for (int distance = 4; distance < kWarp; distance *= 2) steps[i] += __shfl_xor_sync(kAll, steps[i], distance);
  }
  if (where.token == 0) store_floats(steps, steps_at(call, where, segment) + where.wide);
}

// carried = what `segment` makes of it: its decays are those of the sum of its steps.
template <class T, int C, int S>
__device__ __forceinline__ void through_segment(const Call<T>& call, const Where& where, int segment,
                                                const float (&rates)[C][S], float (&carried)[C][S]) {
  float own[C][S], steps[C];
  load_square(carried_at(call, where, segment), where.lane, own);
  load_floats(steps_at(call, where, segment) + Square<C>(where.lane).channel, steps);
#pragma unroll
  for (int i = 0; i < C; ++i) {
#pragma unroll
    for (int k = 0; k < S; ++k) {
      carried[i][k] = fmaf(ops::cuda::power_of_two(steps[i] * rates[i][k]), carried[i][k], own[i][k]);
    }
  }
}

// h = decay h + driven b, for a lane's channels and states.
template <int C, int S>
__device__ __forceinline__ void advance(const float (&rates)[C][S], const float (&dt)[C], const float (&driven)[C],
                                        const float (&b)[S], float (&h)[C][S]) {
#pragma unroll
  for (int i = 0; i < C; ++i) {
#pragma unroll
    for (int k = 0; k < S; ++k) {
      h[i][k] = fmaf(ops::cuda::power_of_two(dt[i] * rates[i][k]), h[i][k], driven[i] * b[k]);
    }
  }
}

}  // namespace flashgla::ops::selective_scan::cuda

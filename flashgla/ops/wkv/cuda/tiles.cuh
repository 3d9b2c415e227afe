// What forward and backward by tiles share (tile_forward.cuh, tile_backward.cuh): unpacked sequences with every input
// read once. A block has some channels of one line, a lane V of them, and walks the line in tiles that lie in shared
// memory, whose tokens its warps share out. What a warp's tokens begin from follows from the state at the tile's begin
// and from what the tokens of the warps before it sum up to alone. Outputs take the place of inputs in the tile and go
// out together.
#pragma once

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/wkv/cuda/scan.cuh"

namespace flashgla::ops::wkv::cuda {

using flashgla::cuda::from_float;
using flashgla::cuda::to_float;

constexpr int kForwardWarps = 8, kBackwardWarps = 8;     // of a block
constexpr int kForwardTokens = 16, kBackwardTokens = 8;  // of a warp in a tile
constexpr int kForwardThreads = 32 * kForwardWarps, kBackwardThreads = 32 * kBackwardWarps;
// Forward keeps the state before so many tokens.
constexpr int kTileSegment = kBackwardTokens * kBackwardWarps;
constexpr std::int64_t kLeastTileBlocks = 128;  // of 32 channels: fewer leave too much of a GPU idle
constexpr std::int64_t kPartTokens = 256;       // a part has a multiple of so many
static_assert(kPartTokens % (kForwardTokens * kForwardWarps) == 0 && kPartTokens % kTileSegment == 0);

// Where lines and channels give too few blocks, each line is cut into parts. What each sums up to alone a kernel before
// finds; joined, it is what the next one starts from, or backward what the one before it receives.
struct Parts {
  int tokens = 0, count = 1;  // of a part, a line
  float* ends = nullptr;      // [lines,count,3,E]; null with one part

  __device__ __forceinline__ float* end_of(std::int64_t line, std::int64_t part, std::int64_t channels) const {
    return ends + (line * count + part) * 3 * channels;
  }
};

// A tile is calm where all of its keys, with the bonus, lie within so many powers of two of the exponent of the state
// before it: its sums are then in units of e to that, so that a token costs one exponential, e^k, and joining sums is a
// product and an addition. In any other tile the running maximum is carried from token to token and join to join.
// Products of two sums stay below 2^96, which leaves values and gradients 30 powers of two.
constexpr float kCalm = 48.0f;

// How many channels a lane has in forward: a word of them.
template <class T>
constexpr int kForwardChannels = 4 / static_cast<int>(sizeof(T));

using ops::cuda::reciprocal;
// log2(x) to its last bit or two.
__device__ __forceinline__ float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// [kTensors][tokens][channels] of a tile of so many warps' tokens. Threads copy pieces of 16 bytes: each has one of row
// thread_row() and of every kRows'th behind it.
template <class T, int kWarps, int kOfWarp, int V, int kTensors>
struct Tile {
  static constexpr int kTokens = kWarps * kOfWarp;
  static constexpr int kAcross = 32 * V;
  static constexpr int kBytes = kTensors * kTokens * kAcross * static_cast<int>(sizeof(T));
  static constexpr int kEach = 16 / static_cast<int>(sizeof(T)), kPieces = kAcross / kEach;
  static constexpr int kRows = 32 * kWarps / kPieces, kTimes = kTokens / kRows;
  static_assert(kRows * kTimes == kTokens);
  T* data;

  static __device__ __forceinline__ int thread_row() { return static_cast<int>(threadIdx.x) / kPieces; }
  static __device__ __forceinline__ int thread_channel() { return static_cast<int>(threadIdx.x) % kPieces * kEach; }

  // Asks for a tensor's tokens; zeros where there are none. source: the thread's piece of its first row; rest: how many
  // rows there are from that on.
  __device__ __forceinline__ void copy(int tensor, const T* source, std::int64_t token_stride, int rest) const {
    const std::uint32_t to = ptx::shared_address(at(tensor, thread_row(), thread_channel()));
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      ptx::copy_async_16(to + i * kRows * kAcross * static_cast<int>(sizeof(T)), source + i * kRows * token_stride,
                         kRows * i < rest ? 16 : 0);
    }
  }
  // The way back.
  __device__ __forceinline__ void put_out(int tensor, T* target, std::int64_t token_stride, int rest) const {
    const T* from = at(tensor, thread_row(), thread_channel());
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      if (kRows * i >= rest) break;
      Vector<T, kEach>::load(from + i * kRows * kAcross).store(target + i * kRows * token_stride);
    }
  }
  __device__ __forceinline__ T* at(int tensor, int row, int channel) const {
    return data + (tensor * kTokens + row) * kAcross + channel;
  }
  __device__ __forceinline__ void get(int tensor, int row, int lane, float (&to)[V]) const {
    const Vector<T, V> values = Vector<T, V>::load(at(tensor, row, V * lane));
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = values[i];
  }
  __device__ __forceinline__ void set(int tensor, int row, int lane, const float (&from)[V]) const {
    const Vector<T, V> values = Vector<T, V>::of(from);
    *reinterpret_cast<typename Vector<T, V>::Word*>(at(tensor, row, V * lane)) = values.words[0];
  }
};

// Sums of warps, behind them two that tiles hand on by turns: [kWarps + 2][3][32 V]. Then the parameters, [2][32 V]:
// registers are short.
template <int V, int kWarps>
struct Sums {
  static constexpr int kFloats = ((kWarps + 2) * 3 + 2) * 32 * V, kBytes = kFloats * static_cast<int>(sizeof(float));
  float* data;

  __device__ __forceinline__ float* of(int warp, int lane) const { return data + warp * 3 * 32 * V + V * lane; }
  __device__ __forceinline__ void store(int warp, int lane, const State<V>& state) const {
    state.store(of(warp, lane), 32 * V);
  }
  __device__ __forceinline__ State<V> load(int warp, int lane) const {
    State<V> state;
    state.load(of(warp, lane), 32 * V);
    return state;
  }
  __device__ __forceinline__ void store(int lane, const Parameters<V>& parameters) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      of(kWarps + 2, lane)[i] = parameters.w[i];
      of(kWarps + 2, lane)[32 * V + i] = parameters.u[i];
    }
  }
  __device__ __forceinline__ Parameters<V> parameters(int lane) const {
    Parameters<V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      result.w[i] = of(kWarps + 2, lane)[i];
      result.u[i] = of(kWarps + 2, lane)[32 * V + i];
    }
    return result;
  }
  // Without exponents, where the unit is known.
  __device__ __forceinline__ void store_sums(int warp, int lane, const float (&a)[V], const float (&b)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      of(warp, lane)[i] = a[i];
      of(warp, lane)[32 * V + i] = b[i];
    }
  }
  // a, b, a warp's tokens on, and what those sum up to alone.
  __device__ __forceinline__ void join_sums(int warp, int lane, const float (&decay)[V], float (&a)[V],
                                            float (&b)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      a[i] = fmaf(decay[i], a[i], of(warp, lane)[i]);
      b[i] = fmaf(decay[i], b[i], of(warp, lane)[32 * V + i]);
    }
  }
};

// state, `tokens` on, and what those sum up to alone.
template <int V>
__device__ __forceinline__ void join(State<V>& state, const State<V>& alone, float tokens,
                                     const Parameters<V>& parameters) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const Weights weights(fmaf(tokens, parameters.w[i], state.p[i]), alone.p[i]);
    state.a[i] = weights.of(state.a[i], alone.a[i]);
    state.b[i] = weights.of(state.b[i], alone.b[i]);
    state.p[i] = weights.largest;
  }
}

}  // namespace flashgla::ops::wkv::cuda

// A transform of 2,048 points that needs no padding (README): of a real sequence x of kPoints tokens
//
//     X[k] = sum_n x[n] e^(-2 pi i n (k - 1/4) / kPoints)
//
// whose products are convolutions in a circle where each way around multiplies by i. The real part of what comes back
// is therefore the sum over the past, and the imaginary part what reaches into the next kPoints tokens.
//
// A block has kChannels neighbouring channels, each of kLanes threads with kOwn points at a time: radix 16, 16 and 8 in
// place in shared memory, frequencies in the order in which they come.
#pragma once

#include "flashgla/ops/long_convolution/cuda/call.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kPoints = 2048;
constexpr int kChannels = 4;
constexpr int kOwn = 16;
constexpr int kLanes = kPoints / kOwn;
constexpr int kThreads = kChannels * kLanes;
constexpr int kPointBytes = kPoints * kChannels * static_cast<int>(sizeof(float2));  // of a block's transform

__device__ __forceinline__ float2 product(float2 a, float2 b) {
  return {fmaf(a.x, b.x, -(a.y * b.y)), fmaf(a.x, b.y, a.y * b.x)};
}
__device__ __forceinline__ float2 conjugate(float2 a) { return {a.x, -a.y}; }
__device__ __forceinline__ float2 sum(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ float2 difference(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
// e^(-i angle) forward, e^(i angle) back, as a factor of a.
template <bool kBack>
__device__ __forceinline__ float2 turned(float2 a, float2 by) {
  return product(a, kBack ? conjugate(by) : by);
}
template <bool kBack>
__device__ __forceinline__ float2 quarter(float2 a) {  // -i forward, i back
  return kBack ? float2{-a.y, a.x} : float2{a.y, -a.x};
}

// Four points of a transform, in natural order.
template <bool kBack>
__device__ __forceinline__ void four(float2& a, float2& b, float2& c, float2& d) {
  const float2 even = sum(a, c), odd = difference(a, c), other = sum(b, d);
  const float2 turn = quarter<kBack>(difference(b, d));
  a = sum(even, other);
  b = sum(odd, turn);
  c = difference(even, other);
  d = difference(odd, turn);
}

// a e^(-2 pi i M / 16) forward, its inverse back.
template <bool kBack, int M>
__device__ __forceinline__ float2 sixteenths(float2 a) {
  constexpr float kCos[] = {1.0f, 0.923879533f,  0.707106781f, 0.382683432f, 0.0f,
                            0.0f, -0.707106781f, 0.0f,         0.0f,         -0.923879533f};
  constexpr float kSin[] = {0.0f, 0.382683432f, 0.707106781f, 0.923879533f, 1.0f,
                            0.0f, 0.707106781f, 0.0f,         0.0f,         -0.382683432f};
  if constexpr (M == 0) return a;
  if constexpr (M == 4) return quarter<kBack>(a);
  return turned<kBack>(a, {kCos[M], -kSin[M]});
}

// Where value k of sixteen() and of eight() lies.
constexpr __host__ __device__ int of_sixteen(int k) { return 4 * (k & 3) + (k >> 2); }
constexpr __host__ __device__ int of_eight(int k) { return 2 * (k & 3) + (k >> 2); }

template <bool kBack>
__device__ __forceinline__ void sixteen(float2 (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) four<kBack>(v[i], v[4 + i], v[8 + i], v[12 + i]);
  v[5] = sixteenths<kBack, 1>(v[5]);
  v[6] = sixteenths<kBack, 2>(v[6]);
  v[7] = sixteenths<kBack, 3>(v[7]);
  v[9] = sixteenths<kBack, 2>(v[9]);
  v[10] = sixteenths<kBack, 4>(v[10]);
  v[11] = sixteenths<kBack, 6>(v[11]);
  v[13] = sixteenths<kBack, 3>(v[13]);
  v[14] = sixteenths<kBack, 6>(v[14]);
  v[15] = sixteenths<kBack, 9>(v[15]);
#pragma unroll
  for (int i = 0; i < 4; ++i) four<kBack>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
}

template <bool kBack>
__device__ __forceinline__ void eight(float2 (&v)[8]) {
  four<kBack>(v[0], v[2], v[4], v[6]);
  four<kBack>(v[1], v[3], v[5], v[7]);
  v[3] = sixteenths<kBack, 2>(v[3]);
  v[5] = sixteenths<kBack, 4>(v[5]);
  v[7] = sixteenths<kBack, 6>(v[7]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = v[2 * i], b = v[2 * i + 1];
    v[2 * i] = sum(a, b);
    v[2 * i + 1] = difference(a, b);
  }
}

// e^(pi i j / 32): what the quarter of a frequency makes of token j kLanes of a thread's.
__device__ __forceinline__ float2 shift(int j) {
  constexpr float kCos[] = {1.0f,         0.995184727f, 0.98078528f,  0.956940336f, 0.923879533f, 0.881921264f,
                            0.831469612f, 0.773010453f, 0.707106781f, 0.634393284f, 0.555570233f, 0.471396737f,
                            0.382683432f, 0.290284677f, 0.195090322f, 0.0980171403f};
  constexpr float kSin[] = {0.0f,         0.0980171403f, 0.195090322f, 0.290284677f, 0.382683432f, 0.471396737f,
                            0.555570233f, 0.634393284f,  0.707106781f, 0.773010453f, 0.831469612f, 0.881921264f,
                            0.923879533f, 0.956940336f,  0.98078528f,  0.995184727f};
  return {kCos[j], kSin[j]};
}

// Factors e^(-2 pi i at (k + offset) / points), k below 16, in shared memory [kParts,count], `at` below count: products
// of one of four and one of three, which in registers would spill.
struct Turns {
  static constexpr int kParts = 7;
  const float2* own;
  int count;

  // By all threads of a block.
  static __device__ __forceinline__ void fill(float2* table, int count, float offset, int points) {
    for (int item = static_cast<int>(threadIdx.x); item < kParts * count; item += kThreads) {
      const int part = item / count, at = item - part * count;
      const float k = part < 4 ? static_cast<float>(part) + offset : static_cast<float>(4 * (part - 3));
      float2 turn;
      sincospif(-2.0f * static_cast<float>(at) * k / static_cast<float>(points), &turn.y, &turn.x);
      table[item] = turn;
    }
  }
  // Calls use(k, factor) for each k.
  template <class Use>
  __device__ __forceinline__ void each(const Use& use) const {
    float2 low[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      low[k] = own[k * count];
      use(k, low[k]);
    }
#pragma unroll
    for (int high = 1; high < 4; ++high) {
      const float2 turn = own[(3 + high) * count];
#pragma unroll
      for (int k = 0; k < 4; ++k) use(4 * high + k, product(low[k], turn));
    }
  }
};

// A thread's part in its block's transforms. `points` [kPoints,kChannels], rows changed over so that the threads of
// half a warp meet in no bank.
class Transform {
 public:
  // Shared memory: turns, and points behind them. All threads of the block must come here.
  static constexpr int kTurns = Turns::kParts * (kLanes + 8);
  static constexpr int kBytes = kPointBytes + kTurns * static_cast<int>(sizeof(float2));

  __device__ __forceinline__ explicit Transform(unsigned char* memory)
      : points_(reinterpret_cast<float2*>(memory) + kTurns + threadIdx.x % kChannels),
        lane_(static_cast<int>(threadIdx.x) / kChannels),
        first_(swapped(lane_)),
        second_(swapped(lane_ / 8 * 128 + lane_ % 8)),
        third_(swapped(8 * lane_)) {
    float2* turns = reinterpret_cast<float2*>(memory);
    Turns::fill(turns, kLanes, -0.25f, kPoints);
    Turns::fill(turns + Turns::kParts * kLanes, 8, 0.0f, 128);
    first_turns_ = {turns + lane_, kLanes};
    second_turns_ = {turns + Turns::kParts * kLanes + lane_ % 8, 8};
    __syncthreads();
  }

  __device__ __forceinline__ int channel() const { return static_cast<int>(threadIdx.x) % kChannels; }
  // Token of a thread's value j.
  __device__ __forceinline__ int token(int j) const { return lane_ + kLanes * j; }

  // Each of these takes a thread's values by its own index i: tokens v[i], in turn, or at frequencies use(i, value) and
  // get(i). A block's threads must call them together, forward() before frequencies(), back() behind
  // set_frequencies(); between frequencies() and the next forward() or set_frequencies() goes a __syncthreads().

  // Takes tokens.
  __device__ __forceinline__ void forward(float2 (&v)[kOwn]) const {
#pragma unroll
    for (int j = 0; j < 16; ++j) v[j] = product(v[j], shift(j));
    sixteen<false>(v);
    first_turns_.each([&](int k, float2 turn) { at(first_ + kLanes * k) = product(v[of_sixteen(k)], turn); });
    __syncthreads();
    middle<false>(v);
    __syncthreads();
  }

  template <class Use>
  __device__ __forceinline__ void frequencies(const Use& use) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 own[8];
      load_eight(half, own);
      eight<false>(own);
#pragma unroll
      for (int k = 0; k < 8; ++k) use(8 * half + k, own[of_eight(k)]);
    }
  }

  template <class Get>
  __device__ __forceinline__ void set_frequencies(const Get& get) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 own[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) own[k] = get(8 * half + k);
      eight<true>(own);
      store_eight(half, own);
    }
    __syncthreads();
  }

  // Gives tokens: the real parts of kPoints times them. The next forward() may follow at once.
  __device__ __forceinline__ void back(float (&to)[kOwn]) const {
    float2 v[kOwn];
    middle<true>(v);
    __syncthreads();
    first_turns_.each([&](int k, float2 turn) { v[k] = turned<true>(at(first_ + kLanes * k), turn); });
    sixteen<true>(v);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 value = v[of_sixteen(j)], by = shift(j);
      to[j] = fmaf(value.x, by.x, value.y * by.y);
    }
  }

 private:
  // Row of point r: its lowest two bits meet those above them.
  static constexpr __host__ __device__ int swapped(int r) { return r ^ (r >> 2 & 3) ^ (r >> 4 & 3); }
  __device__ __forceinline__ float2& at(int row) const { return points_[row * kChannels]; }

  // The eight neighbours of a thread's last stage, the first ones or others.
  __device__ __forceinline__ float2& neighbour(int half, int j) const {
    return at((third_ ^ swapped(j) % 4) + (j & 4) + kPoints / 2 * half);
  }
  __device__ __forceinline__ void load_eight(int half, float2 (&own)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) own[j] = neighbour(half, j);
  }
  __device__ __forceinline__ void store_eight(int half, const float2 (&own)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) neighbour(half, j) = own[of_eight(j)];
  }

  // The second radix 16, of 128 points each.
  template <bool kBack>
  __device__ __forceinline__ void middle(float2 (&v)[kOwn]) const {
    if (kBack) {
      second_turns_.each(
          [&](int k, float2 turn) { v[k] = turned<true>(at((second_ ^ swapped(8 * k) % 4) + 8 * k), turn); });
    } else {
#pragma unroll
      for (int j = 0; j < 16; ++j) v[j] = at((second_ ^ swapped(8 * j) % 4) + 8 * j);
    }
    sixteen<kBack>(v);
    if (kBack) {
#pragma unroll
      for (int j = 0; j < 16; ++j) at((second_ ^ swapped(8 * j) % 4) + 8 * j) = v[of_sixteen(j)];
    } else {
      second_turns_.each(
          [&](int k, float2 turn) { at((second_ ^ swapped(8 * k) % 4) + 8 * k) = product(v[of_sixteen(k)], turn); });
    }
  }

  float2* points_;
  int lane_, first_, second_, third_;
  Turns first_turns_{}, second_turns_{};
};

}  // namespace flashgla::ops::long_convolution::cuda

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
#include "flashgla/ops/long_convolution/cuda/complex.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kPoints = 2048;
constexpr int kChannels = 4;
constexpr int kOwn = 16;
constexpr int kLanes = kPoints / kOwn;
constexpr int kThreads = kChannels * kLanes;
constexpr int kScaleBytes = kThreads / 32 * kChannels * 2 * static_cast<int>(sizeof(float));  // for blocks.cuh
constexpr int kPointBytes = kPoints * kChannels * static_cast<int>(sizeof(float2));           // of a block's transform

// The factors of a transform: e^(-2 pi i at (k + offset) / points), k below 16 and `at` below count, as products of one
// of four and one of three, [kParts,count]; of its first stage, and behind them of its second. Computed where this is
// compiled: a block would take a tenth of its time for them.
struct TurnTable {
  static constexpr int kParts = 7, kFirst = kParts * kLanes, kCount = kParts * (kLanes + 8);
  float2 turns[kCount];

  constexpr TurnTable() : turns{} {
    fill(0, kLanes, -0.25, kPoints);
    fill(kFirst, 8, 0.0, 128);
  }

 private:
  constexpr void fill(int to, int count, double offset, int points) {
    for (int part = 0; part < kParts; ++part) {
      for (int at = 0; at < count; ++at) {
        const double k = part < 4 ? part + offset : 4 * (part - 3);
        double turn = at * k / points;
        while (turn > 0.5) turn -= 1.0;
        const double angle = -2.0 * 3.14159265358979323846 * turn;
        double cosine = 0.0, sine = 0.0, term = 1.0;  // terms angle^i / i!
        for (int i = 0; i < 32; ++i) {
          const double signed_term = i % 4 < 2 ? term : -term;
          (i % 2 == 0 ? cosine : sine) += signed_term;
          term *= angle / (i + 1);
        }
        turns[to + part * count + at] = {static_cast<float>(cosine), static_cast<float>(sine)};
      }
    }
  }
};
static __device__ constexpr TurnTable kTurnTable;

// A thread's of a stage, in shared memory.
template <class P>
struct Turns {
  const P* own;
  int count;

  // Calls use(k, factor) for each k.
  template <class Use>
  __device__ __forceinline__ void each(const Use& use) const {
    P low[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      low[k] = own[k * count];
      use(k, low[k]);
    }
#pragma unroll
    for (int high = 1; high < 4; ++high) {
      const P turn = own[(3 + high) * count];
#pragma unroll
      for (int k = 0; k < 4; ++k) use(4 * high + k, product(low[k], turn));
    }
  }
};

// A thread's part in its block's transforms. `points` [kPoints,kChannels], rows changed over so that the threads of
// half a warp meet in no bank.
template <class P>
class Transform {
 public:
  // Shared memory: turns, and points behind them. All threads of the block must come here.
  static constexpr int kTurns = TurnTable::kCount;
  static constexpr int kRoomAt = kPointBytes + kTurns * static_cast<int>(sizeof(P));  // the caller's, kScaleBytes
  static constexpr int kBytes = kRoomAt + (Numbers<P>::kWide > 1 ? kScaleBytes : 0);
  static __device__ __forceinline__ P* points(unsigned char* memory) { return reinterpret_cast<P*>(memory) + kTurns; }
  static __device__ __forceinline__ float* room(unsigned char* memory) {
    return reinterpret_cast<float*>(memory + kRoomAt);
  }

  __device__ __forceinline__ explicit Transform(unsigned char* memory)
      : points_(points(memory) + threadIdx.x % kChannels),
        lane_(static_cast<int>(threadIdx.x) / kChannels),
        first_(swapped(lane_)),
        second_(swapped(lane_ / 8 * 128 + lane_ % 8)),
        third_(swapped(8 * lane_)) {
    P* turns = reinterpret_cast<P*>(memory);
    for (int item = static_cast<int>(threadIdx.x); item < kTurns; item += kThreads) {
      turns[item] = Numbers<P>::of(kTurnTable.turns[item]);
    }
    first_turns_ = {turns + lane_, kLanes};
    second_turns_ = {turns + TurnTable::kFirst + lane_ % 8, 8};
    __syncthreads();
  }

  __device__ __forceinline__ int channel() const { return static_cast<int>(threadIdx.x) % kChannels; }
  // Token of a thread's value j.
  __device__ __forceinline__ int token(int j) const { return lane_ + kLanes * j; }

  // Each of these takes a thread's values by its own index i: tokens v[i], in turn, or at frequencies use(i, value) and
  // get(i). A block's threads must call them together, forward() before frequencies(), back() behind
  // set_frequencies(); between frequencies() and the next forward() or set_frequencies() goes a __syncthreads().

  // Takes tokens times shift(j).
  __device__ __forceinline__ void forward(P (&v)[kOwn]) const {
    sixteen<false>(v);
    first_turns_.each([&](int k, P turn) { at(first_ + kLanes * k) = product(v[of_sixteen(k)], turn); });
    __syncthreads();
    middle<false>(v);
    __syncthreads();
  }

  template <class Use>
  __device__ __forceinline__ void frequencies(const Use& use) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      P own[8];
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
      P own[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) own[k] = get(8 * half + k);
      eight<true>(own);
      store_eight(half, own);
    }
    __syncthreads();
  }

  // Gives tokens: the real parts of kPoints times them. The next forward() may follow at once.
  __device__ __forceinline__ void back(typename Numbers<P>::Real (&to)[kOwn]) const {
    P v[kOwn];
    middle<true>(v);
    __syncthreads();
    first_turns_.each([&](int k, P turn) { v[k] = turned<true>(at(first_ + kLanes * k), turn); });
    sixteen<true>(v);
#pragma unroll
    for (int j = 0; j < 16; ++j) to[j] = real_part(v[of_sixteen(j)], shift(j));
  }

 private:
  // Row of point r: its lowest two bits meet those above them.
  static constexpr __host__ __device__ int swapped(int r) { return r ^ (r >> 2 & 3) ^ (r >> 4 & 3); }
  __device__ __forceinline__ P& at(int row) const { return points_[row * kChannels]; }

  // The eight neighbours of a thread's last stage, the first ones or others.
  __device__ __forceinline__ P& neighbour(int half, int j) const {
    return at((third_ ^ swapped(j) % 4) + (j & 4) + kPoints / 2 * half);
  }
  __device__ __forceinline__ void load_eight(int half, P (&own)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) own[j] = neighbour(half, j);
  }
  __device__ __forceinline__ void store_eight(int half, const P (&own)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) neighbour(half, j) = own[of_eight(j)];
  }

  // The second radix 16, of 128 points each.
  template <bool kBack>
  __device__ __forceinline__ void middle(P (&v)[kOwn]) const {
    if (kBack) {
      second_turns_.each([&](int k, P turn) { v[k] = turned<true>(at((second_ ^ swapped(8 * k) % 4) + 8 * k), turn); });
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
          [&](int k, P turn) { at((second_ ^ swapped(8 * k) % 4) + 8 * k) = product(v[of_sixteen(k)], turn); });
    }
  }

  P* points_;
  int lane_, first_, second_, third_;
  Turns<P> first_turns_{}, second_turns_{};
};

}  // namespace flashgla::ops::long_convolution::cuda

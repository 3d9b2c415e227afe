// A transform of 256 points as in transform.cuh, of each of eight spans of a channel's kPoints tokens, whose products
// with a filter's are summed over the spans. A team of kTeam threads has a channel's spans, sixteen threads each: radix
// 16 and 16 with one exchange between, which stays within half a warp.
#pragma once

#include "flashgla/ops/long_convolution/cuda/transform.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kSpan = 256, kSpans = kPoints / kSpan;
constexpr int kTeam = kPoints / kOwn;
constexpr int kSlots = kSpan / kTeam;  // frequencies of a thread of a team, of every span
// A span's points in shared memory: 16 rows of 16 with a gap behind each, so that neither side of the exchange meets a
// bank twice.
constexpr int kRow = 17, kSpanRoom = 16 * kRow, kChannelRoom = kSpans * kSpanRoom;

// Where a thread stands. Two teams share warps, half of each, so that their neighbouring channels' tokens are read from
// banks of their own; they wait for each other.
struct TeamPlace {
  static __device__ __forceinline__ int team() {
    return static_cast<int>(threadIdx.x) / (2 * kTeam) * 2 + static_cast<int>(threadIdx.x) / 16 % 2;
  }
  // Waits for both teams.
  static __device__ __forceinline__ void meet() { ptx::barrier(1 + team() / 2, 2 * kTeam); }
  static __device__ __forceinline__ int span() { return static_cast<int>(threadIdx.x) % (2 * kTeam) / 32; }
  // A thread's token j of its span's channel; its frequency number i of every span.
  static __device__ __forceinline__ int token(int j) { return span() * kSpan + lane() + 16 * j; }
  static __device__ __forceinline__ int slot(int i) { return 16 * span() + lane() + kTeam * i; }
  static __device__ __forceinline__ int place_of_slot(int i) {  // in a span's points
    return kRow * span() + lane() + kTeam / 16 * kRow * i;
  }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 16; }
};

// A thread's part in its team's transforms, of kCount channels at once. points [kCount,kChannelRoom] in shared
// memory. What a thread writes in one call it has read itself in the call before.
class SpanTransform : public TeamPlace {
 public:
  static constexpr int kTurns = kSpan;  // in shared memory

  // All threads of the block must come here, and meet before they use it.
  __device__ __forceinline__ explicit SpanTransform(float2* turns) : turns_(turns) {
    for (int item = static_cast<int>(threadIdx.x); item < kTurns; item += static_cast<int>(blockDim.x)) {
      const float k = static_cast<float>(item / 16) - 0.25f;
      float2 turn;
      sincospif(static_cast<float>(item % 16) * k * (-2.0f / kSpan), &turn.y, &turn.x);
      turns[item] = turn;
    }
  }

  // v: tokens times shift(j).
  template <int kCount>
  __device__ __forceinline__ void forward(float2 (&v)[kCount][kOwn], float2* points) const {
#pragma unroll
    for (int c = 0; c < kCount; ++c) sixteen<false>(v[c]);
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float2 turn = turns_[16 * k + lane()];
#pragma unroll
      for (int c = 0; c < kCount; ++c) at(points + c * kChannelRoom, k, lane()) = product(v[c][of_sixteen(k)], turn);
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      float2* own = points + c * kChannelRoom;
#pragma unroll
      for (int j = 0; j < 16; ++j) v[c][j] = at(own, lane(), j);
      sixteen<false>(v[c]);
#pragma unroll
      for (int k = 0; k < 16; ++k) at(own, lane(), k) = v[c][of_sixteen(k)];
    }
  }

  // Gives tokens: the real parts of kSpan times them.
  template <int kCount>
  __device__ __forceinline__ void back(float2* points, float (&to)[kCount][kOwn]) const {
    float2 v[kCount][kOwn];
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      float2* own = points + c * kChannelRoom;
#pragma unroll
      for (int k = 0; k < 16; ++k) v[c][k] = at(own, lane(), k);
      sixteen<true>(v[c]);
#pragma unroll
      for (int j = 0; j < 16; ++j) at(own, lane(), j) = v[c][of_sixteen(j)];
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float2 turn = turns_[16 * k + lane()];
#pragma unroll
      for (int c = 0; c < kCount; ++c) v[c][k] = turned<true>(at(points + c * kChannelRoom, k, lane()), turn);
    }
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      sixteen<true>(v[c]);
#pragma unroll
      for (int j = 0; j < 16; ++j) to[c][j] = real_part(v[c][of_sixteen(j)], shift(j));
    }
  }

 private:
  static __device__ __forceinline__ float2& at(float2* points, int row, int column) {
    return points[span() * kSpanRoom + kRow * row + column];
  }

  const float2* turns_;
};

// A frequency of every span, kStep apart, of those below `spans`; zeros above.
template <int kStep>
__device__ __forceinline__ void load_slot(const float2* from, int spans, float2 (&to)[kSpans]) {
#pragma unroll
  for (int a = 0; a < kSpans; ++a) to[a] = a < spans ? from[a * kStep] : float2{};
}

// sums[l] += the sum over a of the conjugate of x[a] times w[a + l]. Without the upper half where all of it is zeros.
__device__ __forceinline__ void add_correlation(const float2 (&x)[kSpans], const float2 (&w)[kSpans], int spans,
                                                float2 (&sums)[kSpans]) {
  constexpr int kHalf = kSpans / 2;
  const auto add = [&](auto from) {
    constexpr int kFrom = decltype(from)::value;
#pragma unroll
    for (int late = kFrom; late < kFrom + kHalf; ++late) {
#pragma unroll
      for (int early = 0; early <= late; ++early) {
        sums[late - early] = add_product(sums[late - early], conjugate(x[early]), w[late]);
      }
    }
  };
  add(std::integral_constant<int, 0>());
  if (spans > kHalf) add(std::integral_constant<int, kHalf>());
}

}  // namespace flashgla::ops::long_convolution::cuda

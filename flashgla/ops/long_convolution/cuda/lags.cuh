// The filter's gradient of bf16 sequences of at most kPoints tokens, as it stands, by tensor cores: a product of two
// bf16 is exact in f32, which no spectrum in f16 is, and kPoints / 2 products a token are fewer clocks than two
// transforms in f32. With a lag 8 i + j and tokens from t on,
//
//     dfilter[8 i + j] = sum over t and k of dy[t + 8 i + k] x[t + k - j]
//
// is a matrix of rows of dy, each 8 tokens behind the one before, times one of x's columns, each a token behind; 16
// rows are as many rows of `dy` in shared memory, as they lie. A block has neighbouring channels, two warps each, of
// every chunks-th sequence.
#pragma once

#include "flashgla/base/cuda/tensor_map.h"
#include "flashgla/ops/long_convolution/cuda/staged.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kLagChannels = 8, kLagHalves = 2, kLagThreads = 32 * kLagChannels * kLagHalves;
constexpr int kLagPart = 128, kLagParts = kPoints / kLagPart;  // lags of a product's rows and columns
// A channel's tokens in shared memory. dy with zeros behind; x with zeros before, twice, the second time a token later,
// so that a pair of tokens is a word of one of them. Lanes that read or write side by side meet in no bank.
constexpr int kLagDyBytes = 2 * (kPoints + kLagPart - 8);
constexpr int kLagCopyBytes = 2 * (8 + kPoints + 24), kLagXBytes = 2 * kLagCopyBytes - 16;
static_assert(kLagCopyBytes % 128 == 64 && kLagDyBytes % 128 == 112 && kLagXBytes % 128 == 112);
constexpr int kLagRowBytes = 2 * kPoints * kLagChannels;  // a sequence's tokens as they come: x's, and dy's behind them
constexpr int kLagDyAt = 2 * kLagRowBytes, kLagXAt = kLagDyAt + kLagChannels * kLagDyBytes;
constexpr int kLagSumsAt = kLagXAt + kLagChannels * kLagXBytes;
constexpr int kLagBarrierAt = kLagSumsAt + kLagChannels * kPoints * 4, kLagBytes = kLagBarrierAt + 16;
static_assert(kLagThreads == kFusedThreads && kLagBytes <= 227 << 10);

// For TMA, in boxes of a block's channels and kSpan tokens.
struct LagMaps {
  CUtensorMap x, dy;
};

// A thread's part in its warp's channel and half of the columns.
class Lags {
 public:
  __device__ __forceinline__ explicit Lags(unsigned char* memory) : memory_(memory) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int channel = warp / kLagHalves;
    half_ = warp % kLagHalves;
    row_ = lane / 4;
    pair_ = lane % 4;
    const std::uint32_t at = ptx::shared_address(memory), first = 2 * (kLagPart / kLagHalves) * half_;
    dy_ = at + kLagDyAt + channel * kLagDyBytes + (lane % 16 + lane / 16) * 16 + first;
    x_ = at + kLagXAt + channel * kLagXBytes + row_ % 2 * kLagCopyBytes + 2 * (8 + 2 * pair_ - row_ + row_ % 2) + first;
    sums_ = reinterpret_cast<float4*>(memory + kLagSumsAt) + channel * (kLagParts * 32) + lane;
  }

  __device__ __forceinline__ int half() const { return half_; }

  // A sequence's tokens from rows of channels to channels of tokens, of all the block's channels.
  __device__ __forceinline__ void turn() const {
    constexpr int kSteps = kPoints / kLagThreads;
    const int lane = static_cast<int>(threadIdx.x) % 32, first = static_cast<int>(threadIdx.x) - lane;
    const std::uint32_t rows = ptx::shared_address(memory_) + 16 * static_cast<int>(threadIdx.x);
    std::uint32_t early[kSteps][4], late[kSteps][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::load_matrix_4_transposed(early[i], rows + 16 * kLagThreads * i);
      ptx::load_matrix_4_transposed(late[i], rows + kLagRowBytes + 16 * kLagThreads * i);
    }
    unsigned char* dy = memory_ + kLagDyAt + row_ * kLagDyBytes + 4 * pair_ + 2 * first;
    unsigned char* x = memory_ + kLagXAt + row_ * kLagXBytes + 4 * pair_ + 2 * first + 16;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = 2 * (kLagThreads * i + 8 * k);
        *reinterpret_cast<std::uint32_t*>(dy + at) = late[i][k];
        *reinterpret_cast<std::uint32_t*>(x + at) = early[i][k];
        *reinterpret_cast<std::uint16_t*>(x + kLagCopyBytes + at + 2) = static_cast<std::uint16_t>(early[i][k]);
        *reinterpret_cast<std::uint16_t*>(x + kLagCopyBytes + at + 4) = static_cast<std::uint16_t>(early[i][k] >> 16);
      }
    }
  }

  // Adds the products of a sequence of so many parts. Rows of dy come in an order in which a sum's next product is far,
  // and x's columns as soon as the last row for the ones before has been.
  __device__ __forceinline__ void add(int parts, float (&own)[kLagParts][4]) const {
    static_assert(kLagParts == 16);
    constexpr int kOrder[kLagParts] = {15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0};
    std::uint32_t dy[2][4], x[kLagParts][2];
    const auto load_x = [&](int part, int t) {
      x[part][0] = word(x_ + 2 * (t + kLagPart * part));
      x[part][1] = word(x_ + 2 * (t + kLagPart * part + 8));
    };
#pragma unroll
    for (int part = kLagParts - 1; part >= 0; --part) load_x(part, 0);
    ptx::load_matrix_4(dy[0], dy_ + 2 * kLagPart * kOrder[0]);
#pragma unroll 1
    for (int t = 0; t < kLagPart / kLagHalves; t += 16) {  // what the last step reads ahead is not used
#pragma unroll
      for (int k = 0; k < kLagParts; ++k) {
        const int late = kOrder[k], next = k + 1;
        ptx::load_matrix_4(dy[next % 2],
                           dy_ + 2 * (next < kLagParts ? t : t + 16) + 2 * kLagPart * kOrder[next % kLagParts]);
        if (late < parts) {
#pragma unroll
          for (int lag = 0; lag < kLagParts; ++lag) {
            const int early = late - lag < 0 ? 0 : late - lag;
            if (lag <= late) ptx::mma_bf16(own[lag], dy[k % 2], x[early][0], x[early][1]);
          }
        }
        if (late > 8) load_x(late, t + 16);
        if (late == 8) {
#pragma unroll
          for (int part = 8; part > 0; --part) load_x(part, t + 16);
        }
        if (late == 0) load_x(0, t + 16);
      }
    }
  }

  // Takes a thread's sums to its channel's, of which each half must have its turn.
  __device__ __forceinline__ void hand_over(float (&own)[kLagParts][4]) const {
#pragma unroll
    for (int lag = 0; lag < kLagParts; ++lag) {
      float4 sum = sums_[lag * 32];
      sum.x += own[lag][0];
      sum.y += own[lag][1];
      sum.z += own[lag][2];
      sum.w += own[lag][3];
      sums_[lag * 32] = sum;
#pragma unroll
      for (float& value : own[lag]) value = 0.0f;
    }
  }

  // Writes the sums of all channels to `to` [rows,D], from its column `channel` on. All of the block must come here.
  __device__ __forceinline__ void store(float* to, std::int64_t rows, int channel, std::int64_t channels) const {
    const auto* sums = reinterpret_cast<const float*>(memory_ + kLagSumsAt);
    __syncthreads();
    const bool whole = channel + kLagChannels <= channels && channels % 4 == 0;
    for (std::int64_t row = threadIdx.x; row < rows; row += kLagThreads) {
      const int lag = static_cast<int>(row) % kLagPart, part = static_cast<int>(row) / kLagPart;
      const int lane = lag / 8 % 8 * 4 + lag % 8 / 2, place = (part * 32 + lane) * 4 + lag / 64 * 2 + lag % 2;
      float values[kLagChannels];
#pragma unroll
      for (int c = 0; c < kLagChannels; ++c) values[c] = row < kPoints ? sums[c * kPoints + place] : 0.0f;
      float* at = to + row * channels + channel;
      if (whole) {
        Vector<float, kLagChannels>::of(values).store(at);
      } else {
#pragma unroll
        for (int c = 0; c < kLagChannels; ++c) {
          if (channel + c < channels) at[c] = values[c];
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t word(std::uint32_t shared) {
    std::uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared));
    return value;
  }

  unsigned char* memory_;
  float4* sums_;
  std::uint32_t dy_, x_;
  int half_, row_, pair_;  // rows and pairs of fragments
};

// dfilter [chunks,rows,D]. kBoxes as fused_kernel's.
template <bool kBoxes>
__global__ void __launch_bounds__(kLagThreads, 1)
    lag_kernel(Call<__nv_bfloat16> call, Lines<__nv_bfloat16> dy, float* dfilter, int chunks,
               const __grid_constant__ LagMaps maps) {
  using Rows = Staged<__nv_bfloat16, kLagChannels>;
  extern __shared__ __align__(128) unsigned char memory[];
  const FusedShare share(call.channels, kLagChannels);
  const auto rows = [&](int tensor) { return Rows{reinterpret_cast<__nv_bfloat16*>(memory + tensor * kLagRowBytes)}; };
  for (int item = static_cast<int>(threadIdx.x); item < (kLagBarrierAt - kLagDyAt) / 16; item += kLagThreads) {
    reinterpret_cast<uint4*>(memory + kLagDyAt)[item] = {};
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const std::uint32_t barrier = ptx::shared_address(memory + kLagBarrierAt);
  if (kBoxes && threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_barrier_init();
  }
  std::uint32_t phase = 0;
#endif
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  const auto ask = [&](int n) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kBoxes) {
      if (threadIdx.x > 0) return;
      constexpr int kBoxBytes = kLagRowBytes / kSpans;
      const std::uint32_t at = ptx::shared_address(memory);
      ptx::mbarrier_arrive_expect(barrier, 2 * kLagRowBytes);
      for (int i = 0; i < kSpans; ++i) {
        ptx::copy_box(at + i * kBoxBytes, &maps.x, share.channel, i * kSpan, n, 0, barrier);
        ptx::copy_box(at + kLagRowBytes + i * kBoxBytes, &maps.dy, share.channel, i * kSpan, n, 0, barrier);
      }
      return;
    }
#endif
    const Place place = call.place_of(n);
    rows(0).ask(call.x, place, share.channel, call.channels, &call);
    rows(1).ask(dy, place, share.channel, call.channels);
    ptx::copy_async_commit();
  };
  const Lags lags(memory);
  float own[kLagParts][4] = {};
  int held = 0;  // sequences in them
  int n = sequence_from(call, share.chunk, chunks);
  if (n < call.sequences) ask(n);
  while (n < call.sequences) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (kBoxes) ptx::mbarrier_wait(barrier, phase);
    phase ^= 1;
#endif
    if (!kBoxes) {
      ptx::copy_async_wait<0>();
      __syncthreads();
    }
    lags.turn();
    __syncthreads();
    const int next = sequence_from(call, n + chunks, chunks);
    if (next < call.sequences) ask(next);
    const Place place = call.place_of(n);
    lags.add(static_cast<int>(place.past + place.length + kLagPart - 1) / kLagPart, own);
    // Tensor cores cut what they add where f32 rounds, some 4e-6 of a sum of 128 products.
    const bool full = ++held == kLagHalves || next >= call.sequences;
    if (full && lags.half() == 0) lags.hand_over(own);
    __syncthreads();
    if (full && lags.half() == 1) lags.hand_over(own);
    if (full) held = 0;
    n = next;
  }
  lags.store(dfilter + std::int64_t{share.chunk} * call.rows * call.channels, call.rows, share.channel, call.channels);
}

}  // namespace flashgla::ops::long_convolution::cuda

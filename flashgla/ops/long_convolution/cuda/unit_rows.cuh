// Kernels of whole transforms that turn rows to units and back (units.cuh), and what all kernels of a call know.
#pragma once

#include "flashgla/ops/long_convolution/cuda/units.cuh"

namespace flashgla::ops::long_convolution::cuda {

// Sequences whose products are summed in f16 for the filter's gradient.
constexpr int kMostSummed = 32;

// Blocks a multiprocessor of transforms (whole_warp.cuh): of 8,192 points two, of 4,096 four, so that one's products
// are made beside what another waits for.
template <int R>
constexpr int kWholeBlocks = R == 1   ? 4
                             : R == 2 ? 2
                                      : 1;
template <int R>
constexpr int kWholeThreads = 512 / kWholeBlocks<R>;
template <int R>
constexpr int kWholeWarps = kWholeThreads<R> / 32;

// What kernels know of a call. `filter` and `x` get the filter and tokens, which backward may find there, backward
// `gradients` dy's tokens; `results` gets y's or dx's, it may be where they are made of. `sums` gets the filter's
// gradient in f16, of each of `chunks` of kMostSummed sequences, a channel's first scale what it is to be multiplied
// by, and `products` sums of x dy, [kWholeWarps][D].
struct WholeCall {
  Call<__nv_bfloat16> call;
  Lines<__nv_bfloat16> dy, to;
  Units filter, x, gradients, results, sums;
  bool kept;   // filter and x are there
  int chunks;  // 0 forward
  const void* skip;
  bool wide_skip;  // f32
  float *dfilter, *dskip, *products;
  uint4* turns;  // of tiles (TileTurns), which the filter's rows make
  int* done;     // of each group of kUnitChannels how many items have their results

  __host__ __device__ __forceinline__ bool backward() const { return chunks > 0; }
};

// Thread 0 of a block counts what all of the block have written before they met.
__device__ __forceinline__ void count_done(int* count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}
// A thread's wait; behind a barrier all of the block may ask TMA for what was counted.
__device__ __forceinline__ void wait_for_done(const int* count, int all) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
  } while (now < all);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// What a kernel turns: rows of the filter, of tokens or of their outputs' gradients to units; and back results, y or
// dx, or sums, the filter's gradient.
enum class UnitsOf { filter, tokens, gradients, results, sums };
constexpr bool come(UnitsOf of) { return of != UnitsOf::results && of != UnitsOf::sums; }
constexpr bool are_of_filter(UnitsOf of) { return of == UnitsOf::filter || of == UnitsOf::sums; }

// Units of a group.
template <int R>
int unit_rows(const WholeCall& whole, UnitsOf of) {
  return (are_of_filter(of) ? 1 : static_cast<int>(whole.call.lines)) * WholeShape<R>::kTiles;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Row number `row` of a group's units. kPlain: rows are whole pieces of 16 bytes of one tensor; else channels are read
// and written one by one, and there may be tokens before the call's.
template <int R, bool kPlain, UnitsOf kOf>
class UnitTask {
 public:
  __device__ __forceinline__ UnitTask(const WholeCall& whole, int row, int group)
      : whole_(whole), thread_(static_cast<int>(threadIdx.x)), channel_(group * kUnitChannels) {
    constexpr int kUnits = WholeShape<R>::kTiles;
    unit_ = unit_in_turn<R>(row % kUnits);
    line_ = row / kUnits;
    constexpr int kEach = are_of_filter(kOf) ? 4 : 8, kParts = kUnitChannels / kEach;
    token_ = token_of_unit<R>(unit_) + token_of_row<R, !cuda::come(kOf)>(thread_ / kParts);
    own_channel_ = channel_ + thread_ % kParts * kEach;
  }

  __device__ __forceinline__ void come(unsigned char* memory, float* room) const {
    if constexpr (kOf == UnitsOf::filter) {
      filter_in<R>([&](int more) { return filter_row(more); }, whole_.filter, channel_, unit_, memory, room);
    } else {
      const auto put = [&](int more, unsigned char* to) {
        kOf == UnitsOf::gradients ? put_gradient_row(more, to) : put_token_row(more, to);
      };
      tokens_in<R>(put, kOf == UnitsOf::gradients ? whole_.gradients : whole_.x, line_, channel_, unit_, memory, room);
    }
    if (moves_units()) ptx::store_bulk_wait_read();
  }
  __device__ __forceinline__ void leave(unsigned char* memory, std::uint64_t* barrier) const {
    if constexpr (kOf == UnitsOf::sums) {
      if (whole_.call.rows > WholeShape<R>::kPoints) clear_filter_rows();
      for (int chunk = 0; chunk < whole_.chunks; ++chunk) {
        if (chunk > 0) {
          ptx::fence_async_proxy();
          __syncthreads();
        }
        const float4 by = filter_scale(chunk);  // asked for ahead of the units
        units_to_rows<R>(result(whole_.sums, chunk), memory, barrier, chunk);
        sums_out<R>(
            by, [&](int more, float4 values) { add_filter_row(more, values, chunk == 0); }, memory);
      }
      if (unit_ == 0) add_products(reinterpret_cast<float*>(memory));
    } else {
      units_to_rows<R>(result(whole_.results, line_), memory, barrier, 0);
      results_out<R>([&](int more, uint4 values) { store_row(more, values); }, memory);
    }
  }

 private:
  __device__ __forceinline__ const uint4* result(const Units& from, int line) const {
    return from.data + (from.number<R>(line, channel_) + unit_) * 32;
  }
  __device__ __forceinline__ float4 filter_scale(int chunk) const {
    const auto of = [&](int c) { return __ldcg(whole_.sums.scales + whole_.sums.number<R>(chunk, own_channel_ + c)); };
    return {of(0), of(1), of(2), of(3)};
  }
  __device__ __forceinline__ uint4 filter_row(int more) const {
    const auto& call = whole_.call;
    const int row = token_ + more, d = own_channel_;
    uint4 raw{};
    if (kPlain && row < call.rows && d < call.channels) {
      raw = __ldcs(reinterpret_cast<const uint4*>(call.filter + row * call.channels + d));
    }
    auto* words = &raw.x;
    if (!kPlain && row < call.rows) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (d + c < call.channels) words[c] = __float_as_uint(call.filter[row * call.channels + d + c]);
      }
    }
    if (more == 0 && token_ == 0) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (d + c < call.channels) words[c] = __float_as_uint(__uint_as_float(words[c]) + skip(d + c));
      }
    }
    return raw;
  }
  // The filter's gradient, of the first chunk or added.
  __device__ __forceinline__ void add_filter_row(int more, float4 values, bool first) const {
    const auto& call = whole_.call;
    if (token_ + more >= call.rows || own_channel_ >= call.channels) return;
    float* to = whole_.dfilter + token_ * call.channels + own_channel_ + more * call.channels;
    if constexpr (kPlain) {
      auto* at = reinterpret_cast<float4*>(to);
      if (!first) values = {at->x + values.x, at->y + values.y, at->z + values.z, at->w + values.w};
      __stcs(at, values);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (own_channel_ + c < call.channels) to[c] = (&values.x)[c] + (first ? 0.0f : to[c]);
      }
    }
  }
  // Rows behind the last point are zeros: every kPoints-th behind the block's, of a thread a channel.
  __device__ __forceinline__ void clear_filter_rows() const {
    const auto& call = whole_.call;
    const int channel = channel_ + thread_ % kUnitChannels;
    constexpr int kAtOnce = kUnitThreads / kUnitChannels, kPoints = WholeShape<R>::kPoints;
    if (channel >= call.channels) return;
    for (int i = thread_ / kUnitChannels; i < kUnitTokens; i += kAtOnce) {
      for (std::int64_t row = kPoints + unit_ * kUnitTokens + i; row < call.rows; row += kPoints) {
        whole_.dfilter[row * call.channels + channel] = 0.0f;
      }
    }
  }
  __device__ __forceinline__ float skip(int d) const {
    return whole_.wide_skip ? static_cast<const float*>(whole_.skip)[d]
                            : to_float(static_cast<const __nv_bfloat16*>(whole_.skip)[d]);
  }
  // The skip's gradient of the block's channels; all threads must come here.
  __device__ __forceinline__ void add_products(float* room) const {
    constexpr int kParts = kUnitThreads / kUnitChannels;
    const int c = thread_ % kUnitChannels, part = thread_ / kUnitChannels;
    const bool is_channel = channel_ + c < whole_.call.channels;
    float own = 0.0f;
#pragma unroll
    for (int row = part; row < kWholeWarps<R> && is_channel; row += kParts) {
      own += __ldcg(whole_.products + row * whole_.call.channels + channel_ + c);
    }
    __syncthreads();
    room[thread_] = own;
    __syncthreads();
    if (part > 0 || !is_channel) return;
#pragma unroll
    for (int i = 1; i < kParts; ++i) own += room[i * kUnitChannels + c];
    whole_.dskip[channel_ + c] += own;
  }
  // Eight channels of at(d), which is a float.
  template <class At>
  __device__ __forceinline__ uint4 gathered(const At& at) const {
    uint4 all;
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      float values[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int d = own_channel_ + c + i;
        if (d < whole_.call.channels) values[i] = at(d);
      }
      (&all.x)[c / 2] = ptx::pack_bf16(values[0], values[1]);
    }
    return all;
  }
  // Eight channels of a row of one tensor, zeros behind its end.
  __device__ __forceinline__ void put_piece(const Lines<__nv_bfloat16>& lines, int more, unsigned char* to) const {
    const bool inside = token_ + more < whole_.call.length && own_channel_ < whole_.call.channels;
    ptx::copy_async_16(ptx::shared_address(to), inside ? lines.at(line_, token_ + more, own_channel_) : lines.data,
                       inside ? 16 : 0);
  }
  __device__ __forceinline__ void put_token_row(int more, unsigned char* to) const {
    const auto& call = whole_.call;
    if constexpr (kPlain) {
      put_piece(call.x, more, to);
    } else {
      const Place place = call.place_of(line_);
      *reinterpret_cast<uint4*>(to) = gathered([&](int d) { return call.token(place, token_ + more, d); });
    }
  }
  // Of sequences that go by direct sums zeros.
  __device__ __forceinline__ void put_gradient_row(int more, unsigned char* to) const {
    const auto& call = whole_.call;
    if constexpr (kPlain) {
      put_piece(whole_.dy, more, to);
    } else {
      const Place place = call.place_of(line_);
      const std::int64_t t = token_ + more - place.past;
      uint4 own{};
      if (t >= 0 && t < place.length && place.by_transforms()) {
        own = gathered([&](int d) { return to_float(*whole_.dy.at(line_, t, d)); });
      }
      *reinterpret_cast<uint4*>(to) = own;
    }
  }
  __device__ __forceinline__ void store_row(int more, uint4 values) const {
    const auto& call = whole_.call;
    if constexpr (kPlain) {
      if (token_ + more < call.length && own_channel_ < call.channels) {
        __stcs(reinterpret_cast<uint4*>(whole_.to.at(line_, token_ + more, own_channel_)), values);
      }
    } else {
      const Place place = call.place_of(line_);
      const std::int64_t t = token_ + more - place.past;
      if (t < 0 || t >= place.length || !place.by_transforms()) return;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (own_channel_ + c >= call.channels) continue;
        const std::uint32_t both = (&values.x)[c / 2];
        *whole_.to.at(line_, t, own_channel_ + c) =
            __ushort_as_bfloat16(static_cast<unsigned short>(c % 2 == 0 ? both : both >> 16));
      }
    }
  }

  const WholeCall& whole_;
  int thread_, channel_, line_, own_channel_, unit_, token_;  // own: the thread's first in rows
};

#endif

constexpr int kGroupsAtOnce = 4;

// Blocks a multiprocessor.
template <UnitsOf kOf, bool kPlain>
constexpr int kUnitsBlocks = kOf == UnitsOf::results                            ? 4
                             : kOf == UnitsOf::filter || (come(kOf) && !kPlain) ? 2
                                                                                : 3;
// Shared memory: rows, and of those that come room for scales, of others a barrier.
template <UnitsOf kOf>
constexpr int kUnitsMemory = kUnitBytes + (come(kOf) ? kUnitRoom * static_cast<int>(sizeof(float)) : 16);

// Of those that come the filter's are first, or, where backward finds these and x's, dy's; of those that leave the
// results. The others may begin beside those before, since they need nothing of theirs, and results beside the
// transforms, whose last round leaves multiprocessors idle: they take groups as they are done. The first block of each
// ends behind the kernel before.
template <int R, bool kPlain, UnitsOf kOf>
__global__ void __launch_bounds__(kUnitThreads, kUnitsBlocks<kOf, kPlain>)
    units_kernel(const __grid_constant__ WholeCall whole) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) unsigned char memory[];
  const int number = static_cast<int>(blockIdx.x), groups = static_cast<int>(whole.x.channels) / kUnitChannels,
            rows = static_cast<int>(gridDim.x) / groups;
  if (kOf == UnitsOf::filter || (kOf == UnitsOf::gradients && whole.kept)) {
    flashgla::cuda::wait_for_previous();
    if (number < groups && threadIdx.x == 0) whole.done[number] = 0;
    if (kOf == UnitsOf::filter && R < 8 && number < WholeShape<R>::kTiles && threadIdx.x < TileTurns::kOfTile) {
      const int item = static_cast<int>(threadIdx.x);
      whole.turns[number * TileTurns::kOfTile + item] =
          TileTurns::half_of(item % 32, item / 32, turns_of_tile<R>(number));
    }
  }
  // Not of a call's last: blocks of the next call's first would wait where these are still writing.
  if (kOf != UnitsOf::sums && (kOf != UnitsOf::results || whole.backward())) flashgla::cuda::release_next();
  // As many groups beside each other as make whole lines of DRAM, of those that leave one such after the other.
  const int most = come(kOf) ? groups : kGroupsAtOnce, first = number / (rows * most) * most,
            together = min(most, groups - first), own = number - first * rows, row = own / together,
            group = first + own - row * together;
  const UnitTask<R, kPlain, kOf> task(whole, row, group);
  if constexpr (come(kOf)) {
    task.come(memory, reinterpret_cast<float*>(memory + kUnitBytes));
  } else {
    const int channels = min(kUnitChannels, static_cast<int>(whole.call.channels) - group * kUnitChannels);
    auto* barrier = reinterpret_cast<std::uint64_t*>(memory + kUnitBytes);
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(barrier), 1);
      ptx::fence_barrier_init();
      wait_for_done(whole.done + group, channels);
    }
    __syncthreads();
    task.leave(memory, barrier);
  }
  if (kOf != UnitsOf::filter && number == 0) flashgla::cuda::wait_for_previous();
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

// Sequences of up to 32,768 tokens of bf16, outputs or gradients, each transformed as a whole (matrices.cuh). Rows come
// as units (units.cuh) and leave as such, so that a block has all points of one channel in shared memory: the filter's
// columns and tiles, whose spectrum waits in memory for the block's own threads, then a sequence's columns, its tiles
// with the product between them and back, and columns back, whose results take the units' place. Gradients: so for dy
// and dx, whereby dy's spectrum waits as well, then for x and, summed over sequences, the filter's gradient.
#pragma once

#include <array>
#include <cstddef>

#include "flashgla/ops/long_convolution/cuda/whole_warp.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kLongest = 8;  // R

// Spectra that are not multiplied at once wait in memory, but for those of a warp's last tiles, as many as its threads
// have registers for.
template <int kCount>
using KeptTiles = std::array<StoredTile, kCount>;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warp of a block that has one channel.
class LongestWarp : public WholeWarp<kLongest> {
 public:
  __device__ __forceinline__ explicit LongestWarp(const WholeWarp& warp) : WholeWarp(warp) {}

  // Scales of a channel's units, four in a lane.
  __device__ __forceinline__ float4 scales(const Units& units, std::int64_t number) const {
    return __ldcg(reinterpret_cast<const float4*>(units.scales + number * kWholeTiles) + lane_);
  }

  // Asks TMA for a block's units, once all of the block have read those before. Gives their scales.
  __device__ __forceinline__ float4 ask(const Units& units, std::int64_t number) const {
    if (threadIdx.x == 0) {
      const std::uint32_t came = ptx::shared_address(memory_ + Memory::kCameAt);
      ptx::mbarrier_arrive_expect(came, 2 * kWholePoints);
      ptx::copy_bulk(ptx::shared_address(memory_ + Memory::kUnitsAt), units.data + number * kWholeSpectrum / 2,
                     2 * kWholePoints, came);
    }
    return scales(units, number);
  }
  // These units to columns, at a channel's exponent field `common`. Calls also(i, its units) in each round.
  template <class Also>
  __device__ __forceinline__ void columns(float4 asked, int common, const Also& also) {
    const auto steps = ColumnSteps::get<false>(memory_ + Memory::kColumnsAt, lane_);
    const auto turns = ColumnTurns<kLongest>::get<false>(memory_ + Memory::kColumnTurnsAt, warp_ % 4, lane_);
    const std::uint32_t own = ratios(asked, common);
    const auto* units = reinterpret_cast<const uint4*>(memory_ + Memory::kUnitsAt) + 64 * warp_ + lane_;
    const Place place(warp_, lane_);
    ptx::mbarrier_wait(ptx::shared_address(memory_ + Memory::kCameAt), turn_);
    turn_ ^= 1;
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
      const __half2 by = as_pair(__shfl_sync(0xffffffffu, own, warp_ / 2 + kWarps / 2 * i));
      const uint4* from = units + 64 * kWarps * i;
      const uint4 tokens[2] = {times(from[0], __low2half2(by)), times(from[32], __high2half2(by))};
      also(i, from);
      put_columns(steps, turns, place.of_round(i), tokens);
    }
  }
  __device__ __forceinline__ void columns(float4 asked, int common) {
    columns(asked, common, [](int /*i*/, const uint4* /*from*/) {});
  }
  // The same; gives a lane's share (product_of) of the sum of their products with `others`, whose units are asked for a
  // round ahead.
  __device__ __forceinline__ float columns_and_products(float4 asked, int common, const Units& others,
                                                        std::int64_t number) {
    const float2 own = own_of(asked), other = own_of(scales(others, number)),
                 both = make_float2(own.x * other.x, own.y * other.y);
    const uint4* units = others.data + number * kWholeSpectrum / 2 + 64 * warp_ + lane_;
    uint4 next[2] = {__ldcg(units), __ldcg(units + 32)};
    float products = 0.0f;
    columns(asked, common, [&](int i, const uint4* from) {
      const int lane = warp_ / 2 + kWarps / 2 * i;
      products = fmaf(__shfl_sync(0xffffffffu, both.x, lane), product_of(from[0], next[0]), products);
      products = fmaf(__shfl_sync(0xffffffffu, both.y, lane), product_of(from[32], next[1]), products);
      units += 64 * kWarps;
      if (i + 1 < kRounds) next[0] = __ldcg(units), next[1] = __ldcg(units + 32);
    });
    return products;
  }

  // Columns back to a channel's units of results, in bf16 times its `scale`, or kHalf.
  template <bool kHalf>
  __device__ __forceinline__ void columns_back(const Units& units, std::int64_t number, float scale) const {
    const auto steps = ColumnSteps::get<true>(memory_ + Memory::kColumnsAt, lane_);
    const auto turns = ColumnTurns<kLongest>::get<true>(memory_ + Memory::kColumnTurnsAt, warp_ % 4, lane_);
    const Place place(warp_, lane_);
    uint4* to = units.data + number * kWholeSpectrum / 2 + 64 * warp_ + lane_;
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
      take_columns<kHalf>(steps, turns, place.of_round(i), kHalf ? 1.0f : scale, to + 64 * kWarps * i);
    }
  }

  // Tiles to their spectrum, times 2^-12 where kLess: of a warp's last ones to `kept`, in registers, others' to memory.
  template <bool kLess, std::size_t kKept>
  __device__ __forceinline__ void tiles_to(uint4* to, std::array<StoredTile, kKept>& kept) const {
    const auto steps = get<TileSteps>(memory_ + Memory::kStepsAt, lane_),
               right = get<TileSteps>(memory_ + Memory::kStepsAt + (kLess ? 2 * kLanesBytes<TileSteps> : 0), lane_);
    const auto between = get<TileTurns>(memory_ + Memory::kBetweenAt, lane_);
    const auto make = [&](int tile) {
      Tile own;
      make_tile(steps, right, along(between, tile), chunks_of(tile), own);
      return StoredTile::of(own);
    };
    to += warp_ * 64 + lane_;
#pragma unroll 1
    for (int i = 0; i < kStored<kKept>; ++i) {
      make(warp_ + kWarps * i).store(to);
      to += 64 * kWarps;
    }
#pragma unroll
    for (int i = 0; i < static_cast<int>(kKept); ++i) kept[i] = make(warp_ + kWarps * (kStored<kKept> + i));
  }

  // Tiles' spectra, times 2^-12 where kLess, change by change(own, the same tile's of `by` and `kept`, its place in
  // memory) and go back.
  template <bool kLess, std::size_t kKept, class Change>
  __device__ __forceinline__ void tiles(const uint4* by, StoredTile next, const std::array<StoredTile, kKept>& kept,
                                        const Change& change) const {
    const auto steps = get<TileSteps>(memory_ + Memory::kStepsAt, lane_),
               right = get<TileSteps>(memory_ + Memory::kStepsAt + (kLess ? 2 * kLanesBytes<TileSteps> : 0), lane_),
               steps_back = get<TileSteps>(memory_ + Memory::kStepsAt + kLanesBytes<TileSteps>, lane_);
    const auto between = get<TileTurns>(memory_ + Memory::kBetweenAt, lane_);
    int at = warp_ * 64 + lane_;
    const auto one = [&](int tile, const auto& changed) {
      Tile own;
      unsigned char* chunks = chunks_of(tile);
      const TileTurns turns = along(between, tile);
      make_tile(steps, right, turns, chunks, own);
      changed(own);
      at += 64 * kWarps;
      take_tile(steps_back, turns.transposed(), own, chunks);
    };
#pragma unroll 1
    for (int i = 0; i < kStored<kKept>; ++i) {
      one(warp_ + kWarps * i, [&](Tile& own) {
        change(own, next, at);
        if (i + 1 < kStored<kKept>) next.load(by + at + 64 * kWarps);
      });
    }
#pragma unroll
    for (int i = 0; i < static_cast<int>(kKept); ++i) {
      one(warp_ + kWarps * (kStored<kKept> + i), [&](Tile& own) { change(own, kept[i], at); });
    }
  }
  // The same, added to what is at their places in `sums`, or, kFirst, put there.
  template <bool kFirst, class Change>
  __device__ __forceinline__ void tiles_added(uint4* sums, const uint4* by, StoredTile next,
                                              const Change& change) const {
    const auto steps = get<TileSteps>(memory_ + Memory::kStepsAt, lane_),
               right = get<TileSteps>(memory_ + Memory::kStepsAt + 2 * kLanesBytes<TileSteps>, lane_);
    const auto between = get<TileTurns>(memory_ + Memory::kBetweenAt, lane_);
    int at = warp_ * 64 + lane_;
#pragma unroll 1
    for (int i = 0; i < kWholeTiles / kWarps; ++i) {
      const int tile = warp_ + kWarps * i;
      StoredTile before;
      if constexpr (!kFirst) before.load(sums + at);
      Tile own;
      make_tile(steps, right, along(between, tile), chunks_of(tile), own);
      change(own, next, at);
      if constexpr (!kFirst) before.with(own, Plus());
      StoredTile::of(own).store(sums + at);
      at += 64 * kWarps;
      if (i + 1 < kWholeTiles / kWarps) next.load(by + at);
    }
  }

 private:
  // A tile's turns.
  __device__ __forceinline__ TileTurns along(const TileTurns& between, int tile) const {
    const uint4 turns = turns_of(tile)[lane_ % 4];
    return between.of_tile({turns.x, turns.y}, {turns.z, turns.w});
  }
  __device__ __forceinline__ const uint4* turns_of(int tile) const {
    return reinterpret_cast<const uint4*>(memory_ + Memory::kAlongAt) + tile * 4;
  }

  static constexpr int kRounds = kWholeQuads / kWarps;
  template <std::size_t kKept>
  static constexpr int kStored = kWholeTiles / kWarps - static_cast<int>(kKept);  // of a warp's tiles

  std::uint32_t turn_ = 0;  // of the mbarrier
};

#endif

// y. Spectra: kWholeSpectrum a block.
inline __global__ void __launch_bounds__(kWholeThreads<kLongest>, 1)
    whole_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  LongestWarp warp(begin_whole<kLongest>());
  const Items items(whole);
  uint4* filter = spectra + std::int64_t{blockIdx.x} * kWholeSpectrum;
  auto next = warp.ask(whole.filter, items.first);
  int item = items.first;
  for (; item < items.last; item += items.step) {
    const float filter_scale = warp.common_of<true>(next);
    warp.columns(next, field_of(filter_scale));
    __syncthreads();
    if (item >= items.step) items.finish(whole, item - items.step);
    next = warp.ask(whole.x, item);
    KeptTiles<4> kept;
    warp.tiles_to<true>(filter, kept);
    for (std::int64_t n = 0; n < whole.call.lines; ++n) {
      const std::int64_t number = n * items.all + item;
      const float scale = warp.common_of<false>(next);
      __syncthreads();
      warp.columns(next, field_of(scale));
      const StoredTile tile = warp.first_stored(filter);
      __syncthreads();
      if (n + 1 < whole.call.lines) {
        next = warp.ask(whole.x, number + items.all);
      } else if (item + items.step < items.last) {
        next = warp.ask(whole.filter, item + items.step);
      }
      warp.tiles<false>(filter, tile, kept, Times());
      __syncthreads();
      warp.columns_back<false>(whole.results, number, back_scale(scale, filter_scale));
    }
  }
  __syncthreads();
  items.finish(whole, item - items.step);
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The filter's gradient, columns back and scales.
__device__ __forceinline__ void sums_back(const LongestWarp& warp, const WholeCall& whole, std::int64_t number,
                                          const SummedScale& summed) {
  warp.columns_back<true>(whole.sums, number, 1.0f);
  store_scales<kLongest>(whole, number, summed);
}

#endif

// dx and the filter's gradient of one sequence. Spectra: kWholeSpectrum a block, of dy.
inline __global__ void __launch_bounds__(kWholeThreads<kLongest>, 1)
    whole_gradient_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  LongestWarp warp(begin_whole<kLongest>());
  const Items items(whole);
  uint4* gradients = spectra + std::int64_t{blockIdx.x} * kWholeSpectrum;
  auto next = warp.ask(whole.gradients, items.first);
  int item = items.first;
  for (; item < items.last; item += items.step) {
    const float scale = warp.common_of<false>(next),
                products = warp.columns_and_products(next, field_of(scale), whole.x, item);
    __syncthreads();
    if (item >= items.step) items.finish(whole, item - items.step);
    next = warp.ask(whole.filter, item);
    KeptTiles<2> kept;
    warp.tiles_to<false>(gradients, kept);
    const float filter_scale = warp.common_of<true>(next);
    __syncthreads();
    warp.columns(next, field_of(filter_scale));
    StoredTile tile = warp.first_stored(gradients);
    __syncthreads();
    next = warp.ask(whole.x, item);
    warp.tiles<true>(gradients, tile, kept, ConjugateTimes());
    __syncthreads();
    warp.columns_back<false>(whole.gradients, item, back_scale(scale, filter_scale));
    SummedScale summed = SummedScale::of<kLongest>(1);
    summed.add(warp.common_of<false>(next), scale);
    warp.columns(next, summed.of_x(scale));
    tile = warp.first_stored(gradients);
    __syncthreads();
    if (item + items.step < items.last) next = warp.ask(whole.gradients, item + items.step);
    warp.tiles<true>(gradients, tile, kept, ConjugateTimes());
    __syncthreads();
    sums_back(warp, whole, item, summed);
    warp.store_products(whole, item, products);
  }
  __syncthreads();
  items.finish(whole, item - items.step);
#endif
}

// Of several sequences. Spectra: 3 kWholeSpectrum a block, of the filter, of dy and of sums.
inline __global__ void __launch_bounds__(kWholeThreads<kLongest>, 1)
    whole_gradients_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  LongestWarp warp(begin_whole<kLongest>());
  const Items items(whole);
  uint4 *filter = spectra + std::int64_t{blockIdx.x} * 3 * kWholeSpectrum, *gradients = filter + kWholeSpectrum,
        *sums = gradients + kWholeSpectrum;
  auto next = warp.ask(whole.filter, items.first);
  int item = items.first;
  for (; item < items.last; item += items.step) {
    const float filter_scale = warp.common_of<true>(next);
    warp.columns(next, field_of(filter_scale));
    __syncthreads();
    if (item >= items.step) items.finish(whole, item - items.step);
    next = warp.ask(whole.gradients, item);
    KeptTiles<0> none;
    warp.tiles_to<true>(filter, none);
    float products = 0.0f;
    for (int chunk = 0; chunk < whole.chunks; ++chunk) {
      const std::int64_t begin = std::int64_t{chunk} * kMostSummed, end = min(begin + kMostSummed, whole.call.lines);
      SummedScale summed = SummedScale::of<kLongest>(static_cast<int>(end - begin));
#pragma unroll 4
      for (std::int64_t n = begin; n < end; ++n) {
        const float x = warp.common_of<false>(warp.scales(whole.x, n * items.all + item));
        summed.add(x, warp.common_of<false>(warp.scales(whole.gradients, n * items.all + item)));
      }
      for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t number = n * items.all + item;
        const float scale = warp.common_of<false>(next);
        __syncthreads();
        products += warp.columns_and_products(next, field_of(scale), whole.x, number);
        StoredTile tile = warp.first_stored(filter);
        __syncthreads();
        next = warp.ask(whole.x, number);
        warp.tiles<false>(filter, tile, none, [&](Tile& own, const StoredTile& by, int at) {
          StoredTile::of(own).store(gradients + at);
          TimesConjugate()(own, by, at);
        });
        __syncthreads();
        warp.columns_back<false>(whole.gradients, number, back_scale(scale, filter_scale));
        warp.columns(next, summed.of_x(scale));
        tile = warp.first_stored(gradients);
        __syncthreads();
        if (n + 1 < whole.call.lines) {
          next = warp.ask(whole.gradients, number + items.all);
        } else if (item + items.step < items.last) {
          next = warp.ask(whole.filter, item + items.step);
        }
        if (n + 1 < end) {
          n == begin ? warp.tiles_added<true>(sums, gradients, tile, ConjugateTimes())
                     : warp.tiles_added<false>(sums, gradients, tile, ConjugateTimes());
        } else {
          warp.tiles<true>(gradients, tile, none, [&](Tile& own, const StoredTile& by, int at) {
            ConjugateTimes()(own, by, at);
            if (n == begin) return;
            StoredTile before;
            before.load(sums + at);
            before.with(own, Plus());
          });
        }
      }
      __syncthreads();
      sums_back(warp, whole, std::int64_t{chunk} * items.all + item, summed);
    }
    warp.store_products(whole, item, products);
  }
  __syncthreads();
  items.finish(whole, item - items.step);
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

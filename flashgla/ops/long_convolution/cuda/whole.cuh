// Sequences of up to 32,768 tokens of bf16, outputs or gradients, each transformed as a whole (matrices.cuh). Rows come
// as units (units.cuh) and leave as such, so that a block has all points of one channel in shared memory: the filter's
// columns and tiles, whose spectrum waits in memory for the block's own threads, then a sequence's columns, its tiles
// with the product between them and back, and columns back, whose results take the units' place. Gradients: so for dy
// and dx, whereby dy's spectrum waits as well, then for x and, summed over sequences, the filter's gradient.
#pragma once

#include "flashgla/ops/long_convolution/cuda/whole_warp.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kLongest = 8;  // R
using LongestItems = Items<WholeShape<kLongest>::kTogether>;

// Spectra that are not multiplied at once wait in memory, but for those that a thread has registers for.
template <int kCount>
using KeptTiles = std::array<StoredTile, kCount>;

// y. Spectra: kWholeSpectrum a block.
inline __global__ void __launch_bounds__(kWholeThreads<kLongest>, 1)
    whole_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto warp = begin_whole<kLongest>();
  const LongestItems items(whole);
  uint4* filter = spectra + std::int64_t{blockIdx.x} * kWholeSpectrum;
  auto next = warp.ask(whole.filter, items.first);
  int item = items.first;
  for (; item < items.last; item += items.step) {
    const float filter_scale = next.common<true>();
    warp.columns(next, field_of(filter_scale));
    __syncthreads();
    if (item >= items.step) items.finish(whole, item - items.step);
    next = warp.ask(whole.x, item);
    KeptTiles<2> kept;
    warp.tiles_to<true>(filter, kept);
    for (std::int64_t n = 0; n < whole.call.lines; ++n) {
      const std::int64_t number = n * items.all + item;
      const float scale = next.common<false>();
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
      warp.columns_back<false>(whole.x, number, back_scale(scale, filter_scale));
    }
  }
  __syncthreads();
  items.finish(whole, item - items.step);
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The filter's gradient, columns back and scales.
__device__ __forceinline__ void sums_back(const WholeWarp<kLongest>& warp, const WholeCall& whole, std::int64_t number,
                                          const SummedScale& summed) {
  warp.columns_back<true>(whole.filter, number, 1.0f);
  store_scales<kLongest, WholeShape<kLongest>::kTogether>(whole, number, summed);
}

#endif

// dx and the filter's gradient of one sequence. Spectra: kWholeSpectrum a block, of dy.
inline __global__ void __launch_bounds__(kWholeThreads<kLongest>, 1)
    whole_gradient_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto warp = begin_whole<kLongest>();
  const LongestItems items(whole);
  uint4* gradients = spectra + std::int64_t{blockIdx.x} * kWholeSpectrum;
  auto next = warp.ask(whole.gradients, items.first);
  int item = items.first;
  for (; item < items.last; item += items.step) {
    const float scale = next.common<false>();
    warp.columns(next, field_of(scale));
    __syncthreads();
    if (item >= items.step) items.finish(whole, item - items.step);
    next = warp.ask(whole.filter, item);
    KeptTiles<2> kept;
    warp.tiles_to<false>(gradients, kept);
    const float filter_scale = next.common<true>();
    __syncthreads();
    warp.columns(next, field_of(filter_scale));
    StoredTile tile = warp.first_stored(gradients);
    __syncthreads();
    next = warp.ask(whole.x, item);
    warp.tiles<true>(gradients, tile, kept, ConjugateTimes());
    __syncthreads();
    warp.columns_back<false>(whole.gradients, item, back_scale(scale, filter_scale));
    SummedScale summed = SummedScale::of<kLongest>(1);
    summed.add(next.common<false>(), scale);
    warp.columns(next, summed.of_x(scale));
    tile = warp.first_stored(gradients);
    __syncthreads();
    if (item + items.step < items.last) next = warp.ask(whole.gradients, item + items.step);
    warp.tiles<true>(gradients, tile, kept, ConjugateTimes());
    __syncthreads();
    sums_back(warp, whole, item, summed);
  }
  __syncthreads();
  items.finish(whole, item - items.step);
#endif
}

// Of several sequences. Spectra: 3 kWholeSpectrum a block, of the filter, of dy and of sums.
inline __global__ void __launch_bounds__(kWholeThreads<kLongest>, 1)
    whole_gradients_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto warp = begin_whole<kLongest>();
  const LongestItems items(whole);
  uint4 *filter = spectra + std::int64_t{blockIdx.x} * 3 * kWholeSpectrum, *gradients = filter + kWholeSpectrum,
        *sums = gradients + kWholeSpectrum;
  auto next = warp.ask(whole.filter, items.first);
  int item = items.first;
  for (; item < items.last; item += items.step) {
    const float filter_scale = next.common<true>();
    warp.columns(next, field_of(filter_scale));
    __syncthreads();
    if (item >= items.step) items.finish(whole, item - items.step);
    next = warp.ask(whole.gradients, item);
    KeptTiles<0> none;
    warp.tiles_to<true>(filter, none);
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
        const float scale = next.common<false>();
        __syncthreads();
        warp.columns(next, field_of(scale));
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
  }
  __syncthreads();
  items.finish(whole, item - items.step);
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

// Transforms of up to 16,384 points (whole_warp.cuh) of two sequences at a time, or of one's x and dy. A block's points
// lie in three parts of shared memory, of one or two channels each: the filter's, the first sequence's or dy's, the
// second's or x's. So spectra that are multiplied meet where they are made. Behind that each thread keeps in the
// filter's part what is its own of the filter's spectrum or, for gradients, of sums over sequences, of which the
// filter's spectrum alone waits in memory then.
#pragma once

#include "flashgla/ops/long_convolution/cuda/whole_warp.cuh"

namespace flashgla::ops::long_convolution::cuda {

// Of a part.
template <int R>
constexpr int kPartTiles = kPartPoints<R> / 256;
template <int R>
constexpr int kPartSpectrum = kPartTiles<R> * 64;
constexpr int kPartRounds = 2;  // of a warp
template <int R>
constexpr int kHalvesTogether = kPartPoints<R> / WholeShape<R>::kPoints;  // channels of a block

// Units of kPoints tokens to the second cache, by one thread.
template <int kPoints>
__device__ __forceinline__ void expect(const Units& units, std::int64_t number) {
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(units.data + number * (kPoints / 8)),
                 "n"(2 * kPoints)
                 : "memory");
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int R>
class HalvesWarp : public WholeWarp<R> {
  using Base = WholeWarp<R>;
  using Memory = typename Base::Memory;
  static_assert(Memory::kBytes <= (228 / kWholeBlocks<R> - 1) * 1024);

 public:
  // A warp's first quad of units, which is asked for ahead of a barrier, and scales of all.
  struct First {
    float4 scales;
    const uint4* at;
    uint4 words[2];
  };
  static constexpr int kTogether = kHalvesTogether<R>;

  __device__ __forceinline__ explicit HalvesWarp(const Base& warp) : Base(warp) {}

  static __device__ __forceinline__ uint4* units_of(const Units& units, std::int64_t number) {
    return units.data + number * (kPartSpectrum<R> / 2);
  }
  // Scales of units of the first sequence in the upper lanes, of the second in the lower ones.
  __device__ __forceinline__ float4 scales(const Units& units, std::int64_t number, const Units& second,
                                           std::int64_t second_number) const {
    const float* own =
        lane_ >= 16 ? units.scales + number * kPartTiles<R> : second.scales + second_number * kPartTiles<R>;
    return __ldcg(reinterpret_cast<const float4*>(own) + lane_ % (kPartTiles<R> / 4));
  }
  // A warp's first quad of units.
  __device__ __forceinline__ First first(const Units& units, std::int64_t number, float4 scales) const {
    First result;
    result.at = units_of(units, number) + 64 * warp_ + lane_;
    result.words[0] = __ldcg(result.at);
    result.words[1] = __ldcg(result.at + 32);
    result.scales = scales;
    return result;
  }
  // The same of a filter, whose scales both halves of the lanes have.
  __device__ __forceinline__ First first(const Units& filter, std::int64_t number) const {
    return first(filter, number, scales(filter, number, filter, number));
  }
  // What the lane of the other sequence has of the same channel.
  template <class V>
  static __device__ __forceinline__ V of_other(V value) {
    return __shfl_xor_sync(0xffffffffu, value, 16);
  }

  // Units to columns, of one sequence or of `both`, and with the filter's ratios of that before (next is of it then).
  // Ratios are those of the base.
  __device__ __forceinline__ void columns(const First& next, bool both, std::uint32_t ratios, const uint4* units,
                                          const uint4* second) const {
    columns(
        next, kPartRounds, (both ? 3 : 2) * kPartRounds, [&](int /*i*/) { return ratios; }, behind(units, second));
  }
  __device__ __forceinline__ void columns(const First& next, bool filter, std::uint32_t filter_ratios, bool both,
                                          std::uint32_t ratios, const uint4* units, const uint4* second) const {
    columns(
        next, filter ? 0 : kPartRounds, (both ? 3 : 2) * kPartRounds,
        [&](int i) { return i < kPartRounds ? filter_ratios : ratios; }, behind(units, second));
  }
  __device__ __forceinline__ void filter_columns(const First& filter, std::uint32_t ratios) const {
    columns(
        filter, 0, kPartRounds, [&](int /*i*/) { return ratios; },
        [](const uint4* last, int /*i*/) { return last + 64 * Base::kWarps; });
  }
  // Columns back of one sequence or of `both`.
  __device__ __forceinline__ void columns_back(bool both, uint4* units, uint4* second, float scale) const {
    Base::template columns_back<false>(units, scale, kPartRounds, (both ? 3 : 2) * kPartRounds, behind(units, second));
  }
  // Of sums of products, in the second's place.
  __device__ __forceinline__ void sums_back(uint4* units) const {
    Base::template columns_back<true>(units, 1.0f, 2 * kPartRounds, 3 * kPartRounds,
                                      [](uint4* last, int /*i*/) { return last + 64 * Base::kWarps; });
  }

  // Tiles of one sequence or kBoth go back times the filter's, whose spectrum is made where kFirst and kept.
  template <bool kFirst, bool kBoth>
  __device__ __forceinline__ void tiles() const {
    const Constants all(memory_, lane_);
    TileTurns along = this->turns_of(warp_, false);
#pragma unroll 1
    for (int i = 0; i < kPartTiles<R> / Base::kWarps; ++i) {
      const int tile = warp_ + Base::kWarps * i;
      unsigned char *own = this->chunks_of(tile), *chunks = own + kPartBytes<R>;
      const TileTurns down = this->turns_of(tile, true);
      Tile filter, first, second;
      make_tile(all.steps, all.steps, along, chunks, first);
      if constexpr (kBoth) make_tile(all.steps, all.steps, along, chunks + kPartBytes<R>, second);
      if constexpr (kFirst) {
        make_tile(all.steps, all.less, along, own, filter);
        keep(tile, filter);
      } else {
        kept(tile).with(filter, [](Words& to, Words from) { to = from; });
      }
      if (i + 1 < kPartTiles<R> / Base::kWarps) along = this->turns_of(tile + Base::kWarps, false);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        first[k / 2][k % 2].template turn<false>(filter[k / 2][k % 2]);
        if constexpr (kBoth) second[k / 2][k % 2].template turn<false>(filter[k / 2][k % 2]);
      }
      take_tile(all.back, down, first, chunks);
      if constexpr (kBoth) take_tile(all.back, down, second, chunks + kPartBytes<R>);
    }
  }

  // Where in a chunk a sequence is: the first, whose product begins the sums, the last, with which they go back in x's
  // place, and of the first chunk's first the filter's spectrum is made, and stored where there are more.
  struct Step {
    bool begin, end, more;
  };
  // Tiles of dy go back times the filter's conjugate, and those of x, times 2^-12, times dy's conjugate are summed.
  template <bool kFirst>
  __device__ __forceinline__ void gradient_tiles(uint4* filter, StoredTile next, Step step) const {
    const Constants all(memory_, lane_);
    filter += warp_ * 64 + lane_;
    TileTurns along = this->turns_of(warp_, false);
#pragma unroll 1
    for (int i = 0; i < kPartTiles<R> / Base::kWarps; ++i) {
      const int tile = warp_ + Base::kWarps * i;
      unsigned char *own = this->chunks_of(tile), *chunks = own + kPartBytes<R>;
      const TileTurns down = this->turns_of(tile, true);
      Tile dy, x;
      make_tile(all.steps, all.steps, along, chunks, dy);
      make_tile(all.steps, all.less, along, chunks + kPartBytes<R>, x);
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k / 2][k % 2].template turn<true, true>(dy[k / 2][k % 2]);
      if constexpr (kFirst) {
        Tile made;
        make_tile(all.steps, all.less, along, own, made);
        if (step.more) StoredTile::of(made).store(filter);
#pragma unroll
        for (int k = 0; k < 4; ++k) dy[k / 2][k % 2].template turn<true>(made[k / 2][k % 2]);
      } else {
        if (!step.begin) kept(tile).with(x, Plus());
        TimesConjugate()(dy, next, 0);
        if (i + 1 < kPartTiles<R> / Base::kWarps) next.load(filter + 64 * Base::kWarps);
      }
      if (i + 1 < kPartTiles<R> / Base::kWarps) along = this->turns_of(tile + Base::kWarps, false);
      filter += 64 * Base::kWarps;
      if (step.end) {
        take_tile(all.back, down, x, chunks + kPartBytes<R>);
      } else {
        keep(tile, x);
      }
      take_tile(all.back, down, dy, chunks);
    }
  }

 private:
  // Units to columns: a warp's quads from `begin` to `end`, of which number i has ratios(i) as its factors' lanes have
  // them, and lies behind(the one before, i).
  template <class Ratios, class Behind>
  __device__ __forceinline__ void columns(First next, int begin, int end, const Ratios& ratios,
                                          const Behind& behind) const {
    const auto steps = ColumnSteps::get<false>(memory_ + Memory::kColumnsAt, lane_);
    const auto turns = ColumnTurns<R>::template get<false>(memory_ + Memory::kColumnTurnsAt, warp_ % 4, lane_);
    const typename Base::Place place(warp_, lane_);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const __half2 scales = as_pair(__shfl_sync(0xffffffffu, ratios(i), this->lane_of(i)));
      const uint4 tokens[2] = {times(next.words[0], __low2half2(scales)), times(next.words[1], __high2half2(scales))};
      next.at = behind(next.at, i + 1);
      if (i + 1 < end) next.words[0] = __ldcg(next.at), next.words[1] = __ldcg(next.at + 32);
      this->put_columns(steps, turns, place, i, tokens);
    }
  }
  // Of tiles.
  struct Constants {
    TileSteps steps, back, less;  // less: of spectra times 2^-12

    __device__ __forceinline__ Constants(const unsigned char* memory, int lane)
        : steps(get<TileSteps>(memory + Memory::kStepsAt, lane)),
          back(get<TileSteps>(memory + Memory::kStepsAt + kLanesBytes<TileSteps>, lane)),
          less(get<TileSteps>(memory + Memory::kStepsAt + 2 * kLanesBytes<TileSteps>, lane)) {}
  };
  // Where a warp's next quad is, the first and the second sequence's units being there.
  template <class Word>
  __device__ __forceinline__ auto behind(Word* units, Word* second) const {
    units += 64 * warp_ + lane_;
    second += 64 * warp_ + lane_;
    return [=](Word* last, int i) {
      return i == kPartRounds ? units : i == 2 * kPartRounds ? second : last + 64 * Base::kWarps;
    };
  }
  // A lane's words that it keeps in the filter's part, from when its warp has read the tile's points.
  __device__ __forceinline__ uint4* own_kept(int tile) const {
    return reinterpret_cast<uint4*>(memory_ + 1024 * tile) + lane_;
  }
  __device__ __forceinline__ void keep(int tile, const Tile& values) const {
    __syncwarp();
    const StoredTile own = StoredTile::of(values);
    own_kept(tile)[0] = own.x;
    own_kept(tile)[32] = own.y;
  }
  __device__ __forceinline__ StoredTile kept(int tile) const {
    const uint4* from = own_kept(tile);
    return {from[0], from[32]};
  }

  using Base::lane_;
  using Base::memory_;
  using Base::warp_;
};

#endif

// y, two sequences at a time.
template <int R>
__global__ void __launch_bounds__(kWholeThreads<R>, kWholeBlocks<R>)
    halves_kernel(const __grid_constant__ WholeCall whole) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Warp = HalvesWarp<R>;
  const Warp warp(begin_whole<R>(whole));
  const Items<Warp::kTogether> items(whole);
  const int lines = static_cast<int>(whole.call.lines);
  const auto number_of = [&](int n, int item) { return std::int64_t{n} * items.all + item; };
  const auto pair_scales = [&](int n, int item) {
    return warp.scales(whole.x, number_of(n, item), whole.x, number_of(min(n + 1, lines - 1), item));
  };
  const auto expect_pair = [&](int n, int item) {
    expect<kPartPoints<R>>(whole.x, number_of(n, item));
    if (n + 1 < lines) expect<kPartPoints<R>>(whole.x, number_of(n + 1, item));
  };
  auto next = warp.first(whole.filter, items.first);
  int item = items.first;
  for (; item < items.last; item += items.step) {
    expect_pair(0, item);
    auto scales = pair_scales(0, item);
    const float filter_scale = Warp::template common_of<true>(next.scales);
    const std::uint32_t filter_ratios = warp.ratios(next.scales, field_of(filter_scale));
    for (int n = 0; n < lines; n += 2) {
      const bool both = n + 1 < lines;
      const float scale = Warp::template common_of<false>(scales);
      uint4 *units = Warp::units_of(whole.x, number_of(n, item)),
            *second = Warp::units_of(whole.x, number_of(n + 1, item));
      warp.columns(next, n == 0, filter_ratios, both, warp.ratios(scales, field_of(scale)), units, second);
      __syncthreads();
      if (n == 0 && item >= items.step) items.finish(whole, item - items.step);
      if (n + 2 < lines) {
        expect_pair(n + 2, item);
      } else if (item + items.step < items.last) {
        expect<kPartPoints<R>>(whole.filter, item + items.step);
      }
      if (both) {
        n == 0 ? warp.template tiles<true, true>() : warp.template tiles<false, true>();
      } else {
        n == 0 ? warp.template tiles<true, false>() : warp.template tiles<false, false>();
      }
      if (n + 2 < lines) {
        scales = pair_scales(n + 2, item);
        next = warp.first(whole.x, number_of(n + 2, item), scales);
      } else if (item + items.step < items.last) {
        next = warp.first(whole.filter, item + items.step);
      }
      __syncthreads();
      warp.columns_back(both, units, second, back_scale(scale, filter_scale));
    }
  }
  __syncthreads();
  items.finish(whole, item - items.step);
#endif
}

// dx and the filter's gradient. Spectra: kPartSpectrum a block, of the filter.
template <int R>
__global__ void __launch_bounds__(kWholeThreads<R>, kWholeBlocks<R>)
    halves_gradients_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Warp = HalvesWarp<R>;
  const Warp warp(begin_whole<R>(whole));
  const Items<Warp::kTogether> items(whole);
  const bool of_dy = threadIdx.x % 32 >= 16;
  uint4* spectrum = spectra + std::int64_t{blockIdx.x} * kPartSpectrum<R>;
  const auto expect_pair = [&](std::int64_t number) {
    expect<kPartPoints<R>>(whole.gradients, number);
    expect<kPartPoints<R>>(whole.x, number);
  };
  const auto pair_scales = [&](std::int64_t number) { return warp.scales(whole.gradients, number, whole.x, number); };
  const auto first_pair = [&](std::int64_t number) { return warp.first(whole.gradients, number, pair_scales(number)); };
  int item = items.first;
  for (; item < items.last; item += items.step) {
    expect_pair(item);
    const auto filter = warp.first(whole.filter, item);
    const float filter_scale = Warp::template common_of<true>(filter.scales);
    warp.filter_columns(filter, warp.ratios(filter.scales, field_of(filter_scale)));
    for (int chunk = 0; chunk < whole.chunks; ++chunk) {
      const std::int64_t begin = std::int64_t{chunk} * kMostSummed, end = min(begin + kMostSummed, whole.call.lines);
      auto next = first_pair(begin * items.all + item);
      SummedScale summed = SummedScale::of<R>(static_cast<int>(end - begin));
#pragma unroll 4
      for (std::int64_t n = begin; n < end; ++n) {
        const float own = Warp::template common_of<false>(pair_scales(n * items.all + item));
        summed.add(own, Warp::of_other(own));
      }
      for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t number = n * items.all + item;
        const float own = Warp::template common_of<false>(next.scales), other = Warp::of_other(own);
        uint4 *dx = Warp::units_of(whole.gradients, number), *x = Warp::units_of(whole.x, number);
        warp.columns(next, true, warp.ratios(next.scales, of_dy ? field_of(own) : summed.of_x(other)), dx, x);
        StoredTile tile{};
        if (n > 0) tile = warp.first_stored(spectrum);
        __syncthreads();
        if (n == 0 && item >= items.step) items.finish(whole, item - items.step);
        if (n + 1 < end) expect_pair(number + items.all);
        if (n + 1 == end && item + items.step < items.last) expect<kPartPoints<R>>(whole.filter, item + items.step);
        const typename Warp::Step step{n == begin, n + 1 == end, whole.call.lines > 1};
        n == 0 ? warp.template gradient_tiles<true>(spectrum, tile, step)
               : warp.template gradient_tiles<false>(spectrum, tile, step);
        if (n + 1 < end) next = first_pair(number + items.all);
        __syncthreads();
        warp.columns_back(false, dx, x, back_scale(of_dy ? own : other, filter_scale));
      }
      const std::int64_t sums = std::int64_t{chunk} * items.all + item;
      warp.sums_back(Warp::units_of(whole.filter, sums));
      store_scales<R, Warp::kTogether>(whole, sums, summed);
    }
  }
  __syncthreads();
  items.finish(whole, item - items.step);
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

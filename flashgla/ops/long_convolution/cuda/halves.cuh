// Transforms of up to 16,384 points (whole_warp.cuh) of two sequences at a time, or of one's x and dy. A block's points
// of a channel lie in three parts of shared memory: the filter's, the first sequence's or dy's, the second's or x's. So
// spectra that are multiplied meet where they are made. Behind that each thread keeps in the filter's part what is its
// own of the filter's spectrum or, for gradients, of sums over sequences, of which the filter's spectrum alone waits in
// memory then.
#pragma once

#include <array>
#include <type_traits>

#include "flashgla/ops/long_convolution/cuda/whole_warp.cuh"

namespace flashgla::ops::long_convolution::cuda {

// Of a part, in uint4.
template <int R>
constexpr int kPartSpectrum = WholeShape<R>::kTiles * 64;
constexpr int kPartRounds = 2;  // of a warp
// Sequences whose scales are asked for before their channel's turn comes, as many as registers hold.
template <int R>
constexpr int kScalesAhead = R == 4 ? 2 : 4;

// To the second cache, by one thread: scales of units of kPoints tokens, but of 4,096, where blocks that wait for them
// have three beside them; and these and the units.
template <int kPoints>
__device__ __forceinline__ void expect_scales(const Units& units, std::int64_t number) {
  if constexpr (kPoints <= 4096) return;
  constexpr int kScales = kPoints / kUnitTokens, kLine = 128 / sizeof(float);
#pragma unroll
  for (int i = 0; i < kScales; i += kLine) ptx::prefetch_l2(units.scales + number * kScales + i);
}
template <int kPoints>
__device__ __forceinline__ void expect(const Units& units, std::int64_t number) {
  if (threadIdx.x == 0) {
    expect_scales<kPoints>(units, number);
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
  // A warp's quads of a part, which are asked for ahead of a barrier, and scales of all units of two sequences.
  struct First {
    float4 scales;
    uint4 words[kPartRounds][2];

    __device__ __forceinline__ void load(const uint4* from, int round) {
      words[round][0] = __ldcg(from + 64 * Base::kWarps * round);
      words[round][1] = __ldcg(from + 64 * Base::kWarps * round + 32);
    }
  };

  __device__ __forceinline__ HalvesWarp(const Base& warp, const uint4* turns) : Base(warp), turns_(turns) {}

  // A lane's place in the warp's first quad.
  __device__ __forceinline__ uint4* units_of(const Units& units, std::int64_t number) const {
    return units.data + number * (kPartSpectrum<R> / 2) + 64 * warp_ + lane_;
  }
  // Scales of units of the first sequence in the upper lanes, of the second in the lower ones.
  __device__ __forceinline__ float4 scales(const Units& units, std::int64_t number, const Units& second,
                                           std::int64_t second_number) const {
    const float* own =
        lane_ >= 16 ? units.scales + number * Base::Shape::kTiles : second.scales + second_number * Base::Shape::kTiles;
    return __ldcg(reinterpret_cast<const float4*>(own) + lane_ % (Base::Shape::kTiles / 4));
  }
  __device__ __forceinline__ First first(const Units& units, std::int64_t number, float4 scales) const {
    First result;
    result.scales = scales;
    const uint4* from = units_of(units, number);
#pragma unroll
    for (int i = 0; i < kPartRounds; ++i) result.load(from, i);
    return result;
  }
  // What brings a lane's sequence's units to one scale, and what the other's.
  struct Commons {
    float own, other;
  };
  static __device__ __forceinline__ bool has_first() { return threadIdx.x % 32 >= 16; }
  static __device__ __forceinline__ Commons commons_of(float4 scales) {
    float own = Base::largest_of(scales);
    if constexpr (R == 1) {  // of four lanes; the other way spills
#pragma unroll
      for (int apart = 2; apart > 0; apart /= 2) own = fmaxf(own, __shfl_xor_sync(0xffffffffu, own, apart));
      return {own, __shfl_xor_sync(0xffffffffu, own, 16)};
    }
    const float first = Base::largest_of_warp(has_first() ? own : 0.0f),
                second = Base::largest_of_warp(has_first() ? 0.0f : own);
    return {has_first() ? first : second, has_first() ? second : first};
  }

  // Units of parts from `begin` to `end` to columns. `next` has the first's; a later part's are at of(part), and are
  // asked for while the one before goes. ratios(part) are lanes' factors. kProducts: gives a lane's share (product_of)
  // of the sum of products of parts 1 and 2, of which next.scales are.
  template <bool kProducts, class Ratios, class Of>
  __device__ __forceinline__ float columns(First next, int begin, int end, const Ratios& ratios, const Of& of) const {
    float products = 0.0f;
    float2 both{};
    if constexpr (kProducts) {
      both = this->own_of(next.scales);
      both.x *= __shfl_xor_sync(0xffffffffu, both.x, 16);
      both.y *= __shfl_xor_sync(0xffffffffu, both.y, 16);
    }
    const auto steps = ColumnSteps::get<false>(memory_ + Memory::kColumnsAt, lane_);
    const auto turns = ColumnTurns<R>::template get<false>(memory_ + Memory::kColumnTurnsAt, warp_ % 4, lane_);
    const typename Base::Place place(warp_, lane_);
#pragma unroll 1
    for (int part = begin; part < end; ++part) {
      const std::uint32_t own = ratios(part);
      const uint4* from = of(part + 1);
#pragma unroll
      for (int i = 0; i < kPartRounds; ++i) {
        const int lane = warp_ / 2 + Base::kWarps / 2 * i + 16 * part;
        const __half2 scales = as_pair(__shfl_sync(0xffffffffu, own, lane));
        const uint4 tokens[2] = {times(next.words[i][0], __low2half2(scales)),
                                 times(next.words[i][1], __high2half2(scales))};
        const int at = place.of_round(i) + part * kPartBytes<R>;
        // Part 1's units wait where the thread's points of part 2 will be.
        if (kProducts && part == 1) {
          *Base::Place::chunk(memory_, at + kPartBytes<R>, 0) = next.words[i][0];
          *Base::Place::chunk(memory_, at + kPartBytes<R>, 1) = next.words[i][1];
        }
        if (kProducts && part == 2) {
          const uint4 before[2] = {*Base::Place::chunk(memory_, at, 0), *Base::Place::chunk(memory_, at, 1)};
          products =
              fmaf(__shfl_sync(0xffffffffu, both.x, lane), this->product_of(before[0], next.words[i][0]), products);
          products =
              fmaf(__shfl_sync(0xffffffffu, both.y, lane), this->product_of(before[1], next.words[i][1]), products);
        }
        if (part + 1 < end) next.load(from, i);
        this->put_columns(steps, turns, at, tokens);
      }
    }
    return products;
  }
  // Columns of parts back to units of results, of(part): in bf16 times the `scale` that lanes have, or kHalf.
  template <bool kHalf, class Of>
  __device__ __forceinline__ void columns_back(float scale, int begin, int end, const Of& of) const {
    const auto steps = ColumnSteps::get<true>(memory_ + Memory::kColumnsAt, lane_);
    const auto turns = ColumnTurns<R>::template get<true>(memory_ + Memory::kColumnTurnsAt, warp_ % 4, lane_);
    const typename Base::Place place(warp_, lane_);
#pragma unroll 1
    for (int part = begin; part < end; ++part) {
      uint4* to = of(part);
      const float own = kHalf ? 1.0f : __shfl_sync(0xffffffffu, scale, 16 * part);
#pragma unroll
      for (int i = 0; i < kPartRounds; ++i) {
        this->template take_columns<kHalf>(steps, turns, place.of_round(i) + part * kPartBytes<R>, own,
                                           to + 64 * Base::kWarps * i);
      }
    }
  }

  // Of tiles, read ahead of the barrier that they come behind.
  struct TileConstants {
    TileSteps steps, back, less;  // less: of spectra times 2^-12
    TileTurns first;              // of a warp's first tile
  };
  __device__ __forceinline__ TileConstants tile_constants() const {
    const auto step = [&](int i) {
      return get<TileSteps, true>(memory_ + Memory::kStepsAt + i * kLanesBytes<TileSteps>, lane_);
    };
    return {step(0), step(1), step(2), turns_of(warp_)};
  }

  // Tiles of one sequence or kBoth go back times the filter's, whose spectrum is made where kFirst and kept.
  template <bool kFirst, bool kBoth>
  __device__ __forceinline__ void tiles(const TileConstants& all) const {
    TileTurns along = all.first;
#pragma unroll 1
    for (int i = 0; i < Base::Shape::kTiles / Base::kWarps; ++i) {
      const int tile = warp_ + Base::kWarps * i;
      unsigned char *own = this->chunks_of(tile), *chunks = own + kPartBytes<R>;
      Tile filter, first, second;
      make_tile(all.steps, all.steps, along, chunks, first);
      if constexpr (kBoth) make_tile(all.steps, all.steps, along, chunks + kPartBytes<R>, second);
      if constexpr (kFirst) {
        make_tile(all.steps, all.less, along, own, filter);
        keep(tile, filter);
      } else {
        kept(tile).with(filter, [](Words& to, Words from) { to = from; });
      }
      const TileTurns down = along.transposed();
      if (i + 1 < Base::Shape::kTiles / Base::kWarps) along = turns_of(tile + Base::kWarps);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        first[k / 2][k % 2].template turn<false>(filter[k / 2][k % 2]);
        if constexpr (kBoth) second[k / 2][k % 2].template turn<false>(filter[k / 2][k % 2]);
      }
      take_tile(all.back, down, first, chunks);
      if constexpr (kBoth) take_tile(all.back, down, second, chunks + kPartBytes<R>);
    }
  }

  // Tiles of dy go back times the filter's conjugate, and those of x, times 2^-12, times dy's conjugate are summed. Of
  // a chunk's first sequence (begin) the product begins the sums, with its last (kEnd) they go back in x's place. Of
  // the very first (kFirst) the filter's spectrum is made, and stored where there are `more`.
  template <bool kFirst, bool kEnd>
  __device__ __forceinline__ void gradient_tiles(const TileConstants& all, uint4* filter, StoredTile next, bool begin,
                                                 bool more) const {
    filter += warp_ * 64 + lane_;
    TileTurns along = all.first;
#pragma unroll 1
    for (int i = 0; i < Base::Shape::kTiles / Base::kWarps; ++i) {
      const int tile = warp_ + Base::kWarps * i;
      unsigned char *own = this->chunks_of(tile), *chunks = own + kPartBytes<R>;
      Tile dy, x;
      make_tile(all.steps, all.steps, along, chunks, dy);
      make_tile(all.steps, all.less, along, chunks + kPartBytes<R>, x);
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k / 2][k % 2].template turn<true, true>(dy[k / 2][k % 2]);
      TileTurns down;  // made where it costs the fewest registers: behind both branches ptxas spills
      if constexpr (kFirst) {
        Tile made;
        make_tile(all.steps, all.less, along, own, made);
        if (more) StoredTile::of(made).store(filter);
#pragma unroll
        for (int k = 0; k < 4; ++k) dy[k / 2][k % 2].template turn<true>(made[k / 2][k % 2]);
        down = along.transposed();
      } else {
        if (!begin) kept(tile).with(x, Plus());
        down = along.transposed();
        TimesConjugate()(dy, next, 0);
        if (i + 1 < Base::Shape::kTiles / Base::kWarps) next.load(filter + 64 * Base::kWarps);
      }
      if (i + 1 < Base::Shape::kTiles / Base::kWarps) along = turns_of(tile + Base::kWarps);
      filter += 64 * Base::kWarps;
      if constexpr (kEnd) {
        take_tile(all.back, down, x, chunks + kPartBytes<R>);
      } else {
        keep(tile, x);
      }
      take_tile(all.back, down, dy, chunks);
    }
  }

 private:
  __device__ __forceinline__ TileTurns turns_of(int tile) const { return TileTurns::get(turns_, tile, lane_); }
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

  const uint4* turns_;
};

#endif

// y, two sequences at a time.
template <int R>
__global__ void __launch_bounds__(kWholeThreads<R>, kWholeBlocks<R>)
    halves_kernel(const __grid_constant__ WholeCall whole) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Warp = HalvesWarp<R>;
  const Warp warp(begin_whole<R>(), whole.turns);
  const Items items(whole);
  const int lines = static_cast<int>(whole.call.lines);
  const auto number_of = [&](int n, int item) { return std::int64_t{n} * items.all + item; };
  const auto pair_scales = [&](int n, int item) {
    return warp.scales(whole.x, number_of(n, item), whole.x, number_of(min(n + 1, lines - 1), item));
  };
  const auto filter_scales = [&](int item) { return warp.scales(whole.filter, item, whole.filter, item); };
  const auto expect_pair = [&](int n, int item) {
    expect<WholeShape<R>::kPoints>(whole.x, number_of(n, item));
    if (n + 1 < lines) expect<WholeShape<R>::kPoints>(whole.x, number_of(n + 1, item));
  };
  int item = items.first;
  auto of_filter = filter_scales(item);
  auto next = warp.first(whole.filter, item, pair_scales(0, item));
  for (; item < items.last; item += items.step) {
    expect_pair(0, item);
    const float filter_scale = Warp::template common_of<true>(of_filter);
    const std::uint32_t filter_ratios = warp.ratios(of_filter, field_of(filter_scale));
    for (int n = 0; n < lines; n += 2) {
      const int parts = n + 1 < lines ? 3 : 2;
      const float scale = Warp::commons_of(next.scales).own;
      const std::uint32_t ratios = warp.ratios(next.scales, field_of(scale));
      const auto of = [&](const Units& units) {
        return [&](int part) { return warp.units_of(units, number_of(part == 1 ? n : n + 1, item)); };
      };
      warp.template columns<false>(
          next, n == 0 ? 0 : 1, parts, [&](int part) { return part == 0 ? filter_ratios : ratios; }, of(whole.x));
      const auto constants = warp.tile_constants();
      __syncthreads();
      if (n == 0 && item >= items.step) items.finish(whole, item - items.step);
      const bool more = n + 2 < lines, last = !more && item + items.step >= items.last;
      if (more) {
        expect_pair(n + 2, item);
      } else if (!last) {
        expect<WholeShape<R>::kPoints>(whole.filter, item + items.step);
      }
      if (parts == 3) {
        n == 0 ? warp.template tiles<true, true>(constants) : warp.template tiles<false, true>(constants);
      } else {
        n == 0 ? warp.template tiles<true, false>(constants) : warp.template tiles<false, false>(constants);
      }
      const int next_item = more || last ? item : item + items.step, next_line = more ? n + 2 : 0;
      next = warp.first(more ? whole.x : whole.filter, more ? number_of(n + 2, item) : next_item,
                        pair_scales(next_line, next_item));
      of_filter = filter_scales(next_item);
      __syncthreads();
      warp.template columns_back<false>(back_scale(scale, filter_scale), 1, parts, of(whole.results));
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
  const Warp warp(begin_whole<R>(), whole.turns);
  const Items items(whole);
  uint4* spectrum = spectra + std::int64_t{blockIdx.x} * kPartSpectrum<R>;
  const auto expect_pair = [&](std::int64_t number) {
    expect<WholeShape<R>::kPoints>(whole.gradients, number);
    expect<WholeShape<R>::kPoints>(whole.x, number);
  };
  const auto pair_scales = [&](std::int64_t number) { return warp.scales(whole.gradients, number, whole.x, number); };
  const auto filter_scales = [&](int item) { return warp.scales(whole.filter, item, whole.filter, item); };
  // Scales of an item's first sequences; of the last more than once where they are fewer.
  const int last_line = static_cast<int>(whole.call.lines) - 1;
  const auto first_scales = [&](int item) {
    std::array<float4, kScalesAhead<R>> result;
#pragma unroll
    for (int i = 0; i < kScalesAhead<R>; ++i) {
      result[i] = pair_scales(std::int64_t{min(i, last_line)} * items.all + item);
    }
    return result;
  };
  const auto expect_first_scales = [&](int item) {
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int i = 0; i < kScalesAhead<R>; ++i) {
      const std::int64_t number = std::int64_t{min(i, last_line)} * items.all + item;
      expect_scales<WholeShape<R>::kPoints>(whole.gradients, number);
      expect_scales<WholeShape<R>::kPoints>(whole.x, number);
    }
  };
  int item = items.first;
  auto of_filter = filter_scales(item);
  auto ahead = first_scales(item);
  auto next = warp.first(whole.filter, item, ahead[0]);
  for (; item < items.last; item += items.step) {
    expect_pair(item);
    const float filter_scale = Warp::template common_of<true>(of_filter);
    const std::uint32_t filter_ratios = warp.ratios(of_filter, field_of(filter_scale));
    next.scales = ahead[0];
    float products = 0.0f;
    const int next_item = item + items.step < items.last ? item + items.step : item;
    for (int chunk = 0; chunk < whole.chunks; ++chunk) {
      const std::int64_t begin = std::int64_t{chunk} * kMostSummed, end = min(begin + kMostSummed, whole.call.lines);
      SummedScale summed = SummedScale::of<R>(static_cast<int>(end - begin));
      const auto add = [&](float4 scales) {
        const auto both = Warp::commons_of(scales);
        summed.add(both.own, both.other);
      };
      if (chunk == 0) {
#pragma unroll
        for (const float4& scales : ahead) add(scales);
      }
#pragma unroll 4
      for (std::int64_t n = begin + (chunk == 0 ? kScalesAhead<R> : 0); n < end; ++n) {
        add(pair_scales(n * items.all + item));
      }
      for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t number = n * items.all + item;
        const auto common = Warp::commons_of(next.scales);
        const std::uint32_t ratios =
            warp.ratios(next.scales, Warp::has_first() ? field_of(common.own) : summed.of_x(common.other));
        uint4 *dx = warp.units_of(whole.gradients, number), *x = warp.units_of(whole.x, number);
        products += warp.template columns<true>(
            next, n == 0 ? 0 : 1, 3, [&](int part) { return part == 0 ? filter_ratios : ratios; },
            [&](int part) { return part == 1 ? dx : x; });
        StoredTile tile{};
        if (n > 0) tile = warp.first_stored(spectrum);
        const auto constants = warp.tile_constants();
        __syncthreads();
        if (n == 0 && item >= items.step) items.finish(whole, item - items.step);
        const bool more = n + 1 < end;
        if (more) {
          expect_pair(number + items.all);
        } else {
          expect<WholeShape<R>::kPoints>(whole.filter, next_item);
          expect_first_scales(next_item);
        }
        const auto tiles = [&](auto first, auto last) {
          warp.template gradient_tiles<first.value, last.value>(constants, spectrum, tile, n == begin,
                                                                whole.call.lines > 1);
        };
        if (n == 0) {
          more ? tiles(std::true_type(), std::false_type()) : tiles(std::true_type(), std::true_type());
        } else {
          more ? tiles(std::false_type(), std::false_type()) : tiles(std::false_type(), std::true_type());
        }
        const bool again = n + 1 < whole.call.lines;
        next = warp.first(again ? whole.gradients : whole.filter, again ? number + items.all : next_item,
                          pair_scales(again ? number + items.all : number));
        __syncthreads();
        warp.template columns_back<false>(back_scale(Warp::has_first() ? common.own : common.other, filter_scale), 1, 2,
                                          [&](int /*part*/) { return dx; });
      }
      // Sums of products are where x was.
      const std::int64_t sums = std::int64_t{chunk} * items.all + item;
      store_scales<R>(whole, sums, summed);
      of_filter = filter_scales(next_item);
      ahead = first_scales(next_item);
      warp.template columns_back<true>(1.0f, 2, 3, [&](int /*part*/) { return warp.units_of(whole.sums, sums); });
    }
    warp.store_products(whole, item, products);
  }
  __syncthreads();
  items.finish(whole, item - items.step);
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

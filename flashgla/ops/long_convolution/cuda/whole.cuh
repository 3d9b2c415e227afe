// Long sequences of bf16, outputs or gradients, each transformed as a whole (matrices.cuh). Rows come as units
// (units.cuh) and leave as such, so that a block has 32,768 points of one channel or a few in shared memory: the
// filter's columns and tiles, whose spectrum waits in memory for the block's own threads, then a sequence's columns,
// its tiles with the product between them and back, and columns back, whose results take the units' place. Gradients:
// so for dy and dx, whereby dy's spectrum waits as well, then for x and, summed over sequences, the filter's gradient.
#pragma once

#include "flashgla/ops/long_convolution/cuda/units.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kWholeThreads = 512, kWholeWarps = kWholeThreads / 32;
constexpr int kWholeSpectrum = kWholeTiles * 64;  // of a block, in uint4
constexpr int kMostUp = 7;                        // tokens, which come below 2^-4, are scaled up by 2^this at most

__device__ __forceinline__ int field_of(float scale) { return static_cast<int>(Scale::field_of(scale)); }

// Shared memory.
template <int R>
struct WholeMemory {
  static constexpr int kAlongAt = 4 * kWholePoints;                                 // turns by s2, uint4 [tile][4]
  static constexpr int kDownAt = kAlongAt + WholeShape<R>::kTiles * 4 * 16;         // [tile][16], a word each
  static constexpr int kColumnsAt = kDownAt + WholeShape<R>::kTiles * 16 * 4;       // forward, back
  static constexpr int kColumnTurnsAt = kColumnsAt + 2 * kLanesBytes<ColumnSteps>;  // [4] forward, back
  static constexpr int kStepsAt = kColumnTurnsAt + 8 * kLanesBytes<ColumnTurns>;    // forward, back, of filters
  static constexpr int kBetweenAt = kStepsAt + 3 * kLanesBytes<TileSteps>;          // forward, back
  static constexpr int kBytes = kBetweenAt + 2 * kLanesBytes<TileTurns>;

  // All of the block must come here, and meet before they use it.
  static __device__ void fill(unsigned char* memory, int lane, int warp) {
    const int row = lane / 4, pair = lane % 4;
    constexpr float kPoints = static_cast<float>(WholeShape<R>::kPoints);
    const auto turns = [](int tile, int s2) {
      return (static_cast<float>(tile) - 0.25f) * static_cast<float>(s2) / kPoints;
    };
    for (int item = static_cast<int>(threadIdx.x); item < WholeShape<R>::kTiles * 4; item += kWholeThreads) {
      const auto of = [&](int half) {
        return words_of(1.0f, [&](int j) { return turns(item / 4, 2 * (item % 4) + 8 * half + j); });
      };
      const Words low = of(0), high = of(1);
      reinterpret_cast<uint4*>(memory + kAlongAt)[item] = make_uint4(low.x, low.y, high.x, high.y);
    }
    for (int item = static_cast<int>(threadIdx.x); item < WholeShape<R>::kTiles * 16; item += kWholeThreads) {
      const float2 turn = circle(turns(item / 16, item % 16));
      reinterpret_cast<std::uint32_t*>(memory + kDownAt)[item] = pack({turn.x, -turn.y});
    }
    unsigned char* turns_at = memory + kColumnTurnsAt + warp * kLanesBytes<ColumnTurns>;
    if (warp < 4) put(turns_at, lane, ColumnTurns::of<R, false>(row, pair, warp));
    if (warp >= 4 && warp < 8) put(turns_at, lane, ColumnTurns::of<R, true>(row, pair, warp - 4));
    if (warp == 8) put(memory + kColumnsAt, lane, ColumnSteps::of<false>(row, pair));
    if (warp == 9) put(memory + kColumnsAt + kLanesBytes<ColumnSteps>, lane, ColumnSteps::of<true>(row, pair));
    if (warp == 10) put(memory + kStepsAt, lane, TileSteps::of<false>(row, pair, 1.0f));
    if (warp == 11) put(memory + kStepsAt + kLanesBytes<TileSteps>, lane, TileSteps::of<true>(row, pair, 1.0f));
    // A filter's spectrum comes below 2^-4.
    constexpr float kFilter = 1.0f / 4096;
    if (warp == 12) put(memory + kStepsAt + 2 * kLanesBytes<TileSteps>, lane, TileSteps::of<false>(row, pair, kFilter));
    if (warp == 13) put(memory + kBetweenAt, lane, TileTurns::of<false>(row, pair));
    if (warp == 14) put(memory + kBetweenAt + kLanesBytes<TileTurns>, lane, TileTurns::of<true>(row, pair));
  }
};

// A tile's spectrum in memory: a lane's words and those half a tile behind, as uint4.
__device__ __forceinline__ void store_spectrum(uint4* to, const Tile& tile) {
  __stcg(to, make_uint4(tile[0][0].x, tile[0][1].x, tile[1][0].x, tile[1][1].x));
  __stcg(to + 32, make_uint4(tile[0][0].y, tile[0][1].y, tile[1][0].y, tile[1][1].y));
}
struct StoredTile {
  uint4 x, y;

  __device__ __forceinline__ void load(const uint4* from) { x = __ldcg(from), y = __ldcg(from + 32); }
  // Calls take(tile's, the stored one's) words.
  template <class Take>
  __device__ __forceinline__ void with(Tile& tile, const Take& take) const {
    take(tile[0][0], Words{x.x, y.x});
    take(tile[0][1], Words{x.y, y.y});
    take(tile[1][0], Words{x.z, y.z});
    take(tile[1][1], Words{x.w, y.w});
  }
};

// Own spectra times those `by`, the latter's conjugates, or the former's.
struct Times {
  __device__ __forceinline__ void operator()(Tile& own, const StoredTile& by, int /*at*/) const {
    by.with(own, [](Words& a, const Words& b) { a.turn<false>(b); });
  }
};
struct TimesConjugate {
  __device__ __forceinline__ void operator()(Tile& own, const StoredTile& by, int /*at*/) const {
    by.with(own, [](Words& a, const Words& b) { a.turn<true>(b); });
  }
};
struct ConjugateTimes {
  __device__ __forceinline__ void operator()(Tile& own, const StoredTile& by, int /*at*/) const {
    by.with(own, [](Words& a, const Words& b) { a.turn<true, true>(b); });
  }
};
struct Plus {
  __device__ __forceinline__ void operator()(Words& a, const Words& b) const { a = sum(a, b); }
};

// What a warp of a block does: of each four quads one (p), of each sixteen tiles one.
template <int R>
class WholeWarp {
 public:
  using Shape = WholeShape<R>;
  using Memory = WholeMemory<R>;

  __device__ __forceinline__ explicit WholeWarp(unsigned char* memory)
      : memory_(memory), lane_(static_cast<int>(threadIdx.x) % 32), warp_(static_cast<int>(threadIdx.x) / 32) {}

  // A warp's first quad of a block's units, and scales, four in a lane. It is asked for ahead of a barrier.
  struct First {
    const uint4* at;
    uint4 words[2];
    float4 scales;

    // What brings a channel's units to one scale, in its lanes: the largest, or more than the sum.
    template <bool kFilter>
    __device__ __forceinline__ float common() const {
      const auto combine = [](float a, float b) { return kFilter ? a + b : fmaxf(a, b); };
      float own = combine(combine(scales.x, scales.y), combine(scales.z, scales.w));
#pragma unroll
      for (int apart = 2 * R; apart > 0; apart /= 2) own = combine(own, __shfl_xor_sync(0xffffffffu, own, apart));
      return kFilter ? __uint_as_float((__float_as_uint(own) + 0x7fffffu) & 0x7f800000u) : own;
    }
  };
  // Of the channels of a line that a block has, by number.
  __device__ __forceinline__ First first(const Units& units, std::int64_t number) const {
    First result;
    result.at = units.data + number * kWholeSpectrum / 2 + 64 * warp_ + lane_;
    result.words[0] = __ldcg(result.at);
    result.words[1] = __ldcg(result.at + 32);
    result.scales = scales(units, number);
    return result;
  }
  __device__ __forceinline__ float4 scales(const Units& units, std::int64_t number) const {
    return __ldcg(reinterpret_cast<const float4*>(units.scales + number * kWholeTiles) + lane_);
  }

  // Units to columns, by factors that bring them to a channel's exponent field `common`, at most 2^kMostUp.
  __device__ __forceinline__ void columns(First next, int common) const {
    const auto steps = get<ColumnSteps>(memory_ + Memory::kColumnsAt, lane_);
    const ColumnTurns turns = column_turns(0);
    const float2 own =
        warp_ % 2 == 0 ? make_float2(next.scales.x, next.scales.y) : make_float2(next.scales.z, next.scales.w);
#pragma unroll 1
    for (int i = 0; i < kWholeQuads / kWholeWarps; ++i) {
      const int quad = warp_ + kWholeWarps * i;
      const uint4 tokens[2] = {next.words[0], next.words[1]};
      next.at += 64 * kWholeWarps;
      if (i + 1 < kWholeQuads / kWholeWarps) next.words[0] = __ldcg(next.at), next.words[1] = __ldcg(next.at + 32);
      const int all = of_quad(common, quad);
      const __half2 scale[2] = {ratio(__shfl_sync(0xffffffffu, own.x, quad / 2), all),
                                ratio(__shfl_sync(0xffffffffu, own.y, quad / 2), all)};
      uint4 chunks[4];
      make_columns(steps, turns, tokens, scale, chunks);
      const Place place(quad, lane_);
#pragma unroll
      for (int i = 0; i < 4; ++i) *place.chunk(memory_, i) = chunks[i];
    }
  }

  // Columns back to units of results: in bf16 times a channel's `scale`, or kHalf.
  template <bool kHalf>
  __device__ __forceinline__ void columns_back(const Units& units, std::int64_t number, float scale) const {
    const auto steps = get<ColumnSteps>(memory_ + Memory::kColumnsAt + kLanesBytes<ColumnSteps>, lane_);
    const ColumnTurns turns = column_turns(4);
    uint4* to = units.data + number * kWholeSpectrum / 2 + 64 * warp_ + lane_;
#pragma unroll 1
    for (int i = 0; i < kWholeQuads / kWholeWarps; ++i) {
      const int quad = warp_ + kWholeWarps * i;
      const Place place(quad, lane_);
      uint4 chunks[4], out[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) chunks[i] = *place.chunk(memory_, i);
      take_columns<kHalf>(steps, turns, chunks, kHalf ? 1.0f : of_quad(scale, quad), out);
      to[0] = out[0];
      to[32] = out[1];
      to += 64 * kWholeWarps;
    }
  }

  // Tiles to their spectrum, times 2^-12 where kLess, in memory.
  template <bool kLess>
  __device__ __forceinline__ void tiles_to(uint4* to) const {
    const auto steps = get<TileSteps>(memory_ + Memory::kStepsAt, lane_),
               right = get<TileSteps>(memory_ + Memory::kStepsAt + (kLess ? 2 * kLanesBytes<TileSteps> : 0), lane_);
    const auto between = get<TileTurns>(memory_ + Memory::kBetweenAt, lane_);
    to += warp_ * 64 + lane_;
#pragma unroll 1
    for (int i = 0; i < kWholeTiles / kWholeWarps; ++i) {
      const int tile = warp_ + kWholeWarps * i;
      Tile own;
      make_tile(steps, right, between, chunks_of(tile), turns_along(tile), own);
      store_spectrum(to, own);
      to += 64 * kWholeWarps;
    }
  }

  // A warp's first tile's spectrum in memory, asked for ahead of a barrier.
  __device__ __forceinline__ StoredTile first_stored(const uint4* from) const {
    StoredTile result;
    result.load(from + warp_ * 64 + lane_);
    return result;
  }
  // Tiles' spectra, times 2^-12 where kLess, change by change(own, the same tile's of `by`, its place) and go back.
  template <bool kLess, class Change>
  __device__ __forceinline__ void tiles(const uint4* by, StoredTile next, const Change& change) const {
    const auto steps = get<TileSteps>(memory_ + Memory::kStepsAt, lane_),
               right = get<TileSteps>(memory_ + Memory::kStepsAt + (kLess ? 2 * kLanesBytes<TileSteps> : 0), lane_),
               steps_back = get<TileSteps>(memory_ + Memory::kStepsAt + kLanesBytes<TileSteps>, lane_);
    const auto between = get<TileTurns>(memory_ + Memory::kBetweenAt, lane_),
               between_back = get<TileTurns>(memory_ + Memory::kBetweenAt + kLanesBytes<TileTurns>, lane_);
    int at = warp_ * 64 + lane_;
#pragma unroll 1
    for (int i = 0; i < kWholeTiles / kWholeWarps; ++i) {
      const int tile = warp_ + kWholeWarps * i;
      Tile own;
      unsigned char* chunks = chunks_of(tile);
      make_tile(steps, right, between, chunks, turns_along(tile), own);
      change(own, next, at);
      at += 64 * kWholeWarps;
      if (i + 1 < kWholeTiles / kWholeWarps) next.load(by + at);
      const auto* down =
          reinterpret_cast<const std::uint32_t*>(memory_ + Memory::kDownAt) + tile % Shape::kTiles * 16 + lane_ / 4;
      const auto twice = [](std::uint32_t turn) {
        return Words{__byte_perm(turn, turn, 0x1010), __byte_perm(turn, turn, 0x3232)};
      };
      const Words turns[2] = {twice(down[0]), twice(down[8])};
      take_tile(steps_back, between_back, own, turns, chunks);
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
    for (int i = 0; i < kWholeTiles / kWholeWarps; ++i) {
      const int tile = warp_ + kWholeWarps * i;
      StoredTile before;
      if constexpr (!kFirst) before.load(sums + at);
      Tile own;
      make_tile(steps, right, between, chunks_of(tile), turns_along(tile), own);
      change(own, next, at);
      if constexpr (!kFirst) before.with(own, Plus());
      store_spectrum(sums + at, own);
      at += 64 * kWholeWarps;
      if (i + 1 < kWholeTiles / kWholeWarps) next.load(by + at);
    }
  }

 private:
  // Where a lane's four points of a quad lie.
  struct Place {
    int at, other;  // of points 0 and 1

    __device__ __forceinline__ Place(int quad, int lane) {
      const int row = lane / 4, column = 2 * (lane % 4), member = quad / Shape::kQuads, own = quad % Shape::kQuads;
      const auto of = [&](int column) {
        const int tile = row + 16 * (column % R), chunk = (own / 4 * Shape::kTogether + column / R) * 4 + own % 4;
        return (member * Shape::kTiles + tile) * 1024 + Shape::placed(chunk, tile) * 16;
      };
      at = of(column);
      other = R == 1 ? at ^ 64 : at + 16 * 1024;
    }
    __device__ __forceinline__ uint4* chunk(unsigned char* memory, int point) const {
      return reinterpret_cast<uint4*>(memory + (point % 2 == 0 ? at : other) + point / 2 * 8 * 1024);
    }
  };

  __device__ __forceinline__ ColumnTurns column_turns(int first) const {
    return get<ColumnTurns>(memory_ + Memory::kColumnTurnsAt + (first + warp_ % 4) * kLanesBytes<ColumnTurns>, lane_);
  }
  // Of a quad's channel.
  template <class V>
  static __device__ __forceinline__ V of_quad(V value, int quad) {
    return Shape::kTogether == 1 ? value : __shfl_sync(0xffffffffu, value, quad / Shape::kQuads * (4 * R));
  }
  // Of a power of two and one of an exponent field, twice. Where the first is 0 so are the numbers that it is for.
  static __device__ __forceinline__ __half2 ratio(float a, int field) {
    const int own = 127 + static_cast<int>(Scale::field_of(a)) - field;
    return __float2half2_rn(__uint_as_float(static_cast<std::uint32_t>(min(max(own, 0), 127 + kMostUp)) << 23));
  }
  __device__ __forceinline__ unsigned char* chunks_of(int tile) const {
    return memory_ + 1024 * tile + Shape::placed(lane_, tile % Shape::kTiles) * 16;
  }
  __device__ __forceinline__ uint4 turns_along(int tile) const {
    return reinterpret_cast<const uint4*>(memory_ + Memory::kAlongAt)[tile % Shape::kTiles * 4 + lane_ % 4];
  }

  unsigned char* memory_;
  int lane_, warp_;
};

// Units to the second cache, by one thread.
__device__ __forceinline__ void expect(const Units& units, std::int64_t number) {
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(units.data + number * kWholeSpectrum / 2),
                 "n"(2 * kWholePoints)
                 : "memory");
  }
}

// What blocks do in turns: items, each of as many neighbouring channels as a block has. Item i of line n is number
// n all + i.
template <int R>
struct Items {
  int all, step, first, last;

  __device__ __forceinline__ explicit Items(const WholeCall& whole)
      : all(static_cast<int>(whole.x.channels) / WholeShape<R>::kTogether),
        step(static_cast<int>(gridDim.x)),
        first(static_cast<int>(blockIdx.x)),
        last((static_cast<int>(whole.call.channels) - 1) / WholeShape<R>::kTogether + 1) {}
};

// What kernels of whole transforms begin with: shared memory's constants. All of the block must come here.
template <int R>
__device__ __forceinline__ WholeWarp<R> begin_whole() {
  extern __shared__ __align__(128) unsigned char memory[];
  WholeMemory<R>::fill(memory, static_cast<int>(threadIdx.x) % 32, static_cast<int>(threadIdx.x) / 32);
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next();
  __syncthreads();
  return WholeWarp<R>(memory);
}

// What takes results back. A filter's numbers are 2^8 / its scale times it, their spectrum 2^-12 of theirs, and what
// comes back 2^12 times as much.
__device__ __forceinline__ float back_scale(float tokens, float filter) { return tokens * filter * (1.0f / 256.0f); }

// y. Spectra: kWholeSpectrum a block.
template <int R>
__global__ void __launch_bounds__(kWholeThreads, 1)
    whole_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const WholeWarp<R> warp = begin_whole<R>();
  const Items<R> items(whole);
  uint4* filter = spectra + std::int64_t{blockIdx.x} * kWholeSpectrum;
  auto next = warp.first(whole.filter, items.first);
  for (int item = items.first; item < items.last; item += items.step) {
    expect(whole.x, item);
    const float filter_scale = next.template common<true>();
    warp.columns(next, field_of(filter_scale));
    __syncthreads();
    next = warp.first(whole.x, item);
    warp.template tiles_to<true>(filter);
    for (std::int64_t n = 0; n < whole.call.lines; ++n) {
      const bool last = n + 1 == whole.call.lines;
      const std::int64_t number = n * items.all + item;
      const float scale = next.template common<false>();
      __syncthreads();
      warp.columns(next, field_of(scale));
      const StoredTile tile = warp.first_stored(filter);
      __syncthreads();
      if (!last) expect(whole.x, number + items.all);
      if (last && item + items.step < items.last) expect(whole.filter, item + items.step);
      warp.template tiles<false>(filter, tile, Times());
      if (!last) next = warp.first(whole.x, number + items.all);
      if (last && item + items.step < items.last) next = warp.first(whole.filter, item + items.step);
      __syncthreads();
      warp.template columns_back<false>(whole.x, number, back_scale(scale, filter_scale));
    }
  }
#endif
}

// What x's numbers of a sequence are scaled by, so that products with dy's of a chunk's sequences can be summed.
struct SummedScale {
  int all = 0, up;  // exponent fields' sum, the largest of the chunk; what is left of f16's range

  // Of N points' spectra, of tokens below 2^-4, products are below N^2 2^-8, and so are by Cauchy and Schwarz sums over
  // any frequencies. They are to stay below 2^15 when x's are 2^-12 of it, and x's own spectrum before that as well.
  template <int R>
  static __device__ __forceinline__ SummedScale of(int sequences) {
    constexpr int kLog = R == 8 ? 3 : R == 4 ? 2 : R == 2 ? 1 : 0;
    return {0, min(kMostUp - kLog, 11 - 2 * kLog - (32 - __clz(sequences - 1)))};
  }
  __device__ __forceinline__ void add(float x, float dy) {
    if (field_of(x) > 0 && field_of(dy) > 0) all = max(all, field_of(x) + field_of(dy));
  }
  // Of a sequence with this scale of dy; where that is 0 x's numbers become zeros.
  __device__ __forceinline__ int of_x(float dy) const { return field_of(dy) == 0 ? 1 << 10 : all - field_of(dy) - up; }
  // What takes sums to what they are of.
  __device__ __forceinline__ float back() const { return all == 0 ? 0.0f : scalbnf(1.0f, all - up - 254); }
};

// The filter's gradient of chunk and item `number`, columns back and scale.
template <int R>
__device__ __forceinline__ void sums_back(const WholeWarp<R>& warp, const WholeCall& whole, std::int64_t number,
                                          const SummedScale& summed) {
  warp.template columns_back<true>(whole.filter, number, 1.0f);
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < 32 && lane % (4 * R) == 0) {
    whole.filter.scales[number * kWholeTiles + lane / (4 * R) * WholeShape<R>::kTiles] = summed.back();
  }
}

// dx and the filter's gradient of one sequence. Spectra: kWholeSpectrum a block, of dy.
template <int R>
__global__ void __launch_bounds__(kWholeThreads, 1)
    whole_gradient_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const WholeWarp<R> warp = begin_whole<R>();
  const Items<R> items(whole);
  uint4* gradients = spectra + std::int64_t{blockIdx.x} * kWholeSpectrum;
  auto next = warp.first(whole.gradients, items.first);
  for (int item = items.first; item < items.last; item += items.step) {
    expect(whole.filter, item);
    const float scale = next.template common<false>();
    warp.columns(next, field_of(scale));
    __syncthreads();
    next = warp.first(whole.filter, item);
    warp.template tiles_to<false>(gradients);
    const float filter_scale = next.template common<true>();
    __syncthreads();
    warp.columns(next, field_of(filter_scale));
    StoredTile tile = warp.first_stored(gradients);
    __syncthreads();
    expect(whole.x, item);
    warp.template tiles<true>(gradients, tile, ConjugateTimes());
    next = warp.first(whole.x, item);
    __syncthreads();
    warp.template columns_back<false>(whole.gradients, item, back_scale(scale, filter_scale));
    SummedScale summed = SummedScale::of<R>(1);
    summed.add(next.template common<false>(), scale);
    warp.columns(next, summed.of_x(scale));
    tile = warp.first_stored(gradients);
    __syncthreads();
    if (item + items.step < items.last) expect(whole.gradients, item + items.step);
    warp.template tiles<true>(gradients, tile, ConjugateTimes());
    if (item + items.step < items.last) next = warp.first(whole.gradients, item + items.step);
    __syncthreads();
    sums_back(warp, whole, item, summed);
  }
#endif
}

// Of several sequences. Spectra: 3 kWholeSpectrum a block, of the filter, of dy and of sums.
template <int R>
__global__ void __launch_bounds__(kWholeThreads, 1)
    whole_gradients_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const WholeWarp<R> warp = begin_whole<R>();
  const Items<R> items(whole);
  uint4 *filter = spectra + std::int64_t{blockIdx.x} * 3 * kWholeSpectrum, *gradients = filter + kWholeSpectrum,
        *sums = gradients + kWholeSpectrum;
  for (int item = items.first; item < items.last; item += items.step) {
    expect(whole.gradients, item);
    auto next = warp.first(whole.filter, item);
    const float filter_scale = next.template common<true>();
    warp.columns(next, field_of(filter_scale));
    __syncthreads();
    warp.template tiles_to<true>(filter);
    for (int chunk = 0; chunk < whole.chunks; ++chunk) {
      const std::int64_t begin = std::int64_t{chunk} * kMostSummed, end = min(begin + kMostSummed, whole.call.lines);
      SummedScale summed = SummedScale::of<R>(static_cast<int>(end - begin));
      typename WholeWarp<R>::First scales;
#pragma unroll 4
      for (std::int64_t n = begin; n < end; ++n) {
        scales.scales = warp.scales(whole.x, n * items.all + item);
        const float x = scales.template common<false>();
        scales.scales = warp.scales(whole.gradients, n * items.all + item);
        summed.add(x, scales.template common<false>());
      }
      next = warp.first(whole.gradients, begin * items.all + item);
      for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t number = n * items.all + item;
        const float scale = next.template common<false>();
        __syncthreads();
        warp.columns(next, field_of(scale));
        StoredTile tile = warp.first_stored(filter);
        __syncthreads();
        expect(whole.x, number);
        warp.template tiles<false>(filter, tile, [&](Tile& own, const StoredTile& by, int at) {
          store_spectrum(gradients + at, own);
          TimesConjugate()(own, by, at);
        });
        next = warp.first(whole.x, number);
        __syncthreads();
        warp.template columns_back<false>(whole.gradients, number, back_scale(scale, filter_scale));
        warp.columns(next, summed.of_x(scale));
        tile = warp.first_stored(gradients);
        __syncthreads();
        if (n + 1 < end) {
          expect(whole.gradients, number + items.all);
          n == begin ? warp.template tiles_added<true>(sums, gradients, tile, ConjugateTimes())
                     : warp.template tiles_added<false>(sums, gradients, tile, ConjugateTimes());
          next = warp.first(whole.gradients, number + items.all);
        } else {
          if (item + items.step < items.last) expect(whole.filter, item + items.step);
          warp.template tiles<true>(gradients, tile, [&](Tile& own, const StoredTile& by, int at) {
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
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

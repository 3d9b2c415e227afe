// What kernels of whole transforms share: a block's shared memory, what its warps do with it, and scales. A sequence's
// units (units.cuh) become columns and tiles (matrices.cuh), and go back.
#pragma once

#include "flashgla/ops/long_convolution/cuda/unit_rows.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kWholeSpectrum = kWholeTiles * 64;  // of 32,768 points, in uint4
// Of one of the three parts that a block of up to 16,384 points has (halves.cuh).
template <int R>
constexpr int kPartBytes = 4 * WholeShape<R>::kPoints;
constexpr int kMostUp = 7;  // tokens, which come below 2^-4, are scaled up by 2^this at most

__device__ __forceinline__ int field_of(float scale) { return static_cast<int>(Scale::field_of(scale)); }

// Shared memory: points, up to 16,384 of a channel in three parts (halves.cuh), and constants.
template <int R>
struct WholeMemory {
  static constexpr int kColumnsAt = (R == 8 ? 1 : 3) * kPartBytes<R>;
  static constexpr int kColumnTurnsAt = kColumnsAt + ColumnSteps::kBytes;
  static constexpr int kStepsAt = kColumnTurnsAt + ColumnTurns<R>::kBytes;  // forward, back, of filters
  // Of one channel, which is more than 16,384 points: turns of tiles, those by s2, uint4 [tile][4], the next columns'
  // units, and an mbarrier of theirs.
  static constexpr bool kOne = R == 8;
  static constexpr int kBetweenAt = kStepsAt + 3 * kLanesBytes<TileSteps>;
  static constexpr int kAlongAt = kBetweenAt + (kOne ? kLanesBytes<TileTurns> : 0);
  static constexpr int kUnitsAt = kAlongAt + (kOne ? WholeShape<R>::kTiles * 4 * 16 : 0);
  static constexpr int kCameAt = kUnitsAt + (kOne ? 2 * kWholePoints : 0);
  static constexpr int kBytes = kCameAt + (kOne ? 16 : 0);

  // All of the block must come here, and meet before they use it.
  static __device__ void fill(unsigned char* memory, int lane, int warp) {
    const int row = lane / 4, pair = lane % 4;
    if constexpr (kOne) {
      for (int item = static_cast<int>(threadIdx.x); item < WholeShape<R>::kTiles * 4; item += kWholeThreads<R>) {
        reinterpret_cast<uint4*>(memory + kAlongAt)[item] = turns_by_s2<R>(item / 4, item % 4);
      }
      if (warp == 5) put(memory + kBetweenAt, lane, TileTurns::between(lane));
    }
    ColumnSteps::fill(memory + kColumnsAt, static_cast<int>(threadIdx.x), kWholeThreads<R>);
    ColumnTurns<R>::fill(memory + kColumnTurnsAt, static_cast<int>(threadIdx.x), kWholeThreads<R>);
    if (warp == 1) put(memory + kStepsAt, lane, TileSteps::of<false>(row, pair, 1.0f));
    if (warp == 2) put(memory + kStepsAt + kLanesBytes<TileSteps>, lane, TileSteps::of<true>(row, pair, 1.0f));
    // A filter's spectrum comes below 2^-4.
    constexpr float kFilter = 1.0f / 4096;
    if (warp == 3) put(memory + kStepsAt + 2 * kLanesBytes<TileSteps>, lane, TileSteps::of<false>(row, pair, kFilter));
  }
};

// A tile's spectrum as it lies in memory: a lane's words, and those half a tile behind.
struct StoredTile {
  uint4 x, y;

  static __device__ __forceinline__ StoredTile of(const Tile& tile) {
    return {make_uint4(tile[0][0].x, tile[0][1].x, tile[1][0].x, tile[1][1].x),
            make_uint4(tile[0][0].y, tile[0][1].y, tile[1][0].y, tile[1][1].y)};
  }
  __device__ __forceinline__ void load(const uint4* from) { x = __ldcg(from), y = __ldcg(from + 32); }
  __device__ __forceinline__ void store(uint4* to) const { __stcg(to, x), __stcg(to + 32, y); }
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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a warp of a block does: of each four quads one (p), of each kWarps tiles one.
template <int R>
class WholeWarp {
 public:
  using Shape = WholeShape<R>;
  using Memory = WholeMemory<R>;
  static constexpr int kWarps = kWholeWarps<R>;

  // Where a lane's four points of a quad lie, in bytes, of the warp's first and of round i.
  struct Place {
    int first;

    __device__ __forceinline__ Place(int warp, int lane) {
      // Of R = 8 a lane's first column: its second's chunk is of the next k2.
      const int column = R == 8 ? 2 * (lane % 4) : lane % 4, tile = lane / 4 + 16 * (column % R),
                chunk = (warp / 4 * Shape::kTogether + column / R) * 4 + warp % 4;
      first = tile * 1024 + Shape::placed(chunk, tile) * 16;
    }
    // Quads of a warp are kWarps apart.
    __device__ __forceinline__ int of_round(int i) const {
      if constexpr (R == 8) return (first + 256 * i) ^ (i % 2 * 32);
      return first + 512 * i;
    }
    static __device__ __forceinline__ uint4* chunk(unsigned char* memory, int at, int point) {
      const int other = R == 8 ? at + 16 * 1024 : at ^ 256 / R;
      return reinterpret_cast<uint4*>(memory + (point % 2 == 0 ? at : other) + point / 2 * 8 * 1024);
    }
  };

  __device__ __forceinline__ explicit WholeWarp(unsigned char* memory)
      : memory_(memory), lane_(static_cast<int>(threadIdx.x) % 32), warp_(static_cast<int>(threadIdx.x) / 32) {}

  // What brings a channel's units to one scale, of those in all lanes: the largest, or, of a filter's, which lanes have
  // several times, more than the sum.
  template <bool kFilter>
  static __device__ __forceinline__ float common_of(float4 scales) {
    if constexpr (!kFilter) return largest_of_warp(largest_of(scales));
    float own = (scales.x + scales.y) + (scales.z + scales.w);
#pragma unroll
    for (int apart = 2 * R; apart > 0; apart /= 2) own += __shfl_xor_sync(0xffffffffu, own, apart);
    return __uint_as_float((__float_as_uint(own) + 0x7fffffu) & 0x7f800000u);
  }
  // Of a lane's scales those of two units of one of the warp's quads.
  __device__ __forceinline__ float2 own_of(float4 scales) const {
    return warp_ % 2 == 0 ? make_float2(scales.x, scales.y) : make_float2(scales.z, scales.w);
  }
  // Factors that bring them to a channel's exponent field `common`, at most 2^kMostUp.
  __device__ __forceinline__ std::uint32_t ratios(float4 scales, int common) const {
    const float2 own = own_of(scales);
    return pack({ratio(own.x, common), ratio(own.y, common)});
  }

  // A quad's units, already at one scale, to columns, its place being `at`.
  __device__ __forceinline__ void put_columns(const ColumnSteps& steps, const ColumnTurns<R>& turns, int at,
                                              const uint4 (&tokens)[2]) const {
    uint4 chunks[4];
    make_columns(steps, turns, tokens, chunks);
#pragma unroll
    for (int k = 0; k < 4; ++k) *Place::chunk(memory_, at, k) = chunks[k];
  }
  // Back to units of results: in bf16 times a channel's `scale`, or kHalf.
  template <bool kHalf>
  __device__ __forceinline__ void take_columns(const ColumnSteps& steps, const ColumnTurns<R>& turns, int at,
                                               float scale, uint4* to) const {
    uint4 chunks[4], out[2];
#pragma unroll
    for (int k = 0; k < 4; ++k) chunks[k] = *Place::chunk(memory_, at, k);
    cuda::take_columns<kHalf, R>(steps, turns, chunks, scale, out);
    to[0] = out[0];
    to[32] = out[1];
  }

  // The sum of products of a warp's numbers of two units, of which lanes have shares: those on the diagonal of their
  // product on tensor cores.
  __device__ __forceinline__ float product_of(uint4 a, uint4 b) const {
    float d[4];
    set_matrix(d, {a.x, 0, a.y, 0}, b.x, b.y);
    add_matrix(d, {a.z, 0, a.w, 0}, b.z, b.w);
    return lane_ / 4 % 2 == 0 ? d[0] : d[1];
  }
  // The skip's gradient of channel `item`, of a warp's quads, of which lanes have such shares.
  __device__ __forceinline__ void store_products(const WholeCall& whole, int item, float own) const {
    if (lane_ % 4 != lane_ / 8) own = 0.0f;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) own += __shfl_xor_sync(0xffffffffu, own, apart);
    if (lane_ == 0) whole.products[warp_ * whole.call.channels + item] = own;
  }

  // A warp's first tile's spectrum in memory, asked for ahead of a barrier.
  __device__ __forceinline__ StoredTile first_stored(const uint4* from) const {
    StoredTile result;
    result.load(from + warp_ * 64 + lane_);
    return result;
  }

 protected:
  static __device__ __forceinline__ float largest_of(float4 scales) {
    return fmaxf(fmaxf(scales.x, scales.y), fmaxf(scales.z, scales.w));
  }
  // Of what lanes have, none of it negative, so that bits are in the order of numbers.
  static __device__ __forceinline__ float largest_of_warp(float own) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(own)));
  }
  // Of a power of two and one of an exponent field. Where the first is 0 so are the numbers that it is for.
  static __device__ __forceinline__ float ratio(float a, int field) {
    const int own = 127 + static_cast<int>(Scale::field_of(a)) - field;
    return __uint_as_float(static_cast<std::uint32_t>(min(max(own, 0), 127 + kMostUp)) << 23);
  }
  __device__ __forceinline__ unsigned char* chunks_of(int tile) const {
    return memory_ + 1024 * tile + Shape::placed(lane_, tile) * 16;
  }

  unsigned char* memory_;
  int lane_, warp_;
};

#endif

// What blocks do in turns: items, each a channel. Item i of line n is number n all + i.
struct Items {
  int all, step, first, last;

  __device__ __forceinline__ explicit Items(const WholeCall& whole)
      : all(static_cast<int>(whole.x.channels)),
        step(static_cast<int>(gridDim.x)),
        first(static_cast<int>(blockIdx.x)),
        last(static_cast<int>(whole.call.channels)) {}
  // An item's results are done, which all of the block have written before they met.
  __device__ __forceinline__ void finish(const WholeCall& whole, int item) const {
    if (threadIdx.x == 0) count_done(whole.done + item / kUnitChannels);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What kernels of whole transforms begin with: shared memory's constants. All of the block must come here.
template <int R>
__device__ __forceinline__ WholeWarp<R> begin_whole() {
  extern __shared__ __align__(128) unsigned char memory[];
  if (R == 8 && threadIdx.x == 0) {
    ptx::mbarrier_init(ptx::shared_address(memory + WholeMemory<R>::kCameAt), 1);
    ptx::fence_barrier_init();
  }
  WholeMemory<R>::fill(memory, static_cast<int>(threadIdx.x) % 32, static_cast<int>(threadIdx.x) / 32);
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next();
  __syncthreads();
  return WholeWarp<R>(memory);
}

#endif

// What takes results back. A filter's numbers are 2^8 / its scale times it, their spectrum 2^-12 of theirs, and what
// comes back 2^12 times as much.
__device__ __forceinline__ float back_scale(float tokens, float filter) { return tokens * filter * (1.0f / 256.0f); }

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

// The scale of the filter's gradient of chunk and item `number`.
template <int R>
__device__ __forceinline__ void store_scales(const WholeCall& whole, std::int64_t number, const SummedScale& summed) {
  if (threadIdx.x == 0) whole.sums.scales[number * WholeShape<R>::kTiles] = summed.back();
}

}  // namespace flashgla::ops::long_convolution::cuda

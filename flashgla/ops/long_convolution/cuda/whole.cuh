// Long sequences of bf16, outputs or inputs' gradients, each transformed as a whole (matrices.cuh). Rows come as units
// (units.cuh) and leave as such, so that a block has 32,768 points of one channel or a few in shared memory: the
// filter's columns and tiles, whose spectrum waits in memory for the block's own threads, then a sequence's columns,
// its tiles with the product between them and back, and columns back, whose results take the units' place.
#pragma once

#include "flashgla/ops/long_convolution/cuda/units.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kWholeThreads = 512, kWholeWarps = kWholeThreads / 32;
constexpr int kWholeSpectrum = kWholeTiles * 64;  // of a block, in uint4

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

// What a warp of whole_kernel does: of each four quads one (p), of each sixteen tiles one.
template <int R, bool kBack>
class WholeWarp {
 public:
  using Shape = WholeShape<R>;
  using Memory = WholeMemory<R>;

  __device__ __forceinline__ WholeWarp(unsigned char* memory, uint4* spectrum)
      : memory_(memory),
        spectrum_(spectrum),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32) {}

  // What brings a block's channels' units to one scale each, in lanes of a channel: the largest, or more than the sum.
  template <bool kFilter>
  __device__ __forceinline__ float common_scale(const float* scales) const {
    const float4 four = reinterpret_cast<const float4*>(scales)[lane_];
    const auto combine = [](float a, float b) { return kFilter ? a + b : fmaxf(a, b); };
    float own = combine(combine(four.x, four.y), combine(four.z, four.w));
#pragma unroll
    for (int apart = 2 * R; apart > 0; apart /= 2) own = combine(own, __shfl_xor_sync(0xffffffffu, own, apart));
    return kFilter ? __uint_as_float((__float_as_uint(own) + 0x7fffffu) & 0x7f800000u) : own;
  }

  // Units to columns.
  __device__ __forceinline__ void columns(const uint4* from, const float* scales, float common) const {
    const auto steps = get<ColumnSteps>(memory_ + Memory::kColumnsAt, lane_);
    const ColumnTurns turns = column_turns(0);
    from += 64 * warp_ + lane_;
    uint4 next[2] = {__ldcg(from), __ldcg(from + 32)};
#pragma unroll 1
    for (int i = 0; i < kWholeQuads / kWholeWarps; ++i) {
      const int quad = warp_ + kWholeWarps * i;
      const uint4 tokens[2] = {next[0], next[1]};
      from += 64 * kWholeWarps;
      if (i + 1 < kWholeQuads / kWholeWarps) next[0] = __ldcg(from), next[1] = __ldcg(from + 32);
      const float2 each = __ldg(reinterpret_cast<const float2*>(scales) + quad);
      const float all = of_quad(common, quad);
      const __half2 scale[2] = {ratio(each.x, all), ratio(each.y, all)};
      uint4 chunks[4];
      make_columns(steps, turns, tokens, scale, chunks);
      const Place place(quad, lane_);
#pragma unroll
      for (int i = 0; i < 4; ++i) *place.chunk(memory_, i) = chunks[i];
    }
  }

  // Columns back to units of results times a channel's `scale`.
  __device__ __forceinline__ void columns_back(uint4* to, float scale) const {
    const auto steps = get<ColumnSteps>(memory_ + Memory::kColumnsAt + kLanesBytes<ColumnSteps>, lane_);
    const ColumnTurns turns = column_turns(4);
    to += 64 * warp_ + lane_;
#pragma unroll 1
    for (int i = 0; i < kWholeQuads / kWholeWarps; ++i) {
      const int quad = warp_ + kWholeWarps * i;
      const Place place(quad, lane_);
      uint4 chunks[4], out[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) chunks[i] = *place.chunk(memory_, i);
      take_columns(steps, turns, chunks, of_quad(scale, quad), out);
      to[0] = out[0];
      to[32] = out[1];
      to += 64 * kWholeWarps;
    }
  }

  // A filter's tiles to its spectrum.
  __device__ __forceinline__ void filter_tiles() const {
    const auto steps = get<TileSteps>(memory_ + Memory::kStepsAt, lane_),
               right = get<TileSteps>(memory_ + Memory::kStepsAt + 2 * kLanesBytes<TileSteps>, lane_);
    const auto between = get<TileTurns>(memory_ + Memory::kBetweenAt, lane_);
    uint4* to = spectrum_ + warp_ * 64 + lane_;
#pragma unroll 2
    for (int i = 0; i < kWholeTiles / kWholeWarps; ++i) {
      const int tile = warp_ + kWholeWarps * i;
      Tile own;
      make_tile(steps, right, between, chunks_of(tile), turns_along(tile), own);
      __stcg(to, make_uint4(own[0][0].x, own[0][1].x, own[1][0].x, own[1][1].x));
      __stcg(to + 32, make_uint4(own[0][0].y, own[0][1].y, own[1][0].y, own[1][1].y));
      to += 64 * kWholeWarps;
    }
  }

  // A sequence's tiles times the filter's spectrum and back; of gradients times its conjugate.
  __device__ __forceinline__ void tiles() const {
    const auto steps = get<TileSteps>(memory_ + Memory::kStepsAt, lane_),
               steps_back = get<TileSteps>(memory_ + Memory::kStepsAt + kLanesBytes<TileSteps>, lane_);
    const auto between = get<TileTurns>(memory_ + Memory::kBetweenAt, lane_),
               between_back = get<TileTurns>(memory_ + Memory::kBetweenAt + kLanesBytes<TileTurns>, lane_);
    const uint4* from = spectrum_ + warp_ * 64 + lane_;
    uint4 next[2] = {__ldcg(from), __ldcg(from + 32)};
#pragma unroll 2
    for (int i = 0; i < kWholeTiles / kWholeWarps; ++i) {
      const int tile = warp_ + kWholeWarps * i;
      Tile own;
      unsigned char* chunks = chunks_of(tile);
      make_tile(steps, steps, between, chunks, turns_along(tile), own);
      own[0][0].template turn<kBack>({next[0].x, next[1].x});
      own[0][1].template turn<kBack>({next[0].y, next[1].y});
      own[1][0].template turn<kBack>({next[0].z, next[1].z});
      own[1][1].template turn<kBack>({next[0].w, next[1].w});
      from += 64 * kWholeWarps;
      if (i + 1 < kWholeTiles / kWholeWarps) next[0] = __ldcg(from), next[1] = __ldcg(from + 32);
      const auto* down =
          reinterpret_cast<const std::uint32_t*>(memory_ + Memory::kDownAt) + tile % Shape::kTiles * 16 + lane_ / 4;
      const auto twice = [](std::uint32_t turn) {
        return Words{__byte_perm(turn, turn, 0x1010), __byte_perm(turn, turn, 0x3232)};
      };
      const Words turns[2] = {twice(down[0]), twice(down[8])};
      take_tile(steps_back, between_back, own, turns, chunks);
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
  static __device__ __forceinline__ float of_quad(float scale, int quad) {
    return Shape::kTogether == 1 ? scale : __shfl_sync(0xffffffffu, scale, quad / Shape::kQuads * (4 * R));
  }
  // Of two powers of two, the first no larger, twice; where one is 0 so are the numbers that it is for.
  static __device__ __forceinline__ __half2 ratio(float a, float b) {
    const int field = 127 + static_cast<int>(Scale::field_of(a)) - static_cast<int>(Scale::field_of(b));
    return __float2half2_rn(__uint_as_float(static_cast<std::uint32_t>(min(max(field, 0), 127)) << 23));
  }
  __device__ __forceinline__ unsigned char* chunks_of(int tile) const {
    return memory_ + 1024 * tile + Shape::placed(lane_, tile % Shape::kTiles) * 16;
  }
  __device__ __forceinline__ uint4 turns_along(int tile) const {
    return reinterpret_cast<const uint4*>(memory_ + Memory::kAlongAt)[tile % Shape::kTiles * 4 + lane_ % 4];
  }

  unsigned char* memory_;
  uint4* spectrum_;
  int lane_, warp_;
};

// Spectra: kWholeSpectrum a block.
template <int R, bool kBack>
__global__ void __launch_bounds__(kWholeThreads, 1)
    whole_kernel(const __grid_constant__ WholeCall whole, uint4* spectra) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) unsigned char memory[];
  using Memory = WholeMemory<R>;
  constexpr std::int64_t kEach = std::int64_t{kWholeQuads} * 64;  // of a block's channels, in uint4
  // Units to the second cache.
  const auto expect = [](const uint4* units) {
    if (threadIdx.x == 0) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(units), "n"(2 * kWholePoints) : "memory");
    }
  };
  Memory::fill(memory, static_cast<int>(threadIdx.x) % 32, static_cast<int>(threadIdx.x) / 32);
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next();
  __syncthreads();
  const WholeWarp<R, kBack> warp(memory, spectra + std::int64_t{blockIdx.x} * kWholeSpectrum);
  const int all = static_cast<int>(whole.x.channels) / WholeShape<R>::kTogether, step = static_cast<int>(gridDim.x);
  for (int item = static_cast<int>(blockIdx.x); item < all; item += step) {
    const float* scales = whole.filter.scales + std::int64_t{item} * kWholeTiles;
    const float filter_scale = warp.template common_scale<true>(scales);
    warp.columns(whole.filter.data + item * kEach, scales, filter_scale);
    __syncthreads();
    expect(whole.x.data + item * kEach);
    warp.filter_tiles();
    for (std::int64_t n = 0; n < whole.call.lines; ++n) {
      const std::int64_t number = n * all + item;
      const float* token_scales = whole.x.scales + number * kWholeTiles;
      const float scale = warp.template common_scale<false>(token_scales);
      __syncthreads();
      warp.columns(whole.x.data + number * kEach, token_scales, scale);
      __syncthreads();
      if (n + 1 < whole.call.lines) {
        expect(whole.x.data + (number + all) * kEach);
      } else if (item + step < all) {
        expect(whole.filter.data + (item + step) * kEach);
      }
      warp.tiles();
      __syncthreads();
      // A filter's numbers are 2^8 / filter_scale times it, their spectrum 2^-12 of theirs, and what comes back 2^12
      // times as much.
      warp.columns_back(whole.x.data + number * kEach, scale * filter_scale * (1.0f / 256.0f));
    }
  }
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

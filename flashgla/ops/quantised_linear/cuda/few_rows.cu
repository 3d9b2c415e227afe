// Few rows of bf16 beside packed weights of 8 or 4 bits: each weight is read once for each 64 rows of x and becomes
// bf16, as `decode` makes it, in the registers from which the tensor cores take it (wgmma, sm_90a alone).
//
// A tile is 128 rows of the weights, the products' M side, by 64 rows of x. A block has one in two warpgroups, whose
// warps have a panel each; where tiles are too few for the multiprocessors a cluster of blocks shares a tile's columns.
// A ninth warp, the producer, brings stages of 128 columns: x by TMA, panels in bulk. Each of the others decodes two
// groups of its panel's stage, multiplies them, and meanwhile the next warp decodes. Blocks' sums meet in shared memory
// and are added in order, so a row of y is the same whatever is beside it.
#include <algorithm>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/tensor_map.h"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/warpgroup_products.cuh"
#include "flashgla/ops/quantised_linear/cuda/codes.cuh"
#include "flashgla/ops/quantised_linear/implementations.h"

namespace flashgla::ops::quantised_linear {

namespace {

using bf16 = __nv_bfloat16;
using flashgla::cuda::from_float;
using flashgla::cuda::to_float;
using ops::cuda::warpgroup::kRowBytes;
using ops::cuda::warpgroup::kTileChannels;

constexpr int kWarps = 8, kConsumers = 32 * kWarps, kThreads = kConsumers + 32;
constexpr int kTileRows = kWarps * static_cast<int>(kPanelRows);  // of the weights
constexpr int kStageGroups = 4, kStageColumns = kStageGroups * static_cast<int>(kGroup);
constexpr int kColumns = 64;                   // of a tile: rows of x
constexpr int kMostRows = 128;                 // of x
constexpr int kMostSplits = 8;                 // blocks that share a tile
[[maybe_unused]] constexpr int kTogether = 2;  // groups of a panel that are multiplied at once

struct Params {
  CUtensorMap x;
  const unsigned char* weight;
  const void* bias;  // or null
  void* y;
  std::int64_t y_stride;
  int rows, out;  // M, N
  int groups, panels;
  int split_bits;  // 2^split_bits blocks share a tile
  bool bias_is_f32, y_is_f32, accumulate;
  bool y_in_fours;  // rows of y are whole aligned fours
};

// What a block has in shared memory: stages of x, kStageColumns / kTileChannels tiles, and of the warps' panels, and
// their barriers, full and empty; at the end in their place the sums, [kColumns][kSumsStride], of which a warp's two
// rows beside four columns lie in different banks.
template <Format kFormatOf>
struct Form {
  static constexpr Format kFormat = kFormatOf;
  static constexpr int kBlock = static_cast<int>(block_bytes(kFormat));
  static constexpr int kXTile = kColumns * kRowBytes, kXTiles = kStageColumns / kTileChannels;
  static constexpr int kPanelBytes = kStageGroups * kBlock;
  static constexpr int kStageBytes = (kXTiles * kXTile + kWarps * kPanelBytes + 1023) / 1024 * 1024;
  static constexpr int kStages = std::min(100 * 1024 / kStageBytes, 4);
  static constexpr int kBarriers = kStages * kStageBytes;
  static constexpr int kSumsStride = kTileRows + 4;
  static constexpr int kShared = std::max(kBarriers + kStages * 16, kColumns* kSumsStride * 4) + 1024;
  static_assert(kStages >= 2 && kShared <= 112 * 1024, "two blocks a multiprocessor");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Two neighbouring columns of a word of unsigned codes, value code - 128, times the row's scale.
__device__ __forceinline__ std::uint32_t two_values(std::uint32_t codes, int first, float scale) {
  constexpr std::uint32_t kBits = 0x4b000000u;  // 2^23, to which a byte adds its value
  constexpr float kMiddle = 8388608.0f + 128.0f;
  const auto value = [&](int i) {
    return (__uint_as_float(__byte_perm(codes, kBits, 0x7440u | static_cast<unsigned>(i))) - kMiddle) * scale;
  };
  return ptx::pack_bf16(value(first), value(first + 1));
}

// A lane's part of a group of a panel as the left sides of two products of 16 columns, as they lie. Row r of the
// product's 16 is row 2 r of the panel for r < 8 and 2 (r - 8) + 1 for the others.
template <Format kFormat>
__device__ __forceinline__ void load_weights(const unsigned char* block, std::uint32_t (&a)[2][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, j = lane % 4;
  const float2 scales = __half22float2(reinterpret_cast<const __half2*>(block)[lane / 4]);
  // Columns 2 j and 2 j + 1 of the lane's first row; those 8 behind are 128 bytes further, of q8 those 16 behind 256.
  const unsigned char* const codes = block + kScaleBytes + 64 * (j / 2) + 8 * (lane / 4) + 2 * (j % 2);
  const auto two = [&](int row, int columns) {
    return static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(codes + 4 * row + 16 * columns));
  };
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float scale = row ? scales.y : scales.x;
    if constexpr (kFormat == Format::q4) {
      const cuda::Halves halves = cuda::values_of_q4(two(row, 0) | two(row, 8) << 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t values = (half ? halves.high : halves.low) ^ 0x80808080u;
        a[half][row] = two_values(values, 0, scale);
        a[half][2 + row] = two_values(values, 2, scale);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[half][row] = two_values(two(row, 16 * half), 0, scale);
        a[half][2 + row] = two_values(two(row, 16 * half + 8), 0, scale);
      }
    }
  }
}

// The block's stages in shared memory, and who waits for whom.
template <class F>
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(unsigned char* shared)
      : shared_(shared), barriers_(ptx::shared_address(shared + F::kBarriers)) {}
  // By one thread, before the block meets.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < F::kStages; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), kWarps);
    }
    ptx::fence_barrier_init();
  }
  __device__ __forceinline__ std::uint32_t x(int stage) const { return ptx::shared_address(at(stage)); }
  __device__ __forceinline__ unsigned char* panel(int stage, int warp) const {
    return at(stage) + F::kXTiles * F::kXTile + warp * F::kPanelBytes;
  }
  __device__ __forceinline__ std::uint32_t full(int stage) const { return barriers_ + stage % F::kStages * 16; }
  __device__ __forceinline__ void wait_full(int stage) const {
    ptx::mbarrier_wait(full(stage), stage / F::kStages % 2);
  }
  __device__ __forceinline__ void wait_empty(int stage) const {
    if (stage >= F::kStages) ptx::mbarrier_wait(empty(stage), (stage / F::kStages + 1) % 2);
  }
  // By all lanes of a consumer.
  __device__ __forceinline__ void leave(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty(stage));
  }

 private:
  __device__ __forceinline__ unsigned char* at(int stage) const {
    return shared_ + stage % F::kStages * F::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t empty(int stage) const { return full(stage) + 8; }

  unsigned char* shared_;
  std::uint32_t barriers_;
};

// A block's share of its tile: `stages` of them from `first` on.
struct Share {
  int tile, rank, first, stages;
  int row;  // of x, the first

  __device__ __forceinline__ explicit Share(const Params& p) {
    tile = static_cast<int>(blockIdx.x) >> p.split_bits;
    rank = static_cast<int>(blockIdx.x) - (tile << p.split_bits);
    row = static_cast<int>(blockIdx.y) * kColumns;
    const int all = (p.groups + kStageGroups - 1) / kStageGroups;
    first = all * rank >> p.split_bits;
    stages = (all * (rank + 1) >> p.split_bits) - first;
  }
  // Of a stage.
  __device__ __forceinline__ int groups(const Params& p, int stage) const {
    return min(kStageGroups, p.groups - (first + stage) * kStageGroups);
  }
};

// The producer: the weights of the first stages before what is ahead on the stream has ended. A panel beyond the last
// is read as the last, and its sums are not looked at.
template <class F>
__device__ __forceinline__ void produce(const Params& p, const Ring<F>& ring, const Share& share) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned char* const from =
      p.weight + (static_cast<std::int64_t>(min(share.tile * kWarps + lane, p.panels - 1)) * p.groups +
                  share.first * kStageGroups) *
                     F::kBlock;
  const auto ask_weights = [&](int stage) {
    const int bytes = share.groups(p, stage) * F::kBlock;
    if (lane == 0) ptx::mbarrier_arrive_expect(ring.full(stage), kWarps * bytes + F::kXTiles * F::kXTile);
    __syncwarp();
    if (lane < kWarps) {
      ptx::copy_bulk(ptx::shared_address(ring.panel(stage, lane)), from + stage * F::kPanelBytes, bytes,
                     ring.full(stage));
    }
  };
  const auto ask_x = [&](int stage) {
    if (lane >= F::kXTiles) return;
    ptx::copy_box(ring.x(stage) + lane * F::kXTile, &p.x, (share.first + stage) * kStageColumns + lane * kTileChannels,
                  share.row, 0, 0, ring.full(stage));
  };
  const int early = min(share.stages, F::kStages);
  for (int stage = 0; stage < early; ++stage) ask_weights(stage);
  flashgla::cuda::wait_for_previous();
  for (int stage = 0; stage < early; ++stage) ask_x(stage);
  for (int stage = early; stage < share.stages; ++stage) {
    ring.wait_empty(stage);
    ask_weights(stage);
    ask_x(stage);
  }
}

// sums += weights x of so many groups of a stage from `first` on. own: the warp's blocks of these.
template <class F, int kGroups>
__device__ __forceinline__ void multiply(float (&sums)[kColumns / 2], const unsigned char* own, std::uint32_t stage,
                                         int first) {
  using namespace ops::cuda::warpgroup;
  constexpr int kGroupsOfTile = kTileChannels / static_cast<int>(kGroup);
  std::uint32_t weights[kGroups][2][4];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    load_weights<F::kFormat>(own + i * F::kBlock, weights[i]);
    pin(weights[i][0]);
    pin(weights[i][1]);
  }
  pin(sums);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint64_t x = descriptor<Reads::channels_inner>(stage + (first + i) / kGroupsOfTile * F::kXTile,
                                                                (first + i) % kGroupsOfTile * 2 + half);
      ops::cuda::warpgroup::multiply<false, Reads::channels_inner>(sums, weights[i][half], x);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();  // meanwhile other warps decode
  pin(sums);
}

__device__ __forceinline__ void add(float4& to, float4 more) {
  to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
}

// Four neighbours of a row of y.
template <class T>
__device__ __forceinline__ void write_four(const Params& p, float4 sums, int m, int n) {
  float values[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!p.bias || n + i >= p.out) continue;
    values[i] +=
        p.bias_is_f32 ? static_cast<const float*>(p.bias)[n + i] : to_float(static_cast<const bf16*>(p.bias)[n + i]);
  }
  T* const y = static_cast<T*>(p.y) + m * p.y_stride + n;
  using Four = flashgla::cuda::Vector<T, 4>;
  if (p.y_in_fours) {
    if (p.accumulate) {
      const Four before = Four::load(y);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] += before[i];
    }
    Four::of(values).store(y);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i < p.out) y[i] = from_float<T>(p.accumulate ? to_float(y[i]) + values[i] : values[i]);
  }
}

// y of the block's share of the tile's places, of sums that all blocks of the cluster have.
template <class F>
__device__ __forceinline__ void write(const Params& p, float* shared, const Share& share) {
  constexpr int kFoursOfRow = kTileRows / 4;
  const int splits = 1 << p.split_bits, rows = min(kColumns, p.rows - share.row);
  const int begin = rows * share.rank >> p.split_bits, end = rows * (share.rank + 1) >> p.split_bits;
  for (int i = static_cast<int>(threadIdx.x); i < (end - begin) * kFoursOfRow; i += kThreads) {
    const int m = begin + i / kFoursOfRow, row = i % kFoursOfRow * 4, n = share.tile * kTileRows + row;
    if (n >= p.out) continue;
    float* const place = shared + m * F::kSumsStride + row;
    float4 total;
    if (splits == 1) {
      total = *reinterpret_cast<const float4*>(place);
    } else {
      float4 each[kMostSplits];  // all are asked for before the first is added
#pragma unroll
      for (int r = 0; r < kMostSplits; ++r) {
        each[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (r < splits) {
          each[r] = *static_cast<const float4*>(__cluster_map_shared_rank(place, static_cast<unsigned>(r)));
        }
      }
      total = each[0];
#pragma unroll
      for (int r = 1; r < kMostSplits; ++r) add(total, each[r]);
    }
    if (p.y_is_f32) {
      write_four<float>(p, total, share.row + m, n);
    } else {
      write_four<bf16>(p, total, share.row + m, n);
    }
  }
}

// A consumer's sums of the block's stages, in shared memory behind them.
template <class F>
__device__ __forceinline__ void consume(const Params& p, const Ring<F>& ring, const Share& share, float* to) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float sums[kColumns / 2] = {};
#pragma unroll 1
  for (int stage = 0; stage < share.stages; ++stage) {
    const int groups = share.groups(p, stage);
    const std::uint32_t x = ring.x(stage);
    const unsigned char* const own = ring.panel(stage, warp);
    ring.wait_full(stage);
    int group = 0;
    for (; group + kTogether <= groups; group += kTogether) {
      multiply<F, kTogether>(sums, own + group * F::kBlock, x, group);
    }
    for (; group < groups; ++group) multiply<F, 1>(sums, own + group * F::kBlock, x, group);
    ring.leave(stage);
  }
  ptx::barrier(1, kConsumers);  // all stages have been read
#pragma unroll
  for (int eight = 0; eight < kColumns / 8; ++eight) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = eight * 8 + lane % 4 * 2 + i, row = warp * static_cast<int>(kPanelRows) + lane / 4 * 2;
      *reinterpret_cast<float2*>(to + column * F::kSumsStride + row) =
          make_float2(sums[4 * eight + i], sums[4 * eight + 2 + i]);
    }
  }
}

template <class F>
__device__ __forceinline__ void few_rows(const Params& p, unsigned char* shared) {
  const Share share(p);
  const Ring<F> ring(shared);
  if (threadIdx.x == kConsumers) ring.init();
  __syncthreads();
  auto* const sums = reinterpret_cast<float*>(shared);
  if (threadIdx.x >= kConsumers) {
    produce<F>(p, ring, share);
  } else {
    consume<F>(p, ring, share, sums);
    flashgla::cuda::wait_for_previous();  // of y
  }
  if (p.split_bits == 0) {
    __syncthreads();
    write<F>(p, sums, share);
    return;
  }
  __syncwarp();
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  write<F>(p, sums, share);
  ptx::cluster_arrive();  // no block may end while others read what it has
  ptx::cluster_wait();
}

#endif

template <class F>
__global__ void __launch_bounds__(kThreads, 2) few_rows_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char memory[];
  flashgla::cuda::release_next();
  few_rows<F>(p, memory + (1024 - ptx::shared_address(memory) % 1024) % 1024);  // as the swizzle wants
#endif
}

// How many blocks share each of so many tiles of the weights, as a power of two: so many that all find room at once,
// two a multiprocessor, and each has a stage. Not by x's rows, or sums would depend on how many there are.
int split_bits_of(int tiles, int groups, int multiprocessors) {
  const int stages = (groups + kStageGroups - 1) / kStageGroups;
  int bits = 0;
  while (2 << bits <= std::min(kMostSplits, stages) && std::int64_t{tiles} << (bits + 1) <= 2 * multiprocessors) ++bits;
  return bits;
}

void run_few_rows(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
                  const Options& options) {
  if (context.planning()) return;
  Params p{};
  const std::int64_t row_bytes = (x.size(0) > 1 ? x.stride[0] : x.size(1)) * 2;
  p.weight = weight.as<std::uint8_t>();
  p.x = flashgla::cuda::tensor_map(
      "quantised linear", x.data, {static_cast<cuuint64_t>(x.size(1)), static_cast<cuuint64_t>(x.size(0)), 1, 1},
      {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(row_bytes)},
      kColumns);
  p.y = y.data;
  p.y_stride = y.stride[0];
  p.rows = static_cast<int>(x.size(0));
  p.out = static_cast<int>(y.size(1));
  p.panels = static_cast<int>(weight.size(0));
  p.groups = static_cast<int>(weight.size(1));
  p.y_is_f32 = y.dtype == DType::f32;
  p.y_in_fours =
      p.out % 4 == 0 && p.y_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(y.data) % (4 * size_of(y.dtype)) == 0;
  p.accumulate = options.accumulate;
  if (options.bias) {
    p.bias = options.bias.data;
    p.bias_is_f32 = options.bias.dtype == DType::f32;
  }
  const int tiles = (p.out + kTileRows - 1) / kTileRows, columns = (p.rows + kColumns - 1) / kColumns;
  p.split_bits = split_bits_of(tiles, p.groups, context.architecture().multiprocessors);
  const int splits = 1 << p.split_bits;
  const dim3 grid(static_cast<unsigned>(tiles * splits), static_cast<unsigned>(columns));
  const auto launch = [&](auto format) {
    using F = Form<format>;
    flashgla::cuda::launch("quantised linear", few_rows_kernel<F>, {grid, splits}, kThreads, F::kShared,
                           static_cast<cudaStream_t>(context.stream()), flashgla::cuda::Begin::beside_previous, p);
  };
  if (format_of(weight) == Format::q8) return launch(std::integral_constant<Format, Format::q8>());
  launch(std::integral_constant<Format, Format::q4>());
}

Support supports(const Problem& problem, const Architecture& architecture) {
  if (architecture.cuda_capability != 90) return Support::no("needs compute capability 9.0");
  if (problem.dtype != DType::bf16) return Support::no("takes x in bf16");
  if (problem.m > kMostRows) return Support::no("takes at most 128 rows");
  if (!problem.aligned) return Support::no("takes rows of x of whole 16-byte vectors");
  if (problem.k == 0) return Support::no("takes at least one column");
  if (std::max(problem.n, problem.k) > 0x7fffffff - kTileRows) return Support::no("takes fewer rows and columns");
  return Support::yes();
}

}  // namespace

const Implementation kFewRowsCuda{"cuda_few_rows", Device::Kind::cuda, supports, run_few_rows, [] { return true; }};

}  // namespace flashgla::ops::quantised_linear

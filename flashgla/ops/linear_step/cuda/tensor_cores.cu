// 5 to 8 rows, f32 in and out, weights in bf16, on tensor cores: each weight is read from memory once, and the first of
// them are under way before the kernel ahead has ended.
//
// One block a multiprocessor has a range of pairs of rows of the weights; eight pairs are a tile, the M side of
// m16n8k16, and the rows of x its N side. With swiglu a pair is a row of the gate and the one of up that belongs to it,
// where heads are turned channels j and j + K/2 of a head, else neighbours. Eight warps take every eighth slice of 64
// of I and walk, for each slice, over the block's tiles, so that a warp makes u of a slice once, in registers: three
// numbers of bf16 whose sum is u. A piece is a tile's part of a slice. Each lane copies its own vectors of it to shared
// memory, kStages pieces ahead and across the ends of slices, and reads only these: eight neighbours along I of a lane
// stand for the places that the instruction gives it, the same in u. The warps' sums meet in shared memory, are added
// in their order, and the factor of rms_norm, which is left out of u, multiplies them.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/cuda/bf16_parts.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/linear_step/cuda/call.cuh"

namespace flashgla::ops::linear_step {

namespace {

using cuda::LayerParams;
using cuda::swish;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 6;                              // pieces of a warp that are under way
constexpr int kRows = 8;                                // of x
constexpr int kPairs = 8;                               // of rows of the weights in a tile
constexpr int kSlice = 64;                              // of I
constexpr int kVectors = 2 * kPairs * kSlice / 8 / 32;  // of a lane in a piece
constexpr int kParts = 3;                               // numbers of bf16 that u is cut into
constexpr int kRingBytes = kStages * kWarps * kVectors * 32 * 16;
constexpr int kMostTiles = 64;  // of a block

struct Params : cuda::Params {
  int pairs_of_first;  // pairs of layers[0]; the rest are layers[1]'s
  int pairs;
  int tiles;  // the most that a block has
};

// Two rows of the weights that lie in one lane's sums.
struct Pair {
  const LayerParams* layer;
  int first, second;  // columns of y; none: at least layer->out
  bool turned;

  __device__ __forceinline__ Pair(const Params& p, int q) : layer(&p.layers[0]), turned(false) {
    if (q >= p.pairs_of_first) q -= p.pairs_of_first, layer = &p.layers[1];
    if (p.epilogue == Epilogue::swiglu) {
      first = second = q;
    } else if (q < layer->turned / 2) {
      first = q + q / p.half * p.half, second = first + p.half, turned = true;
    } else {
      first = layer->turned + 2 * (q - layer->turned / 2), second = first + 1;
    }
  }
  static int count(const Params& p, const LayerParams& layer) {
    return p.epilogue == Epilogue::swiglu ? layer.out : (layer.out + 1) / 2;
  }
};

// What a lane has of a slice of x: of row lane / 4 twice eight neighbours, those of lane % 4 of each 32.
struct Slice {
  float4 x[4];
};

// Eight neighbours of the norm's weights.
__device__ __forceinline__ void load_weights(const Params& p, int i, float (&w)[8]) {
  if (p.norm_is_f32) {
    const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(p.norm_weight) + i);
    const float4 a = __ldg(from), b = __ldg(from + 1);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    return;
  }
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.norm_weight) + i));
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two = ptx::unpack_bf16(words[j]);
    w[2 * j] = two.x, w[2 * j + 1] = two.y;
  }
}

// kTiles: whose sums a warp has at once; a block with more of them walks over I again. kByHead: the prologue is
// head_norm.
template <int kTiles, bool kByHead>
__global__ void __launch_bounds__(kThreads, 2) tensor_core_kernel(const __grid_constant__ Params p) {
  constexpr int kItems = (kTiles * kPairs * kRows + kThreads - 1) / kThreads;
  extern __shared__ uint4 ring[];
  auto* const sums_of_warps = reinterpret_cast<float*>(ring + kRingBytes / 16);  // [warp, tile, row, n]
  auto* const rows_of_tiles =
      reinterpret_cast<const __nv_bfloat16**>(sums_of_warps + kWarps * kTiles * 2 * kPairs * kRows);
  auto* const squares_of_warps = reinterpret_cast<float*>(rows_of_tiles + p.tiles * 2 * kPairs);  // [warp, n]
  float* const deviations = squares_of_warps + kWarps * kRows;                                    // [n, head]
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, place = lane % 4;
  const int slices = (p.in + kSlice - 1) / kSlice, heads = p.in / p.head_size;
  const auto bound = [&](unsigned block) {
    return static_cast<int>(static_cast<std::int64_t>(p.pairs) * block / gridDim.x);
  };
  const int begin = bound(blockIdx.x), end = bound(blockIdx.x + 1), tiles = (end - begin + kPairs - 1) / kPairs;

  for (int i = thread; i < tiles * 2 * kPairs; i += kThreads) {
    const int q = begin + i / (2 * kPairs) * kPairs + i % kPairs;
    const __nv_bfloat16* row = nullptr;
    if (q < end) {
      const Pair pair(p, q);
      const bool second = i % (2 * kPairs) >= kPairs;
      const int column = second ? pair.second : pair.first;
      if (column < pair.layer->out) {
        const int index = column + (second && p.epilogue == Epilogue::swiglu ? pair.layer->out : 0);
        row = static_cast<const __nv_bfloat16*>(pair.layer->weight) + static_cast<std::int64_t>(index) * p.in;
      }
    }
    rows_of_tiles[i] = row;
  }
  __syncthreads();

  // What is copied next.
  int next_first = warp < slices ? 0 : tiles, next_slice = warp, next_tile = 0;
  uint4* const own = ring + warp * kVectors * 32 + lane;
  const auto copy_piece = [&](int slot) {
    if (next_first < tiles) {
      const __nv_bfloat16* const* rows = rows_of_tiles + (next_first + next_tile) * 2 * kPairs + group;
      const int k = next_slice * kSlice + 8 * place;
      const std::uint32_t to = ptx::shared_address(own + slot * kWarps * kVectors * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const __nv_bfloat16* const row = rows[half * kPairs];
        if (row == nullptr) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool inside = k + 32 * j < p.in;
          ptx::copy_async_16(to + (2 * j + half) * 512, inside ? row + k + 32 * j : row, inside ? 16 : 0);
        }
      }
      if (++next_tile == kTiles || next_first + next_tile == tiles) {
        next_tile = 0, next_slice += kWarps;
        if (next_slice >= slices) next_slice = warp, next_first += kTiles;
      }
    }
    ptx::copy_async_commit();
  };
#pragma unroll 1
  for (int slot = 0; slot < kStages; ++slot) copy_piece(slot);
  flashgla::cuda::release_next();

  // A thread's values: pair `item` / kRows of the pass's, row item % kRows of x.
  const int n_of_thread = thread % kRows;
  double turns[kItems];
  const auto find_turns = [&](int first) {
#pragma unroll
    for (int e = 0; e < kItems; ++e) {
      const int q = begin + first * kPairs + (thread + e * kThreads) / kRows;
      turns[e] = 0.0;
      if (p.half == 0 || q >= end) continue;
      const Pair pair(p, q);
      if (pair.turned) turns[e] = cuda::turns_of_token(p, pair.first % p.half);
    }
  };
  find_turns(0);
  flashgla::cuda::wait_for_previous();
  const int position = p.positions != nullptr && n_of_thread < p.rows ? __ldcg(p.positions + n_of_thread) : 0;
  if constexpr (kByHead) cuda::find_deviations<kWarps>(p, deviations);

  const auto load = [&](const float* from, std::int64_t stride, int slice) {
    Slice read;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = slice * kSlice + i / 2 * 32 + 8 * place + i % 2 * 4;
      read.x[i] = group < p.rows && k < p.in ? __ldcg(reinterpret_cast<const float4*>(from + group * stride + k))
                                             : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    return read;
  };
  float squares = 0.0f;
  int slot = 0;
  for (int first = 0; first < tiles; first += kTiles) {
    const int count = min(kTiles, tiles - first);
    if (first > 0) find_turns(first);
    float before[kItems][2] = {};
    if (p.epilogue == Epilogue::add) {
#pragma unroll
      for (int e = 0; e < kItems; ++e) {
        const int item = thread + e * kThreads, q = begin + first * kPairs + item / kRows;
        if (item >= count * kPairs * kRows || q >= end || n_of_thread >= p.rows) continue;
        const Pair pair(p, q);
        const float* const y = pair.layer->y + n_of_thread * pair.layer->y_stride;
        before[e][0] = __ldcg(y + pair.first);
        if (pair.second < pair.layer->out) before[e][1] = __ldcg(y + pair.second);
      }
    }
    float sums[kTiles][4] = {};
    Slice x{}, gate{};
    if (warp < slices) x = load(p.x, p.x_stride, warp);
    if (kByHead && p.gate && warp < slices) gate = load(p.gate, p.gate_stride, warp);
    for (int slice = warp; slice < slices; slice += kWarps) {
      std::uint32_t u[2][kParts][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int k = slice * kSlice + 32 * j + 8 * place;
        const float4 a = x.x[2 * j], b = x.x[2 * j + 1];
        float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        if (p.prologue == Prologue::rms_norm && first == 0) {
#pragma unroll
          for (const float each : v) squares += each * each;
        }
        if (kByHead && k < p.in && group < p.rows) {
          const float r = deviations[group * heads + k / p.head_size];
#pragma unroll
          for (float& each : v) each *= r;
        }
        if (p.norm_weight && k < p.in) {
          float w[8];
          load_weights(p, kByHead ? k % p.head_size : k, w);
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] *= w[i];
        }
        if (kByHead && p.gate) {
          const float4 c = gate.x[2 * j], d = gate.x[2 * j + 1];
          const float g[8] = {c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w};
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] *= swish(g[i]);
        }
        ops::cuda::cut_in_bf16<false>(v, u[j]);
      }
      if (slice + kWarps < slices) {
        x = load(p.x, p.x_stride, slice + kWarps);
        if (kByHead && p.gate) gate = load(p.gate, p.gate_stride, slice + kWarps);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile >= count) break;
        ptx::copy_async_wait<kStages - 1>();
        uint4 raw[kVectors];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) raw[i] = own[(slot * kWarps * kVectors + i) * 32];
        copy_piece(slot);
        if (++slot == kStages) slot = 0;
#pragma unroll
        for (int part = kParts - 1; part >= 0; --part) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint4 upper = raw[2 * j], lower = raw[2 * j + 1];
            const std::uint32_t halves[2][4] = {{upper.x, lower.x, upper.y, lower.y},
                                                {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              ptx::mma_bf16(sums[tile], halves[half], u[j][part][2 * half], u[j][part][2 * half + 1]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int row = (warp * kTiles + tile) * 2 * kPairs + second * kPairs + group;
        *reinterpret_cast<float2*>(sums_of_warps + row * kRows + 2 * place) =
            make_float2(sums[tile][2 * second], sums[tile][2 * second + 1]);
      }
    }
    if (p.prologue == Prologue::rms_norm && first == 0) {
      squares += __shfl_xor_sync(0xffffffffu, squares, 1);
      squares += __shfl_xor_sync(0xffffffffu, squares, 2);
      if (place == 0) squares_of_warps[warp * kRows + group] = squares;
    }
    __syncthreads();
    float factor = 1.0f;
    if (p.prologue == Prologue::rms_norm) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += squares_of_warps[w * kRows + n_of_thread];
      factor = rsqrtf(total * p.inverse_in + p.epsilon);
    }
#pragma unroll
    for (int e = 0; e < kItems; ++e) {
      const int item = thread + e * kThreads, q = begin + first * kPairs + item / kRows;
      if (item >= count * kPairs * kRows || q >= end || n_of_thread >= p.rows) continue;
      const Pair pair(p, q);
      float a[2] = {};
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int row = item / (kPairs * kRows) * 2 * kPairs + second * kPairs + item / kRows % kPairs;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          a[second] += sums_of_warps[(w * kTiles * 2 * kPairs + row) * kRows + n_of_thread];
        }
        const int column = second ? pair.second : pair.first;
        a[second] *= factor;
        if (pair.layer->bias && column < pair.layer->out) {
          a[second] += cuda::load_parameter(pair.layer->bias, pair.layer->bias_is_f32, column);
        }
      }
      float* const y = pair.layer->y + n_of_thread * pair.layer->y_stride;
      switch (p.epilogue) {
        case Epilogue::store:
          if (pair.turned) {
            const float2 angle = cuda::angle_at(position, turns[e]);
            const float turned = a[0] * angle.x - a[1] * angle.y;
            a[1] = a[1] * angle.x + a[0] * angle.y;
            a[0] = turned;
          }
          break;
        case Epilogue::add:
          a[0] += before[e][0], a[1] += before[e][1];
          break;
        case Epilogue::swiglu:
          a[0] = swish(a[0]) * a[1];
          break;
        case Epilogue::log_sigmoid:
#pragma unroll
          for (float& each : a) each = fmaxf(cuda::log_sigmoid(each) * p.inverse_normalizer, p.clamp_min);
          break;
      }
      y[pair.first] = a[0];
      if (p.epilogue != Epilogue::swiglu && pair.second < pair.layer->out) y[pair.second] = a[1];
    }
    if (first + kTiles < tiles) __syncthreads();  // before the next pass's sums
  }
}

template <int kTiles, bool kByHead>
void launch(Context& context, const Params& p, int blocks) {
  const int shared = kRingBytes + kWarps * kTiles * 2 * kPairs * kRows * 4 + p.tiles * 2 * kPairs * 8 +
                     kRows * (kWarps + (kByHead ? p.in / p.head_size : 0)) * 4;
  ops::cuda::queue_kernel(context, "linear_step", tensor_core_kernel<kTiles, kByHead>, blocks, kThreads, shared, p);
}

void run_tensor_cores(Context& context, const Inputs& inputs, std::span<const Layer> layers, const Options& options) {
  if (context.planning()) return;
  Params p{cuda::params_of(inputs, layers, options, true)};
  for (const LayerParams& layer : p.layers) {
    p.pairs += Pair::count(p, layer);
    if (&layer == p.layers) p.pairs_of_first = p.pairs;
  }
  if (p.pairs == 0) return;
  const int most = kMostTiles * kPairs;
  const int blocks = std::max(std::min(p.pairs, context.architecture().multiprocessors), (p.pairs + most - 1) / most);
  p.tiles = ((p.pairs + blocks - 1) / blocks + kPairs - 1) / kPairs;
  if (p.prologue == Prologue::head_norm) {
    p.tiles <= 1 ? launch<1, true>(context, p, blocks) : launch<3, true>(context, p, blocks);
  } else {
    p.tiles <= 1   ? launch<1, false>(context, p, blocks)
    : p.tiles <= 3 ? launch<3, false>(context, p, blocks)
                   : launch<6, false>(context, p, blocks);
  }
}

Support supports(const Problem& problem, const Architecture& architecture) {
  if (problem.dtype != DType::f32) return Support::no("f32 activations only");
  if (problem.weight_dtype != DType::bf16) return Support::no("weights in bf16 only");
  if (problem.layers > 2) return Support::no("more than two layers");
  if (!problem.aligned) return Support::no("rows of whole 16-byte vectors only");
  if (problem.rows > kRows) return Support::no("at most 8 rows");
  if (problem.in / problem.heads % 8 != 0) return Support::no("heads of whole 16-byte vectors only");
  const std::int64_t shared = kRingBytes + 6 * kWarps * 2 * kPairs * kRows * 4 + kMostTiles * 2 * kPairs * 8 +
                              kRows * (kWarps + problem.heads) * 4;
  if (shared > architecture.shared_memory) return Support::no("what a block needs does not fit into shared memory");
  return Support::yes();
}

}  // namespace

const Implementation kTensorCoresCuda{"cuda_tensor_cores", Device::Kind::cuda, supports, run_tensor_cores, 2};

}  // namespace flashgla::ops::linear_step

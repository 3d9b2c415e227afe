// Few rows of f32 beside packed weights of 8 or 4 bits, and layers of bf16 between them: each weight is read once, and
// the first of them are under way before the kernel ahead has ended.
//
// u becomes 16-bit integers with a scale for each group of 32, as on the CPU (quantised_linear.h): two bytes, so that
// four products with weights of one byte are two dp4a, exact. A panel is 16 rows of the weights. One block a
// multiprocessor has a range of panels (with swiglu pairs of them, gate and up), all of whose warps share a panel's
// groups: a warp's lie behind one another in memory, it copies them to shared memory kStages pieces ahead, and reads
// only these. A lane has a row and half of a group's columns. Warps' sums meet in shared memory, some panels at a time,
// and are added in order. A value is one fixed sum whatever the number of rows of x.
#include <type_traits>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/linear_step/cuda/call.cuh"
#include "flashgla/ops/quantised_linear/cuda/codes.cuh"

namespace flashgla::ops::linear_step {

namespace {

namespace codes = quantised_linear::cuda;
using cuda::load_parameter;
using cuda::swish;
using quantised_linear::Format;
using quantised_linear::kGroup;
using quantised_linear::kLargestInteger;
using quantised_linear::kNothing;
using quantised_linear::kPanelRows;
using quantised_linear::kScaleBytes;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 5;         // pieces of a warp that are under way
constexpr int kMostRows = 8;       // of x
constexpr int kPieceBytes = 2304;  // of a warp: 8 groups of q4, 4 of q8, 2 of bf16
constexpr int kRingBytes = kStages * kWarps * kPieceBytes;
constexpr int kHeldSums = 16;  // panels' sums times rows of x that a block keeps

enum class Kind : std::uint8_t { q8, q4, bf16 };

// Bytes of a group in a panel, and groups of a piece.
constexpr int kBytesOfQ8 = static_cast<int>(quantised_linear::block_bytes(Format::q8)),
              kBytesOfQ4 = static_cast<int>(quantised_linear::block_bytes(Format::q4)),
              kBytesOfFloats = static_cast<int>(kPanelRows * kGroup * 2);
__host__ __device__ constexpr int block_bytes(Kind kind) {
  return kind == Kind::q8 ? kBytesOfQ8 : kind == Kind::q4 ? kBytesOfQ4 : kBytesOfFloats;
}
__host__ __device__ constexpr int piece_groups(Kind kind) { return kPieceBytes / block_bytes(kind); }

struct PackedLayer {
  const unsigned char* weight;
  const void* bias;
  float* y;
  std::int64_t y_stride;
  int out;         // columns of y
  int first_unit;  // of the call's
  int bias_is_f32;
  Kind kind;
};

struct Params : cuda::Params {
  PackedLayer packed[kMostLayers];
  int count;   // of layers
  int units;   // panels, or with swiglu pairs of them
  int groups;  // of 32 columns
};

// The layer of a unit that is not before layer `from`'s first.
__device__ __forceinline__ int layer_of(const Params& p, int unit, int from) {
  while (from + 1 < p.count && unit >= p.packed[from + 1].first_unit) ++from;
  return from;
}

__device__ __forceinline__ int dp4a(std::uint32_t weights, std::uint32_t high_bytes, int sum) {
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(weights), "r"(high_bytes));
  return sum;
}
__device__ __forceinline__ int dp4a_low(std::uint32_t weights, std::uint32_t low_bytes, int sum) {
  asm("dp4a.s32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(weights), "r"(low_bytes));
  return sum;
}

// u in shared memory: of each row and group four vectors {high bytes, low bytes of columns 4 j on, the same of 16 + 4 j
// on}, and a scale.
template <int kRows>
class Integers {
 public:
  static constexpr int kHeld = kRows == 1 ? 8 : kRows <= 4 ? 2 : 1;  // groups that a warp loads at once

  __device__ Integers(const Params& params, unsigned char* shared)
      : p(params),
        vectors_(reinterpret_cast<uint4*>(shared)),
        scales_(reinterpret_cast<float*>(vectors_ + kRows * params.groups * 4)),
        squares_(scales_ + kRows * params.groups),
        deviations_(squares_ + kRows * kWarps) {}

  static std::int64_t shared_bytes(std::int64_t groups, std::int64_t heads) {
    return kRows * (groups * 68 + (kWarps + heads) * 4);
  }

  // The norm's weights of a lane's columns in a warp's next groups, which no kernel writes.
  __device__ __forceinline__ void load_weights(int first, float (&weights)[kHeld]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int column = (first + j * kWarps) * static_cast<int>(kGroup) + lane;
      weights[j] = 1.0f;
      if (!p.norm_weight || column >= p.in) continue;
      const int place = p.prologue == Prologue::head_norm ? column % p.head_size : column;
      weights[j] = load_parameter(p.norm_weight, p.norm_is_f32, place);
    }
  }

  // weights: load_weights' from a warp's first group on. Ends with a barrier.
  __device__ void make(float (&weights)[kHeld]) {
    const bool by_head = p.prologue == Prologue::head_norm;
    if (by_head) cuda::find_deviations<kWarps>(p, deviations_);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    float squares[kRows] = {};
    for (int first = warp; first < p.groups; first += kWarps * kHeld) {
      float x[kHeld][kRows], gate[kHeld][kRows];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int column = (first + j * kWarps) * static_cast<int>(kGroup) + lane;
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
          const bool there = column < p.in && n < p.rows;
          x[j][n] = there ? __ldcg(p.x + n * p.x_stride + column) : 0.0f;
          if (p.gate) gate[j][n] = there ? __ldcg(p.gate + n * p.gate_stride + column) : 0.0f;
        }
      }
      if (first != warp) load_weights(first, weights);
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int group = first + j * kWarps, column = group * static_cast<int>(kGroup) + lane;
        if (group >= p.groups) break;
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
          float v = x[j][n];
          if (p.prologue == Prologue::rms_norm) squares[n] += v * v;
          if (by_head && n < p.rows && column < p.in) v *= deviations_[n * (p.in / p.head_size) + column / p.head_size];
          v *= weights[j];
          if (p.gate) v *= swish(gate[j][n]);
          put(n, group, lane, v);
        }
      }
    }
    if (p.prologue == Prologue::rms_norm) {
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        const float sum = flashgla::cuda::warp_sum(squares[n]);
        if (lane == 0) squares_[n * kWarps + warp] = sum;
      }
    }
    __syncthreads();
  }

  // The factor of a row's sums.
  __device__ float factor(int row) const {
    if (p.prologue != Prologue::rms_norm) return 1.0f;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += squares_[row * kWarps + w];
    return rsqrtf(total * p.inverse_in + p.epsilon);
  }

  __device__ __forceinline__ uint4 vector(int row, int group, int j) const {
    return vectors_[(row * p.groups + group) * 4 + j];
  }
  __device__ __forceinline__ float scale(int row, int group) const { return scales_[row * p.groups + group]; }

 private:
  // A lane's number of a group. What is not finite gives a scale that is not, and 0.
  __device__ __forceinline__ void put(int row, int group, int lane, float v) {
    const float largest =
        __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(v) & 0x7fffffffu));  // NaN above all
    const float inverse = largest < kNothing ? 0.0f : kLargestInteger / largest;
    const int number = __float2int_rn(v * inverse);
    auto* const bytes = reinterpret_cast<signed char*>(vectors_ + (row * p.groups + group) * 4 + lane % 16 / 4) +
                        lane / 16 * 8 + lane % 4;
    bytes[0] = static_cast<signed char>(number >> 8);
    bytes[4] = static_cast<signed char>(number & 0xff);
    if (lane == 0) scales_[row * p.groups + group] = largest < kNothing ? 0.0f : largest * (1.0f / kLargestInteger);
  }

  const Params& p;
  uint4* vectors_;
  float *scales_, *squares_, *deviations_;
};

// A walk over a warp's groups of the panels that its block has.
class Walk {
 public:
  __device__ Walk(const Params& params, int begin, int end)
      : p(params),
        sides_(params.epilogue == Epilogue::swiglu ? 2 : 1),
        first_(params.groups * (static_cast<int>(threadIdx.x) / 32) / kWarps),
        last_(params.groups * (static_cast<int>(threadIdx.x) / 32 + 1) / kWarps),
        unit_(begin),
        end_(end),
        group_(first_) {
    find_layer();
  }

  __device__ bool ended() const { return unit_ >= end_; }
  __device__ const PackedLayer& layer() const { return p.packed[layer_]; }
  __device__ int group() const { return group_; }
  __device__ int groups() const { return min(piece_groups(layer().kind), last_ - group_); }  // of this piece
  __device__ int panel() const {
    return unit_ - layer().first_unit + side_ * (layer().out / static_cast<int>(kPanelRows));
  }
  // To the next piece; true when that begins another panel. A warp without groups has a piece without any a panel.
  __device__ bool advance() {
    group_ += groups();
    if (group_ < last_) return false;
    group_ = first_;
    if (++side_ == sides_) {
      side_ = 0;
      if (++unit_ < end_) find_layer();
    }
    return true;
  }

 private:
  __device__ void find_layer() { layer_ = layer_of(p, unit_, layer_); }

  const Params& p;
  int sides_, first_, last_, unit_, end_, group_, side_ = 0, layer_ = 0;
};

// Asks for a piece of the weights.
__device__ __forceinline__ void copy_piece(const Params& p, const Walk& walk, std::uint32_t to) {
  const int lane = static_cast<int>(threadIdx.x) % 32, groups = walk.groups();
  const PackedLayer& layer = walk.layer();
  if (layer.kind == Kind::bf16) {  // rows one behind the other, of each 4 vectors a group
    const int vectors = 4 * groups, column = walk.group() * static_cast<int>(kGroup);
    for (int v = lane; v < static_cast<int>(kPanelRows) * vectors; v += 32) {
      const int row = v / vectors, at = column + v % vectors * 8;
      const std::int64_t of = walk.panel() * kPanelRows + row;
      if (of >= layer.out * (p.epilogue == Epilogue::swiglu ? 2 : 1) || at >= p.in) continue;
      ptx::copy_async_16(to + (row * vectors + v % vectors) * 16, layer.weight + (of * p.in + at) * 2);
    }
    return;
  }
  const int bytes = block_bytes(layer.kind);
  const unsigned char* from =
      layer.weight + (static_cast<std::int64_t>(walk.panel()) * p.groups + walk.group()) * bytes;
  for (int at = 16 * lane; at < groups * bytes; at += 16 * 32) ptx::copy_async_16(to + at, from + at);
}

// Adds a group's products to a lane's sums. `half`: which of a group's vectors of u are the lane's, half and 2 + half.
template <bool kQ4, int kRows>
__device__ __forceinline__ void add_packed(const Integers<kRows>& u, int group, const unsigned char* block, int row,
                                           int half, float (&sums)[kRows]) {
  const auto* const words = reinterpret_cast<const std::uint32_t*>(block + kScaleBytes) + row;
  int high[kRows] = {}, low[kRows] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * i + half;
    codes::Halves w;
    if constexpr (kQ4) {
      w = codes::values_of_q4(words[16 * j]);
    } else {
      w = {codes::values_of_q8(words[16 * j]), codes::values_of_q8(words[16 * (j + 4)])};
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const uint4 x = u.vector(n, group, j);
      high[n] = dp4a(w.high, x.z, dp4a(w.low, x.x, high[n]));
      low[n] = dp4a_low(w.high, x.w, dp4a_low(w.low, x.y, low[n]));
    }
  }
  const float scale = codes::scale_of(block, row);
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    sums[n] = fmaf(scale * u.scale(n, group), static_cast<float>(256 * high[n] + low[n]), sums[n]);
  }
}

// A piece's groups, several of which are under way at once.
template <bool kQ4, int kRows>
__device__ __forceinline__ void add_piece(const Integers<kRows>& u, int first, int groups, const unsigned char* piece,
                                          int row, int half, float (&sums)[kRows]) {
  constexpr Kind kKind = kQ4 ? Kind::q4 : Kind::q8;
  constexpr int kTogether = kRows <= 2 ? 4 : 2;
  int g = 0;
  for (; g + kTogether <= groups; g += kTogether) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      add_packed<kQ4>(u, first + g + i, piece + (g + i) * block_bytes(kKind), row, half, sums);
    }
  }
  for (; g < groups; ++g) add_packed<kQ4>(u, first + g, piece + g * block_bytes(kKind), row, half, sums);
}

// The same of a row in bf16, whose 32 numbers of the group lie at `numbers`; those beyond x's columns meet zeros.
template <int kRows>
__device__ __forceinline__ void add_floats(const Integers<kRows>& u, int group, int columns, const uint2* numbers,
                                           int half, float (&sums)[kRows]) {
  float own[kRows] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * i + half;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      if (16 * upper + 4 * j >= columns) continue;
      const uint2 raw = numbers[4 * upper + j];
      const float2 first = ptx::unpack_bf16(raw.x), second = ptx::unpack_bf16(raw.y);
      const float w[4] = {first.x, first.y, second.x, second.y};
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        const uint4 x = u.vector(n, group, j);
        const std::uint32_t high = upper ? x.z : x.x, low = upper ? x.w : x.y;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          own[n] = fmaf(w[c], static_cast<float>(256 * codes::byte_of(high, c) + static_cast<int>(low >> 8 * c & 255)),
                        own[n]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kRows; ++n) sums[n] = fmaf(u.scale(n, group), own[n], sums[n]);
}

// What a block has of some panels: sums [panel, warp, row of the panel, row of x], added and made values of y.
template <int kRows>
__device__ __forceinline__ void finish(const Params& p, const Integers<kRows>& u, const float* sums, int begin,
                                       int end) {
  const int sides = p.epilogue == Epilogue::swiglu ? 2 : 1;
  const auto sum_of = [&](int panel, int row, int n) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total += sums[((panel * kWarps + w) * static_cast<int>(kPanelRows) + row) * kRows + n];
    }
    return total;
  };
  const int each = static_cast<int>(kPanelRows) * kRows;
  for (int item = static_cast<int>(threadIdx.x); item < (end - begin) * each; item += kThreads) {
    const int unit = begin + item / each, n = item % each / static_cast<int>(kPanelRows),
              row = item % static_cast<int>(kPanelRows);
    const PackedLayer& layer = p.packed[layer_of(p, unit, 0)];
    const int column = (unit - layer.first_unit) * static_cast<int>(kPanelRows) + row;
    if (n >= p.rows || column >= layer.out) continue;
    const float factor = u.factor(n);
    float a = sum_of((unit - begin) * sides, row, n) * factor;
    if (layer.bias) a += load_parameter(layer.bias, layer.bias_is_f32, column);
    float* const y = layer.y + n * layer.y_stride + column;
    switch (p.epilogue) {
      case Epilogue::store:
        break;
      case Epilogue::add:
        a += __ldcg(y);
        break;
      case Epilogue::swiglu:
        a = swish(a) * (sum_of((unit - begin) * sides + 1, row, n) * factor);
        break;
      case Epilogue::log_sigmoid:
        a = fmaxf(cuda::log_sigmoid(a) * p.inverse_normalizer, p.clamp_min);
        break;
    }
    *y = a;
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 2) packed_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = lane % static_cast<int>(kPanelRows), half = lane / static_cast<int>(kPanelRows);
  const auto bound = [&](unsigned block) {
    return static_cast<int>(static_cast<std::int64_t>(p.units) * block / gridDim.x);
  };
  const int begin = bound(blockIdx.x), end = bound(blockIdx.x + 1);
  const int sides = p.epilogue == Epilogue::swiglu ? 2 : 1;
  constexpr int kHeld = kHeldSums / kRows;  // panels
  unsigned char* const ring = memory + warp * (kStages * kPieceBytes);
  auto* const sums = reinterpret_cast<float*>(memory + kRingBytes);
  Integers<kRows> u(p, memory + kRingBytes + kHeldSums * kWarps * kPanelRows * sizeof(float));

  Walk ahead(p, begin, end), walk(p, begin, end);
  const auto copy_next = [&](int slot) {
    if (!ahead.ended()) {
      copy_piece(p, ahead, ptx::shared_address(ring + slot * kPieceBytes));
      ahead.advance();
    }
    ptx::copy_async_commit();
  };
#pragma unroll 1
  for (int slot = 0; slot < kStages; ++slot) copy_next(slot);
  flashgla::cuda::release_next();
  float weights[Integers<kRows>::kHeld];
  u.load_weights(warp, weights);
  flashgla::cuda::wait_for_previous();
  u.make(weights);

  float own[kRows] = {};
  int slot = 0, held = 0;
  for (int unit = begin, side = 0; !walk.ended();) {
    ptx::copy_async_wait<kStages - 1>();
    __syncwarp();
    const unsigned char* const piece = ring + slot * kPieceBytes;
    const Kind kind = walk.layer().kind;
    const int groups = walk.groups();
    if (kind == Kind::q4) {
      add_piece<true>(u, walk.group(), groups, piece, row, half, own);
    } else if (kind == Kind::q8) {
      add_piece<false>(u, walk.group(), groups, piece, row, half, own);
    } else {
      for (int g = 0; g < groups; ++g) {
        const int group = walk.group() + g;
        const auto* const numbers = reinterpret_cast<const uint2*>(piece) + (row * groups + g) * 8;
        add_floats(u, group, p.in - group * static_cast<int>(kGroup), numbers, half, own);
      }
    }
    __syncwarp();
    copy_next(slot);
    if (++slot == kStages) slot = 0;
    if (!walk.advance()) continue;
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const float both = own[n] + __shfl_xor_sync(0xffffffffu, own[n], kPanelRows);
      if (half == 0) sums[((held * kWarps + warp) * static_cast<int>(kPanelRows) + row) * kRows + n] = both;
      own[n] = 0.0f;
    }
    ++held;
    if (++side < sides) continue;
    side = 0;
    ++unit;
    if (held + sides <= kHeld && !walk.ended()) continue;
    __syncthreads();
    finish<kRows>(p, u, sums, unit - held / sides, unit);
    __syncthreads();
    held = 0;
  }
}

template <int kRows>
std::int64_t shared_bytes(std::int64_t groups, std::int64_t heads) {
  return kRingBytes + kHeldSums * kWarps * kPanelRows * 4 + Integers<kRows>::shared_bytes(groups, heads);
}
std::int64_t shared_bytes(std::int64_t rows, std::int64_t groups, std::int64_t heads) {
  return rows == 1   ? shared_bytes<1>(groups, heads)
         : rows == 2 ? shared_bytes<2>(groups, heads)
         : rows <= 4 ? shared_bytes<4>(groups, heads)
                     : shared_bytes<8>(groups, heads);
}

void run_packed(Context& context, const Inputs& inputs, std::span<const Layer> layers, const Options& options) {
  if (context.planning()) return;
  Params p{cuda::params_of(inputs, {}, options, false)};
  p.groups = static_cast<int>((p.in + kGroup - 1) / kGroup);
  for (const Layer& layer : layers) {
    PackedLayer& to = p.packed[p.count++];
    to.weight = static_cast<const unsigned char*>(layer.weight.data);
    to.bias = layer.bias.data;
    to.bias_is_f32 = layer.bias.dtype == DType::f32;
    to.y = layer.y.as<float>();
    to.y_stride = layer.y.stride[0];
    to.out = static_cast<int>(layer.y.size(1));
    to.first_unit = p.units;
    to.kind = layer.weight.dtype == DType::bf16                         ? Kind::bf16
              : quantised_linear::format_of(layer.weight) == Format::q8 ? Kind::q8
                                                                        : Kind::q4;
    p.units += (to.out + static_cast<int>(kPanelRows) - 1) / static_cast<int>(kPanelRows);
  }
  const auto launch = [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    ops::cuda::queue_kernel(context, "linear_step", packed_kernel<kRows>,
                            std::min(p.units, context.architecture().multiprocessors), kThreads,
                            static_cast<int>(shared_bytes<kRows>(p.groups, p.in / p.head_size)), p);
  };
  p.rows == 1   ? launch(std::integral_constant<int, 1>())
  : p.rows == 2 ? launch(std::integral_constant<int, 2>())
  : p.rows <= 4 ? launch(std::integral_constant<int, 4>())
                : launch(std::integral_constant<int, kMostRows>());
}

Support supports(const Problem& problem, const Architecture& architecture) {
  if (problem.dtype != DType::f32) return Support::no("f32 activations only");
  if (problem.weight_dtype != DType::u8) return Support::no("packed weights only");
  if (problem.beside_packed != DType::u8 && problem.beside_packed != DType::bf16) {
    return Support::no("weights in floats beside packed ones are of bf16 only");
  }
  if (!problem.aligned) return Support::no("rows of whole 16-byte vectors only");
  if (!problem.whole_panels) return Support::no("rows of up begin within a panel");
  if (problem.rows > kMostRows) return Support::no("at most 8 rows");
  if (shared_bytes(problem.rows, (problem.in + kGroup - 1) / kGroup, problem.heads) > architecture.shared_memory) {
    return Support::no("the rows do not fit into shared memory");
  }
  return Support::yes();
}

}  // namespace

const Implementation kPackedCuda{"cuda_packed", Device::Kind::cuda, supports, run_packed};

}  // namespace flashgla::ops::linear_step

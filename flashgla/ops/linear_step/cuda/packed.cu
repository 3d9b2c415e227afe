// Few rows of f32 beside packed weights of 8 or 4 bits, and layers of bf16 between them: each weight is read once, and
// the first of them are under way before the kernel ahead has ended.
//
// u becomes 16-bit integers with a scale for each group of 32, as on the CPU (quantised_linear.h), and these a high and
// a low byte, both signed, which tensor cores multiply with weights of one byte (m16n8k32), exactly. A panel is 16 rows
// of the weights, the instruction's M side; of its eight columns two, the high and the low bytes, are a place: beside
// one row of x the four places are four neighbouring groups, each of which meets zeros in the others' places, and
// beside more they are four rows. One block a multiprocessor has a range of panels (with swiglu pairs of them, gate and
// up), all of whose warps share a panel's groups: a warp's lie behind one another in memory, it copies them to shared
// memory some pieces ahead, makes the same groups' integers, and reads only these, so that no barrier stands before its
// sums. Warps' sums meet in shared memory, some panels at a time, and are added in order. A value is one fixed sum
// whatever the number of rows of x.
#include <type_traits>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/base/cuda/ptx_bytes.cuh"
#include "flashgla/ops/cuda/prefer_shared_memory.h"
#include "flashgla/ops/linear_step/cuda/packed_inputs.cuh"
#include "flashgla/ops/quantised_linear/cuda/codes.cuh"

namespace flashgla::ops::linear_step {

namespace {

using namespace packed;
namespace codes = quantised_linear::cuda;
using cuda::load_parameter;

// A warp's pieces of its block's panels, one behind the other, each up to kPieceGroups groups of a panel: what it asks
// for, in bulk, and when that has come. Rows of bf16 are read where they are, and only asked into the L2.
class Pieces {
 public:
  // shared: of the block, shared_bytes.
  __device__ Pieces(const Params& params, unsigned char* shared, int begin, int end)
      : p(params),
        share_(params.groups),
        begin_(begin),
        total_((end - begin) * params.sides * params.parts),
        slots_(shared + static_cast<int>(threadIdx.x) / 32 * params.stages * params.slot_bytes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    arrived_ = ptx::shared_address(shared + kWarps * p.stages * p.slot_bytes) +
               static_cast<int>(threadIdx.x) / 32 * p.stages * 8;
    if (lane_ < p.stages) ptx::mbarrier_init(arrived_ + 8 * lane_, 1);
    ptx::fence_barrier_init();
    __syncwarp();
    ask(lane_, lane_, lane_ < p.stages);
    asked_ = p.stages;
#else
    for (; asked_ < p.stages; ++asked_) ask(asked_, asked_, true);
#endif
  }

  static __host__ __device__ int shared_bytes(int stages, int slot_bytes) {
    return (kWarps * stages * (slot_bytes + 8) + 15) / 16 * 16;
  }

  // Of the warp's part `part` of a panel.
  __device__ __forceinline__ int first_group(int part) const { return share_.first + part * kPieceGroups; }
  __device__ __forceinline__ int groups(int part) const {
    return max(0, min(kPieceGroups, share_.last - first_group(part)));
  }

  // The next piece, once it is there.
  __device__ __forceinline__ const unsigned char* wait() const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::mbarrier_wait(arrived_ + 8 * slot_, parity_);
#else
    ptx::copy_async_wait<0>();
    __syncwarp();
#endif
    return slots_ + slot_ * p.slot_bytes;
  }
  // It has been read: its place is free.
  __device__ __forceinline__ void leave() {
    __syncwarp();
    if (asked_ < total_) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
      ask(asked_, slot_, lane_ == 0);
#else
      ask(asked_, slot_, true);
#endif
      ++asked_;
    }
    if (++slot_ == p.stages) slot_ = 0, parity_ ^= 1;
  }

 private:
  // Asks for piece n: a lane with `asks` by itself, where there are copies in bulk, else all lanes together.
  __device__ __forceinline__ void ask(int n, int slot, bool asks) const {
    if (!asks || n >= total_) return;
    const int panel = n / p.parts, part = n % p.parts, unit = begin_ + panel / p.sides;
    const PackedLayer& layer = p.packed[layer_of(p, unit, 0)];
    const int groups_of_piece = layer.kind == Kind::bf16 ? 0 : groups(part), block = block_bytes(layer.kind);
    const std::int64_t at =
        static_cast<std::int64_t>(panel_of(p, layer, unit, panel % p.sides)) * p.groups + first_group(part);
    const unsigned char* const from = layer.weight + at * block;
    const int bytes = groups_of_piece * block;
    const std::uint32_t to = ptx::shared_address(slots_ + slot * p.slot_bytes);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::mbarrier_arrive_expect(arrived_ + 8 * slot, bytes);
    if (bytes > 0) ptx::copy_bulk(to, from, bytes, arrived_ + 8 * slot);
#else
    for (int i = 16 * lane_; i < bytes; i += 512) ptx::copy_async_16(to + i, from + i);
    ptx::copy_async_commit();
#endif
  }

  const Params& p;
  Share share_;
  int begin_, total_;
  unsigned char* slots_;
  std::uint32_t arrived_ = 0;  // mbarriers of the slots
  int lane_ = static_cast<int>(threadIdx.x) % 32;
  int asked_ = 0, slot_ = 0;
  std::uint32_t parity_ = 0;
};

// Asks a warp's part of the block's rows of bf16 into the L2.
__device__ __forceinline__ void prefetch_floats(const Params& p, int begin, int end) {
  constexpr int kRows = static_cast<int>(kPanelRows);
  const Share share(p.groups);
  const int first = share.first * static_cast<int>(kGroup), last = min(share.last * static_cast<int>(kGroup), p.in);
  for (int panel = 0; panel < (end - begin) * p.sides; ++panel) {
    const int unit = begin + panel / p.sides;
    const PackedLayer& layer = p.packed[layer_of(p, unit, 0)];
    if (layer.kind != Kind::bf16) continue;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = panel_of(p, layer, unit, panel % p.sides) * kRows + lane % kRows;
    if (row >= layer.out * p.sides) continue;
    const unsigned char* const of_row = layer.weight + static_cast<std::int64_t>(row) * p.in * 2;
    for (int i = first + lane / kRows * 64; i < last; i += 128) ptx::prefetch_l2(of_row + i * 2);
  }
}

// A lane's sums of a panel: of its rows 2 (lane / 4) and the next, beside place lane % 4 of each part of a group's rows
// of x. Beside more than one row of x the groups of a four are apart until the panel's end, as places are beside one.
template <int kRows>
struct Sums {
  static constexpr int kParts = (kRows + kPlaces - 1) / kPlaces, kApart = kRows == 1 ? 1 : kPlaces;
  float of[kApart][kParts][2] = {};

  // One of the rows', added up in the same order for any kRows.
  __device__ __forceinline__ float total(int part, int row) const {
    if constexpr (kRows == 1) {
      const float two = of[0][0][row] + __shfl_xor_sync(0xffffffffu, of[0][0][row], 1);
      return two + __shfl_xor_sync(0xffffffffu, two, 2);
    } else {
      return (of[0][part][row] + of[1][part][row]) + (of[2][part][row] + of[3][part][row]);
    }
  }
};

// A lane's part of a group's weights, as the first operand: its two rows in columns 4 j on and 16 + 4 j on, j = lane
// % 4. Of q4 these columns take turns, so u's must too, and the values are sums of two bytes.
template <Kind kKind>
struct Weights {
  static constexpr int kTerms = kKind == Kind::q4 ? 2 : 1;
  std::uint32_t terms[kTerms][4];

  __device__ __forceinline__ explicit Weights(const unsigned char* block) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto* const words = reinterpret_cast<const uint2*>(block + kScaleBytes) + lane % 4 * 8 + lane / 4;
    const uint2 first = words[0];
    if constexpr (kKind == Kind::q4) {
      codes::Terms a = codes::terms_of_q4(first.x), b = codes::terms_of_q4(first.y);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        terms[i][0] = a.front[i], terms[i][1] = b.front[i], terms[i][2] = a.back[i], terms[i][3] = b.back[i];
      }
    } else {
      const uint2 second = words[32];
      terms[0][0] = codes::values_of_q8(first.x), terms[0][1] = codes::values_of_q8(first.y);
      terms[0][2] = codes::values_of_q8(second.x), terms[0][3] = codes::values_of_q8(second.y);
    }
  }

  static __device__ __forceinline__ uint2 order(uint2 u) {
    if constexpr (kKind == Kind::q4) return {__byte_perm(u.x, u.y, 0x5140), __byte_perm(u.x, u.y, 0x7362)};
    return u;
  }
  // Adds products with the places of u.
  __device__ __forceinline__ void multiply(uint2 u, int (&sums)[4]) const {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) ptx::mma_s8(sums, terms[i], u.x, u.y);
  }
};

// A lane's two scales of a group.
__device__ __forceinline__ float2 scales_of(const unsigned char* block) {
  return __half22float2(reinterpret_cast<const __half2*>(block)[static_cast<int>(threadIdx.x) % 32 / 4]);
}

// Adds integers' sums, high and low bytes' of each row.
__device__ __forceinline__ void add_scaled(const int (&sums)[4], float2 scales, float of_u, float (&to)[2]) {
  to[0] = fmaf(scales.x * of_u, static_cast<float>(256 * sums[0] + sums[1]), to[0]);
  to[1] = fmaf(scales.y * of_u, static_cast<float>(256 * sums[2] + sums[3]), to[1]);
}

// Beside one row of x: what a lane has of a piece's groups of u, whichever the panel is.
struct Fours {
  static constexpr int kCount = kPieceGroups / kPlaces;
  uint2 words[kCount][kPlaces];  // of a four's groups: zero but for the one in the lane's place
  float scales[kCount];
  int blocks[kCount];  // where the block of the group that a lane has sums of begins

  template <Kind kKind, class U>
  __device__ __forceinline__ void load(const U& u, int first, int groups) {
    const int lane = static_cast<int>(threadIdx.x) % 32, place = lane % kPlaces;
#pragma unroll
    for (int f = 0; f < kCount; ++f) {
      const int tile = first / kPlaces + f, rest = groups - f * kPlaces;
      const uint2 own = rest > 0 ? Weights<kKind>::order(u.words(tile)) : uint2{0, 0};
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) words[f][i] = lane / 8 == i ? own : uint2{0, 0};
      scales[f] = place < rest ? u.scale(tile) : 0.0f;
      blocks[f] = (place < rest ? f * kPlaces + place : 0) * block_bytes(kKind);
    }
  }
  template <Kind kKind>
  __device__ __forceinline__ void add(const unsigned char* piece, float (&sums)[2]) const {
#pragma unroll
    for (int f = 0; f < kCount; ++f) {
      int own[4] = {};
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        Weights<kKind>(piece + (f * kPlaces + i) * block_bytes(kKind)).multiply(words[f][i], own);
      }
      add_scaled(own, scales_of(piece + blocks[f]), scales[f], sums);
    }
  }
};

// Beside more of them.
template <Kind kKind, class U>
__device__ __forceinline__ void add_piece(const U& u, int first, int groups, const unsigned char* piece,
                                          Sums<U::kRows>& sums) {
#pragma unroll 1
  for (int four = 0; four < groups; four += kPlaces) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (four + i >= groups) break;
      const unsigned char* const block = piece + (four + i) * block_bytes(kKind);
      const Weights<kKind> weights(block);
      const float2 scales = scales_of(block);
#pragma unroll
      for (int part = 0; part < U::kParts; ++part) {
        const int tile = (first + four + i) * U::kParts + part;
        int own[4] = {};
        weights.multiply(Weights<kKind>::order(u.words(tile)), own);
        add_scaled(own, scales, u.scale(tile), sums.of[i][part]);
      }
    }
  }
}

// Two neighbouring signed bytes as bf16.
__device__ __forceinline__ std::uint32_t bf16_of_bytes(std::uint32_t word, int first) {
  return ptx::pack_bf16(static_cast<float>(codes::byte_of(word, first)),
                        static_cast<float>(codes::byte_of(word, first + 1)));
}

// The same of a group of a panel's rows in bf16.
template <class U>
__device__ __forceinline__ void add_floats(const Params& p, const PackedLayer& layer, int panel, const U& u, int group,
                                           Sums<U::kRows>& sums) {
  constexpr int kRows = U::kRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint2 w[2][2] = {};  // of the lane's rows, columns 4 j on and 16 + 4 j on
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = panel * static_cast<int>(kPanelRows) + lane / 4 * 2 + i / 2;
    const int column = group * static_cast<int>(kGroup) + i % 2 * 16 + lane % 4 * 4;
    if (row >= layer.out * p.sides || column >= p.in) continue;
    w[i / 2][i % 2] =
        __ldg(reinterpret_cast<const uint2*>(layer.weight + (static_cast<std::int64_t>(row) * p.in + column) * 2));
  }
#pragma unroll
  for (int part = 0; part < U::kParts; ++part) {
    const int tile = group / U::kGroups * U::kParts + part;
    const uint2 words = u.words(tile);
    const bool meets = kRows > 1 || lane / 8 == group % kPlaces;
    float d[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t a[4] = {w[0][i].x, w[1][i].x, w[0][i].y, w[1][i].y};
      const std::uint32_t bytes = meets ? (i ? words.y : words.x) : 0;
      ptx::mma_bf16(d, a, bf16_of_bytes(bytes, 0), bf16_of_bytes(bytes, 2));
    }
#pragma unroll
    for (int i = 0; i < Sums<kRows>::kApart; ++i) {
      const float scale = kRows == 1 || i == group % kPlaces ? u.scale(tile) : 0.0f;
      float(&to)[2] = sums.of[i][part];
      to[0] = fmaf(scale, fmaf(256.0f, d[0], d[1]), to[0]);
      to[1] = fmaf(scale, fmaf(256.0f, d[2], d[3]), to[1]);
    }
  }
}

// A value of y that a thread finishes: of units from `first` on the one of this index.
template <int kRows>
struct Value {
  int unit, n, row;  // row: of the panel
  const PackedLayer* layer;
  int column;
  bool there;

  __device__ __forceinline__ Value(const Params& p, int first, int end, int index) {
    constexpr int kPanel = static_cast<int>(kPanelRows), kEach = kPanel * kRows;
    unit = first + index / kEach, n = index % kEach / kPanel, row = index % kPanel;
    layer = &p.packed[layer_of(p, unit, 0)];
    column = (unit - layer->first_unit) * kPanel + row;
    there = unit < end && n < p.rows && column < layer->out;
  }
  __device__ __forceinline__ float* y() const { return layer->y + n * layer->y_stride + column; }
};

// What a value needs of memory.
struct Needs {
  float before = 0.0f, bias = 0.0f;

  template <int kRows>
  __device__ __forceinline__ Needs(const Params& p, const Value<kRows>& value) {
    if (!value.there) return;
    if (p.epilogue == Epilogue::add) before = __ldcg(value.y());
    if (value.layer->bias) bias = load_parameter(value.layer->bias, value.layer->bias_is_f32, value.column);
  }
};

// What a block has of some panels: sums [panel, warp, row of x, row of the panel], added and made values of y. value
// and needs: a thread's first.
template <class U>
__device__ __forceinline__ void finish(const Params& p, const U& u, const float* sums, int begin, int end,
                                       Value<U::kRows> value, Needs needs) {
  constexpr int kRows = U::kRows;
  const auto sum_of = [&](int panel) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total += sums[((panel * kWarps + w) * kRows + value.n) * static_cast<int>(kPanelRows) + value.row];
    }
    return total * u.factor(value.n);
  };
  const int values = (end - begin) * static_cast<int>(kPanelRows) * kRows;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < values; index += kThreads) {
    if (index >= kThreads) {
      value = Value<kRows>(p, begin, end, index);
      needs = Needs(p, value);
    }
    if (!value.there) continue;
    const int panel = (value.unit - begin) * p.sides;
    float a = sum_of(panel) + needs.bias;
    switch (p.epilogue) {
      case Epilogue::store:
        break;
      case Epilogue::add:
        a += needs.before;
        break;
      case Epilogue::swiglu:
        a = swish(a) * sum_of(panel + 1);
        break;
      case Epilogue::log_sigmoid:
        a = fmaxf(cuda::log_sigmoid(a) * p.inverse_normalizer, p.clamp_min);
        break;
    }
    *value.y() = a;
  }
}

// Where a block's units begin: all have alike much to do.
__device__ __forceinline__ int first_unit_of(const Params& p, unsigned block) {
  int cost = static_cast<int>(static_cast<unsigned>(p.cost) * block / gridDim.x), unit = 0;
  for (int i = 0; i < p.count; ++i) {
    const int units = (i + 1 < p.count ? p.packed[i + 1].first_unit : p.units) - unit;
    const int each = cost_of_unit(p.packed[i].kind);
    if (cost < units * each) return unit + (cost + each - 1) / each;
    cost -= units * each;
    unit += units;
  }
  return p.units;
}

template <int kRows, bool kByHead, int kTogether>
__global__ void __launch_bounds__(kThreads, 2) packed_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int begin = first_unit_of(p, blockIdx.x), end = first_unit_of(p, blockIdx.x + 1);
  constexpr int kSumsOfPanel = kWarps * kRows * static_cast<int>(kPanelRows);
  Pieces pieces(p, memory, begin, end);
  auto* const sums = reinterpret_cast<float*>(memory + Pieces::shared_bytes(p.stages, p.slot_bytes));
  using U = Integers<kRows, kByHead, kTogether>;
  U u(p, reinterpret_cast<unsigned char*>(sums + p.held * kSumsOfPanel));
  if (p.has_floats) prefetch_floats(p, begin, end);
  flashgla::cuda::release_next();
  typename U::Held inputs[U::kHeld];
  u.prepare(inputs);
  Value<kRows> value(p, begin, end, static_cast<int>(threadIdx.x));
  flashgla::cuda::wait_for_previous();
  u.make(inputs);
  Needs needs(p, value);

  Fours fours;
  int layer = 0, finished = begin;  // units before it are
  Kind loaded = Kind::bf16;         // what fours are loaded for
  for (int unit = begin; unit < end; ++unit) {
    layer = layer_of(p, unit, layer);
    const Kind kind = p.packed[layer].kind;
    for (int side = 0; side < p.sides; ++side) {
      Sums<kRows> own;
#pragma unroll 1
      for (int part = 0; part < p.parts; ++part) {
        const int first = pieces.first_group(part), groups = pieces.groups(part);
        const unsigned char* const piece = pieces.wait();
        if (groups == 0) {  // the warp has none of this part
        } else if (kind == Kind::bf16) {
          const PackedLayer& of = p.packed[layer];
          const int panel = panel_of(p, of, unit, side);
#pragma unroll 2
          for (int g = 0; g < groups; ++g) add_floats(p, of, panel, u, first + g, own);
        } else if constexpr (kRows == 1) {
          const bool fresh = p.parts > 1 || loaded != kind;
          loaded = kind;
          if (kind == Kind::q4) {
            if (fresh) fours.load<Kind::q4>(u, first, groups);
            fours.add<Kind::q4>(piece, own.of[0][0]);
          } else {
            if (fresh) fours.load<Kind::q8>(u, first, groups);
            fours.add<Kind::q8>(piece, own.of[0][0]);
          }
        } else if (kind == Kind::q4) {
          add_piece<Kind::q4>(u, first, groups, piece, own);
        } else {
          add_piece<Kind::q8>(u, first, groups, piece, own);
        }
        pieces.leave();
      }
      float* const of_panel = sums + ((unit - finished) * p.sides + side) * kSumsOfPanel;
#pragma unroll
      for (int part = 0; part < U::kParts; ++part) {
        const float2 both = make_float2(own.total(part, 0), own.total(part, 1));
        const int n = part * kPlaces + (kRows == 1 ? 0 : lane % kPlaces);
        if (kRows == 1 && lane % kPlaces != 0) continue;
        *reinterpret_cast<float2*>(of_panel + (warp * kRows + n) * static_cast<int>(kPanelRows) + lane / 4 * 2) = both;
      }
    }
    if ((unit + 2 - finished) * p.sides <= p.held && unit + 1 < end) continue;
    __syncthreads();
    finish(p, u, sums, finished, unit + 1, value, needs);
    if (unit + 1 == end) break;
    finished = unit + 1;
    value = Value<kRows>(p, finished, end, static_cast<int>(threadIdx.x));
    needs = Needs(p, value);
    __syncthreads();
  }
}

template <class U>
std::int64_t shared_bytes(std::int64_t groups, int stages, int slot_bytes, int held) {
  return Pieces::shared_bytes(stages, slot_bytes) + held * kWarps * U::kRows * kPanelRows * 4 + U::shared_bytes(groups);
}
// The most that a call takes.
std::int64_t shared_bytes(std::int64_t rows, std::int64_t groups) {
  const auto most = [&](auto kRows) {
    return shared_bytes<Integers<kRows, true, 1>>(groups, kLeastStages, kPieceGroups * kBytesOfQ8, most_held(kRows));
  };
  return rows == 1   ? most(std::integral_constant<int, 1>())
         : rows <= 4 ? most(std::integral_constant<int, 4>())
                     : most(std::integral_constant<int, kMostRows>());
}

void run_packed(Context& context, const Inputs& inputs, std::span<const Layer> layers, const Options& options) {
  if (context.planning()) return;
  Params p{cuda::params_of(inputs, {}, options, false)};
  p.groups = static_cast<int>((p.in + kGroup - 1) / kGroup);
  p.sides = options.epilogue == Epilogue::swiglu ? 2 : 1;
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
    const int units = (to.out + static_cast<int>(kPanelRows) - 1) / static_cast<int>(kPanelRows);
    p.units += units;
    p.cost += units * cost_of_unit(to.kind);
    if (to.kind == Kind::bf16) {
      p.has_floats = 1;
    } else {
      p.slot_bytes = std::max(p.slot_bytes, kPieceGroups * block_bytes(to.kind));
    }
  }
  const bool hopper = context.architecture().cuda_capability == 90;
  const int fours = (p.groups + kPlaces - 1) / kPlaces, groups = (fours + kWarps - 1) / kWarps * kPlaces;
  p.parts = (groups + kPieceGroups - 1) / kPieceGroups;
  const auto launch = [&](auto rows, auto by_head, auto together) {
    constexpr int kRows = rows, kTogether = together;
    using U = Integers<kRows, by_head, kTogether>;
    const int most = context.architecture().multiprocessors / kTogether,
              clusters = std::min((p.units + kTogether - 1) / kTogether, most);
    const int blocks = clusters * kTogether;
    const int panels = (p.cost + blocks - 1) / blocks * p.sides;
    p.stages = std::clamp(kRingBytes / (kWarps * p.slot_bytes), kLeastStages, std::max(panels * p.parts, kLeastStages));
    p.held = std::min(most_held(kRows), panels);
    const auto kernel = packed_kernel<kRows, by_head, kTogether>;
    ops::cuda::prefer_shared_memory(reinterpret_cast<const void*>(kernel), "linear_step");
    using flashgla::cuda::Begin;
    flashgla::cuda::launch("linear_step", kernel, {dim3(static_cast<unsigned>(blocks)), kTogether}, kThreads,
                           static_cast<int>(shared_bytes<U>(p.groups, p.stages, p.slot_bytes, p.held)),
                           static_cast<cudaStream_t>(context.stream()),
                           hopper ? Begin::beside_previous : Begin::after_previous, p);
  };
  const auto launch_rows = [&](auto rows, auto together) {
    if (inputs.prologue == Prologue::head_norm) {
      launch(rows, std::true_type(), together);
    } else {
      launch(rows, std::false_type(), together);
    }
  };
  const std::integral_constant<int, 1> one;
  if (p.rows == 1) {
    launch_rows(one, one);
  } else if (p.rows <= kPlaces) {
    launch_rows(std::integral_constant<int, kPlaces>(), one);
  } else if (hopper) {
    launch_rows(std::integral_constant<int, kMostRows>(), std::integral_constant<int, kMostTogether>());
  } else {
    launch_rows(std::integral_constant<int, kMostRows>(), one);
  }
}

Support supports(const Problem& problem, const Architecture& architecture) {
  if (problem.dtype != DType::f32) return Support::no("f32 activations only");
  if (problem.weight_dtype != DType::u8) return Support::no("packed weights only");
  if (problem.beside_packed != DType::u8 && problem.beside_packed != DType::bf16) {
    return Support::no("weights in floats beside packed ones are of bf16 only");
  }
  if (!problem.aligned) return Support::no("rows of whole 16-byte vectors only");
  if (problem.heads > 1 && problem.in / problem.heads % kGroup != 0) return Support::no("heads of whole groups only");
  if (!problem.whole_panels) return Support::no("rows of up begin within a panel");
  if (problem.rows > kMostRows) return Support::no("at most 8 rows");
  if (shared_bytes(problem.rows, (problem.in + kGroup - 1) / kGroup) > architecture.shared_memory) {
    return Support::no("the rows do not fit into shared memory");
  }
  return Support::yes();
}

}  // namespace

const Implementation kPackedCuda{"cuda_packed", Device::Kind::cuda, supports, run_packed};

}  // namespace flashgla::ops::linear_step

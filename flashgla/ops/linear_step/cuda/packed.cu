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
#include "flashgla/ops/linear_step/cuda/packed_inputs.cuh"
#include "flashgla/ops/quantised_linear/cuda/codes.cuh"

namespace flashgla::ops::linear_step {

namespace {

using namespace packed;
namespace codes = quantised_linear::cuda;
using cuda::load_parameter;

// A walk over a warp's groups of the panels that its block has.
class Walk {
 public:
  __device__ Walk(const Params& params, int begin, int end)
      : p(params),
        sides_(params.epilogue == Epilogue::swiglu ? 2 : 1),
        share_(params.groups),
        unit_(begin),
        end_(end),
        group_(share_.first) {
    find_layer();
  }

  __device__ bool ended() const { return unit_ >= end_; }
  __device__ Kind kind() const { return kind_; }
  __device__ int group() const { return group_; }
  __device__ int groups() const { return min(piece_groups(kind_), share_.last - group_); }  // of this piece
  __device__ const PackedLayer& layer() const { return p.packed[layer_]; }
  __device__ int panel() const { return panel_; }
  // Of the weights where they are packed.
  __device__ const unsigned char* piece() const {
    return weight_ + (static_cast<std::int64_t>(panel_) * p.groups + group_) * block_bytes(kind_);
  }
  // To the next piece; true when that begins another panel. A warp without groups has a piece without any a panel.
  __device__ bool advance() {
    group_ += groups();
    if (group_ < share_.last) return false;
    group_ = share_.first;
    panel_ += apart_;
    if (++side_ == sides_) {
      side_ = 0;
      if (++unit_ < end_) find_layer();
    }
    return true;
  }

 private:
  __device__ void find_layer() {
    layer_ = layer_of(p, unit_, layer_);
    const PackedLayer& of = layer();
    kind_ = of.kind, weight_ = of.weight;
    panel_ = unit_ - of.first_unit;
    apart_ = of.out / static_cast<int>(kPanelRows);
  }

  const Params& p;
  int sides_;
  Share share_;
  int unit_, end_, group_, side_ = 0, layer_ = 0;
  // Of the unit's layer, and the panels of gate and up apart.
  Kind kind_ = Kind::q8;
  const unsigned char* weight_ = nullptr;
  int panel_ = 0, apart_ = 0;
};

// A warp's ring of pieces: what it asks for, where it can in bulk, by fewer instructions than lanes' copies, and when
// that has come.
class Ring {
 public:
  // shared: of the block, shared_bytes for so many stages.
  __device__ Ring(const Params& params, unsigned char* shared) : p(params) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    pieces_ = shared + warp * p.stages * kPieceBytes;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    arrived_ = ptx::shared_address(shared + kWarps * p.stages * kPieceBytes + warp * p.stages * 8);
    if (lane_ == 0) {
      for (int slot = 0; slot < p.stages; ++slot) ptx::mbarrier_init(arrived_ + 8 * slot, 1);
      ptx::fence_barrier_init();
    }
    __syncwarp();
#endif
  }

  static __host__ __device__ int shared_bytes(int stages) {
    return (kWarps * stages * (kPieceBytes + 8) + 15) / 16 * 16;
  }

  // Asks for the piece of a walk, into the slot of the oldest one.
  __device__ __forceinline__ void ask(const Walk& walk) {
    const std::uint32_t to = ptx::shared_address(pieces_ + next_ * kPieceBytes);
    if (walk.kind() == Kind::bf16) {
      ask_floats(walk, to);
    } else {
      copy(to, walk.piece(), walk.groups() * block_bytes(walk.kind()));
    }
    if (++next_ == p.stages) next_ = 0;
  }
  // The oldest piece, once it is there.
  __device__ __forceinline__ const unsigned char* piece() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::mbarrier_wait(arrived_ + 8 * slot_, parity_);
#else
    ptx::copy_async_wait<0>();
    __syncwarp();
#endif
    return pieces_ + slot_ * kPieceBytes;
  }
  // It has been read.
  __device__ __forceinline__ void leave() {
    __syncwarp();
    if (++slot_ == p.stages) slot_ = 0, parity_ ^= 1;
  }

 private:
  __device__ __forceinline__ void copy(std::uint32_t to, const unsigned char* from, int bytes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect(arrived_ + 8 * next_, bytes);
      if (bytes > 0) ptx::copy_bulk(to, from, bytes, arrived_ + 8 * next_);
    }
#else
    for (int at = 16 * lane_; at < bytes; at += 512) ptx::copy_async_16(to + at, from + at);
    ptx::copy_async_commit();
#endif
  }
  // Rows one behind the other, a lane's; what lies beyond their columns is zero.
  __device__ __forceinline__ void ask_floats(const Walk& walk, std::uint32_t to) {
    const PackedLayer& layer = walk.layer();
    const int rows = layer.out * (p.epilogue == Epilogue::swiglu ? 2 : 1),
              first = walk.panel() * static_cast<int>(kPanelRows);
    const int column = walk.group() * static_cast<int>(kGroup), all = walk.groups() * static_cast<int>(kGroup) * 2;
    const int bytes = min(all, 2 * (p.in - column)), count = min(static_cast<int>(kPanelRows), rows - first);
    const unsigned char* const from = layer.weight + (static_cast<std::int64_t>(first + lane_) * p.in + column) * 2;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (lane_ == 0) ptx::mbarrier_arrive_expect(arrived_ + 8 * next_, count * bytes);
    if (lane_ < count && bytes > 0) {
      ptx::copy_bulk(to + lane_ * kFloatRowBytes, from, bytes, arrived_ + 8 * next_);
    }
#else
    for (int at = 0; lane_ < count && at < bytes; at += 16) {
      ptx::copy_async_16(to + lane_ * kFloatRowBytes + at, from + at);
    }
    ptx::copy_async_commit();
#endif
    for (int at = bytes; lane_ < count && at < all; at += 16) {
      *reinterpret_cast<uint4*>(pieces_ + next_ * kPieceBytes + lane_ * kFloatRowBytes + at) = uint4{};
    }
    __syncwarp();
  }

  const Params& p;
  unsigned char* pieces_;
  std::uint32_t arrived_ = 0;  // mbarriers of the slots
  int lane_ = static_cast<int>(threadIdx.x) % 32;
  int next_ = 0, slot_ = 0;
  std::uint32_t parity_ = 0;
};

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
  __device__ __forceinline__ void multiply(uint2 u, int (&sums)[kTerms][4]) const {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) ptx::mma_s8(sums[i], terms[i], u.x, u.y);
  }
};

// A lane's two scales of a group.
__device__ __forceinline__ float2 scales_of(const unsigned char* block) {
  return __half22float2(reinterpret_cast<const __half2*>(block)[static_cast<int>(threadIdx.x) % 32 / 4]);
}

// Adds integers' sums, high and low bytes' of each row.
template <int kTerms>
__device__ __forceinline__ void add_scaled(const int (&sums)[kTerms][4], float2 scales, float of_u, float (&to)[2]) {
  int s[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = kTerms == 2 ? sums[0][i] + sums[kTerms - 1][i] : sums[0][i];
  to[0] = fmaf(scales.x * of_u, static_cast<float>(256 * s[0] + s[1]), to[0]);
  to[1] = fmaf(scales.y * of_u, static_cast<float>(256 * s[2] + s[3]), to[1]);
}

// Adds up to four groups' products, from a four's first on.
template <Kind kKind, class U>
__device__ __forceinline__ void add_four(const U& u, int first, int count, const unsigned char* blocks,
                                         Sums<U::kRows>& sums) {
  constexpr int kBytes = block_bytes(kKind), kRows = U::kRows;
  using W = Weights<kKind>;
  if constexpr (kRows == 1) {
    const int lane = static_cast<int>(threadIdx.x) % 32, tile = first / kPlaces;
    const uint2 words = W::order(u.words(tile));
    int own[W::kTerms][4] = {};
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {  // beyond count u is zero
      W(blocks + i * kBytes).multiply(lane / 8 == i ? words : uint2{0, 0}, own);
    }
    float2 scales = scales_of(blocks + lane % kPlaces * kBytes);
    if (lane % kPlaces >= count) scales = make_float2(0.0f, 0.0f);
    add_scaled(own, scales, u.scale(tile), sums.of[0][0]);
  } else {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (i >= count) break;
      const W weights(blocks + i * kBytes);
      const float2 scales = scales_of(blocks + i * kBytes);
#pragma unroll
      for (int part = 0; part < U::kParts; ++part) {
        const int tile = (first + i) * U::kParts + part;
        int own[W::kTerms][4] = {};
        weights.multiply(W::order(u.words(tile)), own);
        add_scaled(own, scales, u.scale(tile), sums.of[i][part]);
      }
    }
  }
}

template <Kind kKind, class U>
__device__ __forceinline__ void add_piece(const U& u, int first, int groups, const unsigned char* piece,
                                          Sums<U::kRows>& sums) {
  constexpr int kFours = piece_groups(kKind) / kPlaces;
  if (groups == piece_groups(kKind)) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      add_four<kKind>(u, first + i * kPlaces, kPlaces, piece + i * kPlaces * block_bytes(kKind), sums);
    }
    return;
  }
#pragma unroll 1
  for (int g = 0; g < groups; g += kPlaces) {
    add_four<kKind>(u, first + g, min(kPlaces, groups - g), piece + g * block_bytes(kKind), sums);
  }
}

// Two neighbouring signed bytes as bf16.
__device__ __forceinline__ std::uint32_t bf16_of_bytes(std::uint32_t word, int first) {
  return ptx::pack_bf16(static_cast<float>(codes::byte_of(word, first)),
                        static_cast<float>(codes::byte_of(word, first + 1)));
}

// The same of a group of rows in bf16, whose 32 numbers of it lie at `numbers`, kFloatRowBytes apart.
template <class U>
__device__ __forceinline__ void add_floats(const U& u, int group, const unsigned char* numbers, Sums<U::kRows>& sums) {
  constexpr int kRows = U::kRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned char* const own = numbers + lane / 4 * 2 * kFloatRowBytes + lane % 4 * 8;
  uint2 w[2][2];  // of the lane's rows, columns 4 j on and 16 + 4 j on
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i / 2][i % 2] = *reinterpret_cast<const uint2*>(own + i / 2 * kFloatRowBytes + i % 2 * 32);
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

// What a block has of some panels: sums [panel, warp, row of x, row of the panel], added and made values of y. needs:
// of a thread's first value.
template <class U>
__device__ __forceinline__ void finish(const Params& p, const U& u, const float* sums, int begin, int end,
                                       Needs needs) {
  constexpr int kRows = U::kRows;
  const int sides = p.epilogue == Epilogue::swiglu ? 2 : 1;
  const auto sum_of = [&](int panel, const Value<kRows>& value) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total += sums[((panel * kWarps + w) * kRows + value.n) * static_cast<int>(kPanelRows) + value.row];
    }
    return total * u.factor(value.n);
  };
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < (end - begin) * static_cast<int>(kPanelRows) * kRows;
       index += kThreads) {
    const Value<kRows> value(p, begin, end, index);
    if (index >= kThreads) needs = Needs(p, value);
    if (!value.there) continue;
    const int panel = (value.unit - begin) * sides;
    float a = sum_of(panel, value) + needs.bias;
    switch (p.epilogue) {
      case Epilogue::store:
        break;
      case Epilogue::add:
        a += needs.before;
        break;
      case Epilogue::swiglu:
        a = swish(a) * sum_of(panel + 1, value);
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
  int cost = static_cast<int>(static_cast<std::int64_t>(p.cost) * block / gridDim.x), unit = 0;
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
  const int sides = p.epilogue == Epilogue::swiglu ? 2 : 1;
  constexpr int kSumsOfPanel = kWarps * kRows * static_cast<int>(kPanelRows);
  Ring ring(p, memory);
  auto* const sums = reinterpret_cast<float*>(memory + Ring::shared_bytes(p.stages));
  using U = Integers<kRows, kByHead, kTogether>;
  U u(p, reinterpret_cast<unsigned char*>(sums + p.held * kSumsOfPanel));

  Walk ahead(p, begin, end), walk(p, begin, end);
  const auto ask_next = [&] {
    if (ahead.ended()) return;
    ring.ask(ahead);
    ahead.advance();
  };
#pragma unroll 1
  for (int i = 0; i < p.stages; ++i) ask_next();
  flashgla::cuda::release_next();
  typename U::Held inputs[U::kHeld];
  u.prepare(inputs);
  flashgla::cuda::wait_for_previous();
  u.make(inputs);

  Needs needs(p, Value<kRows>(p, begin, end, static_cast<int>(threadIdx.x)));

  Sums<kRows> own;
  int held = 0;
  for (int unit = begin, side = 0; !walk.ended();) {
    const unsigned char* const piece = ring.piece();
    const Kind kind = walk.kind();
    const int group = walk.group(), groups = walk.groups();
    if (kind == Kind::q4) {
      add_piece<Kind::q4>(u, group, groups, piece, own);
    } else if (kind == Kind::q8) {
      add_piece<Kind::q8>(u, group, groups, piece, own);
    } else {
      for (int g = 0; g < groups; ++g) add_floats(u, group + g, piece + g * static_cast<int>(kGroup) * 2, own);
    }
    ring.leave();
    ask_next();
    if (!walk.advance()) continue;
#pragma unroll
    for (int part = 0; part < Sums<kRows>::kParts; ++part) {
      const float2 both = make_float2(own.total(part, 0), own.total(part, 1));
      const int n = part * kPlaces + (kRows == 1 ? 0 : lane % kPlaces);
      if (kRows > 1 || lane % kPlaces == 0) {
        *reinterpret_cast<float2*>(sums + held * kSumsOfPanel + (warp * kRows + n) * static_cast<int>(kPanelRows) +
                                   lane / 4 * 2) = both;
      }
    }
    own = {};
    ++held;
    if (++side < sides) continue;
    side = 0;
    ++unit;
    if (held + sides <= p.held && !walk.ended()) continue;
    __syncthreads();
    finish(p, u, sums, unit - held / sides, unit, needs);
    if (walk.ended()) break;
    needs = Needs(p, Value<kRows>(p, unit, end, static_cast<int>(threadIdx.x)));
    __syncthreads();
    held = 0;
  }
}

template <class U>
std::int64_t shared_bytes(std::int64_t groups, int stages, int held) {
  return Ring::shared_bytes(stages) + held * kWarps * U::kRows * kPanelRows * 4 + U::shared_bytes(groups);
}
// The most that a call takes.
std::int64_t shared_bytes(std::int64_t rows, std::int64_t groups) {
  const auto most = [&](auto kRows) {
    return shared_bytes<Integers<kRows, true, 1>>(groups, most_stages(kRows), most_held(kRows));
  };
  return rows == 1   ? most(std::integral_constant<int, 1>())
         : rows <= 4 ? most(std::integral_constant<int, 4>())
                     : most(std::integral_constant<int, kMostRows>());
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
    const int units = (to.out + static_cast<int>(kPanelRows) - 1) / static_cast<int>(kPanelRows);
    p.units += units;
    p.cost += units * cost_of_unit(to.kind);
  }
  const bool hopper = context.architecture().cuda_capability == 90;
  const int fours = (p.groups + kPlaces - 1) / kPlaces, groups = (fours + kWarps - 1) / kWarps * kPlaces;
  const auto launch = [&](auto rows, auto by_head, auto together) {
    constexpr int kRows = rows, kTogether = together;
    using U = Integers<kRows, by_head, kTogether>;
    const int most = context.architecture().multiprocessors / kTogether,
              clusters = std::min((p.units + kTogether - 1) / kTogether, most);
    const int blocks = clusters * kTogether;
    const int panels = (p.cost + blocks - 1) / blocks * (options.epilogue == Epilogue::swiglu ? 2 : 1);
    for (int i = 0; i < p.count; ++i) {
      const int of_panel = (groups + piece_groups(p.packed[i].kind) - 1) / piece_groups(p.packed[i].kind);
      p.stages = std::min(most_stages(kRows), std::max(p.stages, panels * of_panel));
    }
    p.held = std::min(most_held(kRows), panels);
    using flashgla::cuda::Begin;
    flashgla::cuda::launch(
        "linear_step", packed_kernel<kRows, by_head, kTogether>, {dim3(static_cast<unsigned>(blocks)), kTogether},
        kThreads, static_cast<int>(shared_bytes<U>(p.groups, p.stages, p.held)),
        static_cast<cudaStream_t>(context.stream()), hopper ? Begin::beside_previous : Begin::after_previous, p);
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

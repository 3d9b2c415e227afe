// What the kernels of packed weights know of a call, and how they make u's integers (packed.cu).
#pragma once

#include <type_traits>

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/linear_step/cuda/call.cuh"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::ops::linear_step::packed {

using cuda::swish;
using quantised_linear::Format;
using quantised_linear::kGroup;
using quantised_linear::kLargestInteger;
using quantised_linear::kNothing;
using quantised_linear::kPanelRows;
using quantised_linear::kScaleBytes;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMostRows = 8;      // of x
constexpr int kMostTogether = 2;  // blocks that share the making of u, beside many rows
constexpr int kPlaces = 4;        // of a tile, the eight columns of an instruction
constexpr int kPieceGroups = 8;   // of a warp's part of a panel, at most

// Bytes of pieces that are under way in a block, about; the least pieces of a warp; panels whose sums it keeps, at
// most.
constexpr int kRingBytes = 112 * 1024, kLeastStages = 2;
constexpr int most_held(int rows) { return rows == 1 ? 16 : 4; }

enum class Kind : std::uint8_t { q8, q4, bf16 };

// Bytes of a group in a panel,
constexpr int kBytesOfQ8 = static_cast<int>(quantised_linear::block_bytes(Format::q8)),
              kBytesOfQ4 = static_cast<int>(quantised_linear::block_bytes(Format::q4)),
              kBytesOfFloats = static_cast<int>(kPanelRows * kGroup * 2);
__host__ __device__ constexpr int block_bytes(Kind kind) {
  return kind == Kind::q8 ? kBytesOfQ8 : kind == Kind::q4 ? kBytesOfQ4 : kBytesOfFloats;
}

// What a unit takes, in those of packed weights: a block should have one of bf16 alone.
__host__ __device__ constexpr int cost_of_unit(Kind kind) { return kind == Kind::bf16 ? 3 : 1; }

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
  int count;       // of layers
  int units;       // panels, or with swiglu pairs of them
  int cost;        // of all units
  int groups;      // of 32 columns
  int sides;       // panels of a unit
  int parts;       // pieces of a warp's part of a panel
  int stages;      // pieces of a warp that shared memory has room for
  int slot_bytes;  // of a piece, at most
  int has_floats;  // a layer of bf16
  int held;        // panels whose sums it has room for
};

// The layer of a unit that is not before layer `from`'s first.
__device__ __forceinline__ int layer_of(const Params& p, int unit, int from) {
  while (from + 1 < p.count && unit >= p.packed[from + 1].first_unit) ++from;
  return from;
}

// Which of a layer's panels the unit's gate (side 0) or up is.
__device__ __forceinline__ int panel_of(const Params& p, const PackedLayer& layer, int unit, int side) {
  return unit - layer.first_unit + side * (layer.out / static_cast<int>(kPanelRows));
}

// A warp's groups: whole fours of them, but for the last.
struct Share {
  int first, last;

  explicit __device__ __forceinline__ Share(int groups) {
    const int warp = static_cast<int>(threadIdx.x) / 32, fours = (groups + kPlaces - 1) / kPlaces;
    first = fours * warp / kWarps * kPlaces;
    last = min(groups, fours * (warp + 1) / kWarps * kPlaces);
  }
};

// Blocks that send each other what they make of u, until each has all of it.
class Cluster {
 public:
  // arrived: 8 bytes of shared memory; bytes: that a block will be sent, its own ones too.
  __device__ __forceinline__ void begin(unsigned char* arrived, std::uint32_t bytes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    arrived_ = ptx::shared_address(arrived);
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(arrived_, 1);
      ptx::fence_barrier_init();
      ptx::mbarrier_arrive_expect(arrived_, bytes);
    }
    __syncwarp();
    ptx::cluster_arrive();
#endif
  }
  __device__ __forceinline__ void wait_for_begin() const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::cluster_wait();
#endif
  }
  template <class T>
  __device__ __forceinline__ void send(T* place, T value, int block) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     ptx::cluster_address(ptx::shared_address(place), block)),
                 "r"(*reinterpret_cast<const std::uint32_t*>(&value)), "r"(ptx::cluster_address(arrived_, block))
                 : "memory");
#endif
  }
  __device__ __forceinline__ void wait_for_all() const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::mbarrier_wait(arrived_, 0);
#endif
  }

 private:
  std::uint32_t arrived_ = 0;
};

// u in shared memory, as the instruction's second operand: of each tile a lane's two words, and the places' scales. A
// tile is four groups of one row, or a group of four rows; a step is the kParts tiles of a group's rows. A warp makes
// what it multiplies; beside many rows kTogether blocks, a cluster, share that: each makes the steps of its rank for
// all.
template <int kRowsOfX, bool kByHead, int kTogether>
class Integers {
 public:
  static constexpr int kRows = kRowsOfX;
  static constexpr int kGroups = kRows == 1 ? kPlaces : 1;  // of a step
  static constexpr int kParts = (kRows + kPlaces - 1) / kPlaces;
  static constexpr int kSums = kWarps * kTogether;  // of a row's squares

  // What a lane has of some steps, all of which is under way together: eight lanes have a place, each four columns.
  struct Held {
    float4 weights;  // the norm's
    float4 x[kParts], gate[kParts];
  };
  static constexpr int kHeld = kParts > 1 ? 2 : 3;

  __device__ Integers(const Params& params, unsigned char* shared)
      : p(params),
        lane_(static_cast<int>(threadIdx.x) % 32),
        words_(reinterpret_cast<std::uint32_t*>(shared)),
        scales_(reinterpret_cast<float*>(words_ + tiles(params.groups) * 64)),
        squares_(scales_ + tiles(params.groups) * kPlaces) {
    const Share share(p.groups);
    begin_ = share.first / kGroups;
    end_ = (share.last + kGroups - 1) / kGroups;
    if constexpr (kTogether > 1) {
      rank_ = static_cast<int>(blockIdx.x) % kTogether;
      cluster_.begin(reinterpret_cast<unsigned char*>(squares_ + kRows * (kByHead ? p.groups : kSums)),
                     static_cast<std::uint32_t>(bytes_of_all(p.groups)));
    }
  }

  static std::int64_t shared_bytes(std::int64_t groups) { return bytes_of_all(groups) + (kTogether > 1 ? 8 : 0); }

  // What no kernel writes of the warp's first steps.
  __device__ __forceinline__ void prepare(Held (&held)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) load_columns(own_step(i), held[i]);
  }

  // held: prepare's. A warp may then read what it has a share in.
  __device__ __forceinline__ void make(Held (&held)[kHeld]) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) load_rows(own_step(i), held[i]);
    if constexpr (kTogether > 1) cluster_.wait_for_begin();
    float squares[kParts] = {};
#pragma unroll 1
    for (int i = 0; own_step(i) < end_; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        put(own_step(i) * kParts + part, value(held[0], part, squares[part]));
        if constexpr (kByHead) put_squares<8>(squares[part], part, own_step(i) * kGroups, p.groups);
      }
#pragma unroll
      for (int j = 0; j + 1 < kHeld; ++j) held[j] = held[j + 1];
      load_columns(own_step(i + kHeld), held[kHeld - 1]);
      load_rows(own_step(i + kHeld), held[kHeld - 1]);
    }
    if constexpr (!kByHead) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        put_squares<kRows == 1 ? 32 : 8>(squares[part], part, rank_ * kWarps + static_cast<int>(threadIdx.x) / 32,
                                         kSums);
      }
    }
    if constexpr (kTogether > 1) {
      cluster_.wait_for_all();
    } else if constexpr (kByHead) {
      __syncthreads();
    }
    if constexpr (kByHead) scale_by_head();
    __syncwarp();
  }

  // The factor of a row's sums; behind a barrier.
  __device__ __forceinline__ float factor(int row) const { return cuda::factor_of<kSums>(p, squares_, row); }

  // A lane's words: columns 4 j on and 16 + 4 j on of its place's group, j = lane % 4; high bytes, or low ones.
  __device__ __forceinline__ uint2 words(int tile) const {
    return reinterpret_cast<const uint2*>(words_)[tile * 32 + lane_];
  }
  // The scale of place lane % 4, where a lane has sums.
  __device__ __forceinline__ float scale(int tile) const { return scales_[tile * kPlaces + lane_ % kPlaces]; }

 private:
  // Words, scales and squares.
  static __host__ __device__ constexpr std::int64_t bytes_of_all(std::int64_t groups) {
    return tiles(groups) * (256 + kPlaces * 4) + kRows * (kByHead ? groups : kSums) * 4;
  }
  static __host__ __device__ constexpr std::int64_t tiles(std::int64_t groups) {
    return (groups + kGroups - 1) / kGroups * kParts;
  }
  __device__ __forceinline__ int own_step(int i) const { return begin_ + rank_ + kTogether * i; }

  // Writes to its place in shared memory of all blocks that need it.
  template <class T>
  __device__ __forceinline__ void share(T* place, T value) const {
    if constexpr (kTogether == 1) {
      *place = value;
    } else {
#pragma unroll
      for (int block = 0; block < kTogether; ++block) cluster_.send(place, value, block);
    }
  }
  __device__ __forceinline__ int column(int step) const {
    return (step * kGroups + (kRows == 1 ? lane_ / 8 : 0)) * static_cast<int>(kGroup) + lane_ % 8 * 4;
  }
  __device__ __forceinline__ int row(int part) const { return kRows == 1 ? 0 : part * kPlaces + lane_ / 8; }

  __device__ __forceinline__ void load_rows(int step, Held& held) const {
    const int from = column(step);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      held.x[part] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (kByHead && p.gate) held.gate[part] = held.x[part];
      if (step >= end_ || from >= p.in || row(part) >= p.rows) continue;
      held.x[part] = __ldcg(reinterpret_cast<const float4*>(p.x + row(part) * p.x_stride + from));
      if (kByHead && p.gate) {
        held.gate[part] = __ldcg(reinterpret_cast<const float4*>(p.gate + row(part) * p.gate_stride + from));
      }
    }
  }

  __device__ __forceinline__ void load_columns(int step, Held& held) const {
    int from = column(step);
    held.weights = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    if (!p.norm_weight || step >= end_ || from >= p.in) return;
    if constexpr (kByHead) from %= p.head_size;
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = cuda::load_parameter(p.norm_weight, p.norm_is_f32, from + i);
    held.weights = make_float4(w[0], w[1], w[2], w[3]);
  }

  // squares: those of x are added.
  __device__ __forceinline__ float4 value(const Held& held, int part, float& squares) const {
    float4 v = held.x[part];
    squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    v.x *= held.weights.x, v.y *= held.weights.y, v.z *= held.weights.z, v.w *= held.weights.w;
    if (kByHead && p.gate) {
      const float4 gate = held.gate[part];
      v.x *= swish(gate.x), v.y *= swish(gate.y), v.z *= swish(gate.z), v.w *= swish(gate.w);
    }
    return v;
  }

  // What so many neighbouring lanes have of a row's squares, to place `at` of so many a row, or the one of the lanes'
  // group behind it.
  template <int kLanes>
  __device__ __forceinline__ void put_squares(float& squares, int part, int at, int of_row) const {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    }
    if (kByHead && kRows == 1) at += lane_ / 8;
    if (lane_ % kLanes == 0 && at < of_row) share(squares_ + row(part) * of_row + at, squares);
    squares = 0.0f;
  }

  // The factors of heads, which are whole groups, go to the scales of the warp's groups.
  __device__ __forceinline__ void scale_by_head() const {
    const int groups = (p.head_size + static_cast<int>(kGroup) - 1) / static_cast<int>(kGroup);
    for (int i = begin_ * kParts * kPlaces + lane_; i < end_ * kParts * kPlaces; i += 32) {
      const int place = i % kPlaces, tile = i / kPlaces, group = kRows == 1 ? i : tile / kParts;
      const int row = kRows == 1 ? 0 : tile % kParts * kPlaces + place;
      if (group >= p.groups || row >= p.rows) continue;
      const float* const squares = squares_ + row * p.groups + group / groups * groups;
      float total = 0.0f;
#pragma unroll 8
      for (int g = 0; g < groups; ++g) total += squares[g];
      scales_[i] *= rsqrtf(total / static_cast<float>(p.head_size) + p.epsilon);
    }
  }

  // A lane's four numbers of a group. What is not finite gives a scale that is not.
  __device__ __forceinline__ void put(int tile, float4 four) const {
    constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    const float v[4] = {four.x, four.y, four.z, four.w};
    std::uint32_t top = 0;  // of magnitudes; NaN above all
#pragma unroll
    for (const float each : v) top = max(top, __float_as_uint(each) & 0x7fffffffu);
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, distance));
    const float largest = __uint_as_float(top);
    // kLargestInteger / largest: the scale's reciprocal, which is far from what f32 cannot hold, and what it misses.
    const bool counts = !(largest < kNothing);
    const float scale = counts ? largest * (1.0f / kLargestInteger) : 0.0f;
    const float near = ops::cuda::reciprocal(scale);
    const float inverse =
        counts ? fmaf(fmaf(-near, largest, kLargestInteger), near * (1.0f / kLargestInteger), near) : 0.0f;
    std::uint32_t numbers[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) numbers[i] = __float_as_uint(__fadd_rn(__fmul_rn(v[i], inverse), kToInteger));
    // 16 bits each. Byte 0, signed, and byte 1 of what is 128 above add up to the number.
    const std::uint32_t front = __byte_perm(numbers[0], numbers[1], 0x5410),
                        back = __byte_perm(numbers[2], numbers[3], 0x5410);
    constexpr std::uint32_t kLess = 0x80008000u, k128 = 0x00800080u;  // of 16 bits each: the least number, 128
    const std::uint32_t high =
        __byte_perm(__viaddmax_s16x2(front, k128, kLess), __viaddmax_s16x2(back, k128, kLess), 0x7531);
    const std::uint32_t low = __byte_perm(front, back, 0x6420);
    const int quad = lane_ % 8;
    std::uint32_t* const to = words_ + tile * 64 + lane_ / 8 * 16 + quad % 4 * 2 + quad / 4;
    share(to, high);
    share(to + 8, low);
    if (quad == 0) share(scales_ + tile * kPlaces + lane_ / 8, scale);
  }

  const Params& p;
  Cluster cluster_;
  int lane_, rank_ = 0, begin_, end_;  // of the warp's steps
  std::uint32_t* words_;
  float* scales_;
  float* squares_;  // of x: [row, kSums], or with heads [row, group]
};

}  // namespace flashgla::ops::linear_step::packed

// Few rows, f32 in and out, weights in bf16 or f32: each weight is read from memory once, and the first of them are
// under way before the kernel ahead has ended (they are nobody's output), so that the memory does not rest between
// kernels of a token.
//
// One block a multiprocessor has a range of rows of the weights. A warp sums a group of them at a time over all of I,
// by itself: two rows, or four beside many rows of x; with swiglu half of them are of the gate and half the ones of up
// that belong to them. A piece is four vectors of 16 bytes a lane. Each lane copies its own vectors to shared memory,
// kStages pieces ahead and across the ends of groups, and reads only these, so that no barrier stands between a copy
// and its use. A value is one fixed sum whatever the number of rows of x. u lies in shared memory in f32, in planes of
// four consecutive elements of each vector, so that lanes beside each other read without bank conflicts; every block
// makes it once, from L2.
//
// Where heads are turned (rotary), half of a group's rows are channels j of a head and half the ones at j + K/2; the
// sines and cosines of a block's groups lie in shared memory before its first sum is there.
#include <type_traits>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/linear_step/cuda/call.cuh"

namespace flashgla::ops::linear_step {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 5;    // pieces of a warp that are under way
constexpr int kMostRows = 4;  // of x
constexpr int kPiece = 4;     // vectors of a lane in a piece
constexpr int kPieceBytes = kPiece * kThreads * 16;

// Rows of the weights in a group, beside so many rows of x.
constexpr int group_rows(int rows) { return rows > 2 ? 4 : 2; }

using cuda::LayerParams;
using cuda::load_parameter;
using cuda::swish;

struct Params : cuda::Params {
  int groups_of_first;  // groups of layers[0]; the rest are layers[1]'s
  int groups;
  int pieces;        // of a group
  int stages;        // pieces of a warp that shared memory has room for
  int angle_floats;  // room of what Turns has in shared memory
};

// A 16-byte vector of weights: 8 of bf16, or 4 of f32.
template <class W>
struct Vector;
template <>
struct Vector<__nv_bfloat16> {
  static constexpr int kElements = 8;
  static __device__ __forceinline__ void unpack(uint4 raw, float (&w)[8]) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = ptx::unpack_bf16(words[i]);
      w[2 * i] = pair.x;
      w[2 * i + 1] = pair.y;
    }
  }
};
template <>
struct Vector<float> {
  static constexpr int kElements = 4;
  static __device__ __forceinline__ void unpack(uint4 raw, float (&w)[4]) {
    w[0] = __uint_as_float(raw.x), w[1] = __uint_as_float(raw.y);
    w[2] = __uint_as_float(raw.z), w[3] = __uint_as_float(raw.w);
  }
};

// Where element i of a row of u lies: plane (i / 4) % planes, place i / (4 planes), in fours.
template <int kPlanes>
__device__ __forceinline__ int place_of(int i, int in) {
  const int four = i / 4;
  return (four % kPlanes * (in / (4 * kPlanes)) + four / kPlanes) * 4 + i % 4;
}

// Makes u. The factor that rms_norm gives to a whole row is left to the sums.
template <int kRows, int kPlanes>
class InputMaker {
 public:
  // shared: shared_floats of it.
  __device__ InputMaker(const Params& params, float* shared)
      : p(params), u_(shared), weights_(shared + kRows * p.in), deviations_(weights_ + (p.norm_weight ? p.in : 0)) {}

  static std::int64_t shared_floats(std::int64_t in, std::int64_t heads, bool weighted) {
    return (kRows + (weighted ? 1 : 0)) * in + kRows * std::max<std::int64_t>(heads, kWarps);
  }

  __device__ const float* u() const { return u_; }

  // What no kernel writes: the norm's weights, laid out as u. A thread reads what it wrote.
  __device__ void load_weights() {
    if (!p.norm_weight) return;
    for (int four = threadIdx.x; four < p.in / 4; four += kThreads) {
      float w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[j] = load_parameter(p.norm_weight, p.norm_is_f32, (4 * four + j) % p.head_size);
      }
      *reinterpret_cast<float4*>(weights_ + place_of<kPlanes>(4 * four, p.in)) = make_float4(w[0], w[1], w[2], w[3]);
    }
  }

  // Ends with a barrier.
  __device__ void run() {
    const bool by_head = p.prologue == Prologue::head_norm;
    float squares[kRows] = {};
    for (int first = static_cast<int>(threadIdx.x); first - static_cast<int>(threadIdx.x) < p.in / 4;
         first += kHeld * kThreads) {
      float4 x[kHeld][kRows], gate[kHeld][kRows];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
          x[j][n] = load(p.x, p.x_stride, first + j * kThreads, n);
          if (p.gate) gate[j][n] = load(p.gate, p.gate_stride, first + j * kThreads, n);
        }
      }
      if (by_head && first < kThreads) cuda::find_deviations<kWarps>(p, deviations_);
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int four = first + j * kThreads;
        if (four >= p.in / 4) break;
        const int place = place_of<kPlanes>(4 * four, p.in);
        float4 weight = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        if (p.norm_weight) weight = *reinterpret_cast<const float4*>(weights_ + place);
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
          float4 v = x[j][n];
          if (p.prologue == Prologue::rms_norm) squares[n] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
          if (by_head) scale_by_head(v, 4 * four, n);
          v.x *= weight.x, v.y *= weight.y, v.z *= weight.z, v.w *= weight.w;
          if (p.gate) {
            const float4 g = gate[j][n];
            v.x *= swish(g.x), v.y *= swish(g.y), v.z *= swish(g.z), v.w *= swish(g.w);
          }
          *reinterpret_cast<float4*>(u_ + n * p.in + place) = v;
        }
      }
    }
    if (p.prologue != Prologue::rms_norm) {
      __syncthreads();
      return;
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const float sum = flashgla::cuda::warp_sum(squares[n]);
      if (threadIdx.x % 32 == 0) deviations_[n * kWarps + threadIdx.x / 32] = sum;
    }
    __syncthreads();
  }

  // The factor of a row's sums.
  __device__ float factor(int row) const { return cuda::factor_of<kWarps>(p, deviations_, row); }

 private:
  static constexpr int kHeld = kRows == 1 ? 6 : kRows == 2 ? 3 : 2;  // fours of a row that a thread loads at once

  __device__ __forceinline__ float4 load(const float* from, std::int64_t stride, int four, int n) const {
    if (four >= p.in / 4 || n >= p.rows) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return __ldcg(reinterpret_cast<const float4*>(from + n * stride) + four);
  }

  __device__ __forceinline__ void scale_by_head(float4& v, int i, int n) const {
    const float* of_row = deviations_ + n * (p.in / p.head_size);
    const int head = i / p.head_size;
    if (p.head_size % 4 == 0) {
      const float r = of_row[head];
      v.x *= r, v.y *= r, v.z *= r, v.w *= r;
    } else {
      v.x *= of_row[head], v.y *= of_row[(i + 1) / p.head_size];
      v.z *= of_row[(i + 2) / p.head_size], v.w *= of_row[(i + 3) / p.head_size];
    }
  }

  const Params& p;
  float *u_, *weights_;
  float* deviations_;  // of heads; with rms_norm the warps' sums of squares
};

// The rows of the weights that make a group. kTurns: some of the call's groups are turned.
template <int kGroup, bool kTurns>
struct RowsOfGroup {
  static constexpr int kPairs = kGroup / 2;

  __device__ __forceinline__ RowsOfGroup(const Params& p, int group)
      : layer(&p.layers[group >= p.groups_of_first ? 1 : 0]),
        paired(p.epilogue == Epilogue::swiglu),
        first((group >= p.groups_of_first ? group - p.groups_of_first : group) * (paired ? kPairs : kGroup)) {}
  // `place`: what place_of says.
  __device__ __forceinline__ RowsOfGroup(const Params& p, int group, int place)
      : layer(&p.layers[group >= p.groups_of_first ? 1 : 0]),
        paired(false),
        first(place >> 1),
        apart(place & 1 ? p.half : kPairs) {}
  // Column 0's column of y, doubled, and one more where the group is turned: what takes a division.
  static __device__ __forceinline__ int place_of(const Params& p, int group) {
    const int index = RowsOfGroup(p, group).first, pair = index / 2;
    const bool turned = index < RowsOfGroup(p, group).layer->turned;
    return turned ? 2 * (pair + pair / p.half * p.half) + 1 : 2 * index;
  }

  // Column of y of the r-th; it is there when it is less than layer->out.
  __device__ __forceinline__ int column(int r) const {
    if constexpr (kTurns) return first + r % kPairs + (r >= kPairs ? apart : 0);
    return first + (paired ? r % kPairs : r);
  }
  __device__ __forceinline__ int row(int r) const { return column(r) + (paired && r >= kPairs ? layer->out : 0); }

  const LayerParams* layer;
  bool paired;
  int first, apart = kPairs;  // of turned groups the two halves' distance
};

// Of a block with groups that are turned, in shared memory: where its groups' rows are, and cosines and sines of their
// angles, [row of x, group, pair].
template <int kRows, int kGroup>
class Turns {
 public:
  using Rows = RowsOfGroup<kGroup, true>;

  // Of a block of so many groups, in whole vectors.
  static int shared_floats(int groups) { return (2 * kRows * groups * kPairs + groups + 3) / 4 * 4; }

  // begin, end: the block's groups. Ends with a barrier.
  __device__ __forceinline__ Turns(const Params& params, float* shared, int begin, int end)
      : p(params),
        angles_(reinterpret_cast<float2*>(shared)),
        places_(reinterpret_cast<int*>(angles_ + kRows * (end - begin) * kPairs)),
        begin_(begin),
        groups_(end - begin) {
    for (int i = threadIdx.x; i < groups_; i += kThreads) places_[i] = Rows::place_of(p, begin_ + i);
    __syncthreads();
  }

  __device__ __forceinline__ Rows rows(int group) const { return {p, group, places_[group - begin_]}; }
  __device__ __forceinline__ bool turned(int group) const { return (places_[group - begin_] & 1) != 0; }

  // Leaves in each angle's place how many turns a token is; a thread reads what it wrote.
  __device__ __forceinline__ void put_turns() const {
#pragma unroll 1
    for (int item = threadIdx.x; item < items(); item += kThreads) {
      const int place = places_[item / kPairs % groups_], channel = ((place >> 1) + item % kPairs) % p.half;
      const double turns = (place & 1) != 0 ? cuda::turns_of_token(p, channel) : 0.0;
      angles_[item] = make_float2(__int_as_float(__double2hiint(turns)), __int_as_float(__double2loint(turns)));
    }
  }
  // The position of the thread's first angle, asked for early.
  __device__ __forceinline__ int load_position() const { return position_of(threadIdx.x); }
  // Ends with a barrier.
  __device__ __forceinline__ void put_angles(int position) const {
#pragma unroll 1
    for (int item = threadIdx.x; item < items(); item += kThreads) {
      const float2 words = angles_[item];
      angles_[item] = cuda::angle_at(position, __hiloint2double(__float_as_int(words.x), __float_as_int(words.y)));
      position = position_of(item + kThreads);
    }
    __syncthreads();
  }

  __device__ __forceinline__ float2 angle(int n, int group, int r) const {
    return angles_[(n * groups_ + group - begin_) * kPairs + r % kPairs];
  }

 private:
  static constexpr int kPairs = kGroup / 2;

  __device__ __forceinline__ int items() const { return p.rows * groups_ * kPairs; }
  __device__ __forceinline__ int position_of(int item) const {
    const int n = item / (groups_ * kPairs);
    return p.positions != nullptr && n < p.rows ? __ldcg(p.positions + n) : 0;
  }

  const Params& p;
  float2* angles_;
  int* places_;  // of groups: RowsOfGroup::place_of
  int begin_, groups_;
};

// Where nothing is turned.
template <int kGroup>
struct NoTurns {
  using Rows = RowsOfGroup<kGroup, false>;
  const Params& p;

  __device__ __forceinline__ NoTurns(const Params& params, float*, int, int) : p(params) {}
  __device__ __forceinline__ Rows rows(int group) const { return {p, group}; }
};

// Sums of each of M values over a warp, by the same tree whatever M is; of value i at lanes 32 i / M to
// 32 (i + 1) / M - 1.
template <int M>
__device__ __forceinline__ float sums_over_lanes(float (&v)[M], int lane) {
  int count = M;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    if (count > 1) {
      count /= 2;
      const bool upper = (lane & distance) != 0;
#pragma unroll
      for (int i = 0; i < M / 2; ++i) {
        if (i >= count) break;
        const float kept = upper ? v[i + count] : v[i], sent = upper ? v[i] : v[i + count];
        v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, distance);
      }
    } else {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], distance);
    }
  }
  return v[0];
}

template <class W, int kRows, bool kTurns>
__global__ void __launch_bounds__(kThreads, 2) stream_kernel(const __grid_constant__ Params p) {
  using V = Vector<W>;
  constexpr int kPlanes = V::kElements / 4;
  constexpr int kGroup = group_rows(kRows), kAhead = kPiece / kGroup;  // vectors of a row in a lane's piece
  constexpr int kSums = kGroup * kRows, kLanesOfSum = 32 / kSums;
  extern __shared__ uint4 ring[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int vectors = p.in / V::kElements;
  const auto bound = [&](unsigned block) {
    return static_cast<int>(static_cast<std::int64_t>(p.groups) * block / gridDim.x);
  };
  const int first = bound(blockIdx.x), begin = first + warp, end = bound(blockIdx.x + 1);
  auto* const room = reinterpret_cast<float*>(ring + p.stages * kPiece * kThreads);
  const std::conditional_t<kTurns, Turns<kRows, kGroup>, NoTurns<kGroup>> turns(p, room, first, end);

  // What is copied next: this lane's first vectors of the rows of a group (null beyond the last row), and the piece.
  int next_group = begin, next_piece = 0;
  const uint4* next_rows[kGroup];
  const auto begin_group = [&] {
    if (next_group >= end) return;
    const auto rows = turns.rows(next_group);
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      next_rows[r] = rows.column(r) < rows.layer->out ? static_cast<const uint4*>(rows.layer->weight) +
                                                            static_cast<std::int64_t>(rows.row(r)) * vectors + lane
                                                      : nullptr;
    }
  };
  // This lane's vectors of the next piece, into its places of a slot.
  const auto copy_piece = [&](int slot) {
    if (next_group < end) {
      const int first_vector = next_piece * kAhead * 32;
      const auto places = ptx::shared_address(ring + slot * kPiece * kThreads + thread);
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
#pragma unroll
        for (int s = 0; s < kAhead; ++s) {
          if (first_vector + s * 32 + lane >= vectors || next_rows[r] == nullptr) continue;
          ptx::copy_async_16(places + (r * kAhead + s) * kThreads * 16, next_rows[r] + first_vector + s * 32);
        }
      }
      if (++next_piece == p.pieces) {
        next_piece = 0, next_group += kWarps;
        begin_group();
      }
    }
    ptx::copy_async_commit();
  };
  begin_group();
#pragma unroll 1
  for (int slot = 0; slot < kStages; ++slot) copy_piece(slot);
  InputMaker<kRows, kPlanes> inputs(p, room + p.angle_floats);
  flashgla::cuda::release_next();
  inputs.load_weights();
  if constexpr (kTurns) turns.put_turns();
  flashgla::cuda::wait_for_previous();
  int position = 0;
  if constexpr (kTurns) position = turns.load_position();
  inputs.run();
  if constexpr (kTurns) turns.put_angles(position);
  const float* const u = inputs.u();

  // The value that this lane finishes, with its neighbours: of row n of x.
  const int n_of_lane = lane / kLanesOfSum / kGroup, r_of_lane = lane / kLanesOfSum % kGroup;
  const float factor = inputs.factor(n_of_lane);
  float sums[kSums] = {};
  float before = 0.0f, bias = 0.0f;  // what it needs of memory, asked for early
  // Adds the products of a lane's vectors `at` of the group's rows.
  const auto add_products = [&](const uint4(&raw)[kPiece], int s, int at) {
    float w[kGroup][V::kElements];
#pragma unroll
    for (int r = 0; r < kGroup; ++r) V::unpack(raw[r * kAhead + s], w[r]);
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const float4 four = *reinterpret_cast<const float4*>(u + n * p.in + 4 * (plane * vectors + at));
        const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int r = 0; r < kGroup; ++r) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[n * kGroup + r] = fmaf(v[j], w[r][4 * plane + j], sums[n * kGroup + r]);
        }
      }
    }
  };
  int slot = 0;
  float* y = nullptr;  // null: this lane finishes no value of the group
  for (int group = begin, piece = 0; group < end;) {
    if (piece == 0) {
      const auto rows = turns.rows(group);
      const int column = rows.column(r_of_lane);
      y = nullptr;
      if (n_of_lane < p.rows && column < rows.layer->out) {
        y = rows.layer->y + n_of_lane * rows.layer->y_stride + column;
        if (p.epilogue == Epilogue::add) before = __ldcg(y);
        bias = rows.layer->bias ? load_parameter(rows.layer->bias, rows.layer->bias_is_f32, column) : 0.0f;
      }
    }
    ptx::copy_async_wait<kStages - 1>();
    uint4 raw[kPiece];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) raw[i] = ring[(slot * kPiece + i) * kThreads + thread];
    copy_piece(slot);
    const int first_vector = piece * kAhead * 32;
    if (first_vector + kAhead * 32 <= vectors) {  // for all lanes
#pragma unroll
      for (int s = 0; s < kAhead; ++s) add_products(raw, s, first_vector + s * 32 + lane);
    } else {
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (first_vector + s * 32 + lane < vectors) add_products(raw, s, first_vector + s * 32 + lane);
      }
    }
    if (++piece == p.pieces) {
      float a = sums_over_lanes(sums, lane) * factor + bias;
#pragma unroll
      for (float& each : sums) each = 0.0f;
      const float other = __shfl_xor_sync(0xffffffffu, a, kGroup / 2 * kLanesOfSum);  // the row that it is paired with
      switch (p.epilogue) {
        case Epilogue::store:
          if constexpr (kTurns) {
            if (turns.turned(group)) {
              const float2 angle = turns.angle(n_of_lane, group, r_of_lane);
              a = a * angle.x + (r_of_lane >= kGroup / 2 ? other : -other) * angle.y;
            }
          }
          break;
        case Epilogue::add:
          a += before;
          break;
        case Epilogue::swiglu:
          a = swish(a) * other;
          break;
        case Epilogue::log_sigmoid:
          a = fmaxf(cuda::log_sigmoid(a) * p.inverse_normalizer, p.clamp_min);
          break;
      }
      const bool writes = lane % kLanesOfSum == 0 && !(p.epilogue == Epilogue::swiglu && r_of_lane >= kGroup / 2);
      if (y != nullptr && writes) *y = a;
      piece = 0, group += kWarps;
    }
    if (++slot == kStages) slot = 0;
  }
}

template <class W, int kRows, bool kTurns>
void launch(Context& context, Params p) {
  const int columns = group_rows(kRows) / (p.epilogue == Epilogue::swiglu ? 2 : 1);  // of y in a group
  for (const LayerParams& layer : p.layers) {
    p.groups += (layer.out + columns - 1) / columns;
    if (&layer == p.layers) p.groups_of_first = p.groups;
  }
  const int blocks = std::min(p.groups, context.architecture().multiprocessors);
  if (blocks == 0) return;
  constexpr int kAhead = kPiece / group_rows(kRows);
  p.pieces = (p.in / Vector<W>::kElements + 32 * kAhead - 1) / (32 * kAhead);
  const int groups_of_warp = ((p.groups + blocks - 1) / blocks + kWarps - 1) / kWarps;
  p.stages = static_cast<int>(std::min<std::int64_t>(kStages, std::int64_t{p.pieces} * groups_of_warp));
  if (kTurns) p.angle_floats = Turns<kRows, group_rows(kRows)>::shared_floats((p.groups + blocks - 1) / blocks);
  const std::int64_t floats =
      InputMaker<kRows, Vector<W>::kElements / 4>::shared_floats(p.in, p.in / p.head_size, p.norm_weight != nullptr) +
      p.angle_floats;
  ops::cuda::queue_kernel(context, "linear_step", stream_kernel<W, kRows, kTurns>, blocks, kThreads,
                          p.stages * kPieceBytes + static_cast<int>(floats) * 4, p);
}

template <class W>
void launch_rows(Context& context, const Params& p) {
  const auto of = [&](auto turns) {
    constexpr bool kTurns = decltype(turns)::value;
    p.rows == 1   ? launch<W, 1, kTurns>(context, p)
    : p.rows == 2 ? launch<W, 2, kTurns>(context, p)
                  : launch<W, kMostRows, kTurns>(context, p);
  };
  p.half > 0 ? of(std::true_type()) : of(std::false_type());
}

void run_stream(Context& context, const Inputs& inputs, std::span<const Layer> layers, const Options& options) {
  if (context.planning()) return;
  const Params p{cuda::params_of(inputs, layers, options, options.rotary.head_size % kStreamCuda.turns == 0)};
  const bool bf16 = layers[0].weight.dtype == DType::bf16;
  bf16 ? launch_rows<__nv_bfloat16>(context, p) : launch_rows<float>(context, p);
}

Support supports(const Problem& problem, const Architecture& architecture) {
  if (problem.dtype != DType::f32) return Support::no("f32 activations only");
  if (problem.weight_dtype == DType::u8) return Support::no("packed weights are for the CPU");
  if (problem.layers > 2) return Support::no("more than two layers");
  if (!problem.aligned) return Support::no("rows of whole 16-byte vectors only");
  if (problem.rows > kMostRows) return Support::no("at most 4 rows: more are faster as a matrix product");
  const std::int64_t rows = problem.rows > 2 ? kMostRows : problem.rows;
  // Most groups of a block, and so what it may turn.
  const std::int64_t groups = problem.columns / (group_rows(static_cast<int>(rows)) * architecture.multiprocessors) + 2;
  const std::int64_t angles = (rows * group_rows(static_cast<int>(rows)) + 1) * groups + 4;
  const std::int64_t shared =
      kStages * kPieceBytes + ((rows + 1) * problem.in + rows * (problem.heads + kWarps) + angles) * 4;
  if (shared > architecture.shared_memory) return Support::no("the rows do not fit into shared memory");
  return Support::yes();
}

}  // namespace

const Implementation kStreamCuda{"cuda_stream", Device::Kind::cuda, supports, run_stream, 4};

}  // namespace flashgla::ops::linear_step

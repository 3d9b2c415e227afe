// What both ways of the convolution with state_space behind it share (convolved.cu). A warp walks through a chunk of
// time with 32 neighbouring vectors of 8 channels, of which 8 lanes have a head's; the inputs before a token, which the
// convolution looks back at, are in registers. Tokens come by fours through shared memory, in which every lane has
// places of its own, so that nothing waits for other warps. Of each four, a head's lanes make dt: lane i of token i
// % 4.
#pragma once

#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/copy_ahead.cuh"
#include "flashgla/ops/cuda/lines.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/state_space/cuda/softplus.cuh"

namespace flashgla::ops::state_space::cuda {

using bf16 = __nv_bfloat16;
using flashgla::cuda::kWarp;
using flashgla::cuda::to_float;
using ops::cuda::Lines;

constexpr int kChannels = 4;  // of a lane
using Channels = flashgla::cuda::Vector<bf16, kChannels>;
constexpr int kHeadChannels = 64, kHeadLanes = kHeadChannels / kChannels;
constexpr int kWidth = 4, kPast = kWidth - 1;         // of the convolution
constexpr int kTogether = 4;                          // tokens
constexpr int kWarps = 4, kThreads = kWarps * kWarp;  // of a block

constexpr float kLog2OfE = 1.44269504f, kLn2 = 0.69314718f;

// A parameter of f32 or bf16, or zeros where it is absent.
struct Parameter {
  const void* data = nullptr;
  bool wide = true;

  Parameter() = default;
  explicit Parameter(const TensorView& view) : data(view.data), wide(view.dtype == DType::f32) {}

  __device__ __forceinline__ float at(int i) const {
    if (data == nullptr) return 0.0f;
    return wide ? static_cast<const float*>(data)[i] : to_float(static_cast<const bf16*>(data)[i]);
  }
  // Neighbours from i on, a multiple of kChannels; data as aligned as they are.
  __device__ __forceinline__ void load(int i, float (&out)[kChannels]) const {
    if (data == nullptr) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) out[c] = 0.0f;
    } else if (wide) {
      const auto vector = flashgla::cuda::Vector<float, kChannels>::load(static_cast<const float*>(data) + i);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) out[c] = vector[c];
    } else {
      const auto vector = Channels::load(static_cast<const bf16*>(data) + i);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) out[c] = vector[c];
    }
  }
};

// What every kernel of a call knows. A line is one row of the batch: one sequence, or with cu_seqlens all of them.
struct Call {
  int lines, length, chunk, chunks;  // tokens of a chunk, a multiple of kTogether; chunks of a line
  int inner, states, heads;
  std::int64_t sequences;
  const void* cu_seqlens;
  bool wide_boundaries;  // i64
  Parameter weight, bias, dt_bias, a_log, skip;

  __host__ __device__ __forceinline__ int channels() const { return inner + 2 * states; }
  __host__ __device__ __forceinline__ int slices() const {
    return (channels() + kWarp * kChannels - 1) / (kWarp * kChannels);
  }
  std::int64_t warps() const { return std::int64_t{lines} * chunks * slices(); }
  std::int64_t blocks() const { return (warps() + kWarps - 1) / kWarps; }

  __device__ __forceinline__ std::int64_t boundary(std::int64_t n) const {
    return wide_boundaries ? static_cast<const std::int64_t*>(cu_seqlens)[n]
                           : static_cast<const std::int32_t*>(cu_seqlens)[n];
  }
};

// A warp's part of a call, and the lane's in it. A lane behind the last channel goes along with nothing of its own.
struct Part {
  int chunk, line, begin, end;  // begin, end: tokens
  int lane, at, h;              // at: its first channel; 0 where it is not there
  bool there, of_head;

  __device__ __forceinline__ explicit Part(const Call& call) {
    // Of lane 0, so that the compiler knows that all lanes have the same.
    const int of_block = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
    const int warp = static_cast<int>(blockIdx.x) * kWarps + of_block;
    chunk = warp / call.slices();
    const int slice = warp - chunk * call.slices();
    const bool inside = chunk < call.lines * call.chunks;  // else a warp behind the last
    if (!inside) chunk = 0;
    line = chunk / call.chunks;
    begin = (chunk - line * call.chunks) * call.chunk;
    end = !inside ? begin : begin + call.chunk < call.length ? begin + call.chunk : call.length;
    lane = static_cast<int>(threadIdx.x) % kWarp;
    const int channel = (slice * kWarp + lane) * kChannels;
    there = inside && channel < call.channels();
    of_head = inside && channel < call.inner;
    at = there ? channel : 0;
    h = of_head ? channel / kHeadChannels : 0;
  }
};

// Copies of kTensors tensors' tokens into shared memory, kGroups groups of kTogether under way or in use at a time.
template <int kTensors, int kGroups>
struct Ahead {
  static constexpr int kPlace = kThreads * Channels::kBytes;
  static constexpr int kBytes = kGroups * kTogether * kTensors * kPlace;
  unsigned char* shared;

  __device__ __forceinline__ unsigned char* place(int group, int token, int tensor) const {
    const int slot = kGroups == 2 ? group & 1 : group % kGroups;
    return shared + ((slot * kTogether + token) * kTensors + tensor) * kPlace + threadIdx.x * Channels::kBytes;
  }
  // Zeros where it is not there.
  __device__ __forceinline__ void begin_copy(int group, int token, int tensor, const bf16* from, bool there) const {
    const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(place(group, token, tensor)));
    static_assert(Channels::kBytes == 8);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0) : "memory");
  }
  __device__ __forceinline__ Channels read(int group, int token, int tensor) const {
    return Channels::load(reinterpret_cast<const bf16*>(place(group, token, tensor)));
  }
};

// How far tokens, asked for in their order, are behind the first of their sequence: in a line of several alone.
class Sequences {
 public:
  __device__ __forceinline__ Sequences(const Call&, int, std::false_type) {}
  __device__ __forceinline__ Sequences(const Call& call, int token, std::true_type)
      : n_(ops::cuda::sequence_at(call, token)) {
    find(call);
  }
  // Tokens behind the line are of no sequence.
  __device__ __forceinline__ int behind(const Call& call, int token) {
    while (token >= end_ && token < call.length) {
      ++n_;
      find(call);
    }
    return token - begin_;
  }

 private:
  __device__ __forceinline__ void find(const Call& call) {
    begin_ = static_cast<int>(call.boundary(n_)), end_ = static_cast<int>(call.boundary(n_ + 1));
  }
  std::int64_t n_ = 0;
  int begin_ = 0, end_ = 0;
};

// Which of the last inputs, oldest first, are of a token's sequence; without kPacked all.
template <bool kPacked>
struct Looks {
  int behind = kPast;

  __device__ __forceinline__ Looks(Sequences& sequences, const Call& call, int token) {
    if constexpr (kPacked) behind = sequences.behind(call, token);
  }
  // x, or zero where input j is of another one.
  __device__ __forceinline__ float at(int j, float x) const { return !kPacked || behind >= kPast - j ? x : 0.0f; }
};

using ops::cuda::reciprocal;

// The filter and bias of a lane's channels times -log2(e), so that z comes as the power of two that SiLU needs, and the
// last inputs, oldest first.
struct Convolving {
  float weight[kWidth][kChannels], bias[kChannels], window[kPast][kChannels];

  // As before the part's first token; a line has zeros in front.
  __device__ __forceinline__ Convolving(const Call& call, const Lines<const bf16>& x, const Part& part) {
    float flat[kWidth][kChannels];  // as they lie
#pragma unroll
    for (int j = 0; j < kWidth; ++j) call.weight.load(part.at * kWidth + j * kChannels, flat[j]);
    call.bias.load(part.at, bias);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      bias[c] *= -kLog2OfE;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int i = c * kWidth + j;
        weight[j][c] = -kLog2OfE * flat[i / kChannels][i % kChannels];
      }
    }
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      const int token = part.begin - kPast + j;
      const Channels vector = token >= 0 ? Channels::load(x.at(part.line, token, part.at)) : Channels::zero();
#pragma unroll
      for (int c = 0; c < kChannels; ++c) window[j][c] = vector[c];
    }
  }

  // z of channel c, whose next input is x.
  template <bool kPacked>
  __device__ __forceinline__ float convolved(const Looks<kPacked>& looks, float x, int c) const {
    float z = fmaf(weight[kPast][c], x, bias[c]);
#pragma unroll
    for (int j = 0; j < kPast; ++j) z = fmaf(weight[j][c], looks.at(j, window[j][c]), z);
    return z;
  }
  __device__ __forceinline__ void advance(float x, int c) {
#pragma unroll
    for (int j = 0; j + 1 < kPast; ++j) window[j][c] = window[j + 1][c];
    window[kPast - 1][c] = x;
  }
};

}  // namespace flashgla::ops::state_space::cuda

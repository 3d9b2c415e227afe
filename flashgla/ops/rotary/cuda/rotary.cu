// A block turns a fixed number of pairs of vectors, of as many tokens as these are, or of a part of one token's heads.
// It asks for all of them first; while they come it makes the sines and cosines of its tokens' angles.
#include <algorithm>

#include "flashgla/ops/cuda/division.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/rotary/implementations.h"

namespace flashgla::ops::rotary {

namespace {

using cuda::Division;
using flashgla::cuda::Vector;

constexpr int kThreads = 256;
constexpr int kPairs = 2;                                // of a thread
constexpr int kManyBlocks = 1024;                        // they come in several waves
constexpr int kMostHalf = 512;                           // K/2
constexpr int kMostAngles = 4096;                        // of a block: tokens * K/2
constexpr double kInverseTurn = 0.15915494309189533577;  // 1 / (2 pi)

// Block i has part i % parts of group i / parts; groups are of so many tokens of one row of the batch.
struct Call {
  const std::int32_t* positions;  // null: zeros
  const std::int32_t* bounds;     // null: sequences are rows
  std::int64_t length;            // T
  int sequences, tokens_per_block;
  Division parts, groups;         // of a group; of a row
  Division pairs, vectors, half;  // of a token; of half a head; K/2
  double log2_base;
  float sign;
};

// A tensor [B,T,H,K], its last dimension contiguous.
template <class T>
struct Heads {
  T* data;
  std::int64_t row_stride, token_stride, head_stride;

  explicit Heads(const TensorView& view)
      : data(static_cast<T*>(view.data)),
        row_stride(view.stride[0]),
        token_stride(view.stride[1]),
        head_stride(view.stride[2]) {}
  __device__ __forceinline__ T* at(std::int64_t row, std::int64_t token) const {
    return data + row * row_stride + token * token_stride;
  }
};

// The position of token t of batch row b.
__device__ __forceinline__ std::int64_t position_of(const Call& call, std::int64_t b, std::int64_t t) {
  std::int64_t n = b, begin = 0;
  if (call.bounds != nullptr) {
    std::int64_t low = 0, high = call.sequences;  // bounds[low] <= t < bounds[high]
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (call.bounds[middle] <= t ? low : high) = middle;
    }
    n = low;
    begin = call.bounds[low];
  }
  return (call.positions != nullptr ? call.positions[n] : 0) + t - begin;
}

// What angles grow by from a position to the next, in turns, of all K/2 pairs of channels.
__device__ __forceinline__ void make_turns(const Call& call, double* turns) {
  const auto half = static_cast<int>(call.half.by);
  for (int j = threadIdx.x; j < half; j += kThreads) {
    turns[j] = kInverseTurn * exp2(-call.log2_base * static_cast<double>(j) / static_cast<double>(half));
  }
}

// Cosines and sines of `tokens` tokens from `first` on of a row, to angles[token][j].
__device__ __forceinline__ void make_angles(const Call& call, std::int64_t row, std::int64_t first, int tokens,
                                            float2* angles, const double* turns) {
  const auto half = static_cast<int>(call.half.by);
  for (int i = threadIdx.x; i < tokens * half; i += kThreads) {
    const auto token = static_cast<int>(call.half.of(i));
    // Whole turns go in f64; what is left is exact enough in f32.
    const double turn = static_cast<double>(position_of(call, row, first + token)) * turns[i - token * half];
    float sine, cosine;
    sincospif(2.0f * static_cast<float>(turn - rint(turn)), &sine, &cosine);
    angles[i] = make_float2(cosine, call.sign * sine);
  }
  __syncthreads();
}

// y may be x: a thread writes what it alone has read. Shared memory: turns, then angles. Where few blocks all wait for
// the kernel before, turns are made meanwhile; where there are many, while their loads are on their way.
template <int N, class T>
__global__ void __launch_bounds__(kThreads) rotary_kernel(Call call, Heads<T> x, Heads<T> y) {
  flashgla::cuda::release_next_of_waves();
  extern __shared__ __align__(16) unsigned char shared[];
  const auto half = static_cast<int>(call.half.by);
  auto* turns = reinterpret_cast<double*>(shared);
  const bool few = gridDim.x < kManyBlocks;
  if (few) make_turns(call, turns);
  const std::uint32_t group = call.parts.of(blockIdx.x), part = blockIdx.x - group * call.parts.by,
                      row = call.groups.of(group);
  const std::int64_t first = std::int64_t{group - row * call.groups.by} * call.tokens_per_block;
  const std::int64_t left = call.length - first;
  const int tokens = static_cast<int>(left < call.tokens_per_block ? left : call.tokens_per_block);
  flashgla::cuda::wait_for_previous();
  const T* from = x.at(row, first);
  int token[kPairs], head[kPairs], column[kPairs];
  Vector<T, N> a[kPairs], b[kPairs];
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const std::uint32_t pair = (part * kPairs + k) * kThreads + threadIdx.x, above = call.pairs.of(pair),
                        rest = pair - above * call.pairs.by, which = call.vectors.of(rest);
    token[k] = static_cast<int>(above), head[k] = static_cast<int>(which);
    column[k] = static_cast<int>(rest - which * call.vectors.by) * N;
    if (token[k] < tokens) {
      const T* at = from + token[k] * x.token_stride + head[k] * x.head_stride + column[k];
      a[k] = Vector<T, N>::load(at), b[k] = Vector<T, N>::load(at + half);
    }
  }
  auto* angles = reinterpret_cast<float2*>(turns + half);
  if (!few) make_turns(call, turns);
  __syncthreads();
  make_angles(call, row, first, tokens, angles, turns);
  T* to = y.at(row, first);
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    if (token[k] >= tokens) continue;
    const float2* angle = angles + token[k] * half + column[k];
    float low[N], high[N];
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float2 turned = angle[e];
      low[e] = a[k][e] * turned.x - b[k][e] * turned.y;
      high[e] = b[k][e] * turned.x + a[k][e] * turned.y;
    }
    T* at = to + token[k] * y.token_stride + head[k] * y.head_stride + column[k];
    Vector<T, N>::of(low).store(at);
    Vector<T, N>::of(high).store(at + half);
  }
}

template <int N, class T>
void queue(Context& context, const TensorView& x, const TensorView& positions, const TensorView& cu_seqlens,
           double base, Direction direction, const TensorView& y) {
  constexpr std::int64_t kEach = kThreads * kPairs;
  const auto divide_up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const auto division = [](std::int64_t by) { return Division(static_cast<std::uint32_t>(by)); };
  const std::int64_t length = x.size(1), half = x.size(3) / 2, pairs = x.size(2) * (half / N);
  const std::int64_t tokens =
      std::clamp<std::int64_t>(std::min<std::int64_t>(kEach / pairs, kMostAngles / half), 1, length);
  const std::int64_t parts = divide_up(pairs, kEach), groups = divide_up(length, tokens);
  const Call call{
      .positions = positions ? positions.as<std::int32_t>() : nullptr,
      .bounds = cu_seqlens ? cu_seqlens.as<std::int32_t>() : nullptr,
      .length = length,
      .sequences = static_cast<int>(sequences_of(x, cu_seqlens)),
      .tokens_per_block = static_cast<int>(tokens),
      .parts = division(parts),
      .groups = division(groups),
      .pairs = division(pairs),
      .vectors = division(half / N),
      .half = division(half),
      .log2_base = std::log2(base),
      .sign = direction == Direction::forward ? 1.0f : -1.0f,
  };
  const auto shared = static_cast<int>(half * sizeof(double) + tokens * half * sizeof(float2));
  cuda::queue_kernel(context, "rotary", rotary_kernel<N, T>, x.size(0) * groups * parts, kThreads, shared, call,
                     Heads<T>(x), Heads<T>(y));
}

void run_cuda(Context& context, const TensorView& x, const TensorView& positions, const TensorView& cu_seqlens,
              double base, Direction direction, const TensorView& y) {
  if (x.numel() == 0) return;
  cuda::with_element(x.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int N = flashgla::cuda::kVectorOf<T>;
    const bool whole = x.size(3) / 2 % N == 0 && cuda::are_aligned({&x, &y}, N);
    (whole ? queue<N, T> : queue<1, T>)(context, x, positions, cu_seqlens, base, direction, y);
  });
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             if (problem.channels > 2 * kMostHalf) return Support::no("takes at most 1024 channels");
                             return supports_f32_and_bf16({problem.dtype});
                           },
                           run_cuda};

}  // namespace flashgla::ops::rotary

// A block takes some tokens: sines and cosines of all their angles go to shared memory once, for every head.
#include <algorithm>

#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/rotary/implementations.h"

namespace flashgla::ops::rotary {

namespace {

using cuda::Operand;
using flashgla::cuda::Vector;

constexpr int kThreads = 256;
constexpr int kMostHalf = 512;                           // K/2
constexpr int kMostAngles = 4096;                        // of a block: tokens * K/2
constexpr int kMostTokens = 8;                           // of a block
constexpr double kInverseTurn = 0.15915494309189533577;  // 1 / (2 pi)

struct Call {
  const std::int32_t* positions;  // null: zeros
  const std::int32_t* bounds;     // null: sequences are rows
  std::int64_t tokens;            // B T
  std::int64_t length;            // T
  int sequences, heads, half, tokens_per_block;
  double log2_base;
  float sign;
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

template <int N, class T>
__global__ void __launch_bounds__(kThreads) rotary_kernel(Call call, Operand<T> x, Operand<T> y) {
  __shared__ double turns[kMostHalf];  // of one token
  __shared__ float2 angles[kMostAngles];
  for (int j = threadIdx.x; j < call.half; j += kThreads) {
    turns[j] = kInverseTurn * exp2(-call.log2_base * static_cast<double>(j) / static_cast<double>(call.half));
  }
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * call.tokens_per_block;
  const int tokens =
      static_cast<int>(call.tokens - first < call.tokens_per_block ? call.tokens - first : call.tokens_per_block);
  for (int i = threadIdx.x; i < tokens * call.half; i += kThreads) {
    const std::int64_t token = first + i / call.half;
    const std::int64_t p = position_of(call, token / call.length, token % call.length);
    // Whole turns go in f64; what is left is exact enough in f32.
    const double turn = static_cast<double>(p) * turns[i % call.half];
    float sine, cosine;
    sincospif(2.0f * static_cast<float>(turn - rint(turn)), &sine, &cosine);
    angles[i] = make_float2(cosine, call.sign * sine);
  }
  __syncthreads();
  const int vectors = call.half / N, each = call.heads * vectors;
  for (int i = threadIdx.x; i < tokens * each; i += kThreads) {
    const int token = i / each, head = i % each / vectors, j = i % vectors * N;
    const std::int64_t row = (first + token) * call.heads + head;
    const Vector<T, N> a = x.template load<N>(row, j), b = x.template load<N>(row, j + call.half);
    const float2* angle = angles + token * call.half + j;
    float low[N], high[N];
#pragma unroll
    for (int e = 0; e < N; ++e) {
      low[e] = a[e] * angle[e].x - b[e] * angle[e].y;
      high[e] = b[e] * angle[e].x + a[e] * angle[e].y;
    }
    y.template store<N>(row, j, low);
    y.template store<N>(row, j + call.half, high);
  }
}

template <int N, class T>
void queue(Context& context, const Call& call, const TensorView& x, const TensorView& y) {
  const std::int64_t blocks = (call.tokens + call.tokens_per_block - 1) / call.tokens_per_block;
  cuda::queue_kernel(context, "rotary", rotary_kernel<N, T>, blocks, kThreads, 0, call, Operand<T>(x), Operand<T>(y));
}

void run_cuda(Context& context, const TensorView& x, const TensorView& positions, const TensorView& cu_seqlens,
              double base, Direction direction, const TensorView& y) {
  if (x.numel() == 0) return;
  const std::int64_t half = x.size(3) / 2;
  const Call call{
      .positions = positions ? positions.as<std::int32_t>() : nullptr,
      .bounds = cu_seqlens ? cu_seqlens.as<std::int32_t>() : nullptr,
      .tokens = x.size(0) * x.size(1),
      .length = x.size(1),
      .sequences = static_cast<int>(cu_seqlens ? cu_seqlens.size(0) - 1 : x.size(0)),
      .heads = static_cast<int>(x.size(2)),
      .half = static_cast<int>(half),
      .tokens_per_block = static_cast<int>(std::min<std::int64_t>(kMostTokens, kMostAngles / half)),
      .log2_base = std::log2(base),
      .sign = direction == Direction::forward ? 1.0f : -1.0f,
  };
  cuda::with_element(x.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int N = flashgla::cuda::kVectorOf<T>;
    if (half % N == 0 && cuda::are_aligned({&x, &y}, N)) return queue<N, T>(context, call, x, y);
    queue<1, T>(context, call, x, y);
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

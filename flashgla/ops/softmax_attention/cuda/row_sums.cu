// What the backward's kernels need of each row.
#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/softmax_attention/cuda/call.cuh"

namespace flashgla::ops::softmax_attention::cuda {

namespace {

using flashgla::cuda::Vector;
namespace house = flashgla::ops::cuda;

constexpr int kThreads = 256;
constexpr int kTeam = 8;  // threads a row

// Grid: 32 tokens of one head a block, blocks by tokens first.
template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(Strided o, Strided d_o, const float* lse, RowSums sums, int channels) {
  flashgla::cuda::wait_for_previous();
  constexpr int kRows = kThreads / kTeam;
  const int blocks = (sums.length + kRows - 1) / kRows;
  const int pair = blockIdx.x / blocks, lane = threadIdx.x % kTeam;
  const int token = blockIdx.x % blocks * kRows + threadIdx.x / kTeam;
  const int batch = pair / sums.heads, head = pair % sums.heads;
  float total = 0.0f;
  if (token < sums.length) {
    const T* a = o.at<T>(batch, token, head);
    const T* b = d_o.at<T>(batch, token, head);
    for (int c = lane * N; c < channels; c += kTeam * N) {
      const Vector<T, N> x = Vector<T, N>::load(a + c), y = Vector<T, N>::load(b + c);
#pragma unroll
      for (int i = 0; i < N; ++i) total += x[i] * y[i];
    }
  }
#pragma unroll
  for (int distance = kTeam / 2; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(0xffffffffu, total, distance);
  }
  if (lane != 0 || token >= sums.length) return;
  const std::int64_t at = sums.at(batch, head, token);
  sums.delta[at] = total;
  sums.lse2[at] = kLog2E * lse[(static_cast<std::int64_t>(batch) * sums.length + token) * sums.heads + head];
}

}  // namespace

RowSums row_sums(Context& context, const Inputs& in, const Outputs& out, const TensorView& d_o) {
  const Shape shape({in.q.size(0), in.q.size(2), in.q.size(1)});
  RowSums sums;
  sums.lse2 = context.scratch().tensor(shape, DType::f32, "attention: sums of rows").as<float>();
  sums.delta = context.scratch().tensor(shape, DType::f32, "attention: sums of rows").as<float>();
  sums.heads = static_cast<int>(shape[1]);
  sums.length = static_cast<int>(shape[2]);
  if (context.planning() || shape.numel() == 0) return sums;
  const int channels = static_cast<int>(in.v.size(3));
  const std::int64_t blocks = (shape[2] + kThreads / kTeam - 1) / (kThreads / kTeam) * shape[0] * shape[1];
  house::with_element(in.q.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int N = flashgla::cuda::kVectorOf<T>;
    const auto queue = [&](auto* kernel) {
      house::queue_kernel(context, "softmax_attention sums of rows", kernel, blocks, kThreads, 0, Strided(out.o),
                          Strided(d_o), out.lse.as<float>(), sums, channels);
    };
    if (channels % N == 0 && house::are_aligned({&out.o, &d_o}, N)) return queue(row_sums_kernel<N, T>);
    queue(row_sums_kernel<1, T>);
  });
  return sums;
}

}  // namespace flashgla::ops::softmax_attention::cuda

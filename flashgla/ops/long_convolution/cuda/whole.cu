#include <algorithm>

#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/long_convolution/cuda/whole.cuh"
#include "flashgla/ops/long_convolution/cuda/whole.h"

namespace flashgla::ops::long_convolution {

namespace {

using bf16 = __nv_bfloat16;

constexpr const char* kName = "long_convolution";

// Each fills a multiprocessor.
std::int64_t blocks_at_once(const Context& context) { return context.architecture().multiprocessors; }

template <int R, bool kPlain>
void queue_kernels(const Context& context, const cuda::WholeCall& whole, uint4* spectra) {
  const std::int64_t groups = whole.x.channels / cuda::kUnitChannels;
  const std::int64_t items = whole.x.channels / cuda::WholeShape<R>::kTogether;
  using ops::cuda::queue_kernel;
  queue_kernel(context, kName, cuda::units_kernel<R, kPlain, false>, groups * cuda::unit_rows<R, false>(whole),
               cuda::kUnitThreads, 0, whole);
  const auto kernel = whole.gradients ? cuda::whole_kernel<R, true> : cuda::whole_kernel<R, false>;
  queue_kernel(context, kName, kernel, std::min(blocks_at_once(context), items), cuda::kWholeThreads,
               cuda::WholeMemory<R>::kBytes, whole, spectra);
  queue_kernel(context, kName, cuda::units_kernel<R, kPlain, true>, groups * cuda::unit_rows<R, true>(whole),
               cuda::kUnitThreads, 0, whole);
}

cuda::Units units_of(Context& context, std::int64_t lines, std::int64_t channels, std::int64_t points) {
  const auto take = [&](std::int64_t floats) {
    return context.scratch().tensor(Shape({lines, channels, floats}), DType::f32, "long_convolution: units").data;
  };
  return {static_cast<uint4*>(take(points / 2)), static_cast<float*>(take(points / 256)), channels};
}

}  // namespace

void queue_whole(Context& context, const cuda::Call<bf16>& call, std::int64_t longest, const TensorView& from,
                 const TensorView& to, bool gradients) {
  const ArenaScope scope(context.scratch());
  const auto go = [&](auto shape) {
    constexpr int R = decltype(shape)::value;
    constexpr std::int64_t kAcross = cuda::kUnitChannels, kPoints = cuda::WholeShape<R>::kPoints;
    const std::int64_t channels = (call.channels + kAcross - 1) / kAcross * kAcross;
    const cuda::Units filter = units_of(context, 1, channels, kPoints),
                      x = units_of(context, call.lines, channels, kPoints);
    const Shape spectra({blocks_at_once(context), 4 * cuda::kWholeSpectrum});
    auto* spectrum =
        static_cast<uint4*>(context.scratch().tensor(spectra, DType::f32, "long_convolution: filters").data);
    if (context.planning()) return;
    const cuda::WholeCall whole{call, ops::cuda::Lines<bf16>(from), ops::cuda::Lines<bf16>(to), filter, x, gradients};
    const bool plain = call.channels % kAcross == 0 && call.positions == nullptr &&
                       reinterpret_cast<std::uintptr_t>(call.filter) % 16 == 0 &&
                       ops::cuda::are_aligned({&from, &to}, 8);
    plain ? queue_kernels<R, true>(context, whole, spectrum) : queue_kernels<R, false>(context, whole, spectrum);
  };
  if (longest <= 4096) return go(std::integral_constant<int, 1>());
  if (longest <= 8192) return go(std::integral_constant<int, 2>());
  if (longest <= 16384) return go(std::integral_constant<int, 4>());
  go(std::integral_constant<int, 8>());
}

}  // namespace flashgla::ops::long_convolution

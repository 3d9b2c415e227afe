// The device's ceilings: a copy of memory, products of bf16 matrices that never leave the chip, powers of two, an empty
// kernel.
#include <string>

#include "bench/benches.h"
#include "bench/cuda/ceilings.h"
#include "flashgla/base/cuda/check.h"
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/base/tensor.h"
#include "flashgla/ops/cuda/math.cuh"

namespace flashgla::bench {

namespace {

constexpr int kThreads = 128;   // four warps: one warpgroup
constexpr int kBlocksEach = 2;  // on a multiprocessor
constexpr int kSteps = 8;       // products of 64 x 128 x 16 between loop tests
constexpr int kIterations = 1 << 12;
constexpr double kBlockFlops = 2.0 * 64 * 128 * 16 * kSteps * kIterations;

// Normal numbers of either sign around 1: zeros would draw less power and run faster than data does.
__device__ __forceinline__ std::uint32_t some_bf16_pair(std::uint32_t seed) {
  const std::uint32_t x = (seed + 1) * 2654435761u, y = x ^ (x >> 15);
  return 0x3f803f80u | (y & 0x807f807fu);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// d (64 x 128, f32) += a (64 x 16, registers) b (128 x 16, shared memory, K inner).
__device__ __forceinline__ void multiply(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b) {
#define FLASHGLA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLASHGLA_SIXTEEN(i) FLASHGLA_FOUR(i), FLASHGLA_FOUR(i + 4), FLASHGLA_FOUR(i + 8), FLASHGLA_FOUR(i + 12)
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
      "%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : FLASHGLA_SIXTEEN(0), FLASHGLA_SIXTEEN(16), FLASHGLA_SIXTEEN(32), FLASHGLA_SIXTEEN(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#undef FLASHGLA_SIXTEEN
#undef FLASHGLA_FOUR
}

__device__ __forceinline__ float multiply_all(const std::uint32_t (&a)[4], std::uint32_t tiles) {
  float d[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) d[i] = 0.0f;
  for (int n = 0; n < kIterations; ++n) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      // Tiles of 4 KiB without swizzle: 8 x 16-byte matrices, 128 bytes apart along K and 256 along N.
      const std::uint32_t address = tiles + step % 4 * 4096;
      const std::uint64_t b = static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | (8ull << 16) | (16ull << 32);
      multiply(d, a, b);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 64; ++i) sum += d[i];
  return sum;
}

#else

__device__ __forceinline__ float multiply_all(const std::uint32_t (&a)[4], std::uint32_t) {
  float d[16][4] = {};
  std::uint32_t b[2] = {some_bf16_pair(threadIdx.x + 7), some_bf16_pair(threadIdx.x + 11)};
  for (int n = 0; n < kIterations; ++n) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 16; ++i) ptx::mma_bf16(d[i], a, b[0], b[1]);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
  return sum;
}

#endif

__global__ void __launch_bounds__(kThreads) multiply_kernel(float* sums) {
  __shared__ __align__(1024) std::uint32_t tiles[4 * 1024];
  for (int i = threadIdx.x; i < 4 * 1024; i += kThreads) tiles[i] = some_bf16_pair(i);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::fence_async_proxy();
#endif
  __syncthreads();
  const std::uint32_t a[4] = {some_bf16_pair(threadIdx.x), some_bf16_pair(threadIdx.x + 1000),
                              some_bf16_pair(threadIdx.x + 2000), some_bf16_pair(threadIdx.x + 3000)};
  sums[blockIdx.x * kThreads + threadIdx.x] = multiply_all(a, ptx::shared_address(tiles));
}

constexpr int kPowerThreads = 1024, kPowers = 8 * (1 << 12);  // of a thread

__global__ void __launch_bounds__(kPowerThreads) power_kernel(float* sums) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(threadIdx.x + 32 * i) * 0x1p-10f;
  for (int n = 0; n < kPowers / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = ops::cuda::power_of_two(-x[i]);
  }
  sums[blockIdx.x * kPowerThreads + threadIdx.x] = x[0] + x[1] + x[2] + x[3] + x[4] + x[5] + x[6] + x[7];
}

__global__ void empty_kernel() {}

testing::BenchRow row(const char* operation, const char* implementation, std::string problem) {
  testing::BenchRow result;
  result.operation = operation;
  result.implementation = implementation;
  result.problem = std::move(problem);
  return result;
}

}  // namespace

Card describe_card(Device device) {
  cudaDeviceProp card{};
  cuda::check(cudaGetDeviceProperties(&card, device.index), "cudaGetDeviceProperties");
  int driver = 0, runtime = 0;
  cuda::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  cuda::check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  const auto version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  return {std::string(card.name) + ", compute capability " + std::to_string(card.major) + "." +
              std::to_string(card.minor) + ", " + std::to_string(card.multiProcessorCount) + " multiprocessors, " +
              std::to_string(card.totalGlobalMem >> 30) + " GiB",
          "CUDA " + version(driver) + " by the driver, " + version(runtime) + " in this program"};
}

std::vector<testing::BenchRow> measure_cuda_ceilings(const testing::BenchOptions& options) {
  Context context(options.device, options.threads);
  auto* stream = static_cast<cudaStream_t>(context.stream());
  std::vector<testing::BenchRow> rows;

  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  const Tensor from = Tensor::zeros(Shape({kBytes}), DType::u8, options.device);
  const Tensor to = Tensor::empty(Shape({kBytes}), DType::u8, options.device);
  rows.push_back(row(kCopyCeiling, "cudaMemcpy", "1 GiB read and written"));
  rows.back().bytes = 2.0 * kBytes;
  rows.back().milliseconds = testing::median_milliseconds(
      context,
      [&] {
        cuda::check(cudaMemcpyAsync(to->data, from->data, kBytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
      },
      options.seconds);

  const int blocks = context.architecture().multiprocessors * kBlocksEach;
  const Tensor sums = Tensor::empty(Shape({std::int64_t{blocks} * kThreads}), DType::f32, options.device);
  rows.push_back(row(kTensorCeiling, "tensor cores", "bf16, operands on chip"));
  rows.back().flops = kBlockFlops * blocks;
  rows.back().milliseconds = testing::median_milliseconds(
      context,
      [&] {
        multiply_kernel<<<blocks, kThreads, 0, stream>>>(sums.as<float>());
        cuda::check_launch("multiply_kernel");
      },
      options.seconds);

  const Tensor powers = Tensor::empty(Shape({std::int64_t{blocks} * kPowerThreads}), DType::f32, options.device);
  rows.push_back(row(kExponentialCeiling, "ex2.approx", "f32, operands on chip"));
  rows.back().exponentials = static_cast<double>(kPowers) * blocks * kPowerThreads;
  rows.back().milliseconds = testing::median_milliseconds(
      context,
      [&] {
        power_kernel<<<blocks, kPowerThreads, 0, stream>>>(powers.as<float>());
        cuda::check_launch("power_kernel");
      },
      options.seconds);

  rows.push_back(row(kLaunchCeiling, "empty kernel", "one launch"));
  rows.back().milliseconds = testing::median_milliseconds(
      context,
      [&] {
        empty_kernel<<<1, 32, 0, stream>>>();
        cuda::check_launch("empty_kernel");
      },
      options.seconds);
  return rows;
}

}  // namespace flashgla::bench

#include <omp.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "bench/benches.h"
#include "dnnl.h"
#ifdef FLASHGLA_CUDA
#include "bench/cuda/ceilings.h"
#endif
#include "testing/random.h"

namespace flashgla::bench {

namespace {

testing::BenchRow gemm_ceiling(Context& context, double seconds) {
  constexpr std::int64_t kSize = 1024;
  const Tensor a = testing::random_normal({kSize, kSize}, DType::f32, 1);
  const Tensor b = testing::random_normal({kSize, kSize}, DType::f32, 2);
  const Tensor c = Tensor::zeros({kSize, kSize}, DType::f32);
  omp_set_num_threads(context.threads());
  auto run = [&] {
    const dnnl_status_t status = dnnl_sgemm('N', 'N', kSize, kSize, kSize, 1.0f, a.as<float>(), kSize, b.as<float>(),
                                            kSize, 0.0f, c.as<float>(), kSize);
    if (status != dnnl_success) throw Error("bench: oneDNN's sgemm failed with status " + std::to_string(status));
  };
  testing::BenchRow row;
  row.operation = kGemmCeiling;
  row.implementation = "oneDNN";
  row.problem = "1024^3 f32";
  row.milliseconds = testing::median_milliseconds(context, run, seconds);
  row.flops = 2.0 * kSize * kSize * kSize;
  row.bytes = 3.0 * kSize * kSize * sizeof(float);
  return row;
}

testing::BenchRow read_ceiling(Context& context, double seconds) {
  constexpr std::int64_t kBytes = std::int64_t{512} << 20;  // far beyond any cache
  constexpr std::int64_t kBlock = std::int64_t{1} << 20;
  const Tensor memory = Tensor::empty({kBytes}, DType::u8);
  std::memset(memory->data, 1, memory->bytes());
  const auto* words = static_cast<const std::uint64_t*>(memory->data);
  std::vector<std::uint64_t> sums(kBytes / kBlock);
  auto run = [&] {
    parallel_for(context, kBytes / kBlock, [&](std::int64_t block) {
      // Four streams a thread, asked for ahead: one alone leaves the memory idle at times.
      constexpr std::int64_t kStream = kBlock / 8 / 4;
      constexpr std::int64_t kAhead = 256;
      const std::uint64_t* begin = words + block * 4 * kStream;
      std::uint64_t partial[32] = {};
      for (std::int64_t i = 0; i < kStream; i += 8) {
        for (int stream = 0; stream < 4; ++stream) {
          const std::uint64_t* line = begin + stream * kStream + i;
          __builtin_prefetch(line + kAhead);
          for (int lane = 0; lane < 8; ++lane) partial[8 * stream + lane] += line[lane];
        }
      }
      sums[static_cast<std::size_t>(block)] = std::accumulate(partial, partial + 32, std::uint64_t{0});
    });
    if (std::accumulate(sums.begin(), sums.end(), std::uint64_t{0}) != kBytes / 8 * 0x0101010101010101ull) {
      throw Error("bench: memory read gave a wrong sum");
    }
  };
  testing::BenchRow row;
  row.operation = kReadCeiling;
  row.implementation = "sum";
  row.problem = "512 MiB";
  row.milliseconds = testing::median_milliseconds(context, run, seconds);
  row.bytes = static_cast<double>(kBytes);
  return row;
}

}  // namespace

std::vector<testing::BenchRow> measure_ceilings(const testing::BenchOptions& options) {
#ifdef FLASHGLA_CUDA
  if (options.device.kind == Device::Kind::cuda) return measure_cuda_ceilings(options);
#endif
  Context context(options.device, options.threads);
  return {gemm_ceiling(context, options.seconds), read_ceiling(context, options.seconds)};
}

}  // namespace flashgla::bench

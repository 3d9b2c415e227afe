#include "testing/bench.h"

#include <algorithm>
#include <chrono>
#include <vector>

#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla::testing {

namespace {

double median_of(std::vector<double>& times) {
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

#ifdef FLASHGLA_CUDA
double cuda_median(Context& context, const std::function<void()>& run, double seconds) {
  auto* stream = static_cast<cudaStream_t>(context.stream());
  cudaEvent_t start;
  cudaEvent_t stop;
  cuda::check(cudaEventCreate(&start), "cudaEventCreate");
  cuda::check(cudaEventCreate(&stop), "cudaEventCreate");
  auto once = [&] {
    cuda::check(cudaEventRecord(start, stream), "cudaEventRecord");
    run();
    cuda::check(cudaEventRecord(stop, stream), "cudaEventRecord");
    cuda::check(cudaEventSynchronize(stop), "cudaEventSynchronize");
    float milliseconds = 0.0f;
    cuda::check(cudaEventElapsedTime(&milliseconds, start, stop), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds);
  };
  for (int i = 0; i < 3; ++i) once();
  std::vector<double> times;
  double total = 0.0;
  while (times.size() < 5 || (total < seconds * 1e3 && times.size() < 1000)) {
    times.push_back(once());
    total += times.back();
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return median_of(times);
}
#endif

}  // namespace

double median_milliseconds([[maybe_unused]] Context& context, const std::function<void()>& run, double seconds) {
#ifdef FLASHGLA_CUDA
  if (context.device().kind == Device::Kind::cuda) return cuda_median(context, run, seconds);
#endif
  using Clock = std::chrono::steady_clock;
  run();
  std::vector<double> times;
  const auto begin = Clock::now();
  while (times.size() < 5 || std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
    const auto start = Clock::now();
    run();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  return median_of(times);
}

}  // namespace flashgla::testing

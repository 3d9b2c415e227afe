#include "testing/bench.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <vector>

#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/check.h"
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla::testing {

namespace {

double median_of(std::vector<double>& times) {
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

#ifdef FLASHGLA_CUDA
class Events {
 public:
  Events() {
    cuda::check(cudaEventCreate(&start_), "cudaEventCreate");
    cuda::check(cudaEventCreate(&stop_), "cudaEventCreate");
  }
  ~Events() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  void start(cudaStream_t stream) { cuda::check(cudaEventRecord(start_, stream), "cudaEventRecord"); }
  void stop(cudaStream_t stream) { cuda::check(cudaEventRecord(stop_, stream), "cudaEventRecord"); }
  double milliseconds() {
    cuda::check(cudaEventSynchronize(stop_), "cudaEventSynchronize");
    float milliseconds = 0.0f;
    cuda::check(cudaEventElapsedTime(&milliseconds, start_, stop_), "cudaEventElapsedTime");
    return milliseconds;
  }

 private:
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
};

// `together` runs are measured as one, several such are queued at a time, and before each the device writes more memory
// than its cache holds: none finds the one before in the cache, and none waits for the host to queue its kernels. A run
// alone pays for the launch, and for what the cache holds that must be written back first.
double cuda_median(Context& context, const std::function<void()>& run, int together, double seconds) {
  constexpr std::size_t kBeyondCache = std::size_t{256} << 20;
  auto* stream = static_cast<cudaStream_t>(context.stream());
  const std::shared_ptr<void> written = cuda::allocate(kBeyondCache, context.device());
  std::array<Events, 5> events;
  std::vector<double> times;
  double total = 0.0;
  for (int round = 0; round < 2 || (total < seconds * 1e3 && times.size() < 1000); ++round) {
    for (Events& each : events) {
      cuda::check(cudaMemsetAsync(written.get(), 0, kBeyondCache, stream), "cudaMemsetAsync");
      each.start(stream);
      for (int i = 0; i < together; ++i) run();
      each.stop(stream);
    }
    for (Events& each : events) {
      const double milliseconds = each.milliseconds();
      if (round == 0) continue;  // warm-up
      times.push_back(milliseconds / together);
      total += milliseconds;
    }
  }
  return median_of(times);
}
#endif

}  // namespace

double median_milliseconds(Context& context, const std::function<void()>& run, double seconds) {
  return median_milliseconds_of(context, run, 1, seconds);
}

double median_milliseconds_of([[maybe_unused]] Context& context, const std::function<void()>& run,
                              [[maybe_unused]] int together, double seconds) {
#ifdef FLASHGLA_CUDA
  if (context.device().kind == Device::Kind::cuda) return cuda_median(context, run, together, seconds);
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

#include "flashgla/base/team.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashgla {

namespace {

using Clock = std::chrono::steady_clock;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::chrono::microseconds patience() {
  static const std::chrono::microseconds time = [] {
    const char* policy = std::getenv("OMP_WAIT_POLICY");
    const bool passive =
        policy != nullptr && (std::string_view(policy) == "passive" || std::string_view(policy) == "PASSIVE");
    return std::chrono::microseconds(passive ? 0 : 50);
  }();
  return time;
}

// Whether `arrived` came true while it was worth watching.
template <class F>
bool watch(const F& arrived) {
  constexpr int kBetweenLooksAtTheClock = 32;
  if (arrived()) return true;
  if (patience().count() == 0) return false;
  const auto end = Clock::now() + patience();
  do {
    for (int i = 0; i < kBetweenLooksAtTheClock; ++i) {
      relax();
      if (arrived()) return true;
    }
  } while (Clock::now() < end);
  return false;
}

// The tasks that a thread begins with. What it has not taken when others have ended theirs, they take.
struct alignas(64) Share {
  std::atomic<std::int64_t> next{0};
  std::int64_t end = 0;

  // The owner takes most of many tasks at once, so that it walks through memory without a jump and has something left
  // to give away where it is slower than others; who helps takes little.
  static std::int64_t piece(std::int64_t left, bool own) {
    constexpr std::int64_t kMany = 8;
    if (!own) return std::max<std::int64_t>(1, left / 4);
    return left >= kMany ? left - left / 4 : std::max<std::int64_t>(1, left / 2);
  }

  // Takes tasks [begin, end); false: none are left.
  bool take(bool own, std::int64_t& begin, std::int64_t& taken_end) {
    begin = next.load(std::memory_order_relaxed);
    do {
      if (begin >= end) return false;
      taken_end = begin + piece(end - begin, own);
    } while (!next.compare_exchange_weak(begin, taken_end, std::memory_order_relaxed));
    return true;
  }
};

struct Region {
  std::int64_t tasks;
  int threads;
  const std::function<void(std::int64_t, std::int64_t)>& body;
  std::atomic<bool> failed{false};
  std::exception_ptr failure{};

  void run(std::int64_t begin, std::int64_t end) {
    try {
      body(begin, end);
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  }
};

thread_local bool within_task = false;

// The helpers of one calling thread.
class Team {
 public:
  Team() = default;
  ~Team() {
    call(kStop);
    for (std::thread& helper : helpers_) helper.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  static Team& of_this_thread() {
    thread_local Team team;
    return team;
  }

  void run(Region& region) {
    while (static_cast<int>(helpers_.size()) + 1 < region.threads) {
      const auto index = static_cast<std::uint64_t>(helpers_.size()) + 1;
      helpers_.emplace_back([this, index] { help(index); });
    }
    region_ = &region;
    shares_in_use_ = std::min(region.threads, kMostShares);
    for (int i = 0; i < shares_in_use_; ++i) {
      shares_[i].next.store(region.tasks * i / shares_in_use_, std::memory_order_relaxed);
      shares_[i].end = region.tasks * (i + 1) / shares_in_use_;
    }
    ++number_;
    open_.store(number_ << kCountBits, std::memory_order_release);
    call(static_cast<std::uint64_t>(region.threads));
    within_task = true;
    work(0);
    within_task = false;
    // Closed; those who came are waited for.
    std::uint64_t inside = open_.fetch_and(kCountMask, std::memory_order_acq_rel) & kCountMask;
    if (inside == 0) return;
    if (watch([&] { return open_.load(std::memory_order_acquire) == 0; })) return;
    // Asleep, so that a helper that lost its processor may have this one.
    waiting_.store(1, std::memory_order_seq_cst);
    while ((inside = open_.load(std::memory_order_seq_cst)) != 0) waiting_.wait(1, std::memory_order_acquire);
    waiting_.store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr int kCountBits = 16;
  static constexpr std::uint64_t kCountMask = (std::uint64_t{1} << kCountBits) - 1, kStop = kCountMask;

  // Tells everybody that there is a region for so many threads.
  void call(std::uint64_t threads) {
    called_.store(number_ << kCountBits | threads, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    wake_.fetch_add(1, std::memory_order_seq_cst);
    wake_.notify_all();
  }

  void help(std::uint64_t index) {
    within_task = true;
    std::uint64_t seen = 0;
    for (;;) {
      const auto called = [&] { return called_.load(std::memory_order_acquire) != seen; };
      if (!watch(called)) {
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t before = wake_.load(std::memory_order_seq_cst);
        if (called_.load(std::memory_order_seq_cst) == seen) wake_.wait(before, std::memory_order_seq_cst);
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
        if (!called()) continue;
      }
      seen = called_.load(std::memory_order_acquire);
      if ((seen & kCountMask) == kStop) return;
      if (index < (seen & kCountMask)) join(seen >> kCountBits, index);
    }
  }

  // The thread's own share, then what is left of the others'.
  void work(std::uint64_t index) {
    Region& region = *region_;
    const int first = static_cast<int>(index) % shares_in_use_;
    for (int i = 0; i < shares_in_use_; ++i) {
      Share& share = shares_[(first + i) % shares_in_use_];
      std::int64_t begin = 0, end = 0;
      while (share.take(i == 0, begin, end)) {
        if (region.failed.load(std::memory_order_relaxed)) return;
        region.run(begin, end);
      }
    }
  }

  // Works on the region of that number, if it is open still.
  void join(std::uint64_t number, std::uint64_t index) {
    std::uint64_t inside = open_.load(std::memory_order_acquire);
    do {
      if (inside >> kCountBits != number) return;
    } while (!open_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel));
    work(index);
    // The last one out wakes the caller, who may be gone already: nothing of the region is touched from here on.
    if (open_.fetch_sub(1, std::memory_order_seq_cst) == 1 && waiting_.load(std::memory_order_seq_cst) != 0) {
      waiting_.store(0, std::memory_order_seq_cst);
      waiting_.notify_one();
    }
  }

  static constexpr int kMostShares = 64;

  std::vector<std::thread> helpers_;
  std::uint64_t number_ = 0;  // of regions so far
  // Read by who is counted in open_:
  Region* region_ = nullptr;
  int shares_in_use_ = 0;
  std::array<Share, kMostShares> shares_;
  alignas(64) std::atomic<std::uint64_t> called_{0};  // number and threads of the last region
  alignas(64) std::atomic<std::uint64_t> open_{0};    // its number while it is open, and how many helpers are inside
  alignas(64) std::atomic<std::uint32_t> wake_{0};
  std::atomic<int> asleep_{0};
  std::atomic<int> waiting_{0};  // the caller sleeps
};

}  // namespace

void run_on_team(int threads, std::int64_t tasks, const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (tasks <= 0) return;
  constexpr std::int64_t kMostThreads = 4096;
  threads = static_cast<int>(std::min({std::int64_t{threads}, tasks, kMostThreads}));
  if (threads <= 1 || within_task) return body(0, tasks);
  Region region{tasks, threads, body};
  Team::of_this_thread().run(region);
  if (region.failure) std::rethrow_exception(region.failure);
}

}  // namespace flashgla

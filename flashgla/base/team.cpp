#include "flashgla/base/team.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "flashgla/base/threads.h"

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

// What a region is to those who work on it; written before they are called.
struct Job {
  const std::function<void(std::int64_t, std::int64_t)>* body = nullptr;
  std::uint64_t number = 0;  // of regions so far
  std::int64_t tasks = 0;
  std::int64_t at_once = 1;  // tasks that are taken as one, where there are very many
  std::int64_t units = 0;    // of so many
  int shares = 0;
  const Cut* cut = nullptr;  // says where shares begin; without one all are alike
  bool help = true;          // whether those that have ended theirs take what others have left
  const NextRegion* next = nullptr;

  std::int64_t first_of(int share) const { return cut != nullptr ? cut->first_task(share) : units * share / shares; }
};

// The owner of a share takes most of many tasks at once, so that it walks through memory without a jump and has
// something left to give away where it is slower than others; who helps takes little.
std::int64_t taken_at_once(std::int64_t left, bool own) {
  constexpr std::int64_t kMany = 8;
  if (!own) return std::max<std::int64_t>(1, left / 4);
  return left >= kMany ? left - left / 4 : std::max<std::int64_t>(1, left / 2);
}

constexpr int kUnitBits = 20;  // of a share's count; the others number the region
constexpr std::int64_t kMostUnits = std::int64_t{1} << kUnitBits;

// The tasks that a thread begins with. What it has not taken when others have ended theirs, they take.
class alignas(64) Share {
 public:
  // Takes units [begin, end) of the job's share `index`, which is this; false: none are left.
  bool take(const Job& job, int index, bool own, std::int64_t& begin, std::int64_t& end) {
    const std::int64_t first = job.first_of(index), size = job.first_of(index + 1) - first;
    std::uint64_t seen = taken_.load(std::memory_order_relaxed), next = 0;
    do {
      const bool begun = seen >> kUnitBits == job.number;
      const auto taken = begun ? static_cast<std::int64_t>(seen & (kMostUnits - 1)) : 0;
      if (taken >= size) return false;
      const std::int64_t after = taken + taken_at_once(size - taken, own);
      next = job.number << kUnitBits | static_cast<std::uint64_t>(after);
      begin = first + taken;
      end = first + after;
    } while (!taken_.compare_exchange_weak(seen, next, std::memory_order_relaxed));
    return true;
  }

 private:
  std::atomic<std::uint64_t> taken_{0};  // number of the region, and units taken in it
};

thread_local bool within_task = false, nobody_helps = false;

// The helpers of one calling thread. A region costs few cache lines: the job's, which all helpers read, and of each
// helper its seat and its share, which others look at when they have ended theirs.
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

  void run(int threads, std::int64_t tasks, const std::function<void(std::int64_t, std::int64_t)>& body,
           const Cut* cut = nullptr, const NextRegion* next = nullptr) {
    while (static_cast<int>(helpers_.size()) + 1 < threads) {
      seats_.push_back(std::make_unique<Seat>());
      Seat& seat = *seats_.back();
      const auto index = static_cast<int>(seats_.size());
      helpers_.emplace_back([this, index, &seat] { help(index, seat); });
    }
    const std::int64_t at_once = (tasks + kMostUnits - 2) / (kMostUnits - 1);
    job_.body = &body;
    ++job_.number;
    job_.tasks = tasks;
    job_.at_once = at_once;
    job_.units = (tasks + at_once - 1) / at_once;
    job_.shares = cut != nullptr ? cut->shares() : std::min(threads, Cut::kMostShares);
    job_.cut = cut;
    job_.help = !nobody_helps;
    job_.next = next;
    failed_.store(false, std::memory_order_relaxed);
    call(static_cast<std::uint64_t>(threads));
    within_task = true;
    work(job_, 0);
    within_task = false;
    for (int i = 0; i + 1 < threads; ++i) close(*seats_[static_cast<std::size_t>(i)]);
    if (failed_.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  static constexpr int kCountBits = 16;
  static constexpr std::uint64_t kCountMask = (std::uint64_t{1} << kCountBits) - 1, kStop = kCountMask;

  // Where a helper says of a region, by its number, that it is inside or that it left. The caller leaves for those who
  // have not come.
  struct alignas(64) Seat {
    std::atomic<std::uint64_t> state{0};

    static std::uint64_t inside(std::uint64_t number) { return 2 * number + 1; }
    static std::uint64_t left(std::uint64_t number) { return 2 * number; }

    bool enter(std::uint64_t number) {
      std::uint64_t seen = state.load(std::memory_order_relaxed);
      return seen < left(number) &&
             state.compare_exchange_strong(seen, inside(number), std::memory_order_acq_rel, std::memory_order_relaxed);
    }
  };

  // Tells everybody that there is a region for so many threads.
  void call(std::uint64_t threads) {
    called_.store(job_.number << kCountBits | threads, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    wake_.fetch_add(1, std::memory_order_seq_cst);
    wake_.notify_all();
  }

  void help(int index, Seat& seat) {
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
      const std::uint64_t number = seen >> kCountBits;
      if (index >= static_cast<int>(seen & kCountMask) || !seat.enter(number)) continue;
      work(job_, index);
      const Streams ahead = streams_of_next(job_, index);
      seat.state.store(Seat::left(number), std::memory_order_seq_cst);
      if (waiting_.load(std::memory_order_seq_cst) != 0) {
        waiting_.store(0, std::memory_order_seq_cst);
        waiting_.notify_one();
      }
      if (ahead.bytes > 0) bring(ahead, seen);
    }
  }

  // The thread's own share, then what is left of the others'.
  void work(const Job job, int index) {
    if (!job.help && index >= job.shares) return;
    for (int i = 0; i < (job.help ? job.shares : 1); ++i) {
      const int share = (index + i) % job.shares;
      std::int64_t begin = 0, end = 0;
      while (shares_[static_cast<std::size_t>(share)].take(job, share, i == 0, begin, end)) {
        if (failed_.load(std::memory_order_relaxed)) return;
        try {
          (*job.body)(begin * job.at_once, std::min(job.tasks, end * job.at_once));
        } catch (...) {
          if (!failed_.exchange(true)) failure_ = std::current_exception();
        }
      }
    }
  }

  static Streams streams_of_next(const Job& job, int index) {
    if (job.next == nullptr || index >= job.next->cut->shares()) return {};
    const std::int64_t begin = job.next->cut->first_task(index), own = job.next->cut->first_task(index + 1) - begin;
    return own > 0 ? job.next->streams(begin, begin + taken_at_once(own, true)) : Streams();
  }

  // Into the second-level cache, until there is a call.
  void bring(const Streams& streams, std::uint64_t seen) {
    constexpr std::int64_t kMostBytes = 64 * 1024, kLine = 64, kLinesAtOnce = 8;
    const std::int64_t bytes = std::min(streams.bytes, kMostBytes / Streams::kMost);
    for (std::int64_t at = 0; at < bytes; at += kLinesAtOnce * kLine) {
      if (called_.load(std::memory_order_relaxed) != seen) return;
      for (const std::byte* begin : streams.begin) {
        for (std::int64_t line = 0; begin != nullptr && line < kLinesAtOnce; ++line) {
          __builtin_prefetch(begin + at + line * kLine, 0, 2);
        }
      }
    }
  }

  // A helper that is inside is waited for; one that has not come finds that it left, where others did its share.
  void close(Seat& seat) {
    const std::uint64_t left = Seat::left(job_.number);
    std::uint64_t seen = seat.state.load(std::memory_order_acquire);
    if (job_.help && seen < left && seat.state.compare_exchange_strong(seen, left, std::memory_order_acq_rel)) return;
    const auto gone = [&] { return seat.state.load(std::memory_order_seq_cst) == left; };
    if (watch(gone)) return;
    // Asleep, so that a helper that lost its processor may have this one.
    for (;;) {
      waiting_.store(1, std::memory_order_seq_cst);
      if (gone()) break;
      waiting_.wait(1, std::memory_order_seq_cst);
    }
    waiting_.store(0, std::memory_order_relaxed);
  }

  std::vector<std::thread> helpers_;
  std::vector<std::unique_ptr<Seat>> seats_;          // of each helper
  alignas(64) std::atomic<std::uint64_t> called_{0};  // number and threads of the last region
  Job job_;                                           // read by who is inside
  std::array<Share, Cut::kMostShares> shares_;
  alignas(64) std::atomic<std::uint32_t> wake_{0};
  std::atomic<int> asleep_{0};
  std::atomic<int> waiting_{0};  // the caller sleeps
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_{};
};

}  // namespace

void run_on_team(int threads, std::int64_t tasks, const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (tasks <= 0) return;
  threads = static_cast<int>(std::min({std::int64_t{threads}, tasks, std::int64_t{kMostThreads}}));
  if (threads <= 1 || within_task) return body(0, tasks);
  Team::of_this_thread().run(threads, tasks, body);
}

void run_on_team(const Cut& cut, const std::function<void(std::size_t, std::int64_t, std::int64_t)>& body,
                 const NextRegion* next) {
  if (cut.threads() <= 1 || within_task) {
    for (std::size_t i = 0; i < cut.matrices(); ++i) {
      if (cut.rows(i) > 0) body(i, 0, cut.rows(i));
    }
    return;
  }
  const auto range = [&](std::int64_t begin, std::int64_t end) { cut.for_each(begin, end, body); };
  Team::of_this_thread().run(std::min(cut.threads(), kMostThreads), cut.tasks(), range, &cut, next);
}

NobodyHelps::NobodyHelps() : before_(std::exchange(nobody_helps, true)) {}
NobodyHelps::~NobodyHelps() { nobody_helps = before_; }

}  // namespace flashgla

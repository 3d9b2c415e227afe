// Threads that stay together: those that help a calling thread with its parallel regions.
//
// A region costs what a cache line takes to reach the others: they watch it for some 50 microseconds after the last
// region (not at all with OMP_WAIT_POLICY=passive), then sleep. Nobody waits for a thread that has not begun: who comes
// late finds the region closed. So a region is never slower for a processor that is busy with something else, unless
// that takes it away in the middle of a task.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "flashgla/base/cut.h"

namespace flashgla {

// What a thread reads first of a region: so many streams side by side, so many bytes of each.
struct Streams {
  static constexpr int kMost = 4;
  std::array<const std::byte*, kMost> begin{};
  std::int64_t bytes = 0;  // of each
};

// The region that follows one, as far as it is known.
struct NextRegion {
  const Cut* cut = nullptr;
  std::function<Streams(std::int64_t begin, std::int64_t end)> streams;  // of who takes these tasks first
};

// Runs body(begin, end) on ranges that together are [0, tasks), on at most `threads` threads, of which the calling one
// is the first. Each begins with a share of its own, the same tasks whenever so many run on so many threads, and then
// takes what others have left. The first exception that one throws is rethrown; what nobody has begun by then is left
// out. Within a body: all on the calling thread.
void run_on_team(int threads, std::int64_t tasks, const std::function<void(std::int64_t, std::int64_t)>& body);

// The same over the rows of matrices, body(matrix, begin, end), where thread i begins with share i of the cut. `next`:
// helpers with nothing left to do bring what they will read of it into their caches, until they are called.
void run_on_team(const Cut& cut, const std::function<void(std::size_t, std::int64_t, std::int64_t)>& body,
                 const NextRegion* next = nullptr);

// While it lives, nobody takes what others have left in the calling thread's regions, and all are waited for: where it
// counts who does what, as with the first to write a page of memory.
class NobodyHelps {
 public:
  NobodyHelps();
  ~NobodyHelps();
  NobodyHelps(const NobodyHelps&) = delete;
  NobodyHelps& operator=(const NobodyHelps&) = delete;

 private:
  bool before_;
};

}  // namespace flashgla

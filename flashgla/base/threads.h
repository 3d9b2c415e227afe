// How many threads a process should use.
#pragma once

#include <string>
#include <vector>

namespace flashgla {

// Threads that may be asked for: libraries end without a word where there are far more.
constexpr int kMostThreads = 4096;

struct ThreadChoice {
  int threads = 1;
  std::string why;  // "4 cores of 8 processors"
};

// As many as it may use cores, which are processors that share none of their units, slow ones among fast ones too, and
// no more than its share of processor time; OMP_NUM_THREADS says otherwise.
ThreadChoice choose_threads();

// The same without OMP_NUM_THREADS, for a process that may run on these processors of a machine whose /proc and /sys
// are folders in `root`.
ThreadChoice choose_threads(const std::string& root, const std::vector<int>& processors);

}  // namespace flashgla

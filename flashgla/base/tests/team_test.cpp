#include "flashgla/base/team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace flashgla {
namespace {

void run_on_team(int threads, std::int64_t tasks, const std::function<void(std::int64_t)>& body) {
  flashgla::run_on_team(threads, tasks, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) body(task);
  });
}

TEST(Team, EveryTaskRunsOnceWithAnyNumberOfThreads) {
  for (const int threads : {1, 2, 3, 7, 40}) {
    for (const std::int64_t tasks : {0, 1, 2, 3, 17, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      run_on_team(threads, tasks, [&](std::int64_t task) { ++runs[static_cast<std::size_t>(task)]; });
      for (const auto& count : runs) EXPECT_EQ(count, 1) << threads << " threads, " << tasks << " tasks";
    }
  }
}

TEST(Team, RegionsFollowEachOtherWithoutEnd) {
  std::atomic<std::int64_t> total{0};
  for (int region = 0; region < 20000; ++region) {
    run_on_team(1 + region % 5, 6, [&](std::int64_t task) { total += task; });
    if (region % 5000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // helpers fall asleep
  }
  EXPECT_EQ(total, 20000 * 15);
}

TEST(Team, WithinATaskEverythingIsOnItsThread) {
  std::atomic<int> elsewhere{0}, tasks{0};
  run_on_team(4, 8, [&](std::int64_t) {
    const auto own = std::this_thread::get_id();
    run_on_team(4, 8, [&](std::int64_t) {
      ++tasks;
      elsewhere += own != std::this_thread::get_id() ? 1 : 0;
    });
  });
  EXPECT_EQ(elsewhere, 0);
  EXPECT_EQ(tasks, 64);
}

TEST(Team, TheFirstExceptionComesBackAndTheTeamGoesOn) {
  for (int again = 0; again < 100; ++again) {
    EXPECT_THROW(run_on_team(3, 50,
                             [](std::int64_t task) {
                               if (task % 7 == 3) throw std::runtime_error("task");
                             }),
                 std::runtime_error);
    std::atomic<int> runs{0};
    run_on_team(3, 50, [&](std::int64_t) { ++runs; });
    EXPECT_EQ(runs, 50);
  }
}

TEST(Team, EachCallingThreadHasItsOwn) {
  std::atomic<std::int64_t> total{0};
  std::vector<std::thread> callers;
  callers.reserve(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int region = 0; region < 500; ++region) {
        run_on_team(3, 10, [&](std::int64_t task) { total += task; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * 500 * 45);
}

TEST(Team, AHelperThatHoldsATaskIsWaitedFor) {
  for (int again = 0; again < 20; ++again) {
    std::atomic<int> done{0};
    run_on_team(2, 2, [&](std::int64_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // longer than anybody watches
      ++done;
    });
    EXPECT_EQ(done, 2);
  }
}

TEST(Team, HelpersAskWhatTheyWillReadOfTheNextRegion) {
  constexpr std::int64_t kRows = 37, kNext = 100, kBytes = 1000;
  const std::vector<std::byte> memory(kNext * kBytes);
  for (const int threads : {1, 2, 3, 5}) {
    std::vector<std::atomic<int>> asked(kNext);
    Cut now, following;
    now.add(kRows, 1);
    now.share_out(threads);
    following.add(kNext, 1);
    following.share_out(threads);
    const NextRegion next{
        &following, [&](std::int64_t begin, std::int64_t end) {
          EXPECT_LT(begin, end);
          for (std::int64_t task = begin; task < end; ++task) ++asked[static_cast<std::size_t>(task)];
          return Streams{{memory.data() + begin * kBytes, memory.data() + (end - 1) * kBytes}, kBytes};
        }};
    for (int again = 0; again < 200; ++again) {
      for (auto& count : asked) count = 0;
      std::atomic<std::int64_t> done{0};
      flashgla::run_on_team(
          now, [&](std::size_t, std::int64_t begin, std::int64_t end) { done += end - begin; }, &next);
      EXPECT_EQ(done, kRows);
      EXPECT_EQ(asked[0], 0) << "the caller has no time for it";
      for (const auto& count : asked) EXPECT_LE(count, 1);
    }
  }
}

// As on a processor with fast and slow cores.
TEST(Team, WhatASlowThreadHasNotBegunOthersTake) {
  constexpr int kTasks = 64, kFirstPiece = 24;  // of the helper's share of 32: what it takes at once
  for (int again = 0; again < 20; ++again) {
    const auto caller = std::this_thread::get_id();
    std::atomic<int> by_caller{0}, by_helper{0};
    run_on_team(2, kTasks, [&](std::int64_t) {
      if (std::this_thread::get_id() == caller) {
        ++by_caller;
        return;
      }
      ++by_helper;
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (by_caller < kTasks - kFirstPiece && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    });
    EXPECT_GE(by_caller, kTasks - kFirstPiece);
    EXPECT_EQ(by_caller + by_helper, kTasks);
  }
}

}  // namespace
}  // namespace flashgla

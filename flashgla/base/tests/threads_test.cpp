#include "flashgla/base/threads.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "testing/temporary_folder.h"

namespace flashgla {
namespace {

// A machine's /proc and /sys, as far as they are read.
class Machine {
 public:
  void write(const std::string& path, const std::string& text) const {
    const std::string file = root() + path;
    std::filesystem::create_directories(std::filesystem::path(file).parent_path());
    testing::write_bytes(file, text + "\n");
  }
  void processor(int number, const std::string& siblings, int socket = 0) const {
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(number);
    write(folder + "/topology/thread_siblings_list", siblings);
    write(folder + "/topology/physical_package_id", std::to_string(socket));
  }
  ThreadChoice choice(int processors) const {
    std::vector<int> all(static_cast<std::size_t>(processors));
    std::iota(all.begin(), all.end(), 0);
    return choose_threads(root(), all);
  }
  const std::string& root() const { return folder_.path(); }

 private:
  testing::TemporaryFolder folder_;
};

TEST(Threads, SomeAreChosenHereAndItSaysWhy) {
  const ThreadChoice choice = choose_threads();
  EXPECT_GE(choice.threads, 1);
  EXPECT_FALSE(choice.why.empty());
}

TEST(Threads, AMachineThatTellsNothingHasACoreForEachProcessor) {
  const Machine machine;
  EXPECT_EQ(machine.choice(6).threads, 6);
  EXPECT_EQ(machine.choice(6).why, "6 cores");
  EXPECT_EQ(machine.choice(1).why, "1 core");
}

TEST(Threads, ProcessorsOfOneCoreCountOnce) {
  const Machine machine;
  for (int i = 0; i < 8; ++i) machine.processor(i, std::to_string(i % 4) + "," + std::to_string(i % 4 + 4));
  EXPECT_EQ(machine.choice(8).threads, 4);
  EXPECT_EQ(machine.choice(8).why, "4 cores of 8 processors");
  EXPECT_EQ(choose_threads(machine.root(), {0, 1, 4}).why, "2 cores of 3 processors");
}

TEST(Threads, SocketsAreTold) {
  const Machine machine;
  for (int i = 0; i < 8; ++i) machine.processor(i, std::to_string(i), i / 4);
  EXPECT_EQ(machine.choice(8).threads, 8);
  EXPECT_EQ(machine.choice(8).why, "8 cores in 2 sockets");
  EXPECT_EQ(machine.choice(4).why, "4 cores");
}

// Eight fast cores with two processors each and eight slow ones.
TEST(Threads, SlowCoresOfAHybridAreUsedAndTold) {
  const Machine machine;
  for (int i = 0; i < 16; ++i) machine.processor(i, std::to_string(i / 2 * 2) + "-" + std::to_string(i / 2 * 2 + 1));
  for (int i = 16; i < 24; ++i) machine.processor(i, std::to_string(i));
  machine.write("/sys/devices/cpu_core/cpus", "0-15");
  machine.write("/sys/devices/cpu_atom/cpus", "16-23");
  EXPECT_EQ(machine.choice(24).threads, 16);
  EXPECT_EQ(machine.choice(24).why, "16 cores of 24 processors, 8 of them slower");
  EXPECT_EQ(machine.choice(16).why, "8 cores of 16 processors");
  EXPECT_EQ(choose_threads(machine.root(), {16, 17, 20}).why, "3 cores");
}

TEST(Threads, SlowCoresThatTellTheirCapacityToo) {
  const Machine machine;
  for (int i = 0; i < 6; ++i) {
    machine.processor(i, std::to_string(i));
    machine.write("/sys/devices/system/cpu/cpu" + std::to_string(i) + "/cpu_capacity", i < 2 ? "1024" : "446");
  }
  EXPECT_EQ(machine.choice(6).threads, 6);
  EXPECT_EQ(machine.choice(6).why, "6 cores, 4 of them slower");
}

TEST(Threads, NoMoreThanTheControlGroupsAllow) {
  const Machine machine;
  machine.write("/proc/self/cgroup", "0::/pods/one");
  machine.write("/sys/fs/cgroup/pods/one/cpu.max", "max 100000");
  EXPECT_EQ(machine.choice(8).why, "8 cores");
  machine.write("/sys/fs/cgroup/pods/cpu.max", "250000 100000");
  EXPECT_EQ(machine.choice(8).threads, 3);
  EXPECT_EQ(machine.choice(8).why, "8 cores; the control group allows the time of 2.5");
  EXPECT_EQ(machine.choice(2).why, "2 cores");
  machine.write("/sys/fs/cgroup/pods/one/cpu.max", "50000 100000");
  EXPECT_EQ(machine.choice(8).threads, 1);
}

TEST(Threads, OlderControlGroupsToo) {
  const Machine machine;
  machine.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  machine.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(machine.choice(8).threads, 8);
  machine.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "500000");
  EXPECT_EQ(machine.choice(8).threads, 5);
  // The group of the process, which a container that has a name space of its own does not see.
  machine.write("/proc/self/cgroup", "9:name=systemd:/\n4:cpuacct,cpu:/pods/one\n3:cpuset:/two\n0::/");
  EXPECT_EQ(machine.choice(8).threads, 5);
  machine.write("/sys/fs/cgroup/cpu/pods/cpu.cfs_quota_us", "200000");
  machine.write("/sys/fs/cgroup/cpu/pods/cpu.cfs_period_us", "100000");
  EXPECT_EQ(machine.choice(8).threads, 2);
}

}  // namespace
}  // namespace flashgla

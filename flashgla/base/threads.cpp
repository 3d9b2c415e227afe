#include "flashgla/base/threads.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <thread>

namespace flashgla {

namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "0-3,8" as numbers.
std::set<int> numbers_of(const std::string& list) {
  std::set<int> numbers;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0, last = 0;
    const int read = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (read < 1) continue;
    for (int i = first; i <= (read == 2 ? last : first); ++i) numbers.insert(i);
  }
  return numbers;
}

// A control group and those around it, the outermost last.
std::vector<std::string> groups_around(std::string group) {
  std::vector<std::string> groups = {group};
  while (group.find('/') != std::string::npos) groups.push_back(group.erase(group.find_last_of('/')));
  return groups;
}

// Processors' worth of time that the control groups allow; 0: no limit.
double time_quota(const std::string& root) {
  std::string group, older_group;  // of the one hierarchy there is now, and of the older one for processors
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "0::/path", "4:cpu,cpuacct:/path"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (line.starts_with("0::")) group = line.substr(second + 1);
    if (controllers.find(",cpu,") != std::string::npos) older_group = line.substr(second + 1);
  }
  double least = 0.0;
  const auto note = [&](double quota, double period) {
    if (quota > 0.0 && period > 0.0) least = least == 0.0 ? quota / period : std::min(least, quota / period);
  };
  for (const std::string& one : groups_around(group)) {
    std::istringstream limit(first_line(root + "/sys/fs/cgroup" + one + "/cpu.max"));
    double quota = 0.0, period = 0.0;
    if (limit >> quota >> period) note(quota, period);  // "max 100000" is no number
  }
  for (const std::string& one : groups_around(older_group)) {
    const std::string limit = root + "/sys/fs/cgroup/cpu" + one + "/cpu.cfs_";
    note(std::atof(first_line(limit + "quota_us").c_str()), std::atof(first_line(limit + "period_us").c_str()));
  }
  return least;
}

std::string plural(std::size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

// What the system says of the cores behind some processors.
struct Cores {
  std::map<std::string, double> speed;  // by the processors of a core, relative to others
  std::set<std::string> sockets;

  Cores(const std::string& root, const std::vector<int>& processors) {
    // x86's kernels list the slow cores of a hybrid as a device of their own, others tell each processor's capacity.
    const std::set<int> slow = numbers_of(first_line(root + "/sys/devices/cpu_atom/cpus"));
    for (const int processor : processors) {
      const std::string folder = root + "/sys/devices/system/cpu/cpu" + std::to_string(processor);
      const std::string siblings = first_line(folder + "/topology/thread_siblings_list");
      const std::string capacity = first_line(folder + "/cpu_capacity");
      const double told = capacity.empty() ? 1.0 : std::atof(capacity.c_str());
      speed[siblings.empty() ? std::to_string(processor) : siblings] = slow.contains(processor) ? 0.5 * told : told;
      sockets.insert(first_line(folder + "/topology/physical_package_id"));
    }
  }

  std::size_t slower() const {
    double fastest = 0.0;
    for (const auto& core : speed) fastest = std::max(fastest, core.second);
    return static_cast<std::size_t>(
        std::count_if(speed.begin(), speed.end(), [&](const auto& core) { return core.second < fastest; }));
  }
};

}  // namespace

ThreadChoice choose_threads() {
  if (const char* wanted = std::getenv("OMP_NUM_THREADS"); wanted != nullptr && std::atoi(wanted) > 0) {
    return {std::atoi(wanted), "OMP_NUM_THREADS"};
  }
  std::vector<int> processors;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &allowed)) processors.push_back(i);
    }
  }
  if (processors.empty()) {
    processors.resize(std::max(1U, std::thread::hardware_concurrency()));
    std::iota(processors.begin(), processors.end(), 0);
  }
  return choose_threads("", processors);
}

ThreadChoice choose_threads(const std::string& root, const std::vector<int>& processors) {
  const Cores cores(root, processors);
  const std::size_t count = cores.speed.size();
  ThreadChoice choice{static_cast<int>(count), plural(count, "core")};
  if (count < processors.size()) choice.why += " of " + plural(processors.size(), "processor");
  if (cores.sockets.size() > 1) choice.why += " in " + plural(cores.sockets.size(), "socket");
  // They help: a thread that is slower leaves tasks of its share to others.
  if (const std::size_t slower = cores.slower(); slower > 0) {
    choice.why += ", " + std::to_string(slower) + " of them slower";
  }
  if (const double quota = time_quota(root); quota > 0.0 && quota < choice.threads) {
    choice.threads = std::max(1, static_cast<int>(std::ceil(quota)));
    char text[64];
    std::snprintf(text, sizeof(text), "; the control group allows the time of %.3g", quota);
    choice.why += text;
  }
  return choice;
}

}  // namespace flashgla

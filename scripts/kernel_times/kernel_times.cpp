// Which kernels a program's time goes to, graphs included: a library that CUDA loads into it and that counts kernels by
// graph and name through CUPTI. See kernel_times.sh beside this file.
#include <cupti.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Sum {
  long count = 0;
  double nanoseconds = 0.0;
  std::set<std::uint64_t> nodes;  // of its graph
};
using Sums = std::map<std::pair<std::uint32_t, std::string>, Sum>;  // by graph (0: none) and mangled name

struct Run {
  std::uint64_t start, end;
  Sum* of;
};

std::mutex mutex;
Sums sums;
std::vector<Run> runs;

void give_buffer(uint8_t** buffer, size_t* bytes, size_t* records) {
  *bytes = 8u << 20;
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *bytes));
  *records = 0;
}

template <class Record>
void add(const char* name, const Record& record) {
  const std::lock_guard lock(mutex);
  Sum& sum = sums[{record.graphId, name}];
  ++sum.count;
  if (record.graphId != 0) sum.nodes.insert(record.graphNodeId);
  runs.push_back({record.start, record.end, &sum});
}

void take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      // The fields that are read lie where they are in every later version of the record.
      const auto& kernel = *reinterpret_cast<CUpti_ActivityKernel9*>(record);
      add(kernel.name, kernel);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      add("(copy)", *reinterpret_cast<CUpti_ActivityMemcpy5*>(record));
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      add("(memset)", *reinterpret_cast<CUpti_ActivityMemset4*>(record));
    }
  }
  std::free(buffer);
}

// A kernel's blocks may begin beside the last of the kernel before it and wait there: what is counted of it begins
// where all that ended before it have ended, so that no time is counted twice.
void count_times() {
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.end < b.end; });
  std::uint64_t until = 0;
  for (const Run& run : runs) {
    const std::uint64_t begin = std::max(run.start, until);
    if (run.end > begin) run.of->nanoseconds += static_cast<double>(run.end - begin);
    until = std::max(until, run.end);
  }
}

void report() {
  cuptiActivityFlushAll(1);
  const std::lock_guard lock(mutex);
  count_times();
  std::vector<std::pair<Sums::key_type, Sum>> rows(sums.begin(), sums.end());
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.second.nanoseconds > b.second.nanoseconds; });
  double busy = 0.0;
  for (const auto& row : rows) busy += row.second.nanoseconds;
  const auto first =
      std::min_element(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.start < b.start; });
  const double whole = runs.empty() ? 0.0 : static_cast<double>(runs.back().end - first->start);
  const char* path = std::getenv("KERNEL_TIMES");
  std::FILE* out = path ? std::fopen(path, "w") : stderr;
  if (out == nullptr) out = stderr;
  std::fprintf(out, "%.3f ms in kernels of %.3f ms from the first to the last\n", busy / 1e6, whole / 1e6);
  for (const auto& [key, sum] : rows) {
    std::fprintf(out, "%10.3f ms %8ld x %10.2f us  graph %u of %zu  %s\n", sum.nanoseconds / 1e6, sum.count,
                 sum.nanoseconds / 1e3 / static_cast<double>(sum.count), key.first, sum.nodes.size(),
                 key.second.c_str());
  }
  if (out != stderr) std::fclose(out);
}

}  // namespace

extern "C" int InitializeInjection() {
  cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  for (const CUpti_ActivityKind kind :
       {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET}) {
    cuptiActivityEnable(kind);
  }
  std::atexit(report);
  return 1;
}

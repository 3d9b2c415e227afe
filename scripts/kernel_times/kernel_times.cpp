// Which kernels a program's time goes to, graphs included: a library that CUDA loads into it and that counts kernels by
// name through CUPTI. See kernel_times.sh beside this file.
#include <cupti.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Sum {
  long count = 0;
  double nanoseconds = 0.0;
};
std::mutex mutex;
std::map<std::string, Sum> sums;  // by mangled name
unsigned long long first = ~0ull, last = 0;

void give_buffer(uint8_t** buffer, size_t* bytes, size_t* records) {
  *bytes = 8u << 20;
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *bytes));
  *records = 0;
}

template <class Record>
void add(const char* name, const Record& record) {
  const std::lock_guard lock(mutex);
  Sum& sum = sums[name];
  ++sum.count;
  sum.nanoseconds += static_cast<double>(record.end - record.start);
  first = std::min<unsigned long long>(first, record.start);
  last = std::max<unsigned long long>(last, record.end);
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

void report() {
  cuptiActivityFlushAll(1);
  std::vector<std::pair<std::string, Sum>> rows(sums.begin(), sums.end());
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.second.nanoseconds > b.second.nanoseconds; });
  double busy = 0.0;
  for (const auto& row : rows) busy += row.second.nanoseconds;
  const char* path = std::getenv("KERNEL_TIMES");
  std::FILE* out = path ? std::fopen(path, "w") : stderr;
  std::fprintf(out, "%.3f ms in kernels of %.3f ms from the first to the last\n", busy / 1e6,
               static_cast<double>(last - first) / 1e6);
  for (const auto& [name, sum] : rows) {
    std::fprintf(out, "%10.3f ms %8ld x %10.2f us  %s\n", sum.nanoseconds / 1e6, sum.count,
                 sum.nanoseconds / 1e3 / static_cast<double>(sum.count), name.c_str());
  }
  if (path) std::fclose(out);
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

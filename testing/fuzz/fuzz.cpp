#include "testing/fuzz/fuzz.h"

#include <fcntl.h>
#include <sanitizer/allocator_interface.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace flashgla::fuzz {
namespace {

namespace fs = std::filesystem;

// Bytes allocated and freed since the limit began. What was allocated before may be freed meanwhile: live may be below
// 0.
std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> most{-1};  // -1: no limit is in force

void on_allocate(const volatile void* /*memory*/, std::size_t bytes) {
  const std::int64_t limit = most.load(std::memory_order_relaxed);
  if (limit < 0) return;
  const std::int64_t now = live.fetch_add(static_cast<std::int64_t>(bytes)) + static_cast<std::int64_t>(bytes);
  if (now <= limit) return;
  most = -1;
  std::fprintf(stderr, "error: %lld bytes are allocated at once; the limit for this input is %lld\n",
               static_cast<long long>(now), static_cast<long long>(limit));
  std::abort();
}

void on_free(const volatile void* memory) {
  if (most.load(std::memory_order_relaxed) < 0 || memory == nullptr) return;
  live -= static_cast<std::int64_t>(__sanitizer_get_allocated_size(memory));
}

// Removed when the program ends by itself.
struct Folder {
  Folder() {
    const fs::path shared = "/dev/shm";
    path = (::access(shared.c_str(), W_OK) == 0 ? shared : fs::temp_directory_path()) /
           ("flashgla_fuzz_" + std::to_string(::getpid()));
    fs::create_directories(path);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  fs::path path;
};

}  // namespace

MemoryLimit::MemoryLimit(std::size_t input_bytes) {
  static const int installed = __sanitizer_install_malloc_and_free_hooks(on_allocate, on_free);
  require(installed != 0, "the allocator takes no hooks");
  live = 0;
  most = static_cast<std::int64_t>(kFixed + kPerByte * input_bytes);
}

MemoryLimit::~MemoryLimit() { most = -1; }

std::string file_of(const std::string& name, std::span<const std::uint8_t> bytes) {
  static const Folder folder;
  const std::string path = folder.path / name;
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  require(file >= 0, "no file can be written");
  require(::write(file, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "no file can be written");
  ::close(file);
  return path;
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "error: %s\n", what);
  std::abort();
}

}  // namespace flashgla::fuzz

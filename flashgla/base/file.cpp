#include "flashgla/base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "flashgla/base/error.h"

namespace flashgla {
namespace {

constexpr std::string_view kPartial = ".partial-";

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  const int reason = errno;
  throw Error(what + " " + path + ": " + std::strerror(reason));
}

bool is_device_or_pipe(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode);
}

int open_lock(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) fail("cannot open", path);
  return descriptor;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail("cannot open", path);
  struct stat info {};
  const bool known = ::fstat(descriptor, &info) == 0;
  if (!known || !S_ISREG(info.st_mode)) {
    const int reason = S_ISDIR(info.st_mode) ? EISDIR : errno;
    ::close(descriptor);
    if (known && !S_ISDIR(info.st_mode)) throw Error("cannot read " + path + ": not a regular file");
    errno = reason;
    fail("cannot read", path);
  }
  size_ = static_cast<std::size_t>(info.st_size);
  if (size_ > 0) {  // an empty file cannot be mapped
    void* memory = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (memory == MAP_FAILED) {
      const int reason = errno;
      ::close(descriptor);
      errno = reason;
      fail("cannot map", path);
    }
    data_ = static_cast<const std::byte*>(memory);
  }
  ::close(descriptor);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  if (is_device_or_pipe(path_)) {  // a file renamed to its name would take its place
    temporary_ = path_;
    published_ = true;
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  } else {
    std::error_code failure;
    if (std::filesystem::is_directory(path_, failure)) {
      errno = EISDIR;
      fail("cannot write", path_);
    }
    if (std::filesystem::is_symlink(path_, failure)) path_ = std::filesystem::weakly_canonical(path_).string();
    temporary_ = path_ + std::string(kPartial) + std::to_string(::getpid());
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  }
  if (descriptor_ < 0) fail("cannot write", path_);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!published_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, bytes);
    if (written < 0) {
      if (errno == EINTR) continue;
      fail("cannot write", path_);
    }
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::write_over(std::size_t begin, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::pwrite(descriptor_, text.data(), text.size(), static_cast<off_t>(begin));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail("cannot write", path_);
    }
    begin += static_cast<std::size_t>(written);
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void AtomicFile::close() {
  if (descriptor_ < 0) return;
  // Devices and some network file systems have nothing to force.
  if (::fsync(descriptor_) != 0 && errno != EINVAL) fail("cannot write", path_);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("cannot write", path_);
}

void AtomicFile::finish() {
  close();
  if (published_) return;
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot write", path_);
  published_ = true;
}

void remove_partial_files(const std::string& folder, const std::vector<std::string>& names) {
  std::vector<std::filesystem::path> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const std::size_t digits = name.find_last_not_of("0123456789") + 1;
    if (digits == name.size() || !std::string_view(name).substr(0, digits).ends_with(kPartial)) continue;
    const std::string whole = name.substr(0, digits - kPartial.size());
    if (std::find(names.begin(), names.end(), whole) == names.end()) continue;
    if (entry.symlink_status().type() == std::filesystem::file_type::regular) left.push_back(entry.path());
  }
  for (const std::filesystem::path& file : left) std::filesystem::remove(file);
}

FileLock::FileLock(const std::string& path) : descriptor_(open_lock(path)) {
  while (::flock(descriptor_, LOCK_EX) != 0) {
    if (errno != EINTR) {
      ::close(descriptor_);
      fail("cannot lock", path);
    }
  }
}

std::unique_ptr<FileLock> FileLock::unless_held(const std::string& path) {
  std::unique_ptr<FileLock> lock(new FileLock);
  lock->descriptor_ = open_lock(path);
  int failed = 0;
  do {
    failed = ::flock(lock->descriptor_, LOCK_EX | LOCK_NB);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0 && errno == EWOULDBLOCK) return nullptr;
  return lock;
}

FileLock::~FileLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void make_folder(const std::string& path) {
  if (path.empty()) return;
  std::error_code failure;
  std::filesystem::create_directories(path, failure);
  if (failure) throw Error("cannot make the folder " + path + ": " + failure.message());
}

void require_writable(const std::string& path) {
  if (!is_device_or_pipe(path)) AtomicFile{path};
}

std::string read_file(const std::string& path) {
  const MappedFile file(path);
  return std::string(reinterpret_cast<const char*>(file.data()), file.size());
}

void write_file(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.finish();
}

}  // namespace flashgla

// Files: read-only mappings, and writing under a temporary name so that nothing half-written is ever found.
// Everything throws Error naming the file and the system's reason.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flashgla {

// A whole file mapped read-only; move-only.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Written beside `path` as `path.partial-<process>`; finish() forces it to disk and renames it. Destroyed before that,
// it leaves nothing behind. Behind a symbolic link the file that it names is replaced; a device or a pipe is written to
// as it is.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  // Writes over what has been written already, from byte `begin` on.
  void write_over(std::size_t begin, std::string_view text);
  // Forces the content to disk under its temporary name, so that several files can then be published together.
  void close();
  void finish();  // close() and rename
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::string temporary_;  // `path_` itself where that is a device or a pipe
  int descriptor_ = -1;
  bool published_ = false;
};

// Removes what an AtomicFile of a process that was killed left beside these files of a folder: regular files
// `name.partial-<digits>`, and no others.
void remove_partial_files(const std::string& folder, const std::vector<std::string>& names);

// While it lives, no other process or thread holds a lock of that path, a file that is made where it is absent and
// stays: for what is read, changed and written again.
class FileLock {
 public:
  explicit FileLock(const std::string& path);  // waits for it
  // Null where another holds it. A file system without locks hands out any number of them.
  static std::unique_ptr<FileLock> unless_held(const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  FileLock() = default;
  int descriptor_ = -1;
};

// Makes a folder and those above it, where they are not there; of an empty name nothing.
void make_folder(const std::string& path);

// Throws what AtomicFile would on a path that cannot be written, and leaves nothing there: for what is written at the
// end of long work.
void require_writable(const std::string& path);

std::string read_file(const std::string& path);
void write_file(const std::string& path, std::string_view content);  // through AtomicFile

}  // namespace flashgla

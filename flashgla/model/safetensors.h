// The safetensors format: named tensors and string metadata in one file. Also a checksum of the data (metadata key
// "xxh3_64"), written always and verified on reading when there is one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/base/file.h"
#include "flashgla/base/tensor.h"
#include "flashgla/base/transfer.h"

namespace flashgla::model {

using Metadata = std::map<std::string, std::string>;

// What a file says of a tensor. Any rank and any of the format's dtypes, known here or not.
struct StoredTensor {
  std::string name;
  std::string dtype;  // "F32", "BF16", "I64", ...
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // bytes from the start of the data
  std::uint64_t end = 0;

  std::int64_t numel() const;
  std::string shape_text() const;  // "[2048,1024]"
};

struct NamedTensor {
  std::string name;
  TensorView tensor;  // contiguous, any device
};

// A file opened and checked in full: header within the file and valid, no key twice, tensors contiguous from 0 to the
// file's end without holes or overlaps, sizes those of shape and dtype. Everything throws Error naming the file.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in the order of their data
  const StoredTensor* find(std::string_view name) const;                 // null: not there
  const Metadata& metadata() const { return metadata_; }
  // A tensor's bytes in the mapped file, for as long as the reader lives.
  std::span<const std::byte> bytes(const StoredTensor& tensor) const {
    return file_.bytes().subspan(data_begin_ + tensor.begin, tensor.end - tensor.begin);
  }
  std::string checksum() const;  // of the data: the one that the file states, else computed

  // Calls destination(tensor) for every tensor in order and fills the contiguous view that it returns, which has as
  // many elements; floating dtypes are converted. Absent: skipped. Throws Error when the checksum disagrees.
  void read(const std::function<TensorView(const StoredTensor&)>& destination) const;
  // Fills exactly these: throws Error also when one is missing, has another shape, or the file holds more.
  void read(const std::vector<NamedTensor>& tensors) const;

 private:
  std::string path_;
  MappedFile file_;
  std::uint64_t data_begin_ = 0;
  std::vector<StoredTensor> tensors_;
  Metadata metadata_;
};

// Writes a whole file under a temporary name and renames it, or writes to `file`, which the caller finishes. "format":
// "pt" and the checksum are added to the metadata. `transfer`, of the tensors' device: what they come to the host
// through; null: one is made for the call.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const Metadata& metadata = {},
                       Transfer* transfer = nullptr);
void write_safetensors(AtomicFile& file, const std::vector<NamedTensor>& tensors, const Metadata& metadata = {},
                       Transfer* transfer = nullptr);

}  // namespace flashgla::model

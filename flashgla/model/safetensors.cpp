#include "flashgla/model/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "flashgla/base/json.h"
#include "flashgla/base/memory.h"
#include "flashgla/model/checksum.h"
#include "flashgla/ops/elementwise/elementwise.h"

namespace flashgla::model {

namespace {

using nlohmann::json;

constexpr std::uint64_t kLargestHeader = 100'000'000;
constexpr std::size_t kPiece = std::size_t{4} << 20;  // bytes converted or hashed at a time
constexpr const char* kChecksum = "xxh3_64";

struct StoredDType {
  const char* name;
  std::uint64_t bytes;
};
constexpr StoredDType kStoredDTypes[] = {{"F64", 8}, {"F32", 4}, {"F16", 2},  {"BF16", 2},    {"I64", 8},
                                         {"I32", 4}, {"I16", 2}, {"I8", 1},   {"U64", 8},     {"U32", 4},
                                         {"U16", 2}, {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};

const char* stored_name(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "F64";
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::i64:
      return "I64";
    case DType::i32:
      return "I32";
    case DType::u16:
      return "U16";
    case DType::u8:
      return "U8";
  }
  return "";
}

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16,
                             DType::i64, DType::i32, DType::u16,  DType::u8};

// Parses the header; duplicate keys and deep nesting are refused, which the JSON library alone would let pass.
json parse_header(const std::string& path, const std::byte* begin, std::size_t bytes) {
  std::vector<std::set<std::string>> keys;
  const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > 4) throw Error(path + ": header is nested too deeply");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw Error(path + ": header names '" + parsed.get<std::string>() + "' twice");
    }
    return true;
  };
  const auto* text = reinterpret_cast<const char*>(begin);
  if (bytes == 0 || text[0] != '{') throw Error(path + ": not a safetensors file (header does not start with '{')");
  try {
    return json::parse(text, text + bytes, check);
  } catch (const nlohmann::json::exception& error) {
    throw Error(path + ": header is not JSON (" + json_reason(error) + ")");
  }
}

bool multiply(std::uint64_t& product, std::uint64_t factor) {
  return !__builtin_mul_overflow(product, factor, &product);
}

StoredTensor parse_tensor(const std::string& path, const std::string& name, const json& entry) {
  const auto refuse = [&](const std::string& why) { return Error(path + ": tensor '" + name + "' " + why); };
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets")) {
    throw refuse("has no dtype, shape and data_offsets");
  }
  const json& dtype = entry["dtype"];
  const json& shape = entry["shape"];
  const json& offsets = entry["data_offsets"];
  if (!dtype.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2 ||
      !offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned()) {
    throw refuse("has a dtype, shape or data_offsets of the wrong type");
  }
  StoredTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype.get<std::string>();
  tensor.begin = offsets[0].get<std::uint64_t>();
  tensor.end = offsets[1].get<std::uint64_t>();
  const auto* known = std::find_if(std::begin(kStoredDTypes), std::end(kStoredDTypes),
                                   [&](const StoredDType& row) { return tensor.dtype == row.name; });
  if (known == std::end(kStoredDTypes)) throw refuse("has the unknown dtype '" + tensor.dtype + "'");
  std::uint64_t bytes = known->bytes;
  constexpr auto kLargest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  bool empty = false;
  for (const json& size : shape) {
    if (!size.is_number_unsigned() || size.get<std::uint64_t>() > kLargest) throw refuse("has a size that is no count");
    tensor.shape.push_back(static_cast<std::int64_t>(size.get<std::uint64_t>()));
    empty = empty || tensor.shape.back() == 0;
  }
  for (const std::int64_t size : tensor.shape) {
    if (!empty && !multiply(bytes, static_cast<std::uint64_t>(size))) throw refuse("is larger than any file");
  }
  if (empty) bytes = 0;
  if (tensor.end < tensor.begin || tensor.end - tensor.begin != bytes) {
    throw refuse("of dtype " + tensor.dtype + " and shape " + tensor.shape_text() + " has data_offsets [" +
                 std::to_string(tensor.begin) + "," + std::to_string(tensor.end) + "]; expected " +
                 std::to_string(bytes) + " bytes");
  }
  return tensor;
}

// Contiguous data of one dtype to contiguous memory of another, through aligned pieces.
void convert_into(Context& context, const std::byte* data, DType dtype, const TensorView& destination) {
  const auto piece = static_cast<std::int64_t>(kPiece / size_of(dtype));
  const Tensor source = Tensor::empty(Shape({piece}), dtype);
  const TensorView flat = destination.reshape(Shape({destination.numel()}));
  for (std::int64_t begin = 0; begin < destination.numel(); begin += piece) {
    const std::int64_t end = std::min(begin + piece, destination.numel());
    const TensorView part = source->slice(0, 0, end - begin);
    std::memcpy(part.data, data + static_cast<std::size_t>(begin) * size_of(dtype), part.bytes());
    ops::elementwise::convert(context, part, flat.slice(0, begin, end));
  }
}

// Bytes of a mapped file, by all threads, since reading a page for the first time takes as long as the disk does.
void read_pages(Context& context, const std::byte* data, std::size_t bytes, void* to) {
  parallel_for_blocks(context, static_cast<std::int64_t>(bytes), kPiece, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(static_cast<std::byte*>(to) + begin, data + begin, static_cast<std::size_t>(end - begin));
  });
}

// Fills the destination from the tensor's bytes in the file, and adds them to the checksum where there is one.
void fill_from(Context& context, Transfer& transfer, const std::string& path, const StoredTensor& tensor,
               const std::byte* data, const TensorView& destination, Checksum* checksum) {
  const auto refuse = [&](const std::string& why) { return Error(path + ": tensor '" + tensor.name + "' " + why); };
  if (!destination.is_contiguous() || destination.numel() != tensor.numel()) {
    throw refuse("has shape " + tensor.shape_text() + "; expected " + to_string(destination.shape));
  }
  const auto* dtype =
      std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](DType row) { return tensor.dtype == stored_name(row); });
  if (dtype == std::end(kDTypes) ||
      (*dtype != destination.dtype && !(is_floating(*dtype) && is_floating(destination.dtype)))) {
    throw refuse("is " + tensor.dtype + ", which does not become " + name_of(destination.dtype));
  }
  transfer.to_device(destination.data, destination.bytes(), [&](void* piece, std::size_t begin, std::size_t bytes) {
    if (*dtype == destination.dtype) {
      read_pages(context, data + begin, bytes, piece);
      if (checksum) checksum->add(piece, bytes);
    } else {
      const std::size_t first = begin / size_of(destination.dtype), count = bytes / size_of(destination.dtype);
      const std::byte* from = data + first * size_of(*dtype);
      convert_into(context, from, *dtype,
                   TensorView(piece, destination.dtype, Shape({static_cast<std::int64_t>(count)})));
      if (checksum) checksum->add(from, count * size_of(*dtype));
    }
  });
}

}  // namespace

std::int64_t StoredTensor::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    if (size == 0) return 0;  // before a product of the others could overflow
  }
  for (const std::int64_t size : shape) product *= size;
  return product;
}

std::string StoredTensor::shape_text() const {
  std::string text = "[";
  for (const std::int64_t size : shape) text += (text.size() > 1 ? "," : "") + std::to_string(size);
  return text + "]";
}

SafetensorsReader::SafetensorsReader(const std::string& path) : path_(path), file_(path) {
  std::uint64_t header_bytes = 0;
  if (file_.size() < sizeof(header_bytes)) {
    throw Error(path + ": truncated or not a safetensors file (" + std::to_string(file_.size()) + " bytes)");
  }
  for (std::size_t i = 0; i < sizeof(header_bytes); ++i) {  // little-endian
    header_bytes |= std::to_integer<std::uint64_t>(file_.data()[i]) << (8 * i);
  }
  if (header_bytes > kLargestHeader) {
    throw Error(path + ": not a safetensors file (its header would be " + std::to_string(header_bytes) +
                " bytes; at most " + std::to_string(kLargestHeader) + ")");
  }
  data_begin_ = sizeof(header_bytes) + header_bytes;
  if (data_begin_ > file_.size()) {
    throw Error(path + ": truncated (" + std::to_string(file_.size()) + " bytes, but its header alone ends at " +
                std::to_string(data_begin_) + ")");
  }
  const json header = parse_header(path, file_.data() + sizeof(header_bytes), header_bytes);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) throw Error(path + ": __metadata__ is not an object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) throw Error(path + ": __metadata__ '" + key + "' is not a string");
        metadata_[key] = value.get<std::string>();
      }
    } else {
      tensors_.push_back(parse_tensor(path, name, entry));
    }
  }
  std::sort(tensors_.begin(), tensors_.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t position = 0;
  for (const StoredTensor& tensor : tensors_) {
    if (tensor.begin != position) {
      throw Error(path + ": tensor '" + tensor.name + "' begins at " + std::to_string(tensor.begin) +
                  (tensor.begin < position ? ", inside the one before it" : ", after a hole") + "; expected " +
                  std::to_string(position));
    }
    position = tensor.end;
  }
  if (position != file_.size() - data_begin_) {
    throw Error(
        path + (position > file_.size() - data_begin_ ? ": truncated (" : ": more data than the header names (") +
        std::to_string(file_.size() - data_begin_) + " bytes of data; expected " + std::to_string(position) + ")");
  }
}

const StoredTensor* SafetensorsReader::find(std::string_view name) const {
  for (const StoredTensor& tensor : tensors_) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

std::string SafetensorsReader::checksum() const {
  if (const auto stated = metadata_.find(kChecksum); stated != metadata_.end()) return stated->second;
  Checksum checksum;
  checksum.add(file_.data() + data_begin_, file_.size() - data_begin_);
  return checksum.text();
}

void SafetensorsReader::read(const std::function<TensorView(const StoredTensor&)>& destination) const {
  Context context;
  Checksum checksum;
  const auto stated = metadata_.find(kChecksum);
  Checksum* const summed = stated != metadata_.end() ? &checksum : nullptr;
  std::unique_ptr<Transfer> transfer;
  Device device;
  for (const StoredTensor& tensor : tensors_) {
    const std::byte* data = file_.data() + data_begin_ + tensor.begin;
    const TensorView view = destination(tensor);
    if (!view) {
      if (summed) summed->add(data, tensor.end - tensor.begin);
      continue;
    }
    if (!transfer || view.device != device) {
      if (transfer) transfer->finish();
      device = view.device;
      transfer = std::make_unique<Transfer>(device);
    }
    fill_from(context, *transfer, path_, tensor, data, view, summed);
  }
  if (transfer) transfer->finish();
  if (summed && checksum.text() != stated->second) {
    throw Error(path_ + ": corrupt (the checksum of its data is " + checksum.text() + "; the file says " +
                stated->second + "); copy or download it again");
  }
}

void SafetensorsReader::read(const std::vector<NamedTensor>& wanted) const {
  std::map<std::string_view, const TensorView*> views;
  for (const NamedTensor& row : wanted) {
    const StoredTensor* stored = find(row.name);
    if (stored == nullptr) throw Error(path_ + ": has no tensor '" + row.name + "'");
    if (stored->shape_text() != to_string(row.tensor.shape)) {
      throw Error(path_ + ": tensor '" + row.name + "' has shape " + stored->shape_text() + "; expected " +
                  to_string(row.tensor.shape));
    }
    views[row.name] = &row.tensor;
  }
  for (const StoredTensor& stored : tensors_) {
    if (!views.contains(stored.name)) throw Error(path_ + ": has an unexpected tensor '" + stored.name + "'");
  }
  read([&](const StoredTensor& stored) { return *views.at(stored.name); });
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const Metadata& metadata,
                       Transfer* transfer) {
  AtomicFile file(path);
  write_safetensors(file, tensors, metadata, transfer);
  file.finish();
}

void write_safetensors(AtomicFile& file, const std::vector<NamedTensor>& tensors, const Metadata& metadata,
                       Transfer* transfer) {
  nlohmann::ordered_json header;
  header["__metadata__"] = metadata;
  header["__metadata__"]["format"] = "pt";
  header["__metadata__"][kChecksum] = Checksum().text();  // of nothing: its place, until the data has been read
  std::uint64_t position = 0;
  for (const NamedTensor& row : tensors) {
    if (!row.tensor.is_contiguous()) throw Error("write_safetensors: tensor '" + row.name + "' is not contiguous");
    if (header.contains(row.name)) throw Error("write_safetensors: tensor '" + row.name + "' exists twice");
    const std::uint64_t end = position + row.tensor.bytes();
    header[row.name] = {{"dtype", stored_name(row.tensor.dtype)},
                        {"shape", std::vector<std::int64_t>(row.tensor.shape.begin(), row.tensor.shape.end())},
                        {"data_offsets", {position, end}}};
    position = end;
  }
  const auto padded = [&] {
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');
    return text;
  };
  const std::string text = padded();
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  file.write(length);
  file.write(text);
  Checksum checksum;
  std::unique_ptr<Transfer> own;
  Device device;
  for (const NamedTensor& row : tensors) {
    if (!transfer && (!own || row.tensor.device != device)) {
      device = row.tensor.device;
      own = std::make_unique<Transfer>(device);
    }
    (transfer ? *transfer : *own)
        .to_host(row.tensor.data, row.tensor.bytes(), [&](const void* data, std::size_t, std::size_t bytes) {
          checksum.add(data, bytes);
          file.write(data, bytes);
        });
  }
  header["__metadata__"][kChecksum] = checksum.text();
  file.write_over(length.size(), padded());
}

}  // namespace flashgla::model

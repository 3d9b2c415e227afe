#include "flashgla/base/names.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "flashgla/base/error.h"
#include "flashgla/base/memory.h"

namespace flashgla {

namespace {

// Letters to be changed, left out or put in to make one word of the other.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t corner = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = corner + (a[i] == b[j] ? 0 : 1);
      corner = std::exchange(row[j + 1], std::min({changed, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

}  // namespace

DType dtype_from_name(std::string_view name) {
  if (name == "f64" || name == "fp64" || name == "float64" || name == "double") return DType::f64;
  if (name == "f32" || name == "fp32" || name == "float32" || name == "float") return DType::f32;
  if (name == "bf16" || name == "bfloat16") return DType::bf16;
  if (name == "f16" || name == "fp16" || name == "float16" || name == "half") return DType::f16;
  if (name == "i64" || name == "int64") return DType::i64;
  if (name == "i32" || name == "int32") return DType::i32;
  if (name == "u16" || name == "uint16") return DType::u16;
  if (name == "u8" || name == "uint8") return DType::u8;
  throw Error("unknown dtype '" + std::string(name) + "'; known: f32, bf16, f16, f64, i64, i32, u16, u8");
}

std::string name_of(Device device) {
  return device.kind == Device::Kind::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

Device device_from_name(std::string_view name) {
  if (name == "auto") return cuda_device_count() > 0 ? Device::cuda() : Device::cpu();
  if (name == "cpu") return Device::cpu();
  if (name == "cuda") return Device::cuda(0);
  if (name.starts_with("cuda:") && name.size() > 5 && name.size() < 9 &&
      name.find_first_not_of("0123456789", 5) == std::string_view::npos) {
    return Device::cuda(std::stoi(std::string(name.substr(5))));
  }
  throw Error("unknown device '" + std::string(name) + "'; known: auto, cpu, cuda, cuda:N");
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
  constexpr std::size_t kLongest = 64;  // of a name that may be a known one with a mistake in it
  if (name.size() > kLongest) return {};
  std::string nearest;
  std::size_t edits = name.size() / 4 + 2;  // one more than there may be
  for (const std::string& one : known) {
    const std::size_t away = edits_between(name, one);
    if (away < edits) nearest = one, edits = away;
  }
  return nearest;
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& known) {
  const std::string nearest = nearest_name(name, known);
  return nearest.empty() ? "" : "; did you mean '" + nearest + "'?";
}

}  // namespace flashgla

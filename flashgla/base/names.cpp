#include "flashgla/base/names.h"

#include "flashgla/base/error.h"
#include "flashgla/base/memory.h"

namespace flashgla {

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

}  // namespace flashgla

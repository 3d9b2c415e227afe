#include "flashgla/base/dtype.h"

#include <cmath>

#include "flashgla/base/error.h"

namespace flashgla {

double epsilon(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return std::ldexp(1.0, -52);
    case DType::f32:
      return std::ldexp(1.0, -23);
    case DType::f16:
      return std::ldexp(1.0, -10);
    case DType::bf16:
      return std::ldexp(1.0, -7);
    default:
      throw Error(std::string("epsilon: ") + name_of(dtype) + " is not a floating-point dtype");
  }
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i64:
      return "i64";
    case DType::i32:
      return "i32";
    case DType::u16:
      return "u16";
    case DType::u8:
      return "u8";
  }
  return "?";
}

}  // namespace flashgla

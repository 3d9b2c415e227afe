// Validation at an operator's entry: each check throws Error naming the operator, the argument, actual and expected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "flashgla/base/context.h"
#include "flashgla/ops/dispatch.h"

namespace flashgla::ops {

// A set of element types, in the order of the enumeration.
class DTypes {
 public:
  constexpr DTypes(std::initializer_list<DType> dtypes) {
    for (const DType dtype : dtypes) bits_ |= 1u << static_cast<unsigned>(dtype);
  }
  constexpr DTypes(DType dtype) : DTypes({dtype}) {}
  constexpr bool has(DType dtype) const { return bits_ >> static_cast<unsigned>(dtype) & 1u; }

 private:
  std::uint32_t bits_ = 0;
};

std::string to_string(DTypes dtypes);  // "f32 or bf16"

constexpr DTypes kFloating{DType::f64, DType::f32, DType::bf16, DType::f16};

// What sums over activations of a dtype are kept in: f32, or f64 with f64.
constexpr DType accumulator_of(DType activation) { return activation == DType::f64 ? DType::f64 : DType::f32; }

// Parameters that may stand beside activations of a dtype.
constexpr DTypes parameters_of(DType activation) {
  return activation == DType::f64 ? DTypes{DType::f64} : DTypes{activation, DType::f32, DType::bf16};
}

enum class Layout : std::uint8_t {
  rows,        // last dimension contiguous, any strides before it
  contiguous,  // wholly
  any,
};

class Arguments {
 public:
  // Makes the context's device the current one, which what follows launches on.
  Arguments(const char* operation, const Context& context) : operation_(operation), device_(context.device()) {
    context.queue().activate();
  }

  // Present, on the context's device, of one of the dtypes, laid out so.
  void check(const char* name, const TensorView& view, DTypes dtypes, Layout layout = Layout::rows) const;
  // And of that shape; `as` names where the shape comes from.
  void check(const char* name, const TensorView& view, DTypes dtypes, const Shape& shape, const char* as,
             Layout layout = Layout::rows) const;
  void check_rank(const char* name, const TensorView& view, int rank) const;
  void check_absent(const char* name, const TensorView& view, const char* why) const;
  // `kept`, an operator's own for its backward: absent, or u8 [bytes].
  void check_kept(const TensorView& kept, std::size_t bytes) const;
  [[noreturn]] void fail(const char* name, const std::string& actual, const std::string& expected) const;

 private:
  const char* operation_;
  Device device_;
};

// The shape without its last dimension has that many rows.
std::int64_t rows_of(const Shape& shape);

// For implementations that have f32 and bf16.
Support supports_f32_and_bf16(std::initializer_list<DType> dtypes);

}  // namespace flashgla::ops

// An array of any library that speaks DLPack, seen as a TensorView.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashgla/base/tensor.h"

namespace flashgla::python {

namespace nb = nanobind;

// None: elements of a type that the library has not.
std::optional<DType> dtype_of(nb::dlpack::dtype code);
// The memory that DLPack describes so. Throws Error when it is none that can be used, of what `name` says.
TensorView view_of(const nb::dlpack::dltensor& tensor, const std::string& name);

// Absent optional arguments are null pointers to Array.
struct Array {
  TensorView view;
  nb::ndarray<nb::ro> source;  // keeps another library's memory alive,
  nb::object owner;            // or the library's own

  // Views the memory of `object` (an object with __dlpack__, a DLPack capsule, or a buffer) without a copy. `dtype`
  // reads 2-byte integers as another type of that size: NumPy's DLPack knows no bfloat16. `writable`: the memory is
  // written through. Throws TypeError when object is no array, Error when it is one that cannot be used.
  Array(nb::object object, bool writable, std::optional<std::string> dtype);
  Array(const TensorView& view, nb::object owner) : view(view), owner(std::move(owner)) {}

  // Shape, dtype and device of an array that does not exist: for questions about sizes. Must not be read.
  static Array without_memory(const std::vector<std::int64_t>& shape, const std::string& dtype,
                              const std::string& device);
  // New memory of the library's own allocator, not initialised.
  static Array empty(const std::vector<std::int64_t>& shape, const std::string& dtype, const std::string& device);

  // Returns when work queued on the device's default stream has written this memory.
  void wait() const;
  // An object with __dlpack__ over the same memory.
  nb::object to_dlpack() const;
};

// The views of one call's arrays: of Arrays, kept alive until they are destroyed, and None: absent.
class Views {
 public:
  TensorView operator()(nb::handle argument);

 private:
  std::vector<nb::object> arrays_;
};

}  // namespace flashgla::python

#include "array.h"

#include <nanobind/stl/string.h>

#include <memory>
#include <span>
#include <vector>

#include "flashgla/base/current_device.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"

namespace flashgla::python {

namespace {

struct Pair {
  DType dtype;
  nb::dlpack::dtype code;
};

constexpr nb::dlpack::dtype code_of(nb::dlpack::dtype_code code, std::uint8_t bits) {
  return {static_cast<std::uint8_t>(code), bits, 1};
}

constexpr Pair kDTypes[] = {{DType::f64, code_of(nb::dlpack::dtype_code::Float, 64)},
                            {DType::f32, code_of(nb::dlpack::dtype_code::Float, 32)},
                            {DType::f16, code_of(nb::dlpack::dtype_code::Float, 16)},
                            {DType::bf16, code_of(nb::dlpack::dtype_code::Bfloat, 16)},
                            {DType::i64, code_of(nb::dlpack::dtype_code::Int, 64)},
                            {DType::i32, code_of(nb::dlpack::dtype_code::Int, 32)},
                            {DType::u16, code_of(nb::dlpack::dtype_code::UInt, 16)},
                            {DType::u8, code_of(nb::dlpack::dtype_code::UInt, 8)}};

DType dtype_from_code(nb::dlpack::dtype code, const std::string& name) {
  if (const auto dtype = dtype_of(code)) return *dtype;
  throw Error(name + " has elements of DLPack type code " + std::to_string(code.code) + ", " +
              std::to_string(code.bits) + " bits; expected f64, f32, bf16, f16, i64, i32, u16 or u8");
}

nb::dlpack::dtype code_from_dtype(DType dtype) {
  for (const Pair& pair : kDTypes) {
    if (pair.dtype == dtype) return pair.code;
  }
  throw Error(std::string("no DLPack type for ") + name_of(dtype));
}

Device device_of(int type, int index, const std::string& name) {
  switch (type) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value:
      return Device::cpu();
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value:
      return Device::cuda(index);
    default:
      throw Error(name + " is on a device of DLPack type " + std::to_string(type) + "; expected a CPU or CUDA device");
  }
}

}  // namespace

std::optional<DType> dtype_of(nb::dlpack::dtype code) {
  for (const Pair& pair : kDTypes) {
    if (pair.code == code) return pair.dtype;
  }
  return std::nullopt;
}

TensorView view_of(const nb::dlpack::dltensor& tensor, const std::string& name) {
  const int rank = tensor.ndim;
  if (rank > kMaxRank) {
    throw Error(name + " has " + std::to_string(rank) + " dimensions; expected at most " + std::to_string(kMaxRank));
  }
  const Shape shape(std::span(tensor.shape, static_cast<std::size_t>(rank)));
  if (tensor.data == nullptr) {
    throw Error(name + " of shape " + to_string(shape) + " has no elements; leave an optional argument out instead");
  }
  TensorView view(static_cast<std::byte*>(tensor.data) + tensor.byte_offset, dtype_from_code(tensor.dtype, name), shape,
                  device_of(tensor.device.device_type, tensor.device.device_id, name));
  // Where there is one element only, the distance to the next means nothing: that of a contiguous array stays.
  for (int i = 0; i < rank && tensor.strides != nullptr; ++i) {
    if (shape[i] > 1) view.stride[static_cast<std::size_t>(i)] = tensor.strides[i];
  }
  return view;
}

Array::Array(nb::object object, bool writable, std::optional<std::string> dtype) {
  nb::ndarray<> mutable_source;
  const bool taken = writable ? nb::try_cast(object, mutable_source) : nb::try_cast(object, source);
  if (!taken) {
    if (writable && nb::try_cast(object, source)) throw Error("an array that is to be written is read-only");
    try {
      if (nb::hasattr(object, "__dlpack__")) object.attr("__dlpack__")();
    } catch (const nb::python_error& error) {
      throw Error(std::string("an array is not handed over: ") + nb::str(error.value()).c_str());
    }
    const std::string type = nb::cast<std::string>(object.type().attr("__name__"));
    throw nb::type_error(("expected an array with __dlpack__ (NumPy, PyTorch, CuPy, JAX), got " + type).c_str());
  }
  if (writable) source = nb::ndarray<nb::ro>(mutable_source);
  view = view_of({.data = const_cast<void*>(source.data()),
                  .device = {source.device_type(), source.device_id()},
                  .ndim = static_cast<std::int32_t>(source.ndim()),
                  .dtype = source.dtype(),
                  .shape = const_cast<std::int64_t*>(source.shape_ptr()),
                  .strides = const_cast<std::int64_t*>(source.stride_ptr())},
                 "an array");
  if (dtype) {
    const DType wanted = dtype_from_name(*dtype);
    if (size_of(wanted) != size_of(view.dtype)) {
      throw Error(std::string("cannot read ") + name_of(view.dtype) + " as " + *dtype);
    }
    view.dtype = wanted;
  }
}

Array Array::without_memory(const std::vector<std::int64_t>& shape, const std::string& dtype,
                            const std::string& device) {
  // Any address but null: null stands for an absent argument.
  static char somewhere;
  return Array(TensorView(&somewhere, dtype_from_name(dtype), Shape(std::span(shape)), device_from_name(device)),
               nb::none());
}

Array Array::empty(const std::vector<std::int64_t>& shape, const std::string& dtype, const std::string& device) {
  const Device where = device_from_name(device);
  const CurrentDevice current(where);
  auto tensor = std::make_unique<Tensor>(Tensor::empty(Shape(std::span(shape)), dtype_from_name(dtype), where));
  const TensorView view = tensor->view();
  nb::capsule owner(tensor.release(), [](void* p) noexcept { delete static_cast<Tensor*>(p); });
  return Array(view, std::move(owner));
}

TensorView Views::operator()(nb::handle argument) {
  if (argument.is_none()) return {};
  arrays_.push_back(nb::borrow(argument));
  return nb::cast<const Array&>(argument).view;
}

void Array::wait() const {
  const CurrentDevice current(view.device);  // whose default stream the copy waits for
  std::byte first{};
  copy_memory(&first, Device::cpu(), view.data, view.device, sizeof(first));
}

nb::object Array::to_dlpack() const {
  std::vector<std::size_t> sizes(view.shape.begin(), view.shape.end());
  const int device = view.device.kind == Device::Kind::cpu ? nb::device::cpu::value : nb::device::cuda::value;
  return nb::cast(nb::ndarray<nb::array_api>(view.data, sizes.size(), sizes.data(), owner, view.stride.data(),
                                             code_from_dtype(view.dtype), device, view.device.index));
}

}  // namespace flashgla::python

#include "flashgla/base/tensor.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "flashgla/base/memory.h"

namespace flashgla {

Shape::Shape(std::initializer_list<std::int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}

Shape::Shape(std::span<const std::int64_t> sizes) {
  if (sizes.size() > static_cast<std::size_t>(kMaxRank)) {
    throw Error("tensor rank " + std::to_string(sizes.size()) + " is more than " + std::to_string(kMaxRank));
  }
  rank_ = static_cast<int>(sizes.size());
  for (int i = 0; i < rank_; ++i) sizes_[i] = sizes[i];
}

std::int64_t Shape::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t size : *this) product *= size;
  return product;
}

bool operator==(const Shape& a, const Shape& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.rank(); ++i) text += (i ? "," : "") + std::to_string(shape[i]);
  return text + "]";
}

TensorView::TensorView(void* data, DType dtype, const Shape& shape, Device device)
    : data(data), dtype(dtype), device(device), shape(shape) {
  std::int64_t step = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    stride[i] = step;
    step *= shape[i];
  }
}

bool TensorView::is_contiguous() const {
  std::int64_t step = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape[i] != 1 && stride[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

TensorView TensorView::slice(int dim, std::int64_t begin, std::int64_t end) const {
  if (dim < 0) dim += rank();
  if (dim < 0 || dim >= rank() || begin < 0 || begin > end || end > shape[dim]) {
    throw Error("slice [" + std::to_string(begin) + "," + std::to_string(end) + ") of dimension " +
                std::to_string(dim) + " is outside shape " + to_string(shape));
  }
  TensorView part = *this;
  part.data = static_cast<std::byte*>(data) + begin * stride[dim] * static_cast<std::int64_t>(size_of(dtype));
  part.shape[dim] = end - begin;
  return part;
}

TensorView TensorView::select(int dim, std::int64_t index) const {
  if (dim < 0) dim += rank();
  const TensorView part = slice(dim, index, index + 1);
  TensorView result = part;
  std::vector<std::int64_t> sizes;
  int to = 0;
  for (int from = 0; from < rank(); ++from) {
    if (from == dim) continue;
    sizes.push_back(shape[from]);
    result.stride[to++] = stride[from];
  }
  result.shape = Shape(sizes);
  return result;
}

TensorView TensorView::reshape(const Shape& new_shape) const {
  if (!is_contiguous() || new_shape.numel() != numel()) {
    throw Error("cannot view shape " + to_string(shape) + (is_contiguous() ? "" : " (strided)") + " as " +
                to_string(new_shape));
  }
  return TensorView(data, dtype, new_shape, device);
}

TensorView TensorView::split_last(std::int64_t outer) const {
  const int last = rank() - 1;
  if (last < 0 || outer <= 0 || shape[last] % outer != 0 || rank() == kMaxRank) {
    throw Error("cannot split the last dimension of " + to_string(shape) + " into " + std::to_string(outer));
  }
  std::vector<std::int64_t> sizes(shape.begin(), shape.end());
  const std::int64_t inner = sizes.back() / outer;
  sizes.back() = outer;
  sizes.push_back(inner);
  TensorView result = *this;
  result.shape = Shape(sizes);
  result.stride[last] = inner * stride[last];
  result.stride[last + 1] = stride[last];
  return result;
}

TensorView TensorView::as_rows() const {
  const int last = rank() - 1;
  if (last < 1) throw Error("cannot view shape " + to_string(shape) + " as rows");
  std::int64_t rows = 1;
  for (int i = last - 1; i >= 0; --i) {
    if (i < last - 1 && shape[i] != 1 && rows != 1 && stride[i] != stride[last - 1] * rows) {
      throw Error("cannot view strided shape " + to_string(shape) + " as rows without a copy");
    }
    rows *= shape[i];
  }
  TensorView result = *this;
  result.shape = Shape({rows, shape[last]});
  result.stride[0] = stride[last - 1];
  result.stride[1] = stride[last];
  return result;
}

TensorView TensorView::transpose(int a, int b) const {
  if (a < 0) a += rank();
  if (b < 0) b += rank();
  TensorView result = *this;
  std::swap(result.shape[a], result.shape[b]);
  std::swap(result.stride[a], result.stride[b]);
  return result;
}

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  Tensor tensor;
  const std::size_t bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
  tensor.storage_ = allocate_memory(bytes, device);
  tensor.view_ = TensorView(tensor.storage_.get(), dtype, shape, device);
  return tensor;
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, Device device) {
  Tensor tensor = empty(shape, dtype, device);
  zero_memory(tensor.view_.data, tensor.view_.bytes(), device);
  return tensor;
}

namespace {

std::int64_t offset_of(const TensorView& view, std::span<const std::int64_t> index) {
  if (static_cast<int>(index.size()) != view.rank()) {
    throw Error("index of rank " + std::to_string(index.size()) + " into shape " + to_string(view.shape));
  }
  std::int64_t offset = 0;
  for (int i = 0; i < view.rank(); ++i) offset += index[i] * view.stride[i];
  return offset;
}

// Calls visit(offset in a, offset in b) for every element of two views of one shape.
template <class Visit>
void for_each_offset(const TensorView& a, const TensorView& b, Visit&& visit) {
  if (a.numel() == 0) return;
  std::array<std::int64_t, kMaxRank> index{};
  std::int64_t offset_a = 0;
  std::int64_t offset_b = 0;
  while (true) {
    visit(offset_a, offset_b);
    int dim = a.rank() - 1;
    for (; dim >= 0; --dim) {
      offset_a += a.stride[dim];
      offset_b += b.stride[dim];
      if (++index[dim] < a.shape[dim]) break;
      offset_a -= a.stride[dim] * a.shape[dim];
      offset_b -= b.stride[dim] * b.shape[dim];
      index[dim] = 0;
    }
    if (dim < 0) return;
  }
}

template <class F>
decltype(auto) dispatch_any(DType dtype, F&& f) {
  switch (dtype) {
    case DType::i64:
      return f(std::int64_t{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::u16:
      return f(std::uint16_t{});
    case DType::u8:
      return f(std::uint8_t{});
    default:
      return dispatch_floating(dtype, std::forward<F>(f));
  }
}

template <class T>
double to_double(T value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return static_cast<double>(value);
  }
}

}  // namespace

double load_element(const TensorView& view, std::span<const std::int64_t> index) {
  const std::int64_t offset = offset_of(view, index);
  return dispatch_any(view.dtype, [&](auto zero) { return to_double(view.as<decltype(zero)>()[offset]); });
}

void store_element(const TensorView& view, std::span<const std::int64_t> index, double value) {
  const std::int64_t offset = offset_of(view, index);
  dispatch_any(view.dtype, [&](auto zero) {
    using T = decltype(zero);
    view.as<T>()[offset] = static_cast<T>(value);
  });
}

void copy(const TensorView& src, const TensorView& dst) {
  if (!(src.shape == dst.shape)) {
    throw Error("copy", "dst", "has shape " + to_string(dst.shape), to_string(src.shape) + " (as src)");
  }
  if (src.device != Device::cpu() || dst.device != Device::cpu()) {
    throw Error("copy: both tensors must be on the cpu; copies between devices are copy_memory's");
  }
  if (src.dtype == dst.dtype && src.is_contiguous() && dst.is_contiguous()) {
    std::memcpy(dst.data, src.data, src.bytes());
    return;
  }
  dispatch_any(src.dtype, [&](auto from) {
    dispatch_any(dst.dtype, [&](auto to) {
      const auto* in = src.as<decltype(from)>();
      auto* out = dst.as<decltype(to)>();
      for_each_offset(src, dst, [&](std::int64_t i, std::int64_t o) {
        if constexpr (std::is_same_v<decltype(from), decltype(to)>) {
          out[o] = in[i];
        } else {
          out[o] = static_cast<decltype(to)>(to_double(in[i]));
        }
      });
    });
  });
}

void fill(const TensorView& dst, double value) {
  dispatch_any(dst.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T element = static_cast<T>(value);
    T* out = dst.as<T>();
    for_each_offset(dst, dst, [&](std::int64_t o, std::int64_t) { out[o] = element; });
  });
}

}  // namespace flashgla

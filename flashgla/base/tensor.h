// TensorView: pointer, dtype, device, shape and strides of memory somebody else owns.
// Tensor: the same with the memory. Strides count elements.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "flashgla/base/dtype.h"
#include "flashgla/base/error.h"
#include "flashgla/base/float16.h"

namespace flashgla {

constexpr int kMaxRank = 5;

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> sizes);
  explicit Shape(std::span<const std::int64_t> sizes);

  int rank() const { return rank_; }
  std::int64_t operator[](int i) const { return sizes_[i < 0 ? i + rank_ : i]; }
  std::int64_t& operator[](int i) { return sizes_[i < 0 ? i + rank_ : i]; }
  std::int64_t numel() const;  // product of the sizes; 1 for rank 0
  const std::int64_t* begin() const { return sizes_.data(); }
  const std::int64_t* end() const { return sizes_.data() + rank_; }
  friend bool operator==(const Shape& a, const Shape& b);

 private:
  std::array<std::int64_t, kMaxRank> sizes_{};
  int rank_ = 0;
};

// "[2,128,4,64]"
std::string to_string(const Shape& shape);

// Non-owning view. A default-constructed view stands for an absent optional tensor. Constness is shallow,
// as with a pointer: who gets a view as an input does not write through it.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  Shape shape;
  std::array<std::int64_t, kMaxRank> stride{};

  TensorView() = default;
  // Contiguous (row-major) view of existing memory.
  TensorView(void* data, DType dtype, const Shape& shape, Device device = Device::cpu());
  template <class T>
  TensorView(T* data, const Shape& shape) : TensorView(data, DTypeOf<T>::value, shape) {}

  explicit operator bool() const { return data != nullptr; }
  int rank() const { return shape.rank(); }
  std::int64_t size(int dim) const { return shape[dim]; }
  std::int64_t numel() const { return shape.numel(); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype); }
  bool is_contiguous() const;

  // Typed pointer; throws Error when T is not the view's dtype.
  template <class T>
  T* as() const {
    if (DTypeOf<T>::value != dtype) {
      throw Error(std::string("tensor holds ") + name_of(dtype) + ", accessed as " + name_of(DTypeOf<T>::value));
    }
    return static_cast<T*>(data);
  }

  // [begin, end) along dim; same memory.
  TensorView slice(int dim, std::int64_t begin, std::int64_t end) const;
  // Index along dim, which disappears.
  TensorView select(int dim, std::int64_t index) const;
  // Same elements under another shape; the view must be contiguous, and the counts equal.
  TensorView reshape(const Shape& shape) const;
  // Splits the last dimension into [..., outer, size/outer]; any strides before it. As for heads.
  TensorView split_last(std::int64_t outer) const;
  // Merges all but the last dimension; requires that they are mergeable without a copy.
  TensorView as_rows() const;
  TensorView transpose(int dim_a, int dim_b) const;
};

// Owning tensor; move-only; memory aligned to 64 bytes. Converts to its view.
class Tensor {
 public:
  Tensor() = default;
  static Tensor empty(const Shape& shape, DType dtype, Device device = Device::cpu());
  static Tensor zeros(const Shape& shape, DType dtype, Device device = Device::cpu());

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }
  const TensorView* operator->() const { return &view_; }
  explicit operator bool() const { return static_cast<bool>(view_); }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }

 private:
  TensorView view_;
  std::shared_ptr<void> storage_;
};

// Element access that is independent of dtype and strides: for references, tests and printing.
double load_element(const TensorView& view, std::span<const std::int64_t> index);
void store_element(const TensorView& view, std::span<const std::int64_t> index, double value);

// dst = src with conversion of dtype; equal shapes, any strides, both on the CPU.
void copy(const TensorView& src, const TensorView& dst);
void fill(const TensorView& dst, double value);

}  // namespace flashgla

// Elements of a tensor as doubles, by row and column and whatever the dtype: how reference implementations read and
// write, so that one plain loop is the definition for every dtype.
#pragma once

#include "flashgla/ops/rows.h"

namespace flashgla::ops {

class Elements {
 public:
  // Absent views may be wrapped, but not read.
  explicit Elements(const TensorView& view) : data_(view.data), dtype_(view.dtype), rows_(view) {}

  std::int64_t rows() const { return rows_.count(); }
  std::int64_t length() const { return rows_.length(); }

  double operator()(std::int64_t row, std::int64_t column) const {
    const std::int64_t i = rows_.offset(row) + column;
    switch (dtype_) {
      case DType::f64:
        return static_cast<const double*>(data_)[i];
      case DType::f32:
        return static_cast<double>(static_cast<const float*>(data_)[i]);
      case DType::bf16:
        return static_cast<double>(static_cast<float>(static_cast<const BFloat16*>(data_)[i]));
      case DType::f16:
        return static_cast<double>(static_cast<float>(static_cast<const Float16*>(data_)[i]));
      case DType::i64:
        return static_cast<double>(static_cast<const std::int64_t*>(data_)[i]);
      case DType::i32:
        return static_cast<double>(static_cast<const std::int32_t*>(data_)[i]);
      case DType::u16:
        return static_cast<double>(static_cast<const std::uint16_t*>(data_)[i]);
      case DType::u8:
        return static_cast<double>(static_cast<const std::uint8_t*>(data_)[i]);
    }
    return 0.0;
  }
  double operator()(std::int64_t column) const { return (*this)(0, column); }

  // Floating dtypes only.
  void set(std::int64_t row, std::int64_t column, double value) const {
    const std::int64_t i = rows_.offset(row) + column;
    switch (dtype_) {
      case DType::f64:
        static_cast<double*>(data_)[i] = value;
        break;
      case DType::f32:
        static_cast<float*>(data_)[i] = static_cast<float>(value);
        break;
      case DType::bf16:
        static_cast<BFloat16*>(data_)[i] = BFloat16(value);
        break;
      case DType::f16:
        static_cast<Float16*>(data_)[i] = Float16(value);
        break;
      default:
        throw Error(std::string("elements of dtype ") + name_of(dtype_) + " cannot be set");
    }
  }
  void set(std::int64_t column, double value) const { set(0, column, value); }

  void add(std::int64_t row, std::int64_t column, double value) const {
    set(row, column, (*this)(row, column) + value);
  }
  void add(std::int64_t column, double value) const { add(0, column, value); }

 private:
  void* data_;
  DType dtype_;
  Rows rows_;
};

}  // namespace flashgla::ops

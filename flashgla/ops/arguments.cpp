#include "flashgla/ops/arguments.h"

#include "flashgla/base/names.h"

namespace flashgla::ops {

std::string to_string(DTypes dtypes) {
  std::string text;
  for (unsigned i = 0; i <= static_cast<unsigned>(DType::u8); ++i) {
    const auto dtype = static_cast<DType>(i);
    if (dtypes.has(dtype)) text += std::string(text.empty() ? "" : " or ") + name_of(dtype);
  }
  return text;
}

void Arguments::fail(const char* name, const std::string& actual, const std::string& expected) const {
  throw Error(operation_, name, actual, expected);
}

void Arguments::check(const char* name, const TensorView& view, DTypes dtypes, Layout layout) const {
  if (!view) fail(name, "is absent", "a tensor");
  if (view.device != device_) fail(name, "is on " + name_of(view.device), name_of(device_) + " (as the context)");
  if (!dtypes.has(view.dtype)) fail(name, std::string("has dtype ") + name_of(view.dtype), to_string(dtypes));
  const int last = view.rank() - 1;
  if (layout == Layout::rows && last >= 0 && view.size(last) > 1 && view.stride[last] != 1) {
    fail(name, "has stride " + std::to_string(view.stride[last]) + " in its last dimension", "1");
  }
  if (layout == Layout::contiguous && !view.is_contiguous()) {
    fail(name, "of shape " + flashgla::to_string(view.shape) + " is not contiguous", "contiguous memory");
  }
}

void Arguments::check(const char* name, const TensorView& view, DTypes dtypes, const Shape& shape, const char* as,
                      Layout layout) const {
  if (view && !(view.shape == shape)) {
    fail(name, "has shape " + flashgla::to_string(view.shape),
         flashgla::to_string(shape) + (*as ? " (as " + std::string(as) + ")" : ""));
  }
  check(name, view, dtypes, layout);
}

void Arguments::check_rank(const char* name, const TensorView& view, int rank) const {
  if (view && view.rank() != rank) {
    fail(name, "has shape " + flashgla::to_string(view.shape), std::to_string(rank) + " dimensions");
  }
}

void Arguments::check_absent(const char* name, const TensorView& view, const char* why) const {
  if (view) fail(name, "is present", std::string("none ") + why);
}

void Arguments::check_kept(const TensorView& kept, std::size_t bytes) const {
  if (!kept) return;
  check("kept", kept, DType::u8, Shape({static_cast<std::int64_t>(bytes)}), "kept_bytes", Layout::contiguous);
}

std::int64_t rows_of(const Shape& shape) {
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < shape.rank(); ++i) rows *= shape[i];
  return rows;
}

Support supports_f32_and_bf16(std::initializer_list<DType> dtypes) {
  for (const DType dtype : dtypes) {
    if (dtype != DType::f32 && dtype != DType::bf16) {
      return Support::no(std::string("has f32 and bf16, not ") + name_of(dtype));
    }
  }
  return Support::yes();
}

}  // namespace flashgla::ops

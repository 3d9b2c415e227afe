#include "flashgla/ops/elementwise/elementwise.h"

#include <cstring>

#include "flashgla/base/names.h"
#include "flashgla/ops/elementwise/implementations.h"
#include "flashgla/ops/rows.h"

namespace flashgla::ops::elementwise {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {
const Implementation& selected(const char* operation, const Context& context, DType in, DType out) {
  return select(operation, implementations(), Problem{in, out}, context.architecture(),
                context.forced_implementation());
}

struct Named {
  const char* name;
  const TensorView& view;
};
// For tensors that all have the first one's dtype and shape; throws Error else.
const Implementation& selected(const char* operation, const Context& context, std::initializer_list<Named> tensors) {
  const Arguments arguments(operation, context);
  const auto& [name, view] = *tensors.begin();
  arguments.check(name, view, kFloating);
  for (const Named& other : std::span(tensors).subspan(1)) {
    arguments.check(other.name, other.view, view.dtype, view.shape, name);
  }
  return selected(operation, context, view.dtype, view.dtype);
}
}  // namespace

void add(Context& context, const TensorView& x, const TensorView& y) {
  const Arguments arguments("add", context);
  arguments.check("x", x, kFloating);
  arguments.check("y", y, {x.dtype, accumulator_of(x.dtype)}, x.shape, "x");
  const Implementation& implementation = selected("add", context, x.dtype, y.dtype);
  if (!context.planning()) implementation.add_to(context, x, y, y);
}

void add_to(Context& context, const TensorView& a, const TensorView& b, const TensorView& out) {
  const Implementation& implementation = selected("add_to", context, {{"a", a}, {"b", b}, {"out", out}});
  if (!context.planning()) implementation.add_to(context, a, b, out);
}

void multiply(Context& context, const TensorView& a, const TensorView& b, const TensorView& out) {
  const Implementation& implementation = selected("multiply", context, {{"a", a}, {"b", b}, {"out", out}});
  if (!context.planning()) implementation.multiply(context, a, b, out);
}

void scale(Context& context, const TensorView& x, double factor) {
  Arguments("scale", context).check("x", x, kFloating);
  const Implementation& implementation = selected("scale", context, x.dtype, x.dtype);
  if (!context.planning()) implementation.scale(context, x, factor);
}

void zero(Context& context, const TensorView& view) {
  constexpr DTypes kAny{DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u16, DType::u8};
  Arguments("zero", context).check("view", view, kAny);
  // The bytes are the queue's to set, whatever their dtype; a forced implementation must be of this device all the
  // same.
  selected("zero", context, DType::f32, DType::f32);
  if (context.planning()) return;
  if (view.is_contiguous()) {
    context.queue().zero(view.data, view.bytes());
    return;
  }
#ifdef FLASHGLA_CUDA
  if (view.device.kind == Device::Kind::cuda) {
    if (size_of(view.dtype) == 1) {
      throw Error("zero", "view", "of shape " + to_string(view.shape) + " is not contiguous",
                  "contiguous memory for u8 on " + name_of(view.device));
    }
    return zero_rows_on_device(context, view);
  }
#endif
  const Rows rows(view);
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  for_each_piece(context, {&rows}, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    std::memset(static_cast<std::byte*>(view.data) + (rows.offset(row) + begin) * size, 0,
                static_cast<std::size_t>(count * size));
  });
}

void convert(Context& context, const TensorView& src, const TensorView& dst) {
  const Arguments arguments("convert", context);
  arguments.check("src", src, kFloating);
  arguments.check("dst", dst, kFloating, src.shape, "src");
  const Implementation& implementation = selected("convert", context, src.dtype, dst.dtype);
  if (!context.planning()) implementation.convert(context, src, dst);
}

void column_sum(Context& context, const TensorView& dy, const TensorView& db, bool accumulate) {
  const Arguments arguments("column_sum", context);
  arguments.check("dy", dy, kFloating);
  if (dy.rank() < 1) arguments.fail("dy", "has shape []", "[...,N]");
  arguments.check("db", db, accumulator_of(dy.dtype), Shape({dy.size(-1)}), "dy's last dimension");
  selected("column_sum", context, dy.dtype, db.dtype).column_sum(context, dy, db, accumulate);
}

void silu_forward(Context& context, const TensorView& x, const TensorView& y) {
  const Implementation& implementation = selected("silu", context, {{"x", x}, {"y", y}});
  if (!context.planning()) implementation.silu_forward(context, x, y);
}

void silu_backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  const Implementation& implementation = selected("silu", context, {{"x", x}, {"dy", dy}, {"dx", dx}});
  if (!context.planning()) implementation.silu_backward(context, x, dy, dx);
}

void squared_relu_forward(Context& context, const TensorView& x, const TensorView& y) {
  const Implementation& implementation = selected("squared_relu", context, {{"x", x}, {"y", y}});
  if (!context.planning()) implementation.squared_relu_forward(context, x, y);
}

void squared_relu_backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  const Implementation& implementation = selected("squared_relu", context, {{"x", x}, {"dy", dy}, {"dx", dx}});
  if (!context.planning()) implementation.squared_relu_backward(context, x, dy, dx);
}

void sigmoid_gate_forward(Context& context, const TensorView& gate, const TensorView& x, const TensorView& y) {
  const Implementation& implementation = selected("sigmoid_gate", context, {{"x", x}, {"gate", gate}, {"y", y}});
  if (!context.planning()) implementation.sigmoid_gate_forward(context, gate, x, y);
}

void sigmoid_gate_backward(Context& context, const TensorView& gate, const TensorView& x, const TensorView& dy,
                           const TensorView& dgate, const TensorView& dx) {
  const Implementation& implementation =
      selected("sigmoid_gate", context, {{"x", x}, {"gate", gate}, {"dy", dy}, {"dgate", dgate}, {"dx", dx}});
  if (!context.planning()) implementation.sigmoid_gate_backward(context, gate, x, dy, dgate, dx);
}

}  // namespace flashgla::ops::elementwise

#include "flashgla/ops/swiglu/swiglu.h"

#include "flashgla/ops/swiglu/implementations.h"

namespace flashgla::ops::swiglu {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {
const Implementation& selected(const Context& context, DType dtype, DType y_dtype) {
  return select("swiglu", implementations(), Problem{dtype, y_dtype}, context.architecture(),
                context.forced_implementation());
}
}  // namespace

void forward(Context& context, const TensorView& gate, const TensorView& up, const TensorView& y) {
  const Arguments arguments("swiglu", context);
  arguments.check("gate", gate, kFloating);
  arguments.check("up", up, gate.dtype, gate.shape, "gate");
  arguments.check("y", y, gate.dtype == DType::f32 ? DTypes{DType::f32, DType::bf16, DType::f16} : DTypes{gate.dtype});
  arguments.check("y", y, y.dtype, gate.shape, "gate");
  const Implementation& implementation = selected(context, gate.dtype, y.dtype);
  if (!context.planning()) implementation.forward(context, gate, up, y);
}

void backward(Context& context, const TensorView& gate, const TensorView& up, const TensorView& dy,
              const TensorView& dgate, const TensorView& dup, const TensorView& y) {
  const Arguments arguments("swiglu", context);
  arguments.check("gate", gate, kFloating);
  arguments.check("up", up, gate.dtype, gate.shape, "gate");
  arguments.check("dy", dy, gate.dtype, gate.shape, "gate");
  arguments.check("dgate", dgate, gate.dtype, gate.shape, "gate");
  arguments.check("dup", dup, gate.dtype, gate.shape, "gate");
  if (y) arguments.check("y", y, gate.dtype, gate.shape, "gate");
  const Implementation& implementation = selected(context, gate.dtype, gate.dtype);
  if (!context.planning()) implementation.backward(context, gate, up, dy, dgate, dup, y);
}

}  // namespace flashgla::ops::swiglu

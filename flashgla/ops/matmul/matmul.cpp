#include "flashgla/ops/matmul/matmul.h"

#include "flashgla/ops/matmul/implementations.h"

namespace flashgla::ops::matmul {

std::span<const Implementation> implementations() {
  static const Implementation table[] = {
#ifdef FLASHGLA_CUDA
      kCudaFewRows, kCublasLt, kCublasLtInParts, kCudaTiles,
#endif
      kStream,      kPanels,   kOneDNN,          kConverted, kReference};
  return table;
}

namespace {

void check_matrix(const Arguments& arguments, const char* name, const TensorView& view, DTypes dtypes) {
  arguments.check(name, view, dtypes, Layout::any);
  arguments.check_rank(name, view, 2);
  // A dimension of size 1 may have any stride.
  const bool rows = view.stride[1] == 1 || view.size(1) <= 1;
  const bool columns = view.stride[0] == 1 || view.size(0) <= 1;
  if (!rows && !columns) {
    arguments.fail(name, "has strides [" + std::to_string(view.stride[0]) + "," + std::to_string(view.stride[1]) + "]",
                   "one of them 1");
  }
}

}  // namespace

void run(Context& context, const TensorView& a, const TensorView& b, const TensorView& c, const Options& options) {
  const Arguments arguments("matmul", context);
  check_matrix(arguments, "a", a, {DType::f64, DType::f32, DType::bf16});
  check_matrix(arguments, "b", b, a.dtype == DType::f32 ? DTypes{DType::f32, DType::bf16} : DTypes{a.dtype});
  check_matrix(arguments, "c", c, a.dtype == DType::bf16 ? DTypes{DType::bf16, DType::f32} : DTypes{a.dtype});
  if (b.size(0) != a.size(1)) {
    arguments.fail("b", "has shape " + to_string(b.shape), "[" + std::to_string(a.size(1)) + ",N] (as a's columns)");
  }
  const Shape expected({a.size(0), b.size(1)});
  if (!(c.shape == expected)) arguments.fail("c", "has shape " + to_string(c.shape), to_string(expected));
  if (options.bias) {
    arguments.check("bias", options.bias, a.dtype == DType::f64 ? DTypes{DType::f64} : DTypes{DType::f32, DType::bf16},
                    Shape({b.size(1)}), "b's columns", Layout::contiguous);
  }
  if (c.numel() == 0) return;
  const Problem problem{a.size(0),
                        b.size(1),
                        a.size(1),
                        a.dtype,
                        b.dtype,
                        c.dtype,
                        a.stride[1] == 1 || a.size(1) <= 1,
                        b.stride[0] == 1 || b.size(0) <= 1,
                        c.stride[1] == 1 || c.size(1) <= 1,
                        static_cast<bool>(options.bias)};
  select("matmul", implementations(), problem, context.architecture(), context.forced_implementation())
      .run(context, a, b, c, options);
}

}  // namespace flashgla::ops::matmul

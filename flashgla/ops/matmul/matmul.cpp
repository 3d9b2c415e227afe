#include "flashgla/ops/matmul/matmul.h"

#include "flashgla/ops/elementwise/elementwise.h"
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

Options added_in_place(Context& context, const TensorView& c, const Options& options) {
  if (!options.addend) return options;
  if (options.addend.data != c.data) {
    const bool by_columns = c.stride[1] != 1 && c.size(1) > 1;
    const auto in_rows = [&](const TensorView& view) { return by_columns ? view.transpose(0, 1) : view; };
    elementwise::convert(context, in_rows(options.addend), in_rows(c));
  }
  return {true, options.bias, {}};
}

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
  if (options.addend) {
    arguments.check("addend", options.addend, c.dtype, c.shape, "c", Layout::any);
    if (options.accumulate) arguments.fail("addend", "is present", "none with accumulate");
    const int dense = c.stride[1] == 1 || c.size(1) <= 1 ? 1 : 0;  // the dimension along which c is contiguous
    if (options.addend.stride[static_cast<std::size_t>(dense)] != 1 && c.size(dense) > 1) {
      arguments.fail("addend",
                     "has strides [" + std::to_string(options.addend.stride[0]) + "," +
                         std::to_string(options.addend.stride[1]) + "]",
                     "1 where c has it");
    }
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
  const Implementation& selected =
      select("matmul", implementations(), problem, context.architecture(), context.forced_implementation());
  selected.run(context, a, b, c, selected.adds_elsewhere ? options : added_in_place(context, c, options));
}

}  // namespace flashgla::ops::matmul

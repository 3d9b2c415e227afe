// Rows of the table that run on CUDA.
#include <algorithm>
#include <bit>

#include "flashgla/ops/matmul/cuda/kernels.h"
#include "flashgla/ops/matmul/cuda/products.h"
#include "flashgla/ops/matmul/implementations.h"

namespace flashgla::ops::matmul {

namespace {

using cuda::Key;
using cuda::Matrix;

// A matrix of which one stride is 1. Of a single line the other stride says nothing.
Matrix matrix_of(const TensorView& view) {
  constexpr std::size_t kMostAlignment = 16;  // what copies of memory ask for at most
  Matrix matrix;
  matrix.dtype = view.dtype;
  matrix.transposed = !(view.stride[1] == 1 || view.size(1) <= 1);
  const std::int64_t length = view.size(matrix.transposed ? 0 : 1), lines = view.size(matrix.transposed ? 1 : 0);
  matrix.leading = lines <= 1 ? length : view.stride[matrix.transposed ? 1 : 0];
  const auto address = reinterpret_cast<std::uintptr_t>(view.data) | kMostAlignment;
  matrix.alignment = 1 << std::countr_zero(address);
  return matrix;
}

// Lines that overlap, as in a broadcast matrix.
bool overlaps(const TensorView& view, const Matrix& matrix) {
  return matrix.leading < view.size(matrix.transposed ? 0 : 1);
}

// Whether one layout and alignment, c's, says how both lie.
bool lies_as(const TensorView& addend, const TensorView& c) {
  return addend.stride[0] == c.stride[0] && addend.stride[1] == c.stride[1] &&
         matrix_of(addend).alignment >= matrix_of(c).alignment;
}

// By cuBLASLt; by tiles what it has no algorithm for.
void multiply(Context& context, const TensorView& a, const TensorView& b, const TensorView& c, const Options& options) {
  const Matrix c_matrix = matrix_of(c);
  if (c_matrix.transposed && !options.bias) {
    Options transposed = options;
    if (options.addend) transposed.addend = options.addend.transpose(0, 1);
    return multiply(context, b.transpose(0, 1), a.transpose(0, 1), c.transpose(0, 1), transposed);
  }
  if (options.addend && !lies_as(options.addend, c)) {
    return multiply(context, a, b, c, added_in_place(context, c, options));
  }
  const bool adds = options.accumulate || options.addend;
  const Key key{a.size(0),    b.size(1), a.size(1), matrix_of(a),
                matrix_of(b), c_matrix,  adds,      static_cast<bool>(options.bias)};
  // The library adds a bias by vectors of which it does not say how they must lie.
  constexpr std::uintptr_t kBiasAlignment = 16;
  const bool odd_bias = options.bias && (options.bias.dtype != c.dtype ||
                                         reinterpret_cast<std::uintptr_t>(options.bias.data) % kBiasAlignment != 0);
  const bool odd = c_matrix.transposed || overlaps(a, key.a) || overlaps(b, key.b) || key.k == 0 || odd_bias;
  if (odd) return cuda::multiply_by_tiles(context, a, b, c, added_in_place(context, c, options));
  auto& products = context.queue().resource<cuda::Products>();
  const cuda::Plan& plan = products.plan(key);
  if (!plan.available) return cuda::multiply_by_tiles(context, a, b, c, added_in_place(context, c, options));
  if (context.planning()) return;
  products.run(plan, {a.data, b.data, options.addend ? options.addend.data : c.data, c.data, options.bias.data});
}

// f32 x bf16: the f32 operand in three bf16 parts that add up to it, so that every product is exact as with f32
// operands; smallest parts first.
void multiply_mixed(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                    const Options& options) {
  ArenaScope scope(context.scratch());
  const bool transposed = matrix_of(a).transposed;
  const TensorView source = transposed ? a.transpose(0, 1) : a;
  TensorView parts[3];
  for (TensorView& part : parts) {
    part = context.scratch().tensor(source.shape, DType::bf16, "matmul: parts of an f32 matrix");
  }
  if (!context.planning()) cuda::split(context.queue(), source, parts[0], parts[1], parts[2]);
  Options each = options;
  for (int i = 2; i >= 0; --i) {
    multiply(context, transposed ? parts[i].transpose(0, 1) : parts[i], b, c, each);
    each = Options{};
    each.accumulate = true;
  }
}

Support has_dtypes(const Problem& problem) {
  return problem.a == DType::f64 ? Support::no("has f32 and bf16, not f64") : Support::yes();
}

Support few_rows_supports(const Problem& problem, const Architecture&) {
  const bool narrow = problem.a == DType::bf16;
  if (problem.m > (narrow ? cuda::kFewNarrowRows : cuda::kFewRows))
    return Support::no("takes up to 16 rows, 4 of bf16");
  if (!problem.b_columns_contiguous) return Support::no("takes b as the transpose of a row-major matrix");
  return has_dtypes(problem);
}

Support library_supports(const Problem& problem, const Architecture&) {
  if (problem.a == DType::f32 && problem.b == DType::bf16) return Support::no("takes a and b of one dtype");
  return has_dtypes(problem);
}

Support mixed_supports(const Problem& problem, const Architecture&) {
  if (problem.a != DType::f32 || problem.b != DType::bf16) return Support::no("takes f32 beside bf16");
  return Support::yes();
}

}  // namespace

const Implementation kCudaFewRows{"cuda_few_rows", Device::Kind::cuda, few_rows_supports, cuda::multiply_few_rows};
const Implementation kCublasLt{"cublaslt", Device::Kind::cuda, library_supports, multiply, true};
const Implementation kCublasLtInParts{"cublaslt_in_parts", Device::Kind::cuda, mixed_supports, multiply_mixed, true};
const Implementation kCudaTiles{"cuda_tiles", Device::Kind::cuda,
                                [](const Problem& problem, const Architecture&) { return has_dtypes(problem); },
                                cuda::multiply_by_tiles};

}  // namespace flashgla::ops::matmul

// Comparison against a float64 reference, and finite differences.
#pragma once

#include <functional>
#include <string>

#include "flashgla/base/tensor.h"

namespace flashgla::testing {

struct Difference {
  double relative = 0.0;  // ||x - ref|| / ||ref|| (2-norms); ||x|| when ref is zero; infinite with a NaN or inf in x
  double largest = 0.0;   // max |x - ref|
  double reference_rms = 0.0;
  double reference_largest = 0.0;  // max |ref|
  bool finite = true;              // no NaN or infinity in x
};

// Both on the CPU, of equal shape, of any floating dtypes and strides.
Difference difference(const TensorView& x, const TensorView& reference);

// "" when x is within the bounds, else one line that says by how much it is not. The bounds: relative error at most
// `relative`; largest error at most `largest_factor * relative` times the reference's largest magnitude.
std::string check_close(const char* name, const TensorView& x, const TensorView& reference, double relative,
                        double largest_factor = 8.0);

// True when both hold the same bits.
bool same_bits(const TensorView& a, const TensorView& b);

// A copy in another dtype, contiguous.
Tensor converted(const TensorView& view, DType dtype);

// Checks the gradient of a scalar loss() with respect to the f64 tensor x by central differences at `samples` seeded
// positions: "" or one line naming the worst position. loss must read x's memory anew at each call.
std::string check_gradient(const char* name, const TensorView& x, const TensorView& gradient,
                           const std::function<double()>& loss, int samples = 24, double step = 1e-5,
                           double relative = 1e-6);

}  // namespace flashgla::testing

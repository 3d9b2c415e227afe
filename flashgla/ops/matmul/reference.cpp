// The definition: each element one sum in f64.
#include <algorithm>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/matmul/implementations.h"

namespace flashgla::ops::matmul {

namespace {

// A template over dtypes, unlike other references: whole models run in f64 on this one.
template <class A, class B, class C>
void multiply(Context& context, const TensorView& a, const TensorView& b, const TensorView& c, bool accumulate,
              const TensorView& bias_view) {
  const Elements bias(bias_view);
  // Sums of elements beside each other at the same time, since one alone waits for each of its additions.
  constexpr std::int64_t kAtOnce = 8;
  parallel_for(context, c.size(0), [&](std::int64_t m) {
    const A* row = a.as<A>() + m * a.stride[0];
    for (std::int64_t first = 0; first < c.size(1); first += kAtOnce) {
      const std::int64_t count = std::min(kAtOnce, c.size(1) - first);
      C* out = c.as<C>() + m * c.stride[0] + first * c.stride[1];
      const B* columns = b.as<B>() + first * b.stride[1];
      double totals[kAtOnce] = {};
      for (std::int64_t j = 0; j < count; ++j) {
        if (accumulate) totals[j] = static_cast<double>(out[j * c.stride[1]]);
        if (bias_view) totals[j] += bias(first + j);
      }
      for (std::int64_t k = 0; k < a.size(1); ++k) {
        const auto factor = static_cast<double>(row[k * a.stride[1]]);
        const B* from = columns + k * b.stride[0];
        for (std::int64_t j = 0; j < count; ++j) totals[j] += factor * static_cast<double>(from[j * b.stride[1]]);
      }
      for (std::int64_t j = 0; j < count; ++j) out[j * c.stride[1]] = static_cast<C>(totals[j]);
    }
  });
}

void reference_run(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                   const Options& options) {
  if (context.planning()) return;
  dispatch_floating(a.dtype, [&](auto a_zero) {
    dispatch_floating(b.dtype, [&](auto b_zero) {
      dispatch_floating(c.dtype, [&](auto c_zero) {
        multiply<decltype(a_zero), decltype(b_zero), decltype(c_zero)>(context, a, b, c, options.accumulate,
                                                                       options.bias);
      });
    });
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_run};

}  // namespace flashgla::ops::matmul

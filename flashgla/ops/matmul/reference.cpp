// The definition: each element one sum in f64.
#include "flashgla/ops/elements.h"
#include "flashgla/ops/matmul/implementations.h"

namespace flashgla::ops::matmul {

namespace {

// A template over dtypes, unlike other references: whole models run in f64 on this one.
template <class A, class B, class C>
void multiply(Context& context, const TensorView& a, const TensorView& b, const TensorView& c, bool accumulate,
              const TensorView& bias_view) {
  const Elements bias(bias_view);
  parallel_for(context, c.size(0), [&](std::int64_t m) {
    const A* row = a.as<A>() + m * a.stride[0];
    for (std::int64_t n = 0; n < c.size(1); ++n) {
      const B* column = b.as<B>() + n * b.stride[1];
      C& out = c.as<C>()[m * c.stride[0] + n * c.stride[1]];
      double total = (accumulate ? static_cast<double>(out) : 0.0) + (bias_view ? bias(n) : 0.0);
      for (std::int64_t k = 0; k < a.size(1); ++k) {
        total += static_cast<double>(row[k * a.stride[1]]) * static_cast<double>(column[k * b.stride[0]]);
      }
      out = static_cast<C>(total);
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

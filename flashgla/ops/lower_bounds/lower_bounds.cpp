#include "flashgla/ops/lower_bounds/lower_bounds.h"

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elements.h"
#include "flashgla/ops/lower_bounds/column.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/ops/lower_bounds/cuda/lower_bounds.h"
#endif

namespace flashgla::ops::lower_bounds {

namespace {

void check(const Arguments& arguments, const TensorView& w, std::int64_t layer, const char* name,
           const TensorView& bound) {
  arguments.check("w", w, kFloating, Layout::contiguous);
  arguments.check_rank("w", w, 2);
  arguments.check(name, bound, accumulator_of(w.dtype), Shape({w.size(1)}), "w's columns", Layout::contiguous);
  if (layer < 1 || layer >= w.size(0)) {
    arguments.fail("layer", "is " + std::to_string(layer), "1 to " + std::to_string(w.size(0) - 1));
  }
}

Column<double> column_of(const Elements& w, std::int64_t d, std::int64_t layer) {
  return Column<double>([&](std::int64_t j) { return w(j, d); }, w.rows(), layer);
}

}  // namespace

void forward(Context& context, const TensorView& w, std::int64_t layer, const TensorView& bound) {
  const Arguments arguments("lower_bounds", context);
  check(arguments, w, layer, "bound", bound);
  if (context.planning()) return;
#ifdef FLASHGLA_CUDA
  if (w.device.kind == Device::Kind::cuda) return cuda::forward(context, w, layer, bound);
#endif
  const Elements in(w), out(bound);
  parallel_for(context, w.size(1), [&](std::int64_t d) { out.set(0, d, column_of(in, d, layer).bound); });
}

void backward(Context& context, const TensorView& w, std::int64_t layer, const TensorView& dbound,
              const TensorView& dw) {
  const Arguments arguments("lower_bounds", context);
  check(arguments, w, layer, "dbound", dbound);
  arguments.check("dw", dw, accumulator_of(w.dtype), w.shape, "w", Layout::contiguous);
  if (context.planning()) return;
#ifdef FLASHGLA_CUDA
  if (w.device.kind == Device::Kind::cuda) return cuda::backward(context, w, layer, dbound, dw);
#endif
  const Elements in(w), of_bound(dbound), of_w(dw);
  parallel_for(context, w.size(1), [&](std::int64_t d) {
    const Column<double> column = column_of(in, d, layer);
    for (std::int64_t j = 0; j < w.size(0); ++j) {
      of_w.add(j, d, of_bound(d) * column.gradient(in(j, d), j, layer));
    }
  });
}

}  // namespace flashgla::ops::lower_bounds

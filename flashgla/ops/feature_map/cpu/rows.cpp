// A row after the other, as f32 in the first-level cache.
#include "flashgla/ops/rows.h"

#include <vector>

#include "flashgla/ops/feature_map/implementations.h"
#include "flashgla/ops/feature_map/row.h"

namespace flashgla::ops::feature_map {

namespace {

struct OneLane {
  int rank() const { return 0; }
  int count() const { return 1; }
  float sum(float x) const { return x; }
  float largest(float x) const { return x; }
};

template <class T>
void read(const T* from, std::vector<float>& to) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = static_cast<float>(from[i]);
}
auto reader(const std::vector<float>& of) {
  return [from = of.data()](int i) { return from[i]; };
}
template <class T>
auto writer(T* to) {
  return [to](int i, float value) { to[i] = T(value); };
}

template <class T, Map kMap>
void forward_of(Context& context, const TensorView& x_view, const TensorView& y_view, bool divide) {
  const TypedRows<T> x(x_view), y(y_view);
  parallel_for_blocks(context, x.count(), rows_per_task(y.length()), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> in(static_cast<std::size_t>(x.length()));
    for (std::int64_t row = begin; row < end; ++row) {
      read(x[row], in);
      forward_row<kMap>(OneLane(), static_cast<int>(x.length()), divide, reader(in), writer(y[row]));
    }
  });
}

template <class T, Map kMap>
void backward_of(Context& context, const TensorView& x_view, const TensorView& dy_view, const TensorView& dx_view,
                 bool divide) {
  const TypedRows<T> x(x_view), dy(dy_view), dx(dx_view);
  parallel_for_blocks(context, x.count(), rows_per_task(dy.length()), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> in(static_cast<std::size_t>(x.length())), gradients(static_cast<std::size_t>(dy.length()));
    for (std::int64_t row = begin; row < end; ++row) {
      read(x[row], in);
      read(dy[row], gradients);
      backward_row<kMap>(OneLane(), static_cast<int>(x.length()), divide, reader(in), reader(gradients),
                         writer(dx[row]));
    }
  });
}

}  // namespace

const Implementation kRows{
    "rows", Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    [](Context& context, const TensorView& x, const TensorView& y, const Options& options) {
      with_map(options.map, [&](auto map) {
        (x.dtype == DType::f32 ? forward_of<float, map.value> : forward_of<BFloat16, map.value>)(context, x, y,
                                                                                                 options.divide);
      });
    },
    [](Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx, const Options& options) {
      with_map(options.map, [&](auto map) {
        (x.dtype == DType::f32 ? backward_of<float, map.value> : backward_of<BFloat16, map.value>)(context, x, dy, dx,
                                                                                                   options.divide);
      });
    }};

}  // namespace flashgla::ops::feature_map

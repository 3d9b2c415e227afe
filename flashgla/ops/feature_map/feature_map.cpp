#include "flashgla/ops/feature_map/feature_map.h"

#include "flashgla/ops/feature_map/implementations.h"

namespace flashgla::ops::feature_map {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kRows, kReference};
#else
  static const Implementation table[] = {kRows, kReference};
#endif
  return table;
}

namespace {

constexpr const char* kName = "feature_map";
constexpr std::int64_t kMostChannels = 1 << 24;

const Implementation& selected(const Context& context, const TensorView& x) {
  return select(kName, implementations(), Problem{x.dtype}, context.architecture(), context.forced_implementation());
}

// x, and what stands for its features.
void check(const Arguments& arguments, const TensorView& x, const char* name, const TensorView& features,
           const Options& options) {
  arguments.check("x", x, kFloating);
  if (x.rank() < 1 || x.size(-1) < 1 || x.size(-1) > kMostChannels) {
    arguments.fail("x", "has shape " + to_string(x.shape), "[...,C] with C from 1 to " + std::to_string(kMostChannels));
  }
  Shape shape = x.shape;
  shape[-1] = features_of(options.map, x.size(-1));
  arguments.check(name, features, x.dtype, shape, "the features of x");
}

}  // namespace

void forward(Context& context, const TensorView& x, const TensorView& y, const Options& options) {
  const Arguments arguments(kName, context);
  check(arguments, x, "y", y, options);
  const Implementation& implementation = selected(context, x);
  if (!context.planning()) implementation.forward(context, x, y, options);
}

void backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx,
              const Options& options) {
  const Arguments arguments(kName, context);
  check(arguments, x, "dy", dy, options);
  arguments.check("dx", dx, x.dtype, x.shape, "x");
  const Implementation& implementation = selected(context, x);
  if (!context.planning()) implementation.backward(context, x, dy, dx, options);
}

}  // namespace flashgla::ops::feature_map

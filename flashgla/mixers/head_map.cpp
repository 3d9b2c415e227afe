#include "flashgla/mixers/head_map.h"

#include "flashgla/ops/elementwise/elementwise.h"

namespace flashgla::mixers {

namespace {

namespace elementwise = ops::elementwise;
namespace feature_map = ops::feature_map;

TensorView scratch_like(Context& context, const TensorView& x, std::int64_t channels) {
  Shape shape = x.shape;
  shape[-1] = channels;
  return context.scratch().tensor(shape, x.dtype, "feature maps");
}

TensorView contiguous(Context& context, const TensorView& x) {
  const TensorView copy = scratch_like(context, x, x.size(-1));
  elementwise::convert(context, x, copy);
  return copy;
}

}  // namespace

HeadMap::HeadMap(HeadMapSettings::Kind kind, const std::string& name, std::int64_t channels, double deviation)
    : kind_(kind), channels_(channels) {
  const auto part = [&](const char* layer) { return nn::Linear::Part{name + layer, channels, nn::Quantisation::none}; };
  if (kind == Kind::elementwise_product) {
    linear_.push_back(nn::Linear({part(".layer1"), part(".layer2")}, channels, deviation, true));
  } else if (kind == Kind::hedgehog || kind == Kind::t2r) {
    linear_.push_back(nn::Linear({part(".layer")}, channels, deviation, kind == Kind::hedgehog));
  }
}

void HeadMap::for_each_parameter(const nn::ParameterVisitor& visit) {
  for (nn::Linear& linear : linear_) {
    linear.for_each_parameter([&](nn::Parameter& parameter) {
      parameter.multiplied = false;  // by every head of a token
      visit(parameter);
    });
  }
}

ops::feature_map::Options HeadMap::options(bool divide) const {
  using feature_map::Map;
  switch (kind_) {
    case Kind::relu:
    case Kind::t2r:
      return {Map::relu, divide};
    case Kind::elu:
      return {Map::elu_plus_one, divide};
    case Kind::hedgehog:
      return {Map::both_signs, divide};
    case Kind::dpfp:
      return {Map::dpfp, divide};
    case Kind::as_is:
    case Kind::elementwise_product:
      break;
  }
  return {Map::as_is, divide};
}

std::int64_t HeadMap::features() const { return feature_map::features_of(options(false).map, channels_); }

double HeadMap::flops() const {
  return linear_.empty() ? 0.0 : 2.0 * static_cast<double>(channels_ * linear_.front().out());
}

TensorView HeadMap::project(Context& context, const TensorView& x) const {
  const TensorView projected = scratch_like(context, x, linear_.front().out());
  linear_.front().forward(context, x, projected);
  return projected;
}

void HeadMap::multiply_parts(Context& context, const TensorView& projected, const TensorView& product) const {
  elementwise::multiply(context, linear_.front().part(projected, 0), linear_.front().part(projected, 1), product);
}

void HeadMap::forward(Context& context, const TensorView& x, const TensorView& y, bool divide) const {
  const ArenaScope scope(context.scratch());
  TensorView u = x;
  if (!linear_.empty()) u = project(context, contiguous(context, x));
  if (kind_ == Kind::elementwise_product) {
    const TensorView product = divide ? scratch_like(context, x, channels_) : y;
    multiply_parts(context, u, product);
    if (!divide) return;
    u = product;
  }
  feature_map::forward(context, u, y, options(divide));
}

void HeadMap::backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx,
                       bool divide) const {
  const ArenaScope scope(context.scratch());
  if (linear_.empty()) return feature_map::backward(context, x, dy, dx, options(divide));
  const nn::Linear& linear = linear_.front();
  const TensorView inputs = contiguous(context, x), projected = project(context, inputs);
  const TensorView dprojected = scratch_like(context, projected, linear.out());
  if (kind_ == Kind::elementwise_product) {
    TensorView dproduct = dy;
    if (divide) {
      const TensorView product = scratch_like(context, x, channels_);
      multiply_parts(context, projected, product);
      dproduct = scratch_like(context, x, channels_);
      feature_map::backward(context, product, dy, dproduct, options(divide));
    }
    for (const std::size_t one : {0, 1}) {
      elementwise::multiply(context, dproduct, linear.part(projected, 1 - one), linear.part(dprojected, one));
    }
  } else {
    feature_map::backward(context, projected, dy, dprojected, options(divide));
  }
  const TensorView dinputs = scratch_like(context, x, channels_);
  linear.backward(context, inputs, dprojected, dinputs);
  elementwise::convert(context, dinputs, dx);
}

}  // namespace flashgla::mixers

// Feature maps with parameters, or of more than an element, between a head's projections and the operator.
//
//     map                  y of x [K]                                   parameters                          features
//     as_is, relu, elu     x, max(x, 0), elu(x) + 1                     none                                K
//     t2r                  max(W x, 0)                                  layer.weight                        K
//     elementwise_product  (W_1 x + b_1)(W_2 x + b_2)                   layer1, layer2: weight and bias     K
//     hedgehog             softmax of (2 u, -2 u), u = W x + b          layer.weight and bias               2 K
//     dpfp                 products of neighbours (ops/feature_map)     none                                8 K
//
// and on wish y divided by its sum. All heads have the same parameters.
#pragma once

#include <string>
#include <vector>

#include "flashgla/nn/linear.h"
#include "flashgla/ops/feature_map/feature_map.h"

namespace flashgla::mixers {

struct HeadMapSettings {
  enum class Kind : std::uint8_t { as_is, relu, elu, t2r, elementwise_product, hedgehog, dpfp };
  Kind kind = Kind::as_is;
  bool tied = false;  // q and k have one map
  bool divide_q = false, divide_k = false;
};

class HeadMap {
 public:
  // Parameters are named "<name>.layer.weight" and the like; K is `channels`.
  HeadMap(HeadMapSettings::Kind kind, const std::string& name, std::int64_t channels, double deviation);

  void for_each_parameter(const nn::ParameterVisitor& visit);
  std::int64_t features() const;
  // FLOPs of a row forward; forward and backward: three times as many.
  double flops() const;

  // x [B,T,H,K], y [B,T,H,features] contiguous.
  void forward(Context& context, const TensorView& x, const TensorView& y, bool divide) const;
  // dx like x; parameters' gradients are added to. What forward made between is made again.
  void backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx, bool divide) const;

 private:
  using Kind = HeadMapSettings::Kind;
  ops::feature_map::Options options(bool divide) const;
  // W x + b of each row, contiguous.
  TensorView project(Context& context, const TensorView& x) const;
  // Of elementwise_product's two.
  void multiply_parts(Context& context, const TensorView& projected, const TensorView& product) const;

  Kind kind_;
  std::int64_t channels_;
  std::vector<nn::Linear> linear_;  // none, or one
};

}  // namespace flashgla::mixers

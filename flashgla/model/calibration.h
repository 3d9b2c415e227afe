// What the matrices of a model get as inputs on a text: by this, quantisation decides which errors matter.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "flashgla/model/language_model.h"

namespace flashgla::model {

class Calibration {
 public:
  // Reads the tokens in windows of `length`, each from an empty state. products: x^T x too, 4 bytes a pair of columns
  // of each layer.
  Calibration(Context& context, LanguageModel& model, std::span<const std::int32_t> tokens, std::int64_t length,
              bool products);

  // Of the inputs of this matrix: mean squares f32 [columns], and mean x^T x f32 [columns, columns]. Absent where they
  // are not known: of the head, which is no linear layer, and of products that were not asked for.
  TensorView squares_of(const nn::Parameter& parameter) const { return find(squares_, parameter); }
  TensorView products_of(const nn::Parameter& parameter) const { return find(products_, parameter); }

 private:
  using Rows = std::map<std::string, Tensor>;  // by the first weight of a layer
  TensorView find(const Rows& rows, const nn::Parameter& parameter) const;
  void add(Context& context, const std::string& name, const TensorView& x, bool products);

  Rows squares_, products_;
  std::map<std::string, std::string> first_of_;  // a weight to the first one of its layer
};

}  // namespace flashgla::model

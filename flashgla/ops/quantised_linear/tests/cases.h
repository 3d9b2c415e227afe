// The operator as cases that test and bench share.
#pragma once

#include <cmath>

#include "flashgla/ops/quantised_linear/quantise.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::quantised_linear {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

struct Form {
  bool accumulate = false, bias = false;
  bool bf16 = false;  // x and y, as GPUs have them
};

// An x of 16-bit integers is off by at most 1 / 65278 of its group's largest magnitude, evenly: relative to the group's
// 2-norm by sqrt(32 / 12) / 32639 on average at most, and so is the product with weights that know nothing of it.
constexpr double kTolerance = 5.1e-5 + 1e-5;

inline testing::OperatorCase linear_case(Format format, std::int64_t rows, std::int64_t in, std::int64_t out,
                                         Form form = {}) {
  testing::OperatorCase result;
  result.name = std::string("quantised linear ") + name_of(format) + " " + to_string(Shape({rows, in, out})) +
                (form.accumulate ? " accumulate" : "") + (form.bias ? " bias" : "") + (form.bf16 ? " in bf16" : "");
  result.arguments.push_back({"x", Shape({rows, in})});
  testing::Argument weight{"weight", packed_shape(format, out, in), Role::input, Kind::fixed};
  weight.dtype = DType::u8;
  weight.strided = false;
  weight.fill = [=](const TensorView& packed) {
    Context context;
    const Tensor values = testing::random_normal({out, in}, DType::f32, 7, 1.0 / std::sqrt(static_cast<double>(in)));
    quantise(context, values, {}, packed);
  };
  result.arguments.push_back(weight);
  if (form.bias) {
    testing::Argument bias{"bias", Shape({out}), Role::input, Kind::parameter};
    bias.strided = false;
    result.arguments.push_back(bias);
  }
  testing::Argument y{"y", Shape({rows, out}), form.accumulate ? Role::accumulated : Role::output};
  if (!form.bf16) y.relative = kTolerance;
  result.arguments.push_back(y);
  result.run = [=](Context& context, const NamedTensors& t) {
    run(context, t["x"], t["weight"], t["y"], {form.accumulate, t["bias"]});
  };
  result.dtypes = {{DType::f32, DType::f32}, {DType::f32, DType::bf16}};
  if (form.bf16) result.dtypes = {{DType::bf16, DType::bf16}};
  return result;
}

}  // namespace flashgla::ops::quantised_linear

// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/matmul/matmul.h"
#include "testing/conformance.h"

namespace flashgla::ops::matmul {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

struct Form {
  bool a_transposed = false, b_transposed = false, c_transposed = false, accumulate = false, bias = false,
       addend = false;
};

// c of the activations' dtype, or f32.
inline testing::OperatorCase product_case(std::int64_t m, std::int64_t n, std::int64_t k, Form form, Kind c_kind) {
  testing::OperatorCase result;
  result.name = "matmul " + to_string(Shape({m, n, k})) + (form.a_transposed ? " aT" : "") +
                (form.b_transposed ? " bT" : "") + (form.c_transposed ? " cT" : "") + (form.accumulate ? " +=" : "") +
                (form.bias ? " bias" : "") + (form.addend ? " addend" : "");
  const Shape c_shape = form.c_transposed ? Shape({n, m}) : Shape({m, n});
  result.arguments = {
      {"a", form.a_transposed ? Shape({k, m}) : Shape({m, k})},
      {"b", form.b_transposed ? Shape({n, k}) : Shape({k, n}), Role::input, Kind::parameter},
      {"c", c_shape, form.accumulate ? Role::accumulated : Role::output, c_kind},
  };
  if (form.bias) result.arguments.push_back({"bias", Shape({n}), Role::input, Kind::parameter});
  if (form.addend) result.arguments.push_back({"addend", c_shape, Role::input, c_kind});
  result.run = [form](Context& context, const NamedTensors& t) {
    auto view = [&](const char* name, bool transposed) { return transposed ? t[name].transpose(0, 1) : t[name]; };
    run(context, view("a", form.a_transposed), view("b", form.b_transposed), view("c", form.c_transposed),
        Options{form.accumulate, t["bias"], form.addend ? view("addend", form.c_transposed) : TensorView()});
  };
  return result;
}

}  // namespace flashgla::ops::matmul

// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/softmax_attention/softmax_attention.h"
#include "testing/conformance.h"

namespace flashgla::ops::softmax_attention {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// q [B,T,H,K], v of V channels, G heads of k and v. `ends`: packed sequences that end there (B = 1). `positions`:
// tokens before, of each sequence, kept in a cache of `rows`.
struct Form {
  Shape q;
  std::int64_t groups = 1;
  std::int64_t value_dim = 0;  // 0: as q's
  std::int64_t window = 0;
  std::vector<std::int32_t> ends{};
  std::vector<std::int32_t> positions{};
  std::int64_t rows = 0;
  double dropout = 0.0;

  std::int64_t v() const { return value_dim > 0 ? value_dim : q[3]; }
  std::int64_t sequences() const { return ends.empty() ? q[0] : static_cast<std::int64_t>(ends.size()); }
  Shape shape_of(std::int64_t heads, std::int64_t channels) const { return Shape({q[0], q[1], heads, channels}); }
  Shape cache(std::int64_t channels) const { return Shape({sequences(), rows, groups, channels}); }
};

inline testing::Argument dense(const char* name, const Shape& shape, Role role = Role::input,
                               Kind kind = Kind::activation) {
  testing::Argument argument{name, shape, role, kind};
  argument.strided = false;
  return argument;
}

inline std::vector<testing::Argument> inputs_of(const Form& form) {
  std::vector<testing::Argument> arguments{
      {"q", form.q}, {"k", form.shape_of(form.groups, form.q[3])}, {"v", form.shape_of(form.groups, form.v())}};
  if (!form.ends.empty()) arguments.push_back(testing::bounds(form.ends));
  if (form.rows > 0) {
    arguments.push_back(dense("past_k", form.cache(form.q[3])));
    arguments.push_back(dense("past_v", form.cache(form.v())));
    arguments.push_back(testing::integers("positions", form.positions));
  }
  if (form.dropout > 0.0) {
    testing::Argument step{"step", Shape({1}), Role::input, Kind::fixed};
    step.fill = [](const TensorView& view) { view.as<double>()[0] = 3.0; };
    arguments.push_back(step);
    arguments.push_back(testing::integers("micro_batch", {1}));
  }
  return arguments;
}

inline Inputs inputs_in(const NamedTensors& t) {
  return {t["q"], t["k"], t["v"], t["past_k"], t["past_v"], t["positions"], t["cu_seqlens"]};
}

inline Options options_in(const Form& form, const NamedTensors& t) {
  Options options{0.0, form.window};
  if (form.dropout > 0.0) options.dropout = {form.dropout, 7, 5, t["step"], t["micro_batch"]};
  return options;
}

inline testing::OperatorCase forward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = "forward " + to_string(form.q);
  result.arguments = inputs_of(form);
  result.arguments.push_back({"o", form.shape_of(form.q[2], form.v()), Role::output});
  result.arguments.push_back(dense("lse", Shape({form.q[0], form.q[1], form.q[2]}), Role::output, Kind::accumulator));
  result.run = [=](Context& context, const NamedTensors& t) {
    forward(context, inputs_in(t), {t["o"], t["lse"]}, options_in(form, t));
  };
  return result;
}

// o and lse are the forward's, computed before each run.
inline testing::OperatorCase backward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = "backward " + to_string(form.q);
  result.arguments = inputs_of(form);
  const Shape o = form.shape_of(form.q[2], form.v());
  result.arguments.push_back({"o", o, Role::output});
  result.arguments.push_back(dense("lse", Shape({form.q[0], form.q[1], form.q[2]}), Role::output, Kind::accumulator));
  result.arguments.push_back({"d_o", o});
  result.arguments.push_back({"dq", form.q, Role::output});
  result.arguments.push_back({"dk", form.shape_of(form.groups, form.q[3]), Role::output});
  result.arguments.push_back({"dv", form.shape_of(form.groups, form.v()), Role::output});
  result.run = [=](Context& context, const NamedTensors& t) {
    forward(context, inputs_in(t), {t["o"], t["lse"]}, options_in(form, t));
    backward(context, inputs_in(t), {t["o"], t["lse"]}, t["d_o"], {t["dq"], t["dk"], t["dv"]}, options_in(form, t));
  };
  return result;
}

// Rows of k and v into caches that hold others; `in_place`: they stay, else they come from `before`.
inline testing::OperatorCase append_case(const Form& form, bool in_place) {
  testing::OperatorCase result;
  result.name = "append " + to_string(form.q);
  result.arguments = inputs_of(form);
  const Role role = in_place ? Role::accumulated : Role::output;
  result.arguments.push_back(dense("k_cache", form.cache(form.q[3]), role));
  result.arguments.push_back(dense("v_cache", form.cache(form.v()), role));
  result.run = [=](Context& context, const NamedTensors& t) {
    const Appended both[] = {{t["k"], in_place ? TensorView() : t["past_k"], t["k_cache"]},
                             {t["v"], in_place ? TensorView() : t["past_v"], t["v_cache"]}};
    append(context, both, t["positions"], t["cu_seqlens"]);
  };
  return result;
}

// One token of each sequence, and a cache of `rows` with that many tokens before.
inline testing::OperatorCase step_case(const Form& form) {
  testing::OperatorCase result;
  const Shape q({form.q[0], form.q[2], form.q[3]});
  result.name = "step " + to_string(q);
  result.arguments = {{"q", q},
                      {"k", Shape({form.q[0], form.groups, form.q[3]})},
                      {"v", Shape({form.q[0], form.groups, form.v()})},
                      dense("k_cache", form.cache(form.q[3]), Role::accumulated),
                      dense("v_cache", form.cache(form.v()), Role::accumulated),
                      testing::integers("positions", form.positions),
                      {"o", Shape({form.q[0], form.q[2], form.v()}), Role::output}};
  result.run = [=](Context& context, const NamedTensors& t) {
    step(context, t["q"], {t["k"], t["v"]}, t["k_cache"], t["v_cache"], t["positions"], t["o"], {0.0, form.window});
  };
  return result;
}

}  // namespace flashgla::ops::softmax_attention

// The operator as cases that test and bench share.
#pragma once

#include <algorithm>

#include "flashgla/ops/long_convolution/long_convolution.h"
#include "testing/conformance.h"

namespace flashgla::ops::long_convolution {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// B sequences of T tokens, D channels, behind the tokens that `past` says of each; with `ends`, packed sequences that
// end there (B = 1).
struct Form {
  std::int64_t batch, length, channels;
  std::vector<std::int32_t> past{}, ends{};

  Shape wide() const { return Shape({batch, length, channels}); }
  std::int64_t sequences() const { return ends.empty() ? batch : static_cast<std::int64_t>(ends.size()); }
  std::int64_t longest_past() const { return past.empty() ? 0 : *std::max_element(past.begin(), past.end()); }
  Shape filter() const { return Shape({longest_past() + length + 1, channels}); }
  // Whether a GPU may compute the filter's gradient of bf16 by spectra in f16.
  bool narrow_spectra() const {
    const std::int64_t longest = longest_past() + length + (past.empty() ? 0 : 1);
    return length * (2 * longest_past() + length) > 512 * 512 && longest <= (ends.empty() ? 32768 : 2048);
  }
};

// The filter decays as Hyena's do, so that sums stay of the size of what they are of. A step's past holds its token.
inline std::vector<testing::Argument> inputs_of(const Form& form) {
  std::vector<testing::Argument> arguments{
      {"x", form.wide()},
      {.name = "filter", .shape = form.filter(), .kind = Kind::accumulator, .deviation = 0.2, .strided = false},
      {.name = "skip", .shape = Shape({form.channels}), .kind = Kind::parameter, .strided = false}};
  if (!form.past.empty()) {
    arguments.push_back({.name = "past",
                         .shape = Shape({form.sequences(), form.longest_past() + 2, form.channels}),
                         .kind = Kind::parameter,
                         .strided = false});
    arguments.push_back(testing::integers("positions", form.past));
  }
  if (!form.ends.empty()) arguments.push_back(testing::bounds(form.ends));
  return arguments;
}

inline Inputs inputs_in(const NamedTensors& t) {
  return {t["x"], t["filter"], t["skip"], t["past"], t["positions"], t["cu_seqlens"]};
}

inline std::string name_of_form(const char* what, const Form& form) {
  return std::string(what) + " " + to_string(form.wide()) + (form.ends.empty() ? "" : " packed") +
         (form.past.empty() ? "" : " carried");
}

inline testing::OperatorCase forward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = name_of_form("forward", form);
  result.arguments = inputs_of(form);
  result.arguments.push_back({"y", form.wide(), Role::output});
  result.run = [](Context& context, const NamedTensors& t) { forward(context, inputs_in(t), {t["y"], {}}); };
  return result;
}

// For one pair of dtypes. kept: with a forward in front that keeps what backward reads, as in training.
inline testing::OperatorCase backward_case(const Form& form, testing::DTypePair dtypes, bool kept = false) {
  testing::OperatorCase result;
  result.name = name_of_form(kept ? "forward and backward" : "backward", form);
  result.dtypes = {dtypes};
  result.arguments = inputs_of(form);
  result.arguments.push_back({"dy", form.wide()});
  result.arguments.push_back({"dx", form.wide(), Role::output});
  result.arguments.push_back(
      {.name = "dfilter", .shape = form.filter(), .role = Role::output, .kind = Kind::accumulator, .strided = false});
  // On CUDA dfilter of such sequences of bf16 is of spectra in f16.
  if (dtypes.activation == DType::bf16 && form.narrow_spectra()) {
    result.arguments.back().relative_on_cuda = testing::tolerance(DType::bf16);
  }
  result.arguments.push_back({.name = "dskip",
                              .shape = Shape({form.channels}),
                              .role = Role::accumulated,
                              .kind = Kind::accumulator,
                              .strided = false});
  if (kept) result.arguments.push_back({"y", form.wide(), Role::output});
  result.run = [kept](Context& context, const NamedTensors& t) {
    const ArenaScope scope(context.scratch());
    Inputs inputs = inputs_in(t);
    const TensorView own = kept ? testing::kept_in_scratch(context, kept_bytes(context, inputs)) : TensorView();
    if (kept) forward(context, inputs, {t["y"], own});
    if (own) {  // in place of whose values backward has these
      for (TensorView* each : {&inputs.x, &inputs.filter}) {
        *each = context.scratch().tensor(each->shape, each->dtype, "long_convolution: shape");
      }
    }
    backward(context, inputs, own, t["dy"], {t["dx"], t["dfilter"], t["dskip"]});
  };
  return result;
}

inline testing::OperatorCase step_case(std::int64_t channels, const std::vector<std::int32_t>& past) {
  const Form form{static_cast<std::int64_t>(past.size()), 1, channels, past};
  testing::OperatorCase result;
  result.name = "step " + to_string(Shape({form.batch, channels}));
  result.arguments = inputs_of(form);
  const Shape wide({form.batch, channels});
  result.arguments[0].shape = wide;
  result.arguments.push_back({"y", wide, Role::output});
  result.run = [](Context& context, const NamedTensors& t) { step(context, inputs_in(t), t["y"]); };
  return result;
}

}  // namespace flashgla::ops::long_convolution

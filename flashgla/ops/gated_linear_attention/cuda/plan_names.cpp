// A plan in words.
#include "flashgla/ops/gated_linear_attention/cuda/plan.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

std::string wrappers(const Plan& plan) {
  std::string text;
  const auto add = [&](bool has, const char* name) {
    if (has) text += std::string(text.empty() ? "" : ", ") + name;
  };
  add(plan.gates, "gates");
  add(plan.in_f32, "in f32");
  add(plan.features, "features");
  add(plan.rows, "rows");
  return text.empty() ? text : text + ": ";
}
std::string in_segments(const TimeCut& cut) { return cut.segments > 1 ? " in " + std::to_string(cut.segments) : ""; }
std::string or_else(const char* form, const TimeCut& cut, std::int64_t up_to) {
  return std::string(" or ") + form + in_segments(cut) + " above " + std::to_string(up_to) + " chunks";
}

}  // namespace

const char* name_of(ForwardForm form) {
  constexpr const char* kNames[] = {"tokens",     "parallel",  "one_pass",    "one_wide_pass",
                                    "two_passes", "f32_tiles", "value_gates", "shared_keys"};
  return kNames[static_cast<std::size_t>(form)];
}
const char* name_of(BackwardForm form) {
  constexpr const char* kNames[] = {"tokens",    "token_gates", "key_gates",  "chunks",
                                    "f32_tiles", "value_gates", "shared_keys"};
  return kNames[static_cast<std::size_t>(form)];
}
const char* name_of(StatesKind kind) {
  constexpr const char* kNames[] = {"none", "images", "prepared", "scores", "split", "gated"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string forward_name(const Plan& plan) {
  const char* groups = plan.forward != ForwardForm::one_pass ? ""
                       : plan.pairs                          ? " of pairs"
                       : plan.groups == 2                    ? " of two"
                                                             : "";
  const bool plain = plan.plain && plan.forward == ForwardForm::two_passes;
  const std::string name = wrappers(plan) + (plain ? "plain " : "") + name_of(plan.forward) + groups;
  return plan.forward_up_to == 0 ? name + in_segments(plan.forward_cut)
                                 : name + or_else("two_passes", plan.forward_cut, plan.forward_up_to);
}
std::string backward_name(const Plan& plan) {
  const bool plain = plan.plain && plan.backward == BackwardForm::chunks;
  const bool rows = plan.backward != BackwardForm::tokens;  // which reads tensors as they lie
  Plan around = plan;
  around.rows = plan.rows && rows;
  return wrappers(around) + (plain ? "plain " : "") + name_of(plan.backward) +
         (plan.backward_up_to == 0 ? in_segments(plan.backward_cut)
                                   : or_else("chunks", plan.backward_cut, plan.backward_up_to)) +
         (plan.finds_states ? ", states found" : "");
}
std::string to_string(const Plan& plan) {
  std::string states = name_of(plan.states.kind);
  if (plan.states.every_log2 > 0) states += " every " + std::to_string(1 << plan.states.every_log2);
  return forward_name(plan) + "; " + backward_name(plan) + "; " + states;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

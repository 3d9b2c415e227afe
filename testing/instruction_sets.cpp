#include "testing/instruction_sets.h"

#include "hwy/highway.h"

namespace flashgla::testing {

namespace {
void dispatch_to(std::int64_t targets) {
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}
}  // namespace

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    sets.push_back({target, hwy::TargetName(target)});
  }
  return sets;
}

UseInstructionSet::UseInstructionSet(const InstructionSet& set) { dispatch_to(set.target); }
UseInstructionSet::~UseInstructionSet() { dispatch_to(0); }

}  // namespace flashgla::testing

// The instruction sets that SIMD sources are compiled for and this machine can run, so that tests try each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashgla::testing {

struct InstructionSet {
  std::int64_t target;  // Highway's HWY_TARGET
  std::string name;     // "AVX3", "AVX2", "SCALAR"
};

// Best first.
std::vector<InstructionSet> instruction_sets();

// In its lifetime, dynamically dispatched functions run the code for that instruction set. Not for several threads.
class UseInstructionSet {
 public:
  explicit UseInstructionSet(const InstructionSet& set);
  ~UseInstructionSet();
  UseInstructionSet(const UseInstructionSet&) = delete;
  UseInstructionSet& operator=(const UseInstructionSet&) = delete;
};

}  // namespace flashgla::testing

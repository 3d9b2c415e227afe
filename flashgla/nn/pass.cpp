#include "flashgla/nn/pass.h"

#include <array>
#include <string>

#include "flashgla/base/error.h"

namespace flashgla::nn {

namespace {
constexpr std::array kNames = {"nothing", "activations", "block"};
}

const char* name_of(Recompute recompute) { return kNames[static_cast<std::size_t>(recompute)]; }

Recompute recompute_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Recompute>(i);
  }
  throw Error("recompute: unknown class '" + std::string(name) + "'; known: nothing, activations, block");
}

}  // namespace flashgla::nn

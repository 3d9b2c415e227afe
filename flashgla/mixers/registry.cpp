#include "flashgla/mixers/gla/gla.h"
#include "flashgla/mixers/mixer.h"

namespace flashgla::mixers {

std::span<const Registration> registry() {
  static constexpr Registration rows[] = {
      {"gla", "gated linear attention (Yang et al. 2024)", &create_gla},
  };
  return rows;
}

const Registration& find_mixer(std::string_view name) {
  std::string known;
  for (const Registration& row : registry()) {
    if (name == row.name) return row;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw Error("model_type: unknown '" + std::string(name) + "'; known: " + known);
}

}  // namespace flashgla::mixers

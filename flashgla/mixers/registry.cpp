#include "flashgla/mixers/registry.h"

#include "flashgla/mixers/gla/gla.h"
#include "flashgla/mixers/gsa/gsa.h"
#include "flashgla/mixers/hgrn2/hgrn2.h"
#include "flashgla/mixers/hyena/hyena.h"
#include "flashgla/mixers/linear_attention/linear_attention.h"
#include "flashgla/mixers/mamba/mamba.h"
#include "flashgla/mixers/mamba2/mamba2.h"
#include "flashgla/mixers/retention/retention.h"
#include "flashgla/mixers/rwkv/rwkv.h"
#include "flashgla/mixers/softmax_attention/softmax_attention.h"

namespace flashgla::mixers {

std::span<const Registration* const> registry() {
  static constexpr const Registration* rows[] = {&kGla,        &kSoftmaxAttention,
                                                 &kRetention,  &kLinearAttention,
                                                 &kGlaVariant, &kMamba2,
                                                 &kHgrn2,      &kMamba,
                                                 &kGsa,        &kRwkv,
                                                 &kHyena};
  return rows;
}

const Registration& find_mixer(std::string_view name) {
  std::string known;
  for (const Registration* row : registry()) {
    if (name == row->name) return *row;
    known += (known.empty() ? "" : ", ") + std::string(row->name);
  }
  throw Error("model_type: unknown '" + std::string(name) + "'; known: " + known);
}

}  // namespace flashgla::mixers

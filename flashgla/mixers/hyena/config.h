// Hyena's configuration, with its fields' names in zoology and safari.
#pragma once

#include "flashgla/mixers/config.h"

namespace flashgla::mixers {

struct HyenaConfig : ConfigOf<HyenaConfig> {
  std::int64_t l_max = 2048;       // no sequence may be longer
  std::int64_t filter_order = 64;  // width of the filter's MLP
  std::int64_t emb_dim = 3;        // of its positions: odd
  double w = 1.0;                  // where the sines' frequencies start
  double shift = 0.0;              // of the window

  std::vector<Field> fields() override;
  void validate(const Common& common) const override;
  MostTokens most_tokens() const override { return {l_max, "tokens of its filter (l_max)"}; }
  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override;
};

}  // namespace flashgla::mixers

// HGRN2's configuration, with its fields' names in flash-linear-attention.
#pragma once

#include "flashgla/mixers/config.h"

namespace flashgla::mixers {

struct Hgrn2Config : ConfigOf<Hgrn2Config> {
  std::optional<std::int64_t> expand_ratio = 128;  // key channels of a head
  std::optional<std::int64_t> num_heads;           // looked at without expand_ratio alone
  bool use_short_conv = false;
  std::int64_t conv_size = 4;
  bool use_lower_bound = true;

  std::vector<Field> fields() override;
  void settle(const Common& common) override;
  void validate(const Common& common) const override;
  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override;  // layer.cpp

  std::int64_t heads(const Common& common) const {
    return expand_ratio ? common.hidden_size / *expand_ratio : num_heads.value_or(0);
  }
};

}  // namespace flashgla::mixers

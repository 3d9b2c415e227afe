// Mamba's configuration, with its fields' names in flash-linear-attention.
#pragma once

#include "flashgla/mixers/config.h"

namespace flashgla::mixers {

struct MambaConfig : ConfigOf<MambaConfig> {
  std::int64_t state_size = 16;  // K
  std::int64_t expand = 2;
  std::optional<std::int64_t> dt_rank;  // absent: hidden_size / 16, rounded up
  std::int64_t conv_kernel = 4;
  bool use_bias = false;  // of in_proj and out_proj
  bool use_conv_bias = true;

  std::vector<Field> fields() override;
  void settle(const Common& common) override;
  void validate(const Common& common) const override;
  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override;

  std::int64_t inner(const Common& common) const { return expand * common.hidden_size; }
  std::int64_t rank(const Common& common) const { return dt_rank.value_or((common.hidden_size + 15) / 16); }
};

}  // namespace flashgla::mixers

// Mamba-2's configuration, with its fields' names in flash-linear-attention.
#pragma once

#include "flashgla/mixers/config.h"

namespace flashgla::mixers {

struct Mamba2Config : ConfigOf<Mamba2Config> {
  std::int64_t state_size = 128;  // K
  std::int64_t expand = 2;
  std::int64_t head_dim = 64;             // V
  std::optional<std::int64_t> num_heads;  // absent: expand hidden_size / head_dim, which it must be
  std::int64_t n_groups = 1;
  std::int64_t conv_kernel = 4;
  bool use_bias = false;  // of the projections
  bool use_conv_bias = true;

  std::vector<Field> fields() override;
  void settle(const Common& common) override;
  void validate(const Common& common) const override;
  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override;

  std::int64_t inner(const Common& common) const { return expand * common.hidden_size; }
  std::int64_t heads(const Common& common) const { return inner(common) / head_dim; }
};

}  // namespace flashgla::mixers

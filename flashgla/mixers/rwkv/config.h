// RWKV-4's configuration, with its fields' names in transformers.
#pragma once

#include "flashgla/mixers/config.h"
#include "flashgla/nn/parameter.h"

namespace flashgla::mixers {

struct RwkvConfig : ConfigOf<RwkvConfig> {
  std::optional<std::int64_t> attention_hidden_size;  // E; absent: hidden_size
  // Key, receptance and output start at zero, as in RWKV-LM; false: as normal as the others, as in zoology.
  bool zero_init = true;

  std::vector<Field> fields() override;
  void settle(const Common& common) override;
  void validate(const Common& common) const override;
  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override;
  std::int64_t own_mlp_width(const Common& common) const override { return 4 * common.hidden_size; }
  std::unique_ptr<Mixer> create_mlp(const Common& common, std::int64_t layer, std::int64_t width) const override;

  std::int64_t inner(const Common& common) const { return attention_hidden_size.value_or(common.hidden_size); }
  // Of matrices that start at zero, and of the others: what RWKV-LM's orthogonal ones have.
  double zero_deviation(const Common& common) const { return zero_init ? 0.0 : common.initializer_range; }
  double deviation(const Common& common) const;
};

// What the initial values of a layer's vectors are functions of: 0 to 1 over the layers, and 1 to almost 0.
struct RwkvDepth {
  double up, down;
  RwkvDepth(const Common& common, std::int64_t layer);
};

// A vector of proportions [1,1,D]: of channel i (i/D)^power + shift.
nn::Parameter rwkv_mix(const std::string& name, std::int64_t hidden, double power, double shift);

// [M,D] of vectors that lie behind one another, or of their gradients.
TensorView rwkv_mixes(const std::vector<const nn::Parameter*>& vectors, bool gradients);

}  // namespace flashgla::mixers

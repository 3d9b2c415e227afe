// A mixer of each row and variant, small, for tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/mixers/registry.h"
#include "flashgla/mixers/tests/variants.h"
#include "testing/compare.h"
#include "testing/random.h"

namespace flashgla::mixers {

constexpr std::int64_t kHidden = 16;

inline Common small_common() {
  Common common;
  common.hidden_size = kHidden;
  common.num_hidden_layers = 3;
  return common;
}

// Tokens that sequences have had before, as far as a mixer looks at it; and room for those and what a test adds.
constexpr std::int32_t kPositions[] = {3, 0, 7, 1};
constexpr std::int64_t kCapacity = 24;

// A mixer with parameters large enough that every part of it matters.
struct Trial {
  SharedParameters shared;
  std::unique_ptr<Mixer> mixer;
  std::unique_ptr<nn::ParameterStore> store;
  DType dtype;

  // Parameters have the values that they have in `rounding`, whatever the device and dtype.
  Trial(const Variant& variant, DType dtype, Device device = Device::cpu(), DType rounding = DType::f64)
      : dtype(dtype) {
    const auto config = find_mixer(variant.row).make_config();
    for (const Field& field : config->fields()) {
      make_small(field);
      for (const auto& [name, text] : variant.fields) {
        if (std::string(name) == field.name) set(field, text);
      }
    }
    config->validate(small_common());
    mixer = config->create(small_common(), 1);
    mixer->share(shared);
    store = std::make_unique<nn::ParameterStore>(
        [this](const nn::ParameterVisitor& visit) {
          shared.for_each_parameter(visit);
          mixer->for_each_parameter(visit);
        },
        dtype, device, true);
    std::uint64_t seed = 1;
    for (const nn::Parameter* parameter : store->parameters()) {
      const bool ones = parameter->initialization == nn::Initialization::ones;
      const Tensor values =
          testing::random_normal(parameter->shape, rounding, seed++, ones ? 0.1 : 0.4, ones ? 1.0 : 0.0);
      const Tensor own = testing::converted(values, dtype);
      copy_memory(parameter->value.data, device, own->data, Device::cpu(), own->bytes());
    }
  }

  // Sizes that suit kHidden, for fields that mixers have in common.
  static void make_small(const Field& field) {
    const std::map<std::string, std::int64_t> sizes = {{"num_heads", 2}, {"conv_size", 3},  {"gate_low_rank_dim", 5},
                                                       {"head_dim", 8},  {"state_size", 6}, {"expand_ratio", 8},
                                                       {"num_slots", 5}, {"l_max", 96},     {"filter_order", 6}};
    const auto row = sizes.find(field.name);
    auto* const* size = std::get_if<std::int64_t*>(&field.value);
    if (row != sizes.end() && size != nullptr) **size = row->second;
    auto* const* optional = std::get_if<std::optional<std::int64_t>*>(&field.value);
    if (row != sizes.end() && optional != nullptr && *optional != nullptr && **optional) **optional = row->second;
    if (std::string(field.name) == "use_short_conv") *std::get<bool*>(field.value) = true;
  }

  static void set(const Field& field, const std::string& text) {
    std::visit(
        [&](auto* value) {
          using T = std::decay_t<decltype(*value)>;
          if constexpr (std::is_same_v<T, bool>) {
            *value = text == "true";
          } else if constexpr (std::is_assignable_v<T&, std::string>) {
            *value = text;
          } else {
            *value =
                static_cast<std::conditional_t<std::is_assignable_v<T&, double> && !std::is_same_v<T, std::int64_t>,
                                               double, std::int64_t>>(std::stod(text));
          }
        },
        field.value);
  }

  // Views of a fresh state for so many sequences, filled with noise of this deviation.
  LayerState make_state(std::int64_t sequences, double deviation, std::vector<Tensor>& memory) const {
    LayerState state;
    for (const StateEntry& entry : mixer->state_layout(sequences, kCapacity, dtype)) {
      EXPECT_EQ(entry.shape[0], sequences) << entry.name;
      EXPECT_TRUE(!entry.growing || entry.shape[1] == kCapacity) << entry.name;
      memory.push_back(testing::random_normal(entry.shape, entry.dtype, memory.size() + 31, deviation));
      state.push_back(memory.back());
    }
    return state;
  }

  // Where a call's end state goes: growing entries in place, others into noise that must be overwritten.
  LayerState after(const LayerState& before, std::vector<Tensor>& memory) const {
    const auto layout = mixer->state_layout(before.front().size(0), kCapacity, dtype);
    LayerState state;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      if (layout[i].growing) {
        state.push_back(before[i]);
        continue;
      }
      memory.push_back(Tensor::empty(layout[i].shape, layout[i].dtype));
      testing::poison(memory.back());
      state.push_back(memory.back());
    }
    return state;
  }

  // "" when the states agree; of growing entries the rows before each sequence's position.
  std::string compare(const LayerState& state, const LayerState& reference,
                      const std::vector<std::int64_t>& tokens) const {
    const auto layout = mixer->state_layout(reference.front().size(0), kCapacity, dtype);
    std::string failures;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      for (std::size_t n = 0; n < tokens.size(); ++n) {
        TensorView own = state[i].select(0, static_cast<std::int64_t>(n));
        TensorView other = reference[i].select(0, static_cast<std::int64_t>(n));
        if (layout[i].growing) own = own.slice(0, 0, tokens[n]), other = other.slice(0, 0, tokens[n]);
        failures += testing::check_close(layout[i].name.c_str(), own, other, 1e-12);
      }
    }
    return failures;
  }
};

inline Tensor positions_of(std::int64_t sequences) {
  Tensor positions = Tensor::empty(Shape({sequences}), DType::i32);
  std::copy(kPositions, kPositions + sequences, positions.as<std::int32_t>());
  return positions;
}

// Each row's plain configuration, and those of variants.h.
inline std::vector<Variant> all_variants() {
  std::vector<Variant> all;
  for (const Registration* row : registry()) all.push_back({row->name, "plain", {}});
  const std::vector<Variant> more = variants();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace flashgla::mixers

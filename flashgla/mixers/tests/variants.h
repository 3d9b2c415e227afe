// Configurations that the mixers' test walks beside each row's plain one: options that change what a mixer computes.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace flashgla::mixers {

struct Variant {
  const char* row;                                          // Registration::name
  const char* name;                                         // of the test
  std::vector<std::pair<const char*, const char*>> fields;  // value as text: "3", "true", "0.5", "relu"
};

inline std::vector<Variant> variants() {
  return {
      {"gla", "grouped", {{"num_heads", "4"}, {"num_kv_heads", "2"}, {"expand_k", "1"}}},
      {"gla", "no_output_gate", {{"use_output_gate", "false"}, {"use_short_conv", "false"}}},
      {"gla", "authors", {{"elementwise_affine", "false"}, {"output_gate_bias", "true"}}},
      {"gla", "feature_map", {{"feature_map", "elu_plus_one"}, {"clamp_min", "-0.06"}}},
      {"gla_variant", "scalar", {{"gate", "scalar"}, {"use_short_conv", "false"}}},
      {"gla_variant", "value", {{"gate", "value"}, {"num_heads", "4"}, {"num_kv_heads", "2"}, {"expand_k", "1"}}},
      {"gla_variant", "both", {{"gate", "key_value"}, {"use_short_conv", "false"}, {"clamp_min", "-0.06"}}},
      {"gla_variant", "constant", {{"gate", "constant"}}},
      {"gla_variant", "none", {{"gate", "none"}}},
      {"linear_attn", "normalized", {{"feature_map", "elu"}, {"norm_feature_map", "true"}}},
      {"linear_attn", "grouped", {{"feature_map", "relu"}, {"num_heads", "4"}, {"num_kv_heads", "2"}}},
      {"linear_attn", "product_divided", {{"norm_q", "true"}, {"elementwise_affine", "false"}}},
      {"linear_attn", "hedgehog", {{"feature_map", "hedgehog"}, {"norm_feature_map", "true"}}},
      {"linear_attn",
       "hedgehog_tied",
       {{"feature_map", "hedgehog"}, {"tie_feature_map_qk", "true"}, {"num_heads", "4"}, {"num_kv_heads", "2"}}},
      {"linear_attn", "t2r", {{"feature_map", "t2r"}, {"expand_k", "2"}}},
      {"linear_attn", "dpfp_divided", {{"feature_map", "dpfp"}, {"norm_k", "true"}}},
      {"linear_attn", "elu_divided", {{"feature_map", "elu"}, {"norm_q", "true"}, {"norm_k", "true"}}},
      {"gsa", "grouped", {{"num_heads", "4"}, {"num_kv_heads", "2"}, {"use_short_conv", "false"}, {"expand_k", "0.5"}}},
      {"hgrn2", "convolutions", {{"use_short_conv", "true"}, {"expand_ratio", "4"}}},
      {"hgrn2", "no_bound", {{"use_lower_bound", "false"}, {"use_short_conv", "false"}}},
      {"mamba", "biases", {{"use_bias", "true"}, {"dt_rank", "3"}, {"conv_kernel", "3"}}},
      {"mamba", "no_conv_bias", {{"use_conv_bias", "false"}, {"expand", "1"}}},
      {"mamba2", "groups", {{"n_groups", "2"}, {"use_bias", "true"}}},
      {"mamba2", "a_group_a_head", {{"n_groups", "4"}, {"use_conv_bias", "false"}, {"conv_kernel", "2"}}},
      {"hyena", "positions", {{"emb_dim", "7"}, {"shift", "0.1"}}},
      {"rwkv", "narrower", {{"attention_hidden_size", "10"}}},
      {"transformer", "grouped", {{"num_heads", "4"}, {"num_kv_heads", "2"}}},
      {"transformer", "biases_and_norms", {{"qkv_bias", "true"}, {"o_bias", "true"}, {"qk_norm", "true"}}},
      {"transformer", "window", {{"window_size", "5"}}},
      {"transformer", "no_rope", {{"use_rope", "false"}}},
      {"transformer", "narrow_heads", {{"head_dim", "6"}, {"window_size", "3"}, {"qk_norm", "true"}}},
  };
}

}  // namespace flashgla::mixers

#include "flashgla/ops/gated_linear_attention/cuda/tests/path_plans.h"

namespace flashgla::ops::gated_linear_attention {

const char* const kPathPlansText = R"(
f32_tiles in 8; f32_tiles in 8; split
f32_tiles in 8; f32_tiles in 8, states found; split
f32_tiles in 8; f32_tiles in 8; split
f32_tiles in 8; f32_tiles in 8, states found; split
  f32_tiles_f16_segments_extreme f32_tiles_f16_segments_trained f32_tiles_f32_segments_extreme
  f32_tiles_f32_segments_trained values_f16_segments_extreme values_f16_segments_trained values_f32_segments_extreme
  values_f32_segments_trained
f32_tiles; f32_tiles; split
f32_tiles; f32_tiles, states found; split
f32_tiles; f32_tiles; split
f32_tiles; f32_tiles, states found; split
  f32_tiles_f16_272_extreme f32_tiles_f16_272_trained f32_tiles_f16_64_extreme f32_tiles_f16_64_trained
  f32_tiles_f16_96_extreme f32_tiles_f16_96_trained f32_tiles_f16_constant_extreme
  f32_tiles_f16_constant_packed_extreme f32_tiles_f16_constant_packed_trained f32_tiles_f16_constant_trained
  f32_tiles_f16_key_extreme f32_tiles_f16_key_packed_extreme f32_tiles_f16_key_packed_trained
  f32_tiles_f16_key_trained f32_tiles_f16_none_packed_trained f32_tiles_f16_none_trained f32_tiles_f16_scalar_extreme
  f32_tiles_f16_scalar_packed_extreme f32_tiles_f16_scalar_packed_trained f32_tiles_f16_scalar_trained
  f32_tiles_f32_272_extreme f32_tiles_f32_272_trained f32_tiles_f32_64_extreme f32_tiles_f32_64_trained
  f32_tiles_f32_96_extreme f32_tiles_f32_96_trained f32_tiles_f32_constant_extreme
  f32_tiles_f32_constant_packed_extreme f32_tiles_f32_constant_packed_trained f32_tiles_f32_constant_trained
  f32_tiles_f32_key_extreme f32_tiles_f32_key_packed_extreme f32_tiles_f32_key_packed_trained
  f32_tiles_f32_key_trained f32_tiles_f32_none_packed_trained f32_tiles_f32_none_trained f32_tiles_f32_scalar_extreme
  f32_tiles_f32_scalar_packed_extreme f32_tiles_f32_scalar_packed_trained f32_tiles_f32_scalar_trained
  values_f16_alone_extreme values_f16_alone_trained values_f16_extreme values_f16_grouped_f32_gates_extreme
  values_f16_grouped_f32_gates_trained values_f16_packed_extreme values_f16_packed_trained values_f16_strided_extreme
  values_f16_strided_trained values_f16_trained values_f16_whole_chunks_extreme values_f16_whole_chunks_trained
  values_f16_wide_192_64_extreme values_f16_wide_192_64_trained values_f16_wide_256_512_extreme
  values_f16_wide_256_512_trained values_f32_alone_extreme values_f32_alone_trained values_f32_extreme
  values_f32_grouped_f32_gates_extreme values_f32_grouped_f32_gates_trained values_f32_packed_extreme
  values_f32_packed_trained values_f32_strided_extreme values_f32_strided_trained values_f32_trained
  values_f32_whole_chunks_extreme values_f32_whole_chunks_trained values_f32_wide_192_64_extreme
  values_f32_wide_192_64_trained values_f32_wide_256_512_extreme values_f32_wide_256_512_trained
  values_f32_wide_300_200_extreme values_f32_wide_300_200_trained
features, rows: f32_tiles; features, rows: f32_tiles; split
features, rows: f32_tiles; features, rows: f32_tiles, states found; split
features, rows: f32_tiles; features, rows: f32_tiles; split
features, rows: f32_tiles; features, rows: f32_tiles, states found; split
  normalized_unaligned_elu_plus_one_f32 normalized_unaligned_relu_f32
features, rows: plain two_passes; features, rows: plain chunks; scores every 2
features, rows: plain two_passes; features, rows: plain chunks, states found; scores every 2
features, rows: two_passes; features, rows: chunks; prepared every 2
features, rows: two_passes; features, rows: chunks, states found; prepared every 2
  normalized_unaligned_elu_plus_one_bf16 normalized_unaligned_relu_bf16
features: f32_tiles in 8; features: f32_tiles in 8; split
features: f32_tiles in 8; features: f32_tiles in 8, states found; split
features: f32_tiles in 8; features: f32_tiles in 8; split
features: f32_tiles in 8; features: f32_tiles in 8, states found; split
  normalized_segments_elu_plus_one_f32 normalized_segments_relu_f32
features: f32_tiles; features: f32_tiles; split
features: f32_tiles; features: f32_tiles, states found; split
features: f32_tiles; features: f32_tiles; split
features: f32_tiles; features: f32_tiles, states found; split
  features_elu_plus_one_f16 features_elu_plus_one_f32 features_gated_strided_elu_plus_one_f16
  features_gated_strided_elu_plus_one_f32 features_gated_strided_relu_f16 features_gated_strided_relu_f32
  features_gates_over_values_elu_plus_one_f16 features_gates_over_values_elu_plus_one_f32
  features_gates_over_values_relu_f16 features_gates_over_values_relu_f32 features_relu_f16 features_relu_f32
  normalized_elu_plus_one_f32 normalized_packed_strided_elu_plus_one_f32 normalized_packed_strided_relu_f32
  normalized_relu_f32
features: one_pass of pairs; features: token_gates; images every 4
features: one_pass of pairs; features: token_gates, states found; images every 4
features: one_pass of two; features: token_gates; images
features: one_pass of two; features: token_gates, states found; images
  normalized_narrow_elu_plus_one_bf16 normalized_narrow_relu_bf16
features: one_pass; features: chunks; images every 2
features: one_pass; features: chunks, states found; images every 2
features: one_pass; features: chunks; images every 2
features: one_pass; features: chunks, states found; images every 2
  features_gated_strided_elu_plus_one_bf16 features_gated_strided_relu_bf16
  normalized_packed_strided_elu_plus_one_bf16 normalized_packed_strided_relu_bf16
features: one_pass; features: plain chunks; images every 2
features: one_pass; features: plain chunks, states found; images every 2
features: one_pass; features: chunks; images every 2
features: one_pass; features: chunks, states found; images every 2
  features_elu_plus_one_bf16 features_relu_bf16 normalized_elu_plus_one_bf16 normalized_relu_bf16
features: plain two_passes in 22; features: plain chunks in 22; scores every 2
features: plain two_passes in 22; features: plain chunks in 22, states found; scores every 2
features: two_passes in 22; features: chunks in 22; prepared every 2
features: two_passes in 22; features: chunks in 22, states found; prepared every 2
  normalized_segments_elu_plus_one_bf16 normalized_segments_relu_bf16
features: plain two_passes; features: plain chunks; scores every 2
features: plain two_passes; features: plain chunks, states found; scores every 2
features: two_passes; features: chunks; prepared every 2
features: two_passes; features: chunks, states found; prepared every 2
  normalized_without_states_elu_plus_one normalized_without_states_relu
features: value_gates; features: value_gates; gated
features: value_gates; features: value_gates, states found; gated
features: value_gates; features: value_gates; gated
features: value_gates; features: value_gates, states found; gated
  features_gates_over_values_elu_plus_one_bf16 features_gates_over_values_relu_bf16
gates, rows: one_pass of two; gates, rows: key_gates or chunks in 10 above 7 chunks; images
gates, rows: one_pass of two; gates, rows: key_gates or chunks in 10 above 7 chunks, states found; images
gates, rows: one_pass of two; gates, rows: key_gates or chunks in 10 above 7 chunks; images
gates, rows: one_pass of two; gates, rows: key_gates or chunks in 10 above 7 chunks, states found; images
  logits_packed_unaligned
gates, rows: one_pass; gates, rows: key_gates; images
gates, rows: one_wide_pass; gates, rows: key_gates, states found; images
gates, rows: one_pass; gates, rows: key_gates; images
gates, rows: one_pass; gates, rows: key_gates, states found; images
  logits_in_f32_unaligned logits_unaligned logits_without_states_unaligned
gates: one_pass of pairs; gates: key_gates; images
gates: one_pass of pairs; gates: key_gates, states found; images
gates: one_pass of two; gates: key_gates; images
gates: one_pass of two; gates: key_gates, states found; images
  logits_in_f32_narrow
gates: one_pass of two; gates: key_gates; images
gates: one_pass of two; gates: key_gates, states found; images
gates: one_pass of two; gates: key_gates; images
gates: one_pass of two; gates: key_gates, states found; images
  logits_in_f32_narrow_strided
gates: parallel; gates: tokens; none
gates: parallel; gates: tokens; none
gates: parallel; gates: tokens; none
gates: parallel; gates: tokens; none
  parallel_logits
gates: two_passes in 12; gates: chunks in 12; images
gates: two_passes in 12; gates: chunks in 12, states found; images
gates: two_passes in 12; gates: chunks in 12; images
gates: two_passes in 12; gates: chunks in 12, states found; images
  logits_in_f32_narrow_few
gates: two_passes; gates: chunks; prepared every 2
gates: one_wide_pass; gates: chunks, states found; prepared every 2
gates: two_passes; gates: chunks; prepared every 2
gates: two_passes; gates: chunks, states found; prepared every 2
  logits_in_f32_wide
gates: two_passes; gates: chunks; prepared every 2
gates: two_passes; gates: chunks, states found; prepared every 2
gates: two_passes; gates: chunks; prepared every 2
gates: two_passes; gates: chunks, states found; prepared every 2
  logits_in_f32_brief logits_in_f32_wider
in f32, features, rows: f32_tiles; in f32, features, rows: f32_tiles; split
in f32, features, rows: f32_tiles; in f32, features, rows: f32_tiles, states found; split
in f32, features, rows: f32_tiles; in f32, features, rows: f32_tiles; split
in f32, features, rows: f32_tiles; in f32, features, rows: f32_tiles, states found; split
  normalized_unaligned_elu_plus_one_f16 normalized_unaligned_relu_f16
in f32, features: f32_tiles in 8; in f32, features: f32_tiles in 8; split
in f32, features: f32_tiles in 8; in f32, features: f32_tiles in 8, states found; split
in f32, features: f32_tiles in 8; in f32, features: f32_tiles in 8; split
in f32, features: f32_tiles in 8; in f32, features: f32_tiles in 8, states found; split
  normalized_segments_elu_plus_one_f16 normalized_segments_relu_f16
in f32, features: f32_tiles; in f32, features: f32_tiles; split
in f32, features: f32_tiles; in f32, features: f32_tiles, states found; split
in f32, features: f32_tiles; in f32, features: f32_tiles; split
in f32, features: f32_tiles; in f32, features: f32_tiles, states found; split
  normalized_elu_plus_one_f16 normalized_packed_strided_elu_plus_one_f16 normalized_packed_strided_relu_f16
  normalized_relu_f16
one_pass of pairs; key_gates or chunks in 10 above 7 chunks; images
one_pass of pairs; key_gates or chunks in 10 above 7 chunks, states found; images
gates: one_pass of two; gates: key_gates or chunks in 10 above 7 chunks; images
gates: one_pass of two; gates: key_gates or chunks in 10 above 7 chunks, states found; images
  logits_packed_narrow
one_pass of pairs; key_gates or chunks in 10 above 7 chunks; images
one_pass of pairs; key_gates or chunks in 10 above 7 chunks, states found; images
one_pass of two; key_gates or chunks in 10 above 7 chunks; images
one_pass of two; key_gates or chunks in 10 above 7 chunks, states found; images
  narrow_packed_key_extreme narrow_packed_key_trained
one_pass of pairs; key_gates; images
one_pass of pairs; key_gates, states found; images
gates: one_pass of two; gates: key_gates; images
gates: one_pass of two; gates: key_gates, states found; images
  logits_narrow logits_without_states_narrow
one_pass of pairs; key_gates; images
one_pass of pairs; key_gates, states found; images
one_pass of two; key_gates; images
one_pass of two; key_gates, states found; images
  narrow_crowded_f32_gates_key_extreme narrow_crowded_f32_gates_key_trained narrow_crowded_key_extreme
  narrow_crowded_key_trained narrow_f32_gates_key_extreme narrow_f32_gates_key_trained narrow_key_extreme
  narrow_key_trained narrow_two_chunks_key_extreme narrow_two_chunks_key_trained
  rungs_brief_fast_channels rungs_brief_fast_channels_f32_gates rungs_brief_mixed rungs_brief_mixed_f32_gates
  rungs_brief_resets rungs_brief_resets_f32_gates rungs_brief_steps rungs_brief_steps_f32_gates rungs_brief_x1
  rungs_brief_x16 rungs_brief_x16_f32_gates rungs_brief_x1_f32_gates rungs_brief_x2 rungs_brief_x2_f32_gates
  rungs_brief_x4 rungs_brief_x4_f32_gates rungs_brief_x64 rungs_brief_x64_f32_gates rungs_crowded_mixed
  rungs_crowded_mixed_f32_gates rungs_crowded_resets rungs_crowded_resets_f32_gates rungs_fast_channels
  rungs_fast_channels_f32_gates rungs_mixed rungs_mixed_f32_gates rungs_resets rungs_resets_f32_gates rungs_steps
  rungs_steps_f32_gates rungs_x1 rungs_x16 rungs_x16_f32_gates rungs_x1_f32_gates rungs_x2 rungs_x2_f32_gates rungs_x4
  rungs_x4_f32_gates rungs_x64 rungs_x64_f32_gates
one_pass of pairs; token_gates; images every 4
one_pass of pairs; token_gates, states found; images every 4
one_pass of two; token_gates; images
one_pass of two; token_gates, states found; images
  narrow_constant_extreme narrow_constant_trained narrow_crowded_constant_extreme narrow_crowded_constant_trained
  narrow_crowded_none_trained narrow_crowded_scalar_extreme narrow_crowded_scalar_trained
  narrow_f32_gates_constant_extreme narrow_f32_gates_constant_trained narrow_f32_gates_none_trained
  narrow_f32_gates_scalar_extreme narrow_f32_gates_scalar_trained narrow_none_trained narrow_packed_constant_extreme
  narrow_packed_constant_trained narrow_packed_none_trained narrow_packed_scalar_extreme narrow_packed_scalar_trained
  narrow_scalar_extreme narrow_scalar_trained narrow_two_chunks_constant_extreme narrow_two_chunks_constant_trained
  narrow_two_chunks_none_trained narrow_two_chunks_scalar_extreme narrow_two_chunks_scalar_trained
one_pass of two; key_gates or chunks in 10 above 7 chunks; images
one_pass of two; key_gates or chunks in 10 above 7 chunks, states found; images
gates: one_pass of two; gates: key_gates or chunks in 10 above 7 chunks; images
gates: one_pass of two; gates: key_gates or chunks in 10 above 7 chunks, states found; images
  logits_packed_narrow_strided
one_pass of two; key_gates or chunks in 10 above 7 chunks; images
one_pass of two; key_gates or chunks in 10 above 7 chunks, states found; images
one_pass of two; key_gates or chunks in 10 above 7 chunks; images
one_pass of two; key_gates or chunks in 10 above 7 chunks, states found; images
  rungs_packed_fast_channels rungs_packed_fast_channels_f32_gates rungs_packed_mixed rungs_packed_mixed_f32_gates
  rungs_packed_resets rungs_packed_resets_f32_gates rungs_packed_steps rungs_packed_steps_f32_gates rungs_packed_x1
  rungs_packed_x16 rungs_packed_x16_f32_gates rungs_packed_x1_f32_gates rungs_packed_x2 rungs_packed_x2_f32_gates
  rungs_packed_x4 rungs_packed_x4_f32_gates rungs_packed_x64 rungs_packed_x64_f32_gates
one_pass of two; key_gates; images
one_pass of two; key_gates, states found; images
gates: one_pass of two; gates: key_gates; images
gates: one_pass of two; gates: key_gates, states found; images
  logits_narrow_strided logits_without_states_narrow_strided
one_pass of two; key_gates; images
one_pass of two; key_gates, states found; images
one_pass of two; key_gates; images
one_pass of two; key_gates, states found; images
  narrow_strided_key_extreme narrow_strided_key_trained
one_pass of two; token_gates; images every 4
one_pass of two; token_gates, states found; images every 4
one_pass of two; token_gates; images
one_pass of two; token_gates, states found; images
  narrow_strided_constant_extreme narrow_strided_constant_trained narrow_strided_none_trained
  narrow_strided_scalar_extreme narrow_strided_scalar_trained
one_pass or two_passes in 16 above 13 chunks; token_gates or chunks in 16 above 14 chunks; images every 4
one_pass or two_passes in 16 above 13 chunks; token_gates or chunks in 16 above 14 chunks, states found; images every 4
one_pass or two_passes in 16 above 13 chunks; token_gates or chunks in 16 above 14 chunks; images
one_pass or two_passes in 16 above 13 chunks; token_gates or chunks in 16 above 14 chunks, states found; images
  few_packed_constant_extreme few_packed_constant_trained
one_pass or two_passes in 16 above 20 chunks; token_gates or chunks in 16 above 13 chunks; images every 4
one_pass or two_passes in 16 above 20 chunks; token_gates or chunks in 16 above 13 chunks, states found; images every 4
one_pass or two_passes in 16 above 20 chunks; token_gates or chunks in 16 above 13 chunks; images
one_pass or two_passes in 16 above 20 chunks; token_gates or chunks in 16 above 13 chunks, states found; images
  few_packed_none_trained
one_pass or two_passes in 20 above 10 chunks; key_gates or chunks in 20 above 6 chunks; images
one_pass or two_passes in 20 above 10 chunks; key_gates or chunks in 20 above 6 chunks, states found; images
one_pass or two_passes in 20 above 10 chunks; key_gates or chunks in 20 above 6 chunks; images
one_pass or two_passes in 20 above 10 chunks; key_gates or chunks in 20 above 6 chunks, states found; images
  narrow_packed_alike_key_extreme narrow_packed_alike_key_trained narrow_packed_long_key_extreme
  narrow_packed_long_key_trained
one_pass or two_passes in 20 above 14 chunks; token_gates or chunks in 20 above 14 chunks; images every 4
one_pass or two_passes in 20 above 14 chunks; token_gates or chunks in 20 above 14 chunks, states found; images every 4
one_pass or two_passes in 20 above 14 chunks; token_gates or chunks in 20 above 14 chunks; images
one_pass or two_passes in 20 above 14 chunks; token_gates or chunks in 20 above 14 chunks, states found; images
  narrow_packed_alike_constant_extreme narrow_packed_alike_constant_trained narrow_packed_long_constant_extreme
  narrow_packed_long_constant_trained
one_pass or two_passes in 20 above 9 chunks; token_gates or chunks in 20 above 13 chunks; images every 4
one_pass or two_passes in 20 above 9 chunks; token_gates or chunks in 20 above 13 chunks, states found; images every 4
one_pass or two_passes in 20 above 9 chunks; token_gates or chunks in 20 above 13 chunks; images
one_pass or two_passes in 20 above 9 chunks; token_gates or chunks in 20 above 13 chunks, states found; images
  narrow_packed_alike_scalar_extreme narrow_packed_alike_scalar_trained narrow_packed_long_scalar_extreme
  narrow_packed_long_scalar_trained
one_pass; chunks; images
one_wide_pass; chunks, states found; images
one_pass; chunks; images
one_pass; chunks, states found; images
  brief_64_64_key_extreme brief_64_64_key_trained brief_f32_gates_64_64_key_extreme brief_f32_gates_64_64_key_trained
one_pass; chunks; images every 2
one_pass; chunks, states found; images every 2
one_pass; chunks; images every 2
one_pass; chunks, states found; images every 2
  narrow_grouped_constant_extreme narrow_grouped_constant_trained narrow_grouped_key_extreme
  narrow_grouped_key_trained narrow_grouped_scalar_extreme narrow_grouped_scalar_trained
one_pass; key_gates or chunks in 10 above 6 chunks; images
one_pass; key_gates or chunks in 10 above 6 chunks, states found; images
gates: one_pass; gates: key_gates or chunks in 10 above 6 chunks; images
gates: one_pass; gates: key_gates or chunks in 10 above 6 chunks, states found; images
  logits_packed_narrow_few
one_pass; plain chunks; images every 2
one_pass; plain chunks, states found; images every 2
one_pass; chunks; images every 2
one_pass; chunks, states found; images every 2
  narrow_grouped_none_trained
one_pass; token_gates or chunks in 20 above 13 chunks; images every 4
one_pass; token_gates or chunks in 20 above 13 chunks, states found; images every 4
one_pass; token_gates or chunks in 20 above 13 chunks; images
one_pass; token_gates or chunks in 20 above 13 chunks, states found; images
  narrow_packed_alike_none_trained narrow_packed_long_none_trained
one_pass; token_gates; images every 4
one_pass; token_gates, states found; images every 4
one_pass; token_gates; images
one_pass; token_gates, states found; images
  narrow_segments_constant_extreme narrow_segments_constant_trained narrow_segments_none_trained
  narrow_segments_scalar_extreme narrow_segments_scalar_trained
parallel; tokens; none
parallel; tokens; none
parallel; tokens; none
parallel; tokens; none
  parallel_constant_extreme parallel_constant_times_16 parallel_constant_trained parallel_key_extreme
  parallel_key_times_16 parallel_key_trained parallel_none_trained parallel_packed_constant_extreme
  parallel_packed_constant_times_16 parallel_packed_constant_trained parallel_packed_key_extreme
  parallel_packed_key_times_16 parallel_packed_key_trained parallel_packed_none_trained parallel_packed_scalar_extreme
  parallel_packed_scalar_times_16 parallel_packed_scalar_trained parallel_scalar_extreme parallel_scalar_times_16
  parallel_scalar_trained parallel_wide_constant_extreme parallel_wide_constant_times_16
  parallel_wide_constant_trained parallel_wide_key_extreme parallel_wide_key_times_16 parallel_wide_key_trained
  parallel_wide_none_trained parallel_wide_scalar_extreme parallel_wide_scalar_times_16 parallel_wide_scalar_trained
  parallel_without_states_constant_extreme parallel_without_states_constant_times_16
  parallel_without_states_constant_trained parallel_without_states_key_extreme parallel_without_states_key_times_16
  parallel_without_states_key_trained parallel_without_states_none_trained parallel_without_states_scalar_extreme
  parallel_without_states_scalar_times_16 parallel_without_states_scalar_trained
plain two_passes in 12; plain chunks in 12; images every 2
plain two_passes in 12; plain chunks in 12, states found; images every 2
two_passes in 12; chunks in 12; images
two_passes in 12; chunks in 12, states found; images
  few_f32_gates_none_trained few_none_trained few_strided_none_trained
plain two_passes in 12; plain chunks in 12; scores every 2
plain two_passes in 12; plain chunks in 12, states found; scores every 2
two_passes in 12; chunks in 12; prepared every 2
two_passes in 12; chunks in 12, states found; prepared every 2
  segments_192_64_none_trained segments_256_512_none_trained segments_96_200_none_trained
  segments_grouped_none_trained
plain two_passes in 22; plain chunks in 22; images every 2
plain two_passes in 22; plain chunks in 22, states found; images every 2
two_passes in 22; chunks in 22; images every 2
two_passes in 22; chunks in 22, states found; images every 2
  segments_none_trained
plain two_passes in 25; plain chunks in 25; scores every 2
plain two_passes in 25; plain chunks in 25, states found; scores every 2
two_passes in 25; chunks in 25; prepared every 2
two_passes in 25; chunks in 25, states found; prepared every 2
  segments_long_none_trained
plain two_passes; plain chunks in 5; scores every 2
plain two_passes; plain chunks in 5, states found; scores every 2
two_passes; chunks in 5; prepared every 2
two_passes; chunks in 5, states found; prepared every 2
  segments_behind_none_trained
plain two_passes; plain chunks; scores every 2
one_wide_pass; plain chunks, states found; scores every 2
two_passes; chunks; prepared every 2
two_passes; chunks, states found; prepared every 2
  brief_128_256_none_trained brief_128_384_none_trained brief_128_512_none_trained brief_72_192_none_trained
  many_128_256_none_trained many_40_136_none_trained many_72_64_none_trained many_grouped_none_trained
  wide_128_256_none_trained wide_96_200_none_trained
plain two_passes; plain chunks; scores every 2
plain two_passes; plain chunks, states found; scores every 2
two_passes; chunks; prepared every 2
two_passes; chunks, states found; prepared every 2
  key_blocks_bf16_none_trained wide_192_64_none_trained wide_256_512_none_trained wide_grouped_none_trained
rows: f32_tiles; rows: f32_tiles; split
rows: f32_tiles; rows: f32_tiles, states found; split
rows: f32_tiles; rows: f32_tiles; split
rows: f32_tiles; rows: f32_tiles, states found; split
  f32_tiles_f16_500_extreme f32_tiles_f16_500_trained f32_tiles_f32_500_extreme f32_tiles_f32_500_trained
  values_f16_unaligned_extreme values_f16_unaligned_trained values_f16_wide_300_200_extreme
  values_f16_wide_300_200_trained values_f32_unaligned_extreme values_f32_unaligned_trained
rows: one_pass of two; rows: key_gates; images
rows: one_pass of two; rows: key_gates, states found; images
rows: one_pass of two; rows: key_gates; images
rows: one_pass of two; rows: key_gates, states found; images
  narrow_unaligned_key_extreme narrow_unaligned_key_trained
rows: one_pass of two; rows: token_gates; images every 4
rows: one_pass of two; rows: token_gates, states found; images every 4
rows: one_pass of two; rows: token_gates; images
rows: one_pass of two; rows: token_gates, states found; images
  narrow_unaligned_constant_extreme narrow_unaligned_constant_trained narrow_unaligned_none_trained
  narrow_unaligned_scalar_extreme narrow_unaligned_scalar_trained
rows: two_passes in 2; rows: chunks in 2; prepared every 2
rows: two_passes in 2; rows: chunks in 2, states found; prepared every 2
rows: two_passes in 2; rows: chunks in 2; prepared every 2
rows: two_passes in 2; rows: chunks in 2, states found; prepared every 2
  key_blocks_bf16_500_extreme key_blocks_bf16_500_trained
rows: value_gates; rows: value_gates; gated
rows: value_gates; rows: value_gates, states found; gated
rows: value_gates; rows: value_gates; gated
rows: value_gates; rows: value_gates, states found; gated
  values_unaligned_extreme values_unaligned_trained values_wide_300_200_extreme values_wide_300_200_trained
tokens; tokens; none
tokens; tokens; none
tokens; tokens; none
tokens; tokens; none
  tokens_f32
two_passes in 12; chunks in 12; images
two_passes in 12; chunks in 12, states found; images
gates: two_passes in 12; gates: chunks in 12; images
gates: two_passes in 12; gates: chunks in 12, states found; images
  logits_narrow_few logits_without_states_narrow_few
two_passes in 12; chunks in 12; images
two_passes in 12; chunks in 12, states found; images
two_passes in 12; chunks in 12; images
two_passes in 12; chunks in 12, states found; images
  few_f32_gates_key_extreme few_f32_gates_key_trained few_key_extreme few_key_trained few_strided_key_extreme
  few_strided_key_trained
two_passes in 12; chunks in 12; images every 2
two_passes in 12; chunks in 12, states found; images every 2
two_passes in 12; chunks in 12; images
two_passes in 12; chunks in 12, states found; images
  few_constant_extreme few_constant_trained few_f32_gates_constant_extreme few_f32_gates_constant_trained
  few_f32_gates_scalar_extreme few_f32_gates_scalar_trained few_scalar_extreme few_scalar_trained
  few_strided_constant_extreme few_strided_constant_trained few_strided_scalar_extreme few_strided_scalar_trained
two_passes in 12; chunks in 12; prepared every 2
two_passes in 12; chunks in 12, states found; prepared every 2
two_passes in 12; chunks in 12; prepared every 2
two_passes in 12; chunks in 12, states found; prepared every 2
  segments_192_64_constant_extreme segments_192_64_constant_trained segments_192_64_key_extreme
  segments_192_64_key_trained segments_192_64_scalar_extreme segments_192_64_scalar_trained
  segments_256_512_constant_extreme segments_256_512_constant_trained segments_256_512_key_extreme
  segments_256_512_key_trained segments_256_512_scalar_extreme segments_256_512_scalar_trained
  segments_96_200_constant_extreme segments_96_200_constant_trained segments_96_200_key_extreme
  segments_96_200_key_trained segments_96_200_scalar_extreme segments_96_200_scalar_trained
  segments_grouped_constant_extreme segments_grouped_constant_trained segments_grouped_key_extreme
  segments_grouped_key_trained segments_grouped_scalar_extreme segments_grouped_scalar_trained
two_passes in 17; chunks in 17; prepared every 2
two_passes in 17; chunks in 17, states found; prepared every 2
two_passes in 17; chunks in 17; prepared every 2
two_passes in 17; chunks in 17, states found; prepared every 2
  segments_skewed_constant_extreme segments_skewed_constant_trained segments_skewed_grouped_constant_extreme
  segments_skewed_grouped_constant_trained segments_skewed_grouped_key_extreme segments_skewed_grouped_key_trained
  segments_skewed_grouped_none_trained segments_skewed_grouped_scalar_extreme segments_skewed_grouped_scalar_trained
  segments_skewed_key_extreme segments_skewed_key_trained segments_skewed_none_trained segments_skewed_scalar_extreme
  segments_skewed_scalar_trained
two_passes in 22; chunks in 22; images every 2
two_passes in 22; chunks in 22, states found; images every 2
two_passes in 22; chunks in 22; images every 2
two_passes in 22; chunks in 22, states found; images every 2
  segments_constant_extreme segments_constant_trained segments_key_extreme segments_key_trained
  segments_scalar_extreme segments_scalar_trained
two_passes in 24; chunks in 24; images
one_wide_pass or two_passes in 16 above 12 chunks; chunks in 24, states found; images
two_passes in 24; chunks in 24; images
two_passes in 24; chunks in 24, states found; images
  few_packed_key_extreme few_packed_key_trained
two_passes in 24; chunks in 24; prepared every 2
two_passes in 24; chunks in 24, states found; prepared every 2
two_passes in 24; chunks in 24; prepared every 2
two_passes in 24; chunks in 24, states found; prepared every 2
  segments_packed_constant_extreme segments_packed_constant_trained segments_packed_key_extreme
  segments_packed_key_trained segments_packed_none_trained segments_packed_scalar_extreme
  segments_packed_scalar_trained
two_passes in 24; token_gates or chunks in 16 above 13 chunks; images every 4
one_wide_pass or two_passes in 16 above 10 chunks; token_gates or chunks in 16 above 13 chunks, states found; images every 4
two_passes in 24; token_gates or chunks in 16 above 13 chunks; images
two_passes in 24; token_gates or chunks in 16 above 13 chunks, states found; images
  few_packed_scalar_extreme few_packed_scalar_trained
two_passes in 25; chunks in 25; prepared every 2
two_passes in 25; chunks in 25, states found; prepared every 2
two_passes in 25; chunks in 25; prepared every 2
two_passes in 25; chunks in 25, states found; prepared every 2
  segments_long_key_trained
two_passes in 3; chunks in 2; prepared every 2
two_passes in 3; chunks in 2, states found; prepared every 2
two_passes in 3; chunks in 2; prepared every 2
two_passes in 3; chunks in 2, states found; prepared every 2
  wide_packed_256_constant_extreme wide_packed_256_constant_trained wide_packed_256_key_extreme
  wide_packed_256_key_trained wide_packed_256_none_trained wide_packed_256_scalar_extreme
  wide_packed_256_scalar_trained wide_packed_f32_gates_192_200_key_extreme wide_packed_f32_gates_192_200_key_trained
two_passes in 3; chunks in 3; prepared every 2
two_passes in 3; chunks in 3, states found; prepared every 2
gates: two_passes in 3; gates: chunks in 3; prepared every 2
gates: two_passes in 3; gates: chunks in 3, states found; prepared every 2
  logits_packed_wider
two_passes in 3; chunks; prepared every 2
two_passes in 3; chunks, states found; prepared every 2
two_passes in 3; chunks; prepared every 2
two_passes in 3; chunks, states found; prepared every 2
  wide_packed_192_constant_extreme wide_packed_192_constant_trained wide_packed_192_key_extreme
  wide_packed_192_key_trained wide_packed_192_none_trained wide_packed_192_scalar_extreme
  wide_packed_192_scalar_trained
two_passes in 5; chunks in 5; prepared every 2
one_wide_pass or two_passes in 12 above 11 chunks; chunks in 5, states found; prepared every 2
two_passes in 5; chunks in 5; prepared every 2
two_passes in 5; chunks in 5, states found; prepared every 2
  wide_packed_alike_constant_extreme wide_packed_alike_constant_trained wide_packed_alike_none_trained
  wide_packed_alike_scalar_extreme wide_packed_alike_scalar_trained
two_passes in 5; chunks in 5; prepared every 2
one_wide_pass or two_passes in 12 above 12 chunks; chunks in 5, states found; prepared every 2
two_passes in 5; chunks in 5; prepared every 2
two_passes in 5; chunks in 5, states found; prepared every 2
  wide_packed_alike_key_extreme wide_packed_alike_key_trained
two_passes in 7; chunks in 7; prepared every 2
one_wide_pass or two_passes in 14 above 13 chunks; chunks in 7, states found; prepared every 2
two_passes in 7; chunks in 7; prepared every 2
two_passes in 7; chunks in 7, states found; prepared every 2
  wide_packed_long_constant_extreme wide_packed_long_constant_trained wide_packed_long_none_trained
  wide_packed_long_scalar_extreme wide_packed_long_scalar_trained
two_passes in 7; chunks in 7; prepared every 2
one_wide_pass or two_passes in 14 above 16 chunks; chunks in 7, states found; prepared every 2
two_passes in 7; chunks in 7; prepared every 2
two_passes in 7; chunks in 7, states found; prepared every 2
  wide_packed_long_key_extreme wide_packed_long_key_trained
two_passes or two_passes in 10 above 12 chunks; chunks or chunks in 10 above 12 chunks; prepared every 2
two_passes or two_passes in 10 above 12 chunks; chunks or chunks in 10 above 12 chunks, states found; prepared every 2
two_passes or two_passes in 10 above 12 chunks; chunks or chunks in 10 above 12 chunks; prepared every 2
two_passes or two_passes in 10 above 12 chunks; chunks or chunks in 10 above 12 chunks, states found; prepared every 2
  two_passes_packed_alike_key_trained two_passes_packed_alike_none_trained two_passes_packed_long_key_trained
  two_passes_packed_long_none_trained
two_passes; chunks in 5; prepared every 2
two_passes; chunks in 5, states found; prepared every 2
two_passes; chunks in 5; prepared every 2
two_passes; chunks in 5, states found; prepared every 2
  segments_behind_constant_extreme segments_behind_constant_trained segments_behind_key_extreme
  segments_behind_key_trained segments_behind_scalar_extreme segments_behind_scalar_trained
two_passes; chunks; prepared every 2
one_wide_pass or two_passes in 7 above 6 chunks; chunks, states found; prepared every 2
gates: two_passes; gates: chunks; prepared every 2
gates: two_passes; gates: chunks, states found; prepared every 2
  logits_packed_brief
two_passes; chunks; prepared every 2
one_wide_pass; chunks, states found; prepared every 2
gates: two_passes; gates: chunks; prepared every 2
gates: two_passes; gates: chunks, states found; prepared every 2
  logits_packed_wide logits_wide logits_without_states_wide
two_passes; chunks; prepared every 2
one_wide_pass; chunks, states found; prepared every 2
two_passes; chunks; prepared every 2
two_passes; chunks, states found; prepared every 2
  brief_128_256_constant_extreme brief_128_256_constant_trained brief_128_256_key_extreme brief_128_256_key_trained
  brief_128_256_scalar_extreme brief_128_256_scalar_trained brief_128_384_constant_extreme
  brief_128_384_constant_trained brief_128_384_key_extreme brief_128_384_key_trained brief_128_384_scalar_extreme
  brief_128_384_scalar_trained brief_128_512_constant_extreme brief_128_512_constant_trained brief_128_512_key_extreme
  brief_128_512_key_trained brief_128_512_scalar_extreme brief_128_512_scalar_trained brief_72_192_constant_extreme
  brief_72_192_constant_trained brief_72_192_key_extreme brief_72_192_key_trained brief_72_192_scalar_extreme
  brief_72_192_scalar_trained brief_f32_gates_128_384_key_extreme brief_f32_gates_128_384_key_trained
  brief_f32_gates_72_192_key_extreme brief_f32_gates_72_192_key_trained many_128_256_constant_extreme
  many_128_256_constant_trained many_128_256_key_extreme many_128_256_key_trained many_128_256_scalar_extreme
  many_128_256_scalar_trained many_40_136_constant_extreme many_40_136_constant_trained many_40_136_key_extreme
  many_40_136_key_trained many_40_136_scalar_extreme many_40_136_scalar_trained many_72_64_constant_extreme
  many_72_64_constant_trained many_72_64_key_extreme many_72_64_key_trained many_72_64_scalar_extreme
  many_72_64_scalar_trained many_grouped_constant_extreme many_grouped_constant_trained many_grouped_key_extreme
  many_grouped_key_trained many_grouped_scalar_extreme many_grouped_scalar_trained many_packed_constant_extreme
  many_packed_constant_trained many_packed_f32_gates_48_192_key_extreme many_packed_f32_gates_48_192_key_trained
  many_packed_key_extreme many_packed_key_trained many_packed_none_trained many_packed_scalar_extreme
  many_packed_scalar_trained pairs_packed_constant_extreme pairs_packed_constant_trained
  pairs_packed_f32_gates_96_256_key_extreme pairs_packed_f32_gates_96_256_key_trained pairs_packed_key_extreme
  pairs_packed_key_trained pairs_packed_none_trained pairs_packed_scalar_extreme pairs_packed_scalar_trained
  rungs_wide_fast_channels rungs_wide_fast_channels_f32_gates rungs_wide_grouped_fast_channels
  rungs_wide_grouped_fast_channels_f32_gates rungs_wide_grouped_mixed rungs_wide_grouped_mixed_f32_gates
  rungs_wide_grouped_resets rungs_wide_grouped_resets_f32_gates rungs_wide_grouped_steps
  rungs_wide_grouped_steps_f32_gates rungs_wide_grouped_x1 rungs_wide_grouped_x16 rungs_wide_grouped_x16_f32_gates
  rungs_wide_grouped_x1_f32_gates rungs_wide_grouped_x2 rungs_wide_grouped_x2_f32_gates rungs_wide_grouped_x4
  rungs_wide_grouped_x4_f32_gates rungs_wide_grouped_x64 rungs_wide_grouped_x64_f32_gates rungs_wide_mixed
  rungs_wide_mixed_f32_gates rungs_wide_resets rungs_wide_resets_f32_gates rungs_wide_steps rungs_wide_steps_f32_gates
  rungs_wide_x1 rungs_wide_x16 rungs_wide_x16_f32_gates rungs_wide_x1_f32_gates rungs_wide_x2 rungs_wide_x2_f32_gates
  rungs_wide_x4 rungs_wide_x4_f32_gates rungs_wide_x64 rungs_wide_x64_f32_gates wide_128_256_key_extreme
  wide_128_256_key_trained wide_96_200_key_extreme wide_96_200_key_trained
two_passes; chunks; prepared every 2
two_passes; chunks, states found; prepared every 2
gates: two_passes; gates: chunks; prepared every 2
gates: two_passes; gates: chunks, states found; prepared every 2
  logits_brief logits_wider logits_without_states_brief logits_without_states_wider
two_passes; chunks; prepared every 2
two_passes; chunks, states found; prepared every 2
two_passes; chunks; prepared every 2
two_passes; chunks, states found; prepared every 2
  key_blocks_bf16_272_extreme key_blocks_bf16_272_trained wide_128_256_constant_extreme wide_128_256_constant_trained
  wide_128_256_scalar_extreme wide_128_256_scalar_trained wide_192_64_constant_extreme wide_192_64_constant_trained
  wide_192_64_key_extreme wide_192_64_key_trained wide_192_64_scalar_extreme wide_192_64_scalar_trained
  wide_256_512_constant_extreme wide_256_512_constant_trained wide_256_512_key_extreme wide_256_512_key_trained
  wide_256_512_scalar_extreme wide_256_512_scalar_trained wide_96_200_constant_extreme wide_96_200_constant_trained
  wide_96_200_scalar_extreme wide_96_200_scalar_trained wide_grouped_constant_extreme wide_grouped_constant_trained
  wide_grouped_f32_gates_256_96_key_extreme wide_grouped_f32_gates_256_96_key_trained wide_grouped_key_extreme
  wide_grouped_key_trained wide_grouped_scalar_extreme wide_grouped_scalar_trained
two_passes; token_gates; images every 4
one_wide_pass; token_gates, states found; images every 4
two_passes; token_gates; images
two_passes; token_gates, states found; images
  brief_64_64_scalar_extreme brief_64_64_scalar_trained
value_gates in 8; value_gates in 8; gated
value_gates in 8; value_gates in 8, states found; gated
value_gates in 8; value_gates in 8; gated
value_gates in 8; value_gates in 8, states found; gated
  values_segments_extreme values_segments_trained
value_gates; value_gates; gated
value_gates; value_gates, states found; gated
value_gates; value_gates; gated
value_gates; value_gates, states found; gated
  values_alone_extreme values_alone_trained values_extreme values_grouped_f32_gates_extreme
  values_grouped_f32_gates_trained values_packed_extreme values_packed_trained values_strided_extreme
  values_strided_trained values_trained values_whole_chunks_extreme values_whole_chunks_trained
  values_wide_192_64_extreme values_wide_192_64_trained values_wide_256_512_extreme values_wide_256_512_trained
)";

}  // namespace flashgla::ops::gated_linear_attention

#include "flashgla/ops/gated_linear_attention/cuda/tests/cuda_paths.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

namespace flashgla::ops::gated_linear_attention {

std::vector<Case> path_cases() {
  std::vector<Case> list;
  auto add = [&](std::string name, Case c) {
    c.name = std::move(name);
    list.push_back(std::move(c));
  };
  const GateKind kinds[] = {GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key};
  for (const GateKind kind : kinds) {
    for (const GateValues values : {GateValues::trained, GateValues::extreme}) {
      if (kind == GateKind::none && values == GateValues::extreme) continue;
      const std::string name = std::string(name_of(kind)) + (values == GateValues::trained ? "_trained" : "_extreme");
      const Case narrow{.batch = 34,
                        .length = 203,
                        .query_heads = 4,
                        .heads = 4,
                        .key_dim = 64,
                        .value_dim = 64,
                        .gate = kind,
                        .gate_values = values,
                        .dtype = DType::bf16,
                        .gate_dtype = DType::bf16};
      add("narrow_" + name, narrow);
      Case two_chunks = narrow;
      two_chunks.length = 70;
      add("narrow_two_chunks_" + name, two_chunks);
      Case crowded = narrow;  // two blocks of two heads a multiprocessor, of which there are 100 to 133
      crowded.batch = 100;
      crowded.length = 150;
      add("narrow_crowded_" + name, crowded);
      if (kind == GateKind::key) {
        crowded.gate_dtype = DType::f32;
        add("narrow_crowded_f32_gates_" + name, crowded);
      }
      if (kind != GateKind::key) {  // several segments of states to be found, and heads that are no pairs
        Case several = narrow;
        several.batch = 45;
        several.length = 650;
        several.query_heads = several.heads = 3;
        add("narrow_segments_" + name, several);
      }
      Case strided = narrow;
      strided.strided = true;
      strided.key_dim = 40;
      strided.value_dim = 48;
      add("narrow_strided_" + name, strided);
      Case packed = narrow;
      packed.lengths = {0, 5, 64, 0, 200, 1, 130, 63, 0};
      for (int i = 0; i < 27; ++i) packed.lengths.push_back(17 + i);
      add("narrow_packed_" + name, packed);
      Case by_length = packed;  // how long the longest is, is not told: the device chooses
      by_length.query_heads = by_length.heads = 2;
      by_length.lengths.push_back(2500);
      add("narrow_packed_long_" + name, by_length);
      by_length.lengths.pop_back();
      for (int i = 0; i < 8; ++i) by_length.lengths.push_back(300 + i);
      add("narrow_packed_alike_" + name, by_length);
      by_length.key_dim = 128;
      by_length.value_dim = 256;
      add("wide_packed_alike_" + name, by_length);
      by_length.lengths.push_back(2500);
      add("wide_packed_long_" + name, by_length);
      Case grouped = narrow;
      grouped.heads = 2;
      grouped.value_dim = 128;
      add("narrow_grouped_" + name, grouped);
      Case unaligned = narrow;  // rows that no 16-byte piece fits: copied to some that it does
      unaligned.key_dim = 33;
      unaligned.value_dim = 51;
      add("narrow_unaligned_" + name, unaligned);
      Case f32_gates = narrow;
      f32_gates.gate_dtype = DType::f32;
      add("narrow_f32_gates_" + name, f32_gates);
      for (const auto& [K, V] : {std::pair{128, 256}, {256, 512}, {192, 64}, {96, 200}}) {
        Case wide = narrow;
        wide.batch = 2;
        wide.query_heads = wide.heads = 2;
        wide.key_dim = K;
        wide.value_dim = V;
        add("wide_" + std::to_string(K) + "_" + std::to_string(V) + "_" + name, wide);
      }
      Case wide_grouped = narrow;
      wide_grouped.batch = 2;
      wide_grouped.query_heads = 4;
      wide_grouped.heads = 2;
      wide_grouped.key_dim = 256;
      wide_grouped.value_dim = 96;
      add("wide_grouped_" + name, wide_grouped);
      Case wide_packed = packed;  // items enough for blocks that walk, and pairs without tokens
      wide_packed.query_heads = 4;
      wide_packed.heads = 2;
      wide_packed.value_dim = 96;
      for (const std::int64_t K : {256, 192}) {
        wide_packed.key_dim = K;
        add("wide_packed_" + std::to_string(K) + "_" + name, wide_packed);
      }
      for (const auto& [K, V] : {std::pair{128, 256}, {72, 64}, {40, 136}}) {
        Case many = narrow;
        many.batch = 16;
        many.query_heads = many.heads = V > 128 ? 4 : 8;
        many.key_dim = K;
        many.value_dim = V;
        add("many_" + std::to_string(K) + "_" + std::to_string(V) + "_" + name, many);
      }
      Case brief = narrow;  // one pass of wide heads, however few
      brief.batch = brief.query_heads = brief.heads = 2;
      brief.length = 190;
      // Slices of 128 value channels gate for each other in pairs: one pair, a pair whose second slice is half beyond
      // V, two pairs, and an odd number of slices, which do not.
      for (const auto& [K, V] : {std::pair{128, 256}, {72, 192}, {128, 512}, {128, 384}}) {
        brief.length = V == 384 ? 126 : 190;  // those that do not are slower, and sooner make two passes
        brief.key_dim = K;
        brief.value_dim = V;
        add("brief_" + std::to_string(K) + "_" + std::to_string(V) + "_" + name, brief);
      }
      if (kind == GateKind::key || kind == GateKind::scalar) {  // the other kinds go in one pass of narrow heads
        brief.length = 380;
        brief.key_dim = brief.value_dim = 64;
        add("brief_64_64_" + name, brief);
      }
      Case many_packed = packed;
      many_packed.key_dim = 48;
      many_packed.value_dim = 192;
      add("many_packed_" + name, many_packed);
      Case pairs_packed = packed;
      pairs_packed.lengths = {0, 200, 70, 0, 130, 300, 64};
      pairs_packed.query_heads = 8;
      pairs_packed.heads = 4;
      pairs_packed.key_dim = 96;
      pairs_packed.value_dim = 256;
      add("pairs_packed_" + name, pairs_packed);
      Case many_grouped = narrow;
      many_grouped.batch = 17;
      many_grouped.query_heads = 8;
      many_grouped.heads = 4;
      many_grouped.key_dim = 96;
      many_grouped.value_dim = 128;
      add("many_grouped_" + name, many_grouped);
      if (kind == GateKind::key) {  // gates in f32: chunks, one wide pass by blocks of each kind, a wide head
        const auto add_in_f32 = [&](const std::string& what, Case c, std::int64_t K, std::int64_t V) {
          c.gate_dtype = DType::f32;
          c.key_dim = K;
          c.value_dim = V;
          add(what + "_f32_gates_" + std::to_string(K) + "_" + std::to_string(V) + "_" + name, c);
        };
        add_in_f32("wide_grouped", wide_grouped, 256, 96);
        add_in_f32("wide_packed", wide_packed, 192, 200);
        add_in_f32("brief", brief, 64, 64);
        brief.length = 190;
        add_in_f32("brief", brief, 72, 192);
        brief.length = 126;
        add_in_f32("brief", brief, 128, 384);
        add_in_f32("pairs_packed", pairs_packed, 96, 256);
        add_in_f32("many_packed", many_packed, 48, 192);
      }
      Case segments = narrow;
      segments.batch = segments.query_heads = segments.heads = 1;
      segments.length = 4099;
      segments.value_dim = 128;
      add("segments_" + name, segments);
      // Wider states; packed sequences, of which the longest is twice the mean; several query heads.
      Case wide_segments = segments;
      wide_segments.length = 1500;
      for (const auto& [K, V] : {std::pair{256, 512}, {192, 64}, {96, 200}}) {
        wide_segments.key_dim = K;
        wide_segments.value_dim = V;
        add("segments_" + std::to_string(K) + "_" + std::to_string(V) + "_" + name, wide_segments);
      }
      // The backward's time is cut, the forward's is not.
      Case segments_behind = segments;
      segments_behind.query_heads = segments_behind.heads = 4;
      segments_behind.length = 630;
      segments_behind.key_dim = 96;
      add("segments_behind_" + name, segments_behind);
      Case segments_packed = segments;
      segments_packed.lengths = {0, 700, 5, 1200, 64, 1100};
      segments_packed.key_dim = 256;
      add("segments_packed_" + name, segments_packed);
      // One sequence much longer than the others, among short and empty ones.
      Case segments_skewed = segments;
      segments_skewed.lengths = {40, 0, 2900, 64, 5, 0, 200, 1};
      segments_skewed.key_dim = 192;
      add("segments_skewed_" + name, segments_skewed);
      segments_skewed.query_heads = 4;
      segments_skewed.heads = 2;
      segments_skewed.key_dim = 72;
      add("segments_skewed_grouped_" + name, segments_skewed);
      Case segments_grouped = wide_segments;
      segments_grouped.query_heads = 4;
      segments_grouped.heads = 2;
      add("segments_grouped_" + name, segments_grouped);
      // Narrow heads, few and long: their backward goes by chunks.
      Case few = narrow;
      few.batch = few.query_heads = few.heads = 2;
      few.length = 1500;
      add("few_" + name, few);
      few.gate_dtype = DType::f32;
      add("few_f32_gates_" + name, few);
      few.strided = true;
      few.key_dim = 40;
      few.value_dim = 48;
      add("few_strided_" + name, few);
      few.lengths = {0, 700, 5, 1200, 64, 1100};
      add("few_packed_" + name, few);
      // More chunks a segment than shared memory has slots for, an odd number of key tiles, two of values.
      Case long_segments = segments;
      long_segments.query_heads = long_segments.heads = 4;
      long_segments.length = 11000;
      long_segments.key_dim = 136;
      long_segments.value_dim = 72;
      const bool tried = kind == GateKind::key || kind == GateKind::none;
      if (tried && values == GateValues::trained) add("segments_long_" + name, long_segments);
      // Two passes whose time the device cuts where one sequence is long, or leaves uncut.
      Case by_longest = segments;
      by_longest.query_heads = by_longest.heads = 2;
      by_longest.key_dim = by_longest.value_dim = 512;
      by_longest.lengths = {400, 399, 401, 383, 448, 385, 400, 384};
      if (tried && values == GateValues::trained) add("two_passes_packed_alike_" + name, by_longest);
      by_longest.lengths = {64, 0, 65, 63, 2880, 1, 64, 63};
      if (tried && values == GateValues::trained) add("two_passes_packed_long_" + name, by_longest);
    }
  }
  // Every rung of the ladder and chunks that go from one to another, with gates of both dtypes.
  for (const GateValues values : gate_values()) {
    if (values == GateValues::trained || values == GateValues::extreme) continue;
    for (const DType gate_dtype : {DType::bf16, DType::f32}) {
      Case rungs{.batch = 34,
                 .length = 203,
                 .query_heads = 4,
                 .heads = 4,
                 .key_dim = 64,
                 .value_dim = 64,
                 .gate = GateKind::key,
                 .gate_values = values,
                 .dtype = DType::bf16,
                 .gate_dtype = gate_dtype};
      std::string name = std::string(name_of(values)) + (gate_dtype == DType::f32 ? "_f32_gates" : "");
      std::replace(name.begin(), name.end(), ' ', '_');
      add("rungs_" + name, rungs);
      Case brief = rungs;  // a last chunk of a few tokens, which one anchor holds for stronger gates
      brief.length = 84;
      add("rungs_brief_" + name, brief);
      if (values == GateValues::resets || values == GateValues::mixed) {
        Case crowded = rungs;  // as narrow_crowded: of a block's two heads one may leave its first loop alone
        crowded.batch = 100;
        crowded.length = 150;
        add("rungs_crowded_" + name, crowded);
      }
      Case wide = rungs;  // by blocks, near ones too, also where the gates' place is another query head's
      wide.batch = wide.heads = 2;
      wide.query_heads = 2;
      wide.key_dim = 128;
      wide.value_dim = 192;
      add("rungs_wide_" + name, wide);
      wide.query_heads = 4;
      add("rungs_wide_grouped_" + name, wide);
      rungs.strided = true;
      rungs.key_dim = 40;
      rungs.value_dim = 48;
      rungs.lengths = {0, 5, 64, 0, 200, 1, 130, 63, 0};
      for (int i = 0; i < 27; ++i) rungs.lengths.push_back(17 + i);
      add("rungs_packed_" + name, rungs);
    }
  }
  // Tiles of f32: one tile of channels and several, rows that are aligned and others, every kind of gate, segments.
  // And bf16 with more key blocks than one launch has the state of.
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const GateValues values : {GateValues::trained, GateValues::extreme}) {
      const std::string suffix = values == GateValues::trained ? "_trained" : "_extreme";
      const auto named = [&](const std::string& what) {
        return std::string(dtype == DType::bf16 ? "key_blocks_" : "f32_tiles_") + name_of(dtype) + "_" + what + suffix;
      };
      const Case c{.batch = 3, .length = 203, .query_heads = 4, .heads = 2, .gate_values = values, .dtype = dtype};
      for (const auto& [K, V] : {std::pair{64, 64}, {96, 160}, {272, 96}, {500, 33}}) {
        if (dtype == DType::bf16 && K <= 256) continue;
        Case sized = c;
        sized.key_dim = K;
        sized.value_dim = V;
        add(named(std::to_string(K)), sized);
      }
      if (dtype == DType::bf16) {
        if (values == GateValues::extreme) continue;
        Case plain = c;
        plain.gate = GateKind::none;
        plain.key_dim = 272;
        plain.value_dim = 96;
        add(named("none"), plain);
        continue;
      }
      for (const GateKind kind : kinds) {
        if (kind == GateKind::none && values == GateValues::extreme) continue;
        Case other = c;
        other.heads = 4;
        other.key_dim = other.value_dim = 64;
        other.gate = kind;
        add(named(name_of(kind)), other);
        other.lengths = {0, 5, 64, 0, 200, 1, 130, 63, 0};
        other.gate_dtype = dtype;
        add(named(std::string(name_of(kind)) + "_packed"), other);
      }
      Case segments = c;
      segments.batch = segments.query_heads = segments.heads = 1;
      segments.length = 4099;
      segments.key_dim = 64;
      segments.value_dim = 128;
      add(named("segments"), segments);
    }
  }
  // Gates over values, and beside them over keys: chunks, both sides alike.
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const GateValues values : {GateValues::trained, GateValues::extreme}) {
      const std::string name = values == GateValues::trained ? "_trained" : "_extreme";
      const std::string start = dtype == DType::bf16 ? "values" : std::string("values_") + name_of(dtype);
      const Case plain{.batch = 3,
                       .length = 203,
                       .query_heads = 4,
                       .heads = 4,
                       .key_dim = 64,
                       .value_dim = 64,
                       .gate = GateKind::key_value,
                       .gate_values = values,
                       .dtype = dtype,
                       .gate_dtype = dtype};
      add(start + name, plain);
      Case alone = plain;
      alone.gates_over_keys = false;
      add(start + "_alone" + name, alone);
      Case whole = plain;
      whole.length = 128;
      add(start + "_whole_chunks" + name, whole);
      Case strided = plain;
      strided.strided = true;
      strided.key_dim = 40;
      strided.value_dim = 96;
      add(start + "_strided" + name, strided);
      Case packed = plain;
      packed.lengths = {0, 5, 64, 0, 200, 1, 130, 63, 0};
      add(start + "_packed" + name, packed);
      Case grouped = plain;
      grouped.heads = 2;
      grouped.value_dim = 128;
      grouped.gate_dtype = DType::f32;
      add(start + "_grouped_f32_gates" + name, grouped);
      Case unaligned = plain;  // rows that no 16-byte piece fits
      unaligned.key_dim = 33;
      unaligned.value_dim = 51;
      add(start + "_unaligned" + name, unaligned);
      for (const auto& [K, V] : {std::pair{256, 512}, {192, 64}, {300, 200}}) {
        Case wide = plain;
        wide.batch = 2;
        wide.query_heads = wide.heads = 2;
        wide.key_dim = K;
        wide.value_dim = V;
        add(start + "_wide_" + std::to_string(K) + "_" + std::to_string(V) + name, wide);
      }
      Case segments = plain;
      segments.batch = segments.query_heads = segments.heads = 1;
      segments.length = 4099;
      segments.value_dim = 128;
      add(start + "_segments" + name, segments);
    }
  }
  // Feature maps and the normaliser, before and after every kind of kernel that they can stand around.
  for (const FeatureMap map : {FeatureMap::elu_plus_one, FeatureMap::relu}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      const std::string name = std::string(name_of(map)) + "_" + name_of(dtype);
      const Case plain{.batch = 3,
                       .length = 203,
                       .query_heads = 4,
                       .heads = 2,
                       .key_dim = 64,
                       .value_dim = 72,
                       .gate = GateKind::none,
                       .dtype = dtype,
                       .feature_map = map};
      add("features_" + name, plain);
      Case gated = plain;
      gated.gate = GateKind::key;
      gated.strided = true;
      gated.key_dim = 40;
      add("features_gated_strided_" + name, gated);
      Case both = plain;
      both.gate = GateKind::key_value;
      add("features_gates_over_values_" + name, both);
      Case normalized = plain;
      normalized.normalize = true;
      add("normalized_" + name, normalized);
      Case packed = normalized;
      packed.lengths = {0, 5, 64, 0, 200, 1, 130, 63, 0};
      packed.strided = true;
      add("normalized_packed_strided_" + name, packed);
      Case unaligned = normalized;
      unaligned.key_dim = 77;
      unaligned.value_dim = 51;
      add("normalized_unaligned_" + name, unaligned);
      Case segments = normalized;
      segments.batch = segments.query_heads = segments.heads = 1;
      segments.length = 4099;
      segments.key_dim = 128;
      add("normalized_segments_" + name, segments);
      if (dtype != DType::bf16) continue;
      Case narrow = normalized;
      narrow.batch = 34;
      narrow.heads = 4;
      narrow.value_dim = 64;
      add("normalized_narrow_" + name, narrow);
    }
    Case stateless{.length = 203, .gate = GateKind::none, .dtype = DType::bf16, .feature_map = map, .normalize = true};
    stateless.states = false;
    stateless.key_dim = 256;
    stateless.value_dim = 128;
    add(std::string("normalized_without_states_") + name_of(map), stateless);
  }
  // Gates as logits: narrow heads in one kernel, wider ones in one pass and in two, packed rows, several query heads.
  for (const auto& [name, B, T, H, K, V] : {std::tuple{"narrow", 34, 203, 4, 64, 64},
                                            {"narrow_strided", 34, 203, 4, 40, 48},
                                            {"narrow_few", 2, 1500, 2, 64, 64},
                                            {"wide", 16, 203, 4, 128, 256},
                                            {"wider", 2, 203, 2, 256, 512},
                                            {"brief", 2, 190, 2, 128, 384},
                                            {"unaligned", 3, 203, 4, 33, 51}}) {
    Case c{.batch = B, .length = T, .query_heads = H, .heads = H, .key_dim = K, .value_dim = V, .dtype = DType::bf16};
    c.gate_dtype = DType::bf16;
    c.logits = true;
    c.strided = K == 40;
    add(std::string("logits_") + name, c);
    c.lengths = {0, 5, 64, 0, 200, 1, 130, 63, 0};
    for (int i = 0; i < 27; ++i) c.lengths.push_back(17 + i);
    c.query_heads = K == 256 ? 2 * H : H;
    add(std::string("logits_packed_") + name, c);
    c.lengths.clear();
    c.states = false;
    add(std::string("logits_without_states_") + name, c);
    c.gate_dtype = DType::f32;
    add(std::string("logits_in_f32_") + name, c);
  }
  add("tokens_f32", {.length = 203,
                     .query_heads = 4,
                     .heads = 2,
                     .key_dim = 6,
                     .value_dim = 64,
                     .gate = GateKind::key_value,
                     .gate_values = GateValues::extreme});
  // In pairs of tokens: columns of out up to 128, up to 256 and beyond; rows beside the tokens and none.
  for (const GateKind kind : kinds) {
    for (const GateValues values : {GateValues::trained, GateValues::extreme, GateValues::times_16}) {
      if (kind == GateKind::none && values != GateValues::trained) continue;
      const std::string name = std::string(name_of(kind)) + (values == GateValues::trained   ? "_trained"
                                                             : values == GateValues::extreme ? "_extreme"
                                                                                             : "_times_16");
      Case c{.length = 203, .key_dim = 128, .value_dim = 256, .gate = kind, .gate_values = values};
      c.algorithm = Algorithm::parallel;
      c.dtype = c.gate_dtype = DType::bf16;
      add("parallel_" + name, c);
      c.dtype = c.gate_dtype = DType::f32;
      c.key_dim = 33;
      c.value_dim = 51;
      c.query_heads = 4;
      c.strided = true;
      c.lengths = {0, 5, 64, 0, 200, 1, 130, 63, 0};
      add("parallel_packed_" + name, c);
      c.lengths.clear();
      c.dtype = DType::f16;
      c.key_dim = 320;
      c.value_dim = 300;
      c.feature_map = FeatureMap::elu_plus_one;
      add("parallel_wide_" + name, c);
      c.states = false;
      add("parallel_without_states_" + name, c);
    }
  }
  Case parallel_logits{.length = 203, .dtype = DType::bf16, .gate_dtype = DType::bf16, .logits = true};
  parallel_logits.algorithm = Algorithm::parallel;
  add("parallel_logits", parallel_logits);
  return list;
}

}  // namespace flashgla::ops::gated_linear_attention

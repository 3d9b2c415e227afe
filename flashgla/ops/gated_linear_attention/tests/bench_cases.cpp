// The problems that the bench times.
#include "flashgla/ops/gated_linear_attention/tests/cases.h"

namespace flashgla::ops::gated_linear_attention {

namespace {
Case timed(std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t K, std::int64_t V, DType dtype, GateKind gate) {
  const DType gate_dtype = dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return {.batch = B,
          .length = T,
          .query_heads = H,
          .heads = H,
          .key_dim = K,
          .value_dim = V,
          .gate = gate,
          .dtype = dtype,
          .gate_dtype = gate_dtype,
          .states = false};
}
}  // namespace

std::vector<Case> bench_cases(Device device, bool sweep) {
  std::vector<Case> list;
  const bool cpu = device.kind == Device::Kind::cpu;
  if (sweep && cpu) {
    constexpr std::int64_t kTokens = 4096;  // in each, as the batch takes them
    for (const std::int64_t length : {128, 512, 2048, 4096}) {
      for (const auto& [H, K, V] :
           {std::array{4, 64, 64}, std::array{4, 128, 128}, std::array{2, 128, 256}, std::array{1, 256, 512}}) {
        for (const GateKind gate : {GateKind::none, GateKind::scalar, GateKind::key, GateKind::key_value}) {
          for (const DType dtype : {DType::f32, DType::bf16}) {
            list.push_back(timed(kTokens / length, length, H, K, V, dtype, gate));
          }
        }
      }
    }
    return list;
  }
  if (sweep) {
    constexpr std::int64_t kH = 4, kMostElements = std::int64_t{1} << 26;  // of one tensor
    const std::pair<std::int64_t, std::int64_t> widths[] = {{64, 64},   {128, 128}, {128, 256},
                                                            {256, 256}, {256, 512}, {512, 512}};
    for (const auto& width : widths) {
      const std::int64_t K = width.first, V = width.second;  // clang 14 captures no bindings
      const auto add = [&](std::int64_t batch, std::int64_t length, GateKind gate) {
        if (batch * length * kH * std::max(K, V) <= kMostElements)
          list.push_back(timed(batch, length, kH, K, V, DType::bf16, gate));
      };
      for (const std::int64_t length : {64, 512, 4096, 32768, 131072}) {
        for (const std::int64_t batch : {1, 8, 32, 64}) add(batch, length, GateKind::key);
      }
      for (const GateKind gate : {GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key_value}) {
        for (const std::int64_t batch : {8, 32}) add(batch, 2048, gate);
      }
      for (const GateKind gate : {GateKind::key, GateKind::key_value}) {
        for (const DType dtype : {DType::f16, DType::f32}) list.push_back(timed(8, 2048, kH, K, V, dtype, gate));
      }
      Case features = timed(8, 2048, kH, K, V, DType::bf16, GateKind::none);
      features.feature_map = FeatureMap::elu_plus_one;
      list.push_back(features);
      features.normalize = true;
      list.push_back(features);
    }
    // The paper's Figure 2 (scripts/paper/figure2.sh): its lengths and batch, and the widths of the paper and of its
    // first version.
    for (const std::int64_t length : {1024, 2048, 4096, 8192}) {
      for (const Algorithm algorithm :
           {Algorithm::chunk_materialized, Algorithm::chunk_recomputed, Algorithm::recurrent, Algorithm::parallel}) {
        if (algorithm == Algorithm::recurrent && length > 4096) continue;
        list.push_back(timed(32, length, kH, 128, 256, DType::bf16, GateKind::key));
        list.back().algorithm = algorithm;
        if (algorithm == Algorithm::recurrent || algorithm == Algorithm::parallel) continue;
        list.push_back(timed(32, length, 16, 64, 64, DType::bf16, GateKind::none));
        list.back().algorithm = algorithm;
      }
    }
    // Packed sequences: lengths as they may come, one much longer than the others, and all alike.
    std::vector<std::int64_t> mixed = {256,  3840, 1024, 3072, 700,  3396, 2048, 1500,
                                       2596, 2048, 400,  3696, 1100, 2996, 1800, 2296},
                              skewed(44, 64), alike(64, 512);
    skewed[20] = 30000;
    for (const auto& [K, V] : {std::pair{64, 64}, {128, 256}, {256, 512}}) {
      for (const auto* lengths : {&mixed, &skewed, &alike}) {
        for (const bool tells_longest : {false, true}) {
          Case packed = timed(1, 0, kH, K, V, DType::bf16, GateKind::key);
          packed.lengths = *lengths;
          packed.tells_longest = tells_longest;
          list.push_back(packed);
        }
      }
    }
    for (const auto& [K, V] : {std::pair{64, 64}, {128, 256}, {256, 512}, {512, 512}}) {
      for (const GateValues values : gate_values()) {
        if (values == GateValues::trained) continue;
        Case strong = timed(8, 2048, kH, K, V, DType::bf16, GateKind::key);
        strong.gate_values = values;
        list.push_back(strong);
      }
    }
    for (const std::int64_t width : {62, 130}) {  // no multiples of 16 bytes
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
        list.push_back(timed(8, 2048, kH, width, width, dtype, GateKind::key));
    }
    return list;
  }
  if (cpu) {
    list = {timed(2, 2048, 4, 128, 128, DType::f32, GateKind::key),
            timed(2, 2048, 4, 128, 128, DType::bf16, GateKind::key),
            timed(2, 2048, 4, 128, 128, DType::f32, GateKind::scalar),
            timed(2, 2048, 4, 128, 128, DType::f32, GateKind::none),
            timed(1, 2048, 4, 64, 64, DType::f32, GateKind::key),
            timed(16, 64, 4, 64, 64, DType::f32, GateKind::key)};
    return list;
  }
  constexpr DType bf16 = DType::bf16;
  list = {timed(32, 2048, 16, 64, 64, bf16, GateKind::key),      timed(16, 2048, 4, 128, 256, bf16, GateKind::key),
          timed(8, 4096, 4, 256, 512, bf16, GateKind::key),      timed(1, 32768, 4, 256, 512, bf16, GateKind::key),
          timed(1, 2048, 4, 256, 512, bf16, GateKind::key),      timed(32, 2048, 16, 64, 64, bf16, GateKind::none),
          timed(8, 4096, 4, 256, 512, bf16, GateKind::none),     timed(32, 2048, 16, 64, 64, bf16, GateKind::constant),
          timed(32, 2048, 16, 64, 64, bf16, GateKind::scalar),   timed(32, 512, 16, 64, 64, bf16, GateKind::key),
          timed(32, 1024, 16, 64, 64, bf16, GateKind::key),      timed(32, 2048, 16, 64, 64, DType::f16, GateKind::key),
          timed(32, 2048, 16, 64, 64, DType::f32, GateKind::key)};
  // Gates of other strengths, in f32, and as logits.
  for (const Case& shape : {list[0], list[1], list[2]}) {
    for (const GateValues values : {GateValues::times_1, GateValues::times_2, GateValues::fast_channels,
                                    GateValues::times_4, GateValues::times_16, GateValues::resets}) {
      list.push_back(shape);
      list.back().gate_values = values;
    }
    list.push_back(shape);
    list.back().gate_dtype = DType::f32;
    list.push_back(shape);
    list.back().logits = true;
  }
  return list;
}

std::vector<Case> step_cases(Device device, bool sweep) {
  if (device.kind == Device::Kind::cuda) {
    std::vector<Case> list;
    for (const std::int64_t batch : {16, 64, 256}) {
      list.push_back(timed(batch, 1, 4, 256, 512, DType::bf16, GateKind::key));
    }
    return list;
  }
  std::vector<Case> list = {timed(1, 1, 4, 128, 256, DType::bf16, GateKind::key),
                            timed(64, 1, 4, 128, 256, DType::bf16, GateKind::key)};
  if (sweep) {
    for (const std::int64_t batch : {1, 8, 64}) list.push_back(timed(batch, 1, 4, 256, 512, DType::f32, GateKind::key));
  }
  return list;
}

}  // namespace flashgla::ops::gated_linear_attention

// A row's features and gradients in f32, one at a time from what the row's reductions gave: for the CPU and CUDA.
// `lanes` share a row: rank() of count(), and sum(x) and largest(x) over them. x(c) reads channel c of the row.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "flashgla/ops/feature_map/feature_map.h"

#ifdef __CUDACC__
#define FLASHGLA_BOTH __host__ __device__ __forceinline__
#else
#define FLASHGLA_BOTH inline
#endif

namespace flashgla::ops::feature_map {

template <Map kMap>
struct Row {
  int channels, features;
  float largest = 0.0f, scale = 1.0f;  // of both_signs: what exponents are less, and what powers are times
  float divided = 1.0f;                // 1 / (sum + epsilon), or 1

  template <class Lanes, class X>
  FLASHGLA_BOTH Row(const Lanes& lanes, int channels, const X& x, bool divide)
      : channels(channels), features(static_cast<int>(features_of(kMap, channels))) {
    if constexpr (kMap == Map::both_signs) {
      for (int c = lanes.rank(); c < channels; c += lanes.count()) {
        largest = fmaxf(largest, 2.0f * fabsf(x(c)));
      }
      largest = lanes.largest(largest);
      scale = 1.0f / sum_of_features(lanes, x);
    }
    if (divide) divided = 1.0f / (sum_of_features(lanes, x) + static_cast<float>(kSumEpsilon));
  }

  template <class Lanes, class X>
  FLASHGLA_BOTH float sum_of_features(const Lanes& lanes, const X& x) const {
    float sum = 0.0f;
    for (int i = lanes.rank(); i < features; i += lanes.count()) sum += feature(x, i);
    return lanes.sum(sum);
  }

  // (max(x, 0), max(-x, 0)), counted mod 2 C.
  template <class X>
  FLASHGLA_BOTH float rectified(const X& x, int i) const {
    const int at = i < 0 ? i + 2 * channels : i >= 2 * channels ? i - 2 * channels : i;
    return fmaxf(at < channels ? x(at) : -x(at - channels), 0.0f);
  }

  // phi(x)_i.
  template <class X>
  FLASHGLA_BOTH float feature(const X& x, int i) const {
    if constexpr (kMap == Map::as_is) {
      return x(i);
    } else if constexpr (kMap == Map::relu) {
      return fmaxf(x(i), 0.0f);
    } else if constexpr (kMap == Map::elu_plus_one) {
      return x(i) > 0.0f ? x(i) + 1.0f : expf(x(i));
    } else if constexpr (kMap == Map::both_signs) {
      return expf((i < channels ? 2.0f * x(i) : -2.0f * x(i - channels)) - largest) * scale;
    } else {
      const int own = i % (2 * channels), shift = i / (2 * channels) + 1;
      return rectified(x, own) * rectified(x, own - shift % (2 * channels));
    }
  }
};

template <Map kMap, class Lanes, class X, class Y>
FLASHGLA_BOTH void forward_row(const Lanes& lanes, int channels, bool divide, const X& x, const Y& set_y) {
  const Row<kMap> row(lanes, channels, x, divide);
  for (int i = lanes.rank(); i < row.features; i += lanes.count()) set_y(i, row.feature(x, i) * row.divided);
}

template <Map kMap, class Lanes, class X, class Dy, class Dx>
FLASHGLA_BOTH void backward_row(const Lanes& lanes, int channels, bool divide, const X& x, const Dy& dy,
                                const Dx& set_dx) {
  const Row<kMap> row(lanes, channels, x, divide);
  float dot = 0.0f;  // dy . phi(x)
  if (divide || kMap == Map::both_signs) {
    for (int i = lanes.rank(); i < row.features; i += lanes.count()) dot += dy(i) * row.feature(x, i);
    dot = lanes.sum(dot);
  }
  // Of phi(x)_i: y's less what all y lose by the sum. both_signs needs that times phi(x), summed; its features sum
  // to 1.
  const float pull = divide ? dot * row.divided : 0.0f, mean = (dot - pull) * row.divided;
  const auto gradient = [&](int i) { return (dy(i) - pull) * row.divided; };
  for (int c = lanes.rank(); c < channels; c += lanes.count()) {
    float dx = 0.0f;
    if constexpr (kMap == Map::as_is) {
      dx = gradient(c);
    } else if constexpr (kMap == Map::relu) {
      dx = x(c) > 0.0f ? gradient(c) : 0.0f;
    } else if constexpr (kMap == Map::elu_plus_one) {
      dx = gradient(c) * (x(c) > 0.0f ? 1.0f : expf(x(c)));
    } else if constexpr (kMap == Map::both_signs) {
      dx = 2.0f *
           (row.feature(x, c) * (gradient(c) - mean) - row.feature(x, c + channels) * (gradient(c + channels) - mean));
    } else {
      const float value = x(c);
      const int both = 2 * channels, own = value < 0.0f ? c + channels : c;
      if (value != 0.0f) {
        for (int j = 1; j <= static_cast<int>(kShifts); ++j) {
          const int shift = j % both, begin = (j - 1) * both, ahead = own + shift;
          dx += gradient(begin + own) * row.rectified(x, own - shift) +
                gradient(begin + (ahead < both ? ahead : ahead - both)) * row.rectified(x, ahead);
        }
        if (value < 0.0f) dx = -dx;
      }
    }
    set_dx(c, dx);
  }
}

// Calls run(std::integral_constant<Map, map>()).
template <class Run>
void with_map(Map map, const Run& run) {
  switch (map) {
    case Map::as_is:
      return run(std::integral_constant<Map, Map::as_is>());
    case Map::relu:
      return run(std::integral_constant<Map, Map::relu>());
    case Map::elu_plus_one:
      return run(std::integral_constant<Map, Map::elu_plus_one>());
    case Map::both_signs:
      return run(std::integral_constant<Map, Map::both_signs>());
    case Map::dpfp:
      return run(std::integral_constant<Map, Map::dpfp>());
  }
}

}  // namespace flashgla::ops::feature_map

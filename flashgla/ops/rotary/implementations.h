// The table behind the operator. Arguments are validated already.
#pragma once

#include <algorithm>
#include <span>

#include "flashgla/ops/cu_seqlens.h"
#include "flashgla/ops/rotary/rotary.h"

namespace flashgla::ops::rotary {

struct Problem {
  DType dtype;
  std::int64_t channels;  // K
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*run)(Context&, const TensorView& x, const TensorView& positions, const TensorView& cu_seqlens, double base,
              Direction, const TensorView& y);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

// The position of row `t` of batch row `b` on the CPU; `end`: where its sequence ends in the row.
inline std::int64_t position_at(const TensorView& positions, const TensorView& cu_seqlens, std::int64_t b,
                                std::int64_t t, std::int64_t length, std::int64_t& end) {
  std::int64_t n = b, begin = 0;
  end = length;
  if (cu_seqlens) {
    const auto* bounds = cu_seqlens.as<std::int32_t>();
    n = std::upper_bound(bounds + 1, bounds + cu_seqlens.size(0) - 1, static_cast<std::int32_t>(t)) - (bounds + 1);
    begin = bounds[n];
    end = bounds[n + 1];
  }
  return (positions ? positions.as<std::int32_t>()[n] : 0) + t - begin;
}

}  // namespace flashgla::ops::rotary

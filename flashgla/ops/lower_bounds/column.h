// One channel's bound and its gradient, for the CPU and CUDA.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define FLASHGLA_BOTH __host__ __device__ __forceinline__
#else
#define FLASHGLA_BOTH inline
#endif

namespace flashgla::ops::lower_bounds {

// read(j): element j of the channel's column of w. S: float or double.
template <class S>
struct Column {
  S largest, total, bound;

  template <class Read>
  FLASHGLA_BOTH Column(const Read& read, std::int64_t layers, std::int64_t layer) : largest(read(0)), total(0) {
    for (std::int64_t j = 1; j < layers; ++j) largest = read(j) > largest ? read(j) : largest;
    S below = 0;
    for (std::int64_t j = 0; j < layers; ++j) {
      const S power = std::exp(read(j) - largest);
      total += power;
      if (j > 0 && j <= layer) below += power;
    }
    bound = below / total;
  }
  // Of w_j, for a gradient of 1 of the bound.
  FLASHGLA_BOTH S gradient(S w, std::int64_t j, std::int64_t layer) const {
    return std::exp(w - largest) / total * ((j > 0 && j <= layer ? S(1) : S(0)) - bound);
  }
};

}  // namespace flashgla::ops::lower_bounds

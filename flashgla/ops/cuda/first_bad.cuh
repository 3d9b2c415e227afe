// What kernels note of bad indices, for the host to read when it likes.
#pragma once

#include <cstdint>

namespace flashgla::ops::cuda {

// *first, unless null, becomes the smallest of position + 1 and what it holds; 0 stands for none yet.
__device__ __forceinline__ void note_bad(std::int32_t* first, std::int64_t position) {
  if (first == nullptr) return;
  const int mine = position < 0x7fffffff ? static_cast<int>(position) + 1 : 0x7fffffff;
  int held = *first;
  while (held == 0 || held > mine) {
    const int before = atomicCAS(first, held, mine);
    if (before == held) return;
    held = before;
  }
}

}  // namespace flashgla::ops::cuda

// Which calls cuDNN gets where it is there: pure functions, so that they are tested without it and without a GPU.
#pragma once

#include "flashgla/ops/softmax_attention/implementations.h"

namespace flashgla::ops::softmax_attention {

// What cuDNN's row can run.
Support cudnn_takes(const Problem& problem, const Architecture& architecture);

// Of what it can run: what it is given where no implementation is forced.
bool cudnn_is_faster(const Problem& problem, const Architecture& architecture);

// What one call of cuDNN's backward takes, so that its workspace stays within kMostCudnnWorkspace: batch rows with all
// their heads, or of one row a part of the key-value heads with their query heads. Both divide what the problem has.
// None where not even one key-value head's fits. bytes: what it takes.
struct CudnnPart {
  std::int64_t rows = 0, groups = 0, bytes = 0;
};
CudnnPart cudnn_part(std::int64_t batch, std::int64_t length, std::int64_t heads, std::int64_t groups);

// Of a backward whose bits are the same in every run: the gradients of a part's scores, in bf16.
constexpr std::int64_t kMostCudnnWorkspace = std::int64_t{1} << 30;

}  // namespace flashgla::ops::softmax_attention

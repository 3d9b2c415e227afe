#include <algorithm>

#include "flashgla/base/cuda/tensor_map.h"
#include "flashgla/ops/softmax_attention/cuda/hopper/maps.h"

namespace flashgla::ops::softmax_attention::cuda::hopper {

CUtensorMap map_of(const TensorView& tensor, int tokens) {
  if (!tensor || tensor.numel() == 0) return CUtensorMap{};
  const auto size = [&](int dim) { return static_cast<cuuint64_t>(tensor.size(dim)); };
  const auto bytes = [&](int dim) {  // of a dimension of one element any stride would do, but zero
    return std::max<cuuint64_t>(16, static_cast<cuuint64_t>(2 * tensor.stride[dim]));
  };
  return flashgla::cuda::tensor_map("softmax_attention", tensor.data, {size(3), size(1), size(2), size(0)},
                                    {bytes(1), bytes(2), bytes(0)}, tokens);
}

}  // namespace flashgla::ops::softmax_attention::cuda::hopper

#include "flashgla/base/cuda/tensor_map.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"

namespace flashgla::ops::gated_linear_attention::cuda {

RowMap row_map_of(const Params& p, const Strided& x, int heads, int channels, int tokens) {
  const std::int64_t batch = p.sequences.cu_seqlens != nullptr ? 1 : p.sequences.count;
  RowMap result{};
  result.head_step = x.head != 0;
  result.batch_step = x.batch != 0;
  const auto bytes = [](std::int64_t stride) { return static_cast<cuuint64_t>(stride != 0 ? 2 * stride : 16); };
  static_assert(kTile == 64);
  result.map = flashgla::cuda::tensor_map(
      "gated_linear_attention", x.data,
      {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(p.sequences.length),
       static_cast<cuuint64_t>(x.head != 0 ? heads : 1), static_cast<cuuint64_t>(x.batch != 0 ? batch : 1)},
      {bytes(x.token), bytes(x.head), bytes(x.batch)}, tokens);
  return result;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

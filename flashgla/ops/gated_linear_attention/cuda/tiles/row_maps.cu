// Tensor maps through the driver, which is found at run time: the library links the runtime alone.
#include <cuda_runtime_api.h>

#include <string>

#include "flashgla/base/cuda/check.h"
#include "flashgla/base/error.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  flashgla::cuda::check(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
      "gated_linear_attention tensor maps");
  if (found != cudaDriverEntryPointSuccess) throw Error("gated_linear_attention: the driver makes no tensor maps");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

RowMap row_map_of(const Params& p, const Strided& x, int heads, int channels, int tokens) {
  static const Encode encode = find_encode();
  const std::int64_t batch = p.sequences.cu_seqlens != nullptr ? 1 : p.sequences.count;
  RowMap result{};
  result.head_step = x.head != 0;
  result.batch_step = x.batch != 0;
  const auto bytes = [](std::int64_t stride) { return static_cast<cuuint64_t>(stride != 0 ? 2 * stride : 16); };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(p.sequences.length),
                               static_cast<cuuint64_t>(x.head != 0 ? heads : 1),
                               static_cast<cuuint64_t>(x.batch != 0 ? batch : 1)};
  const cuuint64_t strides[3] = {bytes(x.token), bytes(x.head), bytes(x.batch)};
  const cuuint32_t box[4] = {kTile, static_cast<cuuint32_t>(tokens), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult status = encode(&result.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x.data, sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error("gated_linear_attention: the driver refused a tensor map (" + std::to_string(status) + ")");
  }
  return result;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Tensor maps through the driver, which is found at run time: the library links the runtime alone.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "flashgla/base/cuda/check.h"
#include "flashgla/base/error.h"
#include "flashgla/ops/softmax_attention/cuda/hopper/maps.h"

namespace flashgla::ops::softmax_attention::cuda::hopper {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  flashgla::cuda::check(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
      "softmax_attention tensor maps");
  if (found != cudaDriverEntryPointSuccess) throw Error("softmax_attention: the driver makes no tensor maps");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap map_of(const TensorView& tensor, int tokens) {
  static const Encode encode = find_encode();
  CUtensorMap map{};
  if (!tensor || tensor.numel() == 0) return map;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(tensor.size(3)), static_cast<cuuint64_t>(tensor.size(1)),
                               static_cast<cuuint64_t>(tensor.size(2)), static_cast<cuuint64_t>(tensor.size(0))};
  const auto bytes = [&](int dim) {  // of a dimension of one element any stride would do, but zero
    return std::max<cuuint64_t>(16, static_cast<cuuint64_t>(2 * tensor.stride[dim]));
  };
  const cuuint64_t strides[3] = {bytes(1), bytes(2), bytes(0)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(tokens), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, tensor.data, sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error("softmax_attention: the driver refused a tensor map (" + std::to_string(status) + ")");
  }
  return map;
}

}  // namespace flashgla::ops::softmax_attention::cuda::hopper

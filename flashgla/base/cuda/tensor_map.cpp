// The driver makes tensor maps. It is found at run time: the library links the runtime alone.
#include "flashgla/base/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

#include "flashgla/base/cuda/check.h"
#include "flashgla/base/error.h"

namespace flashgla::cuda {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode(const std::string& operation) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        (operation + " tensor maps").c_str());
  if (found != cudaDriverEntryPointSuccess) throw Error(operation + ": the driver makes no tensor maps");
  return reinterpret_cast<Encode>(function);
}

CUtensorMap encoded(const char* operation, CUtensorMapDataType type, void* data, const std::array<cuuint64_t, 4>& sizes,
                    const std::array<cuuint64_t, 3>& strides, const std::array<int, 3>& sides,
                    CUtensorMapSwizzle swizzle) {
  static const Encode encode = find_encode(operation);
  CUtensorMap map{};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(sides[0]), static_cast<cuuint32_t>(sides[1]),
                             static_cast<cuuint32_t>(sides[2]), 1},
                   steps[4] = {1, 1, 1, 1};
  const CUresult status =
      encode(&map, type, 4, data, sizes.data(), strides.data(), box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(std::string(operation) + ": the driver refused a tensor map (" + std::to_string(status) + ")");
  }
  return map;
}

}  // namespace

CUtensorMap tensor_map(const char* operation, void* data, const std::array<cuuint64_t, 4>& sizes,
                       const std::array<cuuint64_t, 3>& strides, int rows) {
  return encoded(operation, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, sizes, strides, {64, rows, 1},
                 CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap tensor_map_of_rows(const char* operation, bool wide, void* data, const std::array<cuuint64_t, 4>& sizes,
                               const std::array<cuuint64_t, 3>& strides, const std::array<int, 3>& box, bool swizzled) {
  return encoded(operation, wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, sizes,
                 strides, box, swizzled ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace flashgla::cuda

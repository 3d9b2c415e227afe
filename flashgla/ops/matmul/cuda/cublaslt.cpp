#include "flashgla/ops/matmul/cuda/cublaslt.h"

#include <string>

#include "flashgla/base/error.h"
#include "flashgla/base/shared_library.h"

namespace flashgla::ops::matmul::cuda {

namespace {

const std::string kMajor = std::to_string(CUBLAS_VER_MAJOR);
const std::string kFile = "libcublasLt.so." + kMajor;

CublasLt load() {
  const SharedLibrary library = [] {
    try {
      return SharedLibrary(kFile);
    } catch (const Error& error) {
      throw Error("matmul: products on CUDA need cuBLASLt of CUDA " + kMajor + ", which is not found (" + error.what() +
                  "); install the package libcublas-" + kMajor + "-0, or put the folder of " + kFile +
                  " into LD_LIBRARY_PATH");
    }
  }();
  CublasLt f{};
  try {
    library.find(f.create, "cublasLtCreate");
    library.find(f.destroy, "cublasLtDestroy");
    library.find(f.version, "cublasLtGetVersion");
    library.find(f.status_string, "cublasLtGetStatusString");
    library.find(f.desc_create, "cublasLtMatmulDescCreate");
    library.find(f.desc_destroy, "cublasLtMatmulDescDestroy");
    library.find(f.desc_set, "cublasLtMatmulDescSetAttribute");
    library.find(f.layout_create, "cublasLtMatrixLayoutCreate");
    library.find(f.layout_destroy, "cublasLtMatrixLayoutDestroy");
    library.find(f.preference_create, "cublasLtMatmulPreferenceCreate");
    library.find(f.preference_destroy, "cublasLtMatmulPreferenceDestroy");
    library.find(f.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    library.find(f.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    library.find(f.algorithm_check, "cublasLtMatmulAlgoCheck");
    library.find(f.matmul, "cublasLtMatmul");
  } catch (const Error& error) {
    throw Error(std::string("matmul: ") + error.what() + "; it is too old");
  }
  return f;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt functions = load();
  return functions;
}

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(std::string("matmul: ") + what + ": " + cublaslt().status_string(status));
}

}  // namespace flashgla::ops::matmul::cuda

#include "flashgla/ops/matmul/cuda/cublaslt.h"

#include <dlfcn.h>

#include <string>

#include "flashgla/base/error.h"

namespace flashgla::ops::matmul::cuda {

namespace {

const std::string kMajor = std::to_string(CUBLAS_VER_MAJOR);
const std::string kFile = "libcublasLt.so." + kMajor;

template <class Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw Error("matmul: " + kFile + " has no " + name + "; it is too old");
}

CublasLt load() {
  void* library = dlopen(kFile.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays for the program's life
  if (library == nullptr) {
    const char* reason = dlerror();
    throw Error("matmul: products on CUDA need cuBLASLt of CUDA " + kMajor + ", which is not found (" +
                (reason != nullptr ? reason : kFile) + "); install the package libcublas-" + kMajor +
                "-0, or put the folder of " + kFile + " into LD_LIBRARY_PATH");
  }
  CublasLt f{};
  find(library, f.create, "cublasLtCreate");
  find(library, f.destroy, "cublasLtDestroy");
  find(library, f.version, "cublasLtGetVersion");
  find(library, f.status_string, "cublasLtGetStatusString");
  find(library, f.desc_create, "cublasLtMatmulDescCreate");
  find(library, f.desc_destroy, "cublasLtMatmulDescDestroy");
  find(library, f.desc_set, "cublasLtMatmulDescSetAttribute");
  find(library, f.layout_create, "cublasLtMatrixLayoutCreate");
  find(library, f.layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(library, f.preference_create, "cublasLtMatmulPreferenceCreate");
  find(library, f.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(library, f.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(library, f.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(library, f.algorithm_check, "cublasLtMatmulAlgoCheck");
  find(library, f.matmul, "cublasLtMatmul");
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

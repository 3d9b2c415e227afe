// cuBLASLt, loaded when the first product needs it: a program that multiplies nothing on a GPU runs without it.
#pragma once

#include <cublasLt.h>

namespace flashgla::ops::matmul::cuda {

struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulAlgoCheck) algorithm_check;
  decltype(&cublasLtMatmul) matmul;
};

// Throws Error with the loader's words and the remedy when the library is not there.
const CublasLt& cublaslt();

// Throws Error with cuBLASLt's words unless status is success.
void check(cublasStatus_t status, const char* what);

}  // namespace flashgla::ops::matmul::cuda

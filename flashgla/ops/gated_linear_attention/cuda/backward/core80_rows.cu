// Launcher of the one-kernel backward without gates or with one a token on mma.sync.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/backward/rows.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr const char* kName = "gated_linear_attention fused backward";

template <bool kGated>
__global__ void __launch_bounds__(kFusedThreads, 2)
    backward_rows_kernel(const __grid_constant__ Params p, const __grid_constant__ FusedBackward f) {
  extern __shared__ __align__(1024) char shared[];
  backward_rows<kGated>(p, f, shared);
}

}  // namespace

void launch_backward_rows(const Params& p, const FusedBackward& f, bool gated, cudaStream_t stream) {
  static_assert(RowsShared::total <= kFusedSharedBytes);
  const auto kernel = gated ? backward_rows_kernel<true> : backward_rows_kernel<false>;
  flashgla::cuda::launch(kName, kernel, dim3(static_cast<unsigned>(p.sequences.count * p.heads)), kFusedThreads,
                         RowsShared::total, stream, flashgla::cuda::Begin::after_previous, p, f);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

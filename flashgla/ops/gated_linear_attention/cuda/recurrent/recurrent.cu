// Launcher of the recurrent form.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/recurrent/recurrent.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

template <int R, bool normalize>
void launch(void* stream, const Params& p) {
  const std::int64_t rows = p.sequences.count * p.heads * (p.o.data != nullptr ? p.group : 1);
  const dim3 grid(static_cast<unsigned>(rows),
                  static_cast<unsigned>((p.value_dim + kRecurrentLanes - 1) / kRecurrentLanes));
  flashgla::cuda::launch("gated_linear_attention by tokens", recurrent_kernel<R, normalize>, grid,
                         kRecurrentWarps * kRecurrentLanes, recurrent_shared_bytes<R>(),
                         static_cast<cudaStream_t>(stream), flashgla::cuda::Begin::after_previous, p);
}

template <bool normalize>
void launch(void* stream, const Params& p) {
  const int rows = (p.key_dim + kRecurrentWarps - 1) / kRecurrentWarps;
  if (rows <= 8) return launch<8, normalize>(stream, p);
  if (rows <= 16) return launch<16, normalize>(stream, p);
  if (rows <= 32) return launch<32, normalize>(stream, p);
  launch<64, normalize>(stream, p);
}

}  // namespace

void launch_recurrent(void* stream, const Params& params) {
  params.normalize ? launch<true>(stream, params) : launch<false>(stream, params);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

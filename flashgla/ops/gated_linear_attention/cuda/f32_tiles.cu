// Launcher of the forward in f32 tiles.
#include "flashgla/base/cuda/device.h"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kWideHeads = 256;  // key channels from which the slices of V are narrow, as the state fills shared memory

int shared_bytes(int key_dim) {
  const int tiles = (key_dim + 63) / 64;
  return key_dim > kWideHeads ? WidePlan<32>::bytes(tiles) : WidePlan<64>::bytes(tiles);
}

template <bool kSplit, int kValues>
void launch(void* stream, const Params& p) {
  const int bytes = shared_bytes(p.key_dim);
  auto* kernel = f32_tiles_kernel<kSplit, kValues>;
  flashgla::cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                        "f32_tiles_kernel's shared memory");
  const std::int64_t slices = (p.value_dim + kValues - 1) / kValues;
  const std::int64_t blocks = p.sequences.count * p.heads * p.group * slices;
  kernel<<<static_cast<unsigned>(blocks), kWideThreads, bytes, static_cast<cudaStream_t>(stream)>>>(p);
  flashgla::cuda::check_launch("f32_tiles_kernel");
}

template <bool kSplit>
void launch(void* stream, const Params& p) {
  p.key_dim > kWideHeads ? launch<kSplit, 32>(stream, p) : launch<kSplit, 64>(stream, p);
}

}  // namespace

bool f32_tiles_fit(int key_dim, std::int64_t shared_memory) { return shared_bytes(key_dim) <= shared_memory; }

void launch_f32_tiles(void* stream, const Params& params, bool split) {
  split ? launch<true>(stream, params) : launch<false>(stream, params);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

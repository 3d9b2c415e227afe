#include <algorithm>

#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/softmax_attention/cuda/schedule.h"

namespace flashgla::ops::softmax_attention::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr double kSectionBytes = 24e6;  // about half of the L2

// One block: sequences in turns of as many as it has threads, their tiles counted by a sum over the threads before.
__global__ void __launch_bounds__(kThreads)
    packed_tiles_kernel(const std::int32_t* bounds, int sequences, int rows, PackedTile* tiles, int count) {
  flashgla::cuda::wait_for_previous();
  __shared__ int sums[kThreads / 32];
  int before = 0;  // tiles of the turns before
  for (int begin = 0; begin < sequences; begin += kThreads) {
    const int n = begin + static_cast<int>(threadIdx.x), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int own = n < sequences ? (bounds[n + 1] - bounds[n] + rows - 1) / rows : 0;
    int up_to = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, up_to, distance);
      if (lane >= distance) up_to += other;
    }
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    int first = before + up_to - own, all = before;
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) first += sums[i];
      all += sums[i];
    }
    for (int i = 0; i < own; ++i) tiles[first + i] = {n, i};
    before = all;
    __syncthreads();
  }
  for (int i = before + static_cast<int>(threadIdx.x); i < count; i += kThreads) tiles[i] = {-1, 0};
}

int packed_count(const Inputs& in, int rows) {
  return static_cast<int>((in.q.size(1) + rows - 1) / rows + in.cu_seqlens.size(0) - 1);
}

}  // namespace

const PackedTile* packed_tiles(Context& context, const Inputs& in, int rows) {
  if (!in.cu_seqlens) return nullptr;
  const int count = packed_count(in, rows);
  auto* tiles = static_cast<PackedTile*>(
      context.scratch().allocate(static_cast<std::size_t>(count) * sizeof(PackedTile), "attention: packed tiles"));
  if (!context.planning()) {
    ops::cuda::queue_kernel(context, "softmax_attention packed tiles", packed_tiles_kernel, 1, kThreads, 0,
                            in.cu_seqlens.as<std::int32_t>(), static_cast<int>(in.cu_seqlens.size(0) - 1), rows, tiles,
                            count);
  }
  return tiles;
}

Schedule schedule_of(const Call& call, const PackedTile* packed, int rows, int heads, double bytes, bool last_first) {
  Schedule schedule{};
  schedule.packed = packed;
  schedule.tiles = (call.length + rows - 1) / rows + (packed != nullptr ? call.sequences : 0);
  schedule.heads = heads;
  schedule.pairs = packed != nullptr ? heads : heads * call.sequences;
  schedule.section = std::clamp(static_cast<int>(kSectionBytes / std::max(bytes, 1.0)), 1, std::max(1, schedule.pairs));
  schedule.last_first = last_first;
  return schedule;
}

dim3 blocks_of(const Context& context, const Schedule& schedule) {
  const auto most = static_cast<std::int64_t>(std::max(1, context.architecture().multiprocessors));
  return dim3(static_cast<unsigned>(std::min(most, schedule.count())));
}

}  // namespace flashgla::ops::softmax_attention::cuda

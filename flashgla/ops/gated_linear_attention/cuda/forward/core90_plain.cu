// Two passes without gates, on Hopper: q~ = q and k~ = k, so that all there is to make of a chunk before the
// recurrence is its scores P = q k^T. TMA brings q and k here, there and in the backward from their own
// rows; the scale comes in at the ends (Recurrence::out_scale).
#include "flashgla/base/context.h"
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/recurrence.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template void launch_walk<TensorCore90, true>(cudaStream_t, const Params&, const TwoPasses&, Recurrence, bool);

namespace {

// Shared memory: tiles of q and k, [slots][2], and full barriers of the slots.
constexpr int kMostSlots = 4;
constexpr int plain_slots(int blocks) { return blocks < kMostSlots ? blocks : kMostSlots; }
constexpr int plain_bytes(int blocks) { return plain_slots(blocks) * (2 * kTileBytes + 8); }

// grid: chunks * H, heads fastest.
template <class Core>
__device__ __forceinline__ void make_scores(const Params& p, const Prepared& out, const RowMap& q_rows,
                                            const RowMap& k_rows, char* shared) {
  const std::uint32_t base = ptx::shared_address(shared);
  const int slots = plain_slots(out.blocks), heads = p.heads * p.group, thread = threadIdx.x;
  const std::uint32_t full = base + slots * 2 * kTileBytes;
  const int query_head = static_cast<int>(blockIdx.x) % heads, chunk = static_cast<int>(blockIdx.x) / heads;
  const auto each = static_cast<int>(p.sequences.chunks_each());
  const int n = chunk / each, token = chunk % each * kChunk;
  const auto ask_for = [&](int kb) {
    const std::uint32_t barrier = full + 8 * (kb % slots), to = base + kb % slots * 2 * kTileBytes;
    Core::expect_bytes(barrier, 2 * kTileBytes);
    Core::copy_box(to, &q_rows.map, kTile * kb, token, query_head * q_rows.head_step, n * q_rows.batch_step, barrier);
    Core::copy_box(to + kTileBytes, &k_rows.map, kTile * kb, token, query_head / p.group * k_rows.head_step,
                   n * k_rows.batch_step, barrier);
  };
  if (thread == 0) {
    for (int i = 0; i < slots; ++i) Core::init_barrier(full + 8 * i, 1);
    Core::publish_barriers();
    for (int i = 0; i < slots; ++i) ask_for(i);
  }
  __syncthreads();

  Accumulator s;
  clear(s);
#pragma unroll 1
  for (int kb = 0; kb < out.blocks; ++kb) {
    const std::uint32_t tiles = base + kb % slots * 2 * kTileBytes;
    Core::wait_at(full + 8 * (kb % slots), kb / slots % 2);
    Core::begin(s);
    Core::template product<Stored::k_inner, Stored::k_inner>(s, tiles, tiles + kTileBytes, thread);
    Core::finish(s);
    if (kb + slots < out.blocks) {
      __syncthreads();  // all have read them
      if (thread == 0) ask_for(kb + slots);
    }
  }
  std::uint32_t pairs[16];
  select_pairs<false>(pairs, s, thread);
  __syncthreads();
  if (out.scores != nullptr) put_operand<Core>(base, pairs, thread);
  if (out.transposed_scores != nullptr) put_operand<Core, true>(base + kTileBytes, pairs, thread);
  Core::publish();
  __syncthreads();
  if (thread == 0) {
    const std::int64_t image = static_cast<std::int64_t>(blockIdx.x) * kTileBytes;
    if (out.scores != nullptr) Core::copy_out(out.scores + image, base, kTileBytes);
    if (out.transposed_scores != nullptr) {
      Core::copy_out(out.transposed_scores + image, base + kTileBytes, kTileBytes);
    }
    Core::commit_copies_out();
    Core::wait_for_copies_out();
  }
}

template <class Core>
__global__ void __launch_bounds__(kGroupThreads)
    plain_scores_kernel(const __grid_constant__ Params p, const __grid_constant__ Prepared out,
                        const __grid_constant__ RowMap q_rows, const __grid_constant__ RowMap k_rows) {
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next_of_waves();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) make_scores<Core>(p, out, q_rows, k_rows, shared);
}

}  // namespace

RowMap q_map(const Params& p) { return row_map_of(p, p.q, p.heads * p.group, p.key_dim); }
RowMap k_map(const Params& p) { return row_map_of(p, p.k, p.heads, p.key_dim); }

void launch_plain_preparation(Context& context, const Params& p, const Prepared& prepared) {
  const std::int64_t blocks = p.sequences.most_chunks * p.heads * p.group;
  if (blocks == 0) return;
  flashgla::cuda::launch("gated_linear_attention scores", plain_scores_kernel<TensorCore90>,
                         dim3(static_cast<unsigned>(blocks)), kGroupThreads, plain_bytes(prepared.blocks),
                         static_cast<cudaStream_t>(context.stream()), flashgla::cuda::Begin::after_previous, p,
                         prepared, q_map(p), k_map(p));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

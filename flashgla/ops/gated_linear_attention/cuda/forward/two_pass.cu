// Launchers of the two-pass forward: preparation, segments, recurrence.
#include <algorithm>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/recurrence.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

template <class Core>
void launch_forward_prepare(cudaStream_t stream, const Params& p, const Prepared& prepared) {
  const std::int64_t blocks = p.sequences.most_chunks * p.heads * p.group;
  flashgla::cuda::launch("gated_linear_attention forward prepare", forward_prepare_kernel<Core>,
                         dim3(static_cast<unsigned>(blocks)), kGroupThreads, kPrepareBytes, stream,
                         flashgla::cuda::Begin::after_previous, p, prepared);
}
template void launch_forward_prepare<TensorCore80>(cudaStream_t, const Params&, const Prepared&);
template void launch_forward_prepare<TensorCore90>(cudaStream_t, const Params&, const Prepared&);

namespace {

template <class Core, int KB, int groups, bool outputs>
void recurrence(cudaStream_t stream, const Params& p, const Prepared& prepared, const Segments& segments) {
  constexpr int bytes = RecurrencePlan<KB, groups, outputs>::bytes;
  const std::int64_t slices = (p.value_dim + 64 * groups - 1) / (64 * groups);
  const std::int64_t blocks = p.sequences.count * p.heads * (outputs ? p.group : 1) * segments.count * slices;
  flashgla::cuda::launch("gated_linear_attention recurrence", recurrence_kernel<Core, KB, groups, outputs>,
                         dim3(static_cast<unsigned>(blocks)), kGroupThreads * groups, bytes, stream, kNext<Core>, p,
                         prepared, segments);
}

template <class Core, int KB, int groups>
void run(cudaStream_t stream, const Params& p, const Prepared& prepared, Segments segments) {
  if (segments.count > 1) {
    segments.first_pass = true;
    recurrence<Core, KB, groups, false>(stream, p, prepared, segments);
    segments.first_pass = false;
    const auto elements = static_cast<std::int64_t>(p.key_dim) * p.value_dim;
    const dim3 grid(static_cast<unsigned>((elements + 255) / 256), static_cast<unsigned>(p.sequences.count * p.heads));
    flashgla::cuda::launch("gated_linear_attention segments", combine_kernel, grid, 256, 0, stream, kNext<Core>, p,
                           prepared.blocks, segments);
  }
  recurrence<Core, KB, groups, true>(stream, p, prepared, segments);
}

template <class Core, int KB>
void run(cudaStream_t stream, const Params& p, const Prepared& prepared, const Segments& segments, int shared_memory) {
  const bool two_groups = p.value_dim > 64 && RecurrencePlan<KB, 2, true>::bytes <= shared_memory;
  two_groups ? run<Core, KB, 2>(stream, p, prepared, segments) : run<Core, KB, 1>(stream, p, prepared, segments);
}

template <class Core>
void run(cudaStream_t stream, const Params& p, const Prepared& prepared, const Segments& segments, int shared_memory) {
  launch_forward_prepare<Core>(stream, p, prepared);
  switch (prepared.blocks) {
    case 1:
      return run<Core, 1>(stream, p, prepared, segments, shared_memory);
    case 2:
      return run<Core, 2>(stream, p, prepared, segments, shared_memory);
    case 3:
      return run<Core, 3>(stream, p, prepared, segments, shared_memory);
    default:
      return run<Core, 4>(stream, p, prepared, segments, shared_memory);
  }
}

// Time is cut as far as it takes to fill the card, where a cut pays: the first pass costs about half of the second.
Segments plan_segments(const Params& p, int multiprocessors, int blocks) {
  const std::int64_t longest = (p.sequences.length + kChunk - 1) / kChunk;
  const std::int64_t slices = p.value_dim > 64 ? (p.value_dim + 127) / 128 : 1;
  const std::int64_t busy = p.sequences.count * p.heads * p.group * slices;
  const std::int64_t slots =
      static_cast<std::int64_t>(multiprocessors) * (blocks * (p.value_dim > 64 ? 2 : 1) >= 4 ? 1 : 2);
  Segments segments;
  const std::int64_t most = std::min(slots / busy, longest / 2);
  if (most < 2) return segments;
  segments.chunks = static_cast<int>((longest + most - 1) / most);
  segments.count = static_cast<int>((longest + segments.chunks - 1) / segments.chunks);
  return segments;
}

}  // namespace

bool two_passes_fit(const Context& context, const Params& params) {
  const int bytes[] = {RecurrencePlan<1, 1, true>::bytes, RecurrencePlan<2, 1, true>::bytes,
                       RecurrencePlan<3, 1, true>::bytes, RecurrencePlan<4, 1, true>::bytes};
  return bytes[(params.key_dim - 1) / 64] <= context.architecture().shared_memory;
}

void forward_in_two_passes(Context& context, const Params& params, bool hopper) {
  const int blocks = (params.key_dim + 63) / 64;
  const std::int64_t chunks = params.sequences.most_chunks, heads = params.heads, query_heads = heads * params.group;
  Arena& scratch = context.scratch();
  const auto bytes = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  Prepared prepared{};
  prepared.blocks = blocks;
  prepared.q = static_cast<char*>(scratch.allocate(bytes(chunks * query_heads * blocks * kTileBytes), "gla: gated q"));
  prepared.k = static_cast<char*>(scratch.allocate(bytes(chunks * heads * blocks * kTileBytes), "gla: gated k"));
  prepared.scores = static_cast<char*>(scratch.allocate(bytes(chunks * query_heads * kTileBytes), "gla: scores"));
  prepared.decay = static_cast<float*>(scratch.allocate(bytes(chunks * heads * blocks * 64 * 4), "gla: chunk decays"));
  Segments segments = plan_segments(params, context.architecture().multiprocessors, blocks);
  if (segments.count > 1) {
    const std::int64_t elements = segments.count * params.sequences.count * heads * params.key_dim * params.value_dim;
    const std::int64_t decays = segments.count * params.sequences.count * heads * blocks * 64;
    segments.decays = static_cast<float*>(scratch.allocate(bytes(decays * 4), "gla: segment decays"));
    segments.starts = static_cast<float*>(scratch.allocate(bytes(elements * 4), "gla: segment states"));
  }
  if (context.planning()) return;
  auto* stream = static_cast<cudaStream_t>(context.stream());
  const auto shared_memory = static_cast<int>(context.architecture().shared_memory);
  hopper ? run<TensorCore90>(stream, params, prepared, segments, shared_memory)
         : run<TensorCore80>(stream, params, prepared, segments, shared_memory);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

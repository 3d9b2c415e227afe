// Preparation, segments, recurrence: workspace, plan, launches, and the forward made of them.
#include <algorithm>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/recurrence.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

template <class Core>
void launch_forward_prepare(Context& context, const Params& p, const Prepared& prepared) {
  const std::int64_t blocks = p.sequences.most_chunks * p.heads * p.group;
  if (blocks == 0) return;
  // Key tiles at once where there are few blocks. Where a multiprocessor has several, those of one tile after the other
  // are faster: they do not wait for one another.
  const Architecture& device = context.architecture();
  const std::int64_t fit = device.shared_memory / kPrepareBytes,
                     room = kPrepareGroups * device.multiprocessors / blocks;
  const int groups =
      static_cast<int>(std::min<std::int64_t>({prepared.blocks, kPrepareGroups, fit, std::max<std::int64_t>(room, 1)}));
  flashgla::cuda::launch("gated_linear_attention forward prepare", forward_prepare_kernel<Core>,
                         dim3(static_cast<unsigned>(blocks)), groups * kGroupThreads, groups * kPrepareBytes,
                         static_cast<cudaStream_t>(context.stream()), flashgla::cuda::Begin::after_previous, p,
                         prepared);
}
template void launch_forward_prepare<TensorCore80>(Context&, const Params&, const Prepared&);
template void launch_forward_prepare<TensorCore90>(Context&, const Params&, const Prepared&);

Prepared kept_prepared(const Params& p) {
  const std::int64_t chunks = p.sequences.most_chunks, query_heads = p.heads * p.group;
  Prepared kept;
  kept.blocks = tiles_of(p.key_dim);
  kept.scale = p.scale;
  kept.q = static_cast<char*>(p.states) + p.states_bytes();
  kept.k = kept.q + chunks * query_heads * kept.blocks * kTileBytes;
  kept.transposed_scores = kept.k + chunks * p.heads * kept.blocks * kTileBytes;
  kept.decay = reinterpret_cast<float*>(kept.transposed_scores + chunks * query_heads * kTileBytes);
  return kept;
}
std::int64_t kept_prepared_bytes(const Params& p) {
  if (!p.keeps_prepared()) return 0;
  const std::int64_t heads = p.heads, query_heads = heads * p.group, blocks = tiles_of(p.key_dim);
  return p.sequences.most_chunks *
         (((query_heads + heads) * blocks + query_heads) * kTileBytes + heads * blocks * kTile * 4);
}

namespace {

constexpr int kMostBlocks = 4;  // key blocks whose state fits the registers

template <class Core, int KB, int groups, bool outputs, bool grouped>
void launch_blocks(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments) {
  using Plan = RecurrencePlan<Core, KB, groups, outputs, grouped>;
  const std::int64_t slices = (p.value_dim + 64 * groups - 1) / (64 * groups);
  const std::int64_t heads = outputs && !run.backwards ? p.heads * p.group : p.heads;
  const std::int64_t blocks = p.sequences.count * heads * segments.count * slices;
  flashgla::cuda::launch("gated_linear_attention recurrence", recurrence_kernel<Core, KB, groups, outputs, grouped>,
                         dim3(static_cast<unsigned>(blocks)), Plan::threads, Plan::bytes, stream, kNext<Core>, p, run,
                         segments);
}
template <class Core, int KB, bool outputs>
void launch_blocks(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments,
                   int shared_memory) {
  const bool two_groups = p.value_dim > 64 && RecurrencePlan<Core, KB, 2, true, false>::bytes <= shared_memory;
  if (run.backwards && p.group > 1) {
    launch_blocks<Core, KB, 1, outputs, true>(stream, p, run, segments);
  } else if (two_groups) {
    launch_blocks<Core, KB, 2, outputs, false>(stream, p, run, segments);
  } else {
    launch_blocks<Core, KB, 1, outputs, false>(stream, p, run, segments);
  }
}
template <class Core, int KB>
void launch_blocks(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments, bool outputs,
                   int shared_memory) {
  outputs ? launch_blocks<Core, KB, true>(stream, p, run, segments, shared_memory)
          : launch_blocks<Core, KB, false>(stream, p, run, segments, shared_memory);
}

// All key blocks, in as many launches as it takes.
template <class Core>
void launch_all_blocks(cudaStream_t stream, const Params& p, const TwoPasses& passes, Recurrence run,
                       const Segments& segments, bool outputs) {
  const int blocks = passes.prepared.blocks;
  for (int first = 0; first < blocks; first += passes.blocks_each) {
    run.first_block = first;
    run.adds_parts = first > 0;
    run.ends_parts = first + passes.blocks_each >= blocks;
    switch (std::min(passes.blocks_each, blocks - first)) {
      case 1:
        launch_blocks<Core, 1>(stream, p, run, segments, outputs, passes.shared_memory);
        break;
      case 2:
        launch_blocks<Core, 2>(stream, p, run, segments, outputs, passes.shared_memory);
        break;
      case 3:
        launch_blocks<Core, 3>(stream, p, run, segments, outputs, passes.shared_memory);
        break;
      default:
        launch_blocks<Core, 4>(stream, p, run, segments, outputs, passes.shared_memory);
    }
  }
}

// Time is cut as far as it takes to fill the card, where a cut pays: the first pass costs about half of the second.
Segments plan_segments(const Params& p, int multiprocessors, std::int64_t heads, int blocks) {
  const std::int64_t longest = (p.sequences.length + kChunk - 1) / kChunk;
  const std::int64_t slices = p.value_dim > 64 ? (p.value_dim + 127) / 128 : 1;
  const std::int64_t busy = p.sequences.count * heads * slices;
  const std::int64_t slots =
      std::int64_t{multiprocessors} * recurrence_blocks(static_cast<int>(blocks), p.value_dim > 64 ? 2 : 1);
  Segments segments;
  const std::int64_t most = std::min(slots / busy, longest / 2);
  if (most < 2) return segments;
  segments.chunks = static_cast<int>((longest + most - 1) / most);
  segments.count = static_cast<int>((longest + segments.chunks - 1) / segments.chunks);
  return segments;
}

}  // namespace

TwoPasses::TwoPasses(Context& context, const Params& p, bool backwards)
    : is_prepared(false), parts(nullptr), shared_memory(static_cast<int>(context.architecture().shared_memory)) {
  const auto take = [&](std::int64_t bytes, const char* label) {
    return static_cast<char*>(context.scratch().allocate(static_cast<std::size_t>(bytes), label));
  };
  const std::int64_t chunks = p.sequences.most_chunks, heads = p.heads, query_heads = heads * p.group;
  const std::int64_t blocks = tiles_of(p.key_dim);
  if (p.states != nullptr && p.keeps_prepared()) {
    prepared = kept_prepared(p);
    is_prepared = backwards;
  } else {
    prepared.blocks = static_cast<int>(blocks);
    prepared.scale = p.scale;
    prepared.q = take(chunks * query_heads * blocks * kTileBytes, "gla: gated q");
    prepared.k = take(chunks * heads * blocks * kTileBytes, "gla: gated k");
    prepared.decay = reinterpret_cast<float*>(take(chunks * heads * blocks * 64 * 4, "gla: chunk decays"));
    if (backwards) prepared.transposed_scores = take(chunks * query_heads * kTileBytes, "gla: scores");
  }
  if (!backwards) prepared.scores = take(chunks * query_heads * kTileBytes, "gla: scores");

  static_assert(RecurrencePlan<TensorCore80, kMostBlocks, 1, true, false>::bytes <=
                99 * 1024);  // of capability 8.6 and 8.9
  const std::int64_t launches = (blocks + kMostBlocks - 1) / kMostBlocks, out_heads = backwards ? heads : query_heads;
  blocks_each = static_cast<int>((blocks + launches - 1) / launches);
  if (launches > 1) {
    const std::int64_t tiles = chunks * out_heads * tiles_of(p.value_dim);
    parts = reinterpret_cast<float*>(take(tiles * kTile * kTile * 4, "gla: parts of outputs"));
  }
  segments = plan_segments(p, context.architecture().multiprocessors, out_heads, blocks_each);
  if (segments.count > 1) {
    const std::int64_t states = segments.count * p.sequences.count * heads;
    segments.decays = reinterpret_cast<float*>(take(states * blocks * 64 * 4, "gla: segment decays"));
    segments.starts = reinterpret_cast<float*>(
        take(states * blocks * tiles_of(p.value_dim) * (kTile * kTile * 4), "gla: segment states"));
  }
}

template <class Core>
void launch_recurrence(cudaStream_t stream, const Params& p, const TwoPasses& passes, Recurrence run, bool outputs) {
  run.blocks = passes.prepared.blocks;
  run.parts = passes.parts;
  Segments segments = passes.segments;
  if (segments.count > 1) {
    segments.first_pass = true;
    launch_all_blocks<Core>(stream, p, passes, run, segments, false);
    segments.first_pass = false;
    const dim3 grid(static_cast<unsigned>(tiles_of(p.value_dim) * run.blocks * kCombineBlocks),
                    static_cast<unsigned>(p.sequences.count * p.heads));
    flashgla::cuda::launch("gated_linear_attention segments", combine_kernel, grid, kCombineThreads, 0, stream,
                           kNext<Core>, p, run.start, run.blocks, segments);
  }
  launch_all_blocks<Core>(stream, p, passes, run, segments, outputs);
}
template void launch_recurrence<TensorCore80>(cudaStream_t, const Params&, const TwoPasses&, Recurrence, bool);
template void launch_recurrence<TensorCore90>(cudaStream_t, const Params&, const TwoPasses&, Recurrence, bool);

namespace {

template <class Core>
void run_forward(Context& context, const Params& p, const TwoPasses& passes) {
  const Prepared& prepared = passes.prepared;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  launch_forward_prepare<Core>(context, p, prepared);
  launch_recurrence<Core>(stream, p, passes,
                          {.read = prepared.q,
                           .write = prepared.k,
                           .scores = prepared.scores,
                           .decay = prepared.decay,
                           .x = p.v,
                           .out = p.o,
                           .start = static_cast<const float*>(p.h0),
                           .end = static_cast<float*>(p.ht),
                           .states = static_cast<char*>(p.states)},
                          true);
}

}  // namespace

void forward_in_two_passes(Context& context, const Params& params, bool hopper) {
  const ArenaScope scope(context.scratch());
  const TwoPasses passes(context, params, false);
  if (context.planning()) return;
  hopper ? run_forward<TensorCore90>(context, params, passes) : run_forward<TensorCore80>(context, params, passes);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

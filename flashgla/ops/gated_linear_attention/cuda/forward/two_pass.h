// Preparation and recurrence (prepare.cuh, recurrence.cuh), forwards and backwards: workspace, launches.
#pragma once

#include <cuda_runtime_api.h>

#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// What preparation leaves: [chunks, heads, blocks of 64 key channels] tiles, [chunks, H] tiles of P, and
// [chunks, G, 64 * blocks] floats.
struct Prepared {
  bool plain = false;  // Plan::plain: there are scores alone
  char* q = nullptr;
  char* k = nullptr;
  char* scores = nullptr;             // P: [query][key]; null: not wanted
  char* transposed_scores = nullptr;  // [key][query]; null: not wanted
  float* decay = nullptr;
  int blocks = 1;      // ceil(K / 64)
  float scale = 1.0f;  // of q~ and P
};

// What the backward wants of it, behind kept states of kind prepared or scores.
Prepared kept_prepared(const Params& params, const Plan& plan);

// q and k as TMA takes them where the plan is plain.
RowMap q_map(const Params& params);
RowMap k_map(const Params& params);

// Time cut into segments of so many chunks, which begin anew with each sequence. Each has a place among those of all.
// Where sequences are packed, whose lengths the host does not know, a sequence has as many places as it may have
// segments: one that is much longer than the others is cut as if it were alone. Where a segment ends and another of its
// sequence starts there is a join, which has a place among all joins: what is kept in memory.
struct Segments {
  int count = 1;            // of each sequence, the last may be empty; of several packed ones: at most
  int chunks = 0;           // of a segment
  float* decays = nullptr;  // [joins, G, 64 blocks]: product over the segment; null with one segment, as the others
  // [joins, G, tiles of V, blocks, 4096], as accumulators lie in threads: what the own tokens of the segment before a
  // join leave, rows key channels; the start state of the one behind it, rows value channels.
  float *ends = nullptr, *starts = nullptr;

  // Whether sequences have segments of their own number.
  constexpr bool differ(const Sequences& s) const { return count > 1 && s.packed && s.count > 1; }
  // Of sequence n, whose first chunk has this number: b chunks have b / chunks, rounded up, less 1 joins, and
  // (a + b) / chunks is no less than a / chunks and these together. In 32 bits, which count the chunks of a call.
  constexpr std::int64_t first_join(const Sequences& s, std::int64_t n, std::int64_t chunk_begin) const {
    return differ(s) ? static_cast<std::uint32_t>(chunk_begin) / static_cast<std::uint32_t>(chunks) : n * (count - 1);
  }
  constexpr std::int64_t joins(const Sequences& s) const { return first_join(s, s.count, s.most_chunks); }
  constexpr std::int64_t places(const Sequences& s) const { return joins(s) + s.count; }
};

// One run of the recurrence: its operands, and where results go.
struct Recurrence {
  bool backwards = false;
  const char* read = nullptr;    // images multiplied with the state, [chunks, heads of out, blocks]: q~ (k~)
  const char* write = nullptr;   // images that x is added to it with, [chunks, heads of x, blocks]: k~ (q~)
  const char* scores = nullptr;  // images [chunks, H]: P (P^T)
  const float* decay = nullptr;  // [chunks, G, 64 blocks]
  // Where preparation is plain, instead of images and decays; and factors of what the walk makes of out, of start
  // before the walk, and of its state where that becomes end.
  RowMap read_rows{}, write_rows{};
  float out_scale = 1.0f, start_scale = 1.0f, end_scale = 1.0f;
  int blocks = 1;                // of 64 key channels
  int first_block = 0;           // of those that a launch has the state of
  Strided x, out;                // v and o (do and dv); out without data: not wanted
  const float* start = nullptr;  // f32 [N,G,K,V], null: zeros. h0 (dht)
  float* end = nullptr;          // the same, null: not wanted. ht (dh0)
  char* states = nullptr;        // as Params.states, null: not wanted. The state before a chunk as the walk goes
  // Key blocks in several launches: their parts of out, f32, as accumulators lie in threads; [chunks, heads of out,
  // slices of 64, 4096].
  float* parts = nullptr;
  bool adds_parts = false, ends_parts = true;  // there are parts before; this launch is the last
};

// Workspace of a call. Takes the workspace from context.scratch(): a scope around it ends its life.
struct TwoPasses {
  Prepared prepared;
  bool is_prepared;  // by the forward, beside the states it kept
  Segments segments;
  int blocks_each;    // key blocks of a launch of the recurrence
  float* parts;       // null where one launch does
  int shared_memory;  // of a block of the device

  TwoPasses(Context& context, const Params& params, const Plan& plan, bool backwards);
};

template <class Core>
void launch_forward_prepare(Context& context, const Params& params, const Prepared& prepared);

// A run of the recurrence with what preparation left as its operands; x, out, start, end and states are not set.
Recurrence run_of(const Params& params, const TwoPasses& passes, bool backwards);

// Where there are several segments: their start states. run.blocks is set.
template <class Core>
void launch_segments(cudaStream_t stream, const Params& params, const Recurrence& run, const Segments& segments);

// run.blocks, first_block and parts are filled in here. Without outputs only states are made.
template <class Core, bool plain>
void launch_walk(cudaStream_t stream, const Params& params, const TwoPasses& passes, Recurrence run, bool outputs);
template <class Core>
void launch_recurrence(cudaStream_t stream, const Params& params, const TwoPasses& passes, const Recurrence& run,
                       bool outputs) {
  passes.prepared.plain ? launch_walk<TensorCore90, true>(stream, params, passes, run, outputs)
                        : launch_walk<Core, false>(stream, params, passes, run, outputs);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

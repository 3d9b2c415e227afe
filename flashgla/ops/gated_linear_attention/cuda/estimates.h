// How long the forms of a forward and a backward take, as far as choosing among them and cutting time want to know:
// from sizes alone, by constants fitted to an H200 (forward/README.md, "Which form"). Of packed sequences the longest
// decides; where the host does not know it, all tokens are taken to be one sequence's.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda {

enum class ForwardForm : std::uint8_t;  // plan.h

constexpr int kMostBlocks = 4;  // key blocks whose state fits the registers of a launch of the recurrence

// Launches of the recurrence for so many key blocks, and the blocks of each but perhaps the last.
constexpr int recurrence_launches(int blocks) { return (blocks + kMostBlocks - 1) / kMostBlocks; }
constexpr int blocks_of_launch(int blocks) {
  return (blocks + recurrence_launches(blocks) - 1) / recurrence_launches(blocks);
}

// How many blocks of the recurrence a multiprocessor has, by their registers. KB: key blocks; groups of 64 value
// channels.
constexpr int recurrence_blocks(int KB, int groups) { return KB >= 3 || groups == 2 ? 1 : 2; }

// Segments of time of each sequence.
struct TimeCut {
  int segments = 1;
  int chunks = 0;  // of a segment; 0: uncut
};

// Which recurrence: the forward's, whose output has all query heads, or the backward's, of key-value heads.
enum class Direction : std::uint8_t { forward, backward };

// Whether of several packed sequences the longest is not known; what they may be then, told by the longest: all as long
// as each other, one with all tokens but one of each other's.
bool longest_is_unknown(const Params& params);
Params with_all_alike(const Params& params);
Params with_one_long(const Params& params);

// The fastest. Where the longest sequence is not known, the one that is fewest times slower than the fastest for
// lengths of either kind.
TimeCut cut_time(const Params& params, Direction direction, int multiprocessors);

// Of a forward that keeps no states; for one that does the same form is taken to be the fastest.
double one_pass_microseconds(const Params& params, int multiprocessors);
double wide_pass_microseconds(const Params& params, int multiprocessors);
double two_passes_microseconds(const Params& params, int multiprocessors);

// The fastest forward. Whether one pass, narrow or wide, can take the call is the caller's to know; two passes can.
ForwardForm fastest_form(const Params& params, bool one_pass_fits, bool wide_pass_fits, int multiprocessors);

// Of the backward of heads up to 64 x 64 with a query head each, states kept: in one kernel, which has a block for each
// sequence and head, and by chunks.
double one_kernel_backward_microseconds(const Params& params, int multiprocessors);
double backward_by_chunks_microseconds(const Params& params, int multiprocessors);
bool one_kernel_is_faster(const Params& params, int multiprocessors);

// Of packed sequences, how many chunks the longest may have so that one pass (one kernel), which is faster where all
// are alike, is no slower than two passes (chunks) whose time is cut so. All chunks of the call: it never is by much.
std::int64_t most_chunks_of_form(const Params& params, ForwardForm form, const TimeCut& cut, int multiprocessors);
std::int64_t most_chunks_of_one_kernel(const Params& params, const TimeCut& cut, int multiprocessors);

// The same of two passes whose time is not cut, where that is the fastest if all sequences are alike, by more than
// launches that find no tokens take: else all chunks of the call.
std::int64_t most_chunks_uncut(const Params& params, Direction direction, const TimeCut& cut, int multiprocessors);

}  // namespace flashgla::ops::gated_linear_attention::cuda

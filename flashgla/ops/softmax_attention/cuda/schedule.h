// The host's side of schedule.cuh.
#pragma once

#include "flashgla/ops/softmax_attention/cuda/schedule.cuh"

namespace flashgla::ops::softmax_attention::cuda {

// The table of a packed call's tiles of so many tokens, from context.scratch(), and queues what fills it unless the
// context is planning; null without cu_seqlens.
const PackedTile* packed_tiles(Context& context, const Inputs& in, int rows);

// rows: tokens of a tile. bytes: that the tiles of one head read beside their own, again and again.
Schedule schedule_of(const Call& call, const PackedTile* packed, int rows, int heads, double bytes, bool last_first);

// Blocks that stay.
dim3 blocks_of(const Context& context, const Schedule& schedule);

}  // namespace flashgla::ops::softmax_attention::cuda

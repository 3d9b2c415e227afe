// Launchers of the recurrence in f32 tiles.
#include "flashgla/base/cuda/device.h"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kManyKeys = 256;  // above it the slices of values are narrow, as the state fills shared memory

int shared_bytes(int keys) {
  const int tiles = (keys + 63) / 64;
  return keys > kManyKeys ? WidePlan<32>::bytes(tiles) : WidePlan<64>::bytes(tiles);
}

template <bool kSplit, int kValues, bool kGatesOverValues>
void launch(void* stream, const Params& p, const WidePass& pass) {
  const int bytes = shared_bytes(pass.keys);
  auto* kernel = f32_tiles_kernel<kSplit, kValues, kGatesOverValues>;
  flashgla::cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                        "f32_tiles_kernel's shared memory");
  const std::int64_t slices = (pass.values + kValues - 1) / kValues;
  const std::int64_t blocks = p.sequences.count * p.heads * p.group * slices;
  kernel<<<static_cast<unsigned>(blocks), kWideThreads, bytes, static_cast<cudaStream_t>(stream)>>>(p, pass);
  flashgla::cuda::check_launch("f32_tiles_kernel");
}

template <bool kSplit, bool kGatesOverValues>
void launch(void* stream, const Params& p, const WidePass& pass) {
  pass.keys > kManyKeys ? launch<kSplit, 32, kGatesOverValues>(stream, p, pass)
                        : launch<kSplit, 64, kGatesOverValues>(stream, p, pass);
}

}  // namespace

bool f32_tiles_fit(int keys, std::int64_t shared_memory) { return shared_bytes(keys) <= shared_memory; }

void launch_f32_tiles(void* stream, const Params& p, bool split) {
  WidePass pass;
  pass.query = {.view = p.q, .dtype = p.dtype, .width = p.key_dim};
  pass.key = {.view = p.k, .dtype = p.dtype, .width = p.key_dim, .heads_each = p.group};
  pass.value = {.view = p.v, .dtype = p.dtype, .width = p.value_dim, .heads_each = p.group};
  pass.gate = {.view = p.g,
               .dtype = p.gate_dtype,
               .width = p.key_dim,
               .heads_each = p.group,
               .channel_step = p.gate == GateKind::key};
  pass.keys = p.key_dim;
  pass.values = p.value_dim;
  pass.start = static_cast<const float*>(p.h0);
  pass.out = p.o;
  pass.out_scale = p.scale;
  pass.states = static_cast<__nv_bfloat16*>(p.states);
  pass.group_end = static_cast<float*>(p.ht);
  split ? launch<true, false>(stream, p, pass) : launch<false, false>(stream, p, pass);
}

void launch_f32_tiles(void* stream, const Params& p, const RecurrentPass& recurrent) {
  const std::int64_t heads = p.heads * p.group, token = heads * recurrent.rows;
  const bool over_values = recurrent.row_gate.view.data != nullptr;
  WidePass pass;
  pass.query = recurrent.z;
  pass.key = recurrent.y;
  pass.value = recurrent.x;
  pass.gate = over_values ? recurrent.row_gate : recurrent.column_gate;
  pass.keys = recurrent.columns;
  pass.values = recurrent.rows;
  pass.backwards = recurrent.backwards;
  pass.start = recurrent.start;
  pass.by_values = !recurrent.rows_are_values;
  pass.start_in_first_head = recurrent.start_in_first_head;
  pass.out = {recurrent.out, p.sequences.cu_seqlens != nullptr ? 0 : p.sequences.length * token, token, recurrent.rows};
  pass.out_f32 = true;
  pass.end = recurrent.end;
  pass.checkpoints = recurrent.checkpoints;
  over_values ? launch<true, true>(stream, p, pass) : launch<true, false>(stream, p, pass);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Launcher of the one-pass forward.
#include <cstdlib>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/fused.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

// Whether all rows may be read and written in pieces of 16 bytes, and 31 bits count them.
bool in_pieces(const Params& p) {
  const std::int64_t batches = p.sequences.cu_seqlens == nullptr ? p.sequences.count : 1, length = p.sequences.length;
  const auto pieces = [&](const Strided& s, std::int64_t heads) {
    const std::int64_t steps[][2] = {{batches, s.batch}, {length + kChunk, s.token}, {heads, s.head}};
    std::int64_t extent = 0;
    bool whole = reinterpret_cast<std::uintptr_t>(s.data) % 16 == 0;
    for (const auto& [count, step] : steps) {
      if (count == 1) continue;
      whole &= step % 8 == 0;
      extent += count * std::abs(step);
    }
    return whole && extent < std::int64_t{1} << 34;
  };
  return p.key_dim % 8 == 0 && p.value_dim % 8 == 0 && pieces(p.q, p.heads * p.group) && pieces(p.k, p.heads) &&
         pieces(p.v, p.heads) && pieces(p.o, p.heads * p.group) && (p.gate != GateKind::key || pieces(p.g, p.heads)) &&
         p.states_bytes() < std::int64_t{1} << 35;
}

template <class Core, FusedGate gate, bool kPieces>
void launch(void* stream, const Params& p) {
  constexpr int bytes = kFusedTiles * kTileBytes;
  const std::int64_t blocks = p.sequences.count * p.heads * p.group * ((p.value_dim + 63) / 64);
  flashgla::cuda::launch("gated_linear_attention forward", fused_kernel<Core, gate, kPieces>,
                         dim3(static_cast<unsigned>(blocks)), kGroupThreads, bytes, static_cast<cudaStream_t>(stream),
                         flashgla::cuda::Begin::after_previous, p);
}

template <class Core, FusedGate gate>
void launch(void* stream, const Params& p) {
  in_pieces(p) ? launch<Core, gate, true>(stream, p) : launch<Core, gate, false>(stream, p);
}

template <class Core>
void launch(void* stream, const Params& p) {
  switch (p.gate) {
    case GateKind::none:
      return launch<Core, FusedGate::none>(stream, p);
    case GateKind::constant:
      return launch<Core, FusedGate::constant>(stream, p);
    case GateKind::scalar:
      return launch<Core, FusedGate::scalar>(stream, p);
    default:
      return launch<Core, FusedGate::key>(stream, p);
  }
}

}  // namespace

void launch_fused(void* stream, const Params& p, bool hopper) {
  hopper ? launch<TensorCore90>(stream, p) : launch<TensorCore80>(stream, p);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

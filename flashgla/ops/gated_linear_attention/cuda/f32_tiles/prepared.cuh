// f32 tiles of several tiles a head, of grouped heads or with gates over values: what depends on gates once, before the
// state's pass and the outputs. For chunk and query head q~ = scale q 2^b and the scores p_ij, for the key-value head
// k^ = k 2^later and the chunk's decay, all as images of split tiles; with gates over values the same of do, v, gv:
// do~, a_ij, v^ = v 2^(later of its gates) and decays.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/exact.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <int kParts>
struct PrepareShared {  // offsets; decays and scores of steep tiles
  static constexpr int q = 0, k = kSplitBytes<kParts>, decays = 2 * k, scores = decays + kFloatTileBytes,
                       totals = scores + kFloatTileBytes, total = totals + 2 * 4 * 64 * 4;
};

// Where `wanted`, k 2^(later gates) of a chunk and 64 channels as image number `at`, and the chunk's decay. One
// barrier.
template <int kParts, class T>
__device__ __forceinline__ void put_later(const Prepared& images, std::int64_t at, bool wanted, const Loaded<T>& k,
                                          const LoadedGates<T>& gates, const Params& p, float* totals, int thread) {
  float sums[kRowsEach][8], all[8];
  gates.take(sums, p);
  sum_gates<true>(sums, all, totals, thread);
  if (!wanted) return;
  char* image = images.k + at * kSplitBytes<kParts>;
  split_loaded<kParts>(
      k, thread, [&](int i, int e) { return ptx::exp2(sums[i][e]); },
      [&](int part, std::uint32_t at, const uint4& packed) {
        *reinterpret_cast<uint4*>(image + part * kTileBytes + at) = packed;
      });
  put_decays(images.decay + at * kTile, all, thread);
}

constexpr int kGateLaterShared = 4 * kTile * 4;  // totals

// k^ and the decays alone, for forwards with gates over values, which have no do. p: the values' side. Grid: chunks x G
// x value tiles.
template <class Kernel>
__device__ __forceinline__ void gate_later(const Params& p, const Prepared& images, char* shared) {
  using T = typename Kernel::Element;
  const int tiles = tiles_of(p.key_dim), tile = static_cast<int>(blockIdx.x % tiles), channel = tile * kTile;
  const int head = static_cast<int>(blockIdx.x / tiles % p.heads);
  const std::int64_t chunk = blockIdx.x / tiles / p.heads;
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) return;
  Loaded<T> loaded;
  LoadedGates<T> gates;
  gates.load(p, c, head, channel, threadIdx.x);
  load(loaded, Place<T>(p.k, c, head, channel, p.key_dim), threadIdx.x);
  put_later<Kernel::parts>(images, (chunk * p.heads + head) * tiles + tile, true, loaded, gates, p,
                           reinterpret_cast<float*>(shared), threadIdx.x);
}

// Grid: chunks x H.
template <class Kernel>
__device__ __forceinline__ void prepare_split(const Params& p, const Prepared& images, char* shared) {
  using Core = typename Kernel::Core;
  using T = typename Kernel::Element;
  constexpr int kParts = Kernel::parts;
  using Layout = PrepareShared<kParts>;
  const int thread = threadIdx.x, heads = p.heads * p.group, key_tiles = tiles_of(p.key_dim);
  const int head = static_cast<int>(blockIdx.x % heads), kv_head = head / p.group;
  const std::int64_t chunk = blockIdx.x / heads;
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) return;
  const bool leads = head % p.group == 0;
  const std::uint32_t q = ptx::shared_address(shared) + Layout::q, k = ptx::shared_address(shared) + Layout::k;
  float *decays = reinterpret_cast<float*>(shared + Layout::decays),
        *exact = reinterpret_cast<float*>(shared + Layout::scores),
        *totals = reinterpret_cast<float*>(shared + Layout::totals);
  Accumulator scores;
  clear(scores);
#pragma unroll 1
  for (int tile = 0; tile < key_tiles; ++tile) {
    const int channel = tile * kTile;
    const std::int64_t kv_at = (chunk * p.heads + kv_head) * key_tiles + tile;
    char* q_image = images.q + ((chunk * heads + head) * key_tiles + tile) * kSplitBytes<kParts>;
    Loaded<T> loaded_q, loaded_k;
    LoadedGates<T> loaded_gates;
    loaded_gates.load(p, c, kv_head, channel, thread);
    load(loaded_q, Place<T>(p.q, c, head, channel, p.key_dim), thread);
    load(loaded_k, Place<T>(p.k, c, kv_head, channel, p.key_dim), thread);
    // Its barrier: the last products' operands have been read.
    put_later<kParts>(images, kv_at, leads, loaded_k, loaded_gates, p, totals, thread);
    float sums[kRowsEach][8], all[8];
    loaded_gates.load(p, c, kv_head, channel, thread);
    loaded_gates.take(sums, p);
    sum_gates<false>(sums, all, totals + 4 * 64, thread);
    const bool steep = is_steep(all);
    split_loaded<kParts>(
        loaded_q, thread, [&](int i, int e) { return images.scale * ptx::exp2(sums[i][e]); },
        [&](int part, std::uint32_t at, const uint4& packed) {
          store_shared_16(q + part * kTileBytes + at, packed);
          *reinterpret_cast<uint4*>(q_image + part * kTileBytes + at) = packed;
        });
    if (!steep) {
      put_loaded<kParts>(k, loaded_k, thread, [&](int i, int e) { return ptx::exp2(-sums[i][e]); });
      Core::publish();
      __syncthreads();
      Core::begin(scores);
      add_product<Core, kParts, Stored::k_inner, Stored::k_inner, false, Loads::in_turn>(scores, q, k, thread);
      Core::finish(scores);
    } else {
      put_loaded<kParts>(q, loaded_q, thread, [&](int, int) { return images.scale; });
      put_loaded<kParts>(k, loaded_k, thread);
      loaded_gates.load(p, c, kv_head, channel, thread);
      loaded_gates.take_decays(sums, p);
      put_floats(decays, sums, thread);
      __syncthreads();
      Aside aside(scores);
      exact_scores<kParts>(exact, q, k, decays);
      aside.restore(scores);
      __syncthreads();
      add_exact(scores, exact, false, thread);
    }
  }
  keep_pairs(scores, false, thread);
  __syncthreads();
  store_split_image<Core, kParts>(images.scores + (chunk * heads + head) * kSplitBytes<kParts>, q, scores, thread);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

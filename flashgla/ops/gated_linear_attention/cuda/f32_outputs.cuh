// o and dv in f32 tiles, chunk by chunk in parallel, from the states before the chunks or the gradients after them:
//     o_i = q~_i h + sum_{j<=i} (q~_i k~_j) v_j           q~ = scale q 2^b, k~ = k 2^-b
//     dv_j = k^_j dh + sum_{i>=j} (k^_j q^_i) do_i        k^ = k 2^later, q^ = scale q 2^-later
// b: sum of the chunk's gates up to the token; later: of those after it. The second is the first with time reversed.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <int kParts>
struct OutputsShared {  // offsets; gates and scores of steep tiles lie where the state and x come to afterwards
  static constexpr int own = 0, other = kSplitBytes<kParts>, state = 2 * other, x = 3 * other, gates = state,
                       scores = gates + kFloatTileBytes, totals = 4 * other, total = totals + 4 * 64 * 4;
};

// kOnce: K <= 64 and for dv one query head a kv head; accumulators then live for a shorter time. Grid: chunks x (H, or
// for dv G) x value tiles, innermost last. x: v, or do; images: of h, or dh.
template <class Kernel, bool kValueGradient, bool kOnce>
__device__ __forceinline__ void make_outputs(const Params& p, const SplitOutputs& outputs, char* shared) {
  using Core = typename Kernel::Core;
  using T = typename Kernel::Element;
  constexpr int kParts = Kernel::parts;
  using Layout = OutputsShared<kParts>;
  const int thread = threadIdx.x;
  const int key_tiles = kOnce ? 1 : tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const int value_tile = static_cast<int>(blockIdx.x % value_tiles), value = value_tile * kTile;
  const int heads = kValueGradient ? p.heads : p.heads * p.group;
  const int head = static_cast<int>(blockIdx.x / value_tiles % heads);
  const int kv_head = kValueGradient ? head : head / p.group;
  const std::int64_t chunk = blockIdx.x / value_tiles / heads;
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) return;
  const std::uint32_t base = ptx::shared_address(shared), own = base + Layout::own, other = base + Layout::other,
                      state = base + Layout::state, x = base + Layout::x;
  float *gates = reinterpret_cast<float*>(shared + Layout::gates),
        *exact = reinterpret_cast<float*>(shared + Layout::scores),
        *totals = reinterpret_cast<float*>(shared + Layout::totals);
  const char* images =
      outputs.images + (((chunk * p.heads + kv_head) * key_tiles) * value_tiles + value_tile) * kSplitBytes<kParts>;

  Accumulator out;
  clear(out);
  for (int h = 0; h < (kValueGradient && !kOnce ? p.group : 1); ++h) {
    const int query_head = kValueGradient ? kv_head * p.group + h : head;
    const bool first = h == 0;  // the state's part
    const Place<T> x_place(outputs.x, p.dtype, c, kValueGradient ? query_head : kv_head, value, p.value_dim);
    Accumulator scores;
    clear(scores);
#pragma unroll 1
    for (int tile = 0; tile < key_tiles; ++tile) {
      const int channel = tile * kTile;
      const bool last = tile + 1 == key_tiles;
      const Place<T> q(p.q, p.dtype, c, query_head, channel, p.key_dim),
          k(p.k, p.dtype, c, kv_head, channel, p.key_dim);
      const Place<T>&own_place = kValueGradient ? k : q, &other_place = kValueGradient ? q : k;
      Loaded<T> loaded_own, loaded_other, loaded_x;
      LoadedGates<T> loaded_gates;
      loaded_gates.load(p, c, kv_head, channel, thread);
      load(loaded_own, own_place, thread);
      fetch_ahead(other_place, thread);
      if (last) fetch_ahead(x_place, thread);
      if (h + tile > 0) __syncthreads();  // the last products' operands have been read
      const auto copy_state = [&] {
        if (!first) return;
        copy_split<kParts>(state, images + static_cast<std::int64_t>(tile) * value_tiles * kSplitBytes<kParts>, thread);
        ptx::copy_async_commit();
      };
      copy_state();
      float sums[kRowsEach][8], all[8];
      loaded_gates.take(sums, p);
      load(loaded_other, other_place, thread);
      sum_gates<kValueGradient>(sums, all, totals, thread);
      const bool steep = is_steep(all);
      // q brings the scale.
      const float own_scale = kValueGradient ? 1.0f : p.scale, other_scale = kValueGradient ? p.scale : 1.0f;
      if (!steep) {
        put_loaded<kParts>(own, loaded_own, thread, [&](int i, int e) { return own_scale * ptx::exp2(sums[i][e]); });
        if (last) load(loaded_x, x_place, thread);
        put_loaded<kParts>(other, loaded_other, thread,
                           [&](int i, int e) { return other_scale * ptx::exp2(-sums[i][e]); });
      } else {
        put_loaded<kParts>(own, loaded_own, thread, [&](int, int) { return own_scale; });
        put_loaded<kParts>(other, loaded_other, thread, [&](int, int) { return other_scale; });
        loaded_gates.load(p, c, kv_head, channel, thread);
        loaded_gates.take(sums, p);
        ptx::copy_async_wait<0>();
        __syncthreads();
        put_floats(gates, sums, thread);
        __syncthreads();
        Aside scores_aside(scores), out_aside(out);
        exact_scores<kParts>(exact, kValueGradient ? other : own, kValueGradient ? own : other, gates);
        __syncthreads();
        gate_rows_exactly<kParts, kValueGradient>(own, gates);
        scores_aside.restore(scores);
        out_aside.restore(out);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int row = row_of_element(thread, i), column = column_of_element(thread, i);
          const int query = kValueGradient ? column : row, key = kValueGradient ? row : column;
          if (query >= key) scores[i] += exact[float_place(query, key)];
        }
        if (last) load(loaded_x, x_place, thread);
        __syncthreads();  // the scores have been read
        copy_state();
      }
      if (last) put_loaded<kParts>(x, loaded_x, thread);
      ptx::copy_async_wait<0>();
      Core::publish();
      __syncthreads();
      constexpr Stored inner = Stored::k_inner, outer = Stored::k_outer;
      if (first && !steep) {
        Core::begin(scores, out);
        add_product<Core, kParts, inner, inner>(scores, own, other, thread);
        add_product<Core, kParts, inner, outer>(out, own, state, thread);
        Core::finish(scores, out);
      } else if (first) {
        Core::begin(out);
        add_product<Core, kParts, inner, outer>(out, own, state, thread);
        Core::finish(out);
      } else if (!steep) {
        Core::begin(scores);
        add_product<Core, kParts, inner, inner>(scores, own, other, thread);
        Core::finish(scores);
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = row_of_element(thread, i), column = column_of_element(thread, i);
      scores[i] = (kValueGradient ? column >= row : row >= column) ? scores[i] : 0.0f;
    }
    SplitOperand<kParts> operand(scores);
    add_product<Core, kParts, Stored::k_outer>(out, operand, x, thread);
  }
  store_rows(Place<T>(outputs.out, p.dtype, c, head, value, p.value_dim), out, thread);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

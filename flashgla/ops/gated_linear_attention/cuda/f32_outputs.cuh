// o and dv in f32 tiles, chunk by chunk in parallel, from the states before the chunks or the gradients after them:
//     o_i = q~_i h + sum_{j<=i} (q~_i k~_j) v_j           q~ = scale q 2^b, k~ = k 2^-b
//     dv_j = k^_j dh + sum_{i>=j} (k^_j q^_i) do_i        k^ = k 2^later, q^ = scale q 2^-later
// b: sum of the chunk's gates up to the token; later: of those after it. The second is the first with time reversed.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <int kParts>
struct OutputsShared {  // offsets; gates and scores of steep tiles lie where x comes to in the end
  static constexpr int own = 0, other = kSplitBytes<kParts>, state = 2 * other, x = 3 * other, gates = x,
                       scores = gates + kGateTileBytes, steep_end = scores + 64 * kExactRow * 4;
  static constexpr int totals = steep_end > 4 * other ? steep_end : 4 * other, total = totals + 4 * 64 * 4;
};

// Rows x columns of an accumulator to a tensor. column: its first.
__device__ __forceinline__ void store_rows(const Strided& to, DType dtype, const Chunk& c, int head, int column,
                                           int columns, const Accumulator& a, int thread) {
  const int bytes = dtype == DType::f32 ? 4 : 2, left = columns - column - 2 * (thread & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of_element(thread, 2 * half);
    if (row >= c.rows) continue;
    char* at = static_cast<char*>(to.data) +
               (c.batch * to.batch + (c.token + row) * to.token + head * to.head + column + 2 * (thread & 3)) * bytes;
    const bool in_pairs = reinterpret_cast<std::uintptr_t>(at) % (2 * bytes) == 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      store_pair(dtype, at + 8 * j * bytes, make_float2(a[4 * j + 2 * half], a[4 * j + 2 * half + 1]), left - 8 * j,
                 in_pairs);
    }
  }
}

// Grid: chunks x (H, or for dv G) x value tiles, innermost last. x: v, or do; images: of h, or dh.
template <class Kernel, bool kValueGradient>
__device__ __forceinline__ void make_outputs(const Params& p, const SplitOutputs& outputs, char* shared) {
  using Core = typename Kernel::Core;
  constexpr int kParts = Kernel::parts;
  using Layout = OutputsShared<kParts>;
  const int thread = threadIdx.x;
  const int key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
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
  for (int h = 0; h < (kValueGradient ? p.group : 1); ++h) {
    const int query_head = kValueGradient ? kv_head * p.group + h : head;
    const bool first = h == 0;  // the state's part
    const Source x_source =
        source_of(outputs.x, p.dtype, c, kValueGradient ? query_head : kv_head, value, p.value_dim);
    Accumulator scores;
    clear(scores);
#pragma unroll 1
    for (int tile = 0; tile < key_tiles; ++tile) {
      const int channel = tile * kTile;
      const Source q = source_of(p.q, p.dtype, c, query_head, channel, p.key_dim),
                   k = source_of(p.k, p.dtype, c, kv_head, channel, p.key_dim),
                   g = source_of(p.g, p.gate_dtype, c, kv_head, channel, p.key_dim);
      const bool last = tile + 1 == key_tiles;
      Loaded loaded_q, loaded_k, loaded_gates, loaded_x;
      if (p.gate == GateKind::key) load<Kernel::in_pieces>(loaded_gates, g, thread);
      load<Kernel::in_pieces>(kValueGradient ? loaded_k : loaded_q, kValueGradient ? k : q, thread);
      fetch_ahead(kValueGradient ? q : k, thread);
      if (last) fetch_ahead(x_source, thread);
      if (h + tile > 0) __syncthreads();  // the last products' operands have been read
      if (first) {
        copy_split<kParts>(state, images + static_cast<std::int64_t>(tile) * value_tiles * kSplitBytes<kParts>, thread);
        ptx::copy_async_commit();
      }
      float sums[kRowsEach][8], all[8];
      gates_of<Kernel::in_pieces>(sums, p, loaded_gates, g, c, kv_head, thread);
      load<Kernel::in_pieces>(kValueGradient ? loaded_q : loaded_k, kValueGradient ? q : k, thread);
      sum_gates<kValueGradient>(sums, all, totals, thread);
      const bool steep = is_steep(all);
      const auto toward = [&](int i, int e) { return ptx::exp2(sums[i][e]); };
      const auto away = [&](int i, int e) { return ptx::exp2(-sums[i][e]); };
      const std::uint32_t q_tile = kValueGradient ? other : own, k_tile = kValueGradient ? own : other;
      if (!steep) {
        const auto q_factor = [&](int i, int e) { return p.scale * (kValueGradient ? away(i, e) : toward(i, e)); };
        const auto k_factor = [&](int i, int e) { return kValueGradient ? toward(i, e) : away(i, e); };
        if constexpr (kValueGradient) put_loaded<Kernel>(k_tile, loaded_k, k, thread, k_factor);
        if constexpr (!kValueGradient) put_loaded<Kernel>(q_tile, loaded_q, q, thread, q_factor);
        if (last) load<Kernel::in_pieces>(loaded_x, x_source, thread);
        if constexpr (kValueGradient) put_loaded<Kernel>(q_tile, loaded_q, q, thread, q_factor);
        if constexpr (!kValueGradient) put_loaded<Kernel>(k_tile, loaded_k, k, thread, k_factor);
      } else {
        put_loaded<Kernel>(q_tile, loaded_q, q, thread, [&](int, int) { return p.scale; });
        put_loaded<Kernel>(k_tile, loaded_k, k, thread);
        if (p.gate == GateKind::key) load<Kernel::in_pieces>(loaded_gates, g, thread);
        gates_of<Kernel::in_pieces>(sums, p, loaded_gates, g, c, kv_head, thread);
        put_gates(gates, sums, thread);
        __syncthreads();
        Aside scores_aside(scores), out_aside(out);
        exact_scores<kParts>(exact, q_tile, k_tile, gates);
        __syncthreads();
        gate_rows_exactly<kParts, kValueGradient>(own, gates);
        scores_aside.restore(scores);
        out_aside.restore(out);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int row = row_of_element(thread, i), column = column_of_element(thread, i);
          const int query = kValueGradient ? column : row, key = kValueGradient ? row : column;
          if (query >= key) scores[i] += exact[query * kExactRow + key];
        }
        if (last) load<Kernel::in_pieces>(loaded_x, x_source, thread);
        __syncthreads();  // the scores have been read
      }
      if (last) put_loaded<Kernel>(x, loaded_x, x_source, thread);
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
  store_rows(outputs.out, p.dtype, c, head, value, p.value_dim, out, thread);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

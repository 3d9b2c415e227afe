// o and dv in f32 tiles of one tile a head, chunk by chunk in parallel, from the states before the chunks or the
// gradients after them:
//     o_i = q~_i h + sum_{j<=i} (q~_i k~_j) v_j           q~ = scale q 2^b, k~ = k 2^-b
//     dv_j = k^_j dh + sum_{i>=j} (k^_j q^_i) do_i        k^ = k 2^later, q^ = scale q 2^-later
// b: sum of the chunk's gates up to the token; later: of those after it. The second is the first with time reversed.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/exact.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <int kParts>
struct OutputsShared {  // offsets; decays and scores of steep tiles lie where the state and x come to afterwards
  static constexpr int own = 0, other = kSplitBytes<kParts>, state = 2 * other, x = 3 * other, decays = state,
                       scores = decays + kFloatTileBytes, totals = 4 * other, total = totals + 4 * 64 * 4;
};

// K and V up to 64, G = H. Grid: chunks x H. x: v, or do; images: of h, or dh.
template <class Kernel, bool kValueGradient>
__device__ __forceinline__ void make_outputs(const Params& p, const SplitOutputs& outputs, char* shared) {
  using Core = typename Kernel::Core;
  using T = typename Kernel::Element;
  constexpr int kParts = Kernel::parts;
  using Layout = OutputsShared<kParts>;
  const int thread = threadIdx.x, head = static_cast<int>(blockIdx.x % p.heads);
  const std::int64_t chunk = blockIdx.x / p.heads;
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) return;
  const std::uint32_t base = ptx::shared_address(shared), own = base + Layout::own, other = base + Layout::other,
                      state = base + Layout::state, x = base + Layout::x;
  float *decays = reinterpret_cast<float*>(shared + Layout::decays),
        *exact = reinterpret_cast<float*>(shared + Layout::scores),
        *totals = reinterpret_cast<float*>(shared + Layout::totals);
  const auto copy_state = [&] {
    copy_split<kParts>(state, outputs.images + (chunk * p.heads + head) * kSplitBytes<kParts>, thread);
    ptx::copy_async_commit();
  };

  const Place<T> own_place(kValueGradient ? p.k : p.q, c, head, 0, p.key_dim),
      other_place(kValueGradient ? p.q : p.k, c, head, 0, p.key_dim), x_place(outputs.x, c, head, 0, p.value_dim);
  Loaded<T> loaded_own, loaded_other, loaded_x;
  LoadedGates<T> loaded_gates;
  loaded_gates.load(p, c, head, 0, thread);
  load(loaded_own, own_place, thread);
  fetch_ahead(other_place, thread);
  fetch_ahead(x_place, thread);
  copy_state();
  float sums[kRowsEach][8], all[8];
  loaded_gates.take(sums, p);
  load(loaded_other, other_place, thread);
  sum_gates<kValueGradient>(sums, all, totals, thread);
  const bool steep = is_steep(all);
  // q brings the scale.
  const float own_scale = kValueGradient ? 1.0f : p.scale, other_scale = kValueGradient ? p.scale : 1.0f;
  Accumulator out, scores;
  clear(out);
  clear(scores);
  if (!steep) {
    put_loaded<kParts>(own, loaded_own, thread, [&](int i, int e) { return own_scale * ptx::exp2(sums[i][e]); });
    load(loaded_x, x_place, thread);
    put_loaded<kParts>(other, loaded_other, thread, [&](int i, int e) { return other_scale * ptx::exp2(-sums[i][e]); });
  } else {
    put_loaded<kParts>(own, loaded_own, thread, [&](int, int) { return own_scale; });
    put_loaded<kParts>(other, loaded_other, thread, [&](int, int) { return other_scale; });
    loaded_gates.load(p, c, head, 0, thread);
    loaded_gates.take_decays(sums, p);
    ptx::copy_async_wait<0>();
    __syncthreads();
    put_floats(decays, sums, thread);
    __syncthreads();
    exact_scores<kParts>(exact, kValueGradient ? other : own, kValueGradient ? own : other, decays);
    __syncthreads();
    gate_rows_exactly<kParts, kValueGradient>(own, decays);
    add_exact(scores, exact, kValueGradient, thread);
    load(loaded_x, x_place, thread);
    __syncthreads();  // the scores have been read
    copy_state();
  }
  put_loaded<kParts>(x, loaded_x, thread);
  ptx::copy_async_wait<0>();
  Core::publish();
  __syncthreads();
  constexpr Stored inner = Stored::k_inner, outer = Stored::k_outer;
  // f16 in two parts and f32 in three have the registers.
  constexpr Loads kLoads = sizeof(T) == (kParts == 2 ? 2 : 4) ? Loads::ahead : Loads::in_turn;
  if (!steep) {
    Core::begin(scores, out);
    add_product<Core, kParts, inner, inner, false, kLoads>(scores, own, other, thread);
    add_product<Core, kParts, inner, outer, false, kLoads>(out, own, state, thread);
    Core::finish(scores, out);
  } else {
    Core::begin(out);
    add_product<Core, kParts, inner, outer, false, kLoads>(out, own, state, thread);
    Core::finish(out);
  }
  keep_pairs(scores, kValueGradient, thread);
  SplitOperand<kParts> operand(scores);
  add_product<Core, kParts, outer>(out, operand, x, thread);
  const Chunk to = again<Core>(c, [&] { return locate(p.sequences, fresh_block() / p.heads); });
  const int of = again<Core>(head, [&] { return static_cast<int>(fresh_block() % p.heads); });
  store_rows(Place<T>(outputs.out, to, of, 0, p.value_dim), out, thread_again<Core>(thread));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

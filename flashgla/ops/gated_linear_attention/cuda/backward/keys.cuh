// dq, dk and dg of two chunks, for one tile of 64 key channels, pair by pair in parallel. Design, bytes and FLOPs:
// backward/README.md.
//
// Chunks go in pairs, an early one and a late one: h is the state before the pair, dh the gradient of the state after
// it, and what passes between the two is a product of its own, so that states move once for 128 tokens. For each chunk
// b is the running sum of its gates, B the whole sum, q~ = scale q 2^b, k~ = k 2^(B - b) (forward/prepare.cuh), a_ij =
// do_i . v_j where i sees j, else 0; a prime marks the other chunk of the pair:
//     from beyond the chunk   x_i = h do_i (early)               x_i = 2^B' h do_i + sum_j' a_ij' k~'_j' (late)
//                             y_j = 2^B' dh v_j + sum_i' a_i'j q~'_i' (early)                y_j = dh v_j (late)
//     dq_i = scale 2^(b_i - B) (2^B x_i + sum_j a_ij k~_j)       dk_j = 2^-b_j (2^B y_j + sum_i a_ij q~_i)
//     dg_t = sum_{i>=t} (q_i dq_i - k_i dk_i) + r
//     r = sum_V 2^(B + B') h dh + sum_j k~_j y_j + 2^B sum_i' q~'_i' (h do_i') (early), 2^B sum_j' k~'_j' (dh v_j')
//     (late)
// r is what dg has from beyond the chunk: no sum runs over the whole sequence. q_i dq_i and k_i dk_i are taken as 2^-B
// times q~ and k~ with what stands in brackets: both hold the same rounded products, so that what must cancel does so
// to f32 accuracy. Tiles of channels that fall by more than kSteep go by blocks (tiles/ladder.cuh).
//
// Of a block's two groups of 128 threads one has the early chunk, one the late. They mirror each other in time: what q,
// do, h and dq are to the late one, k, v, dh and dk are to the early one, so that both run one code, and each holds
// what crosses between the chunks with its own tokens as rows. h do and dh v of either are also what the other's r
// wants. Where there is TMA, blocks stay: they walk over pairs, and tiles of values run ahead of the products
// by a few stages, through the epilogue into the next pair.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/keys_gradients.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// The products over tiles of values, one after the other, from the stage on whose turn it is.
template <class View>
__device__ __forceinline__ void multiply_values(const View& view, unsigned unit, bool first, Turn& turn,
                                                Accumulator& across, Accumulator& within, Accumulator& pairs,
                                                Accumulator& between, float& through) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const PairPlace& at = view.place_of(unit);
  // Late: do times v', h and v, which lie side by side; v times dh. Early: v times do', dh and do; do times h.
  if constexpr (!View::kBulk) view.load_values(at, 0);
  Core::begin(across, within, pairs, between);
#pragma unroll 1
  for (int tile = 0; tile * kTile < view.p.value_dim; ++tile) {
    if constexpr (View::kBulk) {
      Core::wait_at(view.base + Layout::full + 8 * turn.slot, turn.parity);
    } else {
      ptx::copy_async_wait<0>();
      View::meet();
      if ((tile + 1) * kTile < view.p.value_dim) view.load_values(view.place_of(unit), tile + 1);
    }
    const int at_stage = (View::kBulk ? turn.slot : tile % Layout::stages) * Layout::stage;
    const std::uint32_t stage = view.base + at_stage;
    Core::begin();
    Core::products_side_by_side(stage + (view.late ? Layout::d_o_late : Layout::v_early),
                                stage + (view.late ? Layout::v_early : Layout::d_o_late), fresh_thread(), between,
                                across, pairs);
    Core::template product<View::k_inner, View::k_inner>(within,
                                                         stage + (view.late ? Layout::v_late : Layout::d_o_early),
                                                         stage + (view.late ? Layout::dh : Layout::h), fresh_thread());
    Core::commit();
    if (View::kGated && !view.late && first) {
      through += dot_of_rows(view.shared + at_stage + Layout::h, view.shared + at_stage + Layout::dh, fresh_thread());
    }
    if (View::kBulk && View::kTileOfGates && (first || View::kGate == GatesAs::f32) &&
        (tile + 1) * kTile >= view.p.value_dim) {
      ptx::copy_async_wait<0>();
      view.turn_gates(at);
    }
    Core::template wait<0>(across, within, pairs, between);
    if constexpr (View::kBulk) {
      Core::arrive(view.base + Layout::empty + 8 * turn.slot);  // at once: copies are what the products wait for
      turn.step(view.depth());
    }
  }
}

// Tokens beyond the chunks' may be another sequence's. Where products go on right into across and within, these are not
// changed in a branch, nor after it: the compiler would make every wgmma wait.
template <class View>
__device__ __forceinline__ void clear_beyond(const View& view, const PairPlace& at, int rows, Accumulator& across,
                                             Accumulator& within, Accumulator& pairs, Accumulator& between,
                                             int thread) {
  const bool late = view.late;
  const auto clear_rows_beyond = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const bool inside = row_of_element(thread, i) < rows;
      across[i] = inside ? across[i] : 0.0f;
      within[i] = inside ? within[i] : 0.0f;
    }
  };
  if constexpr (!View::kGated) clear_rows_beyond();
  if (View::alike(at.rows_late < kTile)) {
    if constexpr (View::kGated) clear_rows_beyond();
    const int columns_of_pairs = late ? kTile : at.rows_early, columns_between = late ? kTile : at.rows_late;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int of_column = column_of_element(thread, i);
      const bool inside = row_of_element(thread, i) < rows;
      pairs[i] = inside && of_column < columns_of_pairs ? pairs[i] : 0.0f;
      between[i] = inside && of_column < columns_between ? between[i] : 0.0f;
    }
  }
}

// Grid: blocks that walk over pairs x G x key tiles, innermost last, so that what neighbours share is in the cache.
// `items` of them. kGrouped: several query heads a key-value head.
template <class Core, GatesAs kGate, bool kGrouped>
__device__ __forceinline__ void make_dq_dk_dg(const Params& p, const BackwardWorkspace& w, const Gradients& d,
                                              const RowMaps& maps, unsigned items, char* shared) {
  using Layout = PairShared<Core>;
  constexpr bool kBulk = Layout::in_bulk, kGated = kGate != GatesAs::none;
  // The way of steep tiles lies behind the loop, and goes back to its end, since code that is jumped over is waited for
  // where it is in no cache. Not with several query heads, for which registers are too few.
  constexpr bool kApart = kBulk && kGated && !kGrouped;
  using View = PairView<Core, kGate>;
  const View view{p, w, d, maps, items, shared, ptx::shared_address(shared), own_group() == 1};
  const std::uint32_t base = view.base;
  const bool late = view.late;
  const std::uint32_t inputs_full = base + Layout::inputs_full, places_full = base + Layout::places_full;
  view.clear_missing_gates();
  if constexpr (kBulk) {
    if (threadIdx.x == 0) view.init_barriers();
    __syncthreads();
    if (threadIdx.x >= kPairThreads) {
      Core::template give<Layout::producer_registers>();
      return view.produce();
    }
    Core::template take<Layout::consumer_registers>();
    flashgla::cuda::wait_for_previous();
  } else {
    if (threadIdx.x == 0) view.place_of(0) = view.find_first();
    __syncthreads();
  }

  // The gradient that has pairs across the chunks too, dq of the late one and dk of the early one, and the one with
  // those within the chunk alone. The late group holds pairs as [query][key], the early one as [key][query].
  Accumulator across, within, pairs, between;
  float through;  // early: sum over values of h dh, half of key channel thread / 2
  Turn turn;
  Aside<float, 32> dk_so_far, dg_so_far;  // of the query heads done
  std::uint32_t crossed[16];
  Accumulator b;
  float2 rows_of_e = make_float2(0.0f, 0.0f);
  Local<float, 32> steep_e;
  const auto step = [&](unsigned& unit) {  // whether there is more
    const PairPlace& at = view.place_of(unit);
    unit = at.unit + 1;  // no register through the epilogue
    if constexpr (!kBulk) {
      if (unit == static_cast<unsigned>(p.group)) return false;  // a block has one pair
      __syncthreads();
      if (threadIdx.x == 0) find_next(view.place_of(unit), at, p, items);
      __syncthreads();
    }
    return true;
  };
  unsigned unit = 0;
  bool done_steeply = false;
#pragma unroll 1
  for (;;) {
    if constexpr (kApart) unit = __shfl_sync(0xffffffffu, unit, 0);  // or the compiler makes one loop of the two
#pragma unroll 1
    for (;;) {
      if (!kApart || !View::alike(done_steeply)) {
        const PairPlace& at = view.place_of(unit);
        if constexpr (kBulk) {
          Core::wait_at(places_full + 8 * (unit % Layout::kept_places), (unit / Layout::kept_places) & 1);
        }
        if (View::alike(at.rows_early == 0)) return;
        const bool first = !kGrouped || View::alike(at.in_group == 0);
        clear(across);
        clear(within);
        clear(pairs);
        clear(between);
        through = 0.0f;
        // They stay for the other query heads; those of f32 lie where a is put.
        if constexpr (kBulk && kGate == GatesAs::f32) {
          sync_fresh_group();  // what was there has been read
          view.load_gates(at);
        } else if (kBulk && first) {
          view.load_gates(at);
        }

        multiply_values(view, unit, first, turn, across, within, pairs, between, through);

        // The pairs inside the chunk, and between the two.
        const int thread = fresh_thread(), lane = thread & 31, rows = late ? at.rows_late : at.rows_early;
        if constexpr (kBulk) {
          Core::wait_at(inputs_full, unit & 1);
        } else {
          View::meet();
          view.load_gates(at);
          view.load_inputs(at);
          ptx::copy_async_commit();
          ptx::copy_async_wait<0>();
          view.turn_gates(at);
          View::meet();
        }
        clear_beyond(view, at, rows, across, within, pairs, between, thread);
#pragma unroll
        for (int i = 0; i < 32 && kGrouped; ++i) {  // dh v counts once
          across[i] = first || late ? across[i] : 0.0f;
          within[i] = first || !late ? within[i] : 0.0f;
        }
        const float* decays = view.floats(Layout::decays) + view.part() * kTile;
        const bool steep =  // alike in all warps of the group
            kGated && __any_sync(0xffffffffu, rows > 0 && fminf(decays[lane], decays[lane + 32]) < ptx::exp2(-kSteep));
        const PairEnd<View, kGrouped> pair(view, unit);
        pair.begin(steep, across, within, pairs, between, through, crossed, b);
        done_steeply = steep;
        if constexpr (kApart) {
          if (steep) break;
          pair.finish_near(across, within, b, crossed);
          if constexpr (kGated) {
            Accumulator e;
            clear(e);
            pair.add_near(e, across, within);
            pair.put_e(e, rows_of_e);
          }
        } else {
          steep ? pair.finish_steep(across, within, b, crossed, steep_e) : pair.finish_near(across, within, b, crossed);
          pair.join_heads(steep, across, within, steep_e, rows_of_e, dk_so_far, dg_so_far);
          pair.leave(steep, across, within, b, rows_of_e);
        }
      }
      if constexpr (kApart) {
        PairEnd<View, kGrouped>(view, unit).leave(View::alike(done_steeply), across, within, b, rows_of_e);
        done_steeply = false;
      }
      if (!step(unit)) return;
    }
    if constexpr (kApart) {
      const PairEnd<View, kGrouped> pair(view, unit);
      Held<float, 32> e;
      pair.finish_steep(across, within, b, crossed, e);
      pair.put_e(e.x, rows_of_e);
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

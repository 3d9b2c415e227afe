// Second pass after prepare.cuh: the recurrence over chunks, free of gates, with the state of one (sequence, head,
// segment of time) and 64 value channels for each group of 128 threads in registers; two groups share images. Forwards
//     o = q~ h + P v,        h' = 2^sum h + k~^T v,
// and backwards in time, dh the gradient of the state after a chunk, the same with other names:
//     dv = k~ dh + P^T do,   dh' = 2^sum dh + q~^T do.
// Where time is cut it runs from start states that segments.cuh has found. The state is held transposed, a row a value
// channel: why, and who brings images and takes outputs away, is in README.md, "Two passes".
#pragma once

#include <algorithm>

#include "flashgla/ops/gated_linear_attention/cuda/forward/recurrence_view.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// grouped: backwards, with several query heads a key-value head. plain: q and k come from their rows (two_pass.h,
// Plan::plain), with TMA; nothing decays.
template <class Core, int KB, int groups, bool outputs, bool grouped, bool plain>
__device__ __forceinline__ void recurrence(const Params& p, const Recurrence& run, const Segments& segments,
                                           char* shared) {
  using Plan = RecurrencePlan<Core, KB, groups, outputs, grouped, plain>;
  static_assert(!plain || Plan::in_bulk);
  using View = RecurrenceView<Core, KB, groups, outputs, grouped, plain>;
  constexpr int kSlots = Plan::slots, kVSlots = Plan::v_slots;
  constexpr bool kBulk = Plan::in_bulk;
  View view{p, run, segments, ptx::shared_address(shared)};
  if (!view.start()) return;
  const std::uint32_t base = view.base;
  const int part = view.part, v0 = view.v0;
  const int K = view.K, V = view.V, begin = view.begin, end = view.end;
  const std::uint32_t full = view.full, empty = view.empty;
  if (outputs && run.adds_parts) {  // P has been there
    for (int i = threadIdx.x; i < 2 * (kTileBytes / 16); i += Plan::threads)
      store_shared_16(base + View::tile(Plan::scores) + 16 * i, make_uint4(0, 0, 0, 0));
    Core::publish();
  }
  if constexpr (kBulk) {
    if (threadIdx.x == 0) view.init_barriers();
  }
  __syncthreads();
  if constexpr (kBulk) {
    flashgla::cuda::wait_for_previous();
    if (part == groups) {
      if constexpr (Plan::gives_registers) Core::template give<Plan::producer_registers>();
      view.load_and_store();
      return;
    }
    if constexpr (Plan::gives_registers) Core::template take<Plan::consumer_registers>();
  }

  Accumulator h[KB];
  float* const given = view.state_in(const_cast<float*>(run.start));
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) {
    clear(h[kb]);
    if (view.v0_again(v0) >= V) continue;
    if (view.segment > 0) {
      add_part(h[kb], view.segment_state(kb, v0), fresh_thread());
    } else if (given != nullptr) {
      move_transposed_state<false>(h[kb], given, K, V, view.first_key + 64 * kb, v0, fresh_thread());
      if constexpr (plain) scale_rows(h[kb], run.start_scale, run.start_scale);
    }
  }

  if constexpr (!kBulk) {
#pragma unroll 1
    for (int i = 0; i < kSlots - 1; ++i) {
      view.load_step_and_x(i / KB, i % KB, i);
      ptx::copy_async_commit();
    }
  }
  int visit = 0;
  Turn turn;
  Accumulator o;
  std::uint32_t v[16];
  const auto wait_for_step = [&](int kb) {
    if constexpr (kBulk) {
      Core::wait_at(full + 8 * turn.slot, turn.parity);
    } else {
      ptx::copy_async_wait<kSlots - 2>();
      __syncthreads();  // the step is there, and the slot of the one before has been read
      view.load_step_and_x(visit + (kb + kSlots - 1) / KB, (kb + kSlots - 1) % KB,
                           (turn.slot == 0 ? kSlots : turn.slot) - 1);
      ptx::copy_async_commit();
    }
  };
  const std::uint32_t out_tile = base + View::tile(Plan::out + part);
  const bool hands_over = view.find_v0() < V && (view.stores || view.may_keep);  // to the warp that stores
  const auto wait_until_stored = [&](int c) {                                    // what the chunk before c handed over
    if constexpr (kBulk) {
      if (hands_over) Core::wait_at(empty + 8 * (kSlots + kVSlots + part), ((c - begin) & 1) ^ 1);
    }
  };
  const auto release = [&](int slot) {  // this thread has read it
    if constexpr (kBulk) Core::arrive(empty + 8 * slot);
  };
  float2 decay[8];  // of this thread's columns of the next key tile
  const auto read_decays = [&](int thread) {
    if constexpr (plain) return;
    const char* from = shared + Plan::decays + Plan::decay_bytes * turn.slot + 8 * (thread % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) decay[j] = *reinterpret_cast<const float2*>(from + 32 * j);
  };
  int last_slot = 0;
  const auto start_visit = [&](auto reads_state, int c, bool keep) {  // its last product goes on
    constexpr bool kReads = decltype(reads_state)::value;
    const int thread = fresh_thread(), x_slot = visit & 1;
    if constexpr (kBulk) Core::wait_at(full + 8 * (kSlots + x_slot), visit >> 1 & 1);
    wait_for_step(0);
    if constexpr (kReads && !grouped) read_decays(thread);
    const std::uint32_t v_tile = base + View::tile(Plan::v + x_slot * groups + part);
    load_operand<Stored::k_outer>(v, v_tile, thread);
    release(kSlots + x_slot);
    Core::begin(v);
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      const std::uint32_t q = base + View::tile(Plan::images) + turn.slot * View::tile(Plan::slot),
                          k = q + View::tile(Plan::slot - 1);
      std::uint32_t rounded[16];
      if constexpr (kReads) {
        if (outputs || keep) to_operand(rounded, h[kb]);
        if (keep) {
          put_operand<Core, true>(view.state_tile(part, kb), rounded, thread);
          if constexpr (!kBulk) {
            sync_group();
            store_tile_image(view.kept_tile(c, kb, v0), view.state_tile(part, kb), thread);
            sync_group();
          }
        }
        if constexpr (grouped) read_decays(thread);  // others ahead, in the shadow of the products
        if constexpr (!plain) scale_columns(h[kb], decay);
        if constexpr (outputs) Core::begin(rounded);
      }
      Core::begin(h[kb]);
      if constexpr (outputs) {
        if constexpr (kReads) {
          kb == 0 ? Core::template product<Stored::k_inner, true>(o, rounded, q, thread)
                  : Core::template product<Stored::k_inner>(o, rounded, q, thread);
        }
        if (kb == 0) Core::template product<Stored::k_inner>(o, v, base + View::tile(Plan::scores + x_slot), thread);
        Core::commit();
      }
      Core::template product<Stored::k_outer>(h[kb], v, k, thread);
      Core::commit();
      const int this_slot = turn.slot;
      turn.step(kSlots);
      const auto look_ahead = [&] {
        if (kb + 1 == KB) return;
        wait_for_step(kb + 1);
        if constexpr (kReads && !grouped) read_decays(thread);
      };
      if constexpr (!plain) look_ahead();
      Core::template wait<1>();           // what was rounded is free again, and the step before is done
      if constexpr (plain) look_ahead();  // before, ptxas would round h ahead, for which there are no registers
      if (kb > 0) release(last_slot);
      last_slot = this_slot;
    }
  };
  const auto finish_visit = [&] {
    Core::template wait<0>(v);
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) Core::template wait<0>(h[kb]);
    release(last_slot);
    ++visit;
  };
#pragma unroll 1
  for (int c = begin; c < end; ++c) {
    const bool keep = view.v0_again(v0) < V && view.keeps(c);
    if (keep && (c == begin + 1 || p.states_every() == 1)) wait_until_stored(c);  // two in a row are kept
    start_visit(std::true_type{}, c, keep);
#pragma unroll 1
    for (int i = 1; grouped && i < view.inner; ++i) {
      finish_visit();
      start_visit(std::false_type{}, c, false);
    }
    const int thread = fresh_thread();
    wait_until_stored(c);
    if constexpr (outputs) {
      Core::template wait<1>(o);
      if (run.adds_parts && view.find_v0() < V) add_part(o, view.part_of_out(c), thread);
      if (run.ends_parts) {
        std::uint32_t rounded[16];
        if constexpr (plain) scale_rows(o, run.out_scale, run.out_scale);
        to_operand(rounded, o);
        put_operand<Core, true>(out_tile, rounded, thread);
      } else if (view.find_v0() < V) {
        write_part(view.part_of_out(c), o, thread);
      }
    }
    if constexpr (kBulk) {
      if (keep) Core::publish();
      if (hands_over) Core::arrive(full + 8 * (kSlots + kVSlots + part));
    } else if (view.stores) {
      sync_group();
      const Rows rows = view.out_rows(c, view.v0_again(v0));
      store_tile(rows, out_tile, thread);
    }
    finish_visit();
  }
  const int thread = fresh_thread();
  if (!view.leads) return;
  const int end_v0 = view.find_v0();
  if (end_v0 >= V) return;
  // The end of the sequence: of its last segment that has chunks, or of the first if it is empty.
  const bool last = segments.count == 1 || view.segment == (max(view.chunks, 1) - 1) / segments.chunks;
  float* const wanted = last && outputs ? view.state_in(run.end) : nullptr;
  if (wanted == nullptr) return;
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) {
    if constexpr (plain) scale_rows(h[kb], run.end_scale, run.end_scale);
    move_transposed_state<true>(h[kb], wanted, K, V, view.first_key + 64 * kb, end_v0, thread);
  }
}

// grid: places of segments * (H forwards with outputs, else G) * ceil(V / (64 groups)), value slices fastest.
// Chunk-start states, outputs and ht as wanted.
template <class Core, int KB, int groups, bool outputs, bool grouped, bool plain>
__global__ void __launch_bounds__((RecurrencePlan<Core, KB, groups, outputs, grouped, plain>::threads),
                                  (RecurrencePlan<Core, KB, groups, outputs, grouped, plain>::blocks))
    recurrence_kernel(const __grid_constant__ Params p, const __grid_constant__ Recurrence run,
                      const __grid_constant__ Segments segments) {
  using Plan = RecurrencePlan<Core, KB, groups, outputs, grouped, plain>;
  if (run.end == nullptr && ends_idle(p.sequences)) return;
  if (!Plan::in_bulk || p.sequences.cu_seqlens != nullptr) flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) recurrence<Core, KB, groups, outputs, grouped, plain>(p, run, segments, shared);
}

// ---- launches ----

template <class Core, int KB, int groups, bool outputs, bool grouped, bool plain>
void launch_blocks(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments) {
  using Plan = RecurrencePlan<Core, KB, groups, outputs, grouped, plain>;
  const std::int64_t slices = (p.value_dim + 64 * groups - 1) / (64 * groups);
  const std::int64_t heads = outputs && !run.backwards ? p.heads * p.group : p.heads;
  const std::int64_t blocks = segments.places(p.sequences) * heads * slices;
  flashgla::cuda::launch(
      "gated_linear_attention recurrence", recurrence_kernel<Core, KB, groups, outputs, grouped, plain>,
      dim3(static_cast<unsigned>(blocks)), Plan::threads, Plan::bytes, stream, kNext<Core>, p, run, segments);
}
template <class Core, int KB, bool outputs, bool plain>
void launch_blocks(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments,
                   int shared_memory) {
  if (run.backwards && p.group > 1) {
    launch_blocks<Core, KB, 1, outputs, true, plain>(stream, p, run, segments);
  } else if (p.value_dim > 64 && RecurrencePlan<Core, KB, 2, true, false, plain>::bytes <= shared_memory) {
    launch_blocks<Core, KB, 2, outputs, false, plain>(stream, p, run, segments);
  } else {
    launch_blocks<Core, KB, 1, outputs, false, plain>(stream, p, run, segments);
  }
}

// All key blocks, in as many launches as it takes.
template <class Core, bool plain>
void launch_walk(cudaStream_t stream, const Params& p, const TwoPasses& passes, Recurrence run, bool outputs) {
  static_assert(RecurrencePlan<TensorCore80, kMostBlocks, 1, true, false, false>::bytes <= 99 * 1024);  // 8.6 and 8.9
  run.blocks = passes.prepared.blocks;
  run.parts = passes.parts;
  const Segments& segments = passes.segments;
  if (segments.count > 1) launch_segments<Core>(stream, p, run, segments);
  const auto launch = [&]<int KB>(std::integral_constant<int, KB>) {
    outputs ? launch_blocks<Core, KB, true, plain>(stream, p, run, segments, passes.shared_memory)
            : launch_blocks<Core, KB, false, plain>(stream, p, run, segments, passes.shared_memory);
  };
  for (; run.first_block < run.blocks; run.first_block += passes.blocks_each) {
    run.adds_parts = run.first_block > 0;
    run.ends_parts = run.first_block + passes.blocks_each >= run.blocks;
    switch (std::min(passes.blocks_each, run.blocks - run.first_block)) {
      case 1:
        launch(std::integral_constant<int, 1>());
        break;
      case 2:
        launch(std::integral_constant<int, 2>());
        break;
      case 3:
        launch(std::integral_constant<int, 3>());
        break;
      default:
        launch(std::integral_constant<int, kMostBlocks>());
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

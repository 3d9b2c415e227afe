// Forward in one pass for heads of up to 128 key channels and any value channels, on Hopper: a block walks through one
// (sequence, query head, slice of 64 or 128 value channels), with groups of 128 threads of two kinds.
//
// Two groups gate. Nothing they do depends on the state, so they run ahead of those that hold it, in turns, a step of
// one key tile each: they ask the copy engine for q, k, gates and v (tiles/row_maps.h) and make, in place of q, k and
// the gates,
//     q~ = q 2^G     k~ = k 2^-G     P^T_ji = k~_j q~_i where i >= j, else 0     and 2^B, B: G at the chunk's end
// (forward/gates.cuh; beyond one anchor's reach k~ = k 2^(B - G), the state decays before what is added to it instead
// of after, and P comes by halving, tiles/halving.cuh).
//
// The others hold the state of 64 value channels each, transposed as in forward/recurrence.cuh, and take steps in
// order:
//     o^T = scale sum over key tiles (h^T q~^T + v^T P^T)     h^T = (h^T + v^T k~) 2^B
// The scores are those of the step's key tile alone, so that the groups that gate never wait for each other.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/state.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kGatingGroups = 2;

// Where a block is in the call: the same for all threads, in shared memory, since registers are scarce.
struct WidePlaces {
  // Of the sequence's first token and the head's first channel (of o the slice's), from the tensors' beginnings.
  std::int64_t q, k, g, o;  // bytes
  std::int64_t state;       // of the key-value head, elements
  int length;               // of the sequence
  int v0;                   // the slice's first channel
  int begin, batch;         // the sequence's first token and its row of the batch
  int query_head, head;
};

struct WideMaps {
  RowMap q, k, g, v;
};

// KB: key tiles; groups: of those that hold the state. Tiles of shared memory, in this order; then bytes.
template <int KB, int groups>
struct WidePlan {
  static constexpr int slots = KB == 2 ? 6 : 4;  // of steps; each gating group has every second
  static constexpr int chunks = slots / KB;      // of which v is there
  // [slots][q~, k~, P^T], where q, k and gates were; then v [chunks][groups], o [groups], a triangle of ones.
  static constexpr int v = 3 * slots;
  static constexpr int out = v + chunks * groups;
  static constexpr int triangle = out + groups;
  static constexpr int decays = (triangle + 1) * kTileBytes;  // [slots][of the state before and after, B][64] floats
  // mbarriers [slots]: what has been asked for is there, images are there, images have been read.
  static constexpr int loaded = decays + slots * 3 * kTile * 4, filled = loaded + slots * 8,
                       emptied = filled + slots * 8, places = emptied + slots * 8,
                       bytes = places + static_cast<int>(sizeof(WidePlaces));
  static constexpr int threads = (groups + kGatingGroups) * kGroupThreads;
  // A thread's registers: what each begins with, and after the groups that gate have given some of theirs away.
  static constexpr int gating_registers = groups == 1 ? 128
                                          : KB == 1   ? 120
                                                      : 96,
                       state_registers = groups == 1 ? 232
                                         : KB == 1   ? 136
                                                     : 160;
};

// Running sums of one gate a token where an accumulator has its elements. gates: 64 floats.
__device__ __forceinline__ void sum_tokens(Accumulator& sums, std::uint32_t gates, int thread) {
  const int lane = thread % 32, row = row_of_element(thread, 0);
  const float odd = __uint_as_float(load_shared_4(gates + 8 * lane + 4));
  float high = __uint_as_float(load_shared_4(gates + 8 * lane)) + odd;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, high, distance);
    if (lane >= distance) high += before;
  }
  const float low = high - odd;
  const auto at_row = [&](int r) {
    const float x = __shfl_sync(0xffffffffu, low, r / 2), y = __shfl_sync(0xffffffffu, high, r / 2);
    return r % 2 != 0 ? y : x;
  };
  const float first = at_row(row), second = at_row(row + 8);
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i] = i & 2 ? second : first;
}

// Zeros in a tile's rows from `rows` on. By a group.
__device__ __forceinline__ void clear_rows(std::uint32_t tile, int rows) {
  for (int i = fresh_thread(); i < kTileBytes / 16; i += kGroupThreads) {
    if (i / 8 >= rows) store_shared_16(tile + 16 * i, make_uint4(0, 0, 0, 0));
  }
}

// All steps of one of the groups that gate: those of one key tile, or every second chunk where there is but one.
template <class Core, int KB, int groups>
__device__ __forceinline__ void gate_steps(const Params& p, const WideMaps& maps, char* shared) {
  using Plan = WidePlan<KB, groups>;
  constexpr int kChunkStep = kGatingGroups / KB;
  constexpr int kAhead = Plan::slots / kGatingGroups - 1;  // of the group's steps, those that are under way
  const std::uint32_t base = ptx::shared_address(shared);
  const volatile WidePlaces& at = *reinterpret_cast<const volatile WidePlaces*>(shared + Plan::places);
  const int gating = own_group() - groups;  // which of the two
  const int kb = KB == kGatingGroups ? gating : 0, first_chunk = KB == kGatingGroups ? 0 : gating;
  const int chunks = (at.length + kChunk - 1) / kChunk, channel = kb * kTile;
  const bool by_token = p.gate == GateKind::constant || p.gate == GateKind::scalar;
  const auto images_of = [&](int slot) { return base + 3 * slot * kTileBytes; };
  const auto v_of = [&](int chunk) { return base + (Plan::v + chunk % Plan::chunks * groups) * kTileBytes; };

  float next_gate = 0.0f;  // of one gate a token: this thread's token of the group's next step
  const auto fetch_gate = [&](int chunk) {
    const int token = chunk * kChunk + fresh_thread();
    if (by_token && fresh_thread() < kTile) {
      const void* gates = static_cast<const char*>(p.g.data) + at.g;
      next_gate = token < at.length ? base_2_gate(load_as(p.gate_dtype, gates, token * p.g.token)) : 0.0f;
    }
  };
  // A thread of each warp asks for one kind of tiles: one for all of them would be what the group waits for.
  const auto ask_for = [&](int chunk, int slot, int parity) {
    const int warp = fresh_thread() / 32;
    if (chunk < chunks && fresh_thread() % 32 == 0) {
      const std::uint32_t barrier = base + Plan::loaded + 8 * slot;
      const bool wanted = warp < 2 || (warp == 2 ? p.gate == GateKind::key : kb == 0);
      if (!wanted) {
        Core::arrive(barrier);
      } else {
        Core::wait_at(base + Plan::emptied + 8 * slot, parity);  // what was there before has been read
        Core::expect_bytes(barrier, (warp < 3 ? 1 : groups) * kTileBytes);
        const RowMap& of = warp == 0 ? maps.q : warp == 1 ? maps.k : warp == 2 ? maps.g : maps.v;
        const int head = (warp == 0 ? at.query_head : at.head) * of.head_step, batch = at.batch * of.batch_step,
                  token = at.begin + chunk * kChunk;
        if (warp < 3) {
          Core::copy_box(images_of(slot) + warp * kTileBytes, &of.map, channel, token, head, batch, barrier);
        } else {
#pragma unroll
          for (int part = 0; part < groups; ++part) {
            Core::copy_box(v_of(chunk) + part * kTileBytes, &of.map, at.v0 + part * kTile, token, head, batch, barrier);
          }
        }
      }
    }
    __syncwarp();
  };

#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) ask_for(first_chunk + kChunkStep * i, gating + kGatingGroups * i, 1);
  fetch_gate(first_chunk);
  // Waits for a step's tiles, and readies them.
  const auto await = [&](int chunk, int slot, int parity) {
    const std::uint32_t q_tile = images_of(slot), k_tile = q_tile + kTileBytes, g_tile = k_tile + kTileBytes;
    if (by_token) {  // by the warps that asked for q and k, and so know that the slot has been read
      if (fresh_thread() < kTile) store_shared_4(g_tile + 4 * fresh_thread(), __float_as_uint(next_gate));
      fetch_gate(chunk + kChunkStep);
    }
    Core::wait_at(base + Plan::loaded + 8 * slot, parity);
    const int rows = at.length - chunk * kChunk;
    if (rows < kTile) {  // what lies beyond a sequence may be another one's
      clear_rows(q_tile, rows);
      clear_rows(k_tile, rows);
      if (p.gate == GateKind::key) clear_rows(g_tile, rows);
      for (int part = 0; kb == 0 && part < groups; ++part) clear_rows(v_of(chunk) + part * kTileBytes, rows);
      Core::publish();
    }
    if (by_token || rows < kTile) sync_group();
  };
  const std::uint32_t triangle = base + Plan::triangle * kTileBytes;
  const float to_base_2 = p.gate == GateKind::key ? kLog2E : 1.0f;
  int slot = gating, parity = 0;
  Accumulator sums;  // of key gates as loaded; a product asked for a step ahead
  if (first_chunk < chunks) {
    await(first_chunk, slot, parity);
    Core::begin();
    Core::template product<Stored::k_inner, Stored::k_outer, true>(sums, triangle, images_of(slot) + 2 * kTileBytes,
                                                                   fresh_thread());
    Core::finish(sums);
  }
#pragma unroll 1
  for (int chunk = first_chunk; chunk < chunks; chunk += kChunkStep) {
    const std::uint32_t q_tile = images_of(slot), k_tile = q_tile + kTileBytes, last_tile = k_tile + kTileBytes;
    float* const decays = reinterpret_cast<float*>(shared + Plan::decays + 3 * kTile * 4 * slot);
    float* const totals = decays + 2 * kTile;
    const int thread = fresh_thread(), column = 2 * (thread % 4);
    if (by_token) sum_tokens(sums, last_tile, thread);
    if (p.gate == GateKind::none) clear(sums);
    if (thread >= kGroupThreads - 4) {  // they have the chunk's last token
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        *reinterpret_cast<float2*>(totals + 8 * j + column) =
            make_float2(to_base_2 * sums[4 * j + 2], to_base_2 * sums[4 * j + 3]);
      }
    }
    // As if one anchor reached; the barrier tells whether it did.
    gate_by_sums<Core>(q_tile, k_tile, sums, to_base_2, thread);
    Core::publish();
    sync_group();
    // To where the group's step before this one was.
    const bool wraps = slot == gating;
    ask_for(chunk + kAhead * kChunkStep, wraps ? slot + kAhead * kGatingGroups : slot - kGatingGroups,
            wraps ? parity ^ 1 : parity);
    const int this_slot = slot;
    slot += kGatingGroups;
    if (slot >= Plan::slots) {
      slot = gating;
      parity ^= 1;
    }
    if (chunk + kChunkStep < chunks) await(chunk + kChunkStep, slot, parity);
    const std::uint32_t next_gates = images_of(slot) + 2 * kTileBytes;  // after the last step of nothing
    const float2 two_totals = *reinterpret_cast<const float2*>(totals + 2 * (thread % 32));
    const bool near =
        __all_sync(0xffffffffu, two_totals.x >= -kRange && two_totals.y >= -kRange);  // alike in all warps
    const auto put_decays = [&](float2 before, float2 after) {  // of the lane's two channels, which all warps have
      const int thread = fresh_thread();
      if (thread >= 32) return;
      *reinterpret_cast<float2*>(decays + 2 * thread) = before;
      *reinterpret_cast<float2*>(decays + kTile + 2 * thread) = after;
    };
    const auto hand_over = [&](const std::uint32_t(&pairs)[16]) {
      put_operand<Core>(last_tile, pairs, fresh_thread());
      Core::publish();
      Core::arrive(base + Plan::filled + 8 * this_slot);
    };
    std::uint32_t pairs[16];
    if (near) {
      put_decays(make_float2(1.0f, 1.0f), make_float2(ptx::exp2(two_totals.x), ptx::exp2(two_totals.y)));
      Accumulator scores;
      Core::begin();
      Core::template product<Stored::k_inner, Stored::k_inner, true>(scores, k_tile, q_tile, thread);
      Core::commit();
      Core::template product<Stored::k_inner, Stored::k_outer, true>(sums, triangle, next_gates, thread);
      Core::commit();
      Core::template wait<1>(scores);
      select_pairs<true>(pairs, scores, fresh_thread());
      hand_over(pairs);
      Core::template wait<0>(sums);
    } else {
      const auto load_again = [&](std::uint32_t tile, std::int64_t first, const Strided& s) {
        const int stride = static_cast<int>(s.token) * 2;
        const auto at_chunk = static_cast<std::int64_t>(chunk) * (stride * kChunk) + 2 * channel;
        load_tile(tile,
                  Rows{static_cast<const char*>(s.data) + first + at_chunk, stride,
                       min(at.length - chunk * kChunk, kTile), p.key_dim - channel},
                  true, fresh_thread());
      };
      load_again(q_tile, at.q, p.q);
      load_again(k_tile, at.k, p.k);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      sync_group();
      Local<std::uint32_t, 16> found;
      gate_steep_chunk<true>(found, q_tile, k_tile, last_tile, p.gate == GateKind::key, [&](float2 sum) {
        put_decays(make_float2(ptx::exp2(sum.x), ptx::exp2(sum.y)), make_float2(1.0f, 1.0f));
      });
      found.get(pairs);
      hand_over(pairs);
      Core::begin();
      Core::template product<Stored::k_inner, Stored::k_outer, true>(sums, triangle, next_gates, fresh_thread());
      Core::finish(sums);
    }
  }
}

// Grid: N * H * ceil(V / (64 groups)), value slices fastest.
template <class Core, int KB, int groups>
__device__ __forceinline__ void wide_forward(const Params& p, const WideMaps& maps, char* shared) {
  using Plan = WidePlan<KB, groups>;
  constexpr int kSlots = Plan::slots;
  const std::uint32_t base = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      Core::init_barrier(base + Plan::loaded + 8 * i, kGroupThreads / 32);
      Core::init_barrier(base + Plan::filled + 8 * i, kGroupThreads);
      Core::init_barrier(base + Plan::emptied + 8 * i, groups * kGroupThreads);
    }
    Core::publish_barriers();
    const int slices = (p.value_dim + 64 * groups - 1) / (64 * groups), v0 = blockIdx.x % slices * 64 * groups;
    const int query_head = blockIdx.x / slices % (p.heads * p.group), head = query_head / p.group;
    const std::int64_t n = blockIdx.x / slices / (p.heads * p.group);
    const Span span = span_of(p.sequences, n);
    const auto first = [&](const Strided& s, int element, int of_head, int channel) {
      return (span.batch * s.batch + span.begin * s.token + of_head * s.head + channel) * element;
    };
    *reinterpret_cast<WidePlaces*>(shared + Plan::places) = {
        first(p.q, 2, query_head, 0),
        first(p.k, 2, head, 0),
        first(p.g, p.gate_dtype == DType::f32 ? 4 : 2, head, 0),
        first(p.o, 2, query_head, v0),
        (n * p.heads + head) * (static_cast<std::int64_t>(p.key_dim) * p.value_dim),
        static_cast<int>(span.length),
        v0,
        static_cast<int>(span.begin),
        static_cast<int>(span.batch),
        query_head,
        head};
  }
  if (own_group() == 0) {
    std::uint32_t ones[16];
    triangle_of_ones<false>(ones, fresh_thread());
    put_operand<Core>(base + Plan::triangle * kTileBytes, ones, fresh_thread());
    Core::publish();
  }
  __syncthreads();
  const int part = own_group();
  if (part >= groups) {
    Core::template give<Plan::gating_registers>();
    return gate_steps<Core, KB, groups>(p, maps, shared);
  }
  Core::template take<Plan::state_registers>();

  const volatile WidePlaces& at = *reinterpret_cast<const volatile WidePlaces*>(shared + Plan::places);
  const auto find_v0 = [&] { return at.v0 + part * kTile; };
  const int chunks = (at.length + kChunk - 1) / kChunk;
  Accumulator h[KB];
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) {
    clear(h[kb]);
    if (p.h0 != nullptr) {
      auto* given = static_cast<float*>(const_cast<void*>(p.h0)) + at.state;
      move_transposed_state<false>(h[kb], given, p.key_dim, p.value_dim, kTile * kb, find_v0(), fresh_thread());
    }
  }

  const std::uint32_t out_tile = base + (Plan::out + part) * kTileBytes;
  const auto decay = [&](Accumulator& h, int slot, int which) {
    const char* from = shared + Plan::decays + (3 * slot + which) * (kTile * 4) + 8 * (fresh_thread() % 4);
    float2 factors[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) factors[j] = *reinterpret_cast<const float2*>(from + 32 * j);
    scale_columns(h, factors);
  };
  const auto finish_step = [&](Accumulator& h, int slot) {
    decay(h, slot, 1);
    Core::arrive(base + Plan::emptied + 8 * slot);
  };
  const auto before = [](int slot) { return slot > 0 ? slot - 1 : kSlots - 1; };
  int slot = 0, parity = 0;
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int thread = fresh_thread();
    Accumulator o;
    std::uint32_t v[16];
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      Core::wait_at(base + Plan::filled + 8 * slot, parity);
      const std::uint32_t q = base + 3 * slot * kTileBytes, k = q + kTileBytes, scores = k + kTileBytes;
      if (kb == 0) {
        load_operand<Stored::k_outer>(v, base + (Plan::v + c % Plan::chunks * groups + part) * kTileBytes, thread);
        Core::begin(v);
      }
      std::uint32_t rounded[16];
      to_operand(rounded, h[kb]);
      decay(h[kb], slot, 0);
      Core::begin(rounded, h[kb]);
      kb == 0 ? Core::template product<Stored::k_inner, true>(o, rounded, q, thread)
              : Core::template product<Stored::k_inner>(o, rounded, q, thread);
      Core::template product<Stored::k_outer>(o, v, scores, thread);
      Core::commit();
      Core::template product<Stored::k_outer>(h[kb], v, k, thread);
      Core::commit();
      if (kb + 1 < KB) {
        Core::template wait<1>();  // what was rounded is free again
      } else {
        Core::template wait<1>(o);
        if constexpr (KB > 1) {
          Core::template wait<1>(h[0]);
          finish_step(h[0], before(slot));
        }
      }
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
    std::uint32_t rounded[16];
    scale_rows(o, p.scale, p.scale);
    to_operand(rounded, o);
    sync_group();  // the chunk before has been read
    put_operand<Core, true>(out_tile, rounded, thread);
    sync_group();
    const int stride = static_cast<int>(p.o.token) * 2, left = at.length - c * kChunk;
    const Rows rows{
        static_cast<const char*>(p.o.data) + at.o + static_cast<std::int64_t>(c) * (stride * kChunk) + 2 * part * kTile,
        stride, left < kChunk ? left : kChunk, p.value_dim - at.v0 - part * kTile};
    store_tile(rows, out_tile, aligned(rows), fresh_thread());
    Core::template wait<0>(v);
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) Core::template wait<0>(h[kb]);
    finish_step(h[KB - 1], before(slot));
  }
  if (p.ht == nullptr || at.query_head % p.group != 0) return;
  float* const wanted = static_cast<float*>(p.ht) + at.state;
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) {
    move_transposed_state<true>(h[kb], wanted, p.key_dim, p.value_dim, kTile * kb, find_v0(), fresh_thread());
  }
}

template <class Core, int KB, int groups>
__global__ void __launch_bounds__((WidePlan<KB, groups>::threads), 1)
    wide_forward_kernel(const __grid_constant__ Params p, const __grid_constant__ WideMaps maps) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) wide_forward<Core, KB, groups>(p, maps, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Forward in one pass for K <= 64: a group of 128 threads walks through one (sequence, query head, slice of 64 value
// channels) with the state in registers; q, k, v, the gates and o each cross device memory once a slice. bf16, key
// gates in bf16. With one anchor a chunk (forward/gates.cuh)
//
//     key gates:         q~ = q 2^G, k~ = k 2^-G;  o = scale (select(q~ k~^T) v + q~ h);  h' = 2^G_last (h + k~^T v)
//     one gate a token:  v~ = v 2^-G;  o = scale 2^G (select(q k^T) v~ + q h);            h' = 2^G_last (h + k^T v~)
//
// and beyond its range with k 2^(G_last - G), plain v and the decay before the product.
//
// A block has one such group, or two that share nothing but one barrier a chunk (fused.cu says when): neighbouring
// heads then ask for neighbouring rows of 128 bytes at about the same time, which the memory answers 4 to 7% faster.
// Shared memory is what lets four groups, 512 sequence-heads on the card, live at once: seven tiles, 56 KiB. q and k
// have two slots each; with a key gate v and g have one, refilled as soon as they are read, else v has two. One slot
// holds h as the operand of q~ h. o leaves through the slot of q.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/forward/gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

enum class FusedGate { none, constant, scalar, key };

constexpr int kFusedTiles = 7;

// ---- key gates ----

// q 2^G and k 2^-G in place, from a tile of natural-log gates; and the decay of the chunk for the two rows of the state
// that this thread holds. False where the warp's 16 channels say that one anchor does not reach: then q and k are lost.
template <class Core>
__device__ __forceinline__ bool gate_by_channel(std::uint32_t q, std::uint32_t k, std::uint32_t g_tile, float2& decay,
                                                int thread) {
  std::uint32_t operand[16];
  triangle_of_ones<false>(operand, thread);
  Accumulator sums;
  Core::begin(operand);
  Core::template product<Stored::k_outer, true>(sums, operand, g_tile, thread_shuffled<Core>(thread));
  Core::commit();
  const float2 totals = sum_rows_of_tile(g_tile, thread);
  const float low = totals.x * kLog2E, high = totals.y * kLog2E;
  decay = make_float2(ptx::exp2(low), ptx::exp2(high));
  Core::template wait<0>(sums);
  gate_by_sums<Core>(q, k, sums, kLog2E, thread);
  return low >= -kRange && high >= -kRange;
}

// A tile of q, k or g anew, waited for with the others.
template <bool kPieces>
__device__ __forceinline__ void load_again(std::uint32_t tile, const Rows& rows) {
  if constexpr (kPieces) {
    load_tile(tile, rows, true, fresh_thread());
  } else {
    gather_pieces(tile, rows, fresh_thread());
  }
}

// ---- one gate a token ----

// Running sums of a chunk's gates, base 2, where this thread needs them.
struct TokenSums {
  float moved[kRowsEach];  // at the rows of tiles it moves
  float2 own;              // at its accumulators' two rows
  float total;
};

// All the same; rows beyond the sequence's end have none.
__device__ __forceinline__ TokenSums constant_sums(float gate, int rows, int thread) {
  const auto sum = [&](int row) { return gate * static_cast<float>(min(row + 1, rows)); };
  const int own = thread / 32 * 16 + thread % 32 / 4;
  TokenSums sums;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) sums.moved[i] = sum(kRowsEach * (thread / 8) + i);
  sums.own = make_float2(sum(own), sum(own + 8));
  sums.total = sum(kChunk - 1);
  return sums;
}
// gates: of tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ TokenSums scan_tokens(float2 gates, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  float high = gates.x + gates.y;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, high, step);
    high += lane >= step ? other : 0.0f;
  }
  const float low = high - gates.y;
  const auto at = [&](float x, int lane_with) { return __shfl_sync(0xffffffffu, x, lane_with); };
  TokenSums sums;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) sums.moved[i] = at(i & 1 ? high : low, 8 * warp + 2 * (lane / 8) + i / 2);
  const float even[2] = {at(low, 8 * warp + lane / 8), at(low, 8 * warp + lane / 8 + 4)};
  const float odd[2] = {at(high, 8 * warp + lane / 8), at(high, 8 * warp + lane / 8 + 4)};
  sums.own = lane & 4 ? make_float2(odd[0], odd[1]) : make_float2(even[0], even[1]);
  sums.total = at(high, 31);
  return sums;
}

// The pieces of v that this thread loaded times 2^-sum, in place. The factor is two bf16 numbers, so that only the
// product is rounded.
__device__ __forceinline__ void gate_values(std::uint32_t v, const TokenSums& sums, int thread) {
  constexpr std::uint32_t negative_zeros = 0x80008000;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const float factor = ptx::exp2(-sums.moved[i]);
    const std::uint32_t high = ptx::pack_bf16(factor, factor);
    const float rest = factor - __uint_as_float(high << 16);
    const std::uint32_t low = ptx::pack_bf16(rest, rest);
    const std::uint32_t at = v + own_piece(thread, i);
    const auto gated = [&](std::uint32_t x) { return ptx::fma_bf16(x, high, ptx::fma_bf16(x, low, negative_zeros)); };
    const uint4 x = load_shared_16(at);
    store_shared_16(at, make_uint4(gated(x.x), gated(x.y), gated(x.z), gated(x.w)));
  }
}

__device__ __forceinline__ void scale_piece(std::uint32_t at, float factor) {
  float x[8];
  unpack_8(load_shared_16(at), x);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= factor;
  store_shared_16(at, pack_8(x));
}

// A chunk beyond one anchor's reach: scores pair by pair from sums in double, whose differences are good for any gates;
// q 2^G and k 2^(sum of later gates) in place.
static __device__ __forceinline__ void gate_steep_tokens(Local<std::uint32_t, 16>& scores, std::uint32_t q,
                                                         std::uint32_t k, float2 gates, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  sync_group();
  Local<float, 32> products;
  {
    Accumulator s;
    clear(s);
    TensorCore80::product<Stored::k_inner, Stored::k_inner, false, Loads::in_turn>(s, q, k, thread);
    products.put(s);
  }
  sync_group();
  const double own = gates.y;
  double high = static_cast<double>(gates.x) + own;  // up to token 2 lane + 1
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, high, step);
    if (lane >= step) high += other;
  }
  const double low = high - own, last = __shfl_sync(0xffffffffu, high, 31);
  const auto row_sum = [&](int lane_with) {
    const double x = __shfl_sync(0xffffffffu, low, lane_with), y = __shfl_sync(0xffffffffu, high, lane_with);
    return lane & 4 ? y : x;
  };
  {
    const double sums[2] = {row_sum(8 * warp + lane / 8), row_sum(8 * warp + lane / 8 + 4)};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const double x[2] = {__shfl_sync(0xffffffffu, low, 4 * j + lane % 4),
                           __shfl_sync(0xffffffffu, high, 4 * j + lane % 4)};
      const int column = column_of_element(thread, 4 * j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of_element(thread, 2 * half);
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float decay = ptx::exp2(fminf(static_cast<float>(sums[half] - x[e]), 0.0f));
          pair[e] = column + e <= row ? products.x[4 * j + 2 * half + e] * decay : 0.0f;
        }
        scores.x[2 * j + half] = ptx::pack_bf16(pair[0], pair[1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const double sum = __shfl_sync(0xffffffffu, i & 1 ? high : low, 8 * warp + 2 * (lane / 8) + i / 2);
    scale_piece(q + own_piece(thread, i), ptx::exp2(static_cast<float>(sum)));
    scale_piece(k + own_piece(thread, i), ptx::exp2(static_cast<float>(last - sum)));
  }
}

// ---- the walk ----

// Groups of the grid: N * H * ceil(V / 64), value slices fastest; those of one block are of one sequence. kPieces: all
// rows may be moved in 16-byte pieces.
template <class Core, FusedGate gate, bool kPieces>
__device__ __forceinline__ void fused(const Params& p, char* shared) {
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr Loads kLoads = Loads::in_turn;
  constexpr bool key = gate == FusedGate::key, by_token = gate == FusedGate::constant || gate == FusedGate::scalar;
  const int group = own_group();
  const std::uint32_t base = ptx::shared_address(shared) + group * (kFusedTiles * kTileBytes);
  const auto own_unit = [&] { return fresh_block() * (blockDim.x / kGroupThreads) + group; };
  const int thread = fresh_thread();
  const int slices = (p.value_dim + 63) / 64;
  const int v0 = own_unit() % slices * 64;
  const int heads = p.heads * p.group;
  const std::int64_t n = own_unit() / slices / heads;
  const int query_head = static_cast<int>(own_unit() / slices % heads), head = query_head / p.group;
  const int K = p.key_dim, V = p.value_dim;
  const Span span = span_of(p.sequences, n);
  int left = static_cast<int>(span.length);  // tokens from the chunk that is worked on
  // This group's sequence times heads plus query head, anew. One group a head and slice writes the states.
  const auto own_slices = [&] { return static_cast<unsigned>(anew(p.value_dim) + 63) / 64; };
  const auto own_head = [&] { return own_unit() / own_slices(); };
  const auto leads = [&] { return own_head() % p.group == 0; };

  const std::uint32_t g_tile = base + 5 * kTileBytes, h_tile = base + 6 * kTileBytes;
  // Where the next chunk begins in each tensor, in units of 16 bytes (else of elements): an address is worked out from
  // it and the tensor's by one instruction, and it takes one register instead of two. Gates of tokens in elements.
  using Place = std::conditional_t<kPieces, int, std::int64_t>;
  constexpr int unit = kPieces ? 16 : 2;
  const auto first_place = [&](const Strided& s, int of_head, int channel) {
    return static_cast<Place>((span.batch * s.batch + span.begin * s.token + of_head * s.head + channel) * 2 / unit);
  };
  Place places[6] = {
      first_place(p.q, query_head, 0),
      first_place(p.k, head, 0),
      first_place(p.v, head, v0),
      first_place(p.o, query_head, v0),
      key ? first_place(p.g, head, 0)
      : gate == FusedGate::scalar
          ? static_cast<Place>(span.batch * p.g.batch + span.begin * p.g.token + head * p.g.head)
          : 0,
      static_cast<Place>(p.state_tile(p.state_slot(span.chunk_begin, n, 0), head, 0, v0 / kTile) / unit)};
  Place &q_next = places[0], &k_next = places[1], &v_next = places[2], &o_next = places[3], &g_next = places[4],
        &states_next = places[5];
  const auto stride_of = [&](const Strided& s) { return static_cast<int>(s.token) * 2; };
  const auto step_of = [&](const Strided& s) { return static_cast<Place>(s.token * (kChunk * 2 / unit)); };
  const auto rows_at = [&](Place place, const Strided& s, int rows, int channels) {
    return Rows{static_cast<const char*>(s.data) + static_cast<std::int64_t>(place) * unit, stride_of(s), rows,
                channels};
  };
  // Of this thread's piece of its first row.
  const auto own_offset = [](int thread, int stride) { return kRowsEach * (thread / 8) * stride + thread % 8 * 16; };
  const auto rows_here = [&] { return min(left, kChunk); };
  const auto rows_next = [&] { return min(left - kChunk, kChunk); };
  const auto load = [&](std::uint32_t tile, Place& next, const Strided& s, int rows, int channels) {
    const int thread = fresh_thread();
    const Rows from = rows_at(next, s, rows, channels);
    if constexpr (kPieces) {
      const int inside = thread % 8 * 8 < channels ? rows - kRowsEach * (thread / 8) : 0;
      const char* row = from.data + own_offset(thread, from.stride);
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {  // without bytes nothing is read
        ptx::copy_async_16(tile + own_piece(thread, i), row + i * from.stride, i < inside ? 16 : 0);
      }
    } else {
      gather_pieces(tile, from, thread);
    }
    next += step_of(s);
  };
  const auto write_states = [&](int thread) {
    store_tile_image(static_cast<char*>(p.states) + static_cast<std::int64_t>(states_next) * unit, h_tile, thread);
    // p.state_bytes() a head, of one tile of keys.
    states_next +=
        static_cast<Place>(anew(p.heads) * tiles_of(alike_shuffled<Core>(p.value_dim)) * (kImageBytes / unit));
  };
  // Of tokens 2 lane and 2 lane + 1 of the next chunk.
  const auto token_gates = [&](int rows) {
    const int token = 2 * (fresh_thread() % 32);
    const auto gate_of = [&](int i) {
      return token + i < rows ? base_2_gate(load_as(p.gate_dtype, p.g.data, g_next + (token + i) * p.g.token)) : 0.0f;
    };
    const float2 gates = make_float2(gate_of(0), gate_of(1));
    g_next += static_cast<Place>(kChunk * p.g.token);
    return gates;
  };

  const auto own_state = [&](const void* states) {
    return states == nullptr ? nullptr
                             : static_cast<float*>(const_cast<void*>(states)) +
                                   own_head() / p.group * static_cast<std::int64_t>(K) * V;
  };

  const auto token_scales = [&](const TokenSums& sums) {
    return make_float2(p.scale * ptx::exp2(sums.own.x), p.scale * ptx::exp2(sums.own.y));
  };
  float constant_gate = 0.0f;
  float2 next_gates = make_float2(0.0f, 0.0f);
  if (left > 0) {
    load(base, q_next, p.q, rows_here(), K);
    load(base + 2 * kTileBytes, k_next, p.k, rows_here(), K);
    if constexpr (key) {
      load(g_tile, g_next, p.g, rows_here(), K);
      ptx::copy_async_commit();
    }
    load(base + 4 * kTileBytes, v_next, p.v, rows_here(), V - v0);
    ptx::copy_async_commit();
    if constexpr (gate == FusedGate::constant) constant_gate = key_gate(p, span.batch, span.begin, head, 0);
    if constexpr (gate == FusedGate::scalar) next_gates = token_gates(rows_here());
  }

  Accumulator h;
  read_state(h, own_state(p.h0), K, V, 0, v0, thread);
  put_rounded<Core>(h_tile, h, thread);
  const bool keeps_states = p.states != nullptr && leads();
  __syncwarp();
  if (keeps_states && left > 0) write_states(thread);

#pragma unroll 1
  for (int c = 0; left > 0; ++c, left -= kChunk) {
    const int thread = fresh_thread(), lane = thread % 32;
    const std::uint32_t parity = (c & 1) * kTileBytes, other = kTileBytes - parity;
    const std::uint32_t q = base + parity, k = q + 2 * kTileBytes, v = key ? base + 4 * kTileBytes : q + 4 * kTileBytes;
    if (left > kChunk) {
      load(base + other, q_next, p.q, rows_next(), K);
      load(base + 2 * kTileBytes + other, k_next, p.k, rows_next(), K);
      if constexpr (!key) load(base + 4 * kTileBytes + other, v_next, p.v, rows_next(), V - v0);
    }
    ptx::copy_async_commit();
    ptx::copy_async_wait<key ? 2 : 1>();

    bool one_anchor = true;
    float2 decay = make_float2(1.0f, 1.0f), o_scale = make_float2(p.scale, p.scale);
    Local<std::uint32_t, 16> steep_scores;
    if constexpr (key) {
      Core::publish();
      sync_group();  // g, q and k are there
      one_anchor = gate_by_channel<Core>(q, k, g_tile, decay, thread);
      ptx::copy_async_wait<1>();
      Core::publish();
      one_anchor = !sync_group_or(!one_anchor);  // the operands are there
      if (!one_anchor) {                         // or not
        const auto again = [&](Place next, const Strided& s, int chunks_back) {
          return rows_at(next - step_of(s) * chunks_back, s, rows_here(), K);
        };
        const int ahead = left > kChunk ? 2 : 1;
        load_again<kPieces>(q, again(q_next, p.q, ahead));
        load_again<kPieces>(k, again(k_next, p.k, ahead));
        load_again<kPieces>(g_tile, again(g_next, p.g, 1));
        ptx::copy_async_commit();
        Local<float, 32> state;
        Local<Place, 6> walk;
        state.put(h);
        walk.put(places);
        ptx::copy_async_wait<0>();
        sync_group();
        gate_steep_chunk<false>(steep_scores, q, k, g_tile, true, [](float2) {});
        state.get(h);
        walk.get(places);
        Core::publish();
        sync_group();
      }
      if (left > kChunk) load(g_tile, g_next, p.g, rows_next(), K);
      ptx::copy_async_commit();
    } else if constexpr (by_token) {
      const float2 gates = next_gates;
      if constexpr (gate == FusedGate::scalar) next_gates = token_gates(left > kChunk ? rows_next() : 0);
      const TokenSums sums =
          gate == FusedGate::constant ? constant_sums(constant_gate, rows_here(), thread) : scan_tokens(gates, thread);
      one_anchor = sums.total >= -kRange;
      decay.x = decay.y = ptx::exp2(sums.total);
      if (one_anchor) {
        o_scale = token_scales(sums);
        gate_values(v, sums, thread);
      } else {
        Local<float, 32> state;
        Local<Place, 6> walk;
        state.put(h);
        walk.put(places);
        if constexpr (gate == FusedGate::constant) {
          const float each = alike_shuffled<Core>(constant_gate);
          gate_steep_tokens(steep_scores, q, k,
                            make_float2(2 * lane < left ? each : 0.0f, 2 * lane + 1 < left ? each : 0.0f),
                            fresh_thread());
        } else {
          Local<float, 2> ahead;
          float next[] = {next_gates.x, next_gates.y};
          ahead.put(next);
          gate_steep_tokens(steep_scores, q, k, gates, fresh_thread());
          ahead.get(next);
          next_gates = make_float2(next[0], next[1]);
        }
        state.get(h);
        walk.get(places);
      }
      Core::publish();
      sync_group();  // the operands are there
    } else {
      Core::publish();
      sync_group();
    }

    // h is both the operand in its tile and, in registers, what the next one comes from.
    if (!one_anchor) scale_rows(h, decay.x, decay.y);
    Accumulator s;
    std::uint32_t scores[16];
    Core::begin(h);
    Core::template product<k_inner, k_inner, true, kLoads>(s, q, k, thread_shuffled<Core>(thread));
    Core::commit();
    const auto step_state = [&] {
      Core::template product<k_outer, k_outer, false, kLoads>(h, k, v, thread_shuffled<Core>(thread));
    };
    const auto decay_state = [&] {
      if constexpr (gate == FusedGate::constant) {  // worked out anew rather than held
        const TokenSums sums = constant_sums(alike_shuffled<Core>(constant_gate),
                                             min(alike_shuffled<Core>(left), kChunk), thread_shuffled<Core>(thread));
        decay.x = decay.y = ptx::exp2(sums.total);
        o_scale = one_anchor ? token_scales(sums) : make_float2(p.scale, p.scale);
      }
      if (one_anchor) scale_rows(h, decay.x, decay.y);
    };
    // With wgmma the state is stepped while scores are selected; with mma.sync before there is an accumulator of o.
    constexpr bool kAsynchronous = !std::is_same_v<Core, TensorCore80>;
    if constexpr (kAsynchronous) step_state();
    Core::commit();
    Core::template wait<1>(s);
    select_pairs<false>(scores, s, thread);
    if (!one_anchor) steep_scores.get(scores);
    if constexpr (!kAsynchronous) {
      step_state();
      decay_state();
    }
    Accumulator o;
    Core::begin(scores);
    if constexpr (kAsynchronous) {
      Core::template product<k_inner, k_outer, true>(o, q, h_tile, thread);
      Core::template product<k_outer>(o, scores, v, thread);
      Core::commit();
      Core::template wait<1>(h);
      decay_state();
    } else {
      Core::template product<k_outer, true, kLoads>(o, scores, v, thread_shuffled<Core>(thread));
      Core::template product<k_inner, k_outer, false, kLoads>(o, q, h_tile, thread_shuffled<Core>(thread));
    }
    Core::template wait<0>(o);
    __syncthreads();  // the operands have been read, by both groups: they ask for the next rows together
    if constexpr (key) {
      if (left > kChunk) load(v, v_next, p.v, rows_next(), V - v0);
      ptx::copy_async_commit();
    }
    const int mover = thread_shuffled<Core>(fresh_thread());
    put_rounded<Core>(h_tile, h, mover);
    scale_rows(o, o_scale.x, o_scale.y);
    put_rounded<Core>(q, o, mover);
    __syncwarp();
    const Rows out = rows_at(o_next, p.o, rows_here(), V - v0);
    if constexpr (kPieces) {
      const int inside = mover % 8 * 8 < V - v0 ? left - kRowsEach * (mover / 8) : 0;
      char* to = const_cast<char*>(out.data) + own_offset(mover, out.stride);
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        if (i < inside) *reinterpret_cast<uint4*>(to + i * out.stride) = load_shared_16(q + own_piece(mover, i));
      }
    } else {
      scatter_pieces(out, q, mover);
    }
    o_next += step_of(p.o);
    if (keeps_states && left > kChunk && (c + 1) % p.states_every() == 0) write_states(mover);
  }
  if (p.ht != nullptr && leads()) {
    write_state(own_state(p.ht), h, K, V, 0, static_cast<int>(own_unit() % own_slices()) * 64, fresh_thread());
  }
}

template <class Core, FusedGate gate, bool kPieces>
__global__ void __launch_bounds__(kPieces ? 2 * kGroupThreads : kGroupThreads, kPieces ? 2 : 3)
    fused_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) fused<Core, gate, kPieces>(p, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// The backward of heads of up to 64 x 64 with key gates of bf16 in one kernel; equations: backward/chunk.cuh, roles:
// backward/README.md. As in backward/rows.cuh a block walks a sequence and head back in time with dh in registers.
// Gates are summed on tensor cores: running sums are a triangle of ones times the tile of gates, and dg, a sum over
// later tokens, is one times E = q dq - k dk. E goes in as two bf16 numbers, 16 bits of mantissa; the sums are f32.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/fused.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/rows.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

struct ChannelsShared {
  // Factors of steep chunks take v and h, their X takes x. E: of q in d_o and h, of k in v and x.
  static constexpr int q = 0, k = kTileBytes, d_o = 2 * kTileBytes, v = 3 * kTileBytes, h = 4 * kTileBytes,
                       g = 5 * kTileBytes;
  static constexpr int stage = 6 * kTileBytes;
  static constexpr int x = 2 * stage;                  // dh^
  static constexpr int beyond = x + kTileBytes;        // [parity of the chunk][64]: dh h at its end
  static constexpr int sums = beyond + 2 * kTile * 4;  // [8 warps][64]: of gates, for steep chunks
  static constexpr int places = sums + kFusedWarps * kTile * 4;
  static constexpr int total = places + 3 * Places::count * 8;
};

// E = sign times the tile's elements times the accumulator's, of this warp's rows, as high and low halves.
template <class Core>
__device__ __forceinline__ void put_products(std::uint32_t high, std::uint32_t low, std::uint32_t tile,
                                             const Accumulator& d, float sign, int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t x[4], y[4];
    TensorCore80::load_a<Stored::k_inner>(x, tile, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = ptx::unpack_bf16(x[i]);
      const float first = sign * pair.x * d[8 * k16 + 2 * i], second = sign * pair.y * d[8 * k16 + 2 * i + 1];
      x[i] = ptx::pack_bf16(first, second);
      const float2 rounded = ptx::unpack_bf16(x[i]);
      y[i] = ptx::pack_bf16(first - rounded.x, second - rounded.y);
    }
    Core::put_fragment(high, x, k16, thread);
    Core::put_fragment(low, y, k16, thread);
  }
}

// Running sums over the tokens of the sum of some tiles, up to this warp's rows (kLater: from the last token back to
// them), 16 channels at a time: visit(t, sums) with those of elements 8 t .. 8 t + 7 of an accumulator.
template <bool kLater, int kTiles, class Visit>
__device__ __forceinline__ void visit_sums(const std::uint32_t (&tiles)[kTiles], int thread, Visit visit) {
  std::uint32_t triangle[16];
  triangle_of_ones<kLater>(triangle, thread);
  const int warp = thread / 32;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float sums[8] = {};
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      if (kLater ? k16 < warp : k16 > warp) continue;
      const std::uint32_t a[4] = {triangle[4 * k16], triangle[4 * k16 + 1], triangle[4 * k16 + 2],
                                  triangle[4 * k16 + 3]};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        std::uint32_t b[4];
        TensorCore80::load_b<Stored::k_outer>(b, tiles[i], k16, 2 * t, thread);
        TensorCore80::multiply(sums, a, b[0], b[1]);
        TensorCore80::multiply(sums + 4, a, b[2], b[3]);
      }
    }
    visit(t, sums);
  }
}

// Grid: N x G. One query head a kv head; states kept; ht given where dht is. kGroup: the part of one thread group; the
// groups meet at the block's barriers, of which both pass the same number.
template <class Core, int kGroup>
__device__ __forceinline__ void backward_channels(const Params& p, const FusedBackward& f, char* shared) {
  using Layout = ChannelsShared;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr float kSign = (kGroup == 0 ? 1.0f : -1.0f) * kLog2E;
  const int head = blockIdx.x % p.heads;
  const std::int64_t n = blockIdx.x / p.heads;
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk), last = chunks - 1;
  const int rows_of_last = static_cast<int>(span.length - static_cast<std::int64_t>(last) * kChunk);
  const auto rows_in = [&](int index) { return index == last ? rows_of_last : kChunk; };
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t x_tile = base + Layout::x, beyond = base + Layout::beyond;
  const auto float_at = [](std::uint32_t address, int i) { return __uint_as_float(load_shared_4(address + 4 * i)); };
  const auto put_float = [](std::uint32_t address, int i, float x) {
    store_shared_4(address + 4 * i, __float_as_uint(x));
  };
  const auto state_at = [&] { return fresh_block() * (static_cast<std::int64_t>(p.key_dim) * p.value_dim); };
  const auto state_of = [&](const float* states) { return states == nullptr ? nullptr : states + state_at(); };

  const Places places{base + Layout::places};
  const std::int64_t states_step = p.heads * kImageBytes;
  const auto states_at = [&](int index) {
    return static_cast<const char*>(p.states) + (span.chunk_begin + index) * states_step + head * kImageBytes;
  };
  if (threadIdx.x == 0) {  // what is read is asked for a chunk ahead
    const auto start = [&](Places::Tensor tensor, const Strided& s, int index) {
      places.start(last, tensor, chunk_place(s, span, index, head, 2), s.token * kChunk * 2);
    };
    start(Places::q, p.q, last - 1);
    start(Places::d_o, f.gradients.d_o, last - 1);
    start(Places::k, p.k, last - 1);
    start(Places::v, p.v, last - 1);
    places.start(last, Places::states, states_at(last - 1), states_step);
    start(Places::g, p.g, last - 1);
    start(Places::dq, f.gradients.dq, last);
    start(Places::dk, f.gradients.dk, last);
    start(Places::dv, f.gradients.dv, last);
    start(Places::dg, f.gradients.dg, last);
  }

  const auto load_from = [&](int index, const char* first, const char* second, const char* third) {
    const int thread = fresh_thread(), rows = rows_in(index);
    const std::uint32_t stage = base + (index & 1) * Layout::stage;
    const auto elements = [](const char* x) { return reinterpret_cast<const __nv_bfloat16*>(x); };
    copy_tile(stage + (kGroup == 0 ? Layout::q : Layout::k), elements(first), kGroup == 0 ? p.q.token : p.k.token, rows,
              p.key_dim, thread);
    copy_tile(stage + (kGroup == 0 ? Layout::d_o : Layout::v), elements(second),
              kGroup == 0 ? f.gradients.d_o.token : p.v.token, rows, p.value_dim, thread);
    if constexpr (kGroup == 0) {
      copy_tile(stage + Layout::g, elements(third), p.g.token, rows, p.key_dim, thread);
    } else {
      copy_image(stage + Layout::h, third, thread);
    }
    ptx::copy_async_commit();
  };
  // q or k of the chunk under way once more, as they are.
  const auto reload = [&](int index) {
    const Strided& s = kGroup == 0 ? p.q : p.k;
    const char* place = places.get<char>(index, kGroup == 0 ? Places::q : Places::k) + s.token * kChunk * 2;
    copy_tile(base + (index & 1) * Layout::stage + (kGroup == 0 ? Layout::q : Layout::k),
              reinterpret_cast<const __nv_bfloat16*>(place), s.token, rows_in(index), p.key_dim, fresh_thread());
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
  };
  const auto store = [&](int index, std::uint32_t tile, Places::Tensor tensor, const Strided& s, const Accumulator& a,
                         int rows, int columns) {
    if (s.data == nullptr) return;
    store_through<Core>(tile, places.template get<__nv_bfloat16>(index, tensor), static_cast<int>(s.token), a, rows,
                        columns);
  };

  // dh, held by the second group; and what dg of the chunk before has from beyond it, by key channel.
  Accumulator dh;
  const auto put_beyond = [&](int index, float2 sums) {
    const int thread = fresh_thread(), row = row_of_element(thread, 0);
    sums.x += __shfl_xor_sync(0xffffffffu, sums.x, 1);
    sums.y += __shfl_xor_sync(0xffffffffu, sums.y, 1);
    sums.x += __shfl_xor_sync(0xffffffffu, sums.x, 2);
    sums.y += __shfl_xor_sync(0xffffffffu, sums.y, 2);
    if (thread % 4 == 0) {
      put_float(beyond, (index & 1) * kTile + row, sums.x);
      put_float(beyond, (index & 1) * kTile + row + 8, sums.y);
    }
  };
  if (chunks > 0) {
    load_from(last, chunk_place(kGroup == 0 ? p.q : p.k, span, last, head, 2),
              chunk_place(kGroup == 0 ? f.gradients.d_o : p.v, span, last, head, 2),
              kGroup == 0 ? chunk_place(p.g, span, last, head, 2) : states_at(last));
  }
  if constexpr (kGroup == 1) {
    const int thread = fresh_thread();
    read_state(dh, state_of(f.d_ht), p.key_dim, p.value_dim, 0, 0, thread);
    float sums[2] = {0.0f, 0.0f};
    if (f.d_ht != nullptr) {
      Accumulator ht;
      read_state(ht, state_of(static_cast<const float*>(p.ht)), p.key_dim, p.value_dim, 0, 0, thread);
#pragma unroll
      for (int i = 0; i < 32; ++i) sums[(i >> 1) & 1] += dh[i] * ht[i];
    }
    put_beyond(last, make_float2(sums[0], sums[1]));
  }

#pragma unroll 1
  for (int index = last; index >= 0; --index) {
    const int rows = rows_in(index);
    const std::uint32_t stage = base + (index & 1) * Layout::stage;
    const std::uint32_t q = stage + Layout::q, k = stage + Layout::k, d_o = stage + Layout::d_o, v = stage + Layout::v,
                        h = stage + Layout::h, g = stage + Layout::g, own_tile = kGroup == 0 ? q : k;
    ptx::copy_async_wait<0>();
    Core::publish();
    __syncthreads();  // all tiles are there

    // q~ and k~ in place, and dh^, as if one anchor served.
    bool in_range = true;
    float2 decay = make_float2(1.0f, 1.0f);  // of dh's rows
    {
      const int thread = fresh_thread();
      if constexpr (kGroup == 1) {
        const float2 totals = sum_rows_of_tile(g, thread);
        const float low = totals.x * kLog2E, high = totals.y * kLog2E;
        in_range = low >= -kSteep && high >= -kSteep;
        decay = make_float2(ptx::exp2(low), ptx::exp2(high));
        Accumulator decayed;
#pragma unroll
        for (int i = 0; i < 32; ++i) decayed[i] = dh[i] * (i & 2 ? decay.y : decay.x);
        put_rounded<Core>(x_tile, decayed, thread);
      }
      visit_sums<false, 1>({g}, thread, [&](int t, const float(&sums)[8]) {
        const float factor = kGroup == 0 ? p.scale : 1.0f;
        std::uint32_t x[4];
        TensorCore80::load_a<k_inner>(x, own_tile, t, thread);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = ptx::unpack_bf16(x[i]);
          x[i] = ptx::pack_bf16(pair.x * (factor * ptx::exp2(kSign * sums[2 * i])),
                                pair.y * (factor * ptx::exp2(kSign * sums[2 * i + 1])));
        }
        Core::put_fragment(own_tile, x, t, thread);
      });
    }
    Core::publish();
    const bool steep = __syncthreads_or(!in_range);  // the operands are there
    if (index > 0) {
      load_from(index - 1, places.get<char>(index, kGroup == 0 ? Places::q : Places::k),
                places.get<char>(index, kGroup == 0 ? Places::d_o : Places::v),
                places.get<char>(index, kGroup == 0 ? Places::g : Places::states));
    }

    const int thread = fresh_thread();
    Accumulator d, dv;  // d: of the first group dq, of the second dk; dv: the first group's
    const auto one = [](int, int) { return 1.0f; };
    const auto select_pairs = [&](std::uint32_t(&operand)[16], const Accumulator& a) {
      // Of [query][key] in the first group, and of [key][query] in the second.
      select_scaled(
          operand, a, thread, [](int r, int c) { return kGroup == 0 ? r >= c : c >= r; }, one);
    };
    if (!steep) {
      if constexpr (kGroup == 0) {
        std::uint32_t scores[16], pairs[16];
        {
          Accumulator s, a;  // [key][query], [query][key]
          Core::begin();
          Core::template product<k_inner, k_inner, true>(s, k, q, thread);
          Core::template product<k_inner, k_inner, true>(a, d_o, v, thread);
          Core::finish(s, a);
          select_scaled(
              scores, s, thread, [](int r, int c) { return c >= r; }, one);
          select_pairs(pairs, a);
        }
        Core::begin(scores);
        Core::template product<k_inner, k_outer, true>(dv, k, x_tile, thread);
        Core::template product<k_outer>(dv, scores, d_o, thread);
        Core::finish(dv);
        Core::begin(pairs);
        Core::template product<k_inner, k_inner, true>(d, d_o, h, thread);
        Core::template product<k_outer>(d, pairs, k, thread);
        Core::finish(d);
      } else {
        scale_rows(dh, decay.x, decay.y);
        std::uint32_t pairs[16];
        {
          Accumulator a;
          Core::begin();
          Core::template product<k_inner, k_inner, true>(a, v, d_o, thread);
          Core::finish(a);
          select_pairs(pairs, a);
        }
        Core::begin(pairs, dh);
        Core::template product<k_inner, k_inner, true>(d, v, x_tile, thread);
        Core::template product<k_outer>(d, pairs, q, thread);
        Core::template product<k_outer, k_outer>(dh, q, d_o, thread);
        Core::finish(d, dh);
        put_beyond(index - 1, dot_rows(h, dh, thread));
      }
    } else {
      // scale q 2^b and k 2^(sum of later gates) instead, and dh before its decay.
      const int warp = thread / 32 + 4 * kGroup, lane = thread % 32;
      reload(index);
      const char* gates = shared + (g - base);
      float* sums = reinterpret_cast<float*>(shared + Layout::sums);
      const GateColumns<GateTile::narrow, kFusedWarps> columns{gates, sums, warp, lane};
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kFusedRows; ++i) {
        const float2 gate = columns.gate(i);
        sum.x += gate.x;
        sum.y += gate.y;
      }
      *reinterpret_cast<float2*>(sums + warp * kTile + 2 * lane) = sum;
      if constexpr (kGroup == 1) {
        put_rounded<Core>(x_tile, dh, thread);
        scale_rows(dh, decay.x, decay.y);
      }
      __syncthreads();
      walk_up(columns, kTile, warp, [&](int row, float2 exponent) { gate_pair(q, q, row, lane, exponent, p.scale); });
      walk_down(columns, kTile, warp, [&](int row, float2 exponent) { gate_pair(k, k, row, lane, exponent); });
      Core::publish();
      __syncthreads();
      std::uint32_t pairs[16], scores[16];
      {
        Accumulator a;
        Core::begin();
        if constexpr (kGroup == 0) {
          Core::template product<k_inner, k_inner, true>(a, d_o, v, thread);
          Core::template product<k_inner, k_inner, true>(d, d_o, h, thread);
        } else {
          Core::template product<k_inner, k_inner, true>(a, v, d_o, thread);
          Core::template product<k_inner, k_inner, true>(d, v, x_tile, thread);
        }
        Core::finish(a, d);
        select_pairs(pairs, a);
      }
      if constexpr (kGroup == 0) {
        Core::begin();
        Core::template product<k_inner, k_outer, true>(dv, k, x_tile, thread);
        Core::finish(dv);
      } else {
        Core::begin(dh);
        Core::template product<k_outer, k_outer>(dh, q, d_o, thread);
        Core::finish(dh);
        put_beyond(index - 1, dot_rows(h, dh, thread));
      }
      __syncthreads();  // v, h, x, q~ and k~ are done with
      reload(index);
      __syncthreads();
      Aside products(d);
      const Aside others(kGroup == 0 ? dv : dh);
      std::uint32_t steep_pairs[16], steep_scores[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) steep_pairs[i] = pairs[i];
      const int v_at = static_cast<int>(v - base);
      finish_steep_group<GateTile::narrow, kGroup>(products.kept, steep_scores, steep_pairs, q, k, x_tile,
                                                   FloatTile{shared, v_at, v_at}, gates, sums, p.scale, thread);
      products.restore(d);
      others.restore(kGroup == 0 ? dv : dh);
      if constexpr (kGroup == 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i) scores[i] = steep_scores[i];
        Core::begin(scores, dv);
        Core::template product<k_outer>(dv, scores, d_o, thread);
        Core::finish(dv);
        scale_rows(d, p.scale, p.scale);
      }
    }
    __syncthreads();  // the operands have been read

    put_products<Core>(kGroup == 0 ? d_o : v, kGroup == 0 ? h : x_tile, own_tile, d, kGroup == 0 ? 1.0f : -1.0f,
                       fresh_thread());
    __syncwarp();
    if constexpr (kGroup == 0) {
      store(index, own_tile, Places::dv, f.gradients.dv, dv, rows, p.value_dim);
    }
    if (!steep) {
      visit_sums<false, 1>({g}, fresh_thread(), [&](int t, const float(&sums)[8]) {
        const float factor = kGroup == 0 ? p.scale : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) d[8 * t + i] *= factor * ptx::exp2(kSign * sums[i]);
      });
    }
    store(index, own_tile, kGroup == 0 ? Places::dq : Places::dk, kGroup == 0 ? f.gradients.dq : f.gradients.dk, d,
          rows, p.key_dim);
    if (kGroup == 1 && fresh_thread() < 32) places.step_back(index, fresh_thread());
    Core::publish();
    __syncthreads();  // E is there
    if constexpr (kGroup == 1) {
      if (f.gradients.dg.data != nullptr) {
        const std::uint32_t parts[4] = {d_o, h, v, x_tile};
        const std::uint32_t from_beyond = beyond + (index & 1) * kTile * 4;
        visit_sums<true, 4>(parts, fresh_thread(), [&](int t, float(&sums)[8]) {
          const int thread = fresh_thread();
          std::uint32_t r[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = column_of_element(thread, 8 * t + 2 * i);
            r[i] = ptx::pack_bf16(sums[2 * i] + float_at(from_beyond, column),
                                  sums[2 * i + 1] + float_at(from_beyond, column + 1));
          }
          Core::put_fragment(own_tile, r, t, thread);
        });
        __syncwarp();
        store_tile_rows(own_tile, places.get<__nv_bfloat16>(index, Places::dg), static_cast<int>(f.gradients.dg.token),
                        rows, p.key_dim);
      }
    }
  }
  if constexpr (kGroup == 1) {
    if (f.dh0 != nullptr) write_state(f.dh0 + state_at(), dh, p.key_dim, p.value_dim, 0, 0, fresh_thread());
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

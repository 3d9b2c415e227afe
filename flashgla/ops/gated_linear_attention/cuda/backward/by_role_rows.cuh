// dq, dv and dk of backward/by_role.cuh.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/by_role_view.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Of a warp's 16 rows, which 8x8 blocks count: in byte k16, all ones or zeros, of the 16 columns from 16 k16 on the
// blocks below the diagonal (rows 8 to 15, columns 0 to 7), and those above it.
struct CountedBlocks {
  std::uint32_t below, above;
  __device__ __forceinline__ CountedBlocks(bool transposed, int warp) {
    const std::uint32_t before = (1u << (8 * warp)) - 1, after = ~(before << 8 | 0xffu);  // columns, of the warp's own
    below = transposed ? after : ~after;
    above = transposed ? ~before : before;
  }
};
// Pairs of an accumulator [query][key] (transposed: [key][query]) times w, rounded, as an operand. Outside the pairs
// that count a factor may be infinite; it is masked, not multiplied by zero.
template <bool kGated>
__device__ __forceinline__ void weigh_pairs(std::uint32_t (&pairs)[16], const Accumulator& a, bool transposed,
                                            std::uint32_t sums, float scale, const CountedBlocks& blocks, int thread) {
  const int row = thread % 32 / 4, column = 2 * (thread % 4);
  // scale 2^(b_query - b_key) = +-2^(b_query + log2 |scale| - b_key)
  const float log_scale = __log2f(fabsf(scale)), sign = transposed ? 1.0f : -1.0f;
  float own[2];
  if constexpr (kGated) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own[half] = fmaf(-sign, float_at(sums, row_of_element(thread, 2 * half)), log_scale);
    }
  }
  const std::uint32_t minus = kGated && scale < 0.0f ? 0x80008000u : 0u;
  // Of an 8x8 block on the diagonal.
  const std::uint32_t diagonal = ((transposed ? column >= row : row >= column) ? 0xffffu : 0u) |
                                 ((transposed ? column + 1 >= row : row >= column + 1) ? 0xffff0000u : 0u);
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t x[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * k16 + half;
      float2 b;
      if constexpr (kGated) b = load_shared_float2(sums + 4 * (8 * j + column));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float of_x = kGated ? ptx::exp2(fmaf(sign, b.x, own[i])) : scale,
                    of_y = kGated ? ptx::exp2(fmaf(sign, b.y, own[i])) : scale;
        x[2 * half + i] = ptx::pack_bf16(a[4 * j + 2 * i] * of_x, a[4 * j + 2 * i + 1] * of_y);
      }
    }
    const std::uint32_t below = __byte_perm(blocks.below, 0, 0x1111 * k16),
                        above = __byte_perm(blocks.above, 0, 0x1111 * k16),
                        mask = (diagonal | (below & above)) & (below | above);
    pairs[4 * k16] = (x[0] & mask) ^ minus;
    pairs[4 * k16 + 1] = (x[1] & below) ^ minus;
    pairs[4 * k16 + 2] = (x[2] & above) ^ minus;
    pairs[4 * k16 + 3] = (x[3] & mask) ^ minus;
  }
}

// Two factors as bf16, and what rounding leaves of them: so a product with both is rounded once.
__device__ __forceinline__ uint2 split_factors(float x, float y) {
  const std::uint32_t high = take_bf16(x, y);
  return make_uint2(high, ptx::pack_bf16(x, y));
}
// A tile [token][channel] as an operand [channel][token]; columns 8 k8 + 2 (thread % 4) and the next times factors(k8),
// as split_factors gives them. kRest: what rounding leaves of that.
template <bool kRest = false, class Factors>
__device__ __forceinline__ void load_weighed(std::uint32_t (&operand)[16], std::uint32_t tile, int thread,
                                             Factors factors) {
  load_operand<Stored::k_outer>(operand, tile, thread);
#pragma unroll
  for (int k8 = 0; k8 < 8; ++k8) {
    const uint2 f = factors(k8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t& word = operand[2 * k8 + i];
      const std::uint32_t product = times_split(word, f.x, f.y);
      word = kRest ? ptx::fma_bf16(word, f.y, ptx::fma_bf16(word, f.x, product ^ 0x80008000u)) : product;
    }
  }
}

// dq, dv or dk, by one group each: one code for the instruction cache's sake. With dh^T stored too they are alike,
//     pairs = x y^T, rows = x s^T times the rows' factors + pairs z:
// dq of do, v, h, k; dv of k, q, dh^T, do; dk of v, do, dh, q.
template <class View>
__device__ __forceinline__ void make_rows(const View& view, const RoleMaps& maps, Role role) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr bool kGated = View::kGated;
  const Params& p = view.p;
  const bool of_queries = role == Role::dq, of_values = role == Role::dv;
  const bool wanted = maps.rows[static_cast<int>(role)].data != nullptr;
  const int warp = __shfl_sync(0xffffffffu, fresh_thread() / 32, 0);
  const CountedBlocks blocks(!of_queries, warp);
  const std::uint32_t out_tile = view.base + Layout::out + static_cast<int>(role) * kTileBytes;
  ChunkWalk<View> at;
#pragma unroll 1
  for (SegmentWalk walk(view); walk.there(view); walk.next(view)) {
    if (walk.count == 0) continue;
#pragma unroll 1
    for (int i = walk.count - 1; i >= 0; --i) {
      const bool cut = p.sequences.cu_seqlens != nullptr && walk.rows(i) < kChunk;
      const int thread = fresh_thread();
      at.begin(walk, i);
      at.wait(view);
      const std::uint32_t q = at.stage + Layout::q, d_o = at.stage + Layout::d_o, k = at.tiles + Layout::k,
                          v = at.tiles + Layout::v, h = at.tiles + Layout::h;
      if (cut) at.clear_rows(of_queries ? d_o : of_values ? q : k, walk.rows(i));
      std::uint32_t x = v, y = d_o, s = view.base + Layout::dh, z = q;
      if (of_queries) {
        x = d_o, y = v, s = h, z = k;
      } else if (of_values) {
        x = k, y = q, s = view.base + Layout::dh_transposed, z = d_o;
      }
      Accumulator a, d;
      std::uint32_t pairs[16];
      Core::begin();
      Core::template product<k_inner, k_inner, true>(a, x, y, thread);
      Core::commit();
      Core::wait_at(of_queries ? view.ringed(Layout::h_full, at.number) : view.base + Layout::dh_full,
                    of_queries ? at.number / Layout::ring & 1 : at.gone_through & 1);
      Core::template product<k_inner, k_inner, true>(d, x, s, thread);
      Core::commit();
      Core::template wait<1>(a);
      weigh_pairs<kGated>(pairs, a, !of_queries, at.sums, p.scale, blocks, thread);
      const float total = kGated && !of_queries ? float_at(at.sums, kTile - 1) : 0.0f;
      float factors[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors[half] = of_queries ? p.scale : 1.0f;
        if constexpr (kGated) {
          const float b = float_at(at.sums, row_of_element(thread, 2 * half));
          factors[half] *= ptx::exp2(of_queries ? b : total - b);
        }
      }
      Core::template wait<0>(d);
      scale_rows(d, factors[0], factors[1]);
      Core::begin(pairs, d);
      Core::template product<k_outer>(d, pairs, z, thread);
      if (!of_queries) Core::arrive(view.base + Layout::dh_empty);
      Core::finish(d);
      if constexpr (kGated) {
        if (!of_values) {
          const float2 dot = sum_of_quad(dot_rows(of_queries ? q : k, d, thread));
          Core::wait_at(view.base + Layout::dots_empty, (at.gone_through - 1) & 1);
          if (thread % 4 == 0) {
            const int row = row_of_element(thread, 0) + (of_queries ? 0 : kTile);
            put_float(view.base + Layout::dots, row, dot.x);
            put_float(view.base + Layout::dots, row + 8, dot.y);
          }
          __syncwarp();
          Core::arrive(view.base + Layout::dots_full);
        }
      }
      at.leave(view);
      if (wanted) {
        if (thread % 32 == 0) Core::wait_for_copies_out();
        __syncwarp();
        put_rounded<Core>(out_tile, d, thread);
        // By TMA, but for rows beyond which another sequence begins.
        if (!cut) {
          Core::publish();
          __syncwarp();
          if (thread % 32 == 0) {
            const RowMap& map = maps.out[static_cast<int>(role)];
            const int token = walk.token(walk.first + i) + 16 * warp;
            Core::copy_box_out(&map.map, 0, token, walk.head * map.head_step, walk.batch * map.batch_step,
                               out_tile + 16 * 128 * warp);
            Core::commit_copies_out();
          }
        } else {
          __syncwarp();
          // Worked out anew, since it is rare.
          const Strided& out = maps.rows[anew(static_cast<int>(role))];
          char* to = walk.place(out, walk.first + i, 2);
          store_tile_rows(out_tile, reinterpret_cast<__nv_bfloat16*>(to), static_cast<int>(out.token), walk.rows(i),
                          of_values ? p.value_dim : p.key_dim, thread);
        }
      }
      at.step();
    }
  }
  if (fresh_thread() % 32 == 0) Core::wait_for_copies_out();
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// dq, dk and dg on their way out of make_dq_dk_dg (backward/keys.cuh).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/keys_gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// store_tile of rows that fit pieces, without branches: products may be under way, which the compiler would end first.
__device__ __forceinline__ void store_pieces(const Rows& r, std::uint32_t tile, int thread) {
  const int row = kRowsEach * (thread / 8), left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
  const char* to = r.data + row * r.stride + thread % 8 * 16;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const uint4 x = load_shared_16(tile + own_piece(thread, i));
    asm volatile(
        "{\n.reg .pred there;\nsetp.gt.s32 there, %5, %6;\n@there st.global.v4.b32 [%0], {%1,%2,%3,%4};\n}" ::"l"(
            to + i * r.stride),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(left), "r"(i)
        : "memory");
  }
}

// As so many numbers of bf16 e is summed, where gates are a tile.
template <GatesAs kGate>
constexpr int kPartsOfE = kGate == GatesAs::f32 ? 3 : 2;

template <class View>
struct PairGradients {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  static constexpr GatesAs kGate = View::kGate;
  static constexpr bool kGated = View::kGated;
  // b is times this to base 2.
  static constexpr float kBase = View::kTileOfGates ? kLog2E : 1.0f;
  const View& view;
  const PairPlace& at;
  const Accumulator& b;       // running sums of gates, of steep tiles none
  const float* const starts;  // of the columns' exponents, of dq and of dk
  const std::uint32_t own_k, own_gates;
  const int channel, query_head, thread;
  const bool steep;
  const float of_dq, of_dk;  // their factors without gates

  __device__ __forceinline__ int channel_again() const {
    return again<Core>(channel, [&] { return at.key_tile * kTile; });
  }
  __device__ __forceinline__ int column(int j) const { return 8 * j + 2 * (thread & 3); }
  // Through the tile that k~ was in, each warp's rows by themselves. Without a branch: products are under way.
  template <class Factor>
  __device__ __forceinline__ void store(const Strided& to, int head, const Accumulator& a, Factor factor,
                                        bool by_logits = false) const {
    const Params& p = view.p;
    __syncwarp();
    put_pairs<Core>(own_k, thread, [&](int i) {
      const float2 f = factor(2 * i);
      return ptx::pack_bf16(a[2 * i] * f.x, a[2 * i + 1] * f.y);
    });
    __syncwarp();
    Rows to_rows = view.rows_at(at, to, 2, head, channel_again(), p.key_dim);
    if (to.data == nullptr) to_rows.rows = 0;
    if constexpr (kGate == GatesAs::bf16) {
      if (by_logits) {
        if (steep) {  // the gates' place was another's
          const Rows logits = view.rows_at(at, p.g, 2, head, channel_again(), p.key_dim);
          return store_tile_by_logits(to_rows, logits, own_k, p, fresh_thread());
        }
        return store_tile_by_gates(to_rows, own_gates, own_k, p, fresh_thread());
      }
    }
    store_pieces(to_rows, own_k, thread);
  }
  __device__ __forceinline__ void store_gradient(bool of_queries, const Accumulator& a) const {
    const Strided& to = of_queries ? view.d.dq : view.d.dk;
    const float* exponents = starts + (of_queries ? 0 : kTile);
    const float base_of = of_queries ? kBase : -kBase, scale = of_queries ? of_dq : of_dk;
    store(to, of_queries ? query_head : at.kv_head, a, [&](int i) {
      if constexpr (kGated) {
        const float2 start = *reinterpret_cast<const float2*>(exponents + column(i / 4));
        return make_float2(ptx::exp2(b[i] * base_of + start.x), ptx::exp2(b[i + 1] * base_of + start.y));
      } else {
        return make_float2(scale, scale);
      }
    });
  }
  // dg of a tile of gates: sums from the chunk's end back, of e as put_e has left it, while dq and dk leave.
  __device__ __forceinline__ void store_with_gates(const Accumulator& across, const Accumulator& within,
                                                   const float* signs, const float* run) const {
    constexpr Stored k_outer = View::k_outer;
    const bool late = view.late;
    const std::uint32_t tiles[3] = {view.own_tile(Layout::a), view.own_tile(Layout::q), own_gates};
    std::uint32_t triangle[16];
    triangle_of_ones<Triangle::upper>(triangle, thread);
    Core::publish();
    View::meet_group();
    Accumulator dg;
    Core::begin(triangle);
    Core::template product<k_outer, true>(dg, triangle, tiles[0], thread);
#pragma unroll
    for (int i = 1; i < kPartsOfE<kGate>; ++i) Core::template product<k_outer>(dg, triangle, tiles[i], thread);
    Core::commit();
    store_gradient(late, across);
    store_gradient(!late, within);
    Core::template wait<0>(dg);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 more = *reinterpret_cast<const float2*>(run + column(j)),
                   sign = *reinterpret_cast<const float2*>(signs + column(j));
      dg[4 * j] = dg[4 * j] * sign.x + more.x;
      dg[4 * j + 1] = dg[4 * j + 1] * sign.y + more.y;
      dg[4 * j + 2] = dg[4 * j + 2] * sign.x + more.x;
      dg[4 * j + 3] = dg[4 * j + 3] * sign.y + more.y;
    }
    if constexpr (kGate == GatesAs::bf16) {
      store(
          view.d.dg, at.kv_head, dg, [](int) { return make_float2(1.0f, 1.0f); }, view.p.logit_scale != 0.0f);
    } else if (view.d.dg.data != nullptr) {
      const Rows to = view.rows_at(at, view.d.dg, 4, at.kv_head, channel_again(), view.p.key_dim);
      const int own = thread_shuffled<Core>(thread);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = row_of_element(own, 2 * i), c = column_of_element(own, 2 * i);
        if (r < to.rows && c < to.channels) {
          store_two(reinterpret_cast<float*>(const_cast<char*>(to.data) + r * static_cast<std::int64_t>(to.stride)) + c,
                    make_float2(dg[2 * i], dg[2 * i + 1]));
        }
      }
    }
  }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda

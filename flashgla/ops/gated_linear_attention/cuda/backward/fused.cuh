// The backward of heads of up to 64 x 64 with key gates of f32 in one kernel: a block walks a sequence and head back in
// time with the state's gradient in registers; each input is read once and each gradient leaves once. Equations:
// backward/keys.cuh; roles and shared memory: backward/README.md.
#pragma once

#include <type_traits>

#include "flashgla/ops/gated_linear_attention/cuda/backward/one_kernel.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/steep.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kFusedWarps = 8, kFusedRows = kTile / kFusedWarps;  // rows of a chunk a warp walks

struct FusedShared {
  // Factors of steep chunks take v and h, X takes x; dq's accumulator takes d_o and v; dk's takes h and x.
  static constexpr int q = 0, k = kTileBytes, d_o = 2 * kTileBytes, v = 3 * kTileBytes, h = 4 * kTileBytes,
                       gates = 5 * kTileBytes;
  static constexpr int x = gates + gate_bytes(GateTile::wide);  // dh^
  static constexpr int prefix = x + kTileBytes, suffix = prefix + kFusedWarps * kTile * 4;
  static constexpr int beyond = suffix + kFusedWarps * kTile * 4, places = beyond + kTile * 4;
  // rows: as RowsShared has them; index: with mma.sync, of the chunk under way.
  static constexpr int rows = places + 3 * Places::count * 8, index = rows + 2 * 4, total = index + 4;
};

// 64 rows of 64 floats whose eight-column blocks are permuted by the row; the upper 32 rows may lie elsewhere.
struct FloatTile {
  char* shared;
  int low, high;  // offsets; of the upper rows less 32 rows
  __device__ __forceinline__ float* at(int row, int column) const {
    const int at = (row < 32 ? low : high) + row * 256 + ((((column >> 3) ^ row) & 7) << 5) + ((column & 7) << 2);
    return reinterpret_cast<float*>(shared + at);
  }
  __device__ __forceinline__ void put(const Accumulator& a, int thread) const {
    const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<float2*>(at(row, 8 * j + 2 * (lane & 3))) = make_float2(a[4 * j], a[4 * j + 1]);
      *reinterpret_cast<float2*>(at(row + 8, 8 * j + 2 * (lane & 3))) = make_float2(a[4 * j + 2], a[4 * j + 3]);
    }
  }
  __device__ __forceinline__ void put(const Local<float, 32>& a, int thread) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) *at(row_of_element(thread, i), column_of_element(thread, i)) = a.x[i];
  }
  __device__ __forceinline__ void subtract(const Local<float, 32>& a, int thread) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) *at(row_of_element(thread, i), column_of_element(thread, i)) -= a.x[i];
  }
};

// Keeps queries at or after their key: of [query][key], and of [key][query].
__device__ __forceinline__ void mask(Accumulator& a, int thread) {
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i] = row_of_element(thread, i) >= column_of_element(thread, i) ? a[i] : 0.0f;
}
__device__ __forceinline__ void mask_transposed(Accumulator& a, int thread) {
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i] = column_of_element(thread, i) >= row_of_element(thread, i) ? a[i] : 0.0f;
}

// A steep chunk, one thread group's part of it; the groups meet at its barriers. d: dq or dk from beyond the chunk,
// which gets its factors, and the pairs inside come to it. pairs: a_ij, [query][key] for dq and [key][query] for dk.
// The first group finds the scores, [key][query], as well. q, k: as loaded; x: room for a tile.
// e: scale q dq or k dk, for dg. What both have in common is the same rounded numbers in both, and what a token has
// with itself is in neither, for of strong gates their difference is far smaller than they are. The first group's e
// from beyond the chunk is summed over the tokens into `from_queries`, by warp: dg's sum takes it away again.
template <class Core, GateTile kGate>
static __device__ __forceinline__ void finish_steep_group(bool first_group, Local<float, 32>& d, Local<float, 32>& e,
                                                          float* from_queries, Local<std::uint32_t, 16>& scores,
                                                          const Local<std::uint32_t, 16>& pairs, std::uint32_t q,
                                                          std::uint32_t k, std::uint32_t x, FloatTile factors,
                                                          const char* gates, const float* prefix, float scale) {
  const auto factor = [&](int thread, int i) {
    return *factors.at(row_of_element(thread, i), column_of_element(thread, i));
  };
  const auto own_warp = [&] { return fresh_thread() / 32 + (first_group ? 0 : 4); };
  const auto own_columns = [&] {
    return GateColumns<kGate, kFusedWarps>{gates, prefix, own_warp(), fresh_thread() % 32};
  };
  const auto put_power = [&](int row, float2 sum) {
    *reinterpret_cast<float2*>(factors.at(row, 2 * (fresh_thread() % 32))) =
        make_float2(ptx::exp2(sum.x), ptx::exp2(sum.y));
  };
  // This thread's elements of a tile, two at a time: visit(i, of elements i and i + 1 of an accumulator).
  const auto visit_tile = [&](std::uint32_t tile, auto visit) {
    const int thread = thread_shuffled<Core>(fresh_thread());
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      std::uint32_t r[4];
      __syncwarp();
      TensorCore80::load_a<Stored::k_inner>(r, tile, k16, thread);
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(8 * k16 + 2 * i, ptx::unpack_bf16(r[i]));
    }
  };
  const auto apply_factors = [&] {
    __syncwarp();
    const int thread = fresh_thread();
#pragma unroll
    for (int i = 0; i < 32; ++i) d.x[i] = d.x[i] * factor(thread, i);
    const float own_scale = first_group ? scale : 1.0f;
    visit_tile(first_group ? q : k, [&](int i, float2 x) {
      e.x[i] = own_scale * (x.x * d.x[i]);
      e.x[i + 1] = own_scale * (x.y * d.x[i + 1]);
    });
  };
  walk_up(own_columns(), kTile, own_warp(), put_power);
  __syncthreads();
  if (first_group) {
    apply_factors();
    const int thread = fresh_thread();
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // of the lane's two rows
      const int at = 4 * (i / 2) + i % 2;
      float sum = e.x[at] + e.x[at + 2];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (thread % 32 < 4) from_queries[thread / 32 * kTile + column_of_element(thread, at)] = sum;
    }
  }
  __syncthreads();
  walk_down(own_columns(), kTile, own_warp(), put_power);
  __syncthreads();
  if (!first_group) apply_factors();
  const float pair_scale = first_group ? 1.0f : scale;
#pragma unroll 1
  for (int size = kTile / 2;; size /= 2) {
    if (size > 0) {
      __syncthreads();
      const int lane = fresh_thread() % 32;
      put_level(x, q, k, own_columns(), size, own_warp(), lane,
                [&](int row, float2 power) { *reinterpret_cast<float2*>(factors.at(row, 2 * lane)) = power; });
      __syncthreads();
    }
    Accumulator s;
    if (first_group) {
      const int thread = fresh_thread();
      clear(s);
      TensorCore80::product<Stored::k_inner, Stored::k_inner>(s, size > 0 ? x : k, size > 0 ? x : q, thread);
      std::uint32_t found[16] = {};
      if (size < kTile / 2) scores.get(found);
      merge_level<true>(found, s, size, scale, fresh_thread());
      scores.put(found);
    }
    __syncwarp();
    clear(s);
    std::uint32_t operand[16];
    pairs.get(operand);
    add_masked_product(s, operand,
                       size > 0      ? x
                       : first_group ? k
                                     : q,
                       fresh_thread(), [=](int row, int column) {
                         return first_group ? counts(row, column, size) : counts(column, row, size);
                       });
    const int thread = fresh_thread();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i % 8 == 0) __syncwarp();
      d.x[i] = d.x[i] + pair_scale * (size > 0 ? factor(thread, i) : 1.0f) * s[i];
    }
    if (size == 0) break;
    visit_tile(x, [&](int i, float2 own) {  // rows that are not of the group's side have no pairs
      e.x[i] = e.x[i] + scale * (own.x * s[i]);
      e.x[i + 1] = e.x[i + 1] + scale * (own.y * s[i + 1]);
    });
  }
}

// Grid: N x G. One query head a kv head; states kept. kGroup: the part of one thread group; the
// groups meet at the block's barriers, of which both pass the same number.
template <class Core, int kGroup>
__device__ __forceinline__ void backward_fused(const Params& p, const FusedBackward& f, char* shared) {
  using Layout = FusedShared;
  constexpr GateTile kGate = GateTile::wide;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr Loads kLoads = Loads::in_turn;
  const auto own_warp = [] { return fresh_thread() / 32 + (kGroup == 0 ? 0 : 4); };
  const int head = blockIdx.x % p.heads;
  const std::int64_t n = blockIdx.x / p.heads;
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  float* prefix = reinterpret_cast<float*>(shared + Layout::prefix);  // [8 warps][64]: sums of base-2 gates
  float* suffix = reinterpret_cast<float*>(shared + Layout::suffix);  // [8 warps][64]: sums of dg's parts
  float* beyond = reinterpret_cast<float*>(shared + Layout::beyond);  // [64]: what dg has from beyond the chunk
  char* x = shared + Layout::x;

  const std::uint32_t base = ptx::shared_address(shared);
  const Places places{base + Layout::places};
  const auto rows_place = [&](int index) { return base + Layout::rows + (index & 1) * 4; };
  const auto rows_in = [&](int index) { return static_cast<int>(load_shared_4(rows_place(index))); };
  if (threadIdx.x == 0) {
    const int last = chunks - 1;
    const auto start = [&](Places::Tensor tensor, const Strided& s, int element) {
      places.start(last, tensor, chunk_place(s, span, last, head, element), s.token * kChunk * element);
    };
    start(Places::q, p.q, 2);
    start(Places::k, p.k, 2);
    start(Places::v, p.v, 2);
    start(Places::d_o, f.gradients.d_o, 2);
    start(Places::g, p.g, 4);
    start(Places::dq, f.gradients.dq, 2);
    start(Places::dk, f.gradients.dk, 2);
    start(Places::dv, f.gradients.dv, 2);
    start(Places::dg, f.gradients.dg, 4);
    places.start(last, Places::states,
                 static_cast<const char*>(p.states) + ((span.chunk_begin + last) * p.heads + head) * kImageBytes,
                 p.heads * kImageBytes);
    store_shared_4(rows_place(last), static_cast<int>(span.length - static_cast<std::int64_t>(last) * kChunk));
  }
  __syncthreads();

  const auto copy = [&](int index, std::uint32_t tile, Places::Tensor tensor, std::int64_t stride, int channels) {
    copy_tile(tile, places.get<__nv_bfloat16>(index, tensor), static_cast<int>(stride), rows_in(index), channels,
              fresh_thread());
  };
  const auto load = [&](int index) {
    if constexpr (kGroup == 0) {
      copy(index, base + Layout::q, Places::q, p.q.token, p.key_dim);
      copy(index, base + Layout::k, Places::k, p.k.token, p.key_dim);
      copy_wide_gates(shared + Layout::gates, places.get<float>(index, Places::g), p.g.token, rows_in(index), p.key_dim,
                      fresh_thread());
    } else {
      copy(index, base + Layout::d_o, Places::d_o, f.gradients.d_o.token, p.value_dim);
      copy(index, base + Layout::v, Places::v, p.v.token, p.value_dim);
      copy_image(base + Layout::h, places.get<char>(index, Places::states), fresh_thread());
    }
    ptx::copy_async_commit();
  };
  if (chunks > 0) load(chunks - 1);

  // dh, held by the second group.
  Accumulator dh;
  const auto state_at = [&] { return fresh_block() * (static_cast<std::int64_t>(p.key_dim) * p.value_dim); };
  const auto state_of = [&](const float* states) { return states == nullptr ? nullptr : states + state_at(); };
  auto put_beyond = [&](float* place, int thread, auto h_pair) {
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const float2 h = h_pair(i);
      sums[(i >> 1) & 1] += dh[i] * h.x + dh[i + 1] * h.y;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums[e] += __shfl_xor_sync(0xffffffffu, sums[e], 1);
      sums[e] += __shfl_xor_sync(0xffffffffu, sums[e], 2);
      if ((thread & 3) == 0) place[row_of_element(thread, 2 * e)] = sums[e];
    }
  };
  if constexpr (kGroup == 1) {
    const int thread = fresh_thread();
    read_state(dh, state_of(f.d_ht), p.key_dim, p.value_dim, 0, 0, thread);
  }

#pragma unroll 1
  for (int index = chunks - 1; index >= 0; --index) {
    char *q = shared + Layout::q, *k = shared + Layout::k, *gates = shared + Layout::gates;
    const std::uint32_t q_tile = ptx::shared_address(q), k_tile = ptx::shared_address(k),
                        do_tile = ptx::shared_address(shared + Layout::d_o);
    const std::uint32_t v_tile = ptx::shared_address(shared + Layout::v),
                        h_tile = ptx::shared_address(shared + Layout::h), x_tile = ptx::shared_address(x);
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (kGroup == 0 && fresh_thread() < 32) {
      places.step_back(index, fresh_thread());
      if (fresh_thread() == 0) {
        store_shared_4(rows_place(index - 1), kChunk);
        store_shared_4(base + Layout::index, index);
      }
    }

    auto store_dv = [&](const Accumulator& dv) {
      const int thread = fresh_thread();
      if (!f.gradients.dv.data) return;
      const int row = row_of_element(thread, 0), column = column_of_element(thread, 0);
      const int rows = rows_in(index), stride = anew(static_cast<int>(f.gradients.dv.token));
      __nv_bfloat16* to = places.get<__nv_bfloat16>(index, Places::dv) + row * stride + column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int inside = row + 8 * half < rows ? p.value_dim - column : 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int i = 4 * j + 2 * half;
          if (8 * j < inside) store_two(to + 8 * j, make_float2(dv[i], dv[i + 1]));
        }
        to += 8 * stride;
      }
    };

    // Gates: b before the warp's rows, and the whole chunk's.
    const auto sum_to = [&](int end) {
      float2 sum = make_float2(0.0f, 0.0f);
      const int lane = fresh_thread() % 32;
#pragma unroll
      for (int w = 0; w < kFusedWarps; ++w) {
        const float2 part = *reinterpret_cast<const float2*>(prefix + w * kTile + 2 * lane);
        sum.x += w < end ? part.x : 0.0f;
        sum.y += w < end ? part.y : 0.0f;
      }
      return sum;
    };
    {
      const int lane = fresh_thread() % 32;
      float2 sum = make_float2(0.0f, 0.0f);
      const int warp = own_warp(), first = kFusedRows * warp;
#pragma unroll
      for (int i = 0; i < kFusedRows; ++i) {
        const float2 g = gate_at<kGate>(gates, first + i, lane);
        sum.x += g.x;
        sum.y += g.y;
      }
      *reinterpret_cast<float2*>(prefix + warp * kTile + 2 * lane) = sum;
      __syncthreads();
    }
    const float2 total = sum_to(kFusedWarps);
    const bool steep = __any_sync(0xffffffffu, total.x < -kSteep || total.y < -kSteep);  // alike in every warp
    auto gate_rows = [&](auto is_steep) {
      const int lane = (fresh_thread() % 32), first = kFusedRows * own_warp();
      float2 b = sum_to(own_warp());
#pragma unroll
      for (int i = 0; i < kFusedRows; ++i) {
        const std::uint32_t at = element_offset(first + i, 2 * lane);
        const float2 y = ptx::unpack_bf16(*reinterpret_cast<std::uint32_t*>(q + at));
        const float2 z = ptx::unpack_bf16(*reinterpret_cast<std::uint32_t*>(k + at));
        const float2 g = gate_at<kGate>(gates, first + i, lane);
        b.x += g.x;
        b.y += g.y;
        const float2 from = is_steep ? total : make_float2(0.0f, 0.0f);
        *reinterpret_cast<std::uint32_t*>(q + at) =
            ptx::pack_bf16(y.x * p.scale * ptx::exp2(b.x), y.y * p.scale * ptx::exp2(b.y));
        *reinterpret_cast<std::uint32_t*>(k + at) =
            ptx::pack_bf16(z.x * ptx::exp2(from.x - b.x), z.y * ptx::exp2(from.y - b.y));
      }
    };
    if (steep) {
      gate_rows(std::true_type{});
    } else {
      gate_rows(std::false_type{});
    }
    if constexpr (kGroup == 1) {
      const int thread = fresh_thread();
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float decay = 0.0f;
#pragma unroll
        for (int w = 0; w < kFusedWarps; ++w) decay += prefix[w * kTile + row_of_element(thread, 2 * e)];
        factor[e] = ptx::exp2(decay);
      }
      if (steep) put_tile(x, dh, thread);
#pragma unroll
      for (int i = 0; i < 32; ++i) dh[i] *= factor[(i >> 1) & 1];
      if (!steep) put_tile(x, dh, thread);
    }
    Core::publish();
    __syncthreads();

    const FloatTile e_sums{shared, Layout::q, Layout::q};  // of steep chunks, when q and k have been read: dg's parts
    Accumulator d;                                         // of the first group dq, of the second dk
    int thread = fresh_thread();
    if constexpr (kGroup == 0) {
      Accumulator dv, pairs;  // pairs: [query][key]
      std::uint32_t operand[16] = {};
      if (!steep && std::is_same_v<Core, TensorCore80>) {
        // One product at a time, in a loop, for unrolled ptxas has both under way: scores, then pairs.
        std::uint32_t scores_operand[16];
#pragma unroll 1
        for (bool of_scores = true;; of_scores = false) {
#pragma unroll
          for (int i = 0; i < 16; ++i) scores_operand[i] = operand[i];
          Core::template product<k_inner, k_inner, true, kLoads>(
              pairs, of_scores ? k_tile : do_tile, of_scores ? q_tile : v_tile, thread_shuffled<Core>(thread));
          select_pairs(operand, pairs, of_scores, thread_shuffled<Core>(thread));
          if (!of_scores) break;
        }
        Core::template product<k_outer, true, kLoads>(dv, scores_operand, do_tile, thread_shuffled<Core>(thread));
        Core::template product<k_inner, k_outer, false, kLoads>(dv, k_tile, x_tile, thread_shuffled<Core>(thread));
        store_dv(dv);
        Core::template product<k_outer, true, kLoads>(d, operand, k_tile, thread_shuffled<Core>(thread));
        Core::template product<k_inner, k_inner, false, kLoads>(d, do_tile, h_tile, thread_shuffled<Core>(thread));
      } else if (!steep) {
        Accumulator scores;  // [key][query]
        Core::begin();
        Core::template product<k_inner, k_inner, true>(scores, k_tile, q_tile, thread);
        Core::template product<k_inner, k_inner, true>(pairs, do_tile, v_tile, thread);
        Core::finish(scores, pairs);
        mask_transposed(scores, thread);
        mask(pairs, thread);
        std::uint32_t scores_operand[16];
        to_operand(scores_operand, scores);
        to_operand(operand, pairs);
        Core::begin(scores_operand);
        Core::template product<k_outer, true>(dv, scores_operand, do_tile, thread);
        Core::template product<k_inner, k_outer>(dv, k_tile, x_tile, thread);
        Core::finish(dv);
        store_dv(dv);
        Core::begin(operand);
        Core::template product<k_outer, true>(d, operand, k_tile, thread);
        Core::template product<k_inner, k_inner>(d, do_tile, h_tile, thread);
        Core::finish(d);
      } else {
        Local<float, 32> sums, values, parts_of_dg;
        Local<std::uint32_t, 16> steep_pairs, steep_scores;
        Core::begin();
        Core::template product<k_inner, k_outer, true, kLoads>(dv, k_tile, x_tile, thread_shuffled<Core>(thread));
        Core::finish(dv);
        values.put(dv);
        Core::begin();
        Core::template product<k_inner, k_inner, true, kLoads>(pairs, do_tile, v_tile, thread_shuffled<Core>(thread));
        Core::finish(pairs);
        mask(pairs, thread);
        to_operand(operand, pairs);
        steep_pairs.put(operand);
        Core::begin();
        Core::template product<k_inner, k_inner, true, kLoads>(d, do_tile, h_tile, thread_shuffled<Core>(thread));
        Core::finish(d);
        sums.put(d);
        __syncthreads();  // 1 of steep chunks: v, h, x, q~ and k~ are done with
        copy(index, q_tile, Places::q, p.q.token, p.key_dim);
        copy(index, k_tile, Places::k, p.k.token, p.key_dim);
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        __syncthreads();  // 2: q and k are there
        Local<int, 1> walk;
        int place[1] = {index};
        walk.put(place);
        finish_steep_group<Core, kGate>(true, sums, parts_of_dg, suffix, steep_scores, steep_pairs, q_tile, k_tile,
                                        x_tile, FloatTile{shared, Layout::v, Layout::v}, gates, prefix, p.scale);
        walk.get(place);
        index = place[0];
        values.get(dv);
        steep_scores.get(operand);
        Core::begin(operand, dv);
        Core::template product<k_outer, false, kLoads>(dv, operand, do_tile, fresh_thread());
        Core::finish(dv);
        store_dv(dv);
        __syncthreads();  // 3: q and k have been read
        e_sums.put(parts_of_dg, thread_shuffled<Core>(fresh_thread()));
        __syncthreads();  // 4
        sums.get(d);
      }
    } else {
      // What dg has from beyond the chunk: the state before the chunk times its gradient. q dq of earlier tokens is
      // taken away from it again, so the queries' part of the gradient is the same numbers as in dq.
      const auto put_state_product = [&] {
        const int thread = thread_shuffled<Core>(fresh_thread());
        put_beyond(beyond, thread, [&](int i) {
          return ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(
              shared + Layout::h + element_offset(row_of_element(thread, i), column_of_element(thread, i))));
        });
      };
      if (!steep && std::is_same_v<Core, TensorCore80>) {
        Core::template product<k_outer, k_outer, false, kLoads>(dh, q_tile, do_tile, thread_shuffled<Core>(thread));
        put_state_product();
        Core::template product<k_inner, k_inner, true, kLoads>(d, v_tile, x_tile, thread_shuffled<Core>(thread));
        std::uint32_t operand[16];
        {
          Accumulator pairs;  // [key][query]
          Core::template product<k_inner, k_inner, true, kLoads>(pairs, v_tile, do_tile, thread_shuffled<Core>(thread));
          select_pairs<true>(operand, pairs, thread_shuffled<Core>(thread));
        }
        Core::template product<k_outer, false, kLoads>(d, operand, q_tile, thread_shuffled<Core>(thread));
      } else if (!steep) {
        Accumulator pairs;  // [key][query]
        Core::begin();
        Core::template product<k_inner, k_inner, true>(pairs, v_tile, do_tile, thread);
        Core::finish(pairs);
        mask_transposed(pairs, thread);
        std::uint32_t operand[16];
        to_operand(operand, pairs);
        Core::begin(operand, dh);
        Core::template product<k_inner, k_inner, true>(d, v_tile, x_tile, thread);
        Core::template product<k_outer>(d, operand, q_tile, thread);
        Core::template product<k_outer, k_outer>(dh, q_tile, do_tile, thread);
        Core::finish(d, dh);
        put_state_product();
      } else {
        Accumulator pairs;  // [key][query]
        Local<float, 32> sums, gradient, parts_of_dg;
        Local<std::uint32_t, 16> steep_pairs, no_scores;
        put_state_product();  // the queries' part is the other group's
        Core::begin(dh);
        Core::template product<k_outer, k_outer, false, kLoads>(dh, q_tile, do_tile, thread_shuffled<Core>(thread));
        Core::finish(dh);
        gradient.put(dh);
        Core::begin();
        Core::template product<k_inner, k_inner, true, kLoads>(pairs, v_tile, do_tile, thread_shuffled<Core>(thread));
        Core::finish(pairs);
        mask_transposed(pairs, thread);
        std::uint32_t operand[16];
        to_operand(operand, pairs);
        steep_pairs.put(operand);
        Core::begin();
        Core::template product<k_inner, k_inner, true, kLoads>(d, v_tile, x_tile, thread_shuffled<Core>(thread));
        Core::finish(d);
        sums.put(d);
        __syncthreads();  // 1
        __syncthreads();  // 2
        finish_steep_group<Core, kGate>(false, sums, parts_of_dg, suffix, no_scores, steep_pairs, q_tile, k_tile,
                                        x_tile, FloatTile{shared, Layout::v, Layout::v}, gates, prefix, p.scale);
        __syncthreads();  // 3
        __syncthreads();  // 4: the first group's part is there
        e_sums.subtract(parts_of_dg, thread_shuffled<Core>(fresh_thread()));
        sums.get(d);
        gradient.get(dh);
      }
    }
    __syncthreads();
    index = again<Core>(index, [&] { return static_cast<int>(load_shared_4(base + Layout::index)); });
    if (kGroup == 1 && steep && fresh_thread() < kTile) {
      float* sum = beyond + fresh_thread();
#pragma unroll
      for (int w = 0; w < 4; ++w) *sum += suffix[w * kTile + fresh_thread()];
    }
    const FloatTile dq_sums{shared, Layout::d_o, Layout::d_o};
    const FloatTile dk_sums{shared, Layout::h, Layout::x - kTileBytes};
    (kGroup == 0 ? dq_sums : dk_sums).put(d, fresh_thread());
    __syncthreads();
    const int lane = (fresh_thread() % 32);

    // dq and dk, row by row, and dg's part of the row.
    float2 part[kFusedRows], sum = make_float2(0.0f, 0.0f);
    const int first = kFusedRows * own_warp();
    const int rows_inside = 2 * lane < p.key_dim ? rows_in(index) - first : 0;
    auto finish_rows = [&](auto is_steep) {
      const int dq_stride = anew(static_cast<int>(f.gradients.dq.token)),
                dk_stride = anew(static_cast<int>(f.gradients.dk.token));
      __nv_bfloat16* dq_to = places.get<__nv_bfloat16>(index, Places::dq) + first * dq_stride + 2 * lane;
      __nv_bfloat16* dk_to = places.get<__nv_bfloat16>(index, Places::dk) + first * dk_stride + 2 * lane;
      const int dq_inside = f.gradients.dq.data ? rows_inside : 0, dk_inside = f.gradients.dk.data ? rows_inside : 0;
      float2 b = sum_to(own_warp());
#pragma unroll
      for (int i = 0; i < kFusedRows; ++i) {
        const int r = first + i;
        float2 dq = *reinterpret_cast<const float2*>(dq_sums.at(r, 2 * lane));
        float2 dk = *reinterpret_cast<const float2*>(dk_sums.at(r, 2 * lane));
        if (is_steep) {  // q and k are plain
          dq.x *= p.scale;
          dq.y *= p.scale;
        }
        float2 dq_factor = make_float2(1.0f, 1.0f), dk_factor = dq_factor;
        if (is_steep) {
          part[i] = *reinterpret_cast<const float2*>(e_sums.at(r, 2 * lane));
        } else {
          const float2 y = ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(q + element_offset(r, 2 * lane)));
          const float2 z = ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(k + element_offset(r, 2 * lane)));
          part[i] = make_float2(y.x * dq.x - z.x * dk.x, y.y * dq.y - z.y * dk.y);
        }
        sum.x += part[i].x;
        sum.y += part[i].y;
        if (!is_steep) {
          const float2 g = gate_at<kGate>(gates, r, lane);
          b.x += g.x;
          b.y += g.y;
          dq_factor = make_float2(p.scale * ptx::exp2(b.x), p.scale * ptx::exp2(b.y));
          dk_factor = make_float2(ptx::exp2(-b.x), ptx::exp2(-b.y));
        }
        if (i < dq_inside) store_two(dq_to, make_float2(dq.x * dq_factor.x, dq.y * dq_factor.y));
        if (i < dk_inside) store_two(dk_to, make_float2(dk.x * dk_factor.x, dk.y * dk_factor.y));
        dq_to += dq_stride;
        dk_to += dk_stride;
      }
    };
    if (steep) {
      finish_rows(std::true_type{});
    } else {
      finish_rows(std::false_type{});
    }
    *reinterpret_cast<float2*>(suffix + own_warp() * kTile + 2 * lane) = sum;
    __syncthreads();
    const int warp = own_warp();
    float2 run = *reinterpret_cast<const float2*>(beyond + 2 * lane);
#pragma unroll
    for (int w = 0; w < kFusedWarps; ++w) {
      const float2 other = *reinterpret_cast<const float2*>(suffix + w * kTile + 2 * lane);
      run.x -= w < warp ? other.x : 0.0f;
      run.y -= w < warp ? other.y : 0.0f;
    }
    const int dg_stride = anew(static_cast<int>(f.gradients.dg.token));
    float* dg_to = places.get<float>(index, Places::dg) + first * dg_stride + 2 * lane;
    const int dg_inside = f.gradients.dg.data ? rows_inside : 0;
#pragma unroll
    for (int i = 0; i < kFusedRows; ++i) {
      if (i < dg_inside) store_two(dg_to, run);
      run.x -= part[i].x;
      run.y -= part[i].y;
      dg_to += dg_stride;
    }
    __syncthreads();
    if (index > 0) load(index - 1);
  }

  if constexpr (kGroup == 1) {
    if (f.dh0 != nullptr) write_state(f.dh0 + state_at(), dh, p.key_dim, p.value_dim, 0, 0, fresh_thread());
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Steep tiles, exact for any gates: pairs of tokens one by one, the decay between two a running product from one to the
// other. Thread: token threadIdx.x / 2, and every second pair of neighbouring channels. decays: 2^gates, a tile of
// floats.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/tiles.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

struct ExactDecays {
  float2 product[16];
  __device__ __forceinline__ ExactDecays() {
#pragma unroll
    for (int m = 0; m < 16; ++m) product[m] = make_float2(1.0f, 1.0f);
  }
  static __device__ __forceinline__ int channel(int m) { return 4 * m + 2 * (static_cast<int>(threadIdx.x) & 1); }
  __device__ __forceinline__ void pass(const float* decays, int row) {
#pragma unroll
    for (int m = 0; m < 16; ++m) {
      const float2 decay = two_at(decays, row, channel(m));
      product[m].x *= decay.x;
      product[m].y *= decay.y;
    }
  }
};

// scores[query][key], query >= key: a tile of floats, from q and k without gates.
template <int kParts>
__device__ __noinline__ void exact_scores(float* scores, std::uint32_t q, std::uint32_t k, const float* decays) {
  const int query = static_cast<int>(threadIdx.x) / 2;
  ExactDecays between;
  for (int step = 0; step < 64; ++step) {
    const int key = query - step;
    float score = 0.0f;
    if (key >= 0) {
#pragma unroll
      for (int m = 0; m < 16; ++m) {
        const int channel = ExactDecays::channel(m);
        const float2 x = two_of<kParts>(q, query, channel), y = two_of<kParts>(k, key, channel),
                     factor = between.product[m];
        score += x.x * y.x * factor.x + x.y * y.y * factor.y;
      }
      between.pass(decays, key);
    }
    score += __shfl_xor_sync(0xffffffffu, score, 1);
    if (key >= 0 && (threadIdx.x & 1) == 0) scores[float_place(query, key)] = score;
  }
}

// The exact scores of a thread's elements; transposed: rows are keys.
__device__ __forceinline__ void add_exact(Accumulator& scores, const float* exact, bool transposed, int thread) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = row_of_element(thread, i), column = column_of_element(thread, i);
    const int query = transposed ? column : row, key = transposed ? row : column;
    if (query >= key) scores[i] += exact[float_place(query, key)];
  }
}
// A tile's rows times 2^(gates up to and with the row), or with kLater 2^(gates after it).
template <int kParts, bool kLater>
__device__ __noinline__ void gate_rows_exactly(std::uint32_t tile, const float* decays) {
  const int row = static_cast<int>(threadIdx.x) / 2;
  ExactDecays between;
  for (int r = kLater ? row + 1 : 0; r < (kLater ? 64 : row + 1); ++r) between.pass(decays, r);
#pragma unroll
  for (int m = 0; m < 16; ++m) {
    const float2 x = two_of<kParts>(tile, row, ExactDecays::channel(m)), factor = between.product[m];
    float rest[2] = {x.x * factor.x, x.y * factor.y};
    const std::uint32_t at = tile + element_offset(row, ExactDecays::channel(m));
#pragma unroll
    for (int part = 0; part < kParts; ++part) store_shared_4(at + part * kTileBytes, take_bf16(rest[0], rest[1]));
  }
}

// pairs += weight times the factors times a row of k or q; weight: element [query][key] of a.
template <int kParts>
__device__ __forceinline__ void add_exact_pair(float2 (&pairs)[16], const ExactDecays& between, std::uint32_t a,
                                               int query, int key, std::uint32_t tile, int row) {
  const float2 two = two_of<kParts>(a, query, key & ~1);
  const float weight = key & 1 ? two.y : two.x;
#pragma unroll
  for (int m = 0; m < 16; ++m) {
    const float2 y = two_of<kParts>(tile, row, ExactDecays::channel(m)), factor = between.product[m];
    pairs[m].x += weight * y.x * factor.x;
    pairs[m].y += weight * y.y * factor.y;
  }
}

// Gradients, in place in a tile of floats, each thread its own elements. a: split, [query][key], zero above the
// diagonal. dq: what came through h times 2^b, and the pairs.
template <int kParts>
__device__ __noinline__ void finish_exact_dq(float* dq, std::uint32_t a, std::uint32_t k, const float* decays) {
  const int query = static_cast<int>(threadIdx.x) / 2;
  ExactDecays between;
  float2 pairs[16] = {};
  for (int key = query; key >= 0; --key) {
    add_exact_pair<kParts>(pairs, between, a, query, key, k, key);
    between.pass(decays, key);
  }
#pragma unroll
  for (int m = 0; m < 16; ++m) {
    float2& x = two_at(dq, query, ExactDecays::channel(m));
    const float2 factor = between.product[m];
    x = make_float2(x.x * factor.x + pairs[m].x, x.y * factor.y + pairs[m].y);
  }
}
// dk: what came through dh times 2^(later gates).
static __device__ __noinline__ void scale_exact_dk(float* dk, const float* decays) {
  const int key = static_cast<int>(threadIdx.x) / 2;
  ExactDecays between;
  for (int row = key + 1; row < 64; ++row) between.pass(decays, row);
#pragma unroll
  for (int m = 0; m < 16; ++m) {
    float2& x = two_at(dk, key, ExactDecays::channel(m));
    const float2 factor = between.product[m];
    x = make_float2(x.x * factor.x, x.y * factor.y);
  }
}
// dk: the pairs come to it.
template <int kParts>
__device__ __noinline__ void add_exact_dk_pairs(float* dk, std::uint32_t a, std::uint32_t q, const float* decays) {
  const int key = static_cast<int>(threadIdx.x) / 2;
  ExactDecays between;
  float2 pairs[16] = {};
  for (int query = key; query < 64; ++query) {
    if (query > key) between.pass(decays, query);
    add_exact_pair<kParts>(pairs, between, a, query, key, q, query);
  }
#pragma unroll
  for (int m = 0; m < 16; ++m) {
    float2& x = two_at(dk, key, ExactDecays::channel(m));
    x = make_float2(x.x + pairs[m].x, x.y + pairs[m].y);
  }
}
// An accumulator lies in a tile of floats while work() is done there. Three barriers.
template <class Work>
__device__ __forceinline__ void by_rows(Accumulator& d, float* tile, int thread, Work work) {
  put_floats(tile, d, thread);
  __syncthreads();
  work();
  __syncthreads();
  for_floats(tile, thread, [&](int i, float x) { d[i] = x; });
  __syncthreads();
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

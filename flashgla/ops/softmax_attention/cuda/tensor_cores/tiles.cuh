// Tiles in shared memory and a warp's products on them (mma.m16n8k16), on cards of compute capability 8.0 and more.
//
// A tile is rows of D channels of bf16, of which the head may have fewer: the others are zeros. Rows lie 16 bytes
// further apart than they are long, so that the 16-byte pieces of eight rows lie in different banks. A block has 64
// rows of what it keeps, 16 a warp. Accumulators of 16 rows and N columns: lane l has rows l/4 and l/4+8 and, of each 8
// columns, 2(l%4) and the next: element 4 (column / 8) + {0, 1} of the first row, + {2, 3} of the second.
#pragma once

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/softmax_attention/cuda/schedule.cuh"

namespace flashgla::ops::softmax_attention::cuda::tensor_cores {

constexpr int kThreads = 128, kBlockRows = 64;

template <int D>
constexpr int kPitch = 2 * D + 16;  // bytes from row to row
template <int D>
constexpr int kWarpBytes = 16 * kPitch<D>;  // of a warp's rows

// Where rows of one head come from, `token` elements apart; those outside [begin, end) are zeros in the tile.
struct RowsOfHead {
  const __nv_bfloat16* data;
  std::int64_t token;
  int begin, end;
};

// Of the call's own tokens from `token` of the sequence on.
__device__ __forceinline__ RowsOfHead rows_of_call(const Strided& x, const SequenceOfCall& s, int token, int head) {
  return {x.at<__nv_bfloat16>(s.batch, s.begin + token, head), x.token, 0, s.length - token};
}

// By all threads; what was copied is there after copy_async_wait and a barrier.
template <int D, int kRows>
__device__ __forceinline__ void copy_tile(std::uint32_t to, const RowsOfHead& rows, int channels) {
  constexpr int kPieces = D / 8;
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x), row = at / kPieces, channel = at % kPieces * 8;
    const bool there = row >= rows.begin && row < rows.end && channel < channels;
    ptx::copy_async_16(to + row * kPitch<D> + 2 * channel, there ? rows.data + row * rows.token + channel : rows.data,
                       there ? 16 : 0);
  }
}

// What a block has: 64 rows of a head from token `begin` of a sequence on.
struct Place {
  int n, head, begin;
  SequenceOfCall s;

  // Where there is nothing to do, begin >= s.length.
  __device__ __forceinline__ Place(const Call& call, const Schedule& schedule) {
    const Schedule::Work work = schedule.at(blockIdx.x);
    n = work.n;
    head = work.head;
    begin = work.tile * kBlockRows;
    s = n < 0 ? SequenceOfCall{0, 0, 0, 0} : call.sequence(n);
  }
};

// Keys and values of a tile of N that the block's queries see.
template <int D, int N>
__device__ __forceinline__ void copy_keys_and_values(const Call& call, const Place& place,
                                                     const typename KeyTiles<kBlockRows, N>::Tile& tile,
                                                     std::uint32_t k, std::uint32_t v) {
  const int g = place.head / call.group();
  const auto rows = [&](const Strided& now, const Strided& past) -> RowsOfHead {
    if (!tile.past) return rows_of_call(now, place.s, tile.begin, g);
    const Filled filled = filled_rows<N>(call, place.s, place.begin, tile.begin);
    return {past.at<__nv_bfloat16>(place.n, tile.begin, g), past.token, filled.begin, filled.end};
  };
  copy_tile<D, N>(k, rows(call.k, call.past_k), call.key_dim);
  copy_tile<D, N>(v, rows(call.v, call.past_v), call.value_dim);
}

// Calls use(i) for tiles 0 to count - 1, the next one on its way: copy(i) begins the copies of a tile, to stage i % 2.
template <class Copy, class Use>
__device__ __forceinline__ void walk(int count, const Copy& copy, const Use& use) {
  copy(0);
  ptx::copy_async_commit();
  for (int i = 0; i < count; ++i) {
    if (i + 1 < count) {
      copy(i + 1);
      ptx::copy_async_commit();
      ptx::copy_async_wait<1>();
    } else {
      ptx::copy_async_wait<0>();
    }
    __syncthreads();
    use(i);
    __syncthreads();
  }
}

template <int E>
__device__ __forceinline__ void multiply(float (&d)[E], int tile, const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  ptx::mma_bf16(reinterpret_cast<float(&)[4]>(d[4 * tile]), a, b0, b1);
}

// d = a b^T over D channels: a this warp's 16 rows, b 2 E rows.
template <int D, int E>
__device__ __forceinline__ void scores(float (&d)[E], std::uint32_t a, std::uint32_t b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int e = 0; e < E; ++e) d[e] = 0.0f;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    std::uint32_t left[4], right[4];
    ptx::load_matrix_4(left, a + lane % 16 * kPitch<D> + 16 * (2 * step + lane / 16));
#pragma unroll
    for (int tile = 0; tile < E / 4; tile += 2) {
      ptx::load_matrix_4(right, b + (8 * tile + lane % 8 + lane / 16 * 8) * kPitch<D> + 16 * (2 * step + lane / 8 % 2));
      multiply(d, tile, left, right[0], right[1]);
      multiply(d, tile + 1, left, right[2], right[3]);
    }
  }
}

// d (16 rows, D channels) += a b: a 16 rows of 4 I columns in registers, b as many rows.
template <int D, int I>
__device__ __forceinline__ void combine(float (&d)[D / 2], const std::uint32_t (&a)[I], std::uint32_t b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < I / 4; ++step) {
    const std::uint32_t left[4] = {a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3]};
    std::uint32_t right[4];
#pragma unroll
    for (int tile = 0; tile < D / 8; tile += 2) {
      ptx::load_matrix_4_transposed(right, b + (16 * step + lane % 16) * kPitch<D> + 16 * (tile + lane / 16));
      multiply(d, tile, left, right[0], right[1]);
      multiply(d, tile + 1, left, right[2], right[3]);
    }
  }
}

// An accumulator, rounded, as the left side of products.
template <int E>
__device__ __forceinline__ void round_rows(std::uint32_t (&a)[E / 2], const float (&d)[E]) {
#pragma unroll
  for (int i = 0; i < E / 2; ++i) a[i] = ptx::pack_bf16(d[2 * i], d[2 * i + 1]);
}

// Scores that are not to be seen become -inf: keys from `begin` on, of the call or the past, for a warp's rows of
// queries, `row` the lane's first of them and `first` the warp's.
template <int E>
__device__ __forceinline__ void hide(float (&s)[E], const Call& call, const SequenceOfCall& sequence, bool past,
                                     int begin, int first, int row) {
  if (!past && begin + 2 * E - 1 <= first && (call.window == 0 || begin > first + 15 - call.window)) return;
  Sight sight[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sight[half] =
        past ? Sight::of_past(call, sequence, row + 8 * half, begin) : Sight::of_call(call, row + 8 * half, begin);
    sight[half].shift(2 * static_cast<int>(threadIdx.x % 4));
  }
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const int key = 8 * (e / 4) + e % 2;
    if (!sight[e / 2 % 2].sees(key) && !sight[e / 2 % 2].sees_older(key)) s[e] = -INFINITY;
  }
}

// A warp's 16 rows of sums, times a factor for each of the lane's two rows, to [batch, token, head] of `to`.
template <int D>
__device__ __forceinline__ void store_rows(const float (&sums)[D / 2], const Strided& to, const SequenceOfCall& s,
                                           int row, int head, int channels, float first_factor, float second_factor) {
  const int own = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= s.length) continue;
    const float factor = half ? second_factor : first_factor;
    __nv_bfloat16* there = to.at<__nv_bfloat16>(s.batch, s.begin + row + 8 * half, head) + own;
#pragma unroll
    for (int tile = 0; tile < D / 8; ++tile) {
      if (8 * tile >= channels) break;
      *reinterpret_cast<std::uint32_t*>(there + 8 * tile) =
          ptx::pack_bf16(sums[4 * tile + 2 * half] * factor, sums[4 * tile + 2 * half + 1] * factor);
    }
  }
}

}  // namespace flashgla::ops::softmax_attention::cuda::tensor_cores

// The recurrence token by token, for every gate kind, dtype, feature map and size up to K = 512: the form that serves
// what the chunk kernels do not take, Algorithm::recurrent, and very short sequences.
//
// A block owns 32 value channels of one (sequence, query head): lane = value channel, warp w = key rows
// [w R, (w + 1) R), h in registers. Tokens come in tiles of kTile through shared memory as f32, gates already
// exponentiated; each warp leaves its part of q . h for the tile, and the block adds the eight parts.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kRecurrentTile = 8;
constexpr int kRecurrentWarps = 8;
constexpr int kRecurrentLanes = 32;

// Bytes of dynamic shared memory with R key rows a warp.
template <int R>
constexpr int recurrent_shared_bytes() {
  return kRecurrentTile * (3 * kRecurrentWarps * R + (2 + kRecurrentWarps) * kRecurrentLanes + kRecurrentWarps) * 4;
}

// grid: (N * H, ceil(V / 32)). Without o: N * G, and only the states and ht are written.
template <int R, bool normalize>
__global__ void __launch_bounds__(kRecurrentWarps* kRecurrentLanes, R <= 8 ? 3 : 2)
    recurrent_kernel(const __grid_constant__ Params p) {
  constexpr int kRows = kRecurrentWarps * R, kTile = kRecurrentTile, kLanes = kRecurrentLanes;
  constexpr int kZ = (R + kLanes - 1) / kLanes;  // rows of z a lane owns
  extern __shared__ float4 shared[];
  float* q_tile = reinterpret_cast<float*>(shared);  // [kTile][kRows]
  float* k_tile = q_tile + kTile * kRows;
  float* a_tile = k_tile + kTile * kRows;
  float* v_tile = a_tile + kTile * kRows;  // [kTile][32]
  float* av_tile = v_tile + kTile * kLanes;
  float* parts = av_tile + kTile * kLanes;                    // [kTile][warps][32]
  float* z_parts = parts + kTile * kRecurrentWarps * kLanes;  // [kTile][warps]
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const bool wants_o = p.o.data != nullptr;
  const int heads_here = wants_o ? p.heads * p.group : p.heads;
  const std::int64_t n = blockIdx.x / heads_here;
  const int query_head =
      wants_o ? static_cast<int>(blockIdx.x % heads_here) : static_cast<int>(blockIdx.x % heads_here) * p.group;
  const int head = query_head / p.group;
  const auto writes_state = [&] { return anew(head) * p.group == query_head; };  // of a group's heads the first
  const int v = blockIdx.y * kLanes + lane;
  const int V = p.value_dim, K = p.key_dim;
  const Span span = span_of(p.sequences, n);
  const std::int64_t state_offset = (n * p.heads + head) * static_cast<std::int64_t>(K) * V;

  float h[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int k = warp * R + r;
    h[r] = p.h0 != nullptr && k < K && v < V
               ? static_cast<const float*>(p.h0)[state_offset + static_cast<std::int64_t>(k) * V + v]
               : 0.0f;
  }
  float z[kZ] = {};
  if constexpr (normalize) {
#pragma unroll
    for (int i = 0; i < kZ; ++i) {
      const int row = i * kLanes + lane, k = warp * R + row;
      if (p.z0 != nullptr && row < R && k < K) z[i] = static_cast<const float*>(p.z0)[(n * p.heads + head) * K + k];
    }
  }

  for (std::int64_t t0 = 0; t0 < span.length; t0 += kTile) {
    if (p.states != nullptr && t0 % kChunk == 0 && p.keeps_state(static_cast<int>(t0 / kChunk)) && v < V &&
        writes_state()) {
      const auto place = [&](int k) {
        return static_cast<char*>(p.states) +
               p.state_tile(p.state_slot(span.chunk_begin, n, t0 / kChunk), head, k / kChunk, v / kChunk) +
               tile_piece(k % kChunk, v % kChunk / 8) + v % 8 * 2;
      };
      const int first = anew(warp * R);  // not R places kept through the loop
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int k = first + r;
        if (k < K) store_as(DType::bf16, place(k), 0, h[r]);
      }
    }
    const int tokens = static_cast<int>(min(static_cast<std::int64_t>(kTile), span.length - t0));
    const std::int64_t batch = anew(span.batch);
    for (int i = threadIdx.x; i < kTile * kRows; i += blockDim.x) {
      const int t = i / kRows, k = i % kRows;
      float q = 0.0f, key = 0.0f, a = 1.0f;
      if (t < tokens && k < K) {
        const std::int64_t token = span.begin + t0 + t;
        q = feature(p.feature_map,
                    load_as(p.dtype, p.q.data, batch * p.q.batch + token * p.q.token + query_head * p.q.head + k));
        key = feature(p.feature_map,
                      load_as(p.dtype, p.k.data, batch * p.k.batch + token * p.k.token + head * p.k.head + k));
        a = exp2f(key_gate(p, batch, token, head, k));
      }
      q_tile[i] = q;
      k_tile[i] = key;
      a_tile[i] = a;
    }
    {
      const int t = warp;  // kTile == warps
      float value = 0.0f, a = 1.0f;
      if (t < tokens && v < V) {
        const std::int64_t token = span.begin + t0 + t;
        value = load_as(p.dtype, p.v.data, batch * p.v.batch + token * p.v.token + head * p.v.head + v);
        if (p.gv.data != nullptr) {
          a = exp2f(base_2_gate(
              load_as(p.gate_dtype, p.gv.data, batch * p.gv.batch + token * p.gv.token + head * p.gv.head + v)));
        }
      }
      v_tile[t * kLanes + lane] = value;
      av_tile[t * kLanes + lane] = a;
    }
    __syncthreads();
    for (int t = 0; t < tokens; ++t) {
      const float value = v_tile[t * kLanes + lane], av = av_tile[t * kLanes + lane];
      const float4* q4 = reinterpret_cast<const float4*>(q_tile + t * kRows + warp * R);
      const float4* k4 = reinterpret_cast<const float4*>(k_tile + t * kRows + warp * R);
      const float4* a4 = reinterpret_cast<const float4*>(a_tile + t * kRows + warp * R);
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < R; r += 4) {
        const float4 q = q4[r / 4], key = k4[r / 4], a = a4[r / 4];
        h[r + 0] = fmaf(a.x * av, h[r + 0], key.x * value);
        h[r + 1] = fmaf(a.y * av, h[r + 1], key.y * value);
        h[r + 2] = fmaf(a.z * av, h[r + 2], key.z * value);
        h[r + 3] = fmaf(a.w * av, h[r + 3], key.w * value);
        sum = fmaf(q.x, h[r + 0], sum);
        sum = fmaf(q.y, h[r + 1], sum);
        sum = fmaf(q.z, h[r + 2], sum);
        sum = fmaf(q.w, h[r + 3], sum);
      }
      parts[(t * kRecurrentWarps + warp) * kLanes + lane] = sum;
      if constexpr (normalize) {
        float z_sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kZ; ++i) {
          const int row = i * kLanes + lane;
          if (row < R) {
            z[i] += k_tile[t * kRows + warp * R + row];
            z_sum += q_tile[t * kRows + warp * R + row] * z[i];
          }
        }
        z_sum = flashgla::cuda::warp_sum(z_sum);
        if (lane == 0) z_parts[t * kRecurrentWarps + warp] = z_sum;
      }
    }
    __syncthreads();
    if (wants_o && warp < tokens && v < V) {
      const int t = warp;
      float sum = 0.0f, denominator = 0.0f;
#pragma unroll
      for (int w = 0; w < kRecurrentWarps; ++w) {
        sum += parts[(t * kRecurrentWarps + w) * kLanes + lane];
        if constexpr (normalize) denominator += z_parts[t * kRecurrentWarps + w];
      }
      const float o = normalize ? sum / (denominator + static_cast<float>(kNormalizerEpsilon)) : sum * p.scale;
      store_as(p.dtype, p.o.data, batch * p.o.batch + (span.begin + t0 + t) * p.o.token + query_head * p.o.head + v, o);
    }
    // The next tile overwrites q, k, a, v, which all warps have read; parts are only written after its barrier.
  }

  if (!writes_state()) return;
  if (p.ht != nullptr && v < V) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int k = warp * R + r;
      if (k < K) static_cast<float*>(p.ht)[state_offset + static_cast<std::int64_t>(k) * V + v] = h[r];
    }
  }
  if constexpr (normalize) {
    if (p.zt != nullptr && blockIdx.y == 0) {
#pragma unroll
      for (int i = 0; i < kZ; ++i) {
        const int row = i * kLanes + lane, k = warp * R + row;
        if (row < R && k < K) static_cast<float*>(p.zt)[(n * p.heads + head) * K + k] = z[i];
      }
    }
  }
}

template <int R, bool normalize>
void launch(void* stream, const Params& p) {
  const std::int64_t rows = p.sequences.count * p.heads * (p.o.data != nullptr ? p.group : 1);
  const dim3 grid(static_cast<unsigned>(rows),
                  static_cast<unsigned>((p.value_dim + kRecurrentLanes - 1) / kRecurrentLanes));
  flashgla::cuda::launch("gated_linear_attention by tokens", recurrent_kernel<R, normalize>, grid,
                         kRecurrentWarps * kRecurrentLanes, recurrent_shared_bytes<R>(),
                         static_cast<cudaStream_t>(stream), flashgla::cuda::Begin::after_previous, p);
}

template <bool normalize>
void launch(void* stream, const Params& p) {
  const int rows = (p.key_dim + kRecurrentWarps - 1) / kRecurrentWarps;
  if (rows <= 8) return launch<8, normalize>(stream, p);
  if (rows <= 16) return launch<16, normalize>(stream, p);
  if (rows <= 32) return launch<32, normalize>(stream, p);
  launch<64, normalize>(stream, p);
}

}  // namespace

void launch_recurrent(void* stream, const Params& params) {
  params.normalize ? launch<true>(stream, params) : launch<false>(stream, params);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

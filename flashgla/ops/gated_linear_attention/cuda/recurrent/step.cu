// One decoding token: h = (exp(g) exp(gv)^T) * h + phi(k) v^T, o = scale phi(q)^T h, for a batch. Bound by the bytes of
// h, read and written once: 8 K V bytes a head in f32.
//
// A block owns one (batch element, key-value head) and a slice of value channels: lane = 4 neighbouring channels, the
// warps share the key rows. All query heads of the group are served from the registers that hold the new state.
#include "flashgla/base/cuda/device.h"
#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/recurrent/recurrent.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kMostKeys = 512;

struct StepParams {
  Strided q, k, v, g, gv, o;  // token strides unused
  void* h;
  void* z;
  int heads, group, key_dim, value_dim;
  GateKind gate;
  FeatureMap feature_map;
  DType dtype, gate_dtype;
  bool normalize;
  float scale;
};

template <class S>
struct Four;
template <>
struct Four<float> {
  static __device__ __forceinline__ float4 load(const float* p) { return __ldcs(reinterpret_cast<const float4*>(p)); }
  static __device__ __forceinline__ void store(float* p, float4 x) { __stcs(reinterpret_cast<float4*>(p), x); }
};
template <>
struct Four<__nv_bfloat16> {
  static __device__ __forceinline__ float4 load(const __nv_bfloat16* p) {
    const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(p));
    const float2 low = ptx::unpack_bf16(raw.x), high = ptx::unpack_bf16(raw.y);
    return make_float4(low.x, low.y, high.x, high.y);
  }
  static __device__ __forceinline__ void store(__nv_bfloat16* p, float4 x) {
    __stcs(reinterpret_cast<uint2*>(p), make_uint2(ptx::pack_bf16(x.x, x.y), ptx::pack_bf16(x.z, x.w)));
  }
};

// Four channels from v on, zeros beyond V; `whole`: V is a multiple of 4, so that the vector is aligned.
template <class S>
__device__ __forceinline__ float4 load_four(const S* row, int v, int V, bool whole) {
  if (whole) return v < V ? Four<S>::load(row + v) : make_float4(0, 0, 0, 0);
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = v + i < V ? Element<S>::load(row + v + i) : 0.0f;
  return make_float4(x[0], x[1], x[2], x[3]);
}
template <class S>
__device__ __forceinline__ void store_four(S* row, int v, int V, bool whole, float4 x) {
  if (whole) {
    if (v < V) Four<S>::store(row + v, x);
    return;
  }
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (v + i < V) Element<S>::store(row + v + i, values[i]);
  }
}

// grid: (B * G, slices of 128 channels, blocks of kQueries query heads); only the first of these updates the state, the
// others are launched after it and read the new state. S is the state's type.
template <class S, int kQueries, bool update>
__global__ void __launch_bounds__(kWarps * 32) step_kernel(const __grid_constant__ StepParams p, int first_query) {
  constexpr int kUnroll = 8;
  __shared__ float q_shared[kQueries][kMostKeys];
  __shared__ float k_shared[kMostKeys], a_shared[kMostKeys];
  __shared__ float4 parts[kWarps][kQueries][32];
  __shared__ float denominators[kQueries];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t b = blockIdx.x / p.heads;
  const int head = blockIdx.x % p.heads;
  const int K = p.key_dim, V = p.value_dim;
  const int v = blockIdx.y * 128 + lane * 4;
  const bool whole = V % 4 == 0;
  const int queries = min(kQueries, p.group - first_query);
  const std::int64_t cell = b * p.heads + head;
  S* h = static_cast<S*>(p.h) + cell * static_cast<std::int64_t>(K) * V;

  for (int k = threadIdx.x; k < K; k += blockDim.x) {
    const bool over_keys = p.gate == GateKind::key || p.gate == GateKind::key_value;
    k_shared[k] = feature(p.feature_map, load_as(p.dtype, p.k.data, b * p.k.batch + head * p.k.head + k));
    a_shared[k] = p.gate == GateKind::none || p.g.data == nullptr
                      ? 1.0f
                      : exp2f(base_2_gate(
                            load_as(p.gate_dtype, p.g.data, b * p.g.batch + head * p.g.head + (over_keys ? k : 0))));
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const int query_head = head * p.group + first_query + i;
      q_shared[i][k] =
          i < queries ? feature(p.feature_map, load_as(p.dtype, p.q.data, b * p.q.batch + query_head * p.q.head + k))
                      : 0.0f;
    }
  }
  float values[4] = {}, av[4] = {1.0f, 1.0f, 1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (v + i < V) {
      values[i] = load_as(p.dtype, p.v.data, b * p.v.batch + head * p.v.head + v + i);
      if (p.gv.data != nullptr)
        av[i] = exp2f(base_2_gate(load_as(p.gate_dtype, p.gv.data, b * p.gv.batch + head * p.gv.head + v + i)));
    }
  }
  __syncthreads();
  if (p.normalize && warp < kQueries) {
    // z before this token, whichever block of the launch runs first: step_normalizer_kernel updates it afterwards.
    float sum = 0.0f;
    for (int k = lane; k < K; k += 32) {
      sum += q_shared[warp][k] * (Element<S>::load(static_cast<const S*>(p.z) + cell * K + k) + k_shared[k]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) denominators[warp] = sum;
  }

  float4 sums[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) sums[i] = make_float4(0, 0, 0, 0);
  for (int k0 = warp; k0 < K; k0 += kWarps * kUnroll) {
    float4 rows[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = k0 + u * kWarps;
      rows[u] = k < K ? load_four(h + static_cast<std::int64_t>(k) * V, v, V, whole) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = k0 + u * kWarps;
      if (k >= K) continue;
      float4 x = rows[u];
      if constexpr (update) {
        const float a = a_shared[k], key = k_shared[k];
        x = make_float4(fmaf(a * av[0], x.x, key * values[0]), fmaf(a * av[1], x.y, key * values[1]),
                        fmaf(a * av[2], x.z, key * values[2]), fmaf(a * av[3], x.w, key * values[3]));
        store_four(h + static_cast<std::int64_t>(k) * V, v, V, whole, x);
      }
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        const float q = q_shared[i][k];
        sums[i] = make_float4(fmaf(q, x.x, sums[i].x), fmaf(q, x.y, sums[i].y), fmaf(q, x.z, sums[i].z),
                              fmaf(q, x.w, sums[i].w));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kQueries; ++i) parts[warp][i][lane] = sums[i];
  __syncthreads();
  for (int i = threadIdx.x; i < queries * 128; i += blockDim.x) {
    const int query = i / 128, channel = i % 128;
    if (blockIdx.y * 128 + channel >= V) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += reinterpret_cast<const float*>(parts[w][query])[channel];
    sum = p.normalize ? sum / (denominators[query] + static_cast<float>(kNormalizerEpsilon)) : sum * p.scale;
    const int query_head = head * p.group + first_query + query;
    store_as(p.dtype, p.o.data, b * p.o.batch + query_head * p.o.head + blockIdx.y * 128 + channel, sum);
  }
}

// z += phi(k); grid: B * G.
template <class S>
__global__ void step_normalizer_kernel(const __grid_constant__ StepParams p) {
  const std::int64_t b = blockIdx.x / p.heads;
  const int head = blockIdx.x % p.heads;
  S* z = static_cast<S*>(p.z) + static_cast<std::int64_t>(blockIdx.x) * p.key_dim;
  for (int k = threadIdx.x; k < p.key_dim; k += blockDim.x) {
    const float key = feature(p.feature_map, load_as(p.dtype, p.k.data, b * p.k.batch + head * p.k.head + k));
    Element<S>::store(z + k, Element<S>::load(z + k) + key);
  }
}

template <class S, int kQueries>
void launch(cudaStream_t stream, const StepParams& p, std::int64_t batch) {
  const dim3 grid(static_cast<unsigned>(batch * p.heads), static_cast<unsigned>((p.value_dim + 127) / 128));
  step_kernel<S, kQueries, true><<<grid, kWarps * 32, 0, stream>>>(p, 0);
  flashgla::cuda::check_launch("step_kernel");
  for (int first = kQueries; first < p.group; first += kQueries) {
    step_kernel<S, kQueries, false><<<grid, kWarps * 32, 0, stream>>>(p, first);
    flashgla::cuda::check_launch("step_kernel");
  }
  if (p.normalize) {
    step_normalizer_kernel<S><<<static_cast<unsigned>(batch * p.heads), 128, 0, stream>>>(p);
    flashgla::cuda::check_launch("step_normalizer_kernel");
  }
}

// [B,heads,channels] or [B,heads].
Strided of_one_token(const TensorView& view) {
  if (!view) return {};
  return {view.data, view.stride[0], 0, view.stride[1]};
}

}  // namespace

void step(Context& context, const Problem& problem, const StepInputs& inputs, const TensorView& h, const TensorView& z,
          const TensorView& o) {
  if (context.planning()) return;
  StepParams p{};
  p.q = of_one_token(inputs.q);
  p.k = of_one_token(inputs.k);
  p.v = of_one_token(inputs.v);
  p.g = problem.gate == GateKind::constant ? Strided{inputs.g.data, 0, 0, inputs.g.stride[0]} : of_one_token(inputs.g);
  p.gv = of_one_token(inputs.gv);
  p.o = of_one_token(o);
  p.h = h.data;
  p.z = z.data;
  p.heads = static_cast<int>(problem.heads);
  p.group = static_cast<int>(problem.group());
  p.key_dim = static_cast<int>(problem.key_dim);
  p.value_dim = static_cast<int>(problem.value_dim);
  p.gate = problem.gate;
  p.feature_map = problem.feature_map;
  p.dtype = problem.dtype;
  p.gate_dtype = problem.gate_dtype;
  p.normalize = problem.normalize;
  p.scale = static_cast<float>(problem.scale);
  auto* stream = static_cast<cudaStream_t>(context.stream());
  if (h.dtype == DType::bf16) {
    p.group == 1 ? launch<__nv_bfloat16, 1>(stream, p, problem.batch)
                 : launch<__nv_bfloat16, 4>(stream, p, problem.batch);
  } else {
    p.group == 1 ? launch<float, 1>(stream, p, problem.batch) : launch<float, 4>(stream, p, problem.batch);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

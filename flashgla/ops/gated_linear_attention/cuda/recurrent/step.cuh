// What kernels of one decoding token share: their parameters, vectors of a state, and the rows of a gate's projection.
#pragma once

#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kWarps = 8;
constexpr int kMostKeys = 512;
constexpr int kMostRank = 32;  // of a gate's projection

struct StepParams {
  Strided q, k, v, g, gv, o;  // token strides unused; with a gate's projection g is what it reads, by batch element
  const void *gate_weight, *gate_bias;  // of that projection, by key channel of all heads; null: none, and no bias
  int rank;                             // its columns
  DType gate_weight_dtype, gate_bias_dtype;
  float inverse_normalizer, gate_min;
  void* h;
  void* z;
  int heads, group, key_dim, value_dim;
  GateKind gate;
  FeatureMap feature_map;
  DType dtype, gate_dtype;
  bool normalize;
  float scale;
  unsigned units;  // of work: B * G * slices of value channels

  __device__ __forceinline__ bool gated_keys() const { return gate != GateKind::none && g.data != nullptr; }
  __device__ __forceinline__ bool projects() const { return gate_weight != nullptr; }
};

// Of a call; units are the launch's.
StepParams step_params(const Problem& problem, const StepInputs& inputs, const TensorView& h, const TensorView& z,
                       const TensorView& o);

// Four neighbouring channels of a state as they lie in memory. Loads of a row are many and early, so they stay raw
// until they are used. No cache hints: evict-first is 5% slower.
template <class S>
struct Four;
template <>
struct Four<float> {
  using Raw = float4;
  static __device__ __forceinline__ Raw load(const float* p) { return __ldcg(reinterpret_cast<const float4*>(p)); }
  static __device__ __forceinline__ Raw pack(float4 x) { return x; }
  static __device__ __forceinline__ float4 unpack(Raw x) { return x; }
  static __device__ __forceinline__ void store(float* p, float4 x) { __stcg(reinterpret_cast<float4*>(p), x); }
};
template <>
struct Four<__nv_bfloat16> {
  using Raw = uint2;
  static __device__ __forceinline__ Raw load(const __nv_bfloat16* p) {
    return __ldcg(reinterpret_cast<const uint2*>(p));
  }
  static __device__ __forceinline__ Raw pack(float4 x) {
    return make_uint2(ptx::pack_bf16(x.x, x.y), ptx::pack_bf16(x.z, x.w));
  }
  static __device__ __forceinline__ float4 unpack(Raw raw) {
    const float2 low = ptx::unpack_bf16(raw.x), high = ptx::unpack_bf16(raw.y);
    return make_float4(low.x, low.y, high.x, high.y);
  }
  static __device__ __forceinline__ void store(__nv_bfloat16* p, float4 x) {
    __stcg(reinterpret_cast<uint2*>(p), pack(x));
  }
};

// Of a row. kWhole: V is a multiple of 4, so that vectors are aligned; else the `inside` channels that there are.
template <bool kWhole, class S>
__device__ __forceinline__ typename Four<S>::Raw load_four(const S* place, int inside) {
  if constexpr (kWhole) {
    return Four<S>::load(place);
  } else {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = i < inside ? Element<S>::load(place + i) : 0.0f;
    return Four<S>::pack(make_float4(x[0], x[1], x[2], x[3]));
  }
}
template <bool kWhole, class S>
__device__ __forceinline__ void store_four(S* place, int inside, float4 x) {
  if constexpr (kWhole) {
    Four<S>::store(place, x);
  } else {
    const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < inside) Element<S>::store(place + i, values[i]);
    }
  }
}

// Where it stands, not where it is used.
__device__ __forceinline__ uint4 load_16(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

// The row of a gate's projection that belongs to a key channel, kVectors of its vectors at once.
template <int kVectors>
class GateRow {
 public:
  __device__ __forceinline__ void load(const StepParams& p, int head, int k) {
    bias_ = Bits(p.gate_bias_dtype, p.gate_bias, static_cast<std::int64_t>(head) * p.key_dim + k,
                 k < p.key_dim && p.gate_bias != nullptr);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (k < p.key_dim && i < vectors_of(p)) held_[i] = load_16(row_of(p, head, k) + i);
    }
  }

  // The natural log of the gate. `input`: in lane i of every warp, element i of what the projection reads. Called by
  // whole warps.
  __device__ __forceinline__ float log_gate(const StepParams& p, int head, int k, float input) const {
    const bool wide = p.gate_weight_dtype == DType::f32;
    float sum = bias_.as_float(p.gate_bias_dtype);
    const auto add = [&](std::uint32_t word, int i) {  // the i-th of the row
      if (wide) {
        sum = fmaf(__shfl_sync(0xffffffffu, input, i), __uint_as_float(word), sum);
      } else {
        const float2 pair = ptx::unpack_bf16(word);
        sum = fmaf(__shfl_sync(0xffffffffu, input, 2 * i), pair.x, sum);
        sum = fmaf(__shfl_sync(0xffffffffu, input, 2 * i + 1), pair.y, sum);
      }
    };
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i >= vectors_of(p)) break;
      add(held_[i].x, 4 * i), add(held_[i].y, 4 * i + 1);
      add(held_[i].z, 4 * i + 2), add(held_[i].w, 4 * i + 3);
    }
    const auto* row = reinterpret_cast<const std::uint32_t*>(row_of(p, head, k < p.key_dim ? k : 0));
#pragma unroll 1
    for (int i = 4 * kVectors; i < 4 * vectors_of(p); ++i) add(__ldg(row + i), i);
    return fmaxf((fminf(sum, 0.0f) - log1pf(__expf(-fabsf(sum)))) * p.inverse_normalizer, p.gate_min);
  }

 private:
  static __device__ __forceinline__ const uint4* row_of(const StepParams& p, int head, int k) {
    const int bytes = p.rank * (p.gate_weight_dtype == DType::f32 ? 4 : 2);
    return reinterpret_cast<const uint4*>(static_cast<const char*>(p.gate_weight) +
                                          (static_cast<std::int64_t>(head) * p.key_dim + k) * bytes);
  }
  static __device__ __forceinline__ int vectors_of(const StepParams& p) {
    return p.rank * (p.gate_weight_dtype == DType::f32 ? 4 : 2) / 16;
  }

  uint4 held_[kVectors > 0 ? kVectors : 1];  // others are loaded when they are used
  Bits bias_;
};

}  // namespace flashgla::ops::gated_linear_attention::cuda

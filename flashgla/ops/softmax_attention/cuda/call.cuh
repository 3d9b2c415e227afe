// A call as kernels see it.
#pragma once

#include <cuda_bf16.h>

#include <cmath>

#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/softmax_attention/implementations.h"

namespace flashgla::ops::softmax_attention::cuda {

using flashgla::cuda::to_float;

constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

// [batch, token, head, channel]; channels are neighbours.
struct Strided {
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0;  // elements

  Strided() = default;
  explicit Strided(const TensorView& view) {
    if (!view) return;
    data = view.data;
    batch = view.stride[0];
    token = view.stride[1];
    head = view.stride[2];
  }
  template <class T>
  __device__ __forceinline__ T* at(std::int64_t b, std::int64_t t, std::int64_t h) const {
    return static_cast<T*>(data) + b * batch + t * token + h * head;
  }
};

// One sequence's tokens in a call.
struct SequenceOfCall {
  std::int64_t begin;
  int batch, length;
  int position;  // tokens before
};

struct Call {
  Strided q, k, v, past_k, past_v;
  bool past_wide = false;                   // the past is f32, else bf16
  const std::int32_t* positions = nullptr;  // null: zeros
  const std::int32_t* bounds = nullptr;     // null: each batch row is a sequence
  int sequences = 0, length = 0, heads = 0, groups = 0, key_dim = 0, value_dim = 0;
  int rows = 0;    // P; 0 without a past
  int window = 0;  // 0: none
  float scale = 1.0f;

  __host__ __device__ int group() const { return heads / groups; }

  __device__ __forceinline__ SequenceOfCall sequence(int n) const {
    const int position = positions != nullptr ? positions[n] : 0;
    if (bounds == nullptr) return {0, n, length, position};
    return {bounds[n], 0, bounds[n + 1] - bounds[n], position};
  }
  // The first token that token i sees, of those that are there.
  __device__ __forceinline__ int first_key(int i, int position) const {
    const int kept = position > rows ? position - rows : 0;
    return window > 0 && i - window + 1 > kept ? i - window + 1 : kept;
  }
};

inline Call call_of(const Inputs& in, const Options& options) {
  Call call;
  call.q = Strided(in.q);
  call.k = Strided(in.k);
  call.v = Strided(in.v);
  if (in.past_k) {
    call.past_k = Strided(in.past_k);
    call.past_v = Strided(in.past_v);
    call.past_wide = in.past_k.dtype == DType::f32;
    call.positions = in.positions.as<std::int32_t>();
    call.rows = static_cast<int>(in.past_k.size(1));
  }
  if (in.cu_seqlens) call.bounds = in.cu_seqlens.as<std::int32_t>();
  call.sequences = static_cast<int>(sequences_of(in.q, in.cu_seqlens));
  call.length = static_cast<int>(in.q.size(1));
  call.heads = static_cast<int>(in.q.size(2));
  call.groups = static_cast<int>(in.k.size(2));
  call.key_dim = static_cast<int>(in.q.size(3));
  call.value_dim = static_cast<int>(in.v.size(3));
  call.window = static_cast<int>(std::min<std::int64_t>(options.window, 1 << 30));
  call.scale = static_cast<float>(options.scale);
  return call;
}

// What the backward needs of each row, in f32 [B,H,T]: log2 of the sum of exponentials, and delta = d_o . o, the mean
// over a row's keys of the gradients of its probabilities.
struct RowSums {
  float* lse2 = nullptr;
  float* delta = nullptr;
  int heads = 0, length = 0;

  __device__ __forceinline__ std::int64_t at(int batch, int head, std::int64_t token) const {
    return (static_cast<std::int64_t>(batch) * heads + head) * length + token;
  }
};

// One of the sums to shared memory by cp.async, or zero.
__device__ __forceinline__ void copy_sum(std::uint32_t shared, const float* sum, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(sum), "r"(there ? 4 : 0) : "memory");
}

// Takes the sums' memory from context.scratch(), and queues what fills them unless the context is planning.
RowSums row_sums(Context& context, const Inputs& in, const Outputs& out, const TensorView& d_o);

// The caches' part of the operator, for any of the two dtypes each and any strides.
void append(Context& context, std::span<const Appended> tensors, const TensorView& positions,
            const TensorView& cu_seqlens);
void step(Context& context, const TensorView& q, const Token& token, const TensorView& k_cache,
          const TensorView& v_cache, const TensorView& positions, const TensorView& o, const Options& options);

}  // namespace flashgla::ops::softmax_attention::cuda

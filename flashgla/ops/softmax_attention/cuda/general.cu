// Every call: any head widths up to 1024, any strides, f32 and bf16, windows, packed sequences, a past of either dtype.
// Tiles of kRows queries and keys in f32 by ordinary arithmetic; sums over channels and keys in shared memory.
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/softmax_attention/cuda/call.cuh"
#include "flashgla/ops/softmax_attention/cuda/dropped.cuh"

namespace flashgla::ops::softmax_attention::cuda {

namespace {

namespace house = flashgla::ops::cuda;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kChannels = 32;  // staged at a time for a tile of scores

template <int R>
using Tile = float[R][R + 1];
template <int R>
using Stage = float[R][kChannels + 1];

// A sequence's keys and values by position, from the cache or from this call, as f32.
template <class T>
struct Source {
  Call call;
  SequenceOfCall s;
  int n, g;

  __device__ __forceinline__ float load(const Strided& now, const Strided& past, int j, int c) const {
    if (j >= s.position) return to_float(now.at<T>(s.batch, s.begin + j - s.position, g)[c]);
    const int row = j % call.rows;
    return call.past_wide ? past.at<float>(n, row, g)[c] : to_float(past.at<__nv_bfloat16>(n, row, g)[c]);
  }
  __device__ __forceinline__ float k(int j, int c) const { return load(call.k, call.past_k, j, c); }
  __device__ __forceinline__ float v(int j, int c) const { return load(call.v, call.past_v, j, c); }
};

// out[i][j] = sum over channels of a(i, c) b(j, c). All threads; ends with a barrier.
template <int R, class A, class B>
__device__ __forceinline__ void products(Tile<R>& out, Stage<R>& left, Stage<R>& right, int channels, const A& a,
                                         const B& b) {
  constexpr int kEach = (R * R + kThreads - 1) / kThreads;
  float sums[kEach] = {};
  for (int begin = 0; begin < channels; begin += kChannels) {
    __syncthreads();
    for (int i = threadIdx.x; i < R * kChannels; i += kThreads) {
      const int row = i / kChannels, c = i % kChannels;
      left[row][c] = begin + c < channels ? a(row, begin + c) : 0.0f;
      right[row][c] = begin + c < channels ? b(row, begin + c) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int at = threadIdx.x + e * kThreads;
      if (at >= R * R) break;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sums[e] += left[at / R][c] * right[at % R][c];
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int at = threadIdx.x + e * kThreads;
    if (at < R * R) out[at / R][at % R] = sums[e];
  }
  __syncthreads();
}

// sums[i][c] = factor[i] sums[i][c] + sum over j of weights[i][j] x(j, c), with kTransposed of weights[j][i].
template <int R, bool kTransposed, class X>
__device__ __forceinline__ void accumulate(float* sums, int channels, const Tile<R>& weights, const float* factor,
                                           const X& x) {
  for (int c = threadIdx.x; c < channels; c += kThreads) {
    float total[R];
#pragma unroll
    for (int i = 0; i < R; ++i) total[i] = sums[i * channels + c] * (factor != nullptr ? factor[i] : 1.0f);
#pragma unroll 2
    for (int j = 0; j < R; ++j) {
      const float value = x(j, c);
#pragma unroll
      for (int i = 0; i < R; ++i) total[i] += (kTransposed ? weights[j][i] : weights[i][j]) * value;
    }
#pragma unroll
    for (int i = 0; i < R; ++i) sums[i * channels + c] = total[i];
  }
}

// Which tile of which sequence and head a block has.
struct Place {
  int n, head, begin;
};
template <int R>
__device__ __forceinline__ Place place_of(const Call& call, int heads) {
  const int tiles = (call.length + R - 1) / R, block = static_cast<int>(blockIdx.x);
  return {block / tiles / heads, block / tiles % heads, block % tiles * R};
}

template <class T, int R, class Drop>
__global__ void __launch_bounds__(kThreads, R == 8 && std::is_same_v<Drop, NoneDropped> ? 3 : 1)
    forward_kernel(Call call, Strided o, float* lse, Drop dropped) {
  flashgla::cuda::wait_for_previous();
  __shared__ Tile<R> p;
  __shared__ Stage<R> left, right;
  __shared__ float largest[R], total[R], factor[R];
  extern __shared__ float sums[];  // [R, V]
  const Place place = place_of<R>(call, call.heads);
  const SequenceOfCall s = call.sequence(place.n);
  if (place.begin >= s.length) return;
  const Source<T> source{call, s, place.n, place.head / call.group()};
  const int count = min(R, s.length - place.begin), first_query = s.position + place.begin;
  for (int i = threadIdx.x; i < R * call.value_dim; i += kThreads) sums[i] = 0.0f;
  if (threadIdx.x < R) {
    largest[threadIdx.x] = -INFINITY;
    total[threadIdx.x] = 0.0f;
  }
  const int end = first_query + count;
  for (int key = call.first_key(first_query, s.position); key < end; key += R) {
    products<R>(
        p, left, right, call.key_dim,
        [&](int i, int c) {
          return i < count ? to_float(call.q.at<T>(s.batch, s.begin + place.begin + i, place.head)[c]) : 0.0f;
        },
        [&](int j, int c) { return key + j < end ? source.k(key + j, c) : 0.0f; });
    for (int i = threadIdx.x / 32; i < R; i += kWarps) {
      const int lane = threadIdx.x % 32, j = key + lane, query = first_query + i;
      const bool seen = lane < R && i < count && j <= query && j >= call.first_key(query, s.position);
      const float score = seen ? p[i][lane % R] * call.scale * kLog2E : -INFINITY;
      float most = score;
      for (int distance = 16; distance > 0; distance /= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
      }
      const float before = largest[i];
      most = fmaxf(most, before);
      const float weight = seen ? exp2f(score - most) : 0.0f;
      if (lane < R) {
        p[i][lane] = seen ? weight * dropped.factor(call, s, place.begin + i, place.head, j) : 0.0f;
      }
      float sum = weight;
      for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      __syncwarp();
      if (lane == 0) {
        factor[i] = before == -INFINITY ? 0.0f : exp2f(before - most);
        total[i] = total[i] * factor[i] + sum;
        largest[i] = most;
      }
    }
    __syncthreads();
    accumulate<R, false>(sums, call.value_dim, p, factor,
                         [&](int j, int c) { return key + j < end ? source.v(key + j, c) : 0.0f; });
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * call.value_dim; i += kThreads) {
    const int row = i / call.value_dim, c = i % call.value_dim;
    o.at<T>(s.batch, s.begin + place.begin + row, place.head)[c] = flashgla::cuda::from_float<T>(sums[i] / total[row]);
  }
  if (lse == nullptr || threadIdx.x >= count) return;
  const std::int64_t token = static_cast<std::int64_t>(s.batch) * call.length + s.begin + place.begin + threadIdx.x;
  lse[token * call.heads + place.head] = kLn2 * (largest[threadIdx.x] + log2f(total[threadIdx.x]));
}

// Probabilities of a tile of scores, as far as they do not fall out, and from d_o . v the gradients of the scores
// (without the scale), in their places.
template <int R, class Drop>
__device__ __forceinline__ void slopes(const Call& call, const SequenceOfCall& s, const RowSums& rows, int head,
                                       int query, int count, int key, int end, const Drop& dropped, Tile<R>& p,
                                       Tile<R>& ds) {
  for (int at = threadIdx.x; at < R * R; at += kThreads) {
    const int i = at / R, j = at % R, token = s.position + query + i;
    const bool seen = i < count && key + j < end && key + j <= token && key + j >= call.first_key(token, s.position);
    const std::int64_t row = rows.at(s.batch, head, s.begin + query + (seen ? i : 0));
    const float weight = seen ? exp2f(p[i][j] * call.scale * kLog2E - rows.lse2[row]) : 0.0f;
    const float factor = seen ? dropped.factor(call, s, query + i, head, key + j) : 0.0f;
    ds[i][j] = seen ? weight * (factor * ds[i][j] - rows.delta[row]) : 0.0f;
    p[i][j] = weight * factor;
  }
  __syncthreads();
}

template <class T, int R, class Drop>
__global__ void __launch_bounds__(kThreads) dq_kernel(Call call, Strided d_o, RowSums rows, Strided dq, Drop dropped) {
  flashgla::cuda::wait_for_previous();
  __shared__ Tile<R> p, ds;
  __shared__ Stage<R> left, right;
  extern __shared__ float sums[];  // [R, K]
  const Place place = place_of<R>(call, call.heads);
  const SequenceOfCall s = call.sequence(place.n);
  if (place.begin >= s.length) return;
  const Source<T> source{call, s, place.n, place.head / call.group()};
  const int count = min(R, s.length - place.begin), first_query = s.position + place.begin, end = first_query + count;
  const auto query_row = [&](const Strided& x, int i, int c) {
    return i < count ? to_float(x.at<T>(s.batch, s.begin + place.begin + i, place.head)[c]) : 0.0f;
  };
  for (int i = threadIdx.x; i < R * call.key_dim; i += kThreads) sums[i] = 0.0f;
  for (int key = call.first_key(first_query, s.position); key < end; key += R) {
    const auto k = [&](int j, int c) { return key + j < end ? source.k(key + j, c) : 0.0f; };
    products<R>(
        p, left, right, call.key_dim, [&](int i, int c) { return query_row(call.q, i, c); }, k);
    products<R>(
        ds, left, right, call.value_dim, [&](int i, int c) { return query_row(d_o, i, c); },
        [&](int j, int c) { return key + j < end ? source.v(key + j, c) : 0.0f; });
    slopes<R>(call, s, rows, place.head, place.begin, count, key, end, dropped, p, ds);
    accumulate<R, false>(sums, call.key_dim, ds, nullptr, k);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * call.key_dim; i += kThreads) {
    dq.at<T>(s.batch, s.begin + place.begin + i / call.key_dim, place.head)[i % call.key_dim] =
        flashgla::cuda::from_float<T>(call.scale * sums[i]);
  }
}

template <class T, int R, class Drop>
__global__ void __launch_bounds__(kThreads, 4)
    dkv_kernel(Call call, Strided d_o, RowSums rows, Strided dk, Strided dv, Drop dropped) {
  flashgla::cuda::wait_for_previous();
  __shared__ Tile<R> p, ds;
  __shared__ Stage<R> left, right;
  extern __shared__ float sums[];  // [R, K], [R, V]
  float* values = sums + R * call.key_dim;
  const Place place = place_of<R>(call, call.groups);
  const SequenceOfCall s = call.sequence(place.n);
  if (place.begin >= s.length) return;
  const int count = min(R, s.length - place.begin), key = s.position + place.begin, end = key + count;
  const auto key_row = [&](const Strided& x, int j, int c) {
    return j < count ? to_float(x.at<T>(s.batch, s.begin + place.begin + j, place.head)[c]) : 0.0f;
  };
  for (int i = threadIdx.x; i < R * (call.key_dim + call.value_dim); i += kThreads) sums[i] = 0.0f;
  // The last query that sees the tile's last key is window - 1 behind it.
  const int last_query = call.window > 0 ? min(s.length, place.begin + count - 1 + call.window) : s.length;
  for (int head = place.head * call.group(); head < (place.head + 1) * call.group(); ++head) {
    for (int query = place.begin; query < last_query; query += R) {
      const int queries = min(R, s.length - query);
      const auto query_row = [&](const Strided& x, int i, int c) {
        return i < queries ? to_float(x.at<T>(s.batch, s.begin + query + i, head)[c]) : 0.0f;
      };
      const auto q = [&](int i, int c) { return query_row(call.q, i, c); };
      const auto gradient = [&](int i, int c) { return query_row(d_o, i, c); };
      products<R>(p, left, right, call.key_dim, q, [&](int j, int c) { return key_row(call.k, j, c); });
      products<R>(ds, left, right, call.value_dim, gradient, [&](int j, int c) { return key_row(call.v, j, c); });
      slopes<R>(call, s, rows, head, query, queries, key, end, dropped, p, ds);
      accumulate<R, true>(values, call.value_dim, p, nullptr, gradient);
      accumulate<R, true>(sums, call.key_dim, ds, nullptr, q);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * call.key_dim; i += kThreads) {
    dk.at<T>(s.batch, s.begin + place.begin + i / call.key_dim, place.head)[i % call.key_dim] =
        flashgla::cuda::from_float<T>(call.scale * sums[i]);
  }
  for (int i = threadIdx.x; i < count * call.value_dim; i += kThreads) {
    dv.at<T>(s.batch, s.begin + place.begin + i / call.value_dim, place.head)[i % call.value_dim] =
        flashgla::cuda::from_float<T>(values[i]);
  }
}

// Calls run(element, rows) with rows of a tile: 32, or 8 where the heads are wide.
template <class Run>
void with_tiles(const Inputs& in, const Run& run) {
  const bool wide = in.q.size(3) + in.v.size(3) > 512;
  house::with_element(in.q.dtype, [&](auto element) {
    if (wide) return run(element, std::integral_constant<int, 8>());
    run(element, std::integral_constant<int, 32>());
  });
}

// Bytes of so many floats. launch() raises a kernel's limit for more than 48 KiB of dynamic memory; what is static here
// counts towards the limit too.
int shared_bytes(int floats) {
  constexpr int kStatic = 18 * 1024, kLimit = 48 * 1024;
  const int bytes = floats * static_cast<int>(sizeof(float));
  return bytes + kStatic > kLimit ? std::max(bytes, kLimit + 16) : bytes;
}

std::int64_t blocks_of(const Call& call, int heads, int rows) {
  return static_cast<std::int64_t>(call.sequences) * heads * ((call.length + rows - 1) / rows);
}

void forward(Context& context, const Inputs& in, const Outputs& out, const Options& options) {
  if (context.planning()) return;
  const Call call = call_of(in, options);
  with_tiles(in, [&](auto element, auto rows) {
    with_dropped(call, options, [&](auto dropped) {
      house::queue_kernel(context, "softmax_attention forward",
                          forward_kernel<decltype(element), rows, decltype(dropped)>, blocks_of(call, call.heads, rows),
                          kThreads, shared_bytes(rows * call.value_dim), call, Strided(out.o),
                          out.lse ? out.lse.as<float>() : nullptr, dropped);
    });
  });
}

void backward(Context& context, const Inputs& in, const Outputs& out, const TensorView& d_o,
              const InputGradients& gradients, const Options& options) {
  const ArenaScope scope(context.scratch());
  const RowSums sums = row_sums(context, in, out, d_o);
  if (context.planning()) return;
  const Call call = call_of(in, options);
  with_tiles(in, [&](auto element, auto rows) {
    using T = decltype(element);
    with_dropped(call, options, [&](auto dropped) {
      using Drop = decltype(dropped);
      house::queue_kernel(context, "softmax_attention dq", dq_kernel<T, rows, Drop>, blocks_of(call, call.heads, rows),
                          kThreads, shared_bytes(rows * call.key_dim), call, Strided(d_o), sums, Strided(gradients.dq),
                          dropped);
      house::queue_kernel(context, "softmax_attention dk, dv", dkv_kernel<T, rows, Drop>,
                          blocks_of(call, call.groups, rows), kThreads,
                          shared_bytes(rows * (call.key_dim + call.value_dim)), call, Strided(d_o), sums,
                          Strided(gradients.dk), Strided(gradients.dv), dropped);
    });
  });
}

Support supports(const Problem& problem, const Architecture&) {
  if (std::max(problem.key_dim, problem.value_dim) > 1024) return Support::no("takes heads of at most 1024 channels");
  return supports_f32_and_bf16({problem.dtype, problem.past});
}

}  // namespace

}  // namespace flashgla::ops::softmax_attention::cuda

namespace flashgla::ops::softmax_attention {

const Implementation kCudaGeneral{"cuda_general", Device::Kind::cuda, cuda::supports, cuda::forward,
                                  cuda::backward, cuda::append,       cuda::step,     true};

}  // namespace flashgla::ops::softmax_attention

// Forward: each segment alone, then, from what it starts from, again with outputs.
#pragma once

#include "flashgla/ops/wkv/cuda/scan.cuh"

namespace flashgla::ops::wkv::cuda {

// The state that a segment leaves by itself (or since the last sequence began in it) into its place of `prefixes`.
template <class T, int V>
__global__ void __launch_bounds__(kThreads) segment_kernel(Call<T> call) {
  flashgla::cuda::wait_for_previous();
  const Where where(call, V);
  if (!where.there || where.index == call.segments - 1) return;
  const Parameters<V> parameters(call, where.channel);
  Place place = place_at(call, where.line, where.begin);
  State<V> state;
  state.clear();
  if (place.begin == where.begin) state.begin(call, place.n, where.channel);
  Tokens<T, V> k, v, next_k, next_v;
  k.load(call.k, where, where.begin);
  v.load(call.v, where, where.begin);
  for (std::int64_t first = where.begin; first < where.end; first += kChunk) {
    next_k.load(call.k, where, first + kChunk);
    next_v.load(call.v, where, first + kChunk);
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      if (first + t >= where.end) break;
      if (first + t == place.end) {
        place = place_after(call, place, first + t);
        state.begin(call, place.n, where.channel);
      }
      float key[V], value[V];
      k.get(t, key);
      v.get(t, value);
      state.advance(parameters, key, value);
    }
    k = next_k;
    v = next_v;
  }
  state.store(call.prefixes + (where.line * call.segments + where.index) * 3 * call.channels + where.channel,
              call.channels);
}

// y and ht may be absent.
template <class T, int V>
__global__ void __launch_bounds__(kThreads) forward_kernel(Call<T> call, Lines<T> y, float* ht) {
  flashgla::cuda::wait_for_previous();
  const Where where(call, V);
  if (!where.there) return;
  const Parameters<V> parameters(call, where.channel);
  Place place = place_at(call, where.line, where.begin);
  State<V> state;
  state.begin(call, where, place);
  const auto leave = [&] {
    if (ht != nullptr) state.store(ht + place.n * 3 * call.channels + where.channel, call.channels);
  };
  Tokens<T, V> k, v, r, next_k, next_v, next_r;
  k.load(call.k, where, where.begin);
  v.load(call.v, where, where.begin);
  r.load(call.r, where, where.begin);
  for (std::int64_t first = where.begin; first < where.end; first += kChunk) {
    next_k.load(call.k, where, first + kChunk);
    next_v.load(call.v, where, first + kChunk);
    next_r.load(call.r, where, first + kChunk);
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      if (first + t >= where.end) break;
      if (first + t == place.end) {
        leave();
        place = place_after(call, place, first + t);
        state.begin(call, place.n, where.channel);
      }
      float key[V], value[V], gate[V], out[V];
      k.get(t, key);
      v.get(t, value);
      r.get(t, gate);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const Weights weights(state.p[i], parameters.u[i] + key[i]);
        const float closed = 1.0f + exponential(-gate[i]);
        out[i] = __fdividef(weights.of(state.a[i], value[i]), weights.with_one(state.b[i]) * closed);
      }
      if (y.data != nullptr) Vector<T, V>::of(out).store(y.at(where.line, first + t, where.channel));
      state.advance(parameters, key, value);
    }
    k = next_k;
    v = next_v;
    r = next_r;
  }
  if (where.end == place.end) leave();
}

}  // namespace flashgla::ops::wkv::cuda

// Backward: forward in time through each segment, for the states that its chunks start from and for the gradient that
// it gives to what is before it; then back through its chunks.
#pragma once

#include "flashgla/ops/wkv/cuda/scan.cuh"

namespace flashgla::ops::wkv::cuda {

template <class T>
struct Gradients {
  Lines<T> dy, dk, dv, dr;
  float* chunks;                     // [lines,chunks,3,E]: the states before each
  float* suffixes;                   // as Call::prefixes: P, Q and m that a segment receives; null with one segment
  float *dtime_decay, *dtime_first;  // [lines * segments,E]
  std::int64_t chunks_a_line;

  __device__ __forceinline__ float* chunk_at(const Call<T>& call, const Where& where, std::int64_t token) const {
    return chunks + (where.line * chunks_a_line + token / kChunk) * 3 * call.channels + where.channel;
  }
};

// What a token reads and what comes back to it.
struct Return {
  float largest, second, open, y, q;

  __device__ __forceinline__ Return(float a, float b, float p, float uk, float v, float r, float dy) {
    const Weights weights(p, uk);
    largest = weights.largest;
    second = weights.second;
    const float inverse = __fdividef(1.0f, weights.with_one(b));
    open = ops::cuda::sigmoid(r);
    y = weights.of(a, v) * inverse;
    q = dy * open * inverse;
  }
};

// The states before chunks; with several segments also a segment's P, Q and m for the tokens before it, of the sequence
// that reaches into it from there.
template <class T, int V>
__global__ void __launch_bounds__(kThreads) states_kernel(Call<T> call, Gradients<T> to) {
  flashgla::cuda::wait_for_previous();
  const Where where(call, V);
  if (!where.there) return;
  const Parameters<V> parameters(call, where.channel);
  Place place = place_at(call, where.line, where.begin);
  State<V> state, back;
  state.begin(call, where, place);
  back.clear();
  // Whether tokens still belong to the sequence before the segment.
  bool reaches = to.suffixes != nullptr && place.begin != where.begin;
  Tokens<T, V> k, v, r, dy;
  for (std::int64_t first = where.begin; first < where.end; first += kChunk) {
    k.load(call.k, where, first);
    v.load(call.v, where, first);
    if (reaches) {
      r.load(call.r, where, first);
      dy.load(to.dy, where, first);
    }
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      if (first + t >= where.end) break;
      if (first + t == place.end) {
        place = place_after(call, place, first + t);
        state.begin(call, place.n, where.channel);
        reaches = false;
      }
      if (t == 0) state.store(to.chunk_at(call, where, first), call.channels);
      float key[V], value[V];
      k.get(t, key);
      v.get(t, value);
      if (reaches) {
        float gate[V], gradient[V];
        r.get(t, gate);
        dy.get(t, gradient);
        const auto tokens = static_cast<float>(first + t - where.begin);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const Return token(state.a[i], state.b[i], state.p[i], parameters.u[i] + key[i], value[i], gate[i],
                             gradient[i]);
          const Weights weights(back.p[i], fmaf(tokens, parameters.w[i], -token.largest));
          back.a[i] = weights.of(back.a[i], token.q);
          back.b[i] = weights.of(back.b[i], token.q * token.y);
          back.p[i] = weights.largest;
        }
      }
      state.advance(parameters, key, value);
    }
  }
  if (to.suffixes == nullptr) return;
  back.store(to.suffixes + (where.line * call.segments + where.index) * 3 * call.channels + where.channel,
             call.channels);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) backward_kernel(Call<T> call, Gradients<T> to) {
  flashgla::cuda::wait_for_previous();
  const Where where(call, V);
  if (!where.there) return;
  const Parameters<V> parameters(call, where.channel);
  const Place last = place_at(call, where.line, where.end - 1);
  State<V> back;  // P, Q, m
  back.clear();
  if (to.suffixes != nullptr && last.end != where.end) {
    back.load(to.suffixes + (where.line * call.segments + where.index) * 3 * call.channels + where.channel,
              call.channels);
  }
  float dw[V] = {}, du[V] = {};
  const std::int64_t last_chunk = where.begin + (where.end - 1 - where.begin) / kChunk * kChunk;
  Tokens<T, V> k, v, r, dy;
  bool ends = false;  // a sequence does with the chunk's last token; of the segment's last `back` knows
  for (std::int64_t first = last_chunk; first >= where.begin; first -= kChunk) {
    k.load(call.k, where, first);
    v.load(call.v, where, first);
    r.load(call.r, where, first);
    dy.load(to.dy, where, first);
    State<V> states[kChunk];
    states[0].load(to.chunk_at(call, where, first), call.channels);
    unsigned starts = 0;  // a bit for each token that begins a sequence
    Place place = place_at(call, where.line, first);
    if (place.begin == first) starts = 1;
#pragma unroll
    for (int t = 1; t < kChunk; ++t) {
      if (first + t >= where.end) break;
      if (first + t == place.end) {
        place = place_after(call, place, first + t);
        states[t].begin(call, place.n, where.channel);
        starts |= 1u << t;
        continue;
      }
      float key[V], value[V];
      k.get(t - 1, key);
      v.get(t - 1, value);
      states[t] = states[t - 1];
      states[t].advance(parameters, key, value);
    }
#pragma unroll
    for (int t = kChunk - 1; t >= 0; --t) {
      if (first + t >= where.end) continue;
      if (t + 1 < kChunk ? (starts >> (t + 1) & 1u) != 0 : ends) back.clear();
      float key[V], value[V], gate[V], gradient[V], dk[V], dv[V], dr[V];
      k.get(t, key);
      v.get(t, value);
      r.get(t, gate);
      dy.get(t, gradient);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float a = states[t].a[i], b = states[t].b[i], p = states[t].p[i], w = parameters.w[i];
        const Return token(a, b, p, parameters.u[i] + key[i], value[i], gate[i], gradient[i]);
        const float own = token.second * token.q, to_first = own * (value[i] - token.y);
        const float through = exponential(key[i] + back.p[i]);
        dr[i] = gradient[i] * token.open * token.y * (1.0f - token.open);
        dv[i] = fmaf(through, back.a[i], own);
        dk[i] = fmaf(through, fmaf(value[i], back.a[i], -back.b[i]), to_first);
        du[i] += to_first;
        dw[i] = fmaf(exponential(w + p + back.p[i]), fmaf(back.a[i], a, -back.b[i] * b), dw[i]);
        const Weights past(back.p[i] + w, -token.largest);
        back.a[i] = past.of(back.a[i], token.q);
        back.b[i] = past.of(back.b[i], token.q * token.y);
        back.p[i] = past.largest;
      }
      Vector<T, V>::of(dk).store(to.dk.at(where.line, first + t, where.channel));
      Vector<T, V>::of(dv).store(to.dv.at(where.line, first + t, where.channel));
      Vector<T, V>::of(dr).store(to.dr.at(where.line, first + t, where.channel));
    }
    ends = (starts & 1u) != 0;
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const std::int64_t at = (where.line * call.segments + where.index) * call.channels + where.channel + i;
    to.dtime_decay[at] = parameters.w[i] * dw[i];
    to.dtime_first[at] = du[i];
  }
}

}  // namespace flashgla::ops::wkv::cuda

// Forward: one pass over the tokens, the states before every chunk kept where backward wants them. A chunk's inputs are
// asked for while the one before is walked through, and brought near a chunk earlier. A warp needs no other. Where
// sequences are cut into segments, a pass before that finds what each but the last carries on.
#pragma once

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/selective_scan/cuda/scan.cuh"

namespace flashgla::ops::selective_scan::cuda {

constexpr int kPair = 2;  // channels of a lane in the scan, each with kHalf states

// Of a warp. What a chunk is walked with is there twice: the next chunk's is made meanwhile.
struct ForwardShared {
  struct Walk {
    float keys[kChunk][2][kStates];
    float4 steps[kChunk][kWarp / kPair + 1];  // of a lane's pair of channels dt, then dt x
  } walks[2];
  float sums[kChunk][kRow];  // over the states, of c h
  float bias[kWarp], skip[kWarp];
};

// The sum of c h over the states of channel `lane` of the warp.
__device__ __forceinline__ float output_of_own_channel(const float (&c)[kHalf], const float (&h)[kPair][kHalf],
                                                       int lane) {
  float sums[kPair];
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
    sums[i] = c[0] * h[i][0];
#pragma unroll
    for (int k = 1; k < kHalf; ++k) sums[i] = fmaf(c[k], h[i][k], sums[i]);
  }
  const bool second = lane & 1;
  return (second ? sums[1] : sums[0]) + __shfl_xor_sync(kAll, second ? sums[0] : sums[1], 1);
}

// What a lane reads of a chunk: eight channels of its token and its part of b and c. Read chunk after chunk, so that
// addresses are carried along. kWhole: rows are read 16 bytes at a time, have 16 states and whole warps of channels.
template <class T, bool kWhole>
class ForwardInputs {
 public:
  struct Own {
    Vector<T, kWide> x = Vector<T, kWide>::zero(), raw = Vector<T, kWide>::zero(), z = Vector<T, kWide>::zero();
    Vector<T, kHalf> keys = Vector<T, kHalf>::zero();
  };

  __device__ __forceinline__ ForwardInputs(const Call<T>& call, const Where& where, const Place& place, int chunk)
      : call_(call) {
    left_ = !kWhole || where.first < call.channels ? place.length - chunk * kChunk - where.token : 0;
    const std::int64_t t = place.begin + chunk * kChunk + where.token;
    const int channel = where.first + where.wide, state = where.lane % 2 * kHalf;
    count_ = call.channels - channel;
    x_ = call.x.at(place.line, t, channel);
    raw_ = call.raw.at(place.line, t, channel);
    z_ = call.z.at(place.line, t, channel);
    const bool second = where.lane / 2 % 2 != 0;
    keys_ = (second ? call.c : call.b).at(place.line, t, state);
    keys_step_ = kChunk * (second ? call.c : call.b).token_stride;
    states_ = call.states - state;
  }

  // The next chunk's; behind the sequence's end the numbers that are there already.
  __device__ __forceinline__ void next(Own& own) {
    read(x_, count_, call_.vectors, own.x);
    read(raw_, count_, call_.vectors, own.raw);
    read(z_, count_, call_.vectors, own.z);
    read(keys_, states_, call_.key_vectors, own.keys);
    left_ -= kChunk;
    x_ += kChunk * call_.x.token_stride;
    raw_ += kChunk * call_.raw.token_stride;
    z_ += kChunk * call_.z.token_stride;
    keys_ += keys_step_;
    if (kWhole && left_ > 0) {
      ptx::prefetch_l2(x_);
      ptx::prefetch_l2(raw_);
      ptx::prefetch_l2(z_);
      ptx::prefetch_l2(keys_);
    }
  }

 private:
  __device__ __forceinline__ void read(const T* from, int count, bool vector, Vector<T, kWide>& to) const {
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < Vector<T, kWide>::kWords; i += 4) {
        // Without a branch, which would cut the loop's body into pieces.
        asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %5, 0;\n@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                     : "+r"(to.words[i]), "+r"(to.words[i + 1]), "+r"(to.words[i + 2]), "+r"(to.words[i + 3])
                     : "l"(__cvta_generic_to_global(from) + 4 * i), "r"(left_));
      }
    } else if (left_ > 0) {
      to = load_eight<T>(from, count, vector);
    }
  }

  const Call<T>& call_;
  int left_, count_, states_;  // tokens from this one on; channels and states from the lane's first
  const T *x_, *raw_, *z_, *keys_;
  std::int64_t keys_step_;
};

// kCarry: the pass before, of all segments but the last. y null: only ht and what is kept.
//
// The walk keeps the special function units busy, so what the channels need of the next chunk is computed between its
// tokens, one channel behind each.
static_assert(kWide == kChunk);
template <class T, bool kCarry, bool kWhole>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(Call<T> call, Lines<T> y, float* ht) {
  flashgla::cuda::wait_for_previous();
  __shared__ __align__(16) ForwardShared of_warps[kWarps];
  const Where where(call.tiles, kCarry ? call.segments - 1 : call.segments);
  const Place place(call, where.sequence);
  const Chunks chunks(place, where.segment, call.segments);
  ForwardShared& shared = of_warps[where.warp];
  const std::int64_t state = place.n * call.channels * call.states;
  float rates[kPair][kHalf], h[kPair][kHalf], steps[kWide] = {};
  load_rates(call, where, rates);
  load_states(call, where, call.h0 == nullptr || where.segment > 0 ? nullptr : call.h0 + state, h);
  if constexpr (!kCarry) {
    for (int segment = 0; segment < where.segment; ++segment) through_segment(call, where, segment, rates, h);
  }
  load_parameter(call, where, call.dt_bias, shared.bias);
  load_parameter(call, where, call.skip, shared.skip);
  __syncwarp();

  const int end = min(place.length, chunks.end * kChunk);
  float bias[kWide], dt[kWide], driven[kWide], gate[kWide];
  load_floats(&shared.bias[where.wide], bias);
  using Inputs = ForwardInputs<T, kWhole>;
  using Own = typename Inputs::Own;
  // What the walk of a chunk and its outputs need of channel i.
  const auto prepare = [&](const Own& own, int chunk, int i) {
    dt[i] = step_of(own.raw[i], bias[i], chunk * kChunk + where.token < end);
    driven[i] = dt[i] * own.x[i];
    gate[i] = own.z[i] * ops::cuda::sigmoid(own.z[i]);
    if constexpr (kCarry) steps[i] += dt[i];
  };
  const auto store = [&](const Own& own, int chunk) {
    ForwardShared::Walk& walk = shared.walks[chunk % 2];
#pragma unroll
    for (int i = 0; i < kWide; i += kPair) {
      walk.steps[where.token][(where.wide + i) / kPair] = make_float4(dt[i], dt[i + 1], driven[i], driven[i + 1]);
    }
    store_keys(own.keys, where, walk.keys);
  };
  Inputs inputs(call, where, place, chunks.begin);
  Own next;
  inputs.next(next);
#pragma unroll
  for (int i = 0; i < kWide; ++i) prepare(next, chunks.begin, i);
  store(next, chunks.begin);
  Vector<T, kWide> x = next.x;
  inputs.next(next);
  __syncwarp();
  const int channel = where.first + where.wide, count = call.channels - channel;
  T* out = y.at(place.line, place.begin + chunks.begin * kChunk + where.token, channel);
  const Square<kPair> square(where.lane);
  float4* kept = kept_at(call, where, place, min(chunks.begin, place.chunks()));
  T* outputs_kept = outputs_at(call, where, place, chunks.begin);
  const std::int64_t kept_step = call.tiles * (kWarps * kSquare);
  const bool keeps = !kCarry && call.kept != nullptr;
  for (int chunk = chunks.begin; chunk < chunks.end; ++chunk) {
    if (keeps) store_square(h, kept, where.lane);
    kept += kept_step;
    const Own own = next;
    inputs.next(next);
    const ForwardShared::Walk& walk = shared.walks[chunk % 2];
    float sums[kChunk], gate_now[kWide];  // sums: stored behind all tokens: no load of the next waits for a store
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      const float4 steps_of_pair = walk.steps[t][square.channel / kPair];
      const float step[kPair] = {steps_of_pair.x, steps_of_pair.y}, by[kPair] = {steps_of_pair.z, steps_of_pair.w};
      float b[kHalf], c[kHalf];
      load_floats(&walk.keys[t][0][square.state], b);
      advance(rates, step, by, b, h);
      gate_now[t] = gate[t];
      prepare(own, chunk + 1, t);
      if constexpr (kCarry) continue;
      load_floats(&walk.keys[t][1][square.state], c);
      sums[t] = output_of_own_channel(c, h, where.lane);
    }
    __syncwarp();  // what was stored for the chunk before has been read
    store(own, chunk + 1);
    if constexpr (!kCarry) {
#pragma unroll
      for (int t = 0; t < kChunk; ++t) shared.sums[t][where.lane] = sums[t];
    }
    __syncwarp();
    if constexpr (kCarry) continue;
    if ((y.data != nullptr || keeps) && chunk * kChunk + where.token < place.length) {
      float outputs[kWide], skip[kWide];
      load_floats(&shared.sums[where.token][where.wide], outputs);
      load_floats(&shared.skip[where.wide], skip);
#pragma unroll
      for (int i = 0; i < kWide; ++i) outputs[i] = fmaf(skip[i], x[i], outputs[i]);
      if (keeps) Vector<T, kWide>::of(outputs).store(outputs_kept);
#pragma unroll
      for (int i = 0; i < kWide; ++i) outputs[i] *= gate_now[i];
      if constexpr (kWhole) {
        if (y.data != nullptr && count > 0) Vector<T, kWide>::of(outputs).store(out);
      } else if (y.data != nullptr) {
        store_eight(outputs, out, count, call.vectors);
      }
    }
    out += kChunk * y.token_stride;
    outputs_kept += kChunk * call.tiles * kBlockChannels;
    x = own.x;
  }
  if constexpr (kCarry) {
    store_carried(call, where, where.segment, h, steps);
  } else if (where.segment == call.segments - 1) {
    if (keeps) store_square(h, kept, where.lane);  // other segments' last are the next ones' first
    if (ht != nullptr) store_states(call, where, h, ht + state);
  }
}

}  // namespace flashgla::ops::selective_scan::cuda

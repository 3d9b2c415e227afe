// Backward: the chunks from the last to the first. Each chunk's states are computed again from those kept before it and
// wait in shared memory, but for the last, which the lanes have. Then the tokens are walked back, the gradient of the
// state in registers. What db and dc are sums of over the channels is added up by matrix products with ones.
#pragma once

#include "flashgla/ops/selective_scan/cuda/scan.cuh"

namespace flashgla::ops::selective_scan::cuda {

template <class T>
struct Gradients {
  Lines<T> dy, dx, draw, dz;
  float* partial;  // [tiles,rows,2 kStates]: db and dc of a block's channels
  float* da_log;   // [N,segments,E,K]
  float* dskip;    // [N,segments,E]
  std::int64_t rows;
};

struct BackwardShared {
  struct OfWarp {
    float4 states[kChunk][4][kWarp];  // of each lane, before each token
    float keys[kChunk][2][kStates];
    float dt[kChunk][kRow];
    float driven[kChunk][kRow];     // dt x
    float open[kChunk][kRow];       // sigmoid(z)
    float dsum[kChunk][kRow];       // dy silu(z)
    float to_driven[kChunk][kRow];  // what OwnSums says
    float to_dt[kChunk][kRow];
    float outputs[kChunk][kRow];
    float bias[kWarp], skip[kWarp];
  } warps[kWarps];
  float keys[2][kWarps][kChunk][2][kStates];  // db and dc of each warp's channels, of this chunk and the one before
};

// d += a b in the matrix units: a [16,8], b [8,8], d [16,8]; the low 13 bits of the operands are not looked at.
__device__ __forceinline__ void multiply_tf32(const float (&a)[4], float b0, float b1, float (&d)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// What the matrix units see of a number, so that the rest can be added by a second product.
__device__ __forceinline__ float seen(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// Sums over a warp's channels of eight values a lane, one for each of its states, for four tokens of two kinds (b, c).
// kExact: to 2^-22 instead of 2^-10 of the addends.
//
// First product: lane l's value of state s goes to row 8 (l % 2) + s of the sums and column l / 4, which adds up the
// two lanes l and l ^ 2: of b's fragment lane l has rows l % 4 and l % 4 + 4 of column l / 4, so a[row, l % 4 (+ 4)] is
// one where the row is that of the first (second) value. Second product: the sums over columns go to column `slot`.
template <bool kExact>
struct SumOverChannels {
  float ones[kHalf / 2][4];  // of the first products
  float sums[4];             // [state, slot]: lane l has states l / 4, l / 4 + 8 of slots 2 (l % 4), 2 (l % 4) + 1

  __device__ __forceinline__ explicit SumOverChannels(int lane) {
#pragma unroll
    for (int j = 0; j < kHalf / 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ones[j][i] = lane / 4 == 2 * j + i / 2 && lane % 2 == i % 2 ? 1.0f : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void clear() { sums[0] = sums[1] = sums[2] = sums[3] = 0.0f; }

  __device__ __forceinline__ void add(const float (&values)[kHalf], int slot, int lane) {
    float columns[4] = {};
#pragma unroll
    for (int j = 0; j < kHalf / 2; ++j) {
      const float first = values[2 * j], second = values[2 * j + 1];
      if constexpr (kExact) {
        multiply_tf32(ones[j], first - seen(first), second - seen(second), columns);
        multiply_tf32(ones[j], seen(first), seen(second), columns);
      } else {
        multiply_tf32(ones[j], first, second, columns);
      }
    }
    const float here = lane / 4 == slot ? 1.0f : 0.0f;
    const float rows[4] = {columns[0], columns[2], columns[1], columns[3]};
    if constexpr (kExact) {
      const float rest[4] = {rows[0] - seen(rows[0]), rows[1] - seen(rows[1]), rows[2] - seen(rows[2]),
                             rows[3] - seen(rows[3])};
      multiply_tf32(rest, here, here, sums);
      const float front[4] = {seen(rows[0]), seen(rows[1]), seen(rows[2]), seen(rows[3])};
      multiply_tf32(front, here, here, sums);
    } else {
      multiply_tf32(rows, here, here, sums);
    }
  }

  // Slots 0 to 3 are b's of tokens `first` on, 4 to 7 c's.
  __device__ __forceinline__ void store(float (*to)[2][kStates], int first, int lane) const {
    const int kind = lane % 4 / 2, token = first + lane % 2 * 2, state = lane / 4;
    to[token][kind][state] = sums[0];
    to[token + 1][kind][state] = sums[1];
    to[token][kind][state + 8] = sums[2];
    to[token + 1][kind][state + 8] = sums[3];
  }
};

// A token's sums over the states for channel `lane` of the warp: dh b, the rates' part of d(dt), c h.
struct OwnSums {
  float to_driven, to_dt, outputs;
};

// Back over token t, the `slot`th of its four, behind which the states were h and before which they were old.
template <bool kExact>
__device__ __forceinline__ OwnSums back(const BackwardShared::OfWarp& shared, const Where& where, int t, int slot,
                                        const float (&rates)[kPair][kHalf], const float (&h)[kPair][kHalf],
                                        const float (&old)[kPair][kHalf], float (&dh)[kPair][kHalf],
                                        float (&da)[kPair][kHalf], SumOverChannels<kExact>& sum) {
  float dt[kPair], driven[kPair], dsum[kPair], b[kHalf], c[kHalf];
  load_floats(&shared.dt[t][where.pair], dt);
  load_floats(&shared.driven[t][where.pair], driven);
  load_floats(&shared.dsum[t][where.pair], dsum);
  load_floats(&shared.keys[t][0][where.states], b);
  load_floats(&shared.keys[t][1][where.states], c);
  float to_driven[kPair], to_dt[kPair], outputs[kPair], to_b[kHalf], to_c[kHalf];
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
    to_driven[i] = to_dt[i] = outputs[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const float decay = ops::cuda::power_of_two(dt[i] * rates[i][k]);
      const float d = fmaf(c[k], dsum[i], dh[i][k]);
      outputs[i] = fmaf(c[k], h[i][k], outputs[i]);
      to_driven[i] = fmaf(d, b[k], to_driven[i]);
      to_b[k] = i == 0 ? d * driven[i] : fmaf(d, driven[i], to_b[k]);
      to_c[k] = i == 0 ? h[i][k] * dsum[i] : fmaf(h[i][k], dsum[i], to_c[k]);
      dh[i][k] = d * decay;
      const float through = dh[i][k] * old[i][k];
      to_dt[i] = fmaf(rates[i][k], through, to_dt[i]);
      da[i][k] = fmaf(dt[i], through, da[i][k]);
    }
  }
  sum.add(to_b, slot, where.lane);
  sum.add(to_c, slot + 4, where.lane);
  return {sum_of_own_channel(to_driven, where.lane), sum_of_own_channel(to_dt, where.lane),
          sum_of_own_channel(outputs, where.lane)};
}

// A lane's channels of its token of a chunk.
template <class T>
struct Own {
  Vector<T, kWide> x, raw, z, dy;

  __device__ __forceinline__ Own(const Call<T>& call, const Gradients<T>& gradients, const Where& where,
                                 const Place& place, int chunk)
      : x(load_wide(call, call.x, where, place, chunk)),
        raw(load_wide(call, call.raw, where, place, chunk)),
        z(load_wide(call, call.z, where, place, chunk)),
        dy(load_wide(call, gradients.dy, where, place, chunk)) {}

  // What the walk needs of them, to shared memory.
  __device__ __forceinline__ void prepare(BackwardShared::OfWarp& shared, const Where& where, bool real) const {
    float bias[kWide], dt[kWide], driven[kWide], open[kWide], dsum[kWide];
    load_floats(&shared.bias[where.wide], bias);
    steps_of(raw, bias, real, dt);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      driven[i] = dt[i] * x[i];
      open[i] = ops::cuda::sigmoid(z[i]);
      dsum[i] = dy[i] * z[i] * open[i];
    }
    store_floats(dt, &shared.dt[where.token][where.wide]);
    store_floats(driven, &shared.driven[where.token][where.wide]);
    store_floats(open, &shared.open[where.token][where.wide]);
    store_floats(dsum, &shared.dsum[where.token][where.wide]);
  }

  // Their gradients, from what the walk has left there.
  __device__ __forceinline__ void finish(const Call<T>& call, const Gradients<T>& gradients,
                                         const BackwardShared::OfWarp& shared, const Where& where, const Place& place,
                                         int t, float (&dskip)[kWide]) const {
    float dt[kWide], open[kWide], dsum[kWide], skip[kWide], bias[kWide];
    float to_driven[kWide], to_dt[kWide], outputs[kWide];
    load_floats(&shared.open[where.token][where.wide], open);
    load_floats(&shared.dt[where.token][where.wide], dt);
    load_floats(&shared.dsum[where.token][where.wide], dsum);
    load_floats(&shared.to_driven[where.token][where.wide], to_driven);
    load_floats(&shared.to_dt[where.token][where.wide], to_dt);
    load_floats(&shared.outputs[where.token][where.wide], outputs);
    load_floats(&shared.skip[where.wide], skip);
    load_floats(&shared.bias[where.wide], bias);
    float dx[kWide], draw[kWide], dz[kWide];
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      dx[i] = fmaf(to_driven[i], dt[i], skip[i] * dsum[i]);
      draw[i] = fmaf(to_driven[i], x[i], kLn2 * to_dt[i]) * ops::cuda::sigmoid(raw[i] + bias[i]);
      dz[i] = dy[i] * fmaf(skip[i], x[i], outputs[i]) * ops::cuda::silu_slope(z[i], open[i]);
      dskip[i] = fmaf(dsum[i], x[i], dskip[i]);
    }
    const int channel = where.first + where.wide, count = call.channels - channel;
    const std::int64_t row = place.begin + t;
    store_eight(dx, gradients.dx.at(place.line, row, channel), count, call.vectors);
    store_eight(draw, gradients.draw.at(place.line, row, channel), count, call.vectors);
    store_eight(dz, gradients.dz.at(place.line, row, channel), count, call.vectors);
  }
};

// What each segment but the first carries back of the state's gradient when nothing comes from behind it.
template <class T>
__global__ void __launch_bounds__(kThreads, 2) carry_back_kernel(Call<T> call, Lines<T> dy) {
  struct Shared {
    float keys[kChunk][2][kStates];
    float dt[kChunk][kRow], dsum[kChunk][kRow];
    float bias[kWarp];
  };
  flashgla::cuda::wait_for_previous();
  __shared__ __align__(16) Shared of_warps[kWarps];
  const Where where(call.tiles, call.segments - 1);
  const int segment = where.segment + 1;
  const Place place(call, where.sequence);
  const Chunks chunks(place, segment, call.segments);
  Shared& shared = of_warps[where.warp];
  float rates[kPair][kHalf], dh[kPair][kHalf] = {}, steps[kWide] = {};
  load_rates(call, where, rates);
  load_parameter(call, where, call.dt_bias, shared.bias);
  __syncwarp();
  for (int chunk = chunks.end - 1; chunk >= chunks.begin; --chunk) {
    const Vector<T, kWide> raw = load_wide(call, call.raw, where, place, chunk);
    const Vector<T, kWide> z = load_wide(call, call.z, where, place, chunk),
                           d = load_wide(call, dy, where, place, chunk);
    store_keys(load_keys(call, where, place, chunk), where, shared.keys);
    float bias[kWide], dt[kWide], dsum[kWide];
    load_floats(&shared.bias[where.wide], bias);
    steps_of(raw, bias, chunk * kChunk + where.token < place.length, dt);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      dsum[i] = d[i] * z[i] * ops::cuda::sigmoid(z[i]);
      steps[i] += dt[i];
    }
    store_floats(dt, &shared.dt[where.token][where.wide]);
    store_floats(dsum, &shared.dsum[where.token][where.wide]);
    __syncwarp();
#pragma unroll 4
    for (int t = kChunk - 1; t >= 0; --t) {
      float step[kPair], by[kPair], c[kHalf];
      load_floats(&shared.dt[t][where.pair], step);
      load_floats(&shared.dsum[t][where.pair], by);
      load_floats(&shared.keys[t][1][where.states], c);
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
#pragma unroll
        for (int k = 0; k < kHalf; ++k) {
          dh[i][k] = fmaf(c[k], by[i], dh[i][k]) * ops::cuda::power_of_two(step[i] * rates[i][k]);
        }
      }
    }
    __syncwarp();
  }
  store_carried(call, where, segment, dh, steps);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) backward_kernel(Call<T> call, Gradients<T> gradients) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(16) unsigned char memory[];
  BackwardShared& block = *reinterpret_cast<BackwardShared*>(memory);
  const Where where(call.tiles, call.segments);
  const Place place(call, where.sequence);
  const Chunks chunks(place, where.segment, call.segments);
  BackwardShared::OfWarp& shared = block.warps[where.warp];
  float rates[kPair][kHalf], dh[kPair][kHalf] = {}, da[kPair][kHalf] = {}, dskip[kWide] = {};
  load_rates(call, where, rates);
  for (int segment = call.segments - 1; segment > where.segment; --segment) {
    through_segment(call, where, segment, rates, dh);
  }
  load_parameter(call, where, call.dt_bias, shared.bias);
  load_parameter(call, where, call.skip, shared.skip);
  SumOverChannels<sizeof(T) == 4> sum(where.lane);
  float4(*stored)[4][kWarp] = shared.states;
  const std::int64_t row = place.line * (call.cu_seqlens == nullptr ? call.length : 0) + place.begin;
  __syncwarp();

  // From what a lane has read of a chunk; ahead() asks for the next.
  const auto back_over = [&](int chunk, const Own<T>& own, const Vector<T, kHalf>& keys, float(&h)[kPair][kHalf],
                             const auto& ahead) {
    const int first = chunk * kChunk;
    own.prepare(shared, where, first + where.token < place.length);
    store_keys(keys, where, shared.keys);
    __syncwarp();
#pragma unroll 1
    for (int four = 0; four < kChunk; four += 4) {
      float dt[4][kPair], driven[4][kPair], b[4][kHalf];  // in front of the stores, which loads do not pass
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        load_floats(&shared.dt[four + t][where.pair], dt[t]);
        load_floats(&shared.driven[four + t][where.pair], driven[t]);
        load_floats(&shared.keys[four + t][0][where.states], b[t]);
      }
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        store_square(h, &stored[four + t][0][where.lane], kWarp);
        advance(rates, dt[t], driven[t], b[t], h);
      }
    }
    float(*sums)[2][kStates] = block.keys[chunk % 2][where.warp];
#pragma unroll 1
    for (int four = kChunk - 4; four >= 0; four -= 4) {
      sum.clear();
      OwnSums tokens[4];
      const auto store = [&](int t) {
        shared.to_driven[four + t][where.lane] = tokens[t].to_driven;
        shared.to_dt[four + t][where.lane] = tokens[t].to_dt;
        shared.outputs[four + t][where.lane] = tokens[t].outputs;
      };
      // Stored behind all four, so that no load of the next token waits for a store; f32 has no registers for that.
      constexpr bool kAtOnce = sizeof(T) == 4;
#pragma unroll
      for (int t = 3; t >= 0; t -= 2) {
        float old[kPair][kHalf];
        load_square(&stored[four + t][0][where.lane], kWarp, old);
        tokens[t] = back(shared, where, four + t, t, rates, h, old, dh, da, sum);
        load_square(&stored[four + t - 1][0][where.lane], kWarp, h);
        if constexpr (kAtOnce) store(t);
        tokens[t - 1] = back(shared, where, four + t - 1, t - 1, rates, old, h, dh, da, sum);
        if constexpr (kAtOnce) store(t - 1);
      }
      if constexpr (!kAtOnce) {
#pragma unroll
        for (int t = 0; t < 4; ++t) store(t);
      }
      sum.store(sums, four, where.lane);
    }
    __syncwarp();
    ahead();
    if (first + where.token < place.length) {
      const auto finish = [&](const Own<T>& of) {
        of.finish(call, gradients, shared, where, place, first + where.token, dskip);
      };
      if constexpr (sizeof(T) == 4) {
        finish(Own<T>(call, gradients, where, place, chunk));  // again: registers have no room for it meanwhile
      } else {
        finish(own);
      }
    }
    __syncthreads();  // the warps' sums over their channels are there; those of the chunk before have been read
    const int item = static_cast<int>(threadIdx.x) * 2, t = item / (2 * kStates);
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float2 more = *reinterpret_cast<const float2*>(&block.keys[chunk % 2][warp][0][0][0] + item);
      total.x += more.x;
      total.y += more.y;
    }
    if (first + t < place.length) {
      float* to = gradients.partial + (where.tile * gradients.rows + row + first) * (2 * kStates) + item;
      *reinterpret_cast<float2*>(to) = total;
    }
  };
  // Before what is left of the chunk behind is written; f32, and ptxas for 8.0, have no registers for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kEarly = sizeof(T) == 2;
#else
  constexpr bool kEarly = false;
#endif
  float h[kPair][kHalf];
  if constexpr (!kEarly) {
    for (int chunk = chunks.end - 1; chunk >= chunks.begin; --chunk) {
      const Own<T> own(call, gradients, where, place, chunk);
      const Vector<T, kHalf> keys = load_keys(call, where, place, chunk);
      load_square(kept_at(call, where, place, chunk), kWarp, h);
      back_over(chunk, own, keys, h, [] {});
    }
  } else {
    const int last = max(chunks.end, 1) - 1;
    Own<T> own(call, gradients, where, place, last);
    Vector<T, kHalf> keys = load_keys(call, where, place, last);
    load_square(kept_at(call, where, place, last), kWarp, h);
    for (int chunk = chunks.end - 1; chunk >= chunks.begin; --chunk) {
      Own<T> next = own;
      back_over(chunk, own, keys, h, [&] {
        if (chunk == chunks.begin) return;
        next = Own<T>(call, gradients, where, place, chunk - 1);
        keys = load_keys(call, where, place, chunk - 1);
        load_square(kept_at(call, where, place, chunk - 1), kWarp, h);
      });
      own = next;
    }
  }
  const std::int64_t slot = where.sequence * call.segments + where.segment;
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    for (int distance = 4; distance < kWarp; distance *= 2) dskip[i] += __shfl_xor_sync(kAll, dskip[i], distance);
    const int channel = where.first + where.wide + i;
    if (where.token == 0 && channel < call.channels) gradients.dskip[slot * call.channels + channel] = dskip[i];
  }
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) da[i][k] *= kLn2 * rates[i][k];
  }
  store_states(call, where, da, gradients.da_log + slot * call.channels * call.states);
}

// db and dc of a token and state: the blocks' sums, one after the other.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const float* partial, std::int64_t tiles, std::int64_t rows,
                                                       std::int64_t length, int states, Lines<T> db, Lines<T> dc) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, row = item / (2 * kStates);
  const int which = static_cast<int>(item / kStates % 2), state = static_cast<int>(item % kStates);
  if (row >= rows || state >= states) return;
  float total = 0.0f;
#pragma unroll 8
  for (std::int64_t tile = 0; tile < tiles; ++tile) total += partial[tile * rows * 2 * kStates + item];
  *(which == 0 ? db : dc).at(row / length, row % length, state) = flashgla::cuda::from_float<T>(total);
}

}  // namespace flashgla::ops::selective_scan::cuda

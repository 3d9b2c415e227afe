// Backward: the chunks from the last to the first, a chunk's tokens four by four. The states of four tokens are
// computed again from those kept before them and stay in registers, where the walk back over the four finds them; the
// state behind them is what was kept before the next four. What a chunk needs of memory is copied into shared memory
// while the chunk behind it is walked over. Sums over channels are matrix products.
#pragma once

#include "flashgla/ops/selective_scan/cuda/backward_lines.cuh"

namespace flashgla::ops::selective_scan::cuda {

// d = a b + d in the matrix units: a [16,8], b [8,8], d [16,8]; the low 13 bits of the operands are not looked at.
__device__ __forceinline__ void multiply_tf32(const float (&a)[4], float b0, float b1, float (&d)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// What the matrix units see of a number, so that the rest can be added by a second product.
__device__ __forceinline__ float seen(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// d += a b, to 2^-10 of the factors, or (kExact) to 2^-21.
template <bool kExact>
__device__ __forceinline__ void multiply(const float (&a)[4], float b0, float b1, float (&d)[4]) {
  if constexpr (kExact) {
    const float rest[4] = {a[0] - seen(a[0]), a[1] - seen(a[1]), a[2] - seen(a[2]), a[3] - seen(a[3])};
    const float front[4] = {seen(a[0]), seen(a[1]), seen(a[2]), seen(a[3])};
    multiply_tf32(rest, b0, b1, d);
    multiply_tf32(front, b0 - seen(b0), b1 - seen(b1), d);
    multiply_tf32(front, b0, b1, d);
  } else {
    multiply_tf32(a, b0, b1, d);
  }
}

// Sums over the sixteen channels of a half of the warp, for a lane's states, of values times a factor of the channel: a
// matrix product whose rows are the states and the half (lane / 4: state's quarter and half), and that adds up over
// channels (lane % 4 and the lane's own). Of its columns those are of use whose factors are of the row's half: the
// sums are right in lanes with lane % 4 / 2 == lane / 16.
template <bool kExact>
__device__ __forceinline__ void sum_over_half(const float (&values)[kQuad][kQuad], const float (&by)[kQuad],
                                              float (&sums)[kQuad]) {
#pragma unroll
  for (int k = 0; k < kQuad; k += 2) {
    float columns[4] = {};
#pragma unroll
    for (int i = 0; i < kQuad; i += 2) {
      const float rows[4] = {values[i][k], values[i][k + 1], values[i + 1][k], values[i + 1][k + 1]};
      multiply<kExact>(rows, by[i], by[i + 1], columns);
    }
    sums[k] = columns[0];
    sums[k + 1] = columns[2];
  }
}

// What the walk back needs of a token.
struct Token {
  float dt[kQuad], driven[kQuad], dsum[kQuad], b[kQuad], c[kQuad];

  template <class OfWarp>
  __device__ __forceinline__ void load(const OfWarp& shared, const Square<kQuad>& square, int t) {
    load_floats(&shared.dt[t][square.channel], dt);
    load_floats(&shared.driven[t][square.channel], driven);
    load_floats(&shared.dsum[t][square.channel], dsum);
    load_floats(&shared.keys[t][0][square.state], b);
    load_floats(&shared.keys[t][1][square.state], c);
  }
};

// A token's sums: over a lane's states of dh b and of the rates' part of d(dt), for its channels; over the half's
// channels of what b and c get, for its states.
struct TokenSums {
  float to_driven[kQuad], to_dt[kQuad], to_b[kQuad], to_c[kQuad];
};

// Back over a token, behind which the states were h and before which they were old.
template <bool kExact>
__device__ __forceinline__ TokenSums back(const Token& token, const float (&rates)[kQuad][kQuad],
                                          const float (&h)[kQuad][kQuad], const float (&old)[kQuad][kQuad],
                                          float (&dh)[kQuad][kQuad], float (&da)[kQuad][kQuad]) {
  TokenSums sums;
  sum_over_half<kExact>(h, token.dsum, sums.to_c);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    sums.to_driven[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      dh[i][k] = fmaf(token.c[k], token.dsum[i], dh[i][k]);
      sums.to_driven[i] = fmaf(dh[i][k], token.b[k], sums.to_driven[i]);
    }
  }
  sum_over_half<kExact>(dh, token.driven, sums.to_b);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    sums.to_dt[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      dh[i][k] *= ops::cuda::power_of_two(token.dt[i] * rates[i][k]);
      const float through = dh[i][k] * old[i][k];
      sums.to_dt[i] = fmaf(rates[i][k], through, sums.to_dt[i]);
      da[i][k] = fmaf(token.dt[i], through, da[i][k]);
    }
  }
  return sums;
}

// What the walk needs of a chunk's channels, to shared memory.
template <class T, int kBuffers>
__device__ __forceinline__ void prepare(const BackwardLines<T, kBuffers>& lines, int chunk,
                                        typename BackwardShared<T, kBuffers>::OfWarp& shared, const Where& where) {
  const auto x = lines.get(kX, chunk), raw = lines.get(kRaw, chunk), z = lines.get(kZ, chunk),
             dy = lines.get(kDy, chunk);
  float bias[kWide], dt[kWide], driven[kWide], open[kWide], dsum[kWide];
  load_floats(&shared.bias[where.wide], bias);
  steps_of(raw, bias, lines.there(chunk), dt);
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
  store_keys(lines.get(kKeys, chunk), where, shared.keys);
}

// The sums of eight channels of a lane's token over the lanes that have their states.
__device__ __forceinline__ void total_of_wide(const float (&sums)[kQuad * kWarp], const Where& where,
                                              float (&total)[kWide]) {
  // Halves begin with quarters of other banks.
  const int half = where.wide / 16;
  const float* from = sums + half * (kQuad * 16) + where.wide % 16;
  const float *even = from + half * 16, *odd = from - half * 16;
  float more[kQuad][kWide];
#pragma unroll
  for (int quarter = 0; quarter < kQuad; ++quarter) {
    load_floats((quarter % 2 == 0 ? even : odd) + quarter * 16, more[quarter]);
  }
#pragma unroll
  for (int i = 0; i < kWide; ++i) total[i] = (more[0][i] + more[1][i]) + (more[2][i] + more[3][i]);
}

// The gradients of a chunk's channels, from what the walk has left.
template <class T, int kBuffers>
__device__ __forceinline__ void finish(const BackwardLines<T, kBuffers>& lines,
                                       typename BackwardShared<T, kBuffers>::OfWarp& shared, const Where& where,
                                       int chunk, float (&dskip)[kWide]) {
  const auto x = lines.get(kX, chunk), raw = lines.get(kRaw, chunk), z = lines.get(kZ, chunk),
             dy = lines.get(kDy, chunk), output = lines.get(kOutput, chunk);
  float dt[kWide], open[kWide], dsum[kWide], skip[kWide], bias[kWide], to_driven[kWide], to_dt[kWide];
  load_floats(&shared.open[where.token][where.wide], open);
  load_floats(&shared.dt[where.token][where.wide], dt);
  load_floats(&shared.dsum[where.token][where.wide], dsum);
  load_floats(&shared.skip[where.wide], skip);
  load_floats(&shared.bias[where.wide], bias);
  total_of_wide(shared.sums(where.token).to_driven, where, to_driven);
  total_of_wide(shared.sums(where.token).to_dt, where, to_dt);
  float to[kOutputs][kWide];
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    to[kDx][i] = fmaf(to_driven[i], dt[i], skip[i] * dsum[i]);
    to[kDraw][i] = fmaf(to_driven[i], x[i], kLn2 * to_dt[i]) * ops::cuda::sigmoid(raw[i] + bias[i]);
    to[kDz][i] = dy[i] * output[i] * ops::cuda::silu_slope(z[i], open[i]);
    dskip[i] = fmaf(dsum[i], x[i], dskip[i]);
  }
  lines.store(to, chunk, &shared.dt[where.token][where.wide]);
}

// A lane's states in shared memory, 16 bytes a channel.
__device__ __forceinline__ void load_own(const float4 (&from)[kQuad][kWarp], int lane, float (&h)[kQuad][kQuad]) {
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    const float4 four = from[i][lane];
    h[i][0] = four.x;
    h[i][1] = four.y;
    h[i][2] = four.z;
    h[i][3] = four.w;
  }
}
__device__ __forceinline__ void store_own(const float (&h)[kQuad][kQuad], int lane, float4 (&to)[kQuad][kWarp]) {
#pragma unroll
  for (int i = 0; i < kQuad; ++i) to[i][lane] = make_float4(h[i][0], h[i][1], h[i][2], h[i][3]);
}

// A chunk's states again, from those before it: before its first tokens in shared memory, before the others in h.
template <class OfWarp>
__device__ __forceinline__ void walk_ahead(OfWarp& shared, int lane, const float (&rates)[kQuad][kQuad],
                                           const float (&before)[kQuad][kQuad], float (&h)[kInShared][kQuad][kQuad]) {
  const Square<kQuad> square(lane);
  float dt[kChunk - 1][kQuad], driven[kChunk - 1][kQuad], b[kChunk - 1][kQuad];
  const auto load = [&](int t) {
    load_floats(&shared.dt[t][square.channel], dt[t]);
    load_floats(&shared.driven[t][square.channel], driven[t]);
    load_floats(&shared.keys[t][0][square.state], b[t]);
  };
  float now[kQuad][kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) now[i][k] = before[i][k];
  }
  // In front of the stores, which loads do not pass.
#pragma unroll
  for (int t = 0; t < kInShared; ++t) load(t);
#pragma unroll
  for (int t = 0; t < kInShared; ++t) {
    store_own(now, lane, shared.early[t].states);
    advance(rates, dt[t], driven[t], b[t], now);
  }
#pragma unroll
  for (int t = kInShared; t < kChunk - 1; ++t) load(t);
#pragma unroll
  for (int t = kInShared; t < kChunk; ++t) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) h[t - kInShared][i][k] = now[i][k];
    }
    if (t < kChunk - 1) advance(rates, dt[t], driven[t], b[t], now);
  }
}

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
  const Square<kQuad> square(where.lane);
  const int segment = where.segment + 1;
  const Place place(call, where.sequence);
  const Chunks chunks(place, segment, call.segments);
  Shared& shared = of_warps[where.warp];
  float rates[kQuad][kQuad], dh[kQuad][kQuad] = {}, steps[kWide] = {};
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
      float step[kQuad], by[kQuad], c[kQuad];
      load_floats(&shared.dt[t][square.channel], step);
      load_floats(&shared.dsum[t][square.channel], by);
      load_floats(&shared.keys[t][1][square.state], c);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
#pragma unroll
        for (int k = 0; k < kQuad; ++k) {
          dh[i][k] = fmaf(c[k], by[i], dh[i][k]) * ops::cuda::power_of_two(step[i] * rates[i][k]);
        }
      }
    }
    __syncwarp();
  }
  store_carried(call, where, segment, dh, steps);
}

template <class T, int kBuffers>
__global__ void __launch_bounds__(kThreads, 2) backward_kernel(Call<T> call, Gradients<T> gradients) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (kBuffers == 0) return;  // blocks have room there: never launched
#endif
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(16) unsigned char memory[];
  using Shared = BackwardShared<T, kBuffers>;
  Shared& block = *reinterpret_cast<Shared*>(memory);
  const Where where(call.tiles, call.segments);
  const Square<kQuad> square(where.lane);
  const Place place(call, where.sequence);
  const Chunks chunks(place, where.segment, call.segments);
  typename Shared::OfWarp& shared = block.warps[where.warp];
  float rates[kQuad][kQuad], dh[kQuad][kQuad] = {}, da[kQuad][kQuad] = {}, dskip[kWide] = {};
  load_rates(call, where, rates);
  for (int segment = call.segments - 1; segment > where.segment; --segment) {
    through_segment(call, where, segment, rates, dh);
  }
  load_parameter(call, where, call.dt_bias, shared.bias);
  load_parameter(call, where, call.skip, shared.skip);
  const std::int64_t row = place.line * (call.cu_seqlens == nullptr ? call.length : 0) + place.begin;
  // The states before the chunk that comes next, and those behind it.
  const int last = max(chunks.end, 1) - 1;
  const std::int64_t kept_step = call.tiles * (kWarps * kSquare);
  const float4* kept = kept_at(call, where, place, last);
  float next[kQuad][kQuad], behind[kQuad][kQuad];
  BackwardLines<T, kBuffers> lines(call, gradients, where, place, shared);
  if (chunks.end > chunks.begin) {
    lines.ask(last);
    load_square(kept, where.lane, next);
    load_square(kept + kept_step, where.lane, behind);
  }
  // Where the sums over channels of the lane's half are; the odd of such neighbours store c's, the even b's.
  const bool has_sums = where.lane % 4 / 2 == where.lane / 16, odd = where.lane % 2 != 0;
  const int own_sums = where.lane / 16 * (kQuad * 16) + where.lane / 4 % 4 * 16 + where.lane % 4 * kQuad;

  for (int chunk = chunks.end - 1; chunk >= chunks.begin; --chunk) {
    const int first = chunk * kChunk;
    ptx::copy_async_wait<0>();
    __syncwarp();
    prepare(lines, chunk, shared, where);
    if (kBuffers == 2 && chunk > chunks.begin) lines.ask(chunk - 1);
    __syncwarp();
    float(*keys)[kHalves][2][kStates] = block.keys[chunk % 2][where.warp];
    float h[kInShared][kQuad][kQuad];
    walk_ahead(shared, where.lane, rates, next, h);
#pragma unroll
    for (int half = 1; half >= 0; --half) {
      if (half == 0) {
#pragma unroll
        for (int i = 0; i < kInShared; ++i) load_own(shared.early[i].states, where.lane, h[i]);
        __syncwarp();  // sums may come into their place
        if (chunk > chunks.begin) {
          kept -= kept_step;
          load_square(kept, where.lane, next);
        }
      }
      Token token;
      token.load(shared, square, half * kInShared + kInShared - 1);
#pragma unroll
      for (int i = kInShared - 1; i >= 0; --i) {
        const int t = half * kInShared + i;
        const Token now = token;
        if (i > 0) token.load(shared, square, t - 1);  // in front of the stores, which loads do not pass
        const TokenSums sums =
            back<sizeof(T) == 4>(now, rates, i + 1 < kInShared ? h[(i + 1) % kInShared] : behind, h[i], dh, da);
        LaneSums& to = half == 0 ? shared.early[i].sums : shared.late[i].sums;
        *reinterpret_cast<float4*>(&to.to_driven[own_sums]) =
            make_float4(sums.to_driven[0], sums.to_driven[1], sums.to_driven[2], sums.to_driven[3]);
        *reinterpret_cast<float4*>(&to.to_dt[own_sums]) =
            make_float4(sums.to_dt[0], sums.to_dt[1], sums.to_dt[2], sums.to_dt[3]);
        float of_keys[kQuad];
#pragma unroll
        for (int k = 0; k < kQuad; ++k) of_keys[k] = odd ? sums.to_c[k] : sums.to_b[k];
        if (has_sums) {
          *reinterpret_cast<float4*>(&keys[t][where.lane / 16][odd ? 1 : 0][square.state]) =
              make_float4(of_keys[0], of_keys[1], of_keys[2], of_keys[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
#pragma unroll
        for (int k = 0; k < kQuad; ++k) behind[i][k] = h[0][i][k];
      }
    }
    __syncwarp();
    if (lines.there(chunk)) finish(lines, shared, where, chunk, dskip);
    if (kBuffers == 1 && chunk > chunks.begin) lines.ask(chunk - 1);
    __syncthreads();  // the warps' sums over their channels are there; those of the chunk before have been read
    const int item = static_cast<int>(threadIdx.x) * 2, t = item / (2 * kStates), of = item % (2 * kStates);
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < kWarps * kHalves; ++part) {
      const float* from = &block.keys[chunk % 2][part / kHalves][t][part % kHalves][0][0] + of;
      const float2 more = *reinterpret_cast<const float2*>(from);
      total.x += more.x;
      total.y += more.y;
    }
    if (first + t < place.length) {
      float* to = gradients.partial + (where.tile * gradients.rows + row + first) * (2 * kStates) + item;
      *reinterpret_cast<float2*>(to) = total;
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
  for (int i = 0; i < kQuad; ++i) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) da[i][k] *= kLn2 * rates[i][k];
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

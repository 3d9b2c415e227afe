// Backward: the chunks from the last to the first, a chunk's tokens four by four. Four tokens' decays, and how states
// answer to their steps, are computed again and stay in registers, where the walk back over the four finds them: the
// last four from the states before them, which a walk over the first four finds. What a chunk needs of memory is copied
// into shared memory while the chunk behind it is walked over.
#pragma once

#include "flashgla/ops/selective_scan/cuda/backward_tokens.cuh"

namespace flashgla::ops::selective_scan::cuda {

constexpr float kNoStep = 1e-30f;  // is not divided by to infinity, and leaves every state what it is

// Steps of channels in units of ln 2, no less than kNoStep, which the bias -inf gives. Of bf16 biases times log2(e),
// with half of the instructions of softplus() and to 2e-7.
template <class T>
__device__ __forceinline__ void units_of_steps(const Vector<T, kWide>& raw, const float (&bias)[kWide],
                                               float (&dt)[kWide]) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    if constexpr (sizeof(T) == 2) {
      const float biased = fmaf(raw[i], kLog2E, bias[i]);
      float logarithm;
      asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(1.0f + ops::cuda::power_of_two(-fabsf(biased))));
      dt[i] = fmaxf(biased, kNoStep) + logarithm;
    } else {
      dt[i] = fmaxf(kLog2E * softplus(raw[i] + bias[i]), kNoStep);
    }
  }
}

// What the walk needs of a chunk's channels, and dz, which needs nothing of the walk.
template <class T, int kBuffers>
struct Prepared {
  using OfWarp = typename BackwardShared<T, kBuffers>::OfWarp;
  float dt[kWide], driven[kWide], dsum[kWide], dz[kWide];
  Vector<T, kHalf> keys;

  __device__ __forceinline__ void make(const BackwardLines<T, kBuffers>& lines, int chunk, const OfWarp& shared,
                                       const Where& where, float (&dskip)[kWide]) {
    const auto x = lines.get(kX, chunk), raw = lines.get(kRaw, chunk), z = lines.get(kZ, chunk),
               dy = lines.get(kDy, chunk), output = lines.get(kOutput, chunk);
    keys = lines.get(kKeys, chunk);
    float bias[kWide];
    load_floats((lines.there(chunk) ? shared.bias : shared.none) + where.wide, bias);
    units_of_steps(raw, bias, dt);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      driven[i] = kLn2 * dt[i] * x[i];
      const float open = ops::cuda::sigmoid(z[i]), gate = z[i] * open;
      dsum[i] = dy[i] * gate;
      dz[i] = dy[i] * output[i] * fmaf(gate, 1.0f - open, open);
      dskip[i] = fmaf(dsum[i], x[i], dskip[i]);
    }
  }
  __device__ __forceinline__ void store(const BackwardLines<T, kBuffers>& lines, int chunk, bool wanted, OfWarp& shared,
                                        const Where& where) const {
    const int parity = chunk & 1, room = OfWarp::room_of(chunk);
    lines.store(kDz, dz, chunk, wanted, &shared.dt[parity][where.token][where.wide]);
    store_floats(dt, &shared.dt[parity][where.token][where.wide]);
    store_floats(driven, &shared.driven[room][where.token][where.wide]);
    store_floats(dsum, &shared.dsum[parity][where.token][where.wide]);
    store_keys(keys, where, shared.keys[room]);
  }
};

// The sums of one kind of eight channels of a lane's token.
template <int kKind>
__device__ __forceinline__ void total_of_wide(const LaneSums& sums, const Where& where, float (&total)[kWide]) {
#pragma unroll
  for (int i = 0; i < kWide; i += 4) {
    const unsigned from = LaneSums::own_place(static_cast<unsigned>(where.wide + i) / 2);  // of the first kind
    const float4 low = sums.of_lane[from + kKind], high = sums.of_lane[from + kKind + kWarp / 2];
    total[i] = low.x + high.x;
    total[i + 1] = low.y + high.y;
    total[i + 2] = low.z + high.z;
    total[i + 3] = low.w + high.w;
  }
}

// The gradients of a chunk's x and raw, from what the walk has left.
template <class T, int kBuffers>
__device__ __forceinline__ void finish(const BackwardLines<T, kBuffers>& lines, int chunk,
                                       typename BackwardShared<T, kBuffers>::OfWarp& shared, const Where& where,
                                       float (&to_x)[kWide], float (&to_raw)[kWide]) {
  const auto x = lines.template get<true>(kX, chunk);
  float dt[kWide], dsum[kWide], skip[kWide], to_driven[kWide], to_dt[kWide];
  load_floats(&shared.dt[chunk & 1][where.token][where.wide], dt);
  load_floats(&shared.dsum[chunk & 1][where.token][where.wide], dsum);
  load_floats(&shared.skip[where.wide], skip);
  total_of_wide<0>(shared.sums[where.token], where, to_driven);
  total_of_wide<1>(shared.sums[where.token], where, to_dt);
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    to_x[i] = fmaf(to_driven[i], kLn2 * dt[i], skip[i] * dsum[i]);
    to_raw[i] = fmaf(to_driven[i], x[i], to_dt[i] * ops::cuda::reciprocal(dt[i]));
  }
  // Times the slope of softplus(biased): sigmoid(biased).
  if constexpr (sizeof(T) == 2) {
    // Which is 1 - e^-dt, 1e-7 off, 2^-9 of it where dt is below 6e-5: enough for bf16.
#pragma unroll
    for (int i = 0; i < kWide; ++i) to_raw[i] = fmaf(-to_raw[i], ops::cuda::power_of_two(-dt[i]), to_raw[i]);
  } else {
    const auto raw = lines.template get<true>(kRaw, chunk);
    float bias[kWide];
    load_floats(&shared.bias[where.wide], bias);
#pragma unroll
    for (int i = 0; i < kWide; ++i) to_raw[i] *= ops::cuda::sigmoid(raw[i] + bias[i]);
  }
}

// Four of db and dc of the block's channels, from what its warps have left: where key_sums_of() says.
__device__ __forceinline__ float4 total_of_keys(const KeySums (&keys)[kWarps][kChunk][2], unsigned from) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
#pragma unroll
    for (unsigned part = 0; part < kParts; ++part) {
      const auto* const first = reinterpret_cast<const unsigned char*>(&keys[warp][0][0]);
      const float4 more = *reinterpret_cast<const float4*>(first + (from ^ part * kPartBytes));
      total.x += more.x;
      total.y += more.y;
      total.z += more.z;
      total.w += more.w;
    }
  }
  return total;
}
// Bytes from a warp's sums of a chunk to those that a thread adds up, of the part that it begins with: lanes begin with
// parts in other banks.
__device__ __forceinline__ unsigned key_sums_of(unsigned item) {
  const unsigned row = item / kStates, state = item % kStates, quarter = state / 4 % 2;
  return row * sizeof(KeySums) + quarter * (kParts * kPartBytes) + (2 * (row % 2) + quarter) * kPartBytes +
         state / 8 * 16;
}

__device__ __forceinline__ float4 four_of(const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }

// Into shared memory, without a branch, which would cut the piece of code around it in two.
__device__ __forceinline__ void store_where(bool wanted, const float (&x)[4], std::uint32_t to) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.shared.v4.f32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                   static_cast<int>(wanted)),
               "r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
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
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(16) unsigned char memory[];
  using Shared = BackwardShared<T, kBuffers>;
  constexpr bool kAhead = kBuffers == 2;  // what the next chunk needs is made beside the first walk of this one
  // Reading inputs when they are needed takes too many registers for it.
  constexpr bool kInOnePiece = kBuffers > 0;
  constexpr int kTokensAtOnce = kInOnePiece ? kGroup : 1;
  Shared& block = *reinterpret_cast<Shared*>(memory);
  const Where where = Where::held(call.tiles, call.segments);
  const Square<kQuad> square(where.lane);
  const Place place(call, where.sequence);
  const Chunks chunks(place, where.segment, call.segments);
  typename Shared::OfWarp& shared = block.warps[where.warp];
  float rates[kQuad][kQuad], dh[kQuad][kQuad] = {}, da[kQuad][kQuad] = {}, dskip[kWide] = {};
  load_rates(call, where, rates);
  for (int segment = call.segments - 1; segment > where.segment; --segment) {
    through_segment(call, where, segment, rates, dh);
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) rates[i][k] *= kLn2;  // from here on, steps are in units of ln 2
  }
  load_parameter(call, where, call.dt_bias, shared.bias);
  load_parameter(call, where, call.skip, shared.skip);
  if constexpr (sizeof(T) == 2) shared.bias[where.lane] *= kLog2E;  // units_of_steps()
  shared.none[where.lane] = -INFINITY;
  shared.skips.store(where.lane, dskip);
  const std::int64_t row = place.line * (call.cu_seqlens == nullptr ? call.length : 0) + place.begin;
  BackwardLines<T, kBuffers> lines(call, gradients, where, place, shared);
  __syncwarp();
  if (chunks.end > chunks.begin) {
    lines.ask(chunks.end - 1, true, chunks.end - 1);
    if constexpr (kAhead) {
      ptx::copy_async_wait<0>();
      Prepared<T, kBuffers> last;
      last.make(lines, chunks.end - 1, shared, where, dskip);
      last.store(lines, chunks.end - 1, true, shared, where);
      shared.skips.store(where.lane, dskip);
      lines.ask(chunks.end - 2, chunks.end - 1 > chunks.begin, chunks.end - 1);
    }
    lines.ask_states(chunks.end - 1, true);
  }
  const SumOfLanes sum(where.lane);
  const unsigned own_sums = LaneSums::own_place(static_cast<unsigned>(where.lane));
  constexpr bool kExact = Shared::OfWarp::kExact;
  // What is left to do of a chunk behind its walk.
  const auto store = [&](int chunk, bool wanted, const float(&to_x)[kWide], const float(&to_raw)[kWide]) {
    float* const room = &shared.dt[chunk & 1][where.token][where.wide];
    lines.store(kDx, to_x, chunk, wanted, room);
    lines.store(kDraw, to_raw, chunk, wanted, room);
  };
  const unsigned item = threadIdx.x % (kThreads / 2) * 4;
  // By way of an exchange with itself, or the compiler computes it again for every chunk. In f32 one register less.
  const auto held = [&](unsigned x) { return __shfl_sync(kAll, x, where.lane); };
  const unsigned own_item = sizeof(T) == 2 ? held(key_sums_of(item)) : key_sums_of(item);
  const unsigned own_part = held(KeySums::own_place(static_cast<unsigned>(where.lane)));
  const auto store_keys_of_block = [&](int chunk) {
    block.written.wait((chunks.end - 1 - chunk) & 1);
    if (where.warp / 2 != (chunk & 1)) return;  // the others' turn
    const float4 total = total_of_keys(block.keys[chunk & 1], own_item);
    const int t = chunk * kChunk + static_cast<int>(item / (2 * kStates));
    if (t < place.length) {
      float* at = gradients.partial + (where.tile * gradients.rows + row + t) * (2 * kStates) + item % (2 * kStates);
      *reinterpret_cast<float4*>(at) = total;
    }
  };
  if (threadIdx.x == 0) block.written.init(kWarps);
  __syncthreads();

  for (int chunk = chunks.end - 1; chunk >= chunks.begin; --chunk) {
    ptx::copy_async_wait<0>();
    __syncwarp();
    if constexpr (!kAhead) {
      shared.skips.load(where.lane, dskip);
      Prepared<T, kBuffers> now;
      now.make(lines, chunk, shared, where, dskip);
      now.store(lines, chunk, true, shared, where);
      shared.skips.store(where.lane, dskip);
      __syncwarp();
    }
    const KeySums(*keys)[2] = block.keys[chunk & 1][where.warp];
    // In one piece, without stores or branches, so that they fill each other's gaps: the states before the chunk's
    // second half, what is left to do of the chunk behind (in the first turn of nothing), and what the one before needs
    // (in the last turn of zeros).
    float to_x[kWide], to_raw[kWide];
    finish(lines, chunk + 1, shared, where, to_x, to_raw);
    if constexpr (!kInOnePiece) store(chunk + 1, chunk + 1 < chunks.end, to_x, to_raw);
    Prepared<T, kBuffers> before;
    if constexpr (kAhead) {
      shared.skips.load(where.lane, dskip);
      before.make(lines, chunk - 1, shared, where, dskip);
    }
    float h[kQuad][kQuad];
    lines.states(chunk, h);
#pragma unroll kTokensAtOnce
    for (int t = 0; t < kGroup; ++t) {
      TokenAhead token;
      token.load(shared, square, chunk & 1, t);
      advance(rates, token.dt, token.driven, token.b, h);
    }
    if constexpr (kInOnePiece) store(chunk + 1, chunk + 1 < chunks.end, to_x, to_raw);
    if constexpr (kAhead) {
      before.store(lines, chunk - 1, chunk > chunks.begin, shared, where);
      shared.skips.store(where.lane, dskip);
    }
    __syncwarp();  // sums may come into their place
    const int next = kAhead ? chunk - 2 : chunk - 1;
    lines.ask(next, next >= chunks.begin, chunk);
    if (chunk > chunks.begin) lines.bring_states(chunk - 1);
    // Of the block's sums, too: other warps write theirs of the chunk behind all the while.
    if (chunk + 1 < chunks.end) store_keys_of_block(chunk + 1);
      // A loop: in one piece the two miss instructions more than it saves.
#pragma unroll 1
    for (int first_of_group = kChunk - kGroup; first_of_group >= 0; first_of_group -= kGroup) {
      if (first_of_group == 0) lines.states(chunk, h);
      Passed passed[kGroup];
      unsigned of_first = ptx::shared_address(&keys[first_of_group]) + own_part;
      asm volatile("" : "+r"(of_first));  // or the compiler computes it again for every store
      const auto store_key = [&](int i, int which, const float(&sums)[kQuad]) {
        store_where(where.lane / 2 % 2 == which, sums, of_first + (2 * i + which) * sizeof(KeySums));
      };
      TokenAhead next_ahead;
      next_ahead.load(shared, square, chunk & 1, first_of_group);
      TokenBack next_back;
      // Loads do not pass stores, so those of the next token stand in front of a token's.
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int t = first_of_group + i;
        const TokenAhead token = next_ahead;
        if (i + 1 < kGroup) {
          next_ahead.load(shared, square, chunk & 1, t + 1);
        } else {
          next_back.load(shared, square, chunk & 1, t, token);
        }
        ahead(token, rates, h, passed[i]);
        // As soon as the chunk's have been loaded for the second time.
        if (i == 0) lines.ask_states(chunk - 1, first_of_group == 0 && chunk > chunks.begin);
        float to_c[kQuad];
        sum_over_channels<kExact>(h, token.dsum, sum, to_c);
        store_key(i, 1, to_c);
      }
#pragma unroll
      for (int i = kGroup - 1; i >= 0; --i) {
        const int t = first_of_group + i;
        const TokenBack token = next_back;
        if (i > 0) next_back.load(shared, square, chunk & 1, t - 1);
        float to_b[kQuad], to_channels[kQuad];
        back<kExact>(token, passed[i], sum, dh, da, to_b, to_channels);
        shared.sums[t].of_lane[own_sums] = four_of(to_channels);
        store_key(i, 0, to_b);
      }
    }
    __syncwarp();
    if (where.lane == 0) block.written.arrive();
  }
  if (chunks.end > chunks.begin) {
    ptx::copy_async_wait<0>();
    float to_x[kWide], to_raw[kWide];
    finish(lines, chunks.begin, shared, where, to_x, to_raw);
    store(chunks.begin, true, to_x, to_raw);
    store_keys_of_block(chunks.begin);
  }
  const std::int64_t slot = where.sequence * call.segments + where.segment;
  shared.skips.load(where.lane, dskip);
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    for (int distance = 4; distance < kWarp; distance *= 2) dskip[i] += __shfl_xor_sync(kAll, dskip[i], distance);
    const int channel = where.first + where.wide + i;
    if (where.token == 0 && channel < call.channels) gradients.dskip[slot * call.channels + channel] = dskip[i];
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) da[i][k] *= kLn2;
  }
  store_states(call, where, da, gradients.da_log + slot * call.channels * call.states);
}

// What is left to add up behind it.
template <class T>
struct BackwardSums {
  const float* partial;  // of Gradients, as the next two
  const float *da_log, *dskip;
  std::int64_t tiles, rows, length, pieces;  // length: of a line; pieces: of sequences
  int channels, states;
  Lines<T> db, dc;
  float *da_log_sum, *dskip_sum;  // [E,K], [E]: added to what is there

  __host__ __device__ std::int64_t fours() const { return rows * 2 * kStates / 4; }  // of db and dc
  __host__ __device__ std::int64_t rates() const { return std::int64_t{channels} * states; }
  std::int64_t threads() const { return fours() + rates() + channels; }
};

// Four of db or dc of a token: the blocks' sums, one after the other.
template <class T>
__device__ __forceinline__ void sum_keys(const BackwardSums<T>& sums, std::int64_t four) {
  float total[4] = {};
#pragma unroll 8
  for (std::int64_t tile = 0; tile < sums.tiles; ++tile) {
    float more[4];
    load_floats(sums.partial + (tile * sums.fours() + four) * 4, more);
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += more[i];
  }
  constexpr int kFours = kStates / 4;
  const std::int64_t row = four / (2 * kFours);
  T* const to = (four / kFours % 2 == 0 ? sums.db : sums.dc).at(row / sums.length, row % sums.length, 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int state = static_cast<int>(four % kFours) * 4 + i;
    if (state < sums.states) to[state] = flashgla::cuda::from_float<T>(total[i]);
  }
}

// Element `item` of what pieces of sequences have left, `pieces` of `items` each.
__device__ __forceinline__ float sum_of_pieces(const float* from, std::int64_t items, std::int64_t pieces,
                                               std::int64_t item) {
  float total = 0.0f;
  for (std::int64_t i = 0; i < pieces; ++i) total += from[i * items + item];
  return total;
}

template <class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(BackwardSums<T> sums) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, item = thread - sums.fours();
  if (item < 0) {
    sum_keys(sums, thread);
  } else if (item < sums.rates()) {
    sums.da_log_sum[item] += sum_of_pieces(sums.da_log, sums.rates(), sums.pieces, item);
  } else if (item < sums.rates() + sums.channels) {
    const std::int64_t channel = item - sums.rates();
    sums.dskip_sum[channel] += sum_of_pieces(sums.dskip, sums.channels, sums.pieces, channel);
  }
}

}  // namespace flashgla::ops::selective_scan::cuda

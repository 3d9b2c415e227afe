// One recurrence in chunks on tensor cores, for operands that bf16 would round: f16 and f32 inputs, and bf16 with more
// than 256 key channels. As token by token in recurrent_backward.cuh, only with other operands it is the forward and
// each of the three gradients:
//     M_t = 2^{gate_t} * M_{t-1} + key_t value_t^T,   out_t = query_t^T M_t        (backwards in time: the gate of t+1)
// the gate being over the key's channels (o and dv) or over the value's (dq and dk).
//
// Tiles are f32 in shared memory; a product is one tf32 product (f16 and bf16 are tf32 numbers; f32 where the caller
// allows tf32), or three that leave f32's error: x = hi + lo, both tf32, and all but lo lo.
//
// A block of 256 threads walks through one (sequence, query head, slice of kValues value channels) with M in shared
// memory. Of each chunk it takes the key channels by tiles of 64. Gates over keys, G the chunk's sums:
//     S += q~ k~^T, out += q~ M, M' = 2^G_last (M + k~^T v);  q~ = q 2^G, k~ = k 2^-G;  in the end out += select(S) v
// Gates over values:
//     S += q k^T, out += q M, M' = (M + k^T v~) 2^G_last;  v~ = v 2^-G;  in the end out = (out + select(S) v~) 2^G
// Tiles out of one anchor's range ("steep") take the pairs inside the chunk one by one, from sums that run from the
// query back to the key, and 2^(sum of later gates) into M: exact for any gates.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/recurrent_backward.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kWideThreads = 256;
constexpr float kWideRange = 60.0f;  // bits a channel may fall within a chunk under one anchor
// Floats of a row: fragments of 8 rows x 4 columns, or of 4 rows x 8 columns, meet 32 banks.
constexpr int kKeyRow = 64 + 4;
template <int kValues>
constexpr int kValueRow = kValues + 8;

// Offsets in floats.
template <int kValues>
struct WidePlan {
  static constexpr int q = 0, k = q + 64 * kKeyRow, scores = k + 64 * kKeyRow, totals = scores + 64 * kKeyRow,
                       decay = totals + kWideThreads, g = decay + 64,
                       v = g + 64 * (kKeyRow > kValueRow<kValues> ? kKeyRow : kValueRow<kValues>),
                       h = v + 64 * kValueRow<kValues>;
  static constexpr int bytes(int key_tiles) { return (h + key_tiles * 64 * kValueRow<kValues>)*4; }
};

// Where the recurrence reads and writes.
struct WidePass {
  Operand query, key, value, gate;  // identity features; gate: one over keys or over values
  int keys = 0, values = 0;         // channels
  bool backwards = false;
  // M at the beginning as [N,G,K,V] (by_values: key channels are V, read transposed), or null: zeros; in the first head
  // of a group only, or in each.
  const float* start = nullptr;
  bool by_values = false, start_in_first_head = false;
  Strided out;  // of the call's dtype, or f32 when out_f32, where heads are query heads
  bool out_f32 = false;
  float out_scale = 1.0f;
  __nv_bfloat16* states =
      nullptr;                   // M before each chunk, first heads of groups: bf16 [chunks, G, keys, values], or null
  float* group_end = nullptr;    // M at the end, first heads of groups: [N, G, keys, values], or null
  float* end = nullptr;          // M at the end (backwards with the first token's gate): [N, H, values, keys], or null
  float* checkpoints = nullptr;  // as RecurrentPass has them: [checkpoints, H, values, keys], or null
};

// x[i]: element at + i * stride where valid(i), else 0. All loads are under way before the first is converted: one at a
// time they were 41 of a chunk's 46 us.
template <class T, int kCount, class Valid>
__device__ __forceinline__ void load_column_as(float (&x)[kCount], const void* data, std::int64_t at,
                                               std::int64_t stride, Valid valid) {
  T raw[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) raw[i] = valid(i) ? static_cast<const T*>(data)[at + i * stride] : T();
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = Element<T>::load(&raw[i]);
}
template <int kCount, class Valid>
__device__ __forceinline__ void load_column(float (&x)[kCount], DType dtype, const void* data, std::int64_t at,
                                            std::int64_t stride, Valid valid) {
  switch (dtype) {
    case DType::bf16:
      return load_column_as<__nv_bfloat16>(x, data, at, stride, valid);
    case DType::f16:
      return load_column_as<__half>(x, data, at, stride, valid);
    default:
      return load_column_as<float>(x, data, at, stride, valid);
  }
}

// The a operand of a product of 16 x 8: elements (l/4, l%4), (l/4+8, l%4), (l/4, l%4+4), (l/4+8, l%4+4).
template <bool kSplit>
struct WideFragment {
  std::uint32_t high[4], low[4];

  __device__ __forceinline__ void set(int i, float x) {
    high[i] = ptx::to_tf32(x);
    if constexpr (kSplit) low[i] = ptx::to_tf32(x - __uint_as_float(high[i]));
  }
};

// d (16 x 8 blocks, kBlocks side by side) += a b over a depth of 64; a(row, depth), b(depth, column) give elements.
template <bool kSplit, int kBlocks, class A, class B>
__device__ __forceinline__ void multiply_wide(float (&d)[kBlocks][4], int lane, A a, B b) {
  const int row = lane >> 2, in_four = lane & 3;
#pragma unroll(kSplit ? 2 : 1)
  for (int depth = 0; depth < 64; depth += 8) {
    WideFragment<kSplit> left;
    left.set(0, a(row, depth + in_four));
    left.set(1, a(row + 8, depth + in_four));
    left.set(2, a(row, depth + in_four + 4));
    left.set(3, a(row + 8, depth + in_four + 4));
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float x = b(depth + in_four, 8 * j + row), y = b(depth + in_four + 4, 8 * j + row);
      const std::uint32_t x_high = ptx::to_tf32(x), y_high = ptx::to_tf32(y);
      if constexpr (kSplit) {
        ptx::mma_tf32(d[j], left.low, x_high, y_high);
        ptx::mma_tf32(d[j], left.high, ptx::to_tf32(x - __uint_as_float(x_high)),
                      ptx::to_tf32(y - __uint_as_float(y_high)));
      }
      ptx::mma_tf32(d[j], left.high, x_high, y_high);
    }
  }
}

// What follows exists for steep chunks. Thread: query threadIdx.x / 4, channels threadIdx.x % 4 and every fourth from
// there; it walks from the query back with each channel's running sum of gates.

// Scores of a tile with gates over keys, added to `scores`.
static __device__ __noinline__ void add_exact_scores(float* scores, const float* q_tile, const float* k_tile,
                                                     const float* g_tile) {
  const int query = threadIdx.x >> 2, part = threadIdx.x & 3;
  float q[16], sums[16];
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    q[c] = q_tile[query * kKeyRow + 4 * c + part];
    sums[c] = 0.0f;
  }
  for (int step = 0; step < 64; ++step) {
    const int key = max(query - step, 0);
    float p = 0.0f;
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const int at = key * kKeyRow + 4 * c + part;
      p += q[c] * k_tile[at] * ptx::exp2(sums[c]);
      sums[c] += g_tile[at];
    }
    p += __shfl_xor_sync(0xffffffffu, p, 1);
    p += __shfl_xor_sync(0xffffffffu, p, 2);
    if (part == 0 && step <= query) scores[query * kKeyRow + key] += p;
  }
}

// Gates over values: sum of scores times values within the chunk replaces the values. Two barriers inside.
template <int kValues>
static __device__ __noinline__ void replace_by_exact_sums(float* v_tile, const float* scores, const float* g_tile) {
  constexpr int kEach = kValues / 4;
  const int query = threadIdx.x >> 2, part = threadIdx.x & 3;
  float out[kEach], sums[kEach];
#pragma unroll
  for (int c = 0; c < kEach; ++c) out[c] = sums[c] = 0.0f;
  for (int key = query; key >= 0; --key) {
    const float p = scores[query * kKeyRow + key];
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      const int at = key * kValueRow<kValues> + 4 * c + part;
      out[c] += p * v_tile[at] * ptx::exp2(sums[c]);
      sums[c] += g_tile[at];
    }
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kEach; ++c) v_tile[query * kValueRow<kValues> + 4 * c + part] = out[c];
  __syncthreads();
}

// Sums of gates over the chunk of kChannels channels: thread takes channel threadIdx.x % kChannels and kRun tokens.
template <int kChannels>
struct GateRun {
  static constexpr int kRuns = kWideThreads / kChannels, kRun = 64 / kRuns;
  int channel, first;
  float before, after, total;  // sums of the tokens before this thread's, after them, and of all

  __device__ __forceinline__ GateRun() : channel(threadIdx.x % kChannels), first(threadIdx.x / kChannels * kRun) {}
  __device__ __forceinline__ void put(float* totals, float sum) const { totals[threadIdx.x] = sum; }
  __device__ __forceinline__ void take(const float* totals) {
    before = after = total = 0.0f;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const float part = totals[i * kChannels + channel];
      total += part;
      before += i * kRun < first ? part : 0.0f;
      after += i * kRun > first ? part : 0.0f;
    }
  }
};

// Grid: N * H * ceil(values / kValues), value slices fastest.
template <bool kSplit, int kValues, bool kGatesOverValues>
__device__ __forceinline__ void walk_in_f32_tiles(const Params& p, const WidePass& pass, float* shared) {
  using Plan = WidePlan<kValues>;
  constexpr int kBlocks = kValues / 16;  // of 8 columns, a warp's half of the slice
  constexpr int kRow = kValueRow<kValues>;
  float *q_tile = shared + Plan::q, *k_tile = shared + Plan::k, *g_tile = shared + Plan::g,
        *scores = shared + Plan::scores, *totals = shared + Plan::totals, *decay = shared + Plan::decay,
        *v_tile = shared + Plan::v, *state = shared + Plan::h;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int row0 = warp % 4 * 16, column0 = warp / 4 * (kValues / 2), score_column0 = warp / 4 * 32;
  const int keys = pass.keys, values = pass.values, key_tiles = (keys + 63) / 64,
            slices = (values + kValues - 1) / kValues;
  const int heads = p.heads * p.group, query_head = static_cast<int>(blockIdx.x / slices % heads);
  const int head = query_head / p.group, v0 = static_cast<int>(blockIdx.x % slices) * kValues;
  const std::int64_t n = blockIdx.x / slices / heads;
  const bool leads = query_head % p.group == 0;
  const Span span = span_of(p.sequences, n);
  const std::int64_t chunks = (span.length + kChunk - 1) / kChunk;

  // visit(element of M in shared memory, key channel, value channel), for those that exist.
  const auto for_state = [&](auto visit) {
    const int value = v0 + thread % kValues;
    if (value >= values) return;
    for (int key = thread / kValues; key < keys; key += kWideThreads / kValues)
      visit(state[key * kRow + thread % kValues], key, value);
  };
  const std::int64_t state_elements = static_cast<std::int64_t>(keys) * values;
  const auto at_keys = [&](int key, int value) { return static_cast<std::int64_t>(key) * values + value; };
  const auto at_values = [&](int key, int value) { return static_cast<std::int64_t>(value) * keys + key; };
  for (int i = thread; i < key_tiles * 64 * kRow; i += kWideThreads) state[i] = 0.0f;
  __syncthreads();
  if (pass.start != nullptr && (leads || !pass.start_in_first_head)) {
    const float* start = pass.start + (n * p.heads + head) * state_elements;
    for_state(
        [&](float& m, int key, int value) { m = start[pass.by_values ? at_values(key, value) : at_keys(key, value)]; });
  }
  const auto store_checkpoint = [&](std::int64_t token, auto factor) {  // token: of the sequence, at a chunk's end
    if (pass.checkpoints == nullptr || ((token + 1) % kCheckpoint != 0 && token + 1 != span.length)) return;
    const std::int64_t number = checkpoint_begin(p.sequences, n) + token / kCheckpoint;
    float* to = pass.checkpoints + (number * heads + query_head) * state_elements;
    for_state([&](const float& m, int key, int value) { to[at_values(key, value)] = m * factor(key, value); });
  };

  for (std::int64_t step = 0; step < chunks; ++step) {
    // Backwards the rows of the tiles are the chunk's tokens from its last: a row is always later than those above it.
    const std::int64_t index = pass.backwards ? chunks - 1 - step : step, t0 = index * kChunk;
    const int tokens = static_cast<int>(min(static_cast<std::int64_t>(kChunk), span.length - t0));
    const std::int64_t token0 = span.begin + t0 + (pass.backwards ? tokens - 1 : 0), forth = pass.backwards ? -1 : 1;
    const auto place_of = [&](const Operand& x, int row, int channel) {
      return span.batch * x.view.batch + (token0 + row * forth) * x.view.token +
             static_cast<std::int64_t>(query_head / x.heads_each) * x.view.head + channel * x.channel_step;
    };
    // kCount rows of an operand's channel, `apart` rows from each other.
    const auto load_rows = [&](auto& column, const Operand& x, int row, int apart, int channel, bool inside) {
      load_column(column, x.dtype, x.view.data, place_of(x, row, channel), apart * forth * x.view.token,
                  [&](int i) { return inside && row + apart * i < tokens; });
    };
    // The gates by which M decays from the row before to each row, base 2. Backwards they are those of the token after.
    const std::int64_t end = span.begin + span.length;
    const auto load_gates = [&](auto& column, int row, int channel, bool inside) {
      const Operand& x = pass.gate;
      inside = inside && x.view.data != nullptr;
      load_column(
          column, x.dtype, x.view.data, place_of(x, row, channel) + pass.backwards * x.view.token, forth * x.view.token,
          [&](int i) { return inside && row + i < tokens && token0 + (row + i) * forth + pass.backwards < end; });
      for (float& g : column) g = base_2_gate(g);
    };
    const auto first_factor = [&](int key, int value) {
      float g[1];
      load_gates(g, 0, kGatesOverValues ? value : key, true);
      return exp2f(g[0]);
    };
    const auto load_values = [&] {
      constexpr int kApart = kWideThreads / kValues;
      const int row = thread / kValues, column = thread % kValues;
      float x[64 / kApart];
      load_rows(x, pass.value, row, kApart, v0 + column, v0 + column < values);
#pragma unroll
      for (int i = 0; i < 64 / kApart; ++i) v_tile[(row + i * kApart) * kRow + column] = pass.value.scale * x[i];
    };
    __syncthreads();  // the chunk before has been read and M written
    if (pass.states != nullptr && leads) {
      __nv_bfloat16* to = pass.states + ((span.chunk_begin + index) * p.heads + head) * state_elements;
      for_state([&](const float& m, int key, int value) { to[at_keys(key, value)] = __float2bfloat16_rn(m); });
    }
    if (pass.backwards) store_checkpoint(t0 + tokens - 1, first_factor);
    load_values();
    for (int i = thread; i < 64 * kKeyRow; i += kWideThreads) scores[i] = 0.0f;

    bool steep = false;
    if constexpr (kGatesOverValues) {
      GateRun<kValues> run;
      float g[run.kRun], sum = 0.0f;
      load_gates(g, run.first, v0 + run.channel, v0 + run.channel < values);
#pragma unroll
      for (int i = 0; i < run.kRun; ++i) {
        g_tile[(run.first + i) * kRow + run.channel] = g[i];
        sum += g[i];
      }
      run.put(totals, sum);
      __syncthreads();
      run.take(totals);
      steep = __syncthreads_or(!(run.total >= -kWideRange));
      if (run.first == 0) decay[run.channel] = ptx::exp2(run.total);
      if (!steep) {
#pragma unroll
        for (int i = 0; i < run.kRun; ++i) {
          const int at = (run.first + i) * kRow + run.channel;
          run.before += g_tile[at];
          v_tile[at] *= ptx::exp2(-run.before);
          g_tile[at] = ptx::exp2(run.before);
        }
      } else {
#pragma unroll
        for (int i = run.kRun - 1; i >= 0; --i) {
          const int at = (run.first + i) * kRow + run.channel;
          v_tile[at] *= ptx::exp2(run.after);
          run.after += g_tile[at];
        }
      }
    }

    float s[4][4] = {}, o[kBlocks][4] = {};
    for (int tile = 0; tile < key_tiles; ++tile) {
      const int channel0 = tile * 64;
      if (tile > 0) __syncthreads();
      {
        const int row = thread / 64, channel = thread % 64;
        const bool inside = channel0 + channel < keys;
        float x[16];
        load_rows(x, pass.query, row, 4, channel0 + channel, inside);
#pragma unroll
        for (int i = 0; i < 16; ++i) q_tile[(row + 4 * i) * kKeyRow + channel] = pass.query.scale * x[i];
        load_rows(x, pass.key, row, 4, channel0 + channel, inside);
#pragma unroll
        for (int i = 0; i < 16; ++i) k_tile[(row + 4 * i) * kKeyRow + channel] = pass.key.scale * x[i];
      }
      if constexpr (!kGatesOverValues) {
        GateRun<64> run;
        float g[run.kRun], sum = 0.0f;
        load_gates(g, run.first, channel0 + run.channel, channel0 + run.channel < keys);
#pragma unroll
        for (int i = 0; i < run.kRun; ++i) {
          g_tile[(run.first + i) * kKeyRow + run.channel] = g[i];
          sum += g[i];
        }
        run.put(totals, sum);
        __syncthreads();
        run.take(totals);
        steep = __syncthreads_or(!(run.total >= -kWideRange));
        if (steep) {
          add_exact_scores(scores, q_tile, k_tile, g_tile);
          __syncthreads();
        }
        if (run.first == 0) decay[run.channel] = ptx::exp2(run.total);
#pragma unroll
        for (int i = 0; i < run.kRun; ++i) {
          const int at = (run.first + i) * kKeyRow + run.channel;
          run.before += g_tile[at];
          q_tile[at] *= ptx::exp2(run.before);
          if (!steep) k_tile[at] *= ptx::exp2(-run.before);
        }
        if (steep) {
#pragma unroll
          for (int i = run.kRun - 1; i >= 0; --i) {
            const int at = (run.first + i) * kKeyRow + run.channel;
            k_tile[at] *= ptx::exp2(run.after);
            run.after += g_tile[at];
          }
        }
      }
      __syncthreads();
      float* m = state + tile * 64 * kRow;
      const auto query = [&](int row, int depth) { return q_tile[(row0 + row) * kKeyRow + depth]; };
      if (kGatesOverValues || !steep) {
        multiply_wide<kSplit>(
            s, lane, query, [&](int depth, int column) { return k_tile[(score_column0 + column) * kKeyRow + depth]; });
      }
      multiply_wide<kSplit>(o, lane, query, [&](int depth, int column) { return m[depth * kRow + column0 + column]; });
      __syncthreads();  // M has been read
      const auto place = [&](int j, int e) {
        return std::pair{row0 + (lane >> 2) + 8 * (e / 2), column0 + 8 * j + 2 * (lane & 3) + e % 2};
      };
      const auto factor = [&](int key, int column) { return decay[kGatesOverValues ? column : key]; };
      float next[kBlocks][4];
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const auto [key, column] = place(j, e);
          next[j][e] = m[key * kRow + column] * (steep ? factor(key, column) : 1.0f);
        }
      }
      multiply_wide<kSplit>(
          next, lane, [&](int row, int depth) { return k_tile[depth * kKeyRow + row0 + row]; },
          [&](int depth, int column) { return v_tile[depth * kRow + column0 + column]; });
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const auto [key, column] = place(j, e);
          m[key * kRow + column] = next[j][e] * (steep ? 1.0f : factor(key, column));
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = row0 + (lane >> 2) + 8 * (e / 2), key = score_column0 + 8 * j + 2 * (lane & 3) + e % 2;
        float& x = scores[query * kKeyRow + key];
        x = query >= key ? x + s[j][e] : 0.0f;
      }
    }
    const bool exact_sums = kGatesOverValues && steep;
    if (exact_sums) load_values();  // as they were
    __syncthreads();
    if (exact_sums) {
      replace_by_exact_sums<kValues>(v_tile, scores, g_tile);
      GateRun<kValues> run;
      run.take(totals);
#pragma unroll
      for (int i = 0; i < run.kRun; ++i) {
        const int at = (run.first + i) * kRow + run.channel;
        run.before += g_tile[at];
        g_tile[at] = ptx::exp2(run.before);
      }
      __syncthreads();
    } else {
      multiply_wide<kSplit>(
          o, lane, [&](int row, int depth) { return scores[(row0 + row) * kKeyRow + depth]; },
          [&](int depth, int column) { return v_tile[depth * kRow + column0 + column]; });
    }
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + (lane >> 2) + 8 * (e / 2), column = column0 + 8 * j + 2 * (lane & 3) + e % 2;
        float x = o[j][e];
        if constexpr (kGatesOverValues) x *= g_tile[row * kRow + column];
        if (exact_sums) x += v_tile[row * kRow + column];
        if (row < tokens && v0 + column < values) {
          store_as(pass.out_f32 ? DType::f32 : p.dtype, pass.out.data,
                   span.batch * pass.out.batch + (token0 + row * forth) * pass.out.token + query_head * pass.out.head +
                       v0 + column,
                   pass.out_scale * x);
        }
      }
    }
    if (pass.checkpoints != nullptr && !pass.backwards) {
      __syncthreads();
      store_checkpoint(t0 + tokens - 1, [](int, int) { return 1.0f; });
    }
  }

  __syncthreads();
  if (pass.group_end != nullptr && leads) {
    float* to = pass.group_end + (n * p.heads + head) * state_elements;
    for_state([&](const float& m, int key, int value) { to[at_keys(key, value)] = m; });
  }
  if (pass.end != nullptr) {
    float* to = pass.end + (n * heads + query_head) * state_elements;
    for_state([&](const float& m, int key, int value) {
      const Operand& x = pass.gate;
      float gate = 0.0f;
      if (pass.backwards && span.length > 0 && x.view.data != nullptr) {
        const int channel = kGatesOverValues ? value : key;
        gate = base_2_gate(load_as(x.dtype, x.view.data,
                                   span.batch * x.view.batch + span.begin * x.view.token +
                                       query_head / x.heads_each * x.view.head + channel * x.channel_step));
      }
      to[at_values(key, value)] = m * exp2f(gate);
    });
  }
}

template <bool kSplit, int kValues, bool kGatesOverValues>
__global__ void __launch_bounds__(kWideThreads, kValues == 64 ? 2 : 1)
    f32_tiles_kernel(const __grid_constant__ Params p, const __grid_constant__ WidePass pass) {
  extern __shared__ __align__(16) float wide_shared[];
  walk_in_f32_tiles<kSplit, kValues, kGatesOverValues>(p, pass, wide_shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

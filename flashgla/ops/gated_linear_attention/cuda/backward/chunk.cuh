// The backward, chunk by chunk in parallel. Design, bytes and FLOPs: backward/README.md.
//
// For a chunk with start state h and end-state gradient dh, b as in backward/gates.cuh, B = b of its last token, a_ij =
// do_i . v_j and p_ij = q~_i . k~_j for i >= j, else 0, and dh^ = 2^B dh:
//     dv_j = sum_i p_ij do_i + dh^T k~_j                 dq_i = scale 2^b_i (h do_i + sum_j a_ij k~_j)
//     dk_j = 2^-b_j (dh^ v_j + sum_i a_ij q~_i)          dh before the chunk = dh^ + sum_i q~_i do_i^T
//     dg_t = sum_{i>=t} (q_i dq_i - k_i dk_i) + sum_V h dh^ + sum_j k_j (dk_j's part through dh)
// The last two terms are dg's part from beyond the chunk: no sum runs over the whole sequence, and since q_i dq_i and
// k_i dk_i are the same rounded products in both, what cancels cancels to f32 accuracy.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// ---- prepare: q~, k~, p, B ----

// Tiles of q, k and room for X; gates; sums by warp.
constexpr int prepare_shared(GateTile gate) { return 3 * kTileBytes + gate_bytes(gate) + sizeof(ColumnParts); }

// A steep tile, from q and k as loaded: adds its scores, transposed, to 32 floats a thread; and the images (k_image: or
// null). A function of its own, so that its registers are not the common path's.
template <GateTile kGate>
static __device__ __noinline__ void prepare_steep(float* scores, char* q_image, char* k_image, std::uint32_t q,
                                                  std::uint32_t k, std::uint32_t x, const char* gates,
                                                  const ColumnParts& parts, float scale, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const GateColumns<kGate, 4> columns{gates, &parts[0][0], warp, lane};
  Accumulator sum;
  clear(sum);
#pragma unroll 1
  for (int size = kTile / 2;; size /= 2) {
    Accumulator s;
    level_scores(s, size, q, k, x, columns, thread);
#pragma unroll
    for (int i = 0; i < 32; ++i)
      sum[i] += counts(column_of_element(thread, i), row_of_element(thread, i), size) ? scale * s[i] : 0.0f;
    if (size == 0) break;
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) scores[i] += sum[i];
  const auto put = [&](char* image, std::uint32_t tile, int row, float2 sum, float factor) {
    const std::uint32_t at = element_offset(row, 2 * lane);
    const float2 y = ptx::unpack_bf16(load_shared_4(tile + at));
    *reinterpret_cast<std::uint32_t*>(image + at) =
        ptx::pack_bf16(y.x * factor * ptx::exp2(sum.x), y.y * factor * ptx::exp2(sum.y));
  };
  walk_up(columns, kTile, warp, [&](int row, float2 sum) { put(q_image, q, row, sum, scale); });
  if (k_image == nullptr) return;
  walk_down(columns, kTile, warp, [&](int row, float2 sum) { put(k_image, k, row, sum, 1.0f); });
}

// Grid: chunks x query heads.
template <class Core, GateTile kGate>
__device__ void prepare(const Params& p, const BackwardWorkspace& w, char* shared) {
  const std::int64_t chunk = blockIdx.x;
  const int head = blockIdx.y, kv_head = head / p.group, heads = p.heads * p.group, key_tiles = tiles_of(p.key_dim);
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) return;
  char *q = shared, *k = q + kTileBytes, *x = k + kTileBytes, *gates = x + kTileBytes;
  ColumnParts& parts = *reinterpret_cast<ColumnParts*>(gates + gate_bytes(kGate));
  const __nv_bfloat16 *q_rows = row_of<__nv_bfloat16>(p.q, c, head), *k_rows = row_of<__nv_bfloat16>(p.k, c, kv_head);

  Accumulator scores;
  clear(scores);
  for (int tile = 0; tile < key_tiles; ++tile) {
    const int thread = fresh_thread(), warp = thread >> 5, lane = thread & 31;
    const int channel = tile * kTile;
    copy_tile(ptx::shared_address(q), q_rows + channel, p.q.token, c.rows, p.key_dim - channel, thread);
    copy_tile(ptx::shared_address(k), k_rows + channel, p.k.token, c.rows, p.key_dim - channel, thread);
    copy_gates<kGate>(gates, p, c, kv_head, channel, thread);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    __syncthreads();
    sum_quarters<kGate>(parts, gates, thread);
    __syncthreads();
    float2 b = sum_before(parts, warp, lane);
    const float2 total = sum_before(parts, 4, lane);
    const bool steep = __syncthreads_or(total.x < -kSteep || total.y < -kSteep);
    const std::int64_t kv_at = (chunk * p.heads + kv_head) * key_tiles + tile;
    const bool first = head == kv_head * p.group;  // one query head of the group writes what they share
    if (first && warp == 0) {
      *reinterpret_cast<float2*>(w.decay + kv_at * kTile + 2 * lane) = total;
      if (lane == 0) w.steep[kv_at] = steep;
    }
    char* q_image = w.gated_q + ((chunk * heads + head) * key_tiles + tile) * kTileBytes;
    char* k_image = w.gated_k + kv_at * kTileBytes;
    if (steep) {
      Aside so_far(scores);
      prepare_steep<kGate>(so_far.kept, q_image, first ? k_image : nullptr, ptx::shared_address(q),
                           ptx::shared_address(k), ptx::shared_address(x), gates, parts, p.scale, thread);
      so_far.restore(scores);
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = 16 * warp + i;
        const float2 g = gate_at<kGate>(gates, row, lane);
        b.x += g.x;
        b.y += g.y;
        const std::uint32_t at = element_offset(row, 2 * lane);
        const float2 y = ptx::unpack_bf16(*reinterpret_cast<std::uint32_t*>(q + at));
        const float2 z = ptx::unpack_bf16(*reinterpret_cast<std::uint32_t*>(k + at));
        const std::uint32_t gated_q = ptx::pack_bf16(y.x * p.scale * ptx::exp2(b.x), y.y * p.scale * ptx::exp2(b.y));
        const std::uint32_t gated_k = ptx::pack_bf16(z.x * ptx::exp2(-b.x), z.y * ptx::exp2(-b.y));
        *reinterpret_cast<std::uint32_t*>(q_image + at) = gated_q;
        if (first) *reinterpret_cast<std::uint32_t*>(k_image + at) = gated_k;
        *reinterpret_cast<std::uint32_t*>(q + at) = gated_q;
        *reinterpret_cast<std::uint32_t*>(k + at) = gated_k;
      }
      Core::publish();
      __syncthreads();
      Core::begin(scores);
      Core::template product<Stored::k_inner, Stored::k_inner>(scores, ptx::shared_address(k), ptx::shared_address(q),
                                                               thread);
      Core::finish(scores);
    }
    __syncthreads();
  }
  const int thread = fresh_thread();
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int query = column_of_element(thread, i), key = row_of_element(thread, i);
    scores[i] = query >= key ? scores[i] : 0.0f;
  }
  store_image(w.scores + (chunk * heads + head) * kTileBytes, q, scores, thread);
}

// ---- the state's pass over the chunks of a sequence ----

constexpr int state_shared(int groups) { return 3 * (1 + groups) * kTileBytes + groups * kTileBytes; }

// Grid: (N x G x ceil(value tiles / kGroups) x key tiles, innermost last) x segments; a thread group holds one 64x64
// tile of the state. Steps and chunks are counted in the order of the walk.
template <class Core, bool kBackwards, int kGroups>
__device__ void pass_state(const Params& p, const BackwardWorkspace& w, const StatePass& pass, char* shared) {
  constexpr int kStages = 3, kStageBytes = (1 + kGroups) * kTileBytes;
  const int thread = threadIdx.x % kGroupThreads, group = threadIdx.x / kGroupThreads, warp = thread >> 5,
            lane = thread & 31;
  const int key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const int blocks = key_tiles * ((value_tiles + kGroups - 1) / kGroups), block = blockIdx.x % blocks;
  const int key_tile = block % key_tiles, value_tile = block / key_tiles * kGroups + group;
  const int kv_head = blockIdx.x / blocks % p.heads, heads_a = kBackwards ? p.group : 1;
  const std::int64_t n = blockIdx.x / blocks / p.heads;
  const bool active = value_tile < value_tiles;
  const Span span = span_of(p.sequences, n);
  const std::int64_t chunks = (span.length + kChunk - 1) / kChunk;
  const int segment = blockIdx.y;
  const std::int64_t first = chunks * segment / pass.segments, last = chunks * (segment + 1) / pass.segments;
  const std::int64_t steps = last * heads_a;
  const int channel = key_tile * kTile, value = value_tile * kTile;
  char* out = shared + kStages * kStageBytes + group * kTileBytes;

  auto load = [&](std::int64_t step) {
    if (step < steps) {
      const std::int64_t index = kBackwards ? chunks - 1 - step / heads_a : step;
      const int head = kv_head * heads_a + static_cast<int>(step % heads_a);
      const std::int64_t chunk = span.chunk_begin + index;
      const Chunk c = chunk_of(span, index);
      const std::uint32_t stage = ptx::shared_address(shared) + static_cast<int>(step % kStages) * kStageBytes;
      if (group == 0)
        copy_image(stage, pass.a_images + ((chunk * p.heads * heads_a + head) * key_tiles + key_tile) * kTileBytes,
                   thread);
      if (active) {
        copy_tile(stage + (1 + group) * kTileBytes, row_of<__nv_bfloat16>(pass.b, c, head) + value, pass.b.token,
                  c.rows, p.value_dim - value, thread);
      }
    }
    ptx::copy_async_commit();
  };
  load(first * heads_a);
  load(first * heads_a + 1);

  const int row = 16 * warp + (lane >> 2);
  const std::int64_t state_at = (n * p.heads + kv_head) * p.key_dim * p.value_dim;
  // f(element of the accumulator, its place in a [K,V] matrix), for elements that exist.
  auto for_each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int r = channel + row + 8 * ((i >> 1) & 1), v = value + 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
      if (r < p.key_dim && v < p.value_dim) f(i, static_cast<std::int64_t>(r) * p.value_dim + v);
    }
  };
  Accumulator state;
  clear(state);
  if (pass.start && segment == 0) for_each([&](int i, std::int64_t at) { state[i] = pass.start[state_at + at]; });
  const std::int64_t tile_at = ((n * p.heads + kv_head) * key_tiles + key_tile) * value_tiles + value_tile;
  const std::int64_t tiles = p.sequences.count * p.heads * key_tiles * value_tiles;
  auto segment_end = [&](int s, int block) {  // four of this thread's elements
    return reinterpret_cast<float4*>(pass.segment_ends) + ((s * tiles + tile_at) * 8 + block) * kGroupThreads + thread;
  };
  if (!pass.ends_only && active) {
    for (int s = 0; s < segment; ++s) {
      const float* sums = pass.segment_decays + (s * tiles + tile_at) * kTile;
      const float factor[2] = {ptx::exp2(sums[row]), ptx::exp2(sums[row + 8])};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 end = *segment_end(s, j);
        state[4 * j] = state[4 * j] * factor[0] + end.x;
        state[4 * j + 1] = state[4 * j + 1] * factor[0] + end.y;
        state[4 * j + 2] = state[4 * j + 2] * factor[1] + end.z;
        state[4 * j + 3] = state[4 * j + 3] * factor[1] + end.w;
      }
    }
  }

  float decay_sums[2] = {0.0f, 0.0f};
  float decay[2] = {0.0f, 0.0f};
  bool steep = false;
  auto load_decay = [&](std::int64_t i) {
    if (i >= last) return;
    const std::int64_t at =
        ((span.chunk_begin + (kBackwards ? chunks - 1 - i : i)) * p.heads + kv_head) * key_tiles + key_tile;
    decay[0] = w.decay[at * kTile + row];
    decay[1] = w.decay[at * kTile + row + 8];
    steep = w.steep[at];
  };
  load_decay(first);
  std::int64_t step = first * heads_a;
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t chunk = span.chunk_begin + (kBackwards ? chunks - 1 - i : i);
    const float factor[2] = {ptx::exp2(decay[0]), ptx::exp2(decay[1])};
    const bool steep_now = steep;
    decay_sums[0] += decay[0];
    decay_sums[1] += decay[1];
    load_decay(i + 1);
    auto apply_decay = [&] {
#pragma unroll
      for (int e = 0; e < 32; ++e) state[e] *= factor[(e >> 1) & 1];
    };
    if constexpr (kBackwards) {
      if (!steep_now) apply_decay();
      if (active && !pass.ends_only) {
        store_image(w.state_gradients +
                        (((chunk * p.heads + kv_head) * key_tiles + key_tile) * value_tiles + value_tile) * kTileBytes,
                    out, state, thread);
      }
      if (steep_now) apply_decay();
    } else {
      if (active && !pass.ends_only) {
        store_matrix(pass.states + ((chunk * p.heads + kv_head) * p.key_dim + channel) * p.value_dim + value,
                     p.value_dim, p.key_dim - channel, p.value_dim - value, out, state, thread);
      }
      if (steep_now) apply_decay();
    }
    for (int h = 0; h < heads_a; ++h, ++step) {
      ptx::copy_async_wait<1>();
      Core::publish();
      __syncthreads();
      load(step + 2);
      const std::uint32_t stage = ptx::shared_address(shared) + static_cast<int>(step % kStages) * kStageBytes;
      Core::begin(state);
      Core::template product<Stored::k_outer, Stored::k_outer>(state, stage, stage + (1 + group) * kTileBytes, thread);
      Core::finish(state);
    }
    if (!kBackwards && !steep_now) apply_decay();
  }
  ptx::copy_async_wait<0>();
  if (!active) return;
  if (pass.ends_only) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *segment_end(segment, j) = make_float4(state[4 * j], state[4 * j + 1], state[4 * j + 2], state[4 * j + 3]);
    if ((lane & 3) == 0) {
      float* sums = pass.segment_decays + (segment * tiles + tile_at) * kTile;
      sums[row] = decay_sums[0];
      sums[row + 8] = decay_sums[1];
    }
  } else if (pass.end && segment == pass.segments - 1) {
    for_each([&](int i, std::int64_t at) { pass.end[state_at + at] = state[i]; });
  }
}

// ---- dv ----

constexpr int dv_shared(int groups) { return 3 * (1 + groups) * kTileBytes; }

// Grid: chunks x G x ceil(value tiles / kGroups), innermost last, so that what neighbours share is in the cache; a
// thread group makes one 64x64 tile of dv.
template <class Core, int kGroups>
__device__ void make_dv(const Params& p, const BackwardWorkspace& w, const Gradients& d, char* shared) {
  constexpr int kStages = 3, kStageBytes = (1 + kGroups) * kTileBytes;
  const int thread = threadIdx.x % kGroupThreads, group = threadIdx.x / kGroupThreads;
  const int key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const unsigned blocks = (value_tiles + kGroups - 1) / kGroups;
  const int kv_head = static_cast<int>(blockIdx.x / blocks % p.heads);
  const int value_tile = static_cast<int>(blockIdx.x % blocks) * kGroups + group, value = value_tile * kTile;
  const bool active = value_tile < value_tiles;
  const std::int64_t chunk = blockIdx.x / blocks / p.heads;
  const Chunk c = locate(p.sequences, chunk);
  if (c.rows == 0) return;
  const int steps = key_tiles + p.group;
  auto load = [&](int step) {
    if (step < steps) {
      const std::uint32_t stage = ptx::shared_address(shared) + step % kStages * kStageBytes;
      const std::uint32_t b = stage + (1 + group) * kTileBytes;
      if (step < key_tiles) {
        const std::int64_t at = (chunk * p.heads + kv_head) * key_tiles + step;
        if (group == 0) copy_image(stage, w.gated_k + at * kTileBytes, thread);
        if (active) copy_image(b, w.state_gradients + (at * value_tiles + value_tile) * kTileBytes, thread);
      } else {
        const int head = kv_head * p.group + step - key_tiles;
        if (group == 0) copy_image(stage, w.scores + (chunk * p.heads * p.group + head) * kTileBytes, thread);
        if (active)
          copy_tile(b, row_of<__nv_bfloat16>(d.d_o, c, head) + value, d.d_o.token, c.rows, p.value_dim - value, thread);
      }
    }
    ptx::copy_async_commit();
  };
  load(0);
  load(1);
  Accumulator dv;
  clear(dv);
  for (int step = 0; step < steps; ++step) {
    ptx::copy_async_wait<1>();
    Core::publish();
    __syncthreads();
    load(step + 2);
    const std::uint32_t stage = ptx::shared_address(shared) + step % kStages * kStageBytes;
    Core::begin(dv);
    Core::template product<Stored::k_inner, Stored::k_outer>(dv, stage, stage + (1 + group) * kTileBytes, thread);
    Core::finish(dv);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  if (active) {
    store_matrix(row_of<__nv_bfloat16>(d.dv, c, kv_head) + value, d.dv.token, c.rows, p.value_dim - value,
                 shared + group * kTileBytes, dv, thread);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

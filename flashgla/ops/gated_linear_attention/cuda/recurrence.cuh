// Second pass after prepare.cuh: the recurrence over chunks, free of gates, with the state of one (sequence, head,
// segment of time) and 64 value channels for each group of 128 threads in registers; two groups share q, k and P.
// Segments: where sequences, heads and slices do not fill the card, time is cut; a pass without outputs finds each
// segment's end state from zero, combine_kernel turns these into start states (the operator from a segment's start to
// its end is only a product of decays), and this kernel runs from those.
//
// q, P and v of the next chunk come in while a chunk is worked on, k while q h and P v are. h is an operand from shared
// memory, rewritten once a chunk.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/prepare.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

struct Segments {
  int count = 1;            // of each sequence; the last may be empty
  int chunks = 0;           // chunks of a segment
  bool first_pass = false;  // find end states from zero
  float* starts = nullptr;  // [count, N, G, K, V]: end states from zero, then start states; null with one segment
};

// Tiles of shared memory, in this order.
template <int KB, int groups, bool outputs>
struct RecurrencePlan {
  static constexpr int k_slots = outputs ? 1 : 2;
  static constexpr int q = 0;                           // [2][KB]
  static constexpr int k = q + (outputs ? 2 * KB : 0);  // [k_slots][KB]
  static constexpr int scores = k + k_slots * KB;       // [2]
  static constexpr int v = scores + (outputs ? 2 : 0);  // [2][groups]
  static constexpr int h = v + 2 * groups;              // [groups][KB]
  static constexpr int bytes = (h + groups * KB) * kTileBytes;
};

template <class Core, int KB, int groups, bool outputs>
__device__ __forceinline__ void recurrence(const Params& p, const Prepared& in, const Segments& segments,
                                           char* shared) {
  using Plan = RecurrencePlan<KB, groups, outputs>;
  const std::uint32_t base = ptx::shared_address(shared);
  const int thread = threadIdx.x % kGroupThreads, part = threadIdx.x / kGroupThreads;
  const int lane = thread % 32, warp = thread / 32;
  const int slices = (p.value_dim + 64 * groups - 1) / (64 * groups);
  const int heads = outputs ? p.heads * p.group : p.heads, group = outputs ? p.group : 1;
  const int v0 = (static_cast<int>(blockIdx.x % slices) * groups + part) * 64;
  std::int64_t rest = blockIdx.x / slices;
  const int segment = static_cast<int>(rest % segments.count);
  rest /= segments.count;
  const int query_head = static_cast<int>(rest % heads), head = query_head / group;
  const std::int64_t n = rest / heads;
  const int K = p.key_dim, V = p.value_dim;
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const int begin = segments.count == 1 ? 0 : segment * segments.chunks;
  const int end = segments.count == 1 ? chunks : min(chunks, begin + segments.chunks);
  const bool leads = query_head % group == 0;
  const std::int64_t cell_size = static_cast<std::int64_t>(K) * V, cell = n * p.heads + head;
  float* start = segments.starts == nullptr
                     ? nullptr
                     : segments.starts + (segment * p.sequences.count * p.heads + cell) * cell_size;
  const auto tile = [&](int i) { return static_cast<std::uint32_t>(i) * kTileBytes; };
  const std::uint32_t h_tiles = tile(Plan::h + part * KB);

  // `tiles` tiles that lie in memory as in shared memory, by the whole block.
  const auto load_images = [&](int at, const char* image, int tiles) {
    for (int i = threadIdx.x; i < tiles * (kTileBytes / 16); i += kGroupThreads * groups)
      ptx::copy_async_16(base + tile(at) + 16 * i, image + 16 * i);
  };
  const auto load_k = [&](int c) {
    if (c < end)
      load_images(Plan::k + (c % Plan::k_slots) * KB,
                  in.k + ((span.chunk_begin + c) * p.heads + head) * KB * kTileBytes, KB);
  };
  const auto load_rest = [&](int c) {
    if (c >= end) return;
    if constexpr (outputs) {
      const std::int64_t at = (span.chunk_begin + c) * heads + query_head;
      load_images(Plan::q + (c & 1) * KB, in.q + at * KB * kTileBytes, KB);
      load_images(Plan::scores + (c & 1), in.scores + at * kTileBytes, 1);
    }
    const Rows r = rows_of(p.v, 2, span, static_cast<std::int64_t>(c) * kChunk, head, v0, V);
    load_tile(base + tile(Plan::v + (c & 1) * groups + part), r, aligned(r), thread);
  };
  // Decays of this thread's two rows of each tile of the state.
  float2 decay[KB];
  const auto load_decay = [&](int c) {
    if (c >= end) return;
    const float* at = in.decay + ((span.chunk_begin + c) * p.heads + head) * KB * 64 + 16 * warp + lane / 4;
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) decay[kb] = make_float2(at[64 * kb], at[64 * kb + 8]);
  };
  const auto write_states = [&](int c) {
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      const std::int64_t offset =
          ((span.chunk_begin + c) * p.heads + head) * cell_size + static_cast<std::int64_t>(64 * kb) * V + v0;
      const Rows target{static_cast<const char*>(p.states) + offset * 2, V * 2, min(64, K - 64 * kb), V - v0};
      store_tile(target, base + h_tiles + tile(kb), aligned(target), thread);
    }
  };

  Accumulator h[KB];
  const float* h0 = p.h0 == nullptr ? nullptr : static_cast<const float*>(p.h0) + cell * cell_size;
  const bool keeps_states = p.states != nullptr && leads && !segments.first_pass;
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) {
    read_state(h[kb], segments.first_pass ? nullptr : segments.count > 1 ? start : h0, K, V, 64 * kb, v0, thread);
    if (outputs || keeps_states) put_tile(shared + h_tiles + tile(kb), h[kb], thread);
  }
  __syncwarp();
  if (keeps_states && begin < end) write_states(begin);

  load_rest(begin);
  ptx::copy_async_commit();
  load_k(begin);
  ptx::copy_async_commit();
  load_decay(begin);
#pragma unroll 1
  for (int c = begin; c < end; ++c) {
    const std::uint32_t q = base + tile(Plan::q + (c & 1) * KB), k = base + tile(Plan::k + (c % Plan::k_slots) * KB);
    const std::uint32_t scores = base + tile(Plan::scores + (c & 1));
    const int v_slot = Plan::v + (c & 1) * groups + part;
    const std::uint32_t v = base + tile(v_slot);
    load_rest(c + 1);
    if constexpr (!outputs) load_k(c + 1);
    ptx::copy_async_commit();
    Accumulator o;
    if constexpr (outputs) {
      ptx::copy_async_wait<2>();
      Core::publish();
      __syncthreads();  // q, P, v and h are there
      clear(o);
      Core::begin();
#pragma unroll
      for (int kb = 0; kb < KB; ++kb)
        Core::template product<Stored::k_inner, Stored::k_outer>(o, q + tile(kb), base + h_tiles + tile(kb), thread);
      Core::template product<Stored::k_inner, Stored::k_outer>(o, scores, v, thread);
      Core::commit();
    }
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) scale_rows(h[kb], decay[kb].x, decay[kb].y);
    load_decay(c + 1);
    ptx::copy_async_wait<1>();
    Core::publish();
    __syncthreads();  // k is there
    Core::begin();
#pragma unroll
    for (int kb = 0; kb < KB; ++kb)
      Core::template product<Stored::k_outer, Stored::k_outer>(h[kb], k + tile(kb), v, thread);
    Core::finish();
    __syncthreads();  // all operands have been read
    if constexpr (outputs) {
      load_k(c + 1);
      ptx::copy_async_commit();
    }
    const bool keep = keeps_states && c + 1 < end;
    if (outputs || keep) {
#pragma unroll
      for (int kb = 0; kb < KB; ++kb) put_tile(shared + h_tiles + tile(kb), h[kb], thread);
    }
    if constexpr (outputs) {
      scale_rows(o, p.scale, p.scale);
      put_tile(shared + tile(v_slot), o, thread);
    }
    __syncwarp();
    if constexpr (outputs) {
      const Rows r = rows_of(p.o, 2, span, static_cast<std::int64_t>(c) * kChunk, query_head, v0, V);
      store_tile(r, v, aligned(r), thread);
    }
    if (keep) write_states(c + 1);
  }
  if (!leads) return;
  // The end of the sequence: of its last segment that has chunks, or of the first if it is empty.
  const bool last = chunks == 0 ? segment == 0 : begin < chunks && end == chunks;
  float* target = segments.first_pass                  ? start
                  : outputs && p.ht != nullptr && last ? static_cast<float*>(p.ht) + cell * cell_size
                                                       : nullptr;
  if (target == nullptr) return;
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) write_state(target, h[kb], K, V, 64 * kb, v0, thread);
}

// grid: N * (H, or G without outputs) * segments * ceil(V / (64 groups)), value slices fastest. In the first pass each
// segment's end state from zero goes to segments.starts; otherwise chunk-start states, outputs and ht as wanted.
template <class Core, int KB, int groups, bool outputs>
__global__ void __launch_bounds__(kGroupThreads* groups, KB* groups >= 4 ? 1 : 2)
    recurrence_kernel(const __grid_constant__ Params p, const __grid_constant__ Prepared in,
                      const __grid_constant__ Segments segments) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) recurrence<Core, KB, groups, outputs>(p, in, segments, shared);
}

// Segment end states from zero to start states, in place: start_0 = h0, start_{s+1} = (product of decays of s) start_s
// + end_s. Thread: one element of one (sequence, head); grid: (ceil(K V / 256), N * G).
__global__ void __launch_bounds__(256)
    combine_kernel(const __grid_constant__ Params p, const __grid_constant__ Prepared in,
                   const __grid_constant__ Segments segments) {
  const std::int64_t cell_size = static_cast<std::int64_t>(p.key_dim) * p.value_dim;
  const std::int64_t element = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (element >= cell_size) return;
  const int key = static_cast<int>(element / p.value_dim);
  const std::int64_t cell = blockIdx.y;
  const std::int64_t n = cell / p.heads;
  const int head = static_cast<int>(cell % p.heads);
  const Span span = span_of(p.sequences, n);
  const std::int64_t chunks = (span.length + kChunk - 1) / kChunk;
  float state = p.h0 == nullptr ? 0.0f : static_cast<const float*>(p.h0)[cell * cell_size + element];
  for (int s = 0; s < segments.count; ++s) {
    float* slot = segments.starts + (s * p.sequences.count * p.heads + cell) * cell_size + element;
    const float from_zero = *slot;
    *slot = state;
    const std::int64_t begin = static_cast<std::int64_t>(s) * segments.chunks,
                       end = min(chunks, begin + segments.chunks);
    if (begin >= chunks) continue;
    float decay = 1.0f;
    for (std::int64_t c = begin; c < end; ++c)
      decay *= in.decay[((span.chunk_begin + c) * p.heads + head) * in.blocks * 64 + key];
    state = decay * state + from_zero;
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

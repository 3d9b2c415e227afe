// Second pass after forward/prepare.cuh: the recurrence over chunks, free of gates, with the state of one (sequence,
// head, segment of time) and 64 value channels for each group of 128 threads in registers; two groups share q, k and P.
// Segments: where sequences, heads and slices do not fill the card, time is cut; a pass without outputs finds each
// segment's end state from zero, combine_kernel turns these into start states (the operator from a segment's start to
// its end is only a product of decays), and this kernel runs from those.
//
// q, P and v of the next chunk come in while a chunk is worked on, k while q h and P v are. h is an operand from shared
// memory, rewritten once a chunk.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/prepare.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

struct Segments {
  int count = 1;            // of each sequence; the last may be empty
  int chunks = 0;           // chunks of a segment
  bool first_pass = false;  // find end states from zero
  float* decays = nullptr;  // [count, N, G, 64 blocks]: product over the segment, by the first pass
  float* starts = nullptr;  // [count, N, G, K, V]: end states from zero, then start states; null with one segment
};

// Tiles of shared memory, in this order.
template <int KB, int groups, bool outputs>
struct RecurrencePlan {
  static constexpr int k_slots = outputs ? 1 : 2;
  static constexpr int q = 0;                                      // [2][KB]
  static constexpr int k = q + (outputs ? 2 * KB : 0);             // [k_slots][KB]
  static constexpr int scores = k + k_slots * KB;                  // [2]
  static constexpr int v = scores + (outputs ? 2 : 0);             // [2][groups]
  static constexpr int h = v + 2 * groups;                         // [groups][KB]
  static constexpr int barriers = (h + groups * KB) * kTileBytes;  // bytes: q and P [2], k [2]
  static constexpr int bytes = barriers + 4 * 8;
};

// The copy engine and its barriers, where there is one.
__device__ __forceinline__ void init_barriers(std::uint32_t first, int count) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  for (int i = 0; i < count; ++i) ptx::mbarrier_init(first + 8 * i, 1);
  ptx::fence_barrier_init();
#endif
}
__device__ __forceinline__ void expect_bytes(std::uint32_t barrier, int bytes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::mbarrier_arrive_expect(barrier, bytes);
#endif
}
__device__ __forceinline__ void copy_in_bulk(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::copy_bulk(to, from, bytes, barrier);
#endif
}
template <class Core>
__device__ __forceinline__ void wait_for_bulk(std::uint32_t barrier, int parity) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Core::copies_in_bulk) ptx::mbarrier_wait(barrier, parity);
#endif
}

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
  if (segments.first_pass && segment + 1 == segments.count) return;  // nothing starts where the last one ends
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

  // Tiles that lie in memory as in shared memory: on Hopper by the copy engine, counted on an mbarrier, else by all
  // threads. Slots of q and P, and without outputs of k, alternate; both have barriers of their own.
  const std::uint32_t q_barrier = base + Plan::barriers, k_barrier = q_barrier + 16;
  const auto load_images = [&](int at, const char* image, int tiles, std::uint32_t barrier) {
    if constexpr (Core::copies_in_bulk) {
      if (threadIdx.x == 0) copy_in_bulk(base + tile(at), image, tiles * kTileBytes, barrier);
    } else {
      for (int i = threadIdx.x; i < tiles * (kTileBytes / 16); i += kGroupThreads * groups) {
        ptx::copy_async_16(base + tile(at) + 16 * i, image + 16 * i);
      }
    }
  };
  const auto expect = [&](std::uint32_t barrier, int tiles) {
    if constexpr (Core::copies_in_bulk) {
      if (threadIdx.x == 0) expect_bytes(barrier, tiles * kTileBytes);
    }
  };
  const auto load_k = [&](int c) {
    if (c >= end) return;
    const int slot = (c - begin) % Plan::k_slots;
    expect(k_barrier + 8 * slot, KB);
    load_images(Plan::k + slot * KB, in.k + ((span.chunk_begin + c) * p.heads + head) * KB * kTileBytes, KB,
                k_barrier + 8 * slot);
  };
  const auto load_rest = [&](int c) {
    if (c >= end) return;
    const int slot = (c - begin) & 1;
    if constexpr (outputs) {
      const std::int64_t at = (span.chunk_begin + c) * heads + query_head;
      expect(q_barrier + 8 * slot, KB + 1);
      load_images(Plan::q + slot * KB, in.q + at * KB * kTileBytes, KB, q_barrier + 8 * slot);
      load_images(Plan::scores + slot, in.scores + at * kTileBytes, 1, q_barrier + 8 * slot);
    }
    const Rows r = rows_of(p.v, 2, span, static_cast<std::int64_t>(c) * kChunk, head, v0, V);
    load_tile(base + tile(Plan::v + slot * groups + part), r, aligned(r), thread);
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

  if constexpr (Core::copies_in_bulk) {
    if (threadIdx.x == 0) init_barriers(q_barrier, 4);
    __syncthreads();
  }
  load_rest(begin);
  ptx::copy_async_commit();
  load_k(begin);
  ptx::copy_async_commit();
  load_decay(begin);
  float2 product[KB];
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) product[kb] = make_float2(1.0f, 1.0f);
#pragma unroll 1
  for (int c = begin; c < end; ++c) {
    const int round = c - begin, slot = round & 1, k_slot = round % Plan::k_slots;
    const std::uint32_t q = base + tile(Plan::q + slot * KB), k = base + tile(Plan::k + k_slot * KB);
    const std::uint32_t scores = base + tile(Plan::scores + slot);
    const int v_slot = Plan::v + slot * groups + part;
    const std::uint32_t v = base + tile(v_slot);
    load_rest(c + 1);
    if constexpr (!outputs) load_k(c + 1);
    ptx::copy_async_commit();
    Accumulator o;
    if constexpr (outputs) {
      ptx::copy_async_wait<2>();
      Core::publish();
      __syncthreads();  // v and h are there, and q and P
      wait_for_bulk<Core>(q_barrier + 8 * slot, (round >> 1) & 1);
      clear(o);
      Core::begin();
#pragma unroll
      for (int kb = 0; kb < KB; ++kb) {
        Core::template product<Stored::k_inner, Stored::k_outer>(o, q + tile(kb), base + h_tiles + tile(kb), thread);
      }
      Core::template product<Stored::k_inner, Stored::k_outer>(o, scores, v, thread);
      Core::commit();
    }
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      scale_rows(h[kb], decay[kb].x, decay[kb].y);
      if constexpr (!outputs) product[kb] = make_float2(product[kb].x * decay[kb].x, product[kb].y * decay[kb].y);
    }
    load_decay(c + 1);
    if constexpr (!outputs || !Core::copies_in_bulk) {
      ptx::copy_async_wait<1>();
      Core::publish();
      __syncthreads();  // k (without outputs v too) is there
    }
    wait_for_bulk<Core>(k_barrier + 8 * k_slot, (round / Plan::k_slots) & 1);
    Core::begin();
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      Core::template product<Stored::k_outer, Stored::k_outer>(h[kb], k + tile(kb), v, thread);
    }
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
  if (segments.first_pass && v0 == 0 && lane % 4 == 0) {
    float* at = segments.decays + ((segment * p.sequences.count * p.heads) + cell) * KB * 64 + 16 * warp + lane / 4;
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      at[64 * kb] = product[kb].x;
      at[64 * kb + 8] = product[kb].y;
    }
  }
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
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) recurrence<Core, KB, groups, outputs>(p, in, segments, shared);
}

// Segment end states from zero to start states, in place: start_0 = h0, start_{s+1} = (product of decays of s) start_s
// + end_s. Thread: one element of one (sequence, head); grid: (ceil(K V / 256), N * G).
__global__ void __launch_bounds__(256)
    combine_kernel(const __grid_constant__ Params p, int blocks, const __grid_constant__ Segments segments) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t cell_size = static_cast<std::int64_t>(p.key_dim) * p.value_dim;
  const std::int64_t element = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (element >= cell_size) return;
  const int key = static_cast<int>(element / p.value_dim);
  const std::int64_t cell = blockIdx.y, cells = p.sequences.count * p.heads;
  float state = p.h0 == nullptr ? 0.0f : static_cast<const float*>(p.h0)[cell * cell_size + element];
  constexpr int kAtOnce = 8;  // loads in flight
  for (int first = 0; first < segments.count; first += kAtOnce) {
    float from_zero[kAtOnce], decay[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // What the last segment ends in is not wanted, nor found.
      const bool wanted = first + i + 1 < segments.count;
      const std::int64_t at = (first + i) * cells + cell;
      from_zero[i] = wanted ? segments.starts[at * cell_size + element] : 0.0f;
      decay[i] = wanted ? segments.decays[at * blocks * 64 + key] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < segments.count) segments.starts[((first + i) * cells + cell) * cell_size + element] = state;
      state = fmaf(decay[i], state, from_zero[i]);
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Second pass after prepare.cuh: the recurrence over chunks, free of gates, with the state of one (sequence, head,
// segment of time) and 64 value channels for each group of 128 threads in registers; two groups share q, k and P.
//
// The state is held transposed, a row a value channel: rounded, it is the a operand of h^T q~^T as it lies in the
// registers, and never passes through shared memory. A chunk is o^T = h^T q~^T + v^T P^T and then h^T = h^T 2^sum + v^T
// k~; what the next one needs comes in meanwhile.
//
// Segments: where sequences, heads and slices do not fill the card, time is cut; a pass without outputs finds each
// segment's end state from zero, combine_kernel turns these into start states (the operator from a segment's start to
// its end is only a product of decays), and this kernel runs from those.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/prepare.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

struct Segments {
  int count = 1;            // of each sequence; the last may be empty
  int chunks = 0;           // chunks of a segment
  bool first_pass = false;  // find end states from zero
  float* decays = nullptr;  // [count, N, G, 64 blocks]: product over the segment, by the first pass
  float* starts = nullptr;  // [count, N, G, K, V]: end states from zero, then start states; null with one segment
};

// Of a kernel: blocks of 64 key channels, groups of 64 value channels, whether o and the chunk states are wanted, and
// how many chunks shared memory holds (with two, one comes in while the other is worked on).
template <int kBlocks, int kGroupsOfBlock, bool kOutputs, int kSlots>
struct RecurrencePlan {
  static constexpr int KB = kBlocks, groups = kGroupsOfBlock, slots = kSlots, threads = groups * kGroupThreads;
  static constexpr bool outputs = kOutputs;
  // Tiles of shared memory, in this order.
  static constexpr int q = 0;                               // [slots][KB]
  static constexpr int k = q + (outputs ? slots * KB : 0);  // [slots][KB]
  static constexpr int scores = k + slots * KB;             // [slots]
  static constexpr int v = scores + (outputs ? slots : 0);  // [slots][groups]
  static constexpr int out = v + slots * groups;            // [groups][2], on their way to memory
  static constexpr int tiles = out + (outputs ? 2 * groups : 0);
  // Bytes.
  static constexpr int decay = tiles * kTileBytes;              // [slots][64 KB] floats
  static constexpr int barriers = decay + slots * KB * 64 * 4;  // [slots]
  static constexpr int bytes = barriers + slots * 8;
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

// From and to an f32 state [K,V], transposed: rows of h are value channels from `value`, columns key channels from
// `key`.
template <bool store>
__device__ __forceinline__ void move_transposed(Accumulator& h, float* state, int K, int V, int key, int value,
                                                int thread) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int k = key + column_of_element(thread, i), v = value + row_of_element(thread, i);
    float* at = state + static_cast<std::int64_t>(k) * V + v;
    if (k < K && v < V) store ? * at = h[i] : h[i] = *at;
  }
}

template <class Core, class Plan>
__device__ __forceinline__ void recurrence(const Params& p, const Prepared& in, const Segments& segments,
                                           char* shared) {
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr int KB = Plan::KB, groups = Plan::groups;
  constexpr bool outputs = Plan::outputs;
  const std::uint32_t base = ptx::shared_address(shared);
  const int thread = threadIdx.x % kGroupThreads, part = threadIdx.x / kGroupThreads;
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
  const auto tile = [&](int i) { return base + static_cast<std::uint32_t>(i) * kTileBytes; };
  const auto slot_of = [&](int c) { return (c - begin) % Plan::slots; };

  // Memory as it lies in shared memory comes on Hopper by the copy engine, counted on an mbarrier, else by all threads.
  const auto load_image = [&](std::uint32_t to, const void* image, int bytes, std::uint32_t barrier) {
    if constexpr (Core::copies_in_bulk) {
      if (threadIdx.x == 0) copy_in_bulk(to, image, bytes, barrier);
    } else {
      for (int at = 16 * static_cast<int>(threadIdx.x); at < bytes; at += 16 * Plan::threads) {
        ptx::copy_async_16(to + at, static_cast<const char*>(image) + at);
      }
    }
  };
  const auto load = [&](int c) {
    if (c < end) {
      const int slot = slot_of(c);
      const std::uint32_t barrier = base + Plan::barriers + 8 * slot;
      const std::int64_t at = (span.chunk_begin + c) * p.heads + head;
      constexpr int decay_bytes = KB * 64 * 4;
      if constexpr (Core::copies_in_bulk) {
        if (threadIdx.x == 0) expect_bytes(barrier, (outputs ? 2 * KB + 1 : KB) * kTileBytes + decay_bytes);
      }
      if constexpr (outputs) {
        const std::int64_t of_query = (span.chunk_begin + c) * heads + query_head;
        load_image(tile(Plan::q + slot * KB), in.q + of_query * KB * kTileBytes, KB * kTileBytes, barrier);
        load_image(tile(Plan::scores + slot), in.scores + of_query * kTileBytes, kTileBytes, barrier);
      }
      load_image(tile(Plan::k + slot * KB), in.k + at * KB * kTileBytes, KB * kTileBytes, barrier);
      load_image(base + Plan::decay + slot * decay_bytes, in.decay + at * KB * 64, decay_bytes, barrier);
      const Rows r = rows_of(p.v, 2, span, static_cast<std::int64_t>(c) * kChunk, head, v0, V);
      load_tile(tile(Plan::v + slot * groups + part), r, aligned(r), thread);
    }
    ptx::copy_async_commit();
  };

  Accumulator h[KB];
  const bool keeps_states = outputs && p.states != nullptr && leads;
  {
    const float* h0 = p.h0 == nullptr ? nullptr : static_cast<const float*>(p.h0) + cell * cell_size;
    const float* from = segments.first_pass ? nullptr : segments.count > 1 ? start : h0;
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      clear(h[kb]);
      if (from != nullptr) move_transposed<false>(h[kb], const_cast<float*>(from), K, V, 64 * kb, v0, thread);
    }
  }
  if constexpr (Core::copies_in_bulk) {
    if (threadIdx.x == 0) init_barriers(base + Plan::barriers, Plan::slots);
    __syncthreads();
  }
  load(begin);

  const auto group_barrier = [&] { ptx::barrier(1 + part, kGroupThreads); };
  // Without outputs, the segment's decay, of the key channels threadIdx.x, + threads, ..
  constexpr int kDecaysEach = (KB * 64 + Plan::threads - 1) / Plan::threads;
  float segment_decay[kDecaysEach];
#pragma unroll
  for (int i = 0; i < kDecaysEach; ++i) segment_decay[i] = 1.0f;
#pragma unroll 1
  for (int c = begin; c < end; ++c) {
    const int slot = slot_of(c);
    const std::uint32_t q = tile(Plan::q + slot * KB), k = tile(Plan::k + slot * KB),
                        v = tile(Plan::v + slot * groups + part);
    const std::uint32_t out = tile(Plan::out + 2 * part);
    ptx::copy_async_wait<0>();
    Core::publish();
    __syncthreads();  // v is there, and the other slot has been read
    if constexpr (Plan::slots == 2) load(c + 1);
    wait_for_bulk<Core>(base + Plan::barriers + 8 * slot, ((c - begin) / Plan::slots) & 1);

    std::uint32_t rounded[KB][16];
    if constexpr (outputs) {
#pragma unroll
      for (int kb = 0; kb < KB; ++kb) to_operand(rounded[kb], h[kb]);
    }
    const std::uint32_t decays = base + Plan::decay + slot * KB * 64 * 4;
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 decay = load_shared_pair(decays + 4 * (64 * kb + 8 * j + 2 * (thread % 4)));
        h[kb][4 * j] *= decay.x;
        h[kb][4 * j + 1] *= decay.y;
        h[kb][4 * j + 2] *= decay.x;
        h[kb][4 * j + 3] *= decay.y;
      }
    }
    if constexpr (!outputs) {
#pragma unroll
      for (int i = 0; i < kDecaysEach; ++i) {
        const int channel = static_cast<int>(threadIdx.x) + i * Plan::threads;
        if (channel < KB * 64) segment_decay[i] *= __uint_as_float(load_shared_4(decays + 4 * channel));
      }
    }
    // All products of the chunk in flight together: the compiler would wait between them for what touches h.
    Accumulator o;
    if constexpr (outputs) {
      Core::begin(rounded, h);
      Core::template product<k_outer, k_inner, true>(o, v, tile(Plan::scores + slot), thread);
#pragma unroll
      for (int kb = 0; kb < KB; ++kb) {
        Core::template product<k_inner>(o, rounded[kb], q + kb * kTileBytes, thread);
      }
      Core::commit();
    } else {
      Core::begin(h);
    }
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      Core::template product<k_outer, k_outer>(h[kb], v, k + kb * kTileBytes, thread);
    }
    Core::commit();
    if constexpr (outputs) {
      Core::template wait<1>(o, rounded);
      if (keeps_states) {  // h before the chunk
#pragma unroll
        for (int kb = 0; kb < KB; ++kb) {
          put_transposed<Core>(out + (kb & 1) * kTileBytes, rounded[kb], thread);
          group_barrier();
          const std::int64_t offset =
              ((span.chunk_begin + c) * p.heads + head) * cell_size + static_cast<std::int64_t>(64 * kb) * V + v0;
          const Rows target{static_cast<const char*>(p.states) + offset * 2, V * 2, min(64, K - 64 * kb), V - v0};
          store_tile(target, out + (kb & 1) * kTileBytes, aligned(target), thread);
        }
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i] *= p.scale;
      std::uint32_t o_rounded[16];
      to_operand(o_rounded, o);
      put_transposed<Core>(out + (KB & 1) * kTileBytes, o_rounded, thread);
      group_barrier();
      const Rows r = rows_of(p.o, 2, span, static_cast<std::int64_t>(c) * kChunk, query_head, v0, V);
      store_tile(r, out + (KB & 1) * kTileBytes, aligned(r), thread);
    }
    Core::template wait<0>(h);
    if constexpr (Plan::slots == 1) {
      __syncthreads();
      load(c + 1);
    }
  }
  if (!leads) return;
  if (segments.first_pass && blockIdx.x % slices == 0) {
    float* at = segments.decays + (segment * p.sequences.count * p.heads + cell) * KB * 64;
#pragma unroll
    for (int i = 0; i < kDecaysEach; ++i) {
      const int channel = static_cast<int>(threadIdx.x) + i * Plan::threads;
      if (channel < KB * 64) at[channel] = segment_decay[i];
    }
  }
  // The end of the sequence: of its last segment that has chunks, or of the first if it is empty.
  const bool last = chunks == 0 ? segment == 0 : begin < chunks && end == chunks;
  float* target = segments.first_pass                  ? start
                  : outputs && p.ht != nullptr && last ? static_cast<float*>(p.ht) + cell * cell_size
                                                       : nullptr;
  if (target == nullptr) return;
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) move_transposed<true>(h[kb], target, K, V, 64 * kb, v0, thread);
}

// grid: N * (H, or G without outputs) * segments * ceil(V / (64 groups)), value slices fastest. In the first pass each
// segment's end state from zero goes to segments.starts; otherwise chunk-start states, outputs and ht as wanted.
template <class Core, class Plan>
__global__ void __launch_bounds__(Plan::threads, Plan::KB* Plan::groups >= 4 ? 1 : 2)
    recurrence_kernel(const __grid_constant__ Params p, const __grid_constant__ Prepared in,
                      const __grid_constant__ Segments segments) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) recurrence<Core, Plan>(p, in, segments, shared);
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

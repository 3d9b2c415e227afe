// Second pass after prepare.cuh: the recurrence over chunks, free of gates, with the state of one (sequence, head,
// segment of time) and 64 value channels for each group of 128 threads in registers; two groups share images. Forwards
//     o = q~ h + P v,        h' = 2^sum h + k~^T v,
// and backwards in time, dh the gradient of the state after a chunk, the same with other names:
//     dv = k~ dh + P^T do,   dh' = 2^sum dh + q~^T do.
// Segments: where sequences, heads and slices do not fill the card, time is cut; a pass without outputs finds each
// segment's end state from zero, combine_kernel turns these into start states (the operator from a segment's start to
// its end is only a product of decays), and this kernel runs from those.
//
// What is read, P and x of the next chunk come in while a chunk is worked on, what is written while the products for
// the output run. h is an operand from shared memory, rewritten once a chunk.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/prepare.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"

namespace flashgla::ops::gated_linear_attention::cuda {

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
  static constexpr int readers = barriers + 4 * 8;                 // [2], see is_last_reader
  static constexpr int bytes = readers + 2 * 4;
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
// Whether the other groups have been here as often as this one: called by one thread of each group, once a round. Even
// and odd rounds have counts of their own, for a group may come twice before another comes.
template <int groups>
__device__ __forceinline__ bool is_last_reader(std::uint32_t counter) {
  return groups == 1 || ptx::add_shared(counter, 1) % groups == groups - 1;
}
__device__ __forceinline__ void store_in_bulk(void* to, std::uint32_t from, int bytes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::store_bulk(to, from, bytes);
#endif
}
__device__ __forceinline__ void commit_bulk_stores() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::store_bulk_commit();
#endif
}
// What the copy engine was told to store has been read.
__device__ __forceinline__ void wait_for_bulk_stores() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::store_bulk_wait_read();
#endif
}
template <class Core>
__device__ __forceinline__ void wait_for_bulk(std::uint32_t barrier, int parity) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Core::copies_in_bulk) ptx::mbarrier_wait(barrier, parity);
#endif
}

// An accumulator of a group to 16 KiB of memory and back, four elements of a thread beside its neighbours'.
__device__ __forceinline__ void read_part(Accumulator& a, const float* from, int thread) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 x = reinterpret_cast<const float4*>(from)[j * kGroupThreads + thread];
    a[4 * j] = x.x;
    a[4 * j + 1] = x.y;
    a[4 * j + 2] = x.z;
    a[4 * j + 3] = x.w;
  }
}
__device__ __forceinline__ void write_part(float* to, const Accumulator& a, int thread) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    reinterpret_cast<float4*>(to)[j * kGroupThreads + thread] =
        make_float4(a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3]);
  }
}

// grouped: backwards, with several query heads a key-value head.
template <class Core, int KB, int groups, bool outputs, bool grouped>
__device__ __forceinline__ void recurrence(const Params& p, const Recurrence& run, const Segments& segments,
                                           char* shared) {
  using Plan = RecurrencePlan<KB, groups, outputs>;
  const std::uint32_t base = ptx::shared_address(shared);
  const int thread = threadIdx.x % kGroupThreads, part = threadIdx.x / kGroupThreads;
  const int lane = thread % 32, warp = thread / 32;
  const int slices = (p.value_dim + 64 * groups - 1) / (64 * groups);
  // Forwards a block has a query head and the state of its key-value head, of which one query head of the group writes
  // what they share. Backwards, and without outputs, it has a key-value head; backwards with all of its query heads.
  const bool by_query = outputs && !grouped && !run.backwards;
  const int heads = by_query ? p.heads * p.group : p.heads, inner = grouped ? p.group : 1;
  const int v0 = (static_cast<int>(blockIdx.x % slices) * groups + part) * 64;
  std::int64_t rest = blockIdx.x / slices;
  const int segment = static_cast<int>(rest % segments.count);
  rest /= segments.count;
  if (segments.first_pass && segment + 1 == segments.count) return;  // nothing starts where the last one ends
  const int own_head = static_cast<int>(rest % heads), head = by_query ? own_head / p.group : own_head;
  const int x_head = head * inner, x_heads = p.heads * inner, score_head = by_query ? own_head : x_head;
  const std::int64_t n = rest / heads;
  const int K = p.key_dim, V = p.value_dim, first_key = 64 * run.first_block;
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const int begin = segments.count == 1 ? 0 : segment * segments.chunks;
  const int end = segments.count == 1 ? chunks : min(chunks, begin + segments.chunks);
  const auto index_of = [&](int c) { return grouped || run.backwards ? chunks - 1 - c : c; };  // of step c of the walk
  const bool leads = !by_query || own_head % p.group == 0;
  // For before and after the walk: not held through it.
  const auto cell_size = [&] { return static_cast<std::int64_t>(K) * V; };
  const auto cell = [&] { return anew(n) * p.heads + head; };
  const auto start = [&] {
    return segments.starts == nullptr
               ? nullptr
               : segments.starts + (anew(segment) * p.sequences.count * p.heads + cell()) * cell_size();
  };
  const auto tile = [&](int i) { return static_cast<std::uint32_t>(i) * kTileBytes; };
  const std::uint32_t h_tiles = tile(Plan::h + part * KB);

  // Tiles that lie in memory as in shared memory: on Hopper by the copy engine, counted on an mbarrier, issued by one
  // thread as soon as the last group has read the slot (the groups go their own pace); else by all threads. Slots of
  // what is read and P, and without outputs of what is written, alternate; both have barriers of their own.
  constexpr bool kBulk = Core::copies_in_bulk;
  const std::uint32_t q_barrier = base + Plan::barriers, k_barrier = q_barrier + 16, readers = base + Plan::readers;
  const auto copy_images = [&](int at, const char* image, int tiles) {
#pragma unroll(grouped ? 1 : 4)
    for (int i = threadIdx.x; i < tiles * (kTileBytes / 16); i += kGroupThreads * groups) {
      ptx::copy_async_16(base + tile(at) + 16 * i, image + 16 * i);
    }
  };
  const auto load_images = [&](int at, const char* image, int tiles, std::uint32_t barrier) {
    kBulk ? copy_in_bulk(base + tile(at), image, tiles * kTileBytes, barrier) : copy_images(at, image, tiles);
  };
  const auto image_of = [&](const char* images, std::int64_t chunk, int of_heads, int of_head) {
    return images + ((chunk * of_heads + of_head) * run.blocks + run.first_block) * kTileBytes;
  };
  const auto scores_of = [&](std::int64_t chunk, int of_head) {
    return run.scores + (chunk * p.heads * p.group + of_head) * kTileBytes;
  };
  const auto x_rows = [&](int c, int of_head) {
    return rows_of(run.x, 2, span, static_cast<std::int64_t>(index_of(c)) * kChunk, of_head, v0, V);
  };
  const auto load_k = [&](int c) {
    if (c >= end) return;
    const int slot = (c - begin) % Plan::k_slots;
    if constexpr (kBulk) expect_bytes(k_barrier + 8 * slot, KB * kTileBytes);
    load_images(Plan::k + slot * KB, image_of(run.write, span.chunk_begin + index_of(c), x_heads, x_head), KB,
                k_barrier + 8 * slot);
  };
  const auto load_q = [&](int c) {
    if (!outputs || c >= end) return;
    const int slot = (c - begin) & 1;
    const std::int64_t chunk = span.chunk_begin + index_of(c);
    if constexpr (kBulk) expect_bytes(q_barrier + 8 * slot, (run.adds_parts ? KB : KB + 1) * kTileBytes);
    load_images(Plan::q + slot * KB, image_of(run.read, chunk, heads, own_head), KB, q_barrier + 8 * slot);
    if (!run.adds_parts) load_images(Plan::scores + slot, scores_of(chunk, score_head), 1, q_barrier + 8 * slot);
  };
  const auto load_x = [&](int c) {
    if (c >= end) return;
    const int thread = fresh_thread();
    const Rows r = x_rows(c, x_head);
    load_tile(base + tile(Plan::v + ((c - begin) & 1) * groups + part), r, aligned(r), thread);
  };
  const auto sync_group = [&] {
    if constexpr (kBulk) {
      ptx::barrier(1 + part, kGroupThreads);
    } else {
      __syncthreads();
    }
  };
  // Decays of this thread's two rows of each tile of the state.
  float2 decay[KB];
  const auto load_decay = [&](int c) {
    if (c >= end) return;
    const float* at = run.decay + ((span.chunk_begin + index_of(c)) * p.heads + head) * run.blocks * 64 + first_key +
                      16 * warp + lane / 4;
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) decay[kb] = make_float2(at[64 * kb], at[64 * kb + 8]);
  };
  const bool keeps_states = run.states != nullptr && leads && !segments.first_pass && v0 < V;
  const auto keeps = [&](int c) {  // whether the state before step c is kept: of two chunks, before the walk's first
    const int index = index_of(c);
    return keeps_states && c < end &&
           (p.states_every() == 1 || (grouped || run.backwards ? index % 2 == 1 || c == 0 : index % 2 == 0));
  };
  // The state before step c, whose tiles lie in shared memory: on Hopper one thread tells the copy engine, which must
  // have read them before they are written anew.
  const auto write_states = [&](int c, int thread) {
    char* to =
        run.states + p.state_tile(p.state_slot(span.chunk_begin, n, index_of(c)), head, run.first_block, v0 / kTile);
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      if constexpr (kBulk) {
        store_in_bulk(to, base + h_tiles + tile(kb), kTileBytes);
      } else {
        store_tile_image(to, base + h_tiles + tile(kb), thread);
      }
      to += tiles_of(V) * kImageBytes;
    }
    if constexpr (kBulk) commit_bulk_stores();
  };

  Accumulator h[KB];
  const float* given = run.start == nullptr ? nullptr : run.start + cell() * cell_size();
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) {
    read_state(h[kb],
               segments.first_pass  ? nullptr
               : segments.count > 1 ? start()
                                    : given,
               K, V, first_key + 64 * kb, v0, thread);
    if (outputs || keeps_states) put_tile(shared + h_tiles + tile(kb), h[kb], thread);
  }
  __syncwarp();
  if (!kBulk && keeps(begin)) write_states(begin, thread);

  if (outputs && run.adds_parts) {  // P has been there
    for (int i = threadIdx.x; i < 2 * (kTileBytes / 16); i += kGroupThreads * groups)
      store_shared_16(base + tile(Plan::scores) + 16 * i, make_uint4(0, 0, 0, 0));
    Core::publish();
  }
  if constexpr (kBulk) {
    if (threadIdx.x == 0) {
      init_barriers(q_barrier, 4);
      store_shared_4(readers, 0);
      store_shared_4(readers + 4, 0);
    }
  }
  __syncthreads();
  if (!kBulk || threadIdx.x == 0) {
    load_q(begin);
    if constexpr (kBulk) {
      load_q(begin + 1);
      load_k(begin);
      if constexpr (Plan::k_slots == 2) load_k(begin + 1);
    }
  }
  load_x(begin);
  ptx::copy_async_commit();
  if constexpr (!kBulk) load_k(begin);
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
    const auto part_of_out = [&] {
      const std::int64_t of = (span.chunk_begin + index_of(c)) * heads + own_head;
      return run.parts + (of * tiles_of(V) + v0 / 64) * (kTile * kTile);
    };
    load_x(c + 1);
    if constexpr (!kBulk) {
      load_q(c + 1);
      if constexpr (!outputs) load_k(c + 1);
    }
    ptx::copy_async_commit();
    Accumulator o;
    const auto finish_products = [&] {
      Core::finish(o);
#pragma unroll
      for (int kb = 0; kb < KB; ++kb) Core::template wait<0>(h[kb]);
    };
    if constexpr (outputs) {
      clear(o);
      if (run.adds_parts && v0 < V) read_part(o, part_of_out(), thread);
      ptx::copy_async_wait<2>();
      Core::publish();
      sync_group();  // v and h are there, and q and P
      if (kBulk && thread == 0 && keeps(c)) write_states(c, thread);
      wait_for_bulk<Core>(q_barrier + 8 * slot, (round >> 1) & 1);
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
    if constexpr (!grouped) load_decay(c + 1);
    if constexpr (!outputs || !kBulk) {
      ptx::copy_async_wait<1>();
      Core::publish();
      sync_group();  // k (without outputs v too, and h) is there
      if (kBulk && thread == 0 && keeps(c)) write_states(c, thread);
    }
    wait_for_bulk<Core>(k_barrier + 8 * k_slot, (round / Plan::k_slots) & 1);
    Core::begin();
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      Core::template product<Stored::k_outer, Stored::k_outer>(h[kb], k + tile(kb), v, thread);
    }
    finish_products();
    if (kBulk && thread == 0 && keeps_states) wait_for_bulk_stores();
    sync_group();  // all operands have been read
                   // Backwards: the group's other query heads, one after the other.
#pragma unroll 1
    for (int i = 1; grouped && i < inner; ++i) {
      const int thread = fresh_thread();
      const std::int64_t chunk = span.chunk_begin + index_of(c);
      copy_images(Plan::k + k_slot * KB, image_of(run.write, chunk, x_heads, x_head + i), KB);
      if (outputs && !run.adds_parts) copy_images(Plan::scores + slot, scores_of(chunk, x_head + i), 1);
      const Rows r = x_rows(c, x_head + i);
      load_tile(v, r, aligned(r), thread);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      Core::publish();
      __syncthreads();
      Core::begin(o);
      if constexpr (outputs) Core::template product<Stored::k_inner, Stored::k_outer>(o, scores, v, thread);
#pragma unroll
      for (int kb = 0; kb < KB; ++kb) {
        Core::template product<Stored::k_outer, Stored::k_outer>(h[kb], k + tile(kb), v, thread);
      }
      finish_products();
      Core::publish();  // the copy engine writes next where threads have written
      __syncthreads();
    }
    if constexpr (grouped) load_decay(c + 1);  // not held while the others' products run
    if constexpr (kBulk) {
      if (thread == 0 && is_last_reader<groups>(readers + 4 * slot)) {
        load_k(c + Plan::k_slots);
        load_q(c + 2);
      }
    } else if constexpr (outputs) {
      load_k(c + 1);
    }
    if constexpr (outputs) ptx::copy_async_commit();
    const bool keep = keeps(c + 1);
    const int thread = fresh_thread();
    if (outputs || keep) {
#pragma unroll
      for (int kb = 0; kb < KB; ++kb) put_tile(shared + h_tiles + tile(kb), h[kb], thread);
    }
    if constexpr (outputs) {
      if (run.ends_parts) {
        put_tile(shared + tile(v_slot), o, thread);
      } else if (v0 < V) {
        write_part(part_of_out(), o, thread);
      }
    }
    __syncwarp();
    if constexpr (outputs) {
      if (run.ends_parts && run.out.data != nullptr) {
        const Rows r = rows_of(run.out, 2, span, static_cast<std::int64_t>(index_of(c)) * kChunk, own_head, v0, V);
        store_tile(r, v, aligned(r), thread);
      }
    }
    if (!kBulk && keep) write_states(c + 1, thread);
  }
  if (!leads) return;
  if (segments.first_pass && v0 == 0 && lane % 4 == 0) {
    float* at = segments.decays + (segment * p.sequences.count * p.heads + cell()) * run.blocks * 64 + first_key +
                16 * warp + lane / 4;
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      at[64 * kb] = product[kb].x;
      at[64 * kb + 8] = product[kb].y;
    }
  }
  // The end of the sequence: of its last segment that has chunks, or of the first if it is empty.
  const bool last = chunks == 0 ? segment == 0 : begin < chunks && end == chunks;
  float* target = segments.first_pass                     ? start()
                  : run.end != nullptr && last && outputs ? run.end + cell() * cell_size()
                                                          : nullptr;
  if (target == nullptr) return;
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) write_state(target, h[kb], K, V, first_key + 64 * kb, v0, thread);
}

// grid: N * (H forwards with outputs, else G) * segments * ceil(V / (64 groups)), value slices fastest. In the first
// pass each segment's end state from zero goes to segments.starts; otherwise chunk-start states, outputs and ht as
// wanted.
template <class Core, int KB, int groups, bool outputs, bool grouped>
__global__ void __launch_bounds__(kGroupThreads* groups, KB* groups >= 4 ? 1 : 2)
    recurrence_kernel(const __grid_constant__ Params p, const __grid_constant__ Recurrence run,
                      const __grid_constant__ Segments segments) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) recurrence<Core, KB, groups, outputs, grouped>(p, run, segments, shared);
}

// Segment end states from zero to start states, in place: start_0 = the state given, start_{s+1} = (product of decays
// of s) start_s + end_s. Thread: kWidth neighbouring elements of a row of one (sequence, head), 4 where V is a multiple
// of it and the state given is aligned; grid: (ceil(K V / kWidth / 256), N * G).
constexpr int kCombineThreads = 256;
template <int kWidth>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ Params p, const float* given, int blocks,
                   const __grid_constant__ Segments segments) {
  using Elements = std::conditional_t<kWidth == 4, float4, float>;
  flashgla::cuda::wait_for_previous();
  const unsigned row_size = static_cast<unsigned>(p.value_dim) / kWidth, cell_size = p.key_dim * row_size;
  const unsigned element = blockIdx.x * kCombineThreads + threadIdx.x;
  if (element >= cell_size) return;
  const unsigned key = element / row_size;
  const std::int64_t cell = blockIdx.y, cells = p.sequences.count * p.heads;
  const auto at = [&](const float* states, std::int64_t of) {
    return reinterpret_cast<Elements*>(const_cast<float*>(states)) + of * cell_size + element;
  };
  Elements state{};
  if (given != nullptr) state = *at(given, cell);
  constexpr int kAtOnce = 8;  // loads in flight
  for (int first = 0; first < segments.count; first += kAtOnce) {
    Elements from_zero[kAtOnce];
    float decay[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // What the last segment ends in is not wanted, nor found.
      const bool wanted = first + i + 1 < segments.count;
      const std::int64_t of = (first + i) * cells + cell;
      from_zero[i] = wanted ? *at(segments.starts, of) : Elements{};
      decay[i] = wanted ? segments.decays[of * blocks * 64 + key] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < segments.count) *at(segments.starts, (first + i) * cells + cell) = state;
      if constexpr (kWidth == 4) {
        state = make_float4(fmaf(decay[i], state.x, from_zero[i].x), fmaf(decay[i], state.y, from_zero[i].y),
                            fmaf(decay[i], state.z, from_zero[i].z), fmaf(decay[i], state.w, from_zero[i].w));
      } else {
        state = fmaf(decay[i], state, from_zero[i]);
      }
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

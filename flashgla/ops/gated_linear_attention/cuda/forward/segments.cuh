// Where time is cut into segments (two_pass.h): the state that each segment's own tokens leave, from zero,
//     h' = 2^sum h + k~^T v      (backwards dh' = 2^sum dh + q~^T do),
// as the recurrence goes (recurrence.cuh), and start states made of them. Rows of accumulators are key channels, as is
// best where nothing is multiplied with the state (README.md, "Two passes").
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/place_in_time.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kEndKeyTiles = 2;  // of a group of 128 threads

// A group has two key tiles by VT value tiles; two groups of a block are neighbours in K where that is wider than one
// has, else in V. Slots of key tiles, then value tiles; decays [slots][key tiles * 64]; barriers full, empty.
template <class Core, int groups, int VT>
struct SegmentEndsPlan {
  static constexpr bool in_bulk = std::is_same_v<Core, TensorCore90>;
  static constexpr int slot_tiles = groups == 1 ? kEndKeyTiles + VT : 2 * kEndKeyTiles + VT;  // the most
  static constexpr int slots = in_bulk ? 4 : 2;
  static constexpr int decays = slots * slot_tiles * kTileBytes, decay_bytes = groups * kEndKeyTiles * kTile * 4;
  static constexpr int full = decays + slots * decay_bytes, empty = full + slots * 8;
  static constexpr int bytes = empty + slots * 8;
  // The warps that load are a group, which can give registers away, where the others need more than their share.
  static constexpr bool gives_registers = in_bulk && groups == 2 && VT == 2;
  static constexpr int producer_registers = 56, consumer_registers = 224;
  // Of them one warp loads images, the others rows, by turns.
  static constexpr int loaders = !in_bulk ? 0 : groups == 1 && VT == 1 ? 64 : kGroupThreads;
  static constexpr int threads = groups * kGroupThreads + loaders;
  static constexpr int blocks = groups == 1 && VT == 1 ? 2 : 1;  // a multiprocessor
};
static_assert(SegmentEndsPlan<TensorCore80, 2, 2>::bytes <= 99 * 1024);  // of capability 8.6 and 8.9

template <class Core, int groups, int VT>
__device__ __forceinline__ void segment_end(const Params& p, const Recurrence& run, const Segments& segments,
                                            char* shared) {
  using Plan = SegmentEndsPlan<Core, groups, VT>;
  constexpr bool kBulk = Plan::in_bulk;
  constexpr int kSlots = Plan::slots;
  const std::uint32_t base = ptx::shared_address(shared);
  const int part = threadIdx.x / kGroupThreads, V = p.value_dim;
  const int key_groups = groups == 2 && run.blocks > kEndKeyTiles ? 2 : 1, value_groups = groups / key_groups;
  const int key_tiles = kEndKeyTiles * key_groups, value_tiles = VT * value_groups;  // of a block
  const int value_blocks = (tiles_of(V) + value_tiles - 1) / value_tiles;
  const int key_blocks = (run.blocks + key_tiles - 1) / key_tiles;
  unsigned rest = blockIdx.x;
  const int value_tile = static_cast<int>(rest % value_blocks) * value_tiles;
  rest /= value_blocks;
  const int key_tile = static_cast<int>(rest % key_blocks) * key_tiles;
  rest /= key_blocks;
  const PlaceInTime place = place_in_time<true>(p.sequences, segments, rest, p.heads);
  if (place.n < 0) return;
  const int segment = place.segment, head = place.head, n = static_cast<int>(place.n);
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const int begin = min(chunks, segment * segments.chunks), end = min(chunks, begin + segments.chunks);
  // Heads of x that go into one state: backwards the query heads of a key-value head. A visit is a chunk and one of
  // them.
  const int inner = run.backwards ? p.group : 1, visits = (end - begin) * inner;
  const auto chunk_of_visit = [&](int visit) {
    const int step = begin + visit / inner;
    return run.backwards ? chunks - 1 - step : step;
  };
  const auto slot_at = [&](int slot) { return base + slot * Plan::slot_tiles * kTileBytes; };
  const auto decays_at = [&](int slot) { return Plan::decays + slot * Plan::decay_bytes; };
  const auto x_rows = [&](int visit, int tile) {
    return rows_of(run.x, 2, chunk_of(span, chunk_of_visit(visit)), head * inner + visit % inner, kTile * tile, V);
  };
  const bool plain = run.write == nullptr;  // rows of q and k, and nothing decays
  struct Images {
    const char* write;
    const float* decay;
  };
  const auto images_of = [&](int visit) {
    const std::int64_t chunk = span.chunk_begin + chunk_of_visit(visit);
    return Images{
        run.write + ((chunk * p.heads * inner + head * inner + visit % inner) * run.blocks + key_tile) * kTileBytes,
        run.decay + ((chunk * p.heads + head) * run.blocks + key_tile) * kTile};
  };
  const int tiles_there = min(key_tiles, run.blocks - key_tile);
  const std::uint32_t full = base + Plan::full, empty = base + Plan::empty;
  if constexpr (kBulk) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kSlots; ++i) Core::init_barrier(full + 8 * i, 1 + 32);
      for (int i = 0; i < kSlots; ++i) Core::init_barrier(empty + 8 * i, groups * kGroupThreads);
      Core::publish_barriers();
    }
    __syncthreads();
    flashgla::cuda::wait_for_previous();
    if (part == groups) {
      if constexpr (Plan::gives_registers) Core::template give<Plan::producer_registers>();
      const int lane = threadIdx.x % 32, role = static_cast<int>(threadIdx.x) / 32 - 4 * groups;
      // One visit more than there are, which nothing is brought for.
      constexpr int kRowWarps = Plan::loaders / 32 - 1;
#pragma unroll 1
      for (int visit = max(role - 1, 0); visit <= visits; visit += role == 0 ? 1 : kRowWarps) {
        const int slot = visit % kSlots;
        const std::uint32_t barrier = full + 8 * slot;
        Core::wait_at(empty + 8 * slot, (visit / kSlots & 1) ^ 1);
        if (role == 0) {
          if (lane == 0) {
            if (visit < visits && plain) {
              Core::expect_bytes(barrier, tiles_there * kTileBytes);
#pragma unroll 1
              for (int i = 0; i < tiles_there; ++i) {
                Core::copy_box(slot_at(slot) + i * kTileBytes, &run.write_rows.map, kTile * (key_tile + i),
                               chunk_of_visit(visit) * kChunk,
                               (head * inner + visit % inner) * run.write_rows.head_step, n * run.write_rows.batch_step,
                               barrier);
              }
            } else if (visit < visits) {
              const Images from = images_of(visit);
              Core::expect_bytes(barrier, tiles_there * (kTileBytes + kTile * 4));
              Core::copy_in(slot_at(slot), from.write, tiles_there * kTileBytes, barrier);
              Core::copy_in(base + decays_at(slot), from.decay, tiles_there * kTile * 4, barrier);
            } else {
              Core::arrive(barrier);
            }
          }
        } else {
          const bool there = visit < visits;
#pragma unroll 1
          for (int i = 0; there && i < value_groups; ++i) {
            load_tiles_by_warp<VT>(slot_at(slot) + (key_tiles + VT * i) * kTileBytes,
                                   x_rows(visit, value_tile + VT * i), lane);
          }
          there ? Core::arrive_after_copies(barrier) : Core::arrive(barrier);
        }
      }
      return;
    }
    if constexpr (Plan::gives_registers) Core::template take<Plan::consumer_registers>();
  }
  const int key_part = key_groups == 2 ? part : 0, value_part = key_groups == 2 ? 0 : part;

  Accumulator h[kEndKeyTiles][VT];
  float decay[kEndKeyTiles][2];  // the product so far, of this thread's two rows of each key tile
#pragma unroll
  for (int i = 0; i < kEndKeyTiles; ++i) {
    decay[i][0] = decay[i][1] = 1.0f;
#pragma unroll
    for (int j = 0; j < VT; ++j) clear(h[i][j]);
  }
  const auto row_of = [&](int thread) { return row_of_element(thread, 0) + kEndKeyTiles * kTile * key_part; };
  // k~^T of a key tile; the state decays where a chunk with decays begins.
  const auto take = [&](std::uint32_t(&a)[16], int slot, int i, bool begins, int thread) {
    load_operand<Stored::k_outer>(a, slot_at(slot) + (kEndKeyTiles * key_part + i) * kTileBytes, thread);
    const float* from = reinterpret_cast<const float*>(shared + decays_at(slot)) + kTile * i + row_of(thread);
    const float first = from[0], second = from[8], x = begins ? first : 1.0f, y = begins ? second : 1.0f;
    decay[i][0] *= x;
    decay[i][1] *= y;
#pragma unroll
    for (int j = 0; j < VT; ++j) scale_rows(h[i][j], x, y);
  };
  const auto with_registers = [&](int i, std::uint32_t(&a)[16], auto call) {  // of a key tile's products
    [&]<int... j>(std::integer_sequence<int, j...>) { call(a, h[i][j]...); }
    (std::make_integer_sequence<int, VT>());
  };
  const auto multiply = [&](int i, std::uint32_t(&a)[16], std::uint32_t values, int thread) {
    with_registers(i, a, [](auto&... registers) { Core::begin(registers...); });
#pragma unroll
    for (int j = 0; j < VT; ++j) Core::template product<Stored::k_outer>(h[i][j], a, values + j * kTileBytes, thread);
    Core::commit();
  };
  const auto values_at = [&](int slot) { return slot_at(slot) + (key_tiles + VT * value_part) * kTileBytes; };
  const auto next_of_chunk = [&](int of_chunk) { return of_chunk + 1 == inner ? 0 : of_chunk + 1; };
  int of_chunk = 0;  // which of a chunk's visits
  if constexpr (kBulk) {
    std::uint32_t a[kEndKeyTiles][16] = {};
    int slot = 0, parity = 0;
    const auto wait_for_slot = [&] {
      Core::wait_at(full + 8 * slot, parity);
      Core::publish();  // the rows of x, which ordinary copies have brought, to the tensor cores
    };
    const auto wait_for = [&]<int pending>(int i, std::integral_constant<int, pending>) {
      with_registers(i, a[i], [](auto&... registers) { Core::template wait<pending>(registers...); });
    };
    constexpr std::integral_constant<int, 1> kOneGoesOn;
    constexpr std::integral_constant<int, 0> kNoneGoesOn;
    if (visits > 0) {
      wait_for_slot();
      take(a[0], slot, 0, !plain, fresh_thread());
    }
#pragma unroll 1
    for (int visit = 0; visit < visits; ++visit) {
      const int thread = fresh_thread();
      // Seen to be alike in a warp, so that descriptors are in uniform registers.
      const std::uint32_t values = __shfl_sync(0xffffffffu, values_at(slot), 0);
      multiply(0, a[0], values, thread);
      wait_for(1, kOneGoesOn);  // has been: without it ptxas waits for the product
      take(a[1], slot, 1, !plain && of_chunk == 0, thread);
      multiply(1, a[1], values, thread);
      const int this_slot = slot;
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
      of_chunk = next_of_chunk(of_chunk);
      wait_for_slot();
      wait_for(0, kOneGoesOn);
      // After the last visit whatever lies there, which changes nothing: no branch around products.
      take(a[0], slot, 0, !plain && of_chunk == 0 && visit + 1 < visits, thread);
      wait_for(1, kNoneGoesOn);
      Core::arrive(empty + 8 * this_slot);
    }
  } else {
    const auto load = [&](int visit) {  // by all threads
      if (visit < visits) {
        const int slot = visit & 1, thread = fresh_thread();
        const Images from = images_of(visit);
        const auto copy = [&](std::uint32_t to, const void* source, int bytes) {
#pragma unroll 1
          for (int i = 16 * threadIdx.x; i < bytes; i += 16 * Plan::threads)
            ptx::copy_async_16(to + i, static_cast<const char*>(source) + i);
        };
        copy(slot_at(slot), from.write, tiles_there * kTileBytes);
        copy(base + decays_at(slot), from.decay, tiles_there * kTile * 4);
#pragma unroll 1
        for (int i = part; i < value_tiles; i += groups) {
          const Rows r = x_rows(visit, value_tile + i);
          load_tile(slot_at(slot) + (key_tiles + i) * kTileBytes, r, thread);
        }
      }
      ptx::copy_async_commit();
    };
    load(0);
#pragma unroll 1
    for (int visit = 0; visit < visits; ++visit) {
      load(visit + 1);
      ptx::copy_async_wait<1>();
      __syncthreads();
      const int slot = visit & 1, thread = fresh_thread();
#pragma unroll
      for (int i = 0; i < kEndKeyTiles; ++i) {
        std::uint32_t a[16];
        take(a, slot, i, of_chunk == 0, thread);
        multiply(i, a, values_at(slot), thread);
      }
      of_chunk = next_of_chunk(of_chunk);
      __syncthreads();
    }
  }
  const int thread = fresh_thread();
  const std::int64_t of = static_cast<std::int64_t>(place.join) * p.heads + head;
  if (value_tile == 0 && value_part == 0 && thread % 4 == 0) {
    float* at = segments.decays + (of * run.blocks + key_tile) * kTile + row_of(thread);
#pragma unroll
    for (int i = 0; i < kEndKeyTiles; ++i) {
      if (key_tile + kEndKeyTiles * key_part + i >= run.blocks) break;
      at[kTile * i] = decay[i][0];
      at[kTile * i + 8] = decay[i][1];
    }
  }
#pragma unroll
  for (int i = 0; i < kEndKeyTiles; ++i) {
#pragma unroll
    for (int j = 0; j < VT; ++j) {
      const int kb = key_tile + kEndKeyTiles * key_part + i, vb = value_tile + VT * value_part + j;
      if (kb < run.blocks && vb < tiles_of(V)) {
        write_part(segments.ends + ((of * tiles_of(V) + vb) * run.blocks + kb) * (kTile * kTile), h[i][j], thread);
      }
    }
  }
}

// grid: joins * G * blocks in K * blocks in V, these fastest: nothing starts where the last segment ends.
template <class Core, int groups, int VT>
__global__ void __launch_bounds__((SegmentEndsPlan<Core, groups, VT>::threads),
                                  (SegmentEndsPlan<Core, groups, VT>::blocks))
    segment_ends_kernel(const __grid_constant__ Params p, const __grid_constant__ Recurrence run,
                        const __grid_constant__ Segments segments) {
  if (ends_idle(p.sequences)) return;
  if (!SegmentEndsPlan<Core, groups, VT>::in_bulk || p.sequences.cu_seqlens != nullptr)
    flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) segment_end<Core, groups, VT>(p, run, segments, shared);
}

// Segments' ends to start states: start_0 = of_given * given, start_{s+1} = (product of decays of s) start_s + end_s.
// Ends lie as accumulators whose rows are key channels, starts as their transposes, which the recurrence holds. A warp:
// 16 by 16 channels of one (sequence, head); an item: half of a tile of [blocks of 64 key channels, value tiles], of a
// head and sequence or, where segments differ, of a head and join: a sequence's first has its work.
constexpr int kCombineThreads = 256;
constexpr int kCombineItems = 2;  // a tile
// Blocks, two a multiprocessor of 132, which are there at once: where there is nothing to do these end soonest.
constexpr std::int64_t kMostCombine = 264;
__device__ __forceinline__ void combine(const Params& p, const float* given, float of_given, int blocks,
                                        const Segments& segments, unsigned of_cells, int of_tiles) {
  const int tile = of_tiles / kCombineItems, lane = threadIdx.x % 32;
  const int part = (of_tiles % kCombineItems * kCombineThreads + static_cast<int>(threadIdx.x)) / 32,
            of_keys = part / 4, of_values = part % 4;  // of each four 16
  const int key = tile % blocks * kTile + 16 * of_keys + lane / 4,
            value = tile / blocks * kTile + 16 * of_values + 2 * (lane % 4);
  int n = static_cast<int>(of_cells / p.heads);
  const int head = static_cast<int>(of_cells % p.heads);
  const bool differ = segments.differ(p.sequences);
  if (differ) {
    const PlaceInTime place = place_in_time<true>(p.sequences, segments, of_cells, p.heads);
    if (place.n < 0 || place.segment > 0) return;
    n = static_cast<int>(place.n);
  }
  const std::int64_t cell = static_cast<std::int64_t>(n) * p.heads + head;
  const std::int64_t chunk_begin = differ ? p.sequences.chunk_begin[n] : 0;
  const std::int64_t first_join = segments.first_join(p.sequences, n, chunk_begin);
  int count = segments.count;
  if (differ)
    count = static_cast<int>((p.sequences.chunk_begin[n + 1] - chunk_begin + segments.chunks - 1) / segments.chunks);
  const auto join_behind = [&](int segment) { return (first_join + segment) * p.heads + head; };
  const std::int64_t tiles = static_cast<std::int64_t>(tiles_of(p.value_dim)) * blocks;
  const auto tile_of = [&](float* states, int segment) {
    return reinterpret_cast<float4*>(states) + (join_behind(segment) * tiles + tile) * (kTile * kTile / 4);
  };
  float4 state[2] = {};  // of eight value channels each: of two key channels, these eight apart, two values
  if (given != nullptr) {
    const auto read = [&](int key, int value) {
      return key < p.key_dim && value < p.value_dim
                 ? of_given * given[(cell * p.key_dim + key) * static_cast<std::int64_t>(p.value_dim) + value]
                 : 0.0f;
    };
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int v = value + 8 * j;
      state[j] = make_float4(read(key, v), read(key, v + 1), read(key + 8, v), read(key + 8, v + 1));
    }
  }
  // An 8 by 8 block of f32 transposed, each half of the numbers for itself.
  const auto transposed = [](float x, float y) {
    const std::uint32_t a = __float_as_uint(x), b = __float_as_uint(y);
    const std::uint32_t low = ptx::transpose_matrix(__byte_perm(a, b, 0x5410)),
                        high = ptx::transpose_matrix(__byte_perm(a, b, 0x7632));
    return make_float2(__uint_as_float(__byte_perm(low, high, 0x5410)),
                       __uint_as_float(__byte_perm(low, high, 0x7632)));
  };
  constexpr int kAtOnce = 8;  // segments whose loads are in flight
  for (int first = 0; first < count; first += kAtOnce) {
    float4 from_zero[kAtOnce][2];
    float decay[kAtOnce][2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int segment = first + i;
      if (segment + 1 < count) {  // what the last one ends in is not wanted, nor found
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          from_zero[i][j] = tile_of(segments.ends, segment)[(2 * of_values + j) * kGroupThreads + 32 * of_keys + lane];
          decay[i][j] = segments.decays[join_behind(segment) * (blocks * kTile) + key + 8 * j];
        }
      }
    }
    flashgla::cuda::release_next();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int segment = first + i;
      if (segment > 0 && segment < count) {
        const float2 a = transposed(state[0].x, state[0].y), b = transposed(state[1].x, state[1].y),
                     c = transposed(state[0].z, state[0].w), d = transposed(state[1].z, state[1].w);
        float4* to = tile_of(segments.starts, segment - 1) + 2 * of_keys * kGroupThreads + 32 * of_values + lane;
        to[0] = make_float4(a.x, a.y, b.x, b.y);
        to[kGroupThreads] = make_float4(c.x, c.y, d.x, d.y);
      }
      if (segment + 1 < count) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          state[j] = make_float4(
              fmaf(decay[i][0], state[j].x, from_zero[i][j].x), fmaf(decay[i][0], state[j].y, from_zero[i][j].y),
              fmaf(decay[i][1], state[j].z, from_zero[i][j].z), fmaf(decay[i][1], state[j].w, from_zero[i][j].w));
        }
      }
    }
  }
}

static __global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ Params p, const float* given, float of_given, int blocks,
                   const __grid_constant__ Segments segments, unsigned cells, unsigned items) {
  if (ends_idle(p.sequences)) return;
  flashgla::cuda::wait_for_previous();
#pragma unroll 1
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x)
    combine(p, given, of_given, blocks, segments, item % cells, static_cast<int>(item / cells));
}

// ---- launches ----

template <class Core, int groups, int VT>
void launch_segment_ends(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments,
                         std::int64_t blocks) {
  using Plan = SegmentEndsPlan<Core, groups, VT>;
  flashgla::cuda::launch("gated_linear_attention segment ends", segment_ends_kernel<Core, groups, VT>,
                         dim3(static_cast<unsigned>(blocks)), Plan::threads, Plan::bytes, stream, kNext<Core>, p, run,
                         segments);
}
template <class Core>
void launch_segment_ends(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments) {
  const bool wide_key = run.blocks > kEndKeyTiles, two_groups = wide_key || p.value_dim > 2 * kTile;
  const int values = tiles_of(p.value_dim), values_each = values == 1 ? 1 : two_groups && !wide_key ? 4 : 2;
  const int keys_each = kEndKeyTiles * (wide_key ? 2 : 1);
  const std::int64_t blocks = segments.joins(p.sequences) * p.heads * ((run.blocks + keys_each - 1) / keys_each) *
                              ((values + values_each - 1) / values_each);
  if (two_groups) {
    values == 1 ? launch_segment_ends<Core, 2, 1>(stream, p, run, segments, blocks)
                : launch_segment_ends<Core, 2, 2>(stream, p, run, segments, blocks);
  } else {
    values == 1 ? launch_segment_ends<Core, 1, 1>(stream, p, run, segments, blocks)
                : launch_segment_ends<Core, 1, 2>(stream, p, run, segments, blocks);
  }
}

template <class Core>
void launch_segments(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments) {
  launch_segment_ends<Core>(stream, p, run, segments);
  const std::int64_t cells = (segments.differ(p.sequences) ? segments.joins(p.sequences) : p.sequences.count) * p.heads;
  const std::int64_t items = cells * tiles_of(p.value_dim) * run.blocks * kCombineItems;
  flashgla::cuda::launch("gated_linear_attention segments", combine_kernel,
                         dim3(static_cast<unsigned>(std::min(items, kMostCombine))), kCombineThreads, 0, stream,
                         kNext<Core>, p, run.start, run.start_scale, run.blocks, segments, static_cast<unsigned>(cells),
                         static_cast<unsigned>(items));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// The backward of heads of up to 64 x 64 in one kernel on Hopper, without gates or with one a token, from states kept
// at every fourth chunk: a block a multiprocessor walks over sequences and heads, each back in time, and its groups of
// 128 threads have a role each. With b the running sum of a chunk's gates, B its last, h the state before the chunk and
// dh the gradient of the state after it, w_ij = scale 2^(b_i - b_j) for i >= j, else 0, and a_ij = w_ij do_i . v_j:
//     dq_i = scale 2^b_i h do_i + sum_j a_ij k_j                    (group 0)
//     dv_j = 2^(B - b_j) dh^T k_j + sum_i w_ij (q_i . k_j) do_i     (group 1)
//     dk_j = 2^(B - b_j) dh v_j + sum_i a_ij q_i                    (group 2)
//     dh before the chunk = 2^B dh + sum_i scale 2^b_i q_i do_i^T   (group 3)
//     h after a chunk = 2^B h + sum_j 2^(B - b_j) k_j v_j^T         (group 4), ahead of the others by a segment
//     dg_t = sum_{i>=t} (q_i . dq_i - k_i . dk_i) + sum of dh h at the chunk's end
// No exponent is positive, whatever the gates are: nothing tells steep chunks from others. a_ij is rounded alike where
// it makes dq and where it makes dk, so that what must cancel in dg does so to f32. Group 5 is four warps: one brings
// k, v and kept states, one q and do, one sums gates, one makes dg. Who waits for whom: backward/README.md.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/one_kernel.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"

namespace flashgla::ops::gated_linear_attention::cuda {

enum class Role { dq, dv, dk };

struct RoleMaps {  // and what else the host tells the kernel
  RowMap q, k, v, d_o;
  // [Role]: where it goes, without data where it is not wanted, and that in boxes of a warp's rows.
  Strided rows[3];
  RowMap out[3];
  unsigned units;  // sequences times heads
};

template <bool kGated>
struct ByRole {
  // dq, dv, dk; dh; h; those that bring and sum.
  static constexpr int row_groups = 3, working_groups = 5, threads = (working_groups + 1) * kGroupThreads;
  // Who reads a chunk's q or do, who its k, v or h, after h of the chunks behind it have been made.
  static constexpr int chunk_readers = (row_groups + 1) * kGroupThreads;
  // A thread's registers: what each begins with, and what the groups have after they have shared; dh's and h's keep
  // theirs.
  static constexpr int registers = 80, row_registers = 96, helping_registers = 32;
  static_assert(row_groups * row_registers + 2 * registers + helping_registers == (working_groups + 1) * registers);
  // Segments lie in memory from their first chunk on, are brought in that order, and are gone through from their last
  // chunk on: a chunk has two numbers, how many were brought before it and how many were gone through. `ring`: barriers
  // go round by these numbers; more than slots and a segment together.
  static constexpr int segment = kFoundEvery, slots = segment + 1, stages = kGated ? 3 : 4, ring = 16;
  static_assert(ring >= slots + segment);

  // Offsets. A slot: k, v and h of a chunk. A stage: q and do of one.
  static constexpr int k = 0, v = kTileBytes, h = 2 * kTileBytes, slot = 3 * kTileBytes;
  static constexpr int first_stage = slots * slot, q = 0, d_o = kTileBytes, stage = 2 * kTileBytes;
  static constexpr int dh = first_stage + stages * stage, dh_transposed = dh + kTileBytes;
  // Tiles through which dq, dv and dk leave.
  static constexpr int out = dh_transposed + kTileBytes;
  // Of a chunk: b; and, of pairs of tokens as {rounded to bf16, what is left}, scale 2^b and 2^(B - b). [sum_ring] by
  // chunks brought: of two segments, so that what is written over has been gone through by the release asked for.
  static constexpr int sum_ring = 2 * segment, sums = out + row_groups * kTileBytes, query_factors = kTile * 4,
                       key_factors = 2 * kTile * 4, chunk_sums = 3 * kTile * 4;
  static constexpr int dots = sums + (kGated ? sum_ring * chunk_sums : 0);  // q . dq [64], k . dk [64]
  static constexpr int beyond = dots + (kGated ? 2 * kTile * 4 : 0);        // [parity][4 warps]: dh h at a chunk's end
  static constexpr int brought = beyond + 2 * 4 * 4;   // [ring] by chunks brought: k, v, b (and a kept h) are there
  static constexpr int found = brought + ring * 8;     // [ring] the same: h is there
  static constexpr int freed = found + ring * 8;       // [ring] by chunks gone through: their slot is free
  static constexpr int filled = freed + ring * 8;      // [stages]: q and do are there
  static constexpr int emptied = filled + stages * 8;  // [stages]
  static constexpr int dh_there = emptied + stages * 8, dh_read = dh_there + 8;
  static constexpr int dots_there = dh_read + 8, dots_read = dots_there + 8;
  static constexpr int keys_in_step = dots_read + 8, queries_in_step = keys_in_step + 8;
  static constexpr int slot_of = queries_in_step + 8;    // [ring] by chunks brought
  static constexpr int slot_freed = slot_of + ring * 4;  // [ring] by chunks gone through
  static constexpr int total = slot_freed + ring * 4;
  static_assert(total <= 227 * 1024);
};

// A block's walk over sequences and heads, and over segments of each from the last one on. Sequences without tokens are
// part of it, with no segment.
struct SegmentWalk {
  unsigned unit;           // sequence * G + head
  int head, batch, begin;  // begin: the sequence's first token in its row of the batch
  int first, count;        // the segment's chunks
  int last_rows;           // tokens of its last chunk
  bool is_last;            // of its sequence
  int before;              // chunks of segments before this one in the walk
  template <class View>
  __device__ __forceinline__ bool there(const View& view) const {
    return unit < view.units;
  }
  __device__ __forceinline__ int token(int index) const { return begin + index * kChunk; }
  // Tokens of its chunk i.
  __device__ __forceinline__ int rows(int i) const { return i + 1 < count ? kChunk : last_rows; }
  // Address of a chunk in a tensor of `element` bytes.
  __device__ __forceinline__ char* place(const Strided& x, int index, int element) const {
    return static_cast<char*>(x.data) + (batch * x.batch + token(index) * x.token + head * x.head) * element;
  }
  template <class View>
  __device__ __forceinline__ void start(const View& view) {
    unit = blockIdx.x;
    before = count = 0;
    begin_unit(view);
  }
  // The next segment, of the same sequence and head where it has one.
  template <class View>
  __device__ __forceinline__ void next(const View& view) {
    before += count;
    if (first > 0) {
      first -= kFoundEvery;
      count = kFoundEvery;
      last_rows = kChunk;
      is_last = false;
    } else {
      unit += gridDim.x;
      begin_unit(view);
    }
  }

 private:
  template <class View>
  __device__ __forceinline__ void begin_unit(const View& view) {
    first = count = 0;
    is_last = true;
    if (!there(view)) return;
    head = static_cast<int>(unit % view.p.heads);
    const Span span = span_of(view.p.sequences, unit / view.p.heads);
    const int length = static_cast<int>(span.length);  // there are tensor maps, which count to 2^31
    batch = static_cast<int>(span.batch);
    begin = static_cast<int>(span.begin);
    if (length == 0) return;
    const int chunks = (length - 1) / kChunk + 1;
    last_rows = length - (chunks - 1) * kChunk;
    first = (chunks - 1) / kFoundEvery * kFoundEvery;
    count = chunks - first;
  }
};

// Where things are in shared memory, and who waits for what.
template <class CoreIn, bool kGatedIn>
struct RoleView {
  using Core = CoreIn;
  static constexpr bool kGated = kGatedIn;
  using Layout = ByRole<kGated>;
  const Params& p;
  const unsigned& units;  // sequences times heads
  std::uint32_t base;
  bool in_pairs;  // of blocks, which ask for neighbouring heads' rows at the same time

  // One lane: waits until the other block's is here for the `time`th time too.
  __device__ __forceinline__ void in_step(int offset, int time) const {
    if (!in_pairs) return;
    const std::uint32_t barrier = base + offset;
    Core::arrive(barrier);
    Core::arrive_there(Core::there(barrier, (blockIdx.x & 1) ^ 1));
    Core::wait_at(barrier, time & 1);
  }
  __device__ __forceinline__ std::uint32_t ringed(int offset, int number) const {
    return base + offset + number % Layout::ring * 8;
  }
  __device__ __forceinline__ void wait_ringed(int offset, int number) const {
    Core::wait_at(ringed(offset, number), number / Layout::ring & 1);
  }
  // Of a chunk that has been brought.
  __device__ __forceinline__ int slot_of(int number) const {
    return static_cast<int>(load_shared_4(base + Layout::slot_of + number % Layout::ring * 4));
  }
  __device__ __forceinline__ std::uint32_t tiles_of(int slot) const { return base + slot * Layout::slot; }
  __device__ __forceinline__ std::uint32_t sums_of(int number) const {
    return base + Layout::sums + number % Layout::sum_ring * Layout::chunk_sums;
  }
  static __device__ __forceinline__ float float_at(std::uint32_t address, int i) {
    return __uint_as_float(load_shared_4(address + 4 * i));
  }
  static __device__ __forceinline__ void put_float(std::uint32_t address, int i, float x) {
    store_shared_4(address + 4 * i, __float_as_uint(x));
  }
};

// A chunk as its readers find it, in the order they go through: which number it has and which stage its q and do are
// in.
template <class View>
struct ChunkWalk {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  int stage_index = 0, phase = 0;
  int number, gone_through;          // by which it is known
  std::uint32_t stage, tiles, sums;  // once it is there

  // Chunk i of a segment is next.
  __device__ __forceinline__ void begin(const SegmentWalk& segment, int i) {
    number = segment.before + i;
    gone_through = segment.before + segment.count - 1 - i;
  }
  __device__ __forceinline__ void wait(const View& view) {
    Core::wait_at(view.base + Layout::filled + stage_index * 8, phase);
    view.wait_ringed(Layout::brought, number);
    const int slot = view.slot_of(number);
    stage = view.base + Layout::first_stage + stage_index * Layout::stage;
    tiles = view.tiles_of(slot);
    sums = view.sums_of(number);
  }
  // Where sequences are packed, rows of a last chunk beyond its tokens are another sequence's: each of the readers
  // clears them in one of the four tiles. All of them come here.
  __device__ __forceinline__ void clear_rows(std::uint32_t tile, int rows) const {
    const int thread = fresh_thread();
    for (int row = thread / 8; row < kTile; row += kGroupThreads / 8) {
      if (row >= rows) store_shared_16(tile + tile_piece(row, thread % 8), make_uint4(0, 0, 0, 0));
    }
    Core::publish();
    ptx::barrier(1, Layout::chunk_readers);
  }
  __device__ __forceinline__ void leave(const View& view) const {
    Core::arrive(view.base + Layout::emptied + stage_index * 8);
    Core::arrive(view.ringed(Layout::freed, gone_through));
  }
  __device__ __forceinline__ void step() {
    if (++stage_index == Layout::stages) {
      stage_index = 0;
      phase ^= 1;
    }
  }
};

// Of a warp's 16 rows, which 8x8 blocks count: in byte k16, all ones or zeros, of the 16 columns from 16 k16 on the
// blocks below the diagonal (rows 8 to 15, columns 0 to 7), and those above it.
struct CountedBlocks {
  std::uint32_t below, above;
  __device__ __forceinline__ CountedBlocks(bool transposed, int warp) {
    const std::uint32_t before = (1u << (8 * warp)) - 1, after = ~(before << 8 | 0xffu);  // columns, of the warp's own
    below = transposed ? after : ~after;
    above = transposed ? ~before : before;
  }
};
// Pairs of an accumulator [query][key] (transposed: [key][query]) times w, rounded, as an operand. Outside the pairs
// that count a factor may be infinite; it is masked, not multiplied by zero.
template <bool kGated>
__device__ __forceinline__ void weigh_pairs(std::uint32_t (&pairs)[16], const Accumulator& a, bool transposed,
                                            std::uint32_t sums, float scale, const CountedBlocks& blocks, int thread) {
  const int row = thread % 32 / 4, column = 2 * (thread % 4);
  // scale 2^(b_query - b_key) = +-2^(b_query + log2 |scale| - b_key)
  const float log_scale = __log2f(fabsf(scale)), sign = transposed ? 1.0f : -1.0f;
  float own[2];
  if constexpr (kGated) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own[half] = fmaf(-sign, __uint_as_float(load_shared_4(sums + 4 * row_of_element(thread, 2 * half))), log_scale);
    }
  }
  const std::uint32_t minus = kGated && scale < 0.0f ? 0x80008000u : 0u;
  // Of an 8x8 block on the diagonal.
  const std::uint32_t diagonal = ((transposed ? column >= row : row >= column) ? 0xffffu : 0u) |
                                 ((transposed ? column + 1 >= row : row >= column + 1) ? 0xffff0000u : 0u);
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t x[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * k16 + half;
      float2 b;
      if constexpr (kGated) b = load_shared_float2(sums + 4 * (8 * j + column));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float of_x = kGated ? ptx::exp2(fmaf(sign, b.x, own[i])) : scale,
                    of_y = kGated ? ptx::exp2(fmaf(sign, b.y, own[i])) : scale;
        x[2 * half + i] = ptx::pack_bf16(a[4 * j + 2 * i] * of_x, a[4 * j + 2 * i + 1] * of_y);
      }
    }
    const std::uint32_t below = __byte_perm(blocks.below, 0, 0x1111 * k16),
                        above = __byte_perm(blocks.above, 0, 0x1111 * k16),
                        mask = (diagonal | (below & above)) & (below | above);
    pairs[4 * k16] = (x[0] & mask) ^ minus;
    pairs[4 * k16 + 1] = (x[1] & below) ^ minus;
    pairs[4 * k16 + 2] = (x[2] & above) ^ minus;
    pairs[4 * k16 + 3] = (x[3] & mask) ^ minus;
  }
}

// Two factors as bf16, and what rounding leaves of them: so a product with both is rounded once.
__device__ __forceinline__ uint2 split_factors(float x, float y) {
  const std::uint32_t high = ptx::pack_bf16(x, y);
  const float2 rounded = ptx::unpack_bf16(high);
  return make_uint2(high, ptx::pack_bf16(x - rounded.x, y - rounded.y));
}
// A tile [token][channel] as an operand [channel][token]; columns 8 k8 + 2 (thread % 4) and the next times factors(k8),
// as split_factors gives them.
template <class Factors>
__device__ __forceinline__ void load_weighed(std::uint32_t (&operand)[16], std::uint32_t tile, int thread,
                                             Factors factors) {
  load_operand<Stored::k_outer>(operand, tile, thread);
#pragma unroll
  for (int k8 = 0; k8 < 8; ++k8) {
    const uint2 f = factors(k8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t& word = operand[2 * k8 + i];
      word = times_split(word, f.x, f.y);
    }
  }
}

// dq, dv or dk, by one group each: one code for the instruction cache's sake. With dh^T stored too they are alike,
//     pairs = x y^T, rows = x s^T times the rows' factors + pairs z:
// dq of do, v, h, k; dv of k, q, dh^T, do; dk of v, do, dh, q.
template <class View>
__device__ __forceinline__ void make_rows(const View& view, const RoleMaps& maps, Role role) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr bool kGated = View::kGated;
  const Params& p = view.p;
  const bool of_queries = role == Role::dq, of_values = role == Role::dv;
  const bool wanted = maps.rows[static_cast<int>(role)].data != nullptr;
  const int warp = __shfl_sync(0xffffffffu, fresh_thread() / 32, 0);
  const CountedBlocks blocks(!of_queries, warp);
  const std::uint32_t out_tile = view.base + Layout::out + static_cast<int>(role) * kTileBytes;
  SegmentWalk walk;
  ChunkWalk<View> at;
  walk.start(view);
#pragma unroll 1
  for (; walk.there(view); walk.next(view)) {
    if (walk.count == 0) continue;
#pragma unroll 1
    for (int i = walk.count - 1; i >= 0; --i) {
      const bool cut = p.sequences.cu_seqlens != nullptr && walk.rows(i) < kChunk;
      const int thread = fresh_thread();
      at.begin(walk, i);
      at.wait(view);
      const std::uint32_t q = at.stage + Layout::q, d_o = at.stage + Layout::d_o, k = at.tiles + Layout::k,
                          v = at.tiles + Layout::v, h = at.tiles + Layout::h;
      if (cut) at.clear_rows(of_queries ? d_o : of_values ? q : k, walk.rows(i));
      std::uint32_t x = v, y = d_o, s = view.base + Layout::dh, z = q;
      if (of_queries) {
        x = d_o, y = v, s = h, z = k;
      } else if (of_values) {
        x = k, y = q, s = view.base + Layout::dh_transposed, z = d_o;
      }
      Accumulator a, d;
      std::uint32_t pairs[16];
      Core::begin();
      Core::template product<k_inner, k_inner, true>(a, x, y, thread);
      Core::commit();
      Core::wait_at(of_queries ? view.ringed(Layout::found, at.number) : view.base + Layout::dh_there,
                    of_queries ? at.number / Layout::ring & 1 : at.gone_through & 1);
      Core::template product<k_inner, k_inner, true>(d, x, s, thread);
      Core::commit();
      Core::template wait<1>(a);
      weigh_pairs<kGated>(pairs, a, !of_queries, at.sums, p.scale, blocks, thread);
      const float total = kGated && !of_queries ? view.float_at(at.sums, kTile - 1) : 0.0f;
      float factors[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors[half] = of_queries ? p.scale : 1.0f;
        if constexpr (kGated) {
          const float b = view.float_at(at.sums, row_of_element(thread, 2 * half));
          factors[half] *= ptx::exp2(of_queries ? b : total - b);
        }
      }
      Core::template wait<0>(d);
      scale_rows(d, factors[0], factors[1]);
      Core::begin(pairs, d);
      Core::template product<k_outer>(d, pairs, z, thread);
      if (!of_queries) Core::arrive(view.base + Layout::dh_read);
      Core::finish(d);
      if constexpr (kGated) {
        if (!of_values) {
          const float2 dot = sum_over_row(dot_rows(of_queries ? q : k, d, thread));
          Core::wait_at(view.base + Layout::dots_read, (at.gone_through - 1) & 1);
          if (thread % 4 == 0) {
            const int row = row_of_element(thread, 0) + (of_queries ? 0 : kTile);
            view.put_float(view.base + Layout::dots, row, dot.x);
            view.put_float(view.base + Layout::dots, row + 8, dot.y);
          }
          __syncwarp();
          Core::arrive(view.base + Layout::dots_there);
        }
      }
      at.leave(view);
      if (wanted) {
        if (thread % 32 == 0) Core::wait_for_copies_out();
        __syncwarp();
        put_rounded<Core>(out_tile, d, thread);
        // By the copy engine, but for rows beyond which another sequence begins.
        if (!cut) {
          Core::publish();
          __syncwarp();
          if (thread % 32 == 0) {
            const RowMap& map = maps.out[static_cast<int>(role)];
            const int token = walk.token(walk.first + i) + 16 * warp;
            Core::copy_box_out(&map.map, 0, token, walk.head * map.head_step, walk.batch * map.batch_step,
                               out_tile + 16 * 128 * warp);
            Core::commit_copies_out();
          }
        } else {
          __syncwarp();
          // Worked out anew, since it is rare.
          const Strided& out = maps.rows[anew(static_cast<int>(role))];
          char* to = walk.place(out, walk.first + i, 2);
          store_tile_rows(out_tile, reinterpret_cast<__nv_bfloat16*>(to), static_cast<int>(out.token), walk.rows(i),
                          of_values ? p.value_dim : p.key_dim, thread);
        }
      }
      at.step();
    }
  }
  if (fresh_thread() % 32 == 0) Core::wait_for_copies_out();
}

// Of a sequence and head, in f32 [N,G,K,V].
template <class T>
__device__ __forceinline__ T* state_of(T* states, const Params& p, unsigned unit) {
  return states == nullptr ? nullptr : states + unit * (static_cast<std::int64_t>(p.key_dim) * p.value_dim);
}

// dh, back in time.
template <class View>
__device__ __forceinline__ void make_state_gradients(const View& view, const FusedBackward& f) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr bool kGated = View::kGated;
  const Params& p = view.p;
  const auto put_beyond = [&](int number, float sum) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    const int thread = fresh_thread();
    if (thread % 32 == 0) view.put_float(view.base + Layout::beyond, (number & 1) * 4 + thread / 32, sum);
    __syncwarp();
  };
  Accumulator dh;
  SegmentWalk walk;
  ChunkWalk<View> at;
  const uint2 scale = split_factors(p.scale, p.scale);
  walk.start(view);
#pragma unroll 1
  for (; walk.there(view); walk.next(view)) {
    if (walk.is_last) {
      const int thread = fresh_thread();
      read_state(dh, state_of(f.d_ht, p, walk.unit), p.key_dim, p.value_dim, 0, 0, thread);
      if constexpr (kGated) {
        float sum = 0.0f;
        if (f.d_ht != nullptr) {
          Accumulator ht;
          read_state(ht, state_of(static_cast<const float*>(p.ht), p, walk.unit), p.key_dim, p.value_dim, 0, 0, thread);
#pragma unroll  // dh as dk has it, for k dk is taken from this sum
          for (int i = 0; i < 32; ++i) sum += as_bf16(dh[i]) * ht[i];
        }
        put_beyond(walk.before, sum);
      }
    }
#pragma unroll 1
    for (int i = walk.count - 1; i >= 0; --i) {
      const int rows = walk.rows(i), thread = fresh_thread();
      at.begin(walk, i);
      std::uint32_t rounded[16];
      to_operand(rounded, dh);
      Core::wait_at(view.base + Layout::dh_read, (at.gone_through - 1) & 1);
      put_operand<Core>(view.base + Layout::dh, rounded, thread);
      put_operand<Core, true>(view.base + Layout::dh_transposed, rounded, thread);
      Core::publish();
      Core::arrive(view.base + Layout::dh_there);
      at.wait(view);
      const std::uint32_t q = at.stage + Layout::q, v = at.tiles + Layout::v;
      if (p.sequences.cu_seqlens != nullptr && rows < kChunk) at.clear_rows(v, rows);
      std::uint32_t queries[16];
      if constexpr (kGated) {
        const float decay = ptx::exp2(view.float_at(at.sums, kTile - 1));
        load_weighed(queries, q, thread, [&](int k8) {
          return load_shared_uint2(at.sums + Layout::query_factors + 8 * (4 * k8 + (thread & 3)));
        });
        scale_rows(dh, decay, decay);
      } else {
        load_weighed(queries, q, thread, [&](int) { return scale; });
      }
      Core::begin(queries, dh);
      Core::template product<Stored::k_outer>(dh, queries, at.stage + Layout::d_o, thread);
      Core::finish(dh);
      if constexpr (kGated) {
        view.wait_ringed(Layout::found, at.number);
        const float2 with_h = dot_rows(at.tiles + Layout::h, dh, thread);
        at.leave(view);
        Core::wait_at(view.base + Layout::dots_read, (at.gone_through - 1) & 1);
        Core::arrive(view.base + Layout::dots_there);
        put_beyond(at.gone_through + 1, with_h.x + with_h.y);
      } else {
        at.leave(view);
      }
      at.step();
    }
    if (walk.first == 0 && f.dh0 != nullptr) {
      write_state(state_of(f.dh0, p, walk.unit), dh, p.key_dim, p.value_dim, 0, 0, fresh_thread());
    }
  }
}

// h before each chunk of a segment, from the one that was kept.
template <class View>
__device__ __forceinline__ void find_states_between(const View& view) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  Accumulator h;
  SegmentWalk walk;
  walk.start(view);
#pragma unroll 1
  for (; walk.there(view); walk.next(view)) {
    if (walk.count == 0) continue;
    int number = walk.before;
    view.wait_ringed(Layout::brought, number);
    std::uint32_t tiles = view.tiles_of(view.slot_of(number));
    std::uint32_t kept[16];
    load_operand<Stored::k_inner>(kept, tiles + Layout::h, fresh_thread());
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 two = ptx::unpack_bf16(kept[j]);
      h[2 * j] = two.x;
      h[2 * j + 1] = two.y;
    }
    Core::arrive(view.ringed(Layout::found, number));
#pragma unroll 1
    for (const int end = number + walk.count - 1; number < end;) {
      const int thread = fresh_thread();
      if constexpr (View::kGated) {
        const std::uint32_t sums = view.sums_of(number);
        std::uint32_t keys[16];
        const float decay = ptx::exp2(view.float_at(sums, kTile - 1));
        load_weighed(keys, tiles + Layout::k, thread, [&](int k8) {
          return load_shared_uint2(sums + Layout::key_factors + 8 * (4 * k8 + (thread & 3)));
        });
        scale_rows(h, decay, decay);
        Core::begin(keys, h);
        Core::template product<Stored::k_outer>(h, keys, tiles + Layout::v, thread);
      } else {
        Core::begin(h);
        Core::template product<Stored::k_outer, Stored::k_outer>(h, tiles + Layout::k, tiles + Layout::v, thread);
      }
      Core::finish(h);
      ++number;
      view.wait_ringed(Layout::brought, number);
      tiles = view.tiles_of(view.slot_of(number));
      put_rounded<Core>(tiles + Layout::h, h, thread);
      Core::publish();
      Core::arrive(view.ringed(Layout::found, number));
    }
  }
}

// The rows of chunk i of a segment to a tile.
template <class Core>
__device__ __forceinline__ void bring_rows(std::uint32_t tile, const RowMap& rows, const SegmentWalk& segment, int i,
                                           std::uint32_t barrier) {
  Core::copy_box(tile, &rows.map, 0, segment.token(segment.first + i), segment.head * rows.head_step,
                 segment.batch * rows.batch_step, barrier);
}

// One lane: k, v and the kept states.
template <class View>
__device__ __forceinline__ void bring_keys(const View& view, const RoleMaps& maps) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  SegmentWalk walk;
  walk.start(view);
#pragma unroll 1
  for (; walk.there(view); walk.next(view)) {
    if (walk.count == 0) continue;
    const Span span = span_of(p.sequences, walk.unit / p.heads);
    const std::int64_t slot_of_state = p.state_slot(span.chunk_begin, walk.unit / p.heads, walk.first);
    const char* state = static_cast<const char*>(p.states) + p.state_tile(slot_of_state, walk.head, 0, 0);
#pragma unroll 1
    for (int i = 0; i < walk.count; ++i) {
      const int number = walk.before + i, free = number - Layout::slots;
      int slot = number;
      if (free >= 0) {
        view.wait_ringed(Layout::freed, free);
        slot = static_cast<int>(load_shared_4(view.base + (Layout::slot_freed + free % Layout::ring * 4)));
      }
      view.in_step(Layout::keys_in_step, number);
      store_shared_4(view.base + (Layout::slot_of + number % Layout::ring * 4), slot);
      store_shared_4(view.base + (Layout::slot_freed + (walk.before + walk.count - 1 - i) % Layout::ring * 4), slot);
      const std::uint32_t barrier = view.ringed(Layout::brought, number), tiles = view.tiles_of(slot);
      Core::expect_bytes(barrier, (i == 0 ? 3 : 2) * kTileBytes);
      const auto bring = [&](std::uint32_t to, const RowMap& rows) { bring_rows<Core>(to, rows, walk, i, barrier); };
      if (i == 0) Core::copy_in(tiles + Layout::h, state, kTileBytes, barrier);
      bring(tiles + Layout::k, maps.k);
      bring(tiles + Layout::v, maps.v);
    }
  }
}

// One lane: q and do.
template <class View>
__device__ __forceinline__ void bring_queries(const View& view, const RoleMaps& maps) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  SegmentWalk walk;
  int stage_index = 0, phase = 0, time = 0;
  walk.start(view);
#pragma unroll 1
  for (; walk.there(view); walk.next(view)) {
#pragma unroll 1
    for (int i = walk.count - 1; i >= 0; --i) {
      const std::uint32_t barrier = view.base + Layout::filled + stage_index * 8,
                          stage = view.base + Layout::first_stage + stage_index * Layout::stage;
      Core::wait_at(view.base + Layout::emptied + stage_index * 8, phase ^ 1);
      view.in_step(Layout::queries_in_step, time++);
      Core::expect_bytes(barrier, 2 * kTileBytes);
      const auto bring = [&](std::uint32_t to, const RowMap& rows) { bring_rows<Core>(to, rows, walk, i, barrier); };
      bring(stage + Layout::d_o, maps.d_o);
      bring(stage + Layout::q, maps.q);
      if (++stage_index == Layout::stages) {
        stage_index = 0;
        phase ^= 1;
      }
    }
  }
}

// One warp: running sums of the gates, and the factors made of them.
template <class View>
__device__ __forceinline__ void sum_gates(const View& view) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  const int lane = fresh_thread() % 32, element = static_cast<int>(size_of(p.gate_dtype));
  SegmentWalk walk;
  walk.start(view);
  int i = 0;
  uint2 bits = make_uint2(0, 0);  // of tokens 2 lane and 2 lane + 1 of chunk `number`, as they lie in memory
#pragma unroll 1
  for (int number = -1;; ++number) {
    // Those of the next chunk, so that what waits for memory comes a chunk later.
    while (walk.there(view) && i == walk.count) {
      walk.next(view);
      i = 0;
    }
    const bool there = walk.there(view);
    uint2 next = make_uint2(0, 0);
    if (there) {
      const int rows = walk.rows(i);
      const char* from = walk.place(p.g, walk.first + i, element);
      const auto bits_of = [&](int token) {
        return token < rows ? load_gate_bits(p.gate_dtype, from, token * p.g.token) : 0u;
      };
      next = make_uint2(bits_of(2 * lane), bits_of(2 * lane + 1));
    }
    if (number >= 0) {
      const float low = ptx::larger_or_nan(gate_from_bits(p.gate_dtype, bits.x) * kLog2E, kStrongest),
                  high = ptx::larger_or_nan(gate_from_bits(p.gate_dtype, bits.y) * kLog2E, kStrongest);
      const float b = sum_so_far(low + high, lane);  // at the end of token 2 lane + 1
      const float total = __shfl_sync(0xffffffffu, b, 31);
      const int written_over = number - Layout::sum_ring, gone = written_over + Layout::segment - 1;  // at the latest
      if (written_over >= 0) view.wait_ringed(Layout::freed, gone);
      const std::uint32_t sums = view.sums_of(number);
      view.put_float(sums, 2 * lane, b - high);
      view.put_float(sums, 2 * lane + 1, b);
      store_shared_uint2(sums + Layout::query_factors + 8 * lane,
                         split_factors(p.scale * ptx::exp2(b - high), p.scale * ptx::exp2(b)));
      store_shared_uint2(sums + Layout::key_factors + 8 * lane,
                         split_factors(ptx::exp2(total - (b - high)), ptx::exp2(total - b)));
      Core::arrive(view.ringed(Layout::brought, number));
    }
    if (!there) return;
    bits = next;
    ++i;
  }
}

// One warp: dg.
template <class View>
__device__ __forceinline__ void make_gate_gradients(const View& view, const FusedBackward& f) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  const Params& p = view.p;
  const Strided& dg = f.gradients.dg;
  const std::uint32_t dots = view.base + Layout::dots, beyond = view.base + Layout::beyond;
  const int lane = fresh_thread() % 32, element = static_cast<int>(size_of(p.gate_dtype));
  SegmentWalk walk;
  int gone_through = 0;
  float constant_gate = 0.0f;
  walk.start(view);
#pragma unroll 1
  for (; walk.there(view); walk.next(view)) {
#pragma unroll 1
    for (int i = walk.count - 1; i >= 0; --i) {
      const int rows = walk.rows(i);
      Core::wait_at(view.base + Layout::dots_there, gone_through & 1);
      float run = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) run += view.float_at(beyond, (gone_through & 1) * 4 + w);
      const auto difference = [&](int token) {
        return view.float_at(dots, token) - view.float_at(dots, kTile + token);
      };
      const float2 sums_on = sum_from_here(difference(2 * lane), difference(2 * lane + 1), lane);
      const float low_dg = run + sums_on.x, high_dg = run + sums_on.y;
      Core::arrive(view.base + Layout::dots_read);
      ++gone_through;
      if (p.gate == GateKind::constant) {
        constant_gate += (2 * lane < rows ? low_dg : 0.0f) + (2 * lane + 1 < rows ? high_dg : 0.0f);
      } else if (dg.data != nullptr) {
        char* to = walk.place(dg, walk.first + i, element);
        if (2 * lane < rows) store_as(p.gate_dtype, to, 2 * lane * dg.token, low_dg);
        if (2 * lane + 1 < rows) store_as(p.gate_dtype, to, (2 * lane + 1) * dg.token, high_dg);
      }
    }
    if (walk.first == 0 && p.gate == GateKind::constant) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2)
        constant_gate += __shfl_xor_sync(0xffffffffu, constant_gate, distance);
      if (lane == 0) f.gate_parts[walk.unit] = constant_gate;
      constant_gate = 0.0f;
    }
  }
}

// Grid: blocks that walk over N x G. One query head a kv head; states kept at every fourth chunk; ht given where dht
// is.
template <class Core, bool kGated>
__device__ __forceinline__ void backward_by_role(const Params& p, const FusedBackward& f, const RoleMaps& maps,
                                                 bool in_pairs, char* shared) {
  using Layout = ByRole<kGated>;
  const RoleView<Core, kGated> view{p, maps.units, ptx::shared_address(shared), in_pairs};
  if (threadIdx.x == 0) {
    const auto init = [&](int offset, int count, int arrivals) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) Core::init_barrier(view.base + offset + 8 * i, arrivals);
    };
    init(Layout::brought, Layout::ring, kGated ? 1 + 32 : 1);  // the copy engine's thread, and a warp that sums
    init(Layout::found, Layout::ring, kGroupThreads);
    init(Layout::freed, Layout::ring, Layout::chunk_readers);
    init(Layout::filled, Layout::stages, 1);
    init(Layout::emptied, Layout::stages, Layout::chunk_readers);
    init(Layout::dh_there, 1, kGroupThreads);
    init(Layout::dh_read, 1, 2 * kGroupThreads);
    init(Layout::dots_there, 1, 3 * kGroupThreads);
    init(Layout::dots_read, 1, 32);
    init(Layout::keys_in_step, 2, 2);
    Core::publish_barriers();
  }
  __syncthreads();
  if (in_pairs) {
    Core::arrive_at_cluster();
    Core::wait_for_cluster();
  }
  flashgla::cuda::wait_for_previous();
  const int group = own_group();
  if (group == Layout::working_groups) {
    Core::template give<Layout::helping_registers>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) bring_keys(view, maps);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) bring_queries(view, maps);
    } else if constexpr (kGated) {
      warp == 2 ? sum_gates(view) : make_gate_gradients(view, f);
    }
  } else if (group < Layout::row_groups) {
    Core::template take<Layout::row_registers>();
    make_rows(view, maps, static_cast<Role>(group));
  } else if (group == Layout::row_groups) {
    make_state_gradients(view, f);
  } else {
    find_states_between(view);
  }
  __syncwarp();
  if (in_pairs) {
    Core::arrive_at_cluster();
    Core::wait_for_cluster();
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

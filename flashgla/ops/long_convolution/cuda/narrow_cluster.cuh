// Outputs of sequences of more than kPoints tokens in bf16, at most twice that, as in narrow.cuh: two blocks of a
// cluster have half of a sequence's tokens each and, of all of them, half of the channels.
//
//     tokens of eight channels, half of a sequence | four channels, all of it: transforms, products | outputs of a half
//
// At `|` the blocks give each other half of what they have, in bf16, a thread's tokens to the thread of the same place
// whose lane differs in its highest bit. So a column of the first product is one of four channels, of the sequence's
// first half or of its second, and all between is a block's own. Behind the second product a thread has its half's
// spans of two halves of frequencies; lanes that differ in the highest bit change one of these over, so that each has
// one half of frequencies of all spans. So that both keep the same registers, columns of the second half have halves
// of frequencies in the other order: their tokens of odd t2 have the other sign.
//
// Spans are of every second of 512 tokens: behind the second product two of these become one of 512 frequencies, as in
// any transform by radix 2, so that there are no more spans, and products of them, than in narrow.cuh.
//
// f16's range is as there, of spectra of 512 tokens.
#pragma once

#include "flashgla/ops/long_convolution/cuda/narrow.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kClusterPoints = 2 * kPoints;
constexpr int kClusterFold = 32;  // tokens that far apart are neighbours in shared memory
// A block has two groups of eight channels in turn, so that rows in memory are of 32 bytes.
constexpr int kClusterGroups = 2, kClusterAcross = kClusterGroups * kNarrowChannels;
// Barriers: tokens that came, room for the other block's outputs; of each warp what the other block's gave, room for
// it, outputs that the other block's gave.
constexpr int kClusterLandedAt = kNarrowBarrierAt + 16;
constexpr int kClusterOutputsAt = kClusterLandedAt + 2 * 8 * kNarrowWarps;
constexpr int kClusterBytes = kClusterOutputsAt + 8 * kNarrowWarps;
static_assert(kClusterBytes <= 227 << 10);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Four words to another block's shared memory, counted down on an mbarrier there.
__device__ __forceinline__ void send_4(std::uint32_t there, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                       std::uint32_t d, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there),
               "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
               : "memory");
}

// What a warp gives to the same one of the other block, of sixteen lanes, in pieces of four words, and takes from it.
// Both must come to each step, in turn.
class ClusterLanding {
 public:
  // here: where the lane's first piece lands, the others 256 bytes on; landed: the warp's barrier, and that of room for
  // pieces 8 kNarrowWarps bytes on.
  __device__ __forceinline__ ClusterLanding(std::uint32_t rank, int lane, std::uint32_t here, std::uint32_t landed)
      : other_(rank ^ 1), lane_(lane), here_(here), landed_(landed) {}

  __device__ __forceinline__ std::uint32_t there(std::uint32_t here) const {
    return ptx::cluster_address(here, other_);
  }
  // Before `pieces` of a lane are sent.
  __device__ __forceinline__ void begin(int pieces) {
    if (given_ > 0) ptx::mbarrier_wait(landed_ + kRoom, given_ & 1 ^ 1);
    if (lane_ == 0) ptx::mbarrier_arrive_expect(landed_, pieces * 256);
    ++given_;
  }
  // To where a lane's pieces land, which is here's place there.
  __device__ __forceinline__ void send(std::uint32_t to, int piece, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                       std::uint32_t d) const {
    send_4(to + 256 * piece, a, b, c, d, there(landed_));
  }
  __device__ __forceinline__ void wait() const { ptx::mbarrier_wait(landed_, given_ & 1 ^ 1); }
  __device__ __forceinline__ void take(int piece, std::uint32_t& a, std::uint32_t& b, std::uint32_t& c,
                                       std::uint32_t& d) const {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(here_ + 256 * piece)
                 : "memory");
  }
  // Once all pieces have been read.
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive_cluster(there(landed_ + kRoom));
  }
  // Numbers of lanes that are `away` against those of lanes there whose pieces land at `to`.
  __device__ __forceinline__ void exchange(float (&values)[kSpans][4], bool away, std::uint32_t to) {
    begin(kSpans);
    if (away) {
#pragma unroll
      for (int s = 0; s < kSpans; ++s) {
        send(to, s, __float_as_uint(values[s][0]), __float_as_uint(values[s][1]), __float_as_uint(values[s][2]),
             __float_as_uint(values[s][3]));
      }
    }
    wait();
    if (away) {
#pragma unroll
      for (int s = 0; s < kSpans; ++s) {
        std::uint32_t words[4];
        take(s, words[0], words[1], words[2], words[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[s][i] = __uint_as_float(words[i]);
      }
    }
  }

 private:
  static constexpr int kRoom = 8 * kNarrowWarps;

  std::uint32_t other_;
  int lane_;
  std::uint32_t here_, landed_, given_ = 0;
};

// The columns of the first product: four channels of a sequence's first half, the same of its second.
class ClusterColumns {
 public:
  static constexpr int kChannels = kNarrowChannels / 2;

  // opposite: where pieces of the lane land that differs from this one in the highest bit.
  __device__ __forceinline__ ClusterColumns(const NarrowTransform& transform, std::uint32_t rank,
                                            ClusterLanding& landing, std::uint32_t opposite)
      : rank_(static_cast<int>(rank)),
        lane_(transform.lane()),
        landing_(landing),
        opposite_(opposite),
        kept_(transform.lane() < 16 ? 0x3210 : 0x7654) {
    turn_ = words_of(1.0f, [&](int j) {
      const int k2 = transform.lane() / 16 * 8 + 2 * transform.pair() + j;
      return (static_cast<float>(transform.warp() + 16 * k2) - 0.25f) * (1.0f / (2 * kSpan));
    });
  }
  static __device__ __forceinline__ int channel(int column) { return column % kChannels; }
  static __device__ __forceinline__ bool is_first(int column) { return column < kChannels; }
  // Of a block's half.
  __device__ __forceinline__ int token(int span, int t1, int t2) const {
    return rank_ * kPoints + span / 2 * (2 * kSpan) + (t1 * 16 + t2) * 2 + span % 2;
  }
  // Its row in shared memory.
  static __device__ __forceinline__ int place(int span, int t1, int t2) {
    return (2 * t2 + span % 2) * (kPoints / kClusterFold) + span / 2 * 16 + t1;
  }
  template <class Value, class Both>
  static __device__ __forceinline__ Value over_pairs(Value value, const Both& both) {
    value = NarrowColumns::over_pairs(value, both);
    return both(value, __shfl_xor_sync(0xffffffffu, value, 16));
  }
  static __device__ __forceinline__ float with_sign(float value, int column, int warp) {
    return __uint_as_float(__float_as_uint(value) ^ static_cast<std::uint32_t>(warp & column / kChannels) << 31);
  }
  // Such that those of a loop are asked for one after the other, before the first is waited for.
  static __device__ __forceinline__ float load_if(bool there, const float* at) {
    float value;
    asm volatile(
        "{.reg .pred there;\nsetp.ne.s32 there, %1, 0;\nmov.f32 %0, 0f00000000;\n@there ld.global.f32 %0, [%2];}"
        : "=f"(value)
        : "r"(static_cast<int>(there)), "l"(at));
    return value;
  }
  // Whether what a thread has of channel row(), of outputs of channel 2 pair() and the next, is the other block's.
  __device__ __forceinline__ bool away() const { return lane_ / 16 != rank_; }
  __device__ __forceinline__ bool outputs_away() const { return lane_ % 4 / 2 != rank_; }
  __device__ __forceinline__ void exchange_filters(float (&values)[kSpans][4]) const {
    landing_.exchange(values, away(), opposite_);
    landing_.release();
  }
  // NarrowTransform's, of [half of frequencies][span] of all 512 tokens.
  __device__ __forceinline__ void rows(const NarrowTransform& transform, int tensor, Pair (&to)[2][kSpans]) const {
    Pair halves[2][kSpans];
    transform.rows(tensor, halves);
#pragma unroll
    for (int s = 0; s < kSpans; s += 2) {
      Pair own[2], other[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) own[j] = halves[0][s + j], other[j] = from_other(halves[1][s + j]);
      join(own);
      join(other);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        to[j][s / 2] = one_of(own[j], other[j], kept_);
        to[j][kSpans / 2 + s / 2] = one_of(own[j], other[j], kept_ ^ 0x4444);
      }
    }
  }
  // Its way back, times two.
  __device__ __forceinline__ void rows_back(const NarrowTransform& transform, int tensor,
                                            const Pair (&from)[2][kSpans]) const {
    Pair halves[2][kSpans];
#pragma unroll
    for (int s = 0; s < kSpans; s += 2) {
      Pair own[2], other[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Pair first_half = from[j][s / 2], second_half = from[j][kSpans / 2 + s / 2];
        own[j] = one_of(first_half, second_half, kept_);
        other[j] = one_of(first_half, second_half, kept_ ^ 0x4444);
      }
      part(own);
      part(other);
#pragma unroll
      for (int j = 0; j < 2; ++j) halves[0][s + j] = own[j], halves[1][s + j] = from_other(other[j]);
    }
    transform.rows_back(tensor, halves);
  }

 private:
  static __device__ __forceinline__ Pair from_other(Pair value) {
    return {as_pair(__shfl_xor_sync(0xffffffffu, as_word(value.x), 16)),
            as_pair(__shfl_xor_sync(0xffffffffu, as_word(value.y), 16))};
  }
  __device__ __forceinline__ Pair turn() const { return {as_pair(turn_.x), as_pair(turn_.y)}; }
  __device__ __forceinline__ void join(Pair (&v)[2]) const {
    const Pair a = v[0], two = {__float2half2_rn(2.0f), __float2half2_rn(2.0f)};
    v[0] = add_product(a, turn(), v[1]);
    v[1] = {__hfma2(a.x, two.x, __hneg2(v[0].x)), __hfma2(a.y, two.y, __hneg2(v[0].y))};
  }
  __device__ __forceinline__ void part(Pair (&v)[2]) const {
    const Pair a = v[0];
    v[0] = sum(a, v[1]);
    v[1] = product(conjugate(turn()), difference(a, v[1]));
  }

  // By a selector of bytes, of which the compiler cannot make a branch.
  static __device__ __forceinline__ Pair one_of(Pair a, Pair b, std::uint32_t which) {
    return {as_pair(__byte_perm(as_word(a.x), as_word(b.x), which)),
            as_pair(__byte_perm(as_word(a.y), as_word(b.y), which))};
  }

  const int rank_, lane_;
  ClusterLanding& landing_;
  std::uint32_t opposite_;
  std::uint32_t kept_;  // which of two this half's columns keep: the first, or in the second half the second
  Words turn_;          // e^(-2 pi i (k - 1/4) / 512)
};

#endif

// y; filters [blocks,kClusterGroups,kNarrowFilterWords]. By `maps`, in boxes of kClusterGroups groups of channels and
// kPoints tokens, of which those that are kClusterFold apart are neighbours, for lines that are one sequence each.
inline __global__ void __launch_bounds__(kNarrowThreads, 1)
    narrow_cluster_kernel(Call<__nv_bfloat16> call, uint4* filters, int chunks,
                          const __grid_constant__ NarrowMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kGroups = kClusterGroups, kAcross = kClusterAcross, kRowBytes = 2 * kAcross;
  constexpr int kFilterTop = 2;
  constexpr float kBack = 0.125f;
  constexpr int kOutBytes = kGroups * kNarrowTokenBytes, kOutAt = kNarrowOutAt + kNarrowTokenBytes - kOutBytes;
  extern __shared__ __align__(128) unsigned char memory[];
  using Columns = ClusterColumns;
  const NarrowTransform transform(memory);
  const int lane = transform.lane(), warp = __shfl_sync(0xffffffffu, transform.warp(), 0), row = transform.row(),
            pair = transform.pair();
  const std::uint32_t rank = blockIdx.x % 2, base = ptx::shared_address(memory);
  const int groups = static_cast<int>((call.channels + kAcross - 1) / kAcross);
  const int chunk = static_cast<int>(blockIdx.x / 2) / groups;
  const int channel = (static_cast<int>(blockIdx.x / 2) - chunk * groups) * kAcross;
  auto* room = reinterpret_cast<std::uint32_t*>(memory + kNarrowRoomAt);

  // ---- what passes between the blocks ----
  const std::uint32_t barrier = base + kNarrowBarrierAt, room_here = barrier + 8;
  const bool leads = threadIdx.x == 0;
  if (leads) {
    for (int i = 0; i < 2 + 3 * kNarrowWarps; ++i) ptx::mbarrier_init(barrier + 8 * i, 1);
    ptx::fence_barrier_init();
  }
  // The other block's tokens land where nothing else does.
  const auto lands = [&](int of_lane) {
    return base + kNarrowPointsAt + kNarrowPointBytes + (warp * 128 + of_lane % 16) * 16;
  };
  ClusterLanding landing(rank, lane, lands(lane), base + kClusterLandedAt + 8 * warp);
  const std::uint32_t opposite = landing.there(lands(lane ^ 16));
  const Columns columns(transform, rank, landing, opposite);
  ptx::cluster_arrive();
  ptx::cluster_wait();
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  const auto ask = [&](int n) {
    if (!leads) return;
    ptx::mbarrier_arrive_expect(barrier, kGroups * kNarrowTokenBytes);
    ptx::copy_box(base, &maps.x, channel, static_cast<int>(rank) * (kPoints / kClusterFold), 0, n, barrier);
  };
  std::uint32_t sequences = 0;  // so far
  const auto store = [&](int n) {
    if (!leads) return;
    ptx::store_box(&maps.to, channel, static_cast<int>(rank) * (kPoints / kClusterFold), 0, n, base + kOutAt);
    ptx::store_bulk_commit();
  };
  const int first = chunk, last = static_cast<int>(call.sequences);
  if (first < last) ask(first);

  // ---- filters ----
  uint4* const own_filters =
      filters + (std::int64_t{blockIdx.x} * kGroups * kNarrowWarps + warp) * (kNarrowFilterWords / kNarrowWarps) + lane;
  float filter_scales[kGroups][2];  // of what columns 2 pair and the next take back
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const float from = Columns::with_sign(
        kBack * make_narrow_filters<kFilterTop>(call, transform, columns, channel + g * kNarrowChannels,
                                                reinterpret_cast<float*>(room), own_filters + g * kNarrowFilterWords),
        row, warp);
    filter_scales[g][0] = __shfl_sync(0xffffffffu, from, 8 * pair);
    filter_scales[g][1] = __shfl_sync(0xffffffffu, from, 8 * pair + 4);
  }

  // ---- sequences ----
  float skip = 0.0f;
  // Where TMA puts a place of rows of 32 bytes, whose halves change over in every second 128 bytes.
  const auto swizzled = [](std::uint32_t at) { return at ^ (at >> 3 & 16); };
  // Outputs: a thread's of [span][t1 half], of which the other block's land where these are put once they are whole.
  std::uint32_t outputs[kSpans][2];
  const std::uint32_t outputs_came = base + kClusterOutputsAt + 8 * warp,
                      outputs_came_there = landing.there(outputs_came), out = base + kOutAt,
                      out_lands = swizzled(out + (warp * (kPoints / 16) + row * 2 + pair % 2) * kRowBytes),
                      out_there = landing.there(out_lands);
  const int own_row = Columns::place(lane / 16, lane % 16, warp) * kRowBytes;
  std::uint32_t takes = 0;  // so far
  const auto put_outputs = [&](int group) {
    ptx::mbarrier_wait(outputs_came, takes & 1 ^ 1);
    if (columns.outputs_away()) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(outputs[2 * i][0]), "=r"(outputs[2 * i][1]), "=r"(outputs[2 * i + 1][0]),
                       "=r"(outputs[2 * i + 1][1])
                     : "r"((out_lands ^ group * 16) + 16 * i * kRowBytes)
                     : "memory");
      }
    }
    __syncwarp();
    const std::uint32_t at = swizzled(out + own_row) ^ group * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::store_matrix_4(at + 16 * i * kRowBytes, outputs[2 * i][0], outputs[2 * i][1], outputs[2 * i + 1][0],
                          outputs[2 * i + 1][1]);
    }
  };
  const std::uint32_t tokens = swizzled(base + own_row);
  // A warp's tokens of a group of sequence number `of` to the other block, once they have come.
  const auto give = [&](std::uint32_t of, int group) {
    if (group == 0) ptx::mbarrier_wait(barrier, of & 1);
    landing.begin(4);
    std::uint32_t words[kSpans][2];
    NarrowTransform::load_tokens<16 * kRowBytes>(tokens ^ group * 16, words);
    if (!columns.away()) return;
#pragma unroll
    for (int s = 0; s < kSpans; s += 2) {
      landing.send(opposite, s / 2, words[s][0], words[s][1], words[s + 1][0], words[s + 1][1]);
    }
  };
  // Once the outputs before have been read from shared memory, those of the other block may land.
  const auto make_room = [&](int group) {
    if (!leads || group > 0 || sequences == 0) return;
    ptx::store_bulk_wait_read();
    ptx::mbarrier_arrive_cluster(landing.there(room_here));
  };
  const auto take = [&](int n, int group) {
    const int next = n + chunks;
    const bool more = group + 1 < kGroups || next < last;
    std::uint32_t raw[1][kSpans][2];
    auto& words = raw[0];
    NarrowTransform::load_tokens<16 * kRowBytes>(tokens ^ group * 16, words);
    landing.wait();
    if (columns.away()) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        landing.take(i, words[2 * i][0], words[2 * i][1], words[2 * i + 1][0], words[2 * i + 1][1]);
      }
    }
    if (more) landing.release();

    if (takes > 0) put_outputs((group + 1) % kGroups);
    const auto larger = [](std::uint32_t a, std::uint32_t b) { return __vmaxu2(a, b); };
    std::uint32_t both = Columns::over_pairs(largest_of(raw), larger);
    if (pair == 0 && Columns::is_first(row)) room[row * kNarrowWarps + warp] = both;
    // All have read the tokens and written the outputs before.
    ptx::fence_async_proxy();
    __syncthreads();
    if (group == kGroups - 1 && next < last) ask(next);
    if (group == 0 && sequences > 0) store(n - chunks);
    both = largest_in_room(room, Columns::channel(row), both);
    {
      const float by[2] = {Columns::with_sign(Scale::below(both >> 7 & 0xff, 0).to, row, warp), 0.0f};
      scale_tokens(raw, by, skip);
    }
    transform.columns(0, words);
    const uint4* const from_filters = own_filters + group * kNarrowFilterWords;
    uint4 pieces[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) pieces[j] = from_filters[32 * j];
    __syncthreads();
    {
      Pair x[2][kSpans];
      columns.rows(transform, 0, x);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Pair g[kSpans];
#pragma unroll
        for (int q = 0; q < kSpans / 2; ++q) {
          const uint4 four = pieces[4 * h + q];
          g[2 * q] = {as_pair(four.x), as_pair(four.y)};
          g[2 * q + 1] = {as_pair(four.z), as_pair(four.w)};
        }
        convolve(g, x[h], kSpans);
      }
      __syncwarp();
      columns.rows_back(transform, 0, x);
    }
    make_room(group);
    __syncthreads();
    std::uint32_t back[2][4];
    transform.transpose_columns(back);
    // What takes results of columns 2 pair() and the next back.
    const auto from_of = [&](int i) {
      const std::uint32_t of = __shfl_sync(0xffffffffu, both, 8 * pair + 4 * i);
      return Scale::below(of >> 7 & 0xff, 0).from;
    };
    const auto& scales = filter_scales;
    const float by[2] = {from_of(0) * (group == 0 ? scales[0][0] : scales[kGroups - 1][0]),
                         from_of(1) * (group == 0 ? scales[0][1] : scales[kGroups - 1][1])};
    if (group == 0 && sequences > 0) ptx::mbarrier_wait(room_here, sequences & 1 ^ 1);
    if (lane == 0) ptx::mbarrier_arrive_expect(outputs_came, 4 * 256);
    NarrowTransform::columns_back<kSpans>(back, transform.points(0), [&](int s, const float(&values)[4][4]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float* two = values[i / 2] + i % 2 * 2;
        outputs[s + i / 2][i % 2] = ptx::pack_bf16(two[0] * by[0], two[1] * by[1]);
      }
      if (columns.outputs_away()) {
#pragma unroll
        for (int i = s; i < s + 4; i += 2) {
          send_4((out_there ^ group * 16) + 8 * i * kRowBytes, outputs[i][0], outputs[i][1], outputs[i + 1][0],
                 outputs[i + 1][1], outputs_came_there);
        }
      }
      if (s == 0 && more) give(sequences + (group + 1) / kGroups, (group + 1) % kGroups);
    });
  };
  if (first < last) give(0, 0);
  for (int n = first; n < last; n += chunks) {
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      take(n, group);
      ++takes;
    }
    ++sequences;
  }
  if (takes > 0) put_outputs(kGroups - 1);
  ptx::fence_async_proxy();
  __syncthreads();
  if (sequences > 0) store(first + (static_cast<int>(sequences) - 1) * chunks);
  if (leads) ptx::store_bulk_wait_read();
  // The other block's last words have come, and so have its threads.
  ptx::cluster_arrive();
  ptx::cluster_wait();
#endif
}

}  // namespace flashgla::ops::long_convolution::cuda

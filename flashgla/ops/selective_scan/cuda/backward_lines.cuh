// What the backward has of a chunk in memory: its tensors, the block's room in shared memory, and what each lane copies
// there and writes back.
#pragma once

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/selective_scan/cuda/scan.cuh"

namespace flashgla::ops::selective_scan::cuda {

template <class T>
struct Gradients {
  Lines<T> dy, dx, draw, dz;
  float* partial;  // [tiles,rows,2 kStates]: db and dc of a block's channels
  float* da_log;   // [N,segments,E,K]
  float* dskip;    // [N,segments,E]
  std::int64_t rows;
};

constexpr int kGroup = kChunk / 2;  // tokens whose states and decays a lane has in registers
constexpr int kQuad = 4;            // channels of a lane in the scan, and states
constexpr int kParts = 4;           // of a warp, whose sums over channels meet in shared memory: lane / 4 % 4

// Of a token, sums over eight states of a lane's channels: even lanes have those of dh b, odd ones those of the rates'
// part of d(dt).
struct LaneSums {
  float4 of_lane[kWarp];  // lane l's at own_place(l)
  float4 apart;           // tokens begin in other banks than their neighbours

  // Sums of one kind that are read together lie in different banks.
  static __device__ __forceinline__ unsigned own_place(unsigned lane) { return lane ^ lane / 8 % 2 * 2; }
};

// Of a token, db or dc of a warp's parts: [state / 4 % 2][part][state / 8].
struct KeySums {
  float4 of_part[2][kParts][2];

  // Bytes to a lane's: of two lanes with the same states one has db, the other one dc.
  static __device__ __forceinline__ unsigned own_place(unsigned lane) {
    return ((lane / 16 * kParts + lane / 4 % kParts) * 2 + lane % 2) * sizeof(float4);
  }
};
constexpr unsigned kPartBytes = sizeof(KeySums) / (2 * kParts);

// What a lane reads of a chunk, of each of these tensors.
enum Input { kX, kRaw, kZ, kDy, kOutput, kKeys, kInputs };
// What it writes.
enum Output { kDx, kDraw, kDz, kOutputs };

// Room for what is asked for ahead, for each lane. kBuffers: of BackwardShared.
template <class T, int kBuffers>
struct AheadRoom {
  static constexpr int kAgain = kInputs;  // x of the chunk behind, once more
  uint4 ahead[kBuffers == 2 ? kInputs + 1 : kInputs][Vector<T, kWide>::kBytes / 16][kWarp];
  float4 states[kQuad][kWarp];  // before the chunk
};
template <class T>
struct AheadRoom<T, 0> {};

// Room for dskip's sums of each lane's channels: registers are short. With one buffer (f32) there is none left.
template <int kBuffers>
struct SkipRoom {
  float4 dskip[2][kWarp];

  __device__ __forceinline__ void load(int lane, float (&sums)[kWide]) const {
#pragma unroll
    for (int i = 0; i < kWide; i += 4) {
      const float4 four = dskip[i / 4][lane];
      sums[i] = four.x;
      sums[i + 1] = four.y;
      sums[i + 2] = four.z;
      sums[i + 3] = four.w;
    }
  }
  __device__ __forceinline__ void store(int lane, const float (&sums)[kWide]) {
#pragma unroll
    for (int i = 0; i < kWide; i += 4) {
      dskip[i / 4][lane] = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    }
  }
};
template <>
struct SkipRoom<1> {
  __device__ __forceinline__ void load(int, float (&)[kWide]) const {}
  __device__ __forceinline__ void store(int, const float (&)[kWide]) {}
};

// An mbarrier in shared memory, with what capability 8.0 has of it: arriving and waiting are two things, so that warps
// may be apart.
class Turns {
 public:
  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(ptx::shared_address(&word_)), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(ptx::shared_address(&word_))
                 : "memory");
  }
  // For the end of a turn of this parity.
  __device__ __forceinline__ void wait(int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@done bra finished;\nbra again;\nfinished:\n}" ::"r"(
            ptx::shared_address(&word_)),
        "r"(parity)
        : "memory");
  }

 private:
  std::uint64_t word_;
};

// kBuffers: chunks that there is room for of what a walk needs. Two: the next chunk's is made beside the first walk of
// this one. One: each before its own. None: nor for inputs, which are read when they are needed. With buffers, rows are
// read and written 16 bytes at a time and have 16 states: whatever else there is takes none.
template <class T, int kBuffers>
struct BackwardShared {
  static constexpr int kRooms = kBuffers == 2 ? 2 : 1;
  struct OfWarp : AheadRoom<T, kBuffers> {
    static constexpr bool kExact = sizeof(T) == 4;  // of sums over lanes
    LaneSums sums[kChunk];
    float keys[kRooms][kChunk][2][kStates];
    float driven[kRooms][kChunk][kRow];                 // dt x
    float dt[2][kChunk][kRow];                          // in units of ln 2; also of the chunk behind
    float dsum[2][kChunk][kRow];                        // dy silu(z), likewise
    float bias[kWarp], none[kWarp], skip[kWarp];        // none: instead of the bias where there is no token
    const char* rows[int{kInputs} + int{kOutputs}][4];  // where the sequence's first token is, for lanes by l % 4
    const float4* kept;                                 // where the states before its first chunk are
    SkipRoom<kBuffers> skips;

    static __device__ __forceinline__ int room_of(int chunk) { return chunk & (kRooms - 1); }
  } warps[kWarps];
  KeySums keys[2][kWarps][kChunk][2];  // db and dc of this chunk and the one behind
  Turns written;                       // the warps have written theirs of a chunk
};

// The least that a block may use, of capabilities 8.6, 8.9 and 12.0; and half of a multiprocessor's 228 KiB of
// capability 9.0, of which each block takes one more.
static_assert(sizeof(BackwardShared<float, 0>) <= 99 * 1024);
static_assert(sizeof(BackwardShared<float, 1>) <= 113 * 1024 && sizeof(BackwardShared<__nv_bfloat16, 2>) <= 113 * 1024);

// What a lane reads and writes of chunks: eight channels of its token and its part of b and c.
template <class T, int kBuffers>
class BackwardLines {
 public:
  using OfWarp = typename BackwardShared<T, kBuffers>::OfWarp;
  using Wide = Vector<T, kWide>;

  __device__ __forceinline__ BackwardLines(const Call<T>& call, const Gradients<T>& gradients, const Where& where,
                                           const Place& place, OfWarp& shared)
      : call_(call),
        gradients_(gradients),
        shared_(shared),
        lane_(where.lane),
        count_(call.channels - where.first - where.wide),
        states_(call.states - where.lane % 2 * kHalf),
        tokens_(place.length - where.token),
        length_(count_ > 0 ? tokens_ : 0) {
    vectors_ = call.vectors && count_ >= kWide && call.key_vectors && states_ >= kHalf;
    keys_bytes_ = bytes((where.lane / 2 % 2 == 0 ? call.b : call.c).token_stride);
    if (where.lane >= 4) return;
    shared.kept = kept_at(call, where, place, 0);
    const int channel = where.first + where.wide;
    const auto keep = [&](int which, const Lines<T>& lines, int at) {
      shared.rows[which][where.lane] = reinterpret_cast<const char*>(lines.at(place.line, place.begin, at));
    };
    keep(kX, call.x, channel);
    keep(kRaw, call.raw, channel);
    keep(kZ, call.z, channel);
    keep(kDy, gradients.dy, channel);
    keep(kKeys, where.lane / 2 == 0 ? call.b : call.c, where.lane % 2 * kHalf);
    keep(kInputs + kDx, gradients.dx, channel);
    keep(kInputs + kDraw, gradients.draw, channel);
    keep(kInputs + kDz, gradients.dz, channel);
    shared.rows[kOutput][where.lane] = reinterpret_cast<const char*>(outputs_at(call, where, place, 0));
  }

  // Whether a chunk has the lane's token, and a block its channels.
  __device__ __forceinline__ bool there(int chunk) const { return chunk * kChunk < length_; }

  // Asks for a chunk's where it is `wanted` (zeros where not), and with two buffers for x of the one that `again` says.
  __device__ __forceinline__ void ask(int chunk, bool wanted, int again) {
    if constexpr (kBuffers > 0) {
      // All addresses first: a copy behind a load of shared memory waits for it, and takes three instructions more.
      const T* rows[kInputs + 1];
#pragma unroll
      for (int which = 0; which < kInputs; ++which) rows[which] = from(which, chunk);
      if constexpr (kBuffers == 2) rows[kInputs] = from(kX, again);
#pragma unroll
      for (int which = 0; which < kInputs; ++which) {
        copy(rows[which], which, wanted && chunk * kChunk < (which == kKeys ? tokens_ : length_));
      }
      if constexpr (kBuffers == 2) copy(rows[kInputs], OfWarp::kAgain, there(again));
      ptx::copy_async_commit();
    }
  }

  // Brings the warp's states before a chunk near, 64 bytes a lane.
  __device__ __forceinline__ void bring_states(int chunk) const { ptx::prefetch_l2(kept(chunk) + 4 * lane_); }

  // Asks for the lane's states before a chunk, where they are `wanted`.
  __device__ __forceinline__ void ask_states(int chunk, bool wanted) {
    if constexpr (kBuffers > 0) {
      const float4* const own = kept(chunk) + lane_;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        // Without a branch, which would cut the piece of code around it in two.
        asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(
                         ptx::shared_address(&shared_.states[i][lane_])),
                     "l"(own + i * kWarp), "r"(static_cast<int>(wanted))
                     : "memory");  // place_of_piece
      }
      ptx::copy_async_commit();
    }
  }
  // What has been asked for.
  __device__ __forceinline__ void states(int chunk, float (&h)[kQuad][kQuad]) const {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      float4 four;
      if constexpr (kBuffers == 0) {
        four = kept(chunk)[lane_ + i * kWarp];  // place_of_piece
      } else {
        four = shared_.states[i][lane_];
      }
      const int channel = i / 2 * 2, state = i % 2 * 2;
      h[channel][state] = four.x;
      h[channel][state + 1] = four.y;
      h[channel + 1][state] = four.z;
      h[channel + 1][state + 1] = four.w;
    }
  }

  // What has been asked for; kAgain: once more, when the next chunk's has taken its place.
  template <bool kAgain = false>
  __device__ __forceinline__ Wide get(int which, int chunk) const {
    if constexpr (kBuffers == 0) {
      if (chunk * kChunk >= tokens_) return Wide::zero();
      return vectors_ ? Wide::load(from(which, chunk)) : load_eight<T>(from(which, chunk), count_of(which), false);
    } else if constexpr (kAgain && kBuffers == 1) {
      return there(chunk) ? Wide::load(from(which, chunk)) : Wide::zero();
    } else {
      if constexpr (kAgain) which = OfWarp::kAgain;
      Wide result;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint4 four = shared_.ahead[which][i][lane_];
        result.words[4 * i] = four.x;
        result.words[4 * i + 1] = four.y;
        result.words[4 * i + 2] = four.z;
        result.words[4 * i + 3] = four.w;
      }
      return result;
    }
  }

  // Of a chunk, where it is `wanted` and has the lane's token. room: floats that this lane alone may use.
  __device__ __forceinline__ void store(int which, const float (&values)[kWide], int chunk, bool wanted,
                                        float* room) const {
    wanted = wanted && there(chunk);
    if constexpr (kBuffers > 0) {
      const Wide wide = Wide::of(values);
      const std::size_t at = __cvta_generic_to_global(to(which, chunk));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        // Without a branch, as above.
        asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(
                         at + 16 * i),
                     "r"(wide.words[4 * i]), "r"(wide.words[4 * i + 1]), "r"(wide.words[4 * i + 2]),
                     "r"(wide.words[4 * i + 3]), "r"(static_cast<int>(wanted))
                     : "memory");
      }
    } else if (wanted && vectors_) {
      Wide::of(values).store(to(which, chunk));
    } else if (wanted) {
      store_floats(values, room);
#pragma unroll 1
      for (int i = 0; i < count_ && i < kWide; ++i) to(which, chunk)[i] = flashgla::cuda::from_float<T>(room[i]);
    }
  }

 private:
  static constexpr int kVectors = Wide::kBytes / 16;

  // 16 bytes a vector into the lane's room; zeros where they are not `wanted`.
  __device__ __forceinline__ void copy(const T* row, int room, bool wanted) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      ptx::copy_async_16(ptx::shared_address(&shared_.ahead[room][i][lane_]), row + i * (kWide / kVectors),
                         wanted ? 16 : 0);
    }
  }
  static __device__ __forceinline__ int bytes(std::int64_t stride) { return static_cast<int>(stride * sizeof(T)); }
  // One instruction, which the compiler does not take apart to carry parts of it along.
  template <class P>
  static __device__ __forceinline__ const P* forward_by(const P* from, int steps, int bytes) {
    std::int64_t offset;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(offset) : "r"(steps), "r"(bytes));
    return reinterpret_cast<const P*>(reinterpret_cast<const char*>(from) + offset);
  }
  __device__ __forceinline__ const float4* kept(int chunk) const {
    return forward_by(shared_.kept, chunk, static_cast<int>(call_.tiles * (kWarps * kSquare * sizeof(float4))));
  }
  __device__ __forceinline__ int count_of(int which) const {
    return which == kKeys ? states_ : which == kOutput ? kWide : count_;
  }
  __device__ __forceinline__ const char* row(int which, int chunk, int stride) const {
    return forward_by(shared_.rows[which][lane_ % 4], chunk * kChunk + lane_ / 4, stride);
  }
  __device__ __forceinline__ const T* from(int which, int chunk) const {
    const int stride = which == kX      ? bytes(call_.x.token_stride)
                       : which == kRaw  ? bytes(call_.raw.token_stride)
                       : which == kZ    ? bytes(call_.z.token_stride)
                       : which == kDy   ? bytes(gradients_.dy.token_stride)
                       : which == kKeys ? keys_bytes_
                                        : bytes(call_.tiles * kBlockChannels);
    return reinterpret_cast<const T*>(row(which, chunk, stride));
  }
  __device__ __forceinline__ T* to(int which, int chunk) const {
    const Lines<T>& lines = which == kDx ? gradients_.dx : which == kDraw ? gradients_.draw : gradients_.dz;
    return const_cast<T*>(reinterpret_cast<const T*>(row(kInputs + which, chunk, bytes(lines.token_stride))));
  }

  const Call<T>& call_;
  const Gradients<T>& gradients_;
  OfWarp& shared_;
  int lane_, count_, states_;  // channels and states from the lane's first on
  int tokens_, length_;        // from the lane's first on; the same, 0 where it has no channels
  bool vectors_;               // all are read and written 16 bytes at a time
  int keys_bytes_;
};

}  // namespace flashgla::ops::selective_scan::cuda

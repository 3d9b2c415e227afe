// What the backward has of a chunk in memory: its tensors, the block's room in shared memory, and what each lane copies
// there and writes back.
#pragma once

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/selective_scan/cuda/scan.cuh"

namespace flashgla::ops::selective_scan::cuda {

template <class T>
struct Gradients {
  Lines<T> dy, dx, draw, dz;
  float* partial;  // [tiles,rows,2 kStates]: db and dc of a block's channels, states as state_at() has them
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

// Of a token, db or dc of a warp's parts: [state / 4 % 2][part][state / 8], or (not exact) [state / 4 % 2][part]
// [state / 2 % 2] of states (0, 8, 1, 9).
struct KeySums {
  float4 of_part[2][kParts][2];
};
constexpr unsigned kPartBytes = sizeof(KeySums) / (2 * kParts);

// Whether sums over channels are exact, or matrix products of states, whose low bits are not looked at.
template <class T>
__host__ __device__ constexpr bool is_exact() {
  return sizeof(T) == 4;
}
// The state whose db and dc a block's sums have at this place of a token's sixteen.
template <class T>
__device__ __forceinline__ int state_at(int place) {
  return is_exact<T>() ? place : place % 2 * 8 + place / 4 % 2 * 4 + place / 8 * 2 + place / 2 % 2;
}

// What a lane reads of a chunk, of each of these tensors.
enum Input { kX, kRaw, kZ, kDy, kOutput, kKeys, kInputs };
// What it writes.
enum Output { kDx, kDraw, kDz, kOutputs };

// Room for what is asked for a chunk ahead, for each lane.
template <class T, int kBuffers>
struct AheadRoom {
  uint4 ahead[kBuffers][kInputs][Vector<T, kWide>::kBytes / 16][kWarp];
  float4 states[kQuad][kWarp];  // before the chunk
};
// In the form without it, dskip's sums of each lane lie here: registers are short.
template <class T>
struct AheadRoom<T, 0> {
  float dskip[kWide][kWarp];
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

// kBuffers: chunks that inputs in shared memory are of. Two: a chunk's wait there for its last part. One: that part
// reads them again. None: they are read when they are needed. With buffers, rows are read and written 16 bytes at a
// time and have 16 states: whatever else there is takes none.
template <class T, int kBuffers>
struct BackwardShared {
  struct OfWarp : AheadRoom<T, kBuffers> {
    static constexpr bool kExact = is_exact<T>();
    LaneSums sums[kChunk];
    float keys[kChunk][2][kStates];
    float dt[2][kChunk][kRow];   // of this chunk and the one behind
    float4 open[2][2][kWarp];    // sigmoid(z), of each lane's channels outside the scan
    float driven[kChunk][kRow];  // dt x
    float dsum[kChunk][kRow];    // dy silu(z)
    float bias[kWarp], skip[kWarp];
    const char* rows[kInputs + kOutputs][4];  // where the sequence's first token is, for lanes by l % 4
    const float4* kept;                       // where the states before its first chunk are
  } warps[kWarps];
  KeySums keys[2][kWarps][kChunk][2];  // db and dc of this chunk and the one behind
  Turns written;                       // the warps have written theirs of a chunk
};

// The least that a block may use, of capabilities 8.6, 8.9 and 12.0.
static_assert(sizeof(BackwardShared<float, 0>) <= 99 * 1024);

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

  // Asks for a chunk's.
  __device__ __forceinline__ void ask(int chunk) {
    if constexpr (kBuffers > 0) {
      auto& to = shared_.ahead[chunk & (kBuffers - 1)];
      // All addresses first: a copy behind a load of shared memory waits for it, and takes three instructions more.
      const T* rows[kInputs];
#pragma unroll
      for (int which = 0; which < kInputs; ++which) rows[which] = from(which, chunk);
#pragma unroll
      for (int which = 0; which < kInputs; ++which) {
        const int bytes = chunk * kChunk < (which == kKeys ? tokens_ : length_) ? 16 : 0;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          ptx::copy_async_16(ptx::shared_address(&to[which][i][lane_]), rows[which] + i * (kWide / kVectors), bytes);
        }
      }
      ptx::copy_async_commit();
    }
  }

  // Brings the warp's states before a chunk near, 64 bytes a lane.
  __device__ __forceinline__ void bring_states(int chunk) const { ptx::prefetch_l2(kept(chunk) + 4 * lane_); }

  // Asks for the lane's states before a chunk.
  __device__ __forceinline__ void ask_states(int chunk) {
    if constexpr (kBuffers > 0) {
      const float4* const own = kept(chunk) + lane_;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        ptx::copy_async_16(ptx::shared_address(&shared_.states[i][lane_]), own + i * kWarp);  // place_of_piece
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

  // What has been asked for; kAgain: while the next chunk's is there, too.
  template <bool kAgain = false>
  __device__ __forceinline__ Wide get(int which, int chunk) const {
    if constexpr (kBuffers == 0) {
      if (chunk * kChunk >= tokens_) return Wide::zero();
      return vectors_ ? Wide::load(from(which, chunk)) : load_eight<T>(from(which, chunk), count_of(which), false);
    } else if constexpr (kAgain && kBuffers == 1) {
      return there(chunk) ? Wide::load(from(which, chunk)) : Wide::zero();
    } else {
      Wide result;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint4 four = shared_.ahead[chunk & (kBuffers - 1)][which][i][lane_];
        result.words[4 * i] = four.x;
        result.words[4 * i + 1] = four.y;
        result.words[4 * i + 2] = four.z;
        result.words[4 * i + 3] = four.w;
      }
      return result;
    }
  }

  // room: floats that this lane alone may use.
  __device__ __forceinline__ void store(const float (&values)[kOutputs][kWide], int chunk, float* room) const {
    if (kBuffers > 0 || vectors_) {
#pragma unroll
      for (int which = 0; which < kOutputs; ++which) Wide::of(values[which]).store(to(which, chunk));
      return;
    }
#pragma unroll
    for (int which = 0; which < kOutputs; ++which) {
      store_floats(values[which], room);
#pragma unroll 1
      for (int i = 0; i < count_ && i < kWide; ++i) to(which, chunk)[i] = flashgla::cuda::from_float<T>(room[i]);
    }
  }

 private:
  static constexpr int kVectors = Wide::kBytes / 16;

  static __device__ __forceinline__ int bytes(std::int64_t stride) { return static_cast<int>(stride * sizeof(T)); }
  __device__ __forceinline__ const float4* kept(int chunk) const {
    // One instruction, which the compiler does not take apart to carry parts of it along.
    const float4* at;
    asm("mad.wide.s32 %0, %1, %2, %3;"
        : "=l"(at)
        : "r"(chunk), "r"(static_cast<int>(call_.tiles * (kWarps * kSquare * sizeof(float4)))), "l"(shared_.kept));
    return at;
  }
  __device__ __forceinline__ int count_of(int which) const {
    return which == kKeys ? states_ : which == kOutput ? kWide : count_;
  }
  // 32 bits times 32: one instruction.
  __device__ __forceinline__ const char* row(int which, int chunk, int stride) const {
    return shared_.rows[which][lane_ % 4] + std::int64_t{chunk * kChunk + lane_ / 4} * stride;
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

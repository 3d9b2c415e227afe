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

constexpr int kInShared = kChunk / 2;  // of a chunk's states: the first wait in shared memory, the others in registers
constexpr int kQuad = 4;               // channels of a lane in the scan, and states
constexpr int kHalves = 2;             // of a warp, each with channels of its own

// Of a token, what lanes add up over their states: [half][lane / 4 % 4][channel of the half].
struct LaneSums {
  float to_driven[kQuad * kWarp];  // dh b
  float to_dt[kQuad * kWarp];      // the rates' part of d(dt)
};

// What a lane reads of a chunk, of each of these tensors.
enum Input { kX, kRaw, kZ, kDy, kOutput, kKeys, kInputs };
// What it writes.
enum Output { kDx, kDraw, kDz, kOutputs };

// Room for what is asked for a chunk ahead, for each lane.
template <class T, int kBuffers>
struct AheadRoom {
  uint4 ahead[kBuffers][kInputs][Vector<T, kWide>::kBytes / 16][kWarp];
};
template <class T>
struct AheadRoom<T, 0> {};

// kBuffers: chunks that inputs in shared memory are of. Two: the next ones are asked for before the walk. One: after
// what comes last of a chunk. None: they are read when they are needed.
template <class T, int kBuffers>
struct BackwardShared {
  // Tokens begin in other banks than their neighbours.
  union Early {
    float4 states[kQuad][kWarp];  // of each lane, before the token
    LaneSums sums;                // once they have been read
    float4 apart[kQuad * kWarp + 1];
  };
  union Late {
    LaneSums sums;
    float4 apart[sizeof(LaneSums) / sizeof(float4) + 1];
  };
  struct OfWarp : AheadRoom<T, kBuffers> {
    Early early[kInShared];
    Late late[kChunk - kInShared];
    float keys[kChunk][2][kStates];
    float dt[kChunk][kRow];
    float driven[kChunk][kRow];  // dt x
    float open[kChunk][kRow];    // sigmoid(z)
    float dsum[kChunk][kRow];    // dy silu(z)
    float bias[kWarp], skip[kWarp];

    __device__ __forceinline__ LaneSums& sums(int t) {
      return t < kInShared ? early[t].sums : late[t - kInShared].sums;
    }
  } warps[kWarps];
  float keys[2][kWarps][kChunk][kHalves][2][kStates];  // db and dc of this chunk and the one before
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
        length_(place.length - where.token),
        count_(call.channels - where.first - where.wide),
        states_(call.states - where.lane % 2 * kHalf) {
    const std::int64_t t = place.begin + where.token;
    const int channel = where.first + where.wide;
    const Lines<T>& keys = where.lane / 2 % 2 == 0 ? call.b : call.c;
    const auto base = [](const T* of) { return reinterpret_cast<const char*>(of); };
    vectors_ = call.vectors && count_ >= kWide && call.key_vectors && states_ >= kHalf;
    from_[kX] = base(call.x.at(place.line, t, channel));
    from_[kRaw] = base(call.raw.at(place.line, t, channel));
    from_[kZ] = base(call.z.at(place.line, t, channel));
    from_[kDy] = base(gradients.dy.at(place.line, t, channel));
    from_[kOutput] = base(outputs_at(call, where, place, 0));
    from_[kKeys] = base(keys.at(place.line, t, where.lane % 2 * kHalf));
    to_[kDx] = base(gradients.dx.at(place.line, t, channel));
    to_[kDraw] = base(gradients.draw.at(place.line, t, channel));
    to_[kDz] = base(gradients.dz.at(place.line, t, channel));
    keys_bytes_ = bytes(keys.token_stride);
  }

  __device__ __forceinline__ bool there(int chunk) const { return chunk * kChunk < length_; }

  // Asks for a chunk's.
  __device__ __forceinline__ void ask(int chunk) {
    if constexpr (kBuffers > 0) {
      auto& to = shared_.ahead[chunk % kBuffers];
      if (vectors_) {
#pragma unroll
        for (int which = 0; which < kInputs; ++which) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            ptx::copy_async_16(ptx::shared_address(&to[which][i][lane_]), from(which, chunk) + i * (kWide / kVectors),
                               there(chunk) ? 16 : 0);
          }
        }
      } else {
#pragma unroll
        for (int which = 0; which < kInputs; ++which) {
          const int count = there(chunk) ? count_of(which) : 0;
#pragma unroll 1
          for (int i = 0; i < kWide; ++i) {
            reinterpret_cast<T*>(&to[which][i / (kWide / kVectors)][lane_])[i % (kWide / kVectors)] =
                i < count ? from(which, chunk)[i] : flashgla::cuda::from_float<T>(0.0f);
          }
        }
      }
      ptx::copy_async_commit();
    }
  }

  // What has been asked for.
  __device__ __forceinline__ Wide get(int which, int chunk) const {
    if constexpr (kBuffers == 0) {
      if (!there(chunk)) return Wide::zero();
      return vectors_ ? Wide::load(from(which, chunk)) : load_eight<T>(from(which, chunk), count_of(which), false);
    } else {
      Wide result;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint4 four = shared_.ahead[chunk % kBuffers][which][i][lane_];
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
    if (vectors_) {
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
  __device__ __forceinline__ int count_of(int which) const {
    return which == kKeys ? states_ : which == kOutput ? kWide : count_;
  }
  // 32 bits times 32: one instruction.
  __device__ __forceinline__ const T* from(int which, int chunk) const {
    const int stride = which == kX      ? bytes(call_.x.token_stride)
                       : which == kRaw  ? bytes(call_.raw.token_stride)
                       : which == kZ    ? bytes(call_.z.token_stride)
                       : which == kDy   ? bytes(gradients_.dy.token_stride)
                       : which == kKeys ? keys_bytes_
                                        : bytes(call_.tiles * kBlockChannels);
    return reinterpret_cast<const T*>(from_[which] + std::int64_t{chunk * kChunk} * stride);
  }
  __device__ __forceinline__ T* to(int which, int chunk) const {
    const Lines<T>& lines = which == kDx ? gradients_.dx : which == kDraw ? gradients_.draw : gradients_.dz;
    const char* const at = to_[which] + std::int64_t{chunk * kChunk} * bytes(lines.token_stride);
    return const_cast<T*>(reinterpret_cast<const T*>(at));
  }

  const Call<T>& call_;
  const Gradients<T>& gradients_;
  OfWarp& shared_;
  int lane_, length_, count_, states_;  // tokens from the lane's first on; channels and states from its first
  bool vectors_;                        // all are read and written 16 bytes at a time
  const char *from_[kInputs], *to_[kOutputs];
  int keys_bytes_;
};

}  // namespace flashgla::ops::selective_scan::cuda

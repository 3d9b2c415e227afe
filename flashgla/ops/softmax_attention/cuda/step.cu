// Decoding one token of each sequence against its cache.

#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/softmax_attention/cuda/call.cuh"

namespace flashgla::ops::softmax_attention::cuda {

namespace {

using flashgla::cuda::Vector;
namespace house = flashgla::ops::cuda;

// The token's own keys or values, of q's type, which the step puts into the cache; null: it has them.
struct Own {
  const void* data = nullptr;
  std::int64_t row = 0, head = 0;  // strides

  explicit Own(const TensorView& view) {
    if (!view) return;
    data = view.data;
    row = view.stride[0];
    head = view.stride[1];
  }
};

constexpr int kStepThreads = 128;
constexpr int ring_bytes(int heads) { return (heads == 1 ? 48 : 32) * 1024; }  // of rows under way
constexpr int step_blocks(int heads) { return heads == 1 ? 4 : 3; }            // that a multiprocessor has at once
constexpr int kFew = 16, kMany = 2048;  // tokens of a part: a multiple of kFew, and, apart from others, at most kMany
constexpr int kMostTogether = 8;        // blocks of a cluster

struct StepCall {
  const void* q;
  void* o;
  std::int64_t q_row, q_head, o_row, o_head;  // strides
  void* k;                                    // the caches
  void* v;
  Own own_k, own_v;
  const std::int32_t* positions;
  float* partial;  // [N,H,parts,V + 2]: o, then the largest score and the sum; null: parts are merged together
  int sequences, heads, groups, key_dim, value_dim, rows, window;
  int share;  // parts that a sequence's tokens are divided into, where those are not more than `most` each
  int parts;  // the most there can be
  int most;
  bool settled;  // what the caches hold and positions
  float scale;

  __device__ __forceinline__ int first_key(int i) const {
    const int kept = i + 1 > rows ? i + 1 - rows : 0;
    return window > 0 && i - window + 1 > kept ? i - window + 1 : kept;
  }
  // Tokens of each part but the last, where so many are seen.
  __device__ __forceinline__ int part_of(int tokens) const {
    const int each = (tokens + share - 1) / share;
    return min((each + kFew - 1) / kFew * kFew, most);
  }
};

// Sums over the kTeam neighbouring lanes.
template <int kTeam>
__device__ __forceinline__ float team_sum(float x) {
#pragma unroll
  for (int distance = kTeam / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// ---- a cluster's blocks, which have the parts of a head; of one block where there are no clusters ----

__device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_arrive_relaxed();
#endif
}
__device__ __forceinline__ void arrive_with_writes() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_arrive();
#else
  __syncthreads();
#endif
}
__device__ __forceinline__ void wait_for_all() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_wait();
#endif
}
// What lies there in the cluster's first block.
__device__ __forceinline__ float* in_first_block(float* shared) {
#if __CUDA_ARCH__ >= 900
  return static_cast<float*>(__cluster_map_shared_rank(shared, 0));
#else
  return shared;
#endif
}

// Part of the answer to kHeads query heads of a group: kTeam lanes a key, each team with a softmax of its own over the
// tokens that it meets. kHeld: a lane has one vector of N channels of a row and copies its own of kTurns rows at once
// to shared memory, kStages turns ahead, and sums stay in registers; else N is 1, rows are read as they are used and
// sums lie in shared memory.
template <int N, int kTeam, bool kHeld, int kHeads, class T, class C>
__global__ void __launch_bounds__(kStepThreads, step_blocks(kHeads))
    step_kernel(const __grid_constant__ StepCall call) {
  constexpr int kTeams = kStepThreads / kTeam, kTurns = kHeld ? (kHeads == 1 ? 4 : 2) : 1, kKept = kHeld ? N : 1;
  constexpr int kTokens = kTeams * kTurns;  // that a block takes at once
  constexpr int kStages = ring_bytes(kHeads) / (2 * kTurns * kStepThreads * 16);
  extern __shared__ uint4 ring[];  // kHeld: [stage, keys and values of a turn, thread]
  // [kTeams, kHeads, V + 2]: weighted values, then the largest score and the sum; behind them the parts', of a cluster.
  auto* const team_sums = reinterpret_cast<float*>(ring + (kHeld ? ring_bytes(kHeads) / 16 : 0));
  const bool together = call.partial == nullptr;
  if (together) arrive();
  if (!call.settled) flashgla::cuda::wait_for_previous();
  const int group = call.heads / call.groups, passes = (group + kHeads - 1) / kHeads;
  const int cells = call.sequences * call.groups * passes;
  // Apart, parts go outside: those that hold tokens come first.
  const int part = together ? blockIdx.x % call.share : blockIdx.x / cells;
  const int cell = together ? blockIdx.x / call.share : blockIdx.x % cells;
  const int n = cell / (call.groups * passes), g = cell / passes % call.groups, first_head = cell % passes * kHeads;
  const int i = call.positions[n], lowest = call.first_key(i), each = call.part_of(i + 1 - lowest);
  const int begin = lowest + part * each, end = min(begin + each, i + 1);
  const int team = threadIdx.x / kTeam, lane = threadIdx.x % kTeam, stride = call.value_dim + 2;
  const int heads = min(kHeads, group - first_head);
  const bool wraps = i >= call.rows;
  const auto query = [&](int h, int c) {
    const T* row = static_cast<const T*>(call.q) + n * call.q_row + (g * group + first_head + h) * call.q_head;
    return to_float(row[c]) * call.scale * kLog2E;
  };
  const auto row_of = [&](void* cache, int channels, int j) {
    const std::int64_t row = (static_cast<std::int64_t>(n) * call.rows + (wraps ? j % call.rows : j)) * call.groups + g;
    return static_cast<C*>(cache) + row * channels;
  };
  // N channels of the token's own row, rounded to the cache's type, which it gets: by every block that reads it.
  const auto put = [&](void* cache, const Own& own, int channels, int c) {
    const auto from = Vector<T, N>::load(static_cast<const T*>(own.data) + n * own.row + g * own.head + c);
    float values[N];
#pragma unroll
    for (int e = 0; e < N; ++e) values[e] = from[e];
    const auto rounded = Vector<C, N>::of(values);
    rounded.store(row_of(cache, channels, i) + c);
    return rounded;
  };
  const auto is_own = [&](int j) { return j == i && call.own_k.data != nullptr; };
  uint4* const own_ring = ring + threadIdx.x;
  // This lane's vectors of the team's next tokens, from `first` on; zeros where there is none.
  const auto copy_rows = [&](int first, int stage) {
    if (first < end) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int j = first + turn * kTeams + team, c = lane * N;
        if (is_own(j)) continue;
        const auto copy = [&](void* cache, int channels, int at) {
          const bool inside = j < end && c < channels;
          ptx::copy_async_16(ptx::shared_address(own_ring + (stage * 2 * kTurns + at) * kStepThreads),
                             inside ? row_of(cache, channels, j) + c : static_cast<C*>(cache), inside ? 16 : 0);
        };
        copy(call.k, call.key_dim, turn);
        copy(call.v, call.value_dim, kTurns + turn);
      }
    }
    ptx::copy_async_commit();
  };
  if constexpr (kHeld) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) copy_rows(begin + stage * kTokens, stage);
  }
  if (call.settled) flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next();  // earlier, the next kernel's weights would come in the way of these rows
  if (!together && begin >= end) return;

  float most[kHeads], sum[kHeads], total[kHeads][kKept], q[kHeads][kKept];
  const auto sums_of = [&](int whose, int h) { return team_sums + (whose * kHeads + h) * stride; };
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    most[h] = -INFINITY;
    sum[h] = 0.0f;
#pragma unroll
    for (int e = 0; e < kKept; ++e) {
      const int c = lane * N + e;
      q[h][e] = kHeld && h < heads && c < call.key_dim ? query(h, c) : 0.0f;
      total[h][e] = 0.0f;
    }
    if (!kHeld) {
      for (int c = lane; c < call.value_dim; c += kTeam) sums_of(team, h)[c] = 0.0f;
    }
  }
  if (!kHeld && end == i + 1 && call.own_k.data != nullptr) {
    for (int c = threadIdx.x * N; c < call.key_dim; c += kStepThreads * N) put(call.k, call.own_k, call.key_dim, c);
    for (int c = threadIdx.x * N; c < call.value_dim; c += kStepThreads * N) put(call.v, call.own_v, call.value_dim, c);
    __syncthreads();
  }

  int stage = 0;
  for (int first = begin; first < end; first += kTokens) {
    Vector<C, N> k[kTurns], v[kTurns];
    if constexpr (kHeld) {
      ptx::copy_async_wait<kStages - 1>();
      const auto held = [&](int at) {
        const uint4 raw = own_ring[(stage * 2 * kTurns + at) * kStepThreads];
        Vector<C, N> row;
        row.words[0] = raw.x, row.words[1] = raw.y, row.words[2] = raw.z, row.words[3] = raw.w;
        return row;
      };
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        k[turn] = held(turn);
        v[turn] = held(kTurns + turn);
        if (is_own(first + turn * kTeams + team)) {
          const int c = lane * N;
          k[turn] = c < call.key_dim ? put(call.k, call.own_k, call.key_dim, c) : Vector<C, N>::zero();
          v[turn] = c < call.value_dim ? put(call.v, call.own_v, call.value_dim, c) : Vector<C, N>::zero();
        }
      }
      copy_rows(first + kStages * kTokens, stage);
      if (++stage == kStages) stage = 0;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      float score[kTurns], largest = most[h];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int j = first + turn * kTeams + team;
        float product = 0.0f;
        if constexpr (kHeld) {
#pragma unroll
          for (int e = 0; e < N; ++e) product += q[h][e] * k[turn][e];
        } else if (j < end) {
          const C* const row = row_of(call.k, call.key_dim, j);
          for (int c = lane; c < call.key_dim; c += kTeam) product += query(h, c) * to_float(row[c]);
        }
        product = team_sum<kTeam>(product);
        score[turn] = j < end ? product : -INFINITY;
        largest = fmaxf(largest, score[turn]);
      }
      if (largest == -INFINITY) continue;  // the team has met no token
      const float shrink = exp2f(most[h] - largest);
      most[h] = largest;
      sum[h] *= shrink;
#pragma unroll
      for (int e = 0; e < kKept; ++e) total[h][e] *= shrink;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const float weight = exp2f(score[turn] - largest);
        sum[h] += weight;
        if constexpr (kHeld) {
#pragma unroll
          for (int e = 0; e < N; ++e) total[h][e] += weight * v[turn][e];
        } else if (first + team < end) {
          const C* const row = row_of(call.v, call.value_dim, first + team);
          for (int c = lane; c < call.value_dim; c += kTeam) {
            float& here = sums_of(team, h)[c];
            here = here * shrink + weight * to_float(row[c]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if constexpr (kHeld) {
#pragma unroll
      for (int e = 0; e < N; ++e) {
        if (lane * N + e < call.value_dim) sums_of(team, h)[lane * N + e] = total[h][e];
      }
    }
    if (lane == 0) {
      sums_of(team, h)[call.value_dim] = most[h];
      sums_of(team, h)[call.value_dim + 1] = sum[h];
    }
  }
  __syncthreads();
  float* const parts = team_sums + kTeams * kHeads * stride;  // [share, kHeads, V + 2], of the cluster's first block
  float* const to_parts = together ? in_first_block(parts) + part * kHeads * stride : nullptr;
  if (together) wait_for_all();  // they have begun
  // What the teams have, in their order; the column behind the channels is the sum.
  for (int at = threadIdx.x; at < heads * (call.value_dim + 1); at += kStepThreads) {
    const int h = at / (call.value_dim + 1), column = at % (call.value_dim + 1);
    const int from = column < call.value_dim ? column : call.value_dim + 1;
    float largest = -INFINITY, all = 0.0f;
#pragma unroll
    for (int whose = 0; whose < kTeams; ++whose) largest = fmaxf(largest, sums_of(whose, h)[call.value_dim]);
#pragma unroll
    for (int whose = 0; whose < kTeams; ++whose) {
      const float own = sums_of(whose, h)[call.value_dim];
      if (own != -INFINITY) all += exp2f(own - largest) * sums_of(whose, h)[from];
    }
    const std::int64_t head = static_cast<std::int64_t>(n) * call.heads + g * group + first_head + h;
    float* const partial = together ? to_parts + h * stride : call.partial + (head * call.parts + part) * stride;
    partial[from] = all;
    if (column == 0) partial[call.value_dim] = largest;
  }
  if (!together) return;
  arrive_with_writes();
  wait_for_all();
  if (part != 0) return;
  for (int at = threadIdx.x; at < heads * call.value_dim; at += kStepThreads) {
    const int h = at / call.value_dim, column = at % call.value_dim;
    const auto of = [&](int whose, int c) { return parts[(whose * kHeads + h) * stride + c]; };
    float largest = -INFINITY, all = 0.0f, weights = 0.0f;
    for (int whose = 0; whose < call.share; ++whose) largest = fmaxf(largest, of(whose, call.value_dim));
    for (int whose = 0; whose < call.share; ++whose) {
      const float weight = exp2f(of(whose, call.value_dim) - largest);
      all += weight * of(whose, column);
      weights += weight * of(whose, call.value_dim + 1);
    }
    T* const o = static_cast<T*>(call.o) + n * call.o_row + (g * group + first_head + h) * call.o_head;
    o[column] = flashgla::cuda::from_float<T>(all / weights);
  }
}

constexpr int kMergeThreads = 256;

// A block merges a head's parts: threads take neighbouring channels, groups of them every groups-th part, and what the
// groups have is added in their order.
template <class T>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(StepCall call) {
  flashgla::cuda::wait_for_previous();
  __shared__ float weights[kMergeThreads], totals[kMergeThreads], of_warps[2][32];
  const int n = blockIdx.x / call.heads, head = blockIdx.x % call.heads, thread = threadIdx.x;
  const int i = call.positions[n], tokens = i + 1 - call.first_key(i), each = call.part_of(tokens);
  const int parts = (tokens + each - 1) / each;
  const std::int64_t stride = call.value_dim + 2;
  const float* partial = call.partial + (static_cast<std::int64_t>(n) * call.heads + head) * call.parts * stride;
  float most = -INFINITY;
  for (int part = thread; part < parts; part += kMergeThreads) {
    most = fmaxf(most, partial[part * stride + call.value_dim]);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
  }
  if (thread % 32 == 0) of_warps[0][thread / 32] = most;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kMergeThreads / 32; ++warp) most = fmaxf(most, of_warps[0][warp]);

  int across = 32;
  while (across < kMergeThreads && across < call.value_dim) across *= 2;
  const int groups = kMergeThreads / across, group = thread / across;
  for (int first = 0; first < call.value_dim; first += across) {
    const int c = first + thread % across;
    float total = 0.0f, sum = 0.0f;
    for (int begin = 0; begin < parts; begin += kMergeThreads) {
      const int count = min(kMergeThreads, parts - begin);
      const float* own = partial + begin * stride;
      __syncthreads();
      if (thread < count) {
        weights[thread] = exp2f(own[thread * stride + call.value_dim] - most);
        sum += weights[thread] * own[thread * stride + call.value_dim + 1];
      }
      __syncthreads();
      if (c >= call.value_dim) continue;
#pragma unroll 8
      for (int part = group; part < count; part += groups) total += weights[part] * own[part * stride + c];
    }
    totals[thread] = total;
    sum = flashgla::cuda::block_sum(sum, of_warps[1]);  // its barrier shows the totals too
    if (group == 0 && c < call.value_dim) {
      for (int other = 1; other < groups; ++other) total += totals[other * across + thread];
      (static_cast<T*>(call.o) + n * call.o_row + head * call.o_head)[c] = flashgla::cuda::from_float<T>(total / sum);
    }
  }
}

// Calls run(vector, team, held) for heads of so many channels in caches of C: 16 bytes a lane, or one element.
template <class C, class Run>
void with_lanes(int channels, bool aligned, const Run& run) {
  constexpr int N = flashgla::cuda::kVectorOf<C>;
  using std::integral_constant;
  if (aligned && channels <= 8 * N) {
    return run(integral_constant<int, N>(), integral_constant<int, 8>(), std::true_type());
  }
  if (aligned && channels <= 16 * N) {
    return run(integral_constant<int, N>(), integral_constant<int, 16>(), std::true_type());
  }
  run(integral_constant<int, 1>(), integral_constant<int, 32>(), std::false_type());
}

}  // namespace

void step(Context& context, const TensorView& q, const Token& token, const TensorView& k_cache,
          const TensorView& v_cache, const TensorView& positions, const TensorView& o, const Options& options) {
  using flashgla::cuda::Begin;
  const ArenaScope scope(context.scratch());
  StepCall call{.q = q.data,
                .o = o.data,
                .q_row = q.stride[0],
                .q_head = q.stride[1],
                .o_row = o.stride[0],
                .o_head = o.stride[1],
                .k = k_cache.data,
                .v = v_cache.data,
                .own_k = Own(token.k),
                .own_v = Own(token.v),
                .positions = positions.as<std::int32_t>(),
                .sequences = static_cast<int>(q.size(0)),
                .heads = static_cast<int>(q.size(1)),
                .groups = static_cast<int>(k_cache.size(2)),
                .key_dim = static_cast<int>(q.size(2)),
                .value_dim = static_cast<int>(v_cache.size(3)),
                .rows = static_cast<int>(k_cache.size(1)),
                .window = static_cast<int>(std::min<std::int64_t>(options.window, 1 << 30)),
                .share = 1,
                .parts = 1,
                .most = kMany,
                .settled = token.settled,
                .scale = static_cast<float>(options.scale)};
  const int group = call.heads / call.groups, of_block = group == 1 ? 1 : 4;  // query heads
  const std::int64_t cells = q.size(0) * call.groups * ((group + of_block - 1) / of_block);
  const std::int64_t blocks = static_cast<std::int64_t>(context.architecture().multiprocessors) * step_blocks(of_block);
  call.share = static_cast<int>(std::max<std::int64_t>(1, blocks / std::max<std::int64_t>(1, cells)));
  // Together where that leaves few places for blocks empty, and no part with many more tokens than the others.
  const bool hopper = context.architecture().cuda_capability == 90;
  const int most_together = hopper ? kMostTogether : 1;
  const bool together = call.share <= 2 * most_together &&
                        (call.sequences == 1 || call.rows <= 2 * kMany * std::min(call.share, most_together));
  if (together) {
    call.share = call.parts = std::min(call.share, most_together);
    call.most = 1 << 30;
  } else {
    call.parts = std::max(call.share, (call.rows + kMany - 1) / kMany);
    call.partial = context.scratch()
                       .tensor(Shape({q.size(0) * q.size(1), call.parts, call.value_dim + 2}), DType::f32, "workspace")
                       .as<float>();
  }
  if (context.planning() || q.numel() == 0) return;
  house::with_element(q.dtype, [&](auto query) {
    using T = decltype(query);
    house::with_element(k_cache.dtype, [&](auto cached) {
      using C = decltype(cached);
      constexpr int kVector = flashgla::cuda::kVectorOf<C>;
      const bool aligned = call.key_dim % kVector == 0 && call.value_dim % kVector == 0 &&
                           house::are_aligned({&k_cache, &v_cache, &token.k, &token.v}, kVector);
      with_lanes<C>(std::max(call.key_dim, call.value_dim), aligned, [&](auto vector, auto team, auto held) {
        const auto queue = [&](auto heads) {
          constexpr int kHeads = decltype(heads)::value, kTeams = kStepThreads / decltype(team)::value;
          const std::int64_t passes = (group + kHeads - 1) / kHeads;
          const std::int64_t count = call.sequences * call.groups * passes * call.parts;
          const int floats = (kTeams + (together ? call.share : 0)) * kHeads * (call.value_dim + 2);
          const int shared =
              (decltype(held)::value ? ring_bytes(kHeads) : 0) + floats * static_cast<int>(sizeof(float));
          if (count > 0x7fffffff) throw Error("softmax_attention step: too large for one launch");
          flashgla::cuda::launch(
              "softmax_attention step",
              step_kernel<decltype(vector)::value, decltype(team)::value, decltype(held)::value, kHeads, T, C>,
              {dim3(static_cast<unsigned>(count)), together ? call.share : 1}, kStepThreads, shared,
              static_cast<cudaStream_t>(context.stream()), hopper ? Begin::beside_previous : Begin::after_previous,
              call);
        };
        group == 1 ? queue(std::integral_constant<int, 1>()) : queue(std::integral_constant<int, 4>());
      });
    });
    if (together) return;
    house::queue_kernel(context, "softmax_attention merge", merge_kernel<T>,
                        static_cast<std::int64_t>(call.sequences) * call.heads, kMergeThreads, 0, call);
  });
}

}  // namespace flashgla::ops::softmax_attention::cuda

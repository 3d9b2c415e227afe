// Caches: what a call adds to them, and decoding one token of each sequence against them.
#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/softmax_attention/cuda/call.cuh"

namespace flashgla::ops::softmax_attention::cuda {

namespace {

using flashgla::cuda::Vector;
namespace house = flashgla::ops::cuda;

// ---- append ----

struct AppendCall {
  Strided x;
  const std::int32_t* positions = nullptr;
  const std::int32_t* bounds = nullptr;
  const void* before = nullptr;  // null: the cache's other rows stay
  void* cache = nullptr;
  std::int64_t items = 0;  // tokens of the call, or with `before` rows of all caches
  int sequences = 0, length = 0, rows = 0, heads = 0, channels = 0;
};

constexpr int kAppendThreads = 128;

// A thread has N channels of an item: of the first call in so many blocks, of the second in the others.
template <int N, class X, class C>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(AppendCall first, AppendCall second, std::int64_t first_blocks) {
  flashgla::cuda::wait_for_previous();
  const bool of_first = blockIdx.x < first_blocks;
  const AppendCall& call = of_first ? first : second;
  const int vectors = call.heads * call.channels / N;
  const std::int64_t block = blockIdx.x - (of_first ? 0 : first_blocks);
  const std::int64_t at = block * kAppendThreads + threadIdx.x, item = at / vectors;
  if (item >= call.items) return;
  const int column = static_cast<int>(at % vectors) * N;
  int n, row, token;  // the token of the call that the row gets; none: -1
  std::int64_t begin = 0;
  int length = call.length;
  const auto look_up = [&](int sequence) {
    n = sequence;
    if (call.bounds == nullptr) return;
    begin = call.bounds[n];
    length = static_cast<int>(call.bounds[n + 1] - begin);
  };
  if (call.before == nullptr) {
    int sequence = static_cast<int>(item / call.length);
    if (call.bounds != nullptr) {
      int low = 0, high = call.sequences;  // bounds[low] <= item < bounds[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (call.bounds[middle] <= item ? low : high) = middle;
      }
      sequence = low;
    }
    look_up(sequence);
    token = static_cast<int>(call.bounds == nullptr ? item % call.length : item - begin);
    if (token < length - call.rows) return;  // a newer one has the row
    const std::int64_t position = call.positions != nullptr ? call.positions[n] : 0;
    row = static_cast<int>((position + token) % call.rows);
  } else {
    look_up(static_cast<int>(item / call.rows));
    row = static_cast<int>(item % call.rows);
    const std::int64_t position = call.positions != nullptr ? call.positions[n] : 0;
    const std::int64_t last = position + length - 1, newest = last - ((last - row) % call.rows + call.rows) % call.rows;
    token = length > 0 && newest >= position ? static_cast<int>(newest - position) : -1;
  }
  const std::int64_t place = (static_cast<std::int64_t>(n) * call.rows + row) * call.heads * call.channels + column;
  C* to = static_cast<C*>(call.cache) + place;
  if (token < 0) {
    Vector<C, N>::load(static_cast<const C*>(call.before) + place).store(to);
    return;
  }
  const int batch = call.bounds == nullptr ? n : 0;
  const X* from = call.x.at<X>(batch, begin + token, column / call.channels) + column % call.channels;
  const Vector<X, N> x = Vector<X, N>::load(from);
  float values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = x[i];
  Vector<C, N>::of(values).store(to);
}

// ---- step ----

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
constexpr int step_blocks(int heads) { return heads == 1 ? 4 : 3; }  // that a multiprocessor has at once
constexpr int kFew = 16, kMany = 2048;  // tokens of a part: a multiple of kFew, at most kMany

struct StepCall {
  const void* q;
  void* o;
  std::int64_t q_row, q_head, o_row, o_head;  // strides
  void* k;                                    // the caches
  void* v;
  Own own_k, own_v;
  const std::int32_t* positions;
  float* partial;  // [N,H,parts,V + 2]: o, then the largest score and the sum
  int sequences, heads, groups, key_dim, value_dim, rows, window;
  int share;  // parts that a sequence's tokens are divided into, where those are not more than kMany each
  int parts;  // the most there can be
  float scale;

  __device__ __forceinline__ int first_key(int i) const {
    const int kept = i + 1 > rows ? i + 1 - rows : 0;
    return window > 0 && i - window + 1 > kept ? i - window + 1 : kept;
  }
  // Tokens of each part but the last, where so many are seen.
  __device__ __forceinline__ int part_of(int tokens) const {
    const int each = (tokens + share - 1) / share;
    return min((each + kFew - 1) / kFew * kFew, kMany);
  }
};

// Sums over the kTeam neighbouring lanes.
template <int kTeam>
__device__ __forceinline__ float team_sum(float x) {
#pragma unroll
  for (int distance = kTeam / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Part of the answer to kHeads query heads of a group: kTeam lanes a key, each team with a softmax of its own over the
// tokens that it meets. kHeld: a lane has one vector of N channels of a row, those of kTurns rows and of the kTurns
// behind them are on their way at once, and sums stay in registers; else N is 1, rows are read as they are used and
// sums lie in shared memory.
template <int N, int kTeam, bool kHeld, int kHeads, class T, class C>
__global__ void __launch_bounds__(kStepThreads, step_blocks(kHeads)) step_kernel(StepCall call) {
  constexpr int kTeams = kStepThreads / kTeam, kTurns = kHeld ? (kHeads == 1 ? 4 : 2) : 1, kKept = kHeld ? N : 1;
  extern __shared__ float team_sums[];  // [kTeams, kHeads, V + 2]: weighted values, then the largest score and the sum
  flashgla::cuda::wait_for_previous();
  const int group = call.heads / call.groups, passes = (group + kHeads - 1) / kHeads;
  const int cells = call.sequences * call.groups * passes;  // parts go outside: those that hold tokens come first
  const int part = blockIdx.x / cells, cell = blockIdx.x % cells;
  const int n = cell / (call.groups * passes), g = cell / passes % call.groups, first_head = cell % passes * kHeads;
  const int i = call.positions[n], lowest = call.first_key(i), each = call.part_of(i + 1 - lowest);
  const int begin = lowest + part * each, end = min(begin + each, i + 1);
  if (begin >= end) return;
  const int team = threadIdx.x / kTeam, lane = threadIdx.x % kTeam, stride = call.value_dim + 2;
  const int heads = min(kHeads, group - first_head);
  const auto query = [&](int h, int c) {
    const T* row = static_cast<const T*>(call.q) + n * call.q_row + (g * group + first_head + h) * call.q_head;
    return to_float(row[c]) * call.scale * kLog2E;
  };
  const auto row_of = [&](void* cache, int channels, int j) {
    const std::int64_t row = (static_cast<std::int64_t>(n) * call.rows + j % call.rows) * call.groups + g;
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
  // N channels of token j's row; zeros where there is none.
  const auto load = [&](void* cache, const Own& own, int channels, int j, int c) {
    if (j >= end || c >= channels) return Vector<C, N>::zero();
    if (kHeld && j == i && own.data != nullptr) return put(cache, own, channels, c);
    return Vector<C, N>::load(row_of(cache, channels, j) + c);
  };
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

  struct Rows {
    Vector<C, N> k[kTurns], v[kTurns];
  };
  // The team's rows of the tokens from `first` on.
  const auto load_rows = [&](int first) {
    Rows rows;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      rows.k[turn] = load(call.k, call.own_k, call.key_dim, first + turn * kTeams + team, lane * N);
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      rows.v[turn] = load(call.v, call.own_v, call.value_dim, first + turn * kTeams + team, lane * N);
    }
    return rows;
  };
  Rows rows;
  if constexpr (kHeld) rows = load_rows(begin);
  for (int first = begin; first < end; first += kTeams * kTurns) {
    Rows next;
    if constexpr (kHeld) next = load_rows(first + kTeams * kTurns);
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
          for (int e = 0; e < N; ++e) product += q[h][e] * rows.k[turn][e];
        } else {
          for (int c = lane; c < call.key_dim; c += kTeam) {
            product += query(h, c) * load(call.k, call.own_k, call.key_dim, j, c)[0];
          }
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
          for (int e = 0; e < N; ++e) total[h][e] += weight * rows.v[turn][e];
        } else {
          const int j = first + team;
          for (int c = lane; c < call.value_dim; c += kTeam) {
            float& here = sums_of(team, h)[c];
            here = here * shrink + weight * load(call.v, call.own_v, call.value_dim, j, c)[0];
          }
        }
      }
    }
    if constexpr (kHeld) rows = next;
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
  // What the teams have, in their order; the column behind the channels is the sum.
  for (int at = threadIdx.x; at < heads * (call.value_dim + 1); at += kStepThreads) {
    const int h = at / (call.value_dim + 1), column = at % (call.value_dim + 1);
    const int from = column < call.value_dim ? column : call.value_dim + 1;
    float largest = -INFINITY, all = 0.0f;
#pragma unroll
    for (int whose = 0; whose < kTeams; ++whose) largest = fmaxf(largest, sums_of(whose, h)[call.value_dim]);
#pragma unroll
    for (int whose = 0; whose < kTeams; ++whose) {
      all += exp2f(sums_of(whose, h)[call.value_dim] - largest) * sums_of(whose, h)[from];
    }
    const std::int64_t head = static_cast<std::int64_t>(n) * call.heads + g * group + first_head + h;
    float* partial = call.partial + (head * call.parts + part) * stride;
    partial[from] = all;
    if (column == 0) partial[call.value_dim] = largest;
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

void append(Context& context, std::span<const Appended> tensors, const TensorView& positions,
            const TensorView& cu_seqlens) {
  if (context.planning()) return;
  const auto call_of = [&](const Appended& one) {
    AppendCall call{.x = Strided(one.x),
                    .positions = positions ? positions.as<std::int32_t>() : nullptr,
                    .bounds = cu_seqlens ? cu_seqlens.as<std::int32_t>() : nullptr,
                    .before = one.before && one.before.data != one.cache.data ? one.before.data : nullptr,
                    .cache = one.cache.data,
                    .items = 0,
                    .sequences = static_cast<int>(one.cache.size(0)),
                    .length = static_cast<int>(one.x.size(1)),
                    .rows = static_cast<int>(one.cache.size(1)),
                    .heads = static_cast<int>(one.x.size(2)),
                    .channels = static_cast<int>(one.x.size(3))};
    call.items = call.before != nullptr ? one.cache.size(0) * one.cache.size(1) : one.x.size(0) * one.x.size(1);
    return call;
  };
  const auto is_aligned = [](const Appended& one) {
    return one.x.size(3) % 8 == 0 && house::are_aligned({&one.x, &one.cache}, 8) &&
           reinterpret_cast<std::uintptr_t>(one.before.data) % 16 == 0;
  };
  // Two tensors a launch.
  for (std::size_t i = 0; i < tensors.size(); i += 2) {
    const bool two = i + 1 < tensors.size();
    const AppendCall first = call_of(tensors[i]), second = two ? call_of(tensors[i + 1]) : AppendCall{};
    const bool aligned = is_aligned(tensors[i]) && (!two || is_aligned(tensors[i + 1]));
    house::with_element(tensors[i].x.dtype, [&](auto from) {
      house::with_element(tensors[i].cache.dtype, [&](auto to) {
        const auto queue = [&](auto* kernel, int each) {
          const auto blocks = [&](const AppendCall& call) {
            const std::int64_t threads = call.items * (call.heads * call.channels / each);
            return (threads + kAppendThreads - 1) / kAppendThreads;
          };
          house::queue_kernel(context, "softmax_attention append", kernel, blocks(first) + blocks(second),
                              kAppendThreads, 0, first, second, blocks(first));
        };
        aligned ? queue(append_kernel<8, decltype(from), decltype(to)>, 8)
                : queue(append_kernel<1, decltype(from), decltype(to)>, 1);
      });
    });
  }
}

void step(Context& context, const TensorView& q, const Token& token, const TensorView& k_cache,
          const TensorView& v_cache, const TensorView& positions, const TensorView& o, const Options& options) {
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
                .scale = static_cast<float>(options.scale)};
  const int group = call.heads / call.groups, together = group == 1 ? 1 : 4;  // query heads of a block
  const std::int64_t cells = q.size(0) * call.groups * ((group + together - 1) / together);
  const std::int64_t blocks = static_cast<std::int64_t>(context.architecture().multiprocessors) * step_blocks(together);
  call.share = static_cast<int>(std::max<std::int64_t>(1, blocks / std::max<std::int64_t>(1, cells)));
  call.parts = std::max(call.share, (call.rows + kMany - 1) / kMany);
  call.partial = context.scratch()
                     .tensor(Shape({q.size(0) * q.size(1), call.parts, call.value_dim + 2}), DType::f32, "workspace")
                     .as<float>();
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
          house::queue_kernel(
              context, "softmax_attention step",
              step_kernel<decltype(vector)::value, decltype(team)::value, decltype(held)::value, kHeads, T, C>,
              call.sequences * call.groups * passes * call.parts, kStepThreads,
              kTeams * kHeads * (call.value_dim + 2) * static_cast<int>(sizeof(float)), call);
        };
        group == 1 ? queue(std::integral_constant<int, 1>()) : queue(std::integral_constant<int, 4>());
      });
    });
    house::queue_kernel(context, "softmax_attention merge", merge_kernel<T>,
                        static_cast<std::int64_t>(call.sequences) * call.heads, kMergeThreads, 0, call);
  });
}

}  // namespace flashgla::ops::softmax_attention::cuda

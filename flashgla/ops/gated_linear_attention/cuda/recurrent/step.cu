// One decoding token: h = (exp(g) exp(gv)^T) * h + phi(k) v^T, o = scale phi(q)^T h, for a batch. Bound by the bytes of
// h, read and written once: 8 K V bytes a head in f32.
//
// A block has one (batch element, key-value head) and slice of value channels at a time: a lane has 4 neighbouring
// channels, and kLanes of them the slice; the rest of the lanes and the warps share the key rows. All query heads of
// the group are served from the registers that hold the new state. Where there are too few slices of 128 channels for
// all multiprocessors, they are of 16.
#include <algorithm>

#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/recurrent/step.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

using ops::cuda::queue_kernel;

constexpr const char* kName = "gated_linear_attention step";
constexpr int kFewLanes = 4;  // of a slice where there are few

// The rows of a gate's projection that belong to a thread's key channels. They are parameters, which no kernel of a
// token writes: with few slices, where a token's time is what counts, they are asked for before the kernel waits.
template <bool kHeld>
class GateRows {
 public:
  __device__ __forceinline__ void load(const StepParams& p, int head) {
    if constexpr (kHeld) {
      if (!p.projects()) return;
#pragma unroll
      for (int j = 0; j < kEach; ++j) rows_[j].load(p, head, threadIdx.x + j * kWarps * 32);
    }
  }

  // Puts the decays of the thread's key channels in their places. `input` as in GateRow::log_gate.
  __device__ __forceinline__ void put_decays(const StepParams& p, int head, float input, float* decays) const {
#pragma unroll(kHeld ? kEach : 1)  // 1 for want of registers
    for (int j = 0; j < kEach; ++j) {
      if (j * kWarps * 32 >= p.key_dim) break;
      const int k = threadIdx.x + j * kWarps * 32;
      Row row;
      if constexpr (kHeld) {
        row = rows_[j];
      } else {
        row.load(p, head, k);
      }
      decays[k] = exp2f(base_2_gate(row.log_gate(p, head, k, input)));
    }
  }

 private:
  using Row = GateRow<kHeld ? 4 : 0>;
  static constexpr int kEach = kMostKeys / (kWarps * 32);
  Row rows_[kEach];
};

// What one token brings to a block's cell, a (batch element, key-value head), and slice of value channels: asked for
// early, all of it under way together, and put to shared memory later.
template <int kQueries, int kSlice>
struct Token {
  static constexpr int kEach = kMostKeys / (kWarps * 32);  // key channels a thread
  Bits key[kEach], gate[kEach], query[kEach][kQueries], value, value_gate, projected;

  __device__ __forceinline__ void load(const StepParams& p, unsigned cell, unsigned slice, int first_query) {
    const std::int64_t b = cell / p.heads;
    const int head = static_cast<int>(cell % p.heads);
    const bool over_keys = p.gate == GateKind::key || p.gate == GateKind::key_value;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int k = threadIdx.x + j * kWarps * 32;
      const bool there = k < p.key_dim;
      key[j] = Bits(p.dtype, p.k.data, b * p.k.batch + head * p.k.head + k, there);
      gate[j] = Bits(p.gate_dtype, p.g.data, b * p.g.batch + head * p.g.head + (over_keys ? k : 0),
                     there && p.gated_keys() && !p.projects());
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        const int query_head = head * p.group + first_query + i;
        query[j][i] =
            Bits(p.dtype, p.q.data, b * p.q.batch + query_head * p.q.head + k, there && first_query + i < p.group);
      }
    }
    const int channel = slice * kSlice + threadIdx.x;
    const bool there = threadIdx.x < kSlice && channel < p.value_dim;
    value = Bits(p.dtype, p.v.data, b * p.v.batch + head * p.v.head + channel, there);
    value_gate =
        Bits(p.gate_dtype, p.gv.data, b * p.gv.batch + head * p.gv.head + channel, there && p.gv.data != nullptr);
    const int own = static_cast<int>(threadIdx.x) % 32;
    projected = Bits(p.dtype, p.g.data, b * p.g.batch + own, p.projects() && own < p.rank);
  }
};

// Rows of a thread in flight and blocks of a multiprocessor.
template <class S, int kQueries, int kLanes>
struct Flight {
  static constexpr bool few = kLanes == kFewLanes, small = sizeof(S) == 2 && kQueries == 1;
  static constexpr int rows = few ? 4 : small ? 8 : 16, blocks = small && !few ? 4 : 2;
  // Whether there are registers for a gate's projection.
  static constexpr bool projects = few || (sizeof(S) == 4 && kQueries == 1);
};

// Grid: at most Flight::blocks a multiprocessor, which walk over cells and slices: while one's sums go out, the next
// one's first rows and token come in. Only the launch for the first kQueries query heads updates the state, others come
// after it and read the new state. S is the state's type; kWhole: V is a multiple of 4.
template <class S, int kQueries, int kLanes, bool update, bool kWhole>
__global__ void __launch_bounds__(kWarps * 32, (Flight<S, kQueries, kLanes>::blocks))
    step_kernel(const __grid_constant__ StepParams p, int first_query) {
  constexpr int kUnroll = Flight<S, kQueries, kLanes>::rows;
  constexpr int kSlice = 4 * kLanes;                 // value channels of a block
  constexpr int kRowsAtOnce = kWarps * 32 / kLanes;  // key rows of the block
  __shared__ float q_shared[kQueries][kMostKeys];
  __shared__ float k_shared[kMostKeys], a_shared[kMostKeys], v_shared[kSlice], av_shared[kSlice];
  __shared__ float4 parts[kWarps][kQueries][kLanes];
  __shared__ float denominators[kQueries];
  const int lane = threadIdx.x % kLanes, own_row = threadIdx.x / kLanes, warp = threadIdx.x / 32;
  const int K = p.key_dim, V = p.value_dim;
  const int queries = min(kQueries, p.group - first_query);
  const unsigned slices = (V + kSlice - 1) / kSlice;

  // This lane's channels of its rows, kRowsAtOnce apart: the first one's place, and how far down they go.
  const auto channel_of = [&](unsigned unit) { return static_cast<int>(unit % slices) * kSlice + lane * 4; };
  const auto place_of = [&](unsigned unit) {
    return static_cast<S*>(p.h) + (static_cast<std::int64_t>(unit / slices) * K + own_row) * V + channel_of(unit);
  };
  const auto rows_of = [&](unsigned unit) { return unit < p.units && channel_of(unit) < V ? K - own_row : 0; };
  const std::int64_t down = static_cast<std::int64_t>(kRowsAtOnce) * V;
  typename Four<S>::Raw rows[kUnroll];
  const auto load_rows = [&](const S* from, int left, int inside) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u * kRowsAtOnce < left) rows[u] = load_four<kWhole>(from + u * down, inside);
    }
  };

  unsigned unit = blockIdx.x;
  S* h = place_of(unit);
  int left = rows_of(unit);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (u * kRowsAtOnce < left) ptx::prefetch_l2(h + u * down);
  }
  GateRows<kLanes == kFewLanes> gate_rows;
  gate_rows.load(p, static_cast<int>(unit / slices % p.heads));
  flashgla::cuda::release_next();
  flashgla::cuda::wait_for_previous();
  load_rows(h, left, V - channel_of(unit));
  Token<kQueries, kSlice> token;
  token.load(p, unit / slices, unit % slices, first_query);
  while (true) {
    const unsigned cell = unit / slices, next = unit + gridDim.x;
    const int inside = V - channel_of(unit);
#pragma unroll
    for (int j = 0; j < Token<kQueries, kSlice>::kEach; ++j) {
      const int k = threadIdx.x + j * kWarps * 32;
      k_shared[k] = feature(p.feature_map, token.key[j].as_float(p.dtype));
      a_shared[k] = p.gated_keys() ? exp2f(base_2_gate(token.gate[j].as_float(p.gate_dtype))) : 1.0f;
#pragma unroll
      for (int i = 0; i < kQueries; ++i) q_shared[i][k] = feature(p.feature_map, token.query[j][i].as_float(p.dtype));
    }
    if (Flight<S, kQueries, kLanes>::projects && p.projects()) {
      const float input = token.projected.as_float(p.dtype);
      gate_rows.put_decays(p, static_cast<int>(cell % p.heads), input, a_shared);
    }
    if (threadIdx.x < kSlice) {
      v_shared[threadIdx.x] = token.value.as_float(p.dtype);
      av_shared[threadIdx.x] =
          p.gv.data != nullptr ? exp2f(base_2_gate(token.value_gate.as_float(p.gate_dtype))) : 1.0f;
    }
    __syncthreads();
    if (p.normalize && warp < kQueries) {
      // z before this token, whichever block of the launch runs first: step_normalizer_kernel updates it afterwards.
      float sum = 0.0f;
      for (int k = static_cast<int>(threadIdx.x) % 32; k < K; k += 32) {
        const float z = Element<S>::load(static_cast<const S*>(p.z) + static_cast<std::int64_t>(cell) * K + k);
        sum += q_shared[warp][k] * (z + k_shared[k]);
      }
      sum = flashgla::cuda::warp_sum(sum);
      if (threadIdx.x % 32 == 0) denominators[warp] = sum;
    }

    float4 sums[kQueries];
#pragma unroll
    for (int i = 0; i < kQueries; ++i) sums[i] = make_float4(0, 0, 0, 0);
    const float4 value = reinterpret_cast<const float4*>(v_shared)[lane],
                 value_decay = reinterpret_cast<const float4*>(av_shared)[lane];
    constexpr int kRound = kUnroll * kRowsAtOnce;  // rows of the block in flight
    for (int first = 0;; first += kRound) {
      const float *a_row = a_shared + first + own_row, *k_row = k_shared + first + own_row,
                  *q_row = &q_shared[0][0] + first + own_row;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (u * kRowsAtOnce < left) {
          float4 x = Four<S>::unpack(rows[u]);
          if constexpr (update) {
            const float a = a_row[u * kRowsAtOnce], key = k_row[u * kRowsAtOnce];
            x = make_float4(fmaf(a * value_decay.x, x.x, key * value.x), fmaf(a * value_decay.y, x.y, key * value.y),
                            fmaf(a * value_decay.z, x.z, key * value.z), fmaf(a * value_decay.w, x.w, key * value.w));
            store_four<kWhole>(h + u * down, inside, x);
          }
#pragma unroll
          for (int i = 0; i < kQueries; ++i) {
            const float q = q_row[i * kMostKeys + u * kRowsAtOnce];
            sums[i] = make_float4(fmaf(q, x.x, sums[i].x), fmaf(q, x.y, sums[i].y), fmaf(q, x.z, sums[i].z),
                                  fmaf(q, x.w, sums[i].w));
          }
        }
      }
      const bool done = first + kRound >= K;
      h = done ? place_of(next) : h + kUnroll * down;
      left = done ? rows_of(next) : left - kRound;
      load_rows(h, left, done ? V - channel_of(next) : inside);
      if (done) break;
    }
    if (next < p.units) {
      token.load(p, next / slices, next % slices, first_query);
      gate_rows.load(p, static_cast<int>(next / slices % p.heads));
    }
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
#pragma unroll
      for (int distance = 16; distance >= kLanes; distance /= 2) {
        sums[i].x += __shfl_xor_sync(0xffffffffu, sums[i].x, distance);
        sums[i].y += __shfl_xor_sync(0xffffffffu, sums[i].y, distance);
        sums[i].z += __shfl_xor_sync(0xffffffffu, sums[i].z, distance);
        sums[i].w += __shfl_xor_sync(0xffffffffu, sums[i].w, distance);
      }
      if (own_row % (32 / kLanes) == 0) parts[warp][i][lane] = sums[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < queries * kSlice; i += blockDim.x) {
      const int query = i / kSlice, own = i % kSlice, channel = static_cast<int>(unit % slices) * kSlice + own;
      if (channel >= V) continue;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += reinterpret_cast<const float*>(parts[w][query])[own];
      sum = p.normalize ? sum / (denominators[query] + static_cast<float>(kNormalizerEpsilon)) : sum * p.scale;
      const std::int64_t b = cell / p.heads;
      const int query_head = static_cast<int>(cell % p.heads) * p.group + first_query + query;
      store_as(p.dtype, p.o.data, b * p.o.batch + query_head * p.o.head + channel, sum);
    }
    if (next >= p.units) break;
    unit = next;
  }
}

// z += phi(k); grid: B * G.
template <class S>
__global__ void step_normalizer_kernel(const __grid_constant__ StepParams p) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t b = blockIdx.x / p.heads;
  const int head = blockIdx.x % p.heads;
  S* z = static_cast<S*>(p.z) + static_cast<std::int64_t>(blockIdx.x) * p.key_dim;
  for (int k = threadIdx.x; k < p.key_dim; k += blockDim.x) {
    const float key = feature(p.feature_map, load_as(p.dtype, p.k.data, b * p.k.batch + head * p.k.head + k));
    Element<S>::store(z + k, Element<S>::load(z + k) + key);
  }
}

// Of 128 value channels: fewer than multiprocessors.
bool has_few_slices(const Context& context, std::int64_t cells, std::int64_t value_dim) {
  return cells * ((value_dim + 127) / 128) < context.architecture().multiprocessors;
}

struct Launch {
  const Context& context;
  unsigned cells;

  template <class S, int kQueries, int kLanes, bool kWhole>
  void steps(StepParams p) const {
    p.units = cells * ((static_cast<unsigned>(p.value_dim) + 4 * kLanes - 1) / (4 * kLanes));
    const auto multiprocessors = static_cast<unsigned>(context.architecture().multiprocessors);
    const unsigned blocks = std::min(p.units, Flight<S, kQueries, kLanes>::blocks * multiprocessors);
    queue_kernel(context, kName, step_kernel<S, kQueries, kLanes, true, kWhole>, blocks, kWarps * 32, 0, p, 0);
    for (int first = kQueries; first < p.group; first += kQueries) {
      queue_kernel(context, kName, step_kernel<S, kQueries, kLanes, false, kWhole>, blocks, kWarps * 32, 0, p, first);
    }
  }
  template <class S, int kQueries>
  void steps(const StepParams& p) const {
    if (p.value_dim % 4 != 0) {
      steps<S, kQueries, 32, false>(p);
    } else if (has_few_slices(context, cells, p.value_dim)) {
      steps<S, kQueries, kFewLanes, true>(p);
    } else {
      steps<S, kQueries, 32, true>(p);
    }
  }
  template <class S>
  void all(const StepParams& p) const {
    p.group == 1 ? steps<S, 1>(p) : steps<S, 4>(p);
    if (p.normalize) queue_kernel(context, kName, step_normalizer_kernel<S>, cells, 128, 0, p);
  }
};

// [B,heads,channels] or [B,heads].
Strided of_one_token(const TensorView& view) {
  if (!view) return {};
  return {view.data, view.stride[0], 0, view.stride[1]};
}

}  // namespace

StepParams step_params(const Problem& problem, const StepInputs& inputs, const TensorView& h, const TensorView& z,
                       const TensorView& o) {
  StepParams p{};
  p.q = of_one_token(inputs.q);
  p.k = of_one_token(inputs.k);
  p.v = of_one_token(inputs.v);
  p.g = problem.gate == GateKind::constant ? Strided{inputs.g.data, 0, 0, inputs.g.stride[0]} : of_one_token(inputs.g);
  p.gv = of_one_token(inputs.gv);
  p.o = of_one_token(o);
  p.h = h.data;
  p.z = z.data;
  p.heads = static_cast<int>(problem.heads);
  p.group = static_cast<int>(problem.group());
  p.key_dim = static_cast<int>(problem.key_dim);
  p.value_dim = static_cast<int>(problem.value_dim);
  p.gate = problem.gate;
  p.feature_map = problem.feature_map;
  p.dtype = problem.dtype;
  p.gate_dtype = problem.gate_dtype;
  p.normalize = problem.normalize;
  p.scale = static_cast<float>(problem.scale);
  if (const GateProjection& gate = inputs.projection; gate.weight) {
    p.g = {gate.x.data, gate.x.stride[0], 0, 0};
    p.gate_weight = gate.weight.data;
    p.gate_bias = gate.bias.data;
    p.rank = static_cast<int>(gate.x.size(1));
    p.gate_weight_dtype = gate.weight.dtype;
    p.gate_bias_dtype = gate.bias.dtype;
    p.inverse_normalizer = static_cast<float>(1.0 / problem.gate_logit_normalizer);
    p.gate_min = static_cast<float>(problem.gate_clamp_min);
  }
  return p;
}

bool takes_projection(const Context& context, const Problem& problem, const GateProjection& gate, DType state) {
  const bool few =
      problem.value_dim % 4 == 0 && has_few_slices(context, problem.batch * problem.heads, problem.value_dim);
  if (!few && !(state == DType::f32 && problem.group() == 1)) return false;  // Flight::projects
  const std::int64_t rank = gate.x.size(1);
  return rank <= kMostRank && rank * static_cast<std::int64_t>(size_of(gate.weight.dtype)) % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(gate.weight.data) % 16 == 0;
}

void step(Context& context, const Problem& problem, const StepInputs& inputs, const TensorView& h, const TensorView& z,
          const TensorView& o) {
  if (context.planning()) return;
  StepParams p = step_params(problem, inputs, h, z, o);
  const auto cells = static_cast<unsigned>(problem.batch * problem.heads);
  if (cells == 0 || p.value_dim == 0) return;
  const Launch launch{context, cells};
  h.dtype == DType::bf16 ? launch.all<__nv_bfloat16>(p) : launch.all<float>(p);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// Views to Params, the two sides of a call, the numbering of chunks of packed sequences, and the tag of states.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "flashgla/base/cuda/check.h"
#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kPlanThreads = 1024;  // at most

__device__ __forceinline__ std::int64_t chunks_of_sequence(const Sequences& s, std::int64_t n) {
  return (sequence_start(s, n + 1) - sequence_start(s, n) + kChunk - 1) / kChunk;
}
// Calls put(n, the sum of chunks of the sequences before) for n up to N, by one block: a scan over rounds of as many
// sequences as it has threads.
template <class Put>
__device__ __forceinline__ void number_chunks(const Sequences& s, const Put& put) {
  __shared__ std::int64_t sums[2][kPlanThreads];
  const int threads = static_cast<int>(blockDim.x);
  std::int64_t before = 0;
  for (std::int64_t first = 0; first < s.count; first += threads) {
    const std::int64_t n = first + threadIdx.x, mine = n < s.count ? chunks_of_sequence(s, n) : 0;
    int current = 0;
    sums[0][threadIdx.x] = mine;
    __syncthreads();
    for (int step = 1; step < threads; step *= 2) {
      std::int64_t sum = sums[current][threadIdx.x];
      if (static_cast<int>(threadIdx.x) >= step) sum += sums[current][threadIdx.x - step];
      sums[current ^ 1][threadIdx.x] = sum;
      current ^= 1;
      __syncthreads();
    }
    if (n < s.count) put(n, before + sums[current][threadIdx.x] - mine);
    before += sums[current][threads - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) put(s.count, before);
}
__global__ void plan_chunks_kernel(Sequences s, std::int64_t* begin) {
  flashgla::cuda::release_next();
  number_chunks(s, [&](std::int64_t n, std::int64_t number) { begin[n] = number; });
}

// Starts of sequences and numbers of their chunks, for one way or the other.
struct Numbers {
  std::int64_t *starts, *chunk_begin;  // [N+1]
};
__global__ void plan_chunks_by_length_kernel(Sequences s, std::int64_t most_chunks, Numbers up_to, Numbers longer) {
  flashgla::cuda::release_next();
  bool is_longer = false;
  for (std::int64_t n = threadIdx.x; n < s.count; n += blockDim.x) is_longer |= chunks_of_sequence(s, n) > most_chunks;
  is_longer = __syncthreads_or(is_longer);
  number_chunks(s, [&](std::int64_t n, std::int64_t number) {
    const std::int64_t start = sequence_start(s, n);
    up_to.starts[n] = is_longer ? 0 : start;
    up_to.chunk_begin[n] = is_longer ? 0 : number;
    longer.starts[n] = is_longer ? start : 0;
    longer.chunk_begin[n] = is_longer ? number : 0;
  });
}
// Threads of either.
int plan_threads(const Sequences& s) {
  return static_cast<int>(std::clamp<std::int64_t>((s.count + 31) / 32 * 32, 32, kPlanThreads));
}

__global__ void write_tag(std::uint64_t* to, std::uint64_t tag) { *to = tag; }
__global__ void check_tag(const std::uint64_t* at, std::uint64_t tag) {
  if (*at == tag) return;
  std::printf("gated_linear_attention: states of another call, or of one with other options\n");
  __trap();
}

// Of the last bytes, unless the build has no tags or there are no states.
template <class Word>
void launch_tag(const Context& context, const Plan& plan, const TensorView& states,
                void (*kernel)(Word*, std::uint64_t)) {
  if (states_tag_bytes() == 0 || context.planning() || !states || states.bytes() == 0) return;
  char* const at = static_cast<char*>(states.data) + states.bytes() - states_tag_bytes();
  kernel<<<1, 1, 0, static_cast<cudaStream_t>(context.stream())>>>(reinterpret_cast<Word*>(at), plan.states.tag());
  flashgla::cuda::check_launch("gated_linear_attention tag of states");
}

// The bf16 number next to x that is no less, or no greater; its upper half.
std::uint32_t rounded(float x, bool up) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool away = (bits & 0xffffu) != 0 && (x > 0.0f) == up;
  return (bits >> 16) + (away ? 1 : 0);
}
// Which logits the least gate cuts off: those of sigmoid(x) below e^(gate_clamp_min times the normalizer).
void set_cut(Params& p, const Problem& problem) {
  if (!problem.has_logits() || problem.gate_clamp_min == kNoClamp) return;
  const double log_sigmoid = problem.gate_clamp_min * problem.gate_logit_normalizer;
  const double logit = log_sigmoid - std::log(-std::expm1(log_sigmoid));
  const auto pair = [](std::uint32_t x) { return x << 16 | x; };
  const std::uint32_t gate = rounded(p.gate_min, false);
  p.cut_logits = pair(rounded(static_cast<float>(logit), true));
  p.cut_gates = pair(gate);
  p.kept_gates = pair((gate & 0x7fffu) != 0 ? gate - 1 : gate);
}

}  // namespace

Strided strided(const TensorView& view) {
  if (!view) return {};
  return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
Strided strided_gate(GateKind gate, const TensorView& view) {
  return view && gate == GateKind::constant ? Strided{view.data, 0, 0, view.stride[0]} : strided(view);
}

Params make_params(const Problem& problem, const Inputs& inputs, const Outputs& outputs) {
  Params p = sizes_of(problem);
  set_cut(p, problem);
  p.q = strided(inputs.q);
  p.k = strided(inputs.k);
  p.v = strided(inputs.v);
  p.g = strided_gate(problem.gate, inputs.g);
  p.gv = strided(inputs.gv);
  p.o = strided(outputs.o);
  p.h0 = inputs.h0.data;
  p.z0 = inputs.z0.data;
  p.ht = outputs.ht.data;
  p.zt = outputs.zt.data;
  p.states = outputs.states.data;
  p.sequences.cu_seqlens = inputs.cu_seqlens.data;
  p.sequences.wide = inputs.cu_seqlens && inputs.cu_seqlens.dtype == DType::i64;
  return p;
}
Params make_params(const Plan& plan, const Inputs& inputs, const Outputs& outputs) {
  Params p = make_params(plan.problem, inputs, outputs);
  if (plan.states.kind == StatesKind::none) p.states = nullptr;
  set_spacing(p, plan.states.every_log2);
  return p;
}

void plan_chunks(Context& context, Params& params) {
  if (params.sequences.cu_seqlens == nullptr) return;
  auto* begin = take<std::int64_t>(context, (params.sequences.count + 1) * 8, "gla: chunk numbers");
  params.sequences.chunk_begin = begin;
  if (context.planning()) return;
  plan_chunks_kernel<<<1, plan_threads(params.sequences), 0, static_cast<cudaStream_t>(context.stream())>>>(
      params.sequences, begin);
  flashgla::cuda::check_launch("plan_chunks");
}

ByLength plan_chunks_by_length(Context& context, const Params& params, std::int64_t most_chunks) {
  const std::int64_t each = params.sequences.count + 1;
  auto* numbers = take<std::int64_t>(context, 4 * each * 8, "gla: chunk numbers");
  const Numbers up_to{numbers, numbers + each}, longer{numbers + 2 * each, numbers + 3 * each};
  const auto with = [&](const Numbers& n, bool may_be_idle) {
    Params p = params;
    p.sequences.may_be_idle = may_be_idle;
    p.sequences.cu_seqlens = n.starts;
    p.sequences.wide = true;
    p.sequences.chunk_begin = n.chunk_begin;
    return p;
  };
  if (!context.planning()) {
    plan_chunks_by_length_kernel<<<1, plan_threads(params.sequences), 0, static_cast<cudaStream_t>(context.stream())>>>(
        params.sequences, most_chunks, up_to, longer);
    flashgla::cuda::check_launch("plan_chunks_by_length");
  }
  return {with(up_to, false), with(longer, true)};
}

float* take_states(Context& context, const Problem& p, const char* label) {
  return take<float>(context, p.sequences * p.heads * p.key_dim * p.value_dim * 4, label);
}

void write_states_tag(const Context& context, const Plan& plan, const TensorView& states) {
  launch_tag(context, plan, states, write_tag);
}
void check_states_tag(const Context& context, const Plan& plan, const TensorView& states) {
  launch_tag(context, plan, states, check_tag);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// The parallel form: workspace, order of launches, and what turns f32 rows into gradients.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/parallel/parallel.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr const char* kName = "gated_linear_attention in parallel form";
using flashgla::cuda::Begin;

// dq, dk or dv (and dh0) from the rows of all query heads; a warp has a row of one sequence and head of the gradient.
template <Side side>
__global__ void __launch_bounds__(kParallelThreads)
    parallel_gradient_kernel(const __grid_constant__ ParallelCall c, const float* parts,
                             const __grid_constant__ Strided gradient, float* dh0) {
  const Params& p = c.p;
  constexpr bool by_query = side == Side::query;
  const int group = by_query ? 1 : p.group, heads = p.heads * (by_query ? p.group : 1);
  const int width = side == Side::value ? p.value_dim : p.key_dim;
  const int of = static_cast<int>(blockIdx.x % heads), lane = threadIdx.x % 32;
  const int row = blockIdx.y * kParallelWarps + threadIdx.x / 32;
  const ParallelRows first = rows_of(c, blockIdx.x / heads, of * group);
  const int t = row - c.before;
  if (t >= first.length || (t < 0 ? side != Side::value || dh0 == nullptr : gradient.data == nullptr)) return;
  for (int channel = lane; channel < width; channel += 32) {
    float sum = 0.0f;
    for (int h = 0; h < group; ++h) {
      const ParallelRows s = rows_of(c, first.n, of * group + h);
      const std::int64_t at = s.query_head * c.rows + s.base + row;
      sum += parts[at * width + channel];
      if (side == Side::query) sum = fmaf(c.diagonal[at], element<Side::key>(c, s, row, channel), sum);
      if (side == Side::key) sum = fmaf(c.diagonal[at], element<Side::query>(c, s, row, channel), sum);
    }
    if (t < 0) {
      dh0[((first.n * p.heads + of) * p.key_dim + row) * width + channel] = sum;
      continue;
    }
    const std::int64_t token = first.begin + t;
    if (side != Side::value) {
      const Strided& input = by_query ? p.q : p.k;
      sum *= feature_slope(
          p.feature_map,
          load_as(p.dtype, input.data, first.batch * input.batch + token * input.token + of * input.head + channel));
    }
    if (by_query) sum *= p.scale;
    store_as(p.dtype, gradient.data,
             first.batch * gradient.batch + token * gradient.token + of * gradient.head + channel, sum);
  }
}

// q dq - k dk of a row, over a group's heads, in the place of its first head's dq; summed over channels, into channel
// 0, where gates are of tokens. A warp has a row.
__global__ void __launch_bounds__(kParallelThreads)
    parallel_gate_terms_kernel(const __grid_constant__ ParallelCall c, float* dq, const float* dk, bool by_channel) {
  const int K = c.p.key_dim, head = static_cast<int>(blockIdx.x % c.p.heads), lane = threadIdx.x % 32;
  const int row = blockIdx.y * kParallelWarps + threadIdx.x / 32;
  const ParallelRows first = rows_of(c, blockIdx.x / c.p.heads, head * c.p.group);
  if (row >= first.count) return;
  float* to = dq + (first.query_head * c.rows + first.base + row) * K;
  double all = 0.0;
  for (int channel = lane; channel < K; channel += 32) {
    double sum = 0.0;
    for (int h = 0; h < c.p.group; ++h) {
      const ParallelRows s = rows_of(c, first.n, first.query_head + h);
      const std::int64_t at = (s.query_head * c.rows + s.base + row) * K + channel;
      sum += static_cast<double>(element<Side::query>(c, s, row, channel)) * dq[at];
      sum -= static_cast<double>(element<Side::key>(c, s, row, channel)) * dk[at];
    }
    if (by_channel) to[channel] = static_cast<float>(sum);
    all += sum;
  }
  if (by_channel) return;
  all = flashgla::cuda::warp_sum(all);
  if (lane == 0) to[0] = static_cast<float>(all);
}

// dg of token t: the sum of the terms of its row and all after it, in f64; 0 where the gate is shut. A thread walks a
// channel back through time, several rows at a time, so that their loads are under way together.
__global__ void __launch_bounds__(kParallelThreads)
    parallel_gate_scan_kernel(const __grid_constant__ ParallelCall c, const float* terms, int channels,
                              const __grid_constant__ Strided dg, float* parts) {
  const Params& p = c.p;
  const int head = static_cast<int>(blockIdx.x % p.heads);
  const int channel = blockIdx.y * kParallelThreads + threadIdx.x;
  const ParallelRows s = rows_of(c, blockIdx.x / p.heads, head * p.group);
  if (channel >= channels) return;
  const float* from = terms + (s.query_head * c.rows + s.base) * p.key_dim + channel;
  constexpr int kAtOnce = 8;
  double run = 0.0;
  for (int end = s.count; end > c.before; end -= kAtOnce) {
    float term[kAtOnce], gate[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = max(end - 1 - i, c.before);
      term[i] = from[static_cast<std::int64_t>(row) * p.key_dim];
      gate[i] = parallel_gate(c, s, row, channel);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int t = end - 1 - i - c.before;
      if (t < 0) break;
      run += term[i];
      if (t >= s.length) continue;
      const std::int64_t token = s.begin + t;
      const float gradient = gate[i] == 0.0f ? 0.0f : static_cast<float>(run);
      if (parts != nullptr) {
        parts[(s.batch * p.sequences.length + token) * p.heads + head] = gradient;
      } else {
        store_as(p.gate_dtype, dg.data, s.batch * dg.batch + token * dg.token + head * dg.head + channel, gradient);
      }
    }
  }
}

// Grids: heads of all sequences, and what of their rows a block has; packed ones may all be as long as their sum.
struct Launcher {
  const ParallelCall& c;
  cudaStream_t stream;

  dim3 grid(std::int64_t heads, int rows_each, int columns = 1) const {
    const std::int64_t rows = c.before + c.p.sequences.length + c.after;
    return dim3(static_cast<unsigned>(c.p.sequences.count * heads),
                static_cast<unsigned>((rows + rows_each - 1) / rows_each), static_cast<unsigned>(columns));
  }
  template <class... Parameters, class... Arguments>
  void run(dim3 blocks, void (*kernel)(Parameters...), const Arguments&... arguments) const {
    if (blocks.x == 0 || blocks.y == 0) return;
    flashgla::cuda::launch(kName, kernel, blocks, kParallelThreads, 0, stream, Begin::after_previous, c, arguments...);
  }
  void prepare() const { run(grid(c.p.heads * c.p.group, kParallelRows), parallel_prepare_kernel); }
  template <bool later, bool decays_scores, int kColumns>
  void form() const {
    const int width = decays_scores ? c.p.value_dim : c.p.key_dim;
    run(grid(c.p.heads * c.p.group, kParallelRows, (width + kColumns - 1) / kColumns),
        parallel_form_kernel<later, decays_scores, kColumns>);
  }
  template <bool later, bool decays_scores>
  void form() const {
    const int width = decays_scores ? c.p.value_dim : c.p.key_dim;
    width > 128 ? form<later, decays_scores, 256>() : form<later, decays_scores, 128>();
  }
};

// With rows beside the tokens for states that are given or wanted.
ParallelCall call_of(Context& context, const Params& p, bool before, bool after) {
  ParallelCall c{.p = p, .before = before ? p.key_dim : 0, .after = after ? p.key_dim : 0};
  const Sequences& s = p.sequences;
  const std::int64_t heads = p.heads * p.group;
  c.rows = s.tokens() + s.count * (c.before + c.after);
  c.queries = take<float>(context, heads * c.rows * p.key_dim * 4, "gla parallel: decayed queries");
  c.keys = take<float>(context, heads * c.rows * p.key_dim * 4, "gla parallel: decayed keys");
  c.decays = take<float>(context, (c.rows / kParallelRows + s.count) * heads * p.key_dim * 4, "gla parallel: decays");
  return c;
}

}  // namespace

void parallel_forward(Context& context, const Params& params) {
  const ArenaScope scope(context.scratch());
  const ParallelCall c = call_of(context, params, params.h0 != nullptr, params.ht != nullptr);
  if (context.planning()) return;
  const Launcher launcher{c, static_cast<cudaStream_t>(context.stream())};
  launcher.prepare();
  launcher.form<false, true>();
}

void parallel_backward(Context& context, const Problem& problem, const Params& params, const OutputGradients& d_out,
                       const InputGradients& d_in) {
  const ArenaScope scope(context.scratch());
  const Params& p = params;
  ParallelCall c = call_of(context, p, d_in.dh0 || p.h0 != nullptr, static_cast<bool>(d_out.d_ht));
  const std::int64_t heads = p.heads * p.group, tokens = p.sequences.tokens();
  const bool of_tokens = p.gate == GateKind::scalar || p.gate == GateKind::constant;
  const auto floats = [&](std::int64_t count) {
    return take<float>(context, count * 4, "gla parallel: f32 gradients");
  };
  float* dq = floats(heads * c.rows * p.key_dim);
  float* dk = floats(heads * c.rows * p.key_dim);
  float* dv = floats(heads * c.rows * p.value_dim);
  c.diagonal = floats(heads * c.rows);
  float* gate_parts = d_in.dg && of_tokens ? floats(tokens * p.heads) : nullptr;
  if (context.planning()) return;

  const Gradients d = gradients_of(problem, d_out, d_in);
  c.d_o = d.d_o;
  c.d_ht = static_cast<const float*>(d_out.d_ht.data);
  const Launcher launcher{c, static_cast<cudaStream_t>(context.stream())};
  const dim3 of_queries = launcher.grid(heads, kParallelWarps), of_keys = launcher.grid(p.heads, kParallelWarps);
  launcher.prepare();
  if (d_in.dv || d_in.dh0) {
    c.out = dv;
    launcher.form<true, true>();
    launcher.run(of_keys, parallel_gradient_kernel<Side::value>, dv, d.dv, static_cast<float*>(d_in.dh0.data));
  }
  if (!d_in.dq && !d_in.dk && !d_in.dg) return;
  c.out = dq;
  launcher.form<false, false>();
  c.out = dk;
  launcher.form<true, false>();
  launcher.run(of_queries, parallel_gradient_kernel<Side::query>, dq, d.dq, static_cast<float*>(nullptr));
  launcher.run(of_keys, parallel_gradient_kernel<Side::key>, dk, d.dk, static_cast<float*>(nullptr));
  if (!d_in.dg) return;
  launcher.run(of_keys, parallel_gate_terms_kernel, dq, dk, !of_tokens);
  const int channels = of_tokens ? 1 : p.key_dim;
  const dim3 scans(static_cast<unsigned>(p.sequences.count * p.heads),
                   static_cast<unsigned>((channels + kParallelThreads - 1) / kParallelThreads));
  launcher.run(scans, parallel_gate_scan_kernel, dq, channels, d.dg, gate_parts);
  if (of_tokens) launch_gate_sums(p, gate_parts, tokens, 1, d.dg, launcher.stream);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

// The recurrent backward: operands, passes, and what turns their f32 results into gradients.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/recurrent/recurrent_backward.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kThreads = 256;
constexpr const char* kName = "gated_linear_attention backward by tokens";
using flashgla::cuda::Begin;

struct Token {
  std::int64_t batch, row;
};
__device__ Token token_at(const Sequences& s, std::int64_t token) {
  return s.cu_seqlens ? Token{0, token} : Token{token / s.length, token % s.length};
}

// Numerator's and denominator's gradients [tokens, H, V+1] from o_sums = (numerator, denominator) and do.
__global__ void normalizer_gradients(const __grid_constant__ Params p, const __grid_constant__ Operand d_o,
                                     const float* o_sums, float* d_sums, std::int64_t rows) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  const int heads = p.heads * p.group, head = static_cast<int>(row % heads);
  const Token t = token_at(p.sequences, row / heads);
  const float* sums = o_sums + row * (p.value_dim + 1);
  const float inverse = 1.0f / (sums[p.value_dim] + static_cast<float>(kNormalizerEpsilon));
  float dot = 0.0f;
  for (int v = 0; v < p.value_dim; ++v) {
    const float d = load_operand(d_o, t.batch, t.row, head, v) * inverse;
    d_sums[row * (p.value_dim + 1) + v] = d;
    dot = fmaf(d, sums[v] * inverse, dot);
  }
  d_sums[row * (p.value_dim + 1) + p.value_dim] = -dot;
}

// Gradient of q, k or v [tokens, heads, channels] from parts [tokens, heads * group, stride], added over the group;
// through the feature map's slope at `input`.
__global__ void finish_gradient(const __grid_constant__ Params p, const float* parts, int group, int heads,
                                int channels, int stride, float scale, const __grid_constant__ Strided input,
                                FeatureMap map, const __grid_constant__ Strided gradient, std::int64_t count) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int channel = static_cast<int>(at % channels), head = static_cast<int>(at / channels % heads);
  const std::int64_t token = at / channels / heads;
  const Token t = token_at(p.sequences, token);
  float sum = 0.0f;
  for (int h = 0; h < group; ++h) sum += parts[((token * heads + head) * group + h) * stride + channel];
  sum *= scale;
  if (map != FeatureMap::identity) {
    sum *= feature_slope(
        map, load_as(p.dtype, input.data, t.batch * input.batch + t.row * input.token + head * input.head + channel));
  }
  store_as(p.dtype, gradient.data, t.batch * gradient.batch + t.row * gradient.token + head * gradient.head + channel,
           sum);
}

// dh0 [N,G,K,V] and dz0 [N,G,K] from the ends [N, H, K, columns] of all heads.
__global__ void finish_state(const __grid_constant__ Params p, const float* ends, int columns, float* dh0, float* dz0,
                             std::int64_t count) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const std::int64_t column = at % columns, key = at / columns % p.key_dim, head = at / columns / p.key_dim;
  float sum = 0.0f;
  for (int h = 0; h < p.group; ++h) sum += ends[((head * p.group + h) * p.key_dim + key) * columns + column];
  if (column < p.value_dim) {
    if (dh0) dh0[(head * p.key_dim + key) * p.value_dim + column] = sum;
  } else if (dz0) {
    dz0[head * p.key_dim + key] = sum;
  }
}

// dg or dgv of the tokens up to a checkpoint, per head and channel: the suffix sum of left * d_left - right * d_right
// in float64, from the product of the states' h and dh at the checkpoint; 0 where the gate is shut. A thread walks one
// channel back through time.
struct GateScan {
  Operand left, right, gate;
  const float *d_left, *d_right;  // [tokens, H, d_stride]: every query head's
  int left_stride, right_stride;
  int channels;
  const float *h, *dh;  // [checkpoints, H, K, columns]
  int columns;
  bool over_values;  // channels are values
  Strided gradient;  // or, for scalar and constant gates, sums [tokens, G, channels]
  DType dtype;
  float* sums;
};
__global__ void scan_gates(const __grid_constant__ Params p, const __grid_constant__ GateScan s, std::int64_t count) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int channel = static_cast<int>(at % s.channels), head = static_cast<int>(at / s.channels % p.heads),
            heads = p.heads * p.group;
  const std::int64_t number = at / s.channels / p.heads;
  std::int64_t n = 0;  // the last sequence whose checkpoints begin at or before it
  for (std::int64_t high = p.sequences.count; high - n > 1;) {
    const std::int64_t middle = (n + high) / 2;
    (checkpoint_begin(p.sequences, middle) <= number ? n : high) = middle;
  }
  const Span span = span_of(p.sequences, n);
  const std::int64_t first = (number - checkpoint_begin(p.sequences, n)) * kCheckpoint;
  if (first >= span.length) return;
  const std::int64_t last = min(first + kCheckpoint, span.length) - 1;
  const std::int64_t token_base = p.sequences.cu_seqlens ? 0 : span.batch * p.sequences.length;
  double run = 0.0;
  for (int h = head * p.group; h < (head + 1) * p.group; ++h) {
    const int others = s.over_values ? p.key_dim : s.columns;
    for (int other = 0; other < others; ++other) {
      const int key = s.over_values ? other : channel, value = s.over_values ? channel : other;
      const std::int64_t place = ((number * heads + h) * p.key_dim + key) * s.columns + value;
      run += static_cast<double>(s.h[place]) * s.dh[place];
    }
  }
  // Several tokens at a time, so that their loads are under way together.
  constexpr int kAtOnce = 8;
  for (std::int64_t begin = span.begin + last; begin >= span.begin + first; begin -= kAtOnce) {
    const int tokens = static_cast<int>(min(static_cast<std::int64_t>(kAtOnce), begin - span.begin - first + 1));
    double terms[kAtOnce] = {};
    float gates[kAtOnce];
    for (int h = head * p.group; h < (head + 1) * p.group; ++h) {
      float left[kAtOnce], d_left[kAtOnce], right[kAtOnce], d_right[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::int64_t t = i < tokens ? begin - i : begin, row = (token_base + t) * heads + h;
        left[i] = load_operand(s.left, span.batch, t, h, channel);
        right[i] = load_operand(s.right, span.batch, t, h, channel);
        gates[i] = load_operand(s.gate, span.batch, t, head * p.group, channel);
        d_left[i] = s.d_left[row * s.left_stride + channel];
        d_right[i] = s.d_right[row * s.right_stride + channel];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        terms[i] += static_cast<double>(left[i]) * d_left[i];
        terms[i] -= static_cast<double>(right[i]) * d_right[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i >= tokens) break;
      run += terms[i];
      const std::int64_t t = begin - i;
      const float g = gates[i] == 0.0f ? 0.0f : static_cast<float>(run);
      if (s.sums) {
        s.sums[((token_base + t) * p.heads + head) * s.channels + channel] = g;
      } else {
        store_as(s.dtype, s.gradient.data,
                 span.batch * s.gradient.batch + t * s.gradient.token + head * s.gradient.head + channel, g);
      }
    }
  }
}

// Sums [rows, G, channels] over channels: [rows, G] (what launch_gate_sums goes on with, for one key tile).
__global__ void sum_channels(const float* sums, int channels, float* parts, std::int64_t count) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  double sum = 0.0;
  for (int c = 0; c < channels; ++c) sum += sums[at * channels + c];
  parts[at] = static_cast<float>(sum);
}

template <int kColumns>
void launch_by_tokens(const Params& p, const RecurrentPass& pass, cudaStream_t stream) {
  constexpr int rows = kPassWarps * kPassRows;
  const dim3 grid(static_cast<unsigned>(p.sequences.count * p.heads * p.group),
                  static_cast<unsigned>((pass.rows + rows - 1) / rows));
  flashgla::cuda::launch(kName, recurrent_pass_kernel<kColumns>, grid, kPassWarps * 32, pass_shared_bytes<kColumns>(),
                         stream, Begin::after_previous, p, pass);
}
void launch_by_tokens(const Params& p, const RecurrentPass& pass, cudaStream_t stream) {
  const int columns = (pass.columns + 31) / 32;
  if (columns <= 2) return launch_by_tokens<2>(p, pass, stream);
  if (columns <= 4) return launch_by_tokens<4>(p, pass, stream);
  if (columns <= 8) return launch_by_tokens<8>(p, pass, stream);
  launch_by_tokens<17>(p, pass, stream);  // 512 and the normaliser's
}

// A thread for each of `count`, the kernel's last argument.
template <class... Parameters, class... Arguments>
void launch_each(std::int64_t count, cudaStream_t stream, void (*kernel)(Parameters...),
                 const Arguments&... arguments) {
  if (count == 0) return;
  flashgla::cuda::launch(kName, kernel, dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), kThreads, 0,
                         stream, Begin::after_previous, arguments..., count);
}

}  // namespace

void recurrent_backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                        const OutputGradients& d_out, const InputGradients& d_in) {
  const ArenaScope scope(context.scratch());
  const Params p = make_params(problem, inputs, outputs);
  const std::int64_t tokens = p.sequences.tokens();
  const std::int64_t heads = problem.query_heads, K = problem.key_dim, V = problem.value_dim,
                     values = V + problem.normalize;
  const bool key_gates = static_cast<bool>(d_in.dg), value_gates = static_cast<bool>(d_in.dgv);
  const bool per_head = problem.gate == GateKind::scalar || problem.gate == GateKind::constant;
  const auto floats = [&](std::int64_t count, const char* label) { return take<float>(context, count * 4, label); };
  float* dq = floats(tokens * heads * K, "gla backward: f32 gradients");
  float* dk = floats(tokens * heads * K, "gla backward: f32 gradients");
  float* dv = floats(tokens * heads * values, "gla backward: f32 gradients");
  float* o = value_gates || problem.normalize ? floats(tokens * heads * values, "gla backward: f32 outputs") : nullptr;
  float* d_sums = problem.normalize ? floats(tokens * heads * values, "gla backward: f32 outputs") : nullptr;
  const std::int64_t checkpoints = problem.packed
                                       ? problem.length / kCheckpoint + problem.sequences
                                       : problem.sequences * ((problem.length + kCheckpoint - 1) / kCheckpoint);
  const std::int64_t kept = key_gates || value_gates ? checkpoints * heads * K * values : 0;
  float* h_kept = kept > 0 ? floats(kept, "gla backward: states") : nullptr;
  float* dh_kept = kept > 0 ? floats(kept, "gla backward: states") : nullptr;
  float* dh_ends = floats(p.sequences.count * heads * K * values, "gla backward: states");
  float* gate_sums = per_head && key_gates ? floats(tokens * p.heads * K, "gla backward: gate sums") : nullptr;
  float* gate_parts = per_head && key_gates ? floats(tokens * p.heads, "gla backward: gate sums") : nullptr;
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());

  const float scale = problem.normalize ? 1.0f : p.scale;
  const int group = p.group, key_width = static_cast<int>(K), value_width = static_cast<int>(V);
  const Operand q{.view = p.q, .dtype = p.dtype, .width = key_width, .map = p.feature_map, .scale = scale};
  const Operand k{.view = p.k, .dtype = p.dtype, .width = key_width, .heads_each = group, .map = p.feature_map};
  const Operand v{.view = p.v, .dtype = p.dtype, .width = value_width, .beyond = 1.0f, .heads_each = group};
  Operand d_o{.view = strided(d_out.d_o), .dtype = p.dtype, .width = value_width};
  const bool wide = problem.gate == GateKind::key || problem.gate == GateKind::key_value;
  const Operand g{.view = p.g,
                  .dtype = p.gate_dtype,
                  .width = key_width,
                  .beyond = 1.0f,
                  .heads_each = group,
                  .channel_step = wide,
                  .gate = true};
  const Operand gv{
      .view = p.gv, .dtype = p.gate_dtype, .width = value_width, .beyond = 1.0f, .heads_each = group, .gate = true};
  const auto* h0 = static_cast<const float*>(p.h0);
  const auto* z0 = problem.normalize ? static_cast<const float*>(p.z0) : nullptr;
  const auto* d_ht = static_cast<const float*>(d_out.d_ht.data);
  const auto* d_zt = problem.normalize ? static_cast<const float*>(d_out.d_zt.data) : nullptr;
  const int columns = static_cast<int>(values);
  const auto launch = [&](const RecurrentPass& pass) { launch_by_tokens(p, pass, stream); };

  if (o) launch({v, gv, k, q, g, columns, key_width, false, h0, z0, true, false, o, nullptr, nullptr});
  if (problem.normalize) {
    launch_each(tokens * heads, stream, normalizer_gradients, p, d_o, o, d_sums);
    const std::int64_t token_stride = heads * values;
    d_o = {.view = {d_sums, p.sequences.length * token_stride, token_stride, values},
           .dtype = DType::f32,
           .width = columns};
  }
  launch({k, g, v, d_o, gv, key_width, columns, false, h0, z0, false, false, dq, nullptr, h_kept});
  launch({q, g, d_o, v, gv, key_width, columns, true, d_ht, d_zt, false, true, dk, dh_ends, dh_kept});
  if (d_in.dv || value_gates)
    launch({d_o, gv, q, k, g, columns, key_width, true, d_ht, d_zt, true, true, dv, nullptr, nullptr});

  auto finish = [&](const TensorView& gradient, const float* parts, int of, int in_heads, int channels, int stride,
                    float factor, const Strided& input, FeatureMap map) {
    if (!gradient) return;
    launch_each(tokens * in_heads * channels, stream, finish_gradient, p, parts, of, in_heads, channels, stride, factor,
                input, map, strided(gradient));
  };
  finish(d_in.dq, dq, 1, p.heads * group, key_width, key_width, scale, p.q, p.feature_map);
  finish(d_in.dk, dk, group, p.heads, key_width, key_width, 1.0f, p.k, p.feature_map);
  finish(d_in.dv, dv, group, p.heads, value_width, columns, 1.0f, p.v, FeatureMap::identity);
  if (d_in.dh0 || d_in.dz0) {
    launch_each(p.sequences.count * p.heads * K * values, stream, finish_state, p, dh_ends, columns,
                static_cast<float*>(d_in.dh0.data), static_cast<float*>(d_in.dz0.data));
  }
  auto scan = [&](const GateScan& s) { launch_each(checkpoints * p.heads * s.channels, stream, scan_gates, p, s); };
  if (key_gates) {
    // q comes scaled and dq without the scale: the product has it once.
    scan({q, k, g, dq, dk, key_width, key_width, key_width, h_kept, dh_kept, columns, false,
          per_head ? Strided{} : strided(d_in.dg), p.gate_dtype, gate_sums});
    if (per_head) {
      launch_each(tokens * p.heads, stream, sum_channels, gate_sums, key_width, gate_parts);
      const Strided dg = strided_gate(problem.gate, d_in.dg);
      launch_gate_sums(p, gate_parts, tokens, 1, dg, stream);
    }
  }
  if (value_gates) {
    scan({d_o, v, gv, o, dv, columns, columns, value_width, h_kept, dh_kept, columns, true, strided(d_in.dgv),
          p.gate_dtype, nullptr});
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

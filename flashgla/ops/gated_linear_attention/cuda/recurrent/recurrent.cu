// Forward and backward token by token: operands, passes, and what turns their f32 results into outputs and gradients.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/recurrent/recurrent.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kThreads = 256;
constexpr const char* kName = "gated_linear_attention by tokens";
using flashgla::cuda::Begin;

struct Token {
  std::int64_t batch, row;
  // Where a channel of a head of it lies.
  __device__ std::int64_t offset(const Strided& x, std::int64_t head, int channel) const {
    return batch * x.batch + row * x.token + head * x.head + channel;
  }
};
__device__ Token token_at(const Sequences& s, std::int64_t token) {
  return s.cu_seqlens ? Token{0, token} : Token{token / s.length, token % s.length};
}

// o from o_sums = (numerator, denominator) [tokens, H, V+1].
__global__ void normalized_outputs(const __grid_constant__ Params p, const float* o_sums, std::int64_t count) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int heads = p.heads * p.group, channel = static_cast<int>(at % p.value_dim);
  const std::int64_t row = at / p.value_dim, head = row % heads;
  const Token t = token_at(p.sequences, row / heads);
  const float* sums = o_sums + row * (p.value_dim + 1);
  store_as(p.dtype, p.o.data, t.offset(p.o, head, channel),
           sums[channel] / (sums[p.value_dim] + static_cast<float>(kNormalizerEpsilon)));
}

// Numerator's and denominator's gradients [tokens, H, V+1] from o_sums and do.
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
    const float d = d_o.value(d_o.load(t.batch, t.row, head, 0, v), v) * inverse;
    d_sums[row * (p.value_dim + 1) + v] = d;
    dot = fmaf(d, sums[v] * inverse, dot);
  }
  d_sums[row * (p.value_dim + 1) + p.value_dim] = -dot;
}

// Gradient of x, which is q, k or v, from that of every query head's x as the passes read it, parts [tokens, H,
// stride]: added over the group where x has key-value heads, through the scale and the feature map's slope.
__global__ void finish_gradient(const __grid_constant__ Params p, const float* parts, int stride,
                                const __grid_constant__ Operand x, const __grid_constant__ Strided gradient,
                                std::int64_t count) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int heads = x.of_queries ? p.heads * p.group : p.heads, group = x.of_queries ? 1 : p.group;
  const int channel = static_cast<int>(at % x.width), head = static_cast<int>(at / x.width % heads);
  const std::int64_t token = at / x.width / heads;
  const Token t = token_at(p.sequences, token);
  float sum = 0.0f;
  for (int h = 0; h < group; ++h) sum += parts[((token * heads + head) * group + h) * stride + channel];
  sum *= x.scale;
  if (x.map != FeatureMap::identity) {
    sum *= feature_slope(x.map, load_as(p.dtype, x.view.data, t.offset(x.view, head, channel)));
  }
  store_as(p.dtype, gradient.data, t.offset(gradient, head, channel), sum);
}

// dh0 [N,G,K,V] and dz0 [N,G,K] from the ends [N, H, columns, K] of all heads.
__global__ void finish_state(const __grid_constant__ Params p, const float* ends, int columns, float* dh0, float* dz0,
                             std::int64_t count) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const std::int64_t column = at % columns, key = at / columns % p.key_dim, head = at / columns / p.key_dim;
  float sum = 0.0f;
  for (int h = 0; h < p.group; ++h) sum += ends[((head * p.group + h) * columns + column) * p.key_dim + key];
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
  const float *h, *dh;  // [checkpoints, H, columns, K]
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
      const std::int64_t place = ((number * heads + h) * s.columns + value) * p.key_dim + key;
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
        const auto read = [&](const Operand& x) { return x.value(x.load(span.batch, t, h, head, channel), channel); };
        left[i] = read(s.left);
        right[i] = read(s.right);
        gates[i] = read(s.gate);
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
        store_as(s.dtype, s.gradient.data, Token{span.batch, t}.offset(s.gradient, head, channel), g);
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

template <int R, bool backwards>
void launch_pass(const Params& p, const RecurrentPass& pass, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.sequences.count * p.heads * p.group),
                  static_cast<unsigned>((pass.rows + kPassRows - 1) / kPassRows));
  flashgla::cuda::launch(kName, recurrent_kernel<R, backwards>, grid, kPassThreads, pass_shared_bytes<R>(), stream,
                         Begin::after_previous, p, pass);
}
template <bool backwards>
void launch_pass(const Params& p, const RecurrentPass& pass, cudaStream_t stream) {
  const int columns = (pass.columns + kPassWarps - 1) / kPassWarps;
  if (columns <= 8) return launch_pass<8, backwards>(p, pass, stream);
  if (columns <= 16) return launch_pass<16, backwards>(p, pass, stream);
  if (columns <= 32) return launch_pass<32, backwards>(p, pass, stream);
  if (columns <= 64) return launch_pass<64, backwards>(p, pass, stream);
  launch_pass<72, backwards>(p, pass, stream);  // 512 and the normaliser's
}

// A thread for each of `count`, the kernel's last argument.
template <class... Parameters, class... Arguments>
void launch_each(std::int64_t count, cudaStream_t stream, void (*kernel)(Parameters...),
                 const Arguments&... arguments) {
  if (count == 0) return;
  flashgla::cuda::launch(kName, kernel, dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), kThreads, 0,
                         stream, Begin::after_previous, arguments..., count);
}

// What the passes read of a call, each head's as often as query heads share it.
struct Operands {
  Operand q, k, v, g, gv;

  explicit Operands(const Params& p)
      : q{.view = p.q,
          .dtype = p.dtype,
          .width = p.key_dim,
          .of_queries = true,
          .map = p.feature_map,
          .scale = p.normalize ? 1.0f : p.scale},
        k{.view = p.k, .dtype = p.dtype, .width = p.key_dim, .map = p.feature_map},
        v{.view = p.v, .dtype = p.dtype, .width = p.value_dim, .beyond = 1.0f},
        g{.view = p.g,
          .dtype = p.gate_dtype,
          .width = p.key_dim,
          .beyond = 1.0f,
          .channel_step = p.gate == GateKind::key || p.gate == GateKind::key_value,
          .gate = true},
        gv{.view = p.gv, .dtype = p.gate_dtype, .width = p.value_dim, .beyond = 1.0f, .gate = true} {}
};

// What a state begins with: element (r, c) as RecurrentPass::start has it, and its extra channel.
struct Start {
  const void *state, *extra;
  bool in_first_head = false;
};
// The recurrence of x, y and z, whose rows are values or keys, to `out`.
RecurrentPass pass_of(const Params& p, const Operands& of, const Operand& x, const Operand& y, const Operand& z,
                      bool rows_are_values, const Start& start, float* out) {
  const int values = p.value_dim + p.normalize;
  return {.x = x,
          .row_gate = rows_are_values ? of.gv : of.g,
          .y = y,
          .z = z,
          .column_gate = rows_are_values ? of.g : of.gv,
          .rows = rows_are_values ? values : p.key_dim,
          .columns = rows_are_values ? p.key_dim : values,
          .start = static_cast<const float*>(start.state),
          .start_extra = static_cast<const float*>(start.extra),
          .rows_are_values = rows_are_values,
          .start_in_first_head = start.in_first_head,
          .out = out};
}
// The sums that o is, or with a normaliser numerators and denominators.
RecurrentPass output_pass(const Params& p, const Operands& of, float* out) {
  return pass_of(p, of, of.v, of.k, of.q, true, {p.h0, p.z0}, out);
}

}  // namespace

void recurrent_forward(Context& context, const Params& p) {
  const ArenaScope scope(context.scratch());
  const std::int64_t rows = p.sequences.tokens() * p.heads * p.group;
  float* const sums =
      p.normalize ? take<float>(context, rows * (p.value_dim + 1) * 4, "gla forward: f32 outputs") : nullptr;
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  RecurrentPass pass = output_pass(p, Operands(p), sums);
  pass.is_forward = true;
  launch_pass<false>(p, pass, stream);
  if (p.normalize) launch_each(rows * p.value_dim, stream, normalized_outputs, p, sums);
}

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

  const Operands of(p);
  const int columns = static_cast<int>(values);
  Operand d_o{.view = strided(d_out.d_o), .dtype = p.dtype, .width = p.value_dim, .of_queries = true};
  if (o) launch_pass<false>(p, output_pass(p, of, o), stream);
  if (problem.normalize) {
    launch_each(tokens * heads, stream, normalizer_gradients, p, d_o, o, d_sums);
    const std::int64_t token_stride = heads * values;
    d_o = {.view = {d_sums, p.sequences.length * token_stride, token_stride, values},
           .dtype = DType::f32,
           .width = columns,
           .of_queries = true};
  }
  RecurrentPass of_queries = pass_of(p, of, of.k, of.v, d_o, false, {p.h0, p.z0}, dq);
  of_queries.checkpoints = h_kept;
  launch_pass<false>(p, of_queries, stream);
  const Start at_end{d_out.d_ht.data, d_out.d_zt.data, true};
  RecurrentPass of_keys = pass_of(p, of, of.q, d_o, of.v, false, at_end, dk);
  of_keys.end = dh_ends;
  of_keys.checkpoints = dh_kept;
  launch_pass<true>(p, of_keys, stream);
  if (d_in.dv || value_gates) launch_pass<true>(p, pass_of(p, of, d_o, of.q, of.k, true, at_end, dv), stream);

  const auto finish = [&](const TensorView& gradient, const float* parts, int stride, const Operand& x) {
    if (gradient) {
      launch_each(gradient.numel(), stream, finish_gradient, p, parts, stride, x, strided(gradient));
    }
  };
  finish(d_in.dq, dq, p.key_dim, of.q);
  finish(d_in.dk, dk, p.key_dim, of.k);
  finish(d_in.dv, dv, columns, of.v);
  if (d_in.dh0 || d_in.dz0) {
    launch_each(p.sequences.count * p.heads * K * values, stream, finish_state, p, dh_ends, columns,
                static_cast<float*>(d_in.dh0.data), static_cast<float*>(d_in.dz0.data));
  }
  auto scan = [&](const GateScan& s) { launch_each(checkpoints * p.heads * s.channels, stream, scan_gates, p, s); };
  if (key_gates) {
    // q comes scaled and dq without the scale: the product has it once.
    scan({of.q, of.k, of.g, dq, dk, p.key_dim, p.key_dim, p.key_dim, h_kept, dh_kept, columns, false,
          per_head ? Strided{} : strided(d_in.dg), p.gate_dtype, gate_sums});
    if (per_head) {
      launch_each(tokens * p.heads, stream, sum_channels, gate_sums, p.key_dim, gate_parts);
      launch_gate_sums(p, gate_parts, tokens, 1, strided_gate(problem.gate, d_in.dg), stream);
    }
  }
  if (value_gates) {
    scan({d_o, of.v, of.gv, o, dv, columns, columns, p.value_dim, h_kept, dh_kept, columns, true, strided(d_in.dgv),
          p.gate_dtype, nullptr});
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

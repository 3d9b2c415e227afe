// Gated linear attention: the operator, its gradient and its decoding step.
// Yang et al. 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4.
//
// For each sequence n, and each key-value head with its query heads:
//
//     h_t = (exp(g_t) exp(gv_t)^T) * h_{t-1} + phi(k_t) v_t^T            h in R^{K x V}
//     o_t = scale * phi(q_t)^T h_t                                        (eq. 3 and section 4.1)
//
// with natural-log gates g_t, gv_t in [-inf, 0]; -inf is a legal hard reset. With `normalize` (plain linear
// attention only): z_t = z_{t-1} + phi(k_t), o_t = phi(q_t)^T h_t / (phi(q_t) . z_t + kNormalizerEpsilon).
//
// Shapes (B batch, T length, H query heads, G key-value heads with H % G == 0, K key and V value channels per head,
// N sequences: B, or cu_seqlens' when packed):
//     q [B,T,H,K]   k [B,T,G,K]   v, gv [B,T,G,V]   o [B,T,H,V]   h0, ht [N,G,K,V]   z0, zt [N,G,K]
//     g: absent | constant [G] | scalar [B,T,G] | key [B,T,G,K]
// Query heads of one group are consecutive and share k, v, the gates and so the state.
// dtypes: q, k, v, o one of f64, f32, bf16, f16; g and gv either that dtype or f32 (f64 with f64); states f32 (f64
// with f64). Any strides, except that the last dimension of q, k, v, o, gv and key gates is contiguous, and states
// are wholly contiguous.
#pragma once

#include <cstdint>
#include <string_view>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"
#include "flashgla/ops/gated_linear_attention/problem.h"

namespace flashgla::ops::gated_linear_attention {

const char* name_of(GateKind gate);
const char* name_of(Algorithm algorithm);
const char* name_of(FeatureMap feature_map);
// Inverses; throw Error that lists the known names.
GateKind gate_kind_from_name(std::string_view name);
Algorithm algorithm_from_name(std::string_view name);
FeatureMap feature_map_from_name(std::string_view name);

struct Options {
  double scale = 0.0;  // 0 stands for K^-1/2
  Algorithm algorithm = Algorithm::automatic;
  FeatureMap feature_map = FeatureMap::identity;
  bool normalize = false;
  Float32Math float32_math = Float32Math::ieee;
  // Above 0: g and gv are logits x, whose log gates are log(sigmoid(x)) / gate_logit_normalizer, no less than
  // gate_clamp_min; dg and dgv then are gradients of x. 0: they are the log gates. Not with a constant gate.
  double gate_logit_normalizer = 0.0;
  double gate_clamp_min = kNoClamp;
  // q and k are the same for all heads (stride 0), and dq and dk, of stride 0 too, are sums over the heads. Only where
  // sums_over_heads() says so. Like every option the same for a backward as for its forward.
  bool sums_over_heads = false;
  // With cu_seqlens: tokens of the longest sequence, where the caller knows it; 0: unknown. On CUDA, where the host
  // does not see cu_seqlens, what is fastest is chosen by it; results are right whatever it is. A forward's
  // states are laid out by it.
  std::int64_t max_seqlen = 0;
};

struct Inputs {
  TensorView q, k, v;
  TensorView g;           // absent: no gate over keys; the rank tells the kind (logits: gate_logit_normalizer)
  TensorView gv;          // absent, or [B,T,G,V]; then g is a key gate or absent (read as zeros)
  TensorView h0;          // absent: zeros
  TensorView z0;          // only with normalize; absent: zeros
  TensorView cu_seqlens;  // absent, or i32/i64 [N+1] on the CPU side of the call: 0 = c_0 <= c_1 <= ... <= c_N = T.
                          // On CUDA it lives on the device and only its shape is validated.
};

struct Outputs {
  TensorView o;
  TensorView ht;      // absent: not wanted
  TensorView zt;      // only with normalize; absent: not wanted
  TensorView states;  // u8 [states_bytes(problem)]: what forward leaves for backward. Absent: inference, or backward
                      // recomputes. Opaque; valid only for the implementation and problem that wrote it.
};

struct OutputGradients {
  TensorView d_o;   // [B,T,H,V]
  TensorView d_ht;  // absent: zero
  TensorView d_zt;  // absent: zero
};

// Wanted gradients; an absent view is not computed. dtypes and shapes as the inputs; dg of a constant gate is f32 [G]
// (f64 with f64).
struct InputGradients {
  TensorView dq, dk, dv, dg, dgv, dh0, dz0;
};

// Validates and describes; throws Error naming the argument.
Problem describe(const Inputs& inputs, const Options& options);

// Whether there is an implementation that takes Options::sums_over_heads for these inputs.
bool sums_over_heads(const Context& context, const Inputs& inputs, const Options& options);

// Bytes of Outputs.states for this problem; 0 when the selected implementation keeps none.
std::size_t states_bytes(const Context& context, const Problem& problem);
// The same on a device of this architecture, which need not be there.
std::size_t states_bytes(const Architecture& architecture, const Problem& problem);

// Workspace is taken from context.scratch() and given back. Every element of the outputs is written.
void forward(Context& context, const Inputs& inputs, const Outputs& outputs, const Options& options = {});

// `outputs` as forward wrote them: o is read where normalize or gv need it, states if
// present; ht is not.
void backward(Context& context, const Inputs& inputs, const Outputs& outputs, const OutputGradients& output_gradients,
              const InputGradients& input_gradients, const Options& options = {});

// Logits of a key gate as a product, where a step computes them itself: x [B,R] of q's dtype, weight [G K,R]
// contiguous, bias [G K] or absent, both in parameters' dtypes (ops/arguments.h): logits = x weight^T + bias.
struct GateProjection {
  TensorView x, weight, bias;
};
struct StepInputs {
  TensorView q, k, v, g, gv;
  GateProjection projection = {};  // weight absent: none. Else in g's place and with gate_logit_normalizer; no gv
};
// Whether step computes the gate of inputs.projection beside states like h; else it is to be given log gates instead.
bool step_projects(const Context& context, const StepInputs& inputs, const TensorView& h, const Options& options);
// One token for each of B sequences: q [B,H,K], k [B,G,K], v [B,G,V], o [B,H,V]; g [G], [B,G] or [B,G,K]; gv [B,G,V].
// h [B,G,K,V] (and z [B,G,K] with normalize) are updated in place; f32, or bf16 on request (f64 with f64).
void step(Context& context, const StepInputs& inputs, const TensorView& h, const TensorView& z, const TensorView& o,
          const Options& options = {});

}  // namespace flashgla::ops::gated_linear_attention

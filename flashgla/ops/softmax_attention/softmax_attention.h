// Causal softmax attention: the operator, its gradient, its cache and its decoding step.
// Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; heads that share keys and values: Ainslie et al.
// 2023, "GQA"; windows: Jiang et al. 2023, "Mistral 7B".
//
// For token i of a sequence (counted from the sequence's own first token) and each query head:
//
//     p_ij = softmax over j of scale q_i . k_j,    i - W < j <= i     (all j <= i without a window)
//     o_i  = sum_j p_ij v_j,    lse_i = ln sum_j exp(scale q_i . k_j)
//
// The W newest keys, the token's own among them. A call may hold the newest tokens of a sequence only: then the keys
// and values of earlier ones are its past, a cache of P rows in which token j lies in row j mod P, and `positions` says
// how many tokens there were. With P >= W, or P no less than the tokens there are, nothing that is needed is ever
// overwritten.
//
// Shapes (B batch, T length, H query heads, G key-value heads with H % G == 0, N sequences: B, or cu_seqlens'):
//     q [B,T,H,K]   k [B,T,G,K]   v [B,T,G,V]   o [B,T,H,V]   lse [B,T,H]   past_k [N,P,G,K]   past_v [N,P,G,V]
// Query heads of one group are consecutive. dtypes: q, k, v, o one of f64, f32, bf16, f16; past one of the same two
// floating types each, lse f32 (f64 with f64); arithmetic in f32 (f64 with f64). Any strides, except that the last
// dimension is contiguous; caches and lse wholly. Throw Error naming the argument.
#pragma once

#include <cstdint>
#include <span>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"
#include "flashgla/ops/dropout/dropout.h"

namespace flashgla::ops::softmax_attention {

struct Options {
  double scale = 0.0;       // 0 stands for K^-1/2
  std::int64_t window = 0;  // W; 0: none
  // Of the probabilities p_ij, after their softmax: o_i = sum_j m_ij p_ij v_j / (1 - dropout.probability). Element ((b
  // T + i) H + h) * 8 ceil((T + P) / 8) + c of the mask is that of token i of row b, head h and key c: token c of the
  // row, or row c - T of its past.
  dropout::Mask dropout{};
  // Forward: it is a step's of a training that has many of this shape, whether a backward reads this very call or one
  // that repeats it. A library that takes long to prepare a shape is then worth it. A backward always is.
  bool training = false;
};

struct Inputs {
  TensorView q, k, v;
  TensorView past_k, past_v;  // absent: the sequences begin with this call
  TensorView positions;       // i32 [N] with past, each row of the cache that is needed filled; else absent
  TensorView cu_seqlens;      // absent, or i32 [N+1] when packed: 0 = c_0 <= ... <= c_N = T; then B = 1
};

struct Outputs {
  TensorView o;
  TensorView lse;  // for backward; absent: not wanted
};

struct InputGradients {
  TensorView dq, dk, dv;  // overwritten; the past gets none
};

void forward(Context& context, const Inputs& inputs, const Outputs& outputs, const Options& options);

// o and lse as forward wrote them.
void backward(Context& context, const Inputs& inputs, const Outputs& outputs, const TensorView& d_o,
              const InputGradients& gradients, const Options& options);

// Row j mod P of cache [N,P,G,K] becomes token j's keys (or values), for the tokens x [B,T,G,K] of a call; converted to
// the cache's dtype. `before` absent or the same memory: other rows stay. Else they become those of `before`.
struct Appended {
  TensorView x, before, cache;
};
void append(Context& context, std::span<const Appended> tensors, const TensorView& positions,
            const TensorView& cu_seqlens);

// One token for each of N sequences: q [N,H,K], o [N,H,V]; positions the tokens before it. Its key [N,G,K] and value
// [N,G,V] are put into the caches, as append would; absent, the caches hold them already.
struct Token {
  TensorView k, v;
  // The kernels that the stream still runs write neither caches nor positions, so that a step may begin to read them
  // before those have ended.
  bool settled = false;
};
void step(Context& context, const TensorView& q, const Token& token, const TensorView& k_cache,
          const TensorView& v_cache, const TensorView& positions, const TensorView& o, const Options& options);

// Of one query head and token of a sequence of `length`, mean over the sequence: products with the keys and values that
// it sees. Forward 2 (K + V) a key, forward and backward 3.5 times that (five products of the two of forward's size).
double mean_keys(double length, double window);
double forward_flops(double key_dim, double value_dim, double length, double window);
double training_flops(double key_dim, double value_dim, double length, double window);

}  // namespace flashgla::ops::softmax_attention

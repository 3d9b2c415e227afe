// A linear layer of a decoding step: few rows, so bound by the bytes of its weights, with what lies before and after it
// fused in where a device gains by that.
//
//     u = P(x)                                    the prologue, for each row n
//         none          u = x
//         rms_norm      u = x / sqrt(mean_i(x_i^2) + epsilon) * norm_weight
//         head_norm     the same for each head of head_size channels apart, then times gate sigmoid(gate) where there
//                       is a gate
//     a[n,o] = sum_i weight[o,i] u[n,i] + bias[o]
//     y = E(a)                                    the epilogue
//         store         y[n,o] = a[n,o]; a layer's first `turned` columns are heads that rotary position embedding then
//                       turns (ops/rotary), a sequence a row
//         add           y[n,o] += a[n,o]
//         swiglu        y[n,o] = a[n,o] sigmoid(a[n,o]) a[n,O+o]      weight [2O,I]: gate rows, then up rows
//         log_sigmoid   y[n,o] = max(log sigmoid(a[n,o]) / normalizer, clamp_min)    natural log
//
// Shapes: x, gate [N,I]; norm_weight [I], or [head_size]; weight [O,I] ([2O,I] with swiglu) contiguous, bias [O], y
// [N,O]; last dimensions contiguous. dtypes: x, gate, y f32 beside weights in f32 or bf16, or all of these bf16 (u is
// then rounded to bf16 too; what is stored may be f32), or f64; norm_weight and bias f32 or bf16 (f64 with f64);
// weights beside f32, on a GPU beside bf16 too, may also be packed ones of 8 or 4 bits (quantised_linear.h), each
// layer's by itself. Sums in f32 (f64 with f64), in an order that does not depend on N: a sequence's values do not
// depend on its neighbours. No y overlaps x, gate or another y. Throw Error naming the argument.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::linear_step {

enum class Prologue : std::uint8_t { none, rms_norm, head_norm };
enum class Epilogue : std::uint8_t { store, add, swiglu, log_sigmoid };

struct Inputs {
  TensorView x;
  Prologue prologue = Prologue::none;
  TensorView norm_weight;  // absent: ones
  double epsilon = 1e-6;
  std::int64_t head_size = 0;  // of head_norm
  TensorView gate;             // of head_norm; absent: no gate
};

// One of the layers that read the same u.
struct Layer {
  TensorView weight;
  TensorView bias;  // absent: none; not with swiglu
  TensorView y;
  std::int64_t turned = 0;  // columns, whole heads; with store alone
};

// Of heads of head_size channels, even; row n has positions[n] tokens before it (i32 [N]; absent: zeros).
struct Rotary {
  double base = 0.0;
  std::int64_t head_size = 0;
  TensorView positions;
};

struct Options {
  Epilogue epilogue = Epilogue::store;
  double normalizer = 16.0;                                     // of log_sigmoid
  double clamp_min = -std::numeric_limits<double>::infinity();  // of log_sigmoid
  Rotary rotary{};                                              // of what layers have turned
};

constexpr std::size_t kMostLayers = 8;

// layers: one to kMostLayers.
void run(Context& context, const Inputs& inputs, std::span<const Layer> layers, const Options& options = {});

// Has the first `columns` turned of layers whose outputs lie side by side.
void turn_first(std::span<Layer> layers, std::int64_t columns);

}  // namespace flashgla::ops::linear_step

// Lower bounds of gates that rise from layer to layer, learned for all layers together. Qin et al. 2024, "HGRN2", after
// Qin et al. 2023, "Hierarchically Gated Recurrent Neural Network", section 3.4.
//
//     bound_d = sum_{j = 1 .. layer} p_jd,   p_jd = e^{w_jd} / sum_i e^{w_id}         0 in layer 0
//
// Shapes: w, dw [layers, D] contiguous; bound, dbound [D] contiguous. dtypes: w one of f64, f32, bf16, f16; the others
// f32 (f64 with f64). Arithmetic in f32 (f64 with f64). Throw Error naming the argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::lower_bounds {

// layer: 1 to layers - 1.
void forward(Context& context, const TensorView& w, std::int64_t layer, const TensorView& bound);

// dw_jd += dbound_d p_jd ([1 <= j <= layer] - bound_d).
void backward(Context& context, const TensorView& w, std::int64_t layer, const TensorView& dbound,
              const TensorView& dw);

}  // namespace flashgla::ops::lower_bounds

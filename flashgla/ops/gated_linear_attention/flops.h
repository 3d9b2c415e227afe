// Model FLOPs of one token of one query head with K key and V value channels, whatever an implementation computes
// again. The chunkwise form (arXiv:2312.06635, section 4) with chunks of C tokens: the state costs 2KV to read and 2KV
// to update, the tokens of the same chunk 2C(K + V).
#pragma once

namespace flashgla::ops::gated_linear_attention {

// Chunk of the formulas, whatever an implementation uses, so that figures compare.
constexpr double kFormulaChunk = 64.0;

// 4KV + 2C(K + V).
constexpr double forward_flops(double K, double V) { return 4.0 * K * V + 2.0 * kFormulaChunk * (K + V); }

// Forward and backward: 12KV + 2C(4K + 3V).
constexpr double training_flops(double K, double V) { return 12.0 * K * V + 2.0 * kFormulaChunk * (4.0 * K + 3.0 * V); }

// A step of decoding: 4KV.
constexpr double step_flops(double K, double V) { return 4.0 * K * V; }

}  // namespace flashgla::ops::gated_linear_attention

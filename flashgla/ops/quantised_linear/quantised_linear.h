// Linear layers whose weights have 8 or 4 bits.
//
//     y[m,n] = (accumulate ? y[m,n] : addend[m,n]) + sum_k x[m,k] w[n,k] + bias[n]
//     w[n,k] = scale[n,k/32] value(code[n,k])
//
// A matrix [N,K] is a u8 tensor [panels, groups, block]: a panel has 16 rows and a group 32 columns (both padded with
// zeros at the end), and a block of 544 bytes (q8) or 288 (q4) is
//
//     16 scales f16, one a row | codes: of q8 512 bytes, byte 64 (c / 4) + 4 r + c % 4 for row r and column c, value
//     code - 128; of q4 256 bytes, the low halves those of columns 0 to 15 and the high ones those of 16 to 31, at byte
//     64 (c % 16 / 4) + 4 r + c % 4, value kValuesOfQ4[code]
//
// so that whatever has lanes of 32 bits has a row in each, and a matrix is read from its first byte to its last.
// The numbers are those of ggml's Q8_0 and IQ4_NL in another order.
//
// Results: with up to 16 rows of x, and with AVX-512 any number, each group of x becomes 16-bit integers with one f32
// scale (the largest magnitude is 32639), products within a group are summed exactly, and groups are added in f32 in
// the order of the columns. The same bits on every instruction set, for any number of threads, and whatever the other
// rows are. Else more rows are multiplied in f32. On a GPU the weights become floats of x's dtype, f32 or bf16, in
// memory or, beside few rows of bf16, in registers; decoding steps of few rows there have integers (ops/linear_step).
// Throws Error naming the argument.
#pragma once

#include <array>
#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"
#include "flashgla/ops/matmul/matmul.h"

namespace flashgla::ops::quantised_linear {

enum class Format : std::uint8_t { q8, q4 };

constexpr std::int64_t kPanelRows = 16, kGroup = 32, kScaleBytes = 32;
// Of x's integers: the largest magnitude, 127 * 257, both halves of which are whole signed bytes; and what a group's
// numbers are below where they count as zero, since the reciprocal would overflow.
constexpr float kLargestInteger = 32639.0f, kNothing = 1e-33f;
constexpr std::array<std::int8_t, 16> kValuesOfQ4 = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                     1,    13,   25,  38,  53,  69,  89,  113};

const char* name_of(Format format);  // "q8"
constexpr std::int64_t block_bytes(Format format) { return kScaleBytes + kPanelRows * kGroup / (1 + int(format)); }

// Of the u8 tensor that holds a matrix [rows, columns].
Shape packed_shape(Format format, std::int64_t rows, std::int64_t columns);
// Whether a tensor is such a matrix, and in which format.
bool is_packed(const TensorView& weight);
Format format_of(const TensorView& weight);

using matmul::Options;  // bias: absent, or f32 or bf16 [N], contiguous

// x [M,K], y [M,N] f32 (f64 for the reference; on a GPU also x bf16, y bf16 or f32), last dimensions contiguous; weight
// as above. y overlaps nothing.
void run(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
         const Options& options = {});

// As run, or matmul where the weight is no packed one but floats [N,K].
void multiply(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
              const Options& options = {});

// y[r,:] = w[tokens[r],:]: tokens i32 contiguous, each in [0, rows), others are refused, or on a GPU give NaN; y f32
// (on a GPU f32 or bf16) [...,K], last dimension contiguous.
void look_up(Context& context, const TensorView& tokens, const TensorView& weight, std::int64_t rows,
             const TensorView& y);

// Rows of the matrix from `first` on, as many as `values` [rows,K] has: f32, bf16 or, on the CPU, f64, contiguous.
void decode(Context& context, const TensorView& weight, std::int64_t first, const TensorView& values);

}  // namespace flashgla::ops::quantised_linear

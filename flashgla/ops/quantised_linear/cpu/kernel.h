// What an instruction set gives to the products of few rows: kernel_inl.h, compiled for it.
#pragma once

#include <cstdint>

#include "flashgla/ops/quantised_linear/implementations.h"

namespace flashgla::ops::quantised_linear {

constexpr std::int64_t kCodeBytes = 2 * kGroup;  // of a group of x

// Rows of x as 16-bit integers: x[m,k] = scales[m,g] code, in an order that each instruction set has for itself.
struct Activations {
  std::uint8_t* codes;    // [M, groups, kCodeBytes]
  std::int32_t* offsets;  // [M, groups]: -128 sum of the group's codes, which weights' codes above 0 ask for
  float* scales;          // [M, groups]
};

struct Call {
  Format format;
  const std::uint8_t* weight;
  std::int64_t groups;
  Activations x;
  TensorView y;
  Options options;

  std::int64_t panel_bytes() const { return groups * block_bytes(format); }
};

struct Kernel {
  // A row of x, `count` columns of it, padded with zeros to whole groups.
  void (*encode)(const float* x, std::int64_t count, std::int64_t groups, const Activations& to);
  // Rows [16 begin, 16 end) of the weight by all rows of x.
  void (*multiply)(const Call& call, std::int64_t begin, std::int64_t end);
  // A panel as f32: out[k * stride + r] for all columns of its groups.
  void (*decode)(Format format, const std::uint8_t* panel, std::int64_t groups, float* out, std::int64_t stride);
};

extern const Kernel kVnniKernel, kAvx512Kernel, kAvx2Kernel;  // on x86-64
extern const Kernel kPortableKernel;

// Of the implementation that is taken for few rows.
const Kernel& kernel_of_few_rows(const Context& context);

// Room for the integers of x [M,K], and these.
Activations take_activations(Arena& scratch, std::int64_t rows, std::int64_t groups);
void encode(Context& context, const TensorView& x, std::int64_t groups, const Kernel& kernel, const Activations& to);

// x times the weight by a kernel, on all threads.
void run_packed(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
                const Options& options, const Kernel& kernel);

// Whether the processor and the system have these instruction sets.
bool has_vnni();
bool has_avx512();
bool has_avx2();

}  // namespace flashgla::ops::quantised_linear

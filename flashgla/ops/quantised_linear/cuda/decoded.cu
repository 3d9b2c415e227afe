// Packed matrices as floats: all rows, for products of many rows of x, or those of some tokens.
#include <algorithm>

#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/matmul/matmul.h"
#include "flashgla/ops/quantised_linear/cuda/codes.cuh"
#include "flashgla/ops/quantised_linear/cuda/cuda.h"
#include "flashgla/ops/quantised_linear/implementations.h"

namespace flashgla::ops::quantised_linear {

namespace cuda {
namespace {

using flashgla::cuda::Vector;

constexpr int kThreads = 256;
constexpr int kFours = 8;         // of a group: a thread has four neighbouring columns of a row
constexpr int kGroupsAcross = 4;  // a warp's: 128 columns of a row, which it writes side by side
constexpr int kRowsDown = kThreads / 32;

struct Packed {
  const unsigned char* bytes;
  std::int64_t groups;
  int block;  // bytes
  bool q4;

  explicit Packed(const TensorView& weight)
      : bytes(weight.as<std::uint8_t>()),
        groups(weight.size(1)),
        block(static_cast<int>(weight.size(2))),
        q4(format_of(weight) == Format::q4) {}

  // Four values of a row, from column 32 group + 4 four on.
  __device__ __forceinline__ void read(std::int64_t row, std::int64_t group, int four, float (&values)[4]) const {
    const unsigned char* const from = bytes + (row / kPanelRows * groups + group) * block;
    const int in_panel = static_cast<int>(row % kPanelRows);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(from + kScaleBytes) + in_panel;
    std::uint32_t codes;
    if (q4) {
      const Halves halves = values_of_q4(words[16 * (four % 4)]);
      codes = four < 4 ? halves.low : halves.high;
    } else {
      codes = values_of_q8(words[16 * four]);
    }
    const float scale = scale_of(from, in_panel);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = scale * static_cast<float>(byte_of(codes, i));
  }
};

// `to`: the row's column 4 four.
template <class T>
__device__ __forceinline__ void write(const float (&values)[4], std::int64_t column, std::int64_t columns, bool whole,
                                      T* to) {
  if (whole) {
    if (column < columns) Vector<T, 4>::of(values).store(to);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < columns) to[i] = flashgla::cuda::from_float<T>(values[i]);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(Packed packed, std::int64_t first, std::int64_t rows, std::int64_t columns, T* values) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t across = (packed.groups + kGroupsAcross - 1) / kGroupsAcross;
  const std::int64_t row = blockIdx.x / across * kRowsDown + threadIdx.x / 32;
  const std::int64_t group = blockIdx.x % across * kGroupsAcross + threadIdx.x % 32 / kFours;
  if (row >= rows || group >= packed.groups) return;
  const int four = static_cast<int>(threadIdx.x) % kFours;
  float own[4];
  packed.read(first + row, group, four, own);
  const std::int64_t column = group * kGroup + 4 * four;
  write(own, column, columns, columns % 4 == 0, values + row * columns + column);
}

template <class T>
__global__ void __launch_bounds__(kThreads) look_up_kernel(Packed packed, const std::int32_t* tokens, std::int64_t rows,
                                                           std::int64_t columns, ops::cuda::Operand<T> y) {
  flashgla::cuda::wait_for_previous();
  const std::int32_t token = tokens[blockIdx.x];
  const bool good = token >= 0 && token < rows;
  for (std::int64_t at = threadIdx.x; at < packed.groups * kFours; at += kThreads) {
    const float none = __uint_as_float(0x7fc00000u);
    float own[4] = {none, none, none, none};
    if (good) packed.read(token, at / kFours, static_cast<int>(at % kFours), own);
    write(own, 4 * at, columns, false, y.at(blockIdx.x, 4 * at));
  }
}

}  // namespace

void decode(Context& context, const TensorView& weight, std::int64_t first, const TensorView& values) {
  if (context.planning()) return;
  const Packed packed(weight);
  const std::int64_t rows = values.size(0), across = (packed.groups + kGroupsAcross - 1) / kGroupsAcross;
  ops::cuda::with_element(values.dtype, [&](auto zero) {
    using T = decltype(zero);
    ops::cuda::queue_kernel(context, "quantised decode", decode_kernel<T>, (rows + kRowsDown - 1) / kRowsDown * across,
                            kThreads, 0, packed, first, rows, values.size(1), static_cast<T*>(values.data));
  });
}

void look_up(Context& context, const TensorView& tokens, const TensorView& weight, std::int64_t rows,
             const TensorView& y) {
  if (context.planning()) return;
  ops::cuda::with_element(y.dtype, [&](auto zero) {
    using T = decltype(zero);
    ops::cuda::queue_kernel(context, "quantised look-up", look_up_kernel<T>, tokens.numel(), kThreads, 0,
                            Packed(weight), tokens.as<std::int32_t>(), rows, y.size(-1), ops::cuda::Operand<T>(y));
  });
}

}  // namespace cuda

namespace {

// Rows of the weight in x's dtype in scratch memory, columns of the product that `matmul` computes.
void run_decoded(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
                 const Options& options) {
  constexpr std::int64_t kElements = std::int64_t{32} << 20;
  const std::int64_t columns = y.size(1), in = x.size(1);
  const std::int64_t width = std::min(columns, std::max<std::int64_t>(kElements / in / 128, 1) * 128);
  const ArenaScope scope(context.scratch());
  const TensorView decoded = context.scratch().tensor({width, in}, x.dtype, "quantised: weights in floats");
  for (std::int64_t begin = 0; begin < columns; begin += width) {
    const std::int64_t end = std::min(columns, begin + width);
    const TensorView part = decoded.slice(0, 0, end - begin);
    cuda::decode(context, weight, begin, part);
    const matmul::Options own{options.accumulate, options.bias ? options.bias.slice(0, begin, end) : TensorView()};
    matmul::run(context, x, part.transpose(0, 1), y.slice(1, begin, end), own);
  }
}

}  // namespace

const Implementation kDecodedCuda{
    "cuda_decoded", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, run_decoded,
    [] { return true; }};

}  // namespace flashgla::ops::quantised_linear

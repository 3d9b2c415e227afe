// One pass over memory each.
#include "flashgla/base/cuda/check.h"
#include "flashgla/ops/cuda/division.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/cuda/partial_sums.cuh"
#include "flashgla/ops/elementwise/implementations.h"

namespace flashgla::ops::elementwise {

namespace {

using ops::cuda::Operand;
using ops::cuda::Vector;
using bf16 = __nv_bfloat16;

struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Multiply {
  __device__ __forceinline__ float operator()(float a, float b) const { return a * b; }
};
struct Scale {
  float factor;
  __device__ __forceinline__ float operator()(float x) const { return x * factor; }
};
struct Same {
  __device__ __forceinline__ float operator()(float x) const { return x; }
};
struct SiLU {
  __device__ __forceinline__ float operator()(float x) const { return x * ops::cuda::sigmoid(x); }
};
struct SiLUGradient {
  __device__ __forceinline__ float operator()(float x, float dy) const {
    return dy * ops::cuda::silu_slope(x, ops::cuda::sigmoid(x));
  }
};
struct SquaredRelu {
  __device__ __forceinline__ float operator()(float x) const {
    const float positive = fmaxf(x, 0.0f);
    return positive * positive;
  }
};
struct SquaredReluGradient {
  __device__ __forceinline__ float operator()(float x, float dy) const { return 2.0f * fmaxf(x, 0.0f) * dy; }
};
struct SigmoidGate {
  __device__ __forceinline__ float operator()(float gate, float x) const { return ops::cuda::sigmoid(gate) * x; }
};

// out = 0
template <class Out>
struct Zero {
  Operand<Out> out;

  template <int N>
  struct Read {};
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t, std::int64_t) const {
    return {};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>&) const {
    Vector<Out, N>::zero().store(out.at(row, column));
  }
};

// out = f(a)
template <class F, class A, class Out>
struct Map {
  F f;
  Operand<A> a;
  Operand<Out> out;

  template <int N>
  struct Read {
    Vector<A, N> a;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    return {a.template load<N>(row, column)};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = f(in.a[i]);
    out.template store<N>(row, column, values);
  }
};

// out = f(a, b)
template <class F, class A, class B, class Out>
struct Map2 {
  F f;
  Operand<A> a;
  Operand<B> b;
  Operand<Out> out;

  template <int N>
  struct Read {
    Vector<A, N> a;
    Vector<B, N> b;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    return {a.template load<N>(row, column), b.template load<N>(row, column)};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = f(in.a[i], in.b[i]);
    out.template store<N>(row, column, values);
  }
};

// Gradients of sigmoid(gate) x.
template <class T>
struct SigmoidGateGradients {
  Operand<T> gate, x, dy, dgate, dx;

  template <int N>
  struct Read {
    Vector<T, N> gate, x, dy;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    return {gate.template load<N>(row, column), x.template load<N>(row, column), dy.template load<N>(row, column)};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float to_gate[N], to_x[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = ops::cuda::sigmoid(in.gate[i]);
      to_x[i] = in.dy[i] * s;
      to_gate[i] = to_x[i] * in.x[i] * (1.0f - s);
    }
    dgate.template store<N>(row, column, to_gate);
    dx.template store<N>(row, column, to_x);
  }
};

template <class A, class Out, class F>
void map(Context& context, const char* name, const F& f, const TensorView& a, const TensorView& out) {
  ops::cuda::for_each_element(context, name, Map<F, A, Out>{f, Operand<A>(a), Operand<Out>(out)}, {&a, &out});
}
template <class A, class B, class Out, class F>
void map(Context& context, const char* name, const F& f, const TensorView& a, const TensorView& b,
         const TensorView& out) {
  const Map2<F, A, B, Out> body{f, Operand<A>(a), Operand<B>(b), Operand<Out>(out)};
  ops::cuda::for_each_element(context, name, body, {&a, &b, &out});
}

void add_to_on_device(Context& context, const TensorView& a, const TensorView& b, const TensorView& out) {
  if (a.dtype == DType::f32) return map<float, float, float>(context, "add", Add{}, a, b, out);
  if (out.dtype == DType::f32) return map<bf16, float, float>(context, "add", Add{}, a, b, out);
  map<bf16, bf16, bf16>(context, "add", Add{}, a, b, out);
}

void multiply_on_device(Context& context, const TensorView& a, const TensorView& b, const TensorView& out) {
  if (a.dtype == DType::f32) return map<float, float, float>(context, "multiply", Multiply{}, a, b, out);
  map<bf16, bf16, bf16>(context, "multiply", Multiply{}, a, b, out);
}

void scale_on_device(Context& context, const TensorView& x, double factor) {
  const Scale scale{static_cast<float>(factor)};
  if (x.dtype == DType::f32) return map<float, float>(context, "scale", scale, x, x);
  map<bf16, bf16>(context, "scale", scale, x, x);
}

void convert_on_device(Context& context, const TensorView& src, const TensorView& dst) {
  const bool from_wide = src.dtype == DType::f32, to_wide = dst.dtype == DType::f32;
  if (from_wide && to_wide) return map<float, float>(context, "convert", Same{}, src, dst);
  if (from_wide) return map<float, bf16>(context, "convert", Same{}, src, dst);
  if (to_wide) return map<bf16, float>(context, "convert", Same{}, src, dst);
  map<bf16, bf16>(context, "convert", Same{}, src, dst);
}

void silu_forward_on_device(Context& context, const TensorView& x, const TensorView& y) {
  if (x.dtype == DType::f32) return map<float, float>(context, "silu", SiLU{}, x, y);
  map<bf16, bf16>(context, "silu", SiLU{}, x, y);
}

void silu_backward_on_device(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  if (x.dtype == DType::f32) return map<float, float, float>(context, "silu", SiLUGradient{}, x, dy, dx);
  map<bf16, bf16, bf16>(context, "silu", SiLUGradient{}, x, dy, dx);
}

void squared_relu_forward_on_device(Context& context, const TensorView& x, const TensorView& y) {
  if (x.dtype == DType::f32) return map<float, float>(context, "squared_relu", SquaredRelu{}, x, y);
  map<bf16, bf16>(context, "squared_relu", SquaredRelu{}, x, y);
}

void squared_relu_backward_on_device(Context& context, const TensorView& x, const TensorView& dy,
                                     const TensorView& dx) {
  if (x.dtype == DType::f32) {
    return map<float, float, float>(context, "squared_relu", SquaredReluGradient{}, x, dy, dx);
  }
  map<bf16, bf16, bf16>(context, "squared_relu", SquaredReluGradient{}, x, dy, dx);
}

void sigmoid_gate_forward_on_device(Context& context, const TensorView& gate, const TensorView& x,
                                    const TensorView& y) {
  if (x.dtype == DType::f32) return map<float, float, float>(context, "sigmoid_gate", SigmoidGate{}, gate, x, y);
  map<bf16, bf16, bf16>(context, "sigmoid_gate", SigmoidGate{}, gate, x, y);
}

template <class T>
void sigmoid_gate_gradients(Context& context, const TensorView& gate, const TensorView& x, const TensorView& dy,
                            const TensorView& dgate, const TensorView& dx) {
  const SigmoidGateGradients<T> body{Operand<T>(gate), Operand<T>(x), Operand<T>(dy), Operand<T>(dgate),
                                     Operand<T>(dx)};
  ops::cuda::for_each_element(context, "sigmoid_gate", body, {&gate, &x, &dy, &dgate, &dx});
}

void sigmoid_gate_backward_on_device(Context& context, const TensorView& gate, const TensorView& x,
                                     const TensorView& dy, const TensorView& dgate, const TensorView& dx) {
  (x.dtype == DType::f32 ? sigmoid_gate_gradients<float> : sigmoid_gate_gradients<bf16>)(context, gate, x, dy, dgate,
                                                                                         dx);
}

// A block sums rows of `across` * N columns; threads that have the same columns take every `down`th row.
constexpr int kAcross = 32, kDown = 16;
constexpr int kBatch = 8;         // rows that a thread loads at once
constexpr int kEarly = 32;        // rows of a block that go to the cache while the kernel before this one ends
constexpr int kSumsAtOnce = 264;  // blocks: two for each multiprocessor of a large GPU, which have room there at once
constexpr int kRowsToAnnounce = 256;  // rows of a block from which on it pays to announce their sums

// Adds a thread's rows, which are `apart` elements from one another, to its columns' totals.
template <int N, class T>
__device__ __forceinline__ void add_rows(const T* from, std::int64_t apart, int rows, float (&totals)[N]) {
  for (; rows > 0; rows -= kBatch) {
    Vector<T, N> values[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      values[k] = k < rows ? Vector<T, N>::load(from + k * apart) : Vector<T, N>::zero();
    }
    from += kBatch * apart;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) totals[i] += values[k][i];
    }
  }
}

// What is known without memory comes before the wait. Registers for blocks of 64 threads more: what two of these leave
// is room for a block of the sums.
template <int N, class T>
__global__ void __launch_bounds__(kAcross* kDown + 64, 2)
    column_sum_kernel(Operand<T> dy, ops::cuda::PartialSums partial, ops::cuda::Division by_tiles, bool announces) {
  if (!announces) flashgla::cuda::release_next();
  __shared__ float shared[kDown][kAcross * N];
  const std::uint32_t block = by_tiles.of(blockIdx.x);
  const std::int64_t begin = partial.begin(block), end = partial.end(block);
  const std::int64_t first = std::int64_t{blockIdx.x - block * by_tiles.by} * (kAcross * N);
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const std::int64_t column = first + across * N;
  const bool evenly = dy.rows.inner_count == 1;  // rows are equally far apart
  if (evenly) {                                  // each line of memory by one thread
    constexpr int kLine = 128 / static_cast<int>(sizeof(T)), kLines = (kAcross * N + kLine - 1) / kLine;
    for (int i = threadIdx.x; i < kEarly * kLines; i += kAcross * kDown) {
      const std::int64_t row = begin + i / kLines, of_line = first + i % kLines * kLine;
      if (row < end && of_line < partial.columns) ptx::prefetch_l2(dy.at(row, of_line));
    }
  }
  const int tile = static_cast<int>(min(std::int64_t{kAcross * N}, partial.columns - first));
  flashgla::cuda::wait_for_previous();
  if (announces && down == 0) ops::cuda::announce_sums(partial.sums + block * partial.columns + first, tile);
  float totals[N] = {};
  if (evenly && column + N <= partial.columns) {
    const int rows = static_cast<int>((end - begin - down + kDown - 1) / kDown);
    add_rows(static_cast<const T*>(dy.at(begin + down, column)), kDown * dy.rows.outer, rows, totals);
  } else if (column + N <= partial.columns) {
#pragma unroll 4
    for (std::int64_t row = begin + down; row < end; row += kDown) {
      const auto values = dy.template load<N>(row, column);
#pragma unroll
      for (int i = 0; i < N; ++i) totals[i] += values[i];
    }
  } else if (column < partial.columns) {
    for (std::int64_t row = begin + down; row < end; row += kDown) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (column + i < partial.columns) totals[i] += dy.template load<1>(row, column + i)[0];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) shared[down][across * N + i] = totals[i];
  __syncthreads();
  for (int i = threadIdx.x; i < tile; i += kAcross * kDown) {
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < kDown; ++j) total += shared[j][i];
    partial.sums[block * partial.columns + first + i] = total;
  }
}

template <int N, class T>
void column_sum_of(Context& context, const TensorView& dy, float* db, bool accumulate) {
  const std::int64_t rows = rows_of(dy.shape), columns = dy.size(-1),
                     tiles = (columns + kAcross * N - 1) / (kAcross * N);
  const ArenaScope scope(context.scratch());
  // By shape and dtype alone, so that neither memory nor bits depend on where dy lies.
  const std::int64_t most_blocks = std::max<std::int64_t>(
      1, kSumsAtOnce * kAcross * flashgla::cuda::kVectorOf<T> / std::max<std::int64_t>(columns, 1));
  const auto partial = ops::cuda::take_partial_sums(context, rows, columns, most_blocks, kDown, "column_sum");
  if (context.planning()) return;
  const bool announces = partial.rows_per_block >= kRowsToAnnounce;
  ops::cuda::queue_kernel(context, "column_sum", column_sum_kernel<N, T>, partial.blocks() * tiles, kAcross * kDown, 0,
                          Operand<T>(dy), partial,
                          ops::cuda::Division(static_cast<std::uint32_t>(std::max<std::int64_t>(tiles, 1))), announces);
  (announces ? ops::cuda::reduce<32, true> : ops::cuda::reduce<32, false>)(context, partial, db, accumulate);
}

void column_sum_on_device(Context& context, const TensorView& dy, const TensorView& db, bool accumulate) {
  auto* sums = db.as<float>();
  if (dy.dtype == DType::f32) {
    const bool aligned = ops::cuda::is_aligned(dy, 4);
    return (aligned ? column_sum_of<4, float> : column_sum_of<1, float>)(context, dy, sums, accumulate);
  }
  const bool aligned = ops::cuda::is_aligned(dy, 8);
  (aligned ? column_sum_of<8, bf16> : column_sum_of<1, bf16>)(context, dy, sums, accumulate);
}

}  // namespace

void zero_rows_on_device(Context& context, const TensorView& view) {
  TensorView words = view;  // as elements of 2 or 4 bytes
  words.dtype = size_of(view.dtype) == 2 ? DType::bf16 : DType::f32;
  if (size_of(view.dtype) == 8) {
    words.shape[-1] *= 2;
    for (int dim = 0; dim + 1 < view.rank(); ++dim) words.stride[dim] *= 2;
  }
  if (words.dtype == DType::bf16) {
    return ops::cuda::for_each_element(context, "zero", Zero<bf16>{Operand<bf16>(words)}, {&words});
  }
  ops::cuda::for_each_element(context, "zero", Zero<float>{Operand<float>(words)}, {&words});
}

const Implementation kCuda{"cuda",
                           Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.in, problem.out});
                           },
                           add_to_on_device,
                           scale_on_device,
                           convert_on_device,
                           column_sum_on_device,
                           silu_forward_on_device,
                           silu_backward_on_device,
                           squared_relu_forward_on_device,
                           squared_relu_backward_on_device,
                           sigmoid_gate_forward_on_device,
                           sigmoid_gate_backward_on_device,
                           multiply_on_device};

}  // namespace flashgla::ops::elementwise

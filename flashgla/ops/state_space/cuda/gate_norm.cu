// The gate and the norm behind it in one pass: a team of threads holds a row, as in the norms
// (ops/cuda/rows_by_team.cuh), and makes what the gate gives again in the backward. The sums of dweight are those of
// fixed blocks of rows.
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/cuda/norm_backward.cuh"
#include "flashgla/ops/state_space/cuda/gate_norm.h"
#include "flashgla/ops/state_space/implementations.h"

namespace flashgla::ops::state_space::cuda {

namespace {

namespace house = flashgla::ops::cuda;
using house::Operand;
using house::RowGrid;
using house::Team;
using house::Vector;

// skip of neighbouring channels.
struct Skips {
  const void* skip;
  bool wide;  // f32, else bf16
  std::uint32_t value_dim;

  __device__ __forceinline__ float of_head(std::uint32_t h) const {
    return wide ? static_cast<const float*>(skip)[h]
                : flashgla::cuda::to_float(static_cast<const __nv_bfloat16*>(skip)[h]);
  }

  template <int N, bool kWhole>
  __device__ __forceinline__ void load(std::int64_t column, std::int64_t length, float (&out)[N]) const {
    const auto first = static_cast<std::uint32_t>(column);
    if (kWhole || value_dim % N == 0) {  // of one head, since columns are multiples of N
      const float factor = of_head(first / value_dim);
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = factor;
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = column + i < length ? of_head((first + i) / value_dim) : 0.0f;
    }
  }
};

template <class T>
struct GateOperands {
  Operand<T> o, x, z;
  Skips skips;
};

// Where a row of them begins.
template <class T>
struct GateRow {
  const T *o, *x, *z;
  __device__ __forceinline__ GateRow(const GateOperands<T>& t, std::int64_t row)
      : o(t.o.at(row, 0)), x(t.x.at(row, 0)), z(t.z.at(row, 0)) {}
};

// kWhole, here and in the kernels: all vectors lie wholly in their row and in a head, and the weight is there and
// aligned. What else there may be is several times as much code, which a multiprocessor's instruction cache does not
// hold.
template <int N, bool kWhole, class T>
struct GateVectors {
  Vector<T, N> o, x, z;

  __device__ __forceinline__ void load(const GateRow<T>& row, std::int64_t column, bool whole, std::int64_t length) {
    o = house::load_vector<N>(row.o, column, whole, length);
    x = house::load_vector<N>(row.x, column, whole, length);
    z = house::load_vector<N>(row.z, column, whole, length);
  }
  // o + skip x.
  __device__ __forceinline__ void sums(const Skips& skips, std::int64_t column, std::int64_t length,
                                       float (&s)[N]) const {
    skips.load<N, kWhole>(column, length, s);
#pragma unroll
    for (int j = 0; j < N; ++j) s[j] = fmaf(s[j], x[j], o[j]);
  }
};

template <bool kWhole, int N>
__device__ __forceinline__ void load_weight(const house::WeightVector& weight, std::int64_t column, bool whole,
                                            std::int64_t length, float (&out)[N]) {
  const auto load = [&](const auto* from) {
    const auto vector = Vector<std::remove_cvref_t<decltype(*from)>, N>::load(from + column);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = vector[i];
  };
  if constexpr (!kWhole) {
    weight.load<N>(column, whole, length, out);
  } else if (weight.wide) {
    load(static_cast<const float*>(weight.data));
  } else {
    load(static_cast<const __nv_bfloat16*>(weight.data));
  }
}

__device__ __forceinline__ float silu(float z) { return z * house::sigmoid(z); }

template <class T>
struct ForwardOperands {
  GateOperands<T> in;
  Operand<T> y;
  house::WeightVector weight;
  float* rstd;  // null: not wanted
  float epsilon;
};

template <int kHeld, int N, bool kWhole, class T>
__global__ void __launch_bounds__(RowGrid::kThreads, kHeld == RowGrid::kMost ? 2 : 0)  // 0: not said; ptxas else spills
    forward_kernel(ForwardOperands<T> t, RowGrid grid) {
  flashgla::cuda::wait_for_previous();
  __shared__ float shared[RowGrid::kSharedFloats];
  Team team(grid.team, shared);
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * grid.teams() + team.index();
  if (row >= grid.rows) return;  // whole teams
  constexpr int kSlots = kHeld == 0 ? 1 : kHeld;
  GateVectors<N, kWhole, T> held[kSlots];
  float gated[kSlots][N];
  const GateRow<T> from(t.in, row);
  if constexpr (kHeld > 0) {  // all loads before the first use
    house::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
      held[i].load(from, column, kWhole || whole, grid.length);
    });
  }
  const auto gate = [&](int i, std::int64_t column, bool whole) {
    if constexpr (kHeld == 0) held[0].load(from, column, kWhole || whole, grid.length);
    held[i].sums(t.in.skips, column, grid.length, gated[i]);
#pragma unroll
    for (int j = 0; j < N; ++j) gated[i][j] *= silu(held[i].z[j]);
  };
  float squares = 0.0f;
  house::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
    gate(i, column, whole);
#pragma unroll
    for (int j = 0; j < N; ++j) squares = fmaf(gated[i][j], gated[i][j], squares);
  });
  const float r = rsqrtf(team.sum(squares) / static_cast<float>(grid.length) + t.epsilon);
  if (t.rstd && team.rank() == 0) t.rstd[row] = r;
  T* const y_row = t.y.at(row, 0);
  house::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
    if constexpr (kHeld == 0) gate(0, column, whole);
    float weight[N], out[N];
    load_weight<kWhole>(t.weight, column, whole, grid.length, weight);
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = gated[i][j] * r * weight[j];
    house::store_vector<N>(y_row, column, kWhole || whole, grid.length, Vector<T, N>::of(out));
  });
}

// What an element of y adds to dweight but for r, and with its weight to the row's product with what is normalised.
template <int N, bool kWhole, class T>
__device__ __forceinline__ void products(const GateVectors<N, kWhole, T>& in, const float (&s)[N],
                                         const Vector<T, N>& dy, float (&out)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] = dy[j] * s[j] * silu(in.z[j]);
}

// The norm's gradient dy_j weight_j r - s_j silu(z_j) pull goes through the gate; s: o + skip x.
template <int N, bool kWhole, class T>
__device__ __forceinline__ void store_gradients(T* ds, T* dz, std::int64_t column, bool whole, std::int64_t length,
                                                const GateVectors<N, kWhole, T>& in, const float (&s)[N],
                                                const Vector<T, N>& dy, const float (&weight)[N], float r, float pull) {
  float to_s[N], to_z[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float z = in.z[j], sigmoid = house::sigmoid(z), gate = z * sigmoid;
    const float gradient = dy[j] * weight[j] * r - s[j] * gate * pull;
    to_s[j] = gradient * gate;
    to_z[j] = gradient * s[j] * house::silu_slope(z, sigmoid);
  }
  house::store_vector<N>(ds, column, kWhole || whole, length, Vector<T, N>::of(to_s));
  house::store_vector<N>(dz, column, kWhole || whole, length, Vector<T, N>::of(to_z));
}

template <class T>
struct BackwardOperands {
  GateOperands<T> in;
  Operand<T> dy, ds, dz;
  house::WeightVector weight;
  const float* rstd;
  bool want_dweight;

  // What house::queue_norm_long_backward asks for, whose rows are too long to be held.
  static constexpr bool kCentred = false;
  struct Row {
    GateRow<T> in;
    const T* dy;
    T *ds, *dz;
  };
  __device__ __forceinline__ Row row(std::int64_t i) const {
    return {GateRow<T>(in, i), dy.at(i, 0), ds.at(i, 0), dz.at(i, 0)};
  }
  template <int kHeld, int N, bool>
  struct Held {
    static_assert(kHeld == 1);
    GateVectors<N, false, T> in;
    Vector<T, N> dy;
    float s[N], r;

    __device__ __forceinline__ void load(const BackwardOperands& t, const Row& from, int, std::int64_t column,
                                         bool whole, std::int64_t length) {
      in.load(from.in, column, whole, length);
      dy = house::load_vector<N>(from.dy, column, whole, length);
      in.sums(t.in.skips, column, length, s);
    }
    __device__ __forceinline__ void load_statistics(const BackwardOperands& t, std::int64_t row) { r = t.rstd[row]; }
    __device__ __forceinline__ float product(int, int j) const { return dy[j] * s[j] * silu(in.z[j]); }
    __device__ __forceinline__ float weighted(int i, int j, float w) const { return product(i, j) * w; }
    template <class Weight>
    __device__ __forceinline__ void write(const BackwardOperands&, const Row& to, int i, std::int64_t column,
                                          bool whole, std::int64_t length, const Weight& weight, float pull,
                                          float) const {
      store_gradients(to.ds, to.dz, column, whole, length, in, s, dy, weight[i], r, pull);
    }
  };
};

// A block takes the rows of one block of partial sums, its teams every teams()th of them; the next one is on its way
// into the L2 while one is worked on.
template <int kHeld, int N, bool kWhole, class T>
__global__ void __launch_bounds__(RowGrid::kThreads, kHeld <= 2 ? house::kBackwardBlocksEach : 1)
    backward_kernel(BackwardOperands<T> t, RowGrid grid, house::PartialSums partial) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ float shared[];
  Team team(grid.team, shared);
  float sums[kHeld][N];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) sums[i][j] = 0.0f;
  }
  const std::int64_t end = partial.end(blockIdx.x);
  for (std::int64_t row = partial.begin(blockIdx.x) + team.index(); row < end; row += grid.teams()) {
    const GateRow<T> from(t.in, row);
    const T* const dy_row = t.dy.at(row, 0);
    GateVectors<N, kWhole, T> in[kHeld];
    Vector<T, N> dy[kHeld];
    house::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
      in[i].load(from, column, kWhole || whole, grid.length);
      dy[i] = house::load_vector<N>(dy_row, column, kWhole || whole, grid.length);
    });
    if (const std::int64_t next = row + grid.teams(); next < end && team.rank() % (128 / (N * sizeof(T))) == 0) {
      const GateRow<T> later(t.in, next);
      const T* const later_dy = t.dy.at(next, 0);
      house::for_each_vector<kHeld, N>(grid, team.rank(), [&](int, std::int64_t column, bool) {
        for (const T* begin : {later.o, later.x, later.z, later_dy}) ptx::prefetch_l2(begin + column);
      });
    }
    const float r = t.rstd[row];
    float dot = 0.0f;
    house::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
      float s[N], product[N], weight[N];
      in[i].sums(t.in.skips, column, grid.length, s);
      load_weight<kWhole>(t.weight, column, whole, grid.length, weight);
      products(in[i], s, dy[i], product);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        dot = fmaf(product[j], weight[j], dot);
        sums[i][j] = fmaf(product[j], r, sums[i][j]);
      }
    });
    const float pull = r * r * r * (team.sum(dot) / static_cast<float>(grid.length));
    T *const ds = t.ds.at(row, 0), *const dz = t.dz.at(row, 0);
    house::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
      float s[N], weight[N];
      in[i].sums(t.in.skips, column, grid.length, s);
      load_weight<kWhole>(t.weight, column, whole, grid.length, weight);
      store_gradients(ds, dz, column, whole, grid.length, in[i], s, dy[i], weight, r, pull);
    });
  }
  if (!t.want_dweight) return;
  __syncthreads();  // of the teams' sums, whose memory is taken
  house::store_sums<kHeld, N>(grid, team, partial, sums, shared);
}

// Calls run(bool_constant), true where the kernels' kWhole holds.
template <int N, class Run>
void with_wholeness(const Gate& in, const house::WeightVector& weight, const Run& run) {
  if constexpr (N > 1) {
    const std::int64_t length = in.o.size(-1), value_dim = length / in.skip.numel();
    if (value_dim % N == 0 && weight.data != nullptr && weight.aligned) return run(std::true_type());
  }
  run(std::false_type());
}

template <class T>
GateOperands<T> operands_of(const Gate& in) {
  const auto value_dim = static_cast<std::uint32_t>(in.o.size(-1) / in.skip.numel());
  return {Operand<T>(in.o), Operand<T>(in.x), Operand<T>(in.z), {in.skip.data, in.skip.dtype == DType::f32, value_dim}};
}

}  // namespace

void gate_norm(Context& context, const Gate& in, const TensorView& weight, double epsilon, const TensorView& y,
               const TensorView& rstd) {
  const std::int64_t rows = rows_of(in.o.shape);
  if (context.planning() || rows == 0) return;
  house::with_vectors(in.o.dtype, {&in.o, &in.x, &in.z, &y}, [&](auto zero, auto elements) {
    using T = decltype(zero);
    constexpr int N = decltype(elements)::value;
    const ForwardOperands<T> operands{operands_of<T>(in), Operand<T>(y), house::weight_vector(weight, N),
                                      rstd ? rstd.as<float>() : nullptr, static_cast<float>(epsilon)};
    const RowGrid grid(rows, in.o.size(-1), N);
    house::with_held_vectors(grid, [&](auto held) {
      with_wholeness<N>(in, operands.weight, [&](auto whole) {
        house::queue_kernel(context, "state_space gate", forward_kernel<held.value, N, whole.value, T>, grid.blocks(),
                            RowGrid::kThreads, 0, operands, grid);
      });
    });
  });
}

void gate_norm_backward(Context& context, const Gate& in, const TensorView& weight, const TensorView& rstd,
                        const TensorView& dy, const TensorView& ds, const TensorView& dz, const TensorView& dweight) {
  const ArenaScope scope(context.scratch());
  const std::int64_t rows = rows_of(in.o.shape);
  const auto partial =
      house::take_partial_sums(context, rows, in.o.size(-1), house::kRowBlocks, 1, "state_space: dweight");
  if (context.planning() || rows == 0) return;
  house::with_vectors(in.o.dtype, {&in.o, &in.x, &in.z, &dy, &ds, &dz}, [&](auto zero, auto elements) {
    using T = decltype(zero);
    constexpr int N = decltype(elements)::value;
    const BackwardOperands<T> operands{operands_of<T>(in),
                                       Operand<T>(dy),
                                       Operand<T>(ds),
                                       Operand<T>(dz),
                                       house::weight_vector(weight, N),
                                       rstd.as<float>(),
                                       static_cast<bool>(dweight)};
    const RowGrid grid(rows, in.o.size(-1), N);
    constexpr const char* kName = "state_space gate backward";
    house::with_held_vectors(grid, [&](auto held) {
      if constexpr (held.value > 0) {
        with_wholeness<N>(in, operands.weight, [&](auto whole) {
          house::queue_kernel(context, kName, backward_kernel<held.value, N, whole.value, T>, partial.blocks(),
                              RowGrid::kThreads, house::backward_shared<held.value, N>(grid), operands, grid, partial);
        });
      } else {
        house::queue_norm_long_backward<N>(context, kName, operands, grid, partial);
      }
    });
  });
  if (dweight) house::reduce(context, partial, dweight.as<float>(), true);
}

}  // namespace flashgla::ops::state_space::cuda

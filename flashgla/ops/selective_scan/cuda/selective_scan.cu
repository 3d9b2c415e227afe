// The row of the table that runs on CUDA.
#include <algorithm>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <utility>

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/selective_scan/cuda/backward.cuh"
#include "flashgla/ops/selective_scan/cuda/forward.cuh"
#include "flashgla/ops/selective_scan/implementations.h"
#include "flashgla/ops/weight_in_f32.h"

namespace flashgla::ops::selective_scan {

namespace {

using bf16 = __nv_bfloat16;

// A step's tensors as rows of sequences.
template <class T, class P>
struct StepCall {
  cuda::Lines<T> x, raw, z, b, c, y;
  const P *dt_bias, *a_log, *skip;
  float* h;
  std::int64_t sequences, channels;
  int states;
  bool vectors;          // four states at a time
  cuda::Lines<T> ranks;  // raw is the product of these
  const P* weight;       // and [E,rank]; null: raw is given
  int rank;              // a multiple of 8
};

// Up to four neighbouring elements, 0 for those that are not there.
template <class T>
__device__ __forceinline__ void load_four(const T* from, int count, bool vector, float (&to)[4]) {
  if (vector) {
    const auto four = flashgla::cuda::Vector<T, 4>::load(from);
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k] = four[k];
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) to[k] = k < count ? flashgla::cuda::to_float(from[k]) : 0.0f;
}

// A lane's part of what four lanes compute: the product of ranks and of channel e's row of the weight, which no kernel
// of a step writes, so that its first vectors are asked for before the kernel ahead has ended.
template <class T, class P>
class Projection {
 public:
  __device__ __forceinline__ Projection(const StepCall<T, P>& call, std::int64_t e)
      : rank_(call.rank), weight_(call.weight + e * call.rank) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first() + i * kApart < rank_) ahead_[i] = Weights::load(weight_ + first() + i * kApart);
    }
  }

  __device__ __forceinline__ float of(const T* ranks) const {
    float even = 0.0f, odd = 0.0f;
    const auto add = [&](const Weights& weights, const flashgla::cuda::Vector<T, 8>& x) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        even = fmaf(x[i], weights[i], even);
        odd = fmaf(x[i + 1], weights[i + 1], odd);
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int r = first() + i * kApart;
      if (r < rank_) add(ahead_[i], flashgla::cuda::Vector<T, 8>::load(ranks + r));
    }
    for (int r = first() + kAhead * kApart; r < rank_; r += kApart) {
      add(Weights::load(weight_ + r), flashgla::cuda::Vector<T, 8>::load(ranks + r));
    }
    return even + odd;
  }

 private:
  using Weights = flashgla::cuda::Vector<P, 8>;
  static constexpr int kAhead = 4, kApart = 32;  // vectors; elements between those of a lane

  static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x) % 4 * 8; }

  int rank_;
  const P* weight_;
  Weights ahead_[kAhead];
};

// Over four neighbouring lanes.
__device__ __forceinline__ float sum_of_four(float x) {
  x += __shfl_xor_sync(cuda::kAll, x, 1);
  return x + __shfl_xor_sync(cuda::kAll, x, 2);
}

// One token of each sequence: four lanes a channel, each with four of its states.
template <class T, class P>
__global__ void __launch_bounds__(cuda::kThreads, 4) step_kernel(StepCall<T, P> call) {
  using flashgla::cuda::to_float;
  flashgla::cuda::release_next();  // a layer's last projection comes next: it asks for its weights meanwhile
  const std::int64_t item = (std::int64_t{blockIdx.x} * cuda::kThreads + threadIdx.x) / 4;
  const bool there = item < call.sequences * call.channels;
  const std::int64_t n = there ? item / call.channels : 0, e = there ? item % call.channels : 0;
  const Projection<T, P> projection(call, e);  // rank 0: of nothing
  const int state = static_cast<int>(threadIdx.x) % 4 * 4, count = call.states - state;
  float* own = call.h + (there ? item : 0) * call.states + state;
  const P* const rates = call.a_log + e * call.states + state;
  // Kernels before it may write these: into the second-level cache, where they are found even so.
  if (count > 0) {
    ptx::prefetch_l2(own);
    ptx::prefetch_l2(rates);
  }
  ptx::prefetch_l2(call.dt_bias + e);
  ptx::prefetch_l2(call.skip + e);
  flashgla::cuda::wait_for_previous();
  float h[4], a_log[4], b[4], c[4];
  load_four(own, count, call.vectors, h);
  load_four(rates, count, call.vectors, a_log);
  load_four(call.b.at(n, 0, state), count, call.vectors, b);
  load_four(call.c.at(n, 0, state), count, call.vectors, c);
  const float x = to_float(*call.x.at(n, 0, e)), z = to_float(*call.z.at(n, 0, e));
  const float raw =
      call.weight != nullptr ? sum_of_four(projection.of(call.ranks.at(n, 0, 0))) : to_float(*call.raw.at(n, 0, e));
  const float dt = cuda::softplus(raw + to_float(call.dt_bias[e]));
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    h[k] = fmaf(ops::cuda::power_of_two(-expf(a_log[k]) * cuda::kLog2E * dt), h[k], dt * x * b[k]);
    sum = fmaf(c[k], h[k], sum);
  }
  sum = sum_of_four(sum);
  if (!there) return;
  if (call.vectors) {
    *reinterpret_cast<float4*>(own) = make_float4(h[0], h[1], h[2], h[3]);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k < count) own[k] = h[k];
    }
  }
  if (state == 0) {
    sum = fmaf(to_float(call.skip[e]), x, sum);
    *call.y.at(n, 0, e) = flashgla::cuda::from_float<T>(sum * z * ops::cuda::sigmoid(z));
  }
}

std::int64_t tiles_of(const Sizes& sizes) { return (sizes.channels + cuda::kBlockChannels - 1) / cuda::kBlockChannels; }

// Elements of what forward keeps for backward: states in f32, then outputs before their gate.
struct Kept {
  std::int64_t states, outputs;

  explicit Kept(const Sizes& sizes)
      : states((sizes.rows / cuda::kChunk + 2 * sizes.sequences) * tiles_of(sizes) * cuda::kBlockChannels *
               cuda::kStates),
        outputs(sizes.rows * tiles_of(sizes) * cuda::kBlockChannels) {}
};

std::size_t cuda_kept_bytes(const Inputs& inputs) {
  const Kept kept{Sizes(inputs)};
  return static_cast<std::size_t>(kept.states) * sizeof(float) +
         static_cast<std::size_t>(kept.outputs) * size_of(inputs.x.dtype);
}

// Parameters in f32, in scratch where they are not.
struct Parameters {
  const float *dt_bias, *a_log, *skip;
};

Parameters parameters_of(Context& context, const Inputs& in) {
  const auto wide = [&](const TensorView& view) {
    return weight_in_f32(context, view.reshape(Shape({view.numel()})), view.numel());
  };
  return {wide(in.dt_bias), wide(in.a_log), wide(in.skip)};
}

// Sequences are cut where a warp for each 32 channels of each would leave half of the GPU's places empty, into pieces
// long enough that what is done twice pays.
int segments_of(const Context& context, const Sizes& sizes) {
  constexpr std::int64_t kWarpsAtOnce = 8, kLeast = 8 * cuda::kChunk;  // of a multiprocessor; tokens of a segment
  const std::int64_t warps = sizes.sequences * tiles_of(sizes) * cuda::kWarps;
  if (warps == 0) return 1;
  const std::int64_t room = kWarpsAtOnce * context.architecture().multiprocessors / warps;
  return static_cast<int>(
      std::clamp<std::int64_t>(sizes.rows / sizes.sequences / kLeast, 1, std::max<std::int64_t>(room, 1)));
}

// What passes over segments leave to each other.
struct Carried {
  int segments;
  TensorView states, steps;

  Carried(Context& context, const Sizes& sizes) : segments(segments_of(context, sizes)) {
    if (segments == 1) return;
    const Shape steps_shape({sizes.sequences * segments, tiles_of(sizes) * cuda::kBlockChannels});
    states = context.scratch().tensor(Shape({steps_shape[0], steps_shape[1] * cuda::kStates}), DType::f32,
                                      "selective_scan: segments");
    steps = context.scratch().tensor(steps_shape, DType::f32, "selective_scan: segments");
  }
};

// beside: further tensors that have channels.
template <class T>
cuda::Call<T> call_of(const Inputs& in, const Sizes& sizes, const Parameters& parameters, const TensorView& kept,
                      const Carried& carried, std::initializer_list<TensorView> beside) {
  using Lines = cuda::Lines<T>;
  bool vectors = cuda::aligned(Lines(in.x)) && cuda::aligned(Lines(in.raw)) && cuda::aligned(Lines(in.z));
  for (const TensorView& view : beside) vectors = vectors && (!view || cuda::aligned(Lines(view)));
  auto* const states = static_cast<float4*>(kept.data);
  return {cuda::Lines<T>(in.x),
          cuda::Lines<T>(in.raw),
          cuda::Lines<T>(in.z),
          cuda::Lines<T>(in.b),
          cuda::Lines<T>(in.c),
          parameters.dt_bias,
          parameters.a_log,
          parameters.skip,
          static_cast<const float*>(in.h0.data),
          static_cast<const std::int32_t*>(in.cu_seqlens.data),
          sizes.length,
          static_cast<int>(sizes.channels),
          static_cast<int>(sizes.states),
          tiles_of(sizes),
          states,
          states == nullptr ? nullptr : reinterpret_cast<T*>(states + Kept(sizes).states / 4),
          carried.segments,
          static_cast<float4*>(carried.states.data),
          static_cast<float*>(carried.steps.data),
          vectors,
          cuda::aligned(Lines(in.b)) && cuda::aligned(Lines(in.c))};
}

// Whether rows are read 16 bytes at a time and have as many states as a kernel has room for.
template <class T>
bool is_whole(const cuda::Call<T>& call) {
  return call.vectors && call.key_vectors && call.channels % cuda::kWide == 0 && call.states == cuda::kStates;
}

// Calls run(T()) with the kernels' type for the inputs'.
template <class Run>
void with_type(const Inputs& in, const Run& run) {
  in.x.dtype == DType::f32 ? run(float{}) : run(bf16{});
}

void cuda_forward(Context& context, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  const Sizes sizes(in);
  const Parameters parameters = parameters_of(context, in);
  const Carried carried(context, sizes);
  if (context.planning()) return;
  with_type(in, [&](auto zero) {
    using T = decltype(zero);
    const auto call = call_of<T>(in, sizes, parameters, out.kept, carried, {out.y});
    const cuda::Lines<T> y = out.y ? cuda::Lines<T>(out.y) : cuda::Lines<T>();
    auto* ht = static_cast<float*>(out.ht.data);
    const std::int64_t blocks = sizes.sequences * tiles_of(sizes);
    const auto walk = [&](auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      ops::cuda::queue_kernel(context, "selective_scan", cuda::forward_kernel<T, true, kWhole>,
                              blocks * (carried.segments - 1), cuda::kThreads, 0, call, y, ht);
      ops::cuda::queue_kernel(context, "selective_scan", cuda::forward_kernel<T, false, kWhole>,
                              blocks * carried.segments, cuda::kThreads, 0, call, y, ht);
    };
    is_whole(call) && call.channels % cuda::kWarp == 0 ? walk(std::true_type()) : walk(std::false_type());
  });
}

// The kernel counts from token to token in bytes of 32 bits.
void check_token_strides(std::initializer_list<std::pair<const char*, const TensorView&>> tensors) {
  for (const auto& [name, view] : tensors) {
    const std::int64_t bytes = view.stride[1] * static_cast<std::int64_t>(size_of(view.dtype));
    if (bytes > std::numeric_limits<std::int32_t>::max()) {
      throw Error("selective_scan", name, "has tokens that are " + std::to_string(bytes) + " bytes apart",
                  "less than 2 GiB");
    }
  }
}

void cuda_backward(Context& context, const Inputs& in, const TensorView& kept_before, const TensorView& dy,
                   const InputGradients& to) {
  check_token_strides({{"x", in.x},
                       {"raw", in.raw},
                       {"z", in.z},
                       {"b", in.b},
                       {"c", in.c},
                       {"dy", dy},
                       {"dx", to.dx},
                       {"draw", to.draw},
                       {"dz", to.dz}});
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  TensorView kept = kept_before;
  if (!kept) {
    kept = scratch.tensor({static_cast<std::int64_t>(cuda_kept_bytes(in))}, DType::u8, "selective_scan: states");
    cuda_forward(context, in, {{}, {}, kept});
  }
  const Sizes sizes(in);
  const std::int64_t tiles = tiles_of(sizes);
  const Parameters parameters = parameters_of(context, in);
  const TensorView partial = scratch.tensor({tiles, sizes.rows, 2 * cuda::kStates}, DType::f32, "selective_scan: sums");
  const Carried carried(context, sizes);
  const std::int64_t pieces = sizes.sequences * carried.segments;
  const TensorView da_log = scratch.tensor({pieces, sizes.channels * sizes.states}, DType::f32, "selective_scan: sums");
  const TensorView dskip = scratch.tensor({pieces, sizes.channels}, DType::f32, "selective_scan: sums");
  if (!context.planning()) {
    with_type(in, [&](auto zero) {
      using T = decltype(zero);
      const cuda::Gradients<T> gradients{cuda::Lines<T>(dy),
                                         cuda::Lines<T>(to.dx),
                                         cuda::Lines<T>(to.draw),
                                         cuda::Lines<T>(to.dz),
                                         static_cast<float*>(partial.data),
                                         static_cast<float*>(da_log.data),
                                         static_cast<float*>(dskip.data),
                                         sizes.rows};
      const auto call = call_of<T>(in, sizes, parameters, kept, carried, {dy, to.dx, to.draw, to.dz});
      ops::cuda::queue_kernel(context, "selective_scan", cuda::carry_back_kernel<T>, (pieces - sizes.sequences) * tiles,
                              cuda::kThreads, 0, call, gradients.dy);
      const auto walk = [&](auto buffers) {
        constexpr int kBuffers = decltype(buffers)::value;
        ops::cuda::queue_kernel(context, "selective_scan", cuda::backward_kernel<T, kBuffers>, pieces * tiles,
                                cuda::kThreads, static_cast<int>(sizeof(cuda::BackwardShared<T, kBuffers>)), call,
                                gradients);
      };
      // f32 takes one: with two, a block less fits a multiprocessor.
      constexpr int kMost = sizeof(T) == 2 ? 2 : 1;
      constexpr auto kRoom = static_cast<std::int64_t>(sizeof(cuda::BackwardShared<T, kMost>));
      if (is_whole(call) && context.architecture().shared_memory >= kRoom) {
        walk(std::integral_constant<int, kMost>());
      } else {
        walk(std::integral_constant<int, 0>());
      }
      const cuda::BackwardSums<T> sums{gradients.partial,
                                       gradients.da_log,
                                       gradients.dskip,
                                       tiles,
                                       sizes.rows,
                                       sizes.length,
                                       pieces,
                                       call.channels,
                                       call.states,
                                       cuda::Lines<T>(to.db),
                                       cuda::Lines<T>(to.dc),
                                       static_cast<float*>(to.da_log.data),
                                       static_cast<float*>(to.dskip.data)};
      ops::cuda::queue_kernel(context, "selective_scan", cuda::sum_kernel<T>,
                              (sums.threads() + cuda::kThreads - 1) / cuda::kThreads, cuda::kThreads, 0, sums);
    });
  }
}

// Four elements of T at a multiple of four of each row may be read at once.
template <class T>
bool in_fours(const TensorView& rows) {
  const std::int64_t four = 4 * static_cast<std::int64_t>(sizeof(T));
  return reinterpret_cast<std::uintptr_t>(rows.data) % static_cast<std::uintptr_t>(four) == 0 &&
         rows.stride[0] * static_cast<std::int64_t>(sizeof(T)) % four == 0;
}

template <class T, class P>
void queue_step(const Context& context, const Inputs& in, const P* dt_bias, const P* a_log, const P* skip,
                const TensorView& state, const TensorView& y, const StepProjection& projection) {
  const auto lines = [](const TensorView& view) {
    cuda::Lines<T> result;
    if (!view) return result;
    result.data = static_cast<T*>(view.data);
    result.line_stride = view.stride[0];
    return result;
  };
  const std::int64_t sequences = in.x.size(0), channels = in.x.size(1), states = in.b.size(1);
  const bool parameter = reinterpret_cast<std::uintptr_t>(a_log) % (4 * sizeof(P)) == 0;
  const StepCall<T, P> call{lines(in.x),
                            lines(in.raw),
                            lines(in.z),
                            lines(in.b),
                            lines(in.c),
                            lines(y),
                            dt_bias,
                            a_log,
                            skip,
                            static_cast<float*>(state.data),
                            sequences,
                            channels,
                            static_cast<int>(states),
                            states == cuda::kStates && parameter && in_fours<T>(in.b) && in_fours<T>(in.c) &&
                                reinterpret_cast<std::uintptr_t>(state.data) % 16 == 0,
                            lines(projection.ranks),
                            static_cast<const P*>(projection.weight.data),
                            projection.weight ? static_cast<int>(projection.weight.size(1)) : 0};
  ops::cuda::queue_kernel(context, "selective_scan", step_kernel<T, P>,
                          (sequences * channels * 4 + cuda::kThreads - 1) / cuda::kThreads, cuda::kThreads, 0, call);
}

bool has_narrow_parameters(const Inputs& in) {
  return in.dt_bias.dtype == DType::bf16 && in.a_log.dtype == DType::bf16 && in.skip.dtype == DType::bf16;
}

// With a weight as wide as the parameters, of rows and ranks that are read 16 bytes at a time.
bool cuda_projects(const Inputs& in, const StepProjection& projection) {
  const auto aligned = [](const TensorView& view) {
    return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
           view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype)) % 16 == 0;
  };
  return projection.weight.dtype == (has_narrow_parameters(in) ? DType::bf16 : DType::f32) &&
         projection.weight.size(1) % 8 == 0 && aligned(projection.weight) && aligned(projection.ranks);
}

void cuda_step(Context& context, const Inputs& in, const TensorView& state, const TensorView& y,
               const StepProjection& projection) {
  const ArenaScope scope(context.scratch());
  const bool narrow = has_narrow_parameters(in);
  const Parameters wide = narrow ? Parameters{} : parameters_of(context, in);
  if (context.planning()) return;
  with_type(in, [&](auto zero) {
    using T = decltype(zero);
    if (narrow) {
      queue_step<T, bf16>(context, in, static_cast<const bf16*>(in.dt_bias.data),
                          static_cast<const bf16*>(in.a_log.data), static_cast<const bf16*>(in.skip.data), state, y,
                          projection);
    } else {
      queue_step<T, float>(context, in, wide.dt_bias, wide.a_log, wide.skip, state, y, projection);
    }
  });
}

}  // namespace

const Implementation kCuda{"cuda",
                           Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             if (problem.states > cuda::kStates) {
                               return Support::no("at most " + std::to_string(cuda::kStates) + " states a channel");
                             }
                             return supports_f32_and_bf16({problem.dtype});
                           },
                           cuda_kept_bytes,
                           cuda_forward,
                           cuda_backward,
                           cuda_step,
                           cuda_projects};

}  // namespace flashgla::ops::selective_scan

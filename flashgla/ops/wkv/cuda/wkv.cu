// The row of the table that runs on CUDA.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/weight_in_f32.h"
#include "flashgla/ops/wkv/cuda/backward.cuh"
#include "flashgla/ops/wkv/cuda/forward.cuh"
#include "flashgla/ops/wkv/cuda/tile_backward.cuh"
#include "flashgla/ops/wkv/cuda/tile_forward.cuh"
#include "flashgla/ops/wkv/implementations.h"

namespace flashgla::ops::wkv {

namespace {

using bf16 = __nv_bfloat16;

// Threads that fill a large GPU, with some loads each on their way; and the shortest segment of time worth a walk.
constexpr std::int64_t kThreadsWanted = 131072, kLeastSegment = 64;
constexpr std::int64_t kLeastPart = 2 * cuda::kPartTokens;
// Blocks of tiles that a large GPU runs at once: lines that are cut into parts give as many at most.
constexpr std::int64_t kBlocksAtOnce = 264;
// Channels of a block.
template <class T>
constexpr int kForwardAcross = 32 * cuda::kForwardChannels<T>;
constexpr int kBackwardAcross = 32;
constexpr std::int64_t kMostTileTokens = std::int64_t{1} << 30;  // of a line: counted in 32 bits

// How time is cut, by the sizes alone, so that neither memory nor bits depend on where tensors lie.
struct Cut {
  std::int64_t segment, segments;
  bool tiled = false;     // what tiles.cuh is for
  bool in_parts = false;  // lines, there

  explicit Cut(const Inputs& in) : segment(cuda::kTileSegment), segments(1) {
    const Sizes sizes(in);
    const std::int64_t lines = std::max<std::int64_t>(sizes.rows / std::max<std::int64_t>(sizes.length, 1), 1);
    const std::int64_t blocks = std::max<std::int64_t>(lines * ((sizes.channels + 31) / 32), 1);
    const std::int64_t most_parts = (sizes.length + kLeastPart - 1) / kLeastPart;
    in_parts = blocks < cuda::kLeastTileBlocks;
    tiled = !in.cu_seqlens && sizes.length >= segment && sizes.length <= kMostTileTokens &&
            blocks * most_parts >= cuda::kLeastTileBlocks;
    if (tiled) {
      segments = (sizes.length + segment - 1) / segment;
      return;
    }
    const std::int64_t threads = std::max<std::int64_t>(lines * sizes.channels / 2, 1);
    const std::int64_t wanted = std::max<std::int64_t>(kThreadsWanted / threads, 1);
    const std::int64_t tokens = std::max((sizes.length + wanted - 1) / wanted, kLeastSegment);
    segment = (tokens + cuda::kChunk - 1) / cuda::kChunk * cuda::kChunk;
    segments = std::max<std::int64_t>((sizes.length + segment - 1) / segment, 1);
  }
};

std::size_t cuda_kept_bytes(const Inputs& in) {
  const Sizes sizes(in);
  const Cut cut(in);
  if (cut.segments == 1 || sizes.rows == 0) return 0;
  return static_cast<std::size_t>(sizes.rows / sizes.length * cut.segments * 3 * sizes.channels) * sizeof(float);
}

// Parameters in f32, in scratch where they are not.
struct Parameters {
  const float *time_decay, *time_first;
};

Parameters parameters_of(Context& context, const Inputs& in) {
  const std::int64_t channels = in.k.size(-1);
  return {weight_in_f32(context, in.time_decay, channels), weight_in_f32(context, in.time_first, channels)};
}

template <class T>
cuda::Call<T> call_of(const Inputs& in, const Parameters& parameters, const TensorView& prefixes) {
  const Sizes sizes(in);
  const Cut cut(in);
  return {cuda::Lines<T>(in.k),
          cuda::Lines<T>(in.v),
          cuda::Lines<T>(in.r),
          parameters.time_decay,
          parameters.time_first,
          static_cast<const float*>(in.h0.data),
          static_cast<const std::int32_t*>(in.cu_seqlens.data),
          sizes.sequences,
          in.k.size(0),
          sizes.length,
          static_cast<int>(sizes.channels),
          cut.segment,
          cut.segments,
          static_cast<float*>(prefixes.data)};
}

// Calls run(T(), V) with the kernels' type for the inputs' and the channels of a thread: two of two bytes where all
// tensors are laid out for it.
template <class Run>
void with_type(std::initializer_list<const TensorView*> tensors, const Run& run) {
  const TensorView& first = **tensors.begin();
  if (first.dtype == DType::f32) return run(float{}, std::integral_constant<int, 1>());
  const bool even = first.size(-1) % 2 == 0 && std::all_of(tensors.begin(), tensors.end(), [](const TensorView* view) {
                      return !*view || ops::cuda::is_aligned(*view, 2);
                    });
  even ? run(bf16{}, std::integral_constant<int, 2>()) : run(bf16{}, std::integral_constant<int, 1>());
}

// Whether a call goes by tiles: on Hopper, by shared memory, where rows lie so that 16 bytes can be copied at once.
bool by_tiles(const Context& context, const Inputs& in, std::initializer_list<const TensorView*> copied) {
  const int each = 16 / static_cast<int>(size_of(in.k.dtype));
  return Cut(in).tiled && context.architecture().cuda_capability >= 90 && in.k.size(2) % each == 0 &&
         ops::cuda::are_aligned(copied, each);
}

std::int64_t tile_blocks_of(const Inputs& in, const cuda::Parts& parts, int across) {
  return in.k.size(0) * parts.count * ((in.k.size(2) + across - 1) / across);
}

// Parts of a call's lines, whose blocks have `across` channels, their ends in scratch.
cuda::Parts parts_of(Context& context, const Inputs& in, int across) {
  const Cut cut(in);
  if (!cut.tiled || !cut.in_parts || in.k.numel() == 0) return {};
  const std::int64_t blocks = tile_blocks_of(in, {}, across), length = in.k.size(1);
  const std::int64_t wanted = kBlocksAtOnce / blocks, even = (length + wanted - 1) / wanted;
  const std::int64_t part =
      std::max((even + cuda::kPartTokens - 1) / cuda::kPartTokens * cuda::kPartTokens, kLeastPart);
  const std::int64_t count = (length + part - 1) / part;
  if (count == 1) return {};
  const Shape shape({in.k.size(0) * count, 3, in.k.size(2)});
  const TensorView ends = context.scratch().tensor(shape, DType::f32, "wkv: states");
  return {static_cast<int>(part), static_cast<int>(count), static_cast<float*>(ends.data)};
}
cuda::Parts forward_parts(Context& context, const Inputs& in) {
  return parts_of(context, in, in.k.dtype == DType::f32 ? kForwardAcross<float> : kForwardAcross<bf16>);
}

std::int64_t blocks_of(std::int64_t threads) { return (threads + cuda::kThreads - 1) / cuda::kThreads; }

template <class T>
std::int64_t blocks_of(const cuda::Call<T>& call, int each) {
  return blocks_of(call.lines * call.segments * (call.channels / each));
}

// y and ht absent: only the prefixes.
void run_forward(Context& context, const Inputs& in, const Parameters& parameters, const TensorView& prefixes,
                 const cuda::Parts& parts, const TensorView& y, const TensorView& ht) {
  if (ht && (in.cu_seqlens || in.k.size(1) == 0)) {  // of sequences without a token
    in.h0 ? context.queue().copy(ht.data, in.h0.data, ht.bytes()) : context.queue().zero(ht.data, ht.bytes());
  }
  if (in.k.numel() == 0) return;
  if (by_tiles(context, in, {&in.k, &in.v, &in.r, &y})) {
    return ops::cuda::with_element(in.k.dtype, [&](auto zero) {
      using T = decltype(zero);
      const cuda::Call<T> call = call_of<T>(in, parameters, prefixes);
      const cuda::Lines<T> to = y ? cuda::Lines<T>(y) : cuda::Lines<T>();
      const auto queue = [&](auto* kernel) {
        ops::cuda::queue_kernel(context, "wkv", kernel, tile_blocks_of(in, parts, kForwardAcross<T>),
                                cuda::kForwardThreads, cuda::kForwardTileBytes<T>, call, parts, to,
                                static_cast<float*>(ht.data));
      };
      if (parts.count > 1) queue(cuda::tile_forward_kernel<T, true>);
      queue(cuda::tile_forward_kernel<T, false>);
    });
  }
  with_type({&in.k, &in.v, &in.r, &y}, [&](auto zero, auto each) {
    using T = decltype(zero);
    constexpr int V = decltype(each)::value;
    const cuda::Call<T> call = call_of<T>(in, parameters, prefixes);
    if (call.segments > 1) {
      ops::cuda::queue_kernel(context, "wkv", cuda::segment_kernel<T, V>, blocks_of(call, V), cuda::kThreads, 0, call);
      ops::cuda::queue_kernel(context, "wkv", cuda::join_kernel<T, true>, blocks_of(call.lines * call.channels),
                              cuda::kThreads, 0, call, call.prefixes);
    }
    if (!y && !ht) return;
    ops::cuda::queue_kernel(context, "wkv", cuda::forward_kernel<T, V>, blocks_of(call, V), cuda::kThreads, 0, call,
                            y ? cuda::Lines<T>(y) : cuda::Lines<T>(), static_cast<float*>(ht.data));
  });
}

// What forward keeps, in scratch where the caller has no place for it; absent with one segment.
TensorView prefixes_of(Context& context, const Inputs& in, const TensorView& kept) {
  const std::size_t bytes = cuda_kept_bytes(in);
  if (kept || bytes == 0) return bytes == 0 ? TensorView() : kept;
  return context.scratch().tensor({static_cast<std::int64_t>(bytes)}, DType::u8, "wkv: states");
}

void cuda_forward(Context& context, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  const Parameters parameters = parameters_of(context, in);
  const TensorView prefixes = prefixes_of(context, in, out.kept);
  const cuda::Parts parts = forward_parts(context, in);
  if (!context.planning()) run_forward(context, in, parameters, prefixes, parts, out.y, out.ht);
}

// Gradients of parameters by [lines * segments,E] or [lines * parts,E], to be added.
struct PartialGradients {
  TensorView decay, first;
};

void backward_by_tiles(Context& context, const Inputs& in, const Parameters& parameters, const TensorView& prefixes,
                       const cuda::Parts& parts, const TensorView& dy, const InputGradients& to,
                       const PartialGradients& sums) {
  ops::cuda::with_element(in.k.dtype, [&](auto zero) {
    using T = decltype(zero);
    const cuda::TileGradients<T> gradients{cuda::Lines<T>(dy),
                                           cuda::Lines<T>(to.dk),
                                           cuda::Lines<T>(to.dv),
                                           cuda::Lines<T>(to.dr),
                                           static_cast<float*>(sums.decay.data),
                                           static_cast<float*>(sums.first.data)};
    const cuda::Call<T> call = call_of<T>(in, parameters, prefixes);
    const auto queue = [&](auto* kernel) {
      ops::cuda::queue_kernel(context, "wkv", kernel, tile_blocks_of(in, parts, kBackwardAcross),
                              cuda::kBackwardThreads, cuda::kBackwardTileBytes<T>, call, parts, gradients);
    };
    if (parts.count > 1) queue(cuda::tile_backward_kernel<T, true>);
    queue(cuda::tile_backward_kernel<T, false>);
  });
}

// states: the states before chunks [lines,chunks,3,E]; suffixes: as prefixes.
void backward_by_segments(Context& context, const Inputs& in, const Parameters& parameters, const TensorView& prefixes,
                          const TensorView& dy, const InputGradients& to, const PartialGradients& sums,
                          const TensorView& states, const TensorView& suffixes) {
  with_type({&in.k, &in.v, &in.r, &dy, &to.dk, &to.dv, &to.dr}, [&](auto zero, auto each) {
    using T = decltype(zero);
    constexpr int V = decltype(each)::value;
    const cuda::Call<T> call = call_of<T>(in, parameters, prefixes);
    const cuda::Gradients<T> gradients{cuda::Lines<T>(dy),
                                       cuda::Lines<T>(to.dk),
                                       cuda::Lines<T>(to.dv),
                                       cuda::Lines<T>(to.dr),
                                       static_cast<float*>(states.data),
                                       static_cast<float*>(suffixes.data),
                                       static_cast<float*>(sums.decay.data),
                                       static_cast<float*>(sums.first.data),
                                       states.size(0) / call.lines};
    ops::cuda::queue_kernel(context, "wkv", cuda::states_kernel<T, V>, blocks_of(call, V), cuda::kThreads, 0, call,
                            gradients);
    if (call.segments > 1) {
      ops::cuda::queue_kernel(context, "wkv", cuda::join_kernel<T, false>, blocks_of(call.lines * call.channels),
                              cuda::kThreads, 0, call, gradients.suffixes);
    }
    ops::cuda::queue_kernel(context, "wkv", cuda::backward_kernel<T, V>, blocks_of(call, V), cuda::kThreads, 0, call,
                            gradients);
  });
}

void cuda_backward(Context& context, const Inputs& in, const TensorView& kept, const TensorView& dy,
                   const InputGradients& to) {
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const Sizes sizes(in);
  const Cut cut(in);
  const Parameters parameters = parameters_of(context, in);
  const TensorView prefixes = prefixes_of(context, in, kept);
  const bool tiles = by_tiles(context, in, {&in.k, &in.v, &in.r, &dy, &to.dk, &to.dv, &to.dr});
  const cuda::Parts again = kept ? cuda::Parts() : forward_parts(context, in);
  const cuda::Parts parts = parts_of(context, in, kBackwardAcross);
  const std::int64_t lines = in.k.size(0), rows = lines * (tiles ? parts.count : cut.segments);
  const PartialGradients sums{scratch.tensor({rows, sizes.channels}, DType::f32, "wkv: sums"),
                              scratch.tensor({rows, sizes.channels}, DType::f32, "wkv: sums")};
  TensorView states, suffixes;
  if (!tiles) {
    const std::int64_t chunks = (sizes.length + cuda::kChunk - 1) / cuda::kChunk;
    states = scratch.tensor({lines * chunks, 3, sizes.channels}, DType::f32, "wkv: states");
    if (cut.segments > 1) {
      suffixes = scratch.tensor({lines * cut.segments, 3, sizes.channels}, DType::f32, "wkv: states");
    }
  }
  if (in.k.numel() == 0) return;
  if (!context.planning()) {
    if (!kept) run_forward(context, in, parameters, prefixes, again, {}, {});
    if (tiles) {
      backward_by_tiles(context, in, parameters, prefixes, parts, dy, to, sums);
    } else {
      backward_by_segments(context, in, parameters, prefixes, dy, to, sums, states, suffixes);
    }
  }
  elementwise::column_sum(context, sums.decay, to.dtime_decay, true);
  elementwise::column_sum(context, sums.first, to.dtime_first, true);
}

void cuda_step(Context& context, const Inputs& inputs, const TensorView& state, const TensorView& y) {
  Inputs batch = as_batch(inputs);
  batch.h0 = state;  // each thread reads its part before it writes it
  cuda_forward(context, batch, {as_batch(y), state, {}});
}

}  // namespace

const Implementation kCuda{
    "cuda",
    Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    cuda_kept_bytes,
    cuda_forward,
    cuda_backward,
    cuda_step};

}  // namespace flashgla::ops::wkv

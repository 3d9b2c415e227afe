// The row of the table that runs on CUDA: short sequences by direct sums, long ones by transforms.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/long_convolution/cuda/blocks.cuh"
#include "flashgla/ops/long_convolution/cuda/direct.cuh"
#include "flashgla/ops/long_convolution/cuda/fused.cuh"
#include "flashgla/ops/long_convolution/implementations.h"
#include "flashgla/ops/weight_in_f32.h"

namespace flashgla::ops::long_convolution {

namespace {

using cuda::Call;
using cuda::Lines;
using bf16 = __nv_bfloat16;

constexpr const char* kName = "long_convolution";
constexpr std::int64_t kGroups = 16;  // of sequences, whose direct shares of the filter's gradient are added behind
constexpr std::int64_t kMultiprocessors = 132;  // of a large GPU: what is cut for it has the same bits on others

std::int64_t ceil_of(std::int64_t count, std::int64_t each) { return (count + each - 1) / each; }

// How a call is cut: by sizes alone, since where sequences end lies on the device.
struct Cut {
  std::int64_t sequences, groups, blocks;  // groups of channels; blocks of the longest sequence
  bool transforms, direct;                 // sequences may be such that want them

  Cut(const Context& context, const Inputs& in, bool backward)
      : sequences(sequences_of(in)),
        groups(ceil_of(in.x.size(2), cuda::kChannels)),
        blocks(1),
        transforms(false),
        direct(true) {
    const std::int64_t length = in.x.size(1), past = in.past ? std::min(in.past.size(1), in.filter.size(0)) : 0;
    blocks = std::max<std::int64_t>(ceil_of(std::min(length + past, in.filter.size(0)), cuda::kPoints), 1);
    // By shared memory, where tokens before the call wait in x's dtype.
    fused_ = blocks == 1 && context.architecture().cuda_capability >= 90 && (!in.past || in.past.dtype == in.x.dtype);
    across_ = backward ? cuda::kBackwardChannels : cuda::kForwardChannels;
    channels_ = in.x.size(2);
    // Of packed sequences the host does not know how many blocks they are.
    transforms = length > 1 && cuda::by_transforms(length, past) && (fused_ || !in.cu_seqlens);
    direct = !transforms || in.cu_seqlens || !cuda::by_transforms(length, 0);
  }
  bool fused() const { return transforms && fused_; }
  // Chunks of sequences, each of a fused block: the least time, a block taking `each` transforms a sequence and `once`
  // beside them.
  int chunks(std::int64_t each, std::int64_t once) const {
    int best = 1;
    std::int64_t least = 0;
    for (int chunks = 1; chunks <= std::min<std::int64_t>(sequences, kGroups); ++chunks) {
      const std::int64_t time =
          ceil_of(fused_blocks(chunks), kMultiprocessors) * (each * ceil_of(sequences, chunks) + once);
      if (chunks > 1 && time >= least) continue;
      best = chunks;
      least = time;
    }
    return best;
  }
  std::int64_t fused_blocks(int chunks) const { return ceil_of(channels_, across_) * chunks; }
  // Where fused blocks keep their filters' spectra.
  float2* fused_filters(Context& context, int chunks) const {
    const Shape shape({fused_blocks(chunks) * across_, 2 * cuda::kPoints});
    return static_cast<float2*>(context.scratch().tensor(shape, DType::f32, "long_convolution: filters").data);
  }

 private:
  bool fused_ = false;
  std::int64_t across_ = 0, channels_ = 0;  // of a fused block, of the call
};

template <class T>
Call<T> call_of(const Inputs& in, const float* skip, const Cut& cut) {
  return {Lines<T>(in.x),
          static_cast<const float*>(in.filter.data),
          skip,
          in.filter.size(0),
          in.past.data,
          in.past && in.past.dtype == DType::f32,
          in.past ? in.past.size(1) : 0,
          static_cast<const std::int32_t*>(in.positions.data),
          static_cast<const std::int32_t*>(in.cu_seqlens.data),
          in.x.size(0),
          in.x.size(1),
          in.x.size(2),
          cut.sequences,
          cut.transforms};
}

// Calls run(T()) with the kernels' type for the inputs'.
template <class Run>
void with_type(const Inputs& in, const Run& run) {
  in.x.dtype == DType::f32 ? run(float{}) : run(bf16{});
}

template <class... Parameters, class... Arguments>
void queue_direct(const Context& context, void (*kernel)(Parameters...), std::int64_t lines, std::int64_t rows,
                  std::int64_t channels, const Arguments&... arguments) {
  const std::int64_t threads = lines * ceil_of(rows, cuda::kSide) * channels;
  ops::cuda::queue_kernel(context, kName, kernel, ceil_of(threads, cuda::kDirectThreads), cuda::kDirectThreads, 0,
                          arguments...);
}

template <class... Parameters, class... Arguments>
void queue_transforms(const Context& context, void (*kernel)(Parameters...), std::int64_t blocks, int shared,
                      const Arguments&... arguments) {
  ops::cuda::queue_kernel(context, kName, kernel, blocks, cuda::kThreads, shared, arguments...);
}

template <class... Parameters, class... Arguments>
void queue_products(const Context& context, void (*kernel)(Parameters...), std::int64_t count,
                    const cuda::Spectra& spectra, const Arguments&... arguments) {
  const std::int64_t threads = count * spectra.step();
  ops::cuda::queue_kernel(context, kName, kernel, ceil_of(threads, cuda::kProductThreads), cuda::kProductThreads, 0,
                          arguments...);
}

// Of `count` sequences or filters and some groups of channels.
cuda::Spectra spectra_of(Context& context, const Cut& cut, std::int64_t count, std::int64_t groups) {
  const Shape shape({count * cut.blocks * groups, 2 * cuda::Spectra::kOfGroup});
  return {static_cast<float2*>(context.scratch().tensor(shape, DType::f32, "long_convolution: spectra").data),
          cut.blocks, groups};
}

// Groups of channels at a time, of which so many spectra of a sequence or filter stay in the second cache.
std::int64_t groups_at_once(const Cut& cut, std::int64_t spectra) {
  constexpr std::int64_t kCache = 32 << 20;
  const std::int64_t bytes = spectra * cut.blocks * cuda::Spectra::kOfGroup * static_cast<std::int64_t>(sizeof(float2));
  return std::clamp<std::int64_t>(kCache / bytes, 1, cut.groups);
}

// Calls run for groups [first, first + groups) after groups.
template <class Run>
void for_groups(const Cut& cut, std::int64_t at_once, const Run& run) {
  for (std::int64_t first = 0; first < cut.groups; first += at_once) run(first, std::min(at_once, cut.groups - first));
}

// Tiles of blocks that a thread has in registers.
template <class Run>
void with_tile(const Cut& cut, const Run& run) {
  cut.blocks <= 4 ? run(std::integral_constant<int, 4>()) : run(std::integral_constant<int, 16>());
}

void forward_by_blocks(Context& context, const Inputs& in, const float* skip, const Cut& cut, const TensorView& y) {
  const std::int64_t at_once = groups_at_once(cut, cut.sequences + 1);
  cuda::Spectra filter = spectra_of(context, cut, 1, at_once), x = spectra_of(context, cut, cut.sequences, at_once);
  if (context.planning()) return;
  with_type(in, [&](auto zero) {
    using T = decltype(zero);
    const Call<T> call = call_of<T>(in, skip, cut);
    const Call<float> any = call_of<float>(in, skip, cut);
    for_groups(cut, at_once, [&](std::int64_t first, std::int64_t groups) {
      for (cuda::Spectra* each : {&filter, &x}) each->first = first, each->groups = groups;
      const std::int64_t blocks = groups * cut.blocks, all = blocks * cut.sequences;
      queue_transforms(context, cuda::filter_spectra_kernel, blocks, cuda::Transform::kBytes, any, filter);
      queue_transforms(context, cuda::spectra_kernel<T, false>, all, cuda::Transform::kBytes, call, call.x, x);
      with_tile(cut, [&](auto tile) {
        queue_products(context, cuda::product_kernel<decltype(tile)::value, false>, cut.sequences, x, any, filter, x);
      });
      queue_transforms(context, cuda::tokens_kernel<T>, all, cuda::Transform::kBytes, call, x, Lines<T>(y));
    });
  });
}

// dfilter [1,L,D].
void backward_by_blocks(Context& context, const Inputs& in, const float* skip, const Cut& cut, const TensorView& dy,
                        const TensorView& dx, float* dfilter) {
  const std::int64_t at_once = groups_at_once(cut, 2 * cut.sequences + 2);
  cuda::Spectra filter = spectra_of(context, cut, 1, at_once), x = spectra_of(context, cut, cut.sequences, at_once);
  cuda::Spectra gradients = spectra_of(context, cut, cut.sequences, at_once);
  cuda::Spectra sums = spectra_of(context, cut, 1, at_once);
  if (context.planning()) return;
  with_type(in, [&](auto zero) {
    using T = decltype(zero);
    const Call<T> call = call_of<T>(in, skip, cut);
    const Call<float> any = call_of<float>(in, skip, cut);
    for_groups(cut, at_once, [&](std::int64_t first, std::int64_t groups) {
      for (cuda::Spectra* each : {&filter, &x, &gradients, &sums}) each->first = first, each->groups = groups;
      const std::int64_t blocks = groups * cut.blocks, all = blocks * cut.sequences;
      queue_transforms(context, cuda::filter_spectra_kernel, blocks, cuda::Transform::kBytes, any, filter);
      queue_transforms(context, cuda::spectra_kernel<T, false>, all, cuda::Transform::kBytes, call, call.x, x);
      queue_transforms(context, cuda::spectra_kernel<T, true>, all, cuda::Transform::kBytes, call, Lines<T>(dy),
                       gradients);
      with_tile(cut, [&](auto tile) {
        constexpr int kTile = decltype(tile)::value;
        queue_products(context, cuda::filter_product_kernel<kTile>, 1, x, any, x, gradients, sums);
        queue_products(context, cuda::product_kernel<kTile, true>, cut.sequences, x, any, filter, gradients);
      });
      queue_transforms(context, cuda::tokens_kernel<T>, all, cuda::Transform::kBytes, call, gradients, Lines<T>(dx));
      queue_transforms(context, cuda::filter_gradient_kernel, blocks, cuda::Transform::kBytes, any, sums, dfilter);
    });
  });
}

// Whether the copy engine can take a call's tokens and outputs. It writes whole pieces of 16 bytes, also behind a row.
bool by_boxes(const Inputs& in, const TensorView& y) {
  const int each = 16 / static_cast<int>(size_of(y.dtype));
  return !in.cu_seqlens && !in.past && y.size(2) % each == 0 && ops::cuda::are_aligned({&in.x, &y}, each);
}

CUtensorMap box_map(const TensorView& view) {
  const auto size = [&](int dim) { return static_cast<cuuint64_t>(view.size(dim)); };
  const auto bytes = [&](int dim) {  // of a dimension of one element any stride would do, but zero
    return std::max<cuuint64_t>(
        16, static_cast<cuuint64_t>(view.stride[static_cast<std::size_t>(dim)]) * size_of(view.dtype));
  };
  return flashgla::cuda::tensor_map_of_rows(kName, view.dtype == DType::f32, view.data, {size(2), size(1), size(0), 1},
                                            {bytes(1), bytes(0), bytes(0)}, cuda::kForwardChannels, cuda::kSpan);
}

void cuda_forward(Context& context, const Inputs& in, const TensorView& y) {
  const ArenaScope scope(context.scratch());
  const float* skip = weight_in_f32(context, in.skip, in.skip.size(0));
  if (in.x.numel() == 0) return;
  const Cut cut(context, in, false);
  if (cut.transforms && !cut.fused()) forward_by_blocks(context, in, skip, cut, y);
  const int chunks = cut.fused() ? cut.chunks(2, 1) : 0;
  float2* filters = cut.fused() ? cut.fused_filters(context, chunks) : nullptr;
  if (context.planning()) return;
  with_type(in, [&](auto zero) {
    using T = decltype(zero);
    const Call<T> call = call_of<T>(in, skip, cut);
    if (in.past && call.length == 1 && !in.cu_seqlens) {
      return ops::cuda::queue_kernel(context, kName, cuda::step_kernel<T>,
                                     call.sequences * ceil_of(call.channels, cuda::kStepChannels), cuda::kStepThreads,
                                     0, call, Lines<T>(y));
    }
    if (cut.fused()) {
      const bool boxes = context.architecture().cuda_capability == 90 && by_boxes(in, y);
      const cuda::BoxMaps maps = boxes ? cuda::BoxMaps{box_map(in.x), box_map(y)} : cuda::BoxMaps();
      const auto kernel = boxes ? cuda::fused_forward_kernel<T, true> : cuda::fused_forward_kernel<T, false>;
      ops::cuda::queue_kernel(context, kName, kernel, cut.fused_blocks(chunks), cuda::kFusedThreads, cuda::kFusedBytes,
                              call, filters, Lines<T>(y), chunks, maps);
    }
    if (cut.direct) {
      queue_direct(context, cuda::sum_kernel<T, false>, call.lines, call.length, call.channels, call, call.x,
                   Lines<T>(y));
    }
  });
}

void cuda_backward(Context& context, const Inputs& in, const TensorView& dy, const InputGradients& to) {
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const float* skip = weight_in_f32(context, in.skip, in.skip.size(0));
  const Cut cut(context, in, true);
  const std::int64_t rows = in.filter.size(0), channels = in.x.size(2);
  const std::int64_t groups = cut.direct ? std::clamp<std::int64_t>(cut.sequences, 1, kGroups) : 0;
  const int chunks = cut.fused() ? cut.chunks(3, 2) : cut.transforms ? 1 : 0;
  const Shape parts({groups + chunks, in.filter.numel()});  // of the filter's gradient
  const bool one = groups + chunks == 1;
  const TensorView sums = one ? to.dfilter.reshape(parts) : scratch.tensor(parts, DType::f32, "long_convolution: sums");
  float* by_transforms = static_cast<float*>(sums.data) + groups * in.filter.numel();
  float2* filters = cut.fused() ? cut.fused_filters(context, chunks) : nullptr;
  if (cut.transforms && !cut.fused()) backward_by_blocks(context, in, skip, cut, dy, to.dx, by_transforms);
  if (!context.planning()) {
    with_type(in, [&](auto zero) {
      using T = decltype(zero);
      const Call<T> call = call_of<T>(in, skip, cut);
      if (cut.fused()) {
        ops::cuda::queue_kernel(context, kName, cuda::fused_backward_kernel<T>, cut.fused_blocks(chunks),
                                cuda::kFusedThreads, cuda::kFusedBytes, call, filters, Lines<T>(dy), Lines<T>(to.dx),
                                by_transforms, chunks);
      }
      if (cut.direct) {
        queue_direct(context, cuda::sum_kernel<T, true>, call.lines, call.length, channels, call, Lines<T>(dy),
                     Lines<T>(to.dx));
        queue_direct(context, cuda::filter_kernel<T>, groups, rows, channels, call, Lines<T>(dy), rows, groups,
                     static_cast<float*>(sums.data));
      }
    });
  }
  if (!one) elementwise::column_sum(context, sums, to.dfilter.reshape(Shape({to.dfilter.numel()})), false);
  // The skip's gradient is that of the filter's first row.
  elementwise::column_sum(context, sums.slice(1, 0, channels), to.dskip, true);
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, cuda_forward,
    cuda_backward};

}  // namespace flashgla::ops::long_convolution

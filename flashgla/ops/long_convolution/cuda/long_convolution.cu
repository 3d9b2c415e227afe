// The row of the table that runs on CUDA: short sequences by direct sums, long ones by transforms.
#include <array>
#include <numeric>

#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/long_convolution/cuda/blocks.cuh"
#include "flashgla/ops/long_convolution/cuda/direct.cuh"
#include "flashgla/ops/long_convolution/cuda/fused_gradients.cuh"
#include "flashgla/ops/long_convolution/cuda/narrow_cluster.cuh"
#include "flashgla/ops/long_convolution/cuda/whole.h"
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
  std::int64_t sequences, blocks;  // of the longest sequence
  bool transforms, direct;         // sequences may be such that want them

  Cut(const Architecture& architecture, const Inputs& in)
      : sequences(sequences_of(in)), blocks(1), transforms(false), direct(true) {
    const std::int64_t length = in.x.size(1), past = in.past ? std::min(in.past.size(1), in.filter.size(0)) : 0;
    longest_ = std::min(length + past, in.filter.size(0));
    blocks = std::max<std::int64_t>(ceil_of(longest_, cuda::kPoints), 1);
    // By shared memory, where tokens before the call wait in x's dtype.
    fused_ = blocks == 1 && architecture.cuda_capability >= 90 && (!in.past || in.past.dtype == in.x.dtype);
    channels_ = in.x.size(2);
    // Of packed sequences the host does not know how many blocks they are.
    transforms = length > 1 && cuda::by_transforms(length, past) && (fused_ || !in.cu_seqlens);
    direct = !transforms || in.cu_seqlens || !cuda::by_transforms(length, 0);
    whole_ = transforms && !fused_ && in.x.dtype == DType::bf16 && in.x.numel() > 0 && longest_ <= kLongestWhole &&
             architecture.cuda_capability == 90;
  }
  std::int64_t channels() const { return channels_; }
  bool fused() const { return transforms && fused_; }
  bool whole() const { return whole_; }
  // Whether two blocks of a cluster have room for a sequence, and there are so many that they take less time forward.
  bool clusters() const { return whole_ && longest_ <= cuda::kClusterPoints && sequences > 2; }
  std::int64_t longest() const { return longest_; }  // tokens of a sequence
  // Chunks of sequences of fused blocks, or clusters, of `across` channels, of which `places` run at once: the least
  // time, a block taking `each` transforms a sequence and `once` beside them.
  int chunks(int across, std::int64_t each, std::int64_t once, std::int64_t places = kMultiprocessors) const {
    int best = 1;
    std::int64_t least = 0;
    for (int chunks = 1; chunks <= std::min<std::int64_t>(sequences, kGroups); ++chunks) {
      const std::int64_t time =
          ceil_of(fused_blocks(across, chunks), places) * (each * ceil_of(sequences, chunks) + once);
      if (chunks > 1 && time >= least) continue;
      best = chunks;
      least = time;
    }
    return best;
  }
  std::int64_t fused_blocks(int across, int chunks) const { return ceil_of(channels_, across) * chunks; }

 private:
  bool fused_ = false, whole_ = false;
  std::int64_t channels_ = 0, longest_ = 0;
};

// What kernels need, but whole transforms' that are the only ones, which take it as it is.
const float* skip_in_f32(Context& context, const Inputs& in, bool only_whole) {
  return only_whole ? nullptr : weight_in_f32(context, in.skip, in.skip.size(0));
}

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

template <class P, class... Parameters, class... Arguments>
void queue_products(const Context& context, void (*kernel)(Parameters...), std::int64_t count, int shared,
                    const cuda::Spectra<P>& spectra, const Arguments&... arguments) {
  const std::int64_t threads = count * spectra.step();
  ops::cuda::queue_kernel(context, kName, kernel, ceil_of(threads, cuda::kProductThreads), cuda::kProductThreads,
                          shared, arguments...);
}

// Of `count` sequences or filters and some groups of channels.
template <class P>
cuda::Spectra<P> spectra_of(Context& context, const Cut& cut, std::int64_t count, std::int64_t groups) {
  using Spectra = cuda::Spectra<P>;
  const auto take = [&](std::int64_t rows, std::int64_t columns) {
    const Shape shape({rows, 2 * columns});
    return static_cast<float2*>(context.scratch().tensor(shape, DType::f32, "long_convolution: spectra").data);
  };
  static_assert(sizeof(P) == sizeof(float2));
  auto* data = reinterpret_cast<P*>(take(count * cut.blocks * groups, Spectra::kOfGroup));
  float2* scales = Spectra::kWide > 1 ? take(count * (cut.blocks + 1) * groups, cuda::kChannels) : nullptr;
  return {data, scales, cut.blocks, groups};
}

// Calls run(spectra) for groups of channels at a time, of which the spectra, `counts` sequences' or filters' each, take
// 512 MiB or are of one group. Fewer groups at a time, which stay in the second cache, take longer: their kernels are
// too short.
template <class P, std::size_t N, class Run>
void for_groups(Context& context, const Cut& cut, const std::array<std::int64_t, N>& counts, const Run& run) {
  constexpr std::int64_t kMost = 512 << 20;
  const std::int64_t spectra = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const std::int64_t bytes = spectra * cut.blocks * cuda::Spectra<P>::kOfGroup * static_cast<std::int64_t>(sizeof(P));
  const std::int64_t all = ceil_of(cut.channels(), cuda::Spectra<P>::kAcross);
  std::int64_t at_once = std::clamp<std::int64_t>(kMost / bytes, 1, all);
  if (at_once > 1) at_once -= at_once % 2;  // kernels may take two at a time
  const ArenaScope scope(context.scratch());
  std::array<cuda::Spectra<P>, N> each;
  for (std::size_t i = 0; i < N; ++i) each[i] = spectra_of<P>(context, cut, counts[i], at_once);
  if (context.planning()) return;
  for (std::int64_t first = 0; first < all; first += at_once) {
    for (auto& one : each) one.first = first, one.groups = std::min(at_once, all - first);
    run(each);
  }
}

// Sums of products of at most 4 or 16 blocks in registers, or of any.
template <class P, bool kBack>
void queue_block_products(const Context& context, const Cut& cut, const Call<float>& call,
                          const cuda::Spectra<P>& filters, const cuda::Spectra<P>& spectra) {
  const auto kernel = cut.blocks <= 4    ? cuda::product_kernel<P, 4, kBack>
                      : cut.blocks <= 16 ? cuda::product_kernel<P, 16, kBack>
                                         : cuda::tile_product_kernel<P, kBack>;
  queue_products(context, kernel, cut.sequences, cuda::products_bytes<P>(cut.blocks), spectra, call, filters, spectra);
}
void queue_filter_products(const Context& context, const Cut& cut, const Call<float>& call,
                           const cuda::Spectra<float2>& x, const cuda::Spectra<float2>& gradients,
                           const cuda::Spectra<float2>& to) {
  const auto kernel = cut.blocks <= 4 ? cuda::filter_product_kernel<4> : cuda::filter_product_kernel<16>;
  queue_products(context, kernel, 1, 0, to, call, x, gradients, to);
}

// Spectra of the filter, of x and of dy, of which empty ones are left out.
template <class P, class T>
void queue_spectra(const Context& context, const Cut& cut, const Call<T>& call, const Lines<T>& dy,
                   const cuda::Spectra<P>& filter, const cuda::Spectra<P>& x, const cuda::Spectra<P>& gradients) {
  const auto of_filter = filter.groups * cut.blocks, of_x = x.groups * cut.blocks * cut.sequences,
             of_gradients = gradients.groups * cut.blocks * cut.sequences;
  queue_transforms(context, cuda::spectra_kernel<P, T>, of_filter + of_x + of_gradients, cuda::Transform<P>::kBytes,
                   call, dy, filter, x, gradients, static_cast<unsigned>(of_filter), static_cast<unsigned>(of_x));
}

// Whether kernels of outputs may take two groups of channels at a time.
bool by_twos(const Cut& cut, const cuda::Spectra<float2>& spectra) {
  return cut.channels() % (2 * cuda::Spectra<float2>::kAcross) == 0 && spectra.groups % 2 == 0;
}
template <class P, class T, int kEach>
void queue_tokens(const Context& context, const Cut& cut, const Call<T>& call, const cuda::Spectra<P>& from,
                  const TensorView& to) {
  const std::int64_t all = from.groups / kEach * cut.blocks * cut.sequences;
  queue_transforms(context, cuda::tokens_kernel<P, T, kEach>, all, cuda::kRowsBytes<P, kEach>, call, from,
                   Lines<T>(to));
}
void queue_filter_gradient(const Context& context, const Cut& cut, const Call<float>& call,
                           const cuda::Spectra<float2>& from, float* dfilter) {
  const std::int64_t all = from.groups * cut.blocks;
  if (by_twos(cut, from)) {
    queue_transforms(context, cuda::filter_gradient_kernel<2>, all / 2, cuda::kRowsBytes<float2, 2>, call, from,
                     dfilter);
  } else {
    queue_transforms(context, cuda::filter_gradient_kernel<1>, all, cuda::kRowsBytes<float2, 1>, call, from, dfilter);
  }
}

// y, or with kBack dx, of `from`, with numbers P.
template <class P, class T, bool kBack>
void queue_blocks(Context& context, const Inputs& in, const float* skip, const Cut& cut, const TensorView& from,
                  const TensorView& to) {
  const Call<T> call = call_of<T>(in, skip, cut);
  const Call<float> any = call_of<float>(in, skip, cut);
  for_groups<P>(context, cut, std::array<std::int64_t, 2>{1, cut.sequences}, [&](const auto& spectra) {
    const auto& [filter, x] = spectra;
    kBack ? queue_spectra<P>(context, cut, call, Lines<T>(from), filter, {}, x)
          : queue_spectra<P>(context, cut, call, Lines<T>(from), filter, x, {});
    queue_block_products<P, kBack>(context, cut, any, filter, x);
    queue_tokens<P, T, 1>(context, cut, call, x, to);
  });
}

// dfilter [1,L,D], in f32 of every dtype.
template <class T>
void queue_block_gradient(Context& context, const Inputs& in, const float* skip, const Cut& cut, const TensorView& dy,
                          float* dfilter) {
  const Call<T> call = call_of<T>(in, skip, cut);
  const Call<float> any = call_of<float>(in, skip, cut);
  const std::array<std::int64_t, 3> counts{cut.sequences, cut.sequences, 1};
  for_groups<float2>(context, cut, counts, [&](const auto& spectra) {
    const auto& [x, gradients, sums] = spectra;
    queue_spectra<float2>(context, cut, call, Lines<T>(dy), {}, x, gradients);
    queue_filter_products(context, cut, any, x, gradients, sums);
    queue_filter_gradient(context, cut, any, sums, dfilter);
  });
}

// dx and dfilter [1,L,D] in f32, whose sums share the gradients' spectra.
void queue_block_gradients(Context& context, const Inputs& in, const float* skip, const Cut& cut, const TensorView& dy,
                           const TensorView& dx, float* dfilter) {
  const Call<float> call = call_of<float>(in, skip, cut);
  const std::array<std::int64_t, 4> counts{1, cut.sequences, cut.sequences, 1};
  for_groups<float2>(context, cut, counts, [&](const auto& spectra) {
    const auto& [filter, x, gradients, sums] = spectra;
    queue_spectra<float2>(context, cut, call, Lines<float>(dy), filter, x, gradients);
    queue_filter_products(context, cut, call, x, gradients, sums);
    queue_block_products<float2, true>(context, cut, call, filter, gradients);
    by_twos(cut, gradients) ? queue_tokens<float2, float, 2>(context, cut, call, gradients, dx)
                            : queue_tokens<float2, float, 1>(context, cut, call, gradients, dx);
    queue_filter_gradient(context, cut, call, sums, dfilter);
  });
}

// Whether TMA can take a call's tokens and outputs. It writes whole pieces of 16 bytes, also behind a row.
bool by_boxes(const Inputs& in, const TensorView& from, const TensorView& to) {
  const int each = 16 / static_cast<int>(size_of(to.dtype));
  return !in.cu_seqlens && !in.past && to.size(2) % each == 0 && ops::cuda::are_aligned({&from, &to}, each);
}

// Boxes of so many channels, so many tokens that are `fold` apart and so many of those: T is a multiple of `fold`.
// swizzled: rows of 16 channels, as tensor_map_of_rows has it.
CUtensorMap box_map(const TensorView& view, const std::array<int, 3>& box, int fold = 1, bool swizzled = false) {
  const auto size = [&](int dim) { return static_cast<cuuint64_t>(view.size(dim)); };
  const auto bytes = [&](int dim) {  // of a dimension of one element any stride would do, but zero
    return std::max<cuuint64_t>(
        16, static_cast<cuuint64_t>(view.stride[static_cast<std::size_t>(dim)]) * size_of(view.dtype));
  };
  const auto apart = static_cast<cuuint64_t>(fold);
  return flashgla::cuda::tensor_map_of_rows(kName, view.dtype == DType::f32, view.data,
                                            {size(2), size(1) / apart, apart, size(0)},
                                            {apart * bytes(1), bytes(1), bytes(0)}, box, swizzled);
}

// Where fused blocks keep their filters' spectra: so many numbers of kPoints.
float2* fused_filters(Context& context, std::int64_t count) {
  const Shape shape({count, 2 * cuda::kPoints});
  return static_cast<float2*>(context.scratch().tensor(shape, DType::f32, "long_convolution: filters").data);
}

// y of f32.
void queue_fused(Context& context, const Inputs& in, const float* skip, const Cut& cut, const TensorView& y) {
  constexpr int kAcross = cuda::kFusedChannels;
  const int chunks = cut.chunks(kAcross, 2, 1);
  const std::int64_t blocks = cut.fused_blocks(kAcross, chunks);
  float2* filters = fused_filters(context, blocks * kAcross);
  if (context.planning()) return;
  const bool boxes = context.architecture().cuda_capability == 90 && by_boxes(in, in.x, y);
  constexpr std::array<int, 3> kBox{kAcross, cuda::kSpan, 1};
  const cuda::BoxMaps maps = boxes ? cuda::BoxMaps{box_map(in.x, kBox), box_map(y, kBox)} : cuda::BoxMaps();
  const auto kernel = boxes ? cuda::fused_kernel<true> : cuda::fused_kernel<false>;
  ops::cuda::queue_kernel(context, kName, kernel, blocks, cuda::kFusedThreads, cuda::kFusedBytes,
                          call_of<float>(in, skip, cut), filters, Lines<float>(y), chunks, maps);
}

// dx and dfilter [chunks,L,D] in f32.
void queue_fused_gradients(Context& context, const Inputs& in, const float* skip, const Cut& cut, int chunks,
                           const TensorView& dy, const TensorView& dx, float* dfilter) {
  const std::int64_t blocks = cut.fused_blocks(cuda::kGradientChannels, chunks);
  auto* filters = fused_filters(context, blocks * cuda::kTeams);
  if (context.planning()) return;
  const bool boxes = context.architecture().cuda_capability == 90 && by_boxes(in, dy, dx) && by_boxes(in, in.x, dx);
  constexpr std::array<int, 3> kBox{cuda::kGradientChannels, cuda::kSpan, 1};
  const cuda::GradientMaps maps =
      boxes ? cuda::GradientMaps{box_map(in.x, kBox), box_map(dy, kBox), box_map(dx, kBox)} : cuda::GradientMaps();
  const auto kernel = boxes ? cuda::fused_gradient_kernel<true> : cuda::fused_gradient_kernel<false>;
  ops::cuda::queue_kernel(context, kName, kernel, blocks, cuda::kFusedThreads, cuda::kGradientBytes,
                          call_of<float>(in, skip, cut), filters, Lines<float>(dy), Lines<float>(dx), dfilter, chunks,
                          maps);
}

// Of bf16: y, or with kGradients dx and dfilter [chunks,L,D]. `to` is y or dx.
template <bool kGradients>
void queue_narrow(Context& context, const Inputs& in, const float* skip, const Cut& cut, int chunks,
                  const TensorView& dy, const TensorView& to, float* dfilter) {
  constexpr int kAcross = cuda::kNarrowChannels, kFold = cuda::kNarrowFold;
  const std::int64_t blocks = cut.fused_blocks(kAcross, chunks);
  static_assert(cuda::kNarrowFilterWords * sizeof(uint4) == kAcross / 2 * cuda::kPoints * sizeof(float2));
  auto* filters = kGradients ? reinterpret_cast<uint4*>(fused_filters(context, blocks * (kAcross / 2))) : nullptr;
  if (context.planning()) return;
  const bool boxes = context.architecture().cuda_capability == 90 && in.x.size(1) % kFold == 0 &&
                     by_boxes(in, in.x, to) &&
                     (kGradients ? by_boxes(in, dy, to) : cut.channels() % (2 * kAcross) == 0);
  constexpr std::array<int, 3> kBox{kAcross, cuda::kPoints / kFold, kFold}, kOfPair{2 * kAcross, kBox[1], kFold / 2};
  const cuda::NarrowMaps maps =
      boxes ? cuda::NarrowMaps{box_map(in.x, kBox, kFold), box_map(kGradients ? dy : in.x, kBox, kFold),
                               box_map(to, kGradients ? kBox : kOfPair, kFold)}
            : cuda::NarrowMaps();
  const auto kernel = boxes ? cuda::narrow_kernel<kGradients, true> : cuda::narrow_kernel<kGradients, false>;
  using flashgla::cuda::Begin;
  flashgla::cuda::launch(kName, kernel, {dim3(static_cast<unsigned>(blocks)), boxes && !kGradients ? 2 : 1},
                         cuda::kNarrowThreads, cuda::kNarrowBytes, static_cast<cudaStream_t>(context.stream()),
                         context.architecture().cuda_capability == 90 ? Begin::beside_previous : Begin::after_previous,
                         call_of<bf16>(in, skip, cut), filters, kGradients ? Lines<bf16>(dy) : Lines<bf16>(),
                         Lines<bf16>(to), dfilter, chunks, maps);
}

// Outputs of sequences that two blocks of a cluster share. Whether they can; where a call is planned, as though they
// could.
bool by_clusters(const Context& context, const Inputs& in, const Cut& cut, const TensorView& y) {
  if (!cut.clusters()) return false;
  return context.planning() || (in.x.size(1) % cuda::kClusterFold == 0 && by_boxes(in, in.x, y));
}
void queue_clusters(Context& context, const Inputs& in, const float* skip, const Cut& cut, const TensorView& y) {
  constexpr int kAcross = cuda::kClusterAcross, kFold = cuda::kClusterFold;
  const ArenaScope scope(context.scratch());
  const int chunks = cut.chunks(kAcross, 2, 1, kMultiprocessors / 2);
  const std::int64_t blocks = 2 * cut.fused_blocks(kAcross, chunks);
  auto* filters = reinterpret_cast<uint4*>(fused_filters(context, blocks * (kAcross / 2)));
  if (context.planning()) return;
  constexpr std::array<int, 3> kBox{kAcross, cuda::kPoints / kFold, kFold};
  const auto map = [&](const TensorView& view) { return box_map(view, kBox, kFold, true); };
  const cuda::NarrowMaps maps{map(in.x), map(in.x), map(y)};
  flashgla::cuda::launch(kName, cuda::narrow_cluster_kernel, {dim3(static_cast<unsigned>(blocks)), 2},
                         cuda::kNarrowThreads, cuda::kClusterBytes, static_cast<cudaStream_t>(context.stream()),
                         flashgla::cuda::Begin::beside_previous, call_of<bf16>(in, skip, cut), filters, chunks, maps);
}

std::size_t cuda_kept_bytes(const Architecture& architecture, const Inputs& in) {
  const Cut cut(architecture, in);
  return cut.whole() && !cut.direct ? kept_of_whole(in.x.size(0), in.x.size(2), cut.longest()) : 0;
}

void cuda_forward(Context& context, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  if (in.x.numel() == 0) return;
  const Cut cut(context.architecture(), in);
  const TensorView& y = out.y;
  const bool clusters = !out.kept && by_clusters(context, in, cut, y);
  const float* skip = skip_in_f32(context, in, cut.whole() && !clusters && !cut.direct);
  const bool step = in.past && in.x.size(1) == 1 && !in.cu_seqlens;
  const bool narrow = in.x.dtype == DType::bf16;
  if (cut.fused()) {
    narrow ? queue_narrow<false>(context, in, skip, cut, cut.chunks(cuda::kNarrowChannels, 2, 1), {}, y, nullptr)
           : queue_fused(context, in, skip, cut, y);
  } else if (cut.whole()) {
    if (clusters) queue_clusters(context, in, skip, cut, y);
    if (!clusters || context.planning()) {
      queue_whole(context, call_of<bf16>(in, skip, cut), cut.longest(),
                  {.x = in.x, .skip = in.skip, .y = y, .kept = out.kept});
    }
  } else if (cut.transforms) {
    narrow ? queue_blocks<cuda::Pair, bf16, false>(context, in, skip, cut, in.x, y)
           : queue_blocks<float2, float, false>(context, in, skip, cut, in.x, y);
  }
  if (context.planning()) return;
  ops::cuda::with_element(in.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Call<T> call = call_of<T>(in, skip, cut);
    if (step) {
      return ops::cuda::queue_kernel(context, kName, cuda::step_kernel<T>,
                                     call.sequences * ceil_of(call.channels, cuda::kStepChannels), cuda::kStepThreads,
                                     0, call, Lines<T>(y));
    }
    if (cut.direct) {
      queue_direct(context, cuda::sum_kernel<T, false>, call.lines, call.length, call.channels, call, call.x,
                   Lines<T>(y));
    }
  });
}

void cuda_backward(Context& context, const Inputs& in, const TensorView& kept, const TensorView& dy,
                   const InputGradients& to) {
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const Cut cut(context.architecture(), in);
  const float* skip = skip_in_f32(context, in, cut.whole() && !cut.direct);
  const std::int64_t rows = in.filter.size(0), channels = in.x.size(2);
  const std::int64_t groups = cut.direct ? std::clamp<std::int64_t>(cut.sequences, 1, kGroups) : 0;
  const bool narrow = in.x.dtype == DType::bf16;
  const int across = narrow ? cuda::kNarrowChannels : cuda::kGradientChannels;
  const int chunks = cut.fused() ? cut.chunks(across, 3, 2) : cut.transforms ? 1 : 0;
  const Shape parts({groups + chunks, in.filter.numel()});  // of the filter's gradient
  const bool one = groups + chunks == 1;
  const TensorView sums = one ? to.dfilter.reshape(parts) : scratch.tensor(parts, DType::f32, "long_convolution: sums");
  float* by_transforms = static_cast<float*>(sums.data) + groups * in.filter.numel();
  if (cut.fused() && narrow) {
    queue_narrow<true>(context, in, skip, cut, chunks, dy, to.dx, by_transforms);
  } else if (cut.fused()) {
    queue_fused_gradients(context, in, skip, cut, chunks, dy, to.dx, by_transforms);
  } else if (cut.whole()) {
    queue_whole(
        context, call_of<bf16>(in, skip, cut), cut.longest(),
        {.x = in.x, .skip = in.skip, .dy = dy, .dx = to.dx, .dfilter = by_transforms, .dskip = to.dskip, .kept = kept});
  } else if (cut.transforms && narrow) {
    queue_blocks<cuda::Pair, bf16, true>(context, in, skip, cut, dy, to.dx);
    queue_block_gradient<bf16>(context, in, skip, cut, dy, by_transforms);
  } else if (cut.transforms) {
    queue_block_gradients(context, in, skip, cut, dy, to.dx, by_transforms);
  }
  if (!context.planning()) {
    ops::cuda::with_element(in.x.dtype, [&](auto zero) {
      using T = decltype(zero);
      const Call<T> call = call_of<T>(in, skip, cut);
      if (cut.direct) {
        queue_direct(context, cuda::sum_kernel<T, true>, call.lines, call.length, channels, call, Lines<T>(dy),
                     Lines<T>(to.dx));
        queue_direct(context, cuda::filter_kernel<T>, groups, rows, channels, call, Lines<T>(dy), rows, groups,
                     static_cast<float*>(sums.data));
      }
    });
  }
  if (!one) elementwise::column_sum(context, sums, to.dfilter.reshape(Shape({to.dfilter.numel()})), false);
  // The skip's gradient is that of the filter's first row; whole transforms, whose digits are bf16's, have their own.
  const std::int64_t exact = cut.whole() ? groups : groups + chunks;
  if (exact > 0) elementwise::column_sum(context, sums.slice(0, 0, exact).slice(1, 0, channels), to.dskip, true);
}

}  // namespace

const Implementation kCuda{
    "cuda",
    Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    cuda_kept_bytes,
    cuda_forward,
    cuda_backward};

}  // namespace flashgla::ops::long_convolution

// Three kernels: the largest logit of each piece of a row; the weights of all tokens, which many multiprocessors share
// (the exponential is some forty operations of f64), with each piece's sum and a histogram of them by size; and one
// block a sequence that cuts and draws. Weights are whole numbers, so that additions give the same sums in any order.
//
// - Without filters the sums of pieces say in which one the draw lies, and all threads share that one.
// - With filters the histogram (or min_p) says from which size on weights may be kept. Where these are few, as for the
//   usual top_k and top_p, each thread takes one of them, ranks it among all of them, and the rest of the row is not
//   looked at again.
// - Else cuts are found by radix selection: four histograms of 11 bits of the weights, by number (top_k) or by mass
//   (top_p). Each warp has a range of the tokens and its lanes neighbours in it: the sums of ranges say in which one
//   the draw lies.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/base/random.h"
#include "flashgla/ops/sampling/cpu/rows.h"
#include "flashgla/ops/sampling/implementations.h"

namespace flashgla::ops::sampling {

namespace {

constexpr int kThreads = 512;  // of the block that draws
constexpr int kWarps = kThreads / 32;
constexpr int kAhead = 8;           // weights that a thread asks for together
constexpr int kPieceThreads = 256;  // of a block that has a piece of a row
constexpr int kPiece = 8 * kPieceThreads;
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kPasses = 4;  // of 11 bits: weights have 44
constexpr std::int32_t kToBeDrawn = kNoneFinite - 1;
using Sum = unsigned long long;

struct Best {
  double logit;
  int token;  // kNotANumber once there is a NaN
};
static_assert(sizeof(Best) == 16);
struct Params {
  const float* logits;
  const std::uint8_t* seen;
  const std::int32_t* positions;
  std::int32_t* tokens;
  std::int64_t logits_stride, seen_stride;
  std::int64_t first_sequence;
  Best* largest;           // [N,pieces]
  std::uint64_t* weights;  // [N,V]
  Sum* sums;               // [N,pieces], of weights
  Sum* sizes;              // [N,kBins]: by size_of, weights' number (top_k) or mass (top_p alone); neither: null
  int vocabulary, pieces;
  int top_k;  // 0: all; else below the vocabulary
  double temperature, top_p, repetition_penalty;
  std::uint64_t min_p_least, seed;
};

struct Better {
  __device__ __forceinline__ Best operator()(const Best& a, const Best& b) const {
    if (a.token == kNotANumber || b.token == kNotANumber) return {0.0, kNotANumber};
    if (a.logit != b.logit) return a.logit > b.logit ? a : b;
    return a.token < b.token ? a : b;
  }
};

using ReduceBest = cub::BlockReduce<Best, kPieceThreads>;
using ScanSum = cub::BlockScan<Sum, kThreads>;

__device__ __forceinline__ double logit_of(const Params& p, int sequence, int token) {
  const bool seen = p.seen != nullptr && p.seen[sequence * p.seen_stride + token] != 0;
  return penalized(p.logits[sequence * p.logits_stride + token], seen, p.repetition_penalty);
}

// The size of a weight above 0, which grows with it: 32 to each power of two.
__device__ __forceinline__ int size_of(std::uint64_t w) {
  const int power = 63 - __clzll(static_cast<long long>(w));
  return 32 * power + static_cast<int>((w << 5 >> power) & 31);
}
static_assert(32 * kWeightBits < kBins);
// No weight of the size is less.
__device__ __forceinline__ std::uint64_t least_of_size(int size) {
  return static_cast<std::uint64_t>(32 + size % 32) << (size / 32) >> 5;
}

__device__ __forceinline__ Best nothing(const Params& p) { return {-INFINITY, p.vocabulary}; }

// Grid: pieces of a row, sequences.
__global__ void __launch_bounds__(kPieceThreads) largest_kernel(const __grid_constant__ Params p) {
  flashgla::cuda::release_next();
  flashgla::cuda::wait_for_previous();
  __shared__ typename ReduceBest::TempStorage temporary;
  const int sequence = blockIdx.y;
  Best mine = nothing(p);
#pragma unroll
  for (int j = 0; j < kPiece / kPieceThreads; ++j) {
    const int i = static_cast<int>(blockIdx.x) * kPiece + j * kPieceThreads + static_cast<int>(threadIdx.x);
    if (i >= p.vocabulary) break;
    const double l = logit_of(p, sequence, i);
    mine = Better()(mine, l != l ? Best{0.0, kNotANumber} : Best{l, i});
  }
  const Best best = ReduceBest(temporary).Reduce(mine, Better());
  if (threadIdx.x == 0) p.largest[sequence * p.pieces + static_cast<int>(blockIdx.x)] = best;
  if (p.sizes == nullptr) return;
  for (int i = static_cast<int>(blockIdx.x * kPieceThreads + threadIdx.x); i < kBins; i += p.pieces * kPieceThreads) {
    p.sizes[static_cast<std::int64_t>(sequence) * kBins + i] = 0;
  }
}

// The same grid. Where no draw is needed or possible, the token itself.
__global__ void __launch_bounds__(kPieceThreads) weights_kernel(const __grid_constant__ Params p) {
  flashgla::cuda::release_next();
  flashgla::cuda::wait_for_previous();
  __shared__ typename ReduceBest::TempStorage temporary;
  __shared__ Best shared_best;
  __shared__ Sum sizes[kBins];
  __shared__ Sum sums[kPieceThreads / 32];
  const int sequence = blockIdx.y;
  if (p.sizes != nullptr) {
    for (int i = threadIdx.x; i < kBins; i += kPieceThreads) sizes[i] = 0;
  }
  Best mine = nothing(p);
  for (int piece = threadIdx.x; piece < p.pieces; piece += kPieceThreads) {
    mine = Better()(mine, p.largest[sequence * p.pieces + piece]);
  }
  const Best reduced = ReduceBest(temporary).Reduce(mine, Better());
  if (threadIdx.x == 0) shared_best = reduced;
  __syncthreads();
  const Best best = shared_best;
  const bool drawn = best.token != kNotANumber && isfinite(best.logit) && p.temperature > 0.0;
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    p.tokens[sequence] = best.token == kNotANumber ? kNotANumber
                         : !isfinite(best.logit)   ? kNoneFinite
                         : p.temperature == 0.0    ? best.token
                                                   : kToBeDrawn;
  }
  if (!drawn) return;
  Sum sum = 0;
#pragma unroll
  for (int j = 0; j < kPiece / kPieceThreads; ++j) {
    const int i = static_cast<int>(blockIdx.x) * kPiece + j * kPieceThreads + static_cast<int>(threadIdx.x);
    if (i >= p.vocabulary) break;
    const std::uint64_t w = weight_of((logit_of(p, sequence, i) - best.logit) / p.temperature);
    p.weights[static_cast<std::int64_t>(sequence) * p.vocabulary + i] = w;
    sum += w;
    if (p.sizes != nullptr && w > 0) atomicAdd(&sizes[size_of(w)], p.top_k > 0 ? 1 : w);
  }
  sum = flashgla::cuda::warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kPieceThreads / 32; ++warp) sum += sums[warp];
    p.sums[sequence * p.pieces + static_cast<int>(blockIdx.x)] = sum;
  }
  if (p.sizes == nullptr) return;
  for (int i = threadIdx.x; i < kBins; i += kPieceThreads) {
    if (sizes[i] > 0) atomicAdd(&p.sizes[static_cast<std::int64_t>(sequence) * kBins + i], sizes[i]);
  }
}

struct Shared {
  typename ScanSum::TempStorage scan;
  Sum bins[kBins];
  Sum above[kWarps], equals[kWarps];  // of each warp's range: mass above the cut, tokens at it
  Sum found_prefix, found_above;
  Sum few_weights[kThreads];  // of the tokens that may be kept, where they are few
  int few_tokens[kThreads];
  int few;  // more than kThreads: not all are here
};

class RowOfBlock {
 public:
  __device__ RowOfBlock(const Params& params, Shared& shared)
      : p(params),
        s(shared),
        weights(params.weights + static_cast<std::int64_t>(blockIdx.x) * params.vocabulary),
        each((p.vocabulary + kWarps - 1) / kWarps) {}

  __device__ void draw(const random::Stream& stream) {
    if (p.top_k == 0 && p.top_p == 1.0 && p.min_p_least == 0) {
      draw_of_all(stream);
    } else if (!draw_of_few(stream)) {
      const Cut its_cut = cut();
      const Sum total = sum_ranges(its_cut);
      pick(its_cut, stream.below(position(), total));
    }
  }

 private:
  __device__ __forceinline__ std::uint32_t position() const {
    return static_cast<std::uint32_t>(p.positions[blockIdx.x]);
  }

  __device__ void draw_of_all(const random::Stream& stream) {
    const Sum mine = threadIdx.x < static_cast<unsigned>(p.pieces) ? p.sums[blockIdx.x * p.pieces + threadIdx.x] : 0;
    Sum reached = 0, total = 0;
    ScanSum(s.scan).ExclusiveSum(mine, reached, total);
    const Sum draw = stream.below(position(), total);
    if (draw >= reached && draw < reached + mine) s.found_prefix = threadIdx.x, s.found_above = reached;
    __syncthreads();
    const int begin = static_cast<int>(s.found_prefix) * kPiece;
    pick_within(begin, min(begin + kPiece, p.vocabulary), {0, 0}, draw - s.found_above, 0);
  }

  // False where too many tokens may be kept. Of equal weights the lower token is before the other.
  __device__ bool draw_of_few(const random::Stream& stream) {
    int size = 0;  // of the least that may be kept
    Sum total = 0;
    if (p.sizes != nullptr) {
      for (int i = threadIdx.x; i < kBins; i += kThreads) {
        s.bins[i] = p.sizes[static_cast<std::int64_t>(blockIdx.x) * kBins + i];
      }
      if (threadIdx.x == 0) s.found_prefix = 0;  // fewer weights than top_k are above 0
      __syncthreads();
      total = find_bin([&](Sum all) { return p.top_k > 0 ? p.top_k : mass_wanted(all); });
      size = static_cast<int>(s.found_prefix);
    }
    std::uint64_t least = least_of_size(size);
    if (p.top_p == 1.0) least = max(least, p.min_p_least);
    if (threadIdx.x == 0) s.few = 0;
    __syncthreads();
    for_each([&](std::uint64_t w, int token) {
      if (w < least) return;
      const int place = atomicAdd(&s.few, 1);
      if (place < kThreads) s.few_weights[place] = w, s.few_tokens[place] = token;
    });
    __syncthreads();
    const int few = s.few, me = threadIdx.x;
    if (few > kThreads) return false;

    const std::uint64_t w = me < few ? s.few_weights[me] : 0;
    const int token = me < few ? s.few_tokens[me] : p.vocabulary;
    int before = 0;
    Sum mass_before = 0;
    for (int i = 0; i < few; ++i) {
      const std::uint64_t other = s.few_weights[i];
      const bool its = other > w || (other == w && s.few_tokens[i] < token);
      before += its ? 1 : 0;
      mass_before += its ? other : 0;
    }
    bool keep = me < few && (p.top_k == 0 || before < p.top_k);
    if (p.top_p < 1.0) {
      if (p.top_k > 0) total = sum_of_block(keep ? w : 0);
      keep = keep && mass_before < mass_wanted(total);
    }
    keep = keep && w >= p.min_p_least;
    const Sum draw = stream.below(position(), sum_of_block(keep ? w : 0));
    s.few_weights[me] = keep ? w : 0;
    __syncthreads();
    Sum reached = 0;  // by the kept up to this one, in the token's order
    for (int i = 0; i < few; ++i) reached += s.few_tokens[i] <= token ? s.few_weights[i] : 0;
    if (keep && draw < reached && draw >= reached - w) p.tokens[blockIdx.x] = token;
    return true;
  }

  __device__ Sum sum_of_block(Sum mine) {
    Sum before = 0, sum = 0;
    __syncthreads();
    ScanSum(s.scan).ExclusiveSum(mine, before, sum);
    return sum;
  }

  __device__ __forceinline__ Sum mass_wanted(Sum sum) const {
    return min(sum, static_cast<Sum>(ceil(times(p.top_p, static_cast<double>(sum)))));
  }

  __device__ Cut cut() {
    Cut cut{0, static_cast<std::uint64_t>(p.vocabulary)};
    if (p.top_k > 0) cut = select(false, p.top_k, cut);
    if (p.top_p < 1.0) {
      const Sum sum = sum_ranges(cut);
      Sum equals = 0;
      for (const Sum count : s.equals) equals += count;
      cut.equals = min(static_cast<Sum>(cut.equals), equals);
      cut = select(true, mass_wanted(sum), cut);
    }
    if (p.min_p_least > cut.least) cut = {p.min_p_least, static_cast<std::uint64_t>(p.vocabulary)};
    return cut;
  }

  // Sum of the kept weights; leaves the parts of the ranges in shared memory.
  __device__ Sum sum_ranges(const Cut& cut) {
    Sum above = 0, equals = 0;
    for_each([&](std::uint64_t w, int) {
      above += w > cut.least ? w : 0;
      equals += w == cut.least ? 1 : 0;
    });
    above = flashgla::cuda::warp_sum(above);
    equals = flashgla::cuda::warp_sum(equals);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.above[threadIdx.x / 32] = above, s.equals[threadIdx.x / 32] = equals;
    __syncthreads();
    Sum sum = 0, left = cut.equals;
    for (int range = 0; range < kWarps; ++range) sum += kept(cut, range, left);
    return sum;
  }

  // The token in whose part of the sums `draw` lies; behind sum_ranges of the same cut.
  __device__ void pick(const Cut& cut, Sum draw) {
    Sum reached = 0, left = cut.equals;  // left: tokens at the cut that are still kept
    for (int range = 0; range < kWarps; ++range) {
      const Sum left_before = left, sum = kept(cut, range, left);
      if (draw < reached + sum) {
        const int begin = range * each;
        return pick_within(begin, min(begin + each, p.vocabulary), cut, draw - reached, left_before);
      }
      reached += sum;
    }
  }

  // Mass of a range's kept tokens; takes what of them lies at the cut from `left`.
  __device__ __forceinline__ Sum kept(const Cut& cut, int range, Sum& left) const {
    const Sum equals = min(s.equals[range], left);
    left -= equals;
    return s.above[range] + equals * cut.least;
  }

  // f(weight, token) of all tokens of this warp's range, each by one lane.
  template <class F>
  __device__ __forceinline__ void for_each(F f) const {
    const int begin = static_cast<int>(threadIdx.x) / 32 * each, end = min(begin + each, p.vocabulary);
    for (int first = begin + static_cast<int>(threadIdx.x) % 32; first < end; first += 32 * kAhead) {
      std::uint64_t w[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) w[j] = first + 32 * j < end ? weights[first + 32 * j] : 0;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (first + 32 * j < end) f(w[j], first + 32 * j);
      }
    }
  }

  // The same within tokens [first, last), which all threads share: each has some neighbours.
  __device__ void pick_within(int first, int last, const Cut& cut, Sum draw, Sum left) {
    const int some = (last - first + kThreads - 1) / kThreads;
    const int begin = min(first + static_cast<int>(threadIdx.x) * some, last), end = min(begin + some, last);
    Sum equals = 0, equals_before = 0;
    for (int i = begin; i < end; ++i) equals += weights[i] == cut.least ? 1 : 0;
    ScanSum(s.scan).ExclusiveSum(equals, equals_before);
    __syncthreads();
    const auto keeps = [&](std::uint64_t w, Sum& before) {
      return w > cut.least || (w == cut.least && before++ < left);
    };
    Sum mine = 0, reached = 0, before = equals_before;
    for (int i = begin; i < end; ++i) {
      const std::uint64_t w = weights[i];
      if (keeps(w, before)) mine += w;
    }
    ScanSum(s.scan).ExclusiveSum(mine, reached);
    if (draw < reached || draw >= reached + mine) return;
    before = equals_before;
    for (int i = begin; i < end; ++i) {
      const std::uint64_t w = weights[i];
      if (keeps(w, before)) reached += w;
      if (draw < reached) {
        p.tokens[blockIdx.x] = i;
        return;
      }
    }
  }

  // The largest weight t such that the kept of at least t count (by_mass: sum to) `wanted` or more, and how many of
  // those equal to it that takes. by_mass: of the kept of `inner`.
  __device__ Cut select(bool by_mass, Sum wanted, const Cut& inner) {
    Sum prefix = 0, above = 0;  // above: count or mass of what is larger than every number with this prefix
    for (int pass = kPasses - 1; pass >= 0; --pass) {
      const int shift = pass * kDigitBits;
      __syncthreads();
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) s.bins[bin] = 0;
      __syncthreads();
      // Most weights of a trained model lie in bin 0 of the first histogram, and equal ones in one bin of all: a
      // thread adds up bin 0, and what follows each other in another bin, before it goes to shared memory.
      Sum lowest = 0, waiting = 0;
      int bin = 0;
      const auto count = [&](std::uint64_t w, Sum amount) {
        if (w >> (shift + kDigitBits) != prefix) return;
        const int its = static_cast<int>(w >> shift & (kBins - 1));
        if (its == 0) {
          lowest += amount;
        } else if (its == bin) {
          waiting += amount;
        } else {
          if (bin != 0) atomicAdd(&s.bins[bin], waiting);
          bin = its;
          waiting = amount;
        }
      };
      for_each([&](std::uint64_t w, int) {
        if (!by_mass) {
          count(w, 1);
        } else if (w > inner.least) {
          count(w, w);
        }
      });
      // The cut's own number counts as often as it is kept.
      if (by_mass && threadIdx.x == 0 && inner.least > 0) count(inner.least, inner.equals * inner.least);
      if (bin != 0) atomicAdd(&s.bins[bin], waiting);
      lowest = flashgla::cuda::warp_sum(lowest);
      if (threadIdx.x % 32 == 0 && lowest > 0) atomicAdd(&s.bins[0], lowest);
      __syncthreads();
      find_bin([&](Sum) { return wanted - above; });
      above += s.found_above;
      prefix = prefix << kDigitBits | s.found_prefix;
    }
    Cut cut;
    cut.least = prefix;
    const Sum missing = wanted - above;
    cut.equals = !by_mass ? missing : prefix == 0 ? p.vocabulary : (missing + prefix - 1) / prefix;
    return cut;
  }

  // The bin from the top in which the running sum reaches wanted_of(the sum of all), which is 1 or more, and the sum
  // above it; returns the sum of all. Nothing is found where they do not reach it.
  template <class F>
  __device__ Sum find_bin(F wanted_of) {
    constexpr int kEach = kBins / kThreads;
    const int top = kBins - 1 - kEach * static_cast<int>(threadIdx.x);
    Sum mine = 0, reached = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) mine += s.bins[top - i];
    ScanSum(s.scan).ExclusiveSum(mine, reached, sum);
    const Sum wanted = wanted_of(sum);
    if (reached < wanted && reached + mine >= wanted) {
      int bin = top;
      while (reached + s.bins[bin] < wanted) reached += s.bins[bin--];
      s.found_prefix = bin;
      s.found_above = reached;
    }
    __syncthreads();
    return sum;
  }

  const Params& p;
  Shared& s;
  const std::uint64_t* weights;
  int each;  // tokens of a warp's range
};

__global__ void __launch_bounds__(kThreads, 1) draw_kernel(const __grid_constant__ Params p) {
  flashgla::cuda::wait_for_previous();
  if (p.tokens[blockIdx.x] != kToBeDrawn) return;
  __shared__ Shared shared;
  RowOfBlock(p, shared).draw(
      {p.seed, random::Use::sampling, static_cast<std::uint64_t>(p.first_sequence + blockIdx.x)});
}

template <class... Parameters, class... Arguments>
void queue(const Context& context, const char* name, void (*kernel)(Parameters...), dim3 blocks, int threads,
           const Arguments&... arguments) {
  using flashgla::cuda::Begin;
  flashgla::cuda::launch(name, kernel, blocks, threads, 0, static_cast<cudaStream_t>(context.stream()),
                         context.architecture().cuda_capability == 90 ? Begin::beside_previous : Begin::after_previous,
                         arguments...);
}

void run_cuda(Context& context, const TensorView& logits, const TensorView& seen, const TensorView& positions,
              const TensorView& tokens, const Options& options, std::int64_t first_sequence) {
  const ArenaScope scope(context.scratch());
  Params p{};
  p.vocabulary = static_cast<int>(logits.size(1));
  p.pieces = (p.vocabulary + kPiece - 1) / kPiece;
  p.top_k = options.top_k < p.vocabulary ? static_cast<int>(options.top_k) : 0;
  const auto allocate = [&]<class T>(T*& numbers, std::int64_t count) {
    numbers = static_cast<T*>(context.scratch().allocate(static_cast<std::size_t>(count) * sizeof(T), "sampling"));
  };
  allocate(p.largest, logits.size(0) * p.pieces);
  allocate(p.weights, logits.numel());
  allocate(p.sums, logits.size(0) * p.pieces);
  if (p.top_k > 0 || options.top_p < 1.0) allocate(p.sizes, logits.size(0) * kBins);
  if (context.planning()) return;
  p.logits = logits.as<float>();
  p.logits_stride = logits.stride[0];
  p.seen = seen ? seen.as<std::uint8_t>() : nullptr;
  p.seen_stride = seen ? seen.stride[0] : 0;
  p.positions = positions.as<std::int32_t>();
  p.tokens = tokens.as<std::int32_t>();
  p.first_sequence = first_sequence;
  p.temperature = options.temperature;
  p.top_p = options.top_p;
  p.repetition_penalty = options.repetition_penalty;
  p.min_p_least = least_of_min_p(options.min_p);
  p.seed = options.seed;
  const auto sequences = static_cast<unsigned>(logits.size(0));
  const dim3 pieces(static_cast<unsigned>(p.pieces), sequences);
  queue(context, "sampling: largest", largest_kernel, pieces, kPieceThreads, p);
  queue(context, "sampling: weights", weights_kernel, pieces, kPieceThreads, p);
  if (p.temperature > 0.0) queue(context, "sampling: draw", draw_kernel, dim3(sequences), kThreads, p);
}

// A block row y of blocks for each sequence.
__global__ void mark_kernel(const std::int32_t* tokens, const std::int32_t* bounds, std::uint8_t* seen,
                            int vocabulary) {
  flashgla::cuda::release_next();
  flashgla::cuda::wait_for_previous();
  const int n = blockIdx.y;
  const int begin = bounds ? bounds[n] : n, end = bounds ? bounds[n + 1] : n + 1;
  const int stride = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = begin + static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < end; i += stride) {
    const int token = tokens[i];
    if (token >= 0 && token < vocabulary) seen[static_cast<std::int64_t>(n) * vocabulary + token] = 1;
  }
}

void mark_cuda(Context& context, const TensorView& tokens, const TensorView& bounds, const TensorView& seen) {
  if (context.planning()) return;
  constexpr int kMarkThreads = 128;
  const dim3 blocks(bounds ? 8 : 1, static_cast<unsigned>(seen.size(0)));
  queue(context, "sampling: mark_seen", mark_kernel, blocks, kMarkThreads, tokens.as<std::int32_t>(),
        bounds ? bounds.as<std::int32_t>() : nullptr, seen.as<std::uint8_t>(), static_cast<int>(seen.size(1)));
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem&, const Architecture&) { return Support::yes(); }, run_cuda, mark_cuda};

}  // namespace flashgla::ops::sampling

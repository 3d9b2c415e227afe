// Tiles of queries by keys with an online softmax between two small products: nothing of size T x T is ever in memory.
// README.md says how the tasks are cut and why the bits do not depend on the threads.
#include <cmath>
#include <cstring>
#include <limits>

#include "flashgla/ops/cpu/workers.h"
#include "flashgla/ops/softmax_attention/implementations.h"
#include "flashgla/ops/softmax_attention/probability_mask.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/softmax_attention/cpu/tiles.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
#include "flashgla/ops/cpu/gemm-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::softmax_attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
namespace gemm = flashgla::ops::gemm::HWY_NAMESPACE;
using gemm::Start;
using simd::VF32;

constexpr std::int64_t kTile = 64;       // queries, and keys
constexpr std::int64_t kPad = 16;        // lanes of the widest vector
constexpr std::int64_t kStepKeys = 256;  // of one task of a step
constexpr float kNone = -std::numeric_limits<float>::infinity();

std::int64_t padded(std::int64_t channels) { return (channels + kPad - 1) / kPad * kPad; }

// A row of some channels in f32, times a factor; zeros up to the padded length.
template <class T>
void load_row(const T* from, std::int64_t channels, float factor, float* to) {
  const VF32 f = hn::Set(simd::F32(), factor);
  simd::map([&](VF32 x) { return hn::Mul(x, f); }, channels, to, from);
  std::fill(to + channels, to + padded(channels), 0.0f);
}

// First element of a token at a head of [B,T,heads,channels].
template <class T>
T* at(const TensorView& view, std::int64_t batch, std::int64_t token, std::int64_t head) {
  return view.as<T>() + batch * view.stride[0] + token * view.stride[1] + head * view.stride[2];
}

// Rows of a head's keys or values by position, from the cache or the call.
template <class T>
void load_keys(const TensorView& now, const TensorView& past, const Sequence& s, std::int64_t n, std::int64_t head,
               std::int64_t begin, std::int64_t end, float* to) {
  const std::int64_t channels = now.size(3), width = padded(channels);
  for (std::int64_t j = begin; j < end; ++j, to += width) {
    if (j >= s.position) {
      load_row(at<T>(now, s.batch, s.begin + j - s.position, head), channels, 1.0f, to);
    } else if (past.dtype == DType::f32) {
      load_row(at<float>(past, n, j % past.size(1), head), channels, 1.0f, to);
    } else {
      load_row(at<BFloat16>(past, n, j % past.size(1), head), channels, 1.0f, to);
    }
  }
  std::fill(to, to + (begin + kTile - end) * width, 0.0f);
}

struct Sizes {
  std::int64_t K, V, heads, group, rows;  // rows: P, 0 without a past
  explicit Sizes(const Inputs& in)
      : K(padded(in.q.size(3))),
        V(padded(in.v.size(3))),
        heads(in.q.size(2)),
        group(in.q.size(2) / in.k.size(2)),
        rows(in.past_k ? in.past_k.size(1) : 0) {}
};

// Tiles of one query tile and one key tile.
struct Memory {
  float *q, *k, *kt, *v, *s, *o, *largest, *sum;
  Memory(Carver& carver, const Sizes& sizes)
      : q(carver.take<float>(kTile * sizes.K)),
        k(carver.take<float>(kTile * sizes.K)),
        kt(carver.take<float>(kTile * sizes.K)),
        v(carver.take<float>(kTile * sizes.V)),
        s(carver.take<float>(kTile * kTile)),
        o(carver.take<float>(kTile * sizes.V)),
        largest(carver.take<float>(kTile)),
        sum(carver.take<float>(kTile)) {}
};

template <class T>
void load_queries(const TensorView& view, const Sequence& s, std::int64_t head, std::int64_t begin, std::int64_t end,
                  float factor, float* to) {
  const std::int64_t width = padded(view.size(3));
  for (std::int64_t t = begin; t < end; ++t, to += width) {
    load_row(at<T>(view, s.batch, s.begin + t, head), view.size(3), factor, to);
  }
}

// The columns of a tile of keys from position `key` that token i sees: [first, last).
struct Seen {
  std::int64_t first, last;
  Seen(std::int64_t i, std::int64_t key, std::int64_t lowest)
      : first(std::clamp<std::int64_t>(lowest - key, 0, kTile)), last(std::clamp<std::int64_t>(i + 1 - key, 0, kTile)) {
    first = std::min(first, last);
  }
};

template <class T>
void forward_tile(const Inputs& in, const Outputs& out, const Options& options, const Sizes& sizes, std::int64_t n,
                  std::int64_t head, std::int64_t tile, const Memory& m) {
  const simd::F32 d;
  const Sequence s = sequence_at(in, n);
  const std::int64_t begin = tile * kTile, end = std::min(begin + kTile, s.length), count = end - begin;
  const std::int64_t g = head / sizes.group, value_dim = in.v.size(3);
  load_queries<T>(in.q, s, head, begin, end, static_cast<float>(options.scale), m.q);
  std::fill(m.o, m.o + count * sizes.V, 0.0f);
  std::fill(m.largest, m.largest + count, kNone);
  std::fill(m.sum, m.sum + count, 0.0f);
  const std::optional<ProbabilityMask> mask = ProbabilityMask::of(in, options);
  const std::int64_t last = s.position + end;
  for (std::int64_t key = first_key(s.position + begin, s.position, sizes.rows, options.window); key < last;
       key += kTile) {
    const std::int64_t stop = std::min(key + kTile, last);
    load_keys<T>(in.k, in.past_k, s, n, g, key, stop, m.k);
    load_keys<T>(in.v, in.past_v, s, n, g, key, stop, m.v);
    gemm::Transpose(kTile, sizes.K, m.k, sizes.K, m.kt, kTile);
    gemm::Gemm<Start::zero>(count, kTile, sizes.K, {m.q, sizes.K, 1}, m.kt, kTile, m.s, kTile);
    for (std::int64_t t = 0; t < count; ++t) {
      const std::int64_t i = s.position + begin + t;
      const Seen seen(i, key, first_key(i, s.position, sizes.rows, options.window));
      float* row = m.s + t * kTile;
      float largest = m.largest[t];
      for (std::int64_t j = seen.first; j < seen.last; ++j) largest = std::max(largest, row[j]);
      std::fill(row, row + seen.first, 0.0f);
      std::fill(row + seen.last, row + kTile, 0.0f);
      if (seen.first == seen.last) continue;
      const VF32 shift = hn::Set(d, largest);
      simd::map([&](VF32 x) { return simd::exp(d, hn::Sub(x, shift)); }, seen.last - seen.first, row + seen.first,
                row + seen.first);
      // The first scores of a row meet -inf: its factor is 0, as is what it multiplies.
      const float factor = m.largest[t] == kNone ? 0.0f : std::exp(m.largest[t] - largest);
      m.sum[t] = m.sum[t] * factor + simd::sum([](VF32 x) { return x; }, kTile, row);
      m.largest[t] = largest;
      if (mask) {
        mask->for_each(s, begin + t, head, key + seen.first, key + seen.last,
                       [&](std::int64_t j, double kept) { row[j - key] *= static_cast<float>(kept); });
      }
      const VF32 scale = hn::Set(d, factor);
      simd::map([&](VF32 x) { return hn::Mul(x, scale); }, sizes.V, m.o + t * sizes.V, m.o + t * sizes.V);
    }
    gemm::Gemm<Start::add>(count, sizes.V, stop - key, {m.s, kTile, 1}, m.v, sizes.V, m.o, sizes.V);
  }
  for (std::int64_t t = 0; t < count; ++t) {
    const VF32 scale = hn::Set(d, 1.0f / m.sum[t]);
    simd::map([&](VF32 x) { return hn::Mul(x, scale); }, value_dim, at<T>(out.o, s.batch, s.begin + begin + t, head),
              m.o + t * sizes.V);
    if (out.lse) {
      out.lse.as<float>()[(s.batch * in.q.size(1) + s.begin + begin + t) * sizes.heads + head] =
          m.largest[t] + std::log(m.sum[t]);
    }
  }
}

// All key tiles of one sequence and key-value head: dk and dv of a tile are summed over the query tiles that see it, dq
// in memory of its own over the key tiles, always in the same order.
template <class T>
void backward_head(const Inputs& in, const Outputs& out, const TensorView& d_o, const InputGradients& gradients,
                   const Options& options, const Sizes& sizes, std::int64_t n, std::int64_t g, const Memory& m,
                   Carver& carver) {
  const simd::F32 d;
  const Sequence s = sequence_at(in, n);
  const auto scale = static_cast<float>(options.scale);
  float* dp = carver.take<float>(kTile * kTile);
  float* gradient = carver.take<float>(kTile * sizes.V);  // rows of d_o
  float* vt = carver.take<float>(kTile * sizes.V);
  float* dk = carver.take<float>(kTile * sizes.K);
  float* dv = carver.take<float>(kTile * sizes.V);
  float* delta = carver.take<float>(sizes.group * in.q.size(1));
  float* dq = carver.take<float>(sizes.group * in.q.size(1) * sizes.K);
  const std::int64_t key_dim = in.k.size(3), value_dim = in.v.size(3), length = s.length;
  std::fill(dq, dq + sizes.group * length * sizes.K, 0.0f);
  for (std::int64_t h = 0; h < sizes.group; ++h) {
    for (std::int64_t t = 0; t < length; ++t) {
      delta[h * length + t] = simd::sum([](VF32 a, VF32 b) { return hn::Mul(a, b); }, value_dim,
                                        at<T>(d_o, s.batch, s.begin + t, g * sizes.group + h),
                                        at<T>(out.o, s.batch, s.begin + t, g * sizes.group + h));
    }
  }
  const std::int64_t last = s.position + length;
  const std::int64_t lowest = first_key(s.position, s.position, sizes.rows, options.window);
  const std::optional<ProbabilityMask> mask = ProbabilityMask::of(in, options);
  // Tiles of keys do not straddle the border between past and present: those of the past have no gradient to write.
  for (std::int64_t key = lowest; key < last;) {
    const bool past = key < s.position;
    const std::int64_t stop = std::min(key + kTile, past ? s.position : last);
    load_keys<T>(in.k, in.past_k, s, n, g, key, stop, m.k);
    load_keys<T>(in.v, in.past_v, s, n, g, key, stop, m.v);
    gemm::Transpose(kTile, sizes.K, m.k, sizes.K, m.kt, kTile);
    gemm::Transpose(kTile, sizes.V, m.v, sizes.V, vt, kTile);
    std::fill(dk, dk + kTile * sizes.K, 0.0f);
    std::fill(dv, dv + kTile * sizes.V, 0.0f);
    const std::int64_t first_query = std::max<std::int64_t>(0, key - s.position) / kTile * kTile;
    // The last token that sees the tile's last key is `window - 1` behind it.
    const std::int64_t end_query =
        options.window > 0 ? std::min(length, stop - 1 - s.position + options.window) : length;
    for (std::int64_t h = 0; h < sizes.group; ++h) {
      const std::int64_t head = g * sizes.group + h;
      for (std::int64_t begin = first_query; begin < end_query; begin += kTile) {
        const std::int64_t end = std::min(begin + kTile, length), count = end - begin;
        load_queries<T>(in.q, s, head, begin, end, scale, m.q);
        load_queries<T>(d_o, s, head, begin, end, 1.0f, gradient);
        gemm::Gemm<Start::zero>(count, kTile, sizes.K, {m.q, sizes.K, 1}, m.kt, kTile, m.s, kTile);
        gemm::Gemm<Start::zero>(count, kTile, sizes.V, {gradient, sizes.V, 1}, vt, kTile, dp, kTile);
        for (std::int64_t t = 0; t < count; ++t) {
          const std::int64_t i = s.position + begin + t;
          const Seen seen(i, key, first_key(i, s.position, sizes.rows, options.window));
          float* p = m.s + t * kTile;
          float* ds = dp + t * kTile;
          std::fill(p, p + seen.first, 0.0f);
          std::fill(ds, ds + seen.first, 0.0f);
          std::fill(p + seen.last, p + kTile, 0.0f);
          std::fill(ds + seen.last, ds + kTile, 0.0f);
          const VF32 lse =
              hn::Set(d, out.lse.as<float>()[(s.batch * in.q.size(1) + s.begin + begin + t) * sizes.heads + head]);
          const VF32 mean = hn::Set(d, delta[h * length + begin + t]);
          if (mask) {  // the gradient of what was kept
            mask->for_each(s, begin + t, head, key + seen.first, key + seen.last,
                           [&](std::int64_t j, double kept) { ds[j - key] *= static_cast<float>(kept); });
          }
          simd::map2(
              [&](VF32& probability, VF32& slope, VF32 score, VF32 product) {
                probability = simd::exp(d, hn::Sub(score, lse));
                slope = hn::Mul(probability, hn::Sub(product, mean));
              },
              seen.last - seen.first, p + seen.first, ds + seen.first, p + seen.first, ds + seen.first);
          if (mask) {
            mask->for_each(s, begin + t, head, key + seen.first, key + seen.last,
                           [&](std::int64_t j, double kept) { p[j - key] *= static_cast<float>(kept); });
          }
        }
        if (!past) {
          gemm::Gemm<Start::add>(kTile, sizes.V, count, {m.s, 1, kTile}, gradient, sizes.V, dv, sizes.V);
          gemm::Gemm<Start::add>(kTile, sizes.K, count, {dp, 1, kTile}, m.q, sizes.K, dk, sizes.K);
        }
        gemm::Gemm<Start::add>(count, sizes.K, stop - key, {dp, kTile, 1}, m.k, sizes.K,
                               dq + (h * length + begin) * sizes.K, sizes.K);
      }
    }
    for (std::int64_t j = key; j < stop && !past; ++j) {
      const std::int64_t t = j - s.position;
      simd::map([](VF32 x) { return x; }, key_dim, at<T>(gradients.dk, s.batch, s.begin + t, g),
                dk + (j - key) * sizes.K);
      simd::map([](VF32 x) { return x; }, value_dim, at<T>(gradients.dv, s.batch, s.begin + t, g),
                dv + (j - key) * sizes.V);
    }
    key = stop;
  }
  const VF32 factor = hn::Set(d, scale);
  for (std::int64_t h = 0; h < sizes.group; ++h) {
    for (std::int64_t t = 0; t < length; ++t) {
      simd::map([&](VF32 x) { return hn::Mul(x, factor); }, key_dim,
                at<T>(gradients.dq, s.batch, s.begin + t, g * sizes.group + h), dq + (h * length + t) * sizes.K);
    }
  }
}

// Partial results of one task of a step: for each query head of the group the largest score, the sum, and o.
template <class T, class C>
void step_part(const TensorView& q, const TensorView& k_cache, const TensorView& v_cache, const Options& options,
               std::int64_t i, std::int64_t n, std::int64_t g, std::int64_t begin, std::int64_t end, float* partial) {
  const simd::F32 d;
  const std::int64_t key_dim = q.size(2), value_dim = v_cache.size(3), rows = k_cache.size(1);
  const std::int64_t group = q.size(1) / k_cache.size(2);
  const std::int64_t lowest = first_key(i, i + 1, rows, options.window);
  begin = std::max(begin, lowest);
  end = std::min(end, i + 1);
  float scores[kStepKeys];
  for (std::int64_t h = 0; h < group; ++h, partial += value_dim + 2) {
    const T* query = q.as<T>() + n * q.stride[0] + (g * group + h) * q.stride[1];
    float largest = kNone;
    for (std::int64_t j = begin; j < end; ++j) {
      const float score = static_cast<float>(options.scale) * simd::sum([](VF32 a, VF32 b) { return hn::Mul(a, b); },
                                                                        key_dim, query, at<C>(k_cache, n, j % rows, g));
      scores[j - begin] = score;
      largest = std::max(largest, score);
    }
    float sum = 0.0f;
    float* o = partial + 2;
    std::fill(o, o + value_dim, 0.0f);
    for (std::int64_t j = begin; j < end; ++j) {
      const float p = std::exp(scores[j - begin] - largest);
      sum += p;
      const VF32 weight = hn::Set(d, p);
      simd::map([&](VF32 value, VF32 so_far) { return hn::MulAdd(weight, value, so_far); }, value_dim, o,
                at<C>(v_cache, n, j % rows, g), static_cast<const float*>(o));
    }
    partial[0] = largest;
    partial[1] = sum;
  }
}

void Forward(const Inputs& in, const Outputs& out, const Options& options, std::int64_t n, std::int64_t head,
             std::int64_t tile, std::byte* memory) {
  const Sizes sizes(in);
  Carver carver(memory);
  const Memory m(carver, sizes);
  if (memory == nullptr) return;
  if (in.q.dtype == DType::f32) return forward_tile<float>(in, out, options, sizes, n, head, tile, m);
  forward_tile<BFloat16>(in, out, options, sizes, n, head, tile, m);
}

void Backward(const Inputs& in, const Outputs& out, const TensorView& d_o, const InputGradients& gradients,
              const Options& options, std::int64_t n, std::int64_t g, std::byte* memory) {
  const Sizes sizes(in);
  Carver carver(memory);
  const Memory m(carver, sizes);
  if (in.q.dtype == DType::f32) {
    return backward_head<float>(in, out, d_o, gradients, options, sizes, n, g, m, carver);
  }
  backward_head<BFloat16>(in, out, d_o, gradients, options, sizes, n, g, m, carver);
}

void Step(const TensorView& q, const TensorView& k_cache, const TensorView& v_cache, const Options& options,
          std::int64_t i, std::int64_t n, std::int64_t g, std::int64_t begin, std::int64_t end, float* partial) {
  const auto run = [&](auto activation) {
    using T = decltype(activation);
    if (k_cache.dtype == DType::f32) {
      return step_part<T, float>(q, k_cache, v_cache, options, i, n, g, begin, end, partial);
    }
    step_part<T, BFloat16>(q, k_cache, v_cache, options, i, n, g, begin, end, partial);
  };
  if (q.dtype == DType::f32) return run(float{});
  run(BFloat16{});
}

// A row from any of the two dtypes to any.
void CopyRow(const TensorView& from, const TensorView& to) {
  const auto copy = [](VF32 x) { return x; };
  const std::int64_t count = from.numel();
  if (from.dtype == DType::f32 && to.dtype == DType::f32) {
    std::memmove(to.data, from.data, from.bytes());
  } else if (from.dtype == DType::f32) {
    simd::map(copy, count, to.as<BFloat16>(), from.as<float>());
  } else if (to.dtype == DType::f32) {
    simd::map(copy, count, to.as<float>(), from.as<BFloat16>());
  } else {
    std::memmove(to.data, from.data, from.bytes());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::softmax_attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::softmax_attention {

namespace {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);
HWY_EXPORT(Step);
HWY_EXPORT(CopyRow);

constexpr std::int64_t kQueries = 64;  // of a task of the forward
constexpr std::int64_t kKeys = 256;    // of a task of a step

std::int64_t pad(std::int64_t channels) { return (channels + 15) / 16 * 16; }

std::size_t tiles_bytes(const Inputs& in) {
  return static_cast<std::size_t>(64 * (3 * pad(in.q.size(3)) + 2 * pad(in.v.size(3)) + 64 + 2) + 16 * 8) *
         sizeof(float);
}

void run_forward(Context& context, const Inputs& in, const Outputs& out, const Options& options) {
  const ArenaScope scope(context.scratch());
  // As many tasks for each sequence as if it were the longest that there can be: those beyond its end do nothing.
  const std::int64_t sequences = sequences_of(in.q, in.cu_seqlens), heads = in.q.size(2);
  const std::int64_t tiles = (in.q.size(1) + kQueries - 1) / kQueries;
  const Workers workers(context, sequences * heads * tiles, tiles_bytes(in));
  if (context.planning()) return;
  workers.run([&](std::int64_t item, std::byte* memory) {
    const std::int64_t n = item % sequences, head = item / sequences % heads;
    const std::int64_t tile = tiles - 1 - item / (sequences * heads);  // the longest first
    if (tile * kQueries < sequence_at(in, n).length) {
      HWY_DYNAMIC_DISPATCH(Forward)(in, out, options, n, head, tile, memory);
    }
  });
}

void run_backward(Context& context, const Inputs& in, const Outputs& out, const TensorView& d_o,
                  const InputGradients& gradients, const Options& options) {
  const ArenaScope scope(context.scratch());
  const std::int64_t sequences = sequences_of(in.q, in.cu_seqlens), groups = in.k.size(2);
  const std::int64_t K = pad(in.q.size(3)), V = pad(in.v.size(3)), rows = in.q.size(2) / groups * in.q.size(1);
  const std::size_t own = static_cast<std::size_t>(64 * (64 + 3 * V + K) + rows * (K + 1) + 16 * 8) * sizeof(float);
  const Workers workers(context, sequences * groups, tiles_bytes(in) + own);
  if (context.planning()) return;
  workers.run([&](std::int64_t item, std::byte* memory) {
    HWY_DYNAMIC_DISPATCH(Backward)(in, out, d_o, gradients, options, item / groups, item % groups, memory);
  });
}

void append_one(const Context& context, const TensorView& positions, const TensorView& cu_seqlens,
                const Appended& tensors) {
  // Not a structured binding: clang 14 does not let lambdas have one.
  const auto &x = tensors.x, &before = tensors.before, &cache = tensors.cache;
  const bool copies = before && before.data != cache.data;
  const std::int64_t rows = cache.size(1);
  parallel_for_blocks(context, sequences_of(x, cu_seqlens) * rows, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t n = item / rows, row = item % rows;
      const Sequence s = sequence_at(x, positions, cu_seqlens, n);
      const std::int64_t last = s.position + s.length - 1;
      const std::int64_t token = last - ((last - row) % rows + rows) % rows;  // the newest that has this row
      const TensorView to = cache.select(0, n).select(0, row);
      if (s.length > 0 && token >= s.position) {
        const TensorView from = x.select(0, s.batch).select(0, s.begin + token - s.position);
        for (std::int64_t head = 0; head < x.size(2); ++head) {
          HWY_DYNAMIC_DISPATCH(CopyRow)(from.select(0, head), to.select(0, head));
        }
      } else if (copies) {
        const TensorView from = before.select(0, n).select(0, row);
        std::memcpy(to.data, from.data, from.bytes());
      }
    }
  });
}

void run_append(Context& context, std::span<const Appended> tensors, const TensorView& positions,
                const TensorView& cu_seqlens) {
  if (context.planning()) return;
  for (const Appended& one : tensors) append_one(context, positions, cu_seqlens, one);
}

void run_step(Context& context, const TensorView& q, const Token&, const TensorView& k_cache, const TensorView& v_cache,
              const TensorView& positions, const TensorView& o, const Options& options) {
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const std::int64_t sequences = q.size(0), groups = k_cache.size(2), group = q.size(1) / groups;
  const std::int64_t value_dim = v_cache.size(3), parts = (k_cache.size(1) + kKeys - 1) / kKeys + 1;
  const std::int64_t stride = group * (value_dim + 2);
  const TensorView partial = scratch.tensor(Shape({sequences * groups, parts, stride}), DType::f32, "workspace");
  if (context.planning()) return;
  const auto first_part = [&](std::int64_t n) {
    const std::int64_t i = positions.as<std::int32_t>()[n];
    return first_key(i, i + 1, k_cache.size(1), options.window) / kKeys;
  };
  const auto parts_of = [&](std::int64_t n) { return positions.as<std::int32_t>()[n] / kKeys + 1 - first_part(n); };
  parallel_for(context, sequences * groups * parts, [&](std::int64_t item) {
    const std::int64_t n = item / parts / groups, g = item / parts % groups, part = item % parts;
    if (part >= parts_of(n)) return;
    const std::int64_t begin = (first_part(n) + part) * kKeys;
    HWY_DYNAMIC_DISPATCH(Step)
    (q, k_cache, v_cache, options, positions.as<std::int32_t>()[n], n, g, begin, begin + kKeys,
     partial.as<float>() + item * stride);
  });
  parallel_for(context, sequences * groups, [&](std::int64_t item) {
    const std::int64_t n = item / groups;
    for (std::int64_t h = 0; h < group; ++h) {
      const auto piece = [&](std::int64_t part) {
        return partial.as<float>() + (item * parts + part) * stride + h * (value_dim + 2);
      };
      float largest = -std::numeric_limits<float>::infinity();
      for (std::int64_t part = 0; part < parts_of(n); ++part) largest = std::max(largest, piece(part)[0]);
      float* first = piece(0);  // the others are added to it
      float sum = 0.0f;
      for (std::int64_t part = 0; part < parts_of(n); ++part) {
        const float weight = std::exp(piece(part)[0] - largest);
        sum += weight * piece(part)[1];
        for (std::int64_t c = 2; c < value_dim + 2; ++c) {
          first[c] = (part == 0 ? 0.0f : first[c]) + weight * piece(part)[c];
        }
      }
      const TensorView out = o.select(0, n).select(0, item % groups * group + h);
      for (std::int64_t c = 0; c < value_dim; ++c) first[c] = first[2 + c] / sum;
      HWY_DYNAMIC_DISPATCH(CopyRow)(TensorView(first, Shape({value_dim})), out);
    }
  });
}

}  // namespace

const Implementation kTiles{"tiles",
                            Device::Kind::cpu,
                            [](const Problem& problem, const Architecture&) {
                              return supports_f32_and_bf16({problem.dtype, problem.past});
                            },
                            run_forward,
                            run_backward,
                            run_append,
                            run_step};

}  // namespace flashgla::ops::softmax_attention
#endif

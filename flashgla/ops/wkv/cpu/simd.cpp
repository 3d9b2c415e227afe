// A vector holds neighbouring channels. A task is a tile of channels of one sequence: it walks the tokens, so that of
// each row a piece is read, with the tile's states in the first-level cache. Backward goes through the chunks of tokens
// from the last to the first, each from the state kept at its beginning.
#include <algorithm>

#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/rows.h"
#include "flashgla/ops/weight_in_f32.h"
#include "flashgla/ops/wkv/implementations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/wkv/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

#ifndef FLASHGLA_WKV_CALL
#define FLASHGLA_WKV_CALL
namespace flashgla::ops::wkv {

constexpr std::int64_t kTile = 64;   // channels of a task
constexpr std::int64_t kChunk = 16;  // tokens between states that are kept
constexpr float kSlow = -0.25f;      // above it a decay is slow (Tile)

// What the loops know of a call.
struct Call {
  const Inputs* in;
  Sizes sizes;
  const float *time_decay, *time_first;
  float* kept;                       // [slots,3,padded]; null: not wanted
  std::int64_t padded;               // channels, to whole tiles
  float *dtime_decay, *dtime_first;  // [N,E]

  std::int64_t tiles() const { return padded / kTile; }
  bool is_whole(std::int64_t tile) const { return (tile + 1) * kTile <= sizes.channels; }
  // Of chunk i of a sequence, so that sequences' chunks never share one.
  float* state_kept(std::int64_t n, std::int64_t begin, std::int64_t i, std::int64_t tile) const {
    return kept + (begin / kChunk + n + i) * 3 * padded + tile * kTile;
  }
};

}  // namespace flashgla::ops::wkv
#endif

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::wkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

// A tile's channels; what lanes beyond the last hold is not stored. kWhole: there are kTile, which saves backward a
// tenth of its time.
//
// Were a slow decay w added to an exponent at every token, it would be rounded the same way each time, and the exponent
// would drift. So within a chunk exponents do not decay: at its token j, p stands for p + j w and m for m - (j + 1) w,
// and the key is k - (j + 1) w. `Exponents` takes p and m from chunk to chunk.
template <bool kWhole>
struct Tile {
  std::int64_t first, count;
  alignas(64) float slow[kTile], fast[kTile];  // the decay is in one of them
  alignas(64) float u[kTile];                  // to be added to what key() returns

  Tile(const Call& call, std::int64_t index)
      : first(index * kTile), count(std::min(call.sizes.channels - first, kTile)), slow{}, fast{}, u{} {
    const simd::F32 d;
    for (std::int64_t i = 0; i < count; i += static_cast<std::int64_t>(hn::Lanes(d))) {
      const VF32 w = hn::Neg(simd::exp(d, load(call.time_decay, i)));
      const VF32 low = hn::IfThenElseZero(hn::Gt(w, hn::Set(d, kSlow)), w);
      hn::Store(low, d, slow + i);
      hn::Store(hn::Sub(w, low), d, fast + i);
      hn::Store(hn::Add(load(call.time_first, i), low), d, u + i);
    }
  }
  // Of a chunk's token j.
  template <class T>
  HWY_INLINE VF32 key(const T* row, std::int64_t i, std::int64_t j) const {
    const simd::F32 d;
    return hn::NegMulAdd(hn::Set(d, static_cast<float>(j + 1)), hn::Load(d, slow + i), load(row, i));
  }
  template <class T>
  HWY_INLINE VF32 load(const T* row, std::int64_t i) const {
    const simd::F32 d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    return kWhole || i + lanes <= count ? simd::load(d, row + first + i)
                                        : simd::load_part(d, row + first + i, count - i);
  }
  template <class T>
  HWY_INLINE void store(VF32 value, T* row, std::int64_t i) const {
    const simd::F32 d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    if (kWhole || i + lanes <= count) return simd::store(d, value, row + first + i);
    simd::store_part(d, value, row + first + i, count - i);
  }
};

// A e^-p, B e^-p and p of a tile.
struct States {
  alignas(64) float a[kTile], b[kTile], p[kTile];

  // From [3,E] of a sequence; null: nothing.
  void load(const float* from, std::int64_t channels, const auto& tile) {
    for (std::int64_t i = 0; i < kTile; ++i) {
      const float* at = from + tile.first + i;
      const bool holds = from != nullptr && i < tile.count && at[channels] > 0.0f;
      a[i] = holds ? at[0] : 0.0f;
      b[i] = holds ? at[channels] : 0.0f;
      p[i] = holds ? at[2 * channels] : static_cast<float>(kNothing);
    }
  }
  void store(float* to, std::int64_t channels, const auto& tile) const {
    std::copy_n(a, tile.count, to + tile.first);
    std::copy_n(b, tile.count, to + channels + tile.first);
    std::copy_n(p, tile.count, to + 2 * channels + tile.first);
  }
};

// Two exponents' larger, and e to each of them less that: one of the two is 1.
struct Weights {
  VF32 largest, first, second;

  HWY_INLINE Weights(VF32 x, VF32 y) {
    const simd::F32 d;
    const VF32 difference = hn::Sub(x, y), one = hn::Set(d, 1.0f);
    const VF32 smaller = simd::exp(d, hn::Neg(hn::Abs(difference)));
    const auto ahead = hn::Ge(difference, hn::Zero(d));
    largest = hn::Max(x, y);
    first = hn::IfThenElse(ahead, one, smaller);
    second = hn::IfThenElse(ahead, smaller, one);
  }
  HWY_INLINE VF32 of(VF32 x, VF32 y) const { return hn::MulAdd(first, x, hn::Mul(second, y)); }
  HWY_INLINE VF32 with_one(VF32 x) const { return hn::MulAdd(first, x, second); }
};

// What a tile's p or m was when a token last set it, and how many tokens ago: however many, it is rounded once.
struct Exponents {
  alignas(64) float set[kTile], age[kTile] = {};

  explicit Exponents(const float* exponents) { std::copy_n(exponents, kTile, set); }
  // To the next chunk, in place.
  HWY_INLINE void pass(const auto& tile, float* exponents) {
    const simd::F32 d;
    const VF32 tokens = hn::Set(d, static_cast<float>(kChunk));
    for (std::int64_t i = 0; i < tile.count; i += static_cast<std::int64_t>(hn::Lanes(d))) {
      const VF32 slow = hn::Load(d, tile.slow + i), now = hn::Load(d, exponents + i);
      const VF32 from = hn::Load(d, set + i), ago = hn::Load(d, age + i);
      const auto same = hn::Eq(now, hn::MulAdd(ago, slow, from));
      const VF32 since = hn::IfThenElse(same, from, now), next = hn::Add(hn::IfThenElseZero(same, ago), tokens);
      hn::Store(since, d, set + i);
      hn::Store(next, d, age + i);
      hn::Store(hn::MulAdd(next, slow, since), d, exponents + i);
    }
  }
};

// The state behind a token, in place.
HWY_INLINE void advance(const auto& tile, States& states, std::int64_t i, VF32 k, VF32 v) {
  const simd::F32 d;
  const Weights weights(hn::Add(hn::Load(d, states.p + i), hn::Load(d, tile.fast + i)), k);
  hn::Store(weights.of(hn::Load(d, states.a + i), v), d, states.a + i);
  hn::Store(weights.with_one(hn::Load(d, states.b + i)), d, states.b + i);
  hn::Store(weights.largest, d, states.p + i);
}

template <class T>
void forward_tile(const Call& call, std::int64_t n, std::int64_t index, const Outputs& out) {
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const TypedRows<T> k(call.in->k), v(call.in->v), r(call.in->r), y(out.y ? out.y : call.in->k);
  const std::int64_t channels = call.sizes.channels, state = n * 3 * channels;
  const Tile<false> tile(call, index);
  const Sequence sequence = sequence_at(call.in->k, call.in->cu_seqlens, n);
  const float* before = call.in->h0 ? call.in->h0.as<float>() + state : nullptr;
  if (sequence.begin == sequence.end) {
    for (std::int64_t i = 0; out.ht && i < 3; ++i) {
      float* to = out.ht.as<float>() + state + i * channels + tile.first;
      before ? std::copy_n(before + i * channels + tile.first, tile.count, to) : std::fill_n(to, tile.count, 0.0f);
    }
    return;
  }
  States states;
  states.load(before, channels, tile);
  Exponents exponents(states.p);
  for (std::int64_t row = sequence.begin; row < sequence.end; ++row) {
    const std::int64_t token = row - sequence.begin;
    if (token > 0 && token % kChunk == 0) exponents.pass(tile, states.p);
    if (call.kept && token % kChunk == 0) {
      float* kept = call.state_kept(n, sequence.begin, token / kChunk, index);
      std::copy_n(states.a, kTile, kept);
      std::copy_n(states.b, kTile, kept + call.padded);
      std::copy_n(states.p, kTile, kept + 2 * call.padded);
    }
    const T *keys = k[row], *values = v[row], *gates = r[row];
    T* outputs = y[row];
    for (std::int64_t i = 0; i < tile.count; i += lanes) {
      const VF32 key = tile.key(keys, i, token % kChunk), value = tile.load(values, i);
      if (out.y) {
        const Weights weights(hn::Load(d, states.p + i), hn::Add(hn::Load(d, tile.u + i), key));
        const VF32 sum = weights.of(hn::Load(d, states.a + i), value);
        const VF32 total = weights.with_one(hn::Load(d, states.b + i));
        const VF32 closed = hn::Add(hn::Set(d, 1.0f), simd::exp(d, hn::Neg(tile.load(gates, i))));
        tile.store(hn::Div(sum, hn::Mul(total, closed)), outputs, i);
      }
      advance(tile, states, i, key, value);
    }
  }
  if (!out.ht) return;
  const auto tokens = static_cast<float>((sequence.end - sequence.begin - 1) % kChunk + 1);
  for (std::int64_t i = 0; i < tile.count; ++i) states.p[i] += tokens * tile.slow[i];
  states.store(out.ht.as<float>() + state, channels, tile);
}

template <class T>
void forward_of(Context& context, const Call& call, const Outputs& out) {
  const std::int64_t tiles = call.tiles();
  parallel_for(context, call.sizes.sequences * tiles,
               [&](std::int64_t task) { forward_tile<T>(call, task / tiles, task % tiles, out); });
}

// What backward carries from token to token: gradients of a state's A and, negative, of its B in units of e^m; sums.
struct Carried {
  alignas(64) float P[kTile] = {}, Q[kTile] = {}, m[kTile], dw[kTile] = {}, du[kTile] = {};
  Carried() { std::fill_n(m, kTile, static_cast<float>(kNothing)); }
};

template <class T>
struct Backward {
  const Call& call;
  TypedRows<T> k, v, r, dy, dk, dv, dr;

  // A chunk's token j. `states`: before it.
  HWY_INLINE void token(const auto& tile, const States& states, std::int64_t row, std::int64_t j, std::int64_t i,
                        Carried& carried) const {
    const simd::F32 d;
    const VF32 key = tile.key(k[row], i, j), value = tile.load(v[row], i), gradient = tile.load(dy[row], i);
    const VF32 open = simd::sigmoid(d, tile.load(r[row], i)), fast = hn::Load(d, tile.fast + i);
    const VF32 a = hn::Load(d, states.a + i), b = hn::Load(d, states.b + i), p = hn::Load(d, states.p + i);
    const Weights weights(p, hn::Add(hn::Load(d, tile.u + i), key));
    const VF32 inverse = hn::Div(hn::Set(d, 1.0f), weights.with_one(b)), y = hn::Mul(weights.of(a, value), inverse);
    const VF32 gated = hn::Mul(gradient, open), q = hn::Mul(gated, inverse), own = hn::Mul(weights.second, q);
    const VF32 P = hn::Load(d, carried.P + i), Q = hn::Load(d, carried.Q + i), m = hn::Load(d, carried.m + i);
    const VF32 through = simd::exp(d, hn::Add(key, m)), to_first = hn::Mul(own, hn::Sub(value, y));
    tile.store(hn::Mul(hn::Mul(gated, y), hn::Sub(hn::Set(d, 1.0f), open)), dr[row], i);
    tile.store(hn::MulAdd(through, P, own), dv[row], i);
    tile.store(hn::MulAdd(through, hn::MulSub(value, P, Q), to_first), dk[row], i);
    hn::Store(hn::Add(hn::Load(d, carried.du + i), to_first), d, carried.du + i);
    const VF32 decayed = simd::exp(d, hn::Add(fast, hn::Add(p, m)));
    const VF32 to_decay = hn::MulSub(P, a, hn::Mul(Q, b));
    hn::Store(hn::MulAdd(decayed, to_decay, hn::Load(d, carried.dw + i)), d, carried.dw + i);
    const Weights past(hn::Add(m, fast), hn::Neg(weights.largest));
    hn::Store(past.of(P, q), d, carried.P + i);
    hn::Store(past.of(Q, hn::Mul(q, y)), d, carried.Q + i);
    hn::Store(past.largest, d, carried.m + i);
  }

  template <bool kWhole>
  void run(std::int64_t n, std::int64_t index) const {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(simd::F32()));
    const Tile<kWhole> tile(call, index);
    const Sequence sequence = sequence_at(call.in->k, call.in->cu_seqlens, n);
    Carried carried;
    Exponents exponents(carried.m);
    States states[kChunk];  // before each token of a chunk
    for (std::int64_t chunk = (sequence.end - sequence.begin + kChunk - 1) / kChunk; chunk-- > 0;) {
      const std::int64_t begin = sequence.begin + chunk * kChunk, end = std::min(sequence.end, begin + kChunk);
      if (end < sequence.end) exponents.pass(tile, carried.m);
      const float* kept = call.state_kept(n, sequence.begin, chunk, index);
      std::copy_n(kept, kTile, states[0].a);
      std::copy_n(kept + call.padded, kTile, states[0].b);
      std::copy_n(kept + 2 * call.padded, kTile, states[0].p);
      for (std::int64_t row = begin; row + 1 < end; ++row) {
        States& next = states[row - begin + 1];
        next = states[row - begin];
        for (std::int64_t i = 0; i < tile.count; i += lanes) {
          advance(tile, next, i, tile.key(k[row], i, row - begin), tile.load(v[row], i));
        }
      }
      for (std::int64_t row = end - 1; row >= begin; --row) {
        for (std::int64_t i = 0; i < tile.count; i += lanes) {
          token(tile, states[row - begin], row, row - begin, i, carried);
        }
      }
    }
    for (std::int64_t i = 0; i < tile.count; ++i) {
      call.dtime_decay[n * call.sizes.channels + tile.first + i] = (tile.slow[i] + tile.fast[i]) * carried.dw[i];
      call.dtime_first[n * call.sizes.channels + tile.first + i] = carried.du[i];
    }
  }
};

template <class T>
void backward_of(Context& context, const Call& call, const TensorView& dy, const InputGradients& to) {
  const Backward<T> backward{call,
                             TypedRows<T>(call.in->k),
                             TypedRows<T>(call.in->v),
                             TypedRows<T>(call.in->r),
                             TypedRows<T>(dy),
                             TypedRows<T>(to.dk),
                             TypedRows<T>(to.dv),
                             TypedRows<T>(to.dr)};
  const std::int64_t tiles = call.tiles();
  parallel_for(context, call.sizes.sequences * tiles, [&](std::int64_t task) {
    const std::int64_t n = task / tiles, index = task % tiles;
    call.is_whole(index) ? backward.template run<true>(n, index) : backward.template run<false>(n, index);
  });
}

void Forward(Context& context, const Call& call, const Outputs& out) {
  (call.in->k.dtype == DType::f32 ? forward_of<float> : forward_of<BFloat16>)(context, call, out);
}
void BackwardAll(Context& context, const Call& call, const TensorView& dy, const InputGradients& to) {
  (call.in->k.dtype == DType::f32 ? backward_of<float> : backward_of<BFloat16>)(context, call, dy, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::wkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::wkv {

HWY_EXPORT(Forward);
HWY_EXPORT(BackwardAll);

namespace {

std::int64_t padded_channels(std::int64_t channels) { return (channels + kTile - 1) / kTile * kTile; }

std::size_t simd_kept_bytes(const Inputs& inputs) {
  const Sizes sizes(inputs);
  const std::int64_t slots = sizes.rows / kChunk + sizes.sequences + 1;
  return static_cast<std::size_t>(slots * 3 * padded_channels(sizes.channels)) * sizeof(float);
}

// Parameters in f32, in scratch where they are not.
Call call_of(Context& context, const Inputs& in, const TensorView& kept) {
  const Sizes sizes(in);
  return {&in,
          sizes,
          weight_in_f32(context, in.time_decay, sizes.channels),
          weight_in_f32(context, in.time_first, sizes.channels),
          static_cast<float*>(kept.data),
          padded_channels(sizes.channels),
          nullptr,
          nullptr};
}

void simd_forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  const ArenaScope scope(context.scratch());
  const Call call = call_of(context, inputs, outputs.kept);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Forward)(context, call, outputs);
}

void simd_backward(Context& context, const Inputs& inputs, const TensorView& kept_before, const TensorView& dy,
                   const InputGradients& to) {
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  TensorView kept = kept_before;
  if (!kept) {
    kept = scratch.tensor({static_cast<std::int64_t>(simd_kept_bytes(inputs))}, DType::u8, "wkv: states");
    simd_forward(context, inputs, {{}, {}, kept});
  }
  Call call = call_of(context, inputs, kept);
  const Shape sums({call.sizes.sequences, call.sizes.channels});
  const TensorView decay = scratch.tensor(sums, DType::f32, "wkv: sums");
  const TensorView first = scratch.tensor(sums, DType::f32, "wkv: sums");
  call.dtime_decay = static_cast<float*>(decay.data);
  call.dtime_first = static_cast<float*>(first.data);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(BackwardAll)(context, call, dy, to);
  elementwise::column_sum(context, decay, to.dtime_decay, true);
  elementwise::column_sum(context, first, to.dtime_first, true);
}

void simd_step(Context& context, const Inputs& inputs, const TensorView& state, const TensorView& y) {
  Inputs batch = as_batch(inputs);
  batch.h0 = state;  // each task reads its part before it writes it
  simd_forward(context, batch, {as_batch(y), state, {}});
}

}  // namespace

const Implementation kSimd{
    "simd",
    Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    simd_kept_bytes,
    simd_forward,
    simd_backward,
    simd_step};

}  // namespace flashgla::ops::wkv
#endif

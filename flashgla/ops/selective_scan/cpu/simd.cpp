// A vector holds neighbouring channels, each lane a channel with its states in K further vectors. A task is a tile of
// channels of one sequence. Backward goes through the chunks of tokens from the last to the first, each from the state
// kept at its beginning; gradients of b and c are summed over a tile's vectors, then over its lanes, then over the
// tiles, in that order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/rows.h"
#include "flashgla/ops/selective_scan/implementations.h"
#include "flashgla/ops/weight_in_f32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/selective_scan/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

#ifndef FLASHGLA_SELECTIVE_SCAN_CALL
#define FLASHGLA_SELECTIVE_SCAN_CALL
namespace flashgla::ops::selective_scan {

constexpr std::int64_t kTile = 128;  // channels of a task
constexpr std::int64_t kChunk = 16;  // tokens between states that are kept
constexpr std::int64_t kMostStates = 64;

// What the loops know of a call. Tensors of a token's channels are in the activations' dtype; null: not wanted.
struct Call {
  const Inputs* in;
  Sizes sizes;
  const float *b, *c;  // [rows,K]
  const float *dt_bias, *a_log, *skip;
  float* kept;                   // [slots,K,padded]
  std::int64_t padded;           // channels, to whole tiles
  float *partial_b, *partial_c;  // [tiles,rows,K]
  float *da_log, *dskip;         // [N,E,K], [N,E]

  std::int64_t tiles() const { return padded / kTile; }
  // Of chunk i of a sequence, so that sequences' chunks never share one.
  std::int64_t slot(std::int64_t n, std::int64_t begin, std::int64_t i) const { return begin / kChunk + n + i; }
};

}  // namespace flashgla::ops::selective_scan
#endif

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::selective_scan {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

constexpr std::int64_t kMostLanes = HWY_MAX_BYTES / sizeof(float);

// Some neighbouring channels: all lanes, or the first `count`.
struct Lanes {
  simd::F32 d;
  std::int64_t begin, count;
  bool whole;

  Lanes(std::int64_t first, std::int64_t end)
      : begin(first),
        count(std::min<std::int64_t>(static_cast<std::int64_t>(hn::Lanes(simd::F32())), end - first)),
        whole(count == static_cast<std::int64_t>(hn::Lanes(simd::F32()))) {}
  template <class T>
  HWY_INLINE VF32 load(const T* row) const {
    return whole ? simd::load(d, row + begin) : simd::load_part(d, row + begin, count);
  }
  template <class T>
  HWY_INLINE void store(VF32 value, T* row) const {
    whole ? simd::store(d, value, row + begin) : simd::store_part(d, value, row + begin, count);
  }
};

// What is the same for all tokens of some channels.
struct Channels {
  alignas(64) float a[kMostStates][kMostLanes];  // -exp(a_log)
  VF32 dt_bias, skip;

  Channels(const Call& call, const Lanes& lanes) : dt_bias(lanes.load(call.dt_bias)), skip(lanes.load(call.skip)) {
    const std::int64_t K = call.sizes.states;
    for (std::int64_t k = 0; k < K; ++k) {
      for (std::int64_t i = 0; i < kMostLanes; ++i) {
        a[k][i] = i < lanes.count ? -std::exp(call.a_log[(lanes.begin + i) * K + k]) : 0.0f;
      }
    }
  }
};

HWY_INLINE VF32 softplus(VF32 s) { return hn::Neg(simd::log_sigmoid(simd::F32(), hn::Neg(s))); }

// States [K][lanes] of a sequence's start or end, from and to [E,K].
HWY_INLINE void load_states(const float* from, const Lanes& lanes, std::int64_t K, float (*h)[kMostLanes]) {
  for (std::int64_t k = 0; k < K; ++k) {
    std::fill_n(h[k], kMostLanes, 0.0f);
    for (std::int64_t i = 0; from && i < lanes.count; ++i) h[k][i] = from[(lanes.begin + i) * K + k];
  }
}
HWY_INLINE void store_states(const float (*h)[kMostLanes], const Lanes& lanes, std::int64_t K, float* to) {
  for (std::int64_t k = 0; k < K; ++k) {
    for (std::int64_t i = 0; i < lanes.count; ++i) to[(lanes.begin + i) * K + k] = h[k][i];
  }
}

// to = the states behind a token, from those before; returns the sum over them with the skip.
HWY_INLINE VF32 advance(const Call& call, const Channels& channels, const float (*h)[kMostLanes],
                        float (*to)[kMostLanes], std::int64_t row, VF32 x, VF32 dt) {
  const simd::F32 d;
  const std::int64_t K = call.sizes.states;
  const float *b = call.b + row * K, *c = call.c + row * K;
  const VF32 driven = hn::Mul(dt, x);
  VF32 sum = hn::Mul(channels.skip, x);
  for (std::int64_t k = 0; k < K; ++k) {
    const VF32 decay = simd::exp(d, hn::Mul(dt, hn::Load(d, channels.a[k])));
    const VF32 state = hn::MulAdd(decay, hn::Load(d, h[k]), hn::Mul(driven, hn::Set(d, b[k])));
    hn::Store(state, d, to[k]);
    sum = hn::MulAdd(hn::Set(d, c[k]), state, sum);
  }
  return sum;
}

template <class T>
void forward_lanes(const Call& call, std::int64_t n, const Lanes& lanes, const Outputs& out) {
  const simd::F32 d;
  const Sizes& sizes = call.sizes;
  const TypedRows<T> x(call.in->x), raw(call.in->raw), z(call.in->z), y(out.y ? out.y : call.in->x);
  alignas(64) float h[kMostStates][kMostLanes];
  const std::int64_t states = n * sizes.channels * sizes.states;
  load_states(call.in->h0 ? call.in->h0.as<float>() + states : nullptr, lanes, sizes.states, h);
  const Channels channels(call, lanes);
  const Sequence sequence = sequence_at(call.in->x, call.in->cu_seqlens, n);
  for (std::int64_t row = sequence.begin; row < sequence.end; ++row) {
    const std::int64_t token = row - sequence.begin;
    if (call.kept && token % kChunk == 0) {
      const std::int64_t slot = call.slot(n, sequence.begin, token / kChunk);
      for (std::int64_t k = 0; k < sizes.states; ++k) {
        lanes.store(hn::Load(d, h[k]), call.kept + (slot * sizes.states + k) * call.padded);
      }
    }
    const VF32 in = lanes.load(x[row]), dt = softplus(hn::Add(lanes.load(raw[row]), channels.dt_bias));
    const VF32 sum = advance(call, channels, h, h, row, in, dt);
    if (!out.y) continue;
    const VF32 gate = lanes.load(z[row]);
    lanes.store(hn::Mul(sum, hn::Mul(gate, simd::sigmoid(d, gate))), y[row]);
  }
  if (out.ht) store_states(h, lanes, sizes.states, out.ht.as<float>() + states);
}

template <class T>
void forward_of(Context& context, const Call& call, const Outputs& out) {
  const std::int64_t tiles = call.tiles();
  parallel_for(context, call.sizes.sequences * tiles, [&](std::int64_t task) {
    const std::int64_t first = task % tiles * kTile, end = std::min(call.sizes.channels, first + kTile);
    for (std::int64_t e = first; e < end;) {
      const Lanes lanes(e, end);
      forward_lanes<T>(call, task / tiles, lanes, out);
      e += lanes.count;
    }
  });
}

// Of one vector of channels, between its chunks.
struct Carried {
  alignas(64) float dh[kMostStates][kMostLanes], da[kMostStates][kMostLanes];
  alignas(64) float dskip[kMostLanes];
};

// Sums over a tile's vectors of what becomes db and dc of the chunk's tokens.
using TokenSums = float[kChunk][2][kMostStates][kMostLanes];

template <class T>
struct Backward {
  const Call& call;
  TypedRows<T> x, raw, z, dy, dx, draw, dz;

  // Tokens [begin, end) of the sequence whose states before them are kept in `slot`.
  void chunk(const Lanes& lanes, const Channels& channels, std::int64_t slot, std::int64_t begin, std::int64_t end,
             Carried& carried, TokenSums& sums) const {
    const simd::F32 d;
    const std::int64_t K = call.sizes.states;
    alignas(64) float h[kChunk + 1][kMostStates][kMostLanes];
    alignas(64) float outputs[kChunk][kMostLanes];
    for (std::int64_t k = 0; k < K; ++k) {
      hn::Store(lanes.load(call.kept + (slot * K + k) * call.padded), d, h[0][k]);
    }
    for (std::int64_t row = begin; row < end; ++row) {
      const VF32 dt = softplus(hn::Add(lanes.load(raw[row]), channels.dt_bias));
      const std::int64_t t = row - begin;
      hn::Store(advance(call, channels, h[t], h[t + 1], row, lanes.load(x[row]), dt), d, outputs[t]);
    }
    for (std::int64_t row = end - 1; row >= begin; --row) {
      const std::int64_t t = row - begin;
      const float *b = call.b + row * K, *c = call.c + row * K;
      const VF32 in = lanes.load(x[row]), s = hn::Add(lanes.load(raw[row]), channels.dt_bias), dt = softplus(s);
      const VF32 gate = lanes.load(z[row]), open = simd::sigmoid(d, gate), gradient = lanes.load(dy[row]);
      const VF32 silu = hn::Mul(gate, open), dsum = hn::Mul(gradient, silu);
      const VF32 slope = hn::NegMulAdd(silu, open, hn::Add(open, silu));
      lanes.store(hn::Mul(hn::Mul(gradient, hn::Load(d, outputs[t])), slope), dz[row]);
      hn::Store(hn::MulAdd(dsum, in, hn::Load(d, carried.dskip)), d, carried.dskip);
      const VF32 driven = hn::Mul(dt, in);
      VF32 to_driven = hn::Zero(d), to_dt = hn::Zero(d);
      for (std::int64_t k = 0; k < K; ++k) {
        const VF32 a = hn::Load(d, channels.a[k]), state = hn::Load(d, h[t + 1][k]), key = hn::Set(d, b[k]);
        const VF32 dh = hn::MulAdd(hn::Set(d, c[k]), dsum, hn::Load(d, carried.dh[k]));
        const VF32 decay = simd::exp(d, hn::Mul(dt, a));
        const VF32 through = hn::Mul(dh, hn::Mul(decay, hn::Load(d, h[t][k])));
        to_driven = hn::MulAdd(dh, key, to_driven);
        to_dt = hn::MulAdd(a, through, to_dt);
        hn::Store(hn::MulAdd(dt, through, hn::Load(d, carried.da[k])), d, carried.da[k]);
        hn::Store(hn::MulAdd(dh, driven, hn::Load(d, sums[t][0][k])), d, sums[t][0][k]);
        hn::Store(hn::MulAdd(dsum, state, hn::Load(d, sums[t][1][k])), d, sums[t][1][k]);
        hn::Store(hn::Mul(dh, decay), d, carried.dh[k]);
      }
      lanes.store(hn::MulAdd(to_driven, dt, hn::Mul(channels.skip, dsum)), dx[row]);
      lanes.store(hn::Mul(hn::MulAdd(to_driven, in, to_dt), simd::sigmoid(d, s)), draw[row]);
    }
  }

  void tile(std::int64_t n, std::int64_t index) const {
    const simd::F32 d;
    const Sizes& sizes = call.sizes;
    const std::int64_t K = sizes.states, first = index * kTile, end = std::min(sizes.channels, first + kTile);
    const auto width = static_cast<std::int64_t>(hn::Lanes(d)), vectors = (end - first + width - 1) / width;
    std::vector<Carried> carried(static_cast<std::size_t>(vectors));
    for (Carried& each : carried) each = {};
    const Sequence sequence = sequence_at(call.in->x, call.in->cu_seqlens, n);
    TokenSums sums;
    for (std::int64_t i = (sequence.end - sequence.begin + kChunk - 1) / kChunk; i-- > 0;) {
      const std::int64_t from = sequence.begin + i * kChunk, to = std::min(sequence.end, from + kChunk);
      for (std::int64_t t = 0; t < to - from; ++t) {
        for (int which = 0; which < 2; ++which) {
          for (std::int64_t k = 0; k < K; ++k) hn::Store(hn::Zero(d), d, sums[t][which][k]);
        }
      }
      for (std::int64_t v = 0; v < vectors; ++v) {
        const Lanes lanes(first + v * width, end);
        chunk(lanes, Channels(call, lanes), call.slot(n, sequence.begin, i), from, to,
              carried[static_cast<std::size_t>(v)], sums);
      }
      for (std::int64_t row = from; row < to; ++row) {
        for (std::int64_t k = 0; k < K; ++k) {
          const std::int64_t at = (index * sizes.rows + row) * K + k;
          call.partial_b[at] = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, sums[row - from][0][k])));
          call.partial_c[at] = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, sums[row - from][1][k])));
        }
      }
    }
    for (std::int64_t e = first; e < end; ++e) {
      const Carried& mine = carried[static_cast<std::size_t>((e - first) / width)];
      const std::int64_t lane = (e - first) % width, channel = n * sizes.channels + e;
      call.dskip[channel] = mine.dskip[lane];
      for (std::int64_t k = 0; k < K; ++k) {
        call.da_log[channel * K + k] = -std::exp(call.a_log[e * K + k]) * mine.da[k][lane];
      }
    }
  }
};

template <class T>
void backward_of(Context& context, const Call& call, const TensorView& dy, const InputGradients& to) {
  const Backward<T> backward{call,
                             TypedRows<T>(call.in->x),
                             TypedRows<T>(call.in->raw),
                             TypedRows<T>(call.in->z),
                             TypedRows<T>(dy),
                             TypedRows<T>(to.dx),
                             TypedRows<T>(to.draw),
                             TypedRows<T>(to.dz)};
  const std::int64_t tiles = call.tiles();
  parallel_for(context, call.sizes.sequences * tiles,
               [&](std::int64_t task) { backward.tile(task / tiles, task % tiles); });
  const TypedRows<T> db(to.db), dc(to.dc);
  const std::int64_t K = call.sizes.states;
  parallel_for_blocks(context, call.sizes.rows, rows_per_task(tiles * K), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t k = 0; k < K; ++k) {
        float b = 0.0f, c = 0.0f;
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
          b += call.partial_b[(tile * call.sizes.rows + row) * K + k];
          c += call.partial_c[(tile * call.sizes.rows + row) * K + k];
        }
        db[row][k] = static_cast<T>(b);
        dc[row][k] = static_cast<T>(c);
      }
    }
  });
}

// One token each; inputs are [N,E] and [N,K].
template <class T>
void step_of(Context& context, const Call& call, const TensorView& state, const TensorView& y_view) {
  const std::int64_t K = call.sizes.states, channels = call.sizes.channels, tiles = call.tiles();
  const TypedRows<T> x(call.in->x), raw(call.in->raw), z(call.in->z), y(y_view);
  parallel_for(context, x.count() * tiles, [&](std::int64_t task) {
    const simd::F32 d;
    const std::int64_t n = task / tiles, first = task % tiles * kTile, end = std::min(channels, first + kTile);
    for (std::int64_t e = first; e < end;) {
      const Lanes lanes(e, end);
      alignas(64) float h[kMostStates][kMostLanes];
      float* states = state.as<float>() + n * channels * K;
      load_states(states, lanes, K, h);
      const Channels of_lanes(call, lanes);
      const VF32 dt = softplus(hn::Add(lanes.load(raw[n]), of_lanes.dt_bias)), gate = lanes.load(z[n]);
      const VF32 sum = advance(call, of_lanes, h, h, n, lanes.load(x[n]), dt);
      lanes.store(hn::Mul(sum, hn::Mul(gate, simd::sigmoid(d, gate))), y[n]);
      store_states(h, lanes, K, states);
      e += lanes.count;
    }
  });
}

void Forward(Context& context, const Call& call, const Outputs& out) {
  (call.in->x.dtype == DType::f32 ? forward_of<float> : forward_of<BFloat16>)(context, call, out);
}
void BackwardAll(Context& context, const Call& call, const TensorView& dy, const InputGradients& to) {
  (call.in->x.dtype == DType::f32 ? backward_of<float> : backward_of<BFloat16>)(context, call, dy, to);
}
void Step(Context& context, const Call& call, const TensorView& state, const TensorView& y) {
  (call.in->x.dtype == DType::f32 ? step_of<float> : step_of<BFloat16>)(context, call, state, y);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::selective_scan
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::selective_scan {

HWY_EXPORT(Forward);
HWY_EXPORT(BackwardAll);
HWY_EXPORT(Step);

namespace {

std::int64_t padded_channels(std::int64_t channels) { return (channels + kTile - 1) / kTile * kTile; }

std::int64_t slots_of(const Sizes& sizes) { return sizes.rows / kChunk + sizes.sequences + 1; }

std::size_t simd_kept_bytes(const Inputs& inputs) {
  const Sizes sizes(inputs);
  return static_cast<std::size_t>(slots_of(sizes) * sizes.states * padded_channels(sizes.channels)) * sizeof(float);
}

// Parameters and states' inputs in f32, in scratch where they are not.
Call call_of(Context& context, const Inputs& in, const Sizes& sizes) {
  const auto wide = [&](const TensorView& view) {
    const TensorView copy = context.scratch().tensor(view.shape, DType::f32, "selective_scan: inputs");
    elementwise::convert(context, view, copy);
    return static_cast<const float*>(copy.data);
  };
  return {&in,
          sizes,
          wide(in.b),
          wide(in.c),
          weight_in_f32(context, in.dt_bias, sizes.channels),
          weight_in_f32(context, in.a_log.reshape(Shape({in.a_log.numel()})), in.a_log.numel()),
          weight_in_f32(context, in.skip, sizes.channels),
          nullptr,
          padded_channels(sizes.channels),
          nullptr,
          nullptr,
          nullptr,
          nullptr};
}

void simd_forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  const ArenaScope scope(context.scratch());
  Call call = call_of(context, inputs, Sizes(inputs));
  if (outputs.kept) call.kept = static_cast<float*>(outputs.kept.data);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Forward)(context, call, outputs);
}

void simd_backward(Context& context, const Inputs& inputs, const TensorView& kept_before, const TensorView& dy,
                   const InputGradients& to) {
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  TensorView kept = kept_before;
  if (!kept) {
    kept = scratch.tensor({static_cast<std::int64_t>(simd_kept_bytes(inputs))}, DType::u8, "selective_scan: states");
    simd_forward(context, inputs, {{}, {}, kept});
  }
  const Sizes sizes(inputs);
  Call call = call_of(context, inputs, sizes);
  const Shape partial({call.tiles(), sizes.rows, sizes.states});
  const TensorView b = scratch.tensor(partial, DType::f32, "selective_scan: sums");
  const TensorView c = scratch.tensor(partial, DType::f32, "selective_scan: sums");
  const TensorView da_log =
      scratch.tensor({sizes.sequences, sizes.channels * sizes.states}, DType::f32, "selective_scan: sums");
  const TensorView dskip = scratch.tensor({sizes.sequences, sizes.channels}, DType::f32, "selective_scan: sums");
  call.kept = static_cast<float*>(kept.data);
  call.partial_b = static_cast<float*>(b.data);
  call.partial_c = static_cast<float*>(c.data);
  call.da_log = static_cast<float*>(da_log.data);
  call.dskip = static_cast<float*>(dskip.data);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(BackwardAll)(context, call, dy, to);
  elementwise::column_sum(context, da_log, to.da_log.reshape(Shape({to.da_log.numel()})), true);
  elementwise::column_sum(context, dskip, to.dskip, true);
}

void simd_step(Context& context, const Inputs& in, const TensorView& state, const TensorView& y,
               const StepProjection&) {
  const ArenaScope scope(context.scratch());
  const auto as_batch = [](const TensorView& view) {  // [N,...] as [N,1,...]
    TensorView batch(view.data, view.dtype, Shape({view.size(0), 1, view.size(1)}), view.device);
    batch.stride = {view.stride[0], view.stride[0], view.stride[1]};
    return batch;
  };
  Inputs batch = in;
  for (TensorView* view : {&batch.x, &batch.raw, &batch.z, &batch.b, &batch.c}) *view = as_batch(*view);
  const Call call = call_of(context, batch, Sizes(batch));
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Step)(context, call, state, y);
}

}  // namespace

const Implementation kSimd{"simd",
                           Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             if (problem.states > kMostStates) {
                               return Support::no("at most " + std::to_string(kMostStates) + " states a channel");
                             }
                             return supports_f32_and_bf16({problem.dtype});
                           },
                           simd_kept_bytes,
                           simd_forward,
                           simd_backward,
                           simd_step,
                           [](const Inputs&, const StepProjection&) { return false; }};

}  // namespace flashgla::ops::selective_scan
#endif

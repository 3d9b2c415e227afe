// One pass over a token's channels each, a head at a time; tasks are tokens.
#include <cmath>

#include "flashgla/ops/rows.h"
#include "flashgla/ops/state_space/implementations.h"
#include "flashgla/ops/weight_in_f32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/state_space/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

#ifndef FLASHGLA_STATE_SPACE_PARAMETERS
#define FLASHGLA_STATE_SPACE_PARAMETERS
namespace flashgla::ops::state_space {
// Parameters in f32; bias null: zeros.
struct Parameters {
  const float *bias, *dt_bias, *a_log, *skip;
};
}  // namespace flashgla::ops::state_space
#endif

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::state_space {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

constexpr std::int64_t kTokens = 4;   // of a task
constexpr std::int64_t kPiece = 256;  // channels at a time

HWY_INLINE VF32 silu(VF32 x) { return hn::Mul(x, simd::sigmoid(simd::F32(), x)); }
// s + x s (1 - s) = s + y - y s
HWY_INLINE VF32 silu_slope(VF32 x) {
  const VF32 s = simd::sigmoid(simd::F32(), x), y = hn::Mul(x, s);
  return hn::NegMulAdd(y, s, hn::Add(s, y));
}
inline float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// out = c + bias.
template <class T>
HWY_INLINE void add_bias(const T* c, const float* bias, std::int64_t begin, std::int64_t count, float* out) {
  if (bias) {
    simd::map([](VF32 x, VF32 b) { return hn::Add(x, b); }, count, out, c + begin, bias + begin);
  } else {
    simd::map([](VF32 x) { return x; }, count, out, c + begin);
  }
}

// Calls body(begin, count) for pieces of [begin, end).
template <class Body>
HWY_INLINE void for_pieces(std::int64_t begin, std::int64_t end, const Body& body) {
  for (; begin < end; begin += kPiece) body(begin, std::min(kPiece, end - begin));
}

template <class T>
void forward_of(Context& context, const Inputs& in, const Outputs& out, const Parameters& p) {
  const TypedRows<T> c(in.c), raw(in.raw), u(out.u), v(out.v);
  const TypedRows<float> g(out.g);
  const Sizes sizes(out.v, in.c, in.raw.size(-1));
  parallel_for_blocks(context, c.count(), kTokens, [&](std::int64_t first, std::int64_t last) {
    alignas(64) float z[kPiece];
    for (std::int64_t row = first; row < last; ++row) {
      const T *from = c[row], *times = raw[row];
      T *to = u[row], *values = v[row];
      for_pieces(0, c.length(), [&](std::int64_t begin, std::int64_t count) {
        add_bias(from, p.bias, begin, count, z);
        simd::map([](VF32 x) { return silu(x); }, count, to + begin, static_cast<const float*>(z));
      });
      for (std::int64_t h = 0; h < sizes.heads; ++h) {
        const float dt = softplus(static_cast<float>(times[h]) + p.dt_bias[h]);
        g[row][h] = -std::exp(p.a_log[h]) * dt;
        const VF32 factor = hn::Set(simd::F32(), dt);
        simd::map([&](VF32 x) { return hn::Mul(factor, x); }, sizes.value_dim, values + h * sizes.value_dim,
                  static_cast<const T*>(to + h * sizes.value_dim));
      }
    }
  });
}

template <class T>
void backward_of(Context& context, const Inputs& in, const OutputGradients& from, const InputGradients& to,
                 const HeadTerms& terms, const Parameters& p) {
  const TypedRows<T> c(in.c), raw(in.raw), dv(from.dv), ds(from.ds), dc(to.dc), draw(to.draw);
  const TypedRows<float> dg(from.dg), ddt_bias(terms.ddt_bias), da_log(terms.da_log), dskip(terms.dskip);
  const Sizes sizes(from.dv, in.c, in.raw.size(-1));
  const KeyGradients keys(from.dk, sizes);
  const std::int64_t V = sizes.value_dim, K = keys.key_dim, group = keys.rows_a_group;
  parallel_for_blocks(context, c.count(), kTokens, [&](std::int64_t first, std::int64_t last) {
    const simd::F32 d;
    alignas(64) float z[kPiece], sum[kPiece];
    for (std::int64_t row = first; row < last; ++row) {
      for (std::int64_t h = 0; h < sizes.heads; ++h) {
        const float s = static_cast<float>(raw[row][h]) + p.dt_bias[h], dt = softplus(s);
        const float A = -std::exp(p.a_log[h]), gradient = dg[row][h];
        const VF32 step = hn::Set(d, dt), beside = hn::Set(d, p.skip[h]);
        float to_dt = A * gradient, to_skip = 0.0f;
        for_pieces(h * V, (h + 1) * V, [&](std::int64_t begin, std::int64_t count) {
          add_bias(c[row], p.bias, begin, count, z);
          const float* inputs = z;
          const T *values = dv[row] + begin, *sums = ds[row] + begin;
          to_dt += simd::sum([](VF32 x, VF32 dx) { return hn::Mul(silu(x), dx); }, count, inputs, values);
          to_skip += simd::sum([](VF32 x, VF32 dx) { return hn::Mul(silu(x), dx); }, count, inputs, sums);
          simd::map([&](VF32 x, VF32 to_v,
                        VF32 to_s) { return hn::Mul(hn::MulAdd(step, to_v, hn::Mul(beside, to_s)), silu_slope(x)); },
                    count, dc[row] + begin, inputs, values, sums);
        });
        ddt_bias[row][h] = to_dt * sigmoid(s);
        draw[row][h] = static_cast<T>(ddt_bias[row][h]);
        da_log[row][h] = gradient * A * dt;
        dskip[row][h] = to_skip;
      }
      for (const bool queries : {false, true}) {
        const T* each = (queries ? from.dq : from.dk).as<T>() + row * keys.rows * K;
        for (std::int64_t at = 0; at < sizes.states; at += K) {
          for_pieces(0, K, [&](std::int64_t begin, std::int64_t count) {
            std::fill_n(sum, count, 0.0f);
            for (std::int64_t h = at / K * group; h < (at / K + 1) * group; ++h) {
              simd::map([](VF32 total, VF32 one) { return hn::Add(total, one); }, count, sum,
                        static_cast<const float*>(sum), each + h * K + begin);
            }
            const std::int64_t channel = sizes.inner + (queries ? sizes.states : 0) + at + begin;
            add_bias(c[row], p.bias, channel, count, z);
            simd::map([](VF32 total, VF32 x) { return hn::Mul(total, silu_slope(x)); }, count, dc[row] + channel,
                      static_cast<const float*>(sum), static_cast<const float*>(z));
          });
        }
      }
    }
  });
}

template <class T>
void gate_of(Context& context, const TensorView& o_view, const TensorView& x_view, const TensorView& z_view,
             const TensorView& y_view, const float* skip, std::int64_t heads) {
  const TypedRows<T> o(o_view), x(x_view), z(z_view), y(y_view);
  const std::int64_t V = y.length() / heads;
  parallel_for_blocks(context, y.count(), kTokens, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t item = first * heads; item < last * heads; ++item) {
      const std::int64_t row = item / heads, h = item % heads;
      const VF32 beside = hn::Set(simd::F32(), skip[h]);
      simd::map([&](VF32 out, VF32 in, VF32 gate) { return hn::Mul(hn::MulAdd(beside, in, out), silu(gate)); }, V,
                y[row] + h * V, o[row] + h * V, x[row] + h * V, z[row] + h * V);
    }
  });
}

template <class T>
void gate_backward_of(Context& context, const TensorView& o_view, const TensorView& x_view, const TensorView& z_view,
                      const TensorView& dy_view, const TensorView& ds_view, const TensorView& dz_view,
                      const float* skip, std::int64_t heads) {
  const TypedRows<T> o(o_view), x(x_view), z(z_view), dy(dy_view), ds(ds_view), dz(dz_view);
  const std::int64_t V = dy.length() / heads;
  parallel_for_blocks(context, dy.count(), kTokens, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t item = first * heads; item < last * heads; ++item) {
      const std::int64_t row = item / heads, h = item % heads;
      const VF32 beside = hn::Set(simd::F32(), skip[h]);
      simd::map2(
          [&](VF32& to_s, VF32& to_z, VF32 out, VF32 in, VF32 gate, VF32 gradient) {
            to_s = hn::Mul(gradient, silu(gate));
            to_z = hn::Mul(hn::Mul(gradient, hn::MulAdd(beside, in, out)), silu_slope(gate));
          },
          V, ds[row] + h * V, dz[row] + h * V, o[row] + h * V, x[row] + h * V, z[row] + h * V, dy[row] + h * V);
    }
  });
}

void Forward(Context& context, const Inputs& in, const Outputs& out, const Parameters& p) {
  (in.c.dtype == DType::f32 ? forward_of<float> : forward_of<BFloat16>)(context, in, out, p);
}
void Backward(Context& context, const Inputs& in, const OutputGradients& from, const InputGradients& to,
              const HeadTerms& terms, const Parameters& p) {
  (in.c.dtype == DType::f32 ? backward_of<float> : backward_of<BFloat16>)(context, in, from, to, terms, p);
}
void GateOf(Context& context, const TensorView& o, const TensorView& x, const TensorView& z, const TensorView& y,
            const float* skip, std::int64_t heads) {
  (o.dtype == DType::f32 ? gate_of<float> : gate_of<BFloat16>)(context, o, x, z, y, skip, heads);
}
void GateBackward(Context& context, const TensorView& o, const TensorView& x, const TensorView& z, const TensorView& dy,
                  const TensorView& ds, const TensorView& dz, const float* skip, std::int64_t heads) {
  (o.dtype == DType::f32 ? gate_backward_of<float> : gate_backward_of<BFloat16>)(context, o, x, z, dy, ds, dz, skip,
                                                                                 heads);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::state_space
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::state_space {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);
HWY_EXPORT(GateOf);
HWY_EXPORT(GateBackward);

namespace {

Parameters parameters_of(Context& context, const Inputs& in, const TensorView& skip) {
  const auto wide = [&](const TensorView& vector) {
    return vector ? weight_in_f32(context, vector, vector.numel()) : nullptr;
  };
  return {wide(in.bias), wide(in.dt_bias), wide(in.a_log), wide(skip)};
}

void simd_forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  const ArenaScope scope(context.scratch());
  const Parameters parameters = parameters_of(context, inputs, {});
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Forward)(context, inputs, outputs, parameters);
}

void simd_backward(Context& context, const Inputs& inputs, const TensorView& skip, const OutputGradients& from,
                   const InputGradients& to) {
  const ArenaScope scope(context.scratch());
  const Parameters parameters = parameters_of(context, inputs, skip);
  const HeadTerms terms(context, inputs.raw);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Backward)(context, inputs, from, to, terms, parameters);
  add_up(context, terms, to);
}

void simd_gate(Context& context, const Gate& in, const TensorView& y) {
  const ArenaScope scope(context.scratch());
  const float* factors = weight_in_f32(context, in.skip, in.skip.numel());
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(GateOf)(context, in.o, in.x, in.z, y, factors, in.skip.numel());
}

void simd_gate_backward(Context& context, const Gate& in, const TensorView& dy, const TensorView& ds,
                        const TensorView& dz) {
  const ArenaScope scope(context.scratch());
  const float* factors = weight_in_f32(context, in.skip, in.skip.numel());
  if (context.planning()) return;
  HWY_DYNAMIC_DISPATCH(GateBackward)(context, in.o, in.x, in.z, dy, ds, dz, factors, in.skip.numel());
}

void simd_gate_norm(Context& context, const Gate& inputs, const TensorView& weight, double epsilon, const TensorView& y,
                    const TensorView& rstd) {
  gate_then_norm(context, simd_gate, inputs, weight, epsilon, y, rstd);
}

void simd_gate_norm_backward(Context& context, const Gate& inputs, const TensorView& weight, const TensorView& rstd,
                             const TensorView& dy, const TensorView& ds, const TensorView& dz,
                             const TensorView& dweight) {
  norm_then_gate_backward(context, simd_gate, simd_gate_backward, inputs, weight, rstd, dy, ds, dz, dweight);
}

}  // namespace

const Implementation kSimd{
    "simd",
    Device::Kind::cpu,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    simd_forward,
    simd_backward,
    simd_gate_norm,
    simd_gate_norm_backward};

}  // namespace flashgla::ops::state_space
#endif

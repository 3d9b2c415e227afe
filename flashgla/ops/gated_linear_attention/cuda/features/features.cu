// The host's order of the kernels before and after the operator without features (features/kernels.cuh).
#include <algorithm>
#include <limits>
#include <type_traits>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/features/normaliser.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

using namespace features;

namespace {

using flashgla::cuda::Begin;
using flashgla::cuda::launch;

Tokens tokens(const TensorView& view) {
  return view ? Tokens{strided(view), static_cast<int>(view.size(3))} : Tokens{};
}
// Calls f(whether every two neighbouring channels (2i, 2i + 1) of all of them lie in one aligned piece, as a constant).
template <class F>
void with_pairs(std::initializer_list<TensorView> views, F f) {
  const bool in_pairs = std::all_of(views.begin(), views.end(), [](const TensorView& view) {
    if (!view) return true;
    bool ok = view.size(3) % 2 == 0 && reinterpret_cast<std::uintptr_t>(view.data) % (2 * size_of(view.dtype)) == 0;
    for (int i = 0; i < 3; ++i) ok = ok && view.stride[i] % 2 == 0;
    return ok;
  });
  in_pairs ? f(std::true_type{}) : f(std::false_type{});
}
Map map_of(FeatureMap map) {
  switch (map) {
    case FeatureMap::elu_plus_one:
      return {0.0f, 1.0f};
    case FeatureMap::relu:
      return {0.0f, 0.0f};
    default:
      return {-std::numeric_limits<float>::infinity(), 0.0f};
  }
}

// What both directions share: workspace and the kernels before the plain operator.
struct Call {
  Context& context;
  const Problem& problem;
  Params p;  // sequences
  Inputs plain;
  Normaliser normaliser{};
  bool kept;  // phi(k), z and 1 / d are where the forward leaves them for the backward

  Call(Context& c, const Problem& of, const Inputs& inputs, const Outputs& outputs)
      : context(c),
        problem(of),
        p(make_params(of, inputs, outputs)),
        plain(inputs),
        kept(outputs.states && kept_features(of).bytes() > 0) {
    plan_chunks(context, p);
    Arena& scratch = context.scratch();
    plain.z0 = {};
    plain.q = scratch.tensor(inputs.q.shape, problem.dtype, "gla: features of q");
    const bool mapped = problem.feature_map != FeatureMap::identity;
    if (kept) {
      const KeptFeatures parts = kept_features(problem);
      char* const place =
          static_cast<char*>(outputs.states.data) + (outputs.states.bytes() - parts.bytes() - states_tag_bytes());
      normaliser.z_starts = reinterpret_cast<float*>(place);
      normaliser.inverses = reinterpret_cast<float*>(place + parts.z);
      if (mapped) {
        plain.k = TensorView(place + parts.z + parts.inverses, problem.dtype, inputs.k.shape, inputs.k.device);
      }
      return;
    }
    if (mapped) plain.k = scratch.tensor(inputs.k.shape, problem.dtype, "gla: features of k");
    if (problem.normalize) normaliser.z_starts = floats(problem.heads * problem.key_dim);
  }
  // Of every chunk.
  float* floats(std::int64_t each) {
    return take<float>(context, p.sequences.most_chunks * each * 4, "gla: normaliser");
  }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(context.stream()); }
  int tiles() const { return static_cast<int>((problem.key_dim + kWidth - 1) / kWidth); }
  unsigned blocks(std::int64_t heads) const { return static_cast<unsigned>(p.sequences.most_chunks * heads * tiles()); }
  // Of the tiles of so many heads; at most so many warps a tile.
  Parts parts(std::int64_t heads, int most) const {
    return Parts::of(blocks(heads), context.architecture().multiprocessors, most);
  }
  // f(an element of the call's dtype, as with_pairs). kNormalized: never f16.
  template <bool kNormalized, class F>
  void with_element(std::initializer_list<TensorView> views, F f) const {
    with_pairs(views, [&](auto pairs) {
      if constexpr (!kNormalized) {
        if (problem.dtype == DType::f16) return f(__half{}, pairs);
      }
      problem.dtype == DType::bf16 ? f(__nv_bfloat16{}, pairs) : f(float{}, pairs);
    });
  }
  // The kernels of a call after its first.
  Begin next() const {
    return context.architecture().cuda_capability == 90 ? Begin::beside_previous : Begin::after_previous;
  }
  void map(const MappedPair& pair, int count, std::initializer_list<TensorView> views) const {
    with_element<false>(views, [&](auto element, auto pairs) {
      launch("gated_linear_attention features",
             map_kernel<decltype(element), decltype(element), decltype(pairs)::value>,
             dim3(blocks(problem.query_heads), count), kThreads, 0, stream(), Begin::after_previous, p.sequences, pair,
             map_of(problem.feature_map));
    });
  }
  template <bool kBackwards>
  void scan(float* sums, int group, const TensorView& start, const TensorView& end) const {
    const std::int64_t tiles = (problem.key_dim + kScanLanes - 1) / kScanLanes;
    launch("gated_linear_attention normaliser states", scan_chunks_kernel<kBackwards>,
           dim3(static_cast<unsigned>(problem.sequences * problem.heads * tiles)), kScanLanes * kScanLanes, 0, stream(),
           next(), p.sequences, sums, p.heads, group, p.key_dim, static_cast<const float*>(start.data),
           static_cast<float*>(end.data));
  }
  // d_o: the backward, which finds what is kept.
  void prepare(const Inputs& inputs, const TensorView& zt, const TensorView& o, const TensorView& d_o) const {
    const bool mapped = problem.feature_map != FeatureMap::identity;
    const TensorView features = mapped ? plain.k : TensorView();
    const Mapped k{tokens(inputs.k), tokens(features), p.heads, normaliser.z_starts};
    if (!problem.normalize) {
      const Mapped q{tokens(inputs.q), tokens(plain.q), p.heads * p.group, nullptr};
      return map({{k, q}}, 2, {inputs.q, inputs.k, plain.q, features});
    }
    if (!kept || !d_o) {
      map({{k}}, 1, {inputs.k, features});
      scan<false>(normaliser.z_starts, 1, inputs.z0, zt);
    }
    const Parts of_tiles = parts(problem.query_heads, kWarps / tiles());
    with_element<true>({inputs.q, plain.k, plain.q, o, d_o}, [&](auto element, auto pairs) {
      using T = decltype(element);
      constexpr bool kPairs = decltype(pairs)::value;
      launch("gated_linear_attention denominators",
             d_o ? divide_kernel<T, kPairs, true> : divide_kernel<T, kPairs, false>,
             dim3(static_cast<unsigned>(p.sequences.most_chunks * problem.query_heads)),
             32 * std::min(kWarps, tiles() * of_tiles.count()), 0, stream(), next(), p.sequences, tokens(inputs.q),
             tokens(plain.k), tokens(plain.q), tokens(o), tokens(d_o), normaliser, map_of(problem.feature_map), p.heads,
             p.group, of_tiles);
    });
  }
};

// f16 has not the range of phi(q) / d: with a normaliser such calls go through f32.
Problem in_f32(const Problem& problem) {
  Problem wide = problem;
  wide.dtype = wide.gate_dtype = DType::f32;
  return wide;
}

void convert(const Context& context, const TensorView& from, const TensorView& to) {
  if (context.planning() || !from) return;
  Sequences s;
  s.count = from.size(0);
  s.length = from.size(1);
  s.most_chunks = s.count * s.chunks_each();
  const auto heads = static_cast<int>(from.size(2));
  const std::int64_t blocks = s.most_chunks * heads * ((from.size(3) + kWidth - 1) / kWidth);
  with_pairs({from, to}, [&](auto pairs) {
    constexpr bool kPairs = decltype(pairs)::value;
    launch("gated_linear_attention conversion",
           to.dtype == DType::f32 ? map_kernel<__half, float, kPairs> : map_kernel<float, __half, kPairs>,
           dim3(static_cast<unsigned>(blocks)), kThreads, 0, static_cast<cudaStream_t>(context.stream()),
           Begin::after_previous, s, MappedPair{{{tokens(from), tokens(to), heads, nullptr}}},
           map_of(FeatureMap::identity));
  });
}
// The same shape in f32, in workspace; nothing for nothing.
TensorView wide_like(Context& context, const TensorView& view) {
  return view ? context.scratch().tensor(view.shape, DType::f32, "gla: in f32") : TensorView();
}
TensorView widened(Context& context, const TensorView& view) {
  const TensorView wide = wide_like(context, view);
  convert(context, view, wide);
  return wide;
}
Inputs widened(Context& context, Inputs inputs) {
  for (TensorView* view : {&inputs.q, &inputs.k, &inputs.v}) *view = widened(context, *view);
  return inputs;
}

}  // namespace

void forward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                              const RestOfCall& rest) {
  const ArenaScope scope(context.scratch());
  if (goes_through_f32(problem)) {
    Outputs wide = outputs;
    wide.o = wide_like(context, outputs.o);
    forward_through_features(context, in_f32(problem), widened(context, inputs), wide, rest);
    return convert(context, wide.o, outputs.o);
  }
  const Call call(context, problem, inputs, outputs);
  if (!context.planning()) call.prepare(inputs, outputs.zt, {}, {});
  Outputs plain = outputs;
  plain.zt = {};
  rest({call.plain, plain});
}

void backward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                               const OutputGradients& d_out, const InputGradients& d_in, const RestOfCall& rest) {
  const ArenaScope scope(context.scratch());
  if (goes_through_f32(problem)) {
    Outputs wide = outputs;
    wide.o = widened(context, outputs.o);
    OutputGradients d_wide = d_out;
    d_wide.d_o = widened(context, d_out.d_o);
    InputGradients d_in_wide = d_in;
    constexpr TensorView InputGradients::*kNarrow[] = {&InputGradients::dq, &InputGradients::dk, &InputGradients::dv};
    for (const auto gradient : kNarrow) d_in_wide.*gradient = wide_like(context, d_in.*gradient);
    backward_through_features(context, in_f32(problem), widened(context, inputs), wide, d_wide, d_in_wide, rest);
    for (const auto gradient : kNarrow) convert(context, d_in_wide.*gradient, d_in.*gradient);
    return;
  }
  Call call(context, problem, inputs, outputs);
  Normaliser& w = call.normaliser;
  if (problem.normalize) {
    if (!call.kept) w.inverses = call.floats(problem.query_heads * kChunk);
    w.finds_inverses = call.kept;
    w.d_denominators = call.floats(problem.query_heads * kChunk);
    w.dz_sums = call.floats(problem.query_heads * problem.key_dim);
  }
  if (!context.planning()) {
    call.prepare(inputs, {}, outputs.o, problem.normalize ? d_out.d_o : TensorView());
    if (problem.normalize) call.scan<true>(w.dz_sums, call.p.group, d_out.d_zt, d_in.dz0);
  }
  Outputs plain = outputs;
  plain.zt = {};
  OutputGradients d_plain_out = d_out;
  d_plain_out.d_zt = {};
  InputGradients d_plain = d_in;
  d_plain.dz0 = {};
  rest({call.plain, plain, d_plain_out, d_plain});
  if (context.planning()) return;

  const Map map = map_of(problem.feature_map);
  const std::initializer_list<TensorView> views = {inputs.q, inputs.k, d_in.dq, d_in.dk};
  if (!problem.normalize) {
    call.with_element<false>(views, [&](auto element, auto pairs) {
      const MappedPair pair{{{tokens(inputs.k), tokens(d_in.dk), call.p.heads, nullptr},
                             {tokens(inputs.q), tokens(d_in.dq), call.p.heads * call.p.group, nullptr}}};
      launch("gated_linear_attention gradients of features", slope_kernel<decltype(element), decltype(pairs)::value>,
             dim3(call.blocks(problem.query_heads), 2), kThreads, 0, call.stream(), call.next(), call.p.sequences, pair,
             map);
    });
  } else if (d_in.dq || d_in.dk) {
    const Parts of_tiles = call.parts(problem.heads, kWarps);
    call.with_element<true>(views, [&](auto element, auto pairs) {
      launch("gated_linear_attention gradients of features", join_kernel<decltype(element), decltype(pairs)::value>,
             dim3(call.blocks(problem.heads)), 32 * of_tiles.count(), 0, call.stream(), call.next(), call.p.sequences,
             tokens(inputs.q), tokens(inputs.k), tokens(d_in.dq), tokens(d_in.dk), w, map, call.p.heads, call.p.group,
             of_tiles);
    });
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda

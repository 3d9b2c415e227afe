#include "flashgla/ops/gated_linear_attention/tests/cases.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "flashgla/base/memory.h"
#include "testing/compare.h"
#include "testing/random.h"

namespace flashgla::ops::gated_linear_attention {

namespace {

DType gate_dtype_of(const Case& c) { return c.dtype == DType::f64 ? DType::f64 : c.gate_dtype; }

std::int64_t total_length(const Case& c) {
  if (c.lengths.empty()) return c.length;
  std::int64_t total = 0;
  for (const std::int64_t length : c.lengths) total += length;
  return total;
}

// q | k | v side by side in one tensor [B, T, H K + G K + G V], as a fused projection leaves them.
std::vector<TensorView> fused_views(const Tensor& fused, std::int64_t query_heads, std::int64_t heads, std::int64_t K,
                                    std::int64_t V) {
  const std::int64_t q = query_heads * K;
  const std::int64_t k = heads * K;
  return {fused.view().slice(2, 0, q).split_last(query_heads), fused.view().slice(2, q, q + k).split_last(heads),
          fused.view().slice(2, q + k, q + k + heads * V).split_last(heads)};
}

// Element `index` of a gate of so many channels.
double gate_value(GateValues values, std::int64_t channels, std::uint64_t seed, std::uint64_t index) {
  const auto logsigmoid = [&] { return -std::log1p(std::exp(-testing::normal(seed, index))); };
  const std::uint64_t channel = index % static_cast<std::uint64_t>(channels), token = index - channel;
  switch (values) {
    case GateValues::trained:
      return logsigmoid() / 16.0;
    case GateValues::extreme: {
      const double u = testing::uniform(seed, index);
      if (u < 0.45) return 0.0;
      if (u < 0.70) return -1e-4;
      if (u < 0.90) return -1.0;
      if (u < 0.97) return -50.0;
      return -std::numeric_limits<double>::infinity();
    }
    case GateValues::times_1:
      return logsigmoid();
    case GateValues::times_2:
      return 2.0 * logsigmoid();
    case GateValues::times_4:
      return 4.0 * logsigmoid();
    case GateValues::times_16:
      return 16.0 * logsigmoid();
    case GateValues::times_64:
      return 64.0 * logsigmoid();
    case GateValues::fast_channels:
      return channel % 16 == 5 ? -3.0 : logsigmoid() / 16.0;
    case GateValues::resets:
      return testing::uniform(seed + 500, token) < 1e-3 ? -std::numeric_limits<double>::infinity()
                                                        : logsigmoid() / 16.0;
    case GateValues::mixed:
      return logsigmoid() * std::exp2(std::floor(testing::uniform(seed + 500, channel) * 11.0) - 4.0);
    case GateValues::steps:
      return testing::uniform(seed + 500, token) < 0.125 ? 0.0 : -6.7;
  }
  return 0.0;
}

// Constant gates are few: one of each value rather than a draw.
double constant_gate_value(const Case& c, std::int64_t head) {
  if (c.gate_values != GateValues::extreme) return std::log1p(-std::exp2(-5.0 - static_cast<double>(head)));
  const double values[] = {-1.0, -1e-4, -50.0, 0.0, -std::numeric_limits<double>::infinity()};
  return values[head % 5];
}

TensorView poisoned(const Shape& shape, DType dtype, std::vector<Tensor>& storage, Device device = Device::cpu()) {
  storage.push_back(Tensor::empty(shape, dtype, device));
  fill_with_nan(storage.back()->data, storage.back()->bytes(), device);
  return storage.back();
}

// A tensor of this shape with room between its tokens: rows of widths that are multiples of 16 bytes begin at such.
TensorView with_gaps(const Shape& shape, DType dtype, std::vector<Tensor>& storage, Device device = Device::cpu()) {
  const std::int64_t heads = shape[2];
  const std::int64_t channels = shape.rank() == 4 ? shape[3] : 1;
  const std::int64_t gap = channels % 8 == 0 ? 8 : 3;
  poisoned(Shape({shape[0], shape[1], heads * channels + gap}), dtype, storage, device);
  const TensorView part = storage.back().view().slice(2, 0, heads * channels);
  return shape.rank() == 4 ? part.split_last(heads) : part;
}

TensorView filled(const Shape& shape, DType dtype, bool strided, std::uint64_t seed, std::vector<Tensor>& storage) {
  if (strided && shape.rank() >= 3 && shape.rank() <= 4) {
    const TensorView view = with_gaps(shape, dtype, storage);
    copy(testing::random_normal(shape, dtype, seed), view);
    return view;
  }
  storage.push_back(testing::random_normal(shape, dtype, seed));
  return storage.back();
}

}  // namespace

std::vector<TensorView*> views_of(CaseData& data) {
  return {&data.in.q,  &data.in.k,          &data.in.v,      &data.in.g,       &data.in.gv,     &data.in.h0,
          &data.in.z0, &data.in.cu_seqlens, &data.d_out.d_o, &data.d_out.d_ht, &data.d_out.d_zt};
}

std::vector<TensorView*> views_of(Results& r) {
  return {&r.out.o,   &r.out.ht,  &r.out.zt,   &r.out.states, &r.d_in.dq, &r.d_in.dk,
          &r.d_in.dv, &r.d_in.dg, &r.d_in.dgv, &r.d_in.dh0,   &r.d_in.dz0};
}

TensorView mirrored(const TensorView& view, Device device, std::vector<Tensor>& storage) {
  if (!view) return {};
  std::int64_t span = 1;
  for (int i = 0; i < view.rank(); ++i) span += (view.size(i) - 1) * view.stride[i];
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype)),
             off = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view.data) % 16) / bytes;
  storage.push_back(Tensor::empty(Shape({off + span}), view.dtype, device));
  TensorView result = view;
  result.data = static_cast<char*>(storage.back()->data) + off * bytes;
  result.device = device;
  copy_memory(result.data, device, view.data, view.device, static_cast<std::size_t>(span * bytes));
  return result;
}

const char* name_of(GateValues values) {
  constexpr const char* names[] = {"trained", "extreme",       "x1",     "x2",    "x4",   "x16",
                                   "x64",     "fast channels", "resets", "mixed", "steps"};
  return names[static_cast<int>(values)];
}

std::vector<GateValues> gate_values() {
  std::vector<GateValues> all;
  for (int i = 0; i <= static_cast<int>(GateValues::steps); ++i) all.push_back(static_cast<GateValues>(i));
  return all;
}

std::string describe_case(const Case& c) {
  std::string text = "B" + std::to_string(c.lengths.empty() ? c.batch : 1) + " T" + std::to_string(total_length(c)) +
                     " H" + std::to_string(c.query_heads);
  if (c.heads != c.query_heads) text += " G" + std::to_string(c.heads);
  text += " K" + std::to_string(c.key_dim) + " V" + std::to_string(c.value_dim) + " " + name_of(c.dtype) + " " +
          name_of(c.gate) + " gate";
  if (!c.lengths.empty()) {
    text += ", " + std::to_string(c.lengths.size()) + " packed, longest " +
            std::to_string(*std::max_element(c.lengths.begin(), c.lengths.end())) + (c.tells_longest ? " told" : "");
  }
  if (!c.gates_over_keys) text += " (values only)";
  if (c.gate != GateKind::none && c.gate_values != GateValues::trained && c.gate_values != GateValues::extreme)
    text += std::string(" ") + name_of(c.gate_values);
  if (c.dtype == DType::bf16 && c.gate == GateKind::key && c.gate_dtype == DType::f32) text += " in f32";
  if (c.logits) text += " as logits";
  if (c.feature_map != FeatureMap::identity) text += std::string(", ") + name_of(c.feature_map);
  if (c.normalize) text += ", normalized";
  if (c.algorithm != Algorithm::automatic) text += std::string(", ") + name_of(c.algorithm);
  return text;
}

CaseData make_data(const Case& c, std::uint64_t seed) {
  const bool packed = !c.lengths.empty();
  const std::int64_t B = packed ? 1 : c.batch;
  const std::int64_t T = total_length(c);
  const std::int64_t N = packed ? static_cast<std::int64_t>(c.lengths.size()) : B;
  const std::int64_t K = c.key_dim;
  const std::int64_t V = c.value_dim;
  const DType state_dtype = c.dtype == DType::f64 ? DType::f64 : DType::f32;
  seed *= 1000;

  CaseData data;
  std::vector<Tensor>& storage = data.storage;
  Inputs& in = data.in;
  if (c.strided) {
    storage.push_back(testing::random_normal(Shape({B, T, c.query_heads * K + c.heads * (K + V)}), c.dtype, seed + 1));
    const auto views = fused_views(storage.back(), c.query_heads, c.heads, K, V);
    in.q = views[0];
    in.k = views[1];
    in.v = views[2];
  } else {
    in.q = filled(Shape({B, T, c.query_heads, K}), c.dtype, false, seed + 1, storage);
    in.k = filled(Shape({B, T, c.heads, K}), c.dtype, false, seed + 2, storage);
    in.v = filled(Shape({B, T, c.heads, V}), c.dtype, false, seed + 3, storage);
  }
  auto gate = [&](const Shape& shape, std::uint64_t stream) {
    const TensorView view = c.strided && shape.rank() > 1 ? with_gaps(shape, gate_dtype_of(c), storage)
                                                          : poisoned(shape, gate_dtype_of(c), storage);
    testing::fill_by_index(view, [&](std::uint64_t i) {
      return c.logits            ? testing::normal(seed + stream, i)
             : shape.rank() == 1 ? constant_gate_value(c, static_cast<std::int64_t>(i))
                                 : gate_value(c.gate_values, shape.rank() == 4 ? shape[3] : 1, seed + stream, i);
    });
    return view;
  };
  switch (c.gate) {
    case GateKind::none:
      break;
    case GateKind::constant:
      in.g = gate(Shape({c.heads}), 4);
      break;
    case GateKind::scalar:
      in.g = gate(Shape({B, T, c.heads}), 4);
      break;
    case GateKind::key:
      in.g = gate(Shape({B, T, c.heads, K}), 4);
      break;
    case GateKind::key_value:
      if (c.gates_over_keys) in.g = gate(Shape({B, T, c.heads, K}), 4);
      in.gv = gate(Shape({B, T, c.heads, V}), 5);
      break;
  }
  if (c.states) {
    in.h0 = filled(Shape({N, c.heads, K, V}), state_dtype, false, seed + 6, storage);
    data.d_out.d_ht = filled(Shape({N, c.heads, K, V}), state_dtype, false, seed + 9, storage);
    if (c.normalize) {
      // The normaliser's state is a sum of positive features.
      in.z0 = filled(Shape({N, c.heads, K}), state_dtype, false, seed + 7, storage);
      const Tensor z0 = testing::converted(in.z0, DType::f64);
      for (std::int64_t i = 0; i < z0->numel(); ++i) z0.as<double>()[i] = std::abs(z0.as<double>()[i]);
      copy(z0, in.z0);
      data.d_out.d_zt = filled(Shape({N, c.heads, K}), state_dtype, false, seed + 10, storage);
    }
  }
  if (packed) {
    storage.push_back(Tensor::empty(Shape({N + 1}), DType::i32));
    auto* offsets = storage.back().as<std::int32_t>();
    offsets[0] = 0;
    for (std::int64_t n = 0; n < N; ++n) offsets[n + 1] = offsets[n] + static_cast<std::int32_t>(c.lengths[n]);
    in.cu_seqlens = storage.back();
    if (c.tells_longest) data.options.max_seqlen = *std::max_element(c.lengths.begin(), c.lengths.end());
  }
  data.d_out.d_o = filled(Shape({B, T, c.query_heads, V}), c.dtype, c.strided, seed + 8, storage);
  data.options.feature_map = c.feature_map;
  data.options.normalize = c.normalize;
  data.options.algorithm = c.algorithm;
  if (c.logits) {
    data.options.gate_logit_normalizer = 16.0;
    if (c.value_dim > 64) data.options.gate_clamp_min = -0.1;  // a tenth of them
  }
  return data;
}

CaseData on_device(const CaseData& data, Device device) {
  CaseData result;
  result.in = data.in;
  result.d_out = data.d_out;
  result.options = data.options;
  for (TensorView* view : views_of(result)) *view = mirrored(*view, device, result.storage);
  return result;
}

TokenRange tokens_of(const CaseData& data, std::int64_t n) {
  if (!data.in.cu_seqlens) return {n, 0, data.in.q.size(1)};
  const auto* offsets = data.in.cu_seqlens.as<std::int32_t>();
  return {0, offsets[n], offsets[n + 1]};
}

namespace {
// [B,T,heads,...] to the tokens' heads [first, first + count).
TensorView narrowed(const TensorView& view, const TokenRange& tokens, std::int64_t first, std::int64_t count) {
  return view ? view.slice(0, tokens.batch, tokens.batch + 1)
                    .slice(1, tokens.begin, tokens.end)
                    .slice(2, first, first + count)
              : view;
}
// [N,G,...] to one state.
TensorView narrowed_state(const TensorView& view, std::int64_t n, std::int64_t head) {
  return view ? view.slice(0, n, n + 1).slice(1, head, head + 1) : view;
}
}  // namespace

CaseData one_head(const CaseData& data, std::int64_t n, std::int64_t head) {
  const std::int64_t group = data.in.q.size(2) / data.in.k.size(2);
  const TokenRange tokens = tokens_of(data, n);
  CaseData result;
  result.options = data.options;
  result.options.max_seqlen = 0;
  result.in.q = narrowed(data.in.q, tokens, head * group, group);
  result.in.k = narrowed(data.in.k, tokens, head, 1);
  result.in.v = narrowed(data.in.v, tokens, head, 1);
  result.in.g = data.in.g.rank() == 1 ? data.in.g.slice(0, head, head + 1) : narrowed(data.in.g, tokens, head, 1);
  result.in.gv = narrowed(data.in.gv, tokens, head, 1);
  result.in.h0 = narrowed_state(data.in.h0, n, head);
  result.in.z0 = narrowed_state(data.in.z0, n, head);
  result.d_out.d_o = narrowed(data.d_out.d_o, tokens, head * group, group);
  result.d_out.d_ht = narrowed_state(data.d_out.d_ht, n, head);
  result.d_out.d_zt = narrowed_state(data.d_out.d_zt, n, head);
  return result;
}

Results one_head(const Results& results, const TokenRange& tokens, std::int64_t n, std::int64_t head,
                 std::int64_t group) {
  Results result;
  result.out.o = narrowed(results.out.o, tokens, head * group, group);
  result.out.ht = narrowed_state(results.out.ht, n, head);
  result.out.zt = narrowed_state(results.out.zt, n, head);
  result.d_in.dq = narrowed(results.d_in.dq, tokens, head * group, group);
  result.d_in.dk = narrowed(results.d_in.dk, tokens, head, 1);
  result.d_in.dv = narrowed(results.d_in.dv, tokens, head, 1);
  if (results.d_in.dg.rank() != 1) result.d_in.dg = narrowed(results.d_in.dg, tokens, head, 1);
  result.d_in.dgv = narrowed(results.d_in.dgv, tokens, head, 1);
  result.d_in.dh0 = narrowed_state(results.d_in.dh0, n, head);
  result.d_in.dz0 = narrowed_state(results.d_in.dz0, n, head);
  return result;
}

namespace {
void narrow_time(std::initializer_list<TensorView*> views, std::int64_t begin, std::int64_t end) {
  for (TensorView* view : views) {
    if (*view && view->rank() >= 3) *view = view->slice(1, begin, end);
  }
}
}  // namespace

CaseData slice_tokens(const CaseData& data, std::int64_t begin, std::int64_t end) {
  CaseData part;
  part.in = data.in;
  part.d_out = data.d_out;
  part.options = data.options;
  narrow_time({&part.in.q, &part.in.k, &part.in.v, &part.in.g, &part.in.gv, &part.d_out.d_o}, begin, end);
  return part;
}

Results slice_tokens(const Results& results, std::int64_t begin, std::int64_t end) {
  Results part;
  part.out = results.out;
  part.d_in = results.d_in;
  narrow_time({&part.out.o, &part.d_in.dq, &part.d_in.dk, &part.d_in.dv, &part.d_in.dg, &part.d_in.dgv}, begin, end);
  return part;
}

CaseData as_float64(const CaseData& data) {
  CaseData result;
  result.in = data.in;
  result.d_out = data.d_out;
  result.options = data.options;
  for (TensorView* view : views_of(result)) {
    if (!*view || !is_floating(view->dtype)) continue;
    result.storage.push_back(testing::converted(*view, DType::f64));
    *view = result.storage.back();
  }
  return result;
}

Results make_results(const CaseData& data, bool final_state, std::size_t states_bytes) {
  const Problem p = describe(data.in, data.options);
  const DType state_dtype = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  const Device device = data.in.q.device;
  const bool strided = !data.in.q.is_contiguous();
  Results results;
  std::vector<Tensor>& storage = results.storage;
  auto make = [&](const Shape& shape, DType dtype, bool gaps = false) {
    return gaps ? with_gaps(shape, dtype, storage, device) : poisoned(shape, dtype, storage, device);
  };
  const Shape h({p.sequences, p.heads, p.key_dim, p.value_dim});
  const Shape z({p.sequences, p.heads, p.key_dim});
  results.out.o = make(Shape({p.batch, p.length, p.query_heads, p.value_dim}), p.dtype, strided);
  if (final_state) {
    results.out.ht = make(h, state_dtype);
    if (p.normalize) results.out.zt = make(z, state_dtype);
  }
  if (states_bytes > 0) results.out.states = make(Shape({static_cast<std::int64_t>(states_bytes)}), DType::u8);
  if (strided) {
    make(Shape({p.batch, p.length, p.query_heads * p.key_dim + p.heads * (p.key_dim + p.value_dim)}), p.dtype);
    const auto views = fused_views(storage.back(), p.query_heads, p.heads, p.key_dim, p.value_dim);
    results.d_in.dq = views[0];
    results.d_in.dk = views[1];
    results.d_in.dv = views[2];
  } else {
    results.d_in.dq = make(data.in.q.shape, p.dtype);
    results.d_in.dk = make(data.in.k.shape, p.dtype);
    results.d_in.dv = make(data.in.v.shape, p.dtype);
  }
  auto gate_gradient = [&](const TensorView& gate) {
    if (!gate) return TensorView();
    return make(gate.shape, p.gate == GateKind::constant ? state_dtype : p.gate_dtype, strided && gate.rank() > 1);
  };
  results.d_in.dg = gate_gradient(data.in.g);
  results.d_in.dgv = gate_gradient(data.in.gv);
  if (data.in.h0) results.d_in.dh0 = make(h, state_dtype);
  if (data.in.z0) results.d_in.dz0 = make(z, state_dtype);
  return results;
}

Results on_cpu(const Results& results) {
  Results host;
  host.out = results.out;
  host.d_in = results.d_in;
  for (TensorView* view : views_of(host)) *view = mirrored(*view, Device::cpu(), host.storage);
  return host;
}

namespace {
std::vector<NamedView> present(std::initializer_list<NamedView> all) {
  std::vector<NamedView> result;
  std::copy_if(all.begin(), all.end(), std::back_inserter(result),
               [](const NamedView& v) { return static_cast<bool>(v.view); });
  return result;
}
}  // namespace

std::vector<NamedView> outputs_of(const Results& r) {
  return present({{"o", r.out.o, false}, {"ht", r.out.ht, false}, {"zt", r.out.zt, false}});
}

std::vector<NamedView> gradients_of(const Results& r) {
  return present({{"dq", r.d_in.dq, true},
                  {"dk", r.d_in.dk, true},
                  {"dv", r.d_in.dv, true},
                  {"dg", r.d_in.dg, true},
                  {"dgv", r.d_in.dgv, true},
                  {"dh0", r.d_in.dh0, true},
                  {"dz0", r.d_in.dz0, true}});
}

Results reference_results(const CaseData& data, bool final_state, bool gradients) {
  const CaseData exact = as_float64(data);
  Results results = make_results(exact, final_state, 0);
  Context context;
  context.force_implementation("reference");
  forward(context, exact.in, results.out, exact.options);
  if (gradients) backward(context, exact.in, results.out, exact.d_out, results.d_in, exact.options);
  return results;
}

double tolerance(DType dtype, bool gradient) {
  const double rounding = dtype == DType::bf16 || dtype == DType::f16 ? 0.64 * epsilon(dtype) : 0.0;
  const double accumulation = dtype == DType::f64 ? 2.2e4 * epsilon(DType::f64) : 84.0 * epsilon(DType::f32);
  return (gradient ? 2.0 : 1.0) * (rounding + accumulation);
}

const std::vector<Case>& conformance_cases() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> list;
    auto add = [&](std::string name, Case c) {
      c.name = std::move(name);
      list.push_back(std::move(c));
    };
    const GateKind kinds[] = {GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key, GateKind::key_value};
    const std::pair<GateValues, const char*> values[] = {{GateValues::trained, "trained"},
                                                         {GateValues::extreme, "extreme"}};
    const std::vector<std::int64_t> ragged = {0, 5, 64, 0, 0, 1, 130, 63, 0};

    for (const GateKind kind : kinds) {
      const std::string gate = std::string(name_of(kind)) + "_";
      for (const auto& [value, value_name] : values) {
        if (kind == GateKind::none && value == GateValues::extreme) continue;
        add(gate + value_name, {.heads = 2, .gate = kind, .gate_values = value});
        add(gate + value_name + "_T257", {.batch = 1,
                                          .length = 257,
                                          .query_heads = 5,
                                          .heads = 5,
                                          .key_dim = 16,
                                          .value_dim = 24,
                                          .gate = kind,
                                          .gate_values = value});
        add(gate + value_name + "_packed", {.gate = kind, .gate_values = value, .lengths = ragged});
      }
      add(gate + "grouped", {.query_heads = 6, .heads = 2, .gate = kind});
      add(gate + "one_group_packed_strided",
          {.query_heads = 3, .heads = 1, .gate = kind, .lengths = ragged, .strided = true});
      add(gate + "strided", {.query_heads = 2, .gate = kind, .strided = true});
      add(gate + "without_states", {.gate = kind, .states = false});
      for (const DType dtype : {DType::f64, DType::bf16, DType::f16}) {
        const std::string type = name_of(dtype);
        add(gate + type, {.length = 130, .gate = kind, .dtype = dtype});
        if (kind != GateKind::none) {
          add(gate + type + "_extreme",
              {.length = 130, .gate = kind, .gate_values = GateValues::extreme, .dtype = dtype});
        }
      }
      if (kind != GateKind::none) {
        add(gate + "bf16_gate_bf16", {.gate = kind, .dtype = DType::bf16, .gate_dtype = DType::bf16, .strided = true});
        add(gate + "f16_gate_f16", {.gate = kind, .dtype = DType::f16, .gate_dtype = DType::f16});
      }
    }
    for (const std::int64_t length : {1, 2, 15, 16, 17, 31, 63, 64, 127, 128, 300}) {
      for (const auto& [value, value_name] : values) {
        add("T" + std::to_string(length) + "_" + value_name, {.length = length, .gate_values = value});
      }
      add("T" + std::to_string(length) + "_bf16",
          {.length = length, .key_dim = 64, .value_dim = 64, .dtype = DType::bf16});
    }
    for (const auto& [value, value_name] : values) {
      // Closed forms of dg cancel over such lengths.
      add(std::string("T20000_") + value_name, {.batch = 1,
                                                .length = 20000,
                                                .query_heads = 1,
                                                .heads = 1,
                                                .key_dim = 16,
                                                .value_dim = 16,
                                                .gate_values = value});
    }
    add("T1048576", {.batch = 1, .length = 1 << 20, .query_heads = 1, .heads = 1, .key_dim = 3, .value_dim = 2});
    const std::pair<std::int64_t, std::int64_t> dimensions[] = {
        {1, 1},    {1, 64},    {64, 1},    {3, 5},     {17, 33},   {64, 64},  {100, 20},
        {20, 100}, {128, 256}, {250, 130}, {256, 512}, {511, 257}, {512, 512}};
    for (const auto& [K, V] : dimensions) {
      const std::string name = "K" + std::to_string(K) + "_V" + std::to_string(V);
      const std::int64_t length = K * V > 100000 ? 70 : 129;
      add(name, {.batch = 1, .length = length, .query_heads = 1, .heads = 1, .key_dim = K, .value_dim = V});
      add(name + "_bf16", {.batch = 1,
                           .length = length,
                           .query_heads = 1,
                           .heads = 1,
                           .key_dim = K,
                           .value_dim = V,
                           .dtype = DType::bf16});
      add(name + "_key_value_extreme", {.batch = 1,
                                        .length = length,
                                        .query_heads = 1,
                                        .heads = 1,
                                        .key_dim = K,
                                        .value_dim = V,
                                        .gate = GateKind::key_value,
                                        .gate_values = GateValues::extreme});
    }
    for (const FeatureMap map : {FeatureMap::elu_plus_one, FeatureMap::relu}) {
      const std::string name = name_of(map);
      add(name, {.gate = GateKind::none, .feature_map = map});
      add(name + "_key", {.gate = GateKind::key, .feature_map = map});
      add(name + "_normalized", {.gate = GateKind::none, .feature_map = map, .normalize = true});
      add(name + "_normalized_packed_grouped", {.query_heads = 4,
                                                .heads = 2,
                                                .gate = GateKind::none,
                                                .lengths = ragged,
                                                .feature_map = map,
                                                .normalize = true,
                                                .strided = true});
      add(name + "_normalized_without_states",
          {.length = 130, .gate = GateKind::none, .feature_map = map, .normalize = true, .states = false});
      add(name + "_normalized_bf16",
          {.gate = GateKind::none, .dtype = DType::bf16, .feature_map = map, .normalize = true});
      for (const std::int64_t K : {176, 320, 580}) {  // other numbers of tiles of 64
        add(name + "_normalized_" + std::to_string(K), {.length = 130,
                                                        .key_dim = K,
                                                        .gate = GateKind::none,
                                                        .dtype = DType::bf16,
                                                        .feature_map = map,
                                                        .normalize = true});
      }
      add(name + "_normalized_f64",
          {.gate = GateKind::none, .dtype = DType::f64, .feature_map = map, .normalize = true});
    }
    return list;
  }();
  return cases;
}

}  // namespace flashgla::ops::gated_linear_attention

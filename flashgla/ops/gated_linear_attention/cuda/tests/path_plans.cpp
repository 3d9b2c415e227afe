#include "flashgla/ops/gated_linear_attention/cuda/tests/path_plans.h"

#include <array>
#include <numeric>
#include <sstream>
#include <vector>

namespace flashgla::ops::gated_linear_attention {

TensorView without_memory(const Shape& shape, DType dtype) {
  return TensorView(reinterpret_cast<void*>(std::uintptr_t{1} << 20), dtype, shape, Device::cuda(0));
}

std::map<std::string, PathPlans> path_plans() {
  std::map<std::string, PathPlans> plans;
  std::istringstream text(kPathPlansText);
  std::array<std::string, 4> four;
  std::size_t count = 0;
  for (std::string line; std::getline(text, line);) {
    if (line.empty()) continue;
    if (line.front() != ' ') {
      four[count++ % 4] = line;
      continue;
    }
    std::istringstream names(line);
    for (std::string name; names >> name;) plans[name] = {four[0], four[1], four[2], four[3]};
  }
  return plans;
}

std::string written(const std::map<std::string, PathPlans>& plans) {
  std::map<std::string, std::vector<std::string>> cases;
  for (const auto& [name, p] : plans) {
    cases[p.hopper + "\n" + p.hopper_without_states + "\n" + p.portable + "\n" + p.portable_without_states].push_back(
        name);
  }
  std::string text;
  for (const auto& [four, names] : cases) {
    text += four + "\n";
    std::string line = " ";
    for (const std::string& name : names) {
      if (line.size() + 1 + name.size() > 118) {
        text += line + "\n";
        line = " ";
      }
      line += " " + name;
    }
    text += line + "\n";
  }
  return text;
}

Described described(const Case& c) {
  const bool packed = !c.lengths.empty();
  const std::int64_t B = packed ? 1 : c.batch,
                     T = packed ? std::accumulate(c.lengths.begin(), c.lengths.end(), std::int64_t{0}) : c.length;
  const std::int64_t H = c.query_heads, G = c.heads, K = c.key_dim, V = c.value_dim;
  const auto tokens = [&](std::int64_t heads, std::int64_t channels, DType dtype) {
    return without_memory({B, T, heads, channels}, dtype);
  };
  Inputs in{.q = tokens(H, K, c.dtype), .k = tokens(G, K, c.dtype), .v = tokens(G, V, c.dtype)};
  Outputs out{.o = tokens(H, V, c.dtype)};
  // As make_data lays them out: q | k | v as slices of one tensor, gaps in the others.
  const auto spread = [&](TensorView& view, std::int64_t step) {
    view.stride[0] = T * step;
    view.stride[1] = step;
  };
  const auto with_gap = [&](TensorView& view) {
    const std::int64_t channels = view.rank() == 4 ? view.size(3) : 1;
    if (c.strided) spread(view, view.size(2) * channels + (channels % 8 == 0 ? 8 : 3));
  };
  if (c.strided) {
    for (TensorView* view : {&in.q, &in.k, &in.v}) spread(*view, H * K + G * (K + V));
    const auto bytes = static_cast<std::int64_t>(size_of(c.dtype));
    in.k.data = static_cast<char*>(in.q.data) + H * K * bytes;
    in.v.data = static_cast<char*>(in.k.data) + G * K * bytes;
    with_gap(out.o);
  }
  switch (c.gate) {
    case GateKind::none:
      break;
    case GateKind::constant:
      in.g = without_memory({G}, c.gate_dtype);
      break;
    case GateKind::scalar:
      in.g = without_memory({B, T, G}, c.gate_dtype);
      with_gap(in.g);
      break;
    case GateKind::key:
    case GateKind::key_value:
      if (c.gate == GateKind::key || c.gates_over_keys) in.g = tokens(G, K, c.gate_dtype);
      if (c.gate == GateKind::key_value) in.gv = tokens(G, V, c.gate_dtype);
      for (TensorView* view : {&in.g, &in.gv}) {
        if (*view) with_gap(*view);
      }
  }
  if (packed) in.cu_seqlens = without_memory({static_cast<std::int64_t>(c.lengths.size()) + 1}, DType::i32);
  Options options{.algorithm = c.algorithm, .feature_map = c.feature_map, .normalize = c.normalize};
  if (c.logits) options.gate_logit_normalizer = 16.0;
  Described d{.inputs = in, .outputs = out, .options = options};
  d.problem = describe(in, options);
  d.layout = cuda::layout_of(d.problem, in, out);
  return d;
}

}  // namespace flashgla::ops::gated_linear_attention

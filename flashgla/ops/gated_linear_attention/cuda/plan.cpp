#include "flashgla/ops/gated_linear_attention/cuda/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <utility>

#include "flashgla/ops/gated_linear_attention/cuda/limits.h"
#include "flashgla/ops/gated_linear_attention/logits.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr std::int64_t kPieceBytes = 16;
// Below, a tile is mostly padding and bf16 operands have nothing to average over.
constexpr std::int64_t kFewChannels = 8;
constexpr std::int64_t kShortSequence = 16;  // mean tokens a sequence up to which a chunk is mostly empty
std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }
std::int64_t rounded_up(std::int64_t width, std::int64_t step) { return (width + step - 1) / step * step; }
std::int64_t key_tiles(const Problem& p) { return tiles_of(static_cast<int>(p.key_dim)); }
std::int64_t value_tiles(const Problem& p) { return tiles_of(static_cast<int>(p.value_dim)); }

// Upper bound of the number of chunks, all sequences together.
std::int64_t most_chunks(const Problem& p) {
  // Each packed sequence but the first may waste part of one chunk.
  return p.packed ? p.length / kChunk + p.sequences : p.batch * ((p.length + kChunk - 1) / kChunk);
}

// ---- what a problem alone tells ----

// Whether the algorithm that is asked for has chunks.
bool may_go_by_chunks(const Problem& p) {
  return p.algorithm != Algorithm::recurrent && p.algorithm != Algorithm::parallel;
}
// Whether chunks can serve the call, or the recurrence token by token must; for gates over values beside bf16 see
// below.
bool goes_by_chunks(const Problem& p) {
  const bool has_its_own = p.gate == GateKind::key_value && p.dtype == DType::bf16;
  return !has_its_own && p.feature_map == FeatureMap::identity && !p.normalize && p.key_dim >= kFewChannels &&
         p.value_dim >= kFewChannels && may_go_by_chunks(p) && p.batch * p.length > kShortSequence * p.sequences;
}
bool gates_values_by_chunks(const Problem& p) {
  if (p.dtype != DType::bf16 || p.gate != GateKind::key_value) return false;
  Problem other = p;
  other.gate = GateKind::key;
  return goes_by_chunks(other);
}
// The bf16 backward goes by chunks of states, however short the sequences are.
bool backward_in_chunks(const Problem& p) {
  return p.dtype == DType::bf16 && p.gate != GateKind::key_value && may_go_by_chunks(p) &&
         p.feature_map == FeatureMap::identity && !p.normalize && p.key_dim % 8 == 0 && p.value_dim % 8 == 0;
}
bool moves_pieces(const Problem& p) { return goes_by_chunks(p) || gates_values_by_chunks(p) || backward_in_chunks(p); }
bool turns_logits(const Problem& p) {
  return p.gate == GateKind::key && p.gate_dtype == DType::bf16 && goes_by_chunks(p) && backward_in_chunks(p);
}
// Where what is left goes by chunks.
bool goes_through_features(const Problem& p) {
  if (!p.normalize && p.feature_map == FeatureMap::identity) return false;
  const Problem plain = without_features(p);
  return goes_by_chunks(plain) || gates_values_by_chunks(plain);
}

// Heads that one pass may take, and one kernel; for others than the first what is kept goes on with what preparation
// leaves.
bool fits_one_pass(const Problem& p) { return p.key_dim <= kTile && p.value_dim <= 2 * kTile; }
bool is_narrow(const Problem& p) { return p.key_dim <= kTile && p.value_dim <= kTile; }

// Whether the one kernel of token gates on Hopper finds states between kept ones.
bool finds_between(const Problem& p, bool hopper) {
  return hopper && backward_in_chunks(p) && p.gate != GateKind::key && is_narrow(p) && p.group() == 1;
}

// Two passes without gates need no preparation of q and k, since TMA brings their rows as they are, where it fills up a
// sequence's last chunk with zeros (not packed) and the scale can be left to the ends: within these bounds neither a
// gradient of a state over the scale nor a score without it leaves the range of f32.
bool is_plain(const Problem& p, bool hopper) {
  const float scale = std::fabs(static_cast<float>(p.scale)), most = 0x1p30f;
  return hopper && p.gate == GateKind::none && !p.packed && scale >= 1.0f / most && scale <= most;
}

// ---- what tensors' strides and addresses tell ----

RowStrides side_by_side(const Problem& p, std::int64_t heads, std::int64_t channels) {
  return {.given = true, .batch = p.length * heads * channels, .token = heads * channels, .head = channels};
}
RowStrides gate_side_by_side(const Problem& p) {
  switch (p.gate) {
    case GateKind::none:
      return {};
    case GateKind::constant:
      return {.given = true, .head = 1};
    case GateKind::scalar:
      return side_by_side(p, p.heads, 1);
    default:
      return side_by_side(p, p.heads, p.key_dim);
  }
}

bool are_inputs_aligned(const Problem& p, const Layout& l) {
  const auto aligned = [&](const RowStrides& rows, std::int64_t channels, DType dtype) {
    return is_aligned(rows, p.length, channels, dtype);
  };
  return aligned(l.q, p.key_dim, p.dtype) && aligned(l.k, p.key_dim, p.dtype) && aligned(l.v, p.value_dim, p.dtype) &&
         aligned(l.gv, p.value_dim, p.gate_dtype) && (!has_gate_rows(p) || aligned(l.g, p.key_dim, p.gate_dtype));
}
// After copies: those that are aligned and as wide as they are to be stay.
Layout after_copies(const Layout& layout, const Problem& p, const Problem& aligned) {
  Layout l = layout;
  const auto align = [&](RowStrides& rows, std::int64_t heads, std::int64_t channels, std::int64_t width, DType dtype) {
    if (rows.given && !(is_aligned(rows, p.length, channels, dtype) && width == channels))
      rows = side_by_side(aligned, heads, width);
  };
  align(l.q, p.query_heads, p.key_dim, aligned.key_dim, p.dtype);
  align(l.k, p.heads, p.key_dim, aligned.key_dim, p.dtype);
  align(l.v, p.heads, p.value_dim, aligned.value_dim, p.dtype);
  align(l.o, p.query_heads, p.value_dim, aligned.value_dim, p.dtype);
  align(l.gv, p.heads, p.value_dim, aligned.value_dim, p.gate_dtype);
  if (has_gate_rows(p)) align(l.g, p.heads, p.key_dim, aligned.key_dim, p.gate_dtype);
  return l;
}

// Whether 31 bits count what lies between a tensor's first element and its last, in units of so many elements.
bool fits_31_bits(const Problem& p, const RowStrides& rows, std::int64_t heads, std::int64_t elements) {
  const std::int64_t extent = ((p.packed ? 1 : p.sequences) - 1) * std::abs(rows.batch) +
                              (p.length + kChunk) * std::abs(rows.token) + (heads - 1) * std::abs(rows.head);
  return extent < elements * (std::int64_t{1} << 31);
}

// ---- states ----

// Chunks from one bf16 state to the next. Of heads wider than a tile every second, since there states are most of the
// bytes that move, and pairs of chunks are what their backward goes by. Of others every one, but where one kernel finds
// those between: every fourth for that, every second where the backward goes by pairs too.
int spacing_of(const Problem& p, bool hopper, bool one_kernel) {
  if (!is_narrow(p)) return 1;
  if (!finds_between(p, hopper)) return 0;
  return one_kernel ? kFoundEveryLog2 : 1;
}

States states_of(const Problem& p, bool hopper, bool one_kernel) {
  States s;
  if (p.algorithm == Algorithm::chunk_recomputed) return s;
  const std::int64_t chunks = most_chunks(p), tiles = p.heads * key_tiles(p) * value_tiles(p);
  std::int64_t bytes = 0;
  if (p.sums_over_heads) {
    s.kind = StatesKind::images;
    bytes = sizes_of(p).states_bytes();
  } else if (gates_values_by_chunks(p)) {
    s.kind = StatesKind::gated;
    bytes = chunks * tiles * kImageBytes;
  } else if (goes_by_chunks(p) && p.dtype != DType::bf16) {
    s.kind = StatesKind::split;
    bytes = chunks * tiles * parts_of(p) * kImageBytes;
  } else if (backward_in_chunks(p)) {
    const bool plain = is_plain(p, hopper);
    s.kind = fits_one_pass(p) ? StatesKind::images : plain ? StatesKind::scores : StatesKind::prepared;
    s.every_log2 = spacing_of(p, hopper, one_kernel);
    Params sizes = sizes_of(p);
    set_spacing(sizes, s.every_log2);
    bytes = sizes.states_bytes();
    if (s.has_prepared()) bytes += chunks * p.query_heads * kImageBytes;
    if (s.kind == StatesKind::prepared) {
      bytes += chunks * key_tiles(p) * ((p.query_heads + p.heads) * kImageBytes + p.heads * kTile * 4);
    }
  }
  s.bytes = static_cast<std::size_t>(bytes);
  return s;
}

// ---- kernels ----

// Offsets of one pass are counted in 31 bits: in pieces of 8 elements, gates of tokens one by one.
bool offsets_fit(const Problem& p, const Layout& l, const Params& sizes) {
  return fits_31_bits(p, l.q, p.query_heads, 8) && fits_31_bits(p, l.k, p.heads, 8) &&
         fits_31_bits(p, l.v, p.heads, 8) && fits_31_bits(p, l.o, p.query_heads, 8) &&
         fits_31_bits(p, l.g, p.heads,
                      p.gate != GateKind::key      ? 1
                      : p.gate_dtype == DType::f32 ? 4
                                                   : 8) &&
         sizes.states_bytes() < std::int64_t{1} << 35;
}

// Two warpgroups a block where each sequence has an even number of them and no multiprocessor gets more for it; they
// have neighbouring heads where rows of these lie side by side in every tensor that is moved by tiles, and no two share
// a state.
void plan_one_pass(Plan& plan, const Layout& l, const Architecture& device) {
  const Problem& p = plan.problem;
  const std::int64_t of_sequence = p.query_heads * value_tiles(p), all = p.sequences * of_sequence;
  const auto most = [&](std::int64_t together) {
    return (all / together + device.multiprocessors - 1) / device.multiprocessors * together;
  };
  const bool fits = device.shared_memory >= 2 * kOnePassSharedBytes;
  plan.groups = fits && of_sequence % 2 == 0 && most(2) <= most(1) ? 2 : 1;
  const auto beside = [](const RowStrides& rows) { return rows.head == kTile; };
  plan.pairs = plan.hopper && plan.groups == 2 && p.key_dim == kTile && p.value_dim == kTile && p.group() == 1 &&
               beside(l.q) && beside(l.k) && beside(l.v) && beside(l.o) && (p.gate != GateKind::key || beside(l.g));
}

// Where the longest of packed sequences has more than so many chunks, which not all calls can have, time is cut so.
void cut_above(std::int64_t most, const TimeCut& so, const Params& sizes, std::int64_t& up_to, TimeCut& cut) {
  if (most >= sizes.sequences.chunks_each()) return;
  up_to = most;
  cut = so;
}

// Of several packed sequences, whose longest is not known, the form for sequences of one length, and for others two
// passes, if they are faster for one long sequence.
void plan_bf16_forward(Plan& plan, const Layout& l, const Params& sizes, int multiprocessors) {
  const Problem& p = plan.problem;
  const bool unknown = longest_is_unknown(sizes);
  const bool narrow = fits_one_pass(p) && offsets_fit(p, l, sizes);
  // The wide one keeps no states: what the backward wants beside them is not made on the way.
  const bool wide = plan.hopper && !l.states && p.key_dim <= 2 * kTile;
  const ForwardForm form = fastest_form(unknown ? with_all_alike(sizes) : sizes, narrow, wide, multiprocessors);
  const bool two_passes = form == ForwardForm::two_passes;
  plan.forward = form;
  if (two_passes) plan.forward_cut = cut_time(sizes, Direction::forward, multiprocessors);
  if (!unknown) return;
  const TimeCut cut = cut_time(with_one_long(sizes), Direction::forward, multiprocessors);
  cut_above(two_passes ? most_chunks_uncut(sizes, Direction::forward, cut, multiprocessors)
                       : most_chunks_of_form(sizes, form, cut, multiprocessors),
            cut, sizes, plan.forward_up_to, plan.forward_cut);
}

// Where states are kept for the one kernel, which are too few for chunks, these find theirs again.
void read_states_by_chunks(Plan& plan) {
  if (!finds_between(plan.problem, plan.hopper)) return;
  plan.finds_states = true;
  plan.backward_every_log2 = spacing_of(plan.problem, plan.hopper, false);
}

// bf16 by chunks, and short sequences whose backward goes by chunks.
void plan_bf16(Plan& plan, const Layout& l, const Architecture& device) {
  const Problem& p = plan.problem;
  const int multiprocessors = device.multiprocessors;
  const bool chunks = goes_by_chunks(p), may_be_one_kernel = is_narrow(p) && p.group() == 1;
  Params sizes = sizes_of(p);
  const bool unknown = longest_is_unknown(sizes);
  const bool faster =
      may_be_one_kernel && one_kernel_is_faster(unknown ? with_all_alike(sizes) : sizes, multiprocessors);
  plan.states = states_of(p, plan.hopper, faster);
  plan.backward_every_log2 = spacing_of(p, plan.hopper, faster);
  set_spacing(sizes, plan.backward_every_log2);
  plan.plain = is_plain(p, plan.hopper);
  if (chunks) plan_bf16_forward(plan, l, sizes, multiprocessors);
  // States are there, or one pass finds them without workspace.
  Layout inputs = l;
  inputs.o = {};
  const bool one_kernel =
      faster && (l.states || (chunks && offsets_fit(p, inputs, sizes))) && device.shared_memory >= kFusedSharedBytes;
  plan.finds_states = !l.states;
  if (plan.forward == ForwardForm::one_pass || (one_kernel && plan.finds_states)) plan_one_pass(plan, l, device);
  plan.backward = !one_kernel               ? BackwardForm::chunks
                  : p.gate == GateKind::key ? BackwardForm::key_gates
                                            : BackwardForm::token_gates;
  if (!one_kernel) plan.backward_cut = cut_time(sizes, Direction::backward, multiprocessors);
  if (unknown) {
    const TimeCut cut = cut_time(with_one_long(sizes), Direction::backward, multiprocessors);
    cut_above(one_kernel ? most_chunks_of_one_kernel(sizes, cut, multiprocessors)
                         : most_chunks_uncut(sizes, Direction::backward, cut, multiprocessors),
              cut, sizes, plan.backward_up_to, plan.backward_cut);
  }
  if (faster && !one_kernel) read_states_by_chunks(plan);
}

// Segments of time, where tiles of states are too few for `each` blocks a multiprocessor; less than `fewest` do not
// make up for walking time twice.
int segments_of(const Problem& p, const Architecture& device, std::int64_t each, std::int64_t fewest) {
  const std::int64_t tiles = p.sequences * p.heads * key_tiles(p) * value_tiles(p);
  const std::int64_t room = each * device.multiprocessors / tiles, chunks = most_chunks(p) / p.sequences;
  const auto segments = std::min<std::int64_t>({room, chunks / 8, 16});
  return segments < fewest ? 1 : static_cast<int>(segments);
}

void plan_f32_tiles(Plan& plan, const Layout& l, const Architecture& device) {
  const Problem& p = plan.problem;
  plan.forward = ForwardForm::f32_tiles;
  plan.states = states_of(p, plan.hopper, false);
  const bool fits = device.shared_memory >= split_gradients_shared(parts_of(p), p.group() > 1);
  plan.backward = fits ? BackwardForm::f32_tiles : BackwardForm::tokens;
  plan.finds_states = fits && !l.states;
  plan.forward_cut.segments = segments_of(p, device, 2, 3);
  if (fits) plan.backward_cut = plan.forward_cut;
}

void plan_value_gates(Plan& plan, const Layout& l, const Architecture& device) {
  plan.forward = ForwardForm::value_gates;
  plan.backward = BackwardForm::value_gates;
  plan.states = states_of(plan.problem, plan.hopper, false);
  plan.finds_states = !l.states;
  plan.forward_cut.segments = plan.backward_cut.segments = segments_of(plan.problem, device, 4, 1);
}

// q and k of all heads at once, dq and dk their sums; nothing stands around it.
void plan_shared_keys(Plan& plan, const Layout& l) {
  plan.rows = !are_inputs_aligned(plan.problem, l);
  plan.forward = ForwardForm::shared_keys;
  plan.backward = BackwardForm::shared_keys;
  plan.states = states_of(plan.problem, plan.hopper, false);
  plan.finds_states = !l.states;
}

}  // namespace

Problem without_logits(const Problem& p) {
  return p.gate_dtype == DType::bf16 ? with_gates(p, DType::bf16) : with_gates(p);
}

bool goes_through_f32(const Problem& p) { return p.normalize && p.dtype == DType::f16; }

Problem without_features(const Problem& problem) {
  Problem plain = problem;
  if (goes_through_f32(problem)) plain.dtype = plain.gate_dtype = DType::f32;
  plain.feature_map = FeatureMap::identity;
  plain.normalize = false;
  if (problem.normalize) plain.scale = 1.0;
  return plain;
}

Problem with_aligned_rows(const Problem& p) {
  const std::int64_t narrowest =
      has_gate_rows(p) ? std::min(bytes_of(p.dtype), bytes_of(p.gate_dtype)) : bytes_of(p.dtype);
  Problem aligned = p;
  aligned.key_dim = rounded_up(p.key_dim, kPieceBytes / narrowest);
  aligned.value_dim = rounded_up(p.value_dim, kPieceBytes / narrowest);
  return aligned;
}

bool takes_shared_keys(const Problem& p) {
  return p.sums_over_heads && p.dtype == DType::bf16 && p.gate == GateKind::scalar && p.group() == 1 &&
         p.value_dim == kTile && (p.key_dim == kTile || p.key_dim == 2 * kTile) &&
         p.feature_map == FeatureMap::identity && !p.has_logits() && may_go_by_chunks(p) && p.sequences < 65536;
}

int parts_of(const Problem& p) { return p.dtype == DType::f32 && p.float32_math == Float32Math::ieee ? 3 : 2; }

bool has_gate_rows(const Problem& p) { return p.gate == GateKind::key || p.gate == GateKind::key_value; }

RowStrides strides_of(const TensorView& view) {
  if (!view) return {};
  return {.given = true,
          .on_piece = reinterpret_cast<std::uintptr_t>(view.data) % kPieceBytes == 0,
          .batch = view.stride[0],
          .token = view.stride[1],
          .head = view.stride[2]};
}

bool is_aligned(const RowStrides& rows, std::int64_t tokens, std::int64_t channels, DType dtype) {
  if (!rows.given) return true;
  const std::int64_t bytes = bytes_of(dtype);
  bool ok = rows.on_piece && channels * bytes % kPieceBytes == 0 && (rows.token != 0 || tokens == 1) &&
            rows.token * bytes * kChunk < std::int64_t{1} << 31;
  for (const std::int64_t step : {rows.batch, rows.token, rows.head}) {
    ok = ok && step >= 0 && step * bytes % kPieceBytes == 0;
  }
  return ok;
}
bool is_aligned(const TensorView& view) {
  return !view || is_aligned(strides_of(view), view.size(1), view.size(3), view.dtype);
}

Layout layout_of(const Problem& problem, const Inputs& inputs, const Outputs& outputs) {
  Layout l{.q = strides_of(inputs.q),
           .k = strides_of(inputs.k),
           .v = strides_of(inputs.v),
           .g = strides_of(inputs.g),
           .gv = strides_of(inputs.gv),
           .o = strides_of(outputs.o)};
  if (problem.gate == GateKind::constant) l.g = {.given = true, .head = inputs.g.stride[0]};
  l.states = static_cast<bool>(outputs.states);
  return l;
}

Layout contiguous_layout(const Problem& p) {
  return {.q = side_by_side(p, p.query_heads, p.key_dim),
          .k = side_by_side(p, p.heads, p.key_dim),
          .v = side_by_side(p, p.heads, p.value_dim),
          .g = gate_side_by_side(p),
          .gv = p.gate == GateKind::key_value ? side_by_side(p, p.heads, p.value_dim) : RowStrides(),
          .o = side_by_side(p, p.query_heads, p.value_dim)};
}

Params sizes_of(const Problem& problem) {
  Params p;
  p.sequences.count = problem.sequences;
  p.sequences.length = problem.length;
  p.sequences.packed = problem.packed;
  p.sequences.longest = problem.packed ? problem.max_seqlen : problem.length;
  p.sequences.most_chunks = most_chunks(problem);
  p.heads = static_cast<int>(problem.heads);
  p.group = static_cast<int>(problem.group());
  p.key_dim = static_cast<int>(problem.key_dim);
  p.value_dim = static_cast<int>(problem.value_dim);
  p.gate = problem.gate;
  p.feature_map = problem.feature_map;
  p.dtype = problem.dtype;
  p.gate_dtype = problem.gate_dtype;
  p.normalize = problem.normalize;
  p.scale = static_cast<float>(problem.scale);
  p.logit_scale = problem.has_logits() ? static_cast<float>(1.0 / problem.gate_logit_normalizer) : 0.0f;
  p.gate_min = static_cast<float>(problem.gate_clamp_min);
  return p;
}

void set_spacing(Params& params, int every_log2) {
  params.states_every_log2 = every_log2;
  params.states_mask = params.states_every() - 1;
}

Plan make_plan(const Problem& problem, const Layout& layout, const Architecture& architecture, bool hopper) {
  Plan plan;
  Problem p = problem;
  Layout l = layout;
  if (p.algorithm == Algorithm::chunk_recomputed) l.states = false;
  plan.hopper = hopper;
  if (p.sums_over_heads) {
    plan.problem = p;
    plan_shared_keys(plan, l);
    return plan;
  }
  plan.gates = p.has_logits() && !(hopper && turns_logits(p) && are_inputs_aligned(p, l));
  if (plan.gates) {
    p = without_logits(p);
    const Layout made = contiguous_layout(p);
    if (l.g.given) l.g = made.g;
    if (l.gv.given) l.gv = made.gv;
  }
  plan.features = goes_through_features(p);
  if (plan.features) {
    const Layout made = contiguous_layout(p);
    plan.in_f32 = goes_through_f32(p);
    l.q = made.q;
    if (p.feature_map != FeatureMap::identity || plan.in_f32) l.k = made.k;
    if (plan.in_f32) {
      l.v = made.v;
      l.o = made.o;
    }
    p = without_features(p);
  }
  plan.pieces = moves_pieces(p);
  if (plan.pieces) {
    plan.rows = !are_inputs_aligned(p, l);
    const Problem aligned = with_aligned_rows(p);
    l = after_copies(l, p, aligned);
    p = aligned;
  }
  plan.problem = p;
  if (p.algorithm == Algorithm::parallel) {
    plan.forward = ForwardForm::parallel;
  } else if (gates_values_by_chunks(p)) {
    plan_value_gates(plan, l, architecture);
  } else if (goes_by_chunks(p) && p.dtype != DType::bf16) {
    plan_f32_tiles(plan, l, architecture);
  } else if (backward_in_chunks(p)) {
    plan_bf16(plan, l, architecture);
  }
  return plan;
}

Plan plan_of_call(const Problem& problem, const Layout& layout, const Architecture& architecture, bool hopper) {
  struct Made {
    Problem problem;
    Layout layout;
    Architecture architecture;
    bool hopper;
    Plan plan;
  };
  thread_local std::array<std::optional<Made>, 8> made;
  thread_local std::size_t planned = 0;
  for (const std::optional<Made>& m : made) {
    if (m && m->problem == problem && m->layout == layout && m->hopper == hopper && m->architecture == architecture) {
      return m->plan;
    }
  }
  Made now{problem, layout, architecture, hopper, make_plan(problem, layout, architecture, hopper)};
  return made[planned++ % made.size()].emplace(std::move(now)).plan;
}

Plan of_short_sequences(const Plan& plan) {
  Plan p = plan;
  p.forward_up_to = p.backward_up_to = 0;
  p.forward_cut = p.backward_cut = {};
  return p;
}
Plan of_long_sequences(const Plan& plan) {
  Plan p = plan;
  p.forward = ForwardForm::two_passes;
  p.backward = BackwardForm::chunks;
  p.forward_up_to = p.backward_up_to = 0;
  if (plan.backward != BackwardForm::chunks) read_states_by_chunks(p);
  return p;
}

std::size_t states_bytes(const Problem& problem, bool hopper) {
  const Problem p = goes_through_features(problem) ? without_features(problem) : problem;
  const States states = states_of(moves_pieces(p) ? with_aligned_rows(p) : p, hopper, false);  // one kernel takes less
  return states.bytes == 0 ? 0 : states.bytes + kept_features(problem).bytes() + states_tag_bytes();
}

KeptFeatures kept_features(const Problem& p) {
  if (!p.normalize || p.gate != GateKind::none || !goes_through_features(p)) return {};
  const auto bytes_of = [](std::int64_t count, std::size_t each) {
    return (static_cast<std::size_t>(count) * each + 255) / 256 * 256;
  };
  const std::int64_t chunks = most_chunks(p);
  KeptFeatures kept{bytes_of(chunks * p.heads * p.key_dim, 4), bytes_of(chunks * p.query_heads * kTile, 4)};
  if (p.feature_map != FeatureMap::identity) {
    kept.features = bytes_of(p.batch * p.length * p.heads * p.key_dim, goes_through_f32(p) ? 4 : size_of(p.dtype));
  }
  return kept;
}

std::size_t states_tag_bytes() {
#ifdef NDEBUG
  return 0;
#else
  return 16;
#endif
}

std::uint64_t States::tag() const {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const std::uint64_t word :
       {static_cast<std::uint64_t>(kind), static_cast<std::uint64_t>(every_log2), static_cast<std::uint64_t>(bytes)}) {
    hash = (hash ^ word) * 0x100000001b3u;
  }
  return hash;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
